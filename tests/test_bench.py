import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from rich.console import Console

import benchmarks.races as others
from benchmarks.peers import PEERS
from isopos.lab import timing
from isopos.lab.bench import accuracy, ceilings, gpu, peers, processes, races, results
from isopos.lab.commands import bench
from isopos.lab.timing import Row, at_least, at_most, rounds_of
from isopos.lab.training import run
from tools import performance_page as page

SMALL = 32
SHAPE = races.Shape(SMALL, batch=2, heads=2, head_dim=8)
SAME = {
    "causal": ["fast-transformers", "performer-pytorch"],
    "bidirectional": ["two products, elu + 1, divided"],
    "bidirectional, no features": ["two products"],
    "rotation": ["torchtune's formula", "rotary-embedding-torch", "x-transformers"],
    "decoding step of a scheme, rotary": ["prepared step, rotary"],
    "decoding step": ["einsum step", "prepared step, no positions", "decoding step of a scheme, no positions"],
}


@pytest.fixture(autouse=True)
def without_collections(monkeypatch):
    """Disable garbage collection, which takes most of the time of these tests in a long session."""
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)


@pytest.fixture
def here(monkeypatch):
    """Run sections in this process at a small size; returns the recorded calls."""
    calls = []

    def stream(function, environment=None, **arguments):
        calls.append((function, environment))
        if function == "section":
            arguments |= {"rounds": 2, "longest": SMALL}
        for found in processes.FUNCTIONS[function](**arguments):
            yield json.loads(json.dumps(found))

    monkeypatch.setattr(processes, "results_of_child", stream)
    monkeypatch.setattr(accuracy, "accuracy", lambda: "the table of accuracies")
    monkeypatch.setattr(races, "WORKLOADS", races.WORKLOADS | {"softmax (SDPA) step": races.WORKLOADS["einsum step"]})
    return calls


def _printed(section, **options):
    console = Console(record=True, width=250)
    assert bench.run(bench.Options(section, **options), console) == 0
    return console.export_text()


def _row(**changes):
    return replace(Row("rotary", "ours, forward", "theirs", None, [1.0, 1.0, 1.0], [2.0, 3.0, 4.0]), **changes)


def test_works_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "SHORT", 0)
    turns = []
    seconds = rounds_of({name: lambda name=name: turns.append(name) for name in "abc"}, 3)
    assert "".join(turns) == "abc" + "abc" + "cba" + "abc"  # a call to warm up, then to and fro
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_short_works_are_repeated(monkeypatch):
    calls = []
    rounds_of({"short": lambda: calls.append(None), "long": lambda: time.sleep(timing.SHORT)}, 2)
    assert len(calls) > 100


def test_no_round_begins_after_the_limit_once_there_are_three():
    waits = {"long": lambda: time.sleep(0.01)}
    assert [len(rounds_of(waits, 9, limit=limit)["long"]) for limit in (0, 60)] == [3, 9]
    assert len(rounds_of(waits, 2, limit=0)["long"]) == 2


@pytest.mark.parametrize(("long", "calls"), [(1.0, 2), (0.0, 1)])
def test_elsewhere_than_on_a_cpu_short_works_are_called_once_more_off_the_clock(monkeypatch, long, calls):
    monkeypatch.setattr(timing, "SHORT", 0)
    monkeypatch.setattr(timing, "LONG", long)
    found = []
    next(each := timing.interleave({"work": lambda: found.append(None)}, 2, "cpu:0"))
    found.clear()
    next(each)
    assert len(found) == calls


def test_calls_that_compile_are_not_measured(monkeypatch):
    slow, now = iter([8.0, 2.0]), [0.0]  # kernels of the first call, and of the second
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def work():
        now[0] += next(slow, 2e-3)

    assert rounds_of({"work": work}, 2, "cpu:0")["work"] == pytest.approx([2e-3, 2e-3])
    assert now[0] == pytest.approx(10 + 2e-3 * (3 + 2 * 2 * 3)), "two as long as each other, one to count by, 3 and 3"


@pytest.mark.parametrize(
    ("seconds", "goal", "verdict"),
    [
        ([2.0, 3.0, 4.0], None, "faster"),
        ([0.5, 2.0, 0.5], None, "within the spread"),
        ([0.5, 0.4, 0.5], None, "slower"),
        ([0.5, 1.3, 1.4], at_least(1.2), "within the spread"),
        ([2.0, 3.0, 4.0], at_least(3), "met"),
        ([2.0, 3.0, 4.0], at_least(3.1), "not met"),
        ([1.0, 0.9, 1.0], at_most(1.05), "met"),
        ([0.5, 1.0, 1.5], at_most(1.05), "met"),
        ([0.5, 0.5, 0.5], at_most(1.05), "not met"),
    ],
)
def test_a_verdict_is_on_the_ratio_of_each_round(seconds, goal, verdict):
    assert _row(baseline_seconds=seconds, goal=goal).verdict == verdict


