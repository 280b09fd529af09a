"""Measurements that the notebooks cite besides the ladder: ``make experiments``, on a GPU.

Memory that a training step needs by sequence length, bandwidths, the rate of atomics, forward against
backward, what long sums lose. Each part goes into one file under ``notebooks/measurements/``, with the
machine, the date and a hash of the kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from common import jit, timing
from common.chapters import load_chapter
from common.inputs import Inputs, random_inputs
from common.ladder import machine
from common.measurements import FOLDER
from common.reference import reference_gradients

STORED_P, RECOMPUTED = "01_naive", "08_preprocess_delta"
ON_TENSOR_CORES = "09_tensor_cores"  # the first chapter with a forward pass worth comparing with
HEADS, HEAD_DIM, DTYPE = 8, 64, torch.bfloat16
MEMORY_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
RATIO_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
LONG_SUMS = tuple(1 << n for n in (14, 16, 18, 20, 22))  # queries
SUMMED_BY = ("08_preprocess_delta", ON_TENSOR_CORES, "12_hopper")
_MIB = 1 << 20


# ---------------------------------------------------------------- memory


def _sdpa_step(backend: SDPBackend, *, recompute: bool = False) -> Callable[[Inputs], None]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    def step(x: Inputs) -> None:
        q, k, v = (t.detach().requires_grad_(True) for t in (x.q, x.k, x.v))
        out = checkpoint(attention, q, k, v, use_reentrant=False) if recompute else attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), x.dout)

    return step


def _chapter_step(name: str) -> Callable[[Inputs], None]:
    chapter = load_chapter(name)

    def step(x: Inputs) -> None:
        out, lse = chapter.forward(x.q, x.k, x.v)
        chapter.backward(x.q, x.k, x.v, out, x.dout, lse)

    return step


def _steps() -> dict[str, Callable[[Inputs], None]]:
    return {
        STORED_P: _chapter_step(STORED_P),
        RECOMPUTED: _chapter_step(RECOMPUTED),
        "SDPA MATH": _sdpa_step(SDPBackend.MATH),
        "SDPA MATH, checkpointed": _sdpa_step(SDPBackend.MATH, recompute=True),
        "SDPA FLASH": _sdpa_step(SDPBackend.FLASH_ATTENTION),
    }


def _peak_bytes(step: Callable[[Inputs], None], x: Inputs) -> int | None:
    """Peak of what a step allocates beyond its inputs, or None if it does not fit."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        step(x)
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()
    return torch.cuda.max_memory_allocated() - before


def _saved_bytes(x: Inputs) -> int:
    """Bytes that autograd keeps between the passes of SDPA MATH, each storage once."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    q, k, v = (t.detach().requires_grad_(True) for t in (x.q, x.k, x.v))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, k, v)
    inputs = {t.untyped_storage().data_ptr() for t in (q, k, v)}
    return sum(size for pointer, size in storages.items() if pointer not in inputs)


def measure_memory() -> dict[str, object]:
    """Peak bytes and seconds of one forward and backward pass, by method and sequence length."""
    device = torch.device("cuda")
    steps = _steps()
    rows = []
    for i, seqlen in enumerate(MEMORY_SEQLENS):
        x = random_inputs(1, HEADS, seqlen, HEAD_DIM, dtype=DTYPE, device=device)
        if i == 0:
            # cuBLAS allocates a workspace in each thread's first product and keeps it: no step's own memory.
            for step in steps.values():
                step(x)
        for name, step in steps.items():
            peak = _peak_bytes(step, x)
            seconds = None
            if peak is not None:
                seconds = timing.median_seconds(lambda step=step, x=x: step(x), device, repeats=5, limit=0.5)
            rows.append({"method": name, "seqlen": seqlen, "peak_bytes": peak, "seconds": seconds})
            print(f"memory: N = {seqlen}, {name}: {peak}", flush=True)
    x = random_inputs(1, HEADS, 8192, HEAD_DIM, dtype=DTYPE, device=device)
    saved = {
        "seqlen": 8192,
        "saved_bytes": _saved_bytes(x),
        "peak_bytes": _peak_bytes(steps["SDPA MATH"], x),
    }
    return {"heads": HEADS, "head_dim": HEAD_DIM, "rows": rows, "saved": saved, "limits": _limits()}


def _allocates(name: str, batch: int, seqlen: int) -> bool:
    """Whether everything that a pass of a chapter needs can be allocated; nothing is run."""
    torch.cuda.empty_cache()
    layout = load_chapter(name).workspace(
        batch=batch, num_heads=HEADS, seqlen_q=seqlen, head_dim=HEAD_DIM, dtype=DTYPE, device="cuda"
    )
    shape = (batch, HEADS, seqlen, HEAD_DIM)
    try:
        kept = [torch.empty(shape, dtype=DTYPE, device="cuda") for _ in range(8)]  # q k v out dout dq dk dv
        kept.append(torch.empty(shape[:3], device="cuda"))  # lse
        kept.append(torch.empty(layout.allocated_bytes, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def _largest(fits: Callable[[int], bool], step: int) -> int:
    """The largest multiple of ``step`` that fits."""
    high = step
    while fits(2 * high):
        high *= 2
    low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _limits() -> dict[str, dict[str, int]]:
    return {
        name: {
            "largest_seqlen": _largest(lambda n, name=name: _allocates(name, 1, n), 256),
            "largest_batch_at_4096": _largest(lambda b, name=name: _allocates(name, b, 4096), 1),
        }
        for name in (STORED_P, RECOMPUTED)
    }


# ---------------------------------------------------------------- the machine


def _graph_seconds(function: Callable[[], object], calls: int) -> float:
    """Seconds of one call, many of them replayed in a CUDA graph so that launches do not count."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return timing.median_seconds(graph.replay, torch.device("cuda"), warmup=3) / calls


