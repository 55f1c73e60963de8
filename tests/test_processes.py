"""Test `isopos train` in separate processes: two and four compared with one, and --resume after kill -9."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from cases import named
from forks import Forked, isopos
from trainers import free_port, run_all

from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows

pytestmark = pytest.mark.slow
TINY = [
    *("--steps=20", "--length=32", "--batch=4", "--layers=1", "--model-dim=16", "--heads=2", "--validation-tokens=512"),
    *("--save-every=5", "--scheme=lrpe-orthogonal:learned=true"),
]
MESH = ["--devices=4", "--sequence-parallel=2"]
TWO, SHORT, SOFTMAX = ["--devices=2"], ["--steps=10"], ["--scheme=rope:attention=softmax"]


def _start(folder, name, *arguments, environment=None):
    return Forked(folder, isopos, *_command(name, *arguments), environment=environment)


def _finish(process):
    try:
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, out
    return out


def _rows(folder, name):
    return read_rows(folder / "runs" / name / "metrics.jsonl")


def _wait_for(folder, name, step):
    end = time.monotonic() + 240
    while time.monotonic() < end:
        rows = _rows(folder, name)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.005)
    raise TimeoutError(f"{name} did not come to step {step}")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with runs of one process without dropout, and (step, loss) of one of them."""
    folder = tmp_path_factory.mktemp("single")
    evaluated = ["eval", "runs/one", "--length", "1", "8"]
    run_all(folder, 1, [_command("one", *SHORT), _command("softmax", *SHORT, *SOFTMAX), evaluated])
    return folder, [(row["step"], row["loss"]) for row in _rows(folder, "one")]


def _command(name, *arguments):
    return ["train", "quickstart", *TINY, "--name", name, *arguments]


def _equal(folder, names, expected, out):
    """Assert that runs have the losses of one process, and print one result line each."""
    for name, text in zip(names, out, strict=True):
        with named(name):
            rows = [row for row in _rows(folder, name) if "loss" in row]
            assert [row["step"] for row in rows] == [step for step, _ in expected]
            assert [row["loss"] for row in rows] == pytest.approx([loss for _, loss in expected], abs=1e-5)
            assert text.count("finished: bits/byte") == 1


RESUMED = {  # by the number of processes: runs that are killed and go on
    1: {"workers": ["--workers=2"]},
    2: {"ddp": TWO, "fsdp2": [*TWO, "--strategy=fsdp2", "--workers=2", "--tied"]},
    4: {"mesh": MESH},
}


@pytest.mark.parametrize("size", RESUMED)
def test_after_kill_9_every_later_loss_is_that_of_the_uninterrupted_run(tmp_path, size):
    commands = {name: _command(name, "--dropout=0.2", *more) for name, more in RESUMED[size].items()}
    for name, command in commands.items():
        run_all(tmp_path, size, [command], killed=13)
        assert not (tmp_path / "runs" / name / "result.json").exists()
        assert checkpoints.newest(tmp_path / "runs" / name).step == 10
    wholes = [[*command, f"--name=whole-{name}"] for name, command in commands.items()]
    run_all(tmp_path, size, [*wholes, *([*command, "--resume"] for command in commands.values())])
    for name in commands:
        rows = _rows(tmp_path, name)
        assert [row["step"] for row in rows if "loss" in row] == [*range(1, 21)]
        assert rows == _rows(tmp_path, f"whole-{name}")


def test_two_processes_give_the_losses_of_one(tmp_path, single):
    folder, expected = single
    shutil.copytree(folder / "runs" / "one", tmp_path / "runs" / "one")
    over = [*TWO, "--sequence-parallel=2"]
    runs = {
        "fsdp2": [*TWO, "--strategy=fsdp2", "--accumulate=2", "--recompute"],
        "sequence": [*over, "--validate-every=5"],
        "sequence-fsdp2": [*over, "--strategy=fsdp2", "--accumulate=2", "--recompute", "--validate-every=5"],
    }
    evaluated = ["eval", "runs/one", "--length", "1", "8", "--sequence-parallel=2"]
    out = run_all(tmp_path, 2, [*(_command(name, *SHORT, *more) for name, more in runs.items()), evaluated])
    _equal(tmp_path, runs, expected, out[:-1])
    validations = [[row["validation"] for row in _rows(tmp_path, name) if "validation" in row] for name in list(runs)[1:]]
    assert validations[0] == pytest.approx(validations[1], abs=1e-5)
    before, after = (entry["figures"] for entry in json.loads((tmp_path / "runs" / "one" / "eval.json").read_text()))
    for length in ("1", "8"):
        assert after[length] == pytest.approx(before[length], rel=1e-5)


