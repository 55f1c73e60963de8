"""One run: checks before it starts, training from start or checkpoint to result, and the time of its steps.

The batch of step n is a function of (seed, n), and weights that schemes share start equal: runs of one seed are paired. Only
schemes with wider queries and keys, and other kinds of attention, draw other initial weights after these.
"""

import copy
import importlib.util
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isopos import laws
from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints
from isopos.lab.runs.files import write_json
from isopos.lab.runs.folders import (
    EXAMPLES,
    Interrupted,
    Log,
    Result,
    aside_path,
    check_same_recipe,
    create,
    data_fingerprint,
    read_rows,
    remove_folder,
    restore,
)
from isopos.lab.runs.locks import locked
from isopos.lab.tasks.attentions import BASELINES
from isopos.lab.tasks.build import build_scheme, machine_memory
from isopos.lab.tasks.task import Data
from isopos.lab.timing import interleave, peak_memory
from isopos.lab.training import OnStep
from isopos.models import PerLayer
from isopos.scheme import Scheme

if TYPE_CHECKING:
    from isopos.lab.training.trainer import Fitted

EXAMPLE_COUNT = 5  # examples in a report
SHORT = 64  # tokens of a step whose memory is too little to matter


def usable_device(device: str) -> str:
    """Resolve auto to a GPU if there is one; ValueError if PyTorch cannot compute on the device here."""
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
    """Resolve a recipe's device; return it with notes for readers of its results.

    Raises:
        ValueError: If a number, the task, the device or the logger does not fit.
    """
    recipe.check()
    recipe = recipe.edit(device=usable_device(recipe.training.device))
    t = recipe.training
    device = torch.device(t.device)
    available = 1 if device.index is not None else torch.cuda.device_count()
    if device.type == "cuda" and t.devices > available:
        raise ValueError(f"devices: expected at most the {available} of {t.device}, got {t.devices}")
    if t.logger == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("logger: expected tensorboard, which is not installed: pip install tensorboard, or choose csv")
    notes = list(recipe.task.check(recipe))
    if t.sequence_parallel > 1:
        check_over(recipe)
    if recipe.model.attention_dropout and build_scheme(recipe).attention == "linear":
        notes.append(f"{recipe.scheme}: its linear attention forms no weights for attention_dropout to drop")
    return recipe, notes


def check_over(recipe: Recipe) -> None:
    """ValueError for a scheme whose attention cannot run over a group of processes."""
    scheme, t = build_scheme(recipe), recipe.training
    if scheme.choices["attention"] in BASELINES:
        raise ValueError(
            f"sequence_parallel: expected linear or softmax attention, got {scheme.choices['attention']}, which one process "
            "computes"
        )
    each = scheme.each if isinstance(scheme, PerLayer) else (scheme,)
    ordered = [
        part for part in each if part.attention == "linear" or part.phases or part.group.refers_to_rows or part.outside
    ]
    if t.sequence_keys == "zigzag" and ordered:
        raise ValueError(
            "sequence_keys: expected gather or ring for linear attention, trees, class tokens and content-dependent phases, "
            "which need contiguous shards, got zigzag"
        )


def check_memory(recipe: Recipe) -> None:
    """Raise a ValueError if the activations that blocks keep for the backward pass exceed the memory of a process."""
    t, m = recipe.training, recipe.model
    units = recipe.task.size(recipe) / (t.accumulate * t.devices * t.nodes)
    tensors = 1 if m.recompute else 8  # at least, per block: input, q, k, v, and the wider inside of the feed-forward
    need, available = 4 * units * m.model_dim * m.layers * tensors, _memory(t.device, t.devices)
    if need > available:
        raise ValueError(
            f"batch: expected one whose {t.accumulate} parts fit into the {available / 2**30:.1f} GiB of memory, "
            f"got {t.batch}, which needs more than {need / 2**30:,.1f} GiB in each; choose a smaller batch, or a larger "
            "--accumulate"
        )


def _memory(device: str, devices: int) -> float:
    """Bytes of memory that each process may use; infinite where the system does not tell."""
    return torch.cuda.mem_get_info(device)[1] if torch.device(device).type == "cuda" else machine_memory() / devices


