"""docs/schemes.md: the formula, options and measured laws of each scheme. `tools.generate` writes it."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isopos import laws
from isopos.attention import linear_attention, softmax_attention
from isopos.catalog import CATALOG, Entry
from isopos.lab.reports.grids import markdown
from isopos.lab.reports.kernels import fill_zeros, panels
from isopos.poses import Projective
from isopos.positions import Group, Product, Tree, tree
from isopos.schemes import REGISTRY, Choices, Scheme
from isopos.state import State
from tools.authors import AUTHORS
from tools.pages import ROOT, tables

__all__ = ["page"]

HEAD_DIM, HEADS = 16, 2  # of the schemes that are built
FAR, STEPS = 10**6, "path"
COMMAND = "python -m tools.generate"
INTRODUCTION = f"""# The schemes

Formulas, uses, laws and options of the {len(CATALOG)} schemes, each with its default options. Uses and laws are measured on
schemes with {HEAD_DIM} features and {HEADS} heads; formulas, costs and extensions to other groups are not measured.

A scheme is built from head size and heads, `isopos.rope(64, 8)`. On the command line it is `rope`, or with options
`rope:decay=retnet`. In formulas q and k are a query and a key (their features in linear attention), x and y their positions,
and t = y - x. A number in brackets refers to a note below the table.

`isopos show SCHEME` draws the scores, `isopos check SCHEME` prints the figures behind the laws, and `isopos compare
--schemes A,B` trains small models. In the site, the [explorer](explorer.md) compares kernels, extensions and errors of any
options.
"""

DEFINITIONS = """\
Scores leave out feature map and decay. For an additive embedding the score column has the added vector.
"""
USES = """\
**linear**, **softmax**: the kinds of attention that the scheme supports. **causal**, **bidirectional**, **cross** (keys are
other tokens at other positions): attention runs, with each supported kind. **streaming**: the state that `isopos.State`
keeps: sums of constant size, or a growing cache of encoded keys. **positive**: the smallest denominator of random queries
and keys is positive, with the default features.
"""
LAWS = """\
The laws are {every}. `isopos.laws` defines them, and `isopos check` prints the figures. {steps} applies to
content-dependent positions, which are causal only: their weights depend on the tokens between query and key. For `path`,
bounded and unitary concern the product of matrices between two tokens, which is unitary with `strength=reflection`, and
never increases a norm otherwise. Some laws apply to isometries or to lines only; "all but" names laws that do not hold or
do not apply. **direction**: scores distinguish the query from the key, once learned tables are not zero. **repeats**: the
number of positions after which an encoding repeats, with {head_dim} features and {heads} heads.
"""
OPTIONS = """\
Every scheme also takes {choices}. The table shows the defaults, for linear attention if the scheme supports it. The
docstring of each function explains its options.
"""
CODE = """\
Differences between released code and these schemes, for comparisons and for transferring weights. If a paper and its code
differ, schemes follow the paper; an option in backticks selects the code's behaviour. [peers.md](peers.md) has numerical
differences of packages that can be run. Unless an entry says otherwise, the code also rotates pairs (2i, 2i+1) by the
positive angle.
In isopos rows come before columns, positions count tokens or patches from 0, and layers share a scheme and its
parameters unless a model is given a list with one scheme per layer.
"""
ABSENT = """\
The schemes above map queries and keys before their scores are computed, by an isometry of each, a log decay, matrices of
the tokens between or a term of the offset. Encodings that depend on the scores have no such form, no linear attention and
no law of positions. They are not included:

- CoPE (Golovneva et al. 2024, arXiv 2405.18719): a position is the sum of sigmoid(<q, k>) over the keys between, so that
  each query has separate positions.
- DAPE (Zheng et al. 2024, arXiv 2405.14722): a network computes the bias from each logit and its offset's bias.
- Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980): a weight is sigmoid(<q, k>) times the remainder that the
  scores of later keys leave.
