"""Test the lock of a run folder: one process at a time, until it ends for any reason."""

import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import warnings

import filelock
import pytest

from isopos.lab.recipes import Recipe
from isopos.lab.runs import folders, locks
from isopos.lab.runs.locks import check_free, holder, lock_path, locked, try_lock

LOCK = """
import sys
from pathlib import Path
from isopos.lab.runs.locks import try_lock
with try_lock(Path(sys.argv[1])) as mine:
    print(int(mine), flush=True)
    sys.stdin.read()
"""


class Other:
    """Another process that locks a path, until it is told to end or killed."""

    def __init__(self, path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", LOCK, str(path)], text=True, **pipes)
        self.mine = self.process.stdout.readline() == "1\n"

    def end(self, number=None):
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate()
        return self.mine


def test_a_lock_is_of_one_process_at_a_time(tmp_path):
    path = tmp_path / "cells" / "rope"
    with try_lock(path) as mine, try_lock(path) as again:
        assert mine
        assert again
        assert not Other(path).end()
        assert holder(path) == f"process {os.getpid()} on {platform.node()}"
        with pytest.raises(RuntimeError, match="of the work"), try_lock(path):
            raise RuntimeError("of the work")
        assert not Other(path).end()
    assert Other(path).end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(tmp_path, number):
    path = tmp_path / "rope"
    other = Other(path)
    assert other.mine
    with pytest.raises(ValueError, match=f"rope is in use by process {other.process.pid} on {platform.node()}; wait"):
        check_free(path)
    other.process.send_signal(number)
    with try_lock(path, 10.0) as mine:  # also while nobody has waited for it
        assert mine
        assert holder(path) == f"process {os.getpid()} on {platform.node()}"
    other.end()
    check_free(path)


def test_a_process_that_a_lock_waits_for(tmp_path):
    path = tmp_path / "rope"
    other = Other(path)
    timer = threading.Timer(0.3, other.process.stdin.close)
    timer.start()
    with try_lock(path, 0.01) as mine:
        assert not mine
    with try_lock(path, 10.0) as mine:
        assert mine
    timer.join()
    other.process.wait()
    other.process.stdout.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not copy processes")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_copy_of_a_process_neither_has_nor_ends_its_lock(tmp_path):
    """For example, a process that prepares batches may live slightly longer than the run."""
    path, context = tmp_path / "rope", multiprocessing.get_context("fork")
    asked, answer = context.Event(), context.Queue()

    def work():
        asked.wait()
        with try_lock(path) as mine:
            answer.put(mine)

    with try_lock(path):
        copies = [context.Process(target=work), context.Process(target=asked.wait)]
        for copy in copies:
            copy.start()
    with try_lock(path) as mine:
        assert mine  # though the copies live
        asked.set()
        assert answer.get(timeout=240) is False
        for copy in copies:
            copy.join()
        assert not Other(path).end()


def test_one_of_many_that_begin_at_once_has_it(tmp_path):
    """The processes have the lock one after another."""
    path, inside, seen = tmp_path / "rope", [], []

    def work():
        for _ in range(20):
            with try_lock(path) as mine:
                if mine:
                    inside.append(1)
                    seen.append(len(inside))
                    inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {1}


def test_a_folder_that_is_removed_or_replaced_stays_locked(tmp_path):
    run = tmp_path / "run"
    folders.create(run, Recipe())
    other = Other(run)
    assert other.mine
    for change in (lambda: folders.create(run, Recipe(), overwrite=True), lambda: shutil.rmtree(run)):
        change()
        with pytest.raises(ValueError, match="is in use by process"), locked(run):
            pass
    other.end()
    with locked(run):
        folders.remove_folder(run)
        assert not Other(run).end()
    assert not run.exists()
    check_free(run)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\n", b"12", b"\xff\n\n", b'{"host": "elsewhere", "pid": 1}'])
def test_what_a_full_disk_or_an_earlier_version_left_is_free(tmp_path, content):
    path = tmp_path / "rope"
    lock_path(path).write_bytes(content)
    assert holder(path) == "another process"
    check_free(path)
    with try_lock(path) as mine:
        assert mine


def test_a_full_disk_hinders_no_lock(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    path = tmp_path / "rope"
    with monkeypatch.context() as patch:
        patch.setattr(locks.Path, "write_text", full)
        with try_lock(path) as mine:
            assert mine
            with pytest.raises(ValueError, match="in use by another process"):
                _in_a_thread(lambda: check_free(path))


def _in_a_thread(call):
    """Run a call in another thread, which has separate locks, and raise its error."""
    found = []

    def work():
        try:
            call()
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if found:
        raise found[0]


@pytest.mark.skipif(not filelock.has_fcntl, reason="the system has no such locks")
def test_a_file_system_without_locks_says_so_and_is_locked_by_files(tmp_path, monkeypatch):
    def none(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    path = tmp_path / "rope"
    with warnings.catch_warnings(record=True) as said, try_lock(path) as mine:
        assert mine
        assert holder(path) == f"process {os.getpid()} on {platform.node()}"
        with pytest.raises(ValueError, match="in use by process"):
            _in_a_thread(lambda: check_free(path))
    assert {str(one.message).partition(" on ")[0] for one in said} == {"flock not supported"}
    assert not lock_path(path).exists()


def test_what_only_asks_writes_nothing(tmp_path):
    check_free(tmp_path / "runs" / "rope")
    assert list(tmp_path.iterdir()) == []


TINY = (
    "--data=text.txt",
    "--device=cpu",
    "--length=8",
    "--batch=2",
    "--layers=1",
    "--model-dim=8",
    "--heads=2",
    "--steps=2",
)


def test_a_run_that_is_in_use_is_refused_with_who_has_it(isopos, tmp_path):
    (tmp_path / "text.txt").write_text("some words of a text\n" * 50)
    assert isopos("train", "--name=a", *TINY)[0] == 0
    assert isopos("compare", "--name=c", "--schemes=rope", *TINY)[0] == 0
    before = {
        path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.suffix != ".lock"
    }
    others = [Other(tmp_path / "runs" / name) for name in "ac"]
    assert all(other.mine for other in others)
    for other, command in (
        (others[0], ("train", "--name=a", "--resume", *TINY)),
        (others[0], ("train", "--name=a", "--overwrite", *TINY)),
        (others[0], ("eval", "runs/a")),
        (others[0], ("eval", "runs/../runs/a/")),
        (others[1], ("compare", "--name=c", "--overwrite", "--schemes=rope", *TINY)),
    ):
        code, _, err = isopos(*command)
        assert (code, err.count("\n")) == (2, 1), (command, err)
        assert f"is in use by process {other.process.pid} on {platform.node()}" in err
    for other in others:
        other.end(signal.SIGKILL)
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path in before} == before
    again = ("compare", "--name=c", "--overwrite", "--schemes=rope", *TINY)
    for command in (("train", "--name=a", "--overwrite", *TINY), ("eval", "runs/a"), again):
        code, _, err = isopos(*command)
        assert code == 0, err
    assert {path.name for path in (tmp_path / "runs").glob(".*")} == {".a.lock", ".c.lock"}


def test_a_lock_next_to_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    folders.create(tmp_path / "a", Recipe())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write next to"), locked(tmp_path / "file" / "a"):
        pass
