"""The sweep beside PyTorch's kernels: how it is timed, stored, shown on the front pages and drawn."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import loaded
from test_figures import assert_readable, curve, words

from common import bench, jit, list_chapters, measurements, readme, sweep, timing
from common.figures import draw_sweep
from common.ladder import Ladder, Settings

Start = Callable[[Callable[[], object], int], Callable[[], float]]

# ---------------------------------------------------------------- timing by turns


def a_clock(seconds: Callable[[str, int], float]) -> tuple[dict[str, Callable[[], object]], Start, list]:
    """Two functions, a timer that says what ``seconds(name, runs so far)`` says, and its log."""
    functions = {name: (lambda name=name: name) for name in ("a", "b", "c")}
    log: list[tuple[str, int]] = []

    def start(function: Callable[[], str], calls: int) -> Callable[[], float]:
        log.append((function(), calls))
        spent = seconds(function(), len(log) - 1)
        return lambda: spent

    return functions, start, log


def test_median_and_spread_of_counted_repetitions() -> None:
    # Two estimates and a warm-up of each come first; they are far off.
    runs: Counter[str] = Counter()
    series = {"a": [5.0, 99.0, 3.0, 1.0, 2.0, 9.0, 4.0], "b": [0.5, 77.0, 6.0, 6.0, 6.0, 6.0, 6.0]}

    def seconds(name: str, _: int) -> float:
        runs[name] += 1
        return series.get(name, [1.0] * 7)[runs[name] - 1]

    functions, start, log = a_clock(seconds)
    found = timing.interleaved_timings(functions, start, repeats=5)
    assert found["a"] == timing.Timing(median=3.0, low=1.0, high=9.0, calls=1)
    assert found["b"] == timing.Timing(median=6.0, low=6.0, high=6.0, calls=1)
    assert Counter(name for name, _ in log) == {"a": 7, "b": 7, "c": 7}


def test_each_repetition_times_every_function_once() -> None:
    functions, start, log = a_clock(lambda name, run: 1.0)
    timing.interleaved_timings(functions, start, repeats=4)
    turns = [[name for name, _ in log[i : i + 3]] for i in range(3, len(log), 3)]
    assert len(turns) == 1 + 4
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    before = {(one, other) for turn in turns for one, other in itertools.pairwise(turn)}
    assert ("a", "b") in before
    assert ("b", "a") in before


def test_what_drifts_hits_all_alike() -> None:
    """The card slows down by half during the measurement: equal functions still come out equal."""
    functions, start, _ = a_clock(lambda name, run: 1.0 + run / 54)
    found = timing.interleaved_timings(functions, start, repeats=7)
    medians = [t.median for t in found.values()]
    assert max(medians) / min(medians) < 1.03


def test_short_functions_are_called_often_enough() -> None:
    spent = {"a": 0.0009, "b": 0.004, "c": 1e-6}
    functions, start, log = a_clock(lambda name, run: spent[name])
    found = timing.interleaved_timings(functions, start, repeats=2, target=0.010, max_calls=20)
    assert {name: t.calls for name, t in found.items()} == {"a": 12, "b": 3, "c": 20}
    assert set(log[3:]) == {("a", 12), ("b", 3), ("c", 20)}


def test_nothing_is_timed_on_an_idle_gpu() -> None:
    """Each is called right before it is timed, or its time would include the launch of its first call."""
    events = []

    def start(function: Callable[[], object], calls: int) -> Callable[[], float]:
        events.append(f"start {function()}")
        return lambda: events.append("wait") or 1.0

    functions = {name: lambda name=name: events.append(f"call {name}") or name for name in ("a", "b")}
    timing.interleaved_timings(functions, start, repeats=2)
    a, b = ([f"call {name}", f"call {name}", f"start {name}", "wait"] for name in ("a", "b"))
    assert events[6:] == [*a, *b, *b, *a, *a, *b]  # after the two that find out how often to call


def test_the_gpu_rests_as_long_as_the_timing_before_asks_for() -> None:
    """A card at its power limit lowers its clocks: no function is to pay for the one before it."""
    rests = []
    functions, start, _ = a_clock(lambda name, run: {"a": 0.05, "b": 0.001, "c": 0.0}[name])
    found = timing.interleaved_timings(
        functions, start, repeats=2, rest=3.0, max_calls=20, sleep=rests.append
    )
    assert {name: t.calls for name, t in found.items()} == {"a": 1, "b": 10, "c": 20}
    after_a, after_b, after_c = 3 * 0.05, 3 * 10 * 0.001, 0.0
    expected = [0.0, after_a, after_b, after_c, after_c, after_b, after_a, after_a, after_b]
    assert rests == pytest.approx(expected)


def test_calls_on_the_cpu_are_made_and_averaged() -> None:
    made = []
    wait = timing.start_calls(lambda: made.append(torch.randn(300, 300) @ torch.randn(300, 300)), 4,
                              torch.device("cpu"))  # fmt: skip
    assert len(made) == 4
    assert 0 < wait() < 1


def test_calls_on_a_gpu_are_queued_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return 30.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    wait = timing.start_calls(lambda: log.append("call"), 3, torch.device("cuda"))
    assert log == ["record", "call", "call", "call", "record"]
    assert wait() == pytest.approx(0.010)
    assert log[5:] == ["wait"]


def test_the_first_call_on_a_gpu_is_never_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN builds a kernel in its first call, for seconds; the call after it is what counts."""
    clock = [0.0]
    calls = iter([3.0, 0.5, 0.7, 0.9])  # seconds

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    def call() -> None:
        clock[0] += next(calls)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.median_seconds(call, torch.device("cuda"), limit=1.0) == pytest.approx(0.5)
    calls = iter([3.0])
    assert timing.median_seconds(call, torch.device("cpu"), limit=1.0) == 3.0  # once is enough


