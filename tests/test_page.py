"""Test the report of a comparison with hostile names, which it must show as plain text, and its pictures."""

import json
import math
from types import SimpleNamespace

import pytest

from isopos.lab.recipes import Recipe
from isopos.lab.reports import page
from isopos.lab.reports.comparison import Run, ranking, read_runs
from isopos.schemes import REGISTRY

CHOICES = {"attention": "linear", "decay": "<i>decay</i>", "denominator": "plain", "feature_map": "elu+1"}
SCORES = {"bits/byte": 2.0, "at 2x": 2.5, "at 4x": None}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two finished schemes, the better one second, and one that diverged."""
    monkeypatch.setattr(page, "_kernel_sections", lambda run: [f"<h3>{run.recipe.scheme}</h3>"])
    about = dict.fromkeys(("summary", "sha256", "torch", "device"), "<u>&</u>") | {"task": "language", "threads": 1}
    about |= {"data": "<script>\x1b[2J$a$", "planned": ["<b>planned</b>"], "complete": False, "speed": {}}
    folder = tmp_path / "<em>one"
    for n, (scheme, status) in enumerate([("none", "finished"), ("rope", "finished"), ("retnet", "diverged <s>here</s>")]):
        run = folder / scheme
        run.mkdir(parents=True)
        (run / "recipe.json").write_text(json.dumps({"scheme": scheme, "steps": 1}))
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        scores = SCORES | {"bits/byte": 3.0 - n} if status == "finished" else dict.fromkeys(SCORES)
        result = {"status": status, "scores": scores, "rate": 1.0, "parameters": 5, "choices": CHOICES, "laws": "<q>no</q>"}
        (run / "result.json").write_text(json.dumps(result))
        (run / "examples.json").write_text(json.dumps([{"<p>text": f"<a>{scheme}", "answer": 3}]))
    (folder / "comparison.json").write_text(json.dumps(about))
    return folder


def test_names_and_cells_are_escaped(folder):
    text = page.write(folder).read_text()
    for tag in ("script", "em", "b", "i", "q", "s", "u", "p", "a"):
        assert f"<{tag}>" not in text.replace("<p>Data", "").replace("<p><small>", "").replace("<p>Curves", ""), tag
        assert f"&lt;{tag}&gt;" in text, tag
    assert "\x1b" not in text
    assert r"Data: &lt;script&gt;\x1b[2J$a$, &lt;u&gt;&amp;&lt;/u&gt;" in text


def test_pictures_among_the_answers_are_shown_and_nothing_that_looks_like_one(folder):
    image = "data:image/png;base64,iVBORw0KGgo="
    others = [image + '" onerror="x', "data:text/html;base64,aGE=", image + "\n"]
    samples = [{"image": one, "answer": 3} for one in (image, *others)]
    (folder / "rope" / "examples.json").write_text(json.dumps(samples))
    text = page.write(folder).read_text()
    assert text.count("<img") == text.count(f'<img src="{image}" alt="image">') == 1
    assert 'onerror="x' not in text


def test_curves_are_means_of_some_steps_in_the_unit_of_the_task(folder):
    losses = [float(n) for n in range(1, 2 * page.SMOOTH + 2)]
    rows = [{"step": n + 1, "loss": None if n == 3 else loss} for n, loss in enumerate(losses)]
    kept = losses[:3] + losses[4 : page.SMOOTH], losses[page.SMOOTH : -1], losses[-1:]
    expected = [sum(part) / len(part) for part in kept]
    assert list(page._smooth(rows)) == [(page.SMOOTH, expected[0]), (2 * page.SMOOTH, expected[1]), (len(rows), expected[2])]
    runs = [Run(run.folder, run.recipe, rows, run.result) for run in read_runs(folder)]
    lines = {line.get_label(): line for line in page._curves(runs, ranking(folder)).axes[0].get_lines()}
    assert set(lines) == {"rope", "none", "retnet"}
    assert lines["rope"].get_gid() == "curve-rope-seed0"
    for line in lines.values():
        assert line.get_xdata().tolist() == [page.SMOOTH, 2 * page.SMOOTH, len(rows)]
        assert line.get_ydata() == pytest.approx([nats / math.log(2) for nats in expected])


def test_a_kernel_is_drawn_by_offset_and_by_pairs(monkeypatch, tmp_path):
    drawn = {}
    scheme = REGISTRY["rope"](8, 2)
    monkeypatch.setattr(page, "load_run", lambda folder: (None, SimpleNamespace(scheme=scheme)))
    monkeypatch.setattr(page, "draw_curve", lambda axes, offset, score, attention: drawn.update(curve=score))
    monkeypatch.setattr(page, "draw_heat", lambda axes, score, attention: drawn.update(heat=score))
    (section,) = page._kernel_sections(Run(tmp_path, Recipe(), [], None))
    assert 'id="kernel-rope"' in section
    heads, count = drawn["curve"].shape
    assert heads == 2
    assert drawn["heat"].shape == (count, count)
    assert drawn["heat"][count // 2].equal(drawn["curve"].mean(0))


def test_a_tree_is_drawn_next_to_its_matrix(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(page, "load_run", lambda folder: (None, SimpleNamespace(scheme=REGISTRY["ape-tree"](8, 2))))
    monkeypatch.setattr(page, "draw_tree", lambda axes, panel, attention: drawn.append(panel))
    monkeypatch.setattr(page, "draw_panel", lambda axes, panel, scheme, alone: drawn.append(panel))
    [*page._kernel_sections(Run(tmp_path, Recipe(), [], None))]
    first, second = drawn
    assert first is second
    assert first.group.refers_to_rows
