"""Known faults of position code as small patches of tiny models, most with a public source. The audit finds each.

`LAYERS` are faults of a torch layer, `MODELS` of models of transformers. A fault may trip more checks than the one it is
listed with. `SOUND` are models of transformers 5 in which nothing is broken.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Fault:
    """A fault, its public source (empty if invented here), the check that names it, and words of the check's finding."""

    name: str
    source: str
    check: str
    make: Callable[[], Any]
    words: str = ""


class Rope(nn.Module):
    """Softmax attention with rotary positions in half layout: features ``[b t d]`` to ``[b t d]``."""

    causal, heads, size, needs_learning = True, 2, 8, False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        width = self.heads * self.size
        self.qkv = nn.Parameter(torch.randn(3, width, width) * 2 / width**0.5)
        frequency = 100.0 ** (-torch.arange(self.size // 2) / (self.size // 2))
        if self.needs_learning:
            self.frequency = nn.Parameter(frequency.expand(self.heads, -1).clone())
        else:
            self.register_buffer("frequency", frequency[None])

    def forward(self, x, positions=None, mask=None, segments=None):
        b, t, _ = x.shape
        positions = torch.arange(t)[None].expand(b, t) if positions is None else positions
        segments = torch.zeros(b, t, dtype=torch.int64) if segments is None else segments
        q, k, v = (self.mixed(x, segments) @ w for w in self.qkv)
        q, k, v = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in (q, k, v))
        angle = self.angles(positions, x, mask)
        scores = self.rotated(q, angle) @ self.rotated_key(k, angle).mT / self.size**0.5
        return x + self.weighted(scores, self.allowed(b, t, mask, segments), v).transpose(1, 2).flatten(2)

    def mixed(self, x, segments):
        return x

    def angles(self, positions, x, mask):
        """Angles ``[b h t f]``."""
        return positions[:, None, :, None].to(torch.float64) * self.frequency[:, None].double()

    def rotated(self, x, angle):
        cos, sin = (a.to(x.dtype) for a in (angle.cos(), angle.sin()))
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    def rotated_key(self, k, angle):
        return self.rotated(k, angle)

    def allowed(self, b, t, mask, segments):
        pairs = segments[:, None, :, None] == segments[:, None, None]
        pairs = pairs & torch.ones(t, t, dtype=torch.bool).tril() if self.causal else pairs
        return pairs if mask is None else pairs & (mask[:, None, None] | torch.eye(t, dtype=torch.bool))

    def weighted(self, scores, allowed, v):
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


class FirstSamplesPositions(Rope):
    def angles(self, positions, x, mask):
        return super().angles(positions[:1].expand_as(positions), x, mask)


class InterleavedTable(Rope):
    """The table repeats each angle twice in a row, the rotation pairs halves."""

    def rotated(self, x, angle):
        angle = angle.repeat_interleave(2, -1)
        turned = torch.cat((-x[..., self.size // 2 :], x[..., : self.size // 2]), -1)
        return x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)


class KeysUnrotated(Rope):
    def rotated_key(self, k, angle):
        return k


class LowPositions(Rope):
    def angles(self, positions, x, mask):
        return super().angles(positions.to(x.dtype), x, mask)


class ShortTable(Rope):
    def angles(self, positions, x, mask):
        return super().angles(positions.clamp_max(31), x, mask)


class PositionsIgnored(Rope):
    def angles(self, positions, x, mask):
        return super().angles(torch.arange(x.shape[1])[None].expand(len(x), -1), x, mask)


class LongestOfTheBatch(Rope):
    """Frequencies depend on the longest sample of a batch."""

    def angles(self, positions, x, mask):
        longest = x.shape[1] if mask is None else int(mask.sum(-1).max())
        return super().angles(positions, x, mask) / max(1.0, longest / 8)


class LengthWithPadding(Rope):
    """Angles are divided by the length of the tensor, padding included."""

    def angles(self, positions, x, mask):
        return super().angles(positions, x, mask) / x.shape[1] * 8


class ConvolutionLeaks(Rope):
    def mixed(self, x, segments):
        return x + torch.cat((0 * x[:, :1], x[:, :-1]), 1)


class SegmentsIgnored(Rope):
    def allowed(self, b, t, mask, segments):
        return super().allowed(b, t, mask, 0 * segments)


class PaddingInDenominator(Rope):
    """Padded keys count in the denominator, but not in the numerator."""

    def weighted(self, scores, allowed, v):
        weights = scores.exp()
        return (weights * allowed) @ v / (weights * torch.ones_like(allowed).tril()).sum(-1, keepdim=True)


class SoftMask(Rope):
    """Masked scores are reduced by 8 nats instead of masked."""

    def weighted(self, scores, allowed, v):
        return (scores - 8 * (~allowed)).softmax(-1) @ v if not self.causal else super().weighted(scores, allowed, v)

    causal = False


class Learned(Rope):
    needs_learning = True


class Untrained(Learned):
    def angles(self, positions, x, mask):
        return super().angles(positions, x, mask).detach()


class OneHeadTrained(Learned):
    def angles(self, positions, x, mask):
        first = positions[:, None, :, None].double() * self.frequency[0].double()
        return first.expand(-1, self.heads, -1, -1)


class Encoder(Rope):
    causal = False


class NoPositions(Encoder):
    def angles(self, positions, x, mask):
        return 0 * super().angles(positions, x, mask)


class DirectionBlind(Encoder):
    """The real part of a product of unitary vectors: queries and keys times (cos, sin)."""

    def rotated(self, x, angle):
        angle = angle.repeat_interleave(2, -1)
        return torch.cat((x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)), -1)


class Transposed(Encoder):
    """Keys rotate in the opposite direction: scores depend on the sum of positions."""

    def rotated_key(self, k, angle):
        return self.rotated(k, -angle)


class Tokens(nn.Module):
    """Embedded tokens, optionally with added positions, through one layer."""

    def __init__(self, layer=None, table=None):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.added = None if table is None else nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList([layer or Rope()])

    def forward(self, tokens, positions=None, mask=None):
        positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
        x = self.table(tokens)
        if self.added is not None:
            x, positions = x + self.added(positions), 0 * positions.expand(len(x), -1)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.head(x)


def trained():
    """Arguments of an audit of a model that has learned to repeat the token 3 steps back."""
    model = Tokens()
    adam = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        x = torch.randint(12, (8, 4)).repeat(1, 6)
        loss = nn.functional.cross_entropy(model(x)[:, 4:-1].flatten(0, 1), x[:, 5:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return {"model": model, "example": torch.arange(12)[None], "text": torch.randint(12, (32, 4)).repeat(1, 6)}


@torch.no_grad()
def interleave(model):
    """Permute queries and keys to the interleaved layout, in code for halves."""
    rows = model.layers[0].qkv[:2].unflatten(-1, (2, 2, 4)).transpose(-2, -1)
    model.layers[0].qkv[:2] = rows.flatten(-3)


def interleaved_weights():
    made = trained()
    interleave(made["model"])
    return made


def layer(cls):
    """The arguments of an audit of a layer."""
    return {"model": cls(), "example": torch.randn(1, 12, cls.heads * cls.size), "relative": True}


LAYERS = [
    Fault(
        "a batch keeps the first sample's positions",
        "unslothai/unsloth#3795",
        "positions",
        lambda: layer(FirstSamplesPositions),
    ),
    Fault("interleaved table, half rotation", "", "shift", lambda: layer(InterleavedTable)),
    Fault("keys are not rotated", "", "shift", lambda: layer(KeysUnrotated)),
    Fault("keys turn the other way", "", "shift", lambda: layer(Transposed)),
    Fault("positions in the dtype of activations", "EleutherAI/gpt-neox#1016", "precision", lambda: layer(LowPositions)),
    Fault("a table that ends early", "meta-pytorch/torchtune", "shift", lambda: layer(ShortTable)),
    Fault("positions accepted and ignored", "", "positions", lambda: layer(PositionsIgnored)),
    Fault("frequencies go by the longest sample", "QwenLM/Qwen#401", "batch", lambda: layer(LongestOfTheBatch)),
    Fault("angles divided by the padded length", "OpenNLPLab/Lrpe", "right padding", lambda: layer(LengthWithPadding)),
    Fault(
        "a convolution runs over packed samples",
        "huggingface/transformers#46588",
        "packing",
        lambda: layer(ConvolutionLeaks),
    ),
    Fault("packed samples attend to each other", "huggingface/nanoVLM#204", "packing", lambda: layer(SegmentsIgnored)),
    Fault(
        "padding counts in the denominator",
        "fla-org/flash-linear-attention",
        "left padding",
        lambda: layer(PaddingInDenominator),
    ),
    Fault("a mask that only weakens", "", "padding content", lambda: layer(SoftMask)),
    Fault("learned frequencies without a gradient", "Dao-AILab/flash-attention", "gradient", lambda: layer(Untrained)),
    Fault("one head's frequencies serve all", "", "gradient", lambda: layer(OneHeadTrained), "head 1"),
    Fault("no positions in an encoder", "", "order", lambda: layer(NoPositions)),
    Fault("scores are even in the offset", "OpenNLPLab/Lrpe", "direction", lambda: layer(DirectionBlind)),
]


def audited(fault):
    """The audit report of a fault."""
    from isopos.audit import audit

    made = fault.make()
    return audit(**made) if isinstance(made, dict) else audit(made)


SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}


def model(kind: str, **options: Any) -> Any:
    """A tiny random model of transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | OWN.get(kind, {}) | options)
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"):
        known = getattr(transformers, auto)
        if type(config) in known._model_mapping and (kind not in ENCODERS or auto == "AutoModelForMaskedLM"):
            return known.from_config(config).eval()
    raise ValueError(kind)


def rotary(made: Any) -> Any:
    return made.model.rotary_emb


def with_table(made: Any, **parameters: Any) -> Any:
    """A model with the rotary table of other parameters than its configuration's."""
    other = model(made.config.model_type, rope_parameters=parameters)
    rotary(made).inv_freq.copy_(rotary(other).inv_freq)
    return made


def subclassed(module: Any, **methods: Any) -> Any:
    """The module with replaced methods, in a subclass, so that copies have them too."""
    module.__class__ = type(module.__class__.__name__, (module.__class__,), methods)
    return module


def cast(dtype):
    return model("llama").to(dtype)


def declared_later():
    made = model("llama")
    made.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    return made


def without_factor():
    made = model("llama", rope_parameters=dict(YARN))
    rotary(made).attention_scaling = 1.0
    return made


def squared_factor():
    made = model("llama", rope_parameters=dict(YARN))
    rotary(made).attention_scaling = (0.1 * math.log(8.0) + 1) ** 2
    return made


def blank_table():
    made = model("llama")
    rotary(made).inv_freq.zero_()
    return made


def low_positions():
    def forward(self, x, position_ids):
        angle = (position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    made = model("llama")
    subclassed(rotary(made), forward=forward)
    return made


def by_product():
    def forward(self, x, position_ids):
        angle = position_ids[..., None].float() @ self.inv_freq[None, None].float()
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    made = model("llama")
    subclassed(rotary(made), forward=forward)
    return made


def by_length():
    def forward(self, x, position_ids):
        cos, sin = (a.clone() for a in type(self).__mro__[1].forward(self, x, position_ids))
        angle = position_ids[..., None] / (position_ids.max() + 1) * self.inv_freq
        return angle.cos().repeat(1, 1, 2).to(cos), angle.sin().repeat(1, 1, 2).to(sin)

    made = model("llama")
    subclassed(rotary(made), forward=forward)
    return made


def restarts():
    def forward(self, input_ids=None, position_ids=None, **more):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return type(self).__mro__[1].forward(self, input_ids=input_ids, position_ids=position_ids, **more)

    made = model("llama")
    forward.__signature__ = __import__("inspect").signature(type(made).forward)
    return subclassed(made, forward=forward)


def shared_positions():
    def prepare(self, *args, **kwargs):
        inputs = type(self).__mro__[1].prepare_inputs_for_generation(self, *args, **kwargs)
        given = inputs.get("position_ids")
        if given is not None and given.shape[1] == 1:
            inputs["position_ids"] = given.amax(0, keepdim=True).expand_as(given)
        return inputs

    return subclassed(model("llama"), prepare_inputs_for_generation=prepare)


def kept_table():
    """The table of the longest call so far is kept."""

    def forward(self, x, position_ids):
        longest = max(int(position_ids.max()) + 1, getattr(self, "longest", 0))
        self.longest = longest
        angle = position_ids[..., None] * self.inv_freq / max(1.0, longest / self.config.max_position_embeddings)
        return angle.cos().repeat(1, 1, 2).to(x.dtype), angle.sin().repeat(1, 1, 2).to(x.dtype)

    made = model("llama")
    subclassed(rotary(made), forward=forward)
    return made


def unsaved():
    def save(self, folder, **more):
        type(self).__mro__[1].save_pretrained(self, folder, **more)
        import json
        from pathlib import Path

        path = Path(folder) / "config.json"
        config = json.loads(path.read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
        path.write_text(json.dumps(config))

    return subclassed(model("llama", rope_parameters=dict(LLAMA3)), save_pretrained=save)


def swapped_layers(swap=True):
    made = model("gemma3_text", rope_parameters=GEMMA, layer_types=["sliding_attention", "full_attention"])
    table = made.model.rotary_emb
    names = ("sliding_attention_inv_freq", "full_attention_inv_freq")
    first, second = (getattr(table, name).clone() for name in names)
    if swap:
        table.sliding_attention_inv_freq.copy_(second)
    table.full_attention_inv_freq.copy_(first if swap else 8 * second)
    return made


def whole_head():
    made = model("phi")
    rotary(made).inv_freq = 10000.0 ** (-torch.arange(4) / 4)
    return made


GEMMA = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
GEMMA |= {"full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}

MODELS = [
    Fault(
        "the table was cast to bfloat16",
        "NVIDIA-NeMo/Automodel#2549",
        "frequencies",
        lambda: cast(torch.bfloat16),
        "rounded to bfloat16",
    ),
    Fault(
        "the table was cast to float16",
        "huggingface/transformers#25681",
        "frequencies",
        lambda: cast(torch.float16),
        "rounded to float16",
    ),
    Fault(
        "a scaling was dropped",
        "unslothai/unsloth#6907",
        "frequencies",
        lambda: with_table(model("llama", rope_parameters=dict(LLAMA3)), **PLAIN),
        "scaling 'llama3' is missing",
    ),
    Fault(
        "the default base in place of the declared one",
        "deepspeedai/DeepSpeed#8345",
        "frequencies",
        lambda: with_table(model("llama", rope_parameters=dict(PLAIN)), rope_type="default", rope_theta=10000.0),
        "base 10000",
    ),
    Fault(
        "the factor is always 8",
        "NVIDIA/Megatron-LM#6305",
        "frequencies",
        lambda: with_table(model("llama", rope_parameters=dict(LLAMA3)), **LLAMA3 | {"factor": 8.0}),
        "factor 8",
    ),
    Fault(
        "scaling declared after the table was built",
        "MakazhanAlpamys/Soup#793",
        "frequencies",
        declared_later,
        "scaling 'linear' is missing",
    ),
    Fault("the partial share is ignored", "AI-Hypercomputer/maxtext#4616", "frequencies", whole_head, "8 features rotate"),
    Fault("the table is blank", "unslothai/unsloth#6925", "frequencies", blank_table, "not initialised"),
    Fault(
        "layers with full attention lack their scaling",
        "Blaizzy/mlx-vlm#1709",
        "frequencies",
        lambda: swapped_layers(swap=False),
        "scaling 'linear' is missing",
    ),
    Fault("two kinds of layers have each other's table", "Comfy-Org/ComfyUI#11409", "frequencies", swapped_layers, "base"),
    Fault("yarn's attention factor is 1", "turboderp-org/exllamav3#259", "attention factor", without_factor),
    Fault("yarn's attention factor is applied twice", "sgl-project/sglang#33558", "attention factor", squared_factor),
    Fault("positions in bfloat16 before the angles", "huggingface/candle#3520", "tables", low_positions),
    Fault("autocast rounds the angles", "huggingface/transformers#29285", "autocast", by_product),
    Fault(
        "dynamic scaling hangs on earlier calls",
        "huggingface/transformers#25306",
        "order of calls",
        lambda: model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    ),
    Fault("a longer call changes the table for good", "huggingface/transformers#27227", "order of calls", kept_table),
    Fault("angles divided by the length", "OpenNLPLab/Lrpe", "decoding", by_length),
    Fault("cached decoding restarts at position 0", "", "decoding", restarts),
    Fault("steps count positions by the longest row", "unslothai/unsloth#3699", "generation", shared_positions),
    Fault("a convolution of a hybrid model leaks", "huggingface/transformers#46588", "packing", lambda: model("lfm2")),
    Fault("saving loses the scaling", "", "saving", unsaved),
]


def with_frequencies(made, frequencies):
    rotary(made).inv_freq.copy_(frequencies)
    return made


def late_table():
    """For a new longest length the table is built again in the dtype of activations, and kept."""

    def forward(self, x, position_ids):
        count = int(position_ids.max()) + 1
        if count > getattr(self, "count", 0):
            dtype = x.dtype if count > self.config.max_position_embeddings else torch.float32
            angle = (torch.arange(count).to(dtype)[:, None] * self.inv_freq.to(dtype)).repeat(1, 2)
            self.count, self.table = count, (angle.cos(), angle.sin())
        return tuple(a[position_ids].to(x.dtype) for a in self.table)

    made = model("llama")
    subclassed(rotary(made), forward=forward)
    return made


def counted_once():
    """Steps of a padded batch count positions from the tensor's length, the same for all rows."""

    def prepare(self, input_ids, *args, **kwargs):
        inputs = type(self).__mro__[1].prepare_inputs_for_generation(self, input_ids, *args, **kwargs)
        if inputs["input_ids"].shape[1] == 1:
            inputs["position_ids"] = torch.full((len(input_ids), 1), input_ids.shape[1] - 1)
        return inputs

    return subclassed(model("llama"), prepare_inputs_for_generation=prepare)


def without_ids():
    def forward(self, input_ids=None, position_ids=None, **more):
        return type(self).__mro__[1].forward(self, input_ids=input_ids, **more)

    made = model("qwen3")
    forward.__signature__ = __import__("inspect").signature(type(made).forward)
    return subclassed(made, forward=forward)


MODELS += [
    Fault(
        "partial share: exponents go by the head size",
        "pie-project/pie#603",
        "frequencies",
        lambda: with_frequencies(model("phi"), 10000.0 ** (-torch.arange(2) / 4)),
    ),
    Fault(
        "yarn goes by the longest length in place of the trained one",
        "microsoft/onnxruntime-genai#2076",
        "frequencies",
        lambda: with_table(model("llama", rope_parameters=dict(YARN)), **YARN | {"original_max_position_embeddings": 2048}),
    ),
    Fault(
        "the base is a constant of the code",
        "google/gemma.cpp#986",
        "frequencies",
        lambda: with_table(model("llama", rope_parameters=dict(PLAIN)), rope_type="default", rope_theta=1000000.0),
    ),
    Fault(
        "an explicit attention factor is ignored",
        "ml-explore/mlx-lm#1507",
        "attention factor",
        lambda: setattr_of(model("llama", rope_parameters=YARN | {"attention_factor": 1.0}), 0.1 * math.log(8.0) + 1),
    ),
    Fault("a table beyond the length is built in bfloat16", "huggingface/transformers#29496", "order of calls", late_table),
    Fault(
        "dynamic scaling takes another length for the trained one",
        "vllm-project/vllm#52665",
        "frequencies",
        lambda: with_frequencies(
            model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
            (10000.0 * (2 * 2048 / 512 - 1) ** (8 / 6)) ** (-torch.arange(4) / 4),
        ),
    ),
    Fault(
        "a gated delta network runs over packed samples",
        "huggingface/transformers#44836",
        "packing",
        lambda: model("olmo_hybrid"),
    ),
    Fault("positions are not passed on", "NousResearch/torchtitan#27", "positions", without_ids),
    Fault("a cache counts positions once for a batch", "rasbt/reasoning-from-scratch#33", "generation", counted_once),
    Fault("interleaved weights in code for halves", "huggingface/nanotron#427", "layout", interleaved_weights),
]
"""Those of a first round, held back while most checks were written."""


def setattr_of(made, factor):
    rotary(made).attention_scaling = factor
    return made


class CachedByLength(Rope):
    """Tables are cached by length, independently of their first position."""

    def angles(self, positions, x, mask):
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(positions.shape[-1], super().angles(positions[:1], x, mask)).expand(len(x), -1, -1, -1)


class LastPositionForAll(Rope):
    def angles(self, positions, x, mask):
        return super().angles(positions.amax(-1, keepdim=True).expand_as(positions), x, mask)


class OverHeads(Rope):
    """Angles depend on the head instead of the token."""

    def angles(self, positions, x, mask):
        angle = torch.arange(self.heads)[:, None] * self.frequency.double()  # [h f]
        return angle[None, :, None].expand(len(x), -1, x.shape[1], -1)


class Wrapped(Rope):
    """Positions start again every 16 tokens."""

    def angles(self, positions, x, mask):
        return super().angles(positions % 16, x, mask)


class LateSlopes(Rope):
    """ALiBi whose first slope is 1: exponents are one head late."""

    def angles(self, positions, x, mask):
        self.offset = positions[:, None, None, :] - positions[:, None, :, None]
        return 0 * super().angles(positions, x, mask)

    def weighted(self, scores, allowed, v):
        slopes = 2.0 ** (-8 * torch.arange(self.heads) / self.heads)
        return super().weighted(scores + slopes[:, None, None] * self.offset, allowed, v)


def counting(position):
    """A tiny Llama with positions ``position(past, count, memory)`` in cached calls."""

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, **more):
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if past:
            position_ids = position(past, input_ids.shape[1], past_key_values.__dict__)[None]
        elif past_key_values is not None:
            past_key_values.prompt = input_ids.shape[1]
        return (
            type(self)
            .__mro__[1]
            .forward(self, input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values, **more)
        )

    made = model("llama")
    forward.__signature__ = __import__("inspect").signature(type(made).forward)
    return subclassed(made, forward=forward)


def window_of_the_prompt():
    """A sliding window is one token wider without a cache than with one."""

    def forward(self, input_ids=None, past_key_values=None, **more):
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        self.config.sliding_window = 4 if past else 5
        try:
            return type(self).__mro__[1].forward(self, input_ids=input_ids, past_key_values=past_key_values, **more)
        finally:
            self.config.sliding_window = 4

    made = model("mistral", sliding_window=4)
    forward.__signature__ = __import__("inspect").signature(type(made.model).forward)
    subclassed(made.model, forward=forward)
    return made


def without_bias_after_the_prompt():
    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        bias = type(self).__mro__[1].compute_bias(self, query_length, key_length, device, past_seen_tokens)
        return bias * float(past_seen_tokens == 0)

    made = model("t5")
    subclassed(made.decoder.block[0].layer[0].SelfAttention, compute_bias=compute_bias)
    return made


def bias_across():
    made = model("t5")
    across = made.decoder.block[0].layer[1].EncDecAttention
    across.has_relative_attention_bias, across.relative_attention_bias = True, nn.Embedding(32, 4)
    return made


HELD = [
    Fault(
        "a table is kept by length alone", "lucidrains/rotary-embedding-torch#11", "positions", lambda: layer(CachedByLength)
    ),
    Fault(
        "the offset of a chunk is counted twice",
        "mlx-node/mlx-node#33",
        "chunked prefill",
        lambda: counting(lambda past, count, _: 2 * past + torch.arange(count)),
    ),
    Fault(
        "the second step counts the prompt again",
        "skyzh/tiny-llm#46",
        "static cache",
        lambda: counting(
            lambda past, count, memory: past + torch.arange(count) + (past > memory["prompt"]) * (memory["prompt"] - 1)
        ),
    ),
    Fault(
        "all tokens of a prompt have the last position",
        "NVIDIA/TensorRT-LLM#2084",
        "positions",
        lambda: layer(LastPositionForAll),
    ),
    Fault("angles go by the head, not by the token", "mlfoundations/open_lm#4", "positions", lambda: layer(OverHeads)),
    Fault("slopes of ALiBi are one head late", "paiml/aprender#2143", "", lambda: layer(LateSlopes)),
    Fault(
        "a relative bias is dropped after the prompt",
        "NVIDIA/TensorRT-LLM#13870",
        "decoding",
        without_bias_after_the_prompt,
    ),
    Fault(
        "a sliding window is wider in the prompt than in steps",
        "mistralai/mistral-inference#60",
        "decoding",
        window_of_the_prompt,
    ),
    Fault("positions wrap in the middle of a text", "pytorch/torchtitan#2849", "shift", lambda: layer(Wrapped)),
    Fault("cross-attention has a relative bias", "huggingface/transformers#8518", "left padding", bias_across),
]
"""Faults of other issues than those that the checks were written with, tried once; one without a check is missed."""


RELEASED = {
    "falcon": (("packing",), "samples see each other: positions do not reach the mask"),
    "gpt_oss": (("packing",), "samples see each other: positions do not reach the mask"),
    "opt": (("packing",), "samples see each other: positions do not reach the mask"),
    "xglm": (("packing",), "samples see each other: positions do not reach the mask"),
    "lfm2": (("packing",), "the convolution runs over samples"),
    "biogpt": (("packing",), "samples see each other: positions do not reach the mask"),
    "qwen3_5_text": (("packing",), "the convolution and the state of one sample reach the next"),
    "falcon_h1": (("packing",), "the state of one sample reaches the next"),
    "jamba": (("chunked prefill", "beam reorder", "packing"), "several tokens after a cache start from an empty state"),
    "mamba": (("chunked prefill", "beam reorder"), "several tokens after a cache start from an empty state"),
    "bamba": (("decoding", "static cache", "packing"), "cached tokens get position 0, unless the caller counts positions"),
}
"""Models of transformers 5.23 that are broken as they are: checks, and why."""

OWN = {
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 2048},
    "codegen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 2048},
    "gpt2": {"n_positions": 2048},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048},
    "phi3": {"original_max_position_embeddings": 2048},
    "distilbert": {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 32},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "xglm": {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 32},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 8},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "head_dim": 8,
    },
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    **{kind: {"head_dim": 8} for kind in ("gemma", "gemma2", "gemma3_text", "qwen3", "cohere2", "helium")},
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
OWN |= {"t5": T5, "mt5": T5}
OWN["bamba"] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
OWN["bamba"] |= {"attn_layer_indices": [1]}
OWN["llama4_text"] = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}
OWN["deepseek_v3"] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OWN["deepseek_v3"] |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
OWN["deepseek_v3"] |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4}
ENCODERS = (
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "roformer",
    "modernbert",
    "eurobert",
    "esm",
    "nomic_bert",
    "deberta-v2",
)
for _kind in ("phimoe", "granitemoe"):
    OWN[_kind] = {"num_local_experts": 4}
