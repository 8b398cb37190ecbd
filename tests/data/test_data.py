"""Data: every token where it should be, each window once an epoch, a position that resumes, and no list of it all."""

import resource

import numpy as np
import pytest
import torch

from ferryman.data import text
from ferryman.data.text import as_bytes, find_files, with_tokenizer, write_tokens
from ferryman.data.tokens import TokenFile, Tokens, open_tokens
from ferryman.data.windows import Windows, permuted


def counting(count):
    return Tokens([TokenFile("counting", np.arange(count))], count)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_a_permutation_has_everyone_once(count):
    for keys in ([1, 2, 3, 4], [5, 6, 7, 8]):
        assert sorted(permuted(i, count, keys) for i in range(count)) == list(range(count))
    if count >= 100:
        assert [permuted(i, count, [1, 2, 3, 4]) for i in range(count)] != list(range(count))


@pytest.mark.parametrize(("count", "length"), [(10, 10), (19, 10), (20, 10), (1000, 7), (1003, 10)])
def test_an_epoch_has_each_window_once(count, length):
    windows = Windows(counting(count), length)
    starts = []
    for _ in range(3):
        epoch = [windows.batch(1)["input_ids"][0] for _ in range(windows.count)]
        assert all(torch.equal(window, torch.arange(length) + window[0]) for window in epoch)
        seen = torch.cat(epoch)
        assert len(seen.unique()) == len(seen)
        starts.append([int(window[0]) for window in epoch])
    assert windows.epoch == 3
    if windows.count > 10:
        assert starts[0] != starts[1]
        assert len({start % length for epoch in starts for start in epoch}) > 1  # cut at other places


def test_a_position_resumes():
    windows, other = Windows(counting(500), 8, seed=3), Windows(counting(500), 8, seed=4)
    for _ in range(40):
        windows.batch(3)
    other.load_state_dict(windows.state_dict())
    for _ in range(60):
        assert torch.equal(windows.batch(3)["input_ids"], other.batch(3)["input_ids"])


@pytest.mark.parametrize(("count", "length", "what"), [(500, 9, "--sequence"), (499, 8, "tokens in the data")])
def test_a_position_in_other_data_is_refused(count, length, what):
    state = Windows(counting(500), 8).state_dict()
    with pytest.raises(ValueError, match=f"cannot be resumed: it was saved with .* {what}"):
        Windows(counting(count), length).load_state_dict(state)


def test_evaluation_leaves_the_position():
    windows = Windows(counting(100), 8, start=20)
    batches = list(windows.in_order(4, 6))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 2]
    assert torch.equal(torch.cat([batch["input_ids"].flatten() for batch in batches]), torch.arange(20, 68))
    assert windows.epoch == 0


def test_files_are_read_as_one():
    parts = [np.arange(10, dtype=np.uint16), np.arange(10, 13, dtype=np.uint8), np.arange(13, 40, dtype=np.int64)]
    tokens = Tokens([TokenFile("part", ids) for ids in parts], 40)
    for start in range(40):
        for stop in range(start, 41):
            assert torch.equal(tokens.read(start, stop), torch.arange(start, stop))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_token_files(dtype, tmp_path):
    ids = np.arange(200, dtype=dtype)
    ids.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", ids)
    for path in (tmp_path / "a.bin", tmp_path / "b.npy"):
        assert torch.equal(Tokens([open_tokens(path, dtype)], 256).read(0, 200), torch.arange(200))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", "is empty"),
        ("a.bin", b"abc", "3 bytes is not a multiple of 2, the size of a uint16 token"),
        ("a.bin", np.arange(300, dtype=np.uint32).tobytes(), "every second token is 0.*--token-dtype uint32"),
        ("a.bin", np.full(9, 300, dtype=np.uint16).tobytes(), "token 0 is 300, but the model's vocabulary has 256"),
        ("a.npy", b"no numpy", "cannot be read as a .npy file"),
        ("a.npy", np.zeros((3, 3), dtype=np.int64), r"a one-dimensional array of integers.*int64 of shape \(3, 3\)"),
        ("a.npy", np.zeros(5), "a one-dimensional array of integers.*float64"),
        ("a.npy", np.zeros(0, dtype=np.int64), "is empty"),
        ("a.npy", np.array([1, 2, -1]), "token 2 is -1"),
    ],
)
def test_token_files_that_are_wrong(name, content, message, tmp_path):
    path = tmp_path / name
    np.save(path, content) if isinstance(content, np.ndarray) else path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokens([open_tokens(path, "uint16")], 256)


