"""Test tree transduction: operations, orders, positions of the next nodes, files, and the commands."""

import gzip
import re
from itertools import chain

import numpy as np
import pytest
import torch
from cases import close
from hypothesis import given
from hypothesis import strategies as st
from training import trained

from isopos.lab.data.labelled_trees import (
    LabelledTree,
    TreeBuilder,
    from_order,
    in_order,
    mirror,
    parse,
    random_shape,
    reduce_pairs,
    s_expression,
    subtree,
    subtree_sizes,
)
from isopos.lab.data.tree_pairs import ACTIONS, labels_of, random_trees, read_trees
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.task import View
from isopos.lab.tasks.tree_transduction import TreeTransduction
from isopos.positions import Tree, tree

ORDERS = ("breadth", "depth")
OPERATIONS = ("copy", "rotation", "c3", "ops")
SIZES = {"batch": 8, "layers": 1, "model_dim": 16, "heads": 2, "samples": 60, "held_out": 10, "depth": 3}
LINE, TREE = "rope:attention=softmax", "ape-tree:attention=softmax"
DEEP = 10_000


def ready(scheme=TREE, **edits):
    """A recipe with inferred fields, and its data."""
    recipe = Recipe(task=TreeTransduction()).edit(scheme=scheme, **SIZES | edits)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


def labelled(text):
    """Parse an s-expression with integer labels."""
    labels, arities = parse(text)
    return LabelledTree(tuple(map(int, labels)), tuple(arities))


def as_text(one):
    return s_expression([*map(str, one.labels)], one.arities)


def random_tree(seed, depth=5):
    """A random tree in which nodes have 0 to 3 children."""
    random = np.random.default_rng(seed)
    arities, waiting = [], [depth]
    while waiting:
        own = waiting.pop()
        count = int(random.integers(4)) if own else 0
        arities.append(count)
        waiting += [own - 1] * count
    return LabelledTree(tuple(random.integers(9, size=len(arities)).tolist()), tuple(arities))


@pytest.mark.parametrize(
    ("source", "target"),
    [("7", "7"), ("(7 1 2)", "(7 2 1)"), ("(7 (8 1 2) 3)", "(7 3 (8 2 1))"), ("(7 (8 1 (9 2 3)) 4)", "(7 4 (8 (9 3 2) 1))")],
)
def test_mirror_images_by_hand(source, target):
    assert as_text(mirror(labelled(source))) == target


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("2", "2"),
        ("(3 1 2)", "0"),
        ("(3 (3 1 1) 0)", "(3 2 0)"),
        ("(3 (3 1 1) (3 2 2))", "(3 2 1)"),
        ("(3 0 (3 (3 2 2) (3 (3 1 2) 1)))", "(3 0 (3 1 (3 0 1)))"),
    ],
)
def test_one_step_of_reduction_by_hand(source, target):
    """One step replaces every node with two leaves by their sum modulo 3."""
    assert as_text(reduce_pairs(labelled(source), lambda _, a, b: (a + b) % 3)) == target


@given(st.integers(0, 10_000), st.sampled_from(ORDERS))
def test_orders_rows_and_text_are_one_tree(seed, order):
    one = random_tree(seed)
    labels, rows = in_order(one, order)
    assert from_order(labels, in_order(LabelledTree(one.arities, one.arities), order)[0], order) == one
    assert labelled(as_text(one)) == one
    Tree(3).check(torch.tensor(rows))
    if order == "depth":
        assert torch.tensor(rows).equal(tree(as_text(one))) or len(rows) == 1
    else:
        depth = [0]
        for parent, _ in rows[1:]:
            depth.append(depth[parent] + 1)
        assert depth == sorted(depth)
    assert subtree_sizes(one)[0] == len(labels)
    assert mirror(mirror(one)) == one
    for node in range(len(one.labels)):
        assert subtree_sizes(one)[node] == len(subtree(one, node).labels)