@pytest.mark.gpu
def test_what_python_takes_for_a_call_is_not_the_kernels_time() -> None:
    """0.3 ms of Python before a kernel that fills a hundred bytes."""
    x = torch.zeros(100, device="cuda")

    def call() -> None:
        time.sleep(3e-4)
        x.add_(1)

    assert timing.median_seconds(call, x.device) < 1e-4


# ---------------------------------------------------------------- measuring


def test_chapters_are_chosen_by_rule() -> None:
    chosen = {info.name for info in sweep.tensor_core_chapters()}
    assert {"09_tensor_cores", "10_async_pipeline", "11_warp_roles"} <= chosen
    for info in list_chapters():
        if info.name not in chosen:
            assert info.min_compute_capability < (8, 0)


SMALL = sweep.SweepSettings(
    "cpu", "fp16", 64, True, seqlens=(100, 50), tokens=100, width=128, repeats=3
)  # what other tests build, too


def test_measured_on_the_cpu_device() -> None:
    reported = []
    info = loaded("05_fp32_accum").info
    found = sweep.measure(SMALL, [info], {"fp16": 2.0}, lambda s, n: reported.append(sweep.line(s, n)))
    assert found.ok
    # PyTorch has a FLASH for the CPU, and neither of the others.
    assert [(p.name, p.seqlen) for p in found.points] == [
        (name, n) for n in (50, 100) for name in ("SDPA FLASH", info.name)
    ]
    assert {(e.name, e.seqlen, e.failed) for e in found.left_out} == {
        (name, n, False) for n in (50, 100) for name in ("SDPA CUDNN", "SDPA EFFICIENT")
    }
    assert all(e.why for e in found.left_out)
    for point in found.points:
        assert 0 < point.min_ms <= point.median_ms <= point.max_ms
        flops = 5 * 100 * point.seqlen * 128  # B·N = 100, H·d = 128, and half of 10 is counted
        assert point.tflops == pytest.approx(flops / point.median_ms / 1e9)
        assert point.of_peak == pytest.approx(point.tflops / 2)
    sources = {p.name: p.source for p in found.points}
    assert sources == {"SDPA FLASH": None, info.name: jit.kernel_digest(info.kernel)}
    assert found.ratio(info.name, 100) == pytest.approx(
        found.point("SDPA FLASH", 100).median_ms / found.point(info.name, 100).median_ms
    )
    assert found.forward == []  # 05 has none of its own
    assert len(reported) == 2
    assert re.search(r"^ +50 +FLASH .*% +05 .*\(.* ×\)$", reported[0])


