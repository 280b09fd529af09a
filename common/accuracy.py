"""How far dQ is off when it is added up in its own dtype, and in fp32 (chapters 04 and 05)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from common import jit
from common.chapters import load_chapter
from common.inputs import random_inputs
from common.reference import reference_gradients


@dataclass(frozen=True)
class DqError:
    """dQ's error at one number of keys: Frobenius norm, relative to the norm of the float64 reference.

    dtype: "fp32", "fp16" or "bf16". rounded_every: keys after which ``atomic`` rounds its dQ, kBlockN.
    """

    dtype: str
    seqlen_k: int
    rounded_every: int
    atomic: float  # added up in dtype
    accumulated: float  # added up in fp32, rounded once

    @property
    def num_blocks(self) -> int:
        """T, the number of K blocks: how often the atomics round."""
        return math.ceil(self.seqlen_k / self.rounded_every)

    @property
    def ratio(self) -> float:
        """By how much atomics are worse."""
        return self.atomic / self.accumulated

    @property
    def predicted_ratio(self) -> float:
        """√(1 + T/2), or 1 in fp32, whose roundings are no larger than those of every other sum.

        The accumulator's dQ is rounded once. T roundings of a sum that grows like a random walk are the T/2
        of ``common.reference.compare``; the error of both is added in quadrature.
        """
        return 1.0 if self.dtype == "fp32" else math.sqrt(1 + self.num_blocks / 2)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The reference's matrices are small: PyTorch's threads would mostly wait for a busy machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure_dq_errors(
    seqlens_k: Iterable[int],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
    *,
    atomic: str | int = "04_atomic_dq",
    accumulated: str | int = "05_fp32_accum",
    seqlen_q: int = 32,
    head_dim: int = 64,
    seed: int = 1,
) -> list[DqError]:
    """Runs both chapters on the CPU device, one head of random numbers at each number of keys.

    The same bits on every run. Shows its progress. Time grows with seqlen_q · Σ seqlens_k.
    """
    chapters = [load_chapter(name, schedule="in_order") for name in (atomic, accumulated)]
    rounded_every = chapters[0].info.dq_rounded_every
    if rounded_every is None:
        raise ValueError(f"{chapters[0].name} does not say that it rounds dq (dq_rounded_every)")

    def errors(seqlen_k: int, dtype: torch.dtype) -> Iterator[float]:
        inputs = random_inputs(1, 1, seqlen_q, head_dim, seqlen_k=seqlen_k, dtype=dtype, seed=seed)
        q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
        out, lse = chapters[0].forward(q, k, v)
        truth = reference_gradients(q, k, v, dout).dq
        for chapter in chapters:
            dq, _, _ = chapter.backward(q, k, v, out, dout, lse)
            yield ((dq.double() - truth).norm() / truth.norm()).item()

    wanted = [(dtype, seqlen_k) for seqlen_k in seqlens_k for dtype in dtypes]
    results = []
    with _one_thread(), tqdm(wanted, desc="dq errors", leave=False, disable=None) as bar:
        for dtype, seqlen_k in bar:
            name = jit.DTYPE_NAMES[dtype]
            bar.set_postfix_str(f"{name}, {seqlen_k} keys")
            results.append(DqError(name, seqlen_k, rounded_every, *errors(seqlen_k, dtype)))
    return results
