"""What a table of a paper says of cells that are there: figures, spreads, orders. Nothing is trained."""

import json

import pytest
from matplotlib.figure import Figure

from isopos.lab.recipes import Recipe
from isopos.lab.reports import paper
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

{rows}
[scales.paper]
[scales.small]
[scales.tiny]
"""
FIGURES = {"Base": (3.0, 1.0), "Rope": (1.0, 3.0), "Both | more": (2.0, 2.0), "Alone": (None, 9.0)}  # the paper's, and ours
SCHEMES = {"Base": "none", "Rope": "rope", "Both | more": "rope:decay=retnet", "Alone": "retnet"}


@pytest.fixture
def write(tmp_path):
    """Writes a table with these cells, and returns what is said below it and table.md."""

    def written(better, more="", seeds=1, timing=(), scale="small"):
        rows = "".join(
            f'[[rows]]\nname = "{name}"\nscheme = "{SCHEMES[name]}"\n' + (f"figures = [{theirs}]\n" if theirs else "")
            for name, (theirs, _) in FIGURES.items()
        )
        (tmp_path / "toy.toml").write_text(TABLE.format(better=better, more=more, rows=rows))
        about = {"table": "toy", "scale": scale, "commands": ["isopos table toy"], "seeds": seeds, "machine": "one"}
        (tmp_path / "about.json").write_text(json.dumps(about | {"corpora": {"": "text"} if not timing else {}}))
        if timing:
            (tmp_path / "timing.json").write_text(json.dumps(timing))
        for name, (_, ours) in {} if timing else FIGURES.items():
            for seed in range(seeds):
                cell = tmp_path / "cells" / paper.cell_name("", SCHEMES[name], seed)
                cell.mkdir(parents=True)
                columns = {"figure": {"value": ours + seed, "split": "validation", "reason": ""}}
                (cell / "scores.json").write_text(json.dumps({"status": "finished", "columns": columns, "seconds": 30.0}))
                (cell / "metrics.jsonl").write_text('{"step": 1, "validation": 2.0}\n')
        _, said = paper.write(load_table(str(tmp_path / "toy.toml")), tmp_path)
        return said, (tmp_path / "table.md").read_text()

    return written


RISING, FALLING = "Rope, Both | more, Base", "Base, Both | more, Rope"  # the paper's figures; ours are the other way round


@pytest.mark.parametrize(("better", "orders"), [("lower", (RISING, FALLING)), ("higher", (FALLING, RISING))])
def test_both_orders_have_the_best_first(write, better, orders):
    said, _ = write(better)
    (line,) = (text for text in said if "rank correlation" in text)
    first, second = orders
    assert line == f"figure: rank correlation with the paper -1.00 over 3 rows. Best first, paper: {first}; ours: {second}."


def test_figures_are_means_with_standard_deviations_of_seeds(write):
    said, page = write("lower", seeds=3)
    assert "| Rope | rope | 1.00 | 4.00 ± 1.00 | " in page
    assert any(text.endswith("lower is better; means and standard deviations of up to 3 seeds.") for text in said)
    assert any(text.startswith("Machine time: 6.0 minutes, 12 cells") for text in said)


def test_speeds_are_medians_with_half_the_range_of_quartiles(write):
    ratios = (1.0, 2.0, 3.0, 5.0, 9.0)  # quartiles 2 and 5
    rounds = [{"Base": 1.0, "Rope": 1 / ratio} for ratio in ratios]
    said, page = write("higher", more='kind = "speed"', timing=rounds)
    assert "| Rope | rope | 1.00 | 3.00 ± 1.50 |" in page
    assert "| Base | none | 3.00 | 1.00 ± 0.00 |" in page
    assert "| missing |" in page
    assert "Figures are medians of the rounds' ratios to the baseline, and half the range between their quartiles." in said


def test_the_smallest_scale_ranks_nothing(write):
    said, _ = write("lower", scale="tiny")
    assert not any("Best first" in text for text in said)
    assert any("says nothing about the order" in text for text in said)


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every picture that is written."""
    found = []

    def save(figure, path, **options):
        path.touch()
        found.extend(figure.axes)

    monkeypatch.setattr(Figure, "savefig", save)
    return found


def test_every_row_has_its_curve(write, drawn):
    write("lower", seeds=2)
    (axes,) = drawn
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert lines == dict.fromkeys(FIGURES, ([1], [2.0]))


def test_speeds_are_drawn_beside_the_names_of_their_rows_and_the_paper_s(write, drawn):
    write("higher", more='kind = "speed"', timing=[{"Base": 1.0, "Rope": 1 / ratio} for ratio in (1.0, 2.0, 3.0, 5.0, 9.0)])
    (axes,) = drawn
    names = {place: label.get_text() for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    ours = {names[line.get_ydata()[0]]: line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "o"}
    paper_s = {names[line.get_ydata()[0]]: line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "x"}
    assert ours == {"Base": 1.0, "Rope": 3.0}
    assert paper_s == {name: FIGURES[name][0] for name in ours}
    spans = [{x for x, _ in segment} for bars in axes.collections for segment in bars.get_segments()]
    assert [max(span) - min(span) for span in spans] == pytest.approx([0.0, 3.0]), "between the quartiles, 2 and 5"


def test_a_recipe_s_differences_are_in_words():
    was = Recipe().edit(validation_tokens=0, warmup=7, learning_rate=1e-3, seed=3)
    assert paper.differences(was, Recipe()) == (
        "validation tokens 32,768 (paper: all); learning rate 0.003 (paper: 0.001); warmup a tenth (paper: 7)."
    )
    assert paper.differences(was, was) == "The recipe is the paper's."
