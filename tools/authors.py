"""Differences between the schemes and their authors' released code, one entry per scheme.

Docstrings state differences from papers; these are differences from code, for comparisons and for transferring weights.
Options in backticks give the code's behaviour. docs/peers.md has numerical differences of packages that can be run.
"""

from typing import NamedTuple

__all__ = ["AUTHORS", "Code"]


class Code(NamedTuple):
    """The authors' code, and its differences; empty if no difference is known."""

    where: str  # a repository on GitHub, or the reason why there is none
    differs: str = ""

    @property
    def summary(self) -> str:
        """The differences as a table cell."""
        return self.differs or ("nothing known" if "/" in self.where else "-")


APE, SPE, HORN = "konstantinosKokos/ape", "aliutkus/spe", "ExpectationMax/Translational-Equivariant-Performers"
LRPE = "OpenNLPLab/Lrpe, and the paper's listing"
LRPE_SUMS = "a layer norm instead of a denominator (`denominator=none`), positions in the features' dtype"
SPE_SUMS = "noise is drawn in each call, one draw per head (`noise_per_head=true`); a learned gate (`gated=true`)"
AUTHORS = {
    "none": Code("no code"),
    "sinusoidal": Code(
        "tensorflow/tensor2tensor",
        "sines come before cosines, and its wavelengths end at exactly 10000: exponents t / (d/2 - 1) instead of 2t / d",
    ),
    "learned": Code("facebookresearch/fairseq", "positions are counted from the padding index + 1, without padding"),
    "shiv-quirk": Code(
        "microsoft/icecaps",
        "each copy has the norm sqrt(d/2), here all together; features of copies are interleaved; 256 steps up by default",
    ),
    "ape-sequence": Code(
        APE,
        "an optimiser finds the initial generator, which has every second angle of rope twice and the opposite sign; powers "
        "by repeated squaring in float32, up to a length",
    ),
    "ape-absolute": Code("no code: the repository's absolute embedding is a learned table"),
    "ape-grid": Code(
        APE,
        "keys are mapped by the query's maps, so that unequal positions fail; two axes; locality decreases with the "
        "straight distance rounded down (`attention=softmax,locality=0.98,metric=euclidean`); otherwise as ape-sequence",
    ),
    "ape-ring": Code("no code"),
    "ape-tree": Code(
        APE,
        "heads share generators, which are transposed; padding counts in the distances of its locality "
        "(`attention=softmax,locality=0.98`); depth up to 16; otherwise as ape-sequence",
    ),
    "ape-product": Code("no code"),
    "rope-axial": Code(
        "naver-ai/rope-vit",
        "columns come before rows in positions; the class token is not rotated, as one at the origin. DINOv3, in "
        "transformers: pairs (i, i + d/2) (`layout=half`), positions of isopos.patches, draws of the box in float32",
    ),
    "rope-mixed": Code(
        "naver-ai/rope-vit",
        "two axes, columns before rows; each layer has separate frequencies, all in one parameter; the class token is not "
        "rotated, as one at the origin",
    ),
    "rope-golden": Code(
        "jerryxio.ng/posts/nd-rope, listings of an essay",
        "magnitudes ascend from a chosen smallest to a chosen largest one, both included, after a share of zeros; pairs "
        "(i, i + d/2); columns come before rows, and positions are relative to the centre of an image of area 4",
    ),
    "mrope": Code(
        "huggingface/transformers",
        "pairs (i, i + d/2) (`layout=half`); Qwen2-VL's default is base 10^6 (`base=1000000`), Qwen3-VL's is 5 10^5 "
        "(`base=500000`), and its axes alternate (`interleaved=true`); VideoRoPE and HoPE (`time=slow`, `time=none`): "
        "positions of isopos.frames, times two steps apart, or drawn for each video; VRoPE: four sections, "
        "and its layout corners",
    ),
    "harope": Code(
        "Studentxll/HARoPE",
        "keys have the inverse transposed matrix (`released=true`); skew matrices are (A - A^T) / 2, and factors "
        "softplus(r); each layer has separate matrices; softmax attention only",
    ),
    "wire": Code("no code"),
    "prope": Code(
        "liruilong940607/prope",
        "a position is a view matrix, the inverse of a pose, and K in units of images from their centre, as "
        "isopos.poses.cameras computes with a size; columns come before rows, and pairs (i, i + d/8) of each quarter rotate "
        "in the opposite sense (`layout=half`); skew of K is dropped; softmax attention only",
    ),
    "clock": Code("no code"),
    "string": Code("no code"),
    "comrope": Code(
        "Longin-Yu/ComRoPE",
        'blocks of 2 by default, initially normal random; heads share the directions of "linear", and blocks of "axial" '
        "alternate between axes; positions are centres of patches in (0, 1), rows before columns, with noise in training; "
        "the class token is in the middle, at 0.5; each layer has separate generators",
    ),
    "grape": Code(
        "model-architectures/GRAPE",
        "its non-contextual model rotates only the d/2 coordinate planes (i, i + d/2), in the opposite sense, at speeds "
        "that heads share and layers do not; their logarithms are learned; norms of queries and keys come after rotation",
    ),
    "liere": Code(
        "StanfordMIMI/LieRE",
        "upper triangles of blocks, initially uniform in [0, 2 pi); flags decide whether heads and layers share them; "
        "features beyond complete blocks pass unchanged; positions from 0 to 1, both included, on an image of the trained "
        "size, rows before columns; the class token is not rotated, as one at the origin; exponentials in float32",
    ),
    "fox": Code(
        "zhixuan-lin/forgetting-transformer",
        "gates read the layer's input, not the head's key, with separate weights per layer, of initial standard deviation "
        "0.02; its variant with RoPE has pairs (i, i + d/2) and base 500,000; softmax attention only",
    ),
    "selective": Code(
        "timurcarstensen/selective-rope",
        "angles read the layer's input, each head's part with length one, through a matrix of low rank and a convolution "
        "over four tokens, separate per layer; base 500,000 (`base=500000`); pairs (i, i + d/2) (`layout=half`); initially "
        "angles depend on content alone",
    ),
    "carope": Code("no code"),
    "path": Code(
        "fla-org/flash-linear-attention",
        "vectors read the layer's input through a matrix of rank 32 and a convolution over three tokens with SiLU, and "
        "strengths read the input, with separate weights per layer; forget gates are scaled as logits are; softmax "
        "attention only",
    ),
    "drope": Code("no code"),
    "horn-constrained": Code(HORN, "the stabiliser of keys is a maximum over the whole batch"),
    "horn-clipped": Code(
        HORN,
        "half of the heads use content alone, the others positions alone; L1 distance, so that direction is lost, and one "
        "vector beyond the reach; no causal mask, no padding; one class token and a square image; keys are computed from "
        "the queries' tokens, also in cross-attention",
    ),
    "shaw": Code("tensorflow/tensor2tensor"),
    "transformer-xl": Code(
        "kimiyoung/transformer-xl",
        "sines come before cosines and offsets count to the left, so that rows of W are in another order",
    ),
    "t5": Code("google-research/text-to-text-transfer-transformer", "its logits are not scaled by d^-1/2"),
    "deberta": Code(
        "microsoft/DeBERTa", "position to content reads row delta(i, j), where Eq. 4 has delta(j, i) (`released=true`)"
    ),
    "kerple": Code(
        "chijames/KERPLE", "numbers are learned directly, and clamped to at least 0.01 in each call; causal attention only"
    ),
    "fire": Code("no code except the listing in the paper's appendix"),
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
        "both axes have the same permutations, of fixed width and height; its class token shares the first pixel's position",
    ),
    "pope": Code("lucidrains/x-transformers, not by the authors", "phases are clamped to [-2 pi, 0]; float32 angles"),
    "rope": Code("ZhuiyiTechnology/roformer"),
    "p-rope": Code("huggingface/transformers", 'its "proportional" frequencies are of pairs (i, i + d/2) (`layout=half`)'),
    "retnet": Code(
        "microsoft/torchscale",
        "frequencies 10000^-(i / (d/2 - 1)) instead of 10000^(-2i/d) (`frequencies=torchscale`); no feature map and no "
        "denominator (`original=true`): weights are divided by the square root of the sum of decays and by the magnitude of "
        "their own sum, at least 1; then an RMS norm and a swish gate",
    ),
    "xpos": Code(
        "microsoft/torchscale", "scales are powers of the distance to the middle of each call, so cached keys become invalid"
    ),
    "jordan": Code("no code"),
    "cosformer": Code(
        "OpenNLPLab/cosFormer",
        "M is the longer of both lengths of each call; features are max(x, 0) without the 0.001; denominators from 1e-6 on",
    ),
    "spe-sine": Code(
        SPE,
        f"{SPE_SUMS}; gains are softplus, frequencies are at most half a turn per step by sigmoids, 1 sine by default; "
        "codes are divided by (R d)^1/4 and by (2K)^1/2",
    ),
    "spe-conv": Code(SPE, f"{SPE_SUMS}; filters of 200 steps, on 1 to 3 axes; codes are divided by (R d)^1/4"),
}
