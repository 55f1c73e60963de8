"""Test exported arrays: they give a scheme's maps in NumPy, JAX and MLX, and its logits in llama.cpp."""

import json

import numpy as np
import pytest
import torch
from cases import PRESETS, each, named

import isopos
from isopos.integrations.arrays import arrays, explanation, gguf_keys
from isopos.maps import pair

D, T = 8, 7


def applied(np, tree, found, x):
    """Apply the map that a tree of `explanation` describes to features x, in NumPy or jax.numpy."""
    part = {
        name: np.asarray(found[value]) if isinstance(value, str) and value in found else value
        for name, value in tree.items()
    }

    def inner(name, x):
        return applied(np, part[name], found, x)

    def pairs(a, b):
        return np.stack((a, b), -1).reshape(*np.broadcast_shapes(a.shape, b.shape)[:-1], -1)

    match part["map"]:
        case "Identity":
            return x
        case "Rotation" if part["lifted"]:
            return np.concatenate((x * part["table"][..., 0], x * part["table"][..., 1]), -1)
        case "Rotation":
            c, s, a, b = part["table"][..., 0], part["table"][..., 1], x[..., 0::2], x[..., 1::2]
            return pairs(c * a - s * b, s * a + c * b)
        case "Gather":
            index = np.broadcast_to(part["index"].astype(np.int32), x.shape)
            return np.take_along_axis(x, index, -1)
        case "Reflection":
            return x - 2 * (x * part["normal"]).sum(-1, keepdims=True) * part["normal"]
        case "Matrix" | "LinearMap":
            return x @ np.swapaxes(part["matrix"], -1, -2)
        case "Plane":
            c, s, u, v = part["table"][..., 0], part["table"][..., 1], part["u"], part["v"]
            a, b = (x * u).sum(-1, keepdims=True), (x * v).sum(-1, keepdims=True)
            return x + ((c - 1) * a + s * b) * u + ((c - 1) * b - s * a) * v
        case "OnPairs":
            return pairs(inner("on", x[..., 0::2]), inner("on", x[..., 1::2]))
        case "BlockSum" | "Blocks":
            slices = np.split(x, np.cumsum(np.asarray(part["widths"]))[:-1].tolist(), -1)
            done = [applied(np, one, found, a) for one, a in zip(part["parts"], slices, strict=True)]
            shape = np.broadcast_shapes(*(a.shape[:-1] for a in done))
            return np.concatenate([np.broadcast_to(a, (*shape, a.shape[-1])) for a in done], -1)
        case "Chain" | "Composed":
            return inner("second", inner("first", x))
        case "Operators" | "Matrices":
            return (part["matrix"] @ x[..., None])[..., 0]
        case "Scaling":
            return x * part["factor"]
        case "Factor":
            return x * part["number"]
        case "Shear":
            width, total, term = x.shape[-1] // part["order"], x, x
            for n in range(1, part["order"]):
                zeros = np.zeros_like(term[..., :width])
                moved = (zeros, term[..., :-width]) if part["transposed"] else (term[..., width:], zeros)
                term = np.concatenate(moved, -1) * part["steps"] / n
                total = total + term
            return total
        case "Tiles":
            size = part["matrix"].shape[-1]
            rows = x.reshape(*x.shape[:-1], -1, size)
            return np.einsum("...ij,...rj->...ri", part["matrix"], rows).reshape(x.shape)
        case "Affine":
            y = x + part["shift"]
            return y if part["matrix"] is None else y @ np.swapaxes(part["matrix"], -1, -2)
        case "Append":
            y = x if part["first"] is None else inner("first", x)
            channels = part["channels"]
            channels = applied(np, channels, found, x) if isinstance(channels, dict) else channels
            shape = np.broadcast_shapes(y.shape[:-1], channels.shape[:-1])
            return np.concatenate([np.broadcast_to(a, (*shape, a.shape[-1])) for a in (y, channels)], -1)
        case "Mapped":
            y = inner("first", x)
            return {"softplus": np.logaddexp(y, 0), "elu+1": np.exp(np.minimum(y, 0)) + np.maximum(y, 0)}[part["phi"]]
    raise AssertionError(part["map"])


