"""Inputs that broke other implementations, III: ``flash_attention`` as an operator of PyTorch."""

from __future__ import annotations

import itertools
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from helpers import (
    BF16,
    FP16,
    FP32,
    assert_correct,
    assert_still_works,
    axes_swapped,
    draw,
    loaded,
    run,
    same_bits,
    widest_dtype,
)
from torch import Tensor

from common import Chapter, flash_attention, load_chapter, load_kernel
from common.inputs import Inputs
from common.reference import Gradients


def leaves_of(inputs: Inputs) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]


def check_gradients_through_autograd(chapter: Chapter, dtype: torch.dtype, *, is_causal: bool) -> None:
    inputs = draw(2, 2, 37, 50, chapter=chapter, dtype=dtype)
    options = {"softmax_scale": 0.3, "is_causal": is_causal}
    leaves = leaves_of(inputs)
    out = flash_attention(*leaves, chapter=chapter, deterministic=same_bits(chapter), **options)
    out.backward(inputs.dout)
    direct = run(
        chapter, inputs.q, inputs.k, inputs.v, inputs.dout, deterministic=same_bits(chapter), **options
    )
    assert_correct(direct, inputs, **options)
    assert torch.equal(out, direct.out)
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        assert torch.equal(leaf.grad, getattr(direct, name)), name


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_through_autograd_of_every_chapter(every_chapter: Chapter, is_causal: bool) -> None:
    """B11: autograd gets what the methods compute, with the same options, and both are right."""
    check_gradients_through_autograd(every_chapter, widest_dtype(every_chapter), is_causal=is_causal)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_through_autograd(
    reproducible_chapter: Chapter, dtype: torch.dtype, is_causal: bool
) -> None:
    """The same in every dtype."""
    check_gradients_through_autograd(reproducible_chapter, dtype, is_causal=is_causal)


def test_gradients_accumulate_and_the_graph_is_freed(reproducible_chapter: Chapter) -> None:
    """B11, its kind: two backward passes of a retained graph add up; a third without one is refused."""
    chapter = reproducible_chapter
    inputs = draw(1, 2, 20, chapter=chapter)
    leaves = leaves_of(inputs)
    out = flash_attention(*leaves, chapter=chapter, deterministic=same_bits(chapter))
    out.backward(inputs.dout, retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    out.backward(inputs.dout)
    for leaf, gradient in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(inputs.dout)


def test_an_input_changed_in_place_is_noticed(chapter: Chapter) -> None:
    """B11, its kind: what backward needs is saved, so PyTorch refuses to use it after a change."""
    q, k, v = leaves_of(draw(1, 1, 8, chapter=chapter))
    scaled = q * 1.0
    out = flash_attention(scaled, k, v, chapter=chapter)
    scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_lse_never_drops_a_gradient_silently(chapter: Chapter) -> None:
    """B12: the operator's lse has no gradient, so a loss made of it alone raises."""
    q, k, v = leaves_of(draw(1, 1, 8, chapter=chapter))
    out, lse = torch.ops.fa2_backward.attention(q, k, v, None, False, False, chapter.key)
    assert out.requires_grad
    assert not lse.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.mean().backward()
    (out.sum() + lse.sum()).backward()
    alone = leaves_of(Inputs(q.detach(), k.detach(), v.detach(), q.detach()))
    flash_attention(*alone, chapter=chapter).sum().backward()
    for mixed, plain in zip((q, k, v), alone, strict=True):
        torch.testing.assert_close(mixed.grad, plain.grad)


@pytest.mark.parametrize("wanted", [w for w in itertools.product([False, True], repeat=3) if any(w)])
def test_only_some_inputs_need_gradients(
    reproducible_chapter: Chapter, wanted: tuple[bool, bool, bool]
) -> None:
    """B26: what is asked for equals the full run; what is not asked for is None."""
    chapter = reproducible_chapter
    inputs = draw(1, 2, 20, 33, chapter=chapter)
    deterministic = same_bits(chapter)
    full = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout, deterministic=deterministic)
    leaves = [
        tensor.clone().requires_grad_(need)
        for tensor, need in zip((inputs.q, inputs.k, inputs.v), wanted, strict=True)
    ]
    flash_attention(*leaves, chapter=chapter, deterministic=deterministic).backward(inputs.dout)
    for leaf, need, name in zip(leaves, wanted, ("dq", "dk", "dv"), strict=True):
        if need:
            assert torch.equal(leaf.grad, getattr(full, name)), name
        else:
            assert leaf.grad is None


