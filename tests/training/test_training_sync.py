"""Training with ``--sync``: it learns what plain DDP learns, and says how it did so."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import broken_data
import interrupted
import preempted
import trainings
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.config import Configuration, from_keywords, read_toml
from mpiddp.training.wrapping import batch_size
from mpiddp.training.wrapping.batch_size import StepTrial, find_size
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


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
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


@pytest.mark.mpi
def test_an_algorithm_that_is_no_all_reduce_is_refused_before_the_first_step(pool, tmp_path):
    called = pool("openmpi", 3).call(
        trainings.refuse_wrong, *SMALL, "--sync", "double", cwd=tmp_path
    )
    said = "double on 3 ranks is no all-reduce: step 1: the contribution of rank 1 is added twice"
    assert called.values == [f"1: {said}"] * 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.mpi
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


@pytest.mark.mpi
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
@pytest.mark.slurm
def test_gradients_become_one_between_nodes(slurm_cluster, cluster_pool, tmp_path):
    launcher = slurm_cluster.srun(*PAIR, "--distribution=plane=3", "--exclusive")
    ways = {
        "plain": (),
        "schedule": ("--sync", "auto"),
        "central": SERVED,
        "sharded": (*SERVED, "--servers", "3"),
        "fsdp": ("--parallel", "fsdp", "--wrap-parameters", "100"),
        "unbounded": (*SERVED, "--servers", "2", "--staleness", "unlimited"),
    }
    small = {name: (*SMALL, *options) for name, options in ways.items()}
    _, rows = train_each(cluster_pool(launcher, 4), tmp_path, small)
    losses = {name: row["test_loss"] for name, row in rows.items()}
    for name in ("schedule", "central", "sharded", "fsdp"):
        assert losses[name] == pytest.approx(losses["plain"], rel=1e-4), losses
    assert losses["unbounded"] == pytest.approx(losses["plain"], rel=0.3), losses
    words = [*SMALL, "--parallel", "fsdp", "--shard-within", "node"]
    for said in cluster_pool(launcher, 4).call(trainings.refuse, *words, cwd=tmp_path).values:
        assert "equally many ranks on each node, found 3, 1: use --shard-within world" in said


# ---- --batch-size auto ------------------------------------------------------------------------


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


@pytest.mark.mpi
def test_ranks_agree_on_the_smaller_limit_and_nothing_else_changes(pool, tmp_path):
    two, run = pool("openmpi", 2), tmp_path / "runs" / "found"
    words = (*LIMITED, "--base-batch", "32", "--save-every", "1epoch")
    found = two.call(
        trainings.run_limited, [60, 45], [*words, "--name", "found"], cwd=tmp_path
    ).printed
    # 32 fit and 64 do not; 48 do not, 40 and 44 do.
    size = read_toml(run / "config.toml")["batch_size"]
    assert 40 <= size <= 45
    line = (
        f"Batch size: {size} samples per rank, found by trial; more do not fit, on rank 1: no mem"
    )
    assert line in found
    assert f"0.05 x {2 * size} samples per step / base batch 32 = " in found
    given = [*words, "--name", "given", "--batch-size", str(size)]
    assert "Batch size:" not in two.call(trainings.run, given, cwd=tmp_path).printed
    names = ("parameters", "loss", "test_loss", "learning_rate")
    rows = [read_last(each) for each in (run, tmp_path / "runs" / "given")]
    assert [rows[0][name] for name in names] == [rows[1][name] for name in names]
    # Whoever goes on takes the number, whatever fits now, and looks for none.
    more = [*words, "--name", "more", "--resume", "runs/found/checkpoints/step-4", "--epochs", "3"]
    assert "Batch size:" not in two.call(trainings.run_limited, [9, 9], more, cwd=tmp_path).printed
    assert read_toml(tmp_path / "runs" / "more" / "config.toml")["batch_size"] == size


@pytest.mark.mpi
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
    trial = StepTrial(from_keywords({"batch_size": "auto"}), session, compute, optimizer, few)
    assert trial.foresee(32) == "" and not asked
    # What was freed before, and would be used again, is measured as well.
    for _ in range(2):
        *freed, kept = (torch.ones(1_000_000) for _ in range(100))
        del freed
    assert trial.explain(32) == "" and kept is not None
    assert trial.foresee(64) == "" and trial.foresee(1024) == "the machine has less"
    # The hidden layer and its gradient are 4 bytes for each of its numbers and samples.
    assert 32 * numbers * 4 < asked[0] / 2 < 32 * numbers * 4 * 8
    assert asked[1] == pytest.approx(16 * asked[0], rel=0.01)
    assert all(each.grad is None for each in model.parameters())


# ---- --average-every ---------------------------------------------------------------------------


RANKS, EVERY, BAD = 2, 3, [17, 60]
LOCAL_OPTIONS = Configuration(
    data="toy", samples=210, epochs=2, average_every=EVERY, ema=0.9
).resolve()
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


@pytest.mark.mpi
def test_momentum_and_bad_losses_are_a_ranks_own_and_running_averages_are_averaged(pool, tmp_path):
    words = [*WORDS, "--model", "broken_data:build", "--on-nan", "skip", "--ema", "0.9"]
    words += ["--average-every", str(EVERY), "--name", "skip", "--export", "skip.pt"]
    called = pool("openmpi", RANKS).call(broken_data.run, "nan", BAD, *words, cwd=tmp_path)
    model, averages, _ = broken_data.train_alone(LOCAL_OPTIONS, "nan", BAD)
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
