"""`ferryman train`: what it is, what it makes and says."""

import inspect
import io
import json
import math

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from ferryman.cli import optimizer, training_run
from ferryman.cli.display import open_display
from ferryman.cli.engine_flags import SETTINGS
from ferryman.cli.main import app
from ferryman.cli.model_argument import SIZES
from ferryman.cli.run_directory import new_run
from ferryman.cli.train_options import OPTIONAL, TrainOptions
from ferryman.cli.training_run import TrainingRun
from ferryman.distributed.ranks import Ranks
from ferryman.engine import Engine
from support.commands import GPT, metrics, trained
from support.devices import torch_virtual

# What it is.


def test_every_engine_option_is_an_option():
    """`model`, `optimizer`, `loss` and `split` are code, or have options of their own; `trace` is --trace."""
    known = set(inspect.signature(Engine.__init__).parameters)
    own = {"self", "model", "optimizer", "loss", "reduction", "split", "trace"}
    assert set(SETTINGS) == known - own
    assert set(SETTINGS) <= set(inspect.signature(TrainOptions).parameters)


def test_help_shows_every_option_and_examples():
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "150"}).output
    for name in inspect.signature(TrainOptions).parameters:
        assert f"--{name.replace('_', '-')}" in shown or name == "model"
    assert shown.count("ferryman train ") >= 4
    assert all(f"{size} {gpt.parameters / 1e6:.1f}" in " ".join(shown.split()) for size, gpt in SIZES.items())
    assert shown.count("|none>") == len(OPTIONAL)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "adagrad"])
def test_optimizers(name, corpus, tmp_path):
    run = tmp_path / "run"
    arguments = ["--optimizer", name, "--weight-decay", 0.1, "--lr", 0.01, "--steps", 6, "--no-trace"]
    trained(GPT, "--data", corpus, "--output", run, *arguments)
    assert metrics(run)[-1]["loss"] < metrics(run)[0]["loss"]


def test_learning_rates():
    shares = [optimizer.learning_rate_factor("cosine", step, 100, 10) for step in range(101)]
    assert shares[:10] == [pytest.approx((step + 1) / 11) for step in range(10)]
    assert shares[10] == max(shares) == 1
    assert shares[100] == pytest.approx(0.1)
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert optimizer.learning_rate_factor("linear", 55, 100, 10) == pytest.approx(0.5)
    assert optimizer.learning_rate_factor("constant", 99, 100, 0) == 1


# What it makes.


def test_the_peak_is_of_allocated_memory_without_a_trace_too(corpus, tmp_path, virtual):
    arguments = ["--device", "virtual", "--validation", 0, "--steps", 1]
    torch.accelerator.reset_peak_memory_stats(virtual)
    trained(GPT, "--data", corpus, "-o", tmp_path / "run", *arguments, "--no-trace")
    allocated, reserved = (
        torch.accelerator.max_memory_allocated(virtual),
        torch.accelerator.max_memory_reserved(virtual),
    )
    assert 0 < metrics(tmp_path / "run")[0]["device_peak"] <= allocated < reserved


def test_a_run_on_text(corpus, tmp_path, virtual):
    run = tmp_path / "run"
    arguments = ["--device", "virtual", "--memory", "400KiB", "--steps", 8, "--lr", 0.01]
    shown = trained(
        GPT, "--data", corpus, "-o", run, *arguments, "--save-every", 3, "--keep", 2, "--eval-every", 4, "--sample", 5
    ).output
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    assert all(0 < line["device_peak"] <= 400 * 1024 for line in metrics(run))
    assert all(line["lanes"]["compute"] > 0 for line in metrics(run))
    evaluations = [line["loss"] for line in metrics(run, "eval")]
    assert len(evaluations) == 3
    assert evaluations[-1] < evaluations[0]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]
    assert "traceEvents" in json.loads((run / "trace.json").read_text())
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((run / "run.json").read_text())["options"]["memory"] == "400KiB"
    assert "validation loss" in shown
    assert "sample continuation:" in shown
    assert "done after step 8/8" in shown
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-00000008")
    ids = torch.tensor([list(corpus.read_bytes()[-32:])])
    assert model(input_ids=ids, labels=ids).loss.item() < evaluations[0]


def test_json_is_all_that_is_printed(corpus, tmp_path):
    shown = trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 2, "--json", "--sample", 3).stdout
    events = [json.loads(line) for line in shown.splitlines()]
    assert [event["event"] for event in events] == [*("start", "step", "step", "save", "eval", "sample", "end")]
    assert events[-1]["checkpoint"].endswith("step-00000002")


