"""Other libraries' attention and rotary embeddings, where they are installed: one adapter each.

Nothing of theirs is imported before it is used: a whole model of theirs takes seconds.
"""

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PEERS", "ROTARY", "Peer", "Rotary"]

EPSILON = 1e-6
BASE = 10000.0
Work = Callable[..., Any]  # of queries, keys and, if it is attention, values ``[b h t d]``


class Peer(ABC):
    """Another library: the module that has to be importable, its name to pip, and what to call."""

    module: str
    package: str
    note: str = ""

    def load(self) -> Any:
        """The module; ImportError where it is not installed, or does not fit what is."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(self.module)

    def absence(self) -> str:
        """Why the peer is not measured, and what to do; empty where it can be imported."""
        try:
            self.load()
        except ImportError:
            return f"{self.package} is not installed: pip install {self.package}{self.note}"
        return ""

    @abstractmethod
    def work(self, length: int, head_dim: int) -> Work:
        """A function of features of these sizes."""


class Rotary(Peer):
    """A rotary embedding with base 10000, as functions that rotate queries and keys alike."""

    layout: Literal["interleaved", "half"] = "interleaved"  # pairs are features 2i, 2i + 1, or i, i + d/2
    longest: int = 2**62  # positions that it reaches in a reasonable time

    @abstractmethod
    def rotation(self, x: Tensor, start: int = 0, cast: torch.dtype | None = None) -> Work:
        """For features like x at the positions from `start` on, by the library's module, which may be cast to a dtype."""

    def work(self, length: int, head_dim: int) -> Work:
        return self.rotation(torch.empty(length, head_dim))


class FastTransformers(Peer):
    """fast-transformers' `CausalLinearAttention`, by its kernel."""

    module, package = "fast_transformers.causal_product", "pytorch-fast-transformers"
    note = ", needs a compiler"

    def work(self, length: int, head_dim: int) -> Work:
        module = self.load()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            divisor = torch.einsum("nhli,nhli->nhl", q, k.cumsum(2)) + EPSILON
            return module.causal_dot_product(q, k, v) * (1 / divisor).unsqueeze(-1)

        return attend


class Performer(Peer):
    """performer-pytorch's causal attention without CUDA."""

    module = "performer_pytorch.performer_pytorch"
    package = "performer-pytorch"

    def work(self, length: int, head_dim: int) -> Work:
        attend = self.load().causal_linear_attention_noncuda
        return lambda q, k, v: attend(F.elu(q) + 1, F.elu(k) + 1, v)


class RotaryEmbeddingTorch(Rotary):
    """rotary-embedding-torch, which keeps its angles."""

    module, package = "rotary_embedding_torch", "rotary-embedding-torch"

    def rotation(self, x: Tensor, start: int = 0, cast: torch.dtype | None = None) -> Work:
        rotate = self.load().RotaryEmbedding(x.shape[-1]).to(cast).rotate_queries_or_keys
        return lambda q, k: (rotate(q, offset=start), rotate(k, offset=start))


class XTransformers(Rotary):
    """x-transformers."""

    module, package = "x_transformers.x_transformers", "x-transformers"

    def rotation(self, x: Tensor, start: int = 0, cast: torch.dtype | None = None) -> Work:
        module = self.load()
        angles, _ = module.RotaryEmbedding(x.shape[-1]).to(cast)(torch.arange(start, start + x.shape[-2]))
        return lambda q, k: tuple(module.apply_rotary_pos_emb(tokens, angles) for tokens in (q, k))


class Llama(Rotary):
    """Transformers' Llama."""

    module, package, layout = "transformers.models.llama.modeling_llama", "transformers", "half"

    def rotation(self, x: Tensor, start: int = 0, cast: torch.dtype | None = None) -> Work:
        module = self.load()
        config = module.LlamaConfig(head_dim=x.shape[-1], rope_theta=BASE)
        tables = module.LlamaRotaryEmbedding(config).to(cast)(x, torch.arange(start, start + x.shape[-2])[None])
        return lambda q, k: module.apply_rotary_pos_emb(q, k, *tables)


class RoFormer(Rotary):
    """Transformers' RoFormer: a Python loop fills its table from position 0 on, a minute or two and gigabytes at 10^6."""

    module, package, longest = "transformers.models.roformer.modeling_roformer", "transformers", 2**16

    def rotation(self, x: Tensor, start: int = 0, cast: torch.dtype | None = None) -> Work:
        module = self.load()
        embedding = module.RoFormerSinusoidalPositionalEmbedding(start + x.shape[-2], x.shape[-1])
        embedding.weight.data = embedding.create_weight()
        table = embedding.to(cast)((1, x.shape[-2]), past_key_values_length=start)
        return partial(module.RoFormerSelfAttention.apply_rotary_position_embeddings, table)


ROTARY: dict[str, Rotary] = {
    "rotary-embedding-torch": RotaryEmbeddingTorch(),
    "x-transformers": XTransformers(),
    "transformers Llama": Llama(),
    "transformers RoFormer": RoFormer(),
}
PEERS: dict[str, Peer] = {"fast-transformers": FastTransformers(), "performer-pytorch": Performer(), **ROTARY}
