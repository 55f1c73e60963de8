"""A scheme: all choices of attention that concern positions, as one module. `isopos.schemes` has the named ones."""

import hashlib
from collections.abc import Mapping
from typing import Any, Never, Self, TypedDict, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isopos.attention import linear_attention, softmax_attention
from isopos.biases import RelativeBias
from isopos.catalog import at_least, expect
from isopos.decays import RATES, Decay
from isopos.deprecation import former_property
from isopos.embeddings import Embedding
from isopos.encodings import Coupling, Rotary, shortest
from isopos.exact import ExactModule, appended, cast_down, constants, describe, to_float64
from isopos.feature_maps import FEATURE_MAPS, Favor, Phi, sides, undivided
from isopos.kinds import AttentionName, DenominatorName, Linear, Softmax, feature_names, kind_of
from isopos.lengths import Extension, extension
from isopos.maps import Adjoint, Mapped, TokenMap, pair
from isopos.parallel import Shards, joined, shards
from isopos.phases import ContentFrequency, ForgetGate, HouseholderProduct, Phase, SelectiveRotation
from isopos.positions import Group, Line
from isopos.state import State, expect_state
from isopos.terms import Indexed, Term

__all__ = ["Arguments", "Choices", "Linear", "Scheme", "Softmax", "choices_of", "parameter_groups"]


FORMER = {"ForgetGate": "Forget", "SelectiveRotation": "Turn", "ContragredientSum": "Beside"}
"""Names of renamed classes in fingerprints, which saved streams contain."""
TURNS = (SelectiveRotation, ContentFrequency, HouseholderProduct)
PARTS = {"turn": TURNS, "embedding": (Embedding,), "bias": (RelativeBias,)}
"""Types of the optional parts of a scheme."""


class Choices(TypedDict, total=False):
    """Options that every scheme accepts; `choices_of` lists the names of feature maps and decays.

    Fields of `Linear` and `Softmax` may be passed with the name of the kind. A preset's defaults apply to options that are
    not passed; a kind passed as a value overrides all of them.
    """

    attention: AttentionName | Linear | Softmax
    feature_map: str
    decay: str | Decay | ForgetGate
    denominator: DenominatorName


