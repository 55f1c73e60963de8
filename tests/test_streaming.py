"""Test that files of samples are read once, line by line, and memory-mapped, with constant memory."""

import random
import sys

import pytest
from forks import Forked

from isopos.lab.data import cache
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.listops import ListOps
from isopos.lab.tasks.transduction import Transduction
from isopos.lab.tasks.tree_transduction import TreeTransduction
from isopos.lab.tasks.trees import TreeClasses

TASKS = {"listops": ListOps, "tree-transduction": TreeTransduction, "transduction": Transduction, "trees": TreeClasses}
BYTES = {"listops": 3, "tree-transduction": 8, "transduction": 3, "trees": 12}
"""Of peak memory, a token, at most: of the map 1, 4, 1, and 9 with nodes, and a few numbers a row."""


def written(kind, folder, rows):
    """The path of a file of random samples."""
    draw, path = random.Random(0), folder / f"{rows}.tsv"
    with open(path, "w") as file:
        for n in range(rows):
            digits = [draw.randrange(10) for _ in range(40)]
            words = " ".join(map(str, digits))
            other = f"(c {n % 7} (a {words} (b 1)))"
            line = {
                "listops": f"{sum(digits) % 10}\t[SM {words} ]",
                "tree-transduction": f"(a {words} (b 1))\t{other}",
                "transduction": f"{words}\t{words} {n % 7}",
                "trees": f"{digits[0]}\t{other}",
            }[kind]
            print(line, file=file)
    return str(path)


def read(kind, path):
    """Print the tokens of a file that a task reads, and the peak memory of this process in bytes."""
    import resource

    recipe = Recipe(task=TASKS[kind](data=path)).edit(batch=8)
    data = recipe.task.load(recipe)
    recipe = data.infer(recipe)
    for step in range(50):
        data.batch(recipe, step)
    unit = 1 if sys.platform == "darwin" else 1024
    print(sum(int(sizes.sum()) for sizes in data.sizes.values()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_memory_hardly_grows_with_a_file(kind, tmp_path):
    pytest.importorskip("resource", reason="this system does not tell peak memory")
    found = []
    for rows in (2_000, 22_000):
        path, environment = written(kind, tmp_path, rows), {"ISOPOS_CACHE": str(tmp_path / "cache")}
        out, _ = Forked(tmp_path, read, kind, path, environment=environment).communicate(timeout=300)
        found.append([int(number) for number in out.split()])
    (tokens, memory), (more_tokens, more_memory) = found
    assert more_tokens - tokens > 800_000
    growth = (more_memory - memory) / (more_tokens - tokens)
    assert growth < BYTES[kind], f"{growth} bytes a token"


@pytest.mark.parametrize("kind", TASKS)
def test_a_file_is_read_once_and_its_samples_are_maps(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    task = TASKS[kind](data=written(kind, tmp_path, 60))
    data = task.load(Recipe(task=task))
    monkeypatch.setattr(cache, "FileLock", None)  # which whoever prepares needs
    again = task.load(Recipe(task=task))
    assert again.sha256 == data.sha256
    for split, rows in again.sizes.items():
        assert (rows == data.sizes[split]).all()
