"""Timing on the GPU and on the CPU device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(
    function: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 2,
    repeats: int = 10,
    limit: float = 1.0,
) -> float:
    """Median time of one call in seconds: CUDA events on a GPU, a clock elsewhere.

    Stops early once ``limit`` seconds are spent measuring, after at least one measured call; calls that
    take longer than the limit are not warmed up twice.
    """
    start = time.perf_counter()
    times: list[float] = []
    for i in range(warmup + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize(device)
            seconds = begin.elapsed_time(end) / 1000
        else:
            begin = time.perf_counter()
            function()
            seconds = time.perf_counter() - begin
        spent = time.perf_counter() - start
        if i >= warmup or spent > limit:
            times.append(seconds)
        if spent > limit:
            break
    return statistics.median(times)


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
