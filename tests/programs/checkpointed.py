"""Somebody's training loop, with mpiddp.Checkpointer."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpiddp
import stale
from mpiddp.checkpoints.storage import unpickling
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import list_stored


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
        "begun": begun,
        "losses": losses if session.world.rank == 0 else None,
        "rate": schedule.get_last_lr(),
        "random": torch.rand(3).tolist(),
        "state": digest(model, optimizer),
    }


def load(session: mpiddp.Session | None, folder: Path, kind: str) -> tuple[int, str]:
    """The step of the newest checkpoint, and a digest of its state, whatever wrote it."""
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    with mpiddp.Checkpointer(folder, model, optimizer) as checkpointer:
        state = checkpointer.restore()
    assert state is not None
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
    average, loader = Average(model), Loader(rank)
    with mpiddp.Checkpointer(folder, model, average=average, loader=loader) as checkpointer:
        checkpointer.save(1)
    expected = {name: local(each).clone() for name, each in average.weights.items()}
    for each in average.weights.values():
        each.zero_()
    loader = Loader(-1)
    with mpiddp.Checkpointer(folder, model, average=average, loader=loader) as checkpointer:
        checkpointer.restore()
    return {
        "names": sorted(list_stored(folder / "step-1")),
        "is_same": all(
            torch.equal(local(each), expected[name]) for name, each in average.weights.items()
        ),
        "place": loader.state["place"],
        "seen": loader.state["seen"].tolist(),
        "order": loader.state["order"].tolist(),
    }


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def train_experts(session: mpiddp.Session, folder: Path, steps: int) -> list[torch.Tensor]:
    """Modules that each rank has to itself, one with an optimizer of its own; what they are then.

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


def fail_to_plan(session: mpiddp.Session, folder: Path, step: str, rank: int) -> str:
    """What a save says in which a step of planning fails on this rank."""

    def fail(*_: object) -> None:
        raise ValueError("no such plan")

    own = session.world.rank
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(stale.make_directory(folder))
        directory.open()
        if own == rank:
            stack.enter_context(mock.patch.object(DefaultSavePlanner, step, fail))
        directory.start(1, {f"rank-{own}.x": torch.ones(3)})
        try:
            directory.wait()
        except mpiddp.MpiddpError as error:
            return str(error)
    raise AssertionError("the save has not failed")


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


class Hostile:
    """To unpickle it makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def exchange(session: mpiddp.Session, folder: Path) -> dict[str, Any]:
    """Each call of `RankGroup`: with plain values, and with one of rank 1, or 0, that runs code."""
    ranks = RankGroup()
    own: dict[str, Any] = {"rank": ranks.rank, "text": "é" * ranks.rank * 1000, "path": folder}
    found: dict[str, Any] = {
        "gather": [each["rank"] for each in ranks.gather(own)],
        "collect": [len(each["text"]) for each in ranks.collect(own)],
        "scatter": ranks.scatter(["a", None, (3, 4.5)]),
        "broadcast": ranks.broadcast(own)["rank"],
        "refused": [],
    }
    hostile = Hostile(folder / f"made-by-{ranks.rank}")
    for call in (
        lambda: ranks.gather(hostile if ranks.rank == 1 else None),
        lambda: ranks.collect(hostile if ranks.rank == 1 else None),
        lambda: ranks.scatter([hostile] * ranks.size),
        lambda: ranks.broadcast(hostile),
    ):
        try:
            call()
        except unpickling.ForbiddenError as error:
            found["refused"].append(str(error))
        else:
            found["refused"].append(None)
    ranks.close()
    with contextlib.suppress(AttributeError):
        # A closed group of several ranks fails, and does not take its rank for the only one.
        found["late"] = ranks.gather(own)
    return found
