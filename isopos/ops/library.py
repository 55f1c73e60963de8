"""The library compiled from ops/linear/cpu/kernel.c: loading, checks of tensors that it may read, and its rotations.

It reads float32, bfloat16 and float16 on x86-64 and 64-bit ARM, and runs on PyTorch's threads through PyTorch's stable C
interface, in a process made by `os.fork` on the calling thread alone. `isopos.ops.linear.cpu` calls its sums.
"""

import ctypes
import functools
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

LANES = {"AVX512": 16, "AVX2": 8, "SSE2": 4, "NEON": 4}  # float32 numbers per vector, by instruction set
X86 = ("AVX512", "AVX2", "SSE2")  # each processor also runs the later sets
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum of the library
WIDEST = 256  # largest number of features that its buffers hold
PAST = 1 << 24  # results with more bytes are written past the cache
PLAIN = (Tensor, torch.nn.Parameter)
ABSENT = "no library is installed"
OUT_OF_RANGE, NOT_FINITE = 1, 2  # bits of a call's status
KIND = {name: n for n, name in enumerate(("none", "rotation", "lift", "gather"))}


class ViewArgument(ctypes.Structure):
    """Rows of tokens, with strides in numbers; strides of samples and heads may be zero."""

    _fields_ = (("first", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("sample", "head", "token")))


class Input(ctypes.Structure):
    """An input of the sums, with its feature map."""

    _fields_ = (
        *(
            (name, ViewArgument)
            for name in ("x", "unrotated", "grad", "grad_unrotated", "mask", "normal", "table", "grad_table")
        ),
        *((name, ctypes.c_int64) for name in ("type", "numbers", "width", "phi", "kind", "add", "uncached")),
        ("grad_decay", ctypes.c_void_p),
    )


class StateArgument(ctypes.Structure):
    """Sums of k v^T, and sums of keys for a denominator."""

    _fields_ = (("sums", ctypes.c_void_p), ("row", ctypes.c_void_p))


class SizesArgument(ctypes.Structure):
    """Numbers of heads, tokens, features and values."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("all", "heads", "length", "keys", "d", "e", "unrotated", "values"))


class Flags(ctypes.Structure):
    """Form and direction of the sums."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("denominated", "divide", "begins", "ends", "reverse", "back"))


class DecayArgument(ctypes.Structure):
    """Log decays of tokens, or the weights of states before a step."""

    _fields_ = (("query", ViewArgument), ("key", ViewArgument), ("across", ctypes.c_void_p))


class Output(ctypes.Structure):
    """Sums, denominators and the gradients of sums."""

    _fields_ = (*((name, ViewArgument) for name in ("sums", "denominator", "grad")), ("uncached", ctypes.c_int64))


class Split(ctypes.Structure):
    """Parts of a head, threads, and their buffers."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("parts", "threads", "total_size", "scratch_size")),
        *((name, ctypes.c_void_p) for name in ("totals", "scratch")),
    )


class Call(ctypes.Structure):
    """The sums of some tokens of heads, or a step: `Call` of cpu/call.h."""

    _fields_ = (
        ("size", SizesArgument),
        ("flags", Flags),
        ("decay", DecayArgument),
        *((name, StateArgument) for name in ("state", "saved", "grad_state")),
        ("out", Output),
        ("split", Split),
        *((name, Input) for name in ("q", "k", "v")),
        ("token", ctypes.c_int64),
        ("status", ctypes.POINTER(ctypes.c_int64)),
        ("floor", ctypes.c_float),
    )


class Rotate(ctypes.Structure):
    """Rotations or lifts of features, without sums."""

    _fields_ = (
        *((name, ViewArgument) for name in ("x", "table")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("all", "heads", "tokens", "adjoint", "threads")),
        ("input", Input),
    )


@functools.cache
def parallel_for() -> ctypes.c_void_p:
    """PyTorch's function that runs others on its threads."""
    path = Path(torch.__file__).with_name("lib") / "torch_cpu.dll" if sys.platform == "win32" else torch._C.__file__
    return ctypes.cast(ctypes.CDLL(str(path)).torch_parallel_for, ctypes.c_void_p)


def opened(path: Path) -> ctypes.CDLL:
    """Load a library, declare its functions and set its threads; OSError if it cannot be loaded or is of another version."""
    lib = ctypes.CDLL(str(path))
    for function, count in ((lib.isopos_groups, 1), (lib.isopos_scratch_size, 3)):
        function.argtypes, function.restype = (ctypes.c_int64,) * count, ctypes.c_int64
    if lib.isopos_call_size() != ctypes.sizeof(Call) or lib.isopos_rotate_size() != ctypes.sizeof(Rotate):
        raise OSError(f"{path.name} is of another version; install isopos again")
    lib.isopos_use_threads(parallel_for())
    if hasattr(os, "register_at_fork"):  # a copy of a process would wait for the threads of PyTorch's pool, which it lacks
        os.register_at_fork(after_in_child=lambda: lib.isopos_use_threads(None))
    return lib


def instructions() -> tuple[str, ...]:
    """The instruction sets whose libraries this processor may run, the best one first."""
    machine, best = platform.machine().lower(), torch.backends.cpu.get_cpu_capability()
    if machine in ("x86_64", "amd64"):
        return X86[X86.index(best) :] if best in X86 else X86[-1:]
    return ("NEON",) if machine in ("aarch64", "arm64") else ()


