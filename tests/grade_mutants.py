"""Known-wrong kernels for the grader, made by rules from the solutions of the exercises.

A rule changes the text of a solution where it applies, and says which checks must then cost points, which must
not, and what must be said. ``test_grade_mutants.py`` grades them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.grade.exercises import RESULTS, Exercise, list_exercises
from common.mutation import changes


@dataclass(frozen=True)
class Rule:
    """change: text → changed text, the same if the rule does not apply.

    lost: checks that must cost points; "results" stands for all. kept: checks that must not. said: a regular
    expression that what was seen must match.
    """

    name: str
    change: Callable[[str], str]
    lost: tuple[str, ...]
    kept: tuple[str, ...] = ()
    said: str = ""
    pass_: str = "backward"


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel for one exercise."""

    exercise: Exercise
    rule: Rule
    text: str

    @property
    def name(self) -> str:
        return f"{self.exercise.chapter[:2]}-{self.exercise.name}-{self.rule.name.replace(' ', '_')}"

    @property
    def lost(self) -> set[str]:
        """Checks that must cost points."""
        return {
            c
            for name in self.rule.lost
            for c in (RESULTS[self.exercise.pass_] if name == "results" else (name,))
        }


def _sub(*pairs: tuple[str, str], count: int = 0) -> Callable[[str], str]:
    """The first of the (pattern, replacement) that matches anywhere."""

    def change(text: str) -> str:
        for pattern, replacement in pairs:
            changed = re.sub(pattern, replacement, text, count=count)
            if changed != text:
                return changed
        return text

    return change


def _by_rule(rule: str, which: int = 0) -> Callable[[str], str]:
    """A change of ``common.mutation``: of all places that its rule applies to, one."""

    def change(text: str) -> str:
        start_of_pass = max(text.find("-- backward\n"), 0)  # of a file that has a forward pass, too
        places = [found for found in changes(text) if found[0] == rule and found[1] >= start_of_pass]
        if not places:
            return text
        _, start, end, replacement = places[which % len(places)]
        return text[:start] + replacement + text[end:]

    return change


def _delta_of_a_tile(text: str) -> str:
    """The second text's mistake: D summed over the columns of one tile instead of over the row."""
    loop = """
    float tile_delta = 0.0f;
    for (int c = 0; c < kBlockN; ++c) {
      float sc = 0.0f, dc = 0.0f;
      for (int x = 0; x < kHeadDim; ++x) {
        sc += smem.sQ[row][x] * smem.sK[c][x];
        dc += smem.sdO[row][x] * smem.sV[c][x];
      }
      if (m_start + row < params.seqlen_q && n_start + c < params.num_visible_keys(m_start + row)) {
        tile_delta += expf(params.softmax_scale * sc - smem.lse[row]) * dc;
      }
    }
"""
    if "dp - smem.delta[row]" not in text:
        return text
    text = text.replace("dp - smem.delta[row]", "dp - tile_delta")
    return text.replace("    // 3. dP = dO Vᵀ\n", loop + "    // 3. dP = dO Vᵀ\n", 1)


_ZEROS = """
  const size_t q_bytes = sizeof(Element) * params.batch * params.num_heads * params.seqlen_q * kHeadDim;
  const size_t k_bytes = sizeof(Element) * params.batch * params.num_heads * params.seqlen_k * kHeadDim;
  cudaMemsetAsync(params.dq, 0, q_bytes, stream);
  cudaMemsetAsync(params.dk, 0, k_bytes, stream);
  return cudaMemsetAsync(params.dv, 0, k_bytes, stream);
"""


def _all_zero(text: str) -> str:
    return re.sub(r"(cudaError_t launch_backward\([^{]*\{\n)", rf"\1{_ZEROS}", text)


