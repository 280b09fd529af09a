"""The claims of common/claims_schedule.py, and that their verdicts follow what the kernels do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common import claims_schedule as schedule
from common.claims import CONDITION, FAILS, HOLDS, WAITS, all_claims
from common.jit import REPO_ROOT

EXPECTED = {
    8: HOLDS, 13: CONDITION, 14: CONDITION, 19: HOLDS, 23: HOLDS, 24: CONDITION, 25: CONDITION, 26: CONDITION,
    27: HOLDS, 31: HOLDS,
}  # fmt: skip


def planted(tmp_path: Path, chapter: str, old: str, new: str) -> Path:
    source = (REPO_ROOT / "chapters" / chapter / "kernel.cu").read_text()
    assert source.count(old) == 1
    path = tmp_path / "planted.cu"
    path.write_text(source.replace(old, new))
    return path


@pytest.mark.slow  # 90_claims.ipynb runs the same checks every time, and has their verdicts among its outputs
def test_verdicts() -> None:
    found = {entry.number: entry.check() for entry in all_claims() if entry.number in EXPECTED}
    assert {number: verdict.verdict for number, verdict in found.items()} == EXPECTED
    for number, verdict in found.items():
        assert verdict.evidence, number
        assert bool(verdict.condition) == (verdict.verdict in (CONDITION, WAITS)), number


def test_every_number_is_registered_once() -> None:
    assert [entry.number for entry in all_claims()] == list(range(1, 32))


def test_evidence_is_the_same_every_time() -> None:
    assert schedule.deterministic_mode().evidence == schedule.deterministic_mode().evidence


def test_one_accumulator_for_all_is_not_deterministic(tmp_path: Path) -> None:
    kernel = planted(tmp_path, "06_deterministic", "params.deterministic ? blockIdx.y : 0", "0")
    assert schedule.deterministic_mode(kernel).verdict == FAILS


def test_tiles_that_are_not_skipped_are_seen() -> None:
    unskipped = REPO_ROOT / "chapters" / "06_deterministic" / "kernel.cu"
    assert schedule.causal_skipping(unskipped).verdict == FAILS


def test_a_forward_that_loads_k_twice_is_seen(tmp_path: Path) -> None:
    line = "load_tile<kBlockN, kNumThreads>(smem.sK, k, params.k_strides.row, n_start, params.seqlen_k);"
    kernel = planted(tmp_path, "00_forward", line, f"{line} {line}")
    assert schedule.without_lse(kernel).verdict == FAILS


def test_delta_in_the_main_loop_is_seen() -> None:
    inside = REPO_ROOT / "chapters" / "07_causal_skip" / "kernel.cu"
    assert schedule.delta_once(after=inside).verdict == FAILS


def test_a_reference_with_other_words_is_seen() -> None:
    first, *others = schedule.FA2_REFERENCES
    moved = dataclasses.replace(first, seen="something else")
    verdict = schedule.fa2_references([moved, *others])
    assert verdict.verdict == FAILS
    assert f"{first.file}:{first.line}" in verdict.evidence


def test_references_can_be_looked_up_in_a_checkout(tmp_path: Path) -> None:
    folder = tmp_path / schedule.FA2_FOLDER
    folder.mkdir(parents=True)
    for file in {r.file for r in schedule.FA2_REFERENCES}:
        lines = [""] * 700
        for r in schedule.FA2_REFERENCES:
            if r.file == file:
                lines[r.line - 1] = f"  {r.seen}"
        (folder / file).write_text("\n".join(lines))
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text(f"    {schedule.FA2_DEFAULT},\n")
    assert schedule.references_missing_in(tmp_path) == []
    kernel = folder / "flash_bwd_kernel.h"
    kernel.write_text("mbarrier\n" + kernel.read_text())
    missing = schedule.references_missing_in(tmp_path)
    assert len(missing) == 6  # five lines have moved, and there is an mbarrier


@pytest.mark.slow
def test_the_skeleton_without_its_barrier_does_not_work(tmp_path: Path) -> None:
    kernel = planted(tmp_path, "09_tensor_cores", "__syncthreads();  // P and dS are complete", "")
    assert schedule.skeleton(kernel).verdict == FAILS


def test_what_lanes_hold_is_what_they_need_of_p_but_not_of_its_transpose() -> None:
    held, needed = schedule.accumulator_places, schedule.operand_places
    assert schedule.lanes_with_pairs(held, needed) == 1
    places = [(row, col) for lane in range(32) for row, col in held(lane)]
    assert sorted(places) == [(row, col) for row in range(16) for col in range(16)]
    assert schedule.lanes_with_pairs(held, lambda lane: {(c, r) for r, c in needed(lane)}) < 1


def ratio_row(backend: str, seqlen: int, ratio: float, **more: str) -> dict[str, object]:
    return {"backend": backend, "head_dim": 64, "is_causal": False, "seqlen": seqlen,
            "forward_seconds": 1.0, "backward_seconds": ratio, **more}  # fmt: skip


def test_the_ratio_waits_for_measurements() -> None:
    assert schedule.judge_ratio(None, "known").verdict == WAITS


def test_the_ratio_is_judged_by_long_sequences() -> None:
    machine = {"device": "card", "date": "today"}
    rows = [ratio_row("FLASH", 512, 9.0), ratio_row("FLASH", 4096, 3.0)]
    assert schedule.judge_ratio({"machine": machine, "rows": rows}, "").verdict == CONDITION
    rows += [ratio_row("FLASH", 8192, 2.0), ratio_row("FLASH", 16384, 3.1)]
    assert schedule.judge_ratio({"machine": machine, "rows": rows}, "").verdict == CONDITION
    rows.append(ratio_row("FLASH", 32768, 2.0))
    assert schedule.judge_ratio({"machine": machine, "rows": rows}, "").verdict == FAILS


def test_ratios_of_an_edited_chapter_are_left_out() -> None:
    assert not schedule.ratio_ranges(
        [ratio_row("09_tensor_cores", 512, 3.0, source="old")], "09_tensor_cores"
    )
    digest = schedule.kernel_digest(schedule._TENSOR_CORES)
    rows = [ratio_row("09_tensor_cores", 512, 3.0, source=digest)]
    assert schedule.ratio_ranges(rows, "09_tensor_cores") == {"d = 64 full": (3.0, 3.0)}


@pytest.mark.parametrize(
    ("seqlen_k", "splits"), [(1, 1), (33, 2), (256, 8), (4096, 8)], ids=lambda value: str(value)
)
def test_our_splits_are_those_of_the_kernel(seqlen_k: int, splits: int) -> None:
    assert schedule.our_splits(seqlen_k) == splits


def test_shared_memory_of_fa2_is_what_its_comments_say() -> None:
    """Its launcher asks for 144 KiB before it takes the tiles without V in registers."""
    assert schedule.fa2_shared_bytes(64, 128, 128, v_in_registers=False) == 144 * 1024
    assert schedule.fa2_shared_bytes(128, 64, 128, v_in_registers=False) == 144 * 1024
