"""Linear attention: sums of values under factorised weights, at a cost proportional to length.

One primitive carries everything:

    total_i = sum_j <q_i, k_j> exp(g_i - g_j) v_j

A denominator is the same sum with v = 1, of the same features ("encoded") or of unrotated ones ("plain"). q, k
``[*b h t d]`` are features, v ``[*b h t e]`` values, g a pair of float64 log decays ``[*b h t]`` (queries, keys) that do not
increase along tokens. Causal sums run over j <= i. Otherwise they run over all j and a decay weighs both directions,
exp(-|g_i - g_j|): the causal sum, and one over j > i that scans from the last token to the first. The specification is the
definition in `isopos.attention.reference`; the fast sums scan over chunks and are tested against it.

Glossary. *Features* of the inputs q, k and v are phi followed by a map of positions (`Features`); *unrotated* features are
phi alone. A *mask* tells which keys take part. The *log decay* g weighs the past. The *denominator* divides sums. A *chunk*
is a few tokens whose weights are formed explicitly; a *chunk group* is a few chunks of a few heads that go through one
operation; a *scan* visits the groups of some heads (a `Slices`). A *state* is the sum of k v^T over past tokens. *Buffers*
are reused memory. A *stream* is a sequence that arrives in pieces, a *step* one token of it. `Sums` is a checked, complete
problem; a *backend* serves it or returns the reason why not; a *kernel* is a backend with a forward and a backward pass.
"""

from dataclasses import dataclass

from torch import Tensor

from isopos.ops.linear.autograd import Backend, chosen
from isopos.ops.linear.containment import contained
from isopos.ops.linear.division import Clamped, divide, divide_complex
from isopos.ops.linear.features import Past, Sums
from isopos.ops.linear.graph import GRAPH
from isopos.ops.linear.kernels import KERNELS
from isopos.ops.linear.triton_step import STEP
from isopos.ops.linear.window import windowed

__all__ = ["BACKENDS", "Clamped", "Explanation", "Past", "Sums", "divide", "divide_complex", "explain", "linear"]
__all__ += ["windowed"]

BACKENDS: tuple[Backend, ...] = (*KERNELS, STEP, GRAPH)


@dataclass(frozen=True)
class Explanation:
    """The backend that serves a problem, and the reasons why backends before it do not."""

    backend: str
    refusals: dict[str, str]

    def __str__(self) -> str:
        refusals = (f"{name} does not: {why}" for name, why in self.refusals.items())
        return "\n".join((f"{self.backend} serves", *refusals))


def explain(sums: Sums) -> Explanation:
    """The backend that serves a problem. `isopos.attention.explain` takes the arguments of `linear_attention` instead.

    Examples:
        >>> import torch
        >>> from isopos.ops.linear.features import ALL_READY
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16, dtype=torch.float64)
        >>> print(explain(Sums(q, k, v, ALL_READY)))
        chunks serves
        triton does not: it runs on CUDA devices, not on cpu
        cpu does not: it sums up float32, not torch.float64
    """
    sums, refusals = sums.lifted(), {}
    for backend in BACKENDS:
        if not (why := backend.serves(sums)):
            return Explanation(backend.name, refusals)
        refusals[backend.name] = why
    raise AssertionError("the last backend serves everything")


def linear(sums: Sums) -> Tensor:
    """The sums ``[*b h t e]``, or ``[*b h t e+1]`` with a column, in `Sums.dtype`. Differentiable once."""
    if sums.q.ndim == 3:
        return linear(sums.lifted())[0]
    return contained(sums, stream(sums)[0], lambda clean: stream(clean)[0])


def stream(sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sums for the next tokens of a stream, as `linear` returns them, and the sums of k v^T after them."""
    backend = chosen(BACKENDS, sums)
    assert backend is not None  # the last one serves everything
    return backend.run(sums)
