"""The ways in which models use positions, and the changes that a scheme makes in each.

1. Rotary: one module computes cosines and sines for all layers. A scheme of rotations replaces it. With any other scheme
   the module rotates nothing and our attention applies the scheme.
2. Added: a table of vectors is added to token embeddings. The vectors of the scheme, or zeros, replace it, and our attention
   applies the scheme.
3. Patches: the same for embeddings of the patches of an image.
4. Sinusoids: RoFormer's layers rotate by a table of sines and cosines.
5. Biased: the model's code adds its mask to logits, rotary or ALiBi. A scheme's decay is added to the mask.

The way is read from a model's modules and the functions that they call, not from its name. The configuration is read for
sizes and types of layers only.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from isopos.decays import Decay
from isopos.encodings import Encoding, Identity
from isopos.integrations.transformers import reading
from isopos.integrations.transformers.arguments import (
    OWN,
    WINDOW,
    of_decay,
    of_features,
    of_layer,
    of_patches,
    of_tokens,
    of_words,
)
from isopos.integrations.transformers.attention import ATTENTION
from isopos.integrations.transformers.linear import Window
from isopos.integrations.transformers.reading import head_counts, head_dim
from isopos.integrations.transformers.rotary import AddedPositions, Angles, Sinusoids, Unrotated, is_rotation, measured
from isopos.scheme import Linear, Scheme

ABSENT = ...  # one object, also in copies
CHANGES = "_isopos_changes"  # attribute of a patched model, without its head, that holds the former values


class Change(NamedTuple):
    """A new value of an attribute; `ABSENT` deletes the attribute."""

    owner: Any
    name: str
    value: Any

    def made(self) -> "Change":
        """Apply the change; return the change that undoes it."""
        old = getattr(self.owner, self.name, ABSENT)
        before = Change(self.owner, self.name, ABSENT if isinstance(old, MethodType) else old)  # a class's own
        if self.value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.value)
        return before


class Hook(NamedTuple):
    """A forward pre-hook to register, or the handle of one to remove."""

    owner: nn.Module
    function: Any

    def made(self) -> "Hook":
        """Apply the change; return the change that undoes it."""
        if callable(self.function):
            return Hook(self.owner, self.owner.register_forward_pre_hook(self.function, with_kwargs=True))
        self.function.remove()
        return self


def follow(undo: Change) -> None:
    """Give a replaced table, or a replaced module, the device of what is in its place, and a table its dtype."""
    now = getattr(undo.owner, undo.name)
    like = now if isinstance(now, nn.Parameter) else getattr(now, "like", None)
    if isinstance(like, torch.Tensor):
        tables = [undo.value] if isinstance(undo.value, nn.Parameter) else undo.value.parameters()
        for table in tables:
            table.data = table.data.to(like)
    elif isinstance(undo.value, nn.Module) and (at := next(iter(undo.owner.parameters()), None)) is not None:
        undo.value.to(at.device)


def replaced_tables(model: Any) -> dict[str, torch.Tensor]:
    """Tables of positions that a patch replaced, by their names in the state dict of the model without it."""
    names = {id(module): f"{name}." * bool(name) for name, module in model.named_modules()}
    found: dict[str, torch.Tensor] = {}
    for undo in vars(model.base_model)[CHANGES]:
        if not isinstance(undo, Change) or not isinstance(undo.value, nn.Module | nn.Parameter):
            continue
        follow(undo)
        name = f"{names[id(undo.owner)]}{undo.name}"
        tables = {"": undo.value} if isinstance(undo.value, nn.Parameter) else undo.value.state_dict()
        found |= {f"{name}.{key}".removesuffix("."): tensor.detach() for key, tensor in tables.items()}
    return found


Changes = list[Change | Hook]


def each(scheme: Any) -> dict[str, Scheme]:
    """Schemes by type of layers; one scheme for all layers has an empty name."""
    return dict(scheme) if isinstance(scheme, Mapping) else {"": scheme}


def changes(model: Any, scheme: Any, configs: Mapping[int, Any], window: int | None = None) -> Changes:
    """The changes that put a scheme into a model.

    Args:
        model: A model of transformers.
        scheme: A scheme, or a mapping from types of layers to schemes.
        configs: Copies of the model's configurations, by the id of the original; they replace the originals.
        window: Number of keys that softmax attention sees in addition to linear attention, or None.

    Raises:
        ValueError: With the reason, for a model or a scheme that cannot be served. Nothing is changed.
    """
    part = reading.text_part(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError("model: expected one stack of layers, got an encoder and a decoder, whose keys are of two kinds")
    if window is not None:
        _check_window(window, scheme)
    rotary = reading.rotary_module(model)
    if rotary is not None:
        owner, name, old = rotary
        return _rotary(owner, name, old, configs[id(owner.config)], scheme, window)
    config = configs[id(part.config)]
    if not isinstance(scheme, Scheme):
        raise ValueError(
            "scheme: expected one for all layers, since the model has no frequencies by layer type, got several"
        )
    encoder: Any = getattr(part, "encoder", None)
    if hasattr(encoder, "embed_positions") and any(reading.takes(a, "sinusoidal_pos") for a in encoder.modules()):
        return _sinusoids(part, config, scheme)
    table_of_positions = next(reading.added_tables(part), None)
    if table_of_positions is None:
        raise ValueError(
            "model: expected a rotary module with inverse frequencies, or a table of learned positions that is added to "
            f"embeddings, got {type(part).__name__}, in which neither was found; isopos audit measures what it has"
        )
    owner, name, table = table_of_positions
    if isinstance(table, nn.Parameter):
        return _patches(part, config, scheme)
    return _encoder(part, config, scheme) if owner is not part else _added(owner, name, table, config, scheme, window)


def _rotary(owner: Any, name: str, old: Any, config: Any, scheme: Any, window: int | None) -> Changes:
    """Changes of a model that rotates queries and keys by the cosines and sines of one module."""
    tables, schemes = measured(old), each(scheme)
    if isinstance(scheme, Mapping) and {*scheme} != {*tables.layer_types}:
        expected = ", ".join(tables.layer_types) or "one scheme, since all layers share the model's frequencies"
        raise ValueError(f"scheme: expected {expected}, got {', '.join(scheme)}")
    for one in schemes.values():
        sizes = head_dim(config), head_counts(config)
        _check(one, *sizes, columns=(tables.columns,), real=tables.patch is not None, linear=tables.columns != 2)
        _refuse_embedding(one)
    module = nn.ModuleDict(schemes) if isinstance(scheme, Mapping) else scheme
    fixed = [Change(owner, "use_alibi", False)] if getattr(owner, "use_alibi", False) else []
    linear = any(one.attention == "linear" for one in schemes.values())
    if not linear and all(tables.take(one) for one in schemes.values()):
        return [Change(owner, name, Angles(module, tables)), *fixed]
    layers = reading.biased_layers(owner)
    if not linear and layers and all(_is_decayed(one, head_counts(config)[0]) for one in schemes.values()):
        decayed = [change for a in layers for change in (Change(a, OWN, (module,)), Hook(a, of_decay))]
        return [Change(owner, name, Angles(module, tables)), *fixed, *decayed]
    if tables.columns == 2:
        raise ValueError(
            "scheme: expected one that rotates pairs of features, all heads alike, since the model's attention over patches "
            "gets no mask that ours could have, got another"
        )
    hooks = _through_attention(owner, config, scheme, tables.columns, rotary=True, window=window)
    return [Change(owner, name, Unrotated(module, tables)), *hooks]


def _through_attention(owner: Any, config: Any, scheme: Any, columns: int, *, rotary: bool, window: int | None) -> Changes:
    """Changes that pass a scheme to our attention in all layers, as a further argument of the model's calls."""
    layers, types = reading.attention_layers(owner), config.layer_types if isinstance(scheme, Mapping) else None
    for layer in layers:
        if {getattr(layer, size, None) for size in reading.SIZES} - {None, head_dim(config)}:
            sizes = f"have other sizes than {head_dim(config)}"
            raise ValueError(f"{reading.ROTATES}queries, keys and values of {type(layer).__name__} {sizes}")
    names = [None if rotary and not reading.uses_tables(a, config) else types[a.layer_idx] if types else "" for a in layers]
    some: dict[str | None, Scheme] = {**each(scheme)}
    if None in names:  # layers without positions stay so
        some[None] = _without_positions(next(iter(some.values())))
    for layer, name in zip(layers, names, strict=True):
        if some[name].attention == "linear":
            _check_causal(layer, config)
    hook = partial(of_tokens, names=tuple(inspect.signature(owner.forward).parameters), columns=columns)
    hooks = [
        Hook(layer, partial(of_layer, name=name, cache=reading.cache_name(layer)))
        for layer, name in zip(layers, names, strict=True)
    ]
    near = [] if window is None else [Change(owner, WINDOW, Window(window, len(layers), head_counts(config)[0]))]
    own_code = Change(config, "_attn_implementation", ATTENTION)
    return [Change(owner, OWN, (some,)), *near, Hook(owner, hook), *hooks, own_code]


