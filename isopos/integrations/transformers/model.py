"""A causal language model of isopos as one of transformers: `IsoposConfig`, `IsoposForCausalLM` and `StateLayer`.

Importing this module imports transformers, which takes seconds, and registers the model there.
"""

from dataclasses import field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast  # pyright: ignore[reportMissingImports]

from isopos.integrations.transformers.saving import made, scheme_entry
from isopos.integrations.transformers.states import StateLayer
from isopos.models import TOKEN_STD, Decoder, PerLayer
from isopos.models.blocks import ACTIVATIONS
from isopos.models.decoder import AdaptiveHead
from isopos.schemes import Scheme

CODE = """# Classes of this model, which are those of the package isopos: pip install "isopos[hf]".
from isopos.integrations.transformers import IsoposConfig, IsoposForCausalLM

__all__ = ["IsoposConfig", "IsoposForCausalLM"]
"""  # what trust_remote_code=True runs of a folder, so that transformers finds the classes where nobody has imported isopos
FILE = "isopos_model"


def from_decoder(decoder: Decoder) -> Any:
    """An `IsoposForCausalLM` with the weights of a `Decoder` with a named scheme, and their dtype.

    Raises:
        ValueError: If no function of `isopos.schemes.REGISTRY` built the scheme, or if its options cannot be saved.
    """
    if isinstance(decoder.scheme, PerLayer):
        raise ValueError("scheme: expected one for all layers, which a configuration holds, got one per layer")
    entry = scheme_entry(decoder.scheme)
    if entry["scheme"] is None:
        raise ValueError("scheme: expected one that a function of isopos.schemes.REGISTRY makes again, got one of parts")
    block: Any = decoder.blocks[-1]
    head = decoder.head
    layer, activation = block.attention, block.feed_forward[1]
    config = IsoposConfig(
        vocab_size=decoder.tokens.num_embeddings,
        hidden_size=decoder.tokens.embedding_dim,
        num_hidden_layers=len(decoder.blocks),
        num_attention_heads=layer.heads,
        num_key_value_heads=None if layer.kv_heads == layer.heads else layer.kv_heads,
        intermediate_size=block.feed_forward[0].out_features,
        hidden_act=next(name for name, kind in ACTIVATIONS.items() if isinstance(activation, kind)),
        scheme=entry["scheme"],
        scheme_options=entry["options"],
        scheme_extension=entry["extension"],
        fingerprint=entry["fingerprint"],
        cutoffs=list(head.softmax.cutoffs[:-1]) if isinstance(head, AdaptiveHead) else [],
        dropout=block.dropout.p,
        attention_dropout=layer.dropout,
        stochastic_depth=block.stochastic_depth,
        window=layer.window,
        tie_word_embeddings=getattr(head, "weight", None) is decoder.tokens.weight,
    )
    model: Any = IsoposForCausalLM(config)
    model.to(decoder.tokens.weight.dtype)
    model.decoder.load_state_dict(decoder.state_dict())
    for own, theirs in zip(model.decoder.parameters(), decoder.parameters(), strict=True):
        own.requires_grad_(theirs.requires_grad)
    return model.train(decoder.training)


