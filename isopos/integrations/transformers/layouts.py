"""Whole checkpoints of transformers between the layouts of rotary embeddings, and with a scheme's basis folded in."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isopos.encodings import InBasis, Rotary
from isopos.integrations.transformers.families import DECODERS, head_dim, is_rotation
from isopos.integrations.transformers.patching import patch, unpatch
from isopos.integrations.transformers.places import Angles, Digits, rotations
from isopos.integrations.transformers.saving import ENTRY
from isopos.nn import checkpoint

__all__ = ["absorb", "convert_layout"]


@torch.no_grad()
def convert_layout(model: Any, *, to: Literal["interleaved", "half"]) -> dict[str, Tensor]:
    """The state of a decoder of transformers with all projections of queries and keys in another layout of rotated pairs.

    The code of all families rotates pairs (i, i + d/2) of a head, "half"; "interleaved" ones, (2i, 2i + 1), are for code
    that rotates as the RoFormer paper does, and isopos.rope by default. Gains of norms ahead of the rotation go with their
    features. What ``to="interleaved"`` gave is converted back by loading it and ``to="half"``.

    Args:
        model: Llama, Qwen 2 and 3, Mistral, Gemma or GPT-NeoX, patched with a scheme that rotates pairs or not at all; it
            stays as it is.
        to: The layout of the result.

    Returns:
        All of ``model.state_dict()``; what is converted is a copy.

    Raises:
        ValueError: For another model, scheme or layout.
    """
    embedding = _rotary(model)
    if isinstance(embedding, Digits):
        raise ValueError("model: expected one whose own code rotates, got a scheme that goes through an attention of isopos")
    state = dict(model.state_dict())
    for name in {name for name, _ in _rows(model, state)}:
        state[name] = state[name].clone()
    for _, rows in _rows(model, state):
        rows.copy_(_converted(rows, to, _width(model)))
    return state


@torch.no_grad()
def absorb(model: Any) -> Any:
    """Fold the constant basis of a patched decoder's scheme into all its projections, in place, and return the model.

    Logits stay what they were. What then rotates pairs, all heads alike, is given to the model's own code, as `patch` does,
    and the projections' rows are brought into its layout.

    Args:
        model: Patched with a scheme that `isopos.nn.absorb` takes, and without norms of queries and keys (Qwen 3).

    Raises:
        ValueError: For another model or scheme; nothing is changed.
    """
    embedding = _rotary(model)
    if not isinstance(embedding, Angles | Digits):
        raise ValueError("model: expected one with a scheme of isopos, got one without; patch(model, scheme) first")
    state = dict(model.state_dict(keep_vars=True))
    found = [rows for _, rows in _rows(model, state)]
    scheme, new = embedding.scheme, []
    if any(rows.ndim == 1 for rows in found):
        raise ValueError(
            "model: expected projections straight ahead of the scheme, got norms of queries and keys between them"
        )
    if few := [len(rows) for rows in found if len(rows) % scheme.heads]:
        raise ValueError(
            f"model: expected a scheme of one head or of its {min(few)} heads of keys, each of which has one basis, got one "
            f"of {scheme.heads} heads, several of which share a key; build it with heads={min(few)}"
        )
    groups = [rows.reshape(scheme.heads, -1, *rows.shape[1:]) for rows in found]  # heads that share one of the scheme's
    device = next((parameter.device for parameter in scheme.parameters()), torch.device("cpu"))  # where its basis is
    layers = [[_linear(group[:, n].flatten(0, 1).to(device)) for n in range(group.shape[1])] for group in groups]
    absorbed = checkpoint.absorb(scheme, *(layer for several in layers for layer in several))
    for group, several in zip(groups, layers, strict=True):
        parts = [layer.weight.view_as(group[:, 0]) for layer in several]
        new.append(torch.stack(parts, 1).flatten(0, 1))
    if is_rotation(absorbed) and not isinstance(absorbed.encoding, InBasis):  # pairs are side by side as yet
        first = (rotations(absorbed.encoding) or (None,))[0]
        width = first.features if isinstance(first, Rotary) and model.config.model_type == "gpt_neox" else None
        new = [_converted(rows, "half", width) for rows in new]
    for rows, changed in zip(found, new, strict=True):
        rows.copy_(changed)
    unpatch(model)
    if hasattr(model.config, ENTRY):
        delattr(model.config, ENTRY)  # of the scheme with its basis
    return patch(model, absorbed)


def _rotary(model: Any) -> Any:
    """What makes positions in a decoder; ValueError for another model."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in DECODERS:
        raise ValueError(f"model: expected one of {', '.join(DECODERS)}, got {kind}")
    return model.base_model.rotary_emb


def _width(model: Any) -> int | None:
    """How many first features of a head are rotated, where not all are."""
    if model.config.model_type != "gpt_neox":
        return None
    embedding = model.base_model.rotary_emb
    if not isinstance(embedding, Angles):
        return model.base_model.layers[0].attention.rotary_ndims
    first = (rotations(embedding.scheme.encoding) or (None,))[0]
    return first.features if isinstance(first, Rotary) else None


def _rows(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Views ``[h d ...]`` of the rows of parameters that make queries or keys, and their names; gains of norms ``[d]``."""
    features = head_dim(model.config)
    for name, tensor in state.items():
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj"):
            yield name, tensor.view(-1, features, *tensor.shape[1:])
        elif part == "query_key_value":
            own = tensor.view(-1, 3, features, *tensor.shape[1:])
            yield name, own[:, 0]
            yield name, own[:, 1]
        elif part in ("q_norm", "k_norm"):
            yield name, tensor


def _converted(rows: Tensor, to: Literal["interleaved", "half"], width: int | None) -> Tensor:
    """Rows ``[h d ...]``, or a gain ``[d]``, in another layout of the first `width` of d features."""
    heads = 1 if rows.ndim == 1 else len(rows)
    flat = rows.reshape(heads * rows.shape[min(1, rows.ndim - 1)], -1)
    return checkpoint.convert_layout(flat, heads, to=to, rotary_dim=width).reshape(rows.shape)


def _linear(weight: Tensor) -> nn.Linear:
    """A projection with a copy of a weight ``[n m]``, or of a bias ``[n]``, as `isopos.nn.absorb` takes it."""
    layer = nn.Linear(1 if weight.ndim == 1 else weight.shape[1], len(weight), bias=False, device=weight.device)
    layer.weight = nn.Parameter(weight.detach().clone().view(len(weight), -1))
    return layer
