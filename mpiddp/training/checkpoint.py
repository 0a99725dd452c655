"""Checkpoints of a run: written whole or not at all, verified before they are used.

``step-<n>/`` holds the shards of torch.distributed.checkpoint and, written last, a manifest. It is
made under another name, each of its files flushed to the disk, and then renamed. All files' digests
are compared before anything is read from them.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from mpiddp.errors import CheckpointError, MpiddpError
from mpiddp.launch.background import BackgroundCall
from mpiddp.training import manifest as manifests
from mpiddp.training.manifest import DamageError, File, Manifest
from mpiddp.training.ranks import Ranks
from mpiddp.training.shards import (
    WriteError,
    attempt,
    describe_failure,
    raise_first,
    read_metadata,
    write_shards,
)


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Survey:
    """What was found in a directory; nothing was changed there."""

    newest: Found | None
    """The newest one without damage."""
    damaged: Mapping[Path, list[str]] = field(default_factory=dict)
    """Newer ones, with their problems."""


NOTHING_FOUND = Survey(None)


def verify(path: Path, ranks: Ranks) -> Found:
    """Compare all files with the manifest, each rank a part of them. Collective.

    Raises DamageError, with all problems, on all ranks alike.
    """
    manifest, problems = None, []
    try:
        manifest = manifests.read_manifest(path)
        problems = manifests.find_problems(path, manifest, ranks.rank, ranks.size)
    except DamageError as error:
        problems = error.problems
    except OSError as error:
        problems = [f"cannot be read: {error.strerror}"]
    answers = ranks.gather((manifest and manifest.configuration_digest, problems))
    listed = list(dict.fromkeys(each for _, problems in answers for each in problems))
    if not listed and len({digest for digest, _ in answers}) > 1:
        listed = [f"{manifests.MANIFEST} is not the same on all nodes"]
    if listed:
        raise DamageError(listed)
    assert manifest is not None
    _check_contents(path, manifest, ranks)
    return Found(path, manifest)


def _check_contents(path: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Only now that the bytes are known to be those that were written."""
    problems = []
    try:
        for info in read_metadata(path).storage_data.values():
            if info.relative_path not in manifest.files:
                problems.append(f"{info.relative_path!r} is none of its files")
                break
    except (DamageError, AttributeError) as error:
        problems = getattr(error, "problems", [f"its list of tensors cannot be read: {error}"])
    listed = [each for problems in ranks.gather(problems) for each in problems]
    if listed:
        raise DamageError(dict.fromkeys(listed))


def find_newest(directory: Path, ranks: Ranks) -> Survey:
    """The newest valid checkpoint in ``directory``. Collective; nothing is changed.

    Raises CheckpointError where there are some, but none is valid.
    """
    candidates = ranks.broadcast(manifests.list_checkpoints(directory) if ranks.rank == 0 else None)
    damaged: dict[Path, list[str]] = {}
    for path in candidates:
        try:
            return Survey(verify(path, ranks), damaged)
        except DamageError as error:
            damaged[path] = error.problems
    if damaged or ranks.broadcast(manifests.list_damaged(directory) if ranks.rank == 0 else None):
        listed = "; ".join(
            f"{path.name}: {', '.join(problems)}" for path, problems in damaged.items()
        )
        raise CheckpointError(
            f"expected a valid checkpoint in {directory}, found damaged ones alone"
            f"{f' ({listed})' if listed else ''}: restore one, or start over with --resume never"
        )
    return Survey(None)


def find_demanded(path: Path, ranks: Ranks) -> Survey:
    """This checkpoint and no other. Collective. Raises CheckpointError where it is not valid."""
    problem = ranks.broadcast(_look_for(path) if ranks.rank == 0 else None)
    if problem:
        raise CheckpointError(problem)
    try:
        return Survey(verify(path, ranks))
    except DamageError as error:
        listed = "; ".join(error.problems)
        raise CheckpointError(f"the checkpoint {path} cannot be used: {listed}") from None


def _look_for(path: Path) -> str | None:
    """What to say where there is no such checkpoint."""
    if os.path.lexists(path):
        return None
    names = ", ".join(each.name for each in manifests.list_checkpoints(path.parent))
    return f"the checkpoint {path} does not exist; in {path.parent} there is {names or 'none'}"


@dataclass(frozen=True)
class Source:
    """Who writes checkpoints."""

    attempt: str
    """No other attempt at the run has this one, which becomes part of a name."""
    configuration: Mapping[str, Any]
    """What decides the state, in values that JSON can hold."""
    is_current: Callable[[], bool] = lambda: True
    """Whether no later attempt writes there, asked on rank 0."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is on the disk."""

    path: Path
    seconds: float
    """From its beginning until now."""
    staging_seconds: float
    """The part of them in which the caller waited for copies."""


class Staging:
    """Copies in the CPU's memory, which is used again for the next ones."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of ``tensors``; those that it returned before are overwritten."""
        copies, on_gpu = {}, False
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                copies[name] = BlockingAsyncStager().stage({name: tensor})[name]
                continue
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = buffer.copy_(tensor.detach(), non_blocking=True)
            on_gpu |= tensor.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        self._buffers = copies
        return copies


