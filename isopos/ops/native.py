"""The compiled tile, native.c: for float32 on Linux and x86-64, where installation found gcc.

It computes what `Walk` of tiles.py says with separate PyTorch operations, which serve everything else. Loads whose `formula`
it knows are part of it; others leave their operands in rows.
"""

import ctypes
import functools
import importlib.machinery
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

if TYPE_CHECKING:
    from isopos.ops.tiles import Decays, Formula, Operand, Room, Span, Upstream

LANES = {"AVX512": 16, "AVX2": 8}  # by instructions: what numbers of features are multiples of
WIDEST = 256  # features that its buffers hold
PAST = 1 << 24  # bytes of a result that is written past the cache
PHI = {name: n for n, name in enumerate(("identity", "elu+1", "relu", "relu2", "exp"))}
KIND = {name: n for n, name in enumerate(("none", "rotation", "lift", "gather"))}


class _View(ctypes.Structure):
    _fields_ = (("first", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("sample", "head", "token")))


class _Operand(ctypes.Structure):
    _fields_ = (
        *((name, _View) for name in ("x", "own", "grad", "grad_own", "kept", "normal", "table")),
        *((name, ctypes.c_long) for name in ("phi", "kind", "width", "add")),
        *((name, ctypes.c_void_p) for name in ("rows", "own_rows", "grad_decay")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("chunks", "count", "heads", "c", "d", "e", "own")),
        *((name, ctypes.c_long) for name in ("threads", "denominator", "divide", "begins")),
        *((name, _View) for name in ("g_q", "g_k")),
        *((name, ctypes.c_void_p) for name in ("state", "row", "states", "rows", "across")),
        *((name, _View) for name in ("out", "below", "grad")),
        *(
            (name, ctypes.c_void_p)
            for name in ("grad_state", "grad_row", "grad_states", "grad_rows", "grads", "less", "scratch")
        ),
        ("scratch_size", ctypes.c_long),
        ("out_of_range", ctypes.POINTER(ctypes.c_long)),
        *((name, _Operand) for name in ("q", "k", "v")),
    )


@functools.cache
def libraries() -> tuple[dict[int, ctypes.CDLL], str]:
    """The libraries for this processor by lanes, the most first; and which they are, or why there is none."""
    known = list(LANES)
    instructions = torch.backends.cpu.get_cpu_capability()
    found, missing = {}, []
    for name in known[known.index(instructions) :] if instructions in known else ():
        stem = Path(__file__).with_name(f"_native_{name.lower()}")
        paths = [path for suffix in importlib.machinery.EXTENSION_SUFFIXES if (path := Path(f"{stem}{suffix}")).exists()]
        try:
            lib = ctypes.CDLL(str(paths[0])) if paths else None
        except OSError as error:
            missing.append(str(error))
            continue
        if lib is None:
            missing.append(f"installation builds {name} on Linux, where it finds gcc")
        elif lib.isopos_call_size() != ctypes.sizeof(_Call) or lib.isopos_turn_size() != ctypes.sizeof(_Turn):
            missing.append(f"{paths[0].name} is of another version; install isopos again")
        else:
            found[LANES[name]] = lib
    names = [name for name, lanes in LANES.items() if lanes in found]
    return found, " and ".join(names) or f"none for {instructions}: {'; '.join(missing) or 'built for AVX2 and AVX512'}"


def _library(*widths: int) -> ctypes.CDLL | None:
    """The library that serves these numbers of features, if one does."""
    fitting = (lib for lanes, lib in libraries()[0].items() if all(width % lanes == 0 for width in widths))
    return next(fitting, None) if max(widths) <= WIDEST else None


def serves(*tensors: Tensor) -> bool:
    """Whether there is a library for these: numbers in a CPU's memory, which nothing wraps or watches."""
    return (
        bool(libraries()[0])
        and all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" for x in tensors)
        and not torch._C._are_functorch_transforms_active()
        and _get_current_dispatch_mode() is None
        and forward_ad._current_level < 0
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    )


def _view(x: Tensor) -> _View:
    """x ``[*b h t .]`` with one or two leading axes longer than 1, as a group of a plan has; `_flat` if it may be any."""
    sizes, strides, n = x.shape, x.stride(), x.ndim
    sample = strides[-4] if n > 3 and sizes[-4] > 1 else 0
    head = strides[-3] if n > 2 and sizes[-3] > 1 else 0
    return _View(x.data_ptr(), sample, head, strides[-2] if sizes[-2] > 1 else 0)


