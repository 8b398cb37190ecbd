"""Cases that `make test-all` runs, and `make test` does not."""

import pytest


def slow(*cases):
    """For `pytest.mark.parametrize`: several names together, in tuples, or one."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
