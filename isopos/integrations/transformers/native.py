"""The scheme of the rotary positions that a model of transformers already has."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isopos.audit import declared
from isopos.integrations.transformers.reading import head_dim, rotary_module
from isopos.integrations.transformers.rotary import Angles, RotaryTables, measured
from isopos.scheme import Scheme
from isopos.schemes import REGISTRY

EQUAL = 1e-5  # of cosines and sines at positions below 100, which are float32


def rotary_scheme(model: Any) -> Any:
    """The scheme of a model's rotary positions. `patch` with this scheme changes outputs by rounding only.

    Frequencies, the number of rotated features and the extension to long sequences are read from the configuration and
    compared with the tables of a new rotary module. Changes of this model's own module are not
    seen, as the rounding of frequencies by ``model.to(torch.bfloat16)``: with the scheme the model has those of its
    configuration again.

    Args:
        model: A model of transformers with one rotary module that is not patched.

    Returns:
        A scheme for softmax attention, or one scheme per type of layers if these have separate frequencies.

    Raises:
        ValueError: For another model, and for frequencies that depend on the length of a call (dynamic, longrope), or that
            no scheme has.

    Examples:
        >>> from transformers import GPTNeoXConfig, GPTNeoXModel  # doctest: +SKIP
        >>> rotary_scheme(GPTNeoXModel(GPTNeoXConfig())).origin  # doctest: +SKIP
        ('rope', {'head_dim': 64, 'base': 10000, 'rotary_dim': 16, 'layout': 'half', 'attention': 'softmax'})
    """
    rotary = rotary_module(model)
    if rotary is None:
        raise ValueError(f"model: expected one with a rotary module, got {type(model).__name__}, which has none")
    owner, _, old = rotary
    tables, config = measured(old), owner.config
    parameters = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    if tables.layer_types:
        return {name: _scheme(old, tables, config, parameters[name], name) for name in tables.layer_types}
    return _scheme(old, tables, config, parameters, None)


def _scheme(old: Any, tables: RotaryTables, config: Any, parameters: Mapping[str, Any], layer_type: str | None) -> Scheme:
    kind = parameters.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(f"model: expected frequencies that are the same at all lengths, got rope_type {kind!r}")
    for name, options in _candidates(tables, head_dim(config), parameters):
        scheme = REGISTRY[name](attention="softmax", **options)
        rule = declared.rule(parameters, getattr(config, "max_position_embeddings", None)) if kind != "axial" else None
        if rule is not None:
            scheme.extend(**rule.arguments)
        if _agree(old, tables, scheme, layer_type):
            return scheme
    raise ValueError(f"model: expected rotary tables of a scheme of isopos, got others (rope_type {kind!r})")


def _candidates(tables: RotaryTables, features: int, parameters: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of schemes that could be a model's."""
    options = {"head_dim": features, "base": parameters["rope_theta"]}
    if tables.columns == 2:
        return [("rope-axial", options)]
    options["layout"] = "half" if tables.halves else "interleaved"
    if tables.columns == 3:
        several = options | {"sections": list(parameters["mrope_section"])}
        return [("mrope", several | {"interleaved": interleaved}) for interleaved in (False, True)]
    part = {"rotary_dim": 2 * tables.pairs} if 2 * tables.pairs < features else {}
    return [("rope", options | part), ("p-rope", options | {"p": parameters.get("partial_rotary_factor", 1.0)})]


@torch.no_grad()
def _agree(old: Any, tables: RotaryTables, scheme: Scheme, layer_type: str | None) -> bool:
    """Whether a scheme has the tables of a rotary module, which is built again on the CPU."""
    if not tables.take(scheme):
        return False
    with torch.device("cpu"):
        probe, options = type(old)(old.config).eval(), {} if layer_type is None else {"layer_type": layer_type}
        if tables.patch is not None:
            inputs = [torch.zeros(1, 3, *(3 * size for size in tables.patch))]
        else:
            shape = {1: (1, 2), 2: (1, 2), 3: (3, 1, 2)}[tables.columns]
            inputs = [torch.zeros(1, 1, 1), torch.tensor([3, 14, 15, 92, 65, 35])[: torch.Size(shape).numel()].view(shape)]
        expected, actual = (_flat(module(*inputs, **options)) for module in (probe, Angles(scheme, tables)))
    return expected.shape == actual.shape and bool((actual - expected).abs().max() <= EQUAL)


def _flat(tables: Any) -> Tensor:
    return torch.view_as_real(tables) if isinstance(tables, Tensor) else torch.stack(tables)
