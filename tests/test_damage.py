"""Test damage to every file that the laboratory reads: one error line names the file, and other runs are still listed."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isopos.lab.data import corpora
from isopos.lab.reports import page
from isopos.lab.runs.files import Damaged, mismatch
from isopos.lab.runs.folders import read_rows

SIZES = ("--length=16", "--batch=2", "--layers=1", "--model-dim=8", "--heads=2", "--validation-tokens=64", "--device=cpu")
STEPS = ("--steps=4", "--save-every=2", "--validate-every=2")
WHOLE = {  # what takes the place of a file
    "empty": b"",
    "half": None,
    "bytes": bytes(range(128, 256)) * 9,
    "list": b"[]",
    "number": b"3",
    "nothing": b"null",
    "no fields": b"{}",
    "deep": b"[" * 100_000,
    "long": b'{"a": ' + b"9" * 5000 + b"}",
}
VALUES = ([], {}, "\x1b[31m", None, -1, 1e400, float("nan"), True, [[]], 10**30)


def train(isopos, *more):
    return isopos("train", "--data=text.txt", "--tokenizer=words", "--name=a", *SIZES, *STEPS, *more)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def runs(isopos, made, tmp_path, monkeypatch):
    """Copy two complete runs and a comparison into the working folder. They are trained once."""
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    if not (made / "whole").exists():
        (tmp_path / "text.txt").write_text("".join(f"line {n % 7} of {n % 11} words\n" for n in range(300)))
        assert train(isopos)[0] == 0
        shutil.copytree("runs/a", "runs/b")
        options = ("--schemes=rope", "--task=listops", "--steps=2", "--batch=2", "--layers=1", "--model-dim=8", "--heads=2")
        assert isopos("compare", "--name=c", "--device=cpu", "--validation-rows=5", *options)[0] == 0
        shutil.copytree(tmp_path, made / "whole")
    else:
        shutil.copytree(made / "whole", tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs"


def unfinished(run):
    """Remove the files that a run killed after its last checkpoint does not have."""
    for name in ("result.json", "model.safetensors"):
        (run / name).unlink(missing_ok=True)


def damages(path, every=1):
    """Yield names and functions of damages. Each field gets one in `every` of the values."""
    content = path.read_bytes()
    for name, what in WHOLE.items():
        yield name, lambda what=what: path.write_bytes(content[: len(content) // 2] if what is None else what)
    yield "folder", lambda: (path.unlink(), path.mkdir())
    yield "pipe", lambda: (path.unlink(), os.mkfifo(path))
    if path.suffix == ".json":
        found = json.loads(content)
        for n, field in enumerate(found if isinstance(found, dict) else ()):
            rest = {name: value for name, value in found.items() if name != field}
            yield f"without {field}", lambda rest=rest: path.write_text(json.dumps(rest))
            for value in VALUES[n % every :: every]:
                changed = json.dumps(found | {field: value})
                yield f"{field} = {value!r}", lambda changed=changed: path.write_text(changed)


def restored(path, content):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.write_bytes(content)


READ = {  # by file: the commands that read it, and whether the run is not finished
    "recipe.json": (("eval", "generate", "resume"), False),
    "result.json": (("resume",), False),
    "data.json": (("eval", "resume"), True),
    "metrics.jsonl": (("eval", "resume"), True),
    "model.safetensors": (("eval", "generate"), False),
    "tokenizer.json": (("eval", "generate"), False),
    "eval.json": (("eval",), False),
    "checkpoints/step-00000004/complete.json": (("eval", "resume"), True),
    "checkpoints/step-00000004/state.pt": (("eval", "resume"), True),
}
MAY = (("list", "eval.json"), ("no fields", "recipe.json"))
COMMANDS = {"eval": ("eval", "runs/a"), "generate": ("generate", "runs/a", "--prompt=line 3", "--tokens=2")}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READ)
def test_a_damaged_file_of_a_run_is_one_line_that_names_it(isopos, runs, name, every):
    (commands, cut), path, tried = READ[name], runs / "a" / name, 0
    if name == "eval.json":
        assert isopos("eval", "runs/a")[0] == 0
    if cut:
        unfinished(runs / "a")
    content, before = path.read_bytes(), runs.parent / "before"
    shutil.copytree(runs / "a", before)
    for n, (damage, do) in list(enumerate(damages(path, 4 if name == "recipe.json" else 1)))[len(name) % every :: every]:
        for command in commands if n < len(WHOLE) and every == 1 else (commands[n % len(commands)],):
            do()
            code, out, err = isopos(*COMMANDS[command]) if command in COMMANDS else train(isopos, "--resume")
            tried += 1
            if code == 0:  # no more than a value that could be so
                assert "=" in damage or "without" in damage or (damage, name) in MAY, (damage, command)
                assert damage.startswith("without") or "\x1b" not in out
            else:
                assert code == 2, (damage, command, out)
                assert err.count("\n") == 1, (damage, command, err)
                field = damage.partition(" = ")[0] if " = '" in damage else "none"  # of another text, as good as any
                assert path.name in err or path.parent.name in err or field in err, (damage, command, err)
            code, out, err = isopos("runs")
            assert code == 0, (damage, err)
            assert " b " in out, damage
            assert name not in ("data.json", "metrics.jsonl") or "=" in damage or "cannot be read" in out, damage
            shutil.rmtree(runs / "a")
            shutil.copytree(before, runs / "a")
    assert tried > (len(WHOLE) if every == 1 else 0) * len(commands)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found | {"head.weight": found["head.weight"] * np.nan}, "head.weight: expected finite weights"),
        (lambda found: dict(list(found.items())[1:]), "expected the weights of this run's model, got: .*issing key"),
        (lambda found: found | {"more": torch.ones(2)}, "expected the weights of this run's model, got: .*nexpected key"),
        (lambda found: found | {"head.weight": found["head.weight"][:1]}, "expected the weights .*size mismatch"),
    ],
)
def test_weights_of_another_model_or_none(isopos, runs, change, message):
    path = runs / "a" / "model.safetensors"
    save_file(change(load_file(path)), path)
    for command in COMMANDS.values():
        with pytest.raises(Damaged, match=f"model.safetensors: .*{message}"):
            raise Damaged(isopos(*command)[2])


def test_weights_of_which_a_bit_was_changed(isopos, runs):
    path = runs / "a" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match=r"model\.safetensors: its content is not what was written; put it right"):
        raise Damaged(isopos("eval", "runs/a")[2])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: [state],
        lambda state: {name: value for name, value in state.items() if name != "model"},
        lambda state: state | {"step": 3},
        lambda state: state | {"optimizer": {}},
        lambda state: state | {"optimizer": {"state": {}, "param_groups": [{"params": [1]}]}},
        lambda state: state | {"best": ["a"]},
        lambda state: state | {"model": {name: torch.full_like(value, np.inf) for name, value in state["model"].items()}},
        lambda state: state | {"model": {name: value[:1] for name, value in state["model"].items()}},
        lambda state: state | {"model": {}},
    ],
)
def test_a_checkpoint_with_the_right_hash_and_other_content(isopos, runs, change):
    unfinished(runs / "a")
    folder = runs / "a" / "checkpoints" / "step-00000002"
    shutil.rmtree(runs / "a" / "checkpoints" / "step-00000004")
    torch.save(change(torch.load(folder / "state.pt")), folder / "state.pt")
    mark = json.loads((folder / "complete.json").read_text())
    mark["sha256"] = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    (folder / "complete.json").write_text(json.dumps(mark))
    code, _, err = train(isopos, "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("isopos: runs/a/checkpoints/step-00000002")


def test_a_damaged_comparison_is_named(runs, monkeypatch):
    folder, tried = runs / "c", 0
    page.write(folder)
    for name in ("svg", "_kernel_sections"):  # pictures read no file of these
        monkeypatch.setattr(page, name, lambda *_: "")
    names = ("examples.json", "result.json", "data.json", "metrics.jsonl")
    for path in (folder / "comparison.json", *(folder / "rope-seed0" / name for name in names)):
        content = path.read_bytes()
        for n, (damage, do) in enumerate(damages(path, 29)):
            do()
            try:
                page.write(folder)
                assert n >= len(WHOLE) + 2 or (damage, path.name) == ("list", "examples.json"), damage
            except ValueError as error:
                assert path.name in str(error), damage  # noqa: PT017
            tried += 1
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.write_bytes(content)
    assert tried > 40
    (folder / "rope-seed0" / "data.json").write_text('{"name": "expressions", "sha256": "0123"}')
    with pytest.raises(
        Damaged, match=r"data.json: sha256: expected the hash of the data in .*comparison.json, \w{12}, got 0123;"
    ):
        page.write(folder)


def test_data_that_changed_is_scored_only_where_that_is_asked_for(isopos, runs):
    assert isopos("eval", "runs/a")[0] == 0
    (runs.parent / "text.txt").write_text("".join(f"line {n % 5} of {n % 11} words\n" for n in range(300)))
    code, out, err = isopos("eval", "runs/a")
    assert (code, err.count("\n"), "bits" in out) == (2, 1, False)
    assert "data: expected sha256 " in err
    assert "which is other data; restore the run's, say where it is with --data, or score this with --other-data" in err
    code, out, _ = isopos("eval", "runs/a", "--other-data")
    assert code == 0
    assert "text.txt, not the data of training" in " ".join(out.split())
    before, after = json.loads((runs / "a" / "eval.json").read_text())
    assert "data" not in before
    assert after["data"] != json.loads((runs / "a" / "data.json").read_text())["sha256"]


def test_data_that_moved_is_scored_where_it_is(isopos, runs):
    assert isopos("eval", "runs/a")[0] == 0
    (runs.parent / "elsewhere").mkdir()
    (runs.parent / "text.txt").rename(runs.parent / "elsewhere" / "words.txt")
    assert isopos("eval", "runs/a")[0] == 2
    assert isopos("eval", "runs/a", "--data", "elsewhere/words.txt")[0] == 0
    before, after = json.loads((runs / "a" / "eval.json").read_text())
    assert before == after


def test_rows_that_no_run_writes(tmp_path):
    path, row = tmp_path / "metrics.jsonl", '{"step": %d, "loss": 1.0}\n'
    for content, message in (
        (row % 2 + row % 1, "line 2: expected a step from 2 on, got 1;"),
        (row % -1, "line 1: expected a step from 0 on, got -1;"),
        (row % 1 + "{}", "line 2: expected a row, got a part of one;"),
        (row % 1 + '{"stop', "line 2: expected a row, got a part of one;"),
    ):
        path.write_text(content)
        with pytest.raises(Damaged, match=message):
            read_rows(path)
    path.write_text(row % 1 + row % 1 + row % 2 + '{"step": 3, "lo')
    assert [found["step"] for found in read_rows(path)] == [1, 1, 2]
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000003" / "complete.json").write_text("{}")
    with pytest.raises(
        Damaged, match=r"metrics.jsonl: expected rows up to step 3 at least, got rows up to step 2; remove it"
    ):
        read_rows(path)


def test_tokens_of_a_cache_are_those_that_were_written(runs, tmp_path):
    def load():
        return corpora.load_corpus("text.txt", 8, tokenizer="words")

    load()
    (folder,) = {path.parent for path in (tmp_path / "cache").glob("stream-*/about.json")}
    for name in ("train.bin", "validation.bin", "about.json"):
        path = folder / name
        content = path.read_bytes()
        for n, (damage, do) in enumerate(damages(path)):
            do()
            try:
                load()
                assert n >= len(WHOLE) + 2, damage
            except Damaged as error:
                assert name in str(error)  # noqa: PT017
                assert str(error).endswith(f"; remove {folder}, and it is prepared again")  # noqa: PT017
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.write_bytes(content)
    path = folder / "train.bin"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(Damaged, match=r"train\.bin: its content is not what was written"):
        load()


@pytest.mark.parametrize(
    ("value", "kind", "wrong"),
    [
        (True, int, "expected a whole number, got True"),
        (3, float, ""),
        (3.0, int, "expected a whole number, got 3.0"),
        ({"a": None}, dict[str, float | None], ""),
        ({"a": "x"}, dict[str, float | None], "a: expected a number, got 'x'"),
        ([["a", 1], ["b", "c"]], list[tuple[str, int]], "1: 1: expected a whole number, got 'c'"),
        ([["a"]], list[tuple[str, int]], "0: expected 2 values, got ['a']"),
    ],
)
def test_what_is_wrong_with_a_value(value, kind, wrong):
    assert mismatch(value, kind) == wrong
