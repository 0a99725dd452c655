"""Checkpoints for anybody's training script."""

from __future__ import annotations

import atexit
import operator
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from mpiddp import environment
from mpiddp.checkpoints.ddp_buckets import read_bucket_order, restore_bucket_order
from mpiddp.checkpoints.optimizer_state import OptimizerState
from mpiddp.checkpoints.state import (
    VALUES,
    Buffers,
    ModelState,
    RandomState,
    Stateful,
    capture,
    read_values,
    restore,
)
from mpiddp.checkpoints.storage.directory import CheckpointDirectory, CheckpointSource, Written
from mpiddp.checkpoints.storage.finding import Found, Survey, find_valid, read_together
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.launcher.launcher import find_launcher
from mpiddp.launch.session import find_session
from mpiddp.process.background import finish_lasting_calls
from mpiddp.process.preemption_signals import SIGNALS, find_signals
from mpiddp.process.step_agreement import AgreeingRanks, StepAgreement
from mpiddp.torch_internals import find_default_store

T = TypeVar("T")


class Checkpointer:
    """Checkpoints of a script's own training, on one process or on all ranks, with DDP or FSDP.

        with mpiddp.Checkpointer("checkpoints", model, optimizer) as checkpointer:
            state = checkpointer.restore() or {"step": 0}
            for step in range(state["step"] + 1, steps + 1):
                train(step)
                if step % 500 == 0:
                    checkpointer.save(step)

    A resumed training is bitwise identical to an uninterrupted one, on the same number of ranks,
    if the script itself is deterministic: with DDP, whose buckets are arranged as they were,
    and with FSDP. A save changes nothing in the training.

    A checkpoint is written by a thread, while training goes on, and is there whole or not at all.
    The last one is finished before the program ends, also after ``sys.exit`` and exceptions.

    It holds the model, the optimizer, the random state of torch, NumPy and ``random`` on each rank,
    and ``more``. All of its files are verified before one is read. It can be read by another
    number of ranks: each new rank then keeps its random state, and has rank 0's ``more``.

    The directory belongs to this training, and one job at a time writes there. The checkpoints of
    another training are neither continued nor deleted.

    All ranks make the same calls, and have a process group by then (``init_process_group`` or
    ``mpiddp.init``).

    Args:
        directory: where checkpoints are, ``step-<n>/`` each; on a file system that all ranks share.
        model: as it is trained: plain, in DistributedDataParallel, or sharded by ``fully_shard``.
            Parameters that are not sharded are equal on all ranks: one rank's are stored.
        optimizer: the model's; its parameters may also belong to modules in ``more``.
        keep: how many of the newest checkpoints to keep, and beside them the one with the highest
            ``score``.
        source: whose checkpoints they are; by default the script's, by the name of its file.
        tell: called on rank 0, in a thread, with each checkpoint that is on the disk.
        more: what else has ``state_dict`` and ``load_state_dict``: a learning-rate schedule, a loss
            scaler, a data loader, averages of the weights (`mpiddp.checkpoints.state.Stateful`).
            States consist of tensors, numbers, strings, bools and None in dicts, lists and tuples.
            What is equal on all ranks is stored once, what is sharded by its parts.

    Raises ConfigurationError for an optimizer or a model whose state checkpoints cannot hold, and
    for a name in ``more`` that a part of each checkpoint has.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | CheckpointDirectory,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | OptimizerState | None = None,
        *,
        keep: int = 2,
        source: CheckpointSource | None = None,
        tell: Callable[[Written], None] | None = None,
        **more: Stateful,
    ) -> None:
        """Collective."""
        if keep < 1:
            raise ConfigurationError(f"keep: expected 1 or more, found {keep}")
        _check_group()
        _check_model(model)
        if taken := _OWN_NAMES & more.keys():
            raise ConfigurationError(
                f"{min(taken)}: expected a name that no part of a checkpoint has, found one of "
                f"{', '.join(sorted(_OWN_NAMES))}: give it another"
            )
        self._model, self._tell = model, tell or (lambda _: None)
        if isinstance(directory, CheckpointDirectory):
            self._ranks, self._directory = directory.ranks, directory
        else:
            self._ranks = RankGroup()
            source = source or CheckpointSource(run=_name_script(), advice=ADVICE)
            self._directory = CheckpointDirectory(Path(directory), self._ranks, source, keep)
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        modules = {name: each for name, each in more.items() if isinstance(each, nn.Module)}
        self._parts: dict[str, Stateful] = {
            "model": ModelState(model, self._ranks.rank),
            **{name: _keep_by_names(each, {"": model, **modules}) for name, each in more.items()},
            "buffers": Buffers(model),
            "random": RandomState(device),
        }
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = OptimizerState(optimizer, {"": model, **modules})
        if optimizer is not None:
            self._parts["optimizer"] = optimizer
        self._survey: Survey | None = None
        self._restored = 0
        """The step of this directory's newest checkpoint, if training goes on from that."""
        self._agreement: StepAgreement | None = None
        self._is_closed = self._has_ended = False
        _finish_with_session(self)

    @property
    def path(self) -> Path:
        """Where checkpoints are."""
        return self._directory.path

    @property
    def preempted(self) -> bool:
        """Whether the job is preempted: a signal (USR2, USR1 or TERM) has reached one of its ranks.

        Every rank must read it equally often and at the same places, for example after each step.
        All ranks then get the same answer. If it is true, save, and exit with code 75:

            if checkpointer.preempted:
                checkpointer.save(step)
                raise SystemExit(75)

        Read it in the main thread. The first read installs handlers: from then on these signals do
        not end the process. A signal for which the script has a handler keeps that handler. Child
        processes, for example data workers, have the signals blocked.
        """
        self._check_open()
        if self._agreement is None:
            self._agreement = _begin_agreement(self._ranks)
        return self._agreement.is_preempted()

    def save(
        self, step: int, *, score: float | None = None, wait: bool = False, **values: Any
    ) -> None:
        """Begin a checkpoint of this moment, between two steps; training can go on at once.

        Waits if the one before is not on the disk yet. ``values``: what ``restore`` is to
        return, as numbers, strings, tensors, and lists and dicts of them; rank 0's are kept.
        ``score``: how good the model is now; the best one is kept. NaN counts as none.
        ``wait``: whether to return when it is on the disk. That takes no memory for copies. If
        it is interrupted before the state is written, there is no such checkpoint.

        Raises OSError, or MpiddpError for whatever else fails, on all ranks, if the one before, or
        with ``wait`` this one, could not be written. The OSError is a MpiddpError, too: a script
        that does not catch it ends with one line, which says what to do. Raises ConfigurationError
        for a directory that holds checkpoints which this training has not gone on from, or that not
        all ranks share, and for a step before the one that ``restore()`` has returned.
        """
        self._check_open()
        step = operator.index(step)
        if step < 0:
            raise ConfigurationError(f"step: expected 0 or more, found {step}")
        if step < self._restored:
            # It would take the place of the later ones.
            raise ConfigurationError(
                f"step: expected {self._restored} or more, which restore() has returned, found "
                f"{step}: continue from that step, or start over in another directory"
            )
        self._directory.open(self._survey)
        # One of NumPy's or torch's is not for JSON.
        number = None if score is None else float(score)
        held = {"given": {**values, "step": step}, "buckets": read_bucket_order(self._model)}
        tensors = capture(self._parts, held, self._ranks.rank)
        self._directory.start(step, tensors, number, self._tell, is_copied=not wait)

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._directory.is_busy

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises OSError, or MpiddpError for whatever else fails, on all ranks, if it could not be
        written; the older ones are whole then.
        """
        self._check_open()
        self._directory.wait()

    def restore(
        self, source: str | os.PathLike[str] | Found | None = None
    ) -> dict[str, Any] | None:
        """Go on from the newest valid checkpoint: ``step``, and what else ``save`` was given.

        Returns None if there is no checkpoint yet. A damaged one is set aside, and the next
        older one is taken. Call it before the first step, once the model is in DDP or sharded.

        ``source``: a checkpoint, or a directory of them or of a run, of whatever training; it is
        only read.
        To begin from one, and to go on from one's own after a restart:

            state = checkpointer.restore() or checkpointer.restore("pretrained/step-1000")

        Raises CheckpointError, on all ranks, if there are checkpoints but none that can be used,
        and ConfigurationError for a directory of another training or another running job.
        """
        self._check_open()
        self._directory.finish()
        found = source if isinstance(source, Found) else self._find(source)
        if found is None:
            return None
        self._directory.use(found)
        return self._load(found)

    def _find(self, source: str | os.PathLike[str] | None) -> Found | None:
        if source is None:
            self._survey = self._directory.look()
            if self._survey.damaged:
                self._directory.set_aside(self._survey)
            newest = self._survey.newest
            self._restored = newest.manifest.step if newest is not None else 0
            return newest
        # Whoever names a checkpoint, an older one of this directory too, knows its steps.
        self._restored = 0
        return find_valid(Path(source), self._ranks)[0]

    def _load(self, found: Found) -> dict[str, Any]:
        """Collective. Raises CheckpointError or StorageError, on all ranks if on any."""
        held = read_together(found, self._ranks, lambda: read_values(found))
        restore_bucket_order(self._model, held["buckets"])
        read_together(found, self._ranks, lambda: restore(self._parts, found, self._ranks))
        given: dict[str, Any] = held["given"]
        return given

    def close(self) -> None:
        """Wait for the last checkpoint; there are no more.

        A second call does nothing, unless the first was interrupted.
        """
        if self._has_ended:
            return
        self._is_closed = True
        try:
            if self._agreement is not None:
                self._agreement.close()
            self._directory.finish()
        finally:
            # After an interrupt the thread still writes, under the lock and with the other ranks.
            if not self._directory.is_busy:
                self._directory.close()
                self._ranks.close()
                self._has_ended = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise MpiddpError(
                f"expected an open Checkpointer for {self.path}, found a closed one: make another, "
                "or close it later"
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            self.close()
        elif not isinstance(error, KeyboardInterrupt):
            # Not all ranks may come here, and the error is what the user must read.
            finish_lasting_calls(f"{type(error).__name__} in rank {self._ranks.rank}")

    def _collect(self) -> None:
        """At the end of a session: raises what went wrong with the last checkpoint."""
        if not self._is_closed and not self.is_busy:
            self._directory.finish()


_OWN_NAMES = frozenset({"buffers", "random", VALUES})
"""Of parts of a checkpoint, which nobody else's part can have."""
ADVICE = "choose another directory, or begin from it with restore('{path}')"


