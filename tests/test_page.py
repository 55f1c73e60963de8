"""The report of a comparison whose names are hostile: everything that is data is shown as it is."""

import json

import pytest

from isopos.lab.reports import page

CHOICES = {"attention": "linear", "decay": "<i>decay</i>", "denominator": "plain", "feature_map": "elu+1"}
SCORES = {"bits/byte": 2.0, "at 2x": 2.5, "at 4x": None}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two finished schemes, the better one second, and one that diverged."""
    monkeypatch.setattr(page, "_kernel_section", lambda run: f"<h3>{run.recipe.scheme}</h3>")
    about = dict.fromkeys(("summary", "sha256", "torch", "device"), "<u>&</u>") | {"task": "language", "threads": 1}
    about |= {"data": "<script>\x1b[2J$a$", "planned": ["<b>planned</b>"], "complete": False, "speed": {}}
    folder = tmp_path / "<em>one"
    for n, (scheme, status) in enumerate([("none", "finished"), ("rope", "finished"), ("retnet", "diverged <s>here</s>")]):
        run = folder / scheme
        run.mkdir(parents=True)
        (run / "recipe.json").write_text(json.dumps({"scheme": scheme}))
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
        assert f"<{tag}>" not in text.replace("<p>Data", "").replace("<p><small>", "").replace("<p>Weight", ""), tag
        assert f"&lt;{tag}&gt;" in text, tag
    assert "\x1b" not in text
    assert r"Data: &lt;script&gt;\x1b[2J$a$, &lt;u&gt;&amp;&lt;/u&gt;" in text


def test_the_best_is_first_and_its_answers_are_shown(folder):
    text = page.write(folder).read_text()
    places = [text.index(f"<td>{scheme}</td>") for scheme in ("rope", "none", "retnet")]
    assert places == sorted(places)
    assert text.index("<h3>rope</h3>") < text.index("<h3>none</h3>")
    assert "<h3>retnet</h3>" not in text
    assert "<h2>What rope answers</h2>" in text
    assert "&lt;a&gt;rope" in text
    assert "&lt;a&gt;none" not in text
