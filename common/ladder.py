"""The ladder: every chapter built, run, compared with float64, timed, and put in one table.

``make run``, or ``python -m common.ladder --help``. Exits with 1 if a chapter fails or is over its budget,
and if none was run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from common import jit, timing
from common.chapters import Chapter, ChapterInfo, list_chapters, load_chapter
from common.inputs import Inputs, random_inputs, read_text, text_inputs
from common.reference import Comparison, Gradients, compare

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """One ladder: where, on what, how large."""

    device: str
    dtype: str
    batch: int
    heads: int
    head_dim: int
    seqlens: tuple[int, ...]
    causal: bool
    text: str | None  # where the input is from; None for random numbers
    time_limit: float
    deterministic: bool = False  # asked of the chapters that have it as a flag

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as PyTorch's."""
        return DTYPES[self.dtype]


@dataclass
class Rung:
    """One chapter (or one SDPA backend) at one sequence length."""

    name: str
    seqlen: int
    comparisons: list[Comparison] = field(default_factory=list)
    workspace_bytes: int | None = None
    seconds: float | None = None
    speedup: float | None = None  # over the chapter it builds on, at the same length
    tflops: float | None = None
    skipped: str | None = None
    failed: str | None = None
    source: str | None = None  # jit.kernel_digest of what was run

    @property
    def has_backward(self) -> bool:
        """A backward pass was run, not only a forward pass."""
        return any(c.name == "dq" for c in self.comparisons)

    @property
    def ok(self) -> bool:
        """Neither failed nor over budget; a skipped run is ok."""
        return self.failed is None and all(c.ok for c in self.comparisons)


@dataclass
class Ladder:
    """A finished ladder and the machine it ran on."""

    settings: Settings
    machine: dict[str, str]
    rungs: list[Rung]

    @property
    def ok(self) -> bool:
        """Every rung is ok."""
        return all(rung.ok for rung in self.rungs)

    def to_json(self) -> str:
        """All numbers, as JSON."""
        return json.dumps(asdict(self), indent=1)


def machine(device: torch.device) -> dict[str, str]:
    """Names and versions that a measurement depends on."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
        }
    else:
        facts |= {
            "device": f"CPU device on {len(os.sched_getaffinity(0))} cores",
            "machine": platform.machine(),
        }
    return facts


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------------------------------------- running


class _Predictor:
    """Guesses how long a run takes, from the same chapter's runs at smaller sizes."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}  # (chapter, pass) -> seconds per Nq · Nk element

    def learn(self, name: str, kind: str, seconds: float, elements: int) -> None:
        self._seconds[name, kind] = seconds / elements

    def predict(self, name: str, kind: str, elements: int) -> float | None:
        rate = self._seconds.get((name, kind))
        return None if rate is None else rate * elements


def _needed_bytes(chapter: Chapter, settings: Settings, seqlen: int, device: torch.device) -> tuple[int, int]:
    """(workspace, workspace and everything else) of one run and its comparison, in bytes."""
    workspace = chapter.workspace(
        batch=settings.batch,
        num_heads=settings.heads,
        seqlen_q=seqlen,
        head_dim=settings.head_dim,
        dtype=settings.torch_dtype,
        is_causal=settings.causal,
        deterministic=settings.deterministic and chapter.has_backward,
        device=device,
    ).bytes
    tensor = settings.batch * settings.heads * seqlen * settings.head_dim * settings.torch_dtype.itemsize
    # The comparison computes a few heads at a time, in float64: about a dozen N² matrices of those.
    heads_at_once = max(seqlen * seqlen, min(settings.batch * settings.heads * seqlen * seqlen, 2**26))
    return workspace, workspace + 10 * tensor + 12 * 8 * heads_at_once


