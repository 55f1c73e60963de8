"""Positions of the patches of images at any resolution, and of text with the frames of videos."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from isopos.catalog import at_least, expect

Layout = Literal["grid", "diagonal", "corners"]
COLUMNS = {"grid": 3, "diagonal": 3, "corners": 4}


def patches(
    *sizes: int,
    shift: float = 0.0,
    jitter: float = 1.0,
    rescale: float = 1.0,
    samples: int | None = None,
    outside: int = 0,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions of an image's patches on a box of one size for every resolution: float64 ``[n c]``, rows before columns.

    On each axis the centres of patches are from -1 to 1, times 2 pi, so that a pair of frequency 1 makes two turns over the
    image whatever its number of patches. DINOv3 is ``rope_axial(head_dim, base=100, layout="half")`` at these positions.
    In training the box moves, stretches and grows by `shift`, `jitter` and `rescale`, in this order; without them positions
    are the positions of evaluation. DINOv3's checkpoints were trained with ``rescale=2``.

    Args:
        sizes: Number of patches on each axis: height and width; 1 or more axes.
        shift: Largest shift of the box on each axis, as a fraction of half its side; the shift is uniform.
        jitter: Largest factor of each axis, at least 1; its logarithm is uniform.
        rescale: Largest factor of all axes together, at least 1; its logarithm is uniform.
        samples: Draw this many boxes: ``[samples n c]``. By default one, ``[n c]``.
        outside: Class and register tokens, the first rows: at the origin, where nothing rotates.
        generator: Random numbers, on the CPU; PyTorch's default one otherwise.
        device: Device of the result.

    Raises:
        ValueError: For a size below 1, a negative shift, or a factor below 1.

    References:
        DINOv3 (Siméoni et al. 2025), by its code in transformers. https://arxiv.org/abs/2508.10104

    Examples:
        >>> (patches(1, 2) / torch.pi).tolist()
        [[0.0, -1.0], [0.0, 1.0]]
        >>> patches(4, 4, rescale=2.0, samples=3).shape
        torch.Size([3, 16, 2])
    """
    counts = [at_least("size", n) for n in sizes]
    if not counts:
        raise ValueError("sizes: expected at least one axis, got none")
    if not 0 <= shift < math.inf:
        raise ValueError(f"shift: expected a number from 0 on, as a fraction of half the side, got {shift}")
    for name, most in (("jitter", jitter), ("rescale", rescale)):
        if not 1 <= most < math.inf:
            raise ValueError(f"{name}: expected the largest factor, from 1 on, got {most}")
    sides = [(2 * torch.arange(n, dtype=torch.float64, device="cpu") + 1) / n - 1 for n in counts]
    x = torch.cartesian_prod(*sides).view(-1, len(counts))

    def draw(width: int) -> Tensor:
        """Uniform numbers from -1 to 1, ``[*samples 1 width]``."""
        shape = (1, width) if samples is None else (at_least("samples", samples), 1, width)
        return 2 * torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") - 1

    if shift:
        x = x + shift * draw(len(counts))
    if jitter > 1:
        x = x * (math.log(jitter) * draw(len(counts))).exp()
    if rescale > 1:
        x = x * (math.log(rescale) * draw(1)).exp()
    if samples is not None:
        x = x.expand(at_least("samples", samples), -1, -1)
    first = x.new_zeros(*x.shape[:-2], at_least("outside", outside, 0), len(counts))
    return torch.cat((first, 2 * math.pi * x), -2).to(device)


