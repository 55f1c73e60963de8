"""Test one scheme per layer: models, streams, fingerprints, command lines and files."""

import copy
import json

import pytest
import torch
from cases import each

import isopos
from isopos.lab.recipes import Recipe
from isopos.lab.tables.loader import cell_name
from isopos.lab.tasks.build import build_scheme
from isopos.models import Decoder, PerLayer, Seq2Seq, Vision
from isopos.spec import map_spec, of_layers, split_spec
from isopos.stream import Stream

PATTERNS = {  # of four layers
    "nope": "rope*3+none",
    "decays": "rope:decay=retnet+none:decay=alibi",
    "softmax": "none+rope:attention=softmax+none+t5:attention=softmax",
    "wide": "permuteformer:width=2+lrpe-orthogonal",
    "embedding": "sinusoidal+none*3",
}


def layered(name: str, layers=4, **edits):
    recipe = Recipe(scheme=PATTERNS.get(name, name)).edit(layers=layers, model_dim=32, heads=4, **edits)
    return recipe, recipe.task.model(recipe).eval()


def test_layers_with_one_scheme_are_a_model_of_it():
    scheme, tokens = isopos.lrpe_orthogonal(8, 4), torch.arange(20)[None]
    models = []
    for schemes in (scheme, [scheme] * 3):
        torch.manual_seed(0)
        models.append(Decoder(256, 32, 3, schemes))
    assert torch.equal(models[0](tokens), models[1](tokens))
    assert [p.shape for p in models[0].parameters()] == [p.shape for p in models[1].parameters()]


@each("name", PATTERNS)
def test_each_layer_has_a_scheme_and_shared_ones_are_evaluated_once(name):
    _, model = layered(name)
    calls = []
    for scheme in dict.fromkeys(model.schemes):
        at = scheme.at
        scheme.at = lambda *a, at=at, scheme=scheme, **k: calls.append(scheme) or at(*a, **k)
    tokens = torch.randint(256, (2, 12))
    found = model(tokens)
    assert calls == list(dict.fromkeys(model.schemes))
    x = model.tokens(tokens)
    x = x if model.scheme.embedding is None else x + model.scheme.embedding(isopos.sequence(12), x.dtype)
    for block, scheme in zip(model.blocks, model.schemes, strict=True):
        x = block(x, scheme.at(isopos.sequence(12)), causal=True)
    assert torch.equal(found, model.head(model.norm(x)))
    for n, (spec, scheme) in enumerate(zip(of_layers(PATTERNS[name]) * 4, model.schemes, strict=False)):
        assert scheme.origin[0] == split_spec(spec)[0], n


@each("name", PATTERNS)
@torch.no_grad()
def test_streams_prepared_or_not_are_the_whole(name):
    _, model = layered(name)
    tokens = torch.randint(256, (2, 14))
    whole = model(tokens)
    first, stream = model.prefill(tokens[:, :6])
    second, stream = model.prefill(tokens[:, 6:9], stream)
    rows, steps = [first, second], model.steps(stream)
    for n in range(9, 14):
        again, stream = model.step(tokens[:, n], stream)
        row = steps(tokens[:, n])
        torch.testing.assert_close(row, again, atol=1e-5, rtol=1e-4)
        rows.append(row[:, None])
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-4)
    assert len({id(layer._tables) for layer in steps.layers}) == len(model.scheme.parts)
    assert all(isinstance(layer, Stream) for layer in steps.layers)


def test_a_stream_is_that_of_its_layers():
    _, model = layered("rope+none", 2)
    _, other = layered("none+rope", 2)
    tokens = torch.arange(5)[None]
    _, stream = model.prefill(tokens)
    with pytest.raises(ValueError, match=r"^state: "):
        other.step(tokens[:, 0], stream)
    assert model.scheme.fingerprint == layered("rope+none", 2)[1].scheme.fingerprint != other.scheme.fingerprint


def test_what_is_learned_trains_and_is_copied():
    _, model = layered("lrpe-orthogonal:decay=retnet+none", 4)
    model.train()(torch.randint(256, (2, 9)), targets=torch.randint(256, (2, 9))).backward()
    names = dict(model.named_parameters())
    assert any(name.startswith("scheme.parts.0.") for name in names)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in names.values())
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(torch.arange(7)[None]), model.eval()(torch.arange(7)[None]))
    assert again.scheme.each[0] is again.scheme.parts[0]


@each("kind", ["line", "tree"])
@torch.no_grad()
def test_sequences_of_sequences_stream(kind):
    seeing = isopos.rope(8, 4, attention="softmax") if kind == "line" else isopos.ape_tree(8, 4, attention="softmax")
    model = Seq2Seq(11, 12, 32, 2, [seeing, isopos.none(8, 4)]).eval()
    nodes = None if kind == "line" else isopos.tree("(a (b c d) e)").clone()
    source = torch.arange(5)[None]
    follow = None if nodes is None else lambda given: nodes[: given.shape[1] + 1]
    found = model.greedy(source, 11, 4, follow, positions=nodes)
    model.streams = False
    assert torch.equal(found, model.greedy(source, 11, 4, follow, positions=nodes))


def test_layers_without_positions_are_among_those_of_a_grid():
    model = Vision(1, 3, 32, 2, [isopos.none(8, 4), isopos.rope_axial(8, 4)])
    pixels = torch.randint(256, (1, 1, 8, 12), dtype=torch.uint8)
    first = model(pixels)
    assert model.scheme.group.columns == 2
    assert not torch.allclose(first, model(pixels.mT))


