"""The engine in one process: what a step is a function of, resuming, stopping, and every choice of a recipe."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from isopos import lab
from isopos.lab.recipes import Recipe, Training
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import Interrupted, read_rows
from isopos.lab.training import run as train
from isopos.lab.training import trainer

TINY = Recipe().edit(
    steps=12, length=32, batch=4, layers=1, model_dim=16, heads=2, validation_tokens=512, dropout=0.1, save_every=4
)


@pytest.fixture(scope="module")
def source():
    return TINY.task.load(TINY)


@pytest.fixture
def run(source, tmp_path):
    """Trains in tmp_path/run; returns the rows of metrics.jsonl."""

    def start(recipe, name="run", on_step=lambda *row: None, **options):
        train.train(recipe, source, tmp_path / name, on_step, **options)
        return read_rows(tmp_path / name / "metrics.jsonl")

    return start


@pytest.mark.parametrize(("accumulate", "ranks"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_the_batch_of_a_step_does_not_depend_on_who_computes_it(source, accumulate, ranks):
    recipe = TINY.edit(accumulate=accumulate)
    parts = [trainer.Batches(recipe, source, 5, rank, ranks) for rank in range(ranks)]
    assert all(len(part) == (TINY.training.steps - 5) * accumulate for part in parts)
    for step in (6, 12):
        items = [part[(step - 6) * accumulate + n] for part in parts for n in range(accumulate)]
        assert {item[0] for item in items} == {step}
        whole = source.batch(TINY, step)
        for place in (0, 1):
            assert torch.equal(torch.cat([item[2 + place] for item in items]), whole[place])
    with pytest.raises(IndexError):
        parts[0][len(parts[0])]


def test_randomness_tells_seed_step_rank_and_part_apart():
    places = [(seed, step, rank, part) for seed in (0, 1) for step in (1, 2) for rank in (0, 1) for part in (0, 1)]
    assert len({trainer.dropout_seed(*place) for place in places}) == len(places)
    assert trainer.dropout_seed(1, 2, 3, 4) == trainer.dropout_seed(1, 2, 3, 4)


@pytest.mark.parametrize("schedule", ["cosine", "polynomial", "inverse-sqrt", "constant"])
@pytest.mark.parametrize("warmup", [-1, 0, 40])
def test_the_learning_rate_warms_up_and_never_rises_again(schedule, warmup):
    recipe = Training(steps=100, schedule=schedule, warmup=warmup)
    shares = [trainer.learning_rate_factor(recipe, step) for step in range(1, 101)]
    warm = 10 if warmup == -1 else warmup
    assert shares[:warm] == pytest.approx([step / warm for step in range(1, warm + 1)])
    assert shares[max(warm - 1, 0)] == 1
    assert all(a >= b > 0 for a, b in zip(shares[warm:], shares[warm + 1 :], strict=False))


def test_the_schedules_are_those_of_their_names():
    at = {
        name: trainer.learning_rate_factor(Training(steps=100, schedule=name, power=2.0), 56)
        for name in ("cosine", "polynomial", "constant")
    }
    assert at == pytest.approx({"cosine": 0.5, "polynomial": 0.25, "constant": 1})
    assert trainer.learning_rate_factor(Training(steps=100, schedule="inverse-sqrt"), 40) == 0.5


def test_accumulated_parts_are_one_update(run):
    recipe = TINY.edit(dropout=0.0, steps=4)
    whole, parts = run(recipe, "whole"), run(recipe.edit(accumulate=4), "parts")
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], abs=1e-6)
    assert [row["gradient_norm"] for row in parts] == pytest.approx([row["gradient_norm"] for row in whole], rel=1e-4)


def test_recomputed_blocks_change_nothing(run):
    assert run(TINY, "kept") == run(TINY.edit(recompute=True), "recomputed")


@pytest.mark.parametrize(("workers", "tied"), [(0, False), (2, False), (0, True)])
def test_an_interrupted_run_goes_on_bit_for_bit(run, tmp_path, workers, tied):
    recipe = TINY.edit(workers=workers, scheme="lrpe-orthogonal:learned=true", accumulate=2, tied=tied)
    expected = run(recipe.edit(workers=0), "whole")

    def interrupt(step, *rest):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"interrupted after step 7; .* --resume goes on from step 7") as stop:
        run(recipe, on_step=interrupt)
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "run" / "result.json").exists()
    seen = []
    assert run(recipe, on_step=lambda *row: seen.append(row[0]), resume=True) == expected
    assert seen == [8, 9, 10, 11, 12]
    whole, again = (lab.load(tmp_path / name).state_dict() for name in ("whole", "run"))
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_a_run_killed_before_its_first_checkpoint_begins_again(run, tmp_path):
    expected = run(TINY, "whole")
    folder = tmp_path / "run"
    run(TINY)
    for checkpoint in checkpoints.complete(folder):
        (checkpoint.folder / "complete.json").unlink()
    (folder / "result.json").unlink()
    assert run(TINY, resume=True) == expected


def test_a_run_killed_while_it_is_evaluated_is_not_trained_again(run, tmp_path):
    expected = run(TINY)
    (tmp_path / "run" / "result.json").unlink()
    seen = []
    assert run(TINY, on_step=lambda *row: seen.append(row), resume=True) == expected
    assert (tmp_path / "run" / "result.json").exists()
    assert run(TINY, on_step=lambda *row: seen.append(row), resume=True) == expected
    assert seen == []


def test_the_best_validation_gives_the_weights_and_patience_ends_the_run(run, tmp_path, source):
    recipe = TINY.edit(steps=40, learning_rate=0.3, schedule="constant", validate_every=2, patience=2, save_every=100)
    validations = [(row["validation"], row["step"]) for row in run(recipe) if "validation" in row]
    best, at = min(validations)
    assert validations[-1][1] == at + 4 < 40
    assert {c.step for c in checkpoints.complete(tmp_path / "run")} >= {at, at + 4}
    model = lab.load(tmp_path / "run")
    assert source.evaluate(model, recipe, recipe.task.metrics)["bits/byte"] == pytest.approx(best, rel=1e-6)


def test_validations_and_patience_go_on_after_an_interruption(run):
    recipe = TINY.edit(steps=40, learning_rate=0.3, schedule="constant", validate_every=2, patience=2, save_every=100)
    expected, at = run(recipe, "whole"), 0

    def interrupt(step, *rest):
        if step == at:
            raise KeyboardInterrupt

    ends = expected[-1]["step"]
    for at in range(2, ends - 1, 3):
        with pytest.raises(Interrupted):
            run(recipe, on_step=interrupt, resume=at > 2)
    assert run(recipe, resume=True) == expected


def test_a_run_that_diverges_keeps_its_last_finite_weights(run, tmp_path):
    rows = run(TINY.edit(learning_rate=1e12, clip=0.0, save_every=1, schedule="constant"))
    assert rows[-1]["loss"] is None or rows[-1]["gradient_norm"] is None
    assert all(torch.isfinite(value).all() for value in lab.load(tmp_path / "run").state_dict().values())
    assert checkpoints.newest(tmp_path / "run").step == rows[-1]["step"] - 1


def test_the_gradient_is_clipped(run):
    rows = run(TINY.edit(steps=3, clip=1e-9, optimizer="adam", weight_decay=0.0, epsilon=1.0))
    assert rows[0]["gradient_norm"] > 0.1  # as it was
    still = run(TINY.edit(steps=3, learning_rate=1e-12), "still")
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in still], abs=1e-5)


def test_without_a_clip_the_gradient_is_as_it_was(run):
    rows, most = (run(TINY.edit(steps=4, clip=clip), name) for clip, name in ((0.0, "none"), (1e9, "most")))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in most], abs=1e-6)
    still = run(TINY.edit(steps=4, learning_rate=1e-12), "still")
    assert abs(rows[-1]["loss"] - still[-1]["loss"]) > 1e-3


def test_bfloat16_products_and_float32_weights(run, tmp_path):
    exact, coarse = run(TINY, "exact"), run(TINY.edit(precision="bfloat16"), "coarse")
    assert exact != coarse
    assert [row["loss"] for row in coarse if "loss" in row] == pytest.approx(
        [row["loss"] for row in exact if "loss" in row], abs=0.05
    )
    assert {value.dtype for value in lab.load(tmp_path / "coarse").state_dict().values()} == {torch.float32}


def test_csv_shows_the_rows_of_metrics_jsonl_after_resuming_too(run, tmp_path):
    recipe = TINY.edit(logger="csv")

    def interrupt(step, *rest):
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(recipe, on_step=interrupt)
    rows = run(recipe, resume=True)
    lines = (tmp_path / "run" / "csv" / "metrics.csv").read_text().splitlines()
    place, step = lines[0].split(",").index("loss"), lines[0].split(",").index("step")
    assert [(int(line.split(",")[step]), float(line.split(",")[place])) for line in lines[1:]] == [
        (row["step"], row["loss"]) for row in rows
    ]


def test_tensorboard_shows_the_rows(run, tmp_path):
    pytest.importorskip("tensorboard")
    run(TINY.edit(logger="tensorboard", steps=3))
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_advice(run, tmp_path, monkeypatch):
    save = torch.save

    def full(state, file):
        if state["best"] is not None and len(checkpoints.complete(tmp_path / "run")) == 2:
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left on device; .*step-00000008 is whole: make room .* --resume"):
        run(TINY)
    monkeypatch.undo()
    assert run(TINY, resume=True) == run(TINY, "whole")


class Noted:
    """Data whose loss is watched, or changed."""

    def __init__(self, source, loss):
        self.source, self.loss = source, loss

    def __getattr__(self, name):
        return getattr(self.source, name)


def test_every_part_of_a_step_has_dropout_of_its_own(source, tmp_path):
    seeds = []

    def loss(model, *batch):
        seeds.append(torch.initial_seed())
        return source.loss(model, *batch)

    recipe = TINY.edit(steps=3, accumulate=2, seed=5)
    train.train(recipe, Noted(source, loss), tmp_path / "run")
    places = [(5, step, 0, part) for step in (1, 2, 3) for part in (0, 1)]
    assert seeds[: len(places)] == [trainer.dropout_seed(*place) for place in places]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_infinite_gradient_of_a_finite_loss_ends_the_run_as_it_was(source, tmp_path, clip):
    def loss(model, *batch):
        value = source.loss(model, *batch)
        if model.training and step == 2:
            weight = model.head.weight.sum()
            value = value + (weight - weight.detach()).sqrt()  # 0, and its derivative at 0 is infinite
        return value

    def next_step(done, *rest):
        nonlocal step
        step = done + 1

    step = 1
    result = train.train(TINY.edit(clip=clip, save_every=1), Noted(source, loss), tmp_path / "run", next_step)
    assert result.status == "diverged at step 2"
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["loss"] > 0
    assert rows[-1]["gradient_norm"] is None
    saved = checkpoints.read(checkpoints.newest(tmp_path / "run"))
    assert saved["step"] == 1
    kept = lab.load(tmp_path / "run").state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in saved["model"].items())


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_that_prepare_batches_leave_signals_to_the_others(source, workers):
    recipe, alone = TINY.edit(workers=workers), SimpleNamespace(world_size=1)
    state = SimpleNamespace(recipe=recipe, settings=recipe.training, data=source, first=0, global_rank=0, trainer=alone)
    loader = trainer._Training.train_dataloader(state)
    assert loader.num_workers == workers
    assert (loader.worker_init_fn is None) == (workers == 0)
    if workers:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            loader.worker_init_fn(0)
            assert [signal.getsignal(number) for number in before] == [signal.SIG_IGN, signal.SIG_DFL]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
