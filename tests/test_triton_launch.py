"""Test launches of the Triton kernels on an imagined GPU: how many a call has, and how many variants it compiles."""

import pytest
from fake_gpu import attention, fake_gpu, rotation, steps
from triton_aot import compilers

from isopos.ops import gpu

pytestmark = [pytest.mark.triton, pytest.mark.skipif(bool(gpu._absent()), reason="triton is not installed")]


@pytest.fixture(scope="module")
def elsewhere():
    """Call a function in a process that does not interpret kernels."""
    with compilers(1) as pool:
        yield lambda job, *arguments: pool.submit(job, *arguments).result()


def attended(name, t):
    with fake_gpu() as found:
        forward, backward = attention(name, t)
        outs = []
        launches = [found.since(lambda: outs.append(forward())), found.since(lambda: backward(outs[0]))]
        variants = len(found.variants)
        again = found.since(lambda: backward(forward()))
        return launches, again, variants, len(found.variants)


@pytest.mark.parametrize(("t", "before"), [(64, []), (1024, ["states", "scan"])])
def test_a_call_of_attention(elsewhere, t, before):
    (forward, backward), again, variants, after = elsewhere(attended, "rope", t)
    assert forward == [*before, "outputs"]
    assert backward == ["quotients", *before, "gradients", "gradients", "outputs"]
    assert again == forward + backward
    assert variants == after <= len(again)


def stepped():
    with fake_gpu() as found:
        step = steps("rope")
        return [found.since(step) for _ in range(70)], found.variants


def test_a_step_is_one_launch_of_one_variant(elsewhere):
    tokens, variants = elsewhere(stepped)
    assert tokens[1:] == [["step"]] * 69  # the first token is not a prepared one
    assert variants.count("step") == 1


def rotated():
    with fake_gpu() as found:
        forward, backward = rotation(100)
        outs = []
        return found.since(lambda: outs.append(forward())), found.since(lambda: backward(outs[0]))


def test_a_rotation_is_one_launch(elsewhere):
    assert elsewhere(rotated) == (["rotation_kernel"], ["rotation_vjp_kernel"])
