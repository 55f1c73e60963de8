import math

import pytest
import torch
from cases import PRESETS, SCHEMES, each, over_rows, with_kinds

import isopos
from isopos.catalog import CATALOG
from isopos.lab.reports.kernels import REACH, fill_zeros, panels, paths, scores
from isopos.positions import Line, Product, Ring, Tree, depths
from isopos.schemes import REGISTRY

RELATIVE = [case for case in SCHEMES if case.relative]


def _panel(scheme):
    (panel,) = panels(scheme, reach=20)
    return panel


@over_rows(RELATIVE)
def test_relative_schemes_depend_on_offsets_only(case):
    scheme = case.build()
    fill_zeros(scheme)
    assert all(panel.relative for panel in panels(scheme, reach=20))


@each("name", ["sinusoidal", "learned", "ape-absolute", "spe-sine", "spe-conv", "shiv-quirk"])
def test_the_others_do_not(name):
    assert not _panel(REGISTRY[name](8, 2)).relative


@with_kinds(PRESETS)
def test_every_scheme_has_finite_scores_compared_with_those_at_the_same_position(case, kind):
    for panel in panels(case.build(attention=kind), reach=5):
        diagonal = panel.score.diagonal(dim1=1, dim2=2)
        assert panel.score.isfinite().all()
        assert diagonal.square().mean().item() == pytest.approx(1.0 if kind == "linear" else 0.0, abs=1e-9)


def test_scores_are_those_of_the_definition():
    scheme, x = isopos.rope(8, 2, feature_map="identity"), isopos.sequence(5)
    softmax = isopos.rope(8, 2, attention="softmax")
    content = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    content = content[0], (content[0] + content[1]) / math.sqrt(2)
    q, k = (scheme.encoding(x, torch.float64)(a[None, :, None].expand(-1, -1, 5, -1))[0] for a in content)
    weight = q @ k.mT
    own = weight.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(scores(scheme, x), weight / own.square().mean().sqrt())
    torch.testing.assert_close(scores(softmax, x), (weight - own[..., None]) / math.sqrt(8))


@each("attention", ["linear", "softmax"])
@each("name", [name for name in CATALOG if name != "fox"])  # whose keys here are all alike
def test_statements_about_content_hold(name, attention):
    """The effect of positions on scores does not depend on content, up to one factor per head."""
    try:
        scheme = REGISTRY[name](8, 2, attention=attention)
    except ValueError:
        pytest.skip("softmax only")
    fill_zeros(scheme)

    def change(seed):
        score = next(panels(scheme, reach=5, seed=seed)).score
        more = score - score.diagonal(dim1=1, dim2=2)[..., None]
        return more / more[:, :1, -1:] if more.abs().max() > 1e-9 else torch.zeros_like(more)

    assert torch.allclose(change(0), change(1), atol=1e-6) != CATALOG[name].content


def test_rotations_show_a_peak_and_a_direction():
    offset, score = _panel(isopos.rope(64, 8, attention="softmax")).row()
    mean = score.mean(0)
    assert mean.argmax() == offset[:, 0].tolist().index(0)
    assert (mean - mean.flip(0)).abs().max() > 0.05


@each("name", CATALOG)
def test_schemes_said_to_learn_have_parameters(name):
    assert (CATALOG[name].learns != "nothing") == any(True for _ in REGISTRY[name](8, 2).parameters())


def test_direction_is_seen():
    blind = ["lrpe-unitary", "alibi", "cosformer"]
    for name in ["rope", "t5", "shaw", "transformer-xl", "horn-clipped", "horn-constrained", "ape-tree", *blind]:
        scheme = REGISTRY[name](8, 2)
        fill_zeros(scheme)
        assert _panel(scheme).directional == (name not in blind)


@each("attention", ["linear", "softmax"])
def test_a_decay_is_part_of_the_picture(attention):
    plain, decayed = (_panel(isopos.none(8, 2, decay=decay, attention=attention)).row()[1] for decay in ("none", "retnet"))
    assert torch.allclose(plain, plain[:, 20:21].expand_as(plain))
    assert (decayed[:, 20:].diff() < 0).all()


@each("length", [1, 2, 100])
def test_a_table_of_positions_limits_the_picture(length):
    (panel,) = panels(isopos.learned(8, 2, length=length))
    assert len(panel.position) == 2 * ((min(length, 2 * REACH + 1) - 1) // 2) + 1


def test_panels_of_groups():
    def shapes(scheme):
        return [(panel.group, len(panel.position)) for panel in panels(scheme, reach=5)]

    line, real = Line(), Line(real=True)
    assert shapes(isopos.ape_ring(8, 2, period=12)) == [(Ring(12), 13)]
    assert shapes(isopos.ape_ring(8, 2, period=7)) == [(Ring(7), 7)]
    assert shapes(isopos.permuteformer_2d(8, 2, axes=3)) == [(Product((line, line)), 625)]
    assert shapes(isopos.ape_tree(8, 2, branches=3)) == [(Tree(3), 40)]
    assert shapes(isopos.ape_tree(8, 2, branches=60)) == [(Tree(60), 61)]
    assert shapes(isopos.ape_product(8, 2)) == [(real, 11), (Tree(2), 31)]
    assert shapes(isopos.ape_product(8, 2, parts="tree1+ring4+sequence")) == [(Tree(1), 21), (Ring(4), 5), (real, 11)]


def test_a_ring_closes():
    score = _panel(isopos.ape_ring(8, 2, period=12)).row()[1]
    torch.testing.assert_close(score[:, 0], score[:, -1])


def test_nodes_are_named_by_their_paths():
    position = _panel(isopos.ape_tree(8, 2)).position
    names = paths(position)
    assert names[:6] == ["", "0", "00", "000", "0000", "0001"]
    assert [len(name) for name in names] == depths(position).tolist()
    assert paths(torch.tensor([[-1, -1], [0, 12]])) == ["", "(12)"]


def test_tokens_outside_the_grid_are_left_out():
    outside, inside = (_panel(isopos.horn_clipped(8, 2, axes=2, outside=n)) for n in (1, 0))
    assert outside.score.shape == inside.score.shape
    assert outside.relative


def test_an_embedding_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"model_dim: expected .* 16"):
        next(panels(isopos.sinusoidal(8, 2, model_dim=32)))


@each("spec", ["ape_product:parts=tree2+sequence", "ape_product:parts=sequence+tree1+ring4"])
def test_a_panel_is_its_part_of_the_scores_of_the_whole_group(spec):
    """Each panel equals the scores at full positions, with the other coordinates at the origin."""
    name, _, parts = spec.partition(":parts=")
    scheme = getattr(isopos, name)(8, 2, parts=parts)
    first = 0
    for panel, group in zip(panels(scheme, reach=3), scheme.group.parts, strict=True):
        x = scheme.group.origin(len(panel.position)).clone()
        x[:, first : first + group.columns] = panel.position.to(x.dtype)
        torch.testing.assert_close(panel.score, scores(scheme, x))
        first += group.columns
    assert first == scheme.group.columns


@each("attention", ["linear", "softmax"])
@each("name", [name for name in CATALOG if REGISTRY[name](8, 2).phases])
def test_scores_of_content_dependent_positions_mirror_earlier_keys(name, attention):
    try:
        scheme = REGISTRY[name](8, 2, attention=attention)
    except ValueError:
        pytest.skip("softmax only")
    score = scores(scheme, isopos.sequence(6))
    torch.testing.assert_close(score, score.mT, rtol=0, atol=0)
    assert score.abs().max() < 100  # not the logarithm of a weight of 0, of a key that is not seen