def test_a_forward_pass_of_its_own_is_measured() -> None:
    info = loaded("09_tensor_cores").info
    settings = dataclasses.replace(SMALL, seqlens=(50,))
    found = sweep.measure(settings, [info], {"fp16": 2.0})
    assert found.ok
    assert [p.name for p in found.forward] == ["SDPA FLASH", info.name]
    flash, own = found.forward
    assert own.source == jit.kernel_digest(info.kernel)
    assert own.tflops == pytest.approx(2 * 100 * 50 * 128 / own.median_ms / 1e9)
    assert found.ratio(info.name, 50, forward=True) == pytest.approx(flash.median_ms / own.median_ms)
    assert found.ratio(info.name, 50, to=info.name, forward=True) == 1
    assert found.cell(info.name, 50, forward=True).startswith(f"{own.tflops:.0f} (")


@pytest.mark.gpu
def test_measured_on_a_gpu() -> None:
    settings = sweep.SweepSettings("cuda", "bf16", 64, False, (256,), tokens=1024, width=128, repeats=2)
    infos = sweep.tensor_core_chapters()
    found = sweep.measure(settings, infos, sweep.matmul_peaks(torch.device("cuda")))
    assert found.ok, found.left_out
    assert "SDPA FLASH" in {p.name for p in found.points}
    usable = {i.name for i in infos if loaded(i.name).gpu_problem(torch.device("cuda")) is None}
    assert {p.name for p in found.points if p.source} == usable
    assert all(0 < p.of_peak < 1 for p in found.points)


