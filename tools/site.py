"""The site: `python -m tools.site` stages the pages in build/docs, builds site/ from them and checks it, without a network.

The pages are README as the home page, docs/, the project's pages, a gallery of the schemes' kernels, the catalogue of the
explorer, and the API from docstrings. The check requires that every tutorial runs, that every link, anchor and picture
exists, and that nothing is loaded from another host.
"""

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from isopos.catalog import CATALOG
from isopos.lab.reports.grids import markdown
from isopos.schemes import REGISTRY, Scheme
from tools import explorer
from tools.pages import ROOT, Rows, tables

__all__ = ["BUILT", "broken", "build"]

STAGED, BUILT = ROOT / "build" / "docs", ROOT / "site"
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
API = {  # a page, and the modules of isopos on it
    "schemes": ("scheme", "kinds", "schemes"),
    "attention": ("attention", "stream", "nn", "state", "parallel", "ops.linear"),
    "encodings": ("encodings", "generators", "contragredient", "couplings", "maps", "bases", "lengths"),
    "biases": ("decays", "phases", "biases", "terms", "embeddings"),
    "positions": ("positions", "poses", "graphs"),
    "features": ("feature_maps",),
    "laws": ("laws",),
    "audit": ("audit", "testing"),
    "models": ("models",),
    "transformers": ("integrations.transformers",),
    "runtimes": ("integrations.onnx", "integrations.program", "integrations.arrays"),
    "laboratory": ("lab", "lab.tasks.task", "lab.recipes"),
}
INNER_PRODUCT = r'<([A-Za-z][^<>="/]*,[^<>="]*)>'  # Python-Markdown takes <q, k> for a tag
CARD = """\
<figure markdown="span" id="{name}">
[![{alt}](gallery/{name}.svg){{ loading=lazy }}](gallery/{name}.svg)
<figcaption markdown="span">
[`{name}`][{function}]: {summary}<br>`{equation}`<br>Laws: {laws}. Worst error {error}.
</figcaption>
</figure>
"""


def build() -> None:
    """Stage the pages and build the site.

    Raises:
        subprocess.CalledProcessError: If zensical finds a missing page or a wrong configuration.
    """
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGED)
    shutil.copy(ROOT / "README.md", STAGED / "index.md")
    for name in PROJECT:
        shutil.copy(ROOT / name, STAGED / name)
    for name in ("index.md", *PROJECT):
        _rewrite(STAGED / name, r'(\]\(|href="|src=")docs/', r"\1")
    for path in STAGED.rglob("*.md"):
        up = "../" * (len(path.relative_to(STAGED).parts) - 1)
        _rewrite(path, r"\]\((?:\.\./)+([A-Z]+\.md)", rf"]({up}\1")
    for path in STAGED.glob("results/*/table.md"):
        _rewrite(path, r"\Z", "\n![Validation by update, one line per row](curves.svg)\n")
    _gallery()
    (STAGED / "assets" / "explorer-data.js").write_text(explorer.script(explorer.catalogue()), encoding="utf-8")
    _api()
    shutil.rmtree(BUILT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=True)
    for path in BUILT.rglob("*.html"):
        _rewrite(path, INNER_PRODUCT, r"&lt;\1&gt;")
        _rewrite(path, r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', _formula)


def _rewrite(path: Path, pattern: str, by: str | Callable[[re.Match[str]], str]) -> None:
    path.write_text(re.sub(pattern, by, path.read_text(encoding="utf-8"), flags=re.S), encoding="utf-8")


def _formula(match: re.Match[str]) -> str:
    """A formula as MathML, which browsers draw without scripts."""
    from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports]

    return convert(unescape(match[2]), display="block" if match[1] == "div" else "inline")


def _gallery() -> None:
    """Insert pictures of the schemes' kernels, with laws and errors, before the tables of docs/schemes.md."""
    (STAGED / "gallery").mkdir()
    laws = {row[0].strip("`"): row[3] for row in _table("schemes.md", "name", "direction")}
    errors = {row[0]: row for row in _table("exactness.md", "scheme", "linear f64")}
    cards = []
    for name, entry in CATALOG.items():
        _picture(REGISTRY[name](64, 8), STAGED / "gallery" / f"{name}.svg")
        function, row = REGISTRY[name], errors[name]
        cards.append(
            CARD.format(
                name=name,
                alt=f"Scores of {name} by position: {entry.summary}",
                function=f"isopos.{function.__name__}",
                summary=entry.summary,
                equation=entry.equation,
                laws=laws[name],
                error=f"{row[2] if row[2] != '-' else row[6]} in float32",
            )
        )
    _rewrite(STAGED / "schemes.md", "(?=\n## Families)", lambda _: "\n".join(("", *GALLERY, *cards, "</div>", "")))


