"""The comparison: check everything, train run by run, time the schemes interleaved, show a table and write a report."""

import shutil
import signal
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from isopos.lab.data import corpora
from isopos.lab.recipes import Comparison, Recipe
from isopos.lab.reports import page
from isopos.lab.reports.progress import Bars
from isopos.lab.reports.table import render, rows_of
from isopos.lab.runs.folders import write_json
from isopos.lab.training.checks import check_recipe, run_place, usable_device
from isopos.lab.training.run import build_model, build_scheme, loss_of, train

__all__ = ["compare"]

ROUNDS = 9


def compare(comparison: Comparison, console: Console) -> int:
    """Run a comparison and return the exit status: 0, or 130 after Ctrl-C, which leaves a report of what is finished.

    Raises:
        ValueError: Before any work, where a choice or the data do not fit.
    """
    recipes, folder, warnings = _check(comparison)
    source = corpora.load(comparison.data, comparison.length, console=console)
    size = f"{len(source.train)} + {len(source.validation)} bytes"
    console.print(f"text: {source.name}, {size}, sha256 {source.sha256[:12]}", markup=False)
    for warning in warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    about: dict[str, object] = {
        "text": source.name,
        "sha256": source.sha256,
        "bytes": len(source.train) + len(source.validation),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": recipes[0].device,
        "planned": [run_folder(folder, recipe).name for recipe in recipes],
    }
    complete = False
    before = _make(folder, comparison.overwrite)
    try:
        write_json(folder / "comparison.json", about | {"complete": False})
        _train_all(recipes, source, folder, console)
        about["speed"] = _speeds(recipes, source)
        complete = True
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: the report holds what is finished")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would leave no report
        write_json(folder / "comparison.json", about | {"complete": complete})
        report = page.write(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if before is not None and not rows_of(folder):
        shutil.rmtree(folder)
        before.rename(folder)
        console.print(f"no run was finished: {folder} is what it was", markup=False)
        return 130
    if before is not None:
        shutil.rmtree(before)
    console.print(*render(rows_of(folder), console.width))
    console.print(f"report: {report}", markup=False)
    return 0 if complete else 130


def _check(comparison: Comparison) -> tuple[list[Recipe], Path, list[str]]:
    """Recipes that build, a folder that can be made, and what a reader of the results should know before."""
    if comparison.seeds < 1:
        raise ValueError(f"seeds: expected a positive number, got {comparison.seeds}")
    device, warnings = usable_device(comparison.device), []
    recipes = [replace(recipe, device=device) for recipe in comparison.recipes()]
    for recipe in recipes[: len(recipes) // comparison.seeds]:
        warnings += check_recipe(recipe)[1]
    name = comparison.name or time.strftime("compare-%Y%m%d-%H%M%S")
    folder = run_place(name)
    if folder.exists() and not comparison.overwrite:
        raise ValueError(f"name: {folder} exists; choose another with --name, or replace it with --overwrite")
    if folder.exists() and not (folder / "comparison.json").exists():
        raise ValueError(f"overwrite: {folder} holds no comparison; remove it yourself or choose another --name")
    return recipes, folder, warnings


def _make(folder: Path, overwrite: bool) -> Path | None:
    """Make the folder; one that it replaces is set aside until a run is finished, and its place returned."""
    before = folder.with_name(f".{folder.name}.replaced") if overwrite and folder.exists() else None
    try:
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        folder.mkdir(parents=True)
        return before
    except OSError as error:
        raise ValueError(f"name: cannot write {folder}: {error.strerror}") from None


def run_folder(folder: Path, recipe: Recipe) -> Path:
    """Where a run of a comparison lives: its scheme, in characters that every file system takes, and its seed."""
    return folder / f"{recipe.scheme.replace(':', '+')}-seed{recipe.seed}"


def _train_all(recipes: list[Recipe], source: corpora.Corpus, folder: Path, console: Console) -> None:
    with Bars(console) as bars:
        for recipe in recipes:
            title = recipe.scheme + (f" seed {recipe.seed}" if recipes[-1].seed else "")
            show = bars.add(title, recipe.steps, "bits/byte")
            result = train(recipe, source, run_folder(folder, recipe), show)
            if result is not None and result.status != "finished":
                bars.progress.console.print(f"[red]{title}: {result.status}")


def _speeds(recipes: list[Recipe], source: corpora.Corpus) -> dict[str, float]:
    """Training speed of each scheme relative to `none` with the same attention: medians of interleaved rounds."""
    first = [recipe for recipe in recipes if recipe.seed == recipes[0].seed]
    bases = {
        recipe.scheme: "none" + ":attention=softmax" * (build_scheme(recipe).attention == "softmax") for recipe in first
    }
    models = {spec: build_model(replace(first[0], scheme=spec)) for spec in {*bases, *bases.values()}}
    batch = [x.to(first[0].device) for x in source.batch(0, 0, first[0].batch, first[0].length)]
    seconds: dict[str, list[float]] = {spec: [] for spec in models}
    for n in range(ROUNDS + 1):
        for spec, model in models.items():
            _synchronize(first[0].device)
            begun = time.perf_counter()
            loss_of(model, *batch).backward()
            _synchronize(first[0].device)
            if n:  # the first round warms up
                seconds[spec].append(time.perf_counter() - begun)
            model.zero_grad()
    ratios = {spec: [b / a for a, b in zip(seconds[spec], seconds[base], strict=True)] for spec, base in bases.items()}
    return {spec: statistics.median(ratio) for spec, ratio in ratios.items()}


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