def train(
    recipe: Recipe,
    data: Data,
    folder: Path,
    on_step: OnStep = lambda *row: None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Result | None:
    """Train, evaluate and save one run. The first process returns the result, other processes None.

    A loss or gradient that is not finite ends the run with the status "diverged". The result of an ended run is returned.

    Args:
        resume: Continue from the last checkpoint in the folder, or from the start if there is none.
        overwrite: Replace the run in the folder.

    Raises:
        ValueError: Before training, if the folder exists, or is of another recipe, its checkpoint is damaged, or another
            process uses it.
        OSError: If a checkpoint cannot be written.
        Interrupted: After SIGINT or SIGTERM, once a checkpoint of the last step is written.
    """
    first = is_first_process()
    with locked(folder) if first else nullcontext():
        if resume:
            _check_resumed(recipe, data, folder)
        elif first:
            create(folder, recipe, overwrite=overwrite)
        try:
            result = _train(recipe, data, folder, on_step, first=first, resume=resume)
        except BaseException:
            if first and not resume and checkpoints.newest(folder) is None:
                restore(folder)  # the run that was to be replaced
            raise
        if first:
            remove_folder(aside_path(folder))
        return result


def _check_resumed(recipe: Recipe, data: Data, folder: Path) -> None:
    """Raise a ValueError if a run has another recipe or other data."""
    check_same_recipe(folder, recipe)
    if (before := data_fingerprint(folder)) not in ("", data.sha256):
        raise ValueError(
            f"resume: expected the data of {folder}, sha256 {before[:12]}, got {data.sha256[:12]} in {data.name}; "
            "give it back its data or choose another --name"
        )


def _train(recipe: Recipe, data: Data, folder: Path, on_step: OnStep, *, first: bool, resume: bool) -> Result | None:
    if first:
        data.save(folder)
        write_json(folder / "data.json", {"name": data.name, "sha256": data.sha256})
    if resume:
        read_rows(folder / "metrics.jsonl")  # raises if it is damaged, even if the run has ended
    if resume and (result := Result.read(folder)) is not None:
        return result
    last = checkpoints.newest(folder) if resume else None
    if last is not None and last.ended:
        fitted = None
    else:
        state = checkpoints.read_content(last) if last else None
        from isopos.lab.training import trainer  # imports Lightning, which takes seconds

        with Log(folder, last.step if last else 0) if first else nullcontext() as log:
            fitted = trainer.fit(recipe, data, folder, log, on_step, state)
    if not first:
        return None
    if resume:
        write_json(folder / "recipe.json", recipe.as_dict())  # with its present device
    if fitted is not None and fitted.stopped:
        last = checkpoints.newest(folder)
        remedy = f"the same command with --resume goes on from step {last.step if last else 0}"
        raise Interrupted(f"interrupted after step {fitted.step}; {remedy}", fitted.stopped)
    return _finish(recipe, data, folder, fitted)


def is_first_process() -> bool:
    """Whether this process is the first of a run started by torchrun, SLURM or Lightning, or the only one."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _finish(recipe: Recipe, data: Data, folder: Path, fitted: "Fitted | None") -> Result:
    """Evaluate and save the weights: those with the best validation during training, else the last."""
    status = fitted.status if fitted else "finished"
    chosen = checkpoints.best(folder) or (None if fitted else checkpoints.newest(folder))
    model = recipe.task.model(recipe).to(recipe.training.device)
    if status == "finished" and chosen is not None:
        checkpoints.load_checkpoint(model, chosen)
    elif fitted is not None:
        model.load_state_dict(fitted.weights)
    model.eval()
    metrics = recipe.task.metrics
    scores: dict[str, float | None] = {metric.title: None for metric in metrics}
    if status == "finished":
        scores = data.evaluate(model, recipe, metrics)
        if any(value is not None and not math.isfinite(value) for value in scores.values()):
            status, scores = "diverged in validation", dict.fromkeys(scores)
    hold = "-"
    schemes = [scheme for scheme in copy.deepcopy(model.scheme).cpu().modules() if isinstance(scheme, Scheme)]
    schemes = [scheme for scheme in schemes if scheme.choices["attention"] == scheme.attention]
    if status == "finished" and schemes:
        reports = [laws.check(scheme) for scheme in schemes]
        failed = dict.fromkeys(law for report in reports for law in report.broken)
        hold = "yes" if all(report.holds for report in reports) else f"no ({', '.join(failed)})"
    result = Result(
        status=status,
        scores=scores,
        rate=fitted.rate if fitted else 0.0,
        parameters=sum(p.numel() for p in model.parameters()),
        choices=model.scheme.choices,
        laws=hold,
    )
    checkpoints.save_weights(model, folder)
    if status == "finished" and (examples := data.examples(model, recipe, EXAMPLE_COUNT)):
        write_json(folder / EXAMPLES, examples)
    result.save(folder)
    return result


def step_times(recipe: Recipe, data: Data, schemes: Mapping[str, str], rounds: int) -> Iterator[dict[str, float]]:
    """Time forward and backward passes on the same batch; yield seconds by the names of `schemes`, a round each."""
    workloads = {name: _workload(recipe.edit(scheme=scheme), data, True) for name, scheme in schemes.items()}
    yield from interleave(workloads, rounds, recipe.training.device)


def answer_times(recipe: Recipe, data: Data, schemes: Mapping[str, str], rounds: int) -> Iterator[dict[str, float]]:
    """Time forward passes of the same sample; yield seconds by the names of `schemes`, a round each."""
    workloads = {name: _workload(recipe.edit(scheme=scheme, batch=1), data, False) for name, scheme in schemes.items()}
    yield from interleave(workloads, rounds, recipe.training.device)


def step_memory(recipe: Recipe, data: Data, schemes: Mapping[str, str], rounds: int) -> Iterator[dict[str, float]]:
    """Peak memory of a forward and backward pass by the names of `schemes`, in MiB above model and batch, in each round.

    Each is measured in a process of its own, so that no freed memory is used again.
    """
    recipes = {name: recipe.edit(scheme=scheme) for name, scheme in schemes.items()}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for _ in range(rounds):
            yield {name: processes.submit(_step_memory, one, data).result() for name, one in recipes.items()}


def _step_memory(recipe: Recipe, data: Data) -> float:
    """Peak memory of a forward and backward pass in a new process, in MiB above model, batch and libraries."""
    device = recipe.training.device
    if "length" in recipe.names:  # the first step loads libraries, 10 to 40 MiB
        short = recipe.edit(batch=1, length=min(SHORT, recipe.as_dict()["length"]))
        _workload(short, short.task.load(short), True)()
    run = _workload(recipe, data, True)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory(device)
    run()
    return (peak_memory(device) - before) / 2**20


def _workload(recipe: Recipe, data: Data, gradients: bool) -> Callable[[], None]:
    device, bfloat16 = recipe.training.device, recipe.training.precision == "bfloat16"
    batch = [tensor.to(device) for tensor in data.batch(recipe, 1)]
    model = recipe.task.model(recipe).to(device).train(gradients)

    def run() -> None:
        if gradients:
            model.zero_grad()
        with torch.set_grad_enabled(gradients), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bfloat16):
            loss = data.loss(model, *batch)
        if gradients:
            loss.backward()

    return run
