"""Identify the encoding of each layer: attention of equal tokens depends on positions alone and is fitted to families."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from isopos.audit import declared
from isopos.audit.checks import check, judged, unless
from isopos.audit.report import Finding
from isopos.audit.scores import Attended, equal, layers, recorded_attention
from isopos.audit.subject import Subject, relative_error, traced
from isopos.biases import T5

COUNT = 53  # tokens; a prime, which no size of a model is likely to have
STRIDES = (1, 16, 256)  # far positions tell slow frequencies apart; further away float32 angles are too coarse
FITS = 1e-3  # a smaller residual is rounding
COARSE = 0.05
MOVES = 1e-5  # of the norm of a vector


@dataclass(frozen=True)
class FittedRotation:
    """A rotation of queries and keys by their positions.

    Args:
        first, second: Features ``[f]`` of the planes that turn.
        w: Frequencies ``[h f]`` in radians per step, negative where a plane turns the other way.
        layout: "half", "interleaved", or "" where one plane leaves it open.
        residual: Of the fit, relative to the norm of what turns.
    """

    first: Tensor
    second: Tensor
    w: Tensor
    layout: str
    residual: float

    @property
    def shared(self) -> Tensor | None:
        """Frequencies ``[f]`` if all heads share them, otherwise None."""
        w = self.w.median(0).values
        return w if bool(((self.w - w).abs() <= 1e-3 * w.abs() + 1e-6).all()) else None

    def turned(self, x: Tensor, back: bool = False) -> Tensor:
        """Features ``[*b t d]`` of tokens 0 to t - 1, rotated to their positions, or back to position 0."""
        assert self.shared is not None
        angle = torch.arange(x.shape[-2])[:, None] * (-self.shared if back else self.shared)
        z = torch.complex(x[..., self.first].double(), x[..., self.second].double())
        z = z * torch.polar(torch.ones_like(angle), angle)
        out = x.double().clone()
        out[..., self.first], out[..., self.second] = z.real, z.imag
        return out

    def other(self) -> "FittedRotation":
        """The same frequencies in the other layout."""
        low, half = int(self.first.min()), torch.arange(len(self.first))
        to_half = self.layout == "interleaved"
        first, second = (low + half, low + half + len(half)) if to_half else (low + 2 * half, low + 2 * half + 1)
        return FittedRotation(first, second, self.w, "half" if to_half else "interleaved", self.residual)


def rotation(trajectories: Sequence[tuple[int, Tensor]]) -> FittedRotation | None:
    """The rotation that carries features of equal tokens ``[h t d]`` at positions 0, s, 2 s, ..., by strides s.

    None where no pairing of features in either layout explains them; the first stride must be 1.
    """
    size = max(float(x.norm(dim=-1).max()) for _, x in trajectories)
    moved = torch.stack([(x - x[:, :1]).abs().amax((0, 1)) for _, x in trajectories]).amax(0)
    where = (moved > MOVES * size).nonzero()[:, 0]
    if not len(where):
        return None
    low, width = int(where[0]), len(moved)
    fits = []
    for rotating in range(2 * -(-(int(where[-1]) + 1 - low) // 2), width - low + 1, 2):
        k = torch.arange(rotating // 2)
        for name, first, second in (("half", k, k + len(k)), ("interleaved", 2 * k, 2 * k + 1)):
            fits.append(_fit(trajectories, low + first, low + second, name if len(k) > 1 else ""))
    least = min((fit.residual for fit in fits), default=1.0)
    if least >= FITS:
        return None
    return next(fit for fit in fits if fit.residual <= 10 * least + 1e-9)  # features that never move belong to no plane


def _fit(trajectories: Sequence[tuple[int, Tensor]], first: Tensor, second: Tensor, layout: str) -> FittedRotation:
    w, residual = torch.zeros(()).double(), 0.0
    for stride, x in trajectories:
        z = torch.complex(x[..., first], x[..., second])  # [h t f]
        step = (z[:, 1:] * z[:, :-1].conj()).sum(1).angle()
        finer = step if stride == 1 else (step + 2 * math.pi * ((stride * w - step) / (2 * math.pi)).round()) / stride
        angle = stride * torch.arange(z.shape[1])[:, None] * finer[:, None]
        error = float((z - z[:, :1] * torch.polar(torch.ones_like(angle), angle)).norm() / z.norm().clamp_min(1e-30))
        if stride == 1:
            residual = error
        elif error > COARSE:
            break  # further positions are not obeyed, or their angles are too coarse
        w = finer
    return FittedRotation(first, second, w, layout, residual)


def bias_family(logits: Tensor) -> tuple[str, float]:
    """The family of a bias, and its residual, from logits ``[h t t]`` of equal tokens without rotation."""
    offset = torch.arange(logits.shape[-1])[None] - torch.arange(logits.shape[-1])[:, None]
    allowed = logits.isfinite().all(0)
    size = max(1.0, float(logits[:, allowed].abs().max()))
    change = (logits - logits.diagonal(dim1=1, dim2=2)[..., None])[:, allowed]  # rows may differ by a constant
    n = offset[allowed]
    if float(change.abs().max()) <= FITS / 10 * size:
        return "none", float(change.abs().max()) / size
    spread = float(change.abs().max())
    by_offset = _means(change, n + len(logits[0]))
    if (error := float((change - by_offset).abs().max()) / spread) > FITS:
        return "a bias that no offset explains", error
    slope = (change * n.abs()).sum(1) / (n * n).sum()
    if (error := float((change - slope[:, None] * n.abs()).abs().max()) / spread) < FITS:
        return f"ALiBi, slopes {float(slope.min()):.4g} to {float(slope.max()):.4g}", error
    for buckets in (8, 16, 32, 64):
        for distance in (32, 64, 128, 256):
            bidirectional = bool((n > 0).any())
            if distance <= buckets // (4 if bidirectional else 2):
                continue
            bucket = T5(1, buckets=buckets, max_distance=distance, bidirectional=bidirectional).bucket(n)
            if len(bucket.unique()) == len(n.unique()):
                continue  # every offset has a separate bucket
            if (error := float((change - _means(change, bucket)).abs().max()) / spread) < FITS:
                return f"T5, {buckets} buckets up to distance {distance}", error
    return "a relative bias of another family", 0.0


def _means(values: Tensor, group: Tensor) -> Tensor:
    """The mean of values ``[h n]`` over each group ``[n]``, at each of its members."""
    count = torch.zeros(int(group.max()) + 1).double().index_add(0, group, torch.ones_like(group).double())
    total = torch.zeros(len(values), len(count)).double().index_add(1, group, values)
    return (total / count.clamp_min(1))[:, group]


def attention_of_equal_tokens(subject: Subject, stride: int) -> list[Attended]:
    """Attention of equal tokens at positions 0, s, 2 s, ...; each layer gets equal features."""
    tokens, positions = _equal(subject, 0), None
    if "positions" in subject.abilities:
        positions = stride * torch.arange(tokens.shape[1])[None]
    with (
        torch.no_grad(),
        layers(subject.exact, tokens.shape[1], equal),
        recorded_attention(subject.exact, tokens.shape[1]) as seen,
    ):
        subject.call(subject.exact, tokens, positions, torch.ones(tokens.shape[:2], dtype=torch.bool))
    return seen


def _equal(subject: Subject, content: int) -> Tensor:
    count = COUNT if subject.limit is None else min(COUNT, subject.limit - 1 + subject.limit % 2)
    unless(count < 11, f"its {subject.limit} positions are too few to tell families apart")
    first = subject.tokens(1, 1, seed=content)
    return first.expand(1, count, *first.shape[2:]).contiguous()


def fitted_rotations(subject: Subject) -> list[tuple[Attended, FittedRotation | None]]:
    """All attention products of a call, each with the rotation that fits its queries and keys, or None."""
    runs = {1: attention_of_equal_tokens(subject, 1)}
    for stride in STRIDES[1:]:
        if "positions" in subject.abilities and (subject.limit is None or stride * COUNT <= subject.limit):
            try:
                run = attention_of_equal_tokens(subject, stride)
            except (IndexError, RuntimeError):
                break  # its tables end before
            runs |= {stride: run} if len(run) == len(runs[1]) else {}
    pairs_of_rotations = []
    for n, one in enumerate(runs[1]):
        pairs = [(stride, run[n].q, run[n].k) for stride, run in runs.items()]
        moving = [(stride, torch.cat((q, k))) for stride, q, k in pairs if q is not None and k is not None]
        pairs_of_rotations.append((one, rotation(moving) if len(moving) == len(pairs) else None))
    return pairs_of_rotations


def added(subject: Subject) -> str:
    """A description of absolute positions in the features of the first layer; empty without any."""
    module, calls = subject.exact, []
    for x in (_equal(subject, content) for content in (0, 1)):
        with torch.no_grad(), layers(module, x.shape[1], equal) as inputs, traced(module) as seen:
            subject.call(module, x)
        calls.append((inputs, seen))
    (inputs, seen), (_, other) = calls
    if not inputs or relative_error(inputs[0][:, 1:], inputs[0][:, :-1]) <= subject.tolerance:
        return ""
    for name, table in seen.items():  # what hangs on positions alone
        constant = name in other and table.shape == other[name].shape and table.equal(other[name])
        if constant and table.shape[1] == inputs[0].shape[1] and not table[:, 1:].equal(table[:, :-1]):
            return f"absolute, {'sinusoidal' if _sinusoidal(table[0]) else 'learned'} ({name})"
    return f"absolute, {'sinusoidal' if _sinusoidal(inputs[0][0].diff(dim=0)) else 'learned or normalised'}"


def _sinusoidal(table: Tensor) -> bool:
    """Whether each column ``[t d]`` is a sine of a separate frequency: x(n + 1) + x(n - 1) is a multiple of x(n)."""
    x = table.double()
    around, middle = x[2:] + x[:-2], x[1:-1]
    factor = (around * middle).sum(0) / (middle * middle).sum(0).clamp_min(1e-30)
    return float((around - factor * middle).norm() / around.norm()) < FITS


@check("layout", "Do trained weights fit the layout of the rotation?", "text", "causal")
def layout(subject: Subject) -> Iterator[Finding]:
    """Compare the loss on text to the loss with queries and keys rotated in the other layout."""
    rotated = fitted_rotations(subject)
    turns = [turn for _, turn in rotated if turn is not None]
    unless(not turns, "no attention turns its queries and keys")
    unless(any(not a.layout or a.shared is None for a in turns), "heads have separate frequencies, or a single plane")
    text, module = subject.text, copy.deepcopy(subject.module).eval().float()
    assert text is not None
    text = text[:, : text.shape[1] - 1 + text.shape[1] % 2]  # an odd number of tokens, which no head has of features
    with torch.no_grad(), recorded_attention(module, text.shape[1]) as seen:
        losses = _losses(subject.call(module, text), text)
    turns_of = {one.product: turn for one, (_, turn) in zip(seen, rotated, strict=True) if turn is not None}
    changes = {product: _in_other_layout(turn) for product, turn in turns_of.items()}
    with torch.no_grad(), recorded_attention(module, text.shape[1], changes):
        other = _losses(subject.call(module, text), text)
    gain, error = float((losses - other).mean()), float((losses - other).std() / len(losses) ** 0.5)
    here, there = turns[0].layout, turns[0].other().layout
    measured = f"{float(losses.mean()):.3f} nats per token as it is, {float(other.mean()):.3f} in {there} layout"
    chance = math.log(subject.call(module, text[:, :2]).shape[-1])
    best = min(float(losses.mean()), float(other.mean()))
    unless(best > chance - 0.1, f"its weights predict the text no better than chance: {measured}")
    unless(abs(gain) < max(4 * error, 0.02), f"both layouts predict the text alike: {measured}")
    yield judged(
        f"text is predicted best in {here} layout, which the code has", measured, gain < 0,
        remedy=f"these weights are of {there} layout: permute the rows of queries and keys",
        issue="huggingface/nanotron#427",
    )  # fmt: skip


def _in_other_layout(turn: FittedRotation) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def change(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (turn.other().turned(turn.turned(a, back=True)) for a in (q, k))
        return first, second

    return change


def _losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """The cross-entropy of each next token, in nats."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="none")


