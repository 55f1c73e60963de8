"""Test Student's intervals for differences of few figures, and their error rates."""

import math
import random
import statistics

import pytest

from isopos.lab.reports.intervals import Difference, _common_variance, _digamma, _trigamma, student, to_best

QUANTILES = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 20: 2.0860, 120: 1.9799}  # of every textbook's table


def test_quantiles_are_student_s():
    assert {degrees: round(student(degrees), 4) for degrees in QUANTILES} == QUANTILES
    assert student(1e6) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-5)
    between = [student(degrees / 4) for degrees in range(4, 40)]
    assert between == sorted(between, reverse=True)
    with pytest.raises(ValueError, match="degrees: expected a number from 1 on, got 0"):
        student(0)


def test_intervals_of_known_figures():
    """Of 1, 2 and 3: 2 -+ 4.3027 / 3^1/2."""
    found = Difference.paired([1, 2, 3])
    assert (found.mean, found.seeds, found.summary) == (2, 3, "95% interval, 3 seeds: no difference shown")
    assert found.half == pytest.approx(2.4841, abs=1e-4)
    assert Difference.paired([2, 2, 2]).excludes_zero


def test_a_picked_pair_shares_the_5_percent_with_all_others():
    """Student's t with two degrees of freedom is p (2 / (1 - p^2))^1/2; with one, a tangent."""
    for pairs in (1, 5, 20, 190):
        inside = 1 - 0.05 / pairs
        assert student(2, pairs) == pytest.approx(inside * (2 / (1 - inside**2)) ** 0.5, rel=1e-6)
    assert student(1, 20) == pytest.approx(math.tan(math.pi / 2 * (1 - 0.05 / 20)), rel=1e-6)
    assert Difference.paired([1, 2, 3]).excludes_zero is False
    assert Difference.paired([1, 1.1, 1.2], 5).excludes_zero
    assert Difference.paired([1, 1.1, 1.2], 5).summary == "95% interval for 5 pairs at once, 3 seeds"


def test_a_row_as_good_as_any_is_seldom_shown_to_differ_from_the_picked_best():
    draw, times, fires = random.Random(2), 1000, {1: 0, 5: 0}
    for _ in range(times):
        rows = [[draw.gauss(0, 1) for _ in range(3)] for _ in range(6)]
        apart = [a - b for a, b in zip(rows[0], min(rows, key=sum), strict=True)]
        for pairs in fires:
            fires[pairs] += Difference.paired(apart, pairs).excludes_zero
    assert fires[5] < 0.025 * times < 0.05 * times < fires[1]


def test_derivatives_of_the_gamma_function():
    euler = 0.5772156649015329
    assert _digamma(1) == pytest.approx(-euler, abs=1e-8)
    assert _digamma(0.5) == pytest.approx(-euler - 2 * math.log(2), abs=1e-8)
    assert _trigamma(1) == pytest.approx(math.pi**2 / 6, abs=1e-7)
    assert _trigamma(0.5) == pytest.approx(math.pi**2 / 2, abs=1e-7)
    assert _digamma(20.5) - _digamma(19.5) == pytest.approx(1 / 19.5, abs=1e-9)


def test_the_common_variance_of_many_rows():
    """Variances of 4 degrees of freedom: of rows with one variance, and of rows whose variances follow Smyth's prior."""
    draw = random.Random(3)

    def mean_square(degrees):
        return draw.gammavariate(degrees / 2, 2 / degrees)

    alike, weight = _common_variance([7.0 * mean_square(4) for _ in range(4000)], 4)
    assert (alike, weight) == (pytest.approx(7, rel=0.05), 8)  # the largest weight
    unlike, weight = _common_variance([7.0 / mean_square(3) * mean_square(4) for _ in range(4000)], 4)
    assert (unlike, weight) == (pytest.approx(7, rel=0.1), pytest.approx(3, rel=0.15))
    assert _common_variance([1.0, 2.0], 2)[1] <= 2  # of two rows: at most half of their degrees of freedom
    assert _common_variance([5.0, 0.0], 2) == _common_variance([5.0], 2) == (0.0, 0.0)


