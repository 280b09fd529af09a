"""What the notebooks show: sources, diffs, checks, ledgers, speeds. Each function returns what to display.

What is the same on every machine (pass or fail, byte counts, formulas) is kept apart from what is not (times,
errors, device names): the first is compared when the notebooks are tested, the second is not.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from IPython.display import Markdown
from matplotlib.figure import Figure

from common import experiments, jit
from common.chapters import Chapter, load_chapter, load_kernel
from common.check import compare_outputs, remembered_check
from common.debug_info import Frame
from common.diff import chapter_diff
from common.figures import H200, RooflinePoint, draw_roofline
from common.formulas import Problem
from common.ladder import Ladder, Rung, Settings, climb, machine
from common.measurements import FOLDER, find_ladder, find_sweep
from common.report import Report
from common.timing import backward_flops
from common.traffic import Location, Requests

# A ragged problem that the checker does in a second: two tiles and a bit.
SMALL = Problem(1, 2, 70, 70, 64, torch.float32)
BOOK = Problem(1, 1, 4096, 4096, 64, torch.float16)  # the book's N, one head
_FENCE = "```"

# What was imported stays until the end, and every collection would look through it: half a second a notebook.
gc.freeze()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what builds print to stderr out of a cell's stored output: only a first run would have it."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


# ---------------------------------------------------------------- sources


def _is_whole(lines: Sequence[str]) -> bool:
    text = "\n".join(lines)
    return "{" in text and text.count("{") == text.count("}")


def _functions(source: str) -> dict[str, str]:
    """Name → text of every function and struct of a kernel file, with the comment above it."""
    found: dict[str, str] = {}
    lines = source.splitlines()
    i = 0
    while i < len(lines):
        line = lines[i]
        starts = re.match(r"(__global__|__device__|struct |template|cudaError_t |void |int )", line)
        if not starts:
            i += 1
            continue
        end = i
        while end + 1 < len(lines) and not _is_whole(lines[i : end + 1]):
            end += 1
        text = "\n".join(lines[i : end + 1])
        first = i
        while first > 0 and lines[first - 1].startswith("//"):
            first -= 1
        head = text.split("{")[0]
        name = re.search(r"struct (\w+)", head) or re.search(r"(\w+)\(const|(\w+)\([A-Z]|(\w+)\(", head)
        if name is not None:
            key = next(group for group in name.groups() if group)
            if key == "__launch_bounds__":
                key = re.search(r"(\w+)\((?:const )?\w+Params", head).group(1)
            found[key] = "\n".join(lines[first : end + 1])
        i = end + 1
    return found


def show(chapter: str | int, *names: str) -> Markdown:
    """The source of functions and structs of a chapter's kernel; without names its header comment.

    What is not in the kernel file is looked for in the headers of ``common/cuda`` that it includes. Raises
    ValueError, naming what there is.
    """
    info = load_chapter(chapter).info
    if not names:
        source = info.kernel.read_text()
        return _cpp([info.kernel], source[: source.index("#include")].rstrip())
    found: dict[str, tuple[Path, str]] = {}
    for path in jit.kernel_sources(info.kernel):
        for name, text in _functions(path.read_text()).items():
            found.setdefault(name, (path, text))
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{info.name} has no {', '.join(missing)}; there are {', '.join(found)}")
    paths = dict.fromkeys(found[name][0] for name in names)
    return _cpp(list(paths), "\n\n".join(found[name][1] for name in names))


def _cpp(paths: list[Path], text: str) -> Markdown:
    files = ", ".join(f"`{path.relative_to(jit.REPO_ROOT)}`" for path in paths)
    return Markdown(f"{files}\n\n{_FENCE}cpp\n{text}\n{_FENCE}")


def show_diff(before: str | int, after: str | int, *, context: int = 2) -> Markdown:
    """What a chapter changes in the one before it."""
    lines = "\n".join(chapter_diff(before, after, context=context))
    return Markdown(f"{_FENCE}diff\n{lines}\n{_FENCE}")


# ---------------------------------------------------------------- checks


def check_gradients(chapter: str | int, problem: Problem = SMALL) -> Markdown:
    """Results against float64, within the error budget or not, full and causal, and the checker's findings.

    Runs on the checked CPU device.
    """
    loaded = load_chapter(chapter)
    rows = [
        "| mask | " + " | ".join(_results(loaded)) + " | checker |",
        "|---" * (len(_results(loaded)) + 2) + "|",
    ]
    for is_causal in (False, True):
        masked = replace(problem, is_causal=is_causal)
        report, inputs = remembered_check(loaded, masked)
        cells = {c.name: "within budget" if c.ok else "**over budget**"
                 for c in compare_outputs(loaded, masked, report, inputs)}  # fmt: skip
        found = f"**{len(report.findings)} findings**" if report.findings else "nothing found"
        shown = " | ".join(cells[name] for name in _results(loaded))
        rows.append(f"| {'causal' if is_causal else 'full'} | {shown} | {found} |")
    return Markdown("\n".join(rows))


def show_errors(chapter: str | int, problem: Problem = SMALL) -> Markdown:
    """The errors and budgets as numbers, which differ a little from machine to machine.

    ``common.reference.compare`` defines them.
    """
    loaded = load_chapter(chapter)
    report, inputs = remembered_check(loaded, problem)
    rows = ["| result | relative error | budget | worst element | its budget |", "|---|---:|---:|---:|---:|"]
    rows += [
        f"| {c.name} | {c.error:.1e} | {c.budget:.1e} | {c.worst:.1e} | {c.worst_budget:.1e} |"
        for c in compare_outputs(loaded, problem, report, inputs)
    ]
    rows.append(
        "\nrelative error: ‖result − float64‖ / ‖float64‖; worst element: largest difference over largest "
        "element. Notebook 00, section 6, explains the budgets."
    )
    return Markdown("\n".join(rows))


def _results(chapter: Chapter) -> tuple[str, ...]:
    return ("dq", "dk", "dv") if chapter.has_backward else ("out", "lse")


def edited_kernel(chapter: str | int, old: str, new: str = "") -> Chapter:
    """A copy of a chapter's kernel with one text replaced, to see what breaks; the chapter stays as it is.

    The text may stand in a header of ``common/cuda`` instead. The copy lies under ``out/``, in a folder named
    after what it contains, so that it is built once only. Raises ValueError if ``old`` does not occur exactly
    once.
    """
    info = load_chapter(chapter).info
    texts = {path: path.read_text() for path in jit.kernel_sources(info.kernel)}
    times = sum(text.count(old) for text in texts.values())
    if times != 1:
        raise ValueError(f"{old!r} occurs {times} times in {info.name} and its headers, not once")
    (path,) = (path for path, text in texts.items() if old in text)
    edited = texts[path].replace(old, new)
    if path != info.kernel:
        edited = jit.with_header_changed(info.kernel, path, edited)
    digest = hashlib.sha256(edited.encode()).hexdigest()[:12]
    path = jit.REPO_ROOT / "out" / "edited" / f"{info.name}-{digest}" / "edited.cu"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(edited)
    return load_kernel(path)


# ---------------------------------------------------------------- traffic


def requests_at(chapter: Chapter, report: Report, text: str) -> list[Requests]:
    """The requests of the lines, of a kernel or the headers of ``common/cuda``, in which a text stands.

    Raises ValueError if there is none.
    """
    sources = {path: path.read_text().splitlines() for path in jit.kernel_sources(chapter.info.kernel)}

    def has_text(place: Frame | Location | None) -> bool:
        return place is not None and place.file in sources and text in sources[place.file][place.line - 1]

    found = [r for r in report.traffic.lines() if has_text(r.where) or has_text(r.where.helper)]
    if not found:
        raise ValueError(f"no request of {chapter.info.name} comes from a line with {text!r}")
    return found


def _formulas_of(chapter: Chapter):  # noqa: ANN202
    formulas = chapter.info.formulas("backward" if chapter.has_backward else "forward")
    if formulas is None:
        raise ValueError(f"{chapter.name} has no formulas in its chapter.toml")
    return formulas


def ledger(chapter: str | int, problem: Problem = SMALL) -> Markdown:
    """Bytes that the checker counted, tensor by tensor, beside what the chapter's formulas give."""
    loaded = load_chapter(chapter)
    formulas = _formulas_of(loaded)
    report, _ = remembered_check(loaded, problem)
    predicted = formulas.predict(problem)
    counted = {**report.traffic.tensors, "shared": report.traffic.shared}
    rows = ["| memory | read | written | atomics | formula |", "|---|---:|---:|---:|---|"]
    for name, t in counted.items():
        p = predicted.get(name)
        same = p is not None and (t.read, t.written, t.atomics) == (p.read, p.written, p.atomics)
        verdict = "equal" if same else f"**differs**: {p}"
        rows.append(f"| `{name}` | {t.read:,} | {t.written:,} | {t.atomics or ''} | {verdict} |")
    added = sum(t.atomic_bytes for t in report.traffic.tensors.values())
    atomics = f". Atomics are numbers; the total includes the {added:,} bytes that they add" if added else ""
    rows.append(f"\n{report.what}: {report.traffic.bytes:,} bytes of global memory requested{atomics}.")
    return Markdown("\n".join(rows))


