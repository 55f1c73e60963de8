"""Test time series: valid and invalid tables, times as positions, and forecasts without access to the future."""

import gzip
import json
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

import isopos
from isopos.lab.data.series import Series, example_series, read_series
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.series import Forecast, ForecastSamples
from isopos.lab.tasks.task import View
from isopos.positions import timestamps

SMALL = {"context": 8, "horizon": 3, "batch": 4, "layers": 1, "model_dim": 24, "heads": 2}
MONDAY = 1704067200  # 1 January 2024, in seconds


def ready(scheme="clock", series=None, **edits):
    recipe = Recipe(task=Forecast()).edit(scheme=scheme, **SMALL | edits)
    assert isinstance(recipe.task, Forecast)
    data = ForecastSamples(recipe.task, example_series(count=200) if series is None else series)
    return data.infer(recipe), data


def written(tmp_path, text, name="power.csv"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (("2024-01-01", "2024-01-01T06:30", "2024-01-02 00:00:30"), "seconds"),
        (("2024-01-01T00:00Z", "2024-01-01T07:30+01:00", "2024-01-02T00:00:30+00:00"), "seconds"),
        (("1704067200", "1704090600.0", "1704153630"), "seconds"),
        (("19723", f"{19723 + 6.5 / 24!r}", f"{19724 + 30 / 86400!r}"), "days"),
    ],
)
@pytest.mark.parametrize("name", ["power.csv", "power.tsv", "power.csv.gz"])
def test_times_are_what_they_are(tmp_path, times, unit, name):
    rows = zip(("load", "1.5", "", "-2e1"), ("at", *times), ("note", "3", "NA", "null"), strict=True)
    text = "\n".join(("\t" if "tsv" in name else ",").join(row) for row in rows)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    found = read_series(str(path), "at", unit=unit)
    assert found.titles == ("load", "note")
    assert found.empty == 1
    np.testing.assert_allclose(found.seconds - MONDAY, [0, 86430], atol=1e-3)
    np.testing.assert_array_equal(found.values, [[1.5, 3], [-20, np.nan]])
    assert read_series(str(path), "at", ("note",), unit).values.tolist() == [[3]]


def test_columns_without_names_go_by_numbers(tmp_path):
    path = written(tmp_path, "7,2024-01-01,5\n8,2024-01-02,6\n")
    assert read_series(path, "2").titles == ("1", "3")
    assert read_series(path, "2", ("3",)).values.tolist() == [[5], [6]]


def test_time_goes_on_evenly_where_clocks_are_put_back(tmp_path):
    """Three hours of a night; the clock shows the same time of day in the second and the third."""
    night = "2024-10-27T01:30+02:00,1\n2024-10-27T02:30+02:00,2\n2024-10-27T02:30+01:00,3\n"
    found = read_series(written(tmp_path, night))
    assert np.diff(found.seconds).tolist() == [3600, 3600]
    assert np.diff(found.clock_seconds).tolist() == [3600, 0]
    assert found.sha256 != replace(found, offsets=None).sha256
    assert (
        read_series(written(tmp_path, night.replace("+01:00", "+02:00").replace("02:30+02:00,3", "03:30+02:00,3"))).offsets
        is None
    )


