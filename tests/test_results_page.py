"""Test what docs/results derives from its tables. test_schemes_page.py checks the committed files."""

import json

import pytest

from isopos.lab.reports import findings
from isopos.lab.reports.intervals import to_best
from tools import conclusions, results_page

pytestmark = pytest.mark.skipif(not results_page.FOLDER.exists(), reason="docs/ is part of the repository only")

LAYOUT = """
title = "Which?"
citation = "A toy"
recipe = "language"
figure = "nats"
baseline = "Base"
kind = "{kind}"
corpora = {{ one = {{ source = "" }}, two = {{ source = "" }} }}
columns = [{{ title = "left", corpus = "one"{better} }}, {{ title = "right", corpus = "two"{better} }}]
rows = [
    {{ name = "Base", scheme = "sinusoidal", figures = [9, 4] }},
    {{ name = "Rope", scheme = "rope", figures = [3, 3] }},
    {{ name = "PER", scheme = "permuteformer", figures = [2, 2] }},
    {{ name = "Type1", scheme = "lrpe-unitary", figures = [1, 1], fixed = "Type1 with fixed angles" }},
    {{ name = "a|b", scheme = "none" }},
    {{ name = "Type1 with fixed angles", scheme = "none" }},
]
[scales.paper]
[scales.small]
[scales.tiny]
"""
NOISE = (0.0, -0.01, 0.01), (0.02, 0.0, -0.02)


def by_seed(mean, noise=0, count=3):
    return {str(n): mean + NOISE[noise][n] for n in range(count)}


FIGURES = {
    "left": {
        "Base": by_seed(6.0), "Rope": by_seed(5.0), "PER": by_seed(5.1, 1), "Type1": by_seed(7.0, count=1),
        "a|b": by_seed(5.2, 1), "Type1 with fixed angles": by_seed(7.5, count=1),
    },
    "right": {"Base": by_seed(1006.0), "Rope": by_seed(5.0), "PER": by_seed(5.1, 1), "a|b": by_seed(5.2, 1)},
}  # fmt: skip


@pytest.fixture
def shown(tmp_path):
    """The table of a toy with these figures."""

    def written(better="", kind="scores", **changes):
        folder = tmp_path / "toy"
        folder.mkdir(exist_ok=True)
        (tmp_path / "toy.toml").write_text(LAYOUT.format(kind=kind, better=f', better = "{better}"' if better else ""))
        content = {
            "commands": [f"isopos table {tmp_path}/toy.toml --seeds 3"],
            "scale": "small",
            "seeds": 3,
            "rounds": 0,
            "data": {"one": "a", "two": "b"},
            "rates": [],
            "chosen": {},
            "missing": ["Type1 on two, seeds 0, 1, 2"],
            "figures": FIGURES,
        }
        (folder / "results.json").write_text(json.dumps(content | changes))
        return results_page.read_all(tmp_path)

    return written


def stated(tables):
    return [f"- {text}" for table in tables for text in findings.statements(table)]


def test_leaders_pairs_and_ranks(shown):
    lines = stated(shown())
    assert lines == [
        "- left: Rope is best, ahead of PER by 0.1 [-0.0127, 0.213] (95% interval for 15 pairs at once, 3 seeds: no "
        "difference shown).",
        "- right: Rope is best, ahead of PER by 0.1 [0.0126, 0.187] (95% interval for 6 pairs at once, 3 seeds).",
        "- Best and worst row are apart, in standard deviations of a seed: left 158; right 63309.",
        "- left: rank correlation with the paper -0.40 over 4 rows, -1.00 without Base.",
        "- left: of 6 pairs of rows 2 in the paper's order, 1 not, 3 without a difference shown; against ours the paper "
        "has PER before Rope.",
        "- right: rank correlation with the paper +0.50 over 3 rows.",
        "- right: of 3 pairs of rows 2 in the paper's order, 1 not, 0 without a difference shown; against ours the paper "
        "has PER before Rope.",
        "- Gained by learning angles, over the fixed ones that they start with (one seed): Type1, left +0.500.",
        "- Weights of models for one, two: as many as with Base, within 1%.",
    ]


def test_columns_whose_rows_are_too_close_cannot_tell_their_order(shown):
    close = {"left": {"Base": by_seed(5.0), "Rope": by_seed(5.04)}, "right": {"Base": by_seed(5.0), "Rope": by_seed(5.0)}}
    (said,) = findings._separation(*shown(figures=close))
    assert said == "Too close to tell the order, with fewer than 5: left (4.0); right (0.0)."


def test_higher_is_better_turns_every_order(shown):
    lines = stated(shown("higher"))
    assert lines[0] == "- left: Type1 with fixed angles is best, ahead of Type1 by 0.5 (one seed)."
    assert lines[1].startswith("- right: Base is best, ahead of a|b by 1e+03 [1e+03, 1e+03] (95% interval for 6 pairs at")
    assert lines[-2].endswith(" (one seed): Type1, left -0.500.")


