"""``--batch-size auto``: the largest batch that fits, found by trial."""

from unittest import mock

import pytest
import torch
from torch import nn

import trainings
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.config import from_keywords, read_toml
from mpiddp.training.wrapping import batch_size
from mpiddp.training.wrapping.batch_size import StepTrial, find_size

# 160 samples for training.
TOY = ("--data", "toy", "--samples", "200", "--epochs", "2", "--batch-size", "auto")
LIMITED = (*TOY, "--model", "trainings:build_limited")


@pytest.mark.parametrize("most", [1, 2, 3, 50, 64, 1000])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 50, 63, 64, 200])
def test_the_size_fits_and_what_is_an_eighth_larger_does_not(most: int, limit: int) -> None:
    tried = []

    def explain(size: int) -> str:
        assert 1 <= size <= most
        tried.append(size)
        return "" if size <= limit else f"{size} are too many"

    size, reason = find_size(explain, most)
    assert len(tried) == len(set(tried)) <= 16
    if limit >= most:
        assert (size, reason) == (most, "")
        return
    refused = int(reason.split()[0])
    assert size <= limit < refused <= size + max(1, size // 8)


def test_ranks_agree_on_the_smaller_limit_and_nothing_else_changes(pool, tmp_path):
    two, run = pool("openmpi", 2), tmp_path / "runs" / "found"
    words = (*LIMITED, "--base-batch", "32", "--save-every", "1epoch")
    named = [*words, "--name", "found"]
    found = two.call(trainings.run_limited, [60, 45], named, cwd=tmp_path).printed
    # 32 fit and 64 do not; 48 do not, 40 and 44 do.
    size = read_toml(run / "config.toml")["batch_size"]
    assert 40 <= size <= 45
    said = f"Batch size: {size} samples per rank, found by trial; more do not fit, on rank 1: no "
    assert f"{said}mem" in found
    assert f"0.05 x {2 * size} samples per step / base batch 32 = " in found
    given = [*words, "--name", "given", "--batch-size", str(size)]
    assert "Batch size:" not in two.call(trainings.run, given, cwd=tmp_path).printed
    names = ("parameters", "loss", "test_loss", "learning_rate")
    rows = [trainings.read_rows(each)[-1] for each in (run, tmp_path / "runs" / "given")]
    assert [rows[0][name] for name in names] == [rows[1][name] for name in names]
    # Whoever goes on takes the number, whatever fits now, and looks for none.
    more = [*words, "--name", "more", "--resume", "runs/found/checkpoints/step-4", "--epochs", "3"]
    assert "Batch size:" not in two.call(trainings.run_limited, [9, 9], more, cwd=tmp_path).printed
    assert read_toml(tmp_path / "runs" / "more" / "config.toml")["batch_size"] == size


def test_passes_share_the_size_and_data_and_memory_end_the_search(pool, tmp_path):
    two = pool("openmpi", 2)
    words = [*LIMITED, "--accumulation-steps", "3", "--name", "parts"]
    printed = two.call(trainings.run_limited, [1000, 1000], words, cwd=tmp_path).printed
    # A rank has 80 samples, of which 78 are three equal parts.
    assert "Batch size: 78 samples per rank, found by trial; a rank's share of the " in printed
    none = two.call(trainings.run_limited, [0, 0], LIMITED, cwd=tmp_path).values
    assert all(each.startswith("batch_size: auto found no size that fits, on ") for each in none)


def test_a_cpu_tries_no_step_that_would_take_more_than_there_is(session, monkeypatch):
    numbers, samples = 250_000, 4
    model = nn.Sequential(nn.Linear(1, numbers), nn.ReLU(), nn.Linear(numbers, 1))
    asked = []

    def find_shortage(size: int) -> str:
        asked.append(size)
        return "the machine has less" if size > 1e9 else ""

    monkeypatch.setattr(batch_size, "find_shortage", find_shortage)
    few = Batch(torch.ones(samples, 1), torch.ones(samples, 1))

    def compute(batch: Batch) -> None:
        nn.functional.mse_loss(model(batch.inputs), batch.targets).backward()

    optimizer = torch.optim.SGD(model.parameters())
    options = from_keywords({"batch_size": "auto", "ema": 0.9})
    trial = StepTrial(options, session, compute, optimizer, few)
    assert trial.foresee(32) == "" and not asked
    # What was freed before, and would be used again, is measured as well.
    for _ in range(2):
        *freed, kept = (torch.ones(1_000_000) for _ in range(100))
        del freed
    assert trial.explain(32) == "" and kept is not None
    assert trial.foresee(64) == "" and trial.foresee(1024) == "the machine has less"
    # The hidden layer and its gradient are 4 bytes for each of its numbers and samples.
    assert 32 * numbers * 4 < asked[0] / 2 < 32 * numbers * 4 * 8
    copy = sum(each.nbytes for each in model.parameters())
    assert asked[1] - copy == pytest.approx(16 * (asked[0] - copy), rel=0.01)
    # Twice as many samples, with a reserve of 5 %, and the average of the weights.
    trial._size, trial._bytes = 10, 10_000_000
    assert trial.foresee(20) == "" and asked[2] == 21_000_000 + copy
    assert all(each.grad is None for each in model.parameters())


def test_a_step_that_is_foreseen_not_to_fit_is_not_taken():
    taken = []
    trial = mock.Mock(foresee=lambda size: "no room" * (size > 4), explain=taken.append)
    session = mock.Mock(gather=lambda problem: ["", problem])
    size, line = batch_size.settle(from_keywords({}), session, trial, 9)
    assert (size, taken) == (4, [2, 4]) and line.endswith("more do not fit, on rank 1: no room")
    # A rank that takes no steps hears what fits the others.
    assert batch_size.settle(from_keywords({}), session, None, 9)[0] == 9
