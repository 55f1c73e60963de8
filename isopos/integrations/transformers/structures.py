"""The structures by which models have positions, and what a scheme changes in a model of each.

1. Rotary: one module makes cosines and sines for all layers. A scheme of rotations takes its place. Any other scheme goes
   through our attention, and the module leaves features as they are.
2. Added: a table of vectors is added to embeddings of tokens. The scheme's own vectors, or zeros, take its place, and its
   attention is ours.
3. Patches: the same for embeddings of the patches of an image.
4. Sinusoids: RoFormer's layers rotate by a table of sines and cosines.
5. Biased: attention of a model's own code that adds its mask to logits, rotary or ALiBi. A scheme's decay joins the mask.

What a model has is read from its modules and from the functions that they call. Its configuration only gives sizes and the
types of layers.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isopos.decays import Decay
from isopos.encodings import Encoding, Identity
from isopos.integrations.transformers.attention import ATTENTION, EVALUATED
from isopos.integrations.transformers.embeddings import Absolute, Sinusoids
from isopos.integrations.transformers.evaluated import Evaluated, Written, digits_of
from isopos.integrations.transformers.rotary import Angles, Unrotated, is_rotation, measured, rotary_modules
from isopos.positions import grid, sequence
from isopos.scheme import Scheme

__all__ = ["ABSENT", "Change", "Changes", "Hook", "changes", "each", "head_dim", "rotary_module", "text_part"]

ABSENT = ...  # one object, also in copies
OWN = "isopos"
"""The attribute of a hooked module that has its schemes, in a tuple where another module has them as submodules."""
TABLES = ("wpe", "position_embeddings", "position_embedding", "embed_positions")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Change(NamedTuple):
    """An attribute, and its value before or after; `ABSENT` for none."""

    owner: Any
    name: str
    value: Any

    def made(self) -> "Change":
        """Make it. Returns the change that undoes it."""
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
        """Make it. Returns the change that undoes it."""
        if callable(self.function):
            return Hook(self.owner, self.owner.register_forward_pre_hook(self.function, with_kwargs=True))
        self.function.remove()
        return self


Changes = list[Change | Hook]


def text_part(model: Any) -> Any:
    """A model without its head, and without parts for images."""
    return getattr(model.base_model, "language_model", model.base_model)


def rotary_module(model: Any) -> tuple[Any, str, Any] | None:
    """The parent of a model's rotary module, its name there, and the module; None where it has none.

    Raises:
        ValueError: For a model with several.
    """
    found = [*rotary_modules(text_part(model))] or [*rotary_modules(model)]  # the base of DINOv3's model has none
    if len(found) > 1:
        names = ", ".join(f"{type(owner).__name__}.{name}" for owner, name, _ in found)
        raise ValueError(f"model: expected one rotary module for all layers, got {names}; patch the part that has one")
    return found[0] if found else None


def each(scheme: Any) -> dict[str, Scheme]:
    """Schemes by the type of their layers; by an empty name where all layers have one."""
    return dict(scheme) if isinstance(scheme, Mapping) else {"": scheme}


def changes(model: Any, scheme: Any, configs: Mapping[int, Any]) -> Changes:
    """What a scheme changes in a model.

    Args:
        model: A model of transformers.
        scheme: A scheme, or a mapping from types of layers.
        configs: Copies of its configurations, by the identity of the original. The model will have the copies.

    Raises:
        ValueError: With the reason, for a model or a scheme that cannot be served. Nothing is changed.
    """
    part = text_part(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError("model: expected one stack of layers, got an encoder and a decoder, whose keys are of two kinds")
    rotary = rotary_module(model)
    if rotary is not None:
        owner, name, old = rotary
        return _rotary(owner, name, old, configs[id(owner.config)], scheme)
    config = configs[id(part.config)]
    if not isinstance(scheme, Scheme):
        raise ValueError(
            "scheme: expected one for all layers, since the model has no frequencies by layer type, got several"
        )
    inner: Any = getattr(part, "encoder", None)
    if hasattr(inner, "embed_positions") and "sinusoidal" in type(inner.embed_positions).__name__.lower():
        return _sinusoids(part, config, scheme)
    found = next(_added_tables(part), None)
    if found is None:
        raise ValueError(
            "model: expected a rotary module with inverse frequencies, or a table of learned positions that is added to "
            f"embeddings, got {type(part).__name__}, in which neither was found; isopos audit measures what it has"
        )
    owner, name, table = found
    if isinstance(table, nn.Parameter):
        return _patches(part, config, scheme)
    return _encoder(part, config, scheme) if owner is not part else _added(owner, name, table, config, scheme)


def _added_tables(part: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Tables of positions in a model or in its embeddings, with their owners and names."""
    for owner in (part, getattr(part, "embeddings", None)):
        for name in TABLES:
            table = getattr(owner, name, None)
            patches = isinstance(table, nn.Parameter) and hasattr(owner, "patch_embeddings")
            if type(table) is nn.Embedding or patches:
                yield owner, name, table


