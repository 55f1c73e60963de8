"""Test the engine in one process: determinism of steps, resuming, stopping, and every choice of a recipe."""

import itertools
import json
import math
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


def test_the_schedules_are_their_formulas_at_every_step():
    warm, steps = 4, 20
    formulas = {
        "cosine": lambda n: (1 + math.cos(math.pi * (n - 1 - warm) / (steps - warm))) / 2,
        "polynomial": lambda n: (1 - (n - 1 - warm) / (steps - warm)) ** 1.5,
        "inverse-sqrt": lambda n: (warm / n) ** 0.5,
        "constant": lambda n: 1.0,
    }
    for name, formula in formulas.items():
        settings = Training(steps=steps, warmup=warm, schedule=name, power=1.5)
        found = [trainer.learning_rate_factor(settings, n) for n in range(1, steps + 1)]
        assert found == pytest.approx([n / warm if n <= warm else formula(n) for n in range(1, steps + 1)])
    for steps, warmup, first in ((3, -1, 1.0), (20, -1, 0.5), (20, 0, 1.0)):
        assert trainer.learning_rate_factor(Training(steps=steps, warmup=warmup, schedule="constant"), 1) == first


LOOPS = {
    "adamw": {"optimizer": "adamw", "accumulate": 2, "schedule": "cosine", "clip": 0.3},
    "adam": {"optimizer": "adam", "schedule": "polynomial", "power": 2.0, "clip": 0.0, "warmup": 2, "dropout": 0.0},
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_is_what_a_plain_loop_computes(run, source, tmp_path, kind, monkeypatch):
    """Every choice of optimiser, accumulation, dropout, clipping, schedule and validation, and the reports to the caller."""
    recipe = TINY.edit(steps=6, weight_decay=0.3, beta1=0.7, beta2=0.9, epsilon=1e-3, learning_rate=0.02, seed=2)
    recipe = recipe.edit(validate_every=4, save_every=3, **LOOPS[kind])
    t, told, clock = recipe.training, [], itertools.count()
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 1.0 * next(clock))
    rows = run(recipe, on_step=lambda *row: told.append(row))
    model = recipe.task.model(recipe)
    optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](
        model.parameters(), lr=1.0, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.3
    )
    expected, weights = [], {}
    for step in range(1, 7):
        losses = []
        optimizer.zero_grad()
        for part in range(t.accumulate):
            torch.manual_seed(trainer.dropout_seed(2, step, 0, part))
            loss = source.loss(model.train(), *source.batch(recipe, step, part, t.accumulate))
            (loss / t.accumulate).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip or math.inf).item()
        rate = optimizer.param_groups[0]["lr"] = 0.02 * trainer.learning_rate_factor(t, step)
        optimizer.step()
        loss = sum(losses) / len(losses)
        expected.append({"step": step, "loss": loss, "gradient_norm": norm, "learning_rate": rate})
        if step in (4, 6):
            metrics = recipe.task.metrics[:1]
            value = source.evaluate(model.eval(), recipe, metrics)["bits/byte"]
            expected.append({"step": step, "validation": value})
            weights[value] = {name: weight.clone() for name, weight in model.state_dict().items()}
    for found, own in zip(rows, expected, strict=True):
        assert found == pytest.approx(own, rel=1e-5, abs=1e-7)
    assert [row[0] for row in told] == [1, 2, 3, 4, 5, 6]
    assert [row[1] for row in told] == pytest.approx([row["loss"] / math.log(2) for row in rows if "loss" in row], rel=1e-6)
    assert [row[2] for row in told] == pytest.approx([n * 4 * 32 / n for n in range(1, 7)]), "tokens in n seconds"
    kept = lab.load(tmp_path / "run").state_dict()
    assert all(torch.allclose(weight, kept[name], atol=1e-6) for name, weight in weights[min(weights)].items())
    found = checkpoints.complete(tmp_path / "run")
    validations = [row["validation"] for row in rows if "validation" in row]
    assert [tuple(c[1:]) for c in checkpoints.complete(tmp_path / "run")] == [
        (step, value, "lower", step == 6) for step, value in zip((4, 6), validations, strict=True)
    ]


