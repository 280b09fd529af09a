"""Inputs that broke other implementations, II: strides, tails, what lies around a tensor, shapes."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import (
    BF16,
    FP16,
    FP32,
    REPO,
    assert_correct,
    assert_correct_after_long_sums,
    assert_same_bits,
    assert_still_works,
    axes_swapped,
    backward_chapters,
    dense_between_nan,
    draw,
    either_right_or,
    equal_bits,
    loaded,
    nearest_build,
    reproducible,
    run,
    run_and_check,
    same_bits,
    surrounded_by_nan,
    widest_dtype,
)
from torch import Tensor

from common import Chapter, flash_attention, jit, load_kernel
from common.inputs import Inputs
from common.reference import Gradients

# ---------------------------------------------------------------- strides


def _sum_gradient(dout: Tensor) -> Tensor:
    return torch.ones((), dtype=dout.dtype).expand(dout.shape)


def _last_axis_strided(tensor: Tensor) -> Tensor:
    view = tensor.transpose(2, 3).contiguous().transpose(2, 3)
    assert view.stride(-1) != 1
    return view


def _every_second_column(tensor: Tensor) -> Tensor:
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _shared_by_all_heads(tensor: Tensor) -> Tensor:
    return tensor[:, :1].expand(tensor.shape)


def _shared_by_all_rows(tensor: Tensor) -> Tensor:
    return tensor[:, :, :1].expand(tensor.shape)


def _last_in_a_fused_projection(tensor: Tensor) -> Tensor:
    fused = torch.full((*tensor.shape[:-1], 3 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
    fused[..., 2 * tensor.shape[-1] :] = tensor
    return fused[..., 2 * tensor.shape[-1] :]


VIEWS: list[Callable[[Tensor], Tensor]] = [
    _sum_gradient,
    axes_swapped,
    _last_axis_strided,
    _every_second_column,
    _shared_by_all_heads,
    _shared_by_all_rows,
    _last_in_a_fused_projection,
]


@pytest.mark.parametrize("view", VIEWS)
def test_strided_dout_is_read_as_it_lies(
    reproducible_chapter: Chapter, view: Callable[[Tensor], Tensor]
) -> None:
    """B01: an expanded, permuted or sliced dO gives the bits that its dense copy gives."""
    chapter = reproducible_chapter
    inputs = draw(1, 2, 37, chapter=chapter)
    dout = view(inputs.dout)
    q, k, v = inputs.q, inputs.k, inputs.v
    deterministic = same_bits(chapter)
    strided = run(chapter, q, k, v, dout, deterministic=deterministic)
    assert_same_bits(strided, run(chapter, q, k, v, dout.contiguous(), deterministic=deterministic))
    assert_correct(strided, Inputs(q, k, v, dout))


def test_sum_of_the_output_as_loss(reproducible_chapter: Chapter) -> None:
    """B01 through autograd: out.sum() hands backward a gradient whose strides are all 0."""
    chapter = reproducible_chapter
    inputs = draw(1, 2, 37, chapter=chapter)
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    out = flash_attention(*leaves, chapter=chapter, deterministic=same_bits(chapter))
    seen: list[Tensor] = []
    out.register_hook(lambda gradient: seen.append(gradient))
    out.sum().backward()
    assert seen[0].stride() == (0, 0, 0, 0)
    dense = run(
        chapter,
        *(x.detach() for x in leaves),
        torch.ones_like(inputs.dout),
        deterministic=same_bits(chapter),
    )
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        assert torch.equal(leaf.grad, getattr(dense, name)), name


@pytest.mark.parametrize("swapped", list(itertools.product([False, True], repeat=3)))
def test_projection_layout(reproducible_chapter: Chapter, swapped: tuple[bool, bool, bool]) -> None:
    """B06: each of Q, K, V dense or stored as [B, N, H, d]; nothing is written into the caller's storage."""
    chapter = reproducible_chapter
    inputs = draw(2, 3, 62, chapter=chapter)
    dense = (inputs.q, inputs.k, inputs.v)
    views = [axes_swapped(x) if swap else x.clone() for x, swap in zip(dense, swapped, strict=True)]
    dout = axes_swapped(inputs.dout) if any(swapped) else inputs.dout.clone()
    options = {"is_causal": True, "deterministic": same_bits(chapter)}
    result = run(chapter, *views, dout, **options)
    assert_same_bits(result, run(chapter, *dense, inputs.dout, **options))
    for view, original in zip((*views, dout), (*dense, inputs.dout), strict=True):
        assert torch.equal(view, original)
    for tensor in (result.out, result.lse, result.dq, result.dk, result.dv):
        assert tensor.is_contiguous()


