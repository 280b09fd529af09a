"""Inputs that broke other implementations, I: lengths, masks, scales, extreme and non-finite numbers."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    BF16,
    BUILDS,
    FP16,
    FP32,
    USUAL_HEAD_DIM,
    assert_correct,
    assert_gradients_correct,
    assert_same_bits,
    assert_still_works,
    backward_chapters,
    draw,
    either_right_or,
    loaded,
    nearest_build,
    reproducible,
    run,
    run_and_check,
    same_bits,
    widest_dtype,
)

from common import Chapter
from common.inputs import Inputs
from common.reference import Gradients, explicit_gradients, reference_gradients, visible_mask

CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
EPS32 = torch.finfo(FP32).eps


def directional_derivative(inputs: Inputs, direction: Inputs, step: float, **options: object) -> float:
    """d(loss)/d(step) of loss = <O, dO> along a direction of q, k, v: a central difference in float64."""

    def loss(t: float) -> float:
        moved = [
            x.double() + t * d.double()
            for x, d in ((inputs.q, direction.q), (inputs.k, direction.k), (inputs.v, direction.v))
        ]
        out = explicit_gradients(*moved, inputs.dout.double(), **options).out
        return (out * inputs.dout.double()).sum().item()

    return (loss(step) - loss(-step)) / (2 * step)


# ---------------------------------------------------------------- lengths


@CAUSAL
@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67, 129, 131])
def test_any_length_in_every_gradient(chapter: Chapter, seqlen: int, is_causal: bool) -> None:
    """B02, backward too: a length below, at and above every tile size."""
    run_and_check(chapter, draw(1, 2, seqlen, chapter=chapter), is_causal=is_causal)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        pytest.param(*build, marks=() if build in USUAL_HEAD_DIM.items() else pytest.mark.slow)
        for build in BUILDS
    ],
)
def test_every_build_is_within_budget(chapter: Chapter, dtype: torch.dtype, head_dim: int) -> None:
    """Ragged, Nq ≠ Nk, both masks, in each dtype and head_dim that the other tests rely on."""
    if nearest_build(chapter, dtype, head_dim) != (dtype, head_dim):
        pytest.skip(f"{chapter.name} does not support it")
    inputs = draw(2, 3, 70, 101, chapter=chapter, dtype=dtype, head_dim=head_dim)
    for is_causal in (False, True):
        run_and_check(chapter, inputs, is_causal=is_causal)


@CAUSAL
@pytest.mark.parametrize(
    "seqlen",
    [1, 31, 32, 33, 63, 65, 67, 131, 1025, pytest.param(4250, marks=pytest.mark.slow)],
)
def test_no_padded_key_dilutes_the_output(forward_chapter: Chapter, seqlen: int, is_causal: bool) -> None:
    """B02: with V = 1 every output is 1, whatever the length; a padded key would pull it towards 0."""
    inputs = draw(1, 1, seqlen, chapter=forward_chapter)
    ones = torch.ones_like(inputs.v)
    out, lse = forward_chapter.forward(inputs.q, inputs.k, ones, is_causal=is_causal)
    # Two sums of seqlen probabilities, each with a rounding error per term at most.
    tolerance = (4 + seqlen**0.5) * EPS32
    assert (out.double() - 1).abs().max() <= max(tolerance, torch.finfo(out.dtype).eps)
    zeros = torch.zeros_like(inputs.q)
    result = Gradients(out, lse, zeros, zeros, zeros)
    wrong = [
        c
        for c in _compare_forward(result, Inputs(inputs.q, inputs.k, ones, inputs.dout), is_causal=is_causal)
        if not c.ok
    ]
    assert not wrong, "\n".join(str(c) for c in wrong)


def _compare_forward(result: Gradients, inputs: Inputs, **options: object) -> list:
    from common import compare

    comparisons = compare(result, inputs.q, inputs.k, inputs.v, inputs.dout, **options)
    return [c for c in comparisons if c.name in ("out", "lse")]


def test_forward_returns_row_maximum_and_sum_on_request(forward_chapter: Chapter) -> None:
    """m and l are what lse is made of: m is the largest scaled score, l = exp(lse − m)."""
    inputs = draw(2, 2, 37, 70, chapter=forward_chapter)
    options = {"is_causal": True, "softmax_scale": 0.3}
    out, lse, row_max, row_sum = forward_chapter.forward(
        inputs.q, inputs.k, inputs.v, return_row_stats=True, **options
    )
    plain = forward_chapter.forward(inputs.q, inputs.k, inputs.v, **options)
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])
    scores = 0.3 * inputs.q.double() @ inputs.k.double().transpose(-1, -2)
    scores = scores.masked_fill(~visible_mask(37, 70, True), -torch.inf)
    torch.testing.assert_close(row_max.double(), scores.amax(-1), rtol=1e-5, atol=1e-5)
    expected = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1)
    torch.testing.assert_close(row_sum.double(), expected, rtol=2e-5, atol=0)


# ---------------------------------------------------------------- causal masks


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(2, 5), (5, 2), (1, 8), (31, 61), (67, 31), (57, 64)]
    + [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((31, 67), (63, 70), (131, 97))],
)
def test_causal_mask_is_aligned_bottom_right(chapter: Chapter, seqlen_q: int, seqlen_k: int) -> None:
    """B08: forward, backward, lse and reference agree on which keys a query sees."""
    head_dim = nearest_build(chapter, FP32, 64 if seqlen_k <= 64 else 128)[1]
    inputs = draw(1, 1, seqlen_q, seqlen_k, chapter=chapter, head_dim=head_dim)
    visible = visible_mask(seqlen_q, seqlen_k, True)
    assert visible[-1].all()
    if head_dim >= seqlen_k:  # one-hot values: O holds the probabilities themselves
        one_hot = torch.zeros_like(inputs.v)
        one_hot[0, 0, range(seqlen_k), range(seqlen_k)] = 1
        inputs = Inputs(inputs.q, inputs.k, one_hot, inputs.dout)
        out, _ = chapter.forward(inputs.q, inputs.k, inputs.v, is_causal=True)
        assert torch.equal(out[0, 0, :, :seqlen_k] != 0, visible)
    result = run_and_check(chapter, inputs, is_causal=True)
    for row in {0, seqlen_q // 2, seqlen_q - 1}:
        dout = torch.zeros_like(inputs.dout)
        dout[0, 0, row] = inputs.dout[0, 0, row]
        _, dk, dv = chapter.backward(
            inputs.q, inputs.k, inputs.v, result.out, dout, result.lse, is_causal=True
        )
        assert torch.equal(dv[0, 0].ne(0).any(-1), visible[row]), f"dv of row {row}"
        # dK of a row that sees one key is zero: its probability is 1 whatever the score.
        if visible[row].sum() > 1:
            assert torch.equal(dk[0, 0].ne(0).any(-1), visible[row]), f"dk of row {row}"


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (70, 33), (97, 1)])
def test_rows_that_see_no_key_are_zero(chapter: Chapter, seqlen_q: int, seqlen_k: int) -> None:
    """B09: O = 0, lse = −inf, dQ = 0, never NaN; the other rows are right. Whole tiles of such rows too."""
    inputs = draw(1, 2, seqlen_q, seqlen_k, chapter=chapter)
    result = run_and_check(chapter, inputs, is_causal=True)
    empty = seqlen_q - seqlen_k
    assert torch.all(result.out[:, :, :empty] == 0)
    assert torch.all(result.lse[:, :, :empty] == -torch.inf)
    assert torch.all(result.dq[:, :, :empty] == 0)
    assert result.lse[:, :, empty:].isfinite().all()
    assert torch.all(result.out[:, :, empty:].abs().sum(-1) > 0)
    _, _, row_max, row_sum = chapter.forward(
        inputs.q, inputs.k, inputs.v, is_causal=True, return_row_stats=True
    )
    assert torch.all(row_max[:, :, :empty] == -torch.inf)
    assert torch.all(row_sum[:, :, :empty] == 0)


def test_later_tokens_do_not_reach_earlier_rows(chapter: Chapter) -> None:
    """B55 in the kernels: earlier rows keep their bits when the last token changes, and a loss on earlier
    rows gives later keys a gradient of exactly 0.
    """
    chapter = reproducible(chapter.name)
    for seqlen in (9, 65):
        inputs = draw(1, 2, seqlen, chapter=chapter)
        changed = [tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v)]
        for tensor in changed:
            tensor[:, :, -1] += 3
        dout = inputs.dout.clone()
        dout[:, :, -1] = 0
        options = {"is_causal": True, "deterministic": same_bits(chapter)}
        before = run(chapter, inputs.q, inputs.k, inputs.v, dout, **options)
        after = run(chapter, *changed, dout, **options)
        for name in ("out", "lse", "dq"):
            earlier = [getattr(result, name)[:, :, :-1] for result in (before, after)]
            assert torch.equal(*earlier), name
        for result in (before, after):
            assert torch.all(result.dk[:, :, -1] == 0)
            assert torch.all(result.dv[:, :, -1] == 0)
        assert torch.equal(before.dk[:, :, :-1], after.dk[:, :, :-1])
        assert torch.equal(before.dv[:, :, :-1], after.dv[:, :, :-1])


# ---------------------------------------------------------------- options and scales


@CAUSAL
@pytest.mark.parametrize("softmax_scale", [None, 0.3, 1.3])
def test_options_reach_the_backward_pass(
    chapter: Chapter, softmax_scale: float | None, is_causal: bool
) -> None:
    """B11: the gradient is the slope of the forward pass with the same options."""
    options = {"softmax_scale": softmax_scale, "is_causal": is_causal}
    inputs = draw(1, 1, 128, chapter=chapter)
    result = run_and_check(chapter, inputs, **options)
    direction = draw(1, 1, 128, chapter=chapter, seed=1)
    pairs = ((result.dq, direction.q), (result.dk, direction.k), (result.dv, direction.v))
    slope = sum((gradient.double() * d.double()).sum().item() for gradient, d in pairs)
    size = sum((gradient.norm() * d.norm()).item() for gradient, d in pairs)
    expected = directional_derivative(inputs, direction, 1e-5, **options)
    error = 1e-5 if result.dq.dtype == FP32 else 1e-2
    assert abs(slope - expected) <= error * size


@pytest.mark.parametrize("softmax_scale", [-0.25, -3.0, 1e-3, 1, 1.0, 8.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_any_finite_scale(chapter: Chapter, softmax_scale: float, dtype: torch.dtype) -> None:
    """B17: negative, tiny, large, and an int."""
    head_dim = 16 if dtype == FP32 else None
    inputs = draw(1, 2, 33, 40, chapter=chapter, dtype=dtype, head_dim=head_dim)
    for is_causal in (False, True):
        result = run_and_check(chapter, inputs, softmax_scale=softmax_scale, is_causal=is_causal)
        assert all(g.isfinite().all() for g in (result.out, result.lse, result.dq, result.dk, result.dv))


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_scale_zero_is_not_the_default(chapter: Chapter, zero: float) -> None:
    """B17: softmax_scale = 0 averages V, and the scores have no gradient."""
    inputs = draw(1, 2, 33, chapter=chapter)
    result = run_and_check(chapter, inputs, softmax_scale=zero)
    assert torch.all(result.dq == 0)
    assert torch.all(result.dk == 0)
    torch.testing.assert_close(result.lse, torch.full_like(result.lse, math.log(33)), rtol=2 * EPS32, atol=0)


@pytest.mark.parametrize(
    ("softmax_scale", "error"),
    [(math.nan, ValueError), (math.inf, ValueError), (-math.inf, ValueError), (True, TypeError),
     ("1", TypeError), (torch.tensor(0.3), TypeError)],
    ids=str,
)  # fmt: skip
def test_impossible_scales_are_refused(
    chapter: Chapter, softmax_scale: object, error: type[Exception]
) -> None:
    """B17: NaN and infinity are an error that names the argument, in forward and in backward."""
    inputs = draw(1, 1, 5, chapter=chapter)
    q, k, v = inputs.q, inputs.k, inputs.v
    with pytest.raises(error, match="softmax_scale"):
        chapter.forward(q, k, v, softmax_scale=softmax_scale)
    out, lse = chapter.forward(q, k, v)
    with pytest.raises(error, match="softmax_scale"):
        chapter.backward(q, k, v, out, inputs.dout, lse, softmax_scale=softmax_scale)
    assert_still_works(chapter)


def test_a_scale_beyond_float32_is_refused_or_right(chapter: Chapter) -> None:
    """B17, its kind: finite as a Python float, infinite or zero once a kernel has rounded it to fp32."""
    inputs = draw(1, 1, 5, chapter=chapter)
    zeros = torch.zeros_like(inputs.q)
    for softmax_scale in (1e39, -1e39):
        result = either_right_or(
            ValueError,
            "softmax_scale",
            lambda scale=softmax_scale: chapter.forward(zeros, inputs.k, inputs.v, softmax_scale=scale),
        )
        if result is not None:
            out, lse = result
            mean = inputs.v.double().mean(2, keepdim=True).expand_as(out)
            torch.testing.assert_close(out.double(), mean, rtol=1e-2, atol=1e-5)
            assert lse.isfinite().all()


# ---------------------------------------------------------------- lse


def test_lse_is_the_natural_logarithm_and_has_no_padding(forward_chapter: Chapter) -> None:
    """B25: not base 2, not without the maximum, shape [B, H, Nq] exactly."""
    dtype, head_dim = nearest_build(forward_chapter, FP32, 64)
    q = torch.zeros(2, 3, 65, head_dim, dtype=dtype)
    k = torch.randn(2, 3, 5, head_dim).to(dtype)
    _, lse = forward_chapter.forward(q, k, k)
    assert lse.shape == (2, 3, 65)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(5)), rtol=2 * EPS32, atol=0)


def test_lse_includes_the_maximum_and_the_scale(forward_chapter: Chapter) -> None:
    """B25: of the scaled scores, with the maximum added back."""
    dtype, head_dim = nearest_build(forward_chapter, FP32, 64)
    q, k = (torch.ones(1, 1, n, head_dim, dtype=dtype) for n in (3, 7))
    for softmax_scale in (0.5, 2.0, -1.0):
        _, lse = forward_chapter.forward(q, k, k, softmax_scale=softmax_scale)
        expected = softmax_scale * head_dim + math.log(7)
        torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=4 * EPS32, atol=0)


# ---------------------------------------------------------------- extreme and non-finite numbers


@CAUSAL
@pytest.mark.parametrize(("dtype", "size"), [(FP32, 5), (FP16, 5), (BF16, 5), (FP32, 112), (BF16, 112)])
def test_all_scores_far_below_zero(
    chapter: Chapter, dtype: torch.dtype, size: float, is_causal: bool
) -> None:
    """B13: scores of −200 and −100352 (head_dim 64): exponentials underflow unless the maximum is taken out.

    Neither a finite start of the running maximum nor a padded key, whose score would be 0, may take part.
    """
    dtype, head_dim = nearest_build(chapter, dtype, USUAL_HEAD_DIM[dtype])
    n = 65
    q = torch.full((1, 1, n, head_dim), float(size), dtype=dtype)
    v = torch.ones_like(q)
    dout = draw(1, 1, n, chapter=chapter, dtype=dtype, head_dim=head_dim).dout
    score = -size * size * head_dim**0.5
    num_keys = torch.arange(1, n + 1) if is_causal else torch.full((n,), n)
    result = run(chapter, q, -q, v, dout, is_causal=is_causal)
    unit = torch.finfo(dtype).eps
    assert (result.out.double() - 1).abs().max() <= max(unit, 8 * EPS32)
    # lse is rounded to fp32, and so is the score it contains.
    expected = score + num_keys.double().log()
    assert (result.lse[0, 0].double() - expected).abs().max() <= 2 * EPS32 * abs(score)
    if dtype != FP32 and size == 5:
        assert_correct(result, Inputs(q, -q, v, dout), is_causal=is_causal)
        return
    # P = exp(S − lse) inherits what rounding lse to fp32 loses, 2⁻⁸ of 1 at −100352, and here every row
    # loses the same, so that nothing averages out.
    p_error = 2 * EPS32 * abs(score)
    truth = reference_gradients(q, -q, v, dout, is_causal=is_causal)
    error = (result.dv.double() - truth.dv).norm() / truth.dv.norm()
    assert error <= p_error + 2 * unit
    # dP − delta cancels to 0 in exact arithmetic; what is left is rounding, of terms this large.
    probabilities = (visible_mask(n, n, is_causal) / num_keys[:, None]).double()
    dp = dout.double().abs().sum(-1, keepdim=True)  # a row's dP: the sum of its dO
    term = (p_error + 4 * unit) * (probabilities * dp[0, 0]).norm() * size * head_dim**0.5 * n**0.5
    for gradient in (result.dq, result.dk):
        assert gradient.isfinite().all()
        assert gradient.double().norm() <= term


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("seqlen", [9, 33, 65])
def test_bad_last_key_is_invisible_to_earlier_rows(forward_chapter: Chapter, seqlen: int, bad: float) -> None:
    """B16 (i): the mask selects, it does not add: earlier rows of O and lse are finite and right."""
    inputs = draw(1, 2, seqlen, chapter=forward_chapter)
    k = inputs.k.clone()
    k[:, :, -1] = bad
    out, lse = forward_chapter.forward(inputs.q, k, inputs.v, is_causal=True)
    clean_out, clean_lse = forward_chapter.forward(inputs.q, inputs.k, inputs.v, is_causal=True)
    assert torch.equal(out[:, :, :-1], clean_out[:, :, :-1])
    assert torch.equal(lse[:, :, :-1], clean_lse[:, :, :-1])
    if math.isnan(bad):
        assert out[:, :, -1].isnan().all()
        assert lse[:, :, -1].isnan().all()


@pytest.mark.parametrize("seqlen", [9, 33, 65])
def test_nan_in_the_last_value(forward_chapter: Chapter, seqlen: int) -> None:
    """B16 (ii): a row is right, or NaN as in a plain softmax·V, where 0 · NaN is NaN; the last row is NaN."""
    inputs = draw(1, 2, seqlen, chapter=forward_chapter)
    v = inputs.v.clone()
    v[:, :, -1] = torch.nan
    out, lse = forward_chapter.forward(inputs.q, inputs.k, v, is_causal=True)
    clean_out, clean_lse = forward_chapter.forward(inputs.q, inputs.k, inputs.v, is_causal=True)
    assert torch.equal(lse, clean_lse)
    earlier, clean = out[:, :, :-1], clean_out[:, :, :-1]
    assert torch.all(earlier.isnan() | (earlier == clean))
    assert out[:, :, -1].isnan().all()


@CAUSAL
@pytest.mark.parametrize(("seqlen", "row"), [(9, 4), (33, 0), (33, 32), (65, 40)])
def test_nan_in_one_query_stays_in_its_row(chapter: Chapter, seqlen: int, row: int, is_causal: bool) -> None:
    """B16 (iii): only that row of O, lse and dQ is NaN, and it is NaN: a maximum must not swallow it."""
    inputs = draw(1, 2, seqlen, chapter=chapter)
    q = inputs.q.clone()
    q[:, :, row] = torch.nan
    result = run(chapter, q, inputs.k, inputs.v, inputs.dout, is_causal=is_causal)
    is_row = torch.arange(seqlen) == row
    for tensor in (result.out, result.dq):
        assert torch.equal(tensor.isnan().all(-1)[0, 0], is_row)
        assert torch.equal(tensor.isnan().any(-1)[0, 0], is_row)
    assert torch.equal(result.lse.isnan()[0, 0], is_row)
    # Its keys' gradients contain it, so hiding it there would be wrong as well.
    assert result.dk[0, 0, 0].isnan().all()
    assert result.dv[0, 0, 0].isnan().all()


@CAUSAL
def test_nan_in_dout_is_seen(chapter: Chapter, is_causal: bool) -> None:
    """B16, its kind: NaN in dO makes that row's dQ NaN, and no other row's."""
    inputs = draw(1, 2, 41, chapter=chapter)
    dout = inputs.dout.clone()
    dout[:, :, 35] = torch.nan
    result = run(chapter, inputs.q, inputs.k, inputs.v, dout, is_causal=is_causal)
    is_row = torch.arange(41) == 35
    assert torch.equal(result.dq.isnan().all(-1)[0, 0], is_row)
    assert torch.equal(result.dq.isnan().any(-1)[0, 0], is_row)
    assert result.dv[0, 0, 0].isnan().all()


@CAUSAL
@pytest.mark.parametrize("positive_queries", [False, True])
def test_key_of_minus_infinity(forward_chapter: Chapter, positive_queries: bool, is_causal: bool) -> None:
    """B16 (iv): NaN where the reference has NaN, right elsewhere; a score of −inf is a probability of 0."""
    inputs = draw(1, 1, 37, chapter=forward_chapter)
    q, k = inputs.q.abs() + 0.1 if positive_queries else inputs.q, inputs.k.clone()
    k[:, :, 3] = -torch.inf
    out, lse = forward_chapter.forward(q, k, inputs.v, is_causal=is_causal)
    truth = reference_gradients(q, k, inputs.v, inputs.dout, is_causal=is_causal)
    for value, expected in ((out, truth.out), (lse, truth.lse)):
        assert torch.equal(value.isnan(), expected.isnan())
        finite = expected.isfinite()
        torch.testing.assert_close(
            value[finite].double(), expected[finite], rtol=2e-5, atol=2 * torch.finfo(out.dtype).eps
        )
    assert not positive_queries or out.isfinite().all()


# ---------------------------------------------------------------- the same bits


def test_deterministic_results_have_the_same_bits(chapter: Chapter) -> None:
    """B31: "always" and "flag" chapters repeat every bit whatever the blocks' order; "never" ones refuse."""
    inputs = draw(2, 2, 70, 150, chapter=chapter, dtype=BF16)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    if chapter.info.deterministic == "never":
        with pytest.raises(ValueError, match="deterministic"):
            run(chapter, *tensors, deterministic=True)
        return
    from helpers import loaded

    first = run(chapter, *tensors, is_causal=True, deterministic=True)
    assert_correct(first, inputs, is_causal=True)
    for schedule in (None, None, "in_order", 1, 2, 3):
        again = run(
            loaded(chapter.name, schedule),
            *(tensor.clone() for tensor in tensors),
            is_causal=True,
            deterministic=True,
        )
        assert_same_bits(first, again)


