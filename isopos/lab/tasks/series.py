"""Time series: forecasts of future values from past values and the times of both."""

import base64
import io
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Samples
from isopos.lab.tasks.task import Cut, Metric, Recipe, Scored, View, evaluation, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.lab.data.series import Series


ERRORS = "MAE, MSE: absolute and squared error of standardised values, over the horizon"
HOUR = 3600
FAR = 1e15  # standard deviations; larger squares overflow float32
CONSTANT = 1e-12  # smallest standard deviation of a column, relative to its largest value, that is not rounding
PARTS = (0.8, 0.9)  # shares of rows at which validation and test begin


@dataclass(frozen=True)
class Forecast(PositionedTask):
    """A forecaster: it reads `context` rows and the times of the next `horizon` rows, and predicts their values.

    Times may be irregular. Positions on a clock are day, week and absolute time; positions on a line are times in units of
    the median step of the training part, or numbers of rows.
    """

    data: str = ""
    """A .csv or .tsv with increasing times and values; empty: a synthetic load and temperature. See docs/data.md."""
    time: str = ""  # Column of times: its name, or its number from 1 on if the first line has no names; empty: the first.
    values: tuple[str, ...] = ()  # Columns of values, by name or number; empty: all others.
    time_unit: Literal["seconds", "minutes", "hours", "days"] = "seconds"  # Unit of times that are numbers, since 1970.
    positions: Literal["time", "index"] = "time"  # Positions of schemes on a line.
    context: int = 168  # Number of rows before the forecast.
    horizon: int = 24  # Number of rows to forecast.
    season: float = 24.0
    """Hours after which the naive forecast repeats values, at the nearest known time; 0: it repeats the last value."""
    channels: int = 0  # Number of values per row; 0: as in the data.
    validation_rows: int = 0  # Largest number of held-out forecasts that are scored; 0: all.

    name = "series"
    schemes = "none,learned,rope,clock"
    edits = MappingProxyType({"steps": 300, "batch": 16, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "forecasts"
    counted = "values"
    limits = ((("context", "horizon"), 1, 10**6), (("channels", "validation_rows"), 0, 10**9))
    inferred = ("channels",)
    columns = ("time", "values", "time_unit")
    metrics = (
        Metric("MAE", "mae", note=ERRORS),
        Metric("MSE", "mse", note=ERRORS),
        Metric("to naive", "naive", note="to naive: MAE, one of the seasonal-naive forecast = 1"),
    )

    @property
    def loss_unit(self) -> str:
        return "squared error"

    @property
    def rows(self) -> int:
        """Rows of a sample."""
        return self.context + self.horizon

    def setting(self, recipe: Recipe) -> str:
        return f"A forecaster of {self.horizon} rows from {self.context} before them, at their {self.positions}."

    @property
    def fits(self) -> dict[str, object]:
        return {"scale": 1.0, "length": self.rows, "reach": self.rows}  # tokens of standardised values vary about as much

    def check(self, recipe: Recipe) -> list[str]:
        import torch

        from isopos.lab.tasks.build import build_scheme

        self.check_columns()
        require("season", self.season, "hours from 0 on", 0 <= self.season < float("inf"))
        scheme = build_scheme(recipe)
        on_clock, on_line = _kinds_of(scheme)
        if not on_clock and not on_line:
            raise ValueError(
                f"schemes: expected positions on a line or a clock, which series have, but {recipe.scheme} takes positions "
                f"of a {scheme.group.noun}"
            )
        if scheme.max_length is not None and scheme.max_length < self.rows:
            raise ValueError(
                f"context: expected at most {scheme.max_length} rows with the horizon, for which {recipe.scheme} has "
                f"positions, got {self.rows}"
            )
        model, rows = self.model(recipe), torch.zeros(1, self.rows, self.channels or 1)
        with torch.no_grad():
            hours = np.arange(self.rows)[None] * float(HOUR)
            model(rows, _positions(recipe, self.positions, hours, hours, 0.0, HOUR))
        numbers = not on_clock and on_line != "real" and self.positions == "time"
        return [f"{recipe.scheme}: its positions are whole numbers, so it sees numbers of rows, not times"] * numbers

    def check_sequence_parallel(self, recipe: Recipe) -> None:
        """Rows are cut into shards."""
        ranks, rows = recipe.training.sequence_parallel, self.context + self.horizon
        require("context", self.context, f"with the horizon at least {2 * ranks} rows", rows >= 2 * ranks)

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Forecaster", self.channels or 1)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "ForecastSamples":
        from isopos.lab.data import series

        return ForecastSamples(
            self,
            series.read_series(self.data, self.time, self.values, self.time_unit) if self.data else series.example_series(),
        )


class ForecastSamples(Samples):
    """Windows of a series for training and evaluation: `context` rows, then `horizon` rows.

    The last fifth is held out, half of it for the test. Values are standardised by the training part. Scored forecasts are
    disjoint; their context may lie in the previous part. Columns that are constant in the training part are dropped, since
    errors in them have no scale.
    """

    unit = "forecasts"

    def __init__(self, task: Forecast, series: "Series"):
        self.task, self.series, self.name, self.sha256 = task, series, series.name, series.sha256
        count = len(series.seconds)
        ends = [int(share * count) for share in PARTS]
        if ends[0] <= task.rows or min(ends[1] - ends[0], count - ends[1]) < task.horizon:
            least = max(task.rows / PARTS[0], 10 * task.horizon)
            raise ValueError(
                f"data: expected more than {least:.0f} rows, for a context of {task.context} and a horizon of "
                f"{task.horizon}, got {count} in {series.name}; shorten both"
            )
        self.series, constant = _varying(series, ends[0])
        self.exact, self.limit = {"channels": len(self.series.titles)}, task.validation_rows
        series, train = self.series, self.series.values[: ends[0]]
        self.values = (series.values - np.nanmean(train, axis=0)) / np.nanstd(train, axis=0)
        if (far := np.argwhere(np.abs(self.values) > FAR)).size:
            row, column = far[0].tolist()
            raise ValueError(
                f"data: expected values of {series.titles[column]} within {FAR:g} standard deviations of those to train on, "
                f"got {series.values[row, column]:g} in row {row + 1} of {series.name}; repair or remove it"
            )
        self.step = float(np.median(np.diff(series.seconds[: ends[0]])))
        last = {
            "train": (task.context, ends[0], 1),
            "validation": (*ends, task.horizon),
            "test": (ends[1], count, task.horizon),
        }
        self.begins = {  # first rows of forecasts
            split: np.arange(low, high - task.horizon + 1, by) for split, (low, high, by) in last.items()
        }
        self.sizes = {split: np.full(len(rows), task.rows) for split, rows in self.begins.items()}
        lacking, gaps = int(np.isnan(series.values).sum()), int((np.diff(series.seconds) > 3 * self.step).sum())
        self.summary = (
            f"{ends[0]} + {ends[1] - ends[0]} + {count - ends[1]} rows of {', '.join(series.titles)[:200]}, "
            f"a step of {self.step / HOUR:.3g} hours, {gaps} gaps of more than 3"
            + f", {lacking} values missing" * (lacking > 0)
            + f", {series.empty} rows without any left out" * (series.empty > 0)
            + f", left out as constant: {', '.join(constant)[:200]}" * bool(constant)
        )

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Values ``[b t c]``, NaN where unknown, positions ``[t 1]`` or ``[b t c]``, and answers ``[b horizon c]``."""
        import torch

        chosen = self.begins[split][rows][:, None] + np.arange(-self.task.context, self.task.horizon)
        values = torch.from_numpy(self.values[chosen]).float()
        seconds, local = self.series.seconds[chosen], self.series.clock_seconds[chosen]
        positions = _positions(recipe, self.task.positions, seconds, local, float(self.series.seconds[0]), self.step)
        answers = values[:, self.task.context :].clone()
        values[:, self.task.context :] = torch.nan
        return values, positions, answers

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        """The mean over forecasts of the mean squared error of their known values."""
        values, positions, answers, *counts = batch
        known = ~answers.isnan()
        errors = model(values, positions)[:, -answers.shape[1] :] - answers.where(known, 0)
        sums = (errors.square() * known).flatten(1).sum(1)
        return (sums / (counts[0].to(sums.dtype) if counts else known.flatten(1).sum(1).clamp_min(1))).mean()

    def shard(self, batch: "tuple[Tensor, ...]", cut: Cut, ranks: int) -> "tuple[Tensor, ...]":
        """Shards of values, positions and answers of all rows, NaN for no answer; and the counts that divide sums."""
        import torch

        values, positions, answers = batch
        counts = (~answers.isnan()).flatten(1).sum(1).clamp_min(1).double() / ranks
        unknown = values.new_full((len(values), values.shape[1] - answers.shape[1], answers.shape[2]), torch.nan)
        return cut(values, 1), cut(positions, -2), cut(torch.cat((unknown, answers), 1), 1), counts

    def score_split(self, model: Any, recipe: Recipe, view: View, limit: int) -> Scored:
        """Errors of standardised values; "naive": their ratio to the naive forecast's; and the number of "values"."""
        parts = []
        for rows in self.rounds(view.split, limit):
            guesses, answers = self.answers(model, recipe, view.split, rows)
            errors = np.stack((guesses - answers, self.naive(self.begins[view.split][rows]) - answers))
            parts.append(errors.reshape(2, -1).T)
        errors = np.concatenate(parts)
        errors = errors[~np.isnan(errors).any(1)]
        if not len(errors):
            return Scored(reason=f"split: expected values in {view.split}, got none")
        mae, naive = np.abs(errors).mean(0).tolist()
        figures = {"mae": mae, "mse": float(np.square(errors[:, 0]).mean()), "values": len(errors)}
        if naive > 1e-6:  # less is the rounding of float32: a forecast without errors has no ratio to it
            figures["naive"] = mae / naive
        return Scored(figures)

    def answers(self, model: Any, recipe: Recipe, split: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The forecasts of a model in evaluation mode and the true values, ``[n horizon c]``, of samples of a split."""
        from isopos.parallel import joined

        values, positions, answers = self.on_device(model, recipe, split, rows)
        local = self.part(model, (values, positions, answers))
        with evaluation(model):
            forecasts = joined(model(*local[:2]), model.group)[:, self.task.context :]
        return forecasts.cpu().double().numpy(), answers.cpu().double().numpy()

    def naive(self, begins: np.ndarray) -> np.ndarray:
        """The naive forecast: the values one season ago, or the fewest seasons that are known, at the nearest time.

        Returns:
            ``[n horizon c]``; NaN if no value is known.
        """
        times, season = self.series.seconds, self.task.season * HOUR
        wanted, last = times[begins[:, None] + np.arange(self.task.horizon)], times[begins - 1][:, None]
        past = wanted - season * np.ceil((wanted - last) / season) if season else np.broadcast_to(last, wanted.shape)
        forecast = np.empty((*wanted.shape, self.values.shape[1]))
        for channel, values in enumerate(self.values.T):
            known = np.flatnonzero(~np.isnan(values))
            most = np.searchsorted(known, begins)[:, None] - 1  # the last known value before the forecast
            after = np.searchsorted(times[known], past)
            pair = np.stack((after - 1, after)).clip(0, most.clip(0))
            nearest = np.abs(times[known][pair] - past).argmin(0)
            guesses = values[known][np.take_along_axis(pair, nearest[None], 0)[0]]
            forecast[..., channel] = np.where(most < 0, np.nan, guesses)
        return forecast

    def examples(self, model: Any, recipe: Recipe, count: int) -> list[dict[str, Any]]:
        rows = self.spread("validation", count)
        guesses, _ = self.answers(model, recipe, "validation", rows)
        begins = self.begins["validation"][rows]
        return [
            {"from": str(np.datetime64(round(float(self.series.seconds[begin])), "s"))}
            | {title: self._drawn(begin, guess[:, n], naive[:, n], n) for n, title in enumerate(self.series.titles[:2])}
            for begin, guess, naive in zip(begins.tolist(), guesses, self.naive(begins), strict=True)
        ]

    def _drawn(self, begin: int, guess: np.ndarray, naive: np.ndarray, channel: int) -> str:
        """A plot of a forecast, the true values and the naive forecast, as a data URL of a PNG."""
        from matplotlib.figure import Figure

        figure, file, horizon = Figure(figsize=(4.5, 1.8), dpi=100, layout="constrained"), io.BytesIO(), len(guess)
        axes, window = figure.subplots(), slice(begin - min(self.task.context, 2 * horizon), begin + horizon)
        hours = (self.series.seconds - self.series.seconds[begin]) / HOUR
        axes.plot(hours[window], self.values[window, channel], ".-", color="0.6", markersize=3, label="was")
        axes.plot(hours[begin : begin + horizon], naive, ":", color="C1", label="naive")
        axes.plot(hours[begin : begin + horizon], guess, color="C0", label="model")
        axes.legend(fontsize=6, frameon=False, loc="upper left")
        axes.tick_params(labelsize=6)
        figure.savefig(file, format="png", metadata={"Software": None})
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _varying(series: "Series", rows: int) -> "tuple[Series, list[str]]":
    """A series without the columns that are constant in the first rows, and the titles of these columns."""
    train = series.values[:rows]
    for title, known in zip(series.titles, (~np.isnan(train)).sum(0), strict=True):
        if known < 2:
            raise ValueError(f"data: expected values of {title} in the first {rows} rows, to train on, got {known}")
    varies = np.nanstd(train, axis=0) > CONSTANT * np.nanmax(np.abs(train), axis=0)
    titles = np.array(series.titles, object)
    if not varies.any():
        raise ValueError(
            f"data: expected values that vary in the first {rows} rows, to train on, got constant ones alone in "
            f"{series.name}: {', '.join(titles)[:200]}"
        )
    return replace(series, titles=tuple(titles[varies]), values=series.values[:, varies]), [*titles[~varies]]


def _kinds_of(scheme: Any) -> tuple[bool, str]:
    """Whether a scheme's positions are a clock's; and on a line the kind of numbers, "real" or "whole", else ""."""
    from isopos.biases import RelativeBias
    from isopos.embeddings import Embedding
    from isopos.positions import Line
    from isopos.schemes import REGISTRY, Scheme

    parts = [part for part in scheme.modules() if isinstance(part, Scheme | Embedding | RelativeBias)]
    if not all(isinstance(part.group, Line) for part in parts):
        return scheme.group == REGISTRY["clock"](6).group, ""
    return False, "real" if all(getattr(part.group, "real", False) for part in parts) else "whole"


def _positions(recipe: Recipe, kind: str, seconds: np.ndarray, local: np.ndarray, start: float, step: float) -> "Tensor":
    """Positions of rows at times ``[b t]`` for the scheme: ``[b t 3]`` of a clock, ``[b t 1]``, or ``[t 1]``.

    The rings of a clock are local time; its line is elapsed time.
    """
    import torch

    from isopos.lab.tasks.build import scheme_of
    from isopos.positions import sequence, timestamps

    on_clock, on_line = _kinds_of(scheme_of(recipe))
    if on_clock:
        passed = torch.from_numpy((seconds - start) / HOUR)
        return torch.cat((timestamps(torch.from_numpy(local))[..., :2], passed[..., None]), -1)
    if on_line == "whole" or kind == "index":
        return sequence(seconds.shape[1])
    return torch.from_numpy((seconds - seconds[:, :1]) / step)[..., None]
