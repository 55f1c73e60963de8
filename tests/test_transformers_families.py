"""Test all model families of tests/families.py with `patch`: every feature of a patched model."""

import faults
import pytest
import torch
from families import ADDED, FAMILIES, HEAD_DIM, HEADS, IMAGES, VOCABULARY

import isopos
from isopos.decays import Decay, alibi_rates
from isopos.encodings import Identity
from isopos.integrations.transformers.native import rotary_scheme
from isopos.integrations.transformers.patching import load, patch, patched, unpatch
from isopos.scheme import Scheme
from isopos.schemes import REGISTRY

pytestmark = [pytest.mark.oracles, pytest.mark.usefixtures("hf")]
SOFTMAX = {"attention": "softmax"}
LENGTH = 12
WITHOUT_TEXT = {"vit", *(name for name, family in FAMILIES.items() if family.kind == IMAGES)}
CASES = [(name, "rotation") for name, family in FAMILIES.items() if family.kind != ADDED]
CASES += [(name, "ours") for name, family in FAMILIES.items() if not family.only] + [("falcon", "decay")]
ALL_CASES = pytest.mark.parametrize(("name", "what"), CASES)


def inputs(name, batch=2):
    """Arguments of a call: tokens, images, or the patches of images of two sizes."""
    generator = torch.Generator().manual_seed(1)
    if name in ("qwen2_vl_vision", "qwen3_vl_vision"):
        return torch.randn(40, 3 * 4 * 4, generator=generator), torch.tensor([[1, 4, 6], [1, 4, 4]])
    if name in WITHOUT_TEXT:
        return (torch.randn(batch, 3, 16, 16, generator=generator),)
    return (torch.randint(1, VOCABULARY, (batch, LENGTH), generator=generator),)


def output(model, *arguments, **options):
    return model(*arguments, **options)[0]


def axes_of(name):
    if name in WITHOUT_TEXT:
        return 2
    return 3 if "_vl" in name else 1


def scheme_of(model, name, what):
    """A scheme that learns, or has a decay, with the rotating features of the model."""
    if what == "decay":
        return isopos.rope(HEAD_DIM, HEADS, decay="retnet", base=100.0, **SOFTMAX)
    heads, axes = (HEADS if what == "ours" else 1), axes_of(name)
    if axes > 1:
        return isopos.rope_mixed(HEAD_DIM, heads, axes=axes, **SOFTMAX)
    if what == "ours" or name == "roformer":
        return isopos.rope(HEAD_DIM, heads, learned=True, base=100.0, **SOFTMAX)
    own = rotary_scheme(model)

    def learned(scheme):
        known, options = scheme.origin
        return REGISTRY[known](**options | {"learned": True, "base": 100.0})

    return {kind: learned(one) for kind, one in own.items()} if isinstance(own, dict) else learned(own)


def parameters(scheme):
    schemes = scheme.values() if isinstance(scheme, dict) else [scheme]
    return [parameter for one in schemes for parameter in one.parameters()]


def patched_case(name, what):
    model = FAMILIES[name].make()
    scheme = scheme_of(model, name, what)
    with torch.no_grad():
        for parameter in parameters(scheme):
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    return patch(model, scheme), scheme


def close(actual, expected, most=1e-5):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= most * max(1, expected.abs().max())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.kind != ADDED and name != "roformer"])
@torch.no_grad()
def test_the_own_rotary_scheme_of_a_model_changes_nothing(name):
    model, given = FAMILIES[name].make(), inputs(name)
    expected, keys = output(model, *given), [*model.state_dict()]
    with patched(model, rotary_scheme(model)):
        assert (output(model, *given) - expected).norm() <= 1e-6 * expected.norm()
    assert output(model, *given).equal(expected)
    assert [*model.state_dict()] == keys


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@torch.no_grad()
def test_learned_vectors_of_a_model_may_be_its_scheme_s(name):
    model, given = FAMILIES[name].make(), inputs(name)
    expected = output(model, *given)
    table = model.transformer.wpe if name == "gpt2" else model.bert.embeddings.position_embeddings
    model_dim = table.embedding_dim
    scheme = isopos.learned(HEAD_DIM, HEADS, model_dim=model_dim, length=table.num_embeddings, **SOFTMAX)
    scheme.embedding.weight.copy_(table.weight)
    with patched(model, scheme):
        close(output(model, *given), expected, 1e-6)


@torch.no_grad()
def test_alibi_of_falcon():
    """Falcon divides the slopes by the root of the head size, like logits."""
    given, rates = inputs("falcon"), alibi_rates(HEADS) / HEAD_DIM**0.5
    model = FAMILIES["falcon"].make(alibi=True)
    expected = output(model, *given)
    own = Scheme(Identity(HEAD_DIM), HEADS, attention="softmax", decay=Decay(rates))
    mask = torch.ones_like(given[0])
    mask[0, :4] = 0
    padded = output(model, *given, attention_mask=mask)
    with patched(model, own):
        close(output(model, *given), expected, 1e-6)
        close(output(model, *given, attention_mask=mask)[mask.bool()], padded[mask.bool()], 1e-6)
    with patched(model, rotary_scheme(model)):  # rotary positions in place of ALiBi
        rotary = FAMILIES["falcon"].make()
        close(output(model, *given), output(rotary, *given), 1e-6)
    assert output(model, *given).equal(expected)


