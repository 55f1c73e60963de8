"""Tiny random models of transformers, one row per family that `isopos.integrations.transformers.patch` supports.

docs/transformers.md lists them; tests/test_transformers_families.py runs over them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY, HEAD_DIM, HEADS, KEY_HEADS = 50, 16, 4, 2
SIZES = {"vocab_size": VOCABULARY, "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 256, "pad_token_id": 0}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
VISION = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 32, "num_attention_heads": HEADS}
GRID = {"patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2}
ROTARY, OWN_CODE, ADDED, IMAGES = "rotary", "rotary, own attention", "added", "patches"


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Args:
        title: Name in the documentation.
        cls: Class in transformers, or in the file of its model.
        kind: The structure by which it has positions.
        only: Why no other schemes than rotations are served; empty where all are.
        options: Of its configuration.
        config: Class of its configuration.
    """

    title: str
    cls: str
    config: str
    kind: str = ROTARY
    only: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)

    def make(self, **options: Any) -> Any:
        """A random model with large weights, so that its outputs depend on positions."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(
            **self.sizes | {"bos_token_id": None, "eos_token_id": None} | self.options | options
        )
        cls = getattr(transformers, self.cls, None)
        if cls is None:
            from isopos.integrations.transformers.saving import class_named

            cls = class_named(self.cls, config)
        model = cls(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2 and "embed" not in name and "wte" not in name:
                    weight.mul_(4)
                if weight.ndim == 3:
                    torch.nn.init.normal_(weight, std=0.1)  # experts, and tokens that are no words
        return model


def decoder(name: str, **options: Any) -> Family:
    """A causal language model whose classes have the usual names."""
    own = {key: options.pop(key) for key in ("kind", "only", "title") if key in options}
    return Family(own.pop("title", name), f"{name}ForCausalLM", f"{name}Config", options=options, **own)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {
    "llama": decoder("Llama", title="Llama"),
    "mistral": decoder("Mistral", sliding_window=None),
    "mixtral": decoder("Mixtral", num_local_experts=4),
    "qwen2": decoder("Qwen2", title="Qwen 2"),
    "qwen3": decoder("Qwen3", title="Qwen 3", head_dim=HEAD_DIM, hidden_size=48),
    "qwen3_moe": decoder("Qwen3Moe", title="Qwen 3 MoE", head_dim=HEAD_DIM, **MOE),
    "gemma": decoder("Gemma", head_dim=HEAD_DIM),
    "gemma2": decoder("Gemma2", title="Gemma 2", head_dim=HEAD_DIM, only="its attention caps logits"),
    "gemma3": decoder("Gemma3", title="Gemma 3, a frequency per layer type", head_dim=HEAD_DIM, **TYPES),
    "phi3": decoder("Phi3", title="Phi-3", original_max_position_embeddings=256),
    "olmo2": decoder("Olmo2", title="OLMo 2"),
    "gpt_neox": decoder("GPTNeoX", title="GPT-NeoX, a part of a head"),
    "smollm3": decoder("SmolLM3", title="SmolLM 3, layers without positions", no_rope_layers=[1, 0]),
    "cohere2": decoder("Cohere2", title="Cohere 2, layers without positions", head_dim=HEAD_DIM, **TYPES),
    "llama4": decoder(
        "Llama4",
        title="Llama 4 text, complex tables and layers without positions",
        head_dim=HEAD_DIM,
        num_local_experts=2,
        intermediate_size_mlp=32,
        no_rope_layers=[1, 0],
        attention_chunk_size=64,
    ),
    "falcon": decoder("Falcon", kind=OWN_CODE, only="its attention is its own code, which takes a decay, too"),
    "gpt2": Family("GPT-2", "GPT2LMHeadModel", "GPT2Config", ADDED),
    "modernbert": Family(
        "ModernBERT, a frequency per layer type", "ModernBertForMaskedLM", "ModernBertConfig", options={**TYPES}
    ),
    "bert": Family("BERT", "BertForMaskedLM", "BertConfig", ADDED),
    "roformer": Family("RoFormer", "RoFormerForMaskedLM", "RoFormerConfig", OWN_CODE, "its attention is its own code"),
    "vit": Family("ViT", "ViTModel", "ViTConfig", ADDED, sizes=VISION, options={"image_size": 16, "patch_size": 4}),
}
FAMILIES["llama4"] = Family(**vars(FAMILIES["llama4"]) | {"config": "Llama4TextConfig"})
FAMILIES["gemma3"] = Family(**vars(FAMILIES["gemma3"]) | {"config": "Gemma3TextConfig"})
for name, version, sections in (("qwen2_vl", "2", [2, 3, 3]), ("qwen3_vl", "3", [4, 2, 2])):
    title = f"Qwen{version}-VL"
    text = {"rope_parameters": SECTIONS | {"mrope_section": sections}, "head_dim": HEAD_DIM}
    FAMILIES[name] = Family(
        f"{title} text, three coordinates", f"Qwen{version}VLTextModel", f"Qwen{version}VLTextConfig", options=text
    )
without = "its attention gets no mask"
FAMILIES["qwen2_vl_vision"] = Family(
    "Qwen2-VL vision", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", IMAGES, without,
    {"depth": 2, "embed_dim": HEADS * HEAD_DIM, "num_heads": HEADS, "mlp_ratio": 2, "hidden_size": 32}, GRID,
)  # fmt: skip
FAMILIES["qwen3_vl_vision"] = Family(
    "Qwen3-VL vision", "Qwen3VLVisionModel", "Qwen3VLVisionConfig", IMAGES, without,
    {"depth": 2, "num_heads": HEADS, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    GRID | VISION,
)  # fmt: skip
FAMILIES["dinov3_vit"] = Family(
    "DINOv3 ViT", "DINOv3ViTModel", "DINOv3ViTConfig", IMAGES, without, {"image_size": 16, "patch_size": 4}, VISION
)
