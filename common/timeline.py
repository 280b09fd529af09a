"""A simple model of what runs beside what within a block, for chapters 10 and 11: phases that share units.

A group of warps runs its phases one after the other; groups run side by side. Phases on the same unit share
its rate evenly. All groups meet at a barrier after every iteration. Latencies and the other
instructions are not in it, so its cycles are too few; it compares orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

PRODUCTS = "products"  # tensor cores or shared memory, whichever takes longer
# Light, for the names stand in them; what uses another unit is hatched.
_COLOURS = {"S": "#9fd3f2", "dP": "#f6c667", "dV": "#b9e3c6", "dK": "#e3b7d0", "dQ": "#f0a58a"}
_OTHER = "#e8e8e8"


@dataclass(frozen=True)
class Phase:
    """What a group does next. unit: what it needs; cycles: what it takes with the whole unit for itself."""

    name: str
    unit: str
    cycles: float


@dataclass(frozen=True)
class Span:
    """A phase as it ran. group: index of the group; start, end: cycles."""

    group: int
    phase: Phase
    start: float
    end: float


def simulate(
    groups: Sequence[Sequence[Phase]], iterations: int = 1, *, alone: Mapping[str, float] | None = None
) -> list[Span]:
    """The spans of all phases.

    alone: by unit, the share of its rate that one group reaches alone; 1 for a unit that is not in it.
    """
    spans: list[Span] = []
    now = 0.0
    for _ in range(iterations):
        index, started = [0] * len(groups), [now] * len(groups)
        left = [phases[0].cycles for phases in groups]
        while active := [g for g, phases in enumerate(groups) if index[g] < len(phases)]:
            units = [groups[g][index[g]].unit for g in active]
            rates = {
                g: min(1 / units.count(unit), (alone or {}).get(unit, 1.0))
                for g, unit in zip(active, units, strict=True)
            }
            step = min(left[g] / rates[g] for g in active)
            now += step
            for g in active:
                left[g] -= step * rates[g]
                if left[g] < 1e-6:
                    spans.append(Span(g, groups[g][index[g]], started[g], now))
                    index[g], started[g] = index[g] + 1, now
                    left[g] = groups[g][index[g]].cycles if index[g] < len(groups[g]) else 0.0
    return spans


def length(spans: Sequence[Span]) -> float:
    """Cycles from the first to the last."""
    return max(span.end for span in spans)


def busy(spans: Sequence[Span], unit: str) -> list[tuple[float, float]]:
    """When a unit has work, as intervals."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((s.start, s.end) for s in spans if s.phase.unit == unit and s.end > s.start):
        if merged and start <= merged[-1][1] + 1e-6:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def draw_timeline(axes: Axes, spans: Sequence[Span], names: Sequence[str], title: str, unit: str) -> None:
    """Groups as rows, phases as boxes, and above them when ``unit`` has work (black) and when not (white)."""
    for span in spans:
        y, width = span.group + 1, span.end - span.start
        colour = _COLOURS.get(span.phase.name.split("(")[0].split(",")[0], _OTHER)
        hatch = "" if span.phase.unit == unit else "///"
        axes.add_patch(
            Rectangle((span.start, y + 0.1), width, 0.8, fc=colour, ec="black", lw=0.6, hatch=hatch)
        )
        axes.text(
            span.start + width / 2, y + 0.5, span.phase.name, ha="center", va="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85} if hatch else None,
        )  # fmt: skip
    for start, end in busy(spans, unit):
        axes.add_patch(Rectangle((start, 0.3), end - start, 0.4, fc="0.15", ec="none"))
    axes.set_xlim(0, length(spans))
    axes.set_ylim(len(names) + 1.05, 0.15)
    axes.set_yticks([0.5, *(i + 1.5 for i in range(len(names)))], [f"{unit}: busy", *names], fontsize=8.5)
    axes.set_title(title, fontsize=10)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
