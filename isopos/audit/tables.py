"""Checks of rotary tables against what the configuration declares: now, after casts, far away, in any order of calls."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isopos.audit import declared
from isopos.audit.checks import check, judged, unless
from isopos.audit.report import Finding
from isopos.audit.subject import RotaryModule, Skip, Subject, relative_error

FAR = (0, 1, 2, 7, 100, 1000, 4096, 2**14, 2**16)
FURTHER = tuple(2**n for n in range(10, 32))
PROBED = 2**16  # positions from which a table is told from other tensors
ANY_LENGTH = ("default", "linear", "llama3", "yarn", "proportional", "mrope")  # types that do not go by a call's length
CAST = "cast with from_pretrained(..., dtype=...), or keep the table out of casts and compute it in float32"


def _declared(subject: Subject, *needed: str) -> list[tuple[Any, Tensor]]:
    """Rotary modules that have these attributes, with their declared frequencies ``[f]``."""
    declared_rotaries, reasons = [], []
    for rotary in subject.rotary(subject.module):
        if rotary.features is None:
            reasons.append(f"{rotary.name}: the configuration does not say how many features rotate")
            continue
        try:
            declared_rotaries.append(
                (rotary, declared.declared_frequencies(rotary.parameters, rotary.features, rotary.trained))
            )
        except (ValueError, KeyError) as error:
            reasons.append(f"{rotary.name}: {error}")
    unless(not declared_rotaries, "; ".join(reasons) or "no rotary module with declared parameters was found")
    return [(a, w) for a, w in declared_rotaries if all(getattr(a, name) is not None for name in needed)]


@check("frequencies", "Do the frequencies equal the declared ones?")
def frequencies(subject: Subject) -> Iterator[Finding]:
    """Compare the frequencies of each module with the declared base, type, factor, trained length and share."""
    for rotary, want in _declared(subject, "frequencies"):
        yield _equal(rotary, rotary.frequencies, want)


def _equal(rotary: RotaryModule, actual: Tensor, want: Tensor) -> Finding:
    says = f"{rotary.parameters.get('rope_type')} frequencies of base {float(rotary.parameters['rope_theta']):g}"
    actual = actual.detach().double().cpu().flatten()
    if declared.same(actual, want):
        return Finding(says, f"the same within {_worst(actual, want):.0e}", "sound", rotary.name)
    what = declared.diagnosis(actual, rotary.parameters, rotary.features or 0, rotary.trained)
    issue = "unslothai/unsloth#6907" if "missing" in what else "NVIDIA-NeMo/Automodel#2549" if "rounded" in what else ""
    issue = "deepspeedai/DeepSpeed#8345" if what.startswith("frequencies of base") else issue
    remedy = CAST if "rounded" in what else "build the table from the configuration's rotary parameters"
    return Finding(says, what, "broken", rotary.name, remedy, issue)


def _worst(actual: Tensor, want: Tensor) -> float:
    return float(((actual - want).abs() / want.abs().clamp_min(1e-30)).max())


@check("attention factor", "Are cosines and sines scaled as declared?")
def attention_factor(subject: Subject) -> Iterator[Finding]:
    """Compare the attention factor of yarn and longrope, whose square multiplies logits."""
    for rotary, _ in _declared(subject):
        want = declared.declared_factor(rotary.parameters, rotary.trained)
        actual = rotary.attention_factor
        sound, remedy = abs(actual - want) <= 1e-6 * want, "multiply cosines and sines by the factor of the declared type"
        yield judged(f"factor {want:.6g}", f"{actual:.6g}", sound, rotary.name, remedy)


@check("tables", "Do cosines and sines fit the declared frequencies, at far positions and in lower dtypes?")
def tables(subject: Subject) -> Iterator[Finding]:
    """Compare cosines and sines up to the declared maximum position, within rounding of float32 angles and the dtype."""
    for rotary, _ in _declared(subject, "tables"):
        most = _within(rotary)
        x = torch.tensor([[a for a in FAR if a < most] + [most - 1]])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield _table(rotary, x, dtype, copy.deepcopy(rotary.module))


@check("far positions", "How exact are cosines and sines up to position 2^31?")
def far_positions(subject: Subject) -> Iterator[Finding]:
    """Compare tables at positions up to 2^31, for types that do not depend on the length of a call."""
    for rotary, _ in _declared(subject, "tables"):
        if rotary.parameters.get("rope_type", "default") not in ANY_LENGTH:
            continue
        x = torch.tensor([FURTHER])
        try:
            if _grows(rotary):
                says = f"cosines and sines up to position {FURTHER[-1]}"
                yield Finding(says, "not measured: a table as long as the position is built", "note", rotary.name)
                continue
            finding = _table(rotary, x, torch.float32, copy.deepcopy(rotary.module))
        except (IndexError, RuntimeError) as error:
            yield Finding(
                f"cosines and sines up to position {FURTHER[-1]}", f"{type(error).__name__}: {str(error).splitlines()[0]}",
                "note", rotary.name, f"none up to position {_within(rotary)}; its table ends",
            )  # fmt: skip
            continue
        errors = dict(finding.curves[0][1]) if finding.curves else {}
        exact = max((a for a, error in errors.items() if error < 1e-2), default=0)
        yield replace(finding, measured=f"{finding.measured}, below 0.01 up to position {exact}")


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that operations return."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def _grows(rotary: RotaryModule) -> bool:
    """Whether the module builds a table as long as its largest position, too large for far positions."""
    assert rotary.tables is not None
    sizes, module = [], copy.deepcopy(rotary.module)
    for position in (PROBED, 2 * PROBED):
        with _Largest() as largest, torch.no_grad():
            rotary.tables(module, torch.tensor([[position - 1]]), torch.float32)
        sizes.append(largest.numel)
    return sizes[1] > sizes[0] >= PROBED


def _within(rotary: RotaryModule) -> int:
    """Positions of plain calls, short enough not to trigger dynamic rules."""
    original = rotary.parameters.get("original_max_position_embeddings") or rotary.trained or FAR[-1]
    return min(original, rotary.trained or original)


def _table(rotary: RotaryModule, x: Tensor, dtype: torch.dtype, module: torch.nn.Module, how: str = "") -> Finding:
    """A finding that a table of dtype at positions x ``[1 t]`` is right, or the first position where it is not."""
    assert rotary.tables is not None
    want_w = declared.declared_frequencies(rotary.parameters, rotary.features or 0, rotary.trained, int(x.max()) + 1)
    factor = declared.declared_factor(rotary.parameters, rotary.trained)
    angle = x[0].double()[:, None] * want_w
    want = torch.stack((angle.cos(), angle.sin())) * factor
    with torch.no_grad():
        actual = torch.stack(rotary.tables(module, x, dtype)).double()[:, 0]
    actual = _columns(actual, want)
    says = f"cosines and sines in {str(dtype)[6:]} up to position {int(x.max())}{how}"
    if actual is None:
        return Finding(says, "a table of another width than the declared frequencies", "broken", rotary.name)
    single = torch.finfo(torch.float32).eps
    bound = factor * (2 * torch.finfo(dtype).eps + 8 * declared.EQUAL / 64 * (1 + angle.abs().amax(-1))) + 64 * single
    error = (actual - want).abs().amax((0, 2))
    curves = ((f"{rotary.name}, {str(dtype)[6:]}{how}", tuple(zip(x[0].tolist(), error.tolist(), strict=True))),)
    if bool((error <= bound).all()):
        return Finding(says, f"error {float(error.max()):.1e}", "sound", rotary.name, curves=curves)
    bad = int((error > bound).long().argmax())
    where = f"{rotary.name}, position {int(x[0, bad])}"
    remedy = "compute positions times frequencies in float32 outside autocast, cast cosines and sines at the end"
    return Finding(says, f"error {float(error[bad]):.1e}", "broken", where, remedy, "huggingface/candle#3520", curves=curves)


def _columns(actual: Tensor, want: Tensor) -> Tensor | None:
    """Tables ``[2 t d]`` as columns of frequencies ``[2 t f]``, in the layout that fits best."""
    f = want.shape[-1]
    if actual.shape[-1] == f:
        return actual
    if actual.shape[-1] != 2 * f:
        return None
    layouts = [(actual[..., :f], actual[..., f:]), (actual[..., ::2], actual[..., 1::2])]
    pick = min(layouts, key=lambda two: float((two[0] - want).abs().max()))
    first, second = ((a - want).abs().max() for a in pick)
    return pick[int(second > first)]


@check("autocast", "Does autocast round the angles?")
def autocast(subject: Subject) -> Iterator[Finding]:
    """Compare tables for float32 activations under bfloat16 autocast."""
    for rotary, _ in _declared(subject, "tables"):
        most = min(_within(rotary), 4096)
        x = torch.tensor([[0, 1, most // 3, most - 1]])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield _table(rotary, x, torch.float32, copy.deepcopy(rotary.module), " under autocast")


@check("order of calls", "Does a longer call change what a shorter one gives after it?")
def order_of_calls(subject: Subject) -> Iterator[Finding]:
    """Compare tables of a fresh copy with tables of a copy that was called at longer positions."""
    for rotary, _ in _declared(subject, "tables"):
        trained = rotary.trained or 512
        pairs = ((min(64, trained), 4 * trained), (2 * trained, 4 * trained))
        for (short, long), dtype in product(pairs, (torch.float32, torch.bfloat16)):
            x = _some(short)
            with torch.no_grad():
                fresh = rotary.tables(copy.deepcopy(rotary.module), x, dtype)
                used = copy.deepcopy(rotary.module)
                rotary.tables(used, _some(long), dtype)
                after = rotary.tables(used, x, dtype)
            error = max(relative_error(a, b) for a, b in zip(after, fresh, strict=True))
            yield judged(
                f"a call of {short} positions in {str(dtype)[6:]} is the same after one of {long}",
                f"difference {error:.1e}", error <= declared.EQUAL, rotary.name,
                "compute frequencies from the length of the call alone, keep no table of another call",
                "huggingface/transformers#25306",
            )  # fmt: skip


def _some(count: int) -> Tensor:
    """Positions 0 to count - 1 ``[1 t]``; only the first and the last of very many."""
    return torch.arange(count)[None] if count <= 4096 else torch.tensor([[*range(64), *range(count - 64, count)]])


@check("saving", "Does a saved model have the same tables again?", "save")
def saving(subject: Subject) -> Iterator[Finding]:
    """Compare frequencies after save_pretrained and from_pretrained."""
    before = {a.name: a for a in subject.rotary(subject.module) if a.frequencies is not None}
    unless(not before, "no rotary module was found")
    after = {a.name: a for a in subject.rotary(subject.loaded_again())}
    for name, rotary in before.items():
        actual, again = rotary.frequencies, after[name].frequencies if name in after else None
        assert actual is not None
        same = again is not None and actual.shape == again.shape and relative_error(again, actual) <= declared.EQUAL
        factors = (rotary.attention_factor, after[name].attention_factor if name in after else None)
        sound = same and factors[0] == factors[1]
        says, measured = "the loaded model's frequencies and factor are the saved model's", "the same" if sound else "others"
        remedy = "write what the table is built from into the configuration, before the model is built"
        yield judged(says, measured, sound, name, remedy, "MakazhanAlpamys/Soup#793")


@check("casts", "Does casting the whole module round the frequencies?")
def casts(subject: Subject) -> Iterator[Finding]:
    """.bfloat16(), .half() and .double() of a copy: a risk, not a fault of the present model."""
    for rotary, want in _declared(subject, "frequencies", "refetch"):
        if not _equal(rotary, rotary.frequencies, want).severity == "sound":
            raise Skip("its frequencies are wrong before any cast")
        for dtype in (torch.bfloat16, torch.float16):
            actual = rotary.refetch(copy.deepcopy(rotary.module).to(dtype)).double().flatten()
            sound = declared.same(actual, want)
            measured, issue = "they do" if sound else f"rounded by {_worst(actual, want):.0e}", "NVIDIA-NeMo/Automodel#2549"
            yield judged(f"frequencies stay exact in .to({dtype})", measured, sound, rotary.name, CAST, issue, fault="risk")


@check("meta device", "Does a model come back whole from the device meta and `to_empty`?")
def meta_device(subject: Subject) -> Iterator[Finding]:
    """Compare a copy on meta, after to_empty and loading of its state dict: outputs, and tables that it lacks."""
    module = copy.deepcopy(subject.copies[torch.float32])
    state = module.state_dict()
    made = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data = torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else torch.zeros_like(tensor)
    made.load_state_dict(state)
    tokens = subject.tokens(1, subject.length)
    with torch.no_grad():
        same = relative_error(subject.call(made, tokens), subject.call(module, tokens)) <= subject.tolerance
    lost = [name for name, _ in made.named_buffers() if name not in state]
    yield judged(
        "outputs are the same after to_empty and load_state_dict",
        "they are" if same else f"{', '.join(lost[:3]) or 'what is no parameter'}{' ...' * (len(lost) > 3)} stays empty",
        same, lost[0].rpartition(".")[0] if lost and not same else "",
        "load by from_pretrained, or compute these buffers again after to_empty", "unslothai/unsloth#6925", fault="risk",
    )  # fmt: skip