def test_a_figure_has_a_verdict_only_with_a_goal():
    figure = Row("memory", "peak", figure=4.2, unit="of q")
    rows = [figure, *(replace(figure, goal=at_most(most)) for most in (4.5, 4))]
    assert [row.verdict for row in rows] == ["", "met", "not met"]


def test_only_the_steepest_step_of_growth_has_a_weaker_goal():
    rows = races.allow_one_steeper(
        [_row(ours_seconds=[x] * 3, baseline_seconds=[1.0] * 3, goal=at_most(2.2)) for x in (2.0, 2.5, 2.3)]
    )
    assert [row.verdict for row in rows] == ["met", "met", "not met"]


@pytest.mark.parametrize("row", [_row(goal=at_least(2)), _row(), Row("memory", "peak", figure=4.2, unit="of q")])
def test_a_row_comes_back_from_json(row):
    content = row.to_json()
    assert Row.from_json(json.loads(json.dumps(content))) == row
    old = {new: old for old, new in timing.FORMER.items()}
    assert Row.from_json({old.get(name, name): value for name, value in content.items()}) == row, "as version 0.1 wrote it"


def test_every_work_of_a_race_is_known():
    ours, theirs = (
        {name for contest in itertools.chain(*known) for name in itertools.chain(*contest.pairs)}
        for known in ([*races.RACES.values(), *gpu.RACES.values()], [*others.RACES.values(), *others.GPU.values()])
    )
    assert ours <= {*races.WORKLOADS, ceilings.PRODUCT, ceilings.ROOFLINE, ceilings.FRESH}
    assert theirs & PEERS.keys() == {*PEERS} - {"transformers RoFormer"}, "whose table takes minutes"
    assert theirs - PEERS.keys() <= {*races.WORKLOADS}
    assert set(races.WORKLOADS) <= ours | theirs


