"""What the kernels are compared with, and how far they may be off."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from common.validation import check_like, check_qkv, default_scale

# Of one N² matrix, over all heads that are computed at once: 512 MiB in float64.
_MAX_MATRIX_ELEMENTS = 2**26
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_EPS32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Gradients:
    """What one forward and one backward pass produce.

    out, dq: [B, H, Nq, d]. lse: [B, H, Nq]. dk, dv: [B, H, Nk, d].
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class ScoreRule:
    """What a variant of attention does to the scores between Q Kᵀ and the softmax, in this order.

    softcap: s becomes c · tanh(s / c). bias: (num_heads, Nq, Nk) → [H, Nq, Nk], added. visible: (Nq, Nk) →
    [Nq, Nk], False where a key is hidden, besides those that a causal mask hides.
    """

    softcap: float | None = None
    bias: Callable[[int, int, int], Tensor] | None = None
    visible: Callable[[int, int], Tensor] | None = None

    def apply(self, scores: Tensor) -> Tensor:
        """The scores [B, H, Nq, Nk] with cap and bias."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias(*scores.shape[1:]).to(scores)
        return scores


PLAIN = ScoreRule()


def _visible(q: Tensor, k: Tensor, is_causal: bool, rule: ScoreRule) -> Tensor:
    mask = visible_mask(q.shape[2], k.shape[2], is_causal, q.device)
    return mask if rule.visible is None else mask & rule.visible(q.shape[2], k.shape[2]).to(q.device)


def visible_mask(seqlen_q: int, seqlen_k: int, is_causal: bool, device: torch.device | str = "cpu") -> Tensor:
    """[Nq, Nk] booleans: True where query i sees key j, that is j <= i + Nk - Nq if causal."""
    rows = torch.arange(seqlen_q, device=device)[:, None]
    cols = torch.arange(seqlen_k, device=device)[None, :]
    return cols <= rows + (seqlen_k - seqlen_q) if is_causal else (rows >= 0) & (cols >= 0)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    check_qkv(q, k, v, _DTYPES)
    check_like("q", q, dout=dout)


def explicit_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    rule: ScoreRule = PLAIN,
) -> Gradients:
    """Plain PyTorch in the inputs' own dtype: matmul, softmax, matmul, and autograd for the gradients.

    Shapes as in ``Chapter.forward`` and ``Chapter.backward``, float64 too. Rows that see no key get zeros and
    lse −inf. Raises TypeError or ValueError, naming the argument.
    """
    _check_inputs(q, k, v, dout)
    scale = default_scale(softmax_scale, q.shape[-1])
    visible = _visible(q, k, is_causal, rule)
    row_has_key = visible.any(-1, keepdim=True)
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_(True) for tensor in (q, k, v))
        scores = rule.apply((q @ k.transpose(-1, -2)) * scale)
        scores = scores.masked_fill(~visible, -torch.inf)
        # A row of −inf has no softmax; give it any scores and drop its probabilities.
        probabilities = torch.where(row_has_key, scores, 0.0).softmax(-1)
        out = torch.where(row_has_key, probabilities, 0.0) @ v
        with warnings.catch_warnings():
            # On a GPU the first product of autograd's own thread finds no CUDA context there, and makes one.
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return Gradients(out.detach(), scores.detach().logsumexp(-1), dq, dk, dv)


def reference_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    rule: ScoreRule = PLAIN,
) -> Gradients:
    """``explicit_gradients`` in float64, on the inputs as they are rounded to their dtype."""
    _check_inputs(q, k, v, dout)
    inputs = (tensor.double() for tensor in (q, k, v, dout))
    return explicit_gradients(*inputs, softmax_scale=softmax_scale, is_causal=is_causal, rule=rule)


@dataclass(frozen=True)
class Magnitudes:
    """What one unit roundoff at three places of the algorithm does to each result, if it is random.

    sums: of fp32, in every term of every sum. It is what remains of the scale of a result that is exactly
        zero, like dQ with a single key.
    exponents: of fp32, in S and lse. Backward recomputes P = exp(S - lse), so an error of ε in the exponent
        is a relative error of ε in P; scores of 100 cost two digits.
    deltas: of the inputs' dtype, in O. delta = rowsum(O ∘ dO) is computed from an O that was rounded to
        its dtype, while dP is not; with few keys dP - delta nearly cancels, and this is what remains.
    """

    sums: Gradients
    exponents: Gradients
    deltas: Gradients


def rounding_magnitudes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    rule: ScoreRule = PLAIN,
) -> Magnitudes:
    """How roundoff reaches each result; independent errors are added in quadrature."""
    signed_scale = default_scale(softmax_scale, q.shape[-1])
    scale = abs(signed_scale)
    q, k, v, dout = (tensor.double() for tensor in (q, k, v, dout))
    visible = _visible(q, k, is_causal, rule)
    row_has_key = visible.any(-1, keepdim=True)
    scores = rule.apply((q @ k.transpose(-1, -2)) * signed_scale)
    masked = torch.where(row_has_key, scores.masked_fill(~visible, -torch.inf), 0.0)
    p = torch.where(row_has_key, masked.softmax(-1), 0.0)
    scores = scores.masked_fill(~visible, 0.0)
    s2 = (scale**2 * (q**2) @ (k**2).transpose(-1, -2)).masked_fill(~visible, 0.0)
    lse2 = masked.logsumexp(-1, keepdim=True) ** 2
    dp2 = (dout**2) @ (v**2).transpose(-1, -2)
    delta = ((p @ v) * dout).norm(dim=-1, keepdim=True)

    def gradients(p2: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        ds2 = p2 * (dp2 + (p * dp2).sum(-1, keepdim=True))
        return Gradients(
            out,
            lse,
            dq=scale * (ds2 @ k**2).sqrt(),
            dk=scale * (ds2.transpose(-1, -2) @ q**2).sqrt(),
            dv=(p2.transpose(-1, -2) @ dout**2).sqrt(),
        )

    no_out, no_lse = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    return Magnitudes(
        sums=gradients(
            p**2,
            out=(p**2 @ v**2).sqrt(),
            lse=(1.0 + s2.amax(-1) + (scores**2).amax(-1)).sqrt(),
        ),
        exponents=gradients(p**2 * (s2 + scores**2 + lse2), no_out, no_lse),
        deltas=Gradients(
            no_out,
            no_lse,
            dq=scale * delta * (p @ k).abs(),
            dk=scale * ((p**2).transpose(-1, -2) @ (delta * q) ** 2).sqrt(),
            dv=torch.zeros_like(v),
        ),
    )


@dataclass(frozen=True)
class Comparison:
    """One result against the reference: its error as a whole (Frobenius norm) and its worst element.

    All four numbers are relative to the reference's norm or largest element; absolute where that is zero.
    """

    name: str
    error: float
    budget: float
    worst: float
    worst_budget: float

    @property
    def ok(self) -> bool:
        """Within both budgets. False for NaN."""
        return self.error <= self.budget and self.worst <= self.worst_budget

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "OVER BUDGET"
        return (
            f"{self.name}: error {self.error:.1e} (budget {self.budget:.1e}), "
            f"worst element {self.worst:.1e} (budget {self.worst_budget:.1e}) {verdict}"
        )


def _difference(value: Tensor, reference: Tensor) -> Tensor:
    # Equal infinities, as in the lse of a row without keys, differ by nothing.
    value, reference = value.double(), reference.double()
    return torch.where(value == reference, 0.0, value - reference)


def _by_heads(function: Callable, inputs: tuple[Tensor, ...], options: dict) -> Gradients | Magnitudes:
    """Calls a function of this module on a few heads at a time: its N² matrices must fit in memory."""
    batch, num_heads, seqlen_q, _ = inputs[0].shape
    if batch * num_heads == 0 or options["rule"].bias is not None:  # which depends on the head
        return function(*inputs, **options)
    chunk = max(1, _MAX_MATRIX_ELEMENTS // max(1, seqlen_q * inputs[1].shape[2]))
    flat = [tensor.flatten(0, 1).unsqueeze(1).split(chunk) for tensor in inputs]
    return _joined([function(*part, **options) for part in zip(*flat, strict=True)], (batch, num_heads))


def _joined(parts: list, heads: tuple[int, int]) -> object:
    """Tensors of some heads joined to tensors of all, field by field."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts).squeeze(1).unflatten(0, heads)
    kind = type(parts[0])
    return kind(*(_joined([getattr(part, f.name) for part in parts], heads) for f in fields(kind)))


