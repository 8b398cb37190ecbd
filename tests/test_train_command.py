"""`ferryman train`: what it makes, says, refuses; stopped and resumed it is the run that was never stopped."""

import inspect
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch_virtual
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ViTConfig
from typer.testing import CliRunner

from ferryman.cli import loop, rule
from ferryman.cli.display import open_display
from ferryman.cli.loop import Training
from ferryman.cli.main import app, main
from ferryman.cli.options import ENGINE, Options
from ferryman.cli.run import Run, new_run
from ferryman.data.text import as_bytes
from ferryman.engine import Engine

GPT = "gpt:layers=2,width=16,heads=2,context=32"
# Where it is settled who updates what, a step does not depend on how fast anyone was.
EXACT = ["--updates", "host", "--schedule", "constant", "--lr", "0.01", "--max-grad-norm", "1"]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the ferryman crosses the river {i} times\n" for i in range(100)))
    return path


def train(*arguments):
    arguments = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, ["train", *(["--device", "cpu"] if "--device" not in arguments else []), *arguments])


def trained(*arguments):
    result = train(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments):
    """What the user is told."""
    result = train(*arguments)
    assert isinstance(result.exception, ValueError), result.output
    return str(result.exception)


def metrics(run, event="step"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def losses(run):
    return [(line["step"], line["loss"]) for line in metrics(run)]


class sending:  # noqa: N801 - reads like a function
    """Within, a process gets a signal as soon as the run has made two steps; or more of them, one after the other."""

    def __init__(self, number, run, times=1, process=None):
        self._what = (number, run / "metrics.jsonl", times, process or os.getpid())
        self._thread = threading.Thread(target=self._send)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._thread.join()

    def _send(self):
        number, file, times, process = self._what
        while not file.exists() or file.read_text().count("\n") < 2:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(process, number)
            time.sleep(0.05)


# What it is.


def test_every_engine_option_is_an_option():
    """`model`, `optimizer` and `loss` are code, or have options of their own; `trace` is --trace."""
    known = set(inspect.signature(Engine.__init__).parameters)
    own = {"self", "model", "optimizer", "loss", "reduction", "trace"}
    assert set(ENGINE) == known - own
    assert set(ENGINE) <= set(inspect.signature(Options).parameters)


def test_help_shows_every_option_and_examples():
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "150"}).output
    for name in inspect.signature(Options).parameters:
        assert f"--{name.replace('_', '-')}" in shown or name == "model"
    assert shown.count("ferryman train ") >= 4


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "adagrad"])
def test_optimizers(name, corpus, tmp_path):
    run = tmp_path / "run"
    arguments = ["--optimizer", name, "--weight-decay", 0.1, "--lr", 0.01, "--steps", 6, "--no-trace"]
    trained(GPT, "--data", corpus, "--output", run, *arguments)
    assert metrics(run)[-1]["loss"] < metrics(run)[0]["loss"]


def test_learning_rates():
    shares = [rule.share("cosine", step, 100, 10) for step in range(101)]
    assert shares[:10] == [pytest.approx((step + 1) / 11) for step in range(10)]
    assert shares[10] == max(shares) == 1
    assert shares[100] == pytest.approx(0.1)
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert rule.share("linear", 55, 100, 10) == pytest.approx(0.5)
    assert rule.share("constant", 99, 100, 0) == 1


# What it makes.


def test_a_run_on_text(corpus, tmp_path):
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
    assert "a sample" in shown
    assert "done after step 8 of 8" in shown
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-00000008")
    ids = torch.tensor([list(corpus.read_bytes()[-32:])])
    assert model(input_ids=ids, labels=ids).loss.item() < evaluations[0]


def test_json_is_all_that_is_printed(corpus, tmp_path):
    shown = trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 2, "--json", "--sample", 3).stdout
    events = [json.loads(line) for line in shown.splitlines()]
    assert [event["event"] for event in events] == [*("start", "step", "save", "step", "save", "eval", "sample", "end")]
    assert events[-1]["checkpoint"].endswith("step-00000002")


def test_quiet_is_quiet(corpus, tmp_path):
    assert trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 1, "--quiet").output == ""


