"""Test tree classification: equivalent formats, errors with their locations, batches on trees and lines, and deep trees."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isopos.lab.data import treebank
from isopos.lab.data.sources import find_source
from isopos.lab.data.treebank import NODE, loads, tree_text
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.task import View
from isopos.lab.tasks.trees import TreeClasses
from isopos.positions import Tree, tree, tree_labels

pytestmark = pytest.mark.usefixtures("own_cache")
SENTIMENT = Path(__file__).resolve().parents[2] / "shared" / "data" / "trees" / "sst"
LINE, TREE = "rope", "ape-tree"
SPLITS = ("train", "validation", "test")


def nested(random, depth=0):
    if depth and (depth == 4 or random.random() < 0.5):
        return str(random.choice(["a", "b", "c", "d"]))
    return [nested(random, depth + 1) for _ in range(random.integers(1, 4))]


def samples(count=80, seed=0):
    """Distinct nested lists of letters. The first letter determines the class."""
    random, found = np.random.default_rng(seed), {}
    while len(found) < count:
        one = nested(random)
        first = json.dumps(one).replace("[", "").replace('"', "")[0]
        found[json.dumps(one)] = (one, "1" if first in "ab" else "0")
    return [*found.values()]


def lisp(value, label):
    """Labels 2 and 3 at every node, as in the Stanford Sentiment Treebank. A word is the only child of its node."""
    return (
        f"({label} {value})"
        if isinstance(value, str)
        else f"({label} {' '.join(lisp(one, '23'[n % 2]) for n, one in enumerate(value))})"
    )


def unary(value):
    """Replace each node with a single word by the word."""
    if isinstance(value, str):
        return value
    return value[0] if len(value) == 1 and isinstance(value[0], str) else [unary(one) for one in value]


def read(bank, split):
    """The s-expression and the class of every tree."""
    found = []
    for n, label in enumerate(bank.labels(split)):
        tokens, nodes = bank.tree(split, n)
        found.append((tree_text([bank.words[token] for token in tokens], nodes), bank.classes[label]))
    return found


def every(bank):
    return sorted(one for split in SPLITS for one in read(bank, split))


def ready(data, scheme=LINE, **edits):
    sizes = {"batch": 8, "layers": 1, "model_dim": 16, "heads": 2}
    recipe = Recipe(task=TreeClasses(data=str(data))).edit(scheme=scheme, **sizes | edits)
    recipe.task.check(recipe)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


def test_formats_agree(tmp_path):
    rows = [(unary(value), label) for value, label in samples()]
    rows = [row for row in rows if not isinstance(row[0], str)]
    shown = [
        (json.dumps(value).replace("[", "(").replace("]", ")").replace(",", "").replace('"', ""), label)
        for value, label in rows
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"label": int(label), "tree": value}) + "\n" for value, label in rows)
    )
    (tmp_path / "b.txt").write_text("".join(lisp(value, label) + "\n" for value, label in rows))
    lists = treebank.load_trees(str(tmp_path / "a.jsonl"))
    lines = treebank.load_trees(str(tmp_path / "b.txt"))
    assert sorted(every(lists)) == sorted(shown)
    assert sorted(label for _, label in every(lines)) == sorted(label for _, label in rows)
    assert {words for words, _ in every(lines)} == {words for words, _ in shown}
    assert lists.words[:2] == lines.words[:2] == (NODE, "<unk>")
    assert lists.branches == lines.branches == 3


def test_trees_that_are_equal_for_a_model_are_in_one_split(tmp_path):
    """Whatever the labels that it does not see, and the white space."""
    leaves = [tuple(f"{m:07b}") for m in range(120)]  # every word is in train
    lines = [f"({n} " + " ".join(f"({n + 1} {word})" for word in words) + ")" for words in leaves for n in range(3)]
    table = ["label\ttree", *(f"{n}\t(and{' ' * n}{' '.join(words)})" for words in leaves for n in (1, 2))]
    for path, rows in ((tmp_path / "a.txt", lines), (tmp_path / "b.tsv", table)):
        path.write_text("\n".join(rows) + "\n")
        data = treebank.load_trees(str(path))
        splits = [{text for text, _ in read(data, split)} for split in ("train", "validation", "test")]
        assert all(splits)
        assert sum(map(len, splits)) == len(set.union(*splits)) == 120


def test_labels_of_inner_nodes_are_hidden_or_seen(tmp_path):
    folder = tmp_path / "trees"  # beside the cache
    folder.mkdir()
    (folder / "train.txt").write_text("(3 (2 not) (4 (1 so) (0 bad)))\n(2 x)\n" * 2)
    (folder / "dev.txt").write_text("(2 (3 never) (4 (1 so) (0 bad)))\n")
    hidden, seen = treebank.load_trees(str(folder)), treebank.load_trees(str(folder), inner=True)
    assert read(hidden, "train")[:2] == [("(not (so bad))", "3"), ("x", "2")]
    assert read(hidden, "validation") == [("(<unk> (so bad))", "2")]
    assert read(seen, "train")[:2] == [("((2 not) (4 (1 so) (0 bad)))", "3"), ("(x)", "2")]
    (tmp_path / "c").mkdir()
    (tmp_path / "c.tsv").write_text("label\ttree\n" + "yes\t(and T (not F))\nno\t(or F F)\n" * 9)
    (tmp_path / "d.tsv").write_text("yes\t(and T (not F))\nno\t(or F F)\n" * 9)
    for name in ("c.tsv", "d.tsv"):
        (tmp_path / name).rename(tmp_path / "c" / name)
    rows = [
        one.row
        for name in ("c.tsv", "d.tsv")
        for one in treebank._trees(find_source(str(tmp_path / "c" / name)), "tree", "label", False)
    ]
    assert [row.label for row in rows] == ["yes", "no"] * 18
    assert {row.values[0] for row in rows} == {"(and T (not F))", "(or F F)"}


@given(st.recursive(st.text('ab\\" [{', max_size=3), lambda some: st.lists(some, max_size=3), max_leaves=12), st.booleans())
def test_json_is_read_as_json_does(value, spaced):
    row = {"tree": value, "label": {"x": [1.5, True, None]}}
    found = loads(json.dumps(row, indent=1 if spaced else None).replace("\n", " "))
    assert found == {"tree": value, "label": {"x": ["1.5", "true", "null"]}}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[",
        "[1",
        "[1 2]",
        "[1,]",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        '{"a" 1}',
        "{1: 2}",
        "]",
        "[}",
        "1 2",
        "[1]]",
        "[a]",
        '["a',
        "[,]",
    ],
)
def test_what_is_no_json_is_refused_with_its_column(line):
    with pytest.raises(json.JSONDecodeError):
        json.loads(line)
    with pytest.raises(json.JSONDecodeError) as error:
        loads(line)
    assert 0 <= error.value.pos <= len(line)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            "(1 a b)\n(1 (a) b\n",
            r"line 2, column 1: expected balanced parentheses, got \( that nothing closes; repair",
        ),
        ("a.txt", "(1 a b)\n\n(1 a b))\n", r"line 3, column 8: expected balanced parentheses, got \) that closes nothing"),
        ("a.txt", "(1 a ( b))\n(1 a ())\n", r"line 2, column 7: expected a label after \(, got \)"),
        ("a.txt", "(1 a) (0 b)\n", r"line 1, column 7: expected one expression, got another"),
        ("a.txt", "3\n", r"line 1, column 1: expected a label and a tree, as \(label child \.\.\.\), got '3' alone"),
        ("a.tsv", "1\t(a b\n", r"line 1, column 3: expected balanced parentheses"),
        ("a.tsv", "label\ttrees\n1\t(a b)\n", r"line 1: expected a column tree, got label, trees"),
        ("a.tsv", "\t(a b)\n", r"line 1: expected a label, got none"),
        ("a.jsonl", '{"label": 1, "tree": [["a", "b"]}\n', r"line 1, column 33: expected JSON, got none: expected no }"),
        ("a.jsonl", '{"label": 1, "tree": 7}\n', r"line 1, column 1: expected an s-expression or nested lists, got 7"),
        ("a.jsonl", '{"label": null, "tree": ["a"]}\n', r"line 1: expected a label, got none"),
        ("a.jsonl", '{"tree": ["a"]}\n', r"line 1: expected a field label, got tree"),
        ("a.txt", "\n", r"expected trees, an s-expression a line or a label and a tree, got none"),
        ("a.txt", "(1 \xff)\n", r"line 1: expected UTF-8, got the byte 0xff"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"data: .*{message}"):
        treebank.load_trees(str(tmp_path / name))


def test_a_class_that_train_lacks_and_numbers_that_do_not_fit(tmp_path):
    (tmp_path / "train.txt").write_text("(1 a b)\n(0 b a c)\n" * 9)
    (tmp_path / "dev.txt").write_text("(1 a b)\n(2 b a)\n")
    with pytest.raises(
        ValueError, match=r"dev\.txt, line 2: expected a class that train has, too, got '2', which is in val"
    ):
        treebank.load_trees(str(tmp_path))
    (tmp_path / "dev.txt").write_text("(1 a b)\n")
    for edits, message in (
        ({"branches": 2}, "branches: expected 0, or at least the 3 of the data, got 2"),
        ({"classes": 5}, "classes: expected 0, or the 2 of the data, got 5"),
        ({"vocabulary": 1}, "vocabulary: expected 0, or 2 at least, got 1"),
        ({"scheme": "ape-tree:branches=2"}, "branches: expected at most the 2 of ape-tree:branches=2, got trees with 3"),
        (
            {"scheme": "learned:length=2"},
            "longest: expected at most 2, for which learned:length=2 has positions, got 4",
        ),
        ({"scheme": "ape-grid"}, "expected positions in a tree or on a line"),
        ({"longest": 2}, "data: expected trees for train, got none; 19 are larger: raise --longest"),
        ({"batch": 100}, "batch: expected at most the 18 trees, got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            ready(tmp_path, **edits)
    _, data = ready(tmp_path, longest=3, batch=4)
    assert "9 + 1 + 0 trees of 2 classes, 5 different tokens, 9 larger ones left out" in data.summary
    recipe, data = ready(tmp_path, vocabulary=3)
    assert data.dataset.words == (NODE, "<unk>", "a")
    assert recipe.task.vocabulary == 3


@pytest.mark.parametrize("scheme", [LINE, TREE])
def test_batches_have_positions_of_trees_or_of_lines_and_the_same_tokens(tmp_path, scheme):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"label": label, "tree": value}) + "\n" for value, label in samples(150))
    )
    recipe, data = ready(tmp_path, scheme)
    data.save(tmp_path)
    assert json.loads((tmp_path / "words.json").read_text()) == [NODE, "<unk>", *data.dataset.words[2:]]
    for step in range(3):
        tokens, at, mask, labels = data.batch(recipe, step)
        known = {said: label for said, label in read(data.dataset, "train")}
        for n, (row, own, label) in enumerate(zip(tokens, mask, labels, strict=True)):
            words = [data.dataset.words[token] for token in row[own]]
            if scheme == LINE:
                assert at[:, 0].tolist() == list(range(tokens.shape[1]))
                continue
            said = tree_text(words, at[n][own].numpy())
            assert known[said] == data.dataset.classes[label]
            assert at[n][own].tolist() == tree(said.replace("(", "( x ")).tolist() or len(words) == 1
            assert (at[n][~own] == -1).all()


def test_a_chain_of_10000_nodes_is_read_learned_and_shown(tmp_path):
    deep = 10_000
    chain = {
        "txt": "(1 " * deep + "a" + ")" * deep,
        "jsonl": json.dumps({"label": 1, "tree": "X"}).replace('"X"', "[" * deep + '"a"' + "]" * deep),
    }
    few = {"txt": "(1 a b)\n(0 b a)\n", "jsonl": '{"label": 1, "tree": ["a", "b"]}\n{"label": 0, "tree": ["b", "a"]}\n'}
    for suffix, line in chain.items():
        (tmp_path / f"train.{suffix}").write_text(few[suffix] * 4 + line + "\n")
        (tmp_path / f"dev.{suffix}").write_text(few[suffix] + line + "\n")
        recipe, data = ready(tmp_path, batch=1, inner=suffix == "txt", scheme=TREE)
        assert recipe.task.longest == deep + 1
        assert data.sizes["validation"].tolist() == [3, 3, deep + 1]
        tokens, nodes, *_ = batch = data.tensors("validation", np.array([2]), recipe)
        Tree(2).check(nodes)
        assert nodes[0, -1].tolist() == [deep - 1, 0]
        flat = recipe.edit(scheme=LINE)
        shown = data.examples(flat.task.model(flat), flat, 3)[2]["tree"]
        assert shown.startswith("((1 (1 (1 " if suffix == "txt" else "((((((")
        assert len(shown) == 303
        assert tokens.shape == (1, deep + 1)
        data.loss(flat.task.model(flat), batch[0], None, *batch[2:]).backward()
        for one in tmp_path.glob(f"*.{suffix}"):
            one.unlink()


@pytest.mark.slow
def test_a_chain_of_10000_nodes_at_its_positions(tmp_path):
    (tmp_path / "train.txt").write_text("(1 a b)\n(0 b a)\n" * 4)
    (tmp_path / "dev.txt").write_text("(1 " * 10_000 + "a" + ")" * 10_000 + "\n")
    recipe, data = ready(tmp_path, scheme=TREE, inner=True)
    assert np.isfinite(data.score(recipe.task.model(recipe), recipe, View()).figures["nats"])


def test_random_trees_evaluate_to_their_class():
    bank = treebank.load_trees("")
    assert [len(bank.labels(split)) for split in SPLITS] == [5000, 1000, 1000]
    assert all(abs(bank.labels(split).mean() - 0.5) < 0.01 for split in SPLITS)
    assert len({said for split in SPLITS for said, _ in read(bank, split)}) == 7000
    for said, label in read(bank, "test")[::4]:
        labels, rows = tree_labels(said), tree(said)[:, 0].tolist()
        values = {}
        for row in reversed(range(len(rows))):
            below = [values[child] for child in range(row + 1, len(rows)) if rows[child] == row]
            name = labels[row]
            values[row] = {"T": True, "F": False, "and": all(below), "or": any(below), "not": not all(below)}[name]
        assert label == str(values[0]).lower()


@pytest.mark.skipif(not SENTIMENT.exists(), reason="the sentiment trees lie beside this repository only")
@pytest.mark.slow
def test_the_sentiment_treebank():
    bank = treebank.load_trees(str(SENTIMENT))
    assert bank.classes == ("0", "1", "2", "3", "4")
    assert [len(bank.labels(split)) for split in SPLITS] == [8544, 1101, 0]
    assert bank.branches == 2
    assert NODE in read(bank, "validation")[0][0] or read(bank, "validation")[0][0].startswith("(")