def _rotary(owner: Any, name: str, old: Any, config: Any, scheme: Any) -> Changes:
    """Changes of a model that rotates queries and keys by the cosines and sines of one module."""
    tables, schemes = measured(old), each(scheme)
    if isinstance(scheme, Mapping) and {*scheme} != {*tables.layer_types}:
        known = ", ".join(tables.layer_types) or "one scheme, since all layers share the model's frequencies"
        raise ValueError(f"scheme: expected {known}, got {', '.join(scheme)}")
    for one in schemes.values():
        _check(one, head_dim(config), _heads(config), columns=(tables.columns,), real=tables.patch is not None)
        _refuse_embedding(one)
    module = nn.ModuleDict(schemes) if isinstance(scheme, Mapping) else scheme
    fixed = [Change(owner, "use_alibi", False)] if getattr(owner, "use_alibi", False) else []
    if all(tables.take(one) for one in schemes.values()):
        return [Change(owner, name, Angles(module, tables)), *fixed]
    layers = _biased_layers(owner)
    if layers and all(_is_decayed(one, _heads(config)[0]) for one in schemes.values()):
        own = [change for a in layers for change in (Change(a, OWN, (module,)), Hook(a, _of_decay))]
        return [Change(owner, name, Angles(module, tables)), *fixed, *own]
    if tables.columns == 2:
        raise ValueError(
            "scheme: expected one that rotates pairs of features, all heads alike, since the model's attention over patches "
            "gets no mask that ours could have, got another"
        )
    hooks = _through_attention(owner, config, scheme, tables.columns, rotary=True)
    return [Change(owner, name, Unrotated(module, tables)), *hooks]


def _through_attention(owner: Any, config: Any, scheme: Any, columns: int, *, rotary: bool) -> Changes:
    """Changes that give a scheme to our attention in all layers, among the model's own arguments."""
    layers, types = _attention_layers(owner), config.layer_types if isinstance(scheme, Mapping) else None
    names = [None if rotary and not _rotates(a, config) else types[a.layer_idx] if types else "" for a in layers]
    some: dict[str | None, Scheme] = {**each(scheme)}
    if None in names:  # layers without positions stay so
        first = next(iter(some.values()))
        some[None] = Scheme(Identity(first.encoding.features, first.group), 1, attention="softmax")
    own = partial(_of_tokens, names=tuple(inspect.signature(owner.forward).parameters), columns=columns)
    hooks = [
        Hook(layer, partial(_of_layer, name=name, cache=_cache_name(layer)))
        for layer, name in zip(layers, names, strict=True)
    ]
    return [Change(owner, OWN, (some,)), Hook(owner, own), *hooks, Change(config, "_attn_implementation", ATTENTION)]


def _added(owner: Any, name: str, table: Any, config: Any, scheme: Scheme) -> Changes:
    """Changes of GPT-2 and its like: the scheme's vectors, or zeros, replace the model's vectors of positions."""
    if getattr(config, "add_cross_attention", False):
        raise ValueError("model: expected a decoder by itself, got one with cross-attention (add_cross_attention)")
    _check(scheme, head_dim(config), _heads(config))
    _check_embedding(scheme, table.embedding_dim)
    replaced = Change(owner, name, Absolute(scheme, table.weight))
    if _is_nothing(scheme):
        return [replaced]
    return [replaced, *_through_attention(owner, config, scheme, 1, rotary=False)]


def _encoder(part: Any, config: Any, scheme: Scheme) -> Changes:
    """Changes of BERT and its like, whose embeddings are a module of their own and are called without its layers."""
    if getattr(config, "is_decoder", False):
        raise ValueError("model: expected BERT as an encoder, got is_decoder=True")
    embeddings = part.embeddings
    _check(scheme, head_dim(config), _heads(config), class_tokens=1)
    _check_embedding(scheme, config.hidden_size)
    zeros = Change(embeddings, "position_embeddings", Absolute(scheme, embeddings.position_embeddings.weight))
    result: Changes = [zeros, Hook(embeddings, _of_words)]
    if _is_nothing(scheme):
        return result
    _attention_layers(part.encoder)
    implementation = Change(config, "_attn_implementation", ATTENTION)
    return [*result, Change(part.encoder, OWN, (scheme,)), Hook(part.encoder, _of_features), implementation]


