"""What `ferryman train` can be told: every option once, with its default and its help."""

import dataclasses
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from ferryman.cli.defaults import LONGEST
from ferryman.cli.model_argument import sizes
from ferryman.data.text import SUFFIXES

# The options that are handed to `ferryman.Engine` as they are.
ENGINE = (
    "device", "memory", "precision", "max_grad_norm", "on_nonfinite", "deferred", "host_threads", "units", "resident",
    "stash", "slots", "held", "updates", "subgroup",
)  # fmt: skip

# A position in the data, and the numbers drawn so far, mean something only as long as these stay as they were.
FIXED = ("data", "suffix", "token_dtype", "validation", "sequence", "seed")

# Each says how long to train, so that one alone can be given.
LENGTHS = ("steps", "tokens", "epochs")

# What `none` takes back, so that a run that is resumed can do without.
OPTIONAL = (
    "micro_batches", "weight_decay", "betas", "device", "memory", "precision", "max_grad_norm", "host_threads", "units",
    "resident", "slots", "subgroup", "save_every", "eval_every",
)  # fmt: skip
NONE = "none"

# About how a command runs, not about what is trained.
_MANNER = ("resume", "from_step", "json", "quiet")


class Betas(NamedTuple):
    """Of Adam and its kind."""

    first: float
    second: float

    def __str__(self) -> str:
        return f"{self.first},{self.second}"


def or_none(kind: type[int] | type[float], least: int | None = None) -> dict[str, Any]:
    """A number, or `none`."""
    what = ("a whole number" if kind is int else "a number") + ("" if least is None else f" of at least {least}")

    def parse(text: str) -> int | float | None:
        if text.lower() == NONE:
            return None
        try:
            value = kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {what}, nor {NONE}") from None
        if not math.isfinite(value) or (least is not None and value < least):
            raise typer.BadParameter(f"{text} is not {what}, nor {NONE}")
        return value

    return {"parser": parse, "metavar": f"<{kind.__name__}|{NONE}>"}


def _parse_betas(text: str) -> Betas | None:
    if text.lower() == NONE:
        return None
    try:
        first, second = map(float, text.replace(",", " ").split())
    except ValueError:
        raise typer.BadParameter(f"{text!r}: two numbers are needed, with a comma, such as 0.9,0.95") from None
    return Betas(first, second)


def given_as(values: dict[str, Any]) -> dict[str, Any]:
    """With nothing in place of `none`."""
    return {name: None if name in OPTIONAL and value in (NONE, [NONE]) else value for name, value in values.items()}


_TEXT = {"metavar": f"<str|{NONE}>"}


def _option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


def _data(help: str, **settings: Any) -> Any:
    return _option("Data", help=help, **settings)


def _length(help: str, **settings: Any) -> Any:
    return _option("How much", help=help, **settings)


def _rule(help: str, **settings: Any) -> Any:
    return _option("Optimizer", help=help, **settings)


def _engine(help: str, *names: str, **settings: Any) -> Any:
    return _option("Engine", *names, help=help, **settings)


def _output(help: str, *names: str, **settings: Any) -> Any:
    return _option("Output", *names, help=help, **settings)


# What `ferryman plan` can be told, too.
OnNonfinite = Annotated[Literal["raise", "skip"], _engine("What happens to a step with inf or NaN.")]
Deferred = Annotated[
    bool, _engine("Update after all gradients are there, not beside the backward.", "--deferred/--no-deferred")
]
Units = Annotated[
    list[str] | None,
    _engine("Modules that travel, by name or pattern; may be repeated.", show_default="found", **_TEXT),
]
Resident = Annotated[list[str] | None, _engine("Parameters that stay on the device; may be repeated.", **_TEXT)]
Slots = Annotated[
    int | None,
    _engine("Units' weights on the device at once.", show_default="what the memory allows", **or_none(int, 1)),
]
Held = Annotated[
    bool | None,
    _engine("Whether all weights stay on the device.", "--held/--relayed", show_default="if there is room"),
]
SubgroupSize = Annotated[int | None, _engine("Parameters updated at a time.", show_default="chosen", **or_none(int, 1))]


