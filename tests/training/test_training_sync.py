"""Training with ``--sync`` and ``--average-every``: what plain DDP learns, and how is told."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import broken_data
import interrupted
import preempted
import trainings
from mpiddp.training.options.config import Configuration, read_toml
from pool import Pool, Pools

POINTS, NARROW_POINTS = 0.003, 0.01
"""Of accuracy, by which a synchronous run may be worse than the framework's, and one that rounds
its gradients to 8 bits."""
PAIR = ("--nodelist=node[1-2]", "--nodes=2")
SERVED = ("--sync", "parameter-server")
SMALL = ("--data", "toy", "--samples", "200", "--epochs", "2")
EPOCHS = 6  # Twelve runs with stale gradients, beside other work, came to 98.3 % and more.


def train(pool: Pool, folder: Path, name: str, *options: str) -> tuple[str, Path]:
    """A run in ``folder``; what it prints, and its directory."""
    called = pool.call(trainings.run, ["--name", name, *options], timeout=120, cwd=folder)
    return called.printed, folder / "runs" / name


def train_each(
    pool: Pool, folder: Path, ways: dict[str, Sequence[str]]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """A run for each of ``ways``; what they print, and each run's last row of metrics."""
    lines = [["--name", name, *options] for name, options in ways.items()]
    called = pool.call(trainings.run, *lines, timeout=120, cwd=folder)
    return called.printed, {name: read_last(folder / "runs" / name) for name in ways}


def read_last(run: Path) -> dict[str, Any]:
    return trainings.read_rows(run)[-1]


def test_synchronous_ways_reach_the_frameworks_accuracy(pool, tmp_path):
    # The digits of the test split are 359: one of them is a quarter of a point.
    ways = {
        "plain": (),
        "narrow": ("--sync", "ring", "--transport", "mpi", "--wire-dtype", "bfloat16"),
        "served": (*SERVED, "--servers", "2"),
    }
    ways = {name: ("--epochs", str(EPOCHS), *options) for name, options in ways.items()}
    _, rows = train_each(pool("openmpi", 2), tmp_path, ways)
    accuracy = {name: row["test_accuracy"] for name, row in rows.items()}
    assert accuracy["plain"] > 0.97
    assert accuracy["narrow"] >= accuracy["plain"] - NARROW_POINTS
    assert accuracy["served"] >= accuracy["plain"] - POINTS
    assert set(rows["served"]["staleness"]) == {"0"}


def test_stale_gradients_train_as_well_and_their_staleness_is_told(pool, tmp_path):
    options = ["--staleness", "2", "--server-placement", "dedicated", "--straggler", "0=2"]
    options += ["--epochs", str(EPOCHS)]
    printed, run = train(pool("openmpi", 3), tmp_path, "stale", *SERVED, *options)
    row = read_last(run)
    assert row["test_accuracy"] > 0.96
    counts = {int(late): times for late, times in row["staleness"].items()}
    # Two workers have 1,438 samples, and each takes 16 of its own half in a step.
    assert sum(counts.values()) == EPOCHS * 2 * 45
    mean = sum(late * times for late, times in counts.items()) / sum(counts.values())
    assert f"Staleness, in updates: mean {mean:.2f}, at most {max(counts)} (" in printed
    assert max(counts) <= 5


def test_only_workers_are_counted_where_servers_are_dedicated(pool, tmp_path):
    options = (*SMALL, *SERVED, "--server-placement=dedicated")
    printed, run = train(pool("openmpi", 3), tmp_path, "dedicated", *options)
    assert "16 samples per worker x 2 workers = 32 samples per step" in printed
    assert "Weights: 1 dedicated parameter server, 2 workers in step" in printed
    # 160 samples, half of them for each worker.
    assert read_last(run)["step"] == 2 * 5
    # Two ranks that average their gradients come to the same.
    _, plain = train(pool("openmpi", 2), tmp_path, "plain", *SMALL)
    for name in ("loss", "test_loss", "learning_rate"):
        assert read_last(run)[name] == pytest.approx(read_last(plain)[name], rel=1e-5)


