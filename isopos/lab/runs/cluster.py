"""Jobs on the machines of a Ray cluster that share the working folder; each job writes its files there.

Ray runs each job in a process and reports which ended. A job whose process or machine was lost starts again, and continues
from its files. Ray is the extra `cluster`, imported where it is used.
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

ANSWER = 5.0  # seconds to wait for a connection
LEASE = 120.0  # seconds to wait for the locks of a lost machine
ENDING = 60.0  # seconds for interrupted jobs to write a checkpoint
LOSSES = 3  # lost processes of a job before it is given up


@dataclass(frozen=True)
class Job:
    """A call in a process of the cluster: `call(*arguments, seconds)`, where `seconds` is how long to wait for locks.

    It returns a message about its failure, or an empty text.
    """

    name: str  # shown to the user
    call: Callable[..., str]  # a function of a module that all machines have
    arguments: tuple[Any, ...]  # values that can be pickled
    output: Path  # the file that it writes last
    steps: int  # its weight in the progress bar
    ready: Callable[[], bool] = lambda: True  # whether it can start; called in the process that submits jobs


@dataclass(frozen=True)
class Failed:
    """Failure of a job."""

    reason: str
    retried: bool = False  # whether the job starts again


def check_cluster(address: str, device: str, threads: int) -> None:
    """Check that jobs can run on a cluster; raise a ValueError with the reason if not.

    Args:
        address: HOST:PORT, or auto for the cluster to which this machine belongs.
        device: Device of a job: cpu, or cuda for one GPU per job.
        threads: Number of CPUs per job.
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
    """Run jobs on a cluster; yield each job as it ends, with the message that its call returned, or `Failed`.

    Jobs that never become ready are skipped. Closing the generator, or Ctrl-C, interrupts running jobs and waits for their
    checkpoints.

    Args:
        jobs: In the order in which they start.
        address: As in `check_cluster`.
        device: As in `check_cluster`.
        threads: As in `check_cluster`.
        shared: A file in the working folder; a machine that sees it shares the folder.
    """
    environment = (os.getcwd(), str(shared), isopos.__version__, threads)
    waiting, running, lost = [*jobs], {}, Counter()
    with _connected(address) as ray:
        begin = ray.remote(num_cpus=threads, num_gpus=int(device == "cuda"), max_retries=0)(_call)
        try:
            while True:
                for job in [job for job in waiting if job.ready()]:
                    waiting.remove(job)
                    seconds = LEASE if lost[job.name] else 0.0
                    running[begin.remote(*environment, pickle.dumps((job.call, (*job.arguments, seconds))))] = job
                if not running:
                    return
                signals.raise_pending()
                for reference in ray.wait([*running], timeout=1.0)[0]:
                    job = running.pop(reference)
                    try:
                        yield job, ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    except ray.exceptions.RayError as error:
                        lost[job.name] += 1
                        if retried := lost[job.name] <= LOSSES:
                            waiting.append(job)
                        yield job, Failed(f"its process was lost: {_first_line(error)}", retried)
        except KeyboardInterrupt:
            signals.raise_pending()  # raises with the signal's number, which Ray's wait loses
            raise
        finally:
            for reference in running:
                ray.cancel(reference)
            if running:
                ray.wait([*running], num_returns=len(running), timeout=ENDING)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect this process to a cluster within the context; signal handlers are restored."""
    import ray  # pyright: ignore[reportMissingImports]

    try:
        with signals.restored_handlers():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # Ray has no exception class for a missing cluster
        raise ValueError(
            f"ray: cannot join the cluster at {address}: {_first_line(error)}; ray start --head begins one"
        ) from None
    try:
        yield ray
    finally:
        with signals.restored_handlers():
            ray.shutdown()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _call(folder: str, shared: str, version: str, threads: int, payload: bytes) -> str | Failed:
    """Run a job in a process of the cluster, in the shared folder."""
    import torch

    host = platform.node()
    if not Path(folder, shared).exists():
        return Failed(f"{host} has no {Path(folder, shared)}: machines of a cluster need the folder at the same path")
    if version != isopos.__version__:
        return Failed(f"{host} has isopos {isopos.__version__}, expected {version}")
    os.chdir(folder)
    if "" not in sys.path:
        sys.path.append("")  # where a user's tasks and schemes are
    torch.set_num_threads(threads)
    try:
        call, arguments = pickle.loads(payload)
        return call(*arguments)
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        return Failed(f"{str(error) or type(error).__name__} (on {host})")
