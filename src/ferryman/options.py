"""Every setting of an engine, declared once: its type, its default, its check and one line of help.

To add a setting, add a field to `PlainOptions` (values that can be typed on a command line) or to `EngineOptions`
(Python objects), and the code that uses it. These follow from the declaration:
- `Engine(...)`: keyword arguments, their types, their checks and the documentation (`takes_options`, `describe`);
- `ferryman train` and `ferryman plan`: command-line options (`cli/engine_flags.py`);
- `FerrymanTrainer(engine={...})`: which names it accepts (`integrations/arguments.py`);
- `docs/api.md`: the list of settings (`python docs/make_api.py` writes it, and a test compares it);
- several ranks: what they compare when they make an engine (`EngineOptions.compared`).
"""

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import nn

from ferryman.model.loss import Loss, model_loss
from ferryman.model.unit_discovery import hint
from ferryman.model.units import GRAIN
from ferryman.observe.trace import Trace
from ferryman.plan.batch import Split
from ferryman.plan.policy import parse_policy
from ferryman.runtime.sizes import parse_bytes

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]  # several: each has some of the parameters

Check = Callable[[str, Any], object]  # takes the name and the value of a setting; raises a ValueError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of a setting, apart from its type and its default value."""

    help: str
    default: str = ""  # what the default does, for documentation; needed if the value alone does not say it
    check: Check | None = None  # in addition to the type; not called for None if the type allows None
    needs_optimizer: bool = False  # the setting has no meaning in an engine that only computes gradients
    opposite: str = ""  # the command-line flag that switches it off, if that is not --no-...
    is_local: bool = False  # ranks need not agree on it
    compare: Callable[[Any], object] = lambda value: value  # maps the value to what ranks must agree on
    kind: Any = None  # the type; `declared` takes it from the annotation


# Checks.


def _integer(least: int) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r}: it must be an integer of at least {least}")

    return check


def _clip_norm(name: str, value: Any) -> None:
    if not (isinstance(value, int | float) and value > 0):
        raise ValueError(f"{name}={value!r}: it must be a number above 0, or None for no clipping")


def _names(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r} is a string; give a list of names or patterns: {name}=[{value!r}]")
    if not isinstance(value, Iterable):
        raise ValueError(f"{name}={value!r}: it must be a list of names or patterns; or leave it out")


def _some_names(name: str, value: Any) -> None:
    _names(name, value)
    if not value:
        raise ValueError(f"{name}={value!r} names no module; leave it out, and the engine finds the units")


def _amount_of_memory(name: str, value: Any) -> None:
    parse_bytes(value, name)


def _policy(name: str, value: Any) -> None:
    parse_policy(value)


def _loss(name: str, value: Any) -> None:
    if not callable(value) or isinstance(value, nn.modules.loss._Loss):  # those take outputs and targets
        raise ValueError(
            f"{name}= must be a function of the model and a micro-batch that returns the loss; this is a "
            f"{type(value).__name__}. Example: loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
        )


def _split(name: str, value: Any) -> None:
    if not callable(value):
        raise ValueError(
            f"{name}= must be a function of a batch and a count that returns a list of at most that "
            f"many micro-batches; this is a {type(value).__name__}"
        )


# The settings.


