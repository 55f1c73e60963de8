"""Test pairs of features of a patched model: partial rotation, grouped heads, padding, caches, extensions, shards."""

import importlib.metadata
import json

import pytest
import torch
from test_transformers import (
    FAMILIES,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    LENGTH,
    OURS,
    as_defined,
    close,
    encoder,
    logits,
    make,
    model,
    rope,
    scheme_of,
    tokens,
)

import isopos
from isopos.integrations import transformers
from isopos.integrations.transformers import attention, rotary, saving
from isopos.integrations.transformers.patching import load, patch, patched, unpatch

pytestmark = pytest.mark.oracles
__all__ = ["model"]  # a fixture

PART = HEAD_DIM // 2
SOFTMAX = {"attention": "softmax"}
SCHEMES = {  # with layout="half" where the model's own code rotates, whose pairs these are
    "rope": lambda heads: rope(layout="half"),
    "partial": lambda heads: rope(layout="half", rotary_dim=PART),
    "partial-decay": lambda heads: isopos.rope(HEAD_DIM, heads, layout="half", rotary_dim=PART, decay="retnet", **SOFTMAX),
    "locality": lambda heads: isopos.rope(HEAD_DIM, heads, layout="half", locality=0.9, **SOFTMAX),
    "learned-partial": lambda heads: isopos.rope(HEAD_DIM, heads, layout="half", rotary_dim=PART, learned=True, **SOFTMAX),
    "basis": lambda heads: isopos.lrpe_orthogonal(HEAD_DIM, heads, **SOFTMAX),
    "p-rope": lambda heads: isopos.p_rope(HEAD_DIM, layout="half", **SOFTMAX),
}
RULES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "trained": 8},
    "yarn": {"factor": 4.0, "trained": 16, "sharpness": 1.5},
    "whole": {"factor": 4.0, "trained": 16, "sharpness": 1.5, "whole_logits": True},
    "llama3": {"factor": 4.0, "trained": 16},
}


def made(name, heads, rule=None):
    scheme = SCHEMES[name](heads)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return scheme if rule is None else scheme.extend("yarn" if rule == "whole" else rule, **RULES[rule])


class InPairsOfTheModel:
    """A scheme of interleaved pairs (2i, 2i + 1), applied to the pairs (i, i + d / 2) of Llama's code."""

    def __init__(self, scheme):
        self.scheme, self.heads = scheme, scheme.heads

    def at(self, *x, **options):
        order = torch.arange(HEAD_DIM).view(2, -1).T.flatten()
        found = self.scheme.at(*x, **options)
        return found | {"isometry": tuple(lambda a, rho=rho: rho(a[..., order]) for rho in found["isometry"])}


def of_few_keys(family):
    return HEADS if family == "GPTNeoX" else KEY_HEADS


@pytest.mark.parametrize("rule", [None, *RULES])
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_attention_is_what_is_defined_however_the_scheme_is_extended(hf, family, rule):
    """For rotations by the model's code and by ours. `as_defined` evaluates the extended scheme in float64."""
    model = make(hf, family)
    for name in SCHEMES:
        if (family, name) == ("Llama", "partial") and rule != "whole":
            continue  # whose pairs are Llama's own, below
        scheme = made(name, of_few_keys(family), rule)
        with patched(model, scheme):
            for found, expected in as_defined(model, scheme, tokens()):
                close(found, expected, 1e-5)
    if family == "Llama" and rule != "whole":
        scheme = rope(rotary_dim=PART)
        patch(model, scheme if rule is None else scheme.extend(rule, **RULES[rule]))
        assert isinstance(model.model.rotary_emb, rotary.Angles)
        for found, expected in as_defined(model, InPairsOfTheModel(scheme), tokens()):
            close(found, expected, 1e-5)


PADDED = [
    *((family, "partial-decay") for family in FAMILIES),
    *(("Mistral", name) for name in SCHEMES if name != "partial-decay"),
    *(("GPTNeoX", "rope"), ("Llama", "p-rope"), ("Llama", "rope")),
]
PADDED = [(family, name, True) for family, name in PADDED] + [("Llama", name, False) for name in OURS]


