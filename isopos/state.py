"""Streams: what attention keeps of the tokens it has seen, so that chunks and steps give what the whole sequence gives."""

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
    """The tokens of a stream so far: sums of constant size for linear attention, a growing cache for softmax attention.

    ``State()`` is a stream without tokens. Attention takes a state and returns the next; it changes none, so that several
    continuations may start from one. Every layer has its own; layers that share a scheme evaluate it once a step, by
    ``at = scheme.at(x, state=states[0])``, and take ``at.of(states[n])``.

    Args:
        tensors: By name, batch axes first.
        fingerprint: Of the scheme whose stream it is; empty for attention without a scheme.
        kind: Of the attention that wrote it, with the shapes and dtype that must stay; empty at the start.
        in_place: Without effect, and goes in the next version: `isopos.Stream` writes over its sums.

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
                "in_place has no effect on a State now, isopos.Stream writes over its sums; it goes in the next version",
                DeprecationWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return describe(self)

    def __getitem__(self, name: str) -> Tensor | None:
        """A tensor, or None where there is none yet."""
        return self.tensors.get(name)

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def next(self, kind: str, **tensors: Tensor | None) -> "State":
        """The state after some tokens; positions stay."""
        known = (("positions", self["positions"]), *tensors.items())
        new = {name: tensor for name, tensor in known if tensor is not None}
        return State(MappingProxyType(new), self.fingerprint, kind)

    def check_kind(self, kind: str, batch: Sequence[int]) -> None:
        """Raise ValueError where attention of another kind, or of other samples and heads, wrote this state."""
        if self.kind and self.kind != kind:
            raise ValueError(f"state: expected one of {kind}, got one of {self.kind}; a new stream starts with State()")
        sums = self["keys"] if self["sum0"] is None else self["sum0"]
        if sums is not None and sums.shape[:-2] != tuple(batch):
            raise ValueError(
                f"state: expected one of {list(batch)} samples and heads, got one of {list(sums.shape[:-2])}; "
                "a new stream starts with State()"
            )

    def stamped(self, fingerprint: str, positions: Tensor | None) -> "State":
        """The stream of a scheme, at more positions; ValueError where it is another scheme's."""
        if self.fingerprint not in ("", fingerprint) or (self.kind and not self.fingerprint):
            raise ValueError(
                "state: expected one of this scheme with these options, got another's, or one from before an extension, "
                "whose keys have turned by other frequencies; start with State()"
            )
        old = {name: tensor for name, tensor in self.tensors.items() if name != "positions"}
        new = {} if positions is None else {"positions": positions}
        return replace(self, tensors=MappingProxyType(old | new), fingerprint=fingerprint)

    def reorder(self, index: Tensor) -> "State":
        """The streams of samples `index`, int64 ``[n]``, along the first axis: beams that are kept, or repeated."""
        shared = {name for name in ("positions", "places") if (x := self[name]) is not None and x.ndim == 2}
        own = {name: x if name in shared else x.index_select(0, index) for name, x in self.tensors.items()}
        return replace(self, tensors=MappingProxyType(own))

    def state_dict(self) -> dict[str, Tensor]:
        """Everything as tensors without gradients, to be saved."""
        texts = {name: torch.tensor(list(getattr(self, name).encode()), dtype=torch.uint8) for name in TEXTS}
        return {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()} | texts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and deep copies: of what `state_dict` holds."""
        return State.from_state_dict, (self.state_dict(),)

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor]) -> "State":
        """The inverse of `state_dict`."""
        rest = dict(tensors)
        texts = {name: bytes(rest.pop(name).tolist()).decode() for name in TEXTS}
        return cls(MappingProxyType(rest), texts["fingerprint"], texts["kind"])


def expect_state(state: object) -> None:
    """Raise TypeError where an argument is no state."""
    if not isinstance(state, State | None):
        raise TypeError(f"state: expected a State, got {type(state).__name__}; a new stream starts with State()")
