"""Kinds of attention as values: the choices of a scheme that only linear or only softmax attention has."""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from isopos.catalog import expect
from isopos.feature_maps import FEATURE_MAPS

__all__ = ["FIELDS", "AttentionName", "DenominatorName", "Linear", "Softmax", "feature_names", "kind_of"]

AttentionName = Literal["linear", "softmax"]
DenominatorName = Literal["plain", "encoded", "complex", "none"]


def feature_names() -> tuple[str, ...]:
    """The names of all registered feature maps."""
    return (*FEATURE_MAPS, "favor")


@dataclass(frozen=True)
class Kind:
    """Base class of `Linear` and `Softmax`."""

    name: ClassVar[str]

    @property
    def chosen(self) -> dict[str, Any]:
        """Fields that are not None or False, by name: the short form for presets."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, False)}


@dataclass(frozen=True)
class Linear(Kind):
    """Linear attention: weights are inner products of features.

    Args:
        feature_map: phi: a name of `FEATURE_MAPS`, or "favor"; "auto" is "elu+1".
        denominator: "plain", "encoded", "complex" or "none" (then `Attention` normalises each head's output); "auto" is
            "plain", or "encoded" with `inside`.
        inside: Whether the coupling acts before the feature map.

    Raises:
        ValueError: For an unknown name, and for a plain denominator with `inside`.

    Examples:
        >>> import isopos
        >>> kind = Linear(feature_map="relu", denominator="encoded")
        >>> isopos.Scheme(isopos.rope(16, 2).encoding, 2, attention=kind).choices["feature_map"]
        'relu'
    """

    feature_map: str = "auto"
    denominator: str = "auto"
    inside: bool = False

    name: ClassVar[str] = "linear"
    scale: ClassVar[None] = None
    locality: ClassVar[None] = None
    metric: ClassVar[None] = None

    def __post_init__(self) -> None:
        expect("feature_map", self.feature_map, ("auto", *feature_names()))
        expect("denominator", self.denominator, ("auto", *get_args(DenominatorName)))
        if self.inside and self.denominator == "plain":
            raise ValueError(
                "denominator: expected 'encoded' or 'none', since the encoding acts ahead of the feature map, got 'plain'"
            )
        if self.feature_map == "auto":
            object.__setattr__(self, "feature_map", "elu+1")
        if self.denominator == "auto":
            object.__setattr__(self, "denominator", "encoded" if self.inside else "plain")


@dataclass(frozen=True)
class Softmax(Kind):
    """Softmax attention: weights are exponentials of logits.

    Args:
        scale: Scale of logits; d^-1/2 by default.
        locality: <rho(x_i) q_i, rho(x_j) k_j> is multiplied by locality^distance (APE, section 4.2).
        metric: Distance of locality: by default the distance of the group, or "euclidean", the straight distance on a grid,
            rounded down.

    Raises:
        ValueError: For a number out of range, and for a metric without a locality.

    Examples:
        >>> import isopos
        >>> scheme = isopos.Scheme(isopos.rope(16, 2).encoding, 2, attention=Softmax(locality=0.98))
        >>> scheme.at(isopos.sequence(3))["locality"].shape
        torch.Size([3, 3])
    """

    scale: float | None = None
    locality: float | None = None
    metric: str | None = None

    name: ClassVar[str] = "softmax"
    feature_map: ClassVar[str] = "softmax"  # entries of `Scheme.choices`
    denominator: ClassVar[str] = "softmax"
    inside: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.locality is not None and not 0 < self.locality <= 1:
            raise ValueError(f"locality: expected a factor per step in (0, 1], got {self.locality}")
        if self.metric is not None and (self.locality is None or self.metric != "euclidean"):
            raise ValueError(f"metric: expected none, or euclidean for a locality on a grid, got {self.metric!r}")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"scale: expected a positive number, got {self.scale}")


KINDS = {"linear": Linear, "softmax": Softmax}
FIELDS = tuple(field.name for kind in KINDS.values() for field in fields(kind))


def kind_of(attention: str = "linear", **values: Any) -> Linear | Softmax:
    """The kind of this name with these fields; ValueError for an invalid value, or for a field of the other kind.

    Examples:
        >>> kind_of("softmax", scale=0.5)
        Softmax(scale=0.5, locality=None, metric=None)
    """
    expect("attention", attention, KINDS)
    for name in values:
        expect("choice of attention", name, FIELDS)
    kinds = {
        name: kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
        for name, kind in KINDS.items()
    }
    for field in fields(kinds["softmax" if attention == "linear" else "linear"]):
        if (value := values.get(field.name, field.default)) == field.default:
            continue
        if attention == "linear":
            raise ValueError(f"{field.name}: expected softmax attention, whose logits it multiplies, got linear")
        if field.name == "inside":
            raise ValueError("inside: expected False with softmax attention, which has no feature map, got True")
        raise ValueError(f"{field.name}: expected no choice with softmax attention, which determines it, got {value!r}")
    return kinds[attention]
