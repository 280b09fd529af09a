import math


def extra_bytes(
    batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, element_bytes: int, block_m: int
) -> int:
    """Bytes that the kernel without lse requests beyond those of the chapter."""
    ### BEGIN SOLUTION
    query_tiles = math.ceil(seqlen_q / block_m)
    of_q = seqlen_q * head_dim * element_bytes
    of_k = query_tiles * seqlen_k * head_dim * element_bytes
    written_statistic = 4 * seqlen_q
    return batch * num_heads * (of_q + of_k + written_statistic)
    ### END SOLUTION


def extra_products(batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int) -> int:
    """Floating-point operations of recomputing S once more, without its softmax."""
    ### BEGIN SOLUTION
    return batch * num_heads * 2 * seqlen_q * seqlen_k * head_dim
    ### END SOLUTION
