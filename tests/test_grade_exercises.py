"""Every exercise: its solution scores full marks, its starter compiles, runs and scores below half."""

from __future__ import annotations

import functools
import subprocess

import pytest
import torch
from helpers import mostly_slow

from common import jit
from common.chapters import list_chapters
from common.formulas import Problem
from common.grade import compiled
from common.grade.answers import grade_answers
from common.grade.exercises import Exercise, Limit, find_exercise, find_it, list_exercises, read_exercise
from common.grade.find import KINDS, grade_answer, plant, read_answer
from common.grade.grading import exercises_for
from common.grade.kernel import cases_of, grade_kernel
from common.grade.results import Item

EXERCISES = {exercise.key: exercise for exercise in list_exercises() if exercise.kind != "find"}
CUDA = [key for key, exercise in EXERCISES.items() if exercise.kind == "cuda"]
SAMPLE = {"00_forward/softcap", "01_naive/derive", "07_causal_skip/window"}
CHAPTERS = [info.name for info in list_chapters() if info.number <= 11]


def sampled(keys: list[str]) -> list:
    return mostly_slow(keys, lambda key: key in SAMPLE)


def graded(exercise: Exercise, text: str, seed: str, constants: dict[str, int] | None = None) -> Item:
    if exercise.kind == "python":
        return grade_answers(exercise, seed=seed, code=text)
    return grade_kernel(exercise, text, seed=seed, constants=constants)


@pytest.mark.parametrize("key", sampled(list(EXERCISES)))
def test_the_solution_scores_full_marks(key: str) -> None:
    """In the variant of some student, on sizes of some seed."""
    exercise = EXERCISES[key]
    constants = exercise.variant("some seed", "some student")
    item = graded(exercise, exercise.solution(constants), "solution", constants)
    assert item.score == item.max_score == exercise.max_score, str(item)


@pytest.mark.parametrize("key", sampled(list(EXERCISES)))
def test_the_starter_compiles_and_scores_below_half(key: str) -> None:
    exercise = EXERCISES[key]
    item = graded(exercise, exercise.starter(), "starter")
    assert item.score < exercise.max_score / 2, str(item)
    if exercise.kind == "cuda":
        assert item.checks[0].name == "compiles"
        assert item.checks[0].ok
        assert not any("could not be" in check.seen or "no result" in check.seen for check in item.checks), (
            str(item)
        )


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in CUDA if EXERCISES[key].variants])
def test_the_solution_is_right_in_every_variant(key: str) -> None:
    exercise = EXERCISES[key]
    for n in range(max(len(values) for values in exercise.variants.values())):
        constants = {name: values[n % len(values)] for name, values in exercise.variants.items()}
        item = graded(exercise, exercise.solution(constants), f"variant {n}", constants)
        assert item.score == item.max_score, f"{constants}: {item}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_chapter_has_two_exercises_and_one_in_cuda(chapter: str) -> None:
    exercises = [e for e in exercises_for(chapter) if e.kind != "find"]
    assert len(exercises) >= 2
    assert any(e.kind == "cuda" for e in exercises)
    for exercise in exercises:
        assert exercise.title
        assert exercise.goal
        assert 5 <= exercise.minutes <= 180
        assert len(exercise.task) > 100
        assert exercise.max_score == 10
        assert exercise.book


def test_the_books_own_three_are_among_them() -> None:
    assert {"01_naive/derive", "09_tensor_cores/skeleton", "09_tensor_cores/ratio",
            "08_preprocess_delta/no_lse", "08_preprocess_delta/extra_bytes"} <= set(EXERCISES)  # fmt: skip


@pytest.mark.parametrize("key", CUDA)
def test_a_solution_is_no_chapter(key: str) -> None:
    """What an exercise asks for is not in the repository already."""
    exercise = EXERCISES[key]
    lines = {
        line.strip()
        for line in exercise.solution().splitlines()
        if line.strip() and not line.startswith("//")
    }
    for info in list_chapters():
        others = {line.strip() for line in info.kernel.read_text().splitlines()}
        assert lines - others, f"{key} is {info.name}"


