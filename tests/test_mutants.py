"""Kernels with one planted fault each: proof that the checks of the other tests can fail.

A mutant is a chapter's ``kernel.cu`` with one piece of text replaced. It compiles and runs; the same call
that accepts the chapter must reject the mutant, by a number over budget or an error of the CPU device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import (
    REPO,
    axes_swapped,
    dense_between_nan,
    draw,
    loaded,
    mostly_slow,
    over_budget,
    run,
    surrounded_by_nan,
)

from common import Chapter, jit, load_kernel
from common.inputs import Inputs
from common.reference import Gradients


@dataclass(frozen=True)
class Mutant:
    """``old`` is replaced by ``new`` in ``chapter``'s kernel; ``check`` must then name one of ``caught``."""

    chapter: str
    old: str
    new: str
    check: Callable[[Chapter, Chapter], set[str]]
    caught: set[str]


def _wrong(forward: Chapter, backward: Chapter, inputs: Inputs, **options: object) -> set[str]:
    """Names of the results over budget, of a forward pass by one kernel and a backward pass by another."""
    tensors = (inputs.q, inputs.k, inputs.v)
    out, lse = forward.forward(*tensors, **options)
    gradients = backward.backward(*tensors, out, inputs.dout, lse, **options)
    return {c.name for c in over_budget(Gradients(out, lse, *gradients), inputs, **options)}


def plain(forward: Chapter, backward: Chapter) -> set[str]:
    """Ragged tiles and Nq ≠ Nk."""
    return _wrong(forward, backward, draw(2, 3, 37, 45, chapter=backward, head_dim=16))


def causal(forward: Chapter, backward: Chapter) -> set[str]:
    inputs = draw(2, 3, 37, 45, chapter=backward, head_dim=16)
    return _wrong(forward, backward, inputs, is_causal=True)


def empty_rows(forward: Chapter, backward: Chapter) -> set[str]:
    """Causal with Nq > Nk: rows that see no key."""
    return _wrong(forward, backward, draw(1, 1, 45, 37, chapter=backward, head_dim=16), is_causal=True)


def scores_far_below_zero(forward: Chapter, backward: Chapter) -> set[str]:
    inputs = draw(1, 1, 37, 45, chapter=backward, head_dim=16)
    inputs = Inputs(inputs.q.abs() + 5, -inputs.k.abs() - 5, inputs.v, inputs.dout)
    return _wrong(forward, backward, inputs) & {"out", "lse"}


def strided(forward: Chapter, backward: Chapter) -> set[str]:
    """Every input stored as [B, N, H, d]."""
    inputs = draw(2, 3, 37, 45, chapter=backward, head_dim=16)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    return _wrong(forward, backward, Inputs(*(axes_swapped(t) for t in tensors)))


def shuffled(forward: Chapter, backward: Chapter) -> set[str]:
    """Blocks and threads in five other orders: what overlaps or is not waited for comes to light."""
    inputs = draw(2, 3, 37, 45, chapter=backward, head_dim=16)
    wrong = set()
    for seed in range(5):
        orders = (load_kernel(c.info.kernel, schedule=seed) for c in (forward, backward))
        wrong |= _wrong(*orders, inputs)
    return wrong


