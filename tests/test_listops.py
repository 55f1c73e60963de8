"""Test ListOps: expressions, files, trees, batches, and a classifier's training."""

import gzip
import pickle
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import close
from hypothesis import given
from hypothesis import strategies as st
from training import trained

from isopos.lab.data import random_expressions
from isopos.lab.data.expressions import (
    OPERATORS,
    TOKENS,
    encode,
    evaluate,
    expression_text,
    generate_expressions,
    read_expressions,
    tree_nodes,
)
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.listops import ListOps
from isopos.lab.tasks.task import View
from isopos.positions import Tree, tree

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "listops"
LINE, TREE = "rope", "ape-tree"


def expressions(count=30, seed=0, **more):
    options = {"operators": tuple(OPERATORS), "depth": 3, "arguments": 4, "longest": 30} | more
    return [*generate_expressions(seed, (count, 1, 0), **options).splits["train"]]


def row(expression):
    return f"{evaluate(encode(expression)).answer}\t{expression}\n"


def write(path, rows):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("".join(row(expression_text(one.tokens)) for one in rows))
    return str(path)


def ready(tmp_path, scheme=LINE, count=200, **edits):
    """A recipe with inferred fields, and its data, a file of random expressions."""
    write(tmp_path / "rows.tsv", expressions(count))
    sizes = {"batch": 8, "layers": 1, "model_dim": 16, "heads": 2}
    recipe = Recipe(task=ListOps(data=str(tmp_path))).edit(scheme=scheme, **sizes | edits)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("[MIN 6 3 5 ]", 3),
        ("[MAX 6 3 5 ]", 6),
        ("[MED 3 4 1 ]", 3),
        ("[MED 7 8 4 3]", 5),
        ("[SM 6 5 9 0 ]", 0),
        ("[FIRST 6 5 8 ]", 6),
        ("[LAST 6 5 8 ]", 8),
        ("[PM 7 8 9 ]", 4),
        ("( ( ( [MAX 2 ) 9 ) ( ( ( [MIN 4 ) 7 ) ] ) ] )", 9),
        ("[MAX 2 [MIN 4 [SM 9 9 ] ] 0 ]", 4),
    ],
)
def test_what_expressions_evaluate_to(expression, value):
    assert evaluate(encode(expression)).answer == value


@given(st.integers(0, 10_000))
def test_text_and_tokens_are_the_same_and_trees_are_those_of_s_expressions(seed):
    (one,) = expressions(1, seed)
    assert encode(expression_text(one.tokens)) == one.tokens
    found = torch.tensor(tree_nodes(one.tokens))
    Tree(one.branches).check(found)
    assert found[:, 1].max() + 1 == one.branches
    lisp = re.sub(r"\[(\w+)", r"(\1", expression_text(one.tokens)).replace("]", "] )")  # a closing bracket is the last child
    assert torch.equal(found, tree(lisp))


