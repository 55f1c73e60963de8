"""Text from a trained language model, token by token."""

import codecs
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from isopos.lab.data.tokenizers import Bytes, Tokenizer, load_tokenizer
from isopos.lab.runs import weights
from isopos.lab.tasks import spec
from isopos.models import Decoder

__all__ = ["choose", "generate"]


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
    return _pieces(model, tokenizer, start, tokens, temperature, top_p, torch.Generator().manual_seed(seed))


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Tokens ``[b]`` drawn from logits ``[b vocabulary]``.

    Divided by the temperature first; then only the most probable tokens remain whose predecessors, in that order, are less
    than `top_p` together: at least one.

    Example:
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(1000, 3)
        >>> drawn = choose(logits, 1.0, 0.7, torch.Generator().manual_seed(0))
        >>> drawn.unique().tolist(), choose(logits, 0.0, 1.0, torch.Generator()).unique().tolist()
        ([0, 1], [0])
    """
    if temperature == 0:
        return logits.argmax(-1)
    below = (logits - logits.amax(-1, keepdim=True)).double()  # so that small temperatures do not overflow
    probabilities = (below / temperature).softmax(-1).to(logits.dtype)
    if top_p < 1:
        ordered, order = torch.sort(probabilities, stable=True, dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


@torch.no_grad()
def _pieces(
    model: Decoder,
    tokenizer: Tokenizer,
    start: Tensor,
    tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    x, stream = model.advance(start)
    logits = model.head(x[:, -1])  # of the last token only: a vocabulary may be large
    for _ in range(tokens):
        token = choose(logits, temperature, top_p, generator)
        yield decoder.decode(tokenizer.piece(int(token)))
        logits, stream = model.step(token, stream)
    yield decoder.decode(b"", final=True)
