"""Inputs for the ladder and the tests: random ones, and ones from a real attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Inputs:
    """q, dout [B, H, Nq, d] and k, v [B, H, Nk, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def random_inputs(
    batch: int,
    num_heads: int,
    seqlen_q: int,
    head_dim: int,
    *,
    seqlen_k: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Standard normal q, k and v, and a dout of mean 1/4: a mean of zero would hide a missing delta.

    Drawn on the CPU, so that a seed means the same numbers on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k

    def draw(seqlen: int) -> Tensor:
        return torch.randn(batch, num_heads, seqlen, head_dim, generator=generator)

    tensors = draw(seqlen_q), draw(seqlen_k), draw(seqlen_k), draw(seqlen_q) + 0.25
    return Inputs(*(tensor.to(device=device, dtype=dtype) for tensor in tensors))


def default_text() -> str:
    """A text that comes with Python: its own language reference, some 600 KB."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


class _CharacterModel(nn.Module):
    """Bytes → embedding → one attention layer → logits of the next byte."""

    def __init__(self, num_heads: int, head_dim: int, max_seqlen: int, is_causal: bool) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.num_heads, self.is_causal = num_heads, is_causal
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(max_seqlen, width))
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.head = nn.Linear(width, 256)
        self.seen: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        self.seen = (q, k, v, out)
        return self.head(x + self.projection(out.transpose(1, 2).flatten(2)))


def text_inputs(
    text: str,
    batch: int,
    num_heads: int,
    seqlen: int,
    head_dim: int,
    *,
    is_causal: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    training_steps: int = 40,
) -> Inputs:
    """q, k, v and dout of the attention layer of a small character model, run over ``text``.

    The model is trained for a few steps first, on the CPU, so that attention is no longer uniform. dout is
    the gradient of the summed loss, scaled to root mean square 1 as a loss scaler would, or half precision
    would flush it to zero.

    Raises ValueError if the text is shorter than seqlen + 1 bytes.
    """
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    if len(data) < seqlen + 1:
        raise ValueError(
            f"the text has {len(data)} bytes; a sequence of {seqlen} needs at least {seqlen + 1}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _CharacterModel(num_heads, head_dim, seqlen, is_causal)

        def loss(rows: int, length: int) -> Tensor:
            starts = torch.randint(len(data) - length, (rows, 1))
            windows = data[starts + torch.arange(length + 1)]
            logits = model(windows[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")

        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        length = min(seqlen, 128)
        for _ in range(training_steps):
            optimizer.zero_grad()
            (loss(8, length) / (8 * length)).backward()
            optimizer.step()
        total = loss(batch, seqlen)
        q, k, v, out = model.seen
        (dout,) = torch.autograd.grad(total, out)
    dout = dout / dout.square().mean().sqrt()
    return Inputs(*(t.detach().to(device=device, dtype=dtype).contiguous() for t in (q, k, v, dout)))


def read_text(path: str | None) -> tuple[str, str]:
    """(text, where it is from): a file, or the text that comes with Python."""
    if path is None or path == "":
        return default_text(), "Python's language reference (pydoc_data.topics)"
    return Path(path).read_text(encoding="utf-8", errors="replace"), path
