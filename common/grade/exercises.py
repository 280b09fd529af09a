"""Finding exercises: a folder ``NN_name/exercise`` with an ``exercise.toml``; nothing lists them.

Beside it lie ``task.md`` and the solution: for CUDA ``changes.txt``, which are changes to the chapter's
kernel, or a whole ``kernel.cu``; for Python ``answer.py``. ``find_it`` needs no folder: every chapter has it.
In a release the folder holds the starter instead, under the student's name for it.
"""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from common import jit
from common.chapters import ChapterInfo, list_chapters
from common.formulas import Problem, number
from common.grade.attention import Attention
from common.grade.markers import apply_changes, strip_solutions, without_markers
from common.traffic import SHARED

FOLDER = jit.REPO_ROOT / "notebooks" / "exercises"
KINDS = ("cuda", "python", "find")
DIFFICULTIES = ("easy", "medium", "hard")
FIND_IT = "find_it"
RESULTS = {"backward": ("dq", "dk", "dv"), "forward": ("out", "lse")}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_POINTS = {
    "cuda": {"compiles": 1.0, "correct": 6.0, "clean": 2.0, "ledger": 1.0},
    "python": {"answers": 10.0},
    "find": {"kind": 3.0, "line": 7.0},
}


@dataclass(frozen=True)
class Limit:
    """What a kernel may ask memory for at most.

    quantity: ``tensor.read``, ``.written``, ``.atomics`` or ``.bytes``, of a tensor or of "shared"; "atomics"
    or "bytes" of all tensors; "scratch", bytes of scratch memory; "barriers". at_most: a formula. says: the
    limit in words. hint: toward the idea.
    """

    quantity: str
    at_most: str
    says: str
    hint: str