def test_a_tree_by_hand():
    """[MAX 2 [MIN 4 7 ] 0 ]: each row is the parent's row and the branch."""
    expected = [(-1, -1), (0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (0, 2), (0, 3)]
    assert tree_nodes(encode("[MAX 2 [MIN 4 7 ] 0 ]")) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[MAX 2 9 ]", "expected a label, a tab and an expression, got 1 columns"),
        ("9\t[MAX 2 9 ]\tx", "expected a label, a tab and an expression, got 3 columns"),
        ("9\t[FOO 2 9 ]", r"column 3: expected digits, \] and \[MIN, .*\[PM, got '\[FOO'"),
        ("9\t[MAX 2 19 ]", "column 10: .*got '19'"),
        ("9\t[MIN 3 [MAX 2 9", r"column 10: expected balanced brackets, got \[MAX that nothing closes"),
        ("9\t( ( [MAX 2 ) 9 ) ] ]", r"column 22: expected balanced brackets, got \] that closes nothing"),
        ("9\t( ( [MAX 2 ) 9 ]", r"expected as many \( as \), got 2 and 1"),
        ("9\t[MAX ]", r"column 3: expected arguments of \[MAX, got none"),
        ("9\t9 [MAX 2 ]", "column 12: expected one expression, got another"),
        ("9\t", "expected an expression, got none"),
        ("10\t[MAX 2 9 ]", "expected a label from 0 to 9, got '10'"),
        ("8\t[MAX 2 9 ]", "expected the label 9, to which the expression evaluates, got 8"),
        ("\xff\t[MAX 2 9 ]", "expected UTF-8, got the byte 0xff"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path, line, message):
    path = tmp_path / "rows.tsv"
    path.write_text(row("[MIN 1 2 ]") + line + "\n", encoding="latin-1")
    with pytest.raises(
        ValueError, match=f"^data: {re.escape(str(path))}, line 2[,:] .*{message}.*; repair or remove the line$"
    ):
        read_expressions(str(path))


def test_a_source_without_rows_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"data: expected a file or a folder of rows, but .* does not exist; without --data"
    ):
        read_expressions(str(tmp_path / "absent.tsv"))
    with pytest.raises(ValueError, match=r"data: expected rows .* in files that end with \.tsv or \.tsv\.gz, got none in"):
        read_expressions(str(tmp_path))
    (tmp_path / "rows.tsv").write_text("Source\tTarget\n")
    with pytest.raises(
        ValueError, match=r"data: expected rows of a label, a tab and an expression, but .*rows\.tsv has none"
    ):
        read_expressions(str(tmp_path))
    (tmp_path / "rows.tsv").write_text(row("[MAX 2 9 ]"))
    with pytest.raises(ValueError, match=r"data: expected expressions for .*, got none among 1; give it more"):
        read_expressions(str(tmp_path))
    (tmp_path / "rows.tsv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"data: cannot read .*gz"):
        read_expressions(str(tmp_path))


def test_formats_agree(tmp_path):
    """Label first or columns with names in either order, pairs of parentheses or none, packed or not."""
    rows, found = expressions(100), []
    plain = "".join(row(expression_text(one.tokens)) for one in rows)
    arena = "Source\tTarget\n" + "".join(f"( ( {expression_text(one.tokens)} ) )\t{one.answer}\n" for one in rows)
    named = "target\tsource\n" + plain.replace("\n", "\r\n")
    for name, content in (("plain", plain), ("arena", arena), ("named", named)):
        (tmp_path / f"{name}.tsv").write_bytes(content.encode())
        found.append(read_expressions(str(tmp_path / f"{name}.tsv")))
    found.append(read_expressions(write(tmp_path / "packed.tsv.gz", rows)))
    assert all([*one.splits[name]] == [*rows] for one in found for name, rows in found[0].splits.items())
    assert sorted(chain(*found[0].splits.values())) == sorted(rows)


def test_splits_by_names_or_by_tenths_have_nothing_in_common(tmp_path):
    rows = expressions(400)
    write(tmp_path / "one.tsv", rows + rows[:50])
    splits = read_expressions(str(tmp_path)).splits
    assert sum(map(len, splits.values())) == 450
    assert 20 < len(splits["validation"]) < 70
    assert 20 < len(splits["test"]) < 70
    sets = [{one.tokens for one in split} for split in splits.values()]
    assert len(set.union(*sets)) == sum(map(len, sets))

    (tmp_path / "one.tsv").unlink()
    write(tmp_path / "basic_train.tsv", rows[:300])
    write(tmp_path / "basic_test.tsv", rows[290:350])
    (tmp_path / "README.md").write_text("no rows")
    splits = read_expressions(str(tmp_path)).splits
    assert [*splits["test"]] == rows[290:350]
    assert {*splits["train"], *splits["validation"]} == set(rows[:290])
    write(tmp_path / "basic_val.tsv", rows[340:])
    found = read_expressions(str(tmp_path))
    assert ([*found.splits["train"]], [*found.splits["validation"]], found.dropped["repeated"]) == (
        rows[:290],
        rows[350:],
        20,
    )


@pytest.mark.parametrize("named", [True, False])
def test_longer_expressions_are_left_out(tmp_path, named):
    recipe = Recipe(task=ListOps(data=write(tmp_path / "rows.tsv", expressions(200)) if named else ""))
    whole = sum(map(len, recipe.task.load(recipe).rows.values()))
    data = recipe.edit(longest=12).task.load(recipe)
    rows = [*chain(*data.rows.values())]
    assert max(len(one.tokens) for one in rows) == 12
    left = re.search(r", ([\d,]+) longer;", data.summary)
    assert left
    assert len(rows) == whole - int(left[1].replace(",", "")) < whole - 20
    with pytest.raises(
        ValueError, match=f"data: expected expressions for train, got none among 0, {whole:,} longer; give it more, or raise"
    ):
        recipe.edit(longest=2).task.load(recipe)


def test_random_expressions_are_those_of_their_seed():
    rows = expressions(500, longest=20, operators=("MIN", "SM"))
    assert rows == expressions(500, longest=20, operators=("MIN", "SM")) != expressions(500, seed=1)
    assert len(set(rows)) == 500
    assert max(len(one.tokens) for one in rows) <= 20
    assert {TOKENS[token] for one in rows for token in one.tokens if token >= 10} == {"[MIN", "[SM", "]"}
    assert max(one.branches for one in rows) == 5


ARENA = random_expressions.Settings(depth=9, arguments=10, shortest=501, longest=1999)


def test_long_expressions_are_grown_as_short_ones_are():
    """Level by level and one by one: the same lengths, branches and answers in distribution, and every answer is right."""
    settings = random_expressions.Settings(depth=4, arguments=5, shortest=0, longest=50)
    grown = [one for one, _ in zip(random_expressions.draw_expressions(0, settings), range(4000), strict=False)]
    assert all(evaluate(one.tokens) == one for one in grown)
    assert (
        grown[:50]
        == [one for one, _ in zip(random_expressions.draw_expressions(0, settings), range(50), strict=False)]
        != grown[50:100]
    )
    known = {"operators": ("MIN", "MAX", "MED", "SM"), "depth": 4, "arguments": 5, "longest": 50}
    one_by_one, different = generate_expressions(0, (4000, 1, 1), **known).splits["train"], [*dict.fromkeys(grown)]
    assert np.mean([len(one.tokens) for one in different]) == pytest.approx(
        np.mean([len(one.tokens) for one in one_by_one]), rel=0.06
    )
    shares = [np.bincount([one.answer for one in some], minlength=10) / len(some) for some in (different, one_by_one)]
    assert np.abs(shares[0] - shares[1]).max() < 0.04
    assert {TOKENS[token] for one in grown for token in one.tokens if token >= 10} == {"[MIN", "[MAX", "[MED", "[SM", "]"}


def test_the_expressions_of_the_long_range_arena():
    grown = [one for one, _ in zip(random_expressions.draw_expressions(1, ARENA), range(300), strict=False)]
    assert all(evaluate(one.tokens) == one for one in grown)
    lengths = [len(one.tokens) for one in grown]
    assert min(lengths) > 500 < 1500 < max(lengths) < 2000
    assert max(one.branches for one in grown) == 11
    depth = [np.cumsum([(token >= 10) - 2 * (token == 17) for token in one.tokens]).max() for one in grown]
    assert max(depth) == 9


def test_random_expressions_with_settings_are_prepared_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path))
    recipe = Recipe(task=ListOps(depth=3, arguments=3, shortest=9, longest=25, expressions=240)).edit(batch=8)
    recipe.task.check(recipe)
    data = recipe.task.load(recipe)
    assert [len(rows) for rows in data.rows.values()] == [200, 20, 20]
    rows = [*chain(*data.rows.values())]
    assert len(set(rows)) == 240
    assert 9 <= min(len(one.tokens) for one in rows) < max(len(one.tokens) for one in rows) <= 25
    inferred = data.infer(recipe)
    monkeypatch.setattr(random_expressions, "draw_expressions", None)
    again = inferred.task.load(inferred)
    assert again.sha256 == data.sha256
    assert "by the first operator" in again.summary
    whole = data.batch(inferred, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, pickle.loads(pickle.dumps(again)).batch(inferred, 3), strict=True))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"shortest": 9}, "longest: expected at least 9 tokens with shortest, which limits the length, got 0"),
        ({"depth": 3, "data": "rows.tsv", "longest": 9}, "depth: expected 4 with data, which is not random, got 3"),
        ({"arguments": 1}, "arguments: expected a number from 2 to 250, got 1"),
        (
            {"shortest": 500, "longest": 501, "depth": 1},
            "shortest: expected lengths that random expressions have, got none of",
        ),
        (
            {"arguments": 2, "longest": 4, "depth": 1},
            "expressions: expected fewer, got 12,000; 400 different ones were found",
        ),
    ],
)
def test_settings_that_no_expressions_have(tmp_path, monkeypatch, edits, message):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path))
    monkeypatch.setattr(random_expressions, "TRIES", 20_000)
    recipe = Recipe(task=ListOps(**edits)).edit(model_dim=16, heads=2)
    with pytest.raises(ValueError, match=message):
        recipe.check() or recipe.task.check(recipe) or recipe.task.load(recipe)


