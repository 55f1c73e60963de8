"""Scenes: views of a room whose walls have tiles of random colours, from cameras with known poses and focal lengths.

The room is a cube with edges of length 2 around the origin. Cameras stand near its centre and look about the same way, so
that views overlap. A pixel has the colour of the tile at its centre. Each scene has a random frame of the world. Tiles may
be those of images instead, one on each wall, in levels of grey.
"""

import math
from collections.abc import Mapping

import numpy as np

from isopos.lab.data.arrays import Arrays, Writer, in_memory
from isopos.lab.data.prepare import SPLITS

APART = 0.3  # largest coordinate of a camera
YAW, PITCH = math.pi / 6, math.pi / 8  # largest angles to the common direction of a scene, and to the floor
FOCAL = (0.5, 1.0)  # focal lengths, in widths of an image: angles of view from 53 to 90 degrees
AXES = np.array([(1, 2), (0, 2), (0, 1)])  # coordinates on the walls of each axis


def prepare(
    seed: int,
    counts: tuple[int, int, int],
    views: int,
    side: int,
    tiles: int,
    colours: int,
    pictures: Mapping[str, np.ndarray] | None = None,
) -> Arrays:
    """For each split: `NAME-pixels`, `NAME-poses` and `NAME-focal`, as `draw_scenes` returns them.

    Args:
        pictures: Levels of grey of the images of each split ``[m tiles tiles]`` uint8, which walls have by chance.
    """

    def fill(writer: Writer) -> dict[str, object]:
        for n, (split, count) in enumerate(zip(SPLITS, counts, strict=True)):
            of_split = None if pictures is None else pictures[split]
            drawn = draw_scenes(np.random.default_rng((seed, n)), count, views, side, tiles, colours, of_split)
            for name, rows in zip(("pixels", "poses", "focal"), drawn, strict=True):
                writer.add(f"{split}-{name}", rows)
        return {}

    return in_memory(fill)


def levels(images: np.ndarray, colours: int, of: np.ndarray) -> np.ndarray:
    """Levels of grey of images ``[m h w]``, 0 to colours - 1, which are equally frequent in the images `of`.

    Examples:
        >>> levels(np.array([[[0, 9, 5, 200]]]), 2, np.array([[[1, 9, 200, 200]]])).tolist()
        [[[0, 0, 0, 1]]]
    """
    bounds = np.quantile(of, np.arange(1, colours) / colours)
    return bounds.searchsorted(images).astype(np.uint8)


def draw_scenes(
    random: np.random.Generator,
    count: int,
    views: int,
    side: int,
    tiles: int,
    colours: int,
    pictures: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random scenes.

    Args:
        views: Images of a scene.
        side: Height and width of an image in pixels.
        tiles: Tiles along an edge of a wall.
        pictures: Tiles of images ``[m tiles tiles]`` uint8, of which each wall has a random one; None for random colours.

    Returns:
        Colours of pixels ``[n views side side]`` uint8, camera-to-world matrices ``[n views 4 4]`` float64 (x right, y down,
        z forward), and focal lengths in widths of an image ``[n views]`` float64.

    Examples:
        >>> pixels, poses, focal = draw_scenes(np.random.default_rng(0), 3, 2, 5, 2, 6)
        >>> pixels.shape, poses.shape, focal.shape
        ((3, 2, 5, 5), (3, 2, 4, 4), (3, 2))
    """
    if pictures is None:
        walls = random.integers(colours, size=(count, 6, tiles, tiles), dtype=np.uint8)
    else:
        walls = pictures[random.integers(len(pictures), size=(count, 6))]
    yaw = random.uniform(-math.pi, math.pi, (count, 1)) + random.uniform(-YAW, YAW, (count, views))
    pitch = random.uniform(-PITCH, PITCH, (count, views))
    focal = random.uniform(*FOCAL, (count, views))
    centre = random.uniform(-APART, APART, (count, views, 3))
    rotation = _rotation(yaw, 1) @ _rotation(pitch, 0)
    pixels = _seen(walls, rotation, centre, focal, side)
    frame, upper = np.linalg.qr(random.normal(size=(count, 3, 3)))
    frame *= np.sign(np.diagonal(upper, axis1=1, axis2=2))[:, None]  # uniform among rotations and reflections
    frame *= np.linalg.det(frame)[:, None, None]
    poses = np.zeros((count, views, 4, 4))
    poses[..., :3, :3], poses[..., 3, 3] = frame[:, None] @ rotation, 1
    poses[..., :3, 3] = np.einsum("nij,nvj->nvi", frame, centre)
    return pixels, poses, focal


def rays(poses: np.ndarray, focal: np.ndarray, side: int) -> np.ndarray:
    """Rays through the centres of pixels in Plücker coordinates: unit direction d, then moment o x d of the camera's centre.

    Args:
        poses: Camera-to-world matrices ``[n views 4 4]``.
        focal: Focal lengths in widths of an image ``[n views]``.
        side: Height and width of an image in pixels.

    Returns:
        Rays ``[n views side side 6]`` float64 in the frame of the first camera, which no frame of the world changes.
    """
    poses = np.linalg.inv(poses[:, :1]) @ poses
    direction = _directions(poses[..., :3, :3], focal, side)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    return np.concatenate((direction, np.cross(poses[:, :, None, None, :3, 3], direction)), -1)


def _directions(rotation: np.ndarray, focal: np.ndarray, side: int) -> np.ndarray:
    """Directions from cameras to the centres of pixels ``[n views side side 3]``, of length 1 along the view."""
    y, x = np.meshgrid(*[(np.arange(side) + 0.5) / side - 0.5] * 2, indexing="ij")
    inverse = 1 / focal[..., None, None]
    seen = np.stack(np.broadcast_arrays(x * inverse, y * inverse, 1.0), -1)
    return np.einsum("nvij,nvyxj->nvyxi", rotation, seen)


def _rotation(angle: np.ndarray, axis: int) -> np.ndarray:
    """Rotations ``[... 3 3]`` by angles ``[...]`` around an axis of coordinates."""
    first, second = (axis + 1) % 3, (axis + 2) % 3
    matrix = np.zeros((*angle.shape, 3, 3))
    matrix[..., axis, axis] = 1
    matrix[..., first, first] = matrix[..., second, second] = np.cos(angle)
    matrix[..., second, first], matrix[..., first, second] = np.sin(angle), -np.sin(angle)
    return matrix


def _seen(walls: np.ndarray, rotation: np.ndarray, centre: np.ndarray, focal: np.ndarray, side: int) -> np.ndarray:
    """Colours of pixels ``[n views side side]``: of the tile where the ray through a pixel's centre leaves the room."""
    rays = _directions(rotation, focal, side)
    far = (np.sign(rays) - centre[:, :, None, None]) / rays  # along the ray to the wall of each axis
    axis = far.argmin(-1)
    hit = centre[:, :, None, None] + rays * far.min(-1, keepdims=True)
    forward = np.take_along_axis(rays, axis[..., None], -1)[..., 0] > 0
    tile = np.take_along_axis(hit, AXES[axis], -1)
    row, column = np.moveaxis(np.clip(((tile + 1) / 2 * walls.shape[-1]).astype(int), 0, walls.shape[-1] - 1), -1, 0)
    return walls[np.arange(len(walls))[:, None, None, None], 2 * axis + forward, row, column]
