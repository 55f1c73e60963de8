"""A forecaster: rows of values at any times, of which those that are not known are found."""

from typing import Unpack

import torch
from torch import Tensor, nn

from isopos.models.blocks import Options, Schemes, Trunk

__all__ = ["Forecaster"]


class Forecaster(Trunk):
    """A bidirectional model of rows of values: a token each, which sees all others, and of which the head finds the values.

    What is to be found is NaN on the way in, be it missing or in the future: tokens are made of the values, zero where there
    is none, and of which there are. So it answers for the times that it is asked about, however far apart.

    Args:
        channels: Values of a row.
        model_dim, layers, scheme, options: Of `Trunk`.

    Examples:
        >>> import isopos
        >>> model = Forecaster(2, 36, 2, isopos.clock(18, 2))
        >>> values = torch.randn(1, 10, 2)
        >>> values[:, 7:] = torch.nan
        >>> hours = torch.arange(10, dtype=torch.float64) * 3600
        >>> model(values, isopos.positions.timestamps(hours)).shape
        torch.Size([1, 10, 2])
    """

    def __init__(self, channels: int, model_dim: int, layers: int, scheme: Schemes, **options: Unpack[Options]):
        super().__init__(nn.Linear(2 * channels, model_dim), model_dim, layers, scheme, **options)
        self.head = nn.Linear(model_dim, channels)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Values ``[b t c]`` of rows ``[b t c]``, NaN where they are not known, at positions ``[t c]`` or ``[b t c]``."""
        known = ~tokens.isnan()
        rows = torch.cat((torch.where(known, tokens, 0), known.to(tokens.dtype)), -1)
        return self.head(self.features(rows, positions))
