"""A check and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

Measurements = dict[str, float | int | str]


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "FAILED"
    INCONCLUSIVE = "inconclusive"  # no error was found, but the check could not prove that there is none
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    figures: Measurements = field(default_factory=dict)
    reason: str = ""  # why the outcome is not OK

    @staticmethod
    def ok(figures: Measurements) -> Verdict:
        return Verdict(Outcome.OK, figures)

    @staticmethod
    def failed(reason: str, figures: Measurements) -> Verdict:
        return Verdict(Outcome.FAILED, figures, reason)

    @staticmethod
    def inconclusive(reason: str, figures: Measurements) -> Verdict:
        return Verdict(Outcome.INCONCLUSIVE, figures, reason)

    @staticmethod
    def skipped(reason: str) -> Verdict:
        return Verdict(Outcome.SKIPPED, {}, reason)


class Check(NamedTuple):
    """One row of the table."""

    group: str
    name: str
    compared: str  # what is compared with what, and the tolerance
    run: Callable[[], Verdict]


class Result(NamedTuple):
    check: Check
    verdict: Verdict
    seconds: float
