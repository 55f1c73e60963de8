"""Fuzzing: random cases for as long as asked; each must end in a right answer or in one clear error.

    python -m tools.fuzz                                     # a minute of each target
    python -m tools.fuzz functions --seconds 600 --seed 3    # attention against its definition in float64
    python -m tools.fuzz commands --seconds 600              # the command line
    python -m tools.fuzz folders --seconds 600               # damaged run folders
    python -m tools.fuzz functions --case 't=100 odd=positions:meta'

The cases of a seed are the same everywhere. They run in a process of their own that says which one it begins, so that a
crash or an endless loop has a case as well. A failure is reduced to the fewest words that fail alike, and printed as a line
that runs it; of failures that are alike the first is. The exit status is 1 where there is any.
"""

import argparse
import collections
import faulthandler
import importlib
import os
import re
import resource
import select
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

__all__ = ["Target", "fuzz", "main", "reduce"]

TARGETS = ("functions", "commands", "folders")
ENDLESS = 60.0  # seconds after which a case counts as one that never ends
MEMORY = 4 << 30  # bytes that a process of cases may take
OURS = re.compile(r"(isopos|tools)/[\w/]+\.py$")


class Target(NamedTuple):
    """What is fuzzed: a module `tools.fuzz_NAME` has these functions.

    Attributes:
        draw: The words of a random case.
        smaller: Simpler words in the place of one.
        run: What comes of a case, "answer" or "error"; raises anything where neither is right.
    """

    name: str
    draw: Callable[[Random], list[str]]
    smaller: Callable[[str], Iterator[str]]
    run: Callable[[Sequence[str]], str]

    @classmethod
    def named(cls, name: str) -> "Target":
        """The target of a module."""
        module: Any = importlib.import_module(f"tools.fuzz_{name}")
        module.prepare()
        return cls(name, module.draw, module.smaller, module.run)

    def case(self, seed: int, n: int) -> list[str]:
        """The words of case n of a seed."""
        return self.draw(Random(f"{self.name} {seed} {n}"))

    def attempt(self, words: Sequence[str]) -> str:
        """What comes of a case: "answer", "error", or the failure: its kind, its text, and the line of ours it is from."""
        try:
            return self.run(words)
        except BaseException as error:
            frames = [(OURS.search(frame.filename), frame.name) for frame in traceback.extract_tb(error.__traceback__)[1:]]
            place = [f"{file[0]}:{name}" for file, name in frames if file] or ["nowhere"]
            return f"{type(error).__name__} in {place[-1]}: {' '.join(str(error).split())[:300]}"


class Child:
    """A process that runs cases, and what it says of them: lines of a number and an outcome, the first without one."""

    def __init__(self, target: Target, cases: Iterator[tuple[int, Sequence[str]]]):
        self.crash = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the child
        self.reader, writer = os.pipe()
        self.text, self.current = "", -1
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            os.close(self.reader)  # so that writing fails once nobody reads: where the parent was killed, cases end, too
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            os.dup2(self.crash.fileno(), 2)
            faulthandler.enable()
            for n, words in cases:
                os.write(writer, f"{n}\n".encode())
                os.write(writer, f"{n} {target.attempt(words)}\n".encode())
        finally:
            os._exit(0)

    def outcomes(self, until: float = float("inf")) -> Iterator[tuple[int, str]]:
        """The number of each case and what came of it, until the process ends; it is ended when the time has come."""
        begun, late = time.monotonic(), False
        while not late:
            limit = min(begun + ENDLESS, until)
            late = not select.select([self.reader], [], [], max(0.0, limit - time.monotonic()))[0]
            read = b"" if late else os.read(self.reader, 1 << 16)
            *lines, self.text = (self.text + read.decode()).split("\n")
            for line in lines:
                number, _, outcome = line.partition(" ")
                self.current, begun = -1 if outcome else int(number), time.monotonic()
                if outcome:
                    yield int(number), outcome
            if not read and not late:
                break
        status = self.end(late)
        if self.current >= 0 and time.monotonic() < until:
            yield self.current, f"endless: no end after {ENDLESS:.0f} seconds" if late else status

    def end(self, kill: bool) -> str:
        """Wait for its end, and say what it was."""
        if kill:
            os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.reader)
        self.crash.seek(0)
        text = self.crash.read().decode(errors="replace").rpartition("Fatal Python error")[2]
        found = re.search(r'File ".*?/(isopos/[\w/]+\.py)", line \d+ in (\w+)', text)
        self.crash.close()
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"crash: {name} in {':'.join(found.groups()) if found else 'nowhere'}"


def reduce(target: Target, words: Sequence[str], like: str, seconds: float = 20) -> list[str]:
    """The fewest and simplest words that fail alike, as far as they are found in time."""
    words, until = list(words), time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        candidates = [words[:n] + words[n + 1 :] for n in range(len(words))]
        candidates += [[*words[:n], one, *words[n + 1 :]] for n, word in enumerate(words) for one in target.smaller(word)]
        for other in candidates:
            if time.monotonic() < until and alike(_once(target, other)) == alike(like):
                words, progress = other, True
                break
    return words


def alike(outcome: str) -> str:
    """What failures that count as one have in common: their kind, where they come from, and their text without numbers."""
    kind, _, text = outcome.partition(": ")
    return kind + re.sub(r"\d[\d.,e+-]*|nan|inf", "", text)[:40]


def _once(target: Target, words: Sequence[str]) -> str:
    return dict(Child(target, iter([(0, words)])).outcomes()).get(0, "nothing")


def fuzz(target: Target, seconds: float, seed: int, first: int = 0, cases: int = 1 << 62) -> int:
    """Run cases of a seed for some seconds; print each failure and, at the end, the counts. The number of failures."""
    counts, known = collections.Counter[str](), collections.Counter[str]()
    until, n = time.monotonic() + seconds, first
    while time.monotonic() < until and n < first + cases:
        child = Child(target, ((m, target.case(seed, m)) for m in range(n, first + cases)))
        for number, outcome in child.outcomes(until):
            n = number + 1
            counts[outcome if outcome in ("answer", "error") else "failure"] += 1
            if outcome in ("answer", "error"):
                continue
            known[alike(outcome)] += 1
            if known[alike(outcome)] == 1:
                words = reduce(target, target.case(seed, number), outcome)
                print(f"{target.name}: seed {seed}, case {number}: {outcome}")
                print(f"    python -m tools.fuzz {target.name} --case {shlex.quote(shlex.join(words))}", flush=True)
        n = max(n, child.current + 1)
    for failure, times in known.most_common():
        print(f"{times:7,} times {failure}")
    total = sum(counts.values())
    print(
        f"{target.name}: {total:,} cases from {first} on of seed {seed}: {counts['answer']:,} right answers, "
        f"{counts['error']:,} clear errors, {counts['failure']:,} failures of {len(known)} kinds",
        flush=True,
    )
    return counts["failure"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS, help="one of them; all by default")
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="the first case (default: 0)")
    parser.add_argument("--cases", type=int, default=1 << 62, help="at most so many (default: as the time allows)")
    parser.add_argument("--case", help="run this one alone, in this process")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    if options.case is not None:
        print(Target.named(options.target).run(shlex.split(options.case)))
        return 0
    targets = [options.target] if options.target else TARGETS
    which = options.seconds, options.seed, options.first, options.cases
    return int(sum(fuzz(Target.named(name), *which) for name in targets) > 0)


if __name__ == "__main__":
    sys.exit(main())