@given(st.integers(0, 10_000), st.sampled_from(ORDERS))
def test_the_place_of_the_next_node_is_known_from_those_before(seed, order):
    """The builder knows each next position, and is complete exactly after the last node."""
    one = random_tree(seed)
    labels, rows = in_order(one, order)
    arities, grown = in_order(LabelledTree(one.arities, one.arities), order)[0], TreeBuilder(order)
    for n, arity in enumerate(arities):
        assert not grown.complete
        assert grown.rows == rows[: n + 1]
        grown.add(arity)
    assert grown.complete
    grown.add(2)
    assert grown.rows == [*rows, (-1, -1), (-1, -1)]
    assert len(labels) == len(rows)


@pytest.mark.parametrize(("side", "order"), [("left", "breadth"), ("right", "depth")])
def test_chains_of_any_depth(order, side, tmp_path):
    """The chain has 10,000 levels, and each level has one additional leaf."""
    chain_of = LabelledTree((3,) * DEEP + (1,) * (DEEP + 1), (2,) * DEEP + (0,) * (DEEP + 1))  # (3 (3 (3 1 1) 1) 1)
    if side == "right":  # (3 1 (3 1 (3 1 1)))
        chain_of = LabelledTree((3, 1) * DEEP + (1,), (2, 0) * DEEP + (0,))
    flipped = mirror(chain_of)
    assert mirror(flipped) == chain_of != flipped
    assert len(reduce_pairs(chain_of, lambda _, a, b: (a + b) % 3).labels) == 2 * DEEP - 1
    rows = in_order(chain_of, order)[1]
    assert max(branch for _, branch in rows) == 1
    assert from_order(*(in_order(LabelledTree(x, chain_of.arities), order)[0] for x in chain_of), order) == chain_of
    assert max(subtree_sizes(chain_of)) == 2 * DEEP + 1
    text = as_text(chain_of)
    small = "".join(f"({n} 1)\t{n}\n" for n in range(4, 90))
    (tmp_path / "deep.tsv").write_text(f"{text}\t{as_text(flipped)}\n{small}")
    found = read_trees(str(tmp_path / "deep.tsv"))
    assert max(len(pair[0].labels) for rows in found.pairs.splits.values() for pair in rows) == 2 * DEEP + 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_random_trees_are_those_of_their_seed_and_all_different(operation):
    options = {"depth": 4, "deviation": 1, "labels": 20 if operation != "ops" else 40}
    found = random_trees(0, (300, 50, 50), operation, **options)
    assert found == random_trees(0, (300, 50, 50), operation, **options)
    assert found != random_trees(1, (300, 50, 50), operation, **options)
    pairs = [*chain(*found.pairs.splits.values())]
    assert len({source for source, _ in pairs}) == len(pairs) == 400
    for source, target in pairs:
        assert all(found.arities[token] == arity for token, arity in zip(target.labels, target.arities, strict=True))
        if operation == "copy":
            assert source == target
        if operation == "rotation":
            assert mirror(source) == target
    depths = []
    for source, _ in pairs:
        below = [0]
        for parent, _ in in_order(source, "depth")[1][1:]:
            below.append(below[parent] + 1)
        depths.append(max(below))
    assert 3.2 < np.mean(depths) < 4.3  # numbers are cut, not rounded
    assert {"copy": 20, "rotation": 20, "c3": 4, "ops": 40 + 16}[operation] == len(found.names)


def test_c3_is_the_cyclic_group():
    found = random_trees(0, (50, 5, 5), "c3", depth=2, deviation=1, labels=20)
    assert found.names == ("0", "1", "2", "+")
    for source, target in found.pairs.splits["train"]:
        assert target == reduce_pairs(source, lambda _, a, b: (a + b) % 3)
        assert set(source.labels) <= {0, 1, 2, 3}


