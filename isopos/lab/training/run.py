"""One run: its model, its training from start or checkpoint to result, and its weights afterwards.

The batch of step n is a function of (seed, n) and weights that schemes share start equal: runs of one seed are paired.
"""

import copy
import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from isopos import laws
from isopos.lab.data.corpora import Corpus
from isopos.lab.recipes import Recipe, split_spec
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import Interrupted, Log, create, recipe_of, same_recipe, write_json
from isopos.lab.tasks.perplexity import length_table
from isopos.models import TOKEN_STD, Decoder
from isopos.schemes import REGISTRY, Scheme, build, options_of

if TYPE_CHECKING:
    from isopos.lab.training.trainer import Fitted

__all__ = ["LENGTHS", "Result", "build_model", "build_scheme", "evaluate", "is_first_process", "load", "load_run", "train"]

BITS = 1 / math.log(2)
LENGTHS = (1, 2, 4)  # evaluated at these multiples of the training length

OnStep = Callable[[int, float, float], None]


@dataclass(frozen=True)
class Result:
    """What a run came to. Bits per byte by multiple of the training length: None where it cannot be evaluated."""

    status: str
    bits_per_byte: dict[str, float | None]
    tokens_per_second: float
    parameters: int
    choices: dict[str, str]
    laws: str


