"""One run: what is checked before any work, its training from start or checkpoint to result, and what its steps cost.

The batch of step n is a function of (seed, n) and weights that schemes share start equal: runs of one seed are paired.
"""

import copy
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isopos import laws
from isopos.lab.bench.timing import interleave
from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints
from isopos.lab.runs.files import write_json
from isopos.lab.runs.folders import EXAMPLES, Interrupted, Log, Result, create, fingerprint, read_rows, same_recipe
from isopos.lab.runs.locks import locked
from isopos.lab.tasks.build import build_scheme
from isopos.lab.tasks.task import Data
from isopos.lab.training import OnStep
from isopos.scheme import Scheme

if TYPE_CHECKING:
    from isopos.lab.training.trainer import Fitted

SHOWN = 5  # examples in a report


def usable_device(device: str) -> str:
    """The device, where auto is a GPU if there is one; or a ValueError where this torch cannot compute on it here."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        usable = torch.zeros(1, device=device).item() == 0
    except (RuntimeError, AssertionError):
        usable = False
    if not usable or torch.device(device).type not in ("cpu", "cuda") or device.startswith("cpu:"):
        raise ValueError(f"device: expected cpu, cuda or auto, got {device!r}, which this torch cannot use here")
    return device


def check_recipe(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with its device, and what a reader of its results should know before.

    Raises:
        ValueError: Where a number, the task, the device or the logger does not fit.
    """
    recipe.check()
    recipe = recipe.edit(device=usable_device(recipe.training.device))
    t = recipe.training
    device = torch.device(t.device)
    there = 1 if device.index is not None else torch.cuda.device_count()
    if device.type == "cuda" and t.devices > there:
        raise ValueError(f"devices: expected at most the {there} of {t.device}, got {t.devices}")
    if t.logger == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("logger: expected tensorboard, which is not installed: pip install tensorboard, or choose csv")
    notes = list(recipe.task.check(recipe))
    if recipe.model.attention_dropout and build_scheme(recipe).attention == "linear":
        notes.append(f"{recipe.scheme}: its linear attention forms no weights for attention_dropout to drop")
    return recipe, notes


