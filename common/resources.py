"""What the compiler makes of every chapter: registers, shared memory and spills, and the size of its step.

``make resources`` compiles for each architecture with ptxas' report on, stores the numbers in
``notebooks/measurements/resources.json`` and writes ``chapters/README.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from common import jit
from common.chapters import Chapter, ChapterInfo, list_chapters, load_chapter
from common.diff import step_size
from common.inputs import random_inputs

STORED = jit.REPO_ROOT / "notebooks" / "measurements" / "resources.json"
PAGE = jit.REPO_ROOT / "chapters" / "README.md"
ARCHITECTURES = ("75", "80", "90a")
BUILDS = ((torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128))


@dataclass(frozen=True)
class KernelResources:
    """One kernel of one build, as ptxas reports it; ``dynamic_shared`` as it is launched. Bytes."""

    chapter: str
    kernel: str
    dtype: str
    head_dim: int
    arch: str
    registers: int
    static_shared: int
    dynamic_shared: int
    spill_stores: int
    spill_loads: int


def nvcc_command(nvcc: Path, kernel: Path, dtype: torch.dtype, head_dim: int, arch: str) -> list[str]:
    """The command that compiles a kernel for one architecture, without an output file."""
    return [
        str(nvcc),
        "-std=c++17",
        "-O3",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        f"-I{jit.REPO_ROOT}",
        *jit.define_flags(dtype, head_dim),
        "-c",
        str(kernel),
    ]


def _dynamic_shared(chapter: Chapter, dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Bytes of dynamic shared memory of each kernel, from a small run on the CPU device."""
    inputs = random_inputs(1, 1, 40, head_dim, dtype=dtype)
    out, lse = chapter.forward(inputs.q, inputs.k, inputs.v)
    launches = list(chapter.forward_chapter.last_launches) if chapter.forward_chapter is chapter else []
    if chapter.has_backward:
        chapter.backward(inputs.q, inputs.k, inputs.v, out, inputs.dout, lse)
        launches += chapter.last_launches
    return {launch.kernel: launch.shared_bytes for launch in launches}


def _base_name(mangled: str) -> str:
    demangled = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    name = demangled.replace("(anonymous namespace)::", "").split("(")[0].split("<")[0]
    # The linker's unique suffix of names with internal linkage may stand before the name.
    return name.split("::")[-1].split()[-1]


def _capability(arch: str) -> tuple[int, int]:
    number = int(arch.rstrip("a"))
    return number // 10, number % 10


def _takes(info: ChapterInfo, dtype: torch.dtype, head_dim: int, arch: str) -> bool:
    supported = dtype in info.dtypes and head_dim in info.head_dims
    return supported and _capability(arch) >= info.min_compute_capability


