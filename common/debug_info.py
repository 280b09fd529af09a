"""What the debug information of a build says: the source line of an instruction, the layout of shared memory.

Lines come from binutils' ``addr2line``, which every compiler brings along, types from DWARF with pyelftools.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from elftools.dwarf.die import DIE
from elftools.elf.elffile import ELFFile

# What a function, or a call, is an instance of.
_ORIGINS = ("DW_AT_abstract_origin", "DW_AT_specification")


@dataclass(frozen=True)
class Frame:
    """A place in the source: a function and a line in it."""

    function: str
    file: Path
    line: int


@dataclass(frozen=True)
class SharedVariable:
    """One array, or scalar, of a block's shared memory."""

    name: str
    offset: int  # bytes from the start of the shared memory it is in
    bytes: int
    shape: tuple[int, ...]  # () for a scalar
    item_bytes: int

    def index(self, offset: int) -> tuple[int, ...]:
        """The element that holds the byte at ``offset``."""
        element = (offset - self.offset) // self.item_bytes
        index: list[int] = []
        for extent in reversed(self.shape):
            index.insert(0, element % extent)
            element //= extent
        return tuple(index)


def _bare_name(function: str) -> str:
    """``(anonymous namespace)::load_tile<32, 128>(float ...)`` → ``load_tile``."""
    name = function.replace("(anonymous namespace)::", "")
    name = re.split(r"[<(]", name, maxsplit=1)[0]
    return name.split(" ")[-1].split("::")[-1]


# (library, when it was built) → address → frames
_known_frames: dict[tuple[Path, int], dict[int, list[Frame]]] = {}


def frames_of(library: Path, addresses: list[int]) -> dict[int, list[Frame]]:
    """For each return address in the library the inlined calls that lead there, the innermost first."""
    known = _known_frames.setdefault((library, library.stat().st_mtime_ns), {})
    if unknown := [address for address in addresses if address not in known]:
        known |= _read_frames(library, unknown)
    return {address: known[address] for address in addresses}


def _read_frames(library: Path, addresses: list[int]) -> dict[int, list[Frame]]:
    # The instruction that made the call lies before the address it returns to.
    text = "".join(f"{address - 1:#x}\n" for address in addresses)
    command = ["addr2line", "--inlines", "--functions", "--demangle", "--addresses", "-e", str(library)]
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    result: dict[int, list[Frame]] = {}
    lines = iter(output.splitlines())
    frames: list[Frame] = []
    for line in lines:
        if re.fullmatch(r"0x[0-9a-f]+", line):
            frames = result.setdefault(int(line, 16) + 1, [])
            continue
        place = re.match(r"(.*):(\d+|\?)", next(lines))
        assert place is not None, f"addr2line wrote no line number for {line}"
        number = 0 if place.group(2) == "?" else int(place.group(2))
        frames.append(Frame(_bare_name(line), Path(place.group(1)), number))
    return result


def _type_of(die: DIE) -> DIE | None:
    while "DW_AT_type" in die.attributes:
        die = die.get_DIE_from_attribute("DW_AT_type")
        if die.tag not in ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type"):
            return die
    return None


def _name_of(die: DIE) -> str:
    attribute = die.attributes.get("DW_AT_name")
    return attribute.value.decode() if attribute else ""


def _shape_of(die: DIE | None) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of an element, of a variable's type."""
    shape: list[int] = []
    while die is not None and die.tag == "DW_TAG_array_type":
        for extent in die.iter_children():
            if extent.tag != "DW_TAG_subrange_type":
                continue
            if "DW_AT_upper_bound" in extent.attributes:
                shape.append(extent.attributes["DW_AT_upper_bound"].value + 1)
            elif "DW_AT_count" in extent.attributes:
                shape.append(extent.attributes["DW_AT_count"].value)
        die = _type_of(die)
    size = die.attributes["DW_AT_byte_size"].value if die is not None else 1
    return tuple(shape), size