def test_a_wrong_token_in_the_midst_is_found_when_it_is_read():
    ids = np.zeros(2_000_000, dtype=np.uint16)
    ids[1_234_567] = 999
    tokens = Tokens([TokenFile("some.bin", ids)], 256)
    with pytest.raises(ValueError, match=r"some\.bin: token 1234567 is 999"):
        tokens.read(1_234_560, 1_234_570)


def test_a_large_file_is_not_in_memory(tmp_path):
    """Eight GiB, of which nothing is written."""
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(2**33)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    windows = Windows(Tokens([open_tokens(tmp_path / "large.bin", "uint32")], 100), 1024)
    for _ in range(10):
        windows.batch(8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_text_becomes_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_CHUNK_BYTES", 16)
    contents = ["a\nline\nand another that is long\n", "x" * 100 + "\nü", "", "no newline"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_text(content)
    texts, tokens = find_files([tmp_path])
    write_tokens(texts, tmp_path / "tokens.bin", as_bytes, "uint8", b"\n", 256)
    assert (tmp_path / "tokens.bin").read_bytes() == "\n".join(contents).encode()
    assert tokens == []
    assert not list(tmp_path.glob("*.partial"))


def test_text_through_a_tokenizer(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(text, "_CHUNK_BYTES", 16)
    words = {"the": 0, "ferry": 1, "crosses": 2, "[?]": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[?]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "a.txt").write_text("the ferry\ncrosses the river\n" * 3)
    (tmp_path / "b.txt").write_bytes(b"ferry \xff ferry")
    encode = with_tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=made))
    write_tokens(sorted(tmp_path.glob("*.txt")), tmp_path / "tokens.bin", encode, "uint16", 77, 78)
    ids = np.fromfile(tmp_path / "tokens.bin", dtype="uint16").tolist()
    assert ids == [0, 1, 2, 0, 3] * 3 + [77, 1, 3, 1]


def test_of_a_directory_what_ends_so(tmp_path):
    for name in ("b.txt", "deep/er/a.py", "c.log", "d.bin", "deep/e.npy"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    texts, tokens = find_files([tmp_path])
    assert [path.name for path in texts] == ["b.txt", "a.py"]
    assert [path.name for path in tokens] == ["d.bin", "e.npy"]
    assert [path.name for path in find_files([tmp_path], ["log", ".txt"])[0]] == ["b.txt", "c.log"]
    assert find_files([tmp_path / "c.log"])[0] == [tmp_path / "c.log"]  # named, it is taken as it is


def test_what_is_hidden_or_the_run_itself_is_no_data(tmp_path):
    for name in ("a.txt", ".git/b.txt", ".c.txt", "deep/.venv/d.py", "deep/run/tokens.bin", "deep/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    texts, tokens = find_files([tmp_path], without=tmp_path / "deep" / "run")
    assert [path.name for path in texts] == ["a.txt", "e.txt"]
    assert tokens == []


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a\.txt: the tokenizer produced token 70000.*vocabulary has 300"):
        write_tokens([tmp_path / "a.txt"], tmp_path / "tokens.bin", lambda text: [7, 70_000], "uint16", 0, 300)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_windows_are_counted():
    windows = Windows(counting(100), 8)
    windows.batch(2 * windows.count + 3)
    assert windows.seen == 2 * windows.count + 3
