"""Evaluation of a trained decoder: perplexity, also in windows longer than in training, and generated text."""

import codecs
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isopos.lab.data.corpora import Corpus
from isopos.lab.data.tokenizers import Tokenizer
from isopos.models import Decoder
from isopos.parallel import cut, summed

PIECE = 4096  # largest number of tokens per call
LOGITS = 1 << 27  # largest number of logits per call
SCORES = 1 << 24  # largest number of scores per head of softmax attention


def perplexity(
    model: Decoder,
    corpus: Corpus,
    length: int,
    *,
    split: str = "validation",
    scored: int | None = None,
    limit: int | None = None,
) -> dict[str, float]:
    """Perplexity of a model on a split, read in windows of `length`: figures by name.

    "nats" is the mean cross-entropy per token; "bits_per_byte" the same per byte of UTF-8, which does not depend on the
    tokenizer; "tokens" the number of scored tokens; "perplexity" is exp(nats).

    Without `scored` windows do not overlap, and every token except the first is scored. With `scored` only the last tokens
    of each window are: windows overlap, so that all scored tokens have ``length - scored`` tokens before them.
    PermuteFormer (section 4.2.1) scores the last 256 of 512; LRPE does not say. Long windows run as streams in pieces of
    at most 4096 tokens, with the same result in less memory. Over a group each process has its shard of every window. Bits
    per byte use the mean bytes per token of the whole split. The model must be in evaluation mode. `limit` is the largest
    number of tokens of the split that are read.

    Raises:
        ValueError: If the scheme has no positions for `length`, the split has no window, the vocabularies differ, or
            `scored` does not fit into a window.
    """
    reason = unscorable(model, corpus, length, split, limit)
    if reason:
        raise ValueError(reason)
    vocabulary = model.tokens.num_embeddings
    if vocabulary != corpus.vocabulary:
        raise ValueError(
            f"vocabulary: expected the {vocabulary} tokens of the model, got the {corpus.vocabulary} of {corpus.name}; load "
            "the text with the tokenizer that was saved with the model"
        )
    piece = tokens_at_once(model, length)
    device, nats_of = model.tokens.weight.device, _nats if model.group is None else _nats_of_shard
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, targets in corpus.windows(length, limit, max(1, piece // length), split, scored):
            total += nats_of(model, tokens.to(device), targets.to(device), piece)
            count += targets.numel()
    nats = summed(model.group, device, total)[0] / count
    bits = nats / math.log(2) / corpus.bytes_per_token(split)
    return {"nats": nats, "bits_per_byte": bits, "tokens": count, "perplexity": math.inf if nats >= 700 else math.exp(nats)}


def unscorable(model: Any, corpus: Corpus, length: int, split: str = "validation", limit: int | None = None) -> str:
    """The reason why windows of this length cannot be scored; or ""."""
    if length < 1 or (limit is not None and limit < 1):
        return f"length: expected positive numbers of tokens, got windows of {length} and a limit of {limit}"
    longest, tokens = model.scheme.max_length, len(corpus.split(split))
    if longest is not None and length > longest:
        return f"length: expected at most {longest}, for which the scheme has positions, got {length}"
    if tokens <= length:
        return f"length: expected less than the {tokens} tokens of {split}, got {length}; use more text or a shorter window"
    if limit is not None and limit < length:
        return (
            f"length: expected at most the {limit} tokens of {split} that are scored, of {tokens}, got {length}; score more "
            "(eval --limit, train --validation-tokens) or use a shorter window"
        )
    return ""


def tokens_at_once(model: Any, length: int) -> int:
    """Number of tokens, in windows of a length, that fit into memory."""
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


def _nats_of_shard(model: Decoder, tokens: Tensor, targets: Tensor, piece: int) -> float:
    """The part of `_nats` that is of the tokens of this process; logits are computed for a piece at a time."""
    whole = F.pad(targets, (tokens.shape[1] - targets.shape[1], 0), value=-1)
    x, local = model.features(cut(tokens, model.group), None, causal=True), cut(whole, model.group)
    x, local = x[local >= 0], local[local >= 0]
    parts = zip(x.split(piece), local.split(piece), strict=True)
    return sum(model.loss(part[None], now[None]).item() * len(now) for part, now in parts if len(now))


def sample_tokens(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Random tokens ``[b]`` by logits ``[b vocabulary]``, which are divided by the temperature.

    Nucleus sampling: only the most probable tokens can be drawn, up to a total probability of `top_p`; at least one.

    Examples:
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(1000, 3)
        >>> drawn = sample_tokens(logits, 1.0, 0.7, torch.Generator().manual_seed(0))
        >>> drawn.unique().tolist(), sample_tokens(logits, 0.0, 1.0, torch.Generator()).unique().tolist()
        ([0, 1], [0])
    """
    if temperature == 0:
        return logits.argmax(-1)
    below = (logits - logits.amax(-1, keepdim=True)).double()  # so that small temperatures do not overflow
    probabilities = (below / temperature).softmax(-1).to(logits.dtype)
    if top_p < 1:
        ordered, order = torch.sort(probabilities, stable=True, dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # exactly 0 for the first
        ordered = ordered.masked_fill((before >= top_p) & (before > 0), 0.0)
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
    """Generated text, token by token, after a prompt ``[1 t]``; see `sample_tokens`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    x, stream = model.advance(start)
    logits, steps = model.head(x[:, -1]), model.steps(stream)  # of the last token only: a vocabulary may be large
    if bool(logits.isnan().any()) or not bool(logits.isfinite().any()):
        raise ValueError("run: expected logits that are numbers, got nan or infinity alone; did the run diverge?")
    for _ in range(tokens):
        token = sample_tokens(logits, temperature, top_p, generator)
        yield decoder.decode(tokenizer.piece(int(token)))
        logits = steps(token)
    yield decoder.decode(b"", final=True)
