"""Test every task in a comparison and an evaluation. Two processes and resumed runs give the same losses as one run."""

import re
import shutil

import pytest
from trainers import run_all

from isopos.lab import tasks
from isopos.lab.runs.folders import read_rows

SIZES = ["--steps=6", "--batch=8", "--layers=1", "--model-dim=16", "--heads=2", "--save-every=3", "--device=cpu"]
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
    "scenes": ["--scheme=prope", "--side=3", "--scenes=60", "--held-out=10"],
    "graphs": ["--scheme=wire", "--vertices=12", "--graphs=100"],
    "series": ["--scheme=clock", "--context=16", "--horizon=4", "--validation-rows=4"],
    "transduction": ["--scheme=ape-sequence:attention=softmax", "--samples=60", "--held-out=10", "--length=6"],
    "tree-transduction": ["--scheme=ape-tree:attention=softmax", "--samples=60", "--held-out=10", "--depth=3"],
}


def test_every_task_is_here():
    assert set(SMALL) == set(tasks.TASKS)


def _arguments(task, name, *more):
    return ["train", tasks.TASKS[task], *SMALL[task], *SIZES, f"--name={name}", *more]


def _losses(folder, name):
    return [row["loss"] for row in read_rows(folder / "runs" / name / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A folder with a run of each task in two processes."""
    folder = tmp_path_factory.mktemp("pairs")
    options = "--devices=2", "--strategy=fsdp2", "--accumulate=2", "--save-every=6"
    run_all(folder, 2, [_arguments(task, task, *options) for task in SMALL])
    return folder


@pytest.mark.slow
def test_two_processes_and_resumed_runs_are_those_of_one(isopos, tmp_path, pairs, subtests):
    for task in SMALL:
        with subtests.test(task=task):
            code, _, err = isopos(*_arguments(task, task))
            whole = _losses(tmp_path, task)
            assert (code, len(whole)) == (0, 6), err
            assert _losses(pairs, task) == pytest.approx(whole, abs=1e-5)
            run = tmp_path / "runs" / task
            (run / "result.json").unlink()
            shutil.rmtree(run / "checkpoints" / "step-00000006")
            code, _, err = isopos(*_arguments(task, task, "--resume", "--workers=2"))
            assert (code, _losses(tmp_path, task)) == (0, whole), err


ROWS = {
    "a.csv": ["label,text", *(f"{n % 2},{'word ' * (n % 9)}{n}" for n in range(60))],
    "a.tsv": [f"{n % 2}\t(S (NP the {n}) (VP sees it))" for n in range(60)],
}
COMPARED = {  # options, schemes, text of the comparison, text and columns of the report
    "listops": (
        ["--expressions=60", "--longest=40"],
        "rope,ape-tree",
        "accuracy: share of held-out expressions whose value is found, higher is better",
        "A classifier of expressions",
        ["expression", "answer", "model"],
    ),
    "text": (
        ["--data=a.csv", "--tokenizer=words"],
        "none,rope",
        "texts of 2 classes",
        "A classifier of texts",
        ["text", "class", "model"],
    ),
    "trees": (
        ["--data=a.tsv"],
        "rope,ape-tree",
        "trees of 2 classes",
        "(S (NP the",
        ["tree", "class", "model"],
    ),
    "pathfinder": (
        ["--pictures=40", "--side=16", "--dashes=5"],
        "rope,ape-grid",
        "32 + 4 + 4 pictures, half of them connected",
        "A classifier of pictures of 16 x 16 pixels",
        [],
    ),
    "scenes": (
        ["--side=3", "--scenes=60", "--held-out=10"],
        "rope-axial,rope-axial:axes=3",
        "60 + 10 + 10 rooms of 3 views",
        "An encoder that predicts a view of 3 x 3 pixels from 2 other views of a room",
        [],
    ),
    "graphs": (
        ["--vertices=12", "--graphs=60"],
        "rope,wire",
        "48 + 6 + 6 graphs of 12 nodes",
        "A classifier of graphs of 12 nodes by the distance of two of them",
        [],
    ),
    "transduction": (
        ["--samples=60", "--held-out=10", "--length=6"],
        "none,shaw",
        "exact: share of targets that come out whole, decoded freely, higher is better",
        "An encoder-decoder that is to reverse symbols",
        ["source", "target", "model"],
    ),
    "tree-transduction": (
        ["--samples=60", "--held-out=10", "--depth=4", "--order=depth", "--operation=c3"],
        "rope:attention=softmax,ape-tree:attention=softmax",
        "exact: share of targets that come out whole, decoded freely, higher is better",
        "nodes, depth first, that learns the operation c3 on random trees",
        ["source", "target", "model"],
    ),
}


@pytest.mark.parametrize("task", COMPARED)
def test_a_comparison_ranks_schemes_shows_answers_and_is_evaluated(isopos, tmp_path, task, monkeypatch):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    options, schemes, text, setting, columns = COMPARED[task]
    options = [f"--task={task}", *options, "--steps=3", *SIZES[1:]]
    status, out, err = isopos("compare", *options, f"--schemes={schemes}", "--name=a")
    assert (status, err) == (0, "")
    assert text in " ".join(out.split())
    values = [float(value.rstrip("%")) for value in re.findall(r"^│ \S+ .*? (\d+\.\d+%?) ", out, re.MULTILINE)]
    assert len(values) == 2
    assert values == sorted(values, reverse="transduction" not in task)  # accuracy, or perplexity
    page = (tmp_path / "runs" / "a" / "report.html").read_text()
    assert setting in page
    titles = [re.sub("<[^>]+>", "", title) for title in re.findall("<th.*?</th>", page)]
    assert titles[len(titles) - len(columns) :] == columns
    run = sorted((tmp_path / "runs" / "a").glob("*/recipe.json"))[0].parent
    status, out, err = isopos("eval", str(run), "--split=test")
    assert (status, err) == (0, "")
    status, _, err = isopos("compare", *options, "--schemes=ape-ring", "--name=b")
    assert (status, err.startswith("isopos: schemes: expected positions")) == (2, True), err
    assert not (tmp_path / "runs" / "b").exists()
