"""Test the encoder-decoder: positions of both sides, padding, steps, and visibility."""

import copy

import pytest
import torch
from cases import HEAD_DIM, HEADS, PRESETS, TOLERANCE, close, each, over_rows, parents_first, perturb, scheme_case
from structures import over_covering

from isopos import schemes
from isopos.models import Seq2Seq
from isopos.positions import Line, sequence, tree

WIDTH, VOCABULARY, START, S, T = HEAD_DIM * HEADS, 11, 10, 7, 6
TREES = ["shiv-quirk", "ape-tree"]


def crosses(case, kind):
    """Whether a scheme supports cross-attention."""
    return case.build(attention=kind).decay is None or kind == "softmax"


def made(case, kind, **more):
    """A model with two layers for presets, and one layer for other structures."""
    layers = 2 if case in PRESETS else 1
    return perturb(Seq2Seq(VOCABULARY, VOCABULARY, WIDTH, layers, case.build(attention=kind), **more)).eval()


def samples(case, *batch, t=T, s=S):
    """Source, target, and positions of both, in an order that streams support."""
    source, target = (torch.randint(VOCABULARY - 1, (*batch, n)) for n in (s, t))
    if isinstance(case.group, Line):
        return source, target, sequence(s), sequence(t)
    x, y = (case.positions(*batch, t=n) for n in (s, t))
    return source, target, x, parents_first(case.group, y)


both = over_covering(
    lambda case, kind: case.both_ways and not case.outside and (isinstance(case.group, Line) or case.name in TREES)
)


@both
def test_who_sees_whom(case, kind):
    """No slot sees later targets; every slot sees the whole source."""
    if not crosses(case, kind):
        with pytest.raises(ValueError, match="decay: expected 'none' for linear cross-attention"):
            made(case, kind)
        return
    model, (source, target, x, y) = made(case, kind), samples(case, 2)
    logits = model(source, target, x, y)
    assert logits.shape == (2, T, VOCABULARY)
    later = target.clone()
    later[:, 3:] = (target[:, 3:] + 1) % VOCABULARY
    found = model(source, later, x, y)
    close(found[:, :3], logits[:, :3])
    assert not torch.allclose(found[:, 3:], logits[:, 3:])
    for n in (0, S - 1):
        other = source.clone()
        other[:, n] = (source[:, n] + 1) % VOCABULARY
        assert (model(other, target, x, y) - logits).abs().amax(-1).min() > 1e-9


def test_operators_of_trees_are_evaluated_once(monkeypatch):
    case = scheme_case("ape-tree")
    model, (source, target, x, y), seen = made(case, "softmax"), samples(case, 2), []
    forward = model.scheme.encoding.forward
    monkeypatch.setattr(model.scheme.encoding, "forward", lambda at, *more: seen.append(len(at)) or forward(at, *more))
    model(source, target, x, y)
    assert len(seen) == 2
    model.greedy(source, START, 4, lambda tokens: y[:, : tokens.shape[1] + 1], x)
    assert len(seen) == 2 + 1 + 4


@torch.no_grad()
@both
def test_step_by_step_is_whole_and_greedy_is_the_likeliest(case, kind):
    if not crosses(case, kind):
        return
    model, (source, target, x, y) = made(case, kind), samples(case, 3)
    mask = torch.arange(S) < torch.tensor([S, S - 2, 1])[:, None]
    whole, memory, states = model(source, target, x, y, mask), model.encode(source, x, mask), ()
    for n in range(T):
        logits, states = model.step(target[:, n], memory, y[..., : n + 1, :], states)
        close(logits, whole[:, n])
    if case not in PRESETS:
        return  # what follows is of the model

    def follow(tokens):
        n = tokens.shape[1] + 1
        return y[..., :n, :] if n <= T else None

    tokens = model.greedy(source, START, 100, follow, x, mask)
    assert tokens.shape == (3, T)
    given = torch.cat((torch.full((3, 1), START), tokens[:, :-1]), 1)
    assert torch.equal(model(source, given, x, y, mask).argmax(-1), tokens)
    model.streams = False
    assert torch.equal(model.greedy(source, START, 100, follow, x, mask), tokens)
    if isinstance(case.group, Line):
        assert torch.equal(model.greedy(source, START, T, None, x, mask), tokens)


