"""Which checkpoint can be used: all its files are compared with its manifest first.

Nothing is changed here. What is damaged is told from what cannot be read now: all ranks must find
the damage that one of them has found, since a network file system may show them different things
for a while.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage.manifest import DamageError, FormatError, Manifest, Patience
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import read_metadata
from mpiddp.errors import CheckpointError, ConfigurationError, StorageError
from mpiddp.wording import describe_error

T = TypeVar("T")

LISTINGS = 5
"""How often a directory is listed while another job removes checkpoints there."""


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


def verify(path: Path, ranks: RankGroup) -> Found:
    """Compare all files with the manifest, each rank a part of them. Collective.

    Raises, on all ranks alike, DamageError with all problems, FormatError, or StorageError if a
    file cannot be read, or is damaged for some ranks only.
    """
    text = _agree(path, ranks, _read_manifest, path)
    manifest = manifests.interpret(path, ranks.broadcast(text))
    suspects = _find_suspects(path, manifest, ranks)
    _agree(path, ranks, _check_files, path, manifest, suspects)
    # Nothing is interpreted before the bytes are known to be those that were written.
    _agree(path, ranks, _check_list, path, manifest)
    return Found(path, manifest)


def _read_manifest(path: Path) -> str:
    """What the file holds. Raises DamageError or OSError; another format is none of them."""
    text = manifests.read_text(path)
    with suppress(FormatError):
        manifests.interpret(path, text)
    return text


def _find_suspects(path: Path, manifest: Manifest, ranks: RankGroup) -> list[str]:
    """Names of files that are missing or changed; each rank looks at a part of them. Collective.

    Raises StorageError.
    """
    names = sorted(manifest.files)[ranks.rank :: ranks.size]
    patience, mine, failure = Patience(ranks.rank), list[str](), None
    try:
        for name in names:
            if patience.read(manifests.compare, path / name, manifest.files[name]):
                mine.append(name)
    except OSError as error:
        failure = describe_failure(error)
    return sorted(name for found in _gather(path, ranks, mine, failure) for name in found)


def _gather(path: Path, ranks: RankGroup, value: T, failure: str | None) -> list[T]:
    """Every rank's value. Collective. Raises StorageError on all ranks if one has a failure."""
    answers = ranks.gather((value, failure))
    for rank, (_, each) in enumerate(answers):
        if each is not None:
            raise _make_error(path, f"rank {rank} on {each}")
    return [found for found, _ in answers]


def describe_failure(error: OSError) -> str:
    """The end of ``rank 0 on HOST: FILE: REASON``."""
    return f"{socket.gethostname()}: {describe_error(error)}"


def _check_files(path: Path, manifest: Manifest, names: list[str]) -> None:
    """Raise DamageError for what is wrong with these files and the list of all, or OSError."""
    if problems := manifests.find_problems(path, manifest, names):
        raise DamageError(problems)


def _check_list(path: Path, manifest: Manifest) -> None:
    """Raise DamageError for what the list of tensors says and cannot be, or OSError."""
    try:
        for info in read_metadata(path).storage_data.values():
            if info.relative_path not in manifest.files:
                raise DamageError([f"{info.relative_path!r} is none of its files"])
    except (AttributeError, TypeError) as error:
        raise DamageError([f"its list of tensors cannot be read: {error}"]) from None


def _agree(path: Path, ranks: RankGroup, work: Callable[..., T], *arguments: Any) -> T:
    """What ``work`` returns on this rank, once no rank finds damage. Collective.

    Raises, on all ranks alike, DamageError if all find damage, and StorageError for an OSError, or
    if only some find damage for PATIENCE_SECONDS.
    """
    patience, doubts = Patience(ranks.rank), Patience(ranks.rank)
    while True:
        values, problems, failure = list[T](), list[str](), None
        try:
            values.append(patience.read(work, *arguments))
        except DamageError as error:
            problems = error.problems
        except OSError as error:
            failure = describe_failure(error)
        answers = _gather(path, ranks, (socket.gethostname(), problems), failure)
        finders = [rank for rank, (_, found) in enumerate(answers) if found]
        if not finders:
            return values[0]
        if len(finders) == ranks.size:
            raise DamageError(answers[0][1])
        other = next(rank for rank in range(ranks.size) if rank not in finders)
        host, found = answers[finders[0]]
        doubt = (
            f"rank {finders[0]} on {host}: {found[0]}, but not for rank {other} on "
            f"{answers[other][0]} (do all hosts share it?)"
        )
        if not ranks.broadcast(ranks.rank == 0 and doubts.wait(f"{path}: {doubt}")):
            raise _make_error(path, doubt)


def ask_rank_0(ranks: RankGroup, work: Callable[[], T], refuse: Callable[[str], StorageError]) -> T:
    """What ``work`` returns on rank 0. Collective.

    Raises, on all ranks, its ConfigurationError, and what ``refuse`` makes of its OSError.
    """
    value = refusal = failure = None
    if ranks.rank == 0:
        try:
            value = work()
        except ConfigurationError as error:
            refusal = str(error)
        except OSError as error:
            failure = describe_failure(error)
    refusal, failure, found = ranks.broadcast((refusal, failure, value))
    if refusal is not None:
        raise ConfigurationError(refusal)
    if failure is not None:
        raise refuse(f"rank 0 on {failure}")
    answer: T = found
    return answer


