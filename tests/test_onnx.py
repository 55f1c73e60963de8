"""Test that exported programs run without isopos, and ONNX files equal PyTorch at any length and in chunks."""

import functools
import importlib.metadata
import json
import re
import subprocess
import venv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import ATTENTION, PRESETS, each, scheme_case
from safetensors.torch import save_model
from structures import isometries, structures

import isopos
from isopos import schemes
from isopos.integrations import program
from isopos.lab.tasks.task import Recipe
from isopos.models import Decoder
from isopos.ops import linear
from isopos.ops.linear.exported import exported_sum
from isopos.ops.linear.features import ALL_READY, Sums

REFUSED = {  # by scheme, the operation without which it cannot be evaluated
    "liere": r"aten\.linalg_matrix_exp",
    "path": r"aten\.linalg_solve_triangular",
    "ape-tree": r"isopos\.tree_path",
    "ape-product": r"isopos\.tree_path",
}
SPECS = ("permuteformer", "fox", "rope:attention=softmax,rotary_dim=4", "t5:attention=softmax")
READ = """
import json, sys
import numpy as np, onnxruntime
for file, pieces in json.loads(sys.argv[1]):
    tokens, session = np.load("tokens.npy"), onnxruntime.InferenceSession(file + ".onnx")
    dtypes = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(int64)": "int64"}
    states, past, logits = {}, 0, []
    for x in session.get_inputs():
        if x.name.startswith("state"):
            sizes = (n if isinstance(n, int) else len(tokens) if n == "tokens.0" else 0 for n in x.shape)
            states[x.name] = np.zeros(tuple(sizes), dtypes[x.type])
    for size in pieces:
        known = {"tokens": tokens[:, past : past + size], "past": np.array(past), **states}
        out, *after = session.run(None, {x.name: known[x.name] for x in session.get_inputs()})
        states = {x.name.replace("next", "state"): value for x, value in zip(session.get_outputs()[1:], after)}
        past, logits = past + size, [*logits, out]
    np.save(f"{file}-{len(pieces)}.npy", np.concatenate(logits, 1))
for name in ("isopos", "torch", "onnx"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(name + " is installed here")
"""


@each("t", (1, 5, 63, 64, 65, 128, 200))
@each("decayed", (False, True))
def test_the_exported_sum_is_the_sum(t, decayed):
    q, k, v = torch.randn(3, 2, 3, t, 8, dtype=torch.float64)
    g = -10 * torch.rand(2, 3, t, dtype=torch.float64).cumsum(-1)
    decay = (g, g) if decayed else None
    for causal in (True, False) if decayed else (True,):
        expected = linear.linear(Sums(q, k, v, ALL_READY, decay, causal))
        torch.testing.assert_close(exported_sum(q, k, v, decay, causal), expected, rtol=1e-12, atol=1e-12)


def test_an_exported_causal_sum_has_no_trace_of_later_tokens():
    q, k, v = torch.rand(3, 1, 128, 8)
    k[:, 127] = 1e8
    expected = linear.linear(Sums(q, k, v, ALL_READY, None, True))[:, :127]
    torch.testing.assert_close(exported_sum(q, k, v, None, True)[:, :127], expected, rtol=1e-5, atol=1e-5)


def decoder(text):
    name, _, options = text.partition(":")
    choices = dict(option.split("=") for option in options.split(",") if option)
    return Decoder(50, 32, 1, schemes.build(name, 8, 4, choices)).eval()


