"""What tests of both kernels that compiled code calls as operators have in common."""

from collections.abc import Callable
from typing import Any

import torch
from cases import linear_options

from isopos import linear_attention
from isopos.feature_maps import elu1


def compiled(backend: Any = "aot_eager", attend: Any = linear_attention) -> Any:
    """Attention as one graph."""
    return torch.compile(attend, fullgraph=True, backend=backend)


def with_learned_table(attend: Callable[[Any], Any], dtype: torch.dtype, inputs: Any, grad: Any, shared: bool) -> list[Any]:
    """Output of rotated attention, and gradients of its inputs q, k, v (q twice if `shared`) and of the table of both.

    Args:
        attend: What runs the function of the inputs and the table, such as a compiler.
        dtype: Dtype of all tensors.
        inputs: q, k and v ``[b h t d]``; k is left out if it is `shared` with q.
        grad: Gradient of the output.
        shared: Whether queries are the keys.
    """
    isometry = linear_options("rope", *inputs[0].shape)["isometry"]

    def rotated(*given):
        *tokens, v, table = given
        q, k = tokens[0], tokens[-1]
        return linear_attention(q, k, v, isometry=isometry.replace([table]), feature_map=elu1, causal=True)

    tensors = [inputs[0], *inputs[1 + shared :], *isometry.tensors()]
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    out = attend(rotated)(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def exported_operations(inputs: Any) -> list[str]:
    """Names of the operations of an exported program of causal attention."""

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return linear_attention(q, k, v, causal=True)

    return [str(node.target) for node in torch.export.export(Attend(), tuple(inputs)).graph.nodes]
