"""The report of records: what is put together, who wins, what is said first, what is refused."""

import html
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as commands
from benchmarks.records.contenders import shorten
from benchmarks.records.material import read_material
from benchmarks.records.schema import Cell, Coordinate, make_cell, open_record
from benchmarks.records.statistics import spread
from benchmarks.show import machine, progress
from benchmarks.show.charts import Bars, Chart, Grid, Section
from benchmarks.show.page import assembly
from benchmarks.show.page.contents import ReportPage
from benchmarks.show.page.page import draw_report
from benchmarks.study import reporting as command
from browser import Page
from mpiddp.errors import ConfigurationError
from planted_records import (
    ENVIRONMENT,
    MACHINE,
    Planted,
    make_cells,
    make_messages,
    make_pairs,
    write_record,
)

K, M = 1 << 10, 1 << 20
FEW = Planted(places=((2, 1), (8, 2)), sizes=(K, 64 * K, 16 * M))


def report(*paths: Path) -> ReportPage:
    return assembly.assemble(read_material(paths))


def find(drawn: ReportPage, name: str) -> Section:
    return next(section for section in drawn.sections if section.name == name)


def find_chart(section: Section, title: str) -> Chart:
    return next(chart for chart in section.panels[-1].charts if chart.title == title)


def texts(drawn: ReportPage) -> list[str]:
    return [alert.text for alert in drawn.alerts]


def cell(contender: str, samples: list[float], size: int = K, **details: Any) -> Cell:
    return make_cell(
        samples, quantity="all-reduce", contender=contender, ranks=4,
        at={"bytes": size, "type": "float32"}, details=details,
    )  # fmt: skip


def test_lines_are_medians_with_quartiles_of_the_rounds(tmp_path):
    cells = [cell("Gloo", [4.0, 1.0, 2.0, 3.0, 5.0], maker="gloo")]
    cells += [cell("ours", [2.0, 1.0, 1.0, 1.0, 5.0], maker="mpiddp")]
    section = find(report(write_record(tmp_path / "a.jsonl", cells)), "all-reduce")
    gloo = find_chart(section, "Time").lines[0]
    assert gloo.points[K] == spread([1, 2, 3, 4, 5]) and gloo.points[K].lower_quartile == 2
    # Speeds are ratios round by round, by which the map names the fastest.
    (line,) = find_chart(section, "Speed, relative to Gloo").lines
    assert (line.name, line.points[K]) == ("ours", spread([4 / 2, 1, 2, 3, 1]))
    # 2 (n - 1)/n · S/t
    rate = find_chart(section, "Bus bandwidth").lines[0].points[K].median
    assert rate == pytest.approx(1.5 * K / 3 * 1e-9)


def test_the_planted_winner_is_on_the_map_and_a_wrong_one_is_not(tmp_path):
    cells = list(make_cells(replace(FEW, factors={"mpiddp direct, mpi, private": 0.1}, rounds=12)))
    (winners,) = find(report(write_record(tmp_path / "a.jsonl", cells)), "all-reduce").pictures
    assert isinstance(winners, Grid)
    assert winners.rows == ["2 ranks on 1 node", "8 ranks on 2 nodes"]
    assert {square.kind for row in winners.squares for square in row} == {"mpiddp direct"}
    assert not any(square.is_marked for row in winners.squares for square in row)
    wrong = [
        replace(each, details={**each.details, "wrong": 3 * ("mpiddp direct" in each.contender)})
        for each in cells
    ]
    drawn = report(write_record(tmp_path / "b.jsonl", wrong))
    (winners,) = find(drawn, "all-reduce").pictures
    assert isinstance(winners, Grid)
    assert "mpiddp direct" not in {each.kind for row in winners.squares for each in row}
    assert drawn.alerts[0].is_bad and drawn.alerts[0].text == "Wrong results in 6 cells"


def test_a_win_in_each_round_is_one_however_the_rounds_differ_and_one_by_chance_is_none(tmp_path):
    times, near = [1.0, 3.0, 1.5, 2.5, 1.2, 2.8, 1.1, 2.9], [1.0, 1.1, 0.9, 1.05, 1.0, 0.95, 1.02]
    slower, turned = [1.1 * each for each in times], [*near[1:], near[0]]
    for one, other, is_marked in ((times, slower, False), (near, turned, True)):
        path = write_record(tmp_path / "a.jsonl", [cell("one", one), cell("other", other)])
        (winners,) = find(report(path), "all-reduce").pictures
        square = winners.squares[0][0]
        assert square.is_marked == ("not told apart" in square.title) == is_marked


