"""Test feature maps: elementwise functions, and random features of exp(<q, k> / sqrt(d))."""

import copy
import ctypes
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import EDGES, as_the_table, close, each, inputs, quadratic, same_everywhere

from isopos import feature_maps, schemes
from isopos.attention import explain, linear_attention, naive_linear_attention
from isopos.feature_maps import COMPILED, FEATURE_MAPS, Favor, FeatureMap, register
from isopos.maps import Append
from isopos.ops import library
from isopos.positions import sequence
from isopos.state import State

X = torch.cat((torch.linspace(-50, 50, 41), torch.tensor([0.0, -1e4, 1e4]))).double()
DEFINITIONS = {
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": lambda x: torch.where(x > 0, x, 0) + 0.001,
    "relu2": lambda x: torch.where(x > 0, x * x, 0),
    "exp": lambda x: torch.pow(torch.tensor(torch.e, dtype=x.dtype), x),
    "identity": lambda x: x,
}


def arguments(name):
    """Arguments at which a map is finite."""
    return X[X.abs() < 60] if name == "exp" else X


@each("name", FEATURE_MAPS)
def test_definition(name):
    x = arguments(name)
    close(FEATURE_MAPS[name](x), DEFINITIONS[name](x))


@each("name", FEATURE_MAPS)
def test_gradients_are_finite_and_right(name):
    x = arguments(name)
    x = x[x != 0].requires_grad_()
    pairs = (torch.autograd.grad(f(x).sum(), x)[0] for f in (FEATURE_MAPS[name], DEFINITIONS[name]))
    close(*pairs)


@each("dtype", [torch.float32, torch.float64])
@each("name", FEATURE_MAPS)
def test_derivatives_equal_autograd_at_and_near_zero(name, dtype):
    """The derivative of relu is 0 at zero and 1 right above, where x + 0.001 is rounded to 0.001."""
    x = torch.cat((arguments(name), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-12, -1e-12]))).to(dtype).requires_grad_()
    phi, y = FEATURE_MAPS[name], torch.empty_like(x)
    phi.write(x.detach(), y, torch.empty_like(x))
    torch.testing.assert_close(phi.derivative(x.detach(), y), torch.autograd.grad(phi(x).sum(), x)[0])


@each("name", ["elu+1", "relu", "exp"])
@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_positive_maps_are_positive(name, dtype):
    y = FEATURE_MAPS[name](torch.linspace(-5, 5, 41, dtype=dtype))
    assert (y > 0).all()
    assert y.dtype == dtype


# Compiled kernels


@each("phi", COMPILED, ids=lambda phi: phi.name)
@each("lanes", library.LANES.values())
def test_the_c_kernel_has_the_values_and_derivatives_of_the_table(lanes, phi):
    """In float64. Derivatives at NaN or infinity are not compared, because the gradient there is non-finite anyway."""
    if (lib := library.libraries()[0].get(lanes)) is None:
        pytest.skip(f"no library with vectors of {lanes} numbers: {library.libraries()[1]}")
    y, derivative = torch.empty_like(EDGES), torch.empty_like(EDGES)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (EDGES, y, derivative))
    lib.isopos_features(ctypes.c_long(COMPILED.index(phi)), *pointers, ctypes.c_long(EDGES.numel()))
    as_the_table(phi, y, derivative)


# From outside

SOFTPLUS = FeatureMap("softplus", F.softplus)
HALF = FeatureMap("half", lambda x: x.square() + 0.1, lambda x, out, scratch: torch.mul(x, x, out=out).add_(0.1))
WIDER = FeatureMap("wider", lambda x: torch.cat((x.relu(), (-x).relu()), -1) + 0.1)


@pytest.fixture
def no_libraries(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(library, "libraries", lambda: ({}, "off"))


@pytest.mark.parametrize("no_libraries", [True, False], ids=["library", "without"], indirect=True)
@each("causal", [True, False])
@each("decayed", [True, False])
@each("phi", [SOFTPLUS, HALF, WIDER, F.softplus, torch.nn.Softplus()], ids=["softplus", "half", "wider", "plain", "module"])
def test_maps_from_outside_serve_float32_attention(no_libraries, phi, decayed, causal):
    leaves, mask = [x.float().requires_grad_() for x in inputs(2, t=130, e=16)], torch.rand(2, 130) < 0.8
    rotates = phi is not WIDER
    at = schemes.rope(8, 2).at(sequence(130), dtype=torch.float64) if rotates else {}
    at |= {"feature_map": phi, "mask": mask, "causal": causal, "denominator": "plain"}
    at |= {"decay": -0.05 * torch.arange(130, dtype=torch.float64)} if decayed else {}
    out = linear_attention(*leaves, **at)
    slow = naive_linear_attention(*(x.double() for x in leaves), **at)
    grad = torch.randn_like(out)
    found, exact = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(slow, leaves, grad.double())
    for a, b in zip((out, *found), (slow, *exact), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))


