"""Where Triton's kernels may run: compilers that they trust, and GPUs on which `isopos gpu-check` has passed.

Versions of NVIDIA's assembler ptxas are known to compile wrong code for Hopper (sm_90). In kernels of flash-linear-attention
12.8 gives wrong sums and 13.0 writes outside shared memory, while 13.1 passes (fla-org/flash-linear-attention#1262, #640).
12.9 overwrites operands that a product still reads from registers, which 13.4 does not; NVIDIA names the repair in the notes
of 13.3 (triton-lang/triton#11781). Products of our kernels on sm_90 read such operands. Triton assembles for Hopper by the
ptxas that it comes with, 12.8 in versions 3.6 and 3.7; TRITON_PTXAS_PATH in the environment names another one. On an H100
`isopos gpu-check` has found nothing wrong with 12.8, for the operations and dtypes of `PASSED`.
"""

import ast
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import tokenize
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

TRITON = ("3.6", "3.7")  # versions of Triton with which the kernels compile and are interpreted
PTXAS = (13, 3)  # the first ptxas without a known fault for sm_90 that concerns the kernels
NEWER = (13, 1)  # the first one that is better for sm_90 than the versions in use by Triton there
HOPPER = 9  # first number of its compute capability
PATH, RESULTS = "TRITON_PTXAS_PATH", "ISOPOS_GPU_CHECK"  # environment variables: another ptxas, the file of results
OPERATIONS = ("attention", "rotation", "step")
KERNELS = ("triton_rotate.py", "linear/triton*.py")  # files with kernels and the arguments of their launches


class Passed(NamedTuple):
    """What `isopos gpu-check` has found right."""

    device: str  # name of the GPU
    dtype: str  # dtype of queries, keys and values, or of rotated features: "bfloat16", "float32"
    triton: str  # version of Triton
    ptxas: str  # version of the assembler
    operation: str  # one of `OPERATIONS`


CHECKED = "1fd88d6a370e"  # the kernels that `PASSED` is about: other ones have to be checked again
PASSED = frozenset(  # where they are on by default: docs/gpu.md has the results
    Passed("NVIDIA H100 80GB HBM3", dtype, triton, "12.8", operation)
    for dtype, triton, operation in itertools.product(("bfloat16", "float32"), ("3.6.0", "3.7.1"), OPERATIONS)
)


def triton_version() -> str:
    """Version of Triton, or "" without it."""
    try:
        import triton  # pyright: ignore[reportMissingImports]
    except Exception:  # absent, or not Triton or broken: then kernels are off
        return ""
    return getattr(triton, "__version__", "")


@cache
def ptxas(path: str = "") -> str:
    """Version of an assembler, by default of the one that Triton uses before Blackwell; "" if it cannot be run."""
    try:
        if not path:
            from triton import knobs  # pyright: ignore[reportMissingImports]

            path = os.environ.get(PATH) or knobs.nvidia.ptxas.path
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except Exception:  # Triton without NVIDIA's tools, or a file that is no program
        return ""
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else ""


def newest_ptxas() -> str:
    """File of the newest assembler of Triton and of CUDA toolkits on this machine, or "" if it is older than 13.1."""
    triton = find_spec("triton")
    if triton is None or not triton.origin:
        return ""
    home = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
    toolkits = [*Path("/usr/local").glob("cuda*/bin/ptxas"), shutil.which("ptxas") or ""]
    files = [str(file) for file in (*sorted(home.glob("ptxas*")), *toolkits) if str(file)]
    newest = max(files, key=lambda file: numbers(ptxas(file)), default="")
    return newest if newest and numbers(ptxas(newest)) >= NEWER else ""


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    Examples:
        >>> numbers("3.7.1"), numbers("13.1"), numbers("")
        ((3, 7), (13, 1), ())
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def untrusted(triton: str, assembler: str, generation: int) -> str:
    """Why no kernel should be compiled by these versions for GPUs of a generation, or "".

    Args:
        generation: First number of the compute capability.

    Examples:
        >>> untrusted("3.7.1", "13.4", 9), untrusted("3.7.1", "12.8", 8)
        ('', '')
        >>> print(untrusted("3.8.0", "13.4", 9))
        its kernels are made for Triton 3.6 and 3.7, not for 3.8.0
    """
    if ".".join(map(str, numbers(triton))) not in TRITON:
        return f"its kernels are made for Triton {' and '.join(TRITON)}, not for {triton}"
    if generation == HOPPER and numbers(assembler) < PTXAS:
        least, known = ".".join(map(str, PTXAS)), assembler or "unknown"
        return (
            f"ptxas before {least} is known to compile wrong code for sm_90, and Triton uses {known}; {PATH} names another "
            "one, and `isopos gpu-check` finds out whether this one does"
        )
    return ""


