"""One sequence over a group of threads with separate Gloo groups, or of processes, compared with one process."""

import copy
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ATTENTION, SchemeCase, inputs_of, named, parents_first, perturb
from structures import covering
from torch import Tensor, nn
from torch._C import _distributed_c10d as distributed

import isopos
from isopos.parallel import Ring, Shards
from isopos.phases import HouseholderProduct

CPU, GLOO = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
SHARDS = (4, 2, 3)
IDS = torch.tensor([5, 5, 5, 1, 1, 1, 1, 2, 2])  # a border inside a shard, one between shards, one inside again


def group_of(store: Any, rank: int, size: int) -> dist.ProcessGroup:
    """A member's view of a group."""
    group = dist.ProcessGroup(distributed.PrefixStore("group", store), rank, size)
    group._set_default_backend(GLOO)
    backend = dist.ProcessGroupGloo(distributed.PrefixStore("gloo", store), rank, size, timedelta(seconds=30))
    group._register_backend(CPU, GLOO, backend)
    return group


def on_ranks(size: int, run: Callable[[Any, int], Any]) -> list[Any]:
    """Results of ``run(group, rank)`` on `size` ranks, which are threads; raises the first error."""
    store, found, errors = distributed.HashStore(), [None] * size, list[BaseException]()

    def member(rank: int) -> None:
        try:
            found[rank] = run(group_of(store, rank, size), rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def gradients(loss: Tensor, model: nn.Module) -> tuple[Tensor | None, ...]:
    """Gradients of all parameters of a model."""
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def compare_losses(
    model: nn.Module, run: Callable[..., Tensor], size: int, kind: Any, over: Callable[..., Any], error: float, mean: bool
) -> None:
    """Assert that losses of shards and their gradients have the sum, or the mean, that one process computes.

    ``run(model, group)`` is the loss of whole samples, where the group is None, or of a member's shard in the context
    ``over(model, group)``. The group is ``kind(group)`` of a group of `size` threads.
    """
    loss = run(model, None)
    expected, models = gradients(loss, model), [copy.deepcopy(model) for _ in range(size)]

    def member(group: Any, rank: int) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        group = kind(group)
        with over(models[rank], group):
            own = run(models[rank], group)
        return own.detach(), gradients(own, models[rank])

    losses, grads = zip(*on_ranks(size, member), strict=True)
    share = size if mean else 1
    assert sum(losses).item() / share == pytest.approx(loss.item(), abs=error)
    for right, *found in zip(expected, *grads, strict=True):
        if right is not None:
            torch.testing.assert_close(sum(found) / share, right, rtol=0, atol=error * max(1, right.abs().max().item()))


@dataclass
class Whole:
    """Attention of a whole sequence by one process, with gradients: the reference of its shards."""

    scheme: Any
    content: Sequence[Tensor]
    x: Tensor
    causal: bool
    options: dict[str, Tensor | int]
    weight: Tensor  # of the outputs, in the sum that gradients are of
    y: Tensor = field(init=False)
    grads: list[Tensor] = field(init=False)
    rounding: list[float] = field(init=False)  # errors of one process in float32, of the output and of gradients

    @classmethod
    def of(
        cls, case: SchemeCase, kind: str, causal: bool, t: int, dtype: torch.dtype = torch.float64, **options: Any
    ) -> "Whole":
        scheme = perturb(case.build(attention=kind))
        content = [a.to(dtype) for a in inputs_of(scheme, 2, t=t)]
        x, mask = parents_first(scheme.group, case.positions(2, t=t)), torch.rand(2, t) < 0.8
        whole = cls(
            scheme, content, x, causal, {"mask": mask} | options, torch.randn(2, len(content[0][0]), t, 1, dtype=dtype)
        )
        whole.y, whole.grads = whole.run(slice(0, t))
        whole.rounding = [0.0] * (1 + len(whole.grads))
        if dtype == torch.float32:
            wide = replace(whole, scheme=copy.deepcopy(scheme).double(), content=[a.double() for a in content])
            wide.weight = whole.weight.double()
            y, grads = wide.run(slice(0, t))
            both = zip((whole.y, *whole.grads), (y, *grads), strict=True)
            whole.rounding = [(found - right).abs().max().item() for found, right in both]
            whole.y, whole.grads = y, grads
        return whole

    def run(self, part: slice | Tensor, group: Any = None) -> tuple[Tensor, list[Tensor]]:
        """Outputs of some tokens, and the gradients of their content and of the parameters."""
        content = [a[..., part, :].clone().requires_grad_() for a in self.content]
        options = {name: a[..., part] if isinstance(a, Tensor) else a for name, a in self.options.items()}
        at = self.scheme.at(self.x[..., part, :], dtype=content[0].dtype, group=group)
        y = ATTENTION[self.scheme.attention](*content, **at, **options, causal=self.causal)
        leaves = [*content, *self.scheme.parameters()]
        grads = torch.autograd.grad((y * self.weight[..., part, :]).sum(), leaves, allow_unused=True)
        return y.detach(), [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]

    def compare(self, group: Any, lengths: Sequence[int], error: float) -> None:
        """Assert that a member's shard of outputs, and all gradients, equal the whole's, up to a relative error.

        In float32 the reference is float64, and the tolerance adds four times the float32 error of one process.
        """
        member = getattr(group, "group", group)
        part = Shards(group, lengths[member.rank()], CPU).index
        y, grads = self.run(part, group)
        expected = [self.y[..., part, :], *(grad[..., part, :] for grad in self.grads[:3]), *self.grads[3:]]
        most = max(1.0, *(grad.abs().max().item() for grad in self.grads))
        grads[3:] = [grad.contiguous() for grad in grads[3:]]  # Gloo's sum of others is wrong, without an error
        for grad in grads[3:]:
            dist.all_reduce(grad, group=member)
        for n, (found, right) in enumerate(zip((y, *grads), expected, strict=True)):
            scale = max(1.0, right.abs().max().item()) if n == 0 else most
            far = (found - right).abs().max()
            assert far <= error * scale + 4 * self.rounding[n], f"{n}: {far / scale}, {self.rounding[n]} by one process"


def settings(case: SchemeCase, kind: str) -> list[dict[str, Any]]:
    """Options that a structure supports: none, packed sequences, a window."""
    plain = case.clipped and kind == "linear"
    packed = [] if plain and case.outside else [{"segment_ids": IDS}]
    return [{}, *packed, *([] if plain else [{"window": 3}])]


def lengths_of(size: int, t: int) -> list[int]:
    """Shards of different lengths."""
    return [t // size + (rank < t % size) for rank in reversed(range(size))]


def main() -> None:
    """Structures of arguments in all settings, and all isometries without options, in groups of 4 processes.

    Each structure without its isometry is in groups of 2, 3 and 4. In float64; without options in float32, too; and softmax
    attention round a ring and in zig-zag shards.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), 0
    groups = [dist.new_group(range(size)) for size in (2, 3, 4)]
    others, isometries = (list(filter(is_sharded, rows)) for rows in covering())
    chosen = [(row, [*itertools.product(row[0].ways, settings(*row))]) for row in others]
    chosen += [(row, [(causal, {}) for causal in row[0].ways]) for row in isometries]
    for n, ((case, kind), rows) in enumerate(chosen):
        for causal, options in rows * (1 if len(rows) > 2 or n >= len(others) else 3):
            size = 2 + count % 3
            count += 1
            if rank < size:
                with named(f"{case.id}-{kind} {causal} {[*options]} in {size}"):
                    _compare(case, kind, causal, options, groups[size - 2])
    profiled = overlap(groups[0]) if rank < 2 else {}
    if rank == 0:
        print(f"{count} cases in groups of 2, 3 and 4 processes; overlap {json.dumps(profiled)}")
    dist.destroy_process_group()


def is_sharded(pair: tuple[SchemeCase, str]) -> bool:
    """Whether processes may share a sequence; a Householder product is refused."""
    case, kind = pair
    return not isinstance(case.build(attention=kind).turn, HouseholderProduct)


def _compare(case: SchemeCase, kind: str, causal: bool, options: dict[str, Any], group: Any) -> None:
    t, lengths = len(IDS), lengths_of(group.size(), len(IDS))
    torch.manual_seed(0)
    whole = Whole.of(case, kind, causal, t, **options)
    whole.compare(group, lengths, 1e-12)
    if kind == "softmax":
        whole.compare(Ring(group), lengths, 1e-12)
    if kind == "softmax" and unordered(case):
        whole.compare(Ring(group, zigzag=True), lengths, 1e-12)
    if not options:
        torch.manual_seed(0)
        Whole.of(case, kind, causal, t, torch.float32).compare(group, lengths, 1e-6)


def overlap(group: Any) -> dict[str, list[float]]:
    """Start and end in ms, in a profile of both passes, of each collective, the sums over local keys, and the wait."""
    t, names = 1024, {"c10d::_allgather_base_": "sent", "_Differentiable": "sums", "_Finish": "awaited"}
    names |= {"c10d::alltoall_base_": "sent back", "_DifferentiableBackward": "sums back", "_StartBackward": "awaited back"}
    content = torch.randn(3, 1, 8, t, 64, requires_grad=True)
    at = isopos.retnet(64, 8, denominator="encoded").at(isopos.sequence(t) + group.rank() * t, group=group)
    for _ in range(2):  # the first time warms up
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            isopos.linear_attention(*content, **at, causal=True).sum().backward()
    times = {event.name: event.time_range for event in profile.events()}
    return {kind: [times[name].start / 1000, times[name].end / 1000] for name, kind in names.items()}


def unordered(case: SchemeCase) -> bool:
    """Whether softmax attention with a scheme takes zig-zag shards."""
    scheme = case.build(attention="softmax")
    return not (scheme.group.refers_to_rows or scheme.outside or scheme.phases)