def test_a_registered_map_has_its_name_everywhere(monkeypatch):
    monkeypatch.setattr(feature_maps, "FEATURE_MAPS", dict(FEATURE_MAPS))
    with pytest.raises(ValueError, match="name: expected a new name, got 'relu', which is taken"):
        register(FeatureMap("relu", F.relu))
    for name in ("auto", "favor"):  # which schemes have of their own
        with pytest.raises(ValueError, match="expected a new name"):
            register(FeatureMap(name, F.relu))
    assert register(SOFTPLUS) is feature_maps.FEATURE_MAPS["softplus"]
    with pytest.raises(ValueError, match="'softplus'"):
        register(SOFTPLUS)


def test_explain_takes_the_arguments_of_linear_attention():
    q, k, v = torch.randn(3, 1, 4, 70, 16)
    given = schemes.rope(16, 2).at(sequence(70)) | {"causal": True}
    assert explain(q, k[:, :2], v[:, :2], **given).backend == ("cpu" if library.libraries()[0] else "chunks")
    text = str(explain(q, k[:, :2], v[:, :2], **given | {"feature_map": SOFTPLUS}))
    assert text.splitlines()[0] == "chunks serves"
    assert "cpu does not: it does not know the feature map 'softplus'" in text
    streamed = explain(q, k[:, :2], v[:, :2], **given, return_state=True)
    assert (streamed.backend, list(streamed.refusals)) == ("graph", ["triton", "cpu", "chunks", "triton step"])
    with pytest.raises(ValueError, match="denominator: expected"):
        explain(q, k[:, :2], v[:, :2], **given | {"denominator": "none"})


# Random features


@each(("d", "m"), [(8, 8), (8, 20), (8, 3), (1, 5)])
def test_favor_directions_are_orthogonal_in_blocks(d, m):
    w = Favor(d, m).double().projection
    assert w.shape == (m, d)
    for block in w.split(d):
        gram = block @ block.mT
        close(gram, torch.diag(gram.diagonal()), dtype=torch.float32)
    if m > d > 1:
        assert (w[:d] @ w[d : 2 * d].mT).abs().max() > 0.1


def test_favor_directions_have_the_law_of_gaussian_vectors():
    """Norms are distributed as for Gaussian vectors, and every coordinate is standard normal."""
    w = torch.cat([Favor(4, 4, seed=seed).projection for seed in range(3000)]).double()
    n = len(w)
    assert (w.mean(0).abs() < 5 * n**-0.5).all()
    assert (w.mT @ w / n - torch.eye(4)).abs().max() < 5 * (2 / n) ** 0.5
    assert ((w**4).mean(0) - 3).abs().max() < 5 * (96 / n) ** 0.5
    share = (torch.arange(n) + 0.5) / n
    for coordinate in w.mT:
        assert (torch.special.ndtr(coordinate.sort().values) - share).abs().max() < 2 * n**-0.5


def test_favor_estimates_the_softmax_kernel_without_bias():
    d, draws = 4, 4000
    q, k = torch.randn(2, 5, d, dtype=torch.float64)
    found = []
    for seed in range(draws):
        phi = Favor(d, seed=seed).double()
        assert (phi(q) > 0).all()
        bound = (phi.projection.square().sum(-1).amax() / 2 - 30).clamp_min(0)  # what it divides features by
        found.append((phi(q) * phi(k)).sum(-1) * torch.exp(2 * bound))
    found = torch.stack(found)
    error, exact = found.std(0) / draws**0.5, ((q * k).sum(-1) / d**0.5).exp()
    assert ((found.mean(0) - exact).abs() < 5 * error).all()
    assert (error < 0.2 * exact).all()


def test_favor_with_many_features_is_softmax_attention():
    q, k, v = (0.5 * x for x in inputs(1, t=9))
    out = linear_attention(q, k, v, feature_map=Favor(8, 20000).double())
    assert (out - F.scaled_dot_product_attention(q, k, v)).abs().max() < 0.02


