"""Test the rows of isopos gpu-check at small sizes, interpreted on a CPU, and that they detect wrong kernels."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch

from isopos import schemes
from isopos.attention import explain
from isopos.lab.bench import gpu_check, gpu_rows, races
from isopos.lab.bench.gpu_rows import CallSetting
from isopos.ops import gpu, triton_rotate, trust
from isopos.ops.linear import triton, triton_step
from isopos.positions import sequence

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not gpu.interpreted(), reason="TRITON_INTERPRET=1 is not set; make test-gpu runs the command itself"),
]
HERE = CallSetting("cpu", small=True, runs=2)
RIGHT = [name for name in gpu_rows.all_rows() if "d=64" in name and name.startswith("accuracy")]
RIGHT += ["repeat: step, rope, bfloat16", "repeat: rotation, float32", "repeat: attention, retnet, bfloat16"]
RIGHT += ["decoding: permuteformer, bfloat16", "decoding: lrpe-unitary, float32", "compile: rope, float32"]


def row(name):
    found = gpu_rows.result(name, HERE)
    assert found["row"] == name
    assert found["usable"]
    json.dumps(found)
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_rows_pass(name):
    found = row(name)
    assert (found["status"], found["wrong"]) == ("passed", "")
    if name.startswith("accuracy"):  # what the kernels find is neither copied from the definition nor without rounding
        assert found["errors"]["output"] > 0


@pytest.mark.parametrize("section", ["rotation, forward + backward", "step, B=256"])
def test_rows_of_times(section):
    name = next(name for name in gpu_rows.all_rows() if name.startswith(f"time: {section}"))
    found = row(name)
    assert found["status"] == "measured"
    assert all(race["seconds"] > 0 and race["ratio"]["median"] > 0 for race in found["races"])


def test_a_race_that_fails_is_a_failed_row(monkeypatch):
    monkeypatch.setitem(races.WORKLOADS, "two clones", lambda shape: 1 / 0)
    found = row(next(name for name in gpu_rows.all_rows() if name.startswith("time: rotation")))
    assert found["status"] == "failed"
    assert "ZeroDivisionError" in found["wrong"]


def test_rows_that_have_nothing_to_find_say_why(monkeypatch):
    fla = next(name for name in gpu_rows.all_rows() if name.startswith("time: fla"))
    assert "flash-linear-attention" in row(fla)["absent"]
    monkeypatch.setenv("PATH", "")
    if row("memcheck: repeats in bfloat16")["status"] == "absent":
        assert "compute-sanitizer is not installed" in row("memcheck: repeats in bfloat16")["absent"]
    monkeypatch.setenv(gpu.SWITCH, "0")
    for name in (
        "repeat: step, rope, bfloat16",
        "repeat: rotation, float32",
        "repeat: attention, retnet, bfloat16",
        *RIGHT[:6],
    ):
        found = row(name)
        assert found["status"] == "absent"
        assert "ISOPOS_TRITON=0 in the environment switches it off" in found["absent"]


def _scaled(function, factor):
    """Wrap a function so that its results, also results written in place, are too large by a factor."""

    def run(*given, **named):
        found = function(*given, **named)
        written = [x for x in given if isinstance(x, torch.Tensor)]
        out = found[0] if isinstance(found, tuple) else written[-1] if found is None else found
        out.mul_(factor() if callable(factor) else factor)
        return found

    return run


BROKEN = {
    "accuracy: attention, rope, d=64, bfloat16": (triton.Triton, "forward"),
    "accuracy: attention, none, d=64, float32": (triton.Triton, "forward"),
    "accuracy: rotation, d=64, bfloat16": (triton_rotate, "rotate"),
    "accuracy: rotation, d=64, float32": (triton_rotate, "rotate"),
    "decoding: rope, float32": (triton_step.StepPlan, "__call__"),
    "decoding: retnet, bfloat16": (triton_step.StepPlan, "__call__"),
    "compile: rope, float32": (triton.Triton, "forward"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_kernel_fails(monkeypatch, name):
    owner, function = BROKEN[name]
    monkeypatch.setattr(owner, function, _scaled(getattr(owner, function), 1.05 if "bfloat16" in name else 1.001))
    found = row(name)
    assert found["status"] == "failed"
    assert found["wrong"].startswith("output: ")


def test_a_wrong_gradient_fails(monkeypatch):
    backward = triton.Triton.backward

    def wrong(*given):
        found = backward(*given)
        found[1] = found[1] * 1.05  # of keys
        return found

    monkeypatch.setattr(triton.Triton, "backward", wrong)
    assert row("accuracy: attention, retnet, d=64, bfloat16")["wrong"].startswith("gradient of k: ")


@pytest.mark.parametrize(
    ("name", "owner", "function"),
    [
        ("repeat: attention, rope, float32", triton.Triton, "forward"),
        ("repeat: rotation, float32", triton_rotate, "rotate"),
        ("repeat: step, retnet, float32", triton_step.StepPlan, "__call__"),
    ],
)
def test_runs_that_differ_in_a_bit_fail(monkeypatch, name, owner, function):
    factors = iter(1 + torch.arange(10**4) * 2.0**-23)
    monkeypatch.setattr(owner, function, _scaled(getattr(owner, function), lambda: next(factors).item()))
    assert row(name)["wrong"] == "1 of 1 runs have other bits than the first"


def test_a_number_that_is_not_finite_fails(monkeypatch):
    monkeypatch.setattr(triton_rotate, "rotate", _scaled(triton_rotate.rotate, torch.nan))
    assert row("repeat: rotation, float32")["wrong"] == "a number is not finite"


def test_a_kernel_that_raises_fails(monkeypatch):
    def fails(*given):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(triton.Triton, "forward", fails)
    assert row("accuracy: attention, rope, d=64, bfloat16")["wrong"] == "RuntimeError: no kernel image is available"


def test_rows_under_the_sanitizer(monkeypatch, tmp_path):
    """The sanitizer is a stub that runs its command, or reports an error."""
    tool = tmp_path / gpu_rows.SANITIZER
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for last, status in (("exec", 0), ("echo '========= Invalid __global__ write of size 4'; exit 86; :", 86)):
        tool.write_text(
            f'#!/bin/sh\n[ "$1 $2 $3 $4" = "--tool memcheck --error-exitcode 86" ] || exit 3\nshift 4\n{last} "$@"\n'
        )
        tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
        found = gpu_rows._memcheck(["repeat: rotation, bfloat16"], 100, HERE)
        if status:
            assert found == {"wrong": "exit status 86: ========= Invalid __global__ write of size 4"}
        else:
            assert found == {"rows": ["repeat: rotation, bfloat16"], "said": ""}


def test_the_command_switches_what_has_passed_on(tmp_path, monkeypatch):
    """Test the way from the command line to attention by Triton, without the variable that requests every kernel."""
    command = [sys.executable, "-m", "isopos", "gpu-check", "--out", str(tmp_path), "--small", "--jobs", "2"]
    done = subprocess.run([*command, "--only", "rotation, bfloat16"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "gpu-check.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == ["machine", "repeat: rotation, bfloat16"]
    assert rows[1]["runs"] == 10
    for name, own in gpu_rows.all_rows().items():  # as if all rows of attention in bfloat16 had been run
        if (own.operation, own.dtype) == ("attention", "bfloat16"):
            with (tmp_path / "gpu-check.jsonl").open("a") as file:
                file.write(json.dumps({"row": name, "status": "passed"}) + "\n")
    check = gpu_check.read(tmp_path / "gpu-check.jsonl")
    assert [one.operation for one in gpu_check.write(tmp_path, check, gpu_rows.all_rows())] == ["attention"]
    monkeypatch.setenv(gpu.SWITCH, "auto")
    monkeypatch.setenv(trust.RESULTS, str(tmp_path / "gpu-passed.json"))
    given = schemes.rope(16, 2).at(sequence(20)) | {"causal": True}
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    said = explain(q, k, v, **given).refusals["triton"]
    assert "`isopos gpu-check` has not passed for attention of float32 on Triton's interpreter" in said
    assert explain(*(x.bfloat16() for x in (q, k, v)), **given).backend == "triton"
