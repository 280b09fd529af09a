"""Figures of what a report counts: traffic by tensor, and the roofline. ``common.figures`` has them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from common.figure_style import (
    BLACK,
    CURVE_COLOURS,
    SMALL,
    EndLabel,
    byte_unit,
    label_ends,
    new_figure,
    quantity,
    unit_axis,
)

if TYPE_CHECKING:
    from common.report import Report

# ---------------------------------------------------------------------------- traffic

_FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "N² matrices": (("s", "p", "dp", "ds"), "#5a1010"),
    "dq, dq_accum": (("dq", "dq_accum"), "#cc7a00"),
    "dk, dv": (("dk", "dv"), "#f7dc9f"),
    "q, dout, out": (("q", "dout", "out"), "#b5daf0"),
    "k, v": (("k", "v"), "#6aaed6"),
    "lse, delta": (("lse", "delta", "row_max", "row_sum"), "#e8e8e8"),
    "other scratch": ((), "#9b86b5"),
}
_OPERATIONS = (("read", "read", ""), ("written", "written", "////"), ("atomic", "atomic_bytes", "xxxx"))


@dataclass(frozen=True)
class _Segment:
    tensor: str
    operation: str
    hatch: str
    family: str
    bytes: int


def _segments(report: Report) -> list[_Segment]:
    tensors = report.traffic.tensors
    known = {name: family for family, (names, _) in _FAMILIES.items() for name in names}
    ordered = [name for names, _ in _FAMILIES.values() for name in names if name in tensors]
    ordered += [name for name in tensors if name not in known]
    return [
        _Segment(name, operation, hatch, known.get(name, "other scratch"), getattr(tensors[name], field))
        for name in ordered
        for operation, field, hatch in _OPERATIONS
        if getattr(tensors[name], field)
    ]


def draw_traffic(reports: Mapping[str, Report]) -> Figure:
    """Requested bytes of global memory, before any cache: a bar per chapter, a segment per tensor.

    Colours tell kinds of tensors, hatches reading, writing and atomics. Where some bars are more than eight
    times as long as others, a second panel has the axis of the short ones and cuts the long ones off.

    Args:
        reports: by the chapter's name, what ``Chapter.check`` returned.
    """
    totals = {name: report.traffic.bytes for name, report in reports.items()}
    largest = max(totals.values(), default=0) or 1
    short = [total for total in totals.values() if 0 < total < largest / 8]
    panel_ends = [1.2 * largest, *([1.2 * max(short)] if short else [])]
    figure = new_figure(11.5 if short else 8.5, 0.42 * len(reports) + 2.2)
    panels = figure.subplots(1, len(panel_ends), sharey=True, squeeze=False)[0]
    inches = 4.0 if short else 6.3  # of the axes, about
    for axes, end in zip(panels, panel_ends, strict=True):
        _traffic_panel(axes, reports, end, inches)
    if short:
        panels[0].set_title("all of it", fontsize=10)
        panels[1].set_title(f"magnified {panel_ends[0] / panel_ends[1]:.0f} times", fontsize=10)
    used = {(s.family, s.operation) for report in reports.values() for s in _segments(report)}
    handles = [
        Patch(
            facecolor=colour,
            edgecolor="black",
            label=f"{family}{': s, p, dp, ds' if names[:1] == ('s',) else ''}",
        )
        for family, (names, colour) in _FAMILIES.items()
        if any(f == family for f, _ in used)
    ]
    handles += [
        Patch(facecolor="white", edgecolor="black", hatch=hatch, label=operation)
        for operation, _, hatch in _OPERATIONS
        if any(o == operation for _, o in used)
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=5,
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(f"requested bytes of global memory{_common_sizes(reports)}", fontsize=11)
    return figure


def _common_sizes(reports: Mapping[str, Report]) -> str:
    """Of "02_tiled backward, bf16, B=1 H=1 …" what all reports share: their dtype and sizes."""
    sizes = {report.what.partition(", ")[2] for report in reports.values()}
    return f" ({sizes.pop()})" if len(sizes) == 1 else ""


def _traffic_panel(axes: Axes, reports: Mapping[str, Report], end: float, inches: float) -> None:
    unit, unit_name = byte_unit(end)
    for y, report in enumerate(reports.values()):
        left = 0
        for s in _segments(report):
            edge = 0.5 if s.bytes / end * inches > 0.02 else 0.0  # points; none around what is no wider
            axes.barh(
                y, s.bytes / unit, left=left / unit, height=0.7,
                color=_FAMILIES[s.family][1], edgecolor="white" if s.family == "N² matrices" else "black",
                hatch=s.hatch, linewidth=edge, gid=f"{s.tensor} {s.operation}",
            )  # fmt: skip
            room = min(s.bytes, end - left) / end * inches
            if room > 0.085 * len(s.tensor) + 0.08:
                dark = s.family == "N² matrices"
                axes.text(
                    (left + min(s.bytes, end - left) / 2) / unit, y, s.tensor,
                    ha="center", va="center", fontsize=SMALL, color="white" if dark else "black",
                    fontweight="bold" if dark else "normal", clip_on=True,
                    bbox={"facecolor": _FAMILIES[s.family][1], "edgecolor": "none", "pad": 0.8},
                )  # fmt: skip
            left += s.bytes
        if left <= end:
            axes.text(left / unit, y, f" {quantity(left, 'B')}", ha="left", va="center", fontsize=9)
        else:
            axes.text(
                0.985 * end / unit, y, f"{quantity(left, 'B')} →", ha="right", va="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "black", "linewidth": 0.5, "pad": 2},
            )  # fmt: skip
    names = [name if report.error is None else f"{name}\n(ended early)" for name, report in reports.items()]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(0, end / unit)
    axes.set_xlabel(f"requested, {unit_name}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------------------- roofline


@dataclass(frozen=True)
class Card:
    """What a data sheet says of a GPU.

    peak_flops: FLOP/s of fp32 arithmetic outside of tensor cores; a fused multiply-add counts as two.
    tensor_flops: FLOP/s of dense fp16 or bf16 products on tensor cores. hbm_bandwidth: bytes/s.
    memory_bytes: of HBM.
    """

    name: str
    peak_flops: float
    tensor_flops: float
    hbm_bandwidth: float
    memory_bytes: float


# NVIDIA's data sheet of the H200 SXM, https://www.nvidia.com/en-us/data-center/h200/; its 1,979 TFLOP/s of
# bf16 are with sparsity, twice the dense rate. It does not say how fast L2 is.
H200 = Card("H200", peak_flops=67e12, tensor_flops=989e12, hbm_bandwidth=4.8e12, memory_bytes=141e9)


@dataclass(frozen=True)
class RooflinePoint:
    """One pass of one kernel.

    flops: floating-point operations, as ``common.timing.backward_flops`` counts them. requested_bytes: of
    global memory, the most that L2 can be asked for, as L1 keeps some from it. ideal_bytes: what an ideal
    cache fetches from HBM. seconds: measured on the card, or None.
    """

    name: str
    flops: float
    requested_bytes: float
    ideal_bytes: float
    seconds: float | None = None

    @classmethod
    def of(cls, name: str, report: Report, flops: float, seconds: float | None = None) -> RooflinePoint:
        """With the bytes that a check counted. ``flops`` and ``seconds`` are those of the checked sizes."""
        tensors = report.traffic.tensors.values()
        ideal = sum(t.unique_read + t.unique_written for t in tensors)
        return cls(name, flops, report.traffic.bytes, ideal, seconds)


def attainable_flops(
    point: RooflinePoint, peak_flops: float, hbm_bandwidth: float, l2_bandwidth: float
) -> float:
    """FLOP/s under all three roofs: arithmetic, HBM for the ideal bytes, L2 for the requested bytes."""
    return min(
        peak_flops,
        point.flops / point.ideal_bytes * hbm_bandwidth,
        point.flops / point.requested_bytes * l2_bandwidth,
    )


def draw_roofline(
    points: Sequence[RooflinePoint],
    peak_flops: float,
    hbm_bandwidth: float,
    l2_bandwidth: float,
    *,
    peak_name: str = "peak",
) -> Figure:
    """FLOP/s against FLOP/byte under an L2 and an HBM roof, log-log.

    Each pass has two marks at one height: a circle at its requested bytes, for the L2 roof, and a diamond,
    always hollow, at what an ideal cache fetches, for the HBM roof. The height of both is the measured speed.
    Where there is none, it is the most that the roofs allow (``attainable_flops``), the circle is hollow too
    and the label says so.

    Args:
        points: what to draw.
        peak_flops: FLOP/s of the arithmetic that the kernels use, such as ``H200.peak_flops``.
        hbm_bandwidth: bytes/s, such as ``H200.hbm_bandwidth``.
        l2_bandwidth: bytes/s. No data sheet has it: take what you have measured on the card, or say that it
            is assumed.
        peak_name: what the label of the flat roof calls it.
    """
    intensities = [p.flops / size for p in points for size in (p.requested_bytes, p.ideal_bytes)]
    ridges = [peak_flops / hbm_bandwidth, peak_flops / l2_bandwidth]
    low, high = min(*(x / 2.5 for x in intensities), *(x / 8 for x in ridges)), max(intensities + ridges) * 4
    figure = new_figure(10, 5.6)
    axes = figure.subplots()
    unit_axis(axes, "y", "FLOP/s")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # The L2 roof is the higher one, perhaps by little: its name goes left of the slopes, HBM's to the right.
    for label, bandwidth, style, side, apart in (
        ("HBM", hbm_bandwidth, "-", "left", 1.15),
        ("L2", l2_bandwidth, "--", "right", 1 / 1.15),
    ):
        ridge = peak_flops / bandwidth
        axes.plot(
            [low, ridge, high], [low * bandwidth, peak_flops, peak_flops], color=BLACK, linestyle=style,
            linewidth=1.4, label=label,
        )  # fmt: skip
        axes.text(
            ridge / 1.6 * apart, peak_flops / 1.6, f"{label} {quantity(bandwidth, 'B/s')}",
            ha=side, va="center", fontsize=9.5,
        )  # fmt: skip
    axes.text(
        min(ridges),
        peak_flops * 1.2,
        f"{peak_name} {quantity(peak_flops, 'FLOP/s')}",
        ha="left",
        fontsize=9.5,
    )
    ends = []
    for i, p in enumerate(points):
        colour = CURVE_COLOURS[i % len(CURVE_COLOURS)]
        measured = p.seconds is not None
        y = (
            p.flops / p.seconds
            if p.seconds is not None
            else attainable_flops(p, peak_flops, hbm_bandwidth, l2_bandwidth)
        )
        x = (p.flops / p.requested_bytes, p.flops / p.ideal_bytes)
        axes.plot(x, (y, y), color=colour, linewidth=0.9, linestyle="-" if measured else ":")
        for mark, where, filled in (("o", x[0], measured), ("D", x[1], False)):
            axes.plot(
                [where], [y], mark, color=colour, markersize=7, markerfacecolor=colour if filled else "white",
                label=f"{p.name} {'requested' if mark == 'o' else 'ideal'}", zorder=3,
            )  # fmt: skip
        ends.append(EndLabel(max(x), y, p.name + ("" if measured else " (not measured)"), colour))
    axes.set_xlim(low, high)
    heights = [line.get_ydata()[0] for line in axes.lines[2:]]
    axes.set_ylim(min([low * hbm_bandwidth, *(h / 2 for h in heights)]), peak_flops * 2.5)
    axes.set_xlabel("FLOP/byte")
    axes.set_ylabel("speed")
    axes.grid(alpha=0.3)
    label_ends(axes, ends, fontsize=9.5)
    handles = [
        Line2D([], [], marker="o", color="0.3", linestyle="", label="requested bytes (under the L2 roof)"),
        Line2D(
            [],
            [],
            marker="D",
            color="0.3",
            markerfacecolor="white",
            linestyle="",
            label="ideal cache (under the HBM roof), always hollow",
        ),
        Line2D(
            [],
            [],
            marker="o",
            color="0.3",
            markerfacecolor="white",
            linestyle=":",
            label="not measured: what the roofs allow",
        ),
    ]
    shown = handles if any(p.seconds is None for p in points) else handles[:2]
    figure.legend(handles=shown, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure
