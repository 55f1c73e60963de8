"""Runs of a command on the machines of a cluster, with their progress on the console."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from isopos.lab.reports import grids
from isopos.lab.reports.progress import Bars
from isopos.lab.runs.cluster import Failed, Job, spread

SEEN = 60.0  # seconds until what another machine wrote is seen here, on a network's file system


def do_jobs(jobs: Sequence[Job], address: str, device: str, shared: Path, console: Console) -> bool:
    """Do jobs on the cluster at an address, as `cluster.spread` does; return whether each of them could be done.

    Each job has as many threads as PyTorch has in this process, so that its numbers are those of a run here.
    """
    import torch

    done, failed, total = 0, False, sum(job.steps for job in jobs)
    with (
        Bars(console, total=total) as bars,
        contextlib.closing(spread(jobs, address, device, torch.get_num_threads(), shared)) as ended,
    ):
        show = bars.add(f"{len(jobs)} runs on a cluster", total)
        for job, said in ended:
            if isinstance(said, Failed):
                failed |= not said.again
                said = f"{said.reason}; {'it is begun again' if said.again else 'it is not done'}"
                grids.say(bars.progress.console, f"{job.name}: {said}")
                continue
            if not said and not _seen(job.leaves):
                failed, said = True, f"{job.leaves} is not seen here: machines of a cluster need the folder at the same path"
            grids.say(bars.progress.console, f"{job.name}: {said or 'done'}")
            done += job.steps
            show(done)
    return not failed


def _seen(path: Path) -> bool:
    end = time.monotonic() + SEEN
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return path.exists()