@each("name", ["rope", "shaw", "ape-sequence", *TREES])
@each("kind", ["linear", "softmax"])
def test_a_padded_sample_is_what_it_is_alone(name, kind):
    case = scheme_case(name)
    if kind not in case.kinds:
        pytest.skip(f"{name} has {', '.join(case.kinds)} attention alone")
    model, (source, target, x, y) = made(case, kind), samples(case, 2)
    x, y = x.expand(2, S, -1).clone(), y.expand(2, T, -1).clone()
    s, t = 4, 3
    if case.group.refers_to_rows:
        x[1] = -1
        x[1, :s] = tree("(a b (c d))")
        y[1, t:] = -1
    mask = torch.arange(S) < torch.tensor([S, s])[:, None]
    logits = model(source, target, x, y, mask)
    close(model(source[1:, :s], target[1:, :t], x[1:, :s], y[1:, :t]), logits[1:, :t])
    close(model(source[:1], target[:1], x[:1], y[:1]), logits[:1])
    logits[1, :t].square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    source[1, s:] = (source[1, s:] + 1) % VOCABULARY
    model(source, target, x, y, mask)[1, :t].square().sum().backward()
    for before, p in zip(grads, [p for p in model.parameters() if p.grad is not None], strict=True):
        close(p.grad, before)


@each("kind", ["linear", "softmax"])
@each("name", ["rope", "ape-sequence", "t5", "sinusoidal"])
def test_cross_attention_sees_true_positions(name, kind):
    """With a relative scheme, an equal shift of both sides changes nothing; a shift of one side does."""
    case = scheme_case(name)
    if kind not in case.kinds:
        pytest.skip(f"{name} has {', '.join(case.kinds)} attention alone")
    model, (source, target, x, y) = made(case, kind), samples(case, 2)
    logits = model(source, target, x, y)
    together = model(source, target, x + 40, y + 40)
    if case.relative:
        close(together, logits, roundings=1000 * TOLERANCE)
    else:
        assert not torch.allclose(together, logits)
    assert not torch.allclose(model(source, target, x, y + 3), logits)


ON_LINES_AND_TREES = [case for case in PRESETS if case.both_ways and (isinstance(case.group, Line) or case.name in TREES)]


@over_rows(ON_LINES_AND_TREES)
def test_one_step_reaches_every_parameter(case):
    kind = case.kinds[-1]
    for tied in {False, case.id == "rope"} if crosses(case, kind) else ():
        model = made(case, kind, tied=tied)
        source, target, x, y = samples(case, 4, t=4 * T, s=4 * S)
        model(source, target, x, y).square().mean().backward()
        silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not silent


def test_tied_vectors_are_one_matrix_and_untied_ones_are_three():
    tied, apart = (Seq2Seq(11, 11, WIDTH, 1, schemes.rope(HEAD_DIM, HEADS), tied=tied) for tied in (True, False))
    assert tied.tokens.weight is tied.targets.weight is tied.head.weight
    assert tied.head.bias is None
    assert len({id(w) for w in (apart.tokens.weight, apart.targets.weight, apart.head.weight)}) == 3
    again = copy.deepcopy(tied)
    assert again.tokens.weight is again.head.weight
    with pytest.raises(ValueError, match="tied: expected one vocabulary, got 11 source tokens and 12 target tokens"):
        Seq2Seq(11, 12, WIDTH, 1, schemes.rope(HEAD_DIM, HEADS), tied=True)
    with pytest.raises(ValueError, match="norm: expected layer in a decoder"):
        Seq2Seq(11, 11, WIDTH, 1, schemes.rope(HEAD_DIM, HEADS), norm="batch")


@each("name", ["ape-sequence", "ape-tree"])
def test_locality_weighs_cross_attention_and_recomputation_changes_nothing(name):
    case = scheme_case(name)
    near = perturb(Seq2Seq(VOCABULARY, VOCABULARY, WIDTH, 2, case.build(attention="softmax", locality=0.5)))
    source, target, x, y = samples(case, 2)
    logits = near(source, target, x, y)
    far = copy.deepcopy(near)
    far.scheme.locality = None
    assert not torch.allclose(far(source, target, x, y), logits)
    again = copy.deepcopy(near)
    again.recompute = True
    assert torch.equal(again(source, target, x, y), logits)
    gradients = []
    for model in (near, again):
        model(source, target, x, y).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_window_of_linear_attention_is_recomputed():
    """It has no streams: greedy decoding computes all slots for each token."""
    model = perturb(Seq2Seq(VOCABULARY, VOCABULARY, WIDTH, 1, schemes.rope(HEAD_DIM, HEADS), window=3)).eval()
    assert not model.streams
    source = torch.randint(VOCABULARY, (2, S))
    tokens = model.greedy(source, START, T)
    given = torch.cat((torch.full((2, 1), START), tokens[:, :-1]), 1)
    assert torch.equal(model(source, given).argmax(-1), tokens)
