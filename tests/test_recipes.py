import dataclasses
import importlib
import subprocess
import sys

import pytest

from isopos.cli import COMMANDS
from isopos.lab.commands.compare import Options
from isopos.lab.recipes import RECIPES, SCALES, Recipe, Training, preset
from isopos.lab.tables.loader import load_table
from isopos.lab.tasks.bidirectional import Bidirectional
from isopos.lab.tasks.glue import Glue
from isopos.lab.tasks.images import Images
from isopos.lab.tasks.language import Language
from isopos.lab.tasks.listops import ListOps
from isopos.lab.tasks.masked import Masked
from isopos.lab.tasks.transduction import Transduction
from isopos.lab.tasks.tree_transduction import TreeTransduction
from isopos.spec import join_spec, split_spec


def test_recipes_of_one_seed_differ_in_the_scheme_only():
    recipes = Options(schemes="none,rope", seeds=2, training=Training(steps=5), settings=Language(data="x")).recipes()
    assert [(r.scheme, r.seed) for r in recipes] == [("none", 0), ("rope", 0), ("none", 1), ("rope", 1)]
    assert all(r.training.steps == 5 and r.task.data == "x" for r in recipes)
    assert {k for k in recipes[0].as_dict() if recipes[0].as_dict()[k] != recipes[1].as_dict()[k]} == {"scheme"}


def test_attention_is_a_choice_of_each_scheme():
    recipes = Options(schemes="none,rope:attention=linear", attention="softmax").recipes()
    assert [r.scheme for r in recipes] == ["none:attention=softmax", "rope:attention=linear"]


def test_a_recipe_survives_json():
    import json

    recipe = Recipe(scheme="rope:decay=retnet").edit(steps=3, cutoffs=(10, 20))
    assert Recipe.from_dict(json.loads(json.dumps(recipe.as_dict()))) == recipe


def test_a_field_that_no_recipe_has_is_refused_with_those_it_has():
    with pytest.raises(
        ValueError, match=r"expected one of scheme, seed, data, .*, strategy, got 'stesp'; did you mean steps\?$"
    ):
        Recipe.from_dict({"stesp": 3})


BAD = {
    "steps": 0,
    "batch": 3,
    "model_dim": 97,
    "learning_rate": float("nan"),
    "dropout": 1.0,
    "attention_dropout": -0.1,
    "beta2": -0.1,
    "clip": float("inf"),
    "warmup": -2,
    "patience": 1,
    "workers": -1,
    "epsilon": 0.0,
}


@pytest.mark.parametrize("field", BAD)
def test_a_number_that_cannot_be_is_named(field):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        Recipe().edit(**{"accumulate": 2, field: BAD[field]}).check()


WHOLE = {  # least and most
    "seed": (0, 2**63 - 1),
    "steps": (1, 10**12),
    **dict.fromkeys(("batch", "accumulate", "devices", "nodes"), (1, 10**7)),
    **dict.fromkeys(("layers", "heads"), (1, 10**5)),
    "model_dim": (1, 10**7),
    "hidden_dim": (0, 10**7),
    **dict.fromkeys(("validate_every", "patience", "save_every"), (0, 10**12)),
    "workers": (0, 10**4),
    "warmup": (-1, 10**12),
}
OF_TASKS = {
    Language: {"length": (1, 10**9), "vocabulary": (0, 10**9), "validation_tokens": (0, 10**15)},
    Bidirectional: {"length": (1, 10**9), "vocabulary": (1, 10**9)},
    Masked: {"length": (1, 10**9), "vocabulary": (0, 10**9), "validation_tokens": (0, 10**15)},
    Glue: {"length": (4, 10**9), "vocabulary": (0, 10**9), "validation_rows": (0, 10**9)},
    ListOps: dict.fromkeys(("longest", "branches", "validation_rows"), (0, 10**9)),
    Images: {
        **dict.fromkeys(("height", "width", "margin"), (0, 10**5)),
        **dict.fromkeys(("classes", "validation_rows"), (0, 10**9)),
        "patch": (1, 10**5),
        "channels": (0, 10**3),
        "smoothing": (0, 1),
    },
    Transduction: {
        **dict.fromkeys(("samples", "held_out"), (1, 10**9)),
        **dict.fromkeys(("longest", "validation_rows", "decoded", "deviation", "vocabulary"), (0, 10**9)),
        "data_seed": (0, 2**63 - 1),
        "length": (1, 10**6),
    },
    TreeTransduction: {
        **dict.fromkeys(("samples", "held_out"), (1, 10**9)),
        **dict.fromkeys(("longest", "validation_rows", "decoded", "deviation"), (0, 10**9)),
        **dict.fromkeys(("labels", "vocabulary", "branches"), (0, 10**9)),
        "data_seed": (0, 2**63 - 1),
        "depth": (1, 64),
    },
}
ENDS = [(Language, field, *ends) for field, ends in WHOLE.items()]
ENDS += [(task, field, *ends) for task, of_task in OF_TASKS.items() for field, ends in of_task.items()]


