"""Inputs that broke other implementations, IV: what only a GPU can show. Skipped where there is none."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import (
    BF16,
    BUILDS,
    FP16,
    FP32,
    REPO,
    assert_correct,
    assert_correct_after_long_sums,
    assert_gradients_correct,
    assert_same_bits,
    assert_still_works,
    draw,
    either_right_or,
    nearest_build,
    run,
    run_and_check,
    same_bits,
    surrounded_by_nan,
    widest_dtype,
)
from torch import Tensor

from common import Chapter, flash_attention, jit, load_chapter
from common.inputs import Inputs, random_inputs
from common.reference import Gradients

pytestmark = pytest.mark.gpu

BUSY = 50_000_000  # clock cycles: some 30 ms in which an unordered launch would overtake


def needs_free_bytes(count: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < count:
        pytest.skip(f"needs {count >> 30} GiB of free GPU memory, {free >> 30} are free")


def repeatable(chapter: Chapter) -> bool:
    return chapter.info.deterministic != "never"


# ---------------------------------------------------------------- the same results as elsewhere


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_gradients_from_sdpas_forward_on_the_gpu(
    chapter: Chapter, dtype: torch.dtype, is_causal: bool
) -> None:
    """out and lse of PyTorch's FLASH forward serve as well as our own."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("PyTorch's FLASH needs compute capability 8.0")
    inputs = draw(2, 3, 200, chapter=chapter, dtype=dtype, head_dim=64, device="cuda")
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        inputs.q, inputs.k, inputs.v, 0.0, is_causal
    )[:2]
    assert_gradients_correct(chapter, inputs, out, lse, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("dtype", "head_dim"), BUILDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (33, 65), (65, 33), (1025, 1025)])
def test_gpu_is_within_budget(
    chapter: Chapter, dtype: torch.dtype, head_dim: int, seqlen_q: int, seqlen_k: int, is_causal: bool
) -> None:
    """B02 on the GPU: whole tensors, every build, ragged lengths."""
    inputs = draw(2, 3, seqlen_q, seqlen_k, chapter=chapter, dtype=dtype, head_dim=head_dim, device="cuda")
    run_and_check(chapter, inputs, is_causal=is_causal)


