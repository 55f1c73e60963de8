"""The tests on the versions of Python and PyTorch that isopos claims: `make test-versions`. docs/versions.md has its table.

    nox -l                                         # the pairs
    VERSIONS="3.12=2.13 3.13=newest" nox           # others: PYTHON=TORCH

Without VERSIONS the lowest versions that pyproject.toml accepts, and the newest at hand. Each pair is an environment of its
own in .versions, several gigabytes, removed after use. What else is installed is the lowest, too, for `lowest`, and the
newest for `newest` and for a version of torch. TORCH_INDEX names another index of PyTorch's builds.
"""

import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import nox

ROOM = 10**10  # bytes that an environment takes while it is installed, about
TESTS = ("-n", "2", "--dist", "worksteal", "-m", "not slow and not oracles and not triton", "-p", "no:cacheprovider")
PROJECT = nox.project.load_toml("pyproject.toml")["project"]
HOME = Path(".versions").resolve()
nox.needs_version = ">=2025"
nox.options.envdir = str(HOME)
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True


def lowest() -> tuple[str, dict[str, str]]:
    """The lowest Python that pyproject.toml accepts, and the lowest versions of what the tests need, by name."""
    extras = PROJECT["optional-dependencies"]
    needed = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in (*PROJECT["dependencies"], *extras["lab"], *extras["dev"]))
    return PROJECT["requires-python"].removeprefix(">="), {found[1]: found[2] for found in needed if found}


def interpreters() -> list[str]:
    """Versions at hand, as 3.11, from the lowest that isopos accepts on: on the path, of pyenv and of uv."""
    homes = [
        folder for kind in (".pyenv/versions/*/bin", ".local/share/uv/python/*/bin") for folder in Path.home().glob(kind)
    ]
    folders = [Path(folder) for folder in os.get_exec_path() if Path(folder).name != "shims"]  # those run what pyenv chose
    os.environ["PATH"] = os.pathsep.join(map(str, folders + homes))  # where nox looks
    names = {file.name for folder in folders + homes for file in folder.glob("python3.*")}
    minors = {int(found[1]) for name in names if (found := re.fullmatch(r"python3\.(\d+)", name))}
    return [f"3.{minor}" for minor in sorted(minors) if minor >= int(lowest()[0].partition(".")[2])]


AT_HAND = interpreters() or [lowest()[0]]
PAIRS = os.environ.get("VERSIONS", "").split() or [f"{AT_HAND[0]}=lowest", f"{AT_HAND[-1]}=newest"]


@nox.session
@nox.parametrize("python,torch", [tuple(pair.split("=")) for pair in PAIRS], ids=PAIRS)
def versions(session: nox.Session, torch: str) -> None:
    """The tests that are not slow, on one version of Python and one of PyTorch."""
    HOME.mkdir(exist_ok=True)
    if shutil.disk_usage(HOME).free < ROOM:
        session.error(f"expected {ROOM // 10**9} GB free for an environment in {HOME}; make room")
    pins = {"lowest": lowest()[1], "newest": {}}.get(torch, {"torch": torch})
    index = ("--extra-index-url", url) if (url := os.environ.get("TORCH_INDEX")) else ()
    try:
        try:
            session.install(*index, *(f"{name}=={version}" for name, version in pins.items()), "-e", ".[lab,dev]")
        except nox.command.CommandFailed:
            session.error(f"torch {torch} and what the tests need cannot be installed for this Python; pip says why above")
        ask = "import platform, torch; print(platform.python_version(), torch.__version__.split('+')[0], sep=' | ')"
        found = session.run("python", "-c", ask, silent=True)
        report = Path(session.create_tmp()) / "tests.xml"
        session.run("python", "-m", "pytest", *TESTS, f"--junitxml={report}", *session.posargs, success_codes=[0, 1])
        suite = ElementTree.parse(report).getroot()[0]
        tests, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
        failed = failures + errors
        others = "lowest" if torch == "lowest" else "newest"
        print(f"| {str(found).strip()} | {others} | {tests - failed - skipped} | {failed} | {skipped} |")
        if failed or not tests:
            session.error(f"{failed} of {tests} tests failed")
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
