"""The case table: a new scheme or encoding adds a row here and inherits every law.

Also what the tests share: the tolerance, random inputs and the quadratic reference.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from isopos import bases, encodings, schemes
from isopos.decays import Decay, retnet_rates
from isopos.encodings import Encoding, rope_frequencies
from isopos.isometries import Identity
from isopos.ops.linear import divide, naive
from isopos.positions import Group, Line, Product, Ring

Module = TypeVar("Module", bound=nn.Module)
HEAD_DIM, HEADS = 8, 2
TOLERANCE = 2048  # times the dtype's eps, relative to the largest magnitude expected


class SchemeCase(NamedTuple):
    """A scheme with options. Options that are functions are called, so that every scheme owns its modules."""

    id: str
    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    relative: bool = True  # scores see relative positions only
    directed: bool = True  # an encoding that tells i - j from j - i

    def build(self, head_dim: int = HEAD_DIM, heads: int = HEADS, **more: Any) -> schemes.Scheme:
        options = {name: value() if callable(value) else value for name, value in (dict(self.options) | more).items()}
        if options.get("attention") == "softmax":
            options = {
                name: value for name, value in options.items() if name not in ("feature_map", "denominator", "original")
            }
        return schemes.REGISTRY[self.name](head_dim, heads, **options)


def _learned_decay() -> Decay:
    return Decay(retnet_rates(HEADS), learned=True)


BASES = ("identity", "householder", "odd-even", "fourier")
SCHEMES = [
    SchemeCase("none", "none", directed=False),
    SchemeCase("sinusoidal", "sinusoidal", relative=False, directed=False),
    SchemeCase("sinusoidal-scale", "sinusoidal", {"scale": 0.5}, relative=False, directed=False),
    SchemeCase("learned", "learned", {"length": 256}, relative=False, directed=False),
    SchemeCase("rope", "rope"),
    SchemeCase("rope-base", "rope", {"base": 100.0}),
    SchemeCase("rope-learned", "rope", {"learned": True}),
    SchemeCase("rope-partial", "rope", {"rotary_dim": 4}),
    SchemeCase("rope-partial-learned", "rope", {"rotary_dim": 4, "learned": True}),
    SchemeCase("rope-encoded", "rope", {"denominator": "encoded", "feature_map": "relu"}),
    SchemeCase("rope-undivided", "rope", {"denominator": "none", "feature_map": "identity"}),
    SchemeCase("rope-decay", "rope", {"decay": "permuteformer"}),
    SchemeCase("rope-learned-decay", "rope", {"learned": True, "decay": _learned_decay}),
    *(SchemeCase(f"lrpe-unitary-{basis}", "lrpe-unitary", {"basis": basis}, directed=False) for basis in BASES),
    *(SchemeCase(f"lrpe-orthogonal-{basis}", "lrpe-orthogonal", {"basis": basis}) for basis in BASES),
    *(SchemeCase(f"lrpe-permutation-{basis}", "lrpe-permutation", {"basis": basis}) for basis in BASES),
    SchemeCase("lrpe-unitary-learned", "lrpe-unitary", {"learned": True, "learned_basis": True}, directed=False),
    SchemeCase("lrpe-orthogonal-learned", "lrpe-orthogonal", {"learned": True, "learned_basis": True}),
    SchemeCase("lrpe-permutation-learned", "lrpe-permutation", {"learned_basis": True, "decay": "retnet"}),
    SchemeCase("permuteformer", "permuteformer"),
    SchemeCase("permuteformer-no-decay", "permuteformer", {"decay": "none"}),
    SchemeCase("retnet", "retnet"),
    SchemeCase("retnet-original", "retnet", {"original": True}),
    SchemeCase("alibi", "alibi", directed=False),
    SchemeCase("cosformer", "cosformer", directed=False),
    SchemeCase("cosformer-length", "cosformer", {"length": 5000, "denominator": "plain"}, directed=False),
    SchemeCase("ape-ring", "ape-ring"),
    SchemeCase("ape-ring-period", "ape-ring", {"period": 7}),
    SchemeCase("ape-sequence", "ape-sequence"),
    SchemeCase("ape-sequence-decay", "ape-sequence", {"decay": _learned_decay, "denominator": "encoded"}),
]
PRESETS = [next(case for case in SCHEMES if case.name == name) for name in dict.fromkeys(c.name for c in SCHEMES)]
"""The first row of each scheme, for tests too slow for every option."""


def scheme_case(id: str) -> SchemeCase:
    """The row of that id."""
    return next(case for case in SCHEMES if case.id == id)


class EncodingCase(NamedTuple):
    """An encoding of HEADS heads (or one for all), made anew by `make`."""

    id: str
    make: Callable[[], Encoding]
    group: Group
    learned: bool = False


def _rotary(columns: int = 1, heads: int = HEADS, features: int = HEAD_DIM, **options: Any) -> Encoding:
    count = features if options.get("lift") else features // 2
    return encodings.Rotary(rope_frequencies(heads * columns * count, 50.0).view(heads, columns, count), **options)


def _ring(period: int, heads: int = HEADS, features: int = HEAD_DIM) -> Encoding:
    turns = torch.arange(1, heads * features // 2 + 1, dtype=torch.float64).view(heads, 1, -1)
    return encodings.Rotary(2 * torch.pi / period * turns, group=Ring(period))


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


def normals(heads: int = HEADS, features: int = HEAD_DIM) -> Tensor:
    """Random normals of `Householder`, ``[h d]``."""
    return torch.randn(heads, features, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


ALL_BASES: dict[str, Callable[[], bases.Basis]] = {
    "householder": lambda: bases.Householder(normals()),
    "householder-learned": lambda: bases.Householder(normals(), learned=True),
    "orthogonal": lambda: bases.Orthogonal(generator()),
    "orthogonal-learned": lambda: bases.Orthogonal(generator(), learned=True),
    "odd-even": lambda: bases.OddEven(HEAD_DIM),
    "fourier": lambda: bases.Fourier(HEAD_DIM),
}
LINE, REAL = Line(), Line(real=True)
ENCODINGS = [
    EncodingCase("identity", lambda: encodings.Identity(HEAD_DIM), REAL),
    EncodingCase("rotary", _rotary, REAL),
    EncodingCase("rotary-shared", lambda: _rotary(heads=1), REAL),
    EncodingCase("rotary-learned", lambda: _rotary(learned=True), REAL, learned=True),
    EncodingCase("rotary-grid", lambda: _rotary(columns=2), Product((REAL, REAL))),
    EncodingCase("rotary-grid-learned", lambda: _rotary(columns=2, learned=True), Product((REAL, REAL)), learned=True),
    EncodingCase("rotary-ring", lambda: _ring(12), Ring(12)),
    EncodingCase("rotary-lift", lambda: _rotary(lift=True), REAL),
    EncodingCase("rotary-lift-learned", lambda: _rotary(lift=True, learned=True), REAL, learned=True),
    EncodingCase("permutation", lambda: encodings.Permutation(permutations()), LINE),
    EncodingCase("permutation-grid", lambda: encodings.Permutation(permutations(2)), Product((LINE, LINE))),
    EncodingCase("exponential", lambda: encodings.Exponential(generator(), learned=False), REAL),
    EncodingCase("exponential-learned", lambda: encodings.Exponential(generator()), REAL, learned=True),
    *(
        EncodingCase(f"rotary-{name}", lambda make=make: encodings.InBasis(_rotary(), make()), REAL, "learned" in name)
        for name, make in ALL_BASES.items()
    ),
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
    EncodingCase("partial", lambda: encodings.Partial(_rotary(features=4), HEAD_DIM), REAL),
    EncodingCase("partial-lift", lambda: encodings.Partial(_rotary(features=4, lift=True), HEAD_DIM), REAL),
]


def ids(case: Any) -> str:
    """For ``parametrize(..., ids=ids)``."""
    return case.id


def close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, roundings: float = TOLERANCE) -> None:
    """Assert equality up to so many roundings of `dtype`, by default the coarser of the two dtypes'."""
    assert actual.shape == expected.shape
    dtype = dtype or max(actual.dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
    if not expected.numel():
        return
    scale = max(1.0, expected.detach().abs().max().item())
    atol = roundings * torch.finfo(dtype).eps * scale
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


def perturb(module: Module, size: float = 0.1) -> Module:
    """Move every parameter off its initial value, each head another way, and widen it to float64."""
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.add_(size * torch.randn_like(parameter) * (0.1 + parameter.abs()))
    return module


def inputs(*batch: int, t: int, s: int | None = None, d: int = HEAD_DIM, e: int = HEAD_DIM, heads: int = HEADS, **kw: Any):
    """Random q ``[*b h t d]``, k ``[*b h s d]``, v ``[*b h s e]``, float64 unless said."""
    kw = {"dtype": torch.float64, "requires_grad": False} | kw
    s = t if s is None else s
    shapes = ((*batch, heads, t, d), (*batch, heads, s, d), (*batch, heads, s, e))
    return tuple(torch.randn(shape, **kw) for shape in shapes)


def ascending(*shape: int, step: int = 3) -> Tensor:
    """Random positions ``[*shape 1]`` that do not decrease along tokens."""
    return torch.randint(step, shape).cumsum(-1)[..., None]


def pair(value: Any) -> tuple[Any, Any]:
    """One for queries and one for keys."""
    return value if isinstance(value, tuple) else (value, value)


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry=None,
    feature_map=None,
    decay=None,
    denominator="plain",
    causal=False,
    mask=None,
) -> Tensor:
    """Linear attention by its definition: every weight is formed, numerator over denominator."""
    rho_q, rho_k = (rho or Identity() for rho in pair(isometry))
    g = None if decay is None else pair(decay)
    if feature_map is not None:
        q, k = feature_map(q), feature_map(k)
    if mask is not None:
        k, v = (torch.where(mask[..., None, :, None], x, 0) for x in (k, v))
    numerator = naive(rho_q(q), rho_k(k), v, g, causal=causal)
    if denominator is None:
        return numerator
    features = (rho_q(q), rho_k(k)) if denominator == "encoded" else (q, k)
    kept = torch.ones_like(v[..., :1])
    return divide(torch.cat((numerator, naive(*features, kept, g, causal=causal)), -1))