@dataclass(frozen=True)
class _Extent:
    """How large a tensor is: its norm, and its largest element."""

    norm: float
    largest: float

    @staticmethod
    def of(x: Tensor) -> _Extent:
        return _Extent(x.norm().item(), x.abs().max().item() if x.numel() else 0.0)


@dataclass(frozen=True)
class _Expected:
    """One result in float64, and the extents that its budget is made of."""

    name: str
    truth: Tensor
    num_terms: int  # of the sums
    finite: _Extent  # of the truth, infinities left out
    plain_error: _Extent
    terms: _Extent
    exponent: _Extent
    delta: _Extent

    def compare(self, value: Tensor, num_roundings: int | None) -> Comparison:
        """``num_roundings``: how often the sum is rounded to its dtype on the way, if it is."""
        if value.shape != self.truth.shape:
            raise ValueError(
                f"{self.name} has shape {tuple(value.shape)}; expected {tuple(self.truth.shape)}"
            )
        unit = torch.finfo(value.dtype).eps / 2
        # A sum kept in one register: the random walk of its roundings, over and above those of its terms.
        walk = _EPS32 / 2 * (4 + self.num_terms**0.5 / 2)
        # A partial sum is as large as its terms in quadrature, or as the result if they have one sign.
        parts = [
            (walk, self.terms),
            (walk + unit, self.finite),
            (_EPS32, self.exponent),
            (unit, self.delta),
        ]
        if num_roundings is not None:
            parts.append((unit * (num_roundings / 2) ** 0.5, self.terms))
        floor = sum(factor * extent.norm for factor, extent in parts)
        worst_floor = 2 * sum(factor * extent.largest for factor, extent in parts)
        error = _Extent.of(_difference(value, self.truth))
        size, peak = self.finite.norm or 1.0, self.finite.largest or 1.0
        return Comparison(
            self.name,
            error.norm / size,
            (self.plain_error.norm + floor) / size,
            error.largest / peak,
            (2 * self.plain_error.largest + worst_floor) / peak,
        )


