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


@pytest.fixture
def printed(monkeypatch):
    """What a section prints, at a small size."""
    for name, value in {"ROUNDS": 1, "LENGTH": 128, "GROWTH": (64, 128), "NODES": 15, "_in_process": _here}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "accuracy", lambda: "the table of accuracies")

    def run(section):
        console = Console(record=True, width=150)
        assert bench.bench(console, section) == 0
        return console.export_text()

    return run


SECTIONS = {
    "rotation": "rotation forward, B=2 H=8 L=128 d=64",
    "growth": "time / time at L=64",
    "memory": "attention with permuteformer forward + backward",
    "construction": "operators of a binary tree, 15 nodes",
    "accuracy": "the table of accuracies",
}


def test_every_row_is_printed(printed):
    text = printed("all")
    assert all(words in text for words in SECTIONS.values())


@pytest.mark.parametrize("section", ["growth", "construction", "accuracy"])
def test_a_section_alone(printed, section):
    text = printed(section)
    assert [name for name, words in SECTIONS.items() if words in text] == [section]


def test_construction_names_the_slowest(printed):
    lines = printed("construction").splitlines()
    assert sum("slowest five" in line for line in lines) == 5
    assert sum("median of" in line for line in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", bench.MEMORY)
def test_memory_of_a_training_step_is_at_most_six_times_that_of_q(name):
    # the least of three, as the allocator's arenas add up to half a q at random; the gradients alone are 3
    assert 3 < min(bench._in_process(f"peak({name!r})") for _ in range(3)) <= 6
