import subprocess
import sys

import pytest

from isopos.lab.commands.compare import Options
from isopos.lab.recipes import RECIPES, SCALES, Recipe, Training, join_spec, preset, split_spec
from isopos.lab.tasks.language import Language


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


@pytest.mark.parametrize("module", ["isopos.lab.recipes", "isopos.cli", "isopos.lab.reports.comparison", "isopos.catalog"])
def test_torch_is_not_imported_for_help(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
