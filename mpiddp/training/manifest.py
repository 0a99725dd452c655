"""``manifest.json``: what a checkpoint consists of, and whether it is all there and unchanged.

Neither torch nor pickle is used here: a checkpoint is verified before anything in it is
interpreted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mpiddp.launch.failure.outcome import write_whole

FORMAT = 1
ALGORITHM = "sha256"
MANIFEST = "manifest.json"
REASON = "reason.txt"
PARTIAL, DAMAGED, REPLACED = "partial", "damaged", "replaced"
"""Last parts of the names of directories that are not, or no longer, checkpoints."""
READ_BYTES = 1 << 20

_NAME = re.compile(rf"step-(\d+)(\.{REPLACED})?")


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
    """Of the digests."""
    sequence: int
    """Counted over all checkpoints of a directory: the newest has the highest."""
    step: int
    attempt: str
    """Who wrote it."""
    world: int
    """Ranks that wrote it."""
    configuration: dict[str, Any]
    """What the state belongs to."""
    configuration_digest: str
    versions: dict[str, str]
    """Of Python and libraries, by name."""
    score: float | None = None
    """Of the test samples, where it was measured at this step: the best one has the highest."""
    files: dict[str, File]
    """By name."""


class DamageError(Exception):
    """A checkpoint that must not be used. ``problems``: one line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


def digest_configuration(configuration: dict[str, Any]) -> str:
    """A digest of values that JSON can hold, whatever their order."""
    text = json.dumps(configuration, sort_keys=True)
    return hashlib.new(ALGORITHM, text.encode()).hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it, and flush it to the disk. Raises OSError."""
    text = json.dumps(asdict(manifest), indent=1)
    digest = hashlib.new(ALGORITHM, text.encode()).hexdigest()
    path = directory / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        # The last line protects the others.
        file.write(f"{text}\n{digest}\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Raises DamageError where there is none, or none that can be relied on."""
    try:
        content = (directory / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamageError([f"{MANIFEST} is missing"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamageError([f"{MANIFEST} cannot be read: {error}"]) from None
    text = content.removesuffix("\n").rpartition("\n")[0]
    if content != f"{text}\n{hashlib.new(ALGORITHM, text.encode()).hexdigest()}\n":
        raise DamageError([f"{MANIFEST} is not what was written"])
    return _interpret(text)


def _interpret(text: str) -> Manifest:
    try:
        values = json.loads(text)
        if (values["format"], values["algorithm"]) != (FORMAT, ALGORITHM):
            found = f"{values['format']} with {values['algorithm']}"
            raise DamageError(
                [f"{MANIFEST}: expected format {FORMAT} with {ALGORITHM}, found {found}"]
            )
        known = {field.name for field in fields(Manifest)}
        files = {name: File(**each) for name, each in values["files"].items()}
        outside = [name for name in files if not _is_plain(name)]
        if outside:
            raise DamageError([f"{MANIFEST} names {outside[0]!r}, which is not a file name"])
        given = {name: value for name, value in values.items() if name in known}
        return Manifest(**{**given, "files": files})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamageError([f"{MANIFEST} has no such contents: {error!r}"]) from None


def _is_plain(name: str) -> bool:
    """Whether it can only be a file in the checkpoint's directory, and shown in a message."""
    is_file_name = name == os.path.basename(name) and name not in ("", ".", "..")
    return is_file_name and name.isprintable()


def find_problems(directory: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """One line for each file that is missing or changed, of every ``parts``-th file from ``part``.

    Files are read as bytes, and all of them: the first problem does not end the search.
    """
    problems = []
    names = sorted(manifest.files)
    if part == 0:
        match = _NAME.fullmatch(directory.name)
        if match and int(match[1]) != manifest.step:
            problems.append(f"{MANIFEST} is of step {manifest.step}")
        extra = sorted(set(os.listdir(directory)) - {MANIFEST, *names})
        problems += [f"{name} does not belong to it" for name in extra]
    for name in names[part::parts]:
        problem = _compare(directory / name, manifest.files[name])
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _compare(path: Path, file: File) -> str:
    digest = hashlib.new(ALGORITHM)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a regular file"
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                return f"expected {file.size} bytes, found {size}"
            while block := stream.read(READ_BYTES):
                digest.update(block)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    found = digest.hexdigest()
    return "" if found == file.digest else f"expected digest {file.digest}, found {found}"


# Directories


def make_name(step: int) -> str:
    return f"step-{step}"


def make_partial_name(step: int, attempt: str) -> str:
    """A name that only this attempt uses: an older one that still writes does no harm."""
    return f"{make_name(step)}.{attempt}.{PARTIAL}"


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, the newest first; damaged ones among them.

    ``step-<n>.replaced`` is one of them where ``step-<n>`` is missing: ``publish`` was interrupted
    between its two renames.

    A checkpoint without a manifest that can be read counts as newer than all others of its step
    and those below: it is looked at first, and found to be damaged.
    """
    found = []
    for path in _list(directory):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not (match[2] and _find_successor(path).exists()):
            found.append((int(match[1]), path))
    sequences = {path: _read_sequence(path) for _, path in found}
    found.sort()
    # One whose manifest is lost stands where its step stands.
    last, order = 0, {}
    for step, path in found:
        sequence = sequences[path]
        last = sequence if sequence is not None else last
        order[path] = (last, sequence is None, step)
    return sorted(order, key=lambda path: order[path], reverse=True)


def _read_sequence(path: Path) -> int | None:
    try:
        return read_manifest(path).sequence
    except DamageError:
        return None


def list_damaged(directory: Path) -> list[Path]:
    """What was set aside."""
    return [path for path in _list(directory) if path.name.endswith(f".{DAMAGED}")]


def set_aside(path: Path, problems: Iterable[str]) -> Path:
    """Rename a damaged checkpoint, with the reason in a file. Raises OSError."""
    target, number = path.with_name(f"{path.name}.{DAMAGED}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.{DAMAGED}")
    path.rename(target)
    sync_directory(path.parent)
    write_whole(target / REASON, "".join(f"{problem}\n" for problem in problems))
    return target


def clean(directory: Path) -> None:
    """Remove what interrupted saves left. Nobody else may write there meanwhile."""
    for path in _list(directory):
        if path.name.endswith(f".{PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(f".{REPLACED}") and _find_successor(path).exists():
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint that is not needed any more. Raises OSError."""
    # Renamed first: half a checkpoint must not look like one.
    gone = path.with_name(f"{path.name}.{PARTIAL}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _find_successor(replaced: Path) -> Path:
    """The checkpoint that takes the place of ``step-<n>.replaced``."""
    return replaced.with_name(replaced.name.removesuffix(f".{REPLACED}"))


def publish(partial: Path, target: Path) -> None:
    """Give a checkpoint that is whole and on the disk its name. Raises OSError."""
    sync_directory(partial)
    old = target.with_name(f"{target.name}.{REPLACED}")
    if target.exists():
        # Of an attempt that resumed from an older one, or started over.
        if old.exists():
            remove(old)
        target.rename(old)
    partial.rename(target)
    sync_directory(target.parent)
    if old.exists():
        remove(old)


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
