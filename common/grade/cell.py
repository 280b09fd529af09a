"""What the cells of an exercise notebook call."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.grade.answers import grade_answers
from common.grade.cases import PUBLIC_SEED
from common.grade.exercises import FOLDER, find_exercise
from common.grade.grading import grade

SEED_VARIABLE = "FA2_GRADE_SEED"
FOLDERS_VARIABLE = "FA2_GRADE_SOLUTIONS"


def check(exercise: str, **functions: Callable[..., Any]) -> float:
    """Grades one exercise from its notebook, prints what was seen and returns the points.

    exercise: "NN_name/exercise". functions: of a Python exercise, by name. Files are those beside it.
    For instructors: a seed in the environment variable FA2_GRADE_SEED takes the place of the students', and
    FA2_GRADE_SOLUTIONS names folders with exercises of their own.
    """
    own = [Path(folder) for folder in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    chosen = find_exercise(exercise, [FOLDER, *own])
    secret = os.environ.get(SEED_VARIABLE)
    seed = secret or PUBLIC_SEED
    if chosen.kind == "python":
        item = grade_answers(chosen, seed=seed, functions=functions)
    else:
        item = grade(chosen, Path.cwd(), seed=seed, secret=secret)
    print(item)
    return item.score
