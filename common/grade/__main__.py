"""Grades your own work: ``python -m common.grade 02``, or with ``--exercise`` one exercise of the chapter.

Runs on the checked CPU device, without a GPU, on sizes that are public. In the repository itself,
``--start`` writes the files to edit into ``exercises/NN_name``; a release has them already.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common import jit
from common.grade import sandbox
from common.grade.cases import PUBLIC_SEED
from common.grade.exercises import Exercise
from common.grade.feedback import page
from common.grade.grading import exercises_for, grade, read_submission

WORK = jit.REPO_ROOT / "exercises"


def _start(folder: Path, exercises: list[Exercise]) -> int:
    import nbformat

    from common.grade.notebook import make_notebook
    from common.grade.release import Assignment, write_chapter

    if folder.exists():
        raise ValueError(f"{folder} is there already, and is left as it is")
    chapter = exercises[0].chapter
    write_chapter(folder, exercises, Assignment(PUBLIC_SEED), "")
    nbformat.write(make_notebook(chapter, exercises, with_solutions=False), folder / f"{chapter}.ipynb")
    print(f"{folder}: start with {chapter}.ipynb")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 0 if everything has all of its points."""
    parser = argparse.ArgumentParser(prog="python -m common.grade", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", metavar="NN", help="number or name of a chapter")
    parser.add_argument("--exercise", metavar="NAME", help="default: all of the chapter")
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="where your files are; default: exercises/NN_name"
    )
    parser.add_argument("--start", action="store_true", help="write the files to edit, unless they are there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the feedback as a page")
    options = parser.parse_args(arguments)
    try:
        exercises = exercises_for(options.chapter, options.exercise)
        folder = options.folder or WORK / exercises[0].chapter
        if options.start:
            return _start(folder, exercises_for(exercises[0].chapter))
        if not folder.is_dir():
            raise ValueError(f"{folder} is not there; --folder says where your files are, --start makes them")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    items = []
    for exercise in exercises:
        item = grade(exercise, folder)
        items.append(item)
        print(f"{item}\n", flush=True)
    if options.html is not None:
        sources = {}
        for exercise in exercises:
            try:
                sources[exercise.key] = read_submission(folder / exercise.file)
            except ValueError:
                continue
        text = page(
            f"Chapter {exercises[0].chapter}",
            items,
            {e.key: e for e in exercises},
            sources,
            sandbox.describe_protection(),
        )
        options.html.write_text(text)
    score, most = sum(item.score for item in items), sum(item.max_score for item in items)
    print(
        f"{score:.2f} of {most:.2f} points. "
        "Points for being clean and for the ledger count as far as the results are right."
    )
    return int(any(item.failed for item in items))


if __name__ == "__main__":
    sys.exit(main())
