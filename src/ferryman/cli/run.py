"""The output directory of a run: its settings, metrics, checkpoints, trace and report.

run/run.json           all settings
    checkpoints/       a series of them, `step-00000120/`
    metrics.jsonl      a line for each step and evaluation
    tokens.bin         the text as tokens, if it was text
    trace.json         what ran when, in the last steps
    report.html        to look at
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ferryman
from ferryman.checkpoint.directory import last_saved, locked, series, step_of
from ferryman.cli.engine_flags import flag
from ferryman.cli.train_options import FIXED, LENGTHS, TrainOptions
from ferryman.runtime.files import replacing_file

_SETTINGS = "run.json"
_AGENTS = "agents"  # in it: those of the job that trains there, or did last; see job.py


class Run:
    """A directory that this run alone writes to."""

    def __init__(self, directory: Path, *, is_new: bool, was_there: bool = True, agents: Sequence[str] = ()) -> None:
        self.directory = directory
        self._agents = agents
        self.is_new = is_new
        self._was_there = was_there  # the directory itself
        self.checkpoints = directory / "checkpoints"
        self.metrics = directory / "metrics.jsonl"
        self.tokens = directory / "tokens.bin"
        self.trace = directory / "trace.json"
        self.report = directory / "report.html"

    def has_checkpoint(self) -> bool:
        return bool(series(self.checkpoints))

    def checkpoint(self, step: int | None) -> Path:
        """That of a step, or the newest."""
        found = {step_of(path): path for path in series(self.checkpoints)}
        if step is None:
            return list(found.values())[-1]
        if step not in found:
            there = ", ".join(map(str, sorted(found))) or "none at all"
            raise ValueError(f"--from-step {step}: there is no checkpoint of it in {self.checkpoints}, but {there}")
        return found[step]

    def write_settings(self, options: TrainOptions) -> None:
        content = {"ferryman": ferryman.__version__, "options": options.to_json(), _AGENTS: list(self._agents)}
        _replace(self.directory / _SETTINGS, json.dumps(content, indent=2) + "\n")

    def begin_metrics(self, step: int) -> None:
        """Lines of steps after this one are dropped: they come again."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        _replace(self.metrics, "".join(f"{line}\n" for line in lines if _step_of(line) <= step))

    def add_metrics(self, event: Mapping[str, Any]) -> None:
        if event["event"] in ("step", "eval"):
            with self.metrics.open("a") as file:
                file.write(to_line(event) + "\n")

    def discard(self) -> None:
        """A new run came to nothing before its first step; as if it had not been."""
        if not self.is_new:
            return
        for entry in self.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not self._was_there:
            self.directory.rmdir()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Within, no other process can train here."""
        return locked(
            self.directory / ".lock",
            f"--output {self.directory}: another process is training there; wait for it, or choose another directory",
        )


def new_run(options: TrainOptions, agents: Sequence[str] = ()) -> tuple[TrainOptions, Run]:
    """In a directory that is not there yet, or is empty."""
    directory = _directory(options)
    if options.from_step is not None:
        raise ValueError("--from-step goes on with a run that is there, so it needs --resume")
    if options.model is None:
        raise ValueError("MODEL is missing: a directory or config.json of transformers, or gpt:small")
    if not options.data:
        raise ValueError("--data is missing: text files, token files or directories of them")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"--output {directory}: {_what_is_in(directory)}")
    was_there = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(directory, is_new=True, was_there=was_there, agents=agents)
    run.write_settings(options)
    return options, run


def restarted(given: TrainOptions, explicit: set[str], agents: Sequence[str]) -> tuple[TrainOptions, set[str]]:
    """What it takes to go on where this very job has been before it was started again; else what was given.

    A --from-step is behind it once something was saved since.
    """
    file = _directory(given) / _SETTINGS
    if not (agents and file.is_file() and _has_agent(file, agents)):
        return given, explicit
    saved = series(file.parent / "checkpoints")
    if given.from_step is not None and saved and last_saved(saved[-1].parent) > file.stat().st_mtime:
        given, explicit = dataclasses.replace(given, from_step=None), explicit - {"from_step"}
    return dataclasses.replace(given, resume=True), explicit


def resumed_run(
    given: TrainOptions, explicit: set[str], agents: Sequence[str] = ()
) -> tuple[TrainOptions, Run, list[str]]:
    """With the settings it was begun with, but for those that are given now; and what differs, in words."""
    directory = _directory(given)
    file = directory / _SETTINGS
    if not file.is_file():
        found = _what_is_in(directory, advice=False) if directory.exists() else "there is no such directory"
        raise ValueError(f"--resume --output {directory}: no run to resume, {found}")
    try:
        recorded = TrainOptions.from_json(json.loads(file.read_text())["options"], output=directory)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is damaged, and the run cannot be resumed from it: {error!r}") from error
    now = {name: getattr(given, name) for name in (*explicit, "json", "quiet")}
    if explicit & set(LENGTHS):  # one of them replaces whichever it was
        now = {**dict.fromkeys(LENGTHS), **now}
    options = TrainOptions.from_json(recorded.to_json(), **{**now, "output": directory, "resume": True})
    before, after = recorded.to_json(), options.to_json()
    different = options.differences(recorded)
    for name in different:
        if name in FIXED:
            raise ValueError(
                f"{flag(name)} {_show(after[name])}: the run was begun with {_show(before[name])}, and where it is in "
                "the data depends on it. Leave it out, or begin another run"
            )
    return (
        options,
        Run(directory, is_new=False, agents=agents),
        [
            f"{flag(name) if name != 'model' else 'MODEL'} is {_show(after[name])} now, was {_show(before[name])}"
            for name in different
        ],
    )


def to_line(event: Mapping[str, Any]) -> str:
    """As JSON, which knows no inf and no NaN: they are null."""
    return json.dumps(
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in event.items()}
    )


def _has_agent(settings: Path, agents: Sequence[str]) -> bool:
    try:
        return not set(agents).isdisjoint(json.loads(settings.read_text())[_AGENTS])
    except (ValueError, TypeError, KeyError):  # damaged, or from before there were any
        return False


def _directory(options: TrainOptions) -> Path:
    if options.output is None:
        raise ValueError("--output is missing: a directory for checkpoints, metrics, trace and report")
    return options.output


def _what_is_in(directory: Path, *, advice: bool = True) -> str:
    if not directory.is_dir():
        return "it is a file; give a directory"
    names = sorted(entry.name for entry in directory.iterdir())
    if _SETTINGS in names:
        mend = "; go on with it (--resume), or choose another name" if advice else ""
        saved = series(directory / "checkpoints")
        return f"it holds a run already ({saved[-1].name if saved else 'without a checkpoint'}){mend}"
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    mend = "; nothing is overwritten, so choose another name" if advice else ""
    return f"it holds {some or 'nothing'}{mend}"


def _show(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value) or "nothing"
    return "the default" if value is None else str(value)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):  # cut short, when the process was killed
        return math.inf


def _replace(target: Path, text: str) -> None:
    with replacing_file(target) as file:
        file.write_text(text)
