"""Environment variables that start-up sets for this process and its children, such as data workers.

A launch that is started from such a process, as from a notebook, must not inherit them: a number of
threads that is right for one process is too many for each of its ranks. So MPIDDP_EXPORTED lists
what was set, by which process, and what was there before. A front and a rank put that back first,
unless somebody has changed it since.

Some are for the Python code of this process alone. ``os.environ`` shows them. The process's own
environment, which its children inherit and C libraries such as MPI read, keeps what it has.
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
    inherited: str | None
    """What the children get."""


class ExportedVariables:
    """Environment variables that are set until the session closes."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[str | None, _Entry | None]] = {}

    def export(self, variables: Mapping[str, str], *, own: bool = False) -> None:
        """``own``: for the Python code of this process; children inherit what they would have."""
        entries = _read_own()
        for name in variables:
            self._before.setdefault(name, (os.environ.get(name), entries.get(name)))
        export_for_good(variables, own=own)

    def restore(self) -> None:
        entries = _read_own()
        for name, (value, entry) in self._before.items():
            _put_back(name, value, entry)
            entries.pop(name, None)
            if entry is not None:
                entries[name] = entry
        _write(entries)


def export_for_good(variables: Mapping[str, str], *, own: bool = False) -> None:
    """Set variables for the rest of this process's life."""
    entries = _read_own()
    for name, value in variables.items():
        found, entry = os.environ.get(name), entries.get(name)
        if entry is None or entry.value != found:
            entry = _Entry(value, found, found)
        entries[name] = _Entry(value, entry.before, entry.inherited if own else value)
        _set(name, value, entries[name].inherited)
    _write(entries)


def read_original() -> dict[str, str]:
    """The environment without what start-up has set, here or in a parent: the launcher's word."""
    variables = dict(os.environ)
    variables.pop(environment.EXPORTED, None)
    for name, entry in _read()[1].items():
        if variables.get(name) == entry.value:
            del variables[name]
            if entry.before is not None:
                variables[name] = entry.before
    return variables


@contextlib.contextmanager
def set_meanwhile(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables while the body runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        entries = _read_own()
        for name, found in before.items():
            _put_back(name, found, entries.get(name))


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
            _set(name, entry.before, entry.before)
    if process is not None:
        for name in environment.OF_JOB:
            os.environ.pop(name, None)
    os.environ.pop(environment.EXPORTED, None)
    return process is not None


def forget_launch() -> None:
    """Forget the launcher of this process, which starts ranks on its machine by another one."""
    for name in list(os.environ):
        is_told = name in environment.OF_LAUNCH or name.startswith(environment.OF_LAUNCH_BEGINNINGS)
        is_told |= name in environment.HOST_LISTS
        if is_told and not name.startswith(environment.SETTINGS_BEGINNINGS):
            _set(name, None, None)


def _read_own() -> dict[str, _Entry]:
    process, entries = _read()
    return entries if process == os.getpid() else {}


def _read() -> tuple[int | None, dict[str, _Entry]]:
    """The process that has set variables, and these by name; nothing if the list is damaged."""
    try:
        process, rows = json.loads(os.environ[environment.EXPORTED])
        entries = {str(name): _Entry(*row) for name, row in rows.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None, {}
    texts = [text for entry in entries.values() for text in entry if text is not None]
    return (process, entries) if all(isinstance(text, str) for text in texts) else (None, {})


def _write(entries: Mapping[str, _Entry]) -> None:
    """Note ``entries``; for the children those that reach them.

    What does not, a launcher that this process starts may set to the same value.
    """
    reaching = {
        name: _Entry(entry.inherited, entry.before, entry.inherited)
        for name, entry in entries.items()
        if entry.inherited is not None and entry.inherited != entry.before
    }
    texts = [json.dumps([os.getpid(), rows]) if rows else None for rows in (entries, reaching)]
    _set(environment.EXPORTED, *texts)


def _put_back(name: str, value: str | None, entry: _Entry | None) -> None:
    """Set what was there before, whose ``entry`` says what the children get."""
    is_own = entry is not None and entry.value == value
    _set(name, value, entry.inherited if entry is not None and is_own else value)


def _set(name: str, value: str | None, inherited: str | None) -> None:
    """Set or delete a variable; ``inherited``: what the children get."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
    if inherited == value:
        return
    if inherited is None:
        os.unsetenv(name)
    else:
        os.putenv(name, inherited)
