"""The engine's settings as command-line options, derived from their declarations (`ferryman/options.py`)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_origin

import typer

from ferryman.options import PlainOptions, alternatives, choices_of, declared

NONE = "none"  # as the value of an option: resets it to its default, for runs that are resumed

SETTINGS = declared(PlainOptions)


def flag(name: str) -> str:
    """The name of an option on the command line."""
    return f"--{name.replace('_', '-')}"


def opposite(name: str) -> str:
    """The flag that switches an option off."""
    given = SETTINGS[name].opposite if name in SETTINGS else ""
    return flag(given or f"no-{name}")


def is_flag(name: str) -> bool:
    return bool in alternatives(SETTINGS[name].kind)


def takes_none(name: str) -> bool:
    """Whether the option accepts `none`."""
    kind = SETTINGS[name].kind
    return not is_flag(name) and (NoneType in alternatives(kind) or _is_list(kind))


def _is_list(kind: Any) -> bool:
    return any(get_origin(one) is Sequence for one in alternatives(kind))


def parameter(name: str, default_text: str = "") -> inspect.Parameter:
    """A setting as a parameter from which typer makes an option. `default_text` replaces the engine's own default."""
    setting = SETTINGS[name]
    kind, kinds, choices = setting.kind, alternatives(setting.kind), choices_of(setting.kind)
    optional = NoneType in kinds
    flags: tuple[str, ...] = ()
    extra: dict[str, Any] = {}
    shown: Any = str | None if optional else str
    if is_flag(name):
        shown = bool | None if optional else bool
        flags = (f"{flag(name)}/{opposite(name)}",)
    elif choices:
        words = [*choices, NONE] if optional else [*choices]
        extra = {"metavar": f"<{'|'.join(words)}>", "autocompletion": lambda: words}
    elif _is_list(kind):
        shown, extra = list[str] | None, {"metavar": f"<str|{NONE}>"}
    elif float in kinds:
        shown, extra = float | None, number_or_none(float)
    elif int in kinds and str not in kinds:
        shown, extra = int | None, number_or_none(int, 1)  # all integer settings are counts
    elif optional:
        extra = {"metavar": f"<str|{NONE}>"}
    help = f"{setting.help} May be repeated." if _is_list(kind) else setting.help
    option = typer.Option(
        *flags,
        help=help,
        rich_help_panel="Engine",
        show_default=default_text or setting.default or True,
        **extra,
    )
    default = None if _is_list(kind) else getattr(PlainOptions, name)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[shown, option])


def number_or_none(kind: type[int] | type[float], least: int | None = None) -> dict[str, Any]:
    """Arguments of `typer.Option` for an option that accepts a number or `none`."""
    what = ("an integer" if kind is int else "a number") + ("" if least is None else f" of at least {least}")

    def parse(text: str) -> int | float | None:
        if text.lower() == NONE:
            return None
        try:
            value = kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is neither {what} nor {NONE!r}") from None
        if not math.isfinite(value) or (least is not None and value < least):
            raise typer.BadParameter(f"{text} is neither {what} nor {NONE!r}")
        return value

    return {"parser": parse, "metavar": f"<{kind.__name__}|{NONE}>"}


def values_of(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings, from those of options. `none` and an empty list stand for the default."""
    found = {}
    for name, value in typed.items():
        is_reset = takes_none(name) and value in (None, NONE, [], [NONE])
        found[name] = getattr(PlainOptions, name) if is_reset else value
    return found


def signature(
    own: Iterable[inspect.Parameter], added: Iterable[inspect.Parameter], *, before: str
) -> inspect.Signature:
    """The signature of a command: its own parameters, and those of the engine before the parameter `before`."""
    given = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    place = [parameter.name for parameter in given].index(before)
    return inspect.Signature([*given[:place], *added, *given[place:]])
