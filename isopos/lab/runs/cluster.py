"""Jobs on the machines of a Ray cluster, which share the working folder; each job leaves its files there.

Ray gives each job a process, and says which of them ended. A job whose process was killed, or whose machine went away, is
begun again, and goes on from what it left in the folder. Ray is the extra `cluster`, and is imported where it is used.
"""

import contextlib
import importlib.util
import logging
import os
import pickle
import platform
import socket
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isopos
from isopos.lab.runs import signals

ANSWER = 5.0  # seconds for a connection
LEASE = 120.0  # seconds for the locks of a machine that went away
ENDING = 60.0  # seconds for a checkpoint of jobs that are interrupted
LOSSES = 3  # of a job's processes, after which it is given up


@dataclass(frozen=True)
class Job:
    """A call in a process of the cluster: `call(*arguments, seconds)`, where `seconds` is how long to wait for locks.

    The call returns a line about what hindered it, or nothing.
    """

    name: str  # what a reader calls it
    call: Callable[..., str]  # of a module that all machines have
    arguments: tuple[Any, ...]  # what can be pickled
    leaves: Path  # the file that it writes last
    steps: int  # what it counts for, where progress is shown
    ready: Callable[[], bool] = lambda: True  # whether it can begin, asked of the process that spreads


@dataclass(frozen=True)
class Failed:
    """What a job comes to that could not be done."""

    reason: str
    again: bool = False  # whether it is begun again


def check_cluster(address: str, device: str, threads: int) -> None:
    """Raise a ValueError that says why no job can run on the cluster at an address, where none can.

    Args:
        address: HOST:PORT, or auto for the cluster to which this machine belongs.
        device: What a job computes on: cpu, or cuda for a GPU of its own.
        threads: How many CPUs a job takes.
    """
    import torch

    if importlib.util.find_spec("ray") is None:
        raise ValueError('ray: expected Ray, which is not installed: pip install "isopos[cluster]"')
    if torch.device(device).index is not None:
        raise ValueError(f"device: expected cpu or cuda, of which Ray gives each run one, got {device!r}")
    if address != "auto":
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdecimal() and "/" not in host):
            raise ValueError(f"ray: expected HOST:PORT of a cluster, or auto for that of this machine, got {address!r}")
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER).close()
        except (OSError, OverflowError) as error:
            raise ValueError(f"ray: no cluster answers at {address}: {error}; ray start --head begins one") from None
    with _connected(address) as ray:
        for name, least in (("CPU", threads), ("GPU", int(device == "cuda"))):
            most = max((node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]), default=0)
            if most < least:
                remedy = "; set OMP_NUM_THREADS to fewer" if name == "CPU" else ""
                raise ValueError(f"ray: expected a machine with {least} {name}s for a run, got at most {most:g}{remedy}")


def spread(
    jobs: Sequence[Job], address: str, device: str, threads: int, shared: Path
) -> Generator[tuple[Job, str | Failed], None, None]:
    """Do jobs on a cluster; yield each one, as it ends, with what its call returned or `Failed`.

    A job that was never ready is left out. Closing the iterator, or Ctrl-C, interrupts the jobs that are running and waits
    until they have left a checkpoint.

    Args:
        jobs: In the order in which they begin.
        address: As `check_cluster` takes it; so are the next two.
        device: What a job computes on.
        threads: How many CPUs a job takes.
        shared: A file in the working folder, by which a machine shows that it shares the folder.
    """
    place = (os.getcwd(), str(shared), isopos.__version__, threads)
    waiting, running, lost = [*jobs], {}, Counter()
    with _connected(address) as ray:
        begin = ray.remote(num_cpus=threads, num_gpus=int(device == "cuda"), max_retries=0)(_call)
        try:
            while True:
                for job in [job for job in waiting if job.ready()]:
                    waiting.remove(job)
                    seconds = LEASE if lost[job.name] else 0.0
                    running[begin.remote(*place, pickle.dumps((job.call, (*job.arguments, seconds))))] = job
                if not running:
                    return
                signals.heed()
                for reference in ray.wait([*running], timeout=1.0)[0]:
                    job = running.pop(reference)
                    try:
                        yield job, ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    except ray.exceptions.RayError as error:
                        lost[job.name] += 1
                        if again := lost[job.name] <= LOSSES:
                            waiting.append(job)
                        yield job, Failed(f"its process was lost: {_first_line(error)}", again)
        except KeyboardInterrupt:
            signals.heed()  # which signal it was, of which Ray's wait leaves no trace
            raise
        finally:
            for reference in running:
                ray.cancel(reference)
            if running:
                ray.wait([*running], num_returns=len(running), timeout=ENDING)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, as long as this process is joined to a cluster; signals are handled as before."""
    import ray  # pyright: ignore[reportMissingImports]

    try:
        with signals.unchanged():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # whatever Ray meets: it has no class for a cluster that is not there
        raise ValueError(
            f"ray: cannot join the cluster at {address}: {_first_line(error)}; ray start --head begins one"
        ) from None
    try:
        yield ray
    finally:
        with signals.unchanged():
            ray.shutdown()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _call(folder: str, shared: str, version: str, threads: int, payload: bytes) -> str | Failed:
    """Do a job in a process of the cluster, in the folder that all share."""
    import torch

    host = platform.node()
    if not Path(folder, shared).exists():
        return Failed(f"{host} has no {Path(folder, shared)}: machines of a cluster need the folder at the same path")
    if version != isopos.__version__:
        return Failed(f"{host} has isopos {isopos.__version__}, expected {version}")
    os.chdir(folder)
    if "" not in sys.path:
        sys.path.append("")  # where tasks and schemes of the user's are
    torch.set_num_threads(threads)
    try:
        call, arguments = pickle.loads(payload)
        return call(*arguments)
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        return Failed(f"{error or type(error).__name__} (on {host})")
