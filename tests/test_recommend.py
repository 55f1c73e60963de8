"""Test that answers of `isopos recommend` follow from the figures. test_schemes_page.py checks the committed files."""

import math
from dataclasses import replace

from isopos.lab.reports import recommendations
from isopos.lab.reports.recommendations import Comparison, Question, SchemeRow, caption, cells, load_questions, summary
from isopos.schemes import build
from isopos.spec import split_spec


def comparison(*rows, seeds=3, data="a", rates=""):
    return Comparison("toy", "column", data, "loss, lower is better", seeds, rates, [*rows])


BEST = SchemeRow("Best", "rope", 1.0, 0.1, 0.0, None)
LEVEL = SchemeRow("Level", "permuteformer", 1.1, 0.1, 0.1, 0.2)
BEHIND = SchemeRow("Behind", "none", 2.0, 0.1, 1.0, 0.2)


def answers(*comparisons):
    return Question("toy", "?", comparisons).answers


def test_an_answer_names_the_rows_that_are_best_or_close_in_all_comparisons():
    found = answers(comparison(BEST, LEVEL, BEHIND), comparison(BEST, LEVEL, BEHIND, data="b"))
    assert found == [
        "`toy` (column; 3 schemes): best, or close to the best: Best (`rope`), Level (`permuteformer`) "
        "(2 data sets: not known for others; 3 seeds; one learning rate for all rows)."
    ]
    first, then = replace(LEVEL, behind=0.0, half=None), replace(BEST, behind=1.0, half=0.5)
    (found,) = answers(comparison(BEST, LEVEL, BEHIND), comparison(first, then, BEHIND, data="b", rates="1, 2"))
    assert "best: Level (`permuteformer`) (2 data sets" in found
    assert "3 seeds; the best of several learning rates for each row in 1 of 2 comparisons)." in found
    other, last = replace(BEHIND, behind=0.0, half=None), replace(LEVEL, behind=1.0, half=0.5)
    (found,) = answers(comparison(BEST, LEVEL, BEHIND), comparison(other, last, then))
    assert "none is best or close to the best in all. Best: Best (`rope`; a, column); Behind (`none`; a, column) (1" in found


def test_a_row_whose_interval_reaches_the_worse_half_is_not_close():
    noisy = replace(LEVEL, half=0.4)  # up to 0.5 behind; the worst row is 1.0 behind
    compared = comparison(BEST, noisy, BEHIND)
    assert [compared.verdict(row) for row in compared.rows] == ["best", "no difference shown", "behind"]
    assert "best: Best (`rope`) (1" in answers(compared)[0]
    assert comparison(BEST, tight := replace(noisy, half=0.39), BEHIND).verdict(tight) == "close"


def test_comparisons_of_other_schemes_have_answers_of_their_own():
    other = [replace(row, scheme=f"{row.scheme}:decay=retnet") for row in (BEST, LEVEL, BEHIND)]
    found = answers(comparison(BEST, LEVEL, BEHIND), comparison(*other), comparison(BEST, LEVEL, BEHIND, data="b"))
    assert ["2 data sets" in text for text in found] == [True, False]
    assert "`rope:decay=retnet`" in found[1]


def test_comparisons_without_a_difference_are_named():
    level = comparison(BEST, replace(LEVEL, half=0.4), replace(BEHIND, behind=0.2), data="b")
    assert answers(level) == [
        "`toy` (column; 3 schemes): no row is shown to be behind another (1 data set): these figures do not tell."
    ]
    (found,) = answers(comparison(BEST, LEVEL, BEHIND), level)
    assert (
        "(1 data set: not known for others; 3 seeds; one learning rate for all rows). No difference is shown on b." in found
    )


def test_three_data_sets_are_not_few_and_four_rows_are_listed():
    level = [replace(LEVEL, name=f"Level {n}", scheme=f"rope:base={n}") for n in range(5)]
    (found,) = answers(*(comparison(BEST, *level, BEHIND, data=data) for data in "abc"))
    assert "(`rope:base=2`) and 2 more (3 data sets; 3 seeds;" in found


def test_a_summary_has_the_nearest_row_that_is_behind():
    level = comparison(BEST, LEVEL, data="b")
    question = Question("toy", "?", [comparison(BEST, LEVEL, BEHIND), level, comparison(BEST, LEVEL, seeds=1)])
    question.comparisons[2].rows[1:] = [replace(LEVEL, half=None)]
    assert summary(question) == [
        ("toy, column", "a", "Best", "Level", "Behind by 1 [0.8, 1.2]", "1 of 2"),
        ("toy, column", "b", "Best", "-", "none", "0 of 1"),
        ("toy, column", "a", "Best", "-", "none", "no interval"),
    ]


def test_without_intervals_nothing_is_known():
    rows = (replace(BEST, spread=None), replace(LEVEL, spread=None, half=None))
    question = Question("toy", "?", [comparison(*rows, seeds=1)])
    (found,) = question.answers
    assert found.endswith(": not known, with fewer than 3 seeds. Best by means alone: Best (`rope`; a, column).")
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
        ("Level", "permuteformer", "1.1 ± 0.1", "0.1 [-0.1, 0.3]", "close"),
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
    assert all(answer in " ".join(out.split("\n")) for question in load_questions() for answer in question.answers)
    code, out, _ = isopos("recommend", "series")
    assert code == 0
    assert "rope-mixed" in out
    assert "tree-transduction" not in out
    code, out, _ = isopos("recommend", "cameras")
    assert code == 0
    assert out.count("scenes: Images of several cameras") == 3
    assert "graphs: " not in out
    code, out, _ = isopos("recommend", "trees")  # a task without results, and a word of another task's question
    assert (code, out.splitlines()[0]) == (0, "task trees: no results; these answers have the word in their question")
    assert "tree-transduction: Trees to copy" in out
    code, _, err = isopos("recommend", "seriez")
    assert code == 2
    assert err.startswith("isopos: task with results: expected one of")
    assert "did you mean" in err or "series" in err
    assert recommendations.FILE.exists()
