"""The CPU device against independent results: small CUDA programs that know nothing about attention.

Each program of ``tests/cpu_device`` is built with every host compiler, run, and its printed arrays are compared
with what numpy, PyTorch or exact fractions say. nvcc compiles the same files, and where there is a GPU it runs
them too.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
RUNTIME = REPO / "common" / "cpu_device"
PROGRAMS = REPO / "tests" / "cpu_device"

Arrays = dict[str, str]  # what a program prints: name -> the rest of its line

# ---------------------------------------------------------------- building and running


def run_checked(command: list[str], **kwargs: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)
    assert result.returncode == 0, f"{' '.join(command)} -> {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def parse(output: str) -> Arrays:
    arrays = {}
    for line in output.splitlines():
        name, colon, values = line.partition(":")
        assert colon and name not in arrays, line
        arrays[name] = values.strip()
    return arrays


@dataclass
class Device:
    """The CPU device built by one compiler: compiles a program when it is first run."""

    compiler: str
    flags: list[str]  # come first, as a compiler's built-in defaults do
    folder: Path
    objects: list[str] = field(default_factory=list)

    def compile(self, source: Path, target: Path, *arguments: str) -> str:
        includes = [f"-I{RUNTIME}", f"-I{REPO}"]
        options = ["-std=c++17", "-O2", "-pthread", "-fstack-clash-protection", "-Wall", "-Wextra", "-Werror"]
        command = [self.compiler, *self.flags, *options, *includes, "-x", "c++", str(source)]
        run_checked([*command, "-x", "none", *arguments, "-o", str(target)])
        return str(target)

    def program(self, name: str) -> Path:
        source = next(PROGRAMS.glob(f"{name}.c*"))
        target = self.folder / name
        if not target.exists():
            if not self.objects:
                for runtime in sorted(RUNTIME.glob("*.cpp")):
                    self.objects.append(self.compile(runtime, self.folder / f"{runtime.stem}.o", "-c"))
            unfinished = target.with_suffix(".unfinished")  # a failed build must not pass for a program
            self.compile(source, unfinished, *self.objects, "-ldl")
            unfinished.rename(target)
        return target

    def run(self, name: str, *arguments: str, stdin: str | None = None, **environment: object) -> Arrays:
        env = {k: v for k, v in os.environ.items() if not k.startswith("FA2_") and k != "SCHEDULE"}
        env |= {key: str(value) for key, value in environment.items()}
        return parse(run_checked([str(self.program(name)), *arguments], input=stdin, env=env))


# One group per variant, so that with `--dist loadgroup` one worker builds a variant once.
VARIANTS = [
    pytest.param(("g++", []), id="g++", marks=pytest.mark.xdist_group("cpu_device_g++")),
    pytest.param(("clang++", []), id="clang++", marks=pytest.mark.xdist_group("cpu_device_clang++")),
]
# What Ubuntu's g++ predefines. It makes longjmp refuse to jump between stacks, so the programs that switch in
# every way are enough.
FORTIFIED = pytest.param(
    ("g++", ["-D_FORTIFY_SOURCE=3"]), id="g++-fortified", marks=pytest.mark.xdist_group("cpu_device_fortified")
)


@pytest.fixture(scope="session")
def device_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpu_device")


_devices: dict[tuple[str, ...], Device] = {}


def device_of(variant: tuple[str, list[str]], folder: Path) -> Device:
    compiler, flags = variant
    if shutil.which(compiler) is None:
        if compiler == "g++":
            pytest.fail("the CPU device needs g++, which is not on PATH")
        pytest.skip(f"{compiler} is not on PATH")
    key = (compiler, *flags)
    if key not in _devices:
        own_folder = folder / "_".join(key).replace("=", "_")
        own_folder.mkdir()
        _devices[key] = Device(compiler, flags, own_folder)
    return _devices[key]


@pytest.fixture(scope="session", params=VARIANTS)
def device(request: pytest.FixtureRequest, device_folder: Path) -> Device:
    return device_of(request.param, device_folder)


@pytest.fixture(scope="session", params=[*VARIANTS, FORTIFIED])
def any_device(request: pytest.FixtureRequest, device_folder: Path) -> Device:
    return device_of(request.param, device_folder)


# ---------------------------------------------------------------- inputs and comparison


def random_bits(index: np.ndarray | range) -> np.ndarray:
    """``random_bits`` of program.h."""
    state = (np.asarray(index, dtype=np.uint64) * 747796405 + 2891336453) & 0xFFFFFFFF
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & 0xFFFFFFFF
    return ((word >> 22) ^ word).astype(np.uint32)


def random_eighths(size: int, first: int = 0) -> np.ndarray:
    """``random_eighths`` of program.h, as float64."""
    return (random_bits(range(first, first + size)) & 31) / 8 - 1


def numbers(text: str) -> np.ndarray:
    """Decimal values; all that the programs print is exact in float64."""
    return np.array(text.split(), dtype=np.float64)


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint16)


def to_bits(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int16).numpy().view(np.uint16)


def assert_equal(actual: np.ndarray, expected: object, what: str = "") -> None:
    np.testing.assert_array_equal(actual, np.asarray(expected).reshape(-1), err_msg=what)


# In parallel, in order, and three shuffles.
SCHEDULES = [-2, -1, 0, 1, 12345]


def expected_reduction() -> dict[str, np.ndarray]:
    cases = {
        "one_warp": (1, 32, 1000),
        "cube": (12, 96, 10007),
        "ragged_warp": (15, 100, 12345),
        "one_thread": (6, 1, 77),
        "full_block": (4, 1024, 20001),
        "fewer_elements_than_threads": (2, 128, 3),
    }
    expected = {}
    for name, (num_blocks, num_threads, n) in cases.items():
        block = np.arange(n) // num_threads % num_blocks
        sums = np.bincount(block, random_eighths(n), minlength=num_blocks)
        expected |= {f"{name}.block_sums": sums, f"{name}.total": sums.sum(), f"{name}.num_finished": 0}
    return expected


def expected_transpose() -> dict[str, np.ndarray]:
    shapes = [(64, 32), (70, 45), (1, 100), (33, 31)]
    return {f"{rows}x{cols}": random_eighths(rows * cols).reshape(rows, cols).T for rows, cols in shapes}


def expected_scan() -> dict[str, np.ndarray]:
    sizes = {"int_5000": 5000, "float_3001": 3001, "double_95": 95}
    return {name: np.cumsum(random_eighths(n) * 8) for name, n in sizes.items()}


def expected_matmul() -> dict[str, np.ndarray]:
    cases = {
        "float": (37, 29, 50, torch.float32),
        "float_64KiB": (20, 33, 700, torch.float32),
        "half": (37, 29, 100, torch.float16),
        "bfloat16": (17, 48, 65, torch.bfloat16),
    }
    expected = {}
    for name, (m, n, k, dtype) in cases.items():
        product = random_eighths(m * k).reshape(m, k) @ random_eighths(k * n, 1 << 20).reshape(k, n)
        rounded = torch.from_numpy(product).float().to(dtype)  # the product is exact in float
        expected[name] = rounded.numpy() if dtype == torch.float32 else to_bits(rounded)
    return expected


def expected_atomics() -> dict[str, np.ndarray]:
    calls = np.arange(192)
    expected: dict[str, np.ndarray] = {"histogram": np.bincount(random_bits(range(20011)) % 37, minlength=37)}
    quarters = (calls[:150] % 5 - 1) / 4
    for name, dtype in {"half": torch.float16, "bfloat16": torch.bfloat16}.items():

        def bits(values: object, dtype: torch.dtype = dtype) -> np.ndarray:
            return to_bits(torch.as_tensor(values, dtype=dtype).reshape(-1))

        expected |= {f"add.{name}": bits(1 + quarters.sum()), f"count.{name}": bits(192)}
        expected |= {f"unordered.count.{name}": bits(calls)}
        expected |= {f"add.{name}2": bits([1 + quarters.sum(), 2 + (calls[:150] % 2).sum() / 4])}
    for name in ("float", "double"):
        expected |= {f"add.{name}": 1 + quarters.sum(), f"count.{name}": 192, f"unordered.count.{name}": calls}
    start = np.array([0x7FFF1234], dtype=np.uint32)
    arguments = random_bits(calls)
    for name, dtype in {"int": np.int32, "unsigned": np.uint32}.items():
        start_here, here = start.view(dtype), arguments.view(dtype)
        results = {
            "add": start + arguments.sum(dtype=np.uint32),
            "sub": start - arguments.sum(dtype=np.uint32),
            "min": min(start_here[0], here.min()),
            "max": max(start_here[0], here.max()),
            "and": start & np.bitwise_and.reduce(arguments | np.uint32(0x80F0F000)),
            "or": start | np.bitwise_or.reduce(arguments & np.uint32(0x80010203)),
            "xor": start ^ np.bitwise_xor.reduce(arguments),
            "unordered.exch": np.append(start_here, here),
        }
        for op, value in results.items():
            array = np.asarray(value)
            expected[f"{op.replace('.', f'.')}.{name}"] = array.view(dtype) if array.dtype == np.uint32 else array
    expected["add.ull"] = (192 << 40) + 5 + int(arguments.sum(dtype=np.uint64))
    expected["unordered.exch.ull"] = np.append(7, (1 << 40) + calls)
    expected["unordered.exch.float"] = np.append(-1, calls + 0.5)
    # The first of each goes to an end of the range 0..10; then they go around.
    expected["inc_dec"] = np.array([191 % 11, 10 - 191 % 11])
    expected["unordered.inc"] = np.append(99, np.arange(191) % 11)
    expected["unordered.dec"] = np.append(99, 10 - np.arange(191) % 11)
    for name, digits in {"int": 32, "unsigned": 32, "ull": 32, "ushort": 16}.items():
        expected |= {f"cas.{name}": np.array([3**192 % 2**digits, 5]), f"cas_saw_five.{name}": np.ones(96)}
    return expected


def expected_warp() -> dict[str, np.ndarray]:
    calls = np.arange(192)
    lane = calls % 32
    bits = random_bits(calls)

    def per_warp(function: Callable[[np.ndarray], object]) -> np.ndarray:
        """A value per thread from the threads of its warp."""
        return np.concatenate([np.broadcast_to(function(calls[w : w + 32]), 32) for w in range(0, 192, 32)])

    def ballot(predicate: np.ndarray) -> np.ndarray:
        return per_warp(lambda warp: sum(1 << i for i in range(32) if predicate[warp[i]]))

    def same(values: np.ndarray) -> np.ndarray:
        return np.array([sum(1 << j for j in range(32) if values[i - i % 32 + j] == values[i]) for i in calls])

    odd = bits & 1
    thirds = lane % 3 == 0
    expected = {
        "votes": np.stack(
            [
                ballot(odd),
                per_warp(lambda warp: (warp < 64).all()),
                per_warp(lambda warp: (warp != 70).all()),
                per_warp(lambda warp: (warp == 70).any()),
                same(bits & 7),
                same(bits & 3),
                np.where(thirds, ballot(odd & thirds), 0),
                thirds,
            ]
        ),
        "odd_predicates": ballot(calls % 3 != 1),
    }
    values = bits % 1000 + calls * 1000
    rows = []
    for width in (8, 16, 32):
        start = calls - calls % width
        xor = np.where((lane ^ 9) >= lane - lane % width + width, calls, calls ^ 9)
        rows += [
            values[start + (lane * 5 + 3) % width],
            values[np.where(calls - 3 < start, calls, calls - 3)],
            values[np.where(calls + 5 >= start + width, calls, np.minimum(calls + 5, 191))],
            values[xor],
        ]
    expected |= {f"widths.{name}": np.stack(rows) for name in ("int", "float", "double", "ull")}

    values = calls * 3 + 1
    first = values[calls - lane + (15 - lane) % 16]
    third = values[np.where(lane % 8 >= 6, calls, np.minimum(calls + 2, 191))]
    third_ballot = per_warp(lambda warp: sum(1 << i for i in range(16, 24) if values[warp[i]] & 2)) >> 16
    fourth = values[np.where(lane % 8 == 0, calls, calls - 1)]
    halves = np.where(lane < 16, first + first[calls ^ 1], np.where(lane < 24, third + third_ballot, fourth))
    expected["half_warps"] = halves + per_warp(lambda warp: halves[warp[31]])

    peers = same(bits % 5)
    leader = np.array([(int(mask) & -int(mask)).bit_length() - 1 for mask in peers])
    expected["masks_of_data"] = (calls - lane + leader) * 100 + [int(mask).bit_count() for mask in peers]
    expected["active_mask"] = np.full(192, 0x22222222)  # the others complement theirs
    neighbour = calls ^ 1
    expected["warp_barriers"] = np.where(lane >= 16, (neighbour ^ 5) * 2, neighbour)

    block = calls // 96
    counts = np.bincount(block, (random_bits(calls + 1) & 3) != 0)
    second = block == 1  # the block of thread 100
    expected["block_votes"] = np.stack([counts[block], ~second, second, np.full(192, 10)])

    for n in (0, 45, 190):
        in_warp = np.clip(n - (calls - lane), 0, 32)
        expected[f"early_return_{n}"] = np.where(calls < n, calls - lane + 2 + in_warp, -1)
    expected["returned_lanes"] = np.where(lane % 2 == 0, 0x55555545, 0)

    vectors = random_eighths(4 * 192).reshape(192, 4)
    mirrored = vectors[block * 96 + 95 - calls % 96][:, ::-1]
    sums = mirrored[:, :2] + vectors[:, :2]
    expected["vectors"] = np.column_stack([sums, (vectors * 8).sum(axis=1), vectors.reshape(-1)[:192]])
    # sizeof * 100 + alignof, from the CUDA programming guide.
    expected["layouts"] = np.array(
        [202, 301, 404, 404, 808, 808, 1204, 1616, 808, 1616, 808, 1204, 1616, 1616, 1616, 202, 404, 202, 404]
    )
    expected["misalignment"] = np.array([0])

    shift = np.where(calls % 33 == 32, 31, calls % 33).astype(np.uint32)
    shifted = bits >> shift
    floats = random_eighths(192)
    factor = 1 + (bits >> 9) / 2**23
    float_bits = floats.astype(np.float32).view(np.int32)
    left = (shifted << (calls % 7).astype(np.uint32)).astype(np.uint32)
    expected["bit_functions"] = np.stack(
        [
            [int(x).bit_count() for x in shifted],
            [32 - int(x).bit_length() for x in shifted],
            [(int(x) & -int(x)).bit_length() for x in left],
            np.array([int(f"{x:032b}"[::-1], 2) for x in shifted], dtype=np.uint32).view(np.int32),
            float_bits,
            np.where(floats == 0, float_bits, 0) + floats * 16,
            np.clip(floats, 0, 1) * 8,
            np.minimum(calls - 50, 7) * 1000 + np.maximum(calls, 30),
            [((int(x) << 20) | 1).bit_count() for x in shifted],
            (factor * factor - 1.5).astype(np.float32).view(np.int32),  # exact before the conversion
        ]
    )
    return expected


PLAIN_PROGRAMS: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "reduction": expected_reduction,
    "transpose": expected_transpose,
    "scan": expected_scan,
    "matmul": expected_matmul,
    "atomics": expected_atomics,
    "warp": expected_warp,
}
SIXTEEN_BIT = ("half", "bfloat16", "half2", "bfloat162")


def check_arrays(arrays: Arrays, expected: dict[str, np.ndarray], is_hex: Callable[[str], bool]) -> None:
    assert arrays.keys() == expected.keys()
    for name, text in arrays.items():
        actual = words(text) if is_hex(name) else numbers(text)
        wanted = np.asarray(expected[name]).reshape(-1)
        if name.startswith("unordered."):
            actual, wanted = np.sort(actual), np.sort(wanted)
        assert_equal(actual, wanted, name)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("name", PLAIN_PROGRAMS)
def test_results(device: Device, name: str) -> None:
    expected = PLAIN_PROGRAMS[name]()
    for schedule in SCHEDULES:
        arrays = device.run(name, SCHEDULE=schedule)
        check_arrays(arrays, expected, lambda array: array.split(".")[-1] in SIXTEEN_BIT)


@pytest.mark.parametrize("name", ["reduction", "warp"])
def test_results_when_fortified(any_device: Device, name: str) -> None:
    for schedule in (-2, 5):
        check_arrays(any_device.run(name, SCHEDULE=schedule), PLAIN_PROGRAMS[name](), lambda _: False)
