"""Linear attention in the layers of a model of transformers: states in its cache, and a window of softmax attention.

The model's code computes queries, keys and values. A layer's cache is a `StateLayer` of constant size instead of keys.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isopos.attention import linear_attention, softmax_attention
from isopos.integrations.transformers.evaluated import Evaluated
from isopos.maps import pair

MASK = (
    "attention_mask: expected keys that are hidden from all queries, and no query that sees later keys, since sums of "
    "linear attention hold all keys before"
)


class Window(nn.Module):
    """Softmax attention to the nearest keys combined with linear attention to all keys, in every layer.

    out = w softmax(scale <rho(x_i) q_i, rho(x_j) k_j>) v + (1 - w) linear, with i - size < j <= i and a learned share
    w = sigmoid(logit) per layer and head of queries, initially 1/2. The softmax uses the scheme's isometry, with the
    attention factor of its extension, and no decay.

    Args:
        size: Number of keys that a query sees by softmax, the key at its position included.
        layers: Number of layers.
        heads: Number of heads of queries.
    """

    def __init__(self, size: int, layers: int, heads: int):
        super().__init__()
        self.size = size
        self.logit = nn.Parameter(torch.zeros(layers, heads))


class LinearLayer:
    """Linear attention of one layer in one forward pass; the layer takes it as its cache and as an argument.

    Args:
        evaluated: The scheme at the positions of the pass.
        index: Number of the layer.
        cache: The model's cache, or None.
    """

    def __init__(self, evaluated: Evaluated, index: int, cache: Any):
        self.evaluated, self.index, self.cache = evaluated, index, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return new keys and values unchanged; attention updates the cache's state later."""
        return keys, values

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
    ) -> Tensor:
        """Attention of new queries ``[b h t d]`` to new keys ``[b h t d]`` and to those of the state: ``[b h t e]``.

        Args:
            mask: The model's mask ``[b 1 t s]``, causal with padding, or one of new keys ``[b t]``; None if all are seen.
            scaling: Factor of logits in the window.
            dropout: Probability of dropping a weight in the window.
        """
        scheme, window = self.evaluated.scheme, self.evaluated.window
        at, layer, t = self.evaluated.at_queries(q), self._layer(), q.shape[-2]
        keys = mask if mask is None or mask.ndim == 2 else mask_of_keys(mask, t)
        if keys is not None and "group" not in at and _all_are_seen(keys):
            keys = None
        options: dict[str, Any] = {"causal": True, "mask": keys, "return_state": layer is not None}
        state = {} if layer is None else {"state": layer.state.stamped(scheme.fingerprint, None)}
        out: Any = linear_attention(q, k, v, **at | state | options)
        out, after = out if layer is not None else (out, None)
        out = F.layer_norm(out, out.shape[-1:]) if scheme.normalised else out
        near = None if layer is None else layer.near
        if window is not None:
            maps: dict[str, Any] = {name: at[name] for name in ("isometry", "transport", "group") if name in at}
            if (factor := scheme.rotary_factor) != 1:
                maps["isometry"] = tuple(scheme.encoding.rescaled(side, factor) for side in pair(maps["isometry"]))
            scale = (q.shape[-1] ** -0.5 if scaling is None else scaling) * scheme.sharpness
            options |= {"scale": scale, "window": window.size, "dropout": dropout, "state": near}
            of_window: Any = softmax_attention(q, k, v, **maps, **options)
            of_window, near = of_window if layer is not None else (of_window, None)
            share = window.logit[self.index].sigmoid()[:, None, None].to(out.dtype)
            out = out + share * (of_window - out)
        if layer is not None:
            layer.update(after, t, near=near)
        return out

    def _layer(self) -> Any:
        """The cache's layer, or None without a cache. An empty layer for keys is replaced by one for a state."""
        if self.cache is None:
            return None
        from transformers.cache_utils import DynamicLayer  # pyright: ignore[reportMissingImports]

        from isopos.integrations.transformers.states import StateLayer

        layers, index = self.cache.layers, self.index
        if self.cache.layer_class_to_replicate is DynamicLayer:
            layers.extend(StateLayer() for _ in range(len(layers), index + 1))
        if index < len(layers) and type(layers[index]) is DynamicLayer and not layers[index].is_initialized:
            layers[index] = StateLayer()
        if index >= len(layers) or not isinstance(layers[index], StateLayer):
            got = type(layers[index]).__name__ if index < len(layers) else "fewer layers"
            raise ValueError(
                "past_key_values: expected a DynamicCache without tokens, or what this model returned, for the states of "
                f"linear attention, got {got}"
            )
        return layers[index]


def _all_are_seen(keys: Tensor) -> bool:
    """Whether a mask hides nothing; on GPUs False without a look, which would wait for the device."""
    return keys.device.type == "cpu" and not torch.compiler.is_compiling() and bool(keys.all())


def mask_of_keys(mask: Tensor, t: int) -> Tensor:
    """Mask ``[b t]`` of the last t keys from a mask ``[b 1 t s]``; an error unless that is causal with padding."""
    seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min)[:, 0, :, mask.shape[-1] - t :]
    keys = seen.any(-2)
    expected = keys[:, None] & torch.ones(t, t, dtype=torch.bool, device=mask.device).tril()
    torch._assert_async(((seen == expected) | ~keys[..., None]).all(), MASK)  # pyright: ignore
    return keys
