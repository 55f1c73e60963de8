"""docs/exactness.md: `COMMAND` measures and writes it, in minutes."""

import platform

import torch

from benchmarks.peers import ROTARY
from isopos.lab.bench import accuracy
from isopos.lab.bench.exactness import BATCH, HEAD_DIM, HEADS, LENGTH, Table, error_tables, measure, other_libraries
from isopos.lab.reports.grids import markdown

__all__ = ["page"]

COMMAND = "python -m tools.exactness_page > docs/exactness.md"
INTRODUCTION = """\
# Exactness

A scheme gives the same outputs for a whole sequence, in chunks, token by token, packed, padded, at any position and in any
precision. This page has the errors of each setting in one run.
`{command}` writes it (with `isopos[lab,peers]`),
`isopos bench exactness` measures your machine; the digits of rounding errors differ between machines.

**Measurement.** Largest |output - reference| divided by max(1, largest |reference|), of {batch} samples of {length} tokens,
with {heads} heads of {head_dim} features, normal random inputs and default options; learned tables that start at zero are
filled at random. The reference is the quadratic definition in float64, which forms every weight, of the same rounded inputs.
It does not stream, pack or pad: packed and padded sequences are compared with each sequence by itself, streams with the
whole sequence, and positions from 2^31 on, for relative schemes, with the same sequence from 0 on. Additive embeddings are
added in the inputs' dtype, as in a model, and their rounding counts.

**What to expect.** A number near 1 is rounded by up to 1e-16 in float64, 6e-8 in float32, 4e-3 in bfloat16 and 5e-4 in
float16. Linear attention sums in float32 or wider and rounds once, at the end; softmax attention rounds queries and keys
again after rho, and the rest is PyTorch's kernel. An angle at 2^31 is rounded even in float64, by up to 2e-7, and packed
sequences with a decay lose some digits of float64 to the jumps that separate them. 0: the same operations in the same order.

"-" means refused; a number in brackets refers to the reason below the tables. After a scheme's name it applies to the whole
row, whose figures are for the other kind of attention. Here: torch {torch}, {machine}, one thread.
"""
COMPARED = """\
## Compared with other libraries

Rotary embeddings of {head_dim} features, base 10000, at {length} positions from the one named on: in float32, with bfloat16
inputs, and with inputs and module in bfloat16 (`module.bfloat16()`). The reference has angles in numpy's widest float; all
pairs of features are (1, 0), so that rotated features are cosines and sines. An error of 2 is half a turn, and 2e-3 is the
rounding of a result in bfloat16. Scores are products of rotated unit vectors, summed in float64. "-": a loop that fills a
table from position 0 on takes more than a minute. [peers.md](peers.md) compares results with other libraries' code.

**Ties.** RoFormer of transformers also builds its table in float64. In float32 it is as exact as isopos up to its largest
position, and with bfloat16 inputs it is more exact, because it then returns float32. With bfloat16 inputs, transformers'
Llama and x-transformers keep float32 angles: at 10^4 they are as exact as bfloat16 allows, at larger positions they are not.
A cast of the module rounds RoFormer's table once, which ties again. In other cases isopos is more exact:
rotary-embedding-torch counts positions in the dtype of its inputs, and a cast rounds the frequencies of the other three.
{missing}"""


def page() -> str:
    """The whole page."""
    accuracy.LIBRARIES.update(ROTARY)
    notes: list[str] = []
    sections = list(error_tables(measure(), notes))
    sizes = {"batch": BATCH, "heads": HEADS, "head_dim": HEAD_DIM, "length": LENGTH}
    where = {"torch": torch.__version__, "machine": f"{platform.machine()} CPU"}
    missing = f"\nNot installed: {', '.join(accuracy.missing_peers())}.\n" if accuracy.missing_peers() else ""
    lines = [
        INTRODUCTION.format(command=COMMAND, **sizes, **where),
        *map(written, sections),
        *(f"[{n}] {note}  " for n, note in enumerate(notes, 1)),
        "",
        COMPARED.format(head_dim=accuracy.HEAD_DIM, length=accuracy.LENGTH, missing=missing),
        *map(written, other_libraries()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def written(table: Table) -> str:
    """A table below its title."""
    return f"### {table.title}\n\n{markdown(table.head, table.rows, 'l'.ljust(len(table.head), 'r'))}\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(page(), end="")
