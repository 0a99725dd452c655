"""``benchmarks stragglers``: what it runs, and what it makes of the runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import documents
from benchmarks.measure.launching import launchers
from benchmarks.measure.stragglers import command as stragglers
from benchmarks.measure.stragglers import measurement, report
from benchmarks.measure.stragglers.measurement import (
    Contender,
    Point,
    TrainingRun,
    find_median,
    read_run,
)
from benchmarks.measure.stragglers.report import judge
from benchmarks.records.schema import read_record
from benchmarks.records.statistics import make_series


def make_runs(*times: tuple[float, ...], staleness: dict[int, int] | None = None):
    """Runs whose accuracy is 50 %, 60 % and so on after so many seconds."""
    runs = [
        TrainingRun(
            tuple(Point(seconds, 0.5 + 0.1 * place) for place, seconds in enumerate(each)),
            staleness or {},
        )
        for each in times
    ]
    return make_series(list(enumerate(runs)), 0)


FOUND = {
    Contender("0=4", None): make_runs((1, 2, 3), (1, 2, 3)),
    Contender("0=4", None, 8): make_runs((1, 2, 3)),
    Contender("0=4", "0"): make_runs((2, 4, 6), (2, 6, 8), (2, 5, 7)),
    Contender("0=4", "4"): make_runs((2, 4, 6)),
    Contender("0=4", "unlimited"): make_runs((1, 2, 3), staleness={0: 1, 3: 1}),
    Contender("random=2", "0"): make_runs((1, 5)),
    Contender("random=2", "4"): make_runs((1, 4)),
    Contender("random=2", "unlimited"): make_runs((1, 2)),
}


def test_time_counts_up_to_the_first_evaluation_that_is_good_enough():
    rows = [
        {"seconds": 1.5, "test_accuracy": 0.4, "staleness": {"0": 1}},
        {"seconds": 2.0, "test_accuracy": 0.8, "staleness": {"0": 2}},
        {"seconds": 2.5, "test_accuracy": 0.7, "staleness": {"0": 3, "2": 5}},
    ]
    run = read_run(rows)
    assert run.points == (Point(1.5, 0.4), Point(3.5, 0.8), Point(6.0, 0.7))
    assert run.staleness == {0: 3, 2: 5}
    assert [run.find_time(each) for each in (0.4, 0.5, 0.8, 0.81)] == [1.5, 3.5, 3.5, None]


def test_a_way_with_a_run_that_never_comes_there_has_no_time():
    series = make_runs((1, 2, 3), (1, 2))
    assert find_median(series, 0.6) == 2
    assert find_median(series, 0.65) is None


def test_targets_are_judged_against_the_server_in_step():
    found = {row: replace(each, samples=6 * each.samples[-1:]) for row, each in FOUND.items()}
    constant, random = judge(found, 0.6)
    assert (constant.at_most, constant.found, constant.met) == (0.5, {"": 0.4}, True)
    assert (random.at_most, random.found, random.met) == (0.7, {"": 4 / 5}, False)
    assert "no bound to 60%, by in step, at most 0.5: 0.400: met" in str(constant)
    assert str(random).startswith("straggler random=2: time of server, 4 steps to 60%")
    (few, _) = judge(FOUND, 0.6)
    assert str(few).endswith("0.500: cannot be judged from these rounds; of medians 0.400")
    (constant, _) = judge(FOUND, 0.9)
    assert not constant.met and "never reached" in str(constant)


def test_the_table_has_a_row_for_every_way():
    lines = report.format_table(FOUND, 0.6).splitlines()
    assert [line.split("  ")[1].strip() for line in lines if line.startswith("  ")] == [
        "framework", "weights, 8 steps", "server, in step", "server, 4 steps", "server, no bound",
        "server, in step", "server, 4 steps", "server, no bound",
    ]  # fmt: skip
    (row,) = [line for line in lines if "no bound" in line and "mean" in line]
    assert row.split()[3:] == ["2.00", "0.40", "3.00", "70.00%", "mean", "1.50,", "max", "3"]


WORDS = ("--seed", "--sync", "--average-every")


def test_each_round_trains_from_another_seed(monkeypatch):
    plan = replace(stragglers.parse([]).plan, repetitions=2, seed=5, staleness=("0",))
    seen = []

    def run(program, deadline):
        seen.append([word for word in program.command if word.startswith(WORDS)])
        raise NotImplementedError

    monkeypatch.setattr(measurement.processes, "run", run)
    launcher = launchers.find_mpirun(None)
    for number in (0, 1):
        for contender in measurement.list_contenders(plan)[:3]:
            with pytest.raises(NotImplementedError):
                measurement.train(plan, contender, number, launcher)
    assert seen == [
        [f"--seed={seed}", *words]
        for seed in (5, 6)
        for words in (
            ["--sync=framework", "--average-every=None"],
            ["--sync=framework", "--average-every=8"],
            ["--sync=parameter-server", "--average-every=None"],
        )
    ]


@pytest.mark.long
@pytest.mark.mpi
def test_whole_trainings_are_measured_drawn_and_recorded(tmp_path, capsys):
    record, picture = tmp_path / "record.jsonl", tmp_path / "picture.svg"
    words = documents.read_command("python -m benchmarks stragglers")
    words += ["--accuracy", "0.15", "--targets"]
    stragglers.main([*words, "--output", str(record), "--output", str(picture)])
    printed = capsys.readouterr().out
    assert "2 ranks, mlp on digits" in printed
    target = "straggler 0=4: time of server, no bound to 15%, by in step, at most 0.5: "
    assert f"target: {target}" in printed
    cells = read_record(record).cells
    # 1,438 samples by 16 for each of two workers, in two epochs; or all by 16.
    steps = {"framework": 0, "weights, 8 steps": 0, "server, in step": 2 * 2 * 45}
    steps["server, no bound"] = 2 * 90
    whole = [cell for cell in cells if cell.quantity == "training"]
    assert [cell.contender for cell in whole] == list(steps)
    for cell in whole:
        (((_, first), (seconds, second)),) = cell.details["curves"]
        assert cell.samples == (seconds,)
        assert 0 < first < 1 and second > 0.15
        (late,) = cell.details["staleness"]
        assert sum(late.values()) == steps[cell.contender]
    reached = [cell for cell in cells if cell.quantity == "time to accuracy"]
    assert [cell.at["accuracy"] for cell in reached] == [0.15] * 4
    drawn = picture.read_text()
    assert "server, no bound" in drawn and "Accuracy against time" in drawn
