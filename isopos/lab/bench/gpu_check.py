"""`isopos gpu-check`: whether Triton's kernels are right on this GPU, and how fast they are.

It needs torch and triton alone. Rows (`isopos.lab.bench.gpu_rows`) run in separate processes, each within its seconds: one
that hangs, crashes or leaves the GPU unusable is a failed row, and a new process continues. Each result is a line of
gpu-check.jsonl as soon as it is known, and a later run continues after it. gpu-check.md is the page of the results, and
gpu-passed.json holds what is right, for ISOPOS_TRITON=auto.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isopos.lab.bench import gpu_rows
from isopos.lab.bench.gpu_rows import MACHINE, MARK, GpuRow
from isopos.lab.reports.grids import markdown
from isopos.lab.runs.files import write_json, write_text
from isopos.ops import gpu as gate
from isopos.ops.trust import OPERATIONS, PATH, RESULTS, Passed

DATA, PAGE, PASSED, LOG = "gpu-check.jsonl", "gpu-check.md", "gpu-passed.json", "gpu-check.log"
COMMAND = (sys.executable, "-m", "isopos.lab.bench.gpu_rows")
SAME = ("device", "torch", "triton", "ptxas", "kernels", "small")  # what all rows of a file share
STARTING = 180.0  # seconds in which a process imports torch and finds the GPU
PARALLEL = ("repeat", "accuracy", "decoding", "compile", "memcheck")  # sections that may share the GPU; times may not
Result = dict[str, Any]


class Worker:
    """A process that runs one row after another; it is started again after one that it did not survive.

    Args:
        options: Its options.
        folder: Folder of the log that gets what it prints.
    """

    def __init__(self, options: Sequence[str], folder: Path):
        self.options, self.log = options, folder / LOG
        self.process: subprocess.Popen[str] | None = None
        self.reader = threading.Thread()
        self.results: queue.Queue[Result | None] = queue.Queue()

    def run(self, name: str, seconds: float) -> Result:
        """The result of a row; a failed one if it takes more than its seconds, or ends the process."""
        if self.process is None:
            self._start()
            if (ready := self._next(STARTING)) is None:
                return self._failed(name, "the process does not start")
            assert "ready" in ready
        assert self.process is not None and self.process.stdin is not None  # noqa: PT018
        with contextlib.suppress(OSError):  # it has ended, which the next line finds
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
        found = self._next(seconds)
        if found is None:
            return self._failed(name, f"it is not finished after {seconds:.0f} s")
        if not found.pop("usable", True):
            self.stop()
        return found

    def _start(self) -> None:
        self.results = results = queue.Queue()
        with self.log.open("a", encoding="utf-8") as log:
            self.process = process = subprocess.Popen(
                [*COMMAND, *self.options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # `stop` ends what it has started, too
            )

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as out:
                for line in out:
                    if line.startswith(MARK):
                        results.put(json.loads(line.removeprefix(MARK)))
            results.put(None)

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()

    def _next(self, seconds: float) -> Result | None:
        """The next result, or None after some seconds or at the end of the process."""
        with contextlib.suppress(queue.Empty):
            return self.results.get(timeout=max(0.0, seconds))
        return None

    def _failed(self, name: str, why: str) -> Result:
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            why = f"the process ended with status {self.process.wait(0.5)}; {self.log} has what it said"
        self.stop()
        return {"row": name, "status": "failed", "wrong": why}

    def stop(self) -> None:
        """End the process and its children."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.reader.join()
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):  # a name that it has not read
                self.process.stdin.close()
            self.process = None