def test_quiet_is_quiet(corpus, tmp_path):
    assert trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 1, "--quiet").output == ""


def test_the_live_display(corpus, tmp_path, virtual):
    options = TrainOptions(GPT, [corpus], steps=3, output=tmp_path / "run", device="virtual", memory="400KiB")
    screen = io.StringIO()
    with open_display(console=Console(file=screen, force_terminal=True, width=120)) as display:
        TrainingRun(*new_run(options), display.show, Ranks()).train()
    shown = screen.getvalue()
    for expected in ("3/3", "tokens/s", "peak memory", "of 400.00KiB", "compute", "h2d", "host", "learning rate"):
        assert expected in shown


@pytest.mark.parametrize(("length", "steps"), [(["--tokens", 1000], 8), (["--epochs", 0.5], 15), ([], 30)])
def test_how_long(length, steps, corpus, tmp_path):
    trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--batch", 4, "--no-trace", "--keep", 1, *length)
    assert len(metrics(tmp_path / "run")) == steps


def test_a_pretrained_directory_with_its_tokenizer(corpus, tmp_path):
    """Its own weights, and text through its own tokenizer: the loss before the first step is that of transformers."""
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted({"[?]", *corpus.read_text().split()})
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[?]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    shown = trained(
        tmp_path / "model", "--data", corpus, "-o", tmp_path / "run", "--steps", 2, "--sequence", 14, "--validation",
        0.5, "--eval-every", 1, "--eval-windows", 3, "--sample", 4, "--json",
    ).stdout  # fmt: skip
    events = [json.loads(line) for line in shown.splitlines()]
    ids = torch.tensor(tokenizer(corpus.read_text())["input_ids"])
    windows = ids[len(ids) - len(ids) // 2 :][: 3 * 14].view(3, 14)
    expected = model(input_ids=windows, labels=windows).loss.item()
    assert next(event["loss"] for event in events if event["event"] == "eval") == pytest.approx(expected, rel=1e-5)
    assert "ferryman" in next(event["prompt"] for event in events if event["event"] == "sample")
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert saved(corpus.read_text())["input_ids"] == ids.tolist()


def test_without_a_tokenizer_it_says_what_text_becomes(corpus, tmp_path):
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=300, **size).save_pretrained(tmp_path / "model")
    arguments = ["--data", corpus, "-o", tmp_path / "run", "--steps", 1, "--sequence", 8, "--no-trace"]
    shown = trained(tmp_path / "model", *arguments, "--sample", 40).output  # some of them are no bytes
    said = "text is read as bytes, which use 256 of the 300 entries of the vocabulary\n"
    assert f"no tokenizer in {tmp_path / 'model'}: {said}" in shown


def test_a_checkpoint_is_a_model_to_start_from(corpus, tmp_path):
    trained(GPT, "--data", corpus, "-o", tmp_path / "one", "--steps", 6, "--lr", 0.01)
    checkpoint = tmp_path / "one" / "checkpoints" / "step-00000006"
    trained(checkpoint, "--data", corpus, "-o", tmp_path / "two", "--steps", 1, "--eval-every", 1)
    assert metrics(tmp_path / "two", "eval")[0]["loss"] == pytest.approx(metrics(tmp_path / "one", "eval")[-1]["loss"])


def test_without_a_word_it_is_saved_every_tenth_of_the_run(corpus, tmp_path):
    """But not again and again in a short one."""
    trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 12, "--keep", 99, "--no-trace")
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000010", "step-00000012"]
    assert [training_run._save_every(steps) for steps in (1, 19, 100, 1000, 100_000)] == [10, 10, 10, 100, 500]


def test_without_a_budget_it_is_what_is_free(corpus, tmp_path, virtual):
    torch_virtual.set_capacity(400 * 1024, virtual)
    trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 1, "--device", "virtual", "--batch", 64)
    assert metrics(tmp_path / "run")[0]["micro_batches"] > 1


def test_a_loss_that_is_no_number_is_not_shown_for_ever():
    with open_display(console=Console(file=io.StringIO(), force_terminal=True)) as display:
        event = {"event": "step", "step": 1, "steps": 3, "seconds_left": 1.0, "lr": 0.1, "grad_norm": None}
        event |= {"tokens_per_second": 1.0, "seconds": 1.0, "micro_batches": 1, "device_peak": None, "lanes": {}}
        for loss in (math.nan, 2.0, math.nan, math.inf):
            display.show({**event, "loss": loss, "device_share": None})
        assert display._loss == 2.0