@dataclass(frozen=True)
class Options:
    """In the order in which `--help` shows them."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A directory or config.json of transformers, or gpt:SIZE, the built-in byte-level GPT. "
            f"SIZE is {sizes()}.",
        ),
    ] = None

    data: Annotated[
        list[Path] | None, _data("Text or token files (.bin, .npy), or directories of them; may be repeated.")
    ] = None
    suffix: Annotated[
        list[str] | None,
        _data("Which files of a directory are text; may be repeated.", show_default=" ".join(SUFFIXES)),
    ] = None
    token_dtype: Annotated[Literal["uint8", "uint16", "uint32"], _data("What .bin files consist of.")] = "uint16"
    validation: Annotated[
        float, _data("The share of the tokens, at their end, that is kept for evaluation.", min=0, max=0.5)
    ] = 0.05

    steps: Annotated[int | None, _length("Stop after this many steps ...", min=1)] = None
    tokens: Annotated[int | None, _length("... or after so many tokens ...", min=1)] = None
    epochs: Annotated[
        float | None, _length("... or after seeing the data so often, such as 0.5. Without any: once.", min=0)
    ] = None
    batch: Annotated[int, _length("Windows in a step, of all ranks.", min=1)] = 8
    sequence: Annotated[
        int | None, _length("Tokens in a window.", min=2, show_default=f"the model's context, at most {LONGEST}")
    ] = None
    micro_batches: Annotated[
        int | None,
        _length("Into how many a batch is cut.", show_default="as few as the memory allows", **or_none(int, 1)),
    ] = None

    optimizer: Annotated[Literal["adamw", "adam", "sgd", "lion", "adagrad"], _rule("The rule.")] = "adamw"
    lr: Annotated[float, _rule("The learning rate at its highest.", min=0)] = 3e-4
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], _rule("How it falls: to a tenth, to nothing, not at all.")
    ] = "cosine"
    warmup: Annotated[int, _rule("Steps in which it rises first.", min=0)] = 0
    weight_decay: Annotated[
        float | None,
        _rule("Of matrices, not of biases and norms.", show_default="the rule's own", **or_none(float, 0)),
    ] = None
    betas: Annotated[
        Betas | None,
        _rule(
            "Of adamw, adam and lion: two numbers with a comma, such as 0.9,0.95.",
            show_default="the rule's own",
            parser=_parse_betas,
            metavar=f"<float,float|{NONE}>",
        ),
    ] = None

    device: Annotated[
        str | None, _engine("Such as cuda, cpu or virtual.", show_default="the accelerator there is", **_TEXT)
    ] = None
    memory: Annotated[
        str | None,
        _engine(
            "A budget of device memory, such as 8GiB; it is kept.", show_default="nine tenths of what is free", **_TEXT
        ),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "none"] | None,
        _engine("Of compute and the link.", show_default="what the model has"),
    ] = None
    max_grad_norm: Annotated[float | None, _engine("Clip gradients to this global norm.", **or_none(float))] = None
    on_nonfinite: OnNonfinite = "raise"
    deferred: Deferred = False
    host_threads: Annotated[
        int | None, _engine("For updates on the host.", show_default="all CPUs", **or_none(int, 1))
    ] = None
    units: Units = None
    resident: Resident = None
    stash: Annotated[Literal["auto", "device", "host"], _engine("Where activations wait.")] = "auto"
    slots: Slots = None
    held: Held = None
    updates: Annotated[str, _engine("Who updates: auto, host, stride:K or static:R.")] = "auto"
    subgroup: SubgroupSize = None

    output: Annotated[
        Path | None, _output("A new directory for checkpoints, metrics, trace and report.", "--output", "-o")
    ] = None
    resume: Annotated[
        bool,
        _output("Go on with the run in --output. Options not given are as they were; none takes one back.", "--resume"),
    ] = False
    from_step: Annotated[
        int | None, _output("With --resume: from the checkpoint of this step, not from the newest.", min=0)
    ] = None
    save_every: Annotated[
        int | None,
        _output(
            "Save every so many steps; at the end in any case.",
            show_default="a tenth of the run, from 10 to 500",
            **or_none(int, 1),
        ),
    ] = None
    keep: Annotated[int, _output("How many checkpoints are kept.", min=1)] = 2
    eval_every: Annotated[
        int | None,
        _output("Evaluate before the first and every so many steps; at the end in any case.", **or_none(int, 1)),
    ] = None
    eval_windows: Annotated[int, _output("On at most so many windows.", min=1)] = 64
    sample: Annotated[int, _output("Tokens of text to write at the end.", min=0)] = 0
    seed: Annotated[int, _output("Of the weights, if they are new, and of the order of the data.")] = 0
    trace: Annotated[bool, _output("Record the lanes, for the live display, trace.json and report.html.")] = True
    json: Annotated[
        bool, _output("Print events as lines of JSON, and nothing else; an error is one of them.", "--json")
    ] = False
    quiet: Annotated[bool, _output("Print nothing but errors.", "--quiet", "-q")] = False

    def for_engine(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ENGINE}
        return {**values, "resident": self.resident or ()}

    def to_json(self) -> dict[str, Any]:
        """What a run is remembered by. Paths are whole, so that it can be resumed from anywhere."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["data"] = [str(path.absolute()) for path in self.data or ()]
        model = Path(self.model or "")
        values["model"] = str(model.absolute()) if model.exists() and self.model else self.model
        del values["output"]
        return {name: value for name, value in values.items() if name not in _MANNER}

    @classmethod
    def from_json(cls, values: dict[str, Any], **given: Any) -> "Options":
        names = [field.name for field in dataclasses.fields(cls)]
        recorded = {name: values[name] for name in names if name in values}
        recorded["data"] = [Path(path) for path in values["data"]]
        recorded["betas"] = values["betas"] and Betas(*values["betas"])
        return cls(**{**recorded, **given})

    def differences(self, other: "Options") -> list[str]:
        """What has another value there, as the names of options."""
        mine, theirs = self.to_json(), other.to_json()
        return [name for name in mine if json.dumps(mine[name]) != json.dumps(theirs[name])]

    def new_command(self) -> str:
        """That begins a run with these, once it is said with what data, and where."""
        fields = [field for field in dataclasses.fields(self) if field.name != "model"]
        given = {
            field.name: getattr(self, field.name) for field in fields if getattr(self, field.name) != field.default
        }
        words = [word for name, value in given.items() for word in _words(name, value)]
        return " ".join(["ferryman train", shlex.quote(str(self.model)), "--data DATA --output RUN", *words])

    def command(self) -> str:
        """That goes on with the run."""
        return f"ferryman train --resume --output {shlex.quote(str(self.output))}"


def _words(name: str, value: Any) -> list[str]:
    """An option as it is given on a command line."""
    if isinstance(value, bool):
        return [flag(name) if value else "--relayed" if name == "held" else f"--no-{flag(name)[2:]}"]
    values = value if isinstance(value, list) else [value]
    return [f"{flag(name)} {shlex.quote(str(one))}" for one in values]


def flag(name: str) -> str:
    """As it is written on a command line."""
    return f"--{name.replace('_', '-')}"
