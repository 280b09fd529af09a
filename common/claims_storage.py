"""The claims about what is stored and what is recomputed: chapters 00, 01 and 02.

The functions without a leading underscore are used by the notebooks too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from common import experiments
from common.chapters import Chapter, load_chapter
from common.check import remembered_check
from common.claims import CONDITION, FAILS, HOLDS, WAITS, Verdict, claim
from common.formulas import Problem
from common.inputs import Inputs, random_inputs
from common.measurements import load_ladders
from common.reference import Comparison, Gradients, compare, reference_gradients
from common.report import Report

_SMALL = Problem(1, 1, 70, 70, 64, torch.float32)  # two tiles of 32 and a bit
_SHARED_PASS = 128  # bytes that the 32 banks of shared memory deliver at once
Exact = list[list[Fraction]]  # a matrix


@dataclass(frozen=True)
class DataSheet:
    """What NVIDIA says of a card. Rates are per second; tensor_flops: dense fp16; exps: MUFU.EX2 results."""

    name: str
    bandwidth: float
    tensor_flops: float
    exps: float


# https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet has half of the FLOP/s with
# sparsity as the dense rate. An SM makes 16 exponentials a clock (CUDA C++ Programming Guide, throughput of
# native arithmetic instructions); the clocks are what the tensor FLOP/s imply, at 4096 FLOP a clock and SM.
H100_SXM = DataSheet("H100 SXM", 3.35e12, 989e12, 16 * 132 * 1.83e9)
H100_PCIE = DataSheet("H100 PCIe", 2.0e12, 756e12, 16 * 114 * 1.62e9)


# ---------------------------------------------------------------- exact algebra


def exact_matrix(rows: int, cols: int, seed: int) -> Exact:
    """Small random whole numbers, as fractions."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-9, 10, (rows, cols), generator=generator).tolist()
    return [[Fraction(x) for x in row] for row in drawn]


def exact_probabilities(rows: int, cols: int, seed: int) -> Exact:
    """Rows of positive fractions that add up to exactly 1."""
    weights = [[abs(x) + 1 for x in row] for row in exact_matrix(rows, cols, seed)]
    return [[w / sum(row) for w in row] for row in weights]


def transposed(a: Exact) -> Exact:
    """Aᵀ."""
    return [list(column) for column in zip(*a, strict=True)]


def product(a: Exact, b: Exact) -> Exact:
    """A B."""
    return [[sum(x * y for x, y in zip(row, col, strict=True)) for col in transposed(b)] for row in a]


def scaled(factor: Fraction, a: Exact) -> Exact:
    """Factor · A."""
    return [[factor * x for x in row] for row in a]


def rowsum_of_product(a: Exact, b: Exact) -> list[Fraction]:
    """rowsum(A ∘ B)."""
    return [sum(x * y for x, y in zip(*rows, strict=True)) for rows in zip(a, b, strict=True)]


def ds_of(p: Exact, dp: Exact) -> Exact:
    """DS = P ∘ (dP − delta), with delta = rowsum(P ∘ dP)."""
    delta = rowsum_of_product(p, dp)
    return [
        [x * (y - d) for x, y in zip(p_row, dp_row, strict=True)]
        for p_row, dp_row, d in zip(p, dp, delta, strict=True)
    ]


def jacobian_of_softmax(p: Sequence[Fraction]) -> Exact:
    """J[i][j] = ∂p_i/∂s_j = p_i (δ_ij − p_j), for one row."""
    return [[p_i * ((i == j) - p_j) for j, p_j in enumerate(p)] for i, p_i in enumerate(p)]


# ---------------------------------------------------------------- experiments in floating point


def off_centre_inputs(mean: float, dtype: torch.dtype, seqlen: int = 70) -> Inputs:
    """One head whose values have this mean and whose keys have mean 1, as trained layers have means.

    A mean of V does not change dS: it cancels in dP − delta, exactly, if delta is exact.
    """
    x = random_inputs(1, 1, seqlen, 64, dtype=dtype)
    return Inputs(x.q, x.k + 1.0, x.v + mean, x.dout)


def gradient_comparisons(chapter: Chapter | str | int, x: Inputs) -> dict[str, Comparison]:
    """dq, dk and dv of one chapter on the CPU device, compared with float64."""
    loaded = chapter if isinstance(chapter, Chapter) else load_chapter(chapter)
    out, lse = loaded.forward(x.q, x.k, x.v)
    grads = loaded.backward(x.q, x.k, x.v, out, x.dout, lse)
    found = compare(Gradients(out, lse, *grads), x.q, x.k, x.v, x.dout)
    return {c.name: c for c in found if c.name in ("dq", "dk", "dv")}


