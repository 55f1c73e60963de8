"""Test deprecated names."""

import importlib
import pkgutil
import re

import pytest
import torch

import isopos
from isopos.feature_maps import FeatureMap


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("isopos.attention.Attention", "isopos.nn.Attention"),
        ("isopos.attention.Steps", "isopos.stream.Stream"),
        ("isopos.Steps", "isopos.stream.Stream"),
        ("isopos.nn.Steps", "isopos.stream.Stream"),
        ("isopos.nn.steps.Steps", "isopos.stream.Stream"),
        ("isopos.models.Stream", "isopos.models.decoder.DecoderState"),
        ("isopos.attention.absorb", "isopos.nn.absorb"),
        ("isopos.attention.convert_layout", "isopos.nn.convert_layout"),
        ("isopos.lab.recipes.split_spec", "isopos.spec.split_spec"),
        ("isopos.lab.tasks.task.expect", "isopos.lab.tasks.task.require"),
        ("isopos.paths.Turn", "isopos.phases.SelectiveRotation"),
        ("isopos.schemes.registry.Layout", "isopos.schemes.registry.PairLayout"),
        ("isopos.terms.Kernel", "isopos.terms.DistanceKernel"),
    ],
)
def test_a_name_of_before_is_found_with_a_warning(old, new):
    module, _, name = old.rpartition(".")
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(old)} is {re.escape(new)} now; the old name goes"):
        found = getattr(home, name)
    assert found is pkgutil.resolve_name(new)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}s'"):
        getattr(home, f"{name}s")


def test_an_argument_and_a_property_of_before_serve_with_a_warning():
    scheme, q = isopos.schemes.fox(4, 1), torch.randn(1, 1, 3, 4)
    with pytest.warns(DeprecationWarning, match="^Scheme.path is phases now; the old name goes"):
        path = scheme.path
    assert path == scheme.phases
    for attend in (isopos.linear_attention, isopos.softmax_attention, isopos.attention.naive_linear_attention):
        expected = attend(q, q, q, phases=path, causal=True)
        with pytest.warns(DeprecationWarning, match="^argument path is phases now; the old name goes"):
            assert torch.equal(attend(q, q, q, path=path, causal=True), expected)


def test_the_derivative_of_a_feature_map_was_its_slope():
    with pytest.warns(DeprecationWarning, match="^argument slope is derivative now; the old name goes"):
        cube = FeatureMap("cube", lambda x: x**3, slope=lambda x, y: y.copy_(3 * x**2))
    x = torch.randn(5)
    assert torch.equal(cube.derivative(x, cube(x)), 3 * x**2)
    with pytest.warns(DeprecationWarning, match="^FeatureMap.slope is derivative now; the old name goes"):
        assert cube.slope is cube.derivative


@torch.no_grad()
def test_places_of_models_serve_with_a_warning():
    scheme, tokens, x = isopos.rope(8, 2), torch.arange(5)[None], torch.arange(4, 9)[:, None]
    encoder, translator = isopos.models.Encoder(9, 16, 1, scheme), isopos.models.Seq2Seq(9, 9, 16, 1, scheme)
    memory = translator.encode(tokens)
    for call, new, value in (
        (lambda **options: encoder(tokens, **options), "indices", torch.tensor([[3, 1]])),
        (lambda **options: translator(tokens, tokens, **options), "target_positions", x),
        (lambda **options: translator.decode(tokens, memory, **options), "target_positions", x),
        (lambda **options: translator.step(tokens[:, 0], memory, **options)[0], "target_positions", x[:1]),
    ):
        with pytest.warns(DeprecationWarning, match=f"^argument places is {new} now; the old name goes"):
            out = call(places=value)
        assert torch.equal(out, call(**{new: value}))
