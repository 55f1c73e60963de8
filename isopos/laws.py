"""The laws of positional encodings, measured: what a scheme promises, checked on random positions in float64.

    relative      <rho(sx) q, rho(sy) k> = <rho(x) q, rho(y) k>: a score sees x^-1 y only (PermuteFormer, Property 1)
    isometry      |rho(x) q| = |q|, so scores are bounded (PermuteFormer, Property 2)
    homomorphism  W(x) W(y) = W(xy) for W(x) = rho(1)^H rho(x) (a lift is measured in its complex form)
    exact         float32 scores at positions about 2^20 and 2^31 are within 1e-6 of float64 scores
    batch         positions per sample give what each sample's positions give alone, on axes [*b h t d]
    gradient      a gradient reaches every learned parameter of every head
    attention     a layer's sums are the same at shifted positions, denominator, decay and embedding included

Two properties are choices, and reported beside them: whether scores tell direction, and whether denominators are positive.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isopos.encodings import Encoding, InBasis, Rotary
from isopos.functional import linear_attention, softmax_attention
from isopos.positions import Line, Product
from isopos.schemes import Scheme

__all__ = ["Finding", "Report", "check"]

TOLERANCE = 1e-9  # float64, positions to 1000
EXACT = 1e-6
TOKENS = 7


@dataclass(frozen=True)
class Finding:
    """One law or property: its largest error, or the figure behind it, and whether that is within bounds."""

    name: str
    holds: bool
    figure: float
    note: str
    is_law: bool = True
    counterexample: str = ""


@dataclass(frozen=True)
class Report:
    """What was measured. Printed, it is a table."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether every law holds."""
        return all(finding.holds for finding in self.findings if finding.is_law)

    @property
    def broken(self) -> list[str]:
        """The laws that do not hold."""
        return [finding.name for finding in self.findings if finding.is_law and not finding.holds]

    def __getitem__(self, name: str) -> Finding:
        """The finding of a name."""
        return next(finding for finding in self.findings if finding.name == name)

    def __str__(self) -> str:
        """A line a finding."""
        rows = [
            f"  {f.name:<13} {'yes' if f.holds else 'no' if not f.is_law else 'BROKEN':<7} {f.figure:9.1e}  {f.note}"
            + (f"\n{'':37}{f.counterexample}" if f.counterexample else "")
            for f in self.findings
        ]
        return "\n".join(
            [f"{self.subject}: {'every law holds' if self.holds else 'broken: ' + ', '.join(self.broken)}", *rows]
        )


def check(subject: Scheme | Encoding | Callable[[], Scheme | Encoding], *, seed: int = 0) -> Report:
    """Measure the laws of a scheme, an encoding, or what a factory without arguments returns.

    Args:
        subject: What to measure; parameters are left as they are.
        seed: Of positions, queries and keys.

    Returns:
        A report; ``report.holds`` is the verdict, ``print(report)`` the figures.

    Example:
        >>> import isopos
        >>> check(isopos.rope(8, 2)).holds
        True
        >>> check(isopos.sinusoidal(8, 2)).broken
        ['attention']
    """
    if not isinstance(subject, (Scheme, Encoding)):
        subject = subject() if callable(subject) else subject
    if not isinstance(subject, (Scheme, Encoding)):
        raise TypeError(f"subject: expected a Scheme, an Encoding or what makes one without arguments, got {subject!r}")
    generator = torch.Generator().manual_seed(seed)
    missing = [a for a in ("group", "features", "out_features") if isinstance(subject, Encoding) and not hasattr(subject, a)]
    if missing:
        raise ValueError(f"subject: expected {type(subject).__name__} to set {', '.join(missing)} in its constructor")
    encoding = subject.encoding if isinstance(subject, Scheme) else subject
    findings = _encoding_findings(encoding, generator)
    if isinstance(subject, Scheme):
        findings += _scheme_findings(subject, generator)
    seen = encoding if not isinstance(subject, Scheme) else subject.embedding or encoding
    return Report(type(seen).__name__, tuple(findings))


