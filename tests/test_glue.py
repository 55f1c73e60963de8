"""Test GLUE: files, samples, metrics, and classifiers that start from a masked language model."""

import gzip
import json
import math
import re
import shutil
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from isopos.lab.data import glue
from isopos.lab.data.glue import SUBSETS, load_glue, phrases, subset_of
from isopos.lab.data.sources import find_source
from isopos.lab.data.tokenizers import Bytes, Words
from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows
from isopos.lab.tables.loader import FOLDER, load_table
from isopos.lab.tasks.glue import Glue, _figure
from isopos.lab.tasks.task import View

pytestmark = pytest.mark.usefixtures("own_cache")
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "glue"
PAIRS = [("A cat sat.", "A cat stood."), ("Two dogs ran.", "Dogs ran."), ("It rained.", "It did not rain.")]


def table(path, header, rows):
    """Write rows as a table, with a header if column names are given."""
    lines = ["\t".join(map(str, row)) + "\n" for row in ([header] if header else []) + rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
        file.writelines(lines)


def cola(folder, count=48, dev=16):
    """Phrases that end with a or b, and a label for the ending."""
    rows = [("gj04", n % 2, "", f"phrase {n // 2 % 9} ends with {'ab'[n % 2]}") for n in range(count + dev)]
    table(folder / "CoLA" / "train.tsv", None, rows[:count])
    table(folder / "CoLA" / "dev.tsv", None, rows[count:])
    return str(folder / "CoLA")


def rte(folder, count=24):
    rows = [(n, *PAIRS[n % 3], ("entailment", "not_entailment")[n % 3 == 2]) for n in range(count)]
    table(folder / "RTE" / "train.tsv", ["index", "sentence1", "sentence2", "label"], rows)
    table(folder / "RTE" / "dev.tsv", ["index", "sentence1", "sentence2", "label"], rows[:9])
    table(folder / "RTE" / "test.tsv", ["index", "sentence1", "sentence2"], [row[:3] for row in rows[:5]])
    return str(folder / "RTE")


def read(source, name):
    """Samples by split, and what was left out."""
    splits, left = defaultdict(list), Counter()
    for split, sample in glue.read_glue(find_source(source), name, left):
        splits[split].append(sample)
    return splits, left


def test_files_without_a_header_in_an_archive_or_a_folder(tmp_path):
    folder = cola(tmp_path)
    found, _ = read(folder, "CoLA")
    assert {split: len(rows) for split, rows in found.items()} == {"train": 48, "validation": 16}
    assert found["train"][3] == (("phrase 1 ends with b",), 1)
    with zipfile.ZipFile(tmp_path / "cola_public.zip", "w") as archive:
        for kind in ("raw", "tokenized"):
            archive.write(Path(folder, "train.tsv"), f"cola_public/{kind}/in_domain_train.tsv")
            for place in ("in", "out_of"):
                archive.write(Path(folder, "dev.tsv"), f"cola_public/{kind}/{place}_domain_dev.tsv")
    again, _ = read(str(tmp_path / "cola_public.zip"), "CoLA")
    assert again["train"] == found["train"]
    assert again["validation"] == 2 * found["validation"]
    one, other = (load_glue(source, "CoLA", Bytes()) for source in (folder, str(tmp_path / "cola_public.zip")))
    assert one.sha256 != other.sha256
    assert one.sequence("train", 3).tobytes() == b"phrase 1 ends with b"
    assert one["train-answers"].tolist() == [row.answer for row in found["train"]]


def test_scores_of_files_of_seven_or_nine_columns_and_of_the_published_header(tmp_path):
    rows = [(*"abc", 7, score, *pair) for score, pair in zip((5, 2.5, 0), PAIRS, strict=True)]
    for split in ("train", "dev", "test"):
        table(tmp_path / "plain" / f"sts-{split}.tsv", None, [*rows, (*rows[0], "source", "source")])
    found, _ = read(str(tmp_path / "plain"), "STS-B")
    assert [row.answer for row in found["test"]] == [1.0, 0.5, 0.0, 1.0]
    names = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"]
    for split in ("train", "dev"):
        table(tmp_path / "STS-B" / f"{split}.tsv", names, [(*"1234567", *row[5:7], row[4]) for row in rows])
        table(tmp_path / "STS-B" / "original" / f"sts-{split}.tsv", None, rows)
    assert read(str(tmp_path / "STS-B"), "STS-B")[0] == {split: found["test"][:3] for split in ("train", "validation")}


def test_two_validations_unlabelled_tests_ids_and_ragged_rows(tmp_path):
    names = ["index", "sentence1", "sentence2", "label1", "gold_label"]
    rows = [(n, *pair, "neutral", label) for n, (pair, label) in enumerate(zip(PAIRS, SUBSETS["MNLI"].labels, strict=True))]
    for split, count in (("train", 3), ("dev_matched", 2), ("dev_mismatched", 1)):
        table(tmp_path / "MNLI" / f"{split}.tsv", names, rows[:count])
    table(tmp_path / "MNLI" / "test_mismatched.tsv", names[:3], [row[:3] for row in rows])
    found, left = read(str(tmp_path / "MNLI"), "MNLI")
    assert {split: [row.answer for row in rows] for split, rows in found.items()} == {
        "train": [0, 1, 2],
        "validation": [0, 1],
        "mismatched": [0],
    }
    assert left == {"rows without labels": 3}
    names, row = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"], (*"123", "a?", "b?", 0)
    table(tmp_path / "QQP" / "train.tsv.gz", names, [row, row[:2]])
    table(tmp_path / "QQP" / "dev.tsv", names, [row])
    found, left = read(str(tmp_path / "QQP"), "QQP")
    assert (found["train"], left) == ([(("a?", "b?"), 0)], {"rows that lack columns": 1})
    header = ["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    for name in ("train", "dev", "dev_ids", "notes"):
        table(tmp_path / "MRPC" / f"{name}.tsv", header, [(1, 1, 2, 'He said "so.', "He said so.")])
    found, left = read(str(tmp_path / "MRPC"), "MRPC")
    assert found["validation"] == [(('He said "so.', "He said so."), 1)]
    assert left == {"the file dev_ids.tsv": 1, "the file notes.tsv": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("3\ta\tb\tentails", "column 4: expected one of entailment, not_entailment, got 'entails'"),
        ("3\ta\tb", "expected at least 4 columns, got 3"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path, line, message):
    folder = rte(tmp_path)
    with Path(folder, "dev.tsv").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ValueError, match=rf"^data: .*dev\.tsv, line 12: {re.escape(message)}; repair or remove the line$"):
        read(folder, "RTE")


def test_what_is_no_task_of_glue_is_refused(tmp_path):
    assert [subset_of(source) for source in ("glue/SST-2/", "STS-B.zip", "MNLI/original")] == ["SST-2", "STS-B", "MNLI"]
    with pytest.raises(ValueError, match=r"subset: expected one of CoLA, .*, which no folder of glue is called after"):
        subset_of("glue")
    with pytest.raises(ValueError, match=r"subset: expected one of CoLA, .*, got 'cola'"):
        load_glue(str(tmp_path), "cola", Bytes())
    with pytest.raises(ValueError, match=r"data: expected a folder with RTE's train.*, but .*none does not exist"):
        load_glue(str(tmp_path / "none"), "RTE", Bytes())
    folder = rte(tmp_path)
    with pytest.raises(ValueError, match=r"dev.tsv, line 1: expected the columns question, sentence, label, got index, "):
        load_glue(folder, "QNLI", Bytes())
    for header in ("index\tsentence1\tsentence2\n0\ta\tb\n", ""):  # no labels, or nothing
        (tmp_path / "none").mkdir(exist_ok=True)
        (tmp_path / "none" / "train.tsv").write_text(header)
        with pytest.raises(ValueError, match=r"train.tsv, line 1: expected the columns sentence1, sentence2, label, got"):
            load_glue(str(tmp_path / "none"), "RTE", Bytes())
    with pytest.raises(ValueError, match=r"line 1: expected the columns sentence1, sentence2, score, got index, "):
        load_glue(folder, "STS-B", Bytes())
    Path(folder, "dev.tsv").unlink()
    with pytest.raises(ValueError, match=r"data: expected RTE's dev.tsv with labels, or a .gz of it, got none in"):
        load_glue(folder, "RTE", Bytes())
    score = tmp_path / "STS-B"
    table(score / "train.tsv", None, [("a", "b", "c", 1, 5.5, "x", "y")])
    with pytest.raises(ValueError, match=r"line 1: column 5: expected a number from 0 to 5, got '5.5'"):
        load_glue(str(score), "STS-B", Bytes())


def test_phrases_are_half_in_order_and_half_reversed():
    rows = defaultdict(list)
    for split, row in phrases():
        rows[split].append(row)
    assert [np.mean([row.answer for row in rows[split]]) for split in rows] == pytest.approx([0.5, 0.5], abs=0.01)
    words = " ".join(row.texts[0] for row in rows["train"] if row.answer)
    backward = " ".join(row.texts[0] for row in rows["train"] if not row.answer)
    assert words.count(" of the ") > 50 > 5 > backward.count(" of the ")
    assert not {row.texts for row in rows["train"]} & {row.texts for row in rows["validation"]}


def test_without_data_there_is_one_task():
    with pytest.raises(ValueError, match=r"subset: expected CoLA without --data, .* got RTE"):
        load_glue("", "RTE", Bytes())
    assert "phrases" in Glue(subset="CoLA").setting(Recipe(task=Glue()))


def test_the_archive_of_scores_has_tables_that_end_with_csv(tmp_path):
    row = ("main-captions", "MSRvid", "2012test", "0001", "5.000", "A plane, is off.", "An air plane")
    for split in ("train", "dev", "test"):
        table(tmp_path / f"sts-{split}.csv", None, [row, row])
    rows = load_glue(str(tmp_path), "STS-B", Bytes()).facts["rows"]
    assert rows == {"train": 2, "validation": 2, "mismatched": 0, "test": 2}


def ready(folder, **edits):
    recipe = Recipe(task=Glue(data=folder)).edit(**{"batch": 8, "layers": 1, "model_dim": 16, "heads": 2} | edits)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


def test_samples_are_lines_and_of_pairs_the_longer_text_is_cut(tmp_path):
    recipe, data = ready(rte(tmp_path))
    assert (recipe.task.vocabulary, recipe.task.subset) == (256, "RTE")
    tokens, positions, mask, answers = data.tensors("validation", np.arange(3), recipe)
    texts = [bytes(row[own].tolist()).decode() for row, own in zip(tokens, mask, strict=True)]
    assert texts == ["".join(f"{text}\n" for text in pair) for pair in PAIRS]
    assert answers.tolist() == [0, 0, 1]
    assert len(positions) == tokens.shape[1] == max(map(len, texts))
    assert (
        "24 + 9 rows (train, validation), 5 rows without labels left out; without a model: always entailment" in data.summary
    )
    _, data = ready(rte(tmp_path), length=16)
    tokens, _, mask, _ = data.tensors("validation", np.arange(3), recipe)
    texts = [bytes(row[own].tolist()) for row, own in zip(tokens, mask, strict=True)]
    assert texts == [b"A cat s\nA cat s\n", b"Two dog\nDogs ra\n", b"It rain\nIt did \n"]
    assert ", 33 cut to 16 tokens" in data.summary
    lengths = np.array([[3, 40], [40, 3], [40, 40], [40, 7], [3, 3]])
    assert data.fitted(lengths).tolist() == [[3, 11], [11, 3], [7, 7], [7, 7], [3, 3]]  # what is short leaves its room


def test_figures_by_hand():
    answers = torch.tensor([1, 1, 1, 0, 0, 1])
    guesses = torch.tensor([1, 0, 1, 1, 0, 1])
    logits = torch.nn.functional.one_hot(guesses, 2).float()
    yes, no, missed, wrong = 3, 1, 1, 1
    below = math.sqrt((yes + wrong) * (yes + missed) * (no + wrong) * (no + missed))
    assert _figure("matthews", logits, answers) == pytest.approx((yes * no - wrong * missed) / below)
    assert _figure("accuracy", logits, answers) == pytest.approx(4 / 6)
    assert _figure("f1", logits, answers) == pytest.approx(2 * yes / (2 * yes + wrong + missed))
    scores, own = np.array([0.1, 0.9, 0.4, 0.35, 0.8]), np.array([0.0, 1.0, 0.5, 0.2, 0.6])
    pearson = np.corrcoef(scores, own)[0, 1]
    spearman = np.corrcoef(scores.argsort().argsort(), own.argsort().argsort())[0, 1]
    for name, expected in (("pearson", pearson), ("spearman", spearman)):
        assert _figure(name, torch.tensor(scores)[:, None], torch.tensor(own)) == pytest.approx(expected)
        assert _figure(name, torch.ones(5, 1), torch.tensor(own)) == 0
    assert _figure("matthews", torch.tensor([[1.0, 0.0]] * 6), answers) == 0


@pytest.mark.parametrize("subset", ["RTE", "STS-B"])
def test_scores_are_of_all_rows(tmp_path, subset):
    folder = rte(tmp_path)
    if subset == "STS-B":
        rows = [("a", "b", "c", n, n % 6, *PAIRS[n % 3]) for n in range(12)]
        for split in ("train", "dev"):
            table(tmp_path / "STS-B" / f"{split}.tsv", None, rows)
        folder = str(tmp_path / "STS-B")
    recipe, data = ready(folder)
    model = recipe.task.model(recipe)
    assert model.head.out_features == {"RTE": 2, "STS-B": 1}[subset]
    found = data.measure(model, recipe, View())
    assert {*found.figures} == {*SUBSETS[subset].figures, "loss", "rows"}
    outputs, answers = data.answers(model, recipe, "validation", np.arange(len(data.sizes["validation"])))
    if subset == "STS-B":
        assert found.figures["loss"] == pytest.approx(((outputs[:, 0] - answers) ** 2).mean().item())
        assert data.loss(model, *data.tensors("validation", np.arange(12), recipe)).item() == pytest.approx(
            found.figures["loss"]
        )
    else:
        assert found.figures["loss"] == pytest.approx(torch.nn.functional.cross_entropy(outputs, answers).item())
        assert found.figures["accuracy"] == pytest.approx((outputs.argmax(-1) == answers).double().mean().item())
    assert data.measure(model, recipe, View(split="mismatched")).reason.startswith("split: expected one of validation, got")


SMALL = ("--layers=1", "--model-dim=16", "--heads=2", "--batch=8", "--device=cpu", "--length=32")


@pytest.fixture
def pretrained(isopos, tmp_path):
    """runs/pre: a comparison of masked language models with two schemes; runs/one: a run of another width."""
    (tmp_path / "text.txt").write_text("phrases end with a or b, and nothing else.\n" * 200)
    command = ("--data=text.txt", "--steps=4", *SMALL)
    assert isopos("compare", "--task=masked", "--schemes=none,rope", "--name=pre", *command)[0] == 0
    return tmp_path / "runs" / "pre"


def test_training_begins_with_the_weights_of_a_run(isopos, tmp_path, pretrained):
    folder = cola(tmp_path)
    recipe, data = ready(folder, start=str(pretrained), scheme="rope", length=32)
    run = pretrained / "rope-seed0"
    assert recipe.task.origin(recipe) == run
    model, before = recipe.task.model(recipe), checkpoints.load_run(run)[1].state_dict()
    head = model.head.weight.clone()
    assert not torch.equal(model.tokens.weight, before["tokens.weight"])
    checkpoints.warm_start(model, run)
    for name, value in model.state_dict().items():
        assert torch.equal(value, head if name == "head.weight" else before.get(name, value)) or name == "head.bias", name
    expected = data.loss(model.train(), *data.batch(recipe, 1)).item()
    options = (f"--data={folder}", "--scheme=rope", "--steps=6", "--save-every=2", *SMALL)
    status, _, err = isopos("train", "glue", "--start=runs/pre", "--name=a", *options)
    assert (status, err) == (0, "")
    rows = read_rows(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(tmp_path / "runs" / "a" / "checkpoints" / "step-00000006")
    (tmp_path / "runs" / "a" / "result.json").unlink()
    assert isopos("train", "glue", "--start=runs/pre", "--name=a", "--resume", *options)[0] == 0
    assert read_rows(tmp_path / "runs" / "a" / "metrics.jsonl") == rows
    shutil.rmtree(pretrained)  # a run that has ended needs it no more
    status, out, err = isopos("eval", "runs/a", "--split=validation", "--limit=5")
    assert (status, err) == (0, "")
    assert "Matthews" in out
    assert "split: expected one of validation, which" in isopos("eval", "runs/a", "--split=mismatched")[2]
    assert "1.00" not in isopos("runs")[2]


def test_a_comparison_of_several_warm_starts_ranks_by_the_figure_of_the_task(isopos, tmp_path, pretrained):
    options = (f"--data={rte(tmp_path)}", "--steps=4", "--start=runs/pre", *SMALL)
    status, out, err = isopos("compare", "--task=glue", "--schemes=none,rope", "--name=c", *options)
    assert (status, err) == (0, "")
    assert "accuracy: share of held-out rows labelled rightly, higher is better; loss: nats" in " ".join(out.split())
    page = (tmp_path / "runs" / "c" / "report.html").read_text()
    assert "A classifier of RTE, that begins with the weights of runs/pre." in page
    assert "A cat sat. | A cat stood." in page
    assert json.loads((tmp_path / "runs" / "c" / "none-seed0" / "recipe.json").read_text())["subset"] == "RTE"
    for more, message in (
        (
            ("--schemes=none,sinusoidal",),
            "with the scheme sinusoidal and the seed 0 in runs/pre, got none-seed0, rope-seed0; isopos train",
        ),
        (
            ("--schemes=none", "--layers=2"),
            "a model as in runs/pre/none-seed0, got layers 2; give --layers 1",
        ),
        (("--schemes=none", "--start=runs/pre/rope-seed0"), "got scheme none; give --scheme rope"),
        (("--schemes=none", "--start=runs/pre/none-seed0", "--hidden-dim=8"), "got hidden_dim 8; give --hidden-dim 64"),
        (("--schemes=none", "--activation=gelu"), "got activation gelu; give --activation relu"),
        (("--schemes=none", "--start=runs/c/none-seed0"), "start: expected a run of the task masked, got one of Glue"),
        (("--schemes=none", "--start=runs/nowhere"), "in runs/nowhere, got none; isopos train lrpe-blm makes one"),
        (("--schemes=none", "--subset=rte"), "subset: expected one of CoLA"),
        (("--schemes=none", "--vocabulary=300"), "vocabulary: expected 0, or the 256 of the data, got 300"),
    ):
        status, _, err = isopos("compare", "--task=glue", "--name=d", *options, *more)
        assert (status, message in err, err.count("\n")) == (2, True, 1), err
        assert not (tmp_path / "runs" / "d").exists()
    (pretrained / "none-seed0" / "model.safetensors").unlink()
    err = isopos("compare", "--task=glue", "--schemes=none", "--name=d", *options)[2]
    assert "start: expected a run that has ended, with model.safetensors, got runs/pre/none-seed0" in err


def test_the_table_holds_what_the_paper_says():
    table, text = (
        load_table("lrpe-1"),
        """
        Base 5.35 76.10/76.39 85.47 88.44 53.43 89.33 70.59 - 48.08
        Rope 5.17 76.53/77.08 82.77 83.30 55.96 90.48 69.36 38.84 49.28
        SPE 6.07 67.92/68.12 73.70 87.27 53.43 84.75 70.34 - 17.88
        PER 5.32 77.30/77.37 84.09 89.03 55.96 90.25 71.08 29.04 68.10
        Type1 5.18 79.18/78.76 87.75 89.55 55.96 90.48 73.04 48.27 82.09
        Type2 5.12 80.28/80.68 87.17 89.68 59.21 91.97 73.77 49.34 79.28
        Type3 5.28 77.34/77.55 86.22 88.99 58.48 90.48 71.08 36.67 74.66""",
    )  # as it stands there
    for line in text.strip().splitlines():
        name, loss, *shares = line.replace("/", " ").replace("-", "nan").split()
        expected = [float(loss), *(float(share) / 100 for share in shares)]
        assert table.row(name).figures == pytest.approx(expected, nan_ok=True)
    corpora = ["wikibook", "MNLI", "MNLI", "QNLI", "QQP", "RTE", "SST-2", "MRPC", "CoLA", "STS-B"]
    assert [column.corpus for column in table.columns] == corpora
    main = {column.title: table.metric(column).figure for column in table.columns}
    assert main.pop("Loss") == "loss"
    assert {title for title, figure in main.items() if figure != "accuracy"} == {"CoLA", "STS-B"}
    assert (main["CoLA"], main["STS-B"]) == ("matthews", "spearman")


TABLE = ("table", "lrpe-1", "--scale=tiny", "--device=cpu", "--rows=Base,Rope")


@pytest.mark.slow
def test_a_table_trains_once_and_fine_tunes_a_copy_a_column(isopos, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("phrases end with a or b, and nothing else.\n" * 200)
    command = (*TABLE, "--data", "wikibook=text.txt", f"CoLA={cola(tmp_path)}", f"RTE={rte(tmp_path)}")
    assert "6 of 6 cells are missing" in isopos(*command, "--dry-run")[1]
    status, _, err = isopos(*command)
    assert (status, err) == (0, "")
    folder = tmp_path / "runs" / "tables" / "lrpe-1-tiny"
    cells = {path.name: path for path in (folder / "cells").iterdir() if path.is_dir()}
    names = [f"{corpus}-{scheme}-seed0" for corpus in ("CoLA", "RTE", "wikibook") for scheme in ("rope", "sinusoidal")]
    assert sorted(cells) == names
    for corpus in ("CoLA", "RTE"):
        recipe = json.loads((cells[f"{corpus}-rope-seed0"] / "recipe.json").read_text())
        assert (recipe["task"], recipe["subset"], recipe["steps"], recipe["layers"]) == ("glue", corpus, 10, 1)
        assert tmp_path / recipe["start"] == cells["wikibook-rope-seed0"]
        (column,) = json.loads((cells[f"{corpus}-rope-seed0"] / "scores.json").read_text())["columns"].values()
        assert column["value"] == column[{"CoLA": "matthews", "RTE": "accuracy"}[corpus]]
    page = (folder / "table.md").read_text()
    assert "| Rope | rope | 5.17 | " in page
    assert "| 55.96% | " in page
    assert "Base on" not in page  # nothing of what was asked for is missing
    assert "updates to Base's loss" in page
    assert "MNLI, for which --data MNLI=PATH gives one" in page
    assert "Scale of CoLA and RTE: " in page
    assert "5 rows without labels" not in page
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    del before[folder / "about.json"], before[folder / "results.json"]  # written at each call
    (cells["RTE-rope-seed0"] / "scores.json").unlink()
    shutil.rmtree(cells["RTE-rope-seed0"])
    assert isopos(*command)[0] == 0  # a cell that is lost begins again with the weights that are there
    changed = [path for path, then in before.items() if path.stat().st_mtime_ns != then and "RTE-rope" not in str(path)]
    assert changed == []
    assert (cells["RTE-rope-seed0"] / "scores.json").exists()


def test_a_table_says_what_a_column_begins_with(isopos, tmp_path):
    small = [word.replace("tiny", "small") for word in TABLE]
    status, _, err = isopos(*small, "--data", f"RTE={rte(tmp_path)}")
    assert (status, err) == (2, "isopos: data: expected wikibook=PATH, from whose runs RTE starts, got none\n")
    assert "2 of 2 cells are missing" in isopos(*small, "--data", "wikibook=x", "--dry-run")[1]
    assert "4 of 4 cells are missing" in isopos(*TABLE, "--dry-run")[1]  # CoLA's like, without its data
    Path("RTE/dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n")
    status, _, err = isopos(*TABLE, "--data", "RTE=RTE")
    assert (status, "dev.tsv, line 2: column 4: expected one of entailment" in err) == (2, True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('start = "wikibook"', 'start = "wikiboek"', "CoLA: start: expected one of wikibook, got 'wikiboek'"),
        ('start = "wikibook"', 'start = "wikibook"\nstart_row = "SPEC"', "CoLA: start_row: expected one of Base, Rope, "),
        (
            "[start_scales.tiny]",
            "[start_scales.tiny]\nlayers = 2",
            "layers: expected none for CoLA, which has that of wikibook",
        ),
        ("[start_scales.paper]", "", "start_scales: expected tiny, small, paper, got small, tiny"),
        ("validation_rows = 64", "validation_row = 64", "field of a recipe: expected one of"),
        ('recipe = "lrpe-glue"', 'recipe = "lrpe-alm"', "field of a recipe: expected one of"),
    ],
)
def test_a_damaged_table_is_one_clear_error(tmp_path, old, new, message):
    text = (FOLDER / "lrpe-1.toml").read_text()
    assert old in text
    (tmp_path / "lrpe-1.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"^lrpe-1\.toml: ") as error:
        load_table(str(tmp_path / "lrpe-1.toml"))
    assert message in str(error.value)


@pytest.mark.slow
def test_constants_of_schemes_and_tokenizers_are_those_of_the_start(isopos, tmp_path, pretrained):
    options = ("--data=text.txt", "--steps=2", *SMALL)
    assert isopos("train", "masked", "--scheme=permuteformer", "--name=per", *options)[0] == 0
    glue = ("train", "glue", f"--data={cola(tmp_path)}", "--scheme=permuteformer", "--steps=2", *SMALL)
    status, _, err = isopos(*glue, "--start=runs", "--seed=1", "--name=a")
    assert (status, "start: expected one run with the scheme permuteformer and the seed 1 in runs, got per;" in err) == (
        2,
        True,
    )
    status, _, err = isopos(*glue, "--start=runs/per", "--seed=1", "--name=a")
    assert (status, err.count("\n")) == (2, 1)
    assert "start: expected permuteformer with the constants that it has in runs/per, which follow seed and length" in err
    assert isopos(*glue, "--start=runs", "--name=a")[0] == 0
    Words.learn(["a few words\n"]).save(tmp_path / "runs" / "pre" / "rope-seed0")
    glue = ("compare", "--task=glue", f"--data={tmp_path / 'CoLA'}", "--schemes=none,rope", "--steps=2", *SMALL)
    err = isopos(*glue, "--start=runs/pre", "--name=b")[2]
    assert "start: expected runs with one tokenizer, got another in runs/pre/rope-seed0" in err
    assert not (tmp_path / "runs" / "b").exists()


@pytest.mark.skipif(not SHARED.exists(), reason="the published files are not beside this project")
@pytest.mark.parametrize(
    ("name", "counts"),
    [("CoLA", (8551, 1043)), ("RTE", (2127, 277)), ("STS-B", (5749, 1500, 1379)), ("SST-2", (60614, 6735, 872))],
)
def test_the_published_files(name, counts):
    found = load_glue(str(SHARED / name), name, Bytes()).facts
    assert tuple(count for count in found["rows"].values() if count) == counts
    assert found["left"] == ({"rows without labels": 3000, "the file val.tsv": 1} if name == "RTE" else {})
