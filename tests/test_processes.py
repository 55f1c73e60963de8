"""`isopos train` in processes of its own: two of them beside one, and kill -9 with --resume."""

import os
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
    ],
    ids=["ddp", "fsdp2", "torchrun-fsdp2-accumulate-recompute"],
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
    [[], ["--workers=2"], [*TWO], [*TWO, "--workers=2", "--strategy=fsdp2"]],
    ids=["one", "one-workers", "ddp", "fsdp2-workers"],
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
