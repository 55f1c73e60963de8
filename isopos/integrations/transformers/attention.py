"""Attention and masks, registered in transformers, for schemes that a model's cosines and sines cannot express."""

import importlib.metadata
from typing import Any

from torch import Tensor, nn

from isopos.attention import softmax_attention
from isopos.integrations.transformers.evaluated import Evaluated
from isopos.integrations.transformers.linear import LinearLayer

LEAST = 5  # version of transformers
ATTENTION = "isopos"
"""The name of our attention, and of its masks."""
NOT_SERVED = {"softcap": "logits are capped", "s_aux": "the softmax has a sink"}
"""Arguments of a model's attention that ours does not have, and what they mean."""
OVER = "isopos_over"
"""The name of our attention over the processes of a group, and of its masks, which are those of padding."""
GROUP = "sequence_group"
"""The argument of `attend_over` that names the group."""
EVALUATED = "evaluated"
"""The argument of `attend` that a patched model gives it."""


def check_version() -> None:
    """Raise ImportError if transformers is missing or older than version 5."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version == "none" or int(version.partition(".")[0]) < LEAST:
        raise ImportError(f"transformers: expected version {LEAST} or later, got {version}; pip install -U 'isopos[hf]'")


def register_attention() -> None:
    """Register attention and masks in transformers. Without a registered mask it would pass none and show padding."""
    check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, masked)
    AttentionInterface.register(OVER, attend_over)
    AttentionMaskInterface.register(OVER, padding)


def masked(**arguments: Any) -> Tensor:
    """Mask of the keys that each query sees, bool ``[b 1 t s]``; always made, so that a lost mask is noticed."""
    from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportMissingImports]

    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(**arguments)
    assert mask is not None
    return mask


def padding(attention_mask: Tensor | None = None, **arguments: Any) -> Tensor | None:
    """Mask of this process's tokens that are not padding, bool ``[b t]``; None without padding."""
    return attention_mask


def attend_over(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    evaluated: Evaluated | LinearLayer | None = None,
    sequence_group: Any = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over a group of processes: queries and keys ``[b h t d]`` with a scheme, or already rotated.

    Returns:
        Outputs ``[b t h d]``, and None in place of attention weights.

    Raises:
        ValueError: For an argument that this attention does not support.
    """
    _check_others(others)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise ValueError(f"sliding_window: expected none in attention to later tokens, got {sliding_window}")
    mask = None if attention_mask is None else attention_mask.bool()
    if isinstance(evaluated, LinearLayer):
        return evaluated(query, key, value, mask, scaling, dropout).transpose(1, 2).contiguous(), None
    options: dict[str, Any] = {"group": sequence_group, "scale": scaling}
    if evaluated is not None:
        key, options = _evaluated(evaluated, query, key, attention_mask, scaling)
    out = softmax_attention(query, key, value, **options, causal=causal, window=sliding_window, mask=mask, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    evaluated: Evaluated | LinearLayer | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of queries ``[b h t d]`` and keys ``[b h s d]`` with a scheme at the positions of both.

    Cached keys have the digits of their positions as additional features. Linear attention takes the new keys only and
    keeps its states in the cache.

    Returns:
        Outputs ``[b t h d]``, and None in place of attention weights.

    Raises:
        ValueError: For a model without a scheme, a layer that was called without its encoder, an argument that this
            attention does not support, and a missing mask.
    """
    if evaluated is None:
        raise ValueError(
            "model: expected the scheme that its configuration names, got a model as it was loaded, into which "
            "isopos.integrations.transformers.patch(model) puts it; or one layer by itself of BERT or ViT, whose encoder "
            "has it for all layers: call that"
        )
    if attention_mask is None:
        raise ValueError(
            "attention_mask: expected [b 1 t s], even where all keys are seen, got none: whoever calls this model's "
            f"attention must make its mask with config._attn_implementation={ATTENTION!r}, or padding would be seen"
        )
    _check_others(others)
    if isinstance(evaluated, LinearLayer):
        out = evaluated(query, key, value, attention_mask, scaling, dropout)
        return out.transpose(1, 2).contiguous(), None
    key, options = _evaluated(evaluated, query, key, attention_mask, scaling)
    out = softmax_attention(query, key, value, **options, attn_mask=attention_mask, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def _check_others(others: dict[str, Any]) -> None:
    """Raise ValueError for an argument of a model's attention that this attention does not support."""
    for name in NOT_SERVED:
        if others.get(name) is not None:
            raise ValueError(f"{name}: expected none, got one, by which {NOT_SERVED[name]}; an attention of isopos has none")


def _evaluated(
    evaluated: Evaluated, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, dict[str, Any]]:
    """Keys without the digits of positions, and the scheme's arguments; the model's scale if the scheme has none."""
    k, at = evaluated(q, k, mask)
    scheme = evaluated.scheme
    return k, at if scheme.scale is not None or scaling is None else at | {"scale": scaling * scheme.sharpness}
