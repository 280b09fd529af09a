"""Which submissions resemble each other more than the task makes them: by sequences of tokens.

Names, numbers and comments do not count, so renaming variables hides nothing; what everybody was handed out
is taken away first. A high number is a reason to look, not a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from common.grade.scan import without_comments

_LENGTH = 10  # tokens of a sequence
_FEWEST = 60  # sequences of one's own; of fewer lines there are too few ways to write them
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.']*|[^\s\w]")
_KEPT = {
    "for",
    "if",
    "else",
    "while",
    "return",
    "int",
    "float",
    "bool",
    "const",
    "auto",
    "__syncthreads",
    "atomicAdd",
    "expf",
}


@dataclass(frozen=True)
class Pair:
    """Two students, and the share of the shorter one's own sequences that both have."""

    exercise: str
    first: str
    second: str
    share: float
    sequences: int


def _sequences(text: str) -> set[tuple[str, ...]]:
    tokens = [
        token
        if token in _KEPT or not (token[0].isalnum() or token[0] == "_")
        else "name"
        if not token[0].isdigit()
        else "number"
        for token in _TOKEN.findall(without_comments(text))
    ]
    return {tuple(tokens[i : i + _LENGTH]) for i in range(len(tokens) - _LENGTH + 1)}


def similar(exercise: str, texts: Mapping[str, str], starter: str, least: float = 0.6) -> list[Pair]:
    """Pairs of students that share at least ``least``, the most alike first."""
    given = _sequences(starter)
    own = {student: _sequences(text) - given for student, text in texts.items()}
    pairs = []
    for first, second in combinations(sorted(own), 2):
        shorter = min(len(own[first]), len(own[second]))
        if shorter < _FEWEST:
            continue
        share = len(own[first] & own[second]) / shorter
        if share >= least:
            pairs.append(Pair(exercise, first, second, share, shorter))
    return sorted(pairs, key=lambda pair: -pair.share)
