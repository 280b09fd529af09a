"""What autograd says of dS and D; no formula of the solution is in here."""

import random

import torch

from common.grade.answers import Question


def questions(rng: random.Random) -> list[Question]:
    found = []
    for seqlen_q, seqlen_k, head_dim in (
        (1, 1, 4),
        (3, 5, 8),
        (rng.randrange(4, 9), rng.randrange(9, 14), 6),
    ):
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: B023, E731
        scores, v, dout = draw(seqlen_q, seqlen_k), draw(seqlen_k, head_dim), draw(seqlen_q, head_dim)
        scores.requires_grad_(True)
        p = scores.softmax(-1)
        out = p @ v
        (ds,) = torch.autograd.grad(out, scores, dout)
        # D is the derivative of the loss along a common factor of a row of P.
        factor = torch.ones(seqlen_q, 1, dtype=torch.float64, requires_grad=True)
        (delta,) = torch.autograd.grad((factor * p.detach()) @ v, factor, dout)
        p, out, dp = p.detach(), out.detach(), dout @ v.T
        found += [
            Question("ds", "ds_of", (p, dp), ds),
            Question("delta_from_p", "delta_from_p", (p, dp), delta.flatten()),
            Question("delta_from_out", "delta_from_out", (out, dout), delta.flatten()),
        ]
    return found
