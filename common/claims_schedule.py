"""Claims about order, skipping and what comes before the main loop: chapters 06 to 08.

And those that later chapters decide, with what is known without them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from common import experiments, timing
from common.chapters import load_chapter, load_kernel
from common.check import compare_outputs, remembered_check
from common.claims import CONDITION, FAILS, HOLDS, WAITS, Verdict, claim
from common.formulas import Problem
from common.inputs import random_inputs
from common.jit import REPO_ROOT, kernel_digest
from common.measurements import FOLDER, find_sweep, load_ladders
from common.notebook import edited_kernel
from common.tiles import TileState, count_tiles, tile_states

SKELETON = "16.6"
_HALF_TILE = 32  # kBlockM and kBlockN of chapters 05 to 08 at head_dim 64


def _percent(part: Fraction | float) -> str:
    return f"{100 * float(part):.1f} %"


# The kernels that are checked. A check takes another path too: tests plant a mistake in a copy.
_FORWARD, _DETERMINISTIC, _CAUSAL_SKIP, _PREPROCESS, _TENSOR_CORES = (
    REPO_ROOT / "chapters" / name / "kernel.cu"
    for name in (
        "00_forward", "06_deterministic", "07_causal_skip", "08_preprocess_delta", "09_tensor_cores"
    )
)  # fmt: skip


def _faster(before: str, after: str, is_causal: bool) -> str:
    """Stored times of two chapters, bf16 and head_dim 64, or "" if there are none."""
    for ladder in load_ladders():
        s = ladder.settings
        if (s.dtype, s.head_dim, s.causal) != ("bf16", 64, is_causal):
            continue
        pairs = [(n, ladder.rung(before, n), ladder.rung(after, n)) for n in sorted(s.seqlens)]
        ratios = [
            f"{a.seconds / b.seconds:.2f} × at N = {n}" for n, a, b in pairs
            if a is not None and b is not None and a.seconds and b.seconds
        ]  # fmt: skip
        if ratios:
            return (
                f"{after} against {before}, bf16, d = 64, {'causal' if is_causal else 'full'}: faster by "
                f"{', '.join(ratios)} ({ladder.machine['device']}, {ladder.machine['date']})"
            )
    return ""


# ---------------------------------------------------------------- 8: the same bits on every run


def accumulator_bytes(splits: int, batch: int, num_heads: int, seqlen_q: int, head_dim: int) -> int:
    """Bytes of the fp32 accumulators of dQ: 4 · splits · B · H · Nq · d."""
    return 4 * splits * batch * num_heads * seqlen_q * head_dim


def our_splits(seqlen_k: int, block_n: int = _HALF_TILE, most: int = 8) -> int:
    """Accumulators of chapter 06: one per block of keys, at most kMaxSplits."""
    return min(math.ceil(seqlen_k / block_n), most)


def fa2_splits(num_sms: int, batch: int, num_heads: int) -> int:
    """Accumulators of FA2: as many blocks per head as fill the card."""
    return math.ceil(num_sms / (batch * num_heads))


def distinct_dqs(kernel: Path, deterministic: bool, schedules: Sequence[str | int]) -> int:
    """How many different dQ, bit by bit, come out of as many orders of the blocks."""
    x = random_inputs(1, 1, 40, 64, seqlen_k=512)
    results: list[torch.Tensor] = []
    for schedule in schedules:
        chapter = load_kernel(kernel, schedule=schedule)
        out, lse = chapter.forward(x.q, x.k, x.v)
        dq, _, _ = chapter.backward(x.q, x.k, x.v, out, x.dout, lse, deterministic=deterministic)
        if not any(torch.equal(dq, seen) for seen in results):
            results.append(dq)
    return len(results)


@claim(
    8,
    "With `deterministic` every thread block adds to a dQ accumulator of its own and a convert kernel sums "
    "them in a fixed order; that costs memory, and it is off by default",
    source="§16.3.2, §16.8",
    chapters=("06_deterministic",),
)
def deterministic_mode(kernel: Path = _DETERMINISTIC) -> Verdict:
    """Bits of chapter 06 under several orders of its blocks, and the memory of both rules."""
    schedules = ("in_order", 1, 2, 3)
    with_flag, without = (distinct_dqs(kernel, flag, schedules) for flag in (True, False))
    sizes = (1, 16, 4096, 64)
    one = accumulator_bytes(1, *sizes)
    ours, theirs = our_splits(4096), fa2_splits(132, 1, 16)
    evidence = (
        f"06 in {len(schedules)} orders of its blocks: "
        f"{'one dQ, bit by bit' if with_flag == 1 else f'{with_flag} different dQ'}, with the flag; "
        f"{'more than one' if without > 1 else 'one'} without. At B·H = 16, N = 4096, d = 64 one accumulator "
        f"is {one / 2**20:.0f} MiB; 06 takes min(N/32, 8) = {ours} of them, FA2 ⌈SMs / (B·H)⌉ = {theirs} on "
        f"a card of 132 SMs, and {fa2_splits(132, 1, 1)} if B·H = 1. FA2's bits therefore repeat on one card "
        "at one batch and number of heads; 06's, for one compiled kernel, depend on the inputs only."
    )
    return Verdict(HOLDS if with_flag == 1 and without > 1 else FAILS, evidence)


# ---------------------------------------------------------------- 14: hidden tiles


@claim(
    14,
    "With a causal mask whole tiles are skipped, which saves nearly half of the work on long sequences",
    source="§16.8",
    chapters=("07_causal_skip",),
)
def causal_skipping(kernel: Path = _CAUSAL_SKIP) -> Verdict:
    """Tiles of queries that chapter 07 loads, counted, against the tiles that exist."""
    n, d = 256, 64
    tiles = count_tiles(n, n, _HALF_TILE, _HALF_TILE, True)
    report, _ = remembered_check(load_kernel(kernel), Problem(1, 1, n, n, d, torch.float32, is_causal=True))
    loaded = Fraction(report.traffic.tensors["q"].read, _HALF_TILE * d * 4)
    long = count_tiles(4096, 4096, _HALF_TILE, _HALF_TILE, True)
    wide = count_tiles(512, 512, 128, 128, True)
    uneven = count_tiles(1024, 4096, _HALF_TILE, _HALF_TILE, True)
    evidence = (
        f"07 loads {loaded} of {tiles.total} tiles of Q at N = {n} (counted). With T_k tiles along each side "
        "it visits (T_k + 1) / 2T_k of them, so the saved share is "
        f"{_percent(1 - Fraction(tiles.visited, tiles.total))} at N = {n} and "
        f"{_percent(1 - Fraction(long.visited, long.total))} at N = 4096 with tiles of 32; "
        f"{_percent(1 - Fraction(wide.visited, wide.total))} at N = 512 with tiles of 128, as FA2 has at d = "
        "64 on an A100 or H100. With more keys than queries it is less: "
        f"{_percent(1 - Fraction(uneven.visited, uneven.total))} for 1024 queries and 4096 keys, because the "
        "mask is aligned at the bottom right."
    )
    if loaded != tiles.visited:
        return Verdict(FAILS, evidence)
    return Verdict(
        CONDITION, evidence, "N is many tiles long and there are as many keys as queries",
        measured=_faster("06_deterministic", "07_causal_skip", True),
    )  # fmt: skip


# ---------------------------------------------------------------- 19: without lse


def lse_pass_bytes(problem: Problem, block_m: int = _HALF_TILE) -> int:
    """Requested bytes of computing lse again: Q once, K once per tile of queries, lse written."""
    p = problem
    heads, e = p.batch * p.num_heads, p.dtype.itemsize
    tiles = math.ceil(p.seqlen_q / block_m)
    return heads * ((p.seqlen_q + tiles * p.seqlen_k) * p.head_dim * e + 4 * p.seqlen_q)


@claim(
    19,
    "Without a stored LSE, backward has to redo the online softmax: one more complete walk over K",
    source="§16.4, exercise 3",
    chapters=("08_preprocess_delta",),
)
def without_lse(kernel: Path = _FORWARD) -> Verdict:
    """The traffic of chapter 00 without V and O, which is what an lse-only pass needs."""
    small = Problem(1, 1, 70, 70, 64, torch.float32)
    report, _ = remembered_check(load_kernel(kernel), small)
    t = report.traffic.tensors
    counted = t["q"].read + t["k"].read + t["lse"].written
    long = Problem(1, 1, 4096, 4096, 64, torch.float16)
    extra, ideal = lse_pass_bytes(long), lse_pass_bytes(long, block_m=4096)
    evidence = (
        "A block sees one tile of a row at a time, and P needs the whole row's sum, so lse must be complete "
        f"before the main loop. One head, N = 4096, d = 64, fp16: a pass that reads Q once and K once per 32 "
        f"queries requests {extra / 1e6:.1f} MB ({lse_pass_bytes(long, 128) / 1e6:.1f} MB per 128 queries, "
        f"{ideal / 1e6:.2f} MB from an ideal cache), against {4 * 4096 / 1e3:.1f} kB that forward writes. It "
        f"also takes 2 N² d FLOPs, {_percent(Fraction(2, 10))} of the backward pass. The byte formula equals "
        f"what the checker counts in 00 at N = 70{'' if counted == lse_pass_bytes(small) else ': NOT'}."
    )
    return Verdict(HOLDS if counted == lse_pass_bytes(small) else FAILS, evidence)


# ---------------------------------------------------------------- 23: FA2's sources

FA2_COMMIT = "0251105"
FA2_FOLDER = "csrc/flash_attn/src"


@dataclass(frozen=True)
class Reference:
    """A line of FA2 that the book points to. book: words that it quotes; seen: those of the line itself."""

    file: str
    line: int
    book: str
    seen: str


# As read in https://github.com/Dao-AILab/flash-attention at FA2_COMMIT.
FA2_REFERENCES = (
    Reference(
        "flash_bwd_kernel.h", 125,
        "+ (!params.deterministic ? 0 : blockIdx.x * params.dq_accum_split_stride)",
        "+ (!params.deterministic ? 0 : blockIdx.x * params.dq_accum_split_stride)",
    ),
    Reference("flash_bwd_kernel.h", 169, "Is_V_in_regs", "Is_V_in_regs"),
    Reference(
        "flash_bwd_kernel.h", 176,
        "sP and sdQ share the same memory so be careful",
        "sP and sdQ share the same memory so be careful",
    ),
    Reference(
        "flash_bwd_kernel.h", 640,
        "Need syncthreads since we're writing to the same sdO location",
        "Need syncthreads since we're writing to the same sdO location",
    ),
    Reference(
        "flash_bwd_kernel.h", 678,
        "atomicAdd(&tdQgdQaccum(i), acc_dq(i));",
        "atomicAdd(&tdQgdQaccum(i), acc_dq(i));",
    ),
    Reference("flash_bwd_preprocess_kernel.h", 25, "dot_do_o", "dot_do_o"),
    Reference("flash_bwd_preprocess_kernel.h", 58, "compute_dot_do_o", "compute_dot_do_o"),
    Reference("flash_bwd_preprocess_kernel.h", 185, "convert_dQ", "convert_dQ"),
)  # fmt: skip
FA2_MBARRIERS = 0  # occurrences of "mbarrier" in flash_bwd_kernel.h
FA2_DEFAULT = "deterministic=False"  # in flash_attn/flash_attn_interface.py, every public function


def references_missing_in(checkout: Path) -> list[str]:
    """What of the above a checkout of FA2 does not have: file, line and the words that are missing there."""
    missing = []
    for r in FA2_REFERENCES:
        lines = (checkout / FA2_FOLDER / r.file).read_text().splitlines()
        if len(lines) < r.line or r.seen not in lines[r.line - 1]:
            missing.append(f"{r.file}:{r.line}: {r.seen}")
    if (checkout / FA2_FOLDER / "flash_bwd_kernel.h").read_text().count("mbarrier") != FA2_MBARRIERS:
        missing.append("flash_bwd_kernel.h has mbarriers")
    if FA2_DEFAULT not in (checkout / "flash_attn" / "flash_attn_interface.py").read_text():
        missing.append(f"flash_attn_interface.py: {FA2_DEFAULT}")
    return missing


@claim(
    23,
    "Eight references to lines of FA2's sources; no mbarrier in its backward kernel; `deterministic=False`",
    source="§16.3.2, §16.8",
    chapters=("06_deterministic", "08_preprocess_delta"),
)
def fa2_references(references: Sequence[Reference] = FA2_REFERENCES) -> Verdict:
    """The quoted words against the words at that line of the pinned commit."""
    wrong = [f"{r.file}:{r.line}" for r in references if r.book != r.seen]
    places: dict[str, list[int]] = {}
    for r in references:
        places.setdefault(r.file, []).append(r.line)
    named = "; ".join(f"`{file}` {', '.join(map(str, lines))}" for file, lines in places.items())
    if wrong:
        return Verdict(FAILS, f"Not the quoted words at commit {FA2_COMMIT}: {', '.join(wrong)}.")
    return Verdict(
        HOLDS,
        f"Read by hand under `{FA2_FOLDER}` at commit {FA2_COMMIT} (`references_missing_in` does it in a "
        f"checkout of FA2, which this needs none of): the quoted words stand where the text says: {named}. "
        f"`flash_bwd_kernel.h` has {FA2_MBARRIERS} mbarriers; the Python functions default to "
        f"`{FA2_DEFAULT}`. One detail: line 176 matters only on a path that is no longer launched, since "
        "blocks that run in parallel over keys add dQ from registers.",
    )


# ---------------------------------------------------------------- 31: delta once


@claim(
    31,
    "Computing D = rowsum(O ∘ dO) in the inner loop repeats it; a preprocess kernel computes it once and "
    "the main loop reads it",
    source="§16.2 against §16.8",
    chapters=("08_preprocess_delta",),
)
def delta_once(before: Path = _CAUSAL_SKIP, after: Path = _PREPROCESS) -> Verdict:
    """Bytes of O that chapters 07 and 08 read, counted, and the FLOPs that are repeated."""
    n, d = 128, 64
    problem = Problem(1, 1, n, n, d, torch.float32)
    reports = [remembered_check(load_kernel(kernel), problem)[0] for kernel in (before, after)]
    read = [report.traffic.tensors["out"].read for report in reports]
    shared = [max(launch.shared_bytes for launch in report.launches) for report in reports]
    once, blocks = n * d * 4, n // _HALF_TILE
    share = Fraction(2 * 4096**2 * d, _HALF_TILE) / (10 * 4096**2 * d)
    ratio = Fraction(read[0], max(read[1], 1))
    evidence = (
        f"At N = {n} 07 reads {read[0]:,} bytes of O, 08 {read[1]:,}: "
        f"{ratio.numerator if ratio.denominator == 1 else float(ratio)} times less, once per block of 32 "
        f"keys against once. A block needs {shared[1]:,} bytes of shared memory instead of {shared[0]:,} and "
        "3 barriers per tile instead of 4; dO is read once more. The repeated FLOPs are 2 N² d / 32, only "
        f"{_percent(share)} of the pass: what is saved is memory traffic, not arithmetic."
    )
    holds = read == [blocks * once, once] and shared[1] < shared[0]
    return Verdict(
        HOLDS if holds else FAILS, evidence,
        measured=_faster("07_causal_skip", "08_preprocess_delta", False),
    )  # fmt: skip


# ---------------------------------------------------------------- what later chapters decide


LONG = 4096  # queries; from here on a sequence is called long
_ESTIMATE = Fraction(5, 2) * Fraction(73, 63)


def ratio_ranges(rows: Sequence[Mapping[str, Any]], backend: str) -> dict[str, tuple[float, float]]:
    """Smallest and largest backward time over forward time, by head_dim and mask.

    Rows of a chapter that was edited since they were measured are left out.
    """
    ranges = {}
    for head_dim in (64, 128):
        for is_causal in (False, True):
            ratios = [
                r["backward_seconds"] / r["forward_seconds"] for r in rows
                if (r["backend"], r["head_dim"], r["is_causal"]) == (backend, head_dim, is_causal)
                and r.get("source") in (None, kernel_digest(_TENSOR_CORES))
            ]  # fmt: skip
            if ratios:
                ranges[f"d = {head_dim} {'causal' if is_causal else 'full'}"] = (min(ratios), max(ratios))
    return ranges


def _measured_ratios(data: Mapping[str, Any]) -> str:
    parts = []
    for backend in ("FLASH", experiments.ON_TENSOR_CORES):
        for name, rows in (("all N", data["rows"]), (f"N from {LONG} on", _long(data["rows"]))):
            ranges = ratio_ranges(rows, backend)
            if ranges:
                listed = "; ".join(
                    f"{where} {low:.2f} to {high:.2f}" for where, (low, high) in ranges.items()
                )
                title = "SDPA FLASH" if backend == "FLASH" else backend
                parts.append(f"{title}, {name}: {listed}")
    m = data["machine"]
    return f"backward/forward time. {'. '.join(parts)} ({m['device']}, {m['date']})"


def _long(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [r for r in rows if r["seqlen"] >= LONG]


def judge_ratio(data: Mapping[str, Any] | None, known: str) -> Verdict:
    """Whether the median of what FA2's kernels take on long sequences (in PyTorch) is about the estimate."""
    rows = [r for r in data["rows"] if r["backend"] == "FLASH"] if data is not None else []
    ratios = [r["backward_seconds"] / r["forward_seconds"] for r in _long(rows)]
    if data is None or not ratios:
        return Verdict(WAITS, known, "`make experiments` on a GPU")
    median = statistics.median(ratios)
    found = (
        f"SDPA FLASH at N from {LONG} on (FA2's kernels, on the H200): from {min(ratios):.2f} to "
        f"{max(ratios):.2f}, the median is {median:.2f}"
    )
    measured = _measured_ratios(data)
    if abs(median / float(_ESTIMATE) - 1) >= 0.1:
        return Verdict(FAILS, f"{known} {found}: more than 10 % off.", measured=measured)
    everywhere, long = (ratio_ranges(some, "FLASH") for some in (rows, _long(rows)))
    larger = all(everywhere[where][1] > high for where, (_, high) in long.items())
    return Verdict(
        CONDITION,
        f"{known} {found}{', and on short sequences more' if larger else ''}.",
        f"N is long: {LONG} or more in what was measured, on an H200",
        measured=measured,
    )