GALLERY = (
    "## Gallery\n",
    "The score of a query and a similar key by their offset. Lines and rings have a curve, with its even part (symmetric in "
    "the direction) and its odd part; grids have a map; trees, and schemes of absolute positions, have a matrix. "
    "`isopos show NAME` draws a large one.\n",
    '<div class="gallery" markdown="block">',
)


def _picture(scheme: Scheme, path: Path) -> None:
    """Draw a small picture of a scheme's kernel."""
    from matplotlib.figure import Figure

    from isopos.lab.reports.kernels import fill_zeros, panels
    from isopos.lab.reports.plots import draw_panel, svg_text

    fill_zeros(scheme)
    every_panel = list(panels(scheme))
    figure = Figure(figsize=(4.6 * len(every_panel), 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(every_panel), squeeze=False)[0], every_panel, strict=True):
        draw_panel(axes, panel, scheme, alone=len(every_panel) == 1)
    path.write_text(svg_text(figure, bbox_inches="tight"), encoding="utf-8")


def _table(page: str, *titles: str) -> Rows:
    """The rows of a page's table whose first column titles are these."""
    return next(rows[1:] for rows in tables(ROOT / "docs" / page) if rows[0][: len(titles)] == [*titles])


def _api() -> None:
    """Write one page per entry of `API`, with the public names of its modules, and an index of all names."""
    (STAGED / "api").mkdir()
    index = ["# API: index\n", "Every public name with the first sentence of its docstring.\n"]
    for page, modules in API.items():
        lines = [f"# API: {page}\n"]
        sections = [("isopos", [function.__name__ for function in REGISTRY.values()])] if page == "schemes" else []
        lines += (f"::: isopos.{name}\n" for _, names in sections for name in names)
        for module in (importlib.import_module(f"isopos.{name}") for name in modules):
            lines += [f"## {module.__name__}\n", f"{(module.__doc__ or '').strip()}\n"]
            defined = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
            names = list(getattr(module, "__all__", None) or (name for name in defined if name[0].isupper()))
            lines += (f"::: {module.__name__}.{name}\n" for name in names)
            sections.append((module.__name__, names))
        (STAGED / "api" / f"{page}.md").write_text("\n".join(lines), encoding="utf-8")
        for module, names in sections:
            rows = [(f"[`{name}`]({page}.md#{module}.{name})", _first_sentence(f"{module}.{name}")) for name in names]
            index += [f"## {module}\n", markdown(("name", "what it is"), sorted(rows, key=lambda row: row[0].lower())), ""]
    (STAGED / "api" / "index.md").write_text("\n".join(index), encoding="utf-8")


def _first_sentence(path: str) -> str:
    """First sentence of the docstring of a public name; empty for values, which have none of their own."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    documented = isinstance(value, type) or (callable(value) and hasattr(value, "__name__"))
    return (value.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ") if documented else ""


class _Page(HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.without_alt: list[str] = []  # pictures without an alternative text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the references of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in values:
            self.loads.append(values["src"])
        elif tag == "link" and values.get("rel") != "canonical" and "href" in values:
            self.loads.append(values["href"])
        if tag == "img" and not values.get("alt"):
            self.without_alt.append(values.get("src", ""))


def broken(folder: Path) -> list[str]:
    """One line for each missing link target, anchor, picture or alternative text, and for each file from another host."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    if not pages:
        raise ValueError(f"site: expected pages in {folder}, got none; python -m tools.site builds them")
    errors = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        errors += [f"{name}: picture without a text: {source}" for source in page.without_alt]
        errors += [f"{name}: loads from outside: {link}" for link in page.loads if urlsplit(link).netloc]
        if name.name == "404.html":
            continue  # its links depend on the address that was not found
        for link in (*page.links, *page.loads):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = path if not url.path else (path.parent / unquote(url.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                errors.append(f"{name}: no such page: {link}")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                errors.append(f"{name}: no such anchor: {link}")
    return errors


def main() -> None:
    """Run the tutorials, build the site and check it; exit with 1 after an error."""
    from tools import tutorials

    errors = [line for page in tutorials.pages() for line in tutorials.run(page)]
    build()
    errors += broken(BUILT)
    print(*errors or [f"{BUILT / 'index.html'}: every tutorial runs and every link works"], sep="\n")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
