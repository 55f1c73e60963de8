"""Mutation: which small changes of isopos/ the tests catch.

    python -m tools.mutate --sample 200 --seed 0         # a random sample; goes on where it was stopped
    python -m tools.mutate --sample 200 --seed 0 --again # its survivors once more, after tests were added
    python -m tools.mutate --only isopos/exact.py        # all mutants of one file

Everything happens in a copy of the tree, under build/mutate. First all tests that are not slow run once there, to note which
functions each of them calls; a mutant is then given to the tests that can reach it, until one fails: the quickest first, and
parameters of one test after other tests. A mutant is caught where a test fails, or takes far longer than before. Results are
a line of JSON a mutant; the table at the end names the survivors. Changed tests are copied and mapped at every start;
changed sources are copied, and the map made anew, by --fresh.
"""

import argparse
import ast
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tools.mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "mutate"
TREE, WHOLE = FOLDER / "tree", FOLDER / "isopos"  # where mutants run, and the sources as they were
MAP = FOLDER / "map.json"
COPIED = ("isopos", "tests", "tools", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")
LIBRARIES = "torch numpy pytest hypothesis rich tyro safetensors matplotlib.pyplot torchmetrics lightning.pytorch"
PYTEST = ("-n0", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
PYTEST += ("--basetemp", str(FOLDER / "tmp"))
HANGS, SLOWER = 30.0, 20.0  # seconds that a test may take at least, and times what it took
WAITS = 4  # seconds that pass count as one of computing
FIRST = 40
TOO_LONG = "not finished"


class Recorder:
    """A plugin of pytest: the functions of isopos that each test calls, and its seconds of computing."""

    def __init__(self) -> None:
        self.tests: dict[str, Any] = {}
        self.codes: set[CodeType] = set()
        self.reads, self.begun = False, 0.0

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        """Notes a function that is called, and whether code of ours reads a signature."""
        self.codes.add(frame.f_code)
        if frame.f_code is signature.__code__ and frame.f_back is not None:
            self.reads |= frame.f_back.f_code.co_filename.startswith(str(TREE))

    def pytest_runtest_logstart(self) -> None:
        """Before a test: what collection called is not its own."""
        self.codes.clear()
        self.reads, self.begun = False, _computed()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """After the set-up, the call and the teardown of each test."""
        row = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "functions": []})
        row["passed"] &= report.passed
        if report.when != "teardown":
            return
        package = str(TREE / "isopos")
        called = {(c.co_filename, c.co_qualname) for c in list(self.codes) if c.co_filename.startswith(package)}
        row["functions"] = sorted(f"{Path(file).relative_to(TREE)}:{name}" for file, name in called)
        row["spawns"] = any(code.co_qualname == "Popen.__init__" for code in list(self.codes))
        row |= {"reads": self.reads, "seconds": _computed() - self.begun}

    def pytest_sessionfinish(self) -> None:
        """Writes the map of the tests that pass, in place of what their files had."""
        files = {test.partition("::")[0] for test in self.tests}
        tests = {test: row for test, row in _map().items() if test.partition("::")[0] not in files}
        tests |= {test: row for test, row in self.tests.items() if row.pop("passed")}
        MAP.write_text(json.dumps(tests), encoding="utf-8")


def _computed() -> float:
    """Seconds of computing until now, in this process and those that it waited for."""
    return sum(os.times()[:4])