def _without_positions(scheme: Scheme) -> Scheme:
    """The scheme of layers without positions in a model whose other layers have this scheme."""
    encoding = Identity(scheme.encoding.features, scheme.group)
    if scheme.attention == "softmax":
        return Scheme(encoding, 1, attention="softmax")
    denominator, feature_map = scheme.choices["denominator"], scheme.choices["feature_map"]
    kind = Linear(feature_map=feature_map, denominator="plain" if denominator == "complex" else denominator)
    return Scheme(encoding, 1, attention=kind)


def _added(owner: Any, name: str, table: Any, config: Any, scheme: Scheme, window: int | None) -> Changes:
    """Changes of GPT-2 and its like: the scheme's vectors, or zeros, replace the model's vectors of positions."""
    if getattr(config, "add_cross_attention", False):
        raise ValueError("model: expected a decoder by itself, got one with cross-attention (add_cross_attention)")
    _check(scheme, head_dim(config), head_counts(config), linear=True)
    _check_embedding(scheme, table.embedding_dim)
    replaced = Change(owner, name, AddedPositions(scheme, table.weight))
    if _is_nothing(scheme):
        return [replaced]
    return [replaced, *_through_attention(owner, config, scheme, 1, rotary=False, window=window)]


def _encoder(part: Any, config: Any, scheme: Scheme) -> Changes:
    """Changes of BERT and its like, whose embeddings are a separate module."""
    _check(scheme, head_dim(config), head_counts(config), class_tokens=1)
    if getattr(config, "is_decoder", False):
        raise ValueError("model: expected BERT as an encoder, got is_decoder=True")
    embeddings = part.embeddings
    if not (hasattr(part, "encoder") and hasattr(embeddings, "position_embeddings")):
        raise ValueError(
            f"model: expected embeddings.position_embeddings and an encoder, as BERT has, got {type(part).__name__}"
        )
    _check_embedding(scheme, config.hidden_size)
    zeros = Change(embeddings, "position_embeddings", AddedPositions(scheme, embeddings.position_embeddings.weight))
    result: Changes = [zeros, Hook(embeddings, of_words)]
    if _is_nothing(scheme):
        return result
    reading.attention_layers(part.encoder)
    implementation = Change(config, "_attn_implementation", ATTENTION)
    return [*result, Change(part.encoder, OWN, (scheme,)), Hook(part.encoder, of_features), implementation]


