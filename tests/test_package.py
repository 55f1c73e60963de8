"""What a release would hold: the source distribution, the wheel, and one version everywhere."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import isopos

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone says which files are the project's")
NOT_RELEASED = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")
WRITTEN = r"PKG-INFO|setup\.cfg|MANIFEST\.in|isopos\.egg-info/.*"


def tracked():
    """The project's files, those that are new included."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The two distributions, built of a copy of the project's files."""
    copy = tmp_path_factory.mktemp("release") / "isopos"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
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
    compiled = {name for name in held if re.fullmatch(r"isopos/ops/_cpu_\w+\..*\.so", name)}
    assert held - compiled == package
    assert said["Version"] == isopos.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert {"lab", "hf", "peers", "dev", "docs", "tensorboard", "gpu-test", "cluster", "onnx"} == set(
        said.get_all("Provides-Extra")
    )
    labels = {url.split(",")[0] for url in said.get_all("Project-URL")}
    assert labels == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


@pytest.mark.slow
def test_a_package_index_would_take_both(built):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *built.values()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_works_beside_its_dependencies_alone(built, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path, built[".whl"]]
    subprocess.run(install, check=True, capture_output=True)
    lines = "import isopos; print(isopos.__file__); print(isopos.laws.check(isopos.rope(8, 2)).broken)"
    said = subprocess.check_output(
        [sys.executable, "-P", "-c", lines], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, text=True
    )
    assert said.splitlines() == [str(tmp_path / "isopos" / "__init__.py"), "[]"]


def test_there_is_one_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert cited
    assert newest
    assert cited[1] == newest[1] == isopos.__version__


@pytest.mark.slow
def test_the_hooks_of_pre_commit_are_valid():
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"], cwd=ROOT, check=True)