def test_the_live_display(corpus, tmp_path):
    options = Options(GPT, [corpus], steps=3, output=tmp_path / "run", device="virtual", memory="400KiB")
    screen = io.StringIO()
    with open_display(console=Console(file=screen, force_terminal=True, width=120)) as display:
        Training(*new_run(options), display.show).train()
    shown = screen.getvalue()
    for expected in ("3 of 3", "tokens/s", "at its peak of 400.00KiB", "compute", "h2d", "host", "learning rate"):
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


def test_a_checkpoint_is_a_model_to_start_from(corpus, tmp_path):
    trained(GPT, "--data", corpus, "-o", tmp_path / "one", "--steps", 6, "--lr", 0.01)
    checkpoint = tmp_path / "one" / "checkpoints" / "step-00000006"
    trained(checkpoint, "--data", corpus, "-o", tmp_path / "two", "--steps", 1, "--eval-every", 1)
    assert metrics(tmp_path / "two", "eval")[0]["loss"] == pytest.approx(metrics(tmp_path / "one", "eval")[-1]["loss"])


# Stopped and resumed.


@pytest.mark.parametrize(
    ("device", "updates"), [("cpu", "host"), ("virtual", "host"), ("virtual", "stride:2"), ("virtual", "static:0.5")]
)
def test_resumed_it_is_the_same_run(device, updates, corpus, tmp_path):
    arguments = [GPT, "--data", corpus, "--device", device, *EXACT, "--updates", updates]
    trained(*arguments, "-o", tmp_path / "whole", "--steps", 6)
    trained(*arguments, "-o", tmp_path / "parts", "--steps", 3)
    shown = trained("--resume", "-o", tmp_path / "parts", "--steps", 6, "--device", device).output
    assert "--steps is 6 now, was 3" in shown
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    files = [tmp_path / name / "checkpoints/step-00000006/model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_resumed_elsewhere(corpus, tmp_path):
    """On another device, in another budget; what was saved last is where it goes on, and nothing is told twice."""
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, *EXACT, "-o", run, "--steps", 6, "--save-every", 2, "--keep", 9)
    before = losses(run)
    for step in (4, 6):  # as if it had been killed after step 3
        saved = run / "checkpoints" / f"step-{step:08}"
        saved.rename(tmp_path / saved.name)
    shown = trained("--resume", "-o", run, "--device", "virtual", "--memory", "400KiB", "--updates", "auto").output
    assert "--memory is 400KiB now, was the default" in shown
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]
    assert losses(run) == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in before]


