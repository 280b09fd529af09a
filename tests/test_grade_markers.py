"""Solutions between markers: taken out whole, or refused loudly."""

from __future__ import annotations

import pytest

from common.grade.markers import MarkerError, apply_changes, solution_lines, strip_solutions, without_markers

CU = """int a;
  // BEGIN SOLUTION
  const int secret = 1;
  // END SOLUTION
int b;
"""


def test_a_solution_is_replaced() -> None:
    assert strip_solutions(CU, ".cu") == "int a;\n  // YOUR CODE HERE\nint b;\n"
    assert without_markers(CU, ".cu") == "int a;\n  const int secret = 1;\nint b;\n"
    assert solution_lines(CU, ".cu") == {"const int secret = 1;"}


def test_trailing_spaces_and_tabs_do_not_matter() -> None:
    spaced = CU.replace("BEGIN SOLUTION", "BEGIN SOLUTION  \t").replace("// END", "//END")
    assert strip_solutions(spaced, ".cu") == strip_solutions(CU, ".cu")
    windows = CU.replace("\n", "\r\n")
    assert "secret" not in strip_solutions(windows, ".cu")


def test_a_stub_takes_the_place() -> None:
    text = "// BEGIN SOLUTION\nright();\n// STUB\n// wrong();\n//   deep();\n// // said\n// END SOLUTION\n"
    assert strip_solutions(text, ".cu") == "// YOUR CODE HERE\nwrong();\n  deep();\n// said\n"
    assert without_markers(text, ".cu") == "right();\n"


def test_python_and_markdown() -> None:
    python = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n"
    assert (
        strip_solutions(python, ".py") == "def f():\n    # YOUR CODE HERE\n    raise NotImplementedError()\n"
    )
    assert strip_solutions(python.replace("###", "#"), ".py") == strip_solutions(python, ".py")
    markdown = "text\n<!-- BEGIN SOLUTION -->\n$x = 1$\n<!-- END SOLUTION -->\nmore\n"
    assert strip_solutions(markdown, ".md") == "text\n*Your answer here*\nmore\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "// BEGIN SOLUTION\n// BEGIN SOLUTION\n// END SOLUTION\n",
            "f.cu:2: a solution begins inside the one that began at line 1",
        ),
        ("a\n// BEGIN SOLUTION\nx\n", "begins at line 2 never ends"),
        ("// END SOLUTION\n", "f.cu:1: END SOLUTION outside of a solution"),
        ("// STUB\n", "f.cu:1: STUB outside"),
        ("// BEGIN SOLUTION\n// STUB\n// STUB\n// END SOLUTION\n", "a second STUB"),
        (
            "// BEGIN SOLUTION\n// STUB\ncode();\n// END SOLUTION\n",
            "f.cu:3: what follows STUB must be commented out",
        ),
        ("// BEGIN SOLUTION here\nx\n// END SOLUTION\n", "f.cu:1: .* looks like a marker but is not one"),
        ("// begin solution\nx\n// end solution\n", "looks like a marker"),
        ("x(); // BEGIN SOLUTION\n", "looks like a marker"),
        ("/* BEGIN SOLUTION */\n", "looks like a marker"),
        ("// BEGIN-SOLUTION\n", "looks like a marker"),
        ("// BEGIN  SOLUTION\n", "looks like a marker"),
    ],
)
def test_everything_else_fails_loudly(text: str, named: str) -> None:
    with pytest.raises(MarkerError, match=named):
        strip_solutions(text, ".cu", "f.cu")
    with pytest.raises(MarkerError, match=named):
        without_markers(text, ".cu", "f.cu")


def test_an_unknown_kind_of_file_is_refused() -> None:
    with pytest.raises(MarkerError, match=r"no markers are defined for '\.txt'"):
        strip_solutions("x", ".txt")


def test_changes_fit_once_or_fail() -> None:
    change = "note\n@@ replace\nb\n@@ with\nB\n@@ end\n"
    assert apply_changes("a\nb\nc\n", change, "c") == "a\nB\nc\n"
    with pytest.raises(ValueError, match="has 0 times, not once"):
        apply_changes("a\nc\n", change, "c")
    with pytest.raises(ValueError, match="has 2 times, not once"):
        apply_changes("b\nb\n", change, "c")
    for broken in ("", "@@ replace\nb\n@@ end\n", "@@ replace\nb\n@@ with\nB\n", "@@ wiht\n"):
        with pytest.raises(ValueError, match="expected @@ replace"):
            apply_changes("b\n", broken, "c")
