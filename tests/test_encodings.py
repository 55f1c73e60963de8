"""Test the encodings of the table, and what each class takes and computes.

test_laws.py tests their laws, test_canonical.py their scores, test_schemes.py copies, casts and devices, over the same rows.
"""

import math

import pytest
import torch
from cases import (
    ALL_BASES,
    ENCODINGS,
    HEAD_DIM,
    HEADS,
    close,
    each,
    generator,
    grouped,
    ids,
    inputs,
    normals,
    permutations,
    perturb,
    tree_generator,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from isopos import bases, couplings, encodings, generators, schemes
from isopos.attention import linear_attention
from isopos.encodings import (
    Coupling,
    DirectSum,
    Encoding,
    Exponential,
    InBasis,
    Partial,
    Permutation,
    Rotary,
    TreePath,
    long_orders,
    rope_frequencies,
)
from isopos.positions import Line, Product, Ring, Tree, grid, sequence, tree

every = grouped([(type(case.make()).__name__, case.id, {"case": case}) for case in ENCODINGS])
learned = grouped([(type(case.make()).__name__, case.id, {"case": case}) for case in ENCODINGS if case.learned])
T = 9


def operators(encoding, x):
    """The matrix of each head and each token, ``[*b h t d' d]``, from its columns."""
    unit, rho = torch.eye(encoding.features, dtype=torch.float64), encoding(x, torch.float64)
    return torch.stack([rho(row.expand(*x.shape[:-2], HEADS, x.shape[-2], -1)) for row in unit], -1)


def scores(encoding, x, y, q, k):
    """<rho(x) q, rho(y) k> token by token, of the last ones."""
    rho_x, rho_y = encoding(x, torch.float64), encoding(y, torch.float64)
    return (rho_x.last(q.shape[-2])(q) * rho_y.last(k.shape[-2])(k)).sum(-1)


def test_every_class_has_a_row():
    values = [getattr(module, name) for module in (encodings, generators) for name in module.__all__]
    classes = {value for value in values if isinstance(value, type)}
    assert {type(case.make()) for case in ENCODINGS} == classes - {Coupling, Encoding}
    assert {type(make()) for make in ALL_BASES.values()} == {getattr(bases, name) for name in bases.__all__} - {
        bases.Basis,
        bases.Spectrum,
    }


@every
def test_the_row_tells_what_the_encoding_is(case):
    encoding = case.make()
    assert encoding.group == case.group
    assert encoding.features == HEAD_DIM
    assert bool(list(encoding.parameters())) == case.learned
    assert not list(encoding.buffers())
    rho = encoding(case.group.random(T))
    assert any(tensor.requires_grad for tensor in rho.tensors()) == case.learned
    assert rho(torch.randn(1, HEADS, T, HEAD_DIM)).shape == (1, HEADS, T, encoding.out_features)


@each(
    ("make", "value"),
    [
        (Rotary, rope_frequencies(HEAD_DIM // 2)[None, None]),
        (lambda a: Exponential(a, learned=False), generator()),
        (lambda n: InBasis(Rotary(rope_frequencies(HEAD_DIM // 2)[None, None]), bases.Householder(n)), normals()),
    ],
    ids=["rotary", "exponential", "householder"],
)
def test_what_an_encoding_was_made_of_may_change_afterwards(make, value):
    given, (q, k, _) = value.clone(), inputs(1, t=T)
    encoding = make(given)
    expected = scores(encoding, sequence(T), sequence(T) + 3, q, k)
    given.fill_(5)
    close(scores(encoding, sequence(T), sequence(T) + 3, q, k), expected)


@learned
def test_learned_starts_as_fixed(case):
    encoding, x, y = case.make(), case.group.random(T), case.group.random(T)
    unlearned = next((other for other in ENCODINGS if other.id == case.id.removesuffix("-learned") != case.id), None)
    if unlearned is not None:
        q, k, _ = inputs(1, t=T)
        close(scores(encoding, x, y, q, k), scores(unlearned.make(), x, y, q, k), dtype=torch.float32)


@learned
def test_gradients_of_every_parameter(case):
    encoding = perturb(case.make())
    x, y = (case.group.random(4) % 20 if case.group.is_grid else case.group.random(4) for _ in range(2))
    q, k, _ = inputs(1, t=4)
    names, values = zip(*encoding.named_parameters(), strict=True)

    def score(*values):
        rho_x, rho_y = (
            torch.func.functional_call(encoding, dict(zip(names, values, strict=True)), (at, torch.float64)) for at in (x, y)
        )
        return (rho_x(q) * rho_y(k)).sum(-1)

    assert torch.autograd.gradcheck(score, values, fast_mode=True)
    for grad in torch.autograd.grad(score(*values).sum(), values):
        assert (grad.flatten(1) != 0).any(1).all(), "a head without gradient"


def test_bfloat16_models_still_tell_4096_positions_apart():
    rho = Rotary(rope_frequencies(4)[None, None], learned=True).bfloat16()(sequence(4096))
    assert len(rho.table.unique(dim=1)[0]) == 4096


# Rotations


def test_rotary_by_hand():
    rho = Rotary(torch.tensor([[[0.5, 2.0]], [[0.1, 3.0]]], dtype=torch.float64))(torch.tensor([[-3], [7]]), torch.float64)
    x = torch.randn(1, 2, 2, 4, dtype=torch.float64)
    for head, frequency in enumerate([(0.5, 2.0), (0.1, 3.0)]):
        for token, position in enumerate([-3, 7]):
            for pair, w in enumerate(frequency):
                z = complex(*x[0, head, token, 2 * pair : 2 * pair + 2]) * torch.exp(torch.tensor(1j * w * position)).item()
                close(
                    rho(x)[0, head, token, 2 * pair : 2 * pair + 2],
                    torch.tensor([z.real, z.imag]).double(),
                    dtype=torch.float32,
                )


def test_rope_frequencies_are_geometric():
    close(rope_frequencies(4, 100.0), torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75], dtype=torch.float64))


def test_real_positions_interpolate():
    encoding = Rotary(rope_frequencies(4)[None, None])
    halves = encoding(torch.tensor([[0.5], [1.0]]), torch.float64).table
    close(halves[:, 1], encoding(torch.tensor([[1]]), torch.float64).table[:, 0])
    assert not torch.allclose(halves[:, 0], halves[:, 1])


@each("dtype", [torch.int32, torch.float32, torch.float64])
def test_positions_of_any_dtype_name_the_same_angles(dtype):
    for encoding in (Rotary(rope_frequencies(4)[None, None]), Exponential(generator(), learned=False)):
        pairs = zip(encoding(sequence(100).to(dtype)).tensors(), encoding(sequence(100)).tensors(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@each("case", [case for case in ENCODINGS if any(isinstance(part, Ring) for part in case.group.leaves)], ids=ids)
def test_a_ring_closes(case):
    encoding, x = case.make(), case.group.random(T)
    columns = [part.period if isinstance(part, Ring) else 0 for part in case.group.leaves]
    close(operators(encoding, x + torch.tensor(columns)), operators(encoding, x))
    assert not torch.allclose(operators(encoding, x + torch.tensor(columns) // 2), operators(encoding, x))


def test_the_lift_is_direction_blind_and_rotation_is_not():
    q, _, _ = inputs(1, t=T)
    x, y = sequence(T), sequence(T).flip(0)
    for lift in (True, False):
        encoding = Rotary(rope_frequencies(HEAD_DIM if lift else HEAD_DIM // 2)[None, None], lift=lift)
        k = q.roll(1, -1)
        assert torch.allclose(scores(encoding, x, y, q, k), scores(encoding, y, x, q, k)) == lift


# Permutations


@given(st.data())
def test_powers_of_permutations(data):
    d = data.draw(st.integers(1, 7))
    step = data.draw(st.permutations(range(d)))
    x = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=4))
    encoding = Permutation(torch.tensor([step]))
    (order,) = encoding.orders

    power, powers = list(range(d)), []
    while not powers or power != powers[0]:
        powers.append(power)
        power = [step[i] for i in power]
    assert order == encoding.common_order == len(powers)
    y = encoding(torch.tensor(x)[:, None])(torch.arange(d).double().expand(1, len(x), d))[0]
    assert y.long().tolist() == [powers[n % order] for n in x]


def test_permutations_are_exact_bijections():
    encoding, x = Permutation(permutations(2)), torch.randint(-(10**9), 10**9, (3, T, 2))
    index = encoding(x).index
    assert index.shape == (3, HEADS, T, HEAD_DIM)
    assert torch.equal(index.sort(-1).values, torch.arange(HEAD_DIM).expand_as(index))
    v = torch.randn(3, HEADS, T, HEAD_DIM)
    assert torch.equal(encoding(-x)(encoding(x)(v)), v)


def test_two_axes_multiply():
    maps, x = permutations(2), grid(3, 4) - 1
    both = Permutation(maps)
    one, two = Permutation(maps[:, 0]), Permutation(maps[:, 1])
    v = torch.randn(1, HEADS, len(x), HEAD_DIM)
    assert torch.equal(both(x)(v), two(x[:, 1:])(one(x[:, :1])(v)))


def test_orders_are_reported_by_head():
    encoding = Permutation(torch.tensor([[1, 2, 0, 3, 4], [1, 0, 3, 2, 4]]))
    assert encoding.orders == (3, 2)
    assert encoding.common_order == 6


def test_permutation_keeps_features_positive():
    x = torch.rand(1, HEADS, T, HEAD_DIM)
    assert (Permutation(permutations())(Line().random(T))(x) >= 0).all()


def test_permutations_warn_of_short_orders():
    step = torch.tensor([[1, 2, 0, 4, 3], [1, 0, 2, 3, 4]])
    with pytest.warns(
        UserWarning, match="permutation: 6 positions are distinguished, fewer than the 7 of the longest sequence"
    ):
        Permutation(step, length=7)
    assert Permutation(step, length=6).orders == (6, 2)


def orders_of(count, least=1):
    """Orders of all permutations of `count` features: least common multiples of partitions."""
    yield 1
    for first in range(least, count + 1):
        yield from (math.lcm(first, rest) for rest in orders_of(count - first, first))


@each("features", range(1, 13))
def test_long_orders_are_landaus(features):
    assert Permutation(long_orders(features)).orders == (max(orders_of(features)),)


def test_long_orders_of_64_features_and_of_several_heads():
    assert Permutation(long_orders(64)).common_order == 2042040
    heads = Permutation(long_orders(12, 3))
    assert heads.orders[0] == 60
    assert len(set(heads.orders)) == 3
    assert heads.common_order > 60 * 7


# Trees


def test_tree_path_multiplies_along_the_way_from_the_root():
    encoding = TreePath(tree_generator(), learned=False)
    x = tree("(a (b c d) (e f))")  # words: -, 0, 00, 01, 1, 10
    first, second = torch.matrix_exp(tree_generator() - tree_generator().mT).unbind(1)
    unit = torch.eye(HEAD_DIM, dtype=torch.float64).expand(HEADS, -1, -1)
    words = [unit, first, first @ first, first @ second, second, second @ first]
    close(operators(encoding, x), torch.stack(words, 1))


def test_tree_path_is_computed_in_the_order_of_any_rows():
    encoding, x = TreePath(tree_generator()), Tree(2).random(2, 40)
    order = torch.randperm(40)
    shuffled = x[:, order].clone()
    shuffled[..., 0] = torch.where(shuffled[..., 0] < 0, -1, order.argsort()[shuffled[..., 0]])
    close(operators(encoding, shuffled), operators(encoding, x)[:, :, order])


# Exponentials


def test_exponential_is_matrix_exp():
    encoding, x = Exponential(generator(), learned=False), sequence(6) - 3
    matrix = operators(encoding, x)
    skew = generator() - generator().mT
    for i in range(6):
        for j in range(6):
            close(matrix[:, i].mT @ matrix[:, j], torch.matrix_exp((x[j, 0] - x[i, 0]) * skew))


def test_exponential_chooses_the_phase_of_its_basis():
    basis = Exponential(generator())(sequence(1), torch.float64).first.matrix.unflatten(1, (-1, 2))
    largest = basis.norm(dim=2, keepdim=True).argmax(-1, keepdim=True).expand(-1, -1, 2, -1)
    real, imaginary = basis.gather(-1, largest)[..., 0].unbind(-1)
    assert (real > 0).all()
    close(imaginary, torch.zeros_like(imaginary))


@each("initial", ["random", "rope"])
def test_exponential_gradients_are_finite_far_out(initial):
    rope = torch.diag(rope_frequencies(HEAD_DIM // 2).repeat_interleave(2)[:-1] * torch.tensor([1.0, 0] * 4)[:-1], -1)
    encoding = Exponential(generator() if initial == "random" else rope[None])
    x = sequence(4096) * 100
    q, k, _ = inputs(1, t=4096, dtype=torch.float32)
    (1e3 * (encoding(x)(q) * encoding(x.flip(0))(k)).sum()).backward()
    assert encoding.generator.grad.isfinite().all()


# Sums and parts


def test_direct_sum_acts_side_by_side():
    parts = [Rotary(rope_frequencies(2)[None, None]), Permutation(permutations(1, HEADS, 4))]
    x, (q, *_) = grid(3, 3), inputs(2, t=9)
    both = DirectSum(parts)(x, torch.float64)(q)
    separate = [part(x[:, n : n + 1], torch.float64)(q[..., 4 * n : 4 * n + 4]) for n, part in enumerate(parts)]
    close(both, torch.cat(separate, -1))


def test_shared_sum_gives_all_parts_the_same_coordinates():
    parts = [Rotary(rope_frequencies(2, base)[None, None]) for base in (10.0, 100.0)]
    x, (q, *_) = sequence(9), inputs(2, t=9)
    both = DirectSum(parts, shared=True)(x, torch.float64)(q)
    separate = [part(x, torch.float64)(q[..., 4 * n : 4 * n + 4]) for n, part in enumerate(parts)]
    close(both, torch.cat(separate, -1))


def test_partial_leaves_the_rest_alone():
    (q, *_), x = inputs(1, t=T), Line().random(T)
    part = Rotary(rope_frequencies(2)[None, None])
    y = Partial(part, HEAD_DIM)(x, torch.float64)(q)
    assert torch.equal(y[..., 4:], q[..., 4:])
    close(y[..., :4], part(x, torch.float64)(q[..., :4]))
    close(Partial(part, 4)(x, torch.float64)(q[..., :4]), y[..., :4])


def test_a_basis_of_complex_features_refuses_a_lift_of_real_ones():
    lift = Rotary(encodings.rope_frequencies(16)[None, None], lift=True)
    with pytest.raises(ValueError, match=r"encoding: expected one of pairs, complex features, .* got Rotary with lift=True"):
        encodings.InBasis(lift, bases.Spectrum(8))


def test_in_basis_applies_the_basis_first():
    (q, *_), x = inputs(1, t=T), Line().random(T)
    rotary, basis = Rotary(rope_frequencies(4)[None, None]), bases.Fourier(HEAD_DIM)
    y = InBasis(rotary, basis)(x, torch.float64)(q)
    close(y, rotary(x, torch.float64)(basis(dtype=torch.float64)(q)))


FREQUENCY = torch.ones(1, 1, 2)
ROTARY = Rotary(FREQUENCY)


@each(
    ("call", "message"),
    [
        (lambda: Rotary(torch.ones(2)), r"frequency: expected finite floats \[h c f\]"),
        (lambda: Rotary(torch.ones(1, 1, 2, dtype=torch.int64)), "frequency: expected finite floats"),
        (lambda: Rotary(FREQUENCY * math.inf), "frequency: expected finite floats"),
        (lambda: Rotary(FREQUENCY, group=Product((Line(), Line()))), "expected 2 coordinates"),
        (lambda: Rotary(FREQUENCY, group=Ring(12)), "multiples of 2 pi / 12"),
        (lambda: Rotary(2 * math.pi / 12 * FREQUENCY, learned=True, group=Ring(12)), "expected fixed multiples"),
        (lambda: Permutation(torch.tensor([[0, 2]])), "permutation: expected"),
        (lambda: Permutation(torch.tensor([[0, 0]])), "permutation: expected"),
        (lambda: Permutation(torch.tensor([0, 1])), "permutation: expected"),
        (lambda: Permutation(torch.tensor([[0.0, 1.0]])), "permutation: expected"),
        (lambda: Permutation(torch.tensor([[[1, 0, 2], [0, 2, 1]]])), "axes that commute, got 0 and 1"),
        (lambda: Exponential(torch.randn(4, 4)), "generator: expected"),
        (lambda: Exponential(torch.randn(1, 3, 3)), "even d"),
        (lambda: Exponential(torch.randn(1, 4, 6)), "generator: expected"),
        (lambda: Exponential(torch.zeros(1, 4, 4)), "distinct frequencies"),
        (lambda: Exponential(torch.eye(4).roll(2, 0)[None].triu()), "distinct frequencies"),
        (lambda: TreePath(torch.randn(2, 4, 4)), r"generator: expected \[h b d d\]"),
        (lambda: TreePath(torch.randn(1, 2, 4, 6)), r"generator: expected \[h b d d\]"),
        (lambda: TreePath(tree_generator())(tree([[], [], []])), "expected branches from 0 to 1, got"),
        (lambda: TreePath(tree_generator())(torch.tensor([[1, 0], [0, 0]])), "its own ancestor"),
        (lambda: TreePath(tree_generator())(torch.tensor([[-1, 0]])), r"expected roots \(-1, -1\)"),
        (lambda: TreePath(tree_generator())(torch.tensor([[5, 0]])), "expected parents from 0 to 0"),
        (lambda: TreePath(tree_generator())(sequence(3)), r"expected \[\*b t 2\]"),
        (lambda: TreePath(tree_generator())(torch.zeros(3, 2)), "expected integers"),
        (lambda: InBasis(ROTARY, bases.OddEven(6)), "basis: expected 4 features as the encoding, got 6"),
        (lambda: DirectSum([]), "one or more encodings"),
        (lambda: DirectSum([3]), r"encodings, got \[3\]"),
        (lambda: Rotary(torch.ones(1, 2, 1), group=Product((Line(), Ring(6)))), "group: expected a line, a grid or a ring"),
        (lambda: Product(3), "parts: expected one or more groups, got 3"),
        (lambda: DirectSum([ROTARY, Permutation(permutations())], shared=True), "one group to share"),
        (lambda: Partial(ROTARY, 2), "at least 4 as the encoding, got 2"),
        (lambda: ROTARY(torch.zeros(3, 2)), r"expected \[\*b t 1\]"),
        (lambda: ROTARY(torch.zeros(3, 1).half()), "got torch.float16"),
        (lambda: ROTARY(torch.zeros(3, 1).bfloat16()), "got torch.bfloat16"),
        (lambda: Permutation(permutations())(torch.zeros(3, 1)), "expected integers"),
        (lambda: Exponential(generator())(torch.zeros(3, 2)), r"expected \[\*b t 1\]"),
        (lambda: encodings.Identity(4)(torch.zeros(3)), r"expected \[\*b t 1\]"),
        (lambda: DirectSum([ROTARY, ROTARY])(torch.zeros(3, 1)), r"expected \[\*b t 2\]"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@each("far", [2**40, -(2**40), 2**55])
def test_a_ring_goes_around_any_number_of_times(far):
    rho, x = schemes.ape_ring(8, 2, period=96).encoding, torch.arange(96)[:, None]
    q = torch.randn(1, 2, 96, 8)
    assert torch.equal(rho(x + 96 * far)(q), rho(x)(q))


def test_parts_have_one_number_of_heads():
    both = DirectSum([Permutation(torch.stack([torch.randperm(4) for _ in range(heads)])) for heads in (2, 3)], shared=True)
    with pytest.raises(ValueError, match=r"parts of one number of heads, .* got \[2\], \[3\]"):
        linear_attention(*torch.randn(3, 1, 2, 3, 8), isometry=both(sequence(3)))


@each("columns", [1, 2])
def test_an_index_is_looked_up_by_segments_and_held_in_bytes(columns, monkeypatch):
    encoding = Permutation(permutations(columns))
    x = encoding.group.random(2, 70)
    whole = encoding(x).index
    monkeypatch.setattr(encodings, "SEGMENT", 32)
    assert torch.equal(encoding(x).index, whole)
    assert whole.dtype == torch.uint8


@each("wrong", ["zero", "equal"])
def test_generators_that_the_constructor_refuses_are_not_loaded(wrong):
    encoding, start = Exponential(torch.randn(2, 4, 4)), torch.zeros(2, 4, 4)
    if wrong == "equal":
        start[:, 1, 0] = start[:, 3, 2] = 1.0
    with pytest.raises(ValueError, match="distinct frequencies"):
        Exponential(start)
    with pytest.raises(ValueError, match="generator: expected a skew part with distinct frequencies"):
        torch.nn.ModuleList([encoding]).load_state_dict({"0.generator": start})
    encoding.load_state_dict({"generator": torch.randn(2, 4, 4)})


def test_limits_are_those_of_parts():
    """A stream of `Scheme.max_length` tokens fits."""
    short = encodings.Rotary(rope_frequencies(2)[None, None], lift=True, max_length=70)
    group, basis = short.group, bases.Fourier(2)
    endless = encodings.Rotary(rope_frequencies(2)[None, None], group=group)
    for whole in (
        encodings.Partial(short, 5),
        encodings.InBasis(short, basis),
        encodings.DirectSum([endless, short], shared=True),
        couplings.Absolute(short),
    ):
        assert whole.max_length == 70
    assert encodings.Partial(endless, 5).max_length is None


def test_a_parametrised_frequency_is_used():
    encoding, x = encodings.Rotary(rope_frequencies(2)[None, None], learned=True), torch.arange(3)[:, None]
    expected = encoding(-x).table
    parametrize.register_parametrization(encoding, "frequency", Negated())
    torch.testing.assert_close(encoding(x).table, expected)


class Negated(nn.Module):
    def forward(self, x):
        return -x


def test_an_exponential_is_mapped_by_torch_func():
    encoding = schemes.ape_sequence(HEAD_DIM, HEADS).encoding
    generators, x = torch.stack([encoding.generator * scale for scale in (1.0, 2.0)]), torch.arange(3)[:, None]
    rows = torch.randn(HEADS, 3, HEAD_DIM)
    apply = lambda generator: torch.func.functional_call(encoding, {"generator": generator}, (x,))(rows)  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(apply)(generators), torch.stack([apply(a) for a in generators]))
