"""Test isopos gpu-check with simulated processes: records, continuation, and the file that enables kernels."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_layering import ABSENT

from isopos.lab.bench import gpu_check, gpu_rows
from isopos.lab.bench.gpu_rows import GpuRow
from isopos.ops import gpu, trust

PRETEND = """
import json, os, sys, time

def say(**content):
    print("gpu-check: " + json.dumps(content), flush=True)

print("a library says something")
say(ready=True)
for line in sys.stdin:
    name = line.strip()
    open("asked", "a").write(name + "\\n")
    own = {"row": name, "status": "passed", "usable": True}
    if name == "machine":
        say(**own | {"status": "measured", "device": "a GPU", "triton": "3.7.1", "ptxas": "13.4", "kernels": KERNELS})
    elif "hangs" in name:
        time.sleep(60)
    elif "dies" in name:
        print("the last words", file=sys.stderr, flush=True)
        os._exit(11)
    elif "meets" in name:  # another row, which runs at the same time
        open("met", "a").write("x")
        end = time.monotonic() + 50
        while os.path.getsize("met") < 2 and time.monotonic() < end:
            time.sleep(0.01)
        say(**own | {"status": "passed" if os.path.getsize("met") > 1 else "failed"})
    else:
        say(**own | {"status": "failed", "wrong": "2e-1"} if "wrong" in name else own | {"usable": "unusable" not in name})
    if "unusable" in name:
        time.sleep(60)
"""


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Run rows with these names; returns the names per process, and the results in order."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "pretend.py"
    program.write_text(PRETEND.replace("KERNELS", repr(trust.kernels_fingerprint())))
    monkeypatch.setattr(gpu_check, "COMMAND", (sys.executable, str(program)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run(names, *options):
        rows = {name: GpuRow(name, 1.0 if "hangs" in name else 60.0, lambda place: {}) for name in names}
        monkeypatch.setattr(gpu_rows, "all_rows", lambda: rows)
        code = gpu_check.main(["--out", "out", "--jobs", "1", *options])
        lines = [json.loads(line) for line in Path("out/gpu-check.jsonl").read_text().splitlines()]
        return code, Path("asked").read_text().split("\n")[:-1], {line["row"]: line for line in lines}

    return run


def test_what_fails_is_a_row_and_the_rest_goes_on(check, capsys):
    names = ["repeat: good", "repeat: wrong", "repeat: hangs", "repeat: dies", "repeat: unusable", "time: good"]
    code, asked, found = check(names)
    assert code == 1
    assert asked == ["machine", *names]
    assert [*found] == ["machine", *names]
    assert [row["status"] for row in found.values()] == [
        "measured",
        "passed",
        "failed",
        "failed",
        "failed",
        "passed",
        "passed",
    ]
    assert found["repeat: hangs"]["wrong"] == "it is not finished after 1 s"
    assert found["repeat: dies"]["wrong"].startswith("the process ended with status 11; ")
    assert Path("out/gpu-check.log").read_text() == "the last words\n"
    out = capsys.readouterr().out
    assert "failed    repeat: wrong: 2e-1" in out
    assert "3 rows failed" in out
    page = Path("out/gpu-check.md").read_text()
    assert "3 passed, 3 failed, 0 measured, 0 left." in page
    assert "| repeat: hangs | failed | it is not finished after 1 s |" in page


def test_a_later_run_continues_where_time_was_over(check, capsys, monkeypatch):
    names, clock = [f"accuracy: {n}" for n in range(5)], time.monotonic
    with monkeypatch.context() as patch:  # the time is over while the third row runs
        late = lambda: 600 * (Path("asked").exists() and names[2] in Path("asked").read_text())  # noqa: E731
        patch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: clock() + late()))
        code, _, found = check(names, "--minutes", "9")
    left = names[3:]
    assert (code, [*found]) == (0, ["machine", *names[:3]])
    assert f"{len(left)} rows are left: the same command continues with {left[0]}" in capsys.readouterr().out
    os.remove("asked")
    assert [*check(names)[2]] == ["machine", *names]
    assert Path("asked").read_text().split("\n")[1:-1] == left
    assert check(names)[1] == ["machine", *left, "machine"]


def test_rows_run_in_several_processes_and_times_alone(check):
    names = ["repeat: meets", "repeat: also meets"]
    assert check(names, "--jobs", "8")[0] == 0
    assert len(check([*names, *(f"time: {n}" for n in range(3))], "--jobs", "8", "--only", "time")[2]) == 6


def test_rows_are_chosen_by_several_texts(check):
    names = ["repeat: a", "accuracy: b", "decoding: d"]
    assert [*check(names, "--only", "repeat", "decoding: d")[2]] == ["machine", "repeat: a", "decoding: d"]


def test_a_line_that_was_cut_is_run_again_and_a_damaged_one_is_an_error(check):
    names = ["repeat: a", "repeat: b", "repeat: c"]
    check(names)
    path = Path("out/gpu-check.jsonl")
    whole = path.read_bytes()
    for cut in (5, 1):  # without the newline a line is not whole, either
        path.write_bytes(whole[:-cut])
        os.remove("asked")
        assert check(names)[1] == ["machine", "repeat: c"]
        assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == ["machine", *names]
    path.write_bytes(b"no row\n" + whole)
    with pytest.raises(ValueError, match=r"gpu-check.jsonl: expected a row of gpu-check in line 1; remove the line"):
        check(names)


def test_rows_of_another_machine_are_not_mixed(check):
    check(["repeat: a"])
    path = Path("out/gpu-check.jsonl")
    path.write_text(path.read_text().replace('"a GPU"', '"another"'))
    with pytest.raises(ValueError, match=r"out: expected rows of device 'a GPU' in .*, got 'another'; choose"):
        check(["repeat: a"])


def test_a_killed_run_leaves_whole_rows_and_no_process(check, tmp_path):
    check(["repeat: first"])
    names = ["repeat: first", "repeat: second", "repeat: hangs", "repeat: last"]
    code = f"""
