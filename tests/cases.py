"""The case table. All tests of schemes and encodings run over the rows of `SCHEMES`.

It also has shared helpers: the tolerance, random inputs and positions, and the definitions.
"""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

from isopos import bases, encodings, feature_maps, generators, schemes
from isopos.attention import linear_attention, reference, softmax_attention
from isopos.decays import Decay, retnet_rates
from isopos.encodings import Encoding, rope_frequencies
from isopos.positions import Group, Line, Product, Ring, Tree, grid, sequence
from isopos.state import State

Module = TypeVar("Module", bound=nn.Module)
HEAD_DIM, HEADS = 8, 2
TOLERANCE = 2048  # times the dtype's eps, relative to the largest magnitude expected
SOFTMAX_ONLY = ("shaw", "transformer-xl", "t5", "deberta", "kerple", "fire")
STEPS = ("fox", "selective", "carope", "path")
ATTENTION = {"linear": linear_attention, "softmax": softmax_attention}
DEFINITIONS, quadratic, softmax_by_definition = reference.DEFINITIONS, reference.linear, reference.softmax
LINEAR_OPTIONS = {"feature_map", "denominator", "original", "inside"}


class SchemeCase(NamedTuple):
    """A scheme with options. Options that are functions are called, so that every scheme owns its modules."""

    id: str
    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    relative: bool = True  # scores see relative positions only
    directed: bool = True  # a coupling of queries and keys that tells x from y
    inside: bool = False  # which acts ahead of the feature map

    def build(self, head_dim: int = HEAD_DIM, heads: int = HEADS, **more: Any) -> schemes.Scheme:
        options = {"attention": self.kinds[0]} | dict(self.options) | more
        options = {name: value() if callable(value) else value for name, value in options.items()}
        return schemes.REGISTRY[self.name](head_dim, heads, **options)

    @property
    def group(self) -> Group:
        """The group of positions of the scheme."""
        key = type(self), self.name, id(self.options)
        if key not in _GROUPS:
            _GROUPS[key] = self, self.build().group  # the case keeps its options, and so their id, alive
        return _GROUPS[key][1]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of attention that the scheme supports."""
        softmax = self.name in SOFTMAX_ONLY or self.options.get("attention") == "softmax"
        return ("softmax",) if softmax else ("linear",) if LINEAR_OPTIONS & set(self.options) else ("linear", "softmax")

    @property
    def outside(self) -> int:
        """Number of class tokens, the first rows of a tensor."""
        return self.options.get("outside", 0)

    @property
    def clipped(self) -> bool:
        """Whether linear attention sums clipped terms."""
        return self.name == "horn-clipped"

    def decays(self, kind: str) -> bool:
        """Whether a decay applies."""
        return isinstance(self.group, Line) and not (self.clipped and kind == "linear")

    @property
    def both_ways(self) -> bool:
        """Whether the scheme also has attention without `causal`; content-dependent phases do not."""
        return self.name not in STEPS and self.options.get("decay") != "forget"

    @property
    def ways(self) -> tuple[bool, ...]:
        """Supported values of `causal`."""
        return (True, False) if self.both_ways else (True,)

    def streams(self, kind: str) -> bool:
        """Whether the scheme streams; class tokens and clipped keys on grids do not."""
        return not (self.outside or (self.clipped and kind == "linear" and self.group.columns > 1))

    @property
    def denominators(self) -> tuple[str, ...]:
        """Denominators of linear attention."""
        return ("encoded", "none") if self.inside else ("plain", "encoded", "none")

    def positions(self, *batch: int, t: int) -> Tensor:
        """Random positions ``[*batch t c]``, in the order of tokens if the group has an order."""
        return ordered(self.group, *batch, t=t, least=int(self.clipped))

    def cross(self, *batch: int, t: int, s: int) -> tuple[Tensor, Tensor]:
        """Positions of t queries and s keys; on lines and grids the queries are the last of the keys."""
        y = self.positions(*batch, t=s)
        return (y[..., s - t :, :] if self.group.is_grid else self.positions(*batch, t=t)), y


_GROUPS: dict[tuple[type, str, int], tuple[SchemeCase, Group]] = {}


def ordered(group: Group, *batch: int, t: int, least: int = 0) -> Tensor:
    """Positions, ascending on a line and row by row on grids, with separate steps per sample; random in other groups."""
    if isinstance(group, Line):
        return ascending(*batch, t, least=least)
    if not group.is_grid:
        return group.random(*batch, t)
    side = math.ceil(t ** (1 / group.columns) - 1e-9)
    step, first = torch.randint(1, 4, (*batch, 1, group.columns)), torch.randint(-50, 50, (*batch, 1, group.columns))
    return step * grid(*(side,) * group.columns)[:t] + first


def shifted(group: Group, *positions: Tensor) -> tuple[Tensor, ...]:
    """Positions ``[*b t c]``, each sample shifted by a random group element. Trees start with rows of prefixes."""
    by = group.random(*positions[0].shape[:-2], 5)
    while not _moves(group, by):
        by = group.random(*positions[0].shape[:-2], 5)
    return tuple(group.shift(by, x) for x in positions)


def _moves(group: Group, by: Tensor) -> bool:
    """Whether the last rows differ from the identity; roots of trees are identities."""
    if isinstance(group, Product):
        return all(_moves(part, a) for part, a in zip(group.parts, group.split(by), strict=True))
    return bool((group.distance(group.origin(*by.shape[:-2], 1), by)[..., -1] != 0).all())


def per_tree(group: Group, x: Tensor, change: Callable[[Tree, Tensor], Tensor]) -> Tensor:
    """Positions with changed nodes of trees."""
    if isinstance(group, Product):
        return torch.cat([per_tree(part, own, change) for part, own in zip(group.parts, group.split(x), strict=True)], -1)
    return change(group, x) if isinstance(group, Tree) else x


def parents_first(group: Group, x: Tensor) -> Tensor:
    """Positions x with random trees in which parents come before children, as streams need."""

    def grow(tree: Tree, nodes: Tensor) -> Tensor:
        row, shape = torch.arange(nodes.shape[-2]), nodes.shape[:-1]
        nodes = torch.stack(((torch.rand(shape) * row).long(), torch.randint(tree.branches, shape)), -1)
        return torch.where(row[:, None] > 0, nodes, -1)

    return per_tree(group, x, grow)


def rows_later(group: Group, x: Tensor, rows: int | Tensor) -> Tensor:
    """Positions moved by a number of rows: parents of trees, which are rows, are renumbered."""
    return per_tree(group, x, lambda _, nodes: nodes + (nodes >= 0) * torch.tensor([1, 0]) * rows)


def stream(scheme: schemes.Scheme, content: Sequence[Tensor], x: Tensor, cuts: Sequence[int], **more: Any):
    """Causal attention of the chunks between cuts, in order, and the last state."""
    outputs, state = [], more.pop("state", State())
    for start, stop in itertools.pairwise(cuts):
        q, k, v = (a[..., start:stop, :] for a in content)
        parts = {name: a if a is None else a[..., start:stop] for name, a in more.items()}
        at = scheme.at(x[..., start:stop, :], state=state, dtype=q.dtype)
        out, state = ATTENTION[scheme.attention](q, k, v, **at, **parts, causal=True, return_state=True)
        outputs.append(out)
    return torch.cat(outputs, -2), state


def _learned_decay() -> Decay:
    return Decay(retnet_rates(HEADS), learned=True)


def _rows(name: str, *rows: tuple[str, Mapping[str, Any]], **more: Any) -> list[SchemeCase]:
    """Rows of one scheme, named after it."""
    return [SchemeCase(f"{name}{id and '-'}{id}", name, options, **more) for id, options in rows]


BASES = ("identity", "householder", "odd-even", "fourier")
IN_BASES = [(basis, {"basis": basis}) for basis in BASES]
THETAS = [(f"theta-{theta}", {"theta": theta, "length": 100}) for theta in ("b", "c")]
LEARNED, FIXED = ("learned", {"learned": True, "learned_basis": True}), ("fixed", {"learned": False})
IDENTITY = ("identity-start", {"initial": "identity"})
GATED = ("gated", {"gated": True, "noise_per_head": True})
LOCAL = ("locality", {"locality": 0.9, "attention": "softmax"})
SCHEMES = [
    *_rows("none", ("", {}), directed=False),
    *_rows("sinusoidal", ("", {}), ("scale", {"scale": 0.5}), relative=False, directed=False),
    *_rows("learned", ("", {"length": 256}), relative=False, directed=False),
    *_rows(
        "rope",
        ("", {}),
        ("base", {"base": 100.0}),
        ("learned", {"learned": True}),
        ("partial", {"rotary_dim": 4}),
        ("partial-learned", {"rotary_dim": 4, "learned": True}),
        ("half", {"layout": "half"}),
        ("encoded", {"denominator": "encoded", "feature_map": "relu"}),
        ("complex", {"denominator": "complex"}),
        ("undivided", {"denominator": "none", "feature_map": "identity"}),
        ("relu2", {"feature_map": "relu2"}),
        ("exp", {"feature_map": "exp"}),
        ("favor", {"feature_map": "favor"}),
        ("decay", {"decay": "permuteformer"}),
        ("learned-decay", {"learned": True, "decay": _learned_decay}),
    ),
    *_rows("p-rope", ("", {}), ("half", {"p": 0.5, "layout": "half"})),
    *_rows("rope-axial", ("", {}), ("3d", {"axes": 3, "sections": "1+2+1"}), ("half", {"layout": "half"})),
    *_rows("rope-mixed", ("", {}), ("3d-fixed", {"axes": 3, "learned": False})),
    *_rows("rope-golden", ("", {}), ("3d", {"axes": 3})),
    *_rows("mrope", ("", {}), ("interleaved", {"sections": "2+1+1", "interleaved": True, "layout": "half"})),
    *_rows("mrope", ("slow", {"time": "slow"}), ("no-time", {"time": "none", "sections": "1+2+1", "layout": "half"})),
    *_rows("mrope", ("corners", {"sections": "1+1+1+1", "interleaved": True})),
    *_rows("xpos", ("", {}), ("length", {"length": 200.0, "denominator": "plain"})),
    *_rows("jordan", ("", {}), ("growth", {"order": 3, "growth": 0.5, "length": 400.0, "decay": "none"})),
    *_rows("lrpe-unitary", *IN_BASES, *THETAS, LEARNED, FIXED, directed=False),
    *_rows(
        "lrpe-unitary",
        *((f"complex-{basis}", {"complex": True, "basis": basis}) for basis in BASES),
        ("complex-learned", {"complex": True, "learned": True, "learned_basis": True, "theta": "b"}),
        ("complex-fixed", {"complex": True, "denominator": "plain", "learned": False}),
    ),
    *_rows("lrpe-unitary", ("dft", {"basis": "dft"}), ("dft-fixed", {"basis": "dft", "learned": False})),
    *_rows("lrpe-orthogonal", *IN_BASES, *THETAS, LEARNED, FIXED, ("mixed", {"identity": 2})),
    *_rows("lrpe-permutation", *IN_BASES, ("learned", {"learned_basis": True, "decay": "retnet"})),
    *_rows(
        "permuteformer",
        ("", {}),
        ("no-decay", {"decay": "none"}),
        ("width", {"width": 4}),
        ("long", {"orders": "long", "length": 15}),
        ("orthogonal", {"matrix": "orthogonal"}),
    ),
    *_rows("permuteformer", ("identity", {"matrix": "identity"}), directed=False),
    *_rows("permuteformer-2d", ("", {}), ("3d", {"axes": 3, "orders": "long", "length": 2})),
    *_rows("harope", ("", {}), ("3d", {"axes": 3, "base": 50.0}), ("released", {"axes": 1, "released": True})),
    *_rows("drope", ("", {}), ("sections", {"sections": "1+1+2", "base": 100.0})),
    *_rows("wire", ("", {}), ("fixed", {"axes": 3, "learned": False})),
    *_rows("prope", ("", {}), ("scores", {"transport": False}), ("half", {"layout": "half"})),
    *_rows("shaw", ("", {}), ("reach", {"reach": 3}), directed=False),
    *_rows("transformer-xl", ("", {}), ("width", {"model_dim": 6})),
    *_rows("t5", ("", {}), ("causal", {"buckets": 8, "max_distance": 20, "bidirectional": False}), directed=False),
    *_rows("deberta", ("", {}), ("clipped", {"buckets": 8, "max_distance": None}), directed=False),
    *_rows("deberta", ("released", {"buckets": 8, "max_distance": 20, "released": True}), directed=False),
    *_rows("kerple", ("", {}), ("power", {"kernel": "power"}), directed=False),
    *_rows("fire", ("", {"length": 5.0}), ("width", {"width": 4, "length": 9.0}), relative=False, directed=False),
    *_rows("alibi", ("", {}), directed=False),
    *_rows("clock", ("", {})),
    *_rows("string", ("", {}), ("grid", {"axes": 2}), ("circulant", {"variant": "circulant", "axes": 2})),
    *_rows("string", ("fixed", {"learned": False})),
    *_rows("comrope", ("", {}), ("axial", {"variant": "axial"}), ("pairs-fixed", {"axes": 3, "block": 2, "learned": False})),
    *_rows("grape", ("", {}), ("grid", {"axes": 2, "planes": 2}), ("fixed", {"learned": False})),
    *_rows("pope", ("", {}), ("softmax", {"attention": "softmax"})),
    *_rows("liere", ("", {}), ("fixed", {"axes": 3, "learned": False}), relative=False),
    *_rows("fox", ("", {}), ("encoded", {"denominator": "encoded", "feature_map": "relu"}), directed=False),
    *_rows(
        "selective", ("", {}), ("forget", {"decay": "forget", "base": 100.0}), ("half", {"layout": "half"}), directed=False
    ),
    *_rows("carope", ("", {}), ("forget", {"decay": "forget", "base": 50.0}), ("half", {"layout": "half"}), directed=False),
    *_rows("path", ("", {}), ("forget", {"decay": "forget"}), ("reflection", {"strength": "reflection"}), directed=False),
    *_rows("retnet", ("", {}), ("original", {"original": True, "frequencies": "torchscale"})),
    *_rows("cosformer", ("", {}), ("length", {"length": 5000, "denominator": "plain"}), directed=False),
    *_rows("ape-sequence", ("", {}), ("decay", {"decay": _learned_decay, "denominator": "encoded"}), IDENTITY, LOCAL),
    *_rows("ape-absolute", ("", {}), ("query", {"side": "query"}), IDENTITY, relative=False),
    *_rows("ape-tree", ("", {}), ("branches", {"branches": 3}), IDENTITY, LOCAL),
    *_rows("ape-grid", ("", {}), ("axes", {"axes": 3}), IDENTITY, LOCAL),
    *_rows("ape-grid", ("euclidean", {"locality": 0.9, "metric": "euclidean", "attention": "softmax"})),
    *_rows("ape-ring", ("", {}), ("period", {"period": 7}), LOCAL),
    *_rows("ape-product", ("", {}), ("images", {"parts": "tree2+grid2"}), ("rings", {"parts": "ring5+sequence"})),
    *_rows("ape-product", IDENTITY, LOCAL),
    *_rows("horn-constrained", ("", {}), ("grid", {"axes": 2, "sinusoids": 3}), ("outside", {"outside": 1})),
    *_rows("horn-constrained", ("learned", {"axes": 2, "sinusoids": 3, "learned": True})),
    *_rows("horn-constrained", ("inside", {"inside": True, "feature_map": "favor"}), relative=False, inside=True),
    *_rows("horn-clipped", ("", {}), ("reach", {"reach": 2, "outside": 1}), directed=False),
    *_rows("horn-clipped", ("grid", {"axes": 2, "reach": 2, "mean": -0.5}), directed=False),
    *_rows("spe-sine", ("", {}), ("many", {"sines": 3, "realizations": 16}), GATED, relative=False, inside=True),
    *_rows("spe-conv", ("", {}), ("many", {"reach": 3, "realizations": 16}), GATED, relative=False, inside=True),
    *_rows("shiv-quirk", ("", {}), ("branches", {"branches": 3, "depth": 2}), relative=False, directed=False),
]
LEARNED = {  # by scheme, the names of its weights in files, which stay what they are
    "learned": {"embedding.weight"},
    "shaw": {"bias.keys.weight", "bias.values.weight"},
    "transformer-xl": {"encoding.content.weight", "encoding.location.weight", "encoding.projection"},
    "t5": {"bias.weight"},
    "deberta": {"bias.keys.weight", "bias.queries.weight"},
    "kerple": {"bias.first.weight", "bias.second.weight"},
    "fire": {"bias.into.weight", "bias.out.weight", "bias.rate.weight", "bias.threshold.weight"},
    "horn-constrained": {"encoding.projection"},
    "horn-clipped": {"bias.weight"},
    "spe-sine": {"encoding.frequency", "encoding.gain.weight", "encoding.phase.weight"},
    "spe-conv": {"encoding.filters"},
    "shiv-quirk": {"embedding.decay"},
    "string": {"encoding.encoding.frequency", "encoding.basis.generator"},
    "comrope": {"encoding.generator", "encoding.direction.weight"},
    "grape": {"encoding.vectors"},
    "pope": {"encoding.phase"},
    "liere": {"encoding.generator"},
    "fox": {"forget.weight", "forget.bias.weight"},
    "selective": {"turn.weight", "turn.bias.weight"},
    "carope": {"turn.weight", "turn.bias.weight"},
    "path": {"turn.weight", "turn.gate.weight", "turn.bias.weight"},
    "harope": {"encoding.generator", "encoding.stretch.weight"},
    "ape-sequence": {"encoding.generator"},
    "ape-absolute": {"encoding.encoding.generator"},
    "ape-ring": {"encoding.basis.generator"},
    "ape-tree": {"encoding.generator"},
}
STORED = {  # of options
    **{name: set() for name in ("string-fixed", "comrope-pairs-fixed", "grape-fixed", "liere-fixed")},
    "wire": {"encoding.frequency"},
    "path-reflection": {"turn.weight"},
    "rope-learned": {"encoding.frequency"},
    "string-circulant": {"encoding.generator"},
    "comrope-axial": {"encoding.generator"},
    "grape-grid": {f"encoding.parts.{axis}.parts.{plane}.vectors" for axis in range(2) for plane in range(2)},
    "rope-mixed": {"encoding.frequency"},
    "ape-grid": {"encoding.parts.0.generator", "encoding.parts.1.generator"},
    "ape-product": {"encoding.parts.0.generator", "encoding.parts.1.generator"},
    "lrpe-unitary-identity": {"encoding.frequency"},
    "lrpe-orthogonal-householder": {"encoding.encoding.frequency"},
}
PRESETS = [next(case for case in SCHEMES if case.name == name) for name in dict.fromkeys(c.name for c in SCHEMES)]
"""The first row of each scheme, for tests too slow for every option."""


def scheme_case(id: str) -> SchemeCase:
    """The row with this id."""
    return next(case for case in SCHEMES if case.id == id)


@contextlib.contextmanager
def named(what: str | Callable[[], str]) -> Iterator[None]:
    """Context that adds a name to the message of a failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {what() if callable(what) else what}")
        raise


