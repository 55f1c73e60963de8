"""Test that random calls, command lines and damaged files give a correct result or one clear error (`make fuzz`)."""

import contextlib
import faulthandler
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import random_calls
import torch
import workspace
from hypothesis import HealthCheck, find, given, settings
from random_calls import Wrong, is_clear
from strategies import COUNTS, READERS, Damage, calls, command_lines, damages
from workspace import Ended, command, copied, make, run_command, run_damaged

import isopos

pytestmark = pytest.mark.filterwarnings("default")  # as for a user: no warning of ours is an error
CASE = Path("build/fuzz.txt")  # the case that runs, for one that ends the process
ENDLESS = 60.0  # seconds after which a case counts as one that never ends
MEMORY = 4 << 30  # bytes that this process may take
FUZZ = "fuzz"  # a profile of Hypothesis


def run_examples(strategy, run, examples):
    """Run examples of a strategy; with the profile "fuzz", as many as the profile sets."""
    many = settings.get_current_profile_name() == FUZZ
    count = settings().max_examples if many else examples

    @settings(max_examples=count, suppress_health_check=[*HealthCheck])
    @given(strategy)
    def one(case):
        with guarded(case) if many else contextlib.nullcontext():
            assert run(case) in ("answer", "error")

    one()


@contextlib.contextmanager
def guarded(case):
    """Write the case to a file before it runs, limit memory, and end an endless case with a traceback in the file."""
    CASE.parent.mkdir(exist_ok=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with CASE.open("w", encoding="utf-8", errors="backslashreplace") as file:
        print(repr(case), file=file, flush=True)
        faulthandler.dump_traceback_later(ENDLESS, exit=True, file=file)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            faulthandler.cancel_dump_traceback_later()


def few(fast, slow):
    """Parametrise by the number of examples: `fast`, or `slow` in a slow test."""
    return pytest.mark.parametrize("examples", [fast, pytest.param(slow, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A working folder with runs (workspace.py)."""
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def whole(made):
    """A function from a command's name to its result in the undamaged folder, cached."""
    found = {}

    def ended(name):
        if name not in found:
            with copied(made):
                found[name] = command(READERS[name][0].split())
        return found[name]

    return ended


@few(40, 1200)
def test_a_random_call_is_right_or_one_clear_error(examples):
    run_examples(calls(), random_calls.run, examples)


@few(8, 80)
def test_a_random_command_is_right_or_one_clear_error(made, examples):
    run_examples(command_lines(), lambda words: run_command(words, made), examples)


@few(8, 60)
def test_a_damaged_file_is_read_as_before_or_named(made, whole, examples):
    files = sorted(str(path.relative_to(made / "runs")) for path in made.glob("runs/**/*") if path.is_file())
    run_examples(damages(files), lambda case: run_damaged(case, made, whole(case.command)), examples)


@pytest.mark.slow
def test_what_fails_is_reduced_to_what_makes_it_fail():
    assert find(calls(), lambda case: case.get("mask") == "left") == {"mask": "left"}
    found = find(damages(["done/a.json", "half/b.pt"]), lambda case: case.kind == "fifo")
    assert found == Damage("runs", "done/a.json", "fifo", 0.0)


@settings(max_examples=100)
@given(command_lines())
def test_drawn_command_lines_keep_to_what_ends(words):
    for flag, value in itertools.pairwise(words):
        assert flag not in COUNTS or len(value) < 3 or not value.isdecimal()


@pytest.mark.parametrize(
    ("message", "clear"),
    [
        ("mask: expected bool [*b 5], got torch.float32 [5]", True),
        ("linear_attention: expected no create_graph=True, got one", True),
        ("q, k, v: expected leading dimensions [*b h] that broadcast, got [2], [3]", True),
        ("Expected all tensors to be on the same device", False),
        ("expected scalar type Float but found Half", False),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_a_clear_error_says_what_was_expected_and_what_came(message, clear):
    assert is_clear(ValueError(message)) == clear
    assert not is_clear(AttributeError(message))


def unclear(right, q, k, v, **options):
    raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")


BUGS = {
    "160 numbers|288 numbers": (lambda right, *qkv, **at: right(*qkv, **at) * (1 + 1e-3), {}),
    "the gradient of k is off": (
        lambda right, q, k, v, **at: right(q, k * 1.01 - k.detach() * 0.01, v, **at),
        {"grad": True, "dtype": "float64"},
    ),
    "must match the size": (unclear, {}),
    "nan, not": (
        lambda right, q, k, v, **at: right(q, k, v, **at | {"mask": None}),
        {"mask": "left", "garbage": "masked-nan"},
    ),
    "an answer on the CPU": (lambda right, q, k, v, **at: torch.zeros(1), {"odd": "q:meta"}),
    "expected torch.float32, got torch.float64": (lambda right, *qkv, **at: right(*qkv, **at).double(), {}),
}


@pytest.mark.parametrize("found", BUGS)
def test_a_wrong_answer_of_a_call_is_found(found, monkeypatch):
    bug, case = BUGS[found]
    case = {"t": 9, "scheme": "rope"} | case
    assert random_calls.run(case) in ("answer", "error")
    right = isopos.linear_attention
    monkeypatch.setattr(isopos, "linear_attention", lambda *qkv, **at: bug(right, *qkv, **at))
    with pytest.raises((Wrong, RuntimeError), match=found):
        random_calls.run(case)


def leaves(path):
    """A stub for a command that fails but leaves a folder."""
    Path(path).mkdir(parents=True)
    return Ended(2, "", "isopos: refused")


@pytest.fixture
def small(tmp_path):
    """A folder with a run."""
    (tmp_path / "runs" / "done").mkdir(parents=True)
    (tmp_path / "runs" / "done" / "model.safetensors").write_bytes(b"weights")
    return tmp_path


TRACEBACK = Ended(1, "", "Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        (lambda words: leaves("../beside"), "wrote outside the working folder"),
        (lambda words: leaves("runs/new"), "runs/new is left"),
        (lambda words: TRACEBACK, "a traceback"),
        (lambda words: Ended(2, "", "isopos: \x1b[31mred"), "control characters"),
        (lambda words: Ended(3, "", ""), "exit status 3"),
        (lambda words: Ended(2, "", ""), "exit status 2"),
        (lambda words: Ended(2, "", "isopos: a\nb\nc\nd"), "more than one message"),
        (lambda words: Ended(2, "", "isopos: [Errno 2] a"), "not a clear message"),
    ],
)
def test_a_wrong_end_of_a_command_is_found(ends, found, small, monkeypatch):
    assert run_command(["list"], small) == "answer"
    monkeypatch.setattr(workspace, "command", ends)
    with pytest.raises(Wrong, match=found):
        run_command(["list"], small)


@pytest.mark.parametrize(
    ("command", "ended", "found"),
    [
        ("eval", TRACEBACK, "a traceback"),
        ("eval", Ended(0, "\x07", ""), "control characters"),
        ("runs", Ended(0, "pair/rope-seed0", ""), "not all other runs are listed"),
        ("eval", Ended(0, "loss 1.5", ""), r"other figures without a word: \['1.5'\], not \['2.5'\]"),
        ("eval", Ended(1, "", ""), "not one message"),
        ("eval", Ended(2, "", "isopos: it cannot be read"), "does not name model.safetensors"),
        ("eval", Ended(2, "", "isopos: model.safetensors: NoneType"), "not a clear message"),
    ],
)
def test_a_wrong_end_of_a_reader_is_found(command, ended, found, small, monkeypatch):
    monkeypatch.setattr(workspace, "command", lambda words: ended)
    with pytest.raises(Wrong, match=found):
        run_damaged(Damage(command, "done/model.safetensors", "flip", 0.5), small, Ended(0, "loss 2.5", ""))


@pytest.mark.slow
@pytest.mark.parametrize(("end", "said"), [("os.kill(os.getpid(), 11)", ""), ("time.sleep(60)", "Timeout")])
def test_a_case_that_ends_the_process_or_never_ends_is_in_a_file(end, said, tmp_path):
    code = f"import os, time, test_fuzz\ntest_fuzz.ENDLESS = 2\nwith test_fuzz.guarded(['a case']):\n    {end}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[1])))}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode in (1, -11)
    text = (tmp_path / CASE).read_text()
    assert text.startswith("['a case']")
    assert said in text
