"""Test defaults: none is random, learned, causal or of low precision, and numbers come from papers or released code."""

import importlib
import inspect
import pkgutil

import torch

import isopos

LEARN = {("Exponential", "learned"), ("TreePath", "learned"), ("T5", "bidirectional"), ("Finding", "is_law")}
LEARN |= {
    ("Circulant", "learned"),
    ("Lie", "learned"),
    ("Commuting", "learned"),
    ("RankTwo", "learned"),
    ("Finding", "measured"),
    ("Yarn", "truncate"),
}  # and what else is true by default
NUMBERS = {
    ("rope_frequencies", "base"): 10000.0,
    ("Jordan", "order"): 1,
    ("Jordan", "length"): 1024.0,
    ("T5", "buckets"): 32,
    ("T5", "max_distance"): 128,
    ("DeBERTa", "buckets"): 256,
    ("DeBERTa", "max_distance"): 512,
    ("ClippedKeys", "reach"): 8,
    ("Shaw", "reach"): 16,
    ("ConvSPE", "reach"): 8,
    ("SineSPE", "sines"): 5,
    ("Sinusoidal", "scale"): 1.0,
}
WORDS = {
    ("linear_attention", "denominator"): "plain",
    ("linear_attention", "layout"): "bhtd",
    ("softmax_attention", "layout"): "bhtd",
    ("naive_linear_attention", "denominator"): "plain",
    ("random_permutations", "orders"): "random",
    ("Absolute", "side"): "key",
    ("Scheme", "attention"): "linear",
    ("Linear", "feature_map"): "auto",
    ("Linear", "denominator"): "auto",
    ("Scheme", "decay"): "none",
}


def declared():
    """Arguments with a default, of public functions and of public methods of public classes."""
    for module in pkgutil.walk_packages(isopos.__path__, "isopos."):
        if module.name.startswith(("isopos.lab", "isopos.ops", "isopos.schemes", "isopos.cli", "isopos.__main__")):
            continue
        names = vars(importlib.import_module(module.name))
        for name in names.get("__all__", ()):
            one = names.get(name)
            functions = [one] if inspect.isfunction(one) else []
            if inspect.isclass(one):
                functions = [
                    f for key, f in vars(one).items() if inspect.isfunction(f) and key in ("__init__", "forward", "at")
                ]
            for function in functions:
                for argument in inspect.signature(function).parameters.values():
                    if argument.default is not argument.empty:
                        yield (name, argument.name), argument.default


def test_defaults():
    found = dict(declared())
    assert {name: found[name] for name in NUMBERS} == NUMBERS
    assert {name: found[name] for name in WORDS} == WORDS
    assert {name for name, value in found.items() if value is True} == LEARN
    assert {value for (_, argument), value in found.items() if argument == "seed"} == {0}
    assert {value for (_, argument), value in found.items() if argument == "dtype"} <= {torch.float32, None}
    assert {value for (_, argument), value in found.items() if argument.endswith("dropout")} == {0.0}
    assert {value for (_, argument), value in found.items() if argument == "outside"} == {0}
