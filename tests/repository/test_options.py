"""One setting, one declaration: what the engine, the commands, the trainer and the ranks make of `options.py`."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ferryman
from ferryman.cli import engine_flags
from ferryman.cli.defaults import DEFAULT_TEXTS
from ferryman.cli.main import app
from ferryman.cli.train_options import TrainOptions
from ferryman.distributed.agreement import compare
from ferryman.engine import Engine
from ferryman.integrations import arguments
from ferryman.model.loss import model_loss
from ferryman.options import SETTINGS, EngineOptions, PlainOptions, declared
from support.models import CASES, build

# A new setting, another default or another type is a decision: it is written down here, too.
FROZEN = [
    ("device", "torch.device | str | None", None),
    ("memory", "int | str | None", None),
    ("precision", "Literal['fp32', 'bf16', 'fp16'] | None", None),
    ("state", "Literal['fp32', 'bf16', '8bit']", "fp32"),
    ("max_grad_norm", "float | None", None),
    ("on_nonfinite", "Literal['raise', 'skip']", "raise"),
    ("deferred", "bool", False),
    ("host_threads", "int | None", None),
    ("units", "Sequence[str] | None", None),
    ("resident", "Sequence[str]", ()),
    ("stash", "Literal['auto', 'device', 'host']", "auto"),
    ("recompute", "Literal['auto', 'always', 'never']", "auto"),
    ("slots", "int | None", None),
    ("held", "bool | None", None),
    ("updates", "str", "auto"),
    ("subgroup", "int | None", None),
    ("chunked_loss", "bool | None", None),
    ("compile", "bool", False),
    ("loss", "Callable[[Module, Any], torch.Tensor]", model_loss),
    ("reduction", "Literal['mean', 'sum']", "mean"),
    ("split", "Callable[[Any, int], list[Any]] | None", None),
    ("trace", "Trace | None", None),
]
# Python objects, which no command line can express.
OBJECTS = {"loss", "reduction", "split", "trace"}
# Not the same on all ranks: code, and what belongs to one process.
LOCAL = {"host_threads", "loss", "split", "trace"}


def documented():
    """Name, type, help and default of each setting, as `help(Engine)` shows them."""
    text = Engine.__doc__[Engine.__doc__.index("Settings, ") :]
    entries = re.split(r"\n    (?=\w+ \()", text)[1:]
    return {e.split(" (")[0]: re.fullmatch(r"\w+ \((.*)\):\n(.*)", e, re.DOTALL).groups() for e in entries}


def test_the_list_of_settings_is_frozen():
    found = [(name, documented()[name][0], getattr(EngineOptions, name)) for name in SETTINGS]
    assert found == FROZEN
    assert [field.name for field in dataclasses.fields(EngineOptions)] == list(SETTINGS), "each has its declaration"


def test_each_has_one_line_of_help():
    for name, setting in SETTINGS.items():
        assert setting.help.endswith("."), name
        assert setting.help[0].isupper(), name
        assert "\n" not in setting.help, name


def test_the_engine_shows_them_to_users():
    parameters = inspect.signature(Engine).parameters
    assert list(parameters) == ["model", "optimizer", *SETTINGS]
    for name, setting in SETTINGS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].annotation == setting.kind
        assert parameters[name].default == getattr(EngineOptions, name)
        assert setting.help in " ".join(documented()[name][1].split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_type_checkers_see_them_too(tmp_path):
    """Not only at run time: a name that is not there and a value of another type are errors."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "import ferryman\n"
        "model = torch.nn.Linear(2, 2)\n"
        "ferryman.Engine(model, torch.optim.SGD(model.parameters()), memory='1GiB', stash='host', slots=2)\n"
        "ferryman.Engine(model, memroy='1GiB')\n"
        "ferryman.Engine(model, slots='two')\n"
        "ferryman.Engine(model, stash='disk')\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(program)]
    root = Path(ferryman.__file__).parents[2]  # with the settings and the cache of mypy
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    lines = [int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error:" in line]
    assert lines == [5, 6, 7], found.stdout + found.stderr


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"Engine\(\) has no setting 'memroy'; did you mean 'memory'\?"):
        Engine(build(CASES["toy"]), device="cpu", memroy="1GiB")


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().memory = "1GiB"


WRONG = {
    "memory": "much", "precision": "fp8", "state": "4bit", "max_grad_norm": -1.0, "on_nonfinite": "ignore",
    "deferred": "yes", "host_threads": 0, "units": [], "resident": "norm", "stash": "disk", "slots": 0, "held": "yes",
    "recompute": "often",
    "updates": "strid:2", "subgroup": 1, "chunked_loss": "yes", "compile": "yes", "loss": "mse", "reduction": "max",
    "split": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("device", "trace")])
def test_each_is_checked_wherever_options_are_made(name):
    """A device is checked by the machine that has it, or not."""
    with pytest.raises(ValueError, match=f"{name}="):
        EngineOptions(**{name: WRONG[name]})
    if name not in OBJECTS:
        with pytest.raises(ValueError, match=f"{name}="):
            TrainOptions(**{name: WRONG[name]})


def shown_by(command):
    return " ".join(re.sub("[│╭╮╰╯─]", " ", run(command)).split())


def run(command):
    return CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"}).output


@pytest.mark.parametrize(("command", "own"), [("train", set()), ("plan", {"device", "memory", "host_threads"})])
def test_commands_have_them_as_options(command, own):
    """With the same help, and the same default unless the commands choose it; `plan` describes the machine itself."""
    shown = shown_by(command)
    assert set(declared(PlainOptions)) == set(SETTINGS) - OBJECTS
    for name in set(SETTINGS) - OBJECTS - own:
        setting, default = SETTINGS[name], getattr(EngineOptions, name)
        assert f"{engine_flags.flag(name)} " in shown
        assert setting.help in shown
        if name not in DEFAULT_TEXTS:
            text = f"({setting.default})" if setting.default else str(default or "").replace("False", "no-deferred")
            assert re.search(re.escape(setting.help) + r"( May be repeated\.)?" + _default(text), shown), name
    for name in OBJECTS - {"trace"}:
        assert f"{engine_flags.flag(name)} " not in shown


def _default(text):
    return rf" \[default: {re.escape(text)}\]" if text else ""


def test_the_train_command_has_the_engines_defaults():
    assert all(getattr(TrainOptions, name) == getattr(EngineOptions, name) for name in declared(PlainOptions))
    made = TrainOptions().for_engine()
    assert {name: made[name] for name in made} == {name: getattr(EngineOptions(), name) for name in made}


def test_the_trainer_takes_what_it_does_not_say_itself():
    assert set(arguments._OPTIONS) | set(arguments._TRAINERS) == {"model", "optimizer", *SETTINGS}
    assert not set(arguments._OPTIONS) & set(arguments._TRAINERS)
    every = {name: object() for name in SETTINGS}
    left = {name for name in SETTINGS if not SETTINGS[name].needs_optimizer} - {"trace"}
    assert set(arguments.evaluation_options(every)) == left


class Recording:
    """Stands where ranks would compare: what they are asked to agree on."""

    def __init__(self):
        self.facts = {}

    def agree(self, facts):
        self.facts |= facts


def test_ranks_compare_all_that_is_not_local():
    asked = Recording()
    options = EngineOptions(device=torch.device("cpu"), memory="1KiB", stash="host")
    compare(asked, torch.nn.Identity(), None, options.compared())
    assert set(asked.facts) == {f"{name}=" for name in set(SETTINGS) - LOCAL}
    assert asked.facts["memory="] == "1024", "however it is written"
    assert asked.facts["device="] == "'cpu'"
    assert asked.facts["stash="] == "'host'"


@pytest.mark.parametrize("name", [name for name in SETTINGS if SETTINGS[name].needs_optimizer])
def test_what_is_about_updates_needs_an_optimizer(name):
    given = {
        "precision": "bf16", "state": "8bit", "max_grad_norm": 1.0, "deferred": True, "updates": "host",
        "subgroup": 4096,
    }[name]  # fmt: skip
    with pytest.raises(ValueError, match=f"{name}= is about updates, so the engine needs the optimizer"):
        Engine(build(CASES["toy"]), device="cpu", **{name: given})
