"""The pages that name chapters by hand: they name all of them, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from common import execute, list_chapters
from common.check import check_chapter
from common.formulas import Problem
from common.jit import REPO_ROOT
from common.notebook import edited_kernel

PAGES = [REPO_ROOT / "README.zh.md", REPO_ROOT / "notebooks" / "README.md"]

WITH_LINKS = [
    *PAGES,
    REPO_ROOT / "README.md",
    REPO_ROOT / "CONTRIBUTING.md",
    REPO_ROOT / "notebooks" / "exercises" / "README.md",
]

each = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each
def test_every_chapter_is_named(page: Path) -> None:
    text = page.read_text()
    assert [info.name for info in list_chapters() if f"{info.name}.ipynb" not in text] == []


def test_every_notebook_has_its_place_in_the_reading_order() -> None:
    text = PAGES[1].read_text()
    assert [path.name for path in execute.notebooks() if f"| [{path.stem}]({path.name}) |" not in text] == []


def test_the_race_on_the_front_page_is_what_the_checker_says() -> None:
    removed = edited_kernel("02_tiled", "__syncthreads();  // P and dS are complete\n", "\n")
    report, _ = check_chapter(removed, Problem(1, 1, 256, 256, 64, torch.float32))
    said = str(report.findings[0]).replace("edited.cu", "kernel.cu")
    page = re.sub(r"\n\s*> ?", " ", (REPO_ROOT / "README.md").read_text())

    def without_threads(
        text: str,
    ) -> str:  # which of the racing threads is named first is the compiler's choice
        return re.sub(r"thread \(\d+,0,0\)", "thread", text)

    assert without_threads(said) in without_threads(page)


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(REPO_ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert targets
    assert [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()] == []
