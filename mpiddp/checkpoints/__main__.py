"""``python -m mpiddp checkpoints DIR``: what is in a directory of checkpoints; nothing is changed.

torch is not imported: files are compared with their manifests as bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage.manifest import DamageError, FormatError, Manifest
from mpiddp.checkpoints.storage.owner import UNKNOWN, Owner, read_owner
from mpiddp.errors import CheckpointError, ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.options.fields import Argument
from mpiddp.options.reader import read
from mpiddp.wording import describe_error, describe_size, fold, print_text

DESCRIPTION = """\
Show the checkpoints in DIR: a run's directory, a directory of checkpoints, or one checkpoint. All
files are read and compared with their digests. Nothing is changed.

The exit code is 0 if there is a valid checkpoint, and 5 if there is none."""
VALID = "valid"
HEAD = ("checkpoint", "written", "size", "ranks", "score", "attempt", "state")


@dataclass(frozen=True)
class Entry:
    """A directory that is, was or may become a checkpoint."""

    path: Path
    manifest: Manifest | None = None
    """If there is one that can be used."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot be used, as far as its name and manifest tell."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What is shown."""

    directory: Annotated[Path, Argument("DIR", is_positional=True)]

    quick: bool = False
    """Compare the sizes of files only, not their digests."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of one directory."""
    with FailureHandler():
        options = read(ShowOptions, arguments, "python -m mpiddp checkpoints", DESCRIPTION)
        try:
            show(options.directory, is_quick=options.quick)
        except OSError as error:
            text = f"checkpoints: cannot read {options.directory}: {describe_error(error)}"
            raise ConfigurationError(text) from None


def show(path: Path, *, is_quick: bool) -> None:
    """Print the table, row by row as it becomes known.

    Raises OSError, ConfigurationError if there is no such directory, and CheckpointError if it has
    no valid checkpoint.
    """
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise ConfigurationError(
            f"checkpoints: {path} {what}: give a run's directory, a directory of checkpoints, or "
            "one checkpoint"
        )
    is_one = manifests.is_checkpoint(path)
    directory = path.resolve().parent if is_one else manifests.find_directory(path)
    entries = [_read(path)] if is_one else list(_list(directory))
    if not entries:
        raise CheckpointError(f"expected a checkpoint in {directory}, found none")
    owner = read_owner(directory)
    print_text(
        f"{directory}: {'an unknown owner' if owner in (None, UNKNOWN) else owner.describe()}"
    )
    rows = [_describe(each, owner) for each in entries]
    widths = [max(len(row[place]) for row in (HEAD, *rows)) for place in range(len(HEAD) - 1)]
    _print(HEAD, widths)
    valid = 0
    for each, row in zip(entries, rows, strict=True):
        problems = each.problems or _compare(each, is_quick=is_quick)
        if problems and not each.path.is_dir():
            problems = ["was removed meanwhile"]
        valid += not problems
        good = f"{VALID} by its files' sizes" if is_quick else VALID
        _print((*row, _shorten(problems) or good), widths)
    if not valid:
        raise CheckpointError(f"expected a valid checkpoint in {directory}, found none")


def _list(directory: Path) -> Iterator[Entry]:
    """The newest first, then what is no checkpoint: partial ones, and damaged ones set aside."""
    yield from (_read(path) for path in manifests.list_checkpoints(directory))
    set_aside = manifests.list_damaged(directory)
    for path in sorted(directory.glob("step-*/")):
        if manifests.is_partial(path.name):
            yield Entry(path, problems=["partial: being written or removed, or left over"])
        elif path in set_aside:
            reason = path / manifests.REASON
            lines = list[str]()
            with contextlib.suppress(FileNotFoundError):
                lines = reason.read_text("utf-8", "replace").splitlines()
            yield Entry(path, problems=[f"set aside: {_shorten(lines)}" if lines else "set aside"])


def _read(path: Path) -> Entry:
    try:
        return Entry(path, manifests.read_manifest(path))
    except DamageError as error:
        return Entry(path, problems=[f"damaged: {error}"])
    except FormatError as error:
        return Entry(path, problems=[str(error)])
    except OSError as error:
        return Entry(path, problems=[f"cannot be read: {describe_error(error)}"])


def _describe(entry: Entry, owner: Owner | None) -> tuple[str, ...]:
    """All columns but the last."""
    try:
        dated = entry.path if entry.manifest is None else entry.path / manifests.MANIFEST
        written = f"{datetime.fromtimestamp(dated.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
        size = describe_size(sum(each.stat().st_size for each in entry.path.iterdir()))
    except OSError:
        written, size = "?", "?"
    if entry.manifest is None:
        return entry.path.name, written, size, "", "", ""
    manifest = entry.manifest
    score = "" if manifest.score is None else f"{manifest.score:.6g}"
    is_foreign = owner is not None and owner.token not in ("", manifest.owner)
    attempt = f"{manifest.attempt}{' (of another owner)' if is_foreign else ''}"
    return entry.path.name, written, size, str(manifest.world), score, attempt


def _compare(entry: Entry, *, is_quick: bool) -> list[str]:
    """What is wrong with its files."""
    assert entry.manifest is not None
    try:
        problems = manifests.find_problems(entry.path, entry.manifest, reads=not is_quick)
    except OSError as error:
        return [f"cannot be read: {describe_error(error)}"]
    return [f"damaged: {problems[0]}", *problems[1:]] if problems else []


def _shorten(problems: Sequence[str]) -> str:
    return re.sub("expected digest [0-9a-f]+, found [0-9a-f]+", "has changed", fold(problems))


def _print(row: Sequence[str], widths: Sequence[int]) -> None:
    cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
    print_text("  ".join([*cells, *row[len(widths) :]]).rstrip())


if __name__ == "__main__":
    main()