def tile_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, row_max: Tensor, row_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What the second text's tile function adds to dQ, dK and dV: delta from this tile's columns alone."""
    p = torch.exp(scale * q @ k.T - row_max[:, None]) / row_sum[:, None]
    dp = dout @ v.T
    delta = (p * dp).sum(1, keepdim=True)
    ds = scale * p * (dp - delta)
    return ds @ k, ds.T @ q, p.T @ dout


def gradients_by_tiles(
    tile: Callable[..., tuple[Tensor, Tensor, Tensor]], x: Inputs, keys: int
) -> dict[str, float]:
    """Errors of dq, dk and dv in float64, when ``tile`` is called for every ``keys`` keys of one head."""
    q, k, v, dout = (t[0, 0].double() for t in (x.q, x.k, x.v, x.dout))
    scale = q.shape[1] ** -0.5
    s = scale * q @ k.T
    row_max = s.amax(1)
    row_sum = torch.exp(s - row_max[:, None]).sum(1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, len(k), keys):
        part = slice(start, start + keys)
        parts = tile(q, k[part], v[part], dout, row_max, row_sum, scale)
        dq += parts[0]
        dk[part] += parts[1]
        dv[part] += parts[2]
    truth = reference_gradients(x.q, x.k, x.v, x.dout)
    return {
        name: ((value - getattr(truth, name)[0, 0]).norm() / getattr(truth, name).norm()).item()
        for name, value in (("dq", dq), ("dk", dk), ("dv", dv))
    }


@dataclass(frozen=True)
class SavedTensors:
    """Bytes that autograd keeps for the backward pass of one Transformer block, without its weights."""

    matrices: int  # P, of size heads · N²
    other: int

    @property
    def share(self) -> float:
        """Of P."""
        return self.matrices / (self.matrices + self.other)


def saved_tensors(seqlen: int, num_heads: int = 32, head_dim: int = 64) -> SavedTensors:
    """Of unfused attention and an MLP of four times the width, on the meta device, which allocates nothing.

    bf16, batch 1, pre-norm, no mask, no dropout.
    """
    width = num_heads * head_dim
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t
        return t

    with torch.device("meta"):
        norms = [nn.LayerNorm(width, dtype=torch.bfloat16) for _ in range(2)]
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        qkv, project, up, down = (nn.Linear(*size, dtype=torch.bfloat16) for size in sizes)
        x = torch.empty(1, seqlen, width, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            q, k, v = (
                t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in qkv(norms[0](x)).chunk(3, -1)
            )
            p = (q @ k.transpose(-1, -2) * head_dim**-0.5).softmax(-1)
            y = x + project((p @ v).transpose(1, 2).flatten(2))
            y = y + down(nn.functional.gelu(up(norms[1](y))))
    weights = {w.untyped_storage()._cdata for m in (*norms, qkv, project, up, down) for w in m.parameters()}
    held = {key: t for key, t in kept.items() if key not in weights}
    matrices = sum(t.untyped_storage().nbytes() for t in held.values() if t.shape[-2:] == (seqlen, seqlen))
    return SavedTensors(matrices, sum(t.untyped_storage().nbytes() for t in held.values()) - matrices)


# ---------------------------------------------------------------- checked runs


def _checked(chapter: str, problem: Problem = _SMALL) -> Report:
    """Several claims look at the same run; a kernel that was edited since runs again."""
    return remembered_check(chapter, problem)[0]


# ---------------------------------------------------------------- 00


@claim(
    10,
    "Storing LSE costs 16 KB per head at N = 4096, which is negligible; m and l together cost 256 KB at "
    "N = 32768",
    source="§16.4, second text",
    chapters=("00_forward",),
)
def check_size_of_statistics() -> Verdict:
    """Bytes that chapter 00 writes, by its formulas."""
    formulas = load_chapter("00_forward").info.formulas("forward")
    assert formulas is not None

    def written(seqlen: int) -> dict[str, int]:
        problem = Problem(1, 1, seqlen, seqlen, 64, torch.float16, return_row_stats=True)
        return {name: t.written for name, t in formulas.predict(problem).items()}

    lse, out = written(4096)["lse"], written(4096)["out"]
    both = written(32768)["row_max"] + written(32768)["row_sum"]
    right = lse == 16 * 1024 and both == 256 * 1024
    return Verdict(
        HOLDS if right else FAILS,
        f"Chapter 00 writes {lse:,} bytes of lse at N = 4096, 1/{out // lse} of O in fp16 at d = 64, and "
        f"{both:,} bytes of m and l at N = 32768; KB here is 1024 bytes.",
    )


def forward_traffic_of_o(num_m_blocks: int, num_n_blocks: int, outer: str) -> tuple[int, int]:
    """(reads, writes) of O, in units of all of O, when a tile of O leaves the chip whenever another comes in.

    outer: "q" (FlashAttention-2, algorithm 1) or "k" (FlashAttention, algorithm 1).
    """
    rows, cols = range(num_m_blocks), range(num_n_blocks)
    steps = [(m, n) for m in rows for n in cols] if outer == "q" else [(m, n) for n in cols for m in rows]
    reads = writes = 0
    on_chip: int | None = None
    begun: set[int] = set()
    for m, _ in steps:
        if m != on_chip:
            writes += on_chip is not None
            reads += m in begun
            on_chip = m
            begun.add(m)
    writes += 1
    return reads // num_m_blocks, writes // num_m_blocks


@claim(
    20,
    "The forward pass of FA2 has the queries in its outer loop; that of FA1 had the keys there",
    source="§16.2",
    chapters=("00_forward",),
)
def check_forward_order() -> Verdict:
    """What each order writes: chapter 00 counted, the other order by walking its loop."""
    t = _checked("00_forward").traffic.tensors["out"]
    p = _SMALL
    once = p.batch * p.num_heads * p.seqlen_q * p.head_dim * p.dtype.itemsize
    blocks = -(-p.seqlen_q // 32)
    outer_q, outer_k = (forward_traffic_of_o(blocks, blocks, outer) for outer in ("q", "k"))
    right = (t.read, t.written) == (outer_q[0] * once, outer_q[1] * once) == (0, once)
    return Verdict(
        HOLDS if right else FAILS,
        f"So say the algorithms 1 of both papers. Outer Q, counted in chapter 00 at N = {p.seqlen_q}: O is "
        f"{'written once and never read' if right else 'moved otherwise'}. Outer K, by walking its loop: O "
        f"is written {outer_k[1]} times, after each of {blocks} K blocks, and read {outer_k[0]} times, and "
        "m and l with it.",
    )


# ---------------------------------------------------------------- 01


@claim(
    2,
    "From the Jacobian ∂p_i/∂s_j = p_i (δ_ij − p_j) it follows that dS = P ∘ (dP − D)",
    source="§16.1, exercise 1",
    chapters=("01_naive",),
)
def check_ds() -> Verdict:
    """The Jacobian by symbols, the formula in fractions, both against autograd."""
    s = sympy.symbols("s0:3")
    p = [sympy.exp(x) / sum(sympy.exp(y) for y in s) for x in s]
    jacobian = all(
        sympy.simplify(sympy.diff(p[i], s[j]) - p[i] * (int(i == j) - p[j])) == 0
        for i in range(3)
        for j in range(3)
    )
    rows, cols = 4, 6
    exact_p, exact_dp = exact_probabilities(rows, cols, 0), exact_matrix(rows, cols, 1)
    by_jacobian = [
        product([dp_row], jacobian_of_softmax(p_row))[0]
        for p_row, dp_row in zip(exact_p, exact_dp, strict=True)
    ]
    formula = ds_of(exact_p, exact_dp) == by_jacobian
    scores, dp = random_inputs(1, 1, rows, cols).q[0, 0].double(), torch.tensor(exact_dp, dtype=torch.float64)
    p_matrix = torch.softmax(scores, 1)
    (truth,) = torch.autograd.functional.vjp(lambda x: torch.softmax(x, 1), scores, dp)[1:]
    ds = torch.tensor(
        [[float(x) for x in row] for row in ds_of(_as_fractions(p_matrix), exact_dp)], dtype=torch.float64
    )
    autograd = torch.allclose(ds, truth, rtol=0, atol=1e-12)
    return Verdict(
        HOLDS if jacobian and formula and autograd else FAILS,
        "The Jacobian by symbolic differentiation; dS by multiplying with all of it, equal to the formula in "
        f"exact fractions ({rows} × {cols}); autograd in float64 agrees to 1e-12.",
    )


def _as_fractions(t: Tensor) -> Exact:
    return [[Fraction(x) for x in row] for row in t.tolist()]


@claim(
    11,
    "At N = 32768, P has over 1.07 billion elements: 2.14 GB per head in fp16, about 70 GB for 32 heads",
    source="second text",
    chapters=("01_naive",),
)
def check_size_of_p() -> Verdict:
    """Arithmetic, and what chapter 01 asks for."""
    seqlen, heads = 32768, 32
    elements = seqlen**2
    head, layer = 2 * elements, 2 * elements * heads
    scratch = load_chapter("01_naive").workspace(
        batch=1, num_heads=1, seqlen_q=seqlen, head_dim=64, dtype=torch.float16
    )
    right = elements > 1.07e9 and abs(head / 2.14e9 - 1) < 0.01 and abs(layer / 70e9 - 1) < 0.05
    return Verdict(
        HOLDS if right else FAILS,
        f"{elements:,} elements; {head / 1e9:.2f} GB per head; {layer / 1e9:.1f} GB for {heads} heads "
        f"({layer / 2**30:.0f} GiB). Chapter 01, with {len(scratch.parts)} such matrices in fp32, asks for "
        f"{scratch.bytes / 1e9:.1f} GB per head.",
    )


def saved_ratio(seqlen: int, *, statistics: int, heads_of_p: int = 1) -> Fraction:
    """Bytes of P in fp16 of ``heads_of_p`` heads over those of ``statistics`` fp32 numbers per row of one."""
    return Fraction(2 * seqlen**2 * heads_of_p, 4 * seqlen * statistics)


@claim(
    12,
    "Against P's tens of GB, the 256 KB of m and l are tens of thousands of times less",
    source="second text",
    chapters=("01_naive",),
)
def check_saved_ratio() -> Verdict:
    """Head for head, and as the text sets them side by side."""
    both = saved_ratio(32768, statistics=2)
    one = saved_ratio(32768, statistics=1)
    unequal = saved_ratio(32768, statistics=2, heads_of_p=32)
    in_the_tens_of_thousands = 10_000 <= both < 100_000
    return Verdict(
        HOLDS if in_the_tens_of_thousands else FAILS,
        f"Head for head the ratio is N/4 = {int(both):,}: thousands. 256 KB are one head's statistics, the "
        f"tens of GB are 32 heads' P; side by side they give {int(unequal):,}. With lse alone, as the book "
        f"stores it, it is N/2 = {int(one):,}, perhaps the number meant.",
    )


@claim(
    30,
    "When training on long sequences runs out of memory, the cause is almost only what forward saves for "
    "backward, above all P",
    source="second text",
    chapters=("01_naive",),
)
def check_share_of_saved() -> Verdict:
    """P's share of what autograd keeps for a Transformer block, by sequence length."""
    seqlens = (512, 1024, 4096, 32768)
    shares = {n: saved_tensors(n).share for n in seqlens}
    listed = ", ".join(f"{100 * share:.0f} % at N = {n}" for n, share in shares.items())
    grows = list(shares.values()) == sorted(shares.values())
    verdict = CONDITION if grows and shares[32768] > 0.9 else FAILS
    stored = experiments.load("memory")
    measured = ""
    if stored is not None:
        saved = stored["saved"]
        measured = (
            f"H200, SDPA MATH in bf16, N = {saved['seqlen']}: {saved['saved_bytes'] / 1e9:.2f} GB are saved "
            f"between the passes, {100 * saved['saved_bytes'] / saved['peak_bytes']:.0f} % of the peak of "
            f"{saved['peak_bytes'] / 1e9:.2f} GB. The rest is dP, dS and other temporaries of the pass, as "
            "large as P: one layer's at a time, while each layer saves a P of its own."
        )
    return Verdict(
        verdict,
        "Checked is P's share of what is saved; weights, the optimizer's state and temporaries are not in "
        f"it. Of what autograd keeps for one bf16 Transformer block of 32 heads and d = 64, P is {listed}. "
        "It passes one half at N = 16 d; below that the MLP and the projections keep more.",
        condition="N is long: many times 16 d" if verdict == CONDITION else "",
        measured=measured,
    )


