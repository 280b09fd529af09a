"""Builds a kernel with ``torch.utils.cpp_extension.load``, for the GPU or for the CPU device.

One build serves one (kernel file, dtype, head_dim, device). Its name carries a hash of everything that
went into it, so an edited file or header gets a new library under a new name, beside the old one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils import cpp_extension

REPO_ROOT = Path(__file__).resolve().parent.parent
CUDA_HEADERS = REPO_ROOT / "common" / "cuda"
CPU_DEVICE = REPO_ROOT / "common" / "cpu_device"
BINDING = REPO_ROOT / "common" / "binding.cpp"

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# A newer API than the oldest supported PyTorch has must fail here, not on a reader's machine.
_STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"

OPTIMIZE_LEVELS = ("-O0", "-O1", "-O2", "-O3")  # of a checked build
# Sums may be reordered, which is what lets the compiler vectorise a dot product; NaN and infinity keep
# their meaning. A large local array must hit the guard page of its stack, not jump over it.
_CPU_KERNEL_FLAGS = [
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-fstack-clash-protection",
    "-Wno-unknown-pragmas",
]
# The checked build announces every access to common/cpu_device/checked/checker.cpp instead of to a thread
# sanitizer. Not vectorised, and no load is moved out of a loop, merged with another or split: what is counted
# is what the source asks for. Full debug information tells the line and the variable of an access.
_CHECKED_FLAGS = [
    "-fsanitize=thread",
    "-DCPU_DEVICE_CHECKED",
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fno-builtin-memcpy",
    "-fno-builtin-memset",
    "-Wno-unknown-pragmas",
    "-gdwarf-4",  # binutils misreads the file names of version 5
]
# Code stays in the order of the source: lanes that went different ways meet again where the ways do.
_CHECKED_GCC = [
    "-fno-tree-pre",
    "-fno-tree-loop-im",
    "-fno-tree-sink",
    "-fno-thread-jumps",
    "-fno-reorder-blocks",
    "-fno-reorder-blocks-and-partition",
    "-fno-guess-branch-probability",
    "-fno-var-tracking",  # nobody asks where a local variable is: a third of the compiler's time
    "-fno-var-tracking-assignments",
]
# The merged ends of two branches would belong to no line.
_CHECKED_CLANG = ["-fno-unroll-loops", "-mllvm", "-simplifycfg-sink-common=false"]
for _option in (
    "-disable-block-placement",
    "-disable-licm-promotion",
    "-enable-gvn-memdep=0",  # a load stays one although the last turn of a loop stored the value
    "-tsan-instrument-read-before-write",
):
    _CHECKED_CLANG += ["-mllvm", _option]
_LIBRARY_FLAGS = ["-U_FORTIFY_SOURCE", "-g1"]
_CUDA_FLAGS = [
    "-O3",
    "-lineinfo",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]


class BuildError(RuntimeError):
    """A kernel could not be built or loaded. The message says what to do; ``log`` has the full output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass
class KernelLibrary:
    """A loaded build: the operators ``common/binding.cpp`` registers, and where it lies."""

    name: str
    path: Path
    passes: frozenset[str]  # of "forward", "backward"
    seconds: float  # what building and loading took
    was_cached: bool
    runtime: ctypes.CDLL | None = field(default=None, repr=False)  # the CPU device it runs on

    @property
    def ops(self) -> object:
        """The namespace of the operators: passes, workspace, forward, backward."""
        return getattr(torch.ops, self.name)


def build_root() -> Path:
    """The folder that holds the builds: ``TORCH_EXTENSIONS_DIR``, or ``build/`` in the repository."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or REPO_ROOT / "build").resolve()


def find_nvcc() -> Path | None:
    """Nvcc of the toolkit PyTorch would use, of PATH, or of the PyPI package ``nvidia-cuda-nvcc``."""
    candidates = [Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc"] if cpp_extension.CUDA_HOME else []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates += [Path(entry) / "nvidia" / "cu13" / "bin" / "nvcc" for entry in sys.path if entry]
    return next((path for path in candidates if path.is_file()), None)


@functools.cache  # of every call of a kernel
def _has_nvcc(cuda_home: str | None) -> bool:
    return cuda_home is not None and (Path(cuda_home) / "bin" / "nvcc").is_file()


def cuda_problem() -> str | None:
    """Why kernels cannot be built for a GPU on this machine, or None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no NVIDIA GPU"
    if not _has_nvcc(cpp_extension.CUDA_HOME):
        return (
            "there is a GPU but no CUDA toolkit (nvcc) to compile for it; install one that matches PyTorch "
            f"(CUDA {torch.version.cuda}) and set CUDA_HOME"
        )
    return None


