"""Test isopos.ops.triton_rotate in the interpreter or on a GPU: the maps of `isopos.ops.rotate` against float64."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from cases import gradients

import isopos
from isopos.encodings import Partial
from isopos.ops import gpu
from isopos.ops import rotate as ops

DEVICE = "cpu" if gpu.interpreted() else "cuda"
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU is here, and TRITON_INTERPRET=1 is not set"
    ),
]
MAPS = {"rotate": (2, 2), "unrotate": (2, 2), "lift": (1, 2), "unlift": (2, 1)}  # features taken and returned of a pair
SHAPES = {  # of features, without their last axis, and of angles
    "one table": ((2, 3, 5), (5, 3)),
    "a table a sample": ((2, 3, 70), (2, 1, 70, 6)),
    "a table a head": ((2, 3, 7), (3, 7, 4)),
    "a table a sample and head": ((2, 2, 9), (2, 2, 9, 1)),
    "groups of heads": ((2, 2, 3, 4), (2, 3, 4, 2)),
    "no samples": ((3, 4), (1, 4, 5)),
    "one token": ((4, 2, 1), (1, 16)),
}
every_map = pytest.mark.parametrize("name", MAPS)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Names of the kernels that have run."""
    from isopos.ops import triton_plan, triton_rotate

    monkeypatch.setattr(triton_plan, "PLANS", {})
    found = []
    for name in ("rotate", "rotate_vjp"):
        kernel = getattr(triton_rotate, name)
        monkeypatch.setattr(triton_rotate, name, lambda *a, n=name, f=kernel, **b: found.append(n) or f(*a, **b))
    return found


def table_of(*shape):
    draw = torch.Generator().manual_seed(1)
    return ops.rotation_table(torch.randn(*shape, generator=draw, dtype=torch.float64), torch.float32).to(DEVICE)


def features(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)


def agree(found, expected, dtype=torch.float32):
    """Assert equality up to the dtype's rounding. The interpreter truncates to bfloat16; a GPU rounds."""
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b).abs().max() / b.abs().max().clamp_min(1)
        assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


def compare(fast, slow, *given):
    """Outputs and all gradients of two functions, the second in float64."""
    dtype = given[0].dtype
    given = [x.detach().requires_grad_() for x in given]
    wide = [x.detach().double().requires_grad_() for x in given]
    out, expected = fast(*given), slow(*wide)
    agree([out], [expected], dtype)
    agree(gradients(out.cpu(), given), gradients(expected.cpu(), wide), dtype)
    return out


@every_map
@pytest.mark.parametrize("case", SHAPES)
def test_maps_and_gradients(calls, name, case):
    shape, angles = SHAPES[case]
    taken, returned = MAPS[name]
    f = angles[-1]
    out = compare(getattr(ops, name), getattr(ops, name), features(*shape, taken * f), table_of(*angles))
    assert (out.shape, out.dtype, calls) == ((*shape, returned * f), torch.float32, ["rotate", "rotate_vjp"])


@every_map
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype(calls, name, dtype):
    how = {"lifted": "lift" in name, "adjoint": "un" in name}
    x, table = features(2, 3, 6, 4 * MAPS[name][0], dtype=dtype), table_of(3, 6, 4)
    out = compare(lambda x, table: ops.rotate_on_gpu(x, table, **how), getattr(ops, name), x, table)
    assert (out.dtype, calls) == (dtype, ["rotate", "rotate_vjp"])


@every_map
def test_plans_turn_other_numbers(name):
    """The first call is seen, the second recorded, later ones repeat its launches and keep no tensor."""
    from isopos.ops import triton_plan

    kept = []
    for n in range(1, 5):
        x, table = n * features(2, 3, 6, 4 * MAPS[name][0]), table_of(3, 6, 4) / n
        out = compare(getattr(ops, name), getattr(ops, name), x, table)
        kept += [weakref.ref(x), weakref.ref(table), weakref.ref(out)]
    assert [type(plan) for plan in triton_plan.PLANS.values()] == 2 * [triton_plan.PassPlan]  # forward and backward
    del x, table, out
    gc.collect()
    assert not [ref() for ref in kept if ref() is not None]


@every_map
def test_a_program_turns_several_rows(calls, monkeypatch, name):
    from isopos.ops import triton_rotate

    for busy in (1, 3):  # all rows, or some of them and a rest
        monkeypatch.setattr(triton_rotate, "BUSY", busy)
        compare(getattr(ops, name), getattr(ops, name), features(5, 2, 6, 2 * MAPS[name][0]), table_of(5, 1, 6, 2))
        compare(getattr(ops, name), getattr(ops, name), features(2, 7, 6, 2 * MAPS[name][0]), table_of(6, 2))
    assert len(calls) == 8


