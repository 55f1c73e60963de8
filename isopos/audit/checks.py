"""What a check is, the table of all checks, and the comparison that most of them make."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from isopos.audit.report import Finding
from isopos.audit.subject import Skip, Subject, relative_error, traced

__all__ = ["CHECKS", "Check", "check", "compared", "first_difference"]

Measure = Callable[[Subject], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One question about a model's positions.

    Args:
        name: Shown in reports.
        question: What it answers.
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
    """Enter a function as the measure of a check.

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
    where: str = "",
    remedy: str = "",
    issue: str = "",
    slack: float = 1.0,
    fault: Callable[[], str] | None = None,
) -> Finding:
    """A finding that two outputs are equal up to rounding; `fault` finds the place of a difference."""
    error, bound = relative_error(got, expected), subject.tolerance * slack
    measured = f"relative difference {error:.1e}, rounding {subject.rounding:.0e}"
    if error <= bound:
        return Finding(says, measured, "sound", where)
    if error == float("inf"):
        measured = "outputs are not finite"
    place = fault() if fault is not None else ""
    return Finding(says, measured, "broken", " ".join(filter(None, (where, place))), remedy, issue)


def first_difference(
    subject: Subject, changed: Callable[[nn.Module], Tensor | None], whole: Callable[[nn.Module], Tensor | None]
) -> str:
    """The first submodule whose output differs between two calls that should agree, and by how much.

    Args:
        changed: A call on the exact copy; what it returns is an index of tokens ``[t]`` to compare, or None for all.
        whole: The call that is right, likewise.
    """
    traces = []
    for call in (changed, whole):
        with torch.no_grad(), traced(subject.exact) as seen:
            index = call(subject.exact)
        traces.append({name: a if index is None else _at(a, index) for name, a in seen.items()})
    for name, a in traces[0].items():
        b = traces[1].get(name)
        if b is not None and a is not None and a.shape == b.shape and (e := relative_error(a, b)) > subject.tolerance:
            return f"first at {name} (relative difference {e:.1e})"
    return ""


def _at(a: Tensor, index: Tensor) -> Tensor | None:
    """Rows of tokens, where there are as many."""
    return a[:, index] if a.ndim == 3 and a.shape[1] > int(index.max()) else None


def unless(condition: bool, reason: str) -> None:
    """Raise `Skip` with the reason where the condition holds."""
    if condition:
        raise Skip(reason)
