"""Test positions of graphs: the eigenvector equation, edge lists, and errors for invalid graphs."""

import itertools
import math

import pytest
import torch
from cases import ATTENTION, HEADS, close, each, inputs

import isopos
from isopos import graph, laws
from isopos.graphs import edges

RANDOM = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [1, 4], [4, 5], [5, 6], [2, 6], [6, 7]])


def laplacian(pairs, n):
    L = torch.zeros(n, n, dtype=torch.float64)
    for a, b in pairs.tolist():
        L[a, b] = L[b, a] = -1
    return L - L.sum(-1).diag()


def test_positions_are_the_lowest_eigenvectors():
    x, L = graph(RANDOM, 4), laplacian(RANDOM, 8)
    assert x.shape == (8, 4)
    assert x.dtype == torch.float64
    values = torch.linalg.eigvalsh(L)[1:5]
    close(L @ x, x * values)
    close(x.mT @ x / 8, torch.eye(4, dtype=torch.float64))
    close(x.sum(0), torch.zeros(4, dtype=torch.float64))
    largest = x.gather(0, x.abs().argmax(0)[None])
    assert (largest > 0).all()


def test_a_path_has_cosines():
    n, x = 9, graph([[i, i + 1] for i in range(8)], 3)
    wave = torch.cos(math.pi * torch.arange(1, 4).double() * (torch.arange(n).double()[:, None] + 0.5) / n) * 2**0.5
    close(x.abs(), wave.abs())


@each("n", range(2, 13))
def test_of_entries_that_tie_the_first_is_positive(n):
    """On a path the ends of every second eigenvector have opposite signs and one magnitude, up to rounding."""
    x = graph([[i, i + 1] for i in range(n - 1)], n - 1)
    wave = torch.cos(math.pi * torch.arange(1, n).double() * (torch.arange(n).double()[:, None] + 0.5) / n)
    ties = wave.abs() > wave.abs().amax(0) - 1e-9
    assert (ties.sum(0) > 1).any()
    first = ties.int().argmax(0)[None]  # of what ties, in the order of nodes
    close(x, wave * wave.gather(0, first).sign() * 2**0.5)


def test_edges_need_neither_order_nor_direction_and_a_small_graph_has_zeros():
    x = graph(RANDOM, 9)
    messy = torch.cat((RANDOM.flip(0, 1), RANDOM[:3], torch.tensor([[2, 2]])))
    assert torch.equal(graph(messy, 9), x)
    assert torch.equal(graph(RANDOM.int(), 9), x)
    assert (x[:, 7:] == 0).all()
    assert (x[:, :7] != 0).any(0).all()


def test_other_numbers_of_nodes_move_positions_along_where_eigenvalues_differ():
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    close(graph(order[RANDOM], 4)[order].abs(), graph(RANDOM, 4).abs())


def test_edges_are_rows_or_columns():
    x = graph(RANDOM, 4)
    assert torch.equal(graph(RANDOM.mT, 4), x)
    assert torch.equal(graph(RANDOM.mT.tolist(), 4), x)
    assert torch.equal(graph([[0], [1]], 1), graph([[0, 1]], 1))


def test_two_edges_are_the_same_graph_by_rows_and_by_columns_where_both_are_connected(tmp_path):
    def position(rows):
        path = tmp_path / "edges.txt"  # whose lines are edges
        path.write_text("".join(f"{a} {b}\n" for a, b in rows))
        try:
            return graph(path, 2)
        except ValueError as error:
            return str(error)

    readings = set()
    for a, b, c, d in itertools.product(range(4), repeat=4):
        rows, columns = position([[a, b], [c, d]]), position([[a, c], [b, d]])
        known = [x for x in (rows, columns) if isinstance(x, torch.Tensor)]
        readings.add(tuple(isinstance(x, torch.Tensor) for x in (rows, columns)))
        assert len(known) < 2 or torch.equal(*known)
        if known:
            assert torch.equal(graph([[a, b], [c, d]], 2), known[0])
    assert len(readings) == 4


def test_a_graph_of_networkx_is_read():
    networkx = pytest.importorskip("networkx", reason="networkx is not installed")
    names = "hgfedcba"
    for kind in (networkx.Graph, networkx.DiGraph, networkx.MultiGraph):
        found = kind()
        found.add_nodes_from(names)
        found.add_edges_from((names[a], names[b]) for a, b in RANDOM.tolist())
        assert torch.equal(graph(found, 4), graph(RANDOM, 4))
    assert torch.equal(graph(networkx.path_graph(5), 2), graph([[i, i + 1] for i in range(4)], 2))
    with pytest.raises(ValueError, match="nodes: expected 5, the number of nodes of the graph, got 6"):
        graph(networkx.path_graph(5), nodes=6)
    with pytest.raises(ValueError, match="expected a connected one, got 1 of 3 nodes"):
        graph(networkx.Graph({0: [1], 2: []}))
    with pytest.raises(ValueError, match=r"expected edges as integers .* got torch.int64 \[0\]"):
        graph(networkx.empty_graph(3))


