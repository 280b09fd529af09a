"""Every kernel compiles for GPUs, without warnings and without spilling registers."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import mostly_slow

from common import ChapterInfo, jit, list_chapters, resources

# One build for each architecture and each dtype; only the last runs every time.
SAMPLE = [(torch.float32, 64, "75"), (torch.float16, 40, "80"), (torch.bfloat16, 128, "90a")]
DTYPES, HEAD_DIMS = (torch.float32, torch.float16, torch.bfloat16), (16, 64, 80, 128)
# Every pair of dtype and head_dim, of dtype and architecture, and of head_dim and architecture.
PAIRS = [
    (dtype, head_dim, resources.ARCHITECTURES[(i + j) % len(resources.ARCHITECTURES)])
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate(HEAD_DIMS)
]


def compile_kernel(info: ChapterInfo, dtype: torch.dtype, head_dim: int, arch: str, folder: Path) -> None:
    nvcc = jit.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc: neither a CUDA toolkit nor the package nvidia-cuda-nvcc")
    if int(arch.rstrip("a")) < 10 * info.min_compute_capability[0] + info.min_compute_capability[1]:
        pytest.skip(f"{info.name} needs compute capability {info.min_compute_capability}")
    if dtype not in info.dtypes:
        pytest.skip(f"{info.name} is for {', '.join(map(str, info.dtypes))}")
    command = resources.nvcc_command(nvcc, info.kernel, dtype, head_dim, arch)
    command += ["-Werror", "all-warnings", "-Xptxas", "-v", "-o", str(folder / "kernel.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    spills = re.findall(r"(\d+) bytes spill stores", result.stderr)
    assert spills
    assert set(spills) == {"0"}
    # "Potential performance loss: wgmma is serialized because of ...": a note, no warning.
    assert re.findall(r"\(C75\d\d\).*", result.stderr) == []


def name_of(build: tuple[torch.dtype, int, str]) -> str:
    return f"{jit.DTYPE_NAMES[build[0]]}-{build[1]}-sm{build[2]}"


@pytest.mark.parametrize(
    "info",
    mostly_slow(list_chapters(), lambda info: info == list_chapters()[-1]),
    ids=lambda info: info.name,
)
def test_compiles(info: ChapterInfo, tmp_path: Path) -> None:
    compile_kernel(info, *SAMPLE[-1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("build", [*SAMPLE[:-1], *PAIRS], ids=name_of)
@pytest.mark.parametrize("info", list_chapters(), ids=lambda info: info.name)
def test_other_builds_compile(info: ChapterInfo, build: tuple, tmp_path: Path) -> None:
    compile_kernel(info, *build, tmp_path)


WITH_WARPGROUPS = [info for info in list_chapters() if "wgmma.h" in info.kernel.read_text()]


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16], ids=["fp16", "bf16"]
)
@pytest.mark.parametrize("info", WITH_WARPGROUPS, ids=lambda info: info.name)
def test_products_of_warpgroups_overlap(
    info: ChapterInfo, dtype: torch.dtype, head_dim: int, tmp_path: Path
) -> None:
    """Each build has other registers to spare, and one short of them is slow without an error."""
    compile_kernel(info, dtype, head_dim, "90a", tmp_path)


def test_resources_page_is_current() -> None:
    data = json.loads(resources.STORED.read_text())
    current = {info.name: jit.kernel_digest(info.kernel) for info in list_chapters()}
    assert data["sources"] == current, "a kernel was edited: run `make resources`"
    assert resources.PAGE.read_text() == resources.page(data), "run `make resources`"
    assert {entry["spill_stores"] + entry["spill_loads"] for entry in data["kernels"]} == {0}
