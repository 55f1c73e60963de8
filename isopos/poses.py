"""Cameras as positions: 4 x 4 matrices that map image points, with their depth, to the world."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isopos.catalog import at_least
from isopos.exact import is_exporting, to_float64
from isopos.positions import Group

__all__ = ["Projective", "cameras"]

MAX_CONDITION = 1e4  # with larger condition numbers, float32 tables lose more than 6e-4


@dataclass(frozen=True)
class Projective(Group):
    """The invertible 4 x 4 matrices, row by row: cameras, as `cameras` computes them from poses and intrinsics.

    A shift multiplies from the left: it changes the frame of the world and keeps x^-1 y, the map between two images.

    Examples:
        >>> group = Projective()
        >>> x = group.random(5)
        >>> torch.allclose(group.compose(group.inverse(x), x), group.origin(5))
        True
    """

    real = True  # float32 and float64 positions are accepted

    @property
    def columns(self) -> int:
        return 16

    @property
    def noun(self) -> str:
        return "set of cameras"

    def arrange(self, t: int) -> Tensor:
        """On a circle, evenly around a point that all cameras see."""
        angle = 2 * math.pi / max(t, 1) * torch.arange(t, dtype=torch.float64)
        rows = torch.stack((angle.cos(), 0 * angle, -angle.sin(), angle.sin(), 0 * angle, angle.cos()), -1).view(t, 2, 3)
        pose = torch.eye(4, dtype=torch.float64).repeat(t, 1, 1)
        pose[:, :3, 0], pose[:, :3, 2], pose[:, :3, 3] = rows[:, 0], rows[:, 1], -rows[:, 1]
        return cameras(pose)

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        return (_matrices(x) @ _matrices(y)).flatten(-2)

    def inverse(self, x: Tensor) -> Tensor:
        return _inverses(_matrices(x)).flatten(-2)

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """log(1 + |x^-1 y - I|), or the same for y^-1 x if larger: a metric, invariant to the frame of the world."""
        a, b = _matrices(x)[..., :, None, :, :], _matrices(y)[..., None, :, :, :]
        relative = _inverses(_matrices(x))[..., :, None, :, :] @ b, _inverses(_matrices(y))[..., None, :, :, :] @ a
        unit = torch.eye(4, dtype=torch.float64, device=a.device)
        return torch.stack([(matrix - unit).norm(dim=(-1, -2)).log1p() for matrix in relative]).amax(0)

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Cameras within about one step of the origin, with focal lengths about one."""
        draw = torch.randn(*shape, 3, 5, generator=generator, dtype=torch.float64)
        pose = torch.eye(4, dtype=torch.float64).repeat(*shape, 1, 1)
        rotation = torch.linalg.qr(draw[..., :3]).Q
        pose[..., :3, :3], pose[..., :3, 3] = rotation * torch.linalg.det(rotation)[..., None, None], draw[..., 3] / 2
        K = torch.diag_embed(torch.exp(draw[..., 4] / 4))
        return cameras(pose, K / K[..., 2:, 2:])

    def origin(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        return torch.eye(4, dtype=torch.float64, device=device).flatten().repeat(*shape, 1)

    def check(self, x: Tensor) -> None:
        """Matrices must be invertible, and not nearly singular; checked on the CPU and outside a compiler."""
        super().check(x)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            _inverses(_matrices(x.detach()))


def cameras(
    pose: Tensor,
    intrinsics: Tensor | None = None,
    *,
    size: tuple[float, float] | None = None,
    patches: tuple[int, int] | None = None,
) -> Tensor:
    """Positions of cameras for `Projective`, or of the patches of their images for `isopos.prope`: float64.

    A camera is pose K^-1, row by row: the inverse of its projection K pose^-1 of the world, with K extended to 4 x 4. Scores
    are the same in any frame of the world, up to rounding; for float32, choose an origin near the cameras and units of their
    distances.

    Args:
        pose: ``[*b n 4 4]``, camera to world, [R t; 0 0 0 1] with a rotation R: the inverse of a view matrix (extrinsics).
        intrinsics: K ``[*b n 3 3]``, or one ``[3 3]`` for all, [fx s cx; 0 fy cy; 0 0 1]; None is the identity, so that only
            relative poses remain.
        size: Width and height of images in the unit of K, pixels: K is then rescaled to units of images, from their centre.
            Without it K is used unchanged.
        patches: Rows and columns of patches per image; their positions add two columns: ``[*b n*rows*columns 18]``, camera
            by camera and row by row.

    Raises:
        ValueError: For matrices that are no cameras.

    Source: Cameras as Relative Positional Encoding (Li et al. 2025), section 3. https://arxiv.org/abs/2507.10496

    Examples:
        >>> pose = torch.eye(4).expand(5, 4, 4)
        >>> K = torch.tensor([[320.0, 0, 320], [0, 320, 240], [0, 0, 1]])
        >>> cameras(pose, K, size=(640, 480)).shape, cameras(pose, patches=(12, 16)).shape
        (torch.Size([5, 16]), torch.Size([960, 18]))
    """
    _check_pose(pose)
    matrix = pose.double()
    if intrinsics is not None:
        K = _in_images(intrinsics, size)
        if K.ndim > 2 and K.shape[:-2] != pose.shape[:-2]:
            raise ValueError(f"intrinsics: expected [3 3] or {[*pose.shape[:-2], 3, 3]}, got {list(K.shape)}")
        whole = torch.nn.functional.pad(K, (0, 1, 0, 1))
        whole[..., 3, 3] = 1
        matrix = matrix @ torch.linalg.inv(whole)
    elif size is not None:
        raise ValueError("size: expected None without intrinsics, which it rescales, got a size")
    rows = matrix.flatten(-2)
    if patches is None:
        return rows
    if np.shape(patches) != (2,):
        raise ValueError(f"patches: expected two integers, rows and columns, got {patches!r}")
    axes = [torch.arange(at_least("patches", count), device=pose.device) for count in patches]
    patch = torch.cartesian_prod(*axes).double().expand(*rows.shape[:-1], -1, -1)
    return torch.cat((rows[..., None, :].expand(*patch.shape[:-1], -1), patch), -1).flatten(-3, -2)


def _check_pose(pose: Tensor) -> None:
    if not isinstance(pose, Tensor) or pose.ndim < 3 or pose.shape[-2:] != (4, 4) or not pose.is_floating_point():
        got = f"{pose.dtype} {list(pose.shape)}" if isinstance(pose, Tensor) else type(pose).__name__
        raise ValueError(f"pose: expected floats [*b n 4 4], camera to world, got {got}")
    if not pose.numel():
        return
    exact = pose.detach().double()
    rotation, corner = exact[..., :3, :3], torch.tensor([0.0, 0, 0, 1], dtype=torch.float64, device=pose.device)
    if not exact.isfinite().all() or not (exact[..., 3, :] - corner).abs().max() < 1e-6:
        raise ValueError(
            "pose: expected finite matrices with the last row (0, 0, 0, 1), got other ones; transpose with .mT if it is the "
            "last column"
        )
    error = (rotation @ rotation.mT - corner.new_ones(3).diag()).abs().amax((-1, -2))
    if not error.max() < 1e-3:
        where = torch.unravel_index(error.argmax(), error.shape)
        raise ValueError(
            f"pose: expected rotations [R t; 0 1] without a scale, got R R^T off the identity by {error.max():.1g} in "
            f"camera {', '.join(f'{int(n)}' for n in where)}"
        )
    if (mirrored := torch.linalg.det(rotation) < 0).any():
        where = ", ".join(map(str, mirrored.nonzero()[0].tolist()))
        raise ValueError(
            f"pose: expected rotations, of determinant 1, got a reflection, of determinant -1, in camera {where}; reverse "
            "the same axis of coordinates in all cameras"
        )


def _in_images(intrinsics: Tensor, size: tuple[float, float] | None) -> Tensor:
    """K in float64, rescaled to units of images from their centre if `size` is given."""
    if not isinstance(intrinsics, Tensor) or intrinsics.ndim < 2 or intrinsics.shape[-2:] != (3, 3):
        got = list(intrinsics.shape) if isinstance(intrinsics, Tensor) else type(intrinsics).__name__
        raise ValueError(f"intrinsics: expected [*b n 3 3] or [3 3], got {got}")
    K = intrinsics.double()
    exact = K.detach()
    lower = torch.stack((exact[..., 1, 0], exact[..., 2, 0], exact[..., 2, 1], exact[..., 2, 2] - 1), -1)
    focal = exact.diagonal(dim1=-2, dim2=-1)[..., :2]
    if not exact.isfinite().all() or not (lower == 0).all() or not (focal > 0).all():
        raise ValueError(
            "intrinsics: expected [fx s cx; 0 fy cy; 0 0 1] with positive focal lengths, got other matrices; transpose with "
            ".mT if they are [fx 0 0; s fy 0; cx cy 1]"
        )
    if size is None:
        return K
    try:
        width, height = map(float, size)
    except (TypeError, ValueError):
        width = height = math.nan
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ValueError(f"size: expected a positive width and height, got {size}")
    scale = torch.tensor([[1 / width, 0, -0.5], [0, 1 / height, -0.5], [0, 0, 1]], dtype=torch.float64, device=K.device)
    return scale @ K


def _inverses(matrix: Tensor) -> Tensor:
    """Inverses of matrices ``[*b t 4 4]``; ValueError if one is nearly singular, on the CPU and outside a compiler."""
    if is_exporting():
        return inverse_4x4(matrix)
    if matrix.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.linalg.inv(matrix)
    inverse, info = torch.linalg.inv_ex(matrix)
    size = (matrix.detach().norm(dim=(-1, -2)) * inverse.detach().norm(dim=(-1, -2))).where(info == 0, torch.inf)
    if not (size < MAX_CONDITION).all():
        row = (~(size < MAX_CONDITION)).nonzero()[0].tolist()
        raise ValueError(
            f"positions: expected invertible 4 x 4 matrices g with |g| |g^-1| below {MAX_CONDITION:,.0f}, as float32 scores "
            f"need, got {size[tuple(row)]:.3g} in row {', '.join(map(str, row))}; put the world's origin near the cameras, "
            "in units of their distances"
        )
    return inverse


def _matrices(x: Tensor) -> Tensor:
    """The matrices of projective positions ``[*b t 16]``: float64 ``[*b t 4 4]``."""
    return to_float64(x).unflatten(-1, (4, 4))


def inverse_4x4(matrix: Tensor) -> Tensor:
    """Inverses of matrices ``[... 4 4]`` by products and traces, for exported programs: ONNX has no inverse.

    This is the method of Faddeev and LeVerrier.

    Examples:
        >>> matrix = torch.randn(5, 4, 4, dtype=torch.float64)
        >>> torch.allclose(inverse_4x4(matrix), torch.linalg.inv(matrix))
        True
    """
    unit = torch.eye(4, dtype=matrix.dtype, device=matrix.device)

    def trace(x: Tensor) -> Tensor:
        return x.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]

    adjugate = unit.expand_as(matrix)
    for n in (1, 2, 3):
        product = matrix @ adjugate
        adjugate = product - trace(product) / n * unit
    return 4 * adjugate / trace(matrix @ adjugate)
