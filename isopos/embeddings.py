"""Absolute positions added to token embeddings: the baselines that are no representations and obey no relative law."""

import torch
from torch import Tensor, nn

from isopos.ops.rotate import angles
from isopos.positions import Line

__all__ = ["Learned", "Sinusoidal"]


class Sinusoidal(nn.Module):
    """p_{x, 2t} = sin(x / 10000^(2t/d)), p_{x, 2t+1} = cos(x / 10000^(2t/d)) (Vaswani et al. 2017, section 3.5).

    Args:
        model_dim: d, even.
        scale: Factor of all, 1 in the paper, whose token embeddings have unit variance.

    Example:
        >>> Sinusoidal(4)(torch.tensor([[0]])).tolist()
        [[0.0, 1.0, 0.0, 1.0]]
    """

    max_length = None

    def __init__(self, model_dim: int, *, scale: float = 1.0):
        super().__init__()
        if model_dim % 2:
            raise ValueError(f"model_dim: expected an even width, got {model_dim}")
        self.model_dim, self.scale = model_dim, scale
        self.frequency = 10000.0 ** (-torch.arange(0, model_dim, 2, device="cpu", dtype=torch.float64) / model_dim)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Embeddings ``[*b t model_dim]`` of positions ``[*b t 1]``."""
        Line(real=True).check(x)
        angle = angles(x, self.frequency[None, None]).squeeze(-3)
        return (self.scale * torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)).to(dtype)


class Learned(nn.Module):
    """One learned vector for each of the positions 0 to length - 1 (Gehring et al. 2017).

    Args:
        length: Number of positions. Others have no vector and raise an error.
        model_dim: Width.
        seed: Of the normal initial values (standard deviation 0.02).
    """

    def __init__(self, length: int, model_dim: int, *, seed: int = 0):
        super().__init__()
        if length < 1:
            raise ValueError(f"length: expected at least 1, got {length}")
        self.model_dim, self.max_length, self.seed = model_dim, length, seed
        self.weight = nn.Parameter(torch.empty(length, model_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the initial values."""
        if not self.weight.is_meta:
            generator = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                self.weight.copy_(0.02 * torch.randn(self.weight.shape, generator=generator, device="cpu"))

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Embeddings ``[*b t model_dim]`` of positions ``[*b t 1]``."""
        Line().check(x)
        if not torch.compiler.is_compiling() and x.numel() and not 0 <= x.min() <= x.max() < self.max_length:
            span = f"{int(x.min())} to {int(x.max())}"
            raise ValueError(f"positions: expected 0 to {self.max_length - 1}, which have learned vectors, got {span}")
        return self.weight[x[..., 0].long()].to(dtype)
