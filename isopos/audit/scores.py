"""Recording and changing queries, keys and logits of attention in any torch code, without knowledge of the model."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
FORBIDDEN = -5e3  # smaller logits are masked


@dataclass(frozen=True)
class Attended:
    """One softmax attention of a call with a single row of t tokens.

    Args:
        name: The module that computes it.
        product: Number of the product of queries and keys among all of the call.
        q, k: Queries and keys ``[h t d]`` after any rotation; None where the product is of an unknown form.
        logits: ``[h t t]``, float64, minus infinity where a mask forbids the pair.
    """

    name: str
    product: int
    q: Tensor | None
    k: Tensor | None
    logits: Tensor


@contextmanager
def recorded_attention(module: nn.Module, count: int, changes: Mapping[int, Change] | None = None):
    """Record the attention of calls with `count` tokens in a list; `changes` of q and k by number of the product."""
    watch = _Watch(count, changes or {})

    def left(*_: Any) -> None:
        watch.names.pop()

    with ExitStack() as stack:
        for name, child in module.named_modules():
            stack.callback(child.register_forward_pre_hook(lambda _, __, name=name: watch.names.append(name)).remove)
            stack.callback(child.register_forward_hook(left, always_call=True).remove)
        stack.enter_context(watch)
        yield watch.seen


@contextmanager
def layers(module: nn.Module, count: int, change: Callable[[int, Tensor], Tensor]):
    """Replace the input features of every layer of a stack: ``change(n, features [1 t d])`` at the n-th call of a layer.

    Yields the list of the features that the layers would have had. Layers are the items of `nn.ModuleList` and
    `nn.Sequential` that are called with features of `count` tokens.
    """
    inputs: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        name = "hidden_states" if "hidden_states" in options else None
        x = options[name] if name else args[0] if args else None
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != count or not x.is_floating_point():
            return None
        inputs.append(x.detach().clone())
        x = change(len(inputs) - 1, x)
        return (args, options | {name: x}) if name else ((x, *args[1:]), options)

    stacks = [child for child in module.modules() if isinstance(child, nn.ModuleList | nn.Sequential)]
    with ExitStack() as stack:
        for layer in (one for many in stacks for one in many):
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield inputs


def equal(_: int, x: Tensor) -> Tensor:
    """The features of the first token at all tokens, so that only the encoding of a layer tells positions apart."""
    return x[:, :1].expand_as(x).contiguous()


class _Watch(TorchFunctionMode):
    """Records products of queries and keys, and the softmax that follows."""

    def __init__(self, count: int, changes: Mapping[int, Change]):
        super().__init__()
        self.count, self.changes = count, changes
        self.seen: list[Attended] = []
        self.names = [""]
        self.products = 0
        self.last: tuple[int, Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = getattr(func, "__name__", ""), kwargs or {}
        if name == "softmax":
            self._softmax(args[0] if args else options["input"])
        pair = self._operands(name, args, options)
        if pair is None:
            return func(*args, **options)
        number, self.products = self.products, self.products + 1
        q, k = pair
        if number in self.changes:
            q, k = (a.to(q.dtype) for a in self.changes[number](q, k))
        self.last = (number, q, k)
        if name == "scaled_dot_product_attention":
            self._whole(number, q, k, args, options)
            return func(q, k, *args[2:], **{key: a for key, a in options.items() if key not in ("query", "key")})
        if number not in self.changes:
            return func(*args, **options)
        rest = {key: a for key, a in options.items() if key in ("beta", "alpha")}
        return func(args[0], q, k.mT, **rest) if name == "baddbmm" else q @ k.mT

    def _operands(self, name: str, args: Any, options: Any) -> tuple[Tensor, Tensor] | None:
        """Queries ``[*b t d]`` and keys ``[*b t d]`` of a product of both, or None for any other function."""
        factors = [*args, *(options[key] for key in ("query", "key", "batch1", "batch2", "other", "mat2") if key in options)]
        if name == "scaled_dot_product_attention":
            q, k = factors[0], options.get("key", factors[1])
        elif name in ("matmul", "__matmul__", "bmm", "baddbmm"):
            q, k = factors[1:3] if name == "baddbmm" else factors[:2]
            k = k.mT if isinstance(k, Tensor) and k.ndim > 2 else None
        elif name == "einsum" and len(args) == 3 and isinstance(args[0], str):
            q, k = _einsum(*args)
        else:
            return None
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and min(q.ndim, k.ndim) > 2):
            return None
        fits = q.shape[-2] == k.shape[-2] == self.count and q.shape[-1] == k.shape[-1] != self.count
        return (q, k) if fits else None

    def _softmax(self, logits: Tensor) -> None:
        """Logits of attention; more than t columns are sinks at the end."""
        if logits.ndim < 3 or logits.shape[-2] != self.count or not 0 <= logits.shape[-1] - self.count <= 1:
            return
        logits = logits[..., : self.count]
        number, q, k = self.last or (-1, None, None)
        if q is not None and k is not None:
            fits = q.shape[:-1].numel() == logits.shape[:-1].numel()
            q, k = (q, k.expand(*q.shape[:-2], *k.shape[-2:])) if fits else (None, None)
        self._enter(number, q, k, logits)

    def _whole(self, number: int, q: Tensor, k: Tensor, args: Any, options: Any) -> None:
        """Scaled dot-product attention in one call."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        arguments = {**dict(zip(names, args, strict=False)), **options}
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if arguments.get("enable_gqa") else k
        scale = arguments.get("scale")
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        mask = arguments.get("attn_mask")
        if arguments.get("is_causal"):
            mask = torch.ones(self.count, self.count, dtype=torch.bool).tril()
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        self._enter(number, q, k, logits)

    def _enter(self, number: int, q: Tensor | None, k: Tensor | None, logits: Tensor) -> None:
        flat = [None if a is None else a.detach().double().reshape(-1, *a.shape[-2:]) for a in (q, k, logits)]
        assert flat[2] is not None
        allowed = flat[2] > FORBIDDEN
        self.seen.append(Attended(self.names[-1], number, flat[0], flat[1], flat[2].masked_fill(~allowed, -torch.inf)))


def _einsum(equation: str, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The operands of an einsum with axes as in a matrix product, if the equation is one."""
    terms, _, out = equation.replace(" ", "").partition("->")
    first, _, second = terms.partition(",")
    summed = set(first) & set(second) - set(out)
    if len(summed) != 1 or len(out) < 3 or "." in equation or set(out[:-2]) - (set(first) & set(second)):
        return None, None
    if out[-2] not in first or out[-1] not in second:
        return None, None
    orders = (first, out[:-2] + out[-2] + "".join(summed)), (second, out[:-2] + out[-1] + "".join(summed))
    if any(sorted(letters) != sorted(order) for letters, order in orders):
        return None, None
    return tuple(a.permute([x.index(one) for one in y]) for a, (x, y) in zip((q, k), orders, strict=True))  # pyright: ignore
