"""The stored GPU measurements, ``notebooks/measurements/*.json``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from common import jit
from common.ladder import Ladder, Rung, Settings
from common.reference import Comparison

FOLDER = jit.REPO_ROOT / "notebooks" / "measurements"


def file_name(settings: Settings, machine: dict[str, str]) -> str:
    """Where a ladder is stored: one file for each GPU, dtype, head_dim and mask."""
    device = re.sub(r"\W+", "_", machine["device"].lower())
    mask = "causal" if settings.causal else "full"
    return f"ladder_{device}_{settings.dtype}_d{settings.head_dim}_{mask}.json"


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
    for entry in data["rungs"]:
        comparisons = [Comparison(**comparison) for comparison in entry["comparisons"]]
        rung = Rung(**(entry | {"comparisons": comparisons}))
        kernel = jit.REPO_ROOT / "chapters" / rung.name / "kernel.cu"
        if rung.source is None or (kernel.is_file() and jit.kernel_digest(kernel) == rung.source):
            rungs.append(rung)
        else:
            stale.append(rung.name)
    return StoredLadder(settings, data["machine"], rungs, stale=sorted(set(stale)))


def store_ladder(ladder: Ladder, folder: Path = FOLDER) -> Path:
    """Writes a measured ladder, in place of an earlier one of the same kind. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(ladder.settings, ladder.machine)
    path.write_text(ladder.to_json() + "\n")
    return path


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