def _encoding_findings(encoding: Encoding, generator: torch.Generator) -> list[Finding]:
    group = encoding.group
    x, y = (group.random(TOKENS, generator=generator) for _ in range(2))
    shift = group.random(1, generator=generator)
    origin = group.origin(1)
    with torch.no_grad():
        here, there = (_score(encoding, group.compose(s, x), group.compose(s, y)) for s in (origin, shift))
        ahead, behind = (_score(encoding, origin, z) for z in (x, group.inverse(x)))
        w_x, w_y, w_xy = (_score(encoding, origin, z, True) for z in (x, y, group.compose(x, y)))
        unit = torch.eye(encoding.features, dtype=torch.float64)
        errors = {
            "relative": (_most(here - there), TOLERANCE, "largest change of a score when both positions are shifted"),
            "isometry": (_most(_score(encoding, x, x) - unit), TOLERANCE, "largest change of a norm"),
        }
        if encoding.out_features == encoding.features or _is_lift(encoding):
            errors["homomorphism"] = (_most(w_x @ w_y - w_xy), TOLERANCE, "largest |W(x) W(y) - W(xy)|")
        if _is_line(encoding):
            errors["exact"] = (
                _inexactness(encoding, generator),
                EXACT,
                "largest error of a float32 score up to position 2^31",
            )
        direction = _most(ahead - behind)
    findings = [Finding(name, error <= bound, error, note) for name, (error, bound, note) in errors.items()]
    if not findings[0].holds:
        findings[0] = replace(findings[0], counterexample=_counterexample(here, there, x, y, shift))
    findings.append(_batch_finding(encoding, generator))
    findings.append(_gradient_finding(encoding, x, y, generator))
    note = "score(x, y) differs from score(y, x)" if direction > TOLERANCE else "score(x, y) = score(y, x): direction-blind"
    return [*findings, Finding("directional", direction > TOLERANCE, direction, note, is_law=False)]


def _counterexample(here: Tensor, there: Tensor, x: Tensor, y: Tensor, shift: Tensor) -> str:
    """Where two score matrices ``[h t d d]`` differ most: positions and numbers."""
    head, token, i, j = torch.unravel_index((here - there).abs().argmax(), here.shape)
    at = f"head {int(head)}, query feature {int(i)}, key feature {int(j)}, x = {x[token].tolist()}, y = {y[token].tolist()}"
    scores = f"{here[head, token, i, j].item():.6g}, shifted by {shift[0].tolist()} {there[head, token, i, j].item():.6g}"
    return f"{at}: score {scores}"


