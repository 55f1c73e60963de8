"""Test operations on plain tensors: `isopos.ops.rotate`."""

import pytest
import torch
from cases import close, gradients

from isopos.ops import library
from isopos.ops import rotate as ops


def table(*shape, dtype=torch.float64):
    return ops.rotation_table(torch.randn(*shape, dtype=torch.float64), dtype)


def views(x):
    """The same values in other layouts: odd strides, spaced, transposed, by columns, at an odd offset."""
    *_, d = x.shape
    wide = torch.empty(*x.shape[:-1], d + 1, dtype=x.dtype)
    wide[..., :d] = x
    spaced = torch.empty(*x.shape, 2, dtype=x.dtype)
    spaced[..., 0] = x
    offset = torch.nn.functional.pad(x, (1, 1))[..., 1:-1]
    return [
        x,
        wide[..., :d],
        offset,
        spaced[..., 0],
        x.transpose(-3, -2).contiguous().transpose(-3, -2),
        x.mT.contiguous().mT,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotate_is_the_definition_in_any_layout(dtype):
    x, angle = torch.randn(2, 3, 4, 6, dtype=dtype), torch.randn(2, 1, 4, 3, dtype=torch.float64)
    rows = ops.rotation_table(angle, dtype)
    expected = torch.empty_like(x)
    for i in range(3):
        c, s = angle[..., i].cos(), angle[..., i].sin()
        expected[..., 2 * i] = x[..., 2 * i] * c - x[..., 2 * i + 1] * s
        expected[..., 2 * i + 1] = x[..., 2 * i] * s + x[..., 2 * i + 1] * c
    for view in views(x):
        close(ops.rotate(view, rows), expected)
        close(ops.rotate_naive(view, rows), expected)
    close(ops.rotate(x[:1, :1].expand(2, 3, 4, 6), rows), ops.rotate_naive(x[:1, :1].expand(2, 3, 4, 6), rows))


def test_rotate_takes_a_contiguous_tensor_at_an_odd_offset():
    x, rows = torch.randn(41)[1:].view(2, 5, 4), table(2, 5, 2, dtype=torch.float32)
    close(ops.rotate(x, rows), ops.rotate_naive(x, rows))


def test_rotate_gradients_are_the_definitions():
    angle = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    rows = ops.rotation_table(angle, torch.float64)
    pairs = (gradients(f(x, rows), [x, angle]) for f in (ops.rotate, ops.rotate_naive))
    for fast, slow in zip(*pairs, strict=True):
        close(fast, slow)
    assert torch.autograd.gradcheck(lambda x, a: ops.rotate(x, ops.rotation_table(a, a.dtype)), (x, angle))


def test_no_tokens_have_a_gradient_wherever_it_lies():
    x = torch.zeros(1, 1, 0, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.zeros(1, 1, 5, 9, dtype=torch.float64)[..., :0, 1:]
    assert grad.storage_offset() == 1
    (found,) = torch.autograd.grad(ops.rotate(x, table(0, 4)), x, grad)
    assert found.shape == x.shape


def test_odd_even_then_interleaved_is_half_split_rope():
    d, t = 8, 20
    x, position = torch.randn(3, t, d, dtype=torch.float64), torch.arange(t, dtype=torch.float64)
    theta = 10000.0 ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    angle = position[:, None] * theta
    rotated_half = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
    half_split = x * angle.cos().repeat(1, 2) + rotated_half * angle.sin().repeat(1, 2)

    index = ops.half_to_interleaved(d)
    rows = ops.rotation_table(angle, torch.float64)
    interleaved = ops.rotate(x[..., index], rows)
    close(interleaved[..., index.argsort()], half_split)
    assert torch.equal(index.argsort(), torch.cat((torch.arange(0, d, 2), torch.arange(1, d, 2))))


def test_float32_table_is_exact_far_out():
    x, frequency = torch.arange(8192)[:, None], 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    rows = ops.rotation_table(ops.angles(x, frequency[None, None]), torch.float32)
    angle = x.double() * frequency
    exact = torch.stack((angle.cos(), angle.sin()), -1)
    assert rows.dtype == torch.float32
    assert (rows[0].double() - exact).abs().max() < 1e-6


def test_position_2_to_the_31_keeps_scores():
    d, far = 64, 2**31
    frequency = 10000.0 ** (-torch.arange(d // 2, dtype=torch.float64) / (d // 2))
    q, k = torch.randn(2, 1, 100, d)
    offset = torch.randint(1000, (100, 1))

    def scores(x, y):
        rho = [ops.rotation_table(ops.angles(at, frequency[None, None]), torch.float32) for at in (x, y)]
        return (ops.rotate(q, rho[0]) * ops.rotate(k, rho[1])).double().sum(-1)

    error = scores(torch.full_like(offset, far), far - offset) - scores(torch.zeros_like(offset), -offset)
    assert (error.abs() <= 1e-6 * (q.norm(dim=-1) * k.norm(dim=-1)).double()).all()


def test_angles_sum_over_coordinates_and_ignore_autocast():
    x, frequency = torch.randint(100, (2, 5, 3)), torch.randn(4, 3, 6)
    expected = torch.einsum("btc,hcf->bhtf", x.double(), frequency.double())
    close(ops.angles(x, frequency), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.angles(x, frequency), ops.angles(x, frequency.double()))
    assert ops.angles(x, frequency).dtype == torch.float64


def test_lift_is_multiplication_by_a_phase():
    x, angle = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    phase = x * torch.exp(1j * angle)
    close(ops.lift(x, ops.rotation_table(angle, torch.float64)), torch.cat((phase.real, phase.imag), -1))


def test_permute_picks_features():
    x, index = torch.randn(2, 3, 5, 4), torch.stack([torch.randperm(4) for _ in range(15)]).view(3, 5, 4)
    y = ops.permute(x, index)
    for b, h, t, i in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        assert y[b, h, t, i] == x[b, h, t, index[h, t, i]]
    assert torch.equal(ops.permute(x[:1], index.expand(2, 3, 5, 4)), ops.permute(x[:1].expand(2, 3, 5, 4), index))


def test_transform_and_reflect_are_matrices():
    x, matrix = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(3, 4, 4, dtype=torch.float64)
    close(ops.transform(x, matrix), torch.einsum("hij,bhtj->bhti", matrix, x))
    unit = torch.nn.functional.normalize(torch.randn(3, 1, 4, dtype=torch.float64), dim=-1)
    reflection = torch.eye(4, dtype=torch.float64) - 2 * unit.mT * unit
    close(ops.reflect(x, unit), ops.transform(x, reflection))


def test_half_to_interleaved_needs_pairs():
    with pytest.raises(ValueError, match="even"):
        ops.half_to_interleaved(5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("place", ["strided", "offset", "transposed", "columns"])
def test_tables_and_features_may_lie_anywhere(monkeypatch, place, compiled):
    if compiled:
        monkeypatch.setattr(library, "PAST", 0)
    angle = torch.randn(2, 3, 4)
    x, table = torch.randn(2, 3, 8), torch.stack((angle.cos(), angle.sin()), -1)
    lay = {
        "strided": lambda a: torch.stack((a, a), -1)[..., 0],
        "offset": lambda a: torch.cat((a.new_zeros(1), a.flatten()))[1:].view(a.shape),
        "transposed": lambda a: a.transpose(0, -1).contiguous().transpose(0, -1),
        "columns": lambda a: a.transpose(1, -1).contiguous().transpose(1, -1),
    }[place]
    close(ops.rotate(lay(x), lay(table)), ops.rotate_naive(x, table))
