"""How ranks share a model, and how a step is computed: each option's effect in real trainings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp_memory
import kinds
import observed
import trainings
from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.training.options.config import Configuration
from mpiddp.training.wrapping import engine, overlap
from mpiddp.training.wrapping.fsdp import shard
from mpiddp.training.wrapping.parameters import check_parameters
from observed import Observation
from pool import Pools

# 160 samples for training: 5 steps of two ranks in an epoch, 10 in all. Two linear layers.
TOY = ("--data", "toy", "--samples", "200", "--epochs", "2", "--save-every", "never")
STEPS, REHEARSED, LAYERS = 10, 3, 2


def train_each(
    pools: Pools, folder: Path, ways: dict[str, tuple[str, ...]], ranks: int = 2
) -> tuple[dict[str, Observation], dict[str, dict[str, torch.Tensor]], str]:
    """What rank 0 saw in each training, the exported weights, and what was printed."""
    lines = [[*options, "--name", name, "--export", f"{name}.pt"] for name, options in ways.items()]
    called = pools("openmpi", ranks).call(observed.observe, *lines, timeout=120, cwd=folder)
    seen = dict(zip(ways, called.values[0], strict=True))
    weights = {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in ways}
    return seen, weights, called.printed


def find_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_options_of_a_step_have_their_effect(pool: Pools, tmp_path: Path) -> None:
    ways: dict[str, tuple[str, ...]] = {
        "plain": TOY, "parts": (*TOY, "--accumulation-steps", "4"),
        "scheduled": (*TOY, "--accumulation-steps", "4", "--sync", "direct", "--overlap", "off"),
        "cut": (*TOY, "--sync", "direct", "--overlap", "off", "--bucket-mb", "0.0005"),
        "served": (*TOY, "--accumulation-steps", "4", "--sync", "parameter-server"),
        "narrow": (*TOY, "--precision", "bf16"), "clipped": (*TOY, "--clip-norm", "0.01"),
        "averaged": (*TOY, "--ema", "0.99"),
        "scaled": (*TOY, "--base-batch", "64", "--learning-rate", "0.1"),
        "stepped": (*TOY, "--schedule", "step", "--step-epochs", "0.5", "--step-factor", "0"),
    }  # fmt: skip
    seen, weights, printed = train_each(pool, tmp_path, ways)
    plain = seen["plain"]
    rehearsed = REHEARSED * LAYERS
    assert plain.layers == STEPS * LAYERS + rehearsed
    assert (plain.types, plain.samples) == ({torch.float32}, {16})
    for name in ("parts", "scheduled", "served"):
        assert 0 < find_difference(weights["plain"], weights[name]) < 1e-6, name
        assert seen[name].samples == {4}
        assert seen[name].row["loss"] == pytest.approx(plain.row["loss"], rel=1e-5)
        warm = 0 if name == "served" else rehearsed
        assert seen[name].layers == 4 * STEPS * LAYERS + warm
    # Ranks exchange the small model's one bucket once in a step, not in each pass.
    assert seen["scheduled"].buckets == STEPS + REHEARSED
    # DDP makes them after the first pass.
    assert seen["cut"].buckets == 1 + 2 * (STEPS + REHEARSED - 1)
    assert find_difference(weights["plain"], weights["cut"]) < 1e-6
    assert seen["narrow"].types == {torch.bfloat16}
    assert 0 < find_difference(weights["plain"], weights["narrow"]) < 0.05
    # What is cut to a hundredth moves the weights less.
    moved = [seen[name].row["loss"] for name in ("plain", "clipped")]
    assert moved[1] > moved[0] + 0.05
    assert seen["averaged"].row["parameters"] == plain.row["parameters"]
    assert seen["averaged"].row["test_loss"] != plain.row["test_loss"]
    assert find_difference(weights["plain"], weights["averaged"]) > 1e-3
    assert "0.1 x 32 samples per step / base batch 64 = 0.05 at its peak" in printed
    assert seen["scaled"].row["parameters"] == plain.row["parameters"]
    # A rate of 0 from the third step on.
    assert seen["stepped"].row["learning_rate"] == 0
    assert seen["stepped"].row["test_loss"] > plain.row["test_loss"] + 0.05
    assert plain.row["learning_rate"] < 0.01


SHARDED = ("--parallel", "fsdp", "--wrap-parameters", "100")
IMAGES = (
    "--data", "synthetic", "--samples", "60", "--epochs", "1", "--batch-size", "8",
    "--save-every", "never",
)  # fmt: skip


def test_fsdp_does_what_ddp_does(pool: Pools, tmp_path: Path) -> None:
    more: dict[str, tuple[str, ...]] = {
        "plain": (), "adamw": ("--optimizer", "adamw", "--accumulation-steps", "4"),
        "clipped": ("--clip-norm", "0.1"), "averaged": ("--ema", "0.9", "--on-nan", "skip"),
        "narrow": ("--precision", "bf16"),
    }  # fmt: skip
    ways = {name: (*TOY, *options) for name, options in more.items()}
    ways |= {f"sharded-{name}": (*options, *SHARDED) for name, options in ways.items()}
    seen, weights, printed = train_each(pool, tmp_path, ways)
    for name in more:
        one, other = seen[name], seen[f"sharded-{name}"]
        bound = 1e-3 if name == "narrow" else 1e-6
        assert find_difference(weights[name], weights[f"sharded-{name}"]) < bound, name
        assert other.row["test_loss"] == pytest.approx(one.row["test_loss"], rel=bound)
        assert (other.types, other.samples) == (one.types, one.samples)
        # The row is one of two epochs.
        assert [2 * each for each in other.row["sent_bytes"]] == 2 * [other.sent] != [0, 0]
        # No passes before the first step.
        assert other.layers == one.layers - REHEARSED * LAYERS
    line = "Parameters: 652 sharded over 2 ranks, in 2 groups of up to 550"
    assert printed.count(line) == len(more)


def test_fsdp_evaluates_where_ranks_have_different_numbers_of_samples(pool, tmp_path):
    few = ("--data", "toy", "--samples", "10", "--batch-size", "2", "--epochs", "1")
    ways = {"plain": few, "sharded": (*few, *SHARDED)}
    seen, weights, _ = train_each(pool, tmp_path, ways, ranks=3)
    assert find_difference(weights["plain"], weights["sharded"]) < 1e-6
    # Of the mlp's 50 x 10, 50, 2 x 50 and 2 numbers a rank has 17 x 10, 17, 1 x 50 and 1. In each
    # of two steps it sends them to two ranks: for both passes, and as gradients.
    sent = 2 * 3 * 2 * 4 * (170 + 17 + 50 + 1)
    assert seen["sharded"].row["sent_bytes"] == [sent] * 3
    assert seen["sharded"].sent == sent
    # Two test samples for three ranks: each is counted once.
    for name in ("test_loss", "test_metrics"):
        assert seen["sharded"].row[name] == pytest.approx(seen["plain"].row[name], rel=1e-5)


def test_each_node_may_have_a_whole_copy(pool: Pools, tmp_path: Path) -> None:
    lines = [
        [*TOY, "--name", "plain", "--export", "plain.pt"],
        [*TOY, *SHARDED, "--shard-within", "node", "--name", "hybrid", "--export", "hybrid.pt"],
    ]
    four = pool("openmpi", 4)
    called = four.call(observed.observe_on_nodes, 2, *lines, timeout=120, cwd=tmp_path)
    for found in called.values:
        # The row is one of two epochs.
        assert [2 * each for each in found[1].row["sent_bytes"]] == 4 * [found[1].sent] != [0] * 4
    weights = [
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("plain", "hybrid")
    ]
    assert find_difference(*weights) < 1e-6
    assert "652 sharded over 2 ranks, a copy on each of 2 nodes, in 2 groups" in called.printed


def test_a_rank_has_its_part_and_three_groups_in_memory(pool: Pools) -> None:
    for found in pool("openmpi", 2).call(fsdp_memory.measure, "fsdp").values:
        assert found.total / 2 < found.peak < 1.1 * (found.total / 2 + 3 * found.largest)


def test_how_a_model_is_computed_leaves_the_result(pool: Pools, tmp_path: Path) -> None:
    small = ("--wrap-parameters", "100")
    ways: dict[str, tuple[str, ...]] = {
        "plain": TOY, "again": (*TOY, "--activation-checkpointing", *small),
        "sharded-again": (*TOY, "--activation-checkpointing", *SHARDED),
        "deterministic": (*TOY, "--deterministic"), "searched": (*TOY, "--batch-size", "auto"),
        "searched-again": (*TOY, "--batch-size", "auto", "--activation-checkpointing", *small),
        "images": IMAGES, "last": (*IMAGES, "--channels-last"),
    }  # fmt: skip
    seen, weights, _ = train_each(pool, tmp_path, ways)
    for name in ("again", "deterministic"):
        assert find_difference(weights["plain"], weights[name]) == 0, name
    assert find_difference(weights["plain"], weights["sharded-again"]) < 1e-6
    # Each of the two layers is computed once more in every step.
    done = seen["plain"].predictions + seen["plain"].layers
    assert seen["plain"].computed == done
    assert seen["again"].computed == done + STEPS * LAYERS + REHEARSED * LAYERS
    assert seen["sharded-again"].computed == 2 * STEPS * LAYERS + seen["plain"].predictions
    # Also where a batch size is looked for.
    predictions, computed = seen["searched"].predictions, seen["searched"].computed
    assert seen["searched-again"].computed == 2 * (computed - predictions) + predictions
    assert not seen["plain"].is_deterministic
    assert seen["deterministic"].is_deterministic
    assert not seen["images"].channels_last
    assert seen["last"].channels_last
    assert find_difference(weights["images"], weights["last"]) < 1e-5


@pytest.mark.long
def test_a_compiled_model_trains_alike(pool: Pools, tmp_path: Path) -> None:
    lines = [
        [*TOY, "--name", name, "--export", f"{name}.pt", *options]
        for name, options in {
            "plain": (),
            "compiled": ("--compile",),
            "sharded": ("--compile", *SHARDED),
        }.items()
    ]
    pool("openmpi", 2).call(observed.observe_compiled, *lines, timeout=300, cwd=tmp_path)
    plain, *others = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True)
        for name in ("plain", "compiled", "sharded")
    )
    for found in others:
        assert found.keys() == plain.keys()
        assert find_difference(plain, found) < 1e-5


SERVED = ("--sync", "parameter-server")
DEDICATED = (*SERVED, "--server-placement=dedicated")
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "fp16": (("--precision", "fp16"), "precision: fp16 needs GPUs, found CPUs"),
    "none": (("--parallel", "none"), "parallel: none is for one rank, found 2: start one, or use"),
    "dp": (("--parallel", "dp"), "parallel: dp is for one rank, found 2"),
    "offload": (("--parallel", "fsdp", "--cpu-offload"), "cpu_offload: expected GPUs"),
    "groups": (("--activation-checkpointing",), "activation_checkpointing: expected modules with"),
    "images": (("--channels-last",), "channels_last: expected images"),
    "model": (("--model", "convnet"), "model: convnet expects images"),
    "batch": (("--batch-size", "161"), "batch_size: expected at most 80"),
    "ranks": (("--samples", "2"), "expected at least one training sample per rank, found 1"),
    "place": (("--runs-dir", "bad.toml"), "runs_dir: "),
    "roles": ((*SERVED, "--servers=3"), "3 servers need as many ranks, found 2: "),
    "workers": ((*DEDICATED, "--servers=2"), "2 dedicated servers leave no worker"),
    "straggler": (
        (*DEDICATED, "--straggler=1=3"),
        "straggler: rank 1 computes nothing; the workers are ranks 0",
    ),
    "central": (("--sync", "central"), "central leaves out the buffers of 1 of 2 ranks"),
    # 162 samples: two of them in the sixth step.
    "single": (
        ("--samples", "202", "--model", "trainings:build_normalised"),
        "last_batch: step 6 of each epoch, on some rank, has one sample, of which the model's",
    ),
    "state": (
        ("--save-every", "1epoch", "--model", "trainings:build_remembering"),
        "state model._extra_state: expected tensors",
    ),
    "pass": (
        ("--accumulation-steps", "16", "--model", "trainings:build_normalised"),
        "accumulation_steps: each forward pass has one sample",
    ),
}


def test_dp_takes_the_gpus_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.DataParallel", lambda module, device_ids: (module, device_ids))
    session: Any = SimpleNamespace(gpus=(2, 0))
    found: Any = engine._spread(nn.Flatten(), session)
    assert found[1] == (2, 0)


def test_fsdp_needs_gpus_of_their_own_on_all_ranks_or_none() -> None:
    session: Any = SimpleNamespace(device=torch.device("cuda"), backend="gloo")
    for others, message in ((False, "nccl or .* found gloo"), (True, "GPUs for all .* found both")):
        session.any = lambda mine, others=others: mine or others
        with pytest.raises(ConfigurationError, match=f"^parallel: fsdp expected {message}"):
            shard(nn.Linear(1, 1), session, Configuration(parallel="fsdp"))


def time_passes(session: Session, path: Path) -> None:
    """Measure the overlap with passes that write their numbers down."""
    numbers = iter(range(99))
    with path.open("ab", buffering=0) as file:
        overlap.measure(mock.Mock(), lambda: file.write(bytes([next(numbers)])), session.device)


def test_a_pass_is_timed_when_all_ranks_have_ended_the_one_before(pool, tmp_path):
    pool("openmpi", 2).call(time_passes, tmp_path / "passes")
    passes = list((tmp_path / "passes").read_bytes())
    assert passes == sorted(passes) and len(passes) == 2 * 2 * overlap.ROUNDS


def test_overlap_needs_an_mpi_that_threads_may_call():
    replica = SimpleNamespace(hook=SimpleNamespace(can_overlap=False))
    with pytest.raises(ConfigurationError, match="--overlap on: expected an MPI library with MPI"):
        overlap.settle(Configuration(overlap="on"), replica, None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_one_line(name: str, pool: Pools, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    (tmp_path / "bad.toml").write_text("epoch = 3\n")
    called: Any = pool("openmpi", 2).call(trainings.refuse, *TOY, *options, cwd=tmp_path)
    for said in called.values:
        assert said.startswith(f"2: {message}"), said
        assert "\n" not in said
    assert called.output == ""
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


def test_one_rank_needs_no_wrapper(pool: Pools, tmp_path: Path) -> None:
    ways = {"plain": TOY, "bare": (*TOY, "--parallel", "none", "--on-nan", "skip")}
    seen, weights, _ = train_each(pool, tmp_path, ways, ranks=1)
    assert find_difference(weights["plain"], weights["bare"]) == 0
    assert seen["bare"].layers == seen["plain"].layers - REHEARSED * LAYERS
    dp: Any = pool("openmpi", 1).call(trainings.refuse, *TOY, "--parallel", "dp", cwd=tmp_path)
    assert dp.values[0].startswith("2: parallel: dp is for one process with several GPUs, found 0")


def test_a_compiler_that_does_not_work_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nin any place")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigurationError) as raised:
        engine.compile_model(nn.Linear(1, 1), Configuration(compile=True))
    assert str(raised.value) == (
        "compile: torch.compile does not work here: RuntimeError: No working C++ compiler found: "
        "leave out --compile"
    )


FEW = ("--data", "toy", "--samples", "160", "--epochs", "1")
WAYS: dict[str, tuple[str, ...]] = {
    "framework": FEW, "schedule": (*FEW, "--sync", "ring"),
    "served": (*FEW, "--sync", "parameter-server"),
    "averaged": (*FEW, "--sync", "ring", "--average-every", "2"),
    "sharded": (*FEW, "--parallel", "fsdp"),
    "treated": (*FEW, "--optimizer=adamw", "--clip-norm=1", "--ema=0.9", "--on-nan=skip"),
    "searched": (*FEW, "--find-unused-parameters", "--batch-size", "auto"),
}  # fmt: skip
EQUAL = ("schedule", "served", "sharded")
"""Ways whose result is that of ``framework`` up to rounding."""
GOOD = ("dense", "integer", "frozen", "tied")
"""Kinds that are trained in every way."""
SPARSE = "cannot be combined with parameter odd.weight, which has sparse gradients: make its emb"
COMPLEX = "cannot be combined with parameter odd, which is complex: give --sync framework"
META = "cannot be combined with parameter odd.weight, which is on the device meta, without values"
TYPES = "which is of {} beside others of {}"
LATE = "in no nn.Embedding or nn.EmbeddingBag with sparse=True"
UNUSED = "found none of odd.weight, odd.bias: give --find-unused-parameters, or have the loss de"
REFUSED_KINDS: dict[str, dict[str, str]] = {
    "sparse": {"schedule": f"sync = 'ring' {SPARSE}", "sharded": f"parallel = 'fsdp' {SPARSE}"},
    "complex": {
        "served": f"sync = 'parameter-server' {COMPLEX}",
        "sharded": TYPES.format("torch.float32", "torch.complex64"),
    },
    "empty": {"sharded": "parameter odd, which has no elements: give --parallel ddp"},
    "mixed": {
        way: TYPES.format("torch.bfloat16", "torch.float32") for way in ("served", "sharded")
    },
    "unused": dict.fromkeys(("framework", "schedule", "treated"), UNUSED),
    # Only in some steps.
    "late": dict.fromkeys(("framework", "schedule", "treated"), UNUSED),
    "meta": dict.fromkeys(WAYS, META),
    "functional": dict.fromkeys(("framework", "schedule", "treated", "searched"), LATE),
}


@pytest.mark.parametrize("kind", [*GOOD, *REFUSED_KINDS])
def test_every_kind_is_trained_in_every_way_or_refused_in_one_line(kind, pool, tmp_path):
    # torch's FSDP knows of no sparse gradient, and says so itself.
    ways = {way: WAYS[way] for way in WAYS if (kind, way) != ("functional", "sharded")}
    rows = pool("openmpi", 2).call(kinds.train, kind, ways, cwd=tmp_path).values[0]
    for way, message in REFUSED_KINDS.get(kind, {}).items():
        said = rows.pop(way)
        assert isinstance(said, str), way
        assert said.startswith("2: ")
        assert message in said
        assert "\n" not in said
        assert kind == "late" or not (tmp_path / "runs" / way).exists()
    for row in rows.values():
        assert isinstance(row, dict), row
    if kind in ("sparse", "functional"):
        # What dense gradients come to.
        (tmp_path / "dense").mkdir()
        plain = {way: WAYS[way] for way in ("framework", "treated", "averaged")}
        dense = pool("openmpi", 2).call(kinds.train, "dense", plain, cwd=tmp_path / "dense")
        for way in plain.keys() & rows.keys():
            compare(rows[way], dense.values[0][way])
    for way in rows.keys() & set(EQUAL):
        if "framework" in rows:
            compare(rows[way], rows["framework"])


def compare(row: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("loss", "test_loss"):
        assert row[name] == pytest.approx(other[name], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "options", "backend", "message"),
    [
        ("complex", {"precision": "fp16"}, "gloo", "precision = 'fp16' cannot be combined with"),
        # An optimizer of one's own is given gradients as they are.
        ("sparse", {"clip_norm": 1.0, "optimizer": "a:b"}, "gloo", "clip_norm = 1.0 cannot be com"),
        ("sparse", {}, "nccl", "sync = 'framework' cannot be combined with parameter odd.weight"),
    ],
)
def test_what_torch_does_not_do_with_some_gradients_is_refused(kind, options, backend, message):
    with pytest.raises(ConfigurationError) as raised:
        check_parameters(kinds.Model(kind, 10, 2), Configuration(**options), backend)
    assert str(raised.value).startswith(message)


def test_fsdp_takes_several_types_in_separate_groups() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8).double())
    check_parameters(module, Configuration(parallel="fsdp", wrap_parameters=30), "gloo")
    with pytest.raises(ConfigurationError, match=r"1\.weight, which is of torch.float64"):
        check_parameters(module, Configuration(parallel="fsdp"), "gloo")
