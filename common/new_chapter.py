"""Starts a chapter as a copy of another: ``make new-chapter NAME=13_idea FROM=02``."""

from __future__ import annotations

import re
import shutil
import sys

from common.chapters import CHAPTERS, list_chapters, load_chapter


def create(name: str, source: str) -> str:
    """Makes ``chapters/name`` from the chapter ``source``. Returns what to do next. Raises ValueError."""
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", name):
        raise ValueError(f"NAME is {name!r}; expected two digits and a name, like 13_my_idea")
    origin = load_chapter(source)
    folder = CHAPTERS / name
    if folder.exists():
        raise ValueError(f"NAME is {name!r}, but {folder} exists already")
    # Two chapters with one number: a command that is given the number would take the first.
    if other := next((info.name for info in list_chapters() if info.name[:2] == name[:2]), None):
        raise ValueError(
            f"NAME is {name!r}, but {other} has the number {name[:2]} already; expected a free one"
        )
    folder.mkdir()
    toml = (origin.info.kernel.parent / "chapter.toml").read_text()
    toml = re.sub(r'^title = ".*"$', 'title = "A title"', toml, flags=re.MULTILINE)
    toml = re.sub(r'^idea = ".*"$', 'idea = "the one thing it changes"', toml, flags=re.MULTILINE)
    toml = re.sub(r'^builds_on = ".*"\n', "", toml, flags=re.MULTILINE)
    toml = toml.replace("\ndtypes", f'\nbuilds_on = "{origin.name}"\ndtypes', 1)
    (folder / "chapter.toml").write_text(toml)
    shutil.copy(origin.info.kernel, folder / "kernel.cu")
    return (
        f"chapters/{name} is a copy of {origin.name}. Now edit its kernel.cu and chapter.toml, then:\n"
        f"  make run ARGS='--chapters {origin.info.number:02d} {name[:2]}'   # right, and faster?\n"
        f"  make diff A={origin.info.number:02d} B={name[:2]}                # is the diff the lesson?\n"
        "  make test                            # finds the new chapter, and says what it still lacks"
    )


def main(arguments: list[str]) -> int:
    """Creates the chapter. Returns the exit status."""
    if len(arguments) != 2:
        print("usage: make new-chapter NAME=13_idea FROM=02", file=sys.stderr)
        return 2
    try:
        print(create(*arguments))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
