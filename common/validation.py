"""Checks of arguments, before anything is launched.

Every message names the argument, what came and what is accepted. Only metadata is read, so the checks
also run on fake tensors.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# The kernels compute in fp32.
_LARGEST_SCALE = torch.finfo(torch.float32).max
# Sizes are 32-bit in the kernels, and a tile may reach past the end.
MAX_SIZE = 2**31 - 1024


def default_scale(softmax_scale: float | None, head_dim: int) -> float:
    """``softmax_scale``, or 1/√head_dim for None. Raises TypeError, or ValueError when it is not finite."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(
            f"softmax_scale is a {type(softmax_scale).__name__}; expected a finite number or None"
        )
    if not abs(softmax_scale) <= _LARGEST_SCALE:  # NaN is not, either
        raise ValueError(
            f"softmax_scale is {softmax_scale}; expected a number that is finite in fp32, or None"
        )
    return float(softmax_scale)


def check_flags(**flags: bool) -> None:
    """Raises TypeError for what is neither True nor False: "no" would count as true."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} is a {type(value).__name__}; expected True or False")


def check_tensors(**tensors: Tensor) -> None:
    """Checks that each is a dense tensor with the four axes of q, k and v. Raises TypeError or ValueError."""
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, 4, "[batch, num_heads, seqlen, head_dim]")


def check_size(name: str, size: object, least: int) -> None:
    """Checks a size that kernels keep in 32 bits. Raises TypeError for no int, ValueError for its value."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} is a {type(size).__name__}; expected an int")
    if not least <= size <= MAX_SIZE:
        raise ValueError(f"{name} is {size}; expected {least} to {MAX_SIZE}")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _check_tensor(name: str, tensor: object, ndim: int, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a tensor {layout}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} has shape {_shape(tensor)}; expected {ndim} axes {layout}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; expected a strided (dense) tensor")


def _check_same(
    what: str, first_name: str, first: object, name: str, value: object, error: type[Exception]
) -> None:
    if value != first:
        raise error(f"{name} has {what} {value}, but {first_name} has {first}; they must be equal")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Checks q [B, H, Nq, d] and k, v [B, H, Nk, d]: one dtype of ``dtypes``, one device, fitting shapes.

    Raises TypeError for dtypes and non-tensors, ValueError for shapes and devices.
    """
    check_tensors(q=q, k=k, v=v)
    if q.dtype not in dtypes:
        accepted = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"q has dtype {q.dtype}; accepted: {accepted}")
    for name, tensor in (("k", k), ("v", v)):
        _check_same("dtype", "q", q.dtype, name, tensor.dtype, TypeError)
        _check_same("device", "q", q.device, name, tensor.device, ValueError)
        for axis, what in ((0, "batch"), (3, "head_dim")):
            if tensor.shape[axis] != q.shape[axis]:
                raise ValueError(
                    f"{name} has {what} {tensor.shape[axis]}, but q has {q.shape[axis]}; they must be equal "
                    f"(q {_shape(q)}, {name} {_shape(tensor)})"
                )
        if tensor.shape[1] != q.shape[1]:
            raise ValueError(
                f"{name} has num_heads {tensor.shape[1]}, but q has {q.shape[1]}; fewer key heads than query "
                f"heads (grouped-query attention) are not supported (q {_shape(q)}, {name} {_shape(tensor)})"
            )
    if k.shape[2] != v.shape[2]:
        raise ValueError(
            f"v has seqlen {v.shape[2]}, but k has {k.shape[2]}; they must be equal "
            f"(k {_shape(k)}, v {_shape(v)})"
        )
    for name, size in (
        ("batch * num_heads", q.shape[0] * q.shape[1]),
        ("seqlen_q", q.shape[2]),
        ("seqlen_k", k.shape[2]),
    ):
        if size > MAX_SIZE:
            raise ValueError(f"{name} is {size}; at most {MAX_SIZE} is supported")


def check_like(like: str, reference: Tensor, **tensors: Tensor) -> None:
    """Checks that tensors have the dtype, device and shape of the one that is called ``like``."""
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, 4, f"like {like}, [batch, num_heads, seqlen, head_dim]")
        _check_same("dtype", like, reference.dtype, name, tensor.dtype, TypeError)
        _check_same("device", like, reference.device, name, tensor.device, ValueError)
        _check_same("shape", like, tuple(reference.shape), name, tuple(tensor.shape), ValueError)


def check_saved(q: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> None:
    """Checks what backward gets besides q, k, v: out and dout like q, lse [B, H, Nq] in float32."""
    check_like("q", q, out=out, dout=dout)
    _check_tensor("lse", lse, 3, "[batch, num_heads, seqlen_q]")
    if lse.dtype != torch.float32:
        raise TypeError(f"lse has dtype {lse.dtype}; expected torch.float32")
    _check_same("device", "q", q.device, "lse", lse.device, ValueError)
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse has shape {_shape(lse)}; expected {tuple(q.shape[:3])}, q's without head_dim")


def check_device(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless the tensor holds data on a CPU or a CUDA GPU."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on device {tensor.device}; expected a CPU or CUDA tensor with data")
