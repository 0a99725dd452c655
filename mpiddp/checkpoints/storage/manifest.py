"""``manifest.json``: what a checkpoint consists of, and whether it is all there and unchanged.

Neither torch nor pickle is used here: a checkpoint is verified before anything in it is
interpreted. A problem of its contents (DamageError) is told from an error of reading (OSError),
which says nothing about them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mpiddp.errors import CheckpointError, ContentError
from mpiddp.files import decode, read_toml, read_whole, write_whole
from mpiddp.wording import describe_error, print_message

if TYPE_CHECKING:
    import xxhash

FORMAT = 2
ALGORITHM = "xxh3-128"
MANIFEST = "manifest.json"
REASON = "reason.txt"
PARTIAL, DAMAGED, REPLACED = "partial", "damaged", "replaced"
"""Last parts of the names of directories that are not, or no longer, checkpoints."""
CONFIGURATION = "config.toml"
CHECKPOINTS = "checkpoints"
"""What a run's directory holds: its options, and its checkpoints unless these say otherwise."""
READ_BYTES = 1 << 20
PATIENCE_SECONDS = 70.0
"""A client of NFS may use what it has cached of a directory for 60 s."""
MOST_TIMES = 10
"""Limit of all waits together, in multiples of PATIENCE_SECONDS, while many files are read."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries."""

T = TypeVar("T")

_STEP = "step-(0|[1-9][0-9]*)"
_NAME = re.compile(rf"{_STEP}(\.{REPLACED})?")
_PARTIAL_NAME = re.compile(rf"{_STEP}(\.[A-Za-z0-9_-]+)?\.{PARTIAL}")
_NOT_FINITE = re.compile(r'("score": )-?(?:NaN|Infinity)')
"""A score that counts for nothing."""
_DAMAGED_NAME = re.compile(rf"{_STEP}(\.{REPLACED})?(\.[0-9]+)?\.{DAMAGED}")


@dataclass(frozen=True)
class File:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    digest: str
    """Of its bytes, in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``manifest.json`` says."""

    format: int = FORMAT
    algorithm: str = ALGORITHM
    """Of the files' digests."""
    sequence: int
    """Counted over all checkpoints of a directory: the newest has the highest."""
    step: int
    attempt: str
    """Who wrote it."""
    owner: str
    """Token of the directory's owner then (`mpiddp.checkpoints.storage.owner`)."""
    world: int
    """Ranks that wrote it."""
    configuration: dict[str, Any]
    """What the state belongs to."""
    versions: dict[str, str]
    """Of Python and libraries, by name."""
    job: str | None = None
    """Id of the Slurm job that wrote it."""
    front: str | None = None
    """The directory of the front that started the job's ranks; no other front has it."""
    score: float | None = None
    """Of the test samples, if it was measured at this step: the best one has the highest."""
    files: dict[str, File]
    """By name."""


@dataclass(frozen=True)
class ManifestFormat:
    """What other releases' manifests say, too."""

    format: int
    algorithm: str


class DamageError(Exception):
    """A checkpoint that must not be used. ``problems``: one line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


class Patience:
    """Repeats a read that fails with an OSError, for PATIENCE_SECONDS.

    One line on stderr says so. A successful read resets the time. All waits together last at most
    MOST_TIMES times PATIENCE_SECONDS.
    """

    def __init__(self, rank: int | None = None) -> None:
        """``rank``: this process's rank, for that line."""
        name = "" if rank is None else f"rank {rank} "
        self._who = f"{name}on {socket.gethostname()}"
        self._end: float | None = None
        """When this wait ends; None unless one has begun."""
        self._last: float | None = None
        """When all waits end; None before the first."""

    def read(self, work: Callable[..., T], *arguments: Any) -> T:
        """What ``work(*arguments)`` returns. Raises the last OSError once the time is over."""
        while True:
            try:
                found = work(*arguments)
            except OSError as error:
                if not self.wait(describe_error(error)):
                    raise
            else:
                self._end = None
                return found

    def wait(self, reason: str) -> bool:
        """Sleep a while; False if the time is over."""
        now = time.monotonic()
        if self._last is None:
            self._last = now + MOST_TIMES * PATIENCE_SECONDS
            waited = f"trying again for up to {PATIENCE_SECONDS:g} s"
            print_message(f"{self._who}: {reason}: {waited}")
        if self._end is None:
            self._end, self._pause = min(now + PATIENCE_SECONDS, self._last), FIRST_PAUSE
        if now >= self._end:
            return False
        time.sleep(min(self._pause, self._end - now))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return True


def make_digest() -> xxhash.xxh3_128:
    """A digest by ALGORITHM: as quick as memory, it finds damage and mix-ups, but no forgery."""
    import xxhash  # The trainer's --help needs none.

    return xxhash.xxh3_128()