def test_two_seeds_have_no_interval(shown):
    two = {title: {row: dict(list(seeds.items())[:2]) for row, seeds in by_row.items()} for title, by_row in FIGURES.items()}
    lines = stated(shown(figures=two, seeds=2))
    assert lines[0].startswith("- left; right: Rope is best, ahead of PER by ")
    assert lines[0].endswith(" (2 seeds: no interval).")
    assert "- right: of 3 pairs of rows by means alone (2 seeds) 2 in the paper's order, 1 not, 0 level" in "\n".join(lines)
    assert not any("shown" in line or "95%" in line for line in lines)


def test_rows_without_a_common_seed_have_no_interval(shown):
    figures = {"PER": {"0": 5.0, "1": 6.0, "2": 4.0}, "a|b": {"0": 5.1, "1": 6.2, "2": 4.3}, "Rope": {"2": 4.5, "5": 5.0}}
    (toy,) = shown(figures={"left": figures | {"Base": {"7": 1.0}}})
    ahead = toy.lead("left", "PER", "a|b")
    assert (round(ahead.mean, 6), round(ahead.half, 3)) == (0.2, 0.248)
    assert ahead.summary == "95% interval, 3 seeds: no difference shown"
    assert toy.lead("left", "a|b", "Rope").summary == "one seed"
    alone = toy.lead("left", "Base", "PER")
    assert (alone.mean, alone.summary) == (4.0, "0 seeds: no interval")
    assert toy.leads("left", ["Base", "PER"])["PER"].mean == 4.0


def test_a_changed_figure_changes_the_statements(shown):
    before = stated(shown())
    changed = json.loads(json.dumps(FIGURES))
    changed["left"]["PER"]["1"] -= 1
    assert stated(shown(figures=changed)) != before


def test_rounds_have_quartiles_and_no_interval(shown):
    ratios = {
        title: {row: {"median": mean, "half": 0.1} for row, mean in (("Base", 9.0), ("Rope", 5.0), ("PER", 5.1))}
        for title in FIGURES
    }
    lines = stated(shown(kind="cost", figures=ratios, rounds=21))
    assert lines[0] == "- left; right: Rope is best, ahead of PER by 0.1, 0.1 (quartiles overlap)."
    assert "of 3 pairs of rows 2 in the paper's order, 0 not, 1 with quartiles that overlap" in "\n".join(lines)


def test_rows_with_more_weights_are_named(shown, monkeypatch):
    """Learned vectors have as many weights as positions times features; rows that were not run are not named."""
    wide = LAYOUT.replace('name = "a|b", scheme = "none"', 'name = "a|b", scheme = "permuteformer:width=4"')
    monkeypatch.setitem(globals(), "LAYOUT", wide.replace('scheme = "rope", fig', 'scheme = "learned", fig'))
    left = {row: FIGURES["left"][row] for row in ("Base", "Rope", "PER")}
    (toy,) = shown(figures={"left": left, "right": FIGURES["right"]})
    recipe = toy.layout.recipe_at("small", toy.layout.corpus("one"))
    vectors, width, layers = recipe.task.length * recipe.model.model_dim, recipe.model.model_dim, recipe.model.layers
    *_, one, two = stated([toy])
    assert one == f"- Weights of models for one: as many as with Base, within 1%, but for Rope with {vectors:+,}."
    assert two.startswith(one.removesuffix(".").replace("for one", "for two") + ", a|b with +")
    assert int(two.rpartition("+")[2].rstrip(".").replace(",", "")) == layers * 2 * 3 * (width * width + width)


def test_what_the_order_owes_to_learning_rates(shown):
    assert results_page.tuning(shown()).count("\n") == 3, "a header alone"
    chosen = {
        "one": {"rates": {"PER": 0.5, "Rope": 2, "Type1": 2, "Type1 with fixed angles": 2}, "correlation": 0.8},
        "two": {"rates": {"PER": 1}, "correlation": None},
    }
    (tuned,) = shown(rates=[0.5, 1, 2], chosen=chosen)
    assert tuned.rates == "0.5, 1, 2"
    assert results_page.tuning([tuned]).splitlines()[3:] == [
        "| [`toy`](toy/table.md) | one | 0.5, 1, 2 | 1 of 4 | 3 of 4 | +0.80 |",
        "| [`toy`](toy/table.md) | two | 0.5, 1, 2 | 0 of 1 | 0 of 1 | - |",
    ]


def test_folders_say_data_seeds_and_commands(shown, tmp_path):
    page = results_page.folders(shown())
    assert "| [`toy`](toy/table.md), [picture](toy/distances.svg) | A toy: Which? | one: a; two: b | 3 seeds | 1 |" in page
    assert "- `toy`: Type1 on two, seeds 0, 1, 2.\n" in page
    assert f"    isopos table {tmp_path}/toy.toml --seeds 3\n" in page


