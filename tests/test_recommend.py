"""Test that answers of `isopos recommend` follow from the figures. test_schemes_page.py checks the committed files."""

import math
from dataclasses import replace

from isopos.lab.reports import recommendations
from isopos.lab.reports.recommendations import Comparison, Question, SchemeRow, caption, cells, load_questions
from isopos.schemes import build
from isopos.spec import split_spec


def comparison(*rows, seeds=3, data="a", rates=""):
    return Comparison("toy", "column", data, "loss, lower is better", seeds, rates, rows)


BEST = SchemeRow("Best", "rope", 1.0, 0.1, 0.0, None)
LEVEL = SchemeRow("Level", "permuteformer", 1.1, 0.1, 0.1, 0.2)
BEHIND = SchemeRow("Behind", "none", 2.0, 0.1, 1.0, 0.2)


def test_an_answer_names_the_rows_that_are_nowhere_behind():
    answer = Question("toy", "?", [comparison(BEST, LEVEL, BEHIND), comparison(BEST, BEHIND, data="b")]).answer
    assert answer.startswith("Best, or not shown to be behind the best, in 2 of 2 comparisons: Best (`rope`). Of the 3")
    assert "2 are shown to be behind" in answer
    assert "Seen on 2 data sets: not known for others." in answer
    worse = replace(BEST, behind=1.0, half=0.5)
    answer = Question("toy", "?", [comparison(BEST, LEVEL), comparison(LEVEL, worse, data="b")]).answer
    assert "in 2 of 2 comparisons: Level (`permuteformer`)." in answer
    other = replace(BEHIND, behind=0.0, half=None)
    answer = Question("toy", "?", [comparison(BEST, BEHIND), comparison(other, worse)]).answer
    assert "in a comparison. Best: Best (`rope`; toy, column); Behind (`none`; toy, column). Of the 2 other" in answer


def test_comparisons_of_other_rows_have_answers_of_their_own():
    other = [replace(row, name=f"Other {row.name}", scheme=f"{row.scheme}:decay=retnet") for row in (BEST, LEVEL, BEHIND)]
    tables = [comparison(BEST, LEVEL, BEHIND), comparison(BEST, BEHIND), comparison(*other), comparison(LEVEL, other[2])]
    answer = Question("toy", "?", tables).answer
    assert (
        "in 2 of 4 comparisons: Best (`rope`); in 1 more: Level (`permuteformer`); in 1 more: Other Best (`rope:" in answer
    )


def test_three_data_sets_are_not_few_and_four_rows_are_listed():
    level = [replace(LEVEL, name=f"Level {n}", scheme=f"rope:base={n}") for n in range(5)]
    answer = Question("toy", "?", [comparison(BEST, *level, data=data) for data in "abc"]).answer
    assert "(`rope:base=2`) and 2 more. Of the 15 other figures 0 are" in answer
    assert "Seen" not in answer


def test_without_intervals_nothing_is_known():
    rows = (replace(BEST, spread=None), replace(LEVEL, spread=None, half=None))
    question = Question("toy", "?", [comparison(*rows, seeds=1)])
    assert question.answer == "Not known, with fewer than 3 seeds. Best by means alone: Best (`rope`; toy, column)."
    assert cells(question.comparisons[0]) == [
        ("Best", "rope", "1", "-", "best"),
        ("Level", "permuteformer", "1.1", "0.1", "no interval"),
    ]
    assert caption(question.comparisons[0]).endswith("data a; 1 seed")
    tuned = caption(comparison(*rows, rates="0.5, 1"))
    assert tuned.endswith("data a; 3 seeds, each row with the best of the learning rates 0.5, 1")


def test_cells_have_intervals():
    assert cells(comparison(BEST, LEVEL, BEHIND)) == [
        ("Best", "rope", "1 ± 0.1", "-", "best"),
        ("Level", "permuteformer", "1.1 ± 0.1", "0.1 [-0.1, 0.3]", "no difference shown"),
        ("Behind", "none", "2 ± 0.1", "1 [0.8, 1.2]", "behind"),
    ]


def test_committed_figures_are_sorted_and_name_schemes():
    for question in load_questions():
        for each in question.comparisons:
            sign = 1 if each.figure.endswith("lower is better") else -1
            figures = [sign * row.mean for row in each.rows]
            assert figures == sorted(figures)
            assert all(row.behind >= 0 and math.isfinite(row.behind) for row in each.rows)
            for row in each.rows:
                name, options = split_spec(row.scheme)
                build(name, 16, 4, options)


def test_the_command(isopos):
    code, out, _ = isopos("recommend")
    assert code == 0
    assert all(question.answer in " ".join(out.split("\n")) for question in load_questions())
    code, out, _ = isopos("recommend", "series")
    assert code == 0
    assert "rope-mixed" in out
    assert "tree-transduction" not in out
    code, _, err = isopos("recommend", "serie")
    assert code == 2
    assert err.startswith("isopos: task with results: expected one of")
    assert "did you mean" in err or "series" in err
    assert recommendations.FILE.exists()
