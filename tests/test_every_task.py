"""What every task promises the laboratory: two processes give the losses of one, and so does a run that goes on."""

import os
import shutil
import subprocess
import sys

import pytest

from isopos.lab import tasks
from isopos.lab.runs.folders import read_rows

pytestmark = pytest.mark.slow

SIZES = ["--steps=12", "--batch=8", "--layers=1", "--model-dim=16", "--heads=2", "--save-every=4", "--device=cpu"]
SMALL = {  # data that come with isopos, as little as each task has, and a scheme that it is there for
    "language": ["--length=32", "--validation-tokens=64"],
    "bidirectional": ["--length=32"],
    "masked": ["--length=32", "--mask-share=0.4"],
    "glue": ["--length=32", "--validation-rows=20"],
    "text": ["--longest=32", "--validation-rows=20"],
    "trees": ["--scheme=ape-tree", "--validation-rows=20"],
    "listops": ["--scheme=ape-tree", "--expressions=300", "--longest=40"],
    "images": ["--scheme=ape-grid", "--validation-rows=20"],
    "pathfinder": ["--scheme=permuteformer-2d", "--side=16", "--dashes=5", "--pictures=100"],
    "series": ["--scheme=clock", "--context=16", "--horizon=4", "--validation-rows=4"],
    "transduction": ["--scheme=ape-sequence:attention=softmax", "--samples=60", "--held-out=10", "--length=6"],
    "tree-transduction": ["--scheme=ape-tree:attention=softmax", "--samples=60", "--held-out=10", "--depth=3"],
}


def test_every_task_is_here():
    assert set(SMALL) == set(tasks.TASKS)


@pytest.mark.parametrize("task", SMALL)
def test_two_processes_and_resumed_runs_are_those_of_one(tmp_path, task):
    def train(name, *more):
        command = ["train", tasks.TASKS[task], *SMALL[task], *SIZES, f"--name={name}", *more]
        done = subprocess.run(
            [sys.executable, "-m", "isopos", *command],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return [row["loss"] for row in read_rows(tmp_path / "runs" / name / "metrics.jsonl") if "loss" in row]

    whole = train("one")
    assert len(whole) == 12
    assert train("two", "--devices=2", "--strategy=fsdp2", "--accumulate=2") == pytest.approx(whole, abs=1e-5)
    run = tmp_path / "runs" / "one"
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    assert train("one", "--resume", "--workers=2") == whole
