"""Record results of the library, to prove that a change of its code changes no number.

    python -m tools.record before.safetensors                                # minutes; records the isopos on PYTHONPATH
    python -m tools.record after.safetensors --compare before.safetensors    # compares two existing files

A file has outputs, gradients and states of every scheme in every setting, the laws' figures, and losses and weights of short
trainings, as named arrays. Only public names are used, so this module can record versions before and after a change. A
comparison counts arrays that are the same bit for bit, names the others with their largest difference, and exits with 1 if
there are any.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import isopos

Arrays = Mapping[str, Tensor | None]
OPTIONS = """
    sinusoidal:scale=0.5 learned:length=100 xpos:length=200 cosformer:length=5000 shiv-quirk:branches=3,depth=2
    rope:learned=true rope:rotary_dim=4 rope:layout=half rope:base=100,decay=alibi rope:decay=permuteformer
    rope:feature_map=relu rope:feature_map=relu2 rope:feature_map=exp rope:feature_map=favor rope:feature_map=identity
    rope:denominator=encoded rope:denominator=complex rope:denominator=none retnet:feature_map=favor,denominator=none
    none:decay=retnet none:decay=retnet,feature_map=relu none:feature_map=relu2 none:feature_map=exp none:feature_map=favor
    none:denominator=none,feature_map=identity retnet:original=true retnet:denominator=encoded retnet:feature_map=relu
    lrpe-unitary:basis=identity lrpe-unitary:basis=odd-even lrpe-unitary:basis=fourier,theta=b lrpe-unitary:complex=true
    lrpe-unitary:complex=true,basis=fourier lrpe-unitary:learned_basis=true lrpe-unitary:learned=false
    lrpe-orthogonal:learned=false lrpe-orthogonal:basis=identity
    lrpe-orthogonal:identity=2,theta=c,learned_basis=true lrpe-orthogonal:basis=fourier,decay=retnet
    lrpe-orthogonal:basis=odd-even lrpe-permutation:basis=identity lrpe-permutation:learned_basis=true,decay=retnet
    permuteformer:width=4 permuteformer:matrix=orthogonal permuteformer:orders=long,decay=none permuteformer-2d:axes=3
    t5:bidirectional=false deberta:max_distance=none shaw:reach=3 transformer-xl:model_dim=6
    ape-sequence:initial=identity,decay=retnet ape-sequence:locality=0.9 ape-absolute:side=query ape-tree:branches=3
    ape-grid:axes=3 ape-ring:period=7 ape-product:parts=tree2+grid2 ape-product:parts=ring5+sequence ape-tree:locality=0.9
    horn-constrained:axes=2,sinusoids=3 horn-constrained:inside=true,feature_map=favor horn-clipped:axes=2,reach=2
    horn-clipped:outside=1 spe-sine:sines=3 spe-conv:reach=3
