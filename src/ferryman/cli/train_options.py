"""The options of `ferryman train`. The engine's settings are declared in `ferryman/options.py`, all others here."""

import dataclasses
import inspect
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from ferryman.cli import engine_flags
from ferryman.cli.defaults import DEFAULT_TEXTS, MAX_SEQUENCE
from ferryman.cli.engine_flags import NONE, flag, number_or_none, opposite
from ferryman.cli.model_argument import model_help
from ferryman.data.text import SUFFIXES
from ferryman.options import PlainOptions, alternatives

# Options that cannot change when a run is resumed: the position in the data and the random numbers depend on them.
FIXED = ("data", "suffix", "token_dtype", "validation", "sequence", "seed")

# Options that set the length of the training. Only one of them can be given.
LENGTHS = ("steps", "tokens", "epochs")

# Options that accept `none`, which resets an option of a resumed run to its default.
OPTIONAL = (
    "micro_batches", "weight_decay", "betas", "save_every", "eval_every",
    *filter(engine_flags.takes_none, engine_flags.SETTINGS),
)  # fmt: skip

# Options of one invocation of the command, which are not recorded with the run.
_NOT_RECORDED = ("resume", "from_step", "json", "quiet")


class Betas(NamedTuple):
    """The coefficients of the running averages in Adam, AdamW and Lion."""

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
        raise typer.BadParameter(f"{text!r}: give two numbers separated by a comma, such as 0.9,0.95") from None
    return Betas(first, second)


def _option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


def _data(help: str, **settings: Any) -> Any:
    return _option("Data", help=help, **settings)


def _length(help: str, **settings: Any) -> Any:
    return _option("Length and batches", help=help, **settings)