def test_views_of_one_storage(reproducible_chapter: Chapter) -> None:
    """B06: q, k and v as slices of one [B, N, 3, H, d] projection, and the same tensor passed three times."""
    chapter = reproducible_chapter
    dtype, head_dim = nearest_build(chapter, FP32, 64)
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 40, 3, 2, head_dim, generator=generator).to(dtype)
    before = fused.clone()
    q, k, v = fused.permute(2, 0, 3, 1, 4)
    dout = draw(2, 2, 40, chapter=chapter, dtype=dtype, head_dim=head_dim).dout
    deterministic = same_bits(chapter)
    for views in ((q, k, v), (q, q, q)):
        result = run(chapter, *views, dout, deterministic=deterministic)
        assert_same_bits(
            result, run(chapter, *(x.contiguous() for x in views), dout, deterministic=deterministic)
        )
        assert_correct(result, Inputs(*views, dout))
    assert torch.equal(fused, before)


def test_strided_lse_and_out(reproducible_chapter: Chapter) -> None:
    """B06, its kind: what backward gets back from forward may have been re-laid in between."""
    chapter = reproducible_chapter
    inputs = draw(2, 3, 41, chapter=chapter)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    out, lse = chapter.forward(q, k, v)
    deterministic = same_bits(chapter)
    dense = chapter.backward(q, k, v, out, dout, lse, deterministic=deterministic)
    relaid = lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not relaid.is_contiguous()
    strided = chapter.backward(q, k, v, _last_axis_strided(out), dout, relaid, deterministic=deterministic)
    for a, b in zip(dense, strided, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- around the tensors


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (33, 65), (70, 37)])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [pytest.param(FP32, 16, marks=pytest.mark.slow), (FP32, 64), (BF16, 72)]
)
def test_nan_around_the_tensors_never_reaches_a_result(
    reproducible_chapter: Chapter,
    dtype: torch.dtype,
    head_dim: int,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
) -> None:
    """Nothing may depend on what lies before, after or between the rows of a tensor: 0 · NaN is NaN."""
    chapter = reproducible_chapter
    inputs = draw(2, 2, seqlen_q, seqlen_k, chapter=chapter, dtype=dtype, head_dim=head_dim)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    options = {"is_causal": is_causal}
    deterministic = same_bits(chapter)
    clean = run(chapter, *tensors, deterministic=deterministic, **options)
    for gap in (1, 8):
        q, k, v, dout = (surrounded_by_nan(tensor, gap) for tensor in tensors)
        out, lse = chapter.forward(q, k, v, **options)
        gradients = chapter.backward(
            q,
            k,
            v,
            surrounded_by_nan(out, gap),
            dout,
            dense_between_nan(lse),
            deterministic=deterministic,
            **options,
        )
        assert_same_bits(Gradients(out, lse, *gradients), clean)


