"""What every test starts from: seeded random numbers, one thread, float32 by default."""

import sys

import hypothesis
import pytest
import torch

from isopos import cli

hypothesis.settings.register_profile("isopos", deadline=None, max_examples=20, derandomize=True, database=None)
hypothesis.settings.load_profile("isopos")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_start():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def isopos(monkeypatch, tmp_path, capsys):
    """Runs a command line in an empty folder: exit status, output and error output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["isopos", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run