def _flat(x: Tensor) -> Tensor:
    """x with its numbers as they are, a token's next to each other."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _known(formula: "Formula | None", width: int) -> "Formula | None":
    """The formula if its parts have this width; PyTorch's operations say what is wrong with others."""
    if formula is None or (formula.table is not None and formula.kind == "gather" and formula.table.dtype != torch.int64):
        return None
    normal, table = formula.normal, formula.table
    features = width if table is None else table.shape[-1] if formula.kind == "gather" else table.shape[-2] * table.shape[-1]
    fits = features == width * (2 if formula.kind == "lift" else 1) and (normal is None or normal.shape[-1] == width)
    return formula if fits else None


def _describe(part: _Operand, x: Tensor, formula: "Formula") -> tuple[int, list[Tensor]]:
    """Say in `part` what makes features of x; their width, and the tensors that must live on."""
    x = _flat(x)
    part.x, part.width, part.phi, part.kind = _view(x), x.shape[-1], PHI[formula.phi], KIND[formula.kind]
    held = [x]
    if formula.normal is not None:
        held.append(_flat(formula.normal))
        part.normal = _view(held[-1])
    if formula.table is not None:
        held.append(_flat(formula.table if formula.kind == "gather" else formula.table.flatten(-2)))
        part.table = _view(held[-1])
    if formula.kept is not None:
        held.append(formula.kept)
        part.kept = _view(formula.kept)
    return x.shape[-1] * (2 if formula.kind == "lift" else 1), held


def _run(function: Any, call: _Call) -> None:
    """Call the library; IndexError where a gather's index is no feature's."""
    out_of_range = ctypes.c_long(0)
    call.out_of_range = ctypes.pointer(out_of_range)
    function(ctypes.byref(call))
    if out_of_range.value:
        raise IndexError("isometry: expected indices of features in a Gather, got one out of range")