def test_tails_do_not_reach_the_next_head(reproducible_chapter: Chapter) -> None:
    """B03: each head computed alone has the bits it has among the others, in every order of the blocks."""
    chapter = reproducible_chapter
    deterministic = same_bits(chapter)
    inputs = draw(2, 3, 65, chapter=chapter)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    alone = [
        run(chapter, *(x[b : b + 1, h : h + 1] for x in tensors), deterministic=deterministic)
        for b, h in itertools.product(range(2), range(3))
    ]
    expected = Gradients(
        *(
            torch.cat([getattr(result, name) for result in alone]).unflatten(0, (2, 3)).squeeze(2)
            for name in ("out", "lse", "dq", "dk", "dv")
        )
    )
    assert_correct(expected, inputs)
    never = chapter.info.deterministic == "never"
    for schedule in ["in_order"] if never else [None] * 8 + ["in_order", *range(6)]:
        together = run(loaded(chapter.name, schedule), *tensors, deterministic=deterministic)
        assert_same_bits(together, expected)


def test_tails_do_not_reach_the_next_head_in_any_order(chapter: Chapter) -> None:
    """B03 for chapters whose bits depend on the order: in 6 shuffled orders every head is within budget."""
    inputs = draw(2, 3, 65, chapter=chapter)
    for seed in range(6):
        run_and_check(loaded(chapter.name, seed), inputs)


# ---------------------------------------------------------------- head dims


@pytest.mark.parametrize("head_dim", [1, 8, 12, 33, 63, 65, 136, 256])
def test_unsupported_head_dims_are_refused(chapter: Chapter, head_dim: int) -> None:
    """B21, B19: ValueError that lists what is supported, in forward already; the next call works."""
    q = torch.randn(1, 1, 8, head_dim)
    out, lse = torch.zeros_like(q), torch.zeros(1, 1, 8)
    supported = re.escape(", ".join(str(dim) for dim in chapter.info.head_dims))
    for call in (
        lambda: chapter.forward(q, q, q),
        lambda: chapter.backward(q, q, q, out, q, lse),
        lambda: flash_attention(q, q, q, chapter=chapter),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"head_dim {head_dim} .*{supported}|dtype"):
            call()
    assert_still_works(chapter)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (FP32, 64),
        (BF16, 72),
        pytest.param(FP32, 80, marks=pytest.mark.slow),
        pytest.param(FP32, 104, marks=pytest.mark.slow),
    ],
)
def test_signal_in_the_last_feature(chapter: Chapter, dtype: torch.dtype, head_dim: int) -> None:
    """B21: q, k and v differ from zero only in the last column; it must count in every result."""
    if nearest_build(chapter, dtype, head_dim) != (dtype, head_dim):
        pytest.skip(f"{chapter.name} does not support it")
    inputs = draw(1, 2, 40, 33, chapter=chapter, dtype=dtype, head_dim=head_dim)
    last = torch.arange(head_dim) == head_dim - 1
    q, k, v = (tensor * last for tensor in (inputs.q, inputs.k, inputs.v))
    inputs = Inputs(q, k, v, inputs.dout)
    result = run_and_check(chapter, inputs, softmax_scale=1.0)
    for name in ("out", "dq", "dk"):
        tensor = getattr(result, name)
        assert torch.all(tensor[..., :-1] == 0), name
        assert torch.all(tensor[..., -1].abs().sum(-1) > 0), name


def test_a_head_dim_that_is_no_power_of_two(chapter: Chapter) -> None:
    """B21: random numbers in bf16 with head_dim 72, several heads, ragged tiles."""
    dtype, head_dim = nearest_build(chapter, BF16, 72)
    inputs = draw(1, 4, 200, 257, chapter=chapter, dtype=dtype, head_dim=head_dim)
    for is_causal in (False, True):
        run_and_check(chapter, inputs, is_causal=is_causal)


# ---------------------------------------------------------------- empty tensors and large ones


