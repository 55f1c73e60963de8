"""Command lines in two processes each, one command after another, which import PyTorch and Lightning once.

``python tests/forks.py '[["train", ...], ...]'`` runs each as torchrun starts it with ``--nproc-per-node=2``.
"""

import json
import multiprocessing
import os
import socket
import sys

from isopos import cli
from isopos.lab.training import trainer as trainer  # before the forks

SIZE = 2


def command(arguments: list[str], rank: int, port: int) -> None:
    """Run a command line as one of the processes of torchrun."""
    names = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"]
    os.environ |= dict(zip(names, (str(SIZE), str(SIZE), str(rank), str(rank)), strict=True))
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["isopos", *arguments]
    cli.main()


def main(commands: list[list[str]]) -> int:
    """Run them; the number of the processes that failed."""
    fork, failed = multiprocessing.get_context("fork"), 0
    for arguments in commands:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [fork.Process(target=command, args=(arguments, rank, port)) for rank in range(SIZE)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        failed += sum(rank.exitcode != 0 for rank in ranks)
    return failed


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
