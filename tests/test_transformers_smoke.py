"""Test patching, saving and loading tiny models of transformers. `make test` runs only these, since imports take seconds."""

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, HEAD_DIM, HEADS

import isopos
from isopos.encodings import Rotary
from isopos.integrations.transformers import saving
from isopos.integrations.transformers.layouts import absorb
from isopos.integrations.transformers.native import rotary_scheme
from isopos.integrations.transformers.patching import load, patch, unpatch
from isopos.lengths import EXTENSIONS

SIZES = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
TOKENS = torch.arange(12).view(1, 12) + 1
RULES = {name: {"factor": 4.0, "trained": 16} for name in EXTENSIONS}
RULES["longrope"] |= {"rescale": [1.0, 1.5, 2.0, 4.0]}
RULES["yarn"] |= {"sharpness": 1.5, "truncate": False}


def make(hf, **options):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | options)).eval()
    with torch.no_grad():
        [weight.mul_(8) for weight in model.parameters() if weight.ndim == 2]  # so that attention matters
    return model


@torch.no_grad()
def logits(model, ids=TOKENS):
    return model(ids).logits


def perturbed(scheme):
    with torch.no_grad():
        [parameter.add_(0.1 * torch.randn_like(parameter)) for parameter in scheme.parameters()]
    return scheme


@pytest.mark.parametrize("name", ["llama4", "gemma3", "gpt2", "falcon"])
@torch.no_grad()
def test_a_model_is_served_by_its_structure(hf, name):
    """Complex tables, layers without positions, frequencies per layer type, added vectors, and custom attention."""
    model = FAMILIES[name].make()
    expected = logits(model)
    if name != "gpt2":
        assert (logits(patch(model, rotary_scheme(model))) - expected).norm() <= 1e-6 * expected.norm()
        unpatch(model)
    patch(model, isopos.rope(HEAD_DIM, HEADS, decay="alibi", base=100.0, attention="softmax"))
    whole, cache, found = logits(model), None, []
    for part in TOKENS.split([7, 1, 4], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache, found = out.past_key_values, [*found, out.logits]
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-5)
    assert (whole - expected).abs().max() > 1e-4
    assert logits(unpatch(model)).equal(expected)


@pytest.mark.parametrize("rule", [None, *RULES])
@pytest.mark.parametrize("learned", [False, True])  # through the model's code, and through our attention
def test_a_folder_keeps_a_scheme_its_extension_and_what_it_learned(hf, tmp_path, caplog, monkeypatch, rule, learned):
    scheme = perturbed(isopos.rope(8, 2, attention="softmax", learned=learned))
    model, plain = patch(make(hf), copy.deepcopy(scheme)), None
    if rule is not None:
        plain = logits(model)
        patch(unpatch(model), scheme.extend(rule, **RULES[rule]))
    model.save_pretrained(tmp_path)
    expected = logits(model)
    assert plain is None or (expected - plain).abs().max() > 1e-3
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    again = load(tmp_path)
    assert "UNEXPECTED" not in caplog.text
    assert type(again) is hf.LlamaForCausalLM
    assert logits(again).equal(expected)
    assert json.loads((tmp_path / "config.json").read_text())["isopos"]["extension"] == (rule and scheme.extension.arguments)
    assert logits(load(tmp_path, hf.AutoModelForCausalLM)).equal(expected)


def test_a_scheme_that_is_extended_in_its_model_is_saved_as_it_is(hf, tmp_path):
    model, method = make(hf), hf.LlamaForCausalLM.save_pretrained
    scheme = isopos.rope(8, attention="softmax")
    patch(model, scheme)
    scheme.extend("dynamic", factor=4)
    model.save_pretrained(tmp_path)
    assert logits(load(tmp_path)).equal(logits(model))
    assert unpatch(model).save_pretrained.__func__ is method


@pytest.mark.parametrize("heads", [1, 2])
def test_a_loaded_model_has_its_basis_absorbed(hf, tmp_path, heads):
    """The model has fewer key heads than query heads. An absorbed scheme has no name, so `patch` needs it again."""
    model = patch(make(hf), perturbed(isopos.lrpe_orthogonal(8, heads, attention="softmax", learned_basis=True)))
    model.save_pretrained(tmp_path)
    absorbed = absorb(load(tmp_path))
    scheme = absorbed.base_model.rotary_emb.scheme
    assert isinstance(scheme.encoding, Rotary)
    torch.testing.assert_close(logits(absorbed), logits(model), rtol=0, atol=1e-4)
    absorbed.save_pretrained(tmp_path / "absorbed")
    again = hf.LlamaForCausalLM.from_pretrained(tmp_path / "absorbed")
    with pytest.raises(ValueError, match="which has no name to find it by"):
        patch(again)
    assert logits(patch(again, scheme)).equal(logits(absorbed))
    with pytest.raises(
        ValueError, match=r"a scheme of one head or of its 2 heads of keys, .* got one of 4 heads, .*build it with heads=2"
    ):
        absorb(patch(make(hf), isopos.lrpe_orthogonal(8, 4, attention="softmax")))


