"""Claims and the lock of a run folder: one process at a time, until it ends, however it does."""

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time

import pytest

from isopos.lab.recipes import Recipe
from isopos.lab.runs import claims, folders
from isopos.lab.runs.claims import claimed, holder, locked

CLAIM = """
import sys, time
from pathlib import Path
from isopos.lab.runs.claims import claimed
with claimed(Path(sys.argv[1])) as mine:
    print(int(mine), flush=True)
    sys.stdin.read()
"""


class Other:
    """Another process that claims a path, until it is told to end or killed."""

    def __init__(self, path, *before):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([*before, sys.executable, "-c", CLAIM, str(path)], text=True, **pipes)
        self.mine = self.process.stdout.readline() == "1\n"

    def end(self, number=None):
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate()
        return self.mine


def old(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_claim_is_one_process_at_a_time(tmp_path):
    path = tmp_path / "claims" / "cell.claim"
    with claimed(path) as mine:
        assert mine
        assert not Other(path).end()
        assert holder(path) == f"process {os.getpid()} on {platform.node()}"
    assert holder(path) == ""
    assert Other(path).end()
    assert list(path.parent.iterdir()) == []


def test_a_claim_ends_with_its_process(tmp_path):
    path = tmp_path / "cell.claim"
    other = Other(path)
    assert other.mine
    old(path, 2 * claims.STALE)  # a process that is not woken for long still has it
    assert holder(path) == f"process {other.process.pid} on {platform.node()}"
    other.process.send_signal(signal.SIGKILL)
    while other.process.poll() is None and holder(path):  # also while nobody has waited for it
        time.sleep(0.01)
    assert path.exists()
    with claimed(path) as mine:
        assert mine
    other.end()


@pytest.mark.skipif(claims.fcntl is None, reason="the system has no such locks")
def test_a_claim_of_another_container_of_this_machine_ends_with_its_process(tmp_path, monkeypatch):
    """Its numbers of processes are others; only the lock tells."""
    path = tmp_path / "cell.claim"
    other = Other(path)
    process = claims._process
    monkeypatch.setattr(claims, "_process", lambda pid: process(pid) | {"space": "pid:[1]", "start": "gone"})
    old(path, 2 * claims.STALE)
    with claimed(path) as mine:
        assert not mine
    other.end(signal.SIGKILL)
    old(path, 0)
    with claimed(path) as mine:
        assert mine
    monkeypatch.setattr(claims, "_lock_file", lambda file, shared: None)  # a file system without locks
    path.write_text(json.dumps({"host": platform.node(), "space": "pid:[2]", **{k: process(1)[k] for k in ("pid", "boot")}}))
    with claimed(path) as mine:
        assert not mine
    old(path, claims.STALE + 60)
    with claimed(path) as mine:
        assert mine


def test_a_claim_of_another_machine_is_free_when_it_is_not_renewed(tmp_path):
    """Also where that machine has the same name, and a process of the same number runs here."""
    path = tmp_path / "cell.claim"
    for host, pid in (("elsewhere", 1), (platform.node(), os.getpid()), (platform.node(), 2**22 + 1)):
        for age, free in ((0, False), (claims.STALE - 60, False), (claims.STALE + 60, True)):
            path.write_text(json.dumps({"host": host, "pid": pid, "boot": "another", "space": "", "start": "1"}))
            old(path, age)
            assert bool(holder(path)) != free
            with claimed(path) as mine:
                assert mine == free


def test_another_process_of_the_same_number_does_not_hold_a_claim(tmp_path):
    path = tmp_path / "cell.claim"
    with claimed(path):
        found = json.loads(path.read_text())
    assert {"pid", "boot", "space", "start"} <= found.keys()
    path.write_text(json.dumps(found))
    assert holder(path)
    if found["start"] != "hidden":
        path.write_text(json.dumps(found | {"start": "1"}))
        assert not holder(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"host": 3, "pid": "x"}'])
def test_a_claim_that_a_full_disk_left_is_free_in_seconds(tmp_path, content):
    path = tmp_path / "cell.claim"
    path.write_bytes(content)
    with claimed(path) as mine:
        assert not mine
    old(path, claims.BEAT + 5)
    with claimed(path) as mine:
        assert mine


def test_a_claim_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(file, shared):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(claims, "_lock_file", full)
    with pytest.raises(OSError, match="No space left"), claimed(tmp_path / "cell.claim"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_turn_that_a_kill_left_ends(tmp_path):
    path = tmp_path / "cell.claim"
    turn = tmp_path / ".cell.claim.turn"
    turn.mkdir()
    with claimed(path) as mine:
        assert not mine
    old(turn, claims.TURN + 5)
    with claimed(path):
        pass
    with claimed(path) as mine:
        assert mine


def test_one_of_many_that_begin_at_once_has_it(tmp_path):
    """Each in turn, none beside another."""
    path, inside, seen = tmp_path / "cell.claim", [], []

    def work():
        for _ in range(20):
            with claimed(path) as mine:
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


def test_a_claim_that_is_held_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.01)
    path = tmp_path / "cell.claim"
    with claimed(path):
        os.utime(path, (0, 0))
        end = time.monotonic() + 10
        while path.stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.005)


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
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    others = [Other(tmp_path / "runs" / f".{name}.lock") for name in "ac"]
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
        assert ".lock" in err
    for other in others:
        other.end(signal.SIGKILL)
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path in before} == before
    again = ("compare", "--name=c", "--overwrite", "--schemes=rope", *TINY)
    for command in (("train", "--name=a", "--overwrite", *TINY), ("eval", "runs/a"), again):
        code, _, err = isopos(*command)
        assert code == 0, err
    assert not list((tmp_path / "runs").glob(".*"))


def test_a_lock_beside_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    folders.create(tmp_path / "a", Recipe())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write beside"), locked(tmp_path / "file" / "a"):
        pass


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="this system does not say when processes were started")
def test_processes_are_told_apart_by_when_they_were_started():
    child = subprocess.Popen(["sleep", "100"])
    own, other = (int(claims._process(pid)["start"]) for pid in (os.getpid(), child.pid))
    child.kill()
    child.wait()
    ticks = os.sysconf("SC_CLK_TCK")
    assert own <= other <= own + 86_400 * ticks
    assert claims._process(os.getpid())["start"] == str(own)
    assert claims._process(child.pid)["start"] == "gone"
