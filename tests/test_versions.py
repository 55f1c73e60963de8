"""What isopos says of the versions it runs on, and whose warnings stop its tests."""

import warnings

import pytest


def warn(module):
    warnings.warn_explicit("old", DeprecationWarning, f"{module}.py", 1, module)


def test_a_warning_of_our_own_is_an_error():
    with pytest.raises(DeprecationWarning):
        warn("isopos.maps")


def test_one_of_a_library_is_none():
    with warnings.catch_warnings(record=True) as seen:
        warn("torch.jit._script")
    assert [str(warning.message) for warning in seen] == ["old"]
