"""What an instructor hands out: ``make assignment``.

Writes into ``out/assignment``:

- ``release/`` and ``release.zip``: everything a student needs, and no solution;
- ``students/<name>/``: with a roster, the exercise files of each student, in variants of their own;
- ``instructor/assignment.json``: the seed and the roster, which ``make grade`` reads. Not to be handed out;
- ``nbgrader/``: the same exercises as a course of nbgrader's, in its ``source`` folder.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat

from common import jit
from common.chapters import CHAPTERS
from common.grade.exercises import FIND_IT, FOLDER, Exercise, list_exercises
from common.grade.find import ANSWER, plant
from common.grade.grading import VARIANT
from common.grade.markers import MarkerError, bare, solution_lines
from common.grade.notebook import make_notebook

OUT = jit.REPO_ROOT / "out" / "assignment"
_COPIED = ("LICENSE", "pyproject.toml", "constraints.txt", "notebooks/measurements/ratio.json")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
_README = """# Exercises: the backward pass of FlashAttention-2

A folder in `exercises/` has a notebook with the tasks of a chapter, and the files to edit. No GPU is needed.

    python3 -m venv .venv
    .venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    .venv/bin/pip install -c constraints.txt -e .
    .venv/bin/python -m jupyterlab exercises

A C++ compiler has to be there (`apt install g++`). The cell below each task grades what you have; so does

    .venv/bin/python -m common.grade 02                       # all exercises of chapter 02
    .venv/bin/python -m common.grade 02 --exercise {example}

The instructor's grader runs the same checks on other sizes. `python -m common.check FILE.cu` shows what a
kernel of yours asks memory for and what is wrong with it. The chapters are in `chapters/`.

Hand in the folder `exercises/` as it is: files keep their names.
"""


class LeakError(RuntimeError):
    """A release would contain a part of a solution. Nothing is handed out."""


@dataclass(frozen=True)
class Assignment:
    """What the instructor keeps: who got which variants and faults."""

    seed: str
    students: tuple[str, ...] = ()
    solutions: tuple[str, ...] = ()  # folders with exercises of the instructor's own

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"seed": self.seed, "students": self.students, "solutions": self.solutions}, indent=1)
            + "\n"
        )

    @classmethod
    def read(cls, path: Path) -> Assignment:
        """Raises ValueError if it is not there or not one."""
        try:
            data = json.loads(path.read_text())
            return cls(str(data["seed"]), tuple(data["students"]), tuple(data["solutions"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no assignment (make assignment writes one): {error}") from None

    @property
    def folders(self) -> list[Path]:
        """Where exercises are looked for."""
        return [FOLDER, *(Path(folder) for folder in self.solutions)]

    def variant(self, exercise: Exercise, student: str) -> dict[str, int]:
        """The constants that a student was given."""
        return exercise.variant(self.seed, student if student in self.students else "")

    def owner(self, student: str) -> str:
        """Whose fault was planted for a student: their own with a roster, else everybody's."""
        return student if student in self.students else ""


def write_chapter(folder: Path, exercises: Sequence[Exercise], assignment: Assignment, student: str) -> None:
    """The files of one chapter that a student edits, without the notebook."""
    folder.mkdir(parents=True, exist_ok=True)
    variants = {}
    for exercise in exercises:
        if exercise.kind == "cuda":
            constants = assignment.variant(exercise, student)
            variants[exercise.name] = constants
            (folder / exercise.file).write_text(exercise.starter(constants))
        elif exercise.kind == "find":
            fault = plant(exercise.info, assignment.seed, assignment.owner(student))
            (folder / f"{FIND_IT}.cu").write_text(fault.text)
            (folder / exercise.file).write_text(ANSWER)
    (folder / VARIANT).write_text(json.dumps({k: v for k, v in variants.items() if v}, indent=1) + "\n")


def _write_tasks(folder: Path, exercises: Sequence[Exercise]) -> None:
    """The descriptions: what the student's own checks need to know."""
    for exercise in exercises:
        target = folder / (FIND_IT if exercise.kind == "find" else exercise.key)
        target.mkdir(parents=True, exist_ok=True)
        names = ["task.md", *([] if exercise.kind == "find" else ["exercise.toml"])]
        if exercise.kind == "python" and exercise.local:
            names.append("check.py")
        for name in names:
            shutil.copyfile(exercise.folder / name, target / name)


def _by_chapter(exercises: Sequence[Exercise]) -> dict[str, list[Exercise]]:
    groups: dict[str, list[Exercise]] = {}
    for exercise in exercises:
        groups.setdefault(exercise.chapter, []).append(exercise)
    return groups


def secret_lines(exercises: Sequence[Exercise]) -> dict[str, str]:
    """Lines that only solutions have → the exercise they solve. Lines of the chapters are no secret."""
    public = {bare(line) for path in CHAPTERS.glob("*/kernel.cu") for line in path.read_text().splitlines()}
    return {
        line: exercise.key
        for exercise in exercises if exercise.kind != "find"
        for line in solution_lines(exercise.marked_source, exercise.suffix) - public
    }  # fmt: skip