@pytest.mark.parametrize(
    ("batch", "num_heads", "seqlen_q", "seqlen_k"),
    [(0, 2, 8, 8), (2, 0, 8, 8), (0, 0, 0, 0), (1, 2, 0, 4), (1, 2, 4, 0), (1, 2, 0, 0)],
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_empty_tensors(
    chapter: Chapter, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, is_causal: bool
) -> None:
    """B22: right shapes and values, forward and backward, by the methods and through autograd."""
    inputs = draw(batch, num_heads, seqlen_q, seqlen_k, chapter=chapter)
    result = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout, is_causal=is_causal)
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    out = flash_attention(*leaves, is_causal=is_causal, chapter=chapter)
    out.sum().backward()
    assert result.out.shape == out.shape == inputs.q.shape
    assert result.lse.shape == inputs.q.shape[:3]
    assert result.out.dtype == out.dtype == inputs.q.dtype
    assert torch.all(result.out == 0)
    assert torch.all(result.lse == -torch.inf)
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        gradient = getattr(result, name)
        assert gradient.shape == leaf.grad.shape == leaf.shape
        assert gradient.dtype == leaf.grad.dtype == leaf.dtype
        assert torch.all(gradient == 0)
        assert torch.all(leaf.grad == 0)
    stats = chapter.forward(inputs.q, inputs.k, inputs.v, return_row_stats=True)
    assert [tuple(x.shape) for x in stats[1:]] == [inputs.q.shape[:3]] * 3
    assert_still_works(chapter)


@pytest.mark.parametrize(
    "swap", [pytest.param(False, id="heads", marks=pytest.mark.slow), pytest.param(True, id="batch")]
)
def test_more_heads_than_a_small_grid_axis(chapter: Chapter, swap: bool) -> None:
    """B18, the quick part: (150, 2) and (2, 150) heads, each with its own numbers."""
    shape = (150, 2) if swap else (2, 150)
    inputs = draw(*shape, 4, 3, chapter=chapter)
    run_and_check(chapter, inputs, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_lie_on_grid_axis_x(chapter: Chapter, is_causal: bool) -> None:
    """B18: grid axes y and z end at 65535; batch and heads may be more."""
    grids = []
    for batch in (1, 3):
        inputs = draw(batch, 2, 70, chapter=chapter)
        run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout, is_causal=is_causal)
        grids.append([launch.grid[1:] for launch in chapter.last_launches])
    few, many = grids
    assert few == many
    assert len(few) >= 1


@pytest.mark.slow
def test_more_heads_than_65535() -> None:
    """B18, run whole; minutes on a CPU, so for one chapter, and none of the slowest there.

    The test above is for every chapter, and on a GPU all of them run this.
    """
    scalar = [info for info in backward_chapters() if info.min_compute_capability < (8, 0)]
    chapter = loaded(scalar[-1].name)
    run_and_check(chapter, draw(65536, 1, 4, chapter=chapter, head_dim=16))


@pytest.mark.slow
def test_more_query_tiles_than_65535() -> None:
    """B18: Nq = 64 · 65535 + 1 makes more tiles than grid axis y has blocks; minutes on a CPU, so once."""
    chapter = loaded(backward_chapters()[-1].name)
    seqlen_q = 64 * 65535 + 1
    inputs = draw(1, 1, seqlen_q, 16, chapter=chapter, head_dim=16, dtype=widest_dtype(chapter))
    result = either_right_or(
        (ValueError, RuntimeError),
        "seqlen_q|memory",
        lambda: run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout),
    )
    if result is not None:
        assert_correct_after_long_sums(result, inputs)


def test_offsets_beyond_32_bits(chapter: Chapter) -> None:
    """B37 (a): a batch stride of 2³¹ elements; only the two ends of the storage are ever touched."""
    distance = 2**31
    inputs = draw(2, 1, 64, chapter=chapter, dtype=FP16, head_dim=64)
    dtype, (_, _, seqlen, head_dim) = inputs.q.dtype, inputs.q.shape
    size = seqlen * head_dim
    storage = torch.empty(distance + 4 * size, dtype=dtype)  # pages are given when first written
    views = []
    for i, tensor in enumerate((inputs.q, inputs.k, inputs.v, inputs.dout)):
        strides = (distance, size, head_dim, 1)
        view = storage.as_strided(tensor.shape, strides, i * size)
        view.copy_(tensor)
        views.append(view)
    far = run(reproducible(chapter.name), *views, deterministic=same_bits(chapter))
    near = run(
        reproducible(chapter.name),
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.dout,
        deterministic=same_bits(chapter),
    )
    assert_same_bits(far, near)


