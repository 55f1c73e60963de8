"""Test the exact text of a comparison with all features, on the console and as a report."""

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from isopos.lab.recipes import Recipe
from isopos.lab.reports import page
from isopos.lab.reports.comparison import ranking
from isopos.lab.runs.folders import Result, create
from isopos.lab.tasks.images import Images

EXPECTED = Path(__file__).parent / "expected"
LINEAR = {"attention": "linear", "decay": "none", "denominator": "plain", "feature_map": "elu+1"}
SOFTMAX = {"attention": "softmax", "decay": "none", "denominator": "softmax", "feature_map": "softmax"}
RUNS = {  # accuracies by seed, what differs from linear attention, and parameters; None: diverged, "": not ended
    "none": ((0.50, 0.52, 0.51), LINEAR, 100),
    "rope:base=500,decay=retnet": ((0.71, 0.72, 0.73, 0.10), LINEAR | {"decay": "retnet"}, 100),
    "rope*2+none": ((0.60, 0.72, 0.75), LINEAR, 100),
    "learned:attention=softmax": ((0.70, 0.71, 0.715), SOFTMAX, 1234),
    "xpos": ((0.9, None, 0.9), LINEAR, 100),
    "alibi:attention=softmax": (("", "", ""), SOFTMAX, 100),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with runs, started in the order of `RUNS`. Only rope has the last seed."""
    folder = tmp_path / "a & b"
    time = 10**9
    for n, (scheme, (accuracies, choices, parameters)) in enumerate(RUNS.items()):
        for seed, accuracy in enumerate(accuracies):
            run = folder / f"{9 - n}-seed{seed}"
            create(run, Recipe(scheme=scheme, seed=seed, task=Images(height=28, width=28)).edit(steps=23, heads=2))
            os.utime(run / "recipe.json", (time := time + 1, time))
            rows = [{"step": step, "loss": None if step == 7 else 2.0 + step / 10} for step in range(1, 24)]
            rows.insert(9, {"step": 10, "validation": 0.3})
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            scores = {"accuracy": accuracy, "nats": None if accuracy is None else 2 - 2 * accuracy if accuracy else None}
            if accuracy != "":
                status = "diverged at step 3" if accuracy is None else "finished"
                rate = 1000.0 * (n + 1) + 100 * seed
                Result(status, scores, rate, parameters, choices, "yes" if n else "no").save(run)
                examples = [{"class": f"{scheme} {seed}", "model": 1}, {"class": "<other>"}]
                (run / "examples.json").write_text(json.dumps(examples))
    about = {"data": "digits", "summary": "10 images", "sha256": "0123456789abcdef", "torch": "2.0", "device": "cpu"}
    about |= {"task": "images", "threads": 2, "complete": False, "speed": {"none": 1.0, "rope:base=500,decay=retnet": 0.876}}
    about |= {"planned": [*(f"{9 - n}-seed{seed}" for n in range(6) for seed in range(3)), "0-seed0"], "chance": [0.6, 1000]}
    (folder / "comparison.json").write_text(json.dumps(about))
    monkeypatch.setattr(page, "_kernel_sections", lambda run: [f"<h3>{run.recipe.scheme} {run.recipe.seed}</h3>"])
    return folder


@pytest.mark.parametrize("width", [300, 100])
def test_the_table_on_a_console(folder, width):
    table, notes = ranking(folder).render(width)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    found = f"{out.getvalue()}{notes.plain}\n".splitlines()
    assert [line.rstrip() for line in found] == (EXPECTED / f"comparison-{width}.txt").read_text("utf-8").splitlines()


def test_the_report(folder):
    text = page.write(folder).read_text(encoding="utf-8")
    curves = (folder / "curves.svg").read_text(encoding="utf-8")
    assert curves in text
    for part, name in ((page.STYLE, "style"), (page.SCRIPT, "script"), (curves, "curves")):
        assert text.count(part) == 1
        text = text.replace(part, f"[{name}]")
    assert text + "\n" == (EXPECTED / "comparison.html").read_text(encoding="utf-8")
    assert curves.startswith('<svg role="img" aria-label="Training loss by step, one line per run"')
    gids = re.findall('id="(curve-[^"]*)"', curves)
    assert gids == [f"curve-{row.scheme}-seed{seed}" for row in ranking(folder).rows for seed in range(len(row.results))] + [
        f"curve-alibi:attention=softmax-seed{seed}" for seed in range(3)
    ]