Rows = Sequence[tuple[str | Callable[[], str], Mapping[str, Any]]]
Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def looped(rows: Rows) -> Decorator:
    """Run a test for named rows of arguments, one after another.

    A failure names its row. Every row starts from the same random numbers and its own `monkeypatch`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        assert rows, f"{test.__name__}: expected rows, got none"

        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            skipped = []
            for name, arguments in rows:
                torch.manual_seed(0)
                with named(name), contextlib.ExitStack() as stack:
                    own = {n: stack.enter_context(x.context()) if n == "monkeypatch" else x for n, x in fixtures.items()}
                    try:
                        test(**arguments, **own)
                    except pytest.skip.Exception as skip:
                        skipped.append(skip)
            if skipped and len(skipped) == len(rows):
                raise skipped[0]

        given = {name for _, arguments in rows for name in arguments}
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in given]
        loop.__signature__ = signature.replace(parameters=fixtures)  # pyright: ignore[reportAttributeAccessIssue]
        return loop

    return decorate


def each(
    names: str | Sequence[str], rows: Iterable[Any], ids: Callable[[Any], Any] | Iterable[str] | None = None
) -> Decorator:
    """Like `pytest.mark.parametrize`, in a single run, for cheap cases."""
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    values = [row if len(arguments) > 1 else (row,) for row in rows]
    labels = [None] * len(values) if ids is None or callable(ids) else list(ids)

    def name(label: str | None, row: Sequence[Any]) -> Callable[[], str]:
        return lambda: label or " ".join(str(ids(x) if callable(ids) else getattr(x, "__name__", x)) for x in row)

    given = [dict(zip(arguments, row, strict=True)) for row in values]
    return looped([(name(*row), own) for *row, own in zip(labels, values, given, strict=True)])


def grouped(rows: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Decorator:
    """Parametrise a test by families of presets, with rows (preset, name, arguments).

    The name of a run lists the presets of the family, so `-k` finds each preset.
    """
    families: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for row in rows:
        module = schemes.REGISTRY[row[0]].__module__ if row[0] in schemes.REGISTRY else row[0]
        families.setdefault(module, []).append(row)
    names = ["+".join(dict.fromkeys(preset for preset, _, _ in own)) for own in families.values()]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        loops = [looped([(name, arguments) for _, name, arguments in own])(test) for own in families.values()]

        @functools.wraps(test)
        def of_family(family: Callable[..., None], **fixtures: Any) -> None:
            family(**fixtures)

        signature = inspect.signature(loops[0])
        own = inspect.Parameter("family", inspect.Parameter.KEYWORD_ONLY)
        of_family.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # pyright: ignore
        return pytest.mark.parametrize("family", loops, ids=names)(of_family)

    return decorate


def over_rows(cases: Sequence[SchemeCase]) -> Decorator:
    """Parametrise a test of a `case` by families of presets."""
    return grouped([(case.name or "composed", case.id, {"case": case}) for case in cases])


def with_kinds(cases: Sequence[SchemeCase]) -> Decorator:
    """Parametrise a test of a `case` and a `kind` of attention by families of presets."""
    return over_pairs((case, kind) for case in cases for kind in case.kinds)


def over_pairs(pairs: Iterable[tuple[SchemeCase, str]]) -> Decorator:
    """Parametrises a test of a `case` and a `kind` by families of presets."""
    return grouped([(case.name or "composed", f"{case.id}-{kind}", {"case": case, "kind": kind}) for case, kind in pairs])


class EncodingCase(NamedTuple):
    """An encoding of HEADS heads (or one for all) from a scheme's row or `COMPOSED`; `make` builds it."""

    id: str
    make: Callable[[], Encoding]
    group: Group
    learned: bool = False


