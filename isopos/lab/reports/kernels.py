"""The relative kernel of a scheme: scores of random queries and keys as a function of positions.

Scores come from the attention functions, applied to unit vectors as values: a picture shows what a model computes, with
feature map, decay, terms and embedding.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.attention import linear_attention, softmax_attention
from isopos.poses import Projective
from isopos.positions import Group, Product, Ring, Tree, depths, grid, sequence
from isopos.schemes import Scheme

REACH = 64  # steps of a line to each side
LONGEST_RING = 1024  # elements
MAP_REACH = 12  # steps of a grid to each side
NODES = 40  # of a tree


class Panel(NamedTuple):
    """Scores at all pairs of positions of one part of a group; positions in other parts are the origin."""

    group: Group  # the part: a line, a ring (of cameras around a point, too), a tree, or a product of lines and rings
    position: Tensor  # [t c] of this part; on lines and rings offsets are relative to the middle one
    score: Tensor  # [h t t], query by key; see `scores`

    @property
    def directional(self) -> bool:
        """Whether scores change when query and key exchange positions."""
        return not torch.allclose(self.score, self.score.mT, rtol=0, atol=1e-9 * max(1.0, self.score.abs().max().item()))

    @property
    def relative(self) -> bool:
        """Whether scores depend on offsets only."""
        if self.group.refers_to_rows:
            depth = depths(self.position)
            pruned = (depth < depth.max()).nonzero()[:, 0]  # relative to the root as the next rows to its child
            pairs = [self.score[:, rows[:, None], rows] for rows in (pruned, torch.arange(1, 1 + len(pruned)))]
        else:
            sides = [math.isqrt(len(self.position))] * 2 if self.group.columns > 1 else [len(self.position)]
            table = self.score.unflatten(2, sides).unflatten(1, sides)
            pairs = [table[(slice(None), *[span] * 2 * len(sides))] for span in (slice(1, None), slice(-1))]
        return torch.allclose(*pairs, rtol=0, atol=1e-9 * max(1.0, self.score.abs().max().item()))

    def row(self) -> tuple[Tensor, Tensor]:
        """Offsets ``[t c]`` and scores ``[h t]`` of the middle query."""
        middle = len(self.position) // 2
        return self.position - self.position[middle], self.score[:, middle]


def panels(scheme: Scheme, *, reach: int = REACH, seed: int = 0) -> Iterator[Panel]:
    """Panels of a scheme: `reach` steps of a line to both sides, a period of a ring, two axes of a grid, a small tree."""
    for first, group in _parts(scheme.group):
        position = _positions(group, reach, scheme.max_length)
        cameras = isinstance(group, Projective)
        elements = group.arrange(len(position)) if cameras else position
        x = scheme.group.origin(len(position))
        x[:, first : first + elements.shape[1]] = elements
        yield Panel(Ring(len(position)) if cameras else group, position, scores(scheme, x, seed))


@torch.no_grad()
def scores(scheme: Scheme, x: Tensor, seed: int = 0) -> Tensor:
    """Scores ``[h t t]`` of one random query and one key per head at all pairs of positions ``[t c]``, in float64.

    The key has a correlation of 0.7 with the query: an unrelated key would show waves only, and an equal key, or a mean over
    many keys, would not show the direction of rotations.

    Linear attention: weights, divided by the root mean square of the weights at equal positions. Softmax attention: logits
    minus the logit at equal positions. For content-dependent phases attention is causal, and scores of later keys mirror
    scores of earlier keys.
    """
    outside = scheme.outside  # tokens without position come first
    x = torch.cat((scheme.group.origin(outside), x))
    generator = torch.Generator().manual_seed(seed)
    content = torch.randn(2, scheme.heads * scheme.encoding.features, generator=generator, dtype=torch.float64)
    q, k = (a.expand(len(x), -1) for a in (content[0], content.sum(0) / 2**0.5))
    if scheme.embedding is not None:
        if scheme.embedding.model_dim != q.shape[-1]:
            raise ValueError(
                f"model_dim: expected heads * head_dim = {q.shape[-1]} without projections, got {scheme.embedding.model_dim}"
            )
        q, k = (a + scheme.embedding(x, torch.float64) for a in (q, k))
    q, k = (a.unflatten(-1, (scheme.heads, -1)).transpose(0, 1)[None] for a in (q, k))
    at: dict[str, Any] = {**scheme.at(x, dtype=torch.float64), "causal": bool(scheme.phases)}
    at.pop("transport", None)  # values here are unit vectors
    v = torch.eye(len(x), dtype=torch.float64).expand(1, scheme.heads, -1, -1)
    if scheme.attention == "linear":
        at["denominator"] = None
        score = linear_attention(q, k, v, **at)[0, :, outside:, outside:]
        score = score / score.diagonal(dim1=1, dim2=2).square().mean().sqrt()
        return _mirrored(score) if scheme.phases else score
    at["terms"] = [term for term in at.get("terms", ()) if term.side != "value"]
    weight = softmax_attention(q, k, v, **at)[0, :, outside:, outside:]
    logit = weight.clamp_min(torch.finfo(weight.dtype).tiny).log()  # up to a constant of the row
    score = logit - logit.diagonal(dim1=1, dim2=2)[..., None]
    return _mirrored(score) if scheme.phases else score


def _mirrored(score: Tensor) -> Tensor:
    return score.tril() + score.tril(-1).mT


@torch.no_grad()
def fill_zeros(scheme: Scheme) -> bool:
    """Fill learned tables that are zero with random numbers, to make them visible; return whether there were any."""
    zeros = [parameter for parameter in scheme.parameters() if not parameter.any()]
    generator = torch.Generator().manual_seed(0)
    for parameter in zeros:
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return bool(zeros)


def paths(position: Tensor) -> list[str]:
    """Branches from the root to each node of a tree ``[n 2]``, whose rows follow the rows of their parents."""
    branches: list[str] = []
    for parent, branch in position.tolist():
        branches.append("" if parent < 0 else branches[parent] + (str(branch) if branch < 10 else f"({branch})"))
    return branches


def _parts(group: Group) -> Iterator[tuple[int, Group]]:
    """First column and group of each panel; two axes of a grid share one."""
    if not isinstance(group, Product):
        yield 0, group
    elif len(group.parts) > 1 and not any(isinstance(leaf, Tree | Projective) for leaf in group.leaves):
        yield 0, Product(group.parts[:2])
    else:
        first = 0
        for part in group.parts:
            yield from ((first + column, inner) for column, inner in _parts(part))
            first += part.columns


def _positions(group: Group, reach: int, longest: int | None) -> Tensor:
    if isinstance(group, Tree):
        return _complete_tree(group.branches)
    if isinstance(group, Projective):
        return sequence(2 * MAP_REACH + 1)
    if isinstance(group, Product):
        return grid(*(2 * MAP_REACH + 1 for _ in group.parts))
    count = 2 * (min(group.period, LONGEST_RING) // 2 if isinstance(group, Ring) else reach) + 1
    count = count if longest is None else min(count, longest)
    return sequence(count - (count + 1) % 2)


def _complete_tree(branches: int) -> Tensor:
    """A complete tree in preorder with at most `NODES` nodes, but at least one level."""
    depth = 1
    while depth < NODES // 2 and sum(branches**level for level in range(depth + 2)) <= NODES:
        depth += 1
    nodes = sorted(node for level in range(depth + 1) for node in itertools.product(range(branches), repeat=level))
    return torch.tensor([(-1, -1), *((nodes.index(node[:-1]), node[-1]) for node in nodes[1:])])
