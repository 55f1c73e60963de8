"""Text from a trained run, byte by byte."""

import codecs
from collections.abc import Iterator
from pathlib import Path

import torch

from isopos.lab.train import load_run

__all__ = ["generate"]


def generate(run: str, prompt: str, tokens: int, seed: int) -> Iterator[str]:
    """Pieces of text as they come: the prompt is read at once, then each byte is drawn from the model's distribution.

    Raises:
        ValueError: Before any work, where there is no such run, no prompt, or no position for so many tokens.
    """
    folder = Path(run)
    if not (folder / "model.safetensors").is_file():
        runs = sorted(str(path.parent) for path in folder.glob("*/model.safetensors"))
        remedy = f"it holds {', '.join(runs)}" if runs else "isopos compare makes some under runs/"
        raise ValueError(f"run: expected a folder with a trained model, got {run}; {remedy}")
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1, got {tokens}")
    text = prompt.encode()
    if not text:
        raise ValueError("prompt: expected at least one character, got none")
    _, model = load_run(folder)
    longest = model.scheme.max_length
    if longest is not None and len(text) + tokens > longest:
        raise ValueError(
            f"tokens: expected at most {longest - len(text)} after this prompt, for which the scheme has positions"
        )
    return _pieces(model, text, tokens, torch.Generator().manual_seed(seed))


@torch.no_grad()
def _pieces(model, text: bytes, tokens: int, generator: torch.Generator) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    logits, stream = model.prefill(torch.tensor([list(text)]))
    logits = logits[:, -1]
    for _ in range(tokens):
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        yield decoder.decode(bytes(token.tolist()))
        logits, stream = model.step(token, stream)
    yield decoder.decode(b"", final=True)
