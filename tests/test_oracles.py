"""Test agreement with independent implementations from PyPI (extra `peers`), and compare accuracy.

Peers are imported inside the tests: a whole model of theirs takes seconds.
"""

import importlib.util

import pytest
import torch
from cases import close

import isopos
from benchmarks.peers import ROTARY
from benchmarks.peers_page import COMPARISONS, rotated
from benchmarks.peers_page import error as difference_of
from isopos.biases import T5, DeBERTa
from isopos.decays import alibi_rates
from isopos.feature_maps import Favor
from isopos.lab.bench import accuracy

pytestmark = pytest.mark.oracles
HEADS, HEAD_DIM, MODEL_DIM, LENGTH = 2, 16, 24, 70
OFFSETS = torch.arange(-2000, 2001)  # key position minus query position
DRAWS = 4000
ALL_PEERS = pytest.mark.parametrize("name", ROTARY)
HEAD_COUNTS = pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 20])


@pytest.fixture
def peer(name):
    module(ROTARY[name].module)
    return ROTARY[name]


def module(name):
    """Import a peer's module. A missing package skips the test; a missing module of an installed package is an error."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install isopos[peers]")
    return importlib.import_module(name)


def transformers(model):
    return module(f"transformers.models.{model}.modeling_{model}")


def rope(layout, dtype=torch.float64, start=0):
    """Our rope at LENGTH positions."""
    return isopos.rope(HEAD_DIM, HEADS, layout=layout).encoding(isopos.sequence(LENGTH) + start, dtype)


def queries_and_keys(dtype=torch.float64):
    return torch.randn(2, 3, HEADS, LENGTH, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize("one", COMPARISONS, ids=lambda one: f"{one.scheme}-{one.where}")
def test_what_the_page_compares(one):
    """The difference is within the bound, or larger than rounding if the functions are documented to differ."""
    if one.package:
        module(one.package.replace("-", "_"))
    difference = difference_of(*one.run())
    assert difference > 1e-3 if one.differs else difference < one.bound


@ALL_PEERS
def test_rotations_from_the_same_angles(peer, name):
    q, k = queries_and_keys()
    rho = rope(peer.layout)
    theirs_q, theirs_k = rotated(name, q, k)
    close(rho(q) @ rho(k).mT, theirs_q @ theirs_k.mT)
    if peer.layout == "interleaved":
        close(rho(q), theirs_q)


@ALL_PEERS
@pytest.mark.parametrize("start", [0, 37])
def test_rotary_modules(peer, start):
    """The peers' tables use float32 angles, which suffice for short lengths."""
    q, k = queries_and_keys(torch.float32)
    rho_q, rho_k = (rope(peer.layout, torch.float32, at) for at in (start, 0))
    theirs_q, theirs_k = peer.workload(q, start)(q, q)[0], peer.workload(k)(k, k)[0]
    close(rho_q(q) @ rho_k(k).mT, theirs_q @ theirs_k.mT)


def rope_config(rule, head_dim, length, **parameters):
    """A Llama configuration with `rope_parameters`, for `length` positions in training."""
    sizes = {"hidden_size": HEADS * head_dim, "num_attention_heads": HEADS, "max_position_embeddings": length}
    own = {"rope_type": rule, "original_max_position_embeddings": length} | parameters
    if rule in ("linear", "dynamic"):
        del own["original_max_position_embeddings"]
    return module("transformers").LlamaConfig(**sizes, rope_parameters=own)


RESCALE = [1 + 0.3 * n for n in range(32)]
LENGTHS = [  # of 64 features: the rule, its parameters there, and its options here
    ("linear", {}, {}),
    ("dynamic", {}, {}),
    ("dynamic", {"factor": 2.5}, {"alpha": 2.5}),
    ("yarn", {}, {}),
    ("yarn", {"beta_fast": 8, "beta_slow": 2}, {"fast": 8.0, "slow": 2.0}),
    ("yarn", {"truncate": False, "attention_factor": 1.3}, {"truncate": False, "sharpness": 1.3}),
    ("longrope", {"long_factor": RESCALE, "short_factor": RESCALE}, {"rescale": RESCALE}),
    ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}),
    ("llama3", {"low_freq_factor": 2.0, "high_freq_factor": 9.0}, {"slow": 2.0, "fast": 9.0}),
]


@pytest.mark.parametrize(("rule", "parameters", "options"), LENGTHS)
@pytest.mark.parametrize(
    ("base", "length", "factor"), [(1e4, 4096, 4.0), (1e4, 100, 16.0), (5e5, 8192, 8.0), (1e2, 5000, 2.0)]
)
def test_extended_frequencies(rule, parameters, options, base, length, factor):
    """With dynamic scaling, the factor of transformers is our alpha, and its sequence length determines our factor."""
    functions = module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = rope_config(
        rule, 64, length, **{"rope_theta": base, "factor": 1.0 if rule == "dynamic" else factor, **parameters}
    )
    expected, attention_factor = functions[rule](config, seq_len=int(factor * length))
    ours = isopos.lengths.extension(rule, factor, length, **options)
    found = ours(isopos.encodings.rope_frequencies(32, base)[None, None])[0, 0]
    assert (found - expected).abs().max() < 1e-6
    assert ((found / expected) - 1).abs().max() < 1e-4  # theirs are float32 powers
    assert ours.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(("rule", "parameters", "options"), [LENGTHS[0], *LENGTHS[3:8]])
def test_logits_of_an_extended_llama(rule, parameters, options):
    config = rope_config(rule, 64, 50, rope_theta=1e4, factor=4.0, **parameters)
    q, k = torch.randn(2, 1, HEADS, 200, 64)
    llama, x = transformers("llama"), torch.arange(200)
    theirs_q, theirs_k = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, x[None]))
    ours = isopos.rope(64, layout="half", attention="softmax").extend(rule, factor=4.0, trained=50, **options)
    at = ours.at(x[:, None])
    close(at["scale"] * at["isometry"](q) @ at["isometry"](k).mT, theirs_q @ theirs_k.mT / 8)


@pytest.mark.parametrize("rule", ["yarn", "longrope"])
def test_logits_of_partial_rotary_are_sharper_in_rotated_features_alone(rule):
    """transformers multiplies only cosines and sines, in GPT-NeoX, Phi-3 and others with a partial_rotary_factor."""
    factors = [1.0, 1.5, 2.0, 4.0]
    parameters = {"long_factor": factors, "short_factor": factors} if rule == "longrope" else {}
    config = rope_config(rule, 16, 50, rope_theta=1e4, factor=4.0, partial_rotary_factor=0.5, **parameters)
    q, k = torch.randn(2, 1, HEADS, 200, 16)
    x, neox = torch.arange(200), transformers("gpt_neox")
    cos, sin = transformers("llama").LlamaRotaryEmbedding(config)(q, x[None])
    assert cos.shape[-1] == 8
    theirs_q, theirs_k = neox.apply_rotary_pos_emb(q, k, cos, sin)
    ours = isopos.rope(16, rotary_dim=8, layout="half", attention="softmax")
    at = ours.extend(rule, factor=4.0, trained=50, **({"rescale": factors} if parameters else {})).at(x[:, None])
    close(at["scale"] * at["isometry"](q) @ at["isometry"](k).mT, theirs_q @ theirs_k.mT / 4)


@pytest.mark.parametrize("learned", [False, True])
def test_a_patched_gpt_neox_is_an_extended_one(learned):
    """Both the model's rotary code and our attention serve the patched model. Only ours supports the paper's form."""
    from isopos.integrations.transformers import patch, patched

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
    own = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 20, "partial_rotary_factor": 0.5}
    neox, config = transformers("gpt_neox").GPTNeoXForCausalLM, module("transformers").GPTNeoXConfig
    theirs = neox(config(**sizes, rope_parameters={"rope_type": "yarn", **own})).eval()
    model = neox(config(**sizes)).eval()
    model.load_state_dict(theirs.state_dict())
    scheme = isopos.rope(16, 2, rotary_dim=8, layout="half", attention="softmax", learned=learned)
    tokens = torch.arange(29)[None]
    with torch.no_grad():
        with patched(model, scheme.extend("yarn", factor=4.0, trained=20)):
            assert (model(tokens).logits - theirs(tokens).logits).abs().max() < 1e-6
        found = patch(model, scheme.extend("yarn", factor=4.0, trained=20, whole_logits=True))(tokens).logits
        assert (found - theirs(tokens).logits).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["transformers Llama"])