"""
SCHEMES = (*isopos.schemes.REGISTRY, *OPTIONS.split())
LARGE = ("none", "rope", "retnet", "lrpe-unitary", "permuteformer", "xpos", "rope:feature_map=relu")
ATTEND = {"linear": isopos.linear_attention, "softmax": isopos.softmax_attention}
TRAININGS = {
    "quickstart": "quickstart --scale tiny --device cpu",
    "lrpe-alm": "lrpe-alm --scale tiny --device cpu --dropout 0.1 --accumulate 2 --steps 60",
    "relative": "quickstart --scale tiny --device cpu --scheme horn-clipped --steps 20 --optimizer adam --cutoffs 50 100",
    "additive": "quickstart --scale tiny --device cpu --scheme learned:attention=softmax --steps 20 --recompute",
    "bfloat16": "quickstart --scale tiny --device cpu --scheme permuteformer --steps 20 --precision bfloat16",
}
TIMES = re.compile("second|time")  # in names of figures that are not compared


class Recorder(dict[str, Tensor]):
    """Arrays by name."""

    def add(self, name: str, values: Arrays) -> None:
        """Add copies of all values that are not None."""
        self.update({f"{name}/{key}": x.detach().clone().contiguous() for key, x in values.items() if x is not None})

    def attempt(self, name: str, make: Callable[[], Arrays]) -> None:
        """Add the arrays that a function returns, or the array "refused" if the library raises an error."""
        try:
            self.add(name, make())
        except (ValueError, RuntimeError):
            self.add(name, {"refused": torch.ones(1)})


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def positions(group: Any, t: int, seed: int = 0) -> Tensor:
    """Positions ``[t c]``: ascending on lines, row by row on grids, parents first in trees."""
    generator, kind = torch.Generator().manual_seed(seed), type(group).__name__
    if kind == "Product" and all(type(part).__name__ == "Line" for part in group.parts):
        side = 1 + int(t ** (1 / len(group.parts)))
        return torch.cartesian_prod(*(torch.arange(side),) * len(group.parts))[:t]
    if kind == "Product":
        return torch.cat([positions(part, t, seed + n) for n, part in enumerate(group.parts)], -1)
    if kind == "Line":
        return torch.randint(1, 3, (t, 1), generator=generator).cumsum(0)
    if kind == "Ring":
        return torch.randint(group.period, (t, 1), generator=generator)
    if kind != "Tree":
        return group.random(t, generator=generator)
    row = torch.arange(t)
    parent = (torch.rand(t, generator=generator) * row).long()
    nodes = torch.stack((parent, torch.randint(group.branches, (t,), generator=generator)), -1)
    return torch.where(row[:, None] > 0, nodes, -1)


class Case:
    """A scheme with changed initial values, and tokens for every setting."""

    def __init__(self, text: str, kind: str, *, head_dim: int = 8, heads: int = 2, dtype: torch.dtype = torch.float32):
        name, _, rest = text.partition(":")
        options = dict(option.split("=") for option in rest.split(",") if option)
        self.scheme = isopos.schemes.build(name, head_dim, heads, {"attention": kind} | options)
        self.attention, self.kind, self.dtype = ATTEND[kind], kind, dtype
        self.table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        with torch.no_grad():
            for parameter in self.scheme.to(self.table_dtype).parameters():
                parameter.add_(0.1 * torch.arange(1, parameter.numel() + 1).cos().view_as(parameter))

    def content(self, t: int, s: int | None = None, groups: int = 1) -> list[Tensor]:
        """Queries of t tokens, keys and values of s tokens."""
        s, d, heads = t if s is None else s, self.scheme.encoding.features, self.scheme.heads
        shapes = (heads * groups, t, d), (heads, s, d), (heads, s, d // self.scheme.width)
        return [seeded(2, *shape, seed=n, dtype=self.dtype).requires_grad_() for n, shape in enumerate(shapes)]

    def whole(self, t: int, queries: int | None = None, groups: int = 1, far: int = 0, **options: Any) -> Arrays:
        """Output and gradients of t tokens, or of `queries` queries at the last positions."""
        x, content = positions(self.scheme.group, t) + far, self.content(queries or t, t, groups)
        arguments = {**self.scheme.at(x[-(queries or t) :], x if queries else None, dtype=self.table_dtype)}
        return self._graded(self.attention(*content, **arguments, **options), content)

    def _graded(self, out: Tensor, content: list[Tensor]) -> Arrays:
        named = {**dict(zip("qkv", content, strict=True)), **dict(self.scheme.named_parameters())}
        loss = (out * seeded(*out.shape, seed=9).to(out.dtype)).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {"out": out, **{f"d_{name}": grad for name, grad in zip(named, grads, strict=True)}}

    def stream(self, t: int, cuts: Iterable[int], graph: bool = True, **more: Tensor) -> Arrays:
        """Outputs, gradients and final state of chunks between the cuts; without a graph, of an `isopos.Stream`."""
        x, content = positions(self.scheme.group, t), self.content(t)
        outputs, state, stream = [], isopos.State(), None if graph else isopos.Stream(self.scheme)
        with torch.set_grad_enabled(graph):
            for start, stop in itertools.pairwise(cuts):
                if stream is not None:
                    q, k, v = (a[..., start:stop, :] for a in content)
                    outputs.append(stream(q, k, v, x[start:stop]))
                    state = stream.state
                    continue
                arguments = {**self.scheme.at(x[start:stop], state=state, dtype=self.table_dtype)}
                arguments |= {name: a[..., start:stop] for name, a in more.items()}
                part = [a[..., start:stop, :] for a in content]
                out, state = self.attention(*part, **arguments, causal=True, return_state=True)
                outputs.append(out)
        out = torch.cat(outputs, -2)
        final = {f"state_{name}": a for name, a in state.state_dict().items() if name not in ("fingerprint", "kind")}
        return {**(self._graded(out, content) if graph else {"out": out}), **final}

    def maps(self, t: int, far: int = 0) -> Arrays:
        """Queries and keys after the scheme's maps, and its additive embedding."""
        x = positions(self.scheme.group, t) + far
        rho = {**self.scheme.at(x, dtype=self.table_dtype)}["isometry"]
        pair = rho if isinstance(rho, tuple) else (rho, rho)
        added = self.scheme.embedding and self.scheme.embedding(x, dtype=self.table_dtype)
        return {"added": added, **{name: side(a) for name, side, a in zip("qk", pair, self.content(t), strict=False)}}


