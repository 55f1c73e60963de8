"""Test cache folders, which are prepared once."""

import os
import threading
from pathlib import Path

import pytest

from isopos.lab.data import cache


def write(text, calls=None):
    def build(folder):
        (folder / "text").write_text(text)
        if calls is not None:
            calls.append(folder)

    return build


def folders(root):
    return [path.name for path in root.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ISOPOS_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, Path("/own")),
        ({"ISOPOS_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, Path("/xdg/isopos")),
        ({}, Path.home() / ".cache" / "isopos"),
    ],
)
def test_where_the_cache_is(variables, expected, monkeypatch):
    for name in ("ISOPOS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.default_root() == expected


def test_a_folder_is_built_once(tmp_path):
    calls = []
    first = cache.cached_folder(tmp_path / "new", "key", write("a", calls))
    assert cache.cached_folder(tmp_path / "new", "key", write("b", calls)) == first == tmp_path / "new" / "key"
    assert (first / "text").read_text() == "a"
    assert len(calls) == 1
    assert folders(tmp_path / "new") == ["key"]


def test_a_failure_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "text").write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        cache.cached_folder(tmp_path, "key", fail)
    assert folders(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_other_keys_stay(tmp_path):
    for name in (".key-killed", ".other-busy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("half")
    assert (cache.cached_folder(tmp_path, "key", write("whole")) / "text").read_text() == "whole"
    assert sorted(folders(tmp_path)) == [".other-busy", "key"]


def test_others_wait_and_do_not_build(tmp_path):
    begun, go_on, calls, found = threading.Event(), threading.Event(), [], []

    def slow(folder):
        begun.set()
        assert go_on.wait(10)
        write("first", calls)(folder)

    first = threading.Thread(target=lambda: found.append(cache.cached_folder(tmp_path, "key", slow)))
    second = threading.Thread(target=lambda: found.append(cache.cached_folder(tmp_path, "key", write("second", calls))))
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    go_on.set()
    first.join(10)
    second.join(10)
    assert len(calls) == 1
    assert [(path / "text").read_text() for path in found] == ["first", "first"]


def test_a_value_is_remembered_while_its_stamp_stays(tmp_path):
    made = []

    def ask(stamp):
        return cache.cached_value(tmp_path, "key", stamp, list[int], lambda: made.append(stamp) or [stamp, len(made)])

    assert [ask(1), ask(1), ask(2), ask(2)] == [[1, 1], [1, 1], [2, 2], [2, 2]]
    for damage in ("", "[]", "{", '{"stamp": 2}'):
        (tmp_path / "key.json").write_text(damage)
        assert ask(2) == [2, len(made)]
    assert len(made) == 6
    assert os.listdir(tmp_path) == ["key.json"]
