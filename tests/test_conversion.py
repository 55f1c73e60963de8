"""Test conversion from softmax to linear attention: schemes in models, attention transfer, and `isopos convert`."""

import json

import pytest
import torch
from families import FAMILIES, HEAD_DIM, HEADS, KEY_HEADS
from safetensors.torch import load_file, save_file

import isopos
from isopos.attention import naive_linear_attention
from isopos.integrations.transformers.conversion import converted, distances, linear_scheme, transferred
from isopos.integrations.transformers.native import rotary_scheme
from isopos.integrations.transformers.patching import load, patch, unpatch  # without transformers as yet
from isopos.lab.data.tokenizers import Bytes
from isopos.lab.recipes import Recipe
from isopos.lab.reports import progress
from isopos.lab.tasks.conversion import Conversion
from isopos.lab.tasks.task import View

pytestmark = [pytest.mark.oracles, pytest.mark.usefixtures("hf")]
LENGTH = 12
SCHEMES = {  # with a window, or none
    "rope": ({"decay": "retnet"}, None),
    "rope-window": ({"decay": "retnet", "heads": HEADS}, 5),
    "rope-norm": ({"denominator": "none"}, None),
    "rope-forget": ({"decay": "forget"}, 4),
    "rope-favor": ({"feature_map": "favor"}, None),
    "permuteformer": ({}, 1),
    "lrpe-unitary": ({}, 30),
    "horn-clipped": ({}, None),
    "selective": ({}, 4),
    "path": ({}, 4),
}


def tokens(batch=2, length=LENGTH):
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def scheme_of(name, heads=KEY_HEADS):
    options = {"heads": heads} | SCHEMES[name][0]
    return isopos.schemes.REGISTRY[name if name in isopos.CATALOG else name.rpartition("-")[0]](HEAD_DIM, **options)


# Schemes of linear attention in a model


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_cached_steps_padding_and_a_loaded_model_give_the_logits_of_the_whole(family, name, tmp_path):
    scheme = scheme_of(name, KEY_HEADS if family == "llama" else HEADS)
    model, ids = patch(FAMILIES[family].make(), scheme, window=SCHEMES[name][1]), tokens()
    everywhere, expected = torch.ones_like(ids), model(ids, use_cache=False).logits
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=everywhere, **options)
    whole = model(out.sequences, use_cache=False).logits
    torch.testing.assert_close(torch.stack(out.logits, 1), whole[:, LENGTH - 1 : -1], atol=1e-4, rtol=1e-4)
    assert {type(layer).__name__ for layer in out.past_key_values.layers} == {"StateLayer"}
    if name != "horn-clipped":  # whose keys have different positions, which generate does not give to padding
        padded = torch.cat((torch.zeros_like(ids[:, :3]), ids), -1)
        again = model.generate(padded, attention_mask=(padded != 0).long(), **options)
        torch.testing.assert_close(torch.stack(again.logits, 1), torch.stack(out.logits, 1), atol=1e-4, rtol=1e-4)
    assert model.generate(ids, attention_mask=everywhere, num_beams=3, max_new_tokens=3).shape == (2, LENGTH + 3)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(load(tmp_path).eval()(ids, use_cache=False).logits, expected, atol=0, rtol=0)
    assert not torch.allclose(unpatch(model)(ids, use_cache=False).logits, expected, atol=1e-3)


def test_a_state_has_the_same_size_at_any_length():
    model = patch(FAMILIES["llama"].make(), scheme_of("rope"), window=4)
    sizes = set()
    for length in (12, 40):
        layer = model(tokens(1, length)).past_key_values.layers[0]
        sizes.add((layer.state.nbytes, layer.near.nbytes))
    assert len(sizes) == 1


