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
