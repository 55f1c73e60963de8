"""Test how the machine code of Triton's kernels is counted."""

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'isopos[gpu-test]'")

from triton_counts import loop_of

pytestmark = pytest.mark.triton


def test_the_largest_loop_is_counted():
    code = ["MOV R1, c[0x0][0x28]", "FADD R1, R1, R2", "@!P0 BRA 0x10", "@P1 FADD R1, R1, R3", "IMAD R4, R4, R5, RZ"]
    code += ["@P0 BRA `(.L_x_1) 0x10", "NOP", "EXIT", "BRA 0x80"]
    text = "\n".join(f"        /*{16 * n:04x}*/  {said} ;  /* 0x000fe200 */" for n, said in enumerate(code))
    assert loop_of(text) == {"FADD": 2, "BRA": 2, "IMAD": 1}
    without = text.replace("BRA", "BRX")
    assert loop_of(without).total() == len(code) - 1  # NOP is not counted
