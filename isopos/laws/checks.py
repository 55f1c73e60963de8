"""The laws of positional encodings, measured on random positions in float64.

    width         maps take `features` features and return `out_features`, as declared
    relative      <rho(sx) q, rho(sy) k> = <rho(x) q, rho(y) k>: scores depend on x^-1 y only (PermuteFormer, Property 1)
    bounded       |<rho(x) q, rho(y) k>| <= |q| |k| (PermuteFormer, Property 2)
    unitary       |rho(x) q| = |q|
    homomorphism  W(x) W(y) = W(xy) for W(x) = rho(1)^H rho(x) (with complex features as complex numbers)
    identity      W(1) = I
    decomposable  W(x)^H W(y) = rho(x)^H rho(y), so that linear attention can apply it (LRPE, Eq. 12)
    precision     scores in the user's dtype are within 16 roundings of float64 ones
    exact         float32 scores at positions about 2^20 and 2^31 are within 1e-6 of float64 scores near zero
    batch         positions per sample give the same as each sample alone, on axes [*b h t d]
    gradient      every learned parameter of every head has a gradient
    attention     a layer's sums do not change when positions shift: denominator, decay, terms and embedding included
    path          with content-dependent phases, weights of some tokens do not depend on the tokens around them
    seen          a layer's sums, or their gradients, change with the positions, or without content-dependent phases

An encoding must obey all of them, another coupling width and the laws of scores: relative, precision, batch, gradient. A
contragredient pair must also obey homomorphism, identity and decomposable, with the transposed map of queries for rho(x)^-1;
`unitary` is then a property. Of a Householder product, `bounded` and `unitary` concern the matrices between tokens, and
`unitary` is a law for reflections only. If scores are not relative, the note states the weaker law that the coupling or bias
declares. A law does not hold if the encoding's code raises an exception. Some properties are choices, reported with the
laws: whether scores distinguish directions, whether denominators are positive (PermuteFormer, Property 3), and the period of
an encoding.
"""

import copy
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.attention import linear_attention, softmax_attention
from isopos.contragredient import Contragredient
from isopos.encodings import Coupling, Encoding
from isopos.maps import TokenMap
from isopos.phases import ForgetGate, HouseholderProduct
from isopos.positions import Group
from isopos.scheme import Scheme

TOLERANCE = 1e-9  # float64, positions to 1000
EXACT = 1e-5  # float64 angles at 2^31 are exact to 2^-22 times their frequency
SEEN = 1e-6
TOKENS = 7
FAR = 10_000


@dataclass(frozen=True)
class Finding:
    """Result for one law or property: the largest error, or another figure, and whether it is within bounds."""

    name: str
    holds: bool
    figure: float
    note: str
    is_law: bool = True
    counterexample: str = ""
    measured: bool = True


@dataclass(frozen=True)
class Report:
    """All findings for one subject. Its text is a table."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether every law holds."""
        return all(finding.holds for finding in self.findings if finding.is_law)

    @property
    def broken(self) -> list[str]:
        """Names of the laws that were measured and do not hold."""
        return [finding.name for finding in self.findings if finding.is_law and finding.measured and not finding.holds]

    @property
    def unmeasured(self) -> list[str]:
        """Names of the laws that an exception prevented from being measured; notes of the findings state where."""
        return [finding.name for finding in self.findings if not finding.measured]

    def __getitem__(self, name: str) -> Finding:
        """The finding with this name."""
        return next(finding for finding in self.findings if finding.name == name)

    def __str__(self) -> str:
        """One line per finding."""
        groups = (("broken", self.broken), ("could not be measured", self.unmeasured))
        verdicts = [f"{verdict}: {', '.join(names)}" for verdict, names in groups if names]
        lines = [f"{self.subject}: {'; '.join(verdicts) or 'every law holds'}"]
        for f in self.findings:
            verdict = "yes" if f.holds else "unknown" if not f.measured else "BROKEN" if f.is_law else "no"
            lines.append(f"  {f.name:<13} {verdict:<7} {f.figure:9.1e}  {f.note}")
            lines += [f"{'':37}{f.counterexample}"] * bool(f.counterexample)
        return "\n".join(lines)

    __repr__ = __str__


