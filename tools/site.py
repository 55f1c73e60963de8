"""The site: `python -m tools.site` stages the pages in build/docs, builds site/ from them and checks it, without a network.

Staged are README as the first page, docs/, the project's own pages, a gallery of the schemes' kernels, and the API from
docstrings. Checked: every tutorial runs, every link, anchor and picture is there, and nothing is loaded from outside.
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
from isopos.schemes import REGISTRY, Scheme
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
    "laboratory": ("lab", "lab.tasks.task", "lab.recipes"),
}
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
        subprocess.CalledProcessError: Where zensical finds a page that is missing or a configuration that is wrong.
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
        _rewrite(path, r"\Z", "\n![Validation by update, a line a row](curves.svg)\n")
    _gallery()
    _api()
    shutil.rmtree(BUILT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=True)
    for path in BUILT.rglob("*.html"):
        _rewrite(path, r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', _formula)


def _rewrite(path: Path, pattern: str, by: str | Callable[[re.Match[str]], str]) -> None:
    path.write_text(re.sub(pattern, by, path.read_text(encoding="utf-8"), flags=re.S), encoding="utf-8")


def _formula(found: re.Match[str]) -> str:
    """MathML, which browsers draw themselves."""
    from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports]

    return convert(unescape(found[2]), display="block" if found[1] == "div" else "inline")


def _gallery() -> None:
    """A picture of each scheme's kernel, with its laws and its exactness, ahead of the tables of docs/schemes.md."""
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
    "The score of a query with a key that resembles it, by their offset: of lines and rings as a curve, with its even part "
    "(blind to direction) and its odd part; of grids as a map; of trees, and of what sees absolute positions, as a matrix. "
    "`isopos show NAME` draws one in full.\n",
    '<div class="gallery" markdown="block">',
)


def _picture(scheme: Scheme, path: Path) -> None:
    """The kernel of a scheme, small."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from isopos.lab.reports.kernels import fill_zeros, panels
    from isopos.lab.reports.plots import draw

    fill_zeros(scheme)
    shown = list(panels(scheme))
    figure = Figure(figsize=(4.6 * len(shown), 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        draw(axes, panel, scheme, alone=len(shown) == 1)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, bbox_inches="tight")


def _table(page: str, *titles: str) -> Rows:
    """The rows of the table of a page whose first titles are these."""
    return next(rows[1:] for rows in tables(ROOT / "docs" / page) if rows[0][: len(titles)] == [*titles])


def _api() -> None:
    """A page a room, of the public names of its modules."""
    (STAGED / "api").mkdir()
    for page, modules in API.items():
        lines = [f"# API: {page}\n"]
        if page == "schemes":
            lines += (f"::: isopos.{function.__name__}\n" for function in REGISTRY.values())
        for module in (importlib.import_module(f"isopos.{name}") for name in modules):
            lines += [f"## {module.__name__}\n", f"{(module.__doc__ or '').strip()}\n"]
            own = (
                n for n, one in vars(module).items() if n[0].isupper() and getattr(one, "__module__", "") == module.__name__
            )
            names = getattr(module, "__all__", None) or own
            lines += (f"::: {module.__name__}.{name}\n" for name in names)
        (STAGED / "api" / f"{page}.md").write_text("\n".join(lines), encoding="utf-8")


class _Page(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.mute: list[str] = []  # pictures without a text beside them
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to."""
        said = {name: value or "" for name, value in attrs}
        self.anchors |= {said[name] for name in ("id", "name") if name in said}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in said:
            self.loads.append(said["src"])
        elif tag == "link" and said.get("rel") != "canonical" and "href" in said:
            self.loads.append(said["href"])
        if tag == "img" and not said.get("alt"):
            self.mute.append(said.get("src", ""))


def broken(folder: Path) -> list[str]:
    """A line for each link, anchor, picture or text that is missing in the pages of a site, and what comes from outside."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    if not pages:
        raise ValueError(f"site: expected pages in {folder}, got none; python -m tools.site builds them")
    found = []
    for path, page in pages.items():
        where = path.relative_to(folder.resolve())
        found += [f"{where}: picture without a text: {source}" for source in page.mute]
        found += [f"{where}: loads from outside: {one}" for one in page.loads if urlsplit(one).netloc]
        for one in (*page.links, *page.loads):
            url = urlsplit(one)
            if url.scheme or url.netloc:
                continue
            target = path if not url.path else (path.parent / unquote(url.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if where.name == "404.html" or not target.exists():
                found += [f"{where}: no such page: {one}"] * (where.name != "404.html")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                found.append(f"{where}: no such anchor: {one}")
    return found


def main() -> None:
    """Run the tutorials, build, check; exits with 1 where something is wrong."""
    from tools import tutorials

    failed = [line for page in tutorials.pages() for line in tutorials.run(page)]
    build()
    failed += broken(BUILT)
    print(*failed or [f"{BUILT / 'index.html'}: every tutorial runs and every link leads somewhere"], sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