class CheckpointDirectory:
    """Where a job's checkpoints are written; all its ranks use it together.

    A thread of each rank writes, from copies, one checkpoint at a time. Meanwhile ``ranks`` is the
    thread's.
    """

    def __init__(self, path: Path, ranks: Ranks, source: Source, keep: int) -> None:
        """Takes over the directory: nobody else may write there. ``keep``: how many to keep."""
        self.path = path
        self._ranks = ranks
        self._source = source
        self._keep = keep
        self._sequence = 0
        self._staging = Staging()
        self._save: BackgroundCall[None] | None = None

    def open(self, survey: Survey = NOTHING_FOUND) -> None:
        """Set aside what is damaged, and remove what interrupted saves left. Collective."""
        problem = None
        if self._ranks.rank == 0:
            try:
                for path, problems in survey.damaged.items():
                    aside = manifests.set_aside(path, problems)
                    _report(aside, problems, survey.newest)
                manifests.clean(self.path)
                found = [_read_manifest(path) for path in manifests.list_checkpoints(self.path)]
                self._sequence = max((each.sequence for each in found if each), default=0)
            except OSError as error:
                problem = str(error)
        problem = self._ranks.broadcast(problem)
        if problem:
            raise MpiddpError(f"the checkpoints in {self.path} cannot be put in order: {problem}")

    def start(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        score: float | None = None,
        tell: Callable[[Written], None] = lambda _: None,
    ) -> None:
        """Begin a checkpoint; the tensors may be changed afterwards. Collective.

        Waits for the one before. Older ones that need not be kept are removed at the end.
        ``score``: of the test samples, higher where it is better. ``tell`` is called on rank 0, in
        a thread, once the checkpoint is on the disk.

        Raises OSError, or WriteError for whatever else failed, on all ranks alike, where the one
        before could not be written.
        """
        self.wait()
        begin = time.monotonic()
        staged, problem = dict[str, torch.Tensor](), None
        try:
            staged = self._staging.copy(tensors)
        except (RuntimeError, MemoryError) as error:
            # Too little memory, for example. The other ranks learn of it when they write.
            problem = describe_failure(error)
        staging = time.monotonic() - begin

        def write() -> None:
            raise_first(self._ranks.gather(problem))
            path = self._write(step, staged, score)
            if self._ranks.rank == 0:
                tell(Written(path, time.monotonic() - begin, staging))

        self._save = BackgroundCall(write)

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._save is not None and not self._save.is_done

    def wait(self) -> None:
        """Wait until what was begun is on the disk. Collective.

        Raises OSError, or WriteError for whatever else fails, on all ranks alike, where it could
        not be written: the older checkpoints are whole then, and nothing is left of this one.
        """
        save, self._save = self._save, None
        if save is not None:
            save.finish()

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor], score: float | None) -> Path:
        target = self.path / manifests.make_name(step)
        partial = self.path / manifests.make_partial_name(step, self._source.attempt)
        try:
            parts = write_shards(partial, tensors, self._ranks)
        except (OSError, WriteError):
            # On all ranks.
            self._discard(partial)
            raise

        def complete() -> None:
            manifest = self._describe(step, parts, score)
            manifests.write_manifest(partial, manifest)
            if not self._source.is_current():
                raise OSError(errno.ESTALE, "another attempt has taken the run over")
            manifests.publish(partial, target)
            self._sequence = manifest.sequence
            self._prune()

        problem = self._ranks.broadcast(attempt(complete) if self._ranks.rank == 0 else None)
        if problem:
            self._discard(partial)
        raise_first([problem])
        return target

    def _discard(self, partial: Path) -> None:
        if self._ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)

    def _describe(self, step: int, parts: list[dict[str, File]], score: float | None) -> Manifest:
        configuration = dict(self._source.configuration)
        return Manifest(
            sequence=self._sequence + 1,
            step=step,
            attempt=self._source.attempt,
            world=self._ranks.size,
            configuration=configuration,
            configuration_digest=manifests.digest_configuration(configuration),
            versions={
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
            },
            score=score,
            files={name: file for part in parts for name, file in sorted(part.items())},
        )

    def _prune(self) -> None:
        """Keep the newest, and the one with the highest score."""
        found = [
            (path, manifest)
            for path in manifests.list_checkpoints(self.path)
            if (manifest := _read_manifest(path)) is not None
        ]
        kept = {path for path, _ in found[: self._keep]}
        measured = [(each.score, path) for path, each in found if each.score is not None]
        if measured:
            # The newest of those that are equally good.
            kept.add(max(measured, key=lambda each: each[0])[1])
        for path, _ in found:
            if path not in kept:
                manifests.remove(path)


def _report(aside: Path, problems: list[str], newest: Found | None) -> None:
    """Say what was set aside, why, and what is used instead."""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    used = f"{newest.path.name} is used instead" if newest is not None else "none is left"
    print(
        f"mpiddp: damaged checkpoint, set aside as {aside} ({problems[0]}{more}): {used}",
        file=sys.stderr,
        flush=True,
    )


def _read_manifest(path: Path) -> Manifest | None:
    try:
        return manifests.read_manifest(path)
    except DamageError:
        return None
