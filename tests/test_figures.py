"""The figures show the numbers they were given, nothing is cut off, and nothing is drawn with a warning."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import draw, loaded
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from common.accuracy import DqError, measure_dq_errors
from common.figure_style import EndLabel, byte_unit, label_ends, new_figure, quantity, spread
from common.figures import (
    H200,
    RooflinePoint,
    attainable_flops,
    bank_access,
    draw_accuracy,
    draw_ladder,
    draw_memory,
    draw_roofline,
    draw_shared_access,
    draw_tiles,
    draw_traffic,
    draw_training,
)
from common.ladder import Ladder, Rung, Settings
from common.reference import Comparison, visible_mask
from common.tiles import TileCount, TileState, count_tiles, tile_states
from common.traffic import Location, Requests

pytestmark = pytest.mark.filterwarnings("error")


# ---------------------------------------------------------------- what the tests read back


def texts(figure: Figure) -> list[Text]:
    """All text that is visible, tick labels too."""
    found = [*figure.texts, *(t for legend in figure.legends for t in legend.get_texts())]
    if figure.get_suptitle():
        found.append(figure._suptitle)
    for axes in figure.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [
                tick.label2 if axis.get_ticks_position() == "top" else tick.label1
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high
            ]
    return [text for text in found if text.get_text() and text.get_visible()]


def assert_readable(figure: Figure) -> None:
    """Drawn without a warning, no text reaches past the edge, and axes have labels or a title with a unit."""
    figure.savefig(io.BytesIO(), format="png")
    width, height = figure.bbox.width, figure.bbox.height
    for text in texts(figure):
        # An annotation's arrow is part of its extent.
        extent = Text.get_window_extent(text) if isinstance(text, Annotation) else text.get_window_extent()
        inside = extent.x0 >= -1 and extent.y0 >= -1 and extent.x1 <= width + 1 and extent.y1 <= height + 1
        assert inside, f"{text.get_text()!r} is cut off: {extent} in {width} × {height}"
        assert text.get_fontsize() >= 7
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel() or axes.get_title() or len(axes.get_yticks())


def curve(axes: Axes, label: str) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_label() == label]
    assert len(lines) == 1, [line.get_label() for line in axes.lines]
    return [(float(x), float(y)) for x, y in lines[0].get_xydata()]


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in texts(figure))


# ---------------------------------------------------------------- tiles


def test_states_of_tiles_are_those_that_are_counted() -> None:
    numbers = random.Random(0)
    for _ in range(2000):
        sizes = [numbers.randint(1, 300) for _ in range(2)] + [numbers.randint(1, 70) for _ in range(2)]
        is_causal = numbers.random() < 0.7
        count = Counter(state for row in tile_states(*sizes, is_causal) for state in row)
        masked, whole = count[TileState.MASKED], count[TileState.WHOLE]
        assert TileCount(count.total(), whole + masked, masked) == count_tiles(*sizes, is_causal), sizes


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (50, 97), (97, 50), (1, 40), (40, 1)])
def test_each_tile_has_the_state_of_its_elements(seqlen_q: int, seqlen_k: int) -> None:
    mask = visible_mask(seqlen_q, seqlen_k, True)
    for m, row in enumerate(tile_states(seqlen_q, seqlen_k, 16, 32, True)):
        for n, state in enumerate(row):
            tile = mask[m * 16 : m * 16 + 16, n * 32 : n * 32 + 32]
            whole = tile.all() and tile.shape == (16, 32)
            expected = TileState.WHOLE if whole else TileState.MASKED if tile.any() else TileState.SKIPPED
            assert state is expected, (m, n)


@pytest.mark.parametrize("sizes", [(250, 250, 32, 32), (100, 330, 32, 32), (330, 100, 16, 32), (9, 9, 3, 4)])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_tiles_drawn(sizes: tuple[int, int, int, int], is_causal: bool) -> None:
    figure = draw_tiles(*sizes, is_causal)
    assert_readable(figure)
    (axes,) = figure.axes
    drawn = {c.get_label(): [p.get_extents() for p in c.get_paths()] for c in axes.collections}
    states = tile_states(*sizes, is_causal)
    block_m, block_n = sizes[2:]
    for state in TileState:
        where = {(e.y0, e.x0, e.height, e.width) for e in drawn.get(state.value, [])}
        expected = {
            (m * block_m, n * block_n, block_m, block_n)
            for m, row in enumerate(states)
            for n, s in enumerate(row)
            if s is state
        }
        assert where == expected
        assert f"{state.value}: {len(expected)}" in words(figure)
    colours = {
        c.get_label(): (to_hex(c.get_facecolor()[0]), c.get_hatch())
        for c in axes.collections
        if c.get_paths()
    }
    assert len(set(colours.values())) == len(colours)
    count = count_tiles(*sizes, is_causal)
    assert f"{count.visited} of {count.total} visited" in axes.get_title()


# ---------------------------------------------------------------- traffic, roofline


@pytest.fixture(scope="module")
def reports() -> dict:
    """One chapter that stores S, P, dP and dS, and one that adds up by atomics."""
    found = {}
    for name in ("01_naive", "05_fp32_accum"):
        chapter = loaded(name)
        x = draw(1, 1, 70, chapter=chapter)
        out, lse = chapter.forward(x.q, x.k, x.v)
        found[name] = chapter.check(x.q, x.k, x.v, out, x.dout, lse)
        assert found[name].error is None
    return found


def test_traffic_drawn(reports: dict) -> None:
    figure = draw_traffic(reports)
    assert_readable(figure)
    assert len(figure.axes) == 2, "01 moves too much for 05 to be seen beside it"
    for axes in figure.axes:
        unit = {"requested, MB": 1e6, "requested, KB": 1e3}[axes.get_xlabel()]
        for y, report in enumerate(reports.values()):
            bars = [p for p in axes.patches if isinstance(p, Rectangle) and round(p.get_y() + 0.35) == y]
            drawn = {bar.get_gid(): bar.get_width() * unit for bar in bars}
            expected = {}
            for name, traffic in report.traffic.tensors.items():
                expected |= {
                    f"{name} read": traffic.read,
                    f"{name} written": traffic.written,
                    f"{name} atomic": traffic.atomic_bytes,
                }
            assert drawn == pytest.approx({label: size for label, size in expected.items() if size})
            # They are stacked without a gap.
            bars.sort(key=lambda bar: bar.get_x())
            ends = [bar.get_x() + bar.get_width() for bar in bars]
            assert [bar.get_x() for bar in bars] == pytest.approx([0, *ends[:-1]])
            assert quantity(report.traffic.bytes, "B") in words(figure)
            for bar in bars:
                tensor, operation = bar.get_gid().split()
                assert (to_hex(bar.get_facecolor()) == "#5a1010") == (tensor in ("s", "p", "dp", "ds"))
                assert bar.get_hatch() == {"read": "", "written": "////", "atomic": "xxxx"}[operation]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == list(reports)
    assert "Nq=70 Nk=70 d=64" in words(figure)
    assert "N² matrices: s, p, dp, ds" in words(figure)


def test_traffic_of_like_chapters_needs_one_panel(reports: dict) -> None:
    figure = draw_traffic({"05_fp32_accum": reports["05_fp32_accum"]})
    assert_readable(figure)
    assert len(figure.axes) == 1


def test_traffic_that_is_not_whole_says_so(reports: dict) -> None:
    report = dataclasses.replace(reports["05_fp32_accum"], error="it crashed")
    figure = draw_traffic({"mine": report})
    assert figure.axes[0].get_yticklabels()[0].get_text() == "mine\n(ended early)"


def test_roofline_drawn(reports: dict) -> None:
    l2_bandwidth = 1e13
    roofs = (H200.peak_flops, H200.hbm_bandwidth, l2_bandwidth)
    flops = 10.0 * 70 * 70 * 64
    points = [
        RooflinePoint.of("01_naive", reports["01_naive"], flops),
        RooflinePoint.of("05_fp32_accum", reports["05_fp32_accum"], flops, seconds=flops / 5e12),
        RooflinePoint("memory", flops=1e6, requested_bytes=4e6, ideal_bytes=4e6),
    ]
    tensors = reports["01_naive"].traffic.tensors.values()
    assert points[0].requested_bytes == sum(t.read + t.written + t.atomic_bytes for t in tensors)
    assert points[0].ideal_bytes == sum(t.unique_read + t.unique_written for t in tensors)
    figure = draw_roofline(points, *roofs)
    assert_readable(figure)
    (axes,) = figure.axes
    for label, bandwidth in (("HBM", H200.hbm_bandwidth), ("L2", l2_bandwidth)):
        start, ridge, end = curve(axes, label)
        assert start[1] == pytest.approx(start[0] * bandwidth)
        assert ridge == pytest.approx((H200.peak_flops / bandwidth, H200.peak_flops))
        assert end[1] == H200.peak_flops
    for p, height in zip(
        points, (attainable_flops(points[0], *roofs), 5e12, 1e6 / 4e6 * 4.8e12), strict=True
    ):
        assert curve(axes, f"{p.name} requested") == [pytest.approx((p.flops / p.requested_bytes, height))]
        assert curve(axes, f"{p.name} ideal") == [pytest.approx((p.flops / p.ideal_bytes, height))]
    # 01 is under L2's roof, as it requests so much.
    assert attainable_flops(points[0], *roofs) == pytest.approx(flops / points[0].requested_bytes * 1e13)
    faces = {line.get_label(): line.get_markerfacecolor() for line in axes.lines}
    assert [label for label, face in faces.items() if label.endswith("requested") and face != "white"] == [
        "05_fp32_accum requested"
    ]
    assert all(face == "white" for label, face in faces.items() if label.endswith("ideal"))
    said = words(figure)
    assert "01_naive (not measured)" in said
    assert "05_fp32_accum (not measured)" not in said
    assert "HBM 4.8 TB/s" in said
    assert "L2 10 TB/s" in said
    assert "peak 67 TFLOP/s" in said
    assert axes.get_xlabel() == "FLOP/byte"


@pytest.mark.parametrize("l2_over_hbm", [1.1, 1.3, 4.0])
def test_names_of_the_roofs_stand_apart(l2_over_hbm: float) -> None:
    points = [RooflinePoint("a", flops=1e9, requested_bytes=3e9, ideal_bytes=1e6, seconds=1e-3)]
    figure = draw_roofline(points, H200.peak_flops, H200.hbm_bandwidth, l2_over_hbm * H200.hbm_bandwidth)
    assert_readable(figure)
    (axes,) = figure.axes
    names = [t for t in axes.texts if t.get_text().startswith(("HBM", "L2", "peak"))]
    assert len(names) == 3
    for one, other in itertools.combinations(names, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)
    for line in axes.lines[:2]:  # the slopes
        slope = line.get_transform().transform_path(line.get_path())
        for name in names:
            assert not slope.intersects_bbox(name.get_window_extent(), filled=False), (line, name)


# ---------------------------------------------------------------- shared memory


def request(example: list[int | None], bytes_per_lane: int = 4) -> Requests:
    return Requests(
        0, "k", Location(Path("kernel.cu"), 7), "shared", "read", bytes_per_lane, 1, 32, 1, 1, tuple(example)
    )


def test_passes_are_those_that_the_checker_counts(reports: dict) -> None:
    shared = [r for report in reports.values() for r in report.traffic.requests if r.memory == "shared"]
    assert [bank_access(r).passes for r in shared] == [r.worst for r in shared]
    assert {r.worst for r in shared} > {1}


@pytest.mark.parametrize(
    ("example", "bytes_per_lane", "passes", "needed"),
    [
        ([4 * lane for lane in range(32)], 4, 1, 1),
        ([256 * lane for lane in range(32)], 4, 32, 1),  # a column of an unpadded tile of 64 floats
        ([260 * lane for lane in range(32)], 4, 1, 1),  # padded
        ([128] * 32, 4, 1, 1),  # broadcast
        ([2 * lane for lane in range(32)], 2, 1, 1),
        ([8 * lane for lane in range(32)], 8, 2, 2),
        ([16 * lane for lane in range(32)], 16, 4, 4),
        ([256 * lane for lane in range(32)], 16, 32, 4),
        ([None] * 31 + [12], 4, 1, 1),
        ([256 * lane for lane in range(4)] + [None] * 28, 8, 4, 1),
    ],
)
def test_passes_over_the_banks(
    example: list[int | None], bytes_per_lane: int, passes: int, needed: int
) -> None:
    access = bank_access(request(example, bytes_per_lane))
    assert (access.passes, access.needed) == (passes, needed)
    touched = {
        (address // 4 + word, lane)
        for lane, address in enumerate(example)
        if address is not None
        for word in range(max(bytes_per_lane // 4, 1))
    }
    assert {(word, lane) for word, lanes in access.lanes.items() for lane in lanes} == touched
    assert bool(access.conflicts) == (passes > needed)
    assert ("no bank conflict" in access.verdict) == (passes == needed)


def test_shared_access_drawn(reports: dict) -> None:
    padded = next(
        r
        for r in reports["05_fp32_accum"].traffic.requests
        if r.memory == "shared" and None not in r.example and r.example[1] == r.example[0] + 260
    )
    unpadded = request([256 * lane for lane in range(32)])
    figure = draw_shared_access([unpadded, padded], ["unpadded", "padded"])
    assert_readable(figure)
    for axes, r, title in zip(figure.axes, (unpadded, padded), ("unpadded", "padded"), strict=True):
        cells = {p.get_gid(): p for p in axes.patches if p.get_gid()}
        assert set(cells) == {f"word {address // 4}" for address in r.example}
        assert [cells[f"word {address // 4}"].get_x() for address in r.example] == [
            address // 4 % 32 for address in r.example
        ]
        colours = Counter(to_hex(cell.get_facecolor()) for cell in cells.values())
        assert colours == {"#8b1a1a" if title == "unpadded" else "#bfe0f5": 32}
        named = {(t.get_position()[0] - 0.5): t.get_text() for t in axes.texts if t.get_position()[1] > 0}
        if title == "padded":
            assert named == {a // 4 % 32: str(lane) for lane, a in enumerate(r.example)}
        rows = [t.get_text() for t in axes.get_yticklabels()[1:]]
        assert rows == [f"{a:,}" for a in sorted({address // 128 * 128 for address in r.example})]
    assert figure.axes[0].get_title().endswith("32-way bank conflict")
    assert figure.axes[1].get_title().endswith("no bank conflict")


def test_lanes_of_one_word_are_named_together() -> None:
    figure = draw_shared_access(request([0] * 8 + [4, 8] + [4] * 21 + [12]))
    assert_readable(figure)
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.texts][:4] == ["0\n⋮\n7", "8\n+21", "9", "31"]
    assert axes.get_title().startswith("kernel.cu:7\n")


def test_only_shared_memory_has_banks() -> None:
    with pytest.raises(ValueError, match="request is of q"):
        bank_access(dataclasses.replace(request([0] * 32), memory="q"))
    with pytest.raises(ValueError, match="titles has 1 entries for 2 requests"):
        draw_shared_access([request([0] * 32)] * 2, "one")


# ---------------------------------------------------------------- curves


def test_memory_drawn() -> None:
    chapters = [loaded(name) for name in ("01_naive", "02_tiled", "05_fp32_accum")]
    seqlens = [256, 4096, 65536]
    sizes = {"batch": 2, "num_heads": 3, "head_dim": 64}
    dtype = torch.float32
    figure = draw_memory(seqlens, **sizes, dtype=dtype, chapters=chapters, card_bytes={"a card": 5e9})
    assert_readable(figure)
    (axes,) = figure.axes
    assert curve(axes, "P stored in fp32") == [(n, 2 * 3 * n * n * 4) for n in seqlens]
    assert curve(axes, "q, k, v, out") == [(n, 4 * 2 * 3 * n * 64 * 4) for n in seqlens]
    assert curve(axes, "lse") == [(n, 2 * 3 * n * 4) for n in seqlens]
    for label, chapter in (("01: s, p, dp, ds", chapters[0]), ("05: dq_accum", chapters[2])):
        asked = [chapter.workspace(**sizes, dtype=dtype, seqlen_q=n).bytes for n in seqlens]
        assert curve(axes, label) == list(zip(seqlens, asked, strict=True))
    assert {y for _, y in curve(axes, "a card")} == {5e9}
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert "batch 2, 3 heads, head_dim 64, fp32" in axes.get_title()
    assert "no scratch: 02" in axes.get_title()
    assert {"a card", "lse", "256", "4K", "64K", "1 MB"} <= set(words(figure).split("\n"))


def test_accuracy_drawn() -> None:
    errors = [
        DqError(dtype, n, 32, unit * math.sqrt(1 + n / 64), unit)
        for dtype, unit in (("bf16", 2e-3), ("fp16", 2e-4), ("fp32", 2e-7))
        for n in (256, 64, 1024)
    ]
    figure = draw_accuracy(errors)
    assert_readable(figure)
    error, ratio = figure.axes
    for dtype in ("bf16", "fp16", "fp32"):
        series = sorted((e for e in errors if e.dtype == dtype), key=lambda e: e.seqlen_k)
        assert curve(error, f"04, {dtype}") == [(e.seqlen_k, e.atomic) for e in series]
        assert curve(error, f"05, {dtype}") == [(e.seqlen_k, e.accumulated) for e in series]
        assert curve(ratio, dtype) == [(e.seqlen_k, e.ratio) for e in series]
    assert curve(ratio, "√(1 + T/2)") == [(n, math.sqrt(1 + n / 32 / 2)) for n in (64, 256, 1024)]
    assert "32 keys each" in ratio.get_title()


def test_dq_errors_measured() -> None:
    found = measure_dq_errors(iter([64, 1000]), [torch.float16], seqlen_q=16)
    assert [(e.dtype, e.seqlen_k, e.rounded_every, e.num_blocks) for e in found] == [
        ("fp16", 64, 32, 2),
        ("fp16", 1000, 32, 32),
    ]
    assert found[1].predicted_ratio == math.sqrt(1 + 32 / 2)
    assert found[1].ratio == pytest.approx(found[1].predicted_ratio, rel=0.3)
    assert found[1].accumulated == pytest.approx(2e-4, rel=0.5)  # one rounding to fp16
    assert DqError("fp32", 1000, 32, 1.0, 1.0).predicted_ratio == 1
    with pytest.raises(ValueError, match="05_fp32_accum does not say that it rounds dq"):
        measure_dq_errors([64], atomic=5)


def a_ladder(device: str) -> Ladder:
    settings = Settings(device, "fp32", 1, 2, 64, (128, 256), False, None, 2.0)

    def rung(name: str, n: int, seconds: float, workspace: int, error: float) -> Rung:
        comparisons = [Comparison("dk", error / 2, 1e-3, 0, 1), Comparison("dq", error, 1e-3, 0, 1)]
        tflops = 1e-12 * n**3 / seconds if device == "cuda" else None
        return Rung(name, n, comparisons, workspace, seconds, tflops=tflops)

    rungs = [rung("01_naive", n, 1e-3 * n, 16 * n * n, 1e-5) for n in (128, 256)]
    rungs += [rung("04_atomic_dq", n, 1e-4 * n, 0, 1e-5 * n) for n in (128, 256)]
    rungs += [rung("05_fp32_accum", 128, 1e-4, 128, 0.0), Rung("05_fp32_accum", 256, skipped="too long")]
    rungs += [Rung("06_deterministic", 128, failed="no"), rung("07_causal_skip", 256, 1e-2, 0, math.nan)]
    rungs += [Rung("SDPA FLASH", n, seconds=1e-5, tflops=0.1 * n) for n in (128, 256)]
    return Ladder(settings, {"device": "a device", "date": "today"}, rungs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ladder_drawn(device: str, tmp_path: Path) -> None:
    ladder = a_ladder(device)
    figure = draw_ladder(ladder, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert_readable(figure)
    speed, memory, error = figure.axes
    for name in ("01_naive", "04_atomic_dq", "SDPA FLASH"):
        rungs = [r for r in ladder.rungs if r.name == name]
        speeds = [(r.seqlen, r.tflops if device == "cuda" else r.seconds) for r in rungs]
        assert curve(speed, name) == speeds
        if name != "SDPA FLASH":
            assert curve(memory, name) == [(r.seqlen, r.workspace_bytes / 1e6) for r in rungs]
            assert curve(error, name) == [(r.seqlen, r.comparisons[1].error) for r in rungs]
    crosses = [line for line in error.lines if line.get_marker() == "x"]
    assert next(tuple(map(tuple, line.get_xydata())) for line in crosses) == ((128, 1.28e-3), (256, 2.56e-3))
    assert ("TFLOP/s" if device == "cuda" else "seconds") in speed.get_title()
    assert memory.get_title() == "scratch memory, MB"
    assert "batch 1, 2 heads, head_dim 64, full; today" in words(figure)


def test_ladder_of_nothing(tmp_path: Path) -> None:
    ladder = dataclasses.replace(a_ladder("cpu"), rungs=[Rung("01_naive", 128, failed="no")])
    assert_readable(draw_ladder(ladder))


# ---------------------------------------------------------------- what they share


def test_a_notebook_shows_a_figure_once() -> None:
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    figure = draw_tiles(9, 9, 3, 3, True)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == before


def test_quantities() -> None:
    shown = [quantity(n, "B") for n in (0, 1, 999, 999.9, 1000, 84_000_000, 999_950_000, 1.5e15)]
    assert shown == ["0 B", "1 B", "999 B", "1 KB", "1 KB", "84 MB", "1 GB", "1.5 PB"]
    assert [byte_unit(n)[1] for n in (10, 2e3, 3e6, 4e9)] == ["B", "KB", "MB", "GB"]


def test_labels_do_not_overlap() -> None:
    assert spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    for levels in ([0.5] * 6, [0.1, 0.12, 0.2, 0.21, 0.9], [0.0, 0.05, 0.1, 0.15]):
        moved = spread(levels, 0.1)
        assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(moved))
        assert sum(moved) == pytest.approx(sum(levels))
    figure = new_figure(4, 4)
    axes = figure.subplots()
    axes.set_ylim(0, 1)
    label_ends(axes, [EndLabel(1, 0.5, "07"), EndLabel(1, 0.5, "05"), EndLabel(1, 0.9, "01")], join=True)
    assert [text.get_text() for text in axes.texts] == ["05 07", "01"]


def test_training_shows_curves_and_differences() -> None:
    figure = draw_training({"one": [3.0, 2.0], "other": [3.5, 2.25]})
    curves, differences = figure.axes
    assert [list(line.get_ydata()) for line in curves.lines] == [[3.0, 2.0], [3.5, 2.25]]
    assert [list(line.get_ydata()) for line in differences.lines] == [[0.5, 0.25]]
    assert differences.get_ylabel() == "loss minus that of one"
