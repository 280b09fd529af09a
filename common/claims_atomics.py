"""What the book says of dQ: staged, added up by atomics, added up in fp32 (§16.3). Chapters 03, 04 and 05."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from common import experiments, sass
from common.accuracy import DqError, measure_dq_errors
from common.chapters import load_chapter
from common.check import remembered_check
from common.claims import CONDITION, FAILS, HOLDS, WAITS, Verdict, claim
from common.formulas import Problem
from common.inputs import random_inputs
from common.measurements import load_ladders
from common.report import Report

RECOMPUTE, STAGED, ATOMIC, FP32 = "02_tiled", "03_two_stage", "04_atomic_dq", "05_fp32_accum"
BLOCK_N = 32  # kBlockN of these chapters
_BOOK = Problem(1, 1, 4096, 4096, 64, torch.float16)
_H100_SHARED_BYTES = 227 * 1024  # the most a block can have (compute capability 9.0)


def report(chapter: str, problem: Problem) -> Report:
    """What a chapter asks memory for. Counted once for each version of its kernel."""
    return remembered_check(chapter, problem)[0]


def predict(chapter: str, problem: Problem) -> dict[str, Any]:
    """Traffic by tensor from the chapter's formulas, which equal the count at every size."""
    return load_chapter(chapter).info.formulas("backward").predict(problem)


# ---------------------------------------------------------------- how many atomics


def additions(chapter: str, problem: Problem) -> int:
    """Numbers that one head adds to dQ by atomics."""
    counted = report(chapter, problem).traffic.tensors
    target = "dq_accum" if "dq_accum" in counted else "dq"
    return counted[target].atomic_bytes // (4 if target == "dq_accum" else problem.dtype.itemsize)