def test_no_graph_is_kept_when_none_is_needed(chapter: Chapter) -> None:
    """B26: inputs without gradients, no_grad and inference_mode."""
    inputs = draw(1, 2, 20, chapter=chapter)
    out = flash_attention(inputs.q, inputs.k, inputs.v, chapter=chapter)
    assert out.grad_fn is None
    with torch.no_grad():
        quiet = flash_attention(*leaves_of(inputs), chapter=chapter)
    assert quiet.grad_fn is None
    assert not quiet.requires_grad
    with torch.inference_mode():
        inference = flash_attention(inputs.q, inputs.k, inputs.v, chapter=chapter)
    assert torch.equal(out, quiet)
    assert torch.equal(out, inference)


def test_second_derivatives_are_refused(chapter: Chapter) -> None:
    """B27: a gradient penalty raises instead of training on zeros."""
    q, k, v = leaves_of(draw(1, 1, 8, chapter=chapter))
    out = flash_attention(q, k, v, chapter=chapter)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        dq.square().sum().backward()


def test_autocast_casts_nothing(reproducible_chapter: Chapter) -> None:
    """B28: inside bf16 autocast the tensors' dtype is the dtype of the computation, gradients included."""
    chapter = reproducible_chapter
    inputs = draw(1, 2, 20, chapter=chapter)
    plain = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout, deterministic=same_bits(chapter))
    leaves = leaves_of(inputs)
    with torch.autocast("cpu", dtype=BF16):
        out = flash_attention(*leaves, chapter=chapter, deterministic=same_bits(chapter))
        other = BF16 if inputs.q.dtype != BF16 else FP16
        with pytest.raises(TypeError, match="dtype"):
            flash_attention(inputs.q, inputs.k, inputs.v.to(other), chapter=chapter)
    out.backward(inputs.dout)
    assert out.dtype == inputs.q.dtype
    assert torch.equal(out, plain.out)
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        assert torch.equal(leaf.grad, getattr(plain, name)), name


def test_global_deterministic_mode(chapter: Chapter) -> None:
    """B31: torch.use_deterministic_algorithms reaches the chapter: used, or refused, or warned about."""
    inputs = draw(1, 2, 20, chapter=chapter)
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        if chapter.info.deterministic == "never":
            with pytest.raises(RuntimeError, match="deterministic"):
                flash_attention(*leaves_of(inputs), chapter=chapter)
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match="deterministic"):
                flash_attention(*leaves_of(inputs), chapter=chapter).backward(inputs.dout)
            return
        gradients = []
        for _ in range(2):
            leaves = leaves_of(inputs)
            flash_attention(*leaves, chapter=chapter).backward(inputs.dout)
            gradients.append([leaf.grad for leaf in leaves])
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warn_only)
    leaves = leaves_of(inputs)
    asked = chapter.info.deterministic == "flag"
    flash_attention(*leaves, chapter=chapter, deterministic=asked).backward(inputs.dout)
    for first, second, explicit in zip(*gradients, [leaf.grad for leaf in leaves], strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, explicit)


