"""Test the definition of attention against its documented formula, pair by pair."""

import math
from itertools import product

import torch
from cases import HEADS, close, each, inputs

import isopos
from isopos.attention import reference
from isopos.feature_maps import elu1
from isopos.maps import Rotation
from isopos.positions import sequence
from isopos.terms import Clipped, Indexed

T, S, D = 4, 6, 4
MASK = torch.tensor([[True] * 5 + [False], [True, False] + [True] * 4])
IDS = torch.tensor([0, 0, 0, 1, 1, 1])
WIDTHS = {"query": (D,), "key": (D,), "none": (), "value": (8,)}


def rotation(tokens):
    angle = torch.randn(HEADS, tokens, D // 2, dtype=torch.float64)
    return Rotation(torch.stack((angle.cos(), angle.sin()), -1))


def arguments():
    q, k, v = inputs(2, t=T, s=S, d=D)
    g = -torch.arange(S, dtype=torch.float64) * torch.tensor([[0.3], [0.7]])
    return q, k, v, (g[:, S - T :], g), (rotation(T), rotation(S))


def pairs(causal):
    """Sample, head, query and key of all pairs that take part, with mask and segments."""
    for b, h, i, j in product(range(2), range(HEADS), range(T), range(S)):
        if MASK[b, j] and IDS[i + S - T] == IDS[j] and (j <= i + S - T or not causal):
            yield b, h, i, j


def test_softmax_with_a_decay_keeps_the_dtype_of_its_inputs():
    q, k, v, decay, _ = arguments()
    out = reference.softmax(q.float(), k.float(), v.float(), decay=decay, causal=True)
    close(out, reference.softmax(q, k, v, decay=decay, causal=True).float())


@each("scheme", [isopos.alibi(8, 2, attention="softmax"), isopos.retnet(8, 2, attention="softmax")])
def test_a_decay_counts_steps_whatever_the_order_of_tokens(scheme):
    """`causal` is a mask of tokens in their order; a decay is one of distances between positions."""
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    x, order = torch.tensor([[0], [100], [1], [7], [7]]), torch.ones(5, 5).tril().bool()
    expected = reference.softmax(q, k, v, **scheme.at(x, dtype=torch.float64), causal=True)
    close(scheme(q, k, v, x, causal=True), expected)
    close(scheme(q, k, v, x, attn_mask=order), expected)
    stream = isopos.Stream(scheme)
    found = [stream(*(a[:, :, n : n + 1] for a in (q, k, v)), x[n : n + 1]) for n in range(5)]
    close(torch.cat(found, -2), expected)


@each("causal", [True, False])
@each("denominator", ["plain", "encoded", "complex", None])
def test_linear_is_the_loop(denominator, causal):
    q, k, v, g, rho = arguments()
    table, x = torch.randn(HEADS, 3, D, dtype=torch.float64), sequence(S)
    terms = () if denominator == "complex" else (Clipped(table, "query", x[S - T :], x, 1),)
    options = {"mask": MASK, "segment_ids": IDS, "causal": causal, "denominator": denominator, "terms": terms}
    found = reference.linear(q, k, v, isometry=rho, feature_map=elu1, decay=g, **options)
    a, b = rho[0](elu1(q)), rho[1](elu1(k))
    total, below = torch.zeros_like(found) + 0j, torch.zeros_like(found[..., :1]) + 0j
    for n, h, i, j in pairs(causal):
        factor = math.exp(-abs(g[0][h, i] - g[1][h, j]))
        row = elu1(table[h, min(max(j - (i + S - T), -1), 1) + 1])
        added = elu1(q)[n, h, i] @ row
        if denominator == "complex":
            x, y = (torch.view_as_complex(z.reshape(-1, 2)) for z in (a[n, h, i], b[n, h, j]))
            weight = plain = (x.conj() * y).sum() * factor
        else:
            weight = (a[n, h, i] @ b[n, h, j] + added) * factor
            plain = (elu1(q)[n, h, i] @ elu1(k)[n, h, j] + added) * factor
        total[n, h, i] += weight * v[n, h, j]
        below[n, h, i] += plain if denominator == "plain" else weight
    close(found, (total if denominator is None else total / below).real)


@each("causal", [True, False])
def test_softmax_is_the_loop(causal):
    q, k, v, g, rho = arguments()
    buckets, locality = torch.randint(3, (2, T, S)), torch.rand(T, S, dtype=torch.float64)
    terms = [Indexed(torch.randn(HEADS, 3, *width).double(), side, buckets) for side, width in WIDTHS.items()]
    options = {"mask": MASK, "segment_ids": IDS, "causal": causal, "locality": locality, "scale": 0.6}
    found = reference.softmax(q, k, v, isometry=rho, decay=g, terms=terms, **options)
    total, below = torch.zeros_like(found), torch.zeros_like(found[..., :1])
    for n, h, i, j in pairs(causal):
        of_query, of_key, number, of_value = (term.table[h, buckets[n, i, j]] for term in terms)
        logit = 0.6 * (
            rho[0](q)[n, h, i] @ rho[1](k)[n, h, j] * locality[i, j] + of_query @ q[n, h, i] + of_key @ k[n, h, j]
        )
        weight = (logit + number - abs(g[0][h, i] - g[1][h, j])).exp()
        total[n, h, i] += weight * (v[n, h, j] + of_value)
        below[n, h, i] += weight
    close(found, total / below)


@each("definition", reference.DEFINITIONS.values())
def test_what_is_masked_is_not_seen(definition):
    q, k, v, *_ = arguments()
    wrong = ~MASK[:, None, :, None]
    found = [definition(q, *(x.masked_fill(wrong, value) for x in (k, v)), mask=MASK) for value in (0, torch.nan)]
    assert found[0].equal(found[1])


def test_weights_do_not_depend_on_keys_that_take_no_part():
    q, k, v = inputs(1, t=T, d=D)
    k[..., 1:, :] = 0
    k[..., 0, :] = -1e6 * q[..., 1, :] / q[..., 1, :].square().sum(-1, keepdim=True)  # far below the logits of hidden keys
    mask = torch.tensor([[True, False, False, False]])
    close(reference.softmax(q, k, v, mask=mask)[..., 1, :], v[..., 0, :])
    assert (reference.softmax(q.float(), k.float(), v.float(), mask=mask & False) == 0).all()
    assert reference.softmax(q, k[..., :0, :], v[..., :0, :]).abs().max() == 0
