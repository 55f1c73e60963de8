"""Test the contents of a release: source distribution, wheel, and one version in all files."""

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import isopos
from isopos.ops import library
from tools import wheels

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone says which files are the project's")
NOT_RELEASED = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")
WRITTEN = r"PKG-INFO|setup\.cfg|MANIFEST\.in|isopos\.egg-info/.*"


def tracked():
    """Files of the project, including new ones."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


def copied(copy):
    """A copy of the project's files."""
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both distributions, built from a copy of the project's files."""
    copy = copied(tmp_path_factory.mktemp("release") / "isopos")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation"], cwd=copy, check=True, capture_output=True)
    return {path.suffix: path for path in (copy / "dist").iterdir()}


@pytest.mark.slow
def test_the_source_distribution_is_the_project(built):
    with tarfile.open(built[".gz"]) as archive:
        held = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    released = {name for name in tracked() if not name.startswith(NOT_RELEASED)}
    assert {name for name in held if not re.fullmatch(WRITTEN, name)} == released - {"MANIFEST.in"}


@pytest.mark.slow
def test_the_wheel_is_the_package(built):
    with zipfile.ZipFile(built[".whl"]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        said = email.message_from_bytes(archive.read(metadata))
    package = {name for name in tracked() if name.startswith("isopos/") and not name.endswith((".c", ".h"))}
    assert held - compiled_of(built[".whl"]).keys() == package
    assert said["Version"] == isopos.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert {"lab", "hf", "peers", "dev", "docs", "tensorboard", "gpu-test", "cluster", "onnx"} == set(
        said.get_all("Provides-Extra")
    )
    labels = {url.split(",")[0] for url in said.get_all("Project-URL")}
    assert labels == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


def compiled_of(wheel):
    """The compiled libraries of a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"isopos/ops/_cpu_\w+\.so", name)]
        return {name: archive.read(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "sets"), [("x86_64", {"avx512", "avx2", "sse2"}), ("aarch64", {"neon"})])
def test_one_wheel_serves_every_python(tmp_path, machine, sets):
    """The wheel contains all instruction sets without references to Python, and runs without a compiler."""
    try:
        wheel = wheels.build(machine, tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    libraries = compiled_of(wheel)
    assert {Path(name).stem for name in libraries} == {f"_cpu_{name}" for name in sets}
    for content in libraries.values():
        assert not re.search(rb"\bPy[A-Z_]|torch|GOMP_|omp_", content)
    assert wheel.stat().st_size < 1.5 * 2**20  # code and libraries: neither data nor results
    if machine != platform.machine():
        return
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel]
    subprocess.run(install, check=True, capture_output=True)
    lines = "import isopos; print(isopos.__file__); print(isopos.laws.check(isopos.rope(8, 2)).broken)"
    alone = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path / "site")}, "text": True}
    said = subprocess.check_output([sys.executable, "-P", "-c", lines], **alone)
    assert said.splitlines() == [str(tmp_path / "site" / "isopos" / "__init__.py"), "[]"]
    for instructions in library.instructions():
        environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": str(tmp_path)}
        if instructions in library.X86:
            environment["ATEN_CPU_CAPABILITY"] = "default" if instructions == library.X86[-1] else instructions.lower()
        command = [sys.executable, "-P", ROOT / "tests/smoke.py", instructions]
        said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
        assert said.startswith(str(tmp_path / "site" / "isopos")), said


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_of_any_platform_and_says_so_once(tmp_path):
    environment = os.environ | {"CC": "no-compiler"}
    copy = copied(tmp_path / "isopos")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).count("isopos: no C compiler (no-compiler)") == 1
    (wheel,) = (copy / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not compiled_of(wheel)


@pytest.mark.slow
def test_a_package_index_would_take_both(built):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *built.values()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_one_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert cited
    assert newest
    assert cited[1] == newest[1] == isopos.__version__


@pytest.mark.slow
def test_the_hooks_of_pre_commit_are_valid():
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"], cwd=ROOT, check=True)
