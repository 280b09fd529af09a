"""What a check saw, for people: the findings in sentences, the traffic, the launches.

The tools carry the names of NVIDIA's compute-sanitizer, which finds the same kinds of mistakes on a GPU:

- memcheck: an access outside of every tensor, scratch part and shared array, or a misaligned one;
- initcheck: a read of shared or scratch memory that nothing has written, an output element left unwritten;
- racecheck: two threads, or two blocks, that touch one place, one of them writing, with nothing between; an
  access to where a cp.async may still be writing;
- synccheck: a barrier that some threads never reach, a shuffle from a lane that takes no part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from torch import Tensor

from common.arena import Log, Memory
from common.debug_info import dynamic_shared_variables, frames_of, static_shared_variable
from common.traffic import SHARED, Barriers, Location, Requests, Traffic, location_of


@dataclass(frozen=True)
class Finding:
    """One mistake. ``str()`` is a sentence; the fields are its parts.

    tool: "memcheck", "initcheck", "racecheck", "synccheck", or "error" for a crash, an endless loop, a failed
    assertion. where: the line; other: of a race, the other thread's. block, thread: the first that did it.
    memory: tensor, scratch part or shared array; index: the element. count: how often it was
    seen; of initcheck, in how many places, as each counts as written from then on.
    """

    tool: str
    kernel: str
    message: str
    where: Location | None = None
    other: Location | None = None
    block: tuple[int, ...] | None = None
    thread: tuple[int, ...] | None = None
    memory: str | None = None
    index: tuple[int, ...] | None = None
    count: int = 1

    def __str__(self) -> str:
        return f"{self.tool}: {self.message}"


@dataclass(frozen=True)
class Launch:
    """One kernel that ran, or a memset."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int


@dataclass
class Report:
    """What a check saw.

    outputs: what the pass returned. error: why the run ended early, or None; its traffic is then not whole.
    """

    what: str
    traffic: Traffic
    findings: list[Finding]
    launches: list[Launch]
    outputs: tuple[Tensor, ...] = field(default=(), repr=False)
    error: str | None = None
    seconds: float = 0.0

    def of_tool(self, tool: str) -> list[Finding]:
        """The findings of one tool."""
        return [f for f in self.findings if f.tool == tool]

    def __str__(self) -> str:
        lines = [f"{self.what}: {self.seconds:.1f} s"]
        for launch in self.launches:
            grid, block = (
                "×".join(str(n) for n in sizes if n > 1) or "1" for sizes in (launch.grid, launch.block)
            )
            if launch.kernel != "memset":
                lines.append(
                    f"  {launch.kernel}: {grid} blocks of {block} threads, "
                    f"{launch.shared_bytes:,} bytes of shared memory"
                )
        lines += ["", str(self.traffic), ""]
        if self.error:
            lines.append(f"The run ended early, so the counts are not whole: {self.error}")
        if not self.findings:
            lines.append("memcheck, initcheck, racecheck, synccheck: nothing found")
        lines += [str(finding) for finding in self.findings]
        return "\n".join(lines)


