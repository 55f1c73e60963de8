"""The loss after conversion to linear attention, by tokens, against softmax attention and against training from scratch.

A small Llama of bytes is trained with softmax attention for each seed. `isopos convert` converts it, a fifth of its tokens
for attention transfer and the rest on the next token. The same command trains models of random weights with the same linear
attention on as many tokens, and trains the model on with softmax attention. Batches of one seed are the same, so
differences are paired.

    python -m benchmarks.conversion --data TEXT --folder FOLDER

Cells that are in the folder are not computed again.
"""

import argparse
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from isopos.lab.commands.convert import TUNING, Options, run
from isopos.lab.data.corpora import Corpus, load_corpus
from isopos.lab.reports.intervals import Difference

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTH, BATCH, SCORED = 128, 8, 8192
RATE, TRANSFER_RATE = 3e-3, 3e-3  # peak learning rates of softmax attention, also trained on, and of attention transfer
TUNING_RATE = 6e-3  # on the next token, converted or from scratch: better for both than 3e-3, on seed 9 of a larger model
SHARE = 5  # the transfer has one step of so many
BASE_STEPS, STEPS, SEEDS = 300, (30, 90), (0, 1, 2)
SCHEMES = {  # and windows of softmax attention
    "keep:decay=retnet": ("keep:decay=retnet", 0),
    "keep:decay=retnet, window 16": ("keep:decay=retnet", 16),
    "permuteformer": ("permuteformer", 0),
}


def fresh(seed: int) -> Any:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = SIZES
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None))


def original(folder: Path, corpus: Corpus, seed: int, steps: int, more: int = 0) -> Path:
    """The folder of a model with softmax attention after `steps` updates from random weights, and `more` further ones."""
    path = folder / f"seed{seed}" / ((f"softmax-{steps}" if steps else "random") + f"-{more}" * bool(more))
    if path.exists():
        return path
    if more:
        from isopos.lab.tasks.conversion import read_model

        # on the batches of conversion's stage of the next token
        model = train(read_model(original(folder, corpus, seed, steps)), corpus, 2 * seed + 1, more, RATE)
    else:
        model = train(fresh(seed), corpus, 1_000_003 + seed, steps, RATE)  # other batches than those of conversion
    part = path.with_name(f".{path.name}.new")
    model.save_pretrained(part)
    part.rename(path)
    return path


def train(model: Any, corpus: Corpus, seed: int, steps: int, rate: float) -> Any:
    """Train a model on the next token, with a linear warmup and a cosine; returns it."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate, weight_decay=0.01)
    for step in range(1, steps + 1):
        warm = steps // 10
        left = 0.5 + 0.5 * math.cos(math.pi * (step - 1 - warm) / (steps - warm))
        optimizer.param_groups[0]["lr"] = rate * (step / warm if step <= warm else left)
        tokens, targets = corpus.batch(seed, step, BATCH, LENGTH)
        loss = F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def bits(model: Any, corpus: Corpus) -> float:
    """Bits per byte on held-out text."""
    total = count = 0.0
    for tokens, targets in corpus.windows(LENGTH, SCORED, BATCH):
        logits = model(tokens, use_cache=False).logits[:, -targets.shape[1] :]
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    return total / count / math.log(2)


def swapped(source: Path, scheme: str, window: int) -> Any:
    """The model with linear attention, and the weights of softmax attention."""
    from isopos.integrations.transformers import converted, linear_scheme
    from isopos.lab.tasks.conversion import read_model
    from isopos.spec import split_spec

    model = read_model(source)
    return converted(model, linear_scheme(model, *split_spec(scheme)), window or None)


def cell(source: Path, name: str, steps: int, seed: int, data: str, arm: str = "") -> float:
    """Bits per byte after `steps` updates in all, by the command; those of an arm are all on the next token."""
    scheme, window = SCHEMES[name]
    new = source.parent / re.sub(r"[^a-z0-9]+", "-", f"{name} {arm} {steps}")
    runs = new.with_name(f"{new.name}.runs")
    if not new.exists():
        transfer = 0 if arm else steps // SHARE
        options = Options(
            str(source), str(new), scheme=scheme, window=window, data=data, tokenizer="bytes", length=LENGTH, batch=BATCH,
            transfer_steps=transfer, transfer_rate=TRANSFER_RATE, steps=steps - transfer, learning_rate=TUNING_RATE,
            validation_tokens=SCORED, save_every=10**6, seed=seed, resume=runs.exists(),
        )  # fmt: skip
        if run(options, Console(quiet=True)):
            raise SystemExit(f"{new}: diverged")
    return json.loads((runs / TUNING / "result.json").read_text())["scores"]["bits/byte"]


def measure(folder: Path, corpus: Corpus, data: str, name: str, seed: int) -> dict[str, Any]:
    """Bits per byte of a scheme and a seed: of softmax attention, converted and from scratch, by the number of tokens."""
    from isopos.lab.tasks.conversion import read_model

    trained, untrained = (original(folder, corpus, seed, steps) for steps in (BASE_STEPS, 0))
    found = {"softmax": {0: bits(read_model(trained).eval(), corpus)}, "converted": {}, "scratch": {}}
    found["converted"][0] = bits(swapped(trained, *SCHEMES[name]).eval(), corpus)
    for steps in STEPS:
        tokens, more = steps * BATCH * LENGTH, original(folder, corpus, seed, BASE_STEPS, steps)
        found["softmax"][tokens] = bits(read_model(more).eval(), corpus)
        found["converted"][tokens] = cell(trained, name, steps, seed, data)
        found["scratch"][tokens] = cell(untrained, name, steps, seed, data, "scratch")
    return found


def rows(name: str, seeds: list[dict[str, Any]]) -> str:
    """The figures of a scheme as rows of a table."""
    lines = []
    for tokens in seeds[0]["converted"]:
        own, softmax = ([one[kind][tokens] for one in seeds] for kind in ("converted", "softmax"))
        cells = [name, f"{tokens:,}", f"{statistics.mean(own):.3f}", f"{statistics.mean(softmax):.3f}"]
        behind = Difference.paired([a - b for a, b in zip(own, softmax, strict=True)]).text("+.3f")
        if tokens:
            scratch = [one["scratch"][tokens] for one in seeds]
            ahead = Difference.paired([a - b for a, b in zip(own, scratch, strict=True)]).text("+.3f")
            cells += [f"{statistics.mean(scratch):.3f}", behind, ahead]
        else:
            cells += ["-", behind, "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, a scheme after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="a text")
    parser.add_argument("--folder", required=True, help="folder for models and runs")
    options = parser.parse_args()
    corpus = load_corpus(options.data, LENGTH)
    print("| attention | tokens | converted | softmax | from scratch | converted - softmax | converted - from scratch |")
    print("|---|---|---|---|---|---|---|")
    seeds: list[dict[str, Any]] = []
    for name in SCHEMES:
        seeds = [measure(Path(options.folder), corpus, options.data, name, seed) for seed in SEEDS]
        print(rows(name, seeds), flush=True)
    base = [one["softmax"][0] for one in seeds]
    tokens = BASE_STEPS * BATCH * LENGTH
    print(f"\nsoftmax attention, {tokens:,} tokens: {statistics.mean(base):.3f}, deviation {statistics.stdev(base):.3f}")


if __name__ == "__main__":
    main()
