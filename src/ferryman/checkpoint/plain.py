"""State as JSON and tensors: nothing that is read back can run code.

JSON knows neither tuples nor keys that are not strings, so what is more than a list of plain values is an object with
one key that says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Tensors are put into `tensors`, by their path."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {"tensor": path}
    if isinstance(value, list):
        return [encode(one, f"{path}[{i}]", tensors) for i, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(one, f"{path}[{i}]", tensors) for i, one in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, path, {}), encode(one, f"{path}.{key}", tensors)] for key, one in value.items()]}
    if type(value).__module__ == "numpy":
        if getattr(value, "shape", None) == ():
            return encode(value.item(), path, tensors)
        tensors[path] = torch.from_numpy(value).contiguous()
        return {"array": path}
    if isinstance(value, int | float | str):  # a class of its own, such as an enumeration: its value
        plain = next(kind for kind in (int, float, str) if isinstance(value, kind))
        return encode(plain(value), path, tensors)
    raise ValueError(
        f"{path} is a {type(value).__name__}, which cannot be saved: a checkpoint holds numbers, strings, lists, "
        "tuples, dicts, tensors and arrays, and pickles nothing. Leave it out of state_dict(), or turn it into these"
    )


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