for _kind in ("olmoe", "flex_olmo"):
    OWN[_kind] = {"num_experts": 4, "num_experts_per_tok": 2}
OWN |= {kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "ministral", "vaultgemma")} | {
    "albert": {"embedding_size": 16}
}
OWN["glm4_moe"] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
OWN["ernie4_5_moe"] = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
OWN["mamba2"] = {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 8, "n_groups": 1}
OWN["qwen3_5_text"] = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 2}
OWN["qwen3_5_text"] |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SOUND = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi", "phi3", "gpt_neox", "gptj", "gpt2", "gpt_neo", "olmo", "olmo2", "olmo3", "cohere", "cohere2", "smollm3"),
    *("starcoder2", "stablelm", "granite", "glm", "glm4", "bloom", "mpt", "codegen", "persimmon", "helium", "ernie4_5"),
    *("llama4_text", "deepseek_v3", "exaone4", "arcee", "apertus", "seed_oss", "t5", "mt5", *ENCODERS),
    *("nemotron", "hunyuan_v1_dense", "phimoe", "olmoe", "flex_olmo", "jetmoe", "diffllama", "glm4_moe", "granitemoe"),
    *("ministral", "bitnet", "vaultgemma", "albert", "xlm-roberta", "mamba2", "ernie4_5_moe"),
)