@claim(
    4,
    "Adding dQ up by atomics takes B_r·d of them for each pair of tiles, about N²·d/B_c per head; N² when "
    "d = B_c.",
    source="§16.3.1",
    chapters=(ATOMIC, FP32),
)
def number_of_atomics() -> Verdict:
    """Counts the additions, of sequences that tiles divide and that they do not."""
    found = []
    for seqlen, head_dim in ((64, 64), (64, 32), (50, 64)):
        problem = Problem(1, 1, seqlen, seqlen, head_dim, torch.float32)
        count = additions(FP32, problem)
        blocks = -(-seqlen // BLOCK_N)
        found.append((seqlen, head_dim, count, count == blocks * seqlen * head_dim))
    half = Problem(1, 1, 64, 64, 64, torch.float16)
    pairs = report(ATOMIC, half).traffic.tensors["dq"].atomics
    (_, _, whole, _), (_, _, square, _), (_, _, ragged, _) = found
    exact = all(equal for *_, equal in found) and square == 64**2 and 2 * pairs == whole
    evidence = (
        f"Counted in 05 with B_c = {BLOCK_N}: {whole:,} additions at N = 64, d = 64, which is N²·d/B_c; "
        f"{square:,} = N² at d = {BLOCK_N}. Exactly it is N·d·⌈N/B_c⌉: {ragged:,} at N = 50. 04 in fp16 "
        f"calls atomicAdd {pairs:,} times for the same {whole:,} additions, once for two neighbours. At N = "
        f"4096, d = 64 there are {predict(FP32, _BOOK)['dq_accum'].atomics:,} per head."
    )
    return Verdict(HOLDS if exact else FAILS, evidence)


# ---------------------------------------------------------------- 16 bits


@functools.cache
def _dq_errors(digests: tuple[str, str]) -> tuple[DqError, ...]:
    lengths = [BLOCK_N * blocks for blocks in (16, 64)]
    return tuple(measure_dq_errors(lengths, (torch.float16, torch.bfloat16)))


def dq_errors() -> tuple[DqError, ...]:
    """Errors of dQ in 04 and 05 at 16 and 64 K blocks, fp16 and bf16, on the CPU device."""
    return _dq_errors((load_chapter(ATOMIC).digest, load_chapter(FP32).digest))


def is_loop(opcodes: list[str]) -> bool:
    """Whether the additions are a loop around a comparison and swap, not an instruction that adds."""
    return any(".CAS" in opcode for opcode in opcodes)


def short(opcodes: list[str]) -> str:
    """``RED.E.ADD.F32`` of ``RED.E.ADD.F32.FTZ.RN.STRONG.GPU``, each opcode once."""
    return ", ".join(
        dict.fromkeys(".".join(opcode.split(".")[:4]).removesuffix(".STRONG") for opcode in opcodes)
    )


def _no_sass() -> Verdict:
    return Verdict(
        WAITS,
        "The kernel was edited since its instructions were stored, and nvcc or nvdisasm is missing here.",
        "`python -m common.sass`",
    )


@claim(
    5,
    "Atomics in half precision halve the bytes. The hardware has long had them (`__half2` since sm_60, "
    "`__half` since sm_70); the obstacle is accuracy, as dQ is a sum over tens or hundreds of K blocks.",
    source="§16.3.1",
    chapters=(ATOMIC,),
)
def sixteen_bit_atomics() -> Verdict:
    """Bytes from the count, hardware from the compiled code, accuracy from running both chapters."""
    atomics = sass.instructions(ATOMIC)
    if atomics is None:
        return _no_sass()
    problem = Problem(1, 1, 128, 128, 64, torch.bfloat16)
    in_04 = report(ATOMIC, problem).traffic.tensors["dq"].atomic_bytes
    in_05 = report(FP32, problem).traffic.tensors["dq_accum"].atomic_bytes
    errors = dq_errors()
    grows = all(abs(e.ratio / e.predicted_ratio - 1) < 0.15 for e in errors)
    growth = ", ".join(f"{e.predicted_ratio:.1f} × at {e.num_blocks}" for e in errors if e.dtype == "bf16")
    adds = not is_loop(atomics["fp16 sm_75"] + atomics["fp16 sm_80"] + atomics["bf16 sm_90a"])
    loops = is_loop(atomics["bf16 sm_80"])
    evidence = (
        f"Bytes: {in_04:,} against {in_05:,} at N = 128. Accuracy: the error of 04's dQ is "
        f"{'' if grows else 'not '}within 15 % of √(1 + T_k/2) times 05's: {growth} K blocks. "
        f"Hardware: fp16 pairs compile to {short(atomics['fp16 sm_75'])} for sm_75, the oldest that nvcc 13 "
        f"knows, and later; bf16 pairs to {short(atomics['bf16 sm_90a'])} for sm_90a, but for sm_80 to "
        f"{short(atomics['bf16 sm_80'])}{', in a loop until nobody came between' if loops else ''}."
    )
    measured = "error of 04 / 05: " + ", ".join(
        f"{e.dtype}, T_k = {e.num_blocks}: {e.ratio:.2f}" for e in errors
    )
    if not (2 * in_04 == in_05 and grows and adds):
        return Verdict(FAILS, evidence, measured=measured)
    if not loops:
        return Verdict(HOLDS, evidence, measured=measured)
    condition = "half means fp16; before sm_90 no instruction adds a pair of bf16"
    return Verdict(CONDITION, evidence, condition, measured)


# ---------------------------------------------------------------- plan B


def products_of_recompute(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """The matrix products of 02 for one pair of tiles: S and dP are made by both kernels."""
    s, dp = q @ k.T, dout @ v.T  # outer K
    _ = s.T @ dout, dp.T @ q
    s, dp = q @ k.T, dout @ v.T  # outer Q
    _ = dp @ k


def products_of_staged(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """The matrix products of 03 for one pair of tiles, and of 04 and 05."""
    s, dp = q @ k.T, dout @ v.T
    _ = s.T @ dout, dp.T @ q, dp @ k


def count_products(function: Callable[[Tensor, Tensor, Tensor, Tensor], object]) -> int:
    """How many [N, d]-by-[d, N] products' worth of FLOPs a function makes, as PyTorch counts them."""
    x = random_inputs(1, 1, 32, 64)
    with FlopCounterMode(display=False) as counter:
        function(*(t[0, 0] for t in (x.q, x.k, x.v, x.dout)))
    return counter.get_total_flops() // (2 * 32 * 32 * 64)


@claim(
    6,
    "Plan B, two kernels without atomics, needs a temporary buffer for dS, which is N×N: what FlashAttention "
    "avoids.",
    source="§16.3.2",
    chapters=(STAGED,),
)
def plan_b_needs_a_buffer() -> Verdict:
    """Scratch memory, atomics and products of 02, 03 and 05."""
    problem = Problem(1, 1, 128, 128, 64, torch.bfloat16)
    rows = []
    for name in (RECOMPUTE, STAGED, FP32):
        scratch = scratch_bytes(name, _BOOK)
        atomics = sum(t.atomics for t in report(name, problem).traffic.tensors.values())
        rows.append((scratch, atomics))
    seven, five = count_products(products_of_recompute), count_products(products_of_staged)
    (none, none_atomics), (square, square_atomics), (linear, some_atomics) = rows
    evidence = (
        f"A 16-bit head at N = 4096, d = 64: 03 stages dS in {square:,} bytes (N² elements), makes "
        f"{square_atomics} atomics and {five} products. But 02 is two kernels as well, with {none} bytes of "
        f"scratch, {none_atomics} atomics and {seven} products: its second kernel makes dS again. 05 has "
        f"{linear:,} bytes (N·d in fp32), {five} products, and atomics ({some_atomics:,} at N = 128)."
    )
    as_said = square == 2 * 4096**2 and square_atomics == 0
    avoidable = none == none_atomics == 0
    if not as_said:
        return Verdict(FAILS, evidence)
    if not avoidable:
        return Verdict(HOLDS, evidence)
    return Verdict(CONDITION, evidence, "the second kernel reads dS instead of recomputing it")


# ---------------------------------------------------------------- RED


@claim(
    7,
    "Nobody uses the values that `atomicAdd` returns, so the compiler makes reductions that wait for no "
    "result: `RED.E.ADD.F32` for sm_80, `REDG.E.ADD.F32` for sm_90a, one per element (nvcc 13.4).",
    source="§16.3.2",
    chapters=(FP32,),
)
def unused_results_are_reductions() -> Verdict:
    """The opcodes in chapter 05's compiled code, and in 04's for comparison."""
    found, pairs = sass.instructions(FP32), sass.instructions(ATOMIC)
    if found is None or pairs is None:
        return _no_sass()
    expected = {"sm_75": "RED.E.ADD.F32", "sm_80": "RED.E.ADD.F32", "sm_90a": "REDG.E.ADD.F32"}
    as_said = all(
        opcodes and all(opcode.startswith(expected[build.split()[1]]) for opcode in opcodes)
        for build, opcodes in found.items()
    )
    evidence = (
        f"05 compiles to {short(found['bf16 sm_80'])} for sm_80 and {short(found['bf16 sm_90a'])} for "
        "sm_90a, in every dtype; there is no other atomic in its code. "
        f"It is a matter of the type: the fp16 pairs of 04 stay {short(pairs['fp16 sm_90a'])}, because "
        "cuda_fp16.hpp writes `atom` in inline assembly, for an address that may be shared memory."
    )
    return Verdict(HOLDS if as_said else FAILS, evidence, measured=_compiled_here())


def _compiled_here() -> str:
    versions = sass.tools()
    if versions is None:
        return "from the stored instructions; nvcc or nvdisasm is missing here"
    here = sass.compiled(FP32, (torch.bfloat16,), ("80", "90a"))
    return f"compiled here ({versions}): " + ", ".join(f"{b}: {short(ops)}" for b, ops in here.items())


# ---------------------------------------------------------------- staged traffic against atomics


def dq_bytes(chapter: str, problem: Problem) -> int:
    """Requested bytes of what dQ's sum goes through: ds, or dq_accum."""
    tensors = report(chapter, problem).traffic.tensors
    return tensors["ds" if "ds" in tensors else "dq_accum"].bytes


def scratch_bytes(chapter: str, problem: Problem) -> int:
    """Scratch memory that a chapter asks for."""
    p = problem
    sizes = {"batch": p.batch, "num_heads": p.num_heads, "seqlen_q": p.seqlen_q, "head_dim": p.head_dim}
    return load_chapter(chapter).workspace(**sizes, dtype=p.dtype).bytes


def break_even(bandwidth: float, rate: float) -> float:
    """B_c / d at which N²·d/B_c additions take as long as moving 4N² bytes, at measured speeds."""
    return bandwidth / (4 * rate)


def _each_alone() -> str:
    machine, atomics = experiments.load("machine"), experiments.load("atomics")
    if machine is None or atomics is None:
        return ""
    rate = next(
        r["operations_per_second"]
        for r in atomics["rows"]
        if (r["place"], r["type"], r["operation"]) == ("L2", "float", "atomicAdd")
    )
    staging = 4 * 16 * 4096**2 / machine["hbm_bandwidth"]
    adding = 16 * 4096**2 * 64 / BLOCK_N / rate
    return (
        f"at measured bandwidth and rate, N = 4096, d = 64, 16 heads: writing and reading dS takes "
        f"{1e3 * staging:.2f} ms, the additions {1e3 * adding:.2f} ms at B_c = {BLOCK_N}; they take equally "
        f"long at B_c = {break_even(machine['hbm_bandwidth'], rate):.2f} d"
    )


def _times(chapters: tuple[str, ...], seqlen: int) -> str:
    """Stored times of chapters, in words, or that there are none."""
    texts = []
    for ladder in load_ladders():
        s = ladder.settings
        rungs = [ladder.rung(name, seqlen) for name in chapters]
        if s.dtype == "bf16" and not s.causal and all(r is not None and r.seconds for r in rungs):
            times = ", ".join(f"{r.name[:2]}: {1e3 * r.seconds:.2f} ms" for r in rungs)
            texts.append(f"d = {s.head_dim}, {s.heads} heads: {times}")
    return f"N = {seqlen}, bf16, H200: " + "; ".join(texts) if texts else "times are not measured yet"


@claim(
    9,
    "The HBM traffic saved by not storing a matrix is far larger than the cost of the atomics.",
    source="§16.3.2",
    chapters=(FP32,),
)
def savings_outweigh_atomics() -> Verdict:
    """Requested bytes and sizes of staged dS (03) and of the fp32 accumulator (05), and stored times."""
    small = Problem(1, 1, 128, 128, 64, torch.bfloat16)
    book = Problem(1, 1, 4096, 4096, 128, torch.bfloat16)
    staged, added = dq_bytes(STAGED, small), dq_bytes(FP32, small)
    staged_book, added_book = predict(STAGED, book)["ds"].bytes, predict(FP32, book)["dq_accum"].bytes
    square, linear = (scratch_bytes(name, book) for name in (STAGED, FP32))
    evidence = (
        "Requested by one head in 16 bits: dS is written and read, 4N² bytes; the additions are 4N²·d/B_c, "
        f"and dq_accum is zeroed and read once. Counted at N = 128, d = 64: {staged:,} against {added:,} "
        f"bytes; by the formulas at N = 4096, d = 128: {staged_book:,} against {added_book:,}. With "
        f"B_c = {BLOCK_N} the atomics ask for more; with B_c = d both would be 4N². What HBM must hold is "
        f"another matter, and there the saving is {square // linear} times as large as what replaces it: at "
        f"N = 4096, d = 128 dS is {square:,} bytes per head and dq_accum {linear:,}."
    )
    measured = "; ".join(filter(None, (_times((STAGED, ATOMIC, FP32), 4096), _each_alone())))
    if 4 * linear > square:
        return Verdict(FAILS, evidence, measured=measured)
    if added > staged and added_book > staged_book:
        condition = "only HBM bytes count, or B_c is far larger than d"
        return Verdict(CONDITION, evidence, condition, measured)
    return Verdict(HOLDS, evidence, measured=measured)


# ---------------------------------------------------------------- shared memory first


@claim(
    21,
    "Adding dQ up by atomics in shared memory first is not realistic: all K blocks would have to be in one "
    "thread block, while the outer loop runs over all of K.",
    source="§16.3.1",
    chapters=(ATOMIC,),
)
def shared_memory_first() -> Verdict:
    """How many blocks add to an element of dQ, how often each does, and what one block would need."""
    problem = Problem(1, 1, 128, 128, 64, torch.float32)
    found = report(FP32, problem)
    (launch,) = [entry for entry in found.launches if entry.kernel == "backward_kernel"]
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    per_element = found.traffic.tensors["dq_accum"].atomics / (128 * 64)
    once = per_element == blocks
    needed = 4 * _BOOK.seqlen_q * _BOOK.head_dim
    whose = "one from each, so a block has nothing to add up first" if once else "not one from each"
    evidence = (
        f"At N = 128 a head has {blocks} thread blocks, and an element of dQ gets {per_element:g} additions: "
        f"{whose}. A single block that kept a head's dQ on chip would need {needed:,} bytes at N = 4096, "
        f"d = 64, of an H100's {_H100_SHARED_BYTES:,}, and the grid would shrink to one block per head."
    )
    return Verdict(HOLDS if once and needed > _H100_SHARED_BYTES else FAILS, evidence)


# ---------------------------------------------------------------- the rate


@claim(
    22,
    "Atomics on global memory are executed by the atomic units of L2, which makes them slow.",
    source="§16.3.1",
    chapters=(ATOMIC, FP32),
)
def atomics_are_slow() -> Verdict:
    """Stored rates of additions and of plain stores, inside of L2 and beyond."""
    data = experiments.load("atomics")
    if data is None:
        known = "The compiled instructions have the scope .GPU: they act on L2, which all SMs share."
        return Verdict(WAITS, known, "`make experiments` on a GPU")
    return judge_rates(data)


_SLOW = 0.8


def rate_ratios(data: dict[str, Any], operation: str = "atomicAdd") -> dict[tuple[str, str], float]:
    """(place, type) → additions per second over stores per second, where that operation was measured."""
    rates = {(r["place"], r["type"], r["operation"]): r["operations_per_second"] for r in data["rows"]}
    return {
        (place, kind): rate / rates[place, kind, "store"]
        for (place, kind, measured), rate in rates.items()
        if measured == operation
    }


def judge_rates(data: dict[str, Any]) -> Verdict:
    """What measured rates say of claim 22. Slow: less than ``_SLOW`` of the rate of plain stores."""
    ratios = rate_ratios(data)
    places = list(dict.fromkeys(place for place, _ in ratios))
    parts = [
        f"{place}: " + ", ".join(f"{kind} {ratio:.2f}" for (p, kind), ratio in ratios.items() if p == place)
        for place in places
    ]
    evidence = (
        f"Additions per second over plain stores per second on {data['machine']['device']}, every thread "
        f"another address: {'; '.join(parts)}. Slow means here: below {_SLOW:g}. Beyond L2 an addition reads "
        "and writes HBM where a store only writes, so there the units of L2 are not the whole reason."
    )
    for (place, kind), ratio in rate_ratios(data, "red").items():
        if ratios[place, kind] < _SLOW <= ratio:
            evidence += (
                f" The same additions of {kind} in {place} as a reduction (`red`): {ratio:.2f}. There the "
                "instruction is slow, not the units of L2."
            )
    conditions = []
    for place in places:
        slow = [kind for (where, kind), ratio in ratios.items() if where == place and ratio < _SLOW]
        if len(slow) == sum(where == place for where, _ in ratios):
            conditions.append(f"the buffer is {place}")
        elif slow:
            conditions.append(f"{' or '.join(slow)} are added in {place} by `atomicAdd`")
    measured = "; ".join(
        f"{r['place']}, {r['type']} {r['operation']}: {r['operations_per_second'] / 1e9:.0f} G/s"
        for r in data["rows"]
    )
    if all(ratio < _SLOW for ratio in ratios.values()):
        return Verdict(HOLDS, evidence, measured=measured)
    if conditions:
        return Verdict(CONDITION, evidence, ", or ".join(conditions), measured)
    return Verdict(FAILS, evidence, measured=measured)