@ALL_CASES
@torch.no_grad()
def test_padding_changes_nothing_and_a_cache_continues(name, what):
    if name in WITHOUT_TEXT:
        return
    model, _ = patched_case(name, what)
    (ids,) = inputs(name)
    short = ids[:1, : LENGTH - 4]
    alone, mask = output(model, short), torch.ones_like(ids)
    mask[0, :4] = 0
    left = torch.cat((torch.cat((torch.full((1, 4), 7), short), 1), ids[1:]))
    if name != "roformer":  # which counts padding
        close(output(model, left, attention_mask=mask)[0, 4:], alone[0], 1e-4)
    right = torch.cat((torch.cat((short, torch.full((1, 4), 7)), 1), ids[1:]))
    close(output(model, right, attention_mask=mask.flip(1))[0, : LENGTH - 4], alone[0], 1e-4)
    close(output(model, right, attention_mask=mask.flip(1))[1:], output(model, ids[1:]), 1e-4)
    if name in ("modernbert", "bert", "roformer"):
        return
    cache, found = None, []
    for part in ids.split([5, 1, 4, 2], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache, found = out.past_key_values, [*found, out[0]]
    close(torch.cat(found, 1), output(model, ids), 1e-4)
    if not hasattr(model, "generate"):
        return
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    found = model.generate(left, **options)
    assert found.equal(model.generate(left, use_cache=False, **options))
    options["attention_mask"] = torch.ones_like(short)
    assert found[0, LENGTH:].equal(model.generate(short, **options)[0, LENGTH - 4 :])


@ALL_CASES
def test_it_is_saved_loaded_trained_and_unpatched(name, what, tmp_path):
    original, given = FAMILIES[name].make(), inputs(name)
    model, scheme = patched_case(name, what)
    with torch.no_grad():
        expected, before = output(model, *given), output(original, *given)
        assert (expected - before).abs().max() > 1e-5
        model.save_pretrained(tmp_path)
        assert output(load(tmp_path, type(model)), *given).equal(expected)
    learned = parameters(scheme)
    assert {id(a) for a in learned} <= {id(a) for a in model.parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()
    output(model, *given).square().mean().backward()
    for parameter in learned:
        assert (parameter.grad != 0).flatten(1).any(-1).all()  # in every head
    optimizer.step()
    with torch.no_grad():
        assert not output(model.eval(), *given).equal(expected)
        unpatch(patch(original, scheme) if not learned else original)
        assert output(original, *given).equal(before)


REFUSED = {
    "t5": "one stack of layers, got an encoder and a decoder",
    "bloom": "neither was found; isopos audit measures what it has",
    "gptj": "neither was found",
    "mamba2": "neither was found",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_served_is_told_why_and_stays(kind):
    model = faults.model(kind)
    before, config = {name: id(module) for name, module in model.named_modules()}, model.config
    with pytest.raises(ValueError, match=f"^model: expected .*{REFUSED[kind]}"):
        patch(model, isopos.rope(8, **SOFTMAX))
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert model.config is config


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.only])
def test_a_scheme_that_only_an_attention_of_ours_could_have(name):
    model, axes = FAMILIES[name].make(), axes_of(name)
    before = {one: id(module) for one, module in model.named_modules()}
    scheme = isopos.rope_mixed(HEAD_DIM, HEADS, axes=axes, **SOFTMAX) if axes > 1 else isopos.t5(HEAD_DIM, HEADS, **SOFTMAX)
    with pytest.raises(
        ValueError, match=r"^scheme: expected one that rotates pairs of features, all heads alike, (since|for)"
    ):
        patch(model, scheme)
    assert {one: id(module) for one, module in model.named_modules()} == before


def test_schemes_by_type_of_layers():
    model = FAMILIES["gemma3"].make()
    own = rotary_scheme(model)
    assert {*own} == {"full_attention", "sliding_attention"}
    with pytest.raises(ValueError, match="scheme: expected full_attention, sliding_attention, got full_attention"):
        patch(model, {"full_attention": own["full_attention"]})
    with pytest.raises(ValueError, match="scheme: expected one scheme, since all layers share"):
        patch(FAMILIES["llama"].make(), own)
    (ids,) = inputs("gemma3")
    with torch.no_grad():
        expected = output(model, ids)
        for attention in ("full_attention", "sliding_attention"):
            other = own | {attention: isopos.alibi(HEAD_DIM, HEADS, **SOFTMAX)}
            with patched(model, other):
                assert (output(model, ids) - expected).abs().max() > 1e-4
        with patched(
            model, own | {"full_attention": isopos.rope(HEAD_DIM, HEADS, layout="half", base=1e6, scale=1e-3, **SOFTMAX)}
        ):
            assert (output(model, ids) - expected).abs().max() > 1e-4
