"""docs/peers.md: results compared with other libraries' code. `COMMAND` writes it; tests/test_oracles.py checks it.

Peers come from PyPI (extra `peers`) and are imported when they are first compared, because some imports take seconds.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isopos
from benchmarks.peers import ROTARY
from isopos.attention import linear_attention, softmax_attention
from isopos.catalog import CATALOG
from isopos.feature_maps import FEATURE_MAPS, sides
from isopos.lab.reports.grids import markdown
from isopos.lab.reports.kernels import fill_zeros
from isopos.maps import pair
from isopos.schemes import REGISTRY
from tests.canonical import canonical, score

__all__ = ["COMPARISONS", "PeerCheck", "angles", "by_formula", "error", "ordered", "page", "rotated", "row"]

COMMAND = "python -m benchmarks.peers_page > docs/peers.md"
ROOT = Path(__file__).parents[1]
HEADS, HEAD_DIM, LENGTH = 2, 16, 70
ELU = FEATURE_MAPS["elu+1"]
INTRODUCTION = """\
# Compared with other libraries' code

Largest differences between results of a scheme and of other code, for the same queries, keys and parameters.
`{command}` writes this page (with `isopos[lab,peers]`), and `make test-all` checks the figures against
the bounds in `benchmarks/peers_page.py`. Differences from the authors' code, which is seldom a package, are in [the
schemes](schemes.md#differences-from-the-authors-code); rotary tables at far positions are in
[exactness](exactness.md#compared-with-other-libraries).

**difference**: largest |ours - theirs| divided by max(1, largest |theirs|), of {heads} heads of {head_dim} features and
{length} tokens. In float64 both compute the same function if it is below 1e-12; every larger difference has a reason.
"By its formulas": the code is no package, and `benchmarks/peers_page.py` implements its formulas. Versions:
{versions}.
"""
FORMULAS = """\
## By formula

All schemes, including those without a package: scores of attention compared with LRPE's canonical form of the paper's
formula. `tests/canonical.py` builds its dense matrices from the scheme's parameters, one relative position at a time,
without the scheme's operations. Float64, default options, learned tables filled at random.
"""


@dataclass(frozen=True)
class PeerCheck:
    """A comparison of one result; `differs` is the reason if the two functions are not the same."""

    scheme: str
    package: str  # on PyPI; empty for formulas that are implemented here
    where: str  # the peer's function or class
    what: str
    run: Callable[[], tuple[Tensor, Tensor]]  # ours and theirs
    bound: float = 1e-12  # of the difference
    why: str = ""  # the reason for a larger bound
    differs: str = ""


def error(ours: Tensor, theirs: Tensor) -> float:
    """The relative difference, as defined on the page."""
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1)).item()


def _random(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, HEADS, LENGTH, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype)


def _transformers(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def angles(layout: str) -> Tensor:
    """Angles of each feature by numpy: float64 ``[t d]``. The peers' functions take them or their cosines and sines."""
    frequency = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = np.arange(LENGTH)[:, None] * frequency
    return torch.from_numpy(np.repeat(angle, 2, -1) if layout == "interleaved" else np.tile(angle, 2))


def rotated(name: str, q: Tensor, k: Tensor) -> Any:
    """Queries and keys rotated by a peer's function, from exact angles in its layout."""
    module, angle = ROTARY[name].load(), angles(ROTARY[name].layout)
    if name == "transformers Llama":
        return module.apply_rotary_pos_emb(q, k, angle[None].cos(), angle[None].sin())
    if name == "transformers RoFormer":
        table = torch.cat((angle[:, ::2].sin(), angle[:, ::2].cos()), -1)
        return module.RoFormerSelfAttention.apply_rotary_position_embeddings(table, q, k)
    if name == "x-transformers":
        return [module.apply_rotary_pos_emb(x, angle[None]) for x in (q, k)]
    return [module.apply_rotary_emb(angle, x) for x in (q, k)]


def _rope(name: str) -> tuple[Tensor, Tensor]:
    q, k = _random(2)
    scheme = isopos.rope(HEAD_DIM, HEADS, layout=ROTARY[name].layout)
    rho = scheme.encoding(isopos.sequence(LENGTH), torch.float64)
    theirs_q, theirs_k = rotated(name, q, k)
    return rho(q) @ rho(k).mT, theirs_q @ theirs_k.mT


def _rope_module(name: str) -> tuple[Tensor, Tensor]:
    q, k = _random(2, torch.float32)
    rho = isopos.rope(HEAD_DIM, HEADS, layout=ROTARY[name].layout).encoding(isopos.sequence(LENGTH))
    theirs_q, theirs_k = ROTARY[name].workload(q)(q, k)
    return rho(q) @ rho(k).mT, theirs_q @ theirs_k.mT


def _against_transformers(scheme: Any, module: Any, kind: str, parameters: dict[str, Any], ids: Tensor, x: Tensor) -> Any:
    """Scores at positions x, and scores of a rotary module at position ids."""
    q, k = _random(2, torch.float32)
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "max_position_embeddings": 4096}
    config = importlib.import_module("transformers").LlamaConfig(**sizes, rope_parameters={"rope_theta": 1e4} | parameters)
    cos, sin = getattr(module, kind)(config)(q, ids)
    theirs_q, theirs_k = module.apply_rotary_pos_emb(q, k, cos, sin)
    rho = scheme.encoding(x)
    return rho(q) @ rho(k).mT, theirs_q @ theirs_k.mT


def _mrope(model: str, kind: str, sections: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """Scores at the model's position ids of text, an image, text and another image."""
    module = _transformers(model)
    types = torch.tensor([[0] * 5 + [1] * 30 + [0] * 3 + [1] * 32])
    instance: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    kind_of_model = next(getattr(module, name) for name in dir(module) if name.endswith("VLModel"))
    instance.get_vision_position_ids = partial(kind_of_model.get_vision_position_ids, instance)
    ids, _ = kind_of_model.get_rope_index(instance, types, types, torch.tensor([[1, 10, 12], [2, 8, 8]]))
    scheme = isopos.mrope(HEAD_DIM, sections=sections, layout="half", **options)
    parameters = {"rope_type": "default", "mrope_section": sections}
    return _against_transformers(scheme, module, kind, parameters, ids, ids.movedim(0, -1))


def _p_rope() -> tuple[Tensor, Tensor]:
    ids, scheme = torch.arange(LENGTH), isopos.p_rope(HEAD_DIM, p=0.6, layout="half")
    parameters = {"rope_type": "proportional", "partial_rotary_factor": 0.6}
    module = _transformers("llama")
    return _against_transformers(scheme, module, "LlamaRotaryEmbedding", parameters, ids[None], ids[:, None])


def _xpos(package: str) -> tuple[Tensor, Tensor]:
    q, k = _random(2, torch.float32)
    at = isopos.xpos(HEAD_DIM).at(isopos.sequence(LENGTH))["isometry"]
    ours_q, ours_k = (side(z) for side, z in zip(at, (q, k), strict=True))
    if package == "x-transformers":
        module = importlib.import_module("x_transformers.x_transformers")
        angle, scale = module.RotaryEmbedding(HEAD_DIM, use_xpos=True)(torch.arange(LENGTH))
        theirs = [module.apply_rotary_pos_emb(z, angle, power) for z, power in ((q, scale), (k, 1 / scale))]
    else:
        module = importlib.import_module("rotary_embedding_torch")
        theirs = module.RotaryEmbedding(HEAD_DIM, use_xpos=True).rotate_queries_and_keys(q, k)
    theirs_q, theirs_k = theirs
    return (ours_q @ ours_k.mT).tril(), (theirs_q @ theirs_k.mT).tril()


def _attended(scheme: Any, bias: Tensor | float, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs of a scheme, and of softmax(scale <q, k> + bias), for the same queries, keys and values."""
    q, k, v = _random(3)
    at = scheme.at(isopos.sequence(LENGTH), dtype=torch.float64) | {"scale": scale}
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) & causal
    logits = (scale * q @ k.mT + bias).masked_fill(hidden, -torch.inf)
    return softmax_attention(q, k, v, causal=causal, **at), logits.softmax(-1) @ v


@torch.no_grad()
def _t5(package: str) -> tuple[Tensor, Tensor]:
    scheme = isopos.t5(HEAD_DIM, HEADS)
    fill_zeros(scheme)
    table = scheme.bias.parameter.detach()  # pyright: ignore[reportOptionalMemberAccess]
    if package == "transformers":
        module = importlib.import_module("transformers.models.t5.modeling_t5")
        config = module.T5Config(d_model=HEADS * HEAD_DIM, d_kv=HEAD_DIM, num_heads=HEADS)
        peer = module.T5Attention(config, has_relative_attention_bias=True).double()
        peer.relative_attention_bias.weight.copy_(table.mT)
        return _attended(scheme, peer.compute_bias(LENGTH, LENGTH), 1.0)
    module = importlib.import_module("x_transformers.x_transformers")
    peer = module.RelativePositionBias(1.0, causal=False, heads=HEADS).double()
    peer.relative_attention_bias.weight.copy_(table.mT)
    return _attended(scheme, peer(LENGTH, LENGTH)[None], 1.0)


@torch.no_grad()
def _deberta(version: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Outputs of the released attention, with our vectors as its projected relative embeddings."""
    limit = {"max_distance": 512 if version == "deberta_v2" else None}
    scheme, (q, k, _) = isopos.deberta(HEAD_DIM, HEADS, buckets=32, **limit, **options), _random(3)
    module, bias = _transformers(version), scheme.bias
    tables = [one.parameter.detach() for one in (bias.keys, bias.queries)]  # pyright: ignore
    keys, queries = (table.transpose(0, 1).flatten(1).double()[None] for table in tables)  # [1 2k h d]
    kind = module.DisentangledSelfAttention
    layer: Any = SimpleNamespace(num_attention_heads=HEADS, pos_att_type=["c2p", "p2c"], share_att_key=False)
    layer.position_buckets, layer.max_relative_positions, layer.pos_ebd_size = 32, 512, 32
    layer.pos_key_proj, layer.pos_query_proj = lambda _: keys, lambda _: queries
    layer.transpose_for_scores = partial(kind.transpose_for_scores, layer)
    if version == "deberta_v2":
        rows = torch.zeros(64, 1)
        added = kind.disentangled_attention_bias(layer, q[0], k[0], None, rows, 3)[None]
    else:
        layer.max_relative_positions, scale = 32, (3 * HEAD_DIM) ** -0.5
        layer.pos_proj, layer.pos_q_proj = layer.pos_key_proj, layer.pos_query_proj
        relative = module.build_relative_position(q, k)
        added = kind.disentangled_att_bias(layer, q * scale, k, relative, torch.zeros(64, 1), 3)
    return _attended(scheme, added, (3 * HEAD_DIM) ** -0.5)


@torch.no_grad()
def _transformer_xl() -> tuple[Tensor, Tensor]:
    """Outputs of an implementation with sines first and offsets to the left; our projection is rearranged accordingly."""
    scheme, (q, k, v) = isopos.transformer_xl(HEAD_DIM, HEADS), _random(3)
    fill_zeros(scheme)
    coupling: Any = scheme.encoding
    model_dim, module = HEADS * HEAD_DIM, importlib.import_module("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    cosines, sines = coupling.parameter.detach().double().unflatten(1, (-1, 2)).unbind(2)  # of p_(y - x), [h m/2 d]
    linear = torch.stack((-sines, cosines), 2).flatten(1, 2).transpose(1, 2).flatten(0, 1)  # [h d, m]
    config = SimpleNamespace(max_source_positions=LENGTH, hidden_size=model_dim)
    table = module.Wav2Vec2BertRelPositionalEmbedding(config)(torch.zeros(1, LENGTH, model_dim)).double()
    layer = SimpleNamespace(
        linear_pos=lambda p: p @ linear.mT, head_size=HEAD_DIM, scaling=HEAD_DIM**-0.5,
        pos_bias_u=coupling.content.parameter.detach()[:, 0].double(),
        pos_bias_v=coupling.location.parameter.detach()[:, 0].double(),
    )  # fmt: skip
    shifted, added = module._apply_relative_position_encoding(layer, q, k, table)
    at = scheme.at(isopos.sequence(LENGTH), dtype=torch.float64)
    return softmax_attention(q, k, v, **at), (shifted @ k.mT * layer.scaling + added).softmax(-1) @ v


@torch.no_grad()
def _shaw() -> tuple[Tensor, Tensor]:
    """Outputs of an implementation that adds vectors to keys only."""
    scheme, (q, k, _) = isopos.shaw(HEAD_DIM, HEADS, reach=9), _random(3)
    module, bias = importlib.import_module("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert"), scheme.bias
    assert isinstance(bias, isopos.biases.Shaw)
    bias.values.parameter.zero_()
    rows = bias.keys.parameter.detach()[0].double()
    reach = {"left_max_position_embeddings": 9, "right_max_position_embeddings": 9}
    layer = SimpleNamespace(distance_embedding=lambda row: rows[row], scaling=HEAD_DIM**-0.5, **reach)
    return _attended(scheme, module._apply_relative_key_position_encoding(layer, q, k)[1], HEAD_DIM**-0.5)


@torch.no_grad()
def _pope() -> tuple[Tensor, Tensor]:
    """Scores of an implementation in float32, with phases between -2 pi and 0."""
    scheme, (q, k) = isopos.pope(HEAD_DIM, HEADS, attention="softmax"), _random(2, torch.float32)
    module, coupling = importlib.import_module("x_transformers.x_transformers"), scheme.encoding
    peer, phase = module.PolarEmbedding(HEAD_DIM, HEADS), -6 * torch.rand(HEADS, HEAD_DIM)
    peer.learned_bias.copy_(phase[:, None])
    coupling.parameter.copy_(phase)
    angles, bias = peer(torch.arange(LENGTH))
    theirs = [module.apply_polar_pos_emb(x, a) for x, a in ((q, angles), (k, angles + bias))]
    return _scores(scheme, q, k), theirs[0] @ theirs[1].mT


def _alibi(package: str) -> tuple[Tensor, Tensor]:
    scheme = isopos.alibi(HEAD_DIM, HEADS, attention="softmax")
    if package == "transformers":
        bias = _transformers("bloom").build_alibi_tensor(torch.ones(1, LENGTH, dtype=torch.int64), HEADS, torch.float64)
        return _attended(scheme, bias[None], HEAD_DIM**-0.5, causal=True)
    module = importlib.import_module("x_transformers.x_transformers")
    return _attended(scheme, module.AlibiPositionalBias(HEADS)(LENGTH, LENGTH)[None].double(), HEAD_DIM**-0.5)


def _sinusoidal(package: str) -> tuple[Tensor, Tensor]:
    width = HEADS * HEAD_DIM
    ours = isopos.sinusoidal(HEAD_DIM, HEADS).embedding(isopos.sequence(LENGTH), torch.float64)  # pyright: ignore
    if package == "transformers":
        theirs = _transformers("marian").MarianSinusoidalPositionalEmbedding(LENGTH, width).create_weight()
    else:
        module = importlib.import_module("x_transformers.x_transformers")
        theirs = module.ScaledSinusoidalEmbedding(width)(torch.zeros(1, LENGTH, width)).detach() * width**0.5
    return torch.cat((ours[:, ::2], ours[:, 1::2]), -1), theirs


def _performer(causal: bool) -> tuple[Tensor, Tensor]:
    module, (q, k, v) = importlib.import_module("performer_pytorch.performer_pytorch"), _random(3)
    attend = module.causal_linear_attention_noncuda if causal else module.linear_attention
    phi, _ = sides(ELU)
    return linear_attention(q, k, v, causal=causal, feature_map=ELU), attend(phi(q), phi(k), v)


def _positions() -> Tensor:
    return torch.arange(LENGTH, dtype=torch.float64)


def _rotated_pairs(x: Tensor, frequency: Tensor) -> Tensor:
    """Features ``[*b t d]`` with pairs (2i, 2i + 1) rotated by frequency i per step, as complex numbers."""
    phases = torch.polar(torch.ones(1, dtype=torch.float64), _positions()[:, None] * frequency)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * phases).flatten(-2)


def _scores(scheme: Any, q: Tensor, k: Tensor) -> Tensor:
    rho_q, rho_k = pair(scheme.at(isopos.sequence(LENGTH), dtype=torch.float64)["isometry"])
    return rho_q(q) @ rho_k(k).mT


def _rope_frequency() -> Tensor:
    return 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)


@torch.no_grad()
def _lrpe(kind: str) -> tuple[Tensor, Tensor]:
    """Scores of the listing in LRPE's appendix D.2, with our Householder vector and permutation."""
    options = {"learned": False} if kind == "orthogonal" else {}  # learned angles are float32
    (q, k), scheme = _random(2), REGISTRY[f"lrpe-{kind}"](HEAD_DIM, HEADS, **options)
    encoding: Any = scheme.encoding
    v = encoding.basis.parameter.double()[:, None]
    q_p, k_p = (x - 2 * (x @ v.mT) @ v / v.square().sum(-1, keepdim=True) for x in (q, k))
    if kind == "orthogonal":
        theirs = [_rotated_pairs(x, _rope_frequency()) for x in (q_p, k_p)]
    else:
        features = torch.arange(HEAD_DIM).expand(1, HEADS, 1, -1).double()
        pi = encoding.encoding(torch.ones(1, 1, dtype=torch.int64))(features).long()
        powers = [features.long()]
        for _ in range(LENGTH - 1):
            powers.append(powers[-1].gather(-1, pi))
        theirs = [x.gather(-1, torch.cat(powers, -2)) for x in (q_p, k_p)]
    return _scores(scheme, q, k), theirs[0] @ theirs[1].mT


def _permuteformer() -> tuple[Tensor, Tensor]:
    """Attention of its language model: weights with r^(i - j), without a denominator."""
    q, k, v = _random(3)
    scheme = isopos.permuteformer(HEAD_DIM, HEADS, decay="permuteformer-released", denominator="none")
    features = torch.arange(HEAD_DIM).expand(1, HEADS, LENGTH, -1)
    index = scheme.encoding(isopos.sequence(LENGTH))(features.double()).long()
    q_p, k_p = (x.gather(-1, index).relu() + 1e-3 for x in (q, k))
    r = torch.sigmoid(2 + 3 * torch.arange(HEADS, dtype=torch.float64) / HEADS)[:, None, None]
    distance = _positions()[:, None] - _positions()
    theirs = (q_p @ k_p.mT * r**distance).tril() @ v
    return linear_attention(q, k, v, causal=True, **scheme.at(isopos.sequence(LENGTH), dtype=torch.float64)), theirs


def _retnet() -> tuple[Tensor, Tensor]:
    """The parallel form before the gate, after the norm of heads, which cancels factors of rows."""
    q, k, v = _random(3)
    scheme = isopos.retnet(HEAD_DIM, HEADS, original=True, frequencies="torchscale")
    ours = linear_attention(q, k, v, causal=True, **scheme.at(isopos.sequence(LENGTH), dtype=torch.float64))
    frequency = 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, dtype=torch.float64)
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))[:, None, None]
    decays = (gamma ** (_positions()[:, None] - _positions()).clamp_min(0)).tril()
    weights = _rotated_pairs(q, frequency) @ _rotated_pairs(k * HEAD_DIM**-0.5, frequency).mT
    weights = weights * decays / decays.sum(-1, keepdim=True).sqrt()
    theirs = weights / weights.sum(-1, keepdim=True).abs().clamp_min(1) @ v
    ours, theirs = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (ours, theirs))
    return ours, theirs


def _cosformer() -> tuple[Tensor, Tensor]:
    q, k, v = _random(3)
    scheme = isopos.cosformer(HEAD_DIM, HEADS, length=LENGTH)
    angle = torch.pi / 2 / LENGTH * (_positions()[:, None] - _positions())
    weights = (q.relu() @ k.relu().mT * angle.cos()).tril()
    theirs = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6) @ v
    return linear_attention(q, k, v, causal=True, **scheme.at(isopos.sequence(LENGTH), dtype=torch.float64)), theirs


def _xpos_of_torchscale() -> tuple[Tensor, Tensor]:
    """Scores with scales relative to the middle of the call."""
    q, k = _random(2)
    share = (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) + 0.4 * HEAD_DIM) / (1.4 * HEAD_DIM)
    scale = share.repeat_interleave(2) ** ((_positions() - (LENGTH + 1) // 2) / 512)[:, None]
    theirs = (_rotated_pairs(q, _rope_frequency()) * scale) @ (_rotated_pairs(k, _rope_frequency()) / scale).mT
    return _scores(isopos.xpos(HEAD_DIM), q, k).tril(), theirs.tril()


@torch.no_grad()
def _rope_vit(mixed: bool) -> tuple[Tensor, Tensor]:
    """Scores at the pixels of 7 rows of 10; frequencies of columns and rows are learned if `mixed`."""
    (q, k), scheme = _random(2), REGISTRY["rope-mixed" if mixed else "rope-axial"](HEAD_DIM, HEADS)
    pixel, size = torch.arange(LENGTH), 100.0 ** -(torch.arange(0, HEAD_DIM, 4).double() / HEAD_DIM)
    frequency = torch.stack((torch.cat((size, 0 * size)), torch.cat((0 * size, size))))[None]  # of rows, of columns
    if mixed:
        frequency = torch.randn(HEADS, 2, HEAD_DIM // 2, generator=torch.Generator().manual_seed(1)).double()
        scheme.encoding.parameter.copy_(frequency)  # pyright: ignore
    rows, columns = pixel.div(10, rounding_mode="floor").double(), (pixel % 10).double()
    angle = columns[:, None] * frequency[:, 1, None] + rows[:, None] * frequency[:, 0, None]
    phases = torch.polar(torch.ones(1, dtype=torch.float64), angle)
    theirs = [torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * phases for x in (q, k)]
    rho = scheme.encoding(isopos.grid(7, 10), torch.float64)
    return rho(q) @ rho(k).mT, (theirs[0] @ theirs[1].mH).real


@torch.no_grad()
def _ape() -> tuple[Tensor, Tensor]:
    """Scores with powers of one orthogonal matrix per head, by repeated products."""
    (q, k), scheme = _random(2), isopos.ape_sequence(HEAD_DIM, HEADS)
    generator = torch.randn(HEADS, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    encoding: Any = scheme.encoding
    encoding.parameter.copy_(0.2 * generator)
    step = torch.matrix_exp((0.2 * generator).double() - (0.2 * generator).double().mT)
    powers = [torch.eye(HEAD_DIM, dtype=torch.float64).expand(HEADS, -1, -1)]
    for _ in range(LENGTH - 1):
        powers.append(powers[-1] @ step)
    theirs = [torch.einsum("thij,bhtj->bhti", torch.stack(powers), x) for x in (q, k)]
    return _scores(scheme, q, k), theirs[0] @ theirs[1].mT


FLOAT32 = "its angles are float32"
TYPED = "by its formulas"
COMPARISONS = (
    *(
        PeerCheck("rope", ROTARY[name].package, name, "scores, from the same exact angles", partial(_rope, name))
        for name in ROTARY
    ),
    *(
        PeerCheck("rope", ROTARY[name].package, name, "scores, its own module", partial(_rope_module, name), 3e-5, why)
        for name in ROTARY
        for why in ["its table is rounded to float32, as ours" if "RoFormer" in name else FLOAT32]
    ),
    *(
        PeerCheck(
            "mrope", "transformers", kind, f"scores at its own position ids with `layout=half,{options}`",
            partial(_mrope, model, kind, sections, interleaved="interleaved" in options), 1e-6, FLOAT32,
        )
        for model, kind, sections, options in (
            ("qwen2_vl", "Qwen2VLRotaryEmbedding", [2, 3, 3], "sections=2+3+3"),
            ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", [4, 2, 2], "sections=4+2+2,interleaved=true"),
        )
    ),
    PeerCheck(
        "p-rope", "transformers", "proportional of ROPE_INIT_FUNCTIONS", "scores with `layout=half,p=0.6`", _p_rope, 1e-6,
        FLOAT32,
    ),
    *(
        PeerCheck("xpos", name, "RotaryEmbedding(use_xpos=True)", "causal scores", partial(_xpos, name), 3e-5, FLOAT32)
        for name in ("x-transformers", "rotary-embedding-torch")
    ),
    PeerCheck("t5", "transformers", "T5Attention.compute_bias", "outputs with scale=1", partial(_t5, "transformers")),
    PeerCheck("t5", "x-transformers", "RelativePositionBias", "outputs with scale=1", partial(_t5, "x-transformers")),
    *(
        PeerCheck(
            "deberta", "transformers", f"{version}.DisentangledSelfAttention", "outputs", partial(_deberta, version),
            differs="the released p2c reads row delta(i, j), where Eq. 4 has delta(j, i)",
        )
        for version in ("deberta_v2", "deberta")
    ),
    *(
        PeerCheck(
            "deberta", "transformers", f"{version}.DisentangledSelfAttention", "outputs with `released=true`",
            partial(_deberta, version, released=True), 1e-6, "its scale is rounded to float32",
        )
        for version in ("deberta_v2", "deberta")
    ),
    PeerCheck(
        "transformer-xl", "transformers", "Wav2Vec2BertSelfAttention, relative", "outputs", _transformer_xl, 1e-6,
        why="its sinusoids are float32",
    ),
    PeerCheck("shaw", "transformers", "Wav2Vec2BertSelfAttention, relative_key", "outputs, vectors of keys only", _shaw),
    PeerCheck(
        "pope", "x-transformers", "PolarEmbedding, apply_polar_pos_emb", "scores with `attention=softmax`", _pope, 1e-5,
        why="its angles are float32",
    ),
    PeerCheck("alibi", "transformers", "bloom.build_alibi_tensor", "causal outputs", partial(_alibi, "transformers")),
    PeerCheck("alibi", "x-transformers", "AlibiPositionalBias", "outputs", partial(_alibi, "x-transformers")),
    PeerCheck(
        "sinusoidal", "transformers", "MarianSinusoidalPositionalEmbedding", "the table, sines before cosines",
        partial(_sinusoidal, "transformers"), 1e-7, "its table is float32",
    ),
    PeerCheck(
        "sinusoidal", "x-transformers", "ScaledSinusoidalEmbedding", "the table, sines before cosines, unscaled",
        partial(_sinusoidal, "x-transformers"), 3e-5, FLOAT32,
    ),
    PeerCheck(
        "none", "performer-pytorch", "causal_linear_attention_noncuda", "outputs of elu+1, causal",
        partial(_performer, True), 1e-5, "it adds 1e-6 to each feature's sum of keys in the denominator",
    ),
    PeerCheck("none", "performer-pytorch", "linear_attention", "outputs of elu+1, all keys", partial(_performer, False)),
    PeerCheck(
        "lrpe-orthogonal", "", f"LRPE's listing, {TYPED}", "scores with `learned=false`", partial(_lrpe, "orthogonal")
    ),
    PeerCheck("lrpe-permutation", "", f"LRPE's listing, {TYPED}", "scores", partial(_lrpe, "permutation")),
    PeerCheck(
        "permuteformer", "", f"PermuteFormer, {TYPED}",
        "causal outputs with `decay=permuteformer-released,denominator=none`", _permuteformer,
    ),
    PeerCheck(
        "retnet", "", f"torchscale, {TYPED}",
        "causal outputs with `original=true,frequencies=torchscale`, after the norm", _retnet,
    ),
    PeerCheck("xpos", "", f"torchscale, {TYPED}", "causal scores", _xpos_of_torchscale),
    PeerCheck(
        "cosformer", "", f"cosFormer, {TYPED}", "causal outputs with `length` that of the call", _cosformer,
        differs="features are max(x, 0) + 0.001 here, so that a denominator is never 0",
    ),
    PeerCheck("ape-sequence", "", f"APE, {TYPED}", "scores", _ape),
    PeerCheck("rope-axial", "", f"rope-vit, {TYPED}", "scores", partial(_rope_vit, False)),
    PeerCheck("rope-mixed", "", f"rope-vit, {TYPED}", "scores of learned frequencies", partial(_rope_vit, True)),
)  # fmt: skip


def page() -> str:
    """The whole page."""
    packages = dict.fromkeys(comparison.package for comparison in COMPARISONS)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in filter(None, ("torch", *packages)))
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "length": LENGTH}
    rows = [row(one, f"{error(*one.run()):.0e}") for one in ordered()]
    lines = (
        INTRODUCTION.format(command=COMMAND, versions=versions, **sizes),
        markdown(("scheme", "peer", "what", "difference", "reason"), rows, "lllrl"),
        "",
        FORMULAS,
        markdown(("scheme", "formula", "attention", "difference"), _formulas(), "lllr"),
    )
    return "\n".join(lines) + "\n"


def ordered() -> list[PeerCheck]:
    """All comparisons in the order of the catalogue."""
    return sorted(COMPARISONS, key=lambda one: [*CATALOG].index(one.scheme))


def row(one: PeerCheck, difference: str) -> tuple[str, ...]:
    """A comparison's cells."""
    where = one.where if one.package in one.where else f"{one.package}: {one.where}"
    return f"`{one.scheme}`", where, one.what, difference, one.differs or one.why or "-"


def _formulas() -> Iterator[tuple[str, str, str, str]]:
    for name, entry in CATALOG.items():
        scheme = REGISTRY[name](HEAD_DIM, HEADS)
        fill_zeros(scheme)
        if scheme.embedding is not None or "absolute" in name:
            figure = "- (absolute positions have no canonical form)"
        elif scheme.phases:
            figure = "- (content-dependent phases)"
        elif scheme.encoding.is_random:
            figure = "- (equal in expectation only)"
        elif weaker := scheme.encoding.weaker_law or (scheme.bias and scheme.bias.weaker_law):
            figure = f"- ({weaker} only)"
        else:
            figure = f"{by_formula(scheme):.0e}"
        yield f"`{name}`", entry.citation, scheme.attention, figure


@torch.no_grad()
def by_formula(scheme: Any, tokens: int = 9) -> float:
    """The difference between attention weights and the canonical form; linear weights have no denominator."""
    x, d = scheme.group.arrange(tokens), scheme.encoding.features
    q, k = torch.randn(2, 1, scheme.heads, tokens, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = torch.eye(tokens, dtype=torch.float64).expand(1, scheme.heads, -1, -1)
    at = scheme.at(x, dtype=torch.float64)
    if scheme.attention == "linear":
        weights = linear_attention(q, k, v, **at | {"denominator": None, "transport": None})
        phi_q, phi_k = sides(scheme.feature_map)
        return error(weights, score(canonical(scheme), phi_q(q), phi_k(k), x, x))
    terms = tuple(term for term in at.get("terms", ()) if term.side != "value")  # these do not change scores
    return error(softmax_attention(q, k, v, **at | {"terms": terms}), score(canonical(scheme), q, k, x, x).softmax(-1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(page(), end="")
