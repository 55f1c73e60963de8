"""Test the content that docs/results/README.md derives from its tables. test_schemes_page.py checks the committed file."""

import json
from dataclasses import replace

import pytest

from isopos.lab.reports.intervals import to_best
from tools import results_page

pytestmark = pytest.mark.skipif(not results_page.RESULTS.exists(), reason="docs/ is part of the repository only")

TABLE = """# Which?

A toy, at the scale `small`.

| row | scheme | left: paper | left: ours | right: paper | right: ours | updates to Base's loss |
|---|---|---:|---:|---:|---:|---:|
| Base | sinusoidal | 9 | 6.0 ± 0.1 | 4 | 1,006.0 ± 0.1 | 300 |
| Rope | rope | 3 | 5.0 ± 0.3 | 3 | 5.0 ± 0.3 | 150 |
| PER | permuteformer | 2 | 5.1 ± 0.3 | 2 | 5.1 ± 0.3 | 150 |
| Type1 | lrpe-unitary | 1 | 7.0 | 1 | missing | - |
| a\\|b | none | - | 5.2 ± 0.3 | - | 5.2 ± 0.3 | 150 |
| Type1 with fixed angles | none | - | 7.5 | - | missing | 150 |

- Data: one here is a; two here is b.
- Figures are nats, {better} is better; means and standard deviations of up to 3 seeds.
- Missing: Type1 on two, seeds 1, 2.

    isopos table lrpe-2 --seeds 3
{more}"""
PAIRED = """
## Distance to Rope

| row | left | right |
| --- | ---: | ---: |
| PER | +0.10 ± 0.01 | - |
"""


@pytest.fixture
def shown(tmp_path):
    def written(better="lower", more=""):
        folder = tmp_path / "toy"
        folder.mkdir(exist_ok=True)
        (folder / "table.md").write_text(TABLE.format(better=better, more=more))
        return results_page.read_all(tmp_path)

    return written


@pytest.mark.parametrize(
    ("cell", "figure"), [("1,054.1% ± 0.5%", (1054.1, 0.5)), ("-2.5", (-2.5, None)), ("missing", None), ("-", None)]
)
def test_figures_are_numbers_or_percents(cell, figure):
    value, spread = results_page._figure(cell) or (None, None)
    assert (value, None if spread != spread else spread) == (figure or (None, None))


def test_leaders_pairs_and_ranks(shown):
    lines = results_page.findings(shown()).splitlines()
    assert lines[1] == "### `toy`: Which?"
    assert lines[3:] == [
        "- left: Rope is best, ahead of PER by 0.1 [-1.43, 1.63] (95% interval for 15 pairs at once, unpaired, "
        "3 seeds: no difference shown).",
        "- right: Rope is best, ahead of PER by 0.1 [-1.09, 1.29] (95% interval for 6 pairs at once, unpaired, "
        "3 seeds: no difference shown).",
        "- Best and worst row are apart, in standard deviations of a seed: left 9; right 3783.",
        "- left: rank correlation with the paper -0.40 over 4 rows, -1.00 without Base.",
        "- left: of 6 pairs of rows 2 in the paper's order, 0 not, 4 without a difference shown.",
        "- right: rank correlation with the paper +0.50 over 3 rows.",
        "- right: of 3 pairs of rows 2 in the paper's order, 0 not, 1 without a difference shown.",
        "- Gained by learning angles, over the fixed ones that they start with (one seed): Type1, left +0.500.",
    ]


def test_columns_whose_rows_are_too_close_cannot_tell_their_order(shown):
    (table,) = shown()
    close = {"left": {"Base": (5.0, 0.3), "Rope": (6.4, 0.4)}, "right": {"Base": (5.0, 0.3), "Rope": (5.0, 0.4)}}
    (said,) = results_page._separation(replace(table, ours=close))
    assert said == "Too close to tell the order, with fewer than 5: left (4.0); right (0.0)."


def test_higher_is_better_turns_every_order(shown):
    lines = results_page.findings(shown("higher")).splitlines()
    assert lines[3] == "- left: Type1 with fixed angles is best, ahead of Type1 by 0.5 (one seed)."
    assert lines[4] == (
        "- right: Base is best, ahead of a|b by 1e+03 [999, 1e+03] (95% interval for 6 pairs at once, unpaired, 3 seeds)."
    )
    assert lines[-1].endswith(" (one seed): Type1, left -0.500.")