def _rotary(columns: int = 1, heads: int = HEADS, features: int = HEAD_DIM, **options: Any) -> Encoding:
    count = features if options.get("lift") else features // 2
    return encodings.Rotary(rope_frequencies(heads * columns * count, 50.0).view(heads, columns, count), **options)


def _ring(period: int, heads: int = HEADS, features: int = HEAD_DIM) -> Encoding:
    whole = torch.arange(1, heads * features // 2 + 1, dtype=torch.float64).view(heads, 1, -1)
    return encodings.Rotary(2 * torch.pi / period * whole, group=Ring(period))


def permutations(columns: int = 1, heads: int = HEADS, features: int = HEAD_DIM) -> Tensor:
    """Random permutations ``[h c d]`` that commute: different powers of one."""
    steps = [torch.randperm(features, generator=torch.Generator().manual_seed(seed)) for seed in range(heads)]
    axes = [steps]
    for _ in range(columns - 1):
        axes.append([power[step] for power, step in zip(axes[-1], steps, strict=True)])
    return torch.stack([torch.stack(axis) for axis in axes], 1)


def generator(heads: int = HEADS, features: int = HEAD_DIM) -> Tensor:
    """A random A of `Exponential`, ``[h d d]``."""
    seeded = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(heads, features, features, generator=seeded, dtype=torch.float64)


def tree_generator(heads: int = HEADS, features: int = HEAD_DIM, branches: int = 2) -> Tensor:
    """A random A of `TreePath`, ``[h b d d]``."""
    return generator(heads * branches, features).unflatten(0, (heads, branches))


def normals(heads: int = HEADS, features: int = HEAD_DIM) -> Tensor:
    """Random normals of `Householder`, ``[h d]``."""
    return torch.randn(heads, features, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _commuting(axes: int, **options: Any) -> Encoding:
    direction = torch.randn(HEADS, axes, 2, generator=torch.Generator().manual_seed(4))
    return generators.Commuting(generator(HEADS * 2, HEAD_DIM // 2).unflatten(0, (HEADS, 2)), direction, **options)


ALL_BASES: dict[str, Callable[[], bases.Basis]] = {
    "householder": lambda: bases.Householder(normals()),
    "householder-learned": lambda: bases.Householder(normals(), learned=True),
    "orthogonal": lambda: bases.Orthogonal(generator()),
    "orthogonal-learned": lambda: bases.Orthogonal(generator(), learned=True),
    "cayley": lambda: bases.Cayley(generator()),
    "cayley-learned": lambda: bases.Cayley(generator(), learned=True),
    "odd-even": lambda: bases.OddEven(HEAD_DIM),
    "fourier": lambda: bases.Fourier(HEAD_DIM),
    "complex-fourier": lambda: bases.ComplexFourier(HEAD_DIM),
    "pairs": lambda: bases.Pairs(bases.Householder(normals(features=HEAD_DIM // 2))),
    "pairs-learned": lambda: bases.Pairs(bases.Householder(normals(features=HEAD_DIM // 2), learned=True)),
}
LINE, REAL = Line(), Line(real=True)
COMPOSED = [
    EncodingCase("rotary", _rotary, REAL),
    EncodingCase("rotary-shared", lambda: _rotary(heads=1), REAL),
    EncodingCase("rotary-learned", lambda: _rotary(learned=True), REAL, learned=True),
    EncodingCase("rotary-grid", lambda: _rotary(columns=2), Product((REAL, REAL))),
    EncodingCase("rotary-grid-learned", lambda: _rotary(columns=2, learned=True), Product((REAL, REAL)), learned=True),
    EncodingCase("rotary-ring", lambda: _ring(12), Ring(12)),
    EncodingCase("rotary-lift-learned", lambda: _rotary(lift=True, learned=True), REAL, learned=True),
    EncodingCase("exponential", lambda: encodings.Exponential(generator(), learned=False), REAL),
    EncodingCase("exponential-learned", lambda: encodings.Exponential(generator()), REAL, learned=True),
    EncodingCase("circulant-grid", lambda: generators.Circulant(generator()[:, 0:3], learned=False), Product((REAL,) * 3)),
    EncodingCase("circulant-learned", lambda: generators.Circulant(generator()[:, :1]), REAL, learned=True),
    EncodingCase("commuting-line", lambda: _commuting(1, learned=False), REAL),
    EncodingCase("commuting-learned", lambda: _commuting(2, learned_direction=True), Product((REAL, REAL)), learned=True),
    EncodingCase("rank-two-fixed", lambda: generators.RankTwo(normals(), normals().flip(0), learned=False), REAL),
    EncodingCase("rank-two-learned", lambda: generators.RankTwo(normals(), normals().roll(1, 1)), REAL, learned=True),
    *(
        EncodingCase(f"rotary-{name}", lambda make=make: encodings.InBasis(_rotary(), make()), REAL, "learned" in name)
        for name, make in ALL_BASES.items()
    ),
    EncodingCase("spectrum", lambda: encodings.InBasis(_rotary(features=2 * HEAD_DIM), bases.Spectrum(HEAD_DIM)), REAL),
    EncodingCase("lift-fourier", lambda: encodings.InBasis(_rotary(lift=True), bases.Fourier(HEAD_DIM)), REAL),
    EncodingCase(
        "permutation-householder",
        lambda: encodings.InBasis(encodings.Permutation(permutations()), bases.Householder(normals())),
        LINE,
    ),
    EncodingCase(
        "sum-product",
        lambda: encodings.DirectSum([_rotary(features=4, learned=True), encodings.Permutation(permutations(1, HEADS, 4))]),
        Product((REAL, LINE)),
        learned=True,
    ),
    EncodingCase("sum-ring", lambda: encodings.DirectSum([_rotary(features=4), _ring(12, 1, 4)]), Product((REAL, Ring(12)))),
    EncodingCase(
        "sum-shared",
        lambda: encodings.DirectSum([_rotary(features=4), encodings.Exponential(generator(HEADS, 4))], shared=True),
        REAL,
        learned=True,
    ),
    EncodingCase("tree", lambda: encodings.TreePath(tree_generator(), learned=False), Tree(2)),
    EncodingCase("tree-learned", lambda: encodings.TreePath(tree_generator()), Tree(2), learned=True),
    EncodingCase("unary-tree", lambda: encodings.TreePath(generator()[:, None], learned=False), Tree(1)),
    EncodingCase(
        "sum-tree",
        lambda: encodings.DirectSum([_rotary(features=4), encodings.TreePath(tree_generator(HEADS, 4), learned=False)]),
        Product((REAL, Tree(2))),
    ),
    EncodingCase("partial", lambda: encodings.Partial(_rotary(features=4), HEAD_DIM), REAL),
    EncodingCase("partial-lift", lambda: encodings.Partial(_rotary(features=4, lift=True), HEAD_DIM), REAL),
]
"""Encodings that no preset has."""


def _of_schemes() -> Iterator[EncodingCase]:
    """Encodings of presets, one per structure."""
    seen = set()
    for case in PRESETS:
        encoding = case.build().encoding
        trivial = isinstance(encoding, encodings.Identity)
        kind = encodings.Identity if trivial else (*map(type, encoding.modules()), encoding.group, encoding.out_features)
        if isinstance(encoding, Encoding) and kind not in seen:
            seen.add(kind)
            learned = any(True for _ in encoding.parameters())
            yield EncodingCase(case.id, lambda case=case: case.build().encoding, encoding.group, learned)


ENCODINGS = [*_of_schemes(), *COMPOSED]


def ids(case: Any) -> str:
    """For ``parametrize(..., ids=ids)``."""
    return case.id


def close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, roundings: float = TOLERANCE) -> None:
    """Assert equality up to a number of roundings of `dtype`, by default the coarser of both dtypes."""
    assert actual.shape == expected.shape
    dtype = dtype or max(actual.dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
    if not expected.numel():
        return
    scale = max(1.0, expected.detach().abs().max().item())
    atol = roundings * torch.finfo(dtype).eps * scale
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


def perturb(module: Module, size: float = 0.1) -> Module:
    """Move every parameter off its initial value, differently per head, and promote it to float64."""
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.add_(size * torch.randn_like(parameter) * (0.1 + parameter.abs()))
    return module


def inputs(*batch: int, t: int, s: int | None = None, d: int = HEAD_DIM, e: int = HEAD_DIM, heads: int = HEADS, **kw: Any):
    """Random q ``[*b h t d]``, k ``[*b h s d]``, v ``[*b h s e]``, by default float64."""
    kw = {"dtype": torch.float64, "requires_grad": False} | kw
    s = t if s is None else s
    shapes = ((*batch, heads, t, d), (*batch, heads, s, d), (*batch, heads, s, e))
    return tuple(torch.randn(shape, **kw) for shape in shapes)


def with_edges(*tensors: Tensor) -> list[Tensor]:
    """Random q, k, v with edge cases: zeros of both signs, tiny numbers, rows of zeros, equal rows.

    Each in about one of 16 numbers or rows. Tiny ones are 1e-30 times as large, which float32 and bfloat16 hold.
    """
    draw, found = torch.Generator().manual_seed(7), []
    for x in tensors:
        number, row = (torch.randint(16, shape, generator=draw).to(x.device) for shape in (x.shape, (*x.shape[:-1], 1)))
        edged = torch.where(number < 2, torch.where(number == 0, 0.0, -0.0), torch.where(number == 2, 1e-30, 1.0) * x).to(
            x.dtype
        )
        edged = torch.where(row == 0, 0.0, edged)
        found.append(torch.where(row == 1, edged.roll(1, -2), edged).detach().requires_grad_(x.requires_grad))
    return found


def ascending(*shape: int, least: int = 0) -> Tensor:
    """Random positions ``[*shape 1]`` that increase by at least a step per token."""
    return torch.randint(least, least + 3, shape).cumsum(-1)[..., None]


def inputs_of(scheme: schemes.Scheme, *batch: int, t: int, **kw: Any) -> tuple[Tensor, ...]:
    """Random q, k, v with the widths that a scheme takes."""
    d = scheme.encoding.features
    return inputs(*batch, t=t, **({"d": d, "e": d // scheme.width} | kw))


def gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random projection of `out`, per tensor; zeros for tensors that do not affect `out`."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.autograd.grad((out.double() * weight).sum(), tensors, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, found, strict=True)]


def same_everywhere(actual, expected, leaves, roundings=TOLERANCE):
    """Assert equal outputs and gradients."""
    close(actual, expected, roundings=roundings)
    for fast, slow in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert fast.isfinite().all()
        close(fast, slow, roundings=roundings)


def linear_options(name, b, h, t, d):
    """Options of linear attention by name: of `LINEAR`, `BIDIRECTIONAL` or `ALL_KEYS`, or a scheme."""
    if name.startswith("all keys, "):
        return linear_options(name.removeprefix("all keys, "), b, h, t, d) | {"causal": False}
    g = -torch.rand(h, t, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).cumsum(-1) / 10
    steady = -torch.arange(t, dtype=torch.float64) * torch.linspace(0.01, 1, h, dtype=torch.float64)[:, None]
    between = torch.cat(((g[:, :-1] + g[:, 1:]) / 2, g[:, -1:] - 0.01), -1)
    scheme = schemes.REGISTRY[name](d, h).at(sequence(t)) if name in schemes.REGISTRY else {}
    ids = (torch.arange(t) // 37).expand(b, t)
    mask = torch.rand(b, t, generator=torch.Generator().manual_seed(3)) > 0.3
    rope = schemes.REGISTRY["rope"](d).at(sequence(t))
    own = {
        "no denominator": {"denominator": None},
        "encoded": rope | {"denominator": "encoded"},
        "drawn decay": {"decay": g},
        "drawn decay, plain": rope | {"decay": g},
        "steady decay, plain": rope | {"decay": steady},
        "decays of queries and keys": rope | {"decay": (g - 0.01, g)},
        "bidirectional with a decay": rope | {"decay": g, "causal": False},
        "bidirectional, masked": rope | {"decay": (between, g), "causal": False, "mask": mask},
        "bidirectional, encoded": rope | {"decay": steady, "causal": False, "denominator": "encoded"},
        "bidirectional, packed": {"segment_ids": ids, "decay": steady, "causal": False, "denominator": None},
        "packed": rope | {"segment_ids": ids},
        "masked": rope | {"mask": mask},
        "masked decay, encoded": rope | {"mask": mask, "decay": steady, "denominator": "encoded"},
        "favor": {"feature_map": feature_maps.Favor(d, 48), "denominator": "plain"},
        "identity": rope | {"feature_map": None, "denominator": None},
        **{phi: rope | {"feature_map": feature_maps.FEATURE_MAPS[phi]} for phi in ("relu", "relu2", "exp")},
    }
    return {"feature_map": feature_maps.FEATURE_MAPS["elu+1"], "causal": True} | own.get(name, scheme)


LINEAR = """
no denominator; encoded; drawn decay; drawn decay, plain; steady decay, plain; decays of queries and keys
bidirectional with a decay; packed; masked; masked decay, encoded; favor; identity; relu; relu2; exp
permuteformer; lrpe-unitary; lrpe-orthogonal; lrpe-permutation; retnet; cosformer
"""
LINEAR = [name for line in LINEAR.strip().splitlines() for name in line.split("; ")]
BIDIRECTIONAL = ["bidirectional, masked", "bidirectional, encoded", "bidirectional, packed"]
ALL_KEYS = "no denominator; encoded; masked; identity; relu; relu2; exp; rope; lrpe-unitary; lrpe-orthogonal; cosformer"
ALL_KEYS = [f"all keys, {name}" for name in (*ALL_KEYS.split("; "), "lrpe-permutation", "none")]


def with_gradients(inputs, dtype, given, grad, attend=linear_attention):
    """Linear attention in a dtype, and gradients of inputs and decays."""
    inputs, decay = [x.to(dtype).requires_grad_() for x in inputs], given.get("decay")
    several = decay if isinstance(decay, tuple) else () if decay is None else (decay,)
    learned = [g.detach().clone().requires_grad_() for g in several]
    if learned:
        given = given | {"decay": tuple(learned) if isinstance(decay, tuple) else learned[0]}
    out = attend(*inputs, **given)
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *learned], grad.to(dtype))]


# Numbers at which compiled kernels are compared with the table of feature maps; 128 are whole vectors of any library.
EDGES = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-12, -1e-12, 1e-3, torch.inf, -torch.inf, torch.nan])
EDGES = torch.cat((torch.linspace(-30, 30, 118), EDGES))


def as_the_table(phi, y, derivative, most=3e-7):
    """Compare values and derivatives of a compiled feature map at EDGES with its definition in float64."""
    x = EDGES.double().requires_grad_()
    exact = phi(x)
    torch.testing.assert_close(y, exact.float(), rtol=most, atol=0, equal_nan=True)
    finite = EDGES.isfinite()
    torch.testing.assert_close(derivative[finite], torch.autograd.grad(exact.sum(), x)[0][finite].float(), rtol=most, atol=0)
