"""PermuteFormer (Chen 2021): powers of permutations of the features."""

from typing import Literal, Unpack

import torch

from isopos import encodings
from isopos.catalog import at_least, expect
from isopos.encodings import Encoding, random_permutations
from isopos.exact import normal
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, even, register, split_widths


@register(
    citation="Chen 2021, PermuteFormer, Eq. 11",
    equation="<q, pi^t k>",
    cost="t d",
    extends="grids",
)
def permuteformer(
    head_dim: int,
    heads: int,
    *,
    width: int = 1,
    matrix: Literal["permutation", "identity", "orthogonal"] = "permutation",
    orders: Literal["random", "long"] = "random",
    length: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Powers of a permutation per head, with decay.

    Features are ReLU and the decay is r in [0.88, 0.99] (Eq. 11). The paper has r = 1 in bidirectional models:
    ``decay="none"``. The authors' code has r = sigmoid(2 + 3 h / H) for head h, ``decay="permuteformer-released"``, and no
    denominator. `scheme.encoding.orders` are the numbers of positions that single heads distinguish, `common_order` is the
    number that all heads together distinguish.

    Args:
        width: Queries and keys have width * d features, by wider projections; 4 in the paper (section 4.1).
        matrix: The matrix whose powers are taken: "permutation", "identity" (the ablation without permutation) or
            "orthogonal", a random one, whose "encoded" denominators may be negative.
        orders: Random permutations as in the paper, or permutations of large orders, up to 2,042,040 for 64 features.
        length: Longest sequence; a smaller common order raises a warning.
    """
    expect("matrix", matrix, ("permutation", "identity", "orthogonal"))
    if matrix != "permutation" and (orders, length) != ("random", None):
        name = "orders" if length is None else "length"
        raise ValueError(f"{name}: expected none with matrix={matrix!r}, which has no orders")
    features = head_dim * at_least("width", width)
    defaults = {"feature_map": "relu", "denominator": "encoded", "decay": "permuteformer"}
    encoding: Encoding = encodings.Identity(features)
    if matrix == "permutation":
        encoding = encodings.Permutation(random_permutations(features, heads, seed, orders), length=length)
    elif matrix == "orthogonal":
        generator = normal(seed, heads, even(features), features)
        encoding = encodings.Exponential(generator.double(), learned=False)
    return compose(encoding, heads, choices, defaults, width=width)


@register(
    citation="Chen 2021, PermuteFormer, Eq. 14",
    equation="<q, pi_1^t1 pi_2^t2 k>",
    cost="t d",
    extends="grids of any number of axes",
)
def permuteformer_2d(
    head_dim: int,
    heads: int,
    *,
    axes: int = 2,
    orders: Literal["random", "long"] = "random",
    length: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Powers of commuting permutations on a grid, one per axis.

    The permutations act on separate features and so commute (Eq. 14).

    Args:
        head_dim: d, at least 2 for each axis.
        orders: Random permutations as in the paper, or permutations of large orders.
        length: Longest axis; a smaller common order of an axis raises a warning.
    """
    if head_dim < 2 * axes:
        raise ValueError(f"head size: expected at least {2 * axes}, 2 features for each of {axes} axes, got {head_dim}")
    widths = split_widths(head_dim, axes, 1)
    per_axis = [random_permutations(width, heads, seed + 1_000_003 * n, orders) for n, width in enumerate(widths)]
    maps = torch.arange(head_dim, device="cpu").expand(heads, axes, -1).clone()
    for n, (axis, first) in enumerate(zip(per_axis, (sum(widths[:n]) for n in range(axes)), strict=True)):
        maps[:, n, first : first + axis.shape[-1]] = axis + first
    defaults = {"feature_map": "relu", "denominator": "encoded"}
    return compose(encodings.Permutation(maps, length=length), heads, choices, defaults)
