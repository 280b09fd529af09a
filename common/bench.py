"""Measures on this machine's GPU and stores it: ``make bench``.

The ladder is every chapter, with its errors and its memory, at batch 1; scalar chapters take seconds at
longer sequences. The sweep is the chapters that use tensor cores, beside PyTorch's SDPA backends, at the size
of a training step (common/sweep.py). All runs in one process, on random inputs; times include all kernels
of a backward pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path

import torch

from common import jit, measurements, sweep
from common.chapters import list_chapters
from common.ladder import DTYPES, HEADER, Rung, Settings, climb, line

SEQLENS = (512, 1024, 2048, 4096)
PARTS = ("ladder", "sweep")


def _settings(options: argparse.Namespace) -> product:
    return product(options.dtypes, options.head_dims, options.masks)


def _measure_ladder(options: argparse.Namespace) -> bool:
    """Returns whether every chapter is right."""
    ok = True
    for dtype, head_dim, mask in _settings(options):
        settings = Settings(
            device="cuda",
            dtype=dtype,
            batch=1,
            heads=max(1, (options.width or 1024) // head_dim),
            head_dim=head_dim,
            seqlens=tuple(options.seqlens or SEQLENS),
            causal=mask == "causal",
            text=None,
            time_limit=options.time_limit,
        )
        print(f"\n{dtype}, head_dim {head_dim}, {settings.heads} heads, {mask}\n{HEADER} TFLOP/s   seqlen")

        def report(rung: Rung) -> None:
            print(f"{line(rung)}  {rung.seqlen}", flush=True)

        ladder = climb(settings, list_chapters(), report=report)
        print(f"stored {measurements.store_ladder(ladder, options.output)}")
        ok = ok and ladder.ok
    return ok


def _measure_sweep(options: argparse.Namespace) -> bool:
    """Returns whether every chapter is right."""
    infos = sweep.tensor_core_chapters()
    dtypes = [dtype for dtype in options.dtypes if any(DTYPES[dtype] in info.dtypes for info in infos)]
    started = time.monotonic()
    print("\nbuilding what the sweep needs", flush=True)
    builds = sweep.build_all(infos, dtypes, options.head_dims)
    print(f"{builds} builds: {time.monotonic() - started:.0f} s", flush=True)
    started = time.monotonic()
    peaks = sweep.matmul_peaks(torch.device("cuda"))
    print("matrix product: " + ", ".join(f"{name} {peak:.0f} TFLOP/s" for name, peak in peaks.items()))
    ok = True
    for dtype, head_dim, mask in product(dtypes, options.head_dims, options.masks):
        settings = sweep.SweepSettings(
            device="cuda",
            dtype=dtype,
            head_dim=head_dim,
            causal=mask == "causal",
            seqlens=tuple(options.seqlens or sweep.SEQLENS),
            tokens=options.tokens,
            width=options.width or 2048,
            repeats=options.repeats,
            rest=options.rest,
        )
        print(f"\n{dtype}, head_dim {head_dim}, {settings.heads} heads, {mask}: N, backward TFLOP/s")

        def report(found: sweep.Sweep, seqlen: int) -> None:
            print(sweep.line(found, seqlen), flush=True)

        found = sweep.measure(settings, infos, peaks, report)
        for entry in found.left_out:
            where = "" if entry.seqlen is None else f", N = {entry.seqlen}"
            print(f"{'FAILED' if entry.failed else 'left out'}: {entry.name}{where}: {entry.why}")
        print(f"stored {measurements.store_sweep(found, options.output)}", flush=True)
        ok = ok and found.ok
    print(f"the sweep took {time.monotonic() - started:.0f} s")
    return ok


def main(arguments: list[str] | None = None) -> int:
    """Runs all combinations asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.bench", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part (default: both)")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["bf16", "fp16"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument(
        "--seqlens", nargs="+", type=int, help="default: 512 … 4096; of the sweep 512 … 16384"
    )
    parser.add_argument("--width", type=int, help="heads times head_dim (default: 1024; of the sweep 2048)")
    parser.add_argument(
        "--time-limit", type=float, default=1.0, help="seconds a kernel of the ladder may take"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="batch times N in the sweep")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each kernel in the sweep")
    parser.add_argument(
        "--rest",
        type=float,
        default=2.0,
        help="pause before each timing of the sweep, as a multiple of the timing before (default: 2)",
    )
    parser.add_argument("--output", type=Path, default=measurements.FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    if problem := jit.cuda_problem():
        print(f"nothing to measure: {problem}", file=sys.stderr)
        return 2
    ok = True
    if options.only != "sweep":
        ok = _measure_ladder(options)
    if options.only != "ladder":
        ok = _measure_sweep(options) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
