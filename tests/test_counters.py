"""The checker against the GPU's own counters, as stored in ``notebooks/measurements/counters.json``."""

from __future__ import annotations

import json

import pytest

from common import jit, load_chapter
from common.counters import CHAPTERS, COUNTERS, JSON, PAGE, count, page

# What a cache changes is explained on the page; everything else has to agree exactly.
BEHIND_A_CACHE = ("DRAM read, bytes", "DRAM written, bytes")


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, object]]:
    return json.loads(JSON.read_text())["chapters"]


def test_stored_counters_are_of_the_present_kernels(stored: dict[str, dict[str, object]]) -> None:
    assert set(stored) == set(CHAPTERS)
    for name, entry in stored.items():
        assert entry["source"] == jit.kernel_digest(load_chapter(name).info.kernel), f"measure {name} again"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAPTERS)
def test_counts_equal_the_gpu(name: str, stored: dict[str, dict[str, object]]) -> None:
    traffic = count(name)
    measured = stored[name]["kernels"]
    assert set(measured) == {kernel for kernel in traffic.kernels if kernel != "memset"}
    compared = 0
    for kernel, values in measured.items():
        part = traffic.of_kernel(kernel)
        for counter in COUNTERS:
            if counter.counted is None or counter.title in BEHIND_A_CACHE:
                continue
            assert counter.counted(part) == values[counter.metric], (kernel, counter.title)
            compared += values[counter.metric] > 0
    assert compared >= 10


@pytest.mark.slow
def test_page_is_current() -> None:
    assert page(PAGE.read_text()) == PAGE.read_text(), "run make counters-page"
