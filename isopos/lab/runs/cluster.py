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

CONNECT_SECONDS = 5.0  # to wait for a connection
LEASE_SECONDS = 120.0  # to wait for the locks of a lost machine
STOP_SECONDS = 60.0  # for interrupted jobs to write a checkpoint
RETRIES = 3  # of a job whose process was lost


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
        raise ValueError(f"device: expected cpu or cuda, since Ray assigns each run a GPU, got {device!r}")
    if address != "auto":
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdecimal() and "/" not in host):
            raise ValueError(f"ray: expected HOST:PORT of a cluster, or auto for this machine's cluster, got {address!r}")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(f"ray: no cluster answers at {address}: {error}; ray start --head starts one") from None
    with _connected(address) as ray:
        for name, required in (("CPU", threads), ("GPU", int(device == "cuda"))):
            available = max((node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]), default=0)
            if available < required:
                remedy = "; set OMP_NUM_THREADS to fewer" if name == "CPU" else ""
                raise ValueError(
                    f"ray: expected a machine with {required} {name}s for a run, got at most {available:g}{remedy}"
                )


def spread(
    jobs: Sequence[Job], address: str, device: str, threads: int, shared: Path
) -> Generator[tuple[Job, str | Failed], None, None]:
    """Run jobs on a cluster; yield each job as it ends, with the message that its call returned, or `Failed`.

    Jobs that never become ready are skipped. Closing the generator, or Ctrl-C, interrupts running jobs and waits for their
    checkpoints.

    Args:
        jobs: Jobs, in the order in which they start.
        address, device, threads: As in `check_cluster`.
        shared: A file in the working folder; a machine that sees it shares the folder.
    """
    environment = (os.getcwd(), str(shared), isopos.__version__, threads)
    waiting, running, lost = [*jobs], {}, Counter()
    with _connected(address) as ray:
        start = ray.remote(num_cpus=threads, num_gpus=int(device == "cuda"), max_retries=0)(_call)
        try:
            while True:
                for job in [job for job in waiting if job.ready()]:
                    waiting.remove(job)
                    seconds = LEASE_SECONDS if lost[job.name] else 0.0
                    running[start.remote(*environment, pickle.dumps((job.call, (*job.arguments, seconds))))] = job
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
                        if retried := lost[job.name] <= RETRIES:
                            waiting.append(job)
                        yield job, Failed(f"its process was lost: {_first_line(error)}", retried)
        except KeyboardInterrupt:
            signals.raise_pending()  # raises with the signal's number, which Ray's wait loses
            raise
        finally:
            for reference in running:
                ray.cancel(reference)
            if running:
                ray.wait([*running], num_returns=len(running), timeout=STOP_SECONDS)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect this process to a cluster within the context; signal handlers are restored."""
    import ray  # pyright: ignore[reportMissingImports]

    try:
        with signals.restored_handlers():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # Ray has no exception class for a missing cluster
        raise ValueError(
            f"ray: cannot join the cluster at {address}: {_first_line(error)}; ray start --head starts one"
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
