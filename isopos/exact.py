"""Exact numbers: modules whose parameters stay at least float32, and conversions to and from float64."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isopos.deprecation import renamed

_NAMES = {"narrow": "cast_down", "shown": "describe", "wide": "to_float64", "wide_device": "float64_device"}
__getattr__ = renamed(__name__, {old: f"isopos.exact.{new}" for old, new in _NAMES.items()})


def normal(generator: torch.Generator | int, *shape: int) -> Tensor:
    """Standard normal float32 numbers on the CPU, from a generator or a seed, independent of torch's default dtype."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def offsets(x: Tensor, y: Tensor) -> Tensor:
    """Offsets y_j - x_i ``[*b t s]`` of positions ``[*b t 1]`` and ``[*b s 1]``; integers become int64."""
    x, y = (z if z.is_floating_point() else z.long() for z in (x, y))
    return y[..., None, :, 0] - x[..., :, None, 0]


HAS_FLOAT64 = {"cpu": True, "cuda": True, "meta": True, "mps": False}
"""Whether a type of device has float64; other types are tried once."""


def float64_device(device: torch.device) -> torch.device:
    """The device for float64 computations on tensors of a device: itself, or the CPU if it has no float64 (MPS)."""
    if device.type not in HAS_FLOAT64:
        try:
            HAS_FLOAT64[device.type] = (torch.ones((), dtype=torch.float64, device=device) + 2.0**-40 - 1).item() == 2.0**-40
        except (TypeError, RuntimeError):
            HAS_FLOAT64[device.type] = False
    return device if HAS_FLOAT64[device.type] else torch.device("cpu")


def to_float64(value: Tensor, device: torch.device | None = None) -> Tensor:
    """Promote a tensor to float64, on `device` or its own device; on the CPU if that device has no float64."""
    if value.is_cpu and (device is None or device.type == "cpu"):
        return value.to(torch.float64)
    device = float64_device(value.device if device is None else device)
    return (value if value.device == device else value.to(device)).to(torch.float64)


def cast_down(value: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Cast a tensor to a dtype, then move it to a device, which need not support the tensor's original dtype."""
    return value.to(dtype).to(device)


def constant(value: Tensor) -> Tensor:
    """A float64 copy on the CPU, for a plain attribute, which neither casts nor the meta device change."""
    return value.detach().to("cpu", copy=True).to(torch.float64)


class ExactModule(nn.Module):
    """A module whose parameters and buffers stay at least float32.

    Frequencies, angles and decay rates are multiplied by positions: in bfloat16, 4096 positions give 769 distinct angles.
    ``model.bfloat16()`` and ``.half()`` therefore move such a module but keep its dtype; ``.double()`` converts it.
    """

    initial: Tensor
    parameter_name = ""  # of the value that `parametrise` registered

    def parametrise(self, name: str, value: Tensor, *, learned: bool) -> None:
        """Register a value as a float32 parameter of this name, or keep it as a float64 constant that no cast changes."""
        self.initial, self.parameter_name = constant(value), name
        self.register_parameter(name, nn.Parameter(torch.empty(value.shape, dtype=torch.float32)) if learned else None)
        self.reset_parameters()

    @property
    def parameter(self) -> Tensor:
        """The value registered by `parametrise`: the parameter, or the constant."""
        parameter = getattr(self, self.parameter_name)  # which a parametrisation or a replica may hold elsewhere
        return self.initial if parameter is None else parameter

    def reset_parameters(self) -> None:
        """Restore the initial value."""
        if self.parameter_name and self.parameter is not self.initial:
            with torch.no_grad():
                self.parameter.copy_(cast_down(self.initial, self.parameter.dtype, self.parameter.device))

    def _apply(self, fn, recurse=True):
        def moved(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if out.is_floating_point() and out.dtype.itemsize < 4:
                return tensor.to(device=out.device)
            return out

        return super()._apply(moved, recurse)


class Weight(ExactModule):
    """One parameter, for modules with several."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.parametrise("weight", value, learned=True)


def once(name: str, instead: str) -> None:
    """Raise RuntimeError if a backward pass is differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name}: expected no create_graph=True, got it; for more derivatives use {instead}")


def constant_when_compiled(function: Any) -> Any:
    """`torch.compiler.assume_constant_result` without its import of the compiler, which takes seconds."""
    function._dynamo_marked_constant = True
    return function


@constant_when_compiled  # PyTorch 2.11 cannot trace it
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context manager that disables autocast."""
    if _has_autocast(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`, which PyTorch 2.11 compiles to True outside exports, too."""
    return torch.compiler._is_exporting_flag


def appended(before: Tensor, after: Tensor) -> Tensor:
    """Rows ``[... t d]`` of two tensors, one after the other; the axes in front broadcast."""
    shape = broadcast(before.shape[:-2], after.shape[:-2])
    return torch.cat([x.expand(*shape, *x.shape[-2:]) for x in (before, after)], -2)


def broadcast(*shapes: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, with a fast path for equal shapes."""
    for shape in shapes:
        if shape != shapes[0]:
            return torch.broadcast_shapes(*shapes)
    return shapes[0] if shapes else torch.Size()


def constants(name: str, value: Any, others: tuple[type, ...] = ()) -> bytes:
    """The name and the value of a constant: of `others` the repr, of lists, tuples and dicts each item; else b""."""
    if isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return b"".join(constants(f"{name}.{key}", item, others) for key, item in items)
    if isinstance(value, Tensor):
        return name.encode() + value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return name.encode() + value.tobytes()
    return f"{name}={value}".encode() if isinstance(value, (bool, int, float, complex, str, *others)) else b""


def describe(value: Any) -> str:
    """The repr of a value, with dtypes and shapes instead of tensors."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        inner = (f"{field.name}={describe(getattr(value, field.name))}" for field in fields(value) if field.repr)
        return f"{type(value).__name__}({', '.join(inner)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {describe(inner)}' for name, inner in value.items())}}}"
    return value.__name__ if inspect.isfunction(value) else repr(value)
