"""The statements of the book, checked: one function a claim, used by its chapter's notebook and by 90_claims.

A claim's function computes its evidence and returns a ``Verdict``. It runs in a few seconds without a GPU;
what only a GPU can tell comes from ``notebooks/measurements/``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from IPython.display import Markdown

import common

HOLDS, CONDITION, FAILS, WAITS = "holds", "holds when …", "does not hold", "waits"


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    verdict: one of the four above. condition: when it holds, or which chapter it waits for; "" if it simply
    holds or fails. evidence: a sentence or two with the numbers, the same on every machine; ``measured`` has
    those that are not, such as times.
    """

    verdict: str
    evidence: str
    condition: str = ""
    measured: str = ""


@dataclass(frozen=True)
class Claim:
    """One statement of the texts. number: as in notebooks/90_claims.ipynb; chapters: where it is checked."""

    number: int
    statement: str
    source: str  # the section of the book, or "second text"
    chapters: tuple[str, ...]
    check: Callable[[], Verdict]


_claims: dict[int, Claim] = {}


def claim(
    number: int, statement: str, *, source: str, chapters: tuple[str, ...]
) -> Callable[[Callable[[], Verdict]], Callable[[], Verdict]]:
    """Registers the function below it as the check of a claim."""

    def register(check: Callable[[], Verdict]) -> Callable[[], Verdict]:
        if number in _claims:
            raise ValueError(f"claim {number} is registered twice")
        _claims[number] = Claim(number, statement, source, chapters, check)
        return check

    return register


def all_claims() -> list[Claim]:
    """Every claim, by number. They are found in the modules common/claims_*.py."""
    for module in pkgutil.iter_modules(common.__path__, "common."):
        if module.name.startswith("common.claims_"):
            importlib.import_module(module.name)
    return [_claims[number] for number in sorted(_claims)]


def _row(entry: Claim, verdict: Verdict) -> str:
    text = verdict.verdict.replace("…", verdict.condition) if verdict.condition else verdict.verdict
    if verdict.verdict == WAITS:
        text = f"waits for {verdict.condition}"
    return f"| {entry.number} | {entry.statement} ({entry.source}) | **{text}** | {verdict.evidence} |"


def verdicts(*numbers: int) -> list[tuple[Claim, Verdict]]:
    """Checks claims, all without numbers.

    Raises ValueError for a number nobody has registered.
    """
    known = {entry.number: entry for entry in all_claims()}
    missing = set(numbers) - set(known)
    if missing:
        raise ValueError(
            f"no claim {', '.join(map(str, sorted(missing)))}; there are {', '.join(map(str, known))}"
        )
    return [(known[number], known[number].check()) for number in numbers or known]


def claims_table(found: Iterable[tuple[Claim, Verdict]]) -> Markdown:
    """Statements, verdicts and evidence."""
    rows = ["| # | what the text says | verdict | evidence |", "|---:|---|---|---|"]
    return Markdown("\n".join(rows + [_row(entry, verdict) for entry, verdict in found]))


def measured_table(found: Iterable[tuple[Claim, Verdict]]) -> Markdown:
    """What was measured, of the claims that have something."""
    rows = ["| # | measured |", "|---:|---|"]
    rows += [f"| {entry.number} | {verdict.measured} |" for entry, verdict in found if verdict.measured]
    return Markdown("\n".join(rows))
