"""A chapter without Python: ``common/standalone/main.cu`` links with a kernel.cu and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import backward_chapters

from common import ChapterInfo, jit

REPO = Path(__file__).resolve().parent.parent
MAIN = REPO / "common" / "standalone" / "main.cu"
LATER = [info for info in backward_chapters() if info.min_compute_capability >= (8, 0)]


def defines(info: ChapterInfo) -> list[str]:
    return jit.define_flags(info.dtypes[-1], 64)


def run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return result.stdout


def build_for_cpu(info: ChapterInfo, folder: Path, kernel: Path, main: Path = MAIN) -> Path:
    device, _ = jit.load_cpu_device()
    includes = [f"-I{jit.CPU_DEVICE}", f"-I{REPO}"]
    objects = []
    for source in (kernel, main):
        objects.append(folder / f"{source.stem}.o")
        options = ["-std=c++17", "-O2", "-Wno-unknown-pragmas", *includes, *defines(info)]
        run([jit.host_compiler(), *options, "-x", "c++", "-c", str(source), "-o", str(objects[-1])])
    program = folder / "standalone"
    links = jit.runtime_link_flags(device)
    run([jit.host_compiler(), *map(str, objects), *links, "-pthread", "-o", str(program)])
    return program


@pytest.mark.parametrize("info", LATER[-1:], ids=lambda info: info.name)
def test_runs_on_the_cpu_device(info: ChapterInfo, tmp_path: Path) -> None:
    output = run([str(build_for_cpu(info, tmp_path, info.kernel))])
    assert re.fullmatch(r"relative errors: dq \d.\de-\d\d, dk \d.\de-\d\d, dv \d.\de-\d\d\n", output)


def test_a_wrong_gradient_fails(tmp_path: Path) -> None:
    info = LATER[-1]
    wrong = tmp_path / "kernel.cu"
    text = info.kernel.read_text()
    scale_of_dk = "const float scale = block.params.softmax_scale;"
    assert text.count(scale_of_dk) == 1
    wrong.write_text(text.replace(scale_of_dk, "const float scale = 1.0f;"))
    program = build_for_cpu(info, tmp_path, wrong)
    assert subprocess.run([str(program)], capture_output=True, check=False).returncode == 1


@pytest.mark.skipif(jit.find_nvcc() is None, reason="there is no nvcc")
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"])
def test_compiles_for_gpus(arch: str, tmp_path: Path) -> None:
    command = [str(jit.find_nvcc()), f"-arch={arch}", "-std=c++17", f"-I{REPO}", *defines(LATER[-1])]
    run([*command, "-c", str(MAIN), "-o", str(tmp_path / "main.o")])


@pytest.mark.gpu
@pytest.mark.parametrize("info", LATER, ids=lambda info: info.name)
def test_runs_on_a_gpu(info: ChapterInfo, tmp_path: Path) -> None:
    gencode = jit._gencode(jit.compute_capability(torch.device("cuda")))
    command = [str(jit.find_nvcc()), gencode, "-std=c++17", "-O3", f"-I{REPO}", *defines(info)]
    run([*command, str(info.kernel), str(MAIN), "-o", str(tmp_path / "standalone")])
    assert "relative errors" in run([str(tmp_path / "standalone")])


@pytest.mark.parametrize("name", ["q", pytest.param("dout", marks=pytest.mark.slow)])
def test_unaligned_rows_are_refused(name: str, tmp_path: Path) -> None:
    """Without Python nobody copies such a tensor: the launcher says which one it is."""
    info = LATER[-1]
    text = MAIN.read_text()
    call = "  check(launch_backward("
    assert text.count(call) == 1
    main = tmp_path / "main.cu"
    main.write_text(text.replace(call, f"  params.{name}_strides.row += 1;\n{call}"))
    program = build_for_cpu(info, tmp_path, info.kernel, main)
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(
        f"launch_backward: {name} starts, or has strides, at no multiple of 16 bytes"
    )