def test_what_operators_make_of_a_subtree():
    found = random_trees(0, (400, 5, 5), "ops", depth=4, deviation=1, labels=40)
    seen = set()
    for source, target in found.pairs.splits["train"]:
        root, label, *rest = source.labels
        whole = LabelledTree(tuple(rest), source.arities[2:])
        assert source.arities[:2] == (2, 0)
        assert len(set(rest)) == len(rest)
        node, action = rest.index(label), found.names[root]
        own = subtree(whole, node)
        seen.add((action, whole.arities[node]))
        if action == "extract":
            assert target == own
        elif action == "flip-extract":
            assert target == mirror(own)
        elif action == "no-op":
            assert target == whole
        else:
            assert (found.names[target.labels[node]], target.arities[node]) == (found.names[label], 0)
            back = LabelledTree(*(a[:node] + b + a[node + 1 :] for a, b in zip(target, own, strict=True)))
            assert back == whole
    assert seen == {(action, arity) for action in ACTIONS for arity in (0, 2)}


def test_random_trees_grow_as_the_authors_do():
    """The authors redraw the second child's depth if it is maximal, so one tree in four of depth 2 is full."""
    random = np.random.default_rng(0)
    full = [len(random_shape(random, 2, 7)) == 7 for _ in range(4000)]
    assert np.mean(full) == pytest.approx(1 / 4, abs=0.02)
    expected = [1.0]
    for depth in range(1, 8):
        shares = np.full(depth, 1 / depth + 1 / depth**2)
        shares[-1] = 1 / depth**2
        expected.append(1 + expected[-1] + shares @ expected)
    nodes = [len(random_shape(random, 7, 1 << 14)) for _ in range(4000)]
    assert np.mean(nodes) == pytest.approx(expected[7], rel=0.02)  # 37.0; 51.0 where all depths are equally likely


def test_labels_of_operators_are_those_of_the_authors():
    """The paper's depth has 128 labels: 64 of leaves, 60 of inner nodes, 4 operators. Truncated subtrees have more."""
    assert [labels_of("ops", depth) for depth in (3, 4, 7)] == [32, 32, 128]
    found = random_trees(0, (5, 1, 1), "ops", depth=4, deviation=1, labels=labels_of("ops", 7))
    assert found.names[124:128] == ACTIONS
    assert found.names[128:] == found.names[64:124]
    assert found.arities == (0,) * 64 + (2,) * 64 + (0,) * 60
    assert ready(operation="ops", labels=9)[1].start == 10
    recipe = Recipe(task=TreeTransduction()).edit(scheme=TREE, operation="ops", labels=8)
    with pytest.raises(ValueError, match="labels: expected at least 9, of leaves and of others, got 8"):
        recipe.task.check(recipe)


def test_sources_may_be_read_in_another_order_than_targets_are_written():
    recipe, data = ready(order="depth", source_order="breadth")
    same = ready(order="depth")[1]
    assert data.sha256 != same.sha256 == ready(order="depth", source_order="depth")[1].sha256
    assert data.name == "random trees for rotation, depth first from sources breadth first"
    assert "depth first from sources breadth first, that learns" in recipe.task.setting(recipe)
    mixed, breadth, depth = (
        found.tensors("train", np.arange(6), recipe) for found in (data, ready(order="breadth")[1], same)
    )  # source, given, x, y, mask and answers
    assert all(mixed[n].equal(breadth[n]) for n in (0, 2, 4))
    assert all(mixed[n].equal(depth[n]) for n in (1, 3, 5))
    assert not mixed[0].equal(depth[0])


def test_trees_that_cannot_be():
    with pytest.raises(ValueError, match=r"depth: expected 60 different trees, .* of a depth about 1, got only 9;"):
        random_trees(0, (40, 10, 10), "c3", depth=1, deviation=0, labels=20)
    with pytest.raises(ValueError, match=r"depth: expected 12 different trees, with labels for all nodes, .* got only 0;"):
        random_trees(0, (10, 1, 1), "ops", depth=6, deviation=0, labels=4)
    with pytest.raises(ValueError, match="depth: expected trees of at most 500 nodes, got more of depth 60"):
        random_shape(np.random.default_rng(0), 60, 500)


