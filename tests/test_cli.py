import subprocess
import sys

import pytest

from isopos import cli
from isopos.catalog import CATALOG
from isopos.schemes import REGISTRY


def _run(*arguments):
    code = "import sys; sys.argv[0] = 'isopos'; from isopos.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_list_names_every_scheme_with_its_citation():
    result = _run("list")
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert [line.split()[0] for line in lines] == list(CATALOG) == list(REGISTRY)
    assert all(entry.citation in line for line, entry in zip(lines, CATALOG.values(), strict=True))


@pytest.mark.parametrize("arguments", [[], ["--help"], ["compare", "--help"]])
def test_help_does_not_import_torch(arguments, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    result = _run(*arguments)
    assert result.returncode == 0
    assert "usage: isopos" in result.stdout
    assert " torch" not in result.stderr


@pytest.mark.parametrize("arguments", [["compre"], ["compare", "--step", "x"], ["compare", "--attention", "hard"]])
def test_a_typo_exits_with_2(arguments):
    result = _run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_ctrl_c_before_any_work_exits_with_130(monkeypatch):
    def interrupted(comparison):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_compare", interrupted)
    monkeypatch.setattr(sys, "argv", ["isopos", "compare"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()


OWN = """
import torch
from isopos.encodings import Encoding, Rotary

class Good(Encoding):
    def __init__(self):
        super().__init__()
        self.inner = Rotary(torch.ones(1, 1, 2))
        self.group, self.features, self.out_features = self.inner.group, 4, 4

    def forward(self, x, dtype=torch.float32):
        return self.inner(x, dtype)

class Squared(Good):
    def forward(self, x, dtype=torch.float32):
        return self.inner(x**2, dtype)
"""


def test_check_measures_schemes_and_your_own_encodings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    assert _run("check", "rope:decay=retnet").returncode == 0
    assert _run("check", "mine:Good").returncode == 0
    broken = _run("check", "mine:Squared")
    assert broken.returncode == 1
    assert "relative      BROKEN" in broken.stdout
    assert "shifted by" in broken.stdout
    assert _run("check", "sinusoidal").returncode == 1


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("rop", "did you mean rope"),
        ("rope:bse=1", "did you mean base"),
        ("nowhere:X", "cannot import"),
        ("math:Sin", "sin"),
        ("math:sin", "no arguments"),
        ("math:pi", "float"),
    ],
)
def test_check_names_what_it_does_not_find(subject, message):
    result = _run("check", subject)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
