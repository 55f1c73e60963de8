"""Test Triton's linear attention, interpreted on a CPU, against the definition in float64."""

import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import ALL_KEYS, EDGES, LINEAR, as_the_table, linear_options, quadratic, with_edges, with_gradients

from isopos import schemes
from isopos.attention import explain, linear_attention
from isopos.attention.linear import sums_of
from isopos.attention.problem import check_linear
from isopos.feature_maps import COMPILED, FeatureMap, elu1
from isopos.maps import Chain, Gather, Reflection, Rotation, Scaling
from isopos.ops import gpu, triton_plan
from isopos.ops import linear as ops
from isopos.ops.linear import triton
from isopos.ops.linear import triton_tiles as tiles
from isopos.ops.linear.features import ALL_READY, READY, Features
from isopos.ops.linear.triton_config import Config
from isopos.ops.slices import Slices
from isopos.positions import sequence
from isopos.state import State

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not gpu.interpreted(), reason="TRITON_INTERPRET=1 is not set; tests/test_gpu.py asks a GPU"),
]
tl = gpu.language()[1]
SERVED = [*(name for name in LINEAR if name != "favor"), *ALL_KEYS]
T = 50  # four chunks, in two segments


@gpu.language()[0]
def _features(x, y, derivative, PHI: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    number = tl.load(x + n)
    value = tiles.phi(number, PHI)
    tl.store(y + n, value)
    tl.store(derivative + n, tiles.derivative(number, value, PHI))


@pytest.mark.parametrize("phi", COMPILED, ids=lambda phi: phi.name)
def test_feature_maps_have_the_values_and_derivatives_of_the_table(phi):
    y, derivative = torch.empty_like(EDGES), torch.empty_like(EDGES)
    _features[(1,)](EDGES, y, derivative, PHI=phi.name, N=EDGES.numel())
    as_the_table(phi, y, derivative, 2e-6)  # e^30 is a power of two with a rounded exponent, as on a GPU


@pytest.fixture(autouse=True)
def several_segments(monkeypatch):
    """Split scans into segments of two chunks; returns the calls of the kernel."""
    monkeypatch.setattr(triton, "LEAST", 2)
    monkeypatch.setattr(triton_plan, "PLANS", {})
    calls = []
    forward = triton.Triton.forward
    monkeypatch.setattr(triton.Triton, "forward", lambda *args: calls.append(1) or forward(*args))
    return calls


def drawn(*shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    return with_edges(*(torch.randn(shape, generator=draw).to(dtype) for shape in shapes))


def near(found, exact, most=3e-6):
    """Assert equality up to `most` times the largest magnitude."""
    for x, y in zip(found, exact, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).abs().max() <= most * max(y.abs().max(), exact[0].abs().max())


def by_definition(inputs, given, grad):
    """Output and gradients by the definition, in float64."""
    if "segment_ids" in given:
        given = given | {"segment_ids": (given["segment_ids"],) * 2}
    return with_gradients(inputs, torch.float64, given, grad, quadratic)


@pytest.mark.parametrize("name", SERVED)
def test_agrees_with_the_definition(several_segments, name):
    b, h, t, d, e = 1, 2, T, 16, 24
    given = linear_options(name, b, h, t, d)
    *inputs, grad = drawn((b, h, t, d), (b, h, t, d), (b, h, t, e), (b, h, t, e))
    near(with_gradients(inputs, torch.float32, given, grad), by_definition(inputs, given, grad))
    assert several_segments


def falling(t, *falls):
    """Log decays ``[h t]`` of a head for each fall: by a little at each token, and at token 20 by the fall."""
    each = torch.full((len(falls), t), -0.02, dtype=torch.float64)
    each[:, 20] -= torch.tensor(falls, dtype=torch.float64)
    return each.cumsum(-1)


@pytest.mark.parametrize(
    ("form", "causal", "chunk", "steep", "most"),
    [
        ("plain", True, 64, tiles.STEEP_OF_BF16, 1e-5),
        ("plain", False, 16, tiles.STEEP, 3e-6),
        ("encoded", False, 16, tiles.STEEP_OF_BF16, 1e-5),
        ("none", True, 16, tiles.STEEP, 3e-6),
    ],
)
def test_steep_decays_have_weights_of_their_own(monkeypatch, form, causal, chunk, steep, most):
    """Decays that fall by less than `STEEP` in each chunk of a segment scale features, which otherwise would overflow."""
    monkeypatch.setattr(tiles, "STEEP", steep)
    monkeypatch.setattr(triton, "config", lambda d, e, *_, **__: Config(chunk, d, e, d, e, 4, 1, False))
    t, d = 3 * chunk + 2, 16
    g = falling(t, steep.value - 2, steep.value + 2, 5000)
    given = schemes.rope(d, 1, denominator=form).at(sequence(t) / 50) | {"decay": g, "causal": causal}
    *inputs, grad = drawn(*[(1, len(g), t, d)] * 4)
    found = with_gradients(inputs, torch.float32, given, grad)
    exact = by_definition(inputs, given, grad)
    near(found, exact, most)
    monkeypatch.setattr(tiles, "STEEP", tl.constexpr(0.0))  # no decay is
    weighted = linear_attention(*inputs, **given)
    near([weighted], exact[:1])
    first = [out[0, :, : 2 * chunk] for out in (found[0], weighted)]  # the segment of the fall
    assert (first[0] != first[1]).flatten(1).any(1).tolist() == [True, False, False]


TOGETHER = ("identity", "masked", "drawn decay, plain", "bidirectional with a decay", "lrpe-unitary", "permuteformer")


@pytest.mark.parametrize("name", [*TOGETHER, "lrpe-orthogonal", "all keys, rope"])
def test_keys_and_values_may_get_their_gradients_in_one_scan(monkeypatch, name):
    """As on sm_90 if a program has enough registers (`triton.config`)."""
    config = triton.config
    monkeypatch.setattr(triton, "config", lambda *args, **how: config(*args, **how)._replace(together=True))
    given = linear_options(name, 1, 1, T, 16)
    *inputs, grad = drawn((1, 1, T, 16), (1, 1, T, 16), (1, 1, T, 24), (1, 1, T, 24))
    near(with_gradients(inputs, torch.float32, given, grad), by_definition(inputs, given, grad))


@pytest.mark.parametrize(("d", "e"), [(4, 3), (20, 40), (80, 17)])
@pytest.mark.parametrize("name", ["drawn decay, plain", "lrpe-unitary", "lrpe-permutation", "all keys, rope"])
def test_widths_of_all_kinds(name, d, e):
    given = linear_options(name, 1, 1, 40, d)
    *inputs, grad = drawn((1, 1, 40, d), (1, 1, 40, d), (1, 1, 40, e), (1, 1, 40, e))
    near(with_gradients(inputs, torch.float32, given, grad), by_definition(inputs, given, grad), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wide_features_are_the_sum_of_several_launches(several_segments, dtype):
    given = linear_options("permuteformer", 1, 1, 33, 72) | {"denominator": "plain"}
    *inputs, grad = drawn((1, 1, 33, 72), (1, 1, 33, 72), (1, 1, 33, 80), (1, 1, 33, 80), dtype=dtype)
    most = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    near(with_gradients(inputs, dtype, given, grad), by_definition(inputs, given, grad), most)
    assert several_segments


SEVERAL = [("permuteformer", 2, 2), ("bidirectional with a decay", 2, 2), ("cosformer", 2, 2), ("all keys, cosformer", 2, 2)]
SEVERAL += [(name, *cut) for name in ("drawn decay, plain", "all keys, rope") for cut in ((2, 1), (1, 2), (2, 2))]


@pytest.mark.parametrize(("name", "blocks", "parts"), SEVERAL)
def test_blocks_and_parts_of_features_and_values_change_nothing(monkeypatch, name, blocks, parts):
    def config(d, e, *_, **__):
        return Config(32, d // blocks, e // blocks, d // parts, e // parts, 4, 1, False)

    monkeypatch.setattr(triton, "config", config)
    given = linear_options(name, 1, 1, 40, 32)
    given |= {"denominator": "plain"} if name == "permuteformer" else {}  # of which the features are in another order
    *inputs, grad = drawn(*[(1, 1, 40, 32)] * 4)
    near(with_gradients(inputs, torch.float32, given, grad), by_definition(inputs, given, grad))


@pytest.mark.parametrize(
    ("most", "programs", "segments"),
    [
        (0, 1, 1),  # too short to be cut
        (16, 128, 2),  # all fit side by side
        (16, 140, 3),  # in two rounds, each of a third
        (16, 256, 1),
        (512, 1, 264),
        (512, 1000, 1),
    ],
)
def test_scans_are_cut_into_segments_that_run_side_by_side(most, programs, segments):
    assert triton._segments(most, programs, 264) == segments


@pytest.mark.parametrize("length", [1, 16, 31, 65])
@pytest.mark.parametrize("name", ["drawn decay, plain", "all keys, rope"])
def test_lengths(monkeypatch, name, length):
    """Each chunk is a segment, with up to five segments."""
    monkeypatch.setattr(triton, "LEAST", 1)
    given = linear_options(name, 1, 1, length, 16)
    *inputs, grad = drawn(*[(1, 1, length, 16)] * 4)
    near(with_gradients(inputs, torch.float32, given, grad), by_definition(inputs, given, grad))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("form", "d"), [("plain", 64), ("encoded", 20), ("none", 80)])
@pytest.mark.parametrize("borders", [[1, 2, 3, 40], [5, 16, 32, 47, 48]], ids=str)
def test_segments_without_a_decay(several_segments, borders, form, d, causal):
    """Segments of one token, of several chunks, and that end with a chunk. Their scans have the tiles of no decay."""
    t = 50
    ids = torch.bucketize(torch.arange(t), torch.tensor(borders), right=True)[None]
    given = schemes.rope(d, 1, denominator=form).at(sequence(t) / 50) | {"segment_ids": ids, "causal": causal}
    *inputs, grad = drawn((1, 1, t, d), (1, 1, t, d), (1, 1, t, 24), (1, 1, t, 24))
    near(with_gradients(inputs, torch.float32, given, grad), by_definition(inputs, given, grad), 1e-5)
    assert several_segments
    call, without = (
        triton._call(sums_of(check_linear(*inputs, own, streams=False))) for own in (given, given | {"segment_ids": None})
    )
    assert (call.config, call.inputs(0).g, call.borders is None) == (without.config, None, False)


@pytest.mark.parametrize("form", ["plain", "encoded", "none"])
@pytest.mark.parametrize(("t", "s"), [(1, 90), (40, 75), (90, 1)])
def test_all_keys_of_other_tokens(several_segments, t, s, form):
    """Any number of queries at other positions. Masked keys contain NaN, which has no effect."""
    places = [sequence(n) / 1000 for n in (t, s)]  # no denominator vanishes
    given = schemes.rope(20, 1, denominator=form).at(*places) | {"mask": torch.arange(2 * s).view(2, s) % 5 != 1}
    *inputs, grad = drawn((2, 1, t, 20), (2, 1, s, 20), (2, 1, s, 24), (2, 1, t, 24))
    exact = by_definition(inputs, given, grad)
    for x in inputs[1:]:
        x.masked_fill_(~given["mask"][:, None, :, None], torch.nan)
    near(with_gradients(inputs, torch.float32, given, grad), exact)
    assert several_segments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_up_in_float32(dtype):
    """Only the output and the gradients are rounded."""
    given = linear_options("all keys, rope", 1, 1, 70, 16)
    *inputs, grad = drawn(*[(1, 1, 70, 16)] * 4, dtype=dtype)
    found = with_gradients(inputs, dtype, given, grad)
    assert [x.dtype for x in found] == [dtype] * 4
    near(found, by_definition(inputs, given, grad), torch.finfo(dtype).eps)
    given = linear_options("drawn decay, plain", 1, 1, 70, 16)
    *inputs, grad = drawn(*[(1, 1, 70, 16)] * 4, dtype=dtype)
    found = with_gradients(inputs, dtype, given, grad)
    assert [x.dtype for x in found] == [dtype] * 4 + [torch.float64]
    near(found, by_definition(inputs, given, grad), torch.finfo(dtype).eps)


def test_sums_are_written_in_the_dtype_of_inputs():
    """Finished sums have the dtype of inputs. Sums with a column are float32, because the division follows."""
    q, k, v = drawn(*[(1, 1, 20, 16)] * 3, dtype=torch.bfloat16)
    given = (Features(elu1, dtype=torch.float32),) * 2 + (READY,)
    for form, own in (("divide", torch.bfloat16), (None, torch.bfloat16), ("column", torch.float32)):
        assert ops.linear(ops.Sums(q, k, v, given, denominator=form)).dtype == own
    assert ops.linear(ops.Sums(q, k, v.float(), given, denominator="divide")).dtype == torch.float32


LEARNED = [
    *(("plain", axes) for axes in ((), (2,), (2, 1))),
    ("lifted", (2,)),
    ("bidirectional", ()),
    ("bidirectional", (2, 1)),
]
LEARNED += [("reflected", (2, 1)), ("reflected", ()), ("all keys", (2,))]


@pytest.mark.parametrize(("more", "axes"), LEARNED, ids=str)
def test_gradients_of_what_is_learned(more, axes):
    """Gradients of tables with and without axes of samples and heads, and of normals."""
    t, d, lifted = 34 if more == "all keys" else 20, 16, more == "lifted"
    angles, normal = drawn((*axes, t, d if lifted else d // 2), (2, 1, d))
    *inputs, grad = drawn(*[(2, 2, t, d)] * 4)
    reflected = more in ("reflected", "all keys")
    given = {"feature_map": elu1, "causal": more not in ("bidirectional", "all keys")}
    given["denominator"] = "plain" if more in ("plain", "all keys") else None
    if more == "bidirectional":
        given["decay"] = torch.arange(t) * torch.tensor([[-0.01], [-0.1]], dtype=torch.float64)

    def gradients(dtype, attend):
        learned = torch.stack((angles.cos(), angles.sin()), -1).to(dtype).requires_grad_()
        unit = F.normalize(normal.to(dtype), dim=-1).requires_grad_()
        rho = Chain(Reflection(unit), Rotation(learned)) if reflected else Rotation(learned, lifted)
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves, isometry=rho, **given)
        return torch.autograd.grad(out, [learned, *leaves, *([unit] if reflected else [])], grad.to(dtype))

    near(gradients(torch.float32, linear_attention), gradients(torch.float64, quadratic))


@pytest.mark.parametrize("name", ["rope", "cosformer", "permuteformer", "lrpe-orthogonal"])
def test_tables_are_read_where_they_are(name):
    """All samples, and heads with equal values, read one table, built once per forward pass in float32 or bytes."""
    given = schemes.REGISTRY[name](16, 2).at(sequence(20)) | {"causal": True}
    sums = sums_of(check_linear(*drawn(*[(3, 2, 20, 16)] * 3), given, streams=False))
    table, read = triton._closed(sums)[0].table, triton._call(sums).inputs(0).table
    assert table.dtype == (torch.uint8 if name == "permuteformer" else torch.float32)
    assert read.first.data_ptr() == table.data_ptr()
    assert (read.inner, read.head == 0) == (0, table.shape[-4 if name != "permuteformer" else -3] == 1)


@pytest.mark.parametrize("layout", ["heads last", "columns", "expanded", "cut", "two axes", "shared heads"])
def test_inputs_may_be_views(several_segments, layout):
    make = {
        "heads last": lambda n: torch.randn(1, 20, 2, 16).transpose(1, 2),
        "columns": lambda n: torch.randn(1, 2, 16, 20).mT,
        "expanded": lambda n: torch.randn(2, 1, 20, 16).expand(2, 2, 20, 16),
        "cut": lambda n: torch.randn(1, 3, 40, 20)[:, 1:, 15:35, 2:18],
        "two axes": lambda n: torch.randn(1, 2, 1, 20, 16).transpose(0, 1),
        "shared heads": lambda n: torch.randn(1, 4 if n in (0, 3) else 2, 20, 16),
    }[layout]
    q, k, v, grad = (make(n) for n in range(4))
    given = linear_options("encoded" if layout == "two axes" else "lrpe-permutation", 1, 2, 20, 16)
    found = with_gradients((q, k, v), torch.float32, given, grad)
    assert several_segments
    exact = with_gradients((q, k, v), torch.float64, given, grad)
    near(found, exact)


@pytest.mark.parametrize("causal", [True, False])
def test_a_column_is_left_undivided(causal):
    q, k, v = (x.requires_grad_() for x in drawn(*[(1, 2, 70, 16)] * 3))
    phi = Features(elu1)
    out = ops.linear(ops.Sums(q, k, v, (phi, phi, READY), None, causal, "column"))
    exact = ops.linear(ops.Sums(*(x.double() for x in (q, k, v)), (phi, phi, READY), None, causal, "column"))
    (weight,) = drawn(out.shape)
    found, known = (torch.autograd.grad(x, (q, k, v), weight.to(x.dtype)) for x in (out, exact))
    near([out, *found], [exact, *(x.double() for x in known)])


def test_clamped_denominators_are_counted_and_pass_no_gradient():
    q = torch.zeros(1, 1, 3, 16)
    q[..., 0] = 1.0
    k, v = q.clone(), torch.randn(1, 1, 3, 16)
    k[..., 0] = torch.tensor([1.0, -1.0, 1.0])  # the second row's denominator vanishes
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.double() for x in leaves]
    with ops.Clamped() as clamped:
        out = ops.linear(ops.Sums(*leaves, ALL_READY, denominator="divide"))
    assert (clamped.count, clamped.total) == (1, 3)
    known = ops.linear(ops.Sums(*exact, ALL_READY, denominator="divide"))
    near(torch.autograd.grad(out.sum(), leaves), [x.double() for x in torch.autograd.grad(known.sum(), leaves)])


def test_small_denominators_keep_their_sign():
    """Denominators are -1e-8, 2e-8 and -8e-8. Numerators have the same signs, so quotients are positive."""
    q = torch.zeros(1, 1, 3, 16)
    q[..., 0] = 1.0
    k, v = q * torch.tensor([-1e-8, 3e-8, -1e-7])[:, None], 1 + torch.rand(1, 1, 3, 16)
    out = ops.linear(ops.Sums(q, k, v, ALL_READY, denominator="divide"))
    assert (out[..., [0, 2], :] > 0).all()
    near([out], [ops.linear(ops.Sums(q.double(), k.double(), v.double(), ALL_READY, denominator="divide"))])


def test_rows_do_not_hold_what_they_do_not_see():
    given = linear_options("masked decay, encoded", 1, 2, 50, 16)
    q, k, v = drawn(*[(1, 2, 50, 16)] * 3)
    hidden = int((~given["mask"][0]).nonzero()[0])
    v[0, :, hidden] = torch.nan
    assert linear_attention(q, k, v, **given).isfinite().all()
    k[0, 1, 34, 3] = torch.nan
    given["mask"][0, 34] = True
    out = linear_attention(q, k, v, **given)
    assert out[0, 0].isfinite().all()
    assert out[0, 1, :34].isfinite().all()
    assert out[0, 1, 34].isnan().all()


STREAMS = ["no denominator", "encoded", "drawn decay", "drawn decay, plain", "decays of queries and keys", "packed"]
STREAMS += ["masked decay, encoded", "lrpe-unitary", "lrpe-orthogonal", "lrpe-permutation", "permuteformer"]


def _cut(x, part):
    """The part of an option for some tokens."""
    if isinstance(x, tuple):
        return tuple(_cut(own, part) for own in x)
    return (
        x[..., part] if isinstance(x, torch.Tensor) else x.part(Slices((), slice(None), part)) if hasattr(x, "part") else x
    )


def in_pieces(q, k, v, *, sizes=(20, 1, 3, 4), **given):
    """Linear attention of a stream in chunks."""
    sizes = sizes if q.shape[-2] == sum(sizes) else (50, 1, 14, 5)
    outs, state, start = [], State(), 0
    for size in sizes:
        part = slice(start, start := start + size)
        own = {name: _cut(x, part) for name, x in given.items()}
        out, state = linear_attention(*(_cut(x.mT, part).mT for x in (q, k, v)), **own, state=state, return_state=True)
        outs.append(out)
    return torch.cat(outs, -2)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_in_pieces_is_the_whole(several_segments, name):
    """Gradients propagate through states and through log decays of earlier tokens."""
    t = 70 if name in ("drawn decay, plain", "packed") else 28  # with several segments, or one
    given = linear_options(name, 1, 2, t, 16)
    *inputs, grad = drawn((1, 2, t, 16), (1, 2, t, 16), (1, 2, t, 20), (1, 2, t, 20))
    near(with_gradients(inputs, torch.float32, given, grad, in_pieces), by_definition(inputs, given, grad))
    assert len(several_segments) == 3


def test_a_stream_whose_heads_share_keys(several_segments):
    given = linear_options("lrpe-unitary", 1, 2, 28, 16)
    inputs = drawn((1, 4, 28, 16), (1, 2, 28, 16), (1, 2, 28, 20))
    (grad,) = drawn((1, 4, 28, 20))
    exact = with_gradients(inputs, torch.float64, given, grad)
    near(with_gradients(inputs, torch.float32, given, grad, in_pieces), exact)
    assert len(several_segments) == 3


@pytest.mark.parametrize("steps", [1, 9])
def test_a_compiler_leaves_the_kernels_as_they_are(several_segments, steps):
    """The kernel choice does not break the graph. Causal sums are one opaque operation, which the kernels serve."""
    scheme = schemes.REGISTRY["retnet"](16, 2)
    q, k, v = drawn(*[(1, 2, 30 + steps, 16)] * 3)
    first = scheme.at(sequence(30), state=State())
    state = linear_attention(*(x[..., :30, :] for x in (q, k, v)), causal=True, return_state=True, **first)[1]

    given = scheme.at(sequence(30 + steps)[30:], state=state) | {"causal": True}

    def attend(q, k, v):
        return linear_attention(*(x[..., 30:, :] for x in (q, k, v)), **given)

    several_segments.clear()
    with torch.no_grad():
        near([torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)], [attend(q, k, v).double()])
    assert bool(several_segments) == (steps > 1)


def test_a_prefill_and_its_steps(several_segments):
    scheme = schemes.REGISTRY["retnet"](16, 2)
    q, k, v = drawn(*[(1, 2, 72, 16)] * 3)
    with torch.no_grad():
        whole = linear_attention(*(x.double() for x in (q, k, v)), **scheme.at(sequence(72)), causal=True)
        state, found = State(), []
        for part in (slice(0, 70), slice(70, 71), slice(71, 72)):
            given = scheme.at(sequence(72)[part], state=state) | {"causal": True, "return_state": True}
            out, state = linear_attention(*(x[..., part, :] for x in (q, k, v)), **given)
            found.append(out)
    assert several_segments
    near([torch.cat(found, -2)], [whole])


def test_second_derivatives_raise():
    q, k, v = (x.requires_grad_() for x in drawn(*[(1, 1, 5, 16)] * 3))
    out = ops.linear(ops.Sums(q, k, v, ALL_READY))
    with pytest.raises(RuntimeError, match="naive_linear_attention"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)


def numbers(dtype=torch.float32, t=70, d=16, features=ALL_READY, **more):
    own = dict(zip("qkv", torch.randn(3, 1, 2, t, d).to(dtype), strict=True))
    return ops.Sums(**own | {"features": features} | more)


def features(*maps, kinds=(), phi=elu1):
    return (Features(phi, maps[0] if maps else None, kinds),) * 2 + (READY,)


MIRROR = Reflection(F.normalize(torch.ones(2, 1, 16), dim=-1).requires_grad_())
REFUSALS = [
    (numbers(torch.float64), "it reads float32, bfloat16 and float16, not torch.float64"),
    (numbers(t=1, stream=ops.Past()), "one token of a stream is a step, and no chunk"),
    (numbers(stream=ops.Past((torch.zeros(1, 2, 16, 17),))), re.escape("a stream has float32 sums [(1, 2, 16, 16)]")),
    (numbers(k=torch.randn(3, 70, 16), stream=ops.Past()), "queries, keys and values have one shape of samples and heads"),
    (numbers(features=features(phi=FeatureMap("cube", lambda x: x**3))), "it does not know the feature map 'cube', only .*"),
    (numbers(features=features(Scaling(torch.ones(1, 70, 1)), kinds=None)), "it makes features by a reflection, then .*"),
    (numbers(t=0), "there is nothing to sum up"),
    (numbers(causal=False), "two products of matrices are all there is to do"),
    (numbers(torch.bfloat16, d=272), "features and values come up to 256, not by 272"),
    (
        numbers(torch.bfloat16, d=160, features=features(Rotation(torch.ones(70, 160, 2), True), kinds=("lift",))),
        "features and values come up to 256, not by 320",
    ),
    (
        numbers(d=256, features=features(Reflection(torch.ones(1, 1, 256)), kinds=("reflection",))),
        "features of a reflection come up to 128, or 256 in bfloat16 on sm_90, not by 256",
    ),
    (
        numbers(features=features(Chain(MIRROR, Gather(torch.arange(16)[None, None])), kinds=("reflection", "gather"))),
        "it has no gradient of a normal that a gather follows",
    ),
    (
        numbers(features=features(Rotation(torch.ones(70, 4, 2)), kinds=("rotation",))),
        "queries, keys and their maps .* 16.*",
    ),
]


@pytest.mark.parametrize(("sums", "why"), REFUSALS, ids=lambda x: x[:20] if isinstance(x, str) else "")
def test_a_refusal_is_a_sentence(sums, why):
    assert re.fullmatch(why, triton.TRITON.serves(sums))


def test_explain_names_it():
    q, k, v = torch.randn(3, 1, 2, 70, 16)
    assert explain(q, k, v, **linear_options("packed", 1, 2, 70, 16)).backend == "triton"


PLANNED = {"masked": (True, True), "drawn decay, plain": (True, False), "bidirectional with a decay": (True, False)}


@pytest.mark.parametrize("name", PLANNED)
def test_plans_give_the_same_numbers(monkeypatch, name):
    """The first call is seen, the second recorded, the third repeats its launches; other layouts have other plans.

    PyTorch sums up gradients of decays, and adds those of two directions.
    """
    given, plans = linear_options(name, 1, 1, 20, 16), triton_plan.PLANS
    *draws, grad = torch.randn(5, 1, 1, 20, 16).unbind()
    calls = draws[:3], draws[1:], draws[:3], [draws[3]] * 2 + [draws[0]], draws[1:]
    found = [with_gradients(inputs, torch.float32, given, grad) for inputs in calls]
    assert len(plans) == 4  # of forward and backward passes, for different inputs and for queries that are the keys
    assert tuple(isinstance(plan, triton_plan.PassPlan) for plan in list(plans.values())[:2]) == PLANNED[name]
    for planned, inputs in zip(found, calls, strict=True):
        monkeypatch.setattr(triton_plan, "PLANS", {})
        assert all(map(torch.equal, planned, with_gradients(inputs, torch.float32, given, grad)))


def test_plans_keep_no_tensor():
    given = linear_options("masked", 1, 1, 20, 16)

    def call():
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 20, 16).unbind())
        out = linear_attention(q, k, v, **given)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        return [weakref.ref(x) for x in (q, k, v, out, *grads)]

    kept = [call() for _ in range(3)]
    assert any(isinstance(plan, triton_plan.PassPlan) for plan in triton_plan.PLANS.values())
    gc.collect()
    assert not [ref() for refs in kept for ref in refs if ref() is not None]


def test_counters_count_with_plans():
    given = linear_options("rope", 1, 1, 9, 16)
    inputs = torch.full((3, 1, 1, 9, 16), -30.0).unbind()
    for _ in range(3):
        linear_attention(*inputs, **given)
    with ops.Clamped() as clamped:
        linear_attention(*inputs, **given)
    assert (clamped.count, clamped.total) == (9, 9)


def test_old_plans_are_forgotten(monkeypatch):
    monkeypatch.setattr(triton_plan, "MOST", 3)
    for t in range(1, 6):
        linear_attention(*torch.ones(3, 1, 1, t, 16).unbind(), **linear_options("identity", 1, 1, t, 16))
    assert len(triton_plan.PLANS) == 3
