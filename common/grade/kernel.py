"""Grading a ``.cu``: whether it compiles and is right and clean, and what it asks memory for."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from torch import Tensor

from common.grade import compiled, hints
from common.grade.cases import Case, draw_cases
from common.grade.compiled import CompileError, RunError
from common.grade.diagnose import describe
from common.grade.exercises import RESULTS, Exercise, Limit
from common.grade.results import Check, Item
from common.grade.scan import scan
from common.reference import Comparison
from common.report import Finding, Report
from common.traffic import SHARED

_READ = {"backward": ("q", "k", "v", "dout"), "forward": ("q", "k", "v")}


@dataclass
class CaseResult:
    """What one case gave. wrong: result → what was seen; failed: why there is nothing to compare."""

    case: Case
    wrong: dict[str, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    report: Report | None = None
    failed: str = ""
    took_too_long: bool = False
    scratch: int = 0  # bytes

    @property
    def findings(self) -> list[Finding]:
        """The checker's."""
        return self.report.findings if self.report is not None else []

    @property
    def is_complete(self) -> bool:
        """Whether the pass ran to its end, so that counts are whole."""
        return self.report is not None and self.report.error is None


def cases_of(exercise: Exercise, seed: str) -> list[Case]:
    """The problems an exercise is graded on."""
    unit = 32 if exercise.dtype.itemsize == 4 else 64
    return draw_cases(seed, exercise.key, unit, causal=exercise.causal, deterministic=exercise.deterministic)


def grade_kernel(
    exercise: Exercise,
    text: str,
    *,
    constants: Mapping[str, int] | None = None,
    seed: str,
    student: str = "",
    examine: bool = True,
) -> Item:
    """Grades the text of a kernel file.

    constants: the student's variant. seed: chooses the cases. examine: look for what a kernel may not use
    before compiling; tests turn it off to see what the sandbox does.
    """
    start = time.perf_counter()
    constants = exercise.variant("", "") if constants is None else dict(constants)
    item = Item(exercise.key, student, [], exercise.file, variant=dict(constants))
    try:
        if examine and (found := scan(text)):
            raise CompileError(
                "; ".join(f"line {line}: {what}" for line, what in found[:4]), [line for line, _ in found]
            )
        if changed := _changed_constants(text, constants):
            raise CompileError(changed)
        with tempfile.TemporaryDirectory(prefix="grade-") as folder:
            library = compiled.compile_submission(
                text, exercise.file, Path(folder), exercise.dtype, exercise.head_dim
            )
            results = _run_cases(exercise, library, constants, cases_of(exercise, seed))
    except CompileError as error:
        item.checks = _nothing_right(exercise, str(error), error.lines)
    else:
        item.checks = [Check("compiles", exercise.points["compiles"], 1.0, "compiles")]
        item.checks += _judge(exercise, results, constants)
        item.findings = _distinct([f for r in results for f in r.findings])
    item.seconds = time.perf_counter() - start
    return item


def _changed_constants(text: str, constants: Mapping[str, int]) -> str:
    for name, value in constants.items():
        match = re.search(rf"^\s*constexpr \w+ {name} = ([^;]+);", text, re.MULTILINE)
        if match is None:
            return f"the line `constexpr … {name} = {value};`, your variant, is gone; it stays as handed out"
        if match[1].strip() != str(value):
            return f"{name} is {match[1].strip()} in the file; your variant has {value}"
    return ""


def _nothing_right(exercise: Exercise, why: str, lines: list[int]) -> list[Check]:
    checks = [
        Check("compiles", exercise.points["compiles"], 0.0, why, sorted(set(lines))[:10], hints.COMPILES)
    ]
    return checks + [
        Check(name, points, 0.0, "could not be checked: nothing was run")
        for name, points in exercise.points.items() if name != "compiles"
    ]  # fmt: skip


def _run_cases(
    exercise: Exercise, library: compiled.Library, constants: Mapping[str, int], cases: list[Case]
) -> list[CaseResult]:
    try:
        layouts = compiled.describe(library, cases, exercise.pass_)
    except RunError as error:
        return [CaseResult(case, failed=str(error)) for case in cases]
    results = []
    for case, layout in zip(cases, layouts, strict=True):
        results.append(_run_case(exercise, library, constants, case, layout))
        # What hangs in one case does so in the others, and takes its time.
        if results[0].took_too_long or (len(results) == 2 and all(r.failed for r in results)):
            results += [CaseResult(rest, failed=results[0].failed) for rest in cases[len(results) :]]
            break
    return results


