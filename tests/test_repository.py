"""Rules that every chapter and every page keeps."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import is_quick, loaded, mostly_slow

from common import ChapterInfo, check, jit, list_chapters, readme
from common.diff import step_size
from common.inputs import random_inputs
from common.new_chapter import create

CHAPTERS = list_chapters()
FOR_A_T4 = [info for info in CHAPTERS if info.min_compute_capability <= (7, 5)]
EACH_CHAPTER = pytest.mark.parametrize("info", CHAPTERS, ids=lambda info: info.name)


@EACH_CHAPTER
def test_kernel_knows_neither_torch_nor_the_cpu(info: ChapterInfo) -> None:
    text = info.kernel.read_text()
    includes = re.findall(r'#include ["<]([^">]+)[">]', text)
    allowed = r"common/cuda/.*|cuda_runtime\.h|cuda_fp16\.h|cuda_bf16\.h"
    assert [name for name in includes if not re.fullmatch(allowed, name)] == []
    assert not re.search(r"#\s*if", text)


# What may stand between a barrier and the comment above it: the head of a function of its own, and branches.
_AROUND = r"if \(.*\) \{|\} else \{|barrier_sync\(.*;|__device__ .*\{"


def is_explained(lines: list[str], i: int) -> bool:
    """Whether a comment beside or above line i says what its barrier is for."""
    if re.search(r"\);  // \w+", lines[i]):
        return True
    above = [line.strip() for line in lines[:i]]
    while above and re.fullmatch(_AROUND, above[-1]):
        above.pop()
    return bool(above) and above[-1].startswith("// ")


@EACH_CHAPTER
def test_every_barrier_says_what_it_protects(info: ChapterInfo) -> None:
    lines = info.kernel.read_text().splitlines()
    barriers = [
        i for i, line in enumerate(lines) if re.search(r"__sync(threads|warp)\(|barrier_sync\(", line)
    ]
    assert [lines[i] for i in barriers if not is_explained(lines, i)] == []


@EACH_CHAPTER
def test_kernel_file_is_short_and_starts_with_what_it_is(info: ChapterInfo) -> None:
    lines = info.kernel.read_text().splitlines()
    # Pipelines and roles take their space, and a forward pass of one's own does.
    assert len(lines) <= (300 if info.number <= 8 else 900)
    header = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    assert 5 <= header <= 25
    assert lines[0].startswith(f"// {info.name}: ")


@EACH_CHAPTER
def test_main_loop_is_numbered(info: ChapterInfo) -> None:
    heads = r"^// -+ (?:backward|the forward pass)$"
    passes = re.split(heads, info.kernel.read_text(), flags=re.MULTILINE)
    for text in passes:
        steps = [int(step) for step in re.findall(r"// (\d)\. .*=", text)]
        assert sorted(steps) == list(range(1, len(steps) + 1)), steps
        assert len(steps) >= 3


@EACH_CHAPTER
def test_what_a_chapter_builds_on_exists(info: ChapterInfo) -> None:
    names = [chapter.name for chapter in CHAPTERS]
    if info is CHAPTERS[0]:
        assert info.builds_on is None
    else:
        assert info.builds_on in names[: names.index(info.name)]


@pytest.mark.parametrize("info", mostly_slow(FOR_A_T4, is_quick), ids=lambda info: info.name)
@pytest.mark.parametrize("head_dim", [64, pytest.param(80, marks=pytest.mark.slow), 128])
def test_shared_memory_fits_a_t4(info: ChapterInfo, head_dim: int) -> None:
    chapter = loaded(info.name)
    inputs = random_inputs(1, 1, 8, head_dim)
    out, lse = chapter.forward(inputs.q, inputs.k, inputs.v)
    launches = list(chapter.forward_chapter.last_launches)
    if chapter.has_backward:
        chapter.backward(inputs.q, inputs.k, inputs.v, out, inputs.dout, lse)
        launches += chapter.last_launches
    assert launches
    assert max(launch.shared_bytes for launch in launches) <= 64 * 1024


def test_steps_are_small() -> None:
    """From 02 on, where the tile loop stands, the diff is the lesson. 04 takes away a kernel of 03's."""
    for info in CHAPTERS:
        if 3 <= info.number <= 8:
            assert step_size(info.builds_on, info.name).changed <= 90, info.name


