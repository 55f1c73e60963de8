"""Modules whose parameters stay exact when the model around them is cast, and what else every layer needs."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def normal(generator: torch.Generator | int, *shape: int) -> Tensor:
    """Standard normal numbers, float32 on the CPU whatever torch's defaults are, of a generator or a seed."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


WIDE = {"cpu": True, "cuda": True, "meta": True, "mps": False}
"""Types of devices, and whether they have float64; another type is tried when it is first met."""


def wide_device(device: torch.device) -> torch.device:
    """Where the float64 numbers of tensors on a device are computed: there, or on the CPU where it has none (MPS)."""
    if device.type not in WIDE:
        try:
            WIDE[device.type] = (torch.ones((), dtype=torch.float64, device=device) + 2.0**-40 - 1).item() == 2.0**-40
        except (TypeError, RuntimeError):
            WIDE[device.type] = False
    return device if WIDE[device.type] else torch.device("cpu")


def wide(value: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor in float64, for work on a device, by default its own: there, or on the CPU where that device has none."""
    if value.is_cpu and (device is None or device.type == "cpu"):
        return value.to(torch.float64)
    device = wide_device(value.device if device is None else device)
    return (value if value.device == device else value.to(device)).to(torch.float64)


def narrow(value: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """A tensor rounded to a dtype, then on a device, which need not have the tensor's own dtype."""
    return value.to(dtype).to(device)


def constant(value: Tensor) -> Tensor:
    """A float64 copy on the CPU for a plain attribute, which no cast and no meta device reaches."""
    return value.detach().to("cpu", copy=True).to(torch.float64)


class ExactModule(nn.Module):
    """A module whose parameters and buffers never fall below float32.

    Frequencies, angles and decay rates are multiplied by positions: in bfloat16, 4096 positions give 769 distinct angles.
    ``model.bfloat16()`` and ``.half()`` therefore move such a module but keep its dtype; ``.double()`` still widens it.
    """

    initial: Tensor
    parameter_name = ""  # of what `parametrise` made, if anything

    def _apply(self, fn, recurse=True):
        def moved(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if out.is_floating_point() and out.dtype.itemsize < 4:
                return tensor.to(device=out.device)
            return out

        return super()._apply(moved, recurse)

    def parametrise(self, name: str, value: Tensor, *, learned: bool) -> None:
        """Make a value a float32 parameter of that name, or a float64 constant that no cast and no meta device reaches."""
        self.initial, self.parameter_name = constant(value), name
        self.register_parameter(name, nn.Parameter(torch.empty(value.shape, dtype=torch.float32)) if learned else None)
        self.reset_parameters()

    @property
    def parameter(self) -> Tensor:
        """What `parametrise` made: the parameter, or the constant."""
        parameter = self._parameters[self.parameter_name]
        return self.initial if parameter is None else parameter

    def reset_parameters(self) -> None:
        """Back to the initial value."""
        if self.parameter_name and self.parameter is not self.initial:
            with torch.no_grad():
                self.parameter.copy_(narrow(self.initial, self.parameter.dtype, self.parameter.device))


class Weight(ExactModule):
    """One parameter, for modules that have several."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.parametrise("weight", value, learned=True)


def once(name: str, instead: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name}: expected no create_graph=True, got it; for more derivatives use {instead}")


@torch.compiler.assume_constant_result  # PyTorch 2.11 cannot trace it
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context that autocast does not reach."""
    if _has_autocast(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def broadcast(*shapes: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, at no cost where all are equal."""
    for shape in shapes:
        if shape != shapes[0]:
            return torch.broadcast_shapes(*shapes)
    return shapes[0] if shapes else torch.Size()


def shown(value: Any) -> str:
    """A value with the shapes of its tensors."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        inner = (f"{field.name}={shown(getattr(value, field.name))}" for field in fields(value) if field.repr)
        return f"{type(value).__name__}({', '.join(inner)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {shown(inner)}' for name, inner in value.items())}}}"
    return value.__name__ if inspect.isfunction(value) else repr(value)
