"""Exercises graded without a GPU: for students ``python -m common.grade NN`` and ``check`` in a notebook."""

from common.grade.cell import check

__all__ = ["check"]
