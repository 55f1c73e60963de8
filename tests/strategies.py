"""Hypothesis strategies of random calls, command lines and damaged files. The first value of each is the simplest.

The tests draw a few examples; `make fuzz` draws many, under the profile "fuzz" of conftest.py.
"""

import itertools
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

import isopos
from isopos.feature_maps import FEATURE_MAPS
from tools.record import OPTIONS

ODD = "meta fake zero neg subclass sparse strided expanded graph half double integer complex bool longer shorter deeper flat"
ODD += " empty nan inf list numpy none text number pair"
ARGUMENTS = "q k v isometry decay mask segments terms locality positions denominator feature_map"
TABLES = "meta fake zero neg subclass strided graph double nan inf"  # of maps and terms, which are not made by hand
OF = {"isometry": TABLES, "terms": TABLES, "positions": "meta"}
SCHEMES = ("none", *(name for name in isopos.schemes.REGISTRY if name != "none"), *OPTIONS.split())
CALL: dict[str, tuple[Any, ...]] = {
    "call": ("linear", "softmax", "naive", "stream-linear", "stream-softmax", "decoder", "explain"),
    "scheme": SCHEMES,
    "seed": tuple(range(10)),
    "batch": ((2,), (), (1,), (3,), (0,), (2, 3), (1, 2)),
    "heads": (2, 1, 4, 6),
    "shared": (1, 2, 3),  # query heads of a key head
    "t": (5, 1, 2, 3, 4, 6, 7, 8, 9, 13, 17, 31, 33, 63, 64, 65, 66, 96, 127, 128, 129, 130, 200, 0),
    "s": (None, 1, 2, 3, 4, 5, 7, 8, 13, 33, 64, 65, 100, 129, 0),  # keys; None is as many as queries
    "d": (8, 4, 6, 16, 12, 2, 10, 32, 64, 1, 7),
    "e": (None, 1, 2, 3, 5, 8, 16, 33, 0),  # features of values; None is as many as the scheme's
    "dtype": ("float32", "float64", "bfloat16", "float16"),
    "layout": ("contiguous", "transposed", "strided", "expanded", "offset", "packed", "reversed"),
    "phi": ("scheme", "favor", None, "own", *FEATURE_MAPS),
    "denominator": ("scheme", "plain", "encoded", "complex", None),
    "decay": ("scheme", None, "gentle", "steep", "zero", "one-head", "samples", "stairs"),
    "causal": (True, False),
    "mask": (None, "random", "left", "right", "nothing", "everything", "shared"),
    "segments": (None, "two", "many", "each", "int32", "samples", "pair"),
    "grad": (False, True),
    "scale": (1.0, 0.0, 1e-20, 1e-3, 30.0, 1e4),
    "far": (0, 2**31, -1000),
    "samples": (False, True),  # whether each sample has positions of its own
    "garbage": ("", "masked-nan", "masked-inf", "segment-nan", "segment-inf", "later-nan"),  # where no weight is
    "default": ("float32", "float64"),
    "mode": ("grad", "no_grad", "inference", "autocast"),
    "stream": (False, True),  # whether a stream keeps the state
    "odd": ("", *(f"{name}:{kind}" for name in ARGUMENTS.split() for kind in OF.get(name, ODD).split())),
}
"""The values of each argument of a call."""
SHARES = {"odd": 0.2, "default": 0.05, "mode": 0.15, "batch": 0.2, "scale": 0.15, "garbage": 0.2, "e": 0.2, "far": 0.15}
SHARES |= {"heads": 0.2, "shared": 0.15, "s": 0.25, "d": 0.4, "phi": 0.3, "denominator": 0.3, "stream": 0.2}