def test_one_comparison_names_the_fastest_and_its_factor(tmp_path):
    """By medians ours wins, 1.0 against 1.5; round by round Gloo is faster in seven of nine."""
    gloo = [0.9, 0.9, 0.9, 0.9, 1.5, 9.0, 9.0, 9.0, 9.0]
    ours = [1.0, 1.0, 1.0, 1.0, 9.5, 9.5, 9.5, 1.0, 1.0]
    cells = [cell("Gloo", gloo, maker="gloo"), cell("ours", ours, maker="mpiddp")]
    drawn = report(write_record(tmp_path / "a.jsonl", cells))
    (winners,) = find(drawn, "all-reduce").pictures
    assert isinstance(winners, Grid)
    ((square,),) = winners.squares
    assert square is not None and (square.kind, square.text) == ("Gloo", "≈1×")
    (line,) = find_chart(find(drawn, "all-reduce"), "Speed, relative to Gloo").lines
    assert line.points[K].median == 0.9
    # Nothing is settled, so that no factor is in large letters.
    assert [card.value for card in drawn.highlights] == ["not settled"]


def test_the_headline_is_the_largest_size_that_is_settled(tmp_path):
    rounds = [1.0, 1.1, 0.9, 1.05, 1.0, 0.95, 1.02, 0.99]
    times = {"Gloo": (4, 2, 3), "mpiddp ring": (2, 6, 1), "MPI_Allreduce": (8, 3, 1)}
    makers = {"Gloo": "gloo", "mpiddp ring": "mpiddp", "MPI_Allreduce": "mpi"}

    def draw(sizes: list[int]) -> list[tuple[str, str]]:
        cells = [
            cell(name, [seconds[at] * each for each in rounds[at:] + rounds[:at]], size=K << at,
                 maker=makers[name])
            for name, seconds in times.items() for at in sizes
        ]  # fmt: skip
        # At the largest size two are as fast.
        drawn = report(write_record(tmp_path / "a.jsonl", cells))
        return [(card.value, card.text) for card in drawn.highlights]

    assert draw([0, 2]) == [("2 ×", "as fast as Gloo at 1 KiB: mpiddp ring")]
    # Where the framework wins, it stands beside the next one.
    assert draw([0, 1, 2]) == [("1.5 ×", "as fast as MPI_Allreduce at 2 KiB: Gloo")]


def test_slow_links_and_slow_ranks_are_named(tmp_path):
    slow, pairs = replace(FEW, slow_rank=5, places=((8, 2),)), {(1, 2): 1.9, (4, 0): 3.0}
    cells = chain(make_cells(slow), make_pairs(6, pairs))
    drawn = report(write_record(tmp_path / "a.jsonl", cells))
    said = " ".join(texts(drawn))
    assert "Rank 5 of 8 on 2 nodes is slow" in said and "comes late" in said
    assert "slow links at 4 MiB: node 4 → 0 (3 ×), node 1 → 2 (1.9 ×)" in said
    assert "at 8 B" not in said
    _, matrix, bars = find(drawn, "pairs").pictures
    assert isinstance(matrix, Grid) and isinstance(bars, Bars)
    marked = {
        (row, column)
        for row, squares in enumerate(matrix.squares)
        for column, square in enumerate(squares)
        if square is not None and square.is_marked
    }
    assert marked == {(1, 2), (4, 0)}
    assert max(square.heat for row in matrix.squares for square in row if square) == 1


def test_a_matrix_of_many_nodes_is_folded_and_keeps_its_slow_link(tmp_path):
    drawn = report(write_record(tmp_path / "a.jsonl", make_pairs(50, {(48, 7): 4.0}, [M])))
    matrix = find(drawn, "pairs").pictures[0]
    assert isinstance(matrix, Grid) and len(matrix.rows) == 25
    square = matrix.squares[24][3]
    assert square is not None and square.is_marked and matrix.rows[24] == "48–49"
    # A MiB in four times 84 µs.
    assert 2.5 < float(square.text) < 3.5


def test_predictions_and_bounds_come_from_the_records_messages(tmp_path):
    planted = replace(FEW, places=((4, 4),), sizes=(64 * K, M, 16 * M))
    path = write_record(tmp_path / "a.jsonl", chain(make_cells(planted), make_messages()))
    section = find(report(path), "all-reduce")
    lines = find_chart(section, "Measured by predicted").lines
    ring = next(line for line in lines if line.name == "mpiddp ring")
    for size, each in ring.points.items():
        assert each.median == pytest.approx(1, rel=0.1), size
    bound = 2 * 3 / 4 * 16 * M * MACHINE.between.seconds_per_byte
    share, time_ = (
        next(line for line in find_chart(section, title).lines if line.name == ring.name)
        for title in ("Share of the bound", "Time")
    )
    assert share.points[16 * M].median * time_.points[16 * M].median == pytest.approx(bound, 0.05)


