"""Planes and angles of rotations exp(A - A^T): A - A^T = P^T (blocks of frequencies) P."""

from typing import Any

import torch
from torch import Tensor

from isopos.exact import constant, once


def check_spectrum(generator: Tensor) -> None:
    """ValueError if frequencies of A - A^T are equal or zero, so that its eigenvectors have no gradient."""
    frequency = spectrum(constant(generator))[0]
    gaps = torch.cat((frequency[..., :1], frequency.diff(dim=-1)), -1)
    if not (gaps > 1e-9 * frequency[..., -1:]).all():
        raise ValueError(
            "generator: expected a skew part with distinct frequencies other than zero, got equal ones; "
            "add a little noise, such as 0.01 * torch.randn_like(generator)"
        )


class _Eigh(torch.autograd.Function):
    """Eigenvalues and eigenvectors of a Hermitian matrix.

    `torch.linalg.eigh` refuses gradients that depend on phases of eigenvectors, by a bound that large gradients exceed even
    without such a dependence. This backward pass leaves out the phases instead.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:  # pyright: ignore
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        once("generator", "rope with learned=True, which ape-sequence equals after isopos.nn.absorb")
        values, vectors = ctx.saved_tensors
        grad_values, grad_vectors = grad_outputs
        gaps = values[..., None, :] - values[..., :, None]
        gaps.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        scale = values.abs().amax(-1)[..., None, None]
        gaps.masked_fill_(gaps.abs() <= 1e-12 * scale, torch.inf)  # any basis of an eigenspace will do
        inner = (vectors.mH @ grad_vectors) / gaps + torch.diag_embed(grad_values)
        grad = vectors @ inner @ vectors.mH
        return (grad + grad.mH) / 2


def spectrum(generator: Tensor) -> tuple[Tensor, Tensor]:
    """Frequencies ``[... f]`` > 0 and basis P ``[... d d]`` with A - A^T = P^T (blocks of frequencies) P."""
    skew = generator - generator.mT
    values, vectors = _Eigh.apply(1j * skew)  # pyright: ignore[reportGeneralTypeIssues]  # S u = -i w u: pairs of +-w
    half = generator.shape[-1] // 2
    u = vectors[..., half:]
    pivot = u.gather(-2, u.abs().argmax(-2, keepdim=True))
    u = u * (pivot.conj() / pivot.abs())  # fixes the phase, which could differ between two evaluations
    rows = torch.stack((u.real.mT, u.imag.mT), -2).flatten(-3, -2)
    return values[..., half:], 2**0.5 * rows
