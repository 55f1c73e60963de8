"""Test additions outside the package, from the files of tests/extension.

CONTRIBUTING.md shows the same files.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import gradients, inputs, same_everywhere, stream

from isopos import attention, laws, linear_attention, schemes, sequence
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows

FILES = sorted(Path(__file__).parent.glob("extension/toy_*"))
TABLE = (Path(__file__).parent / "extension" / "toy_table.toml").read_text()
TINY = ("--layers=1", "--model-dim=16", "--heads=2", "--device=cpu")


def agrees_with_its_definition(scheme, roundings):
    """Causal linear attention in float32: outputs, gradients and a stream of chunks."""
    q, k, v = content = inputs(2, t=70, dtype=torch.float32, requires_grad=True)
    x = sequence(70)
    out = linear_attention(q, k, v, **scheme.at(x), causal=True)
    leaves = [*content, *scheme.parameters()]
    same_everywhere(out, attention.naive_linear_attention(q, k, v, **scheme.at(x), causal=True), leaves, roundings)
    same_everywhere(stream(scheme, content, x, (0, 30, 31, 70))[0], out, leaves, roundings)
    assert all(grad.any() for grad in gradients(out, leaves))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_takes_less_than_40_lines(file):
    assert len(file.read_text().splitlines()) < 40


def test_a_feature_map(own):
    softplus = own("toy_feature_map").softplus
    agrees_with_its_definition(schemes.build("rope", 8, 2, {"feature_map": "softplus"}), 2048)
    found = attention.explain(*inputs(1, t=70, dtype=torch.float32), feature_map=softplus, causal=True)
    assert found.backend == "chunks"
    assert "softplus" in found.refusals["cpu"]


def test_an_encoding(own, isopos, tmp_path):
    scheme = schemes.build("toy_encoding.mirror", 8, 2)
    assert laws.check(own("toy_encoding").Mirror(torch.randn(2, 8))).holds
    assert laws.check(scheme).holds
    assert schemes.build("mirror", 8, 2).fingerprint == scheme.fingerprint
    agrees_with_its_definition(scheme, 2048)
    assert "a toy" in isopos("list")[1]


def test_an_encoding_on_the_command_line(own, isopos, tmp_path):
    spec, run = "toy_encoding.mirror:seed=1", "runs/a/toy_encoding.mirror+seed=1-seed0"
    code, out, err = isopos("compare", f"--schemes=none,{spec}", "--steps=2", "--length=16", "--name=a", *TINY)
    assert code == 0, err
    assert spec in out
    fresh = [sys.executable, "-P", "-m", "isopos"]  # -P: without the working folder, as the installed command is
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([*fresh, "eval", run], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in (["check", spec], ["show", "--out=mirror.png", spec]):
        code, _, err = isopos(*command)
        assert code == 0, err
    assert (tmp_path / "mirror.png").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.mirror", "scheme nothing.mirror: cannot import nothing: ModuleNotFoundError"),
        ("toy_encoding.miror", "expected a scheme that toy_encoding registers by @register, got 'miror' of mirror"),
        ("toy_encoding.rope", "expected a scheme that toy_encoding registers by @register, got 'rope' of mirror"),
        ("toy_feature_map.rope", "expected a scheme that toy_feature_map registers by @register, got 'rope' of none"),
        ("mirror", "unknown scheme 'mirror'"),
    ],
)
def test_a_scheme_that_no_module_registers(own, name, message):
    with pytest.raises(ValueError, match=message):
        schemes.build(name, 8, 2)


def test_a_task(own, isopos, tmp_path, monkeypatch):
    task, arguments = own("toy_task"), ("--dropout=0.1", "--save-every=2", "--validate-every=2", *TINY)
    code, out, err = isopos("compare", "--task=toy_task:Order", "--schemes=none,rope", "--steps=2", "--seeds=2", *arguments)
    assert code == 0, err
    assert "accuracy, higher is better" in out
    assert isopos("train", "toy_task:Order", "--steps=6", "--name=whole", *arguments)[0] == 0
    batch = task.Shuffles.batch

    def interrupted(self, recipe, step, *ranks):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, recipe, step, *ranks)

    with monkeypatch.context() as patch:
        patch.setattr(task.Shuffles, "batch", interrupted)
        assert isopos("train", "toy_task:Order", "--steps=6", "--name=parts", *arguments)[0] == 143
    assert isopos("train", "toy_task:Order", "--steps=6", "--name=parts", *arguments, "--resume")[0] == 0
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    rows = read_rows(whole / "metrics.jsonl")
    assert read_rows(parts / "metrics.jsonl") == rows
    best = max(row["validation"] for row in rows if "validation" in row)  # whose weights are saved
    assert checkpoints.best(whole).validation == best
    assert json.loads((whole / "result.json").read_text())["scores"] == {"accuracy": best}
    assert isopos("eval", "runs/parts")[0] == 0
    (found,) = json.loads((parts / "eval.json").read_text())
    assert found["figures"]["1"]["accuracy"] == best


def test_a_table(own, isopos, tmp_path):
    (tmp_path / "toy_table.toml").write_text(
        TABLE.replace("steps = 10\n", "steps = 10\nvalidate_every = 5\nsave_every = 5\n")
    )
    tiny = ("--scale=tiny", "--device=cpu")
    for _ in range(2):
        code, out, err = isopos("table", "toy_table.toml", *tiny)
        assert code == 0, err
    assert "50.0%" in out
    folder = tmp_path / "runs" / "tables" / "toy_table-tiny"
    page = (folder / "table.md").read_text()
    assert "| rope | rope | 100.0% |" in page
    assert "Figures are accuracy, higher is better" in page
    assert "updates to no positions's accuracy" in page
    assert sorted(path.name for path in (folder / "cells").iterdir() if path.is_dir()) == ["none-seed0", "rope-seed0"]
    assert "0 of 2 cells are missing" in isopos("table", "toy_table.toml", *tiny, "--dry-run")[1]
    (tmp_path / "speeds.toml").write_text('kind = "speed"\n' + TABLE)
    assert isopos("table", "speeds.toml", *tiny)[0] == 0
