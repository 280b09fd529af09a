"""What a kernel asks memory for: requests by source line, bytes by tensor, barriers.

Traffic is what the kernel *requests*, before any cache. It is exact: every load and store of the source
counts once for each thread that executes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.debug_info import Frame

SHARED = "shared"  # in place of a tensor's name


@dataclass(frozen=True)
class Location:
    """Where in a kernel's source something happened.

    file, line: the line of the kernel file. helper: where in the function of another file that it calls.
    """

    file: Path
    line: int
    helper: Frame | None = None

    def __str__(self) -> str:
        text = f"{self.file.name}:{self.line}"
        if self.helper is not None:
            text += f" ({self.helper.function}, {self.helper.file.name}:{self.helper.line})"
        return text


# Where a load ends and a conversion of what was loaded begins depends on the compiler.
_CONVERSIONS = ("to_float", "from_float")


def location_of(frames: Sequence[Frame], kernel: Path) -> Location:
    """The innermost frame in the kernel's own file, and the helper that it called."""
    for i, frame in enumerate(frames):
        if frame.file.name == kernel.name and frame.line > 0:
            helpers = [
                f for f in frames[:i] if f.function not in _CONVERSIONS and "cpu_device" not in f.file.parts
            ]
            helper = helpers[-1] if helpers else None
            return Location(frame.file, frame.line, helper)
    named = next((f for f in frames if f.line > 0), None)
    return Location(named.file, named.line) if named else Location(kernel, 0)


@dataclass(frozen=True)
class Requests:
    """What one instruction of one launch asks of one tensor, or of shared memory.

    operation: "read", "write", "atomic", or "memset" (of the whole part, by the runtime). requests: how often
    a warp executed it; lanes: how many of its threads took part, in all. transactions: 32-byte sectors for
    global memory, passes over the banks ("wavefronts") for shared memory; worst: those of the worst request,
    and example: the byte addresses of that one by lane, None where a lane took no part.
    """

    launch: int
    kernel: str
    where: Location
    memory: str
    operation: str
    bytes_per_lane: int
    requests: int
    lanes: int
    transactions: int
    worst: int
    example: tuple[int | None, ...] = ()

    @property
    def bytes(self) -> int:
        """Requested bytes."""
        return self.lanes * self.bytes_per_lane

    @property
    def additions(self) -> int:
        """Of an atomic: one for each thread, and four where it adds a vector (``reduce_add``)."""
        return self.lanes * (4 if self.bytes_per_lane == 16 else 1)

    @property
    def transactions_per_request(self) -> float:
        """Sectors (4 of 32 bytes are the best 32 fp32 elements can do), or bank-conflict ways (1 is best)."""
        return self.transactions / max(self.requests, 1)


@dataclass(frozen=True)
class Barriers:
    """How often blocks (``scope`` "block"), some warps of one ("warps") or warps ("warp") passed a barrier.

    A barrier that its warps call from several lines is counted at the first of them.
    """

    launch: int
    kernel: str
    where: Location
    scope: str
    count: int


@dataclass
class TensorTraffic:
    """Bytes requested of one tensor, one scratch part, or shared memory.

    written includes memset. unique_read, unique_written: bytes touched at least once, summed over the
    launches: what an ideal cache would move.
    """

    read: int = 0
    written: int = 0
    atomics: int = 0
    atomic_bytes: int = 0
    unique_read: int = 0
    unique_written: int = 0

    @property
    def bytes(self) -> int:
        """All requested bytes; an atomic's are counted once."""
        return self.read + self.written + self.atomic_bytes