RULES = [
    Rule("missing scale on dk", _sub(
        (r"(acc_dk, )(?:block\.)?params\.softmax_scale", r"\g<1>1.0f"),
        (r"dk_scale\[2\] = \{[^}]*\}", "dk_scale[2] = {1.0f, 1.0f}"),
        (r"(<true>, k_grid, sizes, ds, q, )scale", r"\g<1>1.0f"),
        (r"(smem\.sdS, smem\.sQ, )params\.softmax_scale", r"\g<1>1.0f"),
    ), ("dk",), ("dq", "dv"), "dk .* times what it should be, which is 1 / softmax_scale"),
    Rule("missing scale on dq", _sub(
        (r"(acc_dq, )params\.softmax_scale", r"\g<1>1.0f"),
        (r"from_float<Element>\(params\.softmax_scale \* ", "from_float<Element>("),
        (r"(<false>, q_grid, sizes, ds, k, )scale", r"\g<1>1.0f"),
        (r"params\.softmax_scale \* ([xy])(?=[,)])", r"\1"),
        (r"(?:params\.softmax_scale|\bscale) \* (sum\[t\])", r"\1"),
    ), ("dq",), ("dk", "dv"), "dq .* times what it should be, which is 1 / softmax_scale"),
    Rule("scale twice on dq", _sub(
        (r"(acc_dq, )params\.softmax_scale", r"\g<1>params.softmax_scale * params.softmax_scale"),
        (r"from_float<Element>\(params\.softmax_scale \* ", "from_float<Element>(params.softmax_scale * params.softmax_scale * "),
    ), ("dq",), ("dk", "dv"), "dq .* times what it should be, which is softmax_scale"),
    Rule("lost barrier", _by_rule("barrier", 1), ("clean",), (), "racecheck: .* no barrier between"),
    Rule("another lost barrier", _by_rule("barrier", 2), ("clean",), (), "racecheck: .* no barrier between"),
    Rule("lost wait", _by_rule("wait"), ("clean",), (), "racecheck: .* may be under way"),
    Rule("inverted causal corner", _sub(
        (r"(?<=< )params\.num_visible_keys\(m_start \+ row\)",
         "(params.is_causal ? params.seqlen_k - params.num_visible_keys(m_start + row) : params.seqlen_k)"),
        (r"key - query > last_visible", "key - query < last_visible"),
        (r"(?<=< )sizes\.num_visible_keys\(row\)", "(sizes.is_causal ? sizes.seqlen_k - sizes.num_visible_keys(row) : sizes.seqlen_k)"),
    ), ("dv",), (), "causal"),
    Rule("causal mask aligned at the top", _sub(
        (r"(?<=< )params\.num_visible_keys\(m_start \+ row\)",
         "(params.is_causal ? min(m_start + row + 1, params.seqlen_k) : params.seqlen_k)"),
        (r"(?<=< )sizes\.num_visible_keys\(row\)", "(sizes.is_causal ? min(row + 1, sizes.seqlen_k) : sizes.seqlen_k)"),
        (r"(last = is_causal \? int64_t\(first_query\)) \+ params\.seqlen_k - params\.seqlen_q", r"\1"),
    ), ("dv",), (), "causal"),
    Rule("causal mask off by one", _sub(
        (r"(?<=< )params\.num_visible_keys\(m_start \+ row\)", "params.num_visible_keys(m_start + row + 1)"),
        (r"key - query > last_visible", "key - query > last_visible + 1"),
    ), ("dv",), (), "causal"),
    Rule("delta per tile", _delta_of_a_tile, ("dq", "dk"), ("dv",)),
    Rule("delta missing", _sub(
        (r"dp - smem\.delta\[row\]", "dp"), (r"(\(dp\[start \+ col\]) - delta\)", r"\1)"),
        (r"(acc_dp\[j\]\[e \+ i\]) - delta", r"\1"), (r"= x\.x;", "= 0.0f;"),
    ), ("dq", "dk"), ("dv",)),
    Rule("delta of half a row", _sub((r"(for \(int x = lane; x < kHeadDim)(?=[ ;])", r"\1 / 2")), ("dq", "dk"), ("dv",)),
    Rule("tail rows written", _sub(
        (r"(store_tile<kBlockN, kNumThreads>\(dk, [^;]*?params\.seqlen_k)\);", r"\1 + kBlockN);"),
        (r"key >= params\.seqlen_k \|\| col", "col"),
        (r"(const int64_t num_elements = int64_t\(num_rows\) \* kHeadDim);", r"\1 + kHeadDim;"),
        (r"(acc_dk, dk_scale, n_start \+ warp_row,\s*params\.seqlen_k)", r"\1 + 64"),
    ), ("clean",), (), "memcheck: .* out of bounds"),
    Rule("dout off by a row", _sub(
        (r"(?<=smem\.sdO, )head\.dout, ", "head.dout + params.dout_strides.row, "),
        (r"(copy_tile<kBlockM>\(smem\.sdO\[stage\], )dout", r"\1dout + params.dout_strides.row"),
        (r"\{smem\.sdO\[i % kStages\], dout,", "{smem.sdO[i % kStages], dout + params.dout_strides.row,"),
    ), ("dv", "clean")),
    Rule("unmasked ragged keys", _sub((r"n_start \+ col < params\.num_visible_keys\(m_start \+ row\)", "true")),
         ("out", "lse"), pass_="forward"),
    Rule("rescaling forgotten", _sub((r"acc_o\[j\] \*= smem\.rescale[^;]*;", ";")), ("out",), ("lse",), pass_="forward"),
    Rule("sum not divided by", _sub((r"acc_o\[j\] / smem\.row_sum\[row\]", "acc_o[j]")), ("out",), ("lse",), pass_="forward"),
    Rule("lse without its maximum", _sub((r"finite_max\(row_max\) \+ logf", "logf")), ("lse",), ("out",), pass_="forward"),
    Rule("accumulator not zeroed", _by_rule("zeroing"), ("clean",), (), "initcheck"),
    Rule("last row not written", _by_rule("last row"), ("clean",), (), "never written|NaN"),
    Rule("shared array too short", _by_rule("shared array", -1), ("clean",), (), "memcheck|racecheck|initcheck"),
    Rule("all zero", _all_zero, ("results", "clean"), ("compiles",), "no kernel reads q, k, v, dout"),
    Rule("zero by a kernel", _sub((r"(acc_dv, )1\.0f", r"\g<1>0.0f"), (r"dv_scale\[2\] = \{1\.0f, 1\.0f\}", "dv_scale[2] = {}"),
                                  (r"(<true>, k_grid, sizes, p, dout, )1\.0f", r"\g<1>0.0f")), ("dv",), ("dq", "dk"), "dv is zero everywhere"),
    Rule("NaN", _sub((r"(?<== visible \? )(expf|exp2f|fast_exp2)\(", r"NAN * \1("), (r"(?<=hidden \? 0\.0f : )fast_exp2\(", "NAN * fast_exp2("),
                     (r"visible \? expf\(s\[", "visible ? NAN * expf(s["), (r"(x\[half\]\[e\] =\s+)fast_exp2\(", r"\1NAN * fast_exp2(")),
         ("results",), (), "are NaN"),
    Rule("PyTorch instead of CUDA", lambda text: "#include <ATen/ATen.h>\n" + text, ("compiles", "results"), (), "includes ATen/ATen.h"),
    Rule("does not compile", _sub((r"constexpr int kBlockN = [^;]*;", "constexpr int kBlockN = ;"), (r"constexpr int kNumThreads = 128;", "constexpr int kNumThreads = ;")),
         ("compiles", "results"), (), "error"),
    Rule("dV from dS", _sub((r"(acc_dv, )smem\.sP", r"\1smem.sdS"), (r"(acc_dv, &smem\.)sP", r"\1sdS"), (r"(acc_dv, )p(?=, smem\.sdO\[stage\])", r"\1ds"),
                            (r"(<true>, k_grid, sizes, )p(?=, dout)", r"\1ds")), ("dv",), ("dq", "dk")),
    Rule("dS without P", _sub((r"\bp \* \(dp - ", "(dp - "), (r"p\[i\] \* \(acc_dp", "(acc_dp"), (r"p\[start \+ col\] \* \(dp\[start", "(dp[start"),
                              (r"x\[i\] \* acc_dp", "acc_dp")), ("dq", "dk"), ("dv",)),
    Rule("another base", _sub((r"expf\(s - ", "exp2f(s - "), (r"fast_exp2\(\(s - lse\) \* kLog2e\)", "fast_exp2(s - lse)"), (r"expf\(s\[", "exp2f(s["),
                              (r"exp2f\(s \* kLog2e - ", "exp2f(s - ")), ("dv",)),
    Rule("V is K", _sub((r"head\.v, params\.v_strides", "head.k, params.k_strides"), (r"(copy_tile<kBlockN>\(smem\.sV, )v, params\.v", r"\1k, params.k"),
                        (r"(nn_grid, sizes, dout, )v", r"\1k")), ("dq", "dk"), (), "no kernel reads v|off by"),
    Rule("strides of q ignored", _sub((r"(head\.q, )params\.q_strides\.row", r"\1kHeadDim"), (r"(smem\.sQ\[stage\], q, )params\.q_strides\.row", r"\1kHeadDim"),
                                      (r"(smem\.sQ\[i % kStagesQ\], q, )params\.q_strides\.row", r"\1kHeadDim"),
                                      (r"Matrix q\{params\.q, params\.q_strides\}", "Matrix q{params.q, {params.q_strides.batch, params.q_strides.head, kHeadDim}}")),
         ("dk",), (), "strided|gaps"),
    Rule("only the first head", _sub((r"params\.k_strides\.offset\(batch, head\)", "params.k_strides.offset(batch, 0)")), ("results",)),
    Rule("addition is not atomic", _sub((r"atomicAdd\((dq [^;]*?), (sum|acc_dq\[j\]\[e\])\);", r"*(\1) += \2;")), ("clean",), (), "racecheck"),
]  # fmt: skip