def _sinusoids(part: Any, config: Any, scheme: Scheme) -> Changes:
    """Changes of RoFormer, whose layers have their own attention."""
    _check(scheme, head_dim(config), _heads(config))
    _refuse_embedding(scheme)
    if not is_rotation(scheme):
        raise ValueError("scheme: expected one that rotates pairs of features, all heads alike, for RoFormer, got another")
    return [Change(part.encoder, "embed_positions", Sinusoids(scheme, part.encoder.embed_positions.weight))]


def _patches(part: Any, config: Any, scheme: Scheme) -> Changes:
    """Changes of ViT, whose vectors of positions become zeros. Its patches are on a grid, or row by row on a line."""
    old = part.embeddings.position_embeddings
    _check(scheme, head_dim(config), _heads(config), class_tokens=1, columns=(1, 2))
    _refuse_embedding(scheme)
    zeros = Change(part.embeddings, "position_embeddings", nn.Parameter(torch.zeros_like(old), requires_grad=False))
    if _is_nothing(scheme):
        return [zeros]
    _attention_layers(part)
    implementation = Change(config, "_attn_implementation", ATTENTION)
    return [zeros, Change(part, OWN, scheme), Hook(part, _of_patches), implementation]


# What is read of a model


def head_dim(config: Any) -> int:
    """Features of a head."""
    width = getattr(config, "embed_dim", None) or config.hidden_size
    return getattr(config, "head_dim", None) or width // _heads(config)[0]


def _heads(config: Any) -> tuple[int, int]:
    """Numbers of heads of queries and of keys."""
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _attention_layers(owner: nn.Module) -> list[Any]:
    """The layers of attention that ours can serve.

    Raises:
        ValueError: With the reason, where there are none, or where a model does not pass on the arguments that ours needs.
    """
    expected = "scheme: expected one that rotates pairs of features, all heads alike, since "
    found = [(name, a) for name, a in owner.named_modules() if _calls(a, "ALL_ATTENTION_FUNCTIONS")]
    if not found:
        raise ValueError(f"{expected}the attention of {type(owner).__name__} is its own code, not transformers' interface")
    for name, layer in found:
        parts = name.split(".")
        path = [owner.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]
        for module in path:
            kinds = [a.kind for a in inspect.signature(module.forward).parameters.values()]
            if not isinstance(module, nn.ModuleList | nn.ModuleDict) and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise ValueError(f"{expected}{type(module).__name__} passes no further arguments to attention")
        for option, reason in (("attn_logit_softcapping", "caps its logits"), ("sinks", "has sinks")):
            if getattr(layer, option, None) is not None:
                raise ValueError(f"{expected}{type(layer).__name__} {reason} ({option}), which our attention does not")
    return [layer for _, layer in found]


def _biased_layers(owner: nn.Module) -> list[Any]:
    """The layers of attention of a model's own code that add their mask to logits, and know ALiBi."""
    return [a for a in owner.modules() if _calls(a, "scaled_dot_product_attention", "softmax") and _takes(a, "alibi")]


