"""Test positions of patches and frames against the released code of DINOv3, VideoRoPE, HoPE and VRoPE."""

import math

import pytest
import torch
from cases import close, each, inputs

import isopos
from isopos import schemes

HEIGHT, WIDTH = 3, 4


def centres(height, width):
    """DINOv3's coordinates of patches, from -1 to 1."""
    rows, columns = (torch.arange(0.5, n, dtype=torch.float64) / n for n in (height, width))
    return 2 * torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1) - 1


def halves_turned(x, angle):
    """x cos + (-x_2, x_1) sin for angles ``[t d/2]`` of the pairs (i, i + d/2)."""
    first, second = x.chunk(2, -1)
    return x * angle.cos().tile(2) + torch.cat((-second, first), -1) * angle.sin().tile(2)


def scores(scheme, q, k, x):
    rho = scheme.encoding(x, torch.float64)
    return rho(q) @ rho(k).mT


def test_patches_are_those_of_dinov3():
    q, k, _ = inputs(t=HEIGHT * WIDTH, d=16)
    speed = 1 / 100.0 ** torch.arange(0, 1, 4 / 16, dtype=torch.float64)
    angle = (2 * math.pi * centres(HEIGHT, WIDTH)[:, :, None] * speed).flatten(1, 2)
    expected = halves_turned(q, angle) @ halves_turned(k, angle).mT
    close(scores(schemes.rope_axial(16, base=100, layout="half"), q, k, isopos.patches(HEIGHT, WIDTH)), expected)


@pytest.mark.oracles
def test_patches_are_those_of_transformers():
    from transformers.models.dinov3_vit import modeling_dinov3_vit as dino

    config = dino.DINOv3ViTConfig(hidden_size=64, num_attention_heads=4, patch_size=2, image_size=8, num_hidden_layers=1)
    cos, sin = dino.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 2 * HEIGHT, 2 * WIDTH))
    q, k, _ = inputs(1, t=5 + HEIGHT * WIDTH, d=16, dtype=torch.float32)  # a class token and 4 registers are first
    turned = dino.apply_rotary_pos_emb(q, k, cos, sin)
    rho = schemes.rope_axial(16, base=config.rope_theta, layout="half").encoding(isopos.patches(HEIGHT, WIDTH, outside=5))
    close(rho(q) @ rho(k).mT, turned[0] @ turned[1].mT)


def test_a_box_moves_stretches_and_grows_by_what_is_drawn():
    size, samples = (5, 7), 400
    still = isopos.patches(*size)
    drawn = torch.Generator().manual_seed(0)
    given = {"samples": samples, "generator": drawn}
    shift = isopos.patches(*size, shift=0.5, **given) - still
    close(shift, shift[:, :1].expand_as(shift))
    assert 0.9 * math.pi < shift.abs().max() <= math.pi
    assert (shift[:, 0, 0] - shift[:, 0, 1]).abs().max() > 0.1  # a shift of its own on each axis
    whole, each_axis = (isopos.patches(*size, **{name: 2.0}, **given) / still for name in ("rescale", "jitter"))
    for factor in (whole, each_axis):
        factor = factor[:, still.ne(0).all(-1)]
        close(factor, factor[:, :1].expand_as(factor))
        assert 0.5 <= factor.min() < 0.52
        assert 1.96 < factor.max() <= 2
        assert abs(factor.log().mean()) < 0.1  # uniform in the logarithm, so that 1/2 is as likely as 2
    close(whole[:, 0, 0], whole[:, 0, 1])
    assert (each_axis[:, 0, 0] - each_axis[:, 0, 1]).abs().max() > 0.1


def test_an_image_of_another_resolution_has_the_same_box():
    fine, coarse = (isopos.patches(n, n).view(n, n, 2) for n in (8, 4))
    close(fine.unflatten(1, (4, 2)).unflatten(0, (4, 2)).mean((1, 3)), coarse)
    outside = isopos.patches(2, 2, outside=3, shift=0.5, samples=2)
    assert outside.shape == (2, 7, 2)
    assert not outside[:, :3].any()
    seeds = [isopos.patches(2, 2, rescale=2.0, generator=torch.Generator().manual_seed(n)) for n in (1, 1, 2)]
    assert seeds[0].equal(seeds[1])
    assert not seeds[0].equal(seeds[2])
    assert isopos.patches(3).shape == (3, 1)


def video_of_videorope(text, sizes, after, scale):
    """VideoRoPE's position ids (time, height, width) for text, a video, text."""
    t, h, w = sizes
    before = torch.arange(text).expand(3, -1)
    time = torch.arange(t).view(-1, 1).expand(-1, h * w).flatten() * scale + text
    rows = torch.arange(h).view(1, -1, 1).expand(t, -1, w).flatten() - (h - 1) // 2 + time
    columns = torch.arange(w).view(1, 1, -1).expand(t, h, -1).flatten() - (w - 1) // 2 + time
    last = (torch.arange(after) + time.max() + 1).expand(3, -1)
    return torch.cat((before, torch.stack((time, rows, columns)), last), 1)


@each("scale", [1, 2, 0.75, 1.5])
@each("sizes", [(2, 3, 4), (3, 2, 2), (1, 1, 1), (4, 5, 1)])
def test_the_diagonal_is_that_of_videorope_and_hope(scale, sizes):
    expected = video_of_videorope(5, sizes, 3, scale).T
    found = isopos.frames(5, sizes, 3, spacing=scale)
    close(found.double(), expected.double())
    assert found.dtype == (torch.int64 if scale in (1, 2) else torch.float64)


