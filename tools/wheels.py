"""Wheels in dist/, one per Linux that a compiler here builds for: `make wheel`, or python -m tools.wheels [FOLDER].

Each holds the C kernel for every instruction set of its platform. The kernel knows neither Python nor PyTorch: one wheel
serves every Python, and has no module of Python's stable ABI for abi3audit to check. auditwheel checks that it needs no
newer glibc than its name says.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.pages import ROOT

__all__ = ["MACHINES", "build"]

MACHINES = ("x86_64", "aarch64")
GLIBC = "manylinux_2_17"  # that of manylinux2014


def build(machine: str, out: Path) -> Path:
    """The wheel for one machine, in a folder; OSError where this takes a program that is not installed, which it names."""
    compiler = "gcc" if platform.machine() == machine else f"{machine}-linux-gnu-gcc"
    audit = shutil.which("auditwheel", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if audit is None or shutil.which(compiler) is None:
        raise OSError(f"a wheel for {machine} takes {compiler if audit else 'auditwheel'}")
    environment = os.environ | {"CC": compiler, "_PYTHON_HOST_PLATFORM": f"{GLIBC}-{machine}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        (made,) = Path(folder).glob(f"*-py3-none-{GLIBC}_{machine}.whl")
        found = subprocess.run([audit, "show", str(made)], capture_output=True, text=True, check=True).stdout
        if f'"{GLIBC}_{machine}"' not in found:
            raise RuntimeError(f"{made.name}: {found}")
        return Path(shutil.copy(made, out))


def main(folder: str = "dist") -> None:
    """Build what can be built here, and print how large it is."""
    out = Path(folder)
    out.mkdir(exist_ok=True)
    for machine in MACHINES:
        try:
            wheel = build(machine, out)
        except OSError as error:
            print(f"left out: {error}")
        else:
            print(f"{wheel}: {wheel.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