@lru_cache(maxsize=64)
def dynamic_shared_variables(library: Path, kernel: str, size: int = 0) -> tuple[SharedVariable, ...]:
    """What ``kernel`` takes from ``dynamic_smem<T>()``: the members of the struct T, in order of offset.

    If T is a scalar or a vector, the one array "shared" that fills ``size`` bytes. Empty if it takes none.
    """
    with library.open("rb") as file:
        elf = ELFFile(file)
        if not elf.has_dwarf_info():
            return ()
        types: dict[int, DIE] = {}
        used: set[int] = set()
        for unit in elf.get_dwarf_info().iter_CUs():
            # Functions stand beside each other or in namespaces. Reading all else would take a second.
            for function in _functions_of(unit.get_top_DIE()):
                name = _function_name(function)
                if name.startswith("dynamic_smem<"):
                    arguments = (d for d in function.iter_children() if d.tag == "DW_TAG_template_type_param")
                    for argument in arguments:
                        if (struct := _type_of(argument)) is not None:
                            types[function.offset] = struct
                elif _bare_name(name) == kernel:
                    used |= _called_within(function)
        chosen = [struct for offset, struct in types.items() if offset in used] or list(types.values())
        if not chosen:
            return ()
        if not any(_is_array(member) for member in chosen[0].iter_children()):
            _, item_bytes = _shape_of(chosen[0])
            n = size // item_bytes
            return (SharedVariable("shared", 0, n * item_bytes, (n,), item_bytes),) if n else ()
        variables = []
        for member in chosen[0].iter_children():
            if member.tag != "DW_TAG_member" or "DW_AT_data_member_location" not in member.attributes:
                continue
            shape, item_bytes = _shape_of(_type_of(member))
            size = item_bytes
            for extent in shape:
                size *= extent
            offset = member.attributes["DW_AT_data_member_location"].value
            variables.append(SharedVariable(_name_of(member), offset, size, shape, item_bytes))
        return tuple(variables)


def _is_array(die: DIE) -> bool:
    kind = _type_of(die) if die.tag == "DW_TAG_member" else None
    return kind is not None and kind.tag == "DW_TAG_array_type"


@lru_cache(maxsize=64)
def static_shared_variable(library: Path, offset: int) -> SharedVariable | None:
    """The ``__shared__`` array, or scalar, that lies ``offset`` bytes into the library's thread-local block.

    None if debug information has none.
    """
    with library.open("rb") as file:
        elf = ELFFile(file)
        if not elf.has_dwarf_info():
            return None
        for unit in elf.get_dwarf_info().iter_CUs():
            for die in unit.iter_DIEs():
                if die.tag != "DW_TAG_variable" or _thread_local_offset(die) != offset:
                    continue
                while "DW_AT_type" not in die.attributes and "DW_AT_abstract_origin" in die.attributes:
                    die = die.get_DIE_from_attribute("DW_AT_abstract_origin")
                shape, item_bytes = _shape_of(_type_of(die))
                return SharedVariable(_name_of(die), 0, prod(shape) * item_bytes, shape, item_bytes)
    return None


def _thread_local_offset(die: DIE) -> int | None:
    location = die.attributes.get("DW_AT_location")
    expression = location.value if location is not None and location.form == "DW_FORM_exprloc" else []
    constant, push_tls_address = 0x0E, (0x9B, 0xE0)
    if len(expression) != 10 or expression[0] != constant or expression[9] not in push_tls_address:
        return None
    return int.from_bytes(bytes(expression[1:9]), "little")


def _functions_of(parent: DIE) -> Iterator[DIE]:
    """The functions of a unit, those of its namespaces too, but for the standard library's."""
    for die in parent.iter_children():
        if die.tag == "DW_TAG_subprogram":
            yield die
        elif die.tag == "DW_TAG_namespace" and _name_of(die) != "std":
            yield from _functions_of(die)


def _function_name(die: DIE) -> str:
    """The name that stands at a function, or at what it is an instance or the definition of."""
    while not (name := _name_of(die)):
        origin = next((a for a in _ORIGINS if a in die.attributes), None)
        if origin is None:
            return ""
        die = die.get_DIE_from_attribute(origin)
    return name


def _called_within(die: DIE) -> set[int]:
    """Offsets of the functions, and of their abstract instances, whose inlined calls lie in ``die``."""
    offsets: set[int] = set()
    for child in die.iter_children():
        if child.tag == "DW_TAG_inlined_subroutine":
            called = child
            # A call's origin is the function itself or its abstract instance, which names the former.
            for attribute in _ORIGINS * 2:
                if attribute in called.attributes:
                    called = called.get_DIE_from_attribute(attribute)
                    offsets.add(called.offset)
        if child.has_children and child.tag != "DW_TAG_subprogram":
            offsets |= _called_within(child)
    return offsets
