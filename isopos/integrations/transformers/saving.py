"""Schemes in configurations and saved folders of transformers."""

import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isopos.integrations.transformers.attention import ATTENTION
from isopos.integrations.transformers.structures import replaced_tables
from isopos.schemes import REGISTRY, Scheme
from isopos.schemes.registry import resolve

ENTRY = "isopos"  # of a configuration
OF_PATCH = (ENTRY, "_attn_implementation", "_attn_implementation_internal", "attn_implementation")
"""Attributes of a configuration that a patch changes."""
VALUES = r"(^|\.)(scheme|isopos|isopos_window)\."
"""Names of what a scheme has learned in the state of a patched model."""


Schemes = Scheme | Mapping[str, Scheme]


def scheme_entry(scheme: Any, window: int | None = None) -> dict[str, Any]:
    """The entry of a scheme in a configuration, or one entry for each type of layers.

    An entry has the name, options with the seed, extension, fingerprint and, if any, the window. The name is None if no
    function of `REGISTRY` builds the scheme.
    """
    if window is not None:
        return scheme_entry(scheme) | {"window": window}
    if isinstance(scheme, Mapping):
        return {name: scheme_entry(one) for name, one in scheme.items()}
    rule = scheme.extension
    entry: dict[str, Any] = {"scheme": None, "options": {}, "extension": None if rule is None else rule.arguments}
    entry["fingerprint"] = scheme.fingerprint
    if scheme.origin is None:
        return entry
    name, options = scheme.origin
    try:
        options = json.loads(json.dumps(options))
    except TypeError:
        return entry  # such as a custom decay
    module = REGISTRY[name].__module__
    return entry | {"scheme": name if module.startswith("isopos.") else f"{module}.{name}", "options": options}


def rebuilt(entry: Any) -> Any:
    """Build the scheme of a configuration's entry, or one scheme for each type of layers.

    Raises:
        ValueError: Without an entry, or if the scheme has another fingerprint than the entry.
    """
    if entry is None:
        raise ValueError("scheme: expected one, since the model's configuration names none, got none; patch(model, scheme)")
    if "fingerprint" not in entry:
        return {name: rebuilt(one) for name, one in entry.items()}
    if entry["scheme"] is None:
        raise ValueError(
            "scheme: expected the one that the checkpoint was saved with, which has no name to find it by, got none; "
            "patch(model, scheme) checks that it is the same"
        )
    scheme = made(entry["scheme"], entry["options"], entry.get("extension"))
    expect_same(scheme, entry)
    return scheme


def made(name: str, options: Mapping[str, Any], extended: Mapping[str, Any] | None) -> Scheme:
    """Build a named scheme and extend it by the arguments from `Extension.arguments`."""
    scheme = REGISTRY[resolve(name)](**options)
    return scheme if extended is None else scheme.extend(**extended)


def class_named(name: str, config: Any) -> Any:
    """A class of transformers by name; some are exported only by their model's module."""
    import transformers

    home = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    return getattr(transformers, name, None) or getattr(home, name)


def save(model: Any, scheme: Schemes, window: int | None, *arguments: Any, **options: Any) -> Any:
    """``save_pretrained`` of a patched model, with its scheme as it is now, extensions and replaced tables included."""
    setattr(model.config, ENTRY, scheme_entry(scheme, window))
    given = inspect.signature(type(model).save_pretrained).bind(model, *arguments, **options)
    if tables := replaced_tables(model):
        given.arguments["state_dict"] = {**(given.arguments.get("state_dict") or model.state_dict())} | tables
    return type(model).save_pretrained(*given.args, **given.kwargs)


def keep_changes(new: Any, old: Any) -> None:
    """Write what differs in a patched model's configuration, except for the patch itself, into the one of before."""
    for name, value in vars(new).items():
        if name in OF_PATCH:
            continue
        before = getattr(old, name, None)
        if hasattr(value, "to_dict") and hasattr(before, "to_dict"):  # a part's configuration
            keep_changes(value, before)
        elif name not in vars(old) or before != value:
            setattr(old, name, value)


def expect_same(scheme: Schemes, entry: Any) -> None:
    """Raise ValueError if a scheme differs from the configuration's entry."""
    several = isinstance(scheme, Mapping)
    if several == ("fingerprint" in entry) or (several and {*scheme} != {*entry}):
        names = "one for all layers" if "fingerprint" in entry else f"one for each of {', '.join(entry)}"
        raise ValueError(
            f"scheme: expected {names}, as the checkpoint has, got another; without model.config.isopos any is taken"
        )
    if several:
        for name, one in scheme.items():
            expect_same(one, entry[name])
    elif scheme.fingerprint != entry["fingerprint"]:
        raise ValueError(
            f"scheme: expected that of the checkpoint, {entry['scheme'] or 'one without a name'} with fingerprint "
            f"{entry['fingerprint'][:12]}, got {scheme.fingerprint[:12]}; without model.config.isopos any is taken"
        )


def tell(config: Any, scheme: Schemes, window: int | None = None) -> None:
    """Write a scheme into a configuration.

    A saved configuration also names our attention. Without isopos, transformers refuses this unknown name, so the model
    does not silently run with other positions, unless ``from_pretrained`` is told another name.
    """
    setattr(config, ENTRY, scheme_entry(scheme, window))
    config.attn_implementation = ATTENTION


def load_parameters(model: Any, names: Sequence[str]) -> None:
    """Load a scheme's parameters, by their name in the model's state dict, from the folder of the loaded model.

    In files, the parts of the name before the scheme may differ.
    """
    if not names:
        return
    from safetensors import safe_open

    state, missing = model.state_dict(), {_of_scheme(name): name for name in names}
    for path in sorted(Path(model.name_or_path).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                if (name := missing.pop(_of_scheme(key), None)) is not None:
                    with torch.no_grad():
                        state[name].copy_(file.get_tensor(key))
    if missing:
        raise ValueError(
            f"model: expected a folder with what its scheme has learned, {min(missing)}, got {model.name_or_path!r}; "
            "load it from where it was saved"
        )


def _of_scheme(name: str) -> str:
    """Part of a name in a model's state dict from the scheme on; empty for other names."""
    match = re.search(VALUES, name)
    return "" if match is None else name[match.start() :].removeprefix(".")
