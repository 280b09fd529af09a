"""Figures for the notebooks and the README, drawn without a display. Each function returns a Figure.

A notebook shows it where a cell returns it; ``figure.savefig(path)`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from common.figure_maps import bank_access, draw_shared_access, draw_tiles
from common.figure_style import (
    BLACK,
    BLUE,
    CURVE_COLOURS,
    GREEN,
    MARKERS,
    SMALL,
    VERMILION,
    EndLabel,
    label_ends,
    lengths_axis,
    new_figure,
    unit_axis,
)
from common.figure_traffic import H200, Card, RooflinePoint, attainable_flops, draw_roofline, draw_traffic

if TYPE_CHECKING:
    from common.accuracy import DqError
    from common.chapters import Chapter
    from common.ladder import Ladder, Rung
    from common.sweep import Sweep

__all__ = [
    "H200",
    "Card",
    "RooflinePoint",
    "attainable_flops",
    "bank_access",
    "draw_accuracy",
    "draw_ladder",
    "draw_memory",
    "draw_roofline",
    "draw_shared_access",
    "draw_sweep",
    "draw_tiles",
    "draw_traffic",
]

# ---------------------------------------------------------------------------- memory


def draw_memory(
    seqlens: Sequence[int],
    *,
    batch: int = 1,
    num_heads: int = 32,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False,
    deterministic: bool = False,
    chapters: Sequence[Chapter] | None = None,
    card_bytes: Mapping[str, float] | None = None,
) -> Figure:
    """Bytes of memory against the sequence length, over all heads, log-log.

    Three curves are tensors: P, if it is stored in ``dtype``; q, k, v and out together; lse, which is all
    that backward needs instead of P. The others are the scratch memory that chapters ask for.

    Args:
        seqlens: sequence lengths, seqlen_q = seqlen_k.
        batch, num_heads, head_dim, dtype: of the tensors. is_causal, deterministic: asked of the chapters;
            the latter of those that have it as a flag.
        chapters: whose scratch memory is drawn; by default of all that have a backward pass. Each is built.
        card_bytes: memory of cards in bytes, by label; by default 80 GB and the H200.
    """
    from common.chapters import list_chapters, load_chapter
    from common.jit import DTYPE_NAMES

    if chapters is None:
        loaded = [load_chapter(info.name) for info in list_chapters() if dtype in info.dtypes]
        chapters = [chapter for chapter in loaded if chapter.has_backward]
    if card_bytes is None:
        card_bytes = {
            "80 GB (A100, H100)": 80e9,
            f"{H200.memory_bytes / 1e9:.0f} GB ({H200.name})": H200.memory_bytes,
        }
    heads = batch * num_heads

    def tensor_bytes(*shape: int, of: torch.dtype = dtype) -> int:
        return heads * math.prod(shape) * of.itemsize

    curves: list[tuple[str, list[int], bool]] = [
        (f"P stored in {DTYPE_NAMES[dtype]}", [tensor_bytes(n, n) for n in seqlens], True),
        ("q, k, v, out", [4 * tensor_bytes(n, head_dim) for n in seqlens], True),
        ("lse", [tensor_bytes(n, of=torch.float32) for n in seqlens], True),
    ]
    without: list[str] = []
    scratch: dict[tuple[int, ...], tuple[list[str], str]] = {}
    for chapter in chapters:
        flag = deterministic and chapter.info.deterministic == "flag"
        layouts = [
            chapter.workspace(
                batch=batch, num_heads=num_heads, seqlen_q=n, head_dim=head_dim, dtype=dtype,
                is_causal=is_causal, deterministic=flag,
            )
            for n in seqlens
        ]  # fmt: skip
        name = chapter.name if chapter.info.number is None else f"{chapter.info.number:02d}"
        sizes = tuple(layout.bytes for layout in layouts)
        if any(sizes):
            parts = ", ".join(part.name for part in layouts[-1].parts)
            scratch.setdefault(sizes, ([], parts))[0].append(name)
        else:
            without.append(name)
    curves += [
        (f"{' '.join(names)}: {parts}", list(sizes), False) for sizes, (names, parts) in scratch.items()
    ]

    figure = new_figure(9.5, 5.6)
    axes = figure.subplots()
    ends = []
    for i, (label, sizes, is_tensor) in enumerate(curves):
        colour = BLACK if is_tensor else CURVE_COLOURS[(i - 3) % len(CURVE_COLOURS)]
        axes.plot(
            seqlens, sizes, color=colour, marker=MARKERS[i % len(MARKERS)], label=label,
            markersize=8 if is_tensor else 5, markerfacecolor="none" if is_tensor else colour,
            linestyle="--" if is_tensor else "-", linewidth=1.2 if is_tensor else 2,
            zorder=3 if is_tensor else 2,
        )  # fmt: skip
        ends.append(EndLabel(seqlens[-1], sizes[-1], label, colour))
    for label, size in card_bytes.items():
        axes.axhline(size, color="0.4", linestyle=(0, (6, 2, 1, 2)), linewidth=1.2, label=label)
        below = len(card_bytes) > 1 and size == min(card_bytes.values())
        axes.text(seqlens[0], size, label, fontsize=SMALL, va="top" if below else "bottom", ha="left")
    lengths_axis(axes, seqlens, "sequence length N")
    unit_axis(axes, "y", "B")
    axes.set_ylabel("memory, all heads")
    label_ends(axes, ends, fontsize=9.5)
    note = f"; no scratch: {' '.join(without)}" if without else ""
    axes.set_title(
        f"batch {batch}, {num_heads} heads, head_dim {head_dim}, {DTYPE_NAMES[dtype]}"
        f"{', causal' if is_causal else ''}{', deterministic' if deterministic else ''}\n"
        f"dashed: tensors; solid: scratch memory of chapters{note}",
        fontsize=10,
    )
    return figure


# ---------------------------------------------------------------------------- accuracy


def draw_accuracy(errors: Sequence[DqError]) -> Figure:
    """Error of dQ against the number of keys: added up by atomics in its dtype (04), and in fp32 (05).

    Left the errors, relative to the norm of the float64 reference; right 04's over 05's, with the prediction
    √(1 + T/2) for T K blocks, which holds for 16-bit dtypes.

    Args:
        errors: from ``common.accuracy.measure_dq_errors``.
    """
    figure = new_figure(11, 4.6)
    error, ratio = figure.subplots(1, 2)
    by_dtype: dict[str, list[DqError]] = {}
    for e in sorted(errors, key=lambda e: e.seqlen_k):
        by_dtype.setdefault(e.dtype, []).append(e)
    error_ends, ratio_ends = [], []
    for i, (dtype, series) in enumerate(by_dtype.items()):
        keys = [e.seqlen_k for e in series]
        colour, marker = (BLUE, VERMILION, GREEN)[i % 3], MARKERS[i % len(MARKERS)]
        for name, values, style, face in (
            ("04", [e.atomic for e in series], "-", colour),
            ("05", [e.accumulated for e in series], "--", "white"),
        ):
            label = f"{name}, {dtype}"
            error.plot(
                keys, values, color=colour, marker=marker, linestyle=style, markerfacecolor=face, label=label
            )
            error_ends.append(EndLabel(keys[-1], values[-1], label, colour))
        ratios = [e.ratio for e in series]
        ratio.plot(keys, ratios, color=colour, marker=marker, label=dtype, linestyle="-")
        ratio_ends.append(EndLabel(keys[-1], ratios[-1], dtype, colour))
    sixteen_bits = sorted({(e.seqlen_k, e.predicted_ratio) for e in errors if e.dtype != "fp32"})
    if sixteen_bits:
        ratio.plot(*zip(*sixteen_bits, strict=True), color=BLACK, linestyle=":", label="√(1 + T/2)")
        ratio_ends.append(EndLabel(*sixteen_bits[-1], "√(1 + T/2)", BLACK))
    error.set_yscale("log")
    error.set_ylabel("relative error of dq")
    error.set_title("dq summed in its dtype (04, solid) and in fp32 (05, dashed)", fontsize=10)
    ratio.set_yscale("log", base=2)
    ratio.yaxis.set_major_formatter(lambda value, _: f"{value:g} ×")
    ratio.set_ylabel("error of 04 / error of 05")
    block = {e.rounded_every for e in errors}
    per = f", {block.pop()} keys each" if len(block) == 1 else ""
    ratio.set_title(f"dotted: prediction for T K blocks{per}", fontsize=10)
    for axes, ends in ((error, error_ends), (ratio, ratio_ends)):
        lengths_axis(axes, (e.seqlen_k for e in errors), "number of keys (seqlen_k)")
        label_ends(axes, ends, fontsize=9.5)
    return figure


# ---------------------------------------------------------------------------- ladder


def _by_name(rungs: Iterable[Rung]) -> dict[str, list[Rung]]:
    series: dict[str, list[Rung]] = {}
    for rung in rungs:
        series.setdefault(rung.name, []).append(rung)
    return series


def draw_ladder(ladder: Ladder, path: Path | None = None) -> Figure:
    """Speed, scratch memory and error of every chapter over the sequence length.

    The error is the largest of a rung's results, in the Frobenius norm and relative to the float64 reference;
    a cross marks a rung that is over a budget. Labels are chapter numbers. ``path``: where to write it.
    """
    settings, lengths = ladder.settings, sorted(ladder.settings.seqlens)
    figure = new_figure(12, 5.4)
    panels = speed, memory, error = figure.subplots(1, 3)
    on_gpu = settings.device == "cuda"
    ends: dict[Axes, list[EndLabel]] = {axes: [] for axes in panels}
    handles: dict[str, Line2D] = {}

    def plot(axes: Axes, name: str, number: int, points: Iterable[tuple[int, float]]) -> None:
        points = [(seqlen, value) for seqlen, value in points if math.isfinite(value)]
        if not points:
            return
        sdpa = name.startswith("SDPA")
        colour = "0.4" if sdpa else CURVE_COLOURS[number % len(CURVE_COLOURS)]
        (handles[name],) = axes.plot(
            *zip(*points, strict=True),
            label=name, color=colour, marker=MARKERS[number % len(MARKERS)], markersize=5,
            linestyle="--" if sdpa else "-", markerfacecolor="white" if sdpa else colour,
        )  # fmt: skip
        short = name.removeprefix("SDPA ") if sdpa else name.partition("_")[0]
        ends[axes].append(EndLabel(*points[-1], short, colour))

    for i, (name, rungs) in enumerate(_by_name(ladder.rungs).items()):
        timed = [r for r in rungs if r.seconds]
        plot(speed, name, i, [(r.seqlen, (r.tflops if on_gpu else r.seconds) or math.nan) for r in timed])
        sized = [r for r in rungs if r.workspace_bytes is not None and not r.skipped]
        plot(memory, name, i, [(r.seqlen, r.workspace_bytes / 1e6) for r in sized])
        worst = {r.seqlen: max(c.error for c in r.comparisons) for r in rungs if r.comparisons}
        # An error of exactly zero has no place on a logarithmic axis.
        plot(error, name, i, [(n, e or math.nan) for n, e in worst.items()])
        over = [(r.seqlen, worst[r.seqlen]) for r in rungs if r.comparisons and not r.ok]
        if over:
            error.plot(*zip(*over, strict=True), "x", color="black", markersize=12, markeredgewidth=2)
    speed.set_yscale("log")
    speed.set_title(
        f"{'TFLOP/s' if on_gpu else 'seconds per pass'}\n(00: forward; others: backward)",
        fontsize=11,
    )
    memory.set_yscale("symlog", linthresh=0.1)
    memory.set_ylim(bottom=0)
    memory.set_title("scratch memory, MB", fontsize=11)
    error.set_yscale("log")
    error.set_title("largest relative error of the results\n(×: over budget)", fontsize=11)
    if ends[error]:
        low, high = error.get_ylim()
        error.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    for axes in panels:
        if axes is not error:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        lengths_axis(axes, lengths, "sequence length")
        label_ends(axes, ends[axes], fontsize=10, join=True)
    if handles:
        names = [name for name in _by_name(ladder.rungs) if name in handles]
        figure.legend(
            [handles[name] for name in names], names,
            loc="outside lower center", ncols=6, fontsize=9, frameon=False,
        )  # fmt: skip
    mask = "causal" if settings.causal else "full"
    figure.suptitle(
        f"{ladder.machine['device']}: {settings.dtype}, batch {settings.batch}, {settings.heads} heads, "
        f"head_dim {settings.head_dim}, {mask}; {ladder.machine['date']}",
        fontsize=11,
    )
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure


# ---------------------------------------------------------------------------- beside PyTorch's kernels


def draw_training(runs: Mapping[str, Sequence[float]]) -> Figure:
    """The losses of several runs over the step, and what each differs from the first by.

    ``runs``: losses by the run's name.
    """
    figure = new_figure(9.5, 3.4)
    curves, differences = figure.subplots(1, 2)
    (first, reference), *_ = runs.items()
    for i, (name, losses) in enumerate(runs.items()):
        style = {"color": CURVE_COLOURS[i], "linestyle": ("-", "--", ":")[i % 3], "label": name}
        curves.plot(losses, **style)
        if name != first:
            differences.plot([a - b for a, b in zip(losses, reference, strict=True)], **style)
    curves.set_ylabel("loss, nats a character")
    differences.set_ylabel(f"loss minus that of {first}")
    for axes in (curves, differences):
        axes.set_xlabel("step")
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_sweep(sweeps: Sequence[Sweep], path: Path | None = None) -> Figure:
    """Backward speed against the sequence length, a panel for each sweep, on one scale.

    Solid: chapters; dashed: PyTorch's SDPA backends; dash-dotted: its matrix product. A vertical bar leads
    from the slowest to the fastest timing. ``path``: where to write it.
    """
    figure = new_figure(5.8 * len(sweeps), 5.2)
    panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
    names = sorted(
        {p.name for sweep in sweeps for p in sweep.points}, key=lambda n: (n.startswith("SDPA"), n)
    )
    ends: dict[Axes, list[EndLabel]] = {}
    handles: dict[str, Line2D] = {}
    for axes, sweep in zip(panels, sweeps, strict=True):
        ends[axes] = []
        for i, name in enumerate(names):
            points = sorted((p for p in sweep.points if p.name == name), key=lambda p: p.seqlen)
            if not points:
                continue
            sdpa = name.startswith("SDPA")
            colour = "0.4" if sdpa else CURVE_COLOURS[i % len(CURVE_COLOURS)]
            (handles[name],) = axes.plot(
                [p.seqlen for p in points], [p.tflops for p in points],
                label=name, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=6,
                linestyle="--" if sdpa else "-", markerfacecolor="white" if sdpa else colour,
            )  # fmt: skip
            for p in points:
                fast, slow = (p.tflops * p.median_ms / ms for ms in (p.min_ms, p.max_ms))
                axes.vlines(p.seqlen, slow, fast, color=colour, linewidth=1)
            short = name.removeprefix("SDPA ") if sdpa else name.partition("_")[0]
            ends[axes].append(EndLabel(points[-1].seqlen, points[-1].tflops, short, colour))
        lengths_axis(axes, (p.seqlen for p in sweep.points), "sequence length N")
        peak = sweep.matmul_tflops.get(sweep.settings.dtype)
        if peak is not None:
            handles["matrix product"] = axes.axhline(
                peak, color=BLACK, linestyle=(0, (6, 2, 1, 2)), linewidth=1.2, label="matrix product"
            )
            ends[axes].append(EndLabel(axes.get_xlim()[1], peak, "matrix product", BLACK))
        axes.set_title("causal" if sweep.settings.causal else "full", fontsize=11)
    panels[0].set_ylabel("backward TFLOP/s")
    panels[0].set_ylim(bottom=0)
    for axes in panels:
        label_ends(axes, ends[axes], fontsize=10)
    shown = [name for name in [*names, "matrix product"] if name in handles]
    figure.legend(
        [handles[name] for name in shown], shown,
        loc="outside lower center", ncols=4, fontsize=9, frameon=False,
    )  # fmt: skip
    s, machine = sweeps[0].settings, sweeps[0].machine
    figure.suptitle(
        f"{machine['device']}: {s.dtype}, {s.tokens:,} tokens, {s.heads} heads, head_dim {s.head_dim}; "
        f"{machine['date']}",
        fontsize=11,
    )
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure
