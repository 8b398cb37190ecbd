"""Encodes state as JSON and tensors, so that loading it cannot run code.

JSON has neither tuples nor keys other than strings, so such values are encoded as an object with one key that names the
type.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


_MAX_LEVELS = 100  # each is up to three levels of JSON; loading refuses what is deeper than `schema.MAX_DEPTH`


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor], level: int = 0) -> Any:
    """Encodes a value as JSON. Tensors are added to `tensors` under their path."""
    if level > _MAX_LEVELS:
        raise ValueError(
            f"{path[:80]}... is nested more than {_MAX_LEVELS} levels deep, or contains itself, and cannot be saved"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        return _encode_tensor(value.detach().cpu(), path, tensors)
    if isinstance(value, list):
        return [encode(one, f"{path}[{i}]", tensors, level + 1) for i, one in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(one, f"{path}[{i}]", tensors, level + 1) for i, one in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = value.items()
        return {"dict": [[_key(key, path), encode(one, f"{path}.{key}", tensors, level + 1)] for key, one in pairs]}
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


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Keeps the order of the tensor's sides in memory: sums, and so the last bits of products, depend on it."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    permuted = value.permute(order)
    if value.is_contiguous() or not permuted.is_contiguous():
        return {"tensor": _put(value.contiguous(), path, tensors)}
    return {"permuted": [_put(permuted, path, tensors), order]}


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


class Reference(NamedTuple):
    """A tensor that an encoded value refers to."""

    kind: str  # "tensor", "permuted" or "array"
    name: str
    dims: int | None = None  # how many it must have


def references(value: Any) -> Iterator[Reference]:
    """All tensors that an encoded value refers to."""
    if isinstance(value, list):
        for one in value:
            yield from references(one)
    elif isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind in ("tensor", "array"):
            yield Reference(kind, content)
        elif kind == "permuted":
            yield Reference(kind, content[0], len(content[1]))
        elif kind != "float":
            yield from references(content)


def is_array_dtype(dtype: torch.dtype) -> bool:
    """Whether numpy has this dtype."""
    return (dtype.itemsize > 1 and dtype != torch.bfloat16) or dtype in (torch.bool, torch.uint8, torch.int8)


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
        case "permuted":
            name, order = content
            return tensors[name].permute([order.index(side) for side in range(len(order))])
        case "array":
            return tensors[content].numpy()
        case "tuple":
            return tuple(decode(one, tensors) for one in content)
        case _:
            assert kind == "dict", kind
            return {decode(key, tensors): decode(one, tensors) for key, one in content}
