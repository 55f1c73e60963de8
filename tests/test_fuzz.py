"""The tools that attack: fuzzing finds what is wrong and reduces it, mutants change what they say; and a seeded piece."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tools import fuzz, fuzz_commands, fuzz_functions, mutants

ROOT = Path(__file__).parents[1]
TOY = """
import os, signal, sys, time
from tools import fuzz

def run(words):
    if "sleep" in words and "deep" in words:
        time.sleep(100)
    if "segfault" in words:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "wrong" in words and "b" in words:
        raise ArithmeticError(f"{len(words)} is not it")
    return "error" if "clear" in words else "answer"

fuzz.ENDLESS = 8.0
CASES = [["a"], ["clear"], ["b", "a", "wrong"], ["deep", "a", "sleep"], ["c", "segfault"]]
draw = lambda random: random.choice(CASES)
sys.exit(fuzz.fuzz(fuzz.Target("toy", draw, lambda word: iter(()), run), 300, 0, cases=16))
"""


def python(*arguments, timeout=600):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def toy():
    return python("-c", TOY)


@pytest.mark.slow
def test_a_failure_is_reduced_to_a_line_and_counted(toy):
    assert "--case 'b wrong'" in toy.stdout
    assert "ArithmeticError in nowhere: 3 is not it" in toy.stdout
    assert toy.returncode > 0
    assert "toy: 16 cases from 0 on of seed 0: " in toy.stdout
    assert "failures of 3 kinds" in toy.stdout


@pytest.mark.slow
def test_a_crash_and_an_endless_loop_have_their_case(toy):
    assert "crash: SIGSEGV in nowhere" in toy.stdout
    assert "--case segfault" in toy.stdout
    assert "endless: no end after 8 seconds" in toy.stdout
    assert "--case 'deep sleep'" in toy.stdout


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
    assert fuzz_functions.is_clear(ValueError(message)) == clear
    assert not fuzz_functions.is_clear(AttributeError(message))


def test_a_wrong_number_is_seen(monkeypatch):
    right = fuzz_functions.isopos.linear_attention
    assert fuzz_functions.run(["t=9", "scheme=rope"]) == "answer"
    monkeypatch.setattr(fuzz_functions.isopos, "linear_attention", lambda *a, **k: right(*a, **k) * (1 + 1e-3))
    with pytest.raises(fuzz_functions.Wrong, match=r"160 numbers|288 numbers"):
        fuzz_functions.run(["t=9", "scheme=rope"])


def test_a_wrong_gradient_is_seen(monkeypatch):
    right = fuzz_functions.isopos.linear_attention

    def scaled(q, k, v, **options):
        return right(q, k * 1.01 - k.detach() * 0.01, v, **options)

    assert fuzz_functions.run(["t=9", "grad=yes", "dtype=float64"]) == "answer"
    monkeypatch.setattr(fuzz_functions.isopos, "linear_attention", scaled)
    with pytest.raises(fuzz_functions.Wrong, match="the gradient of k is off by"):
        fuzz_functions.run(["t=9", "grad=yes", "dtype=float64"])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_cases_end_with_who_reads_them():
    target = fuzz.Target("x", lambda random: ["a"], lambda word: iter(()), lambda words: "answer")
    child = fuzz.Child(target, ((n, ["a"]) for n in itertools.count()))
    assert next(child.outcomes()) == (0, "answer")
    os.close(child.reader)
    until, ended = time.monotonic() + 20, 0
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
        ended, _ = os.waitpid(child.pid, os.WNOHANG)
    if not ended:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    child.crash.close()
    assert ended


def test_cases_are_those_of_the_seed():
    for module in (fuzz_functions, fuzz_commands):
        target = fuzz.Target("x", module.draw, module.smaller, module.run)
        assert [target.case(1, n) for n in range(20)] == [target.case(1, n) for n in range(20)]
        assert target.case(1, 0) != target.case(2, 0)


def test_mutants_change_what_they_say(tmp_path):
    source = '''
"""Words."""
__all__ = ["f"]


def f(x: int, y: int = 3, *, z=True) -> int:
    """Words."""
    assert x > 0, "words"
    if x < y and not z:
        raise ValueError(f"x: {x + 1}")
    x += 1
    g(x, y)
    return -x * 2.5
'''
    (tmp_path / "m.py").write_text(source)
    found = mutants.mutants(tmp_path, ".")
    said = {(mutant.old, mutant.new) for mutant in found}
    assert said == {
        ("3", "(4)"),
        ("True", "(False)"),
        ("x < y and not z", "(not (x < y and (not z)))"),
        ("x < y and not z", "(x < y or not z)"),
        ("x < y", "(x <= y)"),
        ("not z", "(z)"),
        ('raise ValueError(f"x: {x + 1}")', "pass"),
        ("x += 1", "pass"),
        ("x += 1", "x -= 1"),
        ("1", "(2)"),
        ("g(x, y)", "pass"),
        ("g(x, y)", "(g(y, x))"),
        ("-x * 2.5", "(-x / 2.5)"),
        ("-x", "(x)"),
        ("2.5", "(5.0)"),
    }
    assert {mutant.scope for mutant in found} == {"f"}
    for mutant in found:
        changed = mutant.apply(source.encode()).decode()
        assert changed != source
        compile(changed, "m.py", "exec")


def test_what_no_test_is_to_hold_is_left_alone(tmp_path):
    """The dress of pictures, where there are any, and what cannot matter."""
    lines = "axes.set(xlabel=1)", "axes.plot(x, 2, linewidth=3)", "max(x, y)", "zip(z, strict=True)", "axes.set_ylim(4)"
    (tmp_path / "plain.py").write_text("\n".join(lines))
    (tmp_path / "drawn.py").write_text("\n".join(["from matplotlib.axes import Axes", *lines]))
    found = {name: {m.old for m in mutants.mutants(tmp_path, ".") if m.file == f"{name}.py"} for name in ("plain", "drawn")}
    assert found["drawn"] == {
        "axes.plot(x, 2, linewidth=3)",
        "2",
        "max(x, y)",
        "zip(z, strict=True)",
        "axes.set_ylim(4)",
        "4",
    }
    assert found["plain"] - found["drawn"] == {"axes.set(xlabel=1)", "1", "3"}


def test_drawn_command_lines_keep_to_what_ends():
    for n in range(300):
        words = fuzz_commands.draw(Random(n))
        for flag, value in itertools.pairwise(words):
            assert flag != "--steps" or len(value) < 3 or not value.isdecimal()


@pytest.mark.slow
@pytest.mark.parametrize(("target", "cases"), [("functions", 1200), ("commands", 80), ("folders", 60)])
def test_a_seeded_piece(target, cases):
    ended = python("-m", "tools.fuzz", target, "--seconds", "600", "--cases", str(cases))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{target}: {cases:,} cases" in ended.stdout