import sys, torch
from isopos.lab.bench import gpu_check, gpu_rows
gpu_check.COMMAND, torch.cuda.is_available = {gpu_check.COMMAND!r}, lambda: True
gpu_rows.all_rows = lambda: {{name: gpu_rows.GpuRow(name, 60, None) for name in {names!r}}}
gpu_check.main(["--out", "out", "--jobs", "1"])
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while time.monotonic() < end and "repeat: hangs" not in Path("asked").read_text():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert [*gpu_check.read(Path("out/gpu-check.jsonl"))] == ["machine", "repeat: first", "repeat: second"]
    found = check([name for name in names if "hangs" not in name])[2]
    assert [*found] == ["machine", "repeat: first", "repeat: second", "repeat: last"]


def test_options_that_mean_nothing_are_errors(check, monkeypatch):
    for options, why in (
        (("--minutes", "0"), "minutes and jobs: expected"),
        (("--jobs", "0"), "minutes and jobs: expected"),
        (("--only", "nothing"), "only: expected a part of a row's name, such as accuracy, got 'nothing'"),
    ):
        with pytest.raises(ValueError, match=why):
            check(["repeat: a"], *options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="expected a GPU, or TRITON_INTERPRET=1 with --small"):
        check(["repeat: a"], "--small")


def test_the_command_needs_torch_and_triton_alone(tmp_path):
    code = f"{ABSENT}sys.argv = ['isopos', 'gpu-check', '--out', 'x']\nfrom isopos.cli import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    said = "isopos: gpu-check: expected a GPU, or TRITON_INTERPRET=1 with --small, got a machine without one\n"
    assert (done.returncode, done.stderr, [*tmp_path.iterdir()]) == (2, said, [])


def results(**changed):
    """Results in which all rows pass except rows whose names contain a text."""
    machine = {"row": "machine", "status": "measured", "device": "a GPU", "triton": "3.7.1", "ptxas": "13.4"}
    found = {"machine": machine | {"kernels": trust.kernels_fingerprint(), "small": False}}
    for name in gpu_rows.all_rows():
        status = next((status for part, status in changed.items() if part in name), "passed")
        found |= {name: {"row": name, "status": status}} if status != "left" else {}
    return found


def test_what_has_passed_has_passed_in_every_row():
    everything = {(operation, dtype) for operation in trust.OPERATIONS for dtype in gpu_rows.DTYPES}

    def proven(**changed):
        return {(one.operation, one.dtype) for one in gpu_check.passed(results(**changed), gpu_rows.all_rows())}

    assert proven() == everything
    assert proven(time="failed") == everything
    assert proven(**{"accuracy: attention, lrpe-unitary, d=80, float32": "absent"}) == everything
    for status in ("failed", "left"):
        assert proven(**{"accuracy: attention, rope, d=80, float32": status}) == everything - {("attention", "float32")}
        assert proven(**{"repeat: rotation, bfloat16": status}) == everything - {("rotation", "bfloat16")}
    assert proven(**{"decoding": "absent"}) == everything - {("step", dtype) for dtype in gpu_rows.DTYPES}
    assert proven(memcheck="failed") == set()
    small = results()
    small["machine"]["small"] = True
    assert gpu_check.passed(small, gpu_rows.all_rows()) == []


