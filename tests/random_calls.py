"""Random calls of attention, compared with the definition in float64.

One argument may be odd: of a wrong device, kind, dtype or shape. The call then returns a correct result or raises one clear
error. Masked entries contain NaN and infinity, which must not change the result.
"""

import copy
import itertools
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from strategies import CALL
from torch import Tensor

import isopos
from isopos import encodings
from isopos.attention import reference
from isopos.feature_maps import FEATURE_MAPS, Favor, identity, sides
from isopos.maps import Identity, Mapped, TokenMap
from isopos.ops.linear.division import EPS
from isopos.terms import Term
from tools.record import positions

OTHER_SHAPES = ("longer", "shorter", "deeper", "flat", "pair", "list", "numpy", "text", "number", "none")
OTHER_NUMBERS = ("nan", "inf", "half", "double", "integer", "complex", "bool", "sparse", "empty", "zero", "expanded")
ROUNDINGS = 1024  # times eps, of what is summed up
CLEAR = re.compile(r"^(\w[\w .,:\[\]'-]*): .*expected .*\bgot\b|^\w+: expected ", re.S)


class Wrong(AssertionError):
    """A wrong result of a call."""


def is_clear(error: BaseException) -> bool:
    """Whether an error states the expected and the received value."""
    return isinstance(error, ValueError | TypeError | RuntimeError) and bool(CLEAR.search(str(error)))


def run(case: Mapping[str, Any]) -> str:
    """Outcome of a call with these arguments and simplest others: "answer" or "error". Raises `Wrong` for a wrong result."""
    whole = SimpleNamespace(**{name: values[0] for name, values in CALL.items()} | case)
    torch.manual_seed(whole.seed)
    torch.set_default_dtype(getattr(torch, whole.default))
    try:
        return Call(whole).outcome()
    finally:
        torch.set_default_dtype(torch.float32)