@each("time", ["slow", "none"])
def test_pairs_are_those_of_videorope_and_hope(time):
    """16 + 24 + 24 of 64 pairs: height and width alternate over the fastest 48. Time has the others, or no rotation."""
    q, k, _ = inputs(t=12, d=128)
    x = isopos.frames(2, (2, 2, 2), 2, spacing=2)
    angle = x[None].double() * 10000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)[:, None, None]  # [f t 3]
    chosen = [angle[n, :, 1 + n % 2] if n < 48 else angle[n, :, 0] * (time == "slow") for n in range(64)]
    turned = [halves_turned(a, torch.stack(chosen, -1)) for a in (q, k)]
    close(scores(schemes.mrope(128, time=time, layout="half"), q, k, x), turned[0] @ turned[1].mT)


def test_corners_are_those_of_vrope():
    """Coordinates are sums of both directions of each axis, frame after frame; pairs alternate between them."""
    t, h, w = 3, 2, 4
    rows, columns = torch.arange(h)[:, None].expand(h, w), torch.arange(w).expand(h, w)
    both = [(rows, rows.flip(0)), (columns, columns.flip(1))]
    frame = torch.stack([a + b for a in both[0] for b in both[1]]).flatten(1)  # [4 h*w]
    video = (frame + (torch.arange(t) * (h + w - 1))[:, None, None]).movedim(1, 0).flatten(1)
    found = isopos.frames(6, (t, h, w), 2, layout="corners")
    assert found[6:-2].T.equal(video + 6)
    assert found[:6].equal(torch.arange(6)[:, None].expand(-1, 4))
    assert found[-2:, 0].tolist() == [6 + t * (h + w - 1), 7 + t * (h + w - 1)]
    q, k, _ = inputs(t=len(found), d=16)
    angle = torch.stack([found[:, n % 4].double() * 10000.0 ** (-n / 8) for n in range(8)], -1)
    turned = [halves_turned(a, angle) for a in (q, k)]
    scheme = schemes.mrope(16, sections=[2, 2, 2, 2], interleaved=True, layout="half")
    close(scores(scheme, q, k, found), turned[0] @ turned[1].mT)


def test_a_grid_is_that_of_qwen():
    """Text goes on after the largest coordinate of an image."""
    found = isopos.frames(2, (1, 2, 3), 1, (2, 2, 2), 1, layout="grid")
    assert found[:2].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert (found[2:8] - 2).equal(isopos.grid(1, 2, 3))
    assert found[8].tolist() == [5, 5, 5]
    assert (found[9:17] - 6).equal(isopos.grid(2, 2, 2))
    assert found[17].tolist() == [8, 8, 8]


@each("layout", ["grid", "diagonal", "corners"])
def test_a_sequence_goes_on_where_it_ended(layout):
    """The next chunk of a stream has the positions of a separate sequence plus an offset."""
    whole, first = (isopos.frames(*parts, layout=layout) for parts in ((3, (2, 3, 2), 4), (3, (2, 3, 2))))
    rest = isopos.frames(4, layout=layout, start=int(whole[-4, 0]))
    assert torch.cat((first, rest)).equal(whole)
    assert isopos.frames(4, layout=layout).equal(isopos.sequence(4).expand(-1, whole.shape[-1]))


@each(
    ("call", "message"),
    [
        (lambda: isopos.patches(), "sizes: expected at least one axis, got none"),
        (lambda: isopos.patches(4, 0), "size: expected an integer of at least 1, got 0"),
        (lambda: isopos.patches(4, 4, shift=-0.1), "shift: expected a number from 0 on"),
        (lambda: isopos.patches(4, 4, rescale=0.5), "rescale: expected the largest factor, from 1 on, got 0.5"),
        (lambda: isopos.patches(4, 4, jitter=math.inf), "jitter: expected the largest factor, from 1 on, got inf"),
        (lambda: isopos.patches(4, 4, outside=-1), "outside: expected an integer of at least 0, got -1"),
        (lambda: isopos.patches(4, 4, samples=0), "samples: expected an integer of at least 1, got 0"),
        (lambda: isopos.frames(), "parts: expected numbers of text tokens"),
        (lambda: isopos.frames((1, 2)), r"parts: expected \(frames, height, width\) of a video, got \(1, 2\)"),
        (lambda: isopos.frames((1, 0, 2)), "height: expected an integer of at least 1, got 0"),
        (lambda: isopos.frames(-1), "text: expected an integer of at least 0, got -1"),
        (lambda: isopos.frames(1, layout="corner"), "layout: expected one of grid, diagonal, corners.*did you mean corners"),
        (lambda: isopos.frames(1, spacing=0), "spacing: expected a positive number of steps"),
        (lambda: isopos.frames(1, layout="corners", spacing=2), "spacing: expected 1 with layout corners"),
        (lambda: schemes.mrope(8, time="fastest"), "time: expected one of fast, slow, none"),
        (lambda: schemes.mrope(8, time="slow", interleaved=True), "interleaved: expected False where time has the slowest"),
        (lambda: schemes.mrope(8, time="slow", sections="1+1+2"), r"as many of width as of height or one less.*\[1, 1, 2\]"),
        (lambda: schemes.mrope(8, time="none", sections="2+2"), r"sections: expected pairs of time, height and width"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
