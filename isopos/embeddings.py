"""Absolute positions added to token embeddings. These baselines are no representations and obey no relative law."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from isopos.catalog import at_least
from isopos.exact import ExactModule, cast_down, normal, to_float64
from isopos.ops.rotate import angles
from isopos.positions import Group, Line, Tree

__all__ = ["Embedding", "Learned", "Sinusoidal", "TreeStack"]


class Embedding(nn.Module, ABC):
    """Vectors of `model_dim` features at positions of `group`. Subclasses are final; they set both and define `forward`."""

    group: Group
    model_dim: int
    max_length: int | None = None  # number of valid positions, from 0; None: unlimited

    @abstractmethod
    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Vectors ``[*b t model_dim]`` at positions x ``[*b t c]``."""


class Sinusoidal(Embedding):
    """p_{x, 2t} = sin(x / 10000^(2t/d)), p_{x, 2t+1} = cos(x / 10000^(2t/d)) (Vaswani et al. 2017, section 3.5).

    Args:
        model_dim: d, even.
        scale: Factor of all values; 1 in the paper, whose token embeddings have unit variance.

    Examples:
        >>> Sinusoidal(4)(torch.tensor([[0]])).tolist()
        [[0.0, 1.0, 0.0, 1.0]]
    """

    group = Line(real=True)

    def __init__(self, model_dim: int, *, scale: float = 1.0):
        super().__init__()
        if at_least("model_dim", model_dim) % 2:
            raise ValueError(f"model_dim: expected an even width, got {model_dim}")
        self.model_dim, self.scale = model_dim, scale
        self.frequency = 10000.0 ** (-torch.arange(0, model_dim, 2, device="cpu", dtype=torch.float64) / model_dim)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        self.group.check(x)
        angle = angles(x, self.frequency[None, None]).squeeze(-3)
        return cast_down(self.scale * torch.stack((angle.sin(), angle.cos()), -1).flatten(-2), dtype, x.device)


class Learned(Embedding, ExactModule):
    """One learned vector for each position from 0 to length - 1 (Gehring et al. 2017).

    Args:
        length: Number of positions. Other positions raise an error.
        model_dim: Width.
        seed: Seed of the normal initial values (standard deviation 0.02).
    """

    group = Line()

    def __init__(self, length: int, model_dim: int, *, seed: int = 0):
        super().__init__()
        self.model_dim, self.max_length, self.seed = at_least("model_dim", model_dim), at_least("length", length), seed
        self.weight = nn.Parameter(torch.empty(length, model_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Restore the initial values."""
        if not self.weight.is_meta:
            with torch.no_grad():
                self.weight.copy_(0.02 * normal(self.seed, *self.weight.shape))

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        self.group.check(x)
        length, row = len(self.weight), x[..., 0].long()
        if torch.compiler.is_compiling():
            row = torch.where(row < 0, length, row)  # which indexing refuses, too
        elif x.numel() and not x.is_meta and not is_batchedtensor(x) and not 0 <= x.min() <= x.max() < length:
            span = f"{int(x.min())} to {int(x.max())}"
            raise ValueError(f"positions: expected 0 to {length - 1}, which have learned vectors, got {span}")
        return self.weight[row].to(dtype)


class TreeStack(Embedding, ExactModule):
    """A tree node as the stack of its last branches: one-hot vectors, nearest first; step i is weighted by p^i.

    Several copies, each with a learned p = tanh(w), share the width. The norm for an infinite path is sqrt(model_dim / 2),
    as for sinusoids.

    Args:
        branches: n, of the trees.
        model_dim: Width, at least n * depth; features that do not fill another copy stay zero.
        depth: Steps towards the root that are encoded.

    References:
        Novel positional encodings to enable tree-based transformers (Shiv and Quirk, NeurIPS 2019).

    Examples:
        >>> from isopos.positions import tree
        >>> TreeStack(2, 8, 4)(tree("(a b (c d))")).ne(0).int().tolist()
        [[0, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]]
    """

    def __init__(self, branches: int, model_dim: int, depth: int):
        super().__init__()
        self.group, self.branches, self.model_dim, self.depth = Tree(branches), branches, model_dim, depth
        copies = model_dim // (branches * max(depth, 1))
        if depth < 1 or copies < 1:
            raise ValueError(
                f"depth: expected 1 to {model_dim // branches} of {branches} branches in width {model_dim}, got {depth}"
            )
        self.parametrise("decay", torch.linspace(0.6, 0.95, copies, device="cpu", dtype=torch.float64).atanh(), learned=True)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        self.group.check(x)
        parent, branch = x.long().unbind(-1)
        node = torch.arange(x.shape[-2], device=x.device).expand(parent.shape)
        steps = []
        for _ in range(self.depth):
            inside = node >= 0
            row = node.clamp_min(0)
            taken = torch.where(inside, branch.gather(-1, row), -1)
            steps.append(taken[..., None] == torch.arange(self.branches, device=x.device))
            node = torch.where(inside, parent.gather(-1, row), -1)
        p = to_float64(self.parameter, x.device).tanh()[:, None]
        powers = p ** torch.arange(self.depth, device=p.device) * (self.model_dim / 2 / len(p) * (1 - p.square())).sqrt()
        out = (torch.stack(steps, -2).unsqueeze(-3).to(p.device) * powers[..., None]).flatten(-3)
        return cast_down(torch.nn.functional.pad(out, (0, self.model_dim - out.shape[-1])), dtype, x.device)
