"""A scheme: the choices that make attention see positions, as one module. `isopos.schemes` has the named ones."""

import hashlib
import math
from functools import cached_property
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from isopos.bases import ComplexFourier, Pairs
from isopos.biases import ClippedKeys, RelativeBias
from isopos.decays import RATES, Decay
from isopos.embeddings import Learned, Sinusoidal, TreeStack
from isopos.encodings import Coupling, Encoding, InBasis, Rotary
from isopos.feature_maps import FEATURE_MAPS, Favor, Phi, sides
from isopos.maps import Mapped, TokenMap
from isopos.positions import Group, Line
from isopos.state import State, expect_state

__all__ = ["Choices", "Scheme", "expect"]


class Choices(TypedDict, total=False):
    """Options of every scheme."""

    attention: Literal["linear", "softmax"]
    feature_map: Literal["elu+1", "relu", "relu2", "exp", "favor", "identity"]
    decay: Literal["none", "retnet", "permuteformer", "alibi"]
    denominator: Literal["plain", "encoded", "complex", "none"]


class Scheme(nn.Module):
    """The choices that make attention see positions, ready for `linear_attention` or `softmax_attention`.

    Args:
        encoding: rho, for `heads` heads: an `Encoding`, or a `Coupling` that is none.
        heads: Number of key heads.
        attention: "linear" or "softmax".
        feature_map: phi of linear attention: a name of `FEATURE_MAPS`, or "favor"; "auto" is "elu+1".
        decay: A name of `decays.RATES`, a `Decay`, or "none"; of positions on a line.
        denominator: Of linear attention: "plain" (also "auto"), "encoded", "complex" or "none" (then `Attention` normalises
            each head's output).
        embedding: Absolute positions to add to the token embeddings, or None.
        bias: Relative terms, or None. Linear attention takes `ClippedKeys` only.
        scale: Of softmax attention; d^-1/2 of the queries by default.
        locality: Softmax attention multiplies <rho(x_i) q_i, rho(x_j) k_j> by locality^distance (APE, section 4.2).
        inside: Whether the coupling acts ahead of the feature map.
        width: Features of queries and keys are so many times the head size, by wider projections.

    Example:
        >>> import isopos
        >>> scheme = isopos.rope(64, 8, decay="retnet")
        >>> q, k, v = torch.randn(3, 1, 8, 10, 64)
        >>> isopos.linear_attention(q, k, v, **scheme.at(isopos.sequence(10)), causal=True).shape
        torch.Size([1, 8, 10, 64])
    """

    def __init__(
        self,
        encoding: Coupling,
        heads: int,
        *,
        attention: str = "linear",
        feature_map: str = "auto",
        decay: str | Decay = "none",
        denominator: str = "auto",
        embedding: Sinusoidal | Learned | TreeStack | None = None,
        bias: RelativeBias | None = None,
        scale: float | None = None,
        locality: float | None = None,
        inside: bool = False,
        width: int = 1,
    ):
        super().__init__()
        expect("attention", attention, ("linear", "softmax"))
        expect("feature_map", feature_map, ("auto", *FEATURE_MAPS, "favor"))
        expect("denominator", denominator, ("auto", "plain", "encoded", "complex", "none"))
        if not isinstance(decay, Decay):
            expect("decay", decay, ("none", *RATES))
            decay_module = Decay(RATES[decay](heads)) if decay != "none" else None
        else:
            decay_module = decay
        if decay_module is not None and not isinstance(encoding.group, Line):
            raise ValueError(f"decay: expected 'none', since a log decay needs positions on a line, not of {encoding.group}")
        if decay_module is not None and len(decay_module.initial) not in (1, heads):
            raise ValueError(f"decay: expected rates of {heads} heads, got {len(decay_module.initial)}")
        if locality is not None and not 0 < locality <= 1:
            raise ValueError(f"locality: expected a factor a step in (0, 1], got {locality}")
        self.encoding, self.heads, self.attention, self.embedding, self.bias = encoding, heads, attention, embedding, bias
        self.decay, self.scale, self.locality, self.inside, self.width = decay_module, scale, locality, inside, width
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"scale: expected a positive number, got {scale}")
        if inside and (attention == "softmax" or bias is not None):
            what = "softmax attention, which has no feature map" if attention == "softmax" else "a relative bias"
            raise ValueError(f"inside: expected False beside {what}, got True")
        if bias is not None:
            own = {p.shape[0] for p in bias.parameters()}
            if bias.group.columns != encoding.group.columns or not own <= {1, heads}:
                raise ValueError(
                    f"bias: expected positions of {encoding.group} and {heads} heads, got {bias.group} and {max(own)} heads"
                )
        if attention == "softmax":
            for name, choice in (("feature_map", feature_map), ("denominator", denominator)):
                if choice != "auto":
                    raise ValueError(f"{name}: expected no choice with softmax attention, which has its own, got {choice!r}")
            feature_map = denominator = "softmax"
        else:
            feature_map = "elu+1" if feature_map == "auto" else feature_map
            denominator = ("encoded" if inside else "plain") if denominator == "auto" else denominator
            self._check_linear(denominator)
        self.favor = Favor(encoding.out_features if inside else encoding.features) if feature_map == "favor" else None
        self.choices = {
            "attention": attention,
            "decay": decay if isinstance(decay, str) else "own",
            "denominator": denominator,
            "feature_map": feature_map,
        }

    def _check_linear(self, denominator: str) -> None:
        """ValueError for what linear attention cannot do."""
        name = type(self.encoding).__name__
        if self.inside and denominator == "plain":
            raise ValueError(
                f"denominator: expected 'encoded' or 'none', since {name} acts ahead of the feature map, got 'plain'"
            )
        if denominator == "complex" and not _is_complex(self.encoding):
            raise ValueError(
                f"denominator: expected 'plain', 'encoded' or 'none', since {name} turns no pairs, got 'complex'"
            )
        for name, value in (("locality", self.locality), ("scale", self.scale)):
            if value is not None:
                raise ValueError(f"{name}: expected softmax attention, whose logits it multiplies, got linear")
        if self.bias is None:
            return
        if not isinstance(self.bias, ClippedKeys):
            raise ValueError(f"bias: expected ClippedKeys in linear attention, got {type(self.bias).__name__}: use softmax")
        if self.decay is not None:
            raise ValueError("decay: expected 'none' beside clipped keys, whose far offsets share one sum")

    def extra_repr(self) -> str:
        """Heads, features, group and choices."""
        choices = ", ".join(f"{name}={choice}" for name, choice in self.choices.items())
        return f"{self.heads} heads of {self.encoding.features} features, {self.group}, {choices}"

    @property
    def group(self) -> Group:
        """Whose positions it takes."""
        return self.encoding.group

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the choices and of all constants, but of nothing that is learned: equal for schemes built alike."""
        choices = (self.choices, self.heads, self.scale, self.locality, self.inside, self.width)
        digest = hashlib.sha256(repr(choices).encode())
        for name, module in self.named_modules():
            digest.update(f"{name} {type(module).__name__}".encode())
            for key, value in sorted(vars(module).items()):
                if isinstance(value, Tensor):
                    digest.update(key.encode() + value.contiguous().numpy().tobytes())
                elif isinstance(value, bool | int | float | str | Group):
                    digest.update(f"{key}={value}".encode())
        return digest.hexdigest()

    @property
    def feature_map(self) -> Phi:
        """phi of linear attention."""
        return FEATURE_MAPS[self.choices["feature_map"]] if self.favor is None else self.favor

    @property
    def max_length(self) -> int | None:
        """Positions from 0 on that it takes, where their number is limited."""
        return self.encoding.max_length if self.embedding is None else self.embedding.max_length

    @property
    def normalised(self) -> bool:
        """Whether a norm of each head's output takes the place of the denominator."""
        return self.choices["denominator"] == "none"

    def at(
        self, x: Tensor, x_key: Tensor | None = None, *, state: State | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """Keyword arguments of the attention function.

        Args:
            x: Positions of queries ``[*b t c]``, and of keys unless they differ.
            x_key: Positions of keys ``[*b s c]``.
            state: Of the stream that x continues; ``State()`` at its start. In a tree, x are the next rows of one tensor of
                all nodes so far, and all operators are computed again.
            dtype: Of tables: float32, or float64 for float64 queries; a smaller one is taken for float32.
        """
        if state is not None:
            return self._continued(x, x_key, state, dtype)
        dtype, y = torch.promote_types(dtype, torch.float32), x if x_key is None else x_key
        if isinstance(self.encoding, Encoding) and not self.inside:
            rho = self.encoding(x, dtype) if x_key is None else (self.encoding(x, dtype), self.encoding(y, dtype))
        else:
            rho = (self.encoding.query(x, dtype), self.encoding.key(y, dtype))
        arguments: dict[str, Any] = {"isometry": rho, "decay": None}
        if self.decay is not None:
            arguments["decay"] = self.decay(x) if x_key is None else (self.decay(x), self.decay(y))
        if self.bias is not None:
            arguments["terms"] = self.bias(x, y, dtype)
        if self.attention == "softmax":
            arguments["scale"] = self.encoding.features**-0.5 if self.scale is None else self.scale
            if self.locality is not None:
                arguments["locality"] = self.locality ** self.group.distance(x, y).to(dtype)
            return arguments
        if self.inside:
            maps = sides(self.feature_map)
            arguments["isometry"] = tuple(Mapped(side, phi) for side, phi in zip(rho, maps, strict=True))
        denominator = self.choices["denominator"]
        return arguments | {
            "feature_map": None if self.inside else self.feature_map,
            "denominator": None if denominator == "none" else denominator,
        }

    def _continued(self, x: Tensor, x_key: Tensor | None, state: State, dtype: torch.dtype) -> dict[str, Any]:
        """`at` for the next tokens of a stream; the state keeps their positions where later tokens need them."""
        if x_key is not None:
            raise ValueError("x_key: expected none in a stream, whose keys are at the positions of its queries")
        expect_state(state)
        if any(getattr(part, "outside", 0) for part in (self.encoding, self.bias)):
            raise ValueError("state: expected none with class tokens, which are the first rows of a tensor, got a stream")
        state.stamped(self.fingerprint, None)
        old = state["positions"]
        places = x if old is None else torch.cat((old.expand(*x.shape[:-2], *old.shape[-2:]), x), -2)
        rows = self.group.refers_to_rows
        quadratic = self.attention == "softmax" and (self.bias is not None or self.locality is not None)
        if not rows and not quadratic:
            return self.at(x, dtype=dtype) | {"state": state.stamped(self.fingerprint, None)}
        arguments = self.at(places, dtype=dtype) if rows else self.at(x, places, dtype=dtype)
        count, new = places.shape[-2], x.shape[-2]
        rho = arguments["isometry"]
        query, key = rho if isinstance(rho, tuple) else (rho, rho)
        arguments["isometry"] = tuple(_last(side, count, new) for side in (query, key))
        if rows and self.locality is not None:
            arguments["locality"] = arguments["locality"][..., count - new :, :]
        if isinstance(arguments["decay"], tuple):
            arguments["decay"] = arguments["decay"][0]
        return arguments | {"state": state.stamped(self.fingerprint, places)}


def _last(rho: TokenMap, count: int, new: int) -> TokenMap:
    """The part of an isometry for the last tokens, where it has one for each."""
    return rho if rho.length is None else rho.tokens(rho.length - new, rho.length)


def _is_complex(encoding: Coupling) -> bool:
    """Whether an encoding turns feature pairs, and any basis commutes with that."""
    if isinstance(encoding, InBasis):
        return isinstance(encoding.basis, Pairs | ComplexFourier) and _is_complex(encoding.encoding)
    return isinstance(encoding, Rotary) and not encoding.lift


def expect(what: str, value: Any, names: Any) -> None:
    """Raise ValueError where a value is none of the names."""
    if value not in names:
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {value!r}")