@functools.cache
def host_compiler() -> str:
    """The C++ compiler that builds use. Raises ``BuildError`` if there is none."""
    name = os.environ.get("CXX", "c++")
    if shutil.which(name) is None and "CXX" not in os.environ and shutil.which("g++"):
        name = os.environ["CXX"] = "g++"
    if shutil.which(name) is None:
        raise BuildError(
            f"no C++ compiler: {name!r} is not on PATH. Install one (apt install g++), or set CXX."
        )
    return name


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([host_compiler(), "--version"], capture_output=True, text=True, check=False).stdout


def _is_clang() -> bool:
    return "clang" in _compiler_version()


def library_flags() -> list[str]:
    """Flags of every library. GCC must not share inline variables between an old and a new build."""
    return _LIBRARY_FLAGS if _is_clang() else ["-fno-gnu-unique", *_LIBRARY_FLAGS]


@functools.cache
def _host_id() -> str:
    """What ``-march=native`` depends on: a build must not be reused on another processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    return platform.machine() + platform.processor()


def _digest(paths: list[Path], *facts: str) -> str:
    sha = hashlib.sha256()
    for path in paths:
        sha.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    for fact in (*facts, str(REPO_ROOT), torch.__version__):
        sha.update(fact.encode() + b"\0")
    return sha.hexdigest()[:12]


_INCLUDE = re.compile(r'^#include "(common/cuda/[^"]+)"\n', re.MULTILINE)


def included_headers(kernel: Path) -> list[Path]:
    """The headers of ``common/cuda`` that a kernel file includes, directly or through another one."""
    found: set[Path] = set()
    waiting = [kernel]
    while waiting:
        text = waiting.pop().read_text()
        for name in _INCLUDE.findall(text):
            header = REPO_ROOT / name
            if header.is_file() and header not in found:
                found.add(header)
                waiting.append(header)
    return sorted(found)


def kernel_sources(kernel: Path) -> list[Path]:
    """A kernel file and the headers of ``common/cuda`` that it includes."""
    return [kernel, *included_headers(kernel)]


def with_header_changed(kernel: Path, header: Path, text: str) -> str:
    """A kernel file's text in which ``header`` reads ``text``.

    The header stands in the place of its first include, and so do the headers that include it.
    """
    affected = [p for p in included_headers(kernel) if p == header or header in included_headers(p)]
    done: set[Path] = set()

    def contents(match: re.Match[str]) -> str:
        path = REPO_ROOT / match.group(1)
        if path not in affected:
            return match.group()
        if path in done:
            return ""
        done.add(path)
        own = text if path == header else path.read_text()
        return _INCLUDE.sub(contents, own.replace("#pragma once\n", ""))

    return _INCLUDE.sub(contents, kernel.read_text())


# A comment, or a literal that may look like one inside.
_COMMENT_OR_LITERAL = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)


@functools.lru_cache(maxsize=256)
def without_comments(source: str) -> str:
    """C++ without its comments and without lines and ends of lines that hold nothing else."""
    code = _COMMENT_OR_LITERAL.sub(lambda m: " " if m.group()[0] == "/" else m.group(), source)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


def kernel_digest(kernel: Path) -> str:
    """Hash of what a GPU measurement depends on: a kernel file and the headers it includes.

    Without comments, so that one can be mended without measuring again.
    """
    sha = hashlib.sha256()
    for path in kernel_sources(kernel):
        sha.update(path.name.encode() + b"\0" + without_comments(path.read_text()).encode() + b"\0")
    return sha.hexdigest()[:12]


def kernel_label(kernel: Path) -> str:
    """What a kernel file is called: its chapter, or the file itself."""
    return kernel.parent.name if kernel.name == "kernel.cu" else kernel.stem


def source_digest(kernel: Path) -> str:
    """Hash of all that a build of ``kernel`` depends on. Changes when any of it is edited."""
    headers = [p for folder in (CUDA_HEADERS, CPU_DEVICE) for p in sorted(folder.rglob("*")) if p.is_file()]
    return _digest([kernel, BINDING, *headers])


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Holds a build folder. The kernel drops an flock with its process, so a killed builder blocks nobody."""
    lock = folder.with_name(folder.name + ".flock")
    limit = float(os.environ.get("FA2_BUILD_WAIT", "300"))
    with lock.open("w") as handle:
        deadline = time.monotonic() + limit
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    _say(f"Waiting for another process that builds {folder.name} …")
                    waiting = True
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has been building {folder.name} for {limit:.0f} s (it holds "
                        f"{lock}). End that process, or wait longer with FA2_BUILD_WAIT=seconds."
                    ) from None
                time.sleep(0.05)
        # Whoever builds here holds the flock, so a lock file of PyTorch's found now has no owner.
        stale = folder / "lock"
        if stale.exists():
            _say(f"Removing {stale}: left behind by a build that was killed.")
            stale.unlink()
        yield


