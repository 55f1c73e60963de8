"""The laws that every scheme is measured by."""

from isopos.laws.checks import Finding, Report, check

__all__ = ["Finding", "Report", "check"]