def between_nan(forward: Chapter, backward: Chapter) -> set[str]:
    """NaN before, after and between the rows of every input."""
    inputs = draw(1, 1, 37, 45, chapter=backward, head_dim=16)
    q, k, v, dout = (surrounded_by_nan(t) for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = forward.forward(q, k, v)
    gradients = backward.backward(q, k, v, surrounded_by_nan(out), dout, dense_between_nan(lse))
    return {c.name for c in over_budget(Gradients(out, lse, *gradients), inputs)}


def device_error(forward: Chapter, backward: Chapter) -> set[str]:
    """The message of the CPU device, or nothing if there was no error."""
    try:
        wrong = plain(forward, backward)
    except RuntimeError as error:
        return {word for word in ("barrier", "shared memory", "block", "thread") if word in str(error)}
    return wrong and set()


TILED_DK = "store_tile<kBlockN, kNumThreads>(dk, acc_dk, params.softmax_scale, n_start, params.seqlen_k);"
TILED_DQ = "store_tile<kBlockM, kNumThreads>(dq, acc_dq, params.softmax_scale, m_start, params.seqlen_q);"
LAST_HEAD = "blockIdx.x + 1 == gridDim.x"

# The most telling ones run every time; building one takes some seconds.
MUTANTS = {
    "no_scale_on_dk": Mutant(
        "02_tiled", TILED_DK, TILED_DK.replace("params.softmax_scale", "1.0f"), plain, {"dk"}
    ),
    "output_not_rescaled": Mutant(
        "00_forward", "acc_o[j] *= smem.rescale", "acc_o[j] += 0.0f * smem.rescale", plain, {"out"}
    ),
    "padded_keys_not_masked": Mutant(
        "00_forward", "n_start + col < params.num_visible_keys(m_start + row);",
        "!params.is_causal || n_start + col < params.num_visible_keys(m_start + row);", plain, {"out", "lse"},
    ),
    "mask_top_left": Mutant(
        "02_tiled", "n_start + col < params.num_visible_keys(m_start + row)",
        "n_start + col < (params.is_causal ? m_start + row + 1 : params.seqlen_k)", causal,
        {"dq", "dk", "dv"},
    ),
    "last_row_not_written": Mutant(
        "02_tiled", TILED_DQ, TILED_DQ.replace("params.seqlen_q", "params.seqlen_q - 1"), plain, {"dq"}
    ),
    # Only within the tensor, so that the test does not damage its own process.
    "tail_rows_spill_into_the_next_head": Mutant(
        "02_tiled", TILED_DQ,
        TILED_DQ.replace("params.seqlen_q", f"{LAST_HEAD} ? params.seqlen_q : m_start + kBlockM"),
        shuffled, {"dq"},
    ),
    "row_stride_ignored": Mutant(
        "02_tiled", "head.dout, params.dout_strides.row", "head.dout, kHeadDim", strided, {"dk", "dv", "dq"}
    ),
    "one_row_too_many_is_read": Mutant(
        "02_tiled", "load_tile<kBlockN, kNumThreads>(smem.sK, head.k, params.k_strides.row, n_start, n);",
        "load_tile<kBlockN, kNumThreads>(smem.sK, head.k, params.k_strides.row, n_start, n + 1);",
        between_nan, {"dq"},
    ),
    "no_barrier_before_products": Mutant(
        "02_tiled", "      __syncthreads();  // P and dS are complete\n", "", shuffled, {"dk", "dv"}
    ),
    "barrier_for_half_the_threads": Mutant(
        "02_tiled", "      __syncthreads();  // dS is complete\n",
        "      if (threadIdx.x < 64) __syncthreads();\n", device_error, {"barrier", "thread", "block"},
    ),
    "maximum_starts_at_zero": Mutant(
        "00_forward", "smem.row_max[threadIdx.x] = -INFINITY;", "smem.row_max[threadIdx.x] = 0.0f;",
        scores_far_below_zero, {"out"},
    ),
    "lse_in_base_two": Mutant(
        "00_forward", "finite_max(row_max) + logf(row_sum)",
        "1.442695f * (finite_max(row_max) + logf(row_sum))", plain, {"lse"},
    ),
    "delta_of_the_column": Mutant(
        "02_tiled", "p * (dp - smem.delta[row])", "p * (dp - smem.delta[col])", plain, {"dq", "dk"}
    ),
    "no_scale_on_dq": Mutant(
        "02_tiled", TILED_DQ, TILED_DQ.replace("params.softmax_scale", "1.0f"), plain, {"dq"}
    ),
    "no_delta": Mutant(
        "02_tiled", "p * (dp - smem.delta[row])", "p * dp", plain, {"dq", "dk"}
    ),
    "delta_from_q": Mutant(
        "02_tiled", "sum += smem.sO[row][x] * smem.sdO[row][x]", "sum += smem.sQ[row][x] * smem.sdO[row][x]",
        plain, {"dq", "dk"},
    ),
    "p_not_transposed": Mutant(
        "02_tiled",
        "add_transposed_product<kNumThreads>(acc_dv",
        "add_product<kNumThreads>(acc_dv",
        plain,
        {"dv"},
    ),
    "naive_without_scale": Mutant(
        "01_naive", "run(product_kernel<true>, k_grid, sizes, ds, q, scale, params.dk)",
        "run(product_kernel<true>, k_grid, sizes, ds, q, 1.0f, params.dk)", plain, {"dk"},
    ),
    "sum_not_rescaled": Mutant(
        "00_forward", "rescale * smem.row_sum[row] + tile_sum", "smem.row_sum[row] + tile_sum", plain,
        {"out", "lse"},
    ),
    "lse_without_maximum": Mutant(
        "00_forward", "finite_max(row_max) + logf(row_sum)", "logf(row_sum)", plain, {"lse"}
    ),
    "mask_forgotten_in_backward": Mutant(
        "01_naive", "const bool visible = col < sizes.num_visible_keys(row);", "const bool visible = true;",
        causal, {"dv"},
    ),
    "empty_rows_divide_by_zero": Mutant(
        "00_forward", "smem.row_sum[row] == 0.0f ? 0.0f : acc_o[j] / smem.row_sum[row]",
        "acc_o[j] / smem.row_sum[row]", empty_rows, {"out"},
    ),
    "last_key_tile_skipped": Mutant(
        "02_tiled", "for (int n_start = 0; n_start < params.seqlen_k; n_start += kBlockN)",
        "for (int n_start = 0; n_start + kBlockN <= params.seqlen_k; n_start += kBlockN)", plain, {"dq"},
    ),
    "head_stride_ignored": Mutant(
        "02_tiled", "k(params.k + params.k_strides.offset(batch, head))",
        "k(params.k + int64_t(blockIdx.x) * params.seqlen_k * kHeadDim)", strided, {"dq", "dk", "dv"},
    ),
    "batch_and_head_exchanged": Mutant(
        "00_forward",
        "const int batch = blockIdx.x / params.num_heads, head = blockIdx.x % params.num_heads;",
        "const int head = blockIdx.x / params.num_heads, batch = blockIdx.x % params.num_heads;",
        strided, {"out", "lse"},
    ),
    "no_barrier_before_output": Mutant(
        "00_forward",
        "      __syncthreads();  // P, the new statistics and the rescaling factors are complete\n", "",
        shuffled, {"out"},
    ),
    "too_much_shared_memory": Mutant(
        "02_tiled", "dim3(kNumThreads), sizeof(SharedMemory),\n", "dim3(kNumThreads), 512 * 1024,\n",
        device_error, {"shared memory"},
    ),
}  # fmt: skip
SAMPLE = {
    "no_scale_on_dk",
    "mask_top_left",
    "row_stride_ignored",
    "barrier_for_half_the_threads",
}


def mutated(name: str) -> Path:
    """The mutant's file, at a fixed place so that its build is reused by the next test run."""
    mutant = MUTANTS[name]
    source = (REPO / "chapters" / mutant.chapter / "kernel.cu").read_text()
    assert source.count(mutant.old) == 1, (
        f"{mutant.chapter}/kernel.cu has {source.count(mutant.old)} times, not once: {mutant.old!r}"
    )
    path = jit.build_root() / "mutants" / f"{name}.cu"
    text = source.replace(mutant.old, mutant.new)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path


def _pair(kernel: Chapter) -> tuple[Chapter, Chapter]:
    """(forward, backward): the kernel under test and an unchanged chapter for the other pass."""
    return (loaded("00_forward"), kernel) if kernel.has_backward else (kernel, loaded("02_tiled"))


@pytest.mark.parametrize("name", mostly_slow(MUTANTS, lambda name: name in SAMPLE))
def test_mutant_is_rejected(name: str) -> None:
    """The check that the chapter passes rejects the mutant."""
    mutant = MUTANTS[name]
    original = mutant.check(*_pair(loaded(mutant.chapter)))
    assert original == set(), f"{mutant.chapter} itself is rejected: {original}"
    found = mutant.check(*_pair(load_kernel(mutated(name))))
    assert found >= mutant.caught, f"{name}: found only {found or 'nothing'}"


def test_run_uses_the_kernel_it_is_given() -> None:
    """The helper of all other tests runs the mutant, not the chapter it was made from."""
    kernel = load_kernel(mutated("no_scale_on_dk"))
    inputs = draw(1, 1, 33, chapter=kernel, head_dim=16)
    wrong = over_budget(run(kernel, inputs.q, inputs.k, inputs.v, inputs.dout), inputs)
    assert {c.name for c in wrong} == {"dk"}
    assert torch.isfinite(torch.tensor([c.error for c in wrong])).all()
