import pytest

from ferryman.forecast import measure


@pytest.fixture
def soon(monkeypatch):
    """Measurements of next to nothing."""
    for name, value in {
        "_MIN_SECONDS": 0.0,
        "_PARAMETERS": 1 << 12,
        "_LINK_BYTES": 1 << 16,
        "_MESSAGE_BYTES": 1 << 16,
        "_TRIAD_ELEMENTS": 1 << 12,
    }.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "_MAX_SIDE", measure._MIN_SIDE)
