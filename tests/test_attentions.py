"""Test attention mechanisms of other papers: masking, tasks, and refused combinations."""

import importlib.util

import pytest
import torch

from isopos.lab.recipes import Recipe
from isopos.lab.tables.loader import load_table
from isopos.lab.tasks.attentions import BASELINES, LONGEST, PACKAGED, Linformer
from isopos.lab.tasks.bidirectional import Bidirectional
from isopos.lab.tasks.build import build_scheme
from isopos.lab.tasks.images import Images
from isopos.lab.tasks.language import Language
from isopos.lab.tasks.listops import ListOps
from isopos.lab.tasks.text import TextClasses
from isopos.lab.tasks.transduction import Transduction
from isopos.spec import split_spec

LENGTH, T = 37, 21


@pytest.fixture(params=BASELINES)
def other(request):
    if request.param in PACKAGED:
        pytest.importorskip("transformers", reason="needs the extra peers")
    return request.param


def recipe(attention, task=None, positions="sinusoidal", **edits):
    task = TextClasses(longest=LENGTH) if task is None else task
    sizes = {"layers": 2, "model_dim": 32, "heads": 4} | edits
    return Recipe(task=task, scheme=f"{positions}:attention={attention}").edit(**sizes)


def test_padding_and_neighbours_change_nothing(other):
    torch.manual_seed(0)
    one = recipe(other)
    model, tokens, own = one.task.model(one).eval(), torch.randint(250, (3, T)), torch.ones(3, T, dtype=torch.bool)
    own[0, 8:] = False
    seen = model(tokens, None, own)
    for more in (0, LENGTH - T):
        longer = torch.cat((tokens, torch.randint(250, (3, more))), 1)
        longer[0, 8:] = 7
        also = torch.cat((own, torch.zeros(3, more, dtype=torch.bool)), 1)
        torch.testing.assert_close(model(longer, None, also), seen)
    for n, row in enumerate(seen):
        alone = tokens[n, own[n]][None]
        torch.testing.assert_close(model(alone)[0], row)
    assert not torch.allclose(model(tokens)[0], seen[0], atol=1e-3)  # without the mask its padding is seen


def test_gradients_reach_every_parameter_and_answers_stay(other):
    one = recipe(other)
    model, tokens = one.task.model(one), torch.randint(250, (2, LENGTH))
    model(tokens).square().sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())
    model.eval()
    before = torch.get_rng_state()
    torch.testing.assert_close(model(tokens), model(tokens), rtol=0, atol=0)
    assert torch.equal(before, torch.get_rng_state())


def test_what_models_share_starts_equal(other):
    one, softmax = recipe(other), recipe("softmax")
    mine, theirs = (dict(r.task.model(r).named_parameters()) for r in (one, softmax))
    assert {name for name in theirs if name not in mine or not torch.equal(mine[name], theirs[name])} == {
        name for name in theirs if ".attention." in name
    }
    assert build_scheme(one).choices["attention"] == other
    assert build_scheme(one).fingerprint != build_scheme(softmax).fingerprint


def test_linformer_is_its_equation():
    torch.manual_seed(0)
    layer, x = Linformer(8, 2, 12, 0.0), torch.randn(3, 10, 8)
    mask = torch.arange(10) < torch.tensor([10, 7, 4])[:, None]
    q, k, v = layer.project(x).chunk(3, -1)
    k, v = (torch.einsum("kn,bnm->bkm", mix[:, :10], a * mask[..., None]) for mix, a in zip(layer.mix, (k, v), strict=True))
    assert k.shape == (3, 3, 8)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        weight = (torch.einsum("btd,bkd->btk", q[..., head], k[..., head]) / 2).softmax(-1)
        heads.append(torch.einsum("btk,bkd->btd", weight, v[..., head]))
    found, expected = layer(x, None, mask=mask), layer.out(torch.cat(heads, -1))
    for n, count in enumerate((10, 7, 4)):
        torch.testing.assert_close(found[n, :count], expected[n, :count])


def test_dropout_is_of_training_alone():
    torch.manual_seed(0)
    layer, x = Linformer(8, 2, 12, 0.5), torch.randn(1, 12, 8)
    assert not torch.equal(layer(x, None), layer(x, None))
    layer.eval()
    assert torch.equal(layer(x, None), layer(x, None))


@pytest.mark.parametrize(
    ("positions", "task", "message"),
    [
        ("rope", TextClasses(), "schemes: expected positions that are added to embeddings, .* got rope:attention=linformer"),
        ("t5", TextClasses(), "schemes: expected positions that are added"),
        ("retnet", TextClasses(), "schemes: expected positions that are added"),
        ("none", Language(), "schemes: expected attention linear or softmax in a Decoder, got linformer, which is"),
        ("none", Transduction(), "schemes: expected attention linear or softmax in a Seq2Seq, got linformer"),
    ],
)
def test_it_says_where_it_cannot_be(positions, task, message):
    one = recipe("linformer", task, positions)
    with pytest.raises(ValueError, match=message):
        one.task.check(one)


def test_samples_have_a_longest():
    layer = Linformer(8, 2, 12, 0.0)
    with pytest.raises(ValueError, match="x: expected at most 12 tokens, for which Linformer was made, got 13"):
        layer(torch.zeros(1, 13, 8), None)
    with pytest.raises(ValueError, match="causal: expected none with Linformer"):
        layer(torch.zeros(1, 12, 8), None, causal=True)
    for task, longest in ((Images(), LONGEST), (Images(height=8, width=12), 6), (ListOps(longest=50), 50)):
        one = recipe("linformer", task)
        assert {block.attention.length for block in task.model(one).blocks} == {longest}


def test_a_absence(monkeypatch, isopos):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    one, remedy = recipe("reformer"), "needs the package transformers: pip install 'isopos[peers]'"
    with pytest.raises(ValueError, match=f"attention: reformer {remedy}".replace("[", "\\[")):
        one.task.check(one)
    command = ("table", "permuteformer-2", "--scale=tiny", "--device=cpu", "--dry-run")
    said = isopos(*command)[1]
    assert f"left out: Nyströmformer; nystromformer {remedy}" in said
    assert "image-Linformer" in said
    assert "image-Reformer" not in said
    assert isopos(*command, "--rows", "Reformer")[0] == 0  # named, it is an error as soon as there is work


def test_the_rows_of_the_papers():
    for name in ("permuteformer-1", "permuteformer-2", "permuteformer-3"):
        table = load_table(name)
        rows = [table.row(row) for row in ("Reformer", "Linformer", "Nyströmformer")]
        assert {split_spec(row.scheme)[1]["attention"] for row in rows} == set(BASELINES)
        assert all(row.figures for row in rows)


def test_nystromformer_drops_no_weights():
    pytest.importorskip("transformers", reason="needs the extra peers")
    one = recipe("nystromformer", Bidirectional(), attention_dropout=0.1)
    with pytest.raises(ValueError, match="attention_dropout: expected 0 with nystromformer"):
        one.task.model(one)
