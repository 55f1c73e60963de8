"""Test all ways of decoding against the definition, for structures of schemes combined with the other choices."""

import itertools

import pytest
import torch
from cases import DEFINITIONS, HEAD_DIM, HEADS, SCHEMES, SchemeCase, over_pairs, perturb, stream
from structures import ENCODINGS_ALONE, structures

from isopos.positions import sequence
from isopos.stream import Stream

FEATURES, LENGTH, SAMPLES = 16, 5, 2
DENOMINATORS = "plain", "encoded", "complex", "none"
FEATURE_MAPS = "elu+1", "identity", "favor"  # a kernel's own, none, and one that no kernel of steps has
ALL_FEATURE_MAPS = (*FEATURE_MAPS, "relu", "relu2", "exp")
DECAYS = "none", "retnet", "forget"
NOISE = 64  # times what roundings of the inputs do to the definition


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def streams_of(case: SchemeCase) -> list[str]:
    """Kinds of attention that can decode, for positions that increase by one."""
    return [kind for kind in case.kinds if case.group.columns == 1 and case.streams(kind)]


ROWS = [
    (own.case, own.kind)
    for own in structures([*SCHEMES, *ENCODINGS_ALONE], "feature_map", "denominator", "decay")
    if own.kind in streams_of(own.case)
]


def choices_of(kind, feature_maps):
    """Options of schemes: all combinations, or combinations of decays and denominators, each with another feature map."""
    if kind == "softmax":
        yield from ({"attention": kind, "decay": decay} for decay in DECAYS)
        return
    for denominator, other in zip(DENOMINATORS, itertools.cycle(feature_maps[1:]), strict=False):
        pairs = [*((feature_maps[0], decay) for decay in DECAYS), (other, "none")]
        pairs = itertools.product(feature_maps, DECAYS) if feature_maps is ALL_FEATURE_MAPS else pairs
        for phi, decay in pairs:
            yield {"attention": kind, "denominator": denominator, "feature_map": phi, "decay": decay}


def built(case, options):
    """A scheme with these options; None if it does not take them."""
    try:
        scheme = case.build(FEATURES if case.name else HEAD_DIM, HEADS, **options)
    except ValueError as error:
        if str(error).split(":")[0] not in options:  # no refusal of one of these
            raise
        return None
    assert scheme.choices | options == scheme.choices
    return perturb(scheme)


def definition(scheme, given):
    at = scheme.at(sequence(LENGTH), dtype=torch.float64)
    return DEFINITIONS[scheme.attention](*given, **at, causal=True)


def tolerance(scheme, given, expected, dtype):
    """A multiple of the effect of rounding inputs to float32, where sums may vanish, and few roundings of the output."""
    draw, eps = torch.Generator().manual_seed(1), torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    moved = 0.0
    for _ in range(2):
        near = [x * (1 + eps * torch.randn(x.shape, generator=draw, dtype=x.dtype)) for x in given]
        moved = max(moved, (definition(scheme, near) - expected).abs().max().item())
    return NOISE * (moved + eps * expected.abs().max().item()) + 2 * torch.finfo(dtype).eps * expected.abs().max().item()


def ways(scheme, given):
    """Outputs of all tokens, by way of decoding."""
    tokens, chunks, x = Stream(scheme), Stream(scheme), sequence(LENGTH)
    yield "tokens", torch.cat([tokens(*(a[..., i : i + 1, :] for a in given)) for i in range(LENGTH)], -2)
    pieces = [slice(0, 2), slice(2, 3), slice(3, LENGTH)]  # of a chunk's plan, and of a token's that comes between
    yield "chunks of a stream", torch.cat([chunks(*(a[..., piece, :] for a in given)) for piece in pieces], -2)
    yield "chunks", stream(scheme, given, x, (0, 1, 3, LENGTH))[0]
    if given[0].dtype == torch.float32:
        yield "states", stream(scheme, given, x, range(LENGTH + 1))[0]
        start, state = stream(scheme, given, x, (0, 2))
        middle = Stream(scheme, state, length=2)
        outs = [middle(*(a[..., i : i + 1, :] for a in given)) for i in (2, 3)]
        yield "between states", torch.cat((start, *outs, stream(scheme, given, x, (4, 5), state=middle.state)[0]), -2)


def decodes(case, options, dtype):
    """Compare all ways of decoding; returns whether the scheme supports these options."""
    torch.manual_seed(0)  # whichever rows come before
    if (scheme := built(case, options)) is None:
        return False
    width, draw = scheme.encoding.features, torch.Generator().manual_seed(0)
    widths = width, width, width // scheme.width
    drawn = [torch.randn(SAMPLES, HEADS, LENGTH, e, generator=draw, dtype=torch.float64) for e in widths]
    drawn[0] += 0.5  # denominators of other signs vanish less often
    drawn[1] += 0.5
    given = [x.to(dtype) for x in drawn]
    exact = [x.double() for x in given]
    expected = definition(scheme, exact)
    most = tolerance(scheme, exact, expected, dtype)
    for name, out in ways(scheme, given):
        assert out.dtype == dtype
        error = (out.double() - expected).abs().max().item()
        assert error <= most, f"{case.id}, {options}, {dtype}, {name}: {error} beside {most}"
    return True


def some_of(case, kind):
    """Run every fifth choice in float32, which has all ways of decoding, and in alternating other dtypes.

    Five adjacent structures share all choices, so each choice runs with every fifth structure, and each with all decays.
    """
    pairs = list(zip(choices_of(kind, FEATURE_MAPS), itertools.cycle((torch.float64, torch.bfloat16)), strict=False))
    chosen = pairs[ROWS.index((case, kind)) % 5 :: 5] if kind == "linear" else pairs
    return [decodes(case, choices, dtype) for choices, other in chosen for dtype in (torch.float32, other)]


@over_pairs(ROWS)
def test_every_structure(case, kind):
    assert any(some_of(case, kind))


@pytest.mark.slow
@over_pairs(ROWS)
def test_every_structure_with_a_ninth_of_all_choices(case, kind):
    """Nine adjacent structures share all choices, so each choice runs with every ninth structure."""
    choices = list(choices_of(kind, ALL_FEATURE_MAPS))
    chosen = choices[ROWS.index((case, kind)) % 9 :: 9] if kind == "linear" else choices
    for options, other in zip(chosen, itertools.cycle((torch.float64, torch.bfloat16)), strict=False):
        for dtype in (torch.float32, other):
            decodes(case, options, dtype)
