"""Test the isopos model as a model of transformers, with tiny random weights. Importing transformers takes seconds."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import save_model
from shards import on_ranks

import isopos as core
from isopos.integrations.transformers import model as own
from isopos.lab.recipes import Recipe
from isopos.models import Decoder
from isopos.state import State

pytestmark = pytest.mark.oracles
VOCABULARY, HEADS, LENGTH = 50, 4, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "pad_token_id": 0,
}
SCHEMES = {
    "rope": {},
    "rope-decay": {"decay": "retnet"},
    "rope-softmax": {"attention": "softmax"},
    "rope-favor": {"feature_map": "favor"},
    "retnet": {"original": True},
    "lrpe-unitary": {},
    "permuteformer": {},
    "horn-clipped": {},
    "horn-clipped-softmax": {"attention": "softmax"},
    "t5": {},
    "alibi": {"attention": "softmax"},
    "learned": {"length": 40},
}
ALL = pytest.mark.parametrize("name", SCHEMES)


def make(name="rope", **options):
    torch.manual_seed(0)
    scheme = name if name in core.CATALOG else name.rpartition("-")[0]
    model = own.IsoposForCausalLM(own.IsoposConfig(**SIZES | {"scheme": scheme, "scheme_options": SCHEMES[name]} | options))
    with torch.no_grad():
        for weight in model.parameters():  # so that attention matters to what is generated
            weight.mul_(3 if weight.ndim == 2 else 1)
    return model.eval()


def tokens(batch=3, length=LENGTH):
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def left(ids, count=4):
    """A mask without the second sample's first tokens."""
    mask = torch.ones_like(ids)
    mask[1, :count] = 0
    return mask


def close(actual, expected, atol=1e-4):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol * max(1, expected.abs().max().item()))


def test_shards_of_a_sequence_give_the_logits_of_the_whole(hf):
    model, ids = make(), tokens(1)
    own_models = [copy.deepcopy(model) for _ in range(2)]

    def member(group, rank):
        shard, part = own_models[rank], ids.chunk(2, 1)[rank]
        with torch.no_grad(), shard.decoder.over(group):
            with pytest.raises(ValueError, match="position_ids: expected those of the whole sequence"):
                shard(part, attention_mask=torch.ones_like(part), use_cache=False)
            return shard(part, use_cache=False).logits

    close(torch.cat(on_ranks(2, member), 1), model(ids, use_cache=False).logits, 1e-5)


