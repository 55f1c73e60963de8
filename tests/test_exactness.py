from pathlib import Path

import pytest
import torch
from rich.console import Console

import isopos
from benchmarks.peers import ROTARY
from isopos.catalog import CATALOG
from isopos.lab.bench import accuracy, exactness
from isopos.lab.commands import bench
from isopos.scheme import Scheme

COMMITTED = Path(isopos.__file__).parent.parent / "docs" / "exactness.md"
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}  # four to ten times what was measured
SMALL = ("sinusoidal", "rope", "xpos", "permuteformer", "t5", "shaw", "ape-tree", "horn-clipped", "spe-sine")
EAGER = [setting for setting in exactness.SETTINGS if setting != "graph"]


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "LENGTH", 67)  # a chunk and three tokens
        return exactness.measure(SMALL, EAGER)


def bound(key):
    return 1e-6 if key[0] == "float64" and key[3] == "2^31" else BOUNDS[key[0]]  # an angle there is rounded by 2e-7


def test_errors_are_roundings(found):
    figures = {key: error for key, error in found.items() if isinstance(error, float)}
    assert {key: error for key, error in figures.items() if not error < bound(key)} == {}
    assert {(dtype, setting) for dtype, _, _, setting in figures} == {(d, s) for d in exactness.DTYPES for s in EAGER}


def test_no_more_is_refused_than_known(found):
    refused = {key[1:] for key, error in found.items() if isinstance(error, str)}
    softmax_only = {(name, "linear", setting) for name in ("t5", "shaw") for setting in EAGER}
    far = {(name, attention, "2^31") for name in ("xpos", "ape-tree") for attention in exactness.ATTENTIONS}
    assert refused == softmax_only | far


def test_compiled_too():
    for error in exactness.measure(["retnet"], ["graph"], ["float32"]).values():
        assert error < BOUNDS["float32"]


def test_what_is_not_relative_is_compared_with_itself_far_out():
    for error in exactness.measure(["fire", "kerple"], ["2^31"], ["float64"]).values():
        assert isinstance(error, str) or error < 1e-6


def test_a_wrong_answer_shows(monkeypatch):
    attend = exactness.ATTENTIONS["linear"]
    monkeypatch.setitem(exactness.ATTENTIONS, "linear", lambda *a, segment_ids=None, mask=None, **at: attend(*a, **at))
    found = exactness.measure(["rope"], ["whole", "packed", "right"], ["float64"])
    errors = {setting: error for (_, _, attention, setting), error in found.items() if attention == "linear"}
    assert errors["whole"] < 1e-12
    assert min(errors["packed"], errors["right"]) > 1e-2


