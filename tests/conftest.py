"""Which tests can run on this machine, and what they share."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import (
    backward_chapters,
    chapter_parameters,
    forward_chapters,
    loaded,
    reproducible,
    unfit_for_this_gpu,
)
from mutation import score_table

from common import Chapter

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def _gpu_is_missing() -> str | None:
    from common import jit

    problem = jit.cuda_problem()
    return f"needs an NVIDIA GPU and nvcc: {problem}" if problem else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = _gpu_is_missing()
    for item in items:
        if item.get_closest_marker("gpu"):
            about = item.callspec.params if hasattr(item, "callspec") else {}
            if why := problem or unfit_for_this_gpu(about):
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The score of the mutants (test_mutation.py)."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    results = [value for r in reports for name, value in r.user_properties if name == "mutant"]
    if results:
        terminalreporter.section("mutants: who sees what is taken away")
        terminalreporter.write_line(score_table([tuple(result) for result in sorted(results)]))
    graded = [value for r in reports for name, value in r.user_properties if name == "graded mutant"]
    if graded:
        from grade_mutants import score_table as graded_table

        terminalreporter.section("known-wrong kernels and their scores (test_grade_mutants.py)")
        terminalreporter.write_line(graded_table([tuple(row) for row in graded]))


@pytest.fixture(params=chapter_parameters(backward_chapters()))
def chapter(request: pytest.FixtureRequest) -> Chapter:
    """Each chapter that has a backward pass, its blocks spread over the cores."""
    return loaded(request.param)


@pytest.fixture(params=chapter_parameters(backward_chapters()))
def reproducible_chapter(request: pytest.FixtureRequest) -> Chapter:
    """Each chapter that has a backward pass, in a schedule that gives the same bits on every run."""
    return reproducible(request.param)


@pytest.fixture(params=chapter_parameters(backward_chapters(), all_quick=True))
def every_chapter(request: pytest.FixtureRequest) -> Chapter:
    """Like ``reproducible_chapter``, for what is asked of each of them every time."""
    return reproducible(request.param)


@pytest.fixture(params=chapter_parameters(forward_chapters()))
def forward_chapter(request: pytest.FixtureRequest) -> Chapter:
    """Each chapter that defines a forward pass of its own."""
    return loaded(request.param)
