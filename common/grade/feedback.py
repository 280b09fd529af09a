"""What a student reads: the checks of every exercise, the findings beside the lines of their own file."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment

from common.grade.exercises import Exercise
from common.grade.results import Item

_PAGE = Path(__file__).with_name("feedback.html")
_AROUND = 3  # lines shown above and below one that is named


def _excerpt(item: Item, source: str) -> tuple[list[dict], list[str]]:
    """The lines of a student's file around those that checks and findings name, with notes below each."""
    notes: dict[int, list[str]] = {}
    for line, text in item.findings:
        notes.setdefault(line, []).append(text)
    named = {line for check in item.failed for line in check.lines} | set(notes)
    lines = source.splitlines()
    shown = sorted(
        {
            n
            for line in named
            if line > 0
            for n in range(line - _AROUND, line + _AROUND + 1)
            if 1 <= n <= len(lines)
        }
    )
    rows, before = [], 0
    for number in shown:
        rows.append(
            {"number": number, "text": lines[number - 1], "named": number in named,
             "notes": notes.get(number, []), "gap": before and number != before + 1}
        )  # fmt: skip
        before = number
    elsewhere = [text for line, texts in notes.items() if not 1 <= line <= len(lines) for text in texts]
    return rows, elsewhere


def page(
    title: str,
    items: Sequence[Item],
    exercises: Mapping[str, Exercise],
    sources: Mapping[str, str],
    protection: str,
) -> str:
    """The feedback of one student as HTML. sources: exercise → the text of the file that was graded."""
    entries = []
    for item in items:
        exercise = exercises[item.exercise]
        lines, elsewhere = (
            _excerpt(item, sources.get(item.exercise, "")) if exercise.kind != "python" else ([], [])
        )
        entries.append(
            {"item": item, "title": exercise.title, "goal": exercise.goal, "lines": lines,
             "elsewhere": elsewhere, "anchor": html.escape(item.exercise.replace("/", "-"))}
        )  # fmt: skip
    template = Environment(autoescape=True, trim_blocks=False).from_string(_PAGE.read_text())
    return template.render(
        title=title, entries=entries, protection=protection, score=sum(i.score for i in items),
        max_score=sum(i.max_score for i in items),
    )  # fmt: skip


def write_csv(path: Path, items: Sequence[Item]) -> None:
    """One row a student, one column an exercise, the sum last: what a learning platform imports."""
    names = sorted({item.exercise for item in items})
    students: dict[str, dict[str, Item]] = {}
    for item in items:
        students.setdefault(item.student, {})[item.exercise] = item
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["student", *names, "score", "max_score"])
        for student, of in sorted(students.items()):
            scores = [f"{of[name].score:.2f}" if name in of else "" for name in names]
            # A name that a spreadsheet would take for a formula stays a name.
            shown = f"'{student}" if student[:1] in "=+-@" else student
            total = sum(item.score for item in of.values())
            most = sum(item.max_score for item in of.values())
            writer.writerow([shown, *scores, f"{total:.2f}", f"{most:.2f}"])


def write_json(path: Path, items: Sequence[Item]) -> None:
    """Everything."""
    path.write_text(json.dumps([item.as_json() for item in items], indent=1) + "\n")
