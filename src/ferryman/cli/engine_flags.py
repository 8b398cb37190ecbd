"""The engine's settings as command-line options, derived from their declarations (`ferryman/options.py`)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_origin

import typer

from ferryman.options import PlainOptions, alternatives, choices_of, declared

NONE = "none"  # what is typed to take a setting back, so that a run that is resumed can do without it

SETTINGS = declared(PlainOptions)


def flag(name: str) -> str:
    """As it is written on a command line."""
    return f"--{name.replace('_', '-')}"


def opposite(name: str) -> str:
    """The flag that switches something off."""
    given = SETTINGS[name].opposite if name in SETTINGS else ""
    return flag(given or f"no-{name}")


def is_flag(name: str) -> bool:
    return bool in alternatives(SETTINGS[name].kind)


def takes_none(name: str) -> bool:
    """Whether `none` can be typed for this setting."""
    kind = SETTINGS[name].kind
    return not is_flag(name) and (NoneType in alternatives(kind) or _is_list(kind))


def _is_list(kind: Any) -> bool:
    return any(get_origin(one) is Sequence for one in alternatives(kind))


def parameter(name: str, default_text: str = "") -> inspect.Parameter:
    """What typer makes an option of; `default_text`: what this command does by default, if not what the engine does."""
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
        shown, extra = int | None, number_or_none(int, 1)  # they all count something
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
    """For typer: how a number, or `none`, is read and shown."""
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


def values_of(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings from what was typed: `none`, and a list without members, are the default."""
    found = {}
    for name, value in typed.items():
        taken_back = takes_none(name) and value in (None, NONE, [], [NONE])
        found[name] = getattr(PlainOptions, name) if taken_back else value
    return found


def signature(
    own: Iterable[inspect.Parameter], added: Iterable[inspect.Parameter], *, before: str
) -> inspect.Signature:
    """The signature of a command, as typer reads it: its own parameters, with those of the engine put `before` one."""
    given = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    place = [parameter.name for parameter in given].index(before)
    return inspect.Signature([*given[:place], *added, *given[place:]])
