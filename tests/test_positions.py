"""Test groups of positions and their tensors."""

import itertools
import math
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from cases import each

import isopos
from isopos import positions
from isopos.positions import Line, Product, Ring, Tree, depths, grid, packed, product, sequence, timestamps
from isopos.schemes import REGISTRY
from isopos.state import State

GROUPS = [
    Line(),
    Line(real=True),
    Ring(1),
    Ring(7),
    Ring(7, real=True),
    Product((Line(), Ring(4))),
    Product((Line(), Product((Ring(3), Line())))),
]


def equal(x, y):
    return x.shape == y.shape and bool((x == y).all())


@each("group", GROUPS, ids=str)
def test_group_axioms(group):
    x, y, z = (group.random(3, 5) for _ in range(3))
    origin = group.origin(3, 5)
    assert x.shape == origin.shape == (3, 5, group.columns)
    assert equal(group.compose(group.compose(x, y), z), group.compose(x, group.compose(y, z)))
    assert equal(group.compose(x, origin), x)
    assert equal(group.compose(origin, x), x)
    assert equal(group.compose(x, group.inverse(x)), origin)
    assert equal(group.compose(x, group.compose(group.inverse(x), y)), y)
    group.check(x)


@each("group", GROUPS, ids=str)
def test_distance_is_an_invariant_metric(group):
    x, y, z = (group.random(2, n) for n in (20, 30, 40))
    distance = group.distance(x, y)
    assert distance.shape == (2, 20, 30)
    assert distance.dtype == torch.int64
    assert (distance >= 0).all()
    assert equal(distance == 0, (x[:, :, None] == y[:, None]).all(-1))
    assert equal(distance, group.distance(y, x).mT)
    assert (group.distance(x, z)[:, :, None] <= distance[..., None] + group.distance(y, z)[:, None]).all()
    shift = group.random(1)
    assert equal(distance, group.distance(group.compose(shift, x), group.compose(shift, y)))
    assert equal(distance, group.distance(group.shift(z, x), group.shift(z, y)))
    assert equal(distance, torch.stack([group.distance(x[0], y), group.distance(x[1], y)])[[0, 1], [0, 1]])


def test_distances_count_steps():
    assert Line().distance(torch.tensor([[3], [0]]), torch.tensor([[-4]])).tolist() == [[7], [4]]
    assert Line().distance(torch.tensor([[2**31 - 1]]).int(), torch.tensor([[-1]]).int()).tolist() == [[2**31]]
    assert Line(real=True).distance(torch.tensor([[0.5]]), torch.tensor([[2.0], [0.0]])).tolist() == [[1.5, 0.5]]
    assert Ring(12).distance(torch.tensor([[11]]), torch.tensor([[2], [10]])).tolist() == [[3, 1]]
    assert Ring(12).inverse(torch.tensor([[0], [5]])).tolist() == [[0], [7]]
    group = Product((Line(), Ring(12)))
    assert group.distance(torch.tensor([[3, 11]]), torch.tensor([[-4, 2]])).tolist() == [[10]]


