"""Test conversion of whole checkpoints of transformers to other layouts, and with an absorbed basis."""

import pytest
import torch
from test_transformers import (
    ALL_FAMILIES,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    close,
    logits,
    make,
    projected,
    tokens,
)

import isopos
from isopos.integrations.transformers import rotary
from isopos.integrations.transformers.layouts import absorb, convert_layout
from isopos.integrations.transformers.patching import patch

pytestmark = pytest.mark.oracles


@ALL_FAMILIES
@torch.no_grad()
def test_interleaved_weights_are_for_code_that_rotates_pairs_side_by_side(hf, family):
    model, ids = make(hf, family), tokens()
    x = torch.randn(1, 5, model.config.hidden_size)
    for name, weight in model.named_parameters():
        if "_norm" in name or "bias" in name:
            weight.copy_(torch.rand_like(weight) + 0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, layer = (
        logits(model, ids),
        getattr(model.base_model.layers[0], "attention" if family == "GPTNeoX" else "self_attn"),
    )
    half = isopos.rope(HEAD_DIM, layout="half", rotary_dim=4 if family == "GPTNeoX" else None).encoding
    rho = half(isopos.sequence(5))
    old = [rho(a) for a in projected(layer, x)[:2]]
    state = convert_layout(model, to="interleaved")
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    changed = {name.split(".")[-2] for name, tensor in state.items() if not tensor.equal(before[name])}
    norms = {"q_norm", "k_norm"} if family == "Qwen3" else set()
    assert changed == ({"query_key_value"} if family == "GPTNeoX" else {"q_proj", "k_proj"} | norms)
    model.load_state_dict(state)
    rho = isopos.rope(HEAD_DIM, rotary_dim=4 if family == "GPTNeoX" else None).encoding(isopos.sequence(5))
    q, k, _ = projected(layer, x)
    shared = HEADS // k.shape[1]
    scores = [a @ b.repeat_interleave(shared, 1).mT for a, b in (old, (rho(q), rho(k)))]
    close(scores[1], scores[0], 1e-5)
    assert (logits(model, ids) - expected).abs().max() > 0.1
    model.load_state_dict(convert_layout(model, to="half"))
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("part", [8, HEAD_DIM])
@torch.no_grad()
def test_the_layout_is_that_of_the_features_which_the_scheme_rotates(hf, part):
    """The number of rotated features comes from the scheme, not from GPT-NeoX's configuration. Values do not change."""
    model, x = make(hf, "GPTNeoX"), torch.randn(1, 5, HEADS * HEAD_DIM)
    layer = model.base_model.layers[0].attention
    patch(model, isopos.rope(HEAD_DIM, rotary_dim=part, attention="softmax"))
    old = projected(layer, x)
    model.load_state_dict(convert_layout(model, to="interleaved"))
    new = projected(layer, x)
    order = torch.cat((torch.arange(part).view(2, -1).T.flatten(), torch.arange(part, HEAD_DIM)))
    for before, after in zip(old[:2], new[:2], strict=True):
        close(after, before[..., order], 1e-6)
    assert new[2].equal(old[2])


BASES = {
    "householder": lambda heads: isopos.lrpe_orthogonal(HEAD_DIM, heads, attention="softmax"),
    "learned": lambda heads: isopos.lrpe_orthogonal(HEAD_DIM, heads, attention="softmax", learned=True, learned_basis=True),
    "exponential": lambda heads: isopos.ape_sequence(HEAD_DIM, heads, attention="softmax"),
    "partial": lambda heads: isopos.lrpe_orthogonal(HEAD_DIM, heads, identity=HEAD_DIM - 4, attention="softmax"),
}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPTNeoX"])
@pytest.mark.parametrize("heads", [1, KEY_HEADS])
@pytest.mark.parametrize("name", BASES)
@torch.no_grad()
def test_a_basis_moves_into_all_projections(hf, family, heads, name):
    model, ids = make(hf, family), tokens()
    scheme = BASES[name](HEADS if family == "GPTNeoX" and heads > 1 else heads)
    patch(model, scheme)
    expected, weights = logits(model, ids), sum(parameter.numel() for parameter in model.parameters())
    assert absorb(model) is model
    close(logits(model, ids), expected)
    assert isinstance(model.base_model.rotary_emb, rotary.Angles) == (heads == 1)
    assert type(model.base_model.rotary_emb.scheme.encoding).__name__ == ("Partial" if name == "partial" else "Rotary")
    assert sum(parameter.numel() for parameter in model.parameters()) <= weights


def test_bad_input(hf):
    model = make(hf)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"model: expected one with a scheme of isopos, got one without; patch"):
        absorb(model)
    with pytest.raises(ValueError, match="to: expected interleaved or half, got 'whole'"):
        convert_layout(model, to="whole")
    patch(model, isopos.alibi(HEAD_DIM, KEY_HEADS, attention="softmax"))
    with pytest.raises(ValueError, match=r"scheme: expected an encoding with a basis .* got Identity"):
        absorb(model)
    with pytest.raises(ValueError, match="model: expected one whose own code rotates"):
        convert_layout(model, to="half")
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    normed = patch(make(hf, "Qwen3"), BASES["householder"](1))
    with pytest.raises(ValueError, match="model: expected projections straight ahead of the scheme"):
        absorb(normed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    for kind, more in (("Olmo2", {}), ("Olmo", {"clip_qkv": 0.5})):  # norms over all heads, and clamped projections
        config = getattr(hf, f"{kind}Config")(**sizes, pad_token_id=0, eos_token_id=1, **more)
        between = patch(getattr(hf, f"{kind}ForCausalLM")(config), isopos.lrpe_orthogonal(16, heads=2, attention="softmax"))
        with pytest.raises(ValueError, match=r"model: expected projections straight ahead of the scheme, got .* between"):
            absorb(between)
    gated = make(hf)
    layer = gated.base_model.layers[0].self_attn
    layer.q_proj = torch.nn.Linear(layer.q_proj.in_features, 2 * layer.q_proj.out_features, bias=False)
    with pytest.raises(ValueError, match=r"model: expected .* rows of q_proj, queries alone, got"):
        convert_layout(gated, to="interleaved")
    computed = make(hf)
    torch.nn.utils.parametrizations.weight_norm(computed.base_model.layers[0].self_attn.q_proj)
    with pytest.raises(ValueError, match=r"model: expected projections that hold their weights, got q_proj of Parametr"):
        convert_layout(computed, to="interleaved")
    named = make(hf)
    named.register_buffer("scale", torch.ones(()))
    convert_layout(named, to="interleaved")
    wide = patch(make(hf), BASES["householder"](HEADS))
    with pytest.raises(ValueError, match=f"got one of {HEADS} heads, several of which share a key"):
        absorb(wide)
    for call in (absorb, lambda model: convert_layout(model, to="half")):
        with pytest.raises(ValueError, match=r"model: expected a decoder whose code rotates pairs .*, got Linear"):
            call(torch.nn.Linear(2, 2))


@torch.no_grad()
def test_absorbing_keeps_a_window(hf):
    model, ids = make(hf, "Llama"), tokens()
    patch(model, isopos.lrpe_orthogonal(HEAD_DIM, KEY_HEADS, feature_map="identity", denominator="none"), window=4)
    window = model.base_model.isopos_window
    window.logit.normal_()
    expected, share = model(ids).logits, window.logit.clone()
    torch.testing.assert_close(absorb(model)(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert model.base_model.isopos_window.size == 4
    assert model.base_model.isopos_window.logit.equal(share)
