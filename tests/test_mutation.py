"""Is every safeguard of every chapter needed, and is its absence seen? ``mutation.py`` has the rules.

One mutant of each chapter runs every time, all of them with the slow tests; the run ends with the score.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import mostly_slow
from mutation import HARMLESS, RULES, Mutant, mutants_of, sources_of, verdict, why_harmless

from common.chapters import list_chapters

MUTANTS = {mutant.name: mutant for info in list_chapters() for mutant in mutants_of(info)}


def _sample() -> set[str]:
    """A mutant of every other chapter, of another rule each time, and of those the one in the middle."""
    names = set()
    for i, info in enumerate(list_chapters()[::2]):
        of_rule = {rule: [m for m in mutants_of(info) if m.rule == rule] for rule in RULES}
        rules = [rule for rule in RULES[i % len(RULES) :] + RULES if of_rule[rule]]
        chosen = of_rule[rules[0]]
        names.add(chosen[len(chosen) // 2].name)
    return names


SAMPLE = _sample()


@pytest.mark.parametrize("name", mostly_slow(MUTANTS, lambda name: name in SAMPLE))
def test_mutant_is_seen(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    mutant = MUTANTS[name]
    seen, reason = verdict(mutant, tmp_path), why_harmless(mutant)
    record_property(
        "mutant", (mutant.chapter, mutant.rule, "harmless" if seen == "nobody" and reason else seen)
    )
    if reason is None:
        assert seen != "nobody", f"nobody notices that\n  {mutant.before}\nbecame\n  {mutant.after}"
    else:
        assert seen == "nobody", f"{seen} sees it, so it is not harmless: {reason}"


def test_each_chapter_has_mutants_of_each_kind() -> None:
    for info in list_chapters():
        kernel = info.kernel.read_text()
        text = "".join(path.read_text() for path in sources_of(info))
        rules = {mutant.rule for mutant in mutants_of(info)}
        assert {"barrier", "guard", "shared array", "last row"} <= rules, info.name
        assert ("zeroing" in rules) == ("cudaMemsetAsync" in text or "] = {}" in text), info.name
        barriers = [m for m in mutants_of(info) if m.rule == "barrier" and m.file == "kernel.cu"]
        assert len(barriers) == len(re.findall(r"__sync(?:threads|warp)\(\);|\bbarrier_sync\(", kernel)), (
            info.name
        )
        assert ("wait" in rules) == ("cp_async_wait<" in text), info.name
        assert ("swizzle" in rules) == ("swizzle<" in text), info.name
        assert ("stage" in rules) == ("kStages" in text or "[stage]" in text), info.name
        assert ("transpose" in rules) == ("ldmatrix(" in text), info.name
        assert ("turn" in rules) == ("pass_turn();" in text), info.name
        assert ({"mbarrier", "parity", "bytes"} <= rules) == ("mbarrier_wait(" in text), info.name
        assert ({"proxy", "wgmma"} <= rules) == ("wgmma_wait<" in text), info.name


def test_a_mutant_differs_in_one_place() -> None:
    for mutant in MUTANTS.values():
        assert mutant.before != mutant.after, mutant.name


def test_every_entry_of_the_harmless_names_a_mutant() -> None:
    excused: list[Mutant] = [m for m in MUTANTS.values() if why_harmless(m)]
    for entry in HARMLESS:
        assert any(why_harmless(m) == entry.reason for m in excused), entry
