"""Test a paper's table from given cells, without training: figures, spreads, orders."""

import itertools
import json
import math
import re

import pytest
from matplotlib.figure import Figure

from isopos.lab.recipes import Recipe
from isopos.lab.reports import findings, paper
from isopos.lab.tables.loader import load_table

TABLE = """
title = "Which <b>one</b>?"
citation = "a toy [1]"
recipe = "quickstart"
baseline = "Base"
{more}
[[columns]]
title = "figure"
better = "{better}"
style = ".2f"
{after}

{rows}
[scales.paper]
[scales.small]
tokenizer = "bytes"
[scales.tiny]
"""
FIGURES = {"Base": (3.0, 1.0), "Rope": (1.0, 3.0), "Both | more": (2.0, 2.0), "Alone": (None, 9.0)}  # the paper's, and ours
SCHEMES = {"Base": "none", "Rope": "rope", "Both | more": "rope:decay=retnet", "Alone": "retnet"}


@pytest.fixture
def write(tmp_path):
    """Write a table with these cells; returns the text below it and table.md."""

    def written(better, more="", seeds=1, timing=(), scale="small", curve=None, figure=None, lacking=(), after=""):
        rows = "".join(
            f'[[rows]]\nname = "{name}"\nscheme = "{SCHEMES[name]}"\n' + (f"figures = [{theirs}]\n" if theirs else "")
            for name, (theirs, _) in FIGURES.items()
        )
        (tmp_path / "toy.toml").write_text(TABLE.format(better=better, more=more, rows=rows, after=after))
        about = {"table": "toy", "scale": scale, "commands": ["isopos table toy"], "seeds": seeds, "machine": "one"}
        (tmp_path / "about.json").write_text(json.dumps(about | {"corpora": {"": "text"} if not timing else {}}))
        if timing:
            (tmp_path / "timing.json").write_text(json.dumps(timing))
        for name, (_, ours) in {} if timing else FIGURES.items():
            for seed in (seed for seed in range(seeds) if (name, seed) not in lacking):
                cell = tmp_path / "cells" / paper.cell_name("", SCHEMES[name], seed)
                cell.mkdir(parents=True)
                value = figure(name, ours, seed) if figure else ours + seed
                columns = {"figure": {"value": value, "split": "validation", "reason": ""}}
                (cell / "scores.json").write_text(json.dumps({"status": "finished", "columns": columns, "seconds": 30.0}))
                validations = curve(name, ours, seed) if curve else {1: 2.0}
                lines = [json.dumps({"step": step, "validation": found}) + "\n" for step, found in validations.items()]
                (cell / "metrics.jsonl").write_text("".join(lines))
        _, said = paper.write(load_table(str(tmp_path / "toy.toml")), tmp_path)
        return said, (tmp_path / "table.md").read_text()

    return written


@pytest.mark.parametrize(("worst", "marks"), [(1.3, 0), (9.0, 3)])
def test_no_row_is_marked_where_none_differs_from_the_best(write, worst, marks):
    """Alone is behind by `worst`, two others by 0.2. Their interval excludes 0 for one pair, but not for three."""
    noise = {"Base": (0, 0, 0), "Rope": (0.14, 0.2, 0.26), "Both | more": (0.14, 0.2, 0.26), "Alone": (-1.0, 0.0, 1.0)}
    means = {"Base": 1.0, "Rope": 1.0, "Both | more": 1.0, "Alone": worst}
    _, page = write("lower", more="marked = true", seeds=3, figure=lambda name, _, seed: means[name] + noise[name][seed])
    assert page.count(" * |") == marks
    assert "None is marked if no row differs from the best" in page


@pytest.mark.parametrize(("scale", "token"), [("small", "byte"), ("paper", "token")])
def test_figures_are_of_the_scale_s_tokens(write, scale, token):
    _, page = write("lower", more='figure = "perplexity"\n[edits]\ntokenizer = "words"', scale=scale)
    assert f"- Figures are perplexity of a {token}, lower is better;" in page


def test_a_column_before_the_end_is_missing_without_validations(write):
    _, page = write("lower", after="after = 0.5", curve=lambda *_: {})
    assert "figure: not validated." in page


