"""The traffic of a chapter as formulas, in the symbols of the book.

``chapter.toml`` has them under ``[traffic.forward]`` and ``[traffic.backward]``: for each tensor, scratch
part, and shared memory the bytes that are ``read`` and ``written``, the ``atomic_bytes`` and the number of
``atomics``; and the ``barriers`` that blocks pass. ``[traffic.where]`` defines the symbols of the chapter's
own. They equal what the checker counts, exactly, at every size (tests/test_formulas.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch

from common.traffic import SHARED, TensorTraffic, Traffic

# What every formula may use. c and g are 0 or 1.
SYMBOLS = {
    "B": "batch",
    "H": "num_heads",
    "N_q": "seqlen_q",
    "N_k": "seqlen_k",
    "d": "head_dim",
    "e": "bytes of an element (4 in fp32, 2 in fp16 and bf16)",
    "c": "1 if is_causal, else 0",
    "g": "1 if deterministic, else 0",
    "r": "1 if return_row_stats, else 0",
    "B_r": "kBlockM, queries in a tile",
    "B_c": "kBlockN, keys in a tile",
    "T_q": "blocks of queries",
    "T_k": "blocks of keys",
    "V": "visible elements of one head's S (all of them unless causal)",
}
# What a chapter calls so if it has it; chapter.toml defines them.
_MEANINGS = {
    "D": "columns of a tile, head_dim padded",
    "n_split": "accumulators of dQ",
    "T": "visited tiles of one head, a sum over the blocks of keys i",
    "R": "the queries of these tiles, counted once for each",
}
_BARRIERS = "barriers"
_EXACT = 2**53  # up to which a float holds every whole number
_OPERATIONS = ("read", "written", "atomic_bytes", "atomics")
_symbols = {name: sympy.Symbol(name, integer=True, nonnegative=True) for name in SYMBOLS}
_index = sympy.Symbol("i", integer=True, nonnegative=True)
# A row sees Max(0, ...) keys: the mask is aligned bottom-right.
_ALWAYS_DEFINED = {
    "T_q": "ceiling(N_q/B_r)",
    "T_k": "ceiling(N_k/B_c)",
    "V": "Piecewise((N_q*N_k, Eq(c, 0)), (Sum(Max(0, Min(N_k, i + 1 + N_k - N_q)), (i, 0, N_q - 1)), True))",
}


@dataclass(frozen=True)
class Problem:
    """One call of a chapter: its sizes and options."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: torch.dtype
    is_causal: bool = False
    deterministic: bool = False
    return_row_stats: bool = False

    def values(self) -> dict[sympy.Symbol, int]:
        """The symbols that a problem gives."""
        numbers = {
            "B": self.batch,
            "H": self.num_heads,
            "N_q": self.seqlen_q,
            "N_k": self.seqlen_k,
            "d": self.head_dim,
            "e": self.dtype.itemsize,
            "c": int(self.is_causal),
            "g": int(self.deterministic),
            "r": int(self.return_row_stats),
        }
        return {_symbols[name]: number for name, number in numbers.items()}


@dataclass(frozen=True)
class Mismatch:
    """A formula that does not give the counted number."""

    memory: str
    operation: str
    formula: int
    counted: int

    def __str__(self) -> str:
        return f"{self.memory} {self.operation}: the formula gives {self.formula:,}, counted {self.counted:,}"


