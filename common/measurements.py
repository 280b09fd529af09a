"""The stored GPU measurements, ``notebooks/measurements/*.json``."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from common import jit
from common.ladder import Ladder, Rung, Settings
from common.reference import Comparison
from common.sweep import LeftOut, Point, Sweep, SweepSettings

FOLDER = jit.REPO_ROOT / "notebooks" / "measurements"


def file_name(kind: str, settings: Settings | SweepSettings, machine: dict[str, str]) -> str:
    """Where a "ladder" or a "sweep" is stored: one file for each GPU, dtype, head_dim and mask."""
    device = re.sub(r"\W+", "_", machine["device"].lower())
    mask = "causal" if settings.causal else "full"
    return f"{kind}_{device}_{settings.dtype}_d{settings.head_dim}_{mask}.json"


def is_current(name: str, source: str | None) -> bool:
    """Whether a chapter's sources are still those that were measured; true of what is no chapter."""
    kernel = jit.REPO_ROOT / "chapters" / name / "kernel.cu"
    return source is None or (kernel.is_file() and jit.kernel_digest(kernel) == source)


# ---------------------------------------------------------------------------- ladders


@dataclass
class StoredLadder(Ladder):
    """A ladder as it was measured. Rungs whose sources have changed since are not in it."""

    stale: list[str]  # names of the chapters that were edited since

    def rung(self, name: str, seqlen: int) -> Rung | None:
        """The measurement of a chapter or an SDPA backend, or None."""
        return next((r for r in self.rungs if r.name == name and r.seqlen == seqlen), None)


def load_ladder(path: Path) -> StoredLadder:
    """Reads a stored ladder, without the measurements of kernels that have been edited since."""
    data = json.loads(path.read_text())
    settings = Settings(**(data["settings"] | {"seqlens": tuple(data["settings"]["seqlens"])}))
    rungs, stale = [], []
    current = functools.cache(is_current)  # of this file, as a chapter may be edited before the next
    for entry in data["rungs"]:
        comparisons = [Comparison(**comparison) for comparison in entry["comparisons"]]
        rung = Rung(**(entry | {"comparisons": comparisons}))
        if current(rung.name, rung.source):
            rungs.append(rung)
        else:
            stale.append(rung.name)
    return StoredLadder(settings, data["machine"], rungs, stale=sorted(set(stale)))


def _store(kind: str, measured: Ladder | Sweep, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(kind, measured.settings, measured.machine)
    path.write_text(measured.to_json() + "\n")
    return path


def store_ladder(ladder: Ladder, folder: Path = FOLDER) -> Path:
    """Writes a measured ladder, in place of an earlier one of the same kind. Returns the file."""
    return _store("ladder", ladder, folder)


def load_ladders(folder: Path = FOLDER) -> list[StoredLadder]:
    """All stored ladders."""
    return [load_ladder(path) for path in sorted(folder.glob("ladder_*.json"))]


def find_ladder(dtype: str, head_dim: int, causal: bool) -> StoredLadder | None:
    """The stored ladder of one dtype ("bf16" …), head_dim and mask, or None if it was not measured."""
    for ladder in load_ladders():
        s = ladder.settings
        if (s.dtype, s.head_dim, s.causal) == (dtype, head_dim, causal):
            return ladder
    return None


# ---------------------------------------------------------------------------- sweeps


@dataclass
class StoredSweep(Sweep):
    """A sweep as it was measured. Points whose sources have changed since are not in it."""

    stale: list[str] = field(default_factory=list)  # names of the chapters that were edited since


def load_sweep(path: Path) -> StoredSweep:
    """Reads a stored sweep, without the measurements of kernels that have been edited since."""
    data = json.loads(path.read_text())
    settings = SweepSettings(**(data["settings"] | {"seqlens": tuple(data["settings"]["seqlens"])}))
    points = [Point(**entry) for entry in data["points"]]
    current = functools.cache(is_current)
    return StoredSweep(
        settings,
        data["machine"],
        data["matmul_tflops"],
        data["state"],
        [point for point in points if current(point.name, point.source)],
        [LeftOut(**entry) for entry in data["left_out"]],
        [p for p in (Point(**entry) for entry in data.get("forward", [])) if current(p.name, p.source)],
        stale=sorted({point.name for point in points if not current(point.name, point.source)}),
    )


def store_sweep(sweep: Sweep, folder: Path = FOLDER) -> Path:
    """Writes a measured sweep, in place of an earlier one of the same kind. Returns the file."""
    return _store("sweep", sweep, folder)


def find_sweep(dtype: str, head_dim: int, causal: bool, folder: Path = FOLDER) -> StoredSweep | None:
    """The stored sweep of one dtype ("bf16" …), head_dim and mask, or None if it was not measured."""
    for path in sorted(folder.glob("sweep_*.json")):
        sweep = load_sweep(path)
        s = sweep.settings
        if (s.dtype, s.head_dim, s.causal) == (dtype, head_dim, causal):
            return sweep
    return None
