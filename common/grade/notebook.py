"""The notebook of a chapter's exercises."""

from __future__ import annotations

from typing import Any

import nbformat
from nbformat import NotebookNode

from common.grade.exercises import Exercise
from common.grade.markers import strip_solutions

_START = """# Exercises of chapter {chapter}

{count} exercises, about {minutes} minutes in all. Each says which file to edit: it lies beside this notebook,
and so does everything else that you hand in. The cell below each task runs the same checks as the
instructor's grader, on other sizes; `python -m common.grade {number}` in a terminal does so, too. No GPU is
needed. Keep the files' names and the cells' order.
"""


def _markdown(name: str, text: str) -> NotebookNode:
    meta = {
        "nbgrader": {
            "grade": False,
            "solution": False,
            "locked": True,
            "task": False,
            "schema_version": 3,
            "grade_id": f"text_{name}",
        }
    }
    return nbformat.v4.new_markdown_cell(text, metadata=meta, id=f"text-{name}".replace("_", "-"))


def _code(name: str, text: str, *, points: float | None) -> NotebookNode:
    is_check = points is not None
    grader: dict[str, Any] = {
        "grade": is_check, "solution": not is_check, "locked": is_check, "task": False, "schema_version": 3,
        "grade_id": name,
    }  # fmt: skip
    if points is not None:
        grader["points"] = points
    return nbformat.v4.new_code_cell(text, metadata={"nbgrader": grader}, id=name.replace("_", "-"))


def make_notebook(chapter: str, exercises: list[Exercise], *, with_solutions: bool) -> NotebookNode:
    """The exercises of a chapter: tasks, cells to fill in, and a cell that grades each.

    with_solutions: keep what stands between the markers, and the markers, for nbgrader to take out.
    """
    minutes = sum(exercise.minutes for exercise in exercises)
    cells = [
        _markdown(
            "start",
            _START.format(chapter=chapter, number=chapter[:2], count=len(exercises), minutes=minutes),
        ),
        nbformat.v4.new_code_cell("from common.grade import check", id="start-import"),
    ]
    for exercise in exercises:
        book = f" Book: {', '.join(f'§{section}' for section in exercise.book)}." if exercise.book else ""
        edit = f"Edit `{exercise.file}`." if exercise.kind != "python" else "Fill in the cell below."
        cells.append(
            _markdown(
                exercise.name,
                f"## {exercise.title}\n\n*{exercise.difficulty}, about {exercise.minutes} minutes, "
                f"{exercise.max_score:g} points.* **Goal:** {exercise.goal}.{book}\n\n"
                f"{exercise.task.strip()}\n\n{edit}",
            )
        )
        arguments = ""
        if exercise.kind == "python":
            source = (
                exercise.marked_source
                if with_solutions
                else strip_solutions(exercise.marked_source, ".py", exercise.key)
            )
            cells.append(_code(exercise.name, source.strip(), points=None))
            arguments = "".join(f", {name}={name}" for name in exercise.functions)
        cells.append(
            _code(f"check_{exercise.name}", f'check("{exercise.key}"{arguments})', points=exercise.max_score)
        )
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook
