"""A simulated device without float64: its tensors report that device and compute on the CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from isopos import exact

DEVICE = torch.device("lazy")  # a type that no build here has, and whose gradients need no thread of its own
WIDE = (torch.float64, torch.complex128)
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}  # what may have tensors of two devices


def narrow(x: Tensor) -> Tensor:
    """Positions in a dtype of the device."""
    return x.float() if x.dtype in WIDE else x


class There(Tensor):
    """A tensor of the simulated device, with its CPU tensor in `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "There":
        if held.dtype in WIDE:
            raise TypeError(f"{DEVICE} has no {held.dtype}")
        held = held.resolve_conj().resolve_neg()  # a tensor of a subclass does not carry these marks
        options = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype, "device": DEVICE}
        there = torch.Tensor._make_wrapper_subclass(cls, held.shape, **options)
        there.held = held
        return there

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"There({self.held!r})"


class WithoutFloat64(TorchDispatchMode):
    """A mode in which the device exists. An operation with float64 or with tensors of two devices raises an error.

    Leaving the mode removes cached properties of the device.
    """

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        exact.HAS_FLOAT64.pop(DEVICE.type, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, There)]
    if func not in COPIES and there and any(not isinstance(x, There) and x.ndim for x in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on one device, got {[x.device for x in tensors]}")
    device = kwargs.get("device")
    to_there = bool(there) if device is None else torch.device(device).type == DEVICE.type
    if func in COPIES and to_there and any(x.dtype in WIDE for x in tensors):
        raise TypeError(f"{func}: {DEVICE} has no float64")
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if func is torch.ops.aten.copy_.default:
        return args[0]
    return tree_map(lambda x: There(x) if to_there and isinstance(x, Tensor) else x, out)


def _held(x: Any) -> Any:
    if isinstance(x, There):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == DEVICE.type else x