class CheckRun:
    """A run of `isopos gpu-check` in a folder.

    Args:
        folder: Its folder, which may have the results of an earlier run.
        options: Options of the processes.
        deadline: The time, as `time.monotonic` has it, after which nothing is started or waited for.
    """

    def __init__(self, folder: Path, options: Sequence[str], deadline: float):
        self.folder, self.options, self.deadline = folder, options, deadline
        self.results, self.lock, self.workers = read(folder / DATA), threading.Lock(), list[Worker]()

    def add(self, result: Result) -> None:
        """Keep a result, as a line of the file first."""
        with self.lock:
            with (self.folder / DATA).open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.results[result["row"]] = result
            print(f"{result['status']:8}  {result['row']}{_aside(result)}", flush=True)

    def identify(self) -> None:
        """Add the row of the machine, or compare it with that of the file.

        Raises:
            ValueError: If the rows of the file are of another machine, of other versions or kernels, or if none answers.
        """
        worker = Worker(self.options, self.folder)
        self.workers.append(worker)
        found, known = worker.run(MACHINE, STARTING), self.results.get(MACHINE)
        if found["status"] == "failed":
            raise ValueError(f"gpu-check: expected a GPU that answers, got: {found['wrong']}")
        if known is None:
            self.add(found)
            return
        for name in SAME:
            if known.get(name) != found.get(name):
                raise ValueError(
                    f"out: expected rows of {name} {found.get(name)!r} in {self.folder / DATA}, got {known.get(name)!r}; "
                    "choose another folder"
                )

    def run(self, rows: Sequence[GpuRow], jobs: int) -> None:
        """Run rows in several processes, in order, until the deadline. Rows that it cuts are left for a later run."""
        pending = [row for row in rows if row.name not in self.results]
        self.workers += [Worker(self.options, self.folder) for _ in range(min(jobs, len(pending)) - len(self.workers))]

        def serve(worker: Worker) -> None:
            while pending and (left := self.deadline - time.monotonic()) > 0:
                with self.lock:
                    if not pending:
                        return
                    row = pending.pop(0)
                found = worker.run(row.name, min(row.seconds, left))
                if found["status"] == "failed" and time.monotonic() >= self.deadline:
                    return
                self.add(found)

        threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in self.workers[:jobs]]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # a wait without an end would not hear Ctrl-C
                thread.join(0.2)

    def stop(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.stop()


def read(path: Path) -> dict[str, Result]:
    """The results of a file by row, in order; a last line that an interruption has cut is removed from the file.

    Raises:
        ValueError: If another line is none of `isopos gpu-check`.
    """
    if not path.exists():
        return {}
    text, found, whole = path.read_text(encoding="utf-8"), {}, 0
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            result = json.loads(line)
            found[result["row"]] = {"status": result["status"]} | result
        except (ValueError, KeyError, TypeError):
            if number < len(lines) or line.endswith("\n"):
                raise ValueError(f"{path}: expected a row of gpu-check in line {number}; remove the line") from None
            break
        if not line.endswith("\n"):
            break
        whole += len(line.encode())
    if whole < len(text.encode()):
        found = dict(list(found.items())[: text.count("\n")])
        os.truncate(path, whole)
    return found


def _aside(result: Mapping[str, Any]) -> str:
    """What a line of the output says after the row."""
    if said := result.get("wrong") or result.get("absent"):
        return f": {said}"
    if errors := result.get("errors"):
        return f": largest error {max(errors.values()):.1e}"
    ratios = [f"{each['ratio']['median']:.2f}" for each in result.get("races", ()) if each["ratio"]]
    return f": {', '.join(ratios)}" if ratios else ""


def passed(results: Mapping[str, Result], rows: Mapping[str, GpuRow]) -> list[Passed]:
    """What is right by all rows of an operation and a dtype: none is left, none has failed, and both kinds have passed.

    Sections that concern all operations must not have failed. On a GPU, small sizes prove nothing.
    """
    machine = results.get(MACHINE, {})
    versions = [machine.get(name, "") for name in ("triton", "ptxas")]
    if (machine.get("small") and machine.get("ptxas")) or any(
        results.get(row.name, {}).get("status") == "failed" for row in rows.values() if row.section == "memcheck"
    ):
        return []
    found = []
    for dtype in gpu_rows.DTYPES:
        for operation in OPERATIONS:
            own = [row for row in rows.values() if (row.operation, row.dtype) == (operation, dtype)]
            states = {(row.section == "repeat", results.get(row.name, {}).get("status")) for row in own}
            if {status for _, status in states} <= {"passed", "absent"} and {(True, "passed"), (False, "passed")} <= states:
                found.append(Passed(machine["device"], dtype, versions[0], versions[1], operation))
    return found


def write(folder: Path, results: Mapping[str, Result], rows: Mapping[str, GpuRow]) -> list[Passed]:
    """Write the page and the file for ISOPOS_TRITON=auto; what has passed."""
    proven = passed(results, rows)
    kernels = results.get(MACHINE, {}).get("kernels", "")
    content = {"kernels": kernels, "passed": [one._asdict() for one in proven]}
    write_json(folder / PASSED, content)
    write_text(folder / PAGE, page(results, rows))
    return proven


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g} ms"


