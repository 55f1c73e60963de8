"""Test that the canonical form, a second derivation from the parameters, gives the attention scores of every scheme."""

import pytest
import torch
import torch.nn.functional as F
from canonical import canonical, score
from cases import (
    COMPOSED,
    HEAD_DIM,
    HEADS,
    PRESETS,
    SCHEMES,
    close,
    each,
    ids,
    inputs,
    over_rows,
    perturb,
    scheme_case,
    with_kinds,
)
from structures import over_covering

from isopos import biases, couplings, encodings, schemes
from isopos.attention import linear_attention, softmax_attention
from isopos.decays import Decay
from isopos.feature_maps import undivided
from isopos.kinds import Linear, Softmax
from isopos.positions import Line, grid, sequence

ABSOLUTE = ("sinusoidal", "learned", "shiv-quirk", "ape-absolute", "fire", "liere", "fox", "selective", "carope", "path")
RELATIVE = [case for case in SCHEMES if case.name not in ABSOLUTE]
EXACT = [case for case in RELATIVE if not case.inside]
ROUNDINGS = 1e5  # powers and exponentials of a generator, to hundreds of steps
every = over_rows(EXACT)
few = over_covering(lambda case, kind: case in EXACT and kind == case.kinds[0])


def made(case, kind=None, **more):
    """A scheme with perturbed parameters, in float64."""
    options = more if kind is None else {"attention": kind} | more
    return perturb(case.build(**options))


def weights(scheme, q, k, x, y=None):
    """Weights ``[1 h t s]``: outputs with one-hot values, without division in linear attention."""
    v = torch.eye(k.shape[-2], dtype=torch.float64).expand(1, scheme.heads, -1, -1)
    at = scheme.at(x, y, dtype=torch.float64) | {"transport": None}  # of values, which are no part of scores
    if scheme.attention == "linear":
        return linear_attention(q, k, v, **at | {"denominator": None})
    terms = tuple(term for term in at.get("terms", ()) if term.side != "value")  # rows of values are no part of scores
    return softmax_attention(q, k, v, **at | {"terms": terms})


def expected(scheme, q, k, x, y):
    """The same weights by the canonical form."""
    if scheme.attention == "linear" and not scheme.inside:
        phi = undivided(scheme.feature_map)
        q, k = phi(q), phi(k)
    elif getattr(scheme.encoding, "magnitudes", False):
        q, k = F.softplus(q), F.softplus(k)
    total = score(canonical(scheme), q, k, x, y)
    return total if scheme.attention == "linear" else total.softmax(-1)


def content(scheme, t, s=None):
    """Random queries and keys."""
    return inputs(1, t=t, s=s, d=scheme.encoding.features, heads=scheme.heads)[:2]


def same(scheme, x, y=None):
    q, k = content(scheme, len(x), None if y is None else len(y))
    close(weights(scheme, q, k, x, y), expected(scheme, q, k, x, x if y is None else y), roundings=ROUNDINGS)


def test_the_table_has_every_scheme():
    assert {case.name for case in RELATIVE} | set(ABSOLUTE) == set(schemes.REGISTRY)


@every
def test_primitives_sum_to_the_scores(case):
    for kind in case.kinds:
        same(made(case, kind), case.positions(t=9))


@few
def test_primitives_sum_to_the_scores_of_other_keys(case, kind):
    scheme = made(case, kind)
    y = case.positions(t=9)
    if scheme.decay is not None:  # between neighbours: linear attention takes the order of tokens for that of positions
        y = 3 * sequence(9)
        same(scheme, y + 1, y)
    elif scheme.group.is_grid or scheme.group.columns == 1:
        same(scheme, y[3:] + 1, y)
    else:
        same(scheme, case.positions(t=6), y)


def test_decays_of_keys_elsewhere_shrink_with_distance_or_are_refused():
    same(scheme_case("alibi").build(attention="softmax"), sequence(4), sequence(4) + 5)
    with pytest.raises(ValueError, match="queries between the keys"):
        same(scheme_case("alibi").build(), sequence(4), sequence(4) + 5)


@over_covering(
    lambda case, kind: case in EXACT and case.group.is_grid and kind == case.kinds[0]
)  # of others all positions are random
def test_primitives_sum_to_the_scores_at_random_positions(case, kind):
    scheme = made(case, kind)
    x = scheme.group.random(8)
    same(scheme, x.sort(0).values if isinstance(scheme.group, Line) else x)