def test_a_clock_s_rings_follow_clocks_and_its_line_time():
    first = example_series(count=200)
    offsets = np.where(np.arange(200) < 50, 0.0, -3600.0)
    recipe, data = ready(series=replace(first, offsets=offsets))
    _, plain = ready(series=first)
    rows = np.array([0, 60])
    (_, moved, _), (_, positions, _) = (one.tensors("train", rows, recipe) for one in (data, plain))
    torch.testing.assert_close(moved[..., 2], positions[..., 2], rtol=0, atol=1e-9)
    back = (positions - moved)[..., :2] % torch.tensor([24.0, 7.0])
    torch.testing.assert_close(back[0], torch.zeros(11, 2, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(back[1], torch.tensor([1, 1 / 24], dtype=torch.float64).expand(11, 2), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "times",
    [
        ("20240101", "20240101", "20240102"),
        ("202401010000", "202401010630", "20240102"),
        ("20240101000000", "2024-01-01T06:30", "20240102000030"),
    ],
)
def test_digits_alone_that_are_a_date_are_read_as_one(tmp_path, times):
    text = "\n".join(f"{time},{n}" for n, time in enumerate(dict.fromkeys(times)))
    assert datetime.fromtimestamp(read_series(written(tmp_path, text)).seconds[0], UTC) == datetime(2024, 1, 1, tzinfo=UTC)
    assert 86400 <= np.ptp(read_series(written(tmp_path, f"at,b\n{text}")).seconds) <= 86430


def test_digits_that_are_no_date_or_have_a_unit_are_numbers(tmp_path):
    for time, unit in (("20241301", "seconds"), ("1704067200", "seconds"), ("20240101", "minutes"), ("2020.0", "seconds")):
        found = read_series(written(tmp_path, f"{time},1\n{float(time) + 1},2\n"), unit=unit)
        assert found.seconds[0] == float(time) * {"minutes": 60}.get(unit, 1)
    assert read_series(written(tmp_path, "1999,1\n2000,2\n"), unit="hours").seconds.tolist() == [1999 * 3600, 2000 * 3600]
    assert read_series(written(tmp_path, "998,1\n2020,2\n")).seconds.tolist() == [998, 2020]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("2024-01-01,1\nyesterday,2", "line 3, column 1: a: expected an ISO time, as the first, got 'yesterday'"),
        ("nan,1", "line 2, column 1: a: expected an ISO time or a number, got 'nan'"),
        ("2024-01-01,1\n1704067200,2", "line 3, column 1: a: expected an ISO time, as the first, got '1704"),
        ("1,1\n2024-01-01,2", "line 3, column 1: a: expected a number, as the first, got '2024-01-01'"),
        (
            "2024-01-02,1\n\n2024-01-02,2",
            "line 4, column 1: a: expected a time after the one above, of rows in order of time, got '2024",
        ),
        ("2024-01-01,1\n2024-01-02T00:00Z,2", "line 3, column 1: a: expected an offset from UTC for all times"),
        ("2024-01-01,1\n2024-01-02,x", "line 3, column 2: b: expected a number or nothing, got 'x'; --values"),
        (
            "0001-01-01T00:00+02:00,1\n9999-12-31T23:00-05:00,2",
            "line 3, column 1: a: expected a time in the years 1 to 9999",
        ),
        (
            "1704067200000,1",
            "line 2, column 1: a: expected a time in the years 1 to 9999, in seconds since 1970 where "
            "it is a number; divide milliseconds by 1000",
        ),
        ("1e308,1", "line 2, column 1: a: expected a time in the years 1 to 9999"),
        ("2024-01-01,1\n2024-01-02,1e45", "line 3, column 2: b: expected a number of at most 1e+30, got '1e45'"),
        ("2024-01-01,1_000", "line 2, column 2: b: expected a number or nothing, got '1_000'; --values"),
        ("1_000,1", "line 2, column 1: a: expected an ISO time or a number, got '1_000'"),
        (
            "2020,1\n2021,2",
            "line 2, column 1: a: expected a time or a number, but this may be either; write 2020-01-01T00:00:00, or 2020.0 "
            "for a number, got '2020'",
        ),
        ("1700,1\n1701,2", "line 2, column 1: a: expected a time or a number, but this may be either; write 1700-01-01T"),
        ("202402,1\n202403,2", "line 2, column 1: a: expected a time or a number, but this may be either; write 2024-02-01"),
        (
            "2024013118,1",
            "line 2, column 1: a: expected a time or a number, but this may be either; write 2024-01-31T18:00:00",
        ),
        ("0,1\n2024-01-31,2", "line 3, column 1: a: expected a number, as the first, got '2024-01-31'"),
        ("20240131,1\n20240199,2", "line 3, column 1: a: expected an ISO time, as the first, got '20240199'"),
        ("2024-01-01,inf", "line 2, column 2: b: expected a number or nothing, got 'inf'"),
        ("2024-01-01,1,2", "line 2: expected 2 columns, as the first line has, got 3"),
        ('2024-01-01,"1', "line 2: expected CSV, got unexpected end of data"),
    ],
)
def test_broken_rows_are_named(tmp_path, rows, message):
    with pytest.raises(ValueError, match=r"^data: .*power.csv, line") as error:
        read_series(written(tmp_path, f"a,b\n{rows}"))
    assert f"power.csv, {message}" in str(error.value)


