"""Grading a folder of submissions: ``make grade SUBMISSIONS=folder``.

The folder has one folder a student, with one folder a chapter in it (``exercises/`` in between is fine).
Writes into ``out/grades``: grades.csv, grades.json, ``feedback/<student>.html``, similarity.csv. What was
graded before and has not changed is not graded again; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from common import jit
from common.grade import compiled, sandbox
from common.grade.exercises import Exercise, list_exercises
from common.grade.feedback import page, write_csv, write_json
from common.grade.grading import cell_of, grade, read_submission
from common.grade.release import OUT, Assignment
from common.grade.results import Item
from common.grade.similarity import similar

GRADES = jit.REPO_ROOT / "out" / "grades"


@dataclass(frozen=True)
class Task:
    """One exercise of one student."""

    exercise: Exercise
    student: str
    folder: Path

    @property
    def stored(self) -> str:
        """Where its result is kept, relative to the grades."""
        return f"items/{self.student}/{self.exercise.chapter}/{self.exercise.name}.json"

    @property
    def names(self) -> set[str]:
        """What ``--regrade`` may call it: by its exercise, its student, or both."""
        return {self.exercise.key, self.student, f"{self.student}:{self.exercise.key}"}


def students_in(folder: Path) -> list[Path]:
    """The students' folders. Raises ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"SUBMISSIONS={folder} is no folder")
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_dir() and not path.is_symlink() and path.name[0] != "."
    ]
    if not found:
        raise ValueError(f"SUBMISSIONS={folder} has no folders in it; expected one a student")
    return found


def _chapter_folder(student: Path, chapter: str) -> Path | None:
    for candidate in (student / chapter, student / "exercises" / chapter):
        parts = [student, *candidate.relative_to(student).parents, candidate]
        if candidate.is_dir() and not any((student / part).is_symlink() for part in parts):
            return candidate
    return None


def tasks_of(folder: Path, exercises: Sequence[Exercise]) -> list[Task]:
    """What is to be graded: every exercise of the chapters that at least one student handed in.

    Raises ValueError if nobody handed in anything, or if the folder is that of one student.
    """
    students = students_in(folder)
    known = list(dict.fromkeys(e.chapter for e in exercises))
    for chapter in known:
        # One level too deep: its ``exercises`` would be the only student, and replace the grades of all.
        if (own := _chapter_folder(folder.resolve(), chapter)) is not None:
            raise ValueError(
                f"SUBMISSIONS={folder} is the folder of one student: it has "
                f"{own.relative_to(folder.resolve())}; expected the folder above, with one folder a student"
            )
    chapters = [c for c in known if any(_chapter_folder(s, c) for s in students)]
    if not chapters:
        raise ValueError(f"no student of {folder} has a folder of a chapter, such as {exercises[0].chapter}")
    return [
        Task(exercise, student.name, _chapter_folder(student, exercise.chapter) or student / exercise.chapter)
        for student in students
        for exercise in exercises
        if exercise.chapter in chapters
    ]


def check_names(again: Sequence[str], tasks: Sequence[Task]) -> None:
    """Raises ValueError for what ``--regrade`` names and none of the tasks is called."""
    for name in again:
        if not any(name in task.names for task in tasks):
            students = ", ".join(dict.fromkeys(task.student for task in tasks))
            exercises = ", ".join(dict.fromkeys(task.exercise.key for task in tasks))
            raise ValueError(
                f"--regrade {name!r} is nothing that is graded here; expected a student, an exercise, or "
                f"student:exercise\nstudents:  {students}\nexercises: {exercises}"
            )


@cache
def _grader_digest() -> str:
    """Changes when the grader does: old results then no longer count."""
    sha = hashlib.sha256()
    for path in sorted(
        [
            *Path(__file__).parent.glob("*.py"),
            *Path(__file__).parent.glob("*.cpp"),
            *Path(jit.__file__).parent.glob("*.py"),
        ]
    ):
        sha.update(path.read_bytes())
    for folder in sandbox.kernel_folders():
        for path in sorted(folder.rglob("*")):
            sha.update(path.read_bytes() if path.is_file() else b"")
    return sha.hexdigest()


def digest_of(task: Task, assignment: Assignment) -> str:
    """Of all that a grade depends on."""
    sha = hashlib.sha256(
        f"{_grader_digest()}/{assignment.seed}/{assignment.variant(task.exercise, task.student)}".encode()
    )
    for path in (task.folder / task.exercise.file, *sorted(task.exercise.folder.glob("*"))):
        if path.is_file() and not path.is_symlink():
            sha.update(path.read_bytes()[: 2 << 20])
        sha.update(b"/")
    return sha.hexdigest()[:16]


def grade_task(task: Task, assignment: Assignment) -> Item:
    """Grades it, whatever is in there: an error of the grader's own costs one item and is named."""
    torch.set_num_threads(1)
    try:
        item = grade(
            task.exercise, task.folder, seed=assignment.seed, student=task.student,
            secret=assignment.seed, owner=assignment.owner(task.student),
            constants=assignment.variant(task.exercise, task.student),
        )  # fmt: skip
    except Exception as error:
        raise RuntimeError(
            f"grading {task.exercise.key} of {task.student}: {type(error).__name__}: {error}"
        ) from error
    item.digest = digest_of(task, assignment)
    return item


