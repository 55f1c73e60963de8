"""Arguments of the Triton kernels of linear attention: tensors with strides, and sizes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A tensor ``[outer inner head token .]`` with strides; the last axis is contiguous."""

    first: Any
    outer: int
    inner: int
    head: int
    token: int


class Inputs(NamedTuple):
    """Inputs of targets or sources with their feature map; None for absent tensors."""

    x: Rows | None  # None without sources, since Triton 3.6 cannot compare a tuple with None
    table: Rows | None  # pairs (cos, sin), or an index; None for sources that share the table of targets
    normal: Rows | None
    mask: Rows | None
    g: Rows | None  # log decays, float64; None with borders: those only separate segments
    neg_grad: Rows | None  # negative gradients of denominators, which weigh rows in sums of features
    end: Any = None  # Triton 3.6 needs a constant after the fields of a tuple


class Values(NamedTuple):
    """Rows of values."""

    x: Rows
    mask: Rows | None


class Grads(NamedTuple):
    """Destinations of gradients of targets; None for tensors without a gradient."""

    x: Rows
    plain: Rows | None  # of unrotated features, if a gather reads x in another order
    table: Rows | None
    decay: Rows | None  # one number per block of features
    v: Rows | None  # of values, if computed together with gradients of keys
    normal: Any  # one sum per program ``[. width]``
    end: Any = None  # as in `Inputs`


class Varying(NamedTuple):
    """Numbers of a launch that vary with lengths and batches."""

    length: int
    inner: int
    chunks: int
    segments: int


class Sizes(NamedTuple):
    """Sizes of a launch that do not vary with lengths and batches. Masks and addresses are faster for multiples of 16."""

    width: Any  # numbers of x
    features: Any
    columns: Any  # values
    feature_sum: Any  # features summed for a denominator
    heads: Any
    blocks: Any  # blocks of features or values; their programs are neighbours, since they read the same tensors
    part: Any  # index of a launch: a part of features in `outputs`, of values in `gradients`; results are added


class LaunchShape(NamedTuple):
    """`Sizes`, and numbers for which Triton compiles no variant."""

    width: Any
    features: Any
    columns: Any
    feature_sum: Any
    heads: Any
    blocks: Any
    part: Any
    length: Any  # tokens
    inner: Any  # samples of the inner axis
    chunks: Any  # per segment
    segments: Any
    states: Any  # read per head: one per segment, or one


def rows(x: Tensor, leading: torch.Size) -> Rows:
    """The strides of x ``[*b h t .]``, or broadcastable to it."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    x = x.expand(*leading, *x.shape[-2:])
    x = x.flatten(0, len(leading) - 3) if len(leading) > 3 else x[(None,) * (3 - len(leading))]
    outer, inner, head, token, _ = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return Rows(x, outer, inner, head, token)


def padded(like: Tensor, leading: torch.Size, length: int, width: int = 1) -> Tensor:
    """Float32 numbers of tokens and some more: heads start at multiples of 16, so that Triton compiles one variant."""
    return like.new_empty(*leading, -(-length // 16) * 16, width, dtype=torch.float32)


def columns(like: Tensor, leading: torch.Size, length: int, width: int = 1) -> Tensor:
    """Such numbers of the tokens alone ``[*b h t .]``."""
    return padded(like, leading, length, width)[..., :length, :]
