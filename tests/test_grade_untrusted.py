"""A submission is untrusted and often broken: it costs its item the points and harms nothing else.

Each is the solution of an exercise with something planted in its launcher. The list of words that a kernel may
not use is switched off, so that what stops it is the sandbox.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from common import jit
from common.grade import compiled, sandbox
from common.grade.exercises import find_exercise
from common.grade.kernel import grade_kernel
from common.grade.results import Item
from common.grade.scan import scan

EXERCISE = find_exercise("02_tiled/alibi")
LAUNCHER = "cudaError_t launch_backward(const BackwardParams& params, void*, cudaStream_t stream) {\n"
HEADERS = "".join(
    f"#include <{name}>\n"
    for name in ("unistd.h", "signal.h", "sys/socket.h", "cstdio", "cstdlib", "fcntl.h", "cerrno")
)
SECRET = jit.REPO_ROOT / "notebooks" / "exercises" / "02_tiled" / "alibi" / "changes.txt"


def with_launcher(code: str) -> str:
    """The solution, with code at the start of its launcher."""
    text = EXERCISE.solution()
    assert text.count(LAUNCHER) == 1
    return HEADERS + text.replace(LAUNCHER, LAUNCHER + code + "\n")


def graded(text: str, *, examine: bool = False, **options: object) -> Item:
    return grade_kernel(EXERCISE, text, seed="test", examine=examine, **options)


def seen(item: Item) -> str:
    return " ".join(check.seen for check in item.checks)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "RUN", sandbox.Limits(wall_seconds=6, cpu_seconds=6))


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("code", "why"),
    [
        pytest.param("exit(0);", "exited with status 0 on its own", id="exit"),
        pytest.param("for (volatile int i = 0;; i = i + 1) {}", "was ended after|crashed", id="endless loop"),
        pytest.param("*(volatile int*)8 = 1;", "crashed|SIGSEGV|segmentation", marks=slow, id="crash"),
        pytest.param("for (;;) puts(\"spam spam spam spam spam spam\");", "was ended after|crashed|exited", marks=slow, id="huge output"),
        pytest.param("raise(SIGKILL);", "crashed", marks=slow, id="kills itself"),
        pytest.param("_exit(7);", "exited with status 7", marks=slow, id="_exit"),
        pytest.param("throw 3;", "crashed|exited", marks=slow, id="throws"),
        pytest.param("{ char* p = nullptr; for (;;) { p = (char*)malloc(1 << 28); if (!p) abort(); for (int i = 0; i < (1 << 28); i += 4096) p[i] = 1; } }",
                     "crashed|was ended", marks=slow, id="all memory"),
    ],
)  # fmt: skip
def test_it_gets_the_points_for_compiling_and_no_more(code: str, why: str) -> None:
    start = time.monotonic()
    item = graded(with_launcher(code))
    assert item.score == EXERCISE.points["compiles"], str(item)
    assert re.search(why, seen(item)), str(item)
    assert time.monotonic() - start < 60


@slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "__syncthreads();  // P and dS are complete",
            "if (threadIdx.x == 0) __syncthreads();",
            "synccheck: .*barrier",
        ),
        (
            "m_start += kBlockM) {",
            "m_start += 0) {",
            r"has not ended after .*\(endless loop",
        ),
    ],
    ids=["deadlock", "endless loop in a kernel"],
)
def test_a_kernel_that_never_ends_is_named(old: str, new: str, said: str) -> None:
    text = EXERCISE.solution()
    assert old in text
    item = graded(text.replace(old, new, 1))
    assert item.score < EXERCISE.max_score / 2
    assert re.search(said, seen(item) + str(item.findings)), str(item)


DENIED = {
    "fork": "if (fork() >= 0) return cudaErrorInvalidValue;",
    "exec": 'execl("/bin/true", "true", nullptr);',
    "signal to everybody": "if (kill(-1, 0) == 0) return cudaErrorInvalidValue;",
    "socket": "if (socket(AF_INET, SOCK_STREAM, 0) >= 0) return cudaErrorInvalidValue;",
    "answer key": f'if (open("{SECRET}", O_RDONLY) >= 0) return cudaErrorInvalidValue;',
    "another folder": 'if (open("/tmp/planted-by-a-submission", O_CREAT | O_WRONLY, 0600) >= 0) return cudaErrorInvalidValue;',
    "own folder": 'if (open("planted", O_CREAT | O_WRONLY, 0600) >= 0) return cudaErrorInvalidValue;',
}


@pytest.mark.skipif("seccomp" not in sandbox.protection(), reason="the system has no seccomp")
@pytest.mark.skipif("Landlock" not in str(sandbox.protection()), reason="the system has no Landlock")
def test_what_it_may_not_do_fails_and_the_rest_is_graded() -> None:
    """Every attempt is refused, so the kernel goes on and is right; one that succeeded would return an error."""
    item = graded(with_launcher("\n".join(DENIED.values())))
    assert item.score == item.max_score, str(item)
    assert not Path("/tmp/planted-by-a-submission").exists()


@slow
@pytest.mark.skipif("Landlock" not in str(sandbox.protection()), reason="the system has no Landlock")
def test_landlock_and_seccomp_are_enough_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "has_bwrap", lambda: False)
    item = graded(with_launcher("\n".join(DENIED.values())))
    assert item.score == item.max_score, str(item)
    assert graded(f'#include "{SECRET}"\n' + EXERCISE.solution()).score == 0


@pytest.mark.parametrize(
    ("there_is", "said"),
    [
        (("bubblewrap", "seccomp"), "Submissions run behind bubblewrap, seccomp."),
        ((), "WITHOUT A SANDBOX. Nothing keeps them from reading files that you can read.*They can start"),
        (("seccomp",), "behind seccomp. Nothing keeps them from reading files"),
    ],
)
def test_what_is_missing_is_said_plainly(
    there_is: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "protection", lambda: there_is)
    assert re.search(said, sandbox.describe_protection())


def test_a_file_that_may_be_read_is_opened() -> None:
    """What is allowed does return the error that marks success."""
    item = graded(
        with_launcher('if (open("/usr/include/stdio.h", O_RDONLY) >= 0) return cudaErrorInvalidValue;')
    )
    assert item.score == EXERCISE.points["compiles"]


@pytest.mark.skipif(len(sandbox.protection()) < 2, reason="the system has neither bubblewrap nor Landlock")
def test_the_compiler_does_not_read_the_answer_key() -> None:
    item = graded(f'#include "{SECRET}"\n' + EXERCISE.solution())
    assert item.score == 0
    assert "slope" not in seen(item)
    assert "exp2f" not in seen(item)


def test_results_that_the_launcher_made_itself_do_not_count() -> None:
    """Right numbers, computed by the host: no kernel read the inputs or wrote the results."""
    loop = r"""
  const int N = params.seqlen_q, M = params.seqlen_k, offset = M - N;
  for (int64_t i = 0; i < int64_t(params.batch) * params.num_heads * M * kHeadDim; ++i) params.dk[i] = params.dv[i] = 0;
  for (int b = 0; b < params.batch; ++b) for (int h = 0; h < params.num_heads; ++h) for (int i = 0; i < N; ++i) {
    const int64_t head = int64_t(b) * params.num_heads + h;
    auto row = [&](const Element* x, const TensorStrides& s, int r) { return x + s.offset(b, h) + r * s.row; };
    const Element *q = row(params.q, params.q_strides, i), *o = row(params.out, params.out_strides, i);
    const Element* g = row(params.dout, params.dout_strides, i);
    Element* dq = params.dq + (head * N + i) * kHeadDim;
    float delta = 0;
    for (int x = 0; x < kHeadDim; ++x) { delta += o[x] * g[x]; dq[x] = 0; }
    for (int j = 0; j < params.num_visible_keys(i); ++j) {
      const Element *k = row(params.k, params.k_strides, j), *v = row(params.v, params.v_strides, j);
      float s = 0, dp = 0;
      for (int x = 0; x < kHeadDim; ++x) { s += q[x] * k[x]; dp += g[x] * v[x]; }
      s = s * params.softmax_scale - exp2f(-8.0f * (h + 1) / params.num_heads) * fabsf(float(i + offset - j));
      const float p = expf(s - params.lse[head * N + i]), ds = p * (dp - delta) * params.softmax_scale;
      for (int x = 0; x < kHeadDim; ++x) {
        dq[x] += ds * k[x];
        params.dk[(head * M + j) * kHeadDim + x] += ds * q[x];
        params.dv[(head * M + j) * kHeadDim + x] += p * g[x];
      }
    }
  }
  return cudaSuccess;
