"""Checks of decoding: token by token, in chunks, with a static cache, with beams, by generate; and of packed batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from isopos.audit.checks import by_position, check, compared, judged, layer_outputs, unless
from isopos.audit.report import Curves, Finding
from isopos.audit.scores import layers
from isopos.audit.subject import Subject, relative_error, traced

STALE = "give a chunk the positions that follow the cache's, and its convolutions and states what came before"


@check("decoding", "Does token by token equal the whole?", "cache", "causal")
def decoding(subject: Subject) -> Iterator[Finding]:
    """Compare token-by-token decoding with a growing cache to one call; the model counts positions."""
    yield from _streamed(subject, [1] * subject.length, "tokens decoded one by one give what the whole gives")


@check("chunked prefill", "Do chunks equal the whole?", "cache", "causal")
def chunked_prefill(subject: Subject) -> Iterator[Finding]:
    """Compare chunks of different lengths with a growing cache to one call."""
    lengths = [5, 3, subject.length - 8]
    yield from _streamed(subject, lengths, f"chunks of {lengths} tokens give what the whole gives")


@check("static cache", "Does a cache of fixed size equal the whole?", "static", "causal")
def static_cache(subject: Subject) -> Iterator[Finding]:
    """Compare a prompt and then single tokens, in a static cache with free slots, to one call."""
    lengths = [5] + [1] * (subject.length - 5)
    yield from _streamed(subject, lengths, "a static cache gives what the whole gives", "static")


@check("beam reorder", "Do reordered beams keep their positions?", "cache", "causal")
def beam_reorder(subject: Subject) -> Iterator[Finding]:
    """Swap the cache rows of two samples before the last chunk, as beam search does."""
    cut = subject.length - 4
    rows, more = subject.tokens(2, cut), subject.tokens(2, 4, seed=3)
    order = torch.tensor([1, 0])
    got = subject.stream([rows, more], order=order)[:, cut:]
    want = subject.outputs(torch.cat((rows[order], more), 1))[:, cut:]
    yield compared(
        subject, got, want, "exchanged rows go on where they were", slack=2, remedy="reorder all that a cache keeps"
    )


@check("generation", "Does a left-padded batch generate what samples generate alone?", "generate", "causal")
def generation(subject: Subject) -> Iterator[Finding]:
    """Compare logits of greedy `generate`, which counts positions itself, to single calls."""
    count, pad = 4, 3
    unless(subject.limit is not None and subject.length + count > subject.limit, f"it has {subject.limit} positions only")
    rows = subject.tokens(2, subject.length, seed=8)
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[1, :pad] = False
    got = subject.generated(rows, mask, count)
    alone = [subject.generated(rows[:1], mask[:1], count), subject.generated(rows[1:, pad:], mask[1:, pad:], count)]
    yield compared(
        subject, got, torch.cat(alone), "a left-padded batch has the logits of its samples alone", slack=2,
        remedy="count positions from the mask, for each sample, at the prompt and at each step",
        issue="unslothai/unsloth#3699",
    )  # fmt: skip


@check("packing", "Does a packed batch equal its parts?", "packing", "causal")
def packing(subject: Subject) -> Iterator[Finding]:
    """Compare three samples packed in one row, with restarting positions, to single calls; name the leaking layers."""
    lengths = [4, 3, subject.length - 7]
    tokens = subject.tokens(1, subject.length)
    parts = tokens.split(lengths, 1)
    want = torch.cat([subject.outputs(part) for part in parts], 1)
    got = subject.packed(tokens, lengths)

    whole = compared(
        subject, got, want, "samples in one row, positions restarting, give what they give alone",
        remedy="pass sample boundaries (cu_seqlens, seq_idx, a block mask) to every layer that mixes tokens",
        issue="huggingface/transformers#46093", fault=lambda: leaks(subject, tokens, lengths),
    )  # fmt: skip
    yield whole
    if whole.severity == "sound" and "mask" in subject.abilities:
        error = relative_error(subject.packed(tokens, lengths, masked=True), want)
        yield judged(
            "a mask of ones changes nothing of that", f"relative difference {error:.1e}", error <= subject.tolerance,
            remedy="give packed batches no mask: with one, samples see each other, silently",
            issue="huggingface/transformers#46634", fault="risk",
        )  # fmt: skip


def leaks(subject: Subject, tokens: Tensor, lengths: Sequence[int]) -> tuple[str, Curves]:
    """Modules that mix packed samples, and the size of each leak; each layer gets the features of separate samples."""
    module, inputs, traces = subject.exact, [], []
    for part in tokens.split(list(lengths), 1):
        with torch.no_grad(), layers(module, part.shape[1], lambda _, x: x) as layer_inputs, traced(module) as seen:
            subject.call(module, part)
        inputs.append(layer_inputs)
        traces.append(seen)
    right = [torch.cat(same, 1) for same in zip(*inputs, strict=True)]
    parts = {name: [seen[name] for seen in traces if name in seen] for name in traces[0]}
    whole = {name: torch.cat(same, 1) for name, same in parts.items() if _are_tokens(same, lengths)}
    with layers(module, tokens.shape[1], lambda n, _: right[n]), traced(module) as seen:
        subject.packed(tokens, lengths)
    stacks, leaks_by_layer = [*layer_outputs(module, seen)], {}
    for name, a in seen.items():
        b, layer = whole.get(name), next((one for one in stacks if name == one or name.startswith(f"{one}.")), "")
        if b is None or a.shape != b.shape or (stacks and not layer) or (e := relative_error(a, b)) <= subject.tolerance:
            continue
        up = name.rpartition(".")[0]
        mixer = up if up.startswith(f"{layer}.") and layer else name  # its first part that differs had another input
        leaks_by_layer.setdefault(
            layer, f"{mixer} ({type(module.get_submodule(mixer)).__name__}, relative difference {e:.1e})"
        )
    curves = by_position(layer_outputs(module, seen), whole)
    return " and ".join(leaks_by_layer.values()), curves


def _are_tokens(parts: Sequence[Tensor], lengths: Sequence[int]) -> bool:
    """Whether outputs of separate samples have an axis of tokens ``[1 t ...]``; weights of attention have two."""
    return [part.shape[1] for part in parts] == [*lengths] and len({part.shape[2:] for part in parts}) == 1


def _streamed(subject: Subject, lengths: Sequence[int], says: str, kind: str = "dynamic") -> Iterator[Finding]:
    tokens = subject.tokens(2, subject.length)
    got, want = subject.stream(tokens.split(list(lengths), 1), kind), subject.outputs(tokens)
    error = (got.double() - want.double()).abs().amax((0, 2)) / want.abs().max()
    from_here = int((error > 2 * subject.tolerance).long().argmax())
    yield compared(subject, got, want, says, slack=2, remedy=STALE, fault=lambda: (f"from token {from_here} on", ()))