def measure_machine() -> dict[str, object]:
    """Bandwidths in bytes per second, read and written bytes counted; matrix products in FLOP/s."""
    device = torch.device("cuda")
    result: dict[str, object] = {}
    for name, size in (("l2", 8 * _MIB), ("hbm", 4096 * _MIB)):
        # An addition, because a copy may go through the copy engine instead of the multiprocessors.
        source, target = (torch.ones(size // 4, device=device) for _ in range(2))
        seconds = _graph_seconds(
            lambda s=source, t=target: torch.add(s, 1.0, out=t), 100 if name == "l2" else 4
        )
        result[f"{name}_bandwidth"] = 2 * size / seconds
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        result[f"matmul_flops_{name}"] = 1e12 * timing.matmul_tflops(device, dtype)
    print(f"machine: {result}", flush=True)
    return result


# ---------------------------------------------------------------- atomics


def measure_atomics() -> dict[str, object]:
    """Operations per second, of plain stores and of atomic additions, in a buffer inside and beyond L2."""
    capability = jit.compute_capability(torch.device("cuda"))
    arch = f"sm_{capability[0]}{capability[1]}"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "atomics_rate.so"
        command = [str(jit.find_nvcc()), "-O3", f"-arch={arch}", "--shared", "-Xcompiler", "-fPIC"]
        source = Path(__file__).with_name("atomics_rate.cu")
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        touch = ctypes.CDLL(str(library)).touch
    touch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    kinds = {"float": ("store", "atomicAdd"), "half2": ("store", "atomicAdd", "red")}
    kinds["bfloat162"] = kinds["float"]
    width, rows = 4, []
    for place, size, passes in (("L2", 16 * _MIB, 320), ("beyond L2", 2048 * _MIB, 4)):
        data = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for type_, (name, operations) in enumerate(kinds.items()):
            for number, operation in enumerate(operations):

                def run(
                    type_: int = type_, number: int = number, data: Tensor = data, passes: int = passes
                ) -> None:
                    error = touch(type_, number, data.data_ptr(), data.numel(), passes)
                    if error:
                        raise RuntimeError(f"atomics_rate.cu: CUDA error {error}")

                rate = size // width * passes / timing.median_seconds(run, torch.device("cuda"))
                rows.append(
                    {
                        "place": place,
                        "type": name,
                        "operation": operation,
                        "operations_per_second": rate,
                        "bytes_per_second": width * rate,
                    }
                )
        print(f"atomics: {place} done", flush=True)
    return {"rows": rows}


# ---------------------------------------------------------------- forward against backward


def chapter_passes(name: str, x: Inputs, is_causal: bool) -> tuple[float, float]:
    """Seconds of a chapter's own forward and backward pass."""
    chapter = load_chapter(name)
    out, lse = chapter.forward(x.q, x.k, x.v, is_causal=is_causal)
    forward = timing.median_seconds(
        lambda: chapter.forward(x.q, x.k, x.v, is_causal=is_causal), torch.device("cuda")
    )
    backward = timing.median_seconds(
        lambda: chapter.backward(x.q, x.k, x.v, out, x.dout, lse, is_causal=is_causal), torch.device("cuda")
    )
    return forward, backward


def measure_ratio() -> dict[str, object]:
    """Seconds of forward and backward passes of SDPA and of chapter 09, about 16k tokens each.

    A chapter's row names the hash of its kernel under "source".
    """
    device = torch.device("cuda")
    rows = []
    for head_dim in (64, 128):
        for is_causal in (False, True):
            for seqlen in RATIO_SEQLENS:
                heads, batch = 2048 // head_dim, max(1, 16384 // seqlen)
                x = random_inputs(batch, heads, seqlen, head_dim, dtype=DTYPE, device=device)
                q, k, v = (t.detach().requires_grad_(True) for t in (x.q, x.k, x.v))
                for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                    with sdpa_kernel(backend):
                        forward = timing.median_seconds(
                            lambda q=q, k=k, v=v, c=is_causal: scaled_dot_product_attention(
                                q, k, v, is_causal=c
                            ),
                            device,
                        )
                        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
                    backward = timing.median_seconds(
                        lambda out=out, q=q, k=k, v=v, x=x: torch.autograd.grad(
                            out, (q, k, v), x.dout, retain_graph=True
                        ),
                        device,
                    )
                    rows.append(
                        {
                            "backend": backend.name.removesuffix("_ATTENTION"),
                            "head_dim": head_dim,
                            "is_causal": is_causal,
                            "seqlen": seqlen,
                            "batch": batch,
                            "heads": heads,
                            "forward_seconds": forward,
                            "backward_seconds": backward,
                        }
                    )
                forward, backward = chapter_passes(ON_TENSOR_CORES, x, is_causal)
                rows.append(
                    rows[-1]
                    | {
                        "backend": ON_TENSOR_CORES,
                        "forward_seconds": forward,
                        "backward_seconds": backward,
                        "source": jit.kernel_digest(load_chapter(ON_TENSOR_CORES).info.kernel),
                    }
                )
        print(f"ratio: head_dim {head_dim} done", flush=True)
    return {"rows": rows}


# ---------------------------------------------------------------- long sums


def measure_long_sums() -> dict[str, object]:
    """The error of dV, relative to its norm, by the number of queries that it is a sum over.

    fp16, 16 keys, d = 64, dO of mean 1/256. "bias": the mean of the elements' relative errors, with sign.
    """
    rows = []
    for seqlen in LONG_SUMS:
        x = random_inputs(1, 1, seqlen, 64, seqlen_k=16, dtype=torch.float16, device="cuda")
        dout = x.dout / 64  # or the sum would leave the range of fp16
        truth = reference_gradients(x.q, x.k, x.v, dout).dv
        computed: dict[str, Callable[[], Tensor]] = {}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            computed[f"SDPA {backend.name.removesuffix('_ATTENTION')}"] = functools.partial(
                _sdpa_dv, backend, x, dout
            )
        for name in SUMMED_BY:
            computed[name] = functools.partial(_chapter_dv, name, x, dout)
        for method, dv in computed.items():
            error = dv().double() - truth
            rows.append(
                {
                    "method": method,
                    "seqlen_q": seqlen,
                    "error": (error.norm() / truth.norm()).item(),
                    "bias": (error / truth).mean().item(),
                }
            )
        print(f"long sums: {seqlen} queries done", flush=True)
    return {"rows": rows}


def _sdpa_dv(backend: SDPBackend, x: Inputs, dout: Tensor) -> Tensor:
    v = x.v.detach().requires_grad_(True)
    with sdpa_kernel(backend):
        return torch.autograd.grad(scaled_dot_product_attention(x.q, x.k, v), v, dout)[0]


def _chapter_dv(name: str, x: Inputs, dout: Tensor) -> Tensor:
    chapter = load_chapter(name)
    out, lse = chapter.forward(x.q, x.k, x.v)
    return chapter.backward(x.q, x.k, x.v, out, dout, lse)[2]


PARTS: dict[str, Callable[[], dict[str, object]]] = {
    "machine": measure_machine,
    "atomics": measure_atomics,
    "ratio": measure_ratio,
    "memory": measure_memory,
    "long_sums": measure_long_sums,
}


def load(part: str) -> dict[str, object] | None:
    """A stored part, or None if there is none or its kernels have changed since."""
    path = FOLDER / f"{part}.json"
    if not path.is_file():
        return None
    data = json.loads(path.read_text())
    return data if data["sources"] == _sources(part) else None


def _sources(part: str) -> dict[str, str]:
    names = {"memory": (STORED_P, RECOMPUTED), "long_sums": SUMMED_BY}.get(part, ())
    sources = {name: jit.kernel_digest(load_chapter(name).info.kernel) for name in names}
    if part == "atomics":
        sources["atomics_rate.cu"] = jit.kernel_digest(Path(__file__).with_name("atomics_rate.cu"))
    return sources


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.experiments", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    if problem := jit.cuda_problem():
        print(f"nothing to measure: {problem}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        data = {"machine": machine(torch.device("cuda")), "sources": _sources(part), **PARTS[part]()}
        (options.output / f"{part}.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
