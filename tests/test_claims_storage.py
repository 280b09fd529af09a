"""The claims about storing and recomputing: their verdicts, and that a planted fault flips them."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from common import claims_storage as storage
from common import experiments
from common.claims import CONDITION, FAILS, HOLDS, WAITS, all_claims
from common.measurements import FOLDER

EXPECTED = {
    1: CONDITION, 2: HOLDS, 3: HOLDS, 10: HOLDS, 11: HOLDS, 12: FAILS, 15: CONDITION, 16: CONDITION,
    18: CONDITION, 20: HOLDS, 28: CONDITION, 29: CONDITION, 30: CONDITION,
}  # fmt: skip
CHECKS = {c.number: c.check for c in all_claims() if c.check.__module__ == storage.__name__}
MEMORY = {
    "heads": 8,
    "rows": [
        {"method": method, "seqlen": n, "seconds": seconds * n}
        for n in (512, 4096)
        for method, seconds in (
            (experiments.STORED_P, 3.0),
            (experiments.RECOMPUTED, 1.0),
            ("SDPA MATH", 4.0),
            ("SDPA MATH, checkpointed", 5.0),
            ("SDPA FLASH", 1.0),
        )
    ],
    "limits": {
        experiments.STORED_P: {"largest_seqlen": 1024, "largest_batch_at_4096": 2},
        experiments.RECOMPUTED: {"largest_seqlen": 10240, "largest_batch_at_4096": 20},
    },
}


def test_all_are_there() -> None:
    assert set(CHECKS) == {*EXPECTED, 17}


@pytest.mark.slow  # 90_claims.ipynb runs the same checks every time
@pytest.mark.parametrize("number", EXPECTED)
def test_verdicts(number: int) -> None:
    verdict = CHECKS[number]()
    assert verdict.verdict == EXPECTED[number]
    assert verdict.evidence
    assert bool(verdict.condition) == (verdict.verdict in (CONDITION, WAITS))


# ---------------------------------------------------------------- planted faults


def test_a_factor_between_the_deltas_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "exact_deltas", lambda: ([Fraction(1)], [Fraction(2)]))
    assert CHECKS[1]().verdict == FAILS


def test_deltas_simply_agree_if_rounding_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "delta_error_ratios", lambda means, dtype: [1.0])
    assert CHECKS[1]().verdict == HOLDS


def test_a_wrong_jacobian_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "jacobian_of_softmax", lambda p: [[x * y for y in p] for x in p])
    assert CHECKS[2]().verdict == FAILS


def test_atomics_elsewhere_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage._checked

    def swapped(chapter: str, problem: object = storage._SMALL) -> object:
        return real("04_atomic_dq" if chapter == "02_tiled" else chapter, problem)

    monkeypatch.setattr(storage, "_checked", swapped)
    assert CHECKS[3]().verdict == FAILS


def test_another_dtype_of_lse_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    info = storage.load_chapter("00_forward").info
    traffic = {**info.traffic, "forward": {**info.traffic["forward"], "lse": {"written": "B*H * 8*N_q"}}}
    changed = storage.load_chapter("00_forward")
    changed.info = dataclasses.replace(info, traffic=traffic)
    monkeypatch.setattr(storage, "load_chapter", lambda name: changed)
    assert CHECKS[10]().verdict == FAILS


def test_a_ratio_in_the_tens_of_thousands_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "saved_ratio", lambda seqlen, **_: Fraction(20_000))
    assert CHECKS[12]().verdict == HOLDS


def test_a_card_without_exponentials_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(storage.H100_SXM, exps=1e10)
    monkeypatch.setattr(storage, "H100_SXM", slow)
    assert CHECKS[16]().verdict == FAILS


def test_the_tile_function_is_right_with_delta_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    x = storage.random_inputs(1, 1, 64, 32)
    q, k, v, dout = (t[0, 0].double() for t in (x.q, x.k, x.v, x.dout))
    delta = (((32**-0.5 * q @ k.T).softmax(1) @ v) * dout).sum(1, keepdim=True)

    def repaired(
        q: Tensor, k: Tensor, v: Tensor, dout: Tensor, row_max: Tensor, row_sum: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = torch.exp(scale * q @ k.T - row_max[:, None]) / row_sum[:, None]
        ds = scale * p * (dout @ v.T - delta)
        return ds @ k, ds.T @ q, p.T @ dout

    monkeypatch.setattr(storage, "tile_gradients", repaired)
    assert CHECKS[18]().verdict == HOLDS


def test_the_forward_order_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "forward_traffic_of_o", lambda m, n, outer: (2, 3))
    assert CHECKS[20]().verdict == FAILS


def test_a_missing_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage.scale_placements()
    monkeypatch.setattr(storage, "scale_placements", lambda: {**real, "on dS": real["nowhere"]})
    assert CHECKS[28]().verdict == FAILS


def test_tiles_that_are_not_those_of_the_list_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = storage._checked
    monkeypatch.setattr(storage, "_checked", lambda name, *rest: checked("08_preprocess_delta"))
    assert CHECKS[15]().verdict == FAILS


def test_what_bounds_depends_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_memory = dataclasses.replace(storage.H100_SXM, bandwidth=100e12)
    monkeypatch.setattr(storage, "H100_SXM", fast_memory)
    assert CHECKS[29]().verdict == FAILS


# ---------------------------------------------------------------- what needs measurements


def test_gains_wait_for_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "load", lambda part: None)
    assert CHECKS[17]().verdict == WAITS
    assert not CHECKS[30]().measured


def test_gains_are_judged_by_measurements() -> None:
    assert storage.judge_gains(MEMORY).verdict == CONDITION
    slow = [r | {"seconds": 1.0} for r in MEMORY["rows"]]
    assert storage.judge_gains(MEMORY | {"rows": slow}).verdict == FAILS
    small = {experiments.STORED_P: MEMORY["limits"][experiments.STORED_P]} | {
        experiments.RECOMPUTED: {"largest_seqlen": 2048, "largest_batch_at_4096": 20}
    }
    assert storage.judge_gains(MEMORY | {"limits": small}).verdict == FAILS


# ---------------------------------------------------------------- the experiments themselves


def test_stored_peaks_grow_with_the_sequence_as_they_should() -> None:
    """Twice as long: four times the memory where matrices are stored, twice where not. No constant share."""
    peaks: dict[str, dict[int, int]] = {}
    for row in json.loads((FOLDER / "memory.json").read_text())["rows"]:
        peaks.setdefault(row["method"], {})[row["seqlen"]] = row["peak_bytes"]
    assert len(peaks) == 5
    for method, by_length in peaks.items():
        linear = method in (experiments.RECOMPUTED, "SDPA FLASH")
        for n in experiments.MEMORY_SEQLENS[:-1]:
            low, high = (1.99, 2.02) if linear else (3.75, 4.0)
            assert low <= by_length[2 * n] / by_length[n] <= high, (method, n)


def test_a_mean_of_the_values_changes_dq_by_nothing_but_rounding() -> None:
    small, large = (storage.off_centre_inputs(mean, torch.float64) for mean in (0.0, 4.0))
    truths = [storage.reference_gradients(x.q, x.k, x.v, x.dout).dq for x in (small, large)]
    torch.testing.assert_close(*truths, rtol=0, atol=1e-12)


def test_saved_tensors_grow_as_they_should() -> None:
    one, two = storage.saved_tensors(256), storage.saved_tensors(512)
    assert one.matrices == 2 * 32 * 256**2
    assert (two.matrices, two.other) == (4 * one.matrices, 2 * one.other)


def test_orders_of_the_forward_pass() -> None:
    assert storage.forward_traffic_of_o(3, 5, "q") == (0, 1)
    assert storage.forward_traffic_of_o(3, 5, "k") == (4, 5)
