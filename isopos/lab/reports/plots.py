"""Pictures of relative kernels: curves, maps and matrices, in colours for colour-blind readers."""

import io
import itertools
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from isopos.catalog import CATALOG
from isopos.encodings import Permutation
from isopos.lab.reports.kernels import REACH, Panel, fill_zeros, panels, paths
from isopos.lab.runs.files import printable, replacing
from isopos.positions import Ring
from isopos.schemes import Scheme, build, resolve
from isopos.spec import join_spec, split_spec

SUFFIXES = (".png", ".svg", ".pdf")
SCORE = {"linear": "weight, 1 = at the same position", "softmax": "logit, 0 = at the same position"}
TOTAL, EVEN, ODD, HEAD = "#000000", "#0072b2", "#d55e00", "#56b4e9"
STYLE = '<style type="text/css">'  # with which matplotlib begins its only style
DARK = (  # matplotlib writes colours into style attributes; those of data stay as they are
    "@media (prefers-color-scheme: dark) { text, use { fill: #ddd } [style*='fill: #ffffff'] { fill: #16181c !important } "
    "[style*='fill: #000000'], [style*='fill: #444444'] { fill: #ddd !important } "
    "[style*='stroke: #000000'] { stroke: #ddd !important } } "
)


def draw_kernel(
    scheme: str, out: str = "", *, head_dim: int = 64, heads: int = 8, reach: int = REACH, overwrite: bool = False
) -> Path:
    """Draw the relative kernel of a scheme with options into a file, by default named after it; return its path.

    Raises:
        ValueError: Before any work, if the scheme or the file name does not fit.
    """
    name, options = split_spec(scheme)
    spec, built = join_spec(name, options), build(name, head_dim, heads, options)
    if reach < 1:
        raise ValueError(f"reach: expected at least 1 step, got {reach}")
    path = _target(Path(out or spec.replace(":", "+").replace("/", "-") + ".png"), overwrite)
    randomised = fill_zeros(built)
    every_panel = list(panels(built, reach=reach))
    figure = Figure(figsize=(7.5 if len(every_panel) == 1 else 6.2 * len(every_panel), 5.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(every_panel), squeeze=False)[0], every_panel, strict=True):
        draw_panel(axes, panel, built, alone=len(every_panel) == 1)
    figure.suptitle("\n".join(_title(spec, built, every_panel, randomised)), fontsize=11)
    try:
        with replacing(path) as part:
            if path.suffix == ".svg":
                part.write_text(svg_text(figure), encoding="utf-8")
            else:
                figure.savefig(part, dpi=150, format=path.suffix[1:])
    except OSError as error:
        raise ValueError(f"out: cannot write {path}: {error.strerror}") from None
    return path


def _target(path: Path, overwrite: bool) -> Path:
    if path.is_dir():
        raise ValueError(f"out: expected a file, but {path} is a folder")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"out: expected a name that ends with {', '.join(SUFFIXES)}, got {path}")
    if path.exists() and not overwrite:
        raise ValueError(f"out: {path} exists; choose another with --out, or replace it with --overwrite")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"out: expected a folder that can be written into, but {path.parent} is none")
    return path


def _title(spec: str, scheme: Scheme, every_panel: list[Panel], randomised: bool) -> list[str]:
    choices = dict(scheme.choices)
    attention = choices.pop("attention")
    sums = [f"features {choices['feature_map']}", f"denominator {choices['denominator']}"]
    words = [f"{attention} attention", *sums * (attention == "linear"), f"decay {choices['decay']}"]
    orders = [module.common_order for module in scheme.modules() if isinstance(module, Permutation)]
    notes = [
        *(f"repeats after {order:,} positions" for order in orders),
        *(f"period {group.period}" for group in scheme.group.leaves if isinstance(group, Ring)),
    ]
    if not (scheme.phases or any(panel.directional for panel in every_panel)):
        notes.append("symmetric in the direction")
    if scheme.phases:
        notes.append("causal, later keys mirror earlier ones")
    if not all(panel.relative for panel in every_panel):
        notes.append("no relative kernel: scores depend on the positions themselves")
    if randomised:
        notes.append("tables that start at zero drawn at random")
    return [spec, ", ".join(words), CATALOG[resolve(split_spec(spec)[0])].citation, *filter(None, ["; ".join(notes)])]


def svg_text(figure: Figure, **options: Any) -> str:
    """The figure as text of an SVG file, light on dark for readers who prefer dark pages.

    Args:
        figure: Figure to draw.
        options: Further arguments of `Figure.savefig`.
    """
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "isopos"}):  # names of parts that do not change
        figure.savefig(buffer, format="svg", metadata=metadata, **options)
    return buffer.getvalue().replace(STYLE, STYLE + DARK, 1)