def test_predictions_that_would_take_long_are_left_out(tmp_path, monkeypatch):
    planted = replace(FEW, places=((4, 4),), sizes=(K,), algorithms=("ring",))
    cells = [
        replace(each, details={**each.details, "ran": "ring over mpi"})
        for each in make_cells(planted)
        if each.details["maker"] == "mpiddp"
    ]
    path = write_record(tmp_path / "a.jsonl", chain(cells, make_messages()))
    monkeypatch.setattr(machine, "predict_flow", lambda *_: 1.0)
    monkeypatch.setattr(machine, "MOST_PARTS", 23)
    titles = [chart.title for chart in find(report(path), "all-reduce").panels[0].charts]
    assert titles == ["Time", "Bus bandwidth", "Share of the bound"]
    # Four ranks send a message each in six steps.
    monkeypatch.setattr(machine, "MOST_PARTS", 24)
    titles = [chart.title for chart in find(report(path), "all-reduce").panels[0].charts]
    assert titles[-1] == "Measured by predicted"


def test_probes_give_a_bound_where_no_messages_were_measured(tmp_path):
    at: dict[str, Coordinate] = {"bytes": 2 * K, "type": "uint8"}
    copy = make_cell([2.0], quantity="probe", contender="copy by torch", ranks=4, at=at)
    # More ranks write more in all.
    cells = [cell("ours", [4.0]), copy, replace(copy, ranks=8, at={**at, "bytes": 8 * K})]
    drawn = report(write_record(tmp_path / "a.jsonl", cells))
    (line,) = find_chart(find(drawn, "all-reduce"), "Share of the bound").lines
    assert line.points[K].median == 0.25
    assert find(drawn, "probe").heading == "What the machine can do"
    assert machine.find_probed([copy], copy) is None


def test_two_records_of_one_thing_are_two_lines_and_other_machines_a_warning(tmp_path):
    first = write_record(tmp_path / "old.jsonl", [cell("ours", [1.0])])
    second = write_record(tmp_path / "new.jsonl", [cell("ours", [2.0])], processor="other")
    drawn = report(first, second)
    assert drawn.words.startswith("2 cells of 2 records: ")
    lines = find(drawn, "all-reduce").panels[0].charts[0].lines
    assert [line.name for line in lines] == ["ours (old)", "ours (new)"]
    assert any("different machines" in text and "Processor" in text for text in texts(drawn))
    (fact,) = (fact for fact in drawn.machines if fact.name == "Processor")
    assert fact.must_agree and list(fact.texts) == ["EPYC 9654", "other"]
    with pytest.raises(ConfigurationError, match=r"one machine .*, found EPYC .*; other"):
        command.main([str(first), str(second), "--output", f"{tmp_path}/a.svg"])


def test_what_was_refused_failed_or_cut_off_is_said_first(tmp_path):
    path = tmp_path / "a.jsonl"
    with open_record(path, "allreduce", ENVIRONMENT, {}) as record:
        record.add(cell("ours", [1.0], guidelines=["loses to reduce + broadcast"],
                        stopped="budget"))  # fmt: skip
        for size in (K, M):
            record.refuse("all-reduce", "mpiddp double-tree", "needs a power of two", bytes=size)
        targets = [{"text": str(met), "met": met} for met in (True, False, None)]
        record.write("targets", targets=targets)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    drawn = report(path)
    assert texts(drawn) == [
        "a is incomplete: the command did not come to its end", "1 of 3 targets missed",
        "Refused, and so not measured: 1 contender", "Slower than what it could be made of",
        "In 1 of 1 cell the time was spent before the interval of the median was narrow",
    ]  # fmt: skip
    assert [alert.is_bad for alert in drawn.alerts] == [True, True, True, False, False]
    reason = "mpiddp double-tree: all-reduce: needs a power of two (2 times)"
    assert drawn.alerts[2].lines == [reason]


