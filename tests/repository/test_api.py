"""docs/api.md against the code: every public name and every setting is there, nothing else is, and its code runs."""

import dataclasses
import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch

import ferryman
from ferryman.cli.main import app
from ferryman.data import tokens, windows
from ferryman.engine import Engine
from ferryman.integrations.trainer import FerrymanTrainer
from ferryman.observe.report import figures, write_report
from ferryman.observe.trace import Sample, Step, Trace, TraceSpan, trace_path
from ferryman.options import SETTINGS
from ferryman.plan.fit import Choice
from ferryman.plan.keep import CallCounts
from ferryman.server.stats import Stats
from support.fresh import run_fresh

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api.md").read_text()
# The names of objects on the page, and their classes.
OBJECTS = {
    "engine": Engine, "trace": Trace, "tokens": tokens.Tokens, "windows": windows.Windows, "trainer": FerrymanTrainer,
}  # fmt: skip
PUBLIC = [
    *(getattr(ferryman, name) for name in ferryman.__all__ if callable(getattr(ferryman, name))),
    Trace, trace_path, write_report, FerrymanTrainer,
    tokens.open_tokens, tokens.TokenFile, tokens.Tokens, windows.Windows,
]  # fmt: skip


def public(owner):
    return {name for name in vars(owner) if not name.startswith("_")}


def entry(name, thing):
    """The heading of a public name: its signature without types, and what it returns."""
    function = thing.fget if isinstance(thing, property) else thing
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    arguments = str(inspect.Signature(parameters)).replace("slice(None, None, None)", "slice(None)")
    returned = signature.return_annotation
    is_told = isinstance(returned, str) and returned != "None"
    return f"{name}{'' if function is not thing else arguments}{f' -> {returned}' if is_told else ''}"


def headings():
    return re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)


def test_the_settings_are_those_of_the_engine():
    """If not: `python docs/make_api.py`."""
    script = runpy.run_path(str(DOCS / "make_api.py"))
    assert script["renewed"](PAGE) == PAGE
    listed = script["settings"]()
    assert re.findall(r"^- \*\*`(\w+)`\*\* \(`.+?`\): ", listed, re.MULTILINE) == list(SETTINGS)
    assert all(" ".join(setting.help.split()) in listed for setting in SETTINGS.values())


def test_each_method_of_an_engine_has_an_entry():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2)))
    with Engine(model, device="cpu") as engine:
        own = public(engine)  # set when an engine is made
    methods = {name: inspect.getattr_static(Engine, name) for name in public(Engine)}
    expected = {entry(f"engine.{name}", thing) for name, thing in methods.items()}
    found = {heading for heading in headings() if heading.startswith("engine.")}
    assert found == expected | {f"engine.{name}" for name in own}


def test_each_other_public_name_has_an_entry():
    expected = {name_and_signature(thing) for thing in PUBLIC}
    assert {heading for heading in headings() if not heading.startswith("engine.")} == expected


def name_and_signature(thing):
    module = "ferryman" if thing.__name__ in ferryman.__all__ else thing.__module__.removesuffix(".page")
    name = f"{module}.{thing.__name__}"
    return f"{name}(model, optimizer=None, **settings)" if thing is Engine else entry(name, thing)


def test_the_names_of_the_package_are_listed():
    assert all(f"`ferryman.{name}`" in PAGE for name in ferryman.__all__)


@pytest.mark.parametrize("name", ["trace", "windows", "tokens"])
def test_each_attribute_of_what_is_public_is_mentioned(name):
    assert {found for found in public(OBJECTS[name]) if f"`{name}.{found}" not in PAGE} == set()


def test_what_is_mentioned_exists():
    missing = []
    for name, attribute in set(re.findall(rf"(?<![\w.])({'|'.join(OBJECTS)})\.(\w+)", code())):
        owner = OBJECTS[name]
        if not hasattr(owner, attribute) and attribute not in instance_attributes(owner):
            missing.append(f"{name}.{attribute}")
    for path in set(re.findall(r"\bferryman(?:\.\w+)+", code())):
        if not exists(path):
            missing.append(path)
    assert missing == []


def code():
    """All code on the page, in lines and in blocks, without what strings say."""
    return re.sub(r'"[^"\n]*"', '""', "\n".join(re.findall(r"```python\n.*?```|`[^`\n]+`", PAGE, re.DOTALL)))


def instance_attributes(owner):
    return set(re.findall(r"self\.([a-z]\w*)(?:, self\._\w+)*(?:: [^=\n]+)? = ", inspect.getsource(owner)))


def exists(path):
    module, _, name = path.rpartition(".")
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), name)
    return True


def test_keyword_arguments_that_are_mentioned_exist():
    known = {parameter for thing in PUBLIC for parameter in inspect.signature(thing).parameters}
    known |= {p for name in public(Engine) for p in arguments_of(inspect.getattr_static(Engine, name))}
    assert set(re.findall(r"`(\w+)=", PAGE)) - known == set()


def arguments_of(thing):
    return () if isinstance(thing, property) else inspect.signature(thing).parameters


@pytest.mark.parametrize(
    ("section", "of"),
    [
        ("`engine.stats() ", Stats), ("`engine.stats() ", CallCounts), ("`engine.choice`", Choice),
        ("`ferryman.observe.trace.Trace(", Step), ("`ferryman.observe.trace.Trace(", TraceSpan),
        ("`ferryman.observe.trace.Trace(", Sample),
    ],
)  # fmt: skip
def test_the_figures_of_what_is_returned_are_named(section, of):
    text = PAGE.split(f"### {section}")[1].split("\n#")[0]
    names = [field.name for field in dataclasses.fields(of)] if dataclasses.is_dataclass(of) else of._fields
    assert [name for name in names if f"`{name}`" not in text] == []


def test_figures_of_plans_and_reports_exist():
    with Engine(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2))), device="cpu") as engine:
        for name in re.findall(r"`(\w+)`", PAGE.split("### `engine.plan -> Plan`\n")[1].split("\n#")[0]):
            assert hasattr(engine.plan, name)
        for name in re.findall(r"`(\w+)`", PAGE.split("### `engine.units ")[1].split("\n", 1)[1].split("\n#")[0]):
            assert hasattr(engine.units[0], name)
    text = PAGE.split("Returns the figures of each rank:")[1].split(".")[0]
    assert set(re.findall(r"`(\w+)`", text)) <= {field.name for field in dataclasses.fields(figures.Figures)}


def test_the_commands_are_all():
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`ferryman (\w+)`", PAGE.split("## Commands\n")[1])) == commands


def test_the_examples_run_and_print_what_they_say(tmp_path):
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    ran = run_fresh(blocks, directory=tmp_path)
    assert ran.returncode == 0, ran.stderr
    expected = re.findall(r"^print\(.*\) +# (.*)$", blocks, re.MULTILINE)
    assert len(expected) == blocks.count("print(")
    assert ran.stdout.splitlines() == expected
