"""Helpers for tests of the report: positions on its page, and the command."""

import sys

import pytest

from ferryman.cli.main import main


def place_of(page, lane):
    """The position and the index of a lane's longest span in the step that is shown."""
    return page.evaluate(
        """lane => {
            const row = rows.find(row => row.lane.name === lane), { start, length, bytes } = row.lane;
            const size = i => bytes[i] + length[i] / 1e9;
            let best = -1;
            start.forEach((t, i) => {
                const inside = t >= view.from && t + length[i] <= view.to;
                if (inside && (best < 0 || size(i) > size(best))) best = i;
            });
            const box = document.getElementById("lanes").getBoundingClientRect();
            return [box.left + xOf(start[best] + length[best] / 2), box.top + row.top + 12, best];
        }""",
        lane,
    )


def command(monkeypatch, *arguments):
    """Runs `ferryman report`. Returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["ferryman", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0
