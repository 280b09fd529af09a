"""What common/notebook.py shows."""

from __future__ import annotations

import sys

import pytest

from common import list_chapters, load_chapter
from common.notebook import edited_kernel, quiet, show


@pytest.mark.parametrize("name", [info.name for info in list_chapters()])
def test_functions_are_shown_whole(name: str) -> None:
    """Every function and struct of every chapter, up to its own last brace."""
    with pytest.raises(ValueError, match="there are ") as error:
        show(name, "no_such_function")
    functions = str(error.value).split("there are ")[1].split(", ")
    assert len(functions) >= 3
    for function in functions:
        text = show(name, function).data.split("```cpp\n")[1].removesuffix("\n```")
        assert text.count("{") == text.count("}") > 0, function
        assert text.endswith(("}", "};")), function


def test_quiet_hides_what_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        print("Building", file=sys.stderr)
    assert capsys.readouterr().err == ""


def test_a_kernel_is_edited_in_a_copy() -> None:
    source = load_chapter("01_naive").info.kernel.read_text()
    kernel = edited_kernel("01_naive", "  // partial[0] is complete")
    assert kernel.info.kernel.read_text() == source.replace("  // partial[0] is complete", "")
    assert kernel.info.kernel == edited_kernel("01_naive", "  // partial[0] is complete").info.kernel
    assert load_chapter("01_naive").info.kernel.read_text() == source
    with pytest.raises(ValueError, match="0 times in 01_naive"):
        edited_kernel("01_naive", "no such text")
