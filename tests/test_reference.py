"""The reference and the budget: what every other test trusts.

The reference is checked against attention written as loops over exact fractions and over floats, against
finite differences, and against the full Jacobian of the softmax. The budget is checked by handing it wrong
results: each planted fault must be over it, or a pass of the kernels would mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction

import pytest
import torch
from helpers import BF16, FP16, FP32
from torch import Tensor

from common import compare, reference
from common.inputs import Inputs, random_inputs
from common.reference import Gradients, explicit_gradients, reference_gradients, visible_mask

CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
NAMES = [field.name for field in fields(Gradients)]


# ---------------------------------------------------------------- attention written as loops


def exact_exp(x: Fraction) -> Fraction:
    """e^x by its series, far beyond double precision."""
    halvings = 0
    while abs(x) > 1:
        x /= 2
        halvings += 1
    term = total = Fraction(1)
    for n in range(1, 28):
        term = term * x / n
        total += term
    for _ in range(halvings):
        total = (total * total).limit_denominator(10**40)
    return total


def loop_attention(
    q: list, k: list, v: list, dout: list, scale: Fraction, is_causal: bool
) -> dict[str, list[list[Fraction]] | list[float]]:
    """One head, row by row, in exact fractions but for exp: no matrix, no mask, no library."""
    num_q, num_k, width = len(q), len(k), len(q[0])
    out = [[Fraction(0)] * width for _ in range(num_q)]
    dq = [[Fraction(0)] * width for _ in range(num_q)]
    dk = [[Fraction(0)] * width for _ in range(num_k)]
    dv = [[Fraction(0)] * width for _ in range(num_k)]
    lse = []
    for i in range(num_q):
        # Bottom-right: the last query sees the last key, each query before it one key less.
        last_key = num_k - 1 - (num_q - 1 - i) if is_causal else num_k - 1
        keys = range(last_key + 1)
        if not keys:
            lse.append(-math.inf)
            continue
        weights = {j: exact_exp(scale * sum(q[i][x] * k[j][x] for x in range(width))) for j in keys}
        total = sum(weights.values())
        lse.append(math.log(total))
        p = {j: weights[j] / total for j in keys}
        for j in keys:
            for x in range(width):
                out[i][x] += p[j] * v[j][x]
        for j in keys:
            # dO_i/dS_ij = p_j (v_j − O_i), straight from differentiating the quotient.
            ds = sum(dout[i][x] * p[j] * (v[j][x] - out[i][x]) for x in range(width))
            for x in range(width):
                dv[j][x] += p[j] * dout[i][x]
                dq[i][x] += scale * ds * k[j][x]
                dk[j][x] += scale * ds * q[i][x]
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@CAUSAL
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 3), (2, 5), (5, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(-5, 4)], ids=str)
def test_reference_equals_loops_over_fractions(
    seqlen_q: int, seqlen_k: int, is_causal: bool, scale: Fraction
) -> None:
    """B55, B08, B09: every result, both masks, Nq ≠ Nk, to the last digits of float64."""
    generator = torch.Generator().manual_seed(seqlen_q * 8 + seqlen_k)

    def draw(rows: int) -> Tensor:
        return torch.randint(-16, 17, (1, 1, rows, 2), generator=generator).double() / 8

    q, k, v, dout = draw(seqlen_q), draw(seqlen_k), draw(seqlen_k), draw(seqlen_q) + 0.25
    result = reference_gradients(q, k, v, dout, softmax_scale=float(scale), is_causal=is_causal)
    rows = ([[Fraction(x) for x in row] for row in t[0, 0].tolist()] for t in (q, k, v, dout))
    expected = loop_attention(*rows, scale, is_causal)
    for name in NAMES:
        values = expected[name]
        exact = torch.tensor(
            values if name == "lse" else [[float(x) for x in row] for row in values], dtype=torch.float64
        )
        torch.testing.assert_close(getattr(result, name)[0, 0], exact, rtol=1e-13, atol=1e-14)


@CAUSAL
def test_each_head_is_on_its_own(is_causal: bool) -> None:
    """Batch and heads do not mix: a head alone equals its slice."""
    inputs = random_inputs(2, 3, 5, 16, seqlen_k=7)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    whole = reference_gradients(*tensors, is_causal=is_causal)
    alone = reference_gradients(*(t[1:, 2:] for t in tensors), is_causal=is_causal)
    for name in NAMES:
        torch.testing.assert_close(getattr(whole, name)[1:, 2:], getattr(alone, name), rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------- derivatives


@CAUSAL
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 4), (3, 5), (5, 3)])
def test_reference_equals_finite_differences(seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    """Every element of dQ, dK and dV: central differences of <O, dO> in float64."""
    inputs = random_inputs(1, 1, seqlen_q, 16, seqlen_k=seqlen_k)
    tensors = {"dq": inputs.q.double(), "dk": inputs.k.double(), "dv": inputs.v.double()}
    dout = inputs.dout.double()

    def loss() -> float:
        out = explicit_gradients(*tensors.values(), dout, softmax_scale=0.4, is_causal=is_causal).out
        return (out * dout).sum().item()

    result = reference_gradients(*tensors.values(), dout, softmax_scale=0.4, is_causal=is_causal)
    step = 1e-5
    for name, tensor in tensors.items():
        slope = torch.zeros_like(tensor)
        flat, flat_slope = tensor.view(-1), slope.view(-1)
        for i in range(flat.numel()):
            value = flat[i].item()
            flat[i] = value + step
            above = loss()
            flat[i] = value - step
            below = loss()
            flat[i] = value
            flat_slope[i] = (above - below) / (2 * step)
        torch.testing.assert_close(getattr(result, name), slope, rtol=1e-7, atol=1e-9)


@CAUSAL
def test_reference_equals_the_softmax_jacobian(is_causal: bool) -> None:
    """dS = dP · J with the full Jacobian J = diag(p) − p pᵀ of each row, and the three products around it."""
    inputs = random_inputs(1, 2, 6, 16, seqlen_k=9)
    q, k, v, dout = (t.double() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    scale = 0.3
    result = reference_gradients(q, k, v, dout, softmax_scale=scale, is_causal=is_causal)
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~visible_mask(6, 9, is_causal), -torch.inf)
    p = scores.exp() / scores.exp().sum(-1, keepdim=True)
    jacobian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    ds = torch.einsum("bhij,bhijk->bhik", dout @ v.transpose(-1, -2), jacobian)
    expected = {
        "out": p @ v,
        "lse": scores.exp().sum(-1).log(),
        "dq": scale * ds @ k,
        "dk": scale * ds.transpose(-1, -2) @ q,
        "dv": p.transpose(-1, -2) @ dout,
    }
    for name in NAMES:
        torch.testing.assert_close(getattr(result, name), expected[name], rtol=1e-11, atol=1e-13)


# ---------------------------------------------------------------- masks


def test_masks_are_aligned_bottom_right() -> None:
    """B08: written out by hand; True means that the query sees the key."""
    expected = {
        (2, 5): ["####.", "#####"],
        (5, 2): ["..", "..", "..", "#.", "##"],
        (1, 4): ["####"],
        (3, 3): ["#..", "##.", "###"],
    }
    for (seqlen_q, seqlen_k), rows in expected.items():
        mask = visible_mask(seqlen_q, seqlen_k, True)
        assert ["".join("#" if seen else "." for seen in row) for row in mask.tolist()] == rows
        assert visible_mask(seqlen_q, seqlen_k, False).all()


def test_reference_does_not_look_ahead() -> None:
    """B55: earlier rows keep every bit when the last token changes; no gradient flows to later tokens."""
    inputs = random_inputs(1, 2, 9, 16)
    changed = [t.clone() for t in (inputs.q, inputs.k, inputs.v)]
    for tensor in changed:
        tensor[:, :, -1] += 3
    dout = inputs.dout.clone()
    dout[:, :, -1] = 0
    before = reference_gradients(inputs.q, inputs.k, inputs.v, dout, is_causal=True)
    after = reference_gradients(*changed, dout, is_causal=True)
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(before, name)[:, :, :-1], getattr(after, name)[:, :, :-1]), name
    assert torch.all(before.dk[:, :, -1] == 0)
    assert torch.all(before.dv[:, :, -1] == 0)


def test_rows_without_keys_are_zero_in_the_reference() -> None:
    """B09: rows 0 to 2 of a 5 × 2 causal problem see nothing."""
    inputs = random_inputs(1, 1, 5, 16, seqlen_k=2)
    result = reference_gradients(inputs.q, inputs.k, inputs.v, inputs.dout, is_causal=True)
    assert torch.all(result.out[:, :, :3] == 0)
    assert torch.all(result.lse[:, :, :3] == -torch.inf)
    assert torch.all(result.dq[:, :, :3] == 0)
    assert result.out.isfinite().all()
    assert result.dk.isfinite().all()


def test_reference_uses_the_rounded_inputs() -> None:
    """float64 on the inputs as their dtype holds them, not on what they were rounded from."""
    inputs = random_inputs(1, 1, 8, 16, dtype=BF16)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    low = reference_gradients(*tensors)
    high = reference_gradients(*(t.double() for t in tensors))
    for name in NAMES:
        assert getattr(low, name).dtype == torch.float64
        assert torch.equal(getattr(low, name), getattr(high, name))


def test_random_dout_has_a_mean() -> None:
    """A dO of mean zero, or of ones, would hide a missing delta or a wrong index."""
    dout = random_inputs(1, 1, 512, 64).dout
    assert 0.2 < dout.mean() < 0.3
    assert 0.9 < dout.std() < 1.1


# ---------------------------------------------------------------- the budget

ROWS_Q, ROWS_K = 37, 45


def _inputs(dtype: torch.dtype) -> Inputs:
    return random_inputs(2, 2, ROWS_Q, 64, seqlen_k=ROWS_K, dtype=dtype)


def _plain(inputs: Inputs, is_causal: bool) -> Gradients:
    """What a correct implementation returns: float64 rounded to the dtype, lse in fp32."""
    truth = reference_gradients(inputs.q, inputs.k, inputs.v, inputs.dout, is_causal=is_causal)
    rounded = {name: getattr(truth, name).to(inputs.q.dtype) for name in NAMES}
    return Gradients(**(rounded | {"lse": truth.lse.float()}))


def _verdicts(result: Gradients, inputs: Inputs, is_causal: bool) -> dict[str, bool]:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    return {c.name: c.ok for c in compare(result, *tensors, is_causal=is_causal)}


@CAUSAL
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_budget_accepts_plain_pytorch_and_rounded_truth(dtype: torch.dtype, is_causal: bool) -> None:
    """The budget is the error of plain PyTorch, which is therefore within it; so is the best there is."""
    inputs = _inputs(dtype)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    assert all(_verdicts(_plain(inputs, is_causal), inputs, is_causal).values())
    explicit = explicit_gradients(*tensors, is_causal=is_causal)
    exact_lse = reference_gradients(*tensors, is_causal=is_causal).lse.float()
    assert all(_verdicts(replace(explicit, lse=exact_lse), inputs, is_causal).values())


def _one_element(t: Tensor, value: float) -> Tensor:
    t = t.clone(memory_format=torch.contiguous_format)
    t.view(-1)[t.numel() // 2] = value
    return t


def _one_row_from_another_head(t: Tensor) -> Tensor:
    t = t.clone()
    t[0, 0, 3] = t[0, 1, 3]
    return t


def _neighbouring_rows_swapped(t: Tensor) -> Tensor:
    t = t.clone()
    t[1, 1, [4, 5]] = t[1, 1, [5, 4]]
    return t


def _last_row_missing(t: Tensor) -> Tensor:
    t = t.clone()
    t[:, :, -1] = 0
    return t


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all NaN": lambda t: torch.full_like(t, torch.nan),
    "one NaN": lambda t: _one_element(t, torch.nan),
    "one infinity": lambda t: _one_element(t, torch.inf),
    "zeros": torch.zeros_like,
    "one tenth too large": lambda t: 1.1 * t,
    "wrong sign": lambda t: -t,
    "mean over rows": lambda t: t.mean(2, keepdim=True).expand_as(t).contiguous(),
    "one row of another head": _one_row_from_another_head,
    "two rows swapped": _neighbouring_rows_swapped,
    "last row not written": _last_row_missing,
    "heads swapped": lambda t: t.flip(1),
}


@CAUSAL
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_budget_rejects_a_wrong_result(
    fault: Callable[[Tensor], Tensor], dtype: torch.dtype, is_causal: bool
) -> None:
    """B54's kind: in each result alone, and the other results stay accepted."""
    inputs = _inputs(dtype)
    right = _plain(inputs, is_causal)
    for name in NAMES:
        wrong = replace(right, **{name: fault(getattr(right, name))})
        verdicts = _verdicts(wrong, inputs, is_causal)
        assert verdicts == {other: other != name for other in NAMES}, name


