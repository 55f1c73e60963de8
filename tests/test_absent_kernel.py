"""Test isopos without the compiled kernel: one warning at the first call it would serve, and correct results."""

import warnings

import pytest
import torch

import isopos
from isopos.attention import explain, linear_attention
from isopos.feature_maps import FeatureMap
from isopos.ops import library
from isopos.stream import Stream
from tools import without_kernel


@pytest.fixture(autouse=True)
def _absent(monkeypatch):
    """No compiled library, and no warning so far."""
    monkeypatch.setattr(library, "libraries", lambda: ({}, "installation builds AVX2 on Linux, where it finds gcc"))
    monkeypatch.setattr(library, "warned", False)


def drawn(dtype=torch.float32, d=16, **kw):
    return torch.randn(3, 1, 2, 8, d, dtype=dtype, **kw)


def told(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return found


def step_of(dtype=torch.float32):
    steps, (q, k, v) = Stream(isopos.rope(16, 2)), drawn(dtype)
    for i in range(3):
        steps(*(x[..., i : i + 1, :] for x in (q, k, v)))


WOULD = {
    "causal": lambda: linear_attention(*drawn(), causal=True),
    "gradients": lambda: linear_attention(*drawn(requires_grad=True), causal=True).sum().backward(),
    "all keys": lambda: linear_attention(*drawn()),
    "bfloat16": lambda: linear_attention(*drawn(torch.bfloat16), causal=True),
    "a stream's chunk": lambda: linear_attention(*drawn(), causal=True, return_state=True),
    "a step": step_of,
    "a window": lambda: linear_attention(*drawn(), causal=True, window=3),
}
WOULD_NOT = {
    "float64": lambda: linear_attention(*drawn(torch.float64), causal=True),
    "a feature map of one's own": lambda: linear_attention(*drawn(), causal=True, feature_map=FeatureMap("own", torch.exp)),
    "features too wide": lambda: linear_attention(*drawn(d=320), causal=True),
    "products alone": lambda: linear_attention(*drawn(), denominator=None),
    "another device": lambda: linear_attention(*drawn(device="meta"), causal=True),
    "a question": lambda: explain(*drawn(), causal=True),
    "softmax attention": lambda: isopos.softmax_attention(*drawn(), causal=True),
}


@pytest.mark.parametrize("call", WOULD)
def test_the_first_call_that_it_would_have_served_says_so_once(call):
    found = told(lambda: (WOULD[call](), WOULD[call]()))
    assert [warning.category for warning in found] == [RuntimeWarning]
    message = str(found[0].message)
    assert message.startswith("linear attention on a CPU goes without its compiled kernel")
    assert "where it finds gcc" in message
    assert "pip install --force-reinstall" in message
    assert found[0].filename == __file__  # the line that called isopos, whatever was between


@pytest.mark.parametrize("call", WOULD_NOT)
def test_what_it_would_not_have_served_says_nothing(call):
    assert not told(WOULD_NOT[call])
    assert len(told(WOULD["causal"])) == 1


def test_reasons_are_the_same_before_and_after_the_warning():
    cases = (torch.float64, None), (torch.float32, FeatureMap("own", torch.exp)), (torch.float32, None)

    def asked():
        return [str(explain(*drawn(dtype), causal=True, feature_map=phi)) for dtype, phi in cases]

    before = asked()
    assert told(WOULD["causal"])
    assert asked() == before
    for text, reason in zip(before, ("it sums up float32", "feature map 'own'", library.ABSENT), strict=True):
        assert reason in text


def test_a_warning_that_is_an_error_leaves_a_stream_as_it_was():
    scheme, (q, k, v) = isopos.rope(16, 2), drawn()
    token, steps = [x[..., :1, :] for x in (q, k, v)], Stream(scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="goes without its compiled kernel"):
            steps(*token)
    assert steps.length == 0
    out = torch.cat([steps(*(x[..., i : i + 1, :] for x in (q, k, v))) for i in range(8)], -2)
    assert steps.length == 8
    torch.testing.assert_close(out, scheme(q, k, v, isopos.sequence(8), causal=True), rtol=1e-4, atol=1e-5)


def test_nothing_is_warned_of_where_it_is_installed(monkeypatch):
    monkeypatch.undo()
    if not library.libraries()[0]:
        pytest.skip(library.libraries()[1])
    monkeypatch.setattr(library, "warned", False)
    assert not told(lambda: (WOULD["causal"](), WOULD["a step"](), WOULD_NOT["float64"]()))


def test_the_table_of_what_it_is_worth(monkeypatch):
    monkeypatch.undo()
    if not library.libraries()[0]:
        pytest.skip(library.libraries()[1])
    monkeypatch.setattr(without_kernel, "SCHEMES", ("rope",))
    monkeypatch.setattr(without_kernel, "WORKLOADS", dict(list(without_kernel.WORKLOADS.items())[-1:]))
    ((title, name, *cells),) = without_kernel.table(rounds=1)
    assert (title, name) == ("a step of `isopos.Stream`", "rope")
    for cell, unit in zip(cells, (" us", " us", "x"), strict=True):
        assert float(cell.removesuffix(unit)) > 0
        assert cell.endswith(unit)
