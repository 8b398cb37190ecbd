"""A wide net: random training programs give what plain PyTorch gives, or are refused with an error that says why."""

import functools
import threading
import time

import pytest
import torch

import ferryman
from support.devices import torch_virtual
from support.programs import between
from support.programs.program import FEATURES, Program, make_program, plain_results, run_engine, run_plain, show_table
from support.programs.results import differences

CPU = torch.device("cpu")
QUICK, MANY = 60, 500  # half of the quick ones on each device; `make test-all` runs all of the many on both
REFUSED = 0.1  # the share of programs that may be refused; as many may run one micro-batch after the other


@pytest.mark.parametrize("seed", range(0, QUICK, 2))
def test_programs_on_the_cpu_are_right_or_refused(seed):
    assert_good(make_program(seed), CPU)


@pytest.mark.parametrize("seed", range(1, QUICK, 2))
def test_programs_on_a_device_are_right_or_refused(seed, accelerator):
    assert_good(make_program(seed), accelerator)


def assert_good(program, device):
    outcome = run_engine(program, device)
    assert outcome.is_good, f"{program}\n{outcome.kind} {outcome.detail}\n{outcome.trace}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_hundreds_of_programs_are_right_or_refused_and_few_are_refused(device):
    outcomes, start = {}, time.monotonic()
    for seed in range(MANY):
        program = make_program(seed)
        outcomes[program] = run_engine(program, device)
        if device.type == "virtual":
            assert torch_virtual.races() == [], program
    table = show_table(outcomes, time.monotonic() - start)
    assert all(outcome.is_good for outcome in outcomes.values()), table
    for kind in ("refused", "one by one"):
        assert sum(outcome.kind == kind for outcome in outcomes.values()) <= REFUSED * MANY, table


# The net itself.


@pytest.mark.parametrize("seed", range(10))
def test_two_builds_of_a_program_give_the_same(seed):
    program = make_program(seed)
    assert differences(run_plain(program, CPU), run_plain(program, CPU), tolerance=0.0) == []


@pytest.mark.parametrize("feature", [*FEATURES, *between.FEATURES], ids=lambda feature: feature.__name__)
def test_every_feature_is_drawn_and_runs_in_plain_pytorch(feature):
    """Of the programs that have it; one that plain PyTorch cannot run would be replaced by another, without it."""
    seeds = [seed for seed, drawn in first_draws().items() if feature in drawn]
    assert any(make_program(seed).attempt == 0 for seed in seeds[:5])


@functools.cache
def first_draws():
    """The features of each program as it is drawn first, by seed."""
    return {seed: [type(feature) for feature in Program(seed).begin()[2]] for seed in range(MANY)}


@functools.cache
def without_features():
    """A program of three micro-batches that has none."""
    seeds = (seed for seed in range(1000) if not Program(seed).features and Program(seed).draw().micro_batches == 3)
    return Program(next(seeds))


def test_a_step_that_is_slightly_wrong_is_reported():
    class Wrong(ferryman.Engine):
        """Its losses are a little too large."""

        def __init__(self, *args, loss, **options):
            super().__init__(*args, loss=lambda *given: loss(*given) * 1.01, **options)

    assert run_engine(without_features(), CPU).kind == "equal"
    assert run_engine(without_features(), CPU, engine=Wrong).kind == "WRONG"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("losses", lambda losses: losses.append(losses.pop() * 1.001)),
        ("state", lambda state: state["blocks.0.up.weight"].mul_(1.001)),
        ("left", lambda left: left.pop("blocks.0.number")),
        ("left", lambda left: left.update(extra=1)),
        ("logs", lambda logs: logs.append([1.0])),
        ("read", lambda read: read.append([0.5])),
        ("drawn", lambda drawn: drawn.append(drawn.pop() + 0.1)),
    ],
)
def test_each_part_of_a_result_is_compared(part, change):
    ours, theirs = (run_plain(without_features(), CPU) for _ in range(2))
    change(getattr(ours, part))
    (difference,) = differences(ours, theirs)
    assert difference.startswith(part)


def failing(error):
    """An engine that raises in its second step."""

    class Failing(ferryman.Engine):
        def step(self, *args):
            return super().step(*args) if self.steps == 0 else error(self)

    return Failing


def test_an_error_that_is_not_ours_is_a_crash():
    def fail(engine):
        raise ValueError("the unit 'blocks.0' is refused, but not by the package")

    assert run_engine(without_features(), CPU, engine=failing(fail)).kind == "CRASH"
    assert run_engine(without_features(), CPU, engine=failing(lambda engine: {}["missing"])).kind == "CRASH"


def test_a_refusal_names_its_cause():
    outcome = run_engine(without_features(), CPU, engine=failing(lambda engine: engine.gradient("blocks.0.up.weight2")))
    assert outcome.kind == "refused"
    assert "in step 2" in outcome.detail
    outcome = run_engine(without_features(), CPU, engine=failing(lambda engine: engine.insert("blocks.0", None)))
    assert outcome.kind == "CRASH"
    assert "names no cause" in outcome.detail


def test_a_refusal_after_weights_have_changed_is_wrong():
    class Late(ferryman.Engine):
        def step(self, *args):
            super().step(*args)
            return self.gradient("blocks.0.up.weigh")  # refused with a hint at the name that there is

    outcome = run_engine(without_features(), CPU, engine=Late)
    assert outcome.kind == "WRONG"
    assert "weights have changed" in outcome.detail


def test_a_program_that_hangs_is_reported():
    released = threading.Event()

    class Hanging(ferryman.Engine):
        def step(self, *args):
            released.wait()
            return super().step(*args)

    try:
        assert run_engine(without_features(), CPU, engine=Hanging, patience=0.5).kind == "HANGS"
    finally:
        released.set()
        for thread in threading.enumerate():  # it would draw from the generators of tests after this one
            if thread.name == "program":
                thread.join()


def test_plain_results_are_those_of_every_step():
    results = plain_results(without_features(), CPU)
    assert [len(result.losses) for result in results] == [1, 2, 3]
    assert not torch.equal(results[0].state["head.weight"], results[1].state["head.weight"])