def _read_on_rank_0(path: Path, ranks: RankGroup, work: Callable[[Path], T]) -> T:
    """What ``work(path)`` returns on rank 0. Collective. Raises StorageError on all ranks."""
    patience = Patience(ranks.rank)
    return ask_rank_0(ranks, lambda: patience.read(work, path), partial(_make_error, path))


def _make_error(path: Path, failure: str) -> StorageError:
    return StorageError(
        f"{path} cannot be read: {failure}: nothing was changed; start again once it can be read, "
        "or move it away"
    )


def find_newest(directory: Path, ranks: RankGroup) -> Survey:
    """The newest valid checkpoint in ``directory``. Collective; nothing is changed.

    Raises, on all ranks, CheckpointError if there are some, but none is valid, or the newest has
    another format, and StorageError if it cannot be read.
    """
    for _ in range(LISTINGS):
        survey, has_changed = _search(directory, ranks)
        if survey.newest is not None or not has_changed:
            break
    else:
        raise _make_error(directory, "another job removes checkpoints there")
    if survey.newest is not None:
        return survey
    aside = _read_on_rank_0(directory, ranks, manifests.list_damaged)
    if survey.damaged or aside:
        listed = "; ".join(
            f"{path.name}: {', '.join(problems)}" for path, problems in survey.damaged.items()
        )
        raise CheckpointError(
            f"expected a valid checkpoint in {directory}, found damaged ones alone"
            f"{f' ({listed})' if listed else ''}: restore one, or move them away to begin anew"
        )
    return NOTHING_FOUND


def _search(directory: Path, ranks: RankGroup) -> tuple[Survey, bool]:
    """What is there now, and whether some of it was removed meanwhile. Collective."""
    damaged: dict[Path, list[str]] = {}
    has_changed = False
    for path in _read_on_rank_0(directory, ranks, manifests.list_checkpoints):
        try:
            return Survey(verify(path, ranks), damaged), has_changed
        except DamageError as error:
            if _read_on_rank_0(path, ranks, os.path.lexists):
                damaged[path] = error.problems
            else:
                has_changed = True
    return Survey(None, damaged), has_changed


def find_demanded(path: Path, ranks: RankGroup) -> Found:
    """This checkpoint and no other. Collective.

    Raises, on all ranks, CheckpointError if it is not valid, and StorageError if it cannot be read.
    """
    problem = _read_on_rank_0(path, ranks, _look_for)
    if problem:
        raise CheckpointError(problem)
    try:
        return verify(path, ranks)
    except DamageError as error:
        listed = "; ".join(error.problems)
        raise CheckpointError(f"the checkpoint {path} cannot be used: {listed}") from None


def find_valid(path: Path, ranks: RankGroup) -> tuple[Found, Mapping[Path, list[str]]]:
    """This checkpoint; or the newest valid one of a run's directory, or of one of checkpoints.

    Collective; changes nothing. Returns also newer, damaged ones, with their problems. Raises as
    `find_demanded` and `find_newest` do, and CheckpointError if there is no checkpoint.
    """
    if not path.is_dir() or manifests.is_checkpoint(path):
        return find_demanded(path, ranks), {}
    survey = find_newest(manifests.find_directory(path), ranks)
    if survey.newest is None:
        raise CheckpointError(f"expected a checkpoint in {path}, found none")
    return survey.newest, survey.damaged


def _look_for(path: Path) -> str | None:
    """What to say if there is no such checkpoint."""
    if path.is_file():
        return (
            f"the checkpoint {path} is a file: expected a directory; to begin a training with the "
            "weights in a file: --weights"
        )
    if os.path.lexists(path):
        return None
    names = ", ".join(each.name for each in manifests.list_checkpoints(path.parent))
    return f"the checkpoint {path} does not exist; in {path.parent} there is {names or 'none'}"


OTHER_STATE = (
    "go on with the model, optimizer and other parts that were saved, or give these a directory of "
    "their own; for the weights alone: mpiddp export"
)
"""What to do if a checkpoint holds another state than it is to be read into."""


def read_together(found: Found, ranks: RankGroup, read: Callable[[], T]) -> T:
    """What ``read`` returns, which reads a verified checkpoint. Collective.

    Raises, on all ranks if on any, StorageError for an OSError, which was tried again, and
    CheckpointError for whatever else torch raises for shapes, names and contents.
    """
    problem, values = None, list[T]()
    try:
        values.append(read())
    except OSError as error:
        problem = (True, f"rank {ranks.rank} on {describe_failure(error)}")
    except CheckpointError as error:
        problem = (False, str(error))
    except Exception as error:  # What a script's load_state_dict raises.
        reason = " ".join(f"{type(error).__name__}: {error}".removeprefix("ValueError: ").split())
        problem = (False, f"the checkpoint {found.path} does not fit: {reason}; {OTHER_STATE}")
    problems = [each for each in ranks.gather(problem) if each]
    # The lowest rank's; what may succeed next time comes first.
    for is_transient, text in sorted(problems, key=lambda each: not each[0])[:1]:
        if is_transient:
            raise _make_error(found.path, text)
        raise CheckpointError(text)
    return values[0]
