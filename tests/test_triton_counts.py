"""Test how the machine code of Triton's kernels is counted."""

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'isopos[gpu-test]'")

from fla_counts import BATCH, HEADS, TOKENS, counted
from triton_aot import started
from triton_counts import loop_of

pytestmark = pytest.mark.triton


def test_the_largest_loop_is_counted():
    code = ["MOV R1, c[0x0][0x28]", "FADD R1, R1, R2", "@!P0 BRA 0x10", "@P1 FADD R1, R1, R3", "IMAD R4, R4, R5, RZ"]
    code += ["@P0 BRA `(.L_x_1) 0x10", "NOP", "EXIT", "BRA 0x80"]
    text = "\n".join(f"        /*{16 * n:04x}*/  {said} ;  /* 0x000fe200 */" for n, said in enumerate(code))
    assert loop_of(text) == {"FADD": 2, "BRA": 2, "IMAD": 1}
    without = text.replace("BRA", "BRX")
    assert loop_of(without).total() == len(code) - 1  # NOP is not counted


def test_launches_are_counted_with_their_memory_traffic():
    with started(1) as pool:
        forward, backward = pool.submit(counted, "isopos", False, 64).result()
    assert [own.kernel for own in forward] == ["states", "scan", "outputs"]
    assert {own.kernel for own in backward} == {"states", "scan", "gradients"}
    head = HEADS * BATCH * TOKENS * 64 * 2  # bytes of queries, of keys, and so on
    of_states = forward[1].traffic
    assert [own.traffic for own in forward] == [2 * head + of_states, of_states, 4 * head + of_states]
    assert all(own.instructions > 0 for own in forward + backward)
