import pytest
from matplotlib import image

from isopos.lab.reports.plots import places, show
from isopos.positions import Line, Product, Ring, Tree
from isopos.schemes import REGISTRY


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_scheme_is_drawn(name):
    path = show(name, "picture.svg", head_dim=8, heads=2, reach=5)
    text = path.read_text()
    assert text.startswith("<?xml")
    assert f">{name}<" in text
    assert ("no relative kernel" in text) == (
        name in ("sinusoidal", "learned", "ape-absolute", "spe-sine", "spe-conv", "shiv-quirk")
    )


def test_a_picture_has_ink_and_is_named_after_its_scheme():
    path = show("rope:decay=retnet,denominator=plain", head_dim=8, heads=2)
    assert path.name == "rope+decay=retnet,denominator=plain.png"
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 500
    assert 0.005 < (pixels[..., :3].min(-1) < 0.9).mean() < 0.5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("permuteformer", "repeats after"),
        ("ape-ring:period=12", "period 12"),
        ("lrpe-unitary", "direction-blind"),
        ("t5", "tables that start at zero drawn at random"),
        ("rope:decay=alibi", "decay alibi"),
    ],
)
def test_titles_say_what_is_particular(spec, words):
    assert words in show(spec, "x.svg", head_dim=8, heads=2, reach=5).read_text()


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
        show(spec, out)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.png").read_text() == "mine"


def test_overwrite_replaces(tmp_path):
    (tmp_path / "x.pdf").write_text("old")
    assert show("none", "x.pdf", head_dim=8, heads=2, overwrite=True).read_bytes().startswith(b"%PDF")


def test_reach_is_positive():
    with pytest.raises(ValueError, match="reach"):
        show("rope", reach=0)


def test_places_are_named():
    line = Line()
    assert places(Product((line,) * 3)) == "grid of 3 axes"
    assert places(Product((Tree(2), line, line))) == "tree of 2 branches by 2 lines"
    assert places(Product((line, Ring(5)))) == "line by ring of 5"