OPTIONS = {
    "rope-partial-half": ("rope", {"rotary_dim": 4, "layout": "half", "learned": True}),
    "orthogonal-mixed-fourier": ("lrpe-orthogonal", {"basis": "fourier", "identity": 4, "learned": True}),
    "orthogonal-mixed-odd": ("lrpe-orthogonal", {"basis": "fourier", "identity": 3, "head_dim": 9}),
    "unitary-odd-even-odd": ("lrpe-unitary", {"basis": "odd-even", "head_dim": 7, "learned": True}),
    "unitary-complex-theta-c": ("lrpe-unitary", {"complex": True, "basis": "fourier", "theta": "c", "length": 20}),
    "unitary-decay": ("lrpe-unitary", {"decay": "alibi", "complex": True}),
    "permutation-favor": ("lrpe-permutation", {"feature_map": "favor", "decay": "retnet"}),
    "width-orthogonal": ("permuteformer", {"width": 2, "matrix": "orthogonal", "attention": "softmax"}),
    "xpos-decay": ("xpos", {"length": 50.0, "decay": "retnet"}),
    "sequence-locality-decay": ("ape-sequence", {"attention": "softmax", "locality": 0.9, "decay": "retnet"}),
    "ring-locality": ("ape-ring", {"attention": "softmax", "period": 5, "locality": 0.7}),
    "tree-locality": ("ape-tree", {"attention": "softmax", "branches": 3, "locality": 0.7, "initial": "identity"}),
    "product-locality": ("ape-product", {"attention": "softmax", "parts": "tree3+ring5+grid2", "locality": 0.8}),
    "constrained-outside-decay": ("horn-constrained", {"outside": 2, "decay": "permuteformer"}),
    "constrained-outside-grid": ("horn-constrained", {"outside": 2, "axes": 2, "attention": "softmax"}),
    "constrained-inside": ("horn-constrained", {"inside": True, "feature_map": "identity", "decay": "alibi"}),
    "clipped-outside-grid": ("horn-clipped", {"outside": 2, "axes": 2, "reach": 1, "feature_map": "relu2"}),
    "clipped-favor": ("horn-clipped", {"outside": 1, "reach": 3, "feature_map": "favor"}),
    "clipped-softmax": ("horn-clipped", {"outside": 2, "reach": 2, "attention": "softmax", "decay": "alibi"}),
    "t5-decay": ("t5", {"buckets": 10, "max_distance": 30, "decay": "alibi"}),
    "deberta-near": ("deberta", {"buckets": 6, "max_distance": 9}),
    "shaw-one": ("shaw", {"reach": 1, "decay": "retnet"}),
    "transformer-xl-odd": ("transformer-xl", {"head_dim": 5, "model_dim": 4, "decay": "alibi"}),
}


@each("id", OPTIONS)
def test_primitives_sum_to_the_scores_of_options_together(id):
    name, options = OPTIONS[id]
    scheme = perturb(schemes.REGISTRY[name](**{"head_dim": HEAD_DIM, "heads": HEADS} | options))
    near = sequence(9) - 4 if isinstance(scheme.group, Line) else scheme.group.random(9)
    same(scheme, grid(3, 3) * 2 - 3 if scheme.group.columns == 2 and scheme.group.is_grid else near)


@each("id", ["rope-learned", "transformer-xl", "horn-constrained", "horn-clipped-reach", "ape-sequence"])
def test_real_positions(id):
    scheme = made(scheme_case(id))
    same(scheme, torch.tensor([[-2.5], [-1.0], [0.25], [0.5], [1.5], [4.75]]), torch.arange(-3, 4).double()[:, None] / 2)


@each("heads", [1, 2])
def test_own_scale_and_decay(heads):
    decay = Decay(torch.tensor([0.1, 0.3][:heads]), learned=True)
    scheme = schemes.Scheme(
        encodings.Identity(HEAD_DIM), HEADS, attention=Softmax(scale=0.7), decay=decay, bias=biases.Shaw(HEAD_DIM, reach=2)
    )
    same(perturb(scheme), sequence(9))


