"""Test launches of the Triton kernels on an imagined GPU: how many a call has, and how many variants it compiles."""

import re
from collections import Counter

import pytest
from fake_gpu import attention, fake_gpu, rotation, steps
from triton_aot import started

from isopos.ops import gpu

pytestmark = [pytest.mark.triton, pytest.mark.skipif(bool(gpu._absent()), reason="triton is not installed")]


@pytest.fixture(scope="module")
def elsewhere():
    """Call a function in a process that does not interpret kernels."""
    with started(1) as pool:
        yield lambda job, *arguments: pool.submit(job, *arguments).result()


def attended(name, t):
    with fake_gpu() as found:
        forward, backward = attention(name, t)
        outs = []
        launches = [found.since(lambda: outs.append(forward())), found.since(lambda: backward(outs[0]))]
        variants = len(found.variants)
        again = [found.since(lambda: backward(forward())) for _ in range(3)]
        return launches, again, variants, len(found.variants)


@pytest.mark.parametrize(("t", "before"), [(64, []), (1024, ["states", "scan"])])
def test_a_call_of_attention(elsewhere, t, before):
    (forward, backward), again, variants, after = elsewhere(attended, "rope", t)
    assert forward == [*before, "outputs"]
    assert backward == ["quotients", *before, "gradients", "gradients"]  # the second also of values
    assert again == 3 * [forward + backward]  # the second call is recorded, later ones repeat its launches
    assert variants == after <= len(forward + backward)


LENGTHS = [17, 50, 63, 64, 100, 128, 200, 255, 256, 333, 500, 512, 777, 1000, 1024, 1500, 2048, 3000, 4096, 5000]


def compiled(name, shapes):
    """Variants of each kernel that calls of these numbers of samples and tokens compile."""
    with fake_gpu(compiles=False) as found:
        for b, t in shapes:
            forward, backward = attention(name, t, b=b, h=1, d=32)
            backward(forward())
        return Counter(found.variants.values())


@pytest.mark.parametrize(("name", "with_lengths"), [("rope", 1), ("retnet", 2)])
@pytest.mark.parametrize("shapes", [[(1, t) for t in LENGTHS], [(b, 100) for b in range(1, 18)]], ids=["lengths", "batches"])
def test_lengths_and_batches_share_variants(elsewhere, name, with_lengths, shapes):
    """Log decays, whose strides are not those of the kernels' own buffers, have one more for multiples of 16."""
    before = 2 * with_lengths  # with and without states before the only segment
    kernels = {"outputs": 2 * before, "gradients": 2 * before, "states": before, "scan": before, "quotients": 1}
    assert all(found <= kernels[kernel] for kernel, found in elsewhere(compiled, name, shapes).items())


def memory():
    """Kernels, and how many 16-byte copies to shared memory and 2-byte loads each of their variants has."""
    with fake_gpu() as found:
        forward, backward = attention("rope", 1000)
        backward(forward())
        count = [(name, *(len(re.findall(how, ptx)) for how in (COPIES, LOADS))) for name, ptx in found.assembly()]
        return [x for x in count if x[0] not in ("scan", "quotients")]


COPIES, LOADS = r"cp\.async\.cg\.shared\.global [^;]*, 0x10", r"ld\.global[.\w]*\.[bu]16"


def test_loads_of_any_length_are_vectors(elsewhere):
    for name, copies, loads in elsewhere(memory):
        assert copies >= 16, name
        assert not loads, name


def stepped():
    with fake_gpu() as found:
        step = steps("rope")
        return [found.since(step) for _ in range(70)], [*found.variants.values()]


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