- TAPA (Yu et al. 2025, arXiv 2509.12635): a score is <q, k> of some features times the cosine of a power of |t| times a
  phase, a quadratic form of q and k. The phase belongs to the pair, so that no map of q and no map of k give the cosine. It
  is relative, and needs all pairs, in softmax attention only.
"""
COMPLETE = """\
Every score on a line that depends on the offset t = y - x only, and factors into finitely many features of x and of y,
has the same form. The schemes above are members of this family.

**Representations.** A continuous homomorphism rho from the line to invertible n x n matrices is exp(t A). The integral of
rho(s + t) = rho(s) rho(t) over an interval of s, so small that the integral of rho(s) is invertible, shows that rho is
smooth, and its derivative is rho'(t) = rho'(0) rho(t). With A = P J P^-1 and J in real Jordan form, q^T rho(x)^-1 rho(y) k =
(P^T q)^T exp(t J) (P^-1 k): P and P^-1 move into the projections of queries and keys. So up to a basis every representation
is a row of Jordan blocks of order m, growth g and frequency w (`isopos.contragredient.Jordan`; `ContragredientSum` joins
several), and a score is a sum of t^n / n! e^(g t) cos(w t) and t^n / n! e^(g t) sin(w t) with n < m.

**Nothing else factors.** Let a score be relative and factor: q^T a(x)^T b(y) k = q^T W(y - x) k for all q and k, with n rows
in a and in b, all continuous. Each row of W moved by any x, W(. - x) = a(x)^T b(.), is a combination of the n rows of b. The
span E of all moved rows has at most n dimensions, and moves take it to itself, so that on E they are a representation
exp(s A) of the line, by the paragraph above. A row is what its moved copies are at 0, W_i(s) = (exp(s A) W_i)(0). With the
rows of W as elements of E for C, and evaluation at 0 for B, this is W(s) = C exp(s A) B: a contragredient pair of at most n
features between constant maps of q and of k, which projections absorb as well.

**Members.** Isometries are the blocks that stay bounded for all t: g = 0 and m = 1, rotations. On a line they are RoPE, and
nothing else. xPos is m = 1 with a growth g > 0 of each pair; RetNet's decay is one g of all features, taken out of
them so that it is exact at any length. ALiBi's logits are m = 2 with g = w = 0: the generator [[0, 1], [0, 0]] between the
features (slope, 0) of a query and (0, 1) of a key has the score slope t. Functions of the distance |t| in both directions
are not members; bidirectional decays and bidirectional ALiBi are two members, one per side. Biases with other functions of t
(T5, KERPLE, DeBERTa) do not factor.