@claim(
    13,
    "Backward costs 2.5 times the FLOPs of forward and, by a rough estimate from 73 % and 63 % of an A100's "
    "peak, about 2.9 times its time",
    source="§16.7, exercise 2",
    chapters=("09_tensor_cores",),
)
def backward_over_forward() -> Verdict:
    """The ratio of FLOPs exactly, and what SDPA's FLASH kernels and chapter 09 take on the H200."""
    sizes = (1, 1, 4096, 4096, 64, False)
    flops = Fraction(timing.backward_flops(*sizes)) / Fraction(timing.forward_flops(*sizes))
    if flops != Fraction(5, 2):
        return Verdict(FAILS, f"The FLOP ratio is {flops}.")
    return judge_ratio(
        experiments.load("ratio"),
        f"In FLOPs the ratio is exactly {flops.numerator}/{flops.denominator}: five products against two, "
        f"2 N² d each. The estimate of the time is 2.5 · 73/63 = {float(_ESTIMATE):.2f}; the percentages are "
        "the best of each pass; the book says itself that the quotient varies.",
    )


@claim(
    24,
    "FA3 reaches about 740 TFLOP/s on an H100, 75 % of the peak, with mbarriers and warp specialization",
    source="§16.8, §16.9",
    chapters=("12_hopper",),
)
def fa3_speed() -> Verdict:
    """What the number is a share of."""
    sweep = find_sweep("bf16", 128, False)
    point = sweep.point("12_hopper", 16384) if sweep is not None else None
    return Verdict(
        CONDITION,
        f"740 of 989 TFLOP/s (dense fp16 on an H100 SXM) are {_percent(Fraction(740, 989))}. It is FA3's "
        "*forward* figure, so it says nothing about the backward pass of the book's chapter 16. Chapter 12 "
        "uses the same means for backward.",
        condition="it is said of forward",
        measured=""
        if point is None
        else f"12's backward, bf16, d = 128, N = 16384: {point.tflops:.0f} TFLOP/s on an H200, whose bf16 "
        f"matrix product reached {sweep.matmul_tflops['bf16']:.0f} in the same process",
    )