def _sinusoids(part: Any, config: Any, scheme: Scheme) -> Changes:
    """Changes of RoFormer, whose layers have their own attention."""
    _check(scheme, head_dim(config), head_counts(config))
    _refuse_embedding(scheme)
    if not is_rotation(scheme):
        raise ValueError("scheme: expected one that rotates pairs of features, all heads alike, for RoFormer, got another")
    return [Change(part.encoder, "embed_positions", Sinusoids(scheme, part.encoder.embed_positions.weight))]


def _patches(part: Any, config: Any, scheme: Scheme) -> Changes:
    """Changes of ViT, whose vectors of positions become zeros. Its patches are on a grid, or row by row on a line."""
    old = part.embeddings.position_embeddings
    ahead = 0 if _is_nothing(scheme) else reading.tokens_ahead(part.embeddings)
    _check(scheme, head_dim(config), head_counts(config), class_tokens=ahead, columns=(1, 2))
    _refuse_embedding(scheme)
    zeros = Change(part.embeddings, "position_embeddings", nn.Parameter(torch.zeros_like(old), requires_grad=False))
    if _is_nothing(scheme):
        return [zeros]
    reading.attention_layers(part)
    implementation = Change(config, "_attn_implementation", ATTENTION)
    return [zeros, Change(part, OWN, scheme), Hook(part, partial(of_patches, ahead=ahead)), implementation]


