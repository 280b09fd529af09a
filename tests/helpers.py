"""What the tests of the chapters share: which chapters there are, how one is run, how results compare."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from common import Chapter, ChapterInfo, compare, list_chapters, load_chapter
from common.inputs import Inputs, random_inputs
from common.reference import Comparison, Gradients

T = TypeVar("T")
REPO = Path(__file__).resolve().parent.parent
RESULTS = ("out", "lse", "dq", "dk", "dv")

# Builds are what a cold test run spends its time on, so these few (dtype, head_dim) serve nearly every test.
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
BUILDS = [(FP32, 16), (FP32, 64), (FP32, 128), (FP16, 64), (BF16, 72)]
USUAL_HEAD_DIM = {FP32: 64, FP16: 64, BF16: 72}

# ---------------------------------------------------------------- what is left to ``make test-all``


def mostly_slow(values: Iterable[object], quick: Callable[[object], bool]) -> list:
    """Parameters, of which all but the ``quick`` ones are slow: of what is alike, a few run every time."""
    return [value if quick(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]


# ---------------------------------------------------------------- chapters

# Each is a step from one of the others, whose tests all run every time: 02 has the tiles, 06 the splits of
# dQ, 09 the tensor cores, 12 warpgroups. Every time these meet only the tests that use `every_chapter`, the
# checker, and their notebooks with the formulas. A new chapter is not among them.
NEIGHBOURS = (1, 3, 4, 5, 7, 8, 10, 11)


def is_quick(info: ChapterInfo) -> bool:
    """Whether all tests of a chapter run every time."""
    return info.number not in NEIGHBOURS


def chapter_parameters(infos: Iterable[ChapterInfo], *, all_quick: bool = False) -> list:
    """Names as parameters. Those of ``NEIGHBOURS`` are slow, unless ``all_quick``."""
    # With `--dist loadgroup` one worker builds all that a chapter's tests need, once.
    return [
        pytest.param(
            info.name,
            id=info.name,
            marks=[
                pytest.mark.xdist_group(info.name),
                *([] if all_quick or is_quick(info) else [pytest.mark.slow]),
            ],
        )
        for info in infos
    ]


@functools.cache
def loaded(name: str, schedule: str | int | None = None) -> Chapter:
    return load_chapter(name, schedule=schedule)


def reproducible(name: str) -> Chapter:
    """A chapter whose results may be compared bit for bit, if called with ``same_bits(chapter)``."""
    never = loaded(name).info.deterministic == "never"
    return loaded(name, "in_order") if never else loaded(name)


def same_bits(chapter: Chapter) -> bool:
    """What to pass as ``deterministic`` for the same bits on every run."""
    return chapter.info.deterministic == "flag"


def backward_chapters() -> list[ChapterInfo]:
    return [info for info in list_chapters() if loaded(info.name).has_backward]


def forward_chapters() -> list[ChapterInfo]:
    return [info for info in list_chapters() if loaded(info.name).forward_chapter.name == info.name]


def unfit_for_this_gpu(parameters: Mapping[str, object]) -> str | None:
    """Why the GPU here cannot run a chapter that a test's parameters name, or None if it can run all."""
    infos = {info.name: info for info in list_chapters()}
    for value in parameters.values():
        name = value.name if isinstance(value, ChapterInfo) else value
        known = isinstance(name, str) and name in infos
        if known and (problem := loaded(name).gpu_problem(torch.device("cuda"))):
            return problem
    return None


def nearest_build(chapter: Chapter, dtype: torch.dtype, head_dim: int) -> tuple[torch.dtype, int]:
    """The dtype and head_dim asked for, or what the chapter supports instead."""
    info = chapter.info
    if dtype not in info.dtypes:
        dtype = info.dtypes[0]
    if head_dim not in info.head_dims:
        head_dim = min(info.head_dims, key=lambda dim: abs(dim - head_dim))
    return dtype, head_dim


# ---------------------------------------------------------------- inputs


def widest_dtype(chapter: Chapter) -> torch.dtype:
    """float32, or else bfloat16, which sums of millions do not overflow either."""
    return FP32 if FP32 in chapter.info.dtypes else BF16