def _run_chapter(
    chapter: Chapter, inputs: Inputs, settings: Settings, predictor: _Predictor, device: torch.device
) -> Rung:
    seqlen = inputs.q.shape[2]
    rung = Rung(chapter.name, seqlen, source=jit.kernel_digest(chapter.info.kernel))
    elements = settings.batch * settings.heads * seqlen * seqlen
    kinds = ("forward", "backward") if chapter.has_backward else ("forward",)
    predicted = max((predictor.predict(chapter.name, kind, elements) or 0.0) for kind in kinds)
    if predicted > settings.time_limit:
        rung.skipped = f"would take about {predicted:.1f} s, --time-limit is {settings.time_limit:g} s"
        return rung
    rung.workspace_bytes, needed = _needed_bytes(chapter, settings, seqlen, device)
    if needed > free_bytes(device):
        rung.skipped = f"needs about {_bytes(needed)}, {_bytes(free_bytes(device))} are free"
        return rung

    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    out, lse = chapter.forward(q, k, v, is_causal=settings.causal)

    def forward() -> object:
        return chapter.forward(q, k, v, is_causal=settings.causal)

    def backward() -> tuple[torch.Tensor, ...]:
        return chapter.backward(
            q, k, v, out, dout, lse, is_causal=settings.causal, deterministic=settings.deterministic
        )

    sizes = (settings.batch, settings.heads, seqlen, seqlen, settings.head_dim, settings.causal)
    if chapter.has_backward:
        dq, dk, dv = backward()
        comparisons = compare(
            Gradients(out, lse, dq, dk, dv),
            q,
            k,
            v,
            dout,
            is_causal=settings.causal,
            dq_rounded_every=chapter.info.dq_rounded_every,
        )
        rung.comparisons = [c for c in comparisons if c.name in ("dq", "dk", "dv")]
        run, flops, kind = backward, timing.backward_flops(*sizes), "backward"
    else:
        blank = [torch.zeros_like(t) for t in (q, k, v)]
        comparisons = compare(Gradients(out, lse, *blank), q, k, v, dout, is_causal=settings.causal)
        rung.comparisons = [c for c in comparisons if c.name in ("out", "lse")]
        run, flops, kind = forward, timing.forward_flops(*sizes), "forward"
    rung.seconds = timing.median_seconds(run, device)
    predictor.learn(chapter.name, kind, rung.seconds, elements)
    if device.type == "cuda":
        rung.tflops = flops / rung.seconds / 1e12
    return rung


