"""The CPU device against independent results: small CUDA programs that know nothing about attention.

Each program of ``tests/cpu_device`` is built with every host compiler and run. Its printed arrays are
compared with what numpy, PyTorch or exact fractions say. nvcc compiles the same files, and where there is a
GPU it runs them too.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product as pairs
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import mostly_slow

from common import jit

REPO = Path(__file__).resolve().parent.parent
RUNTIME = REPO / "common" / "cpu_device"
PROGRAMS = REPO / "tests" / "cpu_device"

Arrays = dict[str, str]  # what a program prints: name -> the rest of its line

# ---------------------------------------------------------------- building and running


def run_checked(command: list[str], **kwargs: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)
    assert result.returncode == 0, (
        f"{' '.join(command)} -> {result.returncode}\n{result.stdout}{result.stderr}"
    )
    return result.stdout


def parse(output: str) -> Arrays:
    arrays = {}
    for line in output.splitlines():
        name, colon, values = line.partition(":")
        assert colon, line
        assert name not in arrays, line
        arrays[name] = values.strip()
    return arrays


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keeps the other workers of pytest-xdist from making ``path`` too."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass
class Device:
    """The CPU device built by one compiler: compiles a program when it is first run."""

    compiler: str
    flags: list[str]  # come first, as a compiler's built-in defaults do
    folder: Path

    def compile(self, source: Path, target: Path, *arguments: str) -> None:
        includes = [f"-I{RUNTIME}", f"-I{REPO}"]
        options = ["-std=c++17", "-O2", "-pthread", "-fstack-clash-protection", "-Wall", "-Wextra", "-Werror"]
        options += ["-Wno-unknown-pragmas", "-Wno-psabi"]  # #pragma unroll; an ABI of GCC 4.5
        command = [self.compiler, *self.flags, *options, *includes, "-x", "c++", str(source)]
        run_checked([*command, "-x", "none", *arguments, "-o", str(target)])

    def built(self, target: Path, source: Path, *arguments: str) -> Path:
        with exclusive(target):
            if not target.exists():
                unfinished = target.with_suffix(".unfinished")  # a failed build must not pass for a result
                self.compile(source, unfinished, *arguments)
                unfinished.rename(target)
        return target

    def program(self, name: str) -> Path:
        objects = [self.built(self.folder / f"{s.stem}.o", s, "-c") for s in sorted(RUNTIME.glob("*.cpp"))]
        source = next(PROGRAMS.glob(f"{name}.c*"))
        return self.built(self.folder / name, source, *map(str, objects), "-ldl")

    def run(self, name: str, *arguments: str, stdin: str | None = None, **environment: object) -> Arrays:
        env = {k: v for k, v in os.environ.items() if not k.startswith("FA2_") and k != "SCHEDULE"}
        env |= {key: str(value) for key, value in environment.items()}
        return parse(run_checked([str(self.program(name)), *arguments], input=stdin, env=env))


# What comes first is what a compiler of a distribution predefines. Ubuntu's fortified longjmp refuses to jump
# between stacks; there, the programs that switch in every way are enough.
VARIANTS = {"g++": ("g++", []), "clang++": ("clang++", []), "fortified": ("g++", ["-D_FORTIFY_SOURCE=3"])}


@pytest.fixture(scope="session")
def device_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the workers of pytest-xdist, so that each program is built once."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "cpu_device"
    folder.mkdir(exist_ok=True)
    return folder


def device_of(variant: str, device_folder: Path) -> Device:
    compiler, flags = VARIANTS[variant]
    if shutil.which(compiler) is None:
        if compiler == "g++":
            pytest.fail("the CPU device needs g++, which is not on PATH")
        pytest.skip(f"{compiler} is not on PATH")
    folder = device_folder / variant
    folder.mkdir(exist_ok=True)
    return Device(compiler, flags, folder)


@pytest.fixture(scope="session", params=mostly_slow(["g++", "clang++"], lambda name: name == "g++"))
def device(request: pytest.FixtureRequest, device_folder: Path) -> Device:
    return device_of(request.param, device_folder)


@pytest.fixture(scope="session", params=mostly_slow(VARIANTS, lambda name: name == "g++"))
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
        expected |= {
            f"add.{name}": 1 + quarters.sum(),
            f"count.{name}": 192,
            f"unordered.count.{name}": calls,
        }
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
            expected[f"{op}.{name}"] = array.view(dtype) if array.dtype == np.uint32 else array
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
        return np.array(
            [sum(1 << j for j in range(32) if values[i - i % 32 + j] == values[i]) for i in calls]
        )

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
    expected["num_misaligned"] = np.array([0])

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


def expected_async_copy() -> dict[str, np.ndarray]:
    tiles = random_eighths(2560).reshape(10, 64, 4)
    # Whether copies 0 to 3 have arrived. Those of the last group are not waited for before it ends.
    arrived = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    outside = np.where(np.arange(64)[:, None] < 40, random_eighths(256, 4).reshape(64, 4), 0)
    return {
        "groups": np.where(arrived[:, :, None, None] == 1, tiles[:4], np.nan),
        "outside": outside[::-1],
        "pipeline.2": tiles.sum(axis=0)[::-1],
        "pipeline.4": tiles[:9].sum(axis=0)[::-1],
        "change_source": np.concatenate([np.arange(64), 100 + np.arange(64)]),
    }


def expected_barrier() -> dict[str, np.ndarray]:
    threads = np.arange(128)
    whole_block = np.tile((threads + 5 * 37) % 128 + 5, 3)
    pairs = threads
    for repeat in range(7):
        following = pairs[threads ^ 63] + pairs[threads ^ 32]
        pairs = np.where((threads >= 64) | (repeat < 3), following, pairs)
    turns = np.arange(22)
    return {
        "whole_block.0": whole_block,
        "whole_block.15": whole_block,
        "pairs_of_warps": pairs,
        "ping_pong": sum(1000 * round_ + 63 - np.arange(64) for round_ in range(9)),
        "turns": 10 * turns + turns % 4,
    }


def expected_reduce() -> dict[str, np.ndarray]:
    numbers_added = random_eighths(4 * 7 * 96).reshape(-1, 4)
    expected = {}
    for n in (4, 40):
        sums = random_eighths(n, 1 << 20).reshape(-1, 4)
        np.add.at(sums, np.arange(7 * 96) % (n // 4), numbers_added)
        expected[f"sums.{n}"] = sums
    return expected


def swizzled(panel: np.ndarray) -> np.ndarray:
    """A panel [rows, 64] as it lies in shared memory: chunk c of row r at chunk c ^ (r % 8)."""
    chunks = panel.reshape(-1, 8, 8)
    result = np.empty_like(chunks)
    for row in range(len(chunks)):
        for chunk in range(8):
            result[row, chunk ^ row % 8] = chunks[row, chunk]
    return result.reshape(panel.shape)


def in_registers(matrix: np.ndarray) -> np.ndarray:
    """What the registers of a warpgroup hold of a wgmma's D [64, N], as [N / 2, 128]."""
    r, thread = np.arange(matrix.shape[1] // 2)[:, None], np.arange(128)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + r % 4 // 2 * 8
    return matrix[row, r // 4 * 8 + thread % 4 * 2 + r % 2]


def expected_hopper() -> dict[str, np.ndarray]:
    expected = {}
    threads = np.arange(64)
    for rounds in (1, 2, 9):
        expected[f"hand_over.{rounds}"] = sum(1000 * r + 63 - threads for r in range(rounds))
    tensor = (random_bits(range(2 * 40 * 3 * 80)) & 0xFFFF).reshape(2, 40, 3, 80)[..., :72]
    padded = np.zeros((2, 40 + 24, 3, 128))
    padded[:, :40, :, :72] = tensor
    tiles = {
        "inside": (0, 8, 1, 1),
        "last_rows": (0, 32, 0, 1),
        "last_columns": (64, 3, 2, 0),
        "nothing": (0, 40, 0, 0),
    }
    for form, (name, (column, row, head, batch)) in pairs(("f16", "bf16"), tiles.items()):
        panel = padded[batch, row : row + 24, head, column : column + 64]
        expected[f"tile.{form}.{name}"] = swizzled(panel)
    source = random_eighths(200)
    copied = np.concatenate([source[:32], source[100:164]])[::-1]
    expected["bulk"] = np.stack([copied, copied + 1])
    a = (8 * random_eighths(64 * 64)).reshape(64, 64)
    numbers_of_b = 8 * random_eighths(64 * 128, 10000)
    for columns, b_major in pairs((64, 128), "km"):
        b = numbers_of_b[: 64 * columns].reshape(64, columns)
        halves = [in_registers(a[:, k : k + 32] @ b[k : k + 32]) for k in (0, 32)]
        start = np.arange(128)[None, :] + np.arange(columns // 2)[:, None]
        for form in ("f16", "bf16"):
            for a_major in "km":
                name = f"product.{form}.{a_major}.{b_major}.{columns}"
                expected[name] = np.stack([halves[0], halves[0], halves[1]])
            expected[f"product.{form}.r.{b_major}.{columns}"] = start + halves[0] + halves[1]
    expected["pending"] = np.full((32, 128), np.nan)
    return expected


PLAIN_PROGRAMS: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "reduction": expected_reduction,
    "transpose": expected_transpose,
    "scan": expected_scan,
    "matmul": expected_matmul,
    "atomics": expected_atomics,
    "warp": expected_warp,
    "async_copy": expected_async_copy,
    "barrier": expected_barrier,
    "reduce": expected_reduce,
    "hopper": expected_hopper,
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduction", "warp"])
def test_results_when_fortified(device_folder: Path, name: str) -> None:
    for schedule in (-2, 5):
        arrays = device_of("fortified", device_folder).run(name, SCHEDULE=schedule)
        check_arrays(arrays, PLAIN_PROGRAMS[name](), lambda _: False)


# ---------------------------------------------------------------- 16-bit arithmetic


@dataclass(frozen=True)
class Format:
    name: str
    digits: int  # of the significand, the hidden one included
    lowest_bit: int  # exponent of the smallest subnormal
    infinity: int  # its bits

    def values(self, bits: np.ndarray) -> np.ndarray:
        """As float64."""
        with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN
            if self.name == "half":
                return bits.astype(np.uint16).view(np.float16).astype(np.float64)
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def bits(self, values: np.ndarray) -> np.ndarray:
        """Of values that the format has."""
        if self.name == "half":
            return values.astype(np.float16).view(np.uint16)
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    @property
    def largest(self) -> float:
        return float(self.values(np.array([self.infinity - 1]))[0])

    def round(self, values: np.ndarray) -> np.ndarray:
        """float64 rounded once, to nearest even."""
        _, exponent = np.frexp(values)
        quantum = np.maximum(exponent - self.digits, self.lowest_bit)
        rounded = np.ldexp(np.rint(np.ldexp(values, -quantum)), quantum)
        return np.where(np.abs(rounded) > self.largest, np.copysign(np.inf, rounded), rounded)

    def round_fraction(self, value: Fraction) -> float:
        """A dyadic fraction rounded once, to nearest even."""
        exponent = abs(value).numerator.bit_length() - value.denominator.bit_length() + 1
        quantum = Fraction(2) ** max(exponent - self.digits, self.lowest_bit)
        rounded = round(value / quantum) * quantum
        magnitude = float(abs(rounded)) if abs(rounded) <= self.largest else np.inf
        return -magnitude if value < 0 else magnitude

    def same_nan(self, bits: np.ndarray) -> np.ndarray:
        """NaN has many bit patterns, and CUDA promises none of them."""
        return np.where((bits & 0x7FFF) > self.infinity, np.uint16(0x7FFF), bits)


FORMATS = {"half": Format("half", 11, -24, 0x7C00), "bfloat16": Format("bfloat16", 8, -133, 0x7F80)}


def specials(form: Format) -> np.ndarray:
    one = form.bits(np.array([1.0]))[0]
    hidden = 1 << (form.digits - 1)  # the smallest normal number
    positive = [0, 1, 2, hidden - 1, hidden, one, one + 1, form.infinity - 1, form.infinity, 0x7FFF]
    return np.array([*positive, *(0x8000 | word for word in positive)], dtype=np.uint16)


def halfway(form: Format) -> np.ndarray:
    """float64 values half-way between neighbours, from the subnormals to the limit of infinity."""
    below = np.append(np.arange(0, form.infinity - 1, 7), form.infinity - 2)
    middle = (form.values(below) + form.values(below + 1)) / 2
    limit = form.largest + (form.largest - form.values(np.array([form.infinity - 2]))[0]) / 2
    middle = np.append(middle, limit)
    return middle * np.where(np.arange(len(middle)) % 3 == 0, -1, 1)


def hard_for_fma(form: Format) -> np.ndarray:
    """Operands whose exact result is a hair away from half-way, [3, n]: rounding twice gets them wrong."""
    size = 1 << (form.digits - 1)
    a, b = (m.reshape(-1) for m in np.meshgrid(np.arange(size, 2 * size), np.arange(size, 2 * size)))
    product = a * b
    # The product is half a unit in the last place of c, almost.
    near = 2 * size * size
    chosen = np.flatnonzero((product != near) & (np.abs(product - near) <= size // 4))[::3]
    c = (size + np.arange(len(chosen)) % size) * np.where(np.arange(len(chosen)) % 2, -1.0, 1.0)
    first = np.stack([a[chosen] / size, b[chosen] / (4 * size), c])
    # The product is half-way, and c is too small for anything but to break the tie.
    extra = np.where(product >= near, form.digits, form.digits - 1)
    tied = np.flatnonzero(product % (1 << extra) == 1 << (extra - 1))
    tied = tied[:: max(1, len(tied) // 800)]
    tiny = np.ldexp(np.where(np.arange(len(tied)) % 2, -1.0, 1.0), max(form.lowest_bit, -100))
    second = np.stack([a[tied] / size, b[tied] / size, tiny])
    return form.bits(np.concatenate([first, second], axis=1))


@functools.cache
def rounding_input(name: str) -> dict[str, np.ndarray]:
    form = FORMATS[name]
    middle = halfway(form)
    middle_bits = middle.astype(np.float32).view(np.uint32)
    float_specials = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000])
    floats = np.concatenate([middle_bits - 1, middle_bits, middle_bits + 1, float_specials])
    floats = np.concatenate([floats, float_specials | 0x80000000, random_bits(range(6000))]).astype(np.uint32)
    middle_bits = middle.view(np.uint64)
    wide = random_bits(range(2000)).astype(np.uint64) << 32 | random_bits(range(2000, 4000))
    doubles = np.concatenate([middle_bits - 1, middle_bits, middle_bits + 1, wide])
    near_ties = [(1 << k) + (1 << (k - form.digits)) + d for k in range(form.digits, 31) for d in (-1, 0, 1)]
    ints = np.array([*near_ties, *(-tie for tie in near_ties), *range(-300, 300), 2**31 - 1, -(2**31)])
    special = specials(form)
    operands = np.stack([m.reshape(-1) for m in np.meshgrid(special, special, special[::3])])
    uniform = random_bits(range(9000)).astype(np.uint16).reshape(3, -1)
    # Exponents around 1, so that neither overflow nor underflow hides the digits.
    moderate = random_bits(range(9000, 18000)).reshape(3, -1) % (6 << (form.digits - 1))
    moderate = moderate + form.bits(np.array([1 / 8]))[0] + (random_bits(range(3000)) % 2 * 0x8000)
    a, b, c = np.concatenate([operands, uniform, moderate.astype(np.uint16), hard_for_fma(form)], axis=1)
    return {
        "floats": floats,
        "doubles": doubles,
        "ints": ints.astype(np.int32).view(np.uint32),
        "words": np.arange(65536),
        "a": a,
        "b": b,
        "c": c,
    }


@functools.cache
def expected_rounding(name: str) -> dict[str, np.ndarray]:
    form, given = FORMATS[name], rounding_input(name)
    a, b, c = (given[operand] for operand in "abc")
    x, y, z = form.values(a), form.values(b), form.values(c)
    with np.errstate(all="ignore"):
        # float64 has more than twice the digits, so that rounding its result again equals rounding once; not
        # so for fma.
        expected = {"add": form.round(x + y), "sub": form.round(x - y)}
        expected |= {"mul": form.round(x * y), "div": form.round(x / y)}
        fma = x * y + z
        for i in np.flatnonzero(np.isfinite(x) & np.isfinite(y) & np.isfinite(z) & (fma != 0)):
            exact = Fraction(x[i]) * Fraction(y[i]) + Fraction(z[i])
            fma[i] = form.round_fraction(exact)
        twice = form.round((x * y + z).astype(np.float32).astype(np.float64))
        assert np.sum((twice != fma) & np.isfinite(fma)) > 100, "no input here tells one rounding from two"
        expected["fma"] = fma
        words_of = {operation: form.bits(values) for operation, values in expected.items()}
        floats = torch.from_numpy(given["floats"].view(np.float32))
        words_of["from_float"] = to_bits(floats.to(torch.float16 if name == "half" else torch.bfloat16))
        words_of["from_double"] = form.bits(form.round(given["doubles"].view(np.float64)))
        words_of["from_int"] = form.bits(form.round(given["ints"].view(np.int32).astype(np.float64)))
        both_zero = (x == 0) & (y == 0)  # CUDA: +0 is greater than -0
        words_of["max"] = np.where(both_zero, a & b, form.bits(np.fmax(x, y)))
        words_of["min"] = np.where(both_zero, a | b, form.bits(np.fmin(x, y)))
    words_of |= {"neg": a ^ 0x8000, "abs": a & 0x7FFF}
    return {operation: form.same_nan(bits) for operation, bits in words_of.items()}


def run_rounding(run: Callable[..., Arrays], name: str) -> Arrays:
    lines = [
        f"{key}: " + " ".join(f"{word:x}" for word in array) for key, array in rounding_input(name).items()
    ]
    return run("rounding", name, stdin="\n".join(lines))


ROUNDED = ["from_float", "add", "sub", "mul", "div", "fma", "neg", "abs"]


def check_rounding(arrays: Arrays, name: str, operations: list[str]) -> None:
    form, expected = FORMATS[name], expected_rounding(name)
    for operation in operations:
        assert_equal(form.same_nan(words(arrays[operation])), expected[operation], f"{operation} {name}")


def check_rest_of_rounding(arrays: Arrays, name: str) -> None:
    form = FORMATS[name]
    floats = np.array(arrays["to_float_bits"].split(), dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        values = floats.astype(np.float64)
    assert_equal(values, form.values(rounding_input(name)["words"]), "to_float")
    assert np.signbit(floats[0x8000])  # -0, which compares equal to 0
    assert arrays["num_differences_of_pairs"] == "0 0 0"


def test_16_bit_arithmetic_rounds_once(device: Device) -> None:
    for name in FORMATS:
        arrays = run_rounding(device.run, name)
        check_rounding(arrays, name, ROUNDED)
        check_rest_of_rounding(arrays, name)


def check_one_rounding(device_folder: Path, name: str, operations: list[str]) -> None:
    arrays = run_rounding(device_of("g++", device_folder).run, name)
    check_rounding(arrays, name, operations)


@pytest.mark.parametrize("name", FORMATS)
def test_16_bit_max_and_min(device_folder: Path, name: str) -> None:
    check_one_rounding(device_folder, name, ["max", "min"])


@pytest.mark.parametrize("name", FORMATS)
def test_16_bit_conversion_of_doubles_rounds_once(device_folder: Path, name: str) -> None:
    check_one_rounding(device_folder, name, ["from_double"])


def test_half_conversion_of_ints_rounds_once(device_folder: Path) -> None:
    check_one_rounding(device_folder, "half", ["from_int"])


def test_bfloat16_conversion_of_ints_rounds_once(device_folder: Path) -> None:
    check_one_rounding(device_folder, "bfloat16", ["from_int"])


# ---------------------------------------------------------------- tensor cores


def start_of_row(lane: np.ndarray) -> np.ndarray:
    """``start_of_row`` of tensor_core.cu."""
    return (lane * 7 + 5) % 48 * 24 + lane % 3 * 8


def elements(register: np.ndarray) -> np.ndarray:
    """The two 16-bit numbers of each register, the lower first, along a new last axis."""
    return np.stack([register & 0xFFFF, register >> 16], axis=-1)


def registers(pairs: np.ndarray) -> np.ndarray:
    return pairs[..., 0].astype(np.uint32) | pairs[..., 1].astype(np.uint32) << 16


def expected_matrices(count: int) -> dict[str, np.ndarray]:
    memory = random_bits(range(48 * 24)) & 0xFFFF
    # Where each number of each matrix lies: [matrix, row, column].
    places = (start_of_row(np.arange(8 * count))[:, None] + np.arange(8)).reshape(count, 8, 8)
    matrices = memory[places]
    stored = memory.copy()
    new = random_bits(range(5000, 5000 + 32 * count))
    stored[places] = elements(new).reshape(count, 8, 8)
    return {
        f"load.{count}": registers(matrices.reshape(count, 32, 2)),
        f"load_trans.{count}": registers(matrices.swapaxes(1, 2).reshape(count, 32, 2)),
        f"store.{count}": stored,
    }


def mma_input(size: int, seed: int, *, is_random: bool) -> np.ndarray:
    bits = random_bits(range(seed, seed + size))
    return (bits >> 8) / 2**23 - 1 if is_random else bits.astype(np.float64) % 17 - 8


def expected_mma(dtype: torch.dtype, *, is_random: bool) -> tuple[np.ndarray, np.ndarray]:
    """The exact results, and the sums of the magnitudes that were added."""

    def rounded(size: int, seed: int) -> np.ndarray:
        return torch.from_numpy(mma_input(size, seed, is_random=is_random)).float().to(dtype).double().numpy()

    a, b = rounded(12 * 256, 0).reshape(12, 16, 16), rounded(12 * 128, 10000).reshape(12, 16, 8)
    c = mma_input(12 * 128, 20000, is_random=is_random).astype(np.float32).astype(np.float64)
    c = c.reshape(12, 16, 8)
    return c + 2 * (a @ b), np.abs(c) + 2 * (np.abs(a) @ np.abs(b))


@functools.cache
def tensor_core_input() -> tuple[np.ndarray, np.ndarray]:
    """Bits of fp32 numbers: those that pack() rounds, and those that fast_exp2() gets."""
    to_pack = [rounding_input(name)["floats"] for name in FORMATS]
    edges = np.array(
        [-126, -126.00001, -125.99999, -127, -149, -1000, -np.inf, np.inf, 0, -0.0, 127.99999, 128]
    )
    ordinary = (random_bits(range(4000)) >> 8) / 2**24 * 252 - 126
    exponents = np.concatenate([edges, np.arange(-130, 130), ordinary, [np.nan]]).astype(np.float32)
    return np.concatenate(to_pack), exponents.view(np.uint32)


def run_tensor_core(run: Callable[..., Arrays], **environment: object) -> Arrays:
    lines = [f"{len(bits)} " + " ".join(f"{word:x}" for word in bits) for bits in tensor_core_input()]
    return run("tensor_core", stdin="\n".join(lines), **environment)


def check_tensor_core(arrays: Arrays) -> None:
    for count in (1, 2, 4):
        for name, expected in expected_matrices(count).items():
            assert_equal(numbers(arrays[name]), expected, name)
    dtypes = {"half": torch.float16, "bfloat16": torch.bfloat16}
    for name, dtype in dtypes.items():
        exact, _ = expected_mma(dtype, is_random=False)
        assert_equal(numbers(arrays[f"mma.integers.{name}"]), exact, name)
        exact, magnitude = expected_mma(dtype, is_random=True)
        error = np.abs(numbers(arrays[f"mma.random.{name}"]) - exact.reshape(-1)) / magnitude.reshape(-1)
        assert error.max() < 1e-6, name

    to_pack, exponents = tensor_core_input()
    floats = torch.from_numpy(to_pack.view(np.float32))
    for name, form in FORMATS.items():
        rounded = to_bits(floats.to(dtypes[name]))
        pairs = elements(np.array(arrays[f"pack.{name}.bits"].split(), dtype=np.uint32)).astype(np.uint16)
        expected = form.same_nan(np.stack([rounded, rounded[::-1]], axis=-1))
        assert_equal(form.same_nan(pairs).reshape(-1), expected, name)
        back = numbers(arrays[f"pack.{name}.back"]).astype(np.float32)  # nine digits tell them apart
        assert_equal(back, form.values(pairs).T, name)

    with np.errstate(all="ignore"):
        exact = np.exp2(exponents.view(np.float32).astype(np.float64))
        exact[exact < 2.0**-126] = 0
        exact[exact >= 2.0**128] = np.inf
        exp2 = numbers(arrays["exp2"]).astype(np.float32)
        special = (exact == 0) | ~np.isfinite(exact)
        assert_equal(exp2[special], exact[special])
        error = np.abs(exp2 / exact - 1)[~special]
    assert error.max() < 2.0**-22


def test_tensor_core(device: Device) -> None:
    for schedule in SCHEDULES:
        check_tensor_core(run_tensor_core(device.run, SCHEDULE=schedule))


# ---------------------------------------------------------------- errors


def line_of(marker: str, file: str = "errors.cu") -> str:
    """ "errors.cu:12" for the line with the comment ``// LINE marker``."""
    lines = (PROGRAMS / file).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"// LINE {marker}"))
    return f"{file}:{number}"


CULPRIT = "block (1,2,0), thread (3,1,0): "  # the thread of is_culprit() in errors.cu
ANY_THREAD = "thread (N,N,0): "  # N: a number that depends on the schedule
GRID = " (grid 4x3x2, block 8x8x1, 0 bytes of shared memory)"
ONE_BLOCK = " (grid 1x1x1, block 8x8x1, 0 bytes of shared memory)"
ONE_THREAD = " (grid 1x1x1, block 1x1x1, 0 bytes of shared memory)"
DEADLOCK = "deadlock, no thread of the block can go on: "

ONE_BLOCK_2048 = ONE_BLOCK.replace(" 0 bytes", " 2048 bytes")
GRID_2048 = GRID.replace(" 0 bytes", " 2048 bytes")


def wrong_address(case: str, call: str, why: str, grid: str = GRID_2048) -> tuple[str, str]:
    return "cudaErrorIllegalAddress", f"kernel {case}, {CULPRIT}{call}() at {line_of(case)}: {why}{grid}"


MISALIGNED = "misaligned, the address is no multiple of 16"

# Case of errors.cu -> cudaGetErrorName, the whole text of launch_error.
ERRORS: dict[str, tuple[str, str]] = {
    "missing_lanes": (
        "cudaErrorLaunchTimeout",
        f"kernel missing_lanes, block (1,2,0), {ANY_THREAD}{DEADLOCK}32 threads (first (0,0,0)) wait for "
        f"__shfl_sync(mask 0xffffffff) at {line_of('missing_lanes.shuffle')}; 32 threads (first (0,2,0)) "
        f"wait for __syncthreads() at {line_of('missing_lanes.barrier')}{GRID}",
    ),
    "stuck_warp": (
        "cudaErrorLaunchTimeout",
        f"kernel stuck_warp, block (1,2,0), {ANY_THREAD}{DEADLOCK}16 threads (first (0,6,0)) wait for "
        f"__ballot_sync(mask 0xffffffff) at {line_of('stuck_warp.ballot')}; 32 threads (first (0,0,0)) "
        f"wait for __syncthreads() at {line_of('stuck_warp.barrier')}; 16 threads (first (0,4,0)) wait for "
        f"__syncwarp(mask 0xffffffff) at {line_of('stuck_warp.syncwarp')}{GRID}",
    ),
    "different_masks": (
        "cudaErrorLaunchTimeout",
        f"kernel different_masks, block (0,0,0), {ANY_THREAD}{DEADLOCK}32 threads (first (0,0,0)) wait for "
        f"__shfl_xor_sync(mask 0x55555557) at {line_of('different_masks.shuffle')}; 32 threads (first "
        f"(1,0,0)) wait for __syncthreads() at {line_of('different_masks.barrier')}{ONE_BLOCK}",
    ),
    "early_return": (
        "cudaErrorLaunchFailure",
        f"kernel early_return, block (1,2,0), {ANY_THREAD}barrier not reached by every thread: thread "
        f"(N,N,0) waits for __syncthreads() at {line_of('early_return')}, but thread (3,1,0) has "
        f"returned{GRID}",
    ),
    "divergent_barriers": (
        "cudaErrorLaunchFailure",
        f"kernel divergent_barriers, block (1,2,0), {ANY_THREAD}threads wait at different barriers: thread "
        f"(N,N,0) for __syncthreads() at {line_of('divergent_barriers.one')}, thread (N,N,0) for "
        f"__syncthreads() at {line_of('divergent_barriers.other')}{GRID}",
    ),
    "barrier_kinds": (
        "cudaErrorLaunchFailure",
        f"kernel barrier_kinds, block (0,0,0), {ANY_THREAD}threads wait at different barriers: thread "
        f"(N,N,0) for __syncthreads_count() at {line_of('barrier_kinds.count')}, thread (N,N,0) for "
        f"__syncthreads_or() at {line_of('barrier_kinds.or')}{ONE_BLOCK}",
    ),
    "foreign_mask": (
        "cudaErrorLaunchFailure",
        f"kernel foreign_mask, {CULPRIT}__shfl_down_sync(mask 0xfffff7ff) at {line_of('foreign_mask')} is "
        f"called by lane 11, which its mask does not name{GRID}",
    ),
    "failed_assert": (
        "cudaErrorAssert",
        f'kernel failed_assert, {CULPRIT}assertion `!is_culprit() && "thread 3 must not come here"` '
        f"failed at {line_of('failed_assert')}{GRID}",
    ),
    "trap": ("cudaErrorLaunchFailure", f"kernel trap, {CULPRIT}__trap() at {line_of('trap')}{GRID}"),
    "null_pointer": (
        "cudaErrorIllegalAddress",
        f"kernel null_pointer, {CULPRIT}invalid access to memory at address 0x0 (null pointer){GRID}",
    ),
    "wild_pointer": (
        "cudaErrorIllegalAddress",
        f"kernel wild_pointer, {CULPRIT}invalid access to memory at address 0x10{GRID}",
    ),
    "stack_overflow": (
        "cudaErrorIllegalAddress",
        "kernel stack_overflow, block (0,0,0), thread (0,0,0): stack overflow: more than 128 KiB of local "
        f"variables{ONE_THREAD}",
    ),
    "recursion": (
        "cudaErrorIllegalAddress",
        f"kernel recursion, {CULPRIT}stack overflow: more than 128 KiB of local variables{GRID}",
    ),
    "endless_loop": (
        "cudaErrorLaunchTimeout",
        f"kernel endless_loop, {CULPRIT}the block has not ended after 0.3 s (endless loop?); the limit is "
        f"FA2_CPU_BLOCK_TIMEOUT seconds{GRID}",
    ),
    "too_many_threads": (
        "cudaErrorInvalidConfiguration",
        "kernel unreached: invalid configuration: block (32,33,1): between 1 and 1024 threads, at most "
        "(1024,1024,64) (grid 1x1x1, block 32x33x1, 0 bytes of shared memory)",
    ),
    "block_too_deep": (
        "cudaErrorInvalidConfiguration",
        "kernel unreached: invalid configuration: block (1,1,65): between 1 and 1024 threads, at most "
        "(1024,1024,64) (grid 1x1x1, block 1x1x65, 0 bytes of shared memory)",
    ),
    "empty_block": (
        "cudaErrorInvalidConfiguration",
        "kernel unreached: invalid configuration: block (0,1,1): between 1 and 1024 threads, at most "
        "(1024,1024,64) (grid 1x1x1, block 0x1x1, 0 bytes of shared memory)",
    ),
    "grid_too_tall": (
        "cudaErrorInvalidConfiguration",
        "kernel unreached: invalid configuration: grid (1,65536,1): at least 1 and at most "
        "(2147483647,65535,65535) (grid 1x65536x1, block 1x1x1, 0 bytes of shared memory)",
    ),
    "empty_grid": (
        "cudaErrorInvalidConfiguration",
        "kernel unreached: invalid configuration: grid (4,0,1): at least 1 and at most "
        "(2147483647,65535,65535) (grid 4x0x1, block 1x1x1, 0 bytes of shared memory)",
    ),
    "mma_without_a_lane": (
        "cudaErrorLaunchFailure",
        f"kernel mma_without_a_lane, block (1,2,0), {ANY_THREAD}mma<__nv_bfloat16>() at "
        f"{line_of('mma_without_a_lane')} needs 32 lanes, but thread (3,1,0) has returned{GRID}",
    ),
    "small_warp": (
        "cudaErrorLaunchFailure",
        f"kernel small_warp, block (0,0,0), {ANY_THREAD}mma<__half>() at {line_of('small_warp')} needs 32 "
        f"lanes, but the last warp of the block has 8{ONE_BLOCK.replace('8x8x1', '8x5x1')}",
    ),
    "different_matrices": (
        "cudaErrorLaunchTimeout",
        f"kernel different_matrices, block (0,0,0), {ANY_THREAD}{DEADLOCK}48 threads (first (0,1,0)) wait "
        f"for ldmatrix<2>() at {line_of('different_matrices.two')}; 16 threads (first (0,0,0)) wait for "
        f"ldmatrix_trans<4>() at {line_of('different_matrices.four')}{ONE_BLOCK_2048}",
    ),
    "misaligned_row": wrong_address("misaligned_row", "stmatrix<4>", MISALIGNED),
    "row_elsewhere": wrong_address("row_elsewhere", "ldmatrix<2>", "the address is not one of shared memory"),
    "misaligned_target": wrong_address("misaligned_target", "cp_async_16", MISALIGNED),
    "misaligned_source": wrong_address("misaligned_source", "cp_async_16", MISALIGNED),
    "misaligned_sum": wrong_address("misaligned_sum", "reduce_add", MISALIGNED, GRID),
    "crossed_barriers": (
        "cudaErrorLaunchTimeout",
        f"kernel crossed_barriers, block (0,0,0), {ANY_THREAD}{DEADLOCK}32 threads (first (0,0,0)) wait for "
        f"barrier_sync(1, 64) at {line_of('crossed_barriers.one')}, at which 32 threads have arrived; 32 "
        f"threads (first (0,4,0)) wait for barrier_sync(2, 64) at {line_of('crossed_barriers.other')}, at "
        f"which 32 threads have arrived{ONE_BLOCK}",
    ),
    "barrier_runs_ahead": (
        "cudaErrorLaunchFailure",
        f"kernel barrier_runs_ahead, block (0,0,0), {ANY_THREAD}barrier_arrive(1, 64) at "
        f"{line_of('barrier_runs_ahead')}: the warp has already arrived, and only 32 threads have so far"
        f"{ONE_BLOCK}",
    ),
    "barrier_of_some": (
        "cudaErrorLaunchFailure",
        f"kernel barrier_of_some, block (1,2,0), {ANY_THREAD}barrier not reached by every thread: thread "
        f"(N,N,0) waits for barrier_sync(0, 64) at {line_of('barrier_of_some')}, at which 32 threads have "
        f"arrived, but thread (N,N,0) has returned{GRID}",
    ),
    "too_much_shared": (
        "cudaErrorInvalidValue",
        f"a block needs {228 * 1024} bytes of shared memory, this device has {227 * 1024}",
    ),
}


def check_text(actual: str, expected: str) -> None:
    pattern = re.escape(expected).replace(re.escape("(N,N,0)"), r"\(\d+,\d+,0\)")
    assert re.fullmatch(pattern, actual), f"\n{actual}\ninstead of\n{expected}"


AFTER = " ".join(["2016"] * 4)  # the sum of 0...63, by the valid kernel


@pytest.mark.parametrize("schedule", [-2, 3], ids=["parallel", "seed_3"])
def test_errors_are_reported_and_survived(any_device: Device, schedule: int) -> None:
    """All cases but the one that may end the process, one after the other in one process."""
    cases = [case for case in ERRORS if case != "failed_assert"]
    arrays = any_device.run(
        "errors", *cases, "two_host_threads", SCHEDULE=schedule, FA2_CPU_BLOCK_TIMEOUT=0.3
    )
    for case in cases:
        check_text(arrays[case], " ".join(ERRORS[case]).strip())
        assert arrays[f"{case}.after"] == AFTER, case
    for thread, case in (("one", "trap"), ("other", "foreign_mask")):
        text = " ".join(ERRORS[case]).replace("grid 4x3x2", "grid 2x3x1")
        check_text(arrays[f"two_host_threads.{thread}"], text)
    assert arrays["two_host_threads.text_is_kept"] == "1"


def hopper_line(name: str) -> str:
    return line_of(name, "hopper_errors.cu")


_WAITERS = f"{DEADLOCK}128 threads (first (0,0,0)) wait for mbarrier_wait(), phase 0 lacks"
HOPPER_ERRORS = {
    "no_init": f"mbarrier_wait() at {hopper_line('no_init')}: the barrier is not initialised",
    "arrival_missing": (f"{_WAITERS} 1 of 2 arrivals and 0 of 0 bytes, at {hopper_line('arrival_missing')}"),
    "bytes_missing": f"{_WAITERS} 0 of 1 arrivals and 16 of 64 bytes, at {hopper_line('bytes_missing')}",
    "too_many_bytes": (
        f"bulk_load() at {hopper_line('too_many_bytes')}: copies of 80 bytes in phase 0 of a barrier that "
        "was told to expect 64"
    ),
    "arrives_too_often": (
        f"mbarrier_arrive() at {hopper_line('arrives_too_often')}: all 1 arrivals of phase 0 are there, but "
        "only 0 of 64 bytes"
    ),
    "no_fence": (
        f"wgmma() at {hopper_line('no_fence')}: no wgmma_fence() since the warpgroup could touch its "
        "registers"
    ),
    "different_matrices": (
        f"wgmma() at {hopper_line('different_matrices')}: the lanes of the warpgroup give different "
        "matrices in shared memory"
    ),
    "warp_missing": (
        f"wgmma_commit() at {hopper_line('warp_missing')} needs 128 lanes, but thread (N,N,0) has returned"
    ),
}


@pytest.mark.parametrize("schedule", [-2, 3], ids=["parallel", "seed_3"])
def test_hopper_errors(device: Device, schedule: int) -> None:
    arrays = device.run("hopper_errors", *HOPPER_ERRORS, SCHEDULE=schedule)
    for case, text in HOPPER_ERRORS.items():
        error = "Timeout" if text.startswith(DEADLOCK) else "Failure"
        where = f"kernel {case}, block (0,0,0), thread (N,N,0): "
        size = " (grid 1x1x1, block 128x1x1, 9216 bytes of shared memory)"
        check_text(arrays[case], f"cudaErrorLaunch{error} {where}{text}{size}")


def test_time_limit_is_one_of_a_block(device_folder: Path) -> None:
    device = device_of("g++", device_folder)
    device.program("errors")  # the time to build it does not count
    start = time.monotonic()
    arrays = device.run("errors", "many_short_blocks", SCHEDULE=-1, FA2_CPU_BLOCK_TIMEOUT=0.3)
    assert arrays["many_short_blocks"] == "cudaSuccess"
    assert time.monotonic() - start > 0.6, "the blocks are too short to show anything"


@pytest.mark.parametrize("limit", ["x", "", "nan", "-1", "0.3s"])
def test_a_time_limit_that_is_none(device_folder: Path, limit: str) -> None:
    """It is not taken for no limit at all."""
    program = str(device_of("g++", device_folder).program("errors"))
    result = subprocess.run(
        [program, "many_short_blocks"],
        env=os.environ | {"FA2_CPU_BLOCK_TIMEOUT": limit, "SCHEDULE": "-1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"FA2_CPU_BLOCK_TIMEOUT is '{limit}'; expected seconds" in result.stderr
    assert parse(result.stdout)["many_short_blocks"] == "cudaSuccess"


def test_assert(any_device: Device) -> None:
    name, text = ERRORS["failed_assert"]
    arrays = any_device.run("errors", "failed_assert")
    check_text(arrays["failed_assert"], f"{name} {text}")
    assert arrays["failed_assert.after"] == AFTER


def test_exceptions(any_device: Device) -> None:
    arrays = any_device.run("throw")
    where = "block (2,0,0), thread (5,0,0): "
    grid = " (grid 4x1x1, block 32x1x1, 0 bytes of shared memory)"
    check_text(
        arrays["throw_runtime_error"],
        f"cudaErrorLaunchFailure kernel throw_runtime_error, {where}exception: no tile 7{grid}",
    )
    check_text(
        arrays["throw_int"],
        f"cudaErrorLaunchFailure kernel throw_int, {where}exception of unknown type{grid}",
    )
    lane = np.arange(32)
    assert_equal(numbers(arrays["throw_and_catch"]), np.where(lane % 2 == 0, lane + 100, 0))


# ---------------------------------------------------------------- schedules and poison

SEEDS = ["0", "1", "2", "3"]


def test_schedules(any_device: Device) -> None:
    arrays = any_device.run("schedule", "-2", "-1", *SEEDS)
    calls = np.arange(6 * 40)
    fraction = 1 + (random_bits(calls) >> 9) / np.float32(2**23)
    summands = (fraction * (1 << (random_bits(calls + 1000) % 13))).astype(np.float32)
    in_order = np.cumsum(summands, dtype=np.float32)[-1]
    assert arrays["sum -1"] == f"{in_order.view(np.uint32):08x}"
    assert_equal(numbers(arrays["arrivals -1"]), calls)
    for schedule in ("-2", "-1", *SEEDS):
        arrivals = numbers(arrays[f"arrivals {schedule}"])
        assert_equal(np.sort(arrivals), calls)
        in_blocks = numbers(arrays[f"shared_arrivals {schedule}"]).reshape(12, 40)
        assert_equal(np.sort(in_blocks, axis=1).reshape(-1), np.tile(np.arange(40), 12))
        if schedule != "-2":
            for name in ("sum", "arrivals", "shared_arrivals"):
                assert arrays[f"{name} {schedule}"] == arrays[f"{name} {schedule} again"], "not reproducible"
    for seed in SEEDS:
        # Blocks one after the other, in an order of their own, and so are the threads of each.
        arrivals = numbers(arrays[f"arrivals {seed}"]).reshape(6, 40)
        blocks = arrivals[:, 0] // 40
        assert_equal((arrivals // 40).reshape(-1), np.repeat(blocks, 40))
        assert all((np.diff(row) < 0).any() for row in arrivals)
        assert len({tuple(row % 40) for row in arrivals}) == 6
    assert len({arrays[f"sum {seed}"] for seed in SEEDS}) > 1, "the order does not reach the rounding"
    assert len({tuple(numbers(arrays[f"arrivals {seed}"])[::40] // 40) for seed in SEEDS}) > 1
    again = any_device.run("schedule", "2")
    assert again["sum 2"] == arrays["sum 2"], "another process, another order"


def test_blocks_run_in_parallel_and_atomics_are_atomic(any_device: Device) -> None:
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core: blocks run one after the other")
    arrays = any_device.run("schedule", "rendezvous", "-2", FA2_CPU_BLOCK_TIMEOUT=10)
    assert arrays["rendezvous"] == "cudaSuccess"
    assert arrays["count"] == arrays["float_count"] == "2000000"


def test_blocks_in_order_cannot_wait_for_later_ones(any_device: Device) -> None:
    arrays = any_device.run("schedule", "rendezvous", "-1", FA2_CPU_BLOCK_TIMEOUT=0.1)
    assert arrays["rendezvous"].startswith(
        "cudaErrorLaunchTimeout kernel rendezvous, block (0,0,0), thread (0,0,0)"
    )


@pytest.fixture(scope="session", params=[-2, -1], ids=["parallel", "in_order"])
def poison(request: pytest.FixtureRequest, device: Device) -> Arrays:
    return device.run("poison", SCHEDULE=request.param)


def test_unwritten_shared_memory_is_nan(poison: Arrays) -> None:
    thread = np.tile(np.arange(64), 5)
    written = np.where(thread % 2 == 0, thread % 3 == 0, thread % 3 == 1)
    partly = [f"partly_written.{repeat}" for repeat in range(2)]
    for name in partly:
        assert_equal(numbers(poison[name]), np.where(written, thread, np.nan), name)
    names = poison.keys() - {*partly, "num_calls_of_host_function"}
    assert len(names) == 16
    for name in names:
        found = poison[name].split()
        assert len(found) == 5 * 64
        assert all(value in ("nan", "-nan", "ffff") for value in found), name


def test_thread_local_variables_of_host_functions_are_left_alone(poison: Arrays) -> None:
    assert poison["num_calls_of_host_function"] == "1 2"


# ---------------------------------------------------------------- nvcc


# The first line of a program.
NEEDS_8_0 = "// Needs compute capability 8.0."
NEEDS_9_0 = "// Needs compute capability 9.0."


def nvcc_command() -> list[str]:
    nvcc = jit.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on PATH nor in site-packages (pip install nvidia-cuda-nvcc)")
    return [str(nvcc), "-std=c++17", f"-I{REPO}", "-Werror", "all-warnings"]


@pytest.mark.parametrize(
    "source",
    mostly_slow(sorted(PROGRAMS.glob("*.cu")), lambda path: path.stem == "hopper"),
    ids=lambda path: path.stem,
)
def test_compiles_for_gpus(source: Path, tmp_path: Path) -> None:
    # The toolkit's headers treat 16-bit types differently on each architecture; the rest is the same on all.
    has_16_bit_types = re.search("__half|__nv_bfloat16", source.read_text())
    architectures = ["75", "80", "90a"] if has_16_bit_types else ["75"]
    if source.read_text().startswith(NEEDS_8_0):
        architectures = ["80", "90a"]
    elif source.read_text().startswith(NEEDS_9_0):
        architectures = ["90a"]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    run_checked([*nvcc_command(), *flags, "-c", str(source), "-o", str(tmp_path / "program.o")])


@pytest.fixture(scope="session")
def gpu_run(device_folder: Path) -> Callable[..., Arrays]:
    """Builds a program for the GPU of this machine and runs it."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no NVIDIA GPU")
    folder = device_folder / "gpu"
    folder.mkdir(exist_ok=True)
    major, minor = torch.cuda.get_device_capability()

    def run(name: str, *arguments: str, stdin: str | None = None) -> Arrays:
        source, target = PROGRAMS / f"{name}.cu", folder / name
        if source.read_text().startswith(NEEDS_8_0) and (major, minor) < (8, 0):
            pytest.skip(f"{name}.cu needs compute capability 8.0, this GPU has {major}.{minor}")
        needs_9_0 = source.read_text().startswith(NEEDS_9_0)
        if needs_9_0 and (major, minor) != (9, 0):
            pytest.skip(f"{name}.cu needs compute capability 9.0, this GPU has {major}.{minor}")
        with exclusive(target):
            if not target.exists():
                arch = f"{major}{minor}" + ("a" if needs_9_0 else "")
                gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
                command = [*nvcc_command(), gencode, str(source)]
                run_checked([*command, "-o", str(target)])
        return parse(run_checked([str(target), *arguments], input=stdin))

    return run


# CUDA does not promise which lanes run together, nor what is where a copy or product has not arrived.
NOT_COMPARED = {"active_mask", "groups", "pending"}


def comparable(arrays: Arrays) -> Arrays:
    return {
        name: " ".join(sorted(values.split())) if name.startswith("unordered.") else values
        for name, values in arrays.items()
        if name not in NOT_COMPARED
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN_PROGRAMS)
def test_gpu_prints_the_same(gpu_run: Callable[..., Arrays], device: Device, name: str) -> None:
    assert comparable(gpu_run(name)) == comparable(device.run(name))


@pytest.mark.gpu
def test_gpu_tensor_core_is_as_expected(gpu_run: Callable[..., Arrays]) -> None:
    check_tensor_core(run_tensor_core(gpu_run))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_rounds_as_expected(gpu_run: Callable[..., Arrays], name: str) -> None:
    arrays = run_rounding(gpu_run, name)
    operations = [*ROUNDED, "max", "min", "from_double", "from_int"]
    if name == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
        operations.remove("fma")  # emulated, see rounding.cu
    check_rounding(arrays, name, operations)
    check_rest_of_rounding(arrays, name)