def test_an_algorithm_that_is_no_all_reduce_is_refused_before_the_first_step(pool, tmp_path):
    called = pool("openmpi", 3).call(
        trainings.refuse_wrong, *SMALL, "--sync", "double", cwd=tmp_path
    )
    said = "double on 3 ranks is no all-reduce: step 1: the contribution of rank 1 is added twice"
    assert called.values == [f"1: {said}"] * 3
    assert not (tmp_path / "runs").exists()


def test_the_choice_of_overlap_is_measured_told_and_used_again(pool, tmp_path):
    printed, run = train(pool("openmpi", 2), tmp_path, "measured", *SMALL, "--sync", "direct")
    (line,) = [line for line in printed.splitlines() if line.startswith("Gradients: ")]
    found = re.fullmatch(
        r"Gradients: direct over transport auto (during|after) the backward pass of their bucket "
        r"\(([0-9.]+) ms with overlap, ([0-9.]+) without"
        r"(: overlap is chosen if it saves more than 5%, since less may be noise)?\)",
        line,
    )
    assert found
    during = found[1] == "during"
    saved = 1 - float(found[2]) / float(found[3])
    assert (found[4] is not None) == (not during and saved > 0) or abs(saved) < 0.015
    # 5 %, but the times are told in hundredths of a millisecond.
    assert saved > 0.035 if during else saved < 0.065
    settings = read_toml(run / "config.toml")
    assert settings["overlap"] == ("on" if during else "off")
    # That choice, and the other one, lead to the same bits.
    ways = {way: (*SMALL, "--sync", "direct", "--overlap", way) for way in ("on", "off")}
    printed, rows = train_each(pool("openmpi", 2), tmp_path, ways)
    assert "ms with overlap" not in printed
    for row in rows.values():
        assert row["parameters"] == read_last(run)["parameters"]


def test_running_averages_are_the_same_on_all_ranks(pool, tmp_path):
    # The trainer refuses parameters and buffers that differ between ranks.
    words = (*SMALL, "--model", "trainings:build_normalised", "--sync")
    ways = {sync: (*words, sync) for sync in ("framework", "ring")}
    train_each(pool("openmpi", 2), tmp_path, ways)


@pytest.mark.gpu
def test_gradients_of_a_gpu_are_served_through_pinned_memory(pool, tmp_path):
    if not torch.cuda.device_count():
        pytest.skip("no GPU")
    _, plain = train(pool("openmpi", 1), tmp_path, "plain", *SMALL)
    printed, run = train(pool("openmpi", 1), tmp_path, "served", *SMALL, *SERVED)
    assert "Starting distributed training on 1 GPU" in printed
    assert read_last(run)["test_loss"] == pytest.approx(read_last(plain)["test_loss"], rel=1e-4)


@pytest.mark.long
def test_gradients_become_one_between_nodes(slurm_cluster, cluster_pool, tmp_path):
    launcher = slurm_cluster.srun(*PAIR, "--distribution=plane=3", "--exclusive")
    ways = {
        "plain": (), "schedule": ("--sync", "auto"), "central": SERVED,
        "sharded": (*SERVED, "--servers", "3"),
        "fsdp": ("--parallel", "fsdp", "--wrap-parameters", "100"),
        "unbounded": (*SERVED, "--servers", "2", "--staleness", "unlimited"),
    }  # fmt: skip
    small = {name: (*SMALL, *options) for name, options in ways.items()}
    _, rows = train_each(cluster_pool(launcher, 4), tmp_path, small)
    losses = {name: row["test_loss"] for name, row in rows.items()}
    for name in ("schedule", "central", "sharded", "fsdp"):
        assert losses[name] == pytest.approx(losses["plain"], rel=1e-4), losses
    assert losses["unbounded"] == pytest.approx(losses["plain"], rel=0.3), losses
    words = [*SMALL, "--parallel", "fsdp", "--shard-within", "node"]
    for said in cluster_pool(launcher, 4).call(trainings.refuse, *words, cwd=tmp_path).values:
        assert "equally many ranks on each node, found 3, 1: use --shard-within world" in said


