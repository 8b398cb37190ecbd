"""Edits checkpoints as somebody else might, and corrects their checksums."""

import json
import shutil
import zlib

from ferryman.checkpoint import directory, tensor_file
from ferryman.checkpoint.manifest import crc_of


def copy_of(saved, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(saved, target)
    return target


def change_manifest(path, edit):
    """Changes the manifest with `edit`, and corrects its checksum."""
    file = path / directory.MANIFEST
    content = json.loads(file.read_text())["content"]
    edit(content)
    file.write_text(json.dumps({"crc32": crc_of(content), "content": content}))


def change_bytes(path, name, content):
    """Replaces a file, and corrects its size and checksum in the manifest."""
    (path / name).write_bytes(content)
    facts = {"bytes": len(content), "crc32": zlib.crc32(content)}
    change_manifest(path, lambda manifest: manifest["files"].update({str(name): facts}))


def change_file(path, name, tensors):
    """Replaces the tensors of a file, and corrects its size and checksum in the manifest."""
    new = path / "new"
    tensor_file.write(new, [(key, tensor.contiguous()) for key, tensor in tensors.items()])
    content = new.read_bytes()
    new.unlink()
    change_bytes(path, name, content)
