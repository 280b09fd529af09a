"""Which kernels compute-sanitizer watches, and what it says where it cannot run."""

from __future__ import annotations

import re

import pytest

from common import jit, list_chapters, sanitize

KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


def test_every_kernel_is_watched() -> None:
    """A kernel that the filter does not name would be skipped, and nothing found in it."""
    for info in list_chapters():
        texts = [path.read_text() for path in (info.kernel, *jit.included_headers(info.kernel))]
        kernels = [name for text in texts for name in KERNEL.findall(text)]
        assert len(kernels) == sum(text.count("__global__ void") for text in texts) > 0
        assert set(kernels) <= set(sanitize.kernel_names([info])), info.name


@pytest.mark.skipif(jit.cuda_problem() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["02"]) == 2
    assert "cannot sanitize: " in capsys.readouterr().err


def test_an_unknown_chapter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        sanitize.main(["77"])
    assert error.value.code == 2
    assert "there is no chapter '77'" in capsys.readouterr().err