@every_map
def test_features_lie_anywhere(calls, name):
    x, table = features(2, 3, 4, 3 * MAPS[name][0]), table_of(3, 4, 3)
    expected = getattr(ops, name)(x.double(), table.double())
    views = [
        x.transpose(1, 2).contiguous().transpose(1, 2),
        torch.nn.functional.pad(x, (1, 1))[..., 1:-1],
        torch.stack((x, x), -1)[..., 0],
        x.mT.contiguous().mT,
    ]
    spaced = torch.stack((table, table), -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
    assert calls == []
    agree([getattr(ops, name)(view, rows) for view in views for rows in (table, spaced)], [expected] * 8)
    few = x[:1, :1, :1].expand(2, 3, 4, -1)
    agree([getattr(ops, name)(few, table)], [getattr(ops, name)(few.double(), table.double())])
    assert calls == ["rotate"] * 9
    if name in ("rotate", "unrotate"):
        assert getattr(ops, name)(views[0], table).stride() == views[0].stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("rotary_dim", [None, 6])
def test_encodings_partial_and_in_both_layouts(calls, dtype, layout, rotary_dim):
    """One kernel replaces three or more PyTorch operations."""
    scheme = isopos.rope(16, 3, rotary_dim=rotary_dim, layout=layout, learned=True).to(DEVICE)
    x, rho = features(2, 3, 5, 16, dtype=dtype), scheme.encoding(isopos.sequence(5, device=DEVICE))
    again = deepcopy(scheme).double()
    wide = again.encoding(isopos.sequence(5, device=DEVICE), torch.float64)
    out, expected = rho(x), wide(x.double())
    assert calls == ["rotate"]
    assert out.dtype == dtype
    agree([out], [expected], dtype)
    own = features(2, 3, 5, 16, dtype=dtype).requires_grad_()
    compare(lambda x: rho(x), lambda x: wide(x), own)
    agree(
        *(gradients(out.cpu(), list(own.parameters())) for out, own in ((rho(x), scheme), (wide(x.double()), again))), dtype
    )
    assert calls[-1] == "rotate_vjp"


def test_angles_are_learned_through_attention(calls):
    scheme = isopos.rope(8, 2, learned=True, attention="softmax").to(DEVICE)
    q, k, v = features(3, 2, 2, 6, 8).unbind(0)
    out = scheme(q, k, v, isopos.sequence(6, device=DEVICE), causal=True)
    (found,) = gradients(out.cpu(), list(scheme.parameters()))
    assert calls == ["rotate", "rotate", "rotate_vjp", "rotate_vjp"]
    scheme = deepcopy(scheme).double()
    out = scheme(q.double(), k.double(), v.double(), isopos.sequence(6, device=DEVICE), causal=True)
    agree([found], gradients(out.cpu(), list(scheme.parameters())))


def test_what_is_differentiated_again_or_packed_is_the_definitions(calls):
    x, table = features(2, 3, 4, 6).requires_grad_(), table_of(4, 3).requires_grad_()
    wide = [a.detach().double().requires_grad_() for a in (x, table)]

    def twice(a, b):
        found = torch.autograd.grad(ops.rotate(a, b).pow(3).sum(), (a, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in found), (a, b))

    agree(twice(x, table), twice(*wide))
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a.double(), lambda a: a.float()):
        out = ops.rotate(x, table)
    agree(gradients(out.cpu(), [x, table]), gradients(ops.rotate(*wide).cpu(), wide))
    calls.clear()
    rows = torch.func.vmap(ops.rotate, (0, None))(x.detach(), table.detach())
    agree([rows], [ops.rotate(*wide)])
    assert not calls


def test_what_the_kernel_does_not_know_it_refuses(calls):
    from isopos.ops.triton_rotate import refuses

    table = table_of(4, 3)
    cases = {
        "float64": (features(2, 4, 6).double(), table),
        "axes ahead of tokens": (features(1, 1, 1, 2, 4, 6), table),
        "features of 6, not of 5": (features(1, 2, 4, 5), table),
        "pairs": (features(1, 1, 4, 4096), table_of(4, 2048)),
        "a row of the table for every token": (features(1, 1, 4, 6), table_of(2, 1, 4, 3)),
    }
    for why, (x, rows) in cases.items():
        assert why in refuses(x, rows, lifted=False, adjoint=False)
        assert ops.rotate_on_gpu(x, rows) is None
    assert "features of 3, not of 6" in refuses(features(2, 4, 6), table, lifted=True, adjoint=False)
    x = features(1, 1, 4, 6)
    agree([ops.rotate(x, table_of(2, 1, 4, 3))], [ops.rotate(x.double(), table_of(2, 1, 4, 3).double())])
    assert not calls


def test_partial_encodings_are_what_they_say():
    inner = isopos.rope(4, 1).encoding
    rho = Partial(inner, 7)(isopos.sequence(3, device=DEVICE))
    x = features(1, 3, 7)
    agree(
        [rho(x)],
        [torch.cat((inner(isopos.sequence(3, device=DEVICE), torch.float64)(x[..., :4].double()), x[..., 4:].double()), -1)],
    )
