"""Whole checkpoints of transformers: conversion between rotary layouts, and folding of a scheme's basis into weights."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isopos.encodings import InBasis, Rotary
from isopos.integrations.transformers.arguments import WINDOW
from isopos.integrations.transformers.patching import patch, unpatch
from isopos.integrations.transformers.reading import head_dim, rotary_module, text_part
from isopos.integrations.transformers.rotary import (
    Angles,
    RotaryTables,
    Unrotated,
    is_rotation,
    measured,
    rotated_slices,
)
from isopos.nn import checkpoint
from isopos.scheme import Scheme


@torch.no_grad()
def convert_layout(model: Any, *, to: Literal["interleaved", "half"]) -> dict[str, Tensor]:
    """State dict of a decoder of transformers whose projections of queries and keys have another rotary layout.

    "half" pairs features (i, i + d/2) of a head, as the code of most decoders does. "interleaved" pairs (2i, 2i + 1), as the
    RoFormer paper does, and isopos.rope by default. Gains of norms before the rotation are permuted with their features. To
    undo ``to="interleaved"``, load the result and convert with ``to="half"``.

    Args:
        model: A decoder whose code rotates pairs (i, i + d/2), with projections q_proj and k_proj, or query_key_value as in
            GPT-NeoX. It is not patched, or patched with a scheme that rotates pairs. It is not changed.
        to: The layout of the result.

    Returns:
        All of ``model.state_dict()``, with copies of the converted tensors.

    Raises:
        ValueError: For another model, scheme or layout.
    """
    rotary, tables = _rotary(model)
    if isinstance(rotary, Unrotated):
        raise ValueError("model: expected one whose own code rotates, got a scheme that goes through an attention of isopos")
    width = _width(tables, getattr(rotary, "scheme", None))
    state = dict(model.state_dict())
    for name in {name for name, _ in _rows(model, state)}:
        state[name] = state[name].clone()
    for _, rows in _rows(model, state):
        rows.copy_(_converted(rows, to, width))
    return state


@torch.no_grad()
def absorb(model: Any) -> Any:
    """Fold the constant basis of a patched decoder's scheme into its projections, in place, and return the model.

    Logits do not change. If the remaining scheme rotates pairs, the same in all heads, the model's code applies it, as in
    `patch`, and the projections' rows are permuted into its layout.

    Args:
        model: A decoder patched with a scheme that `isopos.nn.absorb` takes, without norms of queries and keys (Qwen 3).

    Raises:
        ValueError: For another model or scheme; nothing is changed.
    """
    rotary, tables = _rotary(model)
    if not isinstance(rotary, Angles | Unrotated):
        raise ValueError("model: expected one with a scheme of isopos, got one without; patch(model, scheme) first")
    state = dict(model.state_dict(keep_vars=True))
    names, projections = zip(*_rows(model, state), strict=True)
    scheme: Scheme = rotary.scheme  # pyright: ignore[reportAssignmentType]
    new = []
    between = ["norms of queries and keys"] * any(name.split(".")[-2].endswith("_norm") for name in names)
    between += ["a limit clip_qkv"] * (getattr(text_part(model).config, "clip_qkv", None) is not None)
    if between:
        raise ValueError(
            f"model: expected projections straight ahead of the scheme, got {' and '.join(between)} between them"
        )
    if few := [len(rows) for rows in projections if len(rows) % scheme.heads]:
        raise ValueError(
            f"model: expected a scheme of one head or of its {min(few)} heads of keys, each of which has one basis, got one "
            f"of {scheme.heads} heads, several of which share a key; build it with heads={min(few)}"
        )
    groups = [rows.reshape(scheme.heads, -1, *rows.shape[1:]) for rows in projections]  # that share one of its heads
    device = next((parameter.device for parameter in scheme.parameters()), torch.device("cpu"))  # where its basis is
    layers = [[_linear(group[:, n].flatten(0, 1).to(device)) for n in range(group.shape[1])] for group in groups]
    absorbed = checkpoint.absorb(scheme, *(layer for several in layers for layer in several))
    for group, several in zip(groups, layers, strict=True):
        parts = [layer.weight.view_as(group[:, 0]) for layer in several]
        new.append(torch.stack(parts, 1).flatten(0, 1))
    if is_rotation(absorbed) and not isinstance(absorbed.encoding, InBasis):  # pairs are side by side as yet
        new = [_converted(rows, "half", _width(tables, absorbed)) for rows in new]
    for rows, changed in zip(projections, new, strict=True):
        rows.copy_(changed)
    window = getattr(text_part(model), WINDOW, None)
    patch(unpatch(model), absorbed, window=None if window is None else window.size)
    if window is not None:
        getattr(text_part(model), WINDOW).load_state_dict(window.state_dict())
    return model


def _rotary(model: Any) -> tuple[Any, RotaryTables]:
    """The rotary module of a decoder and its tables; raises ValueError for other models."""
    modules = text_part(model).modules() if hasattr(model, "base_model") else ()
    rotary = next((module for module in modules if isinstance(module, Angles | Unrotated)), None)
    if rotary is None and modules:
        rotary = (rotary_module(model) or (None,))[-1]
    tables = None if rotary is None else getattr(rotary, "tables", None) or measured(rotary)
    if rotary is None or tables is None or tables.columns != 1 or not tables.halves:
        raise ValueError(f"model: expected a decoder whose code rotates pairs (i, i + d/2), got {type(model).__name__}")
    if isinstance(getattr(rotary, "scheme", None), nn.ModuleDict):
        raise ValueError("model: expected one scheme for all layers, got one for each type of layers")
    _check_projections(text_part(model))
    return rotary, tables


def _width(tables: RotaryTables, scheme: Scheme | None) -> int:
    """Number of a head's first features that the model's code rotates, with or without a scheme."""
    first = rotated_slices(scheme.encoding) if scheme is not None and tables.flexible else None
    return (
        2 * tables.pairs if first is None else next((a.features for a in first if isinstance(a, Rotary)), 2 * tables.pairs)
    )


def _rows(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and views ``[h d ...]`` of the rows of weights that project queries or keys; for gains of norms ``[d]``."""
    part = text_part(model)
    features, within = head_dim(part.config), "" if part is model.base_model else "language_model."
    for name, tensor in state.items():
        kind = f".{name}".split(".")[-2] if within in name else None
        if kind in ("q_proj", "k_proj") or (kind in ("q_norm", "k_norm") and len(tensor) != features):
            yield name, tensor.view(-1, features, *tensor.shape[1:])
        elif kind == "query_key_value":
            by_head = tensor.view(-1, 3, features, *tensor.shape[1:])
            yield name, by_head[:, 0]
            yield name, by_head[:, 1]
        elif kind in ("q_norm", "k_norm"):
            yield name, tensor


