"""docs/kernels.svg, the picture of the README: `python -m tools.kernels_picture` writes it."""

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isopos.lab.reports.kernels import panels
from isopos.lab.reports.plots import EVEN, HEAD, ODD, draw_heat, draw_tree, plain
from isopos.schemes import build
from tools.pages import ROOT

PATH = ROOT / "docs" / "kernels.svg"
PANELS = (
    ("rope", "rope: a line"),
    ("permuteformer", "permuteformer: a line, with its decay"),
    ("ape-ring", "ape-ring: a ring of 128"),
    ("retnet", "retnet: rotation and decay"),
    ("ape-grid", "ape-grid: a grid"),
    ("ape-tree", "ape-tree: a tree"),
)


def write() -> None:
    """Draw the kernels of six schemes with linear attention."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _draw(axes, name)
        axes.set_title(title, fontsize=11)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "isopos"}):
        figure.savefig(PATH, metadata={"Date": None})


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


if __name__ == "__main__":
    write()
