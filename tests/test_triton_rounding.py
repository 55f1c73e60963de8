"""Test the error of Triton's linear attention with emulated tensor cores (`triton_rounding`), compared with float64."""

import pytest
import torch

from isopos.ops import gpu
from isopos.ops.linear import triton_tiles as tiles

pytest.importorskip("triton", reason="triton is not installed: pip install 'isopos[gpu-test]'")

import triton
import triton.language as tl
from triton_rounding import AWAY, BF16, CASES, FP16, FP32, Case, errors, multiply, tensor_cores

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not gpu.interpreted(), reason="TRITON_INTERPRET=1 is not set; tests/test_gpu.py asks a GPU"),
]
MOST = {BF16: (5e-3, 1e-2), FP16: (6e-4, 1.7e-3), FP32: (1e-6, 1.7e-6)}  # output, gradient: some twice what was found


SHORTER = [
    case._replace(length=min(case.length, 300 if case.name == "rope" else 150)) for case in CASES if case.dtype == BF16
]
SHORTER += [case._replace(length=40) for case in CASES if case.dtype == FP32 or case == Case("rope", FP16, 70)]


@pytest.mark.parametrize("case", [case for case in SHORTER if case.name != "encoded"], ids=str)
def test_errors(case):
    """Bound errors of norms, and largest errors by twice the bound. A lower bound shows that rounding is emulated."""
    output, gradient = MOST[case.dtype]
    found = errors(case)["triton"]
    assert output / 5 < found[0][0]
    for (norm, largest), most in zip(found, [output, *[gradient] * (len(found) - 1)], strict=True):
        assert norm < most
        assert largest < 2 * most


@pytest.mark.parametrize(("case", "most"), [*zip(AWAY, (1e-2, 1e-2, 1e-2, 5e-3), strict=True)], ids=str)
def test_errors_with_values_of_mean_one(case, most):
    """Bound errors of gradients. Rounding states between chunks would double the last case.

    The gradient of queries is the difference of sums and sums of the denominator, in which two digits cancel if all features
    are nearly equal: 0.027 and 0.12 of it were wrong while states and quotients had the digits of bfloat16.
    """
    output, *gradients = (norm for norm, _ in errors(case)["triton"])
    assert output < MOST[BF16][0]
    assert max(gradients) < most


@triton.jit
def convert(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16))


def test_conversions_round_to_nearest_even():
    x = torch.cat((torch.randn(250), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -torch.inf, torch.nan, 1e-40])))
    found = torch.empty(256, dtype=torch.bfloat16)
    with tensor_cores():
        convert[1,](x, found, N=256)
    assert torch.equal(found.view(torch.int16), x.bfloat16().view(torch.int16))


@triton.jit
def product(a, b, out, N: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    if NARROW:
        x, y = x.to(tl.bfloat16), y.to(tl.bfloat16)
    tl.store(out + at, tl.dot(x, y, input_precision=PRECISION))


@triton.jit
def twice(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tiles.rounded(tiles.rounded(tl.load(x + at), "tf32"), "tf32"))


def test_what_is_rounded_to_tf32_stays_as_it_is():
    """Tiles are rounded when they are loaded and again when they are multiplied, which must not change them."""
    draw = torch.Generator().manual_seed(1)
    x = torch.cat((torch.randn(251, generator=draw), torch.tensor([1 + 2**-11, torch.inf, -torch.inf, torch.nan, 0.0])))
    x[:100] = x[:100].half().float()  # as many digits as TF32 has
    found = torch.empty_like(x)
    twice[1,](x, found, N=256)
    assert torch.equal(found[:100], x[:100])
    assert ((found[:252] / x[:252] - 1).abs() <= 2**-11).all()
    assert torch.equal(found[252:254], x[252:254])
    assert found[254].isnan()
    assert found[255] == 0


def product_of(a, b, precision):
    out = torch.empty_like(a)
    with tensor_cores():
        product[1,](a, b, out, N=len(a), NARROW=precision == "bf16", PRECISION="ieee" if precision == "bf16" else precision)
    return out.double()


def truncated(x):
    return ((x.view(torch.int32) >> 13) << 13).view(torch.float32)


def test_products_have_the_digits_of_their_operands():
    a, b = 1 + torch.rand(2, 32, 32)
    exact = a.double() @ b.double()
    rounded = {"bf16": (a.bfloat16(), b.bfloat16()), "tf32": (truncated(a), truncated(b)), "tf32x3": (a, b), "ieee": (a, b)}
    for precision, (x, y) in rounded.items():
        assert ((product_of(a, b, precision) / (x.double() @ y.double())) - 1).abs().max() < 2e-6
    assert (1 - product_of(a, b, "tf32") / exact).min() > 2e-4  # always to zero
    assert 1e-7 < (1 - product_of(a, b, "tf32x3") / exact).mean() < 1e-6
    assert (1 - product_of(a, b, "ieee") / exact).abs().mean() < 1e-7


@pytest.mark.parametrize("precision", ["bf16", "tf32", "tf32x3"])
def test_products_of_what_is_not_finite(precision):
    """Non-finite products equal float32. The low TF32 parts of infinity are NaN, and are omitted."""
    a, b = torch.rand(2, 16, 16)
    a[0, 0], a[1, 1], b[2, 2] = torch.inf, torch.nan, 1e38
    found, exact = product_of(a, b, precision), a.double() @ b.double()
    assert torch.equal(found[0], exact[0])
    assert found[1].isnan().all()
    assert found[2:].isfinite().all()


def test_sums_are_cut_off():
    """Each block drops numbers below the last digit of its largest number."""
    a, b = torch.full((1, 8), 1.5 * 2**-24).numpy(), torch.ones(8, 1).numpy()
    assert multiply(a, b, torch.ones(1, 1).numpy(), 4) == 1
    assert multiply(a, b, torch.zeros(1, 1).numpy(), 4) == 12 * 2**-24
    assert multiply(a, b, torch.full((1, 1), -1.0).numpy(), 4) == -1


def test_arithmetic_in_bfloat16_is_refused():
    @triton.jit
    def double(x, N: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(x + at, tl.load(x + at) * tl.load(x + at))

    with tensor_cores(), pytest.raises(Exception, match="an operation on bfloat16"):
        double[1,](torch.ones(16, dtype=torch.bfloat16), N=16)
