"""Conversions of weights: a constant basis into projections, and projections between layouts of rotary embeddings."""

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from isopos.encodings import Encoding, Exponential, InBasis, Rotary
from isopos.exact import cast_down, to_float64
from isopos.maps import Chain, TokenMap
from isopos.ops.rotate import half_to_interleaved
from isopos.scheme import Scheme, expect_scheme


def absorb(scheme: Scheme, *projections: nn.Linear) -> Scheme:
    """Fold the scheme's constant basis into projections of queries and keys, in place, and return the scheme without it.

    P q = (P W) x: scores do not change, and attention no longer applies P. Learned angles remain parameters; a learned basis
    becomes part of the projections. An `Exponential` becomes a `Rotary` with its angles, since its basis is constant, too
    (APE, Appendix A; LRPE, Eq. 75). They are rounded to the dtype of its generator: from float32 ones scores change by some
    1e-4 at offsets of 10,000, from those of ``scheme.double()`` they do not.

    Args:
        scheme: A scheme of softmax attention, or with the identity feature map, because others do not commute with P.
        projections: The projections of queries and of keys of all layers, to heads * d features.

    Raises:
        ValueError: If there is no basis, or something between the projections and the basis or after it does not commute
            with it: a feature map, a bias, phases, transported values; nothing changes then.

    Examples:
        >>> import isopos
        >>> scheme, layer = isopos.ape_sequence(8, 2, attention="softmax"), torch.nn.Linear(16, 16)
        >>> type(absorb(scheme, layer).encoding).__name__
        'Rotary'
    """
    expect_scheme(scheme)
    if scheme.attention == "linear" and scheme.choices["feature_map"] != "identity":
        raise ValueError(
            f"scheme: expected softmax attention or the identity feature map, which commute with a basis, "
            f"got {scheme.choices['feature_map']}"
        )
    if not projections:
        raise ValueError("projections: expected the projections of queries and keys, got none")
    if scheme.bias is not None:
        raise ValueError(
            f"scheme: expected no bias, whose vectors would need the same basis, got {type(scheme.bias).__name__}"
        )
    if scheme.transport:
        raise ValueError("scheme: expected no transport, whose values would need the same basis, got transport=True")
    if scheme.phases:
        raise ValueError("scheme: expected no content-dependent phases, which would read keys in another basis, got some")
    if len({id(layer.weight) for layer in projections}) < len(projections):
        raise ValueError("projections: expected each layer's weight once, got one twice")
    basis, rest = _split_basis(scheme.encoding)
    device = next(basis.tensors()).device
    width = scheme.heads * scheme.encoding.features
    for layer in projections:
        if layer.weight.is_meta:
            raise ValueError("projections: expected weights, got a layer on the meta device; load them first")
        if layer.out_features != width:
            raise ValueError(f"projections: expected {width} outputs, {scheme.heads} heads, got {layer.out_features}")
    with torch.no_grad():
        for layer in projections:
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:  # rows as features of heads, in the layout of a map's input: [m h 1 d]
                    rows = to_float64(parameter, device).view(scheme.heads, scheme.encoding.features, -1).permute(2, 0, 1)
                    rotated = basis(rows[..., None, :]).squeeze(-2).permute(1, 2, 0)
                    parameter.copy_(cast_down(rotated.reshape(parameter.shape), parameter.dtype, parameter.device))
    absorbed = copy.copy(scheme)
    absorbed._modules = dict(scheme._modules)
    absorbed.encoding = rest
    absorbed._known = absorbed.origin = None  # another fingerprint
    return absorbed


@torch.no_grad()
def _split_basis(encoding: nn.Module) -> tuple[TokenMap, Encoding]:
    """The constant basis in float64, and the encoding without it."""
    if isinstance(encoding, InBasis) and encoding.basis.widening > 1:
        raise ValueError(
            f"scheme: expected a basis that returns as many features as it takes, got {type(encoding.basis).__name__}, "
            "so projections of this size cannot contain it"
        )
    if isinstance(encoding, InBasis):
        device = next((parameter.device for parameter in encoding.parameters()), None)
        return encoding.basis(device, torch.float64), encoding.encoding
    if isinstance(encoding, Exponential):
        chain = encoding(encoding.group.origin(1, device=encoding.parameter.device), torch.float64)
        assert isinstance(chain, Chain)
        learned = isinstance(encoding.parameter, nn.Parameter)
        rotary = Rotary(encoding.frequency()[:, None], learned=learned).to(encoding.parameter)
        rotary.reset_parameters()  # rounded once, to the dtype of the generator
        rotary.requires_grad_(encoding.parameter.requires_grad).train(encoding.training)
        rotary.extension = encoding.extension
        return chain.first, rotary
    raise ValueError(f"scheme: expected an encoding with a basis (InBasis, Exponential), got {type(encoding).__name__}")


def convert_layout(
    weight: Tensor, heads: int, *, to: Literal["interleaved", "half"], rotary_dim: int | None = None
) -> Tensor:
    """A projection of queries or keys in the other layout of rotary embeddings; scores do not change.

    Args:
        weight: Weight ``[h * d, m]`` or bias ``[h * d]`` in the other layout: pairs (i, i + d/2) of a head are "half", as
            in Llama's checkpoints, pairs (2i, 2i+1) "interleaved", as in RoFormer's and by default here.
        heads: h: number of query heads, or of key heads for the key projection.
        to: The layout of the result.
        rotary_dim: Number of rotated features per head, the first ones; all by default.

    Returns:
        A new tensor shaped as `weight`.

    Examples:
        >>> convert_layout(torch.tensor([0, 1, 2, 3]), 1, to="interleaved").tolist()
        [0, 2, 1, 3]
    """
    if not isinstance(weight, Tensor) or weight.ndim not in (1, 2):
        got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight: expected a tensor [heads * d, m] or [heads * d], got {got}")
    if to not in ("interleaved", "half"):
        raise ValueError(f"to: expected interleaved or half, got {to!r}")
    if heads < 1 or len(weight) % heads:
        raise ValueError(f"heads: expected a divisor of the {len(weight)} rows, got {heads}")
    features = len(weight) // heads
    rotated = features if rotary_dim is None else rotary_dim
    if not 0 < rotated <= features or rotated % 2:
        raise ValueError(f"rotary_dim: expected an even number up to {features}, got {rotated}")
    index = half_to_interleaved(rotated, device=weight.device)
    index = index if to == "interleaved" else index.argsort()
    index = torch.cat((index, torch.arange(rotated, features, device=weight.device)))
    return weight.unflatten(0, (heads, features))[:, index].flatten(0, 1)
