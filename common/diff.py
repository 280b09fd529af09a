"""What changes between two chapters: ``make diff A=01 B=02``."""

from __future__ import annotations

import difflib
import sys

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


def changed_lines(before: str | int, after: str | int) -> tuple[int, int]:
    """(added, removed) lines from one chapter's ``kernel.cu`` to the other's."""
    body = chapter_diff(before, after)[2:]
    return sum(line.startswith("+") for line in body), sum(line.startswith("-") for line in body)


def main(arguments: list[str]) -> int:
    """Prints the diff. Returns the exit status."""
    if len(arguments) != 2:
        print("usage: python -m common.diff A B, for example 01 02", file=sys.stderr)
        return 2
    try:
        lines = chapter_diff(*arguments)
        added, removed = changed_lines(*arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for line in lines:
        colour = _COLOURS.get(line[:1], "") if sys.stdout.isatty() else ""
        print(f"{colour}{line}\033[0m" if colour else line)
    print(f"{added} lines added, {removed} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
