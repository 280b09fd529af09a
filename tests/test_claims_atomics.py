"""The claims of chapters 03 to 05: each verdict, and a planted fault that turns it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common import check, claims_atomics, jit, load_chapter, load_kernel, sass
from common.claims import CONDITION, FAILS, HOLDS, WAITS, Verdict

NUMBERS = (4, 5, 6, 7, 9, 21, 22)
CHECKS: dict[int, Callable[[], Verdict]] = {
    4: claims_atomics.number_of_atomics,
    5: claims_atomics.sixteen_bit_atomics,
    6: claims_atomics.plan_b_needs_a_buffer,
    7: claims_atomics.unused_results_are_reductions,
    9: claims_atomics.savings_outweigh_atomics,
    21: claims_atomics.shared_memory_first,
}
VERDICTS = {4: HOLDS, 5: CONDITION, 6: CONDITION, 7: HOLDS, 9: CONDITION, 21: HOLDS}


@pytest.mark.slow  # 90_claims.ipynb runs the same checks every time
@pytest.mark.parametrize("number", CHECKS)
def test_verdicts(number: int) -> None:
    found = CHECKS[number]()
    assert found.verdict == VERDICTS[number]
    assert bool(found.condition) == (found.verdict == CONDITION)


@pytest.mark.slow
def test_times_and_errors_are_not_evidence() -> None:
    assert "ms" not in claims_atomics.savings_outweigh_atomics().evidence
    errors = claims_atomics.sixteen_bit_atomics()
    assert all(f"{e.ratio:.2f}" not in errors.evidence for e in claims_atomics.dq_errors())
    assert "fp16, T_k = 16" in errors.measured


@pytest.mark.parametrize("number", [pytest.param(4, marks=pytest.mark.slow), 21])
def test_adding_twice_is_seen(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = load_chapter(5).info.kernel.read_text()
    once = "atomicAdd(dq + int64_t(m_start) * kHeadDim + i, sum);"
    assert once in source
    half = once.replace("sum)", "0.5f * sum)")
    mutant = tmp_path / "kernel.cu"
    mutant.write_text(source.replace(once, f"{half}\n          {half}"))

    def with_fault(chapter: str, problem: object) -> object:
        return check.remembered_check(load_kernel(mutant) if chapter == "05_fp32_accum" else chapter, problem)

    monkeypatch.setattr(claims_atomics, "remembered_check", with_fault)
    assert CHECKS[number]().verdict == FAILS


def test_a_plan_b_without_a_buffer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_atomics, "STAGED", claims_atomics.RECOMPUTE)
    assert claims_atomics.plan_b_needs_a_buffer().verdict == FAILS


def test_cheap_atomics_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        claims_atomics, "dq_bytes", lambda chapter, _: 2 if chapter == claims_atomics.STAGED else 1
    )
    assert claims_atomics.savings_outweigh_atomics().verdict == HOLDS


@pytest.mark.parametrize(
    ("build", "opcode", "number", "verdict"),
    [
        ("bf16 sm_80", "RED.E.ADD.BF16x2.RN", 5, HOLDS),
        pytest.param("fp16 sm_80", "ATOMG.E.CAS.STRONG.GPU", 5, FAILS, marks=pytest.mark.slow),
        pytest.param("bf16 sm_80", "ATOMG.E.ADD.F32.FTZ.RN", 7, FAILS, marks=pytest.mark.slow),
        pytest.param("fp32 sm_90a", "RED.E.ADD.F32.FTZ.RN", 7, FAILS, marks=pytest.mark.slow),
    ],
)
def test_other_instructions_turn_the_verdict(
    build: str, opcode: str, number: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {name: sass.instructions(name) | {build: [opcode]} for name in sass.CHAPTERS}
    monkeypatch.setattr(sass, "instructions", lambda name: found[name])
    assert CHECKS[number]().verdict == verdict


@pytest.mark.parametrize("number", [5, 7])
def test_instructions_of_an_edited_kernel_are_refused(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = json.loads(sass.STORED.read_text())
    data["chapters"]["04_atomic_dq"]["source"] = "0" * 12
    stale = tmp_path / "sass.json"
    stale.write_text(json.dumps(data))
    assert sass.stored(4, stale) is None
    assert sass.stored(5, stale) is not None
    assert sass.stored(5, tmp_path / "none.json") is None
    monkeypatch.setattr(sass, "stored", lambda name: None)
    monkeypatch.setattr(sass, "tools", lambda: None)
    assert CHECKS[number]().verdict == WAITS


def test_stored_instructions_are_current() -> None:
    for name in sass.CHAPTERS:
        assert sass.stored(name) is not None, "a kernel was edited: run `python -m common.sass`"


def test_the_compiler_here_makes_the_stored_instructions() -> None:
    if sass.tools() is None:
        pytest.skip("no nvcc or no nvdisasm")
    stored = sass.stored("04_atomic_dq")
    found = sass.compiled("04_atomic_dq", (torch.bfloat16,), ("80", "90a"))
    assert found == {build: stored[build] for build in found}


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    assert sass.tools() is None
    with pytest.raises(jit.BuildError, match="nvdisasm"):
        sass.disassemble(load_chapter(5).info.kernel, torch.float32, 64, "80")


def test_global_atomics_are_told_from_shared_ones() -> None:
    text = "ATOMS.CAST.SPIN R1, [R2] ; @P0 RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2], R3 ; REDUX.SUM UR4, R5 ; "
    assert sass.global_atomics(text) == ["RED.E.ADD.F32.FTZ.RN.STRONG.GPU"]


def rates(**ratios: float) -> dict[str, object]:
    rows = []
    for place, ratio in ratios.items():
        for operation, rate in (("store", 1e12), ("atomicAdd", ratio * 1e12)):
            rows.append(
                {"place": place, "type": "float", "operation": operation, "operations_per_second": rate}
            )
    return {"machine": {"device": "a card"}, "rows": rows}


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (rates(L2=0.4, beyond=0.5), HOLDS),
        (rates(L2=0.4, beyond=1.0), CONDITION),
        (rates(L2=1.0, beyond=0.9), FAILS),
    ],
)
def test_the_rate_decides(data: dict[str, object], verdict: str) -> None:
    assert claims_atomics.judge_rates(data).verdict == verdict


def test_without_rates_the_claim_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_atomics.experiments, "load", lambda part: None)
    assert claims_atomics.atomics_are_slow().verdict == WAITS