@pytest.mark.parametrize(("task", "field", "least", "most"), ENDS)
def test_whole_numbers_have_ends_that_are_in(task, field, least, most):
    def refusal(value):
        try:
            return Recipe(task=task()).edit(**{field: value}).check() or ""
        except ValueError as error:
            return str(error)

    for value in (least - 1, most + 1):
        assert refusal(value) == f"{field}: expected a number from {least:,} to {most:,}, got {value}"
    for value in (least, most):
        assert "a number from" not in refusal(value), "it may not fit other fields"


def test_the_best_weights_come_from_checkpoints():
    with pytest.raises(ValueError, match="save_every: expected"):
        Recipe().edit(validate_every=10, save_every=0).check()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes_are_complete_and_their_schemes_build(name, scale):
    from isopos.lab.tasks.build import build_scheme

    recipe = preset(name, scale)
    recipe.check()
    build_scheme(recipe)


def test_recipes_of_papers_are_what_the_papers_say():
    lrpe, permuteformer = preset("lrpe-alm", "paper"), preset("permuteformer-lm", "paper")
    m, t = lrpe.model, lrpe.training
    assert (m.layers, m.model_dim, m.heads, m.hidden_dim, lrpe.task.length, t.batch) == (6, 512, 8, 2048, 512, 128)
    assert (t.steps, t.warmup, t.learning_rate, t.schedule) == (50_000, 4000, 5e-4, "inverse-sqrt")
    assert (t.beta1, t.beta2, t.epsilon, t.weight_decay) == (0.9, 0.98, 1e-8, 0.01)
    assert lrpe.task.tied  # by Fairseq's command
    assert permuteformer == lrpe.edit(scheme="permuteformer:width=4", hidden_dim=1024)
    masked = preset("lrpe-blm", "paper")
    m, t = masked.model, masked.training
    assert (m.layers, m.model_dim, m.heads, m.hidden_dim, m.activation) == (12, 768, 12, 3072, "gelu")
    assert (masked.task.vocabulary + 1, masked.task.length, t.batch) == (50265, 512, 512)  # the mask is a word
    assert (t.steps, t.warmup, t.learning_rate, t.schedule) == (23_000, 3000, 5e-4, "polynomial")
    assert (t.beta1, t.beta2, t.epsilon, t.weight_decay) == (0.9, 0.98, 1e-6, 0.01)


