"""Test tiny random models of transformers with schemes of isopos. Importing transformers takes seconds."""

import copy
import gc
import json
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import softmax_by_definition

import isopos
from isopos import schemes
from isopos.encodings import Rotary
from isopos.integrations import transformers
from isopos.integrations.transformers import attention, evaluated, patching
from isopos.integrations.transformers.patching import load, patch, patched, unpatch  # without transformers as yet

pytestmark = pytest.mark.oracles
VOCABULARY, HEAD_DIM, HEADS, KEY_HEADS, LENGTH = 50, 16, 4, 2, 12
SIZES = {"vocab_size": VOCABULARY, "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 256, "use_cache": True}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": HEAD_DIM, "hidden_size": 48},  # which is not what all heads have together
    "Mistral": {"sliding_window": None},
    "Gemma": {"head_dim": HEAD_DIM, "tie_word_embeddings": False},
    "GPTNeoX": {"num_key_value_heads": None},
}
ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)
OURS = {  # what no cosines and sines can express, with the heads that it is built for
    "alibi": (isopos.alibi, HEADS, {}),
    "alibi-of-key-heads": (isopos.alibi, KEY_HEADS, {}),
    "t5": (isopos.t5, HEADS, {"bidirectional": False}),
    "shaw": (isopos.shaw, HEADS, {"reach": 3}),
    "deberta": (isopos.deberta, HEADS, {"buckets": 8}),
    "transformer-xl": (isopos.transformer_xl, HEADS, {}),
    "horn-clipped": (isopos.horn_clipped, HEADS, {}),
    "angles-a-head": (isopos.rope, HEADS, {"learned": True}),
    "basis-of-key-heads": (isopos.lrpe_orthogonal, KEY_HEADS, {}),
    "exponential": (isopos.ape_sequence, HEADS, {}),
    "locality": (isopos.ape_sequence, HEADS, {"locality": 0.9}),
    "ring": (isopos.ape_ring, HEADS, {"period": 32}),
    "permutation": (isopos.permuteformer, KEY_HEADS, {}),
    "retnet": (isopos.retnet, HEADS, {}),
    "xpos": (isopos.xpos, None, {}),
    "scale": (isopos.rope, None, {"scale": 0.2}),
}
ALL_OURS = pytest.mark.parametrize("name", OURS)


def make(hf, family="Llama", **options):
    torch.manual_seed(0)
    sizes = SIZES | FAMILIES[family] | options
    config = getattr(hf, f"{family}Config")(**{name: value for name, value in sizes.items() if value is not None})
    model = getattr(hf, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # so that attention matters to what is generated
            weight.mul_(8 if weight.ndim == 2 and weight.requires_grad else 1)
        for weight in model.parameters():  # biases begin at 0, and gains at 1
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.fixture
def model(hf):
    return make(hf)


def scheme_of(name):
    function, heads, options = OURS[name]
    scheme = function(HEAD_DIM, heads, attention="softmax", **options)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return scheme


def rope(**options):
    return isopos.rope(HEAD_DIM, attention="softmax", **options)


def neox_rope():
    return rope(rotary_dim=HEAD_DIM // 4)  # what its configuration has by default


def tokens(batch=2, length=LENGTH):
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids, **options):
    return model(input_ids=ids, **options).logits


def generated(model, ids, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)


def close(actual, expected, atol=2e-4):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol * max(1, expected.abs().max().item()))


def everything(model):
    """Everything that a patch could leave behind: modules, attributes and the configuration."""
    found = {name: id(module) for name, module in model.named_modules()}
    found |= {name: {*vars(module)} for name, module in model.named_modules()}
    return found, [*model.state_dict()], id(model.config), model.config.to_dict(), model.config._attn_implementation


# Cosines and sines


@pytest.mark.parametrize(("family", "implementation"), [("Llama", "eager"), *((family, "sdpa") for family in FAMILIES)])
def test_rope_patched_in_is_the_original(hf, family, implementation):
    model, ids = make(hf, family, attn_implementation=implementation), tokens()
    before = model(ids)
    patch(model, neox_rope() if family == "GPTNeoX" else rope())
    after = model(ids)
    close(after.logits, before.logits, 3e-6)
    for new, old in zip(after.past_key_values.layers, before.past_key_values.layers, strict=True):
        close(new.keys, old.keys, 1e-6)  # rotated ahead of the cache, as the model's own
    assert model.config._attn_implementation == implementation


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 5},
    "no-cache": {"use_cache": False},
}


GENERATED = [*(("Llama", way) for way in WAYS), *((family, "static") for family in FAMILIES if family != "Llama")]


@pytest.mark.parametrize(("family", "way"), GENERATED)
def test_rope_generates_what_the_original_does(hf, family, way):
    model, ids = make(hf, family), tokens(3)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = generated(model, ids, attention_mask=mask, **WAYS[way])
    assert len(expected[:, LENGTH:].unique()) > 3
    with patched(model, neox_rope() if family == "GPTNeoX" else rope()):
        assert generated(model, ids, attention_mask=mask, **WAYS[way]).equal(expected)


def test_layouts_are_the_models_own(model):
    ids = tokens()
    with patched(model, rope(layout="half")):
        half = logits(model, ids)
    with patched(model, rope()):
        assert logits(model, ids).equal(half)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_partial_rotation_rotates_the_models_first_pairs(hf, family):
    model, x = make(hf, family), torch.arange(5)[None]
    scheme = rope(rotary_dim=4)
    with patched(model, scheme):
        cos, sin = model.base_model.rotary_emb(torch.zeros(1, 5, 1), x)
    assert cos.shape == sin.shape == (1, 5, 4 if family == "GPTNeoX" else HEAD_DIM)
    angles = x[0, :, None] * torch.tensor([1, 0.01])
    half = cos.shape[-1] // 2
    for start in (0, half):
        close(cos[0, :, start : start + 2], angles.cos(), 1e-6)
        close(sin[0, :, start : start + 2], angles.sin(), 1e-6)
        assert (cos[0, :, start + 2 : start + half] == 1).all()
        assert (sin[0, :, start + 2 : start + half] == 0).all()