def test_two_seeds_have_no_interval(shown):
    (toy,) = shown()
    toy = replace(toy, notes=[text.replace("3 seeds", "2 seeds") for text in toy.notes])
    lines = results_page.findings([toy]).splitlines()
    assert lines[3] == "- left; right: Rope is best, ahead of PER by 0.1, 0.1 (2 seeds: no interval)."
    assert "- right: of 3 pairs of rows by means alone (2 seeds) 2 in the paper's order, 1 not, 0 level" in "\n".join(lines)
    assert not any("shown" in line or "95%" in line for line in lines)


@pytest.mark.parametrize(
    ("said", "seeds", "words"),
    [
        ("Missing: PER on wikitext-103, seeds 2; Type1 on books, seeds 1, 2.", 3, "2 seeds: no interval"),
        ("Missing: PER on books, seeds 2.", 3, "95% interval, unpaired, 3 seeds: no difference shown"),
        ("Missing: PER on wikitext-103, seeds 2.", 4, "95% interval, unpaired, 3 seeds: no difference shown"),
        ("PER, WikiText-103 val: diverged at step 3.", 3, "2 seeds: no interval"),
    ],
)
def test_seeds_that_are_missing_are_not_counted(tmp_path, said, seeds, words):
    text = TABLE.format(better="lower", more=PAIRED).replace("left", "WikiText-103 val").replace("3 seeds", f"{seeds} seeds")
    path = tmp_path / "table.md"
    path.write_text(text.replace("Missing: Type1 on two, seeds 1, 2.", said))
    assert results_page.read(path).lead("WikiText-103 val", "a|b", "PER").summary == words
    paired = results_page.read(path).lead("WikiText-103 val", "Rope", "PER")  # by the distance
    assert paired.excludes_zero == ("no interval" not in words)


def test_percentages_and_marks_are_figures():
    assert results_page._figure("56.90% ± 1.20% *") == (56.9, 1.2)
    assert results_page._figure("**-2.50% ± 1.20%**") == (-2.5, 1.2)
    assert results_page._figure("missing") is None


def test_distances_paired_by_seed_decide_where_there_are_some(shown):
    lines = results_page.findings(shown(more=PAIRED)).splitlines()
    assert (
        lines[3] == "- left: Rope is best, ahead of PER by 0.1 [0.00025, 0.2] (95% interval for 15 pairs at once, 3 seeds)."
    )
    assert lines[4].endswith("(95% interval for 6 pairs at once, unpaired, 3 seeds: no difference shown).")


def test_figures_by_seed_pair_every_two_rows(shown, tmp_path):
    """PER is ahead of a|b by 0.1, 0.2 and 0.3. Rope shares one seed with them, and so has no interval."""
    shown()
    figures = {"PER": {"0": 5.0, "1": 6.0, "2": 4.0}, "a|b": {"0": 5.1, "1": 6.2, "2": 4.3}, "Rope": {"2": 4.5, "5": 5.0}}
    (tmp_path / "toy" / "figures.json").write_text(json.dumps({"WikiText-103 val": figures}))
    (toy,) = results_page.read_all(tmp_path)
    ahead = toy.lead("WikiText-103 val", "PER", "a|b")
    assert (round(ahead.mean, 6), round(ahead.half, 3), ahead.summary) == (
        0.2,
        0.248,
        "95% interval, 3 seeds: no difference shown",
    )
    assert toy.lead("WikiText-103 val", "a|b", "Rope").summary == "one seed"


def test_rounds_have_quartiles_and_no_interval(shown):
    (toy,) = shown()
    toy = replace(toy, notes=["Figures are medians of the rounds' ratios to the baseline, and half the range"])
    lines = results_page.findings([toy]).splitlines()
    assert lines[3] == "- left; right: Rope is best, ahead of PER by 0.1, 0.1 (quartiles overlap)."
    assert "of 3 pairs of rows 2 in the paper's order, 0 not, 1 with quartiles that overlap" in "\n".join(lines)


def test_what_the_order_owes_to_learning_rates_is_read_from_the_notes(shown, tmp_path):
    assert results_page.tuning(shown()).count("\n") == 3, "a header alone"
    (table,) = shown()
    notes = (
        "- Learning rates are multiples of the scale's: of 0.5, 1, 2 each row has the one whose run of seed 0 is best.\n"
        "- one: 0.5 for PER; 2 for Rope, Type1, Type1 with fixed angles. Seed 0's order at 1 and at the chosen ones: rank "
        "correlation +0.80 over 4 rows.\n- two: 1 for PER.\n- Machine time: 1 minute for all.\n"
    )
    path = tmp_path / "toy" / "table.md"
    path.write_text(path.read_text().replace("- Missing:", f"{notes}- Missing:"))
    (tuned,) = results_page.read_all(tmp_path)
    assert (table.rates, tuned.rates) == ("", "0.5, 1, 2")
    assert results_page.tuning([table, tuned]).splitlines()[3:] == [
        "| [`toy`](toy/table.md) | one | 0.5, 1, 2 | 3 of 4 | +0.80 |",
        "| [`toy`](toy/table.md) | two | 0.5, 1, 2 | 0 of 1 | - |",
    ]


