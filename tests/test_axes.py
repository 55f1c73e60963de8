"""Test schemes with rotation frequencies over several axes."""

import math

import pytest
import torch
from cases import HEADS, close, each, inputs, perturb

from isopos import schemes
from isopos.encodings import rope_frequencies
from isopos.positions import grid, sequence

OF_AXES = [
    schemes.rope_axial(12, HEADS, axes=3, sections=[3, 1, 2]),
    schemes.rope_mixed(12, HEADS, axes=3),
    schemes.rope_golden(12, HEADS, axes=3),
    schemes.mrope(12, HEADS),
    schemes.mrope(12, HEADS, interleaved=True, layout="half"),
]


def frequency(scheme):
    """``[h c f]``."""
    return scheme.encoding.parameter.detach().double()


def scores(scheme, q, k, x):
    rho = scheme.encoding(x, torch.float64)
    return rho(q) @ rho(k).mT


@each("scheme", OF_AXES)
def test_coordinates_may_be_real(scheme):
    """Scores depend on real differences. Real coordinates with integer values give the scores of integers."""
    q, k, _ = inputs(t=9, d=12)
    x, by = 20 * torch.randn(9, 3, dtype=torch.float64), torch.tensor([0.3, -7.2, 1e3], dtype=torch.float64)
    close(scores(scheme, q, k, x + by), scores(scheme, q, k, x))
    assert (scores(scheme, q, k, 1.5 * x) - scores(scheme, q, k, x)).abs().max() > 0.1
    whole = grid(3, 3, 1)
    close(scores(scheme, q, k, whole.double()), scores(scheme, q, k, whole))


@each("sections", [None, "2+1+1", (1, 1, 2)])
def test_axial_is_rope_of_each_axis_on_separate_features(sections):
    q, k, _ = inputs(t=12, d=8)
    x, done, expected = grid(2, 3, 2), 0, torch.zeros(())
    for axis, share in enumerate((1, 1, 2) if sections == (1, 1, 2) else (2, 1, 1)):
        own = slice(done, done := done + 2 * share)
        expected = expected + scores(schemes.rope(2 * share, base=50.0), q[..., own], k[..., own], x[:, axis : axis + 1])
    close(scores(schemes.rope_axial(8, axes=3, sections=sections, base=50.0), q, k, x), expected)


@each("name", ["rope-axial", "rope-mixed"])
def test_one_axis_is_rope(name):
    found = frequency(schemes.build(name, 8, HEADS, {"axes": "1", "base": "30"}))
    close(found, rope_frequencies(4, 30.0).expand_as(found), dtype=torch.float32)


@each("axes", [2, 3, 4])
def test_mixed_starts_as_axial_turned_as_a_whole_for_each_head(axes):
    w = frequency(schemes.rope_mixed(8 * axes, 5, axes=axes))
    axial = frequency(schemes.rope_axial(8 * axes, axes=axes, base=10.0))[0]
    close(w.mT @ w, (axial.mT @ axial).expand(5, -1, -1), dtype=torch.float32)
    frames = w[..., ::4]  # the fastest pair of each axis
    close(frames.det(), torch.ones(5).double(), dtype=torch.float32)
    assert torch.pdist(frames.flatten(1)).min() > 0.05, "heads differ"


def test_turns_of_mixed_heads_are_uniform():
    w = frequency(schemes.rope_mixed(4, 4000))[..., 0]
    angle = torch.atan2(w[:, 1], w[:, 0])
    for wave in (1, 2, 3, 4):
        assert torch.exp(1j * wave * angle).mean().abs() < 4 / 4000**0.5


def test_golden_directions_turn_by_the_golden_ratio_on_through_the_heads():
    w = frequency(schemes.rope_golden(8, 3, base=20.0))
    close(w.norm(dim=1), rope_frequencies(4, 20.0).expand(3, -1))
    angle = torch.atan2(w[:, 1], w[:, 0]).flatten()
    turned = (angle.diff() - math.pi * (5**0.5 - 1) / 2) / (2 * math.pi)
    close(turned - turned.round(), torch.zeros(11).double())