def test_tables_have_every_scheme_setting_and_dtype(found):
    notes = []
    by_setting, by_scheme, *by_dtype = exactness.error_tables(found, notes)
    assert [row[0].split(":")[0] for row in by_setting.rows] == EAGER
    assert [row[0] for row in by_scheme.rows] == list(SMALL)
    assert len(by_setting.head) == len(by_scheme.head) == 1 + 2 * len(exactness.DTYPES)
    assert [table.title.split(":")[0] for table in by_dtype] == list(exactness.DTYPES)
    for table in by_dtype:
        assert table.head == ("scheme", *EAGER)
        assert [row[0].split()[0] for row in table.rows] == [*SMALL, "worst"]
        cells = {row[0].split()[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
        assert (
            cells["t5"]["scheme"] == cells["shaw"]["scheme"].replace("shaw", "t5") == f"t5 [{_mark(notes, 'linear: att')}]"
        )
        assert cells["xpos"]["2^31"] == f"- [{_mark(notes, 'positions: expected magnitudes')}]"
        assert not any("[" in cell for cell in cells["rope"].values())


def _mark(notes, start):
    return 1 + next(n for n, note in enumerate(notes) if note.startswith(start))


def test_a_cell_is_the_worst_of_its_figures():
    found = {("float32", "rope", attention, "whole"): error for attention, error in (("linear", 2e-7), ("softmax", 0.0))}
    by_setting, by_scheme, both = exactness.error_tables(found, [])
    assert by_setting.rows[0][1:] == by_scheme.rows[0][1:] == ("2e-07", "0")
    assert both.rows == [("rope", "2e-07"), ("worst", "2e-07")]
    found["float32", "rope", "softmax", "whole"] = float("nan")
    assert next(exactness.error_tables(found, [])).rows[0][1:] == ("2e-07", "nan")


def test_the_console_fits_120_columns(found, monkeypatch):
    monkeypatch.setattr(exactness, "measure", lambda settings: {k: found[k] for k in found if k[3] in settings})
    monkeypatch.setattr(accuracy, "LIBRARIES", {"isopos": accuracy.OURS, "none": accuracy.OURS._replace(module="no_such")})
    monkeypatch.setattr(accuracy, "FAR", accuracy.FAR[:1])
    console = Console(record=True, width=120)
    assert bench.run(bench.Options("exactness"), console) == 0
    text = console.export_text()
    assert "…" not in text
    assert all(title in text for title in (*exactness.DTYPES, *SMALL, *(exactness.SETTINGS[s].what for s in EAGER)))
    assert "[1] " in text
    assert text.count(" isopos ") == 2
    assert "Not installed: none." in text


def test_isopos_is_exact_where_it_is_compared_with_others():
    for setting, error in accuracy.errors(settings=accuracy.FAR).items():
        assert error < (1e-6 if setting.dtype == torch.float32 else 2.1e-3)
    assert max(accuracy.errors(settings=accuracy.FAR[:3], of=accuracy.scores).values()) < 1e-6


FAR_OUT = "10^4", "10^6", "2^31"


def test_a_library_is_measured_as_far_as_it_reaches():
    first = accuracy.SETTINGS[:1]
    assert [setting.start for setting in accuracy.errors(accuracy.OURS._replace(longest=accuracy.LENGTH), first)] == [0]
    assert accuracy.errors(accuracy.OURS._replace(longest=accuracy.LENGTH - 1), first) == {}
    places = [f"at {place}, {kind}" for kind in ("float32", "bfloat16", "bfloat16 module") for place in FAR_OUT]
    assert list(map(str, accuracy.FAR)) == places
    assert list(map(str, accuracy.SETTINGS)) == [
        f"{place}, {kind}" for kind in ("float32", "float64") for place in ("L = 8192", "at 10^6")
    ]


@pytest.mark.skipif(not COMMITTED.exists(), reason="docs/ is part of the repository, not of the package")
def test_the_committed_page_has_everything():
    text = COMMITTED.read_text(encoding="utf-8")
    parts = {part.splitlines()[0]: part for part in text.split("### ")[1:]}
    rows = {
        title: [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
        for title, part in parts.items()
    }
    by_setting, by_scheme, *rest = rows.values()
    by_dtype, beside = rest[: len(exactness.DTYPES)], rest[len(exactness.DTYPES) :]
    assert [row[0].split(":")[0] for row in by_setting[2:]] == list(exactness.SETTINGS)
    assert [row[0] for row in by_scheme[2:]] == list(CATALOG)
    assert [title.split(":")[0] for title in list(rows)[2 : 2 + len(by_dtype)]] == list(exactness.DTYPES)
    for table in by_dtype:
        assert table[0] == ["scheme", *exactness.SETTINGS]
        assert [row[0].split()[0] for row in table[2:]] == [*CATALOG, "worst"]
    assert len(beside) == 2
    for table in beside:
        assert table[0] == ["library", *map(str, accuracy.FAR)]
        assert [row[0] for row in table[2:]] == ["isopos", *ROTARY]


def test_a_setting_is_what_its_name_says(monkeypatch):
    """Check the arguments of attention: packed segments, masks, padding positions, different heads, a far origin."""
    monkeypatch.setattr(exactness, "LENGTH", 67)
    seen, attend = [], exactness.ATTENTIONS["linear"]
    at = Scheme.at

    def watched(q, k, v, **options):
        seen.append((q, k, options))
        return attend(q, k, v, **options)

    places = []
    monkeypatch.setitem(exactness.ATTENTIONS, "linear", watched)
    monkeypatch.setattr(Scheme, "at", lambda self, x, *more, **options: places.append(x) or at(self, x, *more, **options))
    trial = exactness.Trial(isopos.rope(16, 2), torch.float64)

    def run(name):
        seen.clear()
        places.clear()
        exactness.SETTINGS[name].run(trial)
        return seen[0]

    assert run("whole")[2]["causal"]
    assert not run("all keys")[2]["causal"]
    ids = run("packed")[2]["segment_ids"]
    assert len(ids.unique()) == 10
    assert places[0][:, 0].tolist() == [n for length in ids.unique_consecutive(return_counts=True)[1] for n in range(length)]
    mask = run("left")[2]["mask"]
    assert mask.sum(-1).tolist() == [67 - n for n in exactness.PADDING]
    for row, n in zip(places[0][..., 0], exactness.PADDING, strict=True):
        assert row.tolist() == [*range(-n, 67 - n)]
    assert mask[:, 0].tolist() == [False, False]
    _, _, options = run("right")
    assert not options["causal"]
    assert options["mask"][:, 0].tolist() == [True, True]
    q, k, _ = run("heads")
    assert (q.shape[1], k.shape[1]) == (4, 2)
    assert not q[:, 0].equal(q[:, 1])
    assert run("cross")[0].shape[-2] == 41
    run("2^31")
    assert {int(x.min()) for x in places} == {2**31, *range(2**31 + 34, 2**31 + 67)}
    assert [q.shape[-2] for q, _, _ in seen] == [34, *33 * [1]]
    run("tokens")
    assert [q.shape[-2] for q, _, _ in seen] == 67 * [1]
    run("chunks")
    assert len(seen) == 10
    assert sum(q.shape[-2] for q, _, _ in seen) == 67
