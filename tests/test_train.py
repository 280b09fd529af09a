"""A model trains the same with the chapters as with PyTorch's attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common import list_chapters, train


def test_losses_agree() -> None:
    found = train.compare(replace(train.SMALL, steps=4), torch.device("cpu"))
    ours, sdpa, again = (found["runs"][name]["losses"] for name in ("ours", "SDPA", "SDPA again"))
    assert len(ours) == len(sdpa) == 4
    assert ours == pytest.approx(sdpa, rel=5e-3)
    assert again == pytest.approx(sdpa, rel=5e-3)
    assert len(set(ours)) == 4  # it moves; in so few steps the loss may rise as well as fall


def test_other_gradients_would_be_noticed() -> None:
    def detached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return train.sdpa(q, k, v).detach()

    settings = replace(train.SMALL, steps=8, learning_rate=1e-2)
    text = train.corpus()
    right, wrong = (train.train(settings, attention, text)[0] for attention in (train.sdpa, detached))
    assert wrong != pytest.approx(right, rel=5e-3)


def test_the_command_says_which_chapter_it_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--device", "cpu", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert f"ours is {list_chapters()[-1].name} on cpu" in out
    assert "ms a step" in out
