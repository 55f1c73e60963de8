"""Test the errors of `make docs`: links, anchors, pictures, external resources, and failing code of pages."""

import re

import pytest

import isopos
from tools import site, tutorials

pytestmark = pytest.mark.skipif(not (site.ROOT / "docs").exists(), reason="docs/ is part of the repository only")
GOOD = (
    '<h1 id="top">A</h1><a href="b/#there">b</a><a href="#top">a</a><a href="https://x.org">x</a><img src="p.svg" alt="p">'
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "p.svg").write_text("<svg/>")
    (tmp_path / "b" / "index.html").write_text('<h2 id="there">B</h2><a href="../">back</a>')
    return tmp_path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", []),
        ('<a href="c/">c</a>', ["no such page: c/"]),
        ('<a href="b/#nowhere">b</a>', ["no such anchor: b/#nowhere"]),
        ('<a href="#nowhere">b</a>', ["no such anchor: #nowhere"]),
        ('<img src="q.png" alt="q">', ["no such page: q.png"]),
        ('<img src="p.svg">', ["picture without a text: p.svg"]),
        ('<script src="https://cdn.org/x.js"></script>', ["loads from outside: https://cdn.org/x.js"]),
        ('<link rel="stylesheet" href="//cdn.org/x.css">', ["loads from outside: //cdn.org/x.css"]),
    ],
)
def test_what_is_broken_is_said(folder, more, said):
    (folder / "index.html").write_text(GOOD + more)
    assert site.broken(folder) == [f"index.html: {line}" for line in said]


def test_no_site_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"expected pages in .*got none"):
        site.broken(tmp_path)


PAGE = """# A page

```python
n = 2
print(n)
```

```text
2
```

    print("not run")

  ```python
  print(n + 1)
  ```

```py
print("not run either")
```
"""


def test_the_code_of_a_page_stands_at_its_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    code, said = tutorials.script(page)
    assert code.splitlines()[3:5] == ["n = 2", "print(n)"]
    assert code.splitlines()[14] == "print(n + 1)"
    assert "not run" not in code
    assert said == "2"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("print(n + 1)", "pass", None),
        ("print(n + 1)", "print(n + 1)", "expected the output\n2\ngot\n2\n3"),
        ("print(n + 1)", "raise RuntimeError('no')", 'File "<stdin>", line 15'),
    ],
)
def test_a_page_is_run(tmp_path, monkeypatch, before, after, said):
    monkeypatch.setattr(tutorials, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(before, after))
    found = list(tutorials.run(page))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_every_tutorial_has_code():
    named = {page.name for page in tutorials.pages()}
    assert {page.name for page in (site.ROOT / "docs" / "tutorials").glob("*.md")} | {"README.md", "uses.md"} <= named


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<p>As <q, rho(y) k> = 1</p>", "<p>As &lt;q, rho(y) k&gt; = 1</p>"),
        ('<a href="x,y">a, b</a><br><td>', '<a href="x,y">a, b</a><br><td>'),
    ],
)
def test_inner_products_are_no_tags(before, after):
    assert re.sub(site.INNER_PRODUCT, r"&lt;\1&gt;", before) == after


def test_the_index_names_docstrings():
    assert site._first_sentence("isopos.alibi") == isopos.alibi.__doc__.split("\n\n")[0].strip()
    assert site._first_sentence("isopos.feature_maps.FEATURE_MAPS") == ""