def frames(
    *parts: int | tuple[int, int, int],
    layout: Layout = "diagonal",
    spacing: float = 1.0,
    start: float = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions of text, images and videos in one sequence, for `isopos.mrope`: ``[n 3]``, or ``[n 4]`` for "corners".

    An integer is a number of text tokens, whose coordinates are equal and count on. A tuple (frames, height, width) is a
    video, or an image with 1 frame, row by row. Positions are int64, or float64 if `spacing` or `start` is no integer.

    - "grid": (time, row, column) from the video's start on; text goes on after the largest coordinate. With
      ``mrope(...)`` this is Qwen2-VL's M-RoPE.
    - "diagonal": rows and columns count from the middle of each frame, whose coordinates all are the frame's time; text goes
      on one step after the last frame. With ``mrope(time="slow")`` this is VideoRoPE, with ``mrope(time="none")`` HoPE.
    - "corners": the distances of each patch from the four corners of its frame, along its sides; a frame begins where the
      one before it ends. With ``mrope(sections=[n, n, n, n], interleaved=True)`` this is VRoPE.

    Args:
        parts: In the order of tokens.
        layout: See above.
        spacing: Steps of time from one frame to the next: 2 in VideoRoPE. HoPE draws it in training from 0.5, 0.75, 1, 1.25
            and 1.5, for each video, and chooses it by the length of the video otherwise. "corners" has 1.
        start: Position of the first token.
        device: Device of the result.

    Raises:
        ValueError: For other parts, an unknown layout, or a spacing that the layout does not have.

    References:
        - VideoRoPE (Wei et al. 2025), with the rounding of its code. https://arxiv.org/abs/2502.05173
        - HoPE (Li et al. 2025) and its code. https://arxiv.org/abs/2505.20444
        - VRoPE (Liu et al. 2025) and its code. https://arxiv.org/abs/2502.11664

    Examples:
        >>> frames(1, (2, 1, 2), 1, spacing=2).tolist()
        [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3], [3, 3, 4], [4, 4, 4]]
        >>> frames((1, 2, 2), 1, layout="corners").tolist()
        [[0, 1, 1, 2], [1, 0, 2, 1], [1, 2, 0, 1], [2, 1, 1, 0], [3, 3, 3, 3]]
    """
    expect("layout", layout, get_args(Layout))
    if not 0 < spacing < math.inf:
        raise ValueError(f"spacing: expected a positive number of steps from one frame to the next, got {spacing}")
    if layout == "corners" and spacing != 1:
        raise ValueError(f"spacing: expected 1 with layout corners, whose frames follow each other, got {spacing}")
    if not math.isfinite(start):
        raise ValueError(f"start: expected the position of the first token, got {start}")
    whole = float(spacing).is_integer() and float(start).is_integer()
    dtype, step = (torch.int64, int(spacing)) if whole else (torch.float64, float(spacing))
    columns, at, pieces = COLUMNS[layout], int(start) if whole else float(start), []
    for part in parts:
        if isinstance(part, tuple):
            if len(part) != 3:
                raise ValueError(f"parts: expected (frames, height, width) of a video, got {part}")
            x = _video(
                [at_least(name, n) for name, n in zip(("frames", "height", "width"), part, strict=True)], layout, step
            )
            after = (x[-1, 0] if layout == "diagonal" else x.max()).item()
        else:
            x = torch.arange(at_least("text", part, 0), device="cpu")[:, None].expand(-1, columns)
            after = part - 1
        pieces.append(x.to(dtype) + at)
        at = at + after + 1
    if not pieces:
        raise ValueError("parts: expected numbers of text tokens and (frames, height, width) of videos, got none")
    return torch.cat(pieces).to(device)


def _video(sizes: list[int], layout: Layout, step: float) -> Tensor:
    """Positions ``[t*h*w c]`` of one video that starts at 0."""
    counts = [torch.arange(n, device="cpu") for n in sizes]
    time, row, column = torch.cartesian_prod(*counts).unbind(-1)
    _, height, width = sizes
    if layout == "corners":
        sides = (row, height - 1 - row), (column, width - 1 - column)
        first = time * (height + width - 1)
        return torch.stack([first + down + right for down in sides[0] for right in sides[1]], -1)
    time = time * step if isinstance(step, int) else time.double() * step
    if layout == "diagonal":
        row, column = time + row - (height - 1) // 2, time + column - (width - 1) // 2
    return torch.stack((time, row.to(time), column.to(time)), -1)