def _optimizer(help: str, **settings: Any) -> Any:
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
            help=model_help(),
        ),
    ] = None

    data: Annotated[
        list[Path] | None, _data("Text files, token files (.bin, .npy) or directories of them. May be repeated.")
    ] = None
    suffix: Annotated[
        list[str] | None,
        _data("Suffix of text files, for directories. May be repeated.", show_default=" ".join(SUFFIXES)),
    ] = None
    token_dtype: Annotated[Literal["uint8", "uint16", "uint32"], _data("Type of token ids in .bin files.")] = "uint16"
    validation: Annotated[
        float, _data("Share of the tokens, at the end of the data, to hold out for evaluation.", min=0, max=0.5)
    ] = 0.05

    steps: Annotated[int | None, _length("Stop after this many steps.", min=1)] = None
    tokens: Annotated[int | None, _length("Stop after this many tokens.", min=1)] = None
    epochs: Annotated[
        float | None,
        _length("Stop after this many passes over the data; 1 if no length is given.", min=0),
    ] = None
    batch: Annotated[int, _length("Windows per step, over all ranks.", min=1)] = 8
    sequence: Annotated[
        int | None,
        _length("Tokens per window.", min=2, show_default=f"the model's context, at most {MAX_SEQUENCE}"),
    ] = None
    micro_batches: Annotated[
        int | None,
        _length("Micro-batches per step.", show_default="as few as the memory allows", **number_or_none(int, 1)),
    ] = None

    optimizer: Annotated[Literal["adamw", "adam", "sgd", "lion", "adagrad"], _optimizer("The optimizer.")] = "adamw"
    lr: Annotated[float, _optimizer("Peak learning rate.", min=0)] = 3e-4
    schedule: Annotated[
        Literal["cosine", "linear", "constant"],
        _optimizer("Decay of the learning rate: to a tenth, to zero, or none."),
    ] = "cosine"
    warmup: Annotated[int, _optimizer("Steps in which the learning rate rises linearly to its peak.", min=0)] = 0
    weight_decay: Annotated[
        float | None,
        _optimizer(
            "Weight decay of matrices; biases and norms have none.",
            show_default="the optimizer's default",
            **number_or_none(float, 0),
        ),
    ] = None
    betas: Annotated[
        Betas | None,
        _optimizer(
            "Betas of adamw, adam and lion, separated by a comma, such as 0.9,0.95.",
            show_default="the optimizer's default",
            parser=_parse_betas,
            metavar=f"<float,float|{NONE}>",
        ),
    ] = None

    output: Annotated[
        Path | None, _output("New directory for checkpoints, metrics, trace and report.", "--output", "-o")
    ] = None
    resume: Annotated[
        bool,
        _output("Resume the run in --output with its recorded options, except for those given now.", "--resume"),
    ] = False
    from_step: Annotated[
        int | None, _output("With --resume: start from the checkpoint of this step instead of the newest one.", min=0)
    ] = None
    save_every: Annotated[
        int | None,
        _output(
            "Save a checkpoint every this many steps, and at the end.",
            show_default="a tenth of the run, between 10 and 500",
            **number_or_none(int, 1),
        ),
    ] = None
    keep: Annotated[int, _output("Number of checkpoints to keep.", min=1)] = 2
    eval_every: Annotated[
        int | None,
        _output("Evaluate before the first step, every this many steps, and at the end.", **number_or_none(int, 1)),
    ] = None
    eval_windows: Annotated[int, _output("Maximum number of windows per evaluation.", min=1)] = 64
    sample: Annotated[int, _output("Tokens of text to generate at the end.", min=0)] = 0
    seed: Annotated[int, _output("Seed of new weights and of the order of the data.")] = 0
    trace: Annotated[bool, _output("Record a trace, for the live display, trace.json and report.html.")] = True
    json: Annotated[bool, _output("Print only events, errors included, each as a line of JSON.", "--json")] = False
    quiet: Annotated[bool, _output("Print only errors.", "--quiet", "-q")] = False

    def for_engine(self) -> dict[str, Any]:
        """The engine's keyword arguments."""
        return {name: getattr(self, name) for name in engine_flags.SETTINGS}

    def to_json(self) -> dict[str, Any]:
        """The options to record with a run. Paths are absolute, so that it can be resumed from any directory."""
        values = {name: getattr(self, name) for name in PARAMETERS}
        values["resident"] = list(self.resident)  # JSON has no tuples
        values["data"] = [str(path.absolute()) for path in self.data or ()]
        model = Path(self.model or "")
        values["model"] = str(model.absolute()) if model.exists() and self.model else self.model
        del values["output"]
        return {name: value for name, value in values.items() if name not in _NOT_RECORDED}

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
        """The names of the options whose values differ from those of `other`."""
        mine, theirs = self.to_json(), other.to_json()
        return [name for name in mine if json.dumps(mine[name]) != json.dumps(theirs[name])]

    def new_command(self) -> str:
        """The command that starts a run with these options, with placeholders for its data and its directory."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in PARAMETERS if name != "model"}
        given = {name: value for name, value in given.items() if value != defaults[name]}
        words = [word for name, value in given.items() for word in _words(name, value)]
        return " ".join(["ferryman train", shlex.quote(str(self.model)), "--data DATA --output RUN", *words])

    def command(self) -> str:
        """The command that resumes the run."""
        return f"ferryman train --resume --output {shlex.quote(str(self.output))}"


def _check_kind(name: str, value: Any) -> None:
    """Raises a ValueError if a recorded value does not have the option's type."""
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
    """An option as words of a command line."""
    if isinstance(value, bool):
        return [flag(name) if value else opposite(name)]
    values = value if type(value) in (list, tuple) else [value]
    return [f"{flag(name)} {shlex.quote(str(one))}" for one in values]


def _parameters() -> dict[str, inspect.Parameter]:
    """The parameters of the command, in the order in which `--help` shows them."""
    own = [one for one in inspect.signature(TrainOptions).parameters.values() if one.name not in engine_flags.SETTINGS]
    engine = [engine_flags.parameter(name, DEFAULT_TEXTS.get(name, "")) for name in engine_flags.SETTINGS]
    return dict(engine_flags.signature(own, engine, before="output").parameters)


PARAMETERS = _parameters()