def calls() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a call that differ from the simplest ones, by name."""

    def field(name: str, values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
        usual = round(len(values) * (1 / SHARES.get(name, 0.5) - 1))  # so many times the first value beside all of them
        return st.sampled_from(values[:1] * usual + values)

    whole = st.fixed_dictionaries({name: field(name, values) for name, values in CALL.items()})
    return whole.map(lambda case: {name: value for name, value in case.items() if value != CALL[name][0]})


SMALL = "--data text.txt --length 16 --layers 1 --model-dim 8 --heads 2 --validation-tokens 200 --batch 2 --device cpu"
DONE = f"train quickstart --scale tiny --steps 2 --save-every 1 {SMALL}"
COMMANDS = (
    "list",
    "recommend images",
    "runs runs",
    "check rope --head-dim 8 --heads 2 --dtype float32",
    "check own:encoding",
    "show rope --out new.png --head-dim 8 --heads 2 --reach 5",
    "tables rope --format npz --out new.npz --head-dim 8 --heads 2 --length 5 --extend linear:factor=2",
    "tables rope --format gguf-keys --arch llama --head-dim 8",
    "eval runs/done --split validation --length 1 2 --scored 0.5 --limit 100",
    "generate runs/done --prompt abc --tokens 5 --temperature 0.5 --top-p 0.9 --seed 1",
    "table lengths --scale tiny --seeds 1 --rows rope --rates 1 2 --data text.txt --name new --device cpu --dry-run",
    "train --resume --name done --scale tiny --device cpu",
    "train quickstart --resume --name done --steps 3 --scale tiny",
    f"train quickstart --scale tiny --steps 2 --name new --scheme rope --seed 1 --save-every 1 {SMALL}",
    f"train lrpe-alm --scale tiny --steps 1 --name new --scheme none --cutoffs 100 --vocabulary 200 {SMALL}",
    f"train permuteformer-lm --scale tiny --steps 1 --dropout 0.1 --accumulate 2 --clip 0.5 {SMALL}",
    f"train quickstart --scale tiny --steps 1 --precision bfloat16 --optimizer adam --schedule polynomial --power 2 {SMALL}",
    f"train quickstart --scale tiny --steps 1 --warmup 1 --beta1 0.8 --beta2 0.9 --epsilon 1e-6 --weight-decay 0.1 {SMALL}",
    f"train quickstart --scale tiny --steps 2 --validate-every 1 --patience 1 --tokenizer words --logger csv {SMALL}",
    f"compare --schemes none,rope --seeds 1 --steps 1 --name new {SMALL}",
    f"compare --schemes rope:decay=retnet,lrpe-unitary --attention softmax --steps 1 --name new {SMALL}",
)
"""Command lines that are right, in the folder that workspace.py makes."""
NUMBERS = """
    -1 0 1 2 3 5 17 -2147483649 2147483648 9223372036854775807 9223372036854775808 18446744073709551616 1000000000
    99999999999999999999999999 0.5 -0.5 1e308 1e400 -1e400 nan inf -inf 1e-400 1_0 ٣ 0x10 +1 -0 1e3 True None 1,2
"""
SPECS = """
    rope: rope:decay rope:decay= rope:bogus=1 rope:base=nan rope:base=0 rope:base=-1 rope:rotary_dim=0 rope,rope , rop Rope
    rope:rotary_dim=99 rope:rope learned:length=4 learned:length=-1 learned:length=1000000000000 ape-ring:period=0 t5
    shaw:reach=-1 ape-product:parts=tree2 ape-product:parts= ape-product:parts=ring0+sequence horn-clipped:reach=1000000000
    permuteformer:width=1000000 lrpe-unitary:basis=none spe-sine:sines=0 spe-conv:reach=-3 none:feature_map=favor list
    own:encoding own:fails own:nothing own:exits own:number missing:x own: :own own:encoding:x json:dumps
"""
PATHS = """
    text.txt empty.txt missing.txt . folder / /dev/null /proc/self/mem runs runs/done runs/done/model.safetensors loop
    binary.bin long.txt text.txt/x ../up .hidden ~ hf: hf:x hf:x:y:z bad.zip bad.tar.gz bad.toml new.gif new new.svg