def check(
    subject: Scheme | Coupling | Callable[[], Scheme | Coupling], *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Report:
    """Measure the laws of a scheme or an encoding, or of the result of a factory without arguments.

    Args:
        subject: The scheme, encoding or factory; its parameters do not change.
        dtype: Dtype of queries and keys for `precision`.
        seed: Seed of positions, queries and keys.

    Returns:
        A report; ``report.holds`` is the verdict, ``print(report)`` shows the figures. If the encoding's code raises an
        exception, or SystemExit, the law is `unmeasured`, with the exception and its line.

    Examples:
        >>> import isopos
        >>> check(isopos.rope(8, 2)).holds
        True
        >>> check(isopos.sinusoidal(8, 2)).broken
        ['attention']
    """
    if not isinstance(subject, (Scheme, Coupling)):
        subject = subject() if callable(subject) else subject
    if not isinstance(subject, (Scheme, Coupling)):
        raise TypeError(f"subject: expected a Scheme, an Encoding or a function that returns one, got {subject!r}")
    missing = [a for a in ("group", "features", "out_features") if isinstance(subject, Coupling) and not hasattr(subject, a)]
    if missing:
        raise ValueError(f"subject: expected {type(subject).__name__} to set {', '.join(missing)} in its constructor")
    coupling = subject.encoding if isinstance(subject, Scheme) else subject
    part = None if isinstance(subject, Coupling) else subject.embedding or subject.bias or subject.turn or subject.forget
    name = type(part or coupling).__name__
    try:
        probe = _Probe(coupling, subject.heads if isinstance(subject, Scheme) else _heads(coupling), seed)
        laws = {"width": lambda: _width(probe)} | _laws(subject, probe, dtype)
    except (Exception, SystemExit) as error:  # code of the encoding may raise anything
        return Report(name, (_unmeasured("width", error),))
    findings, weaker = [], _weaker(subject)
    for law, measure in laws.items():
        try:
            finding = measure()
            is_weaker = weaker and not finding.holds and law in ("relative", "attention")
            findings.append(replace(finding, note=f"{finding.note}; instead: {weaker}") if is_weaker else finding)
        except (Exception, SystemExit) as error:
            findings.append(_unmeasured(law, error))
    return Report(name, tuple(sorted(findings, key=lambda finding: not finding.is_law)))


def _weaker(subject: Scheme | Coupling) -> str:
    """The weaker law that the subject declares instead of a relative law, or ""."""
    if isinstance(subject, Coupling):
        return subject.weaker_law
    return subject.encoding.weaker_law or ("" if subject.bias is None else subject.bias.weaker_law)


def _unmeasured(name: str, error: BaseException) -> Finding:
    note = f"could not be measured: {type(error).__name__}: {error}{raised_at(error)}"
    return Finding(name, False, math.nan, note, measured=False)


def raised_at(error: BaseException) -> str:
    """The innermost line of an exception outside isopos, torch, numpy and the standard library, in brackets; or ""."""
    below = {"isopos", "torch", "numpy", *sys.stdlib_module_names}
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in below:
            file = frame.f_code.co_filename
            return f" ({file}, line {number}: {linecache.getline(file, number).strip()})"
    return ""


def _laws(subject: Scheme | Coupling, probe: "_Probe", dtype: torch.dtype) -> dict[str, Callable[[], Finding]]:
    """Functions that measure the laws, by name."""
    coupling = probe.coupling
    laws: dict[str, Callable[[], Finding]] = {"relative": lambda: _relative(probe, lambda x, y: probe.scores(x, y)[0])}
    if isinstance(coupling, Encoding):
        laws = _laws_of_encoding(coupling, probe)
    if isinstance(coupling, Contragredient):
        laws |= _laws_of_pair(coupling, probe)
    laws |= {"precision": lambda: _precision(probe, dtype), "batch": lambda: _batch(probe)}
    if not isinstance(subject, Scheme) or (subject.bias is subject.embedding is None and not subject.phases):
        laws["directional"] = lambda: _direction(probe)
    if isinstance(subject, Scheme):
        steps = _laws_of_steps(subject, probe.generator) if subject.phases else {}
        return laws | steps | _laws_of_scheme(subject, probe.generator)
    return laws | {"gradient": lambda: _gradient(dict(coupling.named_parameters()), probe.loss)}


def _law(name: str, error: float, note: str, bound: float = TOLERANCE) -> Finding:
    return Finding(name, error <= bound, error, note)


def _heads(coupling: Coupling) -> int:
    """Number of heads of an encoding, from its parameters or its tables."""
    heads = [parameter.shape[0] for parameter in coupling.parameters() if parameter.ndim > 1]
    with torch.no_grad():
        rho = coupling.query(_within(coupling, coupling.group.random(TOKENS)))
    if not isinstance(rho, TokenMap):
        raise TypeError(f"expected a map of isopos.maps at positions, got {type(rho).__name__}")
    return max([*heads, *rho.leading[-1:], 1])


class _Probe:
    """A coupling with random positions x and y, a shift, and random unit queries and keys."""

    def __init__(self, coupling: Coupling, heads: int, seed: int):
        self.coupling, self.group, self.generator = coupling, coupling.group, torch.Generator().manual_seed(seed)
        self.x, self.y = self.fractions(self.random(TOKENS)), self.fractions(self.random(TOKENS))
        self.shift = self.fractions(_within(coupling, _shift(self.group, self.generator)))
        shape = (2, 1, heads, TOKENS, coupling.features)
        content = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        self.q, self.k = content / content.norm(dim=-1, keepdim=True)

    def random(self, *shape: int) -> Tensor:
        """Random positions that the coupling accepts, also after a shift."""
        return _within(self.coupling, self.group.random(*shape, generator=self.generator))

    def fractions(self, x: Tensor) -> Tensor:
        """Integers plus fractions of 1/8, where coordinates are real; sums of these are exact, too."""
        leaves = self.group.leaves
        if x.is_floating_point() or not all(leaf.real for leaf in leaves):
            return x
        return x + torch.randint(8, x.shape, generator=self.generator).double() / 8

    def scores(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """<query(x) q, key(y) k> for each pair of rows: float64 ``[1 h t]``, for the last rows if there are more."""
        table = torch.promote_types(dtype, torch.float32)
        pairs = ((self.coupling.query(x, table), self.q), (self.coupling.key(y, table), self.k))
        q, k = (rho.last(content.shape[-2])(content.to(dtype)).double() for rho, content in pairs)
        return (q * k).sum(-1)

    def loss(self) -> Tensor:
        """A scalar function of scores with a gradient for every parameter."""
        zero = 0 * self.q.clone().requires_grad_().sum()  # makes the loss differentiable in every case
        return self.scores(self.x, self.y).square().sum() + zero


def _within(coupling: Coupling, x: Tensor) -> Tensor:
    """Positions reduced so that the coupling accepts them and their sums."""
    return x if coupling.max_length is None else x % max(1, coupling.max_length // 2)


def _shift(group: Group, generator: torch.Generator) -> Tensor:
    """Rows of the group; the last one is not the identity, if the group has other elements."""
    x = group.random(TOKENS, generator=generator)
    for _ in range(20):
        if not x[-1:].equal(group.origin(1)):
            break
        x = group.random(TOKENS, generator=generator)
    return x


def _unmoved(
    name: str, what: str, pairs: Sequence[tuple[Tensor, Tensor]], features: Sequence[str], shift: Tensor, **positions: Tensor
) -> Finding:
    """A law: numbers ``[h t ...]`` do not change under a shift; the counterexample is the largest change."""
    changes = ((_largest(a - b) / max(1.0, _largest(a)), a, b) for a, b in pairs)
    error, before, after = max(changes, key=lambda change: change[0])
    finding = _law(name, error, f"largest change of {what}")
    if finding.holds:
        return finding
    at = torch.unravel_index((before - after).abs().argmax(), before.shape)
    head, token, *rest = map(int, at)
    where = [f"head {head}", *(f"{feature} {i}" for feature, i in zip(features, rest, strict=True))]
    where += [f"{x} = {row[token].tolist()}" for x, row in positions.items()]
    numbers = f"{before[at].item():.6g}, shifted by {shift[-1].tolist()} {after[at].item():.6g}"
    return replace(finding, counterexample=f"{', '.join(where)}: {numbers}")


@torch.no_grad()
def _relative(probe: _Probe, scores: Callable[[Tensor, Tensor], Tensor], *features: str) -> Finding:
    """The relative law for scores ``[h t ...]`` of the probe's positions."""
    pair = [
        scores(probe.group.shift(s, probe.x), probe.group.shift(s, probe.y)) for s in (probe.group.origin(1), probe.shift)
    ]
    what = "a score when both positions are shifted"
    return _unmoved("relative", what, [(pair[0], pair[1])], features, probe.shift, x=probe.x, y=probe.y)


@torch.no_grad()
def _width(probe: _Probe) -> Finding:
    """Compare the declared numbers of features with the maps' numbers."""
    coupling = probe.coupling
    declared = actual = (coupling.features, coupling.out_features)
    for rho, content in ((coupling.query(probe.x, torch.float64), probe.q), (coupling.key(probe.y, torch.float64), probe.k)):
        width = coupling.features if rho.features is None else rho.features
        if actual == declared:
            actual = (width, rho.last(TOKENS)(content[..., :1].expand(*content.shape[:-1], width)).shape[-1])
    note = f"its maps take {actual[0]} features and return {actual[1]}"
    note += ", as declared" if actual == declared else f"; it declares {declared[0]} and {declared[1]}"
    return Finding("width", actual == declared, float(actual[1]), note)


def _laws_of_encoding(encoding: Encoding, probe: _Probe) -> dict[str, Callable[[], Finding]]:
    group, x, y, origin = probe.group, probe.x, probe.y, probe.group.origin(1)
    unit = torch.eye(encoding.features, dtype=torch.float64)

    def law(name: str, note: str, error: Callable[[], float], bound: float = TOLERANCE) -> None:
        laws[name] = lambda: _law(name, torch.no_grad()(error)(), note, bound)

    def w(a: Tensor, b: Tensor) -> Tensor:
        return _score(encoding, a, b, True)

    def excess() -> float:
        score = _score(encoding, group.shift(origin, x), group.shift(origin, y))
        return max(torch.linalg.matrix_norm(score, 2).max().item() - 1, 0.0)

    laws = {"relative": lambda: _relative(probe, lambda a, b: _score(encoding, a, b), "query feature", "key feature")}
    law("bounded", "largest |score| / (|q| |k|) - 1", excess)
    law("unitary", "largest change of a norm", lambda: _largest(_score(encoding, x, x) - unit))
    if encoding.out_features == encoding.features or encoding.is_lift or encoding.is_paired:
        product, applied = "largest |W(x) W(y) - W(xy)|", "largest |W(x)^H W(y) - rho(x)^H rho(y)|"
        law("homomorphism", product, lambda: _largest(w(origin, x) @ w(origin, y) - w(origin, group.compose(x, y))))
        law("identity", "largest |W(1) - I|", lambda: _largest(w(origin, origin) - unit))
        law("decomposable", applied, lambda: _largest(w(origin, x).mH @ w(origin, y) - w(x, y)))
    if group.is_grid and encoding.max_length is None:
        law("exact", "largest error of a float32 score up to position 2^31", lambda: _inexactness(encoding, probe), EXACT)
    note = "positions after which it repeats itself"
    laws["periodic"] = lambda: Finding("periodic", encoding.order < math.inf, encoding.order, note, is_law=False)
    return laws


def _laws_of_pair(pair: Contragredient, probe: _Probe) -> dict[str, Callable[[], Finding]]:
    """Laws of W: the transposed queries' map at the origin times the keys' map, so that a constant basis cancels."""
    group, x, y, unit = probe.group, probe.x, probe.y, torch.eye(pair.features, dtype=torch.float64)
    origin = group.origin(TOKENS)

    def w(a: Tensor, b: Tensor) -> Tensor:
        """W(a)^-1 W(b)."""
        sides = (pair.query(a, torch.float64).last(TOKENS), pair.key(b, torch.float64).last(TOKENS))
        query, key = (_matrices(side, pair.features) for side in sides)
        return query.mT @ key

    def law(name: str, note: str, products: Callable[[], tuple[Tensor, Tensor]]) -> None:
        @torch.no_grad()
        def measure() -> Finding:
            product, expected = products()
            return _law(name, _largest(product - expected) / max(1.0, _largest(expected)), f"largest {note}")

        laws[name] = measure

    @torch.no_grad()
    def unitary() -> Finding:
        error = _largest(w(origin, x).mT @ w(origin, x) - unit)
        return Finding("unitary", error <= TOLERANCE, error, "largest change of a norm, which a pair may have", is_law=False)

    laws: dict[str, Callable[[], Finding]] = {}
    product, inverse = "|W(x) W(y) - W(xy)|, relative", "|W(x)^-1 W(y) - W(x^-1 y)|, relative"
    law("homomorphism", product, lambda: (w(origin, x) @ w(origin, y), w(origin, group.compose(x, y))))
    law("identity", "|W(x)^-1 W(x) - I|", lambda: (w(x, origin) @ w(origin, x), unit))
    if not group.refers_to_rows:  # trees have no inverse
        law("decomposable", inverse, lambda: (w(x, origin) @ w(origin, y), w(origin, group.compose(group.inverse(x), y))))
    return laws | {"unitary": unitary}


@torch.no_grad()
def _direction(probe: _Probe) -> Finding:
    error = _largest(probe.scores(probe.x, probe.y) - probe.scores(probe.y, probe.x))
    if math.isnan(error):
        return Finding("directional", False, error, "scores are not numbers", is_law=False)
    note = (
        "score(x, y) differs from score(y, x)"
        if error > TOLERANCE
        else "score(x, y) = score(y, x): symmetric in the direction"
    )
    return Finding("directional", error > TOLERANCE, error, note, is_law=False)


def _operator(encoding: Encoding, x: Tensor) -> Tensor:
    """Dense operators ``[h t d' d]`` at positions ``[t c]``, for at most the last TOKENS."""
    count = min(len(x), TOKENS)
    return _matrices(encoding(x, torch.float64).last(count), encoding.features, count)


def _matrices(rho: TokenMap, features: int, count: int = TOKENS) -> Tensor:
    """A map of `count` tokens as dense matrices ``[h t d' d]``."""
    unit = torch.eye(features, dtype=torch.float64)[:, None, None].expand(-1, 1, count, -1)
    return rho(unit).permute(1, 2, 3, 0)


def _score(encoding: Encoding, x: Tensor, y: Tensor, complex_form: bool = False) -> Tensor:
    """rho(x)^H rho(y), dense ``[h t d d]``; for real features, or for the complex features of the encoding."""
    m_x, m_y = (_operator(encoding, z) for z in (x, y))
    if complex_form and encoding.is_lift:
        m_x, m_y = (torch.complex(*m.chunk(2, -2)) for m in (m_x, m_y))
    if complex_form and encoding.is_paired:
        m_x, m_y = (torch.complex(*m.unflatten(-2, (-1, 2)).unbind(-2)) for m in (m_x, m_y))
    return m_x.mH @ m_y


def _inexactness(encoding: Encoding, probe: _Probe) -> float:
    """Error of float32 scores at large positions, compared with float64 scores at the same offsets near zero."""
    q, k = probe.q, probe.k
    errors = []
    for far in (2**20, 2**31 - 2000):
        x, y = probe.random(TOKENS), probe.random(TOKENS)
        pairs = ((x, y, torch.float64), (x + far, y + far, torch.float32))
        near, distant = (
            encoding(a, dtype)(q.to(dtype)).double() @ encoding(b, dtype)(k.to(dtype)).double().mT for a, b, dtype in pairs
        )
        errors.append(_largest(distant - near))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


@torch.no_grad()
def _precision(probe: _Probe, dtype: torch.dtype) -> Finding:
    exact = probe.scores(probe.x, probe.y)
    error = _largest(probe.scores(probe.x, probe.y, dtype) - exact) / max(1.0, _largest(exact))
    note = f"largest error of a score in {str(dtype).removeprefix('torch.')}"
    return _law("precision", error, note, 16 * torch.finfo(dtype).eps)


@torch.no_grad()
def _batch(probe: _Probe) -> Finding:
    coupling = probe.coupling
    x, few = probe.random(2, TOKENS), probe.random(TOKENS - 2)
    leading = [coupling.query(positions, torch.float64).leading for positions in (x[0], few)]
    if len(leading[0]) > 1 or leading[0] != leading[1]:
        got = f"got leading axes {list(leading[0])} and {list(leading[1])} for {TOKENS} and {TOKENS - 2} tokens"
        return Finding("batch", False, math.inf, f"expected tables [*b h t .] for positions [*b t c], {got}")
    q = torch.cat((probe.q, probe.k))
    error = 0.0
    for side in (coupling.query, coupling.key):
        alone = torch.cat([side(x[n], torch.float64)(q[n : n + 1]) for n in range(2)])
        together = side(x, torch.float64)(q)
        error = max(error, _largest(together - alone) if together.shape == alone.shape else math.inf)
        if not coupling.group.refers_to_rows:
            first, last = slice(0, TOKENS - 2), slice(2, TOKENS)  # without class tokens, the last ones mean the same alone
            for some in (first,) if coupling.outside else (first, last):
                part = side(x[0, some], torch.float64)(q[:1, ..., some, :])
                error = max(error, _largest(part - alone[:1, ..., some, :]))
    note = "largest difference between samples, or some of the tokens, together and alone; tables are [*b h t .]"
    return _law("batch", error, note)


def _gradient(parameters: dict[str, torch.nn.Parameter], loss: Callable[[], Tensor]) -> Finding:
    if not parameters:
        return Finding("gradient", True, 0.0, "nothing is learned")
    with torch.enable_grad():
        grads = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    missing = [
        name
        for name, g in zip(parameters, grads, strict=True)
        if g is None or not g.isfinite().all() or not g.reshape(len(g) if g.ndim > 1 else 1, -1).any(1).all()
    ]
    note = f"parameters without a finite gradient: {', '.join(missing) or 'none'}"
    return Finding("gradient", not missing, float(len(missing)), note)


def _laws_of_scheme(scheme: Scheme, generator: torch.Generator) -> dict[str, Callable[[], Finding]]:
    causalities = (True,) if scheme.phases else (True, False)

    @cache
    def layer() -> tuple[list[Tensor], Tensor, Tensor]:
        """Random content, its positions, and a shift."""
        half = (scheme.max_length or 1000) // 2
        x, shift = _ordered(scheme.group, min(40, max(half, 1)), generator)
        if scheme.max_length is not None:
            x, shift = x % max(half, 1), torch.tensor([[half]])
        elif scheme.group.is_grid and _weaker(scheme):
            shift = shift + FAR  # a weaker law may equal the relative law near the origin
        features = scheme.encoding.features
        widths = (features, features, features // scheme.width)
        rows = [torch.randn(len(x), scheme.heads * width, generator=generator, dtype=torch.float64) for width in widths]
        return rows, x, shift

    @cache
    @torch.no_grad()
    def pairs() -> list[tuple[Tensor, Tensor]]:
        """Causal sums, then others, before and after the shift."""
        content, x, shift = layer()
        positions = (x, scheme.group.shift(shift, x))
        sums = [[_sums(scheme, content, a, causal) for a in positions] for causal in causalities]
        return [(a[0], b[0]) for before, after in sums for a, b in zip(before, after, strict=True)]

    def attention() -> Finding:
        _, x, shift = layer()
        return _unmoved("attention", "a layer's sums at shifted positions", pairs(), ("feature",), shift, x=x)

    def gradient() -> Finding:
        content, x, _ = layer()
        learned = {name: p for name, p in scheme.named_parameters() if not name.startswith("embedding.")}
        return _gradient(learned, lambda: torch.cat(_sums(scheme, content, x, causalities[-1]), -1).square().sum())

    def positive() -> Finding:
        smallest = pairs()[1][0].min().item()
        note = "smallest causal denominator of random queries and keys"
        return Finding("positive", smallest > 0, smallest, note, is_law=False)

    def seen() -> Finding:
        content, x, _ = layer()
        other = 2 * x if scheme.group.is_grid else scheme.group.random(len(x), generator=generator)
        other = other if scheme.max_length is None else other % scheme.max_length
        learned = [p for p in scheme.parameters() if p.requires_grad]
        sums = [torch.cat(_sums(scheme, content, a, causalities[-1]), -1) for a in (x, other)]
        change = _largest(sums[0] - sums[1]) / _largest(sums[0])
        if learned:  # tables may be initially zero: then gradients depend on positions
            gradients = [
                torch.autograd.grad(a.square().sum(), learned, allow_unused=True, materialize_grads=True) for a in sums
            ]
            changes = [_largest(a.double() - b) for a, b in zip(*gradients, strict=True)]
            change = max(change, max(changes) / sums[0].square().sum().item())
        return Finding("seen", change > SEEN, change, "largest change of a layer's sums at other positions")

    trivial = scheme.encoding.is_trivial and scheme.embedding is scheme.bias is scheme.decay is None
    laws = {"attention": attention, "gradient": gradient}
    laws |= {"positive": positive} if scheme.choices["denominator"] in ("plain", "encoded") else {}
    return laws | ({} if trivial else {"seen": seen})


def _laws_of_steps(scheme: Scheme, generator: torch.Generator) -> dict[str, Callable[[], Finding]]:
    """Laws of a scheme with content-dependent phases."""
    content = torch.randn(3, scheme.heads, TOKENS, scheme.encoding.features, generator=generator, dtype=torch.float64)
    q, k, v = content

    @torch.no_grad()
    def path() -> Finding:
        """Weights of the middle tokens, with random phase parameters: by themselves, and within the whole sequence."""
        phases, middle = copy.deepcopy(scheme.phases), slice(2, TOKENS - 2)
        for phase in phases:
            phase.parameter.copy_(torch.randn(phase.parameter.shape, generator=generator))

        def weights(span: slice) -> Tensor:
            unit = torch.eye(TOKENS, dtype=torch.float64)[span].expand(scheme.heads, -1, -1)
            return linear_attention(q[:, span], k[:, span], unit, phases=phases, denominator=None, causal=True)[..., middle]

        change = _largest(weights(slice(None))[:, middle] - weights(middle))
        return _law("path", change, "largest change of a weight by tokens before its key or after its query")

    @torch.no_grad()
    def seen() -> Finding:
        without = linear_attention(q, k, v, denominator=None, causal=True)
        change = _largest(linear_attention(q, k, v, phases=scheme.phases, denominator=None, causal=True) - without)
        change = change / _largest(without)
        return Finding("seen", change > SEEN, change, "largest change of sums without content-dependent phases")

    turn = scheme.turn
    return {"path": path, "seen": seen} | (_laws_of_product(turn, k) if isinstance(turn, HouseholderProduct) else {})


def _laws_of_product(product: HouseholderProduct, k: Tensor) -> dict[str, Callable[[], Finding]]:
    """`bounded` and `unitary` of a product of matrices, instead of the encoding's, which maps nothing."""

    @torch.no_grad()
    def grown() -> Tensor:
        """Norms of keys after all later tokens, as a stream's state holds them, less their norms before."""
        unit = torch.eye(TOKENS, dtype=torch.float64).expand(*k.shape[:-2], -1, -1)
        options: dict[str, Any] = {"phases": (product,), "denominator": None, "causal": True, "return_state": True}
        _, state = linear_attention(k, k, unit, **options)
        return state["sum0"].norm(dim=-2) / k.norm(dim=-1) - 1

    def bounded() -> Finding:
        return _law("bounded", max(0.0, grown().max().item()), "largest growth of a key over the tokens after it")

    def unitary() -> Finding:
        finding = _law("unitary", _largest(grown()), "largest change of a key's norm over the tokens after it")
        return replace(finding, is_law=product.strength == "reflection")

    return {"bounded": bounded, "unitary": unitary}


def _ordered(group: Group, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions in the order that causal decays and clipped terms need, and a shift."""
    shift = _shift(group, generator)
    if not group.is_grid:
        return group.random(tokens, generator=generator), shift
    if group.columns == 1:
        return torch.randint(1, 4, (tokens, 1), generator=generator).cumsum(0), shift
    return group.arrange(tokens), shift


def _sums(scheme: Scheme, content: Sequence[Tensor], x: Tensor, causal: bool) -> list[Tensor]:
    """A layer's sums ``[1 h t e]`` before the division, which would amplify rounding near zero.

    Content belongs to the last tokens at x; the first rows may be prefixes.
    """
    extra = len(x) - len(content[0])
    if scheme.embedding is not None:
        content = [a + scheme.embedding(x, torch.float64)[extra:] for a in content]
    q, k, v = (F.pad(a, (0, 0, extra, 0)).unflatten(-1, (scheme.heads, -1)).transpose(0, 1)[None] for a in content)
    attend = softmax_attention if scheme.attention == "softmax" else linear_attention
    at = scheme.at(x, dtype=torch.float64) | {"causal": causal, "mask": torch.arange(len(x)) >= extra if extra else None}
    runs = [(v, at)]
    if (denominator := at.get("denominator")) in ("plain", "encoded"):
        numerator = at | {"denominator": None}
        gates = [phase for phase in scheme.phases if isinstance(phase, ForgetGate)]
        weights = numerator if denominator == "encoded" else numerator | {"isometry": None, "phases": gates}
        runs = [(v, numerator), (torch.ones_like(v[..., :1]), weights | {"transport": None})]
    return [attend(q, k, values, **options)[..., extra:, :] for values, options in runs]


def _largest(error: Tensor) -> float:
    return error.abs().max().item()
