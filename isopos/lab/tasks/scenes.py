"""Views of a room from known cameras: which colours does one more camera see?"""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data import scenes
from isopos.lab.data.arrays import Arrays
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Labelled
from isopos.lab.tasks.task import Metric, Recipe, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.positions import Group


@dataclass(frozen=True)
class Scenes(PositionedTask):
    """A model that sees some views of a room, pixel by pixel, and predicts the colours of one more view.

    The scheme determines the positions of pixels: cameras with rows and columns; views, rows and columns on a grid; rows and
    columns of a view alone; or one line through all views. The tokens are the same.
    """

    data: str = ""
    """Images, one folder per class, one of which is on each wall, in tiles of as many levels of grey as there are colours;
    empty: tiles of random colours. See docs/data.md."""
    context: int = 2  # Number of known views of a room.
    side: int = 5  # Height and width of a view in pixels, a token each.
    tiles: int = 2  # Tiles along an edge of a wall.
    colours: int = 6  # Number of colours.
    intrinsics: bool = True  # Whether cameras have focal lengths; otherwise poses alone.
    rays: bool = False  # Whether tokens also have the ray of their pixel, which tells pose and focal length.
    scenes: int = 20000  # Number of rooms for training.
    held_out: int = 500  # Number of rooms for validation, and for the test.

    name = "scenes"
    schemes = "none,rope,rope-axial,rope-axial:axes=3,prope"
    edits = MappingProxyType({"steps": 1000, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "rooms"
    counted = "rooms"
    limits = (
        ("context", 1, 100),
        (("side", "tiles"), 1, 256),
        ("colours", 2, 255),
        (("scenes", "held_out"), 1, 10**7),
    )
    axes, bound = 0, ("", "")  # checked below
    where = "of cameras, of a line, or of a grid of 2 or 3 axes, which pixels of views have"
    metrics = (
        Metric(
            "accuracy", "accuracy", "higher", ".1%", note="accuracy: share of the unseen view's pixels with their colour"
        ),
        Metric("nats", "nats", note="nats: cross-entropy of a pixel's colour"),
    )

    @property
    def tokens(self) -> int:
        """Tokens of a sample: the pixels of all views."""
        return (self.context + 1) * self.side**2

    @property
    def fits(self) -> dict[str, object]:
        return {"length": self.tokens, "reach": self.tokens}

    def setting(self, recipe: Recipe) -> str:
        return (
            f"An encoder that predicts a view of {self.side} x {self.side} pixels from {self.context} other views of a room."
        )

    def check_groups(self, recipe: Recipe) -> Any:
        scheme = super().check_groups(recipe)
        group, longest = scheme.group, scheme.max_length
        require("schemes", recipe.scheme, f"positions for {self.tokens} pixels", longest is None or longest >= self.tokens)
        if not (_of_cameras(group) or group.columns == 1 or (group.is_grid and group.columns <= 3)):
            raise ValueError(f"schemes: expected positions {self.where}, got {recipe.scheme}, of a {group.noun}")
        return scheme

    def model(self, recipe: Recipe) -> Any:
        """An encoder; the unknown colour is one more token after the colours. With rays, rows of numbers are the tokens."""
        return self.build(recipe, *(("Forecaster", self.colours + 6) if self.rays else ("Encoder", self.colours + 1)))

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "SceneSamples":
        counts = (self.scenes, self.held_out, self.held_out)
        pictures = _pictures(self, console) if self.data else None
        return SceneSamples(self, scenes.prepare(0, counts, self.context + 1, self.side, self.tiles, self.colours, pictures))


class SceneSamples(Labelled):
    """Rooms for training and evaluation: known views, and the view that is to be predicted, which comes last."""

    def __init__(self, task: Scenes, arrays: Arrays):
        self.task, self.arrays, self.sha256 = task, arrays, arrays.sha256
        self.name = task.data or "rooms with tiles, drawn"
        counts = {split: len(arrays[f"{split}-focal"]) for split in ("train", "validation", "test")}
        self.sizes = {split: np.full(count, task.tokens) for split, count in counts.items()}
        self.summary = f"{' + '.join(map(str, counts.values()))} rooms of {task.context + 1} views"

    def chance(self, recipe: Recipe) -> tuple[float, int] | None:
        """The share of the most frequent colour, and the number of rooms: colours of one room are not independent."""
        found = super().chance(recipe)
        return found and (found[0], len(self.spread("validation", self.limit)))

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens, positions ``[t c]`` or, of cameras, ``[b t 18]``, and the colours of the last view ``[b n]``.

        Tokens are colours ``[b t]``, or with rays rows of numbers ``[b t colours+6]``.
        """
        import torch

        from isopos.lab.tasks.build import group_of

        pixels = torch.from_numpy(self.arrays[f"{split}-pixels"][rows].astype(np.int64)).flatten(2)
        tokens, answers = pixels.clone(), pixels[:, -1]
        tokens[:, -1] = self.task.colours
        poses, focal = (torch.from_numpy(np.array(self.arrays[f"{split}-{name}"][rows])) for name in ("poses", "focal"))
        tokens = self._with_rays(tokens, poses, focal) if self.task.rays else tokens.flatten(1)
        return tokens, _positions(group_of(recipe), self.task, poses, focal), answers

    def _with_rays(self, tokens: "Tensor", poses: "Tensor", focal: "Tensor") -> "Tensor":
        """Rows ``[b t colours+6]`` of which the colours are 0, 1 or, if unknown, NaN, and the rest is the pixel's ray."""
        import torch

        colours = torch.nn.functional.one_hot(tokens.flatten(1), self.task.colours + 1).float()
        colours = colours.masked_fill(colours[..., -1:] == 1, torch.nan)[..., :-1]
        rays = torch.from_numpy(scenes.rays(poses.numpy(), focal.numpy(), self.task.side)).float()
        return torch.cat((colours, rays.flatten(1, 3)), -1)

    def labels(self, split: str) -> np.ndarray:
        return self.arrays[f"{split}-pixels"][:, -1]

    def logits(self, model: Any, *batch: "Tensor") -> "tuple[Tensor, Tensor]":
        """Logits ``[b*n colours]`` and colours ``[b*n]`` of the last view's pixels."""
        tokens, positions, answers = batch
        logits = model(tokens, positions)[:, -answers.shape[1] :, : self.task.colours]
        return logits.flatten(0, 1), answers.flatten()


def _pictures(task: Scenes, console: "Console | None") -> dict[str, np.ndarray]:
    """Levels of grey of images by split; without a test split its images are those of validation."""
    from isopos.lab.data.images import read_images

    images = read_images(task.data, task.tiles, task.tiles, grey=True, console=console)
    rows = {**images.splits, "test": images.splits["test" if len(images.splits["test"]) else "validation"]}
    train = images.pixels[np.sort(rows["train"]), 0]
    return {split: scenes.levels(images.pixels[np.sort(at), 0], task.colours, train) for split, at in rows.items()}


def _of_cameras(group: "Group") -> bool:
    from isopos.poses import Projective
    from isopos.positions import Product

    return isinstance(group, Product) and isinstance(group.parts[0], Projective) and group.columns == 18


def _positions(group: "Group", task: Scenes, poses: "Tensor", focal: "Tensor") -> "Tensor":
    import torch

    from isopos.poses import cameras
    from isopos.positions import grid, sequence

    side, views = task.side, task.context + 1
    if _of_cameras(group):
        K = torch.diag_embed(torch.stack((focal, focal, torch.ones_like(focal)), -1)) if task.intrinsics else None
        return cameras(poses, K, patches=(side, side))
    if group.columns == 3:
        return grid(views, side, side)
    return grid(side, side).repeat(views, 1) if group.columns == 2 else sequence(task.tokens)
