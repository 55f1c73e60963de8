"""Test trees: the group, its parsers, and the operators of nodes."""

import gzip
import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import close, each, gradients, same_everywhere
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from isopos.ops import tree as ops
from isopos.positions import Line, Product, Ring, Tree, forest, grid, product, sequence, tree, tree_labels
from isopos.trees import depths

BRANCHES = 3
TREEBANK = Path(__file__).parents[2] / "shared" / "data" / "trees" / "sst"
SHIFT = tree([[], [[], [], []]])  # its last node is the word (1, 2)
GROUPS = [
    Tree(BRANCHES),
    Product((Line(), Tree(BRANCHES))),
    Product((Tree(1), Product((Ring(4), Tree(BRANCHES))))),
]


@st.composite
def nodes(draw, most=12, roots=True):
    """Draw a tree or forest of a few nodes, with rows in random order."""
    n = draw(st.integers(1, most))
    parents = [-1, *(draw(st.integers(-1 if roots else 0, i - 1)) for i in range(1, n))]
    row = draw(st.permutations(range(n)))
    out = torch.full((n, 2), -1)
    for i, parent in enumerate(parents):
        if parent >= 0:
            out[row[i]] = torch.tensor([row[parent], draw(st.integers(0, BRANCHES - 1))])
    return out


def generators(heads=2, features=4, branches=BRANCHES, **options):
    return torch.linalg.qr(torch.randn(heads, branches, features, features, dtype=torch.float64))[0].requires_grad_(
        **options
    )


def words(x):
    """The branches from the root to each node."""
    rows, found = x.tolist(), []
    for parent, branch in rows:
        word = []
        while parent >= 0:
            word.insert(0, branch)
            parent, branch = rows[parent]
        found.append(tuple(word))
    return found


def steps(x, y):
    """Distances between nodes, by breadth-first search in one tree that contains them all."""
    every = {word[:i] for word in words(x) + words(y) for i in range(len(word) + 1)}
    edges = {word: {word[:-1]} if word else set() for word in every}
    for word in every - {()}:
        edges[word[:-1]].add(word)
    found = []
    for start in words(x):
        reached, queue = {start: 0}, deque([start])
        while queue:
            here = queue.popleft()
            for there in edges[here] - reached.keys():
                reached[there] = reached[here] + 1
                queue.append(there)
        found.append([reached[word] for word in words(y)])
    return found


def chain(n, branch=0):
    rows = torch.arange(n)
    return torch.stack((rows - 1, torch.where(rows > 0, branch, -1)), -1)


def last(x, t):
    """The words of the last rows."""
    return words(x)[len(x) - t :]


# operators


@given(nodes())
def test_operators_are_products_along_words(x):
    generator = generators()
    for row, word in enumerate(words(x)):
        expected = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
        for branch in word:
            expected = expected @ generator[:, branch]
        close(ops.path_naive(generator, x)[:, row], expected)
        close(ops.path(generator, x)[:, row], expected)


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@given(x=nodes(), heads=st.integers(1, 3))
def test_path_is_its_definition_with_gradients(size, x, heads):
    generator, chunk = generators(heads, requires_grad=True), ops.CHUNK
    try:
        ops.CHUNK = size
        same_everywhere(ops.path(generator, x), ops.path_naive(generator, x), [generator])
    finally:
        ops.CHUNK = chunk


@each("batch", [(), (3,), (2, 3), (0,), (2, 0)])
@each("n", [0, 1, 9])
@each("dtype", [torch.int64, torch.int32])
def test_batches_of_trees(batch, n, dtype):
    generator, x = generators(3, 2, requires_grad=True), Tree(BRANCHES).random(*batch, n).to(dtype)
    out = ops.path(generator, x)
    assert out.shape == (*batch, 3, n, 2, 2)
    same_everywhere(out, ops.path_naive(generator, x), [generator])
    for at in np.ndindex(*batch):
        close(out[at], ops.path(generator, x[at]))


def test_long_chains():
    generator = generators(1, 4, 1, requires_grad=True)
    x = chain(5000)
    out = ops.path(generator, x)
    close(out[0, -1], torch.linalg.matrix_power(generator[0, 0], 4999))
    assert gradients(out, [generator])[0].isfinite().all()
    assert depths(x).tolist() == list(range(5000))
    assert Tree(1).distance(x[-1:].new_tensor([[-1, -1]]), x).tolist() == [list(range(5000))]