def test_units_per_second_are_of_the_steps_since_a_run_went_on(run, monkeypatch):
    def interrupt(step, *rest):
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(TINY, on_step=interrupt)
    clock, told = itertools.count(), []
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: 1.0 * next(clock))
    run(TINY, on_step=lambda *row: told.append(row[2]), resume=True)
    assert told == pytest.approx([4 * 32] * 5)


def test_a_resumed_run_keeps_the_recipe_of_where_it_runs_now(run, tmp_path):
    run(TINY)
    (tmp_path / "run" / "result.json").unlink()
    run(TINY.edit(workers=1), resume=True)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text()) == json.loads(
        json.dumps(TINY.edit(workers=1).as_dict())
    )
    assert json.loads((tmp_path / "run" / "data.json").read_text()).keys() == {"name", "sha256"}


@pytest.mark.parametrize("name", ["RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_the_first_process_is_that_of_rank_zero_everywhere(monkeypatch, name):
    for other in ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(other, "0")
    assert train.is_first_process()
    monkeypatch.setenv(name, "1")
    assert not train.is_first_process()
    for other in ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(other)
    assert train.is_first_process()


def test_laws_of_a_run_are_those_of_all_its_schemes(run, tmp_path):
    for scheme, laws in (("rope", "yes"), ("rope+none", "yes"), ("learned+rope", "no (attention)")):
        name = scheme.replace("+", "-")
        run(TINY.edit(steps=1, layers=2, save_every=0, scheme=scheme), name)
        assert json.loads((tmp_path / name / "result.json").read_text())["laws"] == laws


def test_timed_workloads_are_a_step_with_gradients_or_one_sample_without():
    seen = []

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            seen.append((len(x), self.training, torch.is_grad_enabled(), self.weight.grad is None))
            return (self.weight * x).sum()

    task = SimpleNamespace(model=lambda recipe: Watched())
    recipe = SimpleNamespace(
        task=task,
        training=SimpleNamespace(device="cpu", precision="float32", batch=4),
        edit=lambda **changes: edited(changes),
    )

    def edited(changes):
        settings = SimpleNamespace(**vars(recipe.training) | {"batch": changes.get("batch", 4)})
        return SimpleNamespace(task=task, training=settings)

    data = SimpleNamespace(batch=lambda recipe, step: (torch.ones(recipe.training.batch),), loss=lambda model, x: model(x))
    for times, expected in ((train.step_times, (4, True, True, True)), (train.answer_times, (1, False, False, True))):
        seen.clear()
        (seconds,) = times(recipe, data, {"a": "rope", "b": "none"}, 1)
        assert set(seconds) == {"a", "b"}
        assert set(seen) == {expected}


def test_memory_that_a_step_needs(monkeypatch):
    for changes, parts in (
        ({}, 1), ({"accumulate": 2}, 2), ({"devices": 2}, 2), ({"nodes": 3}, 3), ({"recompute": True}, 8),
        ({"layers": 4}, 0.25), ({"model_dim": 32}, 0.5), ({"batch": 2}, 2), ({"length": 64}, 0.5),
        ({"accumulate": 2, "devices": 2, "nodes": 2}, 8),
    ):  # fmt: skip
        recipe, need = TINY.edit(**changes), 4 * 4 * 32 * 16 * 1 * 8 / parts
        monkeypatch.setattr(train, "_memory", lambda *_, need=need: need)
        train.check_memory(recipe)
        monkeypatch.setattr(train, "_memory", lambda *_, need=need: need - 1)
        said = rf"batch: expected one whose {recipe.training.accumulate} parts .*, got {recipe.training.batch}, which needs"
        with pytest.raises(ValueError, match=said):
            train.check_memory(recipe)


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
    with pytest.raises(OSError, match=r"No space left on device; .*step-00000008 is complete: make room .* --resume"):
        run(TINY)
    monkeypatch.undo()
    assert run(TINY, resume=True) == run(TINY, "whole")


class Noted:
    """Data with a hook for the loss."""

    def __init__(self, source, loss):
        self.source, self.loss = source, loss

    def __getattr__(self, name):
        return getattr(self.source, name)


def test_every_part_of_a_step_has_separate_dropout(source, tmp_path):
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
    saved = checkpoints.read_content(checkpoints.newest(tmp_path / "run"))
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