DECLARED = """
    Recipe: task=language scheme=rope seed=0 data= tokenizer=bytes vocabulary=0 length=256 cutoffs=() start=
        tied=False validation_tokens=32768 layers=3 model_dim=96 heads=4 hidden_dim=0 dropout=0.0 recompute=False steps=250
        activation=relu norm=layer stochastic_depth=0.0
        attention_dropout=0.0 batch=8 accumulate=1 optimizer=adamw learning_rate=0.003 schedule=cosine power=1.0 warmup=-1
        beta1=0.9 beta2=0.999 epsilon=1e-08 weight_decay=0.01 clip=1.0 precision=float32 validate_every=0 patience=0
        save_every=20 logger=none workers=0 device=cpu devices=1 nodes=1 strategy=ddp
    bidirectional: task=bidirectional vocabulary=256 length=512
    quickstart tiny: length=64 layers=1 model_dim=32 heads=2 steps=50 device=auto
    quickstart small: device=auto
    quickstart paper: length=512 layers=6 model_dim=512 heads=8 steps=5000 batch=32 validate_every=500 device=auto
    lrpe-alm tiny: scheme=lrpe-orthogonal tokenizer=words length=64 validation_tokens=4096 layers=2 model_dim=64
        tied=True hidden_dim=256 dropout=0.1 steps=100 schedule=inverse-sqrt warmup=10 beta2=0.98 clip=0.0 validate_every=50
        save_every=50 device=auto
    lrpe-alm small: scheme=lrpe-orthogonal data=hf:Salesforce/wikitext:wikitext-103-v1 tokenizer=words
        tied=True validation_tokens=100000 layers=4 model_dim=256 hidden_dim=1024 dropout=0.1 steps=10000 batch=32
        accumulate=4
        learning_rate=0.0005 schedule=inverse-sqrt warmup=1000 beta2=0.98 clip=0.0 validate_every=1000 save_every=1000
        device=auto
    lrpe-alm paper: scheme=lrpe-orthogonal data=hf:Salesforce/wikitext:wikitext-103-v1 tokenizer=words length=512
        tied=True validation_tokens=0 layers=6 model_dim=512 heads=8 hidden_dim=2048 dropout=0.1 steps=50000
        batch=128
        learning_rate=0.0005 schedule=inverse-sqrt warmup=4000 beta2=0.98 clip=0.0 validate_every=1000 save_every=1000
        device=auto
    permuteformer-lm tiny: scheme=permuteformer:width=4 tokenizer=words length=64 validation_tokens=4096 layers=2
        tied=True model_dim=64 hidden_dim=128 dropout=0.1 steps=100 schedule=inverse-sqrt warmup=10 beta2=0.98 clip=0.0
        validate_every=50 save_every=50 device=auto
    permuteformer-lm small: scheme=permuteformer:width=4 data=hf:Salesforce/wikitext:wikitext-103-v1 tokenizer=words
        tied=True validation_tokens=100000 layers=4 model_dim=256 hidden_dim=512 dropout=0.1 steps=10000 batch=32
        accumulate=4
        learning_rate=0.0005 schedule=inverse-sqrt warmup=1000 beta2=0.98 clip=0.0 validate_every=1000 save_every=1000
        device=auto
    permuteformer-lm paper: scheme=permuteformer:width=4 data=hf:Salesforce/wikitext:wikitext-103-v1 tokenizer=words
        tied=True length=512 validation_tokens=0 layers=6 model_dim=512 heads=8 hidden_dim=1024 dropout=0.1 steps=50000
        batch=128
        learning_rate=0.0005 schedule=inverse-sqrt warmup=4000 beta2=0.98 clip=0.0 validate_every=1000 save_every=1000
        device=auto
    lrpe-blm tiny: task=masked scheme=lrpe-orthogonal mask_share=0.15 length=64 tied=True
        validation_tokens=4096 layers=2 model_dim=64 hidden_dim=256 activation=gelu dropout=0.1 steps=100
        schedule=polynomial warmup=10 beta2=0.98 epsilon=1e-06 clip=0.0 validate_every=50 save_every=50 device=auto
    lrpe-blm small: task=masked scheme=lrpe-orthogonal mask_share=0.15 data=hf:Salesforce/wikitext:wikitext-103-raw-v1
        tokenizer=bpe vocabulary=8192 tied=True validation_tokens=100000 layers=4 model_dim=256 hidden_dim=1024
        activation=gelu dropout=0.1 steps=10000 batch=64 learning_rate=0.0005
        schedule=polynomial warmup=1000 beta2=0.98 epsilon=1e-06 clip=0.0 validate_every=1000 save_every=1000 device=auto
    lrpe-blm paper: task=masked scheme=lrpe-orthogonal mask_share=0.15 data=hf:Salesforce/wikitext:wikitext-103-raw-v1
        tokenizer=bpe vocabulary=50264 length=512 tied=True validation_tokens=1000000 layers=12 model_dim=768 heads=12
        hidden_dim=3072 activation=gelu dropout=0.1 steps=23000 batch=512 learning_rate=0.0005
        schedule=polynomial warmup=3000 beta2=0.98 epsilon=1e-06 clip=0.0 validate_every=1000 save_every=1000 device=auto
    lrpe-glue tiny: task=glue scheme=lrpe-orthogonal subset= start=runs/lrpe-blm length=128 validation_rows=0 layers=2
        model_dim=64 hidden_dim=256 activation=gelu dropout=0.1 steps=60 batch=16 learning_rate=0.001
        schedule=polynomial warmup=6 beta2=0.98 epsilon=1e-06 weight_decay=0.1 clip=0.0 validate_every=30 save_every=30
        device=auto
    lrpe-glue small: task=glue scheme=lrpe-orthogonal subset= start=runs/lrpe-blm validation_rows=0 layers=4
        model_dim=256 hidden_dim=1024 activation=gelu dropout=0.1 steps=2000 batch=32 learning_rate=0.0001
        schedule=polynomial warmup=200 beta2=0.98 epsilon=1e-06 weight_decay=0.1 clip=0.0 validate_every=500
        save_every=500 device=auto
    lrpe-glue paper: task=glue scheme=lrpe-orthogonal subset= start=runs/lrpe-blm length=512 validation_rows=0 layers=12
        model_dim=768 heads=12 hidden_dim=3072 activation=gelu dropout=0.1 steps=5000 batch=16 learning_rate=2e-05
        schedule=polynomial warmup=300 beta2=0.98 epsilon=1e-06 weight_decay=0.1 clip=0.0 validate_every=500
        save_every=500 device=auto
    listops tiny: task=listops longest=0 branches=0 validation_rows=0 layers=1 model_dim=32 heads=2 steps=50 batch=32
    listops tiny: task=listops longest=0 depth=4 arguments=5 shortest=0 expressions=12000
        branches=0 validation_rows=0 layers=1 model_dim=32 heads=2 steps=50 batch=32
        learning_rate=0.002 device=auto
    listops small: task=listops longest=0 depth=4 arguments=5 shortest=0 expressions=12000
        branches=0 validation_rows=0 layers=2 model_dim=64 steps=800 batch=32
        learning_rate=0.002 device=auto
    listops paper: task=listops data=lra_release/listops-1000 longest=2000 depth=4 arguments=5 shortest=0 expressions=12000
        branches=0 validation_rows=0 layers=6
        model_dim=512 heads=8 hidden_dim=2048 dropout=0.1 steps=5000 batch=32 learning_rate=0.00158 schedule=inverse-sqrt
        warmup=1000 beta2=0.98 epsilon=1e-09 weight_decay=0.1 clip=0.0 validate_every=500 save_every=500 device=auto
    lra-text tiny: task=text scheme=lrpe-orthogonal column=text pair= label=label classes=0 longest=512 pairs=joined
        pooling=mean validation_rows=0 layers=1 model_dim=32 heads=2 norm=batch steps=50 batch=32 learning_rate=0.002
        device=auto
    lra-text small: task=text scheme=lrpe-orthogonal column=text pair= label=label classes=0 longest=512 pairs=joined
        pooling=mean validation_rows=0 layers=2 model_dim=64 norm=batch steps=500 batch=32 learning_rate=0.002
        device=auto
    lra-text paper: task=text scheme=lrpe-orthogonal data=aclImdb_v1.tar.gz column=text pair= label=label classes=0
        longest=4000 pairs=joined pooling=mean validation_rows=0 layers=4 model_dim=128 norm=batch steps=3125
        batch=256 learning_rate=0.001 validate_every=500 save_every=500 device=auto
    lra-listops tiny: task=listops scheme=lrpe-orthogonal depth=4 arguments=5 shortest=0 expressions=12000 longest=0
        branches=0 validation_rows=0 layers=1 model_dim=32 heads=2 norm=batch steps=50 batch=32 learning_rate=0.002
        device=auto
    lra-listops small: task=listops scheme=lrpe-orthogonal depth=4 arguments=5 shortest=0 expressions=12000 longest=0
        branches=0 validation_rows=0 layers=2 model_dim=64 norm=batch steps=800 batch=32 learning_rate=0.002
        device=auto
    lra-listops paper: task=listops scheme=lrpe-orthogonal depth=9 arguments=10 shortest=501 expressions=100000
        longest=1999 branches=0 validation_rows=0 layers=4 model_dim=128 norm=batch steps=15000 batch=256
        learning_rate=0.0001 validate_every=500 save_every=500 device=auto
    lra-retrieval tiny: task=text scheme=lrpe-orthogonal column=text pair=other label=label classes=0 longest=512
        pairs=towers pooling=mean validation_rows=0 layers=1 model_dim=32 heads=2 norm=batch steps=50 batch=32
        learning_rate=0.002 device=auto
    lra-retrieval small: task=text scheme=lrpe-orthogonal column=text pair=other label=label classes=0 longest=512
        pairs=towers pooling=mean validation_rows=0 layers=2 model_dim=64 norm=batch steps=500 batch=32
        learning_rate=0.002 device=auto
    lra-retrieval paper: task=text scheme=lrpe-orthogonal data=lra_release/tsv_data column=4 pair=5 label=1 classes=0
        longest=4000 pairs=towers pooling=mean validation_rows=0 layers=4 model_dim=64 norm=batch steps=45964 batch=64
        learning_rate=0.001 validate_every=500 save_every=500 device=auto
    lra-pathfinder tiny: task=pathfinder scheme=lrpe-orthogonal side=24 dashes=12 distractors=0 pictures=400
        validation_rows=0 layers=1 model_dim=32 heads=2 norm=batch steps=50 batch=32 learning_rate=0.002 device=auto
    lra-pathfinder small: task=pathfinder scheme=lrpe-orthogonal side=24 dashes=12 distractors=0 pictures=6000
        validation_rows=0 layers=2 model_dim=64 norm=batch steps=500 batch=32 learning_rate=0.002 device=auto
    lra-pathfinder paper: task=pathfinder scheme=lrpe-orthogonal side=32 dashes=14 distractors=5 pictures=200000
        validation_rows=0 layers=4 model_dim=32 norm=batch steps=250000 batch=128 learning_rate=0.0005
        validate_every=500 save_every=500 device=auto
    permuteformer-text tiny: task=text scheme=permuteformer:width=4,decay=none column=text pair= label=label classes=0
        longest=512 pairs=joined pooling=first validation_rows=0 layers=1 model_dim=32 heads=2 steps=50 batch=32
        optimizer=adam learning_rate=0.002 device=auto
    permuteformer-text small: task=text scheme=permuteformer:width=4,decay=none column=text pair= label=label
        classes=0 longest=512 pairs=joined pooling=first validation_rows=0 layers=2 model_dim=64 steps=500 batch=32
        optimizer=adam learning_rate=0.002 device=auto
    permuteformer-text paper: task=text scheme=permuteformer:width=4,decay=none data=aclImdb_v1.tar.gz column=text
        pair= label=label classes=0 longest=4000 pairs=joined pooling=first validation_rows=0 layers=6 model_dim=512
        heads=8 hidden_dim=2048 activation=gelu dropout=0.1 clip=0.0 steps=15625 batch=16
        optimizer=adam learning_rate=1e-05 schedule=inverse-sqrt warmup=4000
        weight_decay=0.0 validate_every=500 save_every=500 device=auto
    permuteformer-retrieval tiny: task=text scheme=permuteformer:width=4,decay=none column=text pair=other label=label
        classes=0 longest=512 pairs=towers pooling=first validation_rows=0 layers=1 model_dim=32 heads=2 steps=50
        batch=32 optimizer=adam learning_rate=0.002 device=auto
    permuteformer-retrieval small: task=text scheme=permuteformer:width=4,decay=none column=text pair=other
        label=label classes=0 longest=512 pairs=towers pooling=first validation_rows=0 layers=2 model_dim=64 steps=500
        batch=32 optimizer=adam learning_rate=0.002 device=auto
    permuteformer-retrieval paper: task=text scheme=permuteformer:width=4,decay=none data=lra_release/tsv_data
        column=4 pair=5 label=1 classes=0 longest=4000 pairs=towers pooling=first validation_rows=0 layers=4
        model_dim=128 hidden_dim=512 activation=gelu dropout=0.1 clip=0.0 steps=45964
        batch=32 optimizer=adam learning_rate=0.0002 schedule=inverse-sqrt
        warmup=1000 weight_decay=0.0 validate_every=500 save_every=500 device=auto
    permuteformer-pathfinder tiny: task=pathfinder scheme=permuteformer-2d:decay=none side=24 dashes=12 distractors=0
        pictures=400 validation_rows=0 layers=1 model_dim=32 heads=2 steps=50 batch=32 optimizer=adam
        learning_rate=0.002 device=auto
    permuteformer-pathfinder small: task=pathfinder scheme=permuteformer-2d:decay=none side=24 dashes=12 distractors=0
        pictures=6000 validation_rows=0 layers=2 model_dim=64 steps=500 batch=32 optimizer=adam learning_rate=0.002
        device=auto
    permuteformer-pathfinder paper: task=pathfinder scheme=permuteformer-2d:decay=none side=32 dashes=14 distractors=5
        pictures=200000 validation_rows=0 layers=4 model_dim=128 hidden_dim=128
        heads=8 activation=gelu dropout=0.1 clip=0.0 steps=50000 batch=256
        optimizer=adam learning_rate=0.0005 schedule=inverse-sqrt warmup=4000 weight_decay=0.0 validate_every=500
        save_every=500 device=auto
    permuteformer-image tiny: task=images scheme=permuteformer-2d:decay=none height=0 width=0 margin=0
        tokenizer=patches patch=4 pooling=mean augment=none policy=none erasing=0.0 mixup=0.0 cutmix=0.0
        repeats=1 smoothing=0.0 channels=0 classes=0 validation_rows=0 layers=1 model_dim=32 heads=2 steps=50
        batch=32 optimizer=adam learning_rate=0.005 device=auto
    permuteformer-image small: task=images scheme=permuteformer-2d:decay=none height=0 width=0 margin=0
        tokenizer=patches patch=4 pooling=mean augment=none policy=none erasing=0.0 mixup=0.0 cutmix=0.0
        repeats=1 smoothing=0.0 channels=0 classes=0 validation_rows=0 layers=2 model_dim=48 steps=600 batch=32
        optimizer=adam learning_rate=0.005 device=auto
    permuteformer-image paper: task=images scheme=permuteformer-2d:decay=none data=cifar10 height=0 width=0
        margin=0 tokenizer=patches patch=1 pooling=mean augment=none policy=none erasing=0.0 mixup=0.0
        cutmix=0.0 repeats=1 smoothing=0.0 channels=1 classes=0 validation_rows=0 model_dim=64 hidden_dim=128
        activation=gelu dropout=0.3 steps=9765 batch=256 optimizer=adam learning_rate=0.01 schedule=inverse-sqrt
        warmup=200 weight_decay=0.0 clip=0.0 validate_every=500 save_every=500 device=auto
    cct tiny: task=images scheme=ape-grid:attention=softmax,initial=identity,locality=0.98,metric=euclidean height=0 width=0
        margin=0 tokenizer=convolution patch=4 pooling=sequence augment=crop policy=none erasing=0.0 mixup=0.0 cutmix=0.0
        repeats=1 smoothing=0.0 channels=0 classes=0 validation_rows=0 layers=1 model_dim=32 heads=2 hidden_dim=64
        activation=gelu steps=50 batch=32 learning_rate=0.002 warmup=5 weight_decay=0.03 clip=0.0 validate_every=25
        save_every=25 device=auto
    cct small: task=images scheme=ape-grid:attention=softmax,initial=identity,locality=0.98,metric=euclidean height=0 width=0
        margin=0 tokenizer=convolution patch=4 pooling=sequence augment=crop policy=none erasing=0.0 mixup=0.0 cutmix=0.0
        repeats=1 smoothing=0.0 channels=0 classes=0 validation_rows=0 model_dim=64 hidden_dim=128 activation=gelu
        steps=800 batch=32 learning_rate=0.002 warmup=80 weight_decay=0.03 clip=0.0 validate_every=200 save_every=200
        device=auto
    cct paper: task=images scheme=ape-grid:attention=softmax,initial=identity,locality=0.98,metric=euclidean data=cifar10
        height=0 width=0 margin=0 tokenizer=convolution patch=2 pooling=sequence augment=crop-flip policy=autoaugment
        erasing=0.0 mixup=0.0 cutmix=0.0 repeats=1 smoothing=0.1 channels=0 classes=0 validation_rows=0 layers=7
        model_dim=256 hidden_dim=512 activation=gelu attention_dropout=0.1 stochastic_depth=0.1 steps=105300 batch=128
        learning_rate=0.0005 warmup=1755 weight_decay=0.03 clip=0.0 validate_every=3510 save_every=3510 workers=4 device=auto
    deit tiny: task=images scheme=lrpe-orthogonal height=0 width=0 margin=0 tokenizer=patches patch=4 pooling=mean
        augment=crop policy=none erasing=0.0 mixup=0.0 cutmix=0.0 repeats=1 smoothing=0.0 channels=0 classes=0
        validation_rows=0 layers=1 model_dim=32 heads=2 hidden_dim=64 activation=gelu steps=50 batch=32
        learning_rate=0.002 warmup=5 beta2=0.98 weight_decay=0.05 clip=0.0 validate_every=25 save_every=25 device=auto
    deit small: task=images scheme=lrpe-orthogonal height=0 width=0 margin=0 tokenizer=patches patch=4 pooling=mean
        augment=crop policy=none erasing=0.0 mixup=0.0 cutmix=0.0 repeats=1 smoothing=0.0 channels=0 classes=0
        validation_rows=0 model_dim=64 hidden_dim=128 activation=gelu steps=800 batch=32 learning_rate=0.002 warmup=80
        beta2=0.98 weight_decay=0.05 clip=0.0 validate_every=200 save_every=200 device=auto
    deit paper: task=images scheme=lrpe-orthogonal data=imagenet height=224 width=224 margin=0 tokenizer=patches patch=16
        pooling=mean augment=scale-flip policy=randaugment erasing=0.25 mixup=0.8 cutmix=1.0 repeats=3 smoothing=0.1
        channels=0 classes=0 validation_rows=0 layers=12 model_dim=384 heads=6 hidden_dim=1536 activation=gelu
        stochastic_depth=0.1 steps=240000 batch=1600 learning_rate=0.0005 warmup=16000 beta2=0.98 weight_decay=0.05
        clip=0.0 validate_every=8000 save_every=8000 workers=8 device=auto
    transduction tiny: task=transduction scheme=rope:attention=softmax languages= operation=reverse length=8 deviation=2
        tokenizer=words samples=500 held_out=50 data_seed=0 longest=0 tied=True validation_rows=0 decoded=200 steps=50
        batch=32 layers=1 model_dim=32 heads=2 learning_rate=0.002 device=auto
    transduction small: task=transduction scheme=rope:attention=softmax languages= operation=reverse length=16 deviation=2
        tokenizer=words samples=4000 held_out=500 data_seed=0 longest=0 tied=True validation_rows=0 decoded=200 steps=600
        batch=32 layers=2 model_dim=64 learning_rate=0.002 device=auto
    transduction paper: task=transduction scheme=rope:attention=softmax languages= operation=reverse length=100 deviation=10
        tokenizer=words vocabulary=20 samples=10000 held_out=1000 data_seed=0 longest=0 tied=True validation_rows=0
        decoded=0 steps=31200 warmup=1560 batch=64 layers=2 model_dim=512 hidden_dim=2048 heads=8 learning_rate=0.0005
        clip=0.0 validate_every=780 save_every=780 device=auto
    tree-transduction tiny: task=tree-transduction scheme=ape-tree:attention=softmax operation=rotation order=breadth
        source_order=same depth=3 deviation=1 labels=0 branches=0 samples=300 held_out=30 data_seed=0 longest=0 tied=True
        validation_rows=0
        decoded=200 steps=30 batch=32 layers=1 model_dim=32 heads=2 learning_rate=0.002 device=auto
    tree-transduction small: task=tree-transduction scheme=ape-tree:attention=softmax operation=rotation order=breadth
        source_order=same depth=4 deviation=1 labels=0 branches=0 samples=4000 held_out=500 data_seed=0 longest=0 tied=True
        validation_rows=0
        decoded=200 steps=400 batch=32 layers=2 model_dim=64 learning_rate=0.002 device=auto
    tree-transduction paper: task=tree-transduction scheme=ape-tree:attention=softmax operation=rotation order=breadth
        source_order=breadth depth=7 deviation=1 labels=0 branches=0 samples=6000 held_out=2000 data_seed=0 longest=0
        tied=True
        validation_rows=0 decoded=0 steps=37200 warmup=1860 batch=64 layers=2 model_dim=512 hidden_dim=2048 heads=8
        learning_rate=0.0005 clip=0.0 validate_every=930 save_every=930 device=auto
    compare: task=language schemes=none,sinusoidal,rope,lrpe-unitary,lrpe-orthogonal,permuteformer,retnet attention=linear
        seeds=1 name= overwrite=False ray=
    table: scale=small seeds=1 steps=0 rows= data=() name= device=auto dry_run=False ray=
    train: recipe=quickstart scale=small name= resume=False overwrite=False named=quickstart
    check: head_dim=16 heads=4 dtype=float32
    show: out= overwrite=False head_dim=64 heads=8 reach=64
    eval: split=validation length=() scored=0.0 limit=-1 view=() extend= other_data=False
    generate: prompt=The tokens=400 temperature=1.0 top_p=1.0 seed=0
    runs: folder=runs
    bench: section=all device=cpu state=all rounds=9 out= overwrite=False resume=False compiled=False
"""


