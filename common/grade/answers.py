"""Grading Python: functions that a student wrote into the notebook, called with numbers they have not seen.

An exercise's ``check.py`` defines ``questions(rng) -> list[Question]``. It is the instructor's, and trusted;
the student's functions are called in the sandbox (by the grader) or in the student's own notebook.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.grade import sandbox
from common.grade.exercises import Exercise
from common.grade.results import Check, Item

_LIMITS = sandbox.Limits(wall_seconds=60, cpu_seconds=60, memory_bytes=16 << 30, file_bytes=16 << 20)


@dataclass(frozen=True)
class Question:
    """One call of a student's function.

    check: which points it counts for. expected: a number or a tensor. tolerance: relative to its norm.
    """

    check: str
    function: str
    arguments: tuple[Any, ...]
    expected: Any
    tolerance: float = 1e-9


def questions_of(exercise: Exercise, seed: str) -> list[Question] | None:
    """What ``check.py`` asks; None in a release that keeps the answers to itself."""
    path = exercise.folder / "check.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"check_{exercise.chapter}_{exercise.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.questions(random.Random(f"{seed}/{exercise.key}"))


# ---------------------------------------------------------------- values that cross to the child and back


def _plain(value: Any) -> Any:
    return {"tensor": value.tolist()} if isinstance(value, Tensor) else value


def _value(data: Any) -> Any:
    if isinstance(data, dict) and set(data) == {"tensor"}:
        return torch.tensor(data["tensor"], dtype=torch.float64)
    return data


def _call_here(functions: Mapping[str, Callable], question: Question) -> Any:
    function = functions.get(question.function)
    if function is None:
        return NameError(f"there is no function {question.function}")
    try:
        return function(*question.arguments)
    except Exception as error:  # a student's function may raise anything
        return error


def _call_there(code: str, questions: list[Question]) -> list[Any]:
    """The answers, from a process that has the student's code; an exception where there is none."""
    calls = [[q.function, [_plain(a) for a in q.arguments]] for q in questions]
    with tempfile.TemporaryDirectory(prefix="grade-") as name:
        folder = Path(name)
        results = folder / "results"
        results.write_bytes(b"")
        job = {"action": "answer", "code": code, "calls": calls, "results": str(results)}
        site = [Path(sys.prefix), *(Path(p) for p in sys.path if p.endswith("site-packages"))]
        ended = sandbox.confined(job, folder, _LIMITS, readable=site, interpreter=sys.executable)
        try:
            lines = [json.loads(line) for line in results.read_text().splitlines()]
        except (ValueError, UnicodeDecodeError):
            lines = []
    said = [line for line in ended.said.strip().splitlines() if line.strip()]
    why = RuntimeError(
        f"the code ended before it could answer: {ended}" + (f": {said[-1][:200]}" if said else "")
    )
    answers: list[Any] = [why] * len(questions)
    for i, line in enumerate(lines[: len(questions)]):
        if isinstance(line, dict) and "value" in line:
            answers[i] = line["value"]
        elif isinstance(line, dict) and "error" in line:
            answers[i] = RuntimeError(str(line["error"])[:300])
    return answers


# ---------------------------------------------------------------- judging


def _difference(answer: Any, question: Question) -> str:
    """What is wrong with an answer, or nothing."""
    if isinstance(answer, Exception):
        kind = "" if type(answer) is RuntimeError else f"{type(answer).__name__}: "
        return f"{kind}{answer}"
    expected = torch.as_tensor(question.expected, dtype=torch.float64)
    try:
        value = torch.as_tensor(_value(answer), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return f"returns {str(answer)[:60]!r}; expected a number or a tensor"
    if value.shape != expected.shape:
        return f"returns shape {tuple(value.shape)}; expected {tuple(expected.shape)}"
    error = (value - expected).norm().item()
    if error <= question.tolerance * (expected.norm().item() or 1.0):
        return ""
    if expected.ndim == 0:
        return f"returns {value.item():,.6g}, which is not what was counted"
    return f"is off by {error / (expected.norm().item() or 1.0):.1e} of its norm"


def _described(question: Question) -> str:
    shown = [
        f"tensor {list(a.shape)}"
        if isinstance(a, Tensor)
        else f"{len(a)} rows"
        if isinstance(a, list)
        else str(a)
        for a in question.arguments
    ]
    return f"{question.function}({', '.join(shown)})"


def grade_answers(
    exercise: Exercise,
    *,
    seed: str,
    student: str = "",
    code: str | None = None,
    functions: Mapping[str, Callable] | None = None,
) -> Item:
    """Grades the source of a cell in the sandbox, or functions right here (a student's own notebook)."""
    start = time.perf_counter()
    item = Item(exercise.key, student, [], exercise.file)
    questions = questions_of(exercise, seed)
    if questions is None:
        item.checks = [
            Check(name, points, 0.0, "is graded by the instructor: the answer is a number")
            for name, points in exercise.points.items()
        ]
        return item
    if functions is not None:
        answers = [_call_here(functions, question) for question in questions]
    else:
        answers = _call_there(code or "", questions)
    for name, points in exercise.points.items():
        wrong = [
            f"{_described(q)} {difference}"
            for q, answer in zip(questions, answers, strict=True)
            if q.check == name and (difference := _difference(answer, q))
        ]
        asked = sum(q.check == name for q in questions)
        share = 1 - len(wrong) / asked
        seen = f"right in all {asked} calls" if not wrong else wrong[0]
        item.checks.append(
            Check(name, points, share, seen, [], exercise.hints.get(name, "") if wrong else "")
        )
    item.seconds = time.perf_counter() - start
    return item
