"""Conversion of a model of transformers from softmax to linear attention, in two stages: a run of this task for each.

"transfer" trains each layer of linear attention to return what the softmax attention of the original does; "tuning" then
trains all weights on the next token. `isopos convert` makes both recipes.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from isopos.lab.data import corpora
from isopos.lab.data.tokenizers import Tokenizer
from isopos.lab.runs.files import read_json
from isopos.lab.tasks.decoding import unscorable
from isopos.lab.tasks.task import Data, Metric, Recipe, Scored, Task, View, evaluation, require
from isopos.scheme import Scheme
from isopos.spec import split_spec


@dataclass(frozen=True)
class Conversion(Task):
    """Settings of one stage."""

    source: str = ""  # Folder of the model that is converted.
    stage: Literal["transfer", "tuning"] = "transfer"
    window: int = 0  # Nearest keys that softmax attention sees in addition to linear attention; 0: none.
    data: str = ""  # Text, as in the task language.
    tokenizer: Literal["model", "bytes"] = "model"  # The tokenizer in the folder, or bytes as tokens 0 to 255.
    length: int = 256  # Tokens of a window of text.
    validation_tokens: int = 32768  # Largest number of held-out tokens that are scored; 0: all.
    start: str = ""  # Run with the initial weights of this stage; empty: the original's weights.

    unit = "tokens"
    limits = (("length", 2, 10**9), ("window", 0, 10**9), ("validation_tokens", 0, 10**15))
    metrics = (Metric("bits/byte", "bits_per_byte"), Metric("distance", "distance", note="of layers to the original's"))

    @property
    def loss_unit(self) -> str:
        return "nats/token" if self.stage == "tuning" else "distance"

    def size(self, recipe: Recipe) -> int:
        return recipe.training.batch * self.length

    def model(self, recipe: Recipe) -> "Converted":
        from isopos.integrations.transformers import converted, linear_scheme

        original = read_model(Path(self.source))
        name, options = split_spec(recipe.scheme)
        student = converted(original, linear_scheme(original, name, options), self.window or None)
        return Converted(student, original if self.stage == "transfer" else None).train()

    def check(self, recipe: Recipe) -> list[str]:
        few = 0 < self.validation_tokens < self.length
        require("validation_tokens", self.validation_tokens, f"0, or at least the {self.length} of a window", not few)
        model = self.model(recipe)
        longest = model.scheme.max_length
        require(
            "length", self.length, f"at most the {longest} positions of the scheme", self.length <= (longest or math.inf)
        )
        with evaluation(model):
            model.student(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        return []

    def origin(self, recipe: Recipe) -> Path | None:
        return Path(self.start) if self.start else None

    def reinitialised(self, recipe: Recipe) -> tuple[str, ...]:
        return ()

    def load(self, recipe: Recipe, console: Console | None = None, run: Path | None = None) -> "ConversionText":
        chosen = "bytes" if self.tokenizer == "bytes" else Pretrained(Path(self.source))
        return ConversionText(self, corpora.load_corpus(self.data, self.length, tokenizer=chosen, console=console))


class Converted(nn.Module):
    """A model with linear attention, and in attention transfer its original, which is no part of the state.

    Args:
        student: What `isopos.integrations.transformers.converted` returns.
        original: The model of before; None to train all weights.
    """

    def __init__(self, student: Any, original: Any = None):
        from isopos.integrations.transformers import transferred

        super().__init__()
        self.student = student
        self._original = (original,)
        if original is not None:
            original.eval().requires_grad_(False)
            student.requires_grad_(False)
            for weight in transferred(student):
                weight.requires_grad_(True)

    @property
    def scheme(self) -> Any:
        """The scheme of linear attention."""
        return next(module for module in self.student.modules() if isinstance(module, Scheme))

    @property
    def original(self) -> Any:
        """The model of before, on the device of this one; None after transfer."""
        layer = self._original[0]
        return None if layer is None else layer.to(next(self.student.parameters()).device)

    def distances(self, tokens: Tensor) -> Tensor:
        """How far the attention of each layer is from the original's ``[layers]``."""
        from isopos.integrations.transformers import distances

        return distances(self.original, self.student, tokens)


