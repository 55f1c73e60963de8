"""Facts read from a model of transformers: its modules of positions, its sizes, and its attention layers."""

import dis
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from isopos.integrations.transformers.rotary import rotary_modules

TABLES = ("wpe", "position_embeddings", "position_embedding")
SIZES = ("head_dim", "qk_head_dim", "v_head_dim")  # attributes of attention layers
ROTATES = "scheme: expected one that rotates pairs of features, all heads alike, since "
AHEAD = {"cls_token", "distillation_token", "register_tokens"}  # tokens of a ViT ahead of its patches


def text_part(model: Any) -> Any:
    """The part of a model that reads text, without its head."""
    return getattr(model.base_model, "language_model", model.base_model)


def rotary_module(model: Any) -> tuple[Any, str, Any] | None:
    """The rotary module of a model, with its parent and its name there; None for a model without one.

    Raises:
        ValueError: For a model with several rotary modules.
    """
    modules = [*rotary_modules(text_part(model))] or [*rotary_modules(model)]  # the base of DINOv3's model has none
    if len(modules) > 1:
        names = ", ".join(f"{type(owner).__name__}.{name}" for owner, name, _ in modules)
        raise ValueError(f"model: expected one rotary module for all layers, got {names}; patch the part that has one")
    return modules[0] if modules else None


def added_tables(part: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Tables of positions in a model or in its embeddings, with their owners and names."""
    for owner in (part, getattr(part, "embeddings", None)):
        for name in TABLES:
            table = getattr(owner, name, None)
            patches = isinstance(table, nn.Parameter) and hasattr(owner, "patch_embeddings")
            if type(table) is nn.Embedding or patches:
                yield owner, name, table


def head_dim(config: Any) -> int:
    """Features of a head."""
    width = getattr(config, "embed_dim", None) or config.hidden_size
    return getattr(config, "head_dim", None) or width // head_counts(config)[0]


def head_counts(config: Any) -> tuple[int, int]:
    """Numbers of heads of queries and of keys."""
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def attention_layers(owner: nn.Module) -> list[Any]:
    """Attention layers that can use our attention.

    Raises:
        ValueError: If there are none, or if the model does not pass on the arguments that our attention needs.
    """
    layers = [(name, a) for name, a in owner.named_modules() if _calls(a, "ALL_ATTENTION_FUNCTIONS")]
    if not layers:
        raise ValueError(f"{ROTATES}the attention of {type(owner).__name__} is its own code, not transformers' interface")
    for name, layer in layers:
        parts = name.split(".")
        path = [owner.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]
        for module in path:
            if not isinstance(module, nn.ModuleList | nn.ModuleDict) and not _passes_on(module):
                raise ValueError(f"{ROTATES}{type(module).__name__} passes no further arguments to attention")
        for option, reason in (("attn_logit_softcapping", "caps its logits"), ("sinks", "has sinks")):
            if getattr(layer, option, None) is not None:
                raise ValueError(f"{ROTATES}{type(layer).__name__} {reason} ({option}), which our attention does not")
    return [layer for _, layer in layers]


def _passes_on(module: nn.Module) -> bool:
    """Whether a module's forward takes further arguments by name and uses them; True for code that is not Python's."""
    if _code(module) is None:
        return True
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    names = [a.name for a in parameters if a.kind == inspect.Parameter.VAR_KEYWORD]
    return bool(names) and _loads(module, names[0]) > 0


def attends_twice(layer: nn.Module) -> bool:
    """Whether a layer's code names transformers' attention function several times, as differential attention does."""
    return _loads(layer, "attention_interface") > 1


def _loads(module: nn.Module, name: str) -> int:
    """How often the code of a module's forward loads a local variable."""
    count = 0
    for step in dis.get_instructions(_code(module)) if _code(module) else ():
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # from Python 3.13 on two in one step
        kinds = [kind for kind in step.opname.split("_") if kind in ("LOAD", "STORE")]
        count += sum(kind == "LOAD" and one == name for kind, one in zip(kinds, names, strict=False))
    return count


def _code(module: nn.Module) -> Any:
    """The code of a module's forward; None if it is not Python's."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def tokens_ahead(embeddings: Any) -> int:
    """Number of class and register tokens ahead of a ViT's patches.

    Raises:
        ValueError: For other additional tokens, for patches of videos or spectrograms, and if some patches are left out.
    """
    tokens = {name: a for name, a in embeddings.named_parameters(recurse=False) if "token" in name and name != "mask_token"}
    others = [*({*tokens} - AHEAD), *["noise, by which patches are left out"] * takes(embeddings, "noise")]
    if others or not hasattr(embeddings.patch_embeddings, "patch_size"):
        raise ValueError(
            "model: expected class tokens and registers, then all patches of an image, got "
            + (", ".join(others) or type(embeddings.patch_embeddings).__name__)
        )
    return sum(a.shape[-2] for a in tokens.values())


def biased_layers(owner: nn.Module) -> list[Any]:
    """Attention layers with code that adds the mask to logits and supports ALiBi."""
    return [a for a in owner.modules() if _calls(a, "scaled_dot_product_attention", "softmax") and takes(a, "alibi")]


def _calls(module: nn.Module, *names: str) -> bool:
    """Whether a module's forward has a global name, or attributes of these names."""
    code = _code(module)
    return code is not None and all(name in code.co_names for name in names)


def takes(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has an argument of this name."""
    return name in inspect.signature(module.forward).parameters


def cache_name(layer: nn.Module) -> str | None:
    """Name of the cache argument of an attention layer."""
    return next((name for name in ("past_key_values", "layer_past") if takes(layer, name)), None)


class _Touched(Exception):
    """Signal that an attention layer used the tables of positions."""


class _Passed(Exception):
    """Signal that an attention layer added its keys to a cache."""


class _Wire:
    """Tables of positions that raise `_Touched` when they are used."""

    def __getattr__(self, name: str) -> Any:
        raise _Touched

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _Touched


class _End:
    """A cache that raises `_Passed` when keys are added."""

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise _Passed


@torch.no_grad()
def uses_tables(layer: Any, config: Any) -> bool:
    """Whether an attention layer uses its tables of positions, measured by a call on one token that ends at its cache.

    A layer without a cache counts as using them.
    """
    cache = cache_name(layer)
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
