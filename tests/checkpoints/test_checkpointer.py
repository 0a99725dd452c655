"""mpiddp.Checkpointer in a script of somebody's own."""

import contextlib
import errno
import hashlib
import os
import pickle
import socket
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import launchers
import mpiddp
import stale
from mistakes import hear
from mpiddp.checkpoints.storage import directory as directories
from mpiddp.checkpoints.storage import unpickling
from mpiddp.checkpoints.storage.manifest import list_checkpoints
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import list_stored
from mpiddp.errors import ConfigurationError
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.process.background import LastingCall
from pool import Pools
from saves import list_names


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Linear(12, 33), nn.BatchNorm1d(33), nn.Dropout(0.2), nn.ReLU(), nn.Linear(33, 7)
    )
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp":
        fully_shard(net)
    return net


def train(session: mpiddp.Session, folder: Path, kind: str, steps: int) -> dict[str, Any]:
    """Go on from the newest checkpoint in ``folder``, up to this step; the state then."""
    torch.set_num_threads(1)
    model = make_model(kind)
    torch.manual_seed(session.world.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)
    with mpiddp.Checkpointer(folder, model, optimizer, schedule=schedule) as checkpointer:
        state = checkpointer.restore() or {"step": 0, "losses": []}
        begun, losses = state["step"], state["losses"]
        for step in range(begun + 1, steps + 1):
            # The samples' numbers follow from the step; dropout draws from the generator.
            samples = torch.Generator().manual_seed(100 * step + session.world.rank)
            loss = model(torch.randn(6, 12, generator=samples)).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            checkpointer.save(step, losses=losses)
    return {
        "begun": begun, "losses": losses if session.world.rank == 0 else None,
        "rate": schedule.get_last_lr(), "random": torch.rand(3).tolist(),
        "state": digest(model, optimizer),
    }  # fmt: skip


def load(session: mpiddp.Session | None, folder: Path, kind: str) -> tuple[int, str]:
    """The step of the newest checkpoint, and a digest of its state, which other ranks wrote."""
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    drawn = torch.get_rng_state()
    with mpiddp.Checkpointer(folder, model, optimizer) as checkpointer:
        state = checkpointer.restore()
    assert state is not None and torch.equal(torch.get_rng_state(), drawn)
    return state["step"], digest(model, optimizer)


class Average:
    """An average of the weights, as scripts write it."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in self.weights.items():
            each.copy_(state["weights"][name])


class Loader:
    """What each rank has differently, beside something that all have alike."""

    def __init__(self, rank: int) -> None:
        self.state = {"place": 10 + rank, "seen": torch.full((3,), rank), "order": torch.arange(5)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def keep_more(session: mpiddp.Session, folder: Path, kind: str) -> dict[str, Any]:
    """Save and restore an average of the weights and a loader; what is stored, and what came."""
    rank, model = session.world.rank, make_model(kind)
    threads = len(os.listdir("/proc/self/task"))
    average, loader = Average(model), Loader(rank)
    with mpiddp.Checkpointer(folder, model, average=average, loader=loader) as checkpointer:
        checkpointer.save(1)
    expected = {name: local(each).clone() for name, each in average.weights.items()}
    for each in average.weights.values():
        each.zero_()
    loader = Loader(-1)
    with mpiddp.Checkpointer(folder, model, average=average, loader=loader) as checkpointer:
        checkpointer.restore()
    # A thread that has ended is listed for a moment longer.
    assert wait_until(lambda: len(os.listdir("/proc/self/task")) <= threads, 60)
    return {
        "names": sorted(list_stored(folder / "step-1")),
        "is_same": all(
            torch.equal(local(each), expected[name]) for name, each in average.weights.items()
        ),
        "state": repr(loader.state),
    }


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train_experts(session: mpiddp.Session, folder: Path, steps: int) -> list[torch.Tensor]:
    """The weights of two modules that differ between ranks; one has a second optimizer.

    The other one's parameters belong to the model's optimizer, too.
    """
    rank, model = session.world.rank, make_model("ddp")
    torch.manual_seed(rank)
    first, second = nn.Linear(12, 7), nn.Linear(12, 7)
    optimizer = torch.optim.AdamW([*model.parameters(), *first.parameters()], 0.01)
    more = {"first": first, "second": second, "other": torch.optim.AdamW(second.parameters(), 0.01)}
    with mpiddp.Checkpointer(folder, model, optimizer, **more) as checkpointer:
        begun = (checkpointer.restore() or {"step": 0})["step"]
        for step in range(begun + 1, steps + 1):
            samples = torch.Generator().manual_seed(100 * step + rank)
            inputs = torch.randn(6, 12, generator=samples)
            model.zero_grad()
            loss = (model(inputs) + first(inputs) * second(inputs)).square().mean()
            first.zero_grad()
            second.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            more["other"].step()
        if steps > begun:
            checkpointer.save(steps)
    return [each.detach().clone() for each in (*first.parameters(), *second.parameters())]


def make_mistakes(session: mpiddp.Session, folder: Path) -> list[str]:
    """What is said of ranks that save different steps, and of an optimizer in parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses something that it has deprecated.
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = make_model("ddp")
    checkpointer = mpiddp.Checkpointer(folder, model)
    checkpointer.save(5 + session.world.rank)
    parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    return [hear(checkpointer.close), hear(lambda: mpiddp.Checkpointer(folder, model, parts))]


