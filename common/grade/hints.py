"""Hints toward the idea, by what was seen. An exercise's own, in ``[hints]``, come first."""

from __future__ import annotations

from common.report import Finding

_TOOLS = {
    "racecheck": "Say in one sentence what must be complete before the second of the two lines may run. "
    "Which barrier makes every thread wait for it, and does every thread come past it between the two?",
    "memcheck": "Work out by hand, for the thread that is named, which row and column the index stands for. "
    "Which of the sizes should have kept it from going there?",
    "initcheck": "Who should have written this element, and in which launch or before which barrier? Think "
    "of the last, ragged tile, and of what has to be zero before anybody adds to it.",
    "synccheck": "Follow two threads that part at a branch or a loop. Do both come to the same "
    "barrier, as often?",
    "error": "The message names the thread and what it did. Run `python -m common.check` on your file with "
    "the same sizes.",
}
RESULTS = {
    "dq": "dQ = softmax_scale · dS K: is dS right, does every tile of keys add to it, is the scale applied "
    "once?",
    "dk": "dK = softmax_scale · dSᵀ Q: is dS right, and is it multiplied by rows of Q as they came from "
    "memory?",
    "dv": "dV = Pᵀ dO has no scale and no dS in it. If it is wrong, P is: which scores go into the "
    "exponential, and which keys may a query see?",
    "out": "O = P V, divided by the sum of P's row. Which scores go into the exponential, which keys are "
    "visible?",
    "lse": "lse is m + log l of the same scores that P is made of.",
}
COMPILES = "Start with the first line that the compiler names; later ones often follow from it."
RUNS = (
    "No case came to an end, so nothing could be compared. Run a small one yourself: "
    "`python -m common.check FILE --seqlen 5` (from chapter 09 on with `--dtype bf16`)."
)
ONLY_PART = "The cases that are right tell where to look: what do the wrong ones have that those have not?"


def of_finding(finding: Finding) -> str:
    """A hint for what the checker found."""
    return _TOOLS.get(finding.tool, "")
