"""Chapters whose tiles depend on the architecture: the CPU device runs those of each."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BF16,
    FP16,
    FP32,
    backward_chapters,
    draw,
    mostly_slow,
    nearest_build,
    run_and_check,
    same_bits,
    unfit_for_this_gpu,
)

from common import ChapterInfo, chapters, flash_attention, jit, load_chapter
from common.attention import default_chapter
from common.check import compare_outputs
from common.formulas import Problem
from common.inputs import random_inputs

# Shared memory of a block in KiB. CUDA C++ Programming Guide, "Technical specifications".
LIMITS = {(8, 0): 163, (8, 6): 99, (9, 0): 227}
DEPENDING = [i for i in backward_chapters() if "kMaxSharedBytes" in i.kernel.read_text()]

EACH = pytest.mark.parametrize(
    "info", mostly_slow(DEPENDING, lambda info: info == DEPENDING[-1]), ids=lambda info: info.name
)
# The smallest tiles run every time: the largest are those of the other tests.
EACH_CAPABILITY = pytest.mark.parametrize(
    "capability",
    mostly_slow(LIMITS, lambda c: c == (8, 6)),
    ids=lambda c: f"{c[0]}{c[1]}",
)


@EACH
@EACH_CAPABILITY
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_every_tile_shape_fits_and_is_right(
    info: ChapterInfo, capability: tuple[int, int], head_dim: int
) -> None:
    chapter = load_chapter(info.name, cpu_models=capability)
    inputs = draw(1, 2, 150, 210, chapter=chapter, dtype=torch.bfloat16, head_dim=head_dim)
    for is_causal, deterministic in ((False, False), (True, True)):
        run_and_check(
            chapter, inputs, is_causal=is_causal, deterministic=deterministic and same_bits(chapter)
        )
        largest = max(launch.shared_bytes for launch in chapter.last_launches)
        assert 0 < largest <= LIMITS[capability] * 1024


@EACH
@EACH_CAPABILITY
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_checker_finds_nothing(info: ChapterInfo, capability: tuple[int, int], head_dim: int) -> None:
    chapter = load_chapter(info.name, cpu_models=capability)
    problem = Problem(1, 1, 150, 210, head_dim, torch.float16, is_causal=True)
    x = random_inputs(1, 1, 150, head_dim, seqlen_k=210, dtype=torch.float16)
    out, lse = chapter.forward(x.q, x.k, x.v, is_causal=True)
    report = chapter.check(x.q, x.k, x.v, out, x.dout, lse, is_causal=True)
    assert [str(f) for f in report.findings] == []
    assert all(c.ok for c in compare_outputs(chapter, problem, report, x))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(FP32, 64), (FP16, 64), (BF16, 72), (BF16, 128)])
@pytest.mark.parametrize(
    ("info", "capability"),
    [
        pytest.param(info, capability, id=f"{info.name}-sm{capability[0]}{capability[1]}")
        for info in backward_chapters()
        for capability in ((7, 5), *LIMITS)
        if info.runs_on(capability) and info.max_compute_capability is None
    ],
)
def test_code_for_older_gpus_is_right(
    info: ChapterInfo,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is compiled for a T4, say, as PTX, of which the driver makes code for the GPU that is there."""
    arch = f"compute_{capability[0]}{capability[1]}"
    monkeypatch.setattr(jit, "compute_capability", lambda _: capability)
    monkeypatch.setattr(jit, "_gencode", lambda _: f"-gencode=arch={arch},code={arch}")
    chapter = load_chapter(info.name)
    inputs = draw(2, 3, 150, 210, chapter=chapter, dtype=dtype, head_dim=head_dim, device="cuda")
    for is_causal in (False, True):
        run_and_check(chapter, inputs, is_causal=is_causal)
    library = chapter.library(*nearest_build(chapter, dtype, head_dim), "cuda")
    assert f"_sm{capability[0]}{capability[1]}_" in library.name


def test_there_are_such_chapters() -> None:
    assert {info.number for info in DEPENDING} >= {10, 11}


@pytest.mark.parametrize(("capability", "number"), [((8, 0), 11), ((9, 0), 12), ((10, 0), 11)])
def test_the_default_is_one_that_the_gpu_can_run(
    capability: tuple[int, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "compute_capability", lambda _: capability)
    assert default_chapter(torch.bfloat16, 64, torch.device("cuda")).number == number


@pytest.mark.parametrize("capability", [(8, 6), (10, 0)])
def test_a_chapter_says_which_gpus_it_is_for(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "cuda_problem", lambda: None)
    monkeypatch.setattr(jit, "compute_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    expected = (
        f"a GPU has compute capability {capability[0]}.{capability[1]}, 12_hopper needs 9.0 and no other"
    )
    assert load_chapter(12).gpu_problem(torch.device("cuda")) == expected


@pytest.mark.parametrize(("capability", "first_unfit"), [((7, 5), 9), ((8, 6), 12), ((9, 0), None)])
def test_tests_of_what_a_gpu_cannot_run_are_skipped(
    capability: tuple[int, int], first_unfit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "cuda_problem", lambda: None)
    monkeypatch.setattr(jit, "compute_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    unfit = [i.number for i in backward_chapters() if unfit_for_this_gpu({"n": 3, "chapter": i.name})]
    assert unfit[:1] == ([] if first_unfit is None else [first_unfit])
    assert bool(unfit_for_this_gpu({"info": load_chapter(12).info})) is (12 in unfit)


def test_it_says_which_chapter_computes(capsys: pytest.CaptureFixture[str]) -> None:
    x = random_inputs(1, 1, 5, 64, dtype=torch.bfloat16)
    flash_attention(x.q, x.k, x.v, verbose=True)
    flash_attention(x.q, x.k, x.v, chapter=9, verbose=True)
    flash_attention(x.q, x.k, x.v)
    said = capsys.readouterr().out.splitlines()
    assert said == ["flash_attention: 12_hopper on cpu", "flash_attention: 09_tensor_cores on cpu"]


def test_the_default_is_the_last_chapter_that_takes_the_tensors() -> None:
    numbers = [
        default_chapter(dtype, 64, torch.device("cpu")).number for dtype in (torch.float32, torch.bfloat16)
    ]
    assert numbers[0] == max(i.number for i in backward_chapters() if torch.float32 in i.dtypes)
    assert numbers[1] == max(i.number for i in backward_chapters() if torch.bfloat16 in i.dtypes)
    assert numbers[0] < numbers[1]


def test_chapters_are_not_read_again_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them all takes milliseconds, which a training step would pay for each layer, twice."""
    x = random_inputs(1, 1, 5, 64, dtype=torch.bfloat16)
    flash_attention(x.q, x.k, x.v)
    monkeypatch.setattr(chapters, "_read_info", lambda folder: pytest.fail(f"{folder} was read again"))
    q = x.q.clone().requires_grad_()
    flash_attention(q, x.k, x.v).sum().backward()
