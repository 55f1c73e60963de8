"""A classifier of images: patches are tokens on a grid, or row by row on a line, as the scheme requires."""

from typing import Literal, Unpack

from torch import Tensor, nn

from isopos.catalog import at_least, expect
from isopos.models.blocks import ModelOptions, Schemes, Trunk
from isopos.positions import grid, sequence


class Patches(nn.Module):
    """Tokens ``[b t m]`` of images ``[b c h w]`` with pixels 0 to 255: one per patch of n by n pixels, row by row.

    Args:
        channels: c.
        model_dim: m.
        kind: "patches", non-overlapping squares, whose side divides h and w, as in ViT; or "convolution": 3 by 3, ReLU and
            max pooling, on images of any size, as in CCT.
        side: n.

    References:
        An image is worth 16x16 words (Dosovitskiy et al. 2021). https://arxiv.org/abs/2010.11929
        Escaping the big data paradigm with compact transformers (Hassani et al. 2021). https://arxiv.org/abs/2104.05704
    """

    def __init__(self, channels: int, model_dim: int, kind: str, side: int):
        super().__init__()
        self.kind, self.side, half = kind, at_least("patch", side), side // 2
        expect("tokenizer", kind, ("patches", "convolution"))
        if kind == "patches":
            self.project, self.pool = nn.Conv2d(channels, model_dim, side, side), nn.Identity()
        else:
            self.project = nn.Conv2d(channels, model_dim, 3, padding=1)
            self.pool = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2 * half + 1, side, padding=half))

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError if patches do not fit."""
        for name, size in (("height", height), ("width", width)):
            if size < 1 or (self.kind == "patches" and size % self.side):
                raise ValueError(f"{name}: expected a multiple of the {self.side} pixels of a patch, got {size}")
        return -(-height // self.side), -(-width // self.side)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.to(self.project.weight.dtype) / 127.5 - 1
        return self.pool(self.project(x)).flatten(2).mT


class Vision(Trunk):
    """A bidirectional classifier of images of any size, with pooling instead of a class token.

    Args:
        channels: Number of values per pixel.
        classes: Number of classes.
        model_dim, layers, scheme, options: Arguments of `Trunk`.
        tokenizer, patch: `kind` and `side` of `Patches`.
        pooling: "mean" of all tokens; or "sequence", a mean weighted by a softmax over the tokens' products with a learned
            vector, as in CCT.

    Examples:
        >>> import torch
        >>> import isopos
        >>> model = Vision(3, 10, 32, 2, isopos.ape_grid(8, 4), patch=8)
        >>> model(torch.zeros(1, 3, 32, 48, dtype=torch.uint8)).shape
        torch.Size([1, 10])
    """

    tokens: Patches

    def __init__(
        self,
        channels: int,
        classes: int,
        model_dim: int,
        layers: int,
        scheme: Schemes,
        *,
        tokenizer: Literal["patches", "convolution"] = "patches",
        patch: int = 4,
        pooling: Literal["mean", "sequence"] = "mean",
        **options: Unpack[ModelOptions],
    ):
        expect("pooling", pooling, ("mean", "sequence"))
        super().__init__(Patches(channels, model_dim, tokenizer, patch), model_dim, layers, scheme, **options)
        self.pool = nn.Linear(model_dim, 1) if pooling == "sequence" else None
        self.head = nn.Linear(model_dim, classes)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits ``[b classes]`` of images ``[b c h w]`` with pixels from 0 to 255.

        By default positions are rows and columns if the scheme takes positions on a grid, else token numbers.
        """
        sides = self.tokens.sides(*tokens.shape[-2:])
        if positions is None:
            flat = self.scheme.group.columns == 1
            positions = sequence(sides[0] * sides[1], device=tokens.device) if flat else grid(*sides, device=tokens.device)
        x = self.features(tokens, positions)
        return self.head(x.mean(1) if self.pool is None else (self.pool(x).softmax(1) * x).sum(1))