@dataclass(frozen=True)
class Traffic:
    """What a run of a chapter asked memory for. ``str()`` is a table."""

    requests: tuple[Requests, ...]
    barriers: tuple[Barriers, ...]
    unique: tuple[tuple[str, str, int, int], ...] = ()  # kernel, memory, read, written

    @property
    def tensors(self) -> dict[str, TensorTraffic]:
        """By tensor and scratch part, in order of first use; shared memory is not among them."""
        return {name: t for name, t in self._by_memory().items() if name != SHARED}

    @property
    def shared(self) -> TensorTraffic:
        """Of shared memory, dynamic and static."""
        return self._by_memory().get(SHARED, TensorTraffic())

    @property
    def bytes(self) -> int:
        """Requested of global memory, in all."""
        return sum(t.bytes for t in self.tensors.values())

    @property
    def block_barriers(self) -> int:
        """Block barriers passed, each counted once per block."""
        return sum(b.count for b in self.barriers if b.scope == "block")

    @property
    def partial_barriers(self) -> int:
        """Named barriers that some warps of a block passed, each counted once."""
        return sum(b.count for b in self.barriers if b.scope == "warps")

    @property
    def warp_barriers(self) -> int:
        """``__syncwarp`` passed, each counted once per warp."""
        return sum(b.count for b in self.barriers if b.scope == "warp")

    def of_kernel(self, kernel: str) -> Traffic:
        """The part of it that one kernel, or "memset", is responsible for."""
        return Traffic(
            tuple(r for r in self.requests if r.kernel == kernel),
            tuple(b for b in self.barriers if b.kernel == kernel),
            tuple(u for u in self.unique if u[0] == kernel),
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that ran, in order."""
        return tuple(dict.fromkeys(r.kernel for r in self.requests))

    def lines(self) -> list[Requests]:
        """Requests added up by source line, tensor and operation, in order of kernels and lines."""
        groups: dict[tuple[object, ...], list[Requests]] = {}
        for r in self.requests:
            if r.operation != "memset":
                groups.setdefault((r.kernel, r.where, r.memory, r.operation, r.bytes_per_lane), []).append(r)
        result = []
        for group in groups.values():
            worst = max(group, key=lambda r: r.worst)
            sums = {f: sum(getattr(r, f) for r in group) for f in ("requests", "lanes", "transactions")}
            first = group[0]
            result.append(
                Requests(
                    first.launch, first.kernel, first.where, first.memory, first.operation,
                    first.bytes_per_lane, **sums, worst=worst.worst, example=worst.example,
                )
            )  # fmt: skip
        order = {kernel: i for i, kernel in enumerate(self.kernels)}
        return sorted(
            result,
            key=lambda r: (
                order[r.kernel], r.where.line, r.where.helper.line if r.where.helper else 0,
                r.memory, r.operation,
            ),
        )  # fmt: skip

    def _by_memory(self) -> dict[str, TensorTraffic]:
        result: dict[str, TensorTraffic] = {}
        for r in self.requests:
            traffic = result.setdefault(r.memory, TensorTraffic())
            if r.operation == "read":
                traffic.read += r.bytes
            elif r.operation == "atomic":
                traffic.atomics += r.additions
                traffic.atomic_bytes += r.bytes
            else:
                traffic.written += r.bytes
        for _, name, read, written in self.unique:
            traffic = result.setdefault(name, TensorTraffic())
            traffic.unique_read += read
            traffic.unique_written += written
        return result

    def __str__(self) -> str:
        columns = ("read", "written", "ideal cache")
        rows = [f"{'bytes':<10}" + "".join(f"{name:>14}" for name in columns) + f"{'atomics':>12} (number)"]
        for name, t in self.tensors.items():
            ideal = t.unique_read + t.unique_written
            rows.append(f"{name:<10}{t.read:>14,}{t.written:>14,}{ideal:>14,}{t.atomics:>12,}")
        shared = self.shared
        rows.append(f"{SHARED:<10}{shared.read:>14,}{shared.written:>14,}{'':>14}{shared.atomics:>12,}")
        partial = f", {self.partial_barriers:,} by parts of blocks" if self.partial_barriers else ""
        rows.append(
            f"barriers passed: {self.block_barriers:,} by blocks{partial}, {self.warp_barriers:,} by warps"
        )
        return "\n".join(rows)

    def line_table(self) -> str:
        """A row per source line, tensor and operation."""
        rows = []
        for kernel in self.kernels:
            rows.append(f"{kernel}")
            for r in self.lines():
                if r.kernel != kernel:
                    continue
                per = r.transactions_per_request
                unit = f"{per:5.1f} ways   " if r.memory == SHARED else f"{per:5.1f} sectors"
                rows.append(
                    f"  {r.where!s:<48} {r.operation:<6} {r.memory:<9} {r.requests:>10,} requests "
                    f"{r.bytes:>13,} B  {unit} worst {r.worst}"
                )
        return "\n".join(rows)
