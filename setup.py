"""The compiled sums of linear attention (isopos/ops/linear/cpu.c), once per instruction set; all else is in pyproject.toml.

They are optional: without a C compiler, or elsewhere than on Linux and x86-64, isopos installs and runs without them.
"""

import platform
import sys

from setuptools import Extension, setup

FLAGS = {"avx512": ["-mavx512f", "-mavx512vl", "-mfma"], "avx2": ["-mavx2", "-mfma", "-mf16c"]}
COMMON = ["-O3", "-fopenmp"]  # PyTorch's own OpenMP is loaded by then: nothing to link with, and one pool of threads


def extension(name: str) -> Extension:
    """The library for one instruction set. It is no module: library.py loads it with ctypes."""
    return Extension(
        f"isopos.ops._cpu_{name}", ["isopos/ops/linear/cpu.c"], extra_compile_args=COMMON + FLAGS[name], optional=True
    )


served = sys.platform == "linux" and platform.machine() == "x86_64"
setup(ext_modules=[extension(name) for name in FLAGS if served])
