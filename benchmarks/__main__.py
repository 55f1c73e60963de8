"""`python -m benchmarks`: the options of `isopos bench`, and races against other libraries."""

import sys

from benchmarks.races import join
from isopos import cli

if __name__ == "__main__":
    join()
    sys.argv[:1] = ["isopos", "bench"]
    cli.main()
