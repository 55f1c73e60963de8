"""Run the jobs of a command on a cluster, with a progress bar."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from isopos.lab.reports import grids
from isopos.lab.reports.progress import Bars
from isopos.lab.runs.cluster import Failed, Job, spread

VISIBLE_SECONDS = 60.0  # until this machine sees files of other machines on a network file system


def do_jobs(jobs: Sequence[Job], address: str, device: str, shared: Path, console: Console) -> bool:
    """Run jobs on the cluster at an address and print their outcomes; return whether all succeeded.

    Each job has PyTorch's number of threads in this process, so that its results equal those of a run here.
    """
    import torch

    done, failed, total = 0, False, sum(job.steps for job in jobs)
    with (
        Bars(console, total=total) as bars,
        contextlib.closing(spread(jobs, address, device, torch.get_num_threads(), shared)) as ended,
    ):
        show = bars.add(f"{len(jobs)} runs on a cluster", total)
        for job, outcome in ended:
            if isinstance(outcome, Failed):
                failed |= not outcome.retried
                outcome = f"{outcome.reason}; {'it starts again' if outcome.retried else 'it is not done'}"
                grids.say(bars.progress.console, f"{job.name}: {outcome}")
                continue
            if not outcome and not _appears(job.output):
                failed = True
                outcome = f"{job.output} does not exist here: machines of a cluster need the folder at the same path"
            grids.say(bars.progress.console, f"{job.name}: {outcome or 'done'}")
            done += job.steps
            show(done)
    return not failed


def _appears(path: Path) -> bool:
    end = time.monotonic() + VISIBLE_SECONDS
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return path.exists()
