"""Running what cannot be trusted: in a process of its own, with limits, behind all that the system offers.

The parent never loads a submission. It writes a job, starts ``runner.py`` on it, waits no longer than the
limit, ends the whole process group, and reads what was written. The process sees the compiler, the system's
libraries, the headers of ``common/cuda`` and ``common/cpu_device`` and its own folder: no exercises, no
solutions, no other submissions, no network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import jit

RUNNER = Path(__file__).with_name("runner.py")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SAID_BYTES = 20_000  # of what a process prints that is kept


@dataclass(frozen=True)
class Limits:
    """What one process may use. wall_seconds: after that it is ended, whatever it does."""

    wall_seconds: float = 60.0
    cpu_seconds: int = 60
    memory_bytes: int = 4 << 30
    file_bytes: int = 32 << 20


COMPILE = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=3 << 30, file_bytes=64 << 20)


@dataclass(frozen=True)
class Ended:
    """How a process ended. code: its exit status, negative for a signal. said: what it printed, cut short."""

    code: int
    timed_out: bool
    said: str
    seconds: float

    def __str__(self) -> str:
        if self.timed_out:
            return f"it was ended after {self.seconds:.0f} s"
        if self.code < 0:
            return f"it crashed ({signal.Signals(-self.code).name})"
        if self.code > 128 and self.code - 128 in {s.value for s in signal.Signals}:  # what bwrap reports
            return f"it crashed ({signal.Signals(self.code - 128).name})"
        return f"it exited with status {self.code} on its own"


def _toolchain() -> list[str]:
    """Where the compiler and Python are, if not where the system keeps its programs."""
    compiler = Path(shutil.which(os.environ.get("CXX", "c++")) or "/usr/bin/c++").resolve()
    folders = [sys.base_prefix, str(compiler.parents[1])]
    return [folder for folder in folders if not folder.startswith("/usr")]


def python() -> str:
    """The interpreter itself, without a virtual environment around it."""
    return str(Path(sys.executable).resolve())


def _bwrap(
    command: list[str], folder: Path, readable: Sequence[str], writable: Sequence[str] = ()
) -> list[str]:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    arguments = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--proc", "/proc"]
    arguments += ["--dev", "/dev", "--tmpfs", "/tmp"]
    for path in (*_SYSTEM, *_toolchain(), *readable):
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--ro-bind", str(folder), str(folder)]
    for path in writable:
        arguments += ["--bind", path, path]
    return [*arguments, "--chdir", str(folder), *command]


@functools.cache
def has_bwrap() -> bool:
    """Whether bubblewrap is installed and may make namespaces here."""
    if shutil.which("bwrap") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = _bwrap(["/bin/true"], Path(folder), ())
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def confined(
    job: dict[str, Any],
    folder: Path,
    limits: Limits,
    *,
    readable: Sequence[Path] = (),
    interpreter: str | None = None,
) -> Ended:
    """Runs a job in ``folder``, the only place that it may write to, and only while it compiles.

    job: see ``runner.py``. readable: files and folders it may read besides the system's.
    """
    folder = folder.resolve()
    paths = [str(path.resolve()) for path in readable]
    job = {
        **job,
        "limits": asdict(limits),
        "readable": [*_SYSTEM, *_DEVICES, *_toolchain(), *paths, str(RUNNER), str(folder)],
        "writable": ["/dev/null", *([str(folder)] if job["action"] == "execute" else [])],
    }
    path, said = folder / "job.json", folder / "said.txt"
    path.write_text(json.dumps(job))
    command = [interpreter or python(), "-I", str(RUNNER), str(path)]
    if has_bwrap():
        own = (
            [str(folder)]
            if job["action"] == "execute"
            else [job[k] for k in ("results", "memory") if k in job]
        )
        command = _bwrap(command, folder, [*paths, str(RUNNER)], own)
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "LC_ALL": "C.UTF-8",
        "TMPDIR": str(folder),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "FA2_CPU_BLOCK_TIMEOUT": f"{limits.wall_seconds / 3:.1f}",  # says which thread, before the end
    }
    start = time.monotonic()
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limits.wall_seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with said.open("rb") as output:
        text = output.read(_SAID_BYTES).decode(errors="replace")
    return Ended(process.returncode, timed_out, text, time.monotonic() - start)


@functools.cache
def protection() -> tuple[str, ...]:
    """What stands between a submission and this machine, by name; empty if the system offers nothing."""
    with tempfile.TemporaryDirectory() as folder:
        ended = confined({"action": "probe"}, Path(folder), Limits())
    try:
        seen = json.loads(ended.said)
    except ValueError:
        raise RuntimeError(f"the grader's own process does not start: {ended}: {ended.said}") from None
    names = ["bubblewrap"] if has_bwrap() else []
    if seen["landlock"]:
        names.append(f"Landlock (version {seen['landlock']})")
    if seen["seccomp"]:
        names.append("seccomp")
    return tuple(names)


def describe_protection() -> str:
    """The same in a sentence, which says plainly what is missing."""
    names = protection()
    files = [name for name in names if name != "seccomp"]
    text = f"Submissions run behind {', '.join(names)}." if names else "Submissions run WITHOUT A SANDBOX."
    if not files:
        text += (
            " Nothing keeps them from reading files that you can read, solutions among them: install "
            "bubblewrap (apt install bubblewrap), or grade on a machine that has nothing else on it."
        )
    if "seccomp" not in names:
        text += " They can start other processes; these end with the time limit."
    return text


def kernel_folders() -> list[Path]:
    """What a kernel includes."""
    return [jit.CUDA_HEADERS, jit.CPU_DEVICE]
