"""States of linear attention as layers of a cache of transformers. Importing this module imports transformers (seconds)."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin  # pyright: ignore[reportMissingImports]

from isopos.state import State


class StateLayer(CacheLayerMixin):
    """Cache of one layer: its number of tokens, their `isopos.State`, and the state of a window.

    Sums of linear attention cannot forget single tokens, so this cache cannot be cropped.
    """

    is_sliding = False

    def __init__(self):
        super().__init__()
        self.reset()

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        """Store the state after `count` more tokens: ``layer.update(state, count)``; `near` is the state of a window."""
        if not isinstance(key_states, State):
            raise TypeError(f"state: expected a State, got {type(key_states).__name__}; the model's own layers make it")
        self.state, self.length, self.is_initialized = key_states, self.length + value_states, True
        self.near = kwargs.get("near", self.near)
        return self.state, self.length

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.near, self.length, self.is_initialized = State(), State(), 0, False

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        pass

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state, self.near = self.state.reorder(beam_idx), self.near.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the samples with these indices."""
        self.reorder_cache(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample."""
        first = self.state["keys"] if self.state["sum0"] is None else self.state["sum0"]
        if first is not None:
            self.reorder_cache(torch.arange(len(first), device=first.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError, unless there are no tokens."""
        if tokens_to_remove:
            raise ValueError(
                f"crop: expected no tokens to forget, since a state holds sums of all, got {tokens_to_remove}; keep the "
                "cache of before, or start with an empty one"
            )
