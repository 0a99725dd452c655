"""Checkpoints for anybody's training script."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from mpiddp import environment
from mpiddp.errors import CheckpointError, ConfigurationError
from mpiddp.launch.launcher.launcher import find_launcher
from mpiddp.launch.session import find_session
from mpiddp.training.checkpoint import CheckpointDirectory, Found, Source, find_newest
from mpiddp.training.ddp_buckets import read_bucket_order, restore_bucket_order
from mpiddp.training.packing import is_structure, pack, unpack
from mpiddp.training.preemption import Preemption, begin_preemption
from mpiddp.training.random_state import read_generators, set_generators
from mpiddp.training.ranks import Ranks
from mpiddp.training.shards import load_into, read_shards

T = TypeVar("T")


class Stateful(Protocol):
    """A learning-rate schedule, a loss scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""


class Checkpointer:
    """Checkpoints of a script's own training, on one process or on all ranks, with DDP or FSDP.

        with mpiddp.Checkpointer("checkpoints", model, optimizer) as checkpointer:
            state = checkpointer.restore() or {"step": 0}
            for step in range(state["step"] + 1, steps + 1):
                train(step)
                if step % 500 == 0:
                    checkpointer.save(step)

    A resumed training is bitwise identical to an uninterrupted one, on the same number of ranks,
    where the script itself is deterministic: with DDP, whose buckets are arranged as they were,
    and with FSDP.

    A checkpoint is written by a thread, while training goes on, and is there whole or not at all.
    It holds the model, the optimizer, the random state of torch, NumPy and ``random`` on each rank,
    and ``more``. All of its files are verified before one is read. It can be read by another
    number of ranks: each new rank then keeps its random state, and has rank 0's ``more``.

    All ranks make the same calls, and have a process group by then (``init_process_group`` or
    ``mpiddp.init``).

    Args:
        directory: where checkpoints are, ``step-<n>/`` each; nobody else writes there.
        model: as it is trained: plain, in DistributedDataParallel, or sharded by FSDP.
        optimizer: the model's.
        keep: how many of the newest checkpoints to keep.
        more: what else has ``state_dict`` and ``load_state_dict``: a learning-rate schedule, a loss
            scaler, a data loader. States consist of tensors, numbers, strings, bools and None in
            dicts, lists and tuples.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int = 2,
        **more: Stateful,
    ) -> None:
        """Collective."""
        if keep < 1:
            raise ConfigurationError(f"keep: expected 1 or more, found {keep}")
        _check_group()
        self._model, self._optimizer, self._more = model, optimizer, more
        self._ranks = Ranks()
        self._device = next(model.parameters()).device
        attempt = self._ranks.broadcast(secrets.token_hex(4))
        self._directory = CheckpointDirectory(
            Path(directory), self._ranks, Source(attempt, {}), keep
        )
        self._is_open = False
        self._preemption: Preemption | None = None

    @property
    def preempted(self) -> bool:
        """Whether the job is preempted: a signal (USR2, USR1 or TERM) has reached one of its ranks.

        Every rank must read it equally often and at the same places, for example after each step.
        All ranks then get the same answer. Where it is true, save, close, and exit with code 75:

            if checkpointer.preempted:
                checkpointer.save(step)
                checkpointer.close()
                raise SystemExit(75)

        Read it in the main thread. The first read installs handlers: from then on these signals do
        not end the process. A signal for which the script has a handler keeps that handler. Child
        processes, for example data workers, have the signals blocked.
        """
        if self._preemption is None:
            self._preemption = begin_preemption(self._ranks.rank, self._ranks.size)
        return self._preemption.is_due()

    def save(self, step: int, **values: Any) -> None:
        """Begin a checkpoint of this moment, between two steps; training can go on at once.

        Waits where the one before is not on the disk yet. ``values``: what ``restore`` is to
        return, as numbers, strings, tensors, and lists and dicts of them; rank 0's are kept.

        Raises OSError, or MpiddpError for whatever else fails, on all ranks, where the one before
        could not be written.
        """
        self._open()
        self._directory.start(step, self._capture({**values, "step": step}))

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises OSError, or MpiddpError for whatever else fails, on all ranks, where it could not be
        written; the older ones are whole then.
        """
        self._directory.wait()

    def restore(self) -> dict[str, Any] | None:
        """Go on from the newest valid checkpoint: ``step``, and what else ``save`` was given.

        Returns None where there is no checkpoint yet. A damaged one is set aside, and the next
        older one is taken. Call it before the first step, once the model is in DDP or sharded.

        Raises CheckpointError, on all ranks, where there are checkpoints but none that can be used.
        """
        self._directory.wait()
        survey = find_newest(self._directory.path, self._ranks)
        self._directory.open(survey)
        self._is_open = True
        if survey.newest is None:
            return None
        found = survey.newest
        order = self._read(found, lambda: unpack(read_shards(found.path, "buckets.")))
        restore_bucket_order(self._model, order)
        return self._read(found, lambda: self._load(found))

    def _read(self, found: Found, read: Callable[[], T]) -> T:
        """What ``read`` returns. Collective. Raises CheckpointError, on all ranks if on any."""
        problem, values = None, list[T]()
        try:
            values.append(read())
        except Exception as error:  # Whatever torch raises for shapes, names and contents.
            problem = f"the checkpoint {found.path} does not fit: {error}"
        problems = [each for each in self._ranks.gather(problem) if each]
        if problems:
            raise CheckpointError(problems[0])
        return values[0]

    def close(self) -> None:
        """Wait for the last checkpoint; there are no more."""
        if self._preemption is not None:
            self._preemption.close()
        self._directory.wait()
        self._ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def _open(self) -> None:
        if not self._is_open:
            self._directory.open()
            self._is_open = True

    def _capture(self, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        rank = self._ranks.rank
        buffers = self._read_buffers()
        order = read_bucket_order(self._model)
        parts = {
            "model": pack(get_model_state_dict(self._model)),
            "optimizer": pack(get_optimizer_state_dict(self._model, self._optimizer)),
        }
        if rank == 0:
            parts["values"] = pack(dict(values))
            parts["buckets"] = pack(order)
        else:
            # One text for all; and ranks may have other running averages than rank 0.
            parts["model"] = {
                name: each for name, each in parts["model"].items() if name not in buffers
            }
            parts = {
                part: {name: each for name, each in found.items() if not is_structure(name)}
                for part, found in parts.items()
            }
        own = {
            "buffers": buffers,
            "random": read_generators(self._device),
            "more": {name: each.state_dict() for name, each in self._more.items()},
        }
        parts[f"rank-{rank}"] = pack(own)
        return {
            f"{part}.{name}": each for part, found in parts.items() for name, each in found.items()
        }

    def _read_buffers(self) -> dict[str, torch.Tensor]:
        model = self._model
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return dict(inner.named_buffers())

    def _load(self, found: Found) -> dict[str, Any]:
        model = get_model_state_dict(self._model)
        loaded = load_into(found.path, "model.", pack(model))
        set_model_state_dict(self._model, unpack(loaded))
        optimizer = get_optimizer_state_dict(self._model, self._optimizer)
        loaded = load_into(found.path, "optimizer.", pack(optimizer))
        set_optimizer_state_dict(self._model, self._optimizer, unpack(loaded))
        is_same_world = found.manifest.world == self._ranks.size
        own = unpack(read_shards(found.path, f"rank-{self._ranks.rank if is_same_world else 0}."))
        for name, each in self._more.items():
            each.load_state_dict(own["more"][name])
        if is_same_world:
            for name, buffer in self._read_buffers().items():
                buffer.copy_(own["buffers"][name])
            set_generators(own["random"], self._device)
        values: dict[str, Any] = unpack(read_shards(found.path, "values."))
        return values


def _check_group() -> None:
    """Without a group every rank would take itself for rank 0, and all write into one directory."""
    if dist.is_initialized():
        return
    session = find_session()
    if session is not None:
        size, started_by = session.world.size, "mpiddp"
    else:
        launcher = find_launcher()
        given = os.environ.get(environment.WORLD_SIZE, "")
        size, started_by = int(given) if given.isdecimal() else 1, environment.WORLD_SIZE
        if launcher is not None and (launcher.size or 1) > size:
            size, started_by = launcher.size or 1, launcher.name
    if size > 1:
        raise ConfigurationError(
            f"Checkpointer: expected a process group of the {size} ranks (by {started_by}), found "
            "none: call torch.distributed.init_process_group() or mpiddp.init() first, or start "
            "the script with python -m mpiddp"
        )
