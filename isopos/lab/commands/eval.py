"""`isopos eval`: the weights of a run, scored again."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from isopos.lab.recipes import Recipe
from isopos.lab.reports import grids
from isopos.lab.runs.files import read_json, write_json
from isopos.lab.runs.folders import fingerprint, read_rows
from isopos.lab.runs.locks import locked
from isopos.lab.tasks.task import Data, Task, View, require
from isopos.spec import read, split_spec

__all__ = ["Options", "run"]


@dataclass(frozen=True)
class Options:
    """Score the weights of a run, or the last checkpoint of one that has not ended; the figures go to its eval.json."""

    run: Annotated[str, tyro.conf.Positional]  # Folder of one run: runs/NAME.
    split: str = "validation"  # Which held-out data: validation or test, where there is one.
    length: tuple[int, ...] = ()
    """Multiples of the training length, where samples have any; by default those of a comparison."""
    scored: float = 0.0
    """How many tokens at the end of each window count, as PermuteFormer's 256 of 512; below 1 a share of them; 0: all."""
    limit: int = -1  # At most so many tokens or samples; 0: all; -1: as in training.
    view: tuple[str, ...] = ()  # Choices of the task's own, as NAME=NUMBER: of images height=48, width=64, shift=2.
    extend: str = ""
    """Change the frequencies of a rotary scheme for each length, by linear, dynamic, yarn, longrope or llama3, with options
    as in yarn:fast=16 or longrope:rescale=1+1.2+2.5+4. The factor is that of the length, or one for all: yarn:factor=16."""
    other_data: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Score what the recipe's data is now, where it has changed since the run was trained: then part of it may be known."""


def run(options: Options, console: Console) -> int:
    """Score on the CPU, print a table, and append the figures to eval.json."""
    from isopos.lab.runs import checkpoints

    folder = Path(options.run)
    recipe, model = checkpoints.build(folder)
    with locked(folder):
        return _score(options, console, folder, recipe, model)


def _score(options: Options, console: Console, folder: Path, recipe: Recipe, model: Any) -> int:
    from isopos.lab.runs import checkpoints

    views = _views(options, recipe.task)
    for view in views:
        _extend(options.extend, model, recipe.task, view)  # what cannot be is said before any work
    data, other = _data(options, console, folder, recipe)
    trained, last = folder / checkpoints.WEIGHTS, checkpoints.newest(folder)
    done = read_rows(folder / "metrics.jsonl")
    if trained.exists():
        checkpoints.read_weights(model, trained)
        source, step = trained.name, max((row["step"] for row in done), default=0)
    elif last is not None:
        checkpoints.fill(model, last)
        source, step = str(last.folder.relative_to(folder)), last.step
    else:
        raise ValueError(f"run: expected weights or a checkpoint in {folder}, got neither; train it with --resume")
    require("split", options.split, f"one of {', '.join(data.splits)}, which {data.name} has", options.split in data.splits)
    metrics = recipe.task.figures
    lengths = ["length"] * ("multiple" in recipe.task.views)
    rows, found = [], {}
    for view in views:
        _extend(options.extend, model, recipe.task, view)
        scored = data.measure(model, recipe, view)
        texts = (metric.text(scored.figures.get(metric.figure)) for metric in metrics)
        rows.append([*(f"{view.multiple}x" for _ in lengths), *texts, scored.reason])
        found[str(view.multiple)] = dict(scored.figures) or None
    path = folder / "eval.json"
    earlier = read_json(path, list[dict], "remove it, and the figures are written anew") if path.exists() else []
    choice = {name: value for name, value in asdict(views[0]).items() if name != "multiple"}
    choice |= {"extend": options.extend} if options.extend else {}
    choice |= {"data": data.sha256} if other else {}
    write_json(path, [*earlier, {"weights": source, "step": step, **choice, "figures": found}])  # before anything is printed
    own = "".join(f", {name} {value}" for name, value in views[0].own)
    own += f", extended by {options.extend}" if options.extend else ""
    own += ", which is not what it was trained on" * other
    grids.say(console, f"{folder}: {source}, step {step}; {data.name}{own}")
    console.print(grids.console([*lengths, *(metric.title for metric in metrics), ""], rows))
    lacking = [row[-1] for view, row in zip(views, rows, strict=True) if found[str(view.multiple)] is None]
    if lacking and (options.length or len(lacking) == len(rows)):
        raise ValueError(lacking[0])
    return 0


def _data(options: Options, console: Console, folder: Path, recipe: Recipe) -> tuple[Data, bool]:
    """The data of a run, which its model can read, and whether it is other data than the run was trained on."""
    before = fingerprint(folder)
    data = recipe.task.load(recipe, console, run=folder)
    if (other := before not in ("", data.sha256)) and not options.other_data:
        raise ValueError(
            f"data: expected what {folder / 'data.json'} says, sha256 {before[:12]}, got {data.sha256[:12]} in {data.name}, "
            "which changed since; give the run back its data, or score this with --other-data"
        )
    if other:
        found, had = data.settle(recipe.edit(batch=1)).as_dict(), recipe.as_dict()
        for name in recipe.task.settled:
            require(f"data: {name}", found[name], f"{had[name]}, as the model of {folder} has it", found[name] == had[name])
    return data, other


def _views(options: Options, task: Task) -> list[View]:
    """What is asked for, where the samples of the task have it."""
    require(
        "scored", options.scored, "a number of tokens, a share below 1, or 0 for all", 0 <= options.scored < float("inf")
    )
    require("limit", options.limit, "a number, 0 for all or -1 as in training", options.limit >= -1)
    multiples = options.length or dict.fromkeys(metric.view.multiple for metric in task.metrics)
    own = tuple(_choice(text) for text in options.view)
    views = [View(options.split, multiple, options.scored, options.limit, own) for multiple in multiples]
    for view in views:
        require("length", view.multiple, "multiples from 1 on", view.multiple >= 1)
        task.check_view(view)
    return views


def _extend(spec: str, model: Any, task: Task, view: View) -> None:
    """Give the schemes of a model the frequencies of a rule for the lengths of a view."""
    from isopos.scheme import Scheme

    if not spec:
        return
    name, texts = split_spec(spec, "extend")
    values = {option: _value(option, text) for option, text in texts.items()}
    every = [module for module in model.modules() if isinstance(module, Scheme)]
    for scheme in [scheme for scheme in every if not scheme.blind] or every:
        extent = task.extent(view, scheme.group.columns)
        if extent is None:
            raise ValueError(
                f"extend: expected a task whose samples have lengths to choose, got {task.name or type(task).__name__}"
            )
        try:
            scheme.extend(name, **{"factor": extent[0], "trained": extent[1]} | values)
        except TypeError as error:
            raise ValueError(f"extend: {error}") from None


def _value(option: str, text: str) -> Any:
    """What an option of a rule is in text."""
    if option == "truncate" and text in ("true", "false"):
        return text == "true"
    piece = read(f"extend: {option}", text)
    if option == "rescale":
        return [part.number("numbers joined by +") for part in piece.split("+")]
    return int(text) if text.isdecimal() else piece.number("true or false" if option == "truncate" else "a number")


def _choice(text: str) -> tuple[str, int]:
    """Name and number of one of a task's own choices."""
    name, value = read("view", text).entry("NAME=NUMBER")
    return name, value.whole_number("NAME=NUMBER")