@each("kind", ATTENTION)
def test_wire_turns_by_differences_of_eigenvectors(kind):
    scheme, x = isopos.wire(8, HEADS, axes=3, attention=kind), graph(RANDOM, 3)
    (q, k, v), w = inputs(t=8), scheme.encoding.frequency.double()
    angle = torch.einsum("hcf,tsc->htsf", w, x[None] - x[:, None])
    a, b = (torch.view_as_complex(z.unflatten(-1, (-1, 2))) for z in (q, k))
    rho = scheme.encoding(x, torch.float64)
    close(rho(q) @ rho(k).mT, torch.einsum("htf,htsf,hsf->hts", a.conj(), torch.exp(1j * angle), b).real)
    y = scheme(q, k, v, x)
    close(scheme(*(z.flip(-2) for z in (q, k, v)), x.flip(0)), y.flip(-2))  # nodes in any order
    assert laws.check(scheme).holds


def test_an_edge_list_is_read(tmp_path):
    path = tmp_path / "edges.txt"
    rows = [f"{a}{' ' if n % 2 else ','}{b}" for n, (a, b) in enumerate(RANDOM.tolist())]
    path.write_text("# a graph\n\n" + " # an edge\n".join(rows) + "\n% end\n", encoding="utf-8-sig")
    assert torch.equal(edges(path), RANDOM)
    assert torch.equal(graph(path, 2), graph(RANDOM, 2))
    assert torch.equal(graph(str(path), 2), graph(RANDOM, 2))
    assert torch.equal(graph(RANDOM.numpy()[::-1], 2), graph(RANDOM, 2))


@each("line", ["0 x", "0", "0 1 2", "-1 2", "1.5 2", "٣ 4"])
def test_a_malformed_line_names_file_and_line(tmp_path, line):
    path = tmp_path / "edges.txt"
    path.write_text(f"0 1\n\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"edges.txt, line 3: expected two numbers of nodes from 0 on, got"):
        graph(path)
    path.write_bytes(b"0 1\n2 \xff\n")
    with pytest.raises(ValueError, match=r"edges.txt, line 2: expected UTF-8, got the byte 0xff"):
        graph(path)
    path.write_text(f"0 1\n1 2\n1 {10**19}\n")
    with pytest.raises(ValueError, match=r"edges.txt, line 3: expected numbers of at most 18 digits, got 100000"):
        graph(path)
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"edges.txt: expected one edge per line, two numbers of nodes, got none"):
        graph(path)
    with pytest.raises(FileNotFoundError):
        graph(tmp_path / "none.txt")


@each(
    ("call", "message"),
    [
        (
            lambda: graph([[0, 1], [2, 3], [3, 4]]),
            "expected a connected one, got 3 of 5 nodes without a path to node 0",
        ),
        (lambda: graph([[0, 1]], nodes=3), "expected a connected one, got 1 of 3 nodes"),
        (lambda: graph([[0, 3]], nodes=3), "expected nodes from 0 to 2, got 0 to 3"),
        (lambda: graph([[0, 10**12]]), "expected at most 32,768 nodes, .*, got 1,000,000,000,001; number them from 0 on"),
        (lambda: graph([[0, 1]], nodes=10**12), "expected at most 32,768 nodes"),
        (lambda: graph([[0, -1]]), "expected nodes from 0 to 0, got -1 to 0"),
        (lambda: graph([[0.0, 1.0]]), r"expected edges as integers \[m 2\] or \[2 m\], .* got torch.float32"),
        (lambda: graph([[0, 1, 2]]), r"expected edges as integers \[m 2\] or \[2 m\], .* got torch.int64 \[1, 3\]"),
        (lambda: graph(None), "expected edges as integers .* or a graph of networkx, got NoneType"),
        (lambda: graph({(0, 1), (1, 2)}), "expected edges as integers .* or a graph of networkx, got set"),
        (lambda: graph([0, 1]), r"expected edges as integers .* got torch.int64 \[2\]"),
        (lambda: graph(torch.empty(0, 2, dtype=torch.int64)), r"expected edges as integers"),
        (lambda: graph([[0, 1]], 0), "axes: expected an integer of at least 1, got 0"),
        (lambda: isopos.wire(8, 2, axes=2).at(graph(RANDOM, 3)), r"positions: expected \[\*b t 2\]"),
    ],
)
def test_what_is_no_graph_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
