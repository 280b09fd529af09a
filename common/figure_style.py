"""What the figures share: a figure that a notebook shows, units, colours, labels beside curves.

Colours are those of Okabe and Ito, then Tol's, which colour-blind readers tell apart. No figure relies on
them: curves also differ in marker and line style, areas in hatch or in lightness.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
CURVE_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#882255", "#44aa99", "#999933", "#332288")
MARKERS = "osD^vP*X<>hpd"
SMALL = 8.5  # points: what is written inside of axes


class NotebookFigure(Figure):
    """A figure outside of pyplot's state: a notebook shows it where a cell returns it, and only there.

    Where nothing has imported pyplot, IPython does not know how to show a plain Figure.
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """An empty figure. width, height: inches."""
    return NotebookFigure(figsize=(width, height), layout="constrained")


def quantity(amount: float, unit: str) -> str:
    """Three digits with a decimal prefix: ``quantity(8.4e7, "B")`` is "84 MB"."""
    rounded = float(f"{amount:.3g}")
    for prefix in ("", "K", "M", "G", "T"):
        if abs(rounded) < 1000:
            return f"{rounded:g} {prefix}{unit}"
        rounded = float(f"{rounded / 1000:.3g}")
    return f"{rounded:g} P{unit}"


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit, in bytes, and its name, for an axis that ends at ``largest`` bytes."""
    return next(
        ((size, name) for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if largest >= size),
        (1.0, "B"),
    )


def lengths_axis(axes: Axes, lengths: Iterable[int], label: str) -> None:
    """A logarithmic x axis with a tick at each of these lengths."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    names = [f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n) for n in ticks]
    axes.set_xticks(ticks, names)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def unit_axis(axes: Axes, which: str, unit: str) -> None:
    """A logarithmic axis, "x" or "y", whose ticks are written with a prefix: 1 MB, 10 TFLOP/s."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value, unit)))
    axis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True)
class EndLabel:
    """Text for the point (x, y), in data coordinates."""

    x: float
    y: float
    text: str
    colour: str = BLACK


def label_ends(
    axes: Axes, labels: Sequence[EndLabel], fontsize: float = SMALL, *, join: bool = False
) -> None:
    """Writes labels right of the axes, level with their points where there is room, and leads a line to each.

    The axes' scales and limits must be final. join: labels of points that lie on each other share a line.
    """
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())

    def height(label: EndLabel) -> float:
        return float(axes.transLimits.transform(axes.transScale.transform((label.x, label.y)))[1])

    gap = 1.35 * fontsize / 72 / (0.72 * axes.figure.get_figheight())
    ordered: list[EndLabel] = []
    for label in sorted(labels, key=height):
        if join and ordered and height(label) - height(ordered[-1]) < 0.15 * gap:
            names = sorted([*ordered[-1].text.split(), label.text])
            ordered[-1] = EndLabel(label.x, label.y, " ".join(names), BLACK)
        else:
            ordered.append(label)
    for label, level in zip(ordered, spread([height(label) for label in ordered], gap), strict=True):
        axes.annotate(
            label.text,
            xy=(label.x, label.y),
            xytext=(1.06, level),
            textcoords="axes fraction",
            fontsize=fontsize,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(levels: Sequence[float], gap: float) -> list[float]:
    """Ascending levels, moved as little as it takes to be ``gap`` apart."""
    # Neighbours that are too close form a group, which is centred on the levels it was made of.
    groups: list[list[float]] = []

    def centre(group: list[float]) -> float:
        return sum(group) / len(group)

    for level in levels:
        groups.append([level])
        while len(groups) > 1:
            low, high = groups[-2], groups[-1]
            if centre(high) - centre(low) >= gap * (len(low) + len(high)) / 2:
                break
            groups[-2:] = [low + high]
    return [centre(group) + gap * (i - (len(group) - 1) / 2) for group in groups for i in range(len(group))]