def test_derivatives():
    generator, x = generators(2, 2, requires_grad=True), Tree(BRANCHES).random(2, 5)
    assert torch.autograd.gradcheck(lambda g: ops.path(g, x), generator)
    assert torch.autograd.gradcheck(lambda g: ops.path_naive(g, x), generator)
    assert torch.autograd.gradgradcheck(lambda g: ops.path_naive(g, x), generator)
    (once,) = torch.autograd.grad(ops.path(generator, x).square().sum(), generator, create_graph=True)
    with pytest.raises(RuntimeError, match=r"tree_path_backward\.default but no autograd"):
        once.sum().backward()


def test_a_gradient_in_any_layout():
    generator, x = generators(2, 4, requires_grad=True), Tree(BRANCHES).random(2, 7)
    for reduce in (torch.sum, lambda w: (w.mT.contiguous().mT * w.detach()).sum(), lambda w: w[:, :, 3].sum()):
        fast, slow = (torch.autograd.grad(reduce(f(generator, x)), generator)[0] for f in (ops.path, ops.path_naive))
        close(fast, slow)


def test_operators_are_registered():
    x, generator = Tree(BRANCHES).random(2, 6), generators(2, 3, requires_grad=True)
    torch.library.opcheck(ops._path, (generator, x))
    out = ops.path(generator, x).detach()
    torch.library.opcheck(ops._path_backward, (torch.randn_like(out), out, generator.detach(), x))


def test_one_graph():
    def attend(generator, x, y):
        Tree(BRANCHES).check(x)
        near = Tree(BRANCHES).distance(x, y) < 3
        return torch.where(near[:, None], ops.path(generator, x).flatten(-2) @ ops.path(generator, y).flatten(-2).mT, 0)

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    generator = generators(2, 3, requires_grad=True)
    for n in (6, 9):
        x, y = Tree(BRANCHES).random(2, n), Tree(BRANCHES).random(2, n + 1)
        fast, slow = (f(generator, x, y) for f in (compiled, attend))
        close(fast, slow)
        close(*(torch.autograd.grad(out.square().sum(), generator)[0] for out in (fast, slow)))


