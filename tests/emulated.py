"""The C kernel for another machine or by another compiler, in a separate process, with the interface of `ctypes`."""

import contextlib
import ctypes
import gc
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import torch

from isopos.ops import library
from tools.sanitize import ROOT, flags

CALLS = ["forward", "backward", "forward_all", "backward_all", "step", "rotate"]
FUNCTIONS = ["sizes", "groups", "scratch_size", "features", *CALLS]


class Emulated:
    """Functions of the kernel, which run in a separate process on copies of the memory of their arguments.

    Args:
        instructions: What the kernel is built for: "NEON" or "SSE2".
        compiler: Its command, the flags included.
        emulator: The command that runs its programs, none where this machine does.
        folder: Where the program is built.
    """

    def __init__(self, instructions: str, compiler: list[str], emulator: list[str], folder: Path):
        program, common = folder / "emulated", ["-std=gnu11", "-O2", "-fopenmp-simd", "-fwrapv", "-Wno-psabi", "-static"]
        build = [*compiler, *common, *flags(instructions), str(ROOT / "tests/emulated.c"), "-o", str(program)]
        subprocess.run(build, check=True)
        self.process = subprocess.Popen([*emulator, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls: list[str] = []
        self.tensors = tensors_among(gc.get_objects())
        gc.freeze()  # so that a call looks through newer objects alone
        for name in CALLS:
            setattr(self, f"isopos_{name}", lambda argument, name=name: self.run(name, argument._obj))
        self.lanes, *sizes = self.numbers("sizes", 0, 0, 0)
        assert sizes == [ctypes.sizeof(library.Call), ctypes.sizeof(library.Rotate)]

    def isopos_groups(self, length: int) -> int:
        return self.numbers("groups", length)[0]

    def isopos_scratch_size(self, *widths: int) -> int:
        return self.numbers("scratch_size", *widths)[0]

    def isopos_features(self, phi, x, y, derivative, count) -> None:
        addresses = [pointer.value for pointer in (x, y, derivative)]
        memory = [(address, 4 * count.value) for address in addresses]
        self.exchange("features", struct.pack("5q", phi.value, count.value, *addresses), [16, 24, 32], memory)

    def numbers(self, name: str, *arguments: int) -> list[int]:
        form = f"{len(arguments)}q"
        return list(struct.unpack(form, self.exchange(name, struct.pack(form, *arguments), [], [])))

    def run(self, name: str, call: ctypes.Structure) -> None:
        self.calls.append(name)
        memory = []
        for x in [*self.tensors, *tensors_among(gc.get_objects())]:
            with contextlib.suppress(RuntimeError):  # of a tensor whose storage is gone, which no call reads
                memory.append((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
        if isinstance(call, library.Call):
            memory.append((ctypes.addressof(call.status.contents), 8))
        self.exchange(name, bytes(call), list(addresses_of(type(call))), memory)

    def exchange(self, name: str, argument: bytes, places: list[int], memory: list[tuple[int, int]]) -> bytes:
        """Call a function with copies of the memory of its argument, and copy the results back."""
        blocks, pointers = {}, []
        for place in places:
            (address,) = struct.unpack_from("q", argument, place)
            if address:
                start, size = next(known for known in memory if known[0] <= address < known[0] + max(known[1], 1))
                blocks.setdefault(start, (1 + len(blocks), size))
                pointers.append((0, place, blocks[start][0], address - start))
        sizes = [len(argument), *(size for _, size in blocks.values())]
        head = struct.pack(f"{3 + len(sizes)}q", FUNCTIONS.index(name), len(sizes), len(pointers), *sizes)
        contents = b"".join([argument, *(ctypes.string_at(start, size) for start, (_, size) in blocks.items())])
        self.process.stdin.write(head + contents + b"".join(struct.pack("4q", *pointer) for pointer in pointers))
        self.process.stdin.flush()
        answer = self.process.stdout.read(sizes[0])
        for start, (_, size) in blocks.items():
            ctypes.memmove(start, self.process.stdout.read(size), size)
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        gc.unfreeze()
        assert self.process.wait(240) == 0


def tensors_among(objects: list[Any]) -> list[torch.Tensor]:
    return [x for x in objects if type(x) in library.PLAIN and x.is_cpu and x.layout is torch.strided]


def addresses_of(kind: type[ctypes.Structure], start: int = 0):
    """Offsets of the addresses in a structure."""
    for name, own, *_ in kind._fields_:
        at = start + getattr(kind, name).offset
        if issubclass(own, ctypes.Structure):
            yield from addresses_of(own, at)
        elif own is ctypes.c_void_p or hasattr(own, "contents"):
            yield at


def absent(*commands: str) -> str:
    """Names of the programs that are not installed, or ""."""
    return ", ".join(name for name in commands if shutil.which(name) is None)