def test_nothing_left_to_do(corpus, tmp_path):
    trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 1)
    assert (
        "nothing left to do after step 1; give more with --steps" in trained("--resume", "-o", tmp_path / "run").output
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_finishes_the_step_and_saves(number, corpus, tmp_path, virtual):
    run = tmp_path / "run"
    arguments = [GPT, "--data", corpus, "--device", "virtual", *EXACT]
    trained(*arguments, "-o", tmp_path / "whole", "--steps", 5)
    torch_virtual.set_link(virtual, delay=0.003)
    with sending(number, run):
        result = trained(*arguments, "-o", run, "--steps", 500)
    torch_virtual.set_link(virtual, delay=0.0)
    done = len(metrics(run))
    assert 0 < done < 500
    assert f"stopped by {number.name} after step {done} of 500" in result.output
    assert f"ferryman train --resume --output {run}" in result.output.replace("\n", "")
    trained("--resume", "-o", run, "--device", "virtual", "--steps", done + 1)
    known = dict(losses(tmp_path / "whole"))
    assert all(loss == known[step] for step, loss in losses(run) if step in known)


def test_a_second_ctrl_c_stops_at_once(corpus, tmp_path, virtual):
    torch_virtual.set_link(virtual, delay=0.015)
    with sending(signal.SIGINT, tmp_path / "run", times=2):
        result = train(GPT, "--data", corpus, "-o", tmp_path / "run", "--device", "virtual", "--steps", 500)
    assert result.exit_code == 130
    assert "interrupted. Nothing was saved." in result.output


def test_the_command_itself(corpus, tmp_path, monkeypatch, capsys):
    """A real process, stopped with Ctrl-C; and a mistake ends with one line and the code 2."""
    arguments = ["train", GPT, "--data", corpus, "--device", "cpu", "-o", tmp_path / "run", "--epochs", "1000"]
    command = [sys.executable, "-m", "ferryman.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with sending(signal.SIGINT, tmp_path / "run", process=process.pid):
        shown, _ = process.communicate()
    assert process.returncode == 0
    assert "to go on: ferryman train --resume" in shown
    monkeypatch.setattr(sys, "argv", ["ferryman", *map(str, arguments)])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr()
    assert told.err.startswith(f"ferryman: --output {tmp_path / 'run'}: it holds a run already (step-")
    assert told.out == ""


def test_given_anew_how_long_replaces_what_was(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--tokens", 300, "--no-trace")
    assert len(metrics(run)) == 2
    trained("--resume", "-o", run, "--steps", 3)
    trained("--resume", "-o", run, "--epochs", 0.25)
    assert metrics(run)[-1]["epoch"] >= 0.25 > metrics(run)[-2]["epoch"]


def test_another_batch_trains_on_as_many_tokens(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--epochs", 0.5, "--no-trace")
    trained("--resume", "-o", run, "--epochs", 1, "--batch", 30)
    assert metrics(run)[-1]["epoch"] == pytest.approx(1, abs=0.25)
    assert len(metrics(run)) == 8 + 2


def test_a_run_inside_its_data(tmp_path, corpus):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index.bin").write_bytes(b"\xff" * 7)
    trained(GPT, "--data", tmp_path, "-o", tmp_path / "run", "--steps", 1)
    trained("--resume", "-o", tmp_path / "run", "--steps", 2)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2]


def test_an_evaluation_that_fails_loses_nothing(corpus, tmp_path, monkeypatch):
    def fails(*arguments):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(loop, "evaluate", fails)
    run = tmp_path / "run"
    result = train(GPT, "--data", corpus, "-o", run, "--steps", 3)
    assert result.exit_code == 1
    assert f"no room. The last checkpoint is {run / 'checkpoints' / 'step-00000003'}" in result.output


def test_without_a_word_it_is_saved_every_tenth_of_the_run(corpus, tmp_path):
    trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 20, "--keep", 99, "--no-trace")
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [f"step-{step:08}" for step in range(2, 21, 2)]
    assert loop._save_every(100_000) == 500


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_in_an_evaluation(number, corpus, tmp_path, monkeypatch):
    def asked(*arguments, evaluate=loop.evaluate):
        os.kill(os.getpid(), number)
        return evaluate(*arguments)

    monkeypatch.setattr(loop, "evaluate", asked)
    run = tmp_path / "run"
    shown = trained(GPT, "--data", corpus, "-o", run, "--steps", 50, "--eval-every", 50, "--save-every", 7).output
    assert f"stopped by {number.name} after step 0 of 50" in shown
    assert metrics(run, "eval") == []
    assert (run / "checkpoints" / "step-00000000").is_dir()


@pytest.mark.parametrize("was_there", [False, True])
def test_asked_to_stop_before_it_began(was_there, corpus, tmp_path, monkeypatch):
    def asked(text):
        os.kill(os.getpid(), signal.SIGTERM)
        return as_bytes(text)

    monkeypatch.setattr("ferryman.cli.corpus.as_bytes", asked)
    run = tmp_path / "run"
    if was_there:
        run.mkdir()
    result = train(GPT, "--data", corpus, "-o", run, "--steps", 2)
    assert result.exit_code == 143
    assert "interrupted. Nothing was saved." in result.output
    assert run.exists() == was_there
    assert not was_there or not list(run.iterdir())


def test_one_process_a_run(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--steps", 1)
    with Run(run, is_new=False).locked():
        assert f"--output {run}: another process is training there" in refused("--resume", "-o", run, "--steps", 2)
    trained("--resume", "-o", run, "--steps", 2)


def test_when_nobody_listens_any_more_it_saves_and_ends(corpus, tmp_path):
    def tell(event):
        if event["event"] == "step":
            raise OSError("the terminal is gone")

    options, run = new_run(Options(GPT, [corpus], steps=30, output=tmp_path / "run", device="cpu", trace=False))
    Training(options, run, tell).train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


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


# What goes wrong.


def test_what_is_cheap_to_see_is_seen_before_text_becomes_tokens(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("ferryman.cli.corpus.write_tokens", lambda *arguments: pytest.fail("too late"))
    wrong = (["--device", "nothing"], ["--memory", "1GiB"], ["--sequence", 64], ["--steps", 1, "--epochs", 1])
    for arguments in wrong:
        refused(GPT, "--data", corpus, "-o", tmp_path / "run", *arguments)


def test_a_loss_that_is_not_finite(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--steps", 2, "--schedule", "constant")
    result = train("--resume", "-o", run, "--steps", 9, "--lr", "1e30", "--save-every", 9)
    assert result.exit_code == 1
    assert "the loss of micro-batch 0 is nan. No weight was changed" in result.output
    assert f"The last checkpoint is {run / 'checkpoints' / 'step-00000002'}" in result.output
    trained("--resume", "-o", run, "--steps", 3, "--lr", "0.001")
    assert [step for step, _ in losses(run)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "--data nowhere: there is no such file or directory"),
        (["--data", "empty.txt"], "empty.txt: there is no text"),
        (["--data", "logs"], r"no file in this directory ends in .*\.txt.*it has 1 \.log.*--suffix"),
        (["--data", "short.txt"], "--data has 10 tokens, too few: a window takes 32"),
        ([], "--data is missing"),
        (["--data", "text.txt", "--steps", "3", "--epochs", "1"], "--steps and --epochs both"),
        (["--data", "text.txt", "--optimizer", "sgd", "--betas", "0.9", "0.99"], "--optimizer sgd has none"),
        (["--data", "text.txt", "--sequence", "64"], "--sequence 64 is longer than .* takes: 32 tokens"),
        (["--data", "text.txt", "--memory", "1GiB"], "memory=1.00GiB is a budget for an accelerator's memory"),
        (["--data", "text.txt", "--device", "virtual", "--memory", "1KiB"], "memory=1.00KiB is too small"),
        (["--data", "text.txt", "--updates", "stride"], "stride"),
        (["--data", "text.txt", "--device", "nothing"], "device='nothing' cannot be used here"),
    ],
)
def test_bad_input(arguments, message, corpus, tmp_path, monkeypatch):
    """And a run that never began leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("0123456789")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("x")
    with pytest.raises(ValueError, match=message):
        raise ValueError(refused(GPT, "-o", "run", *arguments))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt:smal", "did you mean 'gpt:small'"),
        ("vit", "what is required is a causal language model"),
        ("narrow", "has a vocabulary of 100, less than 256"),
        ("trained", "is pretrained and has no tokenizer"),
    ],
)
def test_models_that_will_not_do(model, message, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTConfig(**size).save_pretrained("vit")
    narrow = LlamaConfig(vocab_size=100, **size)
    narrow.save_pretrained("narrow")
    LlamaForCausalLM(narrow).save_pretrained("trained")
    assert message in refused(model, "--data", corpus, "-o", "run", "--sequence", 8)


def test_an_unknown_option_gets_a_suggestion(corpus, tmp_path):
    result = train(GPT, "--data", corpus, "-o", tmp_path / "run", "--micro-batch", 2)
    assert result.exit_code == 2
    assert "--micro-batches" in result.output


def test_nothing_is_overwritten(corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("dear")
    message = refused(GPT, "--data", corpus, "-o", tmp_path / "other")
    assert "it holds thesis.tex; nothing is overwritten" in message
    assert "no run to resume, it holds thesis.tex" in refused("--resume", "-o", tmp_path / "other")
    assert "it is a file" in refused(GPT, "--data", corpus, "-o", corpus)
    assert "there is no such directory" in refused("--resume", "-o", tmp_path / "nowhere")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "dear"


def test_a_run_keeps_its_data_and_its_model(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--steps", 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "--seed 3: the run was begun with 0" in refused("--resume", "-o", run, "--seed", 3)
    message = refused("gpt:layers=3,width=16,heads=2,context=32", "--resume", "-o", run, "--steps", 2)
    assert "is of another model" in message
    assert "transformer.h.2" in message
    (run / "run.json").write_text("{")
    assert "run.json is damaged" in refused("--resume", "-o", run)
    (run / "run.json").write_bytes(before[run / "run.json"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
