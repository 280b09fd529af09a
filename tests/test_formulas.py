"""The formulas of ``chapter.toml`` against what the checker counts: equal, to the byte, at every size."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import sympy
import torch
from helpers import draw, is_quick, mostly_slow, nearest_build

from common import Chapter, load_chapter
from common.chapters import ChapterInfo, list_chapters
from common.check import Report
from common.formulas import Formulas, Problem, number

CHAPTERS = list_chapters()
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# Whole tiles, ragged ones, fewer queries than keys and more, rows that see no key, one row, one key, both
# tile heights. Another dtype or head_dim is another build, which takes longer than the count.
PROBLEMS = [
    Problem(1, 2, 64, 64, 64, F32),
    Problem(2, 1, 45, 70, 64, F32),
    Problem(1, 1, 70, 45, 64, F32, is_causal=True),
    Problem(1, 1, 33, 290, 64, F32, is_causal=True, deterministic=True),
]
MORE_PROBLEMS = [
    Problem(1, 1, 33, 290, 96, F16, is_causal=True, deterministic=True),
    Problem(1, 1, 1, 1, 16, F32),
    Problem(1, 1, 70, 45, 16, BF16, is_causal=True),
    Problem(1, 1, 1, 100, 64, F16, is_causal=True),
    Problem(1, 1, 100, 1, 64, F32, is_causal=True),
    Problem(2, 3, 129, 65, 24, F32, is_causal=True),
    Problem(1, 1, 64, 600, 64, BF16, deterministic=True),
    Problem(1, 1, 17, 95, 80, F32, is_causal=True, deterministic=True),
    Problem(1, 1, 95, 17, 128, BF16),
    Problem(1, 1, 256, 256, 64, F32, is_causal=True),
]


def name_of(problem: Problem) -> str:
    flags = "-causal" * problem.is_causal + "-deterministic" * problem.deterministic
    sizes = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k, problem.head_dim)
    return "x".join(map(str, sizes)) + f"-{problem.dtype}".removeprefix("torch.") + flags


def allowed(chapter: Chapter, problem: Problem) -> Problem:
    """The problem, or the nearest one that the chapter takes."""
    dtype, head_dim = nearest_build(chapter, problem.dtype, problem.head_dim)
    deterministic = problem.deterministic and chapter.info.deterministic != "never"
    return dataclasses.replace(problem, dtype=dtype, head_dim=head_dim, deterministic=deterministic)


def check(chapter: Chapter, problem: Problem, *, forward: bool = False) -> Report:
    """``forward``: that pass, also where the chapter has both."""
    p = problem
    inputs = draw(
        p.batch, p.num_heads, p.seqlen_q, p.seqlen_k, chapter=chapter, head_dim=p.head_dim, dtype=p.dtype
    )
    tensors = (inputs.q, inputs.k, inputs.v)
    if forward or not chapter.has_backward:
        return chapter.check(*tensors, is_causal=p.is_causal, return_row_stats=p.return_row_stats)
    out, lse = chapter.forward(*tensors, is_causal=p.is_causal)
    return chapter.check(
        *tensors, out, inputs.dout, lse, is_causal=p.is_causal, deterministic=p.deterministic
    )


def assert_exact(info: ChapterInfo, problem: Problem, *, forward: bool = False) -> None:
    chapter = load_chapter(info.name)
    problem = allowed(chapter, problem)
    formulas = info.formulas("backward" if chapter.has_backward and not forward else "forward")
    report = check(chapter, problem, forward=forward)
    assert formulas is not None
    assert report.error is None
    assert [str(m) for m in formulas.mismatches(problem, report.traffic)] == []
    assert report.traffic.bytes > 0


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
@pytest.mark.parametrize("info", mostly_slow(CHAPTERS, is_quick), ids=lambda info: info.name)
def test_formulas_equal_the_count(info: ChapterInfo, problem: Problem) -> None:
    assert_exact(info, problem)


@pytest.mark.slow
@pytest.mark.parametrize("problem", MORE_PROBLEMS, ids=name_of)
@pytest.mark.parametrize("info", CHAPTERS, ids=lambda info: info.name)
def test_formulas_equal_the_count_at_more_sizes(info: ChapterInfo, problem: Problem) -> None:
    assert_exact(info, problem)


WITH_FORWARD = [info for info in CHAPTERS if "forward" in info.traffic]
assert WITH_FORWARD
# Tiles of queries that see no key, of both heights, and several tiles of keys.
FORWARD_PROBLEMS = [
    *PROBLEMS,
    Problem(1, 1, 401, 17, 128, BF16, is_causal=True),
    Problem(1, 2, 385, 257, 64, F16, is_causal=True),
]


@pytest.mark.parametrize(
    "problem",
    mostly_slow(FORWARD_PROBLEMS, lambda problem: problem in (PROBLEMS[-1], FORWARD_PROBLEMS[-1])),
    ids=name_of,
)
@pytest.mark.parametrize("info", WITH_FORWARD, ids=lambda info: info.name)
def test_forward_formulas_equal_the_count(info: ChapterInfo, problem: Problem) -> None:
    assert_exact(info, problem, forward=True)


@pytest.mark.parametrize("info", WITH_FORWARD, ids=lambda info: info.name)
def test_row_statistics_are_in_the_formulas(info: ChapterInfo) -> None:
    assert_exact(info, Problem(1, 2, 45, 70, 64, F32, return_row_stats=True), forward=True)


@pytest.mark.parametrize(
    "info", mostly_slow(CHAPTERS, lambda info: info.number in (2, 8)), ids=lambda info: info.name
)
def test_a_wrong_formula_is_noticed(info: ChapterInfo) -> None:
    """Each formula in turn is made a little wrong."""
    chapter = load_chapter(info.name)
    pass_ = "backward" if chapter.has_backward else "forward"
    problem = allowed(chapter, Problem(1, 1, 45, 70, 64, F32, return_row_stats=pass_ == "forward"))
    traffic = check(chapter, problem).traffic
    original = info.formulas(pass_)
    assert original is not None
    assert not original.mismatches(problem, traffic)
    for memory, operation in original.text:
        data = copy.deepcopy(dict(info.traffic))
        if memory == "barriers":
            data[pass_][memory] += " + 1"
        else:
            data[pass_][memory][operation] += " + 4"
        found = Formulas(data, pass_).mismatches(problem, traffic)
        assert [m.memory for m in found] == [memory]
        if memory != "barriers":
            del data[pass_][memory][operation]  # what has no formula is held against 0
            found = Formulas(data, pass_).mismatches(problem, traffic)
            assert [(m.memory, m.operation) for m in found] == [(memory, operation)]


def test_visible_elements() -> None:
    """V against the mask itself."""
    formulas = Formulas({"backward": {"q": {"read": "V"}}}, "backward")
    for n_q, n_k in [(1, 1), (5, 5), (5, 9), (9, 5), (1, 7), (7, 1)]:
        visible = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q).sum().item()
        problem = Problem(1, 1, n_q, n_k, 16, F32, is_causal=True)
        assert formulas.evaluate(problem) == {("q", "read"): visible}
        assert formulas.evaluate(dataclasses.replace(problem, is_causal=False)) == {("q", "read"): n_q * n_k}


def test_the_book_count_of_additions() -> None:
    """N²·d / kBlockN element additions per head, from chapter 05 on."""
    info = next(info for info in CHAPTERS if info.name.startswith("05_"))
    formulas = info.formulas("backward")
    assert formulas is not None
    problem = Problem(1, 1, 4096, 4096, 64, BF16)
    assert formulas.evaluate(problem)["dq_accum", "atomics"] == 4096**2 * 64 // 32


@pytest.mark.parametrize("info", CHAPTERS, ids=lambda info: info.name)
def test_formulas_read_as_mathematics(info: ChapterInfo) -> None:
    for pass_ in ("forward", "backward"):
        if (formulas := info.formulas(pass_)) is not None:
            text = formulas.latex()
            assert text.count("\n|") == len(formulas.text) + 1  # and the line under the head
            assert "N_{q}" in text
            assert all(len(row.split("|")) == 5 for row in text.splitlines() if row.startswith("|"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"q": {"read": "B*H*)"}}, "not a formula"),
        ({"q": {"read": "B*banana"}}, "banana, which nothing defines"),
        ({"q": {"red": "B"}}, "traffic.backward.q.red: expected read, written"),
    ],
)
def test_a_formula_that_cannot_be_read_is_named(data: dict[str, dict[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Formulas({"backward": data}, "backward").expressions  # noqa: B018


def test_a_symbol_without_a_value_is_named() -> None:
    formulas = Formulas({"backward": {"q": {"read": "T_q*B"}}}, "backward")
    with pytest.raises(ValueError, match="uses B_r, which nothing defines"):
        formulas.evaluate(Problem(1, 1, 8, 8, 16, F32))


def test_sympy_names_are_not_taken_for_constants() -> None:
    """I, E, N, S and others mean something to sympy."""
    formulas = Formulas({"where": {"S": "d", "E": "2"}, "backward": {"q": {"read": "S*E"}}}, "backward")
    assert formulas.evaluate(Problem(1, 1, 8, 8, 16, F32)) == {("q", "read"): 32}
    assert isinstance(formulas.expressions["q", "read"], sympy.Mul)


def test_a_number_is_what_the_formulas_give() -> None:
    """The fast way against the exact one, over every formula of every chapter."""
    problems = [
        Problem(2, 3, 77, 70, 16, torch.float32),
        Problem(1, 1, 1, 333, 128, torch.bfloat16, is_causal=True),
        Problem(1, 2, 70, 77, 24, torch.float16, is_causal=True, deterministic=True),
    ]
    for info in list_chapters():
        for pass_ in ("forward", "backward"):
            formulas = info.formulas(pass_)
            if formulas is None:
                continue
            for problem in problems:
                values = {str(symbol): value for symbol, value in problem.values().items()}
                exact = formulas.exactly(problem)
                assert formulas.evaluate(problem) == exact, info.name
                for key, value in exact.items():
                    assert number(formulas.text[key], values, info.traffic.get("where", {})) == value, (
                        info.name,
                        key,
                    )
    huge = Formulas({"backward": {"q": {"read": "H**20/3 + 1"}}}, "backward")
    assert huge.evaluate(Problem(1, 9, 8, 8, 16, F32)) == {("q", "read"): 9**20 // 3 + 1}
    assert number("Sum(Max(0, i - a), (i, 0, 3)) + Piecewise((1, a > 2), (5, True))", {"a": 2}, {}) == 6
    with pytest.raises(ValueError, match="uses nope, which nothing defines"):
        number("nope + 1", {}, {})
    with pytest.raises(ValueError, match="not a formula"):
        number("1 +", {}, {})
