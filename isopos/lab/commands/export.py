"""`isopos export`: a run's language model as a folder for transformers, or as an ONNX file."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from isopos.lab.runs.files import printable
from isopos.lab.tasks import spec


@dataclass(frozen=True)
class Options:
    """Write a run's language model and tokenizer for transformers' Auto classes (extra hf) or as ONNX (extra onnx)."""

    run: Annotated[str, tyro.conf.Positional]  # Folder of one run: runs/NAME/rope-seed0.
    folder: Annotated[str, tyro.conf.Positional]  # New folder for configuration, weights and tokenizer.
    onnx: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write decoder.onnx, which reads whole texts, chunks or single tokens, and tokenizer.json."""


def run(options: Options, console: Console) -> int:
    """Write the model and print the folder's path."""
    folder = Path(options.folder)
    if folder.exists():
        raise ValueError(f"folder: expected a new folder, got {folder}, which exists; remove it or choose another")
    from isopos.lab.data.tokenizers import tokenizer_of
    from isopos.lab.runs import checkpoints
    from isopos.models import Decoder

    recipe, model = checkpoints.load_run(Path(options.run))
    if not isinstance(model, Decoder):
        raise ValueError(f"run: expected a language model, got a model of the task {spec(recipe.task)}")
    tokenizer = tokenizer_of(Path(options.run)).model()
    try:
        (_write_onnx if options.onnx else _write_transformers)(model, tokenizer, folder)
    except ImportError as error:
        raise ValueError(str(error)) from None
    print(printable(str(folder)))
    return 0


def _write_transformers(model: Any, tokenizer: Any, folder: Path) -> None:
    from isopos.integrations.transformers import from_decoder  # first: its error names the extra

    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports] # isort: skip

    exported, fast = from_decoder(model), PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with _new(folder):
        exported.save_pretrained(folder)
        fast.save_pretrained(folder)


def _write_onnx(model: Any, tokenizer: Any, folder: Path) -> None:
    from isopos.integrations.onnx import export_decoder

    with _new(folder):
        export_decoder(model.eval().cpu(), folder / "decoder.onnx")
        tokenizer.save(str(folder / "tokenizer.json"))


@contextmanager
def _new(folder: Path) -> Iterator[None]:
    """A new folder, which is removed if the context ends with an error."""
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
