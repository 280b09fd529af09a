"""The variants of attention that exercises ask for, and how results of theirs are compared.

An exercise names them in its ``[attention]``; a number may be a constant of its kernel, in quotes. With
o = Nk − Nq a query i stands at key i + o, as in the causal mask.

- window = W: keys j ≤ i + o − W are hidden: a query sees no more than the last W keys up to its own.
- document = L: keys and queries are cut into documents of L, and see only their own: j // L = (i + o) // L.
- prefix = P: with a causal mask the first P keys are visible to every query.
- sink = S: of a window, the first S keys stay visible (attention sinks); a causal mask still hides them.
- softcap = C: a score s becomes C · tanh(s / C).
- alibi = A: head h adds −2^(−A (h + 1) / H) · |i + o − j| to a score.
- statistic: what backward is given as lse: "natural", "base 2" (times log2 e), or "none" (NaN).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from common import reference
from common.inputs import Inputs
from common.reference import Comparison, Gradients, ScoreRule

STATISTICS = ("natural", "base 2", "none")


@dataclass(frozen=True)
class Attention:
    """One variant; see the module. Zero or None for what it does not have."""

    window: int = 0
    document: int = 0
    prefix: int = 0
    sink: int = 0
    softcap: float = 0.0
    alibi: float = 0.0
    statistic: str = "natural"

    @classmethod
    def read(cls, data: Mapping[str, object], constants: Mapping[str, int]) -> Attention:
        """From ``[attention]``. Raises ValueError for a name or a value that is not known."""
        names = {field.name for field in fields(cls)}
        values: dict[str, object] = {}
        for name, value in data.items():
            if name not in names:
                raise ValueError(f"attention.{name} is not known; accepted: {', '.join(sorted(names))}")
            if name == "statistic":
                if value not in STATISTICS:
                    raise ValueError(f"attention.statistic is {value!r}; accepted: {', '.join(STATISTICS)}")
            elif isinstance(value, str):
                if value not in constants:
                    raise ValueError(f"attention.{name} is {value!r}, which is no constant of the variants")
                value = constants[value]
            values[name] = value
        return cls(**values)  # type: ignore[arg-type]

    def visible(self, seqlen_q: int, seqlen_k: int, is_causal: bool) -> Tensor:
        """[Nq, Nk], what the variant and the causal mask leave visible."""
        place = torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
        key = torch.arange(seqlen_k)[None, :]
        seen = reference.visible_mask(seqlen_q, seqlen_k, is_causal)
        if self.prefix:
            seen = seen | (key < self.prefix)
        if self.window:
            seen = seen & ((key > place - self.window) | (key < self.sink))
        if self.document:
            seen = seen & (torch.div(key, self.document, rounding_mode="floor")
                           == torch.div(place, self.document, rounding_mode="floor"))  # fmt: skip
        return seen

    def rule(self, is_causal: bool) -> ScoreRule:
        """For ``common.reference``, called with is_causal False: the mask is whole in here."""

        def bias(num_heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
            place = torch.arange(seqlen_q, dtype=torch.float64)[:, None] + (seqlen_k - seqlen_q)
            distance = (place - torch.arange(seqlen_k, dtype=torch.float64)[None, :]).abs()
            head = torch.arange(num_heads, dtype=torch.float64)[:, None, None]
            return -(2.0 ** (-self.alibi * (head + 1) / num_heads)) * distance

        return ScoreRule(
            softcap=self.softcap or None,
            bias=bias if self.alibi else None,
            visible=lambda seqlen_q, seqlen_k: self.visible(seqlen_q, seqlen_k, is_causal),
        )

    def saved(self, x: Inputs, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
        """What backward is given besides its inputs: out in their dtype, and the statistic [B, H, Nq]."""
        exact = reference.reference_gradients(
            x.q, x.k, x.v, x.dout, softmax_scale=scale, rule=self.rule(is_causal)
        )
        return exact.out.to(x.q.dtype), self._statistic(exact.lse).float()

    def _statistic(self, lse: Tensor) -> Tensor:
        if self.statistic == "none":
            return torch.full_like(lse, torch.nan)
        return lse / math.log(2) if self.statistic == "base 2" else lse

    def compare(
        self,
        outputs: Mapping[str, Tensor],
        x: Inputs,
        scale: float,
        is_causal: bool,
        *,
        dq_rounded_every: int | None = None,
    ) -> list[Comparison]:
        """Those of dq, dk, dv, out and lse that a submission has handed back, against float64."""
        rule = self.rule(is_causal)
        exact = reference.reference_gradients(x.q, x.k, x.v, x.dout, softmax_scale=scale, rule=rule)
        got = {field.name: outputs.get(field.name, getattr(exact, field.name)) for field in fields(Gradients)}
        got = {name: tensor.to(x.q.dtype if name != "lse" else torch.float32) for name, tensor in got.items()}
        if "lse" in outputs and self.statistic == "base 2":
            got["lse"] = got["lse"] * math.log(2)
        comparisons = reference.compare(
            Gradients(**got), x.q, x.k, x.v, x.dout, softmax_scale=scale, rule=rule,
            dq_rounded_every=dq_rounded_every,
        )  # fmt: skip
        return [c for c in comparisons if c.name in outputs]

    def exact(self, x: Inputs, scale: float, is_causal: bool) -> Gradients:
        """The results in float64; lse is the statistic."""
        exact = reference.reference_gradients(
            x.q, x.k, x.v, x.dout, softmax_scale=scale, rule=self.rule(is_causal)
        )
        statistic = exact.lse if self.statistic == "none" else self._statistic(exact.lse)
        return Gradients(exact.out, statistic, exact.dq, exact.dk, exact.dv)
