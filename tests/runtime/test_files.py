"""A file is written whole or not at all."""

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
