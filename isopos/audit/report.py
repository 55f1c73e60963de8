"""Results of an audit: findings, and a report of them as text, a table or JSON."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

Severity = Literal["sound", "note", "risk", "broken"]
SOUND, BROKEN, UNMEASURABLE = 0, 1, 3
"""Exit statuses."""
Curves = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
"""Relative errors by position, each with a name: ((name, ((position, error), ...)), ...)."""
COLOURS = {"sound": "green", "note": "cyan", "risk": "yellow", "broken": "red"}
OF_ANY_MODULE = ("meta device", "saving")  # checks that say nothing of positions by themselves


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Args:
        expected: What sound positions give.
        measured: What this model gives.
        severity: "sound"; "note", a property and no fault; "risk", sound now and broken after a common call; "broken".
        where: Module, configuration entry or position.
        remedy: What to change.
        issue: A public issue with this fault, OWNER/NAME#NUMBER.
        line: Of code or configuration, FILE:LINE; `audit` fills it in.
        curves: Errors by position, of outputs and of each layer.
        check: Name of the check; `audit` fills it in.
    """

    expected: str
    measured: str
    severity: Severity
    where: str = ""
    remedy: str = ""
    issue: str = ""
    line: str = ""
    curves: Curves = ()
    check: str = ""


@dataclass(frozen=True)
class Unmeasured:
    """A check without a result.

    Args:
        failed: True where the check or the model raised an exception, False where the check does not apply.
    """

    check: str
    reason: str
    failed: bool


@dataclass(frozen=True)
class Report:
    """The findings of an audit. Printed, it is text whose first line is the verdict.

    Args:
        subject: Name of the model.
        results: Findings of all checks, sound ones included.
        unmeasured: Checks without a result, each with the reason.
    """

    subject: str
    results: tuple[Finding, ...]
    unmeasured: tuple[Unmeasured, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The results that are not sound: faults first, then risks, then notes."""
        order = ("broken", "risk", "note")
        return tuple(sorted((a for a in self.results if a.severity in order), key=lambda a: order.index(a.severity)))

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the broken checks, each once."""
        return tuple(dict.fromkeys(a.check for a in self.results if a.severity == "broken"))

    @property
    def sound(self) -> bool:
        """Whether something was measured and nothing is broken or failed."""
        return self.status == SOUND

    @property
    def status(self) -> int:
        """Exit status: 0 sound, 1 broken, 3 not measurable (a check failed, or none of positions applies)."""
        if self.broken:
            return BROKEN
        measured = any(a.check not in OF_ANY_MODULE for a in self.results)
        return SOUND if measured and not any(a.failed for a in self.unmeasured) else UNMEASURABLE

    @property
    def verdict(self) -> str:
        """One line: whether positions are sound."""
        if self.status == BROKEN:
            return f"{self.subject}: positions are BROKEN: {', '.join(self.broken)}"
        if self.status == UNMEASURABLE:
            failed = ", ".join(a.check for a in self.unmeasured if a.failed) or "no check of positions applies"
            return f"{self.subject}: positions could not be measured: {failed}"
        counts = [sum(a.severity == kind for a in self.results) for kind in ("risk", "note")]
        told = [f"{n} {kind}{'s' * (n != 1)}" for n, kind in zip(counts, ("risk", "note"), strict=True) if n]
        return f"{self.subject}: positions are sound ({', '.join([f'{len(self.results)} results', *told])})"

    @property
    def encodings(self) -> tuple[str, ...]:
        """A description of the encodings of the model, with their layers."""
        return tuple(a.measured + f" at {a.where}" * bool(a.where) for a in self.results if a.check == "encoding")

    def to_dict(self) -> dict[str, Any]:
        """The whole report as JSON values; numbers that are not finite, which JSON does not have, are None."""
        head = {"subject": self.subject, "sound": self.sound, "status": self.status, "verdict": self.verdict}
        every = {"results": [asdict(a) for a in self.results], "unmeasured": [asdict(a) for a in self.unmeasured]}
        return head | _finite(every)

    def __str__(self) -> str:
        """The verdict, the encodings, the findings that are not sound, and the sound checks by name."""
        lines = [self.verdict, *(f"  encoding: {text}" for text in self.encodings)]
        for a in self.findings:
            lines.append(f"  {a.severity}: {a.check}{f' at {a.where}' * bool(a.where)}")
            entries = (("expected", a.expected), ("measured", a.measured), ("line", a.line))
            entries += (("remedy", a.remedy), ("issue", a.issue))
            lines += [f"    {name}: {text}" for name, text in entries if text]
        passed = dict.fromkeys(a.check for a in self.results if a.severity == "sound" and a.check not in self.broken)
        lines += [f"  sound: {', '.join(passed)}"] * bool(passed)
        lines += [f"  {'failed' if a.failed else 'not measured'}: {a.check}: {a.reason}" for a in self.unmeasured]
        return "\n".join(lines)

    __repr__ = __str__

    def show(self, console: "Console", whole: bool = False) -> None:
        """Print the verdict and a table of the findings; with `whole`, of all results."""
        from rich.markup import escape
        from rich.table import Table

        colour = {0: "green", 1: "red"}.get(self.status, "yellow")
        console.print(f"[bold {colour}]{escape(self.verdict)}[/]")
        for text in self.encodings:
            console.print(escape(f"encoding: {text}"))
        table = Table("severity", "check", "expected", "measured", "where", "remedy")
        sound = [a for a in self.results if a.severity == "sound"]
        for a in (*self.findings, *(sound if whole else ())):
            remedy = " ".join(filter(None, (a.remedy, a.issue and f"({a.issue})")))
            where = "\n".join(filter(None, (a.where, a.line)))
            cells = [escape(text) for text in (a.check, a.expected, a.measured, where, remedy)]
            table.add_row(f"[{COLOURS[a.severity]}]{a.severity}[/]", *cells)
        if table.rows:
            console.print(table)
        if sound and not whole:
            names = ", ".join(dict.fromkeys(a.check for a in sound if a.check not in self.broken))
            console.print(escape(f"sound: {names}"))
        for a in self.unmeasured:
            console.print(escape(f"{'failed' if a.failed else 'not measured'}: {a.check}: {a.reason}"))


def merged(subject: str, reports: Iterable[tuple[str, Report]]) -> Report:
    """One report of the parts of a model, each with the name of its part."""
    results, unmeasured = [], []
    for part, report in reports:
        for a in report.results:
            results.append(replace(a, where=" ".join(filter(None, (f"{part}:", a.where)))))
        unmeasured += [Unmeasured(a.check, f"{part}: {a.reason}", a.failed) for a in report.unmeasured]
    return Report(subject, tuple(results), tuple(unmeasured))


def _finite(value: Any) -> Any:
    """The same value with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_finite(one) for one in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
