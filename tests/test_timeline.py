"""The model of common/timeline.py against cases that can be done in the head."""

from __future__ import annotations

import pytest

from common.figure_style import new_figure
from common.timeline import PRODUCTS, Phase, busy, draw_timeline, length, simulate

MULTIPLY, EXP = Phase("S", PRODUCTS, 100), Phase("exp", "exp", 40)


def test_one_group_takes_the_sum() -> None:
    assert length(simulate([[MULTIPLY, EXP]], 3)) == pytest.approx(3 * 140)


def test_groups_on_one_unit_share_it() -> None:
    spans = simulate([[MULTIPLY], [MULTIPLY]])
    assert [span.end for span in spans] == pytest.approx([200, 200])


def test_what_needs_another_unit_runs_beside() -> None:
    spans = simulate([[MULTIPLY, EXP], [EXP, MULTIPLY]])
    # 40 cycles alone, 60 + 60 shared in 120, then 40 alone again.
    assert length(spans) == pytest.approx(200)
    assert busy(spans, PRODUCTS) == [pytest.approx((0, 200))]


def test_a_group_alone_may_not_reach_the_whole_rate() -> None:
    assert length(simulate([[MULTIPLY]], alone={PRODUCTS: 0.5})) == pytest.approx(200)
    assert length(simulate([[MULTIPLY], [MULTIPLY]], alone={PRODUCTS: 0.5})) == pytest.approx(200)


def test_groups_meet_after_every_iteration() -> None:
    spans = simulate([[MULTIPLY], [EXP]], 2)
    assert sorted(span.start for span in spans) == pytest.approx([0, 0, 100, 100])


def test_a_timeline_names_its_groups() -> None:
    axes = new_figure(6, 2).subplots()
    draw_timeline(axes, simulate([[MULTIPLY, EXP]]), ["all warps"], "title", PRODUCTS)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["products: busy", "all warps"]