# ---------------------------------------------------------------- shapes, dtypes, devices


def _bad_shapes() -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]]:
    q = (2, 2, 8, 16)
    return {
        "v_head_dim": (q, q, (2, 2, 8, 32), "v .*head_dim 32"),
        "k_head_dim": (q, (2, 2, 8, 32), (2, 2, 8, 32), "k .*head_dim 32"),
        "k_and_v_seqlen": (q, (2, 2, 7, 16), (2, 2, 8, 16), "v .*seqlen 8"),
        "k_batch": (q, (1, 2, 8, 16), (1, 2, 8, 16), "k .*batch 1"),
        "v_batch": (q, q, (1, 2, 8, 16), "v .*batch 1"),
        "k_heads": (q, (2, 1, 8, 16), (2, 1, 8, 16), "k .*num_heads 1"),
        "v_heads": (q, q, (2, 1, 8, 16), "v .*num_heads 1"),
        "q_heads": ((2, 1, 8, 16), q, q, "k .*num_heads 2"),
        "q_3d": (q[1:], q, q, "q .*4 axes"),
        "v_3d": (q, q, q[1:], "v .*4 axes"),
        "k_5d": (q, (1, *q), q, "k .*4 axes"),
        "scalar": ((), q, q, "q .*4 axes"),
    }


