"""What holds for every input: drawn by hypothesis over shapes, strides, dtypes, scales and masks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import (
    BUILDS,
    RESULTS,
    assert_correct,
    assert_same_bits,
    axes_swapped,
    backward_chapters,
    chapter_parameters,
    loaded,
    reproducible,
    run,
    same_bits,
    surrounded_by_nan,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import Chapter, validation
from common.inputs import Inputs, random_inputs
from common.reference import Gradients

QUICK = settings(
    derandomize=True,
    deadline=None,
    max_examples=20,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
CHAPTERS = pytest.mark.parametrize("name", chapter_parameters(backward_chapters()))
LAYOUTS = ["dense", "swapped", "sliced", "misaligned", "heads_shared", "rows_shared", "columns_strided"]


@dataclass(frozen=True)
class Problem:
    """One call, small enough to print."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    build: int  # index into BUILDS
    layouts: tuple[str, str, str, str]  # of q, k, v, dout
    scale: float | None
    is_causal: bool
    seed: int

    def inputs(self, chapter: Chapter) -> Inputs:
        supported = [
            (dtype, dim)
            for dtype, dim in BUILDS
            if dtype in chapter.info.dtypes and dim in chapter.info.head_dims
        ]
        dtype, head_dim = supported[self.build % len(supported)]
        dense = random_inputs(
            self.batch,
            self.num_heads,
            self.seqlen_q,
            head_dim,
            seqlen_k=self.seqlen_k,
            dtype=dtype,
            seed=self.seed,
        )
        tensors = (dense.q, dense.k, dense.v, dense.dout)
        return Inputs(*(laid_out(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)))

    def options(self) -> dict[str, object]:
        return {"softmax_scale": self.scale, "is_causal": self.is_causal}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A view of the shape of ``tensor``: equal values, but for the expanded layouts."""
    if layout == "swapped":
        return axes_swapped(tensor)
    if layout == "sliced":
        return surrounded_by_nan(tensor, 8)
    if layout == "misaligned":
        return surrounded_by_nan(tensor, 1)
    if layout == "heads_shared":
        return tensor[:, :1].expand(tensor.shape)
    if layout == "rows_shared":
        return tensor[:, :, :1].expand(tensor.shape)
    if layout == "columns_strided":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor


# Scores of ordinary size, no attention at all, the wrong sign, and a softmax that is nearly a maximum.
SCALES = st.sampled_from([None, 0.0, -0.25, 0.01, 0.3, -1.0, 1.0])
PROBLEMS = st.builds(
    Problem,
    batch=st.integers(1, 2),
    num_heads=st.integers(1, 3),
    seqlen_q=st.integers(1, 70),
    seqlen_k=st.integers(1, 70),
    build=st.integers(0, len(BUILDS) - 1),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    scale=SCALES,
    is_causal=st.booleans(),
    seed=st.integers(0, 2**16),
)


@CHAPTERS
@QUICK
@given(problem=PROBLEMS)
def test_all_results_are_within_budget(name: str, problem: Problem) -> None:
    """Any shape, stride, dtype, scale and mask."""
    # With one key dS is exactly 0, in plain PyTorch as well; equal rows then add equal roundoff, which the
    # budget, made for roundoff that is random, does not foresee.
    assume(problem.seqlen_k > 1 or problem.layouts[0] != "rows_shared" != problem.layouts[3])
    chapter = loaded(name)
    inputs = problem.inputs(chapter)
    result = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout, **problem.options())
    dense = Inputs(*(t.contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.dout)))
    assert_correct(result, dense, **problem.options())


@CHAPTERS
@QUICK
@given(problem=PROBLEMS)
def test_strides_do_not_change_a_bit(name: str, problem: Problem) -> None:
    """The bits are those of the dense copy, and no input is written to."""
    chapter = reproducible(name)
    inputs = problem.inputs(chapter)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    dense = [t.contiguous().clone() for t in tensors]
    options = problem.options() | {"deterministic": same_bits(chapter)}
    assert_same_bits(run(chapter, *tensors, **options), run(chapter, *dense, **options))
    for tensor, copy in zip(tensors, dense, strict=True):
        assert torch.equal(tensor, copy)


@CHAPTERS
@QUICK
@given(problem=PROBLEMS)
def test_heads_are_independent(name: str, problem: Problem) -> None:
    """Each (batch, head) computed alone has the bits of its slice."""
    chapter = reproducible(name)
    inputs = problem.inputs(chapter)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    options = problem.options() | {"deterministic": same_bits(chapter)}
    together = run(chapter, *tensors, **options)
    for b in range(problem.batch):
        for h in range(problem.num_heads):
            alone = run(chapter, *(t[b : b + 1, h : h + 1] for t in tensors), **options)
            piece = Gradients(**{r: getattr(together, r)[b : b + 1, h : h + 1] for r in RESULTS})
            assert_same_bits(alone, piece)


@CHAPTERS
@QUICK
@given(problem=PROBLEMS, factor=st.sampled_from([-2.0, 0.5, 4.0]))
def test_gradients_are_linear_in_dout(name: str, problem: Problem, factor: float) -> None:
    """Backward is linear in dO: a power of two scales every bit pattern exactly, in fp32 at least."""
    chapter = reproducible(name)
    inputs = problem.inputs(chapter)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    options = problem.options() | {"deterministic": same_bits(chapter)}
    once = run(chapter, q, k, v, dout, **options)
    scaled = run(chapter, q, k, v, factor * dout, **options)
    for result in ("dq", "dk", "dv"):
        a, b = factor * getattr(once, result), getattr(scaled, result)
        if q.dtype == torch.float16:  # small numbers lose digits in half precision
            tiny = torch.finfo(q.dtype).smallest_normal
            torch.testing.assert_close(a, b, rtol=torch.finfo(q.dtype).eps, atol=8 * tiny)
        else:
            assert torch.equal(a, b), result


@CHAPTERS
@QUICK
@given(problem=PROBLEMS)
def test_gradients_obey_conservation(name: str, problem: Problem) -> None:
    """Rows of dS add up to 0, so <q, dQ> = <k, dK>, and columns of P add up to 1 per row, so Σ dV = Σ dO."""
    chapter = loaded(name)
    inputs = problem.inputs(chapter)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    result = run(chapter, q, k, v, dout, **problem.options())
    # P inherits the rounding of its exponent, S − lse, and S may be larger than lse.
    scores = q.double() @ k.double().transpose(-1, -2) * validation.default_scale(problem.scale, q.shape[3])
    exponent = (
        scores.abs().max().item() + torch.where(result.lse.isfinite(), result.lse, 0.0).abs().max().item()
    )
    unit = torch.finfo(q.dtype).eps + torch.finfo(torch.float32).eps * exponent
    seen = result.lse.isfinite()[..., None]
    total_dout = torch.where(seen, dout.double(), 0.0).sum((2, 3))
    total_dv = result.dv.double().sum((2, 3))
    size = dout.double().abs().sum((2, 3))
    assert torch.all((total_dv - total_dout).abs() <= 4 * unit * size)
    # Both are scale · Σ S ∘ dS.
    left = (q.double() * result.dq.double()).sum((2, 3))
    right = (k.double() * result.dk.double()).sum((2, 3))
    terms = (q.double() * result.dq.double()).abs().sum((2, 3)) + (k.double() * result.dk.double()).abs().sum(
        (2, 3)
    )
    assert torch.all((left - right).abs() <= 16 * unit * (terms + size * unit))