def test_speed_of_wrong_numbers_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    chapter = loaded("05_fp32_accum")
    good = type(chapter).backward

    def doubled(*arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = good(*arguments, **options)
        return dq, 2 * dk, dv

    monkeypatch.setattr(type(chapter), "backward", doubled)
    found = sweep.measure(dataclasses.replace(SMALL, seqlens=(50,)), [chapter.info], {})
    assert not found.ok
    assert [p.name for p in found.points] == ["SDPA FLASH"]
    (entry,) = (e for e in found.left_out if e.failed)
    assert (entry.name, entry.seqlen) == (chapter.name, None)
    assert entry.why.startswith("dk: error")


def test_a_chapter_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise jit.BuildError("it does not compile")

    monkeypatch.setattr(sweep, "budget_problem", broken)
    settings = dataclasses.replace(SMALL, seqlens=(50,))
    info = loaded("05_fp32_accum").info
    found = sweep.measure(settings, [info], {})
    assert sweep.LeftOut(info.name, None, "it does not compile", failed=True) in found.left_out
    assert not found.ok
    # What a chapter does not claim to support is no failure.
    found = sweep.measure(dataclasses.replace(settings, head_dim=68), [info], {})
    assert found.ok
    assert "does not support fp16 with head_dim 68" in {e.name: e.why for e in found.left_out}[info.name]


def test_random_inputs_are_neither_zero_nor_of_mean_zero() -> None:
    x = sweep.draw(dataclasses.replace(SMALL, tokens=4096), 64, torch.device("cpu"))
    assert x.q.shape == x.dout.shape == (64, 2, 64, 64)
    assert x.q.dtype == x.dout.dtype == torch.float16
    for tensor, mean in ((x.q, 0), (x.k, 0), (x.v, 0), (x.dout, 0.25)):
        assert tensor.float().mean().item() == pytest.approx(mean, abs=0.01)
        assert tensor.float().std().item() == pytest.approx(1, abs=0.01)
    assert not torch.equal(x.q, x.k)


# ---------------------------------------------------------------- builds, the machine


def test_builds_are_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    monkeypatch.setattr(sweep.subprocess, "run", lambda job, **options: jobs.append(job[1:]))
    infos = [loaded(name).info for name in ("10_async_pipeline", "11_warp_roles")]
    # Both take their forward pass from 09. head_dim 68 is not supported.
    assert sweep.build_all(infos, ["bf16", "fp16"], [64, 68]) == 6
    assert sorted(jobs) == [
        ["-m", "common.sweep", name, dtype, "64"]
        for name in ("09_tensor_cores", "10_async_pipeline", "11_warp_roles")
        for dtype in ("bf16", "fp16")
    ]


def test_one_build(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jit, "cuda_problem", lambda: "no GPU in this test")
    assert sweep.main(["05_fp32_accum", "fp16", "64"]) == 0

    def broken(*arguments: object) -> None:
        raise jit.BuildError("it does not compile")

    monkeypatch.setattr(sweep.Chapter, "library", broken)
    assert sweep.main(["05_fp32_accum", "fp16", "64"]) == 1
    assert "it does not compile" in capsys.readouterr().err


class _Smi(subprocess.Popen):
    """A process that prints what ``text`` says instead of nvidia-smi."""

    text = ""

    def __init__(self, command: list[str], **options: object) -> None:
        assert command[0] == "nvidia-smi"
        super().__init__(["sh", "-c", f"sleep 0.1; printf '{self.text}'"], **options)


@pytest.mark.parametrize(
    ("text", "state", "driver"),
    [
        (r"GPU-1, 1755, 612.42, 580.1\nGPU-2, 345, 70.1, 580.1\n", (1755, 612.42), "580.1"),
        (r"GPU-9, 1755, 612.42, 580.1\n", (1755, 612.42), "580.1"),  # the only one, under another name
        (r"GPU-8, 1, 1, 580.1\nGPU-9, 2, 2, 580.1\n", (), ""),
        (r"GPU-1, [N/A], 70.5, 580.1\n", (None, 70.5), "580.1"),
        ("Failed to initialize NVML\n", (), ""),
    ],
)
def test_clock_power_and_driver(
    text: str, state: tuple[float | None, ...], driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        uuid = "1"

    monkeypatch.setattr(_Smi, "text", text)
    monkeypatch.setattr(sweep.subprocess, "Popen", _Smi)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    tensor = torch.ones(2, 2)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: tensor)
    names = ("sm_clock_mhz", "power_w")
    expected = {name: n for name, n in zip(names, state, strict=False) if n is not None}
    assert sweep.gpu_state(torch.device("cuda")) == (expected, driver)


def test_without_nvidia_smi_the_state_is_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(sweep.subprocess, "Popen", missing)
    tensor = torch.ones(2, 2)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: tensor)
    assert sweep.gpu_state(torch.device("cuda")) == ({}, "")
    assert sweep.gpu_state(torch.device("cpu")) == ({}, "")


# ---------------------------------------------------------------- a made-up measurement

NAMES = {"SDPA FLASH": 1.0, "SDPA CUDNN": 0.5, "SDPA EFFICIENT": 2.0, "10_async_pipeline": 0.8}


def a_sweep(
    head_dim: int = 128, causal: bool = False, dtype: str = "bf16", speed: float = 1.0
) -> sweep.Sweep:
    """Milliseconds are NAMES' × N / 512 / speed; 100 TFLOP/s is what takes a millisecond."""
    settings = sweep.SweepSettings("cuda", dtype, head_dim, causal, seqlens=(512, 1024, 16384))
    points = []
    for name, factor in NAMES.items():
        source = None
        if not name.startswith("SDPA"):
            source = jit.kernel_digest(loaded(name).info.kernel)
        for n in settings.seqlens:
            ms, tflops = factor * n / 512 / speed, 100 * speed / factor
            points.append(sweep.Point(name, n, ms, 0.99 * ms, 1.02 * ms, 9, tflops, tflops / 750, source))
    return sweep.Sweep(
        settings,
        {"device": "Some GPU", "date": "2026-01-01", "driver": "580.1"},
        {"bf16": 750.2, "fp16": 744.0},
        {"before": {"sm_clock_mhz": 1980.0}, "after": {}},
        points,
        [sweep.LeftOut("11_warp_roles", None, "dq: error", failed=True)],
    )


