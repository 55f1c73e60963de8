"""Exported programs need nothing of isopos; ONNX files give PyTorch's numbers at any length and in pieces."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import each
from safetensors.torch import save_model

import isopos
from isopos import schemes
from isopos.lab.tasks.task import Recipe
from isopos.models import Decoder
from isopos.ops import linear
from isopos.ops.linear.exported import exported_sum
from isopos.ops.linear.features import ALL_READY, Sums

SPECS = (
    "permuteformer",
    "retnet:denominator=plain",
    "fox",
    "lrpe-unitary",
    "rope:attention=softmax",
    "t5:attention=softmax",
)
READ = """
import json, sys
import numpy as np, onnxruntime
file, tokens, pieces = sys.argv[1], np.load("tokens.npy"), json.loads(sys.argv[2])
session = onnxruntime.InferenceSession(file)
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
assert not {"isopos", "torch"} & set(sys.modules)
np.save("logits.npy", np.concatenate(logits, 1))
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


def decoder(text):
    name, _, options = text.partition(":")
    choices = dict(option.split("=") for option in options.split(",") if option)
    return Decoder(50, 32, 1, schemes.build(name, 8, 4, choices)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("text", SPECS)
def test_a_decoder_reads_whole_texts_chunks_and_tokens_without_isopos(text, tmp_path, monkeypatch):
    onnx = pytest.importorskip("isopos.integrations.onnx")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    model, tokens = decoder(text), torch.randint(50, (2, 140))
    onnx.export_decoder(model, "decoder.onnx")
    np.save("tokens.npy", tokens.numpy())
    for pieces in ([140], [1, 60, 1, 1, 77]):
        command = [sys.executable, "-c", READ, "decoder.onnx", json.dumps(pieces)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with torch.no_grad():
            expected = model(tokens)
        torch.testing.assert_close(torch.from_numpy(np.load("logits.npy")), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_module_is_exported_in_both_directions_with_a_decay(tmp_path):
    onnx, runtime = pytest.importorskip("isopos.integrations.onnx"), pytest.importorskip("onnxruntime")
    scheme = isopos.rope(8, 4, decay="retnet")

    class Layer(isopos.Attention):
        def forward(self, x):
            return super().forward(x, scheme.at(isopos.sequence(x.shape[1])))

    module = Layer(32, scheme).eval()
    inputs, longer, longest = ({"x": torch.randn(b, t, 32)} for b, t in ((2, 5), (3, 90), (1, 301)))
    onnx.export(module, tmp_path / "attention.onnx", inputs, longer, ["y"])
    session = runtime.InferenceSession(str(tmp_path / "attention.onnx"))
    (y,) = session.run(None, {"x": longest["x"].numpy()})
    torch.testing.assert_close(torch.from_numpy(y), module(longest["x"]).detach(), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"file: expected a new one, got .*attention\.onnx, which exists"):
        onnx.export(module, tmp_path / "attention.onnx", inputs, longer, ["y"])


@pytest.mark.slow
def test_what_onnx_cannot_hold_is_named_and_leaves_no_file(tmp_path):
    onnx = pytest.importorskip("isopos.integrations.onnx")
    pytest.importorskip("onnxruntime")
    file = tmp_path / "decoder.onnx"
    with pytest.raises(ValueError, match=r"module: expected operations that ONNX 23 has, got aten\._linalg_eigh"):
        onnx.export_decoder(decoder("ape-sequence"), file)

    class Loses(torch.nn.Module):
        def __init__(self, least):
            super().__init__()
            self.least = least

        def forward(self, x):
            return x + (0 if torch.compiler.is_exporting() or len(x) < self.least else 1)

    for least in (0, 3):  # wrong numbers at both sizes, and at the other one alone
        with pytest.raises(ValueError, match=r"y: expected PyTorch's .* got .* with errors up to 1\.0e"):
            onnx.export(Loses(least).eval(), file, {"x": torch.ones(2)}, {"x": torch.ones(3)}, ["y"])
    assert list(tmp_path.iterdir()) == []


def test_examples_that_do_not_match_are_refused(tmp_path):
    onnx = pytest.importorskip("isopos.integrations.onnx")
    pytest.importorskip("onnxruntime")
    module, x = torch.nn.ReLU(), torch.ones(2)
    with pytest.raises(ValueError, match="module: expected one in evaluation mode"):
        onnx.export(module, tmp_path / "a.onnx", {"x": x}, {"x": x}, ["y"])
    for other, got in (({}, "none"), ({"x": x.int()}, r"\[2\] of torch.int32"), ({"x": x[None]}, r"\[1, 2\] of")):
        with pytest.raises(ValueError, match=f"other: expected x with 1 axes of torch.float32, got {got}"):
            onnx.export(module.eval(), tmp_path / "a.onnx", {"x": x}, other, ["y"])


@pytest.mark.slow
def test_a_run_is_exported(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    from isopos.lab.commands import export

    monkeypatch.chdir(tmp_path)
    recipe = Recipe(scheme="rope:decay=retnet").edit(layers=1, model_dim=16, heads=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(recipe.as_dict()))
    save_model(recipe.task.model(recipe), "run/model.safetensors")
    assert export.run(export.Options("run", "out", onnx=True), None) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["decoder.onnx", "tokenizer.json"]
