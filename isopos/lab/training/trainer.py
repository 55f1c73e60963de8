"""Training by Lightning's Trainer. Each step is a function of recipe, step number, rank and the previous weights.

A resumed run is therefore a new `fit` over the remaining steps. Importing this module takes seconds (Lightning).
"""

import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from isopos.lab.recipes import Recipe, Training
from isopos.lab.runs import checkpoints, signals
from isopos.lab.runs.files import damaged
from isopos.lab.runs.folders import Log
from isopos.lab.tasks.task import Data
from isopos.lab.training import OnStep
from isopos.lab.training.group import group_by_keys, is_of_another_process

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on the first process, for any strategy
OBSERVER = "child-process-observer"  # the name of Lightning's thread that waits for the processes it started
PATIENCE = 30  # seconds until a process is ended that does not notice that others did
SMALL_FILES = 1 << 20  # bytes of results, examples and metrics
LIGHTNING_WARNINGS = (
    ".*find_unused_parameters=True was specified",
    ".*does not have many workers",
    ".*LeafSpec.* is deprecated",
)
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)  # hides its remarks on devices and its tips


class Fitted(NamedTuple):
    """Result of training."""

    status: str  # "finished" or "diverged at step n"
    weights: Mapping[str, Any]  # the state dict of the model on the CPU, on the first process; empty on the others
    rate: float  # the task's units per second, over the steps of this process
    stopped: int  # the signal that ended training early, or 0
    step: int  # the last step


class Batches(Dataset):
    """One rank's parts of the batches after step `done`: item i is (step, part, *batch)."""

    def __init__(self, recipe: Recipe, data: Data, done: int, rank: int, ranks: int):
        self.recipe, self.data, self.done, self.rank, self.ranks = recipe, data, done, rank, ranks

    def __len__(self) -> int:
        return (self.recipe.training.steps - self.done) * self.recipe.training.accumulate

    def __getitem__(self, item: int) -> tuple[Any, ...]:
        if not 0 <= item < len(self):
            raise IndexError(item)
        parts = self.recipe.training.accumulate
        step, part = divmod(item, parts)
        step += self.done + 1
        return step, part, *self.data.batch(self.recipe, step, self.rank * parts + part, self.ranks * parts)


def dropout_seed(seed: int, step: int, rank: int, part: int) -> int:
    """Seed of dropout in one part of a step; different arguments give independent seeds."""
    return int(np.random.SeedSequence((seed, step, rank, part)).generate_state(1, np.uint64)[0])