def test_every_optional_argument_then_backward(chapter: Chapter) -> None:
    """B44: one gradient per input of the operator, whether its options came by keyword or by position."""
    inputs = draw(1, 2, 20, 30, chapter=chapter)
    never = chapter.info.deterministic == "never"
    by_keyword = leaves_of(inputs)
    flash_attention(
        *by_keyword, softmax_scale=0.3, is_causal=True, deterministic=not never, chapter=chapter
    ).backward(inputs.dout)
    by_position = leaves_of(inputs)
    operator = torch.ops.fa2_backward.attention
    operator(*by_position, 0.3, True, not never, chapter.key)[0].backward(inputs.dout)
    gradients = [leaf.grad for leaf in by_keyword]
    out, lse = chapter.forward(inputs.q, inputs.k, inputs.v, softmax_scale=0.3, is_causal=True)
    assert_correct(Gradients(out, lse, *gradients), inputs, softmax_scale=0.3, is_causal=True)
    assert_correct(
        Gradients(out, lse, *(leaf.grad for leaf in by_position)), inputs, softmax_scale=0.3, is_causal=True
    )


@pytest.mark.parametrize("how", ["object", "name", "number", "digits"])
def test_a_chapter_is_named_in_any_way(chapter: Chapter, how: str) -> None:
    """B44, its kind: a loaded chapter, a name, a number, and the number as text."""
    inputs = draw(1, 1, 9, chapter=chapter)
    names = {
        "object": chapter,
        "name": chapter.name,
        "number": chapter.info.number,
        "digits": str(chapter.info.number),
    }
    out = flash_attention(inputs.q, inputs.k, inputs.v, chapter=names[how])
    assert torch.equal(out, chapter.forward(inputs.q, inputs.k, inputs.v)[0])


def test_a_copy_of_a_chapter_does_not_take_its_place(tmp_path: Path) -> None:
    """A kernel of the same name, loaded later from another folder, is used only where it is asked for."""
    info = load_chapter("02_tiled").info
    shutil.copytree(info.kernel.parent, tmp_path / info.name)
    copy = tmp_path / info.name / "kernel.cu"
    copy.write_text("#error the copy is used\n" + copy.read_text())
    assert load_kernel(copy).name == info.name
    q = torch.randn(1, 1, 9, 16, requires_grad=True)
    flash_attention(q, q, q, chapter=info.name).sum().backward()
    with pytest.raises(RuntimeError, match="the copy is used"):
        flash_attention(q, q, q, chapter=load_kernel(copy)).sum().backward()


def test_an_unknown_chapter_is_refused() -> None:
    """B44, its kind: the message lists the chapters there are."""
    q = torch.zeros(1, 1, 4, 64)
    for name in ("99_nothing", 99):
        with pytest.raises(ValueError, match="02_tiled"):
            flash_attention(q, q, q, chapter=name)


def test_impossible_scales_through_the_operator(chapter: Chapter) -> None:
    """B17: NaN, infinity and a bool are refused by the operator too."""
    q = draw(1, 1, 8, chapter=chapter).q
    for softmax_scale, error in ((float("nan"), ValueError), (float("inf"), ValueError), (True, TypeError)):
        with pytest.raises(error, match="softmax_scale"):
            flash_attention(q, q, q, softmax_scale=softmax_scale, chapter=chapter)
    assert_still_works(chapter)


