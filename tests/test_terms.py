"""Test relative terms: scores of a token and the table row of an offset's bucket."""

import pytest
import torch
from cases import HEADS, close, each, inputs, same_everywhere

from isopos.attention import linear_attention, reference, softmax_attention
from isopos.positions import grid, sequence
from isopos.terms import SIDES, Clipped, DistanceKernel, Indexed, Numbers, Offsets, Term

N, D = 5, 4


def table(side, heads=HEADS):
    return torch.randn(heads, N, *(() if side == "none" else (D,)), dtype=torch.float64, requires_grad=True)


def term_of(side, *batch, t=3, s=6, heads=HEADS):
    return Indexed(table(side, heads), side, torch.randint(N, (*batch, t, s)))


@each("heads", [1, HEADS])
@each("batch", [(), (1,), (2,)])
@each("side", ["query", "key", "none"])
def test_scores_by_definition(side, batch, heads):
    term = term_of(side, *batch, heads=heads)
    q, k, _ = leaves = inputs(2, t=3, s=6, d=D, requires_grad=True)
    found = term.scores(q, k).expand(2, HEADS, 3, 6)
    same_everywhere(found, reference.scores(term, q, k).expand_as(found), [*leaves, term.table])
    index = term.index().expand(2, 3, 6)
    for b, h, i, j in [(0, 0, 0, 0), (1, 1, 2, 5), (1, 0, 1, 3)]:
        row = term.table[h % heads, index[b, i, j]]
        expected = {"query": (q[b, h, i] * row).sum(), "key": (k[b, h, j] * row).sum(), "none": row.sum()}[side]
        close(found[b, h, i, j], expected)


@each("batch", [(), (2,)])
def test_values_by_definition(batch):
    term = term_of("value", *batch)
    weight = torch.rand(2, HEADS, 3, 6, dtype=torch.float64, requires_grad=True)
    expected = (weight[..., None] * reference.rows(term)).sum(-2)
    same_everywhere(term.values(weight), expected, [weight, term.table])


@each(("axes", "outside"), [(1, 0), (1, 2), (2, 0), (2, 1)])
def test_clipped_buckets_are_clipped_offsets(axes, outside):
    positions = sequence(7) if axes == 1 else grid(2, 4)[:7]
    x, y = 2 * positions[3:], positions
    term = Clipped(torch.zeros(1, 9**axes, D), "query", x, y, 4, outside)
    index = term.index()
    assert index.shape == (4, 7)
    numbers = Clipped(torch.arange(9**axes + 2)[None], "none", x, y, 4, outside)  # each row is its own number
    assert reference.rows(numbers)[0].equal(index)
    offset = (y - x[:, None]).clamp(-4, 4)[outside:, outside:] + 4
    assert index[outside:, outside:].equal(offset[..., 0] if axes == 1 else 9 * offset[..., 0] + offset[..., 1])
    assert (index[:, :outside] == 9**axes).all()
    assert (index[:outside, outside:] == 9**axes + 1).all()
    assert term.index().min() >= 0


def test_the_bucket_of_a_pair_is_that_of_all_pairs():
    """Of real positions, too, whose offsets are rounded."""
    x, y = torch.tensor([[0.0], [0.6], [1.7], [2.2], [3.9], [4.4]]), torch.tensor([[0.5], [1.0], [7.25]])
    table = torch.zeros(2, 5, 8)
    for a, b in ((x, y), (x.long(), y.long())):
        term = Clipped(table, "query", a, b, 2)
        bucket, (i, j) = term.bucket(1), torch.meshgrid(torch.arange(6), torch.arange(3), indexing="ij")
        assert bucket(torch.zeros_like(i), i, j).equal(term.index())


def test_terms_are_immutable_values():
    term = term_of("query")
    with pytest.raises(AttributeError):
        term.table = None
    with pytest.raises(TypeError, match="abstract"):
        Term(term.table, "query")
    assert set(SIDES) == {"query", "key", "none", "value"}


