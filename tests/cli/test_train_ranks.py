"""`ferryman train` on several ranks: the run of one process, told by the first; stopped, killed and started again."""

import dataclasses
import json
import signal

import pytest

from ferryman.cli.run_directory import new_run, restarted
from ferryman.cli.train_options import TrainOptions
from support import rank_jobs
from support.commands import EXACT, GPT, losses, metrics, sending, trained
from support.slow import few
from support.torchrun import Torchrun


def near(found):
    return [(step, pytest.approx(loss, rel=1e-5)) for step, loss in found]


def together(ranks, *arguments):
    """All ranks end well; what the first has shown, and no other shows anything."""
    (code, shown, told), *others = ranks.run(rank_jobs.command, *arguments)
    assert code == 0, (shown, told)
    assert others == [(0, "", None)] * len(others)
    return shown


pytestmark = pytest.mark.timeout(600)  # torchrun starts several processes, on few cores

BATCHES = {
    "uneven": ["--batch", 7],
    "for one": ["--batch", 1],
    "cut": ["--batch", 8, "--micro-batches", 3],
    "in a budget": ["--batch", 5, "--device", "virtual", "--memory", "400KiB"],
}


def assert_equals_one_process(ranks, tmp_path, *arguments):
    runs = tmp_path / "one", tmp_path / "all"
    arguments = [*arguments, *EXACT, "--steps", 4, "--eval-every", 3, "--eval-windows", 5]
    trained(*arguments, "-o", runs[0])
    shown = together(ranks, *arguments, "-o", runs[1], "--sample", 4)
    assert losses(runs[1]) == near(losses(runs[0]))
    evaluations = [[line["loss"] for line in metrics(run, "eval")] for run in runs]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)
    assert "done after step 4/4" in shown
    assert "sample continuation" in shown


@pytest.mark.parametrize("batch", few(BATCHES, 2))
def test_ranks_share_a_batch(batch, two, corpus, tmp_path, request):
    if "virtual" in BATCHES[batch]:
        request.getfixturevalue("virtual")
    assert_equals_one_process(two, tmp_path, GPT, "--data", corpus, *BATCHES[batch])


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
def test_four_ranks_share_a_batch(batch, four, corpus, tmp_path, request):
    if "virtual" in BATCHES[batch]:
        request.getfixturevalue("virtual")
    assert_equals_one_process(four, tmp_path, GPT, "--data", corpus, *BATCHES[batch])


def test_totals(two, corpus, tmp_path, accelerator):
    arguments = ["--data", corpus, "--batch", 7, "--micro-batches", 7, "--steps", 2, "--json", "--updates", "stride:2"]
    shown = together(two, GPT, *arguments, "--device", accelerator.type, "-o", tmp_path / "run")
    events = [json.loads(line) for line in shown.splitlines()]
    assert [event["event"] for event in events] == ["start", "note", "step", "step", "save", "eval", "end"]
    assert events[0]["ranks"] == 2
    assert "deferred because there are several ranks" in events[1]["text"]
    assert events[2]["micro_batches"] == 7
    assert events[2]["tokens_per_second"] * events[2]["seconds"] == pytest.approx(7 * 32)
    assert events[2]["device_peak"] > 0
    assert events[-1]["tokens"] == 2 * 7 * 32


def test_resumed_on_another_number_of_ranks(two, corpus, tmp_path):
    arguments = [GPT, "--data", corpus, "--batch", 7, *EXACT]
    trained(*arguments, "-o", tmp_path / "whole", "--steps", 6)
    run = tmp_path / "parts"
    together(two, *arguments, "-o", run, "--steps", 2)
    trained("--resume", "-o", run, "--steps", 4)
    together(two, "--resume", "-o", run, "--steps", 6)
    assert losses(run) == near(losses(tmp_path / "whole"))
    assert [line["epoch"] for line in metrics(run)] == [line["epoch"] for line in metrics(tmp_path / "whole")]


# What is refused, or fails.


def test_one_rank_refuses_for_all(two, corpus, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    for arguments in (["-o", tmp_path / "run"], ["-o", tmp_path / "new", "--memory", "1GiB"]):
        found = two.run(rank_jobs.command, GPT, "--data", corpus, *arguments)
        raised = [told for code, shown, told in found if (told or "").startswith("ValueError")]
        assert len(raised) == 1, found
        assert str(tmp_path / "run") in raised[0] or "--memory" in raised[0] or "memory=" in raised[0]
        assert [shown for _, shown, _ in found] == ["", ""]
        assert {code for code, _, told in found if told not in raised} == {2}
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("of_rank", "expected"),
    [([["--lr", 0.1], ["--lr", 0.2]], "the ranks do not agree on --lr"), ([[], ["--batch", "x"]], "--batch")],
)
def test_command_lines_that_differ(of_rank, expected, two, corpus, tmp_path):
    arguments = [GPT, "--data", corpus, "-o", tmp_path / "run"]
    found = two.run(rank_jobs.command, *arguments, of_rank=of_rank)
    assert all(code for code, _, _ in found)
    assert sum(expected in f"{shown}{told}" for _, shown, told in found) == 1, found
    assert not (tmp_path / "run").exists()


