"""The families of models that schemes can be put into, and what is to be changed in each."""

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isopos.encodings import Encoding
from isopos.integrations.transformers.attention import EVALUATED
from isopos.integrations.transformers.evaluated import Evaluated
from isopos.integrations.transformers.places import ATTENTION, Absolute, Angles, Digits, Sinusoids, rotations
from isopos.positions import grid, sequence
from isopos.scheme import Scheme

__all__ = ["ABSENT", "DECODERS", "FAMILIES", "Change", "Hook", "head_dim", "is_rotation"]

ABSENT = ...  # one object, also in copies
OWN = "isopos"
"""The attribute of a patched encoder that is its scheme; a tuple where another module has it as a submodule."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Change(NamedTuple):
    """An attribute, and what it was before, `ABSENT` for none, or is to be."""

    owner: Any
    name: str
    value: Any

    def made(self) -> "Change":
        """Make it; the change that undoes it."""
        old = getattr(self.owner, self.name, ABSENT)
        before = Change(self.owner, self.name, ABSENT if isinstance(old, MethodType) else old)  # a class's own
        if self.value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.value)
        return before


class Hook(NamedTuple):
    """A function that changes a module's arguments, to be registered, or its handle, to be removed."""

    owner: nn.Module
    function: Any

    def made(self) -> "Hook":
        """Make it; the change that undoes it."""
        if callable(self.function):
            return Hook(self.owner, self.owner.register_forward_pre_hook(self.function, with_kwargs=True))
        self.function.remove()
        return self


Changes = list[Change | Hook]


def _decoder(base: Any, config: Any, scheme: Scheme, *, own: str = "self_attn", narrow: bool = False) -> Changes:
    """Of models that rotate queries and keys by the cosines and sines that one module makes.

    Args:
        base: The model without its head.
        config: The configuration that it will have.
        scheme: Not checked yet.
        own: The attribute of layers that is their attention.
        narrow: Whether the model rotates as many features as there are cosines, and passes the rest.
    """
    heads = config.num_attention_heads
    _check(scheme, head_dim(config), (heads, getattr(config, "num_key_value_heads", None) or heads), class_tokens=0)
    _refuse_embedding(scheme)
    if is_rotation(scheme):
        return [Change(base, "rotary_emb", Angles(scheme, narrow=narrow))]
    hooks = [Hook(getattr(layer, own), _of_place) for layer in base.layers]
    return [Change(base, "rotary_emb", Digits(scheme, config)), *hooks, _ours(config)]


def _bert(base: Any, config: Any, scheme: Scheme) -> Changes:
    """Of BERT, whose absolute embeddings give way to the scheme's own, or to none."""
    if config.is_decoder:
        raise ValueError("model: expected BERT as an encoder, got is_decoder=True")
    _check(scheme, head_dim(config), (config.num_attention_heads,) * 2, class_tokens=1)
    added = scheme.embedding
    if added is not None and added.model_dim != config.hidden_size:
        raise ValueError(f"scheme: expected an embedding of {config.hidden_size} features, got {added.model_dim}")
    zeros = Change(base.embeddings, "position_embeddings", Absolute(scheme, base.embeddings.position_embeddings.weight))
    changes: Changes = [zeros, Hook(base.embeddings, _of_words)]
    if _is_nothing(scheme):
        return changes
    return [*changes, Change(base.encoder, OWN, (scheme,)), Hook(base.encoder, _of_tokens), _ours(config)]


def _roformer(base: Any, config: Any, scheme: Scheme) -> Changes:
    """Of RoFormer, whose code knows no other attention than its own."""
    _check(scheme, head_dim(config), (config.num_attention_heads,) * 2, class_tokens=0)
    _refuse_embedding(scheme)
    if not is_rotation(scheme):
        raise ValueError("scheme: expected one that rotates pairs of features, all heads alike, for RoFormer, got another")
    return [Change(base.encoder, "embed_positions", Sinusoids(scheme, base.encoder.embed_positions.weight))]


def _vit(base: Any, config: Any, scheme: Scheme) -> Changes:
    """Of ViT, whose absolute embeddings become zeros; its patches are on a grid, or row by row on a line."""
    old = base.embeddings.position_embeddings
    heads = (config.num_attention_heads,) * 2
    _check(scheme, head_dim(config), heads, class_tokens=1, columns=(1, 2))
    _refuse_embedding(scheme)
    zeros = Change(base.embeddings, "position_embeddings", nn.Parameter(torch.zeros_like(old), requires_grad=False))
    if _is_nothing(scheme):
        return [zeros]
    return [zeros, Change(base, OWN, scheme), Hook(base, _of_patches), _ours(config)]


DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox")
FAMILIES: dict[str, Callable[[Any, Any, Scheme], Changes]] = {
    **dict.fromkeys(DECODERS, _decoder),
    "gpt_neox": partial(_decoder, own="attention", narrow=True),
    "bert": _bert,
    "roformer": _roformer,
    "vit": _vit,
}
"""By ``config.model_type``: what a scheme changes in a model without its head, and in its configuration."""


def _ours(config: Any) -> Change:
    """Our attention, for layers whose arguments tell it the scheme."""
    return Change(config, "_attn_implementation", ATTENTION)


def head_dim(config: Any) -> int:
    """Features of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_rotation(scheme: Scheme) -> bool:
    """Whether cosines and sines, for all heads, are all of it but what it adds to embeddings."""
    plain = scheme.decay is scheme.bias is scheme.locality is scheme.scale is None and not scheme.phases
    parts = rotations(scheme.encoding)
    passing = scheme.sharpness != 1 and any(isinstance(part, int) for part in parts or ())  # by no cosine made sharper
    return plain and parts is not None and not passing


def _is_nothing(scheme: Scheme) -> bool:
    """Whether attention sees no positions."""
    return is_rotation(scheme) and scheme.encoding.is_trivial


def _of_place(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a decoder's attention with what `Digits` made for all of its layers."""
    return args, {**kwargs, EVALUATED: kwargs["position_embeddings"][0].evaluated}


def _of_words(embeddings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of BERT's embeddings with positions and types of all tokens, which its own tables limit in number."""
    names = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds", "past_key_values_length")
    given = dict(zip(names, args, strict=False)) | kwargs
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    if given.get("position_ids") is None:
        given["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if given.get("token_type_ids") is None:
        given["token_type_ids"] = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    return (), given


def _of_tokens(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of BERT's layers with the scheme at the positions of tokens, 0 to t - 1 unless they are given."""
    features, given = args[0] if args else kwargs["hidden_states"], kwargs.get("position_ids")
    x = sequence(features.shape[1], device=features.device)[None] if given is None else given[..., None]
    return args, {**kwargs, EVALUATED: Evaluated(getattr(encoder, OWN)[0], x, features)}


def _of_patches(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a ViT with the scheme at the class token, the origin, and at patches from 1 on, on each axis."""
    pixels: Tensor = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
    embed, scheme = model.embeddings.patch_embeddings, getattr(model, OWN)
    sides = [size // patch for size, patch in zip(pixels.shape[-2:], embed.patch_size, strict=True)]
    group, device = scheme.group, pixels.device
    patches = grid(*sides, device=device) if group.columns == 2 else sequence(sides[0] * sides[1], device=device)
    x = torch.cat((group.origin(1, device=device), patches + 1))[None]
    return args, {**kwargs, EVALUATED: Evaluated(scheme, x, pixels[:0].to(embed.projection.weight.dtype))}


def _refuse_embedding(scheme: Scheme) -> None:
    if scheme.embedding is not None:
        raise ValueError("scheme: expected one that acts in attention, got one that adds to embeddings of tokens")


def _check(
    scheme: Scheme, features: int, heads: tuple[int, int], *, class_tokens: int, columns: Sequence[int] = (1,)
) -> None:
    """ValueError for a scheme that a model with these heads of queries and of keys cannot take."""
    encoding, group = scheme.encoding, scheme.group
    if scheme.attention != "softmax":
        raise ValueError("scheme: expected attention='softmax', which the model has, got linear; build it with that option")
    if scheme.phases:
        raise ValueError(
            "scheme: expected one of positions, got one whose keys take steps (decay='forget', selective), for which the "
            "model's cache of keys has no place"
        )
    if group.columns not in columns or group.refers_to_rows:
        known = "on a line or ring, as position_ids are" if columns == (1,) else "on a grid of two axes, or on a line"
        raise ValueError(f"scheme: expected positions {known}, got {group}")
    if scheme.outside > class_tokens:
        raise ValueError(f"scheme: expected class tokens outside={class_tokens} at most, got {scheme.outside}")
    if scheme.width != 1 or encoding.features != features:
        raise ValueError(
            f"scheme: expected one for the model's head size of {features}, got {encoding.features // scheme.width}"
            + f" and projections {scheme.width} times as wide" * (scheme.width != 1)
        )
    if isinstance(encoding, Encoding) and encoding.out_features != features:
        raise ValueError(
            f"scheme: expected one that keeps the model's head size of {features}, got a lift to {encoding.out_features}"
        )
    if scheme.heads not in (1, *heads):
        raise ValueError(f"scheme: expected one for {heads[0]} heads of queries or {heads[1]} of keys, got {scheme.heads}")