"""
    item = graded(with_launcher(loop), constants={"kAlibi": 8})
    assert item.score == EXERCISE.points["compiles"], str(item)
    assert "no kernel reads q, k, v, dout" in seen(item)


@slow
def test_a_forged_log_forges_no_result() -> None:
    """The process may write what it likes to the file of results: what counts is the memory, compared outside."""
    item = graded(
        with_launcher(
            r'for (int fd = 3; fd < 64; ++fd) { (void)!write(fd, "\0\0\0\0\0\0\0\0", 8); } _exit(0);'
        )
    )
    assert item.score == EXERCISE.points["compiles"], str(item)
    noise = r'for (int fd = 3; fd < 64; ++fd) { (void)!write(fd, "\0\0\0\0\0\0\0\0launch\tx\nfinding\t9\n", 30); } _exit(0);'
    assert graded(with_launcher(noise)).score == EXERCISE.points["compiles"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("#include <torch/torch.h>", "includes torch/torch.h"),
        ('#include "ATen/ATen.h"', "includes ATen/ATen.h"),
        ("void f() { exit(0); }", "uses exit"),
        ('void f() { system("true"); }', "uses system"),
        ('void f() { asm("nop"); }', "uses asm"),
        ("__attribute__((constructor)) void f() {}", "uses constructor"),
    ],
)
def test_what_a_kernel_has_no_use_for_is_named(line: str, named: str) -> None:
    found = scan(EXERCISE.solution() + line + "\n")
    assert any(named in what for _, what in found), found
    assert found[0][0] == EXERCISE.solution().count("\n") + 1


def test_no_chapter_and_no_solution_uses_any_of_it() -> None:
    for path in (jit.REPO_ROOT / "chapters").glob("*/kernel.cu"):
        assert scan(path.read_text()) == [], path
    assert scan(EXERCISE.solution()) == []


def test_pytorch_is_out_of_reach() -> None:
    item = graded("#include <torch/csrc/stable/tensor.h>\n" + EXERCISE.solution(), examine=False)
    assert item.score == 0
    assert "torch/csrc/stable/tensor.h" in seen(item)


def test_one_submission_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    graded(with_launcher("exit(0);"))
    assert list(tmp_path.iterdir()) == []