def _declared():
    """What recipes are beside the default one, and the plain options of commands."""
    plain = Recipe().as_dict()
    yield "Recipe", plain
    recipes = {"bidirectional": preset("bidirectional", "small")}
    recipes |= {f"{name} {scale}": preset(name, scale) for name in RECIPES for scale in SCALES}
    for name, recipe in recipes.items():
        yield name, {field: value for field, value in recipe.as_dict().items() if plain.get(field) != value}
    for command in COMMANDS:
        options = dataclasses.fields(importlib.import_module(f"isopos.lab.commands.{command}").Options)
        yield command, {one.name: one.default for one in options if isinstance(one.default, int | float | str | tuple)}


def test_a_name_keeps_its_meaning():
    """What recipes and commands do by default, which results refer to, is changed here, too, or not at all."""
    lines = DECLARED.replace("\n        ", " ").strip().splitlines()
    written = {name.strip(): {*rest.split()} for name, _, rest in (line.partition(": ") for line in lines)}
    found = {name: {"".join(f"{field}={value}".split()) for field, value in values.items()} for name, values in _declared()}
    assert {name: words for name, words in found.items() if words} == written


PERMUTEFORMER = {  # layers, width, feed-forward, heads, dropout; batch, epochs, learning rate, warm-up
    "text": (6, 512, 2048, 8, 0.1, 16, 10, 1e-5, 4000),
    "retrieval": (4, 128, 512, 4, 0.1, 32, 10, 2e-4, 1000),
    "image": (3, 64, 128, 4, 0.3, 256, 50, 1e-2, 200),
    "pathfinder": (4, 128, 128, 8, 0.1, 256, 80, 5e-4, 4000),
}
SAMPLES = {"text": 25_000, "retrieval": 147_086, "image": 50_000, "pathfinder": 160_000}


