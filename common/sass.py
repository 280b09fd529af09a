"""Which atomic instructions the compiler makes of a chapter: ``python -m common.sass``.

Compiles chapters for GPUs with nvcc, disassembles them with nvdisasm and keeps the atomics on global memory
in ``notebooks/measurements/sass.json``, so that a machine without these tools can cite them too.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from common import jit, resources
from common.chapters import load_chapter
from common.measurements import FOLDER

STORED = FOLDER / "sass.json"
CHAPTERS = ("04_atomic_dq", "05_fp32_accum")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ARCHITECTURES = ("75", "80", "90a")
HEAD_DIM = 64
# RED and REDG return nothing. ATOM and ATOMG return the old value, or whether the address was global memory;
# with CAS they are a comparison and swap, which a loop repeats until nobody came between.
_GLOBAL_ATOMIC = re.compile(r"\b(?:REDG?|ATOMG?)(?:\.\w+)+")

Instructions = dict[str, list[str]]  # "bf16 sm_80" → opcodes in the order of the code


def find_nvdisasm() -> Path | None:
    """Nvdisasm beside nvcc, on PATH, or of the PyPI package ``nvidia-cuda-nvdisasm``."""
    nvcc = jit.find_nvcc()
    candidates = [] if nvcc is None else [nvcc.with_name("nvdisasm")]
    if on_path := shutil.which("nvdisasm"):
        candidates.append(Path(on_path))
    candidates += [Path(entry) / "nvidia" / "cu13" / "bin" / "nvdisasm" for entry in sys.path if entry]
    return next((path for path in candidates if path.is_file()), None)


def tools() -> str | None:
    """The versions of nvcc and nvdisasm on this machine, or None if one of them is missing."""
    found = jit.find_nvcc(), find_nvdisasm()
    if None in found:
        return None
    return ", ".join(_version(path) for path in found)


@functools.cache
def _version(tool: Path) -> str:
    text = subprocess.run([str(tool), "--version"], capture_output=True, text=True, check=True).stdout
    return f"{tool.name} {re.search(r'V([0-9.]+)', text)[1]}"


def disassemble(kernel: Path, dtype: torch.dtype, head_dim: int, arch: str) -> str:
    """The SASS of a kernel file for one architecture, such as "80". Kept among the builds.

    Raises BuildError if it does not compile or the tools are missing.
    """
    nvcc, nvdisasm = jit.find_nvcc(), find_nvdisasm()
    if nvcc is None or nvdisasm is None:
        raise jit.BuildError("nvcc or nvdisasm is missing: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm")
    command = resources.nvcc_command(nvcc, kernel, dtype, head_dim, arch)
    command[command.index("-c")] = "-cubin"
    facts = [jit.source_digest(kernel), tools(), *command]
    key = hashlib.sha256(" ".join(facts).encode()).hexdigest()[:12]
    name = f"{jit.kernel_label(kernel)}_{jit.DTYPE_NAMES[dtype]}_d{head_dim}_sm{arch}_{key}"
    kept = jit.build_root() / f"{name}.sass"
    if kept.is_file():
        return kept.read_text()
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        cubin, text = Path(folder) / "kernel.cubin", Path(folder) / "kernel.sass"
        result = subprocess.run([*command, "-o", str(cubin)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise jit.BuildError(f"{kernel.name} does not compile for sm_{arch}", result.stderr)
        sass = subprocess.run([str(nvdisasm), "-c", str(cubin)], capture_output=True, text=True, check=True)
        text.write_text(sass.stdout)
        text.replace(kept)  # at once: another process may be reading
        return sass.stdout


def global_atomics(sass: str) -> list[str]:
    """The opcodes of the atomics on global memory, in the order of the code."""
    return _GLOBAL_ATOMIC.findall(sass)


@functools.cache
def _compile(kernel: Path, digest: str, builds: tuple[tuple[torch.dtype, str], ...]) -> Instructions:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(lambda build: disassemble(kernel, build[0], HEAD_DIM, build[1]), builds)
        return {
            f"{jit.DTYPE_NAMES[dtype]} sm_{arch}": global_atomics(text)
            for (dtype, arch), text in zip(builds, texts, strict=True)
        }


def compiled(
    chapter: str | int,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    architectures: tuple[str, ...] = ARCHITECTURES,
) -> Instructions:
    """A chapter's atomics as this machine's compiler makes them: about a second for each build."""
    kernel = load_chapter(chapter).info.kernel
    builds = tuple((dtype, arch) for dtype in dtypes for arch in architectures)
    return _compile(kernel, jit.kernel_digest(kernel), builds)


def stored(chapter: str | int, path: Path = STORED) -> Instructions | None:
    """A chapter's atomics as they were stored, or None: nothing is stored, or the kernel was edited since."""
    info = load_chapter(chapter).info
    if not path.is_file():
        return None
    entry = json.loads(path.read_text())["chapters"].get(info.name)
    if entry is None or entry["source"] != jit.kernel_digest(info.kernel):
        return None
    return entry["atomics"]


def instructions(chapter: str | int) -> Instructions | None:
    """The stored atomics of a chapter, or of an edited one compiled anew; None where neither is possible."""
    known = stored(chapter)
    if known is None and tools() is not None:
        return compiled(chapter)
    return known


def main(arguments: list[str] | None = None) -> int:
    """Compiles the chapters and stores what was found. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.sass", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    versions = tools()
    if versions is None:
        print("nvcc or nvdisasm is missing: pip install -e '.[dev]'", file=sys.stderr)
        return 2
    chapters = {}
    for name in tqdm(CHAPTERS, desc="compiling", disable=None):
        source = jit.kernel_digest(load_chapter(name).info.kernel)
        chapters[name] = {"source": source, "atomics": compiled(name)}
    STORED.write_text(
        json.dumps({"tools": versions, "head_dim": HEAD_DIM, "chapters": chapters}, indent=1) + "\n"
    )
    print(f"wrote {STORED.relative_to(jit.REPO_ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