def fail_to_plan(
    session: mpiddp.Session, folder: Path, step: str, rank: int, error: Exception
) -> str:
    """What a save says in which a step of planning fails on this rank."""
    own = session.world.rank
    # 1 KiB that all have, and 1 KiB in parts.
    tensors = {f"rank-{own}.x": torch.ones(256)}
    tensors |= fully_shard(nn.Linear(15, 16)).named_parameters()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(stale.make_directory(folder))
        directory.open()
        if own == rank:
            stack.enter_context(mock.patch.object(DefaultSavePlanner, step, side_effect=error))
        directory.start(1, tensors)
        return hear(directory.wait)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters, rank 0's buffers, and the optimizer's state. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].contiguous().view(-1).numpy().tobytes())
    for name, state in sorted(states.get("state", {}).items()):
        for key in sorted(state):
            found.update(f"{name} {key}".encode() + state[key].contiguous().numpy().tobytes())
    return found.hexdigest()


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, *words: Any) -> None:
        self.words = words

    def __reduce__(self) -> tuple[Any, ...]:
        return self.words[0], self.words[1:]


def exchange(session: mpiddp.Session, folder: Path) -> dict[str, Any]:
    """Each call of `RankGroup`: with plain values, and with one of rank 1, or 0, that runs code."""
    ranks = RankGroup()
    own: dict[str, Any] = {"rank": ranks.rank, "text": "é" * ranks.rank * 1000, "path": folder}
    found: dict[str, Any] = {
        "gather": [each["rank"] for each in ranks.gather(own)],
        "collect": [len(each["text"]) for each in ranks.collect(own)],
        "scatter": ranks.scatter(["a", None, (3, 4.5)]), "broadcast": ranks.broadcast(own)["rank"],
    }  # fmt: skip
    hostile = Call(os.mkdir, str(folder / f"made-by-{ranks.rank}"))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ranks.gather(hostile if ranks.rank == 1 else None),
        lambda: ranks.collect(hostile if ranks.rank == 1 else None),
        lambda: ranks.scatter([hostile] * ranks.size), lambda: ranks.broadcast(hostile),
    )  # fmt: skip
    found["refused"] = list(map(hear, calls))
    ranks.close()
    with contextlib.suppress(AttributeError):
        # A closed group of several ranks fails, and does not take its rank for the only one.
        found["late"] = ranks.gather(own)
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_resumed_script_ends_as_the_uninterrupted_one(kind, pool, tmp_path):
    ranks = pool("openmpi", 3)
    whole = ranks.call(train, tmp_path / "whole", kind, 6).values
    # After the first step, in between, and after the last.
    for begun, cut in ((0, 1), (1, 3), (3, 6)):
        found = ranks.call(train, tmp_path / "cut", kind, cut).values
        assert [each["begun"] for each in found] == [begun] * 3
    assert [{**each, "begun": 0} for each in found] == whole
    again = ranks.call(train, tmp_path / "cut", kind, 6).values
    assert [{**each, "begun": 0} for each in again] == whole
    names = [path.name for path in list_checkpoints(tmp_path / "cut")]
    assert names == ["step-6", "step-5"]


