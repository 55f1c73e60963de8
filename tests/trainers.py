"""Several processes, as torchrun starts them, that run command lines of isopos one after another with one import.

``python tests/trainers.py RANK FILE`` is one of them, and FILE a JSON list of command lines with a port each.
"""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(folder: Path, size: int, commands: Sequence[Sequence[str]]) -> list[str]:
    """Run commands in a folder with `size` processes; returns the first one's output per command. All must succeed."""
    file = folder / "commands.json"
    file.write_text(json.dumps([{"command": list(command), "port": free_port()} for command in commands]))
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    place |= {"TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": 1}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    members = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(file)],
            cwd=folder,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]
    try:
        outs = [member.communicate(timeout=60 + 60 * len(commands))[0] for member in members]
    finally:
        for member in members:
            if member.poll() is None:
                os.killpg(member.pid, signal.SIGKILL)
    assert [member.returncode for member in members] == [0] * size, "\n".join(outs)
    return json.loads(file.with_suffix(".out").read_text())


def main(rank: str, file: str) -> int:
    """Run one process; its exit status is the status of the first failing command."""
    from isopos import cli

    outs = []
    for row in json.loads(Path(file).read_text()):
        os.environ["MASTER_PORT"] = str(row["port"])
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        sys.argv, code = ["isopos", *row["command"]], 0
        try:
            with contextlib.redirect_stdout(out):
                cli.main()
        except SystemExit as stop:
            code = stop.code
        out.seek(0)
        outs.append(out.read())
        if code:
            print(row["command"], outs[-1])
            return code
    if rank == "0":
        Path(file).with_suffix(".out").write_text(json.dumps(outs))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
