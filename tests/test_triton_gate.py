"""Test isopos.ops.gpu: the conditions under which Triton kernels may read a tensor."""

import pytest
import torch

from isopos.ops import gpu


def test_no_kernel_of_a_gpu_reads_a_cpus_tensor(monkeypatch):
    monkeypatch.setenv("ISOPOS_TRITON", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gpu.unreadable("step", torch.ones(2)) == "it runs on CUDA devices, not on cpu"


def test_it_is_off_by_default(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("ISOPOS_TRITON", raising=False)
    assert "ISOPOS_TRITON=1 in the environment asks for it" in gpu.unreadable("step", torch.ones(2))


@pytest.mark.triton
@pytest.mark.skipif(not gpu.interpreted(), reason="TRITON_INTERPRET=1 is not set")
def test_the_interpreter_reads_plain_tensors_of_a_cpu():
    assert gpu.unreadable("step", torch.ones(2), torch.ones(3)) == ""
    assert (
        gpu.unreadable("step", torch.ones(2), torch.ones(2, dtype=torch.complex64).conj().imag)
        == "it reads plain tensors only"
    )
    assert gpu.unreadable("step", torch.ones(2, device="meta")) == "it runs on CUDA devices, not on meta"


def test_modules_of_kernels_can_be_imported_without_triton(monkeypatch):
    monkeypatch.setattr(gpu, "_absent", lambda: "triton is not installed")
    jit, _ = gpu.language()
    assert jit(len) is jit(len, do_not_specialize=("n",)) is len
