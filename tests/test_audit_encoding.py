"""Test that the audit identifies a model's encoding from equal tokens, and the layout of trained weights."""

import math

import faults
import pytest
import torch
from torch.nn import functional as F

import isopos
from isopos.audit import audit
from isopos.audit.encoding import bias_family, rotation
from isopos.audit.scores import equal, layers, recorded_attention
from isopos.biases import T5
from isopos.encodings import rope_frequencies


def turned(layout, w, low, width, stride, count=53, heads=3):
    """Random features ``[h t d]``, equal for all tokens, rotated at positions 0, stride, 2 stride, ..."""
    x = torch.randn(heads, 1, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).repeat(1, count, 1)
    k, f = torch.arange(len(w)), len(w)
    first, second = (low + k, low + k + f) if layout == "half" else (low + 2 * k, low + 2 * k + 1)
    z = torch.complex(x[..., first], x[..., second])
    angle = stride * torch.arange(count)[:, None] * w
    z = z * torch.polar(torch.ones_like(angle), angle)
    x[..., first], x[..., second] = z.real, z.imag
    return x


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_rotation_is_found_with_its_features_layout_and_frequencies(layout):
    for count, base, low, width in ((4, 1e4, 0, 8), (4, 5e5, 0, 12), (8, 1e6, 8, 24), (2, 100.0, 6, 10), (32, 1e4, 0, 64)):
        w = rope_frequencies(count, base)
        found = rotation([(s, turned(layout, w, low, width, s)) for s in (1, 16, 256)])
        assert found is not None
        assert (found.layout, int(found.first[0]), len(found.first)) == (layout, low, count)
        torch.testing.assert_close(found.shared, w, rtol=1e-9, atol=1e-12)
        x = turned(layout, w, low, width, 1)
        torch.testing.assert_close(found.turned(x, back=True), x[:, :1].expand_as(x))
        torch.testing.assert_close(found.turned(found.turned(x, back=True)), x)
        other = {"half": "interleaved", "interleaved": "half"}[layout]
        y = turned(other, w, low, width, 1)
        torch.testing.assert_close(found.other().turned(y[:, :1].expand_as(y)), y)
    assert rotation([(1, x[:, :1].expand_as(x))]) is None
    assert rotation([(1, x * torch.linspace(1, 2, 53)[:, None])]) is None
    back = rotation([(1, turned(layout, -rope_frequencies(3), 0, 6, 1))])
    assert bool((back.w < 0).all())
    own = torch.cat([turned(layout, rope_frequencies(3) * s, 0, 6, 1, heads=1) for s in (1.0, 0.5)])
    assert rotation([(1, own)]).shared is None


def test_a_bias_is_of_a_family():
    n = torch.arange(53)[None] - torch.arange(53)[:, None]
    forbidden = (n > 0)[None].expand(2, -1, -1)
    generator = torch.Generator().manual_seed(0)
    slopes, table = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.randn(2, 32, generator=generator).double()
    alibi = slopes[:, None, None] * n
    rows = torch.randn(2, 53, 1, generator=generator).double()
    for logits, words in (
        (0 * alibi + 3, "none"),
        (alibi, "ALiBi, slopes -0.5 to -0.25"),
        (alibi + rows, "ALiBi, slopes -0.5 to -0.25"),
        (table[:, T5(1, bidirectional=False).bucket(n)], "T5, 32 buckets up to distance 128"),
        (-torch.log1p(n.abs()).double().expand(2, -1, -1), "a relative bias of another family"),
        (alibi * torch.arange(1, 54)[:, None], "a bias that no offset explains"),
    ):
        name, residual = bias_family(logits.masked_fill(forbidden, -math.inf))
        assert name == words
        assert (residual < 1e-3) == (words != "a bias that no offset explains")
    both = table[:, T5(1).bucket(n)]
    assert bias_family(both)[0] == "T5, 32 buckets up to distance 128"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rope", "rotary, 8 of 8 features, interleaved layout, base 1e+04"),
        ("alibi", "ALiBi, slopes -0.0625 to -0.003906"),
        ("t5", "T5, 16 buckets up to distance 128"),  # those of one direction
        ("none", "none"),
    ],
)
def test_encodings_of_isopos_are_named(name, words):
    scheme = getattr(isopos, name)(8, 2, attention="softmax")
    with torch.no_grad():
        [parameter.normal_() for parameter in scheme.parameters() if name == "t5"]

    def call(layer, x, positions=None, mask=None):
        positions = torch.arange(x.shape[1]) if positions is None else positions
        return layer(x, scheme.at(positions[..., None]), causal=True, mask=mask)

    report = audit(isopos.Attention(16, scheme), call, torch.randn(1, 12, 16), relative=name != "none", checks=["encoding"])
    assert report.sound, report
    assert words in report.encodings[0]
    assert str(report).splitlines()[1].startswith("  encoding: ")