def draw_panel(axes: Axes, panel: Panel, scheme: Scheme, *, alone: bool) -> None:
    """Draw a panel: a curve for a line or ring, a map for a grid, a matrix for a tree; with a title unless `alone`."""
    if not alone:
        axes.set_title(f"along the {panel.group.noun}, the rest at the origin", fontsize=10)
    offset, row = panel.row()
    if panel.group.refers_to_rows or not panel.relative:
        draw_heat(axes, panel.score.mean(0), scheme.attention)
        if panel.group.refers_to_rows:
            labels = [path or "root" for path in paths(panel.position)]
            axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
            axes.set_yticks(range(len(labels)), labels, fontsize=8)
            axes.set(xlabel="key node: branches from the root", ylabel="query node")
    elif panel.group.columns > 1:
        reach = offset.abs().max(0).values.tolist()
        sides = [2 * r + 1 for r in reach]
        extent = (-reach[1] - 0.5, reach[1] + 0.5, reach[0] + 0.5, -reach[0] - 0.5)
        draw_heat(axes, row.mean(0).view(sides), scheme.attention, extent)
        axes.set(xlabel="offset on the second axis", ylabel="offset on the first axis")
    else:
        draw_curve(axes, offset, row, scheme.attention)


def draw_curve(axes: Axes, offset: Tensor, score: Tensor, attention: str) -> None:
    """Draw scores ``[h t]`` by offset ``[t 1]``: their mean over heads, its even and odd part, and each head faintly."""
    steps, heads, mean = (x.numpy() for x in (offset[:, 0], score, score.mean(0)))
    for n, head in enumerate(heads if len(heads) > 1 else ()):
        axes.plot(steps, head, color=HEAD, alpha=0.35, linewidth=0.8, label="each head" if n == 0 else None)
    parts = (mean + mean[::-1]) / 2, (mean - mean[::-1]) / 2
    axes.axhline(0, color="#888888", linewidth=0.8, zorder=0)
    axes.plot(steps, mean, color=TOTAL, linewidth=1.8, label="mean of heads" if len(score) > 1 else "score")
    axes.plot(steps, parts[0], "--", color=EVEN, linewidth=1.6, label="its even part")
    axes.plot(steps, parts[1], "-.", color=ODD, linewidth=1.6, label="its odd part")
    axes.set(xlabel="offset: key - query", ylabel=SCORE[attention])
    axes.margins(x=0)
    axes.legend(fontsize=9, frameon=False, ncols=2)
    plain(axes)


def draw_heat(axes: Axes, score: Tensor, attention: str, extent: tuple[float, ...] | None = None) -> None:
    """Draw a matrix of scores, query by key; colours diverge from zero if there are both signs."""
    image = axes.imshow(score.numpy(), extent=extent, **_colours(score))  # pyright: ignore[reportArgumentType]
    axes.set(xlabel="key position", ylabel="query position")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=axes, label=SCORE[attention], shrink=0.9)


def _colours(score: Tensor) -> dict[str, Any]:
    """Colours that diverge from zero if there are scores of both signs."""
    low, high = score.min().item(), score.max().item()
    if low < 0 < high:
        limit = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    return {"cmap": "viridis", "vmin": low, "vmax": high}


def draw_tree(axes: Axes, panel: Panel, attention: str) -> None:
    """Draw the tree of a panel, each node coloured by its mean score as a key of the node with a ring."""
    parents, branches = panel.position.T.tolist()
    children = [[n for n, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    across, down, leaves = [0.0] * len(parents), [0] * len(parents), itertools.count()
    for node in reversed(range(len(parents))):  # rows follow their parents'
        across[node] = statistics.mean(across[child] for child in children[node]) if children[node] else -next(leaves)
    for node, parent in enumerate(parents):
        if parent >= 0:
            down[node] = down[parent] - 1
            ends = [across[parent], across[node]], [down[parent], down[node]]
            axes.plot(*ends, color="#888888", linewidth=1, zorder=1)
            middle = [sum(pair) / 2 for pair in ends]
            axes.text(middle[0], middle[1], str(branches[node]), fontsize=7, color="#444444")
    query = len(parents) // 2
    score = panel.score.mean(0)
    axes.scatter(across, down, c=score[query].numpy(), s=140, zorder=2, **_colours(score))
    axes.scatter(across[query], down[query], s=260, facecolors="none", edgecolors=ODD, linewidths=1.8, zorder=3)
    axes.set_title(f"{SCORE[attention]}, of the node in the ring with each", fontsize=9)
    axes.set_axis_off()


def line_style(n: int) -> dict[str, Any]:
    """Style of the n-th line of a picture: ten colours, then the same with dashes."""
    return {"color": colormaps["tab10"](n % 10), "linestyle": ("-", (0, (6, 2)), (0, (1, 2)))[n // 10 % 3]}


def literal(name: str) -> str:
    """A name with its $ escaped, so that matplotlib does not read it as mathematics."""
    return printable(name).replace("$", r"\$")


def plain(axes: Axes) -> None:
    """Remove the frame's top and right, add a faint grid; ticks are integers if all x values are."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    if all((np.asarray(line.get_xdata(), float) % 1 == 0).all() for line in axes.get_lines()):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