def _mean_of_v(inputs: Inputs, right: Gradients, is_causal: bool) -> Gradients:
    mean = inputs.v.double().mean(2, keepdim=True).expand_as(right.out)
    return replace(right, out=mean.to(right.out.dtype))


def _scale_missing(name: str) -> Callable[[Inputs, Gradients, bool], Gradients]:
    return lambda inputs, right, is_causal: replace(right, **{name: 8 * getattr(right, name)})


def _without_delta(inputs: Inputs, right: Gradients, is_causal: bool) -> Gradients:
    q, k, v, dout = (t.double() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    scores = (q @ k.transpose(-1, -2) / 8).masked_fill(~visible_mask(ROWS_Q, ROWS_K, is_causal), -torch.inf)
    ds = scores.softmax(-1) * (dout @ v.transpose(-1, -2))
    return replace(right, dq=(ds @ k / 8).to(q.dtype), dk=(ds.transpose(-1, -2) @ q / 8).to(q.dtype))


def _rows_of_dout_swapped(inputs: Inputs, right: Gradients, is_causal: bool) -> Gradients:
    order = [*range(ROWS_Q - 2), ROWS_Q - 1, ROWS_Q - 2]
    moved = replace(inputs, dout=inputs.dout[:, :, order])
    return replace(_plain(moved, is_causal), out=right.out, lse=right.lse)


def _top_left_mask(inputs: Inputs, right: Gradients, is_causal: bool) -> Gradients:
    keys = ROWS_Q  # a square causal mask over the first Nq keys is what top-left alignment means
    short = replace(inputs, k=inputs.k[:, :, :keys], v=inputs.v[:, :, :keys])
    result = _plain(short, True)
    pad = (0, 0, 0, ROWS_K - keys)
    return replace(
        result,
        dk=torch.nn.functional.pad(result.dk, pad),
        dv=torch.nn.functional.pad(result.dv, pad),
    )


def _other_mask(inputs: Inputs, right: Gradients, is_causal: bool) -> Gradients:
    return _plain(inputs, not is_causal)


def _padded_keys(inputs: Inputs, right: Gradients, is_causal: bool) -> Gradients:
    """Keys 45 to 63 of a tile of 64 loaded as zeros and not masked."""
    pad = (0, 0, 0, 64 - ROWS_K)
    padded = replace(
        inputs,
        k=torch.nn.functional.pad(inputs.k, pad),
        v=torch.nn.functional.pad(inputs.v, pad),
    )
    result = _plain(padded, False)
    return replace(result, dk=result.dk[:, :, :ROWS_K], dv=result.dv[:, :, :ROWS_K])


def _lse_in_base_two(inputs: Inputs, right: Gradients, is_causal: bool) -> Gradients:
    return replace(right, lse=right.lse / math.log(2))


ALGORITHM_FAULTS = {
    "mean of V": (_mean_of_v, {"out"}),
    "no scale on dq": (_scale_missing("dq"), {"dq"}),
    "no scale on dk": (_scale_missing("dk"), {"dk"}),
    "no delta": (_without_delta, {"dq", "dk"}),
    "rows of dout swapped": (_rows_of_dout_swapped, {"dq", "dk", "dv"}),
    "mask aligned top-left": (_top_left_mask, set(NAMES)),
    "mask forgotten or added": (_other_mask, set(NAMES)),
    "padded keys not masked": (_padded_keys, set(NAMES)),
    "lse in base 2": (_lse_in_base_two, {"lse"}),
}


@CAUSAL
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("fault", ALGORITHM_FAULTS.values(), ids=ALGORITHM_FAULTS.keys())
def test_budget_rejects_a_wrong_algorithm(
    fault: tuple[Callable[[Inputs, Gradients, bool], Gradients], set[str]],
    dtype: torch.dtype,
    is_causal: bool,
) -> None:
    """Mistakes that kernels make, with numbers otherwise exact, are over budget in every dtype."""
    inputs = _inputs(dtype)
    function, spoiled = fault
    verdicts = _verdicts(function(inputs, _plain(inputs, is_causal), is_causal), inputs, is_causal)
    assert {name for name, ok in verdicts.items() if not ok} == spoiled


@pytest.mark.parametrize("name", NAMES)
def test_budget_refuses_another_shape(name: str) -> None:
    """A missing head or row cannot pass by broadcasting."""
    inputs = _inputs(FP32)
    right = _plain(inputs, False)
    for change in (lambda t: t[:1], lambda t: t[:, :, :1], lambda t: t[..., None]):
        wrong = replace(right, **{name: change(getattr(right, name))})
        with pytest.raises(ValueError, match=name):
            _verdicts(wrong, inputs, False)


def test_budget_is_no_wider_for_one_bad_element_among_many() -> None:
    """An element off by a percent of the largest is seen among 300,000: the norm alone would not see it."""
    inputs = random_inputs(2, 4, 600, 64)
    right = _plain(inputs, False)
    dk = right.dk.clone()
    dk[1, 2, 599, 63] += 0.01 * dk.abs().max()
    verdicts = _verdicts(replace(right, dk=dk), inputs, False)
    assert verdicts == {name: name != "dk" for name in NAMES}


def test_comparison_in_chunks_of_heads_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """compare() computes a few heads at a time; the numbers must not depend on how many."""
    from common import reference

    inputs = _inputs(FP32)
    right = _plain(inputs, True)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    whole = compare(right, *tensors, is_causal=True)
    monkeypatch.setattr(reference, "_MAX_MATRIX_ELEMENTS", 1)
    single = compare(right, *tensors, is_causal=True)
    for a, b in zip(whole, single, strict=True):
        assert a.name == b.name
        assert a.error == pytest.approx(b.error, rel=1e-6, abs=1e-12)
        assert a.budget == pytest.approx(b.budget, rel=0.05)


def test_what_is_expected_is_remembered_by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in other tensors are known; one changed number, or another option, is not."""
    made = []
    original = reference._expect
    monkeypatch.setattr(reference, "_expect", lambda *a: made.append(a) or original(*a))
    monkeypatch.setattr(reference, "_memory", reference._Memory())
    inputs = list(vars(random_inputs(1, 2, 9, 16)).values())
    result = reference_gradients(*inputs)
    first = compare(result, *inputs)
    assert compare(result, *(tensor.clone() for tensor in inputs)) == first
    assert len(made) == 1
    assert compare(result, *inputs, is_causal=True) != first
    assert compare(result, *inputs, softmax_scale=0.5) != first
    assert len(made) == 3
    inputs[3][0, 0, 0, 0] += 1
    assert compare(result, *inputs) != first
    assert len(made) == 4


def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = reference._Memory()
    options = {"softmax_scale": None, "is_causal": False, "rule": reference.PLAIN}
    inputs = [tuple(vars(random_inputs(1, 1, 8, 16, seed=seed)).values()) for seed in range(3)]
    size = memory._size(memory.expect(inputs[0], options))
    monkeypatch.setattr(reference._Memory, "MAX_BYTES", 2 * size)
    for each in (inputs[1], inputs[0], inputs[2]):  # the second is then the oldest
        memory.expect(each, options)
    made = []
    original = reference._expect
    monkeypatch.setattr(reference, "_expect", lambda *a: made.append(a) or original(*a))
    for each in (inputs[0], inputs[2], inputs[1]):
        memory.expect(each, options)
    assert len(made) == 1
