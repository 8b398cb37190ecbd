"""What `ferryman train` can be told. The engine's settings are declared in `ferryman/options.py`, all others here."""

import dataclasses
import inspect
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from ferryman.cli import engine_flags
from ferryman.cli.defaults import DEFAULT_TEXTS, LONGEST
from ferryman.cli.engine_flags import NONE, flag, number_or_none, opposite
from ferryman.cli.model_argument import sizes
from ferryman.data.text import SUFFIXES
from ferryman.options import PlainOptions, alternatives

# A position in the data, and the numbers drawn so far, mean something only as long as these stay as they were.
FIXED = ("data", "suffix", "token_dtype", "validation", "sequence", "seed")

# Each says how long to train, so that one alone can be given.
LENGTHS = ("steps", "tokens", "epochs")

# The options for which `none` can be given, so that a run that is resumed can do without them.
OPTIONAL = (
    "micro_batches", "weight_decay", "betas", "save_every", "eval_every",
    *filter(engine_flags.takes_none, engine_flags.SETTINGS),
)  # fmt: skip

# About how a command runs, not about what is trained.
_MANNER = ("resume", "from_step", "json", "quiet")


class Betas(NamedTuple):
    """Of Adam and its kind."""

    first: float
    second: float

    def __str__(self) -> str:
        return f"{self.first},{self.second}"


def _parse_betas(text: str) -> Betas | None:
    if text.lower() == NONE:
        return None
    try:
        first, second = map(float, text.replace(",", " ").split())
    except ValueError:
        raise typer.BadParameter(f"{text!r}: two numbers are needed, with a comma, such as 0.9,0.95") from None
    return Betas(first, second)


def _option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


def _data(help: str, **settings: Any) -> Any:
    return _option("Data", help=help, **settings)


def _length(help: str, **settings: Any) -> Any:
    return _option("How much", help=help, **settings)


def _rule(help: str, **settings: Any) -> Any:
    return _option("Optimizer", help=help, **settings)


def _output(help: str, *names: str, **settings: Any) -> Any:
    return _option("Output", *names, help=help, **settings)


@dataclass(frozen=True)
class TrainOptions(PlainOptions):
    """The options of `ferryman train`: the engine's settings, and those below."""

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
        _length("Into how many a batch is cut.", show_default="as few as the memory allows", **number_or_none(int, 1)),
    ] = None

    optimizer: Annotated[Literal["adamw", "adam", "sgd", "lion", "adagrad"], _rule("The rule.")] = "adamw"
    lr: Annotated[float, _rule("The learning rate at its highest.", min=0)] = 3e-4
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], _rule("How it falls: to a tenth, to nothing, not at all.")
    ] = "cosine"
    warmup: Annotated[int, _rule("Steps in which it rises first.", min=0)] = 0
    weight_decay: Annotated[
        float | None,
        _rule("Of matrices, not of biases and norms.", show_default="the rule's own", **number_or_none(float, 0)),
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

    output: Annotated[
        Path | None, _output("A new directory for checkpoints, metrics, trace and report.", "--output", "-o")
    ] = None
    resume: Annotated[
        bool,
        _output("Resume the run in --output, with its options except for those given now.", "--resume"),
    ] = False
    from_step: Annotated[
        int | None, _output("With --resume: from the checkpoint of this step, not from the newest.", min=0)
    ] = None
    save_every: Annotated[
        int | None,
        _output(
            "Save every so many steps; at the end in any case.",
            show_default="a tenth of the run, from 10 to 500",
            **number_or_none(int, 1),
        ),
    ] = None
    keep: Annotated[int, _output("How many checkpoints are kept.", min=1)] = 2
    eval_every: Annotated[
        int | None,
        _output("Evaluate before the first and every so many steps; at the end in any case.", **number_or_none(int, 1)),
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
        """The settings of the engine, as its keyword arguments."""
        return {name: getattr(self, name) for name in engine_flags.SETTINGS}

    def to_json(self) -> dict[str, Any]:
        """What a run is remembered by. Paths are whole, so that it can be resumed from anywhere."""
        values = {name: getattr(self, name) for name in PARAMETERS}
        values["resident"] = list(self.resident)  # as JSON has it
        values["data"] = [str(path.absolute()) for path in self.data or ()]
        model = Path(self.model or "")
        values["model"] = str(model.absolute()) if model.exists() and self.model else self.model
        del values["output"]
        return {name: value for name, value in values.items() if name not in _MANNER}

    @classmethod
    def from_json(cls, values: dict[str, Any], **given: Any) -> "TrainOptions":
        recorded = {name: values[name] for name in PARAMETERS if name in values}
        for name, value in recorded.items():
            _check_kind(name, value)
        recorded |= engine_flags.values_of({name: recorded[name] for name in engine_flags.SETTINGS if name in recorded})
        recorded["data"] = [Path(path) for path in values["data"]]
        recorded["betas"] = values["betas"] and Betas(*values["betas"])
        return cls(**{**recorded, **given})

    def differences(self, other: "TrainOptions") -> list[str]:
        """What has another value there, as the names of options."""
        mine, theirs = self.to_json(), other.to_json()
        return [name for name in mine if json.dumps(mine[name]) != json.dumps(theirs[name])]

    def new_command(self) -> str:
        """That begins a run with these, once it is said with what data, and where."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in PARAMETERS if name != "model"}
        given = {name: value for name, value in given.items() if value != defaults[name]}
        words = [word for name, value in given.items() for word in _words(name, value)]
        return " ".join(["ferryman train", shlex.quote(str(self.model)), "--data DATA --output RUN", *words])

    def command(self) -> str:
        """That goes on with the run."""
        return f"ferryman train --resume --output {shlex.quote(str(self.output))}"


def _check_kind(name: str, value: Any) -> None:
    """Raises if a recorded value has a type that JSON never has for this option."""
    kinds = alternatives(get_type_hints(TrainOptions)[name])
    for kind in kinds:
        origin = get_origin(kind)
        if origin is Literal:
            fits = value in get_args(kind)
        elif kind is float:
            fits = type(value) in (int, float)
        elif kind is Betas:
            numbers = value if isinstance(value, list | tuple) else ()
            fits = len(numbers) == 2 and all(type(one) in (int, float) for one in numbers)
        elif origin is not None:  # a list, or any other sequence
            fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
        else:
            fits = type(value) is (str if kind is Path else kind)
        if fits:
            return
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise ValueError(f"options.{name} must be {wanted}, but is {value!r:.60}")


def _words(name: str, value: Any) -> list[str]:
    """An option as it is given on a command line."""
    if isinstance(value, bool):
        return [flag(name) if value else opposite(name)]
    values = value if type(value) in (list, tuple) else [value]
    return [f"{flag(name)} {shlex.quote(str(one))}" for one in values]


def _parameters() -> dict[str, inspect.Parameter]:
    """In the order in which `--help` shows them."""
    own = [one for one in inspect.signature(TrainOptions).parameters.values() if one.name not in engine_flags.SETTINGS]
    engine = [engine_flags.parameter(name, DEFAULT_TEXTS.get(name, "")) for name in engine_flags.SETTINGS]
    return dict(engine_flags.signature(own, engine, before="output").parameters)


PARAMETERS = _parameters()
