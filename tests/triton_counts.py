"""Instructions of the Triton kernels of linear attention, counted in machine code that is compiled without a GPU.

    python tests/triton_counts.py [--arch 100] [names of PROBLEMS ...]      # the table of docs/performance.md

Counted is the largest loop of a kernel, which scans chunks, or all code of a kernel without a loop. Chunks of packed
sequences have branches for borders of segments, which few chunks take: there it is the shortest way. The number per
token and head is instructions of a warp times warps per program times programs per head, divided by tokens per chunk.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from test_triton_compile import arguments, launches, problem
from triton_aot import Resources, compilers, disassembled

from isopos.feature_maps import elu1, identity, relu
from isopos.ops.linear.triton_arguments import Sizes

JUMP = r"\bBRA\b.*?(0x[0-9a-f]+)"
PROBLEMS = {  # kinds of maps, decay (or segments alone), denominator, feature map
    "none": ((), False, "encoded", elu1),
    "rope": (("rotation",), False, "plain", elu1),
    "none, packed": ((), "segments", "encoded", elu1),
    "rope, packed": (("rotation",), "segments", "plain", elu1),
    "none, decay": ((), True, "encoded", elu1),
    "retnet": (("rotation",), True, "plain", elu1),
    "permuteformer": (("gather",), True, "encoded", relu),
    "lrpe-unitary": (("reflection", "lift"), False, "plain", elu1),
    "no features": ((), False, None, identity),
    "no features, rope": (("rotation",), False, None, identity),
    "no features, packed": ((), "segments", None, identity),
    "no features, decay": ((), True, None, identity),
    "no features, retnet": (("rotation",), True, None, identity),
}


class Counted(NamedTuple):
    """A launch: its kernel, tokens per chunk, resources, instructions per token and head, and those of its loop by name."""

    kernel: str
    chunk: int
    warps: int
    used: Resources
    each: float
    loop: Counter[str]


def loops_of(text: str) -> list[list[tuple[int, str]]]:
    """Instructions with addresses of each loop of disassembled code that is in no other loop, or of all code without any.

    A jump back from behind the end of a kernel is no loop: on sm_100 waits for products are there.
    """
    code = [(int(at, 16), said) for at, said in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^/]*?)\s*;", text)]
    jumps = [(at, int(to[1], 16)) for at, said in code if (to := re.search(JUMP, said))]
    ends = [at for at, said in code if said == "EXIT"]
    back = [(to, at) for at, to in jumps if to < at and not any(to < end < at for end in ends)] or [(0, code[-1][0])]
    outer = [(a, b) for a, b in back if not any((c, d) != (a, b) and c <= a and b <= d for c, d in back)]
    return [[(at, said) for at, said in code if first <= at <= last] for first, last in dict.fromkeys(outer)]


def by_name(code: Iterable[str]) -> Counter[str]:
    """Instructions by name, without NOP."""
    return Counter(re.sub(r"^@!?U?P\w+ ", "", said).split()[0] for said in code if said != "NOP")


def shortest(inside: list[tuple[int, str]]) -> Counter[str]:
    """Instructions of a loop by name, by the shortest way through it."""
    places, best = {at: n for n, (at, _) in enumerate(inside)}, [(0, -1)] * (len(inside) + 1)  # length, next instruction
    for n, (_, said) in reversed([*enumerate(inside)]):
        to = re.search(JUMP, said)
        target = places.get(int(to[1], 16), -1) if to else -1
        ways = [] if re.fullmatch(r"BRA (`\S+ )?0x\w+", said) and target > n else [n + 1]
        ways += [target] if target > n else []
        best[n] = min((best[way][0] + (said != "NOP"), way) for way in ways)
    way, n = [], 0
    while n < len(inside):
        way.append(inside[n][1])
        n = best[n][1]
    return by_name(way)


def loop_of(text: str, *, packed: bool = False) -> Counter[str]:
    """Instructions by name in the largest loop of disassembled code, or in all of it; if packed, on the shortest way.

    Of two large loops, for scaled features and for weights of decays, that with fewer `mma.sync`, or fewer exponentials.
    """
    loops = loops_of(text)
    most = max(map(len, loops))
    large = [shortest(loop) if packed else by_name(said for _, said in loop) for loop in loops if 3 * len(loop) > most]
    return min(large, key=lambda loop: (sum(n for name, n in loop.items() if name.startswith("HMMA")), loop["MUFU.EX2"]))


def counted(name: str, d: int, arch: int) -> list[Counted]:
    """Counts of each launch of the forward and the backward pass of a problem."""
    kinds, decay, denominator, phi = PROBLEMS[name]
    sums, found = problem(torch.bfloat16, d, kinds, decay, denominator, phi=phi), []
    with pytest.MonkeyPatch.context() as patch:
        jobs, pool = [], compilers()
        for kernel, given, constants in launches(patch, sums, arch, learned=False):
            job, options = arguments(kernel, given, constants, arch)
            sizes = next(x for x in given if isinstance(x, Sizes))
            jobs.append((kernel, sizes, constants.get("C", 1), options, pool.submit(disassembled, *job, **options)))
        for kernel, sizes, chunk, options, job in jobs:
            (used, text), warps = job.result(), options.get("num_warps", 4)
            loop, programs = loop_of(text, packed=sums.segmented), 1 if kernel == "quotients" else sizes.blocks
            each = 0 if kernel == "scan" else loop.total() * warps * programs / chunk
            found.append(Counted(kernel, chunk, warps, used, each, loop))
    return found


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*PROBLEMS])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--d", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--loops", action="store_true", help="print each launch with its most frequent instructions")
    given = parser.parse_args()
    print("| attention | d | launches | forward | backward | total | registers | spilled | shared, KiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, d in [(name, d) for name in given.names for d in given.d]:
        found = counted(name, d, given.arch)
        ends = next(n for n in range(1, len(found)) if found[n - 1].kernel == "outputs" != found[n].kernel)
        forward, whole = sum(own.each for own in found[:ends]), sum(own.each for own in found)
        most = [max(own.used[n] for own in found) for n in range(3)]
        row = (
            name,
            d,
            len(found),
            f"{forward:.1f}",
            f"{whole - forward:.1f}",
            f"{whole:.1f}",
            most[1],
            most[2],
            most[0] >> 10,
        )
        print("|", " | ".join(map(str, row)), "|", flush=True)
        for own in found if given.loops else ():
            print(
                f"    {own.kernel} C={own.chunk} w={own.warps} {own.each:.1f} {own.used}",
                *(f"{k}:{n}" for k, n in own.loop.most_common(40)),
            )


if __name__ == "__main__":
    main()
