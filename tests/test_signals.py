"""Test that SIGINT and SIGTERM end a command at a safe point, with their exit status."""

import os
import signal
import subprocess
import sys

import pytest

from isopos.lab.runs import signals
from isopos.lab.runs.folders import Interrupted
from isopos.lab.training import run as training

TINY = ["--steps=4", "--length=32", "--batch=2", "--layers=1", "--model-dim=16", "--heads=2"]
COMPARE = ["compare", "--schemes", "none,rope", "--name", "one", *TINY]
BOTH = pytest.mark.parametrize("number", signals.SIGNALS)
"""Tests that train take one signal each: what tells signals apart is below them."""


def send(number):
    os.kill(os.getpid(), number)


class Dropping:
    """An object whose deletion receives a signal. Python drops exceptions that a handler raises there."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        send(self.number)


@BOTH
def test_a_signal_raises_and_handlers_are_as_before(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stop, signals.raising():
        send(number)
    assert signals.exit_status(stop.value) == 128 + number
    assert signal.getsignal(number) == before
    assert not signals.pending()


@BOTH
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_signal_is_handled_later(number):
    with signals.raising():
        Dropping(number)
        with pytest.raises(Interrupted) as stop:
            signals.raise_pending()
    assert stop.value.code == 128 + number
    signals.raise_pending()


@BOTH
def test_what_must_not_be_left_half_done_is_done_first(number):
    with signals.raising():
        with signals.deferred():
            send(number)
        assert signals.pending() == number


def _before_the_second(monkeypatch, act):
    """Run an action in a comparison before its second run."""
    original = training.train

    def train(recipe, *rest, **options):
        if recipe.scheme == "rope":
            act()
        return original(recipe, *rest, **options)

    monkeypatch.setattr(training, "train", train)


def test_a_signal_between_runs_leaves_a_report(isopos, tmp_path, monkeypatch):
    _before_the_second(monkeypatch, lambda: send(signal.SIGTERM))
    code, out, _ = isopos(*COMPARE)
    assert code == 128 + signal.SIGTERM
    assert "interrupted: the report holds what is finished" in out
    assert "unfinished rope-seed0" in (tmp_path / "runs" / "one" / "report.html").read_text()


def test_a_signal_while_speeds_are_measured_leaves_a_report(isopos, tmp_path, monkeypatch):
    from isopos.lab.commands import compare

    monkeypatch.setattr(compare, "_speeds", lambda *_: send(signal.SIGINT))
    assert isopos(*COMPARE)[0] == 128 + signal.SIGINT
    assert "unfinished timing" in (tmp_path / "runs" / "one" / "report.html").read_text()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_signal_ends_a_run_after_a_step(isopos, tmp_path, monkeypatch):
    _before_the_second(monkeypatch, lambda: Dropping(signal.SIGTERM))
    assert isopos(*COMPARE)[0] == 128 + signal.SIGTERM
    rows = (tmp_path / "runs" / "one" / "rope-seed0" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 1


def test_a_signal_in_the_last_step_lets_the_run_finish_and_no_other_begin(isopos, tmp_path, monkeypatch):
    original = training.train

    def train(recipe, source, folder, show):
        return original(recipe, source, folder, lambda *row: (show(*row), send(signal.SIGINT) if row[0] == 4 else None))

    monkeypatch.setattr(training, "train", train)
    assert isopos(*COMPARE)[0] == 128 + signal.SIGINT
    assert (tmp_path / "runs" / "one" / "none-seed0" / "result.json").exists()
    assert not (tmp_path / "runs" / "one" / "rope-seed0").exists()


@BOTH
@pytest.mark.parametrize("command", ["check", "list"])
def test_any_command_ends(isopos, monkeypatch, command, number):
    monkeypatch.setattr(f"isopos.lab.commands.{command}.run", lambda *_: send(number))
    assert isopos(*[command, "rope"][: 1 + (command == "check")]) == (128 + number, "", "")


EARLY = """
import runpy, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = ["isopos", "list"]
runpy.run_module("isopos", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["isopos.cli", "tyro", "isopos.lab.commands.list"])
def test_ctrl_c_while_importing_is_no_traceback(name):
    done = subprocess.run([sys.executable, "-c", EARLY.format(name=name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_first_of_several_signals_counts_and_none_outlives_its_command():
    with signals.raising():
        for number in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(Interrupted):
                send(number)
        assert signals.pending() == signal.SIGTERM
        with pytest.raises(Interrupted) as stop:
            signals.raise_pending()
        assert signals.exit_status(stop.value) == 143
        assert signals.exit_status(KeyboardInterrupt()) == 130
        with signals.deferred():
            send(signal.SIGINT)  # only remembered
    assert signals.pending() == 0
    signals.raise_pending()
    signals.remember(signal.SIGINT)  # outside of a command
    assert signals.pending() == 0
    with signals.raising():
        signals.remember(signal.SIGTERM)
        assert signals.pending() == signal.SIGTERM