class Attends(torch.nn.Module):
    """Attention modules of several schemes on the same tokens, each with separate positions."""

    def __init__(self, built, causal=True):
        super().__init__()
        self.schemes, self.causal = torch.nn.ModuleList(built), causal
        widths = [scheme.heads * scheme.encoding.features // scheme.width for scheme in built]
        self.layers = torch.nn.ModuleList(map(isopos.Attention, widths, built))

    def forward(self, x, *positions):
        outputs = []
        for scheme, layer, position in zip(self.schemes, self.layers, positions, strict=True):
            y = x if scheme.embedding is None else x + scheme.embedding(position, x.dtype)
            outputs.append(layer(y, scheme.at(position), causal=self.causal))
        return tuple(outputs)


class Rotates(torch.nn.Module):
    """Queries and keys of several schemes, with their isometries at separate positions."""

    def __init__(self, built):
        super().__init__()
        self.schemes = torch.nn.ModuleList(built)

    def forward(self, x, *positions):
        outputs = []
        for scheme, position in zip(self.schemes, positions, strict=True):
            heads = x.unflatten(-1, (scheme.heads, -1)).transpose(-2, -3)
            maps = scheme.encoding.query(position), scheme.encoding.key(position)
            both = zip(maps, (heads, heads + 1), strict=True)  # of equal ones ONNX would compute one
            outputs.append(torch.cat([rho.last(x.shape[-2])(y) for rho, y in both], -1))
        return tuple(outputs)


def examples_of(cases):
    """Two examples for a module of all cases, and names of its outputs. Decoders have batches of any size, too."""
    examples = []
    for t in (6, 9):
        positions = {f"positions.{n}": case.positions(t=t) for n, case in enumerate(cases)}
        examples.append({"x": torch.randn(2, t, 16), **positions})
    return examples, [f"y.{n}" for n in range(len(cases))]


def attending(cases, kind):
    """One module with the attention of all cases, two examples, and names of outputs."""
    return Attends([case.build(attention=kind) for case in cases]).eval(), *examples_of(cases)


@pytest.fixture
def unoptimized(monkeypatch):
    """Files without onnxscript's optimizer, which takes a third of the time; those of decoders are with it."""
    monkeypatch.setattr(torch.onnx, "export", functools.partial(torch.onnx.export, optimize=False))


EXPORTED = [case for case in PRESETS if case.name not in REFUSED]
WHOLE = [own.case for own in structures(EXPORTED, "isometry") if own.kind == "softmax"]  # the others differ by isometries
OTHERS = [case for case in isometries(EXPORTED, WHOLE) if case not in WHOLE]
CHUNKS = [("softmax", WHOLE[n : n + 8]) for n in range(0, len(WHOLE), 8)]
CHUNKS += [("isometries", OTHERS[n : n + 8]) for n in range(0, len(OTHERS), 8)]
IDS = ("permuteformer", "horn-clipped", "lrpe-orthogonal-householder", "ape-sequence-decay", "rope-complex")
LINEAR = ("linear", [scheme_case(id) for id in IDS])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cases"), [*CHUNKS, LINEAR], ids=lambda x: x if isinstance(x, str) else x[0].id)
@pytest.mark.usefixtures("unoptimized")
def test_every_structure_is_an_onnx_file_of_any_length(kind, cases, tmp_path):
    """`export` compares both examples with PyTorch. The test adds a third length, one token."""
    onnx, runtime = pytest.importorskip("isopos.integrations.onnx"), pytest.importorskip("onnxruntime")
    file, (examples, outputs) = tmp_path / "schemes.onnx", examples_of(cases)
    module = attending(cases, kind)[0] if kind in ATTENTION else Rotates([case.build() for case in cases]).eval()
    onnx.export(module, file, *examples, outputs)
    positions = {f"positions.{n}": case.positions(t=1) for n, case in enumerate(cases)}
    third = {"x": examples[0]["x"][:, :1]} | positions
    session = runtime.InferenceSession(str(file))
    used = {argument.name for argument in session.get_inputs()}
    results = session.run(None, {name: x.numpy() for name, x in third.items() if name in used})
    with torch.no_grad():
        for case, got, want in zip(cases, results, module(*third.values()), strict=True):
            torch.testing.assert_close(
                torch.from_numpy(got), want, rtol=1e-5, atol=1e-5, msg=lambda m, c=case: f"{c.id}: {m}"
            )
    types = Counter(node.op_type for node in pytest.importorskip("onnx").load(str(file)).graph.node)
    assert types["RotaryEmbedding"] >= 2 * any(case.name == "rope" for case in cases)  # whose heads are alike


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_cannot_hold_is_named_and_leaves_no_file(name, tmp_path):
    onnx = pytest.importorskip("isopos.integrations.onnx")
    pytest.importorskip("onnxruntime")
    module, examples, outputs = attending([case for case in PRESETS if case.name == name], "softmax")
    with pytest.raises(ValueError, match=f"module: expected operations that ONNX 23 has, got {REFUSED[name]}"):
        onnx.export(module, tmp_path / "a.onnx", *examples, outputs)
    assert list(tmp_path.iterdir()) == []


def empty_environment(folder, *packages):
    """Python of a new environment with only these packages and their dependencies, as links."""
    venv.create(folder, with_pip=False)
    (home,) = folder.glob("lib/python*/site-packages")
    linked, ahead = set(), list(packages)
    while ahead:
        name = ahead.pop()
        if name in linked:
            continue
        linked.add(name)
        found = importlib.metadata.distribution(name)
        needs = [need for need in found.requires or () if "extra ==" not in need]
        ahead += [re.match(r"[\w.-]+", need)[0] for need in needs]
        for top in {path.parts[0] for path in found.files or () if not path.parts[0].startswith(("..", "__pycache__"))}:
            if not (home / top).exists():
                (home / top).symlink_to(Path(found.locate_file(top)).resolve())
    return folder / "bin" / "python"


@pytest.mark.slow
def test_decoders_read_whole_texts_chunks_and_tokens_in_an_empty_environment(tmp_path, monkeypatch):
    onnx = pytest.importorskip("isopos.integrations.onnx")
    pytest.importorskip("onnxruntime")
    python = empty_environment(tmp_path / "empty", "onnxruntime", "numpy")
    monkeypatch.chdir(tmp_path)
    tokens, models = torch.randint(50, (2, 140)), {f"decoder{n}": decoder(text) for n, text in enumerate(SPECS)}
    np.save("tokens.npy", tokens.numpy())
    for file, model in models.items():
        onnx.export_decoder(model, f"{file}.onnx")
    reads = [(file, pieces) for file in models for pieces in ([140], [1, 60, 1, 1, 77])]
    command = [python, "-I", "-c", READ, json.dumps(reads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for file, pieces in reads:
        with torch.no_grad():
            expected = models[file](tokens)
        logits = torch.from_numpy(np.load(f"{file}-{len(pieces)}.npy"))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5, msg=lambda m, f=file: f"{f}: {m}")


@pytest.mark.slow
@pytest.mark.usefixtures("unoptimized")
def test_a_module_is_exported_in_both_directions_with_a_decay(tmp_path):
    onnx, runtime = pytest.importorskip("isopos.integrations.onnx"), pytest.importorskip("onnxruntime")
    module, file = (
        Attends([isopos.rope(8, 2, decay="retnet", layout="half")], causal=False).eval(),
        tmp_path / "attention.onnx",
    )
    short, long, longest = (
        {"x": torch.randn(b, t, 16), "positions": isopos.sequence(t)} for b, t in ((2, 5), (3, 90), (1, 301))
    )
    onnx.export(module, file, short, long, ["y"])
    session = runtime.InferenceSession(str(file))
    (y,) = session.run(None, {name: x.numpy() for name, x in longest.items()})
    torch.testing.assert_close(torch.from_numpy(y), module(*longest.values())[0].detach(), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"file: expected a new one, got .*attention\.onnx, which exists"):
        onnx.export(module, file, short, long, ["y"])


class Windowed(torch.nn.Module):
    """Attention with a window of 5 tokens."""

    def __init__(self, kind, causal):
        super().__init__()
        self.scheme, self.causal = isopos.rope(8, 2, attention=kind, decay="retnet"), causal

    def forward(self, q, k, v):
        return self.scheme(q, k, v, isopos.sequence(q.shape[-2]), causal=self.causal, window=5)


@each(("kind", "causal"), [(kind, causal) for kind in ATTENTION for causal in (True, False)])
@each("lengths", [(3, 4), (7, 9)])
def test_a_program_has_its_window_at_any_length(kind, causal, lengths):
    """Also where both examples are inside one window, or both beyond it."""
    module = Windowed(kind, causal).eval()
    called = program.export(module, *(dict(zip("qkv", torch.randn(3, 1, 2, t, 8), strict=True)) for t in lengths))
    for t in (1, 5, 6, 40):
        q, k, v = torch.randn(3, 1, 2, t, 8)
        got = called.module(check_guards=False)(q, k, v)
        torch.testing.assert_close(got, module(q, k, v), rtol=1e-5, atol=1e-5)


class Turned(torch.nn.Module):
    """An encoding of queries."""

    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q):
        return self.encoding(isopos.sequence(q.shape[-2]))(q)


def test_a_program_of_permutations_has_no_longest_sequence():
    module = Turned(isopos.permuteformer(4, 2).encoding).eval()
    called = program.export(module, {"q": torch.randn(1, 2, 3, 4)}, {"q": torch.randn(1, 2, 5, 4)})
    q = torch.randn(1, 2, 32769, 4)
    assert called.module(check_guards=False)(q).equal(module(q))


class Branches(torch.nn.Module):
    """A module that does something else from five tokens on."""

    def forward(self, x):
        return 2 * x if x.shape[0] < 5 else x


class Counts(torch.nn.Module):
    """A module that takes a size as a number."""

    def forward(self, x):
        return x + torch.ones(len(x))


@each(("module", "most"), [(Branches(), 4), (Counts(), 2)])
def test_programs_that_end_at_a_size_are_refused(module, most):
    message = f"module: expected a program for any size .*, got one for at most {most}, since the module"
    with pytest.raises(ValueError, match=message):
        program.export(module.eval(), {"x": torch.ones(2)}, {"x": torch.ones(3)})


class Places(torch.nn.Module):
    """Positions of a grid, a ring and patches, whose numbers are sizes of an image."""

    def forward(self, x):
        height, width = x.shape
        return isopos.grid(height, 3, width), isopos.ring(height), isopos.patches(height, width)


@pytest.mark.slow
def test_sizes_of_positions_are_those_of_the_call(tmp_path):
    onnx, runtime = pytest.importorskip("isopos.integrations.onnx"), pytest.importorskip("onnxruntime")
    module, examples = Places().eval(), ({"x": torch.zeros(2, 3)}, {"x": torch.zeros(5, 4)})
    called, file = program.export(module, *examples).module(check_guards=False), tmp_path / "places.onnx"
    onnx.export(module, file, *examples, ["grid", "ring", "patches"])
    session = runtime.InferenceSession(str(file))
    for shape in ((1, 1), (4, 4), (7, 2)):
        x = torch.zeros(shape)
        expected = module(x)
        torch.testing.assert_close(called(x), expected)
        torch.testing.assert_close(tuple(map(torch.from_numpy, session.run(None, {"x": x.numpy()}))), expected)


def test_what_depends_on_parameters_alone_is_a_number():
    for case in (scheme_case("ape-sequence"), scheme_case("string-circulant")):  # eigenvectors; a Fourier transform
        module, examples, _ = attending([case], "softmax")
        exported = program.export(module, *examples, largest=500)
        operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert not [name for name in operations if "linalg" in name or "fft" in name or "complex" in name]
        single = torch.randn(2, 1, 16), case.positions(t=1)
        torch.testing.assert_close(exported.module(check_guards=False)(*single), module(*single), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_program_of_a_decoder_streams():
    model, tokens = decoder("rope:decay=retnet"), torch.randint(50, (2, 9))
    called = program.export_decoder(model, largest=4096).module(check_guards=False)
    with torch.no_grad():
        _, first = model.prefill(tokens[:, :4])
        states = first.states[0].tensors.values()
        logits, *after = called(tokens[:, 4:8], torch.tensor(4), *states)
        last, *_ = called(tokens[:, 8:], torch.tensor(8), *after)
        torch.testing.assert_close(torch.cat((logits, last), 1), model(tokens)[:, 4:], rtol=1e-5, atol=1e-5)
    module, examples, _ = attending([scheme_case("ape-tree")], "softmax")
    with pytest.raises(ValueError, match=r"got isopos\.tree_path\.default, which loops over the tokens"):
        program.export(module, *examples)


class Loses(torch.nn.Module):
    """A module whose export is wrong for `least` tokens or more."""

    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, x):
        return x + (0 if torch.compiler.is_exporting() or x.shape[0] < self.least else 1)


def test_programs_with_other_numbers_are_refused():
    for least in (0, 3):  # wrong numbers at both sizes, and at the other one alone
        with pytest.raises(ValueError, match=r"output 0: expected \[.\] of the module in the program .* errors up to 1\.0e"):
            program.export(Loses(least).eval(), {"x": torch.ones(2)}, {"x": torch.ones(3)})


@pytest.mark.slow
def test_files_with_other_numbers_are_removed(tmp_path):
    onnx = pytest.importorskip("isopos.integrations.onnx")
    pytest.importorskip("onnxruntime")
    for least in (0, 3):  # wrong numbers at both sizes, and at the other one alone
        with pytest.raises(ValueError, match=r"y: expected \[.\] of PyTorch in onnxruntime .* errors up to 1\.0e"):
            onnx.export(Loses(least).eval(), tmp_path / "a.onnx", {"x": torch.ones(2)}, {"x": torch.ones(3)}, ["y"])
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_compared_with_the_largest_finite_number():
    wanted = torch.tensor([100.0, -torch.inf, torch.nan])
    program.compare("y", wanted + 1e-4, wanted, "")
    for other in (wanted + 1e-2, torch.tensor([100.0, 0.0, torch.nan])):
        with pytest.raises(ValueError, match="y: expected"):
            program.compare("y", other, wanted, "")


def test_windows_and_few_positions_are_refused():
    rope = isopos.rope(8, 4, attention="softmax")
    for model, message in (
        (isopos.Decoder(50, 32, 1, rope, window=3), "without a window, .* got a window of 3"),
        (isopos.Decoder(50, 32, 1, isopos.learned(8, 4, model_dim=32, length=15)), "at least 16 positions.* got 15"),
    ):
        with pytest.raises(ValueError, match=f"model: expected .*{message}"):
            program.export_decoder(model.eval())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rope", "learned"])
def test_decoders_of_shared_keys_and_of_few_positions_are_exported(scheme, tmp_path):
    onnx = pytest.importorskip("isopos.integrations.onnx")
    pytest.importorskip("onnxruntime")
    few = isopos.learned(8, 4, model_dim=32, length=16, attention="softmax")
    model = isopos.Decoder(50, 32, 1, isopos.rope(8, 4, attention="softmax") if scheme == "rope" else few, kv_heads=2)
    onnx.export_decoder(model.eval(), tmp_path / "a.onnx")
    axes = importlib.import_module("onnx").load(tmp_path / "a.onnx").graph.input[0].type.tensor_type.shape.dim
    assert all(axis.dim_param for axis in axes)  # of tokens: any number of samples and any length
    (tmp_path / "b.onnx.data").touch()
    with pytest.raises(ValueError, match=r"file: expected a new one, got .*b\.onnx\.data"):
        onnx.export_decoder(model, tmp_path / "b.onnx")


def test_examples_in_another_order_and_outputs_of_other_types_are_refused():
    class Of(torch.nn.Module):
        def forward(self, x, p):
            return {"y": x - 2 * p}

    first = {"x": torch.ones(3, 2), "p": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match="other: expected the names x, p, in this order, got p, x"):
        program.export(Of().eval(), first, dict(reversed(first.items())))
    with pytest.raises(TypeError, match="module: expected a tensor or a tuple of tensors as output, got dict"):
        program.expected(Of(), first)
    with pytest.raises(TypeError, match="got tuple of None"):
        program.as_tuple((first["x"], None))
    with pytest.raises(ValueError, match=r"y: expected \[2\] .* with errors up to 1.0e\+00"):
        program.compare("y", torch.tensor([True, False]), torch.tensor([True, True]), "there")


def test_examples_that_do_not_match_are_refused():
    module, x = torch.nn.ReLU(), torch.ones(2)
    with pytest.raises(ValueError, match="module: expected one in evaluation mode"):
        program.export(module, {"x": x}, {"x": x})
    for other, got in (({}, "none"), ({"x": x.int()}, r"\[2\] of torch.int32"), ({"x": x[None]}, r"\[1, 2\] of")):
        with pytest.raises(ValueError, match=f"other: expected x with 1 axes of torch.float32, got {got}"):
            program.export(module.eval(), {"x": x}, other)


def test_a_run_is_exported(tmp_path, monkeypatch):
    from isopos.integrations import onnx
    from isopos.lab.commands import export

    monkeypatch.chdir(tmp_path)
    recipe = Recipe(scheme="rope:decay=retnet").edit(layers=1, model_dim=16, heads=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(recipe.as_dict()))
    model, seen = recipe.task.model(recipe), []
    save_model(model, "run/model.safetensors")
    monkeypatch.setattr(onnx, "export_decoder", lambda model, file: (seen.append(model), Path(file).touch()))
    assert export.run(export.Options("run", "out", onnx=True), None) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["decoder.onnx", "tokenizer.json"]
    tokens = torch.randint(50, (2, 9))
    assert not seen[0].training
    assert torch.equal(seen[0](tokens), model.eval()(tokens))
