"""Nsight Compute's command line, ``ncu``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence

from common import jit


def problem() -> str | None:
    """Why nothing can be profiled on this machine, or None if it can."""
    return jit.cuda_problem() or (None if shutil.which("ncu") else "ncu is not on PATH")


def raw_table(options: Sequence[str], module: Sequence[str]) -> str:
    """What ``ncu`` says of the kernels of ``python -m module…``, as CSV: header, units, then a line a kernel.

    Raises RuntimeError with what it printed if it fails or sees no kernel.
    """
    command = ["ncu", "--csv", "--print-units", "base", "--page", "raw", *options]
    command += [sys.executable, "-m", *module]
    result = subprocess.run(command, capture_output=True, text=True, cwd=jit.REPO_ROOT, check=False)
    if result.returncode != 0 or '"ID"' not in result.stdout:
        what = " ".join(module)
        raise RuntimeError(f"ncu failed on {what}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout[result.stdout.index('"ID"') :]
