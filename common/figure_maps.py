"""Maps: the tiles of S, and the banks of shared memory. ``common.figures`` has these functions too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from common.figure_style import BLACK, new_figure
from common.tiles import TileState, tile_states
from common.traffic import SHARED, Requests

_TILE_STYLES = {
    TileState.WHOLE: {"facecolor": "#7fb8e0", "hatch": ""},
    TileState.MASKED: {"facecolor": "#f6c667", "hatch": "///"},
    TileState.SKIPPED: {"facecolor": "white", "hatch": ""},
}


def draw_tiles(seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, is_causal: bool) -> Figure:
    """The tiles of one head's S [seqlen_q, seqlen_k]: visited whole, visited and masked, skipped.

    The axes count queries and keys; tiles are [block_m, block_n] and reach past a ragged end. The thick line
    is around what the mask leaves visible. The numbers are those of ``common.tiles.count_tiles``.
    """
    states = tile_states(seqlen_q, seqlen_k, block_m, block_n, is_causal)
    rows, cols = len(states) * block_m, len(states[0]) * block_n
    scale = 5.2 / max(rows, cols)
    figure = new_figure(max(5.0, cols * scale + 1.0), max(1.2, rows * scale) + 1.5)
    axes = figure.subplots()
    patches: dict[TileState, list[Rectangle]] = {state: [] for state in TileState}
    for m, row in enumerate(states):
        for n, state in enumerate(row):
            patches[state].append(Rectangle((n * block_n, m * block_m), block_n, block_m))
    many = max(len(states), len(states[0])) > 40
    for state, rectangles in patches.items():
        axes.add_collection(
            PatchCollection(
                rectangles,
                **_TILE_STYLES[state] | ({"hatch": ""} if many else {}),
                edgecolor="0.35",
                linewidth=0.2 if many else 0.6,
                label=state.value,
                zorder=2 if state is TileState.MASKED else 1,
            )
        )
    _outline(axes, seqlen_q, seqlen_k, is_causal)
    axes.set_xlim(-0.01 * cols, 1.01 * cols)
    axes.set_ylim(1.01 * rows, -0.01 * rows)
    axes.set_aspect("equal")
    axes.set_xlabel("key j")
    axes.set_ylabel("query i")
    if len(states) <= 16 and len(states[0]) <= 12:
        axes.set_xticks(range(0, cols + 1, block_n))
        axes.set_yticks(range(0, rows + 1, block_m))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.spines[:].set_visible(False)
    total = len(states) * len(states[0])
    visited = total - len(patches[TileState.SKIPPED])
    axes.set_title(
        f"S [{seqlen_q}, {seqlen_k}], tiles [{block_m}, {block_n}], {'causal' if is_causal else 'full'}: "
        f"{visited} of {total} visited ({100 * visited / total:.0f} %)",
        fontsize=10,
    )
    handles = [
        Patch(
            **_TILE_STYLES[state] | ({"hatch": ""} if many else {}),
            edgecolor="0.35",
            label=f"{state.value}: {len(patches[state])}",
        )
        for state in TileState
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _outline(axes: Axes, seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    """The line around the elements of S that are visible, a step per query if causal."""
    offset = seqlen_k - seqlen_q
    first = max(-offset, 0) if is_causal else 0  # the queries before it see no key
    x, y = [], []
    for query in range(first, seqlen_q):
        visible = min(query + offset + 1, seqlen_k) if is_causal else seqlen_k
        x += [visible, visible]
        y += [query, query + 1]
    axes.plot(
        [0, *x, 0, 0], [first, *y, seqlen_q, first], color=BLACK, linewidth=1.6, zorder=3, label="visible"
    )


# ---------------------------------------------------------------------------- shared memory

_NUM_BANKS, _WORD = 32, 4  # bytes of a word; a row of all banks is 128 bytes


@dataclass(frozen=True)
class BankAccess:
    """What one warp request touches of shared memory.

    lanes: for each 4-byte word (its byte address / 4) the lanes that touch it. conflicts: the words whose
    bank must serve another word of the same half warp (8 bytes a lane), quarter (16) or warp (less). passes:
    over the banks that it takes. needed: the fewest that a request of its width and lanes can take.
    """

    lanes: dict[int, tuple[int, ...]]
    conflicts: frozenset[int]
    passes: int
    needed: int

    @property
    def verdict(self) -> str:
        """In words."""
        if self.passes == self.needed:
            return "no bank conflict" if self.needed == 1 else f"no bank conflict ({self.needed} passes)"
        if self.needed == 1:
            return f"{self.passes}-way bank conflict"
        return f"bank conflict: {self.passes} passes instead of {self.needed}"


def bank_access(request: Requests) -> BankAccess:
    """Who touches which word in the worst request of a record of shared memory.

    Lanes of 8 bytes are served half a warp at a time, lanes of 16 bytes a quarter.
    """
    if request.memory != SHARED:
        raise ValueError(f"request is of {request.memory}; banks are those of shared memory")
    active = [(lane, address) for lane, address in enumerate(request.example) if address is not None]
    if not active:
        raise ValueError("request has no example: no addresses of its worst request were kept")
    size = request.bytes_per_lane
    together = 32 if size <= 4 else 16 if size == 8 else 8
    lanes: dict[int, list[int]] = {}
    conflicts: set[int] = set()
    passes = needed = 0
    for start in range(0, len(active), together):
        banks: dict[int, set[int]] = {}
        for lane, address in active[start : start + together]:
            for word in range(address // _WORD, (address + size - 1) // _WORD + 1):
                lanes.setdefault(word, []).append(lane)
                banks.setdefault(word % _NUM_BANKS, set()).add(word)
        passes += max(len(words) for words in banks.values())
        needed += 1
        conflicts |= {word for words in banks.values() if len(words) > 1 for word in words}
    return BankAccess({w: tuple(who) for w, who in lanes.items()}, frozenset(conflicts), passes, needed)


def _lanes(lanes: tuple[int, ...]) -> str:
    """One or two lanes, or the first and last of a range, or the first and how many more; a line each."""
    if len(lanes) <= 2:
        return "\n".join(str(lane) for lane in lanes)
    if lanes == tuple(range(lanes[0], lanes[-1] + 1)):
        return f"{lanes[0]}\n⋮\n{lanes[-1]}"
    return f"{lanes[0]}\n+{len(lanes) - 1}"


def draw_shared_access(
    requests: Requests | Sequence[Requests], titles: str | Sequence[str] | None = None
) -> Figure:
    """Where the worst request of one instruction falls on the banks of shared memory; several side by side.

    Columns are the 32 banks of 4 bytes, rows the 128-byte rows that are touched, labelled with their byte
    address. A cell names the lanes that touch its word; dark cells share their bank with another word, which
    costs a pass each. The line above the grid counts the words of each bank.

    Args:
        requests: records of shared memory from ``Report.traffic.requests`` or ``.lines()``.
        titles: what to call each; by default its source line.
    """
    shown = [requests] if isinstance(requests, Requests) else list(requests)
    names = [titles] if isinstance(titles, str) else list(titles or (None,) * len(shown))
    if len(names) != len(shown):
        raise ValueError(f"titles has {len(names)} entries for {len(shown)} requests")
    accesses = [bank_access(request) for request in shown]
    heights = [_row_levels(access)[1] for access in accesses]
    several = any(len(lanes) > 1 for access in accesses for lanes in access.lanes.values())
    figure = new_figure(6.2 * len(shown), max(0.8, (0.36 if several else 0.18) * max(heights)) + 1.6)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, request, access, name in zip(panels, shown, accesses, names, strict=True):
        _draw_banks(axes, access, max(heights))
        where = f"{request.where.file.name}:{request.where.line}"
        what = f"{request.operation} of {request.bytes_per_lane} bytes a lane"
        axes.set_title(f"{name or where}\n{what}: {access.verdict}", fontsize=11)
    return figure


def _row_levels(access: BankAccess) -> tuple[dict[int, float], float]:
    """Where each touched row is drawn, from the top; rows that are not touched leave a narrow gap."""
    levels: dict[int, float] = {}
    level, last = 0.0, None
    for row in sorted({word // _NUM_BANKS for word in access.lanes}):
        level += 0.3 if last is not None and row > last + 1 else 0.0
        levels[row] = level
        level, last = level + 1, row
    return levels, level


def _draw_banks(axes: Axes, access: BankAccess, height: float) -> None:
    levels, own_height = _row_levels(access)
    background = [Rectangle((bank, level), 1, 1) for level in levels.values() for bank in range(_NUM_BANKS)]
    axes.add_collection(PatchCollection(background, facecolor="white", edgecolor="0.8", linewidth=0.4))
    per_bank = [0] * _NUM_BANKS
    for word, lanes in access.lanes.items():
        row, bank = divmod(word, _NUM_BANKS)
        clash = word in access.conflicts
        per_bank[bank] += 1
        axes.add_patch(
            Rectangle(
                (bank, levels[row]), 1, 1,
                facecolor="#8b1a1a" if clash else "#bfe0f5", edgecolor="black", linewidth=0.5,
                gid=f"word {word}",
            )
        )  # fmt: skip
        text = _lanes(lanes)
        axes.text(
            bank + 0.5, levels[row] + 0.5, text,
            ha="center", va="center", color="white" if clash else "black", linespacing=0.85,
            fontsize=7 if "\n" in text else 8, fontweight="bold" if clash else "normal",
        )  # fmt: skip
    for bank, count in enumerate(per_bank):
        if count:
            axes.text(bank + 0.5, -0.55, str(count), ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.3, _NUM_BANKS + 0.3)
    axes.set_ylim(max(height, own_height) + 0.05, -1.1)
    axes.set_xticks(
        [bank + 0.5 for bank in range(0, _NUM_BANKS, 4)], [str(b) for b in range(0, _NUM_BANKS, 4)]
    )
    axes.set_yticks(
        [-0.55, *(level + 0.5 for level in levels.values())],
        ["words in bank", *(f"{128 * row:,}" for row in levels)],
        fontsize=8,
    )
    axes.tick_params(length=0)
    axes.set_xlabel("bank of 4 bytes (in a cell: the lanes that touch it)")
    axes.set_ylabel("address, bytes")
    axes.spines[:].set_visible(False)
