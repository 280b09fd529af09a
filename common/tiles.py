"""Which tiles of S a causal backward pass visits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.validation import check_size


@dataclass(frozen=True)
class TileCount:
    """Tiles of [block_m, block_n] elements of one head's S [seqlen_q, seqlen_k]."""

    total: int
    visited: int  # loaded and computed
    masked: int  # of those, the ones with an element that is hidden or past an end


def count_tiles(seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, is_causal: bool) -> TileCount:
    """Exactly the tiles that chapters from 07 on visit, in O(seqlen_k / block_n).

    The mask is aligned bottom-right: query i sees keys j <= i + seqlen_k − seqlen_q. For equal lengths N and
    square tiles of b the visited share is (N / b + 1) / (2 N / b), which tends to one half (book §16.8).
    Raises TypeError or ValueError for sizes that no kernel takes.
    """
    for name, size, least in (
        ("seqlen_q", seqlen_q, 0), ("seqlen_k", seqlen_k, 0), ("block_m", block_m, 1), ("block_n", block_n, 1)
    ):  # fmt: skip
        check_size(name, size, least)
    num_m, num_n = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    offset = seqlen_k - seqlen_q
    visited = unmasked = 0
    for n in range(num_n):
        first_key, last_key = n * block_n, (n + 1) * block_n - 1
        first_m = max(first_key - offset, 0) // block_m if is_causal else 0
        visited += max(num_m - first_m, 0)
        if last_key >= seqlen_k:
            continue  # ragged: every tile of this column is masked
        # Unmasked are the whole tiles of queries whose first query already sees the last key.
        first_free = -(-max(last_key - offset, 0) // block_m) if is_causal else 0
        unmasked += max(seqlen_q // block_m - first_free, 0)
    return TileCount(num_m * num_n, visited, visited - unmasked)


class TileState(Enum):
    """What becomes of one tile of S."""

    WHOLE = "visited, whole"
    MASKED = "visited, masked"  # an element is hidden or past an end
    SKIPPED = "skipped"  # every element is hidden


def tile_states(
    seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, is_causal: bool
) -> list[list[TileState]]:
    """The state of each tile, [num_m_blocks][num_n_blocks]: what ``count_tiles`` counts."""
    offset = seqlen_k - seqlen_q

    def state(first_query: int, first_key: int) -> TileState:
        last_query, last_key = first_query + block_m - 1, first_key + block_n - 1
        if is_causal and first_key > last_query + offset:
            return TileState.SKIPPED
        hidden = is_causal and last_key > first_query + offset
        ragged = last_query >= seqlen_q or last_key >= seqlen_k
        return TileState.MASKED if hidden or ragged else TileState.WHOLE

    return [
        [state(first_query, first_key) for first_key in range(0, seqlen_k, block_n)]
        for first_query in range(0, seqlen_q, block_m)
    ]