@pytest.mark.parametrize(("family", "name", "extended"), PADDED)
@torch.no_grad()
def test_padded_samples_go_on_from_a_cache_as_they_do_alone(hf, family, name, extended):
    """With left or right padding, grouped heads, chunks, explicit or default positions, and also with a window."""
    options = {"sliding_window": 4} if family == "Mistral" else {}
    model = make(hf, family, **options)
    patch(model, made(name, of_few_keys(family), "yarn") if extended else scheme_of(name))
    ids, pad = tokens(3), (0, 4, 1)
    mask = (torch.arange(LENGTH) >= torch.tensor(pad)[:, None]).long()
    counted = (mask.cumsum(-1) - 1).clamp_min(0)
    alone = [logits(model, ids[i : i + 1, n:])[0] for i, n in enumerate(pad)]
    for positions in (None, counted):
        cache, found, done = None, [], 0
        for part in ids.split([6, 1, 3, 2], 1):
            done += part.shape[1]
            given = {} if positions is None else {"position_ids": positions[:, done - part.shape[1] : done]}
            out = model(part, attention_mask=mask[:, :done], past_key_values=cache, use_cache=True, **given)
            cache, found = out.past_key_values, [*found, out.logits]
        whole = torch.cat(found, 1)
        for i, n in enumerate(pad):
            close(whole[i, n:], alone[i])
    moved = torch.stack([row.roll(-n) for row, n in zip(ids, pad, strict=True)])
    whole = logits(model, moved, attention_mask=mask.flip(1))
    for i, n in enumerate(pad):
        close(whole[i, : LENGTH - n], alone[i])


@pytest.mark.parametrize("name", ["xpos", "basis-of-key-heads", "alibi-of-key-heads", "angles-a-head"])
@torch.no_grad()
def test_a_static_cache_gives_the_logits_of_whole_sequences(hf, model, name):
    """Free slots have no position of their own; zeros there would mean position -2^31, which xPos does not support."""
    patch(model, scheme_of(name))
    ids = tokens(2)
    cache, found = hf.StaticCache(config=model.config, max_cache_len=LENGTH + 5), []
    for part in ids.split([5, 1, 4, 2], 1):
        found.append(model(part, past_key_values=cache, use_cache=True).logits)
    close(torch.cat(found, 1), logits(model, ids))
    cache, found = None, []
    for part in ids.split([1, 1, 2, 8], 1):  # the second has one key before it, the third as many as it is long
        out = model(part, past_key_values=cache, use_cache=True)
        cache, found = out.past_key_values, [*found, out.logits]
    close(torch.cat(found, 1), logits(model, ids))


