"""Finding chapters, and running them.

A chapter is a folder ``chapters/NN_name`` with a ``kernel.cu`` and a ``chapter.toml``. Nothing lists the
chapters: a new folder is found by being there.
"""

from __future__ import annotations

import functools
import re
import time
import tomllib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import jit, validation
from common.arena import Arena
from common.formulas import Formulas
from common.report import Report, read_report

CHAPTERS = jit.REPO_ROOT / "chapters"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SCHEDULES = {None: -2, "in_order": -1}


@dataclass(frozen=True)
class ChapterInfo:
    """What ``chapter.toml`` says of a chapter.

    ``deterministic`` is "always" (the same bits on every run), "never", or "flag" (when asked for).
    ``dq_rounded_every``: dQ is summed in its own dtype and rounded after every so many keys; see ``compare``.
    ``row_alignment``: bytes of which the address of every row is a multiple, because the kernel loads so many
    at once; an input that is not laid out so is copied first.
    ``max_compute_capability``: the last one that has the instructions; None if later ones keep them.
    ``traffic``: formulas as text; ``formulas`` reads them.
    """

    name: str
    kernel: Path
    title: str
    idea: str
    book: tuple[str, ...] = ()
    builds_on: str | None = None
    dtypes: tuple[torch.dtype, ...] = tuple(_DTYPES.values())
    head_dims: tuple[int, ...] = tuple(range(16, 129, 8))
    min_compute_capability: tuple[int, int] = (7, 5)
    max_compute_capability: tuple[int, int] | None = None
    deterministic: str = "always"
    dq_rounded_every: int | None = None
    row_alignment: int = 1
    traffic: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def number(self) -> int | None:
        """NN of NN_name; None for a kernel outside ``chapters/``."""
        match = re.match(r"(\d+)_", self.name)
        return int(match.group(1)) if match else None

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether GPUs of this compute capability have the instructions."""
        is_late = self.max_compute_capability is not None and capability > self.max_compute_capability
        return capability >= self.min_compute_capability and not is_late

    def formulas(self, pass_: str) -> Formulas | None:
        """The traffic of the "forward" or "backward" pass in symbols; None if the chapter gives none."""
        return Formulas(self.traffic, pass_) if pass_ in self.traffic else None


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


_parsed = functools.lru_cache(maxsize=64)(tomllib.loads)  # loading a chapter reads them all


def _read_info(folder: Path) -> ChapterInfo:
    path = folder / "chapter.toml"
    try:
        data = _parsed(path.read_text())
        head_dim = data["head_dim"]
        info = ChapterInfo(
            name=folder.name,
            kernel=folder / "kernel.cu",
            title=data["title"],
            idea=data["idea"],
            book=tuple(data["book"]),
            builds_on=data.get("builds_on"),
            dtypes=tuple(_DTYPES[name] for name in data["dtypes"]),
            head_dims=tuple(range(head_dim["min"], head_dim["max"] + 1, head_dim["multiple_of"])),
            min_compute_capability=_capability(data["min_compute_capability"]),
            max_compute_capability=(
                _capability(data["max_compute_capability"]) if "max_compute_capability" in data else None
            ),
            deterministic=data["deterministic"],
            dq_rounded_every=data.get("dq_rounded_every"),
            row_alignment=data.get("row_alignment", 1),
            traffic=data.get("traffic", {}),
        )
    except (KeyError, ValueError, TypeError) as error:  # TOMLDecodeError is a ValueError
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if info.deterministic not in ("always", "never", "flag"):
        raise ValueError(f"{path}: deterministic is {info.deterministic!r}; expected always, never or flag")
    return info


def list_chapters() -> list[ChapterInfo]:
    """All chapters, in order."""
    folders = sorted(path.parent for path in CHAPTERS.glob("[0-9][0-9]_*/chapter.toml"))
    return [_read_info(folder) for folder in folders]


@dataclass(frozen=True)
class WorkspacePart:
    """One named piece of scratch memory that a launch needs."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the workspace
    bytes: int


