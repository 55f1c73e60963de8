"""Test cameras as positions: PRoPE by its formula, and invariance to the frame of the world."""

import pytest
import torch
from canonical import canonical
from cases import ATTENTION, HEADS, close, each, inputs

import isopos
from isopos import laws, schemes
from isopos.contragredient import Projection
from isopos.maps import Rotation, Tiles
from isopos.nn import Attention
from isopos.poses import Projective, cameras
from isopos.positions import sequence
from isopos.state import State

D, VIEWS, PATCHES = 16, 3, (2, 2)
T = VIEWS * PATCHES[0] * PATCHES[1]
K = torch.tensor([[300.0, 1.0, 330.0], [0.0, 310.0, 230.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
GROUP = Projective()
both = pytest.mark.parametrize("kind", ATTENTION)


def poses(*batch):
    """Random poses, from camera to world."""
    x = GROUP.random(*batch, VIEWS).unflatten(-1, (4, 4))
    pose = torch.eye(4, dtype=torch.float64).repeat(*batch, VIEWS, 1, 1)
    turned = torch.linalg.qr(x[..., :3, :3]).Q
    pose[..., :3, :3], pose[..., :3, 3] = turned * torch.linalg.det(turned)[..., None, None], x[..., :3, 3]
    return pose


def places(pose):
    return cameras(pose, K, size=(640, 480), patches=PATCHES)


# The group


def test_cameras_are_a_group_with_an_invariant_metric():
    x, y, z = (GROUP.random(2, n) for n in (5, 5, 5))
    one = GROUP.origin(2, 5)
    close(GROUP.compose(GROUP.compose(x, y), z), GROUP.compose(x, GROUP.compose(y, z)))
    close(GROUP.compose(x, GROUP.inverse(x)), one)
    close(GROUP.compose(one, x), x)
    distance = GROUP.distance(x, y)
    assert (distance > 0).all()
    close(GROUP.distance(x, x).diagonal(dim1=-2, dim2=-1), torch.zeros(2, 5, dtype=torch.float64))
    close(distance, GROUP.distance(y, x).mT)
    close(distance, GROUP.distance(GROUP.shift(z, x), GROUP.shift(z, y)))
    assert (GROUP.distance(x, z)[:, :, None] <= distance[..., None] + GROUP.distance(y, z)[:, None] + 1e-12).all()
    assert len(GROUP.arrange(9).unique(dim=0)) == 9
    GROUP.check(GROUP.arrange(9))


def test_a_camera_is_its_projection_inverted():
    """K [R t] maps a point of the world to image coordinates, relative to the image centre."""
    pose, point = poses()[0], torch.tensor([0.3, -0.2, 4.0, 1.0], dtype=torch.float64)
    seen = K @ (torch.linalg.inv(pose) @ point)[:3]
    pixel = seen[:2] / seen[2]
    found = torch.linalg.inv(cameras(pose[None], K, size=(640, 480)).view(4, 4)) @ point
    close(found[:2] / found[2], pixel / torch.tensor([640.0, 480.0]) - 0.5)
    close(cameras(pose[None]).view(4, 4), pose)
    x = places(poses())
    assert x.shape == (T, 18)
    assert x[:5, 16:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 0]]
    assert torch.equal(x[0, :16], x[3, :16])


# The scheme


@both
@each("causal", [True, False])
def test_prope_is_its_formula(kind, causal):
    """O = D . Attn(D^T Q, D^-1 K, D^-1 V), D of blocks P of a camera's projection and of rotations of rows and columns."""
    pose, (q, k, v) = poses(), inputs(t=T, d=D, e=D)
    scheme, x = schemes.prope(D, HEADS, attention=kind), places(pose)
    lifted = torch.eye(4, dtype=torch.float64)
    lifted[:3, :3] = torch.tensor([[1 / 640, 0, -0.5], [0, 1 / 480, -0.5], [0, 0, 1]], dtype=torch.float64) @ K
    blocks = []
    for token in range(T):
        P = lifted @ torch.linalg.inv(pose[token // 4])
        turns = [100.0 ** -(n / 2) * place for place in x[token, 16:].tolist() for n in range(2)]
        skew = [torch.tensor([[0.0, a], [-a, 0.0]], dtype=torch.float64) for a in turns]  # keys turn by R(a) = D^-1
        blocks.append(torch.block_diag(P, P, *(torch.matrix_exp(a) for a in skew)))
    M = torch.stack(blocks)
    if kind == "linear":
        phi = scheme.feature_map
        weight = torch.einsum("hti,tij,sjk,hsk->hts", phi(q), M, torch.linalg.inv(M), phi(k))
        total = phi(q) @ phi(k).mT
        weight, total = (a.tril() if causal else a for a in (weight, total))
        weight = weight / total.sum(-1, keepdim=True)
    else:
        logits = torch.einsum("hti,tij,sjk,hsk->hts", q, M, torch.linalg.inv(M), k) / D**0.5
        seen = torch.ones(T, T).tril() if causal else torch.ones(T, T)
        weight = logits.masked_fill(seen == 0, -torch.inf).softmax(-1)
    expected = torch.einsum("tij,hts,sjk,hsk->hti", M, weight, torch.linalg.inv(M), v)
    close(scheme(q, k, v, x, causal=causal), expected)


def test_the_layout_of_the_authors_code_is_its_formula():
    """Rotations of the second half: columns first, pairs (i, i + d/8) of a quarter, by the angles with a minus sign."""
    pose, (q, k, v) = poses(), inputs(t=T, d=D, e=D)
    x, half = places(pose), D // 2

    def turned(z, back=False):
        quarters = []
        for place, part in zip((x[:, 17], x[:, 16]), z.split(D // 4, -1), strict=True):
            angle = place[:, None] * 100.0 ** -(torch.arange(D // 8).double() / (D // 8)) * (-1 if back else 1)
            a, b = part.chunk(2, -1)
            quarters += [angle.cos() * a + angle.sin() * b, angle.cos() * b - angle.sin() * a]
        return torch.cat(quarters, -1)

    at = schemes.prope(D, HEADS, attention="softmax").at(x, dtype=torch.float64)
    cameras_of = [side.parts[0] for side in at["isometry"]]
    query, key = (
        torch.cat((side(z[..., :half]), turned(z[..., half:])), -1) for side, z in zip(cameras_of, (q, k), strict=True)
    )
    carried = torch.cat((cameras_of[1](v[..., :half]), turned(v[..., half:])), -1)
    out = (query @ key.mT / D**0.5).softmax(-1) @ carried
    expected = torch.cat((cameras_of[0].adjoint(out[..., :half]), turned(out[..., half:], back=True)), -1)
    scheme = schemes.prope(D, HEADS, layout="half", attention="softmax")
    close(scheme(q, k, v, x), expected)
    assert (schemes.prope(D, HEADS, attention="softmax")(q, k, v, x) - expected).abs().max() > 0.01
    assert laws.check(scheme).holds


@both
@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_another_frame_of_the_world_changes_nothing(kind, dtype):
    """A layer with separate positions per sample. Without transport, values are used unchanged."""
    scheme, pose = schemes.prope(D, HEADS, attention=kind), poses(2)
    layer = Attention(HEADS * D, scheme).to(dtype)
    tokens, roundings = torch.randn(2, T, HEADS * D).to(dtype), 64
    out = layer(tokens, scheme.at(places(pose), dtype=torch.promote_types(dtype, torch.float32)))
    assert out.dtype == dtype
    for _ in range(3):
        frame = poses()[0]
        x = places(frame @ pose)
        there = layer(tokens, scheme.at(x, dtype=torch.promote_types(dtype, torch.float32)))
        close(there, out, roundings=roundings)
    moved = layer(tokens, scheme.at(places(poses(2)), dtype=torch.promote_types(dtype, torch.float32)))
    assert (moved - out).abs().max() > 0.01


def test_the_law_is_measured():
    for kind in ATTENTION:
        for transport in (True, False):
            report = laws.check(schemes.prope(D, HEADS, attention=kind, transport=transport))
            assert report.holds, report
            assert report["attention"].figure < 1e-12
            assert not report["unitary"].holds


@each("kind", ATTENTION)
def test_one_camera_is_rope_of_its_patches(kind):
    """As the paper states for one view, the cameras cancel."""
    pose, (q, k, v) = poses()[:1], inputs(t=4, d=D, e=D)
    scheme = schemes.prope(D, HEADS, attention=kind)
    close(scheme(q, k, v, places(pose)), scheme(q, k, v, places(torch.eye(4, dtype=torch.float64)[None])))


@both
def test_gradients_reach_poses_for_any_masked_values(kind):
    pose, (q, k, v) = poses(1).requires_grad_(), inputs(1, t=T, d=D, e=D)
    mask = torch.arange(T)[None] < T - 4
    v = torch.where(mask[..., None, :, None], v, torch.nan)
    out = schemes.prope(D, HEADS, attention=kind)(q, k, v, places(pose), mask=mask)
    (grad,) = torch.autograd.grad(out.square().sum(), pose)
    assert grad.isfinite().all()
    assert (grad[:, :-1, :3].abs().sum((-1, -2)) > 0).all()


# Values that are carried along, with any encoding

CARRIED = ["rope", "string", "ape-grid", "jordan", "xpos", "ape-tree", "permuteformer"]


@both
@each("name", CARRIED)
def test_values_are_seen_from_the_query_as_keys_are(kind, name):
    """y_i = sum_j w_ij rho(x_i)^-1 rho(y_j) v_j, by the matrices of the canonical form."""
    options = {"attention": kind, "decay": "none"} if name in ("jordan", "permuteformer") else {"attention": kind}
    plain, scheme = (schemes.REGISTRY[name](8, HEADS, transport=t, **options) for t in (False, True))
    q, k, v = inputs(1, t=6)
    x = scheme.group.arrange(6)
    weight = plain(q, k, torch.eye(6, dtype=torch.float64).expand(1, HEADS, -1, -1), x, causal=True)
    W = canonical(plain)[0].matrix(x, x) * (8**0.5 if kind == "softmax" else 1)  # [h t s d d], with its scale
    expected = torch.einsum("bhts,htsij,bhsj->bhti", weight, W, v)
    close(scheme(q, k, v, x, causal=True), expected, roundings=1e5)


def test_values_are_carried_through_a_stream():
    scheme, (q, k, v) = schemes.prope(D, HEADS), inputs(1, t=T, d=D, e=D)
    x, state, out = places(poses()), State(), []
    for part in torch.arange(T).split(5):
        y, state = scheme(*(a[..., part, :] for a in (q, k, v)), x[part], state=state, causal=True)
        out.append(y)
    close(torch.cat(out, -2), scheme(q, k, v, x, causal=True))
    at = scheme.at(x, state=state) | {"transport": None, "causal": True}
    with pytest.raises(ValueError, match="state: expected one of"):
        ATTENTION["linear"](q, k, v, **at)


@both
def test_half_precision_keeps_what_cancels(kind):
    """Cameras 30 steps from the origin: products of 1,000 cancel to 1."""
    pose = poses()
    pose[:, :3, 3] += 30
    scheme, x, exact = schemes.prope(D, HEADS, attention=kind), places(pose), inputs(t=T, d=D, e=D)
    for dtype in (torch.bfloat16, torch.float16):
        half = [a.to(dtype) for a in exact]
        out = scheme(*half, x)
        assert out.dtype == dtype
        close(out, scheme(*(a.double() for a in half), x), roundings=16)


ONE, MIRROR = GROUP.origin(3), torch.tensor([1.0, 1, -1, 1], dtype=torch.float64).diag()


def test_no_cameras_have_no_positions():
    assert cameras(torch.empty(0, 4, 4), K, size=(640, 480)).shape == (0, 16)
    assert cameras(torch.empty(2, 0, 4, 4), patches=(2, 3)).shape == (2, 0, 18)


@each(
    ("call", "message"),
    [
        (lambda: cameras(torch.eye(4)), r"pose: expected floats \[\*b n 4 4\], camera to world, got torch.float32 \[4, 4\]"),
        (lambda: cameras(poses().mT), r"last row \(0, 0, 0, 1\), got other ones; transpose with .mT"),
        (lambda: cameras(2 * torch.eye(4)[None]), "last row"),
        (lambda: cameras(torch.diag(torch.tensor([2.0, 2, 2, 1]))[None]), "pose: expected rotations .* without a scale"),
        (lambda: cameras(poses(), K.mT), r"intrinsics: expected \[fx s cx"),
        (lambda: cameras(poses(), -K), r"intrinsics: expected \[fx s cx"),
        (lambda: cameras(poses(), torch.eye(4)), r"intrinsics: expected \[\*b n 3 3\] or \[3 3\], got \[4, 4\]"),
        (lambda: cameras(poses(), K.expand(2, 3, 3)), r"intrinsics: expected \[3 3\] or \[3, 3, 3\], got \[2, 3, 3\]"),
        (lambda: cameras(poses(), size=(640, 480)), "size: expected None without intrinsics"),
        *(
            (lambda size=size: cameras(poses(), K, size=size), "size: expected a positive width and height, got")
            for size in ((0, 480), (torch.inf, 480), (640, torch.nan), (640,), 640, ("wide", 480))
        ),
        (lambda: cameras(poses() @ MIRROR), "pose: expected rotations, of determinant 1, got a reflection, .* in camera 0;"),
        (lambda: cameras(poses(), patches=(0, 2)), "patches: expected an integer of at least 1, got 0"),
        (lambda: cameras(poses(), patches=(2, 3, 4)), r"patches: expected two integers, rows and columns, got \(2, 3, 4\)"),
        (lambda: cameras(poses(), patches=3), "patches: expected two integers, rows and columns, got 3"),
        (lambda: GROUP.check(torch.zeros(3, 16)), "positions: expected invertible 4 x 4 matrices .* got inf in row 0"),
        (lambda: GROUP.check(ONE + 1e6 * torch.eye(16)[3]), "put the world's origin near the cameras"),
        (lambda: GROUP.check(torch.full((3, 16), torch.nan)), "positions: expected invertible"),
        (lambda: GROUP.check(torch.zeros(3, 12)), r"positions: expected \[\*b t 16\] for Projective\(\), got \[3, 12\]"),
        (lambda: Projection(6), "features: expected a multiple of 4"),
        (lambda: schemes.prope(12), "head size: expected a multiple of 8"),
        (lambda: schemes.prope(16).at(GROUP.random(3)), r"positions: expected \[\*b t 18\]"),
        (
            lambda: schemes.prope(16, 2, decay="retnet"),
            "decay: expected 'none', since a log decay needs positions on a line",
        ),
        (lambda: schemes.cosformer(8, transport=True), "transport: expected False with Rotary"),
        (lambda: schemes.permuteformer(8, 2, width=4, transport=True), "transport: expected False with Permutation"),
        (lambda: schemes.pope(8, 2, transport=True), "transport: expected False with Polar"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@each(
    ("transport", "error", "message"),
    [
        (Tiles(torch.eye(4)[None, None]), TypeError, "transport: expected a pair of maps, of values and of outputs"),
        ((Tiles(torch.eye(4)[None, None]), None), TypeError, "transport: expected a pair of maps"),
        (
            (Rotation(torch.ones(1, 5, 4, 2)),) * 2,
            ValueError,
            "8 features of values, 6 tokens of v, got .* 8 features, 5 tokens",
        ),
        ((Rotation(torch.ones(1, 6, 3, 2)),) * 2, ValueError, "8 features of values, 6 tokens of v, got maps of 6 features"),
        (
            (Rotation(torch.ones(3, 6, 4, 2)),) * 2,
            ValueError,
            r"leading dimensions that broadcast to \[2, 2\] of v, got \[3\]",
        ),
    ],
)
@both
def test_maps_that_do_not_fit_are_refused(kind, transport, error, message):
    q, k, v = inputs(2, t=6)
    with pytest.raises(error, match=message):
        ATTENTION[kind](q, k, v, transport=transport)


def test_a_fingerprint_says_whether_values_are_carried():
    assert schemes.rope(8, 2).fingerprint != schemes.rope(8, 2, transport=True).fingerprint
    assert "transport" not in vars(schemes.rope(8, 2))
    assert isopos.rope(8, 2, transport=True).at(sequence(3))["transport"][1].of.table.shape == (1, 3, 4, 2)
