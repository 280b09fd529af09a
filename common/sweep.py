"""The chapters that use tensor cores beside PyTorch's own kernels, over the sequence length: ``make bench``.

Backward passes are timed, and the forward passes of the chapters that have one of their own, all in one
process and by turns; see ``timing.interleaved_timings``. Each chapter's results are compared with float64
first, so that no speed of wrong numbers is stored.

``python -m common.sweep CHAPTER DTYPE HEAD_DIM`` only builds: ``build_all`` runs many of it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common import jit, timing
from common.chapters import Chapter, ChapterInfo, list_chapters, load_chapter
from common.inputs import Inputs, random_inputs
from common.ladder import DTYPES, machine
from common.reference import Gradients, compare

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
FLASH = "SDPA FLASH"
_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_CHECKED = (1, 2, 333)  # batch, heads, seqlen that gradients are checked at: whole tiles and a part of one
_BUILD_LIMIT = 300  # seconds

Pass = Callable[[], object]


@dataclass(frozen=True)
class SweepSettings:
    """One sweep: on what, how large. Each length has as many sequences as make up ``tokens``."""

    device: str
    dtype: str
    head_dim: int
    causal: bool
    seqlens: tuple[int, ...] = SEQLENS
    tokens: int = 16384
    width: int = 2048  # heads times head_dim
    repeats: int = 7
    rest: float = 2.0  # see timing.interleaved_timings

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as PyTorch's."""
        return DTYPES[self.dtype]

    @property
    def heads(self) -> int:
        """Heads of each sequence."""
        return max(1, self.width // self.head_dim)

    def batch(self, seqlen: int) -> int:
        """Sequences of this length."""
        return max(1, self.tokens // seqlen)


@dataclass(frozen=True)
class Point:
    """The backward or forward pass of one chapter or SDPA backend at one sequence length."""

    name: str
    seqlen: int
    median_ms: float
    min_ms: float
    max_ms: float
    calls: int  # back to back in each timing
    tflops: float
    of_peak: float | None  # tflops over the matrix product's of this dtype, or None if that is unknown
    source: str | None = None  # jit.kernel_digest of what was run


@dataclass(frozen=True)
class LeftOut:
    """What was not timed, and why. seqlen: None for every length."""

    name: str
    seqlen: int | None
    why: str
    failed: bool = False  # a chapter that was expected to run, and right


@dataclass
class Sweep:
    """A finished sweep and the machine it ran on. points: of backward passes.

    matmul_tflops: of PyTorch's matrix product, by dtype, in the same process. state: SM clock and power under
    load before and after, as far as they could be read.
    """

    settings: SweepSettings
    machine: dict[str, str]
    matmul_tflops: dict[str, float]
    state: dict[str, dict[str, float]]
    points: list[Point] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    forward: list[Point] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No chapter failed or was over a budget."""
        return not any(entry.failed for entry in self.left_out)

    def point(self, name: str, seqlen: int, *, forward: bool = False) -> Point | None:
        """The measurement of a chapter or an SDPA backend, or None."""
        points = self.forward if forward else self.points
        return next((p for p in points if p.name == name and p.seqlen == seqlen), None)

    def best(self, name: str) -> float | None:
        """The most TFLOP/s of a backward pass at any length, or None if it was not measured."""
        return max((p.tflops for p in self.points if p.name == name), default=None)

    def ratio(self, name: str, seqlen: int, *, to: str = FLASH, forward: bool = False) -> float | None:
        """How many times as fast as PyTorch's FLASH, or as ``to``; or None."""
        point, other = (self.point(n, seqlen, forward=forward) for n in (name, to))
        return None if point is None or other is None else other.median_ms / point.median_ms

    def cell(self, name: str, seqlen: int, *, forward: bool = False) -> str:
        """TFLOP/s and the ratio to PyTorch's FLASH, for a table; blank if unmeasured."""
        point = self.point(name, seqlen, forward=forward)
        ratio = self.ratio(name, seqlen, forward=forward)
        if point is None:
            return ""
        return f"{point.tflops:.0f}" + (f" ({ratio:.2f} ×)" if ratio and name != FLASH else "")

    def to_json(self) -> str:
        """All numbers, as JSON."""
        return json.dumps(asdict(self), indent=1)


def tensor_core_chapters() -> list[ChapterInfo]:
    """The chapters that are swept: those that need tensor cores of bf16, and have a backward pass."""
    return [
        info
        for info in list_chapters()
        if info.min_compute_capability >= (8, 0) and load_chapter(info.name).has_backward
    ]


# ---------------------------------------------------------------------------- the machine


def _smi(device: torch.device, load: Callable[[], object]) -> list[str]:
    """uuid, SM clock, power and driver of this GPU, asked for while ``load`` runs over and over."""
    query = ["nvidia-smi", "--query-gpu=uuid,clocks.sm,power.draw,driver_version"]
    with subprocess.Popen(
        [*query, "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            load()
        if process.returncode is None:
            process.kill()
        text = process.communicate()[0]
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "no uuid"))
    return next((row for row in rows if uuid in row[0]), rows[0] if len(rows) == 1 else [])


def gpu_state(device: torch.device) -> tuple[dict[str, float], str]:
    """(SM clock in MHz and power in W while matrix products run, driver); empty where they cannot be read."""
    if device.type != "cuda":
        return {}, ""
    a = torch.randn(8192, 8192, device=device).to(torch.bfloat16)

    def load() -> None:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize(device)

    try:
        row = _smi(device, load)
    except OSError:
        row = []
    state = {}
    for name, cell in zip(("sm_clock_mhz", "power_w"), row[1:3], strict=False):
        try:
            state[name] = float(cell)
        except ValueError:  # "[N/A]"
            continue
    return state, row[3] if row else ""


def matmul_peaks(device: torch.device) -> dict[str, float]:
    """TFLOP/s of PyTorch's matrix product in bf16 and fp16, which backward speeds are compared with."""
    return {name: timing.matmul_tflops(device, DTYPES[name]) for name in ("bf16", "fp16")}


# ---------------------------------------------------------------------------- building


def build_all(infos: Iterable[ChapterInfo], dtypes: Iterable[str], head_dims: Iterable[int]) -> int:
    """Builds what a sweep needs, in processes that run at once. Returns how many there were.

    A build that fails is not reported here: it fails again, and says why, when it is used.
    """
    kernels: dict[str, ChapterInfo] = {}
    for info in infos:
        kernels[info.name] = info
        forward = load_chapter(info.name).forward_chapter.info
        kernels[forward.name] = forward
    jobs = [
        [sys.executable, "-m", "common.sweep", name, dtype, str(head_dim)]
        for (name, info), dtype, head_dim in product(kernels.items(), dtypes, head_dims)
        if DTYPES[dtype] in info.dtypes and head_dim in info.head_dims
    ]

    def run(job: list[str]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(job, cwd=jit.REPO_ROOT, capture_output=True, timeout=_BUILD_LIMIT, check=False)

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(run, jobs))
    return len(jobs)


# ---------------------------------------------------------------------------- measuring


def draw(settings: SweepSettings, seqlen: int, device: torch.device) -> Inputs:
    """What ``random_inputs`` draws, but on the GPU itself: on the CPU it takes longer than the timing.

    q, k, v and dout of [batch, heads, seqlen, head_dim] in the settings' dtype.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (settings.batch(seqlen), settings.heads, seqlen, settings.head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device) for _ in range(4))
    return Inputs(*(t.to(settings.torch_dtype) for t in (q, k, v, dout + 0.25)))


def budget_problem(chapter: Chapter, settings: SweepSettings, device: torch.device) -> str | None:
    """What is wrong with a chapter's gradients on a small ragged shape, or None."""
    x = random_inputs(*_CHECKED, settings.head_dim, dtype=settings.torch_dtype, device=device)
    out, lse = chapter.forward(x.q, x.k, x.v, is_causal=settings.causal)
    gradients = chapter.backward(x.q, x.k, x.v, out, x.dout, lse, is_causal=settings.causal)
    comparisons = compare(
        Gradients(out, lse, *gradients), x.q, x.k, x.v, x.dout,
        is_causal=settings.causal, dq_rounded_every=chapter.info.dq_rounded_every,
    )  # fmt: skip
    return "; ".join(str(c) for c in comparisons if not c.ok) or None


def _sdpa_backward(backend: SDPBackend, x: Inputs, is_causal: bool) -> Pass:
    q, k, v = (t.detach().requires_grad_(True) for t in (x.q, x.k, x.v))
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other backends, too
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return lambda: torch.autograd.grad(out, (q, k, v), x.dout, retain_graph=True)


def _sdpa_forward(backend: SDPBackend, x: Inputs, is_causal: bool) -> Pass:
    q, k, v = (t.detach().requires_grad_(True) for t in (x.q, x.k, x.v))  # so that it computes lse, too

    def forward() -> object:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return forward


def _chapter_backward(
    chapter: Chapter, x: Inputs, is_causal: bool, outputs: dict[str, tuple[Tensor, Tensor]]
) -> Pass:
    """``outputs``: out and lse by the chapter that computed them; chapters share forward passes."""
    forward = chapter.forward_chapter
    if forward.name not in outputs:
        outputs[forward.name] = forward.forward(x.q, x.k, x.v, is_causal=is_causal)
    out, lse = outputs[forward.name]
    return lambda: chapter.backward(x.q, x.k, x.v, out, x.dout, lse, is_causal=is_causal)


def _finish(device: torch.device) -> None:
    """Waits for the GPU. Raises what it met: after an illegal access nothing on it can be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timings(
    makers: dict[str, Callable[[], Pass]], settings: SweepSettings, device: torch.device
) -> tuple[dict[str, timing.Timing], dict[str, str]]:
    """The times of what runs, by turns, and of what does not the reason."""
    ready: dict[str, Pass] = {}
    problems: dict[str, str] = {}
    for name, make in makers.items():
        try:
            function = make()
            function()
            _finish(device)
            ready[name] = function
        except RuntimeError as error:
            _finish(device)
            problems[name] = str(error).partition("\n")[0]
    timings = timing.interleaved_timings(
        ready,
        lambda function, calls: timing.start_calls(function, calls, device),
        repeats=settings.repeats,
        rest=settings.rest,
    )
    return timings, problems


def measure(
    settings: SweepSettings,
    infos: Sequence[ChapterInfo],
    peaks: dict[str, float],
    report: Callable[[Sweep, int], None] | None = None,
) -> Sweep:
    """Times chapters and SDPA backends at every length.

    ``peaks``: ``matmul_peaks``. ``report`` is called with the sweep so far and each length as it is done.
    """
    device = torch.device(settings.device)
    before, driver = gpu_state(device)
    facts = machine(device) | ({"driver": driver} if driver else {})
    sweep = Sweep(settings, facts, dict(peaks), {"before": before})
    chapters: list[Chapter] = []
    sources: dict[str, str] = {}
    for info in infos:
        if settings.torch_dtype not in info.dtypes or settings.head_dim not in info.head_dims:
            why = f"does not support {settings.dtype} with head_dim {settings.head_dim}"
            sweep.left_out.append(LeftOut(info.name, None, why))
            continue
        sources[info.name] = jit.kernel_digest(info.kernel)
        chapter = load_chapter(info.name)
        problem = chapter.gpu_problem(device)
        if problem:
            sweep.left_out.append(LeftOut(info.name, None, problem))
            continue
        try:
            problem = budget_problem(chapter, settings, device)
        except RuntimeError as error:
            _finish(device)
            problem = str(error)
        if problem:
            sweep.left_out.append(LeftOut(info.name, None, problem, failed=True))
        else:
            chapters.append(chapter)

    for seqlen in sorted(settings.seqlens):
        x = draw(settings, seqlen, device)
        outputs: dict[str, tuple[Tensor, Tensor]] = {}
        makers: dict[str, Callable[[], Pass]] = {}
        forward_makers: dict[str, Callable[[], Pass]] = {}
        for backend in _BACKENDS:
            name = f"SDPA {backend.name.removesuffix('_ATTENTION')}"
            makers[name] = lambda backend=backend, x=x: _sdpa_backward(backend, x, settings.causal)
            forward_makers[name] = lambda backend=backend, x=x: _sdpa_forward(backend, x, settings.causal)
        for chapter in chapters:
            makers[chapter.name] = lambda chapter=chapter, x=x, outputs=outputs: _chapter_backward(
                chapter, x, settings.causal, outputs
            )
            if chapter.forward_chapter is chapter:
                forward_makers[chapter.name] = lambda chapter=chapter, x=x: (
                    lambda: chapter.forward(x.q, x.k, x.v, is_causal=settings.causal)
                )
        passes = [(sweep.points, timing.backward_flops, makers)]
        if forward_makers.keys() & sources.keys():
            passes.append((sweep.forward, timing.forward_flops, forward_makers))
        for points, flops, of_pass in passes:
            timings, problems = _timings(of_pass, settings, device)
            for name, problem in problems.items():
                sweep.left_out.append(LeftOut(name, seqlen, problem, name in sources))
            sizes = (settings.batch(seqlen), settings.heads, seqlen, seqlen, settings.head_dim)
            for name, t in timings.items():
                tflops = flops(*sizes, settings.causal) / t.median / 1e12
                peak = peaks.get(settings.dtype)
                points.append(
                    Point(
                        name, seqlen, 1e3 * t.median, 1e3 * t.low, 1e3 * t.high, t.calls,
                        tflops, tflops / peak if peak else None, sources.get(name),
                    )
                )  # fmt: skip
        if report:
            report(sweep, seqlen)
    sweep.state["after"] = gpu_state(device)[0]
    return sweep


def line(sweep: Sweep, seqlen: int) -> str:
    """One length on one line: TFLOP/s, per cent of the matrix product's, and the ratio to FLASH."""
    cells = []
    for point in (p for p in sweep.points if p.seqlen == seqlen):
        ours = not point.name.startswith("SDPA")
        short = point.name.partition("_")[0] if ours else point.name.removeprefix("SDPA ")
        percent = f" {point.of_peak:.0%}" if point.of_peak is not None else ""
        ratio = sweep.ratio(point.name, seqlen) if ours else None
        cells.append(f"{short} {point.tflops:.0f}{percent}" + (f" ({ratio:.2f} ×)" if ratio else ""))
    return f"{seqlen:>6}  {'   '.join(cells)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds one chapter for one dtype and head_dim, for the GPU if there is one. Returns the exit status."""
    name, dtype, head_dim = sys.argv[1:] if arguments is None else arguments
    device = torch.device("cpu" if jit.cuda_problem() else "cuda")
    try:
        load_chapter(name).library(DTYPES[dtype], int(head_dim), device)
    except jit.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
