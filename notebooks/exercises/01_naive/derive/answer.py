import torch


def ds_of(p: torch.Tensor, dp: torch.Tensor) -> torch.Tensor:
    """dS [Nq, Nk] of P and dP [Nq, Nk]."""
    ### BEGIN SOLUTION
    return p * (dp - (p * dp).sum(-1, keepdim=True))
    ### END SOLUTION


def delta_from_p(p: torch.Tensor, dp: torch.Tensor) -> torch.Tensor:
    """D [Nq] of P and dP [Nq, Nk]."""
    ### BEGIN SOLUTION
    return (p * dp).sum(-1)
    ### END SOLUTION


def delta_from_out(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """D [Nq] of O and dO [Nq, d]."""
    ### BEGIN SOLUTION
    return (out * dout).sum(-1)
    ### END SOLUTION
