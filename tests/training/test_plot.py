"""Pictures of runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_history import row, write_run

from launchers import run_python
from mpiddp import plot
from mpiddp.errors import ConfigurationError
from mpiddp.options.reader import read
from mpiddp.training.records import curves
from mpiddp.training.records.history import STAGES, STEPS, read_histories


def write_runs(folder: Path, names: list[str], **values: Any) -> None:
    for number, name in enumerate(names, start=1):
        rows = [row(epoch, samples_per_second=100.0 * number, **values) for epoch in (1, 2, 3)]
        write_run(folder / name, rows)


def draw(folder: Path, names: list[str]) -> Any:
    return curves.draw(read_histories(names, folder))


def test_each_run_has_its_curve_and_colour(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(12)]
    write_runs(tmp_path, names)
    for count in (2, 12):
        figure = draw(tmp_path, names[:count])
        lines = figure.axes[1].get_lines()
        assert [list(line.get_ydata()) for line in lines] == [
            [100.0 * number] * 3 for number in range(1, count + 1)
        ]
        assert len({str(line.get_color()) for line in lines}) == count
        shown = [text.get_text() for text in figure.legends[0].get_texts()]
        assert shown[:count] == names[:count]


def test_a_run_of_one_epoch_has_a_curve(tmp_path, monkeypatch, capsys):
    count = 3 * curves.FINEST
    steps = [
        row(1, step=step, kind=STEPS, epochs=step / count, loss=step % 3)
        for step in range(1, count + 1)
    ]
    write_run(tmp_path / "runs" / "fine", [*steps, row(1, step=count, loss=0.9)])
    write_run(tmp_path / "runs" / "point", [row(1)])
    (axis,) = draw(tmp_path / "runs", ["fine"]).axes
    fine, epoch = axis.get_lines()
    # The mean of each three neighbours.
    assert list(fine.get_ydata()) == [1.0] * curves.FINEST
    assert 0 < fine.get_xdata()[0] < fine.get_xdata()[-1] < 1
    assert list(epoch.get_ydata()) == [0.9]
    monkeypatch.chdir(tmp_path)
    plot.main(["fine", "point"])
    assert "one epoch is one point (point): train with --log-every" in capsys.readouterr().out


def test_stages_are_stacked(tmp_path: Path) -> None:
    seconds = {name: 0.01 * place for place, name in enumerate(STAGES, start=1)}
    write_runs(tmp_path, ["one", "two"], stages=seconds)
    # Ten steps in each epoch; milliseconds.
    expected = sum(range(1, len(STAGES) + 1))
    bars = draw(tmp_path, ["one"]).axes[-1].patches
    tops = {bar.get_x() + bar.get_width() / 2: 0.0 for bar in bars}
    for bar in bars:
        place = bar.get_x() + bar.get_width() / 2
        assert bar.get_y() == pytest.approx(tops[place])
        tops[place] += bar.get_height()
    assert tops == pytest.approx({1: expected, 2: expected, 3: expected})
    wide = draw(tmp_path, ["one", "two"]).axes[-1].patches
    ends = [bar.get_x() + bar.get_width() for bar in wide]
    assert max(ends) == pytest.approx(expected)


def test_texts_of_a_picture_do_not_overlap(tmp_path: Path) -> None:
    stages = dict.fromkeys(STAGES, 0.01)
    names = [f"a-run-with-a-long-name-{number}" for number in range(9)]
    write_runs(tmp_path, names, accuracy=0.5, learning_rate=0.001, test_loss=2.0, stages=stages)
    for count in (1, 9):
        figure = draw(tmp_path, names[:count])
        figure.draw_without_rendering()  # Places are known then.
        boxes = [legend.get_window_extent() for legend in figure.legends]
        boxes += [axis.get_legend().get_window_extent() for axis in figure.axes[-1:]]
        for axis in figure.axes:
            boxes += [axis.get_window_extent(), axis._left_title.get_window_extent()]
        for number, box in enumerate(boxes):
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
            assert not any(box.overlaps(other) for other in boxes[number + 1 :])


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_runs(tmp_path / "runs", ["first", "<second>"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_suffix_decides(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.svg", "a.png", "a.html"):
        plot.main(["first", "<second>", "--output", name])
        assert capsys.readouterr().out == f"Written: {name}\n"
    svg = ElementTree.parse(runs / "a.svg").getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<second>" in "".join(svg.itertext())
    assert (runs / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (runs / "a.html").read_text()
    assert "<th>&lt;second&gt;</th>" in page and "<svg" in page
    assert not re.search(r'(src|href)="(?!#)', page), "the page needs another file"


def test_mistakes_are_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_python("-m", "mpiddp", "plot", "frist", cwd=runs).expect(2)
    assert "no run 'frist'" in result.stderr and result.stderr.count("\n") == 1
    cases = [
        (["first", "--output", "a.pdf"], "ends in .svg, .png or .html (picture), found 'a.pdf'"),
        (["first", "--output", "none/a.svg"], "none/a.svg cannot be written: there is no"),
    ]
    for words, expected in cases:
        with pytest.raises(ConfigurationError, match=re.escape(expected)):
            read_error(words)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'mpiddp\[plot\]'"):
        read_error(["first"])


def read_error(words: list[str]) -> None:
    """As `plot.main`; its failure handler would end this process."""
    plot.draw_runs(read(plot.PlotOptions, words, "plot", ""))


def test_help_needs_no_library() -> None:
    program = (
        "import sys; from mpiddp import plot\n"
        "try: plot.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'mpi4py', 'matplotlib'} & set(sys.modules)))"
    )
    result = run_python("-c", program)
    assert result.stdout.splitlines()[-1] == "[]", result
