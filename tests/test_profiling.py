"""What Nsight Compute says about the main kernels: how it is read, and how it is shown."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest

from common import jit, list_chapters, ncu, profiling


def raw(values: dict[str, str]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([["ID", *values], ["", *("unit" for _ in values)], ["0", *values.values()]])
    return text.getvalue()


STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
VALUES = {
    **{metric: str(10 * i) for i, metric in enumerate(profiling.UNITS, 1)},
    "smsp__average_warp_latency_per_inst_issued.ratio": "1,000.0",
    STALL.format("wait"): "250",
    STALL.format("selected"): "500",
    STALL.format("membar"): "250",
    "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio.more": "7",
}


def test_shares_are_of_a_warps_cycles() -> None:
    units, reasons = profiling.read_raw(raw(VALUES))
    assert list(units.values()) == [10.0, 20.0, 30.0]
    assert reasons == {"wait": 0.25, "selected": 0.5, "membar": 0.25}


def test_a_metric_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError):
        profiling.read_raw(raw({k: v for k, v in VALUES.items() if "latency" not in k}))


def stored(folder: Path, source: str) -> Path:
    units, reasons = profiling.read_raw(raw(VALUES))
    info = list_chapters()[-1]
    entry = {"chapter": info.name, "source": source, "head_dim": 64, "units": units, "reasons": reasons}
    data = {"device": "a GPU", "date": "today", "dtype": "bf16", "seqlen": 4096, "tokens": 16384}
    path = folder / "profile.json"
    path.write_text(json.dumps(data | {"profiles": [entry]}))
    return path


def test_the_table_names_what_a_warp_waits_for(tmp_path: Path) -> None:
    info = list_chapters()[-1]
    text = profiling.table(info.name, path=stored(tmp_path, jit.kernel_digest(info.kernel)))
    assert "| issues an instruction | 50 |" in text
    assert "| fixed latency of its last instruction | 25 |" in text
    assert "| other | 25 |" in text
    assert "| a barrier |" not in text  # nothing waits for one
    assert "a GPU, today" in text


def test_edited_kernels_are_not_shown(tmp_path: Path) -> None:
    assert "`make profile`" in profiling.table(list_chapters()[-1].name, path=stored(tmp_path, "another"))
    assert "`make profile`" in profiling.table("11_warp_roles", path=tmp_path / "none.json")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if jit.cuda_problem() is None:
        pytest.skip("there is a GPU")
    assert profiling.main(["--output", str(tmp_path)]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_table_begins_after_what_the_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, monkeypatch, """echo "==PROF== $*"; echo '"ID","x"'; echo '"","%"'; echo '"0","7"'""")
    assert ncu.raw_table(["--section", "S"], ["some.module", "12"]).splitlines() == [
        '"ID","x"', '"","%"', '"0","7"',
    ]  # fmt: skip


@pytest.mark.parametrize("body", ["echo ERR_NVGPUCTRPERM; exit 1", "echo no kernels were profiled"])
def test_what_ncu_says_when_it_fails_is_shown(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, monkeypatch, body)
    with pytest.raises(RuntimeError, match=r"ncu failed on some\.module 12:\n(ERR_NVGPUCTRPERM|no kernels)"):
        ncu.raw_table([], ["some.module", "12"])
