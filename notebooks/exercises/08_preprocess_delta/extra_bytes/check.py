"""The ledger's answer: what the solution of no_lse requests, counted, minus the chapter's formulas."""

import random

import torch

from common.formulas import Problem
from common.grade.answers import Question
from common.grade.exercises import Limit, find_exercise


def questions(rng: random.Random) -> list[Question]:
    no_lse = find_exercise("08_preprocess_delta/no_lse")
    found = []
    for _ in range(3):
        batch, heads = rng.randrange(1, 4), rng.randrange(1, 5)
        seqlen_q, seqlen_k = rng.randrange(70, 400), rng.randrange(70, 400)
        problem = Problem(batch, heads, seqlen_q, seqlen_k, no_lse.head_dim, torch.float32)
        # tests/test_grade_exercises.py holds these formulas against the count.
        extra = {
            quantity: no_lse.limit(Limit(quantity, formula, "", ""), problem, {}) for quantity, formula in (
                ("k.read", "B*H*T_q*N_k*d*e"), ("q.read", "B*H*N_q*d*e"), ("lse.read", "B*H*4*N_q"),
            )
        }  # fmt: skip
        found += [
            Question("extra_bytes", "extra_bytes", (batch, heads, seqlen_q, seqlen_k, no_lse.head_dim, 4, 32), sum(extra.values())),
            Question("extra_products", "extra_products", (batch, heads, seqlen_q, seqlen_k, no_lse.head_dim),
                     2 * batch * heads * seqlen_q * seqlen_k * no_lse.head_dim),
        ]  # fmt: skip
    return found