# ---------------------------------------------------------------- 02


def delta_error_ratios(means: Sequence[float], dtype: torch.dtype) -> list[float]:
    """Error of dq in chapter 02, which takes delta from O, over that in 01, which takes it from P."""
    inputs = [off_centre_inputs(mean, dtype) for mean in means]
    chapters = ("02_tiled", "01_naive")
    pairs = [[gradient_comparisons(chapter, x)["dq"].error for chapter in chapters] for x in inputs]
    return [from_o / from_p for from_o, from_p in pairs]


def exact_deltas() -> tuple[list[Fraction], list[Fraction]]:
    """rowsum(P ∘ dP) and rowsum(O ∘ dO), of the same matrices, in fractions."""
    p, v, dout = exact_probabilities(4, 6, 0), exact_matrix(6, 3, 1), exact_matrix(4, 3, 2)
    dp = product(dout, transposed(v))
    return rowsum_of_product(p, dp), rowsum_of_product(product(p, v), dout)


@claim(
    1,
    "D = rowsum(P ∘ dP) and D = rowsum(O ∘ dO) are identical, without any factor",
    source="§16.1, exercise 1",
    chapters=("02_tiled",),
)
def check_two_deltas() -> Verdict:
    """In fractions, and what rounding O does to the second."""
    from_p, from_o = exact_deltas()
    if from_p != from_o:
        return Verdict(FAILS, "They differ in exact fractions.")
    ratios = {d: delta_error_ratios((4.0,), d)[0] for d in (torch.float32, torch.float16, torch.bfloat16)}
    costs = min(ratios[torch.float16], ratios[torch.bfloat16]) > 5 and ratios[torch.float32] < 2
    return Verdict(
        CONDITION if costs else HOLDS,
        "Equal in exact fractions. On the machine O is rounded to its dtype before delta is taken from it: "
        "with values of mean 4 and keys of mean 1, dq of chapter 02 (from O) "
        + (
            "is more than 5 times as far off as dq of 01 (from P) in fp16 and bf16; in fp32 it loses nothing."
            if costs
            else "is not much farther off than dq of 01 (from P)."
        ),
        condition="O is not rounded, or rounded to fp32" if costs else "",
        measured="Error of dq in 02 over 01, mean 4: "
        + ", ".join(f"{str(d).removeprefix('torch.')} {r:.1f} ×" for d, r in ratios.items()),
    )


