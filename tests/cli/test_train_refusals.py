"""`ferryman train`: what it refuses, how it fails, and what the user is told."""

import json
import sys

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig

from ferryman.cli.errors import message_for
from ferryman.cli.main import main
from support.commands import GPT, losses, refused, train, trained


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
        (["--data", "empty.txt"], "empty.txt is empty"),
        (["--data", "logs"], r"no file in this directory ends in .*\.txt.*it has 1 \.log.*--suffix"),
        (["--data", "short.txt"], "--data has only 10 tokens: a window takes 32"),
        ([], "--data is missing"),
        (["--data", "text.txt", "--steps", "3", "--epochs", "1"], "--steps and --epochs both"),
        (["--data", "text.txt", "--optimizer", "sgd", "--betas", "0.9,0.99"], "--optimizer sgd has no betas"),
        (["--data", "text.txt", "--sequence", "64"], "--sequence 64 is longer than the context of .*: 32 tokens"),
        (["--data", "text.txt", "--memory", "1GiB"], "memory=1.00GiB is a budget for an accelerator's memory"),
        (["--data", "text.txt", "--updates", "stride"], "stride"),
        (["--data", "text.txt", "--device", "nothing"], "device='nothing' cannot be used here"),
        (["--data", "text.txt", "--batch", "1000000000"], "--batch 1000000000: the data has 117 windows of 32 tokens"),
        (
            ["--data", "text.txt", "--seed", "9" * 20],
            "--seed 99999999999999999999: must be an integer from 0 to 9223372",
        ),
        (["--data", "text.txt", "--seed", "-1"], "--seed -1: must be an integer from 0"),
        (["--data", "text.txt", "--epochs", "0"], "--epochs 0: must be greater than 0"),
        (["--data", "text.txt", "--lr", "inf"], "--lr inf: must be a finite number"),
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


def test_a_budget_that_is_too_small(corpus, tmp_path, virtual):
    message = refused(GPT, "-o", tmp_path / "run", "--data", corpus, "--device", "virtual", "--memory", "1KiB")
    assert "memory=1.00KiB is too small" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt:smal", "did you mean 'gpt:small'"),
        ("vit", "a causal language model is required"),
        ("narrow", "has a vocabulary of only 100"),
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
    assert "it holds thesis.tex; existing files are never overwritten" in message
    assert "there is no run to resume: it holds thesis.tex" in refused("--resume", "-o", tmp_path / "other")
    assert "it is a file" in refused(GPT, "--data", corpus, "-o", corpus)
    assert "there is no such directory" in refused("--resume", "-o", tmp_path / "nowhere")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "dear"


def test_a_run_keeps_its_data_and_its_model(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--steps", 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "--seed 3: the run was started with 0" in refused("--resume", "-o", run, "--seed", 3)
    message = refused("gpt:layers=3,width=16,heads=2,context=32", "--resume", "-o", run, "--steps", 2)
    assert "belongs to another model" in message
    assert "transformer.h.2" in message
    (run / "run.json").write_text("{")
    assert "run.json is damaged" in refused("--resume", "-o", run)
    (run / "run.json").write_bytes(before[run / "run.json"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "'--steps'"),
        (["--betas", "0.9", "0.95"], "give two numbers separated by a comma, such as 0.9,0.95"),
        (["--slots", "two"], "'two' is neither an integer of at least 1 nor 'none'"),
        (["--max-grad-norm", "inf"], "inf is neither a number nor 'none'"),
    ],
)
def test_values_that_cannot_be(arguments, message, corpus, tmp_path):
    """An event of its own, with --json."""
    result = train(GPT, "--data", corpus, "-o", tmp_path / "run", *arguments, "--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["event"] == "error"
    assert message in told["message"]


def test_a_batch_that_the_host_cannot_hold(corpus, tmp_path, monkeypatch):
    """On the CPU most of it is what is predicted, of which a micro-batch is there at a time."""
    run = tmp_path / "run"
    arguments = ["--data", corpus, "-o", run, "--batch", 64, "--steps", 1, "--no-trace"]
    monkeypatch.setattr("ferryman.runtime.host_memory.available", lambda: 2 << 20)
    message = refused(GPT, *arguments)
    assert "--batch 64: its 2,048 tokens take at least 4.29MiB of host memory, and 2.00MiB is free" in message
    assert not run.exists()
    trained(GPT, *arguments, "--micro-batches", 8)


def test_errors_speak_of_options():
    for said, told in (
        ("max_grad_norm=-1.0: a number, or None", "--max-grad-norm -1.0: a number, or none"),
        ("memory=1.00GiB and device='cpu' has", "--memory 1.00GiB and --device cpu has"),
        ("held=True: slots=3 has no meaning (see units= and resident=).", "--held: --slots 3 has no meaning (see "
         "--units and --resident)"),
        ("units=['encoder.layer*', 'head']", "--units 'encoder.layer*' --units head"),
        ("updates='static:0.5' or subgroup=4096, or betas=(0.9, 1.2)", "--updates static:0.5 or --subgroup 4096, or "
         "--betas 0.9,1.2"),
        ("there is no 'gpt:layers=2,slots=3' in /data/memory=2/x", "there is no 'gpt:layers=2,slots=3' in "
         "/data/memory=2/x"),
    ):  # fmt: skip
        assert message_for(ValueError(said)) == told
    error = ValueError("no.")
    error.add_note("stash='host' may do")
    error.add_note("ferryman: No weight was changed.")
    assert message_for(error) == "no. --stash host may do. No weight was changed"


@pytest.mark.parametrize("json_too", [False, True])
def test_what_fails_is_told_in_one_line(json_too, corpus, tmp_path, monkeypatch, capsys):
    arguments = ["train", GPT, "--data", corpus, "-o", tmp_path / "run", "--device", "cpu", "--max-grad-norm", "-1"]
    monkeypatch.setattr(sys, "argv", ["ferryman", *map(str, arguments), *(["--json"] if json_too else [])])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr()
    message = "--max-grad-norm -1.0: it must be a number above 0, or none for no clipping"
    assert told.err == f"ferryman: {message}\n"
    events = [json.loads(line) for line in told.out.splitlines()]
    assert events == ([{"event": "error", "message": message}] if json_too else [])
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_does_not_end_well(corpus, tmp_path):
    run = tmp_path / "run"
    arguments = ["--data", corpus, "--schedule", "constant", "--no-trace", "--json"]
    trained(GPT, "-o", run, *arguments, "--steps", 2)
    result = train("--resume", "-o", run, "--json", "--steps", 3, "--lr", "1e30")
    assert result.exit_code == 1
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["event"] == "error"
    assert "the validation loss is nan after step 3: training has diverged" in told["message"]
    assert (
        f"Resume from an earlier step with: ferryman train --resume --output {run} --from-step 2 --lr 3e+29"
        in told["message"]
    )
    trained("--resume", "-o", run, "--from-step", 2, "--lr", "0.001")
    last = train(GPT, "-o", tmp_path / "blind", *arguments, "--steps", 2, "--lr", "1e30", "--validation", 0,
                 "--on-nonfinite", "skip")  # fmt: skip
    assert last.exit_code == 1
    assert "the loss is nan after step 2" in last.stderr