@each("axes", [2, 3, 4])
def test_golden_directions_favour_none(axes):
    """Second moments of the directions equal the moments of the uniform distribution."""
    w = frequency(schemes.rope_golden(64, 32, axes=axes, base=1.0)).transpose(1, 2).flatten(0, 1)
    close(w.norm(dim=-1), torch.ones(1024).double())
    moments = (w[:, :, None] * w[:, None]).mean(0)
    assert (moments - torch.eye(axes) / axes).abs().max() < 0.02


@each("scheme", [schemes.mrope(16, HEADS), schemes.mrope(16, HEADS, interleaved=True)])
def test_mrope_of_equal_coordinates_is_rope(scheme):
    q, k, _ = inputs(t=9, d=16)
    for x in (7 * sequence(9), torch.randn(9, 1, dtype=torch.float64)):
        close(scores(scheme, q, k, x.expand(-1, 3)), scores(schemes.rope(16, HEADS), q, k, x))


@each(
    ("options", "axis"),
    [
        ({}, "tthhhwww"),
        ({"interleaved": True}, "thwthwtt"),
        ({"sections": "3+3+2"}, "ttthhhww"),
        ({"sections": "3+3+2", "interleaved": True}, "thwthwth"),
        ({"sections": [2, 6]}, "tthhhhhh"),
        ({"sections": "0+4+4"}, "hhhhwwww"),
    ],
)
def test_axes_of_mrope(options, axis):
    w = frequency(schemes.mrope(16, **options))[0]
    assert "".join("thw"[n] for n in w.argmax(0)) == axis
    close(w.sum(0), rope_frequencies(8))


def turned(x, angle):
    """Pairs (2i, 2i+1) of x ``[... t d]`` rotated by angles ``[t d/2]``."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


@each("released", [False, True])
def test_harope_is_rotation_behind_a_matrix_of_each_head(released):
    """M = U diag(s) V^T; the authors' code multiplies rows of queries by M^T, and rows of keys by M^-1."""
    scheme = perturb(schemes.harope(8, HEADS, released=released), 3.0)
    q, k, _ = inputs(t=6, d=8)
    x = grid(2, 3)
    lower = scheme.encoding.generator.detach()  # their skew matrices are halves of A - A^T
    U, V = (torch.matrix_exp(0.5 * (2 * a - 2 * a.mT)) for a in lower.unbind(1))
    s = scheme.encoding.stretch.weight.detach().exp()
    M = U @ (s[:, :, None] * V.mT)
    inverse = V @ ((1 / s)[:, :, None] * U.mT)
    close(M @ inverse, torch.eye(8).double().expand_as(M), roundings=1e5)
    angle = (x[:, :, None] * rope_frequencies(2)).flatten(1)
    expected = turned(q @ M.mT, angle) @ turned(k @ (inverse if released else M.mT), angle).mT
    rho = [side(x, torch.float64) for side in (scheme.encoding.query, scheme.encoding.key)]
    close(rho[0](q) @ rho[1](k).mT, expected, roundings=1e5)
    if released:  # nothing at equal positions
        close((rho[0](q) * rho[1](k)).sum(-1), (q * k).sum(-1), roundings=1e5)
    plain = schemes.harope(8, HEADS, released=released).encoding
    axial = schemes.rope_axial(8, base=10000.0)
    close(plain.query(x, torch.float64)(q) @ plain.key(x, torch.float64)(k).mT, scores(axial, q, k, x))


def test_drope_turns_by_headings_themselves():
    scheme = schemes.drope(12, HEADS, sections=[2, 1, 3], base=50.0)
    q, k, _ = inputs(t=7, d=12)
    place, degrees = 30 * torch.randn(7, 2).double(), 360 * torch.rand(7, 1).double()
    speed = torch.cat((rope_frequencies(2, 50.0), rope_frequencies(1)))
    angle = torch.cat((place[:, [0, 0, 1]] * speed, torch.deg2rad(degrees).expand(-1, 3)), -1)
    x = torch.cat((place, degrees), -1)
    close(scores(scheme, q, k, x), turned(q, angle) @ turned(k, angle).mT)
    around = torch.tensor([0.0, 0.0, 360.0]) * torch.randint(-3, 4, (7, 1))
    close(scores(scheme, q, k, x + around), scores(scheme, q, k, x), roundings=1e5)
    assert (
        scores(scheme, q, k, x + torch.rand(7, 1) * torch.tensor([0.0, 0.0, 9.0])) - scores(scheme, q, k, x)
    ).abs().max() > 0.01


