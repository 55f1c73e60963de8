import pytest
import torch
from cases import SCHEMES

import isopos
from isopos.lab.kernels import REACH, kernel


@pytest.mark.parametrize("case", [case for case in SCHEMES if case.relative], ids=lambda case: case.id)
def test_a_relative_scheme_is_constant_along_diagonals(case):
    heat = kernel(case.build()).heat
    assert torch.allclose(heat[1:, 1:], heat[:-1, :-1], atol=1e-9)


def test_sinusoidal_is_not():
    heat = kernel(isopos.sinusoidal(8, 2)).heat
    assert not torch.allclose(heat[1:, 1:], heat[:-1, :-1], atol=1e-3)


def test_the_odd_part_shows_direction():
    def odd(scheme):
        score = kernel(scheme).score
        return (score - score.flip(0)).abs().max()

    assert odd(isopos.lrpe_unitary(8, 2)) < 1e-9 < 1e-2 < odd(isopos.rope(8, 2))


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_decay_is_part_of_the_picture(attention):
    plain, decayed = (kernel(isopos.none(8, 2, decay=decay, attention=attention)).score for decay in ("none", "retnet"))
    assert torch.allclose(plain, plain[REACH].expand_as(plain))
    assert (decayed[REACH:].diff() < 0).all()


@pytest.mark.parametrize("length", [1, 2, 100])
def test_a_table_of_positions_limits_the_picture(length):
    picture = kernel(isopos.learned(8, 2, length=length))
    assert picture.score.shape == picture.offset.shape == (2 * ((min(length, 129) - 1) // 2) + 1,)
