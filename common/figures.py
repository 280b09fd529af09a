"""Figures, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from common.ladder import Ladder, Rung

_MARKERS = "osD^vP*X"


def _by_name(rungs: Iterable[Rung]) -> dict[str, list[Rung]]:
    series: dict[str, list[Rung]] = {}
    for rung in rungs:
        series.setdefault(rung.name, []).append(rung)
    return series


def _lengths_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("sequence length")
    axes.grid(alpha=0.3)


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """Speed, scratch memory and error of every chapter over the sequence length, written to ``path``."""
    settings, lengths = ladder.settings, sorted(ladder.settings.seqlens)
    figure = Figure(figsize=(14, 5.2), layout="constrained")
    speed, memory, error = figure.subplots(1, 3)
    on_gpu = settings.device == "cuda"
    for i, (name, rungs) in enumerate(_by_name(ladder.rungs).items()):
        style = {"marker": _MARKERS[i % len(_MARKERS)], "label": name, "color": f"C{i % 10}"}
        if name.startswith("SDPA"):
            style |= {"linestyle": "--", "color": "0.4"}
        timed = [r for r in rungs if r.seconds]
        values = [r.tflops if on_gpu else r.seconds for r in timed]
        if timed:
            speed.plot([r.seqlen for r in timed], values, **style)
        sized = [r for r in rungs if r.workspace_bytes is not None and not r.skipped]
        if sized:
            memory.plot([r.seqlen for r in sized], [r.workspace_bytes / 1e6 for r in sized], **style)
        checked = [r for r in rungs if r.comparisons]
        if checked:
            worst = [max(c.error / c.budget for c in r.comparisons) for r in checked]
            error.plot([r.seqlen for r in checked], worst, **style)
    speed.set_yscale("log")
    speed.set_title("TFLOP/s (higher is better)" if on_gpu else "seconds a pass (lower is better)")
    memory.set_yscale("symlog", linthresh=0.1)
    memory.set_ylim(bottom=0)
    memory.set_title("scratch memory, MB")
    error.axhline(1.0, color="red", linestyle=":")
    error.text(lengths[0], 1.0, " budget", color="red", va="bottom")
    error.set_ylim(0, max(1.15, error.get_ylim()[1]))
    error.set_title("largest error, in parts of its budget")
    for axes in (speed, memory, error):
        _lengths_axis(axes, lengths)
    if speed.lines:
        # Outside of the axes, where it hides no curve.
        figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    mask = "causal" if settings.causal else "full"
    figure.suptitle(
        f"{ladder.machine['device']}: {settings.dtype}, batch {settings.batch}, {settings.heads} heads, "
        f"head_dim {settings.head_dim}, {mask}; {ladder.machine['date']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
