"""The names of the schemes, without importing torch: one row each, beside one function in `isopos.schemes`."""

from typing import NamedTuple

__all__ = ["CATALOG", "Entry"]


class Entry(NamedTuple):
    """What is said of a scheme; what can be measured is not said here but measured (docs/schemes.md)."""

    summary: str
    citation: str
    equation: str  # of the weight w(q, k) before the decay, or of what is added; t = y - x is the offset
    cost: str  # beyond attention without positions, of t tokens, d features, n buckets
    extends: str  # to which other groups
    content: bool = True  # whether what positions do to a score depends on the query or the key
    learns: str = "nothing"  # by default


CATALOG: dict[str, Entry] = {
    "none": Entry(
        "no position at all: the baseline", "Tsai et al. 2019, arXiv 1908.11775", "<q, k>", "none", "any group", False
    ),
    "sinusoidal": Entry(
        "fixed sines and cosines added to the embeddings",
        "Vaswani et al. 2017, section 3.5",
        "e_x + (sin w_i x, cos w_i x)",
        "t d once",
        "grids, by concatenation",
    ),
    "learned": Entry(
        "one learned vector a position added to the embeddings",
        "Gehring et al. 2017, arXiv 1705.03122",
        "e_x + p_x",
        "t d once",
        "any finite set",
        learns="the vectors",
    ),
    "rope": Entry(
        "rotation of feature pairs",
        "Su et al. 2021, RoFormer, Eq. 14-16",
        "<q, R(w t) k>",
        "t d",
        "grids, rings, by direct sum",
    ),
    "xpos": Entry(
        "rotation of feature pairs that shrink with distance; causal",
        "Sun et al. 2022, arXiv 2212.10554, Algorithm 1",
        "<q, zeta^-t R(w t) k>",
        "t d",
        "lines",
    ),
    "lrpe-unitary": Entry(
        "phases on complex features; of real ones the real part, direction-blind",
        "Qin et al. 2023, LRPE, Eq. 22",
        "Re q^H P^H diag(e^(i a t)) P k",
        "t d, twice the features on real vectors",
        "grids, rings, by direct sum",
    ),
    "lrpe-orthogonal": Entry(
        "rotation of feature pairs in an orthogonal basis",
        "Qin et al. 2023, LRPE, Eq. 23",
        "<P q, R(a t) P k>",
        "t d",
        "grids, rings, by direct sum",
    ),
    "lrpe-permutation": Entry(
        "powers of a permutation in an orthogonal basis",
        "Qin et al. 2023, LRPE, Eq. 24",
        "<P q, pi^t P k>",
        "t d",
        "grids, by commuting permutations",
    ),
    "permuteformer": Entry(
        "powers of a permutation a head, with decay", "Chen 2021, PermuteFormer, Eq. 11", "<q, pi^t k>", "t d", "grids"
    ),
    "permuteformer-2d": Entry(
        "powers of commuting permutations on a grid",
        "Chen 2021, PermuteFormer, Eq. 14",
        "<q, pi_1^t1 pi_2^t2 k>",
        "t d",
        "grids of any number of axes",
    ),
    "shaw": Entry(
        "learned vectors of clipped offsets added to keys and values",
        "Shaw et al. 2018; RoFormer, Eq. 5",
        "<q, k + a_clip(t)>, v + b_clip(t)",
        "t n d + t^2",
        "grids, with n exponential in axes",
        learns="vectors of keys and values, shared by heads",
    ),
    "transformer-xl": Entry(
        "content and relative sinusoids with two learned vectors",
        "Dai et al. 2019, section 3.3; RoFormer, Eq. 7",
        "<q + u, k> + <q + v, W p_t>",
        "t d m + t^2 m for m sinusoids",
        "grids, by concatenation",
        learns="u, v and W",
    ),
    "t5": Entry(
        "a learned number a head and bucket of offsets",
        "Raffel et al. 2020, section 2.1",
        "<q, k> + b_bucket(t)",
        "t^2",
        "grids, with n exponential in axes",
        False,
        learns="the numbers b",
    ),
    "deberta": Entry(
        "content to position and position to content",
        "He et al. 2021, Eq. 4; RoFormer, Eq. 10",
        "<q, k> + <q, K_t> + <Q_-t, k>",
        "t n d + t^2",
        "grids, with n exponential in axes",
        learns="the vectors K and Q",
    ),
    "alibi": Entry(
        "no encoding, a decay a head with geometric slopes",
        "Press et al. 2022, ALiBi, section 3",
        "<q, k> - slope |t|; linear: <q, k> exp(-slope |t|)",
        "t",
        "lines",
        False,
    ),
    "retnet": Entry(
        "rotation of feature pairs, with decay a head",
        "Sun et al. 2023, RetNet, Eq. 5 and 8",
        "<q, R(w t) k> gamma^|t|",
        "t d",
        "lines",
    ),
    "cosformer": Entry(
        "weights times a cosine of the offset, direction-blind",
        "cosFormer (2022); LRPE, Eq. 35",
        "cos(pi t / 2 M) <q, k>",
        "t d, twice the features",
        "lines",
        False,
    ),
    "ape-sequence": Entry(
        "powers of one learned orthogonal matrix a head",
        "Kogkalidis et al. 2024, APE, section 3.1",
        "<q, W^t k>",
        "d^3 once, t d^2",
        "any product, by direct sum",
        learns="W: planes and angles",
    ),
    "ape-absolute": Entry(
        "powers of one learned orthogonal matrix, on keys or queries only",
        "Kogkalidis et al. 2024, APE, section 3.4.1",
        "<q, W^y k>",
        "d^3 once, t d^2",
        "any group",
        learns="W: planes and angles",
    ),
    "ape-tree": Entry(
        "products of a learned orthogonal matrix a branch and head",
        "Kogkalidis et al. 2024, APE, section 3.2",
        "<q, W_path(x, y) k>",
        "t d^3 once, t d^2",
        "any product, by direct sum",
        learns="W of each branch: planes and angles",
    ),
    "ape-grid": Entry(
        "powers of a learned orthogonal matrix an axis and head",
        "Kogkalidis et al. 2024, APE, section 3.3",
        "<q_1, W_1^t1 k_1> + <q_2, W_2^t2 k_2>",
        "d^3 once, t d^2",
        "any product, by direct sum",
        learns="W of each axis: planes and angles",
    ),
    "ape-ring": Entry(
        "rotations of whole turns a period, in a learned basis a head",
        "Kogkalidis et al. 2024, APE, section 3.4.2",
        "<P q, R(2 pi m t / n) P k>",
        "d^3 once, t d^2",
        "any product, by direct sum",
        learns="the basis P",
    ),
    "ape-product": Entry(
        "direct sums for sequences of trees, trees of grids and other products",
        "Kogkalidis et al. 2024, APE, section 3.4.3",
        "sum over parts of <q_p, W_p k_p>",
        "of its parts",
        "any product",
        learns="what its parts learn",
    ),
    "horn-constrained": Entry(
        "sinusoids in further channels with a constrained projection",
        "Horn et al. 2021, scheme 1",
        "<q, k> + sum a_m cos w_m t - b_m sin w_m t",
        "t m further features",
        "grids",
        False,
        learns="a and b",
    ),
    "horn-clipped": Entry(
        "learned vectors of clipped offsets beside keys, in linear time",
        "Horn et al. 2021, scheme 2",
        "<q, k + a_clip(t)>",
        "t n d",
        "grids, with n exponential in axes",
        learns="the vectors a",
    ),
    "spe-sine": Entry(
        "random features of sinusoidal covariances, relative in expectation",
        "Liutkus et al. 2021, sineSPE",
        "E = sum_d q_d k_d sum_k l_dk^2 cos(w_dk t - phi_dk)",
        "t d r (2 k + 1) for r realizations",
        "grids",
        learns="frequencies w, phases phi, gains l",
    ),
    "spe-conv": Entry(
        "random features of filtered noise, relative in expectation",
        "Liutkus et al. 2021, convSPE",
        "E = sum_d q_d k_d (f_d * g_d)(t)",
        "t d r n for n steps of the filters",
        "grids",
        learns="the filters f and g",
    ),
    "shiv-quirk": Entry(
        "the stack of a node's last branches added to the embeddings",
        "Shiv and Quirk 2019",
        "e_x + (p^i [branch i steps up is b])",
        "t d once",
        "trees",
        learns="p, several",
    ),
}