@pytest.mark.parametrize("bias", [False, True])
def test_converted_llama_projections(peer, name, bias):
    """A checkpoint of the half layout, its rows reordered once, gives the same scores with the interleaved one."""
    tokens = torch.randn(3, LENGTH, MODEL_DIM, dtype=torch.float64)
    shapes = [(HEADS * HEAD_DIM, MODEL_DIM), (HEADS * HEAD_DIM,)]
    projections = [[torch.randn(shape, dtype=torch.float64) for shape in shapes[: 1 + bias]] for _ in "qk"]

    def project(parameters):
        return torch.nn.functional.linear(tokens, *parameters).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    convert = isopos.nn.convert_layout
    converted = [[convert(parameter, HEADS, to="interleaved") for parameter in each] for each in projections]
    q, k = rotated(name, *map(project, projections))
    ours_q, ours_k = map(rope("interleaved"), map(project, converted))
    close(ours_q @ ours_k.mT, q @ k.mT)
    for before, after in zip(projections, converted, strict=True):
        assert all(convert(new, HEADS, to="half").equal(old) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (64, 256), (16, 1000)])
@pytest.mark.parametrize("library", ["transformers", "x-transformers"])
def test_t5_buckets(library, bidirectional, buckets, max_distance):
    """Buckets are equal. The peer's float32 logarithm moves none of these offsets to another bucket."""
    if library == "transformers":
        theirs, options = transformers("t5").T5Attention, {"bidirectional": bidirectional}
    else:
        theirs, options = module("x_transformers.x_transformers").RelativePositionBias, {"causal": not bidirectional}
    expected = theirs._relative_position_bucket(OFFSETS, num_buckets=buckets, max_distance=max_distance, **options)
    ours = T5(HEADS, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert ours.bucket(OFFSETS).equal(expected)


@pytest.mark.parametrize("buckets", [256, 32])
def test_deberta_v2_buckets(buckets):
    """Log buckets of DeBERTa v2, as rows of a table with twice as many rows."""
    tokens = torch.empty(1 + OFFSETS.max(), 0)
    relative = transformers("deberta_v2").build_relative_position(tokens, tokens, buckets, 512)[0]
    ours = DeBERTa(HEADS, HEAD_DIM, buckets=buckets, max_distance=512)
    assert ours.bucket(offsets(len(tokens))).equal((relative + buckets).clamp(0, 2 * buckets - 1))


def test_deberta_v1_buckets():
    """The paper's clipping, Eq. 3."""
    tokens, buckets = torch.empty(1 + OFFSETS.max(), 0), 512
    relative = transformers("deberta").build_relative_position(tokens, tokens)[0]
    ours = DeBERTa(HEADS, HEAD_DIM, buckets=buckets, max_distance=None)
    assert ours.bucket(offsets(len(tokens))).equal((relative + buckets).clamp(0, 2 * buckets - 1))


@pytest.mark.parametrize("released", [True, False])
def test_deberta_v2_attention(released):
    """Released weights: the rows that its projections make of relative embeddings give its outputs, by its own p2c."""
    config = module("transformers").DebertaV2Config(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        max_relative_positions=20,
    )
    theirs = transformers("deberta_v2").DisentangledSelfAttention(config).double().eval()
    x, embeddings = torch.randn(3, LENGTH, HEADS * HEAD_DIM).double(), torch.randn(16, HEADS * HEAD_DIM).double()
    expected, _ = theirs(x, torch.ones(1, 1, LENGTH, LENGTH), rel_embeddings=embeddings)
    scheme = isopos.deberta(HEAD_DIM, HEADS, buckets=8, max_distance=20, released=released).double()

    def heads(layer, of):
        return layer(of).unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3)

    with torch.no_grad():
        scheme.bias.keys.weight.copy_(heads(theirs.pos_key_proj, embeddings))
        scheme.bias.queries.weight.copy_(heads(theirs.pos_query_proj, embeddings))
    q, k, v = (heads(layer, x) for layer in (theirs.query_proj, theirs.key_proj, theirs.value_proj))
    found = isopos.softmax_attention(q, k, v, **scheme.at(isopos.sequence(LENGTH), dtype=torch.float64))
    found = found.transpose(1, 2).flatten(2)
    assert torch.allclose(found, expected, atol=1e-6) == released  # their scale is rounded to float32