class Formulas:
    """The formulas of one pass of a chapter.

    Args:
        data: ``[traffic]`` of a ``chapter.toml``. pass_: "forward" or "backward".

    Raises ValueError, naming it, for an expression that cannot be read or a symbol nobody defines.
    """

    def __init__(self, data: Mapping[str, Any], pass_: str) -> None:
        self.where = {**data.get("where", {}), **_ALWAYS_DEFINED}
        self.text: dict[tuple[str, str], str] = {}
        for memory, operations in data[pass_].items():
            if memory == _BARRIERS:
                self.text[_BARRIERS, ""] = operations
                continue
            for operation, text in operations.items():
                if operation not in _OPERATIONS:
                    raise ValueError(
                        f"traffic.{pass_}.{memory}.{operation}: expected {', '.join(_OPERATIONS)}"
                    )
                self.text[memory, operation] = text

    @cached_property
    def _names(self) -> dict[str, sympy.Symbol]:
        own = {name: sympy.Symbol(name, integer=True, nonnegative=True) for name in self.where}
        return {**own, **_symbols, "i": _index}

    def _parse(self, text: str) -> sympy.Expr:
        try:
            expression = sympy.sympify(text, locals=self._names)
        except (sympy.SympifyError, TypeError, SyntaxError) as error:
            raise ValueError(f"not a formula: {text!r} ({error})") from error
        unknown = {str(s) for s in expression.free_symbols} - set(self._names)
        if unknown:
            raise ValueError(f"{text!r} uses {', '.join(sorted(unknown))}, which nothing defines")
        return expression

    @cached_property
    def definitions(self) -> dict[sympy.Symbol, sympy.Expr]:
        """What the chapter's own symbols, and T_q, T_k and V, stand for."""
        return {self._names[name]: self._parse(text) for name, text in self.where.items()}

    @cached_property
    def expressions(self) -> dict[tuple[str, str], sympy.Expr]:
        """(tensor, operation) → expression; ("barriers", "") for the barriers."""
        return {key: self._parse(text) for key, text in self.text.items()}

    def _exact_values(self, problem: Problem) -> dict[sympy.Symbol, int]:
        values: dict[sympy.Symbol, Any] = dict(problem.values())
        used = self._used_symbols()
        waiting = {symbol: e for symbol, e in self.definitions.items() if symbol in used}
        while waiting:
            ready = [s for s, e in waiting.items() if e.free_symbols <= set(values)]
            if not ready:
                raise ValueError(f"{', '.join(map(str, waiting))}: nothing defines what they are defined by")
            for symbol in ready:
                values[symbol] = int(waiting.pop(symbol).subs(values).doit())
        return values

    def evaluate(self, problem: Problem) -> dict[tuple[str, str], int]:
        """The value of each formula for one problem. Raises ValueError for a symbol that nothing defines."""
        value_of = _evaluator({str(symbol): value for symbol, value in problem.values().items()}, self.where)
        found = {key: value_of(text) for key, text in self.text.items()}
        return found if all(abs(value) < _EXACT for value in found.values()) else self.exactly(problem)

    def exactly(self, problem: Problem) -> dict[tuple[str, str], int]:
        """What ``evaluate`` gives, whatever its size, computed by SymPy: up to a hundred times slower."""
        values = self._exact_values(problem)
        return {key: int(e.subs(values).doit()) for key, e in self.expressions.items()}

    def symbol(self, name: str, problem: Problem) -> int:
        """The value of one of the symbols for one problem."""
        values = {str(symbol): value for symbol, value in problem.values().items()}
        return _evaluator(values, self.where)(name)

    def predict(self, problem: Problem) -> dict[str, TensorTraffic]:
        """Bytes by tensor, as ``Traffic.tensors`` has them; shared memory under "shared"."""
        result: dict[str, TensorTraffic] = {}
        for (memory, operation), value in self.evaluate(problem).items():
            if memory != _BARRIERS:
                setattr(result.setdefault(memory, TensorTraffic()), operation, value)
        return result

    def mismatches(self, problem: Problem, traffic: Traffic) -> list[Mismatch]:
        """Where formulas and counts differ; what has no formula is held against 0."""
        found = []
        predicted = self.predict(problem)
        counted = {**traffic.tensors, SHARED: traffic.shared}
        for memory in dict.fromkeys([*predicted, *counted]):
            formula = asdict(predicted.get(memory, TensorTraffic()))
            count = asdict(counted.get(memory, TensorTraffic()))
            found += [
                Mismatch(memory, operation, formula[operation], count[operation])
                for operation in _OPERATIONS
                if formula[operation] != count[operation]
            ]
        barriers = self.evaluate(problem).get((_BARRIERS, ""), 0)
        if barriers != traffic.block_barriers:
            found.append(Mismatch(_BARRIERS, "passed", barriers, traffic.block_barriers))
        return found

    def latex(self) -> str:
        """A table of the formulas in Markdown, with the definitions of their symbols below it."""
        rows = ["| memory | operation | bytes |", "|---|---|---|"]
        for (memory, operation), expression in self.expressions.items():
            name = operation.replace("_", " ") or "passed (number)"
            name += " (number)" if operation == "atomics" else ""
            rows.append(f"| `{memory}` | {name} | ${_latex(expression)}$ |")
        used = self._used_symbols()
        lines = [
            f"${_latex(symbol)} = {_latex(expression)}$"
            for symbol, expression in self.definitions.items()
            if symbol in used
        ]
        return "\n".join(rows) + "\n\n" + ", ".join(lines) + "\n"

    @property
    def symbols(self) -> dict[str, str]:
        """What the symbols in ``latex()`` mean, without what only one chapter defines."""
        used = {str(symbol) for symbol in self._used_symbols()}
        return {name: meaning for name, meaning in (SYMBOLS | _MEANINGS).items() if name in used}

    def _used_symbols(self) -> set[sympy.Symbol]:
        used: set[sympy.Symbol] = set()
        for expression in self.expressions.values():
            used |= expression.free_symbols
        while True:
            more = set().union(*(self.definitions[s].free_symbols for s in used if s in self.definitions))
            if more <= used:
                return used
            used |= more


def number(text: str, values: Mapping[str, int], where: Mapping[str, str]) -> int:
    """One formula where all symbols are numbers: many times faster than ``Formulas``, exact up to 53 bits.

    values: symbol → number. where: symbol → formula, besides T_q, T_k and V. Raises ValueError, naming it,
    for a text that is no formula and for a symbol that nothing defines.
    """
    return _evaluator(values, where)(text)


def _evaluator(values: Mapping[str, int], where: Mapping[str, str]) -> Callable[[str], int]:
    """``number`` for many formulas with the same symbols."""
    known = dict(values)
    definitions = {**where, **_ALWAYS_DEFINED}

    def value_of(text: str, pending: tuple[str, ...] = ()) -> int:
        function, names = _compiled(text)
        for name in names:
            if name in known:
                continue
            if name in pending or name not in definitions:
                raise ValueError(f"{text!r} uses {name}, which nothing defines")
            known[name] = value_of(str(definitions[name]), (*pending, name))
        return int(function(*(known[name] for name in names)))

    return value_of


@lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[Callable[..., float], tuple[str, ...]]:
    """A formula as a Python function of its symbols, and their names."""
    names = {
        name: sympy.Symbol(name, integer=True)
        for name in re.findall(r"\b[A-Za-z]\w*\b(?!\()", text)
        if name != "True"
    }
    try:
        expression = sympy.sympify(text, locals=names)
        used = sorted(str(symbol) for symbol in expression.free_symbols)
    except (sympy.SympifyError, TypeError, SyntaxError, AttributeError) as error:
        raise ValueError(f"not a formula: {text!r} ({error})") from error
    return sympy.lambdify([names[name] for name in used], expression, modules="math"), tuple(used)


def _latex(expression: sympy.Basic) -> str:
    # A pipe would end the cell of a Markdown table.
    return sympy.latex(expression, mul_symbol=r"\,").replace("|", r"\vert ")
