"""Steps of a stream on CUDA devices by Triton: sums are read once and written once, by `TritonSteps` in place.

Sums and arithmetic are float32 for every dtype of queries, keys and values.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.ops import gpu
from isopos.ops.library import flat
from isopos.ops.linear.autograd import Backend, refuses_step
from isopos.ops.linear.division import count, counted
from isopos.ops.linear.features import Features, Sums
from isopos.ops.linear.triton import TritonFeatures

TILE = 2048  # numbers of the sums that a program holds at a time
WIDEST = 1024  # largest number of features per head
MOST = (1 << 31) - 1  # rows without tables


class StepSide(NamedTuple):
    """Queries, keys or values with their feature map (phi, a reflection, then a table), as arguments of the kernel.

    `of_x` and so on are strides of samples, heads and tokens.
    """

    x: Any
    table: Any = None  # cosines and sines, or an index
    normal: Any = None
    mask: Any = None
    of_x: tuple[int, int, int] = (0, 0, 0)
    of_table: tuple[int, int, int] = (0, 0, 0)
    of_normal: tuple[int, int, int] = (0, 0, 0)
    of_mask: tuple[int, int, int] = (0, 0, 0)


class SideKind(NamedTuple):
    """Compile-time constants of a side."""

    phi: str
    kind: str
    reflected: bool
    masked: bool


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of samples, heads and tokens of x ``[*b h t .]`` with at most one axis of samples; zero for length 1."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    sample, head, token, _ = [0, *strides][-4:]
    return sample, head, token


def _side(features: Features, x: Tensor) -> tuple[StepSide, SideKind] | None:
    """The arguments and constants for features of x; None if the kernel does not compute them."""
    closed = TritonFeatures.of(features)
    if closed is None or not closed.widths <= {x.shape[-1]} or features.dtype not in (None, torch.float32):
        return None
    table, normal, mask, x = closed.table, closed.normal, features.mask, flat(x)
    dtypes = (torch.uint8 if closed.kind == "gather" else torch.float32, torch.float32)
    if any(a is not None and a.dtype != dtype for a, dtype in zip((table, normal), dtypes, strict=True)):
        return None
    if table is not None:
        table = flat(table if closed.kind == "gather" else table.flatten(-2))
    normal = None if normal is None else flat(normal)
    strides = ((0, 0, 0) if a is None else _strides(a) for a in (x, table, normal, mask))
    side = StepSide(x, table, normal, None if mask is None else mask.view(torch.uint8), *strides)
    return side, SideKind(closed.phi, closed.kind, normal is not None, mask is not None)


class StepPlan(NamedTuple):
    """A checked step: all arguments of the kernel except sums and outputs."""

    sides: tuple[StepSide, ...]
    kinds: tuple[SideKind, ...]
    leading: torch.Size
    d: int  # features
    w: int  # numbers of x per head
    e: int
    unrotated: bool
    denominated: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the sums."""
        column = self.denominated and not self.unrotated
        return [(*self.leading, self.d, self.e + column), *[(*self.leading, self.w, 1)] * self.unrotated]

    def __call__(
        self,
        sides: Sequence[StepSide],
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        weights: Tensor | None,
        rows: Tensor | None,
        out: Tensor,
        length: int = 1,
    ) -> None:
        """Write the sums after a token, and its output.

        `rows` are the rows of the token in tables of `length` rows, one per state; they are counted up.
        """
        from isopos.ops.linear.triton_step_kernel import step  # imports triton

        denominators = out.new_empty(self.leading, dtype=torch.float32) if self.denominated and counted() else None
        power, values = 1 << (self.w - 1).bit_length(), 1 << (self.e - 1).bit_length()
        across = self.leading.numel()
        kinds = {f"OF_{name}": tuple(kind) for name, kind in zip("QKV", self.kinds, strict=True)}
        with torch.cuda.device_of(out):
            step[(across,)](
                *sides,
                (before[0], before[-1]),
                (after[0], after[-1]),
                weights,
                out,
                denominators,
                self.leading[-1],
                rows,
                length,
                across,
                D=self.d,
                W=self.w,
                WP=power,
                E=self.e,
                EP=values,
                C=max(1, min(1 << (self.d - 1).bit_length(), TILE // values)),
                **kinds,
                DECAYS=weights is not None,
                DENOMINATED=self.denominated,
                UNROTATED=self.unrotated,
                COUNTED=denominators is not None,
            )
        if denominators is not None:
            count(denominators)


class Step(Backend):
    """One token of a stream in one launch."""

    name = "triton step"

    def serves(self, sums: Sums) -> str:
        return self._plan(sums)[1]

    def _plan(self, sums: Sums) -> tuple[StepPlan | None, str]:
        if why := refuses_step(sums) or gpu.unreadable("step", *sums.tensors):
            return None, why
        (q, k, v), stream = sums.inputs, sums.stream
        assert stream is not None
        if sums.dtype != torch.float32:
            return None, "a step sums up float32"
        (*leading, _, width), e = q.shape, v.shape[-1]
        if k.shape != q.shape or v.shape[:-1] != q.shape[:-1] or math.prod(leading[:-2]) > 1 or max(width, e) > WIDEST:
            return None, f"a step has one state per query, one axis of samples, and at most {WIDEST} features"
        pairs = zip(sums.features, sums.inputs, strict=True)
        known = [side for features, x in pairs if (side := _side(features, x)) is not None]
        if (
            len(known) < 3
            or known[2][1][:3] != ("identity", "none", False)
            or any(x.dtype == torch.float64 for x in sums.inputs)
        ):
            return None, "a step makes features in closed form, of float32, bfloat16 or float16"
        sides, kinds = zip(*known, strict=True)
        doubled = [2 if own.kind == "lift" else 1 for own in kinds]
        unrotated, denominated = sums.features[0].unrotated, sums.denominator is not None
        plan = StepPlan(sides, kinds, torch.Size(leading), width * doubled[0], width, e, unrotated, denominated)
        fit = [tuple(x.shape) for x in stream.sums if x.is_contiguous() and x.dtype == torch.float32] == plan.shapes
        if doubled[0] != doubled[1] or not fit:
            return None, f"a step needs contiguous float32 sums {plan.shapes}, for queries and keys alike"
        sums.notes["plan"] = plan
        return plan, ""

    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        plan, v, stream = sums.notes["plan"], sums.v, sums.stream
        assert stream is not None
        after = tuple(torch.empty_like(x) for x in stream.sums)
        out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        plan(plan.sides, stream.sums, after, sums.across, None, out)
        return out, after


STEP = Step()


class TritonSteps:
    """Steps that update the sums of a stream in place, one launch each.

    The kernel counts the rows of the tables itself, and later tables are copied to the memory of the first ones. So a step
    that a CUDA graph has captured is the next one at each replay, as long as there are rows.

    Args:
        sums: One step that `STEP` serves. The sums of its stream are overwritten from then on.

    Attributes:
        sums: Sums over all tokens so far.
        few: As in `isopos.ops.linear.cpu.CpuSteps`.
    """

    few = 4

    def __init__(self, sums: Sums):
        assert sums.stream is not None
        self.plan: StepPlan = sums.notes["plan"]
        self.sums, self.inputs, self.weights = sums.stream.sums, sums.inputs, None
        self.sides: tuple[StepSide, ...] = (StepSide(None), StepSide(None), self.plan.sides[2])
        self.rows = torch.zeros(self.plan.leading.numel(), dtype=torch.int32, device=sums.q.device)
        self.row, self.length = 0, MOST  # the number in `rows`, and how many rows there are

    @classmethod
    def of(cls, sums: Sums) -> "TritonSteps | None":
        """The steps after this one; None if the kernel does not serve them."""
        return cls(sums) if sums.stream is not None and not STEP.serves(sums) else None

    def look_ahead(self, features: tuple[Features, Features], weights: Tensor | None) -> None:
        """Set the tables of the next n tokens, as in `isopos.ops.linear.cpu.CpuSteps`."""
        found = [side[0] for each, x in zip(features, self.inputs, strict=False) if (side := _side(each, x)) is not None]
        assert len(found) == 2
        shared = found[0].table is not None and found[1].table is not None and _same(found[0].table, found[1].table)
        for n, (old, new) in enumerate(zip(self.sides, found, strict=False)):
            table = found[0].table if n and shared else _overwritten(old.table, new.table)
            normal, strides = _overwritten(old.normal, new.normal), (0, 0, 0) if table is None else _strides(table)
            found[n] = new._replace(table=table, of_table=strides, normal=normal)
        lengths = [x.table.shape[-2] for x in found if x.table is not None] + ([] if weights is None else [weights.shape[0]])
        self.length = min((length for length in lengths if length > 1), default=MOST)  # one row stands for any number
        self.sides, self.weights = (*found, self.plan.sides[2]), _overwritten(self.weights, weights)
        self._start(0)

    def _start(self, row: int) -> None:
        """Set the row of the next token."""
        self.rows, self.row = _overwritten(self.rows, torch.full_like(self.rows, row)), row

    def fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the plan serves these tensors: types, shapes and dtypes of the first step, outside transforms."""
        inputs = (q, k, v)
        for x, known in zip(inputs, self.inputs, strict=True):
            if type(x) is not Tensor or x.shape != known.shape or x.dtype != known.dtype or x.stride(-1) != 1:
                return False
        return not gpu.unreadable("step", *inputs, *self.sums)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        """The output ``[*b h 1 e]`` of the token with row n of the tables, in q's dtype."""
        if n != self.row:
            self._start(n)
        out = torch.empty(v.shape, dtype=q.dtype, device=v.device)
        sides = [side._replace(x=x, of_x=_strides(x)) for side, x in zip(self.sides, (q, k, v), strict=True)]
        self.plan(sides, self.sums, self.sums, self.weights, self.rows, out, self.length)
        self.row += 1
        return out


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _overwritten(old: Any, new: Any) -> Any:
    """The old tensor with the numbers of the new one, or a copy of the new one if they do not fit in there."""
    if (
        old is None
        or new is None
        or old.shape != new.shape
        or (old.is_inference() and not torch.is_inference_mode_enabled())
    ):
        return None if new is None else new.contiguous().clone()
    return old.copy_(new)
