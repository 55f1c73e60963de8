"""Test on a GPU that every scheme equals float64 on a CPU in both kinds of attention, with gradients.

The most important tests come first. ISOPOS_TRITON=any requests the Triton kernels, as `make test-gpu` does. ISOPOS_GPU names
another device than cuda.
"""

import copy
import os

import pytest
import torch
from cases import ATTENTION, PRESETS, SCHEMES, close, gradients, inputs_of, parents_first, stream, with_kinds

from isopos import State, linear_attention, sequence
from isopos.exact import to_float64
from isopos.ops.gpu import SWITCH
from isopos.schemes import build

DEVICE = os.environ.get("ISOPOS_GPU", "cuda")
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("no GPU is here", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:softmax_attention. all scores are formed")  # with few features, in streams
T = 150  # two chunks and a part of one


ERROR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of a norm: vanishing denominators enlarge any


def near(actual, expected, dtype):
    """Assert that the error is small relative to the norm.

    In narrow dtypes rows far above the median do not count: their denominators almost vanish, and rounded features change
    them by any factor.
    """
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    if dtype != torch.float32 and expected.ndim:
        size = expected.norm(dim=-1, keepdim=True)
        usual = size <= 10 * size.median()
        assert usual.double().mean() > 0.9
        actual, expected = actual * usual, expected * usual
    assert (actual - expected).norm() <= ERROR[dtype] * max(1, expected.norm())


def there(value, dtype=None):
    """Copies of tensors on the device, as separate leaves."""
    return [x.detach().to(DEVICE, dtype or x.dtype).requires_grad_(x.requires_grad) for x in value]


def both(case, kind, dtype):
    """A scheme, content and positions on the CPU in float64, and on the device in a dtype with the same numbers."""
    scheme = case.build(attention=kind)
    x = case.positions(2, t=T)
    content = [a.to(dtype).double().requires_grad_() for a in inputs_of(scheme, 2, t=T)]
    return (scheme, content, x), (copy.deepcopy(scheme).to(DEVICE), there(content, dtype), x.to(DEVICE))


def attend(kind, scheme, content, x, **options):
    return ATTENTION[kind](*content, **scheme.at(x, dtype=torch.promote_types(content[0].dtype, torch.float32)), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 80, 256, 32])
@pytest.mark.parametrize("name", ["none", "rope", "retnet", "lrpe-orthogonal", "permuteformer"])
def test_sizes_of_models(name, head_dim, dtype):
    scheme, x = build(name, head_dim, 2, {"denominator": "plain"}), sequence(1000)
    content = [a.to(dtype).double().requires_grad_() for a in torch.randn(3, 1, 2, 1000, head_dim).unbind()]
    device = copy.deepcopy(scheme).to(DEVICE), there(content, dtype), x.to(DEVICE)
    expected, actual = attend("linear", scheme, content, x, causal=True), attend("linear", *device, causal=True)
    near(actual, expected, dtype)
    for fast, slow in zip(gradients(actual.cpu(), device[1]), gradients(expected, content), strict=True):
        near(fast, slow, dtype)