def _expect(inputs: tuple[Tensor, ...], options: dict) -> list[_Expected]:
    """What ``compare`` says of its budgets, of each result."""
    q, k, _, _ = inputs
    reference, explicit, magnitudes = (
        _by_heads(function, inputs, options)
        for function in (reference_gradients, explicit_gradients, rounding_magnitudes)
    )
    expected = []
    for name in (field.name for field in fields(Gradients)):
        truth, plain = getattr(reference, name), getattr(explicit, name)
        kinds = (magnitudes.sums, magnitudes.exponents, magnitudes.deltas)
        expected.append(
            _Expected(
                name,
                truth,
                {"lse": q.shape[3], "dk": q.shape[2], "dv": q.shape[2]}.get(name, k.shape[2]),
                _Extent.of(torch.where(truth.isinf(), 0.0, truth)),
                _Extent(0.0, 0.0) if name == "lse" else _Extent.of(_difference(plain, truth)),
                *(_Extent.of(getattr(kind, name)) for kind in kinds),
            )
        )
    return expected


class _Memory:
    """What was expected of the last inputs: ladder and tests compare every chapter on the same ones."""

    MAX_BYTES = 1 << 28

    def __init__(self) -> None:
        self._entries: dict[tuple, list[_Expected]] = {}  # the least recently used first
        self._bytes = 0

    def expect(self, inputs: tuple[Tensor, ...], options: dict) -> list[_Expected]:
        if any(tensor.device.type != "cpu" for tensor in inputs):  # a GPU's memory is not to be kept
            return _expect(inputs, options)
        content = hashlib.sha256()
        for tensor in inputs:
            content.update(tensor.detach().contiguous().view(torch.uint8).numpy())
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        key = (content.digest(), shapes, *options.values())
        if key in self._entries:
            expected = self._entries.pop(key)
        else:
            expected = _expect(inputs, options)
            self._bytes += self._size(expected)
        self._entries[key] = expected
        while self._bytes > self.MAX_BYTES:
            oldest = next(iter(self._entries))
            self._bytes -= self._size(self._entries.pop(oldest))
        return expected

    @staticmethod
    def _size(expected: list[_Expected]) -> int:
        return sum(result.truth.nbytes for result in expected)


_memory = _Memory()


def compare(
    result: Gradients,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    dq_rounded_every: int | None = None,
    rule: ScoreRule = PLAIN,
) -> list[Comparison]:
    """Compares a result with float64 on the same inputs.

    The budget of the whole is the error that ``explicit_gradients`` makes in the inputs' dtype, the worst
    element's is twice that one's. Each has a floor for where plain PyTorch happens to be exact: rounding
    the result to its dtype, and the roundoff that no kernel of this algorithm can avoid (``Magnitudes``),
    which in fp32 sums grows with the root of their number. lse, which is fp32 whatever the dtype, has only
    the floor.

    ``rule``: the variant of attention that was computed.
    ``dq_rounded_every``: dQ is kept in its dtype and rounded after each so many keys (``ChapterInfo`` says
    so). T roundings of a sum that grows like a random walk add up to √(T/2) of them at its full size.

    Raises TypeError or ValueError, naming the argument: shapes and dtypes are those of the inputs.
    """
    _check_inputs(q, k, v, dout)
    if not isinstance(result, Gradients):
        raise TypeError(f"result is a {type(result).__name__}; expected Gradients")
    options = {"softmax_scale": softmax_scale, "is_causal": is_causal, "rule": rule}
    roundings = {} if dq_rounded_every is None else {"dq": math.ceil(k.shape[2] / dq_rounded_every)}
    return [
        expected.compare(getattr(result, expected.name), roundings.get(expected.name))
        for expected in _memory.expect((q, k, v, dout), options)
    ]
