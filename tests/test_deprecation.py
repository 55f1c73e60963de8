"""Names of before, at their new places."""

import importlib
import pkgutil
import re

import pytest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("isopos.attention.Attention", "isopos.nn.Attention"),
        ("isopos.attention.Steps", "isopos.nn.Steps"),
        ("isopos.attention.absorb", "isopos.nn.absorb"),
        ("isopos.attention.convert_layout", "isopos.nn.convert_layout"),
        ("isopos.lab.recipes.split_spec", "isopos.spec.split_spec"),
        ("isopos.lab.tables.loader.Line", "isopos.lab.tables.loader.TableRow"),
        ("isopos.lab.tasks.task.expect", "isopos.lab.tasks.task.require"),
        ("isopos.schemes.registry.Layout", "isopos.schemes.registry.PairLayout"),
        ("isopos.terms.Kernel", "isopos.terms.DistanceKernel"),
    ],
)
def test_a_name_of_before_is_found_with_a_warning(old, new):
    module, _, name = old.rpartition(".")
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(old)} is {re.escape(new)} now; the old name goes"):
        found = getattr(home, name)
    assert found is pkgutil.resolve_name(new)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}s'"):
        getattr(home, f"{name}s")
