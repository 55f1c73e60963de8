"""Which figures the conclusions of docs/results and docs/choosing.md were written for.

They are prose, which nothing derives. `python -m tools.conclusions NAME ...` notes that those about these tables agree with
their figures of today; a test fails when figures change after it.
"""

import hashlib
import json
import sys

from isopos.lab.reports.findings import ResultTable
from tools.results_page import FOLDER, read_all

__all__ = ["REMEDY", "fingerprint", "read"]

FILE = FOLDER / "conclusions.json"
REMEDY = (
    "the figures of {name} have changed since conclusions about it were written: read those in docs/results/README.md, "
    "docs/choosing.md and CHANGELOG.md again, then python -m tools.conclusions {name}"
)


def fingerprint(table: ResultTable) -> str:
    """A hash of a table's figures."""
    return hashlib.sha256(json.dumps(table.content["figures"], sort_keys=True).encode()).hexdigest()[:16]


def read() -> dict[str, str]:
    """Fingerprints of the figures that conclusions were written for, by table."""
    return json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    tables = {table.name: table for table in read_all()}
    if unknown := [name for name in sys.argv[1:] if name not in tables]:
        sys.exit(f"expected tables of docs/results, got {', '.join(unknown)}; there are {', '.join(tables)}")
    written = (read() if FILE.exists() else {}) | {name: fingerprint(tables[name]) for name in sys.argv[1:]}
    kept = {name: written[name] for name in sorted(written) if name in tables}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
