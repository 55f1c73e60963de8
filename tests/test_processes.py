"""`isopos train` in processes of its own: two of them beside one, and kill -9 with --resume."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows

pytestmark = pytest.mark.slow
TINY = [
    *("--steps=60", "--length=32", "--batch=4", "--layers=1", "--model-dim=16", "--heads=2", "--validation-tokens=512"),
    *("--save-every=5", "--scheme=lrpe-orthogonal:learned=true"),
]
TWO = ["--devices=2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _start(folder, name, *arguments, launcher=(), environment=None):
    command = [sys.executable, *launcher, "-m", "isopos", "train", "quickstart", *TINY, "--name", name, *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finish(process):
    try:
        out, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out
    return out


def _rows(folder, name):
    return read_rows(folder / "runs" / name / "metrics.jsonl")


def _wait_for(folder, name, step):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        rows = _rows(folder, name)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.005)
    raise TimeoutError(f"{name} did not come to step {step}")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The losses of one process without dropout, by step."""
    folder = tmp_path_factory.mktemp("single")
    _finish(_start(folder, "one"))
    return [(row["step"], row["loss"]) for row in _rows(folder, "one")]


@pytest.mark.parametrize(
    ("arguments", "launcher"),
    [
        (["--strategy=ddp"], ()),
        (["--strategy=fsdp2"], ()),
        (["--strategy=fsdp2", "--accumulate=2", "--recompute"], TORCHRUN),
        (["--sequence-parallel=2"], ()),
        (["--sequence-parallel=2", "--strategy=fsdp2", "--accumulate=2", "--recompute"], TORCHRUN),
    ],
    ids=["ddp", "fsdp2", "torchrun-fsdp2-accumulate-recompute", "sequence", "torchrun-sequence-fsdp2-accumulate-recompute"],
)
def test_two_processes_give_the_losses_of_one(tmp_path, single, arguments, launcher):
    out = _finish(_start(tmp_path, "two", *TWO, *arguments, launcher=launcher))
    rows = _rows(tmp_path, "two")
    assert [row["step"] for row in rows] == [step for step, _ in single]
    assert [row["loss"] for row in rows] == pytest.approx([loss for _, loss in single], abs=1e-5)
    assert out.count("finished: bits/byte") == 1


def test_two_machines_of_a_slurm_job_give_the_losses_of_one(tmp_path, single):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    job |= {"SLURM_NNODES": "2", "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    places = [{"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"} for rank in "01"]
    tasks = [_start(tmp_path, "two", "--nodes=2", environment=job | place) for place in places]
    outs = [_finish(task) for task in tasks]
    assert ["finished" in out for out in outs] == [True, False]
    assert [row["loss"] for row in _rows(tmp_path, "two")] == pytest.approx([loss for _, loss in single], abs=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--workers=2"], [*TWO], [*TWO, "--workers=2", "--strategy=fsdp2"], [*TWO, "--strategy=fsdp2", "--tied"]],
    ids=["one", "one-workers", "ddp", "fsdp2-workers", "fsdp2-tied"],
)
def test_after_kill_9_every_later_loss_is_that_of_the_uninterrupted_run(tmp_path, arguments):
    dropout = "--dropout=0.2"
    _finish(_start(tmp_path, "whole", dropout, *arguments))
    killed = _start(tmp_path, "killed", dropout, *arguments)
    _wait_for(tmp_path, "killed", 13)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    run = tmp_path / "runs" / "killed"
    assert not (run / "result.json").exists()
    assert checkpoints.newest(run).step >= 10
    _finish(_start(tmp_path, "killed", dropout, "--resume", *arguments))
    assert _rows(tmp_path, "killed") == _rows(tmp_path, "whole")


def test_a_process_that_is_killed_ends_the_others_in_one_line_and_resume_goes_on_exactly(tmp_path):
    over = [*TWO, "--sequence-parallel=2", "--dropout=0.2"]
    _finish(_start(tmp_path, "whole", *over))
    process = _start(tmp_path, "killed", *over)
    _wait_for(tmp_path, "killed", 13)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(children[0]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    last = [line for line in out.splitlines() if line][-1]
    assert process.returncode == 2, out
    assert re.fullmatch(r"isopos: another process of this run ended after step \d+; the same .* from step \d+", last), out
    assert "Traceback" not in out
    _finish(_start(tmp_path, "killed", "--resume", *over))
    assert _rows(tmp_path, "killed") == _rows(tmp_path, "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_two_processes_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path, number):
    process = _start(tmp_path, "stopped", *TWO)
    _wait_for(tmp_path, "stopped", 3)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # a terminal sends it to all
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out
    assert "the same command with --resume goes on from step" in out
    step = checkpoints.newest(tmp_path / "runs" / "stopped").step
    assert step == _rows(tmp_path, "stopped")[-1]["step"] < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_machine_that_waits_for_another_says_so_and_ends_when_it_is_told_to(tmp_path, number):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "NODE_RANK": "0"}
    process = _start(tmp_path, "alone", "--nodes=2", environment=place)
    line = ""
    while "waiting for 2 nodes" not in line:
        line = process.stdout.readline()
        assert line or process.poll() is None
    time.sleep(2)  # until it waits in what is no Python
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number


def test_of_two_that_resume_a_run_at_once_one_is_refused(tmp_path):
    run, started = tmp_path / "runs" / "run", []

    def start(*more):
        started.append(_start(tmp_path, "run", "--steps=100000", *more))
        return started[-1]

    try:
        first = start()
        _wait_for(tmp_path, "run", 6)
        for more in ("--resume", "--overwrite"):
            other = start(more)
            out, _ = other.communicate(timeout=60)
            assert other.returncode == 2
            assert f"runs/run is in use by process {first.pid} on " in out
        os.kill(first.pid, signal.SIGKILL)
        first.communicate(timeout=60)
        again = start("--resume")
        _wait_for(tmp_path, "run", checkpoints.newest(run).step + 20)
        os.kill(again.pid, signal.SIGTERM)
        out, _ = again.communicate(timeout=60)
        assert again.returncode == 143, out
        assert [row["step"] for row in _rows(tmp_path, "run")] == [*range(1, checkpoints.newest(run).step + 1)]
    finally:
        for process in started:
            process.kill()
            process.communicate()