def test_processes_with_batch_norm_decide_alike_by_the_validation_of_the_first(tmp_path):
    """Running statistics differ between processes, and with them figures: each would save, or wait, by itself."""
    command = ["train", "listops", "--scale=tiny", "--norm=batch", "--steps=20", "--validate-every=1", "--save-every=1000"]
    command += ["--learning-rate=0.02", "--schedule=constant", "--warmup=0", "--batch=8", "--seed=1", "--device=cpu"]
    run_all(tmp_path, 2, [[*command, "--validation-rows=400", "--name=batch", *TWO]])
    assert sum("validation" in row for row in _rows(tmp_path, "batch")) == 20
    assert (tmp_path / "runs" / "batch" / "result.json").exists()


def test_four_processes_two_by_two_give_the_losses_of_one(tmp_path, single):
    folder, expected = single
    runs = {
        "sequence": ["--devices=4", "--sequence-parallel=4"],
        "mesh": MESH,
        "mesh-fsdp2": [*MESH, "--strategy=fsdp2"],
    }
    over = [*SOFTMAX, "--devices=4", "--sequence-parallel=4"]
    rings = {name: [*over, f"--sequence-keys={name}"] for name in ("ring", "zigzag")}
    out = run_all(tmp_path, 4, [_command(name, *SHORT, *more) for name, more in (runs | rings).items()])
    _equal(tmp_path, runs, expected, out[:3])
    _equal(tmp_path, rings, [(row["step"], row["loss"]) for row in _rows(folder, "softmax")], out[3:])


def test_if_one_of_several_processes_is_killed_the_others_end_in_one_line(tmp_path):
    process = _start(tmp_path, "killed", "--devices=3", "--batch=3", "--steps=100000")
    try:
        _wait_for(tmp_path, "killed", 6)
        listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        os.kill(int(listed.stdout.split()[0]), signal.SIGKILL)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    last = [line for line in out.splitlines() if line][-1]
    assert process.returncode == 2, out
    assert re.fullmatch(r"isopos: another process of this run ended after step \d+; the same .* from step \d+", last), out
    assert "Traceback" not in out


def test_two_machines_of_a_slurm_job_give_the_losses_of_one(tmp_path, single):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    job |= {"SLURM_NNODES": "2", "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"} for rank in "01"]
    tasks = [_start(tmp_path, "two", *SHORT, "--nodes=2", environment=job | place) for place in places]
    outs = [_finish(task) for task in tasks]
    assert ["finished" in out for out in outs] == [True, False]
    assert [row["loss"] for row in _rows(tmp_path, "two")] == pytest.approx([loss for _, loss in single[1]], abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_two_processes_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path, number):
    process = _start(tmp_path, "stopped", *TWO, "--steps=100000")
    _wait_for(tmp_path, "stopped", 3)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # a terminal sends it to all
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + number, out
    assert "the same command with --resume goes on from step" in out
    step = checkpoints.newest(tmp_path / "runs" / "stopped").step
    assert step == _rows(tmp_path, "stopped")[-1]["step"] < 100000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_machine_that_waits_for_another_says_so_and_ends_when_it_is_told_to(tmp_path, number):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    process = _start(tmp_path, "alone", "--nodes=2", environment=place)
    line = ""
    while "waiting for 2 nodes" not in line:
        line = process.stdout.readline()
        assert line or process.returncode is None
    asleep = time.monotonic()
    while time.monotonic() - asleep < 2:  # until it waits in what is no Python
        time.sleep(0.1)
        state = subprocess.run(["ps", "-o", "state=", "-p", str(process.pid)], capture_output=True, text=True, check=True)
        asleep = asleep if state.stdout.startswith("S") else time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=240)
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
            out, _ = other.communicate(timeout=240)
            assert other.returncode == 2
            assert f"runs/run is in use by process {first.pid} on " in out
        os.kill(first.pid, signal.SIGKILL)
        first.communicate(timeout=240)
        again = start("--resume")
        _wait_for(tmp_path, "run", checkpoints.newest(run).step + 20)
        os.kill(again.pid, signal.SIGTERM)
        out, _ = again.communicate(timeout=240)
        assert again.returncode == 143, out
        assert [row["step"] for row in _rows(tmp_path, "run")] == [*range(1, checkpoints.newest(run).step + 1)]
    finally:
        for process in started:
            process.kill()
