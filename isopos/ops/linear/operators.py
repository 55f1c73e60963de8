"""The passes of kernels as two registered operators, opaque to compilers, of tensors and a description of the problem.

The forward one returns the sums and all that the backward one reads. Importing this module registers them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from isopos.exact import constant_when_compiled, full_precision
from isopos.feature_maps import COMPILED, FeatureMap
from isopos.ops import library
from isopos.ops.linear.autograd import Kernel, needs, operands
from isopos.ops.linear.features import Features, Sums
from isopos.ops.rotate import lift, permute, reflect, rotate, unlift, unpermute, unrotate
from isopos.ops.slices import Axes, Slices


class Operator(Kernel, ABC):
    """A kernel that compiled code calls as operators: by its name in OPERATED, without streams, differentiable once."""

    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        if torch.compiler.is_compiling():
            return _forward(self.name, *described(sums))[0], ()
        return super().run(sums)

    @abstractmethod
    def packed(self, sums: Sums, learns: bool) -> list[Tensor]:
        """The sums, and if it `learns` all that the backward pass reads: different tensors, of shapes that `fake` knows."""

    @abstractmethod
    def fake(self, sums: Sums, learns: bool) -> list[Tensor]:
        """Tensors like those of `packed`, for tensors without numbers and sizes that are symbols."""

    @abstractmethod
    def unpacked(self, sums: Sums, packed: Sequence[Tensor]) -> list[Tensor]:
        """The tensors to save, as `forward` returns them."""


OPERATED: dict[str, Operator] = {}


AXES = {
    "rotation": Axes.named("*b h t f 2"),
    "lift": Axes.named("*b h t f 2"),
    "gather": Axes.named("*b h t d"),
    "reflection": Axes.named("h 1 d"),
}
APPLIED = {"rotation": rotate, "lift": lift, "gather": permute, "reflection": reflect}
ADJOINT = {"rotation": unrotate, "lift": unlift, "gather": unpermute, "reflection": reflect}


@dataclass(frozen=True)
class _MapOfKinds:
    """The map of closed form with these kinds, in order, one per tensor."""

    kinds: tuple[str, ...]
    all: tuple[Tensor, ...]

    features, linear = None, True

    def tensors(self) -> tuple[Tensor, ...]:
        return self.all

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        return replace(self, all=tuple(tensors[: len(self.all)]))

    def part(self, slices: Slices) -> Self:
        return self.replace([AXES[kind].part(x, slices) for kind, x in zip(self.kinds, self.all, strict=True)])

    def apply(self, x: Tensor) -> Tensor:
        for kind, by in zip(self.kinds, self.all, strict=True):
            x = APPLIED[kind](x, by)
        return x

    def adjoint(self, x: Tensor) -> Tensor:
        for kind, by in zip(reversed(self.kinds), reversed(self.all), strict=True):
            x = ADJOINT[kind](x, by)
        return x


def described(sums: Sums) -> tuple[list[Tensor], str, list[int], list[bool]]:
    """A problem as its different tensors, its form, the index of each operand (-1 for None), and which need gradients.

    The form is `causal;denominator;segmented`, then feature map, kinds, whether unrotated features are summed up, whether
    there is a mask, and the dtype of features, for queries, keys and values.
    """
    tensors: list[Tensor] = []
    places: list[int] = []
    needed: list[bool] = []
    for x, need in zip(operands(sums), needs(sums), strict=True):
        place = -1 if x is None else len(tensors)
        for n, known in enumerate(tensors):
            place = n if known is x else place
        if x is not None and place == len(tensors):
            tensors.append(x)
            needed.append(need)
        places.append(place)
    form = f"{sums.causal};{sums.denominator};{sums.segmented}"
    for each in sums.features:
        assert isinstance(each.phi, FeatureMap)
        dtype = "" if each.dtype is None else str(each.dtype).removeprefix("torch.")
        form += f";{each.phi.name},{' '.join(each.kinds or ())},{each.unrotated},{each.mask is not None},{dtype}"
    return tensors, form, places, needed


@cache
def _parsed(form: str) -> tuple[bool, str | None, bool, list[tuple[Any, tuple[str, ...], bool, bool, Any]]]:
    causal, denominator, segmented, *features = form.split(";")
    phis, found = {phi.name: phi for phi in COMPILED}, []
    for each in features:
        phi, kinds, unrotated, masked, dtype = each.split(",")
        dtype = getattr(torch, dtype) if dtype else None
        found.append((phis[phi], tuple(kinds.split()), unrotated == "True", masked == "True", dtype))
    return causal == "True", None if denominator == "None" else denominator, segmented == "True", found


def problem(tensors: Sequence[Tensor], form: str, places: Sequence[int]) -> Sums:
    """The problem that `described` has described."""
    causal, denominator, segmented, forms = _parsed(form)
    given: Any = iter([None if n < 0 else tensors[n] for n in places])
    q, k, v, g_q, g_k = (next(given) for _ in range(5))
    features: Any = []
    for phi, kinds, unrotated, masked, dtype in forms:
        of_map = _MapOfKinds(kinds, tuple(next(given) for _ in kinds)) if kinds else None
        features.append(Features(phi, of_map, kinds, next(given) if masked else None, unrotated, dtype))
    g = None if g_q is None else (g_q, g_k)
    return Sums(q, k, v, tuple(features), g, causal, denominator, segmented=segmented)


@constant_when_compiled
def installed() -> bool:
    """Whether the library of C kernels is installed, as compiled code keeps it."""
    return bool(library.libraries()[0])


@torch.library.custom_op("isopos::kernel_forward", mutates_args=())
def _forward(kernel: str, tensors: list[Tensor], form: str, places: list[int], needed: list[bool]) -> list[Tensor]:
    return OPERATED[kernel].packed(problem(tensors, form, places), any(needed))


@_forward.register_fake
def _(kernel: str, tensors: list[Tensor], form: str, places: list[int], needed: list[bool]) -> list[Tensor]:
    return OPERATED[kernel].fake(problem(tensors, form, places), any(needed))


@torch.library.custom_op("isopos::kernel_backward", mutates_args=())
def _backward(
    kernel: str,
    grad: Tensor,
    packed: list[Tensor],
    tensors: list[Tensor],
    form: str,
    places: list[int],
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of the tensors that need one; `packed` is what the forward pass returned."""
    sums, own = problem(tensors, form, places), OPERATED[kernel]
    needs, found = [n >= 0 and needed[n] for n in places], {}
    with full_precision(grad.device):
        grads = own.backward(sums, own.unpacked(sums, packed), grad, needs)
        for n, need, x in zip(places, needs, grads, strict=True):
            if need and x is not None:
                found[n] = found[n] + x if n in found else x
        return [found[n].sum_to_size(x.shape).contiguous() for n, x in enumerate(tensors) if needed[n]]


@_backward.register_fake
def _(kernel: str, grad: Tensor, packed: list[Tensor], tensors: list[Tensor], *description: Any) -> list[Tensor]:
    pairs = zip(tensors, description[-1], strict=True)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in pairs if need]


def _save(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    ctx.kernel, tensors, *ctx.description = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.count = len(output)


def _differentiate(ctx: Any, grads: list[Tensor]) -> Any:
    saved = ctx.saved_tensors
    packed, tensors = list(saved[: ctx.count]), list(saved[ctx.count :])
    found = iter(_backward(ctx.kernel, grads[0], packed, tensors, *ctx.description))
    return None, [next(found) if need else None for need in ctx.description[-1]], None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