@ALL
@torch.no_grad()
def test_it_is_the_decoder(hf, name):
    model, ids = make(name), tokens()
    assert model(ids, use_cache=False).logits.equal(model.decoder(ids))
    assert model(ids, use_cache=False, logits_to_keep=2).logits.equal(model.decoder(ids)[:, -2:])
    loss = torch.nn.functional.cross_entropy(model.decoder(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    close(model(ids, labels=ids).loss, loss, 1e-6)
    logits, cache = model(ids, return_dict=False)
    close(logits, model.decoder(ids))
    assert cache.get_seq_length() == LENGTH


@ALL
@torch.no_grad()
def test_a_cache_gives_what_whole_sequences_give(hf, name):
    model, ids, cache, found = make(name), tokens(), None, []
    for part in ids.split([5, 1, 3, 3], 1):
        out = model(part, past_key_values=cache)
        cache, found = out.past_key_values, [*found, out.logits]
    close(torch.cat(found, 1), model.decoder(ids))


@ALL
@torch.no_grad()
def test_padding_changes_nothing(hf, name):
    model, ids = make(name), tokens()
    mask = left(ids)
    alone = model(ids[1:2, 4:]).logits[0]
    for options in ({"use_cache": True}, {"use_cache": False}):
        close(model(ids, attention_mask=mask, **options).logits[1, 4:], alone)
        close(model(ids.roll(-4, 1), attention_mask=mask.flip(1), **options).logits[1, :8], alone)
    close(model(ids, attention_mask=torch.ones_like(ids)).logits, model.decoder(ids))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["rope-decay", "rope-softmax", "t5", "learned"])  # sums, keys, terms, and a limit
def test_generation_is_that_of_whole_sequences(hf, name, beams):
    model, ids = make(name), tokens()
    options = {"attention_mask": left(ids), "max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    found = model.generate(ids, **options)
    assert len(found[:, LENGTH:].unique()) > 3
    assert found.equal(model.generate(ids, use_cache=False, **options))
    options["attention_mask"] = torch.ones(1, LENGTH - 4)
    assert model.generate(ids[1:2, 4:], **options)[0, LENGTH - 4 :].equal(found[1, LENGTH:])


@torch.no_grad()
def test_positions_may_be_given(hf):
    model, ids = make("rope-decay"), tokens(2)
    places = torch.stack((torch.arange(LENGTH) * 2, torch.arange(LENGTH) + 7))
    expected = model.decoder(ids, places[..., None])
    close(model(ids, position_ids=places, use_cache=False).logits, expected)
    first = model(ids[:, :5], position_ids=places[:, :5])
    close(model(ids[:, 5:], position_ids=places[:, 5:], past_key_values=first.past_key_values).logits, expected[:, 5:])
    model, mask = make("learned"), left(ids)
    places = (torch.arange(LENGTH) - 4 * (1 - mask[:, :1])).clamp_min(0)  # where padding on the left would put them
    for cached in (True, False):
        found, same = (model(ids, mask, use_cache=cached, **given).logits for given in ({"position_ids": places}, {}))
        close(found[mask.bool()], same[mask.bool()])


@ALL
@torch.no_grad()
def test_packed_samples_do_not_see_each_other(hf, name):
    model, ids = make(name), tokens(1)
    x, segments = core.packed([LENGTH - 4, 4])
    apart = torch.cat([model(part, use_cache=False).logits for part in ids.split([LENGTH - 4, 4], 1)], 1)
    close(model.decoder(ids, x, segment_ids=segments), apart)
    for mask in (None, torch.ones_like(ids)):
        out = model(ids, mask, position_ids=x.mT)
        close(out.logits, apart)
        assert out.past_key_values is None
    with pytest.raises(
        ValueError, match="use_cache: expected none with packed samples, whose position_ids restart, got True"
    ):
        model(ids, position_ids=x.mT, use_cache=True)


@pytest.mark.parametrize("name", ["rope", "t5"])
@torch.no_grad()
def test_a_layer_of_the_cache(hf, name):
    model, ids = make(name), tokens(2)
    expected = model.decoder(ids)[:, -1]
    cache = model(ids[:, :-1]).past_key_values
    layer = cache.layers[0]
    assert isinstance(layer, own.StateLayer)
    assert isinstance(layer.state, State)
    assert (cache.get_seq_length(), layer.get_mask_sizes(3), cache.get_max_length()) == (11, (14, 0), -1)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))  # in their order again
    again = copy.deepcopy(cache)
    close(model(ids[:, -1:], past_key_values=cache).logits[:, 0], expected)
    with pytest.raises(ValueError, match="crop: expected no tokens to forget, since a state holds sums of all, got -2"):
        again.crop(-2)
    again.reset()
    assert again.get_seq_length() == 0
    close(model(ids, past_key_values=again).logits[:, -1], expected)


