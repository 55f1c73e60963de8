"""Text from a trained language model, token by token."""

import codecs
from collections.abc import Iterator

import torch
from torch import Tensor

from isopos.lab.data.tokenizers import Tokenizer
from isopos.models import Decoder

__all__ = ["choose", "pieces"]


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
def pieces(
    model: Decoder,
    tokenizer: Tokenizer,
    start: Tensor,
    tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> Iterator[str]:
    """Text as it comes: the tokens ``[1 t]`` of its start are read at once, then each token is chosen, see `choose`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    x, stream = model.advance(start)
    logits = model.head(x[:, -1])  # of the last token only: a vocabulary may be large
    for _ in range(tokens):
        token = choose(logits, temperature, top_p, generator)
        yield decoder.decode(tokenizer.piece(int(token)))
        logits, stream = model.step(token, stream)
    yield decoder.decode(b"", final=True)
