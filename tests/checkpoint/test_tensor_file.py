"""Files in the safetensors format, against the library of that name; and their checksums, against zlib's."""

import itertools
import os
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ferryman.checkpoint import checksum, tensor_file
from ferryman.checkpoint.checksum import BackgroundChecksum, combine, crc32
from ferryman.checkpoint.stream import DamagedError, Reader

DTYPES = [dtype for dtype in tensor_file._NAMES if dtype != torch.complex64]


def tensors():
    source = torch.Generator().manual_seed(0)
    made = {
        f"tensor {number}": torch.randint(0, 2, (3, number + 1), generator=source).to(dtype)
        for number, dtype in enumerate(DTYPES)
    }
    return {**made, "empty": torch.zeros(0, 4), "a number": torch.tensor(2.5), "é\n": torch.ones(1)}


def same(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(tensor_file.as_bytes(one)) == bytes(tensor_file.as_bytes(other))
    )


def test_safetensors_reads_what_is_written(tmp_path):
    written = tensors()
    total = tensor_file.write(tmp_path / "ours", list(written.items()))
    read = load_file(tmp_path / "ours")
    assert read.keys() == written.keys()
    assert all(same(read[name], written[name]) for name in written)
    content = (tmp_path / "ours").read_bytes()
    assert total == tensor_file.check_sum(tmp_path / "ours") == (len(content), zlib.crc32(content))
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_safetensors_writes_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_CHUNK_BYTES", 7)  # tensors in several pieces, and pieces of several tensors
    monkeypatch.setattr(tensor_file, "_MAX_PIECES", 3)
    written = tensors()
    save_file(written, tmp_path / "theirs")
    read, done = {}, []
    total = tensor_file.read(
        tmp_path / "theirs",
        lambda entry: read.setdefault(entry.name, torch.empty(entry.shape, dtype=entry.dtype)),
        lambda entry: done.append(entry.name),
    )
    assert set(done) == read.keys() == written.keys()
    assert all(same(read[name], written[name]) for name in written)
    content = (tmp_path / "theirs").read_bytes()
    assert total == (len(content), zlib.crc32(content))
    for name, entry in tensor_file.read_header(tmp_path / "theirs").items():
        assert same(tensor_file.read_tensor(tmp_path / "theirs", entry), written[name])


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError):
        tensor_file.write(tmp_path / "file", [])


@pytest.mark.parametrize("width", range(checksum._width() + 1))
def test_checksums_are_those_of_zlib(width, monkeypatch):
    monkeypatch.setattr(checksum, "_MIN_NATIVE_BYTES", 0)
    monkeypatch.setattr(checksum, "_width", lambda: width)
    for length in (*range(300), 4096, 65537, 1_000_003):
        data = memoryview(os.urandom(length + 3))
        for piece in (data[:length], data[3:]):
            for start in (0, 1, 0xDEADBEEF):
                assert crc32(piece, start) == zlib.crc32(piece, start)


def test_checksums_of_pieces_are_put_together():
    for first, second in itertools.product((0, 1, 9, 70000), (0, 1, 16, 12345, 1 << 20)):
        one, other = os.urandom(first), os.urandom(second)
        assert combine(zlib.crc32(one), zlib.crc32(other), second) == zlib.crc32(one + other)


def test_a_file_is_read_in_its_order_by_several_threads(tmp_path):
    content = os.urandom(1_000_003)
    (tmp_path / "file").write_bytes(content)
    memory = bytearray(len(content))
    with (tmp_path / "file").open("rb", buffering=0) as file, Reader(file) as reader:
        for number, start in enumerate(range(0, len(memory), 30_000)):
            piece = memoryview(memory)[start : start + 30_000]
            reader.read([piece[:number], piece[number:]])
            if number == 7:
                assert reader.value() == zlib.crc32(content[: reader.place])
        assert (reader.value(), reader.place) == (zlib.crc32(content), len(content))
        assert memory == content
        reader.read([memoryview(bytearray(1))])
        with pytest.raises(DamagedError, match="truncated"):
            reader.value()


def test_a_stream_is_followed():
    pieces = [memoryview(os.urandom(length)) for length in (5, 0, 9000, 70000) * 5]
    with BackgroundChecksum() as follower:
        for piece in pieces:
            follower.add([piece, piece])
        assert follower.value() == zlib.crc32(b"".join(bytes(piece) * 2 for piece in pieces))