def test_a_value_too_large_to_learn_with_is_named(tmp_path):
    rows = "".join(f"{n},{n % 7}\n" for n in range(299))
    with pytest.raises(
        ValueError, match=r"data: .* b within 1e\+15 standard deviations .*, got 1e\+25 in row 300 of .*power.csv"
    ):
        Forecast(data=written(tmp_path, f"a,b\n{rows}299,1e25\n"), context=16, horizon=4).load(Recipe())


def test_what_is_no_series_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^data: expected a table that ends with .csv or .tsv, got hf:any"):
        read_series("hf:any")
    with pytest.raises(ValueError, match=r"^data: expected rows with a time and a value, got none in .*power.csv$"):
        read_series(written(tmp_path, "a,b\n2024-01-01,\n"))
    with pytest.raises(ValueError, match=r"^values: expected columns besides the times, a, got a, b$"):
        read_series(written(tmp_path, "a,b\n2024-01-01,1\n"), values=("a",))
    with pytest.raises(ValueError, match=r"^values: expected columns besides .*; separate columns by commas and decimals"):
        read_series(written(tmp_path, "a;b\n2024-01-01;1,5\n"))
    with pytest.raises(ValueError, match=r"^unit: "):
        read_series(written(tmp_path, "1,2\n"), unit="years")
    for rows, values, message in (
        ("a,b,b\n2024-01-01,1,2\n", (), "^values: expected different columns, got b twice; rename or leave out one"),
        ("a,b\n2024-01-01,1\n", ("b", "b"), "^values: expected different columns, got b twice"),
        ("a,b,b\n2024-01-01,1,2\n", ("b",), "^data: .*power.csv, line 1: expected one column b, got 2; rename all but one"),
    ):
        with pytest.raises(ValueError, match=message):
            read_series(written(tmp_path, rows), values=values)
    for time, values in (("c", ()), ("a", ("c",))):
        with pytest.raises(ValueError, match=r"^data: .*power.csv, line 1: expected a column c, got a, b"):
            read_series(written(tmp_path, "a,b\n2024-01-01,1\n"), time, values)
    written(tmp_path, "1\t2\n", "more.tsv")
    with pytest.raises(ValueError, match=r"^data: expected one table, got more in"):
        read_series(str(tmp_path))
    for name, value, message in (
        ("context", 190, "^data: expected more than 241 rows, .* got 200 in"),
        ("channels", 3, "^channels: expected 0, or the 2 of the data, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            ready(**{"scheme": "clock", name: value})
    rows = np.full((200, 2), np.nan)
    rows[:, 0], rows[190:, 1] = 1, 1
    with pytest.raises(ValueError, match=r"^data: expected values of b in the first 160 rows, to train on, got 0$"):
        ready(series=Series("late", ("a", "b"), np.arange(200.0), rows))


@pytest.mark.parametrize("value", [0.1, 1e9, 0.0])
def test_a_constant_column_stays_out_of_the_figures(value):
    """The standard deviation of 0.1, repeated, is 1.4e-17, not 0."""
    first = example_series(count=200)
    values = np.concatenate((first.values, np.full((200, 1), value)), 1)
    values[170:, 2] += 1e-3  # where nothing is trained
    recipe, data = ready(series=replace(first, titles=(*first.titles, "valve"), values=values))
    _, without = ready(series=first)
    assert data.series.titles == first.titles
    assert data.summary == without.summary + ", left out as constant: valve"
    assert data.sha256 != without.sha256
    assert recipe.task.channels == 2
    np.testing.assert_array_equal(data.values, without.values)
    with pytest.raises(ValueError, match=r"^data: expected values that vary in the first 160 rows, .*: valve$"):
        ready(series=replace(first, titles=("valve",), values=values[:, 2:]))


def test_schemes_see_times_and_whole_ones_numbers_of_rows():
    _, data = ready()
    rows = np.array([0, 5])
    seconds = data.series.seconds[data.begins["train"][rows][:, None] + np.arange(-8, 3)]
    for scheme, edits, wanted in (
        ("clock", {}, timestamps(torch.from_numpy(seconds), start=datetime(2024, 1, 1, 1))),
        ("rope", {}, torch.from_numpy((seconds - seconds[:, :1]) / data.step)[..., None]),
        ("rope", {"positions": "index"}, isopos.sequence(11)),
        ("learned", {}, isopos.sequence(11)),
        ("t5:attention=softmax", {}, isopos.sequence(11)),
    ):
        recipe, own = ready(scheme, **edits)
        _, positions, _ = own.tensors("train", rows, recipe)
        away = positions - wanted
        away[..., 2:] -= away[..., :1, 2:].clone()  # where absolute time begins is of no consequence
        torch.testing.assert_close(away, torch.zeros_like(away), atol=1e-9, rtol=0)
        notes = recipe.task.check(recipe)
        assert bool(notes) == (wanted.ndim == 2 and not edits), scheme


@pytest.mark.parametrize(
    ("scheme", "edits", "message"),
    [
        ("ape-tree", {}, "^schemes: expected positions on a line or a clock, .* but ape-tree takes positions of a tree"),
        ("mrope", {}, "^schemes: expected positions on a line or a clock, .* grid of 3 axes"),
        ("learned:length=10", {}, "^context: expected at most 10 rows with the horizon, .* learned:length=10 .* got 11"),
        ("rope", {"season": -1.0}, "^season: expected hours from 0 on, got -1.0"),
    ],
)
def test_what_does_not_fit_is_refused_before_data_is_read(scheme, edits, message):
    recipe = Recipe(task=Forecast(data="nowhere")).edit(scheme=scheme, **SMALL | edits)
    with pytest.raises(ValueError, match=message):
        recipe.task.check(recipe)


def test_nothing_of_the_future_is_seen():
    """Other values from a time on change no input, no scale and no naive forecast before it, only answers."""
    recipe, data = ready()
    first = example_series(count=200)
    begin = int(data.begins["validation"][2])
    values = first.values.copy()
    values[begin:] = 1e6
    _, other = ready(series=Series("other", first.titles, first.seconds, values))
    for split, rows in (("train", np.arange(20)), ("validation", np.arange(3))):
        (seen, at, answers), (same, there, others) = (one.tensors(split, rows, recipe) for one in (data, other))
        assert torch.equal(at, there)
        torch.testing.assert_close(seen, same, rtol=0, atol=0, equal_nan=True)
        assert seen[:, -3:].isnan().all()
        assert torch.equal(answers.nan_to_num(), others.nan_to_num()) == (split == "train")
    begins = data.begins["validation"][:3]
    np.testing.assert_array_equal(data.naive(begins), other.naive(begins))


def test_parts_are_in_order_and_each_forecast_once():
    _, data = ready()
    count, ends = len(data.series.seconds), [int(0.8 * len(data.series.seconds)), int(0.9 * len(data.series.seconds))]
    assert data.begins["train"].tolist() == [*range(8, ends[0] - 2)]
    assert data.begins["validation"].tolist() == [*range(ends[0], ends[1] - 2, 3)]
    assert data.begins["test"].tolist() == [*range(ends[1], count - 2, 3)]
    own = data.values[: ends[0]]
    np.testing.assert_allclose([np.nanmean(own, 0), np.nanstd(own, 0)], [[0, 0], [1, 1]], atol=1e-12)


def test_the_naive_forecast_is_what_was_a_season_ago():
    series = example_series(count=200)
    for season in (0.0, 5.0, 24.0):
        _, data = ready(season=season)
        begins = data.begins["train"][::7]
        for begin, row in zip(begins, data.naive(begins), strict=True):
            for n in range(3):
                for channel in range(2):
                    known = [i for i in range(begin) if not np.isnan(series.values[i, channel])]
                    wanted = series.seconds[begin + n]
                    while season and wanted > series.seconds[begin - 1]:
                        wanted -= season * 3600
                    wanted = wanted if season else series.seconds[begin - 1]
                    nearest = min(known, key=lambda i, wanted=wanted: abs(series.seconds[i] - wanted), default=None)
                    assert np.array_equal(
                        row[n, channel], np.nan if nearest is None else data.values[nearest, channel], True
                    )


def test_ranks_share_the_loss():
    recipe, data = ready()
    model = recipe.task.model(recipe).double()
    for step in (0, 3):
        whole = data.batch(recipe, step)
        parts = [data.loss(model, *(x.double() for x in data.batch(recipe, step, rank, 2))) for rank in range(2)]
        torch.testing.assert_close(data.loss(model, *(x.double() for x in whole)), sum(parts) / 2)


def test_scores_are_errors_of_what_is_known():
    recipe, data = ready("rope", validation_rows=4)
    model = recipe.task.model(recipe)
    scored = data.measure(model, recipe, View())
    guesses, answers = data.answers(model, recipe, "validation", data.spread("validation", 4))
    errors = guesses - answers
    assert scored.figures["mae"] == pytest.approx(np.nanmean(np.abs(errors)))
    assert scored.figures["mse"] == pytest.approx(np.nanmean(errors**2))
    assert scored.figures["values"] == (~np.isnan(errors)).sum()
    naive = data.naive(data.begins["validation"][data.spread("validation", 4)]) - answers
    assert scored.figures["naive"] == pytest.approx(np.nanmean(np.abs(errors)) / np.nanmean(np.abs(naive)))
    assert data.measure(model, recipe, View("test")).figures["values"] > scored.figures["values"]


def test_a_forecast_without_errors_has_no_ratio_to_it(monkeypatch):
    recipe, data = ready("rope", validation_rows=4)
    answers = data.answers(recipe.task.model(recipe), recipe, "validation", data.spread("validation", 4))[1]
    monkeypatch.setattr(type(data), "naive", lambda self, begins: answers + 1e-9)
    figures = data.measure(recipe.task.model(recipe), recipe, View()).figures
    assert "naive" not in figures
    assert figures["mae"] > 0


def test_unknown_values_are_not_seen():
    torch.manual_seed(0)
    model = isopos.models.Forecaster(2, 16, 2, isopos.rope(8, 2))
    rows = torch.randn(1, 6, 2)
    rows[:, 4] = torch.nan
    found = model(rows)
    assert found.isfinite().all()
    rows[:, 4] = 0.0
    assert not torch.allclose(model(rows), found)  # zero is a value


def test_a_series_of_the_user_is_compared(isopos, tmp_path):
    rows = (f"{3 * n + n % 3},{np.sin(n / 4):.3f},{'' if n % 9 == 5 else n % 5}" for n in range(120))
    path = written(tmp_path, "hour,load,other\n" + "\n".join(rows))
    sizes = ["--layers=1", "--model-dim=24", "--heads=2", "--steps=2", "--batch=4", "--context=12", "--horizon=4"]
    task = ["--task", "series", "--data", path, "--time-unit", "hours", "--schemes", "clock", "--device=cpu"]
    status, out, _ = isopos("compare", *task, *sizes, "--name", "own")
    said = "96 + 12 + 12 rows of load, other, a step of 4 hours, 0 gaps of more than 3, 13 values missing"
    assert status == 0
    assert said in " ".join(out.split())
    (example, *_) = json.loads((tmp_path / "runs" / "own" / "clock-seed0" / "examples.json").read_text())
    assert [*example] == ["from", "load", "other"]
    assert example["from"].startswith("1970-01-13")
    assert example["load"] in (tmp_path / "runs" / "own" / "report.html").read_text()


def test_a_run_is_not_scored_on_a_series_with_other_columns(isopos, tmp_path):
    rows = [f"2024-01-{1 + n // 24:02}T{n % 24:02}:00,{n % 24},{n % 7}" for n in range(400)]
    file = tmp_path / "load.csv"
    file.write_text("\n".join(["time,a,b", *rows]))
    sizes = (
        "--context=8",
        "--horizon=2",
        "--layers=1",
        "--model-dim=16",
        "--heads=2",
        "--batch=4",
        "--steps=2",
        "--device=cpu",
    )
    assert isopos("compare", "--task=series", f"--data={file}", "--schemes=rope", "--name=one", *sizes)[0] == 0
    file.write_text("\n".join(["time,a,b", *(row.rpartition(",")[0] + ",0.1" for row in rows)]))
    (run,) = (path.parent for path in (tmp_path / "runs" / "one").glob("*/recipe.json"))
    code, _, err = isopos("eval", str(run), "--other-data")
    assert (code, err.count("\n")) == (2, 1)
    assert "channels: expected 0, or the 1 of the data, got 2" in err
