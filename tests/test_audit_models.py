"""Test the audit of models of transformers: a smoke test for `make test`, models with faults, and sound models."""

import faults
import pytest
import torch
from families import FAMILIES

import isopos
from isopos.audit import audit
from isopos.audit.declared import declared_factor, declared_frequencies
from isopos.integrations.transformers import audited
from isopos.models import Decoder

RULES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 256},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 8.0},
    "yarn, all": {"factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.3},
    "yarn, scales": {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.4, "original_max_position_embeddings": 256},
    "yarn, no factor": {"factor": None, "original_max_position_embeddings": 256},
    "longrope, factor": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0], "attention_factor": 1.4},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}
for _name in ("longrope", "longrope, factor", "yarn, all"):
    RULES[_name]["original_max_position_embeddings"] = 256


@pytest.fixture(scope="module", autouse=True)
def transformers():
    made = pytest.importorskip("transformers", minversion="5", reason="needs the extra hf")
    made.utils.logging.disable_progress_bar()
    return made


def held(model):
    """Every tensor and number in a model's modules, including non-persistent buffers."""
    return {
        f"{name}.{key}": value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name, module in model.named_modules()
        for key, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items())
        if isinstance(value, torch.Tensor | int | float)
    }


def test_an_audit_leaves_a_table_that_grows_with_calls_as_it_was():
    made = faults.model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    before = held(made)
    assert audit(made, checks=["order of calls", "tables", "autocast", "casts"]).broken == ("order of calls",)
    torch.testing.assert_close(held(made), before, rtol=0, atol=0)


def test_a_folder_with_a_configuration_alone(tmp_path, capsys):
    faults.model("llama").config.save_pretrained(tmp_path)
    report = audit(
        tmp_path, checks=["frequencies", "far positions", "meta device", "encoding", "shift", "decoding", "packing"]
    )
    assert report.sound, report
    assert [(a.check, a.severity) for a in report.findings] == [("meta device", "risk"), ("packing", "risk")]
    assert "rotary, 8 of 8 features, half layout, base 1e+04" in report.encodings[0]
    far = next(a for a in report.results if a.check == "far positions")
    assert [position for position, _ in far.curves[0][1]] == [2**n for n in range(10, 32)]
    made = faults.model("llama").to(torch.bfloat16)
    report = audit(made, checks=["frequencies"])
    assert report.status == 1
    assert "rounded to bfloat16" in report.findings[0].measured
    assert report.findings[0].where == "model.rotary_emb"


def test_lines_of_code_and_configuration_are_named_and_a_tokenizer_is_used(tmp_path, transformers):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = faults.model("llama", vocab_size=128)
    made.model.rotary_emb.inv_freq.mul_(2)
    made.save_pretrained(tmp_path)
    letters = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path)
    report = audit(tmp_path, checks=["layout", "casts"])
    assert "its weights predict the text no better than chance" in report.unmeasured[0].reason
    lines = (tmp_path / "config.json").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if '"rope_parameters"' in line)
    assert report.findings[0].line.startswith(f"config.json:{number}, transformers/models/llama/modeling_llama.py:")
    assert audit(made, checks=["frequencies"]).findings[0].line.startswith("config.rope_parameters, transformers/")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="text: expected a folder with a tokenizer"):
        audit(tmp_path, text="words")


@pytest.mark.oracles
def test_models_without_a_head_or_of_whole_texts_and_in_any_state(transformers):
    config = faults.model("llama").config
    for auto in ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"):
        made = getattr(transformers, auto).from_config(config).train()
        before = {name: value.clone() for name, value in made.state_dict().items()}
        report = audit(made)
        assert report.sound, report
        assert made.training
        assert all(value.equal(before[name]) for name, value in made.state_dict().items())
    with pytest.raises(ValueError, match="model: expected one of tokens, got ViTModel"):
        audit(transformers.ViTModel(transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)))


@pytest.mark.oracles
def test_weights_of_a_folder_are_read(tmp_path):
    made = faults.model("qwen2")
    made.save_pretrained(tmp_path)
    report = audit(str(tmp_path))
    assert report.sound, report
    assert report.subject == str(tmp_path)


@pytest.mark.oracles
@pytest.mark.parametrize("fault", faults.MODELS, ids=lambda fault: fault.name)
def test_the_fault_of_a_model_is_named(fault):
    report = faults.audited(fault)
    hits = [a for a in report.findings if a.check == fault.check and a.severity == "broken"]
    assert any(fault.words in a.measured for a in hits), report


