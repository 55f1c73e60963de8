"""Test clustered attention: its definition query by query, the limit of softmax attention, and its symmetries."""

import pytest
import torch
from torch.autograd import gradcheck

import isopos
from isopos.attention import softmax_attention
from isopos.lab.tasks.clustered import _clusters, clustered_attention

T = 40


def inputs(*, t=T, d=8, heads=3, b=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(3, b, heads, t, d, generator=draw, dtype=torch.float64)


def at(name, x):
    return isopos.schemes.build(name, 8, 3, {"attention": "softmax"}).at(x, dtype=torch.float64)


def defined(q, k, v, topk, count):
    """Improved clustered attention of Vyas et al. for one head, query by query, with the same clusters."""
    label, centre = _clusters(q, None, count, 10)
    out = torch.empty_like(v)
    for i in range(len(q)):
        weight = (centre[label[i]] @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        top = weight.argsort(descending=True)[:topk]
        mass = weight[top].sum()
        weight[top] = mass * (q[i] @ k[top].mT / q.shape[-1] ** 0.5).softmax(-1)
        out[i] = weight @ v
    return out


@pytest.mark.parametrize("topk", [0, 5])
def test_the_definition(topk):
    q, k, v = inputs()
    given = at("rope", isopos.sequence(T))
    found = clustered_attention(q, k, v, **given, clusters=6, topk=topk)
    rho = given["isometry"]
    for b in range(2):
        for h in range(3):
            expected = defined(rho(q)[b, h], rho(k)[b, h], v[b, h], topk, 6)
            torch.testing.assert_close(found[b, h], expected, atol=1e-12, rtol=0)


def test_clusters_are_groups_of_near_queries():
    draw = torch.Generator().manual_seed(0)
    places = 10 * torch.randn(4, 8, generator=draw, dtype=torch.float64)
    which = torch.arange(T) * 4 // T
    label, centre = _clusters(places[which] + 0.01 * torch.randn(T, 8, generator=draw), None, 4, 10)
    assert label.tolist() == which.tolist()
    torch.testing.assert_close(centre, places, atol=0.02, rtol=0)


@pytest.mark.parametrize("limit", [{"clusters": T, "topk": 0}, {"clusters": 3, "topk": T}, {"clusters": 99, "topk": 99}])
def test_its_limits_are_softmax_attention(limit):
    q, k, v = inputs()
    given = at("ape-sequence", isopos.sequence(T))
    expected = softmax_attention(q, k, v, **given)
    torch.testing.assert_close(clustered_attention(q, k, v, **given, **limit), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["rope", "lrpe-orthogonal", "permuteformer:decay=none", "ape-sequence", "ape-grid"])
def test_it_is_exactly_relative(name):
    name, _, choice = name.partition(":decay=")
    scheme = isopos.schemes.build(name, 8, 3, {"attention": "softmax", **({"decay": choice} if choice else {})})
    x = isopos.grid(5, 8) if name == "ape-grid" else isopos.sequence(T)
    q, k, v = inputs()
    near, far = (
        clustered_attention(q, k, v, **scheme.at(p, dtype=torch.float64), clusters=6, topk=4) for p in (x, x + 1000)
    )
    torch.testing.assert_close(near, far, atol=1e-9, rtol=0)
    other = clustered_attention(q, k, v, **scheme.at(x * 2, dtype=torch.float64), clusters=6, topk=4)
    assert (near - other).abs().max() > 1e-3


def test_padding_changes_nothing():
    q, k, v = inputs()
    keys = torch.ones(2, T, dtype=torch.bool)
    keys[1, :9] = False
    x = (torch.arange(T) - torch.tensor([[0], [9]])).clamp_min(0)[..., None]
    found = clustered_attention(q, k, v, **at("rope", x), clusters=5, topk=4, mask=keys, query_mask=keys)
    alone = (a[1:, :, 9:] for a in (q, k, v))
    expected = clustered_attention(*alone, **at("rope", isopos.sequence(T - 9)), clusters=5, topk=4)
    torch.testing.assert_close(found[1:, :, 9:], expected, atol=1e-10, rtol=0)
    few = clustered_attention(q, k, v, clusters=5, topk=T, mask=keys)
    torch.testing.assert_close(few, softmax_attention(q, k, v, mask=keys), atol=1e-12, rtol=0)
    assert not clustered_attention(q, k, v, clusters=5, mask=torch.zeros(2, T, dtype=torch.bool)).any()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_padding_may_hold_anything(broken):
    given, keys = inputs(), torch.ones(2, T, dtype=torch.bool)
    keys[1, 31:] = False
    options = at("rope", isopos.sequence(T)) | {"clusters": 5, "topk": 4, "mask": keys, "query_mask": keys}
    expected = clustered_attention(*given, **options)
    q, k, v = (a.masked_fill(~keys[:, None, :, None], broken).requires_grad_() for a in given)
    found = clustered_attention(q, k, v, **options)
    real = keys[:, None, :, None].expand_as(found)
    torch.testing.assert_close(found[real], expected[real], atol=1e-12, rtol=0)
    for grad in torch.autograd.grad(found[real].sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("topk", [0, 4])
def test_a_sample_without_keys_has_gradients_of_zero(topk):
    q, k, v = (a.requires_grad_() for a in inputs())
    keys = torch.ones(2, T, dtype=torch.bool)
    keys[1] = False
    found = clustered_attention(q, k, v, clusters=5, topk=topk, mask=keys)
    for grad in torch.autograd.grad(found.sum(), (q, k, v)):
        assert grad.isfinite().all()
        assert not grad[1].any()


def test_an_empty_cluster_keeps_its_centroid():
    """Equal queries all join the first cluster. The other centroids do not move."""
    q = torch.tensor([3.0, 4.0], dtype=torch.float64).expand(6, 2)
    label, centre = _clusters(q, None, 3, 10)
    assert label.tolist() == [0] * 6
    assert torch.equal(centre, q[:3])


@pytest.mark.parametrize("axis", ["queries", "keys", "samples", "features of values"])
def test_nothing_gives_nothing(axis):
    q, k, v = inputs()
    if axis == "samples":
        q, k, v = q[:0], k[:0], v[:0]
    q = q[:, :, :0] if axis == "queries" else q
    k, v = (k[:, :, :0], v[:, :, :0]) if axis == "keys" else (k, v[..., :0] if axis.startswith("features") else v)
    found = clustered_attention(q, k, v, clusters=5)
    assert torch.equal(found, q.new_zeros(*q.shape[:-1], v.shape[-1]))


def test_heads_are_shared_and_layouts_taken():
    q = inputs(heads=6)[0]
    k, v = inputs()[1:]
    found = clustered_attention(q, k, v, clusters=5, topk=3)
    repeated = clustered_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), clusters=5, topk=3)
    torch.testing.assert_close(found, repeated, atol=1e-12, rtol=0)
    swapped = clustered_attention(*(a.transpose(1, 2) for a in (q, k, v)), clusters=5, topk=3, layout="bthd")
    torch.testing.assert_close(swapped.transpose(1, 2), found, atol=1e-12, rtol=0)
    assert clustered_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), clusters=5).dtype == torch.bfloat16


