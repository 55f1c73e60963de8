"""The values that encodings return: norms, dtypes, slices, and what they refuse."""

import pytest
import torch
from cases import close

from isopos.isometries import BlockSum, Chain, Gather, Identity, Matrix, Reflection, Rotation

H, T, D = 2, 7, 6


def rotation(features=D, tokens=T, **options):
    angle = torch.randn(H, tokens, features // (1 if options.get("lifted") else 2), dtype=torch.float64)
    return Rotation(torch.stack((angle.cos(), angle.sin()), -1), **options)


def gather(tokens=T):
    return Gather(torch.stack([torch.randperm(D) for _ in range(H * tokens)]).view(H, tokens, D))


def reflection():
    return Reflection(torch.nn.functional.normalize(torch.randn(H, 1, D, dtype=torch.float64), dim=-1))


def matrix():
    return Matrix(torch.linalg.qr(torch.randn(H, D, D, dtype=torch.float64)).Q)


MAKE = {
    "identity": Identity,
    "rotation": rotation,
    "one-row": lambda: rotation(tokens=1),
    "lifted": lambda: rotation(lifted=True),
    "gather": gather,
    "constant-gather": lambda: Gather(torch.randperm(D)[None, None], constant=True),
    "reflection": reflection,
    "matrix": matrix,
    "chain": lambda: Chain(matrix(), rotation()),
    "chain-back": lambda: Chain(gather(), reflection()),
    "block-sum": lambda: BlockSum((rotation(4), Identity()), (4, 2)),
    "block-sum-lifted": lambda: BlockSum((Identity(), rotation(4, lifted=True)), (2, 4)),
}


@pytest.fixture(params=MAKE)
def rho(request):
    return MAKE[request.param]()


def tokens_of(rho):
    return T if rho.length is None else rho.length


def test_inner_products_are_kept_and_the_map_is_linear(rho):
    x, y = torch.randn(2, 3, H, tokens_of(rho), D, dtype=torch.float64)
    close((rho(x) * rho(y)).sum(-1), (x * y).sum(-1))
    close(rho(2 * x - y), 2 * rho(x) - rho(y))


def test_a_slice_maps_a_slice(rho):
    t = tokens_of(rho)
    x = torch.randn(3, H, t, D, dtype=torch.float64)
    for start, stop in [(0, t), (0, 1), (t // 2, t)]:
        part = rho.tokens(start, stop)
        assert part.length in (None, stop - start)
        assert part.features == rho.features
        close(part(x[..., start:stop, :]), rho(x)[..., start:stop, :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_output_has_the_inputs_dtype_and_one_rounding(rho, dtype):
    x = torch.randn(3, H, tokens_of(rho), D, dtype=dtype)
    y = rho(x)
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    if dtype.itemsize < 4:  # sums are float32: the error is that of rounding the result
        assert ((y.double() - rho(x.double())).abs() <= eps * rho(x.double()).abs() + 1e-5).all()
    else:
        close(y, rho(x.double()), dtype=dtype)


def test_double_inputs_take_float32_tables():
    rho, x = rotation(), torch.randn(1, H, T, D, dtype=torch.float64)
    close(Rotation(rho.table.float())(x), rho(x), dtype=torch.float32)
    assert Rotation(rho.table.float())(x).dtype == torch.float64


def test_it_refuses_other_shapes(rho):
    x = torch.randn(3, H, tokens_of(rho), D)
    with pytest.raises(ValueError, match=r"expected \[\*b h t d\], got \[6\]"):
        rho(x[0, 0, 0])
    if rho.features is not None:
        with pytest.raises(ValueError, match="expected 6 features, got 8"):
            rho(torch.nn.functional.pad(x, (0, 2)))
    if rho.length is not None:
        with pytest.raises(ValueError, match=f"expected {rho.length} tokens, one a position, got 2"):
            rho(x[..., :1, :].expand(-1, -1, 2, -1))


def test_it_lists_its_tensors():
    turn, reflect = rotation(), reflection()
    chain = Chain(reflect, BlockSum((turn, Identity()), (D, 0)))
    assert [id(x) for x in chain.tensors()] == [id(reflect.normal), id(turn.table)]
    others = [torch.randn_like(x) for x in chain.tensors()]
    assert [id(x) for x in chain.replace(others).tensors()] == [id(x) for x in others]


def test_it_is_immutable(rho):
    with pytest.raises(AttributeError):
        rho.table = None
