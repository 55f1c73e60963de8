"""Paths that depend on content: tokens say how far apart two of them are. Causal."""

from typing import Unpack

from isopos import encodings
from isopos.encodings import rope_frequencies
from isopos.paths import Turn
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import PairLayout, compose, even, laid_out, register


@register(
    summary="forget gates: a decay a head that tokens decide; causal",
    citation="Lin et al. 2025, FoX, arXiv 2503.02130",
    equation="<q, k> + sum log f_m; linear: <q, k> prod f_m, f_m = sigmoid(<w, k_m> + b)",
    cost="t d",
    extends="any group, by tokens between",
    learns="w and b",
)
def fox(head_dim: int, heads: int, **choices: Unpack[Choices]) -> Scheme:
    """FoX: no encoding but forget gates, one a token between key and query, read from its key (Lin et al. 2025). Causal.

    Every scheme has them with ``decay="forget"``; ``rope`` with them is the paper's variant with RoPE. With
    ``attention="softmax"`` it is the paper's; linear attention forgets its state, as gated linear attention does.
    """
    return compose(encodings.Identity(head_dim), heads, choices, {"decay": "forget"})


@register(
    summary="rotation of feature pairs by angles that tokens decide; causal",
    citation="Movahedi et al. 2025, Selective RoPE, arXiv 2511.17388",
    equation="<q, R(sum w_i (<a_i, k_m> + b_i)) k>",
    cost="t d^2",
    extends="any group, by tokens between",
    learns="a and b",
)
def selective(
    head_dim: int, heads: int, *, base: float = 10000.0, layout: PairLayout = "interleaved", **choices: Unpack[Choices]
) -> Scheme:
    """Selective RoPE: each token turns those after it by angles read from its key (Movahedi et al. 2025). Causal.

    At the start every token turns by rope's angles, so that it is rope at consecutive positions; positions that are given
    are not looked at. ``decay="forget"`` adds forget gates, as the paper does.
    """
    turn = Turn(head_dim, heads, rope_frequencies(even(head_dim) // 2, base))
    return compose(laid_out(encodings.Identity(head_dim), layout), heads, choices, turn=turn)