"""
TEXTS = ["", " ", "é", "日本語", "\u202egnp", "\x1b[31mred", "[red]x[/]", "[/]", "%s%d", "{0}{x}", "a\nb", "\t", "\udcff"]
TEXTS += [*string.punctuation, "--", "-x", "--bogus", "a" * 300, "x/y", "..", "$(x)", "con", "a b", "é" * 200]
FLAGS = (
    "help name seed seeds steps length overwrite resume scale scheme schemes data device devices nodes dropout batch heads"
)
FLAGS += " layers hidden-dim recompute no-recompute workers cutoffs out split"
COUNTS = ("--steps", "--seeds", "--workers", "--devices", "--nodes")  # large ones would take for ever, or the machine


def _values(flag: str) -> st.SearchStrategy[str]:
    """Values that may follow a word of a command line."""
    if flag in COUNTS:
        return st.sampled_from(["-1", "0", "1", "2", "x", "", "nan", "0.5", "-9999999999"])
    specs, paths, texts = st.sampled_from(SPECS.split()), st.sampled_from(PATHS.split()), st.sampled_from(TEXTS)
    others = st.sampled_from(NUMBERS.split()) | texts | specs | paths
    if flag in ("--scheme", "--schemes", "check", "show"):
        return specs | others
    if flag in ("--data", "--name", "--out", "eval", "generate", "runs", "table", "train"):
        return paths | texts | others
    return others


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Words of a valid command line, with some changes."""
    words = draw(st.sampled_from(COMMANDS)).split()
    for change in draw(st.lists(st.sampled_from(["value", "value", "gone", "flag", "again"]), max_size=3)):
        n = draw(st.integers(1, len(words)))
        if change == "value" and n < len(words):
            n += words[n].startswith("--") and n + 1 < len(words)
            words[n] = draw(_values(words[n - 1]))
        elif change == "gone":
            del words[n : n + 1]
        elif change == "flag":
            flag = f"--{draw(st.sampled_from(FLAGS.split()))}"
            words[n:n] = [flag, *draw(st.lists(_values(flag), max_size=1))]
        elif change == "again":
            words.insert(n, draw(st.sampled_from(words)))
    assume(not any(flag in COUNTS and len(value) > 2 and value.isdecimal() for flag, value in itertools.pairwise(words)))
    return words


READERS = {  # commands that read runs, each with the folder that it reads
    "runs": ("runs", ""),
    "eval": ("eval runs/done --limit 100", "done"),
    "eval-half": ("eval runs/half --limit 100", "half"),
    "eval-pair": ("eval runs/pair/rope-seed0 --limit 100", "pair/rope-seed0"),
    "resume": (f"{DONE} --resume --name half", "half"),
    "resume-done": (f"{DONE} --resume --name done", "done"),
    "report": ("report runs/pair", "pair"),
    "generate": ("generate runs/done --tokens 5", "done"),
}
VALUES: dict[str, Any] = {
    **{"null": None, "text": "plane", "list": [1, [2]], "map": {"a": {}}, "true": True, "negative": -1, "huge": 10**30},
    **{"zero": 0, "half": 0.5, "nan": float("nan"), "infinity": float("inf"), "empty": "", "million": 10**9},
    "markup": "[red]\x1b[31m[/]",
}
BYTES = "truncate clear missing folder flip zeros append utf16 latin1 loop fifo endless swap deep"
FIELDS = [*(f"all-{name}" for name in VALUES), *(f"field-{name}" for name in VALUES), "field-gone", "field-new"]


class Damage(NamedTuple):
    """A command that reads runs, and damage to one of their files: its kind, and its place as a share of the length."""

    command: str
    file: str
    kind: str
    at: float


def damages(files: Sequence[str]) -> st.SearchStrategy[Damage]:
    """Damage to any of these files, mostly to one that the command reads."""

    def of(command: str) -> st.SearchStrategy[Damage]:
        read = [file for file in files if file.startswith(READERS[command][1])] or files
        file = st.sampled_from(read) | st.sampled_from(read) | st.sampled_from(files)
        kinds = st.sampled_from(BYTES.split()) | st.sampled_from(FIELDS)
        return st.builds(Damage, st.just(command), file, kinds, st.integers(0, 999).map(lambda n: n / 1000))

    return st.sampled_from([*READERS]).flatmap(of)
