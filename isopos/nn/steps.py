"""A stream of attention that goes on token by token: checked once, then a fixed plan."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isopos.attention.linear import linear_attention, sums_of
from isopos.attention.problem import LinearProblem, check_linear
from isopos.attention.softmax import softmax_attention
from isopos.ops.linear.cpu_step import CpuSteps
from isopos.ops.linear.step import TorchSteps
from isopos.ops.linear.triton_step import TritonSteps
from isopos.scheme import Arguments, Scheme
from isopos.state import State, expect_state

__all__ = ["Steps"]

AHEAD = 64  # tokens whose tables are made at once
MOST = 1 << 24  # numbers that these may hold

AnyPrepared = CpuSteps | TritonSteps | TorchSteps


class Steps:
    """The next tokens of a stream, one a call: what attention gives of them at positions that go on by one.

    A call is ``linear_attention(q, k, v, **scheme.at([[length]], state=state), causal=True, return_state=True)``, or
    `softmax_attention`, without its checks: they are made once, tables of 64 tokens at once, and sums are written over in
    place. That is so for linear attention of sums and one division, without gradients: in one call of the CPU's kernel for
    what it serves (`isopos.attention.explain`), of Triton's where it is asked for (`isopos.ops.gpu`), and otherwise in a few
    operations of PyTorch. Relative terms, steps read from keys, complex denominators, grouped heads, softmax attention,
    gradients and options go the long way, to the same numbers up to roundings, which an encoded denominator near zero
    magnifies in every way of summing.

    What the scheme learns is taken to stay as it is. `Attention` and `Block` take steps for `at`, and `Decoder.steps` are
    those of a whole model. Copies and pickles go on by themselves from the token where they were made. Steps beside each
    other may run in several threads; one stream is called by one thread at a time.

    Args:
        scheme: What sees positions, on a line or on a ring.
        state: The tokens before; it stays as it is.
        length: Their number, which is the position of the next one; needed with a state that has some.
        beside: Steps of another layer with the same scheme, as long: tables are made once for both.

    Raises:
        ValueError: For positions of several columns, a state of unknown length, steps beside of another scheme or length.

    Attributes:
        length: Tokens so far.

    Examples:
        >>> import isopos
        >>> scheme = isopos.rope(16, 2)
        >>> q, k, v = torch.randn(3, 1, 2, 10, 16)
        >>> steps = Steps(scheme)
        >>> outs = [steps(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(10)]
        >>> torch.allclose(torch.cat(outs, -2), scheme(q, k, v, isopos.sequence(10), causal=True), atol=1e-6)
        True
        >>> steps.length, steps.state["sum0"].shape
        (10, torch.Size([1, 2, 16, 16]))
    """

    def __init__(
        self, scheme: Scheme, state: State | None = None, *, length: int | None = None, beside: "Steps | None" = None
    ):
        expect_state(state)
        if length is None and state is not None and state.tensors:
            raise ValueError("length: expected the number of tokens that the state has seen, got none")
        length = length or 0
        if scheme.group.columns != 1:
            raise ValueError(f"scheme: expected positions on a line or a ring, which go on by one, got {scheme.group}")
        if beside is not None and (beside.scheme is not scheme or beside.length != length):
            raise ValueError("beside: expected steps of the same scheme at the same length, got others")
        if length and not (state and state.tensors):
            raise ValueError(f"state: expected one that has seen {length} tokens, got none")
        self.scheme, self.length, self._state = scheme, length, State() if state is None else state
        self._ahead = _Ahead(scheme) if beside is None else beside._ahead
        self._learns = any(parameter.requires_grad for parameter in scheme.parameters())
        self._prepared: AnyPrepared | None = None
        self._served = True  # until the kernel refuses a step
        self._rows = range(0)  # positions whose tables are prepared
        self._decay: Tensor | None = None  # log decays there and at the one before, [*b h 1+n]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of the next token: q ``[*b h 1 d]``, k ``[*b h 1 d]``, v ``[*b h 1 e]`` -> ``[*b h 1 e]``.

        With options of the attention function that are not None, the long way.
        """
        options = {name: value for name, value in options.items() if value is not None}
        prepared = None if options or self._differentiable(q, k, v) or torch.compiler.is_compiling() else self._prepared
        if prepared is None or not prepared.fits(q, k, v):
            return self._checked(q, k, v, options)
        if self.length not in self._rows:
            self._look_ahead(prepared)
        out = prepared(q, k, v, self.length - self._rows.start)
        self.length += 1
        return out

    @property
    def state(self) -> State:
        """The tokens so far; steps to come do not change it."""
        if self._prepared is None:
            return self._state
        after = {f"sum{n}": x.clone() for n, x in enumerate(self._prepared.sums)}
        if self._decay is not None:
            after["decay"] = self._decay[..., self.length - self._rows.start].clone()
        return self._state.next(self._state.kind, **after)

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles, which go on by themselves; steps beside each other that are copied together stay so."""
        return {"scheme": self.scheme, "state": self.state, "length": self.length, "ahead": self._ahead}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheme"], state["state"], length=state["length"])
        self._ahead = state["ahead"]

    def _differentiable(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        wanted = torch.is_grad_enabled()
        return wanted and (self._learns or q.requires_grad or k.requires_grad or v.requires_grad)

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """A token the long way; those after it are prepared, if they can be."""
        self._state, self._prepared, linear = self.state, None, self.scheme.attention == "linear"
        place = torch.tensor([[self.length]], device=q.device)
        at = self.scheme.at(place, state=self._state, dtype=torch.promote_types(q.dtype, torch.float32))
        attend: Any = linear_attention if linear else softmax_attention
        out, after = attend(q, k, v, **at | options, causal=True, return_state=True)
        simple = linear and not (self.scheme.group.refers_to_rows or self.scheme.path or torch.compiler.is_compiling())
        if simple and self._served and not options and not self._differentiable(q, k, v):
            self._prepare(q, k, v, at, after)  # may warn, and a warning may be an error: the token counts after it
        self._state, self.length = after, self.length + 1
        return out

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, at: Arguments, after: State) -> None:
        """Prepare what comes after a step that leaves `after`, whose sums nobody else has."""
        again: Any = at | {"state": replace(after, in_place=True), "causal": True}
        problem = check_linear(q, k, v, again, streams=True)
        step = sums_of(problem)
        if _bare(problem) and all(a is b for a, b in zip(step.inputs, (q, k, v), strict=True)):
            kinds = CpuSteps, TritonSteps, TorchSteps
            self._prepared, self._problem = next(filter(None, (kind.of(step) for kind in kinds)), None), problem
            self._rows = range(self.length + 1, self.length + 1)
            self._decay = None if problem.before is None else problem.before[..., None]
        self._served = self._prepared is not None

    def _look_ahead(self, prepared: AnyPrepared) -> None:
        """Make tables of the next tokens; not of a scheme that was extended meanwhile."""
        self._state.stamped(self.scheme.fingerprint, None)
        dtype = prepared.sums[0].dtype
        numbers = sum(rho.numbers_a_token for rho in {self._problem.rho_q, self._problem.rho_k})
        most = max(1, min(AHEAD, MOST // max(1, numbers)))
        self._rows, at = self._ahead(self.length, most, dtype, prepared.inputs[0].device)
        rho, weights = at["isometry"], None
        rho_q, rho_k = rho if isinstance(rho, tuple) else (rho, rho)
        features = sums_of(replace(self._problem, rho_q=rho_q, rho_k=rho_k)).features
        if self._decay is not None:
            last = self._decay[..., -1:]
            self._decay = torch.cat((last, at["decay"].expand(*last.shape[:-1], -1)), -1)
            weights = self._decay.diff().exp().to(dtype).flatten(0, -2).T.contiguous()
        prepared.look_ahead((features[0], features[1]), weights)


def _bare(problem: LinearProblem) -> bool:
    """Whether sums and one division are all there is: what is prepared adds and maps nothing else."""
    other = (problem.window, problem.segments, problem.path, problem.mask, problem.outward)
    divided = problem.denominator != "complex" and problem.groups == 1 and problem.layout == "bhtd"
    return divided and not problem.terms and all(x is None for x in other)


class _Ahead:
    """A scheme at the next positions, for all layers that share it, in whichever threads they are."""

    def __init__(self, scheme: Scheme):
        self.scheme, self.known = scheme, {}

    def __call__(self, length: int, most: int, dtype: torch.dtype, device: torch.device) -> tuple[range, Arguments]:
        """At most so many positions from `length` on, and the scheme there."""
        found = self.known.get(key := (length, dtype, device))
        if found is None:
            limit = self.scheme.max_length
            count = most if limit is None else min(most, max(1, limit - length))
            with torch.no_grad():
                at = self.scheme.at(torch.arange(length, length + count, device=device)[:, None], dtype=dtype)
            found = range(length, length + count), at
            self.known = {key: found}  # one assignment: another thread has the old tables or these
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self.scheme}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheme"])
