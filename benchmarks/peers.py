"""Adapters of other libraries' attention and rotary embeddings, one per library.

Libraries are imported when they are first used, because some imports take seconds.
"""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.decays import retnet_rates
from isopos.lab.bench.peers import Peer, Workload

__all__ = ["PEERS", "ROTARY"]

EPSILON = 1e-6
BASE = 10000.0


def _fast_transformers(module: Any, *_: Any) -> Workload:
    """The kernel of `CausalLinearAttention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        divisor = torch.einsum("nhli,nhli->nhl", q, k.cumsum(2)) + EPSILON
        return module.causal_dot_product(q, k, v) * (1 / divisor).unsqueeze(-1)

    return attend


def _performer(module: Any, *_: Any) -> Workload:
    """Causal attention without CUDA."""
    return lambda q, k, v: module.causal_linear_attention_noncuda(F.elu(q) + 1, F.elu(k) + 1, v)


def _rotary_embedding_torch(module: Any, x: Tensor, start: int, cast: torch.dtype | None) -> Workload:
    """Rotation that caches its angles."""
    rotate = module.RotaryEmbedding(x.shape[-1]).to(cast).rotate_queries_or_keys
    return lambda q, k: (rotate(q, offset=start), rotate(k, offset=start))


def _x_transformers(module: Any, x: Tensor, start: int, cast: torch.dtype | None) -> Workload:
    angles, _ = module.RotaryEmbedding(x.shape[-1]).to(cast)(torch.arange(start, start + x.shape[-2]))
    return lambda q, k: tuple(module.apply_rotary_pos_emb(tokens, angles) for tokens in (q, k))


def _llama(module: Any, x: Tensor, start: int, cast: torch.dtype | None) -> Workload:
    config = module.LlamaConfig(head_dim=x.shape[-1], rope_theta=BASE)
    tables = module.LlamaRotaryEmbedding(config).to(cast)(x, torch.arange(start, start + x.shape[-2])[None])
    return lambda q, k: module.apply_rotary_pos_emb(q, k, *tables)


def _roformer(module: Any, x: Tensor, start: int, cast: torch.dtype | None) -> Workload:
    """Rotation by a table that a Python loop fills from position 0 on, in minutes and gigabytes at 10^6."""
    embedding = module.RoFormerSinusoidalPositionalEmbedding(start + x.shape[-2], x.shape[-1])
    embedding.weight.data = embedding.create_weight()
    table = embedding.to(cast)((1, x.shape[-2]), past_key_values_length=start)
    return partial(module.RoFormerSelfAttention.apply_rotary_position_embeddings, table)


def _fla_linear(module: Any, *_: Any) -> Workload:
    """Linear attention with tokens before heads in the library's layout."""
    return lambda q, k, v: module.chunk_linear_attn(*_tokens_first(q, k, v), scale=1.0, normalize=False)[0].transpose(1, 2)


def _fla_gated(module: Any, *_: Any) -> Workload:
    """With RetNet's decays, one per head as in fla's retention, because gates of tokens would have gradients."""
    rates = cache(lambda heads, device: -retnet_rates(heads).to(device, torch.float32))  # copies to a GPU synchronise

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decay = rates(q.shape[1], q.device)
        return module.chunk_simple_gla(*_tokens_first(q, k, v), g_gamma=decay, scale=1.0)[0].transpose(1, 2)

    return attend


def _tokens_first(*heads: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in heads)


def _triton_rotary(name: str, module: Any, x: Tensor, start: int, cast: torch.dtype | None) -> Workload:
    """Rotation of tokens ``[b t h d]`` by cosines and sines ``[t d/2]`` in the dtype of the tokens."""
    frequency = BASE ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angle = torch.arange(start, start + x.shape[-2])[:, None] * frequency
    cos, sin = (part.to(cast or x.dtype) for part in (angle.cos(), angle.sin()))
    rotate = getattr(module, name)

    def both(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(rotate(part, cos, sin, interleaved=True).transpose(1, 2) for part in _tokens_first(q, k))

    return both


HF = "transformers"
FLA = "flash-linear-attention"
ROTARY = {
    "rotary-embedding-torch": Peer("rotary_embedding_torch", "rotary-embedding-torch", _rotary_embedding_torch),
    "x-transformers": Peer("x_transformers.x_transformers", "x-transformers", _x_transformers),
    "transformers Llama": Peer(f"{HF}.models.llama.modeling_llama", HF, _llama, layout="half"),
    "transformers RoFormer": Peer(f"{HF}.models.roformer.modeling_roformer", HF, _roformer, longest=2**16),
}
PEERS = {
    "fast-transformers": Peer(
        "fast_transformers.causal_product", "pytorch-fast-transformers", _fast_transformers, note=", needs a compiler"
    ),
    "performer-pytorch": Peer("performer_pytorch.performer_pytorch", "performer-pytorch", _performer),
    **ROTARY,
    "fla, linear attention": Peer("fla.ops.linear_attn", FLA, _fla_linear, note=", needs a GPU"),
    "fla, simple gated linear attention": Peer("fla.ops.simple_gla", FLA, _fla_gated, note=", needs a GPU"),
    "fla, rotary": Peer("fla.modules.rotary", FLA, partial(_triton_rotary, "rotary_embedding"), note=", needs a GPU"),
    "flash-attn, rotary": Peer(
        "flash_attn.layers.rotary", "flash-attn", partial(_triton_rotary, "apply_rotary_emb"), note=", needs a GPU"
    ),
}
