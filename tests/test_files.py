"""Test atomic writes."""

import json
import os
from typing import Literal

import pytest

from isopos.lab.runs.files import Damaged, damaged, flush_folder, mismatch, read_text, replacing, write_json, write_text


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    for value in ({"a": [1, 2]}, {"ä": 0.1 + 0.2}):
        write_json(path, value)
        assert json.loads(path.read_text(encoding="utf-8")) == value
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("before", ["whole", None])
def test_a_failure_leaves_the_file_unchanged_and_no_other_file(tmp_path, before):
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


def test_part_files_of_other_names_stay(tmp_path):
    """Names may contain wildcard characters."""
    mine, other = tmp_path / ".[a].json.1.part", tmp_path / ".a.json.1.part"
    for part in (mine, other):
        part.write_text("half")
        os.utime(part, (0, 0))
    write_json(tmp_path / "[a].json", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "[a].json"]


def test_processes_with_one_id_on_two_machines_write_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with replacing(tmp_path / "a") as one, replacing(tmp_path / "a") as other:
        one.write_text("one")
        other.write_text("other")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "one"


def test_an_interruption_leaves_no_part_either(tmp_path):
    def interrupt():
        with replacing(tmp_path / "a.txt") as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not list(tmp_path.iterdir())


def test_what_is_read_is_bounded_and_its_message_too(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("12345678")
    assert read_text(path, "remove it", limit=8) == "12345678"
    with pytest.raises(Damaged, match=r"a.json: expected at most 7 bytes, got 8; remove it$"):
        read_text(path, "remove it", limit=7)
    with pytest.raises(Damaged) as error:
        damaged(path, "long\n  text " * 300, "remove it")
    assert str(error.value).startswith(f"{path}: long text long text ")
    assert str(error.value).endswith("...; remove it")
    assert len(str(error.value)) == len(f"{path}: ...; remove it") + 1000
    for reason, said in ((EOFError(), "EOFError"), (OSError(28, "No space"), "No space"), (OSError("full"), "full")):
        with pytest.raises(Damaged, match=f"^{path}: {said}; remove it$"):
            damaged(path, reason, "remove it")
    for value, kind, wrong in (
        ([1, "a"], tuple[int, ...], "1: expected a whole number, got 'a'"),
        ([1, 2, 3], tuple[int, ...], ""),
        ({"a": {"b": True}}, {"a": {"b": float}}, "a: b: expected a number, got True"),
        ("c", Literal["a", "b"], "expected one of a, b, got 'c'"),
        (3, str | None, "expected text, got 3"),
        ("x" * 70, int, f"expected a whole number, got '{'x' * 59}..."),
        ({"a": 1}, {"b": int}, "b: expected a value, got none"),
    ):
        assert mismatch(value, kind) == wrong
