import hashlib

import numpy as np
import pytest
import torch

from isopos.lab import text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(bytes(range(256)) * 2)
    (tmp_path / "a.txt").write_bytes(b"first " * 200)
    (tmp_path / "empty").write_bytes(b"")
    return tmp_path


def test_a_folder_is_read_in_sorted_order_and_any_byte_counts(folder):
    whole = b"first " * 200 + bytes(range(256)) * 2
    read = text.load(str(folder), 8)
    assert bytes(read.train) + bytes(read.validation) == whole
    assert read.sha256 == hashlib.sha256(whole).hexdigest()
    assert len(read.validation) == len(whole) // 10


def test_the_default_text_is_the_language_reference():
    read = text.load("", 256)
    assert len(read.train) > 300_000
    assert b"statement" in bytes(read.validation)


def test_batches_are_pure_functions_of_seed_and_step(folder):
    read = text.load(str(folder), 8)
    tokens, targets = read.batch(0, 5, 4, 8)
    again = read.batch(0, 5, 4, 8)
    assert tokens.shape == targets.shape == (4, 8)
    assert tokens.equal(again[0])
    assert tokens[:, 1:].equal(targets[:, :-1])
    assert not tokens.equal(read.batch(0, 6, 4, 8)[0])
    assert not tokens.equal(read.batch(1, 5, 4, 8)[0])


def test_batches_reach_both_ends_of_the_training_part_and_nothing_else():
    data = np.arange(100, dtype=np.uint8)
    read = text.Text("x", "", data[:20], data[20:])
    seen = torch.cat([torch.cat(read.batch(0, step, 8, 4)) for step in range(200)])
    assert seen.min() == 0
    assert seen.max() == 19


def test_windows_cover_the_tail_once():
    data = np.arange(100, dtype=np.uint8)
    read = text.Text("x", "", data[:50], data[50:])
    inputs = torch.cat([tokens.flatten() for tokens, _ in read.windows(7, 1000, 3)])
    assert inputs.tolist() == list(range(50, 50 + 49))
    targets = torch.cat([targets.flatten() for _, targets in read.windows(7, 21, 2)])
    assert targets.tolist() == list(range(51, 51 + 21))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), (b"", "is empty"), (b"short", "at least 90 bytes")]
)
def test_what_cannot_be_read_is_refused(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text.load(str(path), 8)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        text.load(str(tmp_path), 8)
