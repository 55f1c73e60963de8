"""Several processes, as torchrun starts them, that run command lines of isopos one after another."""

import contextlib
import io
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from forks import Forked

from isopos import cli


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
    place |= {"TORCHELASTIC_RUN_ID": "tests"}
    members = []
    for rank in range(size):
        own = place | {"RANK": rank, "LOCAL_RANK": rank}
        environment = {name: str(value) for name, value in own.items()}
        members.append(Forked(folder, main, str(rank), str(file), environment=environment))
    try:
        outs = [member.communicate(timeout=120 + 60 * len(commands))[0] for member in members]
    finally:
        for member in members:
            member.kill()
    assert [member.returncode for member in members] == [0] * size, "\n".join(outs)
    return json.loads(file.with_suffix(".out").read_text())


def main(rank: str, file: str) -> None:
    """Run the commands of a JSON list with a port each; exit with the status of the first one that fails."""
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
            sys.exit(code)
    if rank == "0":
        Path(file).with_suffix(".out").write_text(json.dumps(outs))