def train(
    recipe: Recipe,
    data: Data,
    folder: Path,
    on_step: OnStep = lambda *row: None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Result | None:
    """Train, evaluate and save one run; with several processes the first one returns its result and the others nothing.

    A loss or gradient that is not finite ends the run with the status "diverged". A run that has a result returns it again.
    To `resume` is to go on from the last checkpoint of the folder, or from the start if there is none yet; to `overwrite`
    replaces the run that is there.

    Raises:
        ValueError: Before any work, where the folder exists, or is that of another recipe, or its checkpoint is damaged, or
            another process works in it.
        OSError: Where a checkpoint cannot be written.
        Interrupted: After SIGINT or SIGTERM, when a checkpoint of the last step is there.
    """
    first = is_first_process()
    with locked(folder) if first else nullcontext():
        return _train(recipe, data, folder, on_step, first=first, resume=resume, overwrite=overwrite)


def _train(
    recipe: Recipe, data: Data, folder: Path, on_step: OnStep, *, first: bool, resume: bool, overwrite: bool
) -> Result | None:
    if resume:
        same_recipe(folder, recipe)
        if (before := fingerprint(folder)) not in ("", data.sha256):
            raise ValueError(
                f"resume: expected the data of {folder}, sha256 {before[:12]}, got {data.sha256[:12]} in {data.name}; "
                "give it back its data or choose another --name"
            )
    elif first:
        create(folder, recipe, overwrite=overwrite)
    if first:
        data.save(folder)
        write_json(folder / "data.json", {"name": data.name, "sha256": data.sha256})
    if resume:
        read_rows(folder / "metrics.jsonl")  # that it can be read, also where nothing is left to do
    if resume and (result := Result.of(folder)) is not None:
        return result
    begin = checkpoints.newest(folder) if resume else None
    if begin is not None and begin.ended:
        fitted = None
    else:
        state = checkpoints.read(begin) if begin else None
        from isopos.lab.training import trainer  # imports Lightning, which takes seconds

        with Log(folder, begin.step if begin else 0) if first else nullcontext() as log:
            fitted = trainer.fit(recipe, data, folder, log, on_step, state)
    if not first:
        return None
    if resume:
        write_json(folder / "recipe.json", recipe.as_dict())  # of where it runs now
    if fitted is not None and fitted.stopped:
        last, done = checkpoints.newest(folder), f"interrupted after step {fitted.step}"
        remedy = f"the same command with --resume goes on from step {last.step if last else 0}"
        raise Interrupted(f"{done}; {remedy}", fitted.stopped)
    return _finish(recipe, data, folder, fitted)


def is_first_process() -> bool:
    """Whether this process is the first of a run, whoever started it: torchrun, SLURM, Lightning or nobody."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _finish(recipe: Recipe, data: Data, folder: Path, fitted: "Fitted | None") -> Result:
    """Evaluate and save the weights: the best of those that were validated while training, else the last."""
    status = fitted.status if fitted else "finished"
    chosen = checkpoints.best(folder) or (None if fitted else checkpoints.newest(folder))
    model = recipe.task.model(recipe).to(recipe.training.device)
    if status == "finished" and chosen is not None:
        checkpoints.fill(model, chosen)
    elif fitted is not None:
        model.load_state_dict(fitted.weights)
    model.eval()
    metrics = recipe.task.metrics
    scores: dict[str, float | None] = {metric.title: None for metric in metrics}
    if status == "finished":
        scores = data.evaluate(model, recipe, metrics)
        if any(value is not None and not math.isfinite(value) for value in scores.values()):
            status, scores = "diverged in validation", dict.fromkeys(scores)
    held = "-"
    schemes = [scheme for scheme in copy.deepcopy(model.scheme).cpu().modules() if isinstance(scheme, Scheme)]
    own = [scheme for scheme in schemes if scheme.choices["attention"] == scheme.attention]
    if status == "finished" and own:
        reports = [laws.check(scheme) for scheme in own]
        broken = dict.fromkeys(law for report in reports for law in report.broken)
        held = "yes" if all(report.holds for report in reports) else f"no ({', '.join(broken)})"
    result = Result(
        status=status,
        scores=scores,
        rate=fitted.rate if fitted else 0.0,
        parameters=sum(p.numel() for p in model.parameters()),
        choices=model.scheme.choices,
        laws=held,
    )
    checkpoints.save_weights(model, folder)
    if status == "finished" and (examples := data.examples(model, recipe, SHOWN)):
        write_json(folder / EXAMPLES, examples)
    result.save(folder)
    return result


def step_times(recipe: Recipe, data: Data, schemes: Mapping[str, str], rounds: int) -> Iterator[dict[str, float]]:
    """Seconds of forward and backward of the same samples by the names of `schemes`, a round; one before warms up."""
    workloads = {name: _step(recipe.edit(scheme=scheme), data) for name, scheme in schemes.items()}
    yield from interleave(workloads, rounds, recipe.training.device)


def answer_times(recipe: Recipe, data: Data, schemes: Mapping[str, str], rounds: int) -> Iterator[dict[str, float]]:
    """Seconds of the forward pass of one sample, the same for all, by the names of `schemes`, a round, as `step_times`."""
    workloads = {name: _answer(recipe.edit(scheme=scheme, batch=1), data) for name, scheme in schemes.items()}
    yield from interleave(workloads, rounds, recipe.training.device)


def _answer(recipe: Recipe, data: Data) -> Callable[[], None]:
    device, narrow = recipe.training.device, recipe.training.precision == "bfloat16"
    batch = [tensor.to(device) for tensor in data.batch(recipe, 1)]
    model = recipe.task.model(recipe).to(device).eval()

    def answer() -> None:
        with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=narrow):
            data.loss(model, *batch)

    return answer


def _step(recipe: Recipe, data: Data) -> Callable[[], None]:
    device, narrow = recipe.training.device, recipe.training.precision == "bfloat16"
    batch = [tensor.to(device) for tensor in data.batch(recipe, 1)]
    model = recipe.task.model(recipe).to(device)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=narrow):
            loss = data.loss(model, *batch)
        loss.backward()

    return step
