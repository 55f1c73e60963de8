"""Backends, and the autograd function that runs backends with a custom backward pass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor

from isopos.exact import full_precision, once
from isopos.feature_maps import FeatureMap
from isopos.ops.library import warn_if_absent, watched
from isopos.ops.linear.features import Sums

REMEDY = "use isopos.attention.naive_linear_attention there"  # for derivatives that kernels do not have


class Backend(ABC):
    """Base class of implementations of the sums. The first one that serves a problem runs it."""

    name: ClassVar[str]

    @abstractmethod
    def serves(self, sums: Sums) -> str:
        """Why it does not serve a problem, as a sentence that follows its name and a colon; "" if it does."""

    @abstractmethod
    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Sums ``[*b h t e]``, with a graph, and the sums of a stream after these tokens.

        They are in `Sums.dtype`, or in the common dtype of all inputs if no division remains.
        """


Choice = TypeVar("Choice", bound=Backend)


def chosen(backends: Sequence[Choice], sums: Sums) -> Choice | None:
    """The first backend that serves a problem. Warns once if an absent compiled kernel would have served it."""
    for backend in backends:
        if not (why := backend.serves(sums)):
            return backend
        warn_if_absent(why)
    return None


class Kernel(Backend, ABC):
    """A backend with a forward and a backward pass without a graph, differentiable once.

    Both passes take flags for the operands that need a gradient, in the order of `operands`; gradients have the same order.
    """

    @abstractmethod
    def forward(self, sums: Sums, needs: Sequence[bool]) -> tuple[Any, list[Tensor]]:
        """The sums (of a stream with the sums after it) and the tensors to save if a backward pass will follow."""

    @abstractmethod
    def backward(self, sums: Sums, saved: Sequence[Tensor], grad: Any, needs: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of all operands, given the gradient of the sums (of a stream with gradients of the sums after it)."""

    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        result: Any
        try:
            graph = any(needed := needs(sums)) or watched()
            result = _Differentiable.apply(self, sums, *operands(sums)) if graph else self.forward(sums, needed)[0]
        except RuntimeError as error:
            if "functorch" not in str(error):
                raise
            raise RuntimeError(f"linear_attention: expected no transform of torch.func, got one; {REMEDY}") from None
        return (result, ()) if sums.stream is None else (result[0], result[1:])


def operands(sums: Sums) -> tuple[Tensor | None, ...]:
    """q, k, v, both log decays or None, the tensors of the features, and the sums of a stream."""
    more = *(tensor for each in sums.features for tensor in each.tensors), *(() if sums.stream is None else sums.stream.sums)
    return *sums.inputs, *(sums.g or (None, None)), *more


def needs(sums: Sums) -> list[bool]:
    """Whether each operand needs a gradient."""
    grads = torch.is_grad_enabled()
    return [grads and x is not None and x.requires_grad for x in operands(sums)]


def with_operands(sums: Sums, inputs: Sequence[Any]) -> Sums:
    """The problem with other tensors, in the order of `operands`."""
    (q, k, v, g_q, g_k), rest = inputs[:5], iter(inputs[5:])
    features = tuple(each.replace([next(rest) for _ in each.tensors]) for each in sums.features)
    stream = None if sums.stream is None else replace(sums.stream, sums=tuple(rest))
    return replace(sums, q=q, k=k, v=v, g=None if g_q is None else (g_q, g_k), features=features, stream=stream)


def refusal(sums: Sums, *, streams: bool = False, operator: bool = False) -> str:
    """Why no kernel serves a problem, or "".

    Args:
        sums: The problem.
        streams: Whether the kernel takes and returns sums of streams, outside compiled code.
        operator: Whether it is an operator in compiled code.
    """
    if torch.compiler.is_compiling():
        if not operator:
            return "a compiler cannot trace a backward pass that is no graph"
        streams = False
    elif torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "a trace would keep the chunks of its length"
    elif any(isinstance(x, FakeTensor) for x in sums.inputs):
        return "a FakeTensor has no numbers, which it needs"
    if sums.stream is not None and not streams:
        return "it takes and returns no sums of a stream"
    if unnamed := [each.phi for each in sums.features if not isinstance(each.phi, FeatureMap)]:
        return f"{type(unnamed[0]).__name__} is no FeatureMap and may hold parameters, which another pass would not see"
    if (sums.causal or sums.g is not None) and sums.q.shape[-2] != sums.k.shape[-2]:
        return f"causal and decaying sums have as many queries as keys, here {sums.q.shape[-2]} and {sums.k.shape[-2]}"
    if sums.products:
        return "two products of matrices are all there is to do"
    return ""


def refuses_step(sums: Sums) -> str:
    """Why a problem is not one later token of a stream without a graph, whose step may write sums in place, or ""."""
    stream = sums.stream
    if stream is None or sums.q.shape[-2] > 1 or not stream.sums:
        return "a step is one token after others"
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in sums.tensors)):
        return "a step has no gradients, and no compiler traces it"
    if sums.denominator == "column":
        return "a step always divides"
    if sums.g is not None and (sums.g[0] is not sums.g[1] or stream.before is None):
        return "a step has one log decay, and another before it"
    return ""


def check_gradient(grad: Tensor, q: Tensor) -> None:
    """RuntimeError unless a gradient is one, of numbers if queries have them, as `FakeTensor`s of other modes have not."""
    if is_legacy_batchedtensor(grad):
        raise RuntimeError(f"linear_attention: expected one gradient, got several (is_grads_batched=True); {REMEDY}")
    if isinstance(grad, FakeTensor) is not isinstance(q, FakeTensor):
        raise RuntimeError("linear_attention: expected a gradient of numbers, got a FakeTensor, or one for FakeTensors")


class _Differentiable(torch.autograd.Function):
    """The sums of a kernel. Saves the operands and the tensors that the kernel returns."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, sums: Sums, *inputs: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[2:]
        out, saved = kernel.forward(sums, needs)
        if not any(needs):
            return out
        ctx.save_for_backward(*inputs, *saved)
        none = torch.empty(0)
        ctx.kernel, ctx.count = kernel, len(inputs)
        ctx.sums = replace(sums, q=none, k=none, v=none, g=None)  # hooks may move large saved tensors
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        once("linear_attention", "isopos.attention.naive_linear_attention")
        saved = ctx.saved_tensors
        sums = with_operands(ctx.sums, saved[: ctx.count])
        check_gradient(grads[0], sums.q)
        with full_precision(sums.q.device):
            grad = grads[0] if sums.stream is None else grads
            kept = [x.contiguous() for x in saved[ctx.count :]]  # hooks of saved tensors may lay them out in other ways
            derivatives = ctx.kernel.backward(sums, kept, grad, ctx.needs_input_grad[2:])
        return None, None, *derivatives