class Watched:
    """A plugin of pytest: runs some tests in their order; writes which test runs, and which failed."""

    def __init__(self, tests: Sequence[str], writer: int):
        self.places, self.writer = {test: n for n, test in enumerate(tests)}, writer

    @property
    def files(self) -> list[str]:
        """To be collected whole, much quicker than a test at a time."""
        return sorted({test.partition("::")[0] for test in self.places})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves the tests that are to run."""
        items[:] = sorted((x for x in items if x.nodeid in self.places), key=lambda x: self.places[x.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Before a test."""
        os.write(self.writer, f"test {nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
        """After its parts."""
        if report.failed:
            os.write(self.writer, f"failed {report.nodeid}\n".encode())


def prepare() -> None:
    """Copy the tree, and map the tests to the functions they call."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    TREE.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, TREE / name)
    shutil.copytree(TREE / "isopos", WHOLE)
    _record([])


def renew() -> None:
    """Copy the tests that have changed since, and map them."""
    changed = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        copy = TREE / path.relative_to(ROOT)
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(path, copy)
            changed += [str(path.relative_to(ROOT))] * path.name.startswith("test_")
    if changed:
        _record(changed)


def _record(files: list[str]) -> None:
    """Map the tests of some files, or all."""
    print("mapping the tests to the functions they call: some minutes", flush=True)
    recorder = Recorder()

    def run() -> int:
        threading.settrace(recorder.trace)
        sys.settrace(recorder.trace)
        arguments = [x for x in PYTEST if x != "-x"]
        return _pytest([*arguments, "-m", "not slow and not oracles and not triton", *files], recorder)

    os.waitpid(_child(run, FOLDER / "map.log"), 0)
    print(f"{len(_map())} tests pass; the log is {FOLDER / 'map.log'}", flush=True)


def _map() -> dict[str, dict[str, Any]]:
    """Of each test what `Recorder` found."""
    return json.loads(MAP.read_text(encoding="utf-8")) if MAP.exists() else {}


def _child(run: Callable[[], int], log: Path) -> int:
    """The id of a process, of its own group, that runs in the copy, with all that it imports from there."""
    if pid := os.fork():
        return pid
    status = 99
    try:
        os.setpgrp()
        os.chdir(TREE)
        os.environ["PYTHONPATH"] = str(TREE)
        sys.path[:] = [str(TREE), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "isopos", "tests")]:
            del sys.modules[name]
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        status = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _pytest(arguments: Sequence[str], plugin: object) -> int:
    return int(pytest.main(list(arguments), plugins=[plugin]))


class Bench:
    """Runs the tests that can reach a mutant."""

    def __init__(self, limit: float):
        self.limit = limit
        self.tests = _map()
        self.mentioned = _mentioned(TREE)
        self.of_function: dict[str, set[str]] = {}
        for test, row in self.tests.items():
            for function in row["functions"]:
                self.of_function.setdefault(function, set()).add(test)

    def reaching(self, mutant: Mutant) -> list[str]:
        """The tests that call its function; of what is in none, those that call a function which names it, or its file's.

        Those that start processes come last, for what they may reach there: the command line and the laboratory. So do, for
        defaults, those that read signatures.
        """
        own = f"{mutant.file}:{mutant.scope}"
        found = set(self.of_function.get(own, ())) if mutant.in_function else set()
        if not mutant.in_function:
            inside = {f for f in self.of_function if f.startswith(f"{own}." if mutant.scope else own)}
            wanted = {*mutant.names, mutant.scope.rpartition(".")[2]}
            inside |= {f for f in self.of_function if self.mentioned.get(f, set()) & wanted}
            found |= {test for function in inside for test in self.of_function[function]}
        direct = frozenset(found)
        if mutant.file.startswith(("isopos/lab/", "isopos/cli.py", "isopos/__main__.py")):
            found |= {test for test, row in self.tests.items() if row["spawns"]}
        if mutant.in_function and mutant.names:
            found |= {test for test, row in self.tests.items() if row["reads"]}
        ranks: Counter[str] = Counter()
        order: dict[str, tuple[bool, float]] = {}
        for test in sorted(found, key=lambda test: (self.tests[test]["seconds"], test)):
            ranks[name := test.partition("[")[0]] += 1
            order[test] = test not in direct, self.tests[test]["seconds"] * ranks[name]
        return sorted(order, key=order.__getitem__)

    def run(self, mutant: Mutant) -> dict[str, Any]:
        """What became of a mutant: caught by a test or a limit, survived, or reached by no test."""
        tests, start = self.reaching(mutant), time.monotonic()
        row: dict[str, Any] = {"id": mutant.id, "outcome": "survived" if tests else "no test reaches it", "of": len(tests)}
        path, ran = TREE / mutant.file, 0
        source, times = path.read_bytes(), path.stat()
        path.write_bytes(mutant.apply(source))
        os.utime(path, ns=(times.st_atime_ns, random.randrange(10**18)))  # no bytecode is older and as long
        try:
            for part in filter(None, (tests[:FIRST], tests[FIRST:])):  # the first ones, of few files, are found at once
                why, count = self._outcome(part, self.limit)
                ran += count
                if why:
                    row |= {"outcome": "caught" if why != TOO_LONG else "survived", "by": why}
                    break
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            shutil.rmtree(FOLDER / "tmp", ignore_errors=True)
        return row | {"ran": ran, "seconds": round(time.monotonic() - start, 1)}

    def _outcome(self, tests: list[str], limit: float) -> tuple[str, int]:
        """What stopped these tests, nothing where all pass; and how many ran."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        plugin = Watched(tests, writer)
        pid = _child(lambda: _pytest([*PYTEST, *plugin.files], plugin), FOLDER / "last.log")
        os.close(writer)
        ran, current, failed, text, ended, status = 0, "", "", "", 0, 0
        began, now, begun = time.monotonic(), 0.0, 0.0
        while not ended:
            time.sleep(0.02)
            ended, status = os.waitpid(pid, os.WNOHANG)
            *lines, text = (text + _read(reader)).split("\n")
            for what, _, name in (line.partition(" ") for line in lines):
                if what == "failed":
                    failed = name
                else:
                    ran, current, begun = ran + 1, name, now
            now = now if ended else _spent(pid, began)
            hangs = current and now - begun > max(HANGS, SLOWER * self.tests.get(current, {"seconds": 0})["seconds"])
            if not ended and (hangs or now > max(limit, HANGS)):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(reader)
                return failed or (f"{current} (hangs)" if hangs else TOO_LONG), ran
        os.close(reader)
        code = os.waitstatus_to_exitcode(status)
        return failed or (f"status {code}: {_last_line(FOLDER / 'last.log')}" if code else ""), ran


def _spent(pid: int, began: float) -> float:
    """Seconds of a process: of computing or, where it waits, a share of those that passed, as other work delays it, too."""
    return max(time.clock_gettime(~pid << 3 | 2), (time.monotonic() - began) / WAITS)  # Linux names its clock so


def _read(reader: int) -> str:
    try:
        return os.read(reader, 1 << 16).decode()
    except BlockingIOError:
        return ""


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")


def _mentioned(root: Path) -> dict[str, set[str]]:
    """The names that each function mentions, itself and those inside it included."""
    found: dict[str, set[str]] = {}

    def walk(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            own = scope
            if isinstance(child, ast.FunctionDef):
                own, inside = f"{scope}{child.name}.<locals>.", list(ast.walk(child))
                names = {x.id for x in inside if isinstance(x, ast.Name)}
                found[scope + child.name] = names | {x.attr for x in inside if isinstance(x, ast.Attribute)}
            elif isinstance(child, ast.ClassDef):
                own = f"{scope}{child.name}."
            walk(child, own)

    for path in (root / "isopos").rglob("*.py"):
        walk(ast.parse(path.read_bytes()), f"{path.relative_to(root)}:")
    return found


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Counts, and what was not caught."""
    rows = list(rows)
    left = [row for row in rows if row["outcome"] != "caught"]
    lines = [f"{row['outcome']}: {row['id']}  ({row['ran']} of {row['of']} tests, {row['seconds']} s)" for row in left]
    share = 100 * (1 - len(left) / max(1, len(rows)))
    return "\n".join([*lines, f"{len(rows) - len(left)} of {len(rows)} mutants caught: {share:.1f}%"])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="so many mutants, drawn at random (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--only", help="all mutants of one file instead")
    parser.add_argument("--again", action="store_true", help="survivors run once more")
    parser.add_argument("--fresh", action="store_true", help="copy the tree and map the tests anew")
    parser.add_argument("--limit", type=float, default=240, help="seconds of computing for one mutant (default: 240)")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    for name in LIBRARIES.split():
        importlib.import_module(name)  # once, for all children
    gc.freeze()
    if options.fresh or not MAP.exists():
        prepare()
    shutil.copytree(WHOLE, TREE / "isopos", dirs_exist_ok=True)  # a kill left the last mutant there
    renew()
    every = mutants(TREE, "isopos")
    drawn = [mutant for mutant in every if mutant.file == options.only]
    if not options.only:
        drawn = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    file = FOLDER / "results.jsonl"
    known: dict[str, dict[str, Any]] = {}
    if file.exists():
        known = {row["id"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    bench = Bench(options.limit)
    for n, mutant in enumerate(drawn):
        if mutant.id in known and not (options.again and known[mutant.id]["outcome"] != "caught"):
            continue
        row = known[mutant.id] = bench.run(mutant)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"{n + 1}/{len(drawn)} {row['outcome']} in {row['seconds']} s: {mutant.id}  {row.get('by', '')}", flush=True)
    print(f"\n{len(every)} mutants of isopos/", table(known[m.id] for m in drawn), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
