"""Measures the ladder on this machine's GPU and stores it: ``make bench``.

Every chapter and PyTorch's own SDPA backends run in the same process, on random inputs; times include all
kernels of a backward pass.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

from common import jit, measurements
from common.chapters import list_chapters
from common.ladder import DTYPES, HEADER, Rung, Settings, climb, line

SEQLENS = (512, 1024, 2048, 4096)


def main(arguments: list[str] | None = None) -> int:
    """Runs all combinations asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.bench", description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["bf16", "fp16"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--seqlens", nargs="+", type=int, default=list(SEQLENS))
    parser.add_argument("--width", type=int, default=1024, help="heads times head_dim (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds a kernel may take")
    parser.add_argument("--output", type=Path, default=measurements.FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    if problem := jit.cuda_problem():
        print(f"nothing to measure: {problem}", file=sys.stderr)
        return 2
    ok = True
    for dtype, head_dim, mask in product(options.dtypes, options.head_dims, options.masks):
        settings = Settings(
            device="cuda",
            dtype=dtype,
            batch=1,
            heads=max(1, options.width // head_dim),
            head_dim=head_dim,
            seqlens=tuple(options.seqlens),
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
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
