"""Checks of the gradients of positional parameters."""

import copy
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from isopos.audit.checks import check, judged, unless
from isopos.audit.report import Finding
from isopos.audit.subject import Subject

LEARNED = re.compile(  # words of a name; property is none
    r"(?<![a-z])(freq|rotary|rope|relative_attention_bias|slope|alibi|angle|pos_bias|position_bias)", re.IGNORECASE
)


@check("gradient", "Does a gradient reach learned frequencies and biases in every head?")
def gradient(subject: Subject) -> Iterator[Finding]:
    """Check gradients of a random function of the outputs, for positional parameters by name and for each head."""
    module = copy.deepcopy(subject.exact).requires_grad_(False)
    learned = {name: p for name, p in module.named_parameters() if LEARNED.search(name) and p.is_floating_point()}
    unless(not learned, "no parameter named after frequencies, rotations or biases of positions was found")
    for parameter in learned.values():
        parameter.requires_grad_()
    out = subject.call(module, subject.tokens(1, subject.length))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    reachable = out.requires_grad
    if reachable:
        (out.double() * weights).sum().backward()
    for name, parameter in learned.items():
        dead = _dead(name, parameter, subject.heads)
        finite = parameter.grad is None or bool(parameter.grad.isfinite().all())
        sound, remedy = not dead and finite, "compute angles with a gradient, by a kernel that differentiates them"
        measured = "it does" if sound else dead or "a gradient is not finite"
        yield judged("a finite gradient reaches every head", measured, sound, name, remedy)


def _dead(name: str, parameter: nn.Parameter, heads: int | None) -> str:
    """A description of the heads without a gradient."""
    grad = parameter.grad
    if grad is None or not bool(grad.any()):
        return "no gradient at all"
    axis = next((i for i, n in enumerate(grad.shape) if n == heads), None)
    if heads is None and grad.ndim > 1 and "bias" not in name:
        axis = 0
    if axis is None:
        return ""
    per_head: Tensor = grad.movedim(axis, 0).flatten(1).any(1) if grad.ndim > 1 else grad != 0
    missing = [str(i) for i in range(len(per_head)) if not bool(per_head[i])]
    return f"no gradient in head {', '.join(missing)}" if missing else ""