@pytest.fixture
def there(monkeypatch, tmp_path):
    """A machine with a GPU whose compilers are trusted, and the file of results."""
    monkeypatch.delenv(gpu.SWITCH, raising=False)
    path = tmp_path / "gpu-passed.json"
    monkeypatch.setenv(trust.RESULTS, str(path))
    monkeypatch.setattr(trust, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(trust, "triton_version", lambda: "3.7.1")
    for name in ("recorded", "unproven"):
        getattr(trust, name).cache_clear()
    yield path
    for name in ("recorded", "unproven"):
        getattr(trust, name).cache_clear()


X = torch.ones(2)


def test_no_triton_and_another_device_leave_it_to_pytorch(there, monkeypatch):
    """Without a result for the device nothing asks for Triton; a module of this name without a version is none."""
    monkeypatch.setattr(trust, "triton_version", lambda: 1 / 0)
    assert "has not passed for step" in gpu._off("step", X.device, (X.dtype,) * 3)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    assert trust.triton_version() == ""
    monkeypatch.setitem(sys.modules, "triton", None)  # cannot be imported
    assert trust.triton_version() == ""


def test_the_file_of_results_switches_operations_on(there, monkeypatch):
    def off(operation, *tensors):
        trust.recorded.cache_clear()
        trust.unproven.cache_clear()
        return gpu._off(operation, X.device, tuple(x.dtype for x in tensors[: gpu.INPUTS.get(operation, 1)]))

    why = "`isopos gpu-check` has not passed for step of float32 on a GPU"
    assert off("step", X) == f"{why}; ISOPOS_TRITON=1 in the environment asks for it"
    monkeypatch.setenv(gpu.SWITCH, "auto")
    assert off("step", X).startswith(f"there is no {there}, which `isopos gpu-check` writes; ISOPOS_TRITON=1")
    found = results(**{"accuracy: attention, rope, d=80, float32": "failed"})
    found["machine"]["ptxas"] = ""  # as on this machine, which has no GPU
    gpu_check.write(there.parent, found, gpu_rows.all_rows())
    assert off("rotation", X, X.double()) == off("step", X, X, X) == off("attention", *[X.bfloat16()] * 3) == ""
    assert off("attention", X, X, X).startswith("`isopos gpu-check` has not passed for attention of float32 on a GPU; ")
    assert "attention of bfloat16 and float32" in off("attention", X.bfloat16(), X.bfloat16(), X)
    assert "flex attention" in off("flex attention", X)
    monkeypatch.setattr(trust, "triton_version", lambda: "3.6.0")
    assert "has not passed for step" in off("step", X)
    monkeypatch.setattr(trust, "kernels_fingerprint", lambda: "another")
    assert "is about other kernels; run `isopos gpu-check` again" in off("step", X)
    there.write_text("{")
    assert "is no file of `isopos gpu-check`: JSONDecodeError" in off("step", X)
    monkeypatch.setenv(gpu.SWITCH, "yes")
    assert off("step", X) == "ISOPOS_TRITON is expected to be 0, 1, any or auto, not 'yes'"


def test_the_table_is_on_by_default(there, monkeypatch):
    entry = trust.Passed("a GPU", "float32", "3.7.1", "", "step")
    monkeypatch.setattr(trust, "PASSED", frozenset({entry}))
    assert gpu._off("step", X.device, (X.dtype,) * 3) == ""
    assert "has not passed for rotation of float32 on a GPU" in gpu._off("rotation", X.device, (X.dtype,))
    monkeypatch.setenv(gpu.SWITCH, "1")
    monkeypatch.setattr(trust, "unreliable", lambda device: "not trusted")
    assert gpu._off("step", X.device, (X.dtype,) * 3) == ""
    assert gpu._off("rotation", X.device, (X.dtype,)) == "not trusted"
    monkeypatch.setenv(gpu.SWITCH, "0")
    assert gpu._off("step", X.device, (X.dtype,)) == "ISOPOS_TRITON=0 in the environment switches it off"


def test_the_table_is_about_these_kernels(there, monkeypatch):
    """Changed kernels have to be checked on a GPU again: see "Switching the kernels on" in docs/gpu.md."""
    assert trust.kernels_fingerprint() == trust.CHECKED
    entry = next(iter(trust.PASSED))
    monkeypatch.setattr(trust, "device_name", lambda device: entry.device)
    monkeypatch.setattr(trust, "triton_version", lambda: entry.triton)
    monkeypatch.setattr(trust, "ptxas", lambda: entry.ptxas)
    device, dtypes = torch.device("cuda"), (getattr(torch, entry.dtype),) * 3
    assert gpu._off(entry.operation, device, dtypes) == ""
    trust.unproven.cache_clear()
    monkeypatch.setattr(trust, "CHECKED", "others")
    assert gpu._off(entry.operation, device, dtypes).startswith("`isopos gpu-check` has not passed for ")


def test_comments_do_not_change_the_kernels():
    lines = ['"""What."""', 'X = "# no comment"  # a comment', "", "def one():", '    """How', "", "    # so.", '    """']
    source = "\n".join([*lines, '    return """a', 'b"""', ""])
    assert trust.code(source) == 'X = "# no comment"\ndef one():\n    return """a\nb"""'
    assert trust.code(source.replace("How", "Why").replace("a comment", "another")) == trust.code(source)
    assert trust.code(source.replace("one", "two")) != trust.code(source)
    assert trust.code('def one(): "How"; return "é\\f", 1  # what\n') == 'def one(): ; return "é\\f", 1'


def test_the_table_is_what_the_rows_of_an_h100_prove():
    found = set()
    for path in sorted((Path(__file__).parents[1] / "docs" / "gpu").glob("h100-*.jsonl")):
        rows = gpu_check.read(path)
        assert rows["machine"]["kernels"] == trust.CHECKED
        found |= set(gpu_check.passed(rows, gpu_rows.all_rows()))
    assert found == trust.PASSED


def test_compilers_that_are_not_trusted_leave_it_to_pytorch(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(trust, "device_name", lambda device: "a GPU")
    for triton, assembler, generation, why in (
        ("3.6.0", "12.8", 8, ""),
        ("3.7.1", "13.4", 9, ""),
        ("3.7.1", "12.8", 9, "ptxas before 13.3 is known to compile wrong code for sm_90, and Triton uses 12.8; "),
        ("3.7.1", "13.1", 9, "ptxas before 13.3"),
        ("3.7.1", "", 9, "and Triton uses unknown"),
        ("3.5.1", "13.4", 8, "its kernels are made for Triton 3.6 and 3.7, not for 3.5.1"),
        ("3.8.0", "13.4", 10, "not for 3.8.0"),
    ):
        monkeypatch.setattr(trust, "triton_version", lambda own=triton: own)
        monkeypatch.setattr(trust, "ptxas", lambda own=assembler: own)
        monkeypatch.setattr(trust, "compute_generation", lambda device, own=generation: own)
        trust.unreliable.cache_clear()
        trust.unproven.cache_clear()
        monkeypatch.setenv(gpu.SWITCH, "1")
        found = gpu._off("attention", device, (X.dtype,))
        assert why in found if why else not found
        monkeypatch.setenv(gpu.SWITCH, "any")
        assert gpu._off("attention", device, (X.dtype,)) == ""
    trust.unreliable.cache_clear()
    trust.unproven.cache_clear()


def test_the_version_of_an_assembler(monkeypatch, tmp_path):
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.4, V13.4.1'\n")
    program.chmod(0o755)
    assert trust.ptxas(str(program)) == "13.4"
    assert trust.ptxas(str(tmp_path / "absent")) == ""
    home = tmp_path / "triton" / "backends" / "nvidia" / "bin"
    home.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: home.iterdir() if self == home else iter(()))
    monkeypatch.setenv("PATH", "")
    assert trust.newest_ptxas() == ""
    assert "triton" not in sys.modules  # the one here must not stay for other tests
    for name, version, newest in (
        ("ptxas", "12.8", ""),
        ("ptxas-blackwell", "12.9", ""),
        ("ptxas-new", "13.1", "ptxas-new"),
    ):
        (home / name).write_text(f"#!/bin/sh\necho 'release {version}, V{version}.0'\n")
        (home / name).chmod(0o755)
        assert trust.newest_ptxas() == (str(home / newest) if newest else "")
