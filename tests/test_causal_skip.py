"""Which tiles the causal skip visits and which it masks, counted in the kernel itself."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import backward_chapters, draw, mostly_slow, nearest_build, run_and_check

from common import Chapter, load_kernel
from common.formulas import Problem
from common.reference import visible_mask
from common.tiles import TileCount, count_tiles

SKIPPING = [info for info in backward_chapters() if "bool no_mask = " in info.kernel.read_text()]

# Inserted behind the line that decides whether a tile needs its mask; a device function may use a host
# variable on the CPU device.
COUNTER = """
extern "C" { int counted_tiles[2]; }
"""
COUNT = """
  if (threadIdx.x == 0) {
    atomicAdd(&counted_tiles[0], 1);
    if (!no_mask) atomicAdd(&counted_tiles[1], 1);
  }
"""


@pytest.fixture(
    scope="module",
    params=mostly_slow([info.name for info in SKIPPING], lambda name: name == SKIPPING[-1].name),
)
def counting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chapter:
    """A chapter that counts the tiles it computes."""
    info = next(info for info in SKIPPING if info.name == request.param)
    source = info.kernel.read_text()
    start = source.index("  const bool no_mask = ")
    end = source.index("\n", start)
    source = source[:end] + COUNT + source[end:]
    source = source.replace("\nnamespace {\n", COUNTER + "\nnamespace {\n", 1)
    path = tmp_path_factory.mktemp("counting") / f"{info.name}.cu"
    path.write_text(source)
    chapter = load_kernel(path)
    chapter.info = replace(info, kernel=path)
    return chapter


def counted(chapter: Chapter, dtype: torch.dtype, head_dim: int) -> ctypes.Array:
    library = ctypes.CDLL(str(chapter.library(dtype, head_dim).path))
    return (ctypes.c_int * 2).in_dll(library, "counted_tiles")


def by_brute_force(seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, is_causal: bool) -> TileCount:
    mask = visible_mask(seqlen_q, seqlen_k, is_causal)
    total = visited = masked = 0
    for m in range(0, seqlen_q, block_m):
        for n in range(0, seqlen_k, block_n):
            tile = mask[m : m + block_m, n : n + block_n]
            total += 1
            visited += bool(tile.any())
            masked += bool(tile.any()) and not (tile.all() and tile.shape == (block_m, block_n))
    return TileCount(total, visited, masked)


# The lengths differ by every kind of remainder: on which side of a tile's edge the diagonal falls is what a
# comparison that is off by one gets wrong.
SHAPES = [(1, 1), (64, 64), (65, 65), (33, 97), (97, 33), (128, 40), (5, 200), (200, 5), (31, 32)]
SHAPES += [(40, 40 + difference) for difference in (-1, 1, 15, 16, 17, 30, 31, 32, 33)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("blocks", [(32, 32), (16, 32), (32, 16), (7, 5)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_count_is_that_of_the_mask(shape: tuple[int, int], blocks: tuple[int, int], is_causal: bool) -> None:
    assert count_tiles(*shape, *blocks, is_causal) == by_brute_force(*shape, *blocks, is_causal)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_kernel_visits_exactly_these_tiles(counting: Chapter, head_dim: int) -> None:
    dtype, head_dim = nearest_build(counting, torch.float32, head_dim)
    counts = counted(counting, dtype, head_dim)
    problem = Problem(1, 2, 1, 1, head_dim, dtype)
    block_m, block_n = (counting.info.formulas("backward").symbol(name, problem) for name in ("B_r", "B_c"))
    for seqlen_q, seqlen_k in SHAPES:
        for is_causal in (False, True):
            inputs = draw(1, 2, seqlen_q, seqlen_k, chapter=counting, head_dim=head_dim)
            counts[0] = counts[1] = 0
            run_and_check(counting, inputs, is_causal=is_causal)
            expected = count_tiles(seqlen_q, seqlen_k, block_m, block_n, is_causal)
            assert (counts[0], counts[1]) == (2 * expected.visited, 2 * expected.masked)


def test_work_tends_to_half() -> None:
    shares = [
        count_tiles(n, n, 32, 32, True).visited / count_tiles(n, n, 32, 32, True).total for n in (128, 4096)
    ]
    assert shares == [(4 + 1) / 8, (128 + 1) / 256]


def test_there_are_chapters_to_count() -> None:
    assert {Path(info.kernel).parent.name for info in SKIPPING} >= {"07_causal_skip"}