@contextlib.contextmanager
def _build_environment() -> Iterator[None]:
    """Ninja on PATH, and PyTorch's library folder quoted: ``load`` puts it into a command as it is."""
    saved_path, saved_lib = os.environ.get("PATH", ""), cpp_extension.TORCH_LIB_PATH
    if shutil.which("ninja") is None:
        try:
            import ninja
        except ImportError:
            raise BuildError("ninja is missing: pip install ninja") from None
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, saved_path])
    cpp_extension.TORCH_LIB_PATH = shlex.quote(saved_lib)
    try:
        yield
    finally:
        os.environ["PATH"], cpp_extension.TORCH_LIB_PATH = saved_path, saved_lib


# "file:12:3: error", as g++ and clang write, or "file(12): error", as nvcc does.
_DIAGNOSTIC = re.compile(r"^[^\s:(][^:(]*(?::\d+(?::\d+)?:|\(\d+\):) *(?:fatal )?(error|warning)\b")


def compiler_lines(log: str, limit: int = 30) -> str:
    """What the compiler says about the sources, without ninja's lines and the command line."""
    kept: list[str] = []
    in_error = False
    for line in log.splitlines():
        match = _DIAGNOSTIC.match(line)
        if match:
            in_error = match.group(1) == "error"
        elif line.startswith(("[", "FAILED", "ninja:", "In file included", "Error building")) or re.match(
            r"^(/|c\+\+|g\+\+|clang|nvcc)\S*( .*)? -", line
        ):
            in_error = False
        elif line.startswith(("ptxas error", "ptxas fatal", "nvcc fatal")) or "undefined reference" in line:
            kept.append(line)
        if in_error:
            kept.append(line.replace(f"{REPO_ROOT}/", ""))
    if not kept:
        kept = log.strip().splitlines()[-limit:]
    more = len(kept) - limit
    return "\n".join(kept[:limit] + ([f"… {more} more lines in the exception's .log"] if more > 0 else []))