def as_base(stored: measurements.StoredSweep) -> sweep.Sweep:
    values = {f.name: getattr(stored, f.name) for f in dataclasses.fields(sweep.Sweep)}
    return sweep.Sweep(**values)


def test_forward_passes_are_stored_and_edited_ones_are_not_shown(tmp_path: Path) -> None:
    measured = a_sweep()
    name = next(name for name in NAMES if not name.startswith("SDPA"))
    measured.forward = [dataclasses.replace(p, tflops=p.tflops / 2) for p in measured.points]
    stored = measurements.load_sweep(measurements.store_sweep(measured, tmp_path))
    assert stored.forward == measured.forward
    measured.forward = [dataclasses.replace(p, source=p.source and "another") for p in measured.forward]
    stored = measurements.load_sweep(measurements.store_sweep(measured, tmp_path))
    assert stored.point(name, 512, forward=True) is None
    assert stored.point(sweep.FLASH, 512, forward=True) is not None
    assert stored.point(name, 512) is not None


def test_stored_and_loaded(tmp_path: Path) -> None:
    measured = a_sweep()
    path = measurements.store_sweep(measured, tmp_path)
    assert path.name == "sweep_some_gpu_bf16_d128_full.json"
    stored = measurements.load_sweep(path)
    assert as_base(stored) == measured
    assert stored.stale == []
    assert not stored.ok
    assert measurements.load_ladders(tmp_path) == []
    causal = a_sweep(causal=True)
    measurements.store_sweep(causal, tmp_path)
    assert as_base(measurements.find_sweep("bf16", 128, True, tmp_path)) == causal
    assert as_base(measurements.find_sweep("bf16", 128, False, tmp_path)) == measured
    assert measurements.find_sweep("fp16", 128, False, tmp_path) is None


def test_measurements_of_edited_kernels_are_left_out(tmp_path: Path) -> None:
    measured = a_sweep()
    measured.points = [
        p if p.source is None else dataclasses.replace(p, source="0" * 12) for p in measured.points
    ]
    stored = measurements.load_sweep(measurements.store_sweep(measured, tmp_path))
    assert stored.stale == ["10_async_pipeline"]
    assert {p.name for p in stored.points} == set(NAMES) - {"10_async_pipeline"}
    table = readme.sweep_table(folder=tmp_path)
    assert "|  | 10_async_pipeline |  |  |  |" in table
    assert "blank means not measured since the last edit" in table


# ---------------------------------------------------------------- the front pages


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    """Cells of the table by (setting, name)."""
    found, setting = {}, ""
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        setting = first or setting
        found[setting, name] = cells
    return found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_table(language: str, tmp_path: Path) -> None:
    measurements.store_sweep(a_sweep(128, False), tmp_path)
    measurements.store_sweep(a_sweep(128, True, speed=2), tmp_path)
    measurements.store_sweep(a_sweep(64, False, speed=3), tmp_path)
    measurements.store_sweep(a_sweep(64, True, "fp16", speed=9), tmp_path)
    table = readme.sweep_table(language, tmp_path)
    assert table.splitlines()[0].endswith("| 512 | 1K | 16K |")
    cells = rows(table)
    names = ["SDPA FLASH", "SDPA CUDNN", *(info.name for info in sweep.tensor_core_chapters())]
    settings = ["128, full", "128, causal", "64, full", "64, causal"]
    assert list(cells) == [(setting, name) for setting in settings for name in names]
    assert cells["128, full", "SDPA FLASH"] == ["100"] * 3
    assert cells["128, full", "SDPA CUDNN"] == ["200 (2.00 ×)"] * 3
    assert cells["128, full", "10_async_pipeline"] == ["125 (1.25 ×)"] * 3
    assert cells["128, causal", "10_async_pipeline"] == ["250 (1.25 ×)"] * 3
    assert cells["64, full", "10_async_pipeline"] == ["375 (1.25 ×)"] * 3
    assert {c for name in names for c in cells["64, causal", name]} == {""}  # only fp16 was measured
    assert cells["128, full", "11_warp_roles"] == [""] * 3
    note = table.splitlines()[-3]
    for part in ("16,384", "2048", "3.0%", "750", "Some GPU, 2026-01-01", "FLASH", "7"):
        assert part in note
    assert table.endswith("](notebooks/measurements/sweep.png)")


