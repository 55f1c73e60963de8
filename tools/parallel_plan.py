"""What attention over many devices sends and costs: bytes counted in real processes, rates measured here, times from both.

``python -m tools.parallel_plan`` prints the tables of docs/parallel.md. A layer has 32 heads of 128 features, causal, in
bfloat16 with float32 sums; forward and backward pass.
"""

import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn

import isopos
from isopos.parallel import Pending, Ring, Shards, Traffic

HEADS, DIM, LINK = 32, 128, 50e9  # LINK: bytes per second of a device's network, 400 Gbit/s
LENGTHS, DEVICES = (10**6, 10**8), (8, 64, 1024)
H100 = {"linear": 3.35e12 / (16 * HEADS * DIM * 2), "softmax": 0.5 * 989e12}
"""Tokens per second of linear attention, from the memory traffic that docs/gpu.md counts at an H100's published bandwidth;
and FLOP/s of softmax attention at half of its published peak. Neither is measured."""


def linear_bytes(devices: int) -> int:
    """Bytes that a device sends for a layer: S with a column of denominators, and g of two keys, once in each direction."""
    return 2 * (devices - 1) * (HEADS * DIM * (DIM + 1) * 4 + HEADS * 2 * 8)


def softmax_bytes(tokens: int, devices: int, size: int) -> int:
    """The same for softmax attention here, of all devices together: keys and values to later shards, gradients back."""
    return 2 * 2 * HEADS * DIM * size * (tokens // devices) * devices * (devices - 1) // 2


def ring_bytes(tokens: int, devices: int, size: int = 2) -> int:
    """The same for a device in ring attention: keys and values round the ring; then these and their gradients again.

    Ours sends so many in float32, where size is 4, without `causal`; causal contiguous shards send half, on average.
    """
    return 6 * HEADS * DIM * size * (tokens // devices) * (devices - 1)


def _member(rank: int, size: int, folder: str) -> None:
    """Compare the counted bytes with the formulas in one of `size` processes; rank 0 times the loopback."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{size}", rank=rank, world_size=size)
    group, t = dist.distributed_c10d._get_default_group(), 64
    at = isopos.retnet(DIM, HEADS, denominator="encoded").at(isopos.sequence(t) + rank * t, group=group)
    q, k, v = torch.randn(3, 1, HEADS, t, DIM, requires_grad=True)
    with Traffic() as traffic:
        isopos.linear_attention(q, k, v, **at, causal=True).sum().backward()
    assert traffic.sent == linear_bytes(size), (traffic.sent, linear_bytes(size))
    scheme = isopos.rope(DIM, HEADS, attention="softmax")
    with Traffic() as traffic:
        isopos.softmax_attention(
            q, k, v, **scheme.at(isopos.sequence(t) + rank * t, group=group), causal=True
        ).sum().backward()
    at = scheme.at(isopos.sequence(t) + rank * t, group=Ring(group))
    lengths = 8 * (size - 1)
    with Traffic() as ring:
        isopos.softmax_attention(q, k, v, **at).sum().backward()
    assert ring.sent - lengths == ring_bytes(t * size, size, size=4), (ring.sent, ring_bytes(t * size, size, size=4))
    if rank == 0 and size == 2:
        print(_overlap(group))
    else:
        _overlap(group)
    count = torch.tensor([traffic.sent])
    dist.all_reduce(count)
    assert int(count) - size * lengths == softmax_bytes(t * size, size, size=4), (int(count), lengths)
    dist.destroy_process_group()


def _overlap(group: Any) -> str:
    """How long a process waits for a collective alone, and after the sums over local keys, which run meanwhile."""
    t, seconds = 1024, {"alone": [], "waited": []}
    q, k, v = torch.randn(3, 1, HEADS, t, DIM)
    at = isopos.retnet(DIM, HEADS, denominator="encoded").at(isopos.sequence(t) + group.rank() * t, group=group)
    known, states, wait = Shards(group, t, q.device), torch.randn(HEADS, DIM, DIM + 1), Pending.wait

    def timed(pending: Pending) -> list[torch.Tensor]:
        start = time.perf_counter()
        found = wait(pending)
        seconds[kind].append(time.perf_counter() - start)
        return found

    Pending.wait = timed  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(5):
        kind = "alone"
        known.gather(states).wait()
        kind = "waited"
        isopos.linear_attention(q, k, v, **at, causal=True)
    Pending.wait = wait
    alone, waited = (1000 * min(seconds[name]) for name in ("alone", "waited"))
    return (
        f"The states of a layer take {alone:.2g} ms between two processes; {waited:.2g} ms are waited after the own sums.\n"
    )


def measured() -> dict[str, float]:
    """Tokens per second of linear attention and FLOP/s of softmax attention here, both passes, on one thread."""
    heads, t, rates = 4, 2048, {}
    q, k, v = torch.randn(3, 1, heads, t, DIM, requires_grad=True)
    at = isopos.retnet(DIM, heads, denominator="encoded").at(isopos.sequence(t))
    work = {
        "linear": (lambda: isopos.linear_attention(q, k, v, **at, causal=True), t * heads / HEADS),
        "softmax": (lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 3.5 * 2 * t * t * DIM * heads),
    }
    for name, (run, amount) in work.items():
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            run().sum().backward()
            seconds.append(time.perf_counter() - start)
        rates[name] = amount / min(seconds)
    return rates


def table(rates: dict[str, float], link: float) -> list[str]:
    """Rows of a plan: for each length and number of devices the bytes that a device sends, and the seconds of a layer."""
    rows = [
        "| tokens | devices | linear: sent | computed in | sent in | ring attention: sent | computed in | sent in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tokens in LENGTHS:
        for devices in DEVICES:
            own, ring = linear_bytes(devices), ring_bytes(tokens, devices)
            work = tokens / devices / rates["linear"]
            pairs = 3.5 * 2 * tokens**2 * DIM * HEADS / devices / rates["softmax"]
            cells = [_size(own), _time(work), _time(own / link), _size(ring), _time(pairs), _time(ring / link)]
            rows.append(f"| {tokens:,} | {devices:,} | {' | '.join(cells)} |")
    return rows


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 3600 else f"{seconds / 3600:,.3g} h"


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 4):
            spawn(_member, (size, folder), size)
    here = measured()
    print("Bytes counted in 2 and in 4 processes are those of the formulas.\n")
    print(
        f"An H100 at published rates ({H100['linear']:,.0f} tokens/s, {H100['softmax']:.3g} FLOP/s), {LINK:.3g} bytes/s:\n"
    )
    print("\n".join(table(H100, LINK)))
    print(f"\nOne thread of this CPU, measured ({here['linear']:,.0f} tokens/s, {here['softmax']:.3g} FLOP/s):\n")
    print("\n".join(table(here, LINK)))


if __name__ == "__main__":
    sys.exit(main())
