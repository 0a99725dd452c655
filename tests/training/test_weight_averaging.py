"""``--average-every``: ranks take steps of their own, and average their weights now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_training_sync import read_last
from torch import nn

import broken_data
import interrupted
import preempted
import trainings
from mpiddp.training.data.batches import Cut, make_training_batches
from mpiddp.training.data.data_sets import load
from mpiddp.training.data.samples import Samples
from mpiddp.training.options.config import Configuration
from mpiddp.training.step.learning_rate import make_learning_rate
from mpiddp.training.step.optimizer_step import make_optimizer
from pool import Pools

RANKS, EVERY, BAD = 2, 3, [17, 60]
TOY = Configuration(data="toy", samples=210, epochs=2, average_every=EVERY, ema=0.9).resolve()
WORDS = ("--data", "toy", "--samples", "210", "--epochs", "2")
# 168 samples for training: 6 steps of two ranks in an epoch, and the last one has 4 for each.
STEPS = 6


@pytest.mark.mpi
def test_averages_after_each_plain_step_are_averages_of_gradients(pool, tmp_path):
    words = (*WORDS, "--momentum", "0", "--last-batch", "weighted", "--ema", "0.9")
    ways = {
        "plain": (),
        "each": ("--average-every", "1", "--sync", "ring"),
        "parts": ("--average-every", "1", "--accumulation-steps", "2"),
        "seldom": ("--average-every", "4"),
    }
    lines = [
        [*words, *more, "--name", name, "--export", f"{name}.pt"] for name, more in ways.items()
    ]
    printed = pool("openmpi", RANKS).call(trainings.run, *lines, cwd=tmp_path).printed
    assert "Weights: each rank's own, averaged by ring every 1 step" in printed
    found = {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ways}
    for name in ("each", "parts"):
        for key, tensor in found["plain"].items():
            torch.testing.assert_close(found[name][key], tensor)
    assert any(not torch.equal(found["plain"][key], each) for key, each in found["seldom"].items())
    rows = {name: read_last(tmp_path / "runs" / name) for name in ways}
    size = 4 * sum(each.numel() for each in found["plain"].values())
    for name in ("plain", "each"):
        # A ring of two ranks sends half of the weights twice.
        assert rows[name]["sent_bytes"] == pytest.approx([STEPS * size] * RANKS, rel=0.01), name
    # After steps 8 and 12 of the second epoch.
    assert rows["seldom"]["sent_bytes"] == [2 * size] * RANKS
    assert rows["seldom"]["stages"]["communication"] > 0


def train_alone() -> tuple[nn.Module, list[torch.Tensor]]:
    """What ranks are to do, in one process: the model, and the moving average of its weights."""
    data = load(TOY)
    features, labels = torch.from_numpy(data.train.features), torch.from_numpy(data.train.labels)
    features[BAD] = torch.nan
    cuts = [Cut(TOY.batch_size, rank, RANKS) for rank in range(RANKS)]
    shares = [make_training_batches(Samples(data.train), cut) for cut in cuts]
    models = []
    for _ in cuts:
        torch.manual_seed(TOY.seed)
        models.append(broken_data.build(data.shape, data.classes))
    optimizers = [make_optimizer(TOY, list(each.parameters())) for each in models]
    rate = make_learning_rate(TOY, STEPS, RANKS * TOY.batch_size)
    averages = [each.detach().clone() for each in models[0].parameters()]
    last = 0
    for step in range(2 * STEPS):
        for model, optimizer, share in zip(models, optimizers, shares, strict=True):
            taken = step % STEPS * share.cut.step_samples
            batch = share.find_samples(1 + step // STEPS, taken)
            before = [each.clone() for each in model.buffers()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features[batch]), labels[batch]).backward()
            optimizer.param_groups[0]["lr"] = rate(step)
            if not set(batch) & set(BAD):
                optimizer.step()
            else:
                for buffer, each in zip(model.buffers(), before, strict=True):
                    buffer.copy_(each)
        if (step + 1) % EVERY == 0 or (step + 1) % STEPS == 0:
            with torch.no_grad():
                tensors = [[*each.parameters(), *each.buffers()] for each in models]
                for group in zip(*tensors, strict=True):
                    if group[0].is_floating_point():
                        mean = torch.stack(group).mean(dim=0)
                        for tensor in group:
                            tensor.copy_(mean)
                kept = min(0.9, (1 + step) / (10 + step)) ** (step + 1 - last)
                for average, tensor in zip(averages, models[0].parameters(), strict=True):
                    average.lerp_(tensor, 1 - kept)
            last = step + 1
    return models[0], averages


@pytest.mark.mpi
def test_momentum_and_bad_losses_are_a_ranks_own_and_running_averages_are_averaged(pool, tmp_path):
    words = [*WORDS, "--model", "broken_data:build", "--on-nan", "skip", "--ema", "0.9"]
    words += ["--average-every", str(EVERY), "--name", "skip", "--export", "skip.pt"]
    called = pool("openmpi", RANKS).call(broken_data.run, "nan", BAD, *words, cwd=tmp_path)
    model, averages = train_alone()
    for _, weights in called.values:
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), tensor.detach())
    exported = torch.load(tmp_path / "skip.pt", weights_only=True)
    for (name, _), average in zip(model.named_parameters(), averages, strict=True):
        torch.testing.assert_close(exported[name], average)


# 6 steps of 3 ranks in an epoch.
CUT = (
    "--data", "toy", "--samples", "160", "--epochs", "2", "--batch-size", "8", "--ema", "0.9",
    "--save-every", "1step", "--model", "trainings:build_normalised",
)  # fmt: skip
LOCAL = ("--average-every", "4", "--sync", "ring")


@pytest.mark.mpi
def test_within_a_period_others_begin_from_the_average(pool: Pools, tmp_path: Path) -> None:
    three = pool("openmpi", 3)
    for name in ("two", "gradients"):
        three.call(interrupted.run, [*CUT, *LOCAL, "--name", name], [5], False, cwd=tmp_path)
    held = interrupted.read_last(tmp_path / "runs" / "two")
    mean, own = held["model.0.weight"], [held[f"rank-{rank}.local.weights.0"] for rank in range(3)]
    assert not torch.equal(own[0], own[1])
    torch.testing.assert_close(mean, torch.stack(own).mean(dim=0))
    assert not torch.equal(
        *(held[f"rank-{rank}.optimizer.state.0.weight.momentum_buffer"] for rank in range(2))
    )
    # The trainer compares the ranks' weights at the end.
    for ranks, words in ((2, [*LOCAL, "--name", "two"]), (3, ["--name", "gradients"])):
        called = pool("openmpi", ranks).call(interrupted.run, [*CUT, *words], [], cwd=tmp_path)
        begun = {next(each for each in found if isinstance(each, str)) for found in called.values}
        assert len(begun) == 1
        assert "Training done" in called.printed


@pytest.mark.mpi
def test_a_loop_that_was_left_within_a_period_exports_the_average_and_goes_on_exactly(
    pool: Pools, tmp_path: Path
) -> None:
    three, words = pool("openmpi", 3), [*CUT[:8], *CUT[10:], *LOCAL]
    three.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    cut = [*words, "--name", "cut", "--export", "cut.pt"]
    three.call(preempted.leave, cut, 5, cwd=tmp_path)
    exported = torch.load(tmp_path / "cut.pt", weights_only=True)
    held = interrupted.read_last(tmp_path / "runs" / "cut")
    assert torch.equal(exported["0.weight"], held["model.0.weight"])
    assert "rank-1.local.weights.0" in held
    rest = [*words, "--name", "rest", "--resume", "runs/cut/checkpoints/step-5"]
    three.call(interrupted.run, rest, [], cwd=tmp_path)
    ends = [read_last(tmp_path / "runs" / name)["parameters"] for name in ("whole", "rest")]
    assert ends[0] == ends[1]
