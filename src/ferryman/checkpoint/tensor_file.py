"""Reads and writes files in the safetensors format, directly from and into existing memory.

The format is eight bytes with the length of the header, the header (JSON: dtype, shape and offsets of each tensor) and
the bytes of the tensors without gaps. The safetensors library copies all tensors of a file before it writes them, and a
host that is full of a model has no memory for that; here nothing is copied. Checksums are computed on other threads.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ferryman.checkpoint import schema
from ferryman.checkpoint.checksum import BackgroundChecksum, crc32
from ferryman.checkpoint.stream import DamagedError, Reader, begin_writing, move_all

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER = schema.header(_DTYPES)

_CHUNK_BYTES = 16 << 20  # written or read at a time
_MAX_PIECES = 256  # of memory in one system call
_MAX_HEADER_BYTES = 100 << 20  # limit of the format


class FileChecksum(NamedTuple):
    """The size and CRC-32 of a file."""

    nbytes: int
    crc32: int


class Entry(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    stop: int


def check_dtypes(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which the safetensors format does not support")


def write(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> FileChecksum:
    """Writes a file and waits until it is on the disk. Wide dtypes come first, so that every tensor is aligned."""
    ordered = sorted(tensors, key=lambda pair: -pair[1].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        assert tensor.is_contiguous(), name
        assert tensor.device.type == "cpu", name
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(len(text).to_bytes(8, "little") + text), *(as_bytes(tensor) for _, tensor in ordered)]
    return write_bytes(path, parts)


def write_bytes(path: Path, parts: Sequence[memoryview]) -> FileChecksum:
    with path.open("xb", buffering=0) as file, BackgroundChecksum() as follower:
        end = 0
        for pieces in _chunks(parts):
            follower.add(pieces)
            start, end = end, move_all(file, os.pwritev, pieces, end)
            follower.do(functools.partial(begin_writing, file, start, end - start))
        crc = follower.value()
        os.fsync(file.fileno())
        return FileChecksum(end, crc)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, in file order. Raises if the size of the file does not match its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise DamagedError(
                f"{path} is damaged or truncated: it has {size} bytes, but its header alone takes {length}"
            )
        text = file.read(length)
    header = schema.parse(text, _HEADER, path)
    header.pop("__metadata__", None)
    entries = [
        Entry(name, _DTYPES[it["dtype"]], tuple(it["shape"]), *(8 + length + at for at in it["data_offsets"]))
        for name, it in header.items()
    ]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 8 + length
    for entry in entries:
        if math.prod(size or 1 for size in entry.shape) > schema.MAX_COUNT // entry.dtype.itemsize:
            raise DamagedError(f"{path} is damaged: the shape of {entry.name!r} is too large for a tensor")
        if entry.start != end or entry.stop - entry.start != math.prod(entry.shape) * entry.dtype.itemsize:
            raise DamagedError(f"{path} is damaged: the offsets of {entry.name!r} do not match its shape")
        end = entry.stop
    if end != size:
        raise DamagedError(
            f"{path} is {'truncated' if size < end else 'damaged'}: it has {size} bytes instead of {end}"
        )
    return {entry.name: entry for entry in entries}


def read(
    path: Path, target: Callable[[Entry], torch.Tensor], done: Callable[[Entry], None] | None = None
) -> FileChecksum:
    """Reads the whole file, each tensor into the memory that `target` returns. `done` is called when a tensor has been
    read; after that its memory may be changed."""
    entries = list(read_header(path).values())
    with path.open("rb", buffering=0) as file, Reader(file) as reader:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        reader.read([memoryview(bytearray(entries[0].start if entries else path.stat().st_size))])
        for some in _together(entries):
            targets = [target(entry) for entry in some]
            for pieces in _chunks([as_bytes(tensor) for tensor in targets]):
                reader.read(pieces)
            if done is not None:
                reader.value()
                for entry in some:
                    done(entry)
        return FileChecksum(reader.place, reader.value())


def read_tensor(path: Path, entry: Entry) -> torch.Tensor:
    """Reads one tensor of a file."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    with path.open("rb", buffering=0) as file:
        move_all(file, os.preadv, [as_bytes(tensor)], entry.start)
    return tensor


def check_sum(path: Path) -> FileChecksum:
    """Computes the checksum of any file."""
    buffer, crc, total = bytearray(min(_CHUNK_BYTES, path.stat().st_size) or 1), 0, 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc, total = crc32(memoryview(buffer)[:count], crc), total + count
    return FileChecksum(total, crc)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, without a copy."""
    flat = tensor.detach().view(-1) if tensor.dim() else tensor.detach().view(1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _together(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Groups small tensors that are read together."""
    some: list[Entry] = []
    for entry in entries:
        if some and (entry.stop - some[0].start > _CHUNK_BYTES or len(some) == _MAX_PIECES):
            yield some
            some = []
        some.append(entry)
    if some:
        yield some


def _chunks(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    pieces: list[memoryview] = []
    room = _CHUNK_BYTES
    for part in parts:
        while len(part):
            pieces.append(part[:room])
            part, room = part[room:], room - len(pieces[-1])
            if not room or len(pieces) == _MAX_PIECES:
                yield pieces
                pieces, room = [], _CHUNK_BYTES
    if pieces:
        yield pieces


def shard(tensors: Sequence[tuple[str, torch.Tensor]], limit: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Divides tensors, in order, into files of at most `limit` bytes each, or one larger tensor."""
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    room = limit
    for name, tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append((name, tensor))
        room -= tensor.nbytes
    return shards


def file_names(stem: str, count: int) -> list[str]:
    """File names in the style of transformers."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def index(names: Sequence[str], shards: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> Mapping[str, object]:
    """The index that tells transformers which tensor is in which file."""
    total = sum(tensor.nbytes for some in shards for _, tensor in some)
    places = {name: file for file, some in zip(names, shards, strict=True) for name, _ in some}
    return {"metadata": {"total_size": total}, "weight_map": places}
