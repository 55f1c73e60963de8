"""Models of transformers over a group of processes; each process has a shard of every sequence."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from isopos.integrations.transformers import attention, reading
from isopos.parallel import Ring, cut, shards

KINDS = ("full_attention", "sliding_attention")


@contextmanager
def over(model: Any, group: Any) -> Iterator[Any]:
    """Context manager in which a model's forward pass takes one shard of a sequence over a group of processes.

    Attention over the group replaces the model's attention (sdpa, flash, ...) and keeps its scale, window and groups of
    heads. It serves models as loaded, patched models with any scheme (`patch`), and `IsoposForCausalLM`. Positions count
    over the sequence. Pass the tokens and the padding mask ``[b t]`` that `isopos.parallel.cut` returns. Pass labels from
    `cut_labels` as ``shift_labels``, since the label of a shard's last token is in another shard. DDP and FSDP average
    gradients over processes and so compute the gradient of the mean loss.

    Args:
        model: A `PreTrainedModel` with one stack of layers.
        group: A `ProcessGroup`, a `DeviceMesh` of one dimension, or an `isopos.parallel.Ring`.

    Raises:
        ValueError: With the reason, for a model that also mixes tokens outside attention; in a forward pass, for caches,
            other positions, and labels that are not shifted.
    """
    decoder: Any = getattr(model, "decoder", None)
    with ExitStack() as stack:
        if hasattr(decoder, "over"):  # IsoposForCausalLM
            part = decoder
            stack.enter_context(decoder.over(group))
        else:
            attention.register_attention()
            part = reading.text_part(model)
            _check(model, part)
            hook = partial(_with_group, group)
            stack.callback(part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
            for config in {id(a): a for module in (model, *part.modules()) if (a := vars(module).get("config"))}.values():
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = attention.OVER
        if part is not model:
            stack.callback(model.register_forward_pre_hook(_check_labels, with_kwargs=True).remove)
        yield model


def cut_labels(labels: Tensor, group: Any) -> Tensor:
    """This process's shard of shifted labels ``[b t]``: the next token of each token, -100 for the sequence's last.

    Pass them to a causal model as ``model(tokens, labels=labels, shift_labels=labels)``.
    """
    return cut(F.pad(labels[:, 1:], (0, 1), value=-100), group).contiguous()


def _check(model: Any, part: Any) -> None:
    """Raise ValueError for a model that cannot run over a group."""
    what, types = "", set(getattr(part.config, "layer_types", None) or KINDS)
    if getattr(model.config, "is_encoder_decoder", False):
        what = "one stack of layers, got an encoder and a decoder, whose tokens are of two sequences"
    elif not reading.takes(part, "position_ids"):
        what = f"a model that takes position_ids, got {type(part).__name__}"
    elif any(hasattr(module, "create_position_ids_from_input_ids") for module in part.modules()):
        what = f"positions that count from 0, got those of {type(part).__name__}, which count from its padding token on"
    elif not types <= {*KINDS}:
        what = f"layers of {' and '.join(KINDS)}, got {', '.join(sorted(types - {*KINDS}))}"
    elif any(isinstance(module, nn.Conv1d) for module in part.modules()):
        what = f"layers that mix tokens in attention alone, got convolutions in {type(part).__name__}"
    elif any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        what = "none with gradient checkpointing, which runs layers again when the group may be gone, got one"
    if not what:
        try:
            reading.attention_layers(part)
        except ValueError as error:
            what = f"attention by transformers' interface, got another: {str(error).partition('since ')[2]}"
    if what:
        raise ValueError(f"model: expected {what}")


def _with_group(group: Any, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add the positions of this process's tokens, and the group, to the arguments of a stack of layers."""
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError(
            "past_key_values: expected none over a group, whose processes keep no cache, got one; use_cache=False"
        )
    over = shards(group, tokens.shape[1], tokens.device)
    if over is None:
        return args, kwargs
    index, position_ids = over.index[None], kwargs.get("position_ids")
    if position_ids is not None and not bool((position_ids == index).all()):
        raise ValueError("position_ids: expected none over a group, which count over the sequence, got others")
    mask = kwargs.get("attention_mask")
    if mask is not None and (mask.ndim != 2 or mask.shape[1] != tokens.shape[1]):
        raise ValueError(
            f"attention_mask: expected [b {tokens.shape[1]}], of the tokens of this process, got {[*mask.shape]}"
        )
    ring = Ring(over.group, over.zigzag) if over.ring else over.group
    return args, {**kwargs, "position_ids": index, "use_cache": False, attention.GROUP: ring}


def _check_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            "labels: expected shift_labels with them over a group, since the label of the last token is in another shard, "
            "got none; isopos.integrations.transformers.cut_labels(labels, group) makes both"
        )