@torch.no_grad()
def test_a_layer_is_the_definition():
    """The layer is the mean of linear attention (`naive_linear_attention`) and softmax attention within 3 keys."""
    model, scheme, ids = FAMILIES["llama"].make(), scheme_of("rope"), tokens()
    layer, seen = model.model.layers[0].self_attn, {}
    layer.register_forward_pre_hook(lambda a, args, kwargs: seen.update(x=kwargs["hidden_states"]), with_kwargs=True)
    layer.o_proj.register_forward_pre_hook(lambda a, args: seen.update(y=args[0]))
    patch(model, scheme, window=3)(ids, use_cache=False)
    q, k, v = (
        p(seen["x"]).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    k, v = (a.repeat_interleave(HEADS // KEY_HEADS, 1) for a in (k, v))
    at = dict(scheme.at(isopos.sequence(LENGTH)))
    phi, decay = at.pop("feature_map"), at.pop("decay").repeat_interleave(HEADS // KEY_HEADS, 0)
    linear = naive_linear_attention(phi(q), phi(k), v, **at, decay=decay, causal=True)
    rho = at["isometry"]
    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2)
    weights = (rho(q) @ rho(k).mT * HEAD_DIM**-0.5).masked_fill(~near, -torch.inf).softmax(-1)
    expected = (linear + weights @ v) / 2
    torch.testing.assert_close(seen["y"], expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_window_has_the_attention_factor_of_an_extension():
    """With a share of one and a window as long as the text, it is the softmax attention of the model."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    for family, more in (("llama", {}), ("gpt_neox", {"partial_rotary_factor": 0.5})):
        model = FAMILIES[family].make(rope_parameters=yarn | more)
        expected = model(tokens()).logits
        student = converted(model, linear_scheme(model, "keep"), window=64).eval()
        student.base_model.isopos_window.logit.fill_(60.0)
        torch.testing.assert_close(student(tokens()).logits, expected, atol=1e-5, rtol=1e-5)


def test_layers_without_positions_and_a_learned_scheme_are_served():
    model = patch(FAMILIES["smollm3"].make(), isopos.rope(HEAD_DIM, KEY_HEADS, learned=True))
    model(tokens(), labels=tokens()).loss.backward()
    scheme = model.base_model.rotary_emb.scheme
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in scheme.parameters())


REFUSED = {
    "gemma3": ("full_attention.*, got", None),
    "modernbert": ("sums of linear attention are of all keys up to the query's", None),
    "bert": ("attention='softmax', since .* only the attention of a decoder", None),
    "falcon": ("is its own code", None),
    "dinov3_vit": ("attention='softmax', since", None),
    "llama": ("window: expected a number of keys", 0),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_has_no_linear_attention_says_why(family):
    said, window = REFUSED[family]
    model = FAMILIES[family].make()
    scheme = isopos.rope(HEAD_DIM) if family != "dinov3_vit" else isopos.rope_axial(HEAD_DIM)
    if family == "gemma3":
        said = "sliding attention in layer 0"
    with pytest.raises(ValueError, match=said):
        patch(model, scheme, window=window)
    assert not hasattr(model.config, "isopos")


def test_a_window_is_for_linear_attention(tmp_path):
    model = FAMILIES["llama"].make()
    with pytest.raises(ValueError, match=r"window: expected one only with one scheme of linear attention"):
        patch(model, isopos.rope(HEAD_DIM, attention="softmax"), window=3)
    patch(model, scheme_of("rope"), window=3).save_pretrained(tmp_path)
    config = type(model.config).from_pretrained(tmp_path)
    other = FAMILIES["llama"].make()
    other.config.isopos = config.isopos
    with pytest.raises(ValueError, match=r"window: expected that of the checkpoint, 3, got 4"):
        patch(other, scheme_of("rope"), window=4)


def test_a_cache_of_keys_is_refused():
    model = FAMILIES["llama"].make()
    keys = model(tokens()).past_key_values
    with pytest.raises(ValueError, match=r"past_key_values: expected a DynamicCache without tokens.* got DynamicLayer"):
        patch(model, scheme_of("rope"))(tokens(2, 1), past_key_values=keys)
    with pytest.raises(ValueError, match=r"past_key_values: expected a DynamicCache without tokens.* got StaticLayer"):
        model.generate(tokens(), max_new_tokens=2, cache_implementation="static")


# Keeping positions


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@torch.no_grad()
def test_keep_has_the_positions_of_the_model(family):
    """Softmax attention keeps the model's positions."""
    model, ids = FAMILIES[family].make(), tokens()
    expected = model(ids).logits
    scheme = linear_scheme(model, "keep", {"decay": "retnet", "feature_map": "relu"})
    assert (scheme.attention, scheme.choices["decay"], scheme.choices["feature_map"]) == ("linear", "retnet", "relu")
    name, options = scheme.origin
    options = {key: value for key, value in options.items() if key not in ("attention", "decay", "feature_map")}
    same = isopos.schemes.REGISTRY[name](**options, attention="softmax")
    if family == "gpt2":
        same.embedding.load_state_dict(scheme.embedding.state_dict())
    torch.testing.assert_close(patch(model, same)(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_keep_extends_as_the_model_does():
    parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model = FAMILIES["llama"].make(rope_parameters=parameters)
    assert linear_scheme(model).extension == rotary_scheme(model).extension is not None
    parameters = {"rope_type": "proportional", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = FAMILIES["llama"].make(rope_parameters=parameters)
    expected = model(tokens()).logits
    torch.testing.assert_close(patch(model, rotary_scheme(model))(tokens()).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("keep", {"attention": "softmax"}, "attention: expected linear"),
        ("keep", {"base": "5"}, "base: expected none with keep"),
        ("keep", {"decays": "retnet"}, "unknown option 'decays'"),
        ("keepp", {}, "unknown scheme 'keepp'"),
        ("t5", {}, "attention: expected softmax, got linear"),
    ],
)
def test_schemes_that_are_no_target_of_a_conversion(name, options, said):
    with pytest.raises(ValueError, match=said):
        linear_scheme(FAMILIES["llama"].make(), name, options)


# Attention transfer


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transfer_brings_each_layer_closer(family):
    teacher = FAMILIES[family].make(**{} if family == "llama" else {"num_key_value_heads": None})
    student = converted(teacher, linear_scheme(teacher, "permuteformer"), window=4)
    optimizer = torch.optim.AdamW(transferred(student), lr=3e-3)
    before = distances(teacher, student, tokens(8, 16)).detach()
    for _ in range(20):
        optimizer.zero_grad()
        distances(teacher, student, tokens(8, 16)).sum().backward()
        optimizer.step()
    after = distances(teacher, student, tokens(8, 16)).detach()
    assert len(before) == 2
    assert bool((after < 0.8 * before).all()), (before, after)


def test_a_distance_is_of_one_layer():
    """The distance of equal models is zero. Its gradient reaches only the weights of its attention layer."""
    teacher = FAMILIES["llama"].make()
    assert distances(teacher, teacher, tokens()).tolist() == [0, 0]
    student = converted(teacher, linear_scheme(teacher), window=4)
    distances(teacher, student, tokens())[1].backward()
    reached = {name for name, weight in student.named_parameters() if weight.grad is not None and bool(weight.grad.any())}
    assert {name.rpartition(".self_attn")[0] for name in reached if "self_attn" in name} == {"model.layers.1"}
    assert {name for name in reached if "self_attn" not in name} == {"model.isopos_window.logit"}
    assert not student.base_model.isopos_window.logit.grad[0].any()
    assert not any(layer._forward_hooks for layer in student.modules())


def test_vectors_of_positions_that_are_added_are_not_trained_by_transfer():
    teacher = FAMILIES["gpt2"].make(num_key_value_heads=None)
    student = converted(teacher, linear_scheme(teacher))
    distances(teacher, student, tokens()).sum().backward()
    reached = [weight for weight in student.parameters() if weight.grad is not None]
    assert {*map(id, reached)} == {*map(id, transferred(student))}
    assert student.base_model.wpe.scheme.embedding.weight.grad is None


def test_only_linear_attention_is_a_target():
    with pytest.raises(ValueError, match="expected one of linear attention"):
        converted(FAMILIES["llama"].make(), isopos.rope(HEAD_DIM, attention="softmax"))


# The command

LINE = "--data text.txt --length 16 --batch 2 --transfer-steps 4 --steps 4 --window 4 --validation-tokens 64 --save-every 1"


@pytest.fixture
def folder(isopos, tmp_path, capsys):
    """A model of bytes and a text."""
    FAMILIES["llama"].make(vocab_size=256, pad_token_id=None).save_pretrained("base")
    capsys.readouterr()  # bars of transformers
    (tmp_path / "text.txt").write_text("one two three four five\n" * 40)
    return tmp_path


def convert(isopos, new, *more, tokenizer="bytes"):
    return isopos("convert", "base", new, *LINE.split(), "--tokenizer", tokenizer, *more)


def test_a_conversion_is_loaded_and_generates(isopos, folder, hf):
    hf.PreTrainedTokenizerFast(tokenizer_object=Bytes().model()).save_pretrained("base")
    code, out, err = convert(isopos, "new", tokenizer="model")
    assert (code, out.splitlines()[-1]) == (0, "new"), err
    for name in ("original: bits/byte", "transfer: finished", "tuning: finished"):
        assert name in out
    model, ids = load(folder / "new").eval(), tokens()
    assert model.config.isopos["scheme"] == "rope"
    assert model.config.isopos["window"] == 4
    assert hf.AutoTokenizer.from_pretrained("new").decode(ids[0]) == Bytes().decode(ids[0])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    whole = model(found.sequences).logits[:, LENGTH - 1 : -1]
    torch.testing.assert_close(torch.stack(found.logits, 1), whole, atol=1e-4, rtol=1e-4)
    rows = [json.loads(line) for line in (folder / "new.runs/transfer/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_held_out_tokens_of_a_conversion_are_chosen(folder):
    (folder / "texts").mkdir()
    for split, count in (("train", 4000), ("valid", 500), ("test", 300)):
        (folder / "texts" / f"{split}.txt").write_text("abcd" * count)
    recipe = Recipe(task=Conversion(source="base", data=str(folder / "texts"), tokenizer="bytes", length=64)).edit(
        scheme="rope"
    )
    data = recipe.task.load(recipe)
    assert data.splits == ("validation", "test")
    model = recipe.task.model(recipe).eval()
    few, more, test, short = (
        data.score(model, recipe.edit(batch=n), view)
        for n, view in ((3, View(limit=130)), (7, View(limit=130)), (3, View("test")), (3, View(limit=20)))
    )
    assert few.figures == pytest.approx(more.figures, rel=1e-5)
    assert few.figures["bits_per_byte"] != test.figures["bits_per_byte"]
    assert "expected at most the 20 tokens of validation" in short.reason


def test_an_interrupted_conversion_goes_on_to_the_same_weights(isopos, folder, monkeypatch):
    assert convert(isopos, "whole")[0] == 0
    add, stops = progress.Bars.add, {"transfer": [2], "tuning": [2]}  # noticed a step later

    def interrupting(bars, name, *rest):
        show = add(bars, name, *rest)

        def step(number, *figures):
            show(number, *figures)
            if number in stops[name]:
                stops[name].remove(number)
                raise KeyboardInterrupt

        return step

    monkeypatch.setattr(progress.Bars, "add", interrupting)
    code, _, err = convert(isopos, "new")
    assert code == 130
    assert "--resume goes on from step 3" in err
    assert not (folder / "new").exists()
    assert convert(isopos, "new")[0] == 2  # without --resume
    weights = folder / "base" / "model.safetensors"
    kept = weights.read_bytes()
    save_file({name: 2 * value for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    code, _, err = convert(isopos, "new", "--resume")
    assert (code, "resume: expected the data of" in err) == (2, True)
    weights.write_bytes(kept)
    code, _, err = convert(isopos, "new", "--resume", "--transfer-rate", "0.5")
    assert code == 2
    assert "learning_rate was 0.001, is 0.5" in err
    code, _, err = convert(isopos, "new", "--resume")
    assert code == 130
    assert "--resume goes on from step 3" in err
    assert not (folder / "new").exists()
    assert convert(isopos, "new", "--resume")[0] == 0
    weights = [(folder / name / "model.safetensors").read_bytes() for name in ("whole", "new")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--scheme", "keep:decay"], "expected option=value"),
        (["--scheme", "alibi:attention=softmax"], "attention: expected linear"),
        (["--window", "-1"], "window: expected a number from 0"),
        (["--length", "1"], "length: expected a number from 2"),
        (["--transfer-steps", "-1"], "transfer_steps: expected 0 or more"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--scheme", "learned:length=4", "--length", "16"], "acts in attention"),
        (["--resume"], "resume: expected a conversion in new.runs, got none"),
    ],
)
def test_bad_options_are_refused_before_any_work(isopos, folder, change, said):
    code, out, err = convert(isopos, "new", *change)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert {path.name for path in folder.iterdir()} == {"base", "text.txt"}


def test_folders_that_are_no_model_of_softmax_attention(isopos, folder):
    assert "tokenizer: expected one in base, got none" in convert(isopos, "new", tokenizer="model")[2]
    (folder / "empty").mkdir()
    assert "folder: expected a saved model" in isopos("convert", "empty", "new")[2]
    assert "new_folder: expected a new folder" in isopos("convert", "base", "base")[2]
    patch(FAMILIES["llama"].make(), scheme_of("rope")).save_pretrained("linear")
    assert "folder: expected a model with positions and softmax" in isopos("convert", "linear", "new")[2]
    FAMILIES["bert"].make().save_pretrained("both")
    assert "folder: expected a causal language model in both, " in (err := isopos("convert", "both", "new")[2])
    assert err.endswith(": it is a BertForMaskedLM\n")
    assert "new_folder: expected a new folder, got ., which exists" in isopos("convert", "base", ".")[2]


@pytest.mark.parametrize("damage", ["weights", "sizes", "missing"])
def test_a_damaged_model_is_one_clear_error(isopos, folder, damage, caplog):
    weights, config = folder / "base" / "model.safetensors", folder / "base" / "config.json"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "missing":
        kept = load_file(weights)
        del kept["model.norm.weight"]
        save_file(kept, weights, {"format": "pt"})
    else:
        config.write_text(config.read_text().replace('"hidden_size": ', '"hidden_size": 1'))
    code, _, err = convert(isopos, "new")
    assert (code, err.count("\n")) == (2, 1), err
    assert "folder: expected a causal language model in base, whose config.json and weights agree: " in err
    assert {"weights": "", "sizes": "weights have other sizes", "missing": "no weight model.norm.weight"}[damage] in err
    assert caplog.records == []
