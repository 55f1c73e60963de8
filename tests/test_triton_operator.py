"""Test that compiled code runs the Triton kernels of linear attention, as two operators: numbers, gradients, lengths."""

import pytest
import torch
from cases import linear_options, with_gradients
from operated import compiled, exported_operations, with_learned_table
from test_triton_linear import by_definition, drawn, near

from isopos import linear_attention
from isopos.ops import gpu, triton_plan
from isopos.ops.linear import Clamped, graph, triton
from isopos.ops.linear.operators import described, problem

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not gpu.interpreted(), reason="TRITON_INTERPRET=1 is not set; tests/test_gpu.py asks a GPU"),
]
T, D, E = 20, 8, 12  # two chunks, in two segments


@pytest.fixture(autouse=True)
def passes(monkeypatch):
    """Split scans into segments of one chunk; returns the passes of the kernels, and fails if another kernel is opaque."""
    monkeypatch.setattr(triton, "LEAST", 1)
    monkeypatch.setattr(triton_plan, "PLANS", {})
    monkeypatch.setattr(graph, "_linear_sum", None)
    found = []
    for name in ("_forward", "_backward"):
        run = getattr(triton.Triton, name)
        monkeypatch.setattr(triton.Triton, name, lambda *given, run=run, name=name: found.append(name) or run(*given))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


CASES = {  # and a backend
    "rope": "inductor",
    "masked": "aot_eager",
    "packed": "aot_eager",
    "decays of queries and keys": "aot_eager",
    "bidirectional with a decay": "aot_eager",
    "identity": "aot_eager",
    "permuteformer": "aot_eager",
    "all keys, lrpe-unitary": "aot_eager",
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_definition(passes, name):
    t = 40 if name == "packed" else T  # which has a segment of 37 tokens
    given = linear_options(name, 1, 1, t, D)
    *inputs, grad = drawn((1, 1, t, D), (1, 1, t, D), (1, 1, t, E), (1, 1, t, E))
    found = with_gradients(inputs, torch.float32, given, grad, compiled(CASES[name]))
    near(found, by_definition(inputs, given, grad))
    assert passes == ["_forward", "_backward"]  # states of the first are saved


def test_bfloat16_has_the_numbers_of_eager_mode():
    """The encoded denominator saves the digits that outputs lack."""
    given = linear_options("encoded", 1, 1, T, D)
    *inputs, grad = drawn(*[(1, 1, T, D)] * 4, dtype=torch.bfloat16)
    found, eager = (with_gradients(inputs, torch.bfloat16, given, grad, run) for run in (compiled(), linear_attention))
    assert all(map(torch.equal, found, eager))


def test_tensors_that_learn_or_are_shared_have_gradients():
    """One tensor is queries and keys, and one table serves both, and every sample."""
    x, v, grad = drawn((2, 1, T, D), (2, 1, T, D), (2, 1, T, D))
    found = with_learned_table(lambda attend: compiled(attend=attend), torch.float32, (x, x, v), grad, True)
    near(found, with_learned_table(lambda attend: attend, torch.float64, (x, x, v), grad, True))


def test_lengths_compile_twice_at_most(passes):
    """Also with one segment, and with many. Denominators are counted."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    attend = compiled(backend)
    for t in (20, 33, 5, 70):
        q, k, v = drawn(*[(1, 1, t, D)] * 3)
        given = {"decay": -torch.arange(t, dtype=torch.float64)[None] / 9, "causal": True}
        with torch.no_grad(), Clamped() as clamped:
            out = attend(q, k, v, **given)
        assert clamped.total == t
        near([out], [linear_attention(*(x.double() for x in (q, k, v)), **given)])
    assert len(graphs) <= 2
    assert passes == ["_forward"] * 4


def test_inductor_compiles_all_lengths_once(passes):
    """With gradients; one segment, and several."""
    attend = torch.compile(linear_attention, fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for t in (20, 5, 70):
        given = {"decay": -torch.arange(t, dtype=torch.float64)[None] / 9, "causal": True}
        *inputs, grad = drawn(*[(1, 1, t, D)] * 4)
        near(with_gradients(inputs, torch.float32, given, grad, attend), by_definition(inputs, given, grad))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert passes == ["_forward", "_backward"] * 3


@pytest.mark.parametrize(
    ("name", "t", "learns"),
    [
        ("masked", 5, True),
        ("masked", T, False),
        ("encoded", T, True),
        ("packed", T, True),
        ("bidirectional with a decay", T, True),
        ("all keys, rope", 5, True),
    ],
)
def test_shapes_are_known_ahead(monkeypatch, name, t, learns):
    """The fake operator returns tensors of the shapes, strides and dtypes of the operator."""
    sums = []
    monkeypatch.setattr(triton.Triton, "run", lambda self, given: sums.append(given) or (given.v, ()))
    q, k, v = (x.bfloat16().requires_grad_(learns) for x in drawn(*[(1, 1, t, D)] * 3))
    linear_attention(q, k, v, **linear_options(name, 1, 1, t, D))
    given = "triton", *described(sums[0])
    made = problem(*given[1:4])
    assert (made.denominator, made.segmented) == ("divide", name == "packed")
    torch.library.opcheck(torch.ops.isopos.kernel_forward, given, test_utils=("test_schema", "test_faketensor"))


def test_exports_have_operations_of_pytorch_alone(monkeypatch):
    monkeypatch.undo()
    assert not any("kernel_forward" in name for name in exported_operations(drawn(*[(1, 1, T, D)] * 3)))