def settings(case: Case, t: int = 65) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """Names of settings, and functions that compute them."""
    mask = seeded(2, t, seed=5) < 0.8
    ids = torch.arange(t) * 3 // t + torch.tensor([[0], [4]])
    for direction, causal in (("causal", True), ("both", False)):
        yield f"{direction}/whole", partial(case.whole, t, causal=causal)
        yield f"{direction}/long", partial(case.whole, 300, causal=causal)
        yield f"{direction}/mask", partial(case.whole, t, causal=causal, mask=mask)
        yield f"{direction}/packed", partial(case.whole, t, causal=causal, mask=mask, segment_ids=ids)
        yield f"{direction}/shared", partial(case.whole, t, groups=3, causal=causal)
        yield f"{direction}/cross", partial(case.whole, t, 9, causal=causal)
    yield "far", partial(case.whole, t, causal=True, far=2**31)
    yield "maps", partial(case.maps, t)
    yield "maps-far", partial(case.maps, t, 2**31)
    yield "chunks", partial(case.stream, t, (0, 7, 7, 40, 41, t), mask=mask)
    yield "tokens", partial(case.stream, 13, range(14))
    yield "in-place", partial(case.stream, 13, range(14), graph=False)
    yield "packed-chunks", partial(case.stream, t, (0, 30, 64, t), segment_ids=ids)


def record_schemes(recorder: Recorder) -> None:
    """Record every scheme and option in every setting, and presets at more lengths and dtypes, with their laws."""
    for text, kind in itertools.product(SCHEMES, ATTEND):
        name = f"{text}/{kind}"
        try:
            case = Case(text, kind)
        except ValueError:
            recorder.add(name, {"refused": torch.ones(1)})
            continue
        for setting, make in settings(case):
            recorder.attempt(f"{name}/{setting}", make)
        if text not in isopos.schemes.REGISTRY:
            continue
        for t in (1, 63, 64, 130):
            recorder.attempt(f"{name}/length-{t}", partial(case.whole, t, causal=True))
        for dtype in (torch.float64, torch.bfloat16):
            other = Case(text, kind, dtype=dtype)
            for causal in (True, False):
                recorder.attempt(f"{name}/{dtype}/causal-{causal}", partial(other.whole, 65, causal=causal))
            recorder.attempt(f"{name}/{dtype}/stream", partial(other.stream, 13, (0, 9, 10, 11, 13)))
    for text in isopos.schemes.REGISTRY:
        report = isopos.laws.check(isopos.schemes.build(text, 8, 2, {}))
        recorder.add(
            f"{text}/laws", {f.name: torch.tensor([f.figure, f.holds], dtype=torch.float64) for f in report.findings}
        )