def check_for_leaks(folder: Path, exercises: Sequence[Exercise]) -> None:
    """Raises ``LeakError`` if a file under ``folder`` has a line of a solution, a marker or an output."""
    secret = secret_lines(exercises)
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix == ".zip":
            continue
        text = path.read_bytes().decode(errors="replace")
        if path.suffix == ".ipynb":
            notebook = nbformat.reads(text, as_version=4)
            if any(cell.get("outputs") for cell in notebook.cells):
                raise LeakError(f"{path} has stored outputs")
            text = "\n".join(cell.source for cell in notebook.cells)
        for number, line in enumerate(text.splitlines(), start=1):
            if bare(line) in secret:
                raise LeakError(
                    f"{path}:{number} is a line of the solution of {secret[bare(line)]}: {line.strip()!r}"
                )
            if path.suffix in (".cu", ".ipynb", ".md") and re.search(r"(BEGIN|END) SOLUTION", line):
                raise LeakError(f"{path}:{number} still has a marker")


def make_release(out: Path, assignment: Assignment, chapter: str | None = None) -> list[Exercise]:
    """Writes everything below ``out`` anew. Returns the exercises.

    Raises ``MarkerError``, ValueError or ``LeakError`` before anything could be handed out: what was there is
    replaced only when the new release is whole.
    """
    exercises = list_exercises(chapter, assignment.folders)
    building = out.with_name(out.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    release = building / "release"
    for name in ("common", "chapters"):
        shutil.copytree(jit.REPO_ROOT / name, release / name, ignore=_IGNORED)
    for name in _COPIED:
        (release / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(jit.REPO_ROOT / name, release / name)
    _write_tasks(release / "notebooks" / "exercises", exercises)
    example = next((e.name for e in exercises if e.chapter.startswith("02")), exercises[0].name)
    (release / "README.md").write_text(_README.replace("{example}", example))
    for name, group in _by_chapter(exercises).items():
        folder = release / "exercises" / name
        write_chapter(folder, group, assignment, "")
        nbformat.write(make_notebook(name, group, with_solutions=False), folder / f"{name}.ipynb")
        for student in assignment.students:
            write_chapter(building / "students" / student / "exercises" / name, group, assignment, student)
            shutil.copyfile(
                folder / f"{name}.ipynb",
                building / "students" / student / "exercises" / name / f"{name}.ipynb",
            )
        source = building / "nbgrader" / "source" / name
        write_chapter(source, group, assignment, "")
        nbformat.write(make_notebook(name, group, with_solutions=True), source / f"{name}.ipynb")
    check_for_leaks(release, exercises)
    check_for_leaks(building / "students", exercises)
    kept = {
        name: [exercise.file for exercise in group if exercise.kind != "python"]
        for name, group in _by_chapter(exercises).items()
    }
    config = _NBGRADER_CONFIG.replace("{kept}", json.dumps(kept, indent=4))
    (building / "nbgrader" / "nbgrader_config.py").write_text(config)
    assignment.write(building / "instructor" / "assignment.json")
    shutil.make_archive(str(building / "release"), "zip", release)
    shutil.rmtree(out, ignore_errors=True)
    building.rename(out)
    return exercises


_NBGRADER_CONFIG = """c = get_config()  # noqa: F821

c.CourseDirectory.course_id = "flash-attention-backward"
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\\nraise NotImplementedError()"}
c.ClearSolutions.begin_solution_delimeter = "BEGIN SOLUTION"
c.ClearSolutions.end_solution_delimeter = "END SOLUTION"
c.ExecutePreprocessor.timeout = 600
# Students edit these files; nbgrader would otherwise copy those of the source folder over them.
c.Autograde.exclude_overwriting = {kept}
c.IncludeHeaderFooter.header = ""
"""


def _read_roster(path: Path) -> tuple[str, ...]:
    """One student a line; of a CSV the first column, without a header "student".

    Raises ValueError if it is no text, or names nobody, a student twice, or one that no folder can be called.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    names = [line.split(",")[0].strip() for line in text.splitlines()]
    names = [name for name in names if name and name != "student"]
    if not names:
        raise ValueError(f"{path} names no student; expected one name a line")
    for name in names:
        if not re.fullmatch(r"[\w.@-]+", name) or name.startswith("."):
            raise ValueError(f"{path}: {name!r} is no name for a folder; letters, digits and . @ - _ are")
    if len(set(names)) < len(names):
        raise ValueError(f"{path} names a student twice")
    return tuple(names)


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m common.grade.release", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="default: out/assignment")
    parser.add_argument(
        "--students", type=Path, metavar="FILE", help="one name a line: everybody gets variants of their own"
    )
    parser.add_argument(
        "--solutions", type=Path, action="append", default=[], metavar="FOLDER", help="exercises of your own"
    )
    parser.add_argument(
        "--seed",
        help="chooses variants, faults and hidden sizes; default: that of the last time, or a new one",
    )
    parser.add_argument("--chapter", metavar="NN", help="default: all")
    options = parser.parse_args(arguments)
    kept = options.out / "instructor" / "assignment.json"
    try:
        old = Assignment.read(kept) if kept.is_file() else None
        seed = options.seed or (old.seed if old else secrets.token_hex(8))
        students = _read_roster(options.students) if options.students else ()
        for folder in options.solutions:
            if not folder.is_dir():
                raise ValueError(f"--solutions {folder} is no folder")
        assignment = Assignment(seed, students, tuple(str(folder.resolve()) for folder in options.solutions))
        exercises = make_release(options.out, assignment, options.chapter)
    except (MarkerError, ValueError, LeakError, OSError) as error:
        print(f"no release was made: {error}", file=sys.stderr)
        return 2
    print(f"{len(exercises)} exercises of {len(_by_chapter(exercises))} chapters")
    print(
        f"hand out:  {options.out / 'release.zip'}"
        + (f" and {options.out / 'students'}/<name>" if students else "")
    )
    print(f"keep:      {kept} (the seed)")
    print(f"nbgrader:  {options.out / 'nbgrader'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
