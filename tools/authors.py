"""What each scheme does otherwise than its authors' released code: facts read from that code, one entry a scheme.

Docstrings say what differs from a paper; this is about programs, for whoever compares or carries weights over. Options in
backticks are those that give the code's behaviour. Numbers beside packages that can be run are in docs/peers.md.
"""

from typing import NamedTuple

__all__ = ["AUTHORS", "Code"]


class Code(NamedTuple):
    """The authors' code, and what differs; of nothing known, an empty text."""

    where: str  # a repository on GitHub, or why there is none
    differs: str = ""

    @property
    def said(self) -> str:
        """What differs, or that nothing is known to."""
        return self.differs or ("nothing known" if "/" in self.where else "-")


APE, SPE, HORN = "konstantinosKokos/ape", "aliutkus/spe", "ExpectationMax/Translational-Equivariant-Performers"
LRPE = "OpenNLPLab/Lrpe, and the paper's listing"
LRPE_SUMS = "a layer norm in place of a denominator (`denominator=none`), positions in the features' dtype"
SPE_SUMS = "noise is drawn in each call, one draw per head (`noise_per_head=true`); a learned gate (`gated=true`)"
AUTHORS = {
    "none": Code("no code of its own"),
    "sinusoidal": Code(
        "tensorflow/tensor2tensor",
        "sines stand before cosines, and its wavelengths end at 10000 exactly: exponents t / (d/2 - 1) instead of 2t / d",
    ),
    "learned": Code("facebookresearch/fairseq", "positions are counted from the padding index + 1, without padding"),
    "shiv-quirk": Code(
        "microsoft/icecaps",
        "each copy has the norm sqrt(d/2), not all together; features of copies are interleaved; 256 steps up by default",
    ),
    "ape-sequence": Code(
        APE,
        "an optimiser finds the initial generator, which has each second angle of rope twice and the opposite sense; powers "
        "by repeated squaring in float32, up to a length",
    ),
    "ape-absolute": Code("no code: the repository's absolute embedding is a learned table"),
    "ape-grid": Code(
        APE,
        "keys are moved by the query's maps, so that unequal positions fail; two axes; locality falls with the straight "
        "distance rounded down (`attention=softmax,locality=0.98,metric=euclidean`); else as ape-sequence",
    ),
    "ape-ring": Code("no code"),
    "ape-tree": Code(
        APE,
        "heads share generators, which are transposed; padding counts in the distances of its locality "
        "(`attention=softmax,locality=0.98`); depth up to 16; else as ape-sequence",
    ),
    "ape-product": Code("no code"),
    "rope-axial": Code(
        "naver-ai/rope-vit", "columns come before rows in positions; the class token does not turn, as one at the origin"
    ),
    "rope-mixed": Code(
        "naver-ai/rope-vit",
        "two axes, of which columns come before rows; each layer has frequencies of its own, all in one parameter; the "
        "class token does not turn, as one at the origin",
    ),
    "rope-golden": Code(
        "jerryxio.ng/posts/nd-rope, listings of an essay",
        "magnitudes ascend, from a smallest to a largest one that are given, with both ends, after a share that is zero; "
        "pairs (i, i + d/2); columns come before rows, and positions are counted from the middle of an image of area 4",
    ),
    "mrope": Code(
        "huggingface/transformers",
        "pairs (i, i + d/2) (`layout=half`); Qwen2-VL's default is base 10^6 (`base=1000000`), Qwen3-VL's is 5 10^5 "
        "(`base=500000`), and its axes take turns (`interleaved=true`)",
    ),
    "wire": Code("no code"),
    "prope": Code(
        "liruilong940607/prope",
        "a position is a view matrix, the inverse of a pose, and K, counted in images from their middle, as "
        "isopos.poses.cameras does with a size; columns come before rows, and pairs (i, i + d/8) of each quarter turn the "
        "other way (`layout=half`); skew of K is dropped; softmax attention only",
    ),
    "clock": Code("no code"),
    "string": Code("no code"),
    "comrope": Code(
        "Longin-Yu/ComRoPE",
        'blocks of 2 by default, at first normal random; heads share the directions of "linear", and blocks of "axial" take '
        "turns among axes; positions are centres of patches in (0, 1), rows before columns, moved by noise in training; "
        "the class token is in the middle, at 0.5; each layer has generators of its own",
    ),
    "grape": Code(
        "model-architectures/GRAPE",
        "its non-contextual model turns the d/2 planes of coordinates (i, i + d/2) alone, the other way, at learned speeds "
        "that heads share and layers do not, whose logarithms are learned; norms of queries and keys come after it",
    ),
    "liere": Code(
        "StanfordMIMI/LieRE",
        "upper triangles of blocks, at first uniform in [0, 2 pi), which heads and layers share or not, by flags; features "
        "beyond whole blocks pass; positions from 0 to 1 with both ends on an image of the trained size, rows before "
        "columns; the class token does not turn, as one at the origin; exponentials in float32",
    ),
    "fox": Code(
        "zhixuan-lin/forgetting-transformer",
        "gates read the layer's input, not the head's key, with weights of standard deviation 0.02 at first, each "
        "layer its own; its variant with RoPE has pairs (i, i + d/2) and base 500,000; softmax attention only",
    ),
    "selective": Code(
        "timurcarstensen/selective-rope",
        "angles read the layer's input, each head's part of length one, through a matrix of low rank and a convolution over "
        "four tokens, each layer its own; base 500,000 (`base=500000`); pairs (i, i + d/2) (`layout=half`); at first angles "
        "come from content alone",
    ),
    "horn-constrained": Code(HORN, "the stabiliser of keys is a maximum over the whole batch"),
    "horn-clipped": Code(
        HORN,
        "half of the heads see content alone, the others positions alone; L1 distance, so that direction is lost, and one "
        "vector beyond the reach; no causal mask, no padding; one class token and a square image; keys are made of the "
        "queries' tokens, also in cross-attention",
    ),
    "shaw": Code("tensorflow/tensor2tensor"),
    "transformer-xl": Code(
        "kimiyoung/transformer-xl",
        "sines stand before cosines and offsets count to the left, so that rows of W are in another order",
    ),
    "t5": Code("google-research/text-to-text-transfer-transformer", "its logits are not scaled by d^-1/2"),
    "deberta": Code(
        "microsoft/DeBERTa", "position to content reads row delta(i, j), where Eq. 4 has delta(j, i) (`released=true`)"
    ),
    "kerple": Code(
        "chijames/KERPLE", "numbers are learned as they are, and cut from below at 0.01 in each call; causal attention only"
    ),
    "fire": Code("no code but the listing of the paper's appendix"),
    "alibi": Code("ofirpress/attention_with_linear_biases", "causal softmax attention only"),
    "lrpe-unitary": Code(LRPE, f"{LRPE_SUMS}; the listing takes complex features only, and its theta has type a alone"),
    "lrpe-orthogonal": Code(LRPE, f"{LRPE_SUMS}; thetas b and c are divided by the length of each call, not by `length`"),
    "lrpe-permutation": Code(LRPE, f"{LRPE_SUMS}; a table of 512 positions"),
    "permuteformer": Code(
        "cpcp1998/PermuteFormer",
        "its language model has no denominator (`denominator=none`) and rates sigmoid(2 + 3h/H) instead of 0.88 to 0.99 "
        "(`decay=permuteformer-released`); it forms r^i and r^-j, which overflow float32 after some 700 tokens; a table of "
        "5,000 positions",
    ),
    "permuteformer-2d": Code(
        "cpcp1998/PermuteFormer",
        "both axes have the same permutations, of fixed width and height; its class token shares the first pixel's place",
    ),
    "pope": Code("lucidrains/x-transformers, which is not the authors'", "phases are cut to [-2 pi, 0]; float32 angles"),
    "rope": Code("ZhuiyiTechnology/roformer"),
    "p-rope": Code("huggingface/transformers", 'its "proportional" frequencies are of pairs (i, i + d/2) (`layout=half`)'),
    "retnet": Code(
        "microsoft/torchscale",
        "frequencies 10000^-(i / (d/2 - 1)) instead of 10000^(-2i/d) (`frequencies=torchscale`); no feature map and no "
        "denominator (`original=true`): weights are divided by the root of their decays' sum and by the magnitude of their "
        "own, at least 1; then an RMS norm and a swish gate",
    ),
    "xpos": Code(
        "microsoft/torchscale", "scales are powers of the distance to the middle of each call, so that cached keys age"
    ),
    "jordan": Code("no code"),
    "cosformer": Code(
        "OpenNLPLab/cosFormer",
        "M is the longer of both lengths of each call; features are max(x, 0) without the 0.001; denominators from 1e-6 on",
    ),
    "spe-sine": Code(
        SPE,
        f"{SPE_SUMS}; gains are softplus, frequencies at most half a turn a step by sigmoids, 1 sine by default; codes "
        "shrink by (R d)^-1/4 and by (2K)^-1/2",
    ),
    "spe-conv": Code(SPE, f"{SPE_SUMS}; filters of 200 steps, on 1 to 3 axes; codes shrink by (R d)^-1/4"),
}
