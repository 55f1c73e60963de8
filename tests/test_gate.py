"""Test that only plain CPU tensors reach compiled code. Other arguments are errors, or use another backend."""

from functools import partial

import pytest
import torch
from cases import each, named
from torch._subclasses.fake_tensor import FakeTensorMode

from isopos import schemes
from isopos.attention import linear_attention, naive_linear_attention, softmax_attention
from isopos.feature_maps import elu1
from isopos.maps import Reflection, Rotation
from isopos.models import Decoder
from isopos.ops import library
from isopos.positions import sequence
from isopos.state import State
from isopos.terms import Clipped

T, D = 100, 16
SHAPE = 2, 4, T, D


class Wrapped(torch.Tensor):
    """A subclass that does nothing: PyTorch's operations serve it."""


def fake(x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return mode.from_tensor(x)


def drawn(seed=0):
    return torch.randn(*SHAPE, generator=torch.Generator().manual_seed(seed))


def table():
    return schemes.rope(D, 4).at(sequence(T))["isometry"].table


def stream(inputs):
    """The state after some tokens, and the next ones."""
    _, state = linear_attention(*inputs, feature_map=elu1, causal=True, return_state=True)
    return state, [x[..., :1, :] for x in inputs]


def with_state(attention, inputs, change):
    state, token = stream(inputs)
    return attention(*token, state=State({n: change(x) for n, x in state.tensors.items()}, kind=state.kind), **LINEAR)


LINEAR, CAUSAL = {"feature_map": elu1, "causal": True}, {"causal": True}
ARGUMENTS = {  # of attention of inputs, where a change reaches one tensor
    "q": lambda f, x, change: f(change(x[0]), *x[1:], **CAUSAL),
    "k": lambda f, x, change: f(x[0], change(x[1]), x[2], **CAUSAL),
    "v": lambda f, x, change: f(*x[:2], change(x[2]), **CAUSAL),
    "mask": lambda f, x, change: f(*x, mask=change(torch.ones(2, T, dtype=torch.bool)), **CAUSAL),
    "isometry": lambda f, x, change: f(*x, isometry=Rotation(change(table())), **CAUSAL),
    "decay": lambda f, x, change: f(*x, decay=change(-torch.arange(T).double()), **CAUSAL),
    "segment_ids": lambda f, x, change: f(*x, segment_ids=change(torch.zeros(2, T, dtype=torch.long)), **CAUSAL),
    "terms": lambda f, x, change: f(
        *x, terms=[Clipped(torch.randn(4, 3, D), "query", sequence(T), change(sequence(T)), 1)], **CAUSAL
    ),
    "locality": lambda f, x, change: f(*x, locality=change(torch.ones(T, T)), **CAUSAL),
    "state": with_state,
}
OTHERS = {
    "on another device": (lambda x: x.to("meta"), r"a tensor on (\w+) as q, got one on (?!\1)(cpu|meta)"),
    "sparse": (torch.Tensor.to_sparse, r"a dense tensor, got torch.sparse_coo"),
    "fake": (fake, r"a tensor on cpu as q, got one on cpu \(fake\)|a tensor on cpu \(fake\) as q, got one on cpu;"),
    "an array": (torch.Tensor.numpy, "a tensor, got ndarray"),
    "a list": (torch.Tensor.tolist, "a tensor, got list"),
}
OWN = {softmax_attention: "locality", linear_attention: "state"}
CALLS = [(f, name) for f, own in OWN.items() for name in ARGUMENTS if name == own or name not in OWN.values()]
CALLS += [(naive_linear_attention, name) for name in ("q", "mask", "isometry", "decay")]


@each(("attention", "name"), CALLS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_every_argument_is_a_dense_tensor_on_the_device_of_q(attention, name):
    for other, (change, message) in OTHERS.items():
        typed = other in ("an array", "a list")
        if typed and name in ("isometry", "terms", "state"):
            continue  # such a value is made of tensors
        at = "k" if name == "q" and other in ("on another device", "fake") else name
        wrong = pytest.raises(TypeError if typed else ValueError, match=rf"^{at}: expected ({message.replace('1', '2')})")
        with named(other), wrong:
            ARGUMENTS[name](attention, [drawn(n) for n in range(3)], change)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each("attention", [linear_attention, softmax_attention, naive_linear_attention])
def test_nested_tensors_are_refused(attention):
    q, nested = drawn(), torch.nested.nested_tensor(list(drawn()))
    for n, name in enumerate("qkv"):
        with pytest.raises(ValueError, match=f"^{name}: expected a dense tensor, got a nested one; .* segment_ids"):
            attention(*(nested if m == n else q for m in range(3)))


@each("short", [True, False])
@each("attention", [linear_attention, softmax_attention])
def test_a_mask_on_another_device_is_not_ignored(attention, short):
    inputs = [drawn(n)[..., : 5 if short else T, :] for n in range(3)]
    with pytest.raises(ValueError, match="mask: expected a tensor on cpu as q, got one on meta"):
        attention(*inputs, mask=torch.ones(2, inputs[0].shape[-2], dtype=torch.bool, device="meta"), causal=True)


def zero(x):
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


ODD = {  # what PyTorch's operations know, and compiled code would not
    "zeros": (zero, torch.zeros_like),
    "negated": (torch._neg_view, torch.neg),
    "wrapped": (lambda x: x.as_subclass(Wrapped), torch.clone),
    "expanded": (lambda x: x[..., :1].expand(x.shape), lambda x: x[..., :1].repeat(*(1 for _ in x.shape[1:]), x.shape[-1])),
}


@each("odd", ODD)
@each("name", ["q", "k", "v", "mask", "isometry", "state"])
def test_numbers_that_are_not_there_as_they_read(name, odd):
    if (name, odd) == ("mask", "negated"):
        pytest.skip("booleans have no negative")
    inputs = [drawn(n) for n in range(3)]
    attention = partial(linear_attention, feature_map=elu1)
    found, expected = (ARGUMENTS[name](attention, inputs, change) for change in ODD[odd])
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, atol=1e-5, rtol=1e-5)


@each("odd", ODD)
def test_such_normals_and_gradients(odd):
    change, usual = ODD[odd]
    found, expected = [], []
    for made, out in ((change, found), (usual, expected)):
        leaves = [drawn(n).requires_grad_() for n in range(3)]
        normal = torch.nn.functional.normalize(drawn(3)[:1, :, :1], dim=-1)[0]
        y = linear_attention(*leaves, isometry=Reflection(made(normal)), **LINEAR)
        out += torch.autograd.grad(y, leaves, made(drawn(4)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.as_subclass(torch.Tensor), b, atol=1e-5, rtol=1e-5)


def test_a_fake_gradient_is_an_error():
    q = drawn().requires_grad_()
    out = linear_attention(q, q, q, **LINEAR)
    with pytest.raises(RuntimeError, match="linear_attention: expected a gradient of numbers, got a FakeTensor"):
        out.backward(fake(drawn()))


@each("odd", ODD)
def test_large_rotations(monkeypatch, odd):
    monkeypatch.setattr(library, "PAST", 0)
    change, usual = ODD[odd]
    for of_table in (True, False):
        found, expected = (
            Rotation(f(table()) if of_table else table())(drawn() if of_table else f(drawn())) for f in (change, usual)
        )
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)


@pytest.mark.skipif(not library.libraries()[0], reason=library.libraries()[1])
@pytest.mark.filterwarnings("ignore")
def test_the_gate_passes_plain_tensors_alone():
    plain = drawn()
    others = [plain.to("meta"), plain.to_sparse(), plain.to_mkldnn(), zero(plain), torch._neg_view(plain), fake(plain)]
    others += [plain.as_subclass(Wrapped), torch.nested.nested_tensor([plain[0]])]
    assert not library.unreadable(plain, torch.nn.Parameter(plain))
    assert all(library.unreadable(plain, other) for other in others)


@each("attention", [linear_attention, naive_linear_attention])
@each("phi", ["elu+1", 3, [elu1]])
def test_a_feature_map_is_a_function(phi, attention):
    with pytest.raises(TypeError, match=r"feature_map: expected one of isopos\.feature_maps, or another function"):
        attention(drawn(), drawn(), drawn(), feature_map=phi)


def test_a_denominator_is_a_name():
    with pytest.raises(ValueError, match="denominator: expected 'plain'"):
        linear_attention(drawn(), drawn(), drawn(), denominator=torch.ones(2).numpy())


@each("dtype", [torch.complex64, torch.float32, torch.bool])
def test_segments_are_integers(dtype):
    with pytest.raises(ValueError, match="segment_ids: expected integers"):
        softmax_attention(drawn(), drawn(), drawn(), segment_ids=torch.zeros(T, dtype=dtype))


@each("name", ["none", "rope", "sinusoidal"])
def test_a_model_has_positions_on_the_device_of_its_tokens(name):
    model = Decoder(11, 32, 1, schemes.build(name, 8, 4, {}))
    with pytest.raises(ValueError, match="positions: expected a tensor on cpu as tokens, got one on meta"):
        model(torch.zeros(1, 5, dtype=torch.int64), sequence(5, device="meta"))


FAKE = {
    "mask": lambda: {"mask": torch.ones(1, 8, dtype=torch.bool)},
    "decay": lambda: {"decay": -torch.arange(8).double()},
    "segments": lambda: {"segment_ids": torch.zeros(1, 8, dtype=torch.long), "decay": -torch.arange(8).double()},
    "window": lambda: {"window": 3},
    "terms": lambda: {"terms": [Clipped(torch.zeros(2, 5, 16), "query", sequence(8), sequence(8), 2)]},
    "nothing": dict,
}


@each("causal", [True, False])
@each("options", FAKE)
def test_tensors_without_numbers_give_shapes(options, causal):
    with FakeTensorMode():
        q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
        out = linear_attention(q, k, v, causal=causal, **FAKE[options]())
        assert out.shape == (1, 2, 8, 16)
        assert all(x.shape == q.shape for x in torch.autograd.grad(out.sum(), (q, k, v)))
        if causal and options == "nothing":
            _, state = linear_attention(q, k, v, causal=True, return_state=True)
            assert linear_attention(q, k, v, causal=True, state=state).shape == q.shape