@pytest.mark.parametrize("key", CUDA)
def test_sources_are_formatted(key: str) -> None:
    exercise = EXERCISES[key]
    clang_format = [jit.sys.executable, "-c", "import clang_format; clang_format.clang_format()"]
    command = [*clang_format, f"--assume-filename={jit.REPO_ROOT / 'chapters' / 'kernel.cu'}"]
    for text in (exercise.solution(), exercise.starter()):
        formatted = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
        differing = [
            (a, b) for a, b in zip(text.splitlines(), formatted.splitlines(), strict=False) if a != b
        ]
        assert formatted == text, differing[:3]


@functools.cache
def _cases(key: str, seed: str) -> tuple:
    return tuple(cases_of(EXERCISES[key], seed))


@pytest.mark.parametrize("key", CUDA)
def test_hidden_cases_have_what_breaks_kernels(key: str) -> None:
    for seed in ("one", "two"):
        cases = _cases(key, seed)
        assert any(case.seqlen_q > case.seqlen_k for case in cases)
        assert any(case.seqlen_q < case.seqlen_k for case in cases)
        assert all(case.seqlen_q % 16 and case.seqlen_k % 16 for case in cases)
        assert any(case.layout != "dense" for case in cases)
        assert any(case.is_causal for case in cases) or EXERCISES[key].causal == "never"
        assert any(case.batch * case.num_heads > 1 for case in cases)
        assert any(case.softmax_scale is not None for case in cases)
    assert _cases(key, "one") != _cases(key, "two")
    assert _cases(key, "one") == tuple(cases_of(EXERCISES[key], "one"))


def test_variants_differ_from_student_to_student_and_stay() -> None:
    exercise = EXERCISES["02_tiled/alibi"]
    drawn = {tuple(exercise.variant("seed", f"student {i}").items()) for i in range(20)}
    assert len(drawn) == len(exercise.variants["kAlibi"])
    assert exercise.variant("seed", "ada") == exercise.variant("seed", "ada")


def test_a_variant_that_was_changed_back_is_named() -> None:
    exercise = EXERCISES["02_tiled/alibi"]
    item = grade_kernel(exercise, exercise.solution({"kAlibi": 4}), seed="x", constants={"kAlibi": 6})
    assert item.score == 0
    assert "kAlibi is 4 in the file; your variant has 6" in item.checks[0].seen


@pytest.mark.slow
def test_extra_bytes_are_what_the_checker_counts() -> None:
    """The formulas that 08's question is answered with, against the ledger of the solution of no_lse."""
    exercise = find_exercise("08_preprocess_delta/no_lse")
    import tempfile
    from pathlib import Path

    attention = exercise.attention_of({})
    with tempfile.TemporaryDirectory() as folder:
        library = compiled.compile_submission(
            exercise.solution(), exercise.file, Path(folder), exercise.dtype, exercise.head_dim
        )
        cases = [case for case in cases_of(exercise, "ledger") if not case.is_causal]
        layouts = compiled.describe(library, cases, "backward")
        for case, layout in zip(cases, layouts, strict=True):
            x = case.inputs(exercise.head_dim, exercise.dtype)
            saved = attention.saved(x, case.scale(exercise.head_dim), False)
            _, report = compiled.run_case(library, case, x, saved, layout, exercise.info)
            problem = Problem(
                case.batch, case.num_heads, case.seqlen_q, case.seqlen_k, exercise.head_dim, torch.float32
            )
            formulas = exercise.info.formulas("backward")
            assert formulas is not None
            chapter = sum(t.bytes for name, t in formulas.predict(problem).items() if name != "shared")
            expected = sum(
                exercise.limit(Limit("bytes", text, "", ""), problem, {})
                for text in ("B*H*T_q*N_k*d*e", "B*H*N_q*d*e", "B*H*4*N_q")
            )
            assert report.traffic.bytes - chapter == expected


