"""What all drawings share: which lines are drawn, and where their names stand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.records.statistics import summarize
from benchmarks.show import plotting
from benchmarks.show.plotting import (
    COLOURS,
    MOST_LINES,
    Line,
    choose_names,
    draw_line,
    label_lines,
    open_figure,
    spread_out,
)


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.01, 0.5))
def test_names_are_far_enough_apart_and_stay_where_they_are_if_they_can(places, least):
    found = spread_out(sorted(places), least)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert all(gap >= least - 1e-9 for gap in gaps)
    if (len(places) - 1) * least <= 1:
        assert all(-1e-9 <= place <= 1 + 1e-9 for place in found)
    assert spread_out(found, 0.999 * least) == pytest.approx(found)


def test_the_best_are_drawn_and_those_that_must_be():
    scores = {f"n{place}": [1.0 + place, 1.0 + place, math.nan] for place in range(8)}
    scores["MPI"] = [100.0, 100.0, 100.0]
    shown, left_out = choose_names(scores, ["Gloo", "MPI"])
    assert shown == ["n0", "n1", "n2", "n3", "n4", "MPI"] and left_out == 3
    assert choose_names(dict(itertools.islice(scores.items(), 3))) == (["n0", "n1", "n2"], 0)
    # What was never timed is the last.
    scores = {"none": [math.nan] * 3, **scores}
    assert "none" not in choose_names(scores)[0]


def test_each_line_has_its_name_at_its_end(tmp_path):
    summaries = [summarize([value, 1.1 * value]) for value in (1.0, 2.0, 4.0)]
    lines = [Line(f"line {style}", (1, 2, 3), summaries, style) for style in range(MOST_LINES)]
    from matplotlib.text import Text

    with open_figure(tmp_path / "lines.png", 6, 3, "a title " * 12, "a note " * 40) as figure:
        axis = figure.subplots()
        for line in lines:
            draw_line(axis, line)
        label_lines(figure, {axis: lines})
    figure.draw_without_rendering()
    labels = [each for each in axis.texts if each.get_text().startswith("line")]
    boxes = sorted((Text.get_window_extent(each) for each in labels), key=lambda box: box.y0)
    assert len(boxes) == MOST_LINES
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    # Nothing is cut off.
    heads = [figure._suptitle, figure._supxlabel]
    assert all("\n" in each.get_text() for each in heads)
    for box in [*boxes, *(each.get_window_extent() for each in heads)]:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_no_two_lines_share_a_colour_a_marker_or_dashes():
    for each in (COLOURS, plotting.MARKERS, plotting.DASHES):
        assert len(set(each)) == len(COLOURS) >= MOST_LINES