def record_large(recorder: Recorder) -> None:
    """Record sizes that the compiled kernel serves, on one thread and on two."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for text, t in itertools.product(LARGE, (65, 300)):
            case = Case(text, "linear", head_dim=64, heads=4)
            name = f"large-{threads}/{text}/{t}"
            for causal in (True, False):
                recorder.attempt(f"{name}/causal-{causal}", partial(case.whole, t, causal=causal))
            recorder.attempt(f"{name}/steps", partial(case.stream, t, (0, t - 2, t - 1, t), graph=False))
    torch.set_num_threads(1)
    names = [name for name in recorder if name.startswith("large-1")]
    different = [name for name in names if not same(recorder[name], recorder[name.replace("large-1", "large-2")])]
    count = f"{len(names) - len(different)} of {len(names)}"
    print(f"{count} large arrays are the same on two threads", *different, sep="\n  ")


def record_trainings(recorder: Recorder) -> None:
    """Record metrics, scores and weights of trainings by the command line."""
    package = Path(isopos.__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, arguments in TRAININGS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "isopos", "train", *arguments.split(), "--name", "run"]
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
            run = Path(folder, "runs", "run")
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            figures = {"metrics": [x for row in rows for x in numbers(row)]}
            figures["scores"] = scores(json.loads((run / "result.json").read_text()))
            tensors = {key: torch.tensor(sorted(values), dtype=torch.float64) for key, values in figures.items()}
            recorder.add(f"training/{name}", tensors | load_file(run / "model.safetensors"))


def scores(result: Mapping[str, Any]) -> list[float]:
    """Bits per byte at one, two and four times the training length that a result has, in its present or older format."""
    if "bits_per_byte" in result:
        bits = [result["bits_per_byte"][multiple] for multiple in "124"]
    else:
        bits = [result["scores"][title] for title in ("bits/byte", "at 2x", "at 4x")]
    return [score for score in bits if score is not None]


def numbers(value: Any) -> Iterator[float]:
    """All floats in a JSON value, except times."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if not TIMES.search(name):
                yield from numbers(part)
    elif isinstance(value, float):
        yield value


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two arrays are the same bit for bit, including NaN and signs of zeros."""
    same_type = a.shape == b.shape and a.dtype == b.dtype
    return same_type and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Print all differences; return whether there are none."""
    both = [name for name in ours if name in theirs]
    different = [name for name in both if not same(ours[name], theirs[name])]
    for name in different:
        a, b = ours[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            print(f"{name}: {a.dtype} {list(a.shape)}, was {b.dtype} {list(b.shape)}")
        else:
            print(f"{name}: by at most {(a.double() - b.double()).abs().max():.3g}, of values up to {b.abs().max():.3g}")
    for name in sorted(ours.keys() ^ theirs.keys()):
        print(f"{name}: {'new' if name in ours else 'gone'}")
    print(f"{len(both) - len(different)} of {len(both)} arrays are bit for bit the same")
    return not different and ours.keys() == theirs.keys()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--compare", metavar="OTHER", help="an earlier file")
    options = parser.parse_args()
    if options.compare:
        return 0 if compare(load_file(options.file), load_file(options.compare)) else 1
    print(f"recording {isopos.__file__}", flush=True)
    torch.set_num_threads(1)
    recorder = Recorder()
    record_schemes(recorder)
    record_large(recorder)
    record_trainings(recorder)
    save_file(recorder, options.file)
    print(f"{options.file}: {len(recorder)} arrays")
    return 0


if __name__ == "__main__":
    sys.exit(main())