def _run_case(
    exercise: Exercise, library: compiled.Library, constants: Mapping[str, int], case: Case, layout: list
) -> CaseResult:
    attention = exercise.attention_of(constants)
    x = case.inputs(exercise.head_dim, exercise.dtype)
    scale = case.scale(exercise.head_dim)
    backward = exercise.pass_ == "backward"
    saved = attention.saved(x, scale, case.is_causal) if backward else None
    result = CaseResult(case, scratch=sum(prod(shape) * dtype.itemsize for _, dtype, shape, _ in layout))
    try:
        outputs, result.report = compiled.run_case(library, case, x, saved, layout, exercise.info)
    except RunError as error:
        result.failed, result.took_too_long = str(error), error.timed_out
        return result
    if result.report.error is not None:
        result.failed = result.report.error
        return result
    rounded = exercise.info.dq_rounded_every
    result.comparisons = attention.compare(outputs, x, scale, case.is_causal, dq_rounded_every=rounded)
    exact = attention.exact(x, scale, case.is_causal)
    for comparison in result.comparisons:
        if not comparison.ok:
            value: Tensor = getattr(exact, comparison.name)
            result.wrong[comparison.name] = describe(outputs[comparison.name], value, comparison, scale)
    _add_what_no_kernel_made(exercise, result)
    return result


def _add_what_no_kernel_made(exercise: Exercise, result: CaseResult) -> None:
    """A result counts only if kernels made it of the inputs: the launcher's own arithmetic moves no byte."""
    assert result.report is not None
    tensors = result.report.traffic.tensors
    # A query that sees one key, or none, is the smallest case; every kernel reads all inputs.
    unread = [name for name in _READ[exercise.pass_] if name not in tensors or tensors[name].read == 0]
    for name in RESULTS[exercise.pass_]:
        if unread:
            result.wrong[name] = f"no kernel reads {', '.join(unread)}, so {name} was not computed by one"
        elif name not in tensors or tensors[name].written + tensors[name].atomic_bytes == 0:
            result.wrong[name] = f"no kernel writes {name}"


# ---------------------------------------------------------------- judging


def _judge(exercise: Exercise, results: list[CaseResult], constants: Mapping[str, int]) -> list[Check]:
    checks = [_correctness(exercise, name, results) for name in RESULTS[exercise.pass_]]
    right = sum(check.share for check in checks) / len(checks)
    if "clean" in exercise.points:
        checks.append(_cleanliness(exercise, results, right))
    if "ledger" in exercise.points:
        checks.append(_ledger(exercise, results, constants, right))
    return checks


def _correctness(exercise: Exercise, name: str, results: list[CaseResult]) -> Check:
    wrong = [r for r in results if r.failed or name in r.wrong]
    points = exercise.points[name]
    if not wrong:
        worst = max(
            (c for r in results for c in r.comparisons if c.name == name),
            key=lambda c: c.error / (c.budget or 1.0),
        )
        return Check(
            name,
            points,
            1.0,
            f"right in all {len(results)} cases; error {worst.error:.1e}, budget {worst.budget:.1e}",
        )
    first = wrong[0]
    seen = f"{first.case}: {first.failed or first.wrong[name]}"
    right = [r for r in results if r not in wrong]
    if right:
        seen += (
            f". Wrong in {len(wrong)} of {len(results)} cases; right: {'; '.join(r.case.name for r in right)}"
        )
    lines = _lines_that_write(name, results)
    failed = all(r.failed for r in results)
    hint = hints.RUNS if failed else exercise.hints.get(name, hints.RESULTS[name])
    if len(right) >= len(results) / 2:
        hint = hints.ONLY_PART  # the formula is right, then, and its hint would mislead
    elif right and not failed:
        hint += f" {hints.ONLY_PART}"
    return Check(name, points, len(right) / len(results), seen, lines, hint)


def _lines_that_write(name: str, results: list[CaseResult]) -> list[int]:
    """Of the student's file: where the result is stored."""
    lines = {
        r.where.line
        for result in results if result.report is not None
        for r in result.report.traffic.requests
        if r.memory == name and r.operation in ("write", "atomic") and r.where.line > 0
    }  # fmt: skip
    return sorted(lines)[:4]


# What goes wrong first: an overrun looks like a race, too, and a race like a read of nothing.
_ORDER = ("memcheck", "racecheck", "synccheck", "initcheck", "error")