def test_a_picture_that_is_not_drawn_is_not_shown(tmp_path: Path) -> None:
    measurements.store_sweep(a_sweep(64), tmp_path)
    assert ".png" not in readme.sweep_table(folder=tmp_path)


@pytest.mark.parametrize(("language", "said"), [("en", "Not measured yet"), ("zh", "尚未测量")])
def test_without_a_measurement_one_line_says_so(language: str, said: str, tmp_path: Path) -> None:
    table = readme.sweep_table(language, tmp_path)
    assert table.startswith(said)
    assert "\n" not in table
    assert "`make bench`" in table


def test_pages_are_current_and_rendered_between_their_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, language in readme.PAGES.items():
        text = path.read_text()
        assert readme.render(text, language) == text, f"{path.name}: run `make readme`"
    monkeypatch.setattr(readme, "sweep_table", lambda language: f"made up in {language}")
    for path, language in readme.PAGES.items():
        text = path.read_text()
        begin, end = text.index(readme.SWEEP_BEGIN), text.index(readme.SWEEP_END)
        made_up = f"{readme.SWEEP_BEGIN}\nmade up in {language}\n"
        assert readme.render(text, language) == text[:begin] + made_up + text[end:]
        with pytest.raises(ValueError, match="exactly one <!-- sweep"):
            readme.render(text.replace(readme.SWEEP_BEGIN, ""), language)


