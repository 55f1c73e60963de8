"""Streams of attention: a call takes the next token or chunk; each shape of call is checked once; sums are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isopos.attention.checks import check_inputs, check_order
from isopos.attention.linear import attended, sums_of
from isopos.attention.problem import LinearOptions, LinearProblem, check_linear, refuse
from isopos.attention.softmax import softmax_attention
from isopos.catalog import at_least
from isopos.deprecation import renamed_argument
from isopos.maps import Identity, pair
from isopos.ops.library import watched
from isopos.ops.linear.cpu import CpuSteps
from isopos.ops.linear.step import TorchSteps
from isopos.ops.linear.triton_step import TritonSteps
from isopos.positions import sequence
from isopos.scheme import Arguments, Scheme, expect_scheme
from isopos.state import State, expect_state

__all__ = ["Stream", "Tables"]

AHEAD = 64  # tokens whose tables are evaluated at once; four times as many after 256 tokens
TABLE_SIZE = 1 << 24  # maximum of numbers in these tables
CHUNKS = 8  # maximum of planned chunk shapes per stream

OPTIONS = frozenset(LinearOptions.__annotations__)
TokenSteps = CpuSteps | TritonSteps | TorchSteps


class Stream:
    """Causal attention of a sequence token by token or chunk by chunk: a call returns the outputs of the next tokens.

    A call is ``linear_attention(q, k, v, **scheme.at(x, state=state), causal=True, return_state=True)``, or
    `softmax_attention`; the stream keeps the state. Linear attention without gradients, options and relative terms is
    checked once for each shape, dtype and device of a call, and later calls of that shape run a plan. For one token the plan
    evaluates the scheme at 64 positions or more at once and updates the sums in place: by one call of the C kernel if it
    serves the scheme (`isopos.attention.explain`), of the Triton kernel if it is enabled (`isopos.ops.gpu`), otherwise by a
    few PyTorch operations. Every other call is checked. Results agree up to rounding, which any encoded denominator near
    zero magnifies.

    Parameters of the scheme must not change between calls. `Attention` and `Block` take a stream for `at`; `Decoder.steps`
    holds one stream per layer. A copy or a pickle continues independently from the token where it was made. Several threads
    may run separate streams; a stream must be called by one thread at a time.

    Args:
        scheme: The scheme.
        state: State after past tokens; it is not changed.
        length: Number of past tokens, required with a state that is not empty. It is the position of the next token.
        tables_from: A stream of another layer with the same scheme, length and positions. The scheme is evaluated once for
            both.

    Raises:
        ValueError: For a state without its length, a length without a state, or `tables_from` of another scheme or length.

    Attributes:
        length: Number of tokens so far.

    Examples:
        >>> import isopos
        >>> scheme = isopos.rope(16, 2)
        >>> q, k, v = torch.randn(3, 1, 2, 10, 16)
        >>> stream = Stream(scheme)
        >>> prompt = stream(*(x[:, :, :4] for x in (q, k, v)))
        >>> tokens = [stream(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(4, 10)]
        >>> whole = scheme(q, k, v, isopos.sequence(10), causal=True)
        >>> torch.allclose(torch.cat((prompt, *tokens), -2), whole, atol=1e-6)
        True
        >>> stream.length, stream.state["sum0"].shape
        (10, torch.Size([1, 2, 16, 16]))
    """

    @renamed_argument("beside", "tables_from")
    def __init__(
        self,
        scheme: Scheme,
        state: State | None = None,
        *,
        length: int | None = None,
        tables_from: "Stream | None" = None,
    ):
        expect_scheme(scheme)
        expect_state(state)
        if length is None and state is not None and state.tensors:
            raise ValueError("length: expected the number of tokens in the state, got none")
        length = 0 if length is None else at_least("length", length, 0)
        if tables_from is not None and (tables_from.scheme is not scheme or tables_from.length != length):
            raise ValueError("tables_from: expected a stream of the same scheme at the same length, got another")
        if length and not (state and state.tensors):
            raise ValueError(f"state: expected one of {length} tokens, got none")
        self.scheme, self.length, self._state = scheme, length, State() if state is None else state
        self._tables = Tables(scheme) if tables_from is None else tables_from._tables
        self._extension = scheme.extension  # of the plans
        self._learns = any(parameter.requires_grad for parameter in scheme.parameters())
        self._positioned: set[Any] = set()  # signatures of checked positions
        self._chunks: dict[Any, LinearProblem] = {}  # checked problems without tensors, by signature
        self._steps: TokenSteps | None = None  # the plan for one token; if there is one, it holds the sums
        self._problem: LinearProblem  # the problem of the plan
        self._rows = range(0)  # positions in the tables of the plan
        self._decay: Tensor | None = None  # log decays at the position before them and at these, [*b h 1+n]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None, **options: Any) -> Tensor:
        """Causal attention of the next tokens: q ``[*b h t d]``, k ``[*b h t d]``, v ``[*b h t e]`` -> ``[*b h t e]``.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            x: Positions ``[*b t c]``; on a line or a ring, by default `length` and the numbers after it.
            options: Options of the attention function: mask, segment_ids, ... A call with one that is not None is checked.

        Raises:
            ValueError: For what a stream has itself: a state, a group, and attention to later tokens.
        """
        if options:
            options = {name: value for name, value in options.items() if value is not None or name == "denominator"}
            _refuse_own(options)
        extended = self.scheme.extension is not self._extension  # checks refuse a state from before
        differentiable = torch.is_grad_enabled() and self._differentiable(q, k, v, x)
        if options or extended or differentiable or torch.compiler.is_compiling():
            return self._checked(q, k, v, x, options)
        steps = self._steps
        if steps is None or not steps.fits(q, k, v) or (x is not None and _signature(x) not in self._positioned):
            return self._chunk(q, k, v, x)
        if x is not None or self.length not in self._rows:
            self._look_ahead(steps, x)
        out = steps(q, k, v, self.length - self._rows.start)
        self.length += 1
        return out

    @property
    def prepared(self) -> int:
        """Number of next tokens that a captured CUDA graph of one token can run; 0 without the Triton kernel."""
        return max(0, self._rows.stop - self.length) if isinstance(self._steps, TritonSteps) else 0

    def replayed(self, count: int) -> None:
        """Count tokens that replays of a CUDA graph have run, without a call.

        A call for one token under `torch.cuda.graph` captures the launch of a Triton kernel that finds the row of its tables
        by itself, so that each replay is the next token. The captured call itself counts a token and runs none: after n
        replays, n - 1 are to be counted. Further tokens give NaN, and need a call, then a new graph if that call has changed
        the shapes of tables.

        Raises:
            ValueError: If `count` is more than `prepared`.
        """
        if not 0 <= count <= self.prepared:
            raise ValueError(f"count: expected at most the {self.prepared} tokens that are prepared, got {count}")
        self.length += count

    @property
    def state(self) -> State:
        """State after the tokens so far; later calls do not change it."""
        return self._state if self._steps is None else self._snapshot([sums.clone() for sums in self._steps.sums])

    def __getstate__(self) -> dict[str, Any]:
        """Contents of copies and pickles. Streams that share tables and are copied together share tables afterwards."""
        return {"scheme": self.scheme, "state": self.state, "length": self.length, "ahead": self._tables}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheme"], state["state"], length=state["length"])
        self._tables = state["ahead"]

    def _differentiable(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> bool:
        return self._learns or any(getattr(a, "requires_grad", False) for a in (q, k, v, x))  # checks refuse other types

    def _at(self, q: Tensor, count: int, x: Tensor | None, state: State, *, shared: bool = True) -> Arguments:
        """The scheme at x, or at `count` positions from `length` on, for the dtype and device of q."""
        if x is None and self.scheme.group.columns != 1:
            raise ValueError(f"x: expected positions of {self.scheme.group}, got none; only lines and rings have a default")
        dtype, rows = torch.promote_types(q.dtype, torch.float32), range(self.length, self.length + count)
        if not shared:
            x = self.length + sequence(count, device=q.device) if x is None else x
            return self.scheme.at(x, state=state, dtype=dtype)
        return self._tables.at(rows, x, dtype, q.device, state)

    def _snapshot(self, sums: Sequence[Tensor]) -> State:
        """The state with these sums of the plan."""
        decay = None if self._decay is None else self._decay[..., self.length - self._rows.start].clone()
        return self._state.next(self._state.kind, **{f"sum{n}": x for n, x in enumerate(sums)}, decay=decay)

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Outputs of the next tokens, with all checks; plans later calls of this shape if possible."""
        if self.scheme.extension is not self._extension:
            self._chunks, self._extension = {}, self.scheme.extension
        graph = torch.compiler.is_compiling() or (torch.is_grad_enabled() and self._differentiable(q, k, v, x))
        self._state, self._steps, steps = self.state, None, None if graph else self._steps
        t = check_inputs(q, k, v, options.get("layout", "bhtd"))[0].shape[-2]
        at = self._at(q, t, x, self._state, shared=not graph)
        arguments: Any = at | options | {"causal": True}
        if self.scheme.attention == "softmax":
            out, after = softmax_attention(q, k, v, **arguments, return_state=True)
        else:
            if unknown := [name for name in options if name not in OPTIONS]:
                refuse("linear", unknown)
            problem = check_linear(q, k, v, arguments, streams=True)
            out, after = attended(problem, q.dtype)
            if not (options or graph):
                self._plan(q, k, v, x, problem, after)  # may warn, and a warning may be an error: before tokens are counted
        self._advance(after, t, steps)
        return out

    def _advance(self, after: State, t: int, steps: TokenSteps | None) -> None:
        """Count t tokens and keep the state `after` them; an old plan, `steps`, gets its sums if there is no new one."""
        self._state, self.length = after, self.length + t
        frozen = steps is not None and steps.sums[0].is_inference() and not torch.is_inference_mode_enabled()
        if self._steps is None and steps is not None and not frozen:
            for n, sums in enumerate(steps.sums):
                sums.copy_(after.tensors[f"sum{n}"])
            self._state, self._steps = after.next(after.kind), steps
            self._rows, self._decay = range(self.length, self.length), _column(after["decay"])

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, problem: LinearProblem, after: State) -> None:
        """Plan later calls of this shape; the plan takes over the sums of `after`."""
        unchanged = problem.q is q and problem.k is k and problem.v is v  # neither moved nor broadcast
        if self.scheme.group.refers_to_rows or not (unchanged and _is_plannable(problem)):
            return
        if q.shape[-2] == 1:
            self._problem = replace(problem, state=after, before=after["decay"])
            step, kinds = sums_of(self._problem), (CpuSteps, TritonSteps, TorchSteps)
            self._steps = next(filter(None, (kind.of(step) for kind in kinds)), None)
        if self._steps is not None:
            self._rows, self._decay = range(self.length + 1, self.length + 1), _column(after["decay"])
            self._positioned.add(_signature(x))
            return
        empty = torch.empty(0)
        if len(self._chunks) == CHUNKS:
            del self._chunks[next(iter(self._chunks))]
        tensors: Any = {"q": empty, "k": empty, "v": empty, "decay": None, "g": None, "state": None, "before": None}
        self._chunks[_signature(q, k, v, x)] = replace(problem, rho_q=Identity(), rho_k=Identity(), **tensors)

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        """Outputs of the next tokens by the plan of their shape, or with all checks; short chunks run token by token."""
        problem = self._chunks.get(_signature(q, k, v, x)) if self._chunks else None
        if problem is None or watched():
            return self._checked(q, k, v, x, {})
        steps, state, t, limit = self._steps, self._state, q.shape[-2], self.scheme.max_length
        is_short = 1 < t <= (CpuSteps if steps is None else steps).few and (limit is None or self.length + t <= limit)
        if is_short and x is None:
            self._state.stamped(self.scheme.fingerprint, None)  # fails before the first token, not after some
            return torch.cat([self(*(a[..., n : n + 1, :] for a in (q, k, v))) for n in range(t)], -2)
        if steps is not None:
            state = self._snapshot(steps.sums)
        at = self._at(q, t, x, state)
        (rho_q, rho_k), decay = pair(at["isometry"]), at["decay"]
        decays = None if decay is None else (decay, decay)
        if decays is not None:
            check_order(decays, True, state["decay"])
        problem = replace(problem, q=q, k=k, v=v, rho_q=rho_q, rho_k=rho_k, decay=decays, g=decays, state=state)
        out, after = attended(replace(problem, before=state["decay"]), q.dtype)
        self._steps = None
        self._advance(after, t, steps)
        return out

    def _look_ahead(self, steps: TokenSteps, x: Tensor | None) -> None:
        """Evaluate the scheme at the next positions, or at x for one token; ValueError if it was extended meanwhile."""
        problem, count, weights, dtype = self._problem, 1, None, steps.sums[0].dtype
        if x is None:
            numbers, limit = sum(rho.numbers_per_token for rho in {problem.rho_q, problem.rho_k}), self.scheme.max_length
            count = min(AHEAD if self.length < 4 * AHEAD else 4 * AHEAD, TABLE_SIZE // max(1, numbers))
            count = max(1, count if limit is None else min(count, limit - self.length))
        at = self._at(problem.q, count, x, self._state)
        rho_q, rho_k = pair(at["isometry"])
        features = sums_of(replace(problem, rho_q=rho_q, rho_k=rho_k)).features
        if self._decay is not None:
            last = self._decay[..., self.length - self._rows.start, None]
            check_order((at["decay"],) * 2, True, last[..., 0])
            self._decay = torch.cat((last, at["decay"].expand(*last.shape[:-1], -1)), -1)
            weights = self._decay.diff().exp().to(dtype).flatten(0, -2).T.contiguous()
        steps.look_ahead((features[0], features[1]), weights)
        self._rows = range(self.length, self.length + count)


def _refuse_own(options: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of the attention function that a stream has itself."""
    for name in ("state", "group", "return_state"):
        if options.get(name):
            raise ValueError(f"{name}: expected none with a Stream, which has its own state, got one")
    if options.get("causal") is False:
        raise ValueError("causal: expected True with a Stream, whose tokens see earlier ones only, got False")


def _signature(*arguments: Tensor | None) -> tuple[Any, ...]:
    """Types, shapes, dtypes and devices: all that checks see except numbers. Other types than tensors are allowed."""
    return tuple((type(a), *(getattr(a, name, None) for name in ("shape", "dtype", "device"))) for a in arguments)


def _column(decay: Tensor | None) -> Tensor | None:
    return None if decay is None else decay[..., None]


def _is_plannable(problem: LinearProblem) -> bool:
    """Whether outputs are sums divided by a denominator and nothing more; plans do no other operations."""
    extras = (problem.window, problem.segments, problem.phase, problem.product, problem.mask, problem.outward)
    simple = problem.denominator != "complex" and problem.groups == 1 and problem.layout == "bhtd"
    return simple and not (problem.terms or problem.empty) and all(x is None for x in extras)


@dataclass(frozen=True, eq=False)
class _Evaluated:
    """A scheme's arguments at positions x after those `before`."""

    key: Any
    x: Tensor  # a copy where numbers are compared, else referenced, so that no other tensor gets its id
    before: Tensor | None
    arguments: Arguments


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


class Tables:
    """A scheme evaluated at the next positions, once for all streams that share these tables; safe with several threads."""

    def __init__(self, scheme: Scheme):
        self.scheme = scheme
        self.cached: _Evaluated | None = None

    def at(self, rows: range, x: Tensor | None, dtype: torch.dtype, device: torch.device, state: State) -> Arguments:
        """The scheme at x, or at positions `rows`, for the stream of a layer."""
        kind = dtype, torch.is_inference_mode_enabled(), self.scheme.extension
        compared = type(x) is Tensor and x.device.type == "cpu"  # NumPy may share its memory and change it without a version
        if x is None:
            key = (rows, device, *kind)
        elif compared:
            key = (x.dtype, x.shape, x.requires_grad, *kind)
        else:  # a comparison would wait for a GPU; inference tensors have no version
            key = (id(x), x._version, *kind) if isinstance(x, Tensor) and not x.is_inference() else object()
        found, before = self.cached, state["positions"]
        same = found is not None and found.key == key and _equal(found.before, before)
        if found is None or not same or (compared and not _equal(found.x, x)):
            x = rows.start + sequence(len(rows), device=device) if x is None else x.clone() if compared else x
            start = State({} if before is None else {"positions": before})  # holds no layer's sums
            found = _Evaluated(key, x, before, self.scheme.at(x, state=start, dtype=dtype))
            self.cached = found  # one assignment, so that other threads see old or new tables
        return found.arguments.of(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self.scheme}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheme"])