@claim(
    25,
    "The atomics of dQ and the larger need of shared memory are why backward does not fill the machine",
    source="§16.7",
    chapters=("10_async_pipeline", "11_warp_roles", "12_hopper"),
)
def why_backward_underfills() -> Verdict:
    """What the requests of each chapter allow, against what the tensor cores allow."""
    data = json.loads((FOLDER / "experiments_mma.json").read_text())
    rates = data["ceilings"]
    banks = 128 * rates["multiprocessors"] * rates["clock_hz"]
    inside, beyond = (rates["reduce_add_bytes_per_second"][size] for size in ("32 MB", "256 MB"))
    shared, atomics = {}, {}
    for name in ("09_tensor_cores", "10_async_pipeline", "11_warp_roles"):
        p = Problem(1, 1, 512, 512, 128, torch.bfloat16)
        counted = load_chapter(name).info.formulas("backward").predict(p)
        flops = timing.backward_flops(1, 1, p.seqlen_q, p.seqlen_k, p.head_dim, False)
        shared[name[:2]] = banks * flops / counted["shared"].bytes / 1e12
        atomics[name[:2]] = flops / counted["dq_accum"].atomic_bytes / 1e12
    products = rates["mma_sync_flops"]["8"] / 1e12
    holds_for_shared = all(limit < products for limit in shared.values())
    holds_for_atomics = inside * atomics["10"] < shared["10"]
    bound_by_atomics = [name for name in ("10", "11") if beyond * atomics[name] < shared[name]]
    limits = ", ".join(f"{limit:.0f} in {name}" for name, limit in shared.items())
    sweep = find_sweep("bf16", p.head_dim, False)
    found = {n: sweep.best(n) for n in ("10_async_pipeline", "11_warp_roles")} if sweep is not None else {}
    best = {name[:2]: tflops for name, tflops in found.items() if tflops is not None}
    (at_once,) = [e for e in data["experiments"] if e["id"] == "hopper_ceiling"]
    added, left_out = (v["values"][-1] for v in at_once["variants"])
    if not holds_for_shared or holds_for_atomics:
        return Verdict(FAILS, f"Shared memory allows {limits} TFLOP/s, the products {products:.0f}.")
    return Verdict(
        CONDITION,
        f"An H200, bf16, d = {p.head_dim}. Tensor cores allow {products:.0f} TFLOP/s by mma.sync. The bytes "
        f"of shared memory that the checker counts, at 128 a clock for each SM, allow {limits}: less. The "
        f"additions to dQ in 10 and 11 allow {inside * atomics['10']:,.0f} as long as their target stays in "
        f"L2; beyond it, in a buffer of 256 MB, {beyond * atomics['10']:.0f}, less than the shared memory of "
        f"{' and '.join(bound_by_atomics)}. Instructions and waiting are in neither number. The text means "
        "the size of shared memory rather than its bandwidth; how many blocks fit on an SM was varied "
        "once, in 11 at d = 64: two blocks of half the keys were slower.",
        condition="it is said of shared memory's bandwidth; of the atomics in "
        f"{' and '.join(bound_by_atomics)}, when dQ's accumulator is larger than L2",
        measured=f"bf16, d = {p.head_dim}, full: "
        + ", ".join(
            f"{name} reaches {x:.0f} TFLOP/s, {x / shared[name]:.0%} of what its shared memory allows"
            for name, x in best.items()
        )
        + f"; a variant of 12 that adds dQ after each tile's products reached {added} at N = "
        f"{at_once['seqlens'][-1]}, and {left_out}, with a wrong dQ, without the additions ({data['gpu']}, "
        f"{at_once['date']})",
    )


