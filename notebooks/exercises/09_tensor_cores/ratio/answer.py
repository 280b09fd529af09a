import torch


def flops_ratio() -> float:
    """Matrix operations of backward over those of forward."""
    ### BEGIN SOLUTION
    return 5 / 2
    ### END SOLUTION


def time_ratios(rows: list[dict]) -> torch.Tensor:
    """[rows], backward time over forward time."""
    ### BEGIN SOLUTION
    return torch.tensor([row["backward_seconds"] / row["forward_seconds"] for row in rows])
    ### END SOLUTION


def kept_efficiency(rows: list[dict]) -> torch.Tensor:
    """[rows], operations per second of backward over those of forward."""
    ### BEGIN SOLUTION
    return flops_ratio() / time_ratios(rows)
    ### END SOLUTION
