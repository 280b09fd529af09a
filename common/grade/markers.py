"""Solutions between markers: in one file with the exercise, and never seen by a student.

In CUDA and C++ a solution stands between ``// BEGIN SOLUTION`` and ``// END SOLUTION``, in Python between
``### BEGIN SOLUTION`` and ``### END SOLUTION``, in Markdown between the same words in ``<!-- … -->``. Code
that a starter needs in place of a solution follows ``// STUB`` inside of it, commented out:

    // BEGIN SOLUTION
    const bool visible = col <= row;
    // STUB
    // const bool visible = true;
    // END SOLUTION
"""

from __future__ import annotations

import re

_COMMENT = {".cu": "//", ".h": "//", ".cpp": "//", ".py": "#", ".md": "<!--"}
_EXACT = re.compile(
    r"^(?P<indent>\s*)(?://|#{1,3}|<!--)\s*(?P<word>BEGIN SOLUTION|END SOLUTION|STUB)\s*(?:-->)?\s*$"
)
# Whatever was meant as a marker and is none must not pass for text: it would hand out the solution.
_MEANT = re.compile(r"(begin|end)[\s_-]*solution", re.IGNORECASE)
PLACEHOLDER = "YOUR CODE HERE"


class MarkerError(ValueError):
    """Markers that do not say where a solution begins and ends. The message names file and line."""


def _uncommented(line: str, comment: str, place: str) -> str:
    match = re.match(rf"^(\s*){re.escape(comment)} ?(.*)$", line)
    if match is None:
        raise MarkerError(f"{place}: what follows STUB must be commented out with {comment}")
    return match[1] + match[2] if match[2] else ""


def strip_solutions(text: str, suffix: str, name: str = "the text") -> str:
    """The starter: every solution replaced by its stub, or by a line that asks for code.

    suffix: of the file the text is from, ".cu", ".py" or ".md" among others. name: for messages.
    Raises ``MarkerError`` for markers that are nested, unclosed, unopened, or not quite markers.
    """
    if suffix not in _COMMENT:
        raise MarkerError(f"{name}: no markers are defined for {suffix!r}; accepted: {', '.join(_COMMENT)}")
    comment = _COMMENT[suffix]
    kept: list[str] = []
    begin = stub = 0  # line numbers, 0 for "not inside"
    has_stub = False
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{name}:{number}"
        match = _EXACT.match(line)
        if match is None:
            if _MEANT.search(line):
                raise MarkerError(f"{place}: {line.strip()!r} looks like a marker but is not one")
            if not begin:
                kept.append(line)
            elif stub:
                kept.append(_uncommented(line, comment, place))
                has_stub = True
            continue
        word = match["word"]
        if word == "BEGIN SOLUTION":
            if begin:
                raise MarkerError(f"{place}: a solution begins inside the one that began at line {begin}")
            begin, stub, has_stub = number, 0, False
            kept.append(
                match["indent"]
                + {"//": f"// {PLACEHOLDER}", "#": f"# {PLACEHOLDER}"}.get(comment, "*Your answer here*")
            )
        elif not begin:
            raise MarkerError(f"{place}: {word} outside of a solution")
        elif word == "STUB":
            if stub:
                raise MarkerError(f"{place}: a second STUB in one solution")
            stub = number
        else:
            if comment == "#" and not has_stub:
                kept.append(match["indent"] + "raise NotImplementedError()")
            begin = 0
    if begin:
        raise MarkerError(f"{name}: the solution that begins at line {begin} never ends")
    return "\n".join(kept) + ("\n" if text.endswith("\n") else "")


def without_markers(text: str, suffix: str, name: str = "the text") -> str:
    """The solution: markers and stubs taken out. Raises ``MarkerError`` as ``strip_solutions`` does."""
    strip_solutions(text, suffix, name)
    kept: list[str] = []
    in_stub = False
    for line in text.splitlines():
        match = _EXACT.match(line)
        if match is None:
            if not in_stub:
                kept.append(line)
        else:
            in_stub = match["word"] == "STUB"
    return "\n".join(kept) + ("\n" if text.endswith("\n") else "")


def bare(line: str) -> str:
    """A line without indentation and a comment at its end."""
    return line.split("//")[0].strip()


def solution_lines(text: str, suffix: str) -> set[str]:
    """The lines that only the solution has, bare; those too short to tell anything are left out."""
    starter = {bare(line) for line in strip_solutions(text, suffix).splitlines()}
    solution = {bare(line) for line in without_markers(text, suffix).splitlines()}
    return {line for line in solution - starter if len(line) > 12}


# ---------------------------------------------------------------- an exercise as changes to a chapter

_CHANGE = re.compile(r"^@@ replace\n(.*?)^@@ with\n(.*?)^@@ end$", re.MULTILINE | re.DOTALL)


def apply_changes(chapter: str, changes: str, name: str) -> str:
    """Makes changes to the text of a chapter.

    Each has the form

        @@ replace
        lines of the chapter, which it has exactly once
        @@ with
        other lines, perhaps with markers
        @@ end

    What stands between the changes is for people. Raises ValueError, naming it, for a change that does not
    fit: the chapter may have been edited since.
    """
    words = re.findall(r"^@@.*$", changes, re.MULTILINE)
    matches = list(_CHANGE.finditer(changes))
    if not matches or words != ["@@ replace", "@@ with", "@@ end"] * len(matches):
        raise ValueError(
            f"{name}: expected @@ replace, @@ with, @@ end, in this order and nothing else after @@"
        )
    for match in matches:
        old, new = match.groups()
        count = chapter.count(old)
        if count != 1:
            first = old.strip().splitlines()[0] if old.strip() else ""
            raise ValueError(
                f"{name}: the chapter has {count} times, not once, what a change replaces: {first!r} …"
            )
        chapter = chapter.replace(old, new)
    return chapter