def test_stragglers_are_curves_of_accuracy_over_time(tmp_path):
    curves = [[(1.0, 0.5), (2.0, 0.9)], [(3.0, 0.7), (4.0, 0.95)]]
    run = make_cell(
        [2.0, 4.0], quantity="training", contender="servers", ranks=2, at={"straggler": "0=4"},
        details={"curves": curves},
    )  # fmt: skip
    (panel,) = find(report(write_record(tmp_path / "a.jsonl", [run])), "training").panels
    ((chart,), (line,)) = panel.charts, panel.charts[0].lines
    found = {at: each.median for at, each in line.points.items()}
    assert chart.along == "s" and found == {2: 0.6, 3: pytest.approx(0.925)}


words = st.text("ab,: ", min_size=1, max_size=8)


@given(st.lists(words, min_size=1, max_size=6, unique=True))
def test_shortened_names_still_tell_all_apart(names):
    short = shorten(names)
    assert set(short) == set(names) and len(set(short.values())) == len(names)


HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "@data@",
           "a$b&\"'"]  # fmt: skip


def test_algorithms_of_ones_own_are_explained(tmp_path, star):
    cells = [cell(f"mpiddp {name}", [1.0, 1.0], ran=name) for name in ("ring", "star", "pat")]
    # There is no reduce of its name.
    cells[2] = replace(cells[2], quantity="reduce")
    path, page = write_record(tmp_path / "a.jsonl", cells), tmp_path / "a.html"
    for words in ([], ["--load", str(star)]):
        commands.run(["report", str(path), *words, "--output", str(page)])
        text = page.read_text()
        assert 'data-hash="first=ring&amp;ranks=4"' in text
        assert ('data-hash="first=star&amp;ranks=4"' in text) is bool(words)
        assert "first=pat" not in text
        assert ("Not known here: star (report --load FILE" in text) is (not words)


def test_texts_of_records_are_harmless(tmp_path):
    makers, path = ("gloo", "", "", ""), tmp_path / "a.jsonl"
    environment = {**ENVIRONMENT, "<b>": "<i>", "processor": "@script@<u>"}
    with open_record(path, "</title><x>", environment, {}) as record:
        for at, (name, maker) in enumerate(zip(HOSTILE, makers, strict=True), 1):
            record.add(cell(name, [float(at)], maker=maker))
        record.refuse("<q>", "<c>", "<r>")
    drawn = draw_report(report(path))
    for tag in ("<script>alert", "<img", "<i>x", "<u>", "<x>", "<q>", "<c>", "<r>", "<b>:"):
        assert tag not in drawn
    assert all(each in html.unescape(drawn) for each in HOSTILE)
    assert "default-src 'none'" in drawn
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org", "", drawn)


def test_each_picture_is_a_slide(tmp_path, monkeypatch):
    bar = MagicMock()
    monkeypatch.setattr(progress, "tqdm", bar)
    cells = [cell("a$b", [1, 2], maker="gloo"), *make_pairs(3, {(0, 1): 2.0}, [4 * M])]
    path = write_record(tmp_path / "a.jsonl", cells)
    outputs = [f"--output={tmp_path}/{name}" for name in ("slides/", "a.svg", "a.html")]
    command.main([str(path), *outputs])
    # For the slides and for the page a bar comes to its end, and goes.
    steps, shown = bar.return_value.__enter__.return_value.update, bar.call_args_list
    assert len(shown) == 2 and steps.call_count == sum(each.kwargs["total"] for each in shown)
    assert not any(each.kwargs["leave"] for each in shown)
    assert "4 ranks on 1 node: all-reduce" in (tmp_path / "a.svg").read_text()
    names = sorted(each.name for each in (tmp_path / "slides").iterdir())
    assert [name[4:] for name in names] == [
        "all-reduce-time-4-ranks-on-1-node-float32.png",
        "all-reduce-bus-bandwidth-4-ranks-on-1-node-float32.png",
        "pairs-mpi-4-mib-nodes-bandwidth-in-gb-s.png", "pairs-slow-links-at-4-mib.png",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("refuses", "expected"),
    [(False, "no cells, so there is nothing to show: expected a record of a command"),
     (True, "expected cells to draw, found failures and refusals")],
)  # fmt: skip
def test_records_without_cells_are_one_line(tmp_path, refuses, expected):
    path = tmp_path / "a.jsonl"
    with open_record(path, "allreduce", ENVIRONMENT, {}) as record:
        if refuses:
            record.refuse("all-reduce", "mpiddp double-tree", "needs a power of two")
    with pytest.raises(ConfigurationError, match=expected) as caught:
        command.main([str(path), "--output", str(tmp_path / "a.html")])
    assert "\n" not in str(caught.value) and "a.jsonl" in str(caught.value)
    assert not (tmp_path / "a.html").exists()


