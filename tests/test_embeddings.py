"""Test absolute embeddings, the baselines."""

import copy
import math

import pytest
import torch
from cases import close, each, perturb

from isopos.embeddings import Learned, Sinusoidal, TreeStack
from isopos.positions import Tree, sequence, tree


def test_sinusoids_by_hand():
    p = Sinusoidal(6)(torch.tensor([[[0], [3]], [[-2], [100]]]), torch.float64)
    for (b, t), x in {(0, 0): 0, (0, 1): 3, (1, 0): -2, (1, 1): 100}.items():
        row = [f(x / 10000 ** (2 * i / 6)) for i in range(3) for f in (math.sin, math.cos)]
        close(p[b, t], torch.tensor(row, dtype=torch.float64))


def test_sinusoids_scale():
    x = sequence(9)
    close(Sinusoidal(6, scale=0.3)(x, torch.float64), 0.3 * Sinusoidal(6)(x, torch.float64))


def test_sinusoids_are_exact_in_float32_and_distinct_in_bfloat16_models():
    p = Sinusoidal(64).bfloat16()(sequence(4096))
    assert p.dtype == torch.float32
    close(p, Sinusoidal(64)(sequence(4096), torch.float64), dtype=torch.float32, roundings=2)
    assert len(p.unique(dim=0)) == 4096
    assert not list(Sinusoidal(64).state_dict())


def test_learned_rows_round_trip():
    table, x = Learned(10, 4, seed=1), torch.tensor([[[9], [0]], [[3], [3]]])
    assert torch.equal(table(x), table.weight[x[..., 0]])
    assert table(x, torch.float64).dtype == torch.float64
    assert torch.equal(Learned(10, 4, seed=1).weight, table.weight)
    assert not torch.equal(Learned(10, 4, seed=2).weight, table.weight)
    initial = copy.deepcopy(table.state_dict())
    table.weight.data.zero_()
    table.to("meta").to_empty(device="cpu").reset_parameters()
    assert torch.equal(table.weight, initial["weight"])
    table(x).sum().backward()
    assert set(table.weight.grad.sum(1).nonzero().flatten().tolist()) == {0, 3, 9}


@each(("branches", "width", "depth"), [(2, 8, 4), (2, 13, 2), (3, 20, 3), (1, 4, 1)])
def test_tree_stacks_by_hand(branches, width, depth):
    """Copies of the last branches, nearest first, times p^i sqrt(width / 2 copies (1 - p^2)); the rest is zero."""
    x = Tree(branches).random(2, 9)
    embedding = perturb(TreeStack(branches, width, depth))
    found, p = embedding(x, torch.float64), embedding.decay.tanh()
    expected = torch.zeros(2, 9, width, dtype=torch.float64)
    for b, nodes in enumerate(x.tolist()):
        for n, (parent, branch) in enumerate(nodes):
            for step in range(depth):
                if parent < 0:
                    break
                for copy_, power in enumerate(p):
                    place = copy_ * branches * depth + step * branches + branch
                    expected[b, n, place] = power**step * (width / 2 / len(p) * (1 - power**2)) ** 0.5
                parent, branch = nodes[parent]
    close(found, expected)
    assert (found[x[..., 0] < 0] == 0).all(), "roots"


def test_tree_stacks_have_a_norm_and_forget_what_is_deeper():
    chain, stack = tree([-1, *range(300)]), TreeStack(1, 64, 64)
    norms = stack(chain, torch.float64).norm(dim=-1).detach()
    assert norms[-1] == pytest.approx(32**0.5, rel=0.1)
    close(norms[100:], norms[-1].expand(201))


def test_tree_stacks_learn_and_stay_exact():
    stack, x = TreeStack(2, 16, 2), Tree(2).random(9)
    before = stack(x)
    assert torch.equal(stack.bfloat16()(x), before)
    stack(x).sum().backward()
    assert (stack.decay.grad != 0).all()
    assert len(stack.decay) == 4


@each(
    ("call", "message"),
    [
        (lambda: TreeStack(2, 8, 0), "depth: expected 1 to 4 of 2 branches in width 8, got 0"),
        (lambda: TreeStack(2, 8, 5), "depth: expected 1 to 4 of 2 branches in width 8, got 5"),
        (lambda: TreeStack(0, 8, 2), "branches: expected an integer of at least 1, got 0"),
        (lambda: TreeStack(2, 8, 2)(tree([-1, 0, 0, 0])), "expected branches from 0 to 1"),
        (lambda: TreeStack(2, 8, 2)(sequence(3)), r"positions: expected \[\*b t 2\]"),
        (lambda: Sinusoidal(5), "model_dim: expected an even width"),
        (lambda: Sinusoidal(4)(torch.zeros(3, 2)), r"expected \[\*b t 1\]"),
        (lambda: Sinusoidal(4)(torch.zeros(3, 1).half()), "torch.float16"),
        (lambda: Learned(0, 4), "length: expected an integer of at least 1"),
        (lambda: Learned(4, 4)(sequence(5)), "expected 0 to 3, which have learned vectors, got 0 to 4"),
        (lambda: Learned(4, 4)(sequence(3) - 1), "got -1 to 1"),
        (lambda: Learned(4, 4)(torch.zeros(3, 1)), "expected integers"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_positions_without_a_vector_are_errors_in_compiled_code_too():
    learned = torch.compile(Learned(10, 4), backend="aot_eager", fullgraph=True)
    assert learned(torch.tensor([[3]])).shape == (1, 4)
    for row in (-1, 10):
        with pytest.raises((IndexError, RuntimeError)):
            learned(torch.tensor([[row]]))


def test_learned_vectors_are_mapped_over_samples():
    learned, x = Learned(10, 4), torch.tensor([[[1], [2]], [[3], [4]]])
    assert torch.equal(torch.func.vmap(learned)(x), learned(x))
