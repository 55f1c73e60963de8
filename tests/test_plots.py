import pytest
import torch
from matplotlib import image
from matplotlib.figure import Figure

from isopos.lab.reports.kernels import panels, paths
from isopos.lab.reports.plots import draw_heat, draw_kernel, draw_panel, draw_tree, line_style, plain
from isopos.schemes import REGISTRY, build
from isopos.spec import split_spec


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_scheme_is_drawn(name):
    path = draw_kernel(name, "picture.svg", head_dim=8, heads=2, reach=5)
    text = path.read_text()
    assert text.startswith("<?xml")
    assert f">{name}<" in text
    assert "prefers-color-scheme: dark" in text
    assert ("no relative kernel" in text) == (
        name in ("sinusoidal", "learned", "ape-absolute", "spe-sine", "spe-conv", "shiv-quirk", "liere")
    )


def test_a_picture_has_ink_and_is_named_after_its_scheme():
    path = draw_kernel("rope:decay=retnet,denominator=plain", head_dim=8, heads=2)
    assert path.name == "rope+decay=retnet,denominator=plain.png"
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 500
    assert 0.005 < (pixels[..., :3].min(-1) < 0.9).mean() < 0.5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("permuteformer", "repeats after"),
        ("ape-ring:period=12", "period 12"),
        ("lrpe-unitary", "symmetric in the direction"),
        ("t5", "tables that start at zero drawn at random"),
        ("rope:decay=alibi", "decay alibi"),
    ],
)
def test_titles_say_what_is_particular(spec, words):
    assert words in draw_kernel(spec, "x.svg", head_dim=8, heads=2, reach=5).read_text()


@pytest.mark.parametrize(
    ("spec", "out", "message"),
    [
        ("rop", "", "did you mean rope"),
        ("rope", "x.bmp", "ends with .png, .svg, .pdf"),
        ("rope", "x", "ends with"),
        ("rope", "there", "is a folder"),
        ("rope", "there.png", "--overwrite"),
        ("rope", "nowhere/x.png", "folder that can be written"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, spec, out, message):
    (tmp_path / "there").mkdir()
    (tmp_path / "there.png").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        draw_kernel(spec, out)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.png").read_text() == "mine"


def test_overwrite_replaces(tmp_path):
    (tmp_path / "x.pdf").write_text("old")
    assert draw_kernel("none", "x.pdf", head_dim=8, heads=2, overwrite=True).read_bytes().startswith(b"%PDF")


def test_reach_is_positive():
    with pytest.raises(ValueError, match="reach"):
        draw_kernel("rope", reach=0)


# What is drawn where


def drawn(spec):
    """The axes of a scheme's first panel, and the panel."""
    name, options = split_spec(spec)
    scheme = build(name, 8, 2, options)
    panel, axes = next(panels(scheme, reach=5)), Figure().subplots()
    draw_panel(axes, panel, scheme, alone=True)
    return axes, panel


def test_a_curve_is_the_mean_of_heads_with_its_even_and_odd_part():
    axes, panel = drawn("rope:attention=softmax")
    score = panel.row()[1]
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) > 2]  # without that of zero
    assert all(curve.get_xdata().tolist() == list(range(-5, 6)) for curve in curves)
    *heads, mean, even, odd = (curve.get_ydata() for curve in curves)
    assert heads == [pytest.approx(head.numpy()) for head in score]
    assert mean == pytest.approx(score.mean(0).numpy())
    assert even + odd == pytest.approx(mean)
    assert even == pytest.approx(even[::-1])
    assert odd == pytest.approx(-odd[::-1])
    assert abs(odd).max() > 0.1


def test_the_cell_of_an_offset_has_its_coordinates():
    axes, panel = drawn("ape-grid")
    offset, row = panel.row()
    (image,) = axes.get_images()
    left, right, bottom, top = image.get_extent()
    rows, columns = image.get_array().shape
    for (first, second), score in zip(offset.tolist(), row.mean(0).tolist(), strict=True):
        n, m = (first - top) * rows / (bottom - top), (second - left) * columns / (right - left)
        assert (n % 1, m % 1) == pytest.approx((0.5, 0.5)), "the middle of a cell"
        assert image.get_array()[int(n), int(m)] == pytest.approx(score)


@pytest.mark.parametrize(
    ("low", "high", "limits"), [(-1.0, 3.0, (-3.0, 3.0)), (-4.0, 1.0, (-4.0, 4.0)), (0.0, 2.0, (0.0, 2.0))]
)
def test_colours_diverge_from_zero_where_there_are_both_signs(low, high, limits):
    score, axes = torch.tensor([[low, 0.5], [0.25, high]]), Figure().subplots()
    draw_heat(axes, score, "linear")
    (image,) = axes.get_images()
    assert image.get_array().tolist() == score.tolist()
    assert image.get_clim() == limits
    assert image.get_cmap().name == ("RdBu_r" if low < 0 else "viridis")


def test_nodes_are_named_by_their_paths_on_both_sides():
    axes, panel = drawn("ape-tree")
    names = [path or "root" for path in paths(panel.position)]
    for axis in (axes.xaxis, axes.yaxis):
        assert axis.get_ticklocs().tolist() == list(range(len(names)))
        assert [label.get_text() for label in axis.get_ticklabels()] == names


def test_a_tree_is_drawn_with_the_scores_of_one_of_its_nodes():
    scheme = build("ape-tree", 8, 2, {"branches": "3"})
    panel, axes = next(panels(scheme)), Figure().subplots()
    draw_tree(axes, panel, "linear")
    nodes, ring = axes.collections
    query, position = len(panel.position) // 2, panel.position.tolist()
    assert nodes.get_array().tolist() == panel.score.mean(0)[query].tolist()
    places = [tuple(place) for place in nodes.get_offsets()]
    assert ring.get_offsets().tolist() == [list(places[query])]
    assert len(set(places)) == len(places)
    edges = {(tuple(zip(*line.get_data(), strict=True))) for line in axes.get_lines()}
    assert edges == {(places[parent], places[n]) for n, (parent, _) in enumerate(position) if parent >= 0}
    assert [text.get_text() for text in axes.texts] == [str(branch) for _, branch in position[1:]]


def test_ticks_of_steps_and_positions_are_whole_numbers():
    """By default matplotlib labels 16 positions with 10.0 and 12.5, and short curves with fractions of steps."""

    def ticks(axis):
        low, high = sorted(axis.get_view_interval())
        return [
            text.get_text() for text in axis.get_ticklabels() if low <= text.get_position()[axis.axis_name == "y"] <= high
        ]

    figure = Figure()
    heat, short, long, single, shares = figure.subplots(1, 5)
    draw_heat(heat, torch.rand(16, 16), "linear")
    for axes, steps in ((short, [1, 2, 3]), (long, range(16)), (single, [10]), (shares, [0, 0.5])):
        axes.plot(steps, [0.5] * len(steps))
        plain(axes)
    figure.draw_without_rendering()
    for axis in (heat.xaxis, heat.yaxis, short.xaxis, long.xaxis, single.xaxis):
        assert ticks(axis)
        assert all(tick.isdecimal() for tick in ticks(axis)), ticks(axis)
    assert any("." in tick for tick in ticks(shares.xaxis))


def test_styles_of_lines_are_all_different():
    assert len({tuple(map(str, line_style(n).values())) for n in range(30)}) == 30
