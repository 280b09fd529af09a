"""How many tiles of S a causal backward pass visits."""

from __future__ import annotations

from dataclasses import dataclass


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
    """
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
