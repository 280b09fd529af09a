"""Arguments that no kernel takes are refused by name, before anything is built or launched.

Shapes, dtypes and devices of tensors are in test_cases_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common import compare, flash_attention, load_chapter, load_kernel, reference_gradients
from common.tiles import count_tiles

FP32 = torch.float32
Q = torch.randn(1, 1, 8, 16)
LSE = torch.zeros(1, 1, 8)
SIZES = {"batch": 1, "num_heads": 1, "seqlen_q": 8, "head_dim": 16, "dtype": FP32}


def refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# ---------------------------------------------------------------- flash_attention and the passes


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(None, TypeError), (Q.numpy(), TypeError), ([[0.0]], TypeError), (torch.tensor(1.0), ValueError)],
    ids=["None", "numpy", "list", "no_axes"],
)
def test_what_is_no_tensor(name: str, value: object, error: type[Exception]) -> None:
    arguments = {"q": Q, "k": Q, "v": Q, name: value}
    for chapter in (None, "02_tiled"):
        refused(lambda chapter=chapter: flash_attention(**arguments, chapter=chapter), error, f"^{name} ")
    refused(lambda: load_chapter(2).forward(**arguments), error, f"^{name} ")


@pytest.mark.parametrize("scale", ["x", [1.0], 1j, torch.tensor(0.1), True])
def test_what_is_no_scale(scale: object) -> None:
    for call in (flash_attention, load_chapter(2).forward):
        refused(lambda call=call: call(Q, Q, Q, softmax_scale=scale), TypeError, "^softmax_scale is a ")


def test_scales_that_fp32_does_not_hold() -> None:
    for scale in (10**400, float("nan"), -float("inf")):
        for call in (flash_attention, load_chapter(2).forward):
            refused(lambda s=scale, c=call: c(Q, Q, Q, softmax_scale=s), ValueError, "^softmax_scale is ")


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), 0.25])
def test_numbers_of_numpy_are_scales(scale: float) -> None:
    expected = load_chapter(2).forward(Q, Q, Q)[0]
    for out in (
        flash_attention(Q, Q, Q, softmax_scale=scale, chapter=2),
        load_chapter(2).forward(Q, Q, Q, softmax_scale=scale)[0],
    ):
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("flag", ["no", 1, None, torch.tensor(True)])
def test_what_is_neither_true_nor_false(flag: object) -> None:
    chapter = load_chapter(6)
    for name in ("is_causal", "deterministic"):
        words = f"^{name} is a {type(flag).__name__}; expected True or False"
        refused(lambda name=name: flash_attention(Q, Q, Q, **{name: flag}), TypeError, words)
        refused(lambda name=name: chapter.backward(Q, Q, Q, Q, Q, LSE, **{name: flag}), TypeError, words)
        refused(lambda name=name: chapter.workspace(**SIZES, **{name: flag}), TypeError, words)
        refused(lambda name=name: chapter.check(Q, Q, Q, Q, Q, LSE, **{name: flag}), TypeError, words)
    refused(lambda: chapter.forward(Q, Q, Q, is_causal=flag), TypeError, "^is_causal is a ")
    refused(lambda: chapter.forward(Q, Q, Q, return_row_stats=flag), TypeError, "^return_row_stats is a ")


def test_the_chapter_that_was_asked_for_is_named() -> None:
    """05 has no forward pass of its own; it is 05 that does not take 12 columns, too."""
    q = torch.zeros(1, 1, 4, 12)
    refused(lambda: load_chapter(5).forward(q, q, q), ValueError, "head_dim 12 is not supported by 05_fp32")


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize("name", [True, 1.0, None])
def test_what_names_no_chapter(name: object) -> None:
    refused(lambda: load_chapter(name), TypeError, "^name is a ")


@pytest.mark.parametrize(
    "source",
    ["", "int main() {}", "// cudaError_t launch_backward(\n", "cudaError_t launch_bakward(int) {}"],
    ids=["empty", "main", "comment", "misspelt"],
)
def test_a_file_without_a_launcher(source: str, tmp_path: Path) -> None:
    """Or the forward pass of another chapter would run in its place, and be found correct."""
    (tmp_path / "x.cu").write_text(source)
    refused(lambda: load_kernel(tmp_path / "x.cu"), ValueError, "neither launch_forward nor launch_backward")


@pytest.mark.parametrize("between", [" ", "  ", "\n"])
@pytest.mark.parametrize("indented", ["", "  "])
def test_a_launcher_is_found_however_it_is_laid_out(between: str, indented: str, tmp_path: Path) -> None:
    text = f"{indented}cudaError_t{between}launch_backward (const BackwardParams& params)"
    (tmp_path / "x.cu").write_text(text)
    assert load_kernel(tmp_path / "x.cu").has_backward


def test_what_is_no_file(tmp_path: Path) -> None:
    refused(lambda: load_kernel(tmp_path), FileNotFoundError, "is no file")
    refused(lambda: load_kernel(tmp_path / "x.cu"), FileNotFoundError, "does not exist")


@pytest.mark.parametrize("models", [8, (8,), (8, "6"), "8.6", (8, 6, 1), (8.0, 6), [8, 6]])
def test_what_is_no_compute_capability(models: object) -> None:
    refused(lambda: load_chapter(11, cpu_models=models), TypeError, "^cpu_models is .* expected the two ints")


@pytest.mark.parametrize(("chapter", "models"), [(11, (7, 5)), (11, (-1, 0)), (12, (8, 0)), (12, (10, 0))])
def test_compute_capabilities_that_a_chapter_does_not_run_on(chapter: int, models: tuple[int, int]) -> None:
    words = r"^cpu_models is .* needs compute capability "
    refused(lambda: load_chapter(chapter, cpu_models=models), ValueError, words)


# ---------------------------------------------------------------- sizes and options


@pytest.mark.parametrize("name", ["batch", "num_heads", "seqlen_q", "seqlen_k"])
def test_sizes_that_no_workspace_has(name: str) -> None:
    chapter = load_chapter(5)
    for size, error in ((-5, ValueError), (0, ValueError), (2**40, ValueError), (5.5, TypeError)):
        refused(lambda size=size: chapter.workspace(**SIZES | {name: size}), error, f"^{name} is ")


def test_the_workspace_of_too_many_heads_and_of_impossible_options() -> None:
    chapter = load_chapter(4)
    many = SIZES | {"batch": 2**20, "num_heads": 2**20}
    refused(lambda: chapter.workspace(**many), ValueError, r"^batch \* num_heads is ")
    refused(lambda: chapter.workspace(**SIZES, deterministic=True), ValueError, "^deterministic is True")


def test_options_of_the_checker() -> None:
    chapter = load_chapter(2)
    for value, error in ((0, ValueError), (-1, ValueError), ("x", TypeError)):
        refused(lambda value=value: chapter.check(Q, Q, Q, max_grid_y=value), error, "^max_grid_y is ")
    for level in (2, "-Ofoo"):
        refused(lambda level=level: chapter.check(Q, Q, Q, optimize=level), ValueError, "^optimize is ")


def test_what_cannot_be_compared() -> None:
    for value in (None, {"out": Q}):
        refused(lambda value=value: compare(value, Q, Q, Q, Q), TypeError, "^result is a ")
    refused(lambda: reference_gradients(Q.numpy(), Q, Q, Q), TypeError, "^q is a ndarray")
    refused(lambda: reference_gradients(Q, Q[..., :8], Q, Q), ValueError, "^k has head_dim 8")
    refused(lambda: reference_gradients(Q, Q, Q, Q[:, :, :4]), ValueError, "^dout has shape")


def test_sizes_that_have_no_tiles() -> None:
    refused(lambda: count_tiles(8, 8, 0, 16, True), ValueError, "^block_m is 0")
    refused(lambda: count_tiles(-8, 8, 16, 16, True), ValueError, "^seqlen_q is -8")
    assert count_tiles(0, 8, 16, 16, True).total == 0