def test_random_covers_a_ring_and_obeys_its_generator():
    assert set(Ring(5).random(200).flatten().tolist()) == set(range(5))
    draw = [Line().random(9, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert equal(*draw)


def test_groups_are_values():
    assert Product((Line(), Ring(4))) == Product((Line(), Ring(4)))
    assert hash(Ring(4)) == hash(Ring(4))
    assert Line() != Line(real=True)


def test_groups_name_themselves():
    line = Line()
    assert [group.noun for group in (line, Ring(7), Tree(2))] == ["line", "ring of 7", "tree of 2 branches"]
    assert Product((line,) * 3).noun == "grid of 3 axes"
    assert Product((Tree(2), line, line)).noun == "tree of 2 branches by 2 lines"
    assert Product((line, Ring(5))).noun == "line by ring of 5"
    assert Product((Tree(2), Product((Ring(3), line)))).leaves == (Tree(2), Ring(3), line)
    assert [group.is_grid for group in (line, Product((line, line)), Product((line, Ring(2))), Tree(1))] == [1, 1, 0, 0]


@each("group", [*GROUPS, Tree(1), Tree(3), Product((Line(), Tree(2)))], ids=str)
@each("t", [0, 1, 10])
def test_positions_are_arranged_in_an_order_that_streams(group, t):
    x = group.arrange(t)
    assert x.shape == (t, group.columns)
    assert x.dtype == torch.int64
    group.check(x)
    for n in range(t):
        group.check(x[:n])  # no node comes before its parent


def test_orders_of_tokens():
    assert Line().arrange(3).tolist() == [[0], [1], [2]]
    assert Ring(2).arrange(3).tolist() == [[0], [1], [0]]
    assert Product((Line(), Line())).arrange(5).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert Tree(2).arrange(4).tolist() == [[-1, -1], [0, 0], [0, 1], [1, 0]]
    assert depths(Tree(3).arrange(13)).tolist() == [0, *[1] * 3, *[2] * 9]
    assert Product((Tree(2), Line())).arrange(3).tolist() == [[-1, -1, 0], [0, 0, 1], [0, 1, 2]]
    many = Product((Line(),) * 64).arrange(6)  # of 2^64
    assert many[:, :61].eq(0).all()
    assert (many[:, 61:] @ torch.tensor([4, 2, 1])).tolist() == list(range(6))


def test_builders():
    assert positions.sequence(3).tolist() == [[0], [1], [2]]
    assert positions.ring(2).tolist() == [[0], [1]]
    assert positions.sequence(0).shape == (0, 1)
    assert positions.grid(2, 3, 4).tolist() == [list(x) for x in itertools.product(range(2), range(3), range(4))]
    parts = positions.grid(2, 2), positions.sequence(3) + 5
    expected = [[*a, *b] for a, b in itertools.product(parts[0].tolist(), parts[1].tolist())]
    assert positions.product(*parts).tolist() == expected
    assert positions.grid(2, 2).dtype == torch.int64


@each(
    ("call", "message"),
    [
        (lambda: positions.sequence(-1), "t: expected an integer of at least 0"),
        (lambda: positions.sequence(2.0), "t: expected an integer"),
        (lambda: positions.sequence(True), "t: expected an integer"),
        (lambda: positions.ring(0), "period: expected an integer of at least 1"),
        (lambda: positions.grid(), "at least one axis"),
        (lambda: positions.grid(2, -1), "size: expected"),
        (lambda: positions.product(torch.zeros(2)), r"expected parts \[t c\]"),
        (lambda: Ring(0), "period: expected an integer of at least 1"),
        (lambda: Line().check(torch.zeros(3, 2, dtype=torch.int64)), r"expected \[\*b t 1\]"),
        (lambda: Line().check(torch.arange(3)), r"expected \[\*b t 1\]"),
        (lambda: Line().check(torch.zeros(3, 1)), "expected integers"),
        (lambda: Line().check(torch.zeros(3, 1, dtype=torch.bool)), "expected integers"),
        (lambda: Line(real=True).check(torch.zeros(3, 1, dtype=torch.float16)), "float32 or float64, got torch.float16"),
        (lambda: Ring(3).check(torch.zeros(3, 1)), "expected integers"),
        (lambda: Product((Line(), Line())).check(torch.zeros(3, 1, dtype=torch.int64)), r"expected \[\*b t 2\]"),
        (lambda: Product((Line(True), Line())).check(torch.zeros(3, 2)), "expected integers"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_real_lines_take_floats():
    Line(real=True).check(torch.zeros(3, 1))
    Line(real=True).check(torch.zeros(2, 3, 1, dtype=torch.float64))
    Line().check(torch.zeros(3, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="integers"):  # whose differences would wrap
        Line().check(torch.zeros(3, 1, dtype=torch.uint8))


def test_elements_of_a_ring_need_not_lie_within_its_period():
    ring, x, y = Ring(12), torch.tensor([[-1], [25], [-30]]), torch.tensor([[2], [10], [-14], [47]])
    within = ring.distance(x % 12, y % 12)
    assert within.tolist() == [[3, 1, 1, 0], [1, 3, 3, 2], [4, 4, 4, 5]]
    assert ring.distance(x, y).equal(within)
    assert ring.distance(y, x).equal(within.mT)


@each("length", [np.int64(3), np.int32(3), np.uint8(3), torch.tensor(3)])
def test_lengths_may_be_integers_of_other_kinds(length):
    assert sequence(length).tolist() == [[0], [1], [2]]
    assert sequence(length).dtype == torch.int64


@each("length", [3.0, np.float64(3), True, "3", torch.tensor(3.0), torch.tensor([3]), -1, np.int64(-1)])
def test_other_lengths_are_refused(length):
    with pytest.raises(ValueError, match="t: expected an integer of at least 0"):
        sequence(length)


def test_numpy_integers_are_sizes():
    assert Ring(np.int64(4)).noun == "ring of 4"
    assert grid(np.int64(2), 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


@each("strict", [False, True])
def test_lengths_may_be_symbolic(strict):
    class Rotated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scheme = isopos.rope(8, 2)

        def forward(self, q):
            return self.scheme.encoding(sequence(q.shape[-2]))(q)

    short, long = torch.randn(1, 2, 12, 8), torch.randn(1, 2, 20, 8)
    lengths = {2: torch.export.Dim("t", min=2, max=64)}
    program = torch.export.export(Rotated(), (short,), dynamic_shapes=(lengths,), strict=strict)
    torch.testing.assert_close(program.module()(long), Rotated()(long))


def test_sizes_of_grids_may_be_symbolic():
    class Rotated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scheme = isopos.ape_grid(8, 2)

        def forward(self, images):
            return self.scheme.encoding(grid(*images.shape[-2:]))(images.flatten(-2).mT.unsqueeze(1))

    small, tall = torch.randn(1, 8, 4, 3), torch.randn(1, 8, 9, 3)
    program = torch.export.export(Rotated(), (small,), dynamic_shapes=({2: torch.export.Dim("rows", min=2, max=64)},))
    torch.testing.assert_close(program.module()(tall), Rotated()(tall))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_lengths_may_be_traced():
    traced = torch.jit.trace(lambda x: sequence(x.shape[0]), torch.zeros(3))
    assert traced(torch.zeros(5)).equal(sequence(5))


@each("name", REGISTRY)
def test_position_ids_without_a_column_get_the_hint(name):
    """Position ids ``[b t]`` of other libraries, for every group, in schemes, encodings, streams, decays and embeddings."""
    scheme, ids = REGISTRY[name](16, 2), torch.arange(7).expand(2, 7)
    columns = scheme.group.columns
    hint = r"x\[\.\.\., None\] makes a column" if columns == 1 else r"torch\.stack\(columns, -1\) joins columns"
    calls = [scheme.at, scheme.group.check, scheme.encoding.query, scheme.encoding.key]
    calls += [lambda x: scheme.at(x, state=State()), lambda x: scheme.at(scheme.group.arrange(7), x)]
    calls += [part for part in (scheme.decay, scheme.embedding) if part is not None]
    for call in calls:
        for wrong in (ids, ids[0]):
            with pytest.raises(ValueError, match=rf"positions: expected \[\*b t {columns}\] for .*{hint}"):
                call(wrong)


def test_a_packed_pair_is_told_from_positions():
    with pytest.raises(ValueError, match=r"got tuple; x, segment_ids = isopos\.packed\(lengths\) has both"):
        isopos.rope(16, 2).at(packed([2, 3]))


# Times


def test_timestamps_are_times_of_day_of_week_and_since_the_start():
    times = [
        datetime(2024, 2, 28, 23, 59, 30),
        datetime(2024, 3, 1),
        datetime(1969, 12, 31, 12),
        datetime(2024, 3, 4, 0, 0, 0),
    ]
    expected = [
        [
            time.hour + time.minute / 60 + time.second / 3600,
            time.weekday() + (time - time.replace(hour=0, minute=0, second=0)) / timedelta(days=1),
        ]
        for time in times
    ]
    found = timestamps(times, start=datetime(2024, 1, 1))
    torch.testing.assert_close(found[:, :2], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    assert found[:, 2].tolist() == [(time - datetime(2024, 1, 1)) / timedelta(hours=1) for time in times]
    torch.testing.assert_close(timestamps(times), found - found[0] * torch.tensor([0, 0, 1]), rtol=0, atol=1e-9)
    isopos.clock(6).group.check(found)


def test_timestamps_read_what_others_have():
    times = [datetime(2024, 2, 28, 23, 59, 30), datetime(2024, 3, 1)]
    found = timestamps(times)
    assert timestamps(np.array(times, dtype="datetime64[s]")).equal(found)
    seconds = torch.tensor([time.replace(tzinfo=UTC).timestamp() for time in times], dtype=torch.float64)
    assert timestamps(seconds).equal(found)
    assert timestamps(seconds.expand(3, 2)).equal(found.expand(3, -1, -1))
    assert timestamps([int(second) for second in seconds]).equal(found)
    assert timestamps(seconds.long().numpy()).equal(found)
    assert timestamps([str(time) for time in times]).equal(found)
    assert timestamps(np.array([f"{time:%Y%m%dT%H%M%S}" for time in times])).equal(found)
    assert timestamps([*np.array(times, dtype="datetime64[us]")]).equal(found)
    assert timestamps([time.replace(tzinfo=timezone(timedelta(hours=5))) for time in times]).equal(found)
    assert timestamps([], start=times[0]).shape == (0, 3)


def test_offsets_from_utc_are_kept_by_clocks_and_counted_by_the_time_that_passes():
    """Clocks show local hours; from noon in Delhi to noon a day later in Berlin 28.5 hours pass, not 24."""
    found = timestamps(["2024-01-01T12:00+05:30", "2024-01-02T12:00+01:00", "2024-01-02T10:00Z"])
    assert found.tolist() == [[12, 0.5, 0], [12, 1.5, 28.5], [10, 1 + 10 / 24, 27.5]]
    later = timestamps(["2024-01-02T10:00Z"], start="2024-01-01T12:00+05:30")
    assert later.equal(found[2:])
    assert timestamps(["2024-01-02T10:00Z"], start=datetime(2024, 1, 1, 6, 30, tzinfo=UTC)).equal(later)


def test_summer_time_skips_and_repeats_hours_of_clocks_not_of_time():
    zone = ZoneInfo("Europe/Berlin")
    spring = timestamps([datetime(2024, 3, 31, hour, tzinfo=zone) for hour in (1, 3)])
    assert spring[:, ::2].tolist() == [[1, 0], [3, 1]]
    autumn = [datetime(2024, 10, 27, 2, tzinfo=zone, fold=fold) for fold in (0, 1)]
    assert timestamps(autumn)[:, ::2].tolist() == [[2, 0], [2, 1]]
    assert timestamps([time.astimezone(UTC) for time in autumn])[:, ::2].tolist() == [[0, 0], [1, 1]]


def test_timestamps_of_pandas_are_read():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    times = ["2024-01-01T12:00+05:30", "2024-01-02T12:00+05:30"]
    index = pandas.DatetimeIndex(times)
    for kind in (index, pandas.Series(index), list(index)):
        assert timestamps(kind).equal(timestamps(times))
    assert timestamps(index.tz_localize(None).to_numpy()).equal(timestamps(times))
    with pytest.raises(ValueError, match="times: expected finite ones"):
        timestamps([pandas.NaT])


def test_a_delay_is_one_shift():
    group, delay = isopos.clock(6).group, timedelta(days=9, hours=7, minutes=31)
    start = datetime(2024, 1, 1)
    times = [datetime(2023, 11, 5, 4), datetime(2024, 2, 29, 20, 15), datetime(2024, 12, 30, 23)]
    by = timestamps([start + delay], start=start)
    moved = group.shift(by, timestamps(times, start=start))
    torch.testing.assert_close(moved, timestamps([time + delay for time in times], start=start), rtol=0, atol=1e-9)


@each(
    ("call", "error", "message"),
    [
        (
            lambda: timestamps(["2024-13-01"]),
            ValueError,
            "times: expected ISO 8601, as 2024-01-31T18:30.01:00, got '2024-13-01'",
        ),
        (lambda: timestamps(["2020"]), ValueError, "times: expected ISO 8601, .* got '2020'"),
        (lambda: timestamps("2024-01-01"), TypeError, r"times: expected a list, .* one time is \['2024-01-01'\]"),
        (lambda: timestamps(5), TypeError, r"times: expected a list, .* one time is \[5\]"),
        (
            lambda: timestamps([None]),
            TypeError,
            "times: expected datetimes, text in ISO 8601 or seconds since 1970, got NoneType",
        ),
        (lambda: timestamps([True]), TypeError, "times: expected datetimes, .* got bool"),
        (lambda: timestamps(torch.tensor([True])), TypeError, "times: expected datetime64 or numbers .* got torch.bool"),
        (
            lambda: timestamps(["2024-01-01T00:00Z", "2024-01-01"]),
            ValueError,
            "times: expected an offset from UTC, as in the first, in all of them, got no offset from UTC in '2024-01-01'",
        ),
        (lambda: timestamps(["2024-01-01", 5]), ValueError, "times: expected no offset .* got a number of seconds in 5"),
        (
            lambda: timestamps(["2024-01-01"], start="2024-01-01T00:00Z"),
            ValueError,
            "start: expected no offset from UTC, as the times have, got an offset from UTC in '2024-01-01T00:00Z'",
        ),
        (
            lambda: timestamps([1.7e12]),
            ValueError,
            r"times: .*years 1 to 9999.* from 1.7e\+12 to 1.7e\+12 seconds since 1970",
        ),
        (lambda: timestamps([]), ValueError, "start: expected a time, since times is empty"),
        (lambda: timestamps(torch.tensor(3.0)), ValueError, r"times: expected finite ones .*\[\*b t\]"),
        (lambda: timestamps(torch.tensor([torch.nan])), ValueError, "times: expected finite ones"),
    ],
)
def test_what_is_no_time_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_real_rings_take_fractions_and_others_do_not():
    ring, x, y = Ring(24, real=True), torch.tensor([[23.5], [1.0]]), torch.tensor([[0.75], [13.0]])
    assert ring.distance(x, y).tolist() == [[1.25, 10.5], [0.25, 12.0]]
    assert ring.compose(x, ring.inverse(x)).tolist() == [[0.0], [0.0]]
    assert repr(ring) == "Ring(period=24, real=True)"
    assert repr(Ring(24)) == "Ring(period=24)"
    assert eval(repr(ring)) == ring != Ring(24)
    with pytest.raises(ValueError, match="expected integers"):
        Ring(24).check(x)


def test_a_clock_closes_its_rings_and_goes_on():
    """A week later only absolute time differs; fractional hours count."""
    encoding = isopos.clock(12, base=50.0).encoding
    x = timestamps([datetime(2024, 1, 1, 6, 40), datetime(2024, 1, 3, 18, 30), datetime(2024, 1, 8, 6, 40)])
    q = torch.randn(1, 1, 1, 12, dtype=torch.float64).expand(1, 1, 3, 12)
    first, other, later = encoding(x, torch.float64)(q)[0, 0]
    assert torch.allclose(first[:8], later[:8])
    assert not torch.allclose(first[8:], later[8:])
    assert not torch.allclose(first[:8], other[:8])
    hours, days, since = x[1].tolist()
    angles = [2 * math.pi * m * hours / 24 for m in (1, 2)] + [2 * math.pi * m * days / 7 for m in (1, 2)]
    angles += [since, since * 50**-0.5]
    pairs = torch.view_as_complex(q[0, 0, 0].unflatten(-1, (6, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))).flatten()
    torch.testing.assert_close(other, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "lengths", [np.array([2, 3], dtype=np.int16), np.array([3, 2])[::-1], torch.tensor([2, 3], dtype=torch.uint8)]
)
def test_packed_lengths_may_be_any_integers(lengths):
    assert [a.tolist() for a in packed(lengths)] == [[[0], [1], [0], [1], [2]], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("lengths", [[True, False], [1.5], None, [[1]], [-1], "ab"])
def test_packed_lengths_that_are_none(lengths):
    with pytest.raises(ValueError, match="lengths: expected a list of token counts"):
        packed(lengths)


def test_a_product_needs_parts():
    with pytest.raises(ValueError, match="product: expected at least one part"):
        product()
    with pytest.raises(ValueError, match=r"product: expected parts \[t c\], got list"):
        product([[0], [1]], sequence(2))