@pytest.mark.parametrize(("ours", "other"), [(ours, other) for ours, others in SAME.items() for other in others])
def test_works_of_a_race_compute_the_same(ours, other, monkeypatch):
    monkeypatch.setattr(races, "PEERS", PEERS)
    if other in PEERS and (why := PEERS[other].absence()):
        pytest.skip(why)
    shape = SHAPE._replace(length=1) if "step" in ours else SHAPE
    inputs = torch.randn(3 if ours != "rotation" else 2, *shape[1:3], shape.length, shape.head_dim)
    calls = [races.workload_of(name, shape) for name in (ours, other)]
    for _ in range(3):
        torch.testing.assert_close(calls[0](*inputs), calls[1](*inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("section", "words"), [
    ("attention", "bidirectional, no features, forward + backward, B=2 H=8 L=32 d=64"),
    ("rotary", "largest error against float64"),
    ("decode", "decoding step, B=32 H=8 d=64, after 32 tokens"),
    ("sublayer", "attention module, householder + rotary, forward + backward, B=4 H=8 L=32"),
    ("growth", "B=1 H=4 L=32 d=64"),
    ("threads", "causal, forward + backward, B=2 H=8 L=32 d=64, 2 threads"),
    ("load", "causal, forward + backward, B=2 H=8 L=32 d=64, 2 busy"),
])  # fmt: skip
def test_a_section_prints_its_rows(here, section, words):
    text = _printed(section, allocator="as-is")
    assert words in text
    assert "reused" not in text
    assert [function for function, _ in here] == ["section"]


def test_shares_are_of_the_rate_of_a_product(monkeypatch):
    """The reference product has 2^31 operations and takes 2 s. The ceiling scales it to our number of operations."""
    monkeypatch.setattr(races, "rounds_of", lambda workloads, rounds, *_: dict.fromkeys(workloads, [2.0] * rounds))
    shape = races.Shape(2048)
    (row,) = races.race(
        "attention", races.Race("attention", races.BOTH, shape, {("causal", ceilings.PRODUCT): at_least(0.6)}), 3
    )
    operations = 2 * 8 * 2048 * 86016
    assert row.spread.median == pytest.approx(operations / 2**31)


def test_a_roofline_is_the_slower_of_copies_and_products():
    """The pass reads or writes 11 tensors, a copy reads and writes one. Each token and head needs 86016 operations."""
    seconds = {ceilings.PRODUCT: [2.0, 2.0], ceilings.COPY: [1.0, 1e-9]}
    found = ceilings.scaled(seconds, 2**14, 64, device="cpu", gradients=True)
    products = 2.0 * 2**14 * 86016 / 2**31
    assert found[ceilings.ROOFLINE] == [max(5.5, products), products]
    assert "matrix products of as many operations" in found
    assert ceilings.ROOFLINE not in ceilings.scaled({ceilings.PRODUCT: [1.0]}, 1, 64, device="cpu", gradients=True)


@pytest.mark.parametrize(("gradients", "operations"), [(False, 4 * 64**2), (True, 12 * 64**2)])
def test_the_roofline_of_sums_over_all_keys_has_no_chunks(monkeypatch, gradients, operations):
    monkeypatch.setattr(races, "rounds_of", lambda workloads, rounds, *_: dict.fromkeys(workloads, [2.0] * rounds))
    passing = races.BOTH if gradients else races.FORWARD
    pairs = {("bidirectional, no features", ceilings.PRODUCT): None}
    (row,) = races.race("attention", races.Race("attention", passing, races.Shape(64), pairs, causal=False), 3)
    assert row.spread.median == pytest.approx(2 * 8 * 64 * operations / 2**31)


@pytest.mark.parametrize(("gradients", "results"), [(False, 1), (True, 4)])
def test_fresh_results_are_cleared_next_to_products(gradients, results):
    seconds = {name: [3.0] for name in ceilings.measurement_names([ceilings.FRESH])}
    found = ceilings.scaled(seconds, 2**14, 64, device="cpu", gradients=gradients)
    assert found[ceilings.FRESH] == [found[ceilings.PRODUCT][0] + 3.0 * results]
    assert ceilings.ROOFLINE not in found


def test_a_clone_s_gradient_is_no_copy():
    """The goals for rotations compared with clones on a GPU assume this."""
    q, grad = torch.randn(3, requires_grad=True), torch.randn(3)
    (found,) = torch.autograd.grad(q.clone(), q, grad)
    assert found.data_ptr() == grad.data_ptr()


NOTES = [
    (torch.OutOfMemoryError("no room"), "two clones: out of memory"),
    (RuntimeError("no kernel\nfor these"), "two clones: RuntimeError: no kernel"),
]


@pytest.mark.parametrize(("error", "note"), NOTES)
@pytest.mark.parametrize("when", ["made", "called"])
def test_what_fails_is_a_row_that_says_so(monkeypatch, capsys, error, note, when):
    def fail(*_):
        raise error

    monkeypatch.setitem(races.WORKLOADS, "two clones", fail if when == "made" else lambda shape: fail)
    pairs = {races.CLONES: None, ("two clones", "rotation"): None, ("rotation", "rotate-half"): None}
    rows = list(races.race("rotary", replace(races.ROTARY[0], shape=SHAPE, pairs=pairs), 1))
    assert [(row.raced, row.note) for row in rows] == [*2 * [(False, note)], (True, "")]
    assert ("Traceback" in capsys.readouterr().err) is ("RuntimeError" in note)


def test_a_race_that_fails_as_a_whole_has_rows_that_say_so(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(races, "rounds_of", fail)
    contest = replace(races.ROTARY[0], shape=SHAPE)
    rows = list(races.race("rotary", contest, 1))
    assert len(rows) == len(contest.pairs)
    assert {row.note for row in rows} >= {"the race: out of memory"}
    assert not any(row.raced for row in rows)


def test_a_peer_that_does_not_fit_is_not_called_absent(monkeypatch, tmp_path):
    (tmp_path / "a_misfit.py").write_text("import no_such_module")
    (tmp_path / "another_misfit.py").write_text("raise AttributeError('torch has no such thing')")
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        peers.Peer(name, "theirs", lambda *_: None).absence() for name in ("a_misfit", "another_misfit", "no_such_module")
    ]
    assert found == [
        "theirs cannot be imported: No module named 'no_such_module'",
        "theirs cannot be imported: AttributeError: torch has no such thing",
        "theirs is not installed: pip install theirs",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line(isopos):
    status, out, err = isopos("bench", "--device", "cuda")
    assert (status, out) == (2, "")
    assert err == "isopos: device: expected cpu, cuda or auto, got 'cuda', which this torch cannot use here\n"


def test_busy_processes_run_and_end():
    before = _children()
    with races.busy(2):
        assert len(_children() - before) == 2
    assert _children() <= before


def _children():
    """Ids of the child processes of this thread."""
    return {*Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}


def test_threads_are_as_many_as_before(here):
    before = torch.get_num_threads()
    list(races.threads(1, SMALL))
    assert torch.get_num_threads() == before


def test_memory_and_construction_are_measured_in_separate_processes(here):
    tiny = races.Shape(SMALL)
    rows = [
        *processes.memory((SMALL,), SMALL),
        *processes.construction(1, nodes=15),
    ]
    assert str(tiny) in rows[0].workload
    assert [function for function, _ in here] == ["peak"] * 4 + ["long"] * 4 + ["tree"] * 3
    assert sum("slowest five" in row.unit for row in rows) == 5


def test_a_tree_s_operators_are_measured_for_one_head():
    assert processes.tree_operators(7)["result"] == 7 * 64 * 64 * 4


def test_the_states_of_the_allocator_are_below_each_other(here):
    text = _printed("growth", allocator="all")
    states = [*processes.variants_of("cpu", "all")]
    assert [environment for _, environment in here] == [processes.ALLOCATORS[state] for state in states]
    found = re.findall(r"as-is|reused|huge-pages", text)
    assert found == states * (len(found) // len(states))


def test_an_absent_peer_is_a_separate_row(monkeypatch):
    absent = {"fast-transformers": PEERS["fast-transformers"]._replace(module="no_such_module")}
    monkeypatch.setattr(races, "PEERS", PEERS | absent)
    (row, *_) = races.race("attention", replace(others.ATTENTION[0], shape=races.Shape(SMALL)), 1)
    absence = "pytorch-fast-transformers is not installed: pip install pytorch-fast-transformers, needs a compiler"
    assert absence in row.cells()
    assert not row.raced
    assert row.to_json()["verdict"] == ""


def test_what_is_written(here, tmp_path):
    text = _printed("rotary", allocator="as-is", out=str(tmp_path / "new"))
    content = json.loads((tmp_path / "new" / results.DATA).read_text())
    assert {"command", "when", "rounds", "versions", "threads", "cpu", "rows"} <= set(content)
    assert content["versions"]["torch"] == torch.__version__
    row = content["rows"][0]
    assert (row["workload"], row["baseline"], row["variant"]) == (
        "rotation, forward, B=2 H=8 L=32 d=64",
        "two clones",
        "as-is",
    )
    assert len(row["ours_seconds"]) == len(row["baseline_seconds"]) == 2
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert "two clones" in (tmp_path / "new" / results.CHART).read_text()
    assert all(name in text for name in (results.DATA, results.CHART))


def test_every_ratio_has_a_bar_with_quartiles_next_to_its_name():
    goals = {"theirs": None, "a cost": at_most(0.5), "a goal": at_least(2)}
    rows = [_row(baseline=other, goal=goal, variant="as-is") for other, goal in goals.items()]
    axes = results.chart(rows).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"ours, forward  vs  {row.baseline}" for row in rows]
    assert [(bar.get_y() + bar.get_height() / 2, bar.get_x()) for bar in axes.patches] == [(n, 1.0) for n in range(3)]
    assert [1 + bar.get_width() for bar in axes.patches] == pytest.approx([3.0, 3.0, 3.0]), "ours takes 1, the other 2 to 4"
    spans = [[x for x, _ in segment] for bars in axes.collections for segment in bars.get_segments()]
    of_costs = 12 / 5, 24 / 7  # whose quartiles are those of the inverse
    expected = [(2.5, 3.5), of_costs, (2.5, 3.5)]
    assert [(min(span), max(span)) for span in spans] == [pytest.approx(ends) for ends in expected]
    marks = {round(line.get_ydata()[0], 2): line.get_xdata()[0] for line in axes.get_lines() if line.get_linewidth() == 2}
    assert marks == {0.55: 2.0, 1.55: 2.0}
    bottom, top = axes.get_ylim()
    assert top < -0.35
    assert bottom > 2.35, "the first is on top, and all are whole"


def test_the_page_of_a_run(here, tmp_path):
    _printed("rotary", allocator="as-is", out=str(tmp_path))
    text = page.page(json.loads((tmp_path / results.DATA).read_text()))
    assert "## Rotation of queries and keys" in text
    assert "## Memory" not in text
    assert "| rotation, forward, B=2 H=8 L=32 d=64 | two clones | as-is |" in text
    assert set(page.SECTIONS) == set(processes.SECTIONS)


COMMITTED = Path(__file__).parents[1] / "docs" / "performance-tables.md"


@pytest.mark.skipif(not COMMITTED.exists(), reason="docs/ is part of the repository, not of the package")
def test_the_committed_page_has_the_races_and_the_goals_that_are_run():
    lines = (line.split(" | ") for line in COMMITTED.read_text(encoding="utf-8").splitlines() if line.count(" | ") == 7)
    goals = {(work.removeprefix("| "), other): goal for work, other, _, _, _, _, goal, _ in lines}
    for contest in itertools.chain(*races.RACES.values(), *others.RACES.values()):
        passing = "" if contest.passing == races.STEP else f", {contest.passing}"
        for (ours, other), goal in contest.pairs.items():
            assert goals[f"{ours}{passing}, {contest.shape}", other] == str(goal or "")
    for shorter, longer in itertools.pairwise(races.LENGTHS):
        longer = races.Shape(longer, batch=1, heads=4)
        goal = goals.pop((f"causal, rotary, {races.BOTH}, {longer}", f"L={shorter}"))
        assert goal in (str(races.DOUBLING), str(races.STEEPEST))
    assert not [work for work, _ in goals if work.startswith("causal, rotary")]


def test_the_command_line_knows_the_sections():
    (section,) = (field.type.__origin__ for field in dataclasses.fields(bench.Options) if field.name == "section")
    assert get_args(section) == ("all", *processes.SECTIONS, "accuracy", "exactness")


def test_an_interrupted_run_goes_on(here, tmp_path, monkeypatch):
    def interrupted(section, contest, *options, **more):
        if contest.passing == races.BOTH:
            raise KeyboardInterrupt
        return race(section, contest, *options, **more)

    race = races.race
    monkeypatch.setattr(races, "race", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _printed("rotary", allocator="as-is", out=str(tmp_path), rounds=2)
    before = json.loads((tmp_path / results.DATA).read_text())["rows"]
    assert len(before) == len(races.ROTARY[0].pairs)
    monkeypatch.setattr(races, "race", race)
    _printed("rotary", allocator="as-is", out=str(tmp_path), rounds=2, resume=True)
    after = json.loads((tmp_path / results.DATA).read_text())["rows"]
    assert after[: len(before)] == before
    assert len(after) == sum(len(contest.pairs) for contest in races.ROTARY) + 1
    _printed("decode", allocator="as-is", out=str(tmp_path), rounds=2, resume=True)
    assert json.loads((tmp_path / results.DATA).read_text())["rows"][: len(after)] == after


def test_a_run_does_not_go_on_with_another_machine_s(here, isopos, tmp_path):
    _printed("rotary", allocator="as-is", out=str(tmp_path), rounds=2)
    status, _, err = isopos("bench", "rotary", "--out", ".", "--resume")
    assert (status, err) == (
        2,
        "isopos: resume: expected rounds 2 as in bench.json, got 9; choose another folder with --out\n",
    )
    content = json.loads((tmp_path / results.DATA).read_text())
    for name, other in (("cpu", "an abacus"), ("threads", 99), ("rounds", None)):
        (tmp_path / results.DATA).write_text(json.dumps(content | {name: other}))
        with pytest.raises(ValueError, match=rf"resume: expected {name} {other} as in .*, got "):
            _printed("rotary", out=str(tmp_path), rounds=2, resume=True)
    for damage in ("", "[]", json.dumps(content | {"rows": 1})):
        (tmp_path / results.DATA).write_text(damage)
        with pytest.raises(ValueError, match=r"bench\.json: .*; remove it, or choose another folder with --out"):
            _printed("rotary", out=str(tmp_path), rounds=2, resume=True)
    (tmp_path / results.DATA).write_text("{}")
    with pytest.raises(ValueError, match=r"resume: expected rounds None as in"):
        _printed("rotary", out=str(tmp_path), rounds=2, resume=True)


def test_a_gpu_s_races_end_with_an_error_that_none_survives(monkeypatch):
    """A resumed run must not count the later races as done."""

    def broken(*_, **__):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(races, "_inputs", broken)
    found, (first, *_) = [], gpu.DECODE
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        found.extend(processes.section("decode", 1, SMALL, "cuda"))
    assert [row.baseline for row in found] == [other for _, other in first.pairs]
    assert {row.note for row in found} == {"the race: RuntimeError: an illegal memory access"}


def test_rows_measured_again_take_the_place_of_those_before():
    rows = [_row(variant="a"), _row(section="decode"), _row(variant="b"), _row(variant="a", ours_seconds=[2.0])]
    assert results.latest_rows(rows) == [rows[3], rows[2], rows[1]]
    units = [_row(figure=1.0, unit=unit) for unit in ("s", "GiB")]
    assert results.latest_rows(units) == units


def test_a_gpu_has_the_same_command(here, tmp_path, monkeypatch):
    """The test runs the code for GPUs on a CPU device."""
    monkeypatch.setattr(run, "usable_device", lambda device: "cpu:0")
    small = [replace(contest, shape=contest.shape._replace(batch=2, heads=2, head_dim=16)) for contest in gpu.DECODE[:1]]
    monkeypatch.setitem(gpu.RACES, "decode", small)
    text = _printed("decode", device="cuda", out=str(tmp_path), rounds=2)
    assert "at least 3" in text
    assert [environment for _, environment in here] == [{gpu.SWITCH: "any"}, {gpu.SWITCH: "0"}]
    rows = json.loads((tmp_path / results.DATA).read_text())["rows"]
    assert [row["variant"] for row in rows] == ["triton", "pytorch"] * (len(rows) // 2)
    with pytest.raises(ValueError, match="allocator: expected all on cuda, whose option is --backend, got as-is"):
        _printed("decode", device="cuda", allocator="as-is")


def test_nothing_is_overwritten_unasked(here, isopos, tmp_path):
    (tmp_path / results.DATA).write_text("{}")
    status, _, err = isopos("bench", "rotary", "--out", ".")
    assert status == 2
    assert "--overwrite" in err
    assert not here
    _printed("rotary", allocator="as-is", out=str(tmp_path), overwrite=True)
    assert json.loads((tmp_path / results.DATA).read_text())["rows"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rounds", "0"), "rounds: expected at least 1, got 0"),
        (("--out", "file"), "out: expected a folder, but file is a file"),
        (("--compiled",), "compiled: expected the section exactness, got rotary"),
        (
            ("--state", "reused", "--allocator", "as-is"),
            "state: expected --allocator alone, of which it is the former name, got reused",
        ),
        (("--state", "triton"), "allocator: expected all or as-is or reused or huge-pages here, got triton"),
        (("--resume",), "resume: expected --out, the folder to continue, without --overwrite"),
    ],
)
def test_what_does_not_fit_is_refused(here, isopos, tmp_path, arguments, words):
    (tmp_path / "file").write_text("")
    status, _, err = isopos("bench", "rotary", *arguments)
    assert (status, err) == (2, f"isopos: {words}\n")
    assert not here


def test_reuse_needs_glibc(monkeypatch):
    monkeypatch.setattr(processes.platform, "libc_ver", lambda: ("", ""))
    assert [*processes.variants_of("cpu", "all")] == ["as-is"]
    with pytest.raises(ValueError, match="only glibc"):
        processes.variants_of("cpu", "reused")


def test_accuracy_alone(here):
    assert _printed("accuracy").strip() == "the table of accuracies"
    assert not here


@pytest.mark.slow
def test_a_separate_process():
    assert processes.call("peak", spec="none", shape=races.Shape(1024)) > 1  # more than what warming up took
    first = next(rows := processes.results_of_child("section", name="growth", rounds=1, longest=128))
    assert Row.from_json(first).raced
    rows.close()
    with pytest.raises(OSError, match=r"the process of peak .* ended with 1"):
        processes.call("peak", spec="nothing", shape=SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retnet", "permuteformer"])
def test_memory_of_a_training_step_is_at_most_six_times_that_of_q(name):
    # at most three times, as the allocator's arenas add up to half a q at random; the gradients alone are 3
    assert any(3 < processes.call("peak", spec=name, shape=races.Shape(8192)) <= 6 for _ in range(3))


def test_the_formulas_of_others_rotate_as_ours_does():
    q, k = torch.randn(2, *SHAPE[1:3], SHAPE.length, SHAPE.head_dim)
    rotated = races.workload_of("rotation", SHAPE)(q, k)
    apart = torch.arange(SHAPE.head_dim).view(-1, 2).T.flatten()  # pairs (2i, 2i + 1) as pairs (i, i + d/2)
    for name, order in (("rotate-half", apart), ("torchtune's formula", torch.arange(SHAPE.head_dim))):
        found = races.workload_of(name, SHAPE)(q[..., order], k[..., order])
        for ours, theirs in zip(rotated, found, strict=True):
            torch.testing.assert_close(theirs, ours[..., order], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_benchmarks_of_other_libraries_run_in_separate_processes(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "rotary", "--rounds", "1", "--allocator", "as-is", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(COMMITTED.parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / results.DATA).read_text())
    assert content["command"].startswith("python -m benchmarks rotary")
    assert set(PEERS[other].package for _, other in others.EMBEDDINGS) <= content["versions"].keys()
    found = [(row["baseline"], row["note"]) for row in content["rows"] if row["baseline"]]
    assert [other for other, _ in found] == [other for _, other in others.EMBEDDINGS] * 2
    assert all(not note or "pip install" in note for _, note in found)


@pytest.fixture
def counted(monkeypatch):
    """Workloads take 1, 2, 3, ... seconds in order of their first call, across races."""
    clock = itertools.count(1)
    monkeypatch.setattr(
        races, "rounds_of", lambda workloads, rounds, *_: {name: [next(clock)] * rounds for name in workloads}
    )


def test_rows_that_are_no_pairs_of_a_race_compare_the_later_with_the_earlier(counted, monkeypatch):
    monkeypatch.setattr(races.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(races, "busy", nullcontext)
    rows = [
        (row.workload, row.baseline, row.goal, row.ours_seconds, row.baseline_seconds) for row in races.threads(1, SMALL)
    ]
    shape = "B=2 H=8 L=32 d=64"
    assert rows == [
        (f"causal, {races.BOTH}, {shape}, 2 threads", "1 threads", None, [2], [1]),
        (f"causal, {races.BOTH}, {shape}, 4 threads", "2 threads", None, [3], [2]),
    ]
    rows = [
        (row.workload, row.baseline, row.goal, row.ours_seconds, row.baseline_seconds)
        for row in races.growth(1, (8, 16, 32))
    ]
    assert rows == [
        ("causal, rotary, forward + backward, B=1 H=4 L=16 d=64", "L=8", races.STEEPEST, [5], [4]),
        ("causal, rotary, forward + backward, B=1 H=4 L=32 d=64", "L=16", races.DOUBLING, [6], [5]),
    ]
    found = [row for row in races.under_load(1, SMALL) if row.baseline == "itself, none busy"][:2]
    name = f"causal, {races.BOTH}, {shape}"
    assert [(row.workload, row.goal) for row in found] == [(f"{name}, {n} busy", races.LOADED_TIME) for n in (1, 2)]
    assert [(row.ours_seconds, row.baseline_seconds) for row in found] == [([9], [7]), ([11], [7])], "two workloads a race"


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_ceilings_are_those_of_as_much_work(gradients, causal):
    """There are 2^14 tokens with 64 features. The product of 1024^2 takes 1 and 3 s, a copy 2 s, and zeros 5 s."""
    seconds = {ceilings.PRODUCT: [1.0, 3.0], ceilings.COPY: [2.0, 2.0], ceilings.ZEROS: [5.0, 5.0]}
    found = ceilings.scaled(seconds, 2**14, 64, device="cpu", gradients=gradients, causal=causal)
    work = {(0, 0): 4 * 64**2, (1, 0): 12 * 64**2, (0, 1): 4 * 64**2 + 128 * 64, (1, 1): 14 * 64**2 + 7 * 64**2}
    share = 2**14 * work[gradients, causal] / 2**31
    copies, zeros = (11.0, 20.0) if gradients else (4.0, 5.0)
    assert found == {
        ceilings.PRODUCT: [share, 3 * share],
        ceilings.COPY: [copies] * 2,
        ceilings.ZEROS: [zeros] * 2,
        ceilings.ROOFLINE: [max(copies, share), max(copies, 3 * share)],
        ceilings.FRESH: [share + zeros, 3 * share + zeros],
    }


def test_inputs_of_a_gpu_have_the_layout_of_projections():
    shape = races.Shape(5, batch=2, heads=3, head_dim=4)
    for first, strides in ((False, (60, 20, 4, 1)), (True, (60, 4, 12, 1))):
        made = races._inputs("attention", shape, races.BOTH, torch.float64, tokens_first=first)
        assert [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in made] == 3 * [
            (torch.Size((2, 3, 5, 4)), strides, torch.float64, True)
        ]
    (layer,) = races._inputs("layer", shape, races.FORWARD, tokens_first=True)
    assert (layer.shape, layer.requires_grad) == ((2, 5, 12), False)
    assert [len(races._grads(what, made)) for what in ("attention", "rotary")] == [1, 3]


def test_a_pass_of_a_layer_has_the_gradients_of_its_weights_too():
    shape = races.Shape(6, batch=1, heads=2, head_dim=4)
    inputs = races._inputs("layer", shape, races.BOTH)
    found = races._one_pass("attention module, rotary", shape, races.BOTH, inputs, races._grads("layer", inputs))()
    assert [tuple(grad.shape) for grad in found] == [(1, 6, 8), *4 * [(8, 8), (8,)]]


def test_an_absent_ceiling_s_note_is_that_of_its_part(monkeypatch):
    monkeypatch.setitem(ceilings.WORKLOADS, ceilings.COPY, lambda like: 1 / 0)
    pairs = {("causal", ceilings.ROOFLINE): None, ("causal", ceilings.PRODUCT): None}
    rows = list(races.race("attention", races.Race("attention", races.FORWARD, SHAPE, pairs), 1))
    assert [(row.raced, row.note) for row in rows] == [
        (False, f"{ceilings.COPY}: ZeroDivisionError: division by zero"),
        (True, ""),
    ]


def test_a_child_that_ends_badly_says_how(monkeypatch):
    module = "import os, sys; os.kill(os.getpid(), 9) if os.environ.get('HOW') == 'kill' else sys.exit(3)"
    run = processes.subprocess.Popen

    def start(command, **options):
        assert command[1:4] == ["-m", processes.MODULE, "tree"]
        assert json.loads(command[4]) == {"nodes": 7}
        return run([sys.executable, "-c", module], **options)

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    for environment, said in (
        ({"HOW": "kill"}, "-9: killed, perhaps because memory ran out"),
        (None, "3: its error is above"),
    ):
        with pytest.raises(OSError, match=f'the process of tree {{"nodes": 7}} ended with {said}'):
            list(processes.results_of_child("tree", environment, nodes=7))


def test_a_figure_of_a_tree_is_in_its_unit(monkeypatch):
    runs = iter([{"seconds": s, "bytes": b * 2**30, "result": 2**29} for s, b in ((3.0, 1), (1.0, 5), (2.0, 4))])
    monkeypatch.setattr(processes, "call", lambda function, **arguments: next(runs))
    monkeypatch.setattr(processes, "rounds_of", lambda workloads, rounds: {"a": [2.0], "b": [4.0, 1.0, 3.0]})
    found = [
        (row.workload.partition(",")[0], row.figure, row.unit.partition(",")[0]) for row in processes.construction(1, 15)
    ]
    assert found == [
        ("construction of b", 3000.0, "ms"),
        ("construction of a", 2000.0, "ms"),
        ("construction", 2500.0, "ms"),
        *(("operators of a binary tree", figure, unit) for figure, unit in (
            (2.0, "s"), (4.0, "GiB of peak memory above the start"), (0.5, "GiB"),
        )),
    ]  # fmt: skip


def test_rows_that_are_there_are_left_out_by_variant(monkeypatch):
    asked = []
    monkeypatch.setattr(
        processes, "results_of_child", lambda function, environment, **arguments: asked.append(arguments) or iter(())
    )
    done = [_row(variant="a"), _row(variant="b", baseline="others"), _row(section="decode", variant="a")]
    assert not list(processes.in_variants("rotary", {"a": {}, "b": {}, "c": {}}, 3, "cpu", done))
    assert [one["done"] for one in asked] == [[("ours, forward", "theirs")], [("ours, forward", "others")], []]
    assert all((one["name"], one["rounds"], one["device"]) == ("rotary", 3, "cpu") for one in asked)


def test_every_file_goes_below_folders_that_are_made(tmp_path):
    folder = results.target(str(tmp_path / "a" / "b"))
    assert folder == tmp_path / "a" / "b"
    assert folder.is_dir()
    (folder / results.CHART).touch()
    with pytest.raises(ValueError, match=r"out: .*bench.svg exists; choose another folder with --out, replace it with"):
        results.target(str(folder), keep=True)
    assert results.target("") is None
    rows = [_row(section="growth"), _row(figure=1.0, ours_seconds=[])]
    assert results.draw_chart(folder, rows) == []
    assert results.draw_chart(folder, [*rows, _row()]) == [folder / results.CHART]
    assert (folder / results.CHART).read_text().count("ours, forward") == 1


def test_a_gpu_s_run_goes_on_with_the_same_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    results.write_results(tmp_path, [_row()], "isopos bench", 3, "cuda")
    content = json.loads((tmp_path / results.DATA).read_text())
    assert (content["device"], content["dtype"], content["command"]) == ("the GPU cuda", "bfloat16", "isopos bench")
    (tmp_path / results.DATA).write_text(json.dumps(content | {"cpu": "an abacus", "threads": 99}))
    assert results.earlier_rows(tmp_path, 3, "cuda") == [_row()]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    with pytest.raises(
        ValueError, match=r"resume: expected device the GPU cuda as in .*, got another; choose another folder"
    ):
        results.earlier_rows(tmp_path, 3, "cuda")
    assert "the GPU" not in results.heading(3)
    assert results.heading(3, "cuda").count("another, bfloat16. Medians of 3 interleaved rounds, or fewer") == 1
