"""Errors of rotary tables against a float64 reference: of isopos, and of libraries that `benchmarks` adds."""

import importlib.metadata
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from isopos import __version__
from isopos.lab.bench.peers import Peer
from isopos.lab.reports import grids
from isopos.positions import sequence
from isopos.schemes import REGISTRY

HEAD_DIM, LENGTH = 64, 8192


class Setting(NamedTuple):
    """Features of `dtype` at `LENGTH` positions from `start` on; with `cast` the module has this dtype, too."""

    start: int
    dtype: torch.dtype
    cast: bool = False

    def __str__(self) -> str:
        power = "2^31" if self.start == 2**31 else f"10^{len(str(self.start)) - 1}"
        where = f"at {power}" if self.start else f"L = {LENGTH}"
        return f"{where}, {str(self.dtype).removeprefix('torch.')}{' module' * self.cast}"


SETTINGS = tuple(Setting(start, dtype) for dtype in (torch.float32, torch.float64) for start in (0, 10**6))
FAR = tuple(
    Setting(start, dtype, cast)
    for dtype, cast in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    for start in (10**4, 10**6, 2**31)
)


def _ours(module: ModuleType, x: Tensor, start: int, cast: torch.dtype | None) -> Callable[..., tuple[Tensor, Tensor]]:
    rho = REGISTRY["rope"](x.shape[-1], 1).to(cast).encoding(sequence(x.shape[-2]) + start, x.dtype)
    return lambda q, k: (rho(q), rho(k))


OURS = Peer("isopos", "isopos", _ours)
LIBRARIES = {"isopos": OURS}


def missing_peers() -> list[str]:
    """Names of the peers that cannot be imported."""
    return [name for name, peer in LIBRARIES.items() if peer.absence()]


def pairs(table: Tensor) -> Tensor:
    """Cosines and sines ``[t f 2]``, unchanged."""
    return table


def scores(table: Tensor) -> Tensor:
    """Scores ``<rho(x) q, rho(y) k>`` among 256 positions, for unit q = k whose pairs of features are all equal."""
    unit = table[:: LENGTH // 256].flatten(1) / table.shape[-2] ** 0.5
    return unit @ unit.T


def errors(
    peer: Peer = OURS, settings: Iterable[Setting] = SETTINGS, of: Callable[[Tensor], Tensor] = pairs
) -> dict[Setting, float]:
    """Largest error by setting of one library's rotation of unit features against the reference.

    Args:
        peer: The library, by default isopos.
        settings: Settings to measure; positions beyond the library's longest are left out.
        of: Function of the table of cosines and sines ``[t f 2]`` to compare, such as `scores`.
    """
    largest, interleaved = {}, peer.layout == "interleaved"
    unit = torch.tensor([1, 0]).expand(HEAD_DIM // 2, 2)  # its rotation is the cosine and sine, without further rounding
    unit = (unit if interleaved else unit.mT).flatten().expand(1, 1, LENGTH, -1)
    for setting in settings:
        if setting.start + LENGTH > peer.longest:
            continue
        x = unit.to(setting.dtype)
        rotated = peer.workload(x, setting.start, setting.dtype if setting.cast else None)(x, x)[0][0, 0].double()
        table = rotated.unflatten(-1, (-1, 2)) if interleaved else rotated.unflatten(-1, (2, -1)).mT
        largest[setting] = (of(table) - of(_reference(setting.start))).abs().max().item()
    return largest


def _reference(start: int) -> Tensor:
    """Cosines and sines ``[t f 2]`` in float64, from angles in numpy's longest float."""
    count = HEAD_DIM // 2
    frequency = np.longdouble(10000) ** (-np.arange(count, dtype=np.longdouble) / count)
    angle = np.arange(start, start + LENGTH, dtype=np.longdouble)[:, None] * frequency
    return torch.from_numpy(np.stack((np.cos(angle), np.sin(angle)), -1).astype(np.float64))


def accuracy() -> Table:
    """A table of the errors of isopos and of every installed peer; the caption names the missing ones."""
    missing = missing_peers()
    note = f"Largest error of a cosine or sine over {LENGTH} positions, d = {HEAD_DIM}; -: beyond its longest position."
    rows, titles = [], ("library", "version", *map(str, SETTINGS))
    for name, peer in LIBRARIES.items():
        if name not in missing:
            largest = errors(peer)
            version = __version__ if peer is OURS else importlib.metadata.version(peer.package)
            rows.append((name, version, *(f"{largest[key]:.1e}" if key in largest else "-" for key in SETTINGS)))
    caption = f"{note}\nNot installed: {', '.join(missing)}." if missing else note
    return grids.console_table(titles, rows, "ll".ljust(len(titles), "r"), caption=caption)
