"""Models of transformers as subjects of an audit: by structure and signature, not by name."""

import copy
import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isopos.audit.subject import RotaryModule, Subject
from isopos.scheme import Scheme

TABLE = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_embed\w*)$")
FREQUENCIES = re.compile(r"^(?:(?P<kind>.+)_)?inv_freq$")
REACHED, LONGEST = 8, 64  # tokens after a sliding window, and the most tokens of a call that is to leave one
DECLARED = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TEXT = """The sun was low when the two brothers came down from the hill. The younger one carried a basket of apples, and the
older one led the horse by its rope. They had walked since the early morning, and neither of them had said a word
about the letter that lay in the older one's pocket. At the bridge they stopped. The water was high after the rain of
the last days, and the road on the other side could not be seen. "We can wait here until the morning," said the
younger brother, "or we can go back to the mill and ask for a bed." The older brother looked at the water for a long
time before he gave an answer."""


def loaded(folder: Path) -> Any:
    """Load the model of a folder without remote code or network; weights are random if the folder has none.

    Raises:
        ValueError: For a folder without config.json, or with a model that transformers does not have.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: expected a folder with config.json, got {folder}")
    import transformers

    from isopos.integrations.transformers import load, saving  # registers our model, too

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ValueError(f"model: transformers does not read {folder}: {str(error).splitlines()[0]}") from None
    if getattr(config, saving.ENTRY, None) is not None:  # patched or converted
        with _without_progress_bars():
            return load(folder)
    cls: Any = getattr(transformers, (config.architectures or [""])[0], None) or _class_of(transformers, config)
    if any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        with _without_progress_bars():
            return cls.from_pretrained(folder, local_files_only=True, dtype=config.dtype or torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = cls._from_config(config)
    made.config._name_or_path = str(folder)
    return made


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def example_tokens(folder: Path, text: str | None) -> Tensor | None:
    """Tokens ``[1 t]`` of a text, by default a few sentences, from a folder's tokenizer; None without a tokenizer.

    Raises:
        ValueError: If a text is passed and the folder has no tokenizer that transformers can read.
    """
    if not any((folder / name).is_file() for name in TOKENIZERS):
        if text is not None:
            raise ValueError(f"text: expected a folder with a tokenizer ({', '.join(TOKENIZERS)}), got {folder}")
        return None
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        if text is not None:
            raise ValueError(f"text: transformers does not read the tokenizer of {folder}: {error}") from None
        return None
    return torch.tensor([tokenizer(text or TEXT)["input_ids"][:512]])


def _class_of(transformers: Any, config: Any) -> Any:
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel"):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            match = mapping[type(config)]
            return match[0] if isinstance(match, tuple) else match
    raise ValueError(f"model: expected one that transformers has, got model_type {config.model_type!r}")


def subjects(model: Any, name: str) -> list[tuple[str, Subject]]:
    """Parts of a model to audit: the model, or its encoder and decoder. Heads without an output per token are removed.

    Raises:
        ValueError: For a model whose inputs are not tokens.
    """
    if not hasattr(model.config.get_text_config(), "vocab_size"):
        raise ValueError(f"model: expected one of tokens, got {type(model).__name__}, whose configuration has no vocab_size")
    if not getattr(model.config, "is_encoder_decoder", False):
        subject = TransformersSubject.of(model, name)
        return [("", subject if subject.is_of_tokens() else TransformersSubject.of(model.base_model, name))]
    encoder = TransformersSubject.of(model.get_encoder(), name, part="encoder", config=model.config)
    return [("encoder", encoder), ("decoder", TransformersSubject.of(model, name, part="decoder"))]


class TransformersSubject(Subject):
    """A model of transformers, or the encoder or decoder of one."""

    config: Any
    part: str = ""
    vocabulary: Tensor
    accepts: frozenset[str]

    @classmethod
    def of(cls, model: Any, name: str, part: str = "", config: Any = None) -> "TransformersSubject":
        """The subject of a model, with the abilities that its signature and structure show."""
        config = config or model.config
        text = config.get_text_config(decoder=part != "encoder")
        subject = cls(model, name, heads=getattr(text, "num_attention_heads", None))
        subject.config, subject.part = text, part
        subject.accepts = frozenset(_signature(model) | _signature(getattr(model, "base_model", model)))
        subject.vocabulary = _ordinary(text)
        subject.encoding, subject.is_relative = _encoding(model, text)
        subject.limit = _limit(model, text, subject.encoding)
        if subject.limit is not None and subject.limit < 2 * subject.length:
            subject.length = max(8, subject.limit // 2)
        window = getattr(text, "sliding_window", None)
        if isinstance(window, int) and subject.length <= window + REACHED <= min(LONGEST, subject.limit or LONGEST):
            subject.length = window + REACHED  # so that the first keys leave it
        subject.abilities = subject._abilities()
        return subject

    def is_of_tokens(self) -> bool:
        """Whether there is one output per token. True if the call fails, so that checks report the failure."""
        tokens = self.tokens(1, self.length)
        try:
            with torch.no_grad():
                output = self.call(copy.deepcopy(self.module), tokens)  # a call may change buffers
        except RuntimeError:
            return True
        return output.ndim == 3 and output.shape[:2] == tokens.shape

    def takes(self, what: str) -> str:
        """Name of the model's argument for tokens or masks."""
        names = {"mask": "attention_mask", "tokens": "input_ids"}
        return ("decoder_" if self.part == "decoder" else "") + names[what]

    def prepared(self, made: nn.Module) -> nn.Module:
        """The model with experts computed by plain matrix products, which support float64."""
        choose: Any = getattr(made, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")
        return made

    def tokens(self, rows: int, count: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1 + seed)
        return self.vocabulary[torch.randint(len(self.vocabulary), (rows, count), generator=generator)]

    def call(
        self, module: nn.Module, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        return _outputs(self._called(module, tokens, positions, mask, **more))

    def _called(
        self, module: nn.Module, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, **more: Any
    ) -> Any:
        """All that the model returns."""
        options: dict[str, Any] = {self.takes("tokens"): tokens, **more}
        if self.part == "decoder":
            options["input_ids"] = self.tokens(1, 7, seed=11).expand(len(tokens), -1)
        if positions is not None and "positions" in self.abilities:
            options["position_ids"] = positions
        if mask is not None and self.takes("mask") in self.accepts:
            options[self.takes("mask")] = mask.long()
        if "use_cache" in self.accepts:
            options.setdefault("use_cache", False)
        return module(**options)

    def packed(self, tokens: Tensor, lengths: Sequence[int], masked: bool = False) -> Tensor:
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        with torch.no_grad():
            mask = torch.ones_like(positions, dtype=torch.bool) if masked else None
            return self.call(self.exact, tokens, positions, mask)

    def stream(self, chunks: Sequence[Tensor], kind: str = "dynamic", order: Tensor | None = None) -> Tensor:
        from transformers import DynamicCache, EncoderDecoderCache, StaticCache

        config = copy.deepcopy(self.config)
        count = sum(chunk.shape[1] for chunk in chunks)
        own = not getattr(self.module, "_supports_default_dynamic_cache", lambda: True)()  # made by the first call
        cache: Any = None if own else DynamicCache(config=config)
        if kind == "static":
            cache = StaticCache(config=config, max_cache_len=count + 4)
        if self.part == "decoder":
            cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        name, outputs = self._cache_name(), []
        assert name is not None
        for i, chunk in enumerate(chunks):
            if order is not None and i == len(chunks) - 1:
                cache.reorder_cache(order)
            with torch.no_grad():
                out = self._called(self.exact, chunk, use_cache=True, **{name: cache})
            outputs.append(_outputs(out))
            cache = getattr(out, name, None) if cache is None else cache
            if cache is None:
                raise ValueError(f"{name}: expected a cache from the first call, got none")
        return torch.cat(outputs, 1)

    def generated(self, tokens: Tensor, mask: Tensor, count: int) -> Tensor:
        from transformers import GenerationConfig

        settings = GenerationConfig(
            max_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=int(self.vocabulary[0]), eos_token_id=None,
            bos_token_id=None, output_logits=True, return_dict_in_generate=True, use_cache=True,
        )  # fmt: skip
        model: Any = self.exact
        model.generation_config = settings
        out = model.generate(input_ids=tokens, attention_mask=mask.long(), generation_config=settings)
        return torch.stack(out.logits, 1)

    def rotary(self, module: nn.Module) -> list[RotaryModule]:
        modules = []
        for name, child in module.named_modules():
            for buffer, values in child.named_buffers(recurse=False):
                if (match := FREQUENCIES.match(buffer)) and "original" not in buffer and "long" not in buffer:
                    modules += self._rotary(name, child, match["kind"], values)
        return modules

    def entry(self) -> str:
        path = Path(self.module.config._name_or_path) / "config.json"  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType, reportOptionalMemberAccess]
        if not path.is_file():
            return "config.rope_parameters"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if any(f'"{name}"' in line for name in DECLARED):
                return f"{path.name}:{number}"
        return path.name

    def loaded_again(self) -> nn.Module:
        with tempfile.TemporaryDirectory() as folder, _without_progress_bars():
            model: Any = copy.deepcopy(self.module)  # saving writes into its configuration
            model.save_pretrained(folder)
            return type(model).from_pretrained(folder, local_files_only=True, dtype=model.dtype)

    def _abilities(self) -> frozenset[str]:
        abilities = {"casts"}
        if self.takes("mask") in self.accepts:
            abilities.add("mask")
        if "position_ids" in self.accepts and self.part != "decoder" and self.encoding != "ALiBi":
            abilities.add("positions")
        causal = self.part == "decoder" or (self.part != "encoder" and self._is_causal())
        abilities.add("causal" if causal else "bidirectional")
        if causal and "positions" in abilities:
            abilities.add("packing")
        if causal and self._cache_name() and hasattr(self.module, "generate"):
            abilities.add("cache")
        if causal and self.part == "" and getattr(self.module, "can_generate", bool)():
            abilities.add("generate")
        if "cache" in abilities and self.part == "" and getattr(type(self.module), "_can_compile_fullgraph", False):
            abilities.add("static")
        if self.part != "encoder" and hasattr(self.module, "save_pretrained"):
            abilities.add("save")
        own = getattr(self.config, "model_type", None) == "isopos"
        if not own and any(isinstance(a, Scheme) and a.attention == "linear" for a in self.module.modules()):
            abilities -= {"packing", "static"}  # sums over all tokens up to a query's have neither parts nor free slots
        return frozenset(abilities)

    def _cache_name(self) -> str | None:
        return next((name for name in ("past_key_values", "cache_params") if name in self.accepts), None)

    def _is_causal(self) -> bool:
        """Whether attention is causal: declared by a language model's head, or else measured."""
        head = type(self.module).__name__
        if head.endswith(("ForCausalLM", "LMHeadModel")) and getattr(self.config, "is_decoder", None) is not False:
            return True
        return not self.sees_later()

    def _rotary(self, name: str, child: nn.Module, kind: str | None, values: Tensor) -> list[RotaryModule]:
        config: Any = getattr(child, "config", None) or self.config
        parameters = getattr(config, "rope_parameters", None)
        if kind is not None and isinstance(parameters, Mapping):
            parameters = parameters.get(kind)
        if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
            return []
        buffer = f"{kind}_inv_freq" if kind else "inv_freq"
        factor = getattr(child, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
        return [
            RotaryModule(
                f"{name} ({kind})" if kind else name, child, parameters, _rotating(config, parameters),
                getattr(config, "max_position_embeddings", None), values, float(factor),
                lambda module, x, dtype: _tables(module, x, dtype, kind, parameters), lambda module: getattr(module, buffer),
            )
        ]  # fmt: skip


def _signature(model: Any) -> set[str]:
    return {*inspect.signature(model.forward).parameters}


def _outputs(out: Any) -> Tensor:
    """Logits or features of the last layer ``[b t v]``, whichever an output has."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(output := getattr(out, name, None), Tensor) and output.ndim == 3:
            return output
    return out[0]


def _ordinary(config: Any) -> Tensor:
    """Tokens of the vocabulary that are not special."""
    names = [name for name in dir(config) if name.endswith(("_token_id", "_token_index"))]
    values = [_get(config, name) for name in names]
    special = {i for value in values for i in (value if isinstance(value, list) else [value])}
    return torch.tensor([i for i in range(min(config.vocab_size, 4096)) if i not in special])


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # properties of configurations may raise
        return None


def _encoding(model: Any, config: Any) -> tuple[str, bool | None]:
    """Name of a model's encoding, and whether it is relative, judged by its modules."""
    tables = [name for name, a in model.named_modules() if TABLE.search(name) and "Rotary" not in type(a).__name__]
    if config.model_type == "roformer":
        return "rotary", True
    if tables:
        return f"absolute table {tables[0]}", False
    if _get(config, "alibi") or config.model_type in ("bloom", "mpt"):
        return "ALiBi", True
    buffers = any(FREQUENCIES.match(name.rpartition(".")[2]) for name, _ in model.named_buffers())
    if buffers or getattr(config, "rotary_dim", None) or any("Rotary" in type(a).__name__ for a in model.modules()):
        return "rotary", True
    if any(name.endswith("relative_attention_bias") for name, _ in model.named_modules()):
        return "relative bias", True
    return "unknown", None


def _limit(model: Any, config: Any, encoding: str) -> int | None:
    """Number of positions before a table ends or a dynamic rule changes frequencies; None without such a limit."""
    most = _get(config, "max_position_embeddings") or _get(config, "n_positions")
    if encoding.startswith("absolute"):
        table = dict(model.named_modules())[encoding.removeprefix("absolute table ")]
        padding = getattr(table, "padding_idx", None)
        first = max(0 if padding is None else padding + 1, getattr(table, "offset", 0))
        most = table.num_embeddings - first if isinstance(table, nn.Embedding) else most
    parameters = _get(config, "rope_parameters") or {}
    nested = [a for a in parameters.values() if isinstance(a, Mapping)] or [parameters]
    trained = [a["original_max_position_embeddings"] for a in nested if a.get("original_max_position_embeddings")]
    limits = [n for n in (most, *trained) if isinstance(n, int) and n > 0]
    return min(limits) if limits else None


def _rotating(config: Any, parameters: Mapping[str, Any]) -> int | None:
    """Number of a head's features that rotate, as declared by the configuration."""
    size = _get(config, "qk_rope_head_dim") or _get(config, "head_dim")
    size = size or (config.hidden_size // config.num_attention_heads if _get(config, "num_attention_heads") else None)
    if size is None or parameters.get("rope_type") == "proportional":
        return size
    share = parameters.get("partial_rotary_factor") or 1.0
    return 2 * -(-int(size * share) // 2)


def _tables(
    module: Any, x: Tensor, dtype: torch.dtype, kind: str | None, parameters: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[b t d]`` of a rotary module at positions ``[b t]``."""
    positions = x.expand(3, *x.shape) if "mrope_section" in parameters else x
    options = {"layer_type": kind} if kind else {}
    out = module(torch.zeros(*x.shape, 1, dtype=dtype), positions, **options)
    if isinstance(out, Tensor):  # complex numbers
        return out.real, out.imag
    cos, sin = (a if a.ndim == 3 else a.reshape(*x.shape, -1) for a in out)
    return cos, sin