@pytest.mark.parametrize("name", PERMUTEFORMER)
def test_sizes_of_permuteformer_are_its_authors(name):
    """Sizes: long_range_arena/configs/performer_*relative_*.json of github.com/cpcp1998/PermuteFormer; the rest: Table 5."""
    recipe = preset(f"permuteformer-{name}", "paper")
    m, t = recipe.model, recipe.training
    sizes = (m.layers, m.model_dim, m.hidden_dim, m.heads, m.dropout)
    *expected, batch, epochs, learning_rate, warmup = PERMUTEFORMER[name]
    assert sizes == tuple(expected)
    assert (t.batch, t.learning_rate, t.warmup) == (batch, learning_rate, warmup)
    assert t.steps == epochs * SAMPLES[name] // batch
    assert (m.activation, t.optimizer, t.schedule, t.weight_decay, t.clip) == ("gelu", "adam", "inverse-sqrt", 0, 0)
    for table, fields in (("permuteformer-1", ()), ("permuteformer-2", expected[:4]), ("permuteformer-3", expected[:4])):
        found = load_table(table).recipe_at("paper", load_table(table).corpus(name)).model
        assert (
            found == m
            if table == "permuteformer-1"
            else [found.layers, found.model_dim, found.hidden_dim, found.heads] == fields
        )


