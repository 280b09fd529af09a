"""Grades your own work: ``python -m common.grade 02``, or with ``--exercise`` one exercise of the chapter.

Runs on the checked CPU device, without a GPU, on sizes that are public. In the repository itself,
``--start`` writes those of the files to edit into ``exercises/NN_name`` that are not there; a release has
them already.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from common import jit
from common.grade import sandbox
from common.grade.cases import PUBLIC_SEED
from common.grade.exercises import Exercise
from common.grade.feedback import page
from common.grade.grading import exercises_for, grade, own_variant, read_submission

WORK = jit.REPO_ROOT / "exercises"


def _start(folder: Path, exercises: list[Exercise]) -> None:
    """Writes those of the files to edit that are missing. Raises ValueError if none is, or if it cannot."""
    import nbformat

    from common.grade.notebook import make_notebook
    from common.grade.release import Assignment, write_chapter

    chapter = exercises[0].chapter
    written, left = [], []
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        try:
            write_chapter(made, exercises, Assignment(PUBLIC_SEED), "")
            for exercise in exercises:
                if exercise.kind == "cuda":  # A variant that is there is kept, and its starter has to fit it.
                    (made / exercise.file).write_text(exercise.starter(own_variant(exercise, folder)))
            nbformat.write(make_notebook(chapter, exercises, with_solutions=False), made / f"{chapter}.ipynb")
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} is not there, which files are made from; a release has them in release.zip"
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(made.iterdir()):
                if os.path.lexists(folder / path.name):  # A link that leads nowhere is there, too.
                    left.append(path.name)
                else:
                    shutil.copyfile(path, folder / path.name)
                    written.append(path.name)
        except OSError as error:
            raise ValueError(
                f"{folder} cannot be written: {error.strerror}; --folder says where your files are"
            ) from None
    if not written:
        raise ValueError(f"{folder} has all files already, and is left as it is: {', '.join(left)}")
    print(f"{folder}: start with {chapter}.ipynb\nwritten: {', '.join(written)}")
    if left:
        print(f"left as they are: {', '.join(left)}")


def _check_page(path: Path) -> None:
    """Makes its folder. Raises ValueError if a page cannot be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"--html {path} cannot be written: {error.strerror}") from None


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 0 if everything has all of its points."""
    parser = argparse.ArgumentParser(prog="python -m common.grade", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", metavar="NN", help="number or name of a chapter")
    parser.add_argument("--exercise", metavar="NAME", help="default: all of the chapter")
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="where your files are; default: exercises/NN_name"
    )
    parser.add_argument("--start", action="store_true", help="write the files to edit that are not there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the feedback as a page")
    options = parser.parse_args(arguments)
    try:
        exercises = exercises_for(options.chapter, options.exercise)
        folder = options.folder or WORK / exercises[0].chapter
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is no folder; --folder says where your files are")
        if options.start:
            _start(folder, exercises_for(exercises[0].chapter))
            return 0
        if not folder.is_dir():
            raise ValueError(f"{folder} is not there; --folder says where your files are, --start makes them")
        for exercise in exercises:
            if exercise.kind == "cuda":
                own_variant(exercise, folder)
        if options.html is not None:
            _check_page(options.html)
    except (ValueError, OSError) as error:  # OSError: a folder that may not be looked into
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
