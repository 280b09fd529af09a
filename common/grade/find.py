"""Break it, then find it: a chapter with one fault planted in it by the rules of ``common.mutation``.

The file that is handed out has no comments and other names for its variables, so that a comparison with the
chapter does not simply print the answer. The fault is chosen by seed and student and stored nowhere.
"""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import dataclass

from common.chapters import ChapterInfo
from common.grade.exercises import Exercise
from common.grade.results import Check, Item
from common.grade.scan import without_comments
from common.mutation import Mutant, mutants_of, why_harmless

# The rules whose mutants the checker sees (tests/test_mutation.py), as the student names them.
KINDS = {
    "barrier": "barrier",
    "wait": "wait",
    "shared array": "size",
    "zeroing": "zeroing",
    "last row": "last row",
}
# Arrays whose size is a part of a function's type: the compiler would find the fault.
_TYPED = re.compile(r"(TileRow|ScoreRow) |float s(P|dS)\[")
_NEAR, _FAR = 2, 8  # lines: right, and half right
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xu", "ze")
ANSWER = """# Break it, then find it: fill in both and save. Comments like this one may stay.
# line: of the file, where the fault is; for something that is missing, the line below the gap.
# kind: "barrier", "wait" (of a cp.async), "size" (of an array), "zeroing", or "last row" (not written)
line = 0
kind = ""
"""
_MARK = "\x01"


@dataclass(frozen=True)
class Fault:
    """What is handed out, and the answer."""

    text: str
    line: int
    kind: str


def _candidates(info: ChapterInfo) -> list[Mutant]:
    mutants = [
        mutant
        for mutant in mutants_of(info)
        if mutant.file == "kernel.cu" and mutant.rule in KINDS and why_harmless(mutant) is None
        and not (mutant.rule == "shared array" and _TYPED.match(mutant.before))
    ]  # fmt: skip
    # Of each rule as many as of the others, or nearly all faults would be barriers.
    by_rule = {rule: [m for m in mutants if m.rule == rule] for rule in KINDS}
    return [
        random.Random(rule).choice(group) for _ in range(3) for rule, group in by_rule.items() if group
    ] + mutants


def plant(info: ChapterInfo, seed: str, student: str) -> Fault:
    """The chapter's kernel with the fault of one student."""
    rng = random.Random(f"{seed}/{student}/{info.name}/find_it")
    mutant = rng.choice(_candidates(info))
    return _disguised(mutant, rng)


def _disguised(mutant: Mutant, rng: random.Random) -> Fault:
    lines = mutant.source.splitlines()
    at = mutant.line - 1
    lines[at] += f" {_MARK}"
    text = without_comments("\n".join(lines).replace(_MARK, f'"{_MARK}"'))
    # The mark was a string, so it is gone; the include lines' strings are needed.
    kept: list[str] = []
    answer = 0
    for i, (line, original) in enumerate(zip(text.splitlines(), lines, strict=True)):
        if i == at:
            answer = len(kept) + 1
        if re.match(r'\s*#\s*include|.*"', original) and "//" not in original.split('"')[0]:
            line = original.replace(_MARK, "").split(" //")[0]
        if line.strip():
            kept.append(line.rstrip())
    header = [f"// Break it, then find it: {mutant.chapter} with one fault. The task is in the notebook.", ""]
    renamed = _renamed("\n".join(kept) + "\n", rng)
    return Fault("\n".join(header) + "\n" + renamed, answer + len(header), KINDS[mutant.rule])


def _renamed(text: str, rng: random.Random) -> str:
    """Local variables under other names: those that are nowhere a member, a string, or anything else."""
    names = set(
        re.findall(
            r"\b(?:int|float|int64_t|bool|auto|Element\*|float\*|float2|uint32_t) (\w+)(?: =|\[)", text
        )
    )
    names |= set(re.findall(r"__device__ \w+ (\w+)\(", text))
    members = set(re.findall(r"(?:\.|->)(\w+)", text)) | set(re.findall(r'"[^"]*"', text))
    structs = " ".join(re.findall(r"struct \w+[^{]*\{.*?^\};", text, re.MULTILINE | re.DOTALL))
    names = {
        n for n in names if n not in members and not re.search(rf"\b{n}\b", structs) and not n.startswith("k")
    }
    for name in sorted(names):
        new = "".join(rng.sample(_SYLLABLES, 3))
        while re.search(rf"\b{new}\b", text):
            new = "".join(rng.sample(_SYLLABLES, 4))
        text = re.sub(rf"\b{name}\b", new, text)
    return text


def read_answer(text: str) -> tuple[int, str]:
    """(line, kind). Raises ValueError, naming what is wrong with it."""
    data = tomllib.loads(text)
    line, kind = data.get("line"), data.get("kind")
    if isinstance(line, bool) or not isinstance(line, int) or line < 1:
        raise ValueError(f"line is {line!r}; expected the number of a line")
    if kind not in KINDS.values():
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS.values())}")
    return line, kind


def grade_answer(exercise: Exercise, text: str, fault: Fault | None, student: str = "") -> Item:
    """Grades the text of a ``find_it.toml``. fault: None where it is not known (a student's own check)."""
    points = exercise.points
    try:
        line, kind = read_answer(text)
    except ValueError as error:  # TOMLDecodeError is one
        hint = "Run the checker on find_it.cu; the two lines of a race enclose what is missing."
        checks = [
            Check(name, points[name], 0.0, f"{exercise.file}: {error}", [], hint) for name in ("kind", "line")
        ]
        return Item(exercise.key, student, checks, exercise.file)
    if fault is None:
        seen = "is well formed; whether it is right, the instructor's grader says"
        return Item(
            exercise.key,
            student,
            [Check(n, points[n], 0.0, f"{n} {seen}") for n in ("kind", "line")],
            exercise.file,
        )
    distance = abs(line - fault.line)
    share = 1.0 if distance <= _NEAR else 0.5 if distance <= _FAR else 0.0
    place = "where the fault is" if share == 1 else "near the fault" if share else "not where the fault is"
    same = kind == fault.kind
    checks = [
        Check("kind", points["kind"], float(same), f"kind {kind!r} is {'' if same else 'not '}right", [],
              "Which tool of the checker spoke, and what does that tool look for?"),
        Check("line", points["line"], share, f"line {line} is {place}", [line],
              "A finding names where a mistake shows. Go back from there: what should have come before it?"),
    ]  # fmt: skip
    return Item(exercise.key, student, checks, exercise.file)
