"""Compiling a submission and running it on the checked CPU device, in other processes.

The parent makes the inputs and lays out the memory; the child gets it as a file, runs the kernel there and
writes the checker's log. What comes back is bytes and text, read with suspicion.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import jit
from common.arena import ROLE_FLAGS, Arena, Log
from common.chapters import ChapterInfo
from common.grade import sandbox
from common.grade.cases import Case
from common.grade.scan import foreign_headers
from common.inputs import Inputs
from common.report import Report, read_report

ENTRY = Path(__file__).with_name("entry.cpp")
MAX_GRID_Y = 2  # blocks of the scalar chapters walk over several tiles, where a missing barrier shows
_GAP = 1 << 16
_MAX_SCRATCH = 256 << 20
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RUN = sandbox.Limits(wall_seconds=30, cpu_seconds=30)


class CompileError(Exception):
    """A submission does not compile. lines: of its file."""

    def __init__(self, message: str, lines: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.lines = list(lines)


class RunError(Exception):
    """A submission's process did not end as it should, or what it wrote cannot be read."""

    timed_out = False


@dataclass(frozen=True)
class Library:
    """A compiled submission."""

    path: Path
    source: Path
    device: Path
    dtype: torch.dtype
    head_dim: int


def _flags(dtype: torch.dtype, head_dim: int) -> list[str]:
    return [
        "-fPIC", "-std=c++20", *jit.checked_flags(), *jit.library_flags(), *jit.define_flags(dtype, head_dim),
        "-g", f"-DFA2_WORKSPACE_GAP={_GAP}", f"-DFA2_MAX_GRID_Y={MAX_GRID_Y}",
        f"-I{jit.CPU_DEVICE}", f"-I{jit.REPO_ROOT}",
    ]  # fmt: skip


def _headers() -> list[Path]:
    return [
        path for folder in sandbox.kernel_folders() for path in sorted(folder.rglob("*")) if path.is_file()
    ]


def _entry(dtype: torch.dtype, head_dim: int) -> Path:
    """The compiled entry.cpp, which is ours and the same for all submissions."""
    command = [jit.host_compiler(), *_flags(dtype, head_dim), "-c", str(ENTRY)]
    return jit.made_once("grade_entry", ".o", command, [ENTRY, *_headers()])


def checked_device() -> Path:
    """The runtime of the checked CPU device, built without PyTorch, which the sandbox does not have."""
    sources = [*sorted(jit.CPU_DEVICE.glob("*.cpp")), *sorted((jit.CPU_DEVICE / "checked").glob("*.cpp"))]
    command = [
        jit.host_compiler(), "-fPIC", "-shared", "-std=c++20", "-O2", "-pthread", *jit.library_flags(),
        "-DCPU_DEVICE_CHECKED", *map(str, sources),
    ]  # fmt: skip
    return jit.made_once("grade_device", ".so", command, [*sources, *_headers()])


def prepare(builds: set[tuple[torch.dtype, int]]) -> None:
    """Makes what all submissions share, once, before several processes want it."""
    checked_device()
    for dtype, head_dim in builds:
        _entry(dtype, head_dim)


def compile_submission(text: str, name: str, folder: Path, dtype: torch.dtype, head_dim: int) -> Library:
    """Compiles the text of a kernel file called ``name`` in an empty folder. Raises ``CompileError``."""
    device = checked_device()
    entry = _entry(dtype, head_dim)
    folder = folder.resolve()
    source, wrapper, library = folder / name, folder / "wrapper.cpp", folder / "submission.so"
    source.write_text(text)
    wrapper.write_text(f'#include "{source}"\n')
    compiler = subprocess.run(
        ["which", jit.host_compiler()], capture_output=True, text=True, check=True
    ).stdout.strip()
    # Linked without the compile flags: they would bring in GCC's own thread sanitizer.
    commands = [
        [compiler, *_flags(dtype, head_dim), "-MMD", "-MF", str(folder / "depends"), "-c", str(wrapper), "-o",
         str(folder / "kernel.o")],
        [compiler, "-shared", str(folder / "kernel.o"), str(entry), "-o", str(library),
         *jit.runtime_link_flags(device, checked=True)],
    ]  # fmt: skip
    ended = sandbox.confined(
        {"action": "execute", "commands": commands}, folder, sandbox.COMPILE,
        readable=[*sandbox.kernel_folders(), entry, device],
    )  # fmt: skip
    if ended.code != 0 or ended.timed_out or not library.is_file():
        if ended.timed_out:
            raise CompileError(f"the compiler did not finish in {ended.seconds:.0f} s")
        said = jit.compiler_lines(ended.said.replace(f"{folder}/", ""))
        lines = [int(n) for n in re.findall(rf"^{re.escape(name)}:(\d+)", said, re.MULTILINE)]
        raise CompileError(said or f"the compiler failed: {ended}", lines)
    depends = (folder / "depends").read_text()
    if foreign := foreign_headers(depends, folder, sandbox.kernel_folders()):
        raise CompileError(f"includes {', '.join(foreign)}: neither CUDA's headers nor those of common/cuda")
    return Library(library, source, device, dtype, head_dim)


def _plain_case(case: Case, head_dim: int, backward: bool) -> dict[str, Any]:
    return {
        "backward": backward, "batch": case.batch, "num_heads": case.num_heads, "seqlen_q": case.seqlen_q,
        "seqlen_k": case.seqlen_k, "is_causal": case.is_causal, "deterministic": case.deterministic,
        "softmax_scale": case.scale(head_dim),
    }  # fmt: skip


def _results(folder: Path) -> Path:
    path = folder / "results"
    path.write_bytes(b"")
    return path


def describe(
    library: Library, cases: Sequence[Case], pass_: str
) -> list[list[tuple[str, torch.dtype, tuple[int, ...], int]]]:
    """The parts of each case's scratch memory: name, dtype, shape, offset. Raises ``RunError``."""
    folder = library.path.parent
    results = _results(folder)
    plain = [_plain_case(case, library.head_dim, pass_ == "backward") for case in cases]
    job = {
        "action": "describe",
        "library": str(library.path),
        "results": str(results),
        "pass": pass_,
        "cases": plain,
    }
    ended = sandbox.confined(job, folder, RUN, readable=[library.device])
    try:
        answer = json.loads(results.read_text())
        if pass_ not in answer["passes"]:
            raise RunError(f"the file defines no launch_{pass_}()")
        layouts = [_parse_layout(layout) for layout in answer["layouts"]]
        if len(layouts) != len(cases):
            raise ValueError("as many layouts as cases")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        said = f": {ended.said.strip().splitlines()[-1][:300]}" if ended.said.strip() else ""
        raise RunError(f"asked for its scratch memory (describe_workspace), {ended}{said}") from None
    return layouts


def _parse_layout(text: str) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    parts = []
    for line in text.splitlines():
        name, dtype, offset, _, *shape = line.split()
        extents = tuple(int(n) for n in shape)
        if not re.fullmatch(r"\w{1,40}", name) or any(n < 0 for n in extents) or int(offset) < 0:
            raise ValueError(f"no scratch part: {line!r}")
        if int(offset) + prod(extents) * _DTYPES[dtype].itemsize > _MAX_SCRATCH:
            raise RunError(
                f"asks for {prod(extents):,} elements of scratch memory ({name}): more than the grader has"
            )
        parts.append((name, _DTYPES[dtype], extents, int(offset)))
    return parts


