"""Test that attention compiles into one graph, equals eager mode, and does not recompile for each length."""

import functools
import sys

import pytest
import torch
from cases import ATTENTION, HEADS, PRESETS, close, inputs, ordered, perturb, scheme_case
from structures import covering
from torch import nn

from isopos import schemes
from isopos.exact import is_exporting
from isopos.models import Decoder
from isopos.ops.linear import graph
from isopos.positions import Line, sequence


class Attend(nn.Module):
    """A scheme and its attention, with `causal` or without or both, evaluated from positions."""

    def __init__(self, case, kind=None, ways=(True,), **more):
        super().__init__()
        self.kind, self.ways = kind or case.kinds[0], ways
        self.scheme = perturb(case.build(attention=self.kind, **more)).float()

    def forward(self, q, k, v, x, mask=None):
        if self.scheme.embedding is not None:
            v = v + self.scheme.embedding(x)[..., :1].unsqueeze(-3)
        attend = functools.partial(ATTENTION[self.kind], q, k, v, **self.scheme.at(x), mask=mask)
        return torch.cat([attend(causal=causal) for causal in self.ways], -1)

    def inputs(self, t, **more):
        """Queries, keys and values, and positions of t tokens."""
        x = sequence(t) if isinstance(self.scheme.group, Line) else ordered(self.scheme.group, t=t)
        return *inputs(2, t=t, d=self.scheme.encoding.features, dtype=torch.float32, **more), x


