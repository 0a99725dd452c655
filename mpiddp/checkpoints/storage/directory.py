"""A job's directory of checkpoints: written whole or not at all, verified before they are used.

``step-<n>/``    the shards of torch.distributed.checkpoint and, written last, a manifest
``owner.json``   whose directory it is (`mpiddp.checkpoints.storage.owner`)
``lock``         who writes there now

A checkpoint is made under another name, each of its files flushed to the disk and seen by rank 0,
and then renamed. What the owner has not written is never deleted.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from mpiddp import environment
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage import owner as owners
from mpiddp.checkpoints.storage.finding import NOTHING_FOUND, Found, Survey, ask_rank_0, find_newest
from mpiddp.checkpoints.storage.manifest import File, Manifest, Patience
from mpiddp.checkpoints.storage.owner import Owner
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import (
    Frames,
    WriteError,
    attempt,
    count_bytes,
    describe_failure,
    join_equal,
    raise_first,
    write_shards,
)
from mpiddp.errors import ConfigurationError, StorageError, UnwritableError
from mpiddp.files import NO_ROOM, explain_unwritable
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.process.background import LastingCall, call_at_exit, finish_lasting_calls
from mpiddp.process.directory_lock import DirectoryLock
from mpiddp.wording import describe_error, fold, print_message

_PROBE_NAME = re.compile(r"\.seen-[0-9a-f]{16}")


@dataclass(frozen=True)
class CheckpointSource:
    """Who writes checkpoints, and what the state in them belongs to."""

    run: str | None = None
    """Name of the run or script; None if it has none."""
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))
    """Letters, digits, ``_`` and ``-``; no other attempt at the run has this one, which becomes
    part of a name. Rank 0's counts."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """What decides the state, in values that JSON can hold."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that must not differ from the owner's."""
    advice: str = "choose another directory"
    """What to do about a directory that is another owner's; {path} is the newest checkpoint."""
    options: tuple[str, str] = ("keep", "directory")
    """The names of the user's options for how many to keep, and for the directory."""
    is_current: Callable[[], bool] = lambda: True
    """Whether no later attempt writes there, asked on rank 0."""
    replaces: bool = False
    """Whether a training that begins anew may take the place of the owner's checkpoints."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is on the disk."""

    path: Path
    step: int
    seconds: float
    """From its beginning until now."""
    staging_seconds: float
    """The part of them in which the caller waited for copies."""