def _stand_ins() -> Path:
    """A folder with an empty library for each of PyTorch's that ``load`` links, which is then found first.

    A fifth of a short build is the linker reading the symbols of the real ones. They are loaded already, by
    the same names, when a built library is; if it needs a symbol that they lack, it does not load.
    """
    folder = build_root() / "fa2_torch_libraries"
    if not (folder / "finished").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder):
            for library in (f"lib{name}.so" for name in ("c10", "torch", "torch_cpu", "torch_python")):
                command = [host_compiler(), "-shared", "-nostdlib", f"-Wl,-soname,{library}", "-x", "c++"]
                ended = subprocess.run(
                    [*command, os.devnull, "-o", str(folder / library)],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                if ended.returncode:
                    raise BuildError(f"{library} cannot be stood in for:\n{ended.stderr}", ended.stderr)
            (folder / "finished").touch()
    return folder


def _load(
    name: str,
    what: str,
    sources: list[Path],
    *,
    written: dict[str, str] | None = None,
    objects: Callable[[], list[Path]] = list,
    unchanged: Callable[[], bool] = lambda: True,
    cflags: list[str],
    cuda_cflags: list[str] | None = None,
    ldflags: list[str] | None = None,
    include: list[Path] | None = None,
) -> tuple[Path, float, bool]:
    """Builds ``name`` unless it is there, and loads it. Returns (library, seconds, was cached).

    ``written``: further sources, file names and texts. ``objects`` gives what else is linked. ``unchanged``
    tells whether the sources are still those that ``name`` is a hash of.
    """
    start = time.perf_counter()
    # One name is one set of operators, which a process can register only once, wherever it was built.
    if name in _loaded:
        return _loaded[name], time.perf_counter() - start, True
    folder = build_root() / name
    library, finished = folder / f"{name}.so", folder / "finished"
    if not finished.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder), _build_environment():
                if not finished.exists():
                    host_compiler()
                    if not unchanged():
                        raise BuildError(f"{what} was edited after it was loaded; load it again")
                    _say(f"Building {what} …", end="")
                    for file, text in (written or {}).items():
                        (folder / file).write_text(text)
                        sources = [*sources, folder / file]
                    linked = [shlex.quote(str(path)) for path in objects()]
                    if cuda_cflags is None:
                        # The CPU device itself needs none of PyTorch, and runs in programs without it.
                        needed = "-Wl,--no-as-needed" if linked else "-Wl,--as-needed"
                        linked += [f"-L{shlex.quote(str(_stand_ins()))}", needed]
                    cpp_extension.load(
                        name,
                        [str(s) for s in sources],
                        extra_cflags=cflags,
                        extra_cuda_cflags=cuda_cflags,
                        extra_ldflags=linked + (ldflags or []),
                        extra_include_paths=[str(p) for p in include or []],
                        build_directory=str(folder),
                        is_python_module=False,
                        with_cuda=cuda_cflags is not None,
                    )
                    if not unchanged():
                        raise BuildError(f"{what} was edited while it was built; load it again")
                    finished.touch()
                    _loaded[name] = library
                    seconds = time.perf_counter() - start
                    _say(f" {seconds:.1f} s")
                    return library, seconds, False
        except BuildError:
            raise
        except OSError as error:
            if error.errno is not None:  # of a file; what the dynamic loader says has no number
                raise _unwritable(error) from None
            _say("")
            raise _load_error(what, library, error) from None
        except RuntimeError as error:
            _say("")
            # Or PyTorch would take the same sources, tried again, for built.
            cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
            log = str(error.__cause__.output.decode() if getattr(error.__cause__, "output", None) else error)
            raise BuildError(f"{what} does not compile:\n{compiler_lines(log)}", log) from None
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        finished.unlink(missing_ok=True)
        raise _load_error(what, library, error) from None
    _loaded[name] = library
    return library, time.perf_counter() - start, True


_loaded: dict[str, Path] = {}  # what this process has loaded


def _unwritable(error: OSError) -> BuildError:
    return BuildError(
        f"cannot write {error.filename or build_root()} ({error.strerror}). Builds go to {build_root()}; "
        "set TORCH_EXTENSIONS_DIR to a folder you can write to."
    )


def _load_error(what: str, library: Path, error: OSError) -> BuildError:
    hint, detail = "", str(error.__cause__ or error)  # PyTorch wraps what the dynamic loader says
    if "undefined symbol" in detail:
        hint = (
            " A function or array is declared but never defined. An `extern __shared__` array of your own "
            "does that on the CPU device: take dynamic shared memory with dynamic_smem<T>()."
        )
    return BuildError(
        f"{what} was built but does not load: {detail}.{hint} Delete {library.parent} to rebuild."
    )