def _calls(module: nn.Module, *names: str) -> bool:
    """Whether a module's forward has a global name, or attributes of these names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and all(name in code.co_names for name in names)


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters


def _cache_name(layer: nn.Module) -> str | None:
    """The argument of a layer of attention that is its cache."""
    return next((name for name in ("past_key_values", "layer_past") if _takes(layer, name)), None)


class _Touched(Exception):
    """A layer of attention used the tables of positions."""


class _Passed(Exception):
    """A layer of attention added its keys to a cache."""


class _Wire:
    """Tables of positions that raise where they are used."""

    def __getattr__(self, name: str) -> Any:
        raise _Touched

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _Touched


class _End:
    """A cache at which a layer stops."""

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise _Passed


@torch.no_grad()
def _rotates(layer: Any, config: Any) -> bool:
    """Whether a layer of attention uses the tables that it is given, by a call on one token that ends at its cache.

    A layer without a cache is taken to use them.
    """
    cache = _cache_name(layer)
    if cache is None:
        return True
    weight, wire = next(layer.parameters()), _Wire()
    x = weight.new_zeros(1, 1, config.hidden_size)
    for tables in ((wire, wire), wire):  # real, and complex
        try:
            layer.forward(x, position_embeddings=tables, attention_mask=None, **{cache: _End()})
        except _Touched:
            return True
        except _Passed:
            return False
        except (TypeError, AttributeError):  # a pair is no complex table
            continue
    raise ValueError(f"model: expected attention that takes position_embeddings and a cache, got {type(layer).__name__}")


# What modules are called with


def _of_tokens(
    owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, names: tuple[str, ...], columns: int
) -> Arguments:
    """The arguments of a stack of layers, with its schemes at the positions of tokens."""
    if owner.config._attn_implementation != ATTENTION:
        raise ValueError(
            f"attn_implementation: expected {ATTENTION!r} while the scheme is in the model, whose other attentions do "
            f"not know it, got {owner.config._attn_implementation!r}; unpatch(model) first"
        )
    given = dict(zip(names, args, strict=False)) | kwargs
    tokens, x = given.get("input_ids"), given.get("position_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    if x is None:
        cache = given.get("past_key_values")
        x = torch.arange(tokens.shape[1], device=tokens.device) + (0 if cache is None else cache.get_seq_length())
        x = x[None]
    x = x[..., None] if columns == 1 else x[-3:].expand(3, *x.shape[-2:]).movedim(0, -1)  # ahead of 3 may be those of text
    like = owner.get_input_embeddings().weight
    digits = digits_of(x, like.dtype)
    own = getattr(owner, OWN)[0].items()
    made = {name: Evaluated(scheme, x, like, None if name is None else digits) for name, scheme in own}
    return args, {**kwargs, EVALUATED: made}


def _of_layer(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None, cache: str | None
) -> Arguments:
    """The arguments of a layer of attention, with the scheme of its type, and a cache that keeps positions."""
    if not isinstance(kwargs.get(EVALUATED), dict):
        raise ValueError(
            f"model: expected the scheme among the arguments of {type(layer).__name__}, got none; call the model, which has "
            "it for all layers"
        )
    evaluated = kwargs[EVALUATED][name]
    kwargs = {**kwargs, EVALUATED: evaluated}
    if cache is not None and kwargs.get(cache) is not None and evaluated.digits is not None:
        kwargs[cache] = Written(kwargs[cache], evaluated.digits)
    return args, kwargs


def _of_decay(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a layer that adds its mask to logits, with a scheme's decay in the mask.

    Positions of keys are counted among those that some query sees.
    """
    mask, x, decay = kwargs["attention_mask"], kwargs["position_ids"], getattr(layer, OWN)[0].decay
    least = torch.finfo(kwargs["position_embeddings"][0].dtype).min
    seen = mask if mask.dtype == torch.bool else mask > least
    y = (seen[:, 0].any(-2).cumsum(-1) - 1).clamp_min(0)
    g_query, g_key = decay(x[..., None]), decay(y[..., None])
    bias = (g_query[..., None] - g_key[..., None, :]).to(kwargs["position_embeddings"][0].dtype)
    return args, {**kwargs, "attention_mask": torch.where(seen, bias, least)}


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


def _of_features(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
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
    patches = grid(*sides, device=device) if group.columns == 2 else sequence(math.prod(sides), device=device)
    x = torch.cat((group.origin(1, device=device), patches + 1))[None]
    return args, {**kwargs, EVALUATED: Evaluated(scheme, x, pixels[:0].to(embed.projection.weight.dtype))}


# What is refused of schemes


def _is_nothing(scheme: Scheme) -> bool:
    """Whether attention sees no positions."""
    return is_rotation(scheme) and scheme.encoding.is_trivial


def _is_decayed(scheme: Scheme, heads: int) -> bool:
    """Whether a scheme is rotations and a constant decay per head of queries."""
    return is_rotation(scheme, with_decay=True) and isinstance(scheme.decay, Decay) and scheme.heads == heads


def _refuse_embedding(scheme: Scheme) -> None:
    if scheme.embedding is not None:
        raise ValueError("scheme: expected one that acts in attention, got one that adds to embeddings of tokens")


def _check_embedding(scheme: Scheme, features: int) -> None:
    if scheme.embedding is not None and scheme.embedding.model_dim != features:
        raise ValueError(f"scheme: expected an embedding of {features} features, got {scheme.embedding.model_dim}")


KNOWN = {1: "on a line or ring, as position_ids are", 2: "on a grid of two axes", 3: "on a grid of three axes"}


def _check(
    scheme: Scheme,
    features: int,
    heads: tuple[int, int],
    *,
    class_tokens: int = 0,
    columns: Sequence[int] = (1,),
    real: bool = False,
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
        known = KNOWN[columns[-1]] + ", or on a line" * (len(columns) > 1)
        raise ValueError(f"scheme: expected positions {known}, got {group}")
    if real and not all(leaf.real for leaf in group.leaves):
        raise ValueError(f"scheme: expected positions that may be real numbers, such as isopos.rope_axial has, got {group}")
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
