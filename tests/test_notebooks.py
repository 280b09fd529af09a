"""What must be true of every stored notebook; ``make test`` also runs them with nbval."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from common import execute, jit, load_chapter
from common.chapters import list_chapters
from common.claims import all_claims

NOTEBOOKS = execute.notebooks()
IGNORE = "nbval-ignore-output"


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def text_outputs(cell: NotebookNode) -> str:
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts += [value for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_every_chapter_has_a_notebook() -> None:
    assert {info.name for info in list_chapters()} <= {path.stem for path in NOTEBOOKS}


@each
def test_outputs_are_stored(path: Path) -> None:
    cells = [c for c in code_cells(path) if execute.SKIP not in c.metadata.get("tags", [])]
    assert len(cells) >= 5
    assert all(cell.execution_count for cell in cells)
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) // 2
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]


@each
def test_the_kernel_is_the_one_that_was_run(path: Path) -> None:
    """A notebook whose kernel was edited since is stale: ``make notebooks`` runs it again."""
    names = {info.name for info in list_chapters()}
    hashes = re.findall(r"(\d\d_\w+): ([0-9a-f]{12})", "\n".join(text_outputs(c) for c in code_cells(path)))
    if path.stem in names:
        assert path.stem in dict(hashes)
    for name, digest in hashes:
        assert digest == jit.kernel_digest(load_chapter(name).info.kernel), f"{path.name} is stale: {name}"


@each
def test_cells_are_short(path: Path) -> None:
    for cell in code_cells(path):
        assert cell.source.count("\n") < 40, cell.source.splitlines()[0]


@each
def test_nothing_names_this_machine(path: Path) -> None:
    for cell in read(path).cells:
        text = cell.source + (text_outputs(cell) if cell.cell_type == "code" else "")
        assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr|opt|Users)/", text), text[:300]


@each
def test_no_warning_is_stored(path: Path) -> None:
    for cell in code_cells(path):
        assert "Warning" not in text_outputs(cell), text_outputs(cell)[:300]
        assert not [o for o in cell.outputs if o.get("name") == "stderr"], cell.source[:200]


@each
def test_the_first_cells_are_up_to_date(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].source == execute.badge(path)
    assert cells[1].source == execute.colab_cell()
    assert execute.SKIP in cells[1].metadata.tags


@each
def test_most_outputs_are_compared(path: Path) -> None:
    """nbval compares what is not tagged: a notebook must not opt out of being tested."""
    with_output = [c for c in code_cells(path) if c.outputs]
    compared = [c for c in with_output if IGNORE not in c.metadata.get("tags", [])]
    assert len(compared) >= 4


def test_claims_name_the_notebooks_that_check_them() -> None:
    """``Claim.chapters``, which 90_claims turns into links, against what the notebooks call."""
    named = {(c.number, chapter) for c in all_claims() for chapter in c.chapters}
    calls = re.compile(r"\bverdicts\(([\d, ]+)\)")
    run = {
        (int(number), path.stem)
        for path in NOTEBOOKS
        for cell in code_cells(path)
        for numbers in calls.findall(cell.source)
        for number in numbers.split(",")
    }
    assert run == {(number, chapter) for number, chapter in named if chapter in {p.stem for p in NOTEBOOKS}}


@pytest.mark.parametrize(
    ("text", "is_message"),
    [
        ("Building 02_tiled (fp32, head_dim 64) for NVIDIA H200 …", True),
        (" 4.8 s\n", True),
        ("Building 02_tiled (fp32, head_dim 64) for the CPU device … 4.8 s\nBuilding 03 …", True),
        ("RuntimeWarning: overflow", False),
    ],
)
def test_only_build_messages_are_dropped(text: str, is_message: bool) -> None:
    output = nbformat.v4.new_output("stream", name="stderr", text=text)
    assert execute.is_build_message(output) == is_message
