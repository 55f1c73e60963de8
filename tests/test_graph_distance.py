"""Test the task of graphs: random connected graphs, distances of their nodes, and their eigenvectors as positions."""

from collections import deque

import numpy as np
import pytest
import torch

from isopos.graphs import graph
from isopos.lab.data import graphs
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.graphs import GraphDistance

pytestmark = pytest.mark.usefixtures("own_cache")
SIZES = {"batch": 8, "layers": 1, "model_dim": 32, "heads": 2}


def ready(scheme, **settings):
    recipe = Recipe(task=GraphDistance(**{"vertices": 12, "graphs": 60, "farthest": 4} | settings)).edit(
        scheme=scheme, **SIZES
    )
    return recipe, recipe.task.load(recipe)


def breadth_first(edges, nodes, start):
    """Steps from a node by a queue, an independent reference."""
    steps, queue = {start: 0}, deque([start])
    while queue:
        node = queue.popleft()
        for a, b in (*edges, *edges[:, ::-1]):
            if a == node and b not in steps:
                steps[b] = steps[node] + 1
                queue.append(b)
    return [steps.get(node, np.inf) for node in range(nodes)]


def test_distances_are_those_of_a_search_and_graphs_are_connected():
    random = np.random.default_rng(0)
    for nodes in (4, 9, 24):
        edges = graphs.draw_graph(random, nodes)
        apart = graphs.steps_between(edges, nodes)
        assert np.isfinite(apart).all()
        assert [breadth_first(edges, nodes, start) for start in range(nodes)] == apart.tolist()
        assert len(np.unique(edges, axis=0)) == len(edges)
    assert graphs.steps_between(np.array([[0, 1]]), 3).tolist() == [
        breadth_first(np.array([[0, 1]]), 3, n) for n in range(3)
    ]


def test_labels_are_distances_of_the_marked_nodes_and_positions_are_eigenvectors(monkeypatch):
    drawn = []
    monkeypatch.setattr(graphs, "draw_graph", lambda *given, draw=graphs.draw_graph: drawn.append(draw(*given)) or drawn[-1])
    recipe, data = ready("wire:axes=5")
    tokens, positions, labels = data.tensors("train", np.arange(48), recipe)
    assert (tokens.sum(1) == 2).all()
    assert positions.shape == (48, 12, 5)
    found = {}
    for edges in drawn:
        found[graph(edges.tolist(), 5, nodes=12).numpy().tobytes()] = graphs.steps_between(edges, 12)
    for row, vectors, label in zip(tokens, positions, labels, strict=True):
        first, second = row.nonzero()[:, 0].tolist()
        assert label == min(found[vectors.numpy().tobytes()][first, second], 4) - 1
    assert labels.unique().tolist() == [0, 1, 2, 3]


def test_positions_are_those_of_the_scheme_and_misfits_are_refused():
    recipe, data = ready("rope")
    assert data.batch(recipe, 0)[1].flatten().tolist() == [*range(12)]
    axial, _ = ready("rope-axial:axes=8")
    assert torch.equal(data.batch(axial, 0)[1][..., :2], data.batch(recipe.edit(scheme="rope-axial"), 0)[1])
    for scheme, message in (
        ("ape-tree", "schemes: expected positions on a line or on a grid, whose axes are eigenvectors"),
        ("prope", "schemes: expected positions on a line or on a grid"),
        ("wire:axes=12", "vertices: expected more than the 12 axes of wire:axes=12, got 12"),
        ("learned:length=8", "vertices: expected at most 8"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe.edit(scheme=scheme).task.check(recipe.edit(scheme=scheme))
    far = recipe.edit(farthest=12)
    with pytest.raises(ValueError, match="farthest: expected less than the 12 nodes, got 12"):
        far.task.check(far)


def file_of(folder, edges):
    path = folder / "edges.txt"
    path.write_text("".join(f"{a} {b}\n" for a, b in edges))
    return str(path)


def test_parts_of_a_file_are_connected_with_all_their_edges_and_splits_share_no_node(tmp_path):
    random = np.random.default_rng(0)
    lattice = [(n, n + 1) for n in range(400) if n % 20 < 19] + [(n, n + 20) for n in range(380)]
    names = random.permutation(1000)[:400]  # numbers with gaps
    edges = [(b, a) if a % 2 else (a, b) for a, b in lattice] + [(7, 7), (0, 1)]
    source = file_of(tmp_path, names[np.array(edges)])
    order = np.argsort(np.argsort(names))
    true = {frozenset((order[a], order[b])) for a, b in lattice}
    seen = [set(np.flatnonzero([*map(len, part.neighbours)]).tolist()) for part in graphs.read_parts(source, 12)]
    assert sum(map(len, seen)) == len(set.union(*seen))
    assert min(map(len, seen)) > 30
    for part in graphs.read_parts(source, 12):
        assert all(frozenset((n, other)) in true for n, near in enumerate(part.neighbours) for other in near.tolist())
        for _ in range(20):
            edges = part.draw(random, 12)
            assert np.isfinite(graphs.steps_between(edges, 12)).all()
            assert len(edges) == len(np.unique(edges, axis=0))
            assert (edges[:, 0] < edges[:, 1]).all()
    ring = graphs.read_parts(file_of(tmp_path, [(n, (n + 1) % 200) for n in range(200)]), 12)[0]
    drawn = np.concatenate([ring.draw(random, 12) for _ in range(50)])
    assert len(drawn) == 50 * 11  # a part of a ring is a path, whose ends are numbered at random
    assert np.bincount(drawn.flatten()).min() > 50


def test_graphs_of_a_file_are_a_task(tmp_path):
    source = file_of(tmp_path, [(n, n + 1) for n in range(300)])
    _, data = ready("wire:axes=5", data=source)
    assert data.name == source
    assert data.sha256 == ready("wire:axes=5", data=source)[1].sha256 != ready("wire:axes=5")[1].sha256
    other = file_of(tmp_path, [(n, n + k) for n in range(300) for k in (1, 2)])
    assert data.sha256 != ready("wire:axes=5", data=other)[1].sha256
    labels = np.bincount(data.labels("train"), minlength=4)
    assert labels.min() > 3
    for text, message in (
        ("0 1\n1 x\n", "data: .*edges.txt, line 2: expected two numbers of nodes from 0 on, got '1 x'"),
        ("0 1\n1 2\n", "vertices: expected at most 2, the nodes of the largest connected part for train in .*, got 12"),
    ):
        (tmp_path / "edges.txt").write_text(text)
        with pytest.raises(ValueError, match=message):
            ready("wire:axes=5", data=source)
    for missing, message in ((tmp_path / "none.txt", "No such file"), (tmp_path, "expected a plain file")):
        with pytest.raises(ValueError, match=f"data: .*{message}"):
            ready("wire:axes=5", data=str(missing))