@dataclass(frozen=True)
class Workspace:
    """The scratch memory of a launch."""

    parts: tuple[WorkspacePart, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the parts, without the padding between them."""
        return sum(part.bytes for part in self.parts)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffer that holds them."""
        return max((part.offset + part.bytes for part in self.parts), default=0)


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch, as the CPU device saw it."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int  # dynamic shared memory of a block


_open_chapters: dict[str, Chapter] = {}  # by key
_plain_chapters: dict[str, Chapter] = {}  # by name: the last that was loaded without options


class Chapter:
    """A loaded chapter. It runs the sources as they were when it was loaded; load it again after an edit.

    Tensors decide where it runs: CUDA tensors on their GPU and its current stream, CPU tensors on the CPU
    device. Builds happen on first use, one for each dtype and head_dim.

    Args:
        info: the chapter.
        schedule: of the CPU device. None spreads the blocks over all cores. "in_order" and any integer
            seed run on one thread and reproduce every bit; a seed shuffles blocks and threads.
        cpu_fallback: let CUDA tensors run on the CPU device, with a warning, where the GPU cannot: no
            toolkit to compile with, or a compute capability that is not one of the chapter's.
        cpu_models: (major, minor) of the compute capability that the CPU device models, where tiles depend on
            it; 9.0 by default.
    """

    def __init__(
        self,
        info: ChapterInfo,
        *,
        schedule: str | int | None = None,
        cpu_fallback: bool = False,
        cpu_models: tuple[int, int] | None = None,
    ) -> None:
        if schedule not in _SCHEDULES and (
            isinstance(schedule, bool) or not isinstance(schedule, int) or schedule < 0
        ):
            raise ValueError(f"schedule is {schedule!r}; expected None, 'in_order' or a seed >= 0")
        _check_cpu_models(cpu_models, info)
        if not info.kernel.is_file():
            raise FileNotFoundError(f"{info.kernel} does not exist")
        self.info = info
        self.schedule = schedule
        self.cpu_fallback = cpu_fallback
        self.cpu_models = cpu_models
        self.digest = jit.source_digest(info.kernel)
        # Of the file as it is now, like the digest: a later edit is another chapter.
        self.has_backward = _defines(info.kernel, "launch_backward")
        self.last_launches: list[KernelLaunch] = []  # of the last pass on the CPU device
        self._libraries: dict[tuple[torch.dtype, int, torch.device], jit.KernelLibrary] = {}
        self._forward_chapter: Chapter | None = None
        # How flash_attention's operator, which takes only plain values, refers to this object.
        self.key = f"{info.name}@{self.digest}:{schedule}:{cpu_fallback}:{cpu_models}"
        _open_chapters[self.key] = self
        has_options = cpu_fallback or schedule is not None or cpu_models is not None
        # A copy elsewhere may have the same name.
        if not has_options and info.kernel.is_relative_to(CHAPTERS):
            _plain_chapters[info.name] = self

    @property
    def name(self) -> str:
        """NN_name, or the file's stem for a kernel outside ``chapters/``."""
        return self.info.name

    def __repr__(self) -> str:
        return f"<Chapter {self.name}: {self.info.title}>"

    # ------------------------------------------------------------------ builds

    def library(
        self, dtype: torch.dtype, head_dim: int, device: torch.device | str = "cpu"
    ) -> jit.KernelLibrary:
        """The build for one dtype, head_dim and device, made on first use.

        Raises TypeError or ValueError for what the chapter does not support, and ``BuildError``.
        """
        device = torch.device(device)
        self._check_supported(dtype, head_dim)
        key = (dtype, head_dim, device)
        if key not in self._libraries:
            self._libraries[key] = jit.build(
                self.info.kernel, dtype, head_dim, device, self.digest, cpu_models=self.cpu_models
            )
        return self._libraries[key]

    def _check_supported(self, dtype: torch.dtype, head_dim: int) -> None:
        if dtype not in self.info.dtypes:
            accepted = ", ".join(str(d) for d in self.info.dtypes)
            raise TypeError(f"dtype {dtype} is not supported by {self.name}; accepted: {accepted}")
        if head_dim not in self.info.head_dims:
            dims = self.info.head_dims
            raise ValueError(
                f"head_dim {head_dim} is not supported by {self.name}; accepted: "
                f"{', '.join(str(d) for d in dims)}"
            )

    def check_deterministic(self, asked: bool) -> None:
        """Raises ValueError if the same bits on every run are asked for and the chapter cannot give them."""
        if asked and self.info.deterministic == "never":
            raise ValueError(
                f"deterministic is True, but {self.name} adds in an order that varies from run to run"
            )

    def gpu_problem(self, device: torch.device) -> str | None:
        """Why this chapter cannot run on a CUDA device, or None if it can, as on every other device."""
        if device.type != "cuda":
            return None
        if problem := jit.cuda_problem():
            return problem
        capability = jit.compute_capability(device)
        if self.info.runs_on(capability):
            return None
        first, last = self.info.min_compute_capability, self.info.max_compute_capability
        needed = f"{first[0]}.{first[1]}"
        if last is not None:
            needed += " and no other" if last == first else f" to {last[0]}.{last[1]}"
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, {self.name} needs {needed}"
        )

    def _must_move_to_cpu(self, device: torch.device) -> bool:
        problem = self.gpu_problem(device)
        if problem is None:
            return False
        if not self.cpu_fallback:
            raise RuntimeError(
                f"{self.name} cannot run on {device}: {problem}. Pass CPU tensors, or load the chapter with "
                "cpu_fallback=True."
            )
        warnings.warn(f"{self.name} runs on the CPU device instead of {device}: {problem}", stacklevel=3)
        return True

    # ------------------------------------------------------------------ running

    @property
    def forward_chapter(self) -> Chapter:
        """The chapter whose forward pass this one uses: its own, or the nearest it builds on."""
        if self._forward_chapter is None:
            chapters = {chapter.name: chapter for chapter in list_chapters()}
            first = next(iter(chapters.values()))
            info = self.info
            while not _defines(info.kernel, "launch_forward"):
                # A kernel of the reader's own builds on nothing; it takes the forward pass of chapter 00.
                info = chapters[info.builds_on] if info.builds_on is not None else first
            same = info is self.info
            self._forward_chapter = (
                self
                if same
                else Chapter(
                    info,
                    schedule=self.schedule,
                    cpu_fallback=self.cpu_fallback,
                    cpu_models=self.cpu_models,
                )
            )
        return self._forward_chapter

    def workspace(
        self,
        *,
        batch: int,
        num_heads: int,
        seqlen_q: int,
        seqlen_k: int | None = None,
        head_dim: int,
        dtype: torch.dtype,
        is_causal: bool = False,
        deterministic: bool = False,
        device: torch.device | str = "cpu",
    ) -> Workspace:
        """The scratch memory that ``backward`` (``forward``, if the chapter has no backward) allocates.

        ``seqlen_k`` defaults to ``seqlen_q``. Raises TypeError or ValueError as ``backward`` does.
        """
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        sizes = {"batch": batch, "num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        for name, size in sizes.items():
            validation.check_size(name, size, least=1)
        validation.check_size("batch * num_heads", batch * num_heads, least=1)
        validation.check_flags(is_causal=is_causal, deterministic=deterministic)
        if self.has_backward:
            self.check_deterministic(deterministic)
        library = self.library(dtype, head_dim, device)
        return _workspace(
            library.name,
            self.has_backward,
            (batch, num_heads, num_heads, seqlen_q, seqlen_k),
            is_causal,
            deterministic,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        return_row_stats: bool = False,
    ) -> tuple[Tensor, ...]:
        """O = softmax(softmax_scale · Q Kᵀ) V (FlashAttention-2, algorithm 1).

        Args:
            q: [B, H, Nq, d]; k, v: [B, H, Nk, d]; float32, float16 or bfloat16; any strides.
            softmax_scale: any finite number; 1/√d by default. Scores are fp32: where one times the scale is
                beyond some 10⁵, the P that backward recomputes is off by more than 16 bits can tell.
            is_causal: query i sees keys j <= i + Nk - Nq (the mask is aligned bottom-right).
            return_row_stats: also return m and l of each row.

        Returns:
            out [B, H, Nq, d] in q's dtype and lse [B, H, Nq] in float32, the natural log of the sum of
            exp(scaled score); with ``return_row_stats`` also row_max and row_sum, like lse. A row that sees
            no key has out 0, lse and row_max −inf, row_sum 0.

        Raises:
            TypeError, ValueError: an argument is not accepted; the message names it.
            BuildError: the kernel does not compile. RuntimeError: it failed while running.
        """
        chapter = self.forward_chapter
        if chapter is not self:
            validation.check_tensors(q=q)
            self._check_supported(q.dtype, q.shape[3])  # or the other chapter would be named
            return chapter.forward(
                q, k, v, softmax_scale=softmax_scale, is_causal=is_causal, return_row_stats=return_row_stats
            )
        validation.check_qkv(q, k, v, self.info.dtypes)
        validation.check_device("q", q)
        self._check_supported(q.dtype, q.shape[3])
        scale = validation.default_scale(softmax_scale, q.shape[3])
        validation.check_flags(is_causal=is_causal, return_row_stats=return_row_stats)
        if self._must_move_to_cpu(q.device):
            moved = self.forward(
                q.cpu(),
                k.cpu(),
                v.cpu(),
                softmax_scale=scale,
                is_causal=is_causal,
                return_row_stats=return_row_stats,
            )
            return tuple(tensor.to(q.device) for tensor in moved)

        out = _uninitialised(q.shape, q)
        names = ("lse", "row_max", "row_sum") if return_row_stats else ("lse",)
        statistics = {name: _uninitialised(q.shape[:3], q, torch.float32) for name in names}
        if out.numel() == 0 or k.shape[2] == 0:
            out.zero_()
            for name, tensor in statistics.items():
                tensor.fill_(0.0 if name == "row_sum" else -torch.inf)
        else:
            self._launch(
                "forward",
                [self._laid_out(tensor) for tensor in (q, k, v)],
                [out, statistics["lse"], statistics.get("row_max"), statistics.get("row_sum")],
                (scale, bool(is_causal)),
            )
        return (out, *statistics.values())

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of ``forward``'s out with respect to its inputs, given dout = ∂loss/∂out.

        Args:
            q, k, v, softmax_scale, is_causal: what ``forward`` got. out, lse: what it returned.
            dout: like out; any strides.
            deterministic: ask for the same bits on every run.

        Returns:
            dq [B, H, Nq, d], dk and dv [B, H, Nk, d], dense, in q's dtype.

        Raises:
            TypeError, ValueError: an argument is not accepted; the message names it.
            BuildError: the kernel does not compile. RuntimeError: it failed while running.
        """
        if not self.has_backward:
            raise NotImplementedError(f"{self.name} has only a forward pass; load a later chapter")
        validation.check_qkv(q, k, v, self.info.dtypes)
        validation.check_saved(q, out, dout, lse)
        validation.check_device("q", q)
        self._check_supported(q.dtype, q.shape[3])
        scale = validation.default_scale(softmax_scale, q.shape[3])
        validation.check_flags(is_causal=is_causal, deterministic=deterministic)
        self.check_deterministic(deterministic)
        if self._must_move_to_cpu(q.device):
            moved = self.backward(
                *(tensor.cpu() for tensor in (q, k, v, out, dout, lse)),
                softmax_scale=scale,
                is_causal=is_causal,
                deterministic=deterministic,
            )
            return tuple(tensor.to(q.device) for tensor in moved)

        dq, dk, dv = (_uninitialised(tensor.shape, tensor) for tensor in (q, k, v))
        if q.numel() == 0 or k.numel() == 0:
            for gradient in (dq, dk, dv):
                gradient.zero_()
        else:
            self._launch(
                "backward",
                [*(self._laid_out(tensor) for tensor in (q, k, v, out, dout)), lse.contiguous()],
                [dq, dk, dv],
                (scale, bool(is_causal), bool(deterministic)),
            )
        return dq, dk, dv

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor with a dense last axis and aligned rows: kernels take any strides besides."""
        size, alignment = tensor.element_size(), self.info.row_alignment
        # Of axes of length 1, too: the launcher sees only strides.
        places = (tensor.data_ptr(), *(stride * size for stride in tensor.stride()[:-1]))
        if tensor.stride(-1) == 1 and all(place % alignment == 0 for place in places):
            return tensor
        # A contiguous tensor may still start anywhere in its storage: contiguous() would not move it.
        return tensor.clone(memory_format=torch.contiguous_format)

    def _launch(
        self,
        kind: str,
        inputs: list[Tensor],
        outputs: list[Tensor | None],
        options: tuple[float | bool, ...],
    ) -> None:
        q, k = inputs[0], inputs[1]
        is_causal, deterministic = options[1], kind == "backward" and options[2]
        library = self.library(q.dtype, q.shape[3], q.device)
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        layout = _workspace(library.name, kind == "backward", sizes, bool(is_causal), bool(deterministic))
        workspace = _uninitialised((layout.allocated_bytes,), q, torch.uint8)
        operator: Callable = getattr(library.ops, kind)
        if q.device.type == "cuda":
            with torch.cuda.device(q.device):
                stream = torch.cuda.current_stream().cuda_stream
                operator(*inputs, *outputs, workspace, *options, stream)
        else:
            assert library.runtime is not None
            library.runtime.cpu_device_set_schedule(_SCHEDULES.get(self.schedule, self.schedule))
            library.runtime.cpu_device_clear_launch_log()
            operator(*inputs, *outputs, workspace, *options, 0)
            self.last_launches = _parse_launches(library.runtime.cpu_device_launch_log().decode())

    # ------------------------------------------------------------------ checking

    def check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        dout: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        deterministic: bool = False,
        return_row_stats: bool = False,
        optimize: str = "-O1",
        max_grid_y: int | None = None,
    ) -> Report:
        """Runs the kernel on the checked CPU device: what it asks memory for, and its mistakes.

        Without out, dout and lse the forward pass is checked, with them the backward pass. Arguments are
        those of ``forward`` and ``backward``, on the CPU. ``optimize`` is the compiler's level and changes no
        count. ``max_grid_y`` lowers the limit on blocks per head, so that blocks stride over several tiles.
        A mistake is a finding of the report, not an exception.

        Raises:
            TypeError, ValueError: an argument is not accepted, or the problem is too large (2 GiB).
            BuildError: the kernel does not compile.
        """
        validation.check_qkv(q, k, v, self.info.dtypes)
        validation.check_flags(
            is_causal=is_causal, deterministic=deterministic, return_row_stats=return_row_stats
        )
        if max_grid_y is not None:
            validation.check_size("max_grid_y", max_grid_y, least=1)
        if optimize not in jit.OPTIMIZE_LEVELS:
            raise ValueError(f"optimize is {optimize!r}; expected one of {', '.join(jit.OPTIMIZE_LEVELS)}")
        backward = out is not None or dout is not None or lse is not None
        if backward:
            if out is None or dout is None or lse is None:
                raise ValueError(
                    "out, dout and lse belong together: give all three, or none for the forward pass"
                )
            validation.check_saved(q, out, dout, lse)
            if not self.has_backward:
                raise NotImplementedError(f"{self.name} has only a forward pass; load a later chapter")
            self.check_deterministic(deterministic)
        elif self.forward_chapter is not self:
            return self.forward_chapter.check(
                q, k, v, softmax_scale=softmax_scale, is_causal=is_causal, return_row_stats=return_row_stats,
                optimize=optimize, max_grid_y=max_grid_y,
            )  # fmt: skip
        if q.device.type != "cpu":
            raise ValueError(f"q is on {q.device}; the checker runs on the CPU device and takes CPU tensors")
        self._check_supported(q.dtype, q.shape[3])
        scale = validation.default_scale(softmax_scale, q.shape[3])
        if q.numel() == 0 or k.numel() == 0:
            raise ValueError("q or k is empty: there is no launch to check")

        library = jit.build(
            self.info.kernel,
            q.dtype,
            q.shape[3],
            q.device,
            self.digest,
            checked=True,
            optimize=optimize,
            max_grid_y=max_grid_y,
            cpu_models=self.cpu_models,
        )
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        layout = _workspace(library.name, backward, sizes, bool(is_causal), bool(deterministic))
        if backward:
            names = ("q", "k", "v", "out", "dout", "lse")
            inputs = [*(self._laid_out(t) for t in (q, k, v, out, dout)), lse.contiguous()]
            outputs = {name: torch.empty_like(t, memory_format=torch.contiguous_format, device="meta")
                       for name, t in (("dq", q), ("dk", k), ("dv", v))}  # fmt: skip
            options = (scale, bool(is_causal), bool(deterministic))
        else:
            names = ("q", "k", "v")
            inputs = [self._laid_out(t) for t in (q, k, v)]
            outputs = {"out": torch.empty(q.shape, dtype=q.dtype, device="meta")}
            for name in ("lse", "row_max", "row_sum")[: 3 if return_row_stats else 1]:
                outputs[name] = torch.empty(q.shape[:3], device="meta")
            options = (scale, bool(is_causal))
        arena = Arena()
        for name, tensor in zip(names, inputs, strict=True):
            arena.add(name, tensor, "input")
        for name, tensor in outputs.items():
            arena.add(name, tensor, "output")
        scratch = arena.add(
            "workspace", torch.empty(max(layout.allocated_bytes, 1), dtype=torch.uint8), "scratch"
        )
        tensors = arena.allocate()
        results: list[Tensor | None] = list(tensors[len(inputs) : scratch])
        parts = [arena.part(scratch, p.name, p.dtype, p.shape, p.offset) for p in layout.parts]
        if not backward and not return_row_stats:
            results += [None, None]

        start = time.perf_counter()
        error = None
        assert library.runtime is not None
        schedule = "in_order" if self.schedule is None else self.schedule
        library.runtime.cpu_device_set_schedule(_SCHEDULES.get(schedule, schedule))
        with arena.watched(library.runtime, {scratch: parts}) as log:
            operator: Callable = getattr(library.ops, "backward" if backward else "forward")
            try:
                operator(*tensors[: len(inputs)], *results, tensors[scratch], *options, 0)
            except RuntimeError as exception:
                error = str(exception)
        what = (
            f"{self.name} {'backward' if backward else 'forward'}, {jit.DTYPE_NAMES[q.dtype]}, "
            f"B={sizes[0]} H={sizes[1]} Nq={sizes[3]} Nk={sizes[4]} d={q.shape[3]}"
            f"{', causal' if is_causal else ''}{', deterministic' if deterministic else ''}"
        )
        report = read_report(log, self.info.kernel, what, error=error, seconds=time.perf_counter() - start)
        report.outputs = tuple(t.clone() for t in results if t is not None)
        return report