def test_a_model_s_own_scale_stays_unless_the_scheme_has_one(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.1
    for name, scale in (("alibi", 0.1), ("scale", 0.2)):
        scheme, same = scheme_of(name), scheme_of(name)
        same.scale = scale
        with patched(model, scheme):
            for found, expected in as_defined(model, same, tokens()):
                close(found, expected, 1e-5)


@pytest.mark.parametrize("name", ["alibi", "angles-a-head"])
def test_dropout_of_attention_is_the_model_s(hf, name):
    model, ids = make(hf, attention_dropout=0.5), tokens()
    patch(model, scheme_of(name))
    assert not logits(model.train(), ids).equal(logits(model, ids))
    assert logits(model.eval(), ids).equal(logits(model, ids))


def test_a_rule_for_whole_logits_cannot_come_later(model):
    scheme = rope(rotary_dim=PART)
    patch(model, scheme)
    scheme.extend("yarn", **RULES["whole"])
    with pytest.raises(ValueError, match="expected it as it was patched in, got one of whole_logits since; unpatch, and"):
        logits(model, tokens())
    patch(unpatch(model), scheme)
    assert isinstance(model.model.rotary_emb, rotary.Unrotated)


HALF = {
    "Llama": lambda: rope(),
    "Mistral": lambda: isopos.alibi(HEAD_DIM, HEADS, **SOFTMAX),
    "GPTNeoX": lambda: rope(rotary_dim=PART),
    "Bert": lambda: isopos.learned(HEAD_DIM, HEADS, length=20, **SOFTMAX),
    "RoFormer": lambda: rope(base=100.0),
    "ViT": lambda: isopos.ape_grid(HEAD_DIM, HEADS, **SOFTMAX),
}


@pytest.mark.parametrize("family", HALF)
@torch.no_grad()
def test_every_family_computes_in_half_precision_and_in_training_mode(hf, family):
    model = make(hf, family) if family in FAMILIES else encoder(hf, family)
    x = torch.randn(2, 3, 16, 16) if family == "ViT" else tokens()
    learning = sum(parameter.requires_grad for parameter in model.parameters())
    absolute = {"Bert": 1, "ViT": 1, "RoFormer": 0}.get(family, 0)
    scheme = HALF[family]()
    patch(model, scheme)
    assert not any(module.training for module in model.modules())
    own = sum(parameter.requires_grad for parameter in scheme.parameters())
    assert sum(parameter.requires_grad for parameter in model.parameters()) == learning - absolute + own
    expected = model(x)[0]
    found = model.bfloat16()(x.bfloat16() if family == "ViT" else x)[0]
    assert found.dtype == torch.bfloat16
    close(found.float(), expected, 0.2)
    patch(unpatch(model).train(), HALF[family]())
    assert all(module.training for module in model.modules())
    other = make(hf, family) if family in FAMILIES else encoder(hf, family)
    patch(other.to("meta"), HALF[family]())
    assert {tensor.device.type for tensor in (*other.parameters(), *other.buffers())} == {"meta"}


@torch.no_grad()
def test_embeddings_of_bert_are_sums_of_words_types_and_what_the_scheme_adds(hf):
    """Arguments by position or name, with or without types and positions, from tokens or embedding vectors."""
    model, ids = encoder(hf, "Bert"), tokens()
    embeddings = model.bert.embeddings
    types, x = torch.randint(2, ids.shape), torch.randint(15, ids.shape)
    counted = torch.arange(LENGTH).expand_as(ids)
    words = embeddings.word_embeddings(ids)
    for scheme in (rope(), isopos.learned(HEAD_DIM, HEADS, length=20, **SOFTMAX)):
        with patched(model, scheme):

            def by_definition(types, x, added=scheme.embedding):
                sums = words + embeddings.token_type_embeddings(types)
                return embeddings.LayerNorm(sums if added is None else sums + added(x[..., None]))

            for found, expected in (
                (embeddings(ids), by_definition(0 * ids, counted)),
                (embeddings(ids, types), by_definition(types, counted)),
                (embeddings(ids, types, x), by_definition(types, x)),
                (embeddings(ids, position_ids=x), by_definition(0 * ids, x)),
                (embeddings(ids, token_type_ids=types, position_ids=x), by_definition(types, x)),
                (embeddings(input_ids=ids, token_type_ids=types), by_definition(types, counted)),
                (embeddings(None, types, x, words), by_definition(types, x)),
                (embeddings(inputs_embeds=words, position_ids=x), by_definition(0 * ids, x)),
            ):
                close(found, expected, 1e-6)


@torch.no_grad()
def test_a_vit_without_positions_and_with_its_pixels_by_name(hf):
    model, images = encoder(hf, "ViT"), torch.randn(2, 3, 16, 16)
    implementation = model.config._attn_implementation
    order = torch.randperm(16)
    swapped = images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)[:, :, order]  # [b c n 4 4]
    swapped = swapped.unflatten(2, (4, 4)).transpose(3, 4).reshape(images.shape)
    with patched(model, isopos.none(HEAD_DIM, HEADS, **SOFTMAX)):
        assert model.config._attn_implementation == implementation
        expected = model(images)[0]
        close(model(swapped)[0][:, 1:], expected[:, 1:][:, order])
    with patched(model, isopos.ape_grid(HEAD_DIM, HEADS, **SOFTMAX)):
        assert model(pixel_values=images)[0].equal(model(images)[0])
        assert (model(swapped)[0][:, 1:] - model(images)[0][:, 1:][:, order]).abs().max() > 0.01