def test_folders_say_data_seeds_and_commands(shown):
    page = results_page.folders(shown())
    assert "| [`toy`](toy/table.md) | A toy: Which? | one: a; two: b | 3 seeds | 1 |" in page
    assert "- `toy`: Type1 on two, seeds 1, 2.\n" in page
    assert "    isopos table lrpe-2 --seeds 3\n" in page


def test_a_correlation_names_the_row_on_which_it_leans(shown):
    (toy,) = shown()
    paper, ours = zip("abcdef", range(6), strict=True), zip("abcdef", [0, 4, 3, 2, 1, 9], strict=True)
    toy = replace(toy, baseline="a", paper={"left": dict(paper)}, ours={"left": {row: (n, 0.1) for row, n in ours}})
    (line,) = (text for text in results_page.findings([toy]).splitlines() if "rank correlation" in text)
    assert line.endswith(" +0.43 over 6 rows, +0.00 without a, -1.00 without a and f.")


def test_rises_are_those_of_lengths(shown):
    (toy,) = shown()
    base = {"Base": (2.0, 0.1)}
    lengths = replace(toy, paper={}, ours={"512": base, "1,024": {"Base": (3.0, 0.1)}})
    assert "- From 512 to 1,024: Base +50.0%." in results_page.findings([lengths]).splitlines()
    assert "From" not in results_page.findings([replace(lengths, ours={"Copy": base, "Reverse": base})])


@pytest.fixture(scope="module")
def tables():
    return {one.name: one for one in results_page.read_all()}


def test_orders_are_those_that_the_tables_state(tables):
    for one in tables.values():
        stated = {text.split(":")[0]: text for text in one.notes if "rank correlation with the paper" in text}
        derived = [text for text in results_page.findings([one]).splitlines() if "rank correlation" in text]
        assert len(derived) == len(stated)
        for text in derived:
            column, _, rest = text.removeprefix("- ").partition(": ")
            assert stated[column].split(": ")[1].startswith(rest.partition(" rows")[0])


def test_what_the_page_makes_of_decays_is_true(tables):
    two, linear = tables["lrpe-2"], ("Base", "Rope", "Type3", "no positions", "Type1 with fixed angles")
    for column, figures in two.ours.items():
        for row in linear:
            assert max(figures["PER"][0], figures["RetNet's decay and rope"][0]) < figures[row][0], (column, row)
    four = tables["permuteformer-4"].ours["WikiText-103 test"]
    assert four["PermuteFormer"][0] < four["PermuteFormer w/o P"][0] < four["PermuteFormer w/o r"][0]


def test_what_the_page_makes_of_softmax_and_lengths_is_true(tables):
    four, two = tables["permuteformer-4"], tables["lrpe-2"]
    assert not four.lead("WikiText-103 test", "Transformer", "Performer").excludes_zero
    for column, figures in two.ours.items():
        assert two.sort(column, {row: figure for row, (figure, _) in figures.items()})[1] == "rope with softmax attention"
    first, *_, last = tables["lengths"].ours.values()
    rises = {row: last[row][0] / first[row][0] for row in last}
    assert {row for row, rise in rises.items() if rise < 1} == {"permuteformer", "retnet", "alibi with softmax attention"}
    assert max(rises, key=rises.__getitem__) == "rope with softmax attention"


def test_intervals_to_the_best_row_are_of_all_rows_together(tables):
    scenes, column = tables["newer-scenes"], "softmax"
    order = scenes.sort(column, {row: mean for row, (mean, _) in scenes.ours[column].items()})
    best, *others = (scenes.by_seed[column][row] for row in order)
    values = {row: [best[seed] - other[seed] for seed in best] for row, other in zip(order[1:], others, strict=True)}
    assert scenes.sign(column) == -1
    assert scenes.leads(column, order) == to_best(values)
    assert all(lead.mean >= 0 for lead in scenes.leads(column, order).values())


def test_columns_may_have_different_directions(tables):
    one = tables["ape-1"]
    assert (one.better, one.sign("Copy"), one.sign("Copy, whole")) == ("lower", 1, -1)
    assert one.sort("Copy, whole", {"a": 0.1, "b": 0.9}) == ["b", "a"]
