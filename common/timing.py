"""Timing on the GPU and on the CPU device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# Clock cycles that a GPU sleeps: for a second, if its clock is 2 GHz (longer if it is lower); and at most.
_CYCLES, _MOST_CYCLES = 2e9, 2e7


def median_seconds(
    function: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 2,
    repeats: int = 10,
    limit: float = 0.5,
) -> float:
    """Median time of one call in seconds: CUDA events on a GPU, a clock elsewhere.

    On a GPU it is the time of the call's kernels. The GPU sleeps first, for twice the time that it took to
    start the call before (at most 10 ms), so that all kernels are queued when the first one starts: what
    Python takes for a call is not the kernels', and a model that keeps its GPU busy hides it.

    Stops early once ``limit`` seconds are spent measuring, after at least one measured call; calls that
    take longer than the limit are not warmed up twice. On a GPU the first call never counts: some
    libraries build their kernels in it, for seconds.
    """
    start = time.perf_counter()
    times: list[float] = []
    to_start = 0.0
    for i in range(warmup + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(min(2 * to_start * _CYCLES, _MOST_CYCLES)))
            begin.record()
            started = time.perf_counter()
            function()
            to_start = time.perf_counter() - started
            end.record()
            torch.cuda.synchronize(device)
            seconds = begin.elapsed_time(end) / 1000
        else:
            begin = time.perf_counter()
            function()
            seconds = time.perf_counter() - begin
        spent = time.perf_counter() - start
        if i >= warmup or (spent > limit and (i > 0 or device.type != "cuda")):
            times.append(seconds)
        if times and spent > limit:
            break
    return statistics.median(times)


def start_calls(function: Callable[[], object], calls: int, device: torch.device) -> Callable[[], float]:
    """Starts ``calls`` calls back to back. What it returns waits for them, and gives the seconds of one.

    On a GPU the calls are only queued, so that one kernel follows the other without a gap.
    """
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1000 / calls

        return seconds
    started = time.perf_counter()
    for _ in range(calls):
        function()
    spent = time.perf_counter() - started
    return lambda: spent / calls


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over the repetitions. calls: how many calls one repetition averages."""

    median: float
    low: float
    high: float
    calls: int


def interleaved_timings(
    functions: Mapping[str, Callable[[], object]],
    start: Callable[[Callable[[], object], int], Callable[[], float]],
    *,
    repeats: int = 7,
    target: float = 0.010,
    max_calls: int = 20,
    rest: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Timing]:
    """Times functions in turns, so that heat and clocks hit all alike. They must have run once before.

    Each repetition times every function once, forwards and backwards by turns, so that none always follows
    the same other one. A function is called often enough for a repetition of it to last ``target`` seconds,
    at most ``max_calls`` times. One repetition warms up and is not counted.

    ``rest``: before each timing the GPU rests that many times as long as the timing before took, so that a
    card at its power limit does not lower its clocks for one kernel because of another.
    ``start``: starts that many calls of a function; see ``start_calls``. ``sleep``: waits for seconds.
    """
    calls = {}
    for name, function in functions.items():
        once = start(function, 2)()
        calls[name] = min(max_calls, max(1, math.ceil(target / once))) if once > 0 else max_calls
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    spent = 0.0
    for repeat in range(-1, repeats):
        for name in functions if repeat % 2 else reversed(functions):
            sleep(rest * spent)
            # Called once before it is timed: a first call on an idle GPU takes the time of its launch, too.
            functions[name]()
            each = start(functions[name], calls[name])()
            spent = each * calls[name]
            if repeat >= 0:
                seconds[name].append(each)
    return {
        name: Timing(statistics.median(found), min(found), max(found), calls[name])
        for name, found in seconds.items()
    }


def backward_flops(
    batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, is_causal: bool
) -> float:
    """10·B·H·Nq·Nk·d, the five matrix products of a backward pass; half of it when causal.

    The convention of the FlashAttention-2 paper (section 4.1), whatever a kernel really computes.
    """
    return 10.0 * batch * num_heads * seqlen_q * seqlen_k * head_dim * (0.5 if is_causal else 1.0)


def forward_flops(
    batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, is_causal: bool
) -> float:
    """4·B·H·Nq·Nk·d; half of it when causal."""
    return 0.4 * backward_flops(batch, num_heads, seqlen_q, seqlen_k, head_dim, is_causal)


def matmul_tflops(device: torch.device, dtype: torch.dtype, *, size: int = 8192) -> float:
    """TFLOP/s of a [size, size] matrix product of random numbers: the practical peak of the card."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / median_seconds(lambda: a @ b, device, warmup=3) / 1e12
