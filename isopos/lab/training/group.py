"""Run a function in the processes of a group, started by torchrun or here on this machine."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from isopos.lab.tasks.task import require
from isopos.parallel import Ring


def group_by_keys(group: Any, keys: str) -> Any:
    """The group, by which softmax attention sees keys as the option ``sequence_keys`` names it: gather, ring or zigzag."""
    return group if keys == "gather" else Ring(group, zigzag=keys == "zigzag")


def is_of_another_process(error: RuntimeError) -> bool:
    """Whether a collective failed, since another process ended."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def run_in_group(count: int, device: str, run: Callable[..., object], *arguments: Any) -> None:
    """Call ``run(rank, device, *arguments)`` in each of `count` processes, after their default group is initialised.

    Args:
        device: cpu, where Gloo connects them, or cuda, where NCCL does and each has a GPU of its own.
        run: A function of a module, which other processes can import.
        arguments: For pickle.

    Raises:
        ValueError: That of a process, raised in the calling one; or where torchrun started another number of processes.
        OSError: Where a process was killed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        require("sequence_parallel", count, f"the {started} processes that torchrun started", count == started)
        _member(int(os.environ["RANK"]), count, device, "env://", run, arguments)
        return
    errors = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_started, (count, device, Path(folder, "store").as_uri(), errors, run, arguments), count)
        except ProcessExitedException as ended:
            if not errors.empty():
                raise ValueError(errors.get()) from None
            raise OSError(
                f"process {ended.error_index} of {count} ended with status {ended.exit_code}; start again"
            ) from None


def _started(
    rank: int, count: int, device: str, store: str, errors: Any, run: Callable[..., object], arguments: Any
) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    try:
        _member(rank, count, device, store, run, arguments)
    except ValueError as error:
        errors.put(str(error))
        raise SystemExit(2) from None
    except RuntimeError as error:
        if not is_of_another_process(error):
            raise
        raise SystemExit(3) from None  # another process ended, of which the first one tells


def _member(rank: int, count: int, device: str, store: str, run: Callable[..., object], arguments: Any) -> None:
    cuda = torch.device(device).type == "cuda"
    if cuda:
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=count)
    try:
        run(rank, device, *arguments)
    finally:
        dist.destroy_process_group()