@dataclass(frozen=True)
class Exercise:
    """What ``exercise.toml`` says; points are by kind of check.

    functions: of a Python exercise, those that the student writes. local: whether a student can check them.
    """

    chapter: str
    name: str
    folder: Path
    kind: str
    title: str
    goal: str
    difficulty: str
    minutes: int
    book: tuple[str, ...]
    points: Mapping[str, float]
    pass_: str = "backward"
    dtype: torch.dtype = torch.float32
    head_dim: int = 24
    causal: str = "both"
    deterministic: str = "never"
    attention: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    ledger: tuple[Limit, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    local: bool = True

    @property
    def key(self) -> str:
        """``NN_name/exercise``."""
        return f"{self.chapter}/{self.name}"

    @property
    def file(self) -> str:
        """The file, or of a Python exercise the notebook, that a student edits."""
        return {"cuda": f"{self.name}.cu", "find": f"{self.name}.toml"}.get(
            self.kind, f"{self.chapter}.ipynb"
        )

    @property
    def max_score(self) -> float:
        """All points."""
        return sum(self.points.values())

    @property
    def task(self) -> str:
        """The task in Markdown."""
        return (self.folder / "task.md").read_text()

    @cached_property
    def info(self) -> ChapterInfo:
        """The chapter."""
        return next(info for info in list_chapters() if info.name == self.chapter)

    # ------------------------------------------------------------ sources

    @property
    def marked_source(self) -> str:
        """The solution with its markers."""
        if self.kind == "python":
            return (self.folder / "answer.py").read_text()
        whole = self.folder / "kernel.cu"
        if whole.is_file():
            return whole.read_text()
        changes = self.folder / "changes.txt"
        text = apply_changes(self.info.kernel.read_text(), changes.read_text(), str(changes))
        first = f"// Exercise {self.key}: {self.title}. The task is in the notebook.\n//\n"
        return first + text

    @property
    def suffix(self) -> str:
        """Of the source: which markers it has."""
        return ".py" if self.kind == "python" else ".cu"

    def solution(self, constants: Mapping[str, int] | None = None) -> str:
        """The solution without markers, of a variant."""
        return self._of_variant(without_markers(self.marked_source, self.suffix, self.key), constants)

    def starter(self, constants: Mapping[str, int] | None = None) -> str:
        """What a student gets, of a variant."""
        return self._of_variant(strip_solutions(self.marked_source, self.suffix, self.key), constants)

    def _of_variant(self, text: str, constants: Mapping[str, int] | None) -> str:
        for name, value in (constants or {}).items():
            text, count = re.subn(
                rf"^(constexpr \w+ {name} = )[^;]+;", rf"\g<1>{value};", text, flags=re.MULTILINE
            )
            if count != 1:
                raise ValueError(f"{self.key}: `constexpr … {name} = …;` is there {count} times, not once")
        return text

    # ------------------------------------------------------------ variants

    def variant(self, seed: str, student: str) -> dict[str, int]:
        """The constants of one student; the first of each if there is no student."""
        if not student:
            return {name: values[0] for name, values in self.variants.items()}
        rng = random.Random(hashlib.sha256(f"{seed}/{student}/{self.key}".encode()).hexdigest())
        return {name: rng.choice(values) for name, values in self.variants.items()}

    def attention_of(self, constants: Mapping[str, int]) -> Attention:
        """What is to be computed."""
        return Attention.read(self.attention, constants)

    def limit(self, limit: Limit, problem: Problem, constants: Mapping[str, int]) -> int:
        """The number that a formula of the ledger gives.

        It is written in the symbols of the chapter's own formulas, the constants of the variant, and
        ``chapter``: what the chapter itself asks for. Raises ValueError for a formula that cannot be read.
        """
        where = {**self.info.traffic.get("where", {}), **self.where}
        values = {str(symbol): value for symbol, value in problem.values().items()} | dict(constants)
        if "chapter" in limit.at_most:
            values["chapter"] = self._of_chapter(limit.quantity, problem)
        return number(limit.at_most, values, where)

    def _of_chapter(self, quantity: str, problem: Problem) -> int:
        traffic = self.info.traffic
        if self.pass_ not in traffic:
            raise ValueError(f"{self.chapter} has no formulas of its {self.pass_} pass")
        texts = traffic[self.pass_]
        name, _, operation = quantity.rpartition(".")
        if quantity == "barriers":
            wanted = [texts["barriers"]]
        elif quantity == "bytes":
            tensors = [of for tensor, of in texts.items() if tensor not in ("barriers", SHARED)]
            wanted = [text for of in tensors for what, text in of.items() if what != "atomics"]
        elif operation in texts.get(name, {}):
            wanted = [texts[name][operation]]
        else:
            raise ValueError(f"{self.key}: the chapter has no formula for {quantity}")
        values = {str(symbol): value for symbol, value in problem.values().items()}
        return sum(number(text, values, traffic.get("where", {})) for text in wanted)


def _points(kind: str, data: Mapping[str, Any], pass_: str) -> dict[str, float]:
    """Points by check: those of "correct" are split among the results."""
    points = dict(data) if kind == "python" and data else {**_POINTS[kind], **data}
    if kind == "cuda":
        share = points.pop("correct") / len(RESULTS[pass_])
        points = {**dict.fromkeys(RESULTS[pass_], share), **points}
    unknown = set(points) - {"compiles", "clean", "ledger", *RESULTS[pass_]} if kind == "cuda" else set()
    if unknown or any(not isinstance(x, (int, float)) or x < 0 for x in points.values()):
        raise ValueError(f"points: {points}; expected numbers for {', '.join(_POINTS[kind])}")
    return points


def read_exercise(path: Path) -> Exercise:
    """Reads one ``exercise.toml``. Raises ValueError, naming file and entry."""
    try:
        data = tomllib.loads(path.read_text())
        kind, pass_ = data.get("kind", "cuda"), data.get("pass", "backward")
        for name, value, accepted in (
            ("kind", kind, KINDS),
            ("pass", pass_, tuple(RESULTS)),
            ("difficulty", data["difficulty"], DIFFICULTIES),
            ("causal", data.get("causal", "both"), ("both", "always", "never")),
            ("deterministic", data.get("deterministic", "never"), ("never", "once", "always")),
        ):
            if value not in accepted:
                raise ValueError(f"{name} is {value!r}; accepted: {', '.join(accepted)}")
        return Exercise(
            chapter=path.parent.parent.name,
            name=path.parent.name,
            folder=path.parent,
            kind=kind,
            title=data["title"],
            goal=data["goal"],
            difficulty=data["difficulty"],
            minutes=int(data["minutes"]),
            book=tuple(data.get("book", ())),
            points=_points(kind, data.get("points", {}), pass_),
            pass_=pass_,
            dtype=_DTYPES[data.get("dtype", "float32")],
            head_dim=data.get("head_dim", 24),
            causal=data.get("causal", "both"),
            deterministic=data.get("deterministic", "never"),
            attention=data.get("attention", {}),
            variants={name: tuple(values) for name, values in data.get("variants", {}).items()},
            where=data.get("where", {}),
            ledger=tuple(Limit(**limit) for limit in data.get("ledger", ())),
            hints=data.get("hints", {}),
            functions=tuple(data.get("functions", ())),
            local=data.get("local", True),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def find_it(chapter: str, folder: Path = FOLDER) -> Exercise:
    """The chapter with one planted fault."""
    return Exercise(
        chapter=chapter,
        name=FIND_IT,
        folder=folder / FIND_IT,
        kind="find",
        title="Break it, then find it",
        goal="Read the checker's findings, and name the line that causes them",
        difficulty="medium" if int(chapter[:2]) < 9 else "hard",
        minutes=20 if int(chapter[:2]) < 9 else 40,
        book=(),
        points=dict(_POINTS["find"]),
    )


def list_exercises(chapter: str | None = None, folders: Sequence[Path] = (FOLDER,)) -> list[Exercise]:
    """All exercises, or those of one chapter ("02", "2" or "02_tiled"), in order.

    folders: of two exercises of the same name the one in the later folder is taken: an instructor's own.
    Raises ValueError for a chapter that has none.
    """
    found: dict[str, Exercise] = {}
    for folder in folders:
        for path in sorted(folder.glob("[0-9][0-9]_*/*/exercise.toml")):
            exercise = read_exercise(path)
            found[exercise.key] = exercise
    with_task = next((folder for folder in folders if (folder / FIND_IT / "task.md").is_file()), FOLDER)
    with_exercises = {exercise.chapter for exercise in found.values()}
    for info in (info for info in list_chapters() if info.name in with_exercises):
        found.setdefault(f"{info.name}/{FIND_IT}", find_it(info.name, with_task))
    ordered = [found[key] for key in sorted(found, key=lambda key: (key.split("/")[0], FIND_IT in key, key))]
    if chapter is None:
        return ordered
    wanted = [e for e in ordered if chapter in (e.chapter, e.chapter[:2], str(int(e.chapter[:2])))]
    if not wanted:
        raise ValueError(
            f"no exercises for {chapter!r}; there are some for "
            f"{', '.join(dict.fromkeys(e.chapter for e in ordered))}"
        )
    return wanted


def find_exercise(key: str, folders: Sequence[Path] = (FOLDER,)) -> Exercise:
    """The exercise ``NN_name/exercise``. Raises ValueError, naming those of the chapter."""
    chapter, _, name = key.partition("/")
    candidates = list_exercises(chapter, folders)
    for exercise in candidates:
        if exercise.name == name:
            return exercise
    raise ValueError(f"{chapter} has no exercise {name!r}; it has {', '.join(e.name for e in candidates)}")
