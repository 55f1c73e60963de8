"""The C kernel of linear attention (isopos/ops/linear/cpu), once per instruction set; all else is in pyproject.toml.

They are optional: without a C compiler, or elsewhere than on Linux and x86-64, isopos installs and runs without them.
"""

import glob
import platform
import sys

from setuptools import Extension, setup

FOLDER = "isopos/ops/linear/cpu"
HEADERS = sorted(glob.glob(f"{FOLDER}/*.h"))
FLAGS = {"avx512": ["-mavx512f", "-mavx512vl", "-mfma"], "avx2": ["-mavx2", "-mfma", "-mf16c"]}
COMMON = ["-O3", "-fopenmp"]  # PyTorch's own OpenMP is loaded by then: nothing to link with, and one pool of threads


def extension(name: str) -> Extension:
    """The library for one instruction set. It is no module: library.py loads it with ctypes."""
    sources, flags = [f"{FOLDER}/kernel.c"], COMMON + FLAGS[name]
    return Extension(f"isopos.ops._cpu_{name}", sources, depends=HEADERS, extra_compile_args=flags, optional=True)


served = sys.platform == "linux" and platform.machine() == "x86_64"
setup(ext_modules=[extension(name) for name in FLAGS if served])