@each("causal", [True, False])
def test_favor_fused_is_its_definition(causal):
    leaves, phi = inputs(2, t=70, requires_grad=True), Favor(8, 12).double()
    out, slow = (f(*leaves, feature_map=phi, causal=causal) for f in (linear_attention, quadratic))
    same_everywhere(out, slow, list(leaves))


def test_favor_scales_keys_by_one_common_factor_and_each_query_by_one():
    """Exponents reach from 0 to the clamp: keys along a direction w have up to |w|^2 / 2."""
    phi = Favor(64, 5).double()
    x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None] * phi.projection[:1].double() * 64**0.25
    features = phi(x) * 5**0.5
    assert features.log().amax(-1).max() == pytest.approx(30)
    assert ((features > math.exp(12)) & (features < math.exp(29))).any()
    close((phi.key(x) / features).log(), torch.full_like(features, 20))
    close(phi.query(x)[:10], (features / features.amax(-1, keepdim=True))[:10])


@each("size", [1.0, 30.0, 1e4])
def test_favor_does_not_overflow_and_items_do_not_see_each_other(size):
    phi, x = Favor(64, 256), size * torch.randn(3, 2, 9, 64)
    y = phi(x)
    assert y.isfinite().all()
    assert (y >= 0).all()
    out = linear_attention(x, x, x, feature_map=phi, causal=True)
    assert out.isfinite().all()
    assert torch.equal(phi(x[1:2]), y[1:2])
    x[0] *= 100
    assert torch.equal(phi(x)[1:], y[1:])


def test_favor_redraws_in_place_and_keeps_its_state():
    phi, x = Favor(8, 12, seed=1), torch.randn(1, 1, 3, 8)
    before, data = phi(x), phi.projection.data_ptr()
    other = Favor(8, 12, seed=2)
    assert not torch.allclose(other(x), before)
    other.load_state_dict(phi.state_dict())
    for same in (other, Favor(8, 12, seed=1), copy.deepcopy(phi)):
        assert torch.equal(same(x), before)
    phi.redraw(torch.Generator().manual_seed(5))
    again = Favor(8, 12)
    again.redraw(torch.Generator().manual_seed(5))
    assert phi.projection.data_ptr() == data
    assert not torch.allclose(phi(x), before)
    assert torch.equal(again(x), phi(x))
    phi.to("meta").to_empty(device="cpu").reset_parameters()
    assert torch.equal(phi(x), before)
    assert phi.bfloat16().projection.dtype == torch.float32
    assert phi(x.bfloat16()).dtype == torch.bfloat16


@each("sizes", [(0, 4), (4, 0)])
def test_favor_needs_features(sizes):
    with pytest.raises(ValueError, match="features: expected at least 1"):
        Favor(*sizes)


@each("causal", [True, False])
@each("dtype", [torch.float64, torch.float32, torch.float16])
def test_favor_without_a_denominator_is_the_sum_of_its_products(causal, dtype):
    """The output is phi(q) phi(k) v without scales, because no division would cancel them."""
    (q, k, v), phi = inputs(2, t=20, dtype=dtype), Favor(8, 12)
    a, b = (phi(x.double()) for x in (q, k))
    weight = a @ b.mT
    expected = (weight.tril() if causal else weight) @ v.double()
    options = {"feature_map": phi, "denominator": None, "causal": causal}
    for attention in (linear_attention, naive_linear_attention):
        out = attention(q, k, v, **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-2 if dtype == torch.float16 else 1e-4, atol=1e-2)
    with torch.no_grad():
        state, found = State(), []
        for i in range(20 if causal else 0):
            y, state = linear_attention(
                *(x[..., i : i + 1, :] for x in (q, k, v)), **options, state=state, return_state=True
            )
            found.append(y)
    if causal:
        torch.testing.assert_close(torch.cat(found, -2).double(), expected, rtol=1e-2, atol=1e-2)


def test_favor_with_added_channels_has_no_scales():
    """Weights are <phi(q), phi(k)> + <a, b> over their sum, without scales of phi, which would hide <a, b>."""
    (q, k, v), phi = inputs(2, t=20), Favor(8, 12).double()
    a, b = torch.rand(2, 1, 20, 3).double()
    weight = phi(q) @ phi(k).mT + a @ b.mT
    out = linear_attention(q, k, v, feature_map=phi, isometry=(Append(a), Append(b)), denominator="encoded")
    close(out, weight @ v / weight.sum(-1, keepdim=True))


def test_registered_maps_are_pickled_by_name():
    for feature_map in FEATURE_MAPS.values():
        assert pickle.loads(pickle.dumps(feature_map)) is feature_map