def mutants() -> Iterator[Mutant]:
    """Every rule on every other chapter: of its exercises in turn, the first to which the rule applies.

    A rule that fits few chapters is tried on each.
    """
    for number, group in enumerate(_cuda_exercises().values()):
        for turn, rule in enumerate(RULES):
            if (number + turn) % 2 and rule.pass_ == "backward" and rule.name not in _RARE:
                continue
            ordered = group[turn % len(group) :] + group[: turn % len(group)]
            for exercise in ordered:
                text = exercise.solution()
                fits = rule.pass_ == exercise.pass_ or rule.name == "PyTorch instead of CUDA"
                changed = rule.change(text) if fits else text
                if changed != text:
                    yield Mutant(exercise, rule, changed)
                    break


_RARE = ("delta per tile", "lost wait", "addition is not atomic")


def _cuda_exercises() -> dict[str, list[Exercise]]:
    groups: dict[str, list[Exercise]] = {}
    for exercise in list_exercises():
        if exercise.kind == "cuda":
            groups.setdefault(exercise.chapter, []).append(exercise)
    return groups


def score_table(rows: list[tuple[str, str, float, float, str]]) -> str:
    """(exercise, rule, score, of, what cost points) of each mutant → a table."""
    lines = [f"{'exercise':<34}{'what is wrong with it':<32}{'score':>6}  lost in"]
    lines += [
        f"{exercise:<34}{rule:<32}{score:>6.2f}  {lost}" for exercise, rule, score, _, lost in sorted(rows)
    ]
    return "\n".join([*lines, f"{len(rows)} known-wrong kernels"])