def test_intervals_to_the_best_keep_scales_orders_and_gaps():
    values = {"a": [1.0, 2.0, 3.0], "b": [5.0, 5.5, 7.0], "c": [0.1, 0.3, 0.1], "d": [4.0, 4.5, math.pi], "few": [9.0, 8.0]}
    found = to_best(values)
    assert {difference.pairs for difference in found.values()} == {15}  # of six rows
    assert [found[row].mean for row in values] == [statistics.mean(values[row]) for row in values]
    assert math.isnan(found["few"].half)
    scaled = to_best({row: [100 * value + 1 for value in values[row][::-1]] for row in reversed(values)})
    assert all(scaled[row].half == pytest.approx(100 * found[row].half) for row in values if row != "few")
    alone = to_best({"a": values["a"]})["a"]  # two rows: Student's
    assert alone == Difference.paired(values["a"])
    halves = {row: Difference.paired(values[row], 15).half for row in "abcd"}
    assert halves["c"] < found["c"].half < min(found[row].half for row in "abd")  # moved together
    assert max(found[row].half for row in "abd") < max(halves.values())
    equal = to_best({"a": [1.0, 1.0, 1.0], "b": [0.0, 0.0, 0.0], "c": [0.0, 1.0, 5.0], "d": [2.0, 1.0, 5.0]})
    assert equal["a"].half > 0
    assert not equal["b"].excludes_zero
    assert to_best({}) == {}


def test_rounding_errors_and_infinite_figures_have_no_variance():
    rows = {"a": [1.0, 1.1, 1.25], "b": [0.3, 0.2, 0.45], "c": [2.0, 2.3, 2.1]}
    found = to_best(rows | {"same": [0.1, 0.1, 0.1]})
    rounded = to_best(rows | {"same": [0.3 - 0.2, 0.7 - 0.6, 0.4 - 0.3]})  # not equal to the last digit
    assert all(rounded[row].half == pytest.approx(found[row].half) for row in found)
    lost = to_best(rows | {"same": [math.inf, 1.0, 1.0]})
    assert all(lost[row].half == pytest.approx(found[row].half) for row in rows)
    assert not lost["same"].excludes_zero


@pytest.mark.parametrize("unlike", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [3, 9])
def test_of_rows_that_are_alike_few_are_shown_to_be_behind_the_selected_best(count, unlike):
    """Three seeds that move all rows, and deviations that are alike or differ by factors.

    In about 5% of all tables a row is shown to be behind. Of nine rows six that are four deviations behind are shown to be
    so much more often than by Student's interval of each row by itself.
    """
    draw, times, fires, power = random.Random(4), 1000, 0, {"by itself": 0, "moderated": 0}

    def behind(means):
        moved, deviations = [draw.gauss(0, 1) for _ in range(3)], [math.exp(draw.gauss(0, unlike)) for _ in means]
        rows = [
            [mean + move + draw.gauss(0, deviation) for move in moved]
            for mean, deviation in zip(means, deviations, strict=True)
        ]
        best = min(range(len(means)), key=lambda row: sum(rows[row]))
        return {row: [a - b for a, b in zip(rows[row], rows[best], strict=True)] for row in range(len(means)) if row != best}

    for _ in range(times):
        fires += any(difference.excludes_zero for difference in to_best(behind([0.0] * count)).values())
    for _ in range(200 if count == 9 else 0):
        values = behind([0.0] * 3 + [4.0] * 6)
        power["by itself"] += sum(Difference.paired(values[row], 8).excludes_zero for row in range(3, 9) if row in values)
        together = to_best(values)
        power["moderated"] += sum(together[row].excludes_zero for row in range(3, 9) if row in values)
    assert 0.015 * times < fires < (0.075 if count == 9 else 0.09) * times
    assert power["moderated"] > 1.5 * power["by itself"] or count == 3


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [-3.0, -3.1]])
def test_fewer_than_three_seeds_show_nothing(values):
    found = Difference.paired(values)
    assert math.isnan(found.half)
    assert not found.excludes_zero
    assert "[" not in found.text(".3f")


def test_without_a_difference_one_in_twenty_is_shown():
    """Rows differ only by noise, and the three seeds shift all rows by more than the noise."""
    draw, times, fires = random.Random(1), 2000, 0
    for _ in range(times):
        moved = [draw.gauss(0, 2) for _ in range(3)]
        one, other = ([seed + draw.gauss(0, 1) for seed in moved] for _ in range(2))
        fires += Difference.paired([a - b for a, b in zip(one, other, strict=True)]).excludes_zero
    assert 0.04 < fires / times < 0.06