def test_another_number_of_ranks_loads_the_same(pool, tmp_path):
    written = pool("openmpi", 3).call(train, tmp_path, "fsdp", 3).values
    found = pool("openmpi", 2).call(load, tmp_path, "fsdp").values
    assert found[0] == (3, written[0]["state"])
    # This process is one as well, and needs no group.
    assert load(None, tmp_path, "alone") == (3, written[0]["state"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_all_have_is_stored_once_and_what_differs_by_rank(kind, pool, tmp_path):
    found = pool("openmpi", 3).call(keep_more, tmp_path, kind).values
    names = found[0]["names"]
    assert "average.weights.0.weight" in names or "average.weights.module.0.weight" in names
    assert not [name for name in names if name.startswith("rank-") and "average" in name]
    assert "loader.order" in names
    for rank, each in enumerate(found):
        assert f"rank-{rank}.loader.seen" in names
        assert each["is_same"]
        assert each["state"] == repr(Loader(rank).state)


def test_optimizers_of_modules_that_differ_by_rank_go_on_as_they_would_have(pool, tmp_path):
    ranks = pool("openmpi", 2)
    whole = ranks.call(train_experts, tmp_path / "whole", 5).values
    ranks.call(train_experts, tmp_path / "cut", 2)
    found = ranks.call(train_experts, tmp_path / "cut", 5).values
    for expected, each in zip(whole, found, strict=True):
        assert all(map(torch.equal, expected, each))


def test_all_ranks_hear_of_a_save_that_cannot_be_planned(pool: Pools, tmp_path: Path) -> None:
    ranks = pool("openmpi", 2)
    no_plan = ValueError("no such plan"), "ValueError: no such plan; the older"
    full = OSError(errno.ENOSPC, "No space left"), "No space left (2 KiB needed, "
    for step, rank, (error, text) in (
        ("create_global_plan", 0, no_plan),
        ("create_local_plan", 1, no_plan),
        ("finish_plan", 1, full),
    ):
        said = ranks.call(fail_to_plan, tmp_path, step, rank, error).values
        text = f"could not be written: rank {rank} on {socket.gethostname()}: {text}"
        assert said[0] == said[1] and text in said[0], said
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "owner.json"}


# Small collective calls over Gloo


def test_members_of_enumerations_are_found_and_nothing_else() -> None:
    # Early releases of Python 3.11 pickle them so.
    member = pickle.dumps(Call(getattr, WriteItemType, "SHARD"))
    assert unpickling.load(member) is WriteItemType.SHARD
    for arguments in ((WriteItemType, "mro"), (WriteItemType.SHARD, "name"), (Path, "mkdir")):
        with pytest.raises(unpickling.ForbiddenError):
            unpickling.load(pickle.dumps(Call(getattr, *arguments)))


def test_values_come_back_and_nothing_in_them_is_run(pool: Pools, tmp_path: Path) -> None:
    found = pool("openmpi", 3).call(exchange, tmp_path).values
    assert [each["gather"] for each in found] == [[0, 1, 2]] * 3
    assert [each["collect"] for each in found] == [[0, 1000, 2000], [], []]
    assert [each["scatter"] for each in found] == ["a", None, (3, 4.5)]
    assert [each["broadcast"] for each in found] == [0] * 3
    # What its own rank unpickles, too; rank 0 keeps what it broadcasts.
    said, none = "ForbiddenError: posix.mkdir", "nothing was said"
    refused = [[said, said, said, none], *[[said, none, said, said]] * 2]
    assert [each["refused"] for each in found] == refused
    assert not list(tmp_path.iterdir())
    assert not any("late" in each for each in found)


# Scripts


def test_mistakes_of_a_script_are_told_and_nothing_is_saved(pool: Pools, tmp_path: Path) -> None:
    for steps, optimizer in pool("openmpi", 2).call(make_mistakes, tmp_path).values:
        assert "expected one step on all ranks, found [5, 6]" in steps
        assert optimizer.startswith("optimizer: expected one with its whole state on each rank, ")
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "owner.json"}


