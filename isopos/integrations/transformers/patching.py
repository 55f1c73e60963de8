"""A scheme in a model of transformers, in place of the positions that it has, and out of it again."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from isopos.integrations.transformers import attention, saving, structures
from isopos.integrations.transformers.structures import Change, Hook
from isopos.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load", "patch", "patched", "unpatch"]

Model = TypeVar("Model", bound="PreTrainedModel")
CHANGES = "_isopos_changes"  # the attribute of a patched model, without its head, that knows what was there before


def patch(model: Model, scheme: Scheme | Mapping[str, Scheme] | None = None, *, window: int | None = None) -> Model:
    """Give a model of transformers the scheme in place of the positions it has, and return the model, changed in place.

    A scheme that rotates pairs of features, all heads alike, gives cosines and sines to the model's own code: keys are
    cached rotated, and sdpa, flash, flex and compilers serve as before. Which features are pairs is the model's choice,
    whatever the scheme's layout: ``isopos.rope(d, base=theta, attention="softmax")`` is what a checkpoint of Llama had, and
    `rotary_scheme` reads it from any model. Every other scheme goes through an attention of ours. Any cache that does not
    round gives it keys as they are, with their positions behind them (4 numbers for each key, head and coordinate); it maps
    all keys at each step. A forward evaluates either once, for all layers. Layers without positions stay without.

    Learned vectors of positions (GPT-2, BERT, ViT) become zeros, or the vectors that the scheme adds. ViT's patches are on a
    grid from (1, 1) on, for any size of image, or row by row on a line, and its class token is at the origin. RoFormer and
    Falcon, whose code has no other attention, and attention over patches take what rotates pairs. Falcon takes a decay, too.

    A scheme of linear attention goes into a causal decoder, rotary or with learned vectors, whose layers see all keys before
    a query. Its cache is of constant size: a state per layer (`StateLayer`), in a DynamicCache. Weights that were trained
    with softmax attention need training then: `isopos convert`. It forms no weights that the model's dropout could drop.

    The scheme becomes a part of the model: what it learns is among ``model.parameters()``. The model has a configuration of
    its own while it is in, ``model.config.isopos`` naming it, its options, a seed among them, and its fingerprint.
    ``save_pretrained`` keeps all that, `load` and ``patch(AutoModel....from_pretrained(folder))`` read it. Without isopos,
    transformers stops at an unknown attention of that name.

    Args:
        model: A model with a rotary module or a table of positions, with any head. A model of text and images has its text
            patched; its part for images can be patched by itself.
        scheme: For the model's head size, and for one head, its heads of keys, or those of queries.
            A mapping gives one scheme for each type of layers that has frequencies of its own. None is the scheme of the
            configuration of a model that was loaded, whose learned values are loaded, too.
        window: Beside linear attention, softmax attention to so many nearest keys, in a learned share per layer and head of
            queries, one half at first (`isopos.integrations.transformers.linear.Window`). Its keys are in the cache, too.

    Raises:
        ImportError: For transformers before version 5.
        TypeError: For what is no model of transformers, or no scheme.
        ValueError: With the reason, for a model that cannot be served or has a scheme already, and for a scheme that it
            cannot take: one of positions that the model does not have, that widens heads, or lifts them for softmax, that
            adds to embeddings where the model adds none, that the model's attention cannot compute, or that has another
            fingerprint or window than the configuration says. The model is as it was.

    Examples:
        >>> import isopos
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> model = LlamaForCausalLM(LlamaConfig())  # doctest: +SKIP
        >>> _ = patch(model, isopos.alibi(128, 32, attention="softmax"))  # doctest: +SKIP
    """
    _check_model(model)
    entry = getattr(model.config, saving.ENTRY, None)
    changes, before = _changes(model, scheme, entry, window), {*model.state_dict()}
    done: list[Change | Hook] = []
    try:
        for change in changes:
            done.append(change.made())
        if entry is not None:
            saving.load_values(model, [name for name in model.state_dict() if name not in before])
        setattr(model.base_model, CHANGES, done)
    except BaseException:
        _undo(done)
        raise
    return model


def load(folder: Any, cls: Any = None, **options: Any) -> Any:
    """The patched model that ``save_pretrained(folder)`` wrote, with its scheme and what that had learned.

    Args:
        folder: A path.
        cls: The model's class, or one of transformers' Auto classes; by default that which was saved.
        options: Of its ``from_pretrained``.
    """
    import transformers

    attention.register()
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    if not isinstance(getattr(config, saving.ENTRY, None), dict):
        raise ValueError(f"folder: expected a patched model, whose configuration names its scheme, got {config.model_type}")
    known = getattr(cls, "_model_mapping", None)  # of an Auto class
    cls = known[type(config)] if known is not None else cls or saving.class_named(config.architectures[0], config)
    ignored = [*(cls._keys_to_ignore_on_load_unexpected or ()), saving.VALUES]  # the scheme has them, whom no class knows
    silent = type(cls.__name__, (cls,), {"_keys_to_ignore_on_load_unexpected": ignored, "__module__": cls.__module__})
    found: Any = silent.from_pretrained(folder, **{"attn_implementation": None} | options)  # ours is in no class's own list
    model = found[0] if isinstance(found, tuple) else found
    model.__class__ = cls
    patch(model)
    return found


def unpatch(model: Model) -> Model:
    """Give a model back what `patch` replaced, and return it; a model without a scheme stays as it is."""
    _undo(vars(model.base_model).pop(CHANGES, []))
    return model


@contextmanager
def patched(
    model: Model, scheme: Scheme | Mapping[str, Scheme] | None = None, *, window: int | None = None
) -> Iterator[Model]:
    """``with patched(model, scheme):`` patches the model, and unpatches it however the block ends."""
    patch(model, scheme, window=window)
    try:
        yield model
    finally:
        unpatch(model)


def _undo(done: list[Change | Hook]) -> None:
    while done:
        done.pop().made()


def _changes(model: Any, scheme: Any, entry: Any, window: int | None) -> list[Change | Hook]:
    """What is to be changed, after all checks."""
    if scheme is None:
        scheme = saving.rebuilt(entry)
    for one in scheme.values() if isinstance(scheme, Mapping) else [scheme]:
        if not isinstance(one, Scheme):
            raise TypeError(f"scheme: expected an isopos.Scheme, got {type(one).__name__}; isopos.rope(...) is one")
    if entry is not None:
        saving.expect_same(scheme, entry)
        if window not in (None, entry.get("window")):
            raise ValueError(f"window: expected that of the checkpoint, {entry.get('window')}, got {window}")
        window = entry.get("window")
    having = [(module, vars(module)["config"]) for module in model.modules() if "config" in vars(module)]
    memo: dict[int, Any] = {}  # what configurations share, their copies share
    configs = {id(config): copy.deepcopy(config, memo) for _, config in having}
    for config in configs.values():
        if getattr(config, "_attn_implementation", None) == attention.ATTENTION:  # as it was saved
            config._attn_implementation = model.get_correct_attn_implementation(None)
    changes = structures.changes(model, scheme, configs, window)
    saving.tell(configs[id(model.config)], scheme, window)
    for change in changes:
        if isinstance(change, Change) and isinstance(change.value, nn.Module):
            change.value.train(model.training).to(model.device)
    own = [Change(module, "config", configs[id(config)]) for module, config in having]
    return [*own, *changes, Change(model, "save_pretrained", partial(saving.save, model, scheme, window))]


def _check_model(model: Any) -> None:
    """An error for what is no model of transformers 5, or has a scheme."""
    attention.register()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    if CHANGES in vars(model.base_model):
        raise ValueError("model: expected one without a scheme of isopos, got one that has it; unpatch(model) first")