def test_gradients():
    q, k, v = (a[:1, :1, :7, :4].clone().requires_grad_() for a in inputs())
    assert gradcheck(lambda *a: clustered_attention(*a, clusters=3, topk=2), (q, k, v))


def test_what_does_not_fit_is_refused():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="expected an encoding alone, which maps queries and keys, got 'decay'"):
        clustered_attention(q, k, v, **at("alibi", isopos.sequence(T)), clusters=5)
    with pytest.raises(TypeError, match="got 'causal'"):
        clustered_attention(q, k, v, clusters=5, causal=True)
    with pytest.raises(ValueError, match="clusters: expected an integer of at least 1, got 0"):
        clustered_attention(q, k, v, clusters=0)
    with pytest.raises(ValueError, match=r"query_mask: expected bool \[\*b t\], got torch.bool \[2, 3\]"):
        clustered_attention(q, k, v, clusters=5, query_mask=torch.ones(2, 3, dtype=torch.bool))


def test_the_name_of_before_warns_and_is_the_same_function():
    with pytest.warns(DeprecationWarning, match=r"is isopos\.lab\.tasks\.clustered\.clustered_attention") as said:
        assert isopos.attention.clustered_attention is clustered_attention
    assert [one.filename for one in said] == [__file__]
    with pytest.raises(AttributeError, match="has no attribute 'clustred_attention'"):
        _ = isopos.attention.clustred_attention
