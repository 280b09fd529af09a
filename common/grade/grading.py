"""Grading one exercise of one student, whatever its kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from common.grade.answers import grade_answers
from common.grade.cases import PUBLIC_SEED
from common.grade.exercises import FIND_IT, FOLDER, Exercise, list_exercises
from common.grade.find import Fault, grade_answer, plant
from common.grade.kernel import grade_kernel
from common.grade.results import Check, Item

VARIANT = "variant.json"
_MAX_BYTES = 1 << 20  # of a file that is handed in


def read_submission(path: Path) -> str:
    """The text of a file that was handed in. Raises ValueError for one that cannot be graded."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path.name} was not handed in")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes; at most {_MAX_BYTES:,} are read")
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not text in UTF-8") from None


def cell_of(notebook: str, name: str) -> str:
    """The code of the cell for the exercise ``name``. Raises ValueError if it is not there, once."""
    try:
        cells = json.loads(notebook)["cells"]
        found = [
            cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
            for cell in cells
            if cell["cell_type"] == "code"
            and cell.get("metadata", {}).get("nbgrader", {}).get("grade_id") == name
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("the notebook cannot be read: it is no longer a notebook") from None
    if len(found) != 1:
        raise ValueError(
            f"the notebook has {len(found)} cells for {name}, not one; take it from the handed-out notebook"
        )
    return found[0]


def _not_graded(exercise: Exercise, student: str, why: str) -> Item:
    checks = [Check(name, points, 0.0, why) for name, points in exercise.points.items()]
    return Item(exercise.key, student, checks, exercise.file)


def grade(
    exercise: Exercise,
    folder: Path,
    *,
    seed: str = PUBLIC_SEED,
    student: str = "",
    secret: str | None = None,
    owner: str = "",
    constants: dict[str, int] | None = None,
) -> Item:
    """Grades one exercise of what lies in ``folder``, a student's files of one chapter.

    seed: chooses the cases. secret: the instructor's seed, which chose the planted fault; None for students.
    owner: of the planted fault, the student or "".
    constants: the student's variant; by default what ``variant.json`` in the folder says.
    Raises ValueError if that cannot be read.
    """
    path = folder / exercise.file
    try:
        text = read_submission(path)
        if exercise.kind == "python":
            text = cell_of(text, exercise.name)
    except ValueError as error:
        return _not_graded(exercise, student, str(error))
    if exercise.kind == "cuda":
        constants = own_variant(exercise, folder) if constants is None else constants
        return grade_kernel(exercise, text, constants=constants, seed=seed, student=student)
    if exercise.kind == "find":
        fault = _public_fault(exercise, folder) if secret is None else plant(exercise.info, secret, owner)
        return grade_answer(exercise, text, fault, student)
    return grade_answers(exercise, seed=seed, student=student, code=text)


def _public_fault(exercise: Exercise, folder: Path) -> Fault | None:
    """The fault of a file that ``python -m common.grade NN --start`` made; None if it was handed out."""
    fault = plant(exercise.info, PUBLIC_SEED, "")
    path = folder / f"{FIND_IT}.cu"
    return fault if path.is_file() and path.read_text() == fault.text else None


def own_variant(exercise: Exercise, folder: Path) -> dict[str, int]:
    """The constants that ``variant.json`` beside a student's files names; the usual ones without it.

    Raises ValueError, naming the file, if it is there and cannot be read.
    """
    path = folder / VARIANT
    try:
        data = json.loads(path.read_text()) if path.is_file() else {}
        own = data.get(exercise.name, {})
        if not all(type(value) is int for value in own.values()):
            raise TypeError
    except (AttributeError, TypeError):  # JSON, of another form
        raise ValueError(
            f"{path} cannot be read: expected the constants of each exercise, such as "
            f'{{"{exercise.name}": {json.dumps(exercise.variant("", ""))}}}'
        ) from None
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError do not name the file
        raise ValueError(f"{path} cannot be read: {error}") from None
    return {**exercise.variant("", ""), **own}


def exercises_for(
    chapter: str | None, only: str | None = None, folders: Sequence[Path] = (FOLDER,)
) -> list[Exercise]:
    """Those of a chapter, or one of them. Raises ValueError, naming what there is."""
    exercises = list_exercises(chapter, folders)
    if only is None:
        return exercises
    chosen = [exercise for exercise in exercises if exercise.name == only]
    if not chosen:
        names = dict.fromkeys(e.name for e in exercises)
        raise ValueError(f"there is no exercise {only!r}; there are {', '.join(names)}")
    return chosen