@pytest.mark.parametrize("layout", ["dense", "swapped", "sliced"])
def test_opcheck(chapter: Chapter, layout: str) -> None:
    """B45: schema, fake tensors (true strides) and autograd registration, by PyTorch's own checker."""
    inputs = draw(2, 3, 9, 17, chapter=chapter, head_dim=64)
    change = {
        "dense": lambda x: x,
        "swapped": axes_swapped,
        "sliced": lambda x: torch.cat([x, x], -1)[..., :64],
    }
    q, k, v = (change[layout](tensor).detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(
            torch.ops.fa2_backward.attention.default,
            (q, k, v, 0.3, True, False, chapter.key),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
        out, lse = chapter.forward(q.detach(), k.detach(), v.detach(), softmax_scale=0.3, is_causal=True)
        saved = (q.detach(), k.detach(), v.detach(), out, change[layout](inputs.dout), lse)
        torch.library.opcheck(
            torch.ops.fa2_backward.attention_backward.default,
            (*saved, 0.3, True, False, chapter.key),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.slow
def test_opcheck_ahead_of_time(chapter: Chapter) -> None:
    """B45: traced with dynamic shapes, forward and backward equal the eager run."""
    inputs = draw(2, 3, 9, 17, chapter=chapter, head_dim=64)
    q, k, v = leaves_of(inputs)
    torch.library.opcheck(
        torch.ops.fa2_backward.attention.default, (axes_swapped(q), k, v, 0.3, True, False, chapter.key)
    )


@pytest.mark.xdist_group("compile")
def test_compiled_equals_eager() -> None:
    """B45: torch.compile(fullgraph=True) with N = 64, then 65 by dynamic shapes, forward and backward."""
    torch._dynamo.reset()
    chapter = loaded("02_tiled")

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (flash_attention(q, k, v, is_causal=True, chapter=chapter) * 2).square().sum()

    # The graph is what can go wrong; generating code for the multiplication would take ten seconds more.
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (64, 65):
        inputs = draw(1, 2, seqlen, chapter=chapter)
        eager, traced = leaves_of(inputs), leaves_of(inputs)
        loss(*eager).backward()
        compiled(*traced).backward()
        for a, b in zip(eager, traced, strict=True):
            assert torch.equal(a.grad, b.grad)


@pytest.mark.slow
@pytest.mark.xdist_group("compile")
def test_compiled_with_inductor_equals_eager(chapter: Chapter) -> None:
    """B45: the default backend, dense and axis-swapped inputs."""
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (flash_attention(q * 1, k * 1, v * 1, is_causal=True, chapter=chapter) * 2).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for seqlen, change in ((64, lambda x: x), (65, lambda x: x), (66, axes_swapped)):
        inputs = draw(1, 2, seqlen, chapter=chapter)
        inputs = Inputs(*(change(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)))
        eager, traced = (
            [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)] for _ in range(2)
        )
        loss(*eager).backward()
        compiled(*traced).backward()
        for a, b in zip(eager, traced, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev"])
def test_functional_transforms_are_refused(chapter: Chapter, transform: str) -> None:
    """B45: torch.func raises an error that names what is supported, never a silent zero."""
    q = draw(1, 1, 8, chapter=chapter).q

    def loss(x: Tensor) -> Tensor:
        return flash_attention(x, x, x, chapter=chapter).sum()

    calls = {
        "grad": lambda: torch.func.grad(loss)(q),
        "vmap": lambda: torch.func.vmap(loss)(q[None]),
        "jvp": lambda: torch.func.jvp(loss, (q,), (q,)),
        "jacrev": lambda: torch.func.jacrev(loss)(q),
    }
    with pytest.raises(RuntimeError, match="flash_attention supports autograd"):
        calls[transform]()
    assert_still_works(chapter)


def test_forward_mode_derivatives_are_refused(chapter: Chapter) -> None:
    """B45: a dual tensor must not lose its tangent without a word."""
    from torch.autograd import forward_ad

    q = draw(1, 1, 8, chapter=chapter).q
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.clone(), torch.ones_like(q))
        with pytest.raises((RuntimeError, NotImplementedError)):
            flash_attention(dual, q, q, chapter=chapter)


def test_gradcheck_by_finite_differences(chapter: Chapter) -> None:
    """B11: PyTorch's gradcheck in the chapter's own precision, its step and tolerance those of fp32."""
    if FP32 not in chapter.info.dtypes:
        pytest.skip(f"{chapter.name} has no fp32")
    leaves = leaves_of(draw(1, 1, 3, 4, chapter=chapter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that fp32 is not fp64
        assert torch.autograd.gradcheck(
            lambda *x: flash_attention(*x, is_causal=True, chapter=chapter),
            leaves,
            eps=1e-2,
            atol=2e-4,
            rtol=1e-2,
            nondet_tol=1e-5,
        )