@functools.cache
def libraries() -> tuple[dict[int, ctypes.CDLL], str]:
    """Libraries for this processor by lanes, most lanes first; and their names, or why there is none."""
    libraries_by_lanes, missing = {}, []
    for name in instructions():
        path = Path(__file__).with_name(f"_cpu_{name.lower()}.so")
        if libraries_by_lanes and name == X86[-1]:
            break  # only for processors without longer vectors
        try:
            libraries_by_lanes[LANES[name]] = opened(path)
        except OSError as error:
            missing.append(str(error) if path.exists() else f"installation builds {name} where it finds GCC or Clang")
    names = [name for name in instructions() if LANES[name] in libraries_by_lanes]
    none = f"none for {platform.machine()}: {'; '.join(missing) or 'it is built for x86-64 and 64-bit ARM'}"
    return libraries_by_lanes, " and ".join(names) or none


def absent() -> str:
    """Why no library is installed, or ""."""
    return "" if libraries()[0] else f"{ABSENT} ({libraries()[1]})"


warned = False  # whether this process was warned that there is no library


def warn_if_absent(why: str) -> None:
    """Warn once per process, at the line that called isopos, if a kernel refuses only because no library is installed."""
    global warned
    if warned or not why.startswith(ABSENT):
        return
    warned, level, frame = True, 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("isopos", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"linear attention on a CPU goes without its compiled kernel, several times slower: {why}. Install a wheel of this "
        "platform, or GCC or Clang and then isopos again: pip install --force-reinstall --no-deps --no-cache-dir isopos",
        RuntimeWarning,
        stacklevel=level,
    )


def lanes() -> int:
    """Numbers per vector of the library with the longest vectors, which runs the sums."""
    return max(libraries()[0], default=min(LANES.values()))


def whole(width: int) -> int:
    """A width, rounded up to whole vectors."""
    return -(-width // lanes()) * lanes()


def library(width: int) -> ctypes.CDLL | None:
    """The library with the longest vectors that divide a width; None if there is none."""
    return next((lib for lanes, lib in libraries()[0].items() if width % lanes == 0 and width <= WIDEST), None)


def watched() -> bool:
    """Whether a transform, a mode or a trace records operations; it would miss compiled code and decisions on numbers."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def unreadable(*tensors: Tensor) -> str:
    """Why no library may read these tensors, or "": they must be plain CPU tensors outside transforms and traces.

    Compiled code checks nothing else: it reads tensors by address and strides.
    """
    if watched():
        return "a transform, a mode or a trace watches operations, and sees none of compiled code"
    return "" if all(map(is_plain, tensors)) else "it reads plain tensors on a CPU only"


def is_plain(x: Any) -> bool:
    """Whether x is a dense CPU tensor that has memory."""
    dense = type(x) in PLAIN and x.is_cpu and x.layout is torch.strided and not x.is_nested
    return dense and not x.is_neg() and x.data_ptr() != 0  # zero tensors have no memory


def view(x: Tensor) -> ViewArgument:
    """The view of x ``[*b h t .]``, contiguous in the last axis (see `flat`), at most two leading axes longer than 1."""
    sizes, strides, n = x.shape, x.stride(), x.ndim
    sample = strides[-4] if n > 3 and sizes[-4] > 1 else 0
    head = strides[-3] if n > 2 and sizes[-3] > 1 else 0
    return ViewArgument(x.data_ptr(), sample, head, strides[-2] if sizes[-2] > 1 else 0)


def flat(x: Tensor) -> Tensor:
    """x with contiguous features per token, copied only if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def run(function: Any, call: Call) -> bool:
    """Call the library; returns whether all sums are finite. IndexError if an index of a gather is out of range."""
    status = ctypes.c_int64(0)
    call.status = ctypes.pointer(status)
    function(ctypes.byref(call))
    return sums_finite(status.value)


def sums_finite(status: int) -> bool:
    """Whether sums are finite by the status of a call; IndexError if an index of a gather was out of range."""
    if status & OUT_OF_RANGE:
        raise IndexError("isometry: expected indices of features in a Gather, got one out of range")
    return not status & NOT_FINITE


def rotates(x: Tensor, table: Tensor, *, lifted: bool, adjoint: bool) -> bool:
    """Whether `rotate` serves these tensors, which requires a result larger than a cache."""
    width, doubled = table.shape[-2] * (1 if lifted else 2), lifted and not adjoint
    return (
        4 * x.shape[:-1].numel() * width * (1 + doubled) > PAST
        and not unreadable(x, table)
        and x.dtype == table.dtype == torch.float32
        and library(width) is not None
        and x.ndim > 2
        and x.shape[-1] == width * (2 if lifted and adjoint else 1)
        and not any(n > 1 for n in x.shape[:-4])
        and torch.broadcast_shapes(x.shape[:-1], table.shape[:-2]) == x.shape[:-1]
    )


def rotate(x: Tensor, table: Tensor, *, lifted: bool, adjoint: bool) -> Tensor:
    """Rotate or lift x ``[*b h t .]`` by a table ``[*b h t f 2]``, or by the adjoint, without a graph."""
    width, shape = table.shape[-2] * (1 if lifted else 2), x.shape[:-1]
    lib = library(width)
    assert lib is not None
    x, table = flat(x), flat(table.flatten(-2))
    out = x.new_empty(*shape, 2 * width if lifted and not adjoint else width)
    call = Rotate(view(x), view(table.expand(*shape, -1)), out.data_ptr(), shape[:-1].numel(), shape[-2], shape[-1], adjoint)
    call.threads, call.input.kind = torch.get_num_threads(), KIND["lift" if lifted else "rotation"]
    call.input.numbers = call.input.width = width
    lib.isopos_rotate(ctypes.byref(call))
    return out