def made_once(name: str, suffix: str, command: list[str], sources: Sequence[Path]) -> Path:
    """What a compiler's command makes of ``sources``, kept until one of them or the command changes.

    Raises ``BuildError``.
    """
    path = build_root() / f"{name}_{_digest(list(sources), *command)}{suffix}"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whoever waited finds it made: a sandbox may have the file open, and must not lose it to another.
            with _exclusive(path), tempfile.TemporaryDirectory(dir=path.parent) as folder:
                if path.is_file():
                    return path
                made = Path(folder) / path.name
                ended = subprocess.run(
                    [*command, "-o", str(made)], capture_output=True, text=True, check=False
                )
                if ended.returncode:
                    raise BuildError(
                        f"{name} does not compile:\n{compiler_lines(ended.stderr)}", ended.stderr
                    )
                made.rename(path)
        except OSError as error:
            raise _unwritable(error) from None
    return path


def _binding(dtype: torch.dtype, device: torch.device) -> Path:
    """The compiled binding.cpp, which takes as long to compile as a kernel."""
    own = [REPO_ROOT] if device.type == "cuda" else [CPU_DEVICE, REPO_ROOT]
    command = [
        host_compiler(), "-fPIC", "-std=c++20", "-O1", _STABLE_ABI, *library_flags(),
        *define_flags(dtype, 16),  # it is the same for every head_dim
        *[f"-I{path}" for path in (*own, *cpp_extension.include_paths(device.type))],
        "-c", str(BINDING),
    ]  # fmt: skip
    headers = [path for folder in own[:-1] for path in sorted(folder.glob("*.h"))]
    name = f"fa2_binding_{DTYPE_NAMES[dtype]}_{device.type}"
    return made_once(name, ".o", command, [BINDING, *included_headers(BINDING), *headers])


def load_cpu_device(*, checked: bool = False) -> tuple[Path, ctypes.CDLL]:
    """The runtime of the CPU device, built once and shared by all kernels of this version of it.

    ``checked``: the one that checked builds run on, which sees every access.
    """
    sources = sorted(CPU_DEVICE.glob("*.cpp"))
    flags = ["-O3", "-pthread", *library_flags()]
    if checked:
        sources += sorted((CPU_DEVICE / "checked").glob("*.cpp"))
        flags.append("-DCPU_DEVICE_CHECKED")
    digest = _digest([*sources, *sorted(CPU_DEVICE.glob("*.h"))], *flags, host_compiler())
    name = "checked_device" if checked else "cpu_device"
    what = "the checked CPU device" if checked else "the CPU device"
    library, _, _ = _load(f"fa2_{name}_{digest}", what, sources, cflags=flags, ldflags=["-pthread"])
    runtime = ctypes.CDLL(str(library))
    runtime.cpu_device_set_schedule.argtypes = [ctypes.c_int64]
    runtime.cpu_device_set_schedule.restype = None
    runtime.cpu_device_launch_log.restype = ctypes.c_char_p
    runtime.cpu_device_clear_launch_log.restype = None
    if checked:
        runtime.cpu_device_check_begin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        runtime.cpu_device_check_begin.restype = None
        runtime.cpu_device_check_region.argtypes = [
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int,
        ]
        runtime.cpu_device_check_region.restype = None
        runtime.cpu_device_check_end.restype = ctypes.c_char_p
    return library, runtime


def runtime_link_flags(device_library: Path, *, checked: bool = False) -> list[str]:
    """Linker flags of a library that runs on ``load_cpu_device``'s."""
    folder = shlex.quote(str(device_library.parent))
    # A kernel's own memcpy and memset are accesses too, which the compiler does not announce.
    wraps = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")] if checked else []
    return [f"-L{folder}", f"-l:{device_library.name}", f"-Wl,-rpath,{folder}", *wraps]


def checked_flags(optimize: str = "-O1", *, clang: bool | None = None) -> list[str]:
    """Compiler flags of a checked build. What it counts does not depend on ``optimize``.

    ``clang``: for clang or for GCC; by default for the compiler that builds use.
    """
    clang = _is_clang() if clang is None else clang
    return [optimize, *_CHECKED_FLAGS, *(_CHECKED_CLANG if clang else _CHECKED_GCC)]


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device; the CPU device models 9.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _gencode(capability: tuple[int, int]) -> str:
    # 9.0 and later have instructions that only the "a" variant of the architecture offers.
    arch = f"{capability[0]}{capability[1]}" + ("a" if capability[0] >= 9 else "")
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def define_flags(dtype: torch.dtype, head_dim: int) -> list[str]:
    """The ``-D`` flags that specialise a kernel."""
    return [f"-DFA2_ELEMENT={ELEMENTS[dtype]}", f"-DFA2_HEAD_DIM={head_dim}"]


