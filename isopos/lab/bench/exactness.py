"""Largest error of each scheme, setting and dtype against the quadratic definition."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import rich.box
import rich.table
import torch
from rich.console import Console
from torch import Tensor

from isopos.attention import linear_attention, reference, softmax_attention
from isopos.catalog import CATALOG
from isopos.encodings import Encoding
from isopos.lab.bench import accuracy
from isopos.lab.reports import grids
from isopos.lab.reports.kernels import fill_zeros
from isopos.positions import Group, Line, packed, sequence
from isopos.schemes import REGISTRY, Scheme
from isopos.state import State

BATCH, HEADS, HEAD_DIM, LENGTH = 2, 2, 16, 130  # two chunks of the causal sums, and two more tokens
PADDING = (37, 5)  # padding tokens of each sample
FAR = 2**31
ATTENTIONS: dict[str, Callable[..., Any]] = {"linear": linear_attention, "softmax": softmax_attention}
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}

Error = float | str  # the error, or the reason for a refusal
Key = tuple[str, str, str, str]  # dtype, scheme, attention, setting


class Trial:
    """A scheme with random queries, keys and values ``[b h t d]`` of one dtype at positions x ``[t c]``."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype):
        self.scheme, self.x, generator = scheme, scheme.group.arrange(LENGTH), torch.Generator().manual_seed(0)
        features = scheme.encoding.features
        widths = features, features, features // scheme.width
        shapes = [(BATCH, scheme.heads, LENGTH, width) for width in widths]
        q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
        self.qkv = q, k, v
        self.whole = cache(lambda: definition(scheme, q, k, v, self.x))

    def attend(self, x: Tensor | None = None, qkv: Sequence[Tensor] | None = None, **options: Any) -> Tensor:
        """Attention, by default causal, at the trial's positions or others."""
        x, qkv = self.x if x is None else x, self.qkv if qkv is None else qkv
        tokens = [_embedded(self.scheme, token, x) for token in qkv]
        at = self.scheme.at(x, dtype=tokens[0].dtype)
        return ATTENTIONS[self.scheme.attention](*tokens, **{"causal": True, **at, **options})

    def stream(self, cuts: Iterable[int], x: Tensor | None = None) -> Tensor:
        """Causal attention as a stream, in chunks between `cuts`."""
        x, state, out = self.x if x is None else x, State(), []
        tokens = [_embedded(self.scheme, token, x) for token in self.qkv]
        for start, stop in itertools.pairwise(cuts):
            at = self.scheme.at(x[start:stop], state=state, dtype=tokens[0].dtype)
            chunk = [token[..., start:stop, :] for token in tokens]
            y, state = ATTENTIONS[self.scheme.attention](*chunk, **at, causal=True, return_state=True)
            out.append(y)
        return torch.cat(out, -2)

    def alone(self, span: slice, samples: slice = slice(None), *, causal: bool = True) -> Tensor:
        """Reference for a span of tokens as a separate sequence, whose positions start at the first."""
        q, k, v = (token[samples, :, span] for token in self.qkv)
        return definition(self.scheme, q, k, v, self.x[: q.shape[-2]], causal=causal)


def definition(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, causal: bool = True) -> Tensor:
    """Attention by the quadratic definition: every weight is computed, in float64."""
    q, k, v = (_embedded(scheme, token.double(), x) for token in (q, k, v))
    at = scheme.at(x, x, dtype=torch.float64)
    return reference.DEFINITIONS[scheme.attention](q, k, v, causal=causal, **at)


def _embedded(scheme: Scheme, tokens: Tensor, x: Tensor) -> Tensor:
    """Tokens ``[b h t d]`` plus the scheme's embedding of their positions, split over heads."""
    if scheme.embedding is None:
        return tokens
    added = scheme.embedding(x, tokens.dtype).unflatten(-1, (scheme.heads, -1)).transpose(-3, -2)
    return tokens + added.repeat_interleave(tokens.shape[-3] // scheme.heads, -3)


def _behind(group: Group, x: Tensor, rows: int) -> Tensor:
    """Positions x for tokens that follow `rows` other tokens: tree positions refer to the rows of parents."""
    return group.shift(group.origin(rows), x)[-len(x) :] if rows and group.refers_to_rows else x


def _cuts() -> list[int]:
    """Boundaries of ten random parts of all tokens."""
    inner = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(1))[:9].add(1).sort().values.tolist()
    return [0, *inner, LENGTH]


def _packed(trial: Trial) -> tuple[Tensor, Tensor]:
    spans = list(itertools.starmap(slice, itertools.pairwise(_cuts())))
    lengths = [span.stop - span.start for span in spans]
    parts = [_behind(trial.scheme.group, trial.x[:n], span.start) for n, span in zip(lengths, spans, strict=True)]
    out = trial.attend(torch.cat(parts), segment_ids=packed(lengths)[1])
    return out, torch.cat([trial.alone(span) for span in spans], -2)