class ConversionText(Data):
    """A text for both stages. Its fingerprint has the weights of the model, so that none goes on with others."""

    def __init__(self, task: Conversion, corpus: corpora.Corpus):
        self.task, self.corpus, self.name = task, corpus, corpus.name
        digest = hashlib.sha256(corpus.sha256.encode())
        for path in sorted(Path(task.source).glob("*.safetensors")):
            with path.open("rb") as weights:
                digest.update(hashlib.file_digest(weights, "sha256").digest())
        self.sha256 = digest.hexdigest()
        self.summary = f"{len(corpus.train)} + {len(corpus.validation)} tokens"
        self.splits = ("validation", "test") if len(corpus.test) else ("validation",)

    def batch(self, recipe: Recipe, step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, ...]:
        tuning = self.task.stage == "tuning"  # with other batches than transfer
        return self.corpus.batch(2 * recipe.seed + tuning, step, recipe.training.batch, self.task.length, rank, ranks)

    def loss(self, model: Any, *batch: Tensor) -> Tensor:
        tokens, targets = batch
        return model.distances(tokens).mean() if model.original is not None else _nats(model.student, tokens, targets)

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        if reason := unscorable(model, self.corpus, self.task.length, view.split, self._limit(view)):
            return Scored(reason=reason)
        figures = self.figures(model.student, recipe.training.batch, view)
        if model.original is not None:
            batches = self._held_out(model.student, recipe.training.batch, view)
            figures["distance"] = _mean((model.distances(tokens).mean().item(), targets) for tokens, targets in batches)
        return Scored(figures)

    def figures(self, model: Any, count: int, view: View) -> dict[str, float]:
        """Nats per token and bits per byte of a model of transformers on held-out text, `count` windows at once."""
        nats = _mean((_nats(model, *batch).item(), batch[1]) for batch in self._held_out(model, count, view))
        return {"nats": nats, "bits_per_byte": nats / self.corpus.bytes_per_token(view.split) / math.log(2)}

    def _limit(self, view: View) -> int | None:
        return (self.task.validation_tokens if view.limit < 0 else view.limit) or None

    def _held_out(self, model: Any, count: int, view: View) -> Iterator[tuple[Tensor, Tensor]]:
        device = next(model.parameters()).device
        for tokens, targets in self.corpus.windows(self.task.length, self._limit(view), count, view.split):
            yield tokens.to(device), targets.to(device)


def _mean(batches: Iterable[tuple[float, Tensor]]) -> float:
    """The mean of means of batches, each weighted by the number of its targets."""
    values, sizes = zip(*((value, targets.numel()) for value, targets in batches), strict=True)
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def _nats(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per token of the last ones, as many as there are targets."""
    logits = model(tokens, use_cache=False).logits[:, -targets.shape[1] :]
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Pretrained(Tokenizer):
    """The tokenizer in a folder of transformers, without special tokens around the text."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

        files = sorted(path for path in folder.glob("*") if "token" in path.name or path.name.startswith("vocab"))
        if not files:
            raise ValueError(
                f"tokenizer: expected one in {folder}, got none; put it there, or give --tokenizer bytes if it is of bytes"
            )
        self.folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"tokenizer: expected one in {folder}: {' '.join(str(error).split())}") from None
        self.size = len(self._tokenizer)
        self._digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)

    def piece(self, token: int) -> bytes:
        return self._tokenizer.decode([token]).encode()

    def settings(self) -> dict[str, Any]:
        return {"kind": "transformers", "sha256": self._digest}

    def model(self) -> Any:
        return self._tokenizer.backend_tokenizer


def read_model(folder: Path) -> Any:
    """The causal language model in a folder of transformers, in float32 on the CPU.

    Raises:
        ValueError: If there is none, or one that has a scheme of isopos or linear attention already.
    """
    try:
        config = read_json(folder / "config.json", dict[str, Any], "save the model again")
    except OSError:
        raise ValueError(f"folder: expected a saved model of transformers, got {folder} without a config.json") from None
    if config.get("isopos") is not None or config.get("model_type") == "isopos":
        raise ValueError(f"folder: expected a model with positions and softmax attention of its own, got {folder} of isopos")
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # without tables of weights, which the error sums up
    try:
        options = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        model, info = loaded
        saved = config.get("architectures") or [type(model).__name__]
        if not info["missing_keys"] and type(model).__name__ in saved:
            return model
        missing = info["missing_keys"]
        reason = f"there is no weight {min(missing)}" if missing else f"it is a {', '.join(saved)}"
    except Exception as error:  # transformers, safetensors and huggingface_hub have classes of their own
        first = next(filter(str.strip, str(error).replace("\\n", "\n").splitlines()), type(error).__name__)
        reason = "weights have other sizes" if "ignore_mismatched_sizes" in first else first.strip()
    finally:
        logging.set_verbosity(before)
    raise ValueError(f"folder: expected a causal language model in {folder}, whose config.json and weights agree: {reason}")
