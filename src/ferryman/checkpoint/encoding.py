"""Encodes state as JSON and tensors, so that loading it cannot run code.

JSON has neither tuples nor keys other than strings, so such values are encoded as an object with one key that names the
type.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes a value as JSON. Tensors are added to `tensors` under their path."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        return {"tensor": _put(value.detach().cpu().contiguous(), path, tensors)}
    if isinstance(value, list):
        return [encode(one, f"{path}[{i}]", tensors) for i, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(one, f"{path}[{i}]", tensors) for i, one in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key, path), encode(one, f"{path}.{key}", tensors)] for key, one in value.items()]}
    if type(value).__module__ == "numpy":
        if getattr(value, "shape", None) == ():
            return encode(value.item(), path, tensors)
        with contextlib.suppress(TypeError, ValueError):  # arrays of objects or strings are refused below
            return {"array": _put(torch.from_numpy(value.copy()), path, tensors)}
    if isinstance(value, int | float | str):  # a subclass, such as an enum: its value
        plain = next(kind for kind in (int, float, str) if isinstance(value, kind))
        return encode(plain(value), path, tensors)
    raise ValueError(
        f"{path} is a {type(value).__name__}, which cannot be saved: a checkpoint can hold numbers, strings, lists, "
        "tuples, dicts, tensors and arrays, and nothing is pickled. Convert it to one of these, or leave it out of "
        "state_dict()"
    )


def _put(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    """Adds a tensor under a unique name. Paths may coincide, such as those of the keys 1 and "1"."""
    names = itertools.chain([path], (f"{path}#{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in tensors)
    tensors[name] = tensor
    return name


def _key(key: Any, path: str) -> Any:
    held: dict[str, torch.Tensor] = {}
    encoded = encode(key, f"a key of {path}", held)
    if held:
        raise ValueError(f"a key of {path} is a tensor or an array, which cannot be saved; use a number or a string")
    return encoded


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "float":
            return _FLOATS[content]
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "tuple":
            return tuple(decode(one, tensors) for one in content)
        case _:
            assert kind == "dict", kind
            return {decode(key, tensors): decode(one, tensors) for key, one in content}