def page(results: Mapping[str, Result], rows: Mapping[str, GpuRow]) -> str:
    """The results as a page in Markdown."""
    machine = results.get(MACHINE, {})
    about = ", ".join(f"{name} {machine[name]}" for name in machine if name not in ("row", "status", "usable", "seconds"))
    done = {name: row for name, row in results.items() if name != MACHINE}
    counts = {status: sum(row["status"] == status for row in done.values()) for status in ("passed", "failed", "measured")}
    left = [name for name in rows if name not in results]
    title = f"# GPU check: {machine.get('device', 'no machine')}"
    lines = [title, "", "Written by `isopos gpu-check`.", "", f"**Machine.** {about}.", ""]
    lines += [f"{', '.join(f'{count} {status}' for status, count in counts.items())}, {len(left)} left.", ""]
    checks = [row for row in done.values() if "races" not in row]
    cells = [(row["row"], row["status"], _aside(row).removeprefix(": ")) for row in checks]
    table = [markdown(("row", "status", "largest error, or what is wrong"), cells), ""] if cells else []
    lines += ["## Checks", "", *table, "## Times", ""]
    cells = []
    for race in (race for row in done.values() for race in row.get("races", ())):
        times = _milliseconds(race["seconds"]), _milliseconds(race["baseline seconds"])
        ratio = race["ratio"] and f"{race['ratio']['median']:.3g}x {'time' if race['cost'] else 'speed'}"
        cells.append(
            (race["workload"], race["baseline"], *times, ratio or race["note"], race["goal"] or "", race["verdict"])
        )
    titles = ("workload", "compared with", "ours", "baseline", "ratio", "goal", "verdict")
    lines += [markdown(titles, cells), ""] if cells else []
    lines += ["## Rows that are left", "", *(f"- {name}" for name in left), ""] if left else []
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run `isopos gpu-check` with these arguments; the exit status, 1 if a row has failed.

    Raises:
        ValueError: Without a GPU, for rows of another machine, or for options that mean nothing.
    """
    parser = argparse.ArgumentParser(
        prog="isopos gpu-check", description="Check Triton's kernels on this GPU, then measure them; needs torch and triton."
    )
    parser.add_argument("--out", required=True, help="folder of the results; rows that it has are not run again")
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which a later run continues (default 9)")
    parser.add_argument("--only", nargs="+", default=[""], help="run only rows whose names contain one of these texts")
    parser.add_argument("--jobs", type=int, default=min(6, max(1, (os.cpu_count() or 2) // 2)), help="processes of checks")
    parser.add_argument("--small", action="store_true", help="small sizes, which Triton's interpreter on a CPU can run")
    given = parser.parse_args(arguments)
    if not 0 < given.minutes < 1e4 or given.jobs < 1:
        raise ValueError(f"minutes and jobs: expected at least one job and some minutes, got {given.jobs}, {given.minutes}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (gate.interpreted() and given.small):
        raise ValueError("gpu-check: expected a GPU, or TRITON_INTERPRET=1 with --small, got a machine without one")
    rows = {name: row for name, row in gpu_rows.all_rows().items() if any(text in name for text in given.only)}
    if not rows:
        raise ValueError(f"only: expected a part of a row's name, such as accuracy, got {' '.join(given.only)!r}")
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * given.minutes
    check = CheckRun(folder, ["--device", device, *["--small"] * given.small], deadline)
    try:
        check.identify()
        check.run([row for row in rows.values() if row.section in PARALLEL], given.jobs)
        check.run([row for row in rows.values() if row.section not in PARALLEL], 1)
    finally:
        check.stop()
        proven = write(folder, check.results, gpu_rows.all_rows())
    return _end(folder, check.results, rows, proven)


def _end(folder: Path, results: Mapping[str, Result], rows: Mapping[str, GpuRow], proven: Sequence[Passed]) -> int:
    """Print what is left, what has failed and how to switch the kernels on; the exit status."""
    failed = [name for name, row in results.items() if row["status"] == "failed"]
    left = [name for name in rows if name not in results]
    print(f"wrote {folder / DATA}, {folder / PAGE} and {folder / PASSED}")
    if left:
        print(f"{len(left)} rows are left: the same command continues with {left[0]}")
    if failed:
        print(f"{len(failed)} rows failed")
    if proven:
        path = results[MACHINE].get("ptxas path")
        before = f"{PATH}={path} " if path else ""
        print(f"{', '.join(f'{one.operation} in {one.dtype}' for one in proven)} passed; to use Triton's kernels for these:")
        print(f"{before}{gate.SWITCH}=auto {RESULTS}={(folder / PASSED).absolute()}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