def test_padding_is_masked_and_tells_trees_from_lines(tmp_path):
    recipe, data = ready(tmp_path)
    other, _ = ready(tmp_path, TREE)
    for step in range(1, 9):
        tokens, at, mask, answers = data.batch(recipe, step)
        same, nodes_at, *rest = data.batch(other, step)
        assert torch.equal(tokens, same)
        assert torch.equal(mask, rest[0])
        assert at[:, 0].tolist() == list(range(tokens.shape[1]))
        for own, node, kept, answer in zip(tokens, nodes_at, mask, answers, strict=True):
            assert evaluate(bytes(own[kept].tolist())).answer == answer
            assert node[kept].tolist() == [list(pair) for pair in tree_nodes(bytes(own[kept].tolist()))]
            assert (node[~kept] == -1).all()


def test_scores_count_every_expression_once(tmp_path):
    recipe, data = ready(tmp_path, TREE)
    model = recipe.task.model(recipe).double()
    scored = data.score(model, recipe, View()).figures
    nats, right = [], []
    for n in range(len(data.rows["validation"])):
        logits, answers = data.answers(model, recipe, "validation", np.array([n]))
        nats.append(torch.nn.functional.cross_entropy(logits, answers))
        right.append(logits.argmax(-1) == answers)
    close(torch.tensor(scored["nats"], dtype=torch.float64), torch.stack(nats).mean())
    assert scored["accuracy"] == pytest.approx(torch.cat(right).double().mean().item())
    assert scored["expressions"] == len(data.rows["validation"])
    assert data.score(model, recipe, View(split="test")).figures["expressions"] == len(data.rows["test"])
    assert model.training


