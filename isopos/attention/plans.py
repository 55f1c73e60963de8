"""Plans of calls of linear attention: a call like an earlier one skips its checks, and runs the C kernel right away.

Calls are alike if everything that checks see is equal, except numbers: shapes, strides, dtypes, needs of gradients, the
structure of maps, options. The order of log decays is checked in each call.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from isopos.attention.checks import DecayPair, IsometryPair, check_order
from isopos.attention.problem import LinearProblem
from isopos.feature_maps import FeatureMap, Phi
from isopos.maps import Chain, Gather, Identity, Reflection, Rotation, pair
from isopos.ops import gpu, library, linear
from isopos.ops.linear.cpu import CPU
from isopos.ops.linear.cpu_plan import CpuPlan
from isopos.ops.linear.features import Sums

MOST = 256  # plans that are kept
_PLANS: dict[Any, tuple[Any, CpuPlan | None]] = {}  # by key: the libraries, and the plan, or None if there can be none


class Planned:
    """A call that may have a plan: its key, and its tensors in the order of `isopos.ops.linear.autograd.operands`."""

    def __init__(self, key: Any, inputs: list[Any], causal: bool):
        self.key, self.inputs, self.causal = key, inputs, causal

    def run(self) -> Tensor | None:
        """The output by a plan made before; None without one, or if a number is not finite."""
        libraries, plan = _PLANS.get(self.key, (None, None))
        if plan is None or libraries is not library.libraries()[0]:
            return None
        q, _, _, g_q, g_k, *_ = self.inputs
        if g_q is not None:
            _check_order(g_q, g_k, self.causal)
        out = plan(self.inputs)
        return out if out is None or out.dtype is q.dtype else out.to(q.dtype)

    @property
    def is_new(self) -> bool:
        """Whether it is not known if calls like this one can have a plan."""
        libraries = library.libraries()[0]
        return bool(libraries) and not gpu.interpreted() and _PLANS.get(self.key, (None, None))[0] is not libraries

    def make(self, problem: LinearProblem, sums: Sums) -> bool:
        """Plan calls like this new one, whose problem was checked; returns whether there is a plan."""
        same = all(a is b for a, b in zip(sums.inputs, self.inputs, strict=False)) and problem.groups == 1
        serves = same and not problem.empty and next(each for each in linear.BACKENDS if not each.serves(sums)) is CPU
        if len(_PLANS) >= MOST:
            _PLANS.clear()
        plan = CpuPlan.of(sums) if serves else None
        _PLANS[self.key] = library.libraries()[0], plan
        return plan is not None


def planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    isometry: IsometryPair,
    feature_map: Phi | None,
    decay: DecayPair,
    denominator: str | None,
    causal: bool,
) -> Planned | None:
    """The call of these arguments without other options, not yet checked; None if no plan can serve it."""
    plain = feature_map is None or type(feature_map) is FeatureMap
    if not (plain and type(causal) is bool and (denominator is None or type(denominator) is str)) or library.watched():
        return None
    if (isinstance(isometry, tuple) and len(isometry) != 2) or (isinstance(decay, tuple) and len(decay) != 2):
        return None  # the check says why
    g_q, g_k = decay if isinstance(decay, tuple) else (decay, decay)
    rho_q, rho_k = pair(isometry)
    maps: list[Any] = []
    forms = _form(rho_q, maps), None if rho_k is rho_q else _form(rho_k, maps)
    decays: Any = () if decay is None else (g_q,) if g_q is g_k else (g_q, g_k)
    if not all(map(library.is_plain, (q, k, v, *decays, *maps))):
        return None
    seen = [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in (q, k, v, *decays, *maps)]
    choices = torch.is_grad_enabled(), torch.get_num_threads(), causal, denominator, feature_map, len(decays), rho_k is rho_q
    return Planned((choices, forms, *seen), [q, k, v, g_q, g_k, *maps, *(maps if rho_k is rho_q else ())], causal)


_ordered: tuple[Any, ...] = ()  # the log decays that were checked last: shared by layers


def _check_order(g_q: Tensor, g_k: Tensor, causal: bool) -> None:
    """`check_order`, unless these decays were checked last and not changed since."""
    global _ordered
    if g_q is not g_k or g_k.is_inference():  # an inference tensor has no version
        check_order((g_q, g_k), causal)
    elif not (_ordered and _ordered[0]() is g_k and _ordered[1] == g_k._version):
        check_order((g_k, g_k), causal)
        _ordered = weakref.ref(g_k), g_k._version  # one assignment, so that other threads see old or new decays


def _form(rho: Any, tensors: list[Any]) -> Any:
    """What a map consists of, except tensors, which are added to a list; None is added for other maps."""
    kind = type(rho)
    if kind is Rotation:
        tensors.append(rho.table)
        return kind, rho.lifted
    if kind is Gather:
        tensors.append(rho.index)
        return kind, rho.constant
    if kind is Reflection:
        tensors.append(rho.normal)
    elif kind is Chain:
        return kind, _form(rho.first, tensors), _form(rho.second, tensors)
    elif not (rho is None or kind is Identity):
        tensors.append(None)
    return kind
