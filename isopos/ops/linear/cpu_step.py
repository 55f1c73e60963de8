"""Steps of a stream in the C kernel: what one step was checked for holds for those after it."""

import torch
from torch import Tensor

from isopos.ops import library
from isopos.ops.library import State, view
from isopos.ops.linear.cpu import CPU, Closed
from isopos.ops.linear.division import count, counted
from isopos.ops.linear.features import Features, Sums

__all__ = ["CpuSteps"]


class CpuSteps:
    """Steps that write over the sums of a stream, one call of the library each.

    Args:
        sums: One step, which the C kernel serves; its stream's sums are written over from then on.

    Attributes:
        sums: Those of all tokens so far.
    """

    def __init__(self, sums: Sums):
        assert sums.stream is not None
        lib, (*_, values), self.call = sums.notes["step"]
        call, self.step, self.sums = self.call, lib.isopos_step, sums.stream.sums
        self.inputs, self.shapes, self.strides = sums.inputs, [x.shape for x in sums.inputs], [()] * 3
        call.flags.denominated = sums.denominator is not None
        call.state = call.saved = State(self.sums[0].data_ptr(), self.sums[-1].data_ptr())
        self.parts = call.q, call.k, call.v
        values.describe(call.v, sums.v)
        call.out.sums = view(torch.empty_like(sums.v, memory_format=torch.contiguous_format))
        self.firsts = (*(part.x for part in self.parts), call.out.sums)  # of the call's own memory
        self.flags, self.split = call.flags, call.split

    @classmethod
    def of(cls, sums: Sums) -> "CpuSteps | None":
        """The steps after this one, if the C kernel serves them."""
        if sums.stream is None:
            return None
        library.warn_if_absent(why := CPU.serves(sums))
        return None if why else cls(sums)

    def look_ahead(self, features: tuple[Features, Features], weights: Tensor | None) -> None:
        """Take the tables of the next n tokens.

        Args:
            features: Those of queries and keys, with tables as the step had, of n tokens.
            weights: What the sums before each of these tokens weigh, float32 ``[n all]``; None where all weigh 1.
        """
        self.alive, self.strides = [weights], [()] * 3  # `describe` says where the first step's inputs lie
        for part, own, x in zip(self.parts, features, self.inputs, strict=False):
            closed = Closed.of(own, x)
            assert closed is not None
            self.alive += closed.describe(part, x)[1]
        self.call.decay.across = None if weights is None else weights.data_ptr()

    def fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these are what the step had, and nobody watches."""
        inputs = (q, k, v)
        for x, shape in zip(inputs, self.shapes, strict=True):
            if type(x) is not Tensor or x.shape != shape or x.dtype != torch.float32 or x.stride(-1) != 1:
                return False
        return not library.unreadable(*inputs)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        """The output ``[*b h 1 e]`` of the token that has row n of the tables."""
        call, inputs, out = self.call, (q, k, v), v.new_empty(v.shape)
        strides = [x.stride() for x in inputs]
        if strides != self.strides:
            self.strides = strides
            for part, x in zip(self.parts, inputs, strict=True):
                part.x = view(x)
        for x, own in zip((*inputs, out), self.firsts, strict=True):
            own.first = x.data_ptr()
        call.token, self.split.threads, denominator = n, torch.get_num_threads(), None
        if self.flags.denominated and counted():
            denominator = v.new_empty(*v.shape[:-1], 1)
            call.out.denominator = view(denominator)
        library.run(self.step, call)
        if denominator is not None:
            call.out.denominator.first = None
            count(denominator)
        return out
