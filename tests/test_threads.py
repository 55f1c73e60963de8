"""Test that the C kernel's threads bear copies of the process, workers of a DataLoader, and Python threads."""

import os
import subprocess
import sys

import pytest

from isopos.ops import library

pytestmark = pytest.mark.skipif(not library.libraries()[0], reason=f"compiled sums: {library.libraries()[1]}")
START = """
import os, signal, threading
import torch
from isopos import linear_attention

torch.set_num_threads(2)
q, k, v = torch.randn(3, 2, 4, 600, 32)
q.requires_grad_()

def run():
    out = linear_attention(q, k, v, causal=True)
    return out.detach(), *torch.autograd.grad(out.sum(), q)

def same():
    return all(torch.equal(a, b) for a, b in zip(run(), expected))

expected = run()  # PyTorch's threads have started
"""
FORKED = """
child = os.fork()
if not child:
    signal.alarm(60)  # instead of a wait for threads that the copy does not have
    with torch.no_grad():
        out = linear_attention(q, k, v, causal=True)
    os._exit(0 if (out.numpy() == expected[0].numpy()).all() else 3)  # PyTorch's comparison would wait
assert os.waitpid(child, 0)[1] == 0
assert same()
"""
LOADED = """
class Outputs(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, n):
        return linear_attention(q.detach()[:, : 1 + n % 2], k[:, : 1 + n % 2], v[:, : 1 + n % 2], causal=True)

for n, (out,) in enumerate(torch.utils.data.DataLoader(Outputs(), num_workers=2, timeout=240)):
    assert torch.allclose(out, expected[0][:, : 1 + n % 2], atol=1e-5), n
"""
THREADED = """
wrong = []
threads = [threading.Thread(target=lambda: wrong.extend(1 for _ in range(10) if not same())) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not copy processes")
def test_copies_workers_and_python_threads_get_the_same_results():
    program = START + FORKED + LOADED + THREADED
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
