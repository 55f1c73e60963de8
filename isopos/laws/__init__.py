"""The laws that every scheme is measured by, and each score a second time, by explicit matrices."""

from isopos.laws.canonical import canonical
from isopos.laws.checks import Finding, Report, check

__all__ = ["Finding", "Report", "canonical", "check"]
