"""Other libraries' attention and rotary embeddings, where they are installed: functions of the same inputs as ours."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PEERS", "Peer"]

EPSILON = 1e-6


class Peer(NamedTuple):
    """Another library: the module that has to be importable, its name to pip, and what to call.

    `make` takes the module and a length, and returns a function of queries, keys and, if it is attention, values.
    """

    module: str
    package: str
    make: Callable[[Any, int, int], Callable[..., Any]]
    note: str = ""

    def load(self) -> Any:
        """The module; ImportError where it is not installed, or does not fit what is."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(self.module)

    def absence(self) -> str:
        """Why the peer is not measured, and what to do; empty where it is installed."""
        try:
            self.load()
        except ImportError:
            return f"{self.package} is not installed: pip install {self.package}{self.note}"
        return ""


def _fast_transformers(module: Any, length: int, head_dim: int) -> Callable[..., Tensor]:
    """fast-transformers' `CausalLinearAttention`, by its kernel."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        divisor = torch.einsum("nhli,nhli->nhl", q, k.cumsum(2)) + EPSILON
        return module.causal_dot_product(q, k, v) * (1 / divisor).unsqueeze(-1)

    return attend


def _performer(module: Any, length: int, head_dim: int) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module.causal_linear_attention_noncuda(F.elu(q) + 1, F.elu(k) + 1, v)

    return attend


def _rotary_embedding_torch(module: Any, length: int, head_dim: int) -> Callable[..., Any]:
    rotate = module.RotaryEmbedding(head_dim).rotate_queries_or_keys
    return lambda q, k: (rotate(q), rotate(k))


def _x_transformers(module: Any, length: int, head_dim: int) -> Callable[..., Any]:
    angles, _ = module.RotaryEmbedding(head_dim)(torch.arange(length))
    return lambda q, k: (module.apply_rotary_pos_emb(q, angles), module.apply_rotary_pos_emb(k, angles))


def _llama(module: Any, length: int, head_dim: int) -> Callable[..., Any]:
    config = module.LlamaConfig(head_dim=head_dim, rope_theta=10000.0)
    tables = module.LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(length)[None])
    return lambda q, k: module.apply_rotary_pos_emb(q, k, *tables)


PEERS = {
    "fast-transformers": Peer(
        "fast_transformers.causal_product", "pytorch-fast-transformers", _fast_transformers, ", needs a compiler"
    ),
    "performer-pytorch": Peer("performer_pytorch.performer_pytorch", "performer-pytorch", _performer),
    "rotary-embedding-torch": Peer("rotary_embedding_torch", "rotary-embedding-torch", _rotary_embedding_torch),
    "x-transformers": Peer("x_transformers.x_transformers", "x-transformers", _x_transformers),
    "transformers": Peer("transformers.models.llama.modeling_llama", "transformers", _llama),
}