def test_figures_that_are_not_finite_are_none(write, tmp_path):
    _, page = write("lower", seeds=2, figure=lambda name, ours, seed: math.nan if (name, seed) == ("Rope", 1) else ours)
    assert "Rope, figure: not finite." in page
    assert json.loads((tmp_path / findings.RESULTS).read_text())["figures"]["figure"]["Rope"] == {"0": 3.0}


def test_a_figure_that_was_not_scored_is_not_called_infinite(write):
    _, page = write("lower", figure=lambda name, ours, _: None if name == "Rope" else ours)
    assert "not finite" not in page
    assert re.search(r"\| Rope \| rope \| 1\.0+ \| none \|", page)


def test_a_seed_that_diverged_has_no_part_in_curves(write, tmp_path):
    steps = {5: 3.0, 10: 2.0, 20: 1.0}
    write("lower", seeds=2, curve=lambda *_: steps)
    cell = tmp_path / "cells" / paper.cell_name("", SCHEMES["Base"], 1)
    scores = json.loads((cell / "scores.json").read_text())
    (cell / "scores.json").write_text(json.dumps(scores | {"status": "diverged", "columns": {}}))
    (cell / "metrics.jsonl").write_text(json.dumps({"step": 5, "validation": 3.0}) + "\n")
    paper.write(load_table(str(tmp_path / "toy.toml")), tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert "Base, figure: diverged." in page
    rows = [
        line.split("|") for line in page.splitlines() if line.startswith(("| Base |", "| Rope |")) and line.count("|") > 4
    ]
    assert [row[-2].strip() for row in rows] == ["20", "20"]


def test_figures_are_kept_as_data_too(write, tmp_path):
    write("lower", seeds=2, lacking={("Rope", 0)})
    found = json.loads((tmp_path / findings.RESULTS).read_text())["figures"]
    assert found == {"figure": {"Base": {"0": 1.0, "1": 2.0}, "Rope": {"1": 4.0}, "Both | more": {"0": 2.0, "1": 3.0},
                                "Alone": {"0": 9.0, "1": 10.0}}}  # fmt: skip


def test_the_smallest_scale_ranks_nothing(write):
    said, _ = write("lower", scale="tiny")
    assert not any("Best first" in text for text in said)
    assert any("says nothing about the order" in text for text in said)


@pytest.mark.parametrize(
    ("apart", "shown"),
    [
        ((0.4, 0.5), "+0.450 ± 0.071"),
        ((0.1, 0.3, 0.5), "+0.300 ± 0.200"),
        ((0.2, 0.3, 0.4), "**+0.300 ± 0.100**"),
    ],
)
def test_a_distance_is_bold_where_its_interval_excludes_0(write, apart, shown):
    _, page = write("lower", seeds=len(apart), figure=lambda name, ours, seed: ours + (name == "Rope") * (apart[seed] - 2))
    assert f"| Rope | {shown} |" in page


@pytest.mark.parametrize(("lacks", "updates"), [("Rope", "10"), ("Base", "5")])
def test_means_of_two_rows_are_over_the_seeds_that_both_have(write, lacks, updates):
    """One row lacks seed 1. Including it for the other row would change its mean and their distance."""
    curves = {("Base", 0): (9.0, 3.0), ("Base", 1): (9.0, 9.0), ("Rope", 0): (5.0, 3.0), ("Rope", 1): (8.0, 8.0)}
    if lacks == "Base":
        curves[("Rope", 0)] = (3.0, 2.0)

    def curve(name, ours, seed):
        return dict(zip((5, 10), curves.get((name, seed), (9.0, 9.0)), strict=True))

    _, page = write("lower", seeds=2, curve=curve, lacking={(lacks, 1)}, figure=lambda name, ours, seed: ours + 10.0 * seed)
    first, distance = (line for line in page.splitlines() if line.startswith("| Rope |"))
    assert first.endswith(f" | {updates} |")
    assert distance == "| Rope | +2.000 |"


def test_distances_are_to_the_baseline_where_no_reference_is_named(write):
    _, page = write("lower")
    assert "## Distance to Base\n" in page
    assert "| Rope | +2.000 |" in page


def test_updates_are_counted_to_what_the_baseline_reaches_in_the_end(write):
    curves = {
        "Base": {5: 9.0, 10: 3.0},
        "Rope": {5: 3.0, 10: 1.0},
        "Both | more": {5: 4.0, 10: 3.5},
        "Alone": {5: 4.0, 10: 2.0},
    }
    _, page = write("lower", curve=lambda name, ours, seed: curves[name])
    rows = [line for line in page.splitlines() if line.startswith(("| Base |", "| Rope |", "| Both", "| Alone |"))]
    assert [row.split(" | ")[-1].removesuffix(" |") for row in rows[:4]] == ["10", "5", "not reached", "10"]


def test_curves_show_the_distance_to_the_reference_by_update(write, monkeypatch):
    figures = []
    monkeypatch.setattr(paper, "Figure", lambda **sizes: figures.append(Figure(**sizes)) or figures[-1])
    write("lower", 'reference = "Rope"', seeds=2, curve=lambda name, ours, seed: {50: 5.0 * seed, 100: ours + seed * ours})
    above, below = figures[0].axes
    assert [line.get_label() for line in above.lines] == list(FIGURES)
    assert [list(line.get_ydata()) for line in above.lines] == [[2.5, ours * 1.5] for _, ours in FIGURES.values()]
    assert [list(line.get_xdata()) for line in below.lines] == [[50, 100]] * len(FIGURES)
    assert [list(line.get_ydata()) for line in below.lines] == [[0.0, (ours - 3) * 1.5] for _, ours in FIGURES.values()]
    assert "less Rope's, paired by seed" in below.get_ylabel()


def test_a_reference_is_a_row_with_a_scheme(write):
    with pytest.raises(ValueError, match="reference: expected a row with a scheme, got 'Robe'"):
        write("lower", 'reference = "Robe"')


def test_a_report_states_whether_the_order_changes_with_training(write):
    said, _ = write("lower", curve=lambda name, ours, seed: {5: 0.0, 10: -ours, 50: 1.0, 100: ours})
    (line,) = (text for text in said if "updates, rank" in text)
    first, last = "Alone, Rope, Both | more, Base", "Base, Both | more, Rope, Alone"
    assert line == (
        "Validation: order after 10 and after 100 updates, rank correlation -1.00 over 4 rows. "
        f"Best first, then: {first}; in the end: {last}."
    )


def test_orders_are_those_of_the_means_that_are_shown(write):
    far = {"Base": 0.0, "Rope": -9.0, "Both | more": 0.0}  # a seed of Rope's that moves its mean, not its median
    said, page = write("higher", seeds=3, figure=lambda name, ours, seed: ours + (seed == 2) * far.get(name, 0.0))
    assert "| Rope | rope | 1.00 | 0.000 ± " in page
    assert any(text.endswith("paper: Base, Both | more, Rope; ours: Both | more, Base, Rope.") for text in said)


def test_orders_are_those_of_the_figures_that_are_shown(write, monkeypatch):
    monkeypatch.setitem(FIGURES, "Rope", (1.0, 0.5))
    more = 'kind = "speed"'
    rounds = [{"Base": 1.0, "Rope": 1 / ratio, "Both | more": 0.5} for ratio in (1.0, 1.5, 30.0)]
    said, _ = write("higher", more=more, timing=rounds)  # the mean of the ratios is above 2, their median below
    assert any(text.endswith("ours: Both | more, Rope, Base.") for text in said)


@pytest.fixture
def drawn(monkeypatch):
    """The axes of all pictures."""
    found = []

    def save(figure, file, **options):
        found.extend(figure.axes)

    monkeypatch.setattr(Figure, "savefig", save)
    return found


def test_speeds_are_drawn_next_to_the_names_of_rows_and_to_the_paper_s(write, drawn):
    write("higher", more='kind = "speed"', timing=[{"Base": 1.0, "Rope": 1 / ratio} for ratio in (1.0, 2.0, 3.0, 5.0, 9.0)])
    *_, axes = drawn  # after those of distances
    names = {place: label.get_text() for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    ours = {names[line.get_ydata()[0]]: line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "o"}
    paper_s = {names[line.get_ydata()[0]]: line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "x"}
    assert ours == {"Base": 1.0, "Rope": 3.0}
    assert paper_s == {name: FIGURES[name][0] for name in ours}
    spans = [{x for x, _ in segment} for bars in axes.collections for segment in bars.get_segments()]
    assert [max(span) - min(span) for span in spans] == pytest.approx([0.0, 3.0]), "between the quartiles, 2 and 5"


def of_images(folder, head, columns, value, curve='{"step": 1, "validation": 0.5}'):
    """Writes a table of images with three rows, the last without cells, and returns table.md."""
    rows = {"Base": "none", "Grid": "ape-grid", "Later": "rope"}
    lines = "".join(f'[[rows]]\nname = "{name}"\nscheme = "{scheme}"\n' for name, scheme in rows.items())
    head += '\ntitle = "t"\ncitation = "c"\nrecipe = "images"\nbaseline = "Base"\n'
    columns = {title: f'[[columns]]\ntitle = "{title}"\n{more}\n' for title, more in columns.items()}
    text = head + "".join(columns.values()) + lines + "[scales.paper]\n[scales.small]\n[scales.tiny]\n"
    (folder / "toy.toml").write_text(text)
    about = {"table": "t", "scale": "small", "commands": [], "seeds": 2, "machine": "m", "corpora": {"": "text"}}
    (folder / "about.json").write_text(json.dumps(about))
    for name, seed in itertools.product(("Base", "Grid"), range(2)):
        cell = folder / "cells" / paper.cell_name("", rows[name], seed)
        cell.mkdir(parents=True)
        found = {title: {"value": value(name, title, seed), "split": "validation", "reason": ""} for title in columns}
        (cell / "scores.json").write_text(json.dumps({"status": "finished", "columns": found, "seconds": 1.0}))
        (cell / "metrics.jsonl").write_text(curve)
    paper.write(load_table(str(folder / "toy.toml")), folder)
    return (folder / "table.md").read_text()


def test_figures_are_drawn_by_the_choice_in_which_columns_differ(tmp_path, drawn):
    def value(name, title, seed):
        return 0.8 - 0.1 * int(title) * (name == "Base") + 0.02 * seed

    of_images(tmp_path, 'along = "shift"', {str(n): f"view = {{ shift = {n} }}" for n in (4, 0, 2)}, value)
    *_, axes = drawn  # after those of distances
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("shift", "accuracy")
    assert [line.get_label() for line in axes.lines] == ["Base", "Grid"]
    for line in axes.lines:
        assert list(line.get_xdata()) == [0, 2, 4]
        assert list(line.get_ydata()) == pytest.approx([value(line.get_label(), n, 0.5) for n in (0, 2, 4)])


@pytest.mark.parametrize(
    ("curve", "shown"), [({10: 0.1, 50: 0.2, 51: 0.3, 100: 0.4}, "20.00%"), ({90: 0.5, 100: 0.4}, "50.00%")]
)
def test_a_column_may_show_a_validation_in_the_midst_of_training(tmp_path, curve, shown):
    rows = "".join(json.dumps({"step": step, "validation": value}) + "\n" for step, value in curve.items())
    columns = {"early": "after = 0.5", "end": 'style = ".2%"'}  # two digits of a percentage are as many as ours have
    text = of_images(tmp_path, "", columns, lambda *cell: 0.9, rows)
    assert f"| Grid | ape-grid | {shown} ± 0.00% | 90.00% ± 0.00% |" in text


@pytest.mark.parametrize(
    ("head", "column", "message"),
    [
        ("", "after = 0", "end: expected after from 0 to 1, and below 1 for accuracy, got 0"),
        ("", 'after = 0.5\nsplit = "test"', "end: expected after from 0 to 1, and below 1 for accuracy, got 0.5"),
        ('along = "shift"', "view = { height = 8 }", "end: expected a view with shift, the x axis of the picture"),
        ("", "view = { shft = 8 }", "shft: expected none, which samples of this task do not have"),
    ],
)
def test_columns_that_cannot_be_are_refused(tmp_path, head, column, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        of_images(tmp_path, head, {"end": column}, lambda *cell: 0.9)


def test_a_recipe_s_differences_are_in_words():
    was = Recipe().edit(validation_tokens=0, warmup=7, learning_rate=1e-3, seed=3)
    assert paper.differences(was, Recipe()) == (
        "validation tokens 32,768 (paper: all); learning rate 0.003 (paper: 0.001); warmup a tenth (paper: 7)."
    )
    assert paper.differences(was, was) == "The recipe is the paper's."


def test_notes_name_the_chosen_learning_rates_and_their_effect_on_the_order(tmp_path):
    ends = {"none-0.5": 0.2, "none-1": 0.5, "none-2": 0.9, "ape-grid-0.5": 0.3, "ape-grid-1": 0.4, "ape-grid-2": 0.6}
    ends |= {"rope-0.5": 0.7, "rope-1": 0.2, "rope-2": 0.2}  # accuracies
    of_images(tmp_path, "", {"end": ""}, lambda *cell: 0.9)
    about = json.loads((tmp_path / "about.json").read_text())
    (tmp_path / "about.json").write_text(json.dumps(about | {"rates": [1.0, 0.5, 2.0]}))
    for scheme, rate in itertools.product(("none", "ape-grid", "rope"), (0.5, 1.0, 2.0)):
        for seed in (0, 1):
            cell = tmp_path / "cells" / paper.cell_name("", scheme, seed, rate)
            cell.mkdir(exist_ok=True)
            columns = {"end": {"value": rate / 10 + seed, "split": "validation", "reason": ""}}
            status = "diverged" if (scheme, rate) == ("none", 2.0) else "finished"
            (cell / "scores.json").write_text(json.dumps({"status": status, "columns": columns, "seconds": 1.0}))
            curve = [{"step": 1, "validation": 0.9}, {"step": 2, "validation": ends[f"{scheme}-{rate:g}"]}]
            (cell / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    table = load_table(str(tmp_path / "toy.toml"))
    _, said = paper.write(table, tmp_path)
    assert "of 0.5, 1, 2 each row has the one" in " ".join(said)
    effect = "Seed 0's order at 1 and at the chosen ones: rank correlation -1.00 over 3 rows."
    assert f"Rates: 0.5 for Later; 1 for Base; 2 for Grid. {effect}" in said
    values = json.loads((tmp_path / "results.json").read_text())["figures"]["end"]
    assert values == {
        name: {"0": rate / 10, "1": rate / 10 + 1} for name, rate in (("Base", 1), ("Grid", 2), ("Later", 0.5))
    }
    (tmp_path / "cells" / paper.cell_name("", "rope", 0, 2.0) / "scores.json").unlink()  # then it is not chosen yet
    _, said = paper.write(table, tmp_path)
    assert "Rates: 1 for Base; 2 for Grid." in said
    assert "Later" not in json.loads((tmp_path / "results.json").read_text())["figures"]["end"]


def test_a_run_whose_start_diverged_has_a_reason(tmp_path):
    corpora = '[corpora.text]\nsource = ""\n[corpora.next]\nsource = ""\nstart = "text"\n'
    columns = [
        f'[[columns]]\ntitle = "{title}"\ncorpus = "{corpus}"\n' for title, corpus in (("first", "text"), ("then", "next"))
    ]
    rows = [f'[[rows]]\nname = "{name}"\nscheme = "{scheme}"\n' for name, scheme in (("Base", "none"), ("Rope", "rope"))]
    head = 'title = "Toy"\ncitation = "a toy"\nrecipe = "quickstart"\nbaseline = "Base"\n'
    scales = "".join(f"[{kind}.{name}]\n" for kind in ("scales", "start_scales") for name in ("paper", "small", "tiny"))
    (tmp_path / "toy.toml").write_text(head + corpora + "".join((*columns, *rows)) + scales)
    about = {"table": "toy", "scale": "small", "commands": ["isopos table toy"], "seeds": 1, "machine": "one"}
    (tmp_path / "about.json").write_text(json.dumps(about | {"corpora": {"text": "a text", "next": "a text"}}))
    for title, corpus, scheme, status in (
        ("first", "text", "none", "finished"),
        ("first", "text", "rope", "diverged at step 3"),
        ("then", "next", "none", "finished"),
    ):
        cell = tmp_path / "cells" / paper.cell_name(corpus, scheme, 0)
        cell.mkdir(parents=True)
        found = {title: {"value": 2.0, "split": "validation", "reason": ""}} if status == "finished" else {}
        (cell / "scores.json").write_text(json.dumps({"status": status, "columns": found, "seconds": 1.0}))
        (cell / "metrics.jsonl").write_text(json.dumps({"step": 1, "validation": 2.0}) + "\n")
    _, said = paper.write(load_table(str(tmp_path / "toy.toml")), tmp_path)
    assert "Rope, first: diverged at step 3." in said
    assert "Rope, then: the run that it starts from diverged at step 3." in said
    assert not any(text.startswith("Missing") for text in said)
