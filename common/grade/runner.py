"""The process that compiles or runs one submission. It gives up its rights first and then does one thing.

Uses the standard library alone, so that nothing but Python itself has to be within its reach. Started by
``common.grade.sandbox`` as ``python -I runner.py job.json``; what the job holds is described there. All that
the process says is written to files that were opened before its rights were given up.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

_SYSCALLS = {
    "x86_64": {
        "arch": 0xC000003E, "clone": 56, "kill": 62, "tkill": 200, "tgkill": 234, "clone3": 435,
        "new process": (57, 58), "exec": (59, 322),
        "never": (41, 42, 49, 53, 101, 155, 165, 166, 272, 298, 308, 310, 311, 317, 321, 425, 440),
    },
    "aarch64": {
        "arch": 0xC00000B7, "clone": 220, "kill": 129, "tkill": 130, "tgkill": 131, "clone3": 435,
        "new process": (), "exec": (221, 281),
        "never": (198, 199, 200, 203, 117, 39, 40, 41, 97, 241, 268, 270, 271, 280, 425, 440),
    },
}  # fmt: skip
# Sockets, tracing and other processes' memory, mounts, namespaces, bpf, io_uring.
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38

_READ = (1 << 2) | (1 << 3)  # files, folders
_EXECUTE = 1 << 0
_LANDLOCK_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def landlock_abi() -> int:
    """Version of Landlock that the system offers; 0 for none."""
    return max(_libc().syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)), 0)


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Landlock: from now on only these files and folders, whatever this process starts."""
    libc, abi = _libc(), landlock_abi()
    everything = (1 << _LANDLOCK_FS_BITS[min(abi, 5)]) - 1
    # Files; from ABI 4 on TCP ports, from ABI 6 on sockets and signals of other processes.
    fields = [everything, *([3] if abi >= 4 else []), *([3] if abi >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for paths, rights in ((readable, _READ | _EXECUTE), (writable, everything)):
        for path in paths:
            if not Path(path).exists():
                continue
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            of_files = rights if Path(path).is_dir() else rights & (1 | 2 | 4 | 1 << 14)
            rule = struct.pack("=Qi", of_files, handle)
            if libc.syscall(445, ruleset, 1, rule, 0) != 0:
                raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
            os.close(handle)
    if libc.syscall(446, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def restrict_calls(*, may_start: bool) -> bool:
    """Seccomp: no sockets, no tracing, no signals to others; without ``may_start`` no other process either.

    Returns whether the system could do it.
    """
    table: Any = _SYSCALLS.get(platform.machine())
    if table is None:
        return False
    program: list[tuple[int, int, int, int]] = [
        (0x20, 0, 0, 4),
        (0x15, 1, 0, table["arch"]),
        (0x06, 0, 0, _KILL),
    ]

    def deny(number: int, errno: int) -> None:
        program.extend([(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, _ERRNO | errno)])

    for number in table["never"]:
        deny(number, _EPERM)
    if not may_start:
        for number in (*table["new process"], *table["exec"], table["tkill"]):
            deny(number, _EPERM)
        deny(table["clone3"], _ENOSYS)  # glibc then takes clone, whose flags can be seen
        # A thread shares the memory (CLONE_VM); a process does not.
        program += [
            (0x20, 0, 0, 0), (0x15, 0, 4, table["clone"]), (0x20, 0, 0, 16), (0x45, 1, 0, 0x10000),
            (0x06, 0, 0, _ERRNO | _EPERM), (0x06, 0, 0, _ALLOW),
        ]  # fmt: skip
        for number in (table["kill"], table["tgkill"]):
            program += [
                (0x20, 0, 0, 0), (0x15, 0, 4, number), (0x20, 0, 0, 16), (0x15, 1, 0, os.getpid()),
                (0x06, 0, 0, _ERRNO | _EPERM), (0x06, 0, 0, _ALLOW),
            ]  # fmt: skip
    program.append((0x06, 0, 0, _ALLOW))
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    filter_ = struct.pack("=H6xQ", len(program), ctypes.addressof(buffer))
    return _libc().prctl(22, 2, ctypes.c_char_p(filter_), 0, 0) == 0


def give_up_rights(job: dict[str, Any]) -> None:
    """Limits first, then what cannot be taken back."""
    limits = job["limits"]
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_NOFILE, 128),
    ):
        resource.setrlimit(name, (value, value))
    _libc().prctl(38, 1, 0, 0, 0)  # no new privileges; both of the following need it
    if landlock_abi() > 0:
        restrict_files(job["readable"], job["writable"])
    restrict_calls(may_start=job["action"] == "execute")


class Call(ctypes.Structure):
    """``Call`` of entry.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in
          ("backward", "batch", "num_heads", "seqlen_q", "seqlen_k", "is_causal", "deterministic")),
        ("softmax_scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "dout", "lse")),
        ("strides", (ctypes.c_int64 * 3) * 5),
        *((name, ctypes.c_void_p) for name in ("first", "second", "third", "fourth", "workspace")),
    )  # fmt: skip


def _call(case: dict[str, Any]) -> Call:
    call = Call()
    for name in ("backward", "batch", "num_heads", "seqlen_q", "seqlen_k", "is_causal", "deterministic"):
        setattr(call, name, int(case[name]))
    call.softmax_scale = case["softmax_scale"]
    return call


def _library(job: dict[str, Any]) -> ctypes.CDLL:
    library = ctypes.CDLL(job["library"])
    for name in ("grade_passes", "grade_workspace", "grade_run"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def describe(job: dict[str, Any], results: int) -> None:
    """Which passes a submission has, and the scratch memory of each case."""
    library = _library(job)
    passes = library.grade_passes().decode().split()
    layouts = []
    if job["pass"] in passes:
        layouts = [library.grade_workspace(ctypes.byref(_call(case))).decode() for case in job["cases"]]
    os.write(results, json.dumps({"passes": passes, "layouts": layouts}).encode())


def run(job: dict[str, Any], results: int, memory: mmap.mmap) -> None:
    """One case, on the checked CPU device, in the memory that the parent laid out."""
    runtime = ctypes.CDLL(job["device"])
    runtime.cpu_device_set_schedule.argtypes = [ctypes.c_int64]
    runtime.cpu_device_check_begin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    runtime.cpu_device_check_region.argtypes = [
        ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    runtime.cpu_device_check_end.restype = ctypes.c_char_p
    library = _library(job)
    case = job["case"]
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    call = _call(case)
    for name, offset in case["places"].items():
        setattr(call, name, base + offset)
    for i, strides in enumerate(case["strides"]):
        for axis in range(3):
            call.strides[i][axis] = strides[axis]
    runtime.cpu_device_set_schedule(-1)
    runtime.cpu_device_check_begin(base, case["bytes"])
    for name, offset, size, item, valid, flags in case["regions"]:
        where = None if valid is None else base + valid
        runtime.cpu_device_check_region(name.encode(), base + offset, size, item, where, flags)
    error = library.grade_run(ctypes.byref(call))
    text = runtime.cpu_device_check_end()
    os.write(results, len(error).to_bytes(8, "little") + error)
    while text:
        text = text[os.write(results, text) :]


def answer(job: dict[str, Any], results: int) -> None:
    """Calls a student's functions. One line of JSON for each call: a value, or what was raised."""
    import torch

    def value(data: Any) -> Any:
        is_tensor = isinstance(data, dict) and set(data) == {"tensor"}
        return torch.tensor(data["tensor"], dtype=torch.float64) if is_tensor else data

    def plain(result: Any) -> Any:
        return {"tensor": result.tolist()} if isinstance(result, torch.Tensor) else result

    torch.set_num_threads(1)
    give_up_rights(job)
    names: dict[str, Any] = {"torch": torch}
    try:
        exec(compile(job["code"], "the cell", "exec"), names)
        error = None
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    for function, arguments in job["calls"]:
        line: dict[str, Any]
        try:
            if error is not None:
                line = {"error": error}
            elif function not in names:
                line = {"error": f"there is no function {function}"}
            else:
                line = {"value": plain(names[function](*[value(a) for a in arguments]))}
            text = json.dumps(line)
        except BaseException as raised:
            text = json.dumps({"error": f"{type(raised).__name__}: {raised}"})
        os.write(results, text.encode() + b"\n")


def main() -> None:
    """Does what the job says."""
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["action"] == "probe":
        give_up_rights(job)
        print(json.dumps({"landlock": landlock_abi(), "seccomp": restrict_calls(may_start=True)}))
        return
    if job["action"] == "execute":
        give_up_rights(job)
        for command in job["commands"]:
            if code := subprocess.call(command):
                sys.exit(code)
        return
    results = os.open(job["results"], os.O_WRONLY | os.O_CLOEXEC)
    if job["action"] == "describe":
        give_up_rights(job)
        describe(job, results)
    elif job["action"] == "answer":
        answer(job, results)
    else:
        handle = os.open(job["memory"], os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(handle, 0)
        os.close(handle)
        give_up_rights(job)
        run(job, results, memory)
    # Whatever the submission has registered to run at the end of the process stays undone.
    os._exit(0)


if __name__ == "__main__":
    main()
