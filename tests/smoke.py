"""A short check of an installed isopos against stored float64 numbers: `python tests/smoke.py [INSTRUCTIONS]`.

It checks whole sequences, gradients and steps of a stream in float32. INSTRUCTIONS names the library that must serve, such
as "AVX2". --write stores the numbers of the definition in float64. The check needs only torch and isopos.
"""

import json
import sys
from pathlib import Path

import torch

import isopos
from isopos.ops import library

STORED = Path(__file__).with_name("expected") / "smoke.json"
TOKENS, D, E = 70, 12, 9


def drawn(dtype):
    """Inputs from sine waves. The numbers of random generators depend on their version."""
    waves = [torch.arange(2 * TOKENS * n, dtype=torch.float64).mul(step).sin() for n, step in ((D, 0.7), (D, 1.1), (E, 1.7))]
    return [x.reshape(1, 2, TOKENS, -1).to(dtype).requires_grad_() for x in waves]


def numbers(attend, dtype):
    """Weighted sums of the outputs and gradients of some schemes. Every element has a nonzero weight."""
    found = {}
    for name in ("rope", "retnet", "permuteformer", "none"):
        for causal in (True, False):
            scheme, inputs = isopos.schemes.REGISTRY[name](D, 2), drawn(dtype)
            given = scheme.at(isopos.sequence(TOKENS), dtype=dtype) | {"causal": causal}
            out = attend(*inputs, **given)
            tensors = [out.detach(), *torch.autograd.grad((out * weights(out)).sum(), inputs)]
            found[f"{name} {'causal' if causal else 'all keys'}"] = [float((x.double() * weights(x)).sum()) for x in tensors]
    return found


def weights(x):
    return torch.arange(x.numel(), dtype=torch.float64).mul(0.37).cos().reshape(x.shape)


def check(instructions: str) -> None:
    stored, found = json.loads(STORED.read_text()), numbers(isopos.linear_attention, torch.float32)
    assert stored.keys() == found.keys()
    for name, exact in stored.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(exact), rtol=2e-4, atol=2e-4, msg=name)
    with torch.no_grad():
        scheme, (q, k, v) = isopos.rope(D, 2), drawn(torch.float32)
        steps = isopos.Stream(scheme)
        out = torch.cat([steps(*(x[..., i : i + 1, :] for x in (q, k, v))) for i in range(TOKENS)], -2)
    assert abs(float((out.double() * weights(out)).sum()) - stored["rope causal"][0]) < 2e-4
    assert instructions in library.libraries()[1], library.libraries()[1]
    print(f"{isopos.__file__}: {library.libraries()[1]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        STORED.write_text(json.dumps(numbers(isopos.attention.naive_linear_attention, torch.float64), indent=1) + "\n")
    else:
        check(*(sys.argv[1:] or [""]))
