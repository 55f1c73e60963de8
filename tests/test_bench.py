import contextlib
import io
import json

import pytest
from rich.console import Console

from isopos.lab import bench


def _here(call, environment=None):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        eval(f"bench.{call}")
    return json.loads(out.getvalue())


def test_every_row_is_printed(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "LENGTH", 128)
    monkeypatch.setattr(bench, "GROWTH", (64, 128))
    monkeypatch.setattr(bench, "_in_process", _here)
    console = Console(record=True, width=150)
    assert bench.bench(console) == 0
    text = console.export_text()
    assert "rotation forward, B=2 H=8 L=128 d=64" in text
    assert "time / time at L=64" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", bench.MEMORY)
def test_memory_of_a_training_step_is_at_most_six_times_that_of_q(name):
    # the least of three, as the allocator's arenas add up to half a q at random; the gradients alone are 3
    assert 3 < min(bench._in_process(f"peak({name!r})") for _ in range(3)) <= 6