RANKS, EVERY, BAD = 2, 3, [17, 60]
OWN = Configuration(data="toy", samples=210, epochs=2, average_every=EVERY, ema=0.9).resolve()
WORDS = ("--data", "toy", "--samples", "210", "--epochs", "2")
# 168 samples for training: 6 steps of two ranks in an epoch, and the last one has 4 for each.
STEPS = 6


def test_averages_after_each_plain_step_are_averages_of_gradients(pool, tmp_path):
    words = (*WORDS, "--momentum", "0", "--last-batch", "weighted", "--ema", "0.9")
    ways = {
        "plain": (), "each": ("--average-every", "1", "--sync", "ring"),
        "parts": ("--average-every", "1", "--accumulation-steps", "2"),
        "seldom": ("--average-every", "4"),
    }  # fmt: skip
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


def test_momentum_and_bad_losses_are_a_ranks_own_and_running_averages_are_averaged(pool, tmp_path):
    words = [*WORDS, "--model", "broken_data:build", "--on-nan", "skip", "--ema", "0.9"]
    words += ["--average-every", str(EVERY), "--name", "skip", "--export", "skip.pt"]
    called = pool("openmpi", RANKS).call(broken_data.run, "nan", BAD, *words, cwd=tmp_path)
    model, averages, _ = broken_data.train_alone(OWN, "nan", BAD)
    for _, weights in called.values:
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), tensor.detach())
    exported = torch.load(tmp_path / "skip.pt", weights_only=True)
    for (name, _), average in zip(model.named_parameters(), averages, strict=True):
        torch.testing.assert_close(exported[name], average)


# 6 steps of 3 ranks in an epoch.
CUT = (
    "--data", "toy", "--samples", "160", "--epochs", "2", "--batch-size", "8",
    "--save-every", "1step", "--model", "trainings:build_normalised",
)  # fmt: skip
LOCAL = ("--average-every", "4", "--sync", "ring")


def test_within_a_period_others_begin_from_the_average(pool: Pools, tmp_path: Path) -> None:
    three, common = pool("openmpi", 3), [*CUT, "--ema", "0.9"]
    for name in ("two", "gradients"):
        three.call(interrupted.run, [*common, *LOCAL, "--name", name], [5], False, cwd=tmp_path)
    held = interrupted.read_last(tmp_path / "runs" / "two")
    mean, own = held["model.0.weight"], [held[f"rank-{rank}.local.weights.0"] for rank in range(3)]
    assert not torch.equal(own[0], own[1])
    torch.testing.assert_close(mean, torch.stack(own).mean(dim=0))
    assert not torch.equal(
        *(held[f"rank-{rank}.optimizer.state.0.weight.momentum_buffer"] for rank in range(2))
    )
    # The trainer compares the ranks' weights at the end.
    for ranks, words in ((2, [*LOCAL, "--name", "two"]), (3, ["--name", "gradients"])):
        called = pool("openmpi", ranks).call(interrupted.run, [*common, *words], [], cwd=tmp_path)
        begun = {next(each for each in found if isinstance(each, str)) for found in called.values}
        assert len(begun) == 1
        assert "Training done" in called.printed


def test_a_loop_that_was_left_within_a_period_exports_the_average_and_goes_on_exactly(
    pool: Pools, tmp_path: Path
) -> None:
    three, words = pool("openmpi", 3), [*CUT, *LOCAL]
    three.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    cut = [*words, "--name", "cut", "--export", "cut.pt"]
    assert len(set(three.call(preempted.leave, cut, 5, cwd=tmp_path).values)) == 1
    exported = torch.load(tmp_path / "cut.pt", weights_only=True)
    held = interrupted.read_last(tmp_path / "runs" / "cut")
    assert torch.equal(exported["0.weight"], held["model.0.weight"])
    assert "rank-1.local.weights.0" in held
    rest = [*words, "--name", "rest", "--resume", "runs/cut/checkpoints/step-5"]
    three.call(interrupted.run, rest, [], cwd=tmp_path)
    whole, rest = (read_last(tmp_path / "runs" / name) for name in ("whole", "rest"))
    assert whole["parameters"] == rest["parameters"]