def _parse_launches(log: str) -> list[KernelLaunch]:
    launches = []
    for line in log.splitlines():
        kernel, _, grid, _, block, _, shared = line.split(" ")
        sizes = (tuple(int(n) for n in text.strip("()").split(",")) for text in (grid, block))
        launches.append(KernelLaunch(kernel, *sizes, int(shared)))
    return launches


def _defines(kernel: Path, function: str) -> bool:
    return re.search(rf"^\s*cudaError_t\s+{function}\s*\(", kernel.read_text(), re.MULTILINE) is not None


def _check_cpu_models(cpu_models: object, info: ChapterInfo) -> None:
    if cpu_models is None:
        return
    pair = isinstance(cpu_models, tuple) and [type(number) for number in cpu_models] == [int, int]
    if not pair:
        raise TypeError(
            f"cpu_models is {cpu_models!r}; expected the two ints of a compute capability, like (8, 6)"
        )
    if not info.runs_on(cpu_models):
        needed = ".".join(str(number) for number in info.min_compute_capability)
        raise ValueError(f"cpu_models is {cpu_models}; {info.name} needs compute capability {needed}")


@functools.lru_cache(maxsize=1024)
def _workspace(
    library: str, backward: bool, sizes: tuple[int, ...], is_causal: bool, deterministic: bool
) -> Workspace:
    """What the build of that name asks for; remembered, as asking takes as long as a small kernel."""
    text = getattr(torch.ops, library).workspace(backward, *sizes, is_causal, deterministic)
    parts = []
    for line in text.splitlines():
        name, dtype, offset, size, *shape = line.split()
        parts.append(
            WorkspacePart(name, _DTYPES[dtype], tuple(int(n) for n in shape), int(offset), int(size))
        )
        assert prod(parts[-1].shape) * parts[-1].dtype.itemsize == parts[-1].bytes
    return Workspace(tuple(parts))


