"""`isopos train`: check everything, train or go on with one run, and say what it came to."""

from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from isopos.lab.data import corpora
from isopos.lab.recipes import Recipe
from isopos.lab.reports.progress import Bars
from isopos.lab.runs.folders import check_vacant, recipe_of, same_recipe
from isopos.lab.training.checks import check_head, check_recipe, run_place
from isopos.lab.training.run import is_first_process, train

__all__ = ["launch"]


def launch(name: str, recipe: Recipe, console: Console, *, resume: bool = False, overwrite: bool = False) -> int:
    """Train a run in runs/NAME and return the exit status: 0, or 1 where it diverged.

    Raises:
        ValueError: Before any work, where something does not fit.
        OSError: Where a checkpoint cannot be written.
        Interrupted: After SIGINT or SIGTERM, when a checkpoint of the last step is there.
    """
    first = is_first_process()
    console.quiet = not first
    if resume and overwrite:
        raise ValueError("resume: expected either --resume or --overwrite, got both")
    folder = run_place(name)
    recipe, warnings = check_recipe(recipe)
    if resume:
        same_recipe(folder, replace(recipe, vocabulary=recipe.vocabulary or recipe_of(folder).vocabulary))
    elif first:
        check_vacant(folder, overwrite=overwrite)
    vocabulary = recipe.vocabulary or None
    source = corpora.load(recipe.data, recipe.length, tokenizer=recipe.tokenizer, vocabulary=vocabulary, console=console)
    recipe = replace(recipe, vocabulary=source.vocabulary)
    check_head(recipe)
    console.print(f"text: {source.name}, {len(source.train)} + {len(source.validation)} tokens", markup=False)
    for warning in warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    with Bars(console) as bars:
        unit = "bits/byte" if recipe.tokenizer == "bytes" else "bits/token"
        show = bars.add(recipe.scheme, recipe.steps, unit)
        result = train(recipe, source, folder, show, resume=resume, overwrite=overwrite)
    if result is None:
        return 0
    bits = ", ".join(f"{value:.3f} at {m}x" for m, value in result.bits_per_byte.items() if value is not None)
    console.print(f"{result.status}{': bits per byte ' * bool(bits)}{bits}; {folder}", markup=False)
    return 0 if result.status == "finished" else 1
