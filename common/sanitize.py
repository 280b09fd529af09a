"""Runs every chapter, or those named, on the GPU under compute-sanitizer: ``make sanitize ARGS="09 10"``.

racecheck (shared-memory races), memcheck (out of bounds, misaligned) and initcheck (uninitialised reads).
Exits with 1 if a tool finds anything, warnings included, and with 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from itertools import product

import torch

from common import jit
from common.chapters import ChapterInfo, list_chapters, load_chapter
from common.inputs import random_inputs

TOOLS = ("racecheck", "memcheck", "initcheck")
_WORKER = "--worker"


def _chosen(numbers: list[str]) -> list[ChapterInfo]:
    if numbers:
        return [load_chapter(number).info for number in numbers]
    device = torch.device("cuda")
    return [info for info in list_chapters() if load_chapter(info.name).gpu_problem(device) is None]


def _run_chapters(infos: list[ChapterInfo]) -> None:
    """What is watched: ragged sizes, one tile and several, causal and full, both ways of adding up dQ."""
    shapes = ((70, 50), (33, 65), (200, 300))
    for info in infos:
        chapter = load_chapter(info.name)
        dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in info.dtypes]
        for dtype, (seqlen_q, seqlen_k), is_causal in product(dtypes, shapes, (False, True)):
            x = random_inputs(1, 2, seqlen_q, 64, seqlen_k=seqlen_k, dtype=dtype, device="cuda")
            out, lse = chapter.forward(x.q, x.k, x.v, is_causal=is_causal)
            if not chapter.has_backward:
                continue
            for deterministic in (False, True) if info.deterministic == "flag" else (False,):
                chapter.backward(
                    x.q, x.k, x.v, out, x.dout, lse, is_causal=is_causal, deterministic=deterministic
                )
    torch.cuda.synchronize()


def kernel_names(infos: list[ChapterInfo]) -> list[str]:
    """The names of all ``__global__`` functions of these chapters and their headers: they end in _kernel."""
    paths = {path for info in infos for path in jit.kernel_sources(info.kernel)}
    names = (re.findall(r"\b\w+_kernel\b", path.read_text()) for path in paths)
    return sorted({name for found in names for name in found})


def _check(tool: str, sanitizer: str, infos: list[ChapterInfo]) -> int:
    filters = [flag for name in kernel_names(infos) for flag in ("--kernel-name", f"kernel_substring={name}")]
    command = [sanitizer, "--tool", tool, "--print-limit", "10", *filters]
    # Without PyTorch's cache every tensor is an allocation of its own, so that the tools see its ends.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(
        [*command, sys.executable, "-m", "common.sanitize", _WORKER, *(info.name[:2] for info in infos)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=jit.REPO_ROOT,
        check=False,
    )
    output = result.stdout + result.stderr
    summary = re.search(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)", output)
    if summary is None or result.returncode != 0:
        print(f"{tool}: did not run on this machine (exit status {result.returncode})\n{output[-2000:]}")
        return 2
    if summary[1] != "0":
        print(f"{tool}: {summary[1]} findings\n{output}")
        return 1
    print(f"{tool}: nothing found", flush=True)
    return 0


def main(arguments: list[str]) -> int:
    """Runs all tools. Returns the exit status."""
    if arguments[:1] == [_WORKER]:
        _run_chapters(_chosen(arguments[1:]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m common.sanitize", description=__doc__)
    parser.add_argument("chapters", nargs="*", metavar="NN", help="which ones; default: all")
    try:
        infos = _chosen(parser.parse_args(arguments).chapters)
    except ValueError as error:
        parser.error(str(error))
    sanitizer = shutil.which("compute-sanitizer")
    if problem := jit.cuda_problem() or (None if sanitizer else "compute-sanitizer is not on PATH"):
        print(f"cannot sanitize: {problem}", file=sys.stderr)
        return 2
    _run_chapters(infos)  # builds, outside of the tools
    print(f"kernels: {', '.join(kernel_names(infos))}")
    return max(_check(tool, sanitizer, infos) for tool in TOOLS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