def _check_projections(part: Any) -> None:
    """Raise ValueError for a model with projections of queries and keys that `_rows` does not support."""
    makers = ("q_proj", "k_proj", "query_key_value")
    layers = [a for a in part.modules() if any(hasattr(a, name) for name in makers)]
    served = {*makers, "v_proj", "o_proj", "dense", "q_norm", "k_norm"}
    others = {name for layer in layers for name, child in layer.named_children() if [*child.parameters()]} - served
    config = part.config
    if not layers or others:
        got = ", ".join(sorted(others)) or "none of these"
        raise ValueError(f"model: expected projections q_proj and k_proj, or query_key_value, and q_norm, k_norm, got {got}")
    wrapped = [
        f"{name} of {type(child).__name__}"
        for layer in layers
        for name, child in layer.named_children()
        if name in (*makers, "q_norm", "k_norm") and "weight" not in child._parameters and [*child.parameters()]
    ]
    if wrapped:
        raise ValueError(f"model: expected projections that hold their weights, got {wrapped[0]}; merge adapters first")
    for layer in layers:
        queries = getattr(layer, "q_proj", None)
        if queries is not None and len(queries.weight) != config.num_attention_heads * head_dim(config):
            raise ValueError(
                f"model: expected {config.num_attention_heads * head_dim(config)} rows of q_proj, queries alone, got "
                f"{len(queries.weight)}, such as gates with them"
            )
        joined = getattr(layer, "query_key_value", None)
        if joined is not None and len(joined.weight) != 3 * config.num_attention_heads * head_dim(config):
            raise ValueError("model: expected as many heads of keys as of queries in query_key_value, got fewer")


def _converted(rows: Tensor, to: Literal["interleaved", "half"], width: int | None) -> Tensor:
    """Rows ``[h d ...]``, or a gain ``[d]``, with their first `width` features in another layout."""
    heads = 1 if rows.ndim == 1 else len(rows)
    flat = rows.reshape(heads * rows.shape[min(1, rows.ndim - 1)], -1)
    return checkpoint.convert_layout(flat, heads, to=to, rotary_dim=width).reshape(rows.shape)


def _linear(weight: Tensor) -> nn.Linear:
    """A linear layer with a copy of a weight ``[n m]`` or a bias ``[n]``, for `isopos.nn.absorb`."""
    layer = nn.Linear(1 if weight.ndim == 1 else weight.shape[1], len(weight), bias=False, device=weight.device)
    layer.weight = nn.Parameter(weight.detach().clone().view(len(weight), -1))
    return layer