def _keep_by_names(part: Stateful, modules: Mapping[str, nn.Module]) -> Stateful:
    """Another optimizer is kept as the first one, unless its parameters are not in a checkpoint."""
    if isinstance(part, torch.optim.Optimizer):
        with suppress(ConfigurationError):
            return OptimizerState(part, modules)
    return part


def _finish_with_session(checkpointer: Checkpointer) -> None:
    """A script that does not close it still hears of a last checkpoint that failed."""
    session, found = find_session(), weakref.ref(checkpointer)

    def collect() -> None:
        finish_lasting_calls("the session ends")
        if (left := found()) is not None:
            left._collect()

    if session is not None:
        session.at_close(collect)


def _begin_agreement(ranks: RankGroup) -> StepAgreement:
    """Listen to the signals in a script, until its session is closed; collective."""
    session = find_session()
    signals = (session.signals if session is not None else None) or find_signals()
    signals.listen(SIGNALS.values())
    store = session.store if session is not None else None
    if store is None and ranks.size > 1:
        store = find_default_store()
    agreement = StepAgreement(AgreeingRanks(ranks.rank, ranks.size, store), signals=signals)
    if session is not None:
        session.at_close(agreement.close)
    else:
        atexit.register(agreement.close)
    return agreement


def _name_script() -> str | None:
    """The name of the script's file; None if there is none, as in a notebook."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.basename(path) if path else None


def _check_model(model: nn.Module) -> None:
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise ConfigurationError(
            "model: expected one that is plain, in DistributedDataParallel, or sharded by "
            "fully_shard, found FullyShardedDataParallel: use torch.distributed.fsdp.fully_shard"
        )


def _check_group() -> None:
    """Without a group every rank would take itself for rank 0, and all write into one directory."""
    if dist.is_initialized():
        return
    session = find_session()
    if session is not None:
        size, started_by = session.world.size, "mpiddp"
    else:
        launcher = find_launcher()
        size, started_by = environment.read_count(environment.WORLD_SIZE), environment.WORLD_SIZE
        if launcher is not None and (launcher.size or 1) > size:
            size, started_by = launcher.size or 1, launcher.name
    if size > 1:
        raise ConfigurationError(
            f"Checkpointer: expected a process group of the {size} ranks (by {started_by}), found "
            "none: call torch.distributed.init_process_group() or mpiddp.init() first, or start "
            "the script with python -m mpiddp"
        )
