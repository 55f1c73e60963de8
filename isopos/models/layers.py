"""One scheme per layer: some layers without positions, different decays, or linear and softmax attention mixed."""

import copy
import hashlib
from collections.abc import Sequence
from typing import Any, Self

from torch import nn

from isopos.deprecation import former_property
from isopos.embeddings import Embedding
from isopos.encodings import shortest
from isopos.phases import Phase
from isopos.positions import Group
from isopos.scheme import Scheme


class PerLayer(nn.Module):
    """Schemes of the layers of a model, in order. A scheme that several layers share is stored and evaluated once.

    All schemes must take the same kind of positions, or no positions. Only the first may add an embedding to the tokens.
    Models accept a list of schemes and convert it.

    Args:
        schemes: One per layer.

    Raises:
        ValueError: If there is no scheme, positions are of several kinds, or a layer after the first adds an embedding.

    Examples:
        >>> import torch
        >>> import isopos
        >>> rope, none = isopos.rope(8, 4), isopos.none(8, 4)
        >>> model = isopos.models.Decoder(256, 32, 4, [rope, rope, rope, none])  # no positions in every fourth layer
        >>> model(torch.arange(10)[None]).shape, len(model.scheme.parts)
        (torch.Size([1, 10, 256]), 2)
    """

    def __init__(self, schemes: Sequence[Scheme]):
        super().__init__()
        if not schemes or not all(isinstance(scheme, Scheme) for scheme in schemes):
            raise ValueError(f"scheme: expected a Scheme, or a list of one for each layer, got {schemes}")
        distinct = list(dict.fromkeys(schemes))
        self.parts, self.order = nn.ModuleList(distinct), tuple(distinct.index(scheme) for scheme in schemes)
        positional = [scheme for scheme in schemes if not scheme.position_free]
        if len(nouns := dict.fromkeys(scheme.group.noun for scheme in positional)) > 1:
            raise ValueError(f"scheme: expected positions of one kind in all layers, got a {' and a '.join(nouns)}")
        if any(scheme.embedding is not None and scheme is not schemes[0] for scheme in schemes):
            raise ValueError("scheme: expected an embedding in the first layer only, got one in a later layer")

    @property
    def each(self) -> tuple[Scheme, ...]:
        """The scheme of each layer."""
        parts: Any = self.parts
        return tuple(parts[n] for n in self.order)

    @property
    def group(self) -> Group:
        """The group of positions that all layers accept: one of integers, if some layer needs integers."""
        groups = [scheme.group for scheme in self.each if not scheme.position_free] or [self.each[0].group]
        return next((group for group in groups if not any(leaf.real for leaf in group.leaves)), groups[0])

    @property
    def embedding(self) -> Embedding | None:
        """The embedding of the first layer."""
        return self.each[0].embedding

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Content-dependent phases of all layers."""
        return tuple(dict.fromkeys(phase for scheme in self.each for phase in scheme.phases))

    path = former_property("path", "phases")

    @property
    def attention(self) -> str:
        """The kind of attention: "softmax" if any layer has it, else "linear"."""
        return "softmax" if any(scheme.attention == "softmax" for scheme in self.each) else "linear"

    @property
    def max_length(self) -> int | None:
        """Number of positions that all layers accept, from 0 on; None if unlimited."""
        return shortest(self.each)

    @property
    def outside(self) -> int:
        """Number of leading tokens without position."""
        return max(scheme.outside for scheme in self.each)

    @property
    def choices(self) -> dict[str, str]:
        """The choices of the schemes, each value once, joined by +."""
        every = [scheme.choices for scheme in self.each]
        return {name: " + ".join(dict.fromkeys(choices[name] for choices in every)) for name in every[0]}

    @property
    def fingerprint(self) -> str:
        """A hash of the fingerprints of the schemes, in the order of layers."""
        return hashlib.sha256("".join(scheme.fingerprint for scheme in self.each).encode()).hexdigest()

    def extend(self, name: str, **options: Any) -> Self:
        """Apply `Scheme.extend` to each scheme with positions; ValueError, without changes, if one refuses."""
        positional = [scheme for scheme in dict.fromkeys(self.each) if not scheme.position_free] or [self.each[0]]
        for scheme in (*copy.deepcopy(positional), *positional):  # first on copies: if one refuses, nothing changes
            scheme.extend(name, **options)
        return self
