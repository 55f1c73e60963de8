"""The tests on the versions of Python and PyTorch that isopos claims: `make test-versions`. docs/versions.md has its table.

    python tools/versions.py [PYTHON=TORCH ...]

Without arguments the lowest versions that pyproject.toml accepts, and the newest at hand: `3.11=lowest 3.13=newest`. Each
pair is an environment of its own in .versions, several gigabytes, removed after use. What else is installed is the lowest,
too, for `lowest`, and the newest for `newest` and for a version of torch.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

__all__ = ["floors", "main"]

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".versions"
ROOM = 10**10  # bytes that an environment takes while it is installed, about
TESTS = (
    "-m",
    "pytest",
    "-n",
    "2",
    "--dist",
    "worksteal",
    "-m",
    "not slow and not oracles and not triton",
    "-p",
    "no:cacheprovider",
)


class Row(NamedTuple):
    """What one pair of versions gave."""

    python: str
    torch: str
    others: str
    passed: int
    failed: int
    skipped: int


def floors() -> tuple[str, dict[str, str]]:
    """The lowest Python that pyproject.toml accepts, and the lowest versions of what the tests need, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in (*project["dependencies"], *extras["lab"], *extras["dev"]))
    return project["requires-python"].removeprefix(">="), {found[1]: found[2] for found in needed if found}


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _interpreters(lowest: str) -> dict[str, Path]:
    """Those that can make an environment, from the lowest on: on the path, of pyenv and of uv; by versions as 3.11."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    for place in (".pyenv/versions/*/bin", ".local/share/uv/python/*/bin"):
        folders += sorted(Path.home().glob(place))
    found: dict[str, Path] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("python3.*"))):
        version = file.name.removeprefix("python")
        if not re.fullmatch(r"3\.\d+", version) or version in found or _order(version) < _order(lowest):
            continue
        if subprocess.run([file, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0:
            found[version] = file
    return {version: found[version] for version in sorted(found, key=_order)}


def _measure(interpreter: Path, torch: str, home: Path) -> Row:
    """Install and test; CalledProcessError where there is no such torch for this Python."""
    subprocess.run([interpreter, "-m", "venv", home], check=True)
    python, report = home / "bin" / "python", HOME / f"{home.name}.xml"
    index = ("--extra-index-url", url) if (url := os.environ.get("TORCH_INDEX")) else ()
    pins = floors()[1] if torch == "lowest" else {} if torch == "newest" else {"torch": torch}
    wanted = [f"{name}=={version}" for name, version in pins.items()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *index, *wanted, "-e", ".[lab,dev]"], cwd=ROOT, check=True)
    ask = "import platform, torch; print(platform.python_version(), torch.__version__.split('+')[0])"
    version, built = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    others = "lowest" if torch == "lowest" else "newest"
    print(f"isopos: Python {version}, torch {built}, all else {others}", flush=True)
    report.unlink(missing_ok=True)
    subprocess.run([python, *TESTS, f"--junitxml={report}"], cwd=ROOT, check=False)
    if not report.exists():
        return Row(version, built, others, 0, 1, 0)  # pytest, which could not start, has said why
    suite = ElementTree.parse(report).getroot()[0]
    tests, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    return Row(version, built, others, tests - failures - errors - skipped, failures + errors, skipped)


def _rows(pairs: Sequence[str], interpreters: dict[str, Path]) -> Iterator[Row]:
    for pair in pairs:
        version, torch = pair.split("=")
        if version not in interpreters:
            raise SystemExit(f"isopos: expected one of Python {', '.join(interpreters)}, which are at hand, got {version}")
        HOME.mkdir(exist_ok=True)
        if shutil.disk_usage(HOME).free < ROOM:
            raise SystemExit(f"isopos: expected {ROOM // 10**9} GB free for an environment in {HOME}; make room")
        home = HOME / f"python{version}-torch{torch}"
        shutil.rmtree(home, ignore_errors=True)  # of a run that was killed
        try:
            yield _measure(interpreters[version], torch, home)
        except subprocess.CalledProcessError as error:
            print(f"isopos: Python {version} with torch {torch} is left out: {error}", file=sys.stderr)
        finally:
            shutil.rmtree(home, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 where a test failed or nothing was tested."""
    lowest, _ = floors()
    interpreters = _interpreters(lowest)
    served = list(interpreters)
    if not served:
        raise SystemExit(f"isopos: expected Python {lowest} or newer on the path, of pyenv or uv, with venv and ensurepip")
    if served[0] != lowest:
        print(f"isopos: Python {lowest} is not at hand; the lowest is {served[0]}", file=sys.stderr)
    rows = list(_rows(arguments or (f"{served[0]}=lowest", f"{served[-1]}=newest"), interpreters))
    print("\n| Python | torch | all else | passed | failed | skipped |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    return int(not rows or any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