def test_no_positions_at_all(hf):
    model, ids = make(hf, num_hidden_layers=1), tokens(1)  # a second one knows how many tokens a first saw
    patch(model, isopos.none(HEAD_DIM, HEADS, attention="softmax"))
    swapped = ids[:, [3, 1, 2, 0, *range(4, LENGTH)]]
    close(logits(model, swapped)[:, -1], logits(model, ids)[:, -1])


def test_angles_far_away_are_exact(model):
    """The original's angles are 32-bit products, wrong by up to 0.24 at position 10^7."""
    far = torch.tensor([[10**7 + 1]])
    patch(model, rope())
    cos, _ = model.base_model.rotary_emb(torch.zeros(1, 1, 1), far)
    exact = (far.double() * 10000.0 ** -(torch.arange(8).double() / 8)).cos()
    close(cos[0, :, :8].double(), exact, 1e-7)


# Our attention


def projected(layer, x):
    """Queries, keys and values ``[b h t d]`` of a layer of any family, before positions are applied."""
    if hasattr(layer, "query_key_value"):
        return layer.query_key_value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1)
    q, k, v = (a(x).unflatten(-1, (-1, HEAD_DIM)) for a in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (layer.q_norm(q), layer.k_norm(k)) if hasattr(layer, "q_norm") else (q, k)
    return tuple(a.transpose(1, 2) for a in (q, k, v))


@torch.no_grad()
def as_defined(model, scheme, ids):
    """For each layer, the output of a patched model's attention, and the output by definition."""
    seen, hooks = [], []
    name = "attention" if hasattr(model.base_model.layers[0], "attention") else "self_attn"
    for layer in model.base_model.layers:
        hook = lambda module, args, options, out: seen.append((module, args, options, out))  # noqa: E731
        hooks.append(getattr(layer, name).register_forward_hook(hook, with_kwargs=True))
    logits(model, ids)
    for hook in hooks:
        hook.remove()
    at = scheme.at(isopos.sequence(ids.shape[1]), isopos.sequence(ids.shape[1]), dtype=torch.float64)
    for layer, args, options, out in seen:
        q, k, v = (a.double() for a in projected(layer, options.get("hidden_states", *args[:1])))
        k, v = (a.repeat_interleave(HEADS // a.shape[1], 1) for a in (k, v))
        if scheme.heads not in (1, HEADS):
            parts = [
                softmax_by_definition(
                    *(a[:, [h]] for a in (q, k, v)), causal=True, **of_head(at, h // (HEADS // scheme.heads))
                )
                for h in range(HEADS)
            ]
            y = torch.cat(parts, 1)
        else:
            y = softmax_by_definition(q, k, v, causal=True, **at)
        yield out[0], (layer.o_proj if hasattr(layer, "o_proj") else layer.dense)(y.transpose(1, 2).flatten(2).float())


def of_head(at, head):
    """Arguments of a scheme for one of its heads."""
    place = isopos.ops.slices.Slices((), slice(head, head + 1), slice(None))
    found = dict(at)
    found["isometry"] = tuple(rho.part(place) for rho in at["isometry"])
    if at["decay"] is not None:
        found["decay"] = tuple(g[..., head : head + 1, :] for g in at["decay"])
    return found


@ALL_OURS
def test_attention_of_a_scheme_is_what_is_defined(model, name):
    scheme = scheme_of(name)
    patch(model, scheme)
    assert model.config._attn_implementation == attention.ATTENTION
    for found, expected in as_defined(model, scheme, tokens()):
        close(found, expected, 1e-5)


@ALL_FAMILIES
def test_attention_of_every_family_is_what_is_defined(hf, family):
    model, scheme = make(hf, family), scheme_of("deberta")
    patch(model, scheme)
    for found, expected in as_defined(model, scheme, tokens()):
        close(found, expected, 1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["alibi", "t5", "permutation"])
def test_generation_is_that_of_whole_sequences(model, name, way):
    patch(model, scheme_of(name))
    ids = tokens(3)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    found = generated(model, ids, attention_mask=mask, **WAYS[way])
    beams = WAYS[way].get("num_beams", 1)
    assert found.equal(generated(model, ids, attention_mask=mask, num_beams=beams, use_cache=False))
    alone = generated(model, ids[1:2, 4:], num_beams=beams)
    assert found[1, LENGTH:].equal(alone[0, LENGTH - 4 :])


def test_positions_differ_from_token_to_token(model):
    """Cached keys keep their positions, also positions that a model never counts."""
    scheme, ids = scheme_of("alibi"), tokens(1)
    patch(model, scheme)
    places = torch.arange(LENGTH)[None] * 3
    whole = logits(model, ids, position_ids=places)
    assert (whole - logits(model, ids)).abs().max() > 0.1
    first = model(ids[:, :7], position_ids=places[:, :7], use_cache=True)
    rest = model(ids[:, 7:], position_ids=places[:, 7:], past_key_values=first.past_key_values)
    close(rest.logits, whole[:, 7:])


def test_what_caches_do_with_keys_they_do_with_positions(model):
    patch(model, scheme_of("t5"))
    ids = tokens(2)
    starts = torch.tensor([[0], [40]]) + torch.arange(LENGTH) * torch.tensor([[1], [2]])
    expected = logits(model, ids, position_ids=starts)
    cache = model(ids[:, :9], position_ids=starts[:, :9], use_cache=True).past_key_values
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))  # both samples, in their order again
    found = model(ids[:, 7:], position_ids=starts[:, 7:], past_key_values=cache).logits
    close(found, expected[:, 7:])


@pytest.mark.parametrize("way", ["greedy", "static", "chunks"])
def test_windows_of_a_model_stay(hf, way):
    model, ids = make(hf, "Mistral", sliding_window=4), tokens(1)
    patch(model, scheme_of("alibi"))
    far = ids.clone()
    far[:, :3] = far[:, :3] % (VOCABULARY - 1) + 1
    assert logits(model, ids)[:, -1].equal(logits(model, far)[:, -1])  # two layers see 7 tokens
    assert generated(model, ids, **WAYS[way]).equal(generated(model, ids, use_cache=False))


def test_packed_sequences_do_not_see_each_other(model):
    patch(model, scheme_of("t5"))
    first, second = tokens(1, 5), tokens(1, 7)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    packed = logits(model, torch.cat((first, second), 1), position_ids=positions, use_cache=False)
    close(packed, torch.cat((logits(model, first), logits(model, second)), 1))


def test_a_mask_that_is_lost_is_an_error(hf, model, monkeypatch):
    patch(model, scheme_of("alibi"))
    monkeypatch.delitem(hf.AttentionMaskInterface._global_mapping, attention.ATTENTION)
    with pytest.raises(ValueError, match=r"attention_mask: expected .* got none"):
        logits(model, tokens(), attention_mask=torch.ones(2, LENGTH))


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_pairs_takes_part(model, additive):
    patch(model, scheme_of("alibi"))
    ids = tokens(1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    whole = logits(model, ids)
    for hidden in (False, True):
        mask[..., 1:, 0] = not hidden
        given = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if additive else mask
        found = logits(model, ids, attention_mask=given)
        assert torch.allclose(found, whole, atol=1e-3) is not hidden


def test_another_attention_is_refused_while_the_scheme_is_in(hf, model):
    patch(model, scheme_of("alibi"))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation: expected 'isopos' .* got 'sdpa'"):
        logits(model, tokens())
    unpatch(model)
    logits(model, tokens())
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = hf.BertModel(hf.BertConfig(vocab_size=9, **sizes)).eval()
    vit = hf.ViTModel(hf.ViTConfig(image_size=8, patch_size=4, **sizes)).eval()
    for other, scheme, inputs in (
        (bert, isopos.alibi(16, 2, attention="softmax"), torch.zeros(1, 4, dtype=torch.int64)),
        (vit, isopos.rope_axial(16, 2, attention="softmax"), torch.zeros(1, 3, 8, 8)),
    ):
        patch(other, scheme)(inputs)
        other.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match=r"attn_implementation: expected 'isopos' .* got 'sdpa'"):
            other(inputs)


def test_models_that_share_a_configuration_have_schemes_of_their_own(hf, model):
    first, second = (hf.LlamaForCausalLM(model.config).eval() for _ in range(2))
    assert first.config is second.config is model.config
    ids = tokens()
    before, expected = everything(model), logits(model, ids)
    patch(first, scheme_of("alibi"))
    patch(second, scheme_of("t5"))
    assert logits(model, ids).equal(expected)
    assert everything(model) == before
    assert [a.config.isopos["scheme"] for a in (first, second)] == ["alibi", "t5"]
    unpatch(first)
    assert first.config is model.config


class Kept:
    """A cache of one layer that starts empty."""

    def update(self, keys, values, layer):
        return keys, values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_positions_are_exact_in_every_dtype(dtype):
    ids = torch.tensor([[-(2**31), -300, -1, 0, 1, 255, 256, 257, 4097, 2**31 - 1]])

    x = torch.randn(1, 2, ids.shape[1], HEAD_DIM, dtype=dtype)
    positions = torch.stack((ids, ids.flip(1)), -1)
    cache = evaluated.Written(Kept(), evaluated.digits_of(positions, dtype))
    keys, _ = cache.update(x, x, 0)
    assert keys[..., :HEAD_DIM].equal(x)
    assert evaluated.positions_of(keys[:, 1, :, HEAD_DIM:]).equal(positions)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("change", "got"), [(0.25, "rounded"), (1, "others")])
def test_a_cache_that_rounds_or_differs_from_layer_to_layer_is_refused(model, layer, change, got):
    patch(model, scheme_of("alibi"))
    cache = model(tokens(), use_cache=True).past_key_values
    cache.layers[layer].keys[:, :, 3, -1] += change  # the digits of a position
    said = "past_key_values: expected a cache that keeps keys as they are, of the same tokens in layers with one mask, got"
    with pytest.raises(RuntimeError, match=f"{said} {got if layer == 0 and change < 1 else 'others'}"):
        model(tokens()[:, :1], past_key_values=cache)


def test_as_many_keys_as_queries_are_where_these_are():
    scheme, x, ids = scheme_of("alibi"), torch.randn(1, HEADS, 3, HEAD_DIM), torch.arange(3)[None]
    digits = evaluated.digits_of(ids[..., None], x.dtype)
    pass_ = evaluated.Evaluated(scheme, ids[..., None], x, digits)
    same, key = (torch.cat((x, (digits + far)[:, None].expand(-1, HEADS, -1, -1)), -1) for far in (0, 1))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    assert pass_(x, same, mask)[0].equal(x)
    with pytest.raises(RuntimeError, match=r"past_key_values: expected .* of the same tokens .* got others"):
        pass_(x, key, mask)


# Encoders


def encoder(hf, family, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    images = family in TOKENS_AHEAD
    sizes |= {"image_size": 16, "patch_size": 4} if images else {"vocab_size": VOCABULARY}
    config = getattr(hf, f"{family}Config")(**sizes | options)
    head = "CausalLM" if options.get("is_decoder") and family == "RoFormer" else "MaskedLM"
    model = getattr(hf, f"{family}Model" if images else f"{family}For{head}")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim == 2 and weight.requires_grad else 1)
    return model


@torch.no_grad()
def encoded(model, scheme, x, *given, **options):
    """For each attention of a patched encoder, its output, and the output by definition at positions x ``[t c]``."""
    seen, hooks = [], []
    for module in model.modules():
        if type(module).__name__ in ("BertSelfAttention", *(f"{family}Attention" for family in TOKENS_AHEAD)):
            hook = lambda module, args, options, out: seen.append((module, args[0], out[0]))  # noqa: E731
            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    model(*given, **options)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    for layer, hidden, out in seen:
        names = ("q_proj", "k_proj", "v_proj") if hasattr(layer, "q_proj") else ("query", "key", "value")
        split = (getattr(layer, name)(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2).double() for name in names)
        y = softmax_by_definition(*split, **scheme.at(x, x, dtype=torch.float64)).transpose(1, 2).flatten(2).float()
        yield out, layer.o_proj(y) if hasattr(layer, "o_proj") else y


ENCODERS = {
    "rope": lambda: rope(),
    "alibi": lambda: isopos.alibi(HEAD_DIM, HEADS, attention="softmax"),
    "t5": lambda: isopos.t5(HEAD_DIM, HEADS, attention="softmax"),
    "permutation": lambda: isopos.permuteformer(HEAD_DIM, HEADS, attention="softmax"),
    "clipped": lambda: isopos.horn_clipped(HEAD_DIM, HEADS, attention="softmax", outside=1),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_bert_sees_positions_through_its_scheme_alone(hf, name):
    model, scheme, ids = encoder(hf, "Bert"), ENCODERS[name](), tokens()
    patch(model, scheme)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(torch.randn_like(parameter))
    for found, expected in encoded(model, scheme, isopos.sequence(LENGTH), ids):
        close(found, expected, 1e-5)
    places = torch.arange(LENGTH)[None]
    if name != "clipped":
        close(logits(model, ids, position_ids=places + 300), logits(model, ids))
    assert (logits(model, ids, position_ids=places.flip(1)) - logits(model, ids)).abs().max() > 0.01 or name == "alibi"
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    close(logits(model, ids, attention_mask=mask)[:, :8], logits(model, ids[:, :8]))


def test_the_encoder_of_bert_may_be_called_by_itself(hf):
    """Also with features by name; a layer called alone has no scheme, which is an error."""
    bert, ids = encoder(hf, "Bert").bert, tokens()
    patch(bert, ENCODERS["t5"]())
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    with torch.no_grad():
        expected, features = bert(ids).last_hidden_state, bert.embeddings(ids)
        close(bert.encoder(hidden_states=features, attention_mask=mask).last_hidden_state, expected)
        with pytest.raises(ValueError, match=r"got a model as it was loaded, .* or one layer by itself of BERT"):
            bert.encoder.layer[0](features, mask)


def test_bert_without_positions_or_with_those_that_a_scheme_adds(hf):
    model, ids = encoder(hf, "Bert"), tokens()
    order, implementation = torch.randperm(LENGTH), model.config._attn_implementation
    before = everything(model)
    with patched(model, isopos.none(HEAD_DIM, HEADS, attention="softmax")):
        close(logits(model, ids[:, order]), logits(model, ids)[:, order])
        assert model.config._attn_implementation == implementation
    scheme = isopos.learned(HEAD_DIM, HEADS, attention="softmax", length=20)
    with patched(model, scheme):
        out = model.bert.embeddings.position_embeddings(torch.arange(3)[None])
        assert out.equal(scheme.embedding.weight[None, :3])
        assert (logits(model, ids[:, order]) - logits(model, ids)[:, order]).abs().max() > 0.1
        model(ids, labels=ids).loss.backward()
        assert scheme.embedding.weight.grad[:LENGTH].ne(0).any(-1).all()
    assert everything(model) == before


def test_roformer_with_rope_is_the_original(hf):
    model, ids = encoder(hf, "RoFormer"), tokens()
    before, expected = everything(model), logits(model, ids)
    for layout in ("interleaved", "half"):
        with patched(model, rope(layout=layout)):
            close(logits(model, ids), expected, 1e-6)
    with patched(model, rope(base=100.0)):
        assert (logits(model, ids) - expected).abs().max() > 0.1
    with pytest.raises(ValueError, match=r"scheme: expected one that rotates pairs .* for RoFormer"):
        patch(model, scheme_of("alibi"))
    assert everything(model) == before


@torch.no_grad()
def test_roformer_as_a_decoder_goes_on_from_its_cache(hf):
    model, ids = encoder(hf, "RoFormer", is_decoder=True), tokens()
    with patched(model, rope(base=100.0)):
        first = model(ids[:, :5], use_cache=True)
        close(logits(model, ids[:, 5:], past_key_values=first.past_key_values), logits(model, ids)[:, 5:])


TOKENS_AHEAD = {"ViT": 1, "DeiT": 2, "IJepa": 0, "Dinov2WithRegisters": 5}
GRIDS = {
    "grid": lambda: isopos.ape_grid(HEAD_DIM, HEADS, attention="softmax"),
    "grid-locality": lambda: isopos.ape_grid(HEAD_DIM, HEADS, attention="softmax", locality=0.9),
    "grid-permutation": lambda: isopos.permuteformer_2d(HEAD_DIM, HEADS, attention="softmax"),
    "line": lambda: rope(),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize(("family", "rows"), [("ViT", 4), ("ViT", 5), *((family, 4) for family in TOKENS_AHEAD)])
def test_vit_has_patches_on_a_grid_of_any_size_and_other_tokens_at_its_origin(hf, name, family, rows):
    model, scheme, ahead = encoder(hf, family), GRIDS[name](), TOKENS_AHEAD[family]
    before = everything(model)
    patch(model, scheme)
    places = [(0, 0)] * ahead + [(i + 1, j + 1) for i in range(rows) for j in range(4)]
    line = [0] * ahead + [*range(1, 4 * rows + 1)]
    x = torch.tensor(line)[:, None] if name == "line" else torch.tensor(places)
    images, larger = torch.randn(2, 3, 4 * rows, 16), {"interpolate_pos_encoding": True} if rows != 4 else {}
    for found, expected in encoded(model, scheme, x, images, **larger):
        close(found, expected, 1e-5)
    assert everything(unpatch(model)) == before


def test_what_encoders_refuse(hf):
    bert, vit = encoder(hf, "Bert"), encoder(hf, "ViT")
    for model, scheme, said in (
        (bert, isopos.ape_grid(HEAD_DIM, HEADS, attention="softmax"), "line or ring"),
        (bert, isopos.learned(HEAD_DIM, HEADS, attention="softmax", model_dim=8), "embedding of 64 features, got 8"),
        (vit, isopos.ape_tree(HEAD_DIM, HEADS, attention="softmax"), "grid of two axes, or on a line"),
        (vit, isopos.learned(HEAD_DIM, HEADS, attention="softmax"), "acts in attention"),
        (vit, isopos.horn_clipped(HEAD_DIM, HEADS, attention="softmax", outside=2), "outside=1 at most, got 2"),
    ):
        before = everything(model)
        with pytest.raises(ValueError, match=f"^scheme: expected .*{said}"):
            patch(model, scheme)
        assert everything(model) == before
    with pytest.raises(ValueError, match=r"model: expected BERT as an encoder, got is_decoder=True"):
        patch(encoder(hf, "Bert", is_decoder=True), rope())
    with pytest.raises(ValueError, match=r"scheme: expected attention='softmax', since"):
        patch(encoder(hf, "Bert", is_decoder=True), isopos.rope(8))


@pytest.mark.parametrize(
    ("family", "got"),
    [("ViTMAE", "noise, by which patches are left out"), ("Vivit", "VivitTubeletEmbeddings"), ("Yolos", "detection_tokens")],
)
def test_patches_whose_place_is_not_known_are_refused(hf, family, got):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    side = [16, 16] if family == "Yolos" else 16
    model = getattr(hf, f"{family}Model")(getattr(hf, f"{family}Config")(image_size=side, **sizes))
    before = everything(model)
    with pytest.raises(ValueError, match=rf"model: expected class tokens and registers, then all patches .*{got}"):
        patch(model, GRIDS["grid"]())
    assert everything(model) == before


@pytest.mark.parametrize(
    ("family", "sizes", "options", "said"),
    [
        ("StableLm", {}, {}, "StableLmDecoderLayer passes no further arguments to attention"),
        ("Nemotron", {}, {}, "NemotronDecoderLayer passes no further arguments to attention"),
        *(
            (
                "DeepseekV3",
                {"qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": size, "q_lora_rank": 8, "kv_lora_rank": 8},
                {},
                "queries, keys and values of DeepseekV3Attention have other sizes than 16",
            )
            for size in (8, 24)
        ),
        ("DiffLlama", {}, {"attention": "linear"}, "DiffLlamaAttention attends several times, got linear"),
        ("NomicBert", {}, {"attention": "linear"}, "attention in both directions, got linear"),
    ],
)
def test_layers_that_our_attention_does_not_reach_are_refused(hf, family, sizes, options, said):
    sizes = {"hidden_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM} | sizes
    sizes |= {"intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    model = getattr(hf, f"{family}Model")(getattr(hf, f"{family}Config")(**sizes))
    before, scheme = everything(model), isopos.permuteformer(HEAD_DIM, HEADS, **({"attention": "softmax"} | options))
    with pytest.raises(ValueError, match=f"scheme: expected .*{said}"):
        patch(model, scheme)
    assert everything(model) == before


# Once for all layers


LAYERS = 4


def deep(hf, family="Llama", **options):
    if family in FAMILIES:
        return make(hf, family, num_hidden_layers=LAYERS, **options)
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return encoder(hf, family, num_hidden_layers=LAYERS, **dropouts)


@pytest.fixture
def count(monkeypatch):
    """Number of evaluations of schemes since the last call."""
    calls, at = [], schemes.Scheme.at
    monkeypatch.setattr(schemes.Scheme, "at", lambda *args, **options: calls.append(0) or at(*args, **options))

    def since():
        found = len(calls)
        calls.clear()
        return found

    return since


def each_for_itself(monkeypatch):
    """Every layer evaluates the scheme by itself."""
    evaluate = evaluated.Evaluated._evaluate
    monkeypatch.setattr(evaluated.Evaluated, "_at", lambda self, *args: evaluate(self, *args).at)


@pytest.mark.parametrize("gradients", [False, True])
@ALL_FAMILIES
def test_a_decoder_evaluates_its_scheme_once_a_forward(hf, count, family, gradients):
    model, ids = patch(deep(hf, family), isopos.t5(HEAD_DIM, HEADS, attention="softmax", bidirectional=False)), tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.set_grad_enabled(gradients):
        model(ids, attention_mask=mask, use_cache=False)
        assert count() == 1
        cache = model(ids[:, :8], attention_mask=mask[:, :8]).past_key_values
        assert count() == 1
        for part in ids[:, 8:].split([1, 3], 1):
            model(part, past_key_values=cache)
            assert count() == (1 + LAYERS if gradients else 1)  # ahead, and what each layer learns of cached keys
    model.requires_grad_(False)
    model(ids[:, :2], past_key_values=cache)
    assert count() == 2  # ahead, and of cached keys


@pytest.mark.parametrize("way", [way for way in WAYS if way != "beams"])
def test_generation_evaluates_once_a_forward(hf, count, way):
    model, forwards = patch(deep(hf), scheme_of("alibi")), []
    model.model.register_forward_hook(lambda *args: forwards.append(0))
    generated(model, tokens(), **WAYS[way])
    assert count() == len(forwards) > 4


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("family", ["Bert", "ViT"])
def test_an_encoder_evaluates_its_scheme_once_a_forward(hf, count, family, gradients):
    scheme = GRIDS["grid"]() if family == "ViT" else scheme_of("angles-a-head")
    model = patch(deep(hf, family), scheme)
    with torch.set_grad_enabled(gradients):
        model(torch.randn(2, 3, 16, 16) if family == "ViT" else tokens())
    assert count() == 1


def test_cosines_and_sines_are_made_once_a_forward(hf):
    for family in ("Llama", "RoFormer"):
        scheme, calls = rope(), []
        scheme.encoding.register_forward_hook(lambda *args, calls=calls: calls.append(0))
        patch(deep(hf, family), scheme)(tokens())
        assert len(calls) == 1


def test_layers_of_two_kinds_evaluate_once_a_kind(hf, count):
    """Layers with a window and layers without have different cached keys."""
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 4}
    model, ids, found = patch(deep(hf, "Qwen2", **kinds), scheme_of("t5")), tokens(), []
    whole = logits(model, ids)
    assert count() == 1
    cache = None
    with torch.no_grad():
        for n, part in enumerate(ids.split([7, 1, 1, 3], 1)):
            out = model(part, past_key_values=cache, use_cache=True)
            cache, found = out.past_key_values, [*found, out.logits]
            assert count() == (2 if n else 1)
    close(torch.cat(found, 1), whole)


@ALL_OURS
def test_what_layers_share_is_what_each_has(hf, monkeypatch, name):
    model, ids = patch(deep(hf), scheme_of(name)), tokens()
    places = torch.cat((torch.arange(5), torch.arange(7)))[None]

    def found():
        with torch.no_grad():
            cache = model(ids[:, :7], use_cache=True).past_key_values
            return (
                logits(model, ids),
                logits(model, ids, position_ids=places),
                logits(model, ids[:, 7:], past_key_values=cache),
            )

    shared = found()
    each_for_itself(monkeypatch)
    for one, other in zip(shared, found(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_gradients_through_what_layers_share_are_those_of_each(hf, monkeypatch, count, family, reentrant):
    model, scheme, ids = deep(hf, family), scheme_of("angles-a-head"), tokens()
    patch(model, scheme).train()
    model.config.use_cache = False
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    shared, times = gradients(), count()
    assert (scheme.encoding.frequency.grad != 0).all(-1).all()
    assert times == (1 + LAYERS if reentrant else 1)  # a reentrant one cannot share a graph
    each_for_itself(monkeypatch)
    for one, other in zip(shared, gradients(), strict=True):
        close(one, other, 1e-5)


def test_nothing_is_kept_after_a_forward_and_its_graph(hf, monkeypatch):
    made, begin = [], evaluated.Evaluated.__init__
    monkeypatch.setattr(
        evaluated.Evaluated,
        "__init__",
        lambda self, *args, **named: made.append(weakref.ref(self)) or begin(self, *args, **named),
    )
    for family in ("Llama", "Bert"):
        model, scheme, ids = deep(hf, family), scheme_of("angles-a-head"), tokens()
        patch(model, scheme)
        before = logits(model, ids)
        assert [one() for one in made] == [None]
        model.train()
        model.config.use_cache = False
        model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gc.collect()
        assert [one() for one in made] == [None, None]
        made.clear()
        with torch.no_grad():
            scheme.encoding.frequency.mul_(1.5)
        after = logits(model.eval(), ids)
        assert (after - before).abs().max() > 0.01
        assert logits(patch(unpatch(model), scheme), ids).equal(after)
        made.clear()


def test_forwards_in_several_threads_share_nothing(hf):
    model = patch(deep(hf), scheme_of("t5"))
    inputs = [tokens(1, length) for length in (3, 5, 9, 12)] * 4
    expected = [logits(model, ids) for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(lambda ids: logits(model, ids), inputs), expected, strict=True):
            assert found.equal(one)


@torch.no_grad()
def test_each_dtype_and_device_has_its_own():
    scheme, x = isopos.alibi(HEAD_DIM, HEADS, attention="softmax"), torch.randn(1, HEADS, 3, HEAD_DIM)
    pass_, mask = evaluated.Evaluated(scheme, torch.arange(3)[None, :, None], x), torch.ones(1, 1, 3, 3)
    found = {kind: pass_(one, one, mask)[1] for kind, one in {"": x, "meta": x.to("meta")}.items()}
    for kind, one in {"": x, "meta": x.to("meta")}.items():
        assert pass_(one, one, mask)[1] is found[kind]
        assert found[kind]["decay"].device == one.device
    scheme = rope()
    pass_ = evaluated.Evaluated(scheme, torch.arange(3)[None, :, None], x)
    for one in (x, x.double(), x.bfloat16()):
        table = pass_(one, one, mask)[1]["isometry"].table
        assert table.dtype == torch.promote_types(one.dtype, torch.float32)


# Training


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_reach_what_a_scheme_learns(model, shared, checkpointing):
    scheme, ids = isopos.rope(HEAD_DIM, None if shared else HEADS, learned=True, attention="softmax"), tokens()
    patch(model, scheme)
    assert any(parameter is scheme.encoding.frequency for parameter in model.parameters())
    model(ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    assert (scheme.encoding.frequency.grad != 0).all(-1).all()
    model.zero_grad()
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for parameter, old in zip(model.parameters(), expected, strict=True):
        close(parameter.grad, old, 1e-4)


def test_compilation_of_the_whole_graph(model):
    ids = tokens()
    for scheme in (rope(), scheme_of("alibi"), scheme_of("permutation")):
        with patched(model, scheme):
            torch._dynamo.reset()
            close(torch.compile(model, backend="eager", fullgraph=True)(ids).logits, logits(model, ids), 1e-6)


def test_compilation_of_checkpointed_layers(model):
    ids, scheme = tokens(), scheme_of("angles-a-head")
    patch(model, scheme).train()
    model.config.use_cache = False
    model.activation_checkpointing_enable()
    found = []
    for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
        scheme.zero_grad()
        run(ids).logits.square().mean().backward()
        found.append(scheme.encoding.frequency.grad)
    close(*found, 1e-4)


# In and out


@pytest.mark.parametrize("name", [None, "alibi", "angles-a-head"])
def test_unpatching_restores_everything(model, name):
    ids, before = tokens(), everything(model)
    expected = logits(model, ids)
    with patched(model, rope() if name is None else scheme_of(name)) as same:
        assert same is model
        assert everything(model) != before
    assert everything(model) == before
    assert logits(model, ids).equal(expected)
    with pytest.raises(RuntimeError, match="of the block"), patched(model, scheme_of("alibi")):
        raise RuntimeError("of the block")
    assert everything(unpatch(model)) == before


def test_what_changes_while_patched_stays(model, tmp_path):
    """The number of tokens, say, but nothing of the scheme, also in a model that was loaded with one."""
    patch(model, scheme_of("alibi")).save_pretrained(tmp_path / "scheme")
    model.resize_token_embeddings(VOCABULARY + 3)
    model.config.use_cache = False
    unpatch(model).save_pretrained(tmp_path / "plain")
    again = type(model).from_pretrained(tmp_path / "plain").eval()
    assert (again.config.vocab_size, again.config.use_cache) == (VOCABULARY + 3, False)
    assert logits(again, tokens()).equal(logits(model, tokens()))
    with patched(model, scheme_of("alibi")):
        model.config.pad_token_id = 7
    assert (model.config.pad_token_id, model.config._attn_implementation) == (7, again.config._attn_implementation)
    with patched(model, scheme_of("alibi")):
        unpatch(model)
    loaded = unpatch(load(tmp_path / "scheme"))
    assert not hasattr(loaded.config, "isopos")
    patch(loaded, rope(base=50.0))


@pytest.mark.parametrize("family", ["Bert", "ViT", "GPT2"])
def test_a_table_of_positions_is_kept_by_a_patch(hf, tmp_path, family):
    """In folders, for a model without the scheme, and in the model's dtype, after it was changed."""
    if family == "GPT2":
        sizes = {"n_embd": HEADS * HEAD_DIM, "n_layer": 1, "n_head": HEADS, "n_positions": 64, "vocab_size": VOCABULARY}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).eval()
    else:
        model = encoder(hf, family)
    inputs = torch.randn(1, 3, 16, 16) if family == "ViT" else tokens()
    first = lambda a: next(iter(a(inputs).values()))  # noqa: E731
    expected = first(model)
    axial = isopos.rope_axial(HEAD_DIM, attention="softmax")
    found = first(patch(model, axial if family == "ViT" else isopos.rope(HEAD_DIM, attention="softmax")))
    model.save_pretrained(tmp_path)
    other, information = type(model).from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not information["missing_keys"]
    close(first(other.eval()), expected, 1e-6)
    loaded = load(tmp_path).eval()
    assert first(loaded).equal(found)
    assert first(unpatch(loaded)).equal(expected)
    assert not found.equal(expected)
    inputs = inputs.bfloat16() if family == "ViT" else inputs
    assert first(unpatch(model.to(torch.bfloat16))).dtype == torch.bfloat16


@pytest.mark.parametrize("last", range(4))
def test_a_patch_that_fails_leaves_nothing(model, monkeypatch, last):
    before, made, count = everything(model), patching.Change.made, [0]

    def failing(change):
        if count[0] == last:
            monkeypatch.undo()
            raise KeyboardInterrupt
        count[0] += 1
        return made(change)

    monkeypatch.setattr(patching.Change, "made", failing)
    with pytest.raises(KeyboardInterrupt):
        patch(model, scheme_of("alibi"))
    assert count[0] == last
    assert everything(model) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_unpatched_alone(model, copied):
    ids = tokens()
    expected = logits(model, ids)
    patch(model, scheme_of("angles-a-head"))
    found, other = logits(model, ids), copied(model)
    assert logits(other, ids).equal(found)
    assert logits(unpatch(other), ids).equal(expected)
    assert logits(model, ids).equal(found)
    assert logits(unpatch(model), ids).equal(expected)


def test_heads_of_other_tasks(hf):
    config = hf.LlamaConfig(**SIZES, num_labels=3)
    model, ids = hf.LlamaForSequenceClassification(config).eval(), tokens()
    expected = logits(model, ids)
    with patched(model, rope()):
        close(logits(model, ids), expected, 1e-6)
    with patched(hf.LlamaModel(config), scheme_of("alibi")) as base:
        assert base(ids).last_hidden_state.shape == (2, LENGTH, HEADS * HEAD_DIM)


# Saving


def saved(hf, tmp_path, scheme, family="Llama"):
    """A patched model, and its saved folder."""
    model = make(hf, family)
    patch(model, scheme).save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


@pytest.mark.parametrize("name", [None, *OURS])
def test_a_folder_keeps_the_scheme_and_what_it_learned(hf, tmp_path, name):
    scheme = rope(base=500.0) if name is None else scheme_of(name)
    model, folder = saved(hf, tmp_path, scheme)
    entry = json.loads((folder / "config.json").read_text())["isopos"]
    assert (entry["scheme"], entry["options"]["head_dim"]) == (
        (OURS[name][0] if name else isopos.rope).__name__.replace("_", "-"),
        HEAD_DIM,
    )
    assert entry["fingerprint"] == scheme.fingerprint
    assert ("seed" in entry["options"]) == ("seed" in schemes.registry.options_of(entry["scheme"]))
    ids, expected = tokens(), logits(model, tokens())
    for again in (load(folder), patch(hf.AutoModelForCausalLM.from_pretrained(folder))):
        assert not again.training
        assert logits(again, ids).equal(expected)
        assert again.config._attn_implementation == model.config._attn_implementation
        assert again.base_model.rotary_emb.scheme.fingerprint == scheme.fingerprint


def test_encoders_and_bases_are_saved_too(hf, tmp_path):
    bert, vit = encoder(hf, "Bert"), encoder(hf, "ViT")
    patch(bert, isopos.learned(HEAD_DIM, HEADS, attention="softmax", length=20)).save_pretrained(tmp_path / "bert")
    assert logits(load(tmp_path / "bert"), tokens()).equal(logits(bert, tokens()))
    grid, images = isopos.ape_grid(HEAD_DIM, HEADS, attention="softmax"), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        [parameter.mul_(1.5) for parameter in patch(vit, grid).isopos.parameters()]
        assert [*vit.isopos.parameters()]
        vit.save_pretrained(tmp_path / "vit")
        found = load(tmp_path / "vit")(images).last_hidden_state
        assert found.equal(vit(images).last_hidden_state)
    model, folder = saved(hf, tmp_path, scheme_of("angles-a-head"))
    base = load(folder, hf.AutoModel)
    assert base(tokens()).last_hidden_state.equal(model.base_model(tokens()).last_hidden_state)


def test_a_loaded_model_does_not_run_with_other_positions(hf, tmp_path):
    model, folder = saved(hf, tmp_path, rope(base=500.0))
    loaded, ids = hf.AutoModelForCausalLM.from_pretrained(folder), tokens()
    with pytest.raises(ValueError, match=r"model: expected the scheme .*patch\(model\) puts it"):
        logits(loaded, ids)
    with patched(loaded):
        assert logits(loaded, ids).equal(logits(model, ids))
    with pytest.raises(ValueError, match=r"model: expected the scheme"):
        logits(loaded, ids)


def test_without_isopos_transformers_names_it(hf, tmp_path, monkeypatch):
    folder = saved(hf, tmp_path, rope())[1]
    monkeypatch.delitem(hf.AttentionInterface._global_mapping, attention.ATTENTION)
    with pytest.raises(ValueError, match='attn_implementation="isopos"` is not supported'):
        hf.AutoModelForCausalLM.from_pretrained(folder)


def test_another_fingerprint_is_refused(hf, tmp_path):
    folder = saved(hf, tmp_path, scheme_of("permutation"))[1]
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    before = everything(model)
    with pytest.raises(ValueError, match=r"scheme: expected that of the checkpoint, permuteformer with fingerprint"):
        patch(model, isopos.permuteformer(HEAD_DIM, KEY_HEADS, attention="softmax", seed=1))
    model.config.isopos["options"]["seed"] = 1
    with pytest.raises(ValueError, match=r"scheme: expected that of the checkpoint"):
        patch(model)
    del model.config.isopos["options"]["seed"]
    assert everything(model)[:3] == before[:3]
    del model.config.isopos
    patch(model, rope())
    with pytest.raises(ValueError, match="scheme: expected one, since the model's configuration names none, got none"):
        patch(make(hf))


def test_a_scheme_without_a_name_is_given_again(hf, tmp_path):
    def own(slope=0.5):
        decay = isopos.decays.Decay(torch.tensor([slope]))
        return schemes.Scheme(isopos.encodings.Identity(HEAD_DIM), 1, attention="softmax", decay=decay)

    model, folder = saved(hf, tmp_path, own())
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"has no name to find it by, got none; patch\(model, scheme\)"):
        patch(loaded)
    with pytest.raises(ValueError, match=r"expected that of the checkpoint, one without a name"):
        patch(loaded, own(0.25))
    assert logits(patch(loaded, own()), tokens()).equal(logits(model, tokens()))


def test_learned_values_that_are_gone_are_missed(hf, tmp_path):
    folder = saved(hf, tmp_path, scheme_of("t5"))[1]
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    before = everything(model)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"model: expected a folder with what its scheme has learned"):
        patch(model)
    assert everything(model) == before


# Bad input

SOFTMAX = {"attention": "softmax"}
REFUSED = {
    "line or ring, .* got Tree": lambda: isopos.ape_tree(HEAD_DIM, HEADS, **SOFTMAX),
    "line or ring, .* got Product": lambda: isopos.ape_grid(HEAD_DIM, HEADS, **SOFTMAX),
    "keeps the model's head size of 16, got a lift to 32": lambda: isopos.lrpe_unitary(HEAD_DIM, HEADS, **SOFTMAX),
    "head size of 16, got 8": lambda: isopos.rope(8, **SOFTMAX),
    "head size of 16, got 16 and projections 4 times as wide": lambda: isopos.schemes.Scheme(
        Rotary(torch.ones(1, 1, 32)), HEADS, width=4, **SOFTMAX
    ),
    "4 heads of queries or 2 of keys, got 8": lambda: isopos.alibi(HEAD_DIM, 8, **SOFTMAX),
    "acts in attention, got one that adds": lambda: isopos.sinusoidal(HEAD_DIM, HEADS, **SOFTMAX),
    "class tokens outside=0 at most, got 1": lambda: isopos.horn_clipped(HEAD_DIM, HEADS, outside=1, **SOFTMAX),
}


@pytest.mark.parametrize("said", REFUSED)
def test_schemes_that_a_model_cannot_take(model, said):
    before = everything(model)
    with pytest.raises(ValueError, match=f"^scheme: expected .*{said}"):
        patch(model, REFUSED[said]())
    assert everything(model) == before


def test_every_named_scheme_is_taken_or_refused(model):
    ids, taken = tokens(1, 4), []
    for name, function in schemes.REGISTRY.items():
        scheme = function(HEAD_DIM, HEADS, attention="softmax")
        try:
            patch(model, scheme)
        except ValueError as error:
            assert str(error).startswith("scheme: expected")  # noqa: PT017
            continue
        assert logits(model, ids).isfinite().all()
        unpatch(model)
        taken.append(name)
    assert {"none", "rope", "xpos", "lrpe-orthogonal", "permuteformer", "t5", "shaw", "deberta", "alibi"} < {*taken}


def test_models_that_it_does_not_know(hf, model):
    before = everything(model)
    with pytest.raises(TypeError, match="model: expected a PreTrainedModel of transformers, got Linear"):
        patch(torch.nn.Linear(2, 2), rope())
    with pytest.raises(TypeError, match=r"scheme: expected an isopos.Scheme, got Rotary"):
        patch(model, rope().encoding)
    patch(model, rope())
    for same in (model, model.base_model):
        with pytest.raises(ValueError, match=r"without a scheme .* unpatch\(model\) first"):
            patch(same, rope())
    assert everything(unpatch(model)) == before


def test_its_names_make_our_attention_known(hf, monkeypatch):
    monkeypatch.delitem(hf.AttentionInterface._global_mapping, attention.ATTENTION, raising=False)
    assert transformers.patch is patch
    assert attention.ATTENTION in hf.AttentionInterface._global_mapping
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        transformers.pach  # noqa: B018