class IsoposConfig(PreTrainedConfig):
    """Sizes of an `IsoposForCausalLM`, and its scheme: a name and options, as ``isopos.NAME(d, h, **options)`` has them.

    An extension is the arguments of `Scheme.extend`, or None. The fingerprint is the scheme's, stored when a model is
    built. Other names are those of transformers and of `isopos.models.Decoder`.
    """

    model_type = "isopos"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "relu"
    scheme: str = "rope"
    scheme_options: dict[str, Any] = field(default_factory=dict)
    scheme_extension: dict[str, Any] | None = None
    fingerprint: str | None = None
    cutoffs: list[int] = field(default_factory=list)
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0
    window: int | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        self.auto_map = {
            "AutoConfig": f"{FILE}.IsoposConfig",
            "AutoModelForCausalLM": f"{FILE}.IsoposForCausalLM",
        }
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        Path(save_directory, f"{FILE}.py").write_text(CODE, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing, as for the model."""


class IsoposForCausalLM(PreTrainedModel, GenerationMixin):
    """`isopos.models.Decoder` with any scheme of positions on a line, linear attention or softmax.

    ``generate`` and ``Trainer`` take it unchanged. Its cache is a ``Cache`` of `StateLayer`, of constant size for linear
    attention. By default positions count from the first token that the attention mask keeps.

    Args:
        config: An `IsoposConfig`.

    Raises:
        ValueError: For a scheme with other positions, and for a scheme with another fingerprint than the configuration's.
    """

    config: Any
    config_class = IsoposConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = {"decoder.head.weight": "decoder.tokens.weight"}  # noqa: RUF012  # where the configuration ties them

    def __init__(self, config: Any):
        super().__init__(config)
        names = ("dropout", "attention_dropout", "stochastic_depth", "window")
        options = {name: getattr(config, name) for name in names} | {"hidden_dim": config.intermediate_size}
        options |= {
            "activation": config.hidden_act,
            "kv_heads": config.num_key_value_heads,
            "cutoffs": tuple(config.cutoffs),
        }
        sizes = config.vocab_size, config.hidden_size, config.num_hidden_layers
        self.decoder = Decoder(*sizes, _scheme(config), tied=config.tie_word_embeddings, **options)
        self.gradient_checkpointing = False
        self.post_init()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        scheme: Any = self.decoder.scheme  # which may have been extended meanwhile
        entry = scheme_entry(scheme)
        self.config.scheme_extension, self.config.fingerprint = entry["extension"], entry["fingerprint"]
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: the code that is saved in a folder is `CODE`, not a copy of this file."""

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.decoder.tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return None if isinstance(self.decoder.head, AdaptiveHead) else self.decoder.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.decoder.head = new_embeddings

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        """As in transformers; ValueError with cutoffs, whose head has clusters of tokens."""
        if isinstance(self.decoder.head, AdaptiveHead):
            raise ValueError("cutoffs: expected none to resize token embeddings, since they divide the tokens, got some")
        return super().resize_token_embeddings(*arguments, **options)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Logits ``[b t vocabulary]`` of the tokens after input_ids ``[b t]``, the loss of labels, and the cache.

        Args:
            input_ids: Tokens; with a cache, the tokens after it.
            attention_mask: ``[b s]`` over all tokens so far, 0 for padding.
            past_key_values: Cache of an earlier call.
            labels: ``[b t]``, the tokens themselves, which are shifted here; -100 for no label.
            use_cache: Whether to return a cache; by default in evaluation mode if the configuration says so.
            logits_to_keep: Number of last tokens with logits, or indices of tokens; 0 for all.
            return_dict: Whether the output has names; the default is True.
            position_ids: ``[b t]`` of these tokens. Without earlier tokens, a sample begins where they do not increase from
                one token to the next and neither is padding: so ``DataCollatorWithFlattening`` packs samples, which do not
                see each other. No cache is returned then.
            others: Arguments of the loss, such as ``num_items_in_batch``.

        Raises:
            ValueError: For an argument that the model does not serve; for packed samples with ``use_cache=True``, or in
                several processes.
        """
        for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
            value = others.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name}: expected none, since the model keeps neither embeddings nor weights of attention")
        if input_ids is None:
            raise ValueError("input_ids: expected tokens [b t], got none")
        segments = None if past_key_values is not None else _segments(position_ids, attention_mask)
        if segments is not None and (use_cache or self.decoder.group is not None):
            name, got = ("use_cache", "True") if use_cache else ("position_ids", "some in several processes")
            raise ValueError(f"{name}: expected none with packed samples, whose position_ids restart, got {got}")
        cached = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        cached = cached and segments is None
        if cached and past_key_values is None:
            past_key_values = self.empty_cache()
        x = self._features(input_ids, attention_mask, position_ids, past_key_values, segments)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.head(x[:, rows])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values if cached else None)
        return out.to_tuple() if return_dict is False else out

    def empty_cache(self) -> Any:
        """A cache without tokens."""
        return Cache(layers=[StateLayer() for _ in self.decoder.blocks])

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=TOKEN_STD)
        elif getattr(module, "weight", None) is self.decoder.tokens.weight:
            return  # a tied head
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # but one of its own

    def _features(
        self, ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: Any, segments: Tensor | None
    ) -> Tensor:
        """Inputs of the head ``[b t m]``; updates the cache."""
        count, past = ids.shape[1], 0 if cache is None else cache.get_seq_length()
        if mask is not None and (mask.ndim != 2 or mask.shape[1] != past + count):
            raise ValueError(f"attention_mask: expected [b {past + count}], of all tokens so far, got {list(mask.shape)}")
        x = torch.arange(past, past + count, device=ids.device)[:, None] if position_ids is None else position_ids[..., None]
        if position_ids is None and mask is not None:
            x = x - mask.bool().int().argmax(-1)[:, None, None]  # padding on the left is before position 0
            scheme = self.decoder.scheme
            x = x if scheme.embedding is scheme.max_length is None else x.clamp_min(0)
        decoder = self.decoder
        if decoder.group is not None and position_ids is None and mask is not None:
            raise ValueError(
                "position_ids: expected those of the whole sequence with an attention_mask of a shard, got none"
            )
        positions = None if position_ids is None and mask is None else x
        mask = None if mask is None else mask[:, past:].bool()
        if cache is None:
            decoder.recompute = self.gradient_checkpointing and self.training
            return decoder.features(ids, positions, causal=True, mask=mask, segment_ids=segments)
        if not all(isinstance(layer, StateLayer) for layer in cache.layers):
            raise ValueError("past_key_values: expected what this model returned, or model.empty_cache(), got another cache")
        y, at = decoder.enter(ids, x, [layer.state for layer in cache.layers])
        for block, arguments, layer in zip(decoder.blocks, at, cache.layers, strict=True):
            y, state = block(y, arguments, causal=True, mask=mask, return_state=True)
            layer.update(state, count)
        return decoder.norm(y)


def _segments(position_ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Numbers ``[b t]`` of packed samples, whose positions restart; None if none does, outside a compiler."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return None
    restarts = position_ids.diff(dim=-1) <= 0
    if mask is not None:
        restarts = restarts & mask[:, 1:].bool() & mask[:, :-1].bool()
    restarts = F.pad(restarts, (1, 0))
    return restarts.cumsum(-1) if torch.compiler.is_compiling() or restarts.any() else None


def _scheme(config: Any) -> Scheme:
    """Build the scheme of a configuration, and store the scheme's fingerprint there."""
    sizes = {"head_dim": config.hidden_size // config.num_attention_heads, "heads": config.num_attention_heads}
    with torch.device("cpu"):  # also where the rest is made without memory
        scheme = made(config.scheme, sizes | config.scheme_options, config.scheme_extension)
    if scheme.group.columns != 1 or scheme.group.refers_to_rows:
        raise ValueError(f"scheme: expected positions on a line or ring, got {scheme.group}")
    if config.fingerprint not in (None, scheme.fingerprint):
        raise ValueError(
            f"scheme: expected that of the checkpoint, {config.scheme} with fingerprint {config.fingerprint[:12]}, got "
            f"{scheme.fingerprint[:12]}"
        )
    config.fingerprint = scheme.fingerprint
    return scheme


AutoConfig.register("isopos", IsoposConfig)
AutoModelForCausalLM.register(IsoposConfig, IsoposForCausalLM)
