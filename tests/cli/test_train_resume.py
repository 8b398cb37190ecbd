"""`ferryman train`, stopped and resumed: it is the run that was never stopped, and nothing of it is lost."""

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from ferryman.cli import training_run
from ferryman.cli.errors import message_for
from ferryman.cli.main import main
from ferryman.cli.run_directory import RunDirectory, new_run
from ferryman.cli.train_options import TrainOptions
from ferryman.cli.training_run import TrainingRun
from ferryman.data.text import as_bytes
from ferryman.distributed.ranks import Ranks
from ferryman.relay.driver import Relay
from ferryman.relay.straight import Straight
from support.commands import EXACT, GPT, losses, metrics, refused, sending, train, trained
from support.devices import torch_virtual
from support.slow import slow


@pytest.fixture(autouse=True)
def _signals_are_not_ignored():
    """Whoever starts the tests in the background, or with nohup, may have them ignore SIGINT or SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_resumed_it_is_the_same_run_on_the_cpu(corpus, tmp_path):
    assert_resumed_the_same("cpu", "host", corpus, tmp_path)


@pytest.mark.parametrize("updates", ["stride:2", *slow("host", "static:0.5")])
def test_resumed_it_is_the_same_run(updates, corpus, tmp_path, accelerator):
    assert_resumed_the_same(accelerator, updates, corpus, tmp_path)


def assert_resumed_the_same(device, updates, corpus, tmp_path):
    arguments = [GPT, "--data", corpus, "--device", device, *EXACT, "--updates", updates]
    trained(*arguments, "-o", tmp_path / "whole", "--steps", 6)
    trained(*arguments, "-o", tmp_path / "parts", "--steps", 3)
    shown = trained("--resume", "-o", tmp_path / "parts", "--steps", 6, "--device", device).output
    assert "--steps is now 6, was 3" in shown
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    files = [tmp_path / name / "checkpoints/step-00000006/model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_resumed_elsewhere(corpus, tmp_path, virtual):
    """On another device, in another budget; what was saved last is where it goes on, and nothing is told twice."""
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, *EXACT, "-o", run, "--steps", 6, "--save-every", 2, "--keep", 9)
    before = losses(run)
    for step in (4, 6):  # as if it had been killed after step 3
        saved = run / "checkpoints" / f"step-{step:08}"
        saved.rename(tmp_path / saved.name)
    shown = trained("--resume", "-o", run, "--device", "virtual", "--memory", "400KiB", "--updates", "auto").output
    assert "--memory is now 400KiB, was the default" in shown
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]
    assert losses(run) == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in before]


def test_an_option_is_taken_back(corpus, tmp_path, virtual):
    """What the run was begun with, and the device it goes on with does not have."""
    run = tmp_path / "run"
    arguments = ["--device", "virtual", "--memory", "400KiB", "--max-grad-norm", 1, "--resident", "transformer.wpe*"]
    trained(GPT, "--data", corpus, "-o", run, "--steps", 1, "--betas", "0.8,0.9", *arguments, "--no-trace")
    on_cpu = ["--resume", "-o", run, "--device", "cpu", "--steps", 2]
    result = train(*on_cpu)
    assert message_for(result.exception).endswith("--memory comes from the resumed run; --memory none removes it")
    none = [word for name in ("memory", "max-grad-norm", "resident", "betas") for word in (f"--{name}", "none")]
    shown = trained(*on_cpu, *none).output
    assert "--memory is now the default, was 400KiB" in shown
    assert "--betas is now the default, was 0.8,0.9" in shown
    recorded = json.loads((run / "run.json").read_text())["options"]
    assert [recorded[name] for name in ("memory", "max_grad_norm", "resident", "betas")] == [None, None, [], None]


def test_settings_that_are_refused_are_not_remembered(corpus, tmp_path, virtual):
    """Neither where they are refused at once, nor in the first step."""
    run = tmp_path / "run"
    trained(
        GPT, "--data", corpus, *EXACT, "-o", run, "--device", "virtual", "--steps", 3, "--save-every", 1, "--keep", 9
    )
    before = [(run / name).read_bytes() for name in ("run.json", "metrics.jsonl")]
    again = ["--resume", "-o", run, "--steps", 5, "--device", "virtual"]
    small = ["--memory", "400KiB", "--batch", 64, "--micro-batches", 1]
    for wrong in (["--memory", "1KiB"], [*small, "--from-step", 1], ["--optimizer", "sgd"]):
        assert refused(*again, *wrong)
        assert [(run / name).read_bytes() for name in ("run.json", "metrics.jsonl")] == before
    trained(*again)
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5]
    assert json.loads((run / "run.json").read_text())["options"]["memory"] is None


def test_a_damaged_checkpoint_is_named_and_so_is_one_that_is_whole(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, *EXACT, "-o", run, "--steps", 4, "--save-every", 1, "--keep", 4)
    before = losses(run)
    for step in (3, 4):
        weights = run / "checkpoints" / f"step-{step:08}" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    message = refused("--resume", "-o", run, "--steps", 5)
    assert f"{weights} is damaged" in message
    assert "step-00000002 is intact" in message
    assert message.endswith(f"ferryman train --resume --output {run} --from-step 2")
    assert "no checkpoint of this step in" in refused("--resume", "-o", run, "--from-step", 7)
    trained("--resume", "-o", run, "--from-step", 2)
    assert losses(run) == before
    trained("--resume", "-o", run, "--steps", 5)  # what was saved last is the newest, whatever was there
    assert "it needs --resume" in refused(GPT, "--data", corpus, "-o", tmp_path / "new", "--from-step", 2)
    for weights in run.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(b"")
    assert "no other intact checkpoint" in refused("--resume", "-o", run, "--steps", 6)


def test_nothing_left_to_do(corpus, tmp_path):
    trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--steps", 1)
    assert (
        "the run is already complete at step 1; train longer with --steps"
        in trained("--resume", "-o", tmp_path / "run").output
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGINT)])
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
    assert f"stopped by {number.name} after step {done}/500" in result.output
    assert f"ferryman train --resume --output {run}" in result.output.replace("\n", "")
    trained("--resume", "-o", run, "--device", "virtual", "--steps", done + 1)
    known = dict(losses(tmp_path / "whole"))
    assert all(loss == known[step] for step, loss in losses(run) if step in known)


@pytest.mark.parametrize(("kind", "name", "way"), [(Relay, "_visit", "--relayed"), (Straight, "compute", "--held")])
def test_a_second_ctrl_c_stops_at_once(kind, name, way, corpus, tmp_path, accelerator, monkeypatch):
    """Both come in the middle of a step: in one of its visits, or in a call of a straight step."""
    method, calls = getattr(kind, name), itertools.count()

    def interrupted(self, *args):
        if self._step.for_update and next(calls) == 50:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return method(self, *args)

    monkeypatch.setattr(kind, name, interrupted)
    result = train(GPT, "--data", corpus, "-o", tmp_path / "run", "--device", accelerator, "--steps", 500, way)
    assert next(calls) > 50
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
    assert "resume with: ferryman train --resume" in shown
    monkeypatch.setattr(sys, "argv", ["ferryman", *map(str, arguments)])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr()
    assert told.err.startswith(f"ferryman: --output {tmp_path / 'run'}: it already holds a run (step-")
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

    monkeypatch.setattr(training_run, "evaluate", fails)
    run = tmp_path / "run"
    result = train(GPT, "--data", corpus, "-o", run, "--steps", 3)
    assert result.exit_code == 1
    assert f"no room. The last checkpoint is {run / 'checkpoints' / 'step-00000003'}" in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_in_an_evaluation(number, corpus, tmp_path, monkeypatch):
    def asked(*arguments, evaluate=training_run.evaluate):
        os.kill(os.getpid(), number)
        return evaluate(*arguments)

    monkeypatch.setattr(training_run, "evaluate", asked)
    run = tmp_path / "run"
    shown = trained(GPT, "--data", corpus, "-o", run, "--steps", 50, "--eval-every", 50, "--save-every", 7).output
    assert f"stopped by {number.name} after step 0/50" in shown
    assert metrics(run, "eval") == []
    assert (run / "checkpoints" / "step-00000000").is_dir()


def test_asked_to_stop_before_the_first_step(corpus, tmp_path, monkeypatch):
    """There is no loss yet, which is no loss that is not finite."""
    monkeypatch.setattr(training_run, "_last_step", lambda *arguments: os.kill(os.getpid(), signal.SIGTERM) or 9)
    shown = trained(GPT, "--data", corpus, "-o", tmp_path / "run", "--validation", 0, "--no-trace").output
    assert "stopped by SIGTERM after step 0/9" in shown


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
    with RunDirectory(run, is_new=False).locked():
        assert f"--output {run}: another process is training there" in refused("--resume", "-o", run, "--steps", 2)
    trained("--resume", "-o", run, "--steps", 2)


def test_when_nobody_listens_any_more_it_saves_and_ends(corpus, tmp_path):
    def tell(event):
        if event["event"] == "step":
            raise OSError("the terminal is gone")

    options, run = new_run(TrainOptions(GPT, [corpus], steps=30, output=tmp_path / "run", device="cpu", trace=False))
    TrainingRun(options, run, tell, Ranks()).train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"batch": 2', '"batch": "two"', r"options.batch must be int, but is 'two'"),
        ('"batch": 2', '"batch": NaN', "numbers must be finite, but one is NaN"),
        ('"batch": 2', '"batch": ' + "[" * 100_000, "its JSON must be nested at most"),
        ('"data": [', '"data": ["x", 1, ', "options.data must be list"),
    ],
)
def test_recorded_settings_are_checked(corpus, tmp_path, old, new, message):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--steps", 1, "--batch", 2)
    file = run / "run.json"
    file.write_text(file.read_text().replace(old, new))
    said = refused("--resume", "-o", run, "--steps", 2)
    assert "run.json is damaged" in said
    assert message in said