def _run_sdpa(inputs: Inputs, settings: Settings, device: torch.device) -> list[Rung]:
    """The backward passes PyTorch has for these tensors, timed in this process."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    seqlen, rungs = inputs.q.shape[2], []
    q, k, v = (t.detach().requires_grad_(True) for t in (inputs.q, inputs.k, inputs.v))
    sizes = (settings.batch, settings.heads, seqlen, seqlen, settings.head_dim, settings.causal)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        rung = Rung(f"SDPA {backend.name.removesuffix('_ATTENTION')}", seqlen)
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a backend refuses is in the exception
                out = scaled_dot_product_attention(q, k, v, is_causal=settings.causal)
                rung.seconds = timing.median_seconds(
                    lambda out=out: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True),
                    device,
                )
        except RuntimeError:
            continue
        rung.tflops = timing.backward_flops(*sizes) / rung.seconds / 1e12
        rungs.append(rung)
    return rungs


def _inputs(settings: Settings, text: str | None, seqlen: int, device: torch.device) -> Inputs:
    shape = (settings.batch, settings.heads, seqlen, settings.head_dim)
    if text is None:
        return random_inputs(*shape, dtype=settings.torch_dtype, device=device)
    return text_inputs(text, *shape, is_causal=settings.causal, dtype=settings.torch_dtype, device=device)


def climb(
    settings: Settings,
    infos: list[ChapterInfo],
    text: str | None = None,
    report: Callable[[Rung], None] | None = None,
) -> Ladder:
    """Runs every chapter at every length. ``report`` is called with each rung as it is done."""
    device = torch.device(settings.device)
    chapters: list[Chapter] = []
    for info in infos:
        if settings.deterministic and info.deterministic == "never":
            print(f"{info.name} cannot be deterministic; left out")
        elif problem := load_chapter(info.name).gpu_problem(device):
            print(f"{info.name} is left out: {problem}")
        elif settings.torch_dtype in info.dtypes and settings.head_dim in info.head_dims:
            chapters.append(load_chapter(info.name))
        else:
            print(
                f"{info.name} does not support {settings.dtype} with head_dim {settings.head_dim}; left out"
            )
    predictor = _Predictor()
    lengths = sorted(settings.seqlens)
    broken: dict[str, str] = {}  # what does not build or fails on its first, short run

    def attempt(chapter: Chapter, inputs: Inputs) -> Rung:
        failed = broken.get(chapter.name)
        if failed is None:
            try:
                return _run_chapter(chapter, inputs, settings, predictor, device)
            except RuntimeError as error:
                failed = str(error)
        source = jit.kernel_digest(chapter.info.kernel)
        return Rung(chapter.name, inputs.q.shape[2], failed=failed, source=source)

    # The short run builds, and is the measurement from which longer runs are predicted.
    trial = _inputs(settings, None, min(128, lengths[0]), device)
    for chapter in chapters:
        rung = attempt(chapter, trial)
        if rung.failed:
            broken[chapter.name] = rung.failed
    rungs: list[Rung] = []

    def add(rung: Rung) -> None:
        rungs.append(rung)
        if report:
            report(rung)

    with tqdm(total=len(lengths) * len(chapters), desc="running", leave=False, disable=None) as bar:
        for seqlen in lengths:
            inputs = _inputs(settings, text, seqlen, device)
            done: dict[str, Rung] = {}
            for chapter in chapters:
                bar.set_postfix_str(f"{chapter.name}, seqlen {seqlen}")
                rung = done[chapter.name] = attempt(chapter, inputs)
                before = done.get(chapter.info.builds_on or "")
                # A backward pass is not compared with the forward pass it starts from.
                if before and before.seconds and rung.seconds and before.has_backward:
                    rung.speedup = before.seconds / rung.seconds
                add(rung)
                bar.update()
            if device.type == "cuda":
                for rung in _run_sdpa(inputs, settings, device):
                    add(rung)
    facts = machine(device)
    if device.type == "cuda":
        facts["matmul_tflops"] = f"{timing.matmul_tflops(device, settings.torch_dtype):.0f}"
    return Ladder(settings, facts, rungs)


# ---------------------------------------------------------------------------- showing


def _bytes(n: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def _seconds(t: float) -> str:
    return f"{t:.2f} s" if t >= 1 else f"{t * 1e3:.3g} ms" if t >= 1e-3 else f"{t * 1e6:.3g} µs"


def _errors(rung: Rung) -> str:
    return "  ".join(
        f"{c.name} {c.error:.1e} {'≤' if c.ok else 'OVER'} {c.budget:.1e}" for c in rung.comparisons
    )


HEADER = f"{'chapter':<19} {'relative error ≤ its budget':<68} {'workspace':>9} {'time':>9} {'speed-up':>8}"


def line(rung: Rung) -> str:
    """One line of the table."""
    if rung.skipped:
        return f"{rung.name:<19} skipped: {rung.skipped}"
    if rung.failed:
        return f"{rung.name:<19} FAILED: {rung.failed}"
    workspace = "" if rung.workspace_bytes is None else _bytes(rung.workspace_bytes)
    seconds = _seconds(rung.seconds) if rung.seconds else ""
    speedup = f"{rung.speedup:.2f} ×" if rung.speedup else ""
    tflops = f" {rung.tflops:7.2f}" if rung.tflops is not None else ""
    return f"{rung.name:<19} {_errors(rung):<68} {workspace:>9} {seconds:>9} {speedup:>8}{tflops}"


def check_at_least_one(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Ends with the parser's message where an option, such as ``head_dim``, is below 1. None is not given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected at least 1")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m common.ladder", description=__doc__)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if usable"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16")
    parser.add_argument(
        "--seqlens", type=int, nargs="+", metavar="N", help="default: 128 256 512; on a GPU 512 … 4096"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, help="default: 2; on a GPU 16")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits on every run, where a flag"
    )
    parser.add_argument("--chapters", nargs="+", metavar="NN", help="numbers or names; default: all")
    parser.add_argument(
        "--text",
        nargs="?",
        const="",
        metavar="FILE",
        help="take q, k, v and dout from the attention layer of a small character model run over FILE "
        "(without FILE: over a text that comes with Python) instead of random numbers",
    )
    parser.add_argument(
        "--time-limit", type=float, default=2.0, metavar="S", help="skip a kernel that would take longer"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument(
        "--picture", type=Path, default=Path("out/ladder.png"), metavar="FILE", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    check_at_least_one(parser, options, "batch", "heads", "head_dim")
    if options.seqlens and min(options.seqlens) < 1:
        parser.error(f"--seqlens has {min(options.seqlens)}; expected at least 1")
    if not 0 < options.time_limit < math.inf:  # NaN is not, either
        parser.error(f"--time-limit is {options.time_limit:g}; expected a finite number of seconds above 0")
    from matplotlib.backend_bases import FigureCanvasBase  # here: it takes a while, and is for commands only

    # Without a suffix matplotlib would write a file of another name.
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if options.picture.suffix.lower().removeprefix(".") not in formats:
        endings = ", ".join(f".{name}" for name in formats)
        parser.error(f"--picture is {options.picture}; expected a name that ends in one of {endings}")
    return options


def _choose_device(wanted: str) -> torch.device:
    problem = jit.cuda_problem()
    if wanted == "cuda" and problem:
        sys.exit(f"--device cuda: {problem}")
    if wanted == "auto" and problem and torch.cuda.is_available():
        print(f"Running on the CPU device: {problem}")
    return torch.device("cuda" if wanted != "cpu" and problem is None else "cpu")


def _choose_chapters(wanted: list[str] | None) -> list[ChapterInfo]:
    if not wanted:
        return list_chapters()
    try:
        return [load_chapter(name).info for name in wanted]
    except ValueError as error:
        sys.exit(f"--chapters: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the ladder and prints it. Returns the exit status."""
    options = parse_arguments(arguments)
    device = _choose_device(options.device)
    on_gpu = device.type == "cuda"
    text = source = None
    if options.text is not None:
        try:
            text, source = read_text(options.text)
        except OSError as error:
            sys.exit(f"--text: cannot read {options.text}: {error.strerror}")
    settings = Settings(
        device=device.type,
        dtype=options.dtype or "bf16",
        batch=options.batch,
        heads=options.heads or (16 if on_gpu else 2),
        head_dim=options.head_dim,
        seqlens=tuple(options.seqlens or ((512, 1024, 2048, 4096) if on_gpu else (128, 256, 512))),
        causal=options.causal,
        text=source,
        time_limit=options.time_limit,
        deterministic=options.deterministic,
    )
    if text is not None and (size := len(text.encode())) <= (longest := max(settings.seqlens)):
        sys.exit(f"--text: the text has {size} bytes; a sequence of {longest} needs at least {longest + 1}")
    infos = _choose_chapters(options.chapters)
    facts = machine(device)
    print(f"FlashAttention-2 backward, chapter by chapter, on {facts['device']} (PyTorch {facts['torch']})")
    for info in infos:
        print(f"  {info.name:<19} {info.idea}")
    print(
        f"{settings.dtype}, batch {settings.batch}, {settings.heads} heads, head_dim {settings.head_dim}, "
        f"{'causal' if settings.causal else 'full'}{', deterministic' if settings.deterministic else ''}; "
        f"input: {source or 'random normal numbers'}"
    )
    print(
        "speed-up: over the chapter that a chapter builds on"
        + ("" if on_gpu else "; times of the CPU device say nothing about a GPU")
    )
    last_seqlen = 0

    def report(rung: Rung) -> None:
        nonlocal last_seqlen
        if rung.seqlen != last_seqlen:
            tqdm.write(f"\nseqlen {rung.seqlen}\n{HEADER}{' TFLOP/s' if on_gpu else ''}")
            last_seqlen = rung.seqlen
        tqdm.write(line(rung))

    ladder = climb(settings, infos, text, report)
    print()
    # What PyTorch's backends did is compared with nothing.
    if not any(rung.comparisons or rung.failed for rung in ladder.rungs):
        print("no chapter was run: all were left out or skipped")
        return 1
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(ladder.to_json() + "\n")
        print(f"numbers: {options.json}")
    from common.figures import draw_ladder

    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw_ladder(ladder, options.picture)
    print(f"picture: {options.picture}")
    bad = [rung for rung in ladder.rungs if not rung.ok]
    if bad:
        print(f"{len(bad)} of {len(ladder.rungs)} runs failed or are over budget:")
        for rung in bad:
            why = rung.failed or "; ".join(str(c) for c in rung.comparisons if not c.ok)
            print(f"  {rung.name}, seqlen {rung.seqlen}: {why}")
        return 1
    print("every result is within its budget")
    return 0


if __name__ == "__main__":
    sys.exit(main())
