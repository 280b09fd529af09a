"""The ladder's command line, its table, its files, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from common import ladder, measurements
from common.chapters import Chapter, list_chapters
from common.inputs import default_text, text_inputs
from common.ladder import main

NOTHING = "no chapter was run: all were left out or skipped"


@pytest.fixture
def climb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):  # noqa: ANN201
    def run(*arguments: str) -> tuple[int, str]:
        status = main(["--device", "cpu", "--picture", str(tmp_path / "ladder.png"), *arguments])
        return status, capsys.readouterr().out

    return run


def test_table_json_and_picture(climb, tmp_path: Path) -> None:  # noqa: ANN001
    status, out = climb(
        "--seqlens", "40", "70", "--heads", "1", "--causal", "--json", str(tmp_path / "l.json")
    )
    assert status == 0
    data = json.loads((tmp_path / "l.json").read_text())
    names = [info.name for info in list_chapters()]
    for seqlen in (40, 70):
        rungs = {rung["name"]: rung for rung in data["rungs"] if rung["seqlen"] == seqlen}
        assert list(rungs) == names
        for name in names[1:]:
            assert [c["name"] for c in rungs[name]["comparisons"]] == ["dq", "dk", "dv"]
            assert all(0 < c["error"] <= c["budget"] for c in rungs[name]["comparisons"])
            assert rungs[name]["seconds"] > 0
        naive, tiled = rungs["01_naive"], rungs["02_tiled"]
        assert naive["workspace_bytes"] == 4 * 4 * seqlen**2
        assert tiled["speedup"] == pytest.approx(naive["seconds"] / tiled["seconds"])
        assert f"seqlen {seqlen}\n" in out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in names)
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert data["settings"]["causal"] is True
    assert data["machine"]["torch"] == torch.__version__


def test_over_budget_is_an_error(climb, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    good = ladder.compare

    def doubled(result, *arguments, **options):  # noqa: ANN001, ANN002, ANN003, ANN202
        wrong = type(result)(result.out, result.lse, result.dq, 2 * result.dk, result.dv)
        return good(wrong, *arguments, **options)

    monkeypatch.setattr(ladder, "compare", doubled)
    status, out = climb("--seqlens", "40", "--heads", "1", "--chapters", "02")
    assert status == 1
    assert "OVER" in out
    assert "02_tiled, seqlen 40: dk: error" in out


def test_kernel_that_does_not_compile_is_an_error(climb, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    from common import jit

    monkeypatch.setattr(jit, "_CPU_KERNEL_FLAGS", [*jit._CPU_KERNEL_FLAGS, "-DkBlockN=1"])
    status, out = climb("--seqlens", "40", "--heads", "1", "--chapters", "02")
    assert status == 1
    assert "FAILED" in out


def test_long_runs_are_skipped(climb) -> None:  # noqa: ANN001
    status, out = climb(
        "--seqlens", "128", "20000", "--heads", "1", "--chapters", "01", "--time-limit", "0.5"
    )
    assert status == 0
    assert re.search(r"01_naive +skipped: would take about [\d.]+ s, --time-limit is 0.5 s", out)


def test_what_does_not_fit_is_skipped(climb, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(ladder, "free_bytes", lambda device: 10_000)
    status, out = climb("--seqlens", "128", "--heads", "1", "--chapters", "01")
    assert re.search(r"01_naive +skipped: needs about [\d.]+ MB, 10.0 KB are free", out)
    assert (status, out.splitlines()[-1]) == (1, NOTHING), "it was all there was to run"


@pytest.mark.parametrize(
    "arguments", [["--head-dim", "12"], ["--deterministic", "--chapters", "04"], ["--time-limit", "1e-12"]]
)
def test_nothing_run_is_an_error(climb, arguments: list[str], tmp_path: Path) -> None:  # noqa: ANN001
    status, out = climb("--seqlens", "40", "--heads", "1", "--chapters", "02", *arguments)
    assert (status, out.splitlines()[-1]) == (1, NOTHING)
    assert "every result is within its budget" not in out
    assert not (tmp_path / "ladder.png").exists(), "an empty picture would replace the last one"


def test_text(climb, tmp_path: Path) -> None:  # noqa: ANN001
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 20)
    status, out = climb(
        "--seqlens", "64", "--heads", "2", "--chapters", "02", "--text", str(text), "--causal"
    )
    assert status == 0
    assert f"input: {text}" in out
    status, out = climb("--seqlens", "64", "--heads", "2", "--chapters", "02", "--text")
    assert status == 0
    assert "pydoc_data.topics" in out


@pytest.mark.parametrize("content", ["short", ""])
def test_text_that_is_too_short(
    climb,  # noqa: ANN001
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def must_not_run(*arguments: object) -> None:
        pytest.fail("the text is looked at before anything is built")

    monkeypatch.setattr(ladder, "climb", must_not_run)
    text = tmp_path / "short.txt"
    text.write_text(content)
    message = rf"--text: the text has {len(content)} bytes; a sequence of 64 needs at least 65"
    with pytest.raises(SystemExit, match=message):
        climb("--seqlens", "40", "64", "--heads", "1", "--chapters", "02", "--text", str(text))


@pytest.mark.parametrize("name", ["ladder.foo", "ladder"])
def test_a_picture_that_cannot_be_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        ladder.parse_arguments(["--picture", name])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert f"--picture is {name}; expected a name that ends in one of " in said
    assert ".png" in said
    assert ladder.parse_arguments(["--picture", "x.SVG"]).picture == Path("x.SVG")


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "inf"])
def test_time_limits_out_of_range(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        ladder.parse_arguments(["--time-limit", limit])
    assert error.value.code == 2
    expected = f"--time-limit is {limit}; expected a finite number of seconds above 0"
    assert expected in capsys.readouterr().err


def test_text_inputs_are_those_of_a_trained_layer() -> None:
    inputs = text_inputs(default_text(), 1, 2, 96, 16, is_causal=True)
    assert inputs.q.shape == inputs.dout.shape == (1, 2, 96, 16)
    assert inputs.dout.square().mean().sqrt().item() == pytest.approx(1, rel=1e-3)
    again = text_inputs(default_text(), 1, 2, 96, 16, is_causal=True)
    assert torch.equal(inputs.q, again.q)
    scores = (inputs.q @ inputs.k.transpose(-1, -2)) / 4
    assert scores.std() > 0.1  # training moved attention away from uniform


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chapters", "77"], "there is no chapter '77'"),
        (["--device", "cuda"], "--device cuda: PyTorch sees no NVIDIA GPU"),
        (["--text", "no/such/file"], "--text: cannot read no/such/file"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(arguments)


@pytest.mark.parametrize("arguments", [["--seqlens", "0"], ["--heads", "0"], ["--dtype", "fp8"]])
def test_arguments_out_of_range(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert arguments[0].lstrip("-") in capsys.readouterr().err


def test_stored_measurements_of_edited_kernels_are_left_out(tmp_path: Path) -> None:
    info = list_chapters()[1]
    settings = ladder.Settings("cuda", "bf16", 1, 1, 64, (64,), False, None, 1.0)
    current = ladder.Rung(info.name, 64, seconds=1.0, source=ladder.jit.kernel_digest(info.kernel))
    edited = ladder.Rung("02_tiled", 64, seconds=1.0, source="0" * 12)
    sdpa = ladder.Rung("SDPA FLASH", 64, seconds=0.5)
    stored = ladder.Ladder(settings, {"device": "Some GPU", "date": "2026-01-01"}, [current, edited, sdpa])
    path = measurements.store_ladder(stored, tmp_path)
    assert path.name == "ladder_some_gpu_bf16_d64_full.json"
    loaded = measurements.load_ladder(path)
    assert [rung.name for rung in loaded.rungs] == [info.name, "SDPA FLASH"]
    assert loaded.stale == ["02_tiled"]


def test_what_the_gpu_cannot_run_is_left_out(climb, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(Chapter, "gpu_problem", lambda ch, _: "too old" if ch.info.number == 9 else None)
    status, out = climb("--seqlens", "40", "--heads", "1", "--chapters", "08", "09")
    assert status == 0
    assert "09_tensor_cores is left out: too old" in out
    assert "every result is within its budget" in out


def test_deterministic(climb, tmp_path: Path) -> None:  # noqa: ANN001
    arguments = [
        "--seqlens",
        "70",
        "--heads",
        "1",
        "--chapters",
        "05",
        "06",
        "--json",
        str(tmp_path / "l.json"),
    ]
    status, out = climb(*arguments, "--deterministic")
    assert status == 0
    assert "05_fp32_accum cannot be deterministic; left out" in out
    rungs = json.loads((tmp_path / "l.json").read_text())["rungs"]
    assert [(rung["name"], rung["workspace_bytes"]) for rung in rungs] == [
        ("06_deterministic", 3 * 4 * 70 * 64)
    ]