class Tile:
    """One tile, described for the library. Tensors that it points to live as long as it does.

    Attributes:
        library: What serves it; where none does PyTorch's operations do, or say what is wrong.
        sizes: Features of keys, of values, and of the keys that a denominator sums up.
    """

    def __init__(self, operands: Sequence["Operand"], n: int, span: "Span", room: "Room"):
        self.operands, self.n, self.span, self.room = operands, n, span, room
        self.leading = operands[0].xs[n].shape[:-2]
        self.held: list[Tensor] = []
        self.call = _Call(heads=self.leading[-1], c=span.chunk, count=(span.stop - span.start) // span.chunk)
        self.call.chunks = self.call.count * self.leading.numel()
        self.rows: list[list[Tensor] | None] = []
        widths = [self._operand(operand, part) for operand, part in zip(operands, self._parts(), strict=True)]
        of_q, of_k, (self.call.e, _) = widths
        self.call.d, self.call.own = of_k
        self.sizes = (self.call.d, self.call.e, self.call.own or self.call.d)
        inputs = (part.width for part in self._parts())
        self.library = _library(self.call.d, self.call.e, self.call.own, *inputs) if of_q == of_k else None

    def _parts(self) -> tuple[_Operand, ...]:
        return self.call.q, self.call.k, self.call.v

    def _room(self, name: str, *shape: int) -> int:
        return self.room(f"native {name}", *shape).data_ptr()

    def _operand(self, operand: "Operand", part: _Operand) -> tuple[int, int]:
        """Describe an operand; its width, and that of its own features or 0."""
        formula = _known(operand.formula(self.n, self.span), operand.x.shape[-1])
        chunks, tokens = self.call.chunks, -(-self.span.chunk // 4) * 4
        if formula is None:
            rows = operand.read(self.n, self.span)
            rows = [_flat(x) for x in rows]
            self.rows.append(rows)
            self.held += rows
            part.x, part.width = _view(rows[0]), rows[0].shape[-1]
            own = 0
            for x in rows[1:]:
                part.own, own = _view(x), x.shape[-1]
            if self.span.chunk % 4:
                part.rows = operand.room("native", chunks, tokens, part.width).data_ptr()
            return part.width, own
        self.rows.append(None)
        out, held = _describe(part, operand.xs[self.n], formula)
        self.held += held
        part.rows = operand.room("native", chunks, tokens, out).data_ptr()
        if not formula.own:
            return out, 0
        if formula.kind != "none" or formula.normal is not None:
            part.own_rows = operand.room("native own", chunks, tokens, part.width).data_ptr()
        elif formula.phi == "identity" and formula.kept is None:
            part.own = part.x
        else:
            part.own_rows = part.rows
        return out, part.width

    def _prepare(self, g: "Decays", states: Sequence[Tensor], denominator: bool) -> ctypes.CDLL:
        call, lib = self.call, self.library
        assert lib is not None
        call.threads, call.denominator = torch.get_num_threads(), denominator
        call.begins, call.across = self.span.start == 0, self._room("across", call.chunks)
        if g is not None:
            decays = [x.resolve_neg()[..., None] for x in g]  # of all tokens: the one before the tile counts, too
            self.held += decays
            call.g_q, call.g_k = (_view(x) for x in decays)
            for view in (call.g_q, call.g_k):
                view.first += 8 * view.token * self.span.start
        call.scratch_size = max(64, call.d) * max(call.d, call.e) + 64 * (2 * call.d + call.e + 2 * call.own)
        call.scratch = self._room("scratch", call.threads, call.scratch_size)
        call.state, call.states = states[0].data_ptr(), self._room("states", call.chunks, call.d, call.e)
        if denominator:
            call.row, call.rows = states[1].data_ptr(), self._room("rows", call.chunks, call.own or call.d)
        return lib

    def forward(self, g: "Decays", states: Sequence[Tensor], out: Tensor, below: Tensor | None, *, divide: bool) -> None:
        """Write sums, or quotients, and denominators; states ``[*b h . .]`` become those after the tile."""
        lib = self._prepare(g, states, below is not None)
        self.call.out, self.call.divide = _view(out), divide
        if below is not None:
            self.call.below = _view(below)
        _run(lib.isopos_forward, self.call)

    def backward(
        self, g: "Decays", before: Sequence[Tensor], grads: Sequence[Tensor], upstream: "Upstream", decays: bool
    ) -> Sequence[Tensor]:
        """Write gradients of the operands, and return those of log decays ``[*b h t]`` if they are wanted.

        `before` holds the states before the tile; `grads` are gradients of those after it and become those of `before`.
        """
        call, room = self.call, self._room
        turned = [x.contiguous() for x in (before[0].mT, *(row.clone() for row in before[1:]))]
        lib = self._prepare(g, turned, len(before) > 1)
        grad, out, below = (None if part is None else part[self.n] for part in upstream.parts)
        assert grad is not None
        grad = _flat(grad)
        call.grad = _view(grad)
        if out is not None and below is not None:
            call.out, call.below, call.divide = _view(out), _view(below), 1
        call.grad_state, call.grad_states = grads[0].data_ptr(), room("grad states", call.chunks, call.d, call.e)
        call.grads = room("grads", call.chunks, -(-call.c // 4) * 4, call.e)
        if len(before) > 1:
            call.grad_row, call.grad_rows = grads[1].data_ptr(), room("grad rows", call.chunks, call.own or call.d)
            call.less = room("less", call.chunks, call.c)
        pulled: list[list[Tensor] | None] = []
        for operand, part, rows in zip(self.operands, self._parts(), self.rows, strict=True):
            if rows is None:
                assert operand.rooms is not None
                part.grad, part.add = _view(operand.rooms[self.n]), not operand.first
                pulled.append(None)
            else:
                pulled.append([operand.room(f"native grad {m}", *x.shape) for m, x in enumerate(rows)])
                views = [_view(x) for x in pulled[-1] or ()]
                part.grad, part.grad_own = views[0], views[-1] if len(views) > 1 else _View()
        shape = (*self.leading, self.span.stop - self.span.start)
        grad_g = tuple(grad.new_empty(shape, dtype=torch.float64) for _ in range(2)) if decays else ()
        for part, x in zip(self._parts(), grad_g, strict=False):
            part.grad_decay = x.data_ptr()
        _run(lib.isopos_backward, call)
        for operand, own in zip(self.operands, pulled, strict=True):
            if own is not None:
                operand.pull(self.n, self.span, own)
        return grad_g


def step(
    inputs: Sequence[Tensor],
    formulas: Sequence["Formula | None"],
    sums: Sequence[Tensor],
    across: Tensor | None,
    *,
    denominator: bool,
    in_place: bool,
) -> tuple[Tensor, list[Tensor], Tensor | None] | None:
    """The output ``[*b h 1 e]`` of the next token of a stream, its sums, and its denominators.

    `sums` are those of the tokens before: of k v^T ``[*b h d e]`` and of own k ``[*b h d 1]``, or of both with one more
    column; `across` ``[*b h]`` are their weights. None where no library has these shapes and dtypes; `serves` says whether
    it may read the tensors at all. No graph.
    """
    (q, _, v), leading = inputs, inputs[0].shape[:-2]
    if any(x.dtype != torch.float32 for x in (*inputs, *sums)):
        return None
    if any(x.shape[:-2] != leading for x in inputs) or any(n > 1 for n in leading[:-2]):
        return None
    known = [f for x, formula in zip(inputs, formulas, strict=True) if (f := _known(formula, x.shape[-1])) is not None]
    if len(known) < len(inputs):
        return None
    call = _Call(leading.numel(), 1, leading[-1], 1, own=q.shape[-1] if known[0].own else 0, denominator=denominator)
    parts = zip((call.q, call.k, call.v), inputs, known, strict=True)
    (call.d, *of_q), (d, *of_k), (call.e, *of_v) = (_describe(part, x, formula) for part, x, formula in parts)
    shapes = [(*leading, d, call.e + (denominator and not call.own)), *[(*leading, call.own, 1)] * bool(call.own)]
    lib = _library(d, call.e, *(x.shape[-1] for x in inputs))
    if lib is None or d != call.d or [tuple(x.shape) for x in sums] != shapes or not all(x.is_contiguous() for x in sums):
        return None
    after = list(sums) if in_place else [torch.empty_like(x) for x in sums]
    out, below = v.new_empty(v.shape), v.new_empty(*leading, 1, 1) if denominator else None
    call.threads, call.out = torch.get_num_threads(), _view(out)
    call.state, call.states = sums[0].data_ptr(), after[0].data_ptr()
    if len(sums) > 1:
        call.row, call.rows = sums[1].data_ptr(), after[1].data_ptr()
    if below is not None:
        call.below = _view(below)
    if across is not None:
        call.across = across.data_ptr()
    _run(lib.isopos_step, call)
    del of_q, of_k, of_v  # which had to live until now
    if in_place:
        torch.autograd.graph.increment_version(after)
    return out, after, below


class _Turn(ctypes.Structure):
    _fields_ = (
        *((name, _View) for name in ("x", "table")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("all", "heads", "tokens", "back", "threads")),
        ("operand", _Operand),
    )


def turns(x: Tensor, table: Tensor, *, lifted: bool, back: bool) -> bool:
    """Whether `turn` serves these: where the result is larger than what a cache holds."""
    width, moved = table.shape[-2] * (1 if lifted else 2), lifted and not back
    return (
        4 * x.shape[:-1].numel() * width * (1 + moved) > PAST
        and serves(x, table)
        and x.dtype == table.dtype == torch.float32
        and _library(width) is not None
        and x.ndim > 2
        and x.shape[-1] == width * (2 if lifted and back else 1)
        and not any(n > 1 for n in x.shape[:-4])
        and torch.broadcast_shapes(x.shape[:-1], table.shape[:-2]) == x.shape[:-1]
    )


def turn(x: Tensor, table: Tensor, *, lifted: bool, back: bool) -> Tensor:
    """x ``[*b h t .]`` rotated or lifted by a table ``[*b h t f 2]``, or back; without a graph."""
    width, shape = table.shape[-2] * (1 if lifted else 2), x.shape[:-1]
    lib = _library(width)
    assert lib is not None
    x, table = _flat(x), _flat(table.flatten(-2))
    out = x.new_empty(*shape, 2 * width if lifted and not back else width)
    call = _Turn(_view(x), _view(table.expand(*shape, -1)), out.data_ptr(), shape[:-1].numel(), shape[-2], shape[-1], back)
    call.threads, call.operand.kind, call.operand.width = (
        torch.get_num_threads(),
        KIND["lift" if lifted else "rotation"],
        width,
    )
    lib.isopos_turn(ctypes.byref(call))
    return out