@torch.no_grad()
def test_what_a_call_is_given_and_gives(hf):
    """Test the arguments of a call: cache (default in evaluation only), logits_to_keep, loss, and the type of the result."""
    model, ids = make(), tokens()
    whole = model.decoder(ids)
    assert model(ids).past_key_values.get_seq_length() == LENGTH
    assert model(ids, use_cache=False).past_key_values is None
    close(model(ids, logits_to_keep=torch.tensor([3, 0])).logits, whole[:, [3, 0]])
    labels = ids.clone()
    labels[:, :5] = -100
    sums = torch.nn.functional.cross_entropy(whole[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten(), reduction="sum")
    close(model(ids, labels=labels).loss, sums / (3 * (LENGTH - 5)), 1e-6)
    close(model(ids, labels=labels, num_items_in_batch=7).loss, sums / 7, 1e-6)
    mask = left(ids)
    for kind in (torch.bool, torch.float32, torch.int32):
        close(model(ids, attention_mask=mask.to(kind)).logits, model(ids, attention_mask=mask).logits, 1e-6)
    assert model.train()(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == LENGTH
    model.eval().config.use_cache = False
    assert model(ids).past_key_values is None
    for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
        assert model(ids, **{name: False}).logits.equal(model(ids, **{name: None}).logits)
        with pytest.raises(ValueError, match=f"{name}: expected none, since the model keeps neither embeddings nor weights"):
            model(ids, **{name: True})
    cache = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask: expected \[b 8\], of all tokens so far, got \[3, 3\]"):
        model(ids[:, 5:8], attention_mask=torch.ones(3, 3), past_key_values=cache)


def test_its_embeddings_are_those_of_tokens(hf):
    for options in ({}, {"tie_word_embeddings": True}):
        model, ids = make(**options), tokens()
        before = model(ids).logits
        assert model.get_input_embeddings() is model.decoder.tokens
        assert model.get_output_embeddings() is model.decoder.head
        model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
        assert (model.decoder.tokens.num_embeddings, model.decoder.head.out_features) == (VOCABULARY + 3,) * 2
        assert (model.decoder.head.weight is model.decoder.tokens.weight) == bool(options)
        assert model.config.vocab_size == VOCABULARY + 3
        close(model(ids).logits[..., :VOCABULARY], before, 1e-6)
    assert make(cutoffs=[10, 20]).get_output_embeddings() is None
    with pytest.raises(ValueError, match="cutoffs: expected none to resize token embeddings"):
        make(cutoffs=[10, 20]).resize_token_embeddings(60)


@pytest.mark.parametrize("name", ["rope", "t5"])
def test_an_empty_cache_may_be_repeated_and_a_recomputing_model_evaluated(hf, name):
    model, ids = make(name), tokens(2)
    cache = model.empty_cache()
    cache.batch_repeat_interleave(2)
    close(model(ids, past_key_values=cache).logits, model.decoder(ids))
    model.train().activation_checkpointing_enable()
    model(ids, labels=ids)
    assert model.decoder.recompute
    model.eval()(ids, use_cache=False)
    assert not model.decoder.recompute
    assert own.from_decoder(model.decoder.train()).training


def test_memory_of_a_stream_does_not_grow(hf):
    model = make()
    sizes = [model(tokens(1, length)).past_key_values.layers[0].state.nbytes for length in (4, 40)]
    assert sizes[0] == sizes[1] > 0


@ALL
def test_folders(hf, name, tmp_path):
    model, ids = make(name), tokens()
    with torch.no_grad():
        [parameter.add_(0.1) for parameter in model.decoder.scheme.parameters()]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["fingerprint"]) == ("isopos", model.decoder.scheme.fingerprint)
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded(ids).logits.equal(model(ids).logits)
    config["fingerprint"] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"scheme: expected that of the checkpoint, .* with fingerprint 000000000000"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_copies(hf):
    model, ids = make(), tokens()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is own.IsoposForCausalLM
        assert other(ids).logits.equal(model(ids).logits)


def test_a_tied_head_leaves_the_embedding_as_it_is_initialised(hf):
    for tied in (False, True):
        config = own.IsoposConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=1, tie_word_embeddings=tied)
        assert 0.095 < own.IsoposForCausalLM(config).decoder.tokens.weight.std() < 0.105


def test_frozen_weights_stay_frozen_and_tokens_are_needed(hf):
    decoder = Decoder(VOCABULARY, 32, 1, core.rope(8, HEADS)).requires_grad_(False)
    model = own.from_decoder(decoder)
    assert not any(weight.requires_grad for weight in model.parameters())
    with pytest.raises(ValueError, match="inputs_embeds: expected none"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ValueError, match=r"input_ids: expected tokens \[b t\], got none"):
        model()


def test_tied_embeddings(hf, tmp_path):
    model, ids = make(tie_word_embeddings=True), tokens()
    assert model.decoder.head.weight is model.decoder.tokens.weight
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.decoder.head.weight is again.decoder.tokens.weight
    assert again(ids).logits.equal(model(ids).logits)