@pytest.mark.oracles
@pytest.mark.parametrize("fault", faults.HELD, ids=lambda fault: fault.name)
def test_a_fault_that_was_held_back_is_named_unless_it_is_known_to_be_missed(fault):
    assert (fault.check in faults.audited(fault).broken) == bool(fault.check)


@pytest.mark.oracles
@pytest.mark.parametrize("kind", faults.SOUND)
def test_an_unbroken_model_is_called_sound(kind):
    report = audit(faults.model(kind))
    assert report.sound, report
    assert len({a.check for a in report.results}) >= 6


@pytest.mark.oracles
@pytest.mark.parametrize("kind", faults.RELEASED)
def test_what_is_broken_as_released_is_named(kind):
    broken, _ = faults.RELEASED[kind]
    assert {*broken} <= {*audit(faults.model(kind), checks=broken).broken}


@pytest.mark.oracles
@pytest.mark.parametrize("rule", RULES)
def test_declared_frequencies_are_those_of_transformers(rule):
    parameters = {"rope_type": rule.partition(",")[0], "rope_theta": 10000.0} | RULES[rule]
    made = faults.model("llama", rope_parameters=dict(parameters))
    table = made.model.rotary_emb
    own = declared_frequencies(parameters, 8, 2048)
    torch.testing.assert_close(table.inv_freq.double(), own, rtol=1e-5, atol=0)
    assert table.attention_scaling == pytest.approx(declared_factor(parameters, 2048))
    report = audit(made, checks=["frequencies", "attention factor", "tables", "autocast", "saving", "shift", "decoding"])
    assert report.sound, report


def test_folders_of_this_library_are_read(tmp_path, transformers):
    from isopos.integrations.transformers import patch
    from isopos.integrations.transformers.model import from_decoder

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    patched = patch(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), isopos.alibi(16, 2, attention="softmax")
    )
    patched.save_pretrained(tmp_path / "patched")
    own = from_decoder(Decoder(64, 32, 1, isopos.rope(16, 2)))
    own.save_pretrained(tmp_path / "own")
    for name, model in (("patched", patched), ("own", own)):
        found, tokens = audited.loaded(tmp_path / name), torch.arange(9)[None]
        torch.testing.assert_close(found.eval()(tokens).logits, model.eval()(tokens).logits)


def test_a_table_as_long_as_the_largest_position_is_not_built_far_away():
    """A table with 2^31 rows needs more memory than most machines have."""
    (found,) = audit(faults.late_table(), checks=["far positions"]).results
    assert (found.severity, found.measured) == ("note", "not measured: a table as long as the position is built")


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_model_of_this_library_is_measured_with_its_own_cache(attention, monkeypatch):
    from isopos.integrations.transformers.model import IsoposForCausalLM, from_decoder

    torch.manual_seed(0)
    made = from_decoder(Decoder(64, 32, 2, isopos.rope(16, 2, attention=attention)))
    checks = ["positions", "decoding", "chunked prefill", "beam reorder", "generation", "left padding", "packing"]
    report = audit(made, checks=[*checks, "static cache"])
    assert report.sound, report
    assert {result.check for result in report.results} == set(checks)
    assert all(result.severity == "sound" for result in report.results)
    assert [a.check for a in report.unmeasured] == ["static cache"]
    features = IsoposForCausalLM._features

    def late(self, ids, mask, position_ids, cache, segments):
        past = 0 if cache is None else cache.get_seq_length()
        return features(self, ids, mask, past // 2 + torch.arange(ids.shape[1])[None], cache, segments)

    monkeypatch.setattr(IsoposForCausalLM, "_features", late)  # chunks after the first are too early
    assert "chunked prefill" in audit(made, checks=["chunked prefill"]).broken


@pytest.mark.parametrize("name", ["keep", "permuteformer"])
def test_a_converted_model_is_measured_with_its_states(name):
    from isopos.integrations.transformers.conversion import converted, linear_scheme

    llama = faults.model("llama")
    report = audit(
        converted(llama, linear_scheme(llama, name)),
        checks=["shift", "decoding", "chunked prefill", "beam reorder", "generation", "static cache", "packing"],
    )
    assert report.sound, report
    assert {a.check: a.reason for a in report.unmeasured} == {
        "static cache": "it has no static cache",
        "packing": "its call takes no packed batches",
    }
    assert len(report.results) == 5


def test_windows_are_left_if_they_are_short():
    for window, length in ((20, 28), (56, 64), (57, 12), (None, 12)):
        model = FAMILIES["mistral"].make(sliding_window=window, max_position_embeddings=256)
        assert audited.TransformersSubject.of(model, "model").length == length
