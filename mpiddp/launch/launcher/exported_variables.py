"""Environment variables that start-up sets for this process and its children, such as data workers.

A launch that is started from such a process, as from a notebook, must not inherit them: a number of
threads that is right for one process is too many for each of its ranks. So MPIDDP_EXPORTED lists
what was set, by which process, and what was there before. A front and a rank put that back first,
unless somebody has changed it since.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mpiddp import environment


class _Entry(NamedTuple):
    value: str
    before: str | None
    """Outside of the process that has set it; None if it was not set."""


class ExportedVariables:
    """Environment variables that are set until the session closes."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[str | None, _Entry | None]] = {}

    def export(self, variables: Mapping[str, str]) -> None:
        entries = _read_own()
        for name in variables:
            self._before.setdefault(name, (os.environ.get(name), entries.get(name)))
        export_for_good(variables)

    def restore(self) -> None:
        entries = _read_own()
        for name, (value, entry) in self._before.items():
            _set(name, value)
            entries.pop(name, None)
            if entry is not None:
                entries[name] = entry
        _write(entries)


def export_for_good(variables: Mapping[str, str]) -> None:
    """Set variables for the rest of this process's life."""
    entries = _read_own()
    for name, value in variables.items():
        found, entry = os.environ.get(name), entries.get(name)
        is_ours = entry is not None and entry.value == found
        entries[name] = _Entry(value, entry.before if entry is not None and is_ours else found)
        os.environ[name] = value
    _write(entries)


@contextlib.contextmanager
def set_meanwhile(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables while the body runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, found in before.items():
            _set(name, found)


def take(name: str) -> str | None:
    """The value of a variable that is for this process alone, and not for those that it starts."""
    return os.environ.pop(name, None)


def forget_inherited() -> bool:
    """Undo what another process has set for itself, as far as it is unchanged.

    Returns whether there was one: a rank, whose job is not this process's own.
    """
    process, entries = _read()
    if process == os.getpid():
        return False
    for name, entry in entries.items():
        if os.environ.get(name) == entry.value:
            _set(name, entry.before)
    if process is not None:
        for name in environment.OF_JOB:
            os.environ.pop(name, None)
    os.environ.pop(environment.EXPORTED, None)
    return process is not None


def _read_own() -> dict[str, _Entry]:
    process, entries = _read()
    return entries if process == os.getpid() else {}


def _read() -> tuple[int | None, dict[str, _Entry]]:
    """The process that has set variables, and these by name; nothing if the list is damaged."""
    try:
        process, rows = json.loads(os.environ[environment.EXPORTED])
        entries = {str(name): _Entry(value, before) for name, (value, before) in rows.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None, {}
    texts = [text for entry in entries.values() for text in entry if text is not None]
    return (process, entries) if all(isinstance(text, str) for text in texts) else (None, {})


def _write(entries: Mapping[str, _Entry]) -> None:
    _set(environment.EXPORTED, json.dumps([os.getpid(), entries]) if entries else None)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
