"""nbgrader itself on a release: its gradebook agrees with what ``make grade`` writes. Optional extra [instructor]."""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from common import jit
from common.grade import submissions
from common.grade.exercises import find_exercise
from common.grade.release import Assignment, make_release

CHAPTER = "01_naive"
SEED = "a seed"


def nbgrader(course: Path, *arguments: str) -> str:
    # It calls `alembic`, which it looks for on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(jit.REPO_ROOT), "FA2_GRADE_SEED": SEED}
    command = [sys.executable, "-m", "nbgrader", *arguments]
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def solved(folder: Path) -> None:
    """Everything right: the CUDA files and the cell of the Python exercise."""
    for name in ("document", "two_buffers"):
        (folder / f"{name}.cu").write_text(find_exercise(f"{CHAPTER}/{name}").solution())
    path = folder / f"{CHAPTER}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    cell = next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == "derive")
    cell.source = find_exercise(f"{CHAPTER}/derive").solution()
    nbformat.write(notebook, path)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("nbgrader") is None,
    reason="nbgrader is not installed: pip install -e .[instructor]",
)
def test_nbgrader_agrees_with_make_grade(tmp_path: Path) -> None:
    out = tmp_path / "assignment"
    make_release(out, Assignment(SEED), "01")
    course = out / "nbgrader"
    nbgrader(course, "generate_assignment", CHAPTER, "--create")
    released = course / "release" / CHAPTER
    ours = out / "release" / "exercises" / CHAPTER
    assert {p.name for p in released.iterdir()} == {p.name for p in ours.iterdir()}
    for path in ours.glob("*.cu"):
        assert (released / path.name).read_text() == path.read_text()
    theirs = nbformat.read(released / f"{CHAPTER}.ipynb", as_version=4)
    assert not any(
        "BEGIN SOLUTION" in cell.source or "return (p * dp)" in cell.source for cell in theirs.cells
    )
    sources = [cell.source for cell in nbformat.read(ours / f"{CHAPTER}.ipynb", as_version=4).cells]
    assert len(theirs.cells) == len(sources)

    for student in ("ada", "bob", "eve"):
        folder = course / "submitted" / student / CHAPTER
        shutil.copytree(released, folder)
        if student != "eve":
            solved(folder)
    broken = course / "submitted" / "bob" / CHAPTER / "document.cu"
    broken.write_text(
        broken.read_text().replace("place >= 0 && ", "").replace("1.0f, params.dv", "2.0f, params.dv")
    )

    nbgrader(course, "autograde", CHAPTER, "--create")
    nbgrader(course, "generate_feedback", CHAPTER)
    for student in ("ada", "bob", "eve"):
        page = course / "feedback" / student / CHAPTER / f"{CHAPTER}.html"
        assert "points" in page.read_text()

    arguments = [str(course / "submitted"), "--assignment", str(out / "instructor" / "assignment.json")]
    assert submissions.main([*arguments, "--out", str(tmp_path / "grades"), "-j", "2"]) == 0
    with (tmp_path / "grades" / "grades.csv").open() as file:
        ours_by_student = {row["student"]: row for row in csv.DictReader(file)}

    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        for student, row in ours_by_student.items():
            submission = gradebook.find_submission(CHAPTER, student)
            grades = {
                grade.cell.name.removeprefix("check_"): grade.score
                for grade in submission.notebooks[0].grades
            }
            for name, score in grades.items():
                assert score == pytest.approx(float(row[f"{CHAPTER}/{name}"]), abs=0.011), (student, name)
            assert submission.score == pytest.approx(float(row["score"]), abs=0.05)
            print(f"{student}: nbgrader {submission.score:.2f}, make grade {row['score']}")
    assert float(ours_by_student["ada"]["score"]) == 30
    assert float(ours_by_student["eve"]["score"]) < 15 < float(ours_by_student["bob"]["score"]) < 30
