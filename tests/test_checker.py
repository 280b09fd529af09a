"""The checker on small CUDA programs that know nothing about attention, and on every chapter.

Each program of ``tests/checker`` is a list of kernels. Beside each mistake stands a kernel that does the same
correctly; it must give no finding. Traffic is compared with what the kernel's sizes say.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import BF16, FP16, FP32, axes_swapped, chapter_parameters, draw, loaded, same_bits
from torch import Tensor

from common import Chapter, jit, list_chapters, load_chapter
from common.arena import Arena
from common.check import remembered_check
from common.formulas import Problem
from common.notebook import edited_kernel
from common.report import Report, read_report
from common.traffic import SHARED, Requests, TensorTraffic, Traffic

REPO = Path(__file__).resolve().parent.parent
PROGRAMS = REPO / "tests" / "checker"
COMPILERS = {"g++ -O1": ("g++", "-O1"), "g++ -O2": ("g++", "-O2"),
             "clang++ -O1": ("clang++", "-O1"), "clang++ -O2": ("clang++", "-O2")}  # fmt: skip
GAP = 1 << 16  # between the two parts of the scratch memory
PART = 32  # floats in each

# ---------------------------------------------------------------- building and running


class Memory(ctypes.Structure):
    """``Memory`` of program.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "scratch", "second_part")),
        ("n", ctypes.c_int),
        ("turn", ctypes.c_int),
    )


