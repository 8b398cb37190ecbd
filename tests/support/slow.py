"""Marks test cases that only `make test-all` runs."""

import inspect
import itertools

import pytest

from support.devices import chosen, chosen_accelerator


def slow(*cases):
    """Values for `pytest.mark.parametrize` that only `make test-all` runs; tuples where it has several names."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def few(cases, count):
    """Values for `pytest.mark.parametrize`, of which `make test` runs the first `count`."""
    cases = list(cases)
    return [*cases[:count], *slow(*cases[count:])]


def cpu_is_slow():
    """The chosen devices, for `pytest.mark.parametrize`; the CPU is slow where an accelerator was chosen, too."""
    accelerator = chosen_accelerator()
    return chosen() if accelerator is None else [accelerator, *slow(*(name for name in chosen() if name == "cpu"))]


def covering(test):
    """A decorator, to be placed above all `pytest.mark.parametrize` of a test. `make test` runs a few combinations
    of their values and the devices, so that each value occurs, but not each pair of values. The others are slow."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    axes = [_Axis(*mark.args, **mark.kwargs) for mark in marks]
    if "device" in inspect.signature(test).parameters and not any("device" in axis.names for axis in axes):
        axes.append(_Axis("device", chosen(), indirect=["device"]))
    quick = [[case for case in axis.cases if not case.marks] for axis in axes]
    few = [[cases[number % len(cases)] for cases in quick] for number in range(max(map(len, quick)))]
    combined = []
    for combination in itertools.product(*(axis.cases for axis in axes)):
        marks_of_it = [mark for case in combination for mark in case.marks]
        if not any(all(a is b for a, b in zip(combination, one, strict=True)) for one in few):
            marks_of_it = marks_of_it or [pytest.mark.slow]
        values = [value for case in combination for value in case.values]
        combined.append(pytest.param(*values, marks=marks_of_it, id="-".join(case.id for case in combination)))
    names = [name for axis in axes for name in axis.names]
    indirect = [name for axis in axes for name in axis.indirect]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    return pytest.mark.parametrize(names, combined, indirect=indirect)(test)


class _Axis:
    """The names and values of one `pytest.mark.parametrize`."""

    def __init__(self, names, cases, *, indirect=(), ids=None):
        self.names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        self.indirect = self.names if indirect is True else list(indirect)
        self.cases = []
        for number, case in enumerate(cases):
            several = case.values if hasattr(case, "marks") else tuple(case) if len(self.names) > 1 else (case,)
            known = ids[number] if isinstance(ids, (list, tuple)) else getattr(case, "id", None)
            words = known or "-".join(
                self._word(name, number, value, ids) for name, value in zip(self.names, several, strict=True)
            )
            self.cases.append(pytest.param(*several, marks=getattr(case, "marks", ()), id=words))

    @staticmethod
    def _word(name, number, value, ids):
        """The id of a value, as pytest makes it."""
        if callable(ids):
            return str(ids(value))
        simple = value is None or isinstance(value, (str, int, float, bool))
        return str(value) if simple else getattr(value, "__name__", f"{name}{number}")
