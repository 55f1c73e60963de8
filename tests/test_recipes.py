import subprocess
import sys

import pytest

from isopos.lab.recipes import Comparison, Recipe, join_spec, split_spec


def test_recipes_of_one_seed_differ_in_the_scheme_only():
    recipes = Comparison(schemes="none,rope", seeds=2, steps=5, data="x").recipes()
    assert [(r.scheme, r.seed) for r in recipes] == [("none", 0), ("rope", 0), ("none", 1), ("rope", 1)]
    assert all(r.steps == 5 and r.data == "x" for r in recipes)
    assert {k for k in recipes[0].as_dict() if recipes[0].as_dict()[k] != recipes[1].as_dict()[k]} == {"scheme"}


def test_attention_is_a_choice_of_each_scheme():
    recipes = Comparison(schemes="none,rope:attention=linear", attention="softmax").recipes()
    assert [r.scheme for r in recipes] == ["none:attention=softmax", "rope:attention=linear"]


def test_a_recipe_survives_json():
    import json

    recipe = Recipe(scheme="rope:decay=retnet", steps=3)
    assert Recipe(**json.loads(json.dumps(recipe.as_dict()))) == recipe


@pytest.mark.parametrize("spec", ["rope", "rope:decay=retnet", "lrpe-unitary:basis=fourier,learned=true"])
def test_split_and_join_are_inverse(spec):
    assert join_spec(*split_spec(spec)) == spec


@pytest.mark.parametrize("text", ["", " , ", "rope,rope", "rope:a=1,rope:a=1", "rope,rope:", "rope,rope:attention=softmax"])
def test_bad_lists(text):
    with pytest.raises(ValueError, match="schemes"):
        Comparison(schemes=text, attention="softmax").recipes()


@pytest.mark.parametrize("spec", ["rope:decay", "rope:=x", "rope:decay="])
def test_bad_options(spec):
    with pytest.raises(ValueError, match="option=value"):
        split_spec(spec)


def test_options_may_use_dashes():
    assert split_spec("rope:rotary-dim=8")[1] == {"rotary_dim": "8"}


@pytest.mark.parametrize("module", ["isopos.lab.recipes", "isopos.cli", "isopos.lab.table", "isopos.catalog"])
def test_torch_is_not_imported_for_help(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
