"""Terms added to logits of softmax attention: Shaw, Transformer-XL, T5, DeBERTa, KERPLE, FIRE; and ALiBi, a decay."""

from typing import Any, Literal, Unpack

from isopos import biases, couplings, encodings
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    citation="Shaw et al. 2018; RoFormer, Eq. 5",
    equation="<q, k + a_clip(t)>, v + b_clip(t)",
    cost="t n d + t^2",
    extends="grids, with n exponential in axes",
    learns="vectors of keys and values, shared by heads",
)
def shaw(head_dim: int, heads: int, *, reach: int = 16, seed: int = 0, **choices: Unpack[Choices]) -> Scheme:
    """Learned vectors of clipped offsets, added to keys and values. Softmax.

    Args:
        heads: h; all heads share the vectors.
        reach: Larger offsets share the last vector.
    """
    return _with_bias("shaw", biases.Shaw(head_dim, reach=reach, seed=seed), head_dim, heads, choices)


@register(
    citation="Dai et al. 2019, section 3.3; RoFormer, Eq. 7",
    equation="<q + u, k> + <q + v, W p_t>",
    cost="t d m + t^2 m for m sinusoids",
    extends="grids, by concatenation",
    learns="u, v and W",
)
def transformer_xl(
    head_dim: int, heads: int, *, model_dim: int | None = None, seed: int = 0, **choices: Unpack[Choices]
) -> Scheme:
    """Content and relative sinusoids, with two learned vectors. Softmax.

    Args:
        model_dim: Number of sinusoids, even; head_dim * heads by default, plus one if odd.
    """
    width = head_dim * heads if model_dim is None else model_dim
    width = width + width % 2 if model_dim is None else width
    coupling = couplings.TransformerXL(head_dim, heads, width, seed=seed)
    return compose(coupling, heads, _softmax_only("transformer-xl", choices), {"attention": "softmax"})


@register(
    citation="Raffel et al. 2020, section 2.1",
    equation="<q, k> + b_bucket(t)",
    cost="t^2",
    extends="grids, with n exponential in axes",
    content=False,
    learns="the numbers b",
)
def t5(
    head_dim: int,
    heads: int,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    **choices: Unpack[Choices],
) -> Scheme:
    """A learned number per head and bucket, added to logits. Softmax.

    T5 does not scale its logits by d^-1/2; this scheme does, as the other schemes do.

    Args:
        buckets: Number of buckets.
        max_distance: Larger offsets share the last bucket.
        bidirectional: Whether keys after the query have separate buckets.
    """
    bias = biases.T5(heads, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    return _with_bias("t5", bias, head_dim, heads, choices)


@register(
    citation="He et al. 2021, Eq. 4; RoFormer, Eq. 10",
    equation="<q, k> + <q, K_t> + <Q_-t, k>",
    cost="t n d + t^2",
    extends="grids, with n exponential in axes",
    learns="the vectors K and Q",
)
def deberta(
    head_dim: int,
    heads: int,
    *,
    buckets: int = 256,
    max_distance: int | None = 512,
    released: bool = False,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Content to position and position to content. Softmax.

    Logits are scaled by (3 d)^-1/2.

    Args:
        buckets: Rows per direction.
        max_distance: Far offsets share rows logarithmically up to this distance; with None offsets are clipped, as in
            version 1.
        released: Position to content reads row t instead of row -t, as in the authors' code: for released weights.
    """
    bias = biases.DeBERTa(heads, head_dim, buckets=buckets, max_distance=max_distance, released=released, seed=seed)
    return _with_bias("deberta", bias, head_dim, heads, choices, scale=(3 * head_dim) ** -0.5)


@register(
    citation="Chi et al. 2022, KERPLE",
    equation="<q, k> - r1 log(1 + r2 |t|); power: <q, k> - r1 |t|^r2",
    cost="t^2",
    extends="groups with a distance",
    content=False,
    learns="r1 and r2",
)
def kerple(
    head_dim: int, heads: int, *, kernel: Literal["log", "power"] = "log", seed: int = 0, **choices: Unpack[Choices]
) -> Scheme:
    """A learned kernel of the distance, subtracted from logits. Softmax.

    Scores are symmetric in the direction. With kernel="power" and r2 = 1 it is ALiBi with learned slopes.

    Args:
        kernel: "log", r1 log(1 + r2 |t|), or "power", r1 |t|^r2.
    """
    return _with_bias("kerple", biases.Kerple(heads, kernel=kernel, seed=seed), head_dim, heads, choices)


@register(
    citation="Li et al. 2024, FIRE, arXiv 2310.04418",
    equation="<q, k> + f(psi(|t|) / psi(max(L, x))), psi(n) = log(c n + 1)",
    cost="t^2 n for n hidden units",
    extends="lines",
    content=False,
    learns="f, c and L",
)
def fire(
    head_dim: int, heads: int, *, width: int = 32, length: float = 512.0, seed: int = 0, **choices: Unpack[Choices]
) -> Scheme:
    """A learned network of distances relative to the query's position. Softmax.

    Scores are relative only for queries at positions up to L, which is learned, and symmetric in the direction.

    Args:
        width: Hidden units of f.
        length: Initial L.
    """
    bias = biases.Fire(heads, width=width, length=length, seed=seed)
    return _with_bias("fire", bias, head_dim, heads, choices)


@register(
    citation="Press et al. 2022, ALiBi, section 3",
    equation="<q, k> - slope |t|; linear: <q, k> exp(-slope |t|)",
    cost="t",
    extends="lines",
    content=False,
)
def alibi(head_dim: int, heads: int, **choices: Unpack[Choices]) -> Scheme:
    """No encoding; a decay per head with geometric slopes.

    With ``attention="softmax"`` it is the paper's: logits minus slope times distance. Linear attention multiplies its
    weights by exp(-slope * distance).
    """
    return compose(encodings.Identity(head_dim), heads, choices, {"decay": "alibi"})


def _softmax_only(name: str, choices: Choices) -> Choices:
    if choices.get("attention", "softmax") == "linear":
        raise ValueError(
            f"attention: expected softmax, got linear: {name} adds a term of both positions to logits, which linear "
            "attention cannot factor; horn-clipped and horn-constrained add terms to its weights"
        )
    return choices


def _with_bias(name: str, bias: biases.RelativeBias, head_dim: int, heads: int, choices: Choices, **parts: Any) -> Scheme:
    encoding = encodings.Identity(head_dim, bias.group)
    return compose(encoding, heads, _softmax_only(name, choices), {"attention": "softmax"}, bias=bias, **parts)
