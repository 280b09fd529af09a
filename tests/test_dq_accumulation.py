"""What each way of adding up dQ does to its accuracy, its bits and its memory (chapters 03 to 06)."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_same_bits, backward_chapters, draw, loaded, mostly_slow, run, run_and_check

from common import Chapter, compare, load_chapter
from common.reference import Comparison

BLOCK_N = 32
ROUNDING = [info.name for info in backward_chapters() if info.dq_rounded_every is not None]
FLAGGED = [info.name for info in backward_chapters() if info.deterministic == "flag"]
SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def dq_error(chapter: Chapter, seqlen_k: int, dtype: torch.dtype, rounded_every: int | None) -> Comparison:
    inputs = draw(1, 1, 64, seqlen_k, chapter=chapter, dtype=dtype, seed=1)
    result = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    return next(c for c in compare(result, *tensors, dq_rounded_every=rounded_every) if c.name == "dq")


@SIXTEEN_BITS
def test_error_of_atomics_in_16_bits_grows_with_the_root_of_the_blocks(dtype: torch.dtype) -> None:
    """One rounding in 05; one per K block in 04, of a sum that grows like a random walk: √(1 + T/2) times."""
    atomic, accumulated = load_chapter(4, schedule="in_order"), load_chapter(5, schedule="in_order")
    for num_blocks in (16, 64, 256):
        in_04 = dq_error(atomic, num_blocks * BLOCK_N, dtype, atomic.info.dq_rounded_every)
        in_05 = dq_error(accumulated, num_blocks * BLOCK_N, dtype, None)
        assert in_04.ok
        assert in_05.ok
        assert in_04.error / in_05.error == pytest.approx(math.sqrt(1 + num_blocks / 2), rel=0.15)


@SIXTEEN_BITS
def test_atomics_in_16_bits_exceed_the_budget_of_the_others(dtype: torch.dtype) -> None:
    atomic = load_chapter(4, schedule="in_order")
    assert not dq_error(atomic, 256 * BLOCK_N, dtype, None).ok


def test_atomics_in_fp32_lose_nothing() -> None:
    atomic, accumulated = load_chapter(4, schedule="in_order"), load_chapter(5, schedule="in_order")
    for num_blocks in (16, 64, 256):
        in_04 = dq_error(atomic, num_blocks * BLOCK_N, torch.float32, None)
        in_05 = dq_error(accumulated, num_blocks * BLOCK_N, torch.float32, None)
        assert in_04.ok
        assert in_04.error / in_05.error == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("number", [4, 5])
def test_bits_drift_with_the_order_of_the_blocks(number: int) -> None:
    inputs = draw(1, 1, 40, 512, chapter=loaded(load_chapter(number).name))
    results = [run(load_chapter(number, schedule=seed), *vars(inputs).values()) for seed in (1, 2, 1)]
    assert_same_bits(results[0], results[2])
    assert_same_bits(results[0], results[1], ("dk", "dv"))
    assert not torch.equal(results[0].dq, results[1].dq)


@pytest.mark.parametrize("name", mostly_slow(FLAGGED, lambda name: name in (FLAGGED[0], FLAGGED[-1])))
@pytest.mark.parametrize(
    "is_causal", [pytest.param(False, id="full", marks=pytest.mark.slow), pytest.param(True, id="causal")]
)
def test_deterministic_bits_do_not_depend_on_the_schedule(name: str, is_causal: bool) -> None:
    inputs = draw(2, 2, 70, 400, chapter=loaded(name))
    options = {"is_causal": is_causal, "deterministic": True}
    first = run(load_chapter(name, schedule="in_order"), *vars(inputs).values(), **options)
    for schedule in (None, None, 0, 1, 2, 3, 4):
        again = run(load_chapter(name, schedule=schedule), *vars(inputs).values(), **options)
        assert_same_bits(first, again)


@pytest.mark.parametrize("name", FLAGGED)
def test_deterministic_bits_do_not_depend_on_the_batch(name: str) -> None:
    inputs = draw(3, 2, 50, 300, chapter=loaded(name))
    together = run(loaded(name), *vars(inputs).values(), deterministic=True)
    for b in range(3):
        alone = run(loaded(name), *(t[b : b + 1] for t in vars(inputs).values()), deterministic=True)
        assert torch.equal(together.dq[b : b + 1], alone.dq)


@pytest.mark.parametrize("name", mostly_slow(FLAGGED, lambda name: name in (FLAGGED[0], FLAGGED[-1])))
def test_the_flag_selects(name: str) -> None:
    """Without the flag there is one accumulator, and the bits follow the order of the blocks."""
    chapter = loaded(name)
    dtype = chapter.info.dtypes[0]
    # Enough sums that the last bit of some differs after they are rounded to 16 bits.
    inputs = (
        draw(1, 2, 40, 512, chapter=chapter)
        if dtype == torch.float32
        else draw(1, 2, 256, 1024, chapter=chapter)
    )
    sums = [run(load_chapter(name, schedule=seed), *vars(inputs).values()).dq for seed in (1, 2, 3)]
    assert not (torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2]))
    sizes = {"batch": 2, "num_heads": 3, "seqlen_q": 40, "head_dim": 64, "dtype": dtype}
    block_n = int(chapter.info.traffic["where"]["B_c"])
    for seqlen_k in (20, 70, 256, 1000, 3000):
        workspaces = [
            chapter.workspace(**sizes, seqlen_k=seqlen_k, deterministic=flag) for flag in (False, True)
        ]
        accumulators = [part.shape for w in workspaces for part in w.parts if part.name == "dq_accum"]
        assert [shape[0] for shape in accumulators] == [1, min(math.ceil(seqlen_k / block_n), 8)]
        assert accumulators[0][1:] == accumulators[1][1:]


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize("seqlen_k", [1, 33, 300])
def test_deterministic_results_are_within_budget(name: str, seqlen_k: int) -> None:
    inputs = draw(1, 2, 45, seqlen_k, chapter=loaded(name), dtype=torch.bfloat16)
    run_and_check(loaded(name), inputs, deterministic=True, is_causal=True)


@pytest.mark.parametrize("name", ROUNDING)
def test_never_deterministic_is_refused(name: str) -> None:
    inputs = draw(1, 1, 8, chapter=loaded(name))
    with pytest.raises(ValueError, match="deterministic is True"):
        run(loaded(name), *vars(inputs).values(), deterministic=True)


def test_workspaces_are_what_the_chapters_say() -> None:
    sizes = {
        "batch": 2,
        "num_heads": 3,
        "seqlen_q": 40,
        "seqlen_k": 50,
        "head_dim": 64,
        "dtype": torch.bfloat16,
    }
    found = {
        info.name: {p.name: (p.dtype, p.shape) for p in loaded(info.name).workspace(**sizes).parts}
        for info in backward_chapters()
        if info.number <= 5
    }
    matrix, rows = (2, 3, 40, 50), (2, 3, 40, 64)
    assert found == {
        "01_naive": dict.fromkeys(("s", "p", "dp", "ds"), (torch.float32, matrix)),
        "02_tiled": {},
        "03_two_stage": {"ds": (torch.bfloat16, matrix)},
        "04_atomic_dq": {},
        "05_fp32_accum": {"dq_accum": (torch.float32, rows)},
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_deterministic_on_a_busy_gpu(name: str, dtype: torch.dtype) -> None:
    chapter = loaded(name)
    inputs = draw(2, 4, 2048, chapter=chapter, dtype=dtype, device="cuda")
    busy = torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device="cuda")
    first = run(chapter, *vars(inputs).values(), deterministic=True)
    for _ in range(30):
        with torch.cuda.stream(busy):
            matrix = matrix @ matrix.T / 4096
        again = run(chapter, *(t.clone() for t in vars(inputs).values()), deterministic=True)
        assert_same_bits(first, again)
