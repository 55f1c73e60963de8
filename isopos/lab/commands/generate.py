"""`isopos generate`: text from a trained language model."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

__all__ = ["Generate", "run"]


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
    from isopos.lab.tasks.generation import generate

    choice = {"temperature": options.temperature, "top_p": options.top_p}
    pieces = generate(options.run, options.prompt, options.tokens, options.seed, **choice)
    print(options.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