@each("attention", [linear_attention, softmax_attention])
def test_bad_terms_are_refused(attention):
    q, k, v = inputs(2, t=3, d=D)

    def call(term):
        return attention(q, k, v, terms=(term,))

    with pytest.raises(TypeError, match="terms: expected terms that a relative bias returns at positions, got Tensor"):
        call(torch.zeros(3))
    for wrong in (torch.zeros(HEADS + 1, N, D), torch.zeros(HEADS, N, D + 1)):
        with pytest.raises(ValueError, match=rf"terms: expected a table of {HEADS} heads and {D} features"):
            call(Clipped(wrong, "query", sequence(3), sequence(3), 2))


@each("side", SIDES)
def test_linear_attention_refuses_what_does_not_factor(side):
    q, k, v = inputs(2, t=3, d=D, e=D)
    with pytest.raises(ValueError, match=rf"terms: expected clipped terms .* of side '{side}'.*does not factor"):
        linear_attention(q, k, v, terms=(term_of(side, t=3, s=3),))


def test_linear_attention_refuses_what_does_not_go_with_terms():
    q, k, v = inputs(2, t=3, d=D)
    clipped = Clipped(table("query"), "query", sequence(3), sequence(3), 2)
    g = torch.zeros(HEADS, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="decay: expected none with clipped terms"):
        linear_attention(q, k, v, terms=(clipped,), decay=g)
    with pytest.raises(ValueError, match="denominator: expected 'plain', 'encoded' or None with terms, got 'complex'"):
        linear_attention(q, k, v, terms=(clipped,), denominator="complex")


def test_locality_has_a_factor_for_each_pair():
    q, k, v = inputs(2, t=3, s=5)
    for wrong in (torch.ones(3, 3), torch.ones(5), torch.ones(3, 3, 5), torch.ones(2, HEADS, 3, 5)):
        with pytest.raises(ValueError, match=r"locality: expected \[\*b 3 5\]"):
            softmax_attention(q, k, v, locality=wrong)


@each("batch", [(), (2,)])
@each("side", SIDES)
def test_offsets_are_looked_up(batch, side):
    x, y = (torch.randint(-20, 20, (*batch, t, 1)) for t in (4, 7))
    buckets = torch.randint(N, (11,))  # of offsets from -5 to 5
    index = buckets[(y[..., None, :, 0] - x[..., :, None, 0]).clamp(-5, 5) + 5]
    term, known = (kind(table(side), side, *rest) for kind, rest in ((Offsets, (x, y, buckets)), (Indexed, (index,))))
    assert term.shape == known.shape
    assert term.index().equal(index)
    every = torch.meshgrid(*(torch.arange(n) for n in (2, 4, 7)), indexing="ij")
    clipped = Clipped(table(side), side, x, y, 2)
    for one, whole in ((term, index), (known, index), (clipped, clipped.index())):
        assert one.bucket(2)(*every).equal(whole.expand(2, 4, 7))
    assert Clipped(table(side), side, x, y, 2, outside=1).bucket(2) is None


@each("kernel", ["log", "power"])
def test_kernels_are_computed_when_asked_for(kernel):
    x, y = (torch.randint(20, (2, t, 1)).double() for t in (4, 7))
    rates = (torch.rand(HEADS, 2, dtype=torch.float64) + 0.5).requires_grad_()
    term = DistanceKernel(rates, "none", x, y, kernel)
    distance, (r1, r2) = (x - y.mT).abs()[:, None], rates[:, :, None, None].unbind(1)
    known = Numbers(-r1 * (1 + r2 * distance).log() if kernel == "log" else -r1 * distance**r2)
    assert (term.shape, term.heads) == (known.shape, HEADS)
    q, k, v = inputs(2, t=4, s=7, d=D)
    found, expected = (softmax_attention(q, k, v, terms=[own]) for own in (term, known))
    same_everywhere(found, expected, [rates])
    close(reference.rows(term), known.table)
    every = torch.meshgrid(*(torch.arange(n) for n in (2, 4, 7)), indexing="ij")
    close(term.distance(2)(*every), distance[:, 0])
    with pytest.raises(TypeError, match="which has none"):
        term.index()