def measure(
    info: ChapterInfo, dtype: torch.dtype, head_dim: int, arch: str, nvcc: Path
) -> list[KernelResources]:
    """Compiles one build and reads ptxas' report. Raises BuildError if it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        command = nvcc_command(nvcc, info.kernel, dtype, head_dim, arch)
        command += ["-Xptxas", "-v", "-o", str(Path(folder) / "kernel.o")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise jit.BuildError(f"{info.name} does not compile for sm_{arch}", result.stderr)
    depends = "kMaxSharedBytes" in info.kernel.read_text()
    models = _capability(arch) if depends else None
    shared = _dynamic_shared(load_chapter(info.name, cpu_models=models), dtype, head_dim)
    found = []
    for entry in result.stderr.split("Compiling entry function")[1:]:
        name = re.search(r"'(\S+)'", entry)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        if name is None or spills is None or registers is None:
            raise jit.BuildError("ptxas' report has another form than expected", result.stderr)
        static = re.search(r"(\d+) bytes smem", entry)
        kernel = _base_name(name[1])
        found.append(
            KernelResources(
                info.name,
                kernel,
                jit.DTYPE_NAMES[dtype],
                head_dim,
                f"sm_{arch}",
                int(registers[1]),
                int(static[1]) if static else 0,
                shared.get(kernel, 0),
                int(spills[1]),
                int(spills[2]),
            )
        )
    return sorted(found, key=lambda r: r.kernel)


def _nvcc_version(nvcc: Path) -> str:
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", text)[1]


def page(data: dict) -> str:
    """``chapters/README.md``: how large each step is, and what each kernel uses."""
    infos = list_chapters()
    lines = [
        "# The chapters",
        "",
        "Each folder holds one kernel file, `kernel.cu`, and `chapter.toml`, which says what the chapter is.",
        "This page is generated by `make resources`.",
        "",
        "## The size of each step",
        "",
        "A line that is replaced by another counts as one changed line.",
        "",
        "| from | to | lines changed | added | removed | the one idea |",
        "|---|---|---|---|---|---|",
    ]
    for info in infos:
        if info.builds_on is not None and info.builds_on != infos[0].name:
            size = step_size(info.builds_on, info.name)
            lines.append(
                f"| {info.builds_on} | {info.name} | {size.changed} | {size.added} | {size.removed} "
                f"| {info.idea} |"
            )
    lines += [
        "",
        "## Registers, shared memory, spills",
        "",
        f"As nvcc {data['nvcc']} compiles them for compute capability 7.5, 8.0 and 9.0a. Registers are per",
        "thread; shared memory is per block, static and dynamic; spills are bytes stored and loaded.",
        "",
        "| chapter | kernel | build | registers (sm_75, sm_80, sm_90a) | shared memory | spills |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[tuple, list[dict]] = {}
    for entry in data["kernels"]:
        rows.setdefault((entry["chapter"], entry["dtype"], entry["head_dim"], entry["kernel"]), []).append(
            entry
        )
    for (chapter, dtype, head_dim, kernel), entries in rows.items():
        # A template kernel has an entry for each instance; the largest is what limits occupancy.
        by_arch = [[e["registers"] for e in entries if e["arch"] == f"sm_{a}"] for a in ARCHITECTURES]
        registers = [max(found) if found else "–" for found in by_arch]
        shared = max(e["static_shared"] + e["dynamic_shared"] for e in entries)
        spills = max(e["spill_stores"] + e["spill_loads"] for e in entries)
        lines.append(
            f"| {chapter} | {kernel} | {dtype}, d = {head_dim} | {', '.join(map(str, registers))} | "
            f"{shared:,} | {spills} |"
        )
    return "\n".join(lines) + "\n"


def _stored_kernels(nvcc_version: str) -> dict[str, list[dict]]:
    """What is stored of the chapters that were not edited since, measured with the same nvcc."""
    data = json.loads(STORED.read_text()) if STORED.is_file() else {"nvcc": None, "kernels": []}
    if data["nvcc"] != nvcc_version:
        return {}
    current = {i.name for i in list_chapters() if data["sources"].get(i.name) == jit.kernel_digest(i.kernel)}
    return {name: [k for k in data["kernels"] if k["chapter"] == name] for name in current}


def main(arguments: list[str] | None = None) -> int:
    """Measures what was edited since, and writes both files. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.resources", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    nvcc = jit.find_nvcc()
    if nvcc is None:
        print("no nvcc: install a CUDA toolkit, or pip install nvidia-cuda-nvcc", file=sys.stderr)
        return 2
    infos = list_chapters()
    kernels = _stored_kernels(_nvcc_version(nvcc))
    jobs = [
        (info, dtype, dim, arch)
        for info in infos
        for dtype, dim in BUILDS
        for arch in ARCHITECTURES
        if info.name not in kernels and _takes(info, dtype, dim, arch)
    ]
    for info, dtype, dim, arch in tqdm(jobs, desc="compiling", disable=None):
        found = [asdict(kernel) for kernel in measure(info, dtype, dim, arch, nvcc)]
        kernels[info.name] = kernels.get(info.name, []) + found
    data = {
        "nvcc": _nvcc_version(nvcc),
        "sources": {info.name: jit.kernel_digest(info.kernel) for info in infos},
        "kernels": [kernel for info in infos for kernel in kernels[info.name]],
    }
    STORED.parent.mkdir(parents=True, exist_ok=True)
    STORED.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))
    print(f"wrote {STORED.relative_to(jit.REPO_ROOT)} and {PAGE.relative_to(jit.REPO_ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