class FormatError(CheckpointError):
    """A checkpoint in another format than this release's; it may be whole."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it, and flush it to the disk. Raises OSError."""
    text = json.dumps(asdict(manifest), indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = directory / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        # The last line protects the others.
        file.write(f"{text}\n{digest}\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Raises DamageError if there is none, or none that can be relied on, FormatError, OSError."""
    return interpret(directory, read_text(directory))


def read_text(directory: Path) -> str:
    """What the file holds. Raises DamageError, or OSError if it cannot be read."""
    path = directory / MANIFEST
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DamageError([f"{MANIFEST} is not a regular file"])
        return read_whole(path).decode()
    except (FileNotFoundError, NotADirectoryError):
        raise DamageError([f"{MANIFEST} is missing"]) from None
    except ValueError as error:
        raise DamageError([f"{MANIFEST} cannot be read: {error}"]) from None


def interpret(directory: Path, content: str) -> Manifest:
    """The manifest of the checkpoint in ``directory``. Raises DamageError or FormatError."""
    text = content.removesuffix("\n").rpartition("\n")[0]
    if content != f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n":
        raise DamageError([f"{MANIFEST} is not what was written"])
    try:
        found = decode(text, ManifestFormat)
        if found != ManifestFormat(FORMAT, ALGORITHM):
            raise FormatError(
                f"the checkpoint {directory} has format {found.format} with {found.algorithm}, and "
                f"this mpiddp reads format {FORMAT} with {ALGORITHM}: use the release that wrote "
                "it, or another directory"
            )
        manifest = decode(_NOT_FINITE.sub(r"\1null", text), Manifest)
    except ContentError as error:
        raise DamageError([f"{MANIFEST}: {error}"]) from None
    outside = [name for name in manifest.files if not _is_plain(name)]
    if outside:
        raise DamageError([f"{MANIFEST} names {outside[0]!r}, which is not a file name"])
    return manifest


def _is_plain(name: str) -> bool:
    """Whether it can only be a file in the checkpoint's directory, and shown in a message."""
    is_file_name = name == os.path.basename(name) and name not in ("", ".", "..")
    return is_file_name and name.isprintable()


def find_problems(
    directory: Path, manifest: Manifest, names: Iterable[str] | None = None, *, reads: bool = True
) -> list[str]:
    """One line for each thing that is missing or changed. Raises OSError if one cannot be read.

    Files are read as bytes, and all of them, or those of these ``names``: the first problem does
    not end the search. Without ``reads`` only their sizes are compared.
    """
    problems = _find_misfits(directory, manifest)
    for name in sorted(manifest.files if names is None else names):
        problem = compare(directory / name, manifest.files[name], reads=reads)
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _find_misfits(directory: Path, manifest: Manifest) -> list[str]:
    """What the directory's own name and its list of files tell. Raises OSError."""
    problems = []
    match = _NAME.fullmatch(directory.name)
    if match and int(match[1]) != manifest.step:
        problems.append(f"{MANIFEST} is of step {manifest.step}")
    try:
        extra = sorted(set(os.listdir(directory)) - {MANIFEST, *manifest.files})
    except FileNotFoundError:
        return [*problems, "it was removed"]
    return problems + [f"{name} does not belong to it" for name in extra]


def compare(path: Path, file: File, *, reads: bool = True) -> str:
    """How a file differs from what was written, empty if it does not; or its size alone.

    Raises OSError if it is there and cannot be read.
    """
    digest = make_digest()
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a regular file"
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                return f"expected {file.size} bytes, found {size}"
            if not reads:
                return ""
            while block := stream.read(READ_BYTES):
                digest.update(block)
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    found = digest.hexdigest()
    return "" if found == file.digest else f"expected digest {file.digest}, found {found}"


# Directories


def make_name(step: int) -> str:
    return f"step-{step}"


def make_partial_name(step: int, attempt: str) -> str:
    """A name that only this attempt uses: an older one that still writes does no harm."""
    return f"{make_name(step)}.{attempt}.{PARTIAL}"


def is_checkpoint(path: Path) -> bool:
    """Whether it is, by its name or contents, one checkpoint, and no directory of them."""
    patterns = (_NAME, _PARTIAL_NAME, _DAMAGED_NAME)
    is_named = any(pattern.fullmatch(path.name) for pattern in patterns)
    return is_named or (path / MANIFEST).exists()


def find_directory(path: Path) -> Path:
    """The directory of a run's checkpoints; ``path`` itself if it is no run's directory."""
    inside = path / CHECKPOINTS
    if inside.is_dir():
        return inside
    with suppress(OSError, ValueError):
        elsewhere = read_toml(path / CONFIGURATION).get("checkpoint_dir")
        if isinstance(elsewhere, str):
            return Path(elsewhere)
    return path


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, the newest first; damaged ones among them.

    ``step-<n>.replaced`` is one of them if ``step-<n>`` is missing: ``publish`` was interrupted
    between its two renames.

    A checkpoint without a manifest that can be used counts as newer than all others of its step
    and those below: it is looked at first, and found to be damaged. What is removed or renamed
    meanwhile is left out. Raises OSError.
    """
    found = []
    for path in _list(directory):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not (match[2] and _find_successor(path).exists()):
            found.append((int(match[1]), path))
    manifests = {path: read_or_none(path) for _, path in found}
    found.sort()
    # One whose manifest is lost comes after those of lower steps.
    last, order = 0, {}
    for step, path in found:
        manifest = manifests[path]
        if manifest is None and not path.is_dir():
            continue
        last = last if manifest is None else manifest.sequence
        order[path] = (last, manifest is None, step)
    return sorted(order, key=lambda path: order[path], reverse=True)


def read_or_none(path: Path) -> Manifest | None:
    """The manifest of a checkpoint, if there is one to use. Raises OSError."""
    try:
        return read_manifest(path)
    except (DamageError, FormatError):
        return None


def list_damaged(directory: Path) -> list[Path]:
    """What was set aside. Raises OSError."""
    return [path for path in _list(directory) if _DAMAGED_NAME.fullmatch(path.name)]


def set_aside(path: Path, problems: Iterable[str]) -> Path:
    """Rename a damaged checkpoint, with the reason in a file if there is room. Raises OSError."""
    target, number = path.with_name(f"{path.name}.{DAMAGED}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.{DAMAGED}")
    path.rename(target)
    sync_directory(path.parent)
    # On a full disk the older checkpoint must be of use all the same.
    with suppress(OSError):
        write_whole(target / REASON, "".join(f"{problem}\n" for problem in problems))
    return target


def is_partial(name: str) -> bool:
    """Whether it is the name of a checkpoint that is being written or removed."""
    return _PARTIAL_NAME.fullmatch(name) is not None


def clean(directory: Path, owner: str) -> None:
    """Remove what interrupted saves of ``owner`` left. Nobody else may write there meanwhile.

    All is tried; raises the first OSError.
    """
    names = [path for path in _list(directory) if is_partial(path.name)]
    partial = [path for path in names if path.is_dir() and not path.is_symlink()]
    _try_all(_remove_tree, partial)
    _try_all(lambda path: remove(path, owner), _list_replaced(directory))


def prune(directory: Path, owner: str, keep: int) -> None:
    """Remove the checkpoints of ``owner`` but the newest ones, and the one with the highest score.

    NaN is no score: it is neither higher nor lower than another. All is tried; raises the first
    OSError.
    """
    found = [
        (path, manifest)
        for path in list_checkpoints(directory)
        if (manifest := read_or_none(path)) is not None and manifest.owner == owner
    ]
    kept = {path for path, _ in found[:keep]}
    measured = [
        (each.score, path)
        for path, each in found
        if each.score is not None and not math.isnan(each.score)
    ]
    if measured:
        # The newest of those that are equally good.
        kept.add(max(measured, key=lambda each: each[0])[1])
    old = [path for path, _ in found if path not in kept]
    _try_all(lambda path: remove(path, owner), [*old, *_list_replaced(directory)])


def _list_replaced(directory: Path) -> list[Path]:
    """Checkpoints whose place another one has taken."""
    return [
        path
        for path in _list(directory)
        if (match := _NAME.fullmatch(path.name)) and match[2] and _find_successor(path).exists()
    ]


def _try_all(work: Callable[[Path], None], paths: Iterable[Path]) -> None:
    errors: list[OSError] = []
    for path in paths:
        try:
            work(path)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def remove(path: Path, owner: str) -> None:
    """Remove a checkpoint of ``owner``; another one's is left alone. Raises OSError."""
    manifest = read_or_none(path)
    if manifest is None or manifest.owner != owner:
        return
    # Renamed first: half a checkpoint must not look like one. To a name that nobody has: what a
    # reader holds open on NFS may have kept an earlier one from going.
    gone = path.with_name(make_partial_name(manifest.step, f"removed-{secrets.token_hex(4)}"))
    path.rename(gone)
    _remove_tree(gone)


def _remove_tree(path: Path) -> None:
    """Remove all that can be. Raises the first OSError."""
    errors: list[OSError] = []

    def note(_: object, name: str, found: Any) -> None:
        if not isinstance(found[1], FileNotFoundError):
            errors.append(found[1])

    shutil.rmtree(path, onerror=note)
    if errors:
        raise errors[0]


def _find_successor(replaced: Path) -> Path:
    """The checkpoint that takes the place of ``step-<n>.replaced``."""
    return replaced.with_name(replaced.name.removesuffix(f".{REPLACED}"))


def publish(partial: Path, target: Path, owner: str) -> None:
    """Give a checkpoint that is whole and on the disk its name. Raises OSError.

    What has the name already is replaced if it is of ``owner`` too, and set aside if it is damaged.
    """
    sync_directory(partial)
    old = target.with_name(f"{target.name}.{REPLACED}")
    if os.path.lexists(target) and _may_replace(target, owner):
        # Of an attempt that resumed from an older one, or started over.
        if old.exists():
            remove(old, owner)
        target.rename(old)
    partial.rename(target)
    sync_directory(target.parent)


def _may_replace(target: Path, owner: str) -> bool:
    """False if nothing is there any more. Raises FileExistsError for another one's."""
    try:
        found = read_manifest(target).owner
    except FormatError:
        found = ""
    except DamageError as error:
        set_aside(target, error.problems)
        return False
    if found != owner:
        text = "was written by another owner, and is not replaced: move it away"
        raise FileExistsError(errno.EEXIST, text, str(target))
    return True


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