def _by_cause(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: _ORDER.index(f.tool) if f.tool in _ORDER else len(_ORDER))


def _distinct(findings: list[Finding]) -> list[tuple[int, str]]:
    """(line, sentence), one for each tool and pair of lines."""
    seen: dict[tuple, tuple[int, str]] = {}
    for f in _by_cause(findings):
        line = f.where.line if f.where is not None else 0
        other = f.other.line if f.other is not None else 0
        seen.setdefault((f.tool, line, other, f.memory if not line else ""), (line, str(f)))
    return list(seen.values())[:12]


def _cleanliness(exercise: Exercise, results: list[CaseResult], right: float) -> Check:
    points = exercise.points["clean"]
    findings = _by_cause([f for r in results for f in r.findings])
    failed = [r for r in results if r.failed]
    if findings:
        distinct = _distinct(findings)
        lines = {f.where.line for f in findings if f.where is not None} | {
            f.other.line for f in findings if f.other is not None
        }
        lines.discard(0)
        more = f" (and {len(distinct) - 1} more)" if len(distinct) > 1 else ""
        return Check(
            "clean", points, 0.0, f"{findings[0]}{more}", sorted(lines)[:10], hints.of_finding(findings[0])
        )
    if failed:
        return Check("clean", points, 0.0, f"{failed[0].case}: {failed[0].failed}", [], hints.RUNS)
    return _as_far_as_right(
        Check("clean", points, 1.0, "memcheck, initcheck, racecheck, synccheck: nothing found"), right
    )


def _as_far_as_right(check: Check, right: float) -> Check:
    """A kernel that computes nothing is clean and moves nothing: these points count as far as it is right."""
    if right < 1.0:
        check.share *= right
        check.seen += f"; counts as far as the results are right ({right:.0%})"
        check.hint = "Get the results right first."
    return check


def _quantity(limit: Limit, result: CaseResult) -> int:
    assert result.report is not None
    traffic = result.report.traffic
    if limit.quantity == "scratch":
        return result.scratch
    if limit.quantity == "barriers":
        return traffic.block_barriers
    if limit.quantity == "atomics":
        return sum(t.atomics for t in traffic.tensors.values())
    if limit.quantity == "bytes":
        return traffic.bytes
    memory, _, operation = limit.quantity.rpartition(".")
    tensor = traffic.shared if memory == SHARED else traffic.tensors.get(memory)
    if operation not in ("read", "written", "atomics", "bytes"):
        raise ValueError(
            f"ledger quantity {limit.quantity!r}: expected tensor.read, .written, .atomics or .bytes"
        )
    return 0 if tensor is None else getattr(tensor, operation)


def _ledger(
    exercise: Exercise, results: list[CaseResult], constants: Mapping[str, int], right: float
) -> Check:
    points = exercise.points["ledger"]
    complete = [r for r in results if r.is_complete]
    if not complete:
        return Check("ledger", points, 0.0, "could not be counted: no case came to its end", [], hints.RUNS)
    broken: list[tuple[Limit, str, list[int]]] = []
    kept = []
    for limit in exercise.ledger:
        for r in complete:
            problem = r.case.problem(exercise.head_dim, exercise.dtype)
            at_most, count = exercise.limit(limit, problem, constants), _quantity(limit, r)
            if count > at_most:
                memory = limit.quantity.partition(".")[0]
                lines = sorted(
                    {
                        q.where.line
                        for q in r.report.traffic.requests
                        if q.memory == memory and q.where.line > 0
                    }
                )
                broken.append(
                    (
                        limit,
                        f"{r.case}: {limit.quantity} is {count:,}, at most {at_most:,} is allowed "
                        f"({limit.says})",
                        lines,
                    )
                )
                break
        else:
            kept.append(limit.says)
    # What the chapter keeps already earns nothing, but must not be lost.
    earning = [limit for limit in exercise.ledger if limit.at_most != "chapter"] or list(exercise.ledger)
    lost = {limit.says for limit, _, _ in broken}
    share = (
        0.0
        if lost - {limit.says for limit in earning}
        else sum(limit.says not in lost for limit in earning) / len(earning)
    )
    if not broken:
        return _as_far_as_right(Check("ledger", points, 1.0, f"kept: {'; '.join(kept)}"), right)
    limit, seen, lines = broken[0]
    return Check("ledger", points, share * right, seen, lines[:6], limit.hint)
