import json

import pytest
from cases import each

from isopos.lab.recipes import Recipe
from isopos.lab.reports import page
from isopos.lab.reports.comparison import ranking
from isopos.lab.runs.folders import Result, create
from isopos.lab.tasks.images import Images

CHOICES = {"attention": "linear", "decay": "none", "denominator": "plain", "feature_map": "elu+1"}


def _folder(tmp_path, bits):
    about = dict.fromkeys(("data", "summary", "sha256", "torch", "device"), "some") | {"task": "language", "threads": 1}
    about |= {"planned": [], "complete": True, "speed": {"rope": 0.9}}
    (tmp_path / "comparison.json").write_text(json.dumps(about))
    for (scheme, seed), value in bits.items():
        run = tmp_path / f"{scheme}-{seed}"
        run.mkdir()
        (run / "recipe.json").write_text(json.dumps({"scheme": scheme, "seed": seed, "steps": 1}))
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "bits_per_byte": 3.0}\n')
        status = "diverged at step 3" if value is None else "finished"
        result = {"status": status, "bits_per_byte": {"1": value, "2": value, "4": None}, "tokens_per_second": 10.0}
        (run / "result.json").write_text(json.dumps(result | {"parameters": 5, "choices": CHOICES, "laws": "yes"}))
    return ranking(tmp_path)


def _cells(found):
    return [dict(zip(found.header, found.cells(row, found.header), strict=True)) for row in found.rows]


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ((2.6, 2.7, 2.8), "(+0.200 [-0.048, +0.448])"),  # two standard deviations apart, which three seeds do not show
        ((2.65, 2.7, 2.75), "+0.200 [+0.076, +0.324]"),
        ((2.6, 2.8), "+0.200"),
    ],
)
def test_a_difference_whose_interval_includes_0_is_in_brackets(tmp_path, other, shown):
    bits = {("rope", seed): 2.5 for seed in range(len(other))} | {("none", seed): bit for seed, bit in enumerate(other)}
    found = _folder(tmp_path, bits)
    assert _cells(found)[1]["to best"] == shown
    assert any(
        f"{len(other)} {'differences' if len(other) > 2 else 'seeds, so no interval'}" in note for note in found.notes()
    )
    assert found.leads == (not shown.startswith("("))
    assert _cells(found)[0]["to best"] == ("best" if found.leads else "first")
    assert any(note.startswith("first: the best figure") for note in found.notes()) != found.leads


def test_intervals_to_the_best_are_wider_the_more_rows_it_is_picked_from(tmp_path):
    """For 0.15, 0.2 and 0.25, half of the interval is 0.124 for one pair.

    For six rows it is of fifteen pairs. Deviations that are alike have the variance 0.05^2 e^0.5772 = 0.00445 in common,
    which counts as 5 degrees of freedom, and 2 are a row's own: together 0.0039, and t = 4.355 gives 0.157.
    """
    bits = {("rope", seed): 2.5 for seed in range(3)}
    bits |= {(name, seed): 2.65 + 0.05 * seed for name in ("none", "alibi", "t5", "shaw", "learned") for seed in range(3)}
    found = _folder(tmp_path, bits)
    assert {row["to best"] for row in _cells(found)[1:]} == {"+0.200 [+0.043, +0.357]"}
    assert found.leads
    assert "for all pairs of rows at once: 5% are divided by their number" in " ".join(found.notes())


@pytest.mark.parametrize(
    ("accuracies", "leads"),
    [
        ((0.53, 0.5), False),
        ((0.5, 0.5), False),
        ((0.56, 0.5), True),
        ((0.54, 0.5), True),
        ((0.54, 0.5, 0.5, 0.5, 0.5), False),  # the more rows, the luckier the best one
    ],
)
def test_no_row_is_highlighted_at_chance_level(tmp_path, monkeypatch, accuracies, leads):
    monkeypatch.setattr(page, "_kernel_sections", lambda run: [])
    about = dict.fromkeys(("data", "summary", "sha256", "torch", "device"), "some") | {"task": "images", "threads": 1}
    about |= {"planned": [], "complete": True, "speed": {}, "chance": [0.5, 1000]}  # one standard deviation: 0.016
    (tmp_path / "comparison.json").write_text(json.dumps(about))
    for scheme, accuracy in zip(("rope", "none", "retnet", "xpos", "alibi"), accuracies, strict=False):
        recipe = Recipe(scheme=scheme, task=Images())
        create(tmp_path / scheme, recipe)
        Result("finished", {"accuracy": accuracy, "nats": 0.7}, 1.0, 1, CHOICES, "yes").save(tmp_path / scheme)
    found = ranking(tmp_path)
    assert found.leads == leads
    assert any("No row is above chance, 50.0%" in note for note in found.notes()) != leads
    assert _cells(found)[0]["to best"] == ("best" if leads else "first")
    assert ("Chance is 50.0%, the share of the most frequent class." in found.notes()) == leads
    assert ('<tr class="best">' in page.write(tmp_path).read_text()) == leads


def test_the_table_renders_without_rows(tmp_path):
    found = _folder(tmp_path, {})
    assert found.rows == []
    assert found.render(80)[0].row_count == 0
    assert [note.partition(":")[0] for note in found.notes()][1:] == ["to best"]
    assert "to best: no compared run has a figure, so no row is the best." in found.notes()


def test_runs_without_figures_have_no_best_row(tmp_path):
    found = _folder(tmp_path, {(scheme, seed): None for scheme in ("rope", "none") for seed in range(3)})
    notes = list(found.notes())
    assert "to best: no compared run has a figure, so no row is the best." in notes
    assert not [note for note in notes if "one seed" in note or note.startswith("first")]


def test_a_row_without_a_figure_comes_last(tmp_path):
    _folder(tmp_path, {("rope", 0): 2.5, ("none", 0): 2.6})
    result = tmp_path / "rope-0" / "result.json"
    result.write_text(result.read_text().replace('"1": 2.5, "2": 2.5', '"1": null, "2": null'))
    cells = [tuple(row[title] for title in ("scheme", "bits/byte", "to best", "at 4x")) for row in _cells(ranking(tmp_path))]
    assert cells == [("none", "2.600", "first", "-"), ("rope", "-", "-", "-")]


@each(("figures", "word"), [((2.5, 2.6), "best"), ((2.5, 2.5), "first"), ((2.5,), "first")])
def test_a_row_that_no_other_differs_from_is_no_best_one(tmp_path, figures, word):
    (folder := tmp_path / str(figures)).mkdir()
    _folder(folder, {(name, 0): value for name, value in zip(("rope", "none"), figures, strict=False)})
    assert _cells(ranking(folder))[0]["to best"] == word


def test_a_narrow_terminal_leaves_out_what_matters_least(tmp_path):
    table, notes = _folder(tmp_path, {("rope", 0): 2.5, ("none", 0): 2.6}).render(50)
    left = "denominator, features, parameters, tokens/s, decay, at 2x, at 4x, laws hold"
    assert [str(column.header) for column in table.columns] == ["scheme", "bits/byte", "to best", "speed"]
    assert notes.plain.endswith(f"\nLeft out, since this terminal is narrow: {left}; the report has them.")
