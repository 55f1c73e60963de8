"""Training of one recipe: a plain loop, laid out so that an engine can take its place.

The batch of step n is a pure function of (seed, n) and weights that schemes share start equal: runs of one seed are paired.
"""

import copy
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from isopos import laws
from isopos.lab.corpora import Corpus
from isopos.lab.recipes import Recipe, split_spec
from isopos.models import TOKEN_STD, Decoder
from isopos.schemes import REGISTRY, Scheme, build, options_of

__all__ = ["LENGTHS", "Result", "build_model", "build_scheme", "evaluate", "load_run", "train"]

BITS = 1 / math.log(2)
LENGTHS = (1, 2, 4)  # evaluated at these multiples of the training length
LOG_EVERY = 10

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


def build_model(recipe: Recipe) -> Decoder:
    """The model of a recipe, initialised from its seed; what it shares with models of other schemes starts equal."""
    scheme = build_scheme(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Decoder(256, recipe.model_dim, recipe.layers, scheme).to(recipe.device)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats a byte."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(recipe: Recipe, text: Corpus, folder: Path, on_step: OnStep) -> Result:
    """Train, evaluate and save one run; rows go to metrics.jsonl as they come.

    A loss or gradient that is not finite ends the run with the status "diverged".
    """
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe.as_dict(), indent=1) + "\n")
    model = build_model(recipe)
    with (folder / "metrics.jsonl").open("w") as log:
        status, done, seconds = _fit(model, recipe, text, log, on_step)
        bits: dict[str, float | None] = {str(m): None for m in LENGTHS}
        if status == "finished":
            bits = {str(m): evaluate(model, recipe, text, m * recipe.length) for m in LENGTHS}
            if any(value is not None and not math.isfinite(value) for value in bits.values()):
                status, bits = "diverged in validation", dict.fromkeys(bits)
            _write(log, step=recipe.steps, validation_bits_per_byte=bits)
    parameters = sum(p.numel() for p in model.parameters())
    verdict = _laws(model) if status == "finished" else "-"
    result = Result(status, bits, done / seconds, parameters, model.scheme.choices, verdict)
    save_model(model, str(folder / "model.safetensors"))
    part = folder / "result.json.part"
    part.write_text(json.dumps(vars(result), indent=1) + "\n")
    os.replace(part, folder / "result.json")  # with it the run counts as ended
    return result


def _fit(model: Decoder, recipe: Recipe, text: Corpus, log: TextIO, on_step: OnStep) -> tuple[str, int, float]:
    """Status, tokens trained on and seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, recipe.steps))
    begun, done, seconds = time.perf_counter(), 0, 0.0
    recent: list[float] = []
    for step in range(1, recipe.steps + 1):
        tokens, targets = (x.to(recipe.device) for x in text.batch(recipe.seed, step, recipe.batch, recipe.length))
        loss = loss_of(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        value, finite = loss.item(), bool(torch.isfinite(loss) & torch.isfinite(norm))
        if finite:
            optimizer.step()
            schedule.step()
        done, seconds = step * recipe.batch * recipe.length, time.perf_counter() - begun
        recent.append(value)
        if step % LOG_EVERY == 0 or step in (1, recipe.steps) or not finite:
            mean = statistics.fmean(recent) * BITS  # of the steps since the last row: a curve with less noise
            _write(log, step=step, loss=_number(value), bits_per_byte=_number(mean))
            recent.clear()
        on_step(step, value * BITS, done / seconds)
        if not finite:
            return f"diverged at step {step}", done, seconds
    return "finished", done, seconds


def _laws(model: Decoder) -> str:
    """Whether the laws hold for the trained scheme."""
    report = laws.check(copy.deepcopy(model.scheme).cpu())
    return "yes" if report.holds else f"no ({', '.join(report.broken)})"


def _share(step: int, steps: int) -> float:
    """Of the peak learning rate: a linear warm-up over a tenth of the steps, then a cosine to zero."""
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def _number(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def _write(log: TextIO, **row: object) -> None:
    log.write(json.dumps(row) + "\n")
    log.flush()


@torch.no_grad()
def evaluate(model: Decoder, recipe: Recipe, text: Corpus, length: int) -> float | None:
    """Bits per byte on windows of `length` of the held-out tail; None where the scheme or the tail is too short for it."""
    longest = model.scheme.max_length
    if longest is not None and length > longest:
        return None
    total = count = 0.0
    for tokens, targets in text.windows(length, recipe.validation_bytes, max(1, 4096 // length)):
        loss = loss_of(model, tokens.to(recipe.device), targets.to(recipe.device))
        total, count = total + loss.item() * tokens.numel(), count + tokens.numel()
    return total / count * BITS if count else None


def load_run(folder: Path) -> tuple[Recipe, Decoder]:
    """The recipe and the trained model of a run, on the CPU."""
    recipe = Recipe(**json.loads((folder / "recipe.json").read_text()) | {"device": "cpu"})
    model = build_model(recipe)
    load_model(model, str(folder / "model.safetensors"))
    return recipe, model.eval()
