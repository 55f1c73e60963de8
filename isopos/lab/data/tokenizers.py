r"""Tokenizers: bytes, words (WikiText's convention) and byte-pair encoding; saved as tokenizer.json in the folder of a run.

Example:
    >>> words = Words.learn(["the cat\n", "the dog and the bird\n"], size=4)
    >>> words.words
    ('<unk>', 'the', '<eos>', 'and')
    >>> words.encode("the bird\n").tolist()
    [1, 0, 2]
    >>> words.decode([1, 3, 2])
    'the and \n'
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from io import StringIO
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from isopos.lab.runs.files import Damaged, damaged, mismatch, read_json, write_text

KINDS = ("bytes", "words", "bpe")
EOS, UNK = "<eos>", "<unk>"
FILE = "tokenizer.json"
BPE_SIZE = 8192  # by default


class Tokenizer(ABC):
    """Converts text to integers below `size` and back; equal settings have equal fingerprints."""

    size: int
    """Number of tokens in the vocabulary."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Tokens ``[t]`` int64 of text. Whole lines may be encoded one by one, which gives the tokens of the whole text.

        Raises:
            ValueError: If the vocabulary does not cover the text.
        """

    @abstractmethod
    def piece(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which may be part of a character."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Plain values from which `load_tokenizer` makes the same tokenizer."""

    @abstractmethod
    def model(self) -> Any:
        """The same tokenizer as a `tokenizers.Tokenizer`, for other libraries."""

    def share_unknown(self, tokens: np.ndarray) -> float:
        """Share of tokens that stand for words outside the vocabulary."""
        return 0.0

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; invalid UTF-8 becomes the replacement character."""
        return b"".join(self.piece(int(token)) for token in tokens).decode(errors="replace")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the settings."""
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, which `load_tokenizer` reads."""
        write_text(folder / FILE, json.dumps(self.settings(), ensure_ascii=False) + "\n")


class Bytes(Tokenizer):
    """Every byte of UTF-8 is a token."""

    size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def settings(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def model(self) -> Any:
        import tokenizers

        vocabulary = {character: byte for byte, character in enumerate(_characters())}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        return model


class Words(Tokenizer):
    """Words between white space, and <eos> at the end of every line, as in WikiText.

    Args:
        words: The vocabulary, with <eos>. Without <unk>, text with other words is an error.
    """

    def __init__(self, words: Iterable[str]):
        self.words = tuple(words)
        self.size = len(self.words)
        self._index = {word: n for n, word in enumerate(self.words)}
        if EOS not in self._index or len(self._index) < self.size:
            raise ValueError(f"words: expected different ones with {EOS} among them, got {self.size}")

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None = None) -> "Words":
        """The most frequent `size` words (all by default) of texts, by frequency, then alphabetically.

        <eos> and <unk> are always among them; other words count as <unk>.
        """
        if size is not None and size < 2:
            raise ValueError(f"vocabulary: expected at least 2 words, {EOS} and {UNK}, got {size}")
        counts = Counter({EOS: 0, UNK: 0})
        for text in texts:
            counts.update(_split(text))
        if size is not None and len(counts) > size:
            others = sorted(counts.keys() - {EOS, UNK}, key=lambda word: (-counts[word], word))
            counts[UNK] += sum(counts.pop(word) for word in others[size - 2 :])
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    def encode(self, text: str) -> np.ndarray:
        words = _split(text)
        numbers = map(self._index.get, words, repeat(self._index.get(UNK, -1)))
        tokens = np.fromiter(numbers, np.int64, len(words))  # pyright: ignore[reportArgumentType, reportCallIssue]
        if (tokens < 0).any():
            raise ValueError(
                f"vocabulary: expected every word of the text among its {self.size} or {UNK} for others, got "
                f"{words[int((tokens < 0).argmax())]!r}; learn a vocabulary from this text, or from one with {UNK}"
            )
        return tokens

    def share_unknown(self, tokens: np.ndarray) -> float:
        return float((np.asarray(tokens) == self._index[UNK]).mean()) if UNK in self._index and len(tokens) else 0.0

    def piece(self, token: int) -> bytes:
        """The word and a space; <eos> is a line feed."""
        word = self.words[token]
        return b"\n" if word == EOS else word.encode() + b" "

    def settings(self) -> dict[str, Any]:
        return {"kind": "words", "words": list(self.words)}

    def model(self) -> Any:
        import tokenizers

        unknown = {"unk_token": UNK} if UNK in self._index else {}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=self._index, **unknown))
        model.normalizer = tokenizers.normalizers.Replace("\n", f" {EOS} ")
        model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return model


class BPE(Tokenizer):
    """Byte-level byte-pair encoding of each line, which covers every text (package `tokenizers`).

    Args:
        model: The JSON of a `tokenizers.Tokenizer`.
    """

    def __init__(self, model: str):
        import tokenizers

        self._model: Any = tokenizers.Tokenizer.from_str(model)
        self.size: int = self._model.get_vocab_size()
        self._bytes = {character: byte for byte, character in enumerate(_characters())}

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None = None) -> "BPE":
        """Train on texts to at most `size` tokens (8192 by default), including the 256 bytes."""
        size = BPE_SIZE if size is None else size
        if size < 256:
            raise ValueError(f"vocabulary: expected at least 256 tokens, the bytes, got {size}")
        import tokenizers

        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator((line for text in texts for line in StringIO(text, newline="\n")), trainer)
        return cls(model.to_str())

    def encode(self, text: str) -> np.ndarray:
        lines = self._model.encode_batch_fast(list(StringIO(text, newline="\n")))
        return np.array([token for line in lines for token in line.ids], np.int64)

    def piece(self, token: int) -> bytes:
        return bytes(self._bytes[character] for character in self._model.id_to_token(token))

    def settings(self) -> dict[str, Any]:
        return {"kind": "bpe", "model": json.loads(self._model.to_str())}

    def model(self) -> Any:
        import tokenizers

        model = tokenizers.Tokenizer.from_str(self._model.to_str())
        lines = tokenizers.pre_tokenizers.Split("\n", "merged_with_previous")
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([lines, model.pre_tokenizer])
        model.decoder = tokenizers.decoders.ByteLevel()
        return model


def learn(kind: str, texts: Iterable[str], vocabulary: int | None = None) -> Tokenizer:
    """Learn a tokenizer of a kind from texts: bytes, or at most `vocabulary` words or pieces."""
    return Bytes() if kind == "bytes" else {"words": Words, "bpe": BPE}[kind].learn(texts, vocabulary)


def tokenizer_arguments(kind: str, vocabulary: int, run: Path | None) -> dict[str, Any]:
    """The arguments `tokenizer` and `vocabulary` of functions that load texts: of a new run (0: by default), or of a run."""
    return {"tokenizer": kind, "vocabulary": vocabulary or None} if run is None else {"tokenizer": load_tokenizer(run)}


def tokenizer_of(run: Path) -> Tokenizer:
    """The tokenizer of a run; bytes if its folder has no tokenizer.json."""
    return load_tokenizer(run) if (run / FILE).exists() else Bytes()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote to a folder; ValueError if the file is absent or damaged."""
    path, remedy = folder / FILE, "put it right; a run cannot be read without its tokenizer"
    try:
        match read_json(path, {"kind": str}, remedy):
            case {"kind": "bytes"}:
                return Bytes()
            case {"kind": "words", "words": list(words)} if not mismatch(words, list[str]):
                return Words(words)
            case {"kind": "bpe", "model": dict(model)}:
                return BPE(json.dumps(model))
            case _:
                raise ValueError("tokenizer: expected the kind bytes, words or bpe, with what belongs to it")
    except FileNotFoundError:
        damaged(path, "tokenizer: it is not there", remedy)
    except Damaged:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        damaged(path, error, remedy)


def _split(text: str) -> list[str]:
    return text.replace("\n", f" {EOS} ").split()


def _characters() -> Iterator[str]:
    """The character of each byte in byte-level BPE: itself if it is printable, else one from 256 on."""
    spare = 256
    for byte in range(256):
        prints = 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)
        yield chr(byte if prints else spare)
        spare += not prints