def test_autocast_does_not_reach_operators():
    generator, x = generators(2, 4).float().requires_grad_(), Tree(BRANCHES).random(20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.path(generator, x)
        (grad,) = torch.autograd.grad(out.square().sum(), generator)
    assert out.dtype == torch.float32
    assert torch.equal(out, ops.path(generator, x))
    assert torch.equal(grad, torch.autograd.grad(ops.path(generator, x).square().sum(), generator)[0])


def test_path_refuses_invalid_trees():
    with pytest.raises(ValueError, match="branches from 0 to 2, one per generator, got 3"):
        ops.path(generators(), torch.tensor([[-1, -1], [0, 3]]))
    with pytest.raises(ValueError, match="branches from 0 to 2, one per generator, got -1"):
        ops.path(generators(), torch.tensor([[-1, -1], [0, 0], [1, -1]]))
    for function in (ops.path, ops.path_naive):
        with pytest.raises(ValueError, match=r"parents from 0 to 1, got \[2, 0\] in row 1 of sample 0"):  # a row of sample 1
            function(generators(), torch.tensor([[[-1, -1], [2, 0]], [[-1, -1], [0, 0]]]))
        with pytest.raises(ValueError, match=r"got row \d, its own ancestor"):
            function(generators(), torch.tensor([[1, 0], [0, 0]]))


# the group


@given(nodes(), nodes())
def test_only_shifts_from_the_left_keep_scores(x, y):
    generator, group = generators(), Tree(BRANCHES)
    here = ops.path(generator, x).mT[..., :, None, :, :] @ ops.path(generator, y)[..., None, :, :, :]
    x_there, y_there = group.shift(SHIFT, x), group.shift(SHIFT, y)
    there = [ops.path(generator, z)[..., -len(at) :, :, :] for z, at in ((x_there, x), (y_there, y))]
    close(there[0].mT[..., :, None, :, :] @ there[1][..., None, :, :, :], here)
    assert torch.equal(group.distance(x_there, y_there)[-len(x) :, -len(y) :], group.distance(x, y))


def test_shifts_from_the_right_change_scores():
    generator, x = generators(), tree("(a (b c) d)")
    operators, shift = ops.path(generator, x), ops.path(generator, SHIFT)[:, -1:]
    scores = [w.mT[..., :, None, :, :] @ w[..., None, :, :, :] for w in (operators, operators @ shift)]
    assert (scores[0] - scores[1]).abs().max() > 0.1


@given(st.data())
def test_products_are_words_joined_and_operators_multiplied(data):
    n = data.draw(st.integers(1, 6))
    x, y = (data.draw(nodes(most=n).filter(lambda z: len(z) == n)) for _ in range(2))
    group, generator = Tree(BRANCHES), generators()
    xy = group.compose(x, y)
    group.check(xy)
    assert last(xy, n) == [a + b for a, b in zip(words(x), words(y), strict=True)]
    close(ops.path(generator, xy)[:, -n:], ops.path(generator, x) @ ops.path(generator, y))


@each("batch", [(), (3,), (2, 3)])
@each("group", GROUPS, ids=str)
def test_products_form_a_monoid(group, batch):
    x, y, z = (group.random(*batch, 7) for _ in range(3))

    def same(a, b):
        return bool((group.distance(a, b)[..., -7:, -7:].diagonal(0, -2, -1) == 0).all())

    left, right = group.compose(group.compose(x, y), z), group.compose(x, group.compose(y, z))
    for element in (x, left, right, group.origin(*batch, 7)):
        group.check(element)
    assert same(left, right)
    assert not same(left, group.compose(x, z))
    assert same(group.compose(x, group.origin(7)), x)
    assert same(group.compose(group.origin(7), x), x)
    assert same(group.compose(x, group.origin(1)), x)
    assert same(group.compose(group.origin(1), x), x)
    with pytest.raises(ValueError, match="downward paths"):
        group.inverse(x)
    with pytest.raises(ValueError, match="downward paths"):
        group.compose(group.inverse(x), y)


@each("group", GROUPS, ids=str)
def test_a_shift_is_a_product_with_one_element(group):
    s, x = group.random(2, 1, 5), group.random(3, 7)
    repeated = torch.cat((s, s[..., -1:, :].expand(2, 1, 6, -1)), -2)
    shifted, composed = group.shift(s, x), group.compose(repeated, x)
    group.check(shifted)
    assert shifted.shape == (2, 3, 12, group.columns)
    assert (group.distance(shifted, composed)[..., -7:, -7:].diagonal(0, -2, -1) == 0).all()


def test_other_groups_shift_too():
    assert Line().shift(sequence(4), sequence(2)).tolist() == [[3], [4]]
    assert Product((Line(), Ring(3))).shift(grid(2, 3), grid(1, 2)).tolist() == [[1, 2], [1, 0]]


def test_products_without_nodes():
    group = Product((Tree(2), Line()))
    assert group.compose(group.origin(0), group.origin(0)).shape == (0, 3)
    assert Tree(2).compose(Tree(2).origin(3, 0), Tree(2).origin(0)).shape == (3, 0, 2)


@given(nodes(), nodes())
def test_distance_counts_edges(x, y):
    assert Tree(BRANCHES).distance(x, y).tolist() == steps(x, y)


@given(nodes(), nodes(), st.integers(0, 5))
def test_distance_does_not_see_padding_or_other_rows(x, y, more):
    group = Tree(BRANCHES)
    padded = torch.nn.functional.pad(y, (0, 0, 0, more), value=-1)
    distance = group.distance(x, padded)
    assert distance.dtype == torch.int64
    assert torch.equal(distance[:, : len(y)], group.distance(x, y))
    assert torch.equal(group.distance(x, forest([y, x]))[:, : len(y)], distance[:, : len(y)])


def test_distance_of_batches():
    group = Tree(BRANCHES)
    x, y = group.random(2, 1, 5), group.random(3, 8).int()
    distance = group.distance(x, y)
    assert distance.shape == (2, 3, 5, 8)
    for i, j in np.ndindex(2, 3):
        assert distance[i, j].tolist() == steps(x[i, 0], y[j])
    assert group.distance(group.origin(0), y).shape == (3, 0, 8)
    assert group.distance(group.origin(0), group.origin(0)).shape == (0, 0)


@each("group", GROUPS, ids=str)
def test_distance_is_a_metric_kept_by_shifts(group):
    x, shift = group.random(3, 20), group.random(6)
    distance = group.distance(x, x)
    assert torch.equal(distance, distance.mT)
    assert (distance[..., :, None, :] <= distance[..., :, :, None] + distance[..., None, :, :]).all()
    there = group.shift(shift, x)
    assert torch.equal(group.distance(there, there)[..., -20:, -20:], distance)


def test_distance_is_registered():
    group = Tree(BRANCHES)
    torch.library.opcheck(torch.ops.isopos.tree_distance.default, (group.random(2, 5), group.random(2, 7)))


def test_random_trees():
    group = Tree(BRANCHES)
    x = group.random(200, 30)
    group.check(x)
    assert x.shape == (200, 30, 2)
    assert ((x == -1).all(-1).sum(-1) == 1).all()
    assert (x[..., 0] > torch.arange(30)).any()  # children before parents
    deepest = depths(x).amax(-1)
    assert deepest.min() < 8
    assert deepest.max() > 22
    assert set(x[..., 1].flatten().tolist()) == {-1, 0, 1, 2}
    assert torch.equal(*(group.random(9, generator=torch.Generator().manual_seed(1)) for _ in range(2)))
    assert group.random(0).shape == (0, 2)
    assert group.random(1).tolist() == [[-1, -1]]


@given(nodes())
def test_depths_are_lengths_of_words(x):
    assert depths(x).tolist() == [len(word) for word in words(x)]
    assert depths(x[None, None]).shape == (1, 1, len(x))


def test_groups_are_values():
    assert Tree(2) == Tree(2) != Tree(3)
    assert hash(Product((Tree(2), Line()))) == hash(Product((Tree(2), Line())))
    assert Product((Line(), Tree(2))).origin(2).tolist() == [[0, -1, -1]] * 2


@each(
    ("rows", "message"),
    [
        ([[-1, -1], [2, 0]], r"parents from 0 to 1, got \[2, 0\] in row 1"),
        ([[-1, -1], [0, 2]], r"branches from 0 to 1, got \[0, 2\] in row 1"),
        ([[-1, 0]], r"roots \(-1, -1\), got \[-1, 0\] in row 0"),
        ([[-1, -1], [0, -1]], r"roots \(-1, -1\), got \[0, -1\] in row 1"),
        ([[-2, -2]], r"roots \(-1, -1\), got \[-2, -2\]"),
        ([[-1, -1], [1, 0]], "got row 1, its own ancestor"),
        ([[-1, -1], [2, 0], [3, 0], [1, 0]], "got row [123], its own ancestor"),
        ([[[-1, -1], [0, 0]], [[-1, -1], [0, 7]]], "in row 1 of sample 1"),
        ([[[-1, -1], [0, 0]], [[-1, -1], [1, 1]]], "got row 1 of sample 1, its own ancestor"),
        ([[-1, -1, -1]], r"expected \[\*b t 2\]"),
        ([[-1.0, -1.0]], "expected integers"),
    ],
)
def test_what_is_no_tree(rows, message):
    with pytest.raises(ValueError, match=message):
        Tree(2).check(torch.tensor(rows))
    with pytest.raises(ValueError, match="positions: "):
        Product((Line(), Tree(2))).check(torch.nn.functional.pad(torch.tensor(rows), (1, 0)))


@given(nodes(roots=False), st.data())
def test_any_cycle_is_found_and_named(x, data):
    root = words(x).index(())
    x[root] = torch.tensor([data.draw(st.integers(0, len(x) - 1)), 0])
    with pytest.raises(ValueError, match="its own ancestor") as error:
        depths(x)
    row = start = int(re.search(r"row (\d+)", str(error.value))[1])
    for _ in range(len(x)):
        row = int(x[row, 0])
        if row == start:
            return
    pytest.fail(f"row {start} is not on the cycle")


def test_rows_that_hold_nothing_are_no_tree():
    with pytest.raises(ValueError, match="positions: expected rows of trees with values, got a tensor on the meta device"):
        Tree(2).check(torch.zeros(3, 2, dtype=torch.int64, device="meta"))


def test_a_valid_tree_passes():
    Tree(2).check(torch.tensor([[1, 0], [-1, -1], [0, 1]]))
    Tree(2).check(pad_sequence([tree([[], [[]]]), tree([])], batch_first=True, padding_value=-1).int())
    with pytest.raises(ValueError, match="branches: expected an integer of at least 1, got 0"):
        Tree(0)


# builders and readers


@given(nodes(), nodes(most=4), st.integers(1, 3))
def test_product_maps_parents(x, y, n):
    group = Product((Tree(BRANCHES), Line(), Product((Ring(2), Tree(BRANCHES)))))
    inner = product(sequence(2), y, group=Product((Ring(2), Tree(BRANCHES))))
    whole = product(x, sequence(n), inner, group=group)
    group.check(whole)
    found = list(zip(words(whole[:, :2]), whole[:, 2:4].tolist(), words(whole[:, 4:]), strict=True))
    assert found == [(a, [i, j], b) for a in words(x) for i in range(n) for j in range(2) for b in words(y)]
    for (a, rest, b), outer, inner_ in zip(found, whole[:, 0].tolist(), whole[:, 4].tolist(), strict=True):
        assert outer < 0 or found[outer] == (a[:-1], rest, b)  # a parent differs in its own part only
        assert inner_ < 0 or found[inner_] == (a, rest, b[:-1])
    assert product(x, sequence(0), inner, group=group).shape == (0, 6)


@given(nodes(), st.integers(0, 3))
def test_forests_and_batches_keep_words(x, more):
    trees = [x, Tree(BRANCHES).random(more), chain(4)]
    assert words(forest(trees)) == [word for nodes in trees for word in words(nodes)]
    batch = pad_sequence(trees, batch_first=True, padding_value=-1)
    Tree(BRANCHES).check(batch)
    generator = generators(2, 2)
    for sample, nodes_ in zip(ops.path(generator, batch), trees, strict=True):
        close(sample[:, : len(nodes_)], ops.path(generator, nodes_))
    close(torch.cat([ops.path(generator, nodes_) for nodes_ in trees], 1), ops.path(generator, forest(trees)))
    assert forest([]).shape == (0, 2)
    assert torch.equal(forest(iter(trees)), forest(trees))


@each(
    "source",
    [
        [-1, 0, 0, 1, 1],
        (-1, 0, 0, 1, 1),
        [np.int64(i) for i in (-1, 0, 0, 1, 1)],
        torch.tensor([-1, 0, 0, 1, 1], dtype=torch.int16),
        np.array([-1, 0, 0, 1, 1]),
    ],
)
def test_parents(source):
    assert tree(source).tolist() == [[-1, -1], [0, 0], [0, 1], [1, 0], [1, 1]]
    with pytest.raises(ValueError, match="carry no labels"):
        tree_labels(source)


def test_parents_in_any_order():
    assert tree([2, -1, 1, 2, 2, -1]).tolist() == [[2, 0], [-1, -1], [1, 0], [2, 1], [2, 2], [-1, -1]]


def test_lists():
    source = [["a", ("b", 3)], [], {"c"}]
    assert tree(source).tolist() == [[-1, -1], [0, 0], [1, 0], [1, 1], [3, 0], [3, 1], [0, 1], [0, 2]]
    assert tree_labels(source) == [None, None, "a", None, "b", 3, None, {"c"}]
    assert tree([]).tolist() == [[-1, -1]]
    assert tree([[1, 2], 3]).tolist() == [[-1, -1], [0, 0], [1, 0], [1, 1], [0, 1]]
    assert tree([True, False]).tolist() == [[-1, -1], [0, 0], [0, 1]]
    shared = []
    assert tree([shared, shared]).tolist() == [[-1, -1], [0, 0], [0, 1]]


def test_text():
    source = "\n(S (NP the\tcat)(VP sat (PP on(NP mats))) .) "
    assert tree_labels(source) == ["S", "NP", "the", "cat", "VP", "sat", "PP", "on", "NP", "mats", "."]
    assert words(tree(source)) == [
        *((), (0,), (0, 0), (0, 1)),
        *((1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0), (2,)),
    ]
    assert tree("(a)").tolist() == tree("a").tolist() == [[-1, -1]]


def test_deep_sources():
    text, lists = "(a " * 10_000 + "b" + ")" * 10_000, []
    for _ in range(9_999):
        lists = [lists]
    assert torch.equal(tree(text), chain(10_001))
    assert torch.equal(tree(lists), chain(10_000))
    assert torch.equal(tree(list(range(-1, 9_999))), chain(10_000))
    while lists:  # freed from the outside, without recursion
        lists = lists[0]


def write(x, labels):
    """The s-expression of a tree with rows in preorder."""
    children = [[] for _ in labels]
    for row, (parent, _) in enumerate(x.tolist()):
        if parent >= 0:
            children[parent].append(row)

    def text(row):
        return f"({' '.join([labels[row], *map(text, children[row])])})" if children[row] else labels[row]

    return text(0)


def test_a_treebank():
    if not TREEBANK.exists():
        pytest.skip(f"no treebank in {TREEBANK}")
    lines = (TREEBANK / "dev.txt").read_text(encoding="utf-8").splitlines()
    with gzip.open(TREEBANK / "train.txt.gz", "rt", encoding="utf-8") as file:
        lines += [next(file).rstrip("\n") for _ in range(200)]
    trees = [tree(line) for line in lines]
    assert len(trees) == 1301
    for line, nodes_ in zip(lines, trees, strict=True):
        labels = tree_labels(line)
        Tree(2).check(nodes_)
        assert write(nodes_, labels) == line
        parents = nodes_[:, 0].tolist()
        assert [label for row, label in enumerate(labels) if row not in parents] == re.findall(r"([^\s()]+)\)", line)
    batch = pad_sequence(trees[:8], batch_first=True, padding_value=-1)
    distance = Tree(2).distance(batch, batch)
    for i in range(8):
        n = len(trees[i])
        assert distance[i, :n, :n].tolist() == steps(trees[i], trees[i])
    generator = generators(2, 4, 2)
    close(ops.path(generator, batch), ops.path_naive(generator, batch))


@each("read", [tree, tree_labels])
@each(
    ("source", "message"),
    [
        ("", "empty text"),
        (" \n", "empty text"),
        ("(a (b)", r"\( at 0 that nothing closes"),
        ("(a (b c", r"\( at 3 that nothing closes"),
        ("(a b))", r"\) at 5 that closes nothing"),
        (")", r"\) at 0 that closes nothing"),
        ("(a) (b)", "another at 4"),
        ("a b", "another at 2"),
        ("()", r"label after \(, got \) at 1"),
        ("(a ( ))", r"label after \(, got \) at 5"),
        ("((a) b)", r"label after \(, got \( at 1"),
        (5, "got int"),
        ({"a": []}, "got dict"),
        (torch.zeros(2, 2, dtype=torch.int64), r"integers \[n\], got \[2, 2\]"),
        (torch.zeros(2), "got .* of torch.float32"),
        (np.zeros(2, dtype=bool), "got .* of torch.bool"),
        (torch.tensor(3), r"integers \[n\]"),
    ],
)
def test_bad_sources(read, source, message):
    with pytest.raises(ValueError, match=message):
        read(source)


@each(
    ("call", "message"),
    [
        (lambda: tree([-1, 2]), "rows from 0 to 1 as parents, got 2 in row 1; a list of integers"),
        (lambda: tree([-2, 0]), "got -2 in row 0"),
        (lambda: tree([1, 0]), "expected a root"),
        (lambda: tree(torch.empty(0, dtype=torch.int64)), "expected a root"),
        (lambda: tree([-1, 2, 1]), "got row [12], its own ancestor"),
        (lambda: tree([-1, 1]), "got row 1, its own ancestor"),
        (lambda: forest([torch.zeros(3)]), r"trees \[n 2\] of integers, as isopos.tree reads them, got \[3\]"),
        (lambda: forest([torch.zeros(3, 2)]), "of torch.float32"),
        (lambda: forest([Tree(2).random(2, 3)]), r"got \[2, 3, 2\]"),
        (lambda: forest([torch.tensor([[-1, -1], [2, 0]]), tree([[]])]), "expected parents below 2, .* got 2"),
        (lambda: product(sequence(2), tree([])), r"got \(-1, -1\), a tree's root, in part 1; pass group=Product"),
        (lambda: product(product(tree([]), sequence(2), group=Product((Tree(1), Line()))), sequence(2)), "in part 0; pass"),
        (lambda: product(tree([]), group=Product((Tree(1), Line()))), "expected 2 parts .*, got 1"),
        (lambda: product(sequence(2), tree([[]]) + 1, group=Product((Line(), Tree(1)))), "positions: "),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
