"""From softmax to linear attention: attention transfer in models of transformers.

`converted` returns a copy of a model with a scheme of linear attention. `distances` is the loss of attention transfer: per
layer, the distance between the outputs of both models' attention. `isopos convert` minimises it and then trains on the next
token.
"""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from isopos.integrations.transformers import reading
from isopos.integrations.transformers.arguments import WINDOW
from isopos.integrations.transformers.native import rotary_scheme
from isopos.integrations.transformers.patching import patch
from isopos.scheme import Scheme
from isopos.schemes import build
from isopos.schemes.registry import REGISTRY, options_of

KEEP = "keep"
"""The name that stands for the positions that a model has."""


def linear_scheme(model: Any, name: str = KEEP, options: Mapping[str, object] | None = None) -> Scheme:
    """Build a scheme of linear attention for a model, by name.

    Args:
        model: A model of transformers that is not patched.
        name: A name of `REGISTRY`, or "keep" for the positions that the model has: its rotary frequencies and extension,
            or its table of learned vectors, which is copied into the scheme.
        options: Options by name, as values or text: a decay, a feature map, a denominator, and options of the named scheme.

    Raises:
        ValueError: For an unknown name or option, for softmax attention, and for positions that "keep" cannot read.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> linear_scheme(LlamaForCausalLM(LlamaConfig()), "keep", {"decay": "retnet"}).origin[0]  # doctest: +SKIP
        'rope'
    """
    options, config = dict(options or {}), reading.text_part(model).config
    if options.get("attention", "linear") != "linear":
        raise ValueError(f"attention: expected linear, to which softmax attention is converted, got {options['attention']}")
    options["attention"] = "linear"
    features, heads = reading.head_dim(config), reading.head_counts(config)[1]
    if name != KEEP:
        return build(name, features, heads, options)
    if reading.rotary_module(model) is None:
        return _with_table(model, features, heads, options)
    native = rotary_scheme(model)
    if not isinstance(native, Scheme):
        raise ValueError(f"scheme: expected a model with one scheme to keep, got one for each of {', '.join(native)}")
    assert native.origin is not None
    name, arguments = native.origin
    kept = {key: value for key, value in arguments.items() if key in options_of(name) and key != "attention"}
    if taken := [key for key in options if key in kept and key not in ("decay", "feature_map", "denominator")]:
        raise ValueError(f"{taken[0]}: expected none with keep, since the model determines it, got {options[taken[0]]}")
    chosen = build(name, features, heads, options).origin  # checks and parses the options
    assert chosen is not None
    values = {key: value for key, value in chosen[1].items() if key in options}
    scheme = REGISTRY[name](**kept | values | {"head_dim": features, "heads": heads})
    return scheme if native.extension is None else scheme.extend(**native.extension.arguments)


def _with_table(model: Any, features: int, heads: int, options: Mapping[str, object]) -> Scheme:
    """A scheme that adds a copy of the vectors of a model's table of positions."""
    position_table = next(reading.added_tables(reading.text_part(model)), None)
    if position_table is None or not isinstance(position_table[2], nn.Embedding):
        raise ValueError("scheme: expected a model with rotary positions or a table of them to keep, got one without")
    table = position_table[2].weight
    scheme = build("learned", features, heads, {**options, "length": len(table), "model_dim": table.shape[1]})
    embedding: Any = scheme.embedding
    with torch.no_grad():
        embedding.weight.copy_(table)
    return scheme


def converted(model: Any, scheme: Scheme, window: int | None = None) -> Any:
    """A copy of a model, patched with a scheme of linear attention. Weights keep their values; see `patch`.

    Raises:
        ValueError: For softmax attention, and if `patch` refuses the scheme or the window.
    """
    if scheme.attention != "linear":
        raise ValueError("scheme: expected one of linear attention, to which a model is converted, got softmax")
    return patch(copy.deepcopy(model), scheme, window=window)


def transferred(student: Any) -> list[nn.Parameter]:
    """Parameters that attention transfer trains: those of attention layers, windows, and schemes within attention."""
    part = reading.text_part(student)
    layers = reading.attention_layers(part)
    weights = [weight for layer in layers for weight in layer.parameters()]
    schemes = [module for module in part.modules() if isinstance(module, Scheme)]
    window = getattr(part, WINDOW, None)
    weights += [weight for module in (*schemes, *([] if window is None else [window])) for weight in module.parameters()]
    added = {weight for scheme in schemes if scheme.embedding is not None for weight in scheme.embedding.parameters()}
    return [weight for weight in dict.fromkeys(weights) if weight not in added]


def distances(teacher: Any, student: Any, tokens: Tensor) -> Tensor:
    """Distances between the attention layers of two models ``[layers]``: |y - z|^2 / |z|^2 over all tokens.

    z is the output of the teacher's layer, and y the output of the student's layer for the teacher's input. A layer's
    distance thus does not depend on other layers: its gradient reaches the parameters of this layer and parameters that
    layers share. One backward pass of the sum trains each layer as if it were alone.

    Args:
        teacher: The model with softmax attention.
        student: The result of `converted` for the teacher.
        tokens: ``[b t]``, int64.

    Examples:
        >>> import isopos
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> model = LlamaForCausalLM(LlamaConfig())  # doctest: +SKIP
        >>> student = converted(model, linear_scheme(model, "keep", {"decay": "retnet"}))  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(transferred(student))  # doctest: +SKIP
        >>> distances(model, student, torch.randint(32000, (2, 64))).sum().backward()  # doctest: +SKIP
    """
    inputs, outputs, distance = [], [], []

    def keep(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(_first(output))

    def replace(layer: Any, args: Any, kwargs: Any) -> Any:
        hidden = inputs[len(distance)]
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def compare(layer: Any, args: Any, output: Any) -> Any:
        target = outputs[len(distance)].float()
        distance.append((_first(output).float() - target).square().sum() / target.square().sum())
        target = outputs[len(distance) - 1]
        return (target, *output[1:]) if isinstance(output, tuple) else target

    of_teacher, of_student = (reading.attention_layers(reading.text_part(model)) for model in (teacher, student))
    with ExitStack() as hooks:
        for layer in of_teacher:
            hooks.callback(layer.register_forward_hook(keep, with_kwargs=True).remove)
        with torch.no_grad():
            teacher.base_model(tokens, use_cache=False)
        for layer in of_student:
            hooks.callback(layer.register_forward_pre_hook(replace, with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(compare).remove)
        student.base_model(tokens, use_cache=False)
    return torch.stack(distance)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
