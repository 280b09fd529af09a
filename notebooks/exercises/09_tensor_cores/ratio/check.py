"""Ratios of the stored measurements."""

import json
import random

import torch

from common.grade.answers import Question
from common.jit import REPO_ROOT


def questions(rng: random.Random) -> list[Question]:
    rows = json.loads((REPO_ROOT / "notebooks" / "measurements" / "ratio.json").read_text())["rows"]
    chosen = rng.sample(rows, 6)
    forward = torch.tensor([row["forward_seconds"] for row in chosen], dtype=torch.float64)
    backward = torch.tensor([row["backward_seconds"] for row in chosen], dtype=torch.float64)
    return [
        Question("flops_ratio", "flops_ratio", (), 2.5),
        Question("time_ratios", "time_ratios", (chosen,), backward / forward, tolerance=1e-5),
        Question("kept_efficiency", "kept_efficiency", (chosen,), 2.5 * forward / backward, tolerance=1e-5),
    ]