def test_a_rank_that_fails_says_why_and_the_others_stop(two, corpus, tmp_path):
    arguments = [GPT, "--data", corpus, "--steps", 2, "-o", tmp_path / "run", "--quiet"]
    first, second = two.run(rank_jobs.command, *arguments, fails=True)
    assert first[:2] == (1, "")
    assert second[0] == 1
    assert "ferryman: no room. The last checkpoint is" in second[1]


# Asked to stop, killed, started again.


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_is_asked_all_do(rank, two, corpus, tmp_path):
    run = tmp_path / "run"
    with sending(signal.SIGTERM, run, process=two.processes[rank].pid):
        shown = together(two, GPT, "--data", corpus, "-o", run, "--steps", 5000, "--no-trace")
    done = len(metrics(run))
    assert f"stopped by SIGTERM after step {done}/5000" in shown
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done:08}"]


def killed(victim, ranks, run, *arguments):
    job = Torchrun(*arguments, "-o", run, "--steps", 14, "--save-every", 3, ranks=ranks, restarts=1)
    job.after(5, run)
    job.send(signal.SIGKILL, rank=victim)
    code, shown, errors = job.end()
    assert code == 0, errors
    assert sum(line.startswith("ferryman: ") for line in errors.splitlines()) == errors.count("ferryman: ") == 1, errors
    assert f"one of the {ranks} ranks has stopped or does not answer" in errors
    assert "Traceback" not in errors
    assert f"restarted: resuming from the last checkpoint in {run}" in shown


@pytest.mark.slow
def test_killed_and_started_again_it_is_the_same_run(two, corpus, tmp_path):
    """To the last bit."""
    arguments = [GPT, "--data", corpus, "--device", "cpu", "--batch", 7, *EXACT, "--no-trace"]
    together(two, *arguments, "-o", tmp_path / "whole", "--steps", 14)
    killed(1, 2, tmp_path / "run", *arguments)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    files = [tmp_path / name / "checkpoints/step-00000014/model.safetensors" for name in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_and_started_again_on_four_ranks(victim, four, corpus, tmp_path):
    arguments = [GPT, "--data", corpus, "--device", "cpu", "--batch", 7, *EXACT, "--no-trace"]
    together(four, *arguments, "-o", tmp_path / "whole", "--steps", 14)
    killed(victim, 4, tmp_path / "run", *arguments)
    assert losses(tmp_path / "run") == near(losses(tmp_path / "whole"))  # on two nodes sums have another order


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_is_asked_to_stop(number, corpus, tmp_path):
    run = tmp_path / "run"
    job = Torchrun(GPT, "--data", corpus, "--device", "cpu", "-o", run, "--steps", 5000)
    job.after(3, run)
    job.send(number)
    _, shown, errors = job.end()
    assert f"stopped by {number.name} after step {len(metrics(run))}/5000" in shown
    assert "ferryman: " not in errors


@pytest.mark.slow
def test_started_again_a_job_does_not_go_on_with_the_run_of_another(corpus, tmp_path):
    run = tmp_path / "run"
    trained(GPT, "--data", corpus, "-o", run, "--steps", 1)
    before = (run / "run.json").read_bytes()
    code, _, errors = Torchrun(GPT, "--data", corpus, "--device", "cpu", "-o", run, "--steps", 2, restarts=1).end()
    assert code == 1
    assert errors.count("it already holds a run") == 2  # each time
    assert (run / "run.json").read_bytes() == before


def test_what_a_job_goes_on_with(corpus, tmp_path):
    given = TrainOptions(GPT, [corpus], output=tmp_path / "run")
    assert restarted(given, {"model"}, ["host/1/2"]) == (given, {"model"})
    new_run(given, ["host/1/2"])
    assert restarted(given, {"model"}, ["host/7/8", "host/1/2"]) == (dataclasses.replace(given, resume=True), {"model"})
    for others in ([], ["host/1/3"]):
        assert restarted(given, {"model"}, others) == (given, {"model"})
    (tmp_path / "run" / "run.json").write_text("{")
    assert restarted(given, {"model"}, ["host/1/2"]) == (given, {"model"})
