"""A forecaster of rows of values at any times."""

from typing import Unpack

import torch
from torch import Tensor, nn

from isopos.models.blocks import ModelOptions, Schemes, Trunk


class Forecaster(Trunk):
    """A bidirectional model that predicts unknown values in rows of values, one token per row.

    Unknown values, missing or in the future, are NaN in the input. A token consists of the values, with 0 for unknown ones,
    and a flag for each value. Times may be any distance apart.

    Args:
        channels: Number of values per row.
        model_dim, layers, scheme, options: Arguments of `Trunk`.

    Examples:
        >>> import isopos
        >>> model = Forecaster(2, 36, 2, isopos.clock(18, 2))
        >>> values = torch.randn(1, 10, 2)
        >>> values[:, 7:] = torch.nan
        >>> hours = torch.arange(10, dtype=torch.float64) * 3600
        >>> model(values, isopos.positions.timestamps(hours)).shape
        torch.Size([1, 10, 2])
    """

    in_shards = True

    def __init__(self, channels: int, model_dim: int, layers: int, scheme: Schemes, **options: Unpack[ModelOptions]):
        super().__init__(nn.Linear(2 * channels, model_dim), model_dim, layers, scheme, **options)
        self.head = nn.Linear(model_dim, channels)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Values ``[b t c]`` from rows ``[b t c]`` with NaN for unknown ones, at positions ``[t c]`` or ``[b t c]``."""
        observed = ~tokens.isnan()
        rows = torch.cat((torch.where(observed, tokens, 0), observed.to(tokens.dtype)), -1)
        return self.head(self.features(rows, positions))
