import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

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
        ValueError, match=r"expected one of scheme, seed, data, .*, sequence_keys, got 'stesp'; did you mean steps\?$"
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


DECLARED = Path(__file__).with_name("declared.txt").read_text(encoding="utf-8")
"""Fields of recipes, other than the default one's, and plain options of commands."""


def _declared():
    """Yield the fields in which recipes differ from the default one, and the plain options of commands."""
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
    """Published results refer to the defaults of recipes and commands. A changed default needs a change here, too."""
    lines = DECLARED.replace("\n    ", " ").splitlines()
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
