"""``benchmarks stragglers``: what it runs, and what it makes of the runs."""

from dataclasses import replace

import pytest

import documents
from benchmarks.measure.engine import run
from benchmarks.measure.stragglers import contenders as stragglers
from benchmarks.measure.stragglers.contenders import (
    QUANTITY,
    TrainingRun,
    TrainingWay,
    find_times,
    judge,
    make_group,
    read_run,
    tabulate,
)
from benchmarks.records.schema import read_record
from measured import MPIRUN


def make_runs(*times: tuple[float, ...], staleness: dict[str, int] | None = None):
    """Runs whose accuracy is 50 %, 60 % and so on after so many seconds."""
    curves = [[(at, 0.5 + 0.1 * place) for place, at in enumerate(each)] for each in times]
    return [TrainingRun(tuple(each), staleness or {}) for each in curves]


PLAN = replace(
    QUANTITY.parse([]).plan, stragglers=("0=4", "random=2"), staleness=("0", "4", "unlimited")
)
FOUND = {
    TrainingWay("0=4", None): make_runs((1, 2, 3), (1, 2, 3)),
    TrainingWay("0=4", None, 8): make_runs((1, 2, 3)),
    TrainingWay("0=4", "0"): make_runs((2, 4, 6), (2, 6, 8), (2, 5, 7)),
    TrainingWay("0=4", "4"): make_runs((2, 4, 6)),
    TrainingWay("0=4", "unlimited"): make_runs((1, 2, 3), staleness={"0": 1, "3": 1}),
    TrainingWay("random=2", None): make_runs((1, 2)),
    TrainingWay("random=2", None, 8): make_runs((1, 2)),
    TrainingWay("random=2", "0"): make_runs((1, 5)),
    TrainingWay("random=2", "4"): make_runs((1, 4)),
    TrainingWay("random=2", "unlimited"): make_runs((1, 2)),
}


def test_time_counts_up_to_the_first_evaluation_that_is_good_enough():
    rows = [
        {"seconds": 1.5, "test_accuracy": 0.4, "staleness": {"0": 1}},
        {"seconds": 2.0, "test_accuracy": 0.8, "staleness": {"0": 2}},
        {"seconds": 2.5, "test_accuracy": 0.7, "staleness": {"0": 3, "2": 5}},
    ]
    found = read_run(rows)
    assert found.curve == ((1.5, 0.4), (3.5, 0.8), (6.0, 0.7))
    assert found.staleness == {"0": 3, "2": 5}
    assert [found.find_time(each) for each in (0.4, 0.5, 0.8, 0.81)] == [1.5, 3.5, 3.5, None]


def make(accuracy: float, found=FOUND):
    plan = replace(PLAN, accuracy=accuracy)
    return [make_group(plan, found)], plan


def test_a_way_with_a_run_that_never_comes_there_has_no_time():
    way = TrainingWay("0=4", "0")
    for accuracy, expected in ((0.6, (2, 2)), (0.65, ())):
        [group], _ = make(accuracy, {way: make_runs((1, 2, 3), (1, 2))})
        assert find_times(group, way, accuracy) == expected
    [refusal] = group.refusals
    assert refusal.reason == "1 of 2 runs did not reach 65%"


def test_targets_are_judged_against_the_server_in_step():
    [random] = judge(*make(0.6, {row: 6 * each[-1:] for row, each in FOUND.items()}))
    assert (random.at_most, random.found, random.met) == (0.7, {"": 4 / 5}, False)
    assert str(random).startswith("straggler random=2: time of server, 4 steps to 60%")
    [few] = judge(*make(0.6))
    assert "cannot be judged from these rounds; of medians" in str(few)
    [random] = judge(*make(0.9))
    assert not random.met and "never reached" in str(random)


def test_the_table_has_a_row_for_every_way():
    lines = tabulate(*make(0.6)).splitlines()
    names = ["framework", "weights, 8 steps", "server, in step", "server, 4 steps"]
    names.append("server, no bound")
    found = [line.split("  ")[1].strip() for line in lines if line.startswith("  ")]
    assert found == 2 * names
    row = next(line for line in lines if "no bound" in line and "mean" in line)
    assert row.split()[3:] == ["2.00", "0.40", "3.00", "70.00%", "mean", "1.50,", "max", "3"]


def test_each_round_trains_from_another_seed(monkeypatch):
    plan = replace(QUANTITY.parse([]).plan, seed=5, staleness=("0",))
    words, seen = ("--sync=framework", "--sync=parameter-server"), []

    def see(program, deadline):
        seen[:] = program.command
        raise NotImplementedError

    monkeypatch.setattr(stragglers.processes, "run", see)
    for contender, word in zip(stragglers.list_contenders(plan)[1:3], words, strict=True):
        with pytest.raises(NotImplementedError):
            stragglers.train(plan, contender, 1, MPIRUN)
        assert {"--seed=6", word} <= {*seen}


@pytest.mark.long
@pytest.mark.mpi
def test_whole_trainings_are_measured_drawn_and_recorded(tmp_path, capsys):
    record, picture = tmp_path / "record.jsonl", tmp_path / "picture.svg"
    words = documents.read_command("python -m benchmarks stragglers")
    words += ["--stragglers=random=4", "--staleness", "0", "4", "--accuracy=0.15", "--targets"]
    run(QUANTITY, [*words, "--output", str(record), "--output", str(picture)])
    printed = capsys.readouterr().out
    assert "2 ranks, mlp on digits" in printed
    target = "straggler random=4: time of server, 4 steps to 15%, by in step, at most 0.7: "
    assert f"target: {target}" in printed
    cells = read_record(record).cells
    # 1,438 samples by 16 for each of two workers, in two epochs.
    steps = {"framework": 0, "weights, 8 steps": 0}
    steps |= dict.fromkeys(["server, in step", "server, 4 steps"], 2 * 2 * 45)
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
    assert "server, 4 steps" in drawn and "Accuracy against time" in drawn
