"""Checks of whole calls: shifts, positions, padding, batches, order and direction."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from isopos.audit.checks import check, compared, first_difference, judged, unless
from isopos.audit.encoding import has_biases_alone
from isopos.audit.report import Curves, Finding
from isopos.audit.subject import Skip, Subject, relative_error

GAPS = (0, 1, 2, 4, 5, 9, 10, 11, 14, 15, 16, 18)
SEEN = 2  # a larger change, in tolerances, is more than rounding


@check("shift", "Do outputs stay the same when all positions shift?", "positions")
def shift(subject: Subject) -> Iterator[Finding]:
    """Compare outputs at shifted positions, for relative encodings. float32 angles round in proportion to the position."""
    unless(not subject.shift, f"its {subject.limit} positions leave no room for a shift")
    tokens = subject.tokens(1, subject.length)
    positions = torch.arange(subject.length)[None]
    says = f"positions + {subject.shift} give the same outputs up to rounding"
    here, there = (subject.outputs(tokens, positions + s, _all(tokens)) for s in (0, subject.shift))
    slack = 1 + subject.shift / subject.length
    if subject.is_relative:
        remedy = "rotate queries and keys by one table, at positions kept in int64 or float32 until angles are taken"

        def place() -> tuple[str, Curves]:
            return first_difference(
                subject,
                lambda module: subject.call(module, tokens, positions + subject.shift, _all(tokens)),
                lambda module: subject.call(module, tokens, positions, _all(tokens)),
            )

        yield compared(subject, there, here, says, slack=slack, remedy=remedy, fault=place)
        return
    error = relative_error(there, here)
    if error <= subject.tolerance * slack:
        yield Finding(says, f"relative difference {error:.1e}", "sound")
    else:
        yield Finding(
            "absolute positions see a shift", f"relative difference {error:.1e}", "note", subject.encoding,
            "none; outputs depend on where a text begins",
        )  # fmt: skip


@check("positions", "Does each sample obey its positions?", "positions")
def positions(subject: Subject) -> Iterator[Finding]:
    """Compare a batch of two samples, with different positions and gaps, to single calls."""
    gaps = torch.tensor(GAPS[: subject.length])
    plain = torch.arange(len(gaps))
    unless(subject.limit is not None and subject.limit <= int(gaps[-1]) + 3, f"it has {subject.limit} positions only")
    tokens = subject.tokens(2, len(gaps))
    rows = torch.stack((gaps, plain + (plain > 3)))
    single = [subject.outputs(tokens[i : i + 1], rows[i : i + 1], _all(tokens[:1])) for i in (0, 1)]
    batch = subject.outputs(tokens, rows, _all(tokens))
    yield compared(
        subject, batch, torch.cat(single), "two samples of a batch keep separate positions",
        remedy="make cosines and sines for positions [b t], not for the first sample's", issue="unslothai/unsloth#3699",
    )  # fmt: skip
    change = relative_error(single[0], subject.outputs(tokens[:1], plain[None], _all(tokens[:1])))
    obeyed = change > SEEN * subject.tolerance
    told = subject.is_relative or subject.encoding.startswith(("rotary", "absolute"))
    yield judged(
        "other positions give other outputs", f"relative difference {change:.1e}", obeyed, subject.encoding,
        "positions are accepted and ignored: pass them on to the encoding, or do not accept them",
        fault="broken" if told else "note",
    )  # fmt: skip


@check("left padding", "Do padded tokens before a sample change its outputs?", "mask")
def left_padding(subject: Subject) -> Iterator[Finding]:
    """Compare left-padded to plain samples, with positions from the first real token, or by default if relative."""
    pad, tokens = 4, subject.tokens(1, subject.length)
    if subject.encoding.startswith("absolute") and "positions" not in subject.abilities:
        yield Finding("absolute positions count padding", "left padding shifts them", "note", remedy="pad on the right")
        return
    rows, mask = _left_padded(subject, tokens, pad, seed=2)
    counted = (mask.long().cumsum(-1) - 1).clamp_min(0) if "positions" in subject.abilities else None
    want = subject.outputs(tokens, None if counted is None else counted[:, pad:], _all(tokens))
    ways: list[tuple[str, Tensor | None]] = []
    if counted is not None:
        ways.append(("positions counted from the first real token", counted))
    if counted is None or subject.is_relative:
        ways.append(("positions left to the model", None))
    for way, positions in ways:
        got = subject.outputs(rows, positions, mask)[:, pad:]
        yield compared(
            subject, got, want, f"a left-padded sample gives what it gives alone, {way}", slack=2,
            remedy="mask padded keys in every layer, states and convolutions included", issue="unslothai/unsloth#3699",
            fault=lambda positions=positions: first_difference(
                subject,
                lambda m: subject.call(m, rows, positions, mask),
                lambda m: subject.call(m, tokens, None if counted is None else counted[:, pad:], _all(tokens)),
                slice(pad, None),
            ),
        )  # fmt: skip


@check("right padding", "Do padded tokens after a sample change its outputs?", "mask")
def right_padding(subject: Subject) -> Iterator[Finding]:
    """Compare two different paddings to the sample alone."""
    pad, tokens = 3, subject.tokens(1, subject.length)
    want = subject.outputs(tokens, None, _all(tokens))
    for seed in (2, 3):
        rows = torch.cat((tokens, subject.tokens(1, pad, seed=seed)), 1)
        mask = _all(rows)
        mask[:, -pad:] = False
        got = subject.outputs(rows, None, mask)[:, :-pad]
        yield compared(
            subject, got, want, "a right-padded sample gives what it gives alone",
            remedy="mask padded keys in every layer",
            fault=lambda rows=rows, mask=mask: first_difference(
                subject,
                lambda m: subject.call(m, rows, None, mask),
                lambda m: subject.call(m, tokens, None, _all(tokens)),
                slice(tokens.shape[1]),
            ),
        )  # fmt: skip


@check("batch", "Do samples of other lengths in a batch change a sample?", "mask")
def batch(subject: Subject) -> Iterator[Finding]:
    """Compare three right-padded samples of different lengths to single calls."""
    lengths = (subject.length, subject.length - 5, subject.length - 2)
    rows = subject.tokens(3, subject.length, seed=4)
    mask = torch.arange(subject.length)[None] < torch.tensor(lengths)[:, None]
    got = subject.outputs(rows, None, mask)
    for i, length in enumerate(lengths):
        alone = subject.outputs(rows[i : i + 1, :length], None, mask[i : i + 1, :length])
        yield compared(
            subject, got[i : i + 1, :length], alone, f"sample {i + 1} of 3 gives what it gives alone",
            remedy="let nothing of one sample (a maximum, a length, a table) reach another",
        )  # fmt: skip


@check("padding content", "Does the content of padded positions change the outputs?", "mask")
def padding_content(subject: Subject) -> Iterator[Finding]:
    """Compare a left-padded sample with two different paddings: outputs must be equal and finite."""
    pad, tokens = 4, subject.tokens(1, subject.length)
    got = []
    for seed in (5, 6):
        rows, mask = _left_padded(subject, tokens, pad, seed)
        got.append(subject.outputs(rows, None, mask)[:, pad:])
    yield compared(subject, got[1], got[0], "two paddings give the same outputs", remedy="mask padded keys in every layer")


@check("padded rows", "Does padding with NaN leave other tokens unchanged?", "mask")
def padded_rows(subject: Subject) -> Iterator[Finding]:
    """Add a row of padding only to a batch, and for features as tokens NaN in padding; the sample must not change."""
    pad, sample = 4, subject.tokens(1, subject.length)
    rows, mask = _left_padded(subject, sample, pad, seed=5)
    alone, empty = subject.outputs(rows, None, mask)[:, pad:], torch.zeros_like(mask)
    batched = subject.outputs(rows.repeat(2, *[1] * (rows.ndim - 1)), None, torch.cat((mask, empty)))[:1, pad:]
    yield compared(
        subject, batched, alone, "a row of padding alone leaves the other rows as they are",
        remedy="let a query without keys give zeros, not NaN, and share nothing between rows",
    )  # fmt: skip
    if not rows.is_floating_point():
        return
    rows[:, :pad] = torch.nan
    stays = bool(subject.outputs(rows, None, mask)[:, pad:].isfinite().all())
    remedy = "fill padded features with zeros: 0 * NaN is NaN in a product with values"
    measured = "it does" if stays else "it reaches other tokens"
    yield judged("NaN in padded positions stays there", measured, stays, remedy=remedy, fault="note")


@check("precision", "Do lower dtypes keep positions apart?", "positions", "casts")
def precision(subject: Subject) -> Iterator[Finding]:
    """Compare errors of far and near positions in bfloat16 and float16, which must be of one size."""
    unless(not subject.is_relative, "only relative encodings are unmoved by a shift")
    room = 1024 if subject.limit is None else min(1024, subject.limit - subject.length)
    unless(room < 300, f"within {subject.limit} positions every dtype keeps them apart")
    tokens, where = subject.tokens(1, subject.length), torch.arange(subject.length)[None]
    exact = subject.outputs(tokens, where, _all(tokens))
    for dtype in (torch.bfloat16, torch.float16):
        module = copy.deepcopy(subject.copies[torch.float32])
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        with torch.no_grad():
            try:
                near, far = (subject.call(module, tokens, where + s, _all(tokens)) for s in (0, room))
            except RuntimeError as error:
                raise Skip(f"it does not compute in {dtype}: {str(error).splitlines()[0]}") from None
        rounding, moved = relative_error(near, exact), relative_error(far, exact)
        yield judged(
            f"{str(dtype)[6:]} at positions + {room} is as exact as near zero (difference {rounding:.1e})",
            f"relative difference {moved:.1e}", moved <= max(4 * rounding, subject.tolerance),
            remedy="keep positions and angles in float32, cast cosines and sines at the end",
            issue="huggingface/candle#3520",
        )  # fmt: skip


@check("order", "Does a bidirectional model see the order of tokens?", "bidirectional")
def order(subject: Subject) -> Iterator[Finding]:
    """Compare outputs of permuted tokens to permuted outputs, which must differ."""
    swap = torch.randperm(subject.length, generator=torch.Generator().manual_seed(7))
    yield _moved(subject, swap, "permuted", "no encoding of positions reaches attention: add one, or pass it on")


@check("direction", "Does a bidirectional model tell past from future?", "bidirectional")
def direction(subject: Subject) -> Iterator[Finding]:
    """Compare outputs of reversed tokens to reversed outputs, which must differ."""
    remedy = "scores are even in the offset: use sines, or a bias with a sign"
    finding = _moved(subject, torch.arange(subject.length).flip(0), "reversed", remedy)
    even = finding.severity == "broken" and has_biases_alone(subject)  # as ALiBi in both directions is meant to be
    yield replace(finding, severity="note") if even else finding


def _moved(subject: Subject, index: Tensor, how: str, remedy: str) -> Finding:
    """A finding that outputs of tokens in another order are not the outputs in that order."""
    tokens = subject.tokens(1, subject.length)
    change = relative_error(subject.outputs(tokens[:, index]), subject.outputs(tokens)[:, index])
    says, measured = f"{how} tokens give other outputs", f"relative difference {change:.1e}"
    return judged(says, measured, change > SEEN * subject.tolerance, remedy=remedy)


def _left_padded(subject: Subject, tokens: Tensor, pad: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[1 t]`` after random padding, and their mask; skips the check where the model has fewer positions."""
    rows = torch.cat((subject.tokens(1, pad, seed=seed), tokens), 1)
    unless(subject.limit is not None and rows.shape[1] > subject.limit, f"it has {subject.limit} positions only")
    return rows, (torch.arange(rows.shape[1]) >= pad)[None]


def _all(tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape[:2], dtype=torch.bool)