def softmax_by_definition(q, k, v, *, isometry=None, decay=None, scale=None, causal=False, mask=None):
    """Every logit is formed; rows without keys are zero."""
    rho_q, rho_k = (rho or Identity() for rho in pair(isometry))
    logits = rho_q(q) @ rho_k(k).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    t, s = logits.shape[-2:]
    keep = torch.ones(t, s, dtype=torch.bool).tril(s - t) if causal else torch.ones(t, s, dtype=torch.bool)
    if decay is not None:
        g_q, g_k = pair(decay)
        logits = logits - (g_q[..., :, None] - g_k[..., None, :]).abs()
    if mask is not None:
        keep = keep & mask[..., None, None, :]
    weight = torch.where(keep, (logits - logits.amax(-1, keepdim=True)).exp(), 0)
    return (weight / weight.sum(-1, keepdim=True).clamp_min(1e-300)) @ v


def gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Of a fixed random projection of `out`, for each tensor; zeros for those that `out` does not see."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.autograd.grad((out.double() * weight).sum(), tensors, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, found, strict=True)]


def same_everywhere(actual, expected, leaves, roundings=TOLERANCE):
    """Outputs and gradients."""
    close(actual, expected, roundings=roundings)
    for fast, slow in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert fast.isfinite().all()
        close(fast, slow, roundings=roundings)
