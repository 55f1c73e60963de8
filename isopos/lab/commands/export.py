"""`isopos export`: a run's language model as a folder for transformers, or as an ONNX file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from isopos.lab.runs.files import printable
from isopos.lab.runs.folders import new_folder
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
    with new_folder(folder) as part:
        exported.save_pretrained(part)
        fast.save_pretrained(part)


def _write_onnx(model: Any, tokenizer: Any, folder: Path) -> None:
    from isopos.integrations.onnx import export_decoder

    with new_folder(folder) as part:
        export_decoder(model.eval().cpu(), part / "decoder.onnx")
        tokenizer.save(str(part / "tokenizer.json"))