def test_sinusoids_are_at_the_positions_that_are_given():
    old, x = torch.zeros(1, dtype=torch.float64), torch.tensor([4, 0, 300])
    table = rotary.Sinusoids(rope(), old)
    whole = table(torch.Size((1, 301)))
    assert table(torch.Size((1, 3)), position_ids=x).equal(whole[x])
    assert table(torch.Size((1, 5)), 7).equal(whole[7:12])
    angles = torch.arange(301).double()[:, None] * 10000.0 ** (-torch.arange(8).double() / 8)
    close(whole, torch.cat((angles.sin(), angles.cos()), -1), 1e-12)


# What is refused

REFUSED = {
    "Llama": ("4 heads of queries or 2 of keys, got 3", lambda: isopos.alibi(HEAD_DIM, 3, **SOFTMAX)),
    "GPTNeoX": ("4 heads of queries or 4 of keys, got 2", lambda: isopos.alibi(HEAD_DIM, 2, **SOFTMAX)),
    "Gemma": (
        "one of positions, got one whose tokens take steps",
        lambda: isopos.rope(HEAD_DIM, 4, decay="forget", **SOFTMAX),
    ),
    "RoFormer": ("acts in attention", lambda: isopos.sinusoidal(HEAD_DIM, HEADS, **SOFTMAX)),
    "ViT": ("a grid of two axes, or on a line", lambda: isopos.ape_grid(18, HEADS, axes=3, **SOFTMAX)),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_scheme_that_a_family_cannot_take_leaves_it_as_it_was(hf, family):
    said, scheme = REFUSED[family]
    model = make(hf, family) if family in FAMILIES else encoder(hf, family)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=f"^scheme: expected .*{said}"):
        patch(model, scheme())
    assert {name: id(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("version", "said"), [("4.57.1", "4.57.1"), ("4.99", "4.99"), (None, "none"), ("5.0", ""), ("10.1", "")]
)
def test_versions_of_transformers(monkeypatch, version, said):
    def of(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", of)
    if said:
        for call in (attention.check_version, lambda: patch(torch.nn.Linear(2, 2), rope()), lambda: transformers.patch):
            with pytest.raises(ImportError, match=f"transformers: expected version 5 or later, got {said}; pip install -U"):
                call()
    else:
        attention.check_version()


# In and out


@pytest.mark.parametrize("name", ["angles-a-head", "t5", "basis-of-key-heads"])
@torch.no_grad()
def test_a_folder_of_several_files_is_read_whole_and_with_options(hf, tmp_path, model, name):
    patch(model, scheme_of(name)).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again, info = load(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert logits(again, tokens()).equal(logits(model, tokens()))
    assert load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    whole = {name: value for name, value in model.state_dict().items() if "scheme" in name}
    assert whole
    assert all(value.equal(again.state_dict()[name]) for name, value in whole.items())


@pytest.mark.parametrize("name", ["angles-a-head", "t5"])
@torch.no_grad()
def test_a_base_that_was_saved_is_loaded_under_a_head(hf, tmp_path, model, name):
    base = model.model
    patch(base, scheme_of(name)).save_pretrained(tmp_path)
    again = load(tmp_path, hf.LlamaForCausalLM)
    assert type(again) is hf.LlamaForCausalLM
    assert again.model(tokens())[0].equal(base(tokens())[0])


def test_a_scheme_of_the_user_s_is_found_by_its_module(own):
    own("toy_encoding")
    scheme = isopos.schemes.REGISTRY["mirror"](HEAD_DIM, HEADS, seed=3, attention="softmax")
    entry = saving.scheme_entry(scheme)
    assert entry["scheme"] == "toy_encoding.mirror"
    again = saving.rebuilt(json.loads(json.dumps(entry)))
    assert again.fingerprint == scheme.fingerprint