# Encodings alone, with every basis: Eq. 9 and what the paper says of W.


def plain(case):
    """A scheme that leaves queries and keys to the encoding."""
    return schemes.Scheme(perturb(case.make()), HEADS, attention=Linear("identity", "none"))


def kernel(scheme, x, y):
    (primitive,) = canonical(scheme)
    return primitive.matrix(x, y)


@each("case", COMPOSED, ids=ids)
def test_the_kernel_of_an_encoding(case):
    scheme = plain(case)
    x = scheme.group.random(6)
    same(scheme, x)
    if not scheme.group.refers_to_rows:
        same(scheme, x, scheme.group.random(4))


def test_permutations_are_those_given():
    permutation = torch.stack([torch.randperm(HEAD_DIM) for _ in range(HEADS)])
    W = kernel(schemes.Scheme(encodings.Permutation(permutation), HEADS), sequence(1), sequence(1) + 1)[:, 0, 0]
    v = torch.randn(HEADS, HEAD_DIM, dtype=torch.float64)
    close((W @ v[..., None])[..., 0], v.gather(-1, permutation))


# Stochastic encodings: with noise whose products are exactly what they are in expectation, one draw is the expectation.


def orthogonal_noise(rows, realizations):
    """Noise ``[rows realizations]``. Inner products of its rows equal the expectation for independent normal rows."""
    return realizations**0.5 * torch.linalg.qr(torch.randn(realizations, rows, dtype=torch.float64)).Q.mT


EXPECTED = [{"attention": "softmax"}, {"attention": "softmax", "gated": True}]
EXPECTED += [{"feature_map": "identity", "decay": "alibi"}]


@each("options", EXPECTED)
def test_sine_spe_in_expectation(options):
    scheme = perturb(schemes.REGISTRY["spe-sine"](HEAD_DIM, HEADS, sines=3, realizations=64, **options))
    noise = orthogonal_noise(HEAD_DIM * 7, 64)
    scheme.encoding.noise = noise[HEAD_DIM:].view(HEAD_DIM, 3, 2, 64)
    scheme.encoding.gate_noise = noise[:HEAD_DIM]
    same(scheme, sequence(9))


@each("options", EXPECTED)
def test_conv_spe_in_expectation(monkeypatch, options):
    scheme = perturb(schemes.REGISTRY["spe-conv"](HEAD_DIM, HEADS, reach=3, realizations=128, **options))
    *noise, scheme.encoding.gate_noise = orthogonal_noise(13 * HEAD_DIM, 128).view(13, HEAD_DIM, 128)
    noise = torch.stack(noise).mT.flatten(1)  # of lags -3 to 8
    monkeypatch.setattr(couplings, "gaussian", lambda position, width, seed: noise[position + 3])
    same(scheme, sequence(9))


def test_one_draw_of_spe_is_not_its_expectation():
    scheme, (q, k) = made(scheme_case("spe-sine"), "softmax"), inputs(1, t=9)[:2]
    assert not torch.allclose(
        weights(scheme, q, k, sequence(9)), expected(scheme, q, k, sequence(9), sequence(9)), atol=0.01
    )


def test_a_coupling_ahead_of_phi_has_the_products_that_phi_takes():
    q, k = inputs(1, t=9)[:2]
    elu, identity = (
        schemes.REGISTRY["horn-constrained"](HEAD_DIM, HEADS, inside=True, feature_map=phi) for phi in ("elu+1", "identity")
    )
    close(*(score(canonical(scheme), q, k, sequence(9), sequence(9)) for scheme in (elu, identity)))


# What it does not call.


@with_kinds([case for case in PRESETS if case in RELATIVE])
def test_no_operation_of_the_scheme_is_called(monkeypatch, case, kind):
    scheme, x = made(case, kind), case.positions(t=4)
    q, k = content(scheme, 4)
    before = score(canonical(scheme), q, k, x, x)

    def called(*_, **__):
        raise AssertionError("an operation was called")

    for module in scheme.modules():
        for name in {"forward", "query", "key", "bucket", "frequency"} & set(dir(type(module))):
            if module is not scheme.favor:
                monkeypatch.setattr(type(module), name, called)
    primitives = canonical(scheme)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.zero_()  # a snapshot was taken
    close(score(primitives, q, k, x, x), before, roundings=0)
