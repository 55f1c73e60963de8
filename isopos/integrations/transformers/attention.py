"""The attention, and the masks of the same name, for schemes that no cosines and sines of a model can express."""

from typing import Any

import torch
from torch import Tensor, nn

from isopos.attention import softmax_attention
from isopos.integrations.transformers.places import ATTENTION, split
from isopos.scheme import Scheme

__all__ = ["OWN", "register"]

OWN = "isopos"
"""The attribute of a patched module of attention: a tuple of its scheme, so that it is no submodule there."""


def register() -> None:
    """Make transformers know both by name; without masks of that name it would give none, and padding would be seen."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, masked)


def masked(**arguments: Any) -> Tensor:
    """Which keys each query sees, bool ``[b 1 t s]``: always made, so that a mask that is lost on the way is missed."""
    from transformers.masking_utils import sdpa_mask

    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(**arguments)
    assert mask is not None
    return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Softmax attention with the module's scheme, of positions behind queries ``[b h t d]`` and keys ``[b h s d]``.

    A model that only shares its configuration with a patched one has no scheme, and PyTorch's attention.

    Returns:
        ``[b t h d]``, and None where other attentions may have weights.

    Raises:
        ValueError: Where no mask came, though even one that hides nothing is made.
    """
    scheme: Scheme | None
    if (scheme := getattr(module, OWN, (None,))[0]) is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)  # pyright: ignore[reportReturnType]
    if attention_mask is None:
        raise ValueError(
            "attention_mask: expected [b 1 t s], even where all keys are seen, got none: whoever calls this model's "
            f"attention must make its mask with config._attn_implementation={ATTENTION!r}, or padding would be seen"
        )
    (query, x), (key, y) = split(query), split(key)
    bool_mask = attention_mask.dtype == torch.bool
    seen = attention_mask if bool_mask else attention_mask > torch.finfo(attention_mask.dtype).min
    y = torch.where(seen.any(-2).any(-2)[..., None], y, x[:, :1])  # nothing is written behind a static cache's free slots
    at = scheme.at(x, y, dtype=torch.promote_types(query.dtype, torch.float32))
    own = {} if scheme.scale is not None or scaling is None else {"scale": scaling}
    options: dict[str, Any] = at | own | {"attn_mask": attention_mask, "dropout": dropout}
    out = softmax_attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None