class Counter:
    """A backend that counts the graphs it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compare(module, compiled, t=70, mask=None, roundings=2048):
    """Outputs and gradients of inputs and parameters; eager and compiled order sums differently."""
    *leaves, x = module.inputs(t, requires_grad=True)
    learned = list(module.parameters())
    results = []
    for f in (module, compiled):
        out = f(*leaves, x, mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *learned], allow_unused=True)])
    for eager, fast in zip(*results, strict=True):
        assert (eager is None) == (fast is None)
        if eager is not None:
            close(fast, eager, roundings=roundings)


# Each structure without the isometry is compiled with and without `causal`, and each isometry and class of encodings once.
# Fast tests compile the first of these, which are compiled at several lengths, too.
SUMMED = ("rope", "permuteformer", "ape-tree", "horn-clipped", "t5", "cosformer", "spe-sine")
FIRST = {case.name: case for case in PRESETS}


def rows():
    """Rows of `case, kind, ways`, and whether a row runs only in slow tests."""
    first = [(FIRST[name], FIRST[name].kinds[0], (True,)) for name in SUMMED[:5]]
    others, more = covering()
    every = [(*row, row[0].ways) for row in others] + [(*row, (True,)) for row in more]
    yield from ((*row, False) for row in first)
    yield from ((*row, True) for row in every if row not in first)


def parametrized(chosen):
    """Parameters of a test from cases, each with a kind, ways and whether it is slow."""
    return pytest.mark.parametrize(
        ("case", "kind", "ways"),
        [
            pytest.param(
                case,
                kind,
                ways,
                id="-".join((case.id, kind, *("both-ways",) * (False in ways))),
                marks=[pytest.mark.slow] * slow,
            )
            for case, kind, ways, slow in chosen
        ],
    )


@parametrized(rows())
def test_one_graph_equals_eager(case, kind, ways):
    module = Attend(case, kind, ways)
    vanishing = case.id == "permuteformer-orthogonal"  # whose denominators change sign: gradients are as large as 1e11
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compare(module, compiled, mask=torch.rand(2, 70) < 0.7, roundings=16384 if vanishing else 2048)


def lengths_share_graphs(module, marked=False, **options):
    """The first length has a graph and all others another one; if lengths are marked as dynamic, all have one."""
    counter = Counter()
    compiled = torch.compile(module, fullgraph=True, backend=counter, **options)
    for t in (3, 64, 65, 130):
        *qkv, x = arguments = module.inputs(t)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
            for tensor in qkv:
                torch._dynamo.mark_dynamic(tensor, 2)
        close(compiled(*arguments), module(*arguments))
    assert counter.graphs <= (1 if marked else 2)


def with_decay(case, kind, ways):
    """A scheme with its attention, and with a decay unless it has none or one of its own."""
    decays = case.decays(kind) and case.name != "fox"
    return Attend(case, kind, ways, **({"decay": "retnet"} if decays else {}))


@parametrized((FIRST[name], kind, FIRST[name].ways, True) for name in SUMMED for kind in FIRST[name].kinds)
def test_lengths_share_graphs(case, kind, ways):
    lengths_share_graphs(with_decay(case, kind, ways))


def of_lengths():
    """Presets in their first kind, in which everything occurs once."""
    others, more = covering(lambda case, kind: case in PRESETS and kind == case.kinds[0])
    yield from ((*row, (True,), row[0].name not in SUMMED[:1]) for row in [*others, *more])


@parametrized(of_lengths())
def test_marked_lengths_share_a_graph(case, kind, ways):
    lengths_share_graphs(with_decay(case, kind, ways), marked=True)


def test_lengths_share_graphs_when_every_size_is_dynamic():
    lengths_share_graphs(Attend(scheme_case("rope-learned"), decay="retnet"), dynamic=True)


def test_a_model_compiles_once_for_all_lengths():
    model, counter = Decoder(11, 16, 1, scheme_case("rope-decay").build()), Counter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for t in (9, 33, 130):
        x = torch.randint(11, (2, t))
        close(compiled(x), model(x))
    assert counter.graphs <= 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decayed", [True, False])
def test_the_custom_op_is_registered_right(decayed, causal):
    leaves = inputs(1, t=5, d=3, e=2, requires_grad=True)
    g = -torch.rand(1, HEADS, 5, dtype=torch.float64).cumsum(-1) if decayed else None
    torch.library.opcheck(graph._linear_sum, (*leaves, g, g, causal))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("rope-decay", "linear"), ("rope-decay", "softmax"), ("lrpe-orthogonal-learned", "linear")]
)
def test_inductor(name, kind):
    module = Attend(scheme_case(name), kind)
    compare(module, torch.compile(module, fullgraph=True))


# Other ways into a graph


def small(kind, **options):
    choices = {name: options.pop(name) for name in ("decay",) if name in options}
    return Decoder(50, 32, 2, schemes.rope(8, 4, attention=kind, **choices), **options).eval()


MODELS = [("linear", {}), ("linear", {"decay": "retnet"}), ("softmax", {}), ("softmax", {"window": 4})]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "strict"), [*((*row, False) for row in MODELS), (*MODELS[1], True), (*MODELS[3], True)], ids=str
)
def test_a_model_is_exported_with_a_dynamic_length(kind, options, strict):
    model, tokens = small(kind, **options), torch.randint(50, (2, 12))
    length = torch.export.Dim("t", min=2 + options.get("window", 0), max=512)
    program = torch.export.export(model, (tokens,), dynamic_shapes=({1: length},), strict=strict).module()
    for t in (6, 12, 70, 200):
        tokens = torch.randint(50, (2, t))
        close(program(tokens), model(tokens), roundings=64)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit is not of this Python")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("kind", "options"), [*MODELS, ("linear", {"window": 4})], ids=str)
def test_a_traced_model_takes_other_lengths(kind, options):
    model = small(kind, **options)
    traced = torch.jit.trace(model, torch.randint(50, (2, 12)), check_trace=False)
    for t in (6, 12, 70, 200):
        tokens = torch.randint(50, (2, t))
        close(traced(tokens), model(tokens), roundings=64)


def test_compiled_code_is_no_export():
    assert torch.compile(lambda x: x + is_exporting(), backend="eager", fullgraph=True)(torch.zeros(1)).item() == 0