@each(
    ("make", "message"),
    [
        (lambda: Decoder(9, 16, 2, []), "^scheme: expected a Scheme, or a list of one for each layer"),
        (lambda: Decoder(9, 16, 2, [isopos.rope(8, 2)]), "^scheme: expected one for each of 2 layers, got 1"),
        (
            lambda: PerLayer([isopos.rope(8), isopos.ape_tree(8, 2)]),
            "one kind in all layers, got a line and a tree",
        ),
        (
            lambda: PerLayer([isopos.rope(8), isopos.sinusoidal(8, 2)]),
            "^scheme: expected an embedding in the first layer only",
        ),
        (lambda: layered("rope*3+none", 6), "^layers: expected a multiple of the 4 of rope.3.none, got 6"),
        (lambda: of_layers("rope*0+none"), "expected a number of layers after .* got '0' at character 6 of 'rope.0.none'"),
        (
            lambda: split_spec("rope*3+none"),
            "^scheme: expected one, not one per layer as in rope.3.none; .* rope, none",
        ),
        (
            lambda: layered("none+sinusoidal:attention=linformer", 2),
            "^schemes: expected positions that are added|^schemes: ",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_layers_of_integers_and_of_real_numbers_take_integers():
    scheme = PerLayer([isopos.rope_axial(8, 4), isopos.permuteformer_2d(8, 4)])
    assert scheme.group == isopos.permuteformer_2d(8, 4).group


def test_the_fingerprint_follows_the_schemes():
    scheme = PerLayer([isopos.rope(8, 4)])
    before = scheme.fingerprint
    scheme.each[0].extend("linear", factor=2)
    assert scheme.fingerprint != before


def test_as_many_positions_are_taken_as_every_layer_takes():
    schemes = [isopos.cosformer(8, length=20), isopos.cosformer(8, length=100), isopos.none(8)]
    assert PerLayer(schemes).max_length == PerLayer(schemes[::-1]).max_length == 20
    assert PerLayer([isopos.rope(8), isopos.none(8)]).max_length is None


def test_patterns_of_text():
    assert of_layers("mrope:sections=2+1+1*2+none") == ["mrope:sections=2+1+1"] * 2 + ["none"]
    assert of_layers("rope:feature_map=elu+1") == ["rope:feature_map=elu+1"]
    assert map_spec("rope+rope+none", lambda one: one) == "rope*2+none"
    assert cell_name("", "rope*3+none", 0) == "ropex3+none-seed0"
    assert split_spec("rope*2") == ("rope", {})
    scheme = build_scheme(Recipe(scheme="rope*2").edit(layers=3))
    assert isinstance(scheme, isopos.Scheme)


def test_longer_sequences_have_other_frequencies_in_layers_that_see_positions():
    _, model = layered("nope")
    before = model.scheme.fingerprint
    model.scheme.extend("linear", factor=2)
    assert [scheme.extension is None for scheme in model.schemes] == [False, False, False, True]
    assert model.scheme.fingerprint != before
    _, other = layered("rope*3+t5:attention=softmax")
    with pytest.raises(ValueError, match=r"^extend: expected a scheme that rotates"):
        other.scheme.extend("linear", factor=2)
    assert other.schemes[0].extension is None


def test_a_run_of_layers(isopos, tmp_path):
    sizes = [
        "--layers=2",
        "--model-dim=16",
        "--heads=2",
        "--steps=2",
        "--length=16",
        "--validation-tokens=64",
        "--device=cpu",
    ]
    status, out, _ = isopos("compare", "--schemes", "rope+none,rope", "--name", "own", *sizes)
    assert status == 0
    assert "rope+none" in out
    run = "runs/own/rope+none-seed0"
    assert json.loads((tmp_path / run / "recipe.json").read_text())["scheme"] == "rope+none"
    assert json.loads((tmp_path / run / "result.json").read_text())["laws"] == "yes"
    page = (tmp_path / "runs" / "own" / "report.html").read_text()
    assert "<h3>rope in rope+none</h3>" in page
    assert "<h3>none in rope+none</h3>" in page
    assert isopos("generate", run, "--tokens", "3")[0] == 0
    status, out, _ = isopos("eval", run, "--length", "2", "--extend", "yarn")
    assert status == 0
    assert "extended by yarn" in " ".join(out.split())
    for command in ("check", "show"):
        status, _, err = isopos(command, "rope*3+none")
        assert status == 2
        assert "expected one, not one per layer" in err


def test_transformers_have_one_for_all_layers():
    pytest.importorskip("transformers")
    from isopos.integrations.transformers import from_decoder

    with pytest.raises(ValueError, match=r"^scheme: expected one for all layers, .* got one per layer"):
        from_decoder(layered("nope")[1])


def test_a_layer_uses_further_arguments_among_those_of_the_scheme():
    scheme, (x, ids) = isopos.rope(16, 4), isopos.packed([12, 8])
    layer, tokens = isopos.Attention(64, scheme), torch.randn(1, 20, 64)
    at, mask = scheme.at(x), torch.arange(20) < 15
    for further, options in (({"segment_ids": ids}, {"segment_ids": ids}), ({"mask": mask, "causal": True}, None)):
        wanted = layer(tokens, at, **(options or {"mask": mask, "causal": True}))
        assert torch.equal(layer(tokens, at | further), wanted)
        assert not torch.equal(layer(tokens, at), wanted)