class Staging:
    """Copies in the CPU's memory, which is used again for the next ones."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of ``tensors``; those that it returned before are overwritten.

        They are complete once `wait_for_gpus` has returned.
        """
        copies = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                copies[name] = BlockingAsyncStager().stage({name: tensor})[name]
                continue
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=_is_on_gpu(tensor)
                )
            copies[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        self._buffers = copies
        return copies


def wait_for_gpus(tensors: Mapping[str, torch.Tensor]) -> None:
    """Wait until what was begun on the GPUs of these tensors is done, in whichever stream.

    A script's GPU need not be torch's current one, nor its stream the one in which they are copied.
    """
    for gpu in {each.device for each in tensors.values() if _is_on_gpu(each)}:
        torch.get_device_module(gpu).synchronize(gpu)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or tensor.is_xpu


class CheckpointDirectory:
    """The directory of a job's checkpoints; all its ranks use it together.

    A thread of each rank writes, from copies, one checkpoint at a time. Meanwhile ``ranks`` is the
    thread's. From ``look`` or ``open`` on, until ``close``, no other job can open the directory.
    """

    def __init__(self, path: Path, ranks: RankGroup, source: CheckpointSource, keep: int) -> None:
        """Touches nothing. ``keep``: how many of the newest checkpoints to keep."""
        self.path = path
        self._place = path.absolute()
        """The same, wherever a script goes meanwhile."""
        self.ranks = ranks
        self._source = source
        self._keep = keep
        self._attempt = source.attempt
        self._owner = Owner.make(source.run, source.identity)
        """On rank 0, from ``open`` on, the directory's."""
        self._lock: DirectoryLock | None = None
        """On rank 0."""
        self._release: Callable[[], object] = lambda: None
        self._is_open = False
        self._newest: Path | None = None
        """On rank 0, until the first save: the newest one, which was verified."""
        self._used: Path | None = None
        """The one that training has gone on from."""
        self._has_warned = False
        self._sequence = 0
        self._staging = Staging()
        self._frames: Frames = {}
        """Of the save before; the thread's."""
        self._bytes = 0
        """This rank's part of the last save; the thread's."""
        self._save: LastingCall[None] | None = None
        call_at_exit(finish_lasting_calls)

    def look(self) -> Survey:
        """Find the newest valid checkpoint. Collective; nothing is changed but the lock.

        A directory that cannot be written is looked at without a lock.

        Raises, on all ranks, ConfigurationError if the directory is another owner's or another job
        writes there, CheckpointError if there are checkpoints, but none can be used, and
        StorageError if the directory cannot be read for a while.
        """

        def enter() -> bool:
            if not Patience(0).read(self.path.is_dir):
                return False
            self._enter(is_read=True)
            return True

        return find_newest(self.path, self.ranks) if self._ask_rank_0(enter) else NOTHING_FOUND

    def open(self, survey: Survey | None = None, source: CheckpointSource | None = None) -> None:
        """Make the directory this owner's, and ready for saves. Collective, before the first one.

        Sets aside what is damaged, and removes what interrupted saves of this owner left.

        Args:
            survey: what ``look`` has found; None if nobody has looked. If that is nothing, a
                directory with checkpoints is refused, unless the source replaces them.
            source: what is known of it by now, if that is more than at first.

        A second call does nothing.

        Raises, on all ranks, ConfigurationError as ``look``, or if not all hosts share the
        directory, and StorageError if it cannot be written.
        """
        if self._is_open:
            return
        if source is not None:
            self._source, self._owner = source, Owner.make(source.run, source.identity)

        def enter() -> tuple[str, str]:
            self.path.mkdir(parents=True, exist_ok=True)
            self._enter()
            # Another job may have written since somebody looked, and has let go of the lock.
            if (survey or NOTHING_FOUND).newest is None and not self._source.replaces:
                Patience(0).read(self._refuse_any)
            return self._source.attempt, _make_probe(self.path)

        self._attempt, probe = self._ask_rank_0(enter)
        self._check_shared(probe)
        self._ask_rank_0(lambda: self._put_in_order(survey or NOTHING_FOUND))
        if self.ranks.rank == 0 and survey is not None and survey.newest is not None:
            self._newest = survey.newest.path
        self._is_open = True

    def use(self, found: Found) -> None:
        """Training goes on from ``found``, which stays until the next one is whole."""
        self._used = found.path

    def set_aside(self, survey: Survey) -> None:
        """Rename what ``look`` has found to be damaged. Collective, while nothing is written.

        Opens the directory. Raises as ``open``.
        """
        if self._is_open:
            self._ask_rank_0(lambda: _set_aside(survey))
        else:
            self.open(survey)

    def _ask_rank_0(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns on rank 0. Collective. Raises its errors on all ranks."""

        def refuse(failure: str) -> StorageError:
            return StorageError(f"checkpoints: {self.path} cannot be used: {failure}")

        return ask_rank_0(self.ranks, work, refuse)

    def _enter(self, *, is_read: bool = False) -> None:
        """Lock the directory, and refuse a stranger's. On rank 0."""
        advice, problem = self._source.advice, None
        if self._lock is None:
            try:
                self._lock = lock = owners.lock(self.path, self._owner, advice)
            except OSError as error:
                if error.errno not in owners.READ_ONLY:
                    raise
                lock, problem = None, error
            if lock is not None:
                self._release = weakref.finalize(self, lock.close)
                return
        Patience(0).read(owners.refuse_stranger, self.path, self._owner, advice)
        if problem is not None and not is_read:
            # Another user's lock, for example: its holder may be writing.
            raise problem

    def _refuse_any(self) -> None:
        newest = next(iter(manifests.list_checkpoints(self.path)), None)
        if newest is not None:
            owner = owners.read_owner(self.path) or self._owner
            raise ConfigurationError(
                f"checkpoints: {self.path} holds checkpoints of {owner.describe()}, the newest "
                f"{newest.name}: restore() goes on from them; to begin anew choose another "
                "directory"
            )

    def _put_in_order(self, survey: Survey) -> None:
        """On rank 0."""
        patience = Patience(0)
        found = patience.read(owners.refuse_stranger, self.path, self._owner, self._source.advice)
        if found is None:
            owners.write_owner(self.path, self._owner)
        else:
            self._owner = found
        _set_aside(survey)
        self._tidy(lambda: manifests.clean(self.path, self._owner.token))
        listed = patience.read(manifests.list_checkpoints, self.path)
        read = [patience.read(manifests.read_or_none, each) for each in listed]
        self._sequence = max((each.sequence for each in read if each), default=0)

    def _check_shared(self, probe: str) -> None:
        """Refuse a directory that not all hosts see. Collective. ``probe``: a new file there."""
        patience, path = Patience(self.ranks.rank), self.path / probe
        # Nobody has looked for this name, so that no host remembers that it was not there.
        while not (sees := os.path.exists(path)) and patience.wait(f"{path} is not there yet"):
            pass
        answers = self.ranks.gather((socket.gethostname(), sees))
        if self.ranks.rank == 0:
            with suppress(OSError):  # The next attempt removes it.
                path.unlink()
        blind = [(rank, host) for rank, (host, sees) in enumerate(answers) if not sees]
        if blind:
            hosts = fold_hostnames([host for _, host in blind])
            raise ConfigurationError(
                f"checkpoints: {self.path} is not one directory for all hosts: rank {blind[0][0]} "
                f"({hosts}) does not see what rank 0 ({answers[0][0]}) writes there: choose one "
                "on a file system that all hosts share"
            )

    def close(self) -> None:
        """Release the lock. Not collective; waits for nothing, and may be called twice."""
        self._release()
        self._lock, self._is_open = None, False

    def start(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        score: float | None = None,
        tell: Callable[[Written], None] = lambda _: None,
        *,
        is_copied: bool = True,
    ) -> None:
        """Begin a checkpoint; the tensors may be changed afterwards. Collective.

        Waits for the one before. Older ones that need not be kept are removed at the end; those
        that ``look`` has found older than a valid one, at the beginning.
        ``score``: of the test samples, higher if it is better. ``tell`` is called on rank 0, in
        a thread, once the checkpoint is on the disk. ``is_copied``: False saves the copies' time
        and memory, and returns when it is on the disk; if it is interrupted before the tensors
        are written, the checkpoint is dropped.

        Raises UnwritableError, which is an OSError, or WriteError for whatever else failed, on all
        ranks alike, if the one before could not be written.
        """
        self.finish()
        begin = time.monotonic()
        staged, problem = dict[str, torch.Tensor](), None
        try:
            wait_for_gpus(tensors)
            staged = dict(tensors)
            if is_copied:
                staged = self._staging.copy(tensors)
                wait_for_gpus(tensors)
        except (RuntimeError, MemoryError) as error:
            # Too little memory, for example. The other ranks learn of it when they write.
            problem = describe_failure(error)
        staging = time.monotonic() - begin
        interrupted = threading.Event()

        def write() -> None:
            found = self.ranks.gather((step, problem))
            with self._dropped_after_error(step):
                raise_first([each for _, each in found])
                if len(steps := {each for each, _ in found}) > 1:
                    raise WriteError(f"expected one step on all ranks, found {sorted(steps)}")
                joined = join_equal(staged, self.ranks)
                self._bytes = count_bytes(joined, self.ranks.rank)
                path = self._write(step, joined, score, interrupted)
            if self.ranks.rank == 0:
                tell(Written(path, step, time.monotonic() - begin, staging))

        try:
            self._save = LastingCall(write, f"the checkpoint of step {step}")
            if not is_copied:
                self.wait()
        except BaseException:
            # After an interrupt the caller may change the tensors.
            interrupted.set()
            raise

    def finish(self) -> None:
        """As `wait`, but no error tells that an interrupt has dropped a checkpoint."""
        with suppress(InterruptedError):
            self.wait()

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        save = self._save
        return save is not None and not save.is_done

    def wait(self) -> None:
        """Wait until what was begun is on the disk. Collective.

        Raises UnwritableError, which is an OSError, or WriteError for whatever else fails, on all
        ranks alike, if it could not be written: the older checkpoints are whole then, and nothing
        is left of this one. Only if the directory itself could not be flushed, this one is whole,
        too. After an interrupt, what was begun goes on, and is waited for again.
        """
        save = self._save
        try:
            if save is not None:
                save.finish()
        finally:
            if not self.is_busy:
                self._save = None

    @contextmanager
    def _dropped_after_error(self, step: int) -> Iterator[None]:
        """Nothing is left of a checkpoint that cannot be written, and all ranks say why.

        Collective after an OSError or WriteError, which all ranks have alike.
        """
        try:
            yield
        except (OSError, WriteError) as error:
            said, needed = "", sum(self.ranks.gather(self._bytes))
            if self.ranks.rank == 0:
                partial = manifests.make_partial_name(step, self._attempt)
                shutil.rmtree(self._place / partial, ignore_errors=True)
                said = self._explain(error, needed)
            said = self.ranks.broadcast(said)
            if isinstance(error, InterruptedError):
                raise
            if isinstance(error, OSError):
                raise UnwritableError(error.errno or errno.EIO, said) from None
            raise WriteError(said) from None

    def _explain(self, error: OSError | WriteError, needed: int) -> str:
        """What went wrong, and what to do about it. On rank 0."""
        reason, advice = str(error), ""
        if isinstance(error, OSError):
            keep, directory = self._source.options
            reason = explain_unwritable(error, self._place, needed)
            fewer = f"lower {keep}, " if self._keep > 1 else ""
            if error.errno in NO_ROOM:
                advice = f": free some there, {fewer}or choose another {directory}"
            elif error.errno == errno.EFBIG:
                advice = ": raise that limit"
            elif error.errno in (*owners.READ_ONLY, errno.EIO):
                advice = f": choose another {directory}"
        is_there = self._place.is_dir()
        older = "the older ones are as they were" if is_there else "somebody has removed them all"
        return f"a checkpoint in {self.path} could not be written: {reason}{advice}; {older}"

    def _write(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        score: float | None,
        interrupted: threading.Event,
    ) -> Path:
        target = self._place / manifests.make_name(step)
        partial = self._place / manifests.make_partial_name(step, self._attempt)
        lock = self._lock

        def complete() -> None:
            _check_files(partial, parts)
            manifest = self._describe(step, parts, score)
            manifests.write_manifest(partial, manifest)
            if not (self._source.is_current() and (lock is None or lock.is_current())):
                raise OSError(errno.ESTALE, "another attempt has taken the run over")
            # Counted first: it may have its name though publishing failed.
            self._sequence = manifest.sequence
            manifests.publish(partial, target, manifest.owner)
            self._prune()

        if self._newest is not None:
            self._make_room(self._newest)
            self._newest = None
        parts = write_shards(partial, tensors, self.ranks, self._frames, interrupted)
        problem = attempt(complete) if self.ranks.rank == 0 else None
        raise_first([self.ranks.broadcast(problem)])
        return self.path / target.name

    def _make_room(self, newest: Path) -> None:
        """Remove what need not be kept beside a valid one, unless an older one is in use."""
        used = self._used or newest
        if used.name == newest.name or used.resolve().parent != self._place.resolve():
            self._prune()

    def _prune(self) -> None:
        """Remove checkpoints that need not be kept. On rank 0."""
        self._tidy(lambda: manifests.prune(self._place, self._owner.token, self._keep))

    def _tidy(self, work: Callable[[], None]) -> None:
        """Remove what is not needed; what cannot be removed stays, and is told of once."""
        try:
            work()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print_message(
                    f"in {self.path} not all that is not needed any more can be removed: "
                    f"{describe_error(error)}: it stays there, and saves go on"
                )

    def _describe(self, step: int, parts: list[dict[str, File]], score: float | None) -> Manifest:
        return Manifest(
            sequence=self._sequence + 1,
            step=step,
            attempt=self._attempt,
            owner=self._owner.token,
            world=self.ranks.size,
            configuration=dict(self._source.configuration),
            versions={
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
            },
            job=environment.job_identity(os.environ),
            front=os.environ.get(environment.JOB_DIRECTORY) or None,
            score=score,
            files={name: file for part in parts for name, file in sorted(part.items())},
        )


def _make_probe(directory: Path) -> str:
    """A new file, by its name. What an attempt that was killed has left is removed."""
    for path in directory.iterdir():
        if _PROBE_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)
    probe = directory / f".seen-{secrets.token_hex(8)}"
    probe.touch(exist_ok=False)
    return probe.name


def _check_files(directory: Path, parts: list[dict[str, File]]) -> None:
    """Raise OSError if rank 0 does not see the files of all ranks as they wrote them."""
    patience = Patience(0)
    for rank, files in enumerate(parts):
        for name, file in files.items():
            try:
                patience.read(_check_size, directory / name, file.size)
            except OSError as error:
                text = f"rank {rank} has written it: {error.strerror}: do all hosts share it?"
                raise OSError(error.errno, text, str(directory / name)) from None


def _check_size(path: Path, expected: int) -> None:
    # To open a file has NFS ask the server for its size.
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
    if size != expected:
        text = f"expected {expected} bytes, found {size}"
        raise OSError(errno.EIO, text, str(path))


def _set_aside(survey: Survey) -> None:
    """On rank 0. Says what was set aside, why, and what is used instead."""
    newest = survey.newest
    used = f"{newest.path.name} is used instead" if newest is not None else "none is left"
    for path, problems in survey.damaged.items():
        if os.path.lexists(path):
            aside = manifests.set_aside(path, problems)
            print_message(f"damaged checkpoint, set aside as {aside} ({fold(problems)}): {used}")
