"""`isopos eval`: score the weights of a run again."""

import math
import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from isopos.lab.commands import rule_of
from isopos.lab.recipes import Recipe
from isopos.lab.reports import grids
from isopos.lab.runs.files import finite, read_json, write_json
from isopos.lab.runs.folders import data_fingerprint, read_rows
from isopos.lab.runs.locks import locked
from isopos.lab.tasks.task import Data, Task, View, require
from isopos.spec import read


@dataclass(frozen=True)
class Options:
    """Score the weights of a run, or the last checkpoint of an unfinished one; append the figures to its eval.json.

    In a folder that cannot be written they are printed only.
    """

    run: Annotated[str, tyro.conf.Positional]  # Folder of one run: runs/NAME.
    split: str = "validation"  # Held-out data: validation, or test if there is one.
    length: tuple[int, ...] = ()
    """Lengths of samples as multiples of the training length, where a task has them; by default those of a comparison."""
    scored: float = 0.0
    """Tokens at the end of each window that count, such as PermuteFormer's 256 of 512; below 1: a share; 0: all."""
    limit: int = -1  # Largest number of tokens or samples; 0: all; -1: as in training.
    view: tuple[str, ...] = ()  # Choices of a task, as NAME=NUMBER; for images height=48, width=64, shift=2.
    extend: str = ""
    """Change the frequencies of a rotary scheme for each length, by linear, dynamic, yarn, longrope, llama3, dype or drop,
    with options as in yarn:fast=16 or longrope:rescale=1+1.2+2.5+4. The factor is that of the length, or one for all:
    yarn:factor=16."""
    device: str = "cpu"  # cpu, cuda, or auto, which takes a GPU if there is one.
    sequence_parallel: int = 1
    """Processes that hold each sample together, an equal part of its tokens each: for lengths that no single one could hold.
    torchrun starts them on several machines, else they start here."""
    sequence_keys: Literal["gather", "ring", "zigzag"] = "gather"  # How softmax attention sees their keys, as in training.
    data: str = ""  # Where the run's data is now, or other data of the same kind; by default where it was in training.
    other_data: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Allow other data than the run was trained on; part of it may have been seen in training."""


def run(options: Options, console: Console) -> int:
    """Score, print a table, and append the figures to eval.json."""
    from isopos.lab.runs import checkpoints
    from isopos.lab.training.group import run_in_group
    from isopos.lab.training.run import check_over, usable_device

    device, count = usable_device(options.device), options.sequence_parallel
    require("sequence_parallel", count, "a number from 1 on", count >= 1)
    keys = options.sequence_keys
    require("sequence_keys", keys, "gather without sequence_parallel", count > 1 or keys == "gather")
    recipe, _ = checkpoints.untrained_model(Path(options.run))
    if count == 1:
        return _member(0, device, options, console)
    recipe = recipe.edit(sequence_parallel=count, devices=count, nodes=1, accumulate=1, sequence_keys=keys)
    _scaled(recipe, math.gcd(*(view.multiple for view in _views(options, recipe.task)))).check()
    check_over(recipe)
    run_in_group(count, device, _member, options)
    return 0


def _scaled(recipe: Recipe, multiple: int) -> Recipe:
    """The recipe with the length that shards divide times a factor, if it has such a field."""
    name = recipe.task.in_shards
    return recipe.edit(**{name: multiple * getattr(recipe.task, name)}) if isinstance(name, str) else recipe


def _member(rank: int, device: str, options: Options, console: Console | None = None) -> int:
    """Score in one process of a group; the first prints and writes."""
    from isopos.lab.runs import checkpoints

    folder = Path(options.run)
    recipe, model = checkpoints.untrained_model(folder)
    own = hasattr(recipe.task, "data")
    require("data", options.data, f"none for the task {recipe.task.name}, which draws its samples", own or not options.data)
    moved = {"data": options.data} if options.data else {}
    recipe, model = recipe.edit(device=device, **moved), model.to(device)
    console = console or Console(width=150)
    console.quiet = rank > 0
    over = nullcontext()  # or that in which samples are in the processes of the default group
    if options.sequence_parallel > 1:
        import torch.distributed as dist

        from isopos.lab.training.group import group_by_keys

        over = model.over(group_by_keys(dist.group.WORLD, options.sequence_keys))
    with locked(folder) if rank == 0 and _writable(folder) else nullcontext(), over:
        return _score(options, console, folder, recipe, model)


def _score(options: Options, console: Console, folder: Path, recipe: Recipe, model: Any) -> int:
    from isopos.lab.runs import checkpoints

    views = _views(options, recipe.task)
    for view in views:
        _extend(options.extend, model, recipe.task, view)  # errors come before any work
    data, other = _data(options, console, folder, recipe)
    trained, last = folder / checkpoints.WEIGHTS, checkpoints.newest(folder)
    done = read_rows(folder / "metrics.jsonl")
    if trained.exists():
        checkpoints.read_weights(model, trained)
        source, step = trained.name, max((row["step"] for row in done), default=0)
    elif last is not None:
        checkpoints.load_checkpoint(model, last)
        source, step = str(last.folder.relative_to(folder)), last.step
    else:
        raise ValueError(
            f"run: expected weights or a checkpoint in {folder}, got neither; continue its command with --resume"
        )
    require("split", options.split, f"one of {', '.join(data.splits)}, which {data.name} has", options.split in data.splits)
    metrics = recipe.task.figures
    lengths = ["length"] * ("multiple" in recipe.task.views)
    rows, figures = [], {}
    for view in views:
        _extend(options.extend, model, recipe.task, view)
        scored = data.measure(model, recipe, view)
        texts = (metric.text(scored.figures.get(metric.figure)) for metric in metrics)
        rows.append([*(f"{view.multiple}x" for _ in lengths), *texts, scored.reason])
        figures[str(view.multiple)] = finite(scored.figures) or None
    if console.quiet:
        return 0
    entry: dict[str, Any] = {"weights": source, "step": step}
    entry |= {name: value for name, value in asdict(views[0]).items() if name != "multiple"}
    entry |= {"extend": options.extend} if options.extend else {}
    entry |= {"data": data.sha256} if other else {}
    if _writable(folder):
        path = folder / "eval.json"
        earlier = read_json(path, list[dict], "remove it, and the figures are written again") if path.exists() else []
        write_json(path, [*earlier, entry | {"figures": figures}])  # before printing, which may fail
    else:
        grids.warn(console, f"not added to {folder / 'eval.json'}, since the folder cannot be written")
    choices = "".join(f", {name} {value}" for name, value in views[0].own)
    choices += f", extended by {options.extend}" if options.extend else ""
    choices += ", not the data of training" * other
    grids.say(console, f"{folder}: {source}, step {step}; {data.name}{choices}")
    titles = [*lengths, *(metric.title for metric in metrics), *[""] * any(row[-1] for row in rows)]
    console.print(grids.console_table(titles, [row[: len(titles)] for row in rows]))
    reasons = [row[-1] for view, row in zip(views, rows, strict=True) if figures[str(view.multiple)] is None]
    if reasons and (options.length or len(reasons) == len(rows)):
        raise ValueError(reasons[0])
    return 0


def _writable(folder: Path) -> bool:
    """Whether a run and the place of its lock can be written; else no process of this user changes it."""
    return os.access(folder, os.W_OK) and os.access(folder.parent, os.W_OK)


def _data(options: Options, console: Console, folder: Path, recipe: Recipe) -> tuple[Data, bool]:
    """Load the data of a run; return it, and whether it differs from the data of training."""
    before = data_fingerprint(folder)
    data = recipe.task.load(recipe, console, run=folder)
    if (other := before not in ("", data.sha256)) and not options.other_data:
        raise ValueError(
            f"data: expected sha256 {before[:12]}, as in {folder / 'data.json'}, got {data.sha256[:12]} in {data.name}, "
            "which is other data; restore the run's, say where it is with --data, or score this with --other-data"
        )
    if other:
        alone = dict.fromkeys(("batch", "accumulate", "devices", "nodes"), 1)  # however many samples there are
        alone |= {name: 0.0 for name in ("mixup", "cutmix") if hasattr(recipe.task, name)}
        now, then = data.infer(recipe.edit(**alone)).as_dict(), recipe.as_dict()
        for name in recipe.task.inferred:
            require(f"data: {name}", now[name], f"{then[name]}, as in the model of {folder}", now[name] == then[name])
    return data, other


def _views(options: Options, task: Task) -> list[View]:
    """The views to score; ValueError if the task's samples do not have them."""
    countable = 0 <= options.scored < float("inf") and (options.scored < 1 or options.scored.is_integer())
    require("scored", options.scored, "a whole number of tokens, a share below 1, or 0 for all", countable)
    require("limit", options.limit, "a number, 0 for all or -1 as in training", options.limit >= -1)
    multiples = options.length or dict.fromkeys(metric.view.multiple for metric in task.metrics)
    entries = [read("view", text).entry("NAME=NUMBER") for text in options.view]
    choices = tuple((name, value.whole_number("NAME=NUMBER")) for name, value in entries)
    views = [View(options.split, multiple, options.scored, options.limit, choices) for multiple in multiples]
    for view in views:
        require("length", view.multiple, "multiples from 1 on", view.multiple >= 1)
        task.check_view(view)
    return views


def _extend(spec: str, model: Any, task: Task, view: View) -> None:
    """Change the frequencies of a model's schemes by a rule, for the lengths of a view."""
    from isopos.scheme import Scheme

    if not spec:
        return
    name, values = rule_of(spec)
    schemes = [module for module in model.modules() if isinstance(module, Scheme)]
    for scheme in [scheme for scheme in schemes if not scheme.position_free] or schemes:
        extent = task.extent(view, scheme.group.columns)
        if extent is None:
            raise ValueError(
                f"extend: expected a task whose samples have lengths to choose, got {task.name or type(task).__name__}"
            )
        try:
            scheme.extend(name, **{"factor": extent[0], "trained": extent[1]} | values)
        except TypeError as error:
            raise ValueError(f"extend: {error}") from None