def offsets(length):
    """Key position minus query position, int64 ``[t t]``."""
    place = torch.arange(length)
    return place - place[:, None]


@HEAD_COUNTS
def test_alibi_of_transformers(heads):
    """Bloom adds slope * key position, the same as slope * (key - query position) after a softmax."""
    bias = transformers("bloom").build_alibi_tensor(torch.ones(1, LENGTH, dtype=torch.int64), heads, torch.float32)
    close(-isopos.alibi(HEAD_DIM, heads).decay(isopos.sequence(LENGTH)), bias[:, 0].double(), dtype=torch.float32)


@HEAD_COUNTS
def test_alibi_of_x_transformers(heads):
    bias = module("x_transformers.x_transformers").AlibiPositionalBias(heads)(LENGTH, LENGTH)
    close(-alibi_rates(heads)[:, None, None] * offsets(LENGTH).abs(), bias.double(), dtype=torch.float32)


def test_favor_in_expectation():
    q, k = favor_inputs()
    assert_estimates_softmax(q, k, [(phi(q) @ phi(k).mT)[0, 0] for phi in (Favor(8, 16, seed=n) for n in range(DRAWS))])


def test_favor_of_performer_pytorch_in_expectation():
    """The peer's features, minus its epsilon of 1e-4 and with its subtracted maxima, which depend on the draw, restored.

    A QR decomposition fixes the signs of its directions, so its own draws are biased; random signs make them uniform.
    """
    performer = module("performer_pytorch.performer_pytorch")
    q, k = favor_inputs()

    def estimate():
        w = performer.gaussian_orthogonal_random_matrix(16, 8).double() * torch.randint(2, (16, 1)).mul(2).sub(1)
        phi_q = performer.softmax_kernel(q, projection_matrix=w, is_query=True, eps=0)
        phi_k = performer.softmax_kernel(k, projection_matrix=w, is_query=False, eps=0)
        subtracted = (q @ w.T).amax(-1, keepdim=True) + (k @ w.T).amax()
        return (phi_q @ phi_k.mT * (subtracted * 8**-0.25).exp())[0, 0]

    assert_estimates_softmax(q, k, [estimate() for _ in range(DRAWS)])


def favor_inputs():
    return 0.5 * torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)


def assert_estimates_softmax(q, k, draws):
    """Assert that normalised rows of the mean over draws equal softmax within their standard errors (ratio of means)."""
    draws = torch.stack(draws)
    total = draws.mean(0).sum(-1, keepdim=True)
    rows = draws.mean(0) / total
    error = (draws - rows * draws.sum(-1, keepdim=True)).std(0) / total / len(draws) ** 0.5
    assert error.max() < 0.005
    assert ((rows - (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)[0, 0]).abs() < 5 * error).all()


@ALL_PEERS
def test_tables_are_closer_to_float64_than_theirs(peer, name):
    """At L = 8192 and at 10^6. RoFormer also builds its table in float64, and rounds it to float32 for any dtype of x."""
    ours, theirs = accuracy.errors(), accuracy.errors(peer)
    for setting, error in theirs.items():
        if name == "transformers RoFormer" and setting.dtype == torch.float32:
            assert ours[setting] <= error * (1 + 1e-6)
        else:
            assert ours[setting] < error / 1000
    assert {setting.start for setting in theirs} == ({0} if "RoFormer" in name else {0, 10**6})


def test_the_table_of_accuracy_names_every_library(monkeypatch):
    monkeypatch.setattr(accuracy, "LIBRARIES", accuracy.LIBRARIES | ROTARY)
    table = accuracy.accuracy()
    shown = [*map(str, table.columns[0].cells), *accuracy.missing_peers()]
    assert shown.count("isopos") == 1
    assert {*shown} == {"isopos", *ROTARY}
    assert all(name in str(table.caption) for name in accuracy.missing_peers())