def test_the_arenas_pathfinder_has_the_settings_of_its_data():
    """`curv_contour_length_14` of Linsley et al.'s generator: contours of 14 dashes, distractors of a third, here 5."""
    for name in ("lra-pathfinder", "permuteformer-pathfinder"):
        task = preset(name, "paper").task
        assert (task.side, task.dashes, task.dashes // 3, task.distractors) == (32, 14, 4, 5)


@pytest.mark.parametrize("spec", ["rope", "rope:decay=retnet", "lrpe-unitary:basis=fourier,learned=true"])
def test_split_and_join_are_inverse(spec):
    assert join_spec(*split_spec(spec)) == spec


@pytest.mark.parametrize("text", ["", " , ", "rope,rope", "rope:a=1,rope:a=1", "rope,rope:", "rope,rope:attention=softmax"])
def test_bad_lists(text):
    with pytest.raises(ValueError, match="schemes"):
        Options(schemes=text, attention="softmax").recipes()


@pytest.mark.parametrize("spec", ["rope:decay", "rope:=x", "rope:decay="])
def test_bad_options(spec):
    with pytest.raises(ValueError, match="option=value"):
        split_spec(spec)


def test_options_may_use_dashes():
    assert split_spec("rope:rotary-dim=8")[1] == {"rotary_dim": "8"}


IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *{"torch", "matplotlib"} & {*sys.modules})
"""


def test_torch_is_not_imported_for_help():
    modules = "isopos.catalog", "isopos.lab.recipes", "isopos.lab.reports.comparison", "isopos.cli"
    done = subprocess.run([sys.executable, "-c", IMPORTS, *modules], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == list(modules), done.stderr
