"""`isopos convert`: a model of transformers from softmax to linear attention."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from isopos.lab.reports import grids
from isopos.lab.reports.progress import Bars
from isopos.lab.runs import folders
from isopos.lab.runs.files import printable
from isopos.lab.tasks.task import Recipe, View, evaluation, require

TRANSFER, TUNING = "transfer", "tuning"


@dataclass(frozen=True)
class Options:
    """Convert a model of transformers (extra hf) to linear attention: attention transfer, then training on the next token.

    The runs of both stages are in NEW_FOLDER.runs. Ctrl-C and SIGTERM write a checkpoint; --resume continues from the last
    one, to the same weights. NEW_FOLDER is written whole at the end; isopos.integrations.transformers.load reads it.
    """

    folder: Annotated[str, tyro.conf.Positional]  # Folder of a causal language model with softmax attention.
    new_folder: Annotated[str, tyro.conf.Positional]  # New folder for the converted model and its tokenizer.
    scheme: str = "keep:decay=retnet"
    """Name and options of a scheme of linear attention: decay, feature_map, denominator and its own. "keep" has the model's
    positions: rope with its base, or its table of vectors."""
    window: int = 0  # Nearest keys that softmax attention sees in addition to linear attention, in a learned share; 0: none.
    data: str = ""  # Text: a file, an archive, a folder, or hf:NAME:CONFIG; empty: the Python language reference.
    tokenizer: Literal["model", "bytes"] = "model"  # The tokenizer in the folder, or bytes as tokens 0 to 255.
    length: int = 256  # Tokens of a window of text.
    batch: int = 8  # Windows per update.
    transfer_steps: int = 250  # Updates of attention transfer; 0: none.
    transfer_rate: float = 1e-3  # Peak learning rate of attention transfer.
    steps: int = 1000  # Updates on the next token.
    learning_rate: float = 3e-4  # Peak learning rate of these.
    schedule: Literal["cosine", "constant"] = "cosine"  # Of learning rates, after a warm-up of a tenth of the steps.
    validate_every: int = 0  # Updates on the next token between validations, of which the best selects weights; 0: the last.
    validation_tokens: int = 32768  # Largest number of held-out tokens that are scored; 0: all.
    save_every: int = 20  # Updates between checkpoints.
    seed: int = 0  # Seed of batches.
    device: str = "cpu"  # cpu, cuda, or auto, which takes a GPU if there is one.
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Continue the conversion in NEW_FOLDER.runs.


def run(options: Options, console: Console) -> int:
    """Convert; return 0, or 1 if training diverged."""
    try:
        return _run(options, console)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name != "transformers":
            raise
        raise ValueError(
            'folder: expected transformers to read it, which is not installed: pip install "isopos[hf]"'
        ) from None


def _run(options: Options, console: Console) -> int:
    from isopos.lab.tasks.conversion import read_model
    from isopos.lab.training.run import check_recipe, train

    from transformers.utils import logging  # pyright: ignore[reportMissingImports] # isort: skip

    new, runs = Path(options.new_folder), _runs(options)
    logging.disable_progress_bar()
    recipes = {name: check_recipe(recipe)[0] for name, recipe in _recipes(options, runs).items()}
    if TRANSFER not in recipes and (runs / TRANSFER).exists():
        raise ValueError(f"transfer_steps: expected those of {runs / TRANSFER}, got 0")
    for name, recipe in recipes.items():
        if (runs / name).exists():
            folders.check_same_recipe(runs / name, recipe, "name another new folder")
    last = recipes[TUNING]
    data = {name: recipe.task.load(recipe, console) for name, recipe in recipes.items()}
    original = read_model(Path(options.folder)).to(last.training.device)
    text: Any = data[TUNING]
    size = original.get_input_embeddings().num_embeddings
    if text.corpus.vocabulary > size:
        raise ValueError(f"tokenizer: expected at most the model's {size} tokens, got {text.corpus.vocabulary}")
    grids.say(console, f"data: {text.name}, {text.summary}")
    with evaluation(original):
        before = text.figures(original, last.training.batch, View())["bits_per_byte"]
    grids.say(console, f"original: bits/byte {before:.3f}")
    del original
    with Bars(console) as bars:
        for name, recipe in recipes.items():
            show = bars.add(name, recipe.training.steps, recipe.task.loss_unit, "tokens/s")
            result = train(recipe, data[name], runs / name, show, resume=(runs / name).exists())
            if result is None:  # another process than the first
                return 0
            scores = [f"{metric.title} {metric.text(result.scores[metric.title])}" for metric in recipe.task.metrics]
            grids.say(console, f"{name}: {result.status}: {', '.join(scores)}; {runs / name}")
            if result.status != "finished":
                return 1
    _write(last, runs / TUNING, Path(options.folder), new)
    if not console.quiet:
        print(printable(str(new)))
    return 0


def _runs(options: Options) -> Path:
    """The folder of the runs, after the checks that paths are free."""
    new = Path(options.new_folder)
    if new.exists():
        raise ValueError(f"new_folder: expected a new folder, got {new}, which exists; remove it or choose another")
    runs = new.with_name(f"{new.name}.runs")
    if runs.exists() and not options.resume:
        raise ValueError(f"new_folder: expected no {runs} of an earlier conversion; --resume continues it, or remove it")
    if options.resume and not runs.exists():
        raise ValueError(f"resume: expected a conversion in {runs}, got none; begin without --resume")
    return runs


def _recipes(options: Options, runs: Path) -> dict[str, Any]:
    """The recipes of the stages."""
    from isopos.lab.tasks.conversion import Conversion

    steps = options.transfer_steps
    require("transfer_steps", steps, "0 or more", steps >= 0)
    names = ("window", "data", "tokenizer", "length", "validation_tokens", "batch", "schedule", "save_every")
    common = {name: getattr(options, name) for name in names}
    common |= {"scheme": options.scheme, "seed": options.seed, "device": options.device, "source": options.folder}
    stages: dict[str, dict[str, Any]] = {}
    if steps:
        stages[TRANSFER] = {"steps": steps, "learning_rate": options.transfer_rate}
    stages[TUNING] = {"steps": options.steps, "learning_rate": options.learning_rate}
    stages[TUNING] |= {"validate_every": options.validate_every, "start": str(runs / TRANSFER) if steps else ""}
    return {name: Recipe(task=Conversion()).edit(**common, stage=name, **of_stage) for name, of_stage in stages.items()}


def _write(recipe: Any, run: Path, source: Path, new: Path) -> None:
    """Write the converted model, whole or not at all."""
    from isopos.lab.runs import checkpoints

    model = recipe.task.model(recipe)
    checkpoints.read_weights(model, run / checkpoints.WEIGHTS)
    with folders.new_folder(new) as part:
        model.student.save_pretrained(part)
        for path in source.iterdir():
            if path.is_file() and ("token" in path.name or path.name in ("vocab.json", "merges.txt")):
                shutil.copyfile(path, part / path.name)
