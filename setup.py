"""The C kernel of linear attention (isopos/ops/linear/cpu), once per instruction set; all else is in pyproject.toml.

The libraries know neither Python nor PyTorch: one wheel per platform serves every Python. They are optional: where there is
no compiler isopos installs and runs without them. CC names another compiler than the first one of COMPILERS that is there,
GCC or Clang. For another platform `make wheel` sets CC and _PYTHON_HOST_PLATFORM.
"""

import glob
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = "isopos/ops/linear/cpu"
FLAGS = {
    "x86_64": {"avx512": ["-mavx512f", "-mavx512vl", "-mfma"], "avx2": ["-mavx2", "-mfma", "-mf16c"], "sse2": []},
    "aarch64": {"neon": []},
}
COMMON = ["-std=gnu11", "-O3", "-fopenmp-simd", "-fwrapv", "-ffp-contract=fast", "-Wno-psabi", "-shared"]
COMPILERS = ("gcc", "cc", "clang")
TARGET = os.environ.get("_PYTHON_HOST_PLATFORM", f"{sys.platform}-{platform.machine()}").lower()
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(TARGET.split("-")[-1], TARGET.split("-")[-1])


def compiler() -> list[str]:
    """The command of a C compiler, empty where there is none."""
    found = shlex.split(os.environ.get("CC", "")) or [name for name in COMPILERS if shutil.which(name)][:1]
    return found if found and shutil.which(found[0]) else []


class Build(build_ext):
    """Libraries by a C compiler alone: those that it refuses are left out."""

    def run(self) -> None:
        if self.extensions and not compiler():
            tried = os.environ.get("CC") or ", ".join(COMPILERS)
            print(f"isopos: no C compiler ({tried}): linear attention on a CPU goes without its compiled kernel")
            self.extensions = []
        super().run()

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        pic = [] if TARGET.startswith("win") else ["-fPIC"]
        try:
            subprocess.run([*compiler(), *COMMON, *pic, *ext.extra_compile_args, *ext.sources, "-o", str(out)], check=True)
        except subprocess.CalledProcessError as error:
            raise CompileError(str(error)) from error

    def get_ext_filename(self, fullname: str) -> str:
        return (
            os.path.join(*fullname.split(".")) + ".so"
        )  # whatever the platform and the Python: ctypes loads it by its path


class Wheel(bdist_wheel):
    """Of this platform and any Python, or of any platform where it holds no library."""

    def get_tag(self) -> tuple[str, str, str]:
        held = any(Path(self.bdist_dir).glob("isopos/ops/_cpu_*.so"))
        return "py3", "none", super().get_tag()[2] if held else "any"


def extension(name: str, flags: list[str]) -> Extension:
    """The library for one instruction set. It is no module: library.py loads it with ctypes."""
    headers = sorted(glob.glob(f"{FOLDER}/*.h"))
    return Extension(
        f"isopos.ops._cpu_{name}", [f"{FOLDER}/kernel.c"], depends=headers, extra_compile_args=flags, optional=True
    )


setup(
    ext_modules=[extension(name, flags) for name, flags in FLAGS.get(MACHINE, {}).items()],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
