"""Test that compiled code runs the C kernel of linear attention as two operators, with the bits of eager mode."""

from typing import Any

import pytest
import torch
from cases import linear_options, with_gradients
from operated import compiled, exported_operations, with_learned_table
from torch._dynamo.testing import CompileCounterWithBackend

from isopos import linear_attention
from isopos.attention import plans
from isopos.ops import library
from isopos.ops.linear import Clamped, cpu, graph
from isopos.ops.linear.autograd import operands
from isopos.ops.linear.operators import described, problem

pytestmark = pytest.mark.skipif(not library.libraries()[0], reason=f"no library is installed: {library.libraries()[1]}")
T, D, E = 70, 16, 12  # two chunks; widths that are no whole vectors of every library
CASES = (  # one of each kind of map, denominator, decay and direction
    "rope", "masked", "packed", "encoded", "identity", "no denominator", "permuteformer", "lrpe-unitary", "cosformer",
    "decays of queries and keys", "bidirectional with a decay", "bidirectional, masked", "all keys, rope",
    "all keys, encoded",
)  # fmt: skip


@pytest.fixture(autouse=True)
def passes(monkeypatch):
    """Passes of the kernel as an operator; fails if sums alone are opaque, as where compiled code makes features."""
    monkeypatch.setattr(graph, "_linear_sum", None)
    monkeypatch.setattr(plans, "_PLANS", {})
    found = []
    for name in ("packed", "backward"):
        run = getattr(cpu.Cpu, name)
        monkeypatch.setattr(cpu.Cpu, name, lambda *given, run=run, name=name: found.append(name) or run(*given))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


def problem_of(monkeypatch: pytest.MonkeyPatch, *inputs: torch.Tensor, **given: Any) -> Any:
    """The problem that the kernel serves for these arguments."""
    seen, serves = [], cpu.Cpu.serves
    monkeypatch.setattr(cpu.Cpu, "serves", lambda self, sums: seen.append(sums) or serves(self, sums))
    linear_attention(*inputs, **given)
    return seen[0]


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_compiled_code_has_the_bits_of_eager_mode(passes, name):
    given = linear_options(name, 2, 2, T, D)
    *inputs, grad = drawn((2, 2, T, D), (2, 2, T, D), (2, 2, T, E), (2, 2, T, E))
    found = with_gradients(inputs, torch.float32, given, grad, compiled())
    assert passes == ["packed", "backward"]  # states of the first are saved
    assert all(map(torch.equal, found, with_gradients(inputs, torch.float32, given, grad)))


def test_inductor_and_half_precision(passes):
    """Narrow inputs are read by the kernel, too."""
    given = linear_options("rope", 1, 2, T, D)
    *inputs, grad = drawn(*[(1, 2, T, D)] * 4)
    for dtype in (torch.float32, torch.bfloat16):
        found, eager = (
            with_gradients(inputs, dtype, given, grad, run) for run in (compiled(backend="inductor"), linear_attention)
        )
        assert all(map(torch.equal, found, eager))
    assert passes[:2] == ["packed", "backward"]


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_that_learn_or_are_shared_have_gradients(shared):
    """One tensor is queries and keys, and one table serves both, and every sample."""
    *inputs, grad = drawn(*[(2, 2, T, D)] * 4)
    found = with_learned_table(lambda attend: compiled(attend=attend), torch.float32, inputs, grad, shared)
    exact = with_learned_table(lambda attend: attend, torch.float64, inputs, grad, shared)
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=0, atol=1e-5 * float(y.abs().max()))


def test_lengths_compile_twice_at_most(passes):
    """Also of several saved states, whose gradients are compiled, too. Denominators are counted once."""
    counter = CompileCounterWithBackend("aot_eager")
    attend = compiled(backend=counter)
    for t in (T, 33, 5, 600):
        q, k, v = (x.requires_grad_() for x in drawn(*[(1, 1, t, D)] * 3))
        given = {"decay": -torch.arange(t, dtype=torch.float64)[None] / 9, "causal": True}
        with Clamped() as clamped:
            out = attend(q, k, v, **given)
            out.sum().backward()
        assert clamped.total == t
        assert torch.equal(out, linear_attention(q, k, v, **given))
    assert counter.frame_count <= 2
    assert passes.count("packed") == 4


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("t", [T, 600])
@pytest.mark.parametrize(
    "name", ["rope", "encoded", "cosformer", "identity", "bidirectional with a decay", "all keys, rope"]
)
def test_shapes_are_known_ahead(monkeypatch, name, t, learns):
    """The fake operator returns tensors of the shapes, strides and dtypes of the operator."""
    inputs = (x.requires_grad_(learns) for x in drawn(*[(1, 2, t, D)] * 3))
    given = "cpu", *described(problem_of(monkeypatch, *inputs, **linear_options(name, 1, 2, t, D)))
    torch.library.opcheck(torch.ops.isopos.kernel_forward, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["rope", "cosformer", "permuteformer", "lrpe-unitary"])
def test_maps_of_kinds_equal_the_maps_that_they_describe(monkeypatch, name):
    sums = problem_of(monkeypatch, *drawn(*[(1, 2, T, D)] * 3), **linear_options(name, 1, 2, T, D))
    made = problem(*described(sums)[:3])
    for x, features, again in zip(sums.inputs, sums.features, made.features, strict=True):
        assert all(map(torch.equal, features(x), again(x)))
        if features.map is not None:
            assert type(again.map) is not type(features.map)
            y = features.map.apply(x)
            assert torch.equal(features.map.adjoint(y), again.map.adjoint(y))
    assert len(operands(made)) == len(operands(sums))


def test_groups_of_the_library_have_as_many_tokens():
    (lib, *_) = library.libraries()[0].values()
    for t in (1, cpu.TOKENS, cpu.TOKENS + 1, 10 * cpu.TOKENS - 1):
        assert lib.isopos_groups(t) == -(-t // cpu.TOKENS)


def test_code_that_is_compiled_without_the_library_has_operations_of_pytorch(monkeypatch, passes):
    monkeypatch.undo()
    given, inputs = linear_options("rope", 1, 2, T, D), drawn(*[(1, 2, T, D)] * 3)
    expected = linear_attention(*inputs, **given)
    monkeypatch.setattr(library, "libraries", lambda: ({}, "none"))
    torch.testing.assert_close(compiled()(*inputs, **given), expected)
    assert not passes


def test_exports_have_operations_of_pytorch_alone(monkeypatch):
    monkeypatch.undo()
    assert not any("kernel_forward" in name for name in exported_operations(drawn(*[(1, 1, T, D)] * 3)))
