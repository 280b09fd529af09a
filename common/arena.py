"""Memory that a check watches: copies of tensors, far enough apart that an overrun is seen."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

_PAGE = 256
_MAX_BYTES = 1 << 31
# What the checked device knows of a region: 1, it is written before the launch; 2, it may only be read.
ROLE_FLAGS = {"input": 1 | 2, "output": 0, "scratch": 0}
_CHECKS = threading.Lock()  # the checked device holds one check at a time


@dataclass(frozen=True)
class Memory:
    """A tensor in the arena of a check. role: "input", "output", or "scratch"."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    role: str
    offset: int  # in the arena, bytes

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def index(self, offset: int) -> tuple[int, ...] | None:
        """The element that holds the byte ``offset``; None between elements or outside."""
        element = offset // self.dtype.itemsize
        index = [0] * len(self.shape)
        order = sorted(range(len(self.shape)), key=lambda axis: (-self.strides[axis], self.shape[axis]))
        for axis in order:
            if self.strides[axis] > 0 and self.shape[axis] > 1:
                index[axis], element = divmod(element, self.strides[axis])
        inside = element == 0 and all(0 <= i < n for i, n in zip(index, self.shape, strict=True))
        return tuple(index) if inside else None


class Arena:
    """One stretch of memory that holds copies of tensors, so far apart that an overrun lands in nothing."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []
        self._sources: list[Tensor | None] = []
        self._bytes = _PAGE
        self._buffer: Tensor | None = None

    def add(self, name: str, tensor: Tensor, role: str) -> int:
        """Reserves space for a tensor like this one, with its strides and alignment; returns its number."""
        skew = tensor.storage_offset() * tensor.dtype.itemsize % _PAGE if role == "input" else 0
        memory = Memory(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, role, 0)
        row = memory.strides[-2] if len(memory.strides) > 1 else 1
        gap = min(max(1 << 16, 64 * row * tensor.dtype.itemsize), 1 << 22)
        offset = _round_up(self._bytes + gap) + skew
        size = memory.span * tensor.dtype.itemsize
        self._bytes = _round_up(offset + size + gap)
        if self._bytes > _MAX_BYTES:
            raise ValueError(
                f"a check holds 2 GiB of tensors at most, and {name} goes past that; check a smaller problem"
            )
        self._memories.append(Memory(name, memory.shape, memory.strides, memory.dtype, memory.role, offset))
        self._sources.append(tensor if role == "input" else None)
        return len(self._memories) - 1

    def allocate(self) -> list[Tensor]:
        """The tensors, in order of their numbers: inputs copied, everything else poison (NaN)."""
        raw = torch.full((self._bytes + 4096,), 0xFF, dtype=torch.uint8)
        start = -raw.data_ptr() % 4096
        self._buffer = raw[start : start + self._bytes]
        return [self._view(i) for i in range(len(self._memories))]

    def _view(self, number: int) -> Tensor:
        memory, source = self._memories[number], self._sources[number]
        size = memory.span * memory.dtype.itemsize
        assert self._buffer is not None
        flat = self._buffer[memory.offset : memory.offset + size].view(torch.uint8)
        view = _as_dtype(flat, memory.dtype).as_strided(memory.shape, memory.strides)
        if source is not None:
            # Not copy_: the elements of an expanded tensor share memory.
            span = source.as_strided((memory.span,), (1,), source.storage_offset())
            inside = _valid_elements(memory)
            target = _as_dtype(flat, memory.dtype)
            target.copy_(span if inside is None else torch.where(inside.bool(), span, target))
        return view

    @contextlib.contextmanager
    def watched(self, runtime: ctypes.CDLL, parts: dict[int, Sequence[Memory]]) -> Iterator[Log]:
        """Checks what is launched inside the ``with``. ``parts`` splits a scratch tensor into its parts."""
        assert self._buffer is not None, "allocate() first"
        log = Log()
        base = self._buffer.data_ptr()
        with _CHECKS:
            runtime.cpu_device_check_begin(base, self._bytes)
            try:
                for memory, valid in self.regions(parts):
                    runtime.cpu_device_check_region(
                        memory.name.encode(),
                        base + memory.offset,
                        memory.span * memory.dtype.itemsize,
                        memory.dtype.itemsize,
                        None if valid is None else valid.data_ptr(),
                        ROLE_FLAGS[memory.role],
                    )
                    log.memories.append(memory)
                yield log
            finally:
                log.text = runtime.cpu_device_check_end().decode()

    @property
    def buffer(self) -> Tensor:
        """All of it, as bytes. ``allocate`` makes it."""
        assert self._buffer is not None, "allocate() first"
        return self._buffer

    def regions(self, parts: dict[int, Sequence[Memory]]) -> Iterator[tuple[Memory, Tensor | None]]:
        """What the checker is told of: each tensor, or the parts of one, and which of its elements exist.

        The second is None for all, or one byte per element of the span.
        """
        for number, whole in enumerate(self._memories):
            for memory in parts.get(number, [whole]):
                yield memory, _valid_elements(memory)

    def part(self, number: int, name: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Memory:
        """A dense part of tensor ``number``, ``offset`` bytes from its start."""
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return Memory(name, shape, strides, dtype, "scratch", self._memories[number].offset + offset)


@dataclass
class Log:
    """What the checked device wrote of a check, and the tensors that its records number from 1."""

    memories: list[Memory] = field(default_factory=list)
    text: str = ""


def _round_up(n: int) -> int:
    return -(-n // _PAGE) * _PAGE


def _as_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    if flat.storage_offset() % dtype.itemsize == 0:
        return flat.view(dtype)
    raise ValueError(f"a tensor of {dtype} starts at a byte that is not a multiple of {dtype.itemsize}")


def _valid_elements(memory: Memory) -> Tensor | None:
    """One byte per element of the span, 0 in the gaps of a strided tensor; None if there are none."""
    if prod(memory.shape) >= memory.span:
        return None
    valid = torch.zeros(memory.span, dtype=torch.uint8)
    valid.as_strided(memory.shape, memory.strides).fill_(1)
    return valid