@dataclass(frozen=True, kw_only=True)
class PlainOptions:
    """Settings whose values a command line can express: text, numbers, flags and lists of names."""

    device: Annotated[
        torch.device | str | None,
        Setting(
            help="Device to train on, such as cuda, cpu or virtual.",
            default="the accelerator of this machine, or the CPU",
            compare=lambda device: torch.device(device).type,
        ),
    ] = None
    memory: Annotated[
        int | str | None,
        Setting(
            help="Budget of device memory, such as 8GiB. The engine never reserves more.",
            default="no limit",
            check=_amount_of_memory,
            compare=lambda memory: None if memory is None else parse_bytes(memory, "memory"),
        ),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        Setting(
            help="Precision of compute and of transfers; master weights are float32.",
            default="the model's own dtypes",
            needs_optimizer=True,
        ),
    ] = None
    state: Annotated[
        Literal["fp32", "bf16", "8bit"],
        Setting(
            help="Format of the optimizer's moments: float32, bfloat16 with stochastic rounding, or 8 bits with a "
            "scale for each block of 256. Those of small tensors are always in float32.",
            needs_optimizer=True,
        ),
    ] = "fp32"
    max_grad_norm: Annotated[
        float | None,
        Setting(
            help="Clip gradients to this global norm.", default="no clipping", check=_clip_norm, needs_optimizer=True
        ),
    ] = None
    on_nonfinite: Annotated[
        Literal["raise", "skip"], Setting(help="What to do with a step whose loss or gradients are inf or NaN.")
    ] = "raise"
    deferred: Annotated[
        bool,
        Setting(
            help="Update the weights after all gradients have arrived, not during the backward.", needs_optimizer=True
        ),
    ] = False
    host_threads: Annotated[
        int | None,
        Setting(help="Threads for updates on the host.", default="most CPUs", check=_integer(1), is_local=True),
    ] = None
    units: Annotated[
        Sequence[str] | None,
        Setting(
            help="Modules that each move between host and device as a whole, by name or pattern.",
            default="found in the model",
            check=_some_names,
        ),
    ] = None
    resident: Annotated[
        Sequence[str], Setting(help="Parameters that stay on the device, by name or pattern.", check=_names)
    ] = ()
    stash: Annotated[
        Literal["auto", "device", "host"],
        Setting(help="Where activations between units are stored; auto: on the device if the budget allows it."),
    ] = "auto"
    recompute: Annotated[
        Literal["auto", "always", "never"],
        Setting(
            help="Whether activations are recomputed in the backward (always) or kept for it (never); auto: as many "
            "are kept as there is room for.",
        ),
    ] = "auto"
    slots: Annotated[
        int | None,
        Setting(
            help="Number of units whose weights are on the device at once; 2 or more overlap fetches with compute.",
            default="as many as the budget allows",
            check=_integer(1),
        ),
    ] = None
    held: Annotated[
        bool | None,
        Setting(
            help="Whether all weights stay on the device.",
            default="if the budget has room for them",
            opposite="relayed",
        ),
    ] = None
    updates: Annotated[
        str,
        Setting(
            help="Who updates the weights: auto, host, stride:K (the device updates one subgroup in K) or static:R "
            "(a share R of the optimizer state stays on the device).",
            check=_policy,
            needs_optimizer=True,
        ),
    ] = "auto"
    subgroup: Annotated[
        int | None,
        Setting(
            help="Number of parameters in a subgroup, which is updated as a whole.",
            default="chosen by the rate of the link and the budget",
            check=_integer(GRAIN),
            needs_optimizer=True,
        ),
    ] = None
    chunked_loss: Annotated[
        bool | None,
        Setting(
            help="Compute the cross entropy of a causal language model in chunks of the vocabulary. The logits, often "
            "the largest activation, never exist as a whole in a step.",
            default="no",
        ),
    ] = None
    compile: Annotated[bool, Setting(help="Compile units with torch.compile, all units of a kind together.")] = False

    def __post_init__(self) -> None:
        for name, setting in declared(type(self)).items():
            _check(name, getattr(self, name), setting)

    @property
    def budget(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else parse_bytes(self.memory, "memory")

    @property
    def needs_whole_gradient(self) -> bool:
        """Whether updates must wait until all gradients of the step are known, whatever the precision."""
        return self.deferred or self.max_grad_norm is not None or self.on_nonfinite == "skip"


@dataclass(frozen=True, kw_only=True)
class EngineOptions(PlainOptions):
    """All settings of an engine."""

    loss: Annotated[
        Loss,
        Setting(
            help="Function of the model and a micro-batch that returns the loss.",
            default="the `loss` of the model's output",
            check=_loss,
            is_local=True,
        ),
    ] = model_loss
    reduction: Annotated[
        Literal["mean", "sum"],
        Setting(help="How the losses of micro-batches combine: their mean, weighted by samples, or their sum."),
    ] = "mean"
    split: Annotated[
        Split | None,
        Setting(
            help="Function that cuts a batch: split(batch, count) returns a list of at most `count` micro-batches, or "
            "of pairs (weight, micro_batch).",
            default="batches are cut along dimension 0",
            check=_split,
            is_local=True,
        ),
    ] = None
    trace: Annotated[
        Trace | None, Setting(help="Records what ran when.", default="nothing is recorded", is_local=True)
    ] = None

    def compared(self) -> dict[str, object]:
        """The values, by setting, that must be the same on all ranks."""
        return {
            name: setting.compare(getattr(self, name)) for name, setting in SETTINGS.items() if not setting.is_local
        }


# What follows from the declarations.


def declared(options: type[PlainOptions]) -> dict[str, Setting]:
    """The fields of a dataclass that are settings, by name."""
    found = {}
    for field in dataclasses.fields(options):
        kind, *metadata = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        if metadata and isinstance(metadata[0], Setting):
            found[field.name] = dataclasses.replace(metadata[0], kind=kind)
    return found


def _check(name: str, value: Any, setting: Setting) -> None:
    """Raises a ValueError if this is not a valid value for the setting."""
    kinds = alternatives(setting.kind)
    if value is None and NoneType in kinds:
        return
    or_none = ", or None" if NoneType in kinds else ""
    if choices := choices_of(setting.kind):
        if value not in choices:
            *most, last = map(repr, choices)
            raise ValueError(f"{name}={value!r}: choose {', '.join(most)} or {last}{or_none}")
    elif bool in kinds and type(value) is not bool:
        raise ValueError(f"{name}={value!r}: it must be True or False{or_none}")
    if setting.check is not None:
        setting.check(name, value)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type, the type itself."""
    return get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is _UNION else (kind,)


def choices_of(kind: Any) -> tuple[str, ...]:
    """The strings that a setting of this type accepts; empty if the type contains no Literal."""
    return next((get_args(one) for one in alternatives(kind) if get_origin(one) is Literal), ())


_UNION = get_origin(Literal["x"] | None)
SETTINGS = declared(EngineOptions)


def describe(*, indent: int) -> str:
    """The settings of an engine as the end of a docstring: name, type, help and default of each."""
    lines = list[str]()
    for name, setting in SETTINGS.items():
        default = setting.default or repr(getattr(EngineOptions, name))
        text = f"{setting.help} Default: {default}."
        lines += [f"{name} ({_shown(setting.kind)}):", textwrap.indent(textwrap.fill(text, 104), " " * 4)]
    return textwrap.indent("\n".join(lines), " " * indent).lstrip()


def _shown(kind: Any) -> str:
    """A type as it is written in code, without module names."""
    text = " | ".join(inspect.formatannotation(one) for one in alternatives(kind))
    return re.sub(r"\b(?!torch\.(?:device|Tensor)\b)(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")


@dataclass(frozen=True)
class EngineArguments(EngineOptions):
    """The arguments of `Engine(...)`. Only the signature of this class is used: see `takes_options`."""

    model: nn.Module
    optimizer: Optimizers | None = None


P = ParamSpec("P")
E = TypeVar("E")


def takes_options(
    arguments: Callable[P, EngineArguments],
) -> Callable[[Callable[[E, nn.Module, Optimizers | None, EngineOptions], None]], Callable[Concatenate[E, P], None]]:
    """Decorates an `__init__` that takes model, optimizer and options. Callers pass each setting as a keyword argument.

    Type checkers, editors and `inspect.signature` see the fields of `EngineArguments` as arguments.
    """

    def decorate(
        init: Callable[[E, nn.Module, Optimizers | None, EngineOptions], None],
    ) -> Callable[Concatenate[E, P], None]:
        @functools.wraps(init)
        def construct(self: E, model: nn.Module, optimizer: Optimizers | None = None, **settings: Any) -> None:
            for name in settings:
                if name not in SETTINGS:
                    raise TypeError(f"{type(self).__name__}() has no setting {name!r}{hint(name, SETTINGS)}")
            init(self, model, optimizer, EngineOptions(**settings))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = _signature()
        constructor: Any = construct
        constructor.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
        return constructor  # type: ignore[no-any-return]

    return decorate


def _signature() -> inspect.Signature:
    """The signature of `Engine(...)`, with plain types in place of `Annotated`."""
    parameters = [
        parameter.replace(annotation=SETTINGS[name].kind if name in SETTINGS else parameter.annotation)
        for name, parameter in inspect.signature(EngineArguments).parameters.items()
    ]
    return inspect.Signature(parameters, return_annotation=None)
