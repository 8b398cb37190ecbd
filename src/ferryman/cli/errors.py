"""Error messages for the command line: `max_grad_norm=-1.0` in a message becomes `--max-grad-norm -1.0`."""

from __future__ import annotations

import re
import shlex

from ferryman.cli.engine_flags import SETTINGS, flag, is_flag, opposite

USER_ERRORS = (ValueError, OSError)  # errors that the user can fix

_NAMES = "|".join((*SETTINGS, "micro_batches", "keep", "betas"))
_VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|[-+\w][-+\w./]*(?<![.])|(?=\W|$)"
_PYTHON = re.compile(rf"(?<![\w:,./-])({_NAMES})=({_VALUE})")

# Settings that are switches on the command line, without a value.
_FLAGS = {
    (name, str(on)): flag(name) if on else opposite(name) for name in filter(is_flag, SETTINGS) for on in (True, False)
}


def exit_code(error: BaseException) -> int:
    """2 for invalid input, as for a command line that cannot be parsed; 1 for everything else."""
    return 2 if isinstance(error, USER_ERRORS) else 1


def message_for(error: BaseException) -> str:
    """The error's message and its notes, with Python arguments written as command-line options."""
    notes = (str(note).removeprefix("ferryman: ") for note in getattr(error, "__notes__", []))
    parts = (part.rstrip(".") for part in (str(error), *notes))
    return re.sub(r"\bNone\b", "none", _PYTHON.sub(_as_option, ". ".join(parts)))


def _as_option(found: re.Match[str]) -> str:
    name, value = found.groups()
    if (name, value) in _FLAGS:
        return _FLAGS[name, value]
    if value.startswith("["):  # a list: the option is repeated for each entry
        items = re.findall(r"[^\s'\",\[\]]+", value)
    else:
        items = [value[1:-1].replace(", ", ",") if value[:1] in ("'", '"', "(") else value]
    return " ".join(f"{flag(name)} {shlex.quote(item) if item else ''}".rstrip() for item in items) or flag(name)