def build_scheme(recipe: Recipe) -> Scheme:
    """The scheme of a recipe, with the options that fit its text and seed."""
    if recipe.model_dim % recipe.heads:
        raise ValueError(f"model_dim: expected a multiple of the {recipe.heads} heads, got {recipe.model_dim}")
    name, options = split_spec(recipe.scheme)
    fitting = {"learned": {"length": str(recipe.length)}, "sinusoidal": {"scale": str(TOKEN_STD)}}
    fitting["cosformer"] = {"length": str(max(LENGTHS) * recipe.length)}
    if name in REGISTRY and "seed" in options_of(name):
        fitting[name] = fitting.get(name, {}) | {"seed": str(recipe.seed)}
    options = fitting.get(name, {}) | options
    return build(name, recipe.model_dim // recipe.heads, recipe.heads, options)


def build_model(recipe: Recipe, device: str | None = None) -> Decoder:
    """The model of a recipe, initialised from its seed; what it shares with models of other schemes starts equal."""
    scheme = build_scheme(recipe)
    options: dict[str, Any] = {name: getattr(recipe, name) for name in ("dropout", "cutoffs", "recompute")}
    options["hidden_dim"] = recipe.hidden_dim or None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Decoder(recipe.vocabulary or 256, recipe.model_dim, recipe.layers, scheme, **options)
    return model.to(device or recipe.device)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats a token."""
    return model(tokens, targets=targets)


def train(
    recipe: Recipe,
    source: Corpus,
    folder: Path,
    on_step: OnStep = lambda *row: None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Result | None:
    """Train, evaluate and save one run; with several processes the first one returns its result and the others nothing.

    A loss or gradient that is not finite ends the run with the status "diverged". A run that has a result returns it again.

    Args:
        recipe: With the vocabulary of the source.
        source: What to train on.
        folder: Of the run.
        on_step: Hears of each step, its loss in bits a token, and the tokens a second.
        resume: Whether to go on from the last checkpoint of the folder, or from the start if there is none yet.
        overwrite: Whether to replace a run in the folder.

    Raises:
        ValueError: Before any work, where the folder exists, or is that of another recipe, or its checkpoint is damaged.
        OSError: Where a checkpoint cannot be written.
        Interrupted: After SIGINT or SIGTERM, when a checkpoint of the last step is there.
    """
    first = is_first_process()
    if resume:
        same_recipe(folder, recipe)
        _same_text(folder, source)
    elif first:
        create(folder, recipe, overwrite=overwrite)
    if first:
        source.save_tokenizer(folder)
        write_json(folder / "text.json", {"name": source.name, "sha256": source.sha256})
    if resume and (folder / "result.json").exists():
        return Result(**json.loads((folder / "result.json").read_text()))
    begin = checkpoints.newest(folder) if resume else None
    if begin is not None and begin.ended:
        fitted = None
    else:
        state = checkpoints.load(begin) if begin else None
        from isopos.lab.training import trainer  # imports Lightning, which takes seconds

        with Log(folder, begin.step if begin else 0) if first else nullcontext() as log:
            fitted = trainer.fit(recipe, source, folder, log, on_step, state)
    if not first:
        return None
    if resume:
        write_json(folder / "recipe.json", recipe.as_dict())  # of where it runs now
    if fitted is not None and fitted.stopped:
        raise Interrupted(_advice(folder, fitted.step), fitted.stopped)
    return _finish(recipe, source, folder, fitted)


def _same_text(folder: Path, source: Corpus) -> None:
    path = folder / "text.json"
    before = json.loads(path.read_text())["sha256"] if path.exists() else source.sha256
    if before != source.sha256:
        raise ValueError(
            f"resume: expected the text of {folder}, sha256 {before[:12]}, got {source.sha256[:12]} in {source.name}; "
            "give it back its text or choose another --name"
        )


def is_first_process() -> bool:
    """Whether this process is the first of a run, whoever started it: torchrun, SLURM, Lightning or nobody."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _advice(folder: Path, step: int) -> str:
    last = checkpoints.newest(folder)
    return f"interrupted after step {step}; the same command with --resume goes on from step {last.step if last else 0}"


def _finish(recipe: Recipe, source: Corpus, folder: Path, fitted: "Fitted | None") -> Result:
    """Evaluate and save the weights: the best of those that were validated while training, else the last."""
    status = fitted.status if fitted else "finished"
    chosen = checkpoints.best(folder) or (None if fitted else checkpoints.newest(folder))
    model = build_model(recipe)
    if status == "finished" and chosen is not None:
        model.load_state_dict(checkpoints.load(chosen)["model"])
    elif fitted is not None:
        model.load_state_dict(fitted.weights)
    model.eval()
    bits: dict[str, float | None] = {str(m): None for m in LENGTHS}
    if status == "finished":
        bits = {str(m): evaluate(model, recipe, source, m * recipe.length) for m in LENGTHS}
        if any(value is not None and not math.isfinite(value) for value in bits.values()):
            status, bits = "diverged in validation", dict.fromkeys(bits)
    parameters = sum(p.numel() for p in model.parameters())
    verdict = _laws(model) if status == "finished" else "-"
    rate = fitted.rate if fitted else 0.0
    result = Result(status, bits, rate, parameters, model.scheme.choices, verdict)
    save_model(model, str(folder / "model.safetensors"))
    write_json(folder / "result.json", vars(result))  # with it the run counts as ended
    return result


def _laws(model: Decoder) -> str:
    """Whether the laws hold for the trained scheme."""
    report = laws.check(copy.deepcopy(model.scheme).cpu())
    return "yes" if report.holds else f"no ({', '.join(report.broken)})"


def evaluate(model: Decoder, recipe: Recipe, corpus: Corpus, length: int) -> float | None:
    """Bits per byte on windows of `length` of the held-out text; None where the scheme or the text is too short for it."""
    (row,) = length_table(model, corpus, length, multiples=(1,), limit=recipe.validation_tokens or None)
    return row.score.bits_per_byte if row.score else None


def load_run(folder: Path) -> tuple[Recipe, Decoder]:
    """The recipe and the trained model of a run, on the CPU.

    Raises:
        ValueError: Where the folder holds no run, or one without weights yet.
    """
    recipe = replace(recipe_of(folder), device="cpu")
    weights = folder / "model.safetensors"
    if not weights.exists():
        raise ValueError(f"run: expected {weights}, which a run has when it ends; go on with it by isopos train --resume")
    model = build_model(recipe)
    load_model(model, str(weights))
    return recipe, model.eval()


def load(run: str | Path) -> Decoder:
    """The trained model of a run, on the CPU, from safetensors and recipe.json: nothing is unpickled.

    Raises:
        ValueError: Where the folder holds no run, or one without weights yet.
    """
    return load_run(Path(run))[1]