@pytest.mark.parametrize("measured", [True, False])
def test_make_readme_draws_what_is_measured(
    measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if measured:
        measurements.store_sweep(a_sweep(), tmp_path)
    find = measurements.find_sweep
    monkeypatch.setattr(readme, "find_sweep", lambda *setting: find(*setting[:3], tmp_path))
    pages = {}
    for path, language in readme.PAGES.items():
        pages[tmp_path / path.name] = language
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(readme, "PAGES", pages)
    picture = tmp_path / "sweep.png"
    monkeypatch.setattr(readme, "draw_sweep", lambda sweeps, path: draw_sweep(sweeps, picture))
    monkeypatch.setattr(readme, "draw_ladder", lambda *arguments: None)
    monkeypatch.setattr(readme, "draw_traffic", lambda reports: draw_sweep([a_sweep()]))
    monkeypatch.setattr(readme, "TRAFFIC_PICTURE", tmp_path / "traffic.png")
    monkeypatch.setattr(readme, "check_chapter", lambda *arguments: (None, None))
    assert readme.main([]) == 0
    assert picture.exists() == measured
    for page in pages:
        assert ("125 (1.25 ×)" in page.read_text()) == measured


# ---------------------------------------------------------------- the figure


@pytest.mark.filterwarnings("error")
def test_sweep_drawn(tmp_path: Path) -> None:
    sweeps = [a_sweep(), a_sweep(causal=True, speed=2)]
    figure = draw_sweep(sweeps, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert_readable(figure)
    for axes, s in zip(figure.axes, sweeps, strict=True):
        for name in NAMES:
            assert curve(axes, name) == [(p.seqlen, p.tflops) for p in s.points if p.name == name]
        assert {y for _, y in curve(axes, "matrix product")} == {750.2}
        # Without colours, too: no two curves have both marker and line style in common.
        styles = [(line.get_marker(), line.get_linestyle()) for line in axes.lines]
        assert len(set(styles)) == len(styles)
        bars = [tuple(map(tuple, path.vertices)) for c in axes.collections for path in c.get_paths()]
        for p in s.points:
            low, high = p.tflops / 1.02, p.tflops / 0.99
            assert any(
                bar[0] == pytest.approx((p.seqlen, low)) and bar[1] == pytest.approx((p.seqlen, high))
                for bar in bars
            )
    assert [axes.get_title() for axes in figure.axes] == ["full", "causal"]
    assert figure.axes[0].get_ylim()[0] == 0
    said = words(figure)
    for part in (
        "Some GPU: bf16, 16,384 tokens, 16 heads, head_dim 128; 2026-01-01",
        "matrix product",
        "16K",
    ):
        assert part in said
    figure = draw_sweep(sweeps[:1])
    figure.savefig(io.BytesIO(), format="png")
    assert len(figure.axes) == 1


# ---------------------------------------------------------------- the command


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``make bench`` with a GPU that only says what it is asked for."""
    log: list[str] = []

    def climb(settings: Settings, infos: list, report: object) -> Ladder:
        log.append(f"ladder {settings.dtype} {settings.heads * settings.head_dim} {settings.seqlens}")
        return Ladder(settings, {"device": "Some GPU", "date": "today"}, [])

    def measure(settings: sweep.SweepSettings, infos: list, peaks: dict, report: Callable) -> sweep.Sweep:
        log.append(f"sweep {settings.dtype} {settings.heads * settings.head_dim} {settings.seqlens}")
        found = a_sweep(settings.head_dim, settings.causal, settings.dtype)
        found = dataclasses.replace(found, settings=settings, left_out=[])
        report(found, 512)
        return found

    monkeypatch.setattr(jit, "cuda_problem", lambda: None)
    monkeypatch.setattr(bench, "climb", climb)
    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep, "matmul_peaks", lambda device: {"bf16": 750.0})
    monkeypatch.setattr(sweep, "build_all", lambda *arguments: 12)
    return log


def test_command(fake_gpu: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--output", str(tmp_path), "--head-dims", "64", "--masks", "full"]
    assert bench.main(common) == 0
    lengths = "(512, 1024, 2048, 4096)", "(512, 1024, 2048, 4096, 8192, 16384)"
    assert fake_gpu == [
        *(f"ladder {dtype} 1024 {lengths[0]}" for dtype in ("bf16", "fp16")),
        *(f"sweep {dtype} 2048 {lengths[1]}" for dtype in ("bf16", "fp16")),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{kind}_some_gpu_{dtype}_d64_full.json" for kind in ("ladder", "sweep") for dtype in ("bf16", "fp16")
    ]
    out = capsys.readouterr().out
    assert re.search(r"^ +512 +FLASH 100 13%.* 10 125 17% \(1.25 ×\)$", out, re.MULTILINE)
    fake_gpu.clear()
    assert bench.main([*common, "--only", "sweep", "--dtypes", "fp16", "--seqlens", "512"]) == 0
    assert fake_gpu == ["sweep fp16 2048 (512,)"]
    fake_gpu.clear()
    assert bench.main([*common, "--only", "ladder", "--dtypes", "fp32", "--seqlens", "64"]) == 0
    assert fake_gpu == ["ladder fp32 1024 (64,)"]
    fake_gpu.clear()
    assert bench.main([*common, "--only", "sweep", "--dtypes", "fp32"]) == 0  # no tensor cores
    assert fake_gpu == []


def test_command_fails_where_a_chapter_does(
    fake_gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "measure", lambda *arguments: a_sweep())
    assert bench.main(["--only", "sweep", "--output", str(tmp_path)]) == 1
    assert "FAILED: 11_warp_roles: dq: error" in capsys.readouterr().out