def formula_table(chapter: str | int) -> Markdown:
    """The chapter's traffic formulas as mathematics, and what their symbols mean."""
    formulas = _formulas_of(load_chapter(chapter))
    legend = "; ".join(f"${_subscripted(name)}$: {meaning}" for name, meaning in formulas.symbols.items())
    return Markdown(f"{formulas.latex()}\n{legend}.\n")


def _subscripted(name: str) -> str:
    letter, _, index = name.partition("_")
    return f"{letter}_{{{index}}}" if index else letter


def predicted_bytes(chapter: str | int, problem: Problem = BOOK) -> dict[str, int]:
    """Bytes by tensor that the formulas give, without running anything: read, written and added to."""
    predicted = _formulas_of(load_chapter(chapter)).predict(problem)
    return {name: t.bytes for name, t in predicted.items() if name != "shared"}


# ---------------------------------------------------------------- speed


def costs(
    *chapters: str | int,
    dtype: str = "bf16",
    head_dim: int = 64,
    seqlens: Sequence[int] = (1024, 4096),
    is_causal: bool = False,
) -> Markdown:
    """Backward TFLOP/s of chapters and of PyTorch's SDPA, and their ratio to its FLASH backward.

    On a GPU measured now, elsewhere the stored H200 measurements. TFLOP/s are 10·B·H·Nq·Nk·d over the time
    of all kernels of the pass, half of it when causal.
    """
    infos = [load_chapter(chapter).info for chapter in chapters]
    if jit.cuda_problem() is None:
        settings = Settings(
            "cuda", dtype, 1, 1024 // head_dim, head_dim, tuple(seqlens), is_causal, None, 1.0
        )
        ladder, source = climb(settings, infos), "measured now"
    else:
        ladder, source = find_ladder(dtype, head_dim, is_causal), "stored measurement"
    if ladder is None:
        return Markdown("Nothing is stored for these sizes yet; a blank means not measured.")
    names = [info.name for info in infos]
    names += sorted({r.name for r in ladder.rungs if r.name.startswith("SDPA")})
    heads = [f"N = {n}" for n in seqlens]
    rows = ["| backward TFLOP/s | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    for name in names:
        rows.append(f"| {name} | " + " | ".join(_speed(ladder, name, n) for n in seqlens) + " |")
    m = ladder.machine
    peak = f"; its bf16 matrix product reaches {m['matmul_tflops']} TFLOP/s" if "matmul_tflops" in m else ""
    mask = "causal" if is_causal else "full"
    rows.append(
        f"\n{source}: {m['device']}, {m['date']}, torch {m['torch']}; {dtype}, d = {head_dim}, "
        f"{ladder.settings.heads} heads, {mask}{peak}. In brackets: relative to SDPA FLASH."
    )
    return Markdown("\n".join(rows))


def beside_sdpa(*chapters: str | int, dtype: str = "bf16", forward: bool = False) -> Markdown:
    """Backward TFLOP/s with the card full of work, as ``make bench`` stored them, and the ratio to FLASH.

    ``forward``: of the forward pass. Chapters that were edited since they were measured are blank.
    """
    names = ["SDPA FLASH", "SDPA CUDNN", *(load_chapter(chapter).info.name for chapter in chapters)]
    rows: list[str] = []
    where = ""
    for head_dim, causal in product((64, 128), (False, True)):
        sweep = find_sweep(dtype, head_dim, causal)
        if sweep is None:
            continue
        seqlens, m = sweep.settings.seqlens, sweep.machine
        where = f"{m['device']}, {m['date']}, torch {m['torch']}; {dtype}, {sweep.settings.tokens:,} tokens"
        if not rows:
            rows = ["| d, mask | N = " + " | ".join(f"{n:,}" for n in seqlens) + " |"]
            rows.append("|---|" + "---:|" * len(seqlens))
        for name in names:
            cells = [sweep.cell(name, n, forward=forward) for n in seqlens]
            mask = "causal" if causal else "full"
            rows.append(f"| {head_dim}, {mask}: {name} | " + " | ".join(cells) + " |")
    if not rows:
        return Markdown("Nothing is stored yet: `make bench` measures it on a GPU.")
    note = f"{where}, all in turns in one process, with rests between. In brackets: relative to FLASH."
    return Markdown("\n".join([*rows, "", note]))


def _rung(ladder: Ladder, name: str, seqlen: int) -> Rung | None:
    return next((r for r in ladder.rungs if (r.name, r.seqlen) == (name, seqlen)), None)


def _speed(ladder: Ladder, name: str, seqlen: int) -> str:
    own, flash = _rung(ladder, name, seqlen), _rung(ladder, "SDPA FLASH", seqlen)
    if own is None or own.tflops is None:
        return ""
    ratio = f" ({flash.seconds / own.seconds:.3f} ×)" if flash and flash.seconds and own.seconds else ""
    return f"{own.tflops:.2f}{ratio}"


def roofline(*chapters: str | int, scratch_passes: Mapping[str, float] | None = None) -> Figure:
    """Where chapters stand under the H200's roofs: bf16, d = 64, full, N = 4096, 16 heads.

    Speeds are those of the stored ladder. Roofs are measured ones, the flat one by a product of fp32
    matrices; where none are stored, those of the data sheet, and a guess for L2. The title says which. An
    ideal cache moves every tensor once per pass, not once per kernel.

    Args:
        scratch_passes: how often all of a chapter's scratch memory crosses the bus, by chapter; 2 otherwise,
            written once and read once.
    """
    seqlen, heads, head_dim = 4096, 16, 64
    problem = Problem(1, heads, seqlen, seqlen, head_dim, torch.bfloat16)
    tensors = heads * seqlen * (8 * head_dim * 2 + 4)  # q k v out dout dq dk dv, and lse
    ladder = find_ladder("bf16", head_dim, False)
    points = []
    for chapter in chapters:
        loaded = load_chapter(chapter)
        scratch = loaded.workspace(
            batch=1, num_heads=heads, seqlen_q=seqlen, head_dim=head_dim, dtype=torch.bfloat16
        ).bytes
        ideal = tensors + (scratch_passes or {}).get(loaded.name, 2) * scratch
        rung = ladder.rung(loaded.name, seqlen) if ladder is not None else None
        requested = sum(predicted_bytes(chapter, problem).values())
        flops = backward_flops(1, heads, seqlen, seqlen, head_dim, False)
        points.append(RooflinePoint(loaded.name, flops, requested, ideal, rung.seconds if rung else None))
    machine = experiments.load("machine")
    if machine is None:
        figure = draw_roofline(points, H200.peak_flops, H200.hbm_bandwidth, 8e12, peak_name="fp32 peak")
        source = "roofs of the data sheet, L2 assumed"
    else:
        roofs = (machine[key] for key in ("matmul_flops_fp32", "hbm_bandwidth", "l2_bandwidth"))
        figure = draw_roofline(points, *roofs, peak_name="fp32 matrix product")
        source = f"roofs measured on {machine['machine']['device']}, {machine['machine']['date']}"
    figure.axes[0].set_title(
        f"bf16, d = {head_dim}, N = {seqlen}, {heads} heads, full; {source}", fontsize=10
    )
    return figure


def show_experiments(chapter: str | int, predictions: Mapping[str, str] | None = None) -> Markdown:
    """What was tried for a chapter on the H200, kept or dropped: ``measurements/experiments_mma.json``.

    predictions: by the experiment's id, what a model says; without one the cell says that none was made.
    """
    name = load_chapter(chapter).info.name
    data = json.loads((FOLDER / "experiments_mma.json").read_text())
    rows = ["| what | size | variant | the model says | measured | FLASH | |", "|---" * 7 + "|"]
    for e in data["experiments"]:
        if e["chapter"] != name:
            continue
        size = f"d = {e['head_dim']}, {e['mask']}, N = {' / '.join(map(str, e['seqlens']))}"
        flash = " / ".join(map(str, e["flash"])) if e["flash"] else ""
        note = f" ({'; '.join(filter(None, (e['note'], e['date'])))})"
        for i, v in enumerate(e["variants"]):
            spills = f", spills {v['spilled_bytes']} bytes" if "spilled_bytes" in v else ""
            measured = " / ".join(map(str, v["values"])) + ("" if e["unit"] == "TFLOP/s" else f" {e['unit']}")
            prediction = (predictions or {}).get(e["id"], "none was made") if i == 0 else ""
            head = f"{e['what']}{note} | {size}" if i == 0 else " | "
            verdict = "kept" if v["kept"] else "dropped"
            rows.append(
                f"| {head} | {v['name']}{spills} | {prediction} | {measured} | {flash if i == 0 else ''} | "
                f"{verdict} |"
            )
    rows.append(
        f"\n{data['gpu']}, torch {data['torch']}; {data['tokens']:,} tokens, heads × d = "
        f"{data['heads_times_head_dim']:,}. {data['note']}"
    )
    return Markdown("\n".join(rows))


# ---------------------------------------------------------------- provenance


def source_hash(chapter: str | int) -> str:
    """Hash of the kernel file and the headers it includes. A stored notebook with another one is stale."""
    info = load_chapter(chapter).info
    return f"{info.name}: {jit.kernel_digest(info.kernel)}"


def provenance() -> str:
    """The machine and the versions that the outputs come from."""
    device = torch.device("cuda" if jit.cuda_problem() is None else "cpu")
    return ", ".join(f"{key} {value}" for key, value in machine(device).items())
