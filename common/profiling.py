"""Where the time of the main kernels goes, by Nsight Compute: ``make profile``.

Runs the chapters that use tensor cores under ``ncu`` and stores, for each head_dim, how busy the units of an
SM are and what a warp spends its cycles on, in ``notebooks/measurements/profile.json``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import re
import sys
from pathlib import Path

import torch

from common import jit, ncu, sweep
from common.chapters import load_chapter
from common.measurements import FOLDER, is_current

JSON = FOLDER / "profile.json"
SETTINGS = sweep.SweepSettings("cuda", "bf16", 64, causal=False)  # of which head_dim is replaced
SEQLEN = 4096
HEAD_DIMS = (64, 128)
_WORKER = "--worker"

# Of the units, in per cent of the most they can do.
UNITS = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM: its busiest pipe",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 and shared memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
}
# What a warp does in a cycle. Nsight Compute, "Kernel Profiling Guide", warp scheduler states.
REASONS = {
    "selected": "issues an instruction",
    "wait": "fixed latency of its last instruction",
    "short_scoreboard": "data from shared memory, an exponential",
    "math_pipe_throttle": "a pipe is busy",
    "gmma": "products of a warpgroup",
    "barrier": "a barrier",
    "long_scoreboard": "data from L2 or further",
    "not_selected": "another warp's turn",
}
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"


def _run_on_gpu(name: str, head_dim: int) -> None:
    """What ncu watches: two backward passes, of which it takes the second."""
    settings = sweep.SweepSettings(SETTINGS.device, SETTINGS.dtype, head_dim, SETTINGS.causal)
    x = sweep.draw(settings, SEQLEN, torch.device("cuda"))
    chapter = load_chapter(name)
    out, lse = chapter.forward(x.q, x.k, x.v)
    for _ in range(2):
        chapter.backward(x.q, x.k, x.v, out, x.dout, lse)
    torch.cuda.synchronize()


def read_raw(table: str) -> tuple[dict[str, float], dict[str, float]]:
    """(per cent by unit, share of a warp's cycles by reason), of what ncu prints about one kernel."""
    header, _, *rows = list(csv.reader(io.StringIO(table)))
    values = {name: cell.replace(",", "") for name, cell in zip(header, rows[-1], strict=True)}
    units = {metric: float(values[metric]) for metric in UNITS}
    stalls = {m[1]: float(values[name]) for name in header if (m := _STALL.fullmatch(name)) and values[name]}
    latency = float(values[_LATENCY])
    return units, {reason: cycles / latency for reason, cycles in stalls.items()}


def _profile(name: str, head_dim: int) -> tuple[dict[str, float], dict[str, float]]:
    options = ["--kernel-name", "regex:^backward_kernel", "--launch-skip", "1", "--launch-count", "1"]
    options += ["--section", "SpeedOfLight", "--section", "WarpStateStats"]
    return read_raw(ncu.raw_table(options, ["common.profiling", _WORKER, name, str(head_dim)]))


def measure(folder: Path) -> int:
    """Profiles the chapters and stores the numbers. Returns the exit status."""
    if problem := ncu.problem():
        print(f"nothing to measure: {problem}", file=sys.stderr)
        return 2
    infos = sweep.tensor_core_chapters()
    sweep.build_all(infos, [SETTINGS.dtype], HEAD_DIMS)
    data = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "dtype": SETTINGS.dtype,
        "seqlen": SEQLEN,
        "tokens": SETTINGS.tokens,
        "width": SETTINGS.width,
        "profiles": [],
    }
    for info in infos:
        if problem := load_chapter(info.name).gpu_problem(torch.device("cuda")):
            print(f"{info.name}: {problem}")
            continue
        for head_dim in HEAD_DIMS:
            units, reasons = _profile(info.name, head_dim)
            data["profiles"].append(
                {
                    "chapter": info.name,
                    "source": jit.kernel_digest(info.kernel),
                    "head_dim": head_dim,
                    "units": units,
                    "reasons": reasons,
                }
            )
            print(f"{info.name}, head_dim {head_dim}: {units}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON.name).write_text(json.dumps(data, indent=1) + "\n")
    return 0


def table(*names: str, path: Path = JSON) -> str:
    """What is stored of some chapters, as Markdown. Those edited since are left out."""
    if not path.is_file():
        return "Nothing is stored yet: `make profile` measures it on a GPU."
    data = json.loads(path.read_text())
    profiles = [
        p for p in data["profiles"] if p["chapter"] in names and is_current(p["chapter"], p["source"])
    ]
    if not profiles:
        return "The kernels were edited since they were profiled: `make profile` measures again."
    heads = " | ".join(f"{p['chapter'][:2]}, d = {p['head_dim']}" for p in profiles)
    rows = [f"| busy, % of what it can do | {heads} |", "|---|" + "---:|" * len(profiles)]
    for metric, title in UNITS.items():
        rows.append(f"| {title} | " + " | ".join(f"{p['units'][metric]:.0f}" for p in profiles) + " |")
    rows += ["", f"| a warp's cycles, % | {heads} |", "|---|" + "---:|" * len(profiles)]
    for reason, title in REASONS.items():
        shares = [p["reasons"].get(reason, 0.0) for p in profiles]
        if max(shares) >= 0.005:
            rows.append(f"| {title} | " + " | ".join(f"{100 * share:.0f}" for share in shares) + " |")
    rest = [sum(v for k, v in p["reasons"].items() if k not in REASONS) for p in profiles]
    rows.append("| other | " + " | ".join(f"{100 * share:.0f}" for share in rest) + " |")
    note = (
        f"{data['device']}, {data['date']}, Nsight Compute; {data['dtype']}, N = {data['seqlen']:,}, "
        f"{data['tokens']:,} tokens, the main kernel alone, at the clock that Nsight Compute sets."
    )
    return "\n".join([*rows, "", note])


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.profiling", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    parser.add_argument(_WORKER, nargs=2, metavar=("CHAPTER", "HEAD_DIM"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _run_on_gpu(options.worker[0], int(options.worker[1]))
        return 0
    return measure(options.output)


if __name__ == "__main__":
    sys.exit(main())