def test_gradient_checkpointing_gives_the_same_gradients(hf):
    model, ids = make("t5").train(), tokens()
    model(ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert model.decoder.recompute
    for parameter, old in zip(model.parameters(), expected, strict=True):
        close(parameter.grad, old, 1e-5)


@pytest.mark.parametrize("name", ["rope-decay", "t5"])
def test_trainer_lowers_the_loss(hf, name, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer of transformers needs accelerate")
    model, data = make(name), [{"input_ids": row, "labels": row} for row in tokens(8)]
    with torch.no_grad():
        before = model(tokens(8), labels=tokens(8)).loss.item()
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=30, per_device_train_batch_size=8, learning_rate=0.01, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, activation_checkpointing=True,
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    trainer.save_model(str(tmp_path / "end"))
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert again(tokens()).logits.equal(model.eval()(tokens()).logits)


DECODERS = {
    "plain": {},
    "all": {"hidden_dim": 40, "activation": "gelu", "kv_heads": 2, "dropout": 0.1, "window": 5, "stochastic_depth": 0.1},
    "tied": {"tied": True},
    "adaptive": {"cutoffs": (10, 20)},
}


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_becomes_one(hf, kind, tmp_path):
    scheme = core.rope(8, HEADS, attention="softmax", base=77.0)
    decoder, ids = Decoder(VOCABULARY, 32, 2, scheme, **DECODERS[kind]).eval(), tokens()
    own.from_decoder(decoder).save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.training
    close(loaded(ids, use_cache=False).logits, decoder(ids), 1e-6)
    assert str(loaded.decoder) == str(decoder)
    precise = own.from_decoder(decoder.double())
    assert precise.dtype == torch.float64
    close(precise(ids, use_cache=False).logits, decoder(ids), 1e-14)


def test_runs_are_exported(hf, tmp_path, isopos, monkeypatch):
    recipe = Recipe(scheme="rope:decay=retnet").edit(layers=2, model_dim=16, heads=2)
    model, ids = recipe.task.model(recipe).eval(), torch.arange(10)[None]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(recipe.as_dict()))
    save_model(model, str(tmp_path / "run" / "model.safetensors"))
    assert isopos("export", "run", "out")[:2] == (0, "out\n")
    loaded = hf.AutoModelForCausalLM.from_pretrained("out")
    assert loaded(ids, use_cache=False).logits.equal(model(ids))
    tokenizer = hf.AutoTokenizer.from_pretrained("out")
    assert tokenizer("é\n ok")["input_ids"] == [195, 169, 10, 32, 111, 107]
    assert tokenizer.decode([195, 169, 10, 32, 111, 107]) == "é\n ok"
    code, _, said = isopos("export", "run", "out")
    assert (code, said.splitlines()[-1]) == (
        2,
        "isopos: folder: expected a new folder, got out, which exists; remove it or choose another",
    )
    assert isopos("export", "nowhere", "new")[0] == 2
    with monkeypatch.context() as patch:
        patch.setattr(hf.PreTrainedTokenizerFast, "save_pretrained", _full)
        assert isopos("export", "run", "new")[0] == 2
    assert not (tmp_path / "new").exists()
    assert isopos("export", "run", "new")[0] == 0


def _full(*_):
    raise OSError(28, "No space left on device")


def test_bad_input(hf, tmp_path):
    with pytest.raises(ValueError, match="scheme: expected positions on a line or ring, got Tree"):
        make(scheme="ape-tree")
    with pytest.raises(ValueError, match="unknown scheme 'rpoe': did you mean rope"):
        make(scheme="rpoe")
    model, ids = make(), tokens()
    for options, said in (
        (
            {"past_key_values": hf.DynamicCache(config=hf.LlamaConfig())},
            "past_key_values: expected what this model returned",
        ),
        ({"attention_mask": torch.ones(3, 5)}, r"attention_mask: expected \[b 12\], of all tokens so far, got \[3, 5\]"),
        ({"output_attentions": True}, "output_attentions: expected none"),
    ):
        with pytest.raises(ValueError, match=said):
            model(ids, **options)
    with pytest.raises(TypeError, match="state: expected a State, got Tensor"):
        own.StateLayer().update(ids, 1)
    unnamed = core.schemes.Scheme(core.encodings.Identity(8), HEADS)
    with pytest.raises(ValueError, match=r"scheme: expected one that a function of .* makes again"):
        own.from_decoder(Decoder(VOCABULARY, 32, 1, unnamed))
