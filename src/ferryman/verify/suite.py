"""The suite behind `ferryman verify`: runs the checks on a device, one after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ferryman.verify import model_checks, overlap, parity, peak_memory, process, races
from ferryman.verify.context import CheckContext
from ferryman.verify.result import Check, Outcome, Result, Verdict
from ferryman.verify.user_model import UserModel

GROUPS: dict[str, Callable[[CheckContext], Iterator[Check]]] = {
    "parity": parity.checks,
    "races": races.checks,
    "overlap": overlap.checks,
    "memory": peak_memory.checks,
    "process": process.checks,
}


def verify(
    context: CheckContext, groups: Sequence[str], begins: Callable[[Check], None], user: UserModel | None = None
) -> Iterator[Result]:
    """Yields the result of each check. `begins` is called before a check runs; `user` is a model to check as well."""
    with _one_thread(context):
        for group in groups:
            yield from _run_all(context, GROUPS[group](context), begins)
    if user is not None:
        yield from _run_all(context, model_checks.checks(context, user), begins)


def _run_all(context: CheckContext, checks: Iterator[Check], begins: Callable[[Check], None]) -> Iterator[Result]:
    for check in checks:
        begins(check)
        began = time.perf_counter()
        verdict = _run(context, check)
        yield Result(check, verdict, time.perf_counter() - began)


def _run(context: CheckContext, check: Check) -> Verdict:
    """Runs one check. A check that raises has failed."""
    accelerator = context.accelerator
    try:
        with accelerator.strict():
            verdict = check.run()
            accelerator.synchronize()
    except Exception as error:
        verdict = Verdict.failed(f"{type(error).__name__}: {error}", {})
    if verdict.outcome is not Outcome.FAILED and (found := accelerator.races()):
        verdict = Verdict.failed(f"the device detected {len(found)} races, the first: {found[0]}", verdict.figures)
    accelerator.forget_races()
    return verdict


@contextlib.contextmanager
def _one_thread(context: CheckContext) -> Iterator[None]:
    """Uses one thread where the CPU computes: models are small, and simulated copies need a core of their own."""
    before = torch.get_num_threads()
    if context.accelerator.is_host or context.accelerator.is_simulated:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
