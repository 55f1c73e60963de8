"""`isopos export`: a run's language model as a folder for transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.runs.files import printable
from isopos.lab.tasks import spec


@dataclass(frozen=True)
class Options:
    """Write a run's language model and tokenizer as a folder for transformers' Auto classes (needs the extra hf)."""

    run: Annotated[str, tyro.conf.Positional]  # Folder of one run: runs/NAME/rope-seed0.
    folder: Annotated[str, tyro.conf.Positional]  # New folder for configuration, weights and tokenizer.


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
    try:
        from isopos.integrations.transformers import from_decoder
    except ImportError as error:
        raise ValueError(str(error)) from None
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(Path(options.run)).model())
    from_decoder(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(printable(str(folder)))
    return 0
