"""Errors in the words of a command line: the library's exchange_status of Python's, `max_grad_norm=-1.0`."""

from __future__ import annotations

import re
import shlex

from ferryman.cli.engine_flags import SETTINGS, flag, is_flag, opposite

MISTAKES = (ValueError, OSError)  # what a user can get wrong

_NAMES = "|".join((*SETTINGS, "micro_batches", "keep", "betas"))
_VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|[-+\w][-+\w./]*(?<![.])|(?=\W|$)"
_PYTHON = re.compile(rf"(?<![\w:,./-])({_NAMES})=({_VALUE})")

# As they are written, where it is not with their value.
_FLAGS = {
    (name, str(on)): flag(name) if on else opposite(name) for name in filter(is_flag, SETTINGS) for on in (True, False)
}


def exit_code(error: BaseException) -> int:
    """2 for what was wrong from the start, as for a command line that cannot be read."""
    return 2 if isinstance(error, MISTAKES) else 1


def in_words(error: BaseException) -> str:
    """All that an error says, its notes with it."""
    notes = (str(note).removeprefix("ferryman: ") for note in getattr(error, "__notes__", []))
    parts = (part.rstrip(".") for part in (str(error), *notes))
    return re.sub(r"\bNone\b", "none", _PYTHON.sub(_as_option, ". ".join(parts)))


def _as_option(found: re.Match[str]) -> str:
    name, value = found.groups()
    if (name, value) in _FLAGS:
        return _FLAGS[name, value]
    if value.startswith("["):  # each is an option of its own
        items = re.findall(r"[^\s'\",\[\]]+", value)
    else:
        items = [value[1:-1].replace(", ", ",") if value[:1] in ("'", '"', "(") else value]
    return " ".join(f"{flag(name)} {shlex.quote(item) if item else ''}".rstrip() for item in items) or flag(name)