def test_a_prepared_stream_equals_the_whole():
    from isopos.stream import Stream

    scheme = build("rope", 64, 4, {}).to(DEVICE)
    content = there(torch.randn(3, 2, 4, 80, 64).unbind())
    with torch.no_grad():
        steps = Stream(scheme)
        pieces = [steps(*(a[..., n : n + 1, :] for a in content)) for n in range(80)]
        whole = linear_attention(*content, **scheme.at(sequence(80, device=DEVICE)), causal=True)
    assert isinstance(steps.state, State)
    close(torch.cat(pieces, -2).cpu(), whole.cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
@pytest.mark.parametrize("name", ["none", "rope", "retnet", "permuteformer"])
def test_a_captured_step_decodes_the_next_token_at_each_replay(name):
    from isopos.stream import Stream

    scheme = build(name, 64, 4, {}).to(DEVICE)
    content = there(torch.randn(3, 2, 4, 40, 64).unbind())
    with torch.no_grad():
        whole = linear_attention(*content, **scheme.at(sequence(40, device=DEVICE)), causal=True)
        stream, token = Stream(scheme), [a[..., :1, :].clone() for a in content]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outs = [stream(*(a[..., n : n + 1, :] for a in content)).clone() for n in range(4)]  # which compile the kernel
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = stream(*token)
        for n in range(4, 40):
            for into, a in zip(token, content, strict=True):
                into.copy_(a[..., n : n + 1, :])
            graph.replay()
            outs.append(out.clone())
        stream.replayed(35)
    close(torch.cat(outs, -2).cpu(), whole.cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
@pytest.mark.parametrize("name", ["none", "rope", "retnet"])
def test_captured_passes_have_the_bits_of_calls(name):
    scheme = build(name, 64, 4, {"denominator": "plain"}).to(DEVICE)
    q, k, v = (a.requires_grad_() for a in there(torch.randn(3, 2, 4, 512, 64).unbind(), torch.bfloat16))
    at = scheme.at(sequence(512, device=DEVICE), dtype=torch.float32)

    def passes():
        out = linear_attention(q, k, v, **at, causal=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = [x.detach().clone() for x in passes()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes()
    for x in found:
        x.detach().zero_()
    graph.replay()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
def test_several_streams_of_the_device_at_once():
    scheme, cases = build("rope", 64, 4, {}).to(DEVICE), []
    at = scheme.at(sequence(T, device=DEVICE))
    torch.cuda.synchronize()
    for _ in range(8):
        with torch.cuda.stream(torch.cuda.Stream()):
            content = torch.randn(3, 2, 4, T, 64, device=DEVICE).unbind()
            cases.append((content, linear_attention(*content, **at, causal=True)))
    torch.cuda.synchronize()
    for content, out in cases:
        close(out, linear_attention(*content, **at, causal=True))


def test_positions_are_exact_far_away():
    scheme = build("rope", 64, 1, {}).to(DEVICE)
    q, k = there(torch.randn(2, 1, 1, T, 64).unbind())
    near, far = (scheme.encoding(sequence(T, device=DEVICE) + start) for start in (0, 2**31))
    size = (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item()
    error = (near(q).double() @ near(k).double().mT - far(q).double() @ far(k).double().mT).abs().max()
    assert error < 1e-6 * size
    assert to_float64(sequence(1, device=DEVICE)).dtype == torch.float64


@pytest.mark.parametrize("name", ["none", "rope", "lrpe-unitary", "permuteformer", "retnet"])
def test_autocast_keeps_angles_and_sums_in_full_precision(name):
    scheme = build(name, 64, 4, {}).to(DEVICE)
    q, k, v = there(torch.randn(3, 2, 4, T, 64).unbind())
    x = sequence(T, device=DEVICE) + 2**20
    near = linear_attention(q, k, v, **scheme.at(x), causal=True)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        cast = linear_attention(q, k, v, **scheme.at(x), causal=True)
    close(cast.float().cpu(), near.cpu(), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["rope", "lrpe-orthogonal", "permuteformer"])
def test_compiled_into_one_graph(name):
    scheme = build(name, 64, 4, {}).to(DEVICE)
    q, k, v = (a.requires_grad_() for a in there(torch.randn(3, 2, 4, T, 64).unbind()))

    def run(q, k, v):
        return linear_attention(q, k, v, **scheme.at(sequence(T, device=q.device)), causal=True)

    expected, actual = run(q, k, v), torch.compile(run, fullgraph=True)(q, k, v)
    close(actual.cpu(), expected.cpu())
    for fast, slow in zip(gradients(actual.cpu(), [q, k, v]), gradients(expected.cpu(), [q, k, v]), strict=True):
        close(fast.cpu(), slow.cpu(), dtype=torch.float32, roundings=1 << 14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@with_kinds(SCHEMES)
def test_attention_and_its_gradients(monkeypatch, case, kind, dtype):
    """Use the Triton kernels if they are requested and serve; float32 also uses PyTorch's operations."""
    here, device = both(case, kind, dtype)
    with torch.no_grad():
        for own in (here[0], device[0]):
            for parameter, value in zip(own.parameters(), here[0].parameters(), strict=True):
                parameter.copy_(value)
    asked = os.environ.get(SWITCH, "0")
    switches = dict.fromkeys((asked, "0") if dtype == torch.float32 else (asked,))
    for causal in (True, False) if case.both_ways else (True,):
        expected = attend(kind, *here, causal=causal)
        for switch in switches:
            monkeypatch.setenv(SWITCH, switch)
            actual = attend(kind, *device, causal=causal)
            assert (actual.device.type, actual.dtype) == (torch.device(DEVICE).type, dtype)
            near(actual, expected, dtype)
            if dtype == torch.float32:  # narrower ones round gradients between operations
                leaves = [side[1] + list(side[0].parameters()) for side in (device, here)]
                for fast, slow in zip(gradients(actual.cpu(), leaves[0]), gradients(expected, leaves[1]), strict=True):
                    near(fast, slow, dtype)


@pytest.mark.parametrize("name", ["t5", "alibi", "kerple"])
def test_gradients_of_biases_alone(name):
    """Where queries, keys and values need none, as with frozen projections."""
    scheme, content = build(name, 64, 2, {"attention": "softmax"}), torch.randn(3, 1, 2, T, 64).double().unbind()
    device = copy.deepcopy(scheme).to(DEVICE)
    leaves = [list(each.parameters()) for each in (device, scheme)]
    if not leaves[0]:
        pytest.skip("it has no parameters")
    actual = attend("softmax", device, there(content, torch.float32), sequence(T, device=DEVICE), causal=True)
    expected = attend("softmax", scheme, content, sequence(T), causal=True)
    for fast, slow in zip(gradients(actual.cpu(), leaves[0]), gradients(expected, leaves[1]), strict=True):
        near(fast, slow, torch.float32)


@with_kinds(PRESETS)
def test_streams_end_where_the_whole_does(case, kind):
    if not case.streams(kind):
        pytest.skip("it has no streams")
    (*_, x), (scheme, content, _) = both(case, kind, torch.float32)
    x = parents_first(scheme.group, x).to(DEVICE)
    with torch.no_grad():
        whole = attend(kind, scheme, content, x, causal=True)
        pieces, _ = stream(scheme, content, x, (0, 1, 70, 71, T))
    near(pieces, whole, torch.float32)
