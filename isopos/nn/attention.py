"""Multi-head attention as a module: projections around a scheme."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from isopos.attention.linear import linear_attention
from isopos.attention.softmax import softmax_attention
from isopos.catalog import at_least, probability
from isopos.scheme import Scheme, expect_scheme
from isopos.stream import Stream


class Attention(nn.Module):
    """Multi-head attention whose scores see positions through a scheme.

    The scheme is evaluated once per forward pass and shared by layers: pass ``scheme.at(positions)`` as `at`.

    Args:
        model_dim: Width of inputs and outputs, a multiple of the scheme's heads.
        scheme: The scheme; it does not become a submodule, because several layers may share it.
        kv_heads: Number of heads of keys and values; equally many neighbouring query heads share each of them. By default
            as many as query heads. The scheme has this number of heads, or the number of query heads.
        dropout: Probability of dropping a weight of softmax attention in training. Linear attention forms no weights: apply
            dropout to its outputs.
        window: Option of `softmax_attention` and `linear_attention`.

    Examples:
        >>> import torch
        >>> import isopos
        >>> scheme = isopos.rope(16, 4)
        >>> layer = Attention(64, scheme)
        >>> layer(torch.randn(2, 10, 64), scheme.at(isopos.sequence(10)), causal=True).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        model_dim: int,
        scheme: Scheme,
        *,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        window: int | None = None,
    ):
        super().__init__()
        expect_scheme(scheme)
        self.heads = scheme.heads if kv_heads is None else _heads(model_dim, scheme, kv_heads)
        if model_dim % self.heads:
            raise ValueError(f"model_dim: expected a multiple of the {self.heads} heads, got {model_dim}")
        head_dim, features = model_dim // self.heads, scheme.encoding.features
        if head_dim * scheme.width != features:
            size = features // scheme.width
            heads = f"; or build the scheme for {model_dim // size} heads" if model_dim % size == 0 else ""
            raise ValueError(
                f"model_dim: expected {self.heads * size}, {self.heads} heads of {size} features, got {model_dim}{heads}"
            )
        if probability("dropout", dropout) and scheme.attention == "linear":
            raise ValueError(
                f"dropout: expected 0 with linear attention, which forms no weights to drop, got {dropout}; drop its outputs"
            )
        self.dropout, self.window = dropout, None if window is None else at_least("window", window)
        self.attend = softmax_attention if scheme.attention == "softmax" else linear_attention
        self.normalised = scheme.normalised
        self.kv_heads = self.heads if kv_heads is None else kv_heads
        self.query = nn.Linear(model_dim, scheme.width * model_dim)
        self.key = nn.Linear(model_dim, scheme.width * self.kv_heads * head_dim)
        self.value = nn.Linear(model_dim, self.kv_heads * head_dim)
        self.out = nn.Linear(model_dim, model_dim)

    def forward(
        self,
        x: Tensor,
        at: Mapping[str, Any] | Stream,
        *,
        context: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        """Attend from x ``[b t m]`` to itself or to a context ``[b s m]``.

        Args:
            x: Tokens.
            at: Result of the scheme's `at`, perhaps with further arguments of the attention function; with a state, x are
                the next tokens of a stream. Or a `Stream`, which keeps the state; x are its next tokens, which see
                themselves and earlier ones, whatever `causal` is.
            context: Tokens of keys and values.
            causal: Whether a token sees itself and earlier tokens only.
            mask: ``[b s]``, True for keys that take part.
            attn_mask: ``[b h t s]`` or a shape that broadcasts to it, as of `softmax_attention`.
            segment_ids: ``[b s]``, numbers of packed sequences.
            return_state: Whether to return a pair of the output and the next state.

        Raises:
            ValueError: For a `context` or `return_state` with a `Stream`, for another window in `at`, and as the attention
                function.
        """
        if isinstance(at, Stream):
            if context is not None or return_state:
                name = "context" if context is not None else "return_state"
                raise ValueError(
                    f"{name}: expected none with a Stream, whose tokens attend to each other and which keeps the state"
                )
            own = ("softmax" if self.attend is softmax_attention else "linear", self.normalised)
            if own != (got := (at.scheme.attention, at.scheme.normalised)):
                own, got = (f"{name} attention with{'out' * normalised} a denominator" for name, normalised in (own, got))
                raise ValueError(f"at: expected a Stream of this layer's scheme, {own}, got one of {got}")
        elif not isinstance(at, Mapping):
            raise TypeError(f"at: expected scheme.at(positions), or a Stream of the scheme, got {type(at).__name__}")
        else:
            if (at.get("denominator", "plain") is None) is not self.normalised:
                own, got = ("none", at.get("denominator", "plain")) if self.normalised else ("one", "none")
                raise ValueError(f"at: expected arguments with the denominator of this layer's scheme, {own}, got {got}")
            return_state = return_state or bool(at.get("return_state"))
            if self.window is not None and at.get("window", self.window) != self.window:
                raise ValueError(f"window: expected {self.window}, as this layer has it, got {at['window']} in at")
        source = x if context is None else context
        inputs = (self.query, x, self.heads), (self.key, source, self.kv_heads), (self.value, source, self.kv_heads)
        heads = (layer(a).unflatten(-1, (count, -1)).transpose(1, 2) for layer, a, count in inputs)
        given = {"mask": mask, "segment_ids": segment_ids, "attn_mask": attn_mask, "window": self.window}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.dropout and self.training:
            options["dropout"] = self.dropout
        if isinstance(at, Stream):
            y, state = at(*heads, **options), ()
        else:
            causal = causal or bool(at.get("causal"))
            out = self.attend(*heads, **{**at, **options, "causal": causal, "return_state": return_state})
            y, *state = out if return_state else (out,)
        if self.normalised:
            y = F.layer_norm(y, y.shape[-1:])
        y = self.out(y.transpose(1, 2).flatten(2))
        return (y, *state) if state else y


def _heads(model_dim: int, scheme: Scheme, kv_heads: int) -> int:
    """Number of query heads for a number of key heads; ValueError if the scheme has neither number of heads."""
    features = scheme.encoding.features
    heads = model_dim * scheme.width // features
    if heads < 1 or heads * features != model_dim * scheme.width:
        raise ValueError(f"model_dim: expected a multiple of the head size {features // scheme.width}, got {model_dim}")
    if heads % at_least("kv_heads", kv_heads):
        raise ValueError(f"kv_heads: expected a divisor of the {heads} heads, got {kv_heads}")
    if scheme.heads not in (heads, kv_heads):
        raise ValueError(f"scheme: expected {heads} heads, as of queries, or {kv_heads}, as of keys, got {scheme.heads}")
    return heads
