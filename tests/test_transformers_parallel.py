"""Test models of transformers over a group of processes (threads here): losses and gradients equal one process."""

import pytest
import torch
from cases import named
from shards import compare_losses, on_ranks
from torch.nn import functional as F

import isopos
from isopos.parallel import Ring, cut

pytest.importorskip("transformers", minversion="5", reason="needs the extra hf")
pytestmark = pytest.mark.oracles
HEADS, T = 4, 12
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "pad_token_id": 0}
MORE = {"num_key_value_heads": 2, "intermediate_size": 32}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}


def made(name, **options):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options, bos_token_id=None, eos_token_id=None)
    config._attn_implementation = "sdpa"
    cls = getattr(
        transformers, f"{name}{'ForMaskedLM' if name == 'Bert' else 'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}"
    )
    return cls(config).double().eval()


def compared(model, run, size=2, kind=lambda group: group, error=1e-9):
    from isopos.integrations.transformers import over

    compare_losses(model, run, size, kind, over, error, mean=False)


def loss_of(tokens, mask):
    """A function that returns a model's total loss over all tokens, or over a group member's shard."""
    from isopos.integrations.transformers import cut_labels

    def run(model, group):
        labels = tokens.masked_fill(~mask, -100)
        own, seen, labels = tokens, mask, F.pad(labels[:, 1:], (0, 1), value=-100)
        if group is not None:
            own, seen, labels = cut(tokens, group), cut(mask, group), cut_labels(tokens.masked_fill(~mask, -100), group)
        logits = model(own, attention_mask=seen.long(), use_cache=False).logits  # the model's own loss is float32
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    return run


def inputs():
    tokens = torch.randint(1, 50, (2, T), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(T) < torch.tensor([[T - 3], [T]])  # padding on the right, which changes no position


def test_models_over_a_group():
    from isopos.integrations.transformers import patch

    tokens, mask = inputs()
    run = loss_of(tokens, mask)
    llama = made("Llama", **MORE)
    rows = [
        ("llama", llama, lambda group: group),
        ("ring", llama, Ring),
        ("zig-zag", llama, lambda group: Ring(group, zigzag=True)),
        ("windows", made("Qwen2", **MORE, **SLIDING), lambda group: group),
        ("gpt2", made("GPT2"), lambda group: group),
        ("rotations", patch(made("Llama", **MORE), isopos.rope(8, base=100.0, attention="softmax")), lambda group: group),
        ("alibi", patch(made("Llama", **MORE), isopos.alibi(8, HEADS, attention="softmax")).double(), Ring),
        ("linear", patch(made("Llama", **MORE), isopos.rope(8, HEADS, decay="retnet")).double(), lambda group: group),
        ("window", patch(made("Llama", **MORE), isopos.rope(8, HEADS), window=4).double(), lambda group: group),
        ("t5", patch(made("Qwen2", **MORE, **SLIDING), isopos.t5(8, HEADS)).double(), lambda group: group),
    ]
    for name, model, kind in rows:
        with named(name):
            compared(model, run, 3 if name == "llama" else 2, kind)


def test_an_encoder_over_a_group():
    from isopos.integrations.transformers import patch

    tokens, mask = inputs()

    def run(model, group):
        own, seen = (x if group is None else cut(x, group) for x in (tokens, mask))
        return (model(own, attention_mask=seen.long()).logits[seen] ** 2).sum()

    for name, model in (
        ("bert", made("Bert", intermediate_size=32)),
        ("patched", patch(made("Bert", intermediate_size=32), isopos.rope(8, attention="softmax")).double()),
    ):
        with named(name):
            compared(model, run)


def test_our_model_over_a_group():
    from isopos.integrations.transformers import IsoposConfig, IsoposForCausalLM, cut_labels

    tokens, _ = inputs()
    config = IsoposConfig(**SIZES, scheme="rope", scheme_options={"decay": "retnet"})

    def run(model, group):
        if group is None:
            return model(tokens, labels=tokens, num_items_in_batch=1).loss
        labels = cut_labels(tokens, group)
        return model(cut(tokens, group), labels=labels, shift_labels=labels, num_items_in_batch=1).loss

    compared(IsoposForCausalLM(config).double(), run, error=1e-5)  # transformers computes losses in float32


def test_what_cannot_be_served_is_refused():
    import transformers

    from isopos.integrations.transformers import over

    tokens, _ = inputs()

    def member(group, rank):
        model = made("Llama", **MORE)
        before = model.config._attn_implementation
        with over(model, group):
            for options, message in (
                ({"labels": tokens}, "labels: expected shift_labels"),
                ({"use_cache": True}, "past_key_values: expected none over a group"),
                ({"position_ids": torch.zeros_like(tokens)}, "position_ids: expected none over a group"),
                ({"attention_mask": torch.ones(2, 2 * T)}, r"attention_mask: expected \[b 12\]"),
            ):
                with pytest.raises(ValueError, match=message):
                    model(tokens, **options)
        assert model.config._attn_implementation == before
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=16, d_kv=4, num_layers=1, vocab_size=9))
        falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES))
        roberta = transformers.RobertaModel(transformers.RobertaConfig(**SIZES))
        refused = (
            (t5, "one stack of layers"),
            (falcon, "attention by transformers' interface"),
            (roberta, "positions that count from 0"),
        )
        for other, message in refused:
            with pytest.raises(ValueError, match=f"model: expected {message}"), over(other, group):
                pass

    on_ranks(2, member)