`isopos check jordan` measures the laws: relative, homomorphism, identity and decomposable hold, unitary and bounded do not.
The bound of a score is |exp(t A)| |q| |k| instead of |q| |k|. The tables limit positions: those whose scales exceed
float32, or whose powers exceed its precision, are refused.
"""
CRITERIA = """\
The criteria of *Algebraic Positional Encodings*, section 5, after Dufter et al. 2022. **injection**: the quantity that
positions change; embeddings, queries and keys are changed outside the attention function; scores, weights and values inside
it. **recurrence**: once per model or in every layer. **reference point**: relative if a layer's outputs do not change
when all positions shift. **learnability**: the number of parameters with head size 64 and 8 heads, per layer unless layers
share a scheme. **unboundedness**: positions about {far:,} are accepted (in a tree, nodes of depth 1,000); schemes that
clip offsets, put them into buckets or keep the last branches do not distinguish distant ones.
"""
MORE_CRITERIA = """\
**performance**: bits per byte of held-out text in the comparison of [the laboratory](laboratory.md) (`isopos compare`);
lower is better, and its rows differ in more than the encoding. **cost**: in addition to attention without positions, for t
tokens, d features and n buckets. **content-dependence**: the effect of positions on a score depends on the query or the key.
**extensibility**: other groups that the scheme extends to, by an option or by composing encodings.
"""


@dataclass
class _Notes:
    """Footnotes of a table, each once."""

    texts: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> str:
        """The mark of a note."""
        if text not in self.texts:
            self.texts.append(text)
        return f" [{self.texts.index(text) + 1}]"

    def __iter__(self) -> Iterator[str]:
        return (f"[{n}] {text}  " for n, text in enumerate(self.texts, 1))


@dataclass(frozen=True)
class _Measured:
    """A scheme, and measurements that several tables use."""

    name: str
    entry: Entry
    scheme: Scheme
    report: laws.Report
    directional: bool

    @property
    def position_free(self) -> bool:
        """Whether positions have no effect, embeddings included."""
        scheme = self.scheme
        return scheme.encoding.is_trivial and scheme.embedding is scheme.bias is scheme.decay is None and not scheme.phases


def page() -> str:
    """The whole page."""
    schemes = [_measure(name) for name in CATALOG]
    sections = (
        INTRODUCTION,
        *_section("Families", _families(schemes)),
        *_section("Definitions", _definitions(schemes)),
        *_section("Supported attention", _uses(schemes)),
        *_section("Measured laws", _laws(schemes)),
        *_section("Defaults and options", _options(schemes)),
        *_section("Differences from the authors' code", _code()),
        *_section("Encodings that do not fit", [ABSENT.rstrip()]),
        *_section("Every exactly relative score of a line", [COMPLETE.rstrip()]),
        *_section("The nine criteria", _criteria(schemes)),
    )
    return "\n".join(sections)


def _section(title: str, lines: Iterable[str]) -> tuple[str, str]:
    return f"## {title}\n", "\n".join(lines) + "\n"


def _measure(name: str) -> _Measured:
    scheme = REGISTRY[name](HEAD_DIM, HEADS)
    report = laws.check(scheme)
    fill_zeros(scheme)
    directional = any(panel.directional for panel in panels(scheme, reach=8))
    return _Measured(name, CATALOG[name], REGISTRY[name](HEAD_DIM, HEADS), report, directional)


def _families(schemes: list[_Measured]) -> Iterator[str]:
    rows = []
    for module, group in itertools.groupby(schemes, lambda s: REGISTRY[s.name].__module__):
        members = list(group)
        family = (importlib.import_module(module).__doc__ or "").strip().removesuffix(".")
        nouns = dict.fromkeys(s.scheme.group.noun for s in members)
        rows.append((family, ", ".join(f"`{s.name}`" for s in members), ", ".join(nouns)))
    yield markdown(("family", "schemes", "positions"), rows)


def _definitions(schemes: list[_Measured]) -> Iterator[str]:
    yield DEFINITIONS
    rows = (
        (f"`{s.name}`", s.entry.summary, f"`{s.entry.equation}`", s.scheme.group.noun, s.entry.citation) for s in schemes
    )
    yield markdown(("name", "description", "score", "positions", "source"), rows)


def _uses(schemes: list[_Measured]) -> Iterator[str]:
    yield USES
    notes = _Notes()
    rows = [_use(s, notes) for s in schemes]
    yield markdown(("name", "linear", "softmax", "causal", "bidirectional", "cross", "streaming", "positive"), rows)
    yield from ("", *notes)


def _use(measured: _Measured, notes: _Notes) -> tuple[str, ...]:
    built: dict[str, Scheme] = {}
    cells = []
    for attention in ("linear", "softmax"):
        try:
            built[attention] = REGISTRY[measured.name](HEAD_DIM, HEADS, attention=attention)
            cells.append("yes")
        except ValueError as error:
            cells.append("no" + notes(f"{error}".replace(measured.name, "it")))
    group = measured.scheme.group
    x, y = group.arrange(12), group.arrange(8)
    for causal, key in ((True, x), (False, x), (False, y)):
        cells.append(_tried(built, lambda scheme, c=causal, k=key: _attend(scheme, x, k, c), notes))
    streams = (_stream(scheme) for scheme in built.values())
    nodes = notes("and all nodes so far, whose operators are computed again") if group.refers_to_rows else ""
    cells.append(" / ".join(streams) + nodes)
    if measured.scheme.encoding.is_causal:
        cells[3] += notes("it runs, but weights grow with the distance of later keys: made for causal attention")
    positive = [finding for finding in measured.report.findings if finding.name == "positive"]
    return (f"`{measured.name}`", *cells, ("yes" if positive[0].holds else "no") if positive else "-")


def _tried(built: dict[str, Scheme], run: Callable[[Scheme], object], notes: _Notes) -> str:
    failed = {}
    for attention, scheme in built.items():
        try:
            run(scheme)
        except ValueError as error:
            failed[attention] = notes(f"{attention}: {error}")
    if not failed:
        return "yes"
    works = [f"{attention} only" for attention in built if attention not in failed] or ["no"]
    return " ".join(works) + ",".join(failed.values())


def _attend(scheme: Scheme, x: Tensor, y: Tensor, causal: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    features = scheme.encoding.features
    q, k = (torch.randn(1, scheme.heads, len(z), features, generator=generator) for z in (x, y))
    for z in (x, y) if scheme.embedding is not None else ():
        scheme.embedding(z)  # pyright: ignore[reportOptionalCall]
    attend = linear_attention if scheme.attention == "linear" else softmax_attention
    v = k[..., : features // scheme.width]
    return attend(q, k, v, causal=causal, **scheme.at(x, None if y is x else y))


def _stream(scheme: Scheme) -> str:
    """The kind of state of a stream, without positions, by its growth from the 20th to the 40th token."""
    group, state, sizes = scheme.group, State(), []
    x = group.origin(40) if group.refers_to_rows else group.arrange(40)
    features = scheme.encoding.features
    attend = linear_attention if scheme.attention == "linear" else softmax_attention
    for token in x.split(20):
        q = torch.ones(1, scheme.heads, len(token), features)
        at = scheme.at(token, state=state)
        _, state = attend(q, q, q[..., : features // scheme.width], causal=True, return_state=True, **at)
        sizes.append(sum(tensor.nbytes for name, tensor in state.tensors.items() if name != "positions"))
    return "constant state" if sizes[0] == sizes[1] else "growing cache"


def _laws(schemes: list[_Measured]) -> Iterator[str]:
    names = dict.fromkeys(f.name for s in schemes for f in s.report.findings if f.is_law)
    every = [name for name in names if name != STEPS]
    yield LAWS.format(every=", ".join(every), steps=STEPS, head_dim=HEAD_DIM, heads=HEADS)
    rows = []
    for s in schemes:
        holds = [f.name for f in s.report.findings if f.is_law and f.holds]
        others = [name for name in every if name not in holds]
        text = "all" if not others else f"all but {', '.join(others)}" if len(others) < 4 else ", ".join(holds)
        text += f", and {STEPS}" if STEPS in holds else ""
        periodic = [f for f in s.report.findings if f.name == "periodic" and f.holds]
        repeats = f"{periodic[0].figure:,.0f}" if periodic else "-"
        direction = (
            "-" if s.position_free else "causal" if s.scheme.phases else "directional" if s.directional else "symmetric"
        )
        rows.append((f"`{s.name}`", direction, repeats, text, ", ".join(s.report.broken) or "none"))
    yield markdown(("name", "direction", "repeats", "laws that hold", "laws broken"), rows)


def _options(schemes: list[_Measured]) -> Iterator[str]:
    yield OPTIONS.format(choices=", ".join(f"`{name}`" for name in Choices.__annotations__))
    rows = []
    for s in schemes:
        choices = s.scheme.choices
        linear = choices["attention"] == "linear"
        parameters = inspect.signature(REGISTRY[s.name]).parameters.values()
        options = ", ".join(f"`{p.name}={_plain(p.default)}`" for p in parameters if p.kind is p.KEYWORD_ONLY) or "-"
        map_and_sum = (choices["feature_map"], choices["denominator"]) if linear else ("-", "-")
        rows.append((f"`{s.name}`", choices["attention"], *map_and_sum, choices["decay"], options))
    yield markdown(("name", "attention", "feature map", "denominator", "decay", "further options"), rows)


def _code() -> Iterator[str]:
    yield CODE
    rows = ((f"`{name}`", AUTHORS[name].where, AUTHORS[name].summary) for name in CATALOG)
    yield markdown(("name", "code", "differs from the authors' code in"), rows)


def _plain(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return f"{value}".lower()
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _criteria(schemes: list[_Measured]) -> Iterator[str]:
    yield CRITERIA.format(far=FAR)
    notes = _Notes()
    first = (
        (f"`{s.name}`", _injection(s), _recurrence(s), _reference(s), _learned(s), _unbounded(s, notes)) for s in schemes
    )
    yield markdown(("name", "injection", "recurrence", "reference point", "learnability", "unboundedness"), first)
    yield from ("", *notes, "")
    bits = _performance()
    yield MORE_CRITERIA
    rows = (
        (
            f"`{s.name}`",
            bits.get(s.name, "not measured"),
            s.entry.cost,
            "-" if s.position_free else "varies" if s.entry.content else "static",
            s.entry.extends,
        )
        for s in schemes
    )
    yield markdown(("name", "performance", "cost", "content-dependence", "extensibility"), rows)


def _injection(measured: _Measured) -> str:
    scheme = measured.scheme
    slots = {
        "embeddings": scheme.embedding is not None,
        "queries and keys": not scheme.encoding.is_trivial or scheme.turn is not None,
        "scores": scheme.bias is not None,
        "values": any(term.side == "value" for term in scheme.at(scheme.group.arrange(8)).get("terms", ())),
        "weights": not scheme.decay is scheme.forget is None,
    }
    return ", ".join(itertools.compress(slots, slots.values())) or "-"


def _recurrence(measured: _Measured) -> str:
    return "-" if measured.position_free else "once" if measured.scheme.embedding is not None else "every layer"


def _reference(measured: _Measured) -> str:
    if measured.position_free:
        return "-"
    scheme = measured.scheme
    if "attention" not in measured.report.broken:
        return "the tokens between" if scheme.phases else "relative"
    return scheme.encoding.weaker_law or (scheme.bias and scheme.bias.weaker_law) or "the origin"


def _learned(measured: _Measured) -> str:
    count = sum(parameter.numel() for parameter in REGISTRY[measured.name](64, 8).parameters())
    return f"{count:,}: {measured.entry.learns}" if count else measured.entry.learns


def _unbounded(measured: _Measured, notes: _Notes) -> str:
    scheme, far = measured.scheme, _far(measured.scheme.group)
    try:
        scheme.at(far)
        if scheme.embedding is not None:
            scheme.embedding(far)
    except ValueError as error:
        return "no" + notes(str(error))
    return "-" if measured.position_free else "yes"


def _far(group: Group) -> Tensor:
    if isinstance(group, Product):
        return torch.cat([_far(part) for part in group.parts], -1)
    if isinstance(group, Projective):  # at this distance from the world's origin
        return group.origin(1000) + FAR * torch.eye(16)[3]
    return tree(list(range(-1, 999))) if isinstance(group, Tree) else torch.full((1000, 1), FAR)


def _performance() -> dict[str, str]:
    """Bits per byte of each scheme in docs/laboratory.md, in the table of the default run."""
    table = next((table for table in tables(ROOT / "docs" / "laboratory.md") if table[0][0] == "scheme"), None)
    if table is None:
        raise ValueError("docs/laboratory.md: expected the table of the default run, got none")
    titles, *rows = table
    return {row[0]: row[titles.index("bits/byte")] for row in rows}
