"""The one atomic write."""

import json

import pytest

from isopos.lab.runs.files import replacing, write_json, write_text


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    for value in ({"a": [1, 2]}, {"ä": 0.1 + 0.2}):
        write_json(path, value)
        assert json.loads(path.read_text(encoding="utf-8")) == value
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("before", ["whole", None])
def test_what_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path, before):
    path = tmp_path / "a.txt"
    if before:
        write_text(path, before)

    def fail():
        with replacing(path) as part:
            part.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert [one.read_text() for one in tmp_path.iterdir()] == [before] * bool(before)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_text(tmp_path / "nowhere" / "a.txt", "text")
