"""Test maps of token features: norms, adjoints, dtypes, slices, and errors."""

import itertools

import pytest
import torch
from cases import close, each, gradients
from torch import Tensor

import isopos
from isopos import maps
from isopos.encodings import Permutation
from isopos.maps import (
    Adjoint,
    Affine,
    Append,
    Blocks,
    BlockSum,
    Chain,
    Composed,
    Factor,
    Gather,
    Identity,
    LinearMap,
    Mapped,
    Matrices,
    Matrix,
    OnPairs,
    Operators,
    Plane,
    Reflection,
    Rotation,
    Scaling,
    Shear,
    Tiles,
    TokenMap,
)
from isopos.ops.slices import Slices
from isopos.positions import sequence

B, H, T, D = 3, 2, 7, 6


def rotation(features=D, tokens=T, **options):
    angle = torch.randn(H, tokens, features // (1 if options.get("lifted") else 2), dtype=torch.float64)
    return Rotation(torch.stack((angle.cos(), angle.sin()), -1), **options)


def gather(tokens=T):
    return Gather(torch.stack([torch.randperm(D) for _ in range(H * tokens)]).view(H, tokens, D))


def reflection():
    return Reflection(torch.nn.functional.normalize(torch.randn(H, 1, D, dtype=torch.float64), dim=-1))


def plane():
    u, v = torch.linalg.qr(torch.randn(H, D, 2, dtype=torch.float64)).Q.unbind(-1)
    return Plane(u[:, None], v[:, None], rotation(2).table)


def matrix():
    return Matrix(torch.linalg.qr(torch.randn(H, D, D, dtype=torch.float64)).Q)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


ISOMETRIES = {
    "identity": Identity,
    "rotation": rotation,
    "one-row": lambda: rotation(tokens=1),
    "lifted": lambda: rotation(lifted=True),
    "gather": gather,
    "powers": lambda: Permutation(torch.stack([torch.randperm(D) for _ in range(H)]))(sequence(T) - 3),
    "powers-samples": lambda: Permutation(torch.stack([torch.randperm(D)]))(torch.randint(9, (B, T, 1))),
    "constant-gather": lambda: Gather(torch.randperm(D)[None, None], constant=True),
    "reflection": reflection,
    "plane": plane,
    "matrix": matrix,
    "chain": lambda: Chain(matrix(), rotation()),
    "chain-back": lambda: Chain(gather(), reflection()),
    "block-sum": lambda: BlockSum((rotation(4), Identity()), (4, 2)),
    "block-sum-lifted": lambda: BlockSum((Identity(), rotation(4, lifted=True)), (2, 4), (2, 8)),
    "operators": lambda: Operators(torch.linalg.qr(random(B, H, T, D, D)).Q),
    "on-pairs": lambda: OnPairs(Matrix(torch.linalg.qr(random(H, D // 2, D // 2)).Q)),
}
OTHERS = {
    "scaling": lambda: Scaling(random(B, H, T, D)),
    "factor": lambda: Factor(random(H, 1, 1)),
    "composed": lambda: Composed(rotation(), Scaling(random(1, T, D))),
    "matrices": lambda: Matrices(random(H, T, 9, D)),
    "linear-map": lambda: LinearMap(random(H, 4, D)),
    "affine": lambda: Affine(random(H, 1, D)),
    "affine-matrix": lambda: Affine(random(H, 1, D), random(H, 4, D)),
    "append": lambda: Append(random(H, T, 3)),
    "append-made": lambda: Append(Composed(Affine(random(H, 1, D), random(H, 4, D)), rotation(4)), Affine(random(H, 1, D))),
    "append-shared": lambda: Append(random(1, T, 3)),
    "shear": lambda: Shear(random(B, 1, T, 1), 3, 2),
    "shear-transposed": lambda: Shear(random(1, T, 1), 2, 3, True),
    "tiles": lambda: Tiles(random(B, 1, T, 3, 3)),
    "adjoint": lambda: Adjoint(Shear(random(1, T, 1), 3, 2)),
    "blocks": lambda: Blocks((Tiles(random(1, T, 4, 4)), rotation(2, lifted=True)), (4, 2), (4, 4)),
    "mapped": lambda: Mapped(rotation(), torch.exp),
}


every = each("make", [*ISOMETRIES.values(), *OTHERS.values()], ids=[*ISOMETRIES, *OTHERS])


def test_every_class_has_a_row():
    def final_under(cls):
        own = [sub for sub in cls.__subclasses__() if vars(maps).get(sub.__name__) is sub]
        return {cls} if not own else set().union(*map(final_under, own))

    made = [(type(make()), make().isometric) for make in ISOMETRIES.values()]
    assert all(isometric for _, isometric in made)
    others = {type(make()) for make in OTHERS.values()}
    assert not any(cls.isometric for cls in others)
    assert {cls for cls, _ in made} | others == final_under(TokenMap)


def tokens_of(rho):
    return T if rho.length is None else rho.length


def content(rho, *batch, dtype=torch.float64):
    return torch.randn(*batch, B, H, tokens_of(rho), D, dtype=dtype)


@every
def test_isometries_keep_inner_products_and_what_is_linear_has_an_adjoint(make):
    rho = make()
    x, y = content(rho, 2)
    if rho.isometric:
        close((rho(x) * rho(y)).sum(-1), (x * y).sum(-1))
        close(rho(2 * x - y), 2 * rho(x) - rho(y))
    if rho.linear:
        image = torch.randn_like(rho(y))
        close((rho(x) * image).sum(-1), (x * rho.adjoint(image)).sum(-1))
    else:
        with pytest.raises(NotImplementedError, match="has no adjoint"):
            next(part for part in (rho, *rho._parts()) if not part._has_adjoint).adjoint(x)


def cuts(size):
    """Slices of all, the first, and the others."""
    return slice(None), slice(0, 1), slice(1, size)


@every
def test_a_part_is_the_maps_part(make):
    rho = make()
    t, x = tokens_of(rho), content(rho)
    of_tokens = slice(None), slice(0, 1), slice(t // 2, t)
    for batch, heads, tokens in itertools.product(cuts(B), cuts(H), of_tokens):
        part, own = rho.part(Slices((batch,), heads, tokens)), x[batch, heads, tokens]
        assert part.length in (None, own.shape[-2])
        assert part.features == rho.features
        assert torch.broadcast_shapes(part.leading, own.shape[:-2]) == own.shape[:-2]
        close(part(own), rho(x)[batch, heads, tokens])
    for last in (rho.tokens(t // 2, t), rho.last(t - t // 2)):
        close(last(x[..., t // 2 :, :]), rho(x)[..., t // 2 :, :])


@every
def test_output_has_the_inputs_dtype_and_one_rounding(make):
    rho = make()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = content(rho, dtype=dtype)
        y = rho(x)
        assert y.dtype == dtype
        eps = torch.finfo(dtype).eps
        if dtype.itemsize < 4:  # sums are float32: the error is that of rounding the result
            assert ((y.double() - rho(x.double())).abs() <= eps * rho(x.double()).abs() + 1e-5).all()
        else:
            close(y, rho(x.double()), dtype=dtype)


@every
def test_its_tensors_may_be_others(make):
    rho = make()
    others = [torch.randn_like(x) if x.is_floating_point() else x.clone() for x in rho.tensors()]
    again = rho.replace(others)
    assert [id(x) for x in again.tensors()] == [id(x) for x in others]
    assert (again.length, again.features, again.leading) == (rho.length, rho.features, rho.leading)
    assert rho.replace(list(rho.tensors()))(x := content(rho)).equal(rho(x))


@every
def test_gradients_reach_its_tensors_and_content(make):
    rho = make()
    learned = [a.requires_grad_() for a in rho.tensors() if a.is_floating_point()]
    x = content(rho).requires_grad_()
    assert all(grad.isfinite().all() and grad.any() for grad in gradients(rho(x), [x, *learned]))


@every
def test_it_refuses_other_shapes(make):
    rho = make()
    x = content(rho)
    with pytest.raises(ValueError, match=r"expected \[\*b h t d\], got \[6\]"):
        rho(x[0, 0, 0])
    with pytest.raises(ValueError, match=r"expected a floating dtype, got torch\.int64"):
        rho(x.long())
    if rho.features is not None:
        with pytest.raises(ValueError, match="expected 6 features, got 8"):
            rho(torch.nn.functional.pad(x, (0, 2)))
    if rho.length is not None:
        with pytest.raises(ValueError, match=f"expected {rho.length} tokens, one per position, got 2"):
            rho(x[..., :1, :].expand(-1, -1, 2, -1))


@every
def test_it_is_immutable(make):
    rho = make()
    with pytest.raises(AttributeError):
        rho.table = None


def test_widths_and_leading_axes_are_those_that_are_declared():
    known = {"identity": (None, None, ()), "rotation": (T, D, (H,)), "powers-samples": (T, D, (B, 1))}
    known |= {"operators": (T, D, (B, H)), "reflection": (None, D, (H,)), "block-sum": (T, D, (H,))}
    known |= {"append": (T, None, (H,)), "append-made": (T, D, (H,)), "lifted": (T, D, (H,))}
    for name, expected in known.items():
        rho = (ISOMETRIES | OTHERS)[name]()
        assert (rho.length, rho.features, rho.leading) == expected


@each("kind", [Tensor, Tensor | None, "Tensor"])
def test_a_tensor_without_axes_is_refused(kind):
    with pytest.raises(TypeError, match=r"Bare.table: expected axes, got none; table: Tensor = axes\("):
        type("Bare", (TokenMap,), {"__annotations__": {"table": kind}, "apply": lambda self, x: x})


# What maps of couplings do


def test_matrices_and_factors_are_per_token():
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
    rotate, x = rotation(), random(2, H, T, D)
    close(Mapped(rotate, torch.exp)(x), rotate(x).exp())


def test_on_pairs_maps_both_parts():
    part, x = Matrix(random(H, 3, 3)), random(2, H, T, D)
    close(OnPairs(part)(x)[..., ::2], part(x[..., ::2]))
    close(OnPairs(part)(x)[..., 1::2], part(x[..., 1::2]))


def test_double_inputs_take_float32_tables():
    rho, x = rotation(), torch.randn(1, H, T, D, dtype=torch.float64)
    close(Rotation(rho.table.float())(x), rho(x), dtype=torch.float32)
    assert Rotation(rho.table.float())(x).dtype == torch.float64


def test_a_class_takes_no_options_that_nothing_reads():
    with pytest.raises(TypeError, match="takes no keyword arguments"):
        type("Own", (TokenMap,), {}, typo=1)


def test_tables_one_a_head_say_how_many_heads_there_are():
    rho = isopos.rope(8, 4, learned=True).encoding(isopos.sequence(5))
    with pytest.raises(ValueError, match=r"expected 4 heads, one per table, got 2; .* share tables"):
        rho(torch.zeros(1, 2, 5, 8))
    assert rho(torch.ones(1, 1, 5, 8)).shape == (1, 4, 5, 8)
