"""The one atomic write."""

import json
import os

import pytest

from isopos.lab.runs.files import flush_folder, replacing, write_json, write_text


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


def test_what_a_kill_left_half_written_goes_with_the_next_after_an_hour(tmp_path):
    old, new = tmp_path / ".a.json.1.part", tmp_path / ".a.json.2.part"
    for part in (old, new):
        part.write_text("half")
    os.utime(old, (0, 0))
    write_json(tmp_path / "a.json", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, "a.json"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not list a process's open files")
def test_no_file_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    for n in range(3):
        write_json(tmp_path / f"{n}.json", n)
        flush_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