@cache
def kernels_fingerprint() -> str:
    """Twelve digits that change with the code of the kernels, to which results belong; comments are not code."""
    home = Path(__file__).parent
    files = sorted(file for pattern in KERNELS for file in home.glob(pattern))
    return hashlib.sha256("\n".join(code(file.read_text(encoding="utf-8")) for file in files).encode()).hexdigest()[:12]


def code(source: str) -> str:
    r"""A Python source without its comments, docstrings and empty lines.

    Examples:
        >>> code("x = 1  # one\n\n# two\ny = '# 2'\n")
        "x = 1\ny = '# 2'"
    """
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    cut = [line.encode() for line in lines]  # columns of `ast` count bytes
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text: Any = node.body[0]
            first, last = text.lineno - 1, text.end_lineno - 1
            rest = cut[last][text.end_col_offset :]
            cut[first : last + 1] = [cut[first][: text.col_offset] + rest, *[b""] * (last - first)]
    return "\n".join(line.decode().rstrip() for line in cut if line.strip())


def results_file() -> Path:
    """The file of results on this machine: ISOPOS_GPU_CHECK in the environment, or ~/.config/isopos/gpu-passed.json."""
    file = os.environ.get(RESULTS)
    return Path(file) if file else Path.home() / ".config" / "isopos" / "gpu-passed.json"


@cache
def recorded(path: Path) -> tuple[frozenset[Passed], str]:
    """What a file of results has found right, or nothing and the reason."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        kernels, rows = content["kernels"], frozenset(Passed(**row) for row in content["passed"])
    except FileNotFoundError:
        return frozenset(), f"there is no {path}, which `isopos gpu-check` writes"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return frozenset(), f"{path} is no file of `isopos gpu-check`: {type(error).__name__}: {error}"
    if kernels != kernels_fingerprint():
        return frozenset(), f"{path} is about other kernels; run `isopos gpu-check` again"
    return rows, ""


@cache
def device_name(device: torch.device) -> str:
    """Name of a device in results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"


@cache
def compute_generation(device: torch.device) -> int:
    """First number of a device's compute capability; 0 in Triton's interpreter, where no compiler matters."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@cache
def unreliable(device: torch.device) -> str:
    """`untrusted` of this machine's compilers for a device."""
    return "" if device.type != "cuda" else untrusted(triton_version(), ptxas(), compute_generation(device))


@cache
def unproven(operation: str, dtypes: tuple[torch.dtype, ...], device: torch.device, path: Path | None) -> str:
    """Why an operation is not known to be right on a device for inputs of these dtypes, or "".

    Args:
        operation: One of `OPERATIONS`, or another one, which no result is about.
        dtypes: Dtypes of the inputs.
        path: File of results to add to `PASSED`, or None.
    """
    rows, why = (frozenset(), "") if path is None else recorded(path)
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    name, known = device_name(device), rows | (PASSED if kernels_fingerprint() == CHECKED else frozenset())
    if len(names) == 1 and any(row.device == name for row in known):  # elsewhere nothing asks for Triton
        triton, assembler = triton_version(), ptxas() if device.type == "cuda" else ""
        if Passed(name, names[0], triton, assembler, operation) in known:
            return ""
    return why or f"`isopos gpu-check` has not passed for {operation} of {' and '.join(names)} on {name}"
