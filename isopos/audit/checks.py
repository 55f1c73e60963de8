"""Checks: their class, the table of all checks, and the comparison that most of them make."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from isopos.audit.report import Curves, Finding, Severity
from isopos.audit.subject import Skip, Subject, relative_error, traced

Measure = Callable[[Subject], Iterable[Finding]]
ALL = slice(None)


@dataclass(frozen=True)
class Check:
    """One question about a model's positions.

    Args:
        name: Shown in reports.
        question: The question that the check answers.
        needs: Names in `ABILITIES`; the check does not apply to a subject that lacks one.
        measure: Yields findings, or raises `Skip` with the reason why the check does not apply.
    """

    name: str
    question: str
    needs: tuple[str, ...]
    measure: Measure

    def reason(self, subject: Subject) -> str | None:
        """Why the check does not apply, or None."""
        return subject.without(*self.needs)

    def run(self, subject: Subject) -> list[Finding]:
        """The findings, each with the name of the check."""
        return [replace(finding, check=self.name) for finding in self.measure(subject)]


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def check(name: str, question: str, *needs: str) -> Callable[[Measure], Measure]:
    """A decorator that registers a function as a check.

    Examples:
        >>> @check("example", "Are outputs finite?")
        ... def finite(subject):
        ...     finite = bool(subject.outputs(subject.tokens(1, 4)).isfinite().all())
        ...     yield Finding("finite outputs", str(finite), "sound" if finite else "broken")
        >>> CHECKS.pop("example").question
        'Are outputs finite?'
    """

    def enter(measure: Measure) -> Measure:
        CHECKS[name] = Check(name, question, needs, measure)
        return measure

    return enter


def compared(
    subject: Subject,
    got: Tensor,
    expected: Tensor,
    says: str,
    *,
    remedy: str = "",
    issue: str = "",
    slack: float = 1.0,
    fault: Callable[[], tuple[str, Curves]] | None = None,
) -> Finding:
    """A finding that two outputs are equal up to rounding; `fault` locates a difference and returns curves of layers."""
    error, bound = relative_error(got, expected), subject.tolerance * slack
    measured = f"relative difference {error:.1e}, rounding {subject.rounding:.0e}"
    curves = by_position({"outputs": got}, {"outputs": expected})
    if error <= bound:
        return Finding(says, measured, "sound", curves=curves)
    if error == float("inf"):
        measured = "outputs are not finite"
    place, more = fault() if fault is not None else ("", ())
    return Finding(says, measured, "broken", place, remedy, issue, curves=curves + more)


def first_difference(
    subject: Subject, changed: Callable[[nn.Module], object], whole: Callable[[nn.Module], object], rows: slice = ALL
) -> tuple[str, Curves]:
    """The first submodule whose output differs between two calls that should agree, the difference, and errors of layers.

    Args:
        changed: A call on the exact copy.
        whole: The call that is right.
        rows: Tokens of `changed` that are those of `whole`.
    """
    traces = []
    for call, part in ((changed, rows), (whole, ALL)):
        with torch.no_grad(), traced(subject.exact) as seen:
            call(subject.exact)
        traces.append(seen if part is ALL else {name: a[:, part] for name, a in seen.items() if a.ndim == 3})
    curves = by_position(*(layer_outputs(subject.exact, trace) for trace in traces))
    for name, a in traces[0].items():
        b = traces[1].get(name)
        if b is not None and a.shape == b.shape and (e := relative_error(a, b)) > subject.tolerance:
            kind = type(subject.exact.get_submodule(name)).__name__
            return f"first at {name} ({kind}, relative difference {e:.1e})", curves
    return "", curves


def layer_outputs(module: nn.Module, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of items of the outermost `nn.ModuleList` or `nn.Sequential`."""
    layers: dict[str, Tensor] = {}
    for name in sorted(outputs, key=lambda name: (name.count("."), name)):
        up = name.rpartition(".")[0]
        if isinstance(module.get_submodule(up), nn.ModuleList | nn.Sequential) and not any(
            name.startswith(f"{other}.") for other in layers
        ):
            layers[name] = outputs[name]
    return layers


def by_position(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Curves:
    """Errors of outputs ``[b t v]`` at each position, relative to the largest expected number."""
    curves = []
    for name, a in got.items():
        b = expected.get(name)
        if b is None or a.shape != b.shape or a.ndim != 3:
            continue
        a, b = a.double(), b.double()
        errors = ((a - b).abs() / b.abs().max().clamp_min(1e-30)).amax((0, 2)).nan_to_num(torch.inf).tolist()
        curves.append((name, tuple(enumerate(errors))))
    return tuple(curves)


def judged(
    says: str, measured: str, sound: bool, where: str = "", remedy: str = "", issue: str = "", fault: Severity = "broken"
) -> Finding:
    """A finding that is sound, or else a fault with its remedy and a public issue."""
    return Finding(says, measured, "sound", where) if sound else Finding(says, measured, fault, where, remedy, issue)


def unless(condition: bool, reason: str) -> None:
    """Raise `Skip` with the reason if the condition holds."""
    if condition:
        raise Skip(reason)