@pytest.mark.parametrize("order", ORDERS)
def test_tensors_by_hand(order):
    recipe, data = ready(order=order)
    data.pairs["train"][0] = (LabelledTree((7, 8, 1, 2, 3), (2, 2, 0, 0, 0)), LabelledTree((7, 3, 8, 2, 1), (2, 0, 2, 0, 0)))
    source, given, x, y, mask, answers = data.tensors("train", np.array([0]), recipe)
    if order == "breadth":
        assert source.tolist() == [[7, 8, 3, 1, 2]]
        assert answers.tolist() == [[7, 3, 8, 2, 1]]
        assert x.tolist() == [[[-1, -1], [0, 0], [0, 1], [1, 0], [1, 1]]]
        assert y.tolist() == [[[-1, -1], [0, 0], [0, 1], [2, 0], [2, 1]]]
    else:
        assert source.tolist() == [[7, 8, 1, 2, 3]]
        assert answers.tolist() == [[7, 3, 8, 2, 1]]
        assert x.tolist() == [[[-1, -1], [0, 0], [1, 0], [1, 1], [0, 1]]]
        assert y.tolist() == [[[-1, -1], [0, 0], [0, 1], [2, 0], [2, 1]]]
    assert given.tolist() == [[data.start, *answers[0, :-1].tolist()]]
    assert mask.all()
    flat, _ = ready(LINE, order=order)
    _, _, x, y, *_ = data.tensors("train", np.array([0]), flat)
    assert x[:, 0].tolist() == y[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("scheme", "order"), [(LINE, "depth"), (TREE, "depth"), ("shiv-quirk", "breadth"), (f"{TREE},locality=0.98", "breadth")]
)
def test_scores_count_every_node_once_and_decoding_follows_positions(scheme, order):
    recipe, data = ready(scheme, order=order, decoded=0, operation="ops")
    model = recipe.task.model(recipe).double().eval()
    scored = data.score(model, recipe, View()).figures
    nats, whole = [], []
    for n in range(10):
        *sample, answers = data.tensors("validation", np.array([n]), recipe)
        nats.append(torch.nn.functional.cross_entropy(model(*sample)[0], answers[0], reduction="none"))
        ((own, found),) = data.freely(model, recipe, "validation", np.array([n]))
        whole.append(own.tolist() == found.tolist())
        model.streams = False
        ((_, again),) = data.freely(model, recipe, "validation", np.array([n]))
        model.streams = True
        assert np.array_equal(found, again)
    close(torch.tensor(scored["nats"], dtype=torch.float64), torch.cat(nats).mean())
    assert scored["exact"] == np.mean(whole)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", [LINE, TREE])
def test_a_model_that_knows_the_target_decodes_it_whole(order, scheme):
    """`follow` returns the positions of the target. Trees of a batch end independently."""
    recipe, data = ready(scheme, order=order)
    rows = np.arange(6)
    source, _, x, y, mask, answers = data.tensors("validation", rows, recipe)
    follow, tokens = data.follow(recipe), answers[:, :0]
    for n in range(answers.shape[1]):
        places = follow(tokens)
        own = answers[:, n] >= 0
        expected = y[:, : n + 1] if scheme == TREE else y[: n + 1]
        assert torch.equal(places[own] if scheme == TREE else places, expected[own] if scheme == TREE else expected)
        tokens = torch.cat((tokens, answers[:, n : n + 1].clamp_min(0)), 1)
    assert follow(tokens) is None
    for row, right in zip(tokens.numpy(), answers.numpy(), strict=True):
        assert data.ended(row).tolist() == right[right >= 0].tolist()
        assert data.text(data.ended(row)) in {data.pair_text("validation", n)[1] for n in rows}
    leaf, inner = (int(np.flatnonzero(data.arities == arity)[0]) for arity in (0, 2))
    right = answers[0][answers[0] >= 0].numpy()
    for beyond in ([inner], [leaf, inner], [leaf, leaf, inner, inner, leaf]):  # a tree ends where it is whole first
        assert data.ended(np.array([*right, *beyond])).tolist() == right.tolist()
    assert data.text(tokens[0, :1].numpy()).endswith(" ...")
    assert len(x) in (6, source.shape[1])
    assert mask.shape == source.shape


