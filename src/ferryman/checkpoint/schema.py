"""The schema of a checkpoint's JSON documents, and the reader that checks them.

Documents are declared with the small checks below. A document is checked as a whole when it is read, before the engine
is changed. So the code that uses it need not handle a negative step or a file name outside the directory. JSON itself
is read strictly: NaN, duplicate keys and too deep nesting are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from ferryman.checkpoint.stream import DamagedError

MAX_DEPTH = 400  # levels of nested JSON; Python's recursion limit is 1000
MAX_COUNT = 2**63 - 1

Check = Callable[[Any, str], None]  # called with a value and its place in the document, such as "content.files"


class _MismatchError(Exception):
    """A value is not what the document requires."""

    def __init__(self, place: str, required: str, found: Any) -> None:
        super().__init__(f"{place or 'the document'} must be {required}, but is {_show(found)}")


def _show(value: Any) -> str:
    match value:
        case dict():
            return f"an object with {len(value)} keys"
        case list():
            return f"a list of {len(value)}"
        case None:
            return "null"
        case _:
            text = repr(value)
            return text if len(text) <= 60 else f"{text[:57]}..."


# Checks.


def anything(value: Any, place: str) -> None:
    pass


def text(value: Any, place: str) -> None:
    if not isinstance(value, str):
        raise _MismatchError(place, "a string", value)


def one_of(choices: Collection[str]) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in choices:
            raise _MismatchError(place, f"one of {', '.join(choices)}", value)

    return check


def integer(low: int = 0, high: int = MAX_COUNT) -> Check:
    def check(value: Any, place: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _MismatchError(place, f"an integer from {low} to {high}", value)

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any, place: str) -> None:
        if type(value) not in (int, float) or not low <= value <= high:
            raise _MismatchError(place, f"a number from {low:g} to {high:g}", value)

    return check


def optional(check: Check) -> Check:
    """Accepts null and the values that `check` accepts."""

    def check_if_given(value: Any, place: str) -> None:
        if value is not None:
            check(value, place)

    return check_if_given


def file_name(value: Any, place: str) -> None:
    """The name of a file in the directory or a subdirectory of it, never outside of it."""
    required = "the name of a file inside the directory, without '..'"
    if not isinstance(value, str) or not value or "\0" in value or "\\" in value or value.startswith("/"):
        raise _MismatchError(place, required, value)
    if str(PurePosixPath(value)) != value or {".", ".."} & set(value.split("/")):
        raise _MismatchError(place, required, value)


def list_of(check: Check, *, length: int | None = None, at_most: int | None = None) -> Check:
    def check_list(value: Any, place: str) -> None:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise _MismatchError(place, "a list" if length is None else f"a list of {length}", value)
        if at_most is not None and len(value) > at_most:
            raise _MismatchError(place, f"a list of at most {at_most}", value)
        for number, one in enumerate(value):
            check(one, f"{place}[{number}]")

    return check_list


def map_of(check: Check, *, keys: Check = text) -> Check:
    """An object with any keys whose values all pass `check`."""

    def check_map(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _MismatchError(place, "an object", value)
        for key, one in value.items():
            keys(key, f"a key of {place or 'the document'}")
            check(one, f"{place}[{key!r}]")

    return check_map


def record(
    required: Mapping[str, Check], may_have: Mapping[str, Check] | None = None, *, others: bool = False
) -> Check:
    """An object with these keys. `others`: allow other keys too, as in files of other programs."""
    known = {**required, **(may_have or {})}

    def check_record(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _MismatchError(place, "an object", value)
        inside = f"{place}." if place else ""
        for key in required.keys() - value.keys():
            raise _MismatchError(inside + key, "present", _Missing())
        for key, one in value.items():
            if key in known:
                known[key](one, inside + key)
            elif not others:
                raise _MismatchError(f"the keys of {place or 'the document'}", f"among {', '.join(known)}", key)

    return check_record


class _Missing:
    def __repr__(self) -> str:
        return "missing"


def encoded(value: Any, place: str) -> None:
    """State in the encoding of `encoding.py`."""
    if type(value) is float:
        if not math.isfinite(value):
            raise _MismatchError(place, "a finite number", value)
    elif isinstance(value, list):
        list_of(encoded)(value, place)
    elif isinstance(value, dict):
        if len(value) != 1 or not value.keys() <= _ENCODED.keys():
            raise _MismatchError(place, f"an object with one key, of {', '.join(_ENCODED)}", value)
        ((kind, content),) = value.items()
        _ENCODED[kind](content, f"{place}.{kind}")


def _encoded_pair(value: Any, place: str) -> None:
    list_of(anything, length=2)(value, place)
    _encoded_key(value[0], f"{place}[0]")
    encoded(value[1], f"{place}[1]")


def _encoded_key(value: Any, place: str) -> None:
    """A key of a dict, which must be hashable."""
    encoded(value, place)
    if isinstance(value, dict) and "tuple" in value:
        list_of(_encoded_key)(value["tuple"], f"{place}.tuple")
    elif isinstance(value, list) or (isinstance(value, dict) and "float" not in value):
        raise _MismatchError(place, "a number, a string or a tuple of these", value)


def _permuted(value: Any, place: str) -> None:
    """The name of a tensor, and for each of its sides which side it is of the value."""
    list_of(anything, length=2)(value, place)
    text(value[0], f"{place}[0]")
    list_of(integer(), at_most=32)(value[1], f"{place}[1]")
    if sorted(value[1]) != list(range(len(value[1]))):
        raise _MismatchError(f"{place}[1]", f"each number from 0 to {len(value[1]) - 1} once", value[1])


_ENCODED: dict[str, Check] = {
    "float": one_of(("inf", "-inf", "nan")),
    "tensor": text,
    "permuted": _permuted,
    "array": text,
    "tuple": list_of(encoded),
    "dict": list_of(_encoded_pair),
}


def _encoded_dict(value: Any, place: str) -> None:
    """A dict whose keys are strings, such as the options of a parameter group."""
    encoded(value, place)
    if not isinstance(value, dict) or "dict" not in value or not all(isinstance(key, str) for key, _ in value["dict"]):
        raise _MismatchError(place, "a dict with strings as keys", value)


def _options(value: Any, place: str) -> None:
    _encoded_dict(value, place)
    if "params" in [key for key, _ in value["dict"]]:
        raise _MismatchError(place, "without 'params', which are the optimizer's parameters themselves", value)


# Documents.

_STEPS = integer()
_CRC = integer(0, 2**32 - 1)

_RANK = {"random": _encoded_dict, "objects": map_of(encoded)}  # separate for each rank

# The outer part of the manifest, which is the same in all formats.
FRAME = record({"crc32": _CRC, "content": record({"format": integer(), "ferryman": text}, others=True)})

MANIFEST = record(
    {
        **_RANK,
        "format": integer(),
        "ferryman": text,
        "torch": text,
        "model": text,
        "step": _STEPS,
        "loss_scale": optional(record({"value": number(2.0**-24, 2.0**127), "good_steps": integer(0, 2000)})),
        "weights": list_of(file_name),
        "state": list_of(file_name),
        "rest": list_of(file_name),
        "files": map_of(record({"bytes": integer(), "crc32": _CRC}), keys=file_name),
    },
    {
        "saved": number(0, 2.0**40),  # seconds; missing in checkpoints of the first versions
        "others": list_of(record(_RANK)),
        "optimizer": record(
            {
                "kind": text,
                "groups": list_of(record({"parameters": list_of(text), "options": _options})),
                "steps": map_of(_STEPS),
                "torch": map_of(_encoded_dict),
            }
        ),
    },
)

# The time at which a checkpoint was saved. It is read from manifests of all formats.
TIME = record({"content": record({"saved": number(0, 2.0**40)}, others=True)}, others=True)

# The index of weights in several files, as transformers writes it.
INDEX = record({"weight_map": map_of(file_name)}, others=True)


def header(dtypes: Collection[str]) -> Check:
    """The header of a safetensors file."""
    tensor = record(
        {
            "dtype": one_of(dtypes),
            "shape": list_of(integer(), at_most=32),  # numpy's limit of dimensions
            "data_offsets": list_of(integer(), length=2),
        }
    )

    def check(value: Any, place: str) -> None:
        map_of(anything)(value, place)
        for name, one in value.items():
            (map_of(text) if name == "__metadata__" else tensor)(one, f"{place}[{name!r}]")

    return check


# Reading.


def read(path: Path, document: Check) -> Any:
    """Reads and checks a JSON file."""
    return parse(path.read_bytes(), document, path)


def parse(content: bytes, document: Check, path: Path) -> Any:
    """Parses and checks JSON that was read from `path`."""
    try:
        found = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
        _check_depth(found)
    except RecursionError:
        refuse(path, _TOO_DEEP)
    except ValueError as error:
        refuse(path, str(error))
    check(found, document, path)
    return found


def check(value: Any, document: Check, path: Path) -> None:
    """Raises a DamagedError if a value that was read from `path` does not match the document's schema."""
    try:
        document(value, "")
    except _MismatchError as error:
        refuse(path, str(error))


def refuse(path: Path, why: str) -> NoReturn:
    raise DamagedError(f"{path} is damaged: {why}") from None


_TOO_DEEP = f"its JSON must be nested at most {MAX_DEPTH} levels deep, but is deeper"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"each key of an object must be unique, but {twice!r} occurs twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"numbers must be finite, but one is {name}")


class _Level(NamedTuple):
    value: Any
    depth: int


def _check_depth(value: Any) -> None:
    """Checks the depth without recursion, so that the other checks can be recursive."""
    left = [_Level(value, 1)]
    while left:
        inside, depth = left.pop()
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(inside, dict | list):
            some = inside.values() if isinstance(inside, dict) else inside
            left += [_Level(one, depth + 1) for one in some]