def _operator(encoding: Encoding, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Dense operators ``[h t d' d]`` at positions ``[t c]``."""
    unit = torch.eye(encoding.features, dtype=dtype)[:, None, None].expand(-1, 1, len(x), -1)
    return encoding(x, dtype)(unit).permute(1, 2, 3, 0)


def _score(encoding: Encoding, x: Tensor, y: Tensor, complex_form: bool = False) -> Tensor:
    """rho(x)^H rho(y), dense ``[h t d d]``; a lift's features are its real and imaginary parts."""
    m_x, m_y = (_operator(encoding, z) for z in (x, y))
    if complex_form and _is_lift(encoding):
        m_x, m_y = (torch.complex(*m.chunk(2, -2)) for m in (m_x, m_y))
    return m_x.mH @ m_y


def _is_lift(encoding: Encoding) -> bool:
    """Whether the output is the real parts, then the imaginary parts, of as many complex features."""
    return _is_lift(encoding.encoding) if isinstance(encoding, InBasis) else isinstance(encoding, Rotary) and encoding.lift


def _is_line(encoding: Encoding) -> bool:
    parts = encoding.group.parts if isinstance(encoding.group, Product) else (encoding.group,)
    return all(isinstance(part, Line) for part in parts)


def _inexactness(encoding: Encoding, generator: torch.Generator) -> float:
    q, k = torch.randn(2, 1, 1, TOKENS, encoding.features, generator=generator, dtype=torch.float64)
    q, k = (a / a.norm(dim=-1, keepdim=True) for a in (q, k))
    worst = 0.0
    for far in (2**20, 2**31 - 2000):
        x, y = (encoding.group.random(TOKENS, generator=generator) + far for _ in range(2))
        scores = [
            encoding(x, dtype)(q.to(dtype)).double() @ encoding(y, dtype)(k.to(dtype)).double().mT
            for dtype in (torch.float32, torch.float64)
        ]
        worst = max(worst, _most(scores[0] - scores[1]))
    return worst


@torch.no_grad()
def _batch_finding(encoding: Encoding, generator: torch.Generator) -> Finding:
    x = encoding.group.random(2, TOKENS, generator=generator)
    leading = [encoding(x[0, :count], torch.float64).leading for count in (TOKENS, TOKENS - 2)]
    if len(leading[0]) > 1 or leading[0] != leading[1]:
        found = f"got leading axes {list(leading[0])} and {list(leading[1])} for {TOKENS} and {TOKENS - 2} tokens"
        return Finding("batch", False, float("inf"), f"expected tables [*b h t .] for positions [*b t c], {found}")
    heads = max(*leading[0], 1) if leading[0] else 1
    q = torch.randn(2, heads, TOKENS, encoding.features, generator=generator, dtype=torch.float64)
    alone = torch.cat([encoding(x[n], torch.float64)(q[n : n + 1]) for n in range(2)])
    together = encoding(x, torch.float64)(q)
    error = _most(together - alone) if together.shape == alone.shape else float("inf")
    note = "largest difference between samples together and alone; tables are [*b h t .] for positions [*b t c]"
    return Finding("batch", error <= TOLERANCE, error, note)


def _gradient_finding(encoding: Encoding, x: Tensor, y: Tensor, generator: torch.Generator) -> Finding:
    parameters = dict(encoding.named_parameters())
    if not parameters:
        return Finding("gradient", True, 0.0, "nothing is learned")
    heads = max((parameter.shape[0] for parameter in parameters.values() if parameter.ndim > 1), default=1)
    q, k = torch.randn(2, 1, heads, len(x), encoding.features, generator=generator, dtype=torch.float64)
    with torch.enable_grad():
        scores = (encoding(x, torch.float64)(q) * encoding(y, torch.float64)(k)).sum(-1)
        loss = scores.square().sum() + 0 * q.requires_grad_().sum()  # differentiable, whatever the scores depend on
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    dead = [
        name
        for name, g in zip(parameters, grads, strict=True)
        if g is None or not g.reshape(len(g) if g.ndim > 1 else 1, -1).any(1).all()
    ]
    return Finding("gradient", not dead, float(len(dead)), f"parameters without gradient: {', '.join(dead) or 'none'}")


def _scheme_findings(scheme: Scheme, generator: torch.Generator) -> list[Finding]:
    heads, width = scheme.heads, scheme.encoding.features
    group = scheme.encoding.group
    half = (scheme.max_length or 1000) // 2
    tokens = min(40, max(half, 1))
    content = torch.randn(3, tokens, heads * width, generator=generator, dtype=torch.float64)
    x, shift = group.random(tokens, generator=generator), group.random(1, generator=generator)
    if scheme.decay is not None or scheme.embedding is not None:  # on a line, in order
        x, shift = (x % max(half, 1)).sort(0).values, torch.tensor([[half]])

    def sums(x: Tensor, causal: bool) -> list[Tensor]:
        """A layer's output, before the division: a denominator near zero would blow rounding up."""
        q, k, v = content if scheme.embedding is None else content + scheme.embedding(x, torch.float64)
        q, k, v = (a.unflatten(-1, (heads, width)).transpose(-2, -3)[None] for a in (q, k, v))
        at = scheme.at(x, dtype=torch.float64)
        if scheme.attention == "softmax":
            return [softmax_attention(q, k, v, causal=causal, **at)]
        denominator = at.pop("denominator")
        out = [linear_attention(q, k, v, causal=causal, denominator=None, **at)]
        if denominator is not None:
            at["isometry"] = at["isometry"] if denominator == "encoded" else None
            out.append(linear_attention(q, k, torch.ones_like(v[..., :1]), causal=causal, denominator=None, **at))
        return out

    with torch.no_grad():
        pairs = [
            pair
            for causal in (True, False)
            for pair in zip(sums(x, causal), sums(group.compose(shift, x), causal), strict=True)
        ]
    error = max(_most(before - after) / max(1.0, _most(before)) for before, after in pairs)
    note = "largest change of a layer's sums at shifted positions"
    findings = [Finding("attention", error <= TOLERANCE, error, note)]
    if scheme.attention == "linear" and not scheme.normalised:
        least = pairs[1][0].min().item()
        note = "least causal denominator of random queries and keys"
        findings.append(Finding("positive", least > 0, least, note, is_law=False))
    return findings


def _most(error: Tensor) -> float:
    return error.abs().max().item()