def test_heads_with_separate_frequencies_are_named():
    layer = faults.Learned()
    layer.frequency.data[1] *= 0.5
    (words,) = audit(layer, example=torch.randn(1, 12, 16), relative=True, checks=["encoding"]).encodings
    assert words.startswith("rotary, 8 of 8 features, half layout, separate frequencies per head")


def test_what_is_added_is_named():
    angle = torch.arange(64)[:, None] * rope_frequencies(8, 100.0)
    for table, words in (
        (torch.cat((angle.sin(), angle.cos()), 1).float(), "absolute, sinusoidal (added)"),
        (torch.randn(64, 16), "absolute, learned (added)"),
    ):
        report = audit(faults.Tokens(table=table), example=torch.arange(12)[None], relative=False, checks=["encoding"])
        assert report.encodings[0].startswith(words), report
        assert report.encodings[0].endswith(" at layers.0")


def test_trained_weights_of_the_other_layout_are_found():
    settings = {"relative": True, "checks": ["layout"]}
    made = faults.trained()
    report = audit(**made, **settings)
    assert report.sound, report
    faults.interleave(made["model"])
    report = audit(**made, **settings)
    assert report.broken == ("layout",)
    assert "nats per token as it is" in report.findings[0].measured
    assert "of interleaved layout" in report.findings[0].remedy
    untrained = made | {"model": faults.Tokens()}
    assert "better than chance" in audit(**untrained, **settings).unmeasured[0].reason
    del made["text"]
    assert "got none" in audit(**made, **settings).unmeasured[0].reason


def test_every_way_to_compute_attention_is_seen_alike():
    x = torch.randn(1, 2, 53, 8)

    def scores(kind):
        def forward(q, k, v):
            allowed = torch.ones(53, 53, dtype=torch.bool).tril()
            if kind == "sdpa":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if kind == "scale":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
            if kind == "mask":
                return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], allowed, enable_gqa=True)
            if kind == "baddbmm":
                product = torch.baddbmm(torch.zeros(2, 53, 53), batch1=q[0], batch2=k[0].mT, beta=1.0, alpha=8**-0.5)[None]
            elif kind == "einsum":
                product = torch.einsum("bthd,bshd->bhts", q.transpose(1, 2), k.transpose(1, 2)) * 8**-0.5
            else:
                product = q @ k.mT * 8**-0.5
            return product.masked_fill(~allowed, -1e9).softmax(-1) @ v

        return forward

    class Attends(torch.nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def forward(self, q, k, v):
            return scores(self.kind)(q, k, v)

    for kind in ("sdpa", "scale", "mask", "baddbmm", "einsum", "matmul"):
        keys = x.flip(-1)
        if kind == "mask":
            keys = keys[:, :1].expand(-1, 2, -1, -1)
        module = Attends(kind)
        with recorded_attention(module, 53) as seen:
            out = module(x, keys, x)
        (one,) = seen
        product = x @ keys.mT * (0.25 if kind == "scale" else 8**-0.5)
        want = product.masked_fill(torch.ones(53, 53, dtype=torch.bool).triu(1), -math.inf)[0].double()
        torch.testing.assert_close(one.q, x[0].double())
        torch.testing.assert_close(one.k, keys[0].double())
        torch.testing.assert_close(one.logits, want, atol=1e-6, rtol=1e-5)
        with recorded_attention(module, 53, {one.product: lambda q, k: (2 * q, k / 2)}):
            torch.testing.assert_close(module(x, keys, x), out)
        with recorded_attention(module, 53, {one.product: lambda q, k: (0 * q, k)}):
            assert not module(x, keys, x).allclose(out)
        with recorded_attention(module, 52) as seen:
            module(x, keys, x)
        assert not seen


def test_layers_are_given_other_features():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    x = torch.randn(1, 5, 3)
    with layers(model, 5, equal) as inputs:
        out = model(x)
    torch.testing.assert_close(inputs[0], x)
    torch.testing.assert_close(out, model(x[:, :1]).expand_as(out))
    with layers(model, 4, equal) as inputs:
        torch.testing.assert_close(model(x), model(x))
    assert not inputs
