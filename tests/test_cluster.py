"""Test tables and comparisons on a Ray cluster: the files of one machine despite kills; one error line without a cluster."""

import contextlib
import importlib.util
import json
import os
import pickle
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import isopos
from isopos.lab.commands import compare, spreading
from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints, cluster
from isopos.lab.runs.folders import read_rows
from isopos.lab.runs.locks import holder

ROOT = Path(__file__).parents[1]
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra cluster)")
STEPS = 400
TABLE = ("table", "toy_table.toml", "--scale=tiny", f"--steps={STEPS}", "--device=cpu")
COMPARE = ("compare", "--schemes=rope,none", "--device=cpu", "--length=16", "--batch=2", "--layers=1", "--model-dim=16")
COMPARE += ("--heads=2", "--steps=20", "--validation-tokens=64")
SAME = ("metrics.jsonl", "model.safetensors", "recipe.json", "data.json")


@pytest.mark.parametrize("command", [("table", "lengths", "--scale=tiny"), COMPARE])
def test_without_ray_one_line_says_what_to_install(isopos, tmp_path, monkeypatch, command):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    code, _, err = isopos(*command, "--ray=auto")
    assert (code, err) == (2, 'isopos: ray: expected Ray, which is not installed: pip install "isopos[cluster]"\n')
    assert not (tmp_path / "runs").exists()


@RAY
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray=here"], "ray: expected HOST:PORT of a cluster, or auto for this machine's cluster, got 'here'"),
        (["--ray=ray://127.0.0.1:1"], "ray: expected HOST:PORT of a cluster, or auto for this machine's cluster"),
        (["--ray=127.0.0.1:PORT"], "ray: no cluster answers at 127.0.0.1:"),
        (["--ray=127.0.0.1:99999"], "ray: no cluster answers at 127.0.0.1:99999"),
    ],
)
def test_an_address_that_does_not_answer_is_one_line(isopos, tmp_path, arguments, message):
    with socket.socket() as probe:  # a port at which nobody listens
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        code, _, err = isopos("table", "lengths", "--scale=tiny", *(word.replace("PORT", port) for word in arguments))
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert not (tmp_path / "runs").exists()


def test_what_is_timed_needs_one_machine(isopos):
    code, _, err = isopos("table", "lrpe-6", "--scale=tiny", "--ray=auto")
    assert (code, err) == (2, "isopos: ray: expected none, since lrpe-6 measures steps on one machine, got auto\n")


def test_a_job_elsewhere_says_why_it_cannot_be_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    payload = b"no pickle"
    assert "needs" not in str(cluster._call(str(tmp_path), "about.json", "0", 1, payload))
    said = cluster._call(str(tmp_path), "about.json", "0", 1, payload)
    assert f"has no {tmp_path / 'about.json'}: machines of a cluster need the folder at the same path" in said.reason
    (tmp_path / "about.json").touch()
    assert ", expected 0" in cluster._call(str(tmp_path), "about.json", "0", 1, payload).reason


def told(*arguments):
    """A job that returns its folder, number of threads and arguments."""
    import torch

    if arguments[0] == "fail":
        raise arguments[1]
    return f"{os.getcwd()} {torch.get_num_threads()} {arguments}"


def test_a_job_runs_in_the_shared_folder_with_its_threads_and_says_what_fails(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)  # and back
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "about.json").touch()

    def call(*arguments, version=isopos.__version__):
        return cluster._call(str(tmp_path / "shared"), "about.json", version, 3, pickle.dumps((told, arguments)))

    assert call("a", 1) == f"{tmp_path / 'shared'} 3 ('a', 1)"
    assert sys.path[-1] == ""
    host = platform.node()
    assert call("fail", ValueError("steps: expected 1")) == cluster.Failed(f"steps: expected 1 (on {host})")
    assert call("fail", MemoryError()) == cluster.Failed(f"MemoryError (on {host})")
    for version in ("0", "99"):
        said = cluster.Failed(f"{host} has isopos {isopos.__version__}, expected {version}")
        assert call("a", version=version) == said
    with pytest.raises(ZeroDivisionError):  # a mistake of ours
        call("fail", ZeroDivisionError())


