"""`isopos generate`: text from a trained language model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.tasks import spec

__all__ = ["Generate", "generate", "run"]


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with the language model of a run, and print the text as it comes."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of one run: runs/NAME/rope-seed0."""
    prompt: str = "The "
    """Text to continue."""
    tokens: int = 400
    """How many to generate: bytes, words or pieces, as the run was trained."""
    temperature: float = 1.0
    """Below 1 sharpens the model's distribution, above 1 flattens it; 0 takes the most probable token."""
    top_p: float = 1.0
    """Draw among the most probable tokens that have this probability together."""
    seed: int = 0
    """Of the draws."""


def run(options: Generate, console: Console) -> int:
    """Print the prompt and what follows."""
    choice = {"temperature": options.temperature, "top_p": options.top_p}
    found = generate(options.run, options.prompt, options.tokens, options.seed, **choice)
    print(options.prompt, end="", flush=True)
    for piece in found:
        print(piece, end="", flush=True)
    print()
    return 0


def generate(
    run: str, prompt: str, tokens: int, seed: int, *, temperature: float = 1.0, top_p: float = 1.0
) -> Iterator[str]:
    """Pieces of text as they come: the prompt is read at once, then each token is chosen from the model's distribution.

    Args:
        run: Folder of a run.
        prompt: Text to continue.
        tokens: How many to generate.
        seed: Of the draws.
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Draws among the most probable tokens that reach this probability together.

    Raises:
        ValueError: Before any work, where there is no such run, no prompt, no position for so many tokens, or where a number
            is out of its range.
    """
    import torch

    from isopos.lab.data.tokenizers import Bytes, load_tokenizer
    from isopos.lab.runs import weights
    from isopos.lab.tasks.generation import pieces
    from isopos.models import Decoder

    folder = Path(run)
    if not (folder / weights.FILE).is_file():
        runs = sorted(str(path.parent) for path in folder.glob(f"*/{weights.FILE}"))
        remedy = f"it holds {', '.join(runs)}" if runs else "isopos compare makes some under runs/"
        raise ValueError(f"run: expected a folder with a trained model, got {run}; {remedy}")
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1, got {tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected 0 or a positive number, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a probability above 0 and at most 1, got {top_p}")
    if not prompt:
        raise ValueError("prompt: expected at least one character, got none")
    recipe, model = weights.load_run(folder)
    if not isinstance(model, Decoder):
        raise ValueError(f"run: expected a language model, got one of the task {spec(recipe.task)}, which writes no text")
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").exists() else Bytes()
    if tokenizer.size != model.tokens.num_embeddings:
        raise ValueError(
            f"run: expected a tokenizer of the model's {model.tokens.num_embeddings} tokens in {run}, got {tokenizer.size}"
        )
    text = tokenizer.encode(prompt)
    if not len(text):
        raise ValueError(f"prompt: expected at least one word, got {prompt!r}")
    longest = model.scheme.max_length
    if longest is not None and len(text) + tokens > longest:
        raise ValueError(
            f"tokens: expected at most {longest - len(text)} after this prompt, for which the scheme has positions"
        )
    start = torch.from_numpy(text)[None]
    return pieces(model, tokenizer, start, tokens, temperature, top_p, torch.Generator().manual_seed(seed))
