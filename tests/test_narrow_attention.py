"""Test attention on a device without float64: as exact as on the CPU, without float64 tensors."""

from copy import deepcopy

import pytest
import torch
from cases import ATTENTION, PRESETS, each, inputs_of
from pretend import DEVICE, There, WithoutFloat64, narrow
from structures import over_covering

from isopos import schemes
from isopos.attention import linear_attention, naive_linear_attention
from isopos.nn import absorb
from isopos.positions import sequence
from isopos.state import State

T = 70


@pytest.fixture(autouse=True)
def device():
    with WithoutFloat64():
        yield


def drawn():
    return [torch.randn(2, 2, 9, 8, dtype=torch.float32) for _ in range(3)]


def both(attention, inputs, here, there, **options):
    """Outputs and gradients on the CPU and on the device."""
    found = []
    for device, at in ((torch.device("cpu"), here), (DEVICE, there)):
        leaves = [x.float().to(device).requires_grad_() for x in inputs]
        y = attention(*leaves, **at, **{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()})
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(isinstance(x, There) for x in found[1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b.held, a, atol=1e-4, rtol=1e-4)


@over_covering()
def test_every_structure_gives_what_it_gives_on_the_cpu(case, kind):
    scheme = case.build(attention=kind)
    x = narrow(case.positions(2, t=12))
    inputs = inputs_of(scheme, 2, t=12)
    here = scheme.at(x)
    with torch.no_grad():
        moved = deepcopy(scheme).to(DEVICE)
    there = moved.at(x.to(DEVICE))
    for causal in case.ways if case in PRESETS else case.ways[:1]:
        both(ATTENTION[kind], inputs, here, there, causal=causal)


@each("causal", [True, False])
@each("kind", ATTENTION)
def test_packed_sequences_with_decays_and_masks(kind, causal):
    scheme, draw = schemes.none(8, 2, decay="retnet", attention=kind), torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, T, 8, generator=draw) for _ in range(3)]
    options = {"segment_ids": torch.arange(T) // 30, "mask": torch.rand(2, T, generator=draw) < 0.8, "causal": causal}
    both(ATTENTION[kind], inputs, scheme.at(sequence(T)), scheme.at(sequence(T).to(DEVICE)), **options)


def test_the_definition():
    scheme, inputs = schemes.rope(8, 2, decay="retnet"), drawn()
    both(naive_linear_attention, inputs, scheme.at(sequence(9)), scheme.at(sequence(9).to(DEVICE)), causal=True)


def test_masked_tokens_may_have_any_positions():
    scheme, mask = schemes.rope(8, 2, decay="retnet"), torch.arange(9) < 7
    x = torch.where(mask, torch.arange(9), 0)[:, None]
    for function in (linear_attention, naive_linear_attention):
        both(function, drawn(), scheme.at(x), scheme.at(x.to(DEVICE)), causal=True, mask=mask)


@each("kind", ATTENTION)
def test_streams(kind):
    scheme, inputs = (
        schemes.rope(8, 2, decay="retnet", attention=kind),
        drawn(),
    )
    whole, state, found = ATTENTION[kind](*inputs, **scheme.at(sequence(9)), causal=True), State(), []
    for own in (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 9)):
        tokens = (x[..., own, :].to(DEVICE) for x in inputs)
        at = scheme.at(sequence(9)[own].to(DEVICE), state=state)
        y, state = ATTENTION[kind](*tokens, **at, causal=True, return_state=True)
        found.append(y.held)
    torch.testing.assert_close(torch.cat(found, -2), whole, atol=1e-5, rtol=1e-4)


def test_a_basis_is_absorbed():
    scheme, layers = schemes.lrpe_orthogonal(8, 2, attention="softmax"), [torch.nn.Linear(16, 16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    with torch.no_grad():
        there = layers[1].to(DEVICE)
    absorb(scheme, layers[0])
    absorb(scheme, there)
    torch.testing.assert_close(there.weight.held, layers[0].weight)