def test_who_restores_and_counts_anew_does_not_replace_later_checkpoints(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with mpiddp.Checkpointer(tmp_path, model) as checkpointer:
        for step in (30, 40):
            checkpointer.save(step)
    with mpiddp.Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.restore()
        with pytest.raises(ConfigurationError, match=r"40 or more, .* found 10: c"):
            checkpointer.save(10)
        # A loop whose last save comes once more, and one that goes on.
        for step in (40, 50):
            checkpointer.save(step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-50", "step-40"]
    with mpiddp.Checkpointer(tmp_path, model) as checkpointer:
        # Who goes back on purpose says so.
        checkpointer.restore()
        checkpointer.restore(tmp_path / "step-40")
        checkpointer.save(41)
    with mpiddp.Checkpointer(tmp_path / "new", model) as checkpointer:
        # Of another training: its steps are not this one's.
        checkpointer.restore(tmp_path)
        checkpointer.save(0)


def test_a_save_that_is_waited_for_needs_no_copies(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    monkeypatch.delattr("mpiddp.checkpoints.storage.directory.Staging.copy")
    with mpiddp.Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(7, wait=True, note="é")
        assert [path.name for path in list_checkpoints(tmp_path)] == ["step-7"]
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += 1
        assert checkpointer.restore() == {"step": 7, "note": "é"}
        assert torch.equal(model.weight, before)


def test_a_score_may_be_of_another_library(tmp_path: Path) -> None:
    scores: list[Any] = [np.float32(0.5), torch.tensor(float("nan")), np.float64(0.25)]
    with mpiddp.Checkpointer(tmp_path, torch.nn.Linear(2, 2), keep=1) as checkpointer:
        for step, score in enumerate(scores, 1):
            checkpointer.save(step, score=score)
    assert list_names(tmp_path) == ["step-1", "step-3"]


@pytest.mark.parametrize("kind", [SystemExit, ValueError])
def test_what_was_begun_is_written_at_an_exit_and_after_an_error(kind, tmp_path):
    checkpointer = mpiddp.Checkpointer(tmp_path, torch.nn.Linear(2, 2))
    with contextlib.suppress(kind), checkpointer:
        checkpointer.save(1)
        raise kind
    assert list_names(tmp_path) == ["step-1"]


def test_a_save_goes_on_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook, while the disk is slow."""
    may_write = threading.Event()
    write_shards, finish = directories.write_shards, LastingCall.finish

    def write_late(*arguments: Any) -> Any:
        assert may_write.wait(100)
        return write_shards(*arguments)

    def wait_for_disk(call: LastingCall[None], seconds: float | None = None) -> None:
        may_write.set()
        finish(call, seconds)

    def interrupt(call: Callable[[], object]) -> None:
        may_write.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LastingCall, "finish", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                call()

    monkeypatch.setattr(directories, "write_shards", write_late)
    monkeypatch.setattr(LastingCall, "finish", wait_for_disk)
    weight = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.ParameterList([weight])
    checkpointer = mpiddp.Checkpointer(tmp_path, model, keep=9)
    checkpointer.save(1)
    interrupt(checkpointer.wait)
    weight.data.fill_(2)
    # Not before the first one is written, whose copies it overwrites.
    checkpointer.save(2)
    for step in (1, 2):
        checkpointer.restore(tmp_path / f"step-{step}")
        assert weight.tolist() == [step, step]
    # The tensors themselves, which may change now.
    interrupt(lambda: checkpointer.save(3, wait=True))
    with pytest.raises(OSError, match=r"rank 0 on \S+: interrupted before its tensors were"):
        checkpointer.wait()
    assert list_names(tmp_path) == ["step-1", "step-2"]
    # The next save is not refused because of the interrupt.
    interrupt(lambda: checkpointer.save(3, wait=True))
    checkpointer.save(4)
    interrupt(checkpointer.close)
    with pytest.raises(ConfigurationError, match="is in use by"):
        mpiddp.Checkpointer(tmp_path, model).restore()
    checkpointer.close()
    assert mpiddp.Checkpointer(tmp_path, model).restore() == {"step": 4}


@pytest.mark.parametrize(
    ("sizes", "started_by"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "Open MPI's mpirun"),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2", "PMI_RANK": "0"}, "MPICH's mpiexec"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "srun"),
    ],
)
def test_ranks_without_a_process_group_are_refused(sizes, started_by, tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    for name, value in sizes.items():
        monkeypatch.setenv(name, "1" if value == "2" else "0")
    mpiddp.Checkpointer(tmp_path / "alone", model).close()
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"the 2 ranks .*, found none") as caught:
        mpiddp.Checkpointer(tmp_path / "checkpoints", model)
    assert started_by in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


def test_a_closed_one_refuses_every_call(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpointer = mpiddp.Checkpointer(tmp_path, model)
    checkpointer.save(1)
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(2),
        checkpointer.restore,
        checkpointer.wait,
        lambda: checkpointer.preempted,
    ):
        with pytest.raises(mpiddp.MpiddpError, match="expected an open Checkpointer for"):
            call()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1"]


@pytest.mark.parametrize("name", ["buffers", "random", "values"])
def test_a_name_that_each_checkpoint_uses_is_refused(name: str, tmp_path: Path) -> None:
    more: Any = {name: torch.nn.Linear(2, 2)}
    with pytest.raises(ConfigurationError, match=f"^{name}: "):
        mpiddp.Checkpointer(tmp_path, torch.nn.Linear(3, 2), **more)


# Scripts that leave while their last checkpoint is being written


PROGRAM = launchers.PROGRAMS / "leaving.py"
CODES = {"end": 0, "forgotten": 0, "exit": 0, "failing": 1}
"""Exit codes by the way in which a script leaves."""


def check(folder: Path) -> None:
    assert [path.name for path in list_checkpoints(folder)] == ["step-7"]
    assert not list(folder.glob("*.partial"))


def test_the_last_checkpoint_of_one_process_is_finished(tmp_path: Path) -> None:
    ways = ",".join([*CODES, "late"])
    done = launchers.run_python(PROGRAM, tmp_path, ways, timeout=160).expect(0)
    assert done.stdout.startswith("".join(f"leaves\n{way}: {CODES[way]}\n" for way in CODES))
    for way in CODES:
        check(tmp_path / way)
    # What is waited for for long is said, and a failure, too.
    told = "mpiddp: the program ends: waiting up to 300 s for the checkpoint of step 7"
    assert told in done.stderr
    assert "mpiddp: the checkpoint of step 7 failed: a checkpoint in " in done.stderr
    assert list_checkpoints(tmp_path / "late") == []


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("group", 0),
        pytest.param("preempted", 75, marks=pytest.mark.long),
        pytest.param("full", 1, marks=pytest.mark.long),
    ],
)
def test_the_last_checkpoint_of_two_ranks_is_finished(way: str, code: int, tmp_path: Path) -> None:
    words = ["-m", "mpiddp", str(PROGRAM), str(tmp_path / "c"), way]
    result = launchers.run("openmpi", 2, words, timeout=160, cwd=tmp_path).expect(code)
    assert result.stdout.count("leaves") == 2
    if way == "full":
        assert "No space left on device" in result.output
        assert list_checkpoints(tmp_path / "c") == []
    else:
        check(tmp_path / "c")
