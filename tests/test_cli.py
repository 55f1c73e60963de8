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
