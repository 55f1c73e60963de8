"""Whole calls of the C kernel, planned once and repeated: one call of the library per pass, and few tensors.

A plan holds everything of a call but addresses. It serves tensors with the shapes, strides, dtypes and needs of gradients of
the problem that it was made from, which the caller compares.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isopos.exact import once
from isopos.ops import library
from isopos.ops.library import KIND, Call, flat, view
from isopos.ops.linear.autograd import check_gradient, needs, operands, with_operands
from isopos.ops.linear.cpu import CPU, CpuScan, Pass
from isopos.ops.linear.division import count
from isopos.ops.linear.features import Sums

WORD = 8  # bytes
Words = ctypes.c_int64 * (ctypes.sizeof(Call) // WORD + 1)  # a call, and its status


def _word(*names: str) -> int:
    """Index of a field of a call in `Words`."""
    at, kind = 0, Call
    for name in names:
        at, kind = at + getattr(kind, name).offset, {field: inner for field, inner, *_ in kind._fields_}[name]  # pyright: ignore
    return at // WORD


INPUTS = "q", "k", "v"
X, GRAD, GRAD_TABLE = ([_word(each, name, "first") for each in INPUTS] for name in ("x", "grad", "grad_table"))
OUT, DENOMINATOR, OF_OUT = _word("out", "sums", "first"), _word("out", "denominator", "first"), _word("out", "grad")
STATE, SAVED, OF_STATE = _word("state"), _word("saved"), _word("grad_state")
SCRATCH, TOTALS, STATUS = _word("split", "scratch"), _word("split", "totals"), _word("status")


class CpuPlan:
    """Sums over all tokens of problems that are alike. It is not changed by calls, so that threads may share it."""

    def __init__(self, sums: Sums, scan: CpuScan, pointers: Sequence[tuple[int, int]], needed: Sequence[bool], part: Pass):
        call, split, like = part.call, part.call.split, sums.q.new_empty(0, dtype=torch.float32)
        run = "forward_all" if scan.all_keys else "forward", "backward_all" if scan.all_keys else "backward"
        self.forward_of, self.backward_of = (getattr(part.library, f"isopos_{name}") for name in run)
        self.pointers, self.all_keys, self.graph = pointers, scan.all_keys, any(needed)
        self.shape, self.row = torch.Size((*sums.q.shape[:-1], sums.v.shape[-1])), torch.Size((*sums.q.shape[:-1], 1))
        self.saved = [torch.Size((*sums.q.shape[:-2], *shape)) for shape in part.shapes]
        self.states = [torch.Size((*sums.q.shape[:-2], *shape[1:])).numel() for shape in part.shapes]
        self.scratch, totals = split.threads * split.scratch_size, call.size.all * split.parts * split.total_size
        self.totals, self.denominated = totals if split.parts > 1 else 0, scan.denominator
        call.out.sums, call.size.values = view(like.new_empty(self.shape)), self.shape[-1]
        call.flags.divide = scan.denominator
        if scan.denominator:
            call.out.denominator = view(like.new_empty(self.row))
        self.forward_words = bytes(call) + bytes(WORD)
        self.learned: list[tuple[int, int, int]] = []  # of tables: index of the input, index in `inputs`, width of gradients
        first = 5
        for n, (operand, each) in enumerate(zip(scan.operands, (call.q, call.k, call.v), strict=True)):
            each.grad = view(torch.empty_like(operand.x, memory_format=torch.contiguous_format))
            if operand.table is not None:
                width = each.numbers * (2 if each.kind == KIND["lift"] else 1)
                each.grad_table = view(like.new_empty(*operand.x.shape[:-1], width))
                self.learned.append((n, first + operand.table, width))
            first += len(operand.features.tensors)
        self.backward_words = bytes(call) + bytes(WORD)
        self.signatures = [None if x is None else (x.shape, x.stride(), x.dtype) for x in operands(sums)]
        self.sums = with_operands(sums, [None if x is None else x.new_empty(0) for x in operands(sums)])  # keeps none alive

    @classmethod
    def of(cls, sums: Sums) -> "CpuPlan | None":
        """The plan of a problem that the C kernel serves; None if it takes several scans, or tensors need a copy."""
        needed, tensors, (inputs, buffers) = needs(sums), operands(sums), sums.notes["operands"]
        closed = sums.notes["closed"]
        if any(needed[3:5]) or any(each is None or each.mask is not None for each in closed):
            return None
        plan = CPU.plan(sums, inputs)
        if not plan.whole:
            return None
        scan, *others = CPU.scans(inputs, plan, sums.g, buffers, sums)
        if others or sums.denominator == "column":
            return None
        assert isinstance(scan, CpuScan)
        part, n, pointers = Pass(scan, 0), 5, []
        part._prepare(scan.g, (sums.q, sums.q), ())
        if sums.g is not None:
            pointers = [(_word("decay", "query"), 3), (_word("decay", "key"), 4)]
        for m, (name, each) in enumerate(zip(INPUTS, closed, strict=True)):
            pointers.append((X[m], m))
            known = [id(x) for x in inputs[m].features.tensors]
            for field, x in (("table", each.table), ("normal", each.normal)):
                pointers += [] if x is None else [(_word(name, field), n + known.index(id(x)))]
            n += len(known)
        words = Words.from_buffer_copy(bytes(part.call) + bytes(WORD))
        if any(x is None or words[at] != x.data_ptr() for at, x in ((at, tensors[m]) for at, m in pointers)):
            return None  # the call reads a copy
        return cls(sums, scan, pointers, needed, part)

    def __call__(self, inputs: Sequence[Any]) -> Tensor | None:
        """Sums ``[*b h t e]`` of tensors in the order of `operands`, divided if asked for; None if one is not finite."""
        like, call, denominators = inputs[0], Words.from_buffer_copy(self.forward_words), ()
        out = like.new_empty(self.shape, dtype=torch.float32)
        state = like.new_zeros(1, sum(self.states), dtype=torch.float32)  # of all keys, or before the tokens
        call[OUT], call[STATE], call[STATE + 1] = out.data_ptr(), *_pair(state, self.states[0])
        if self.denominated:
            denominators = (like.new_empty(self.row, dtype=torch.float32),)
            call[DENOMINATOR] = denominators[0].data_ptr()
        saved = state
        if self.graph:
            if not self.all_keys:
                saved = like.new_empty(1, sum(shape.numel() for shape in self.saved), dtype=torch.float32)
            call[SAVED], call[SAVED + 1] = _pair(saved, self.saved[0].numel())
        if not self._run(self.forward_of, call, inputs):
            return None
        for denominator in denominators:
            count(denominator)
        return _Planned.apply(self, (out,), (saved, *denominators), *inputs) if self.graph else out

    def backward(self, inputs: Sequence[Any], results: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]) -> list[Any]:
        """Gradients of `inputs`; `results` are the states, and with a division also denominators and the output."""
        if not self._fits(inputs, results, grad):
            results = [x.contiguous() for x in results]
            parts = results[0].split([shape.numel() for shape in self.saved], -1)
            states = [x.view(shape) for x, shape in zip(parts, self.saved, strict=True)]
            return CPU.backward(with_operands(self.sums, inputs), [*results[:0:-1], *states], grad, needed)
        call, grad = Words.from_buffer_copy(self.backward_words), flat(grad)
        seen, state = view(grad), grad.new_zeros(sum(self.states))
        call[OF_OUT : OF_OUT + 4] = seen.first, seen.sample, seen.head, seen.token
        call[SAVED], call[SAVED + 1] = _pair(results[0], self.saved[0].numel())
        call[OF_STATE], call[OF_STATE + 1] = _pair(state, self.states[0])
        if self.denominated:
            call[DENOMINATOR], call[OUT] = results[1].data_ptr(), results[2].data_ptr()
        grads: list[Any] = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]]
        for at, x in zip(GRAD, grads, strict=True):
            call[at] = x.data_ptr()
        tables = [grad.new_empty(*grads[n].shape[:-1], width) for n, _, width in self.learned]
        for (n, _, _), table in zip(self.learned, tables, strict=True):
            call[GRAD_TABLE[n]] = table.data_ptr()
        self._run(self.backward_of, call, inputs)
        grads += [None] * (len(inputs) - 3)
        for (_, m, _), table in zip(self.learned, tables, strict=True):
            grads[m] = table.unflatten(-1, (-1, 2)).sum_to_size(inputs[m].shape)
        return grads

    def _run(self, function: Any, call: Any, inputs: Sequence[Any]) -> bool:
        """Call the library; returns whether all sums are finite."""
        for at, n in self.pointers:
            call[at] = inputs[n].data_ptr()
        buffer = inputs[0].new_empty(self.scratch + self.totals, dtype=torch.float32)
        call[SCRATCH], call[TOTALS] = buffer.data_ptr(), buffer.data_ptr() + 4 * self.scratch
        call[STATUS] = ctypes.addressof(call) + ctypes.sizeof(Call)
        function(call)
        return library.sums_finite(call[-1])

    def _fits(self, inputs: Sequence[Any], results: Sequence[Tensor], grad: Tensor) -> bool:
        """Whether saved tensors come back as they were; hooks may have changed them."""
        if library.unreadable(grad, *results, *(x for x in inputs if x is not None)):
            return False
        alike = (
            x is None or (x.shape, x.stride(), x.dtype) == known for x, known in zip(inputs, self.signatures, strict=True)
        )
        return all(alike) and all(x.is_contiguous() for x in results)


def _pair(x: Tensor, size: int) -> tuple[int, int]:
    """Addresses of x and of its numbers after the first `size`."""
    first = x.data_ptr()
    return first, first + 4 * size


class _Planned(torch.autograd.Function):
    """The output of a plan with its graph."""

    @staticmethod
    def forward(ctx: Any, plan: CpuPlan, outs: tuple[Tensor], results: tuple[Tensor, ...], *inputs: Tensor | None) -> Tensor:
        (out,) = outs  # in a tuple, since a tensor would be an input
        ctx.plan, ctx.count = plan, len(inputs)
        ctx.save_for_backward(*inputs, *results, *((out,) if plan.denominated else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        once("linear_attention", "isopos.attention.naive_linear_attention")
        saved, n = ctx.saved_tensors, ctx.count
        check_gradient(grad, saved[0])
        return None, None, None, *ctx.plan.backward(saved[:n], saved[n:], grad, ctx.needs_input_grad[3:])
