"""The names of the schemes, without importing torch: one row each, beside one function in `isopos.schemes`."""

from typing import NamedTuple

__all__ = ["CATALOG", "Entry"]


class Entry(NamedTuple):
    """What `isopos list` prints of a scheme."""

    summary: str
    citation: str


CATALOG: dict[str, Entry] = {
    "none": Entry("no position at all: the baseline", "Tsai et al. 2019, arXiv 1908.11775"),
    "sinusoidal": Entry("fixed sines and cosines added to the embeddings", "Vaswani et al. 2017, section 3.5"),
    "learned": Entry("one learned vector a position added to the embeddings", "Gehring et al. 2017, arXiv 1705.03122"),
    "rope": Entry("rotation of feature pairs", "Su et al. 2021, RoFormer, Eq. 14-16"),
    "lrpe-unitary": Entry("phases on d complex features, real part: direction-blind", "Qin et al. 2023, LRPE, Eq. 22"),
    "lrpe-orthogonal": Entry("rotation of feature pairs in an orthogonal basis", "Qin et al. 2023, LRPE, Eq. 23"),
    "lrpe-permutation": Entry("powers of a permutation in an orthogonal basis", "Qin et al. 2023, LRPE, Eq. 24"),
    "permuteformer": Entry("powers of a permutation a head, with decay", "Chen 2021, PermuteFormer, Eq. 11"),
    "retnet": Entry("rotation of feature pairs, with decay a head", "Sun et al. 2023, RetNet, Eq. 5 and 8"),
    "alibi": Entry("no encoding, a decay a head with geometric slopes", "Press et al. 2022, ALiBi, section 3"),
    "cosformer": Entry("weights times a cosine of the offset, direction-blind", "cosFormer (2022); LRPE, Eq. 35"),
    "ape-sequence": Entry("powers of one learned orthogonal matrix a head", "Kogkalidis et al. 2024, APE, section 3.1"),
    "ape-ring": Entry(
        "rotations of whole turns a period, in a learned basis a head", "Kogkalidis et al. 2024, APE, section 3.4.2"
    ),
}
