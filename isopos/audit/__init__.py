"""Audits: `isopos.audit(model)` finds faults in the positions of any PyTorch model.

A check is a function of a `Subject` that yields findings, entered by `check(name, question, *needs)`; the report holds them
all. Files, in reading order: `subject.py` (what checks may call), `checks.py` (what a check is, and the comparison up to
measured rounding), `calls.py`, `streams.py`, `tables.py`, `encoding.py`, `learning.py` (the checks), `scores.py` (queries,
keys and logits of any torch code), `declared.py` (frequencies of a
configuration in float64), `modules.py` (torch modules as subjects; models of transformers are in `isopos.integrations`),
`run.py`, `report.py`.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isopos.audit.checks import CHECKS, Check, check
    from isopos.audit.report import Finding, Report, Unmeasured
    from isopos.audit.run import audit, audited
    from isopos.audit.subject import Subject

__all__ = ["CHECKS", "Check", "Finding", "Report", "Subject", "Unmeasured", "audit", "audited", "check"]

_HOME = {"CHECKS": "checks", "Check": "checks", "check": "checks", "Finding": "report", "Report": "report"}
_HOME |= {"Unmeasured": "report", "audit": "run", "audited": "run", "Subject": "subject"}


class _Callable(ModuleType):
    """A module that is called like its function of the same name: ``isopos.audit(model)``."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.audit(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name == "CHECKS":
            importlib.import_module("isopos.audit.run")  # which enters them
        value = getattr(importlib.import_module(f"isopos.audit.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value


sys.modules[__name__].__class__ = _Callable