@check("encoding", "Which encoding is it, and does it turn as declared?")
def encoding(subject: Subject) -> Iterator[Finding]:
    """Identify the encoding of each layer, and compare rotary frequencies with the declared ones."""
    rotated = fitted_rotations(subject)
    unless(not rotated, "no softmax over pairs of its tokens was seen")
    wanted = []
    for rotary in subject.rotary(subject.module):
        try:
            if rotary.features is not None:
                wanted.append(declared.declared_frequencies(rotary.parameters, rotary.features, rotary.trained))
        except (ValueError, KeyError):
            wanted = []
            break
    embedded, groups = added(subject), {}
    for one, turn in rotated:
        words, residual, sound = _words(one, turn, wanted)
        groups.setdefault((words, sound), []).append((one.name, residual))
    for (words, sound), members in groups.items():
        names, residual = [name for name, _ in members], max(error for _, error in members)
        sound = sound and not (wanted and words == "none" and all(turn is None for _, turn in rotated))
        where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
        words = embedded if embedded and words == "none" else f"{embedded}, and {words}" if embedded else words
        fit = f" (residual {residual:.0e})"
        expected = "the declared frequencies" if wanted else "an encoding of a known family"
        remedy = "turn queries and keys by the frequencies of the configuration, in every layer that turns"
        yield judged(expected, words + fit, sound, where, remedy)


