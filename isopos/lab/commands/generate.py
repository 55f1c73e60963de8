"""`isopos generate`: text from a trained language model."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.commands import bounded
from isopos.lab.tasks import spec
from isopos.lab.tasks.task import require


@dataclass(frozen=True)
class Options:
    """Continue a prompt with the language model of a run; prints the text as it is generated."""

    run: Annotated[str, tyro.conf.Positional]  # Folder of one run: runs/NAME/rope-seed0.
    prompt: str = "The "  # Text to continue.
    tokens: int = 400  # Number of tokens to generate (bytes, words or pieces, as in training).
    temperature: float = 1.0
    """Temperature of sampling: below 1 sharpens the distribution, above 1 flattens it; 0 takes the most probable token."""
    top_p: float = 1.0  # Sample from the most probable tokens with this total probability.
    seed: int = 0  # Seed of sampling.


def run(options: Options, console: Console) -> int:
    """Print the prompt and its continuation."""
    text = generate(options)
    print(options.prompt, end="", flush=True)
    for piece in text:
        print(piece, end="", flush=True)
    print()
    return 0


def generate(options: Options) -> Iterator[str]:
    """Yield pieces of generated text. The prompt is processed at once, then one token is sampled at a time."""
    import torch

    from isopos.lab.data.tokenizers import Words, tokenizer_of
    from isopos.lab.runs import checkpoints
    from isopos.lab.tasks.decoding import pieces
    from isopos.models import Decoder

    folder, prompt, tokens = Path(options.run), options.prompt, options.tokens
    temperature, top_p = options.temperature, options.top_p
    bounded(options, tokens=10**9)
    require("tokens", tokens, "at least 1", tokens >= 1)
    require("seed", options.seed, "a number from 0 to 2^63 - 1", 0 <= options.seed < 2**63)
    require("temperature", temperature, "0 or a positive number", 0 <= temperature < float("inf"))
    require("top_p", top_p, "a probability above 0 and at most 1", 0 < top_p <= 1)
    require("prompt", "none", "at least one character", bool(prompt))
    require("prompt", repr(prompt), "text in UTF-8", prompt.isascii() or not any(0xD800 <= ord(c) < 0xE000 for c in prompt))
    recipe, model = checkpoints.load_run(folder)
    if not isinstance(model, Decoder):
        raise ValueError(f"run: expected a language model, got a model of the task {spec(recipe.task)}")
    tokenizer = tokenizer_of(folder)
    size = model.tokens.num_embeddings
    require("run", tokenizer.size, f"a tokenizer of the model's {size} tokens in {folder}", tokenizer.size == size)
    text = tokenizer.encode(prompt)
    require("prompt", repr(prompt), "at least one word", len(text) > 0)
    longest = model.scheme.max_length
    if longest is not None and len(text) + tokens > longest:
        raise ValueError(
            f"tokens: expected at most {longest - len(text)} after this prompt, since the scheme has {longest} positions"
        )
    start = torch.from_numpy(text)[None]
    apart = isinstance(tokenizer, Words) and not prompt[-1].isspace()  # whose pieces end with a space
    sampled = pieces(model, tokenizer, start, tokens, temperature, top_p, torch.Generator().manual_seed(options.seed))
    return itertools.chain([" "] * apart, sampled)