def _left(trial: Trial) -> tuple[Tensor, Tensor]:
    """Padding on the left; on a line at negative positions, if the scheme accepts them."""
    group = trial.scheme.group
    negative = isinstance(group, Line) and trial.scheme.max_length is None
    padding = [sequence(n) - n if negative else group.origin(n) for n in PADDING]
    tokens = [_behind(group, trial.x[: LENGTH - n], n) for n in PADDING]
    x = torch.stack([torch.cat(parts) for parts in zip(padding, tokens, strict=True)])
    out = trial.attend(x, mask=torch.arange(LENGTH) >= torch.tensor(PADDING)[:, None])
    return _joined((out[i, :, n:], trial.alone(slice(n, None), slice(i, i + 1))[0]) for i, n in enumerate(PADDING))


def _right(trial: Trial) -> tuple[Tensor, Tensor]:
    out = trial.attend(causal=False, mask=torch.arange(LENGTH) < LENGTH - torch.tensor(PADDING)[:, None])
    spans = [slice(LENGTH - n) for n in PADDING]
    return _joined((out[i, :, s], trial.alone(s, slice(i, i + 1), causal=False)[0]) for i, s in enumerate(spans))


def _joined(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, expected = (torch.cat(parts, -2) for parts in zip(*pairs, strict=True))
    return out, expected


def _heads(trial: Trial) -> tuple[Tensor, Tensor]:
    q, k, v = trial.qkv
    queries = torch.stack((q, q.flip(-2)), -3)  # two for each head of keys
    expected = [definition(trial.scheme, query, k, v, trial.x) for query in queries.unbind(-3)]
    return trial.attend(qkv=(queries.flatten(-4, -3), k, v)), torch.stack(expected, -3).flatten(-4, -3)


def _cross(trial: Trial) -> tuple[Tensor, Tensor]:
    scheme, x, start = trial.scheme, trial.x, LENGTH - 41
    q, k, v = (_embedded(scheme, token, x) for token in trial.qkv)
    if scheme.group.refers_to_rows:  # the last rows of a tree need their ancestors
        at = scheme.at(x, x, dtype=q.dtype)
        query, key = at["isometry"]
        at = at | {"isometry": (query.last(LENGTH - start), key)}
    else:
        at = scheme.at(x[start:], x, dtype=q.dtype)
    return ATTENTIONS[scheme.attention](q[..., start:, :], k, v, **at, causal=True), trial.whole()[..., start:, :]


def _decode(trial: Trial) -> tuple[Tensor, Tensor]:
    """Steps far from the origin. By the shift law, the reference of a relative scheme is at positions from 0 on."""
    scheme = trial.scheme
    if not isinstance(scheme.group, Line):
        raise ValueError("positions: expected positions on a line")
    far, steps = trial.x + FAR, LENGTH // 2
    relative = isinstance(scheme.encoding, Encoding) and scheme.embedding is None and not scheme.inside
    relative = relative and not (scheme.bias is not None and scheme.bias.weaker_law)
    out = trial.stream([0, *range(LENGTH - steps, LENGTH + 1)], far)
    return out, trial.whole() if relative else definition(scheme, *trial.qkv, far)


def _compiled(trial: Trial) -> tuple[Tensor, Tensor]:
    torch.compiler.reset()
    return torch.compile(trial.attend, fullgraph=True, backend="aot_eager")(), trial.whole()


class Mode(NamedTuple):
    """A way to run attention; `run` returns its output and the reference."""

    what: str
    run: Callable[[Trial], tuple[Tensor, Tensor]]


SETTINGS = {
    "whole": Mode("a whole sequence, causal", lambda trial: (trial.attend(), trial.whole())),
    "all keys": Mode(
        "a whole sequence, bidirectional", lambda trial: (trial.attend(causal=False), trial.alone(slice(None), causal=False))
    ),
    "chunks": Mode("a stream in random chunks", lambda trial: (trial.stream(_cuts()), trial.whole())),
    "tokens": Mode("a stream, token by token", lambda trial: (trial.stream(range(LENGTH + 1)), trial.whole())),
    "packed": Mode("sequences packed into one", _packed),
    "left": Mode("padded on the left", _left),
    "right": Mode("padded on the right, bidirectional", _right),
    "heads": Mode("two query heads per key head", _heads),
    "cross": Mode("queries of the last tokens only", _cross),
    "2^31": Mode("steps from position 2^31 (lines)", _decode),
    "graph": Mode("compiled into one graph", _compiled),
}


@torch.no_grad()
def measure(
    schemes: Iterable[str] = CATALOG, settings: Iterable[str] = SETTINGS, dtypes: Iterable[str] = DTYPES
) -> dict[Key, Error]:
    """Errors by dtype, scheme, attention and setting; a reason (str) if the scheme refuses the setting.

    An error is the largest |output - reference| divided by max(1, largest |reference|), both of the same rounded inputs.
    """
    errors: dict[Key, Error] = {}
    for dtype, name, attention in itertools.product(dtypes, schemes, ATTENTIONS):
        try:
            scheme = REGISTRY[name](HEAD_DIM, HEADS, attention=attention)
        except ValueError as error:
            errors |= {(dtype, name, attention, setting): f"{error}".replace(name, "it") for setting in settings}
            continue
        fill_zeros(scheme)
        trial = Trial(scheme, DTYPES[dtype])
        for setting in settings:
            try:
                out, expected = SETTINGS[setting].run(trial)
                largest = (out.double() - expected).abs().max() / expected.abs().max().clamp_min(1)
                errors[dtype, name, attention, setting] = largest.item()
            except ValueError as error:
                errors[dtype, name, attention, setting] = f"{error}"
    return errors


class Table(NamedTuple):
    """A title, column titles, and rows of cells."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def rich(self) -> rich.table.Table:
        """The table for a console."""
        titles = [title.replace(" ", "\n") for title in self.head]
        align = "l".ljust(len(titles), "r")
        style = {"title_justify": "left", "box": rich.box.SIMPLE, "pad_edge": False}
        return grids.console_table(titles, self.rows, align, title=self.title, **style)


def error_tables(errors: Mapping[Key, Error], notes: list[str]) -> Iterator[Table]:
    """Tables of largest errors: by setting, by scheme, and by both for each dtype. Reasons of refusals go to `notes`."""
    dtypes, schemes, attentions, settings = (tuple(dict.fromkeys(parts)) for parts in zip(*errors, strict=True))
    pairs = [(attention, dtype) for attention in attentions for dtype in dtypes]
    heads = [f"{attention} {dtype.replace('float', 'f')}" for attention, dtype in pairs]

    def worst(dtype: str, names: Iterable[str], kinds: Iterable[str], settings: Iterable[str]) -> str:
        keys = itertools.product([dtype], names, kinds, settings)
        return _figure([error for key in keys if isinstance(error := errors[key], float)])

    def reasons(dtype: str, name: str, setting: str) -> set[str]:
        refused = {a: error for a in attentions if isinstance(error := errors[dtype, name, a, setting], str)}
        same = len(refused) == len(attentions) and len({*refused.values()}) == 1
        return {error if same else f"{attention}: {error}" for attention, error in refused.items()}

    def marks(reasons: Iterable[str]) -> str:
        notes.extend(reason for reason in sorted(reasons) if reason not in notes)
        return "".join(f" [{notes.index(reason) + 1}]" for reason in sorted(reasons))

    rows = [(f"{key}: {SETTINGS[key].what}", *(worst(d, schemes, [a], [key]) for a, d in pairs)) for key in settings]
    yield Table("Each setting: the worst scheme", ("setting", *heads), rows)
    rows = [(name, *(worst(d, [name], [a], settings) for a, d in pairs)) for name in schemes]
    yield Table("Each scheme: the worst setting", ("scheme", *heads), rows)
    for dtype in dtypes:
        rows = []
        for name in schemes:
            refusals = {setting: reasons(dtype, name, setting) for setting in settings}
            always = set.intersection(*refusals.values())
            cells = (worst(dtype, [name], attentions, [key]) + marks(refusals[key] - always) for key in settings)
            rows.append((name + marks(always), *cells))
        rows.append(("worst", *(worst(dtype, schemes, attentions, [setting]) for setting in settings)))
        yield Table(f"{dtype}: each scheme and setting, the worse attention", ("scheme", *settings), rows)


def _figure(errors: Sequence[float]) -> str:
    """The largest error as text, NaN first; "-" for no errors."""
    largest = max(errors, key=lambda error: (math.isnan(error), error), default=None)
    return "-" if largest is None else f"{largest:.0e}" if largest else "0"


def other_libraries() -> Iterator[Table]:
    """Errors at far positions and in bfloat16, of isopos and of other installed libraries."""
    for what, of in (("cosines and sines", accuracy.pairs), ("scores of unit queries and keys", accuracy.scores)):
        rows = []
        for name, peer in accuracy.LIBRARIES.items():
            if not peer.absence():
                errors = accuracy.errors(peer, accuracy.FAR, of)
                rows.append((name, *(_figure([errors[s]] if s in errors else []) for s in accuracy.FAR)))
        yield Table(f"Largest error of {what}", ("library", *map(str, accuracy.FAR)), rows)


def print_tables(out: Console, *, compiled: bool = False) -> None:
    """Print the tables; with `compiled` also the setting "graph", which takes minutes."""
    notes: list[str] = []
    errors = measure(settings=[setting for setting in SETTINGS if compiled or setting != "graph"])
    for table in (*error_tables(errors, notes), *other_libraries()):
        out.print(table.rich())
    for n, note in enumerate(notes, 1):
        out.print(f"[{n}] {note}", markup=False, highlight=False)
    if missing := accuracy.missing_peers():
        out.print(f"Not installed: {', '.join(missing)}.")