def test_a_correlation_names_the_row_on_which_it_leans(shown):
    (toy,) = shown()
    names, ours = ("Base", *"bcdef"), (0, 4, 3, 2, 1, 9)
    vars(toy)["ours"] = {"left": {name: (n, 0.1) for name, n in zip(names, ours, strict=True)}}
    line = findings._ranks(toy, "left", dict(zip(names, range(6), strict=True)))
    assert line.endswith(" +0.43 over 6 rows, +0.00 without Base, -1.00 without Base and f.")


def test_rises_are_those_of_lengths(shown):
    (toy,) = shown()
    base = {"Base": (2.0, 0.1)}
    vars(toy)["paper"] = {}
    vars(toy)["ours"] = {"512": base, "1,024": {"Base": (3.0, 0.1)}}
    assert list(findings._rises(toy)) == ["From 512 to 1,024: Base +50.0%."]
    vars(toy)["ours"] = {"Copy": base, "Reverse": base}
    assert not list(findings._rises(toy))


def test_a_picture_has_distances_to_the_best_row(shown):
    (toy,) = shown()
    panels = findings.picture(toy).axes
    assert [axes.get_title(loc="right") for axes in panels] == ["left: behind Rope, nats", "right: behind Rope, nats"]
    assert [label.get_text() for label in panels[1].get_yticklabels()] == ["Rope", "PER", "a|b", "Base"]
    dots = [container.lines[0] for container in panels[1].containers]
    leads = toy.leads("right", ["Rope", "PER", "a|b", "Base"])
    assert [dot.get_xdata()[0] for dot in dots] == [0.0, *(leads[row].mean for row in ("PER", "a|b", "Base"))]
    bars = [container.lines[2][0].get_segments()[0][:, 0].tolist() for container in panels[1].containers[1:]]
    assert bars == [[lead.mean - lead.half, lead.mean + lead.half] for lead in leads.values()]
    assert [dot.get_markerfacecolor() == "none" for dot in dots] == [True, False, False, False]


@pytest.fixture(scope="module")
def tables():
    return {one.name: one for one in results_page.read_all()}


def test_conclusions_were_written_for_these_figures(tables):
    """Prose is not derived: who changes figures reads it again."""
    written, text = conclusions.read(), (results_page.FOLDER / "README.md").read_text(encoding="utf-8")
    prose = text[text.index("## Conclusions") :]
    for name, table in tables.items():
        assert any(f"`{each}`" in prose for each in (name, table.content["commands"][0].split()[2])), name
        assert written.get(name) == conclusions.fingerprint(table), conclusions.REMEDY.format(name=name)


def test_a_changed_figure_changes_a_fingerprint(shown):
    (before,) = map(conclusions.fingerprint, shown())
    changed = json.loads(json.dumps(FIGURES))
    changed["left"]["PER"]["1"] += 1e-9
    (after,) = map(conclusions.fingerprint, shown(figures=changed))
    assert before != after


def test_orders_are_those_that_the_tables_state(tables):
    for one in tables.values():
        lines = (results_page.FOLDER / one.name / "table.md").read_text().splitlines()
        notes = lines[: lines.index("## Findings")]
        noted = {text[2:].split(":")[0]: text for text in notes if "rank correlation with the paper" in text}
        derived = [text for text in stated([one]) if "rank correlation" in text]
        assert len(derived) == len(noted)
        for text in derived:
            column, _, rest = text.removeprefix("- ").partition(": ")
            assert noted[column].split(": ")[1].startswith(rest.partition(" rows")[0])


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
    named = {row.name: row.scheme for row in tables["lengths"].layout.rows if "decay=none" not in row.scheme}
    decayed = {
        row for row, scheme in named.items() if scheme.startswith(("permuteformer", "retnet", "alibi")) or "decay=" in scheme
    }
    assert len(decayed) == 7
    assert {row for row, rise in rises.items() if rise < 1} == decayed
    assert max(rises, key=rises.__getitem__) == "rope with softmax attention"


def test_intervals_to_the_best_row_are_of_all_rows_together(tables):
    scenes, column = tables["newer-scenes"], "softmax"
    order = scenes.sort(column, {row: mean for row, (mean, _) in scenes.ours[column].items()})
    best, *others = (scenes.by_seed[column][row] for row in order)
    values = {row: [best[seed] - other[seed] for seed in best] for row, other in zip(order[1:], others, strict=True)}
    assert scenes.signs[column] == -1
    assert scenes.leads(column, order) == to_best(values)
    assert all(lead.mean >= 0 for lead in scenes.leads(column, order).values())


def test_columns_may_have_different_directions(tables):
    one = tables["ape-1"]
    assert (one.signs["Copy"], one.signs["Copy, whole"]) == (1, -1)
    assert one.sort("Copy, whole", {"a": 0.1, "b": 0.9}) == ["b", "a"]
