"""docs/kernels.svg, the picture of the README: `python -m tools.kernels_picture` writes it."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isopos.lab.reports.kernels import panels
from isopos.lab.reports.plots import EVEN, HEAD, ODD, draw_heat, draw_tree, plain, svg_text
from isopos.schemes import build
from tools.pages import ROOT

PATH = ROOT / "docs" / "kernels.svg"
PANELS = (
    ("rope", "rope: a line"),
    ("permuteformer", "permuteformer: decay"),
    ("ape-ring", "ape-ring: a ring"),
    ("retnet", "retnet: decay"),
    ("ape-grid", "ape-grid: a grid"),
    ("ape-tree", "ape-tree: a tree"),
)


def write() -> None:
    """Draw the kernels of six schemes with linear attention, with text that a phone shows at 10 pixels."""
    with rc_context({"font.size": 11, "axes.titlesize": 11, "svg.hashsalt": "isopos"}):
        figure = Figure(figsize=(5.4, 6.6), layout="constrained")
        for axes, (name, title) in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
            _draw(axes, name)
            axes.set_title(title)
        PATH.write_text(svg_text(figure), encoding="utf-8")


def _draw(axes: Axes, name: str) -> None:
    scheme = build(name, 64, 4, {})
    panel = next(panels(scheme, reach=32))
    offset, score = panel.row()
    if panel.group.refers_to_rows:
        draw_tree(axes, panel, scheme.attention)
    elif panel.group.columns > 1:
        reach = int(offset.abs().max())
        sides = (-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5)
        draw_heat(axes, score.mean(0).view(2 * reach + 1, -1), scheme.attention, sides)
        axes.set(xlabel="columns from query to key", ylabel="rows")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    else:
        mean = score.mean(0)
        for head in score:
            axes.plot(offset[:, 0], head, color=HEAD, alpha=0.3, linewidth=0.7)
        axes.plot(offset[:, 0], mean, color="#000000", linewidth=1.8)
        axes.plot(offset[:, 0], (mean + mean.flip(0)) / 2, "--", color=EVEN, linewidth=1.3)
        axes.plot(offset[:, 0], (mean - mean.flip(0)) / 2, "-.", color=ODD, linewidth=1.3)
        axes.set(xlabel="tokens from query to key")
        axes.margins(x=0)
        plain(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


if __name__ == "__main__":
    write()