def check_maps(np, cases):
    for case in cases:
        with named(case.id):
            scheme, x = case.build(D), case.positions(t=T)
            q = torch.randn(1, scheme.heads, T, scheme.encoding.features)
            torch.manual_seed(1)
            found = arrays(scheme, x)
            torch.manual_seed(1)
            with torch.no_grad():
                expected = [side(q) for side in pair(scheme.at(x)["isometry"])]
            about = explanation(found)
            assert {*about["arrays"]} == {*found} - {"explanation"}
            trees = [about["map"]] * 2 if "map" in about else [about["query"], about["key"]]
            for tree, want in zip(trees, expected, strict=True):
                got = torch.tensor(applied(np, tree, found, np.asarray(q.numpy())).tolist())
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_arrays_of_every_scheme_give_its_maps_in_numpy():
    check_maps(np, PRESETS)


def test_arrays_give_the_maps_in_jax():
    jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'isopos[peers]'")
    assert jax.devices("cpu")
    check_maps(jax.numpy, [case for case in PRESETS if case.name in ("rope", "permuteformer", "lrpe-unitary", "string")])


@each("traditional", (True, False))
def test_frequencies_are_those_of_mlx(traditional):
    """mx.fast.rope(x, 6, traditional=..., base=None, scale=1.0, offset=3, freqs=1 / frequency), whose formula this is."""
    layout = "interleaved" if traditional else "half"
    scheme = isopos.rope(D, 2, rotary_dim=6, layout=layout, attention="softmax").extend("llama3", factor=8.0, trained=64)
    x, q, k = isopos.sequence(T) + 3, *torch.randn(2, 1, 2, T, D)
    found = arrays(scheme, x)
    periods = 1 / found[next(name for name in found if name.endswith("frequency"))][0, 0]

    def rope(x, dims=6, offset=3):
        theta = (offset + np.arange(x.shape[-2]))[:, None] * (1 / periods)
        c, s, own = np.cos(theta), np.sin(theta), x[..., :dims]
        a, b = (own[..., 0::2], own[..., 1::2]) if traditional else (own[..., : dims // 2], own[..., dims // 2 :])
        out = np.stack((a * c - b * s, a * s + b * c), -1 if traditional else -2).reshape(own.shape)
        return np.concatenate((out, x[..., dims:]), -1)

    rho = scheme.at(x)["isometry"]
    scores = rope(q.numpy()) @ rope(k.numpy()).swapaxes(-1, -2)
    torch.testing.assert_close(torch.from_numpy(scores).float(), rho(q) @ rho(k).mT, rtol=1e-5, atol=1e-5)


def llama_logits(said, q, k, position):
    """Logits of llama.cpp for the keys and tensors of a scheme: ggml_rope_ext in float64, on the first features."""
    keys = {name.partition(".")[2]: value for name, value in said["keys"].items()}
    dims, base, scale = keys["rope.dimension_count"], keys["rope.freq_base"], 1 / keys.get("rope.scaling.factor", 1.0)
    factors = np.array(said["tensors"].get("rope_freqs.weight", [1.0] * (dims // 2)))
    pair, magnitude = np.arange(dims // 2), keys.get("rope.scaling.attn_factor", 1.0)
    extrapolated = position[:, None] * base ** (-2 * pair / dims) / factors
    theta = scale * extrapolated
    if keys.get("rope.scaling.type") == "yarn":
        trained = keys["rope.scaling.original_context_length"]
        turns = keys["rope.scaling.yarn_beta_fast"], keys["rope.scaling.yarn_beta_slow"]
        low, high = (dims * np.log(trained / (turn * 2 * np.pi)) / (2 * np.log(base)) for turn in turns)
        low, high = max(0, np.floor(low)), min(dims - 1, np.ceil(high))
        mix = 1 - np.minimum(1, np.maximum(0, (pair - low) / max(0.001, high - low)))
        theta, magnitude = theta * (1 - mix) + extrapolated * mix, magnitude * (1 + 0.1 * np.log(1 / scale))
    half = said["pairs"].startswith("(i")
    first = pair if half else 2 * pair
    second = pair + dims // 2 if half else first + 1

    def rope(x):
        out, (a, b) = x.copy(), (x[..., first], x[..., second])
        out[..., first] = magnitude * (a * np.cos(theta) - b * np.sin(theta))
        out[..., second] = magnitude * (a * np.sin(theta) + b * np.cos(theta))
        return out

    return rope(q) @ rope(k).swapaxes(-1, -2) / q.shape[-1] ** 0.5


RULES = {  # by name, the keys that llama.cpp has for it
    "none": (None, {}, set()),
    "linear": ("linear", {"factor": 3.0}, {"type", "factor"}),
    "dynamic": ("dynamic", {"factor": 3.0}, set()),
    "yarn": (
        "yarn",
        {"factor": 4.0, "trained": 512},
        {"type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow"},
    ),
    "yarn-sharper": (
        "yarn",
        {"factor": 4.0, "trained": 512, "fast": 16.0, "sharpness": 1.3},
        {"type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow", "attn_factor"},
    ),
    "yarn-exact": ("yarn", {"factor": 4.0, "trained": 512, "truncate": False}, {"attn_factor"}),
    "llama3": ("llama3", {"factor": 8.0, "trained": 512}, set()),
    "longrope": ("longrope", {"factor": 2.0, "trained": 512, "rescale": np.linspace(1, 5, 16).tolist()}, {"attn_factor"}),
}


@each("rule", RULES)
@each("name, options", (("rope", {}), ("rope", {"rotary_dim": 32, "base": 5e5}), ("p-rope", {"p": 0.5})))
@each("layout", ("interleaved", "half"))
def test_keys_give_the_logits_of_llama_cpp(rule, name, options, layout):
    head_dim = 64 if "rotary_dim" in options else 32
    extension, values, scaling = RULES[rule]
    scheme = isopos.schemes.build(name, head_dim, 2, {"attention": "softmax", "layout": layout, **options})
    if extension:
        scheme.extend(extension, **values)
    said = gguf_keys(scheme, "qwen2" if layout == "half" else "gptj" if "rotary_dim" in options else "llama")
    if name == "rope":
        assert {key.split("scaling.")[1] for key in said["keys"] if "scaling." in key} == scaling
        assert bool(said["tensors"]) == (rule in ("llama3", "longrope", "yarn-exact"))
    position = torch.tensor([[0], [3], [500], [1900]])
    q, k = torch.randn(2, 1, 2, 4, head_dim, dtype=torch.float64)
    at = scheme.at(position, dtype=torch.float64)
    want = at["scale"] * (at["isometry"](q) @ at["isometry"](k).mT)
    got = llama_logits(said, q.numpy(), k.numpy(), position[:, 0].numpy())
    torch.testing.assert_close(
        torch.from_numpy(got), want, rtol=0, atol=1e-3 if said["tensors"] else 1e-5
    )  # float32 factors


def test_alibi_is_one_key():
    slopes = isopos.decays.alibi_rates(12)
    low, high = 2 ** (-8.0 / 8), 2 ** (-8.0 / 2 / 8)  # llama.cpp's two bases, for a maximal bias of 8 and 12 heads
    expected = [low ** (h + 1) if h < 8 else high ** (2 * (h - 8) + 1) for h in range(12)]
    torch.testing.assert_close(slopes, torch.tensor(expected, dtype=torch.float64))
    said = gguf_keys(isopos.alibi(D, 12, attention="softmax"), "mpt")
    assert said["keys"] == {"mpt.attention.max_alibi_bias": 8.0}


def test_what_the_code_of_llama_does_not_do_is_refused():
    with pytest.raises(ValueError, match=r"architecture: expected one whose code in llama\.cpp adds ALiBi"):
        gguf_keys(isopos.alibi(D, 12, attention="softmax"))
    with pytest.raises(ValueError, match=r"architecture: expected one that rotates a part of a head, .* rotates all 8 f"):
        gguf_keys(isopos.rope(8, rotary_dim=6, attention="softmax"))


def test_what_llama_cpp_cannot_express_is_refused_with_the_reason():
    for case in PRESETS:
        scheme = case.build(attention="softmax")
        if case.name in ("rope", "p-rope", "alibi"):
            assert gguf_keys(scheme, "mpt" if case.name == "alibi" else "llama")["keys"]
        else:
            with named(case.id), pytest.raises(ValueError, match=r"scheme: expected one that llama\.cpp has, .* got \w+"):
                gguf_keys(scheme)
    reasons = {
        "linear attention": isopos.rope(D, 2),
        "a decay that is not ALiBi's alone": isopos.rope(D, 2, attention="softmax", decay="alibi"),
        "separate frequencies of 2 heads": isopos.rope(D, 2, attention="softmax", learned=True),
        "an attention factor of features": isopos.rope(D, 2, attention="softmax", rotary_dim=4).extend(
            "yarn", factor=2, trained=64, whole_logits=True
        ),
    }
    for reason, scheme in reasons.items():
        with pytest.raises(ValueError, match=reason):
            gguf_keys(scheme)
    with pytest.raises(ValueError, match=r"architecture: expected one whose pairs are \(i, i \+ n\)"):
        gguf_keys(isopos.rope(D, 2, attention="softmax", layout="half"))
    with pytest.raises(ValueError, match="architecture: expected a name such as llama"):
        gguf_keys(isopos.rope(D, 2, attention="softmax"), "a.b")
    with pytest.raises(ValueError, match=r"architecture: expected one whose pairs are \(2i, 2i \+ 1\), .* got qwen2"):
        gguf_keys(isopos.rope(D, 2, attention="softmax"), "qwen2")


def test_positions_of_several_samples_are_refused():
    with pytest.raises(ValueError, match=r"x: expected positions \[t c\] of one sample, got \[3, 5, 1\]"):
        arrays(isopos.rope(D, 2), isopos.sequence(5).expand(3, 5, 1))


def test_the_command_writes_arrays_and_keys(isopos):
    assert isopos("tables", "rope:layout=half", "--head-dim=8", "--heads=2", "--length=5", "--out=a.npz")[:2][0] == 0
    with np.load("a.npz") as found:
        assert found["positions"].shape == (5, 1)
        assert explanation(found)["arrays"]["map.second.table"] == "h t f 2"
        with pytest.warns(DeprecationWarning, match="found is arrays now"):
            assert explanation(found=found) == explanation(found)
    assert "arch: expected no architecture with npz" in isopos("tables", "rope", "--arch=qwen2")[2]
    assert "length: expected no length with gguf-keys" in isopos("tables", "rope", "--format=gguf-keys", "--length=5")[2]
    code, out, _ = isopos("tables", "rope", "--format=gguf-keys", "--extend=linear:factor=2")
    assert (code, json.loads(out)["keys"]["llama.rope.scaling.factor"]) == (0, 2.0)
    assert isopos("tables", "rope", "--format=gguf-keys", "--out=keys.json")[:2] == (0, "keys.json\n")
    wrong = {
        ("rope", "--out=a.npz"): "out: expected a new file, got a.npz, which exists",
        ("rope", "--out=a.txt"): "out: expected a name that ends with .npz",
        ("rope", "--length=0"): "length: expected at least 1",
        ("retnet", "--format=gguf-keys"): "scheme: expected one that llama.cpp has",
        ("lrpe-2",): "isopos table lrpe-2 runs its cells",
        ("rope", "--extend=yarn:factor=2,bogus=1"): "extend: yarn: unknown option 'bogus'",
    }
    for arguments, message in wrong.items():
        code, _, said = isopos("tables", *arguments)
        assert (code, message in said) == (2, True), said
    assert "isopos tables rope writes the arrays" in isopos("table", "rope")[2]