class Call:
    """One call, its arguments, and the expected result."""

    def __init__(self, case: SimpleNamespace):
        self.case, self.kind = case, "softmax" if case.call.endswith("softmax") else "linear"
        self.batch, self.heads, self.shared, self.t = case.batch, case.heads, case.shared, case.t
        self.streams = case.call.startswith("stream")
        self.s = self.t if case.s is None or self.streams else case.s
        self.dtype, self.causal = getattr(torch, case.dtype), case.causal or self.streams
        self.wide = torch.promote_types(self.dtype, torch.float32)

    def outcome(self) -> str:
        """Outcome of the call."""
        try:
            self.prepare()
            if self.case.call == "decoder":
                return self.decoded()
            with self.mode():
                out = self.answer()
        except (ValueError, TypeError, RuntimeError) as error:
            if is_clear(error):
                return "error"
            raise
        if self.case.call != "explain":
            self.compare(out)
        return "answer"

    def mode(self) -> Any:
        """Contexts of the call, such as autocast."""
        modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        if self.case.mode in modes:
            return modes[self.case.mode]()
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype != torch.float16)  # torch has none for it

    def prepare(self) -> None:
        """Build the scheme and all arguments."""
        case = self.case
        name, _, rest = case.scheme.partition(":")
        options = dict(option.split("=") for option in rest.split(",") if option)
        scheme = isopos.schemes.build(name, case.d, self.heads, {"attention": self.kind} | options)
        with torch.no_grad():
            for parameter in scheme.to(self.wide).parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        self.scheme, d = scheme, scheme.encoding.features
        e = d // scheme.width if case.e is None else case.e
        shapes = (self.heads * self.shared, self.t, d), (self.heads, self.s, d), (self.heads, self.s, e)
        if case.layout == "packed" and self.t == self.s and self.shared == 1 and d == e:
            packed = torch.randn(*self.batch, self.t, 3, self.heads, d) * case.scale
            self.qkv = [x.transpose(-2, -3) for x in packed.to(self.dtype).unbind(-3)]
        else:
            self.qkv = [self.laid_out((case.scale * torch.randn(*self.batch, *shape)).to(self.dtype)) for shape in shapes]
        longest = max(self.t, self.s)
        ordered = self.places(longest)
        self.x, self.y = ordered[..., longest - self.t :, :], ordered[..., longest - self.s :, :]
        if scheme.group.refers_to_rows:
            self.x, self.y = ordered[..., : self.t, :], ordered[..., : self.s, :]
        self.own = self.arguments_of_call(longest)
        self.garbage()
        self.exact, self.given = self.at(torch.float64), self.at(self.wide)
        self.odd()
        for x in self.qkv if case.grad else ():
            if isinstance(x, Tensor) and x.is_floating_point() and x.is_leaf:
                x.requires_grad_()

    def places(self, t: int) -> Tensor:
        """Positions, separate per sample if the call has them."""
        first = self.case.far if self.scheme.group.is_grid else 0
        if not self.case.samples:
            return positions(self.scheme.group, t, self.case.seed) + first
        count = torch.Size(self.batch).numel()
        rows = torch.stack([positions(self.scheme.group, t, seed) + first for seed in range(max(1, count))])[:count]
        return rows.view(*self.batch, t, rows.shape[-1])

    def laid_out(self, x: Tensor) -> Tensor:
        """The same numbers in memory of another layout."""
        kind = self.case.layout
        if kind == "transposed":
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        if kind == "strided":
            return torch.stack((x, x + 1), -1).flatten(-2)[..., ::2]
        if kind == "expanded" and self.batch:
            return x[:1].expand_as(x)
        if kind == "offset":
            return torch.cat((x.new_ones(1), x.flatten()))[1:].view(x.shape)
        if kind == "reversed":
            return x.mT.contiguous().mT
        return x

    def arguments_of_call(self, longest: int) -> dict[str, Any]:
        """Mask, segments and other arguments that do not come from the scheme, by name."""
        case, s, found = self.case, self.s, {}
        place = torch.arange(s)
        masks = {
            "random": torch.rand(*self.batch, s) < 0.7,
            "left": (place >= s // 3).expand(*self.batch, s),
            "right": (place < s - s // 3).expand(*self.batch, s),
            "nothing": torch.zeros(*self.batch, s, dtype=torch.bool),
            "everything": torch.ones(*self.batch, s, dtype=torch.bool),
            "shared": torch.rand(s) < 0.7,
        }
        if case.mask and self.s:
            found["mask"] = masks[case.mask]
        kind = case.segments
        if kind and case.call != "naive":
            count = {"two": 2, "each": max(1, longest)}.get(kind, 4)
            ids = torch.arange(longest) * count // max(1, longest)
            ids = torch.sort(torch.randint(count, (*self.batch, longest)), -1).values if kind == "samples" else ids
            keys = ids[..., longest - s :].to(torch.int32 if kind == "int32" else torch.int64)
            found["segment_ids"] = (ids[..., longest - self.t :], keys) if kind == "pair" else keys
        return found | {"causal": self.causal}

    def decays(self, longest: int) -> Any:
        """Log decays of queries and keys, or one of both."""
        shape = {"one-head": (longest,), "samples": (*self.batch, self.heads, longest)}.get(
            self.case.decay, (self.heads, longest)
        )
        rate = {"steep": 50.0, "zero": 0.0, "stairs": 300.0}.get(self.case.decay, 0.2)
        steps = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * rate
        if self.case.decay == "stairs":
            steps = torch.where(steps > 0.8 * rate, steps, 0)
        g = -steps.cumsum(-1)
        return g if self.t == self.s else (g[..., longest - self.t :], g[..., longest - self.s :])

    def at(self, dtype: torch.dtype) -> dict[str, Any]:
        """The scheme's arguments at the positions, and the arguments that replace some of them."""
        case, scheme = self.case, self.scheme if dtype != torch.float64 else copy.deepcopy(self.scheme).double()
        same = self.x.shape == self.y.shape and torch.equal(self.x, self.y)
        found = dict(scheme.at(self.x, None if same else self.y, dtype=dtype))
        if case.call == "naive":
            found.pop("terms", None)
        if case.decay != "scheme":
            found["decay"] = None if case.decay is None else self.decays(max(self.t, self.s))
        if self.kind == "linear" and not scheme.inside:
            if case.phi != "scheme":
                favor = Favor(scheme.encoding.features, scheme.encoding.features)
                other = {None: None, "own": torch.nn.functional.softplus, "favor": favor}
                found["feature_map"] = other[case.phi] if case.phi in other else FEATURE_MAPS[case.phi]
            if case.denominator != "scheme":
                found["denominator"] = case.denominator
        return found

    def garbage(self) -> None:
        """Put NaN or infinity where weights are zero."""
        kind, value = self.case.garbage, float("inf") if self.case.garbage.endswith("inf") else float("nan")
        q, k, v = self.qkv
        self.clean, self.spoilt = [x.clone() for x in self.qkv], None
        if kind.startswith("masked") and "mask" in self.own:
            self.spoilt = ~self.own["mask"][..., None, :, None]
        elif kind.startswith("segment") and isinstance(ids := self.own.get("segment_ids"), Tensor) and ids.numel():
            self.spoilt = (ids == ids.flatten()[0])[..., None, :, None]
        elif kind == "later-nan" and self.causal and self.t == self.s > 1 and self.case.call != "naive":
            self.spoilt = (torch.arange(self.s) >= self.s // 2)[:, None]
        if self.spoilt is not None:
            self.qkv = [q, *(torch.where(self.spoilt, value, x) for x in (k, v))]

    def odd(self) -> None:
        """Make one argument odd."""
        name, _, kind = self.case.odd.partition(":")
        self.changed: str | None = None
        if self.streams and (kind in ("sparse", "flat") or name in ("isometry", "terms", "locality", "decay", "positions")):
            return  # chunks are cut here, and schemes asked for each
        if name in ("q", "k", "v"):
            n = "qkv".index(name)
            self.qkv[n], self.changed = odd(self.qkv[n], kind), kind
            if kind in ("zero", "nan", "inf") and isinstance(self.qkv[n], Tensor):
                self.clean[n] = self.qkv[n]
        elif name == "positions" and kind == "meta" and not isinstance(self.scheme.encoding, encodings.Identity):
            self.given = dict(self.scheme.at(self.x.to("meta"), None if self.x is self.y else self.y.to("meta")))
            self.changed = kind
        for values in (self.given, self.own):
            key = {"segments": "segment_ids"}.get(name, name)
            value = values.get(key)
            if value is not None:
                values[key] = odd(value, kind)
                self.changed = self.changed if values[key] is value else kind

    def call(self, qkv: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call the function with these arguments."""
        functions: dict[str, Callable[..., Any]] = {
            "linear": isopos.linear_attention,
            "softmax": isopos.softmax_attention,
            "naive": isopos.attention.naive_linear_attention,
            "explain": isopos.attention.explain,
        }
        if self.case.call == "naive":
            options = {name: value for name, value in options.items() if name != "segment_ids"}
        return functions[self.case.call](*qkv, **options)

    def answer(self) -> Any:
        """Attention's output."""
        if not self.streams:
            return self.call(self.qkv, self.given | self.own)
        attend = isopos.linear_attention if self.kind == "linear" else isopos.softmax_attention
        random = Random(self.case.seed)
        cuts = sorted({0, self.t, *(random.randint(0, self.t) for _ in range(random.choice((1, 3, 6))))})
        outs, state = [], isopos.State()
        overriding = {name: self.given[name] for name in ("feature_map", "denominator") if name in self.given}
        choices = self.case.phi, self.case.denominator, self.case.decay
        kept = isopos.Stream(self.scheme) if self.case.stream and set(choices) == {"scheme"} else None
        for start, stop in itertools.pairwise(cuts):
            at = {**self.scheme.at(self.x[..., start:stop, :], state=state, dtype=self.wide), **overriding}
            if self.case.decay != "scheme":
                g = self.given["decay"]
                at["decay"] = g[..., start:stop] if isinstance(g, Tensor) else g
            own = {n: a[..., start:stop] if isinstance(a, Tensor) else a for n, a in self.own.items()}
            part = [x[..., start:stop, :] if isinstance(x, Tensor) else x for x in self.qkv]
            if kept is not None:
                outs.append(kept(*part, self.x[..., start:stop, :], **{n: a for n, a in own.items() if n != "causal"}))
                continue
            out, state = attend(*part, **at, **own, return_state=True)
            outs.append(out)
            if random.random() < 0.2 and not self.case.grad and self.changed != "zero":  # a saved state has no graph
                state = pickle.loads(pickle.dumps(state))
        with torch.autocast("cpu", enabled=False):
            return torch.cat(outs, -2) if outs else torch.empty(0, dtype=getattr(self.qkv[0], "dtype", self.dtype))

    def compare(self, out: Any) -> None:
        """Raise `Wrong` if the output or a gradient differs from the definition."""
        if self.changed in ("meta", "fake"):
            if out.numel() and out.device.type == "cpu" and type(out) is Tensor:
                raise Wrong(f"an answer on the CPU, though an argument is {self.changed}")
            return
        if self.changed in OTHER_SHAPES:
            return
        dtypes = {self.qkv[0].dtype, torch.bfloat16} if self.case.mode == "autocast" else {self.qkv[0].dtype}
        if not isinstance(out, Tensor) or out.dtype not in dtypes:
            raise Wrong(f"expected {self.qkv[0].dtype}, got {getattr(out, 'dtype', type(out).__name__)}")
        if self.changed in OTHER_NUMBERS:
            return
        if self.changed == "subclass" and self.spoilt is not None:
            return  # a subclass may mean anything by its sum: its rows are not isolated
        clean = [x.detach().double().contiguous().requires_grad_(self.case.grad) for x in self.clean]
        if not out.numel() or 0 in (self.t, self.s):
            return
        with torch.enable_grad():
            expected = torch.stack(
                [self.defined([clean[0][..., g :: self.shared, :, :], *clean[1:]]) for g in range(self.shared)]
            )
            expected = expected.movedim(0, -3).flatten(-4, -3)
        bound, ratio = self.bounds(clean)
        taken = expected.isfinite() & bound.isfinite() & (expected.abs() < 6e4) & (bound < 1e30)
        if self.spoilt is not None and "segment" in self.case.garbage:
            taken &= ~self.spoilt[..., self.s - self.t :, :]
        if self.spoilt is not None and self.case.garbage == "later-nan":
            taken &= (torch.arange(self.t) < self.s // 2)[:, None]
        eps = torch.finfo(self.wide).eps
        if self.case.mode == "autocast":
            eps = torch.finfo(torch.bfloat16).eps
        error = (out.detach().double() - expected.detach()).abs()
        own = torch.finfo(out.dtype)
        allowed = ROUNDINGS * eps * bound + 4 * own.eps * (expected.detach().abs() + own.tiny) + 1e-30
        size = max(1.0, self.case.scale)
        allowed += 1024 * torch.finfo(self.wide).tiny * size**3 / EPS  # what is next to no number has few digits
        if (wrong := taken & ~(error <= allowed)).any():
            where = wrong.nonzero()[0].tolist()
            got, should = out[tuple(where)].item(), expected[tuple(where)].item()
            count = f"{int(wrong.sum())} of {wrong.numel()} numbers"
            raise Wrong(f"{count}; at {where}: {got}, not {should} ({allowed[tuple(where)]:.1g})")
        if self.case.grad and out.requires_grad and self.spoilt is None and taken.all():
            self.compare_gradients(out, expected, clean, ratio)

    def compare_gradients(self, out: Tensor, expected: Tensor, clean: list[Tensor], ratio: float) -> None:
        """Compare gradients, unless sums are too ill conditioned."""
        if not ratio < 1e3 or self.case.mode == "autocast":
            return
        weight = torch.randn(out.shape, dtype=torch.float64)
        leaves = [x for x in self.qkv if x.requires_grad]
        theirs = torch.autograd.grad(
            (expected * weight).sum(), [c for c, x in zip(clean, self.qkv, strict=True) if x.requires_grad]
        )
        ours = torch.autograd.grad((out.double() * weight).sum(), leaves, allow_unused=True)
        size = max(self.case.scale, 1)
        for name, a, b in zip("qkv", ours, theirs, strict=False):
            a = torch.zeros_like(b) if a is None else a.double()
            eps = max(torch.finfo(self.dtype).eps, torch.finfo(self.wide).eps)
            allowed = (
                8 * ROUNDINGS * eps * ratio**2 * max(1, b.abs().max().item(), expected.abs().max().item()) * size + 1e-35
            )
            if b.isfinite().all() and b.abs().max() < 6e4 and not (a - b).abs().max().item() <= allowed:
                raise Wrong(
                    f"the gradient of {name} is off by {(a - b).abs().max().item():.3g}, of {b.abs().max().item():.3g}"
                )

    def defined(self, qkv: Sequence[Tensor]) -> Tensor:
        """Attention by its definition."""
        options = {name: value for name, value in (self.exact | self.own).items() if value is not None}
        options |= {"denominator": self.exact["denominator"]} if self.kind == "linear" else {}
        return reference.DEFINITIONS[self.kind](*qkv, **options)

    def bounds(self, qkv: list[Tensor]) -> tuple[Tensor, float]:
        """The sum of magnitudes of the terms of each output over its denominator; and the largest ratio of the two."""
        q, k, v = (x.detach() for x in qkv)
        if self.kind == "softmax":
            return self.bounds_of_softmax(q, k, v)
        rho = self.exact["isometry"]
        rho_q, rho_k = (part or Identity() for part in (rho if isinstance(rho, tuple) else (rho, rho)))
        phi_q, phi_k = sides(self.exact.get("feature_map") or identity)
        k = torch.where(self.own["mask"][..., None, :, None], k, 0) if "mask" in self.own else k
        fq = phi_q(q).unflatten(-3, (self.heads, self.shared)).movedim(-3, 0)
        fk = phi_k(k)
        norms = [x.norm(dim=-1) for x in (rho_q(fq), rho_k(fk))]
        if not isinstance(rho_q, Mapped):
            norms = [torch.maximum(a, b.norm(dim=-1)) for a, b in zip(norms, (fq, fk), strict=True)]
        most = 1e8 if self.exact["denominator"] == "complex" else 1e18  # beyond it products are no numbers of float32
        if max((float(x.detach().max()) for x in norms if x.numel()), default=0.0) > most:
            return torch.full((*q.shape[:-1], 1), torch.inf), 1.0
        options = {**self.own, "decay": self.exact.get("decay")}
        one = {"denominator": None, **{n: options.get(n) for n in ("decay", "mask", "segment_ids")}, "causal": self.causal}
        table = max(
            (phi_k(term.table.double()).norm(dim=-1).max().item() for term in self.exact.get("terms") or ()), default=0.0
        )
        a = norms[0][..., None]
        weights = [(a, norms[1][..., None]), *([(a * table, torch.ones_like(norms[1][..., None]))] if table else [])]
        sums = [
            sum(reference.linear(x, y, values, **one) for x, y in weights)
            for values in (v.abs().amax(-1, keepdim=True) if v.shape[-1] else v, torch.ones_like(v[..., :1]))
        ]
        above, weight = (total.movedim(0, -3).flatten(-4, -3) for total in sums)  # pyright: ignore
        if (form := self.exact["denominator"]) is None:
            return above, 1.0
        ones = torch.ones_like(v[..., :1])
        below = self.denominator(q, k, ones, form)
        noise = ROUNDINGS * torch.finfo(self.wide).eps * weight
        vanishing = (below - EPS).abs() <= noise
        below = below.clamp_min(EPS)
        above = torch.where(above > 1e36, torch.inf, above)  # float32 has no such numbers
        bound = (above + weight * (above / weight.clamp_min(1e-300))) / below
        if form != "plain" or (self.exact.get("feature_map") or identity) is identity or self.case.phi in (None, "own"):
            bound = bound * (1 + weight / below)
        return torch.where(vanishing | (below < 4 * noise), torch.inf, bound), max(
            1.0, float((weight / below).detach().max())
        )

    def denominator(self, q: Tensor, k: Tensor, ones: Tensor, form: str) -> Tensor:
        """Magnitude of denominators."""
        names = ("feature_map", "decay", "terms") if form != "encoded" else ("isometry", "feature_map", "decay", "terms")
        keys: dict[str, Any] = {name: self.exact[name] for name in names if self.exact.get(name) is not None}
        keys |= {name: x for name, x in self.own.items() if x is not None} | {"denominator": None}
        rho = self.exact["isometry"]
        rho_q, rho_k = (part or Identity() for part in (rho if isinstance(rho, tuple) else (rho, rho)))
        if form == "complex":
            phi_q, phi_k = sides(keys.pop("feature_map", identity))
            q, k = phi_q(q), rho_k(phi_k(k))
        turned = torch.stack((k[..., 1::2], -k[..., ::2]), -1).flatten(-2) if form == "complex" else k  # times -i
        found = []
        for g in range(self.shared):
            own = q[..., g :: self.shared, :, :]
            if form == "complex":
                own = rho_q(own)
            total = reference.linear(own, k, ones, **keys)
            found.append(total.hypot(reference.linear(own, turned, ones, **keys)) if form == "complex" else total.abs())
        return torch.stack(found).movedim(0, -3).flatten(-4, -3)

    def bounds_of_softmax(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, float]:
        """The largest unmasked value times the largest logit."""
        scale = self.exact.get("scale") or 1.0
        largest = 1 + scale * q.norm(dim=-1).amax() * k.norm(dim=-1).amax() if q.numel() and k.numel() else torch.ones(())
        terms = self.exact.get("terms") or ()
        for term in terms:
            largest = largest + term.table.detach().abs().max() * (
                1 if term.side == "none" else q.norm(dim=-1).amax() + k.norm(dim=-1).amax()
            )
        if self.dtype not in (torch.float32, torch.float64) and self.exact.get("decay") is not None:
            largest = largest + 60  # decays round with the logits
        rows = sum(float(term.table.detach().abs().max()) for term in terms if term.side == "value")
        size = (v.abs().max() if v.numel() else torch.zeros(())) + rows
        factor = torch.finfo(self.dtype).eps / torch.finfo(self.wide).eps / (16 if self.dtype != self.wide else 1)
        return (largest * size * factor).expand(*q.shape[:-2], self.t, 1), float(largest.detach())

    def decoded(self) -> str:
        """Decode with a model: finite logits, or one clear error."""
        from isopos.models import Decoder

        name, _, kind = self.case.odd.partition(":")
        model = Decoder(11, self.heads * self.case.d, 1, self.scheme)
        tokens, x = torch.randint(11, (2, self.t)), self.x[..., : self.t, :]
        if name == "positions":
            x = odd(x, kind)
        given = x if not self.case.samples else None
        logits = model(tokens, given)
        if given is not None and given.is_meta and logits.numel() and logits.device.type == "cpu":
            raise Wrong("logits on the CPU, though positions are on meta")
        if logits.shape != (2, self.t, 11):
            raise Wrong(f"expected logits [2, {self.t}, 11], got {list(logits.shape)}")
        return "answer"


class Sub(Tensor):
    """A subclass of tensors."""


def odd(value: Any, kind: str) -> Any:
    """A value with odd tensors in place of its tensors, or another value."""
    other = {"list": [1, 2], "none": None, "text": "plane", "number": 1.5, "numpy": torch.ones(2, 3).numpy()}
    if kind in other:
        return other[kind]
    if kind == "pair":
        return (value, value)
    if isinstance(value, Tensor):
        return _odd_tensor(value, kind)
    if isinstance(value, tuple | list):
        parts = [odd(part, kind) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    if isinstance(value, TokenMap):
        tensors = list(value.tensors())
        return value.replace([_odd_tensor(x, kind) for x in tensors]) if tensors else value
    if isinstance(value, Term):
        changed = copy.copy(value)
        for name, part in vars(value).items():
            object.__setattr__(changed, name, odd(part, kind) if isinstance(part, Tensor) else part)
        return changed
    return value


def _odd_tensor(x: Tensor, kind: str) -> Tensor:
    shape = x.shape
    kinds: dict[str, Callable[[], Tensor]] = {
        "meta": lambda: x.to("meta"),
        "fake": lambda: _fake(x),
        "zero": lambda: torch._efficientzerotensor(shape, dtype=x.dtype),  # pyright: ignore[reportPrivateImportUsage]
        "neg": lambda: torch._neg_view(-x) if x.dtype != torch.bool else x,  # pyright: ignore[reportPrivateImportUsage]
        "subclass": lambda: x.as_subclass(Sub),
        "sparse": lambda: x.detach().to_sparse(),
        "strided": lambda: torch.stack((x, x), -1)[..., 0],
        "expanded": lambda: x[..., :1].expand(shape) if x.ndim else x,
        "graph": lambda: x.detach().clone().requires_grad_() if x.is_floating_point() else x,
        "half": lambda: x.to(torch.float16),
        "double": lambda: x.to(torch.float64) if x.is_floating_point() else x,
        "integer": lambda: x.to(torch.int32),
        "complex": lambda: x.to(torch.complex64),
        "bool": lambda: x.to(torch.bool),
        "longer": lambda: torch.cat((x, x), -1 if x.ndim < 2 else -2) if x.ndim else x,
        "shorter": lambda: x[..., :-1] if x.ndim else x,
        "deeper": lambda: x[None, None].expand(1, 3, *shape).contiguous(),
        "flat": lambda: x.flatten(),
        "empty": lambda: x[..., :0] if x.ndim else x,
        "nan": lambda: torch.full_like(x, float("nan")) if x.is_floating_point() else x,
        "inf": lambda: torch.full_like(x, float("inf")) if x.is_floating_point() else x,
    }
    return kinds[kind]()


def _fake(x: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x.detach())
