"""``python -m benchmarks training-loop``: the trainer beside a bare loop."""

from itertools import islice

import pytest
import torch

import mpiddp
from benchmark_runs import record_benchmark
from benchmarks.measure.baselines.training_loop import Settings, take_steps
from benchmarks.measure.engine import CellGroup, find_speeds
from benchmarks.measure.training_loop.contenders import (
    BARE,
    QUANTITY,
    TRAINER,
    LoopRequest,
    judge,
    make_cells,
    tabulate,
)
from benchmarks.measure.training_loop.worker import FEWEST_ROUNDS, Loops, measure

SAMPLES = torch.rand(14, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(14) % 2
SETTINGS = Settings(4, 0.01, 0.9, 0.0005, "fp32", channels_last=False, compile=False)


class MadeUpLoops(Loops):
    """Of which every step takes as long; and what was asked of them."""

    def __init__(self, trainer: float, bare: float) -> None:
        self.usual = {TRAINER: trainer, BARE: bare}
        self.taken: list[tuple[str, int]] = []

    def time(self, name: str, steps: int) -> float:
        self.taken.append((name, steps))
        return steps * self.usual[name]

    def share(self, seconds: float) -> float:
        return seconds


PLAN = QUANTITY.parse([]).plan


def make(trainer: list[float], bare: list[float]) -> CellGroup:
    series = {TRAINER: trainer, BARE: bare}
    cells = make_cells(PLAN, "convnet", 2, steps=24, turns=6, series=series)
    return CellGroup(ranks=2, cells=list(cells))


def test_the_speed_is_that_of_rounds():
    groups = [make([1, 2, 0.31] * 3, [0.99, 1, 0.3069] * 3), make([2] * 9, [1] * 9)]
    speeds = [each.estimate for each in find_speeds(groups, TRAINER, BARE)]
    assert speeds == pytest.approx([0.99, 0.5])
    words = tabulate(groups, PLAN).splitlines()[1].split()
    assert " ".join(words[:-1]) == "convnet 2 16 24 steps 1 s 990 ms 10 ms 0.990"
    unknown, missed = (judge([each], PLAN)[0] for each in groups)
    assert (unknown.met, missed.met) == (None, False)
    assert str(unknown).endswith(" 0.990: cannot be judged from these rounds")
    assert judge([make([8] * 6, [9] * 6)], PLAN)[0].met
    # Rounds that are alike tell less than as many that are not.
    groups = [make(each * 3, [1.0] * 18) for each in ([1] * 3 + [0.9] * 3, [1, 0.9] * 3)]
    assert [judge([each], PLAN)[0].met for each in groups] == [None, True]


@pytest.mark.parametrize(("usual", "steps", "turns"), [(0.005, 12, 12), (0.25, 2, 6), (5.0, 1, 1)])
def test_both_loops_take_as_many_turns_in_pairs(usual, steps, turns):
    loops = MadeUpLoops(usual, usual / 2)
    found = measure(loops, LoopRequest("convnet", SETTINGS, seconds=60.0, seed=5))
    rounds = max(FEWEST_ROUNDS, int(60 / (1.5 * usual * steps * turns)))
    assert (found["steps"], found["turns"]) == (steps, turns)
    series = {TRAINER: pytest.approx([usual] * rounds), BARE: pytest.approx([usual / 2] * rounds)}
    assert found["series"] == series
    names = [name for name, _ in loops.taken]
    assert all(set(pair) == {TRAINER, BARE} for pair in zip(names[::2], names[1::2], strict=True))
    # Neither is always the first one.
    assert {TRAINER, BARE} == set(names[::2])
    assert {each for _, each in loops.taken[2:]} == {steps}


def train_barely(session: mpiddp.Session, steps: int) -> list[list[float]]:
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 2)
    list(islice(take_steps(model, SAMPLES, LABELS, SETTINGS), steps))
    return model.weight.tolist()


def test_the_bare_loop_trains_as_one_process_does_with_all_samples(pool):
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(
        model.parameters(), SETTINGS.learning_rate, SETTINGS.momentum, nesterov=True,
        weight_decay=SETTINGS.weight_decay,
    )  # fmt: skip
    for epoch in range(2):
        order = torch.randperm(14, generator=torch.Generator().manual_seed(epoch))
        for index in (order[:8], order[8:]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(SAMPLES[index]), LABELS[index]).backward()
            optimizer.step()
    for found in pool("openmpi", 2).call(train_barely, 4).values:
        torch.testing.assert_close(torch.tensor(found), model.weight.detach())


@pytest.mark.long
@pytest.mark.mpi
def test_both_loops_are_timed_printed_drawn_and_written(tmp_path):
    picture = tmp_path / "loop.svg"
    words = ["--ranks", "2", "--models", "convnet", "--seconds", "1", "--targets"]
    words += ["--output", str(picture)]
    printed, found = record_benchmark(tmp_path / "loop.jsonl", "training-loop", *words)
    [row] = [line for line in printed.splitlines() if line.startswith("convnet")]
    assert row.split()[1:3] == ["2", "16"]
    assert "target: the trainer's samples per second: at least 0.98" in printed
    assert {cell.contender: cell.unit for cell in found.cells} == {TRAINER: "s", BARE: "s"}
    for cell in found.cells:
        assert len(cell.samples) >= FEWEST_ROUNDS and min(cell.samples) > 0
    assert found.is_complete and picture.exists()
