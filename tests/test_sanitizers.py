"""Test the compiled sums under gcc's sanitizers: tools.sanitize runs random calls."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isopos.ops import library
from tools.sanitize import SANITIZERS, runtime

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_random_calls(sanitizer):
    if not library.libraries()[0]:
        pytest.skip(library.libraries()[1])
    if shutil.which("gcc") is None or shutil.which("setarch") is None:
        pytest.skip("it takes gcc, and setarch of util-linux")
    try:
        runtime(sanitizer)
    except OSError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.sanitize", sanitizer, "8"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
