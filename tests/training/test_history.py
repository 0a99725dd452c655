"""Rows of runs are read, or refused in one line, and drawn."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import ROW

from launchers import run_python
from mpiddp import plot
from mpiddp.errors import ConfigurationError
from mpiddp.options.reader import read
from mpiddp.training.records import curves
from mpiddp.training.records.history import METRICS, STAGES, STEPS, parse_row, read_histories
from mpiddp.training.records.metrics_file import MetricsFile


def row(epoch: int, **values: Any) -> dict[str, Any]:
    return {"epoch": epoch, "step": 10 * epoch, "loss": 1.0 / epoch, **values}


def write_run(path: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    path.mkdir(parents=True)
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (path / METRICS).write_text(text + tail)
    return path


def test_a_row_of_the_trainer_is_read(tmp_path: Path) -> None:
    MetricsFile(tmp_path / METRICS).append(ROW)
    (history,) = read_histories([str(tmp_path)])
    # Metrics stand beside the other values.
    expected = {**asdict(ROW), "accuracy": ROW.metrics["accuracy"], "test_accuracy": None}
    del expected["metrics"], expected["test_metrics"]
    assert history.rows == (json.loads(json.dumps(expected)),)
    assert history.find_values("loss") == [(1, ROW.loss)]
    assert history.find_values("test_loss") == []


def test_what_a_later_attempt_does_not_go_on_from_is_left_out(tmp_path: Path) -> None:
    # From the end of epoch 1, and with fewer epochs than before.
    steps = [row(1, kind=STEPS, step=step, epochs=step / 10) for step in (10, 20, 30, 15)]
    write_run(tmp_path / "run", [*steps, row(1), row(2), row(3), row(4), row(2, loss=7.0)])
    (history,) = read_histories(["run"], tmp_path)
    assert history.find_values("loss") == [(1, 1.0), (2, 7.0)]
    assert [each["step"] for each in history.steps] == [10, 15]


def test_rows_of_steps_are_told_apart(tmp_path: Path) -> None:
    steps = [row(1, kind=STEPS, step=step, epochs=step / 10, loss=step) for step in (5, 10, 10)]
    steps[1]["loss"] = 7
    diverged = {"step": 20, "epochs": 2.0, "loss": None}
    steps.append(row(2, kind=STEPS, **diverged))
    write_run(tmp_path / "run", [*steps, row(1), row(2, loss=None)])
    write_run(tmp_path / "begun", steps)
    run, begun = read_histories(["run", "begun"], tmp_path)
    assert run.find_values("loss") == [(1, 1.0)] and begun.rows == ()
    assert run.find_curve("loss") == begun.find_curve("loss") == [(0.5, 5), (1.0, 10)]


def test_stages_are_those_of_one_step(tmp_path: Path) -> None:
    # The later attempt counts, and half a row of a running job is left out.
    rows = [row(1, stages={"read": 0.5, "update": 1.0}), row(2, loss=7.0, stages={"read": 1.0})]
    rows += [row(2, step=11, stages={"read": 0.1}), row(3)]
    (history,) = read_histories([str(write_run(tmp_path / "run", rows, '{"epoch": 4, "st'))])
    assert history.find_values("loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    none = dict.fromkeys(STAGES, 0.0)
    found = history.find_stages()
    assert found == [(1, {**none, "read": 50.0, "update": 100.0}), (2, {**none, "read": 100.0})]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path / name, [row(1)])) for name in ("a/run", "b/run", "other")]
    assert [history.label for history in read_histories(paths)] == [*paths[:2], "other"]


def refuse(name: str, runs_dir: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_histories([name], runs_dir)
    return str(caught.value)


def test_a_missing_run_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    write_run(tmp_path / "first", [row(1)])
    message = refuse("frist", tmp_path)
    assert message == f"no run 'frist': expected a run directory; in {tmp_path}: first"


def test_what_a_shell_lists_beside_runs_is_left_out_with_a_line(tmp_path, capsys):
    write_run(tmp_path / "a", [row(1)])
    write_run(tmp_path / "damaged", [row(1)], tail="{\n")
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "picture.svg").touch()
    (tmp_path / "removed").symlink_to("nowhere")
    write_run(tmp_path / "z", [row(1)])
    listed = [str(path) for path in sorted(tmp_path.iterdir())]
    assert [history.label for history in read_histories(listed)] == ["a", "z"]
    damaged, evaluated, picture, removed = capsys.readouterr().err.splitlines()
    assert damaged.startswith(f"mpiddp: left out: {tmp_path}/damaged/{METRICS}, line 2: expected")
    assert evaluated.endswith(f"/evaluated/{METRICS} has no rows: no epoch is finished, or none "
                              "was trained (an evaluation)")  # fmt: skip
    assert picture.endswith(f"cannot read {tmp_path}/picture.svg/{METRICS}: Not a directory")
    assert "/removed/" in removed
    with pytest.raises(ConfigurationError, match="no run 'b'"):
        read_histories(["a", "b"], tmp_path)
    with pytest.raises(ConfigurationError, match=r"has no rows.*, and 1 more"):
        read_histories([str(tmp_path / "evaluated"), str(tmp_path / "picture.svg")])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line",
    [
        "", "{", '{"epoch": 2, "step": 20}', '{"epoch": 2, "step": 20, "loss": NaN}',
        '{"epoch": true, "step": 20, "loss": 1}', '{"epoch": 2, "step": 20, "loss": "low"}',
        f'{{"epoch": 2, "step": 20, "loss": 1{"0" * 400}}}',
    ],
)  # fmt: skip
def test_a_damaged_row_is_named(line: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [row(1)], tail=f"{line}\n{json.dumps(row(3))}\n")
    message = refuse("run", tmp_path)
    assert f"{METRICS}, line 2: " in message and message.endswith(": remove the line")
    assert "\n" not in message


@given(st.binary(max_size=60))
def test_no_bytes_are_worse_than_damaged(line: bytes) -> None:
    assert parse_row(line) is None


def write_runs(folder: Path, names: list[str], **values: Any) -> None:
    for number, name in enumerate(names, start=1):
        rows = [row(epoch, samples_per_second=100.0 * number, **values) for epoch in (1, 2, 3)]
        write_run(folder / name, rows)


def draw_runs(folder: Path, names: list[str]) -> Any:
    return curves.draw(read_histories(names, folder))


def test_each_run_has_its_curve_and_colour(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(12)]
    write_runs(tmp_path, names)
    for count in (2, 12):
        figure = draw_runs(tmp_path, names[:count])
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
    (axis,) = draw_runs(tmp_path / "runs", ["fine"]).axes
    fine, epoch = axis.get_lines()
    # The mean of each three neighbours.
    assert list(fine.get_ydata()) == [1.0] * curves.FINEST
    assert fine.get_xdata()[[0, -1]] == pytest.approx([2 / count, (count - 1) / count])
    assert list(epoch.get_ydata()) == [0.9]
    monkeypatch.chdir(tmp_path)
    plot.main(["fine", "point"])
    assert "one epoch is one point (point): train with --log-every" in capsys.readouterr().out


def test_stages_are_stacked(tmp_path: Path) -> None:
    seconds = {name: 0.01 * place for place, name in enumerate(STAGES, start=1)}
    write_runs(tmp_path, ["one", "two"], stages=seconds)
    # Ten steps in each epoch; milliseconds.
    expected = sum(range(1, len(STAGES) + 1))
    bars = draw_runs(tmp_path, ["one"]).axes[-1].patches
    tops = {bar.get_x() + bar.get_width() / 2: 0.0 for bar in bars}
    for bar in bars:
        place = bar.get_x() + bar.get_width() / 2
        assert bar.get_y() == pytest.approx(tops[place])
        tops[place] += bar.get_height()
    assert tops == pytest.approx({1: expected, 2: expected, 3: expected})
    wide = draw_runs(tmp_path, ["one", "two"]).axes[-1].patches
    ends = [bar.get_x() + bar.get_width() for bar in wide]
    assert max(ends) == pytest.approx(expected)


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