def _stored(path: Path) -> Item | None:
    try:
        return Item.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def grade_all(
    tasks: Sequence[Task], assignment: Assignment, out: Path, *, jobs: int = 1, again: Sequence[str] = ()
) -> Iterator[Item]:
    """Grades what is not yet graded; every item as it is done, stored before.

    again: exercises ("02_tiled/alibi"), students, or "student:exercise", graded although they are stored.
    """
    waiting = []
    for task in tasks:
        item = _stored(out / task.stored)
        forced = task.names & set(again)
        if item is not None and not forced and item.digest == digest_of(task, assignment):
            yield item
        else:
            waiting.append(task)
    if not waiting:
        return
    compiled.prepare({(t.exercise.dtype, t.exercise.head_dim) for t in waiting if t.exercise.kind == "cuda"})
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(grade_task, task, assignment): task for task in waiting}
        try:
            for future in as_completed(futures):
                item, task = future.result(), futures[future]
                path = out / task.stored
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                part.write_text(json.dumps(item.as_json(), indent=1) + "\n")
                part.rename(path)
                yield item
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def write_reports(tasks: Sequence[Task], items: Sequence[Item], out: Path, assignment: Assignment) -> int:
    """CSV, JSON, a page a student and the similar pairs, whose number is returned."""
    exercises = {task.exercise.key: task.exercise for task in tasks}
    order = {key: i for i, key in enumerate(exercises)}
    items = sorted(items, key=lambda item: (item.student, order[item.exercise]))
    write_csv(out / "grades.csv", items)
    write_json(out / "grades.json", items)
    texts: dict[str, dict[str, str]] = {key: {} for key in exercises}
    for task in tasks:
        try:
            text = read_submission(task.folder / task.exercise.file)
            texts[task.exercise.key][task.student] = (
                cell_of(text, task.exercise.name) if task.exercise.kind == "python" else text
            )
        except ValueError:
            continue
    (out / "feedback").mkdir(parents=True, exist_ok=True)
    protection = sandbox.describe_protection()
    for student in dict.fromkeys(item.student for item in items):
        own = [item for item in items if item.student == student]
        sources = {key: of[student] for key, of in texts.items() if student in of}
        (out / "feedback" / f"{student}.html").write_text(
            page(f"Feedback for {student}", own, exercises, sources, protection)
        )
    pairs = [
        pair
        for key, of in texts.items() if exercises[key].kind != "find"
        for pair in similar(key, of, exercises[key].starter(exercises[key].variant("", "")))
    ]  # fmt: skip
    with (out / "similarity.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["exercise", "student", "student", "share of own sequences in common", "sequences"])
        writer.writerows([p.exercise, p.first, p.second, f"{p.share:.2f}", p.sequences] for p in pairs)
    return len(pairs)


def _write_timing(path: Path, items: Sequence[Item], jobs: int, seconds: float) -> None:
    """How long grading took, for notebooks/exercises/README.md."""
    data = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),  # what else the machine had to do counts, too
        "students": len({item.student for item in items}),
        "chapters": sorted({item.exercise.partition("/")[0] for item in items}),
        "items": len(items),
        "jobs": jobs,
        "seconds": round(seconds, 1),
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m common.grade.submissions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("submissions", type=Path, help="a folder with one folder a student")
    parser.add_argument(
        "--assignment", type=Path, default=OUT / "instructor" / "assignment.json", metavar="FILE"
    )
    parser.add_argument("--out", type=Path, default=GRADES, metavar="FOLDER", help="default: out/grades")
    parser.add_argument("--chapter", metavar="NN", help="default: all that were handed in")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    parser.add_argument(
        "--regrade",
        action="append",
        default=[],
        metavar="ITEM",
        help="a student, 02_tiled/alibi, or student:02_tiled/alibi",
    )
    parser.add_argument("--timing", type=Path, metavar="FILE", help="write how long it took, as JSON")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; expected at least 1")
    try:
        assignment = Assignment.read(options.assignment)
        tasks = tasks_of(options.submissions, list_exercises(options.chapter, assignment.folders))
        check_names(options.regrade, tasks)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(sandbox.describe_protection())
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    items = []
    with tqdm(total=len(tasks), unit="item", disable=None) as bar:
        for item in grade_all(tasks, assignment, options.out, jobs=options.jobs, again=options.regrade):
            items.append(item)
            bar.update()
    seconds = time.monotonic() - start
    if options.timing is not None:
        _write_timing(options.timing, items, options.jobs, seconds)
    pairs = write_reports(tasks, items, options.out, assignment)
    students = len({item.student for item in items})
    print(
        f"{len(items)} items of {students} students in {time.monotonic() - start:.0f} s: "
        f"{options.out / 'grades.csv'}"
    )
    print(f"feedback:  {options.out / 'feedback'}/<student>.html")
    print(f"similar:   {pairs} pairs, {options.out / 'similarity.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
