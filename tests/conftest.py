"""Settings of all tests: seeded random numbers, one thread, float32 by default."""

import importlib
import os
import shutil
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from cases import SchemeCase

from isopos import catalog, cli, feature_maps, schemes
from isopos.ops import gpu

hypothesis.settings.register_profile("isopos", deadline=None, max_examples=20, derandomize=True, database=None)
hypothesis.settings.register_profile(
    "fuzz", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "1000")), print_blob=True, derandomize=False
)  # --hypothesis-profile=fuzz: many examples, other ones at each run; those that fail are kept and come first
hypothesis.settings.load_profile("isopos")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=gpu.interpreted())
def _language_patched_once():
    """Patch Triton's language once a launch; its interpreter does so at each call of a device function, half of its time."""
    interpreter, language = pytest.importorskip("triton.runtime.interpreter"), pytest.importorskip("triton.language")
    patch = interpreter._patch_lang

    def patch_once(function):
        visible = [x for x in function.__globals__.values() if x is language or x is language.core]
        is_done = visible and not any(language.core.is_builtin(x.load) for x in visible)
        return interpreter._LangPatchScope() if is_done else patch(function)

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch


def pytest_collection_modifyitems(items):
    """Leave out attention without `causal` for content-dependent phases."""
    items[:] = [item for item in items if not _both_ways_by_steps(getattr(getattr(item, "callspec", None), "params", {}))]


def _both_ways_by_steps(params):
    return params.get("causal") is False and isinstance(case := params.get("case"), SchemeCase) and not case.both_ways


@pytest.fixture(autouse=True)
def _fresh_start():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """Prepare data in a cache of the test."""
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def hf():
    """Transformers, whose import takes seconds."""
    return pytest.importorskip("transformers", minversion="5", reason="needs the extra hf")


@pytest.fixture
def isopos(monkeypatch, tmp_path, capsys):
    """Run a command line in an empty folder; returns exit status, output and error output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["isopos", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


@pytest.fixture
def own(monkeypatch, isopos, tmp_path):
    """Import a file of tests/extension from the working folder, as a user does; it is unregistered afterwards."""
    files = sorted(Path(__file__).parent.glob("extension/toy_*"))
    for file in files:
        shutil.copy(file, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = [(names, dict(names)) for names in (schemes.REGISTRY, catalog.CATALOG, feature_maps.FEATURE_MAPS)]
    yield importlib.import_module
    for names, before in known:
        names.clear()
        names.update(before)
    for file in files:
        sys.modules.pop(file.stem, None)
