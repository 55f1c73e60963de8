"""Test devices without float64: positions, angles, decays and phases are as exact as on the CPU, without float64."""

import pytest
import torch
from cases import ENCODINGS, close, each, ids, inputs
from pretend import DEVICE, There, WithoutFloat64, narrow
from structures import over_covering
from torch import Tensor

import isopos
from isopos import exact, maps
from isopos.decays import Decay, retnet_rates
from isopos.terms import Term

T = 12


@pytest.fixture(autouse=True)
def device():
    """A context in which the simulated device exists."""
    with WithoutFloat64():
        yield


def moved(module):
    with torch.no_grad():
        return module.to(DEVICE)


def tensors_of(value):
    if isinstance(value, maps.TokenMap):
        return list(value.tensors())
    if isinstance(value, Term):
        return [x for x in vars(value).values() if isinstance(x, Tensor)]
    if isinstance(value, tuple):
        return [x for item in value for x in tensors_of(item)]
    return [value] if isinstance(value, Tensor) else []


def same(there, here):
    assert isinstance(there, There)
    assert there.device == DEVICE
    torch.testing.assert_close(there.held, here, rtol=0, atol=0)


def test_the_device_refuses_float64():
    x = torch.ones(2, device=DEVICE)
    for refused in (x.double, lambda: torch.ones(2, dtype=torch.float64).to(DEVICE), lambda: torch.eye(2).double().to(x)):
        with pytest.raises(TypeError, match="float64"):
            refused()
    with pytest.raises(RuntimeError, match="one device"):
        torch.add(x, torch.ones(2))
    assert exact.float64_device(DEVICE).type == exact.float64_device(torch.device("mps")).type == "cpu"
    assert exact.float64_device(torch.device("cuda:1")) == torch.device("cuda:1")


@over_covering()
def test_schemes_give_what_they_give_on_the_cpu(case, kind):
    scheme = case.build(attention=kind)
    x = narrow(case.positions(2, t=T))
    here = scheme.at(x)
    embedded = None if scheme.embedding is None else scheme.embedding(x)
    scheme = moved(scheme)
    there = scheme.at(x.to(DEVICE))
    assert there.keys() == here.keys()
    for name in here:
        pairs = list(zip(tensors_of(there[name]), tensors_of(here[name]), strict=True))
        if name == "decay":  # differences of log decays are cast, not they
            for a, b in pairs:
                assert (a.device.type, a.dtype) == ("cpu", torch.float64)
                assert a.equal(b)
        else:
            for a, b in pairs:
                same(a, b)
    if embedded is not None:
        same(scheme.embedding(x.to(DEVICE)), embedded)


@each("case", ENCODINGS, ids=ids)
def test_encodings_map_and_learn_as_on_the_cpu(case):
    encoding, (q,) = case.make(), inputs(t=T, dtype=torch.float32)[:1]
    q = q[..., :1].expand(*q.shape[:-1], encoding.features)
    x = case.group.random(T)

    def run(encoding, x, q):
        out = encoding(x)(q)
        loss = (out * torch.linspace(1, 2, out.shape[-1], device=q.device)).square().sum()
        parameters = list(encoding.parameters())
        return out.detach(), torch.autograd.grad(loss, parameters) if parameters else ()

    here, gradients = run(encoding, x, q)
    out, learned = run(moved(encoding), x.to(DEVICE), q.to(DEVICE))
    for there, expected in zip((out, *learned), (here, *gradients), strict=True):
        assert there.device == DEVICE
        close(there.cpu(), expected)  # tables are equal, products with them are rounded another way


@each("far", [2**20, 2**31 - 2000])
@each("name", ["rope", "lrpe-unitary", "lrpe-permutation", "permuteformer", "ape-sequence", "ape-grid"])
def test_far_positions_are_as_exact(name, far):
    scheme = isopos.schemes.build(name, 64, 2, {"decay": "none"})
    x = scheme.group.random(T) + 500
    q, k = inputs(t=T, d=scheme.encoding.features)[:2]
    q, k = (a / a.norm(dim=-1, keepdim=True) for a in (q, k))
    near = scheme.encoding(x, torch.float64)
    near = near(q) @ near(k).mT
    rho = moved(scheme).encoding((x + far).to(DEVICE))
    there = rho(q.float().to(DEVICE)) @ rho(k.float().to(DEVICE)).mT
    assert (there.cpu().double() - near).abs().max() < 1e-6


def test_learned_decays_get_their_gradient_there():
    here, there = Decay(retnet_rates(4), learned=True), moved(Decay(retnet_rates(4), learned=True))
    x = isopos.sequence(T)
    here(x).square().sum().backward()
    there(x.to(DEVICE)).square().sum().backward()
    same(there.parameter.grad, here.parameter.grad)


def test_modules_are_initialised_there():
    encoding = moved(isopos.rope(8, 2, learned=True)).encoding
    with torch.no_grad():
        encoding.parameter.zero_()
    encoding.reset_parameters()
    same(encoding.parameter.detach(), encoding.initial.float())
