"""The manifest of a checkpoint: its contents, and the size and checksum of each of its files."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ferryman.checkpoint import directory as directories
from ferryman.checkpoint import schema, tensor_file
from ferryman.checkpoint.stream import DamagedError
from ferryman.checkpoint.tensor_file import FileChecksum

FORMAT = 1


def crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks the manifest of a checkpoint."""
    file = path / directories.MANIFEST
    whole = schema.read(file, schema.FRAME)
    content: dict[str, Any] = whole["content"]
    if whole["crc32"] != crc_of(content):
        raise DamagedError(f"{file} is damaged: its checksum does not match")
    if content["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {content['format']}, written by ferryman {content['ferryman']}; this version reads "
            f"format {FORMAT}"
        )
    schema.check(content, schema.MANIFEST, file)
    listed = [name for what in ("weights", "state", "rest") for name in content[what]]
    for name, count in Counter(listed).items():
        if name not in content["files"] or count > 1:
            raise DamagedError(f"{file} is damaged: {name!r} must be in files, and in one list of files once")
    return content


def check_sizes(path: Path, manifest: dict[str, Any]) -> None:
    for name, told in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise DamagedError(f"{file} is missing from the checkpoint")
        if (size := file.stat().st_size) != told["bytes"]:
            word = "truncated" if size < told["bytes"] else "damaged"
            raise DamagedError(f"{file} is {word}: it has {size} bytes instead of {told['bytes']}")


def check_sums(path: Path, manifest: dict[str, Any], files: Iterable[str]) -> None:
    for name in sorted(files):
        check_sum(path, manifest, name, tensor_file.check_sum(path / name))


def check_sum(path: Path, manifest: dict[str, Any], name: str, found: FileChecksum) -> None:
    if found.crc32 != manifest["files"][name]["crc32"]:
        raise DamagedError(f"{path / name} is damaged: its checksum does not match")


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is complete and undamaged. Reads all of its files."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        check_sums(path, manifest, manifest["files"])
    except (ValueError, OSError):
        return False
    return True