# ---------------------------------------------------------------- break it, then find it


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_planted_fault_is_graded_by_line_and_kind(chapter: str) -> None:
    exercise = find_it(chapter)
    faults = [plant(exercise.info, "seed", f"student {i}") for i in range(12)]
    assert len({(fault.line, fault.kind) for fault in faults}) >= 4
    for fault in faults[:3]:
        assert fault == plant(exercise.info, "seed", f"student {faults.index(fault)}")
        right = grade_answer(exercise, f'line = {fault.line}\nkind = "{fault.kind}"\n', fault)
        assert right.score == right.max_score
        other = next(kind for kind in KINDS.values() if kind != fault.kind)
        wrong = grade_answer(exercise, f'line = {fault.line + 40}\nkind = "{other}"\n', fault)
        assert wrong.score == 0
        near = grade_answer(exercise, f'line = {fault.line + 5}\nkind = "{fault.kind}"\n', fault)
        assert 0 < near.score < near.max_score
        assert all(check.hint and str(fault.line) not in check.hint for check in wrong.failed)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_planted_fault_is_seen_by_the_checker(
    chapter: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The disguised file compiles, and the checker has something to say about it; without a fault it has not."""
    from common.grade.exercises import Exercise as Kind

    info = find_it(chapter).info
    dtype = info.dtypes[0]
    pass_ = "forward" if chapter.startswith("00") else "backward"
    exercise = Kind(chapter, "find_it", find_it(chapter).folder, "cuda", "", "", "easy", 1, (),
                    {**dict.fromkeys(("out", "lse") if pass_ == "forward" else ("dq", "dk", "dv"), 1.0), "compiles": 1.0, "clean": 1.0},
                    pass_=pass_, dtype=dtype, head_dim=16 if dtype == torch.float32 else 64)  # fmt: skip
    for student in ("ada", "bob"):
        fault = plant(info, "check", student)
        item = grade_kernel(exercise, fault.text, seed="find it", constants={}, examine=False)
        checks = {check.name: check for check in item.checks}
        assert checks["compiles"].ok, str(item)
        assert not checks["clean"].ok, f"{fault.kind} at {fault.line}: {item}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "line is None"), ("line = 0\nkind = 'barrier'", "line is 0"), ("line = true\nkind = 'barrier'", "line is True"),
        ("line = 3\nkind = 'x'", "kind is 'x'; expected one of barrier"), ("line = ", "Invalid value|line"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_answer(text)


# ---------------------------------------------------------------- descriptions


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('difficulty = "nice"', "difficulty is 'nice'; accepted: easy, medium, hard"),
        ('causal = "maybe"', "causal is 'maybe'"),
        ("[points]\ndx = 3", "points: .*dx"),
        ("[points]\ncompiles = -1", "points: .*-1"),
        ('[[ledger]]\nquantity = "bytes"', "at_most"),
    ],
)
def test_an_exercise_that_cannot_be_read_is_named(line: str, named: str, tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    folder = tmp_path / "02_tiled" / "mine"
    folder.mkdir(parents=True)
    base = 'title = "t"\ngoal = "g"\nminutes = 5\n'
    if "difficulty" not in line:
        base += 'difficulty = "easy"\n'
    (folder / "exercise.toml").write_text(base + line + "\n")
    with pytest.raises(ValueError, match=named):
        read_exercise(folder / "exercise.toml")


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no exercises for '55'; there are some for 00_forward"):
        list_exercises("55")
    with pytest.raises(ValueError, match=r"has no exercise 'x'; it has alibi, no_o_tile, find_it"):
        find_exercise("02_tiled/x")
    with pytest.raises(ValueError, match=r"there is no exercise 'x'"):
        exercises_for("02", "x")