def expect_scheme(scheme: object) -> None:
    """Raise TypeError unless the argument is a Scheme."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme: expected a Scheme, such as isopos.rope(head_dim, heads), got {type(scheme).__name__}")


def choices_of() -> dict[str, tuple[str, ...]]:
    """The valid names for each of `Choices`, including feature maps and decays that are registered later."""
    attention, denominators, decays = get_args(AttentionName), get_args(DenominatorName), ("none", *RATES, "forget")
    return {"attention": attention, "feature_map": feature_names(), "decay": decays, "denominator": denominators}


class Arguments(dict[str, Any]):
    """Keyword arguments of the attention function, for a scheme at positions; frozen. Its repr has one line per argument.

    ``arguments | {...}`` returns a dict.
    """

    def of(self, state: State) -> "Arguments":
        """The same tables for the stream of another layer of equal length: a step evaluates them once for all layers.

        Examples:
            >>> import isopos
            >>> scheme = isopos.rope(8, 2)
            >>> layers = [isopos.Attention(16, scheme) for _ in range(12)]
            >>> states, tokens = [State()] * 12, torch.randn(1, 5, 16)
            >>> for i in range(5):
            ...     y, at = tokens[:, i : i + 1], scheme.at(torch.tensor([[i]]), state=states[0])
            ...     for n, layer in enumerate(layers):
            ...         y, states[n] = layer(y, at.of(states[n]), causal=True, return_state=True)
        """
        if (evaluated := self.get("state")) is None:
            raise ValueError("state: expected arguments of a stream, scheme.at(x, state=...), got arguments without a state")
        return Arguments(self | {"state": state.stamped(evaluated.fingerprint, evaluated["positions"])})

    def _refuse(self, *arguments: Any, **named: Any) -> Never:
        raise TypeError("arguments: expected no change, since layers share them; arguments | {...} returns a changed dict")

    def __reduce__(self) -> tuple[Any, ...]:
        return Arguments, (dict(self),)

    __ior__ = dict.__or__  # pyright: ignore[reportAssignmentType]  # `|=` rebinds the name to a dict
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore

    def __repr__(self) -> str:
        rows = (f"    {name}={describe(value)},\n" for name, value in self.items())
        return f"{type(self).__name__}(\n{''.join(rows)})"


class Scheme(nn.Module):
    """All choices of attention that concern positions, for `linear_attention` or `softmax_attention`.

    ``scheme(q, k, v, x, causal=True)`` applies everything: the attention function at positions x with isometries, decay,
    terms, feature map and denominator, and a norm of the output if there is no denominator. An `embedding` must be added to
    the tokens before. ``scheme.at(x)`` returns the arguments, to be evaluated once and shared by layers.

    Constants are float64. Parameters are float32, also after ``.bfloat16()`` or ``.half()``, and float64 after
    ``.double()``. Tables are float32 by default: pass ``at(x, dtype=torch.float64)`` for float64 queries, or positions are
    exact to about 1e-7 only. Log decays are float64.

    Args:
        encoding: rho, for `heads` heads: an `Encoding`, or another `Coupling`.
        heads: Number of key heads.
        attention: `Linear` or `Softmax` with their options, or "linear" or "softmax" for the defaults.
        decay: A name of `decays.RATES` or a `Decay`, for positions on a line; "forget" or a `ForgetGate`, content-dependent
            gates for causal attention; or "none".
        turn: Content-dependent rotation, or product of matrices, for causal attention, in place of an encoding of
            positions; or None.
        embedding: Absolute positions to add to the token embeddings, or None.
        bias: Relative terms, or None. Linear attention accepts `ClippedKeys` only.
        width: Queries and keys have `width` times the head size features, by wider projections.
        transport: Whether values are mapped to the query's frame, v_j -> rho(x_i^-1 y_j) v_j, for values with a direction
            (Miyato et al. 2024, GTA; Li et al. 2025, PRoPE). Values are mapped as keys, outputs by the adjoint of the
            queries' map.

    Examples:
        >>> import isopos
        >>> scheme = isopos.rope(64, 8, decay="retnet")
        >>> q, k, v = torch.randn(3, 1, 8, 10, 64)
        >>> isopos.linear_attention(q, k, v, **scheme.at(isopos.sequence(10)), causal=True).shape
        torch.Size([1, 8, 10, 64])
        >>> y = scheme(q, k, v, isopos.sequence(10), causal=True)  # the same
        >>> start, state = scheme(*(a[..., :9, :] for a in (q, k, v)), isopos.sequence(9), state=State(), causal=True)
        >>> last, state = scheme(*(a[..., 9:, :] for a in (q, k, v)), torch.tensor([[9]]), state=state, causal=True)
        >>> torch.allclose(last, y[..., 9:, :], atol=1e-6)
        True
    """

    decay: Decay | None
    forget: ForgetGate | None
    turn: SelectiveRotation | ContentFrequency | HouseholderProduct | None
    origin: tuple[str, dict[str, Any]] | None = None  # name and arguments of the registered function
    transport = False

    def __init__(
        self,
        encoding: Coupling,
        heads: int,
        *,
        attention: Linear | Softmax | AttentionName = "linear",
        decay: str | Decay | ForgetGate = "none",
        turn: SelectiveRotation | ContentFrequency | HouseholderProduct | None = None,
        embedding: Embedding | None = None,
        bias: RelativeBias | None = None,
        width: int = 1,
        transport: bool = False,
    ):
        super().__init__()
        kind = attention if isinstance(attention, Linear | Softmax) else kind_of(attention)
        if not isinstance(decay, Decay | ForgetGate):
            expect("decay", decay, choices_of()["decay"])
        heads, width = at_least("heads", heads), at_least("width", width)
        _check_types(encoding, turn=turn, embedding=embedding, bias=bias)
        log_decay = _decay(decay, encoding.features, heads) if isinstance(decay, str) else decay
        self.encoding, self.heads, self.attention, self.embedding, self.bias = encoding, heads, kind.name, embedding, bias
        self.decay = log_decay if isinstance(log_decay, Decay) else None
        self.forget = log_decay if isinstance(log_decay, ForgetGate) else None
        self.turn, self.width = turn, width
        self.scale, self.locality, self.metric, self.inside = kind.scale, kind.locality, kind.metric, kind.inside
        self._known: tuple[Extension | None, str] | None = None  # the fingerprint, and the extension that it is of
        if transport:  # set only if True, because fingerprints include attributes
            self.transport = True
        self._check_parts()
        if isinstance(kind, Linear):
            self._check_linear(kind)
        features = encoding.out_features if kind.inside else encoding.features
        self.favor = Favor(features) if kind.feature_map == "favor" else None
        self.choices = {
            "attention": kind.name,
            "decay": decay if isinstance(decay, str) else "own",
            "denominator": kind.denominator,
            "feature_map": kind.feature_map,
        }

    def _check_parts(self) -> None:
        """Raise ValueError for parts that do not fit together."""
        group = self.group
        if self.decay is not None and not isinstance(group, Line):
            raise ValueError(f"decay: expected 'none', since a log decay needs positions on a line, not of {group}")
        if self.decay is not None and len(self.decay.initial_rate) not in (1, self.heads):
            raise ValueError(f"decay: expected rates of {self.heads} heads, got {len(self.decay.initial_rate)}")
        for name, phase in (("decay", self.forget), ("turn", self.turn)):
            if phase is not None and (phase.features, phase.heads) != (self.encoding.features, self.heads):
                raise ValueError(
                    f"{name}: expected steps read from keys of {self.encoding.features} features and {self.heads} heads, "
                    f"got {phase.features} and {phase.heads}"
                )
        if self.turn is not None and not self.encoding.is_trivial:
            raise ValueError(
                f"turn: expected None with {type(self.encoding).__name__}, whose maps need not commute with selective "
                "rotation, got one; use encodings.Identity, which maps nothing"
            )
        if self.metric is not None and not group.is_grid:
            raise ValueError(
                f"metric: expected none, or euclidean for a locality on a grid, got {self.metric!r} for positions of {group}"
            )
        if self.transport and self.turn is not None:
            raise ValueError("transport: expected False with selective rotation, which does not apply to values, got True")
        if self.transport and (self.inside or self.width != 1 or self.encoding.features != self.encoding.out_features):
            name = type(self.encoding).__name__
            raise ValueError(
                f"transport: expected False with {name}, whose maps do not return as many features as values have, got True"
            )
        if self.bias is not None and isinstance(self.turn, HouseholderProduct):
            raise ValueError("bias: expected None with a Householder product, which changes cached keys, got one")
        if self.inside and self.bias is not None:
            raise ValueError("inside: expected False with a relative bias, got True")
        bias = self.bias
        if bias is None:
            return
        axes, of_bias = ([(type(leaf), getattr(leaf, "period", 0)) for leaf in one.leaves] for one in (group, bias.group))
        if axes != of_bias or bias.heads not in (1, self.heads):  # offsets on a line do not go around a ring
            raise ValueError(
                f"bias: expected positions of {group} and {self.heads} heads, got {bias.group} and {bias.heads} heads"
            )

    def _check_linear(self, kind: Linear) -> None:
        """Raise ValueError for combinations that linear attention does not support."""
        name = type(self.encoding).__name__
        rotates = self.turn is not None and not isinstance(self.turn, HouseholderProduct)
        if kind.denominator == "complex" and not (self.encoding.is_complex or rotates):
            raise ValueError(
                f"denominator: expected 'plain', 'encoded' or 'none', since {name} does not rotate all features in adjacent "
                "pairs, got 'complex'"
            )
        if self.bias is None:
            return
        if not self.bias.is_linear:
            raise ValueError(f"bias: expected ClippedKeys in linear attention, got {type(self.bias).__name__}: use softmax")
        if not self.decay is self.forget is None:
            raise ValueError("decay: expected 'none' with clipped keys, whose far offsets share one sum, got one")

    def extra_repr(self) -> str:
        choices = ", ".join(f"{name}={choice}" for name, choice in self.choices.items())
        choices += f", {self.extension}" if self.extension is not None else ""
        return f"{self.heads} heads of {self.encoding.features} features, {self.group}, {choices}"

    @property
    def group(self) -> Group:
        """The group of its positions."""
        return self.encoding.group

    @property
    def extension(self) -> Extension | None:
        """The rule of `extend`. Schemes with one encoding share it."""
        return self.encoding.extension

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Content-dependent phases, which need causal attention."""
        return tuple(part for part in (self.forget, self.turn) if part is not None)

    path = former_property("path", "phases")

    @property
    def position_free(self) -> bool:
        """Whether attention ignores positions; an embedding may still be added to the tokens."""
        return self.encoding.is_trivial and self.bias is self.decay is self.locality is None and not self.phases

    blind = former_property("blind", "position_free")

    @property
    def sharpness(self) -> float:
        """The extension's factor of softmax logits, in addition to their scale; 1 if `rotary_factor` applies instead."""
        return 1.0 if self.extension is None or self._rotates_apart(self.extension) else self.extension.attention_factor**2

    @property
    def rotary_factor(self) -> float:
        """The extension's attention factor for the features that it changes, of queries and of keys; 1 if it changes all.

        Released checkpoints also multiply cosines and sines; see `isopos.lengths.Yarn.whole_logits`.
        """
        return 1.0 if self.extension is None or not self._rotates_apart(self.extension) else self.extension.attention_factor

    def _rotates_apart(self, rule: Extension) -> bool:
        """Whether the attention factor applies to some features only."""
        return not (rule.whole_logits or self.encoding.all_extensible)

    def extend(self, name: str, *, factor: float | None = None, trained: int | None = None, **options: Any) -> Self:
        """Change the frequencies of a rotary scheme, new or trained, for longer sequences: in place; returns the scheme.

        Parameters do not change, and a saved file does not contain the extension: extend the scheme again after loading. A
        second extension replaces the first. Streams keep their encoded keys at any length; a state from before the extension
        is refused, because its keys have other frequencies. Rings and trees in a product, and parts that are no rotations,
        do not change.

        YaRN and LongRoPE also have an attention factor, which `at` applies. If you use ``encoding(x)`` directly, multiply
        the scale of logits by `sharpness` and rotated features by `rotary_factor`; one of them is 1.

        Args:
            name: "linear", "dynamic", "yarn", "longrope", "llama3", "dype" or "drop"; see `isopos.lengths`.
            factor: s, the ratio of sequence lengths, at least 1; every rule needs it.
            trained: Positions in training, on each axis, for rules that need them.
            options: Options of the rule.

        Raises:
            ValueError: For a scheme without frequencies on a line or a grid, or an invalid value; nothing changes then.
            TypeError: For an option that the rule does not have, or a value of another type.

        Examples:
            >>> import isopos
            >>> scheme = isopos.rope(64, attention="softmax").extend("yarn", factor=4, trained=2048)
            >>> round(scheme.at(isopos.sequence(8192))["scale"] * 64**0.5, 4)
            1.2965
        """
        rule = extension(name, factor, trained, **options)
        parts = [part for part in self.encoding.modules() if isinstance(part, Coupling) and part.extensible]
        if not parts:
            got = f"{type(self.encoding).__name__} on a {self.group.noun}"
            got += f" of {self.max_length} positions; build it with a larger length=" if self.max_length else ""
            raise ValueError(
                f"extend: expected a scheme that rotates by frequencies on a line or a grid, as rope, got {got}"
            )
        for part in parts:
            rule.check(part.pairs)
        for part in self.encoding.modules():
            if isinstance(part, Coupling) and (reason := part.refusal(rule)):
                raise ValueError(f"extend: {reason}")
        for part in (self.encoding, *parts):
            part.extension = rule
        return self

    @property
    def fingerprint(self) -> str:
        """A hash of the choices and all constants, without learned values: equal for equally built schemes."""
        if self._known is None or self._known[0] is not self.extension:
            self._known = self.extension, self._hash()
        return self._known[1]

    def _hash(self) -> str:
        choices = (self.choices, self.heads, self.scale, self.locality, self.inside, self.width)
        digest = hashlib.sha256(repr(choices).encode())
        for name, module in self.named_modules():
            kind, own = type(module).__name__, type(module).__module__.startswith("isopos.")
            follows = list | tuple | Mapping if own else ()  # what follows from the rest
            digest.update(f"{name} {FORMER.get(kind, kind)}".encode())
            for key, value in sorted((vars(module) | {"training": True}).items()):
                if not (key.startswith("_") or isinstance(value, follows)):  # PyTorch's, and hooks
                    digest.update(constants(key, value, (Group, Extension)))
        return digest.hexdigest()

    @property
    def feature_map(self) -> Phi:
        """phi of linear attention."""
        if self.attention == "softmax":
            raise AttributeError("feature_map: expected a scheme of linear attention, got softmax, which has none")
        return FEATURE_MAPS[self.choices["feature_map"]] if self.favor is None else self.favor

    @property
    def outside(self) -> int:
        """Number of leading tokens without a position: class tokens."""
        return max(self.encoding.outside, 0 if self.bias is None else self.bias.outside)

    @property
    def max_length(self) -> int | None:
        """Number of valid positions, from 0; None: unlimited."""
        return shortest(part for part in (self.encoding, self.embedding) if part is not None)

    @property
    def normalised(self) -> bool:
        """Whether each head's output is normalised in place of a denominator."""
        return self.choices["denominator"] == "none"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        x_key: Tensor | None = None,
        *,
        state: State | None = None,
        group: Any = None,
        **options: Any,
    ) -> Any:
        """Attention of q ``[*b h t d]``, k ``[*b h s d]``, v ``[*b h s e]`` with all choices of the scheme: ``[*b h t e]``.

        Args:
            q: Queries, with `width` times the head size features.
            k: Keys.
            v: Values.
            x: Positions of queries ``[*b t c]``, and of keys unless `x_key` is passed.
            x_key: Positions of keys ``[*b s c]``.
            state: State of the stream that these tokens continue, ``State()`` at its start; the next state is then also
                returned.
            group: The processes that hold the sequence, whose shard these tokens are; see `at`.
            options: Options of `linear_attention` or `softmax_attention`, which override the scheme's: causal, mask, ...
        """
        if "return_state" in options:
            raise TypeError("return_state: a scheme called with a state returns the next one; pass state=isopos.State()")
        attend: Any = softmax_attention if self.attention == "softmax" else linear_attention
        at = self.at(x, x_key, state=state, group=group, dtype=torch.promote_types(q.dtype, torch.float32))
        out = attend(q, k, v, **at | options, return_state=state is not None)
        y, *after = out if state is not None else (out,)
        y = F.layer_norm(y, y.shape[-1:]) if self.normalised else y
        return (y, *after) if after else y

    def at(
        self,
        x: Tensor,
        x_key: Tensor | None = None,
        *,
        state: State | None = None,
        group: Any = None,
        dtype: torch.dtype = torch.float32,
        evaluated: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    ) -> Arguments:
        """Keyword arguments of the attention function: ``linear_attention(q, k, v, **scheme.at(x))``.

        Args:
            x: Positions of queries ``[*b t c]``, and of keys unless `x_key` is passed.
            x_key: Positions of keys ``[*b s c]``.
            state: State of the stream that x continues; ``State()`` at its start. In a tree, x are the next rows of one
                tensor of all nodes so far, and all operators are computed again.
            group: A `ProcessGroup` or one-dimensional `DeviceMesh` whose processes hold one sequence, or an
                `isopos.parallel.Ring` of it; x are the positions in it of the tokens of this process. The arguments then run
                attention over the group. Relative terms and locality of softmax attention, trees, and class tokens need the
                positions of all processes, which are sent.
            dtype: Dtype of tables: float32, or float64 for float64 queries; smaller dtypes become float32.
            evaluated: Results of `at` in this dtype at x and at x_key, whose isometries are reused.
        """
        if group is not None and (known := shards(group, x.shape[-2], x.device)) is not None:
            return self._sharded(x, x_key, state, known, dtype)
        if state is not None:
            return self._continued(x, x_key, state, dtype)
        dtype, y = torch.promote_types(dtype, torch.float32), x if x_key is None else x_key
        if evaluated is not None:
            at_x, at_y = evaluated
            rho: Any = (pair(at_x["isometry"])[0], pair(at_y["isometry"])[1])
        else:
            query, shared = self.encoding.query(x, dtype), self.encoding.alike and x_key is None and not self.inside
            rho = query if shared else (query, self.encoding.key(y, dtype))
            for part in self.encoding.modules() if x_key is not None and self.encoding.max_length is not None else ():
                if isinstance(part, Rotary) and part.group == self.group:
                    part.check_length(x, y)
        arguments: dict[str, Any] = {"isometry": rho, "decay": None}
        if self.transport and evaluated is not None:
            arguments["transport"] = (evaluated[1]["transport"][0], evaluated[0]["transport"][1])
        elif self.transport:
            arguments["transport"] = _transport(*pair(rho))
        if self.decay is not None:
            arguments["decay"] = self.decay(x) if x_key is None else (self.decay(x), self.decay(y))
        if phases := self.phases:
            arguments["phases"] = phases
        arguments |= self._of_pairs(x, y, dtype)
        if self.attention == "softmax":
            arguments["scale"] = (self.encoding.features**-0.5 if self.scale is None else self.scale) * self.sharpness
            if (factor := self.rotary_factor) != 1 and evaluated is None:
                scaled = [self.encoding.rescaled(side, factor) for side in (rho if isinstance(rho, tuple) else (rho,))]
                arguments["isometry"] = tuple(scaled) if len(scaled) > 1 else scaled[0]
            return Arguments(arguments)
        phi, denominator = self.feature_map, self.choices["denominator"]
        if self.inside and evaluated is None:
            maps = sides(undivided(phi) if self.normalised else phi)
            arguments["isometry"] = tuple(Mapped(side, phi) for side, phi in zip(rho, maps, strict=True))
        arguments["feature_map"] = None if self.inside else phi
        return Arguments(arguments, denominator=None if denominator == "none" else denominator)

    def _distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Distance for locality between every row of x ``[*b t c]`` and every row of y ``[*b s c]``: ``[*b t s]``."""
        if self.metric is None:
            return self.group.distance(x, y)
        offset = to_float64(x).detach().unsqueeze(-2) - to_float64(y).detach().unsqueeze(-3)  # steps have no gradient
        return offset.square().sum(-1).sqrt().floor()

    def _of_pairs(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of pairs of tokens at x and at y: relative terms and locality."""
        arguments: dict[str, Any] = {} if self.bias is None else {"terms": self.bias(x, y, dtype)}
        if self.locality is not None:
            arguments["locality"] = self.locality ** cast_down(self._distance(x, y), dtype, x.device)
        return arguments

    def _sharded(self, x: Tensor, x_key: Tensor | None, state: State | None, over: Shards, dtype: torch.dtype) -> Arguments:
        """`at` for one shard of a sequence over a group of processes."""
        if state is not None or x_key is not None:
            name = "state" if x_key is None else "x_key"
            raise ValueError(
                f"{name}: expected none with a group, whose processes attend from a sequence to itself, got one"
            )
        softmax, rows = self.attention == "softmax", self.group.refers_to_rows or self.outside > 0
        if over.zigzag and (rows or not softmax or self.phases):
            raise ValueError(
                "group: expected contiguous shards for linear attention, trees, class tokens and content-dependent phases, "
                "got zig-zag ones"
            )
        if not rows and not (softmax and (self.bias is not None or self.locality is not None)):
            return Arguments(self.at(x, dtype=dtype), group=over)
        start, stop = over.start, over.start + over.count
        every = joined(x, over, -2)
        if not rows:
            return Arguments(self.at(x, dtype=dtype) | self._of_pairs(x, every, dtype), group=over)
        arguments = dict(self.at(every, dtype=dtype))
        for name in ("isometry", "transport"):
            if name in arguments:
                maps = arguments[name]
                local = tuple(rho.tokens(start, stop) for rho in (maps if isinstance(maps, tuple) else (maps,)))
                arguments[name] = local if isinstance(maps, tuple) else local[0]
        if arguments["decay"] is not None:
            arguments["decay"] = arguments["decay"][..., start:stop]
        if "locality" in arguments:
            arguments["locality"] = arguments["locality"][..., start:stop, :]
        if self.bias is not None:
            arguments["terms"] = self._terms(x, every, start, dtype) if softmax else self.bias(x, x, dtype)
        return Arguments(arguments, group=over)

    def _terms(self, x: Tensor, y: Tensor, start: int, dtype: torch.dtype) -> tuple[Term, ...]:
        """Terms of tokens x that begin at row `start` of all tokens y, whose first rows may be class tokens."""
        assert self.bias is not None
        first = min(start, self.outside)
        terms = self.bias(torch.cat((y[..., :first, :], x), -2), y, dtype)
        return tuple(Indexed(term.table, term.side, term.index()[..., first:, :]) for term in terms) if first else terms

    def _continued(self, x: Tensor, x_key: Tensor | None, state: State, dtype: torch.dtype) -> Arguments:
        """`at` for the next tokens of a stream; the state keeps their positions if later tokens need them."""
        if x_key is not None:
            raise ValueError("x_key: expected none in a stream, whose keys are at the positions of its queries")
        expect_state(state)
        Group.check(self.group, x)  # columns and dtypes only; parents are checked with all nodes
        if self.outside:
            raise ValueError("state: expected none with class tokens, which are the first rows of a tensor, got a stream")
        past, state = state["positions"], state.stamped(self.fingerprint, None)
        positions = x if past is None else appended(past, x)
        rows, new = self.group.refers_to_rows, x.shape[-2]
        quadratic = self.attention == "softmax" and (self.bias is not None or self.locality is not None)
        if not rows and not quadratic:
            return Arguments(self.at(x, dtype=dtype), state=state)
        arguments = self.at(positions, dtype=dtype) if rows else self.at(x, positions, dtype=dtype)
        (query, key), decay = pair(arguments["isometry"]), arguments["decay"]
        changes: dict[str, Any] = {"isometry": (query.last(new), key.last(new))}
        if self.transport:
            changes["transport"] = tuple(part.last(new) for part in arguments["transport"])
        if rows and self.locality is not None:
            changes["locality"] = arguments["locality"][..., positions.shape[-2] - new :, :]
        changes["decay"] = decay[0] if isinstance(decay, tuple) else decay
        return Arguments(arguments | changes, state=state.stamped(self.fingerprint, positions))


