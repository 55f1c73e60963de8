"""Several processes, as torchrun starts them, that run command lines of isopos one after another."""

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forks import Forked

from isopos import cli


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_processes(folder: Path, size: int, function: Callable[..., Any], *arguments: str, timeout: float) -> list[str]:
    """Call a function in `size` processes with torchrun's variables; returns their outputs. They must end alike.

    The first one that fails ends the others, which would wait for it.
    """
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "tests"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    members = []
    for rank in range(size):
        own = place | {"RANK": rank, "LOCAL_RANK": rank}
        environment = {name: str(value) for name, value in own.items()}
        members.append(Forked(folder, function, *arguments, environment=environment))
    running = set(members)

    def output(member: Forked) -> str:
        out = member.communicate(timeout)[0]
        running.discard(member)
        for other in list(running) if member.returncode else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)
        return out

    try:
        with ThreadPoolExecutor(size) as pool:
            outs = list(pool.map(output, members))
    finally:
        for member in members:
            member.kill()
    assert len({member.returncode for member in members}) == 1, "\n".join(outs)
    assert members[0].returncode in (0, -signal.SIGKILL), "\n".join(outs)
    return outs


def run_all(folder: Path, size: int, commands: Sequence[Sequence[str]], killed: int = 0) -> list[str]:
    """Run commands in a folder with `size` processes; returns the first one's output per command. All must succeed.

    With `killed`, each process of the one command ends itself by SIGKILL after this step, and there is no output.
    """
    file = folder / "commands.json"
    file.write_text(json.dumps([{"command": list(command), "killed": killed} for command in commands]))
    for mark in [*folder.glob("rank*.ended"), *folder.glob("*.port")]:
        mark.unlink()
    on_processes(folder, size, main, str(file), timeout=120 + 60 * len(commands))
    return [] if killed else json.loads(file.with_suffix(".out").read_text())


def _kill_after(step: int) -> None:
    """Kill this process and its workers once all processes have ended a step of training."""
    from isopos.lab.training.trainer import _Training as module

    end = module.on_train_batch_end

    def ended(self: Any, *arguments: Any) -> None:
        end(self, *arguments)
        if self.step == step:
            Path(f"rank{os.environ['RANK']}.ended").touch()
            while len(list(Path().glob("rank*.ended"))) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.01)
            os.killpg(0, signal.SIGKILL)

    module.on_train_batch_end = ended


def _agreed_port(file: Path) -> str:
    """A port for all processes, which the first one finds just before its use; a port found earlier may be taken by then."""
    if os.environ["RANK"] == "0":
        file.with_suffix(".new").write_text(str(free_port()))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def main(file: str) -> None:
    """Run the commands of a JSON list with a port each; exit with the status of the first one that fails."""
    outs = []
    for n, row in enumerate(json.loads(Path(file).read_text())):
        os.environ["MASTER_PORT"] = _agreed_port(Path(file).with_name(f"{n}.port"))
        if row["killed"]:
            _kill_after(row["killed"])
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
    if os.environ["RANK"] == "0":
        Path(file).with_suffix(".out").write_text(json.dumps(outs))