def _words(one: Attended, turn: FittedRotation | None, wanted: Sequence[Tensor]) -> tuple[str, float, bool]:
    """A description of the family, its residual, and whether it is as declared."""
    if turn is None:
        if _is_moved(one):
            return "queries and keys move, by no rotation", 1.0, not wanted
        return *bias_family(one.logits), True
    assert one.q is not None
    layout = f", {turn.layout} layout" if turn.layout else ""
    words = f"rotary, {2 * len(turn.first)} of {one.q.shape[-1]} features{layout}"
    if turn.shared is None:
        return f"{words}, separate frequencies per head", turn.residual, True
    w = turn.shared.abs()
    known = [other for other in wanted if _equals(w, other)]
    words += f", {declared.series(w, 4) or f'frequencies {float(w.max()):.4g} to {float(w.min()):.4g}'}"
    if wanted and not known:
        words += ": not the declared ones"
    return words, turn.residual, bool(known) or not wanted


def has_biases_alone(subject: Subject) -> bool:
    """Whether positions enter by biases of logits that offsets explain, and by nothing else."""
    families = set()
    for one, turn in fitted_rotations(subject):
        if turn is not None or _is_moved(one):
            return False
        families.add(bias_family(one.logits)[0])
    return bool(families - {"none"}) and "a bias that no offset explains" not in families and not added(subject)


def _is_moved(one: Attended) -> bool:
    """Whether queries or keys of equal tokens depend on their positions."""
    return one.q is not None and one.k is not None and (_moves(one.q) or _moves(one.k))


def _moves(x: Tensor) -> bool:
    return float((x - x[:, :1]).abs().max()) > MOVES * float(x.norm(dim=-1).max())


def _equals(w: Tensor, other: Tensor) -> bool:
    """Frequencies as measured, and as declared; slow ones that were not seen to turn may be missing at the end."""
    padded = torch.zeros(max(len(w), len(other))).double()
    mine, theirs = padded.clone(), padded.clone()
    mine[: len(w)], theirs[: len(other)] = w, other
    return bool(((mine - theirs).abs() <= 1e-4 * theirs + 1e-6).all())
