"""What a trained decoder is asked for: perplexity, also of windows far longer than those of the training, and text.

Perplexity is measured as the papers do.
"""

import codecs
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isopos.lab.data.corpora import Corpus
from isopos.lab.data.tokenizers import Tokenizer
from isopos.models import Decoder

__all__ = ["at_once", "choose", "perplexity", "pieces", "why_not"]

PIECE = 4096  # tokens that a model is given at once
LOGITS = 1 << 27  # numbers that the head of a large vocabulary may return at once
SCORES = 1 << 24  # of pairs of tokens, a head of softmax attention


def perplexity(
    model: Decoder,
    corpus: Corpus,
    length: int,
    *,
    split: str = "validation",
    scored: int | None = None,
    limit: int | None = None,
) -> dict[str, float]:
    """How well a model predicts a split, read in windows of `length`: figures by name.

    That is "nats", the mean cross-entropy of a token; "bits_per_byte", the same of a byte of UTF-8, which does not depend on
    the tokenizer; how many "tokens" were scored; and "perplexity", exp(nats).

    Without `scored` windows are side by side, and every token counts but the first of the split. With it each window counts
    its last tokens only: all of them have ``length - scored`` tokens before them, by which windows overlap. PermuteFormer
    (section 4.2.1) scores the last 256 of 512; LRPE says no more than perplexity. Long windows run as streams in pieces of
    4096 tokens or less, with the same result in less memory. Bits a byte take the mean bytes a token of the whole split.
    The model is in evaluation mode. With `limit` only the first so many tokens of the split are looked at.

    Raises:
        ValueError: Before any work, where `length` has no positions in the scheme, or no window in the split, where the
            vocabularies differ, or where `scored` is not in a window.
    """
    reason = why_not(model, corpus, length, split, limit)
    if reason:
        raise ValueError(reason)
    own = model.tokens.num_embeddings
    if own != corpus.vocabulary:
        raise ValueError(
            f"vocabulary: expected the {own} tokens of the model, got the {corpus.vocabulary} of {corpus.name}; load the "
            "text with the tokenizer that was saved beside the model"
        )
    piece = at_once(model, length)
    device = model.tokens.weight.device
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, targets in corpus.windows(length, limit, max(1, piece // length), split, scored):
            total += _nats(model, tokens.to(device), targets.to(device), piece)
            count += targets.numel()
    nats = total / count
    bits = nats / math.log(2) / corpus.bytes_per_token(split)
    return {"nats": nats, "bits_per_byte": bits, "tokens": count, "perplexity": math.exp(nats) if nats < 700 else math.inf}


def why_not(model: Any, corpus: Corpus, length: int, split: str = "validation", limit: int | None = None) -> str:
    """Why windows of that length cannot be scored, or nothing."""
    if length < 1 or (limit is not None and limit < 1):
        return f"length: expected positive numbers of tokens, got windows of {length} and a limit of {limit}"
    longest, tokens = model.scheme.max_length, len(corpus.split(split))
    if longest is not None and length > longest:
        return f"length: expected at most {longest}, for which the scheme has positions, got {length}"
    within = tokens if limit is None else min(tokens, limit + 1)
    if within <= length:
        return f"length: expected less than the {within} tokens of {split}, got {length}; use more text or a shorter window"
    return ""


def at_once(model: Any, length: int) -> int:
    """As many tokens, in windows of a length, as memory surely has room for."""
    piece = PIECE
    if isinstance(model.head, torch.nn.Linear):
        piece = min(piece, LOGITS // model.head.out_features)
    if model.scheme.attention == "softmax":
        piece = min(piece, SCORES // length)
    return max(1, piece)


def _nats(model: Decoder, tokens: Tensor, targets: Tensor, piece: int) -> float:
    """Summed cross-entropy of the targets ``[b s]`` of windows ``[b t]``."""
    if tokens.numel() <= piece:
        return model(tokens, targets=targets).item() * targets.numel()
    begin, total, stream = tokens.shape[1] - targets.shape[1], 0.0, None
    for start in range(0, tokens.shape[1], piece):
        x, stream = model.advance(tokens[:, start : start + piece], stream)
        now = targets[:, max(0, start - begin) : max(0, start + piece - begin)]
        total += model.loss(x, now).item() * now.numel() if now.numel() else 0.0
    return total


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Tokens ``[b]`` drawn from logits ``[b vocabulary]``.

    Divided by the temperature first; then only the most probable tokens remain whose predecessors, in that order, are less
    than `top_p` together: at least one.

    Examples:
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
    logits, steps = model.head(x[:, -1]), model.steps(stream)  # of the last token only: a vocabulary may be large
    for _ in range(tokens):
        token = choose(logits, temperature, top_p, generator)
        yield decoder.decode(tokenizer.piece(int(token)))
        logits = steps(token)
    yield decoder.decode(b"", final=True)
