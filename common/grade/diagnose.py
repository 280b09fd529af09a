"""What is wrong with a result, in words that a student can start from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.reference import Comparison


def _runs(numbers: list[int]) -> str:
    """3, 4, 5, 9 → "3–5, 9"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in parts]
    return ", ".join(texts[:4]) + (" …" if len(texts) > 4 else "")


def _factor(result: Tensor, exact: Tensor) -> float | None:
    """The f for which the result is f times what it should be, to a thousandth of its norm."""
    square = exact.square().sum().item()
    if square == 0:
        return None
    factor = (result * exact).sum().item() / square
    rest = (result - factor * exact).norm().item()
    return factor if rest <= 1e-3 * abs(factor) * math.sqrt(square) and abs(factor - 1) > 1e-2 else None


def describe(result: Tensor, exact: Tensor, comparison: Comparison, scale: float) -> str:
    """How a result [B, H, N, …] differs from the exact one: NaN, zeros, a factor, or where."""
    name = comparison.name
    result, exact = result.double(), exact.double()
    finite_exact = torch.where(exact.isinf(), 0.0, exact)
    nan = result.isnan()
    if nan.any():
        everywhere = "all" if nan.all() else f"{int(nan.sum())} of {nan.numel()}"
        first = [int(i) for i in nan.nonzero()[0]]
        place = f"the first {name}{first}"
        return f"{everywhere} elements of {name} are NaN, {place}: never written, or 0 · inf, inf − inf"
    infinite = result.isinf() & ~exact.isinf()
    if infinite.any():
        first = [int(i) for i in infinite.nonzero()[0]]
        count = f"{int(infinite.sum())} of {infinite.numel()}"
        return f"{count} elements of {name} are infinite, the first {name}{first}"
    if not result.any() and exact.any():
        return f"{name} is zero everywhere"
    sentence = f"{name} is off by {comparison.error:.1e} of its norm; {comparison.budget:.1e} is the budget"
    clean = torch.where(result.isinf(), 0.0, result)
    factor = _factor(clean, finite_exact)
    if factor is not None:
        known = {
            "softmax_scale": scale,
            "1 / softmax_scale": 1 / scale,
            "softmax_scale²": scale**2,
            "log2 e": 1 / math.log(2),
            "ln 2": math.log(2),
        }
        same = [text for text, value in known.items() if abs(factor / value - 1) < 1e-2]
        return f"{sentence}. It is {factor:.4g} times what it should be" + (
            f", which is {same[0]}" if same else ""
        )
    wrong = (clean - finite_exact).abs()
    if wrong.ndim == 4:
        wrong = wrong.amax(-1)
    peak = max(finite_exact.abs().max().item(), 1e-30)
    bad = wrong > max(comparison.worst_budget, 1e-12) * peak
    heads = [int(i) for i in bad.flatten(0, 1).any(-1).nonzero().flatten()]
    rows = [int(i) for i in bad.any(0).any(0).nonzero().flatten()]
    if rows and len(rows) < wrong.shape[2]:
        sentence += f". Rows {_runs(rows)} of {wrong.shape[2]} are wrong, the others right"
    elif heads and len(heads) < wrong.shape[0] * wrong.shape[1]:
        sentence += f". It is wrong in {len(heads)} of {wrong.shape[0] * wrong.shape[1]} heads"
    return sentence
