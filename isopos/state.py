"""State of a stream: what attention keeps of past tokens, so that chunks and steps give the whole sequence's outputs."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from isopos.exact import describe

__all__ = ["State", "expect_state"]

TEXTS = ("fingerprint", "kind")


@dataclass(frozen=True, eq=False)
class State:
    """Past tokens of a stream: sums of constant size for linear attention, a growing cache for softmax attention.

    ``State()`` is a stream without tokens. Attention takes a state and returns the next one; it changes no state, so several
    continuations may start from the same one. Each layer has a separate state; layers that share a scheme evaluate it once
    per step, by ``at = scheme.at(x, state=states[0])``, and use ``at.of(states[n])``.

    Args:
        tensors: Tensors by name, batch axes first.
        fingerprint: Fingerprint of the stream's scheme; empty for attention without a scheme.
        kind: Kind of the attention that returned it, with the shapes and dtype that must not change; empty at the start.
        in_place: Has no effect and goes in the next version: `isopos.Stream` overwrites its sums.

    Examples:
        >>> import isopos
        >>> scheme, state = isopos.rope(8, 2), State()
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> whole = isopos.linear_attention(q, k, v, **scheme.at(isopos.sequence(5)), causal=True)
        >>> for i in range(5):
        ...     at = scheme.at(torch.tensor([[i]]), state=state)
        ...     token = (a[..., i : i + 1, :] for a in (q, k, v))
        ...     y, state = isopos.linear_attention(*token, **at, causal=True, return_state=True)
        >>> torch.allclose(y, whole[..., -1:, :], atol=1e-6)
        True
    """

    tensors: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    fingerprint: str = ""
    kind: str = ""
    in_place: InitVar[bool] = False

    def __post_init__(self, in_place: bool) -> None:
        if in_place:
            warnings.warn(
                "in_place has no effect on a State now, isopos.Stream overwrites its sums; it goes in the next version",
                DeprecationWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return describe(self)

    def __getitem__(self, name: str) -> Tensor | None:
        """The tensor with this name, or None."""
        return self.tensors.get(name)

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def next(self, kind: str, **tensors: Tensor | None) -> "State":
        """The state with these tensors instead, except for positions."""
        kept = {"positions": self["positions"]} | tensors
        new = {name: tensor for name, tensor in kept.items() if tensor is not None}
        return State(MappingProxyType(new), self.fingerprint, kind)

    def check_kind(self, kind: str, batch: Sequence[int]) -> None:
        """Raise ValueError if this is a state of another kind of attention, or of other samples and heads."""
        if self.kind and self.kind != kind:
            raise ValueError(f"state: expected one of {kind}, got one of {self.kind}; a new stream starts with State()")
        sums = self["keys"] if self["sum0"] is None else self["sum0"]
        if sums is not None:
            expect_batch(batch, sums.shape[:-2], sums.shape[:-2] == tuple(batch))

    def stamped(self, fingerprint: str, positions: Tensor | None) -> "State":
        """The state of a scheme's stream with these positions; ValueError if it belongs to another scheme."""
        if self.fingerprint not in ("", fingerprint) or (self.kind and not self.fingerprint):
            raise ValueError(
                "state: expected one of this scheme with these options, got another's, or one from before an extension, "
                "whose keys were rotated by other frequencies; start with State()"
            )
        old = {name: tensor for name, tensor in self.tensors.items() if name != "positions"}
        new = {} if positions is None else {"positions": positions}
        return replace(self, tensors=MappingProxyType(old | new), fingerprint=fingerprint)

    def reorder(self, index: Tensor) -> "State":
        """The streams of samples `index`, int64 ``[n]``, along the first axis, for example to keep or repeat beams.

        Raises:
            ValueError: For an index of another type or shape; on a CPU also for numbers of samples that there are not.
        """
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.ndim != 1:
            got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(f"index: expected numbers of samples, int64 [n], got {got}")
        places = {name: x for name in ("positions", "places") if (x := self[name]) is not None}
        shared = {name for name, x in places.items() if x.ndim == 2 or len(x) == 1}
        count = max((len(x) for name, x in self.tensors.items() if name not in shared), default=0)
        readable = index.device.type == "cpu" and not torch.compiler.is_compiling() and index.numel()
        if count and readable and not (index.min() >= 0 and index.max() < count):
            remedy = "; keys that all samples share need no order" if count == 1 else ""
            raise ValueError(f"index: expected numbers of samples below {count}, got {index.tolist()[:20]}{remedy}")
        chosen = {name: x if name in shared else x.index_select(0, index) for name, x in self.tensors.items()}
        return replace(self, tensors=MappingProxyType(chosen))

    def state_dict(self) -> dict[str, Tensor]:
        """All fields as tensors without gradients, for saving."""
        texts = {name: torch.tensor(list(getattr(self, name).encode()), dtype=torch.uint8) for name in TEXTS}
        return {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()} | texts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the contents of `state_dict`."""
        return State.from_state_dict, (self.state_dict(),)

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor]) -> "State":
        """The inverse of `state_dict`; ValueError for tensors of something else."""
        if missing := [name for name in TEXTS if name not in tensors]:
            raise ValueError(f"tensors: expected those of State.state_dict(), got no {' and '.join(missing)}")
        rest = dict(tensors)
        texts = {name: bytes(rest.pop(name).tolist()).decode() for name in TEXTS}
        return cls(MappingProxyType(rest), texts["fingerprint"], texts["kind"])


def expect_batch(batch: Sequence[int], got: Sequence[int], fits: bool) -> None:
    """Raise ValueError unless a state's leading dimensions fit these samples and heads."""
    if not fits:
        raise ValueError(
            f"state: expected one of {list(batch)} samples and heads, got one of {list(got)}; "
            "a new stream starts with State()"
        )


def expect_state(state: object) -> None:
    """Raise TypeError unless the argument is a State or None."""
    if not isinstance(state, State | None):
        raise TypeError(f"state: expected a State, got {type(state).__name__}; a new stream starts with State()")
