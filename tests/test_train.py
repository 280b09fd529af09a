"""A model trains the same with the chapters as with PyTorch's attention."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

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
    right, wrong = (
        [loss for loss, _ in train.train(settings, attention, text)] for attention in (train.sdpa, detached)
    )
    assert wrong != pytest.approx(right, rel=5e-3)


def test_the_command_says_which_chapter_it_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--device", "cpu", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert f"ours is {list_chapters()[-1].name} on cpu" in out
    assert "ms a step" in out


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_a_training_has_a_step(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        train.main(["--device", "cpu", "--steps", steps])
    assert error.value.code == 2
    assert f"--steps is {steps}; expected at least 1" in capsys.readouterr().err


def test_a_stored_training_is_of_the_present_kernel(tmp_path: Path) -> None:
    stored = train.load()
    assert stored is not None
    edited = tmp_path / "training.json"
    edited.write_text(json.dumps(stored | {"source": "0" * 12}))
    assert train.load(edited) is None
    assert train.load(tmp_path / "none.json") is None