def draw(
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    chapter: Chapter,
    dtype: torch.dtype = FP32,
    head_dim: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Inputs:
    """Random inputs in the dtype and head_dim asked for, or in the nearest that the chapter supports."""
    head_dim = USUAL_HEAD_DIM[dtype] if head_dim is None else head_dim
    dtype, head_dim = nearest_build(chapter, dtype, head_dim)
    return random_inputs(
        batch, num_heads, seqlen_q, head_dim, seqlen_k=seqlen_k, dtype=dtype, device=device, seed=seed
    )


def surrounded_by_nan(tensor: Tensor, gap: int = 1) -> Tensor:
    """The same values as a slice of a larger buffer that holds NaN before, after and between the rows.

    The last axis stays dense, as kernels want it; ``gap`` elements of NaN follow each row, so an odd gap
    also takes away every alignment.
    """
    buffer = torch.full([n + 2 for n in tensor.shape[:-1]] + [tensor.shape[-1] + gap], torch.nan)
    buffer = buffer.to(dtype=tensor.dtype, device=tensor.device)
    view = buffer[tuple(slice(1, 1 + n) for n in tensor.shape[:-1])][..., gap:]
    view.copy_(tensor)
    assert view.stride(-1) == 1
    return view


def dense_between_nan(tensor: Tensor) -> Tensor:
    """The same values, contiguous, with NaN before the first and after the last."""
    margin = 64 * tensor.shape[-1] + 1
    buffer = torch.full([tensor.numel() + 2 * margin], torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = buffer[margin:-margin].view(tensor.shape)
    view.copy_(tensor)
    return view


def axes_swapped(tensor: Tensor) -> Tensor:
    """The same values, stored as [B, N, H, d]: what a projection layer hands over."""
    view = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    assert view.shape == tensor.shape
    return view


# ---------------------------------------------------------------- running and comparing


def run(
    chapter: Chapter,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    deterministic: bool = False,
) -> Gradients:
    """A forward and a backward pass."""
    options = {"softmax_scale": softmax_scale, "is_causal": is_causal}
    out, lse = chapter.forward(q, k, v, **options)
    dq, dk, dv = chapter.backward(q, k, v, out, dout, lse, deterministic=deterministic, **options)
    return Gradients(out, lse, dq, dk, dv)


def over_budget(result: Gradients, inputs: Inputs, **options: object) -> list[Comparison]:
    """What differs too much from float64 on the same inputs."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    return [c for c in compare(result, *tensors, **options) if not c.ok]


def assert_correct(result: Gradients, inputs: Inputs, **options: object) -> None:
    wrong = over_budget(result, inputs, **options)
    assert not wrong, "\n".join(str(c) for c in wrong)


def assert_correct_after_long_sums(
    result: Gradients, inputs: Inputs, *, truncates: bool = False, **options: object
) -> None:
    """Like ``assert_correct``, for millions of queries.

    A dK or dV that one fp32 register sums over n rows is off by up to √n roundings of the whole sum, which
    is far larger than its terms where they do not cancel. Tensor cores (``truncates``) cut off what they do
    not keep of a sum, after every 16 rows: all these errors have one sign, and add up. PyTorch's FLASH and
    cuDNN backward are off by as much.
    """
    n = inputs.q.shape[2]
    unit = torch.finfo(torch.float32).eps / 2
    long_sum = unit * (n / 16 if truncates else n**0.5)
    limits = {"dk": long_sum, "dv": long_sum}
    wrong = [c for c in over_budget(result, inputs, **options) if not c.error <= limits.get(c.name, 0.0)]
    assert not wrong, "\n".join(str(c) for c in wrong)


def assert_gradients_correct(
    chapter: Chapter, inputs: Inputs, out: Tensor, lse: Tensor, *, is_causal: bool
) -> None:
    """A backward pass with an out and lse that others made, and answer for."""
    gradients = chapter.backward(inputs.q, inputs.k, inputs.v, out, inputs.dout, lse, is_causal=is_causal)
    compared = over_budget(Gradients(out, lse, *gradients), inputs, is_causal=is_causal)
    wrong = [c for c in compared if c.name in ("dq", "dk", "dv")]
    assert not wrong, "\n".join(str(c) for c in wrong)


def run_and_check(
    chapter: Chapter, inputs: Inputs, *, deterministic: bool = False, **options: object
) -> Gradients:
    """A forward and a backward pass whose results are all within budget."""
    result = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout, deterministic=deterministic, **options)
    assert_correct(result, inputs, **options)
    return result


def assert_still_works(chapter: Chapter) -> None:
    """A valid call succeeds, and so does an unrelated PyTorch operator: no error was left behind."""
    inputs = draw(1, 2, 5, chapter=chapter)
    run_and_check(chapter, inputs, is_causal=True)
    assert torch.ones(3, device=inputs.q.device).sum().item() == 3


def either_right_or(
    errors: type[Exception] | tuple[type[Exception], ...], names: str, call: Callable[[], T]
) -> T | None:
    """What a call returns, or None if it refuses: one of ``errors``, whose message matches ``names``."""
    try:
        return call()
    except errors as error:
        if re.search(names, str(error)) is None:
            raise AssertionError(f"the message does not match {names!r}: {error}") from error
        return None


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Like torch.equal, but NaN equals NaN and 0 differs from −0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_bits(a: Gradients, b: Gradients, names: tuple[str, ...] = RESULTS) -> None:
    differing = [name for name in names if not equal_bits(getattr(a, name), getattr(b, name))]
    assert not differing, f"{', '.join(differing)} differ in some bits"
