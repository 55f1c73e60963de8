"""Plans of calls: the launches of a pass, repeated for other tensors of the same shapes, strides, dtypes and alignments.

Python takes longer to prepare launches than a GPU takes for short sequences. The second pass of a kind is recorded; later
ones only allocate memory and launch. A pass with other operations between its launches has no plan.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from isopos.ops.gpu import interpreted

MOST = 1024  # plans, which hold no tensors; the oldest is forgotten
SEEN, NONE = "seen", "no plan"
PLANS: dict[Any, Any] = {}  # a `PassPlan`, SEEN once, or NONE
_RECORDER: ContextVar["_Recorder | None"] = ContextVar("recorder", default=None)
_LOCK = Lock()  # of writes: several threads may call
_ATEN = torch.ops.aten
_MAKES = {_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default, _ATEN.new_empty.default}


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
    """Launch a kernel with its arguments in order, then its constants and options by name."""
    recorder = _RECORDER.get()
    if recorder is None:
        kernel[grid](*given, **constants)
    else:
        recorder.launch(kernel, grid, given, constants)


def layouts(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """All of tensors on which launches depend, except addresses; tensors with one address are told from others."""
    places = [x.data_ptr() for x in tensors]
    return tuple(
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, place % 16, places.index(place))
        for x, place in zip(tensors, places, strict=True)
    )


def planned(key: Any, inputs: Sequence[Tensor], run: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
    """The results of a pass, by its plan if there is one; `inputs` are all tensors that it reads.

    Args:
        key: All that its launches depend on, with `layouts` of the inputs; None for a pass without a plan.
        inputs: All tensors that it reads.
        run: The pass.
    """
    if key is None:
        return run()
    plan = PLANS.get(key)
    if isinstance(plan, PassPlan):
        return plan(inputs)
    if plan == SEEN:
        with _Recorder() as recorder:
            results = run()
        _keep(key, recorder.plan(inputs, results) or NONE)
        return results
    if plan is None:
        _keep(key, SEEN)
    return run()


def _keep(key: Any, plan: Any) -> None:
    """Keep a plan, in place of the oldest one if there are too many."""
    with _LOCK:
        if key not in PLANS and len(PLANS) >= MOST:
            del PLANS[next(iter(PLANS))]
        PLANS[key] = plan


class PassPlan(NamedTuple):
    """A recorded pass.

    Attributes:
        buffers: Size, strides and dtype of each tensor that it allocates.
        launches: Functions that launch, and functions that make their arguments from inputs and buffers.
        results: Indices of the results among inputs and buffers.
    """

    buffers: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    launches: list[tuple[Callable[..., Any], Callable[[list[Tensor]], Any]]]
    results: list[int | None]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The results for other inputs."""
        device = inputs[0].device
        made = (torch.empty_strided(size, strides, dtype=dtype, device=device) for size, strides, dtype in self.buffers)
        tensors = [*inputs, *made]
        for run, arguments in self.launches:
            run(*arguments(tensors))
        return [None if n is None else tensors[n] for n in self.results]


class _Recorder(TorchDispatchMode):
    """Records launches and allocations of a pass, and whether there are other operations."""

    def __init__(self):
        super().__init__()
        self.launches: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.made: list[Tensor] = []
        self.pure = True

    def __enter__(self) -> "_Recorder":
        self.token = _RECORDER.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _RECORDER.reset(self.token)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MAKES:
            self.made.append(out)
        elif not func.is_view:
            self.pure = False
        return out

    def launch(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Launch a kernel. A compiled variant is launched directly from now on, without Triton's search for it."""
        with _disable_current_modes():
            compiled = kernel[grid](*given, **constants)
        if compiled is None:  # interpreted
            self.launches.append((partial(kernel[grid], **constants), given))
        else:
            rest = (constants[name] for name in kernel.arg_names[len(given) :])
            self.launches.append((compiled[*grid, *(1,) * (3 - len(grid))], (*given, *rest)))

    def plan(self, inputs: Sequence[Tensor], results: list[Tensor | None]) -> PassPlan | None:
        """The plan, or None if there were other operations, or tensors that are not whole inputs or allocations."""
        known: dict[int, int] = {}
        for n, x in enumerate((*inputs, *self.made)):
            known.setdefault(x.data_ptr(), n)
        tensors = [*inputs, *self.made]
        try:
            places = [None if x is None else known[x.data_ptr()] for x in results]
            launches = [(run, _maker(given, known, tensors)) for run, given in self.launches]
        except KeyError:
            return None
        pairs = ((x, tensors[n]) for x, n in zip(results, places, strict=True) if x is not None and n is not None)
        whole = all(x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype for x, y in pairs)
        return (
            PassPlan([(x.size(), x.stride(), x.dtype) for x in self.made], launches, places) if self.pure and whole else None
        )


def _maker(given: Any, known: dict[int, int], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """A function that makes arguments like the given ones, which hold tensors, from others; KeyError for unknown tensors.

    It makes plain tuples, which take less time: only interpreted kernels ask for names of fields.
    """
    if isinstance(given, Tensor):
        n, dtype = known[given.data_ptr()], given.dtype
        return itemgetter(n) if tensors[n].dtype == dtype else (lambda all: all[n].view(dtype))
    makers = {n: _maker(part, known, tensors) for n, part in enumerate(given) if _holds_tensor(part)}
    named = getattr(type(given), "_make", tuple) if interpreted() else tuple
    if list(makers) == [0] and named is tuple:  # a tensor and its strides
        first, rest = makers[0], tuple(given[1:])
        return lambda all: (first(all), *rest)

    fixed = [None if n in makers else part for n, part in enumerate(given)]  # a plan keeps no tensor

    def make(all: list[Tensor]) -> tuple[Any, ...]:
        parts = [*fixed]
        for n, part in makers.items():
            parts[n] = part(all)
        return named(parts)

    return make


def _holds_tensor(given: Any) -> bool:
    return isinstance(given, Tensor) or (isinstance(given, tuple) and any(map(_holds_tensor, given)))