def contributing_blocks(num_m_blocks: int, num_n_blocks: int, outer: str) -> dict[str, int]:
    """How many blocks of threads add to one tile of dq, and of dk and dv, when a block owns a Q or K tile."""
    owners: dict[tuple[str, int], set[int]] = {}
    for m in range(num_m_blocks):
        for n in range(num_n_blocks):
            block = m if outer == "q" else n
            owners.setdefault(("dq", m), set()).add(block)
            owners.setdefault(("dk, dv", n), set()).add(block)
    return {name: max(len(who) for (of, _), who in owners.items() if of == name) for name in ("dq", "dk, dv")}


@claim(
    3,
    "With Q in the outer loop, dV and dK need atomics or several launches; with K there, only dQ does",
    source="§16.2",
    chapters=("02_tiled",),
)
def check_who_needs_atomics() -> Verdict:
    """Who adds to what: counted by walking the loops, by atomics, and by races without them."""
    p = _SMALL
    blocks = -(-p.seqlen_q // 32)
    outer_q, outer_k = (contributing_blocks(blocks, blocks, outer) for outer in ("q", "k"))
    two_launches, one_launch = _checked("02_tiled"), _checked("04_atomic_dq")
    atomics = {name: t.atomics for name, t in one_launch.traffic.tensors.items() if t.atomics}
    none = not any(t.atomics for t in two_launches.traffic.tensors.values())
    clean = not two_launches.findings and not one_launch.findings
    sides = outer_q == {"dq": 1, "dk, dv": blocks} and outer_k == {"dq": blocks, "dk, dv": 1}
    right = sides and clean and none and list(atomics) == ["dq"] and len(two_launches.traffic.kernels) == 2
    return Verdict(
        HOLDS if right else FAILS,
        f"At N = {p.seqlen_q} ({blocks} tiles each way) outer Q has {outer_q['dk, dv']} blocks adding to "
        f"each tile of dK and dV and {outer_q['dq']} to each of dQ; outer K the other way round. "
        f"Chapter 02 is the several launches: {len(two_launches.traffic.kernels)} kernels, "
        f"{'no' if none else 'some'} atomics, no race. Chapter 04 has one outer-K kernel: "
        f"{sum(atomics.values()):,} atomics, all on {', '.join(atomics)}.",
    )


@claim(
    15,
    "Backward keeps Q, K, V, O, dO and LSE in shared memory and the accumulators of dK and dV in registers",
    source="§16.5, §16.7",
    chapters=("02_tiled", "09_tensor_cores"),
)
def check_shared_layout() -> Verdict:
    """The bytes of the tiles of chapters 02 and 09 against what they ask for."""
    d = _SMALL.head_dim
    scalar = {"Q, O, dO": 3 * 32 * (d + 1) * 4, "K, V": 2 * 32 * (d + 1) * 4, "P, dS": 2 * 32 * 33 * 4,
              "LSE, delta": 2 * 32 * 4}  # fmt: skip
    tensor = {"Q, dO": 2 * 64 * (d + 8) * 2, "K, V": 2 * 64 * (d + 8) * 2, "P, dS": 2 * 64 * (64 + 8) * 2,
              "LSE, delta": 2 * 64 * 4}  # fmt: skip
    on_tensor_cores = _checked("09_tensor_cores", replace(_SMALL, dtype=torch.bfloat16))
    asked = _checked("02_tiled").launches[0].shared_bytes
    later = max(launch.shared_bytes for launch in on_tensor_cores.launches)
    if sum(scalar.values()) != asked or sum(tensor.values()) != later:
        return Verdict(FAILS, f"02 asks for {asked:,} bytes, 09 for {later:,}; tiles: {scalar}, {tensor}.")
    in_02, in_09 = (
        ", ".join(f"{name} {size:,}" for name, size in parts.items()) for parts in (scalar, tensor)
    )
    o_in_main_loop = any(
        r.memory == "out" and r.kernel == "backward_kernel" for r in on_tensor_cores.traffic.requests
    )
    evidence = (
        f"Chapter 02 has the list: {in_02} bytes make up its {asked:,} (fp32 tiles, d = {d}). Chapter 09, on "
        f"tensor cores, 16-bit tiles of 64 × 64: {in_09} make up its {later:,}. There O "
        f"{'is read' if o_in_main_loop else 'is not'} in the main loop, since delta is computed before it. P "
        "and dS are missing from the list: they lie in shared memory, too, because dV and dK need them "
        f"transposed and from all warps. Accumulators of dK and dV in registers: {2 * 32 * d // 128} per "
        f"thread in 02, {2 * 64 * d // 128} in 09 (128 threads). In 10, P stays in registers. In the kernel "
        "that FA2 launches O never enters, and LSE and delta go from global memory to registers."
    )
    if o_in_main_loop:
        return Verdict(FAILS, evidence)
    return Verdict(
        CONDITION,
        evidence,
        "delta is computed in the main loop, as in 02, and P and dS are added to the list",
    )


def move_seconds(card: DataSheet, seqlen: int) -> float:
    """To write P of one head in fp16 to global memory and read it back."""
    return 4 * seqlen**2 / card.bandwidth


def recompute_seconds(card: DataSheet, seqlen: int, head_dim: int) -> float:
    """To recompute P of one head: Q Kᵀ at the tensor peak, then the exponentials, not overlapped."""
    return 2 * seqlen**2 * head_dim / card.tensor_flops + seqlen**2 / card.exps


@claim(
    16,
    "An H100 has less than 3 TB/s; recomputing Q Kᵀ and exp takes less than a few microseconds, moving P "
    "tens of them",
    source="second text",
    chapters=("02_tiled",),
)
def check_move_or_recompute() -> Verdict:
    """Data sheets and arithmetic; the text gives neither N nor the card."""
    below = [card.name for card in (H100_SXM, H100_PCIE) if card.bandwidth < 3e12]
    times = {
        (card.name, n): (
            move_seconds(card, n),
            recompute_seconds(card, n, 64),
            recompute_seconds(card, n, 128),
        )
        for card, n in ((H100_SXM, 4096), (H100_PCIE, 4096), (H100_SXM, 32768))
    }
    short, on_pcie = (times[card.name, 4096] for card in (H100_SXM, H100_PCIE))
    plausible = min(short[0], on_pcie[0]) > 1e-5 and max(*short[1:], on_pcie[1]) < 1e-5
    rows = "; ".join(
        f"{name}, N = {n}: moving P takes {1e6 * move:,.1f} µs, recomputing it {1e6 * small:,.1f} µs (d = "
        f"64) or {1e6 * large:,.1f} µs (d = 128)"
        for (name, n), (move, small, large) in times.items()
    )
    return Verdict(
        CONDITION if plausible else FAILS,
        f"The SXM card has {H100_SXM.bandwidth / 1e12:.3g} TB/s, the PCIe card "
        f"{H100_PCIE.bandwidth / 1e12:.3g}: below 3 is {' and '.join(below)}. One head, fp16, data-sheet "
        f"rates: {rows}. The times grow with N²; their ratio, {short[0] / short[1]:.1f} or "
        f"{short[0] / short[2]:.1f} on the SXM card, does not.",
        condition=f"one head of N ≈ 4096 is meant, 'a few' is up to about ten, and the card is the "
        f"{' or '.join(below)}, as to the bandwidth"
        if plausible
        else "",
    )


@claim(
    17,
    "Recomputing makes the backward pass 2 to 4 times as fast, and batch and sequence length 5 to 10 times "
    "as large",
    source="second text",
    chapters=("02_tiled",),
)
def check_gains() -> Verdict:
    """Arithmetic, and the stored measurements of memory and time; there is no verdict without them."""
    stored = experiments.load("memory")
    if stored is None:
        return Verdict(WAITS, _predicted_gains(), condition="measured memory on the H200")
    return judge_gains(stored)


def judge_gains(stored: dict[str, Any]) -> Verdict:
    """The verdict on measured memory and times."""
    seconds = {(r["method"], r["seqlen"]): r["seconds"] for r in stored["rows"] if r["seconds"]}
    seqlens = sorted({n for _, n in seconds})

    def span(slow: str, fast: str) -> tuple[float, float]:
        both = [n for n in seqlens if {(slow, n), (fast, n)} <= set(seconds)]
        ratios = [seconds[slow, n] / seconds[fast, n] for n in both]
        return (min(ratios), max(ratios)) if ratios else (0.0, 0.0)

    ours = span(experiments.STORED_P, experiments.RECOMPUTED)
    flash, again = span("SDPA MATH", "SDPA FLASH"), span("SDPA MATH, checkpointed", "SDPA MATH")
    before, after = (stored["limits"][name] for name in (experiments.STORED_P, experiments.RECOMPUTED))
    length = after["largest_seqlen"] / before["largest_seqlen"]
    batch = after["largest_batch_at_4096"] / before["largest_batch_at_4096"]
    right = min(ours[0], flash[0]) >= 2 and min(length, batch) >= 5
    alone = "slower than" if again[0] > 1 else "not always slower than"
    return Verdict(
        CONDITION if right else FAILS,
        f"Kernels that recompute P on chip, tile by tile, take {'' if right else 'not '}at most half of the "
        "time for forward plus backward on the H200, ours and PyTorch's, and batch and length "
        f"can{'' if right else 'not'} be 5 times as large. Recomputing alone is not it: SDPA MATH with "
        f"checkpointing, which makes P twice, is {alone} MATH. Speed levels off with N, memory does not. "
        f"{_predicted_gains()}",
        condition="P is recomputed on chip, tile by tile, and the numbers are read as 'at least'"
        if right
        else "",
        measured=f"Both passes, N = {seqlens[0]} to {seqlens[-1]}, {stored['heads']} heads: 01 takes "
        f"{ours[0]:.1f} to {ours[1]:.1f} times as long as 08; SDPA MATH {flash[0]:.1f} to {flash[1]:.1f} "
        f"times as long as FLASH; checkpointed MATH {again[0]:.1f} to {again[1]:.1f} times as long as MATH. "
        f"From 01 to 08 the longest sequence that fits grows {length:.0f} times, the batch at N = 4096 "
        f"{batch:.0f} times.",
    )


def _predicted_gains() -> str:
    """What formulas say of the batch: bytes of a sequence with and without stored matrices."""
    seqlen, d = 4096, 64
    tensors = 8 * seqlen * d * 2 + 4 * seqlen  # q k v out dout dq dk dv in 16 bits, lse
    one_p, four = tensors + 2 * seqlen**2, tensors + 16 * seqlen**2
    return (
        f"By arithmetic, a head at N = {seqlen}, d = {d}, takes {tensors / 1e6:.1f} MB without stored "
        f"matrices, {one_p / 1e6:.1f} MB with P in 16 bits ({one_p / tensors:.0f} times), and "
        f"{four / 1e6:.0f} MB with chapter 01's four in fp32 ({four / tensors:.0f} times); the factor grows "
        "with N."
    )


@claim(
    18,
    "A function that gets one tile of Q, K, V and dO, with m and l, adds the tile's share of dQ, dK and dV",
    source="second text, its C++ listing",
    chapters=("02_tiled",),
)
def check_tile_function() -> Verdict:
    """The listing's algorithm, with one K tile and with two."""
    x = random_inputs(1, 1, 64, 32)
    one, two = (gradients_by_tiles(tile_gradients, x, keys) for keys in (64, 32))
    exact = max(one.values()) < 1e-12
    if exact and max(two.values()) < 1e-12:
        return Verdict(HOLDS, "Exact with one K tile and with two.")
    wrong = min(two["dq"], two["dk"]) > 0.1 and two["dv"] < 1e-12
    return Verdict(
        CONDITION if exact and wrong else FAILS,
        f"Its delta sums over the tile's columns, not the row's. With one K tile of {len(x.k[0, 0])} keys "
        "dQ, dK and dV agree with float64 autograd; with two, dQ and dK are more than 10 % off and dV, which "
        "has no delta, is right. delta = rowsum(O ∘ dO), passed in like m and l, repairs it.",
        condition="there is one K tile" if exact and wrong else "",
        measured=f"Two tiles: dq {100 * two['dq']:.0f} % off, dk {100 * two['dk']:.0f} %.",
    )


def scale_placements(scale: Fraction = Fraction(1, 8)) -> dict[str, tuple[Exact, Exact]]:
    """(dQ, dK) in fractions, with the scale at the end of dQ and dK, on dS, and nowhere."""
    p, dp = exact_probabilities(4, 6, 0), exact_matrix(4, 6, 1)
    q, k, ds = exact_matrix(4, 3, 2), exact_matrix(6, 3, 3), ds_of(p, dp)
    by_scale = scaled(scale, ds)
    return {
        "on dQ and dK": (scaled(scale, product(ds, k)), scaled(scale, product(transposed(ds), q))),
        "on dS": (product(by_scale, k), product(transposed(by_scale), q)),
        "nowhere": (product(ds, k), product(transposed(ds), q)),
    }


@claim(
    28,
    "The scale is applied nowhere, to dQ by the convert kernel, to dK when it is written, or to dS (the "
    "second text's listing)",
    source="§16.2, §16.3, §16.6, second text",
    chapters=("02_tiled",),
)
def check_scale() -> Verdict:
    """All placements in fractions, and how many multiplications each takes."""
    placed = scale_placements()
    same = placed["on dQ and dK"] == placed["on dS"]
    missing = placed["nowhere"] != placed["on dS"]
    seqlen, d = 4096, 64
    return Verdict(
        CONDITION if same and missing else FAILS,
        "On dQ and dK or on dS: equal in exact fractions. At the end it takes 2 N d multiplications per "
        f"head, {2 * seqlen * d:,} at N = {seqlen} and d = {d}; on dS N² of them, {seqlen**2:,}, "
        f"{seqlen // (2 * d)} times as many. Nowhere is right if S has no scale either, as in §16.1's "
        "formulas and §16.2's loop; with a scale in S, dQ and dK would be 1/scale times too large. §16.6 "
        "asks for it on dK in a comment, but passes none to `write_dK` (claim 26).",
        condition="dQ and dK each have, once, the scale that S has" if same and missing else "",
    )


def intensities(seqlen: int, head_dim: int) -> tuple[float, float]:
    """FLOP per byte of HBM of a backward pass in fp16: with stored P, and with an ideal recomputing kernel.

    Stored: four products, and P, dP and dS as a framework moves them: P read twice, dP and dS written, dP
    read once, dS twice. Recomputed: five products; eight tensors and lse move once.
    """
    tensors = 8 * seqlen * head_dim * 2
    stored = 8 * seqlen**2 * head_dim / (7 * 2 * seqlen**2 + tensors)
    return stored, 10 * seqlen**2 * head_dim / (tensors + 4 * seqlen)


def shared_flops_per_pass(chapter: str, products: int, problem: Problem = _SMALL) -> float:
    """FLOP of the products that a kernel makes for each 128-byte pass over shared memory's banks, counted."""
    requests = _checked(chapter, problem).traffic.requests
    passes = sum(r.transactions for r in requests if r.memory == "shared")
    p = problem
    return 2.0 * products * p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * p.head_dim / passes


@claim(
    29,
    "Not writing and rereading P, at the price of one more matrix product, turns the backward pass from "
    "memory-bound to compute-bound",
    source="second text",
    chapters=("02_tiled",),
)
def check_what_bounds() -> Verdict:
    """FLOP per byte against the card's, and where chapter 02 really stands."""
    ridge = H100_SXM.tensor_flops / H100_SXM.bandwidth
    stored, recomputed = intensities(4096, 64)
    crosses = stored < ridge < recomputed
    per_pass = shared_flops_per_pass("02_tiled", 7, Problem(1, 1, 128, 128, 64, torch.float32))
    limit = 132 * 1.98e9 * per_pass * 5 / 7 / 1e12  # of an H200, in the FLOP that count
    ladder = next(
        (x for x in load_ladders()
         if (x.settings.dtype, x.settings.head_dim, x.settings.causal) == ("bf16", 64, False)), None
    )  # fmt: skip
    rung = ladder.rung("02_tiled", 4096) if ladder is not None else None
    measured = "" if rung is None or rung.tflops is None else (
        f"Chapter 02 on the H200, bf16, N = 4096: {rung.tflops:.1f} TFLOP/s, of at most {limit:.1f} that "
        "shared memory allows (132 SMs, a pass a clock, 1.98 GHz; five of its seven products count)."
    )  # fmt: skip
    return Verdict(
        CONDITION if crosses else FAILS,
        "Four products become five, if one kernel makes all of them; chapter 02 makes seven. At N = 4096, "
        "d = 64, stored P, dP and dS in 16 bits (seven reads and writes of N² numbers, four products) give "
        f"{stored:.0f} FLOP per byte of HBM, recomputing up to {recomputed:,.0f}; an "
        f"H100 SXM needs {ridge:.0f}. So HBM no longer binds. In chapter 02 shared memory does, not "
        f"arithmetic: {per_pass:.0f} FLOP for each pass over its banks.",
        condition="HBM is the only memory that can bind" if crosses else "",
        measured=measured,
    )