def write(path, rows):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("".join(f"{a}\t{b}\n" for a, b in rows))


ROWS = [(f"(S (NP the {n}) (VP sees it))", f"(S (VP it) (NP {n}) x)") for n in ("cat", "dog", *map(str, range(60)))]


def test_trees_of_files_are_tokens_of_labels_and_arities(tmp_path):
    write(tmp_path / "rows.tsv.gz", ROWS)
    recipe, data = ready(data=str(tmp_path / "rows.tsv.gz"))
    assert recipe.task.branches == 3
    assert recipe.task.longest == 7
    names = [name for name, arity in zip(data.names, data.arities[:-1], strict=True) if name in ("S", "NP")]
    assert sorted(names) == ["NP", "NP", "S", "S"]
    shown_pairs = {data.pair_text(name, n) for name, rows in data.pairs.items() for n in range(len(rows))}
    assert shown_pairs == set(ROWS)
    assert data.score(recipe.task.model(recipe), recipe, View(limit=2)).figures["pairs"] == 2
    assert recipe.task.fits == {"length": 7, "reach": 7, "branches": 3}
    assert ready()[0].task.fits["depth"] == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("(a b)\t(a b", r"line 2, column 1 of the target: expected balanced parentheses, got \( that nothing closes"),
        ("(a (b c)) d\ta", "line 2, column 11: expected one expression, got another"),
        ("(a () b)\ta", r"line 2, column 5: expected a label after \(, got \)"),
        ("a)\ta", r"line 2, column 2: expected .*, got \) "),
        ("\ta", "line 2, column 1: expected an expression, got empty text"),
        ("(a b)", "line 2: expected a source, a tab and a target, got 1 columns"),
    ],
)
def test_a_tree_that_is_none_is_named(tmp_path, row, message):
    path = tmp_path / "rows.tsv"
    path.write_text(f"(a b)\t(b a)\n{row}\n")
    with pytest.raises(ValueError, match=f"^data: {re.escape(str(path))}, {message}.*; repair or remove the line$"):
        read_trees(str(path))


def test_what_does_not_fit_is_refused():
    recipe, data = ready(longest=9)
    assert max(len(one.labels) for rows in data.pairs.values() for pair in rows for one in pair) <= 9
    assert re.search(r"pairs, \d+ larger of \d", data.summary)
    for scheme, message in (
        ("ape-grid", "schemes: expected positions on a line or in a tree, which nodes have"),
        ("ape-tree:branches=1", "branches: expected at most the 1 of ape-tree:branches=1, got trees with 2"),
        ("learned:length=4", "longest: expected at most 4, for which learned:length=4 has positions, got 9"),
    ):
        with pytest.raises(ValueError, match=message):
            data.infer(recipe.edit(scheme=scheme))
    with pytest.raises(ValueError, match="labels: expected at least 2, of leaves and of others, got 1"):
        recipe.edit(labels=1).task.check(recipe.edit(labels=1))
    with pytest.raises(ValueError, match="vocabulary: expected 0, or at least the 20 of the data, got 7"):
        ready(vocabulary=7)


@pytest.mark.slow
def test_a_short_training_mirrors_trees():
    recipe, data = ready(batch=32, samples=1000, depth=2, labels=6, model_dim=32)
    figures = data.measure(trained(recipe, data, 200, 1e-2), recipe, View()).figures
    assert figures["accuracy"] > 0.9
    assert figures["exact"] > 0.5