def _skipped_although_visible(seqlen_q: int, seqlen_k: int, block: int) -> tuple[int, int]:
    """Tiles with a visible element, and those of them before the q_start of the skeleton."""
    states = tile_states(seqlen_q, seqlen_k, block, block, True)
    visible = [
        (m, n) for m, row in enumerate(states) for n, state in enumerate(row) if state != TileState.SKIPPED
    ]
    return len(visible), sum(m * block < n * block for m, n in visible)


def fragment_values(rows: int, cols: int) -> int:
    """Values that each of a warp's 32 lanes holds of a matrix."""
    return rows * cols // 32


def lanes_with_pairs(first: Callable[[int], set], second: Callable[[int], set]) -> Fraction:
    """The share of what the lanes need (``second``) that each of them already holds (``first``)."""
    needed = sum(len(second(lane)) for lane in range(32))
    held = sum(len(first(lane) & second(lane)) for lane in range(32))
    return Fraction(held, needed)


def accumulator_places(lane: int) -> set[tuple[int, int]]:
    """(row, column) of what a lane holds of a [16, 16] accumulator, two C tiles of m16n8k16 side by side."""
    g, t = divmod(lane, 4)
    return {(g + r, 2 * t + c + e) for r in (0, 8) for c in (0, 8) for e in (0, 1)}


