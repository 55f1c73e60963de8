"""`isopos tables`: a scheme as arrays for other runtimes. The tables of papers are `isopos table`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from isopos.catalog import CATALOG
from isopos.lab.commands import bounded, rule_of
from isopos.lab.runs.files import printable, replacing, write_text
from isopos.lab.tables.loader import TABLES
from isopos.lab.tasks.task import require
from isopos.spec import split_spec


@dataclass(frozen=True)
class Options:
    """Write a scheme as arrays for MLX, JAX and NumPy, or as keys of llama.cpp. Papers' tables: isopos table.

    npz holds arrays of numbers, and an explanation of their axes as UTF-8 text in uint8, which is also printed. gguf-keys is
    JSON: metadata keys and tensors of a GGUF file, for schemes that llama.cpp has.
    """

    scheme: Annotated[str, tyro.conf.Positional]  # Scheme with options: rope:base=500000,layout=half.
    format: Literal["npz", "gguf-keys"] = "npz"  # npz for arrays, gguf-keys for llama.cpp.
    out: str = ""  # File; by default SCHEME.npz, and for gguf-keys standard output.
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Replace the file if it exists.
    head_dim: int = 64  # Features per head.
    heads: int = 8  # Number of heads.
    length: int = 512  # Positions of an npz: the first of a line or a grid, nodes of a tree, cameras.
    extend: str = ""  # Rule for longer sequences: yarn:factor=4,trained=4096, or linear, dynamic, longrope, llama3.
    arch: str = "llama"  # For gguf-keys, the architecture, which is the first word of each key.


def run(options: Options, console: Console) -> int:
    """Write the file and print its path and explanation, or print the keys."""
    bounded(options, head_dim=65_536, heads=4_096, length=1 << 20)
    require("length", options.length, "at least 1", options.length >= 1)
    if options.scheme in TABLES or options.scheme.endswith(".toml"):
        raise ValueError(
            f"scheme: expected one of isopos list, got {options.scheme}, a paper's table; isopos table {options.scheme} "
            "runs its cells"
        )
    keys = options.format == "gguf-keys"
    require("arch", options.arch, "no architecture with npz, which has none", keys or options.arch == Options.arch)
    require(
        "length", options.length, "no length with gguf-keys, which have none", not keys or options.length == Options.length
    )
    suffix = ".json" if keys else ".npz"
    require("out", options.out, f"a name that ends with {suffix}", not options.out or options.out.endswith(suffix))
    path = Path(options.out or options.scheme.replace(":", "+").replace("/", "-") + suffix)
    if path.exists() and not options.overwrite and (options.out or not keys):
        raise ValueError(f"out: expected a new file, got {path}, which exists; choose another or pass --overwrite")
    scheme = _scheme(options)
    if not keys:
        return _write_arrays(scheme, options.length, path)
    from isopos.integrations.arrays import gguf_keys

    text = json.dumps(gguf_keys(scheme, options.arch), indent=1)
    if options.out:
        write_text(path, text + "\n")
    print(printable(str(path)) if options.out else text)
    return 0


def _scheme(options: Options) -> Any:
    """The scheme, extended; for llama.cpp with softmax attention unless its options say otherwise."""
    from isopos.schemes import build

    name, choices = split_spec(options.scheme)
    if options.format == "gguf-keys" and name in CATALOG:
        choices = {"attention": "softmax", **choices}
    scheme = build(name, options.head_dim, options.heads, choices)
    if options.extend:
        rule, values = rule_of(options.extend)
        try:
            scheme.extend(rule, **values)
        except TypeError as error:
            raise ValueError(f"extend: {error}") from None
    return scheme


def _write_arrays(scheme: Any, length: int, path: Path) -> int:
    import numpy as np

    from isopos.integrations.arrays import arrays, explanation

    limit = scheme.max_length
    values = arrays(scheme, scheme.group.arrange(length if limit is None else min(length, limit)))
    with replacing(path) as part, part.open("wb") as file:
        np.savez(file, **values)  # pyright: ignore[reportArgumentType]  # no array has the name of an option
    print(printable(str(path)))
    print(json.dumps(explanation(values), indent=1))
    return 0