# What is refused of schemes


def _is_nothing(scheme: Scheme) -> bool:
    """Whether softmax attention sees no positions."""
    return scheme.attention == "softmax" and is_rotation(scheme) and scheme.encoding.is_trivial


def _is_decayed(scheme: Scheme, heads: int) -> bool:
    """Whether a scheme is rotations and a constant decay per head of queries."""
    return is_rotation(scheme, with_decay=True) and isinstance(scheme.decay, Decay) and scheme.heads == heads


def _check_window(window: int, scheme: Any) -> None:
    """Raise ValueError for a window that cannot be combined with a scheme."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window: expected a number of keys from 1 on, got {window!r}")
    if not isinstance(scheme, Scheme) or scheme.attention != "linear" or scheme.inside:
        raise ValueError(
            f"window: expected one only with one scheme of linear attention that maps features, got {window}; softmax "
            "attention sees all keys"
        )


def _check_causal(layer: Any, config: Any) -> None:
    """Raise ValueError for a layer whose queries see later keys, or not all earlier ones."""
    kinds, index = getattr(config, "layer_types", None), getattr(layer, "layer_idx", 0)
    kind = kinds[index] if kinds else "sliding" if getattr(config, "sliding_window", None) else "full_attention"
    if kind != "full_attention" or not getattr(layer, "is_causal", False):
        got = f"{kind.replace('_', ' ')} in layer {index}" if kind != "full_attention" else "attention in both directions"
        raise ValueError(
            "scheme: expected attention='softmax', since sums of linear attention are of all keys up to the query's, and "
            f"the model has {got}, got linear"
        )
    if reading.attends_twice(layer):
        raise ValueError(
            "scheme: expected attention='softmax', since linear attention has one state per layer, and "
            f"{type(layer).__name__} attends several times, got linear"
        )


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
    linear: bool = False,
) -> None:
    """Raise ValueError for a scheme that does not fit a model with these numbers of query and key heads."""
    encoding, group = scheme.encoding, scheme.group
    linear = linear and scheme.attention == "linear"
    if scheme.attention != "softmax" and not linear:
        raise ValueError(
            "scheme: expected attention='softmax', since linear attention replaces only the attention of a decoder, whose "
            "queries see all earlier keys, got linear"
        )
    if scheme.phases and not linear:
        raise ValueError(
            "scheme: expected one of positions, got one whose tokens take steps that depend on them (decay='forget', "
            "selective, carope, path), which are served in linear attention of causal decoders alone"
        )
    if group.columns not in columns or group.refers_to_rows:
        expected = KNOWN[columns[-1]] + ", or on a line" * (len(columns) > 1)
        raise ValueError(f"scheme: expected positions {expected}, got {group}")
    if real and not all(leaf.real for leaf in group.leaves):
        raise ValueError(f"scheme: expected positions that may be real numbers, such as isopos.rope_axial has, got {group}")
    if scheme.outside > class_tokens:
        raise ValueError(f"scheme: expected class tokens outside={class_tokens} at most, got {scheme.outside}")
    if scheme.width != 1 or encoding.features != features:
        raise ValueError(
            f"scheme: expected one for the model's head size of {features}, got {encoding.features // scheme.width}"
            + f" and projections {scheme.width} times as wide" * (scheme.width != 1)
        )
    if isinstance(encoding, Encoding) and encoding.out_features != features and not linear:
        raise ValueError(
            f"scheme: expected one that keeps the model's head size of {features}, got a lift to {encoding.out_features}"
        )
    if scheme.heads not in (1, *heads):
        raise ValueError(f"scheme: expected one for {heads[0]} heads of queries or {heads[1]} of keys, got {scheme.heads}")
