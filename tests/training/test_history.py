"""Rows of runs are read, or refused in one line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import ROW

from mpiddp.errors import ConfigurationError
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


def test_the_later_attempt_counts(tmp_path: Path) -> None:
    rows = [row(1), row(2, loss=7.0), row(2, loss=3.0), row(3)]
    (history,) = read_histories([str(write_run(tmp_path / "run", rows))])
    assert history.find_values("loss") == [(1, 1.0), (2, 3.0), (3, 1 / 3)]


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


def test_half_a_row_of_a_running_job_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [row(1)], tail='{"epoch": 2, "st')
    (history,) = read_histories(["run"], tmp_path)
    assert [each["epoch"] for each in history.rows] == [1]


def test_stages_are_those_of_one_step(tmp_path: Path) -> None:
    rows = [row(1, stages={"read": 0.5, "update": 1.0}), row(2, stages={"read": 0.1}), row(3)]
    (history,) = read_histories([str(write_run(tmp_path / "run", rows))])
    none = dict.fromkeys(STAGES, 0.0)
    found = history.find_stages()
    assert found == [(1, {**none, "read": 50.0, "update": 100.0}), (2, {**none, "read": 10.0})]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / part / "run", [row(1)]) for part in ("a", "b")]
    paths.append(write_run(tmp_path / "other", [row(1)]))
    labels = [history.label for history in read_histories(list(map(str, paths)))]
    assert labels == [str(paths[0]), str(paths[1]), "other"]


def refuse(name: str, runs_dir: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_histories([name], runs_dir)
    return str(caught.value)


def test_a_missing_run_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    write_run(tmp_path / "first", [row(1)])
    message = refuse("frist", tmp_path)
    assert message == f"no run 'frist': expected a run directory; in {tmp_path}: first"


def test_a_run_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert "has no rows" in refuse("new", tmp_path)
    write_run(tmp_path / "begun", [], tail='{"epo')
    assert "has no rows" in refuse("begun", tmp_path)
    assert (
        refuse(str(tmp_path), tmp_path)
        == f"{tmp_path} is no run, but holds runs: give {tmp_path}/*"
    )


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
        "",
        "{",
        "[1]",
        '{"epoch": 2, "step": 20}',
        '{"epoch": 2, "step": 20, "loss": NaN}',
        '{"epoch": 2.5, "step": 20, "loss": 1}',
        '{"epoch": true, "step": 20, "loss": 1}',
        '{"epoch": 2, "step": 20, "loss": "low"}',
        f'{{"epoch": 2, "step": 20, "loss": 1{"0" * 400}}}',
    ],
)
def test_a_damaged_row_is_named(line: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [row(1)], tail=f"{line}\n{json.dumps(row(3))}\n")
    message = refuse("run", tmp_path)
    assert f"{METRICS}, line 2: " in message and message.endswith(": remove the line")
    assert "\n" not in message


@given(st.binary(max_size=60))
def test_no_bytes_are_worse_than_damaged(line: bytes) -> None:
    assert parse_row(line) is None
