"""``python -m benchmarks training-loop``: the trainer beside a bare loop."""

from __future__ import annotations

import numpy
import pytest

from benchmark_runs import record_benchmark
from benchmarks.common.statistics import make_series
from benchmarks.training_loop.measurement import BARE, TRAINER, Group
from benchmarks.training_loop.report import SPEED, compare, format_table, judge


def make(trainer: list[float], bare: list[float]) -> Group:
    rates = {TRAINER: trainer, BARE: bare}
    series = {name: make_series(list(enumerate(each)), 0) for name, each in rates.items()}
    return Group("convnet", 2, 16, series)


def test_the_speed_is_that_of_rounds():
    groups = [make([99, 50, 300] * 3, [100, 50, 310] * 3), make([1] * 9, [2] * 9)]
    assert [each.estimate for each in compare(groups)] == [0.99, 0.5]
    assert format_table(groups).splitlines()[1].split()[-2] == "0.990"
    unknown, missed = (judge([each])[0] for each in groups)
    assert (unknown.met, missed.met) == (None, False)
    assert str(unknown).endswith(" 0.990: cannot be judged from these rounds")
    assert judge([make([9] * 6, [8] * 6)])[0].met


def test_equal_loops_are_told_apart_by_no_rounds_that_are_alike():
    generator, wrong = numpy.random.default_rng(3), 0
    for _ in range(200):
        noise = generator.normal(size=(2, 24))
        for place in range(1, 24):
            noise[:, place] = 0.7 * noise[:, place - 1] + 0.71 * noise[:, place]
        rates = numpy.exp(0.1 * noise)
        group = make((SPEED * rates[0]).tolist(), rates[1].tolist())
        wrong += judge([group])[0].met is not None
    assert wrong <= 16


@pytest.mark.long
@pytest.mark.mpi
def test_both_loops_are_timed_printed_drawn_and_written(tmp_path):
    picture = tmp_path / "loop.svg"
    words = ["--ranks", "2", "--models", "convnet", "--epochs", "1", "--repetitions", "1"]
    words += ["--targets", "--plot", str(picture)]
    printed, found = record_benchmark(tmp_path / "loop.json", "training-loop", *words)
    [row] = [line for line in printed.splitlines() if line.startswith("convnet")]
    assert row.split()[1:3] == ["2", "16"]
    assert "target: the trainer's samples per second: at least 0.98" in printed
    assert {cell.contender: cell.unit for cell in found.cells} == dict.fromkeys(
        (TRAINER, BARE), "samples/s"
    )
    assert all(cell.samples[0] > 0 for cell in found.cells) and found.is_complete
    assert "samples" in picture.read_text().lower()