def _uninitialised(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory with no defined content; NaN on the CPU device, so that an element never written is seen."""
    tensor = torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
    if tensor.device.type == "cpu" and tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def load_chapter(
    name: str | int,
    *,
    schedule: str | int | None = None,
    cpu_fallback: bool = False,
    cpu_models: tuple[int, int] | None = None,
) -> Chapter:
    """Loads a chapter by name ("02_tiled"), or by number (2).

    Picks up whatever was edited since it was last loaded. See ``Chapter`` for the options.
    Raises ValueError, naming the chapters there are; TypeError for what is neither str nor int.
    """
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise TypeError(f"name is a {type(name).__name__}; expected a chapter's name or number")
    chapters = list_chapters()
    for info in chapters:
        if name in (info.name, info.number, f"{info.number}", f"{info.number:02d}"):
            return Chapter(info, schedule=schedule, cpu_fallback=cpu_fallback, cpu_models=cpu_models)
    raise ValueError(f"there is no chapter {name!r}; there are {', '.join(info.name for info in chapters)}")


def load_kernel(
    path: str | Path, *, schedule: str | int | None = None, cpu_fallback: bool = False
) -> Chapter:
    """Loads any ``.cu`` file that keeps the launch contract of ``common/cuda/attention.h``.

    A ``chapter.toml`` beside it is honoured. Without one, every dtype and head_dim that the first chapter
    takes is let through to the kernel, and the forward pass of that chapter is used where the file has none.

    Raises FileNotFoundError, and ValueError for a file that defines no launcher.
    """
    kernel = Path(path).resolve()
    if not kernel.is_file():
        raise FileNotFoundError(f"{str(path)!r} {'is no file' if kernel.exists() else 'does not exist'}")
    if not any(_defines(kernel, function) for function in ("launch_forward", "launch_backward")):
        raise ValueError(
            f"{path} defines neither launch_forward nor launch_backward; for what they are see "
            "common/cuda/attention.h"
        )
    if kernel.name == "kernel.cu" and (kernel.parent / "chapter.toml").is_file():
        info = _read_info(kernel.parent)
    else:
        info = ChapterInfo(name=kernel.stem, kernel=kernel, title=str(path), idea="")
    return Chapter(info, schedule=schedule, cpu_fallback=cpu_fallback)


def open_chapter(key: str) -> Chapter:
    """The chapter that ``flash_attention`` was called with: a ``Chapter.key``, a name, or a number."""
    return _open_chapters.get(key) or _plain_chapters.get(key) or load_chapter(key)