def _triple(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


class _Reader:
    """Turns the records of the checked device into a report."""

    def __init__(self, log: Log, kernel: Path) -> None:
        self.kernel = kernel
        self.memories = log.memories
        self.records: dict[str, list[list[str]]] = {}
        for line in log.text.splitlines():
            kind, *fields = line.split("\t")
            self.records.setdefault(kind, []).append(fields)
        self.launches: dict[int, Launch] = {}
        self.libraries: dict[int, Path] = {}
        for number, name, grid, block, shared, library in self.records.get("launch", []):
            self.launches[int(number)] = Launch(name, _triple(grid), _triple(block), int(shared))
            if library:
                self.libraries[int(number)] = Path(library)
        self.arrays = {
            (int(launch), int(i)): (int(offset), name, int(size))
            for launch, i, offset, name, size in self.records.get("array", [])
        }
        self.places = self._find_places()

    def _find_places(self) -> dict[tuple[Path, int], Location]:
        wanted: dict[Path, set[int]] = {}
        for launch, pc, *_ in self.records.get("requests", []):
            wanted.setdefault(self.libraries[int(launch)], set()).add(int(pc))
        for fields in self.records.get("finding", []):
            library = self.libraries.get(int(fields[0]))
            if library is not None:
                wanted.setdefault(library, set()).update(int(pc) for pc in fields[3:5] if pc != "0")
        places = {}
        for library, addresses in wanted.items():
            for address, frames in frames_of(library, sorted(addresses)).items():
                places[library, address] = location_of(frames, self.kernel)
        return places

    def place(self, launch: int, address: str) -> Location | None:
        library = self.libraries.get(launch)
        return self.places.get((library, int(address))) if library is not None else None

    def memory_name(self, region: int) -> str:
        return self.memories[region - 1].name if region > 0 else SHARED

    def traffic(self) -> Traffic:
        requests = []
        for fields in self.records.get("requests", []):
            launch, pc, region, operation, size, count, lanes, transactions, worst, example = fields
            where = self.place(int(launch), pc)
            assert where is not None
            requests.append(
                Requests(
                    int(launch), self.launches[int(launch)].kernel, where, self.memory_name(int(region)),
                    operation, int(size), int(count), int(lanes), int(transactions), int(worst),
                    tuple(int(a) if a else None for a in example.split(",")),
                )
            )  # fmt: skip
        for launch, region, size in self.records.get("memset", []):
            name = self.memory_name(int(region))
            requests.append(
                Requests(
                    int(launch), "memset", Location(self.kernel, 0), name, "memset", 1, 0, int(size), 0, 0
                )
            )  # fmt: skip
        barriers = []
        for launch, site, scope, count in self.records.get("barrier", []):
            where = _site(site)
            assert where is not None
            barriers.append(
                Barriers(int(launch), self.launches[int(launch)].kernel, where, scope, int(count))
            )
        unique = tuple(
            (self.launches[int(launch)].kernel, self.memory_name(int(region)), int(read), int(written))
            for launch, region, read, written in self.records.get("unique", [])
        )
        return Traffic(tuple(sorted(requests, key=lambda r: r.launch)), tuple(barriers), unique)

    # ------------------------------------------------------------ findings

    def findings(self, *, is_complete: bool) -> list[Finding]:
        result = [self._finding(fields) for fields in self.records.get("finding", [])]
        if is_complete:
            result += self._unwritten()
        return result

    def _unwritten(self) -> list[Finding]:
        result = []
        for region, offset, missing in self.records.get("unwritten", []):
            memory = self.memories[int(region) - 1]
            if memory.role != "output":
                continue
            index = memory.index(int(offset))
            message = (
                f"{missing} of the {prod(memory.shape):,} elements of {memory.name} are never written, "
                f"the first of them {memory.name}{_brackets(index)}"
            )
            last = list(self.launches.values())[-1].kernel if self.launches else ""
            result.append(Finding("initcheck", last, message, memory=memory.name, index=index))
        return result

    def _finding(self, fields: list[str]) -> Finding:
        (
            launch_text,
            tool,
            what,
            pc,
            other_pc,
            site,
            region,
            offset,
            size,
            block,
            thread,
            other_block,
            other_thread,
            count,
            text,
        ) = fields
        launch = int(launch_text)
        kernel = self.launches[launch].kernel
        where = _site(site) or self.place(launch, pc)
        other_where = self.place(launch, other_pc)
        name, index, target = self._target(launch, kernel, int(region), int(offset), int(size))
        at = f"at {where}" if where is not None and where.line > 0 else "somewhere"
        who = f"thread ({thread}) of block ({block})"
        if tool == "racecheck":
            message = _race_message(what, target, where, other_where, who, other_block, other_thread)
        elif tool == "initcheck":
            verb = "adds to" if what == "atomic" else "reads"
            message = f"{who} {verb} {target} {at}, which nothing has written before"
        elif what == "misaligned":
            message = f"{who} accesses {size} bytes of {target} {at}, whose address is no multiple of {size}"
        elif what == "memset":
            begins = f"it begins at {target} and goes past its end" if int(region) > 0 else target
            message = f"a memset of {size} bytes is out of bounds: {begins}"
        elif what == "memset of an input":
            message = f"a memset of {size} bytes writes to {target}, which is an input"
        elif what == "write to an input":
            message = f"{who} writes to {target} {at}, which is an input"
        elif tool == "memcheck" and what in ("read", "write", "atomic"):
            verb = {"read": "reads", "write": "writes", "atomic": "adds to"}[what]
            message = f"{who} {verb} {size} bytes {at}, out of bounds: {target}"
        else:
            named = where is None or where.line == 0 or str(where) in text
            message = f"{who}: {text}" + ("" if named else f" ({at})")
        if int(count) > 1:
            message += f" ({int(count):,} {'places' if tool == 'initcheck' else 'times'})"
        return Finding(
            tool,
            kernel,
            message,
            where,
            other_where,
            _triple(block),
            _triple(thread),
            name,
            index,
            int(count),
        )

    def _target(
        self, launch: int, kernel: str, region: int, offset: int, size: int
    ) -> tuple[str | None, tuple[int, ...] | None, str]:
        """Name of a memory, index of its element, and both in words."""
        if region > 0:
            memory = self.memories[region - 1]
            index = memory.index(offset)
            if index is None:
                return memory.name, None, self._gap(memory, offset)
            return memory.name, index, memory.name + _brackets(index)
        if region < 0:
            return self._shared_target(launch, kernel, region, offset, size)
        if not self.memories:
            return None, None, "no tensor is near"
        if size == 0:
            return None, None, ""
        nearest = min(
            self.memories,
            key=lambda m: max(m.offset - offset, offset - (m.offset + m.span * m.dtype.itemsize - 1), 0),
        )
        end = nearest.offset + nearest.span * nearest.dtype.itemsize
        distance = nearest.offset - offset if offset < nearest.offset else offset - end
        if distance > 1 << 22:  # the largest gap of an arena
            return None, None, "the address is in no tensor, scratch part or shared array"
        if offset < nearest.offset:
            return nearest.name, None, f"{distance:,} bytes before the start of {_shaped(nearest)}"
        return nearest.name, None, _past_end(distance, _shaped(nearest))

    def _gap(self, memory: Memory, offset: int) -> str:
        return f"between two rows of {_shaped(memory)}, {offset:,} bytes from its start"

    def _shared_target(
        self, launch: int, kernel: str, region: int, offset: int, access: int
    ) -> tuple[str, tuple[int, ...] | None, str]:
        if region < -1:
            start, mangled, size = self.arrays[launch, -2 - region]
            name = _array_name(mangled)
            if offset < 0:
                return name, None, f"{-offset:,} bytes before the start of {name}, shared"
            if offset + access > size:
                return name, None, _past_end(offset - size, f"{name}, {size:,} bytes, shared")
            static = static_shared_variable(self.libraries[launch], start)
            if static is None:
                return name, None, f"{name}, shared, {offset} bytes from the start of its {size}"
            index = static.index(offset)
            return name, index, name + "".join(f"[{i}]" for i in index)
        size = self.launches[launch].shared_bytes
        if offset < 0:
            return SHARED, None, f"{-offset:,} bytes before the start of the block's shared memory"
        if offset + access > size:
            return SHARED, None, _past_end(offset - size, f"the {size:,} bytes of shared memory")
        for variable in dynamic_shared_variables(self.libraries[launch], kernel, size):
            if variable.offset <= offset < variable.offset + variable.bytes:
                index = variable.index(offset)
                return variable.name, index, variable.name + "".join(f"[{i}]" for i in index)
        return SHARED, None, f"the shared memory {offset} bytes from its start"


_RACES = {
    "read after write": "is written at {first} by {other} and read at {second} by {who}",
    "write after read": "is read at {first} by {other} and overwritten at {second} by {who}",
    "write after write": "is written at {first} by {other} and at {second} by {who}",
    "two blocks write": "is written by two blocks, at {first} by {other} and at {second} by {who}",
    "one block reads, another writes": "is read at {first} by {other} and written at {second} by {who}",
    "one block reads, another adds": "is read at {first} by {other} and added to at {second} by {who}",
    "one block writes, another adds": "is written at {first} by {other} and added to at {second} by {who}",
}


_COPIES = {"read of a copy": "read", "write to a copy": "overwritten"}
_BULK_COPIES = {"read of a bulk copy": "read", "write to a bulk copy": "overwritten"}


def _race_message(
    what: str,
    target: str,
    where: Location | None,
    other_where: Location | None,
    who: str,
    other_block: str,
    other_thread: str,
) -> str:
    if what in _COPIES:
        same = f"thread ({other_thread}) of" in who
        start = "that it started" if same else f"that thread ({other_thread}) started"
        end = (
            "no cp_async_wait() between covers it"
            if same
            else "no cp_async_wait() of that thread covers it, or no barrier follows the wait"
        )
        return (
            f"{target} is {_COPIES[what]} at {where} by {who}, while the cp.async {start} at {other_where} "
            f"may be under way: {end}"
        )
    if what in _BULK_COPIES:
        return (
            f"{target} is {_BULK_COPIES[what]} at {where} by {who}, while the copy that thread "
            f"({other_thread}) started at {other_where} may be under way: no mbarrier_wait() covers it"
        )
    if what == "no proxy fence":
        return (
            f"{target} is written at {other_where} by thread ({other_thread}) and read by wgmma at {where} "
            f"for {who}, with no fence_async_proxy() of the writer between"
        )
    within = "after" in what  # one block
    other = f"thread ({other_thread})" + ("" if within else f" of block ({other_block})")
    text = _RACES[what].format(first=other_where, second=where, other=other, who=who)
    end = "with no barrier between" if within else "and nothing orders the blocks of a launch"
    return f"{target} {text}, {end}"


def _site(text: str) -> Location | None:
    if not text:
        return None
    file, _, line = text.rpartition(":")
    return Location(Path(file), int(line))


def _past_end(distance: int, memory: str) -> str:
    """Where an access begins that goes past an end, or begins there."""
    if distance == 0:
        return f"just past the end of {memory}"
    return f"{abs(distance):,} bytes {'past' if distance > 0 else 'before'} the end of {memory}"


def _brackets(index: tuple[int, ...] | None) -> str:
    return "" if index is None else f"[{', '.join(str(i) for i in index)}]"


def _shaped(memory: Memory) -> str:
    return f"{memory.name} [{', '.join(str(n) for n in memory.shape)}]"


def _array_name(mangled: str) -> str:
    """``_ZZN12_GLOBAL__N_19ds_kernelE…E7partial`` → ``partial``."""
    lengths = list(re.finditer(r"E(\d+)(?=[A-Za-z_])", mangled))
    for match in reversed(lengths):
        name = mangled[match.end() : match.end() + int(match.group(1))]
        if len(name) == int(match.group(1)):
            return name
    return mangled


def read_report(log: Log, kernel: Path, what: str, *, error: str | None, seconds: float) -> Report:
    """The report of a check that has ended. ``kernel`` is the file whose lines are named."""
    reader = _Reader(log, kernel)
    findings = reader.findings(is_complete=error is None)
    launches = list(reader.launches.values())
    return Report(what, reader.traffic(), findings, launches, error=error, seconds=seconds)