@pytest.mark.parametrize("case", _bad_shapes().values(), ids=_bad_shapes().keys())
def test_shapes_that_do_not_fit_are_refused(
    chapter: Chapter, case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]
) -> None:
    """B30: ValueError that names the argument and both shapes, from every entry point."""
    *shapes, message = case
    dtype = chapter.info.dtypes[0]
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    lse = torch.zeros(q.shape[:3])
    both = [re.escape(str(shape)) for shape in shapes]
    for call in (
        lambda: chapter.forward(q, k, v),
        lambda: chapter.backward(q, k, v, q, q, lse),
        lambda: flash_attention(q, k, v, chapter=chapter),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert any(re.search(shape, str(caught.value)) for shape in both)
    assert_still_works(chapter)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("out", lambda x: x[:, :, :-1], "out has shape"),
        ("dout", lambda x: x[..., :-8], "dout has shape"),
        ("dout", lambda x: x[0], "dout has shape .*4 axes"),
        ("dout", lambda x: x[:, :1], "dout has shape"),
        ("lse", lambda x: x[:, :, :-1], "lse has shape"),
        ("lse", lambda x: x[..., None], "lse has shape"),
        ("lse", lambda x: torch.cat([x, x], 2), "lse has shape"),
    ],
)
def test_saved_tensors_that_do_not_fit_are_refused(
    chapter: Chapter, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    """B30 for what backward gets: out, dout and lse must be what forward made."""
    inputs = draw(2, 2, 8, chapter=chapter, head_dim=64)
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = chapter.forward(q, k, v)
    saved = {"out": out, "dout": inputs.dout, "lse": lse}
    saved[name] = change(saved[name])
    with pytest.raises(ValueError, match=message):
        chapter.backward(q, k, v, saved["out"], saved["dout"], saved["lse"])
    assert_still_works(chapter)


@pytest.mark.parametrize(
    "dtypes",
    [
        (FP32, FP32, BF16),
        (FP16, BF16, BF16),
        (torch.float64,) * 3,
        (torch.int32,) * 3,
        (torch.complex64,) * 3,
        (torch.bool,) * 3,
        (BF16, BF16, FP32),
    ],
    ids=str,
)
def test_dtypes_that_do_not_fit_are_refused(chapter: Chapter, dtypes: tuple[torch.dtype, ...]) -> None:
    """B28: TypeError that names the dtypes; bytes are never reinterpreted."""
    tensors = [torch.zeros(1, 1, 8, 64).to(dtype) for dtype in dtypes]
    out, lse = torch.zeros_like(tensors[0]), torch.zeros(1, 1, 8)
    for call in (
        lambda: chapter.forward(*tensors),
        lambda: chapter.backward(*tensors, out, out, lse),
        lambda: flash_attention(*tensors, chapter=chapter),
    ):
        with pytest.raises(TypeError, match="dtype") as caught:
            call()
        assert any(str(dtype) in str(caught.value) for dtype in dtypes)
    assert_still_works(chapter)


@pytest.mark.parametrize("name", ["out", "dout", "lse"])
def test_saved_dtypes_that_do_not_fit_are_refused(chapter: Chapter, name: str) -> None:
    """B28 for what backward gets: dO in fp32 with an O in bf16, lse in half precision."""
    inputs = draw(1, 1, 8, chapter=chapter, dtype=BF16)
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = chapter.forward(q, k, v)
    saved = {"out": out, "dout": inputs.dout, "lse": lse}
    saved[name] = saved[name].to(BF16 if name == "lse" else FP32 if q.dtype != FP32 else BF16)
    with pytest.raises(TypeError, match=f"{name} has dtype"):
        chapter.backward(q, k, v, saved["out"], saved["dout"], saved["lse"])
    assert_still_works(chapter)


@pytest.mark.parametrize("position", range(3))
def test_tensors_on_another_device_are_refused(chapter: Chapter, position: int) -> None:
    """B29 without a GPU: a meta tensor has no data to read."""
    inputs = draw(1, 1, 8, chapter=chapter)
    tensors = [inputs.q, inputs.k, inputs.v]
    out, lse = chapter.forward(*tensors)
    tensors[position] = tensors[position].to("meta")
    for call in (
        lambda: chapter.forward(*tensors),
        lambda: chapter.backward(*tensors, out, inputs.dout, lse),
        lambda: flash_attention(*tensors, chapter=chapter),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"device|meta"):
            call()
    with pytest.raises(ValueError, match="device"):
        chapter.backward(inputs.q, inputs.k, inputs.v, out, inputs.dout.to("meta"), lse)
    assert_still_works(chapter)


def test_all_tensors_on_meta(chapter: Chapter) -> None:
    """B45: without data there are only shapes: the operator gives a meta tensor, the methods refuse."""
    inputs = draw(1, 2, 8, 9, chapter=chapter, device="meta")
    out = flash_attention(inputs.q, inputs.k, inputs.v, chapter=chapter)
    assert out.device.type == "meta"
    assert out.shape == inputs.q.shape
    with pytest.raises(ValueError, match="meta"):
        chapter.forward(inputs.q, inputs.k, inputs.v)


@pytest.mark.parametrize("wrong", [None, 3.0, [[1.0]], "q"], ids=str)
def test_things_that_are_no_tensors_are_refused(chapter: Chapter, wrong: object) -> None:
    """B30, its kind: TypeError that names the argument."""
    q = draw(1, 1, 8, chapter=chapter).q
    for position, name in enumerate("qkv"):
        tensors = [q, q, q]
        tensors[position] = wrong
        with pytest.raises(TypeError, match=f"{name} is a"):
            chapter.forward(*tensors)


def test_sparse_tensors_are_refused(chapter: Chapter) -> None:
    """B30, its kind: a sparse tensor has no strides to walk."""
    q = draw(1, 1, 8, chapter=chapter).q
    with pytest.raises(TypeError, match="k has layout"):
        chapter.forward(q, q.to_sparse(), q)


# ---------------------------------------------------------------- errors of a launch

GREEDY = 512 * 1024  # more shared memory than any device has


@pytest.fixture(scope="session", params=["forward", "backward"])
def greedy_kernel(request: pytest.FixtureRequest) -> Path:
    """A kernel that asks for too much shared memory, in forward or in the last launch of backward."""
    source, text = {
        "forward": ("00_forward", "                sizeof(SharedMemory), stream, params);"),
        "backward": (
            "02_tiled",
            "  return launch(dq_kernel, head_grid(params, num_m_blocks), dim3(kNumThreads), "
            "sizeof(SharedMemory),\n",
        ),
    }[request.param]
    kernel = (REPO / "chapters" / source / "kernel.cu").read_text()
    assert kernel.count(text) == 1
    # At a fixed place, so that its build is reused by the next test run.
    copy = jit.build_root() / "mutants" / f"greedy_{request.param}.cu"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(kernel.replace(text, text.replace("sizeof(SharedMemory)", str(GREEDY))))
    return copy


@pytest.mark.xdist_group("greedy")
def test_too_much_shared_memory_is_an_error_with_both_numbers(greedy_kernel: Path) -> None:
    """B19: an exception that names bytes needed and bytes there are; later calls are untouched by it."""
    chapter = load_kernel(greedy_kernel)
    inputs = draw(1, 1, 8, chapter=chapter)
    q, k, v = inputs.q, inputs.k, inputs.v
    expected = rf"needs {GREEDY} bytes of shared memory, this device has \d+"
    good = loaded("02_tiled")
    out, lse = good.forward(q, k, v)
    calls = {
        True: lambda: chapter.backward(q, k, v, out, inputs.dout, lse),
        False: lambda: chapter.forward(q, k, v),
    }
    with pytest.raises(RuntimeError, match=expected):
        calls[chapter.has_backward]()
    assert_still_works(good)


def test_a_kernel_without_the_pass_is_an_error() -> None:
    """B19, its kind: asking a forward-only chapter for gradients says so."""
    forward_only = loaded("00_forward")
    assert not forward_only.has_backward
    inputs = draw(1, 1, 8, chapter=forward_only)
    out, lse = forward_only.forward(inputs.q, inputs.k, inputs.v)
    with pytest.raises(NotImplementedError, match="00_forward"):
        forward_only.backward(inputs.q, inputs.k, inputs.v, out, inputs.dout, lse)


def test_results_do_not_depend_on_what_memory_held_before(reproducible_chapter: Chapter) -> None:
    """B21: outputs and workspace may hold anything at the start; results have the same bits every time."""
    chapter = reproducible_chapter
    inputs = draw(1, 2, 45, chapter=chapter, dtype=BF16)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    deterministic = same_bits(chapter)
    first = run(chapter, *tensors, deterministic=deterministic)
    for fill in (0.0, math.nan, 1e4):
        dirt = [torch.full((n,), fill, dtype=inputs.q.dtype) for n in (2**10, 2**13, 2**16, 2**20)]
        del dirt
        again = run(chapter, *tensors, deterministic=deterministic)
        assert all(
            equal_bits(getattr(first, name), getattr(again, name))
            for name in ("out", "lse", "dq", "dk", "dv")
        )


def test_a_failing_call_does_not_leave_a_file_behind(chapter: Chapter, tmp_path: Path) -> None:
    """B30, its kind: arguments are refused before anything is built."""
    copy = tmp_path / "never_built.cu"
    shutil.copy(chapter.info.kernel, copy)
    fresh = load_kernel(copy)
    with pytest.raises(TypeError, match="dtype"):
        fresh.forward(*(torch.zeros(1, 1, 8, 64, dtype=torch.float64),) * 3)
    assert not list(jit.build_root().glob("fa2_never_built*"))


def test_an_odd_stride_that_nothing_uses(chapter: Chapter) -> None:
    """The stride of an axis of length 1 may be any number, also where several elements are loaded at once."""
    inputs = draw(1, 2, 20, chapter=chapter)
    odd = [x.as_strided(x.shape, (x.stride(0) + 1, *x.stride()[1:])) for x in vars(inputs).values()]
    assert all(x.stride(0) % 2 == 1 for x in odd)
    run_and_check(chapter, Inputs(*odd))
