"""Test models and tasks over several processes (threads here): losses, gradients and scores equal one process."""

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from cases import each, named, perturb
from shards import compare_losses, on_ranks

import isopos
from isopos.lab.tasks.task import Recipe, View, find
from isopos.lab.training.group import run_in_group
from isopos.models import Classifier, Decoder, Encoder, Forecaster, PairClassifier, Vision
from isopos.parallel import Ring, cut

SIZES = {"layers": 1, "model_dim": 16, "heads": 2, "batch": 4, "steps": 2}
TASKS = {  # schemes and sizes
    "language": ("rope:decay=retnet", {"length": 24, "validation_tokens": 144}),
    "bidirectional": ("rope", {"length": 24, "vocabulary": 20}),
    "masked": ("alibi:attention=softmax", {"length": 24, "validation_tokens": 96, "mask_share": 0.4}),
    "text": ("rope", {"longest": 32, "validation_rows": 8}),
    "trees": ("ape-tree", {"validation_rows": 8}),
    "listops": ("ape-tree:attention=softmax", {"expressions": 60, "longest": 40}),
    "pathfinder": ("permuteformer-2d", {"side": 16, "dashes": 5, "pictures": 100}),
    "series": ("clock", {"context": 16, "horizon": 4, "validation_rows": 4}),
}


def compared(model, run, size, kind, error=1e-12):
    """Compare ``run(model)``, a loss of whole samples or of a shard, and its gradients over a group with one process."""
    compare_losses(model, lambda own, _: run(own), size, kind, lambda own, group: own.over(group), error, mean=True)


def zigzag(group):
    return Ring(group, zigzag=True)


@each("kind", [lambda group: group, Ring, zigzag])
def test_models_over_shards(kind):
    size = 2 if kind is Ring else 3
    scheme = isopos.alibi(4, 2, attention="softmax") if kind is zigzag else isopos.rope(4, 2, decay="none")
    tokens, targets = torch.randint(11, (2, 2, 24))
    mask = torch.arange(24) < torch.tensor([[13], [24]])
    pairs, pair_mask = tokens[:, None].expand(2, 2, 24), mask[:, None].expand(2, 2, 24)
    rows = torch.randn(2, 24, 3, dtype=torch.float64)
    rows[:, 18:] = torch.nan
    answers = torch.tensor([1, 0])

    def own(model, x, axis=1):
        return x if model.group is None else cut(x, model.group, axis)

    def classes(logits):
        return torch.nn.functional.cross_entropy(logits, answers)

    def predicted(model):
        return torch.nn.functional.cross_entropy(model(own(model, tokens)).flatten(0, 1), own(model, targets).flatten())

    runs = {
        "decoder": (Decoder(11, 8, 2, scheme), lambda m: m(own(m, tokens), targets=own(m, targets))),
        "encoder": (Encoder(11, 8, 2, scheme), predicted),
        "mean": (Classifier(11, 2, 8, 1, scheme), lambda m: classes(m(own(m, tokens)))),
        "mask": (Classifier(11, 2, 8, 1, scheme), lambda m: classes(m(own(m, tokens), None, own(m, mask)))),
        "first": (Classifier(11, 2, 8, 1, scheme, pooling="first"), lambda m: classes(m(own(m, tokens)))),
        "pair": (
            PairClassifier(11, 2, 8, 1, scheme),
            lambda m: classes(m(own(m, pairs, 2), None, own(m, pair_mask, 2))),
        ),
        "forecast": (Forecaster(3, 8, 1, scheme), lambda m: (m(own(m, rows)) ** 2).mean()),
    }
    for name, (model, run) in runs.items():
        with named(name):
            compared(perturb(model), run, size, kind)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_over_shards(name):
    """The loss of a batch and its gradients, and the figures of held-out samples."""
    scheme, options = TASKS[name]
    recipe = Recipe(scheme=scheme, task=find(name)()).edit(**SIZES, **options, devices=3, sequence_parallel=3)
    recipe.check()
    data = recipe.task.load(recipe)
    recipe = data.infer(recipe)
    model = perturb(recipe.task.model(recipe)).double()
    batch = tuple(x.double() if x.dtype == torch.float32 else x for x in data.batch(recipe, 1))
    compared(model, lambda own: data.loss(own, *data.part(own, batch)), 3, lambda group: group, 1e-10)
    scored = data.measure(model.float(), recipe, View()).figures
    models = [copy.deepcopy(model) for _ in range(3)]

    def member(group, rank):
        with models[rank].over(group), torch.no_grad():
            return data.score(models[rank].eval(), recipe, View()).figures

    for figures in on_ranks(3, member):
        assert figures == pytest.approx(scored, rel=1e-5)


def test_what_cannot_be_cut_is_refused():
    def member(group, rank):
        refused = pytest.raises(ValueError, match="group: expected a Decoder, Encoder, Classifier")
        with refused, Vision(3, 2, 8, 1, isopos.rope_axial(4, 2)).over(group):
            pass
        for scheme in (isopos.rope(4, 2), isopos.fox(4, 2), isopos.ape_tree(4, 2, attention="softmax")):
            with pytest.raises(ValueError, match="group: expected contiguous shards"):
                scheme.at(scheme.group.origin(4), group=zigzag(group))
        q = torch.randn(2, 4, 4)
        with pytest.raises(ValueError, match="group: expected contiguous shards in linear attention"):
            isopos.linear_attention(q, q, q, group=zigzag(group))
        with pytest.raises(ValueError, match="dropout: expected 0 round a ring"):
            isopos.softmax_attention(q, q, q, group=Ring(group), dropout=0.5)

    on_ranks(2, member)
    for name, task in (("images", find("images")()), ("transduction", find("transduction")())):
        with pytest.raises(ValueError, match="sequence_parallel: expected 1, since"):
            Recipe(scheme="rope", task=task).edit(devices=2, sequence_parallel=2).check()
        assert name
    with pytest.raises(ValueError, match="sequence_keys: expected gather without sequence_parallel"):
        Recipe().edit(sequence_keys="ring").check()


def _fails(rank, device, how):
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise ValueError("length: expected 3, got 4")
    dist.barrier()


@pytest.mark.slow
def test_errors_of_a_process_of_a_group_are_one_line():
    with pytest.raises(ValueError, match=r"^length: expected 3, got 4$"):
        run_in_group(2, "cpu", _fails, "refuses")
    with pytest.raises(OSError, match=r"process \d of 2 ended with status -?\d+; start again"):
        run_in_group(2, "cpu", _fails, "killed")
