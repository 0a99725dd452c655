"""The pictures of records: what each quantity's has, which lines are drawn, and where names are."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_runs import check_drawing
from benchmarks.records.schema import Cell, make_cell
from benchmarks.records.statistics import exact, spread
from benchmarks.show import axes, sheets
from benchmarks.show.axes import break_name, choose_ticks, choose_values, spread_out
from benchmarks.show.charts import Chart, ChartLine, DotRow, Dots, Grid, Square, choose_names
from benchmarks.show.pictures import write_picture
from benchmarks.show.scaling import write_scaling
from mpiddp.errors import ConfigurationError
from planted_records import Planted, make_cells, make_pairs

K, M = 1 << 10, 1 << 20


def cell(quantity: str, contender: str, *samples: float, ranks: int = 2, **at: Any) -> Cell:
    details = at.pop("details", {})
    return make_cell(
        samples, quantity=quantity, contender=contender, ranks=ranks, at=at, details=details
    )


def check_picture(folder: Path, cells: list[Cell], *words: str) -> str:
    write_picture(folder / "picture.svg", cells, "first & second")
    return check_drawing(folder / "picture.svg", "first &amp; second", *words)


def test_times_and_rates_have_a_line_for_each_contender(tmp_path):
    planted = Planted(places=((2, 1), (4, 1)), sizes=(K, M), algorithms=("ring",), rounds=3)
    words = ("2 ranks on 1 node: Time", "4 ranks on 1 node: Time", "Bus bandwidth", "mpiddp ring")
    text = check_picture(tmp_path, list(make_cells(planted)), *words, "All-reduce, float32, sum")
    # What is pointed at is said; a report has more charts.
    assert re.search(r"<title>1 MiB\nGloo: [\d.]+ .s \([\d.]+ .s – [\d.]+ .s\)", text)
    assert not any(words in text for words in ("left out", "Speed, relative"))


def test_of_many_contenders_six_are_drawn_and_slow_links_are_framed(tmp_path):
    cells = list(make_cells(Planted(places=((4, 1),), sizes=(K, M), rounds=3)))
    text = check_picture(tmp_path, cells, "4 contenders left out, slower on the whole")
    assert ">plain ring<" not in text
    text = check_picture(tmp_path, list(make_pairs(3, {(0, 1): 2.0}, [4 * M])), "node 0 → 1: ")
    assert text.count(f"stroke: {axes.ALARM}") == 1


def test_a_step_is_a_bar_of_parts(tmp_path):
    parts = {"compute": 1.0, "exposed": 1.5, "update": 0.5}
    cells = [
        cell("training step", "framework", *row, model="mlp", **at)
        for row, at in [
            ((2.0, 4.0), {"details": {"efficiency": 0.5}}),
            *(((length,), {"part": part}) for part, length in parts.items()),
        ]
    ]
    words = ("framework: 3 s; efficiency 50%", "exposed communication", "update", "compute: 1 s")
    cells += [replace(each, contender="own") for each in cells]
    text = check_picture(tmp_path, cells, *words, "2 ranks, model mlp")
    # Each part once, whatever bars have it; no number for a bar's height; each bar has a mark of
    # its quartiles, and marks have a length.
    assert text.count(">update<") == 1 and set(re.findall(r">([−\d.]+)<", text)) == {"0"}
    assert text.count('stroke-width: 2"') == 2
    assert not re.search(r'd="M (\S+ \S+)L\1 ', text)


def test_whole_processes_are_bars_and_own_phases_have_a_scale_of_their_own(tmp_path):
    cells = [cell("start-up", "torchrun", 1.0, 2.0), cell("start-up", "import torch", 3.0)]
    cells += [cell("start-up", "torchrun", 1.2, part="first all-reduce")]
    cells += [
        cell("start-up phase", "init", seconds, phase=phase, details={"is_own": seconds < 1})
        for phase, seconds in {"MPI": 2.0, "address": 0.01, "store": 0.02}.items()
    ]
    words = ("torchrun: 1.5 s; first all-reduce after 1.2 s", "2 ranks: 30 ms", "own phases")
    check_picture(tmp_path, cells, *words, "2 ranks: 2.03 s", "address: 10 ms")


def test_loops_programs_and_checkpoints_say_how_they_compare(tmp_path):
    loops = [
        cell("training loop", name, seconds, model="mlp")
        for name, seconds in {"mpiddp.train": 2.0, "a bare loop": 1.0}.items()
    ]
    check_picture(tmp_path, loops, "mpiddp.train: 2 s; 0.500 × the speed of a bare loop")
    programs = [
        cell("program", name, seconds, ranks=ranks, program="barrier")
        for ranks in (2, 4)
        for name, seconds in {"gloo": 3e-5, "mpiddp": 1e-5}.items()
    ]
    programs.append(cell("program", "mpiddp", 1e-5, ranks=8, program="barrier"))
    words = ("barrier", "3.0 ×", "4 ranks", "8 ranks", "barrier, gloo: 30 µs")
    check_picture(tmp_path, programs, *words)
    save = cell("checkpoint", "raw write", 0.5, model="mlp", details={"share": 0.035})
    check_picture(tmp_path, [save], "raw write: 500 ms; 3.5% of the steps between two")


def test_nothing_measured_is_no_picture(tmp_path):
    write_picture(tmp_path / "a.png", [], "")
    write_picture(tmp_path / "a.png", [cell("probe", "copy", 1.0)], "")
    assert not (tmp_path / "a.png").exists()
    write_picture(tmp_path / "a.png", [cell("checkpoint", "copy", 1.0)], "")
    assert (tmp_path / "a.png").stat().st_size > 0


def test_sizes_stand_beside_ranks_on_a_node_and_between_nodes(tmp_path):
    makers = {"Gloo": "gloo", "mpiddp central": "mpiddp"}
    cells = [
        replace(cell("all-reduce", name, 1e-3, ranks=ranks, bytes=size, type="float32"),
                nodes=nodes, details={"maker": maker})
        for ranks, nodes, sizes in ((2, 1, (8, M)), (4, 1, (8, K, M)), (2, 2, (8, K)), (8, 8, (8,)))
        for name, maker in makers.items() for size in sizes
    ]  # fmt: skip
    path = tmp_path / "scaling.svg"
    named = [(each.contender, each) for each in cells]
    wrong = replace(cells[0], details={**cells[0].details, "wrong": 1})
    write_scaling(path, [("wrong", wrong), *named], "a note")
    assert "wrong" not in path.read_text()
    shown = ("4 ranks on 1 node: all-reduce", "one node: 1 MiB", "2 ranks on 2 nodes")
    check_drawing(path, *shown, "1 rank on each node: 8 B", "central: a parameter server; a note")
    with pytest.raises(ConfigurationError, match="expected right results of collectives"):
        write_scaling(path, [("wrong", wrong)], "")


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.01, 0.5))
def test_names_are_far_enough_apart_and_stay_where_they_are_if_they_can(places, least):
    found = spread_out(sorted(places), least)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert all(gap >= least - 1e-9 for gap in gaps)
    if (len(places) - 1) * least <= 1:
        assert all(-1e-9 <= place <= 1 + 1e-9 for place in found)
    assert spread_out(found, 0.999 * least) == pytest.approx(found)
    assert spread_out([0.9, 0.9], 0.1) == pytest.approx([0.85, 0.95])


def test_the_best_are_drawn_and_those_that_must_be():
    scores = {f"n{place}": [1.0 + place, 1.0 + place, math.nan] for place in range(8)}
    scores["MPI"] = [100.0, 100.0, 100.0]
    shown, left_out = choose_names(scores, ["Gloo", "MPI"])
    assert shown == ["n0", "n1", "n2", "n3", "n4", "MPI"] and left_out == 3
    assert choose_names(dict(itertools.islice(scores.items(), 3))) == (["n0", "n1", "n2"], 0)
    # What was never timed is the last.
    scores = {"none": [math.nan] * 3, **scores}
    assert "none" not in choose_names(scores)[0]


def test_each_line_has_its_name_at_its_end(tmp_path, monkeypatch):
    """Those that end close together, too; and nothing is cut off, nor over another."""
    saved = []
    monkeypatch.setattr(sheets, "_save", lambda figure, *_: saved.append(figure) or b"<svg>")
    middle = {2**power: exact(2.0) for power in range(1, 30)}
    lines = [
        ChartLine(f"line {n}", {1: begin, **middle, 2**30: exact(4.0 + 0.01 * n)})
        for n, begin in enumerate([exact(1.0), *[spread([1.0, 1.1])] * 5])
    ]
    chart = Chart(title="Time", unit="s", is_log=True, lines=lines)
    sheets.write_sheet(tmp_path / "a.png", [[chart]], {}, "a title " * 12, "a note " * 40)
    rows = [DotRow(f"row {n}", {"one": exact(1.0), "other": exact(2.0)}) for n in range(5)]
    sheets.draw_inline(Dots(title="", text="", unit="s", rows=rows), {})
    sheets.draw_inline(chart, {})
    figure, dots, page = saved
    assert dots.axes[0].bbox.height >= len(rows) * axes.LINE
    figure.draw_without_rendering()
    (axis,) = figure.axes
    # The bands of those that have quartiles.
    assert len(axis.collections) == 5
    ticks = [each.get_window_extent() for each in page.axes[0].get_xticklabels()]
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(ticks))
    labels = [each for each in axis.texts if each.get_text().startswith("line")]
    boxes = sorted((each.get_window_extent() for each in labels), key=lambda box: box.y0)
    assert len(boxes) == len(lines)
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    assert axis.bbox.y0 <= boxes[0].y0 and boxes[-1].y1 <= axis.bbox.y1
    heads = [figure._suptitle, figure._supxlabel]
    assert all("\n" in each.get_text() for each in heads)
    for box in [*boxes, *(each.get_window_extent() for each in heads)]:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_where_a_grid_has_one_name_no_letter_stands_for_it(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    for kinds, words in (("x", "> x<"), ("xy", ">B y<")):
        names = {"title": "", "text": "", "corner": "", "rows": ["row"], "columns": list(kinds)}
        grid = Grid(**names, squares=[[Square("", kind=kind) for kind in kinds]])
        sheets.write_sheet(path, [[grid]], {}, "", "")
        check_drawing(path, words)
    # Of too many squares none has a letter.
    assert ">B<" in path.read_text()
    monkeypatch.setattr(axes, "MOST_TEXTS", 1)
    sheets.write_sheet(path, [[grid]], {}, "", "")
    assert ">B<" not in path.read_text()
    # What has room on a slide has letters of the full size there.
    monkeypatch.setattr(sheets, "_save", lambda figure, kind, dpi: str(dpi).encode())
    sheets.write_slide(path, grid, {}, "")
    assert int(path.read_text()) == pytest.approx(sheets.SLIDE_DPI * sheets.ENLARGED)


def test_long_names_are_broken_where_their_parts_begin():
    name = "parameter-server:servers=2,placement=dedicated,staleness=3"
    broken = ["parameter-server:servers=2,", "placement=dedicated,staleness=3"]
    assert break_name(name, 36).splitlines() == broken
    assert break_name("ring:segments=4", 33) == "ring:segments=4"
    assert break_name("mpiddp auto, private: 3 s", 99) == "mpiddp auto, private: 3 s"


@given(st.lists(st.integers(3, 40), min_size=1, max_size=20, unique=True), st.floats(0.05, 0.3))
def test_ticks_have_room(powers, share):
    sizes = [1 << power for power in sorted(powers)]
    ticks = choose_ticks(sizes, share)
    assert ticks[0] == sizes[0] and set(ticks) <= set(sizes)
    room = share * math.log2(sizes[-1] / sizes[0])
    assert all(math.log2(b / a) >= room - 1e-9 for a, b in itertools.pairwise(ticks))
    # None is left out for nothing.
    for size in set(sizes) - set(ticks):
        assert min(abs(math.log2(size / tick)) for tick in ticks) < room + 1e-9


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e6))
def test_a_logarithmic_axis_has_a_few_values(low, ratio):
    found = choose_values(low, low * ratio)
    assert 1 <= len(found) <= 9
    assert all(low <= value <= low * ratio for value in found)
