"""Building kernels: edits, broken sources, locks, odd paths, missing tools, read-only caches."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import BF16, FP16, FP32, REPO, draw, either_right_or, loaded, nearest_build, run_and_check

from common import BuildError, Chapter, jit, list_chapters, load_chapter, load_kernel

# The smallest kernel that keeps the launch contract: dQ becomes a constant.
FILL = """\
#include "common/cuda/attention.h"
#include "common/cuda/launch.h"

namespace {

constexpr float kValue = 1.0f;

__global__ void fill_kernel(BackwardParams params) {
  const int64_t n = int64_t(params.batch) * params.num_heads * params.seqlen_q * kHeadDim;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) params.dq[i] = from_float<Element>(kValue);
}

}  // namespace

void describe_workspace(const BackwardParams&, WorkspaceLayout&) {}

cudaError_t launch_backward(const BackwardParams& params, void*, cudaStream_t stream) {
  return launch(fill_kernel, dim3(1), dim3(32), 0, stream, params);
}
"""

# Runs a kernel file in a fresh process: `python -c SCRIPT kernel.cu`.
SCRIPT = """\
import sys, time, torch
from common import load_kernel
start = time.perf_counter()
kernel = load_kernel(sys.argv[1])
q = torch.zeros(1, 1, 4, 16)
dq, dk, dv = kernel.backward(q, q, q, q, q, torch.zeros(1, 1, 4))
print("value", dq[0, 0, 0, 0].item(), "seconds", time.perf_counter() - start)
"""


def value_of(kernel: Chapter) -> float:
    """What the fill kernel writes."""
    q = torch.zeros(1, 1, 4, 16)
    dq, _, _ = kernel.backward(q, q, q, q, q, torch.zeros(1, 1, 4))
    assert torch.all(dq == dq[0, 0, 0, 0])
    return dq[0, 0, 0, 0].item()


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build folder, but for the runtime of the CPU device, which need not be built each time."""
    device_library, _ = jit.load_cpu_device()
    folder = tmp_path / "builds"
    shutil.copytree(device_library.parent, folder / device_library.parent.name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.fixture
def fill(tmp_path: Path) -> Path:
    """A fill kernel of this test's own."""
    path = tmp_path / "fill.cu"
    path.write_text(FILL)
    return path


def start(
    kernel: Path, *arguments: str, repo: Path, script: str, **environment: str | None
) -> subprocess.Popen:
    """A script in a process group of its own, which ends with the test."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": str(repo)}
    for name, value in environment.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return subprocess.Popen(
        [sys.executable, "-c", script, str(kernel), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=repo,
        start_new_session=True,
    )


@contextlib.contextmanager
def started(
    kernel: Path, *arguments: str, repo: Path = REPO, script: str = SCRIPT, **environment: str | None
) -> Iterator[subprocess.Popen]:
    process = start(kernel, *arguments, repo=repo, script=script, **environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def finish(process: subprocess.Popen, timeout: float = 60) -> tuple[float, str]:
    """(what the kernel wrote, standard error)."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, out + err
    return float(re.search(r"value (\S+)", out).group(1)), err


def run_in_a_process(
    kernel: Path, timeout: float = 60, repo: Path = REPO, **environment: str | None
) -> tuple[float, str]:
    with started(kernel, repo=repo, **environment) as process:
        return finish(process, timeout)


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear within {seconds} s"
        time.sleep(0.02)


# ---------------------------------------------------------------- edit and rerun


def test_an_edited_kernel_runs_as_edited(builds: Path, fill: Path, capfd: pytest.CaptureFixture) -> None:
    """B49, B51: edit, load, run, any number of times in one process; earlier loads keep what they loaded.

    Building talks to standard error only: a notebook's standard output is compared.
    """
    first = load_kernel(fill)
    assert value_of(first) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Building fill (fp32, head_dim 16) for the CPU device" in captured.err
    for value in (2, 1):
        fill.write_text(FILL.replace("kValue = 1.0f", f"kValue = {value}.0f"))
        assert value_of(load_kernel(fill)) == value
    # Going back to 1 found the first build again, without a word.
    assert len([p for p in builds.iterdir() if p.is_dir() and p.name.startswith("fa2_fill")]) == 2
    capfd.readouterr()
    assert value_of(load_kernel(fill)) == 1
    assert value_of(first) == 1
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.slow
def test_a_kernel_edited_many_times(builds: Path, fill: Path) -> None:
    """B49: ten edits in one process, each of which runs."""
    for value in range(10):
        fill.write_text(FILL.replace("kValue = 1.0f", f"kValue = {value}.0f"))
        assert value_of(load_kernel(fill)) == value


def test_an_edit_between_load_and_first_run_is_not_mixed_in(builds: Path, fill: Path) -> None:
    """B49: a chapter "runs the sources as they were when it was loaded", also if it is built later."""
    kernel = load_kernel(fill)
    fill.write_text(FILL.replace("kValue = 1.0f", "kValue = 7.0f"))
    value = either_right_or(BuildError, "edited|changed", lambda: value_of(kernel))
    # Whichever text was built, it must not be found under the name of the other.
    fill.write_text(FILL)
    assert value_of(load_kernel(fill)) == 1
    assert value in (None, 1)


@pytest.mark.slow
def test_two_kernels_of_one_name_do_not_mix(builds: Path, tmp_path: Path) -> None:
    """B49: copies in two folders are two kernels, their statics and operators apart."""
    kernels = []
    for value in (1, 2):
        folder = tmp_path / f"copy{value}"
        folder.mkdir()
        (folder / "fill.cu").write_text(FILL.replace("kValue = 1.0f", f"kValue = {value}.0f"))
        kernels.append(load_kernel(folder / "fill.cu"))
    assert [value_of(kernel) for kernel in kernels] == [1, 2]
    assert [value_of(kernel) for kernel in reversed(kernels)] == [2, 1]


def copied_repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("common", "chapters"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.slow
def test_a_path_with_a_space(tmp_path: Path) -> None:
    """B49 (ii): a checkout in "my folder (copy)" builds into itself."""
    repo = copied_repository(tmp_path / "my folder (copy)")
    kernel = repo / "chapters" / "fill.cu"
    kernel.write_text(FILL)
    assert run_in_a_process(kernel, repo=repo, TORCH_EXTENSIONS_DIR=None)[0] == 1
    assert list((repo / "build").glob("fa2_fill_*/*.so"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["it's mine", "a&b; c", "50%", "ä ö"])
def test_a_path_with_odd_characters(tmp_path: Path, name: str) -> None:
    """B49 (ii), its kind: builds, or refuses with a BuildError."""
    repo = copied_repository(tmp_path / name)
    kernel = repo / "chapters" / "fill.cu"
    kernel.write_text(FILL)
    with started(kernel, repo=repo, TORCH_EXTENSIONS_DIR=None) as process:
        out, err = process.communicate(timeout=60)
    assert "value 1.0" in out or "BuildError" in err


@pytest.mark.slow
def test_an_edited_header_of_the_repository(tmp_path: Path) -> None:
    """B49: a header of common/cuda edited between two processes, and back."""
    repo = copied_repository(tmp_path / "copy")
    kernel = repo / "chapters" / "fill.cu"
    kernel.write_text(FILL)
    assert run_in_a_process(kernel, repo=repo, TORCH_EXTENSIONS_DIR=None)[0] == 1
    header = repo / "common" / "cuda" / "element.h"
    text = header.read_text()
    old = "from_float<float>(float x) {\n  return x;"
    assert text.count(old) == 1
    header.write_text(text.replace(old, old.replace("return x", "return 2 * x")))
    assert run_in_a_process(kernel, repo=repo, TORCH_EXTENSIONS_DIR=None)[0] == 2
    header.write_text(text)
    value, stderr = run_in_a_process(kernel, repo=repo, TORCH_EXTENSIONS_DIR=None)
    assert value == 1
    assert "Building" not in stderr


def test_an_edited_header_in_one_process(
    builds: Path, fill: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B49: a shared header edited between two loads, and back, without a restart."""
    headers = tmp_path / "headers" / "common" / "cuda"
    shutil.copytree(REPO / "common" / "cuda", headers)
    monkeypatch.setattr(jit, "CUDA_HEADERS", headers)
    original = headers / "workspace.h"
    # The kernel asks for the copy by its path, as it would for one of the repository.
    (headers / "value.h").write_text("#pragma once\n#define VALUE 1.0f\n")
    fill.write_text(FILL.replace("kValue = 1.0f", "kValue = VALUE").replace(
        "namespace {", f'#include "{headers / "value.h"}"\n\nnamespace {{', 1
    ))  # fmt: skip
    assert original.is_file()
    for value in (1, 5, 1):
        (headers / "value.h").write_text(f"#pragma once\n#define VALUE {value}.0f\n")
        assert value_of(load_kernel(fill)) == value


MOVED_BUILDS = """\
import os, shutil, sys, torch
from common import jit, load_kernel
q = torch.zeros(1, 1, 4, 16)
def run():
    dq, _, _ = load_kernel(sys.argv[1]).backward(q, q, q, q, q, torch.zeros(1, 1, 4))
    return dq[0, 0, 0, 0].item()
first = run()
for path in jit.build_root().glob("fa2_fill_*"):
    if path.is_dir():
        shutil.rmtree(path)
if len(sys.argv) > 2:
    os.environ["TORCH_EXTENSIONS_DIR"] = sys.argv[2]
assert run() == first
print("value", first)
"""


@pytest.mark.slow
def test_a_build_folder_deleted_in_between(builds: Path, fill: Path) -> None:
    """B49's kind: `rm -rf build` while a notebook is open. Loading again works, there and elsewhere."""
    with started(fill, script=MOVED_BUILDS) as process:
        assert finish(process)[0] == 1
    assert run_in_a_process(fill)[0] == 1


@pytest.mark.slow
def test_a_build_folder_changed_in_between(builds: Path, fill: Path, tmp_path: Path) -> None:
    """B49's kind: another TORCH_EXTENSIONS_DIR, the same kernel, one process: no crash."""
    shutil.copytree(builds, tmp_path / "other")
    run_in_a_process(fill)  # so that the first of the two loads finds its build
    with started(fill, str(tmp_path / "other"), script=MOVED_BUILDS) as process:
        assert finish(process)[0] == 1


# ---------------------------------------------------------------- broken sources


def test_a_compile_error_shows_the_readers_lines(builds: Path, fill: Path) -> None:
    """B49: file, line and text of the mistake, not the command line; after the fix the kernel runs."""
    fill.write_text(FILL.replace("params.dq[i] = from_float", "params.dq[j] = form_float"))
    line = 1 + FILL[: FILL.index("params.dq[i]")].count("\n")
    with pytest.raises(BuildError) as caught:
        value_of(load_kernel(fill))
    message = str(caught.value)
    assert re.search(rf"fill\.cu:{line}:\d+: error: .*j.* was not declared", message)
    assert "form_float" in message
    assert "params.dq[j]" in message  # the line itself
    assert "fill (fp32, head_dim 16)" in message
    for noise in ("ninja", "-DFA2_HEAD_DIM", "Traceback", "FAILED"):
        assert noise not in message
    assert "-DFA2_HEAD_DIM=16" in caught.value.log
    assert caught.value.__cause__ is None


@pytest.mark.slow
def test_a_static_assertion_is_shown(builds: Path, fill: Path) -> None:
    """B19: too much static shared memory is caught by the compiler, in the chapter's own words."""
    fill.write_text(
        FILL.replace("namespace {", 'static_assert(kHeadDim > 16, "tiles are too large");\nnamespace {', 1)
    )
    with pytest.raises(BuildError, match="tiles are too large"):
        value_of(load_kernel(fill))


@pytest.mark.parametrize("how", ["function", pytest.param("array", marks=pytest.mark.slow)])
def test_what_is_never_defined_is_named(builds: Path, fill: Path, how: str) -> None:
    """B49: what is declared and never defined fails when the library loads; the message has its name."""
    declaration, use = {
        "function": ("__device__ float value_of_the_reader();", "value_of_the_reader()"),
        "array": ("extern __shared__ float value_of_the_reader[];", "value_of_the_reader[0]"),
    }[how]
    text = FILL.replace("namespace {", f"{declaration}\nnamespace {{", 1)
    fill.write_text(text.replace("from_float<Element>(kValue)", f"from_float<Element>({use})"))
    with pytest.raises(BuildError, match="value_of_the_reader"):
        value_of(load_kernel(fill))


@pytest.mark.slow
def test_a_damaged_library_is_rebuilt(builds: Path, fill: Path) -> None:
    """B46: a half-written library (a full disk, a killed copy) is an error once, not for ever."""
    load_kernel(fill).library(FP32, 16)
    (library,) = builds.glob("fa2_fill_*/*.so")
    # A process that has it mapped must not see the damage, so a new file takes its name.
    library.unlink()
    library.write_bytes(b"not a library")
    with started(fill) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert str(library.parent) in err
    assert "Delete" in err
    shutil.rmtree(library.parent)
    assert run_in_a_process(fill)[0] == 1


# ---------------------------------------------------------------- locks


def compiler_that(folder: Path, action: str) -> dict[str, str]:
    """A PATH whose c++ runs a shell command before it compiles anything.

    It is called c++ like the real one, so that it uses, and makes, the same builds.
    """
    folder.mkdir()
    compiler = folder / "c++"
    real = shutil.which("c++")
    compiler.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) {action};; esac\nexec "{real}" "$@"\n')
    compiler.chmod(0o755)
    return {"PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}


@pytest.fixture
def held_compiler(tmp_path: Path) -> tuple[dict[str, str], Path, Path]:
    """(environment, hold, begun): compiling a kernel creates ``begun``, then waits while ``hold`` exists."""
    hold, begun = tmp_path / "hold", tmp_path / "begun"
    wait = f'touch "{begun}"; while [ -e "{hold}" ]; do sleep 0.05; done'
    environment = compiler_that(tmp_path / "held", f'case "$*" in *kernel.cpp*) {wait};; esac')
    return environment, hold, begun


@pytest.mark.slow
def test_an_abandoned_lock_file_does_not_block(builds: Path, fill: Path) -> None:
    """B46: a file called lock in the build folder, with nobody behind it."""
    load_kernel(fill).library(FP32, 16)
    (folder,) = (p for p in builds.glob("fa2_fill_*") if p.is_dir())
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "lock").touch()
    value, stderr = run_in_a_process(fill)
    assert value == 1
    assert f"Removing {folder / 'lock'}" in stderr
    assert not (folder / "lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["group", "python"])
def test_a_killed_build_does_not_block_the_next(
    builds: Path, fill: Path, held_compiler: tuple[dict[str, str], Path, Path], victim: str
) -> None:
    """B46: killed in the middle of a compilation, with its compiler or without; the next build finishes."""
    environment, hold, begun = held_compiler
    hold.touch()
    with started(fill, **environment) as process:
        wait_for(begun)
        if victim == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait(timeout=10)
        assert list(builds.glob("fa2_fill_*/lock"))
        hold.unlink()
        assert run_in_a_process(fill, **environment)[0] == 1
    assert not list(builds.glob("fa2_fill_*/lock"))


@pytest.mark.slow
def test_a_live_lock_is_respected(
    builds: Path, fill: Path, held_compiler: tuple[dict[str, str], Path, Path]
) -> None:
    """B46: while another process builds, wait; give up within the limit, naming lock and remedy."""
    environment, hold, begun = held_compiler
    hold.touch()
    with started(fill, **environment) as builder:
        wait_for(begun)
        with started(fill, FA2_BUILD_WAIT="0.5", **environment) as impatient:
            _, err = impatient.communicate(timeout=30)
        assert impatient.returncode != 0
        assert re.search(r"BuildError: another process has been building \S+ for \S+ s", err)
        assert str(builds) in err
        assert ".flock" in err
        assert "FA2_BUILD_WAIT" in err
        assert list(builds.glob("fa2_*/lock"))  # the builder's, still there
        with started(fill, **environment) as patient:
            time.sleep(0.5)
            hold.unlink()
            assert finish(builder)[0] == 1
            assert finish(patient)[0] == 1


@pytest.mark.slow
def test_many_processes_build_once(builds: Path, fill: Path) -> None:
    """B46: three processes start at once; one builds, all get a whole library."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(fill)) for _ in range(3)]
        results = [finish(process) for process in processes]
    assert [value for value, _ in results] == [1, 1, 1]
    assert sum("Building fill" in stderr for _, stderr in results) == 1


# ---------------------------------------------------------------- folders that cannot be written


def test_a_build_folder_below_a_file(fill: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B49 (iii): the message names the folder and TORCH_EXTENSIONS_DIR, whoever runs it."""
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(blocked / "builds"))
    with pytest.raises(BuildError, match=r"cannot write .*TORCH_EXTENSIONS_DIR"):
        value_of(load_kernel(fill))


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_read_only_or_full_disk(
    builds: Path, fill: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B49 (iii): what a read-only cache, a full disk and a used-up quota report; the next build works."""
    mkdir = Path.mkdir

    def failing_mkdir(path: Path, *args: object, **kwargs: object) -> None:
        if path.name.startswith("fa2_fill"):
            raise OSError(code, os.strerror(code), str(path))
        mkdir(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", failing_mkdir)
        with pytest.raises(BuildError) as caught:
            value_of(load_kernel(fill))
    message = str(caught.value)
    assert str(builds) in message
    assert os.strerror(code) in message
    assert "TORCH_EXTENSIONS_DIR" in message


@pytest.mark.slow
def test_a_disk_that_fills_up_during_the_build(builds: Path, fill: Path, tmp_path: Path) -> None:
    """B49: the compiler's "no space left" is shown; the half-made build is not taken for a whole one."""
    message = "fatal error: error writing to kernel.o: No space left on device"
    with started(fill, **compiler_that(tmp_path / "full", f'echo "{message}" >&2; exit 1')) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "BuildError" in err
    assert message in err
    assert run_in_a_process(fill)[0] == 1


# ---------------------------------------------------------------- missing tools


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with a compiler and what it needs, without ninja and nvcc."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "c++", "g++", "gcc", "as", "ld", "which", "env", "uname"):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(Path(found).resolve())
    return folder


def test_ninja_need_not_be_on_the_path(
    builds: Path, fill: Path, bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B49 (i): the ninja of the Python environment is used; PATH is what it was afterwards."""
    monkeypatch.setenv("PATH", str(bare_path))
    assert shutil.which("ninja") is None
    assert value_of(load_kernel(fill)) == 1
    assert os.environ["PATH"] == str(bare_path)


def test_ninja_missing_altogether(
    builds: Path, fill: Path, bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B49 (i): the message says what to install."""
    monkeypatch.setenv("PATH", str(bare_path))
    monkeypatch.setitem(sys.modules, "ninja", None)  # makes `import ninja` fail
    with pytest.raises(BuildError, match="pip install ninja"):
        value_of(load_kernel(fill))
    assert os.environ["PATH"] == str(bare_path)


@pytest.mark.parametrize("cxx", [None, "/nowhere/c++"])
def test_no_compiler(
    builds: Path, fill: Path, tmp_path: Path, cxx: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B49 (i): which compiler is missing, and what to do."""
    monkeypatch.setattr(jit, "host_compiler", jit.host_compiler.__wrapped__)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if cxx:
        monkeypatch.setenv("CXX", cxx)
    expected = rf"no C\+\+ compiler: '{re.escape(cxx or 'c++')}' .*apt install g\+\+.*CXX"
    with pytest.raises(BuildError, match=expected):
        value_of(load_kernel(fill))


def test_a_gpu_without_a_toolkit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """B49 (i): no nvcc is a sentence, not a traceback from inside PyTorch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(jit.cpp_extension, "CUDA_HOME", None)
    problem = jit.cuda_problem()
    assert problem is not None
    assert "CUDA_HOME" in problem
    with pytest.raises(BuildError, match="CUDA_HOME"):
        jit.build(loaded("02_tiled").info.kernel, FP32, 64, torch.device("cuda", 0), "digest")


# ---------------------------------------------------------------- warm loads


def test_a_warm_load_builds_nothing() -> None:
    """B50's kind: in a new process the first call of a built chapter takes a moment; no compiler runs."""
    kernel = loaded("02_tiled").info.kernel
    load_kernel(kernel).library(FP32, 16)
    with started(kernel) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Building" not in err
    assert float(re.search(r"seconds (\S+)", out).group(1)) < 2


def test_no_output_of_a_kernel_call(chapter: Chapter, capfd: pytest.CaptureFixture) -> None:
    """B51: running prints nothing."""
    inputs = draw(1, 1, 5, chapter=chapter, head_dim=16)
    run_and_check(chapter, inputs)
    capfd.readouterr()
    run_and_check(chapter, inputs)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# ---------------------------------------------------------------- load_kernel


def test_a_copied_chapter_runs(tmp_path: Path) -> None:
    """B49: a reader's copy of a kernel, alone and with its chapter.toml, gives the chapter's results."""
    source = next(info for info in list_chapters() if info.name == "02_tiled")
    # At a fixed place, so that its build is reused by the next test run.
    alone = jit.build_root() / "mutants" / "mine.cu"
    alone.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source.kernel, alone)
    kernel = load_kernel(alone)
    assert kernel.name == "mine"
    assert kernel.forward_chapter.name == "00_forward"
    inputs = draw(1, 2, 33, chapter=kernel, head_dim=16)
    run_and_check(kernel, inputs, is_causal=True)
    folder = tmp_path / "20_mine"
    shutil.copytree(source.kernel.parent, folder)
    chapter = load_kernel(folder / "kernel.cu")
    assert chapter.name == "20_mine"
    assert chapter.info.title == source.title
    assert chapter.info.head_dims == source.head_dims
    with pytest.raises(ValueError, match="head_dim 20"):
        chapter.forward(*(torch.zeros(1, 1, 4, 20),) * 3)


def test_a_missing_kernel_is_named(tmp_path: Path) -> None:
    """B49: FileNotFoundError with the path as it was given; a folder is no kernel either."""
    with pytest.raises(FileNotFoundError, match=r"nothing\.cu"):
        load_kernel(tmp_path / "nothing.cu")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        load_kernel(tmp_path)
    with pytest.raises(ValueError, match="00_forward"):
        load_chapter("77_nothing")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('deterministic = "always"', 'deterministic = "maybe"'),
        ('dtypes = ["float32"', 'dtypes = ["float8"'),
        ("title =", "titel ="),
        ("min = 16", "min = sixteen"),
    ],
)
def test_a_mistake_in_chapter_toml_names_the_file(tmp_path: Path, old: str, new: str) -> None:
    """B49's kind: ValueError with the path of the chapter.toml."""
    folder = tmp_path / "20_mine"
    shutil.copytree(loaded("02_tiled").info.kernel.parent, folder)
    text = (folder / "chapter.toml").read_text()
    assert text.count(old) == 1
    (folder / "chapter.toml").write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(str(folder / "chapter.toml"))):
        load_kernel(folder / "kernel.cu")


def test_comments_are_no_code() -> None:
    source = """// first
int a = 1;  // one

/* several
   lines */ const char* b = "// no \\" comment"; char c = '"'; int d = 8 / 2;  /* x */
"""
    code = """int a = 1;
  const char* b = "// no \\" comment"; char c = '"'; int d = 8 / 2;"""
    assert jit.without_comments(source) == code


def test_a_measurement_depends_on_the_code_alone(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.cu"
    text = loaded("02_tiled").info.kernel.read_text()

    def digest(old: str, new: str) -> str:
        assert text.count(old) == 1, old
        kernel.write_text(text.replace(old, new))
        return jit.kernel_digest(kernel)

    original = digest("// P and dS are complete", "// P and dS are complete")
    assert digest("// P and dS are complete", "// complete\n\n") == original
    assert digest("__syncthreads();  // P and dS are complete", "") != original
    assert digest("constexpr int kBlockN = 32;", "constexpr int kBlockN = 16;") != original


@pytest.mark.parametrize("schedule", ["random", -1, 1.5, True, "1"])
def test_impossible_schedules_are_refused(schedule: object) -> None:
    """B17's kind: the message lists what a schedule may be."""
    with pytest.raises(ValueError, match=r"schedule .*in_order"):
        load_chapter(2, schedule=schedule)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_a_foreign_architecture_list_does_not_matter(
    chapter: Chapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B48: a kernel is built for the GPU that is there, whatever TORCH_CUDA_ARCH_LIST asks for."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    fresh = load_chapter(chapter.name)
    run_and_check(fresh, draw(1, 2, 70, chapter=fresh, device="cuda"), is_causal=True)


@pytest.mark.gpu
def test_builds_for_other_gpus_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """B48: two architectures have two names; a build for another GPU is an error, never zeros."""
    here = torch.cuda.get_device_capability()
    foreign = (8, 0) if here != (8, 0) else (9, 0)
    chapter = load_chapter("02_tiled")
    inputs = draw(1, 1, 8, chapter=chapter, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(jit, "compute_capability", lambda device: foreign)
        out, lse = (
            torch.zeros_like(inputs.q),
            torch.zeros(inputs.q.shape[:3], device="cuda"),
        )
        with pytest.raises((RuntimeError, BuildError), match=r"kernel image|architecture"):
            load_chapter("02_tiled").backward(inputs.q, inputs.k, inputs.v, out, inputs.dout, lse)
    run_and_check(chapter, inputs)
    library = chapter.library(*nearest_build(chapter, FP32, 64), "cuda")
    assert f"_sm{here[0]}{here[1]}_" in library.name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_half_operators_compile(builds: Path, fill: Path, dtype: torch.dtype) -> None:
    """B49 (iv): half + half and conversions, which PyTorch's default flags switch off."""
    fill.write_text(
        FILL.replace(
            "params.dq[i] = from_float<Element>(kValue)",
            "params.dq[i] = Element(kValue) + Element(kValue) * Element(2.0f)",
        )
    )
    q = torch.zeros(1, 1, 4, 16, dtype=dtype, device="cuda")
    dq, _, _ = load_kernel(fill).backward(q, q, q, q, q, torch.zeros(1, 1, 4, device="cuda"))
    assert torch.all(dq == 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_half_operators_compile_for_the_cpu_device(builds: Path, fill: Path, dtype: torch.dtype) -> None:
    """B49 (iv): the same source on the CPU device."""
    fill.write_text(
        FILL.replace(
            "params.dq[i] = from_float<Element>(kValue)",
            "params.dq[i] = Element(kValue) + Element(kValue) * Element(2.0f)",
        )
    )
    q = torch.zeros(1, 1, 4, 16, dtype=dtype)
    dq, _, _ = load_kernel(fill).backward(q, q, q, q, q, torch.zeros(1, 1, 4))
    assert torch.all(dq == 3)