class FakeRay:
    """A stub of Ray. Processes end in order of their start, with the given results."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            def __init__(self, cause):
                self.cause = cause

    def __init__(self, answers, nodes=()):
        self.answers, self.started, self.cancelled, self.options, self.nodes = answers, [], [], None, lambda: nodes

    def remote(self, **options):
        self.options = options
        return lambda function: SimpleNamespace(remote=self.begin)

    def begin(self, *arguments):
        *place, payload = arguments
        _, given = pickle.loads(payload)
        self.started.append((given, tuple(place)))
        return len(self.started) - 1

    def wait(self, references, num_returns=1, timeout=None):
        return references[:num_returns], references[num_returns:]

    def get(self, reference):
        found = self.answers[self.started[reference][0][0]].pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self, reference):
        self.cancelled.append(self.started[reference][0][0])


@pytest.fixture
def ray(monkeypatch):
    """A function from results to a cluster that returns them, within this process."""

    def of(answers, nodes=()):
        fake = FakeRay(answers, nodes)
        monkeypatch.setattr(cluster, "_connected", lambda address: contextlib.nullcontext(fake))
        return fake

    return of


def job(name, ready=lambda: True):
    return cluster.Job(name, told, (name,), Path(name), 1, ready)


def test_a_lost_process_is_started_again_three_times_and_waits_for_its_locks(ray, monkeypatch):
    lost = [FakeRay.exceptions.RayError("it died\nat once")] * 4
    fake = ray({"a": [""], "b": [*lost], "c": ["", ""], "d": [*lost[:2], "diverged"]})
    finished = []
    jobs = [job("a"), job("b"), job("c", lambda: "a" in finished), job("d"), job("never", lambda: False)]
    found = []
    for one, outcome in cluster.spread(jobs, "auto", "cuda", 2, Path("about.json")):
        found.append((one.name, outcome))
        finished.append(one.name)
    assert [outcome for name, outcome in found if name == "b"] == [
        cluster.Failed("its process was lost: it died", again) for again in (True, True, True, False)
    ]
    assert [outcome for name, outcome in found if name == "d"][-1] == "diverged"
    assert [name for name, _ in found].count("c") == 1
    assert [given for given, _ in fake.started if given[0] == "b"] == [("b", 0.0), *3 * [("b", cluster.LEASE_SECONDS)]]
    assert [given[0] for given, _ in fake.started][:4] == ["a", "b", "d", "c"], "one that is not ready waits"
    assert {place for _, place in fake.started} == {(os.getcwd(), "about.json", isopos.__version__, 2)}
    assert fake.options == {"num_cpus": 2, "num_gpus": 1, "max_retries": 0}
    assert not fake.cancelled


def test_who_stops_listening_ends_what_runs_and_a_mistake_of_ours_is_raised(ray):
    fake = ray({"a": [""], "b": [], "c": []})
    running = cluster.spread([job(name) for name in "abc"], "auto", "cpu", 1, Path("about.json"))
    assert next(running)[0].name == "a"
    running.close()
    assert fake.cancelled == ["b", "c"]
    assert fake.options["num_gpus"] == 0
    ray({"a": [FakeRay.exceptions.RayTaskError(ZeroDivisionError("ours"))]})
    with pytest.raises(ZeroDivisionError, match="ours"):
        list(cluster.spread([job("a")], "auto", "cpu", 1, Path("about.json")))


@RAY
def test_a_cluster_without_a_machine_that_is_large_enough(ray):
    nodes = [
        {"Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus}} for alive, cpus, gpus in ((1, 2, 0), (0, 64, 8), (1, 4, 0))
    ]
    ray({}, nodes)
    cluster.check_cluster("auto", "cpu", 4)
    with pytest.raises(
        ValueError, match="ray: expected a machine with 5 CPUs for a run, got at most 4; set OMP_NUM_THREADS"
    ):
        cluster.check_cluster("auto", "cpu", 5)
    with pytest.raises(ValueError, match=r"ray: expected a machine with 1 GPUs for a run, got at most 0$"):
        cluster.check_cluster("auto", "cuda", 1)
    with pytest.raises(ValueError, match="device: expected cpu or cuda, since Ray assigns each run a GPU, got 'cuda:1'"):
        cluster.check_cluster("auto", "cuda:1", 1)


def test_a_run_of_a_comparison_in_a_process_of_a_cluster(tmp_path, monkeypatch):
    """The run starts, resumes from its checkpoint, and refuses other data and a locked folder."""
    compare._loaded.cache_clear()
    recipe = Recipe().edit(steps=2, length=16, batch=2, layers=1, model_dim=8, heads=2, validation_tokens=64, save_every=1)
    sha256 = recipe.task.load(recipe).sha256
    assert compare._remote(recipe, recipe, sha256, tmp_path / "a", 0.0) == ""
    before = (tmp_path / "a" / "result.json").read_bytes()
    (tmp_path / "a" / "result.json").unlink()
    assert compare._remote(recipe, recipe, sha256, tmp_path / "a", 0.0) == ""
    assert json.loads((tmp_path / "a" / "result.json").read_text())["scores"] == json.loads(before)["scores"]
    with pytest.raises(ValueError, match=f"data: expected data with sha256 {'0' * 12}, got {sha256[:12]}"):
        compare._remote(recipe, recipe, "0" * 64, tmp_path / "b", 0.0)
    worse = recipe.edit(learning_rate=1e20, clip=0.0, steps=6, schedule="constant", warmup=0)
    assert compare._remote(recipe, worse, sha256, tmp_path / "c", 0.0).startswith("diverged")
    with monkeypatch.context() as patch:
        patch.setattr(compare, "try_lock", lambda *_: contextlib.nullcontext(False))
        with pytest.raises(ValueError, match="c is in use by process"):
            compare._remote(recipe, recipe, sha256, tmp_path / "c", 0.0)


def test_a_run_that_is_not_seen_or_not_done_is_reported(tmp_path, monkeypatch, capsys):
    def ended(jobs, *place):
        yield jobs[0], ""
        yield jobs[1], cluster.Failed("lost", retried=True)
        yield jobs[1], "is being computed by process 1 on elsewhere"
        yield jobs[2], ""

    def done(*names):
        jobs = [cluster.Job(name, print, (), tmp_path / name, 1) for name in names]
        return spreading.do_jobs(jobs, "auto", "cpu", tmp_path, Console(width=200)), capsys.readouterr().out

    monkeypatch.setattr(spreading, "spread", ended)
    monkeypatch.setattr(spreading, "VISIBLE_SECONDS", 0.0)
    (tmp_path / "a").touch()
    whole, out = done("a", "b", "a")
    assert whole
    assert out.count("a: done") == 2
    assert "b: lost; it starts again" in out
    assert "b: is being computed by process 1 on elsewhere" in out
    whole, out = done("a", "b", "c")
    assert not whole
    assert f"{tmp_path / 'c'} does not exist here: machines of a cluster need the folder at the same path" in " ".join(
        out.split()
    )


@pytest.fixture(scope="module")
def address():
    """Address of a local Ray cluster: two nodes with one CPU each."""
    utility = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed (extra cluster)")
    with pytest.MonkeyPatch.context() as patch:  # which nodes, and their workers, take over
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_worker_niceness", "0")  # else tests beside them leave them no time
        nodes = utility.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            nodes.add_node(num_cpus=1)
            yield nodes.address
        finally:
            nodes.shutdown()


@pytest.fixture
def toys(isopos, tmp_path, monkeypatch):
    """Copy a user's task, scheme and table into the working folder."""
    for file in (ROOT / "tests" / "extension").glob("toy_*"):
        shutil.copy(file, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield isopos
    for name in [name for name in sys.modules if name.startswith("toy_")]:
        del sys.modules[name]


def _files(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def _kill(cell, seen):
    """Kill the process that trains a cell after its first checkpoint. Runs in a thread."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if checkpoints.newest(cell) is not None:
            pid = int(holder(cell).split()[1])
            seen.append(pid)
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.002)


@RAY
@pytest.mark.slow
def test_a_table_on_two_nodes_has_the_files_of_one_machine_though_a_worker_is_killed(toys, tmp_path, address):
    more = ("--seeds=2",)
    assert toys(*TABLE, *more, "--name=here")[0] == 0
    here, there = (tmp_path / "runs" / "tables" / f"toy_table-tiny-{STEPS}-{name}" for name in ("here", "there"))
    cell, killed = there / "cells" / "rope-seed0", []
    killer = threading.Thread(target=_kill, args=(cell, killed))
    killer.start()
    code, out, err = toys(*TABLE, *more, "--name=there", f"--ray={address}")
    killer.join()
    assert (code, err) == (0, ""), out
    assert killed
    assert killed != [os.getpid()]
    assert out.count("it starts again") == 1
    assert "rope-seed0: its process was lost" in out
    names = sorted(path.name for path in (here / "cells").iterdir() if path.is_dir())
    assert len(names) == 4
    assert [out.count(f"{name}: done") for name in names] == [1] * 4
    assert _files(here) == _files(there)
    for name in names:
        steps = [row["step"] for row in read_rows(there / "cells" / name / "metrics.jsonl") if "loss" in row]
        assert steps == list(range(1, STEPS + 1))
        for file in SAME:
            assert (here / "cells" / name / file).read_bytes() == (there / "cells" / name / file).read_bytes(), (name, file)
        scores = [json.loads((folder / "cells" / name / "scores.json").read_text())["columns"] for folder in (here, there)]
        assert scores[0] == scores[1]
    before = {path: path.stat().st_mtime_ns for path in there.glob("cells/*/*") if path.is_file()}
    assert toys(*TABLE, *more, "--name=there", f"--ray={address}")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in there.glob("cells/*/*") if path.is_file()} == before


@RAY
@pytest.mark.slow
def test_a_cell_whose_process_is_lost_again_and_again_is_given_up(toys, tmp_path, address, monkeypatch):
    (tmp_path / "toy_task.py").write_text((tmp_path / "toy_task.py").read_text() + END)
    code, out, _ = toys(*TABLE, "--name=lost", f"--ray={address}")
    assert code == 1
    assert out.count("rope-seed0: its process was lost") == cluster.RETRIES + 1
    assert out.count("it starts again") == cluster.RETRIES
    assert "none-seed0: done" in out
    assert "Missing: " in out


END = """

class Shuffles(Shuffles):
    def batch(self, recipe, step, rank=0, ranks=1):
        if step > 3 and recipe.scheme == "rope":
            import os
            os._exit(3)
        return super().batch(recipe, step, rank, ranks)
"""


@RAY
@pytest.mark.slow
def test_a_comparison_on_two_nodes_has_the_runs_of_one_machine(isopos, tmp_path, address):
    assert isopos(*COMPARE, "--name=here")[0] == 0
    code, out, err = isopos(*COMPARE, "--name=there", f"--ray={address}")
    assert (code, err) == (0, ""), out
    here, there = (tmp_path / "runs" / name for name in ("here", "there"))
    assert _files(here) == _files(there)
    for name in ("rope-seed0", "none-seed0"):
        for file in SAME:
            assert (here / name / file).read_bytes() == (there / name / file).read_bytes(), (name, file)
    assert json.loads((there / "comparison.json").read_text())["complete"]


@RAY
@pytest.mark.slow
def test_an_interrupted_table_leaves_checkpoints_and_goes_on(toys, tmp_path, address):
    command = [sys.executable, "-m", "isopos", *TABLE, "--steps=4000", f"--ray={address}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, start_new_session=True, **pipes)
    folder = tmp_path / "runs" / "tables" / "toy_table-tiny-4000"
    end = time.monotonic() + 300
    while not any(checkpoints.newest(path.parent) for path in folder.glob("cells/*/metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT, out
    assert "the same command continues" in out
    begun = [path.parent for path in folder.glob("cells/*/recipe.json")]
    assert begun
    steps = {cell: checkpoints.newest(cell).step for cell in begun if checkpoints.newest(cell)}
    rows = {cell: read_rows(cell / "metrics.jsonl")[-1]["step"] for cell in steps}
    assert all(rows[cell] >= step for cell, step in steps.items())  # later rows of a process that Ray killed are dropped
    assert any(0 < step < 4000 for step in steps.values())
