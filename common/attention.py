"""``flash_attention``: the chapters as one differentiable PyTorch operator."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad

from common import jit, validation
from common.chapters import CHAPTERS, Chapter, ChapterInfo, list_chapters, open_chapter

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    deterministic: bool = False,
    chapter: Chapter | str | int | None = None,
    verbose: bool = False,
) -> Tensor:
    """softmax(softmax_scale · Q Kᵀ) V, differentiable once with respect to q, k and v.

    Saves q, k, v, the output and one float32 per row (lse) for backward; the gradients come from the
    chapter's kernel (FlashAttention-2, algorithm 2).

    Args:
        q: [B, H, Nq, d]; k, v: [B, H, Nk, d]; float32, float16 or bfloat16, one dtype, any strides. Under
            autocast nothing is cast: the dtype of the tensors is the dtype of the computation.
        softmax_scale: any finite number; 1/√d by default. Scores are fp32: where one times the scale is
            beyond some 10⁵, the P that backward recomputes is off by more than 16 bits can tell.
        is_causal: query i sees keys j <= i + Nk - Nq (the mask is aligned bottom-right).
        deterministic: ask for the same bits on every run. Also on under
            ``torch.use_deterministic_algorithms(True)``.
        chapter: which chapter computes: a loaded ``Chapter``, a name, a number. By default the last one in
            ``chapters/`` that takes the tensors' dtype, head_dim and GPU: of this repository's, the fastest.
        verbose: print which chapter that is.

    Returns:
        [B, H, Nq, d], dense, in q's dtype. Rows that see no key are 0.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message names it.
        RuntimeError: on a second differentiation, or when a kernel fails. BuildError: it does not compile.
    """
    validation.check_tensors(q=q, k=k, v=v)
    # The operator would take True for a scale of 1.0, and tell of its C++ types where one is wrong.
    validation.check_flags(is_causal=is_causal, deterministic=deterministic)
    if softmax_scale is not None and not torch.compiler.is_compiling():
        softmax_scale = validation.default_scale(softmax_scale, q.shape[3])
    if torch._C._are_functorch_transforms_active() or (
        forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in (q, k, v))
    ):
        raise RuntimeError(
            "flash_attention supports autograd (backward, torch.autograd.grad) and torch.compile, but no "
            "transform of torch.func (grad, vmap, jvp ...) and no forward-mode derivatives"
        )
    key = chapter.key if isinstance(chapter, Chapter) else "" if chapter is None else str(chapter)
    if verbose:
        print(f"flash_attention: {_resolve(key, q).name} on {q.device}")
    return torch.ops.fa2_backward.attention(q, k, v, softmax_scale, is_causal, deterministic, key)[0]


def _has_tangent(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None


def default_chapter(dtype: torch.dtype, head_dim: int, device: torch.device) -> ChapterInfo:
    """The last chapter that takes such tensors; if none does, the last of those that take the most dtypes."""
    capability = jit.compute_capability(device) if device.type == "cuda" else None
    return _default_chapter(dtype, head_dim, capability, CHAPTERS.stat().st_mtime_ns)


# Each call of flash_attention asks twice, and reading all of chapter.toml takes longer than many a kernel.
# ``folder_changed`` tells whether a chapter has come or gone.
@functools.cache
def _default_chapter(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None, folder_changed: int
) -> ChapterInfo:
    infos = list_chapters()[::-1]
    for info in infos:
        can_run = capability is None or info.runs_on(capability)
        if dtype in info.dtypes and head_dim in info.head_dims and can_run:
            return info
    return max(infos, key=lambda info: len(info.dtypes))


def _resolve(key: str, q: Tensor) -> Chapter:
    return open_chapter(key or default_chapter(q.dtype, q.shape[-1], q.device).name)


# Not custom_op(): what that checks after every call takes half a millisecond in PyTorch 2.11.
# Not torch.compiler.disable: it imports the compiler at once, for a second, _disable_dynamo only at a call.
torch.library.define(
    "fa2_backward::attention",
    "(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool is_causal, bool deterministic, str chapter)"
    " -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "fa2_backward::attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout, Tensor lse, float? softmax_scale, "
    "bool is_causal, bool deterministic, str chapter) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("fa2_backward::attention", "CompositeExplicitAutograd")
@torch._disable_dynamo
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    is_causal: bool,
    deterministic: bool,
    chapter: str,
) -> tuple[Tensor, Tensor]:
    loaded = _resolve(chapter, q)
    # Backward would raise this too, but only after a forward pass spent for nothing.
    _deterministic(loaded, deterministic)
    return loaded.forward(q, k, v, softmax_scale=softmax_scale, is_causal=is_causal)


@torch.library.register_fake("fa2_backward::attention")
def _(q, k, v, softmax_scale, is_causal, deterministic, chapter):  # noqa: ANN001, ANN202
    validation.check_qkv(q, k, v, _DTYPES)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl("fa2_backward::attention_backward", "CompositeExplicitAutograd")
@torch._disable_dynamo
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    is_causal: bool,
    deterministic: bool,
    chapter: str,
) -> tuple[Tensor, Tensor, Tensor]:
    loaded = _resolve(chapter, q)
    return loaded.backward(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=softmax_scale,
        is_causal=is_causal,
        deterministic=_deterministic(loaded, deterministic),
    )


@torch.library.register_fake("fa2_backward::attention_backward")
def _(q, k, v, out, dout, lse, softmax_scale, is_causal, deterministic, chapter):  # noqa: ANN001, ANN202
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


def _deterministic(chapter: Chapter, asked: bool) -> bool:
    chapter.check_deterministic(asked)
    if not torch.are_deterministic_algorithms_enabled():
        return asked
    if chapter.info.deterministic == "never":
        message = f"{chapter.name} has no deterministic backward pass, and PyTorch was told to use only such"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        torch.warnings.warn(message, stacklevel=2)
        return False
    return True


def _setup_context(ctx, inputs, output):  # noqa: ANN001, ANN202
    q, k, v, ctx.softmax_scale, ctx.is_causal, ctx.deterministic, ctx.chapter = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)


def _backward(ctx, dout, dlse):  # noqa: ANN001, ANN202
    q, k, v, out, lse = ctx.saved_tensors
    gradients = torch.ops.fa2_backward.attention_backward(
        q, k, v, out, dout, lse, ctx.softmax_scale, ctx.is_causal, ctx.deterministic, ctx.chapter
    )
    wanted = (
        gradient if needed else None
        for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
    )
    return (*wanted, None, None, None, None)


def _no_second_derivative(ctx, *gradients):  # noqa: ANN001, ANN002, ANN202
    raise RuntimeError("flash_attention is differentiable once; its gradients cannot be differentiated again")


torch.library.register_autograd("fa2_backward::attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("fa2_backward::attention_backward", _no_second_derivative)
