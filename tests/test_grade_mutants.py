"""The grader rejects every known-wrong kernel, and for the right reason. ``grade_mutants.py`` has the rules."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from grade_mutants import RULES, mutants
from helpers import mostly_slow

from common.grade.kernel import grade_kernel

MUTANTS = {mutant.name: mutant for mutant in mutants()}
SAMPLE = {
    "02-alibi-missing_scale_on_dk",
    "08-lse_base2-tail_rows_written",
}


@pytest.mark.parametrize("name", mostly_slow(MUTANTS, lambda name: name in SAMPLE))
def test_mutant_is_rejected_for_the_right_reason(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    mutant = MUTANTS[name]
    item = grade_kernel(mutant.exercise, mutant.text, seed="mutants")
    lost = [check.name for check in item.failed]
    record_property(
        "graded mutant", (item.exercise, mutant.rule.name, item.score, item.max_score, ", ".join(lost))
    )
    assert item.score < item.max_score, f"full marks for {mutant.rule.name}"
    assert mutant.lost <= set(lost), f"{mutant.lost - set(lost)} should have cost points\n{item}"
    kept = {check.name for check in item.checks if check.ok}
    assert set(mutant.rule.kept) <= kept, (
        f"{set(mutant.rule.kept) - kept} cost points and should not have\n{item}"
    )
    seen = " ".join(check.seen for check in item.failed)
    assert re.search(mutant.rule.said, seen), f"nothing says {mutant.rule.said!r}\n{item}"
    assert all(check.seen for check in item.checks)
    assert all(check.hint for check in item.failed if "could not be" not in check.seen), str(item)


def test_there_are_enough_and_of_every_kind() -> None:
    assert len(MUTANTS) >= 60
    assert {mutant.exercise.chapter for mutant in MUTANTS.values()} == {
        f"{e.exercise.chapter}" for e in MUTANTS.values()
    }
    assert len({mutant.exercise.chapter for mutant in MUTANTS.values()}) == 12
    assert {mutant.rule.name for mutant in MUTANTS.values()} == {rule.name for rule in RULES}
    assert set(MUTANTS) >= SAMPLE
