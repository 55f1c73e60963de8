"""The kernels in order of preference. A new kernel is a new file and an entry here."""

from isopos.ops.linear.autograd import Kernel
from isopos.ops.linear.chunks import CHUNKS
from isopos.ops.linear.cpu import CPU
from isopos.ops.linear.triton import TRITON

KERNELS: tuple[Kernel, ...] = (TRITON, CPU, CHUNKS)
