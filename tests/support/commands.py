"""Runs `ferryman train` as a user would, in this process."""

import json
import os
import threading
import time

from typer.testing import CliRunner

from ferryman.cli.main import app

GPT = "gpt:layers=2,width=16,heads=2,context=32"
# Where it is settled who updates what, a step does not depend on how fast anyone was.
EXACT = ["--updates", "host", "--schedule", "constant", "--lr", "0.01", "--max-grad-norm", "1"]


def train(*arguments):
    arguments = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, ["train", *(["--device", "cpu"] if "--device" not in arguments else []), *arguments])


def trained(*arguments):
    result = train(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments):
    """The message of the ValueError with which `ferryman train` refuses these arguments."""
    result = train(*arguments)
    assert isinstance(result.exception, ValueError), result.output
    return str(result.exception)


def metrics(run, event="step"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def losses(run):
    return [(line["step"], line["loss"]) for line in metrics(run)]


class sending:  # noqa: N801 - reads like a function
    """A context in which a process receives a signal as soon as the run has made two steps."""

    def __init__(self, number, run, process=None):
        self._what = (number, run / "metrics.jsonl", process or os.getpid())
        self._thread = threading.Thread(target=self._send)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._thread.join()

    def _send(self):
        number, file, process = self._what
        while not file.exists() or file.read_text().count("\n") < 2:
            time.sleep(0.01)
        os.kill(process, number)
