"""The pages that name chapters by hand: they name all of them, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common import execute, list_chapters
from common.jit import REPO_ROOT

PAGES = [REPO_ROOT / "README.zh.md", REPO_ROOT / "notebooks" / "README.md"]

WITH_LINKS = [*PAGES, REPO_ROOT / "README.md", REPO_ROOT / "notebooks" / "exercises" / "README.md"]

each = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each
def test_every_chapter_is_named(page: Path) -> None:
    text = page.read_text()
    assert [info.name for info in list_chapters() if f"{info.name}.ipynb" not in text] == []


def test_every_notebook_has_its_place_in_the_reading_order() -> None:
    text = PAGES[1].read_text()
    assert [path.name for path in execute.notebooks() if f"| [{path.stem}]({path.name}) |" not in text] == []


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(REPO_ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert targets
    assert [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()] == []