def test_a_file_that_is_no_record_is_left_out_with_a_line(tmp_path, capsys):
    path = write_record(tmp_path / "a.jsonl", [cell("c", [1.0])])
    page = tmp_path / "page.html"
    page.write_text("<html>")
    empty = tmp_path / "empty.jsonl"
    with open_record(empty, "prove", ENVIRONMENT, {}):
        pass
    command.main([*map(str, (path, page, empty)), "--output", str(tmp_path / "b.html")])
    shown = capsys.readouterr()
    assert shown.out == f"wrote {tmp_path / 'b.html'}\n"
    lines = shown.err.splitlines()
    assert [each.startswith("mpiddp: left out: ") for each in lines] == [True, True]
    assert str(page) in lines[0] and str(empty) in lines[1]
    with pytest.raises(ConfigurationError, match=r"gone\.jsonl cannot be read"):
        command.main([str(path), str(tmp_path / "gone.jsonl"), "--output", f"{tmp_path}/b.html"])


def test_bad_options_are_one_line(tmp_path):
    path = str(write_record(tmp_path / "a.jsonl", [cell("c", [1.0])]))
    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(path).read_text())
    with pytest.raises(ConfigurationError, match="is the same record as"):
        command.main([path, str(copy), "--output", str(tmp_path / "a.html")])

    with pytest.raises(ConfigurationError, match="cannot be written: Not a directory"):
        command.main([path, "--output", f"{path}/slides/"])
    with pytest.raises(ConfigurationError, match=r"fit RECORD… --output FILE\.json writes a fit"):
        command.main([path, "--output", str(tmp_path / "a.html"), "--fit", path])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one record that has everything with curves."""
    folder = tmp_path_factory.mktemp("report")
    planted = Planted(places=((4, 4), (8, 2)), sizes=(K, 64 * K, 1 << 24), rounds=5)
    cells = chain(make_cells(planted), make_messages(), make_pairs(5, {(1, 2): 2.0}))
    record = write_record(folder / "a.jsonl", cells)
    command.main([str(record), "--output", str(folder / "a.html")])
    return folder / "a.html"


def test_the_last_place_is_open_and_its_pictures_are_seen(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    panels = "#all-reduce > details"
    assert page.texts(f"{panels} > summary") == ["4 ranks on 4 nodes", "8 ranks on 2 nodes"]
    assert page.texts(f"{panels}[open] > summary") == ["8 ranks on 2 nodes"]
    shown = page.run(
        """return [...document.querySelectorAll("#all-reduce details[open] figure svg")]
          .map((svg) => [svg.getAttribute("role"), svg.ariaLabel, svg.checkVisibility()])"""
    )
    assert len(shown) == 5 and all(role == "img" and seen for role, _, seen in shown)
    assert shown[0][1].startswith("Time. Time of the slowest rank by size")
    page.click(f"{panels} > summary")
    assert len(page.texts(f"{panels}[open] > summary")) == 2


def test_what_is_pointed_at_is_said_and_the_table_has_all(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    box = "#all-reduce details[open]"
    (first, *others) = page.texts(f"{box} figure:first-of-type svg title")
    size, *rows = first.splitlines()
    assert size == "1 KiB" and len(rows) == 6 and len(others) == 2
    assert any(row.startswith("Gloo: ") and " – " in row for row in rows)
    found = page.run(
        """const svg = document.querySelector(arguments[0]), box = svg.getBoundingClientRect();
        svg.scrollIntoView({ block: "center" });
        const { left, top, width, height } = svg.getBoundingClientRect();
        const hit = document.elementFromPoint(left + width * 0.2, top + height * 0.5);
        return hit.closest("g:has(> title)").querySelector("title").textContent""",
        f"{box} figure svg",
    )
    assert found == first
    rows = page.texts(f"{box} > details tbody tr")
    assert len(rows) == 3 * 10 and rows[0].startswith("Gloo1 KiB")


def test_the_animated_explanation_opens_from_within_the_page(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    first, *_ = page.driver.window_handles
    button = page.driver.find_element("css selector", "#all-reduce .links button:nth-child(2)")
    name = button.text
    button.click()
    page.wait(lambda: len(page.driver.window_handles) == 2)
    page.driver.switch_to.window(page.driver.window_handles[1])
    try:
        page.wait(lambda: page.texts("h2") == [f"{name} on 4 ranks"])
        page.click("#end")
        assert "Now every rank has the whole sum." in page.text(".words")
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)
