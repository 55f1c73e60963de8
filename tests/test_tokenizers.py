"""Test encoding and decoding of text by tokenizers."""

import json

import pytest

from isopos.lab.data.tokenizers import BPE, Bytes, Words, load_tokenizer

TEXTS = ["the cat sat on the mat .\nthe end\n", "\n a café ,  spaced \n\n日本語 and no end"]


def learned(kind):
    return kind.learn(TEXTS) if kind is not Bytes else Bytes()


@pytest.fixture(params=[Bytes, Words, BPE])
def tokenizer(request):
    return learned(request.param)


def test_lines_have_the_tokens_of_the_whole(tokenizer):
    whole = tokenizer.encode("".join(TEXTS))
    lines = [line for text in TEXTS for line in text.splitlines(keepends=True)]
    assert [token for line in lines for token in tokenizer.encode(line)] == whole.tolist()
    assert whole.dtype == "int64"
    assert whole.min() >= 0
    assert whole.max() < tokenizer.size
    assert tokenizer.encode("").tolist() == []


def test_text_comes_back(tokenizer):
    found = tokenizer.decode(tokenizer.encode(TEXTS[0]))
    assert found.replace(" \n", "\n") == TEXTS[0].replace(" \n", "\n")
    if not isinstance(tokenizer, Words):
        for text in (*TEXTS, "never seen: \x00 ß 😀\r\n"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_token_has_its_piece(tokenizer):
    tokens = tokenizer.encode(TEXTS[1]).tolist()
    assert b"".join(map(tokenizer.piece, tokens)).decode() == tokenizer.decode(tokens)


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(tokenizer)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode(TEXTS[1]).tolist() == tokenizer.encode(TEXTS[1]).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_bpe_joins_what_is_frequent():
    tokenizer = learned(BPE)
    assert tokenizer.size > 256
    assert len(tokenizer.encode("the the")) == 2
    assert tokenizer.piece(tokenizer.encode(" the")[0]) == b" the"
    assert {tokenizer.piece(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


def test_words_are_sorted_by_frequency():
    text = "c b b a a a\nzz zz zz\n"
    assert Words.learn([text]).words == ("a", "zz", "<eos>", "b", "c", "<unk>")
    assert Words.learn([text], 4).words == ("<unk>", "a", "zz", "<eos>")
    assert Words.learn([text], 4).encode("a b zz\n").tolist() == [1, 0, 2, 3]


def test_a_vocabulary_that_does_not_cover_the_text():
    with pytest.raises(ValueError, match="expected every word of the text among its 2 or <unk> for others, got 'dog'"):
        Words(["cat", "<eos>"]).encode("cat dog fox")
    assert Words(["cat", "<eos>"]).encode("cat\n").tolist() == [0, 1]


def test_bad_vocabularies():
    with pytest.raises(ValueError, match="expected different ones with <eos> among them, got 2"):
        Words(["a", "b"])
    with pytest.raises(ValueError, match="expected different ones"):
        Words(["a", "a", "<eos>"])
    with pytest.raises(ValueError, match="at least 256 tokens, the bytes, got 255"):
        BPE.learn(TEXTS, 255)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokenizer.json: .*not there"),
        ("{\n:", "tokenizer.json: expected JSON, .*line 2"),
        ('{"kind": "x"}', "bytes, words or bpe"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_settings_are_plain_values(tokenizer):
    assert json.loads(json.dumps(tokenizer.settings())) == tokenizer.settings()


@pytest.mark.parametrize("kind", [Bytes, Words, BPE])
def test_the_package_tokenizers_has_the_same_tokens(kind):
    tokenizer, text = learned(kind), "".join(TEXTS) + "\n  the cat\n\n\n unseen, twice  unseen"
    model = tokenizer.model()
    assert model.encode(text).ids == tokenizer.encode(text).tolist()
    assert model.get_vocab_size() == tokenizer.size
    if kind is not Words:
        assert model.decode(tokenizer.encode(text).tolist()) == text