def learning_rate_factor(t: Training, step: int) -> float:
    """Learning-rate multiplier at step >= 1: a linear warm-up, then the recipe's schedule.

    The inverse square root is Fairseq's, sqrt(warmup / step). The other schedules end after the last step.

    Examples:
        >>> training = Training(steps=100, warmup=10, schedule="polynomial")
        >>> [learning_rate_factor(training, step) for step in (1, 10, 11, 56, 100)]
        [0.1, 1.0, 1.0, 0.5, 0.011...]
    """
    warm = max(1, t.steps // 10) if t.warmup < 0 else t.warmup
    if step <= warm:
        return step / warm
    remaining = 1 - (step - 1 - warm) / max(1, t.steps - warm)
    match t.schedule:
        case "cosine":
            return 0.5 + 0.5 * math.cos(math.pi * (1 - remaining))
        case "polynomial":
            return remaining**t.power
        case "inverse-sqrt":
            return math.sqrt(max(1, warm) / step)
        case "constant":
            return 1.0


class _Training(LightningModule):
    """The remaining steps of one run; only the first process has a `log`."""

    def __init__(
        self, recipe: Recipe, data: Data, folder: Path, log: Log | None, on_step: OnStep, checkpoint: dict[str, Any] | None
    ):
        super().__init__()
        self.recipe, self.data, self.folder, self.log_rows, self.on_step = recipe, data, folder, log, on_step
        self.settings, self.metric = recipe.training, recipe.task.metrics[0]
        self.checkpoint, self.first = checkpoint, checkpoint["step"] if checkpoint else 0  # first: the last step done
        self.model = recipe.task.model(recipe)
        if checkpoint is None and (origin := recipe.task.origin(recipe)) is not None:
            checkpoints.warm_start(self.model, origin, recipe.task.reinitialised(recipe))
        self.losses: list[Tensor] = []
        self.step, self.status, self.best = self.first, "finished", (0, math.inf)  # step and rank
        self.ended = self.stopping = self.sharded = False
        self.signal, self.start, self.row = signals.pending(), 0.0, {}
        self.weights: Mapping[str, Any] = {}
        self.group: Any = None  # whose processes hold one sequence

    def configure_model(self) -> None:
        ranks = self.settings.sequence_parallel
        if ranks > 1 and self.group is None:
            shape, names = (self.settings.shares, ranks), ("data", "sequence")
            group = init_device_mesh(self.device.type, shape, mesh_dim_names=names)["sequence"].get_group()
            self.group = group_by_keys(group, self.settings.sequence_keys)
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self.sharded:  # FSDP2
            mesh = self.trainer.strategy.device_mesh["data_parallel"]
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # positions and angles keep their dtype
            for block in (*self.model.blocks, self.model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            for method in self.data.calls:
                register_fsdp_forward_method(self.model, method)
            self.sharded = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        r = self.settings
        kind = torch.optim.AdamW if r.optimizer == "adamw" else torch.optim.Adam
        betas = (r.beta1, r.beta2)
        return kind(self.parameters(), lr=r.learning_rate, betas=betas, eps=r.epsilon, weight_decay=r.weight_decay)

    def train_dataloader(self) -> DataLoader:
        share = self.global_rank // self.settings.sequence_parallel
        batches = Batches(self.recipe, self.data, self.first, share, self.settings.shares)
        start = _reset_signals if self.settings.workers else None
        return DataLoader(batches, batch_size=None, num_workers=self.settings.workers, worker_init_fn=start)

    def on_fit_start(self) -> None:
        for thread in threading.enumerate():
            if thread.name == OBSERVER:
                observer: Any = thread
                observer._terminate_all = partial(_end_all, observer, lambda: _line(self.folder, self.step))
        if self.checkpoint is not None:
            state, self.checkpoint = self.checkpoint, None  # frees the memory
            content = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            try:
                set_state_dict(self.model, self._optimizer, **content, options=StateDictOptions(full_state_dict=True))
                self.best = (int(state["best"][0]), state["best"][1])
                for weight, moments in self._optimizer.state.items():
                    if not weight.shape == moments["exp_avg"].shape == moments["exp_avg_sq"].shape:
                        raise ValueError("expected averages of gradients of the shapes of the weights")
            except Exception as error:  # PyTorch raises various types for the checkpoint of another run
                last = checkpoints.newest(self.folder)
                damaged(last.folder if last else self.folder, error, "remove it, and --resume goes on from the one before")

    def on_train_start(self) -> None:
        """Replay the rows of earlier steps to the loggers, which start empty; take over the signals."""
        for row in self.log_rows.rows if self.log_rows else ():
            self._to_loggers(row)
        self.take_signals()  # again: Lightning has replaced the handler of SIGTERM
        self.start = time.perf_counter()

    def training_step(self, batch: tuple[Any, ...], batch_idx: int) -> Tensor:
        step, part, *samples = batch
        torch.manual_seed(dropout_seed(self.recipe.seed, step, self.global_rank, part))
        self._optimizer.param_groups[0]["lr"] = self.settings.learning_rate * learning_rate_factor(self.settings, step)
        with self._over():
            loss = self.data.loss(self.model, *self.data.part(self.model, tuple(samples)))
        self.losses.append(loss.detach().double())
        self.step = step
        return loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip the gradient; drop it if it or the loss is not finite, so that the weights do not change."""
        values = torch.stack((torch.stack(self.losses).mean(), torch.tensor(float(self.signal > 0), device=self.device)))
        self.losses.clear()
        loss, stop = self.trainer.strategy.reduce(values, reduce_op="sum").tolist()
        loss, self.stopping = loss / self.trainer.world_size, stop > 0
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or math.inf)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            optimizer.zero_grad()
            self.status = f"diverged at step {self.step}"
        rate = self._optimizer.param_groups[0]["lr"]
        self.row = {"step": self.step, "loss": _number(loss), "gradient_norm": _number(norm), "learning_rate": rate}

    def on_train_batch_end(self, outputs: Any, batch: tuple[Any, ...], batch_idx: int) -> None:
        """After the last part of a step: log, validate, save, and decide whether to stop. All ranks decide alike."""
        r, step = self.settings, self.step
        if batch[1] + 1 < r.accumulate:
            return
        diverged = self.status != "finished"
        self._record(self.row)
        due = r.validate_every > 0 and not diverged and (step % r.validate_every == 0 or step == r.steps)
        validation = self._validate() if due else None
        rank = math.inf if validation is None else self.metric.rank(validation)
        if improved := rank < self.best[1]:
            self.best = (step, rank)
        impatient = r.patience > 0 and step - self.best[0] >= r.patience * r.validate_every
        self.ended = diverged or impatient or step == r.steps
        if r.save_every and not diverged and (step % r.save_every == 0 or improved or self.ended or self.stopping):
            self._save(validation)
        self.trainer.should_stop = self.ended or self.stopping

    def on_train_end(self) -> None:
        self.weights = get_model_state_dict(self.model, options=FULL)

    @property
    def rate(self) -> float:
        """The task's units per second."""
        done = (self.step - self.first) * self.recipe.task.size(self.recipe)
        return done / (time.perf_counter() - self.start)

    def take_signals(self) -> None:
        """Make SIGINT and SIGTERM end the run after the current step; a second SIGINT ends it at once."""

        def note(number: int, frame: Any) -> None:
            if self.signal == number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        if threading.current_thread() is threading.main_thread():
            for number in signals.SIGNALS:
                signal.signal(number, note)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[0]

    def _over(self) -> Any:
        """The context in which the processes of a group hold shards of a sample; does nothing without a group."""
        return nullcontext() if self.group is None else self.model.over(self.group)

    def _validate(self) -> float | None:
        with self._over():
            value = _number(self.data.evaluate(self.model, self.recipe, (self.metric,))[self.metric.title])
        value = self.trainer.strategy.broadcast(value)  # statistics of batch norm differ between processes
        self._record({"step": self.step, "validation": value})
        return value

    def _record(self, row: dict[str, Any]) -> None:
        if self.log_rows is None:
            return
        self.log_rows.write(**row)
        self._to_loggers(row)
        if "learning_rate" in row:
            loss = math.nan if row["loss"] is None else row["loss"]
            try:
                self.on_step(self.step, loss * self.recipe.task.loss_scale, self.rate)
            except KeyboardInterrupt as stop:
                self.signal = signals.exit_status(stop) - 128

    def _to_loggers(self, row: dict[str, Any]) -> None:
        values = {name: value for name, value in row.items() if name != "step" and value is not None}
        for logger in self.trainer.loggers:
            logger.log_metrics(values, row["step"])

    def _save(self, validation: float | None) -> None:
        """Write a checkpoint, in the first process; raise in all processes if it fails."""
        model, optimizer = get_state_dict(self.model, self._optimizer, options=FULL)
        state = {"model": model, "optimizer": optimizer, "best": list(self.best), "step": self.step}
        error = ""
        if self.log_rows is not None:
            try:
                self.log_rows.flush()
                checkpoints.save_checkpoint(self.folder, state, self.step, validation, self.metric.better, self.ended)
            except OSError as failure:
                error = str(failure)
        error = self.trainer.strategy.broadcast(error)
        if error:
            raise OSError(error)


def fit(
    recipe: Recipe,
    data: Data,
    folder: Path,
    log: Log | None,
    on_step: OnStep,
    checkpoint: dict[str, Any] | None = None,
) -> Fitted:
    """Train from the content of a checkpoint, or from the start; all ranks call it, only the first has a log."""
    training, t = _Training(recipe, data, folder, log, on_step, checkpoint), recipe.training
    if log:
        _check_room(folder, training.model)
    with signals.restored_handlers(), warnings.catch_warnings():
        for message in LIGHTNING_WARNINGS:
            warnings.filterwarnings("ignore", message)
        device = torch.device(t.device)
        trainer = Trainer(
            accelerator="gpu" if device.type == "cuda" else device.type,
            devices=t.devices if device.index is None else [device.index],
            num_nodes=t.nodes,
            strategy=_strategy(t),
            plugins=_environment(),
            precision="bf16-mixed" if t.precision == "bfloat16" else "32-true",
            max_epochs=1,
            accumulate_grad_batches=t.accumulate,
            logger=_loggers(t, folder) if log else False,
            log_every_n_steps=1,
            default_root_dir=folder,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if t.nodes == 1:
            training.take_signals()
        else:
            _wait_for_nodes(t.nodes)
        try:
            trainer.fit(training)
        except RuntimeError as error:
            if not is_of_another_process(error):
                raise
            if log is None:  # the first process tells
                raise SystemExit(2) from None
            raise OSError(_line(folder, training.step)) from None
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()  # its threads sometimes abort a process that exits
    stopped = int(training.signal or signal.SIGTERM) if training.stopping and not training.ended else 0
    if training.signal and not stopped:  # too late for this run; the command checks for it next
        signals.remember(training.signal)
    return Fitted(training.status, training.weights, training.rate, stopped, training.step)


def _line(folder: Path, step: int) -> str:
    last = checkpoints.newest(folder)
    return (
        f"another process of this run ended after step {step}; "
        f"the same command with --resume goes on from step {last.step if last else 0}"
    )


def _end_all(observer: Any, line: Callable[[], str]) -> None:
    """End the processes that Lightning started, after one of them ended; then the first one, in which this thread runs.

    Lightning would kill all at once, perhaps before the first one has told. Its collective fails without the others. Where
    it does not, this thread tells in its place.
    """
    for process in observer._child_processes:
        process.kill()
    time.sleep(PATIENCE)
    print(f"isopos: {line()}", file=sys.stderr, flush=True)
    os._exit(2)


def _check_room(folder: Path, model: nn.Module) -> None:
    """Raise an OSError if the disk has no space for the final weights and the smaller files."""
    size = sum(value.numel() * value.element_size() for value in model.state_dict().values()) + SMALL_FILES
    if (free := shutil.disk_usage(folder).free) < size:
        raise OSError(
            f"room: expected {size:,} bytes on the disk of {folder} for the weights at the end, got {free:,}; "
            "make room and begin with --resume"
        )


def _wait_for_nodes(nodes: int) -> None:
    """Let signals end the process at once, since Python runs no handler until all nodes are connected; print a line."""
    for number in signals.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"waiting for {nodes} nodes, at most 30 minutes", file=sys.stderr, flush=True)


def _strategy(t: Training) -> Any:
    world = t.devices * t.nodes
    if world > 1 and t.strategy == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    if world == 1:
        return "auto"
    # Otherwise DDP puts gradients in other buckets after the first step of a process, and sums of three or more numbers
    # are rounded otherwise than in a run that was not interrupted.
    return DDPStrategy(find_unused_parameters=world > 2)


def _environment() -> list[Any]:
    """SLURM's plugin, if it starts the processes, without requeueing, which would write other checkpoints."""
    slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [SLURMEnvironment(auto_requeue=False)] if slurm else []


def _loggers(t: Training, folder: Path) -> list[Logger]:
    """Loggers in addition to metrics.jsonl. All rows are replayed to them, so files of an earlier start are removed."""
    if t.logger == "none":
        return []
    shutil.rmtree(folder / t.logger, ignore_errors=True)
    kind = CSVLogger if t.logger == "csv" else TensorBoardLogger
    return [kind(folder, name="", version=t.logger)]


def _reset_signals(worker: int) -> None:
    """Signals of a process that prepares batches: ignore Ctrl-C, end on SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _number(value: float | None) -> float | None:
    """The value; None if it is not finite, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