def test_reproducible_schedules_repeat_every_bit(chapter: Chapter) -> None:
    """B31 on the CPU device: one schedule, one result, deterministic chapter or not."""
    from helpers import loaded

    inputs = draw(1, 2, 70, 150, chapter=chapter, dtype=BF16)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    for schedule in ("in_order", 7):
        scheduled = loaded(chapter.name, schedule)
        assert_same_bits(run(scheduled, *tensors), run(scheduled, *tensors))


# ---------------------------------------------------------------- what else is there


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_from_sdpas_forward(chapter: Chapter, is_causal: bool) -> None:
    """out and lse of PyTorch's FLASH forward serve as well as our own."""
    inputs = draw(2, 3, 70, chapter=chapter, dtype=widest_dtype(chapter))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        inputs.q, inputs.k, inputs.v, 0.0, is_causal
    )
    assert_gradients_correct(chapter, inputs, out, lse, is_causal=is_causal)


@pytest.mark.slow
def test_chapters_share_a_process() -> None:
    """Kernels of the same name in different chapters do not take each other's place."""
    chapters = [loaded(info.name) for info in backward_chapters()]
    inputs = [draw(1, 2, 70, chapter=c, head_dim=128, dtype=widest_dtype(c)) for c in chapters]
    results = [run_and_check(c, x, is_causal=True) for c, x in zip(chapters, inputs, strict=True)]
    for c, x, before in reversed(list(zip(chapters, inputs, results, strict=True))):
        again = run_and_check(c, x, is_causal=True)
        assert_same_bits(again, before, ("out", "lse", "dk", "dv"))  # dq: in the order of the additions
