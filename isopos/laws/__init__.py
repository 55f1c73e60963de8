"""Laws of positional encodings, and their measurement."""

from isopos.laws.checks import Finding, Report, check

__all__ = ["Finding", "Report", "check"]
