"""Test bases, which are constant orthogonal maps."""

import copy

import pytest
import torch
from cases import ALL_BASES, HEAD_DIM, HEADS, close, each, normals, perturb

from isopos.bases import ComplexFourier, Fourier, Householder, OddEven, Pairs, Spectrum
from isopos.encodings import Rotary, rope_frequencies
from isopos.positions import sequence


def matrix_of(basis):
    """The matrix of each head ``[h d d]``, from its columns."""
    unit = torch.eye(basis.features, dtype=torch.float64)[:, None, None].expand(-1, HEADS, 1, -1)
    return basis(dtype=torch.float64)(unit)[:, :, 0].permute(1, 2, 0)


@each("make", ALL_BASES.values(), ids=ALL_BASES)
def test_bases_are_orthogonal(make):
    matrix = matrix_of(perturb(make()))
    close(matrix @ matrix.mT, torch.eye(HEAD_DIM, dtype=torch.float64).expand_as(matrix))


@each("features", [1, 2, 5, 6])
def test_fourier_rows_are_the_fft(features):
    close(matrix_of(Fourier(features)) @ matrix_of(Fourier(features)).mT, torch.eye(features).double().expand(HEADS, -1, -1))
    x = torch.randn(features, dtype=torch.float64)
    y = matrix_of(Fourier(features))[0] @ x
    spectrum = torch.fft.fft(x, norm="ortho")
    ends = spectrum[[0]].real if features % 2 else spectrum[[0, features // 2]].real
    pairs = 2**0.5 * spectrum[1 : (features + 1) // 2]
    close(y, torch.cat((ends, torch.stack((pairs.real, -pairs.imag), -1).flatten())))


def test_householder_is_a_reflection_a_head():
    normal = normals()
    unit = normal / normal.norm(dim=-1, keepdim=True)
    expected = torch.eye(HEAD_DIM).double() - 2 * unit[:, :, None] * unit[:, None, :]
    close(matrix_of(Householder(normal)), expected)
    close(matrix_of(Householder(5 * normal)), expected)


@each("features", [1, 2, 5, 8])
def test_odd_even_is_equation_74(features):
    """(P x)_i = x_pi(i) with pi(2k) = k, pi(2k + 1) = ceil(d / 2) + k."""
    matrix = matrix_of(OddEven(features))[0]
    for k in range((features + 1) // 2):
        assert matrix[2 * k, k] == 1
        if 2 * k + 1 < features:
            assert matrix[2 * k + 1, (features + 1) // 2 + k] == 1
    assert matrix.sum() == features


def test_odd_even_then_interleaved_rotation_is_the_half_split_layout():
    """Feature i turns with feature i + d/2, as in Llama's checkpoints."""
    x, frequency, d = torch.randn(1, HEADS, 5, HEAD_DIM, dtype=torch.float64), rope_frequencies(HEAD_DIM // 2), HEAD_DIM
    turned = Rotary(frequency[None, None])(sequence(5), torch.float64)(OddEven(d)(dtype=torch.float64)(x))
    angle = sequence(5) * frequency
    a, b = x.chunk(2, -1)
    first, second = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    close(turned, torch.stack((first, second), -1).flatten(-2))  # and pairs are left side by side


@each("features", [2, 6, 8])
def test_complex_fourier_is_the_fft_of_pairs(features):
    z = torch.randn(features // 2, dtype=torch.complex128)
    y = matrix_of(ComplexFourier(features))[1] @ torch.view_as_real(z).flatten()
    close(y, torch.view_as_real(torch.fft.fft(z, norm="ortho")).flatten())


@each("make", [lambda: Householder(normals(features=4)), lambda: OddEven(4), lambda: Fourier(4)])
def test_pairs_act_on_real_and_imaginary_parts_alike(make):
    close(matrix_of(Pairs(make())), torch.kron(matrix_of(make()).contiguous(), torch.eye(2).double()))


@each("features", [0, 3])
def test_complex_fourier_needs_pairs(features):
    with pytest.raises(ValueError, match=f"features: expected pairs of real and imaginary parts, got {features}"):
        ComplexFourier(features)


def test_learned_normal_round_trips():
    basis = Householder(normals(), learned=True)
    initial = copy.deepcopy(basis.state_dict())
    assert initial["normal"].dtype == torch.float32
    close(matrix_of(basis), matrix_of(Householder(normals())), dtype=torch.float32)
    perturb(basis).reset_parameters()
    torch.testing.assert_close(basis.float().state_dict(), initial, rtol=0, atol=0)


WRONG_NORMALS = {
    "no heads": torch.ones(3),
    "zero": torch.zeros(2, 3),
    "a zero head": torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
    "nan": torch.full((1, 2), torch.nan),
}


def test_pairs_need_a_basis_of_one_size():
    with pytest.raises(ValueError, match="basis: expected one that returns as many features as it takes, got Spectrum"):
        Pairs(Spectrum(3))


@each("normal", WRONG_NORMALS.values(), ids=WRONG_NORMALS)
def test_householder_needs_normals(normal):
    with pytest.raises(ValueError, match="normal: expected"):
        Householder(normal)