def _transport(query: TokenMap, key: TokenMap) -> tuple[TokenMap, TokenMap]:
    """Maps of values and of outputs."""
    if not (query.linear and key.linear):
        raise ValueError(
            f"transport: expected linear maps of queries and keys, got {type(query).__name__}; build it without"
        )
    return key, Adjoint(query)


def _check_types(encoding: object, **parts: object) -> None:
    """Raise TypeError for a part of another type."""
    if not isinstance(encoding, Coupling):
        got = type(encoding).__name__
        raise TypeError(f"encoding: expected an Encoding or another Coupling, such as scheme.encoding, got {got}")
    for name, part in parts.items():
        if not isinstance(part, (*PARTS[name], type(None))):
            names = " or ".join(kind.__name__ for kind in PARTS[name])
            raise TypeError(f"{name}: expected None or {names}, got {type(part).__name__}")


def _decay(name: str, features: int, heads: int) -> Decay | ForgetGate | None:
    """The decay with a name of `choices_of`."""
    if name == "forget":
        return ForgetGate(features, heads)
    return None if name == "none" else Decay(RATES[name](heads))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """A model's parameters for an optimiser, in two groups: with and without weight decay.

    Parameters of positions (generators, frequencies, rates, gains, tables), and parameters with fewer than two axes (biases,
    norms), have no weight decay. Each group is in the order of ``model.parameters()``; shared parameters appear once.

    Args:
        model: Any module, from isopos or not.
        weight_decay: Weight decay of the first group.

    Examples:
        >>> import isopos
        >>> model = isopos.Decoder(256, 32, 2, isopos.rope(8, 4, learned=True))
        >>> groups = parameter_groups(model, 0.1)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.1, 14), (0.0, 24)]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    parts = (module for module in model.modules() if isinstance(module, ExactModule | Embedding))
    exempt = {id(parameter) for module in parts for parameter in module.parameters()}
    weights, others = [], []
    for parameter in model.parameters():
        (others if parameter.ndim < 2 or id(parameter) in exempt else weights).append(parameter)
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
