"""The child process of `benchmarks`: `isopos.lab.bench.processes` with other libraries."""

import sys

from benchmarks.races import join
from isopos.lab.bench import processes

if __name__ == "__main__":
    join()
    processes.main(*sys.argv[1:])
