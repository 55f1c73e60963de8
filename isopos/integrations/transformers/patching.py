"""A scheme in a model of transformers, in place of the positions that it has, and out of it again."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from isopos.encodings import Encoding
from isopos.integrations.transformers import attention
from isopos.integrations.transformers.places import ATTENTION, Angles, Digits, rotations
from isopos.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["patch", "patched", "unpatch"]

Model = TypeVar("Model", bound="PreTrainedModel")
LEAST = 5  # version of transformers
CHANGES = "_isopos_changes"  # the attribute of a patched model that knows what was there before
ABSENT = ...  # one object, also in copies


class Decoders(NamedTuple):
    """Where models of a family keep what is to be replaced.

    Args:
        attention: The attribute of a layer.
        partial: Of `Angles`.
    """

    attention: str = "self_attn"
    partial: bool = False


FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma"), Decoders()),
    "gpt_neox": Decoders("attention", partial=True),
}
"""By ``config.model_type``."""


class Change(NamedTuple):
    """An attribute, and what it was before, `ABSENT` for none, or is to be."""

    owner: Any
    name: str
    value: Any

    def made(self) -> "Change":
        """Make it; the change that undoes it."""
        before = Change(self.owner, self.name, getattr(self.owner, self.name, ABSENT))
        if self.value is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.value)
        return before


def patch(model: Model, scheme: Scheme) -> Model:
    """Give a model of transformers the scheme in place of its rotary embedding, and return the model, changed in place.

    A scheme that rotates pairs of features, all heads alike, gives cosines and sines to the model's own code: keys are
    cached rotated, and sdpa, flash, flex and compilers serve as before. Which features are pairs is the model's choice,
    whatever the scheme's layout: ``isopos.rope(d, base=theta, attention="softmax")`` is what a checkpoint of Llama had.
    Every other scheme goes through an attention of ours, to which any cache that does not round gives keys as they are,
    with their positions behind them (4 numbers a key and head); it maps all keys at each step.

    The scheme becomes a part of the model: what it learns is among ``model.parameters()``.

    Args:
        model: Of a family in `FAMILIES`, with any head: Llama, Qwen 2 and 3, Mistral, Gemma, GPT-NeoX.
        scheme: For softmax attention and the model's head size, and for one head, its heads of keys, or those of queries.

    Raises:
        ImportError: For transformers before version 5.
        TypeError: For what is no model of transformers, or no scheme.
        ValueError: For a model of another family or that has a scheme already, and for a scheme that it cannot take: one
            of linear attention, of positions that are no places in a sequence, that lifts or widens heads, that adds
            to embeddings, or that has class tokens. The model is as it was.

    Example:
        >>> import isopos
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> model = LlamaForCausalLM(LlamaConfig())  # doctest: +SKIP
        >>> _ = patch(model, isopos.alibi(128, 32, attention="softmax"))  # doctest: +SKIP
    """
    changes = _changes(model, scheme)
    done: list[Change] = []
    try:
        for change in changes:
            done.append(change.made())
        setattr(model, CHANGES, done)
    except BaseException:
        _undo(done)
        raise
    return model


def unpatch(model: Model) -> Model:
    """Give a model back what `patch` replaced, and return it; a model without a scheme stays as it is."""
    _undo(vars(model).pop(CHANGES, []))
    return model


@contextmanager
def patched(model: Model, scheme: Scheme) -> Iterator[Model]:
    """``with patched(model, scheme):`` patches the model, and unpatches it however the block ends."""
    patch(model, scheme)
    try:
        yield model
    finally:
        unpatch(model)


def _undo(done: list[Change]) -> None:
    while done:
        done.pop().made()


def _changes(model: Any, scheme: Any) -> list[Change]:
    """What is to be changed, after all checks."""
    base, family = _base(model)
    if not isinstance(scheme, Scheme):
        raise TypeError(
            f"scheme: expected an isopos.Scheme, got {type(scheme).__name__}; isopos.rope(...) and others make one"
        )
    if CHANGES in vars(model):
        raise ValueError("model: expected one without a scheme of isopos, got one that has it; unpatch(model) first")
    layers = [getattr(layer, family.attention) for layer in base.layers]
    config, heads = base.config, base.config.num_attention_heads
    _check_scheme(scheme, _head_dim(config), (heads, getattr(config, "num_key_value_heads", None) or heads))
    scheme.to(base.device)
    if scheme.decay is scheme.bias is scheme.locality is scheme.scale is None and rotations(scheme.encoding) is not None:
        return [Change(base, "rotary_emb", Angles(scheme, partial=family.partial).train(base.training))]
    attention.register()
    owns = [Change(layer, attention.OWN, (scheme,)) for layer in layers]
    return [
        *owns,
        Change(base, "rotary_emb", Digits(scheme, config).train(base.training)),
        Change(config, "_attn_implementation", ATTENTION),
    ]


def _base(model: Any) -> tuple[Any, Decoders]:
    """The model without its head, and its family; an error where it has none."""
    version = importlib.metadata.version("transformers")
    if int(version.partition(".")[0]) < LEAST:
        raise ImportError(f"transformers: expected version {LEAST} or later, got {version}; pip install -U 'isopos[hf]'")
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    if model.config.model_type not in FAMILIES:
        raise ValueError(f"model: expected one of {', '.join(FAMILIES)}, got {model.config.model_type}")
    return model.base_model, FAMILIES[model.config.model_type]


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_scheme(scheme: Scheme, head_dim: int, heads: tuple[int, int]) -> None:
    """ValueError for a scheme that a decoder cannot take, with heads of queries and of keys."""
    encoding, group = scheme.encoding, scheme.group
    if scheme.attention != "softmax":
        raise ValueError("scheme: expected attention='softmax', which the model has, got linear; build it with that option")
    if group.columns != 1 or group.refers_to_rows:
        raise ValueError(f"scheme: expected positions on a line or ring, for the model's position_ids, got {group}")
    if scheme.embedding is not None:
        raise ValueError("scheme: expected one that acts in attention, got one that adds to embeddings of tokens")
    if scheme.outside:
        raise ValueError(f"scheme: expected none with class tokens in a decoder, got outside={scheme.outside}")
    if scheme.width != 1 or encoding.features != head_dim:
        raise ValueError(
            f"scheme: expected one for the model's head size of {head_dim}, got {encoding.features // scheme.width}"
            + f" and projections {scheme.width} times as wide" * (scheme.width != 1)
        )
    if isinstance(encoding, Encoding) and encoding.out_features != head_dim:
        raise ValueError(
            f"scheme: expected one that keeps the model's head size of {head_dim}, got a lift to {encoding.out_features}"
        )
    if scheme.heads not in (1, *heads):
        raise ValueError(f"scheme: expected one for {heads[0]} heads of queries or {heads[1]} of keys, got {scheme.heads}")
