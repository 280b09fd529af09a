"""The problems that a submission is run on: ragged, causal, Nq ≠ Nk, strided, with a scale of its own.

A seed chooses the sizes. The seed of students is known, that of an instructor is not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.formulas import Problem
from common.inputs import Inputs, random_inputs

PUBLIC_SEED = "public"


@dataclass(frozen=True)
class Case:
    """One call. layout: "dense", "swapped" (stored as [B, N, H, d]) or "gaps" (between the rows)."""

    name: str
    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    is_causal: bool = False
    deterministic: bool = False
    softmax_scale: float | None = None
    layout: str = "dense"
    seed: int = 0

    def __str__(self) -> str:
        flags = [f"B={self.batch} H={self.num_heads} Nq={self.seqlen_q} Nk={self.seqlen_k}"]
        flags += ["causal"] if self.is_causal else []
        flags += ["deterministic"] if self.deterministic else []
        flags += [f"softmax_scale={self.softmax_scale:.3g}"] if self.softmax_scale is not None else []
        flags += (
            [{"swapped": "stored as [B, N, H, d]", "gaps": "rows with gaps"}[self.layout]]
            if self.layout != "dense"
            else []
        )
        return f"{self.name} ({', '.join(flags)})"

    def scale(self, head_dim: int) -> float:
        """softmax_scale, 1/√d unless the case has its own."""
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def problem(self, head_dim: int, dtype: torch.dtype) -> Problem:
        """For formulas."""
        return Problem(
            self.batch, self.num_heads, self.seqlen_q, self.seqlen_k, head_dim, dtype, self.is_causal,
            self.deterministic,
        )  # fmt: skip

    def inputs(self, head_dim: int, dtype: torch.dtype) -> Inputs:
        """Random numbers, laid out as the case says."""
        x = random_inputs(
            self.batch, self.num_heads, self.seqlen_q, head_dim, seqlen_k=self.seqlen_k, dtype=dtype,
            seed=self.seed,
        )  # fmt: skip
        return Inputs(*(self.laid_out(t) for t in (x.q, x.k, x.v, x.dout)))

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same values in the case's layout. Rows stay aligned to 16 bytes where d allows it."""
        if self.layout == "swapped":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "gaps":
            buffer = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 8), torch.nan, dtype=tensor.dtype)
            view = buffer[..., : tensor.shape[-1]]
            view.copy_(tensor)
            return view
        return tensor


def draw_cases(
    seed: str, exercise: str, unit: int, *, causal: str = "both", deterministic: str = "never"
) -> list[Case]:
    """The cases of one exercise.

    unit: about the length of a tile. causal: "both", "always" or "never". deterministic:
    in which cases the same     bits are asked for on every run: "never", "once" or "always".
    """
    rng = random.Random(f"{seed}/{exercise}")

    def ragged(tiles: float) -> int:
        """About so many tiles, and never a whole number of 16."""
        return 16 * int(unit * tiles / 16) + rng.randrange(1, 16)

    def uneven(n: int) -> int:
        """The number, or the next one."""
        return n + (n % 16 == 0)

    always, never = causal == "always", causal == "never"
    heads = 2 if unit <= 32 else 1
    short, long = ragged(1.2 + 0.4 * rng.random()), ragged(2.2 + 0.4 * rng.random())
    square = ragged(2.1)
    more, scale = uneven(long + 5), 0.2 + 0.2 * rng.random()
    cases = [
        Case("ragged", 1, heads, long, ragged(2.4), always),
        Case("causal, Nq = Nk", 1, 1, square, square, not never),
        Case("causal, more keys than queries", 1, 1, short, uneven(long + 7), not never),
        Case("causal, more queries than keys", 1, 1, more, short, not never, deterministic == "once"),
        Case("strided", 2, 2, short, uneven(short + 3), always, layout="swapped"),
        Case("one query, rows with gaps, another scale", 1, 1, 1, short, always, False, scale, "gaps"),
    ]  # fmt: skip
    if never:
        cases = [replace(c, name=c.name.replace("causal, ", "")) for c in cases]
    return [
        replace(c, deterministic=c.deterministic or deterministic == "always", seed=rng.randrange(1 << 30))
        for c in cases
    ]
