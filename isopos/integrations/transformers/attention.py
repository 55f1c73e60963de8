"""The attention, and the masks of the same name, for schemes that no cosines and sines of a model can express."""

import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn

from isopos.attention import softmax_attention
from isopos.integrations.transformers.places import ATTENTION, split
from isopos.positions import sequence

__all__ = ["OWN", "check_version", "register"]

LEAST = 5  # version of transformers
OWN = "isopos"
"""The attribute of a patched module of attention: a tuple, so that it is no submodule there, of its scheme, and of whether
positions are behind queries and keys, or among its arguments."""


def check_version() -> None:
    """ImportError for transformers before version 5, or none."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version == "none" or int(version.partition(".")[0]) < LEAST:
        raise ImportError(f"transformers: expected version {LEAST} or later, got {version}; pip install -U 'isopos[hf]'")


def register() -> None:
    """Make transformers know both by name; without masks of that name it would give none, and padding would be seen."""
    check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, masked)


def masked(**arguments: Any) -> Tensor:
    """Which keys each query sees, bool ``[b 1 t s]``: always made, so that a mask that is lost on the way is missed."""
    from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportMissingImports]

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
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Softmax attention of queries ``[b h t d]`` and keys ``[b h s d]`` with the module's scheme.

    Positions are behind both, or are `position_ids` ``[b t]`` or ``[b t c]``, which are 0 to t - 1 where there are none.

    Returns:
        ``[b t h d]``, and None where other attentions may have weights.

    Raises:
        ValueError: For a module without a scheme, and where no mask came, though even one that hides nothing is made.
    """
    scheme, behind = getattr(module, OWN, (None, False))
    if scheme is None:
        raise ValueError(
            "model: expected the scheme that its configuration names, got a model as it was loaded; "
            "isopos.integrations.transformers.patch(model) puts it in"
        )
    if attention_mask is None:
        raise ValueError(
            "attention_mask: expected [b 1 t s], even where all keys are seen, got none: whoever calls this model's "
            f"attention must make its mask with config._attn_implementation={ATTENTION!r}, or padding would be seen"
        )
    if behind:
        (query, x), (key, y) = split(query), split(key)
        bool_mask = attention_mask.dtype == torch.bool
        seen = attention_mask if bool_mask else attention_mask > torch.finfo(attention_mask.dtype).min
        y = torch.where(seen.any(-2).any(-2)[..., None], y, x[:, :1])  # nothing is behind a static cache's free slots
    elif position_ids is None:
        x = y = sequence(query.shape[-2], device=query.device)
    else:
        x = y = position_ids if position_ids.ndim == 3 else position_ids[..., None]
    at = scheme.at(x, y, dtype=torch.promote_types(query.dtype, torch.float32))
    own = {} if scheme.scale is not None or scaling is None else {"scale": scaling * scheme.sharpness}
    options: dict[str, Any] = at | own | {"attn_mask": attention_mask, "dropout": dropout}
    out = softmax_attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None
