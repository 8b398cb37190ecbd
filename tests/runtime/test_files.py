"""A file is written whole or not at all."""

import errno
import resource
import signal

import pytest

from ferryman.runtime.files import replacing_file


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)

    def fail():
        with replacing_file(path) as partial:
            partial.write_text("half")
            assert not path.exists() if before is None else path.read_text() == before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if before is None else [before])
    with replacing_file(path) as partial:
        partial.write_text("new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "new")]


def test_a_link_of_the_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    with replacing_file(tmp_path / "file") as partial:
        name = partial.name
    for target in ("precious", "nowhere"):
        (tmp_path / name).symlink_to(tmp_path / target)
        with replacing_file(tmp_path / "file") as partial:
            partial.write_text("new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "precious"]
    assert (tmp_path / "precious").read_text() == "text"


def test_an_error_names_the_file(tmp_path):
    """Python's own error of a write has no name."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(OSError, match=r"File too large: .*/file'") as told,
            replacing_file(tmp_path / "file") as partial,
        ):
            partial.write_bytes(bytes(2000))
        assert told.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
