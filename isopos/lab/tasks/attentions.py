"""Baselines: attention of other papers in place of a scheme's, as `sinusoidal:attention=linformer`.

They require additive positions and bidirectional models: none of them is causal, takes a context or has a stream. Each is
made for a longest sample, to which shorter samples are padded with masked zeros, so that outputs do not depend on padding.
Sizes that a paper does not state are from Xiong et al.'s code for the Long Range Arena from 1,024 tokens on, and in
proportion below: 256 rows, 128 landmarks, chunks of 64 tokens.
"""

import importlib.util
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isopos.models import Classifier, Encoder, PairClassifier, Vision
from isopos.scheme import Scheme
from isopos.spec import of_layers, split_spec

KERNEL = 35  # width of Nyströmformer's convolution in tokens
HASHES = 2  # rounds of hashing in Reformer
LONGEST = 1024  # tokens of the longest sample if the task does not say
PERMITTED = (Classifier, Encoder, PairClassifier, Vision)


class BaselineAttention(nn.Module, ABC):
    """Bidirectional self-attention for samples of at most `length` tokens, with the call of `isopos.Attention`.

    Args:
        model_dim: Width of inputs and outputs.
        length: Tokens of the longest sample.
        dropout: Probability with which a weight is dropped in training.
    """

    def __init__(self, model_dim: int, heads: int, length: int, dropout: float):
        super().__init__()
        self.model_dim, self.heads, self.length, self.dropout = model_dim, heads, length, dropout
        self.filled = length  # padded length, in tokens
        self.out = nn.Linear(model_dim, model_dim)

    def forward(self, x: Tensor, at: object, *, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Attend from x ``[b t m]`` to the tokens of the mask ``[b t]``; `at` is ignored."""
        if refused := [name for name, value in options.items() if value is not None and value is not False]:
            name = type(self).__name__
            raise ValueError(f"{refused[0]}: expected none with {name}, which is bidirectional self-attention")
        t = x.shape[1]
        if t > self.length:
            raise ValueError(f"x: expected at most {self.length} tokens, for which {type(self).__name__} was made, got {t}")
        mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        x, mask = torch.where(mask[..., None], x, 0), mask.expand(x.shape[:2])
        more = self.filled - t
        return self.out(self.attend(F.pad(x, (0, 0, 0, more)), F.pad(mask, (0, more)))[:, :t])

    @abstractmethod
    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        """Outputs of all heads ``[b filled m]``; x ``[b filled m]`` is zero where the mask ``[b filled]`` is False."""


class Linformer(BaselineAttention):
    """Softmax attention to k learned mixtures of keys and of values over tokens, which heads share.

    head = softmax(Q (E K)^T / sqrt(d)) F V, with E and F of shape ``[k n]``: k = n / 4, but at most 256.

    Masked keys and values are zero ahead of the mixture. E and F start normal, with variance 1 / n.

    References:
        Linformer (Wang et al. 2020), Eq. 7. https://arxiv.org/abs/2006.04768
    """

    def __init__(self, model_dim: int, heads: int, length: int, dropout: float):
        super().__init__(model_dim, heads, length, dropout)
        self.project = nn.Linear(model_dim, 3 * model_dim)
        self.mix = nn.Parameter(torch.randn(2, min(256, -(-length // 4)), length) * length**-0.5)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, *both = self.project(x).chunk(3, -1)
        k, v = (self.mix @ torch.stack([torch.where(mask[..., None], a, 0) for a in both], 1)).unbind(1)
        q, k, v = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training)
        return y.transpose(1, 2).flatten(2)


class Nystromformer(BaselineAttention):
    """Softmax attention through landmarks, means of equally many neighbours, plus a convolution of values.

    The implementation is from transformers. The pseudo-inverse starts from the norm of each sample, as in the authors'
    later code; the paper takes the largest norm of a batch, so that samples influence each other. Padding is zero before
    the projections.

    References:
        Nyströmformer (Xiong et al. 2021), Eq. 13. https://arxiv.org/abs/2102.03902
    """

    def __init__(self, model_dim: int, heads: int, length: int, dropout: float):
        from transformers import NystromformerConfig  # pyright: ignore[reportMissingImports]
        from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention  # pyright: ignore[reportMissingImports]

        super().__init__(model_dim, heads, length, dropout)
        if dropout:
            raise ValueError(
                f"attention_dropout: expected 0 with nystromformer, which has no weights to drop, got {dropout}"
            )
        landmarks = min(128, -(-length // 8))
        self.filled = -(-length // landmarks) * landmarks
        config = NystromformerConfig(
            hidden_size=model_dim,
            num_attention_heads=heads,
            num_landmarks=landmarks,
            segment_means_seq_len=self.filled,
            conv_kernel_size=KERNEL,
        )
        self.inner = NystromformerSelfAttention(config)
        self.inner.init_option = "exact"

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        return self.inner(x, hidden[:, None, None])[0]


class Reformer(BaselineAttention):
    """Softmax attention within buckets of a locality-sensitive hash, with shared queries and keys.

    The implementation is from transformers. Each training step draws new hashes; evaluation always has the same ones.

    References:
        Reformer (Kitaev et al. 2020), section 2. https://arxiv.org/abs/2001.04451
    """

    def __init__(self, model_dim: int, heads: int, length: int, dropout: float):
        from transformers import ReformerConfig  # pyright: ignore[reportMissingImports]
        from transformers.models.reformer.modeling_reformer import LSHSelfAttention  # pyright: ignore[reportMissingImports]

        super().__init__(model_dim, heads, length, dropout)
        chunk = max(4, min(64, length // 16))
        chunks = -(-length // chunk)
        self.filled = chunks * chunk
        config = ReformerConfig(
            hidden_size=model_dim,
            num_attention_heads=heads,
            attention_head_size=model_dim // heads,
            attn_layers=["lsh"],
            lsh_attn_chunk_length=chunk,
            num_hashes=HASHES,
            num_buckets=2 ** ((2 * chunks).bit_length() - 1),
            lsh_attention_probs_dropout_prob=dropout,
            is_decoder=False,
        )
        self.inner = LSHSelfAttention(config)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            return self.inner(x, mask).hidden_states
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(0)
            return self.inner(x, mask).hidden_states


BASELINES: dict[str, type[BaselineAttention]] = {
    "linformer": Linformer,
    "nystromformer": Nystromformer,
    "reformer": Reformer,
}
PACKAGED = ("nystromformer", "reformer")  # from transformers


def absence(spec: str) -> str:
    """A message about the missing package of a scheme's attention, with the remedy; "" if nothing is missing."""
    name = next(
        (attention for one in of_layers(spec) if (attention := split_spec(one)[1].get("attention", "")) in PACKAGED), ""
    )
    if not name or importlib.util.find_spec("transformers") is not None:
        return ""
    return f"{name} needs the package transformers: pip install 'isopos[peers]'"


def check_baseline(name: str, scheme: Scheme, spec: str) -> None:
    """Raise a ValueError if a baseline does not fit a scheme, or its package is missing."""
    if not scheme.position_free or scheme.width > 1:
        raise ValueError(
            f"schemes: expected positions that are added to embeddings, as of sinusoidal and learned, or none, with "
            f"attention={name}, got {spec}"
        )
    if missing := absence(spec):
        raise ValueError(f"attention: {missing}")


def replace_attention(model: Any, name: str, length: object) -> None:
    """Replace the attention of each block by a baseline for samples of at most `length` tokens.

    Raises:
        ValueError: If the model is not bidirectional.
    """
    if not isinstance(model, PERMITTED):
        kinds = ", ".join(kind.__name__ for kind in PERMITTED)
        raise ValueError(
            f"schemes: expected attention linear or softmax in a {type(model).__name__}, got {name}, which is bidirectional "
            f"self-attention: for {kinds}"
        )
    longest = length if isinstance(length, int) else LONGEST
    block: Any
    for block in model.blocks:
        old = block.attention
        block.attention = BASELINES[name](old.out.in_features, old.heads, longest, old.dropout)
