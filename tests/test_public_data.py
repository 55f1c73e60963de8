"""Test the files of graphs and trees that docs/results was computed from."""

import gzip
import json

import pytest

from tools import public_data

COUNTIES = [{"arcs": [[0, 1]]}, {"arcs": [[3]]}, {"arcs": [[[2, ~1]]]}]  # the first and the third share arc 1
NOUNS = """  1 the licence
00000010 03 n 01 entity 0 001 ~ 00000020 n 0000 |
00000020 03 n 02 thing 0 object 0 003 @ 00000010 n 0000 + 00000099 v 0101 @i 00000030 n 0000 | with @ and n
00000030 03 n 01 class 0 000 |
"""


@pytest.mark.parametrize(
    ("kind", "text", "name", "edges"),
    [
        ("counties", json.dumps({"objects": {"counties": {"geometries": COUNTIES}}}), "us-counties.txt", "0 2\n"),
        ("wordnet", NOUNS, "wordnet-nouns.txt", "0 1\n0 2\n"),
    ],
)
def test_edges_are_those_of_the_source(tmp_path, kind, text, name, edges):
    (tmp_path / "source").write_text(text)
    public_data.main(kind, str(tmp_path / "source"), str(tmp_path / "new"))
    assert (tmp_path / "new" / name).read_text() == edges


@pytest.mark.parametrize(
    ("kind", "text", "tree", "image"),
    [
        ("sst", "(3 (2 A) (4 (2 (3 b) (1 c.)) (2 d)))\n(2 (2 e) (2 f))\n", "(3 2 (4 (2 3 1) 2))", "(3 (4 2 (2 1 3)) 2)"),
        (
            "listops",
            "7\t( ( ( [MAX 7 ) ( ( ( ( [MIN 2 ) ( ( ( [MAX 1 ) 3 ) ] ) ) 4 ) ] ) ) ] )\n5\t( ( [MAX 5 ) ] )\n",
            "(MAX 7 (MIN 2 (MAX 1 3) 4))",
            "(MAX (MIN 4 (MAX 3 1) 2) 7)",
        ),
    ],
)
def test_trees_are_those_of_the_source_and_their_images(tmp_path, kind, text, tree, image):
    with gzip.open(tmp_path / "source.gz", "wt") as file:
        file.write(text)
    public_data.main(kind, str(tmp_path / "source.gz"), str(tmp_path))
    assert (tmp_path / f"{kind}-copy.tsv").read_text() == f"{tree}\t{tree}\n"
    assert (tmp_path / f"{kind}-mirror.tsv").read_text() == f"{tree}\t{image}\n"


def test_wrong_arguments_write_nothing(tmp_path):
    for arguments, message in (
        (("trees", "a", "b"), "kind: expected series, .* got trees"),
        (("sst", "a"), "paths: expected FILE"),
    ):
        with pytest.raises(ValueError, match=message):
            public_data.main(arguments[0], *(str(tmp_path / name) for name in arguments[1:]))
    assert not [*tmp_path.iterdir()]
