"""Replace the positions of a model of transformers by a scheme, and undo it."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from isopos.integrations.transformers import attention, saving, structures
from isopos.integrations.transformers.structures import CHANGES, Change, Hook
from isopos.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound="PreTrainedModel")


def patch(model: Model, scheme: Scheme | Mapping[str, Scheme] | None = None, *, window: int | None = None) -> Model:
    """Replace the positions of a model of transformers by a scheme, in place, and return the model.

    A scheme that rotates pairs of features, the same in all heads, supplies cosines and sines to the model's code. Keys are
    cached rotated, and sdpa, flash, flex and compilers work as before. The model's code decides which features form a pair,
    whatever the scheme's layout: ``isopos.rope(d, base=theta, attention="softmax")`` is the scheme of a Llama checkpoint,
    and `rotary_scheme` reads the scheme of any model. Every other scheme uses our attention. Its keys are cached unmapped,
    with their positions as additional features (4 numbers for each key, head and coordinate), in any cache that does not
    round; all keys are mapped at each step. A forward pass evaluates a scheme once for all layers. Layers without positions
    stay without them.

    Learned vectors of positions (GPT-2, BERT, ViT) become zeros, or the vectors that the scheme adds. ViT's patches are on a
    grid that starts at (1, 1), for any size of image, or row by row on a line; class tokens and registers are at the origin.
    RoFormer, Falcon and attention over patches take only schemes that rotate pairs; Falcon also takes a decay.

    A scheme of linear attention needs a causal decoder, rotary or with learned vectors, whose layers see all earlier keys.
    Its cache has constant size: a state per layer (`StateLayer`) in a DynamicCache. Weights that were trained with softmax
    attention then need more training: `isopos convert`. Dropout of attention weights does not apply.

    The scheme becomes a part of the model: ``model.parameters()`` has its parameters. While patched, the model has a copy of
    its configuration, in which ``model.config.isopos`` holds the scheme's name, options, seed and fingerprint.
    ``save_pretrained`` saves them; `load` and ``patch(AutoModel....from_pretrained(folder))`` read them. Without isopos,
    transformers refuses such a folder, since it does not know the name of the attention, unless the caller names another
    one: then the model has its own positions. A part that is patched by itself, as the vision tower of a model, is saved
    by its own ``save_pretrained`` only, not by that of the whole model.

    Args:
        model: A model with a rotary module or a table of positions, with any head. In a model of text and images the text
            part is patched; the image part can be patched separately.
        scheme: A scheme for the model's head size, with one head, its number of key heads, or its number of query heads.
            A mapping has one scheme for each type of layers with separate frequencies. None takes the scheme from the
            configuration of a loaded model and loads its learned values.
        window: Number of nearest keys that softmax attention sees in addition to linear attention, in a learned share per
            layer and query head, initially one half (`isopos.integrations.transformers.linear.Window`). The cache then
            also holds these keys.

    Raises:
        ImportError: For transformers before version 5.
        TypeError: For an object that is not a model of transformers, or not a scheme.
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
            saving.load_parameters(model, [name for name in model.state_dict() if name not in before])
        setattr(model.base_model, CHANGES, done)
    except BaseException:
        _undo(done)
        raise
    return model


def load(folder: Any, cls: Any = None, **options: Any) -> Any:
    """Load a patched model from ``save_pretrained(folder)``, with its scheme and the scheme's learned values.

    Args:
        folder: Path of the folder.
        cls: The model's class, or one of transformers' Auto classes; by default the class that was saved.
        options: Further arguments of ``from_pretrained``.

    Raises:
        ValueError: If there is no such folder, or its model has no scheme.
    """
    import transformers

    if not Path(folder).is_dir():
        raise ValueError(f"folder: expected the folder of a patched model, got {folder}, which does not exist")
    attention.register_attention()
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    if not isinstance(getattr(config, saving.ENTRY, None), dict):
        raise ValueError(f"folder: expected a patched model, whose configuration names its scheme, got {config.model_type}")
    mapping = getattr(cls, "_model_mapping", None)  # of an Auto class
    cls = mapping[type(config)] if mapping is not None else cls or saving.class_named(config.architectures[0], config)
    ignored = [*(cls._keys_to_ignore_on_load_unexpected or ()), saving.VALUES]  # the scheme's values, which no class lists
    silent = type(cls.__name__, (cls,), {"_keys_to_ignore_on_load_unexpected": ignored, "__module__": cls.__module__})
    loaded: Any = silent.from_pretrained(folder, **{"attn_implementation": None} | options)  # no class lists our attention
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = cls
    patch(model)
    return loaded


def unpatch(model: Model) -> Model:
    """Undo `patch` and return the model, whose configuration names no scheme; one without a scheme is not changed.

    Tables of positions come back with the dtype and device that the model has now, and the configuration with what was
    changed in it since, for instance by ``resize_token_embeddings``.
    """
    if CHANGES in vars(model.base_model):
        _restore(model)
        vars(model.config).pop(saving.ENTRY, None)
    return model


@contextmanager
def patched(
    model: Model, scheme: Scheme | Mapping[str, Scheme] | None = None, *, window: int | None = None
) -> Iterator[Model]:
    """Context manager that patches a model and unpatches it at the end of the block, also after an exception."""
    patch(model, scheme, window=window)
    try:
        yield model
    finally:
        _restore(model)


def _restore(model: Any) -> None:
    """Undo the changes of a patch, except for what the caller has changed since."""
    done: list[Change | Hook] = vars(model.base_model).pop(CHANGES, [])
    for change in done:
        if isinstance(change, Change) and change.name == "config":
            saving.keep_changes(change.owner.config, change.value)
        elif isinstance(change, Change) and isinstance(change.value, nn.Module | nn.Parameter):
            structures.follow(change)
    _undo(done)


def _undo(done: list[Change | Hook]) -> None:
    while done:
        done.pop().made()


def _changes(model: Any, scheme: Any, entry: Any, window: int | None) -> list[Change | Hook]:
    """All changes that a patch makes, after all checks."""
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
    memo: dict[int, Any] = {}  # parts shared by configurations stay shared in their copies
    configs = {id(config): copy.deepcopy(config, memo) for _, config in having}
    for config in configs.values():
        if getattr(config, "_attn_implementation", None) == attention.ATTENTION:  # as it was saved
            config._attn_implementation = model.get_correct_attn_implementation(None)
    changes = structures.changes(model, scheme, configs, window)
    saving.tell(configs[id(model.config)], scheme, window)
    for change in changes:
        if isinstance(change, Change) and isinstance(change.value, nn.Module):
            change.value.train(model.training).to(model.device)
    configurations = [Change(module, "config", configs[id(config)]) for module, config in having]
    return [*configurations, *changes, Change(model, "save_pretrained", partial(saving.save, model, scheme, window))]


def _check_model(model: Any) -> None:
    """Raise an error for an object that is not a model of transformers 5, or has a scheme."""
    attention.register_attention()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    if CHANGES in vars(model.base_model):
        raise ValueError("model: expected one without a scheme of isopos, got one that has it; unpatch(model) first")