def run_case(
    library: Library,
    case: Case,
    x: Inputs,
    saved: tuple[Tensor, Tensor] | None,
    layout: list[tuple[str, torch.dtype, tuple[int, ...], int]],
    info: ChapterInfo,
) -> tuple[dict[str, Tensor], Report]:
    """Runs one case. saved: out and lse for a backward pass, None for a forward pass.

    Returns the results by name, and the checker's report. Raises ``RunError``.
    """
    backward = saved is not None
    arena = Arena()
    inputs: dict[str, Tensor] = {"q": x.q, "k": x.k, "v": x.v}
    if saved is not None:
        inputs |= {"out": case.laid_out(saved[0]), "dout": x.dout, "lse": saved[1].contiguous()}
        shapes = {"dq": x.q, "dk": x.k, "dv": x.v}
        outputs = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in shapes.items()}
    else:
        outputs = {"out": torch.empty(x.q.shape, dtype=x.q.dtype, device="meta"),
                   "lse": torch.empty(x.q.shape[:3], device="meta")}  # fmt: skip
    for name, tensor in inputs.items():
        arena.add(name, tensor, "input")
    for name, tensor in outputs.items():
        arena.add(name, tensor, "output")
    size = max((offset + prod(shape) * dtype.itemsize for _, dtype, shape, offset in layout), default=1)
    scratch = arena.add("workspace", torch.empty(size + _GAP, dtype=torch.uint8), "scratch")
    tensors = arena.allocate()
    parts = {scratch: [arena.part(scratch, *part) for part in layout]}
    names = [*inputs, *outputs]
    by_name = dict(zip(names, tensors[:scratch], strict=True))
    buffer = arena.buffer
    base = buffer.data_ptr()
    places = {name: by_name[name].data_ptr() - base for name in inputs}
    places |= dict(
        zip(("first", "second", "third"), (by_name[n].data_ptr() - base for n in outputs), strict=False)
    )
    places["workspace"] = tensors[scratch].data_ptr() - base

    log, regions, masks, end = Log(), [], [], buffer.numel()
    for memory, valid in arena.regions(parts):
        where = None
        if valid is not None:
            where, end = end, end + valid.numel()
            masks.append(valid)
        bytes_ = memory.span * memory.dtype.itemsize
        regions.append(
            [memory.name, memory.offset, bytes_, memory.dtype.itemsize, where, ROLE_FLAGS[memory.role]]
        )
        log.memories.append(memory)
    folder = library.path.parent
    memory_file, results = folder / "memory", _results(folder)
    with memory_file.open("wb") as file:
        for block in (buffer, *masks):
            file.write(block.numpy().tobytes())
    strided = [by_name[n] for n in ("q", "k", "v", *(("out", "dout") if backward else ()))]
    job = {
        "action": "run", "library": str(library.path), "device": str(library.device), "results": str(results),
        "memory": str(memory_file),
        "case": {
            **_plain_case(case, library.head_dim, backward), "places": places, "bytes": buffer.numel(),
            "regions": regions, "strides": [list(t.stride()[:3]) for t in strided],
        },
    }  # fmt: skip
    ended = sandbox.confined(job, folder, RUN, readable=[library.device])
    try:
        error, log.text = _read_results(results, ended, library)
        with memory_file.open("rb") as file:
            handed_back = bytearray(file.read(buffer.numel()))
        if len(handed_back) != buffer.numel():
            raise RunError("the memory that came back has another size")
        buffer.copy_(torch.frombuffer(handed_back, dtype=torch.uint8))
        report = read_report(log, library.source, str(case), error=error or None, seconds=ended.seconds)
    except RunError:
        raise
    except Exception as error:  # whatever a forged log makes the reader do
        raise RunError(
            f"what the checker wrote cannot be read ({type(error).__name__}): was it overwritten?"
        ) from error
    finally:
        memory_file.unlink()
    return {name: by_name[name].clone() for name in outputs}, report


def _read_results(path: Path, ended: sandbox.Ended, library: Library) -> tuple[str, str]:
    """What the pass returned, and the checker's log."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if ended.code != 0 or ended.timed_out or len(data) < 8 or len(data) < 8 + length:
        said = [line for line in ended.said.strip().splitlines() if line.strip()]
        last = f": {said[-1][:300]}" if said else ""
        failure = RunError(f"the run gave no result: {ended}{last}")
        failure.timed_out = ended.timed_out
        raise failure
    error, log = data[8 : 8 + length].decode(errors="replace"), data[8 + length :].decode(errors="replace")
    for line in log.splitlines():
        kind, *fields = line.split("\t")
        if kind == "launch" and fields[5] not in ("", str(library.path)):
            raise RunError("the checker's log names another library: it was forged")
    return error, log
