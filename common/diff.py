"""What changes between two chapters: ``make diff A=01 B=02``."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass

from common.chapters import load_chapter

_COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}


def chapter_diff(before: str | int, after: str | int, *, context: int = 3) -> list[str]:
    """The unified diff of two chapters' ``kernel.cu``, line by line."""
    old, new = load_chapter(before), load_chapter(after)
    return list(
        difflib.unified_diff(
            old.info.kernel.read_text().splitlines(),
            new.info.kernel.read_text().splitlines(),
            f"chapters/{old.name}/kernel.cu",
            f"chapters/{new.name}/kernel.cu",
            lineterm="",
            n=context,
        )
    )


@dataclass(frozen=True)
class StepSize:
    """How much of a ``kernel.cu`` a step touches. A line that is replaced by another is one changed line."""

    added: int
    removed: int
    changed: int


def step_size(before: str | int, after: str | int) -> StepSize:
    """The size of the step from one chapter's ``kernel.cu`` to the other's."""
    old, new = (load_chapter(name).info.kernel.read_text().splitlines() for name in (before, after))
    edits = [
        (i2 - i1, j2 - j1)
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    return StepSize(
        added=sum(new for _, new in edits),
        removed=sum(old for old, _ in edits),
        changed=sum(max(edit) for edit in edits),
    )


def main(arguments: list[str]) -> int:
    """Prints the diff. Returns the exit status."""
    if len(arguments) != 2:
        print("usage: make diff A=05 B=06", file=sys.stderr)
        return 2
    try:
        lines = chapter_diff(*arguments)
        size = step_size(*arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for line in lines:
        colour = _COLOURS.get(line[:1], "") if sys.stdout.isatty() else ""
        print(f"{colour}{line}\033[0m" if colour else line)
    print(
        f"{size.changed} lines changed ({size.added} added, {size.removed} removed; "
        "a line that replaces another counts once)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