@pytest.mark.parametrize("gap", [1, 8])
def test_gpu_reads_nothing_around_the_tensors(chapter: Chapter, gap: int) -> None:
    """B01, B21: NaN before, after and between the rows, aligned and not."""
    for dtype, head_dim in ((FP32, 64), (BF16, 72)):
        inputs = draw(2, 2, 70, 97, chapter=chapter, dtype=dtype, head_dim=head_dim, device="cuda")
        tensors = (surrounded_by_nan(t, gap) for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
        run_and_check(chapter, Inputs(*tensors), is_causal=True)


def test_cpu_fallback_gives_cuda_tensors(chapter: Chapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """B49: a GPU the kernel cannot use; with cpu_fallback=True it runs on the CPU device and says so."""
    monkeypatch.setattr(jit, "cuda_problem", lambda: "this test pretends that there is no toolkit")
    inputs = draw(1, 2, 40, chapter=chapter, device="cuda")
    with pytest.raises(RuntimeError, match="cpu_fallback"):
        chapter.forward(inputs.q, inputs.k, inputs.v)
    fallback = load_chapter(chapter.name, cpu_fallback=True)
    with pytest.warns(UserWarning, match="CPU device"):
        result = run(fallback, inputs.q, inputs.k, inputs.v, inputs.dout)
    assert result.dq.device.type == "cuda"
    assert_correct(result, inputs)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("position", range(6))
def test_a_tensor_left_on_the_cpu_is_refused(chapter: Chapter, position: int) -> None:
    """B29: each of q, k, v, out, dout, lse in turn; the process stays usable."""
    inputs = draw(1, 1, 8, chapter=chapter, device="cuda")
    out, lse = chapter.forward(inputs.q, inputs.k, inputs.v)
    tensors = [inputs.q, inputs.k, inputs.v, out, inputs.dout, lse]
    tensors[position] = tensors[position].cpu()
    with pytest.raises(ValueError, match="device"):
        chapter.backward(*tensors)
    if position < 3:
        with pytest.raises((ValueError, RuntimeError), match="device"):
            chapter.forward(*tensors[:3])
        with pytest.raises((ValueError, RuntimeError), match="device"):
            flash_attention(*tensors[:3], chapter=chapter)
    torch.cuda.synchronize()
    run_and_check(chapter, inputs)
    assert_still_works(chapter)


def test_two_gpus(chapter: Chapter) -> None:
    """B29: q on one GPU and k on another is refused; all on the second one runs there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = draw(1, 2, 33, chapter=chapter, device="cuda:0")
    with pytest.raises(ValueError, match="device"):
        chapter.forward(inputs.q, inputs.k.to("cuda:1"), inputs.v)
    second = Inputs(*(t.to("cuda:1") for t in (inputs.q, inputs.k, inputs.v, inputs.dout)))
    result = run_and_check(chapter, second)
    assert result.dq.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


# ---------------------------------------------------------------- streams and repetition


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_thirty_runs_beside_a_busy_stream(chapter: Chapter, dtype: torch.dtype) -> None:
    """B31: the same bits in 30 runs on fresh copies while another stream keeps the GPU busy."""
    inputs = draw(2, 4, 1024, chapter=chapter, dtype=dtype, device="cuda")
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    if not repeatable(chapter):
        with pytest.raises(ValueError, match="deterministic"):
            run(chapter, *tensors, deterministic=True)
        return
    first = run(chapter, *tensors, deterministic=True)
    assert_correct(first, inputs)
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    for _ in range(30):
        with torch.cuda.stream(other):
            noise = (noise @ noise).clamp(-1, 1)
        again = run(chapter, *(t.clone() for t in tensors), deterministic=True)
        assert_same_bits(first, again)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_hundred_runs(chapter: Chapter, head_dim: int, is_causal: bool) -> None:
    """Ragged tiles. In 200 runs never an error beyond rounding, and the same bits if they are asked for."""
    if not repeatable(chapter):
        pytest.skip("adds to dQ in another order each time, and promises no more")
    inputs = draw(4, 8, 777, chapter=chapter, dtype=BF16, head_dim=head_dim, device="cuda")
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)

    def results(**options: object) -> dict[str, Tensor]:
        return vars(run(chapter, *tensors, is_causal=is_causal, **options))

    # Minimum and maximum pass a NaN on, and no run has an element further off than one of the two.
    smallest = largest = results()
    for _ in range(199):
        again = results()
        smallest = {name: torch.minimum(found, again[name]) for name, found in smallest.items()}
        largest = {name: torch.maximum(found, again[name]) for name, found in largest.items()}
    assert_correct(Gradients(**smallest), inputs, is_causal=is_causal)
    assert_correct(Gradients(**largest), inputs, is_causal=is_causal)
    first = results(deterministic=same_bits(chapter))
    assert_correct(Gradients(**first), inputs, is_causal=is_causal)
    for _ in range(199):
        assert_same_bits(Gradients(**first), Gradients(**results(deterministic=same_bits(chapter))))


def test_global_deterministic_mode_on_the_gpu(chapter: Chapter) -> None:
    """B31: with torch.use_deterministic_algorithms the bits repeat, or the chapter refuses."""
    inputs = draw(1, 2, 300, chapter=chapter, dtype=BF16, device="cuda")
    was_enabled = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        results = []
        for _ in range(5):
            leaves = [t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
            if not repeatable(chapter):
                with pytest.raises(RuntimeError, match="deterministic"):
                    flash_attention(*leaves, chapter=chapter)
                return
            flash_attention(*leaves, chapter=chapter).backward(inputs.dout)
            results.append([leaf.grad for leaf in leaves])
        for again, position in itertools.product(results[1:], range(3)):
            assert torch.equal(results[0][position], again[position])
    finally:
        torch.use_deterministic_algorithms(was_enabled)


def test_no_race_between_blocks(chapter: Chapter) -> None:
    """B33: dK and dV, which no chapter adds up by atomics, have the same bits in 50 runs of 300 heads."""
    dtype, head_dim = nearest_build(chapter, FP16, 128)
    inputs = random_inputs(300, 1, 512, head_dim, seqlen_k=128, dtype=dtype, device="cuda")
    tensors = (inputs.q, inputs.k, inputs.v)
    out, lse = chapter.forward(*tensors)
    deterministic = same_bits(chapter)
    first = chapter.backward(*tensors, out, inputs.dout, lse, deterministic=deterministic)
    for _ in range(50):
        again = chapter.backward(*tensors, out, inputs.dout, lse, deterministic=deterministic)
        assert torch.equal(first[1], again[1])
        assert torch.equal(first[2], again[2])
        if repeatable(chapter):
            assert torch.equal(first[0], again[0])
    few = Inputs(*(t[:20] for t in (*tensors, inputs.dout)))
    assert_correct(Gradients(out[:20], lse[:20], *(g[:20] for g in first)), few)


def test_no_race_at_another_optimisation_level(chapter: Chapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """B33: built with -O1 for the device the results are right as well: no barrier was there by luck."""
    flags = [flag for flag in jit._CUDA_FLAGS if flag != "-O3"]
    monkeypatch.setattr(jit, "_CUDA_FLAGS", [*flags, "-O1", "-Xptxas", "-O1"])
    fresh = load_chapter(chapter.name)
    inputs = draw(4, 2, 130, 257, chapter=fresh, dtype=FP16, device="cuda")
    for _ in range(5):
        run_and_check(fresh, inputs, is_causal=True)


def test_the_current_stream_is_used(chapter: Chapter) -> None:
    """B41: on a side stream, inputs written after a long wait are read as written; the host never waits."""
    inputs = draw(1, 2, 200, chapter=chapter, device="cuda")
    expected = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout, deterministic=same_bits(chapter))
    sources = (inputs.q, inputs.k, inputs.v, inputs.dout)
    side = torch.cuda.Stream()
    for _ in range(50):
        buffers = [torch.zeros_like(t) for t in sources]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY)
            for buffer, source in zip(buffers, sources, strict=True):
                buffer.copy_(source)
            result = run(chapter, *buffers, deterministic=same_bits(chapter))
            waited = side.query()
            copies = [getattr(result, name).clone() for name in ("out", "lse", "dq", "dk", "dv")]
        assert not waited, "the host waited for the GPU"
        side.synchronize()
        if repeatable(chapter):
            assert_same_bits(Gradients(*copies), expected)
        else:
            assert_correct(Gradients(*copies), inputs)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_captured_graph_follows_its_inputs(chapter: Chapter, is_causal: bool) -> None:
    """Forward and backward in a CUDA graph; a larger call in between takes nothing away from it."""
    first, second = (
        draw(2, 2, 200, chapter=chapter, head_dim=64, seed=seed, device="cuda") for seed in (0, 1)
    )
    static = [t.clone() for t in (first.q, first.k, first.v, first.dout)]
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        run(chapter, *static, is_causal=is_causal)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(chapter, *static, is_causal=is_causal)
    run_and_check(chapter, draw(2, 2, 900, chapter=chapter, head_dim=64, device="cuda"))
    for inputs in (first, second):
        for target, source in zip(static, (inputs.q, inputs.k, inputs.v, inputs.dout), strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert_correct(result, inputs, is_causal=is_causal)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("shape", [(65536, 1, 4, 4), (1, 65536, 10, 10)], ids=str)
def test_more_heads_than_65535_on_the_gpu(chapter: Chapter, shape: tuple[int, int, int, int]) -> None:
    """B18: a launch rejected for its grid must not pass for a result."""
    run_and_check(chapter, draw(*shape, chapter=chapter, head_dim=16, device="cuda"))


def test_more_query_tiles_than_65535_on_the_gpu(chapter: Chapter) -> None:
    """B18: Nq = 64 · 65535 + 1."""
    needs_free_bytes(32 << 30)
    dtype = widest_dtype(chapter)
    inputs = draw(1, 1, 64 * 65535 + 1, 16, chapter=chapter, head_dim=16, dtype=dtype, device="cuda")
    result = either_right_or(
        (ValueError, RuntimeError),
        "seqlen_q|memory",
        lambda: run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout),
    )
    if result is not None:
        assert_correct_after_long_sums(
            result, inputs, truncates=chapter.info.min_compute_capability >= (8, 0)
        )
    torch.cuda.empty_cache()


def test_offsets_beyond_32_bits_on_the_gpu(chapter: Chapter) -> None:
    """B37 (a): a batch stride of 2³¹ elements."""
    needs_free_bytes(8 << 30)
    distance = 2**31
    inputs = draw(2, 1, 64, chapter=chapter, dtype=FP16, head_dim=64, device="cuda")
    size = inputs.q[0].numel()
    storage = torch.empty(distance + 4 * size, dtype=inputs.q.dtype, device="cuda")
    views: list[Tensor] = []
    for i, tensor in enumerate((inputs.q, inputs.k, inputs.v, inputs.dout)):
        strides = (distance, size, tensor.shape[3], 1)
        views.append(storage.as_strided(tensor.shape, strides, i * size))
        views[-1].copy_(tensor)
    result = run(chapter, *views)
    del storage, views
    assert_correct(result, inputs)
    torch.cuda.empty_cache()


def test_more_elements_than_two_to_the_31(chapter: Chapter) -> None:
    """B37 (b): (1, 524289, 64, 64) has 2³¹ + 4096 elements; the last heads are compared."""
    dtype, head_dim = nearest_build(chapter, FP16, 64)
    heads = 2**31 // (64 * head_dim) + 1
    workspace = chapter.workspace(
        batch=1, num_heads=heads, seqlen_q=64, head_dim=head_dim, dtype=dtype, device="cuda"
    ).allocated_bytes
    needs_free_bytes(9 * heads * 64 * head_dim * dtype.itemsize + workspace)
    few = random_inputs(1, 3, 64, head_dim, dtype=dtype, device="cuda")

    def many(tensor: Tensor) -> Tensor:
        large = torch.zeros(1, heads, 64, head_dim, dtype=dtype, device="cuda")
        large[:, -3:] = tensor
        return large

    result = run(chapter, *(many(t) for t in (few.q, few.k, few.v, few.dout)))
    last = Gradients(*(getattr(result, name)[:, -3:].clone() for name in ("out", "lse", "dq", "dk", "dv")))
    del result
    assert_correct(last, few)
    torch.cuda.empty_cache()


def test_sequences_longer_than_65536(chapter: Chapter) -> None:
    """B37 (c): N = 65537, causal: N·N passes 2³²; the rows around 65536 are compared."""
    dtype, head_dim = nearest_build(chapter, FP32, 16)
    seqlen = 65537
    workspace = chapter.workspace(
        batch=1, num_heads=1, seqlen_q=seqlen, head_dim=head_dim, dtype=dtype, is_causal=True, device="cuda"
    ).allocated_bytes
    needs_free_bytes(workspace + (8 << 30))
    inputs = random_inputs(1, 1, seqlen, head_dim, dtype=dtype, device="cuda")
    dout = inputs.dout.clone()
    dout[:, :, :-64] = 0  # so that a reference of the last 64 rows has all gradients
    result = run(chapter, inputs.q, inputs.k, inputs.v, dout, is_causal=True)
    last = Inputs(inputs.q[:, :, -64:], inputs.k, inputs.v, dout[:, :, -64:])
    rows = Gradients(
        result.out[:, :, -64:], result.lse[:, :, -64:], result.dq[:, :, -64:], result.dk, result.dv
    )
    assert_correct(rows, last, is_causal=True)
    assert torch.all(result.dq[:, :, :-64] == 0)
    torch.cuda.empty_cache()


def test_a_padded_workspace_beyond_32_bits(chapter: Chapter) -> None:
    """B37 (d): (28800, 16, 15, 72): small inputs, but a dQ buffer padded to tiles would pass 2³¹ elements."""
    dtype, head_dim = nearest_build(chapter, BF16, 72)
    workspace = chapter.workspace(
        batch=28800, num_heads=16, seqlen_q=15, head_dim=head_dim, dtype=dtype, device="cuda"
    ).allocated_bytes
    needs_free_bytes(workspace + (16 << 30))
    inputs = random_inputs(28800, 16, 15, head_dim, dtype=dtype, device="cuda")
    result = run(chapter, inputs.q, inputs.k, inputs.v, inputs.dout)
    for batch in (slice(0, 8), slice(-8, None)):
        part = Inputs(*(t[batch] for t in (inputs.q, inputs.k, inputs.v, inputs.dout)))
        names = ("out", "lse", "dq", "dk", "dv")
        assert_correct(Gradients(*(getattr(result, name)[batch] for name in names)), part)
    torch.cuda.empty_cache()


# ---------------------------------------------------------------- errors


def test_a_failed_launch_leaves_no_error_behind(chapter: Chapter) -> None:
    """B19: too much shared memory is reported with both numbers, and by no later call."""
    from common import load_kernel

    source = REPO / "chapters" / "02_tiled" / "kernel.cu"
    text, old = source.read_text(), "dim3(kNumThreads), sizeof(SharedMemory),\n"
    assert text.count(old) == 1
    copy = jit.build_root() / "mutants" / "greedy_gpu.cu"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text.replace(old, "dim3(kNumThreads), 512 * 1024,\n"))
    greedy = load_kernel(copy)
    inputs = draw(1, 1, 8, chapter=greedy, device="cuda")
    out, lse = greedy.forward(inputs.q, inputs.k, inputs.v)
    with pytest.raises(
        RuntimeError, match=rf"needs {512 * 1024} bytes of shared memory, this device has \d+"
    ):
        greedy.backward(inputs.q, inputs.k, inputs.v, out, inputs.dout, lse)
    assert torch.ones(3, device="cuda").sum().item() == 3
    torch.cuda.synchronize()
    run_and_check(chapter, draw(1, 1, 8, chapter=chapter, device="cuda"))
