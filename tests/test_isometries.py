"""The values that encodings return: norms, dtypes, slices, and what they refuse."""

import pytest
import torch
from cases import close

from isopos.encodings import Permutation
from isopos.maps import (
    Affine,
    Append,
    BlockSum,
    Chain,
    Gather,
    Identity,
    Isometry,
    Mapped,
    Matrices,
    Matrix,
    OnPairs,
    Powers,
    Reflection,
    Rotation,
    Scaling,
)
from isopos.positions import sequence

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


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


MAKE = {
    "identity": Identity,
    "rotation": rotation,
    "one-row": lambda: rotation(tokens=1),
    "lifted": lambda: rotation(lifted=True),
    "gather": gather,
    "powers": lambda: Powers(Permutation(torch.stack([torch.randperm(D) for _ in range(H)])).table, sequence(T) - 3),
    "constant-gather": lambda: Gather(torch.randperm(D)[None, None], constant=True),
    "reflection": reflection,
    "matrix": matrix,
    "chain": lambda: Chain(matrix(), rotation()),
    "chain-back": lambda: Chain(gather(), reflection()),
    "block-sum": lambda: BlockSum((rotation(4), Identity()), (4, 2)),
    "block-sum-lifted": lambda: BlockSum((Identity(), rotation(4, lifted=True)), (2, 4)),
    "matrices": lambda: Matrices(torch.linalg.qr(random(H, T, D, D)).Q),
    "on-pairs": lambda: OnPairs(Matrix(torch.linalg.qr(random(H, D // 2, D // 2)).Q)),
}
MAPS = {
    "scaling": lambda: Scaling(random(H, T, D)),
    "wide-matrices": lambda: Matrices(random(H, T, 9, D)),
    "affine": lambda: Affine(random(H, 1, D)),
    "affine-matrix": lambda: Affine(random(H, 1, D), random(H, 4, D)),
    "append": lambda: Append(random(H, T, 3)),
    "append-made": lambda: Append(Chain(Affine(random(H, 1, D), random(H, 4, D)), rotation(4)), Affine(random(H, 1, D))),
    "append-shared": lambda: Append(random(1, T, 3)),
    "mapped": lambda: Mapped(rotation(), torch.exp),
}
"""Maps of couplings, which need not keep inner products."""


@pytest.fixture(params=[*MAKE, *MAPS])
def rho(request):
    return (MAKE | MAPS)[request.param]()


def test_every_class_has_a_row():
    def final_under(cls):
        own = [sub for sub in cls.__subclasses__() if sub.__module__ == Isometry.__module__]
        return {cls} if not own else set().union(*map(final_under, own))

    final = final_under(Isometry)
    assert {type(make()) for make in (MAKE | MAPS).values()} == final


def tokens_of(rho):
    return T if rho.length is None else rho.length


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_inner_products_are_kept_and_the_map_is_linear(make):
    rho = make()
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


# What maps of couplings do


def test_matrices_and_factors_are_a_tokens_own():
    matrix, factor, x = random(H, T, 9, D), random(H, T, D), random(2, H, T, D)
    for b, h, t in [(0, 0, 0), (1, 1, 3), (0, 1, T - 1)]:
        close(Matrices(matrix)(x)[b, h, t], matrix[h, t] @ x[b, h, t])
        close(Scaling(factor)(x)[b, h, t], factor[h, t] * x[b, h, t])


def test_affine_shifts_then_multiplies():
    shift, matrix, x = random(H, 1, D), random(H, 4, D), random(2, H, T, D)
    close(Affine(shift)(x), x + shift)
    for h in range(H):
        close(Affine(shift, matrix)(x)[:, h], (x[:, h] + shift[h]) @ matrix[h].mT)


def test_append_adds_the_product_of_channels():
    x, y = random(2, 2, H, T, D)
    a, b = random(2, H, T, 3)
    close((Append(a)(x) * Append(b)(y)).sum(-1), (x * y).sum(-1) + (a * b).sum(-1))
    made = Append(Scaling(torch.full((1, T, D), 2.0).double()), Affine(torch.ones(H, 1, D).double()))
    close(made(x), torch.cat((x + 1, 2 * x), -1))


def test_mapped_is_a_feature_map_of_a_map():
    turn, x = rotation(), random(2, H, T, D)
    close(Mapped(turn, torch.exp)(x), turn(x).exp())


def test_on_pairs_maps_both_parts():
    part, x = Matrix(random(H, 3, 3)), random(2, H, T, D)
    close(OnPairs(part)(x)[..., ::2], part(x[..., ::2]))
    close(OnPairs(part)(x)[..., 1::2], part(x[..., 1::2]))


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
