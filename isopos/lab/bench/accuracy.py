"""How far rotary tables are from a float64 reference, ours beside other libraries': python -m isopos.lab.bench.accuracy."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from isopos import __version__
from isopos.positions import sequence
from isopos.schemes import REGISTRY

__all__ = ["FAR", "OURS", "PEERS", "SETTINGS", "Peer", "Setting", "absent", "accuracy", "errors", "pairs", "scores"]

HEAD_DIM, LENGTH = 64, 8192


class Peer(NamedTuple):
    """Another library's rotary embedding: rotates x ``[*b h t d]`` at the positions from `start` on, base 10000.

    Its module is cast to a dtype, if one is given.
    """

    package: str
    layout: str  # pairs are features 2i, 2i + 1 (interleaved) or i, i + d/2 (half)
    rotate: Callable[..., Tensor]  # x, start and, for a cast, a dtype
    longest: int = 2**62  # positions it reaches in a reasonable time


class Setting(NamedTuple):
    """Features of `dtype` at `LENGTH` positions from `start` on; `cast` casts the module to this dtype, too."""

    start: int
    dtype: torch.dtype
    cast: bool = False

    def __str__(self) -> str:
        power = "2^31" if self.start == 2**31 else f"10^{len(str(self.start)) - 1}"
        place = f"at {power}" if self.start else f"L = {LENGTH}"
        return f"{place}, {str(self.dtype).removeprefix('torch.')}{' module' * self.cast}"


SETTINGS = tuple(Setting(start, dtype) for dtype in (torch.float32, torch.float64) for start in (0, 10**6))
FAR = tuple(
    Setting(start, dtype, cast)
    for dtype, cast in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    for start in (10**4, 10**6, 2**31)
)


def _ours(x: Tensor, start: int, cast: torch.dtype | None = None) -> Tensor:
    scheme = REGISTRY["rope"](x.shape[-1], 1).to(cast)
    return scheme.at(sequence(x.shape[-2]) + start, dtype=x.dtype)["isometry"](x)


def _rotary_embedding_torch(x: Tensor, start: int, cast: torch.dtype | None = None) -> Tensor:
    peer = _module("rotary_embedding_torch").RotaryEmbedding(x.shape[-1]).to(cast)
    return peer.rotate_queries_or_keys(x, offset=start)


def _x_transformers(x: Tensor, start: int, cast: torch.dtype | None = None) -> Tensor:
    peer = _module("x_transformers.x_transformers")
    angles, _ = peer.RotaryEmbedding(x.shape[-1]).to(cast)(torch.arange(start, start + x.shape[-2]))
    return peer.apply_rotary_pos_emb(x, angles)


def _llama(x: Tensor, start: int, cast: torch.dtype | None = None) -> Tensor:
    peer = _module("transformers.models.llama.modeling_llama")
    config = _module("transformers.models.llama.configuration_llama").LlamaConfig(head_dim=x.shape[-1], rope_theta=10000.0)
    tables = peer.LlamaRotaryEmbedding(config).to(cast)(x, torch.arange(start, start + x.shape[-2])[None])
    return peer.apply_rotary_pos_emb(x, x, *tables)[0]


def _roformer(x: Tensor, start: int, cast: torch.dtype | None = None) -> Tensor:
    peer = _module("transformers.models.roformer.modeling_roformer")
    embedding = peer.RoFormerSinusoidalPositionalEmbedding(start + x.shape[-2], x.shape[-1])
    embedding.weight.data = embedding.create_weight()
    table = embedding.to(cast)((1, x.shape[-2]), past_key_values_length=start)
    return peer.RoFormerSelfAttention.apply_rotary_position_embeddings(table, x, x)[0]


def _module(name: str) -> Any:
    return importlib.import_module(name)


PEERS = {
    "rotary-embedding-torch": Peer("rotary-embedding-torch", "interleaved", _rotary_embedding_torch),
    "x-transformers": Peer("x-transformers", "interleaved", _x_transformers),
    "transformers Llama": Peer("transformers", "half", _llama),
    # a Python loop fills its table from position 0 on: at 10^6 and d = 64 that takes a minute or two and gigabytes
    "transformers RoFormer": Peer("transformers", "interleaved", _roformer, longest=2**16),
}
OURS = Peer("isopos", "interleaved", _ours)


def absent() -> list[str]:
    """Peers that are not installed."""
    return [name for name, peer in PEERS.items() if importlib.util.find_spec(peer.package.replace("-", "_")) is None]


def pairs(turned: Tensor) -> Tensor:
    """Cosines and sines as they are."""
    return turned


def scores(turned: Tensor) -> Tensor:
    """Scores of some 256 positions with each other, <rho(x) q, rho(y) k> where all pairs of q = k are equal and |q| = 1."""
    unit = turned[:: LENGTH // 256].flatten(1) / turned.shape[-2] ** 0.5
    return unit @ unit.T


def errors(
    peer: Peer = OURS, settings: Iterable[Setting] = SETTINGS, of: Callable[[Tensor], Tensor] = pairs
) -> dict[Setting, float]:
    """Largest error of a cosine or sine in each setting that the peer reaches: rotated unit features against a reference.

    With `of` it is the error of a function of the cosines and sines ``[t f 2]``, such as `scores`.
    """
    found = {}
    for setting in settings:
        if setting.start + LENGTH > peer.longest:
            continue
        x, cast = _unit_features(peer.layout, setting.dtype), (setting.dtype,) * setting.cast
        rotated = peer.rotate(x, setting.start, *cast)[0, 0].double()
        turned = rotated.unflatten(-1, (-1, 2)) if peer.layout == "interleaved" else rotated.unflatten(-1, (2, -1)).mT
        found[setting] = (of(turned) - of(_reference(setting.start))).abs().max().item()
    return found


def _unit_features(layout: str, dtype: torch.dtype) -> Tensor:
    """Features ``[1 1 t d]`` whose pairs are (1, 0), so that rotation shows cosine and sine without another rounding."""
    pair = torch.tensor([1, 0], dtype=dtype)
    x = pair.repeat(HEAD_DIM // 2) if layout == "interleaved" else pair.repeat_interleave(HEAD_DIM // 2)
    return x.expand(1, 1, LENGTH, -1)


def _reference(start: int) -> Tensor:
    """Cosines and sines ``[t f 2]`` in float64, by numpy from angles in its widest float."""
    count = HEAD_DIM // 2
    frequency = np.longdouble(10000) ** (-np.arange(count, dtype=np.longdouble) / count)
    angle = np.arange(start, start + LENGTH, dtype=np.longdouble)[:, None] * frequency
    return torch.from_numpy(np.stack((np.cos(angle), np.sin(angle)), -1).astype(np.float64))


def accuracy() -> Table:
    """The errors of isopos and of every peer that is installed; the caption names the others."""
    missing = absent()
    note = f"Largest error of a cosine or sine over {LENGTH} positions, d = {HEAD_DIM}; -: its table does not reach so far."
    table = Table(caption=f"{note}\nNot installed: {', '.join(missing)}." if missing else note, header_style="bold")
    for title in ("library", "version", *map(str, SETTINGS)):
        table.add_column(title, justify="left" if title in ("library", "version") else "right", overflow="fold")
    for name, peer in {"isopos": OURS, **PEERS}.items():
        if name not in missing:
            found = errors(peer)
            version = __version__ if peer is OURS else importlib.metadata.version(peer.package)
            table.add_row(name, version, *(f"{found[setting]:.1e}" if setting in found else "-" for setting in SETTINGS))
    return table


if __name__ == "__main__":
    Console().print(accuracy())