def _name_file(name: str) -> dict[str, str]:
    """The source that tells binding.cpp its library's name."""
    return {"name.cpp": f'extern const char fa2_library_name[] = "{name}";\n'}


def build(
    kernel: Path,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
    digest: str,
    *,
    checked: bool = False,
    optimize: str = "-O1",
    max_grid_y: int | None = None,
    cpu_models: tuple[int, int] | None = None,
) -> KernelLibrary:
    """Builds and loads ``kernel`` for one dtype, head_dim and device.

    ``digest`` is ``source_digest(kernel)``. ``checked``: for the CPU device, and every access is seen;
    ``optimize`` is then the compiler's level and ``max_grid_y`` a limit on gridDim.y. ``cpu_models``: the
    compute capability whose tiles the CPU device runs, 9.0 by default. Raises ``BuildError``.
    """
    defines = define_flags(dtype, head_dim)
    label = kernel_label(kernel)
    what = f"{label} ({DTYPE_NAMES[dtype]}, head_dim {head_dim})"
    stem = re.sub(r"\W", "_", f"fa2_{label}_{DTYPE_NAMES[dtype]}_d{head_dim}")
    host_flags = [*library_flags(), *defines]
    runtime = None
    if device.type == "cuda":
        if problem := cuda_problem():
            raise BuildError(f"cannot build {what} for {device}: {problem}")
        capability = compute_capability(device)
        gencode = _gencode(capability)
        cuda_flags = [gencode, *_CUDA_FLAGS, *defines, "-Xcompiler", "-fno-gnu-unique"]
        flags = ["-O1", *host_flags]
        key = hashlib.sha256(" ".join([digest, *flags, *cuda_flags]).encode()).hexdigest()[:12]
        name = f"{stem}_sm{capability[0]}{capability[1]}_{key}"
        library, seconds, cached = _load(
            name,
            f"{what} for {torch.cuda.get_device_name(device)}",
            [kernel],
            written=_name_file(name),
            objects=lambda: [_binding(dtype, device)],
            unchanged=lambda: source_digest(kernel) == digest,
            cflags=flags,
            cuda_cflags=cuda_flags,
            include=[REPO_ROOT],
        )
    else:
        device_library, runtime = load_cpu_device(checked=checked)
        if cpu_models is not None:
            host_flags.append(f"-DFA2_COMPUTE_CAPABILITY={10 * cpu_models[0] + cpu_models[1]}")
        flags = [*_CPU_KERNEL_FLAGS, *host_flags]
        if checked:
            flags = [*checked_flags(optimize), *host_flags, "-g", f"-DFA2_WORKSPACE_GAP={1 << 16}"]
            if max_grid_y is not None:
                flags.append(f"-DFA2_MAX_GRID_Y={max_grid_y}")
        facts = [digest, device_library.stem, host_compiler(), _host_id(), *flags]
        key = hashlib.sha256(" ".join(facts).encode()).hexdigest()[:12]
        name = f"{stem}_{'checked' if checked else 'cpu'}_{key}"
        library, seconds, cached = _load(
            name,
            f"{what} for the {'checked ' if checked else ''}CPU device",
            [],
            written={"kernel.cpp": f'#include "{kernel}"\n'} | _name_file(name),
            objects=lambda: [_binding(dtype, device)],
            unchanged=lambda: source_digest(kernel) == digest,
            cflags=flags,
            ldflags=runtime_link_flags(device_library, checked=checked),
            include=[CPU_DEVICE, REPO_ROOT],
        )
    ops = getattr(torch.ops, library.stem)
    return KernelLibrary(library.stem, library, frozenset(ops.passes().split()), seconds, cached, runtime)
