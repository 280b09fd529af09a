"""What grading says: checks with points, and the item that they make up."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Check:
    """One check of an item.

    share: 0 to 1 of its points. seen: what was seen. lines: of the student's file. hint: toward the idea, not
    the solution; empty if the check passed.
    """

    name: str
    points: float
    share: float
    seen: str
    lines: list[int] = field(default_factory=list)
    hint: str = ""

    @property
    def score(self) -> float:
        """Points earned."""
        return self.points * self.share

    @property
    def ok(self) -> bool:
        """Whether it has all of its points."""
        return self.share == 1.0

    def __str__(self) -> str:
        where = f" (line {', '.join(map(str, self.lines))})" if self.lines else ""
        hint = f"\n    hint: {self.hint}" if self.hint and not self.ok else ""
        mark = "ok  " if self.ok else "part" if self.share else "FAIL"
        return f"  {mark} {self.name:<9} {self.score:5.2f} / {self.points:.2f}  {self.seen}{where}{hint}"


@dataclass
class Item:
    """One exercise of one student, graded.

    findings: what the checker found, with the line each is at. digest: of what was graded; the same file is
    not graded again.
    """

    exercise: str
    student: str
    checks: list[Check]
    file: str = ""
    findings: list[tuple[int, str]] = field(default_factory=list)
    variant: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    seconds: float = 0.0

    @property
    def score(self) -> float:
        """Points earned, to a hundredth, never rounded up to all of them."""
        exact = sum(check.score for check in self.checks)
        return math.floor(exact * 100 + 1e-6) / 100

    @property
    def max_score(self) -> float:
        """Points there are."""
        return sum(check.points for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """The checks that cost points."""
        return [check for check in self.checks if not check.ok]

    def __str__(self) -> str:
        head = f"{self.exercise}: {self.score:.2f} of {self.max_score:.2f} points"
        if self.variant:
            head += f" (your variant: {', '.join(f'{k} = {v}' for k, v in self.variant.items())})"
        found = [f"  finding: {text}" for _, text in self.findings]
        return "\n".join([head, *(str(check) for check in self.checks), *found])

    def as_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it."""
        return {**asdict(self), "score": self.score, "max_score": self.max_score}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Item:
        """The item that ``as_json`` wrote."""
        data = {key: value for key, value in data.items() if key not in ("score", "max_score")}
        checks = [Check(**check) for check in data.pop("checks")]
        findings = [(int(line), str(text)) for line, text in data.pop("findings")]
        return cls(checks=checks, findings=findings, **data)