def test_default_sections_are_those_of_qwen():
    assert frequency(schemes.mrope(128))[0].ne(0).sum(-1).tolist() == [16, 24, 24]
    assert frequency(schemes.mrope(128, interleaved=True))[0].ne(0).sum(-1).tolist() == [24, 20, 20]
    assert frequency(schemes.mrope(6))[0].ne(0).sum(-1).tolist() == [1, 1, 1]


@each(("p", "kept"), [(1.0, 8), (0.75, 6), (0.7, 5), (0.125, 1)])
def test_p_rope_turns_the_fastest_pairs_alone(p, kept):
    q, k, _ = inputs(t=9, d=16)
    found = scores(schemes.p_rope(16, HEADS, p=p), q, k, 100 * sequence(9))
    rho, rest = schemes.rope(16, HEADS).encoding(100 * sequence(9), torch.float64), slice(2 * kept, None)
    fast = (torch.arange(16) < 2 * kept).double()
    close(found, (rho(q) * fast) @ (rho(k) * fast).mT + q[..., rest] @ k[..., rest].mT)


@each(
    ("call", "message"),
    [
        (lambda: schemes.rope_axial(8, axes=5), r"head size: expected at least 10 features for 5 parts, got 8"),
        (lambda: schemes.rope_axial(7), r"head size: expected an even number"),
        (lambda: schemes.rope_axial(8, axes=0), r"axes: expected an integer of at least 1, got 0"),
        (lambda: schemes.rope_axial(8, base=-1.0), r"base: expected a positive number"),
        (lambda: schemes.rope_axial(8, sections="1+2"), r"sections: .* add up to 4, half of the head size, got 1\+2"),
        (lambda: schemes.rope_axial(8, sections="4+0"), r"sections: expected numbers of pairs from 1 on .* got 4\+0"),
        (lambda: schemes.rope_axial(8, sections="2,2"), r"sections: expected numbers of pairs from 1 on .* got '2,2'"),
        (
            lambda: schemes.rope_axial(8, sections=[2.0, 2]),
            r"sections: expected numbers of pairs from 1 on .* got \[2.0, 2\]",
        ),
        (lambda: schemes.rope_axial(8, sections=4), r"sections: expected numbers of pairs from 1 on .* got 4"),
        (lambda: schemes.rope_axial(8, axes=3, sections="2+2"), r"sections: expected .* each of 3 axes, got 2\+2"),
        (lambda: schemes.harope(8, 2, axes=5), r"head size: expected at least 10 features for 5 parts, got 8"),
        (lambda: schemes.drope(4), r"head size: expected at least 6 features for 3 parts, got 4"),
        (lambda: schemes.drope(8, sections="2+2"), r"sections: expected .* each of 3 axes, got 2\+2"),
        (lambda: schemes.rope_mixed(8, 2, axes=5), r"head size: expected at least 10 features for 5 parts, got 8"),
        (lambda: schemes.rope_golden(8, 2, axes=1), r"axes: expected an integer of at least 2, got 1"),
        (lambda: schemes.rope_golden(7, 2), r"head size: expected an even number"),
        (lambda: schemes.mrope(8, sections="2+1"), r"sections: .* add up to 4"),
        (lambda: schemes.mrope(2), r"head_dim: expected an integer of at least 4, got 2"),
        (lambda: schemes.mrope(8, layout="llama"), r"layout: expected one of interleaved, half, got 'llama'"),
        (
            lambda: schemes.mrope(16, sections=[2, 2, 4], interleaved=True),
            r"sections: expected at most 2 pairs for axis 2, since 3 axes alternate over 8 pairs, got \[2, 2, 4\]",
        ),
        (lambda: schemes.p_rope(8, p=0.0), r"p: expected a share up to 1 that rotates at least one of 4 pairs, got 0.0"),
        (lambda: schemes.p_rope(8, p=0.2), r"p: expected a share up to 1"),
        (lambda: schemes.p_rope(8, p=1.5), r"p: expected a share up to 1"),
        (lambda: schemes.p_rope(8, p=math.nan), r"p: expected a share up to 1"),
        (lambda: schemes.p_rope(7), r"head size: expected an even number"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