@dataclass(frozen=True)
class Program:
    name: str
    library: ctypes.CDLL
    runtime: ctypes.CDLL

    def check(self, case: str, x: Tensor | None = None, num_outputs: int = 32, schedule: int = -1) -> Report:
        """x: 32 numbers, by default. schedule: -1 is in order, others are seeds."""
        x = torch.arange(1.0, 33) if x is None else x
        arena = Arena()
        arena.add("x", x, "input")
        arena.add("y", torch.empty(num_outputs), "output")
        scratch = arena.add("workspace", torch.empty(GAP + 4 * PART, dtype=torch.uint8), "scratch")
        copy, outputs, workspace = arena.allocate()
        parts = [arena.part(scratch, name, FP32, (PART,), i * GAP) for i, name in enumerate(("w", "z"))]
        start = workspace.data_ptr()
        memory = Memory(copy.data_ptr(), outputs.data_ptr(), start, start + GAP, x.numel(), 0)
        self.runtime.cpu_device_set_schedule(schedule)
        with arena.watched(self.runtime, {scratch: parts}) as log:
            error = self.library.run(case.encode(), ctypes.byref(memory))
        text = None if error is None else error.decode()
        assert text != "there is no case of this name", case
        report = read_report(log, PROGRAMS / f"{self.name}.cu", case, error=text, seconds=0.0)
        report.outputs = (outputs.clone(),)
        return report


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keeps the other workers of pytest-xdist from making ``path`` too."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_command(command: list[str], **kwargs: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)
    assert result.returncode == 0, (
        f"{' '.join(command)} -> {result.returncode}\n{result.stdout}{result.stderr}"
    )
    return result.stdout


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the workers of pytest-xdist, so that each program is built once."""
    root = tmp_path_factory.getbasetemp()
    path = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "checker"
    path.mkdir(exist_ok=True)
    return path


@functools.cache
def program(name: str, variant: str, folder: Path) -> Program:
    """A program of ``tests/checker``, built by a compiler as a checked build of a kernel is."""
    compiler, optimize = COMPILERS[variant]
    if shutil.which(compiler) is None:
        if compiler == "g++":
            pytest.fail("the CPU device needs g++, which is not on PATH")
        pytest.skip(f"{compiler} is not on PATH")
    device, runtime = jit.load_cpu_device(checked=True)
    runtime.cpu_device_set_block_timeout.argtypes = [ctypes.c_double]
    target = folder / f"{name}_{variant.replace(' ', '')}.so"
    with exclusive(target):
        if not target.exists():
            unfinished = target.with_suffix(".unfinished")  # a failed build must not pass for a result
            flags = jit.checked_flags(optimize, clang="clang" in compiler)
            options = ["-std=c++17", "-g", "-fPIC", f"-I{jit.CPU_DEVICE}", f"-I{REPO}"]
            source = ["-x", "c++", "-c", str(PROGRAMS / f"{name}.cu")]
            run_command([compiler, *flags, *options, *source, "-o", f"{target}.o"])
            link = jit.runtime_link_flags(device, checked=True)
            run_command([compiler, "-shared", f"{target}.o", *link, "-o", str(unfinished)])
            unfinished.rename(target)
    library = ctypes.CDLL(str(target))
    library.run.restype = ctypes.c_char_p
    return Program(name, library, runtime)


@pytest.fixture(params=["g++ -O1", "clang++ -O1"])
def build(request: pytest.FixtureRequest, folder: Path) -> Callable[[str], Program]:
    return lambda name: program(name, request.param, folder)


@pytest.fixture(params=COMPILERS)
def any_build(request: pytest.FixtureRequest, folder: Path) -> Callable[[str], Program]:
    return lambda name: program(name, request.param, folder)


@functools.cache
def line_of(marker: str) -> tuple[str, int]:
    """File and line of ``// LINE marker``."""
    found = [
        (path.name, number)
        for path in sorted(PROGRAMS.glob("*.cu"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"// LINE {re.escape(marker)}$", line)
    ]
    assert len(found) == 1, f"{marker} is marked {len(found)} times"
    return found[0]


def at(marker: str) -> str:
    file, line = line_of(marker)
    return f"{file}:{line}"


# ---------------------------------------------------------------- every kind of mistake


@dataclass(frozen=True)
class Mistake:
    """A case, and the one finding that it gives.

    where, other: markers of lines; the case's name by default. text: the message with {where} and {other}.
    ends: the block cannot go on. size: of x. any_thread: it depends on the order of threads.
    """

    case: str
    tool: str
    text: str
    where: str | None = ""
    other: str | None = None
    block: tuple[int, ...] | None = (0, 0, 0)
    thread: tuple[int, ...] | None = (0, 0, 0)
    memory: str | None = None
    index: tuple[int, ...] | None = None
    count: int = 1
    num_outputs: int = 32
    ends: bool = False
    size: int = 32


def out_of_bounds(case: str, access: str, where: str, **fields: object) -> Mistake:
    x, _, _ = fields["thread"]
    b, _, _ = fields.get("block", (0, 0, 0))
    text = f"thread ({x},0,0) of block ({b},0,0) {access} at {{where}}, out of bounds: {where}"
    return Mistake(case, "memcheck", text, **fields)


def unwritten(case: str, access: str, **fields: object) -> Mistake:
    x, _, _ = fields["thread"]
    b, _, _ = fields.get("block", (0, 0, 0))
    text = f"thread ({x},0,0) of block ({b},0,0) {access} at {{where}}, which nothing has written before"
    return Mistake(case, "initcheck", text, **fields)


def race(case: str, text: str, **fields: object) -> Mistake:
    """Two lines, marked case.write and case.read where nothing else is said."""
    fields = {"where": f"{case}.read", "other": f"{case}.write", "num_outputs": 64, "size": 64} | fields
    return Mistake(case, "racecheck", f"{text}, with no barrier between", **fields)


def race_of_blocks(case: str, text: str, **fields: object) -> Mistake:
    text = f"{text}, and nothing orders the blocks of a launch"
    return Mistake(case, "racecheck", text, **fields)


def stop(case: str, text: str, tool: str = "synccheck", **fields: object) -> Mistake:
    """Thread 37 of block 1, in the middle of everything, cannot go on."""
    fields = {"block": (1, 0, 0), "thread": (37, 0, 0), "num_outputs": 128, "ends": True, "size": 64} | fields
    return Mistake(case, tool, text, **fields)


def under_way(case: str, text: str, **fields: object) -> Mistake:
    """An access to where a copy of another thread may still be writing."""
    fields = {"where": f"{case}.read", "other": f"{case}.copy", "num_outputs": 64, "size": 256} | fields
    end = (
        "may be under way: no cp_async_wait() of that thread covers it, or no barrier follows the wait"
        if "that thread" in text
        else "may be under way: no cp_async_wait() between covers it"
    )
    return Mistake(case, "racecheck", f"{text} at {{other}} {end}", **fields)


def stop_early(case: str, text: str, thread: int, **fields: object) -> Mistake:
    """Of the cases with named barriers: in the only block."""
    fields = {"block": (0, 0, 0), "size": 256} | fields
    return stop(case, f"thread ({thread},0,0) of block (0,0,0): {text}", thread=(thread, 0, 0), **fields)


NOWHERE = "the address is in no tensor, scratch part or shared array"
LATE = (
    "thread (37,0,0) of block (1,0,0): the block has not ended after 0.2 s (endless loop?); the limit is "
    "FA2_CPU_BLOCK_TIMEOUT seconds"
)

MISTAKES = {
    "memory": [
        out_of_bounds("reads_before_start", "reads 4 bytes", "4 bytes before the start of x [32]",
                      thread=(0, 0, 0), memory="x"),
        out_of_bounds("reads_past_end", "reads 4 bytes", "just past the end of x [64]",
                      thread=(31, 0, 0), block=(1, 0, 0), memory="x", num_outputs=64, size=64),
        out_of_bounds("reads_far_past_end", "reads 4 bytes", "400 bytes past the end of x [32]",
                      thread=(7, 0, 0), memory="x"),
        out_of_bounds("reads_across_end", "reads 16 bytes", "8 bytes before the end of x [30]",
                      thread=(5, 0, 0), memory="x", size=30),
        out_of_bounds("writes_before_start", "writes 4 bytes", "8 bytes before the start of y [32]",
                      thread=(3, 0, 0), memory="y"),
        out_of_bounds("writes_past_end", "writes 4 bytes", "just past the end of y [32]",
                      thread=(3, 0, 0), memory="y"),
        out_of_bounds("adds_past_end", "adds to 4 bytes", "just past the end of y [32]",
                      thread=(31, 0, 0), memory="y"),
        out_of_bounds("writes_past_part", "writes 4 bytes", "just past the end of w [32]",
                      thread=(31, 0, 0), memory="w"),
        Mistake("writes_input", "memcheck",
                "thread (9,0,0) of block (0,0,0) writes to x[6] at {where}, which is an input",
                thread=(9, 0, 0), memory="x", index=(6,)),
        Mistake("adds_to_input", "memcheck",
                "thread (9,0,0) of block (0,0,0) writes to x[6] at {where}, which is an input",
                thread=(9, 0, 0), memory="x", index=(6,)),
        *(out_of_bounds(case, access, NOWHERE, thread=(2, 0, 0), ends=True)
          for case, access in {"reads_wild": "reads 4 bytes", "writes_wild": "writes 4 bytes",
                               "adds_wild": "adds to 4 bytes", "reads_null": "reads 4 bytes"}.items()),
        out_of_bounds("reads_local_of_other", "reads 4 bytes", NOWHERE, thread=(31, 0, 0), ends=True),
        out_of_bounds("reads_past_dynamic_shared", "reads 4 bytes",
                      "just past the end of the 128 bytes of shared memory",
                      thread=(31, 0, 0), memory=SHARED),
        out_of_bounds("writes_past_dynamic_shared", "writes 4 bytes",
                      "just past the end of the 128 bytes of shared memory (8 times)",
                      thread=(24, 0, 0), memory=SHARED, count=8),
        out_of_bounds("writes_past_all_shared", "writes 4 bytes",
                      f"{227 * 1024 - 128:,} bytes past the end of the 128 bytes of shared memory",
                      thread=(4, 0, 0), memory=SHARED, ends=True),
        out_of_bounds("reads_past_static_shared", "reads 4 bytes",
                      "just past the end of table, 128 bytes, shared",
                      thread=(31, 0, 0), memory="table", ends=True),
        out_of_bounds("writes_past_static_shared", "writes 4 bytes",
                      "just past the end of sums, 128 bytes, shared",
                      thread=(3, 0, 0), memory="sums", ends=True),
        out_of_bounds("writes_before_static_shared", "writes 4 bytes",
                      "128 bytes before the start of first, shared",
                      thread=(1, 0, 0), memory="first", ends=True),
        *(Mistake(case, "memcheck",
                  f"thread (1,0,0) of block (0,0,0) accesses {size} bytes of {memory}[{index}] at {{where}}, "
                  f"whose address is no multiple of {size}",
                  thread=(1, 0, 0), memory=memory, index=(index,))
          for case, size, memory, index in [("misaligned_global", 16, "x", 6),
                                            ("misaligned_double", 8, "x", 5),
                                            ("misaligned_dynamic_shared", 8, SHARED, 3),
                                            ("misaligned_static_shared", 16, "row", 3)]),
        unwritten("reads_unwritten_dynamic_shared", "reads sums[3]",
                  thread=(31, 0, 0), memory="sums", index=(3,)),
        unwritten("reads_unwritten_by_this_block", "reads tile[2][0]", count=16, num_outputs=64,
                  thread=(16, 0, 0), block=(1, 0, 0), memory="tile", index=(2, 0)),
        unwritten("adds_to_unwritten_shared", "adds to sum", thread=(0, 0, 0), memory="sum", index=()),
        unwritten("reads_unwritten_half_word", "reads numbers[13]",
                  thread=(6, 0, 0), memory="numbers", index=(13,)),
        unwritten("reads_unwritten_scratch", "reads z[11]", thread=(11, 0, 0), memory="z", index=(11,)),
        unwritten("adds_to_unwritten", "adds to y[0]", thread=(0, 0, 0), memory="y", index=(0,), count=32),
        unwritten("reads_before_it_is_written", "reads value", thread=(1, 0, 0), memory="value", index=()),
        Mistake("leaves_outputs_unwritten", "initcheck",
                "2 of the 32 elements of y are never written, the first of them y[30]",
                where=None, block=None, thread=None, memory="y", index=(30,)),
        # Of the launcher, not of a kernel.
        Mistake("zeroes_input", "memcheck", "a memset of 64 bytes writes to x[0], which is an input",
                where=None, memory="x", index=(0,), ends=True),
        Mistake("zeroes_past_end", "memcheck",
                "a memset of 128 bytes is out of bounds: it begins at y[16] and goes past its end",
                where=None, memory="y", index=(16,), ends=True),
        Mistake("zeroes_outside", "memcheck", f"a memset of 64 bytes is out of bounds: {NOWHERE}",
                where=None, ends=True),
    ],
    "races": [
        race("write_read_far",
             "tile[1][0] is written at {other} by thread (32,0,0) and read at {where} by thread (0,0,0) of "
             "block (0,0,0)",
             where="write_read.read", other="write_read.write", memory="tile", index=(1, 0), count=64),
        race("write_read_near",
             "tile[0][1] is written at {other} by thread (1,0,0) and read at {where} by thread (0,0,0) of "
             "block (0,0,0)",
             where="write_read.read", other="write_read.write", memory="tile", index=(0, 1), count=64),
        race("write_syncwarp_read_far",
             "tile[63] is written at {other} by thread (63,0,0) and read at {where} by thread (31,0,0) of "
             "block (0,0,0)", thread=(31, 0, 0), memory="tile", index=(63,), count=64),
        *(race(case,
               "tile[30] is written at {other} by thread (30,0,0) and read at {where} by thread (31,0,0) of "
               "block (0,0,0)", thread=(31, 0, 0), memory="tile", index=(30,), count=64)
          for case in ("write_shuffle_read", "write_vote_read")),
        race("half_warp_across",
             "tile[31] is written at {other} by thread (31,0,0) and read at {where} by thread (15,0,0) of "
             "block (0,0,0)", thread=(15, 0, 0), memory="tile", index=(31,), count=64),
        race("read_write",
             "tile[63] is read at {other} by thread (31,0,0) and overwritten at {where} by thread (63,0,0) "
             "of block (0,0,0)", where="read_write.write", other="read_write.read",
             thread=(63, 0, 0), memory="tile", index=(63,), count=128),
        race("write_write",
             "shared[0] is written at {other} by thread (0,0,0) and at {where} by thread (1,0,0) of block "
             "(0,0,0)", where="write_write", other="write_write",
             thread=(1, 0, 0), memory=SHARED, index=(0,), count=32),
        race("write_read_global",
             "w[1] is written at {other} by thread (1,0,0) and read at {where} by thread (0,0,0) of block "
             "(0,0,0)", memory="w", index=(1,), count=32, num_outputs=32),
        race("adds_and_writes_shared",
             "sum is written at {other} by thread (0,0,0) and at {where} by thread (63,0,0) of block (0,0,0)",
             where="adds_and_writes_shared.write", other="adds_and_writes_shared.add",
             thread=(63, 0, 0), memory="sum", index=(), count=63),
        race("adds_and_reads_shared",
             "sum is written at {other} by thread (0,0,0) and read at {where} by thread (63,0,0) of block "
             "(0,0,0)", other="adds_and_reads_shared.add", thread=(63, 0, 0), memory="sum", index=(),
             count=126),
        race("same_half",
             "numbers[1] is written at {other} by thread (1,0,0) and read at {where} by thread (0,0,0) of "
             "block (0,0,0)", memory="numbers", index=(1,), count=64),
        race("whole_word",
             "numbers[1] is written at {other} by thread (1,0,0) and read at {where} by thread (0,0,0) of "
             "block (0,0,0)", memory="numbers", index=(1,), count=32),
        race_of_blocks("blocks_write",
                       "y[0] is written by two blocks, at {other} by thread (0,0,0) of block (0,0,0) and at "
                       "{where} by thread (0,0,0) of block (1,0,0)",
                       other="blocks_write", block=(1, 0, 0), memory="y", index=(0,), count=32),
        race_of_blocks("blocks_write_and_read",
                       "w[16] is read at {other} by thread (0,0,0) of block (0,0,0) and written at {where} "
                       "by thread (0,0,0) of block (1,0,0)",
                       where="blocks_write_and_read.write", other="blocks_write_and_read.read",
                       block=(1, 0, 0), memory="w", index=(16,), count=32),
        race_of_blocks("block_writes_others_add",
                       "y[0] is written at {other} by thread (0,0,0) of block (1,0,0) and added to at "
                       "{where} by thread (0,0,0) of block (0,0,0)",
                       where="block_writes_others_add.add", other="block_writes_others_add.write",
                       memory="y", index=(0,), count=64),
        race_of_blocks("blocks_add_and_one_writes",
                       "y[0] is written at {other} by thread (0,0,0) of block (2,0,0) and added to at "
                       "{where} by thread (0,0,0) of block (0,0,0)",
                       where="blocks_add_and_one_writes.add", other="blocks_add_and_one_writes.write",
                       memory="y", index=(0,), count=32),
        race_of_blocks("block_reads_others_add",
                       "y[0] is read at {other} by thread (0,0,0) of block (1,0,0) and added to at {where} "
                       "by thread (0,0,0) of block (0,0,0)",
                       where="block_reads_others_add.add", other="block_reads_others_add.read",
                       memory="y", index=(0,), count=64),
    ],
    "sync": [
        stop("divergent_barrier",
             "thread (63,0,0) of block (0,0,0): threads wait at different barriers: thread (0,0,0) for "
             "__syncthreads() at {other}, thread (63,0,0) for __syncthreads() at {where}",
             where="divergent_barrier.other", other="divergent_barrier.one",
             block=(0, 0, 0), thread=(63, 0, 0)),
        stop("early_return",
             "thread (37,0,0) of block (1,0,0): barrier not reached by every thread: thread (0,0,0) waits "
             "for __syncthreads() at {where}, but thread (37,0,0) has returned"),
        stop("different_kinds_of_barrier",
             "thread (63,0,0) of block (0,0,0): threads wait at different barriers: thread (0,0,0) for "
             "__syncthreads_or() at {other}, thread (63,0,0) for __syncthreads_and() at {where}",
             where="different_kinds_of_barrier.and", other="different_kinds_of_barrier.or",
             block=(0, 0, 0), thread=(63, 0, 0)),
        stop("absent_lane",
             "thread (37,0,0) of block (1,0,0): receives the value of lane 20, which the mask does not name "
             "or which has returned (at {where})", ends=False),
        stop("returned_lane",
             "thread (37,0,0) of block (1,0,0): receives the value of lane 8, which the mask does not name "
             "or which has returned (at {where})", ends=False),
        stop("foreign_mask",
             "thread (37,0,0) of block (1,0,0): __syncwarp(mask 0xffffff0f) at {where} is called by lane 5, "
             "which its mask does not name"),
        stop("deadlock",
             "thread (63,0,0) of block (1,0,0): deadlock, no thread of the block can go on: 48 threads "
             "(first (16,0,0)) wait for __syncthreads() at {other}; 16 threads (first (0,0,0)) wait for "
             "__syncwarp(mask 0xffffffff) at {where}",
             where="deadlock.syncwarp", other="deadlock.barrier", thread=(63, 0, 0)),
        stop("failed_assert",
             "thread (37,0,0) of block (1,0,0): assertion `!is_culprit() || m.n < 0` failed at {where}",
             "error"),
        stop("trap", "thread (37,0,0) of block (1,0,0): __trap() at {where}", "error"),
        stop("division_by_zero",
             "thread (37,0,0) of block (1,0,0): integer division by zero, or overflow of a division (at "
             "{where})", "error"),
        stop("recursion",
             "thread (37,0,0) of block (1,0,0): stack overflow: more than 128 KiB of local variables (at "
             "{where})", "error"),
    ],
    "copies": [
        under_way("copy_barrier_read",
                  "tile[124] is read at {where} by thread (63,0,0) of block (0,0,0), while the cp.async that "
                  "thread (31,0,0) started", thread=(63, 0, 0), memory="tile", index=(124,), count=64),
        under_way("copy_wait_read",
                  "tile[128] is read at {where} by thread (0,0,0) of block (0,0,0), while the cp.async that "
                  "thread (32,0,0) started", memory="tile", index=(128,), count=64),
        under_way("copy_barrier_wait_read",
                  "tile[124] is read at {where} by thread (63,0,0) of block (0,0,0), while the cp.async that "
                  "thread (31,0,0) started", thread=(63, 0, 0), memory="tile", index=(124,), count=64),
        under_way("copy_read_own",
                  "tile[1] is read at {where} by thread (0,0,0) of block (0,0,0), while the cp.async that it "
                  "started", memory="tile", index=(1,), count=64),
        under_way("copy_without_commit",
                  "tile[0] is read at {where} by thread (0,0,0) of block (0,0,0), while the cp.async that it "
                  "started", memory="tile", index=(0,), count=64),
        under_way("too_few_groups",
                  "second[120] is read at {where} by thread (62,0,0) of block (0,0,0), while the cp.async "
                  "that thread (30,0,0) started",
                  thread=(62, 0, 0), memory="second", index=(120,), count=64),
        race("stage_overwritten",
             "tile[0][252] is read at {other} by thread (31,0,0) and overwritten at {where} by thread "
             "(63,0,0) of block (0,0,0)", where="stage_overwritten.write", other="stage_overwritten.read",
             thread=(63, 0, 0), memory="tile", index=(0, 252), count=256, size=256),
        under_way("copy_barrier_write",
                  "tile[126] is overwritten at {where} by thread (63,0,0) of block (0,0,0), while the "
                  "cp.async that thread (31,0,0) started", where="copy_barrier_write.write",
                  thread=(63, 0, 0), memory="tile", index=(126,), count=64),
        under_way("copy_twice",
                  "tile[0] is overwritten at {where} by thread (0,0,0) of block (0,0,0), while the cp.async "
                  "that it started", where="copy_twice", other="copy_twice",
                  memory="tile", index=(0,), count=256),
        out_of_bounds("copies_past_end", "reads 16 bytes", "just past the end of x [240] (4 times)",
                      thread=(60, 0, 0), memory="x", count=4, size=240, num_outputs=64),
        Mistake("copies_misaligned", "memcheck",
                "thread (5,0,0) of block (0,0,0) accesses 16 bytes of x[22] at {where}, whose address is no "
                "multiple of 16", thread=(5, 0, 0), memory="x", index=(22,), size=256, num_outputs=64),
        out_of_bounds("copies_past_shared", "writes 16 bytes",
                      "just past the end of the 1,008 bytes of shared memory",
                      thread=(63, 0, 0), memory=SHARED, size=256, num_outputs=64),
        Mistake("misaligned_row", "memcheck",
                "thread (5,0,0) of block (0,0,0) accesses 16 bytes of numbers[124] at {where}, whose address "
                "is no multiple of 16", thread=(5, 0, 0), memory="numbers", index=(124,)),
        out_of_bounds("row_past_end", "reads 16 bytes",
                      "just past the end of the 1,488 bytes of shared memory",
                      thread=(31, 0, 0), memory=SHARED),
        unwritten("unwritten_row", "reads numbers[744]",
                  thread=(31, 0, 0), memory="numbers", index=(744,), count=8),
        race("rows_without_barrier",
             "numbers[1] is written at {other} by thread (1,0,0) and read at {where} by thread (0,0,0) of "
             "block (0,0,0)", memory="numbers", index=(1,), count=248, num_outputs=32),
        race("store_without_barrier",
             "numbers[721] is written at {other} by thread (30,0,0) and read at {where} by thread (31,0,0) "
             "of block (0,0,0)", thread=(31, 0, 0), memory="numbers", index=(721,), count=32,
             num_outputs=32),
        Mistake("row_in_global_memory", "memcheck",
                "thread (0,0,0) of block (0,0,0): ldmatrix<1>() at {where}: the address is not one of "
                "shared memory", ends=True, size=256),
        race("handover_without_barrier",
             "tile[1] is read at {other} by thread (32,0,0) and overwritten at {where} by thread (1,0,0) of "
             "block (0,0,0)", where="handover_without_barrier.write", other="handover_without_barrier.read",
             thread=(1, 0, 0), memory="tile", index=(1,), count=32, num_outputs=32),
        race("wrong_barrier",
             "second[30] is read at {other} by thread (63,0,0) and overwritten at {where} by thread "
             "(30,0,0) of block (0,0,0)", where="wrong_barrier.write", other="wrong_barrier.read",
             thread=(30, 0, 0), memory="second", index=(30,), count=32, num_outputs=32),
        race("reads_what_it_gave_back",
             "tile[30] is read at {other} by thread (63,0,0) and overwritten at {where} by thread (30,0,0) "
             "of block (0,0,0)", where="refill.write", other="refill.late_read",
             thread=(30, 0, 0), memory="tile", index=(30,), count=188, num_outputs=32),
        race("forgets_a_reader",
             "tile[0] is read at {other} by thread (97,0,0) and overwritten at {where} by thread (0,0,0) of "
             "block (0,0,0)", where="refill.write", other="refill.read",
             memory="tile", index=(0,), count=64, num_outputs=32),
        race("arrives_and_reads",
             "tile[30] is read at {other} by thread (63,0,0) and overwritten at {where} by thread (30,0,0) "
             "of block (0,0,0)", where="arrives_and_reads.write", other="arrives_and_reads.read",
             thread=(30, 0, 0), memory="tile", index=(30,), count=32, num_outputs=32),
        under_way("copy_handover_without_wait",
                  "tile[120] is read at {where} by thread (63,0,0) of block (0,0,0), while the cp.async that "
                  "thread (30,0,0) started",
                  thread=(63, 0, 0), memory="tile", index=(120,), count=32, num_outputs=32),
        stop_early("barrier_id_16", "barrier_sync(16, 128) at {where}: barriers are 0 to 15", 0),
        stop_early("barrier_of_48",
                   "barrier_arrive(1, 48) at {where}: the number of threads is a multiple of 32, up to the "
                   "128 of the block", 0),
        stop_early("barrier_of_too_many",
                   "barrier_sync(1, 160) at {where}: the number of threads is a multiple of 32, up to the "
                   "128 of the block", 0),
        stop_early("counts_differ",
                   "barrier_sync(1, 128) at {where}: the barrier is under way for 64 threads, since {other}",
                   63, where="counts_differ.other", other="counts_differ.one"),
        stop_early("arrives_twice",
                   "barrier_arrive(1, 96) at {where}: the warp has already arrived, and only 32 threads have "
                   "so far", 30),
        stop_early("barrier_deadlock",
                   "deadlock, no thread of the block can go on: 32 threads (first (0,0,0)) wait for "
                   "barrier_sync(3, 96) at {where}, at which 64 threads have arrived; 32 threads (first "
                   "(64,0,0)) wait for barrier_sync(4, 64) at {other}, at which 32 threads have arrived; 64 "
                   "threads (first (32,0,0)) wait for nothing: it has returned",
                   62, where="barrier_deadlock.one", other="barrier_deadlock.other"),
        stop_early("returns_before_barrier",
                   "barrier not reached by every thread: thread (0,0,0) waits for barrier_sync(1, 128) at "
                   "{where}, at which 32 threads have arrived, but thread (32,0,0) has returned", 32),
        stop_early("lanes_call_different_barriers",
                   "barrier_sync(1, 128) at {where}: another lane of the warp calls barrier_sync(2, 128) at "
                   "{where}", 31),
        stop_early("mixes_barriers",
                   "barrier 0 is the one of __syncthreads(): thread (0,0,0) waits for __syncthreads() at "
                   "{where}, while barrier 0 is under way at {other}",
                   63, where="mixes_barriers.one", other="mixes_barriers.other"),
        stop_early("mma_after_return",
                   "mma<__half>() at {where} needs 32 lanes, but thread (5,0,0) has returned", 31),
        stop_early("mma_by_half_a_warp",
                   "deadlock, no thread of the block can go on: 16 threads (first (0,0,0)) wait for "
                   "mma<__half>() at {where}; 16 threads (first (16,0,0)) wait for mma<__half>() at {other}",
                   31, where="mma_by_half_a_warp.one", other="mma_by_half_a_warp.other"),
    ],
}  # fmt: skip
ALL_MISTAKES = [pytest.param(name, m, id=m.case) for name, mistakes in MISTAKES.items() for m in mistakes]

# What is right: case -> (elements of x, of y).
CORRECT = {
    "memory": dict.fromkeys(
        ["copies", "adds", "fills_parts", "dynamic_shared", "static_shared", "copies_structs",
         "reads_written_dynamic_shared", "adds_to_zeroed_shared"], (32, 32),
    ) | {"aligned": (128, 32)},
    "races": dict.fromkeys(
        ["write_barrier_read", "write_syncwarp_read_near", "write_counting_barrier_read", "half_warp_within",
         "read_barrier_write", "one_of_two_writes", "adds_to_shared", "halves_of_a_word", "bytes_of_a_word",
         "words_then_halves", "blocks_write_their_own", "blocks_read"], (64, 64),
    ) | dict.fromkeys(
        ["order_is_passed_on", "write_barrier_read_global", "blocks_add", "blocks_of_two_launches"], (64, 32)
    ) | {"halves_of_a_global_word": (64, 32)},
    "sync": dict.fromkeys(
        ["barrier_for_all", "return_after_barrier", "lanes_of_one_half", "shuffle_past_the_end"], (64, 128)
    ),
    "copies": dict.fromkeys(
        ["copy_wait_barrier_read", "copy_wait_read_own", "all_groups", "stages", "copy_wait_barrier_write"],
        (256, 64),
    ) | {"copies_rest": (130, 64)} | dict.fromkeys(
        ["loads_matrices", "loads_one_matrix", "handover", "right_barrier", "refills", "barriers_in_a_row",
         "barrier_of_one_warp", "barrier_of_the_block", "copy_handover"], (32, 32),
    ),
}  # fmt: skip
ALL_CORRECT = [
    pytest.param(name, case, *sizes, id=case) for name in CORRECT for case, sizes in CORRECT[name].items()
]


def check_mistake(prog: Program, mistake: Mistake, schedule: int = -1) -> Report:
    return prog.check(mistake.case, torch.arange(1.0, mistake.size + 1), mistake.num_outputs, schedule)


def strided_rows() -> Tensor:
    """[4, 8] of which each row is followed by a gap of 4."""
    return torch.arange(48.0).view(4, 12)[:, :8]


@pytest.mark.parametrize(("name", "mistake"), ALL_MISTAKES)
def test_a_mistake_is_found_and_described(
    build: Callable[[str], Program], name: str, mistake: Mistake
) -> None:
    report = check_mistake(build(name), mistake)
    assert [str(f) for f in report.findings][1:] == [], mistake.case
    assert (report.error is not None) == mistake.ends
    (finding,) = report.findings
    where = mistake.where if mistake.where != "" else mistake.case
    places = {"where": at(where) if where else "", "other": at(mistake.other) if mistake.other else ""}
    unit = "places" if mistake.tool == "initcheck" else "times"
    times = f" ({mistake.count} {unit})" if mistake.count > 1 and "times)" not in mistake.text else ""
    assert finding.message == mistake.text.format(**places) + times
    assert str(finding) == f"{mistake.tool}: {finding.message}"
    assert finding.tool == mistake.tool
    if where:
        assert str(finding.where).partition(" (")[0] == places["where"]
    if mistake.tool == "racecheck":
        assert str(finding.other).partition(" (")[0] == places["other"]
    assert (finding.block, finding.thread) == (mistake.block, mistake.thread) or where is None
    assert (finding.memory, finding.index, finding.count) == (mistake.memory, mistake.index, mistake.count)
    assert finding.kernel in (mistake.case, "memset")


def test_between_the_rows_of_a_strided_tensor(build: Callable[[str], Program]) -> None:
    prog = build("memory")
    assert prog.check("reads_rows", strided_rows()).findings == []
    (finding,) = prog.check("reads_between_rows", strided_rows()).findings
    assert str(finding) == (
        f"memcheck: thread (15,0,0) of block (0,0,0) reads 4 bytes at {at('reads_between_rows')}, out of "
        f"bounds: between two rows of x [4, 8], {4 * (12 + 8)} bytes from its start"
    )
    assert (finding.memory, finding.index) == ("x", None)


@pytest.mark.parametrize(("name", "case", "num_inputs", "num_outputs"), ALL_CORRECT)
def test_what_is_right_gives_no_finding(
    any_build: Callable[[str], Program], name: str, case: str, num_inputs: int, num_outputs: int
) -> None:
    for schedule in (-1, 0, 1):
        report = any_build(name).check(case, torch.arange(1.0, num_inputs + 1), num_outputs, schedule)
        assert report.error is None
        assert [str(f) for f in report.findings] == []


def test_every_case_is_tested() -> None:
    for name, mistakes in MISTAKES.items():
        cases = re.findall(r"\bCASE\((\w+),", (PROGRAMS / f"{name}.cu").read_text())
        tested = {m.case for m in mistakes} | CORRECT[name].keys() | {"reads_rows", "reads_between_rows"}
        assert [case for case in cases if case not in tested and "endless" not in case] == []


def test_endless_loops_end(build: Callable[[str], Program]) -> None:
    """Also while the checker itself is at work, which must not be left half-way."""
    prog = build("sync")
    prog.runtime.cpu_device_set_block_timeout(0.2)
    try:
        for case in ("endless_arithmetic", "endless_reads", "endless_mistakes", "endless_barriers"):
            report = prog.check(case, torch.ones(64), 128)
            finding = report.findings[-1]
            assert (finding.tool, finding.block) == ("error", (1, 0, 0))
            if case != "endless_barriers":
                assert finding.message == LATE
            rest = [f.tool for f in report.findings[:-1]]
            assert rest == (["memcheck"] if case == "endless_mistakes" else []), case
            assert prog.check("barrier_for_all", torch.ones(64), 128).findings == []
    finally:
        prog.runtime.cpu_device_set_block_timeout(120.0)


@pytest.mark.slow
def test_the_time_limit_leaves_nothing_half_done(folder: Path) -> None:
    """It comes in the middle of barriers, whose bookkeeping allocates memory. A mistake ends the process."""
    script = (
        "import pathlib, sys, torch, test_checker as t\n"
        "prog = t.program('sync', 'g++ -O1', pathlib.Path(sys.argv[1]))\n"
        "prog.runtime.cpu_device_set_block_timeout(0.01)\n"
        "reports = [prog.check('endless_barriers', torch.ones(64), 128) for _ in range(500)]\n"
        "print({r.findings[-1].tool for r in reports})\n"
    )
    path = os.pathsep.join([str(REPO / "tests"), str(REPO)])
    command = [sys.executable, "-c", script, str(folder)]
    assert run_command(command, env=os.environ | {"PYTHONPATH": path}, cwd=REPO) == "{'error'}\n"


# ---------------------------------------------------------------- order, repetition, threads

SEEDS = (0, 1, 2, 3, 4)


def signature(report: Report) -> object:
    """What must not depend on the order of threads and blocks."""
    return {(f.tool, f.kernel, str(f.where), str(f.other), f.memory) for f in report.findings}


def counts(traffic: Traffic) -> object:
    lines = sorted(
        (r.kernel, str(r.where), r.memory, r.operation, r.bytes_per_lane, r.requests, r.lanes, r.transactions)
        for r in traffic.lines()
    )
    tensors = {name: str(t) for name, t in sorted(traffic.tensors.items())}
    return lines, tensors, str(traffic.shared), traffic.block_barriers, traffic.warp_barriers


@pytest.mark.parametrize("name", ["memory", "races", "copies"])
def test_findings_do_not_depend_on_the_order(folder: Path, name: str) -> None:
    prog = program(name, "g++ -O1", folder)
    for mistake in MISTAKES[name]:
        if mistake.tool == "synccheck":
            continue  # the first mistake that is found ends the block
        in_order = signature(check_mistake(prog, mistake))
        for seed in SEEDS:
            assert signature(check_mistake(prog, mistake, seed)) == in_order, (mistake.case, seed)


def test_what_ends_a_block_is_found_in_any_order(folder: Path) -> None:
    mistakes = [(name, mistake) for name in MISTAKES for mistake in MISTAKES[name]]
    for name, mistake in mistakes:
        prog = program(name, "g++ -O1", folder)
        for seed in SEEDS if name == "sync" or mistake.tool == "synccheck" else ():
            findings = check_mistake(prog, mistake, seed).findings
            assert [f.tool for f in findings] == [mistake.tool], (mistake.case, seed)


def test_a_check_after_a_mistake_is_right(folder: Path) -> None:
    """One process, one mistake after the other: none damages it, or the next check."""
    correct = program("memory", "g++ -O1", folder)
    x = torch.arange(1.0, 33)
    for name, mistakes in MISTAKES.items():
        for mistake in mistakes:
            check_mistake(program(name, "g++ -O1", folder), mistake)
            for case in ("copies", "dynamic_shared", "static_shared"):
                report = correct.check(case, x)
                assert report.findings == [], (mistake.case, case)
                assert torch.equal(report.outputs[0], x), (mistake.case, case)
                assert report.traffic.tensors == {
                    "x": TensorTraffic(read=128, unique_read=128),
                    "y": TensorTraffic(written=128, unique_written=128),
                }


def test_threads_that_check_at_once_do_not_mix(folder: Path) -> None:
    """Nor does host code of a checked library, which announces its accesses like a kernel."""
    traffic, memory = program("traffic", "g++ -O1", folder), program("memory", "g++ -O1", folder)
    x = torch.arange(1.0, 65)
    traffic.library.host_sum.argtypes = [ctypes.c_void_p, ctypes.c_int]
    traffic.library.host_sum.restype = ctypes.c_float

    def long_loops() -> object:
        return counts(traffic.check("long_loops", x, 64).traffic)

    def mistake() -> object:
        return signature(memory.check("reads_before_start"))

    def host() -> object:
        return traffic.library.host_sum(x.data_ptr(), x.numel())

    jobs = {job: job() for job in (long_loops, mistake, host)}
    wrong: list[str] = []

    def repeat(job: Callable[[], object], times: int) -> None:
        for _ in range(times):
            if job() != jobs[job]:
                wrong.append(job.__name__)

    threads = [
        threading.Thread(target=repeat, args=arguments)
        for arguments in [(long_loops, 10), (long_loops, 10), (mistake, 10), (host, 20000)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---------------------------------------------------------------- traffic

Request = dict[int, int]  # lane -> address in bytes
LANES = range(32)


def request(address: Callable[[int], int], lanes: Iterator[int] | range = LANES) -> Request:
    return {lane: address(lane) for lane in lanes}


def count_sectors(req: Request, size: int) -> int:
    return len({(start + byte) // 32 for start in req.values() for byte in range(size)})


def count_wavefronts(req: Request, size: int) -> int:
    """8-byte accesses go by half warps, 16-byte accesses by quarters."""
    group = 32 * 4 // max(size, 4)
    passes = 0
    for first in range(0, 32, group):
        words = {
            (start + b) // 4
            for lane, start in req.items()
            if first <= lane < first + group
            for b in range(size)
        }
        if words:
            banks = [word % 32 for word in words]
            passes += max(banks.count(bank) for bank in banks)
    return passes


@dataclass(frozen=True)
class Line:
    """What one line asks of one memory."""

    marker: str
    operation: str
    memory: str
    size: int  # bytes per lane
    requests: list[Request]

    def expected(self) -> tuple[object, ...]:
        count = count_wavefronts if self.memory == SHARED else count_sectors
        transactions = [count(r, self.size) for r in self.requests]
        lanes = sum(len(r) for r in self.requests)
        return (
            at(self.marker), self.operation, self.memory, self.size,
            len(self.requests), lanes, sum(transactions), max(transactions),
        )  # fmt: skip

    def touched(self) -> set[int]:
        return {start + byte for r in self.requests for start in r.values() for byte in range(self.size)}


def one(marker: str, operation: str, memory: str, size: int, address: Callable[[int], int]) -> Line:
    return Line(marker, operation, memory, size, [request(address)])


def ragged_requests(n: int, num_blocks: int, num_threads: int) -> list[Request]:
    step = num_blocks * num_threads
    warps = range(0, step, 32)
    return [
        request(lambda lane, start=start: 4 * (start + lane), range(min(32, n - start)))
        for turn in range(-(-n // step))
        for start in (turn * step + warp for warp in warps)
        if start < n
    ]


@functools.cache
def expected_lines() -> dict[str, list[Line]]:
    def by_warps(n: int) -> list[Request]:
        """32 floats after the other."""
        return [request(lambda i, w=w: 4 * (32 * w + i)) for w in range(n)]

    def write_all(marker: str, num_warps: int = 1) -> Line:
        return Line(marker, "write", "y", 4, by_warps(num_warps))

    (each,) = by_warps(1)
    banks = {
        "each": (4, lambda i: 4 * i), "two": (4, lambda i: 8 * i), "same": (4, lambda i: 128 * i),
        "padded": (4, lambda i: 132 * i), "broadcast": (4, lambda i: 20), "float2": (8, lambda i: 8 * i),
        "float4": (16, lambda i: 16 * i), "half": (2, lambda i: 2 * i), "half_same": (2, lambda i: 128 * i),
    }  # fmt: skip
    long_loops: dict[str, list[Request]] = {"x": [], SHARED: []}
    for warp in range(2):
        turns = [3000 + 50 * lane + warp for lane in LANES]
        for k in range(max(turns)):
            going = [lane for lane in LANES if k < turns[lane]]
            long_loops["x"].append(dict.fromkeys(going, 4 * (k % 64)))
            long_loops[SHARED].append({lane: 4 * (32 * warp + lane) for lane in going})
    inner = [
        dict.fromkeys([lane for lane in LANES if k < lane % 4], 4 * (row * 32 + k))
        for row in range(4)
        for k in range(3)
    ]
    guarded = [
        request(lambda i, j=j, k=k: 4 * (4 * ((32 * j + i) // 8) + k)) for j in range(4) for k in range(4)
    ]
    stored = [{i: 4 * (32 * j + i) for i in LANES if i % 8 < 5 and (32 * j + i) // 8 < 10} for j in range(3)]
    thirds = [request(lambda i, j=j: 12 * i + 4 * j) for j in range(3)]
    return {
        "coalesced": [
            Line("coalesced.read", "read", "x", 4, by_warps(6)),
            write_all("coalesced.write", 6),
        ],
        "patterns": [
            one("stride_2", "read", "x", 4, lambda i: 8 * i),
            one("scattered", "read", "x", 4, lambda i: 32 * i),
            one("shifted", "read", "x", 4, lambda i: 4 * i + 4),
            one("broadcast", "read", "x", 4, lambda i: 28),
            one("reversed", "read", "x", 4, lambda i: 4 * (31 - i)),
            one("by_eights", "read", "x", 4, lambda i: 4 * (i // 8 * 64)),
            one("ldg", "read", "x", 4, lambda i: 4 * i),
            write_all("patterns.end"),
        ],
        "wide": [
            one("float4.read", "read", "x", 16, lambda i: 16 * i),
            one("float2.read", "read", "x", 8, lambda i: 8 * i),
            one("float4.write", "write", "y", 16, lambda i: 16 * i),
        ],
        "cache_hints": [
            *(one(f"ld{hint}", "read", "x", 4, lambda i, j=j: 128 * j + 4 * i)
              for j, hint in enumerate(("ca", "cg", "cs", "lu", "cv"))),
            one("ldcs4", "read", "x", 16, lambda i: 16 * i),
            *(one(f"st{hint}", "write", "y", 4, lambda i, j=j: 128 * j + 4 * i)
              for j, hint in enumerate(("wb", "cg", "wt"))),
            one("stcs4", "write", "y", 16, lambda i: 512 + 16 * i),
        ],
        "narrow": [
            one("half.read", "read", "x", 2, lambda i: 2 * i),
            one("half.shifted", "read", "x", 2, lambda i: 2 * i + 2),
            one("half2.read", "read", "x", 4, lambda i: 4 * i),
            one("byte.read", "read", "x", 1, lambda i: i),
            one("half.write", "write", "y", 2, lambda i: 2 * i),
            one("half2.write", "write", "y", 4, lambda i: 128 + 4 * i),
            one("byte.write", "write", "y", 1, lambda i: 256 + i),
        ],
        "structs": [
            Line("structs", operation, memory, 4, thirds)
            for operation, memory in (("read", "x"), ("write", "y"))
        ],
        "adds": [
            Line("add.each", "atomic", "y", 4, [each] * 2),
            Line("add.one", "read", "x", 4, [each] * 2),
            Line("add.one", "atomic", "y", 4, [request(lambda i: 4 * 32)] * 2),
            Line("add.half2", "atomic", "y", 4, [request(lambda i: 4 * (64 + i))] * 2),
        ],
        "only_adds": [Line("only_add", "atomic", "y", 4, [request(lambda i: 0)] * 4)],
        # In pieces of 16 bytes, by one thread.
        "copies_memory": [
            Line("memcpy", "read", "x", 16, [{0: 16 * k} for k in range(25)]),
            Line("memcpy", "write", "y", 16, [{0: 16 * k} for k in range(25)]),
            Line("memset", "write", "y", 16, [{1: 400 + 16 * k} for k in range(7)]),
        ],
        "branches": [
            Line("branch.one", "read", "x", 4, [request(lambda i: 4 * i, range(16))]),
            Line("branch.other", "read", "x", 4, [request(lambda i: 8 * i, range(16, 32))]),
            write_all("branch.end"),
        ],
        "ragged": [
            Line("ragged", "read", "x", 4, ragged_requests(999, 2, 64)),
            Line("ragged", "write", "y", 4, ragged_requests(999, 2, 64)),
        ],
        "triangle": [
            Line("triangle.loop", "read", "x", 4, [dict.fromkeys(range(k, 32), 4 * k) for k in LANES]),
            write_all("triangle.end"),
        ],
        "nested": [
            Line("nested.inner", "read", "x", 4, inner),
            Line("nested.outer", "read", "x", 4, by_warps(4)),
            write_all("nested.end"),
        ],
        "guarded_store": [
            Line("guarded_store.inner", "read", "x", 4, guarded),
            Line("guarded_store.all", "write", SHARED, 4, by_warps(4)),
            Line("guarded_store.some", "write", "y", 4, stored),
        ],
        "returns_early": [
            one("returns_early.read", "read", "x", 4, lambda i: 4 * i),
            one("returns_early.write", "write", "y", 4, lambda i: 4 * i),
            Line("returns_early.rest", "write", "y", 4, [request(lambda i: 4 * i, range(20))]),
        ],
        "invariants": [
            one("invariants.start", "write", SHARED, 4, lambda i: 4 * i),
            Line("invariants.read", "read", "x", 4, [each] * 10),
            *(Line("invariants.update", op, SHARED, 4, [each] * 10) for op in ("read", "write")),
            Line("invariants.sum", "read", SHARED, 4, [each] * 4),
            *(Line("invariants.sum", op, "y", 4, [each] * 4) for op in ("read", "write")),
        ],
        "rereads": [
            Line("rereads", "read", "x", 4, [request(lambda i, k=k: 4 * k) for k in range(50)] * 2),
            write_all("rereads.end", 2),
        ],
        "banks": [
            Line("banks.fill", "read", "x", 4, [each] * 33),
            Line("banks.fill", "write", SHARED, 4, by_warps(33)),
            *(one(f"banks.{name}", "read", SHARED, *of) for name, of in banks.items()),
            Line("banks.float2_even", "read", SHARED, 8, [request(lambda i: 8 * (i // 2), range(0, 32, 2))]),
            write_all("banks.end"),
        ],
        "static_bytes": [
            one("static.read", "read", "x", 4, lambda i: 4 * i),
            one("static.column_write", "write", SHARED, 4, lambda i: 4 * 33 * i),
            one("static.double", "write", SHARED, 8, lambda i: 8 * i),
            one("static.end", "read", SHARED, 4, lambda i: 0),
            one("static.end", "read", SHARED, 8, lambda i: 8 * (31 - i)),
            write_all("static.end"),
        ],
        "shared_adds": [
            one("shared_adds.start", "write", SHARED, 4, lambda i: 4 * i),
            one("shared_adds", "read", "x", 4, lambda i: 4 * i),
            one("shared_adds", "atomic", SHARED, 4, lambda i: 4 * (i // 8)),
            one("shared_adds.end", "read", SHARED, 4, lambda i: 4 * (i // 8)),
            write_all("shared_adds.end"),
        ],
        "barriers": [write_all("barriers.count", 6)],
        "long_loops": [
            Line("long_loops.start", "write", SHARED, 4, by_warps(2)),
            Line("long_loops.global", "read", "x", 4, long_loops["x"]),
            Line("long_loops.shared", "read", SHARED, 4, long_loops[SHARED]),
            Line("long_loops.shared", "write", SHARED, 4, long_loops[SHARED]),
            Line("long_loops.end", "read", SHARED, 4, by_warps(2)),
            write_all("long_loops.end", 2),
        ],
        "uneven_loops": [
            Line("uneven_loops.all", "read", "x", 4,
                 [dict.fromkeys(LANES, 4 * (k % 64)) for k in range(5000)]),
            Line("uneven_loops.odd", "read", "x", 4,
                 [dict.fromkeys(range(1, 32, 2), 4 * (k % 64 + 1)) for k in range(5000)]),
            write_all("uneven_loops.end"),
        ],
        "one_long_loop": [
            Line("one_long_loop", "read", "x", 4, [{5: 4 * (k % 64)} for k in range(9000)]),
            write_all("one_long_loop.end"),
        ],
        "matrices": [
            Line("matrices.fill", "write", SHARED, 16,
                 [request(lambda i, j=j: 512 * j + 16 * i) for j in range(9)]),
            one("matrices.conflicts", "read", SHARED, 16, lambda i: 128 * i),
            one("matrices.padded", "read", SHARED, 16, lambda i: 144 * i),
            Line("matrices.two", "read", SHARED, 16, [request(lambda i: 128 * i, range(16))]),
            Line("matrices.one", "read", SHARED, 16, [request(lambda i: 144 * i, range(8))]),
            one("matrices.store", "write", SHARED, 16, lambda i: 144 * i),
            Line("matrices.store_one", "write", SHARED, 16, [request(lambda i: 128 * i, range(8))]),
            write_all("matrices.end"),
        ],
        "copies": [
            Line("copies", "read", "x", 16,
                 [request(lambda i, j=j: 1024 * j + 16 * i, range(32)) for j in range(2)]
                 + [request(lambda i, j=j: 1024 * j + 512 + 16 * i, range(8)) for j in range(2)]),
            Line("copies", "write", SHARED, 16,
                 [request(lambda i, j=j: 512 * j + 16 * i) for j in range(4)]),
            Line("copies.end", "read", SHARED, 4,
                 [request(lambda i, j=j: 1024 + 512 * j + 16 * i) for j in range(2)]),
            write_all("copies.end", 2),
        ],
        "vector_adds": [
            one("vector_adds.each", "atomic", "y", 16, lambda i: 16 * i),
            one("vector_adds.same", "atomic", "y", 16, lambda i: 512 + 16 * (i // 8)),
        ],
        "named_barriers": [write_all("named_barriers.end", 6)],
    }  # fmt: skip


# Bytes of y that a memset writes before the launch, and barriers that blocks and warps pass.
MEMSET_BYTES = {"adds": 4 * 96, "only_adds": 4, "invariants": 4 * 32, "vector_adds": 4 * 144}
BARRIERS = {
    "banks": (1, 0), "static_bytes": (1, 0), "shared_adds": (2, 0), "long_loops": (1, 0),
    "barriers": (3 * (5 + 1), 3 * (2 * 5 + 1)), "matrices": (0, 2), "copies": (1, 0),
    "named_barriers": (2 * 3, 0),
}  # fmt: skip
CASES = re.findall(r"\bCASE\((\w+),", (PROGRAMS / "traffic.cu").read_text())


def seen(r: Requests) -> tuple[object, ...]:
    place = f"{r.where.file.name}:{r.where.line}"
    return (place, r.operation, r.memory, r.bytes_per_lane, r.requests, r.lanes, r.transactions, r.worst)


def expected_tensors(case: str) -> dict[str, TensorTraffic]:
    result: dict[str, TensorTraffic] = {}
    for memory in {line.memory for line in expected_lines()[case]}:
        of = {
            op: [x for x in expected_lines()[case] if (x.memory, x.operation) == (memory, op)]
            for op in ("read", "write", "atomic")
        }
        # A vector's additions count each.
        adds = sum(len(r) * (4 if x.size == 16 else 1) for x in of["atomic"] for r in x.requests)
        size = {op: sum(len(r) * x.size for x in lines for r in x.requests) for op, lines in of.items()}
        traffic = TensorTraffic(size["read"], size["write"], adds, size["atomic"])
        if memory == "y":
            traffic.written += MEMSET_BYTES.get(case, 0)
        if memory != SHARED:
            traffic.unique_read = len(set().union(*(x.touched() for x in of["read"])))
            traffic.unique_written = len(set().union(*(x.touched() for x in of["write"] + of["atomic"])))
        result[memory] = traffic
    return result


@pytest.mark.parametrize("case", CASES)
def test_traffic(any_build: Callable[[str], Program], case: str, request: pytest.FixtureRequest) -> None:
    n = 999 if case == "ragged" else 4096
    report = any_build("traffic").check(case, torch.rand(n), num_outputs=4096)
    assert report.error is None
    assert [str(f) for f in report.findings if "never written" not in f.message] == []
    traffic = report.traffic
    tensors = expected_tensors(case)
    assert traffic.shared == tensors.pop(SHARED, TensorTraffic())
    assert traffic.tensors == tensors
    assert (traffic.block_barriers, traffic.warp_barriers) == BARRIERS.get(case, (0, 0))
    lines = sorted(map(seen, traffic.lines()))
    expected = sorted(line.expected() for line in expected_lines()[case])
    if case == "nested" and "clang++ -O2" in request.node.name:
        # It lays the code out so that lanes which left the inner loop go on alone.
        lines, expected = ([(*row[:4], row[5]) for row in rows] for rows in (lines, expected))
    assert lines == expected


def test_the_worst_request_is_shown_by_lane(folder: Path) -> None:
    report = program("traffic", "g++ -O1", folder).check("branches", torch.rand(64))
    (line,) = (r for r in report.traffic.lines() if r.where.line == line_of("branch.other")[1])
    assert line.example == tuple(None if lane < 16 else 8 * lane for lane in LANES)


def test_barriers_are_counted_by_line(folder: Path) -> None:
    report = program("traffic", "g++ -O1", folder).check("barriers", num_outputs=192)
    assert {(f"{b.where.file.name}:{b.where.line}", b.scope): b.count for b in report.traffic.barriers} == {
        (at("barriers.block"), "block"): 3 * 5,
        (at("barriers.count"), "block"): 3,
        (at("barriers.warp"), "warp"): 3 * 2 * 5,
        (at("barriers.one_warp"), "warp"): 3,
    }


def test_named_barriers_are_counted_once(folder: Path) -> None:
    """At the first of the lines that call them."""
    for schedule in (-1, *SEEDS):
        prog = program("traffic", "g++ -O1", folder)
        traffic = prog.check("named_barriers", num_outputs=192, schedule=schedule).traffic
        assert {(f"{b.where.file.name}:{b.where.line}", b.scope): b.count for b in traffic.barriers} == {
            (at("named_barriers.part"), "warps"): 2 * 3,
            (at("named_barriers.whole"), "block"): 2 * 3,
        }
        assert traffic.partial_barriers == 2 * 3


def test_traffic_does_not_depend_on_the_order(folder: Path) -> None:
    prog = program("traffic", "g++ -O1", folder)
    for case in CASES:
        x = torch.rand(999 if case == "ragged" else 4096)
        in_order = counts(prog.check(case, x, 4096).traffic)
        for seed in SEEDS[:3]:
            assert counts(prog.check(case, x, 4096, seed).traffic) == in_order, (case, seed)


# Of hopper.cu: case -> what may be found; something is, in whatever order threads run. "(N,0,0)": any thread.
_BULK_READ = (
    "tile is read at {where} by thread (N,0,0) of block (0,0,0), while the copy that thread (0,0,0) started "
)
_REFILLED = (
    "tile is read at {where} by thread (N,0,0) and overwritten at {copy} by thread (0,0,0) of block (0,0,0), "
)
BULK_AND_PRODUCTS = {
    "bulk_wait_read": [],
    "bulk_barrier_read": [_BULK_READ + "at {copy} may be under way: no mbarrier_wait() covers it"],
    "bulk_wait_of_one_warp": [],
    "bulk_wait_of_another_warp": [
        _BULK_READ + "at {copy} may be under way: no mbarrier_wait() covers it",
        _REFILLED + "with no barrier between",
    ],
    "bulk_refill": [],
    "bulk_given_back_too_early": [_REFILLED + "with no barrier between"],
    "bulk_past_end": [
        "thread (N,0,0) of block (0,0,0) reads 128 bytes at {copy}, out of bounds: 64 bytes before the end "
        "of x [64]"
    ],
    "product": [],
    "product_without_proxy_fence": [
        "shared[N] is written at {panel} by thread (N,0,0) and read by wgmma at {product} for thread (N,0,0) "
        "of block (0,0,0), with no fence_async_proxy() of the writer between"
    ],
    "product_then_write": [],
    "product_overwritten": [
        "shared[N] is written at {write} by thread (N,0,0) and read at {product} by thread (N,0,0) of block "
        "(0,0,0), with no barrier between"
    ],
}


@pytest.mark.parametrize("case", BULK_AND_PRODUCTS)
def test_bulk_copies_and_products(build: Callable[[str], Program], case: str) -> None:
    lines = {"copy": at("bulk.copy"), "panel": at("panel.write"), "product": at("product.read")}
    lines["write"] = at("product_overwritten.write")
    if case.startswith("bulk") and BULK_AND_PRODUCTS[case] and case != "bulk_past_end":
        lines["where"] = at(f"{case}.read")
    expected = [
        re.escape(text.format(**lines)).replace("N", r"\d+") + r"( \([\d,]+ times\))?"
        for text in BULK_AND_PRODUCTS[case]
    ]
    for schedule in (-1, *SEEDS):
        report = build("hopper").check(
            case, torch.arange(1.0, 65), 128 if "product" in case else 64, schedule
        )
        found = [f for f in report.findings if "never written" not in str(f)]
        tool = "memcheck" if case == "bulk_past_end" else "racecheck"
        assert bool(found) == bool(expected), [str(f) for f in found]
        for finding in found:
            assert finding.tool == tool
            assert any(re.fullmatch(f"{tool}: {text}", str(finding)) for text in expected), str(finding)


def test_what_a_bulk_copy_and_a_product_move(build: Callable[[str], Program]) -> None:
    prog = build("hopper")
    traffic = prog.check("bulk_wait_read", torch.arange(1.0, 65), 64).traffic
    assert traffic.tensors["x"].read == 256
    assert (traffic.shared.written, traffic.shared.read) == (256, 64 * 4)
    traffic = prog.check("product", torch.arange(1.0, 65), 128).traffic
    assert (traffic.shared.written, traffic.shared.read) == (8192, 2 * 64 * 32)  # two matrices of 64 by 16


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(PROGRAMS.glob("*.cu")), ids=lambda path: path.stem)
def test_programs_are_cuda(source: Path, tmp_path: Path) -> None:
    nvcc = jit.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on PATH nor in site-packages (pip install nvidia-cuda-nvcc)")
    arch = "90a" if source.read_text().startswith("// Needs compute capability 9.0.") else "80"
    flags = ["-std=c++17", f"-I{REPO}", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-c", str(source)]
    run_command([str(nvcc), *flags, "-o", str(tmp_path / "program.o")])


# ---------------------------------------------------------------- chapters


@dataclass(frozen=True)
class Shape:
    """A problem for a chapter; strided: q, k, v and dout are stored as [B, N, H, d]."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    is_causal: bool = False
    strided: bool = False

    def __str__(self) -> str:
        flags = ("-causal" if self.is_causal else "") + ("-strided" if self.strided else "")
        return f"{self.batch}x{self.num_heads}x{self.seqlen_q}x{self.seqlen_k}{flags}"


def check_chapter(
    chapter: Chapter, shape: Shape, dtype: torch.dtype, head_dim: int, **options: object
) -> list[Report]:
    """The passes that the chapter defines itself."""
    sizes = (shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k)
    inputs = draw(*sizes, chapter=chapter, dtype=dtype, head_dim=head_dim)
    q, k, v, dout = (
        axes_swapped(t) if shape.strided else t for t in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    reports = []
    if chapter.forward_chapter is chapter:
        reports.append(chapter.check(q, k, v, is_causal=shape.is_causal, return_row_stats=True, **options))
    if chapter.has_backward:
        out, lse = chapter.forward(q, k, v, is_causal=shape.is_causal)
        out = axes_swapped(out) if shape.strided else out
        flags = {"is_causal": shape.is_causal, "deterministic": same_bits(chapter)}
        reports.append(chapter.check(q, k, v, out, dout, lse, **flags, **options))
    assert reports
    return reports


def assert_nothing_found(reports: list[Report]) -> None:
    for report in reports:
        assert report.error is None, report.what
        assert [str(f) for f in report.findings] == [], report.what


EACH_CHAPTER = pytest.mark.parametrize("name", chapter_parameters(list_chapters(), all_quick=True))
RAGGED = [
    Shape(2, 1, 45, 70),
    Shape(1, 2, 70, 45, is_causal=True),  # queries that see no key
    Shape(1, 2, 33, 64, is_causal=True, strided=True),
]
MORE_SHAPES = [
    Shape(1, 1, 1, 1),
    Shape(1, 1, 1, 129, is_causal=True),
    Shape(2, 2, 100, 3, is_causal=True),
    Shape(2, 3, 64, 64, strided=True),
    Shape(1, 1, 129, 257, is_causal=True),
    Shape(1, 2, 96, 31, strided=True),
]


@EACH_CHAPTER
def test_nothing_is_found_in_a_chapter(name: str) -> None:
    for schedule in (None, 0):
        chapter = loaded(name, schedule)
        for shape in RAGGED:
            assert_nothing_found(check_chapter(chapter, shape, FP32, 64))


@EACH_CHAPTER
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(FP32, 16), (FP32, 64), (FP16, 96), (BF16, 16)],
    ids=["fp32-16", "fp32-64", "fp16-96", "bf16-16"],
)
def test_nothing_is_found_in_a_chapter_at_more_sizes(name: str, dtype: torch.dtype, head_dim: int) -> None:
    for shape in RAGGED + MORE_SHAPES:
        assert_nothing_found(check_chapter(loaded(name), shape, dtype, head_dim))
    for seed in (1, 2):
        for shape in RAGGED:
            assert_nothing_found(check_chapter(loaded(name, seed), shape, dtype, head_dim))


@pytest.mark.parametrize("name", chapter_parameters(list_chapters()))
def test_counts_of_a_chapter_do_not_depend_on_the_order(name: str) -> None:
    shape = Shape(2, 1, 45, 70, is_causal=True)
    in_order = [counts(r.traffic) for r in check_chapter(loaded(name), shape, FP32, 64)]
    for seed in (0, 1):
        reports = check_chapter(loaded(name, seed), shape, FP32, 64)
        assert [counts(r.traffic) for r in reports] == in_order


COMPARED = [
    (Shape(2, 1, 45, 70, is_causal=causal), dtype) for causal in (False, True) for dtype in (FP32, BF16)
]


def chapter_counts(name: str, optimize: str) -> list[object]:
    """As JSON would give it back."""
    chapter = load_chapter(name)
    found = [
        counts(report.traffic)
        for shape, dtype in COMPARED
        for report in check_chapter(chapter, shape, dtype, 64, optimize=optimize)
    ]
    return json.loads(json.dumps(found))


@EACH_CHAPTER
@pytest.mark.slow
def test_counts_of_a_chapter_do_not_depend_on_the_optimizer(name: str) -> None:
    assert chapter_counts(name, "-O1") == chapter_counts(name, "-O2")


@EACH_CHAPTER
@pytest.mark.slow
def test_counts_of_a_chapter_do_not_depend_on_the_compiler(name: str) -> None:
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not on PATH")
    # A process remembers its compiler.
    script = f"import json, test_checker as t; print(json.dumps(t.chapter_counts({name!r}, '-O1')))"
    path = os.pathsep.join([str(REPO / "tests"), str(REPO)])
    env = os.environ | {"PYTHONPATH": path, "CXX": "clang++"}
    by_clang = json.loads(run_command([sys.executable, "-c", script], env=env, cwd=REPO))
    assert by_clang == chapter_counts(name, "-O1")


def test_an_accumulator_without_a_start_is_nan() -> None:
    """Registers and local memory hold NaN until they are written, not what the thread before left there."""
    kernel = edited_kernel("03_two_stage", "float acc_dk[kElementsN] = {};", "float acc_dk[kElementsN];")
    report, _ = remembered_check(kernel, Problem(1, 1, 70, 70, 64, torch.float32))
    _, dk, dv = report.outputs
    assert dk.isnan().all()
    assert not dv.isnan().any()
