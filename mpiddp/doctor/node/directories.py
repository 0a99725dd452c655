"""Whether the directories of runs and of data are the same from all nodes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mpiddp.doctor.examiner.findings import Finding, failed, passed, skipped, warned
from mpiddp.doctor.node.limits import floor_power
from mpiddp.errors import ConfigurationError
from mpiddp.process.background import BackgroundCall, LateError
from mpiddp.wording import describe_size

T = TypeVar("T")

RUNS = "run directory"
DATA = "data directory"

PATIENCE_SECONDS = 2.0
"""How long a file of another node may take to appear: network file systems cache what is not
there for a moment."""
PAUSE_SECONDS = 0.05
LEAST_FREE = 1 << 30
"""Bytes: checkpoints of a small model."""
MOST_NAMES = 100_000
"""A data directory that holds more is not compared: reading all names takes too long."""
MOST_SIZES = 1_000
"""How many sizes are compared: a network file system is asked for each."""


@dataclass(frozen=True)
class DirectoryFacts:
    is_there: bool
    problem: str = ""
    """What did not work, if something did not."""
    free: int = 0
    """Bytes."""
    listing: str = ""
    """Digest of names and sizes."""
    entries: int = 0
    """How many names the top level holds; with MOST_NAMES + 1 there are more."""


class Token:
    """A small file of rank 0 in the run directory, and that directory if there was none."""

    def __init__(self, folder: Path, content: str) -> None:
        self.path, self._content = token_path(folder, content), content
        self._made: list[Path] = []
        """The innermost first."""

    def put(self) -> None:
        """Raises OSError."""
        folder = self.path.parent
        above = (folder, *folder.parents)
        self._made += itertools.takewhile(lambda path: not path.exists(), above)
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self._content)

    def remove(self) -> None:
        """Take away what was made, except what others have filled meanwhile."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def token_path(folder: Path, content: str) -> Path:
    return folder / f".mpiddp-doctor-{content}"


def put_token(folder: Path, content: str) -> tuple[Token | None, str]:
    """Rank 0's part: the token, or what is wrong. Returns within PATIENCE_SECONDS."""
    token, is_put, is_over = Token(folder, content), threading.Event(), threading.Event()

    def put() -> None:
        token.put()
        is_put.set()
        if is_over.is_set():
            token.remove()

    _, problem = _try(put, PATIENCE_SECONDS, "cannot be written by rank 0: ")
    if problem:
        # What hangs removes it itself, should it come to its end.
        is_over.set()
        if is_put.is_set():
            token.remove()
    return None if problem else token, problem


def look_at_runs(folder: Path, content: str) -> DirectoryFacts:
    """Every node's part: read rank 0's token, write a file, and remove it."""
    look = functools.partial(_look_at_runs, folder, content)
    facts, problem = _try(look, 2 * PATIENCE_SECONDS, "cannot be written: ")
    return facts or DirectoryFacts(False, problem)


def _look_at_runs(folder: Path, content: str) -> DirectoryFacts:
    path = token_path(folder, content)
    end = time.monotonic() + PATIENCE_SECONDS
    while not _holds(path, content):
        if time.monotonic() > end:
            reason = "is not the same as rank 0's" if folder.is_dir() else "is not there"
            return DirectoryFacts(folder.is_dir(), reason)
        time.sleep(PAUSE_SECONDS)
    own = folder / f"{path.name}-{os.uname().nodename}-{os.getpid()}"
    try:
        own.write_text(content)
    finally:
        own.unlink(missing_ok=True)
    return DirectoryFacts(True, free=shutil.disk_usage(folder).free)


def _holds(path: Path, content: str) -> bool:
    try:
        return path.read_text() == content
    except OSError:
        return False


def judge_runs(folder: Path, facts: DirectoryFacts, node_count: int) -> Finding:
    if facts.problem:
        return failed(
            RUNS,
            f"{folder} {facts.problem}",
            "Name a directory on a file system that all nodes share, and that you may write to: "
            "--runs-dir DIR",
            ConfigurationError.exit_code,
        )
    if facts.free < LEAST_FREE:
        return warned(
            RUNS,
            f"{folder} has {describe_size(facts.free)} free, less than {describe_size(LEAST_FREE)}",
            "Checkpoints and metrics may not fit: make room, or name another: --runs-dir DIR",
        )
    free = describe_size(floor_power(facts.free))
    state = "is the same and writable from every node" if node_count > 1 else "is writable"
    return passed(RUNS, f"{folder} {state}, at least {free} free")


def look_at_data(folder: Path | None) -> DirectoryFacts | None:
    """List the data directory; None if none was named. Returns within PATIENCE_SECONDS."""
    if folder is None:
        return None
    facts, problem = _try(functools.partial(_list, folder), PATIENCE_SECONDS)
    return facts or DirectoryFacts(False, problem)


def _list(folder: Path) -> DirectoryFacts:
    with os.scandir(folder) as entries:
        found = list(itertools.islice(entries, MOST_NAMES + 1))
    if len(found) > MOST_NAMES:
        return DirectoryFacts(True, entries=len(found))
    # File systems list names in different orders.
    found.sort(key=lambda entry: entry.name)
    rows = [
        (entry.name, entry.stat().st_size if index < MOST_SIZES and entry.is_file() else -1)
        for index, entry in enumerate(found)
    ]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    return DirectoryFacts(True, listing=digest, entries=len(found))


def judge_data(
    folder: Path | None, facts: DirectoryFacts | None, first: DirectoryFacts | None
) -> Finding:
    """The data directory from one node, compared with that of rank 0's node.

    Only its top level is compared, and contents are not.
    """
    if folder is None or facts is None or first is None:
        return skipped(DATA, "none was named (--data-dir DIR)")
    if not facts.is_there:
        return failed(
            DATA,
            f"{folder}: {facts.problem}",
            "Name a directory that every node has: --data-dir DIR",
            ConfigurationError.exit_code,
        )
    if facts.listing != first.listing:
        return warned(
            DATA,
            f"{folder} holds {_count(facts)}, of other names or sizes than on rank 0's node "
            f"({_count(first)} there)",
            "Copy the data again to every node's disk, or use a file system that they share",
        )
    if facts.entries > MOST_NAMES:
        return passed(DATA, f"{folder} is there, and holds {_count(facts)}: not compared")
    compared = "names and sizes"
    if facts.entries > MOST_SIZES:
        compared = f"all names, and the sizes of the first {MOST_SIZES}"
    return passed(DATA, f"{folder} holds the same {_count(facts)} on every node ({compared})")


def _count(facts: DirectoryFacts) -> str:
    if facts.entries > MOST_NAMES:
        return f"more than {MOST_NAMES} entries at its top level"
    return f"{facts.entries} entr{'y' if facts.entries == 1 else 'ies'} at its top level"


def _try(work: Callable[[], T], seconds: float, what: str = "") -> tuple[T | None, str]:
    """What ``work`` returns, or a problem; ``what`` begins a file system's refusal."""
    try:
        return BackgroundCall(work).finish(seconds), ""
    except LateError:
        return None, f"does not answer within {PATIENCE_SECONDS:g} s (is its file server gone?)"
    except OSError as error:
        return None, f"{what}{error.strerror or error}"
