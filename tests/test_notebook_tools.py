"""What common/notebook.py shows, and which notebooks common/execute.py takes."""

from __future__ import annotations

import sys

import pytest
import torch

from common import execute, experiments, jit, list_chapters, load_chapter
from common.check import check_chapter, compare_outputs
from common.formulas import Problem
from common.notebook import edited_kernel, formula_table, quiet, requests_at, roofline, show, show_experiments


@pytest.mark.parametrize("name", [info.name for info in list_chapters()])
def test_functions_are_shown_whole(name: str) -> None:
    """Every function and struct of every chapter, up to its own last brace."""
    with pytest.raises(ValueError, match="there are ") as error:
        show(name, "no_such_function")
    functions = str(error.value).split("there are ")[1].split(", ")
    assert len(functions) >= 3
    for function in functions:
        text = show(name, function).data.split("```cpp\n")[1].removesuffix("\n```")
        assert text.count("{") == text.count("}") > 0, function
        assert text.endswith(("}", "};")), function


def test_quiet_hides_what_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        print("Building", file=sys.stderr)
    assert capsys.readouterr().err == ""


def test_a_kernel_is_edited_in_a_copy() -> None:
    source = load_chapter("01_naive").info.kernel.read_text()
    kernel = edited_kernel("01_naive", "  // partial[0] is complete")
    assert kernel.info.kernel.read_text() == source.replace("  // partial[0] is complete", "")
    assert kernel.info.kernel == edited_kernel("01_naive", "  // partial[0] is complete").info.kernel
    assert load_chapter("01_naive").info.kernel.read_text() == source
    with pytest.raises(ValueError, match="0 times in 01_naive"):
        edited_kernel("01_naive", "no such text")


def test_a_header_is_edited_in_a_copy() -> None:
    old, new = "constexpr int kRowsPerThread = 4;", "constexpr int kRowsPerThread = 2;"
    header = jit.CUDA_HEADERS / "dq_accumulator.h"
    assert header.read_text().count(old) == 1
    kernel = edited_kernel("10_async_pipeline", old, new)
    assert new in kernel.info.kernel.read_text()
    assert '#include "common/cuda/dq_accumulator.h"' not in kernel.info.kernel.read_text(), (
        "or it would be there twice"
    )
    problem = Problem(1, 1, 70, 70, 64, torch.bfloat16)
    report, inputs = check_chapter(kernel, problem)
    assert not report.findings
    assert all(c.ok for c in compare_outputs(kernel, problem, report, inputs))


def test_requests_are_found_by_their_source() -> None:
    chapter = load_chapter("10_async_pipeline")
    report, _ = check_chapter(chapter, Problem(1, 1, 70, 70, 64, torch.bfloat16))
    (in_kernel,) = requests_at(chapter, report, "ds[j / 2][0]);")
    assert (in_kernel.operation, in_kernel.memory) == ("write", "shared")
    in_header = requests_at(chapter, report, "reduce_add(target")
    assert {r.operation for r in in_header} == {"atomic"}
    assert {r.memory for r in in_header} == {"dq_accum"}
    with pytest.raises(ValueError, match="no request of 10_async_pipeline"):
        requests_at(chapter, report, "no such text")


def test_formulas_come_with_a_legend() -> None:
    text = formula_table("06_deterministic").data
    assert "$c$: 1 if is_causal, else 0" in text
    assert "$N_{q}$: seqlen_q" in text
    assert "return_row_stats" not in text, "chapter 06 has no r in its formulas"


@pytest.mark.parametrize("stored", [True, False])
def test_the_roofline_says_where_its_roofs_are_from(stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not stored:
        monkeypatch.setattr(experiments, "load", lambda part: None)
    (axes,) = roofline("02_tiled").axes
    said = [text.get_text() for text in axes.texts]
    if stored:
        assert "roofs measured on NVIDIA H200" in axes.get_title()
        assert any(text.startswith("fp32 matrix product ") for text in said)
    else:
        assert "roofs of the data sheet, L2 assumed" in axes.get_title()
        assert "fp32 peak 67 TFLOP/s" in said


def test_experiments_are_shown_with_their_verdicts() -> None:
    text = show_experiments("10_async_pipeline", {"stagger_d128": "1.2 ×"}).data
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert "| all warps last | 1.2 × | 271 / 280 / 287 | 258 / 276 / 299 | dropped |" in text
    assert "NVIDIA H200, torch 2" in text
    assert "who copies dO" not in text, "that is chapter 11's"


@pytest.mark.parametrize("numbers", [["99"], ["00", "foo"]])
def test_an_unknown_notebook_names_those_there_are(
    numbers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(execute, "execute", lambda path: pytest.fail(f"{path.name} is executed"))
    with pytest.raises(SystemExit) as error:
        execute.main(numbers)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert f"NN is {numbers[-1]}; expected the two digits of one of 00_forward, 01_naive" in said
