"""The output directory of a training run:

run/run.json           all settings
    checkpoints/       a series of checkpoints, such as `step-00000120/`
    metrics.jsonl      one line for each step and evaluation
    tokens.bin         the tokenized text, if --data is text
    trace.json         the timeline of the last steps
    report.html        the report made from the trace
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ferryman
from ferryman.checkpoint import schema
from ferryman.checkpoint.directory import last_saved, locked, series, step_of
from ferryman.cli.engine_flags import flag
from ferryman.cli.train_options import FIXED, LENGTHS, TrainOptions
from ferryman.distributed.ranks import Ranks
from ferryman.runtime.files import naming, replacing_file

_SETTINGS = "run.json"
_AGENTS = "agents"  # key in the document: the torchrun agents of the last job that trained in the directory

# The documents of a run, beside its checkpoints.
_RUN = schema.record(
    {"ferryman": schema.text, "options": schema.map_of(schema.anything)}, {_AGENTS: schema.list_of(schema.text)}
)
_METRIC = schema.record({"step": schema.integer()}, others=True)


class RunDirectory:
    """The files of one run. No other run writes to this directory."""

    def __init__(self, directory: Path, *, is_new: bool, was_there: bool = True, agents: Sequence[str] = ()) -> None:
        self.directory = directory
        self._agents = agents
        self.is_new = is_new
        self._was_there = was_there  # whether the directory itself existed before
        self.checkpoints = directory / "checkpoints"
        self.metrics = directory / "metrics.jsonl"
        self.tokens = directory / "tokens.bin"
        self.trace = directory / "trace.json"
        self.report = directory / "report.html"

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint, saved by this process or an earlier one."""
        return next(reversed(series(self.checkpoints)), None)

    def checkpoint(self, step: int | None) -> Path:
        """The checkpoint of a step, or the newest one if `step` is None."""
        found = {step_of(path): path for path in series(self.checkpoints)}
        if step is None:
            return list(found.values())[-1]
        if step not in found:
            there = (
                f"there are checkpoints of steps {', '.join(map(str, sorted(found)))}" if found else "there are none"
            )
            raise ValueError(f"--from-step {step}: no checkpoint of this step in {self.checkpoints}; {there}")
        return found[step]

    def write_settings(self, options: TrainOptions) -> None:
        content = {"ferryman": ferryman.__version__, "options": options.to_json(), _AGENTS: list(self._agents)}
        _replace(self.directory / _SETTINGS, json.dumps(content, indent=2) + "\n")

    def begin_metrics(self, step: int) -> None:
        """Drops the lines of later steps, which will run again."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        _replace(self.metrics, "".join(f"{line}\n" for line in lines if _step_of(line, self.metrics) <= step))

    def add_metrics(self, event: Mapping[str, Any]) -> None:
        if event["event"] in ("step", "eval"):
            with naming(self.metrics), self.metrics.open("a") as file:
                file.write(to_line(event) + "\n")

    def discard(self) -> None:
        """Removes what a new run has written, because it failed before its first step."""
        if not self.is_new:
            return
        for entry in self.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not self._was_there:
            self.directory.rmdir()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Context in which no other process can train in this directory."""
        return locked(
            self.directory / ".lock",
            f"--output {self.directory}: another process is training there; wait for it, or choose another directory",
        )


def new_run(options: TrainOptions, agents: Sequence[str] = ()) -> tuple[TrainOptions, RunDirectory]:
    """Creates the directory of a new run, which must not exist yet or must be empty."""
    directory = _directory(options)
    if options.from_step is not None:
        raise ValueError("--from-step resumes an existing run, so it needs --resume")
    if options.model is None:
        raise ValueError("MODEL is missing: a transformers directory or config.json, or gpt:small")
    if not options.data:
        raise ValueError("--data is missing: text files, token files or directories that contain them")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"--output {directory}: {_what_is_in(directory)}")
    was_there = directory.exists()
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    run = RunDirectory(directory, is_new=True, was_there=was_there, agents=agents)
    run.write_settings(options)
    return options, run


def torchrun_agents(ranks: Ranks) -> list[str]:
    """Identifies the torchrun processes (one per host) that started the ranks; empty without torchrun.

    An agent outlives restarts of its ranks, and no two jobs share one.
    """
    mine = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        mine = f"{socket.gethostname()}/{os.getppid()}/{_start_time(os.getppid())}"
    return sorted({agent for agent in ranks.all_gather_object("starting", mine) if agent is not None})


def _start_time(process: int) -> str:
    """The start time of a process, in clock ticks since boot. It distinguishes processes with the same id."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def restarted(given: TrainOptions, explicit: set[str], agents: Sequence[str]) -> tuple[TrainOptions, set[str]]:
    """The options to resume with, if torchrun has restarted this job; otherwise the options as given.

    After a restart, --from-step is ignored once the job has saved a later checkpoint.
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
) -> tuple[TrainOptions, RunDirectory, list[str]]:
    """Opens an existing run. Its recorded settings apply, except for those given now.

    Returns the options, the directory and a sentence for each setting that has changed.
    """
    directory = _directory(given)
    file = directory / _SETTINGS
    if not file.is_file():
        found = _what_is_in(directory, advice=False) if directory.exists() else "there is no such directory"
        raise ValueError(f"--resume --output {directory}: there is no run to resume: {found}")
    try:
        recorded = TrainOptions.from_json(schema.read(file, _RUN)["options"], output=directory)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is damaged, and the run cannot be resumed from it: {error!r}") from error
    now = {name: getattr(given, name) for name in (*explicit, "json", "quiet")}
    if explicit & set(LENGTHS):  # a new length replaces the recorded one, whichever option it was
        now = {**dict.fromkeys(LENGTHS), **now}
    options = TrainOptions.from_json(recorded.to_json(), **{**now, "output": directory, "resume": True})
    before, after = recorded.to_json(), options.to_json()
    different = options.differences(recorded)
    for name in different:
        if name in FIXED:
            raise ValueError(
                f"{flag(name)} {_show(after[name])}: the run was started with {_show(before[name])}, and its position "
                "in the data depends on this option. Leave it out, or start a new run"
            )
    return (
        options,
        RunDirectory(directory, is_new=False, agents=agents),
        [
            f"{flag(name) if name != 'model' else 'MODEL'} is now {_show(after[name])}, was {_show(before[name])}"
            for name in different
        ],
    )


def to_line(event: Mapping[str, Any]) -> str:
    """An event as one line of JSON. Inf and NaN, which JSON does not have, become null."""
    return json.dumps(
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in event.items()}
    )


def _has_agent(settings: Path, agents: Sequence[str]) -> bool:
    try:
        return not set(agents).isdisjoint(schema.read(settings, _RUN).get(_AGENTS, ()))
    except ValueError:  # damaged: opening the run reports it
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
        remedy = "; resume it (--resume), or choose another directory" if advice else ""
        saved = series(directory / "checkpoints")
        return f"it already holds a run ({saved[-1].name if saved else 'without a checkpoint'}){remedy}"
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    remedy = "; existing files are never overwritten, so choose another directory" if advice else ""
    return f"it holds {some or 'nothing'}{remedy}"


def _show(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value) or "nothing"
    return "the default" if value is None else str(value)


def _step_of(line: str, path: Path) -> float:
    try:
        step: int = schema.parse(line.encode(), _METRIC, path)["step"]
        return step
    except ValueError:  # truncated, because the process was killed
        return math.inf


def _replace(target: Path, text: str) -> None:
    with replacing_file(target) as file:
        file.write_text(text)
