import io
import re

import pytest
from rich.console import Console

from isopos.lab.reports import progress
from isopos.lab.reports.progress import Bars


@pytest.fixture
def printed(monkeypatch):
    """A function that simulates a run, one second per step, and returns the printed text."""

    def run(*runs, interactive=False, total=None, start=1, end=None):
        clock = iter(range(10**6))
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        file = io.StringIO()
        with Bars(Console(file=file, width=120, force_terminal=interactive, force_interactive=interactive), total) as bars:
            before = 0
            for title, steps in runs:
                show = bars.add(title, steps, "bits/byte", "pixels/s", before=before)
                for step in range(start, (end or steps) + 1):
                    show(step, 8 / step, 1000.0 * step)
                before += steps
        return file.getvalue()

    return run


def test_without_a_terminal_a_run_has_a_line_at_the_start_about_every_tenth_and_the_end(printed):
    lines = printed(("rope:decay=retnet [a]", 250)).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"rope:decay=retnet [a]: {step}/250" for step in range(0, 251, 25)]
    assert lines[1].startswith("rope:decay=retnet [a]: 25/250, 0.320 bits/byte, 25,000 pixels/s, 0:0")
    assert lines[1].endswith(" left")
    assert not lines[-1].endswith(" left")


@pytest.mark.parametrize(("steps", "count"), [(1, 2), (3, 4), (10, 11), (14, 11), (10_000, 11)])
def test_runs_of_any_length_have_few_lines_and_their_last_step(printed, steps, count):
    lines = printed(("none", steps), ("rope", steps)).splitlines()
    assert len(lines) == 2 * count
    assert [line.split(",")[0] for line in lines[count - 1 : count + 1]] == [f"none: {steps}/{steps}", f"rope: 0/{steps}"]


def test_a_run_that_is_resumed_or_ends_early_says_where(printed):
    lines = printed(("none", 100), start=57, end=73).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"none: {step}/100" for step in (0, 57, 60, 70, 73)]


def test_runs_that_share_a_bar_share_the_time_left(printed):
    texts = [printed(("none", 3), ("rope", 3), total=n) for n in (None, 6, 600)]
    none, rope = ([re.search(rf"{name}: 2/3,.* (\S+) left", text)[1] for text in texts] for name in ("none", "rope"))
    assert none == ["0:00:01", "0:00:04", "0:09:58"]  # a second for each step
    assert rope[1:] == ["0:00:01", "0:09:55"]


def test_a_terminal_has_bars(printed):
    text = printed(("none", 20), interactive=True)
    assert "\x1b" in text
    assert "20/20" in text
    assert "0/20, " not in text


def test_a_resumed_run_starts_where_it_was(capsys):
    with Bars(Console()) as bars:
        show = bars.add("rope", 20, done=9)
        show(10, 1.5)
    assert list(map(str.strip, capsys.readouterr().out.splitlines())) == ["rope: 9/20", "rope: 10/20, 1.500"]


def test_an_unknown_loss_is_left_out(capsys):
    with Bars(Console()) as bars:
        bars.add("rounds", 1)(1)
    assert capsys.readouterr().out == "rounds: 0/1\nrounds: 1/1\n"