def operand_places(lane: int) -> set[tuple[int, int]]:
    """(row, column) of what a lane must hold of a [16, 16] operand A of m16n8k16."""
    g, t = divmod(lane, 4)
    return {(g + 8 * (i % 2), 2 * t + 8 * (i // 2) + e) for i in range(4) for e in (0, 1)}


def _without_scale(problem: Problem) -> float:
    """By what factor 09's dK is too large if dK is written as the skeleton writes it."""
    unscaled = edited_kernel(
        "09_tensor_cores",
        "dk_scale[2] = {params.softmax_scale, params.softmax_scale}",
        "dk_scale[2] = {1, 1}",
    )
    p = problem
    x = random_inputs(p.batch, p.num_heads, p.seqlen_q, p.head_dim, dtype=p.dtype)
    chapter = load_chapter("09_tensor_cores")
    out, lse = chapter.forward(x.q, x.k, x.v)
    dks = [c.backward(x.q, x.k, x.v, out, x.dout, lse)[1].double() for c in (unscaled, chapter)]
    return (dks[0].norm() / dks[1].norm()).item()


@claim(
    26,
    "The kernel skeleton of §16.6, as printed",
    source=f"§{SKELETON}",
    chapters=("09_tensor_cores",),
)
def skeleton(kernel: Path = _TENSOR_CORES) -> Verdict:
    """What had to change to make it work in 09; the text itself calls it a sketch that does not compile."""
    block, d, warps = 64, 64, 4
    problem = Problem(1, 1, 70, 70, d, torch.bfloat16)
    report, inputs = remembered_check(load_kernel(kernel), problem)
    works = not report.findings and all(
        c.ok for c in compare_outputs(load_kernel(kernel), problem, report, inputs)
    )
    registers = 2 * fragment_values(block, d)
    halves = fragment_values(16, 8)  # of one accumulator tile
    transposed = lanes_with_pairs(accumulator_places, lambda lane: {(c, r) for r, c in operand_places(lane)})
    visible, skipped = _skipped_although_visible(512, 1024, block)
    factor = _without_scale(problem)
    evidence = (
        "Every step uses only what earlier steps made. 09 makes the same steps in another order (dP before "
        "P, dK before dQ, delta before the loop), and "
        f"{'every gradient is within budget' if works else 'its gradients are NOT within budget'}. What had "
        f"to change: (1) A lane holds {halves} values of an accumulator tile, {halves // 2} `unsigned` of "
        f"packed halves; the skeleton declares one for P and for dS. (2) dV and dK of a [{block}, {d}] tile "
        f"are {registers} registers per thread if every warp holds both in full, above the limit of 255; in "
        f"09 {warps} warps share them, {registers // warps} each. (3) Then P and dS have to cross between "
        f"warps, and also between lanes: of Pᵀ as an operand a lane already holds {_percent(transposed)}. 09 "
        "has tiles sP and sdS in shared memory for that, read back by `ldmatrix.trans`, and a barrier "
        "before the products; the skeleton has neither. (4) `write_dK` gets no scale, though the comment "
        f"asks for it: without it 09's dK is {factor:.1f} times too large (√d = {math.isqrt(d)}). (5) It "
        "uses one length N for queries and keys, and `q_start` is right for equal lengths only: with 512 "
        f"queries and 1024 keys it skips {skipped} of {visible} visible tiles. Besides, sO and delta can "
        "leave the loop (chapter 08)."
    )
    if not works or abs(factor / d**0.5 - 1) > 0.02:
        return Verdict(FAILS, evidence)
    return Verdict(CONDITION, evidence, "read as a list of steps, with five changes")


def fa2_shared_bytes(head_dim: int, block_m: int, block_n: int, *, v_in_registers: bool) -> int:
    """Shared memory of FA2's backward, 16-bit, Q in two buffers, by its kernel traits."""
    q_do, kv = 3 * block_m * head_dim * 2, 2 * block_n * head_dim * 2
    p_ds = 2 * block_m * block_n * 2
    return q_do + (max(kv, kv // 2 + p_ds) if v_in_registers else kv + p_ds)


_V_AND_DS = (
    """  Element sV[kBlockN][kPaddedDim];
  Element sQ[kStagesQ][kBlockM][kPaddedDim];
  Element sdO[kStages][kBlockM][kPaddedDim];
  Element sdS[kStages][kBlockN][kBlockM];  // transposed: a row is a key
""",
    """  union {
    Element sV[kBlockN][kPaddedDim];
    Element sdS[kStages][kBlockN][kBlockM];
  };
  Element sQ[kStagesQ][kBlockM][kPaddedDim];
  Element sdO[kStages][kBlockM][kPaddedDim];
""",
)
_LAST_BARRIER_OF_09 = (
    "      __syncthreads();  // sQ and sdO, and after the last tile sK, are still read by the products\n"
)


@claim(
    27,
    "FA2 reuses shared memory three times: dS in V's place when V is in registers, dQ in P's place, the next "
    "dO in the same buffer",
    source="§16.8",
    chapters=("10_async_pipeline",),
)
def buffer_reuses() -> Verdict:
    """Two of the three made in our own kernels, checked with and without what they need."""
    sizes = (64, 64, 128)
    plain, reused = (fa2_shared_bytes(*sizes, v_in_registers=flag) for flag in (False, True))
    p = Problem(1, 1, 140, 140, 64, torch.bfloat16)
    wide = dataclasses.replace(p, head_dim=128)
    original = remembered_check("11_warp_roles", p)[0]
    united = edited_kernel("11_warp_roles", *_V_AND_DS)  # V is in registers at d = 64, not at d = 128
    free, raced = remembered_check(united, p)[0], remembered_check(united, wide)[0]
    single = remembered_check(edited_kernel("09_tensor_cores", _LAST_BARRIER_OF_09), p)[0]
    saved = max(x.shared_bytes for x in original.launches) - max(x.shared_bytes for x in free.launches)
    overwritten = sorted({str(f.memory) for f in single.of_tool("racecheck")})
    as_said = not free.findings and raced.of_tool("racecheck") and saved > 0 and "sdO" in overwritten
    in_registers, in_its_place = ("a race" if r.findings else "nothing" for r in (free, raced))
    evidence = (
        "The three places exist in FA2's sources (claim 23). **dS in V's place**, made in a copy of 11: at "
        f"d = {p.head_dim}, where V is in registers, the checker finds {in_registers}, {saved:,} bytes are "
        "saved, and the barrier before the first tile lies between the last read of V and dS; at d = "
        f"{wide.head_dim}, where V is read from its place for every tile, it finds {in_its_place}. FA2's "
        f"tile of {sizes[1]} queries and {sizes[2]} keys at d = {sizes[0]}, for cards on which a block can "
        f"have less than 144 KiB, takes {reused // 1024} KiB instead of {plain // 1024}. **The next dO in "
        "the same buffer** is what 09 does: without the barrier after its products, "
        f"{' and '.join(overwritten)} are overwritten while they are read; 10 has a second buffer instead. "
        "**dQ in P's place** is on a path of FA2 that is no longer launched; 10 and 11 add dQ from "
        "registers, and in 10 P has no place."
    )
    return Verdict(HOLDS if as_said else FAILS, evidence)
