"""What the checker counts beside what the GPU's own counters say: ``make counters``.

Runs a few chapters under Nsight Compute (``ncu``) and stores its counters, kernel by kernel, in
``notebooks/measurements/counters.json``. ``--page`` needs no GPU: it counts the same launches on the checked
CPU device and writes the comparison, ``notebooks/measurements/counters.md``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common import jit, ncu
from common.chapters import load_chapter
from common.check import check_chapter
from common.formulas import Problem
from common.inputs import random_inputs
from common.measurements import FOLDER
from common.traffic import SHARED, Requests, Traffic

JSON, PAGE = FOLDER / "counters.json", FOLDER / "counters.md"
CHAPTERS = ("01_naive", "02_tiled", "08_preprocess_delta")
PROBLEM = Problem(1, 2, 512, 512, 64, torch.float32)
_WORKER = "--worker"
_SECTOR = 32


def _counts(memory: Callable[[Requests], bool], operation: str, field: str) -> Callable[[Traffic], int]:
    return lambda traffic: sum(
        getattr(r, field) for r in traffic.requests if memory(r) and r.operation == operation
    )


def _is_shared(r: Requests) -> bool:
    return r.memory == SHARED


def _is_global(r: Requests) -> bool:
    return r.memory != SHARED


@dataclass(frozen=True)
class Counter:
    """A hardware counter, and what the checker has for it (None: nothing)."""

    title: str
    metric: str
    counted: Callable[[Traffic], int] | None


def _bytes_in(traffic: Traffic) -> int:
    """What an ideal cache reads: everything read once, and the targets of reductions, which L2 adds to."""
    added = {(r.kernel, r.memory) for r in traffic.requests if r.operation == "atomic"}
    return sum(
        read + (written if (kernel, memory) in added else 0)
        for kernel, memory, read, written in traffic.unique
    )


def _bytes_out(traffic: Traffic) -> int:
    return sum(written for _, _, _, written in traffic.unique)


COUNTERS = (
    Counter("global loads, requests", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
            _counts(_is_global, "read", "requests")),
    Counter("global loads, sectors", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
            _counts(_is_global, "read", "transactions")),
    Counter("global stores, requests", "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
            _counts(_is_global, "write", "requests")),
    Counter("global stores, sectors", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
            _counts(_is_global, "write", "transactions")),
    Counter("reductions, requests", "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum",
            _counts(_is_global, "atomic", "requests")),
    Counter("reductions, sectors", "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
            _counts(_is_global, "atomic", "transactions")),
    Counter("shared loads, instructions", "smsp__sass_inst_executed_op_shared_ld.sum",
            _counts(_is_shared, "read", "requests")),
    Counter("shared loads, wavefronts", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
            _counts(_is_shared, "read", "transactions")),
    Counter("shared stores, instructions", "smsp__sass_inst_executed_op_shared_st.sum",
            _counts(_is_shared, "write", "requests")),
    Counter("shared stores, wavefronts", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
            _counts(_is_shared, "write", "transactions")),
    Counter("L2 reads, sectors", "lts__t_sectors_op_read.sum", None),
    Counter("DRAM read, bytes", "dram__bytes_read.sum", _bytes_in),
    Counter("DRAM written, bytes", "dram__bytes_write.sum", _bytes_out),
)  # fmt: skip


# ---------------------------------------------------------------- on the GPU


def _run_on_gpu(name: str) -> None:
    """What ncu watches: one backward pass."""
    p = PROBLEM
    x = random_inputs(
        p.batch, p.num_heads, p.seqlen_q, p.head_dim, seqlen_k=p.seqlen_k, dtype=p.dtype, device="cuda"
    )
    chapter = load_chapter(name)
    out, lse = chapter.forward(x.q, x.k, x.v)
    chapter.backward(x.q, x.k, x.v, out, x.dout, lse)
    torch.cuda.synchronize()


def _bare_name(kernel: str) -> str:
    """``void <unnamed>::product_kernel<(bool)1>(AttentionSizes, ...)`` → ``product_kernel``."""
    name = re.sub(r"(<unnamed>|\(anonymous namespace\))::", "", kernel)
    return re.split(r"[<(]", name)[0].split()[-1]


def _profile(name: str) -> dict[str, dict[str, float]]:
    """Kernel → metric → value; kernels of one name are added up."""
    kernels = sorted(set(re.findall(r"\b\w+_kernel\b", load_chapter(name).info.kernel.read_text())))
    options = ["--clock-control", "none", "--kernel-name", f"regex:^({'|'.join(kernels)})"]
    options += ["--metrics", ",".join(c.metric for c in COUNTERS)]
    table = ncu.raw_table(options, ["common.counters", _WORKER, name])
    values: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        if not row["ID"]:
            continue  # the line of units
        kernel = _bare_name(row["Kernel Name"])
        sums = values.setdefault(kernel, {})
        for counter in COUNTERS:
            sums[counter.metric] = sums.get(counter.metric, 0.0) + float(row[counter.metric].replace(",", ""))
    return values


def measure(folder: Path) -> int:
    """Profiles the chapters and stores the counters. Returns the exit status."""
    if problem := ncu.problem():
        print(f"nothing to measure: {problem}", file=sys.stderr)
        return 2
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=True).stdout
    data = {
        "machine": {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "ncu": version.strip().splitlines()[-1],
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
        "problem": _problem_as_json(),
        "chapters": {},
    }
    for name in CHAPTERS:
        _run_on_gpu(name)  # builds, outside of the profiler
        values = _profile(name)
        data["chapters"][name] = {
            "source": jit.kernel_digest(load_chapter(name).info.kernel),
            "kernels": values,
        }
        print(f"{name}: {', '.join(values)}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON.name).write_text(json.dumps(data, indent=1) + "\n")
    return 0


def _problem_as_json() -> dict[str, object]:
    return {**asdict(PROBLEM), "dtype": str(PROBLEM.dtype).removeprefix("torch.")}


# ---------------------------------------------------------------- the page


def count(name: str) -> Traffic:
    """The same launches on the checked CPU device."""
    report, _ = check_chapter(load_chapter(name), PROBLEM)
    assert report.error is None
    return report.traffic


def _rows(measured: dict[str, dict[str, float]], traffic: Traffic) -> Iterable[str]:
    for kernel, values in measured.items():
        part = traffic.of_kernel(kernel)
        for counter in COUNTERS:
            seen = values[counter.metric]
            counted = None if counter.counted is None else counter.counted(part)
            if not seen and not counted:
                continue
            ratio = f"{seen / counted:.3f}" if counted else ""
            shown = "" if counted is None else f"{counted:,}"
            yield f"| `{kernel}` | {counter.title} | {shown} | {seen:,.0f} | {ratio} |"


def page(text: str) -> str:
    """The comparison as Markdown, between the generated markers of ``text``."""
    data = json.loads(JSON.read_text())
    machine = data["machine"]
    lines = [
        f"{machine['device']}, {machine['ncu']}, CUDA {machine['cuda']}, {machine['date']}; fp32, "
        f"{PROBLEM.num_heads} heads, N = {PROBLEM.seqlen_q}, d = {PROBLEM.head_dim}, full.",
    ]
    for name in CHAPTERS:
        entry = data["chapters"][name]
        lines += ["", f"## {name}", ""]
        if entry["source"] != jit.kernel_digest(load_chapter(name).info.kernel):
            lines.append("Its sources have changed since it was measured.")
            continue
        lines += ["| kernel | what | checker | ncu | ncu ÷ checker |", "|---|---|---:|---:|---:|"]
        lines += _rows(entry["kernels"], count(name))
    start, end = "<!-- generated by make counters-page -->", "<!-- end -->"
    head, tail = text.split(start)[0], text.split(end)[1]
    return head + start + "\n" + "\n".join(lines) + "\n" + end + tail


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.counters", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--page", action="store_true", help="write the page from what is stored; needs no GPU"
    )
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write the counters to")
    parser.add_argument(_WORKER, metavar="CHAPTER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _run_on_gpu(options.worker)
        return 0
    if options.page:
        PAGE.write_text(page(PAGE.read_text()))
        return 0
    return measure(options.output)


if __name__ == "__main__":
    sys.exit(main())
