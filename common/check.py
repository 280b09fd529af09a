"""Checks a chapter without a GPU: ``python -m common.check 05``, or with the path of a ``.cu`` file.

Prints what the kernels ask memory for, whether the chapter's formulas say the same, how far the results are
off, and every mistake that memcheck, initcheck, racecheck and synccheck find. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from common.chapters import Chapter, load_chapter, load_kernel
from common.formulas import Problem
from common.inputs import Inputs, random_inputs
from common.jit import DTYPE_NAMES, BuildError
from common.ladder import DTYPES, check_at_least_one
from common.reference import Comparison, Gradients, compare
from common.report import Report


def check_chapter(chapter: Chapter, problem: Problem, *, optimize: str = "-O1") -> tuple[Report, Inputs]:
    """Checks a chapter's own pass on random inputs: backward, or forward where that is all it has."""
    p = problem
    x = random_inputs(p.batch, p.num_heads, p.seqlen_q, p.head_dim, seqlen_k=p.seqlen_k, dtype=p.dtype)
    if not chapter.has_backward:
        report = chapter.check(
            x.q, x.k, x.v, is_causal=p.is_causal, return_row_stats=p.return_row_stats, optimize=optimize
        )
        return report, x
    out, lse = chapter.forward(x.q, x.k, x.v, is_causal=p.is_causal)
    report = chapter.check(
        x.q, x.k, x.v, out, x.dout, lse, is_causal=p.is_causal, deterministic=p.deterministic,
        optimize=optimize,
    )  # fmt: skip
    return report, x


_remembered: dict[tuple[str, Problem], tuple[Report, Inputs]] = {}


def remembered_check(chapter: Chapter | str | int, problem: Problem) -> tuple[Report, Inputs]:
    """``check_chapter``, which a process runs once for each version of a kernel.

    The cells of a notebook and several claims look at the same run.
    """
    loaded = chapter if isinstance(chapter, Chapter) else load_chapter(chapter)
    key = (loaded.key, problem)
    if key not in _remembered:
        _remembered[key] = check_chapter(loaded, problem)
    return _remembered[key]


def compare_outputs(
    chapter: Chapter, problem: Problem, report: Report, x: Inputs, *, backward: bool | None = None
) -> list[Comparison]:
    """The results of a check against float64 on the same inputs.

    ``backward``: which pass was checked; by default the backward pass, if the chapter has one.
    """
    options = {"is_causal": problem.is_causal}
    backward = chapter.has_backward if backward is None else backward
    if backward:
        forward = chapter.forward(x.q, x.k, x.v, **options)
        result = Gradients(*forward, *report.outputs)
    else:
        # Only out and lse are compared; any gradients do for the rest.
        result = Gradients(*report.outputs[:2], *(torch.zeros_like(t) for t in (x.q, x.k, x.v)))
    names = ("dq", "dk", "dv") if backward else ("out", "lse")
    comparisons = compare(
        result, x.q, x.k, x.v, x.dout, **options, dq_rounded_every=chapter.info.dq_rounded_every
    )
    return [c for c in comparisons if c.name in names]


def _what(chapter: Chapter, problem: Problem) -> str:
    """What is checked, as the report will name it."""
    p = problem
    return (
        f"{chapter.name} {'backward' if chapter.has_backward else 'forward'}, {DTYPE_NAMES[p.dtype]}, "
        f"B={p.batch} H={p.num_heads} Nq={p.seqlen_q} Nk={p.seqlen_k} d={p.head_dim}"
        f"{', causal' if p.is_causal else ''}{', deterministic' if p.deterministic else ''}"
    )


def _as_json(report: Report, problem: Problem) -> dict[str, object]:
    tensors = {name: dataclasses.asdict(t) for name, t in report.traffic.tensors.items()}
    return {
        "what": report.what,
        "problem": {**dataclasses.asdict(problem), "dtype": DTYPE_NAMES[problem.dtype]},
        "traffic": {**tensors, "shared": dataclasses.asdict(report.traffic.shared)},
        "block_barriers": report.traffic.block_barriers,
        "warp_barriers": report.traffic.warp_barriers,
        "findings": [str(f) for f in report.findings],
        "error": report.error,
    }


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 0 if there is nothing to find."""
    parser = argparse.ArgumentParser(prog="python -m common.check", description=__doc__.splitlines()[0])
    parser.add_argument(
        "chapter", metavar="NN", help="number or name of a chapter, or the path of a .cu file"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: the first that the chapter takes")
    parser.add_argument("--seqlen", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--seqlen-k", type=int, metavar="N", help="default: like --seqlen")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--lines", action="store_true", help="also the requests of every source line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and findings")
    options = parser.parse_args(arguments)
    check_at_least_one(parser, options, "seqlen", "seqlen_k", "batch", "heads", "head_dim")
    try:
        is_file = options.chapter.endswith(".cu")
        chapter = load_kernel(options.chapter) if is_file else load_chapter(options.chapter)
        problem = Problem(
            options.batch,
            options.heads,
            options.seqlen,
            options.seqlen if options.seqlen_k is None else options.seqlen_k,
            options.head_dim,
            DTYPES[options.dtype] if options.dtype else chapter.info.dtypes[0],
            options.causal,
            options.deterministic,
        )
        # The checker looks at every access: at a few thousand queries and keys that takes minutes.
        print(f"Checking {_what(chapter, problem)} …", file=sys.stderr, flush=True)
        report, inputs = check_chapter(chapter, problem)
    except (BuildError, ValueError, TypeError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    if options.lines:
        print(f"\n{report.traffic.line_table()}")
    wrong = bool(report.findings)
    formulas = chapter.info.formulas("backward" if chapter.has_backward else "forward")
    if report.error is None:
        if formulas is not None:
            mismatches = formulas.mismatches(problem, report.traffic)
            same = f"formulas of chapter.toml: all {len(formulas.text)} equal the count"
            print("\n".join(f"formula: {m}" for m in mismatches) or same)
            wrong = wrong or bool(mismatches)
        for comparison in compare_outputs(chapter, problem, report, inputs):
            print(comparison)
            wrong = wrong or not comparison.ok
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_as_json(report, problem), indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