def test_readme_table_is_current() -> None:
    text = readme.README.read_text()
    assert readme.render(text) == text, "run `make readme`"


def test_readme_and_ci_name_the_same_test_command() -> None:
    assert "$ make test " in readme.README.read_text()
    assert "\nmake test\n" in (jit.REPO_ROOT / ".ci" / "run").read_text()


def test_make_help_lists_every_target() -> None:
    makefile = (jit.REPO_ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    listed = subprocess.run(
        ["make", "help"], cwd=jit.REPO_ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [target for target in phony if not re.search(rf"^{target} ", listed, re.MULTILINE)] == []


def test_new_chapter_is_found_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from common import chapters, new_chapter

    copies = tmp_path / "chapters"
    shutil.copytree(chapters.CHAPTERS, copies)
    monkeypatch.setattr(chapters, "CHAPTERS", copies)
    monkeypatch.setattr(new_chapter, "CHAPTERS", copies)
    assert "chapters/98_mine is a copy of 02_tiled" in create("98_mine", "02")
    mine = chapters.load_chapter(98)
    assert mine.info.builds_on == "02_tiled"
    inputs = random_inputs(1, 1, 20, 64)
    out, lse = mine.forward(inputs.q, inputs.k, inputs.v)
    mine.backward(inputs.q, inputs.k, inputs.v, out, inputs.dout, lse)
    with pytest.raises(ValueError, match="exists already"):
        create("98_mine", "02")
    with pytest.raises(ValueError, match="NAME is '98_other', but 98_mine has the number 98 already"):
        create("98_other", "02")
    assert not (copies / "98_other").exists()
    with pytest.raises(ValueError, match="two digits and a name"):
        create("mine", "02")


def test_an_unknown_chapter_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"there is no chapter '55'; there are 00_forward, 01_naive"):
        loaded("55")


@pytest.mark.parametrize("module", ["readme", "resources", "sass"])
def test_help_writes_nothing(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module(f"common.{module}")
    monkeypatch.setattr(Path, "write_text", lambda path, text: pytest.fail(f"{path.name} is written"))
    monkeypatch.setattr(jit, "find_nvcc", lambda: pytest.fail("something is to be compiled"))
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    assert f"usage: python -m common.{module} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "size"),
    [("--seqlen", "-3"), ("--seqlen-k", "0"), ("--batch", "0"), ("--heads", "-1"), ("--head-dim", "0")],
)
def test_sizes_to_check_out_of_range(option: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        check.main(["05", option, size])
    assert error.value.code == 2
    assert f"{option} is {size}; expected at least 1" in capsys.readouterr().err


def test_what_is_checked_is_said_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def stop(*arguments: object) -> None:
        said.append(capsys.readouterr().err)
        raise ValueError("stopped")

    monkeypatch.setattr(check, "check_chapter", stop)
    assert check.main(["05", "--seqlen", "3000", "--seqlen-k", "40", "--causal"]) == 2
    assert said == ["Checking 05_fp32_accum backward, fp32, B=1 H=1 Nq=3000 Nk=40 d=64, causal …\n"]


def test_sources_name_no_machine() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=jit.REPO_ROOT, capture_output=True, text=True, check=False
    ).stdout
    pattern = re.compile(r"(?<![\w.])/(root|home|work|opt)/")
    found = []
    for name in tracked.split():
        path = jit.REPO_ROOT / name
        if path.is_file() and path.suffix in {
            ".py",
            ".md",
            ".toml",
            ".cu",
            ".h",
            ".cpp",
            ".yml",
            ".json",
            ".ipynb",
            ".txt",
        }:
            found += [
                name
                for line in path.read_text().splitlines()
                if pattern.search(line) and "re.compile" not in line
            ]
    assert found == []


def test_dtypes_are_named_alike_everywhere() -> None:
    assert set(jit.ELEMENTS) == set(jit.DTYPE_NAMES) == {torch.float32, torch.float16, torch.bfloat16}