def test_what_the_data_tells_reaches_schemes_and_what_does_not_fit_is_refused(tmp_path):
    recipe, data = ready(tmp_path, TREE)
    rows = [*chain(*data.rows.values())]
    longest, branches = max(len(one.tokens) for one in rows), max(one.branches for one in rows)
    assert (recipe.task.longest, recipe.task.branches) == (longest, branches)
    assert recipe.task.model(recipe).scheme.group == Tree(branches)
    assert recipe.edit(scheme="learned").task.model(recipe.edit(scheme="learned")).scheme.max_length == longest
    for scheme in ("ape-grid", "ape-ring", "permuteformer-2d"):
        with pytest.raises(ValueError, match=f"expected positions on a line or in a tree, .* {scheme} takes positions of"):
            recipe.edit(scheme=scheme).task.check(recipe.edit(scheme=scheme))
    with pytest.raises(
        ValueError, match=f"longest: expected at most 9, for which learned:length=9 has positions, got {longest};"
    ):
        data.infer(recipe.edit(scheme="learned:length=9"))
    with pytest.raises(
        ValueError, match=f"branches: expected at most the 2 of ape-tree:branches=2, got trees with {branches}"
    ):
        data.infer(recipe.edit(scheme="ape-tree:branches=2"))
    with pytest.raises(ValueError, match=f"branches: expected 0, or at least the {branches} of the data, got 2"):
        ready(tmp_path, branches=2)
    with pytest.raises(ValueError, match=r"batch: expected at most the .* expressions, got 1000"):
        ready(tmp_path, batch=1000)
    with pytest.raises(ValueError, match="longest: expected a number from 0 to 1,000,000,000, got -1"):
        recipe.edit(longest=-1).check()
    assert data.score(recipe.task.model(recipe), recipe, View(split="train")).reason.startswith("split: expected one of")


def test_a_short_training_is_better_than_the_majority_and_shows_examples(tmp_path):
    """Lists contain only the operator MAX."""
    write(tmp_path / "rows.tsv", expressions(600, operators=("MAX",), depth=2))
    recipe = Recipe(task=ListOps(data=str(tmp_path))).edit(scheme=TREE, batch=32, layers=1, model_dim=32, heads=2)
    data = recipe.task.load(recipe)
    recipe = data.infer(recipe)
    model = trained(recipe, data, 60, 5e-3)
    usual = re.search(r"always 9 (\d+\.\d)%, by the first operator (\d+\.\d)%", data.summary)
    assert usual
    assert usual[1] == usual[2]
    assert data.score(model, recipe, View()).figures["accuracy"] > float(usual[1]) / 100 + 0.1
    first, _ = data.examples(model, recipe, 2)
    assert evaluate(encode(first["expression"])).answer == first["answer"]
    assert first["model"] in range(10)


@pytest.mark.skipif(not SHARED.exists(), reason="the published rows are not beside this project")
def test_the_published_rows():
    rows = [*chain(*read_expressions(str(SHARED / "test_d20s.tsv.gz")).splits.values())]
    assert len(rows) == 10_000
    assert max(one.branches for one in rows) == 6
