"""Content-dependent positions: forget gates, selective rotation, CARoPE and PaTH, read from keys. Causal."""

from typing import Unpack

from isopos import encodings
from isopos.encodings import rope_frequencies
from isopos.phases import ContentFrequency, HouseholderProduct, SelectiveRotation, Strength
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import PairLayout, compose, even, laid_out, register


@register(
    citation="Lin et al. 2025, FoX, arXiv 2503.02130",
    equation="<q, k> + sum log f_m; linear: <q, k> prod f_m, f_m = sigmoid(<w, k_m> + b)",
    cost="t d",
    extends="any group, by tokens between",
    learns="w and b",
)
def fox(head_dim: int, heads: int, **choices: Unpack[Choices]) -> Scheme:
    """Forget gates: a content-dependent log decay per head; causal.

    There is no encoding of positions. Between a key and a query, each token's gate, read from its key, reduces the weight.
    Every scheme takes such gates with ``decay="forget"``; ``rope`` with them is the paper's variant with RoPE. The paper's
    attention is ``attention="softmax"``; in linear attention the gates decay the state, as in gated linear attention.
    """
    return compose(encodings.Identity(head_dim), heads, choices, {"decay": "forget"})


@register(
    citation="Movahedi et al. 2025, Selective RoPE, arXiv 2511.17388",
    equation="<q, R(sum w_i (<a_i, k_m> + b_i)) k>",
    cost="t d^2",
    extends="any group, by tokens between",
    learns="a and b",
)
def selective(
    head_dim: int, heads: int, *, base: float = 10000.0, layout: PairLayout = "interleaved", **choices: Unpack[Choices]
) -> Scheme:
    """Rotation of feature pairs by content-dependent angles; causal.

    Each token rotates later tokens relative to earlier ones by angles that are read from its key. At the start every token
    has rope's angles, so this is rope at consecutive positions. The positions that a caller passes are ignored.
    ``decay="forget"`` adds forget gates, as the paper does.
    """
    rotation = SelectiveRotation(head_dim, heads, rope_frequencies(even(head_dim) // 2, base))
    return compose(laid_out(encodings.Identity(head_dim), layout), heads, choices, turn=rotation)


@register(
    citation="Veisi et al. 2025, CARoPE, arXiv 2507.23083, section 2",
    equation="<q, R(sum f_m^i) k>, f_m = 1 / (1 + softplus(<w, k_m> + b))",
    cost="t d",
    extends="any group, by tokens between",
    learns="w and b",
)
def carope(
    head_dim: int, heads: int, *, base: float = 10000.0, layout: PairLayout = "interleaved", **choices: Unpack[Choices]
) -> Scheme:
    """Rotation by powers of a content-dependent frequency per head; causal.

    Each token turns later tokens relative to earlier ones by f, f^2, ..., where f is read from its key. At the start every
    token has rope's frequencies, so this is rope at consecutive positions. The positions that a caller passes are ignored.

    Args:
        head_dim: d, even, at least 4: one frequency has powers from 0 on, and the first does not depend on content.
        base: Base of the frequencies at the start, above 1.
    """
    rotation = ContentFrequency(head_dim, heads, base)
    return compose(laid_out(encodings.Identity(head_dim), layout), heads, choices, turn=rotation)


@register(
    citation="Yang et al. 2025, PaTH, arXiv 2505.16381",
    equation="<q, H_x ... H_(y+1) k>, H_m = I - b_m w_m w_m^T, w_m = A k_m / |A k_m|, b_m = 2 sigmoid(<u, k_m> + c)",
    cost="t d^2; softmax: also t^2 d",
    extends="any group, by tokens between",
    learns="A, u and c",
)
def path(head_dim: int, heads: int, *, strength: Strength = "learned", **choices: Unpack[Choices]) -> Scheme:
    """Products of content-dependent Householder-like matrices; causal.

    Each token between a key and a query, the query's included, applies a matrix that is read from its key. The paper's
    attention is ``attention="softmax"``; ``decay="forget"`` adds forget gates, its PaTH-FoX. Streams of softmax attention
    change every cached key with each token, at O(t d) per token; linear attention has a state of constant size, and the
    matrices act on features, whose number the feature map must keep. The positions that a caller passes are ignored.

    Softmax attention forms all scores in memory. In compiled and exported programs all tokens are one chunk, so that time
    grows with the cube of the length; ONNX has no triangular systems. Relative terms and sequences over processes are
    refused, and windows in linear attention.

    Args:
        strength: "learned" for b in (0, 2): norms of keys never grow. "reflection" for b = 2: all matrices are orthogonal.
    """
    return compose(encodings.Identity(head_dim), heads, choices, turn=HouseholderProduct(head_dim, heads, strength))