@pytest.mark.parametrize("scheme", [isopos.rope, isopos.none])
def test_a_patched_bert_has_no_longest_sequence(hf, scheme):
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    model = hf.BertForMaskedLM(hf.BertConfig(**sizes, max_position_embeddings=8)).eval()
    patch(model, scheme(8, 4, attention="softmax"))
    long = hf.BertForMaskedLM(hf.BertConfig(**sizes, max_position_embeddings=16)).eval()
    patch(long, scheme(8, 4, attention="softmax")).load_state_dict(model.state_dict())
    assert logits(model).equal(logits(long))
    with torch.no_grad():
        features = model.bert.embeddings.word_embeddings(TOKENS)
        assert model(inputs_embeds=features).logits.equal(logits(model))
    patch(unpatch(model), isopos.learned(8, 4, attention="softmax", length=10))
    with pytest.raises(ValueError, match="positions: expected 0 to 9, which have learned vectors"):
        logits(model)


def test_a_model_of_ours_keeps_its_extension(hf, tmp_path):
    from isopos.integrations.transformers import from_decoder

    decoder = isopos.Decoder(30, 32, 1, isopos.rope(8, 4, learned=True, attention="softmax")).eval()
    model = from_decoder(decoder)
    decoder.scheme.extend("yarn", **RULES["yarn"])
    model.decoder.scheme.extend("yarn", **RULES["yarn"])  # only now, and before
    for own in (model, from_decoder(decoder)):
        own.save_pretrained(tmp_path)
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert again(TOKENS, use_cache=False).logits.equal(decoder(TOKENS))
        again.save_pretrained(tmp_path / "again")
        assert logits(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "again")).equal(logits(again))
    with pytest.raises(
        ValueError, match="folder: expected a patched model, whose configuration names its scheme, got isopos"
    ):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"folder: expected the folder of a patched model, got .*nowhere, which does"):
        load(tmp_path / "nowhere")


def test_a_decoder_of_every_option_becomes_a_model_of_ours(hf):
    from isopos.integrations.transformers import from_decoder

    options = {"hidden_dim": 16, "activation": "gelu", "kv_heads": 2, "window": 3, "stochastic_depth": 0.1, "dropout": 0.2}
    scheme = isopos.rope(8, 4, attention="softmax", base=77.0)
    decoder = isopos.Decoder(30, 32, 2, scheme, attention_dropout=0.3, **options).eval()
    model = from_decoder(decoder)
    known = (
        *("window", "stochastic_depth", "dropout", "attention_dropout", "num_key_value_heads", "intermediate_size"),
        "hidden_act",
    )
    assert [getattr(model.config, name) for name in known] == [3, 0.1, 0.2, 0.3, 2, 16, "gelu"]
    assert str(model.decoder) == str(decoder)
    assert logits(model).equal(decoder(TOKENS))


@pytest.mark.parametrize("rule", RULES)
def test_a_configuration_says_every_extension(rule):
    scheme = isopos.rope(8, 2).extend(rule, **RULES[rule])
    entry = json.loads(json.dumps(saving.scheme_entry(scheme)))
    assert saving.rebuilt(entry).extension == scheme.extension
    del entry["extension"]  # as from before there were any
    with pytest.raises(ValueError, match="scheme: expected that of the checkpoint, rope with fingerprint"):
        saving.rebuilt(entry)


@pytest.mark.slow
def test_a_process_that_has_not_imported_isopos_reads_a_model_of_ours(hf, tmp_path):
    """The process uses the code in the folder, with trust_remote_code. A folder that it saves works in the same way."""
    from isopos.integrations.transformers import from_decoder

    model = from_decoder(isopos.Decoder(30, 32, 1, isopos.rope(8, 4)).eval())
    model.save_pretrained(tmp_path / "first")
    code = f"""
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
assert "isopos" not in sys.modules
try:
    AutoModelForCausalLM.from_pretrained("first", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
folder = "first"
for after in ("second", "third"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__ == "isopos.integrations.transformers.model"
    assert type(AutoConfig.from_pretrained(folder)) is type(model.config)
    model.save_pretrained(after)
    folder = after
torch.save(model(torch.tensor({TOKENS.tolist()})).logits, "logits.pt")
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment["PYTHONPATH"] = str(Path(isopos.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "logits.pt", weights_only=True).equal(logits(model))
    for name in ("config.json", "isopos_model.py"):
        assert (tmp_path / "third" / name).read_text() == (tmp_path / "first" / name).read_text()
