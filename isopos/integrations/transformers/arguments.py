"""Forward pre-hooks of a patched model: each function returns the changed arguments of a module."""

import math
from typing import Any

import torch
from torch import Tensor

from isopos.integrations.transformers.attention import ATTENTION, EVALUATED, GROUP, OVER
from isopos.integrations.transformers.evaluated import Evaluated, Written, digits_of
from isopos.integrations.transformers.linear import LinearLayer
from isopos.parallel import shards
from isopos.positions import grid, sequence

OWN = "isopos"
"""The attribute of a hooked module that has its schemes, in a tuple where another module has them as submodules."""
WINDOW = "isopos_window"
"""The attribute of a stack of layers of linear attention that is their `Window`."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def of_tokens(
    owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, names: tuple[str, ...], columns: int
) -> Arguments:
    """Add the schemes, evaluated at the positions of tokens, to the arguments of a stack of layers."""
    _check_implementation(owner)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    tokens, x = arguments.get("input_ids"), arguments.get("position_ids")
    tokens = arguments["inputs_embeds"] if tokens is None else tokens
    if x is None:
        cache = arguments.get("past_key_values")
        x = torch.arange(tokens.shape[1], device=tokens.device) + (0 if cache is None else cache.get_seq_length())
        x = x[None]
    x = x[..., None] if columns == 1 else x[-3:].expand(3, *x.shape[-2:]).movedim(0, -1)  # ahead of 3 may be those of text
    like = owner.get_input_embeddings().weight
    digits = digits_of(x, like.dtype)
    schemes = getattr(owner, OWN)[0].items()
    window, group = getattr(owner, WINDOW, None), kwargs.get(GROUP)
    made = {name: Evaluated(scheme, x, like, None if name is None else digits, window, group) for name, scheme in schemes}
    return args, {**kwargs, EVALUATED: made}


def _check_implementation(owner: Any) -> None:
    """Raise ValueError if a patched model has been given another attention."""
    if owner.config._attn_implementation not in (ATTENTION, OVER):
        raise ValueError(
            f"attn_implementation: expected {ATTENTION!r} while the scheme is in the model, whose other attentions do "
            f"not know it, got {owner.config._attn_implementation!r}; unpatch(model) first"
        )


def of_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None, cache: str | None) -> Arguments:
    """Add the scheme of a layer's type, and a cache that keeps positions, to the arguments of its attention."""
    if not isinstance(kwargs.get(EVALUATED), dict):
        raise ValueError(
            f"model: expected the scheme among the arguments of {type(layer).__name__}, got none; call the model, which has "
            "it for all layers"
        )
    evaluated = kwargs[EVALUATED][name]
    if evaluated.scheme.attention == "linear":
        stream = LinearLayer(evaluated, layer.layer_idx, None if cache is None else kwargs.get(cache))
        arguments: dict[str, Any] = {**kwargs, EVALUATED: stream}
        return args, arguments if cache is None or stream.cache is None else arguments | {cache: stream}
    kwargs = {**kwargs, EVALUATED: evaluated}
    if cache is not None and kwargs.get(cache) is not None and evaluated.digits is not None:
        kwargs[cache] = Written(kwargs[cache], evaluated.digits)
    return args, kwargs


def of_decay(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Add a scheme's decay to the mask of a layer that adds its mask to logits.

    Positions of keys are counted over the keys that at least one query sees.
    """
    mask, x, decay = kwargs["attention_mask"], kwargs["position_ids"], getattr(layer, OWN)[0].decay
    least = torch.finfo(kwargs["position_embeddings"][0].dtype).min
    seen = mask if mask.dtype == torch.bool else mask > least
    y = (seen[:, 0].any(-2).cumsum(-1) - 1).clamp_min(0)
    g_query, g_key = decay(x[..., None]), decay(y[..., None])
    bias = (g_query[..., None] - g_key[..., None, :]).to(kwargs["position_embeddings"][0].dtype)
    return args, {**kwargs, "attention_mask": torch.where(seen, bias, least)}


def of_words(embeddings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Add positions and types of all tokens to the arguments of BERT's embeddings, whose tables limit their number."""
    names = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds", "past_key_values_length")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    tokens = arguments["input_ids"] if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if arguments.get("token_type_ids") is None:
        arguments["token_type_ids"] = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    return (), arguments


def of_features(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Add the scheme at the positions of tokens, by default 0 to t - 1, to the arguments of BERT's layers."""
    _check_implementation(encoder)
    features, position_ids = args[0] if args else kwargs["hidden_states"], kwargs.get("position_ids")
    over = shards(kwargs.get(GROUP), features.shape[1], features.device)
    x = sequence(features.shape[1], device=features.device)[None] if position_ids is None else position_ids[..., None]
    x = x if over is None or position_ids is not None else over.index[None, :, None]
    return args, {**kwargs, EVALUATED: Evaluated(getattr(encoder, OWN)[0], x, features, group=over)}


def of_patches(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, ahead: int) -> Arguments:
    """Add the scheme to the arguments of a ViT: tokens ahead are at the origin, patches count from 1 on each axis."""
    _check_implementation(model)
    pixels: Tensor = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
    embed, scheme = model.embeddings.patch_embeddings, getattr(model, OWN)
    sides = [size // patch for size, patch in zip(pixels.shape[-2:], embed.patch_size, strict=True)]
    group, device = scheme.group, pixels.device
    patches = grid(*sides, device=device) if group.columns == 2 else sequence(math.prod(sides), device=device)
    x = torch.cat((group.origin(ahead, device=device), patches + 1))[None]
    return args, {**kwargs, EVALUATED: Evaluated(scheme, x, pixels[:0].to(embed.projection.weight.dtype))}
