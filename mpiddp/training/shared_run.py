"""A run that all ranks take part in: rank 0 has its directory, and the others know where it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.plain_weights import check_format
from mpiddp.checkpoints.storage.manifest import CONFIGURATION, make_name
from mpiddp.collectives.tuning import find_table_path, read_table
from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.training.options.config import Configuration, read_toml
from mpiddp.training.options.groups.checkpoints import AUTO
from mpiddp.training.records import run_directory
from mpiddp.training.records.history import METRICS
from mpiddp.training.records.metrics import Row, describe_test
from mpiddp.training.records.metrics_file import read_last_row
from mpiddp.training.records.run_directory import RunDirectory
from mpiddp.training.records.trackers import check_library
from mpiddp.training.resuming import (
    describe_changes,
    find_directory,
    keep_measured,
    list_changed,
    name_values,
)
from mpiddp.training.run_output import say
from mpiddp.training.run_state import DONE, RunEnd, RunState
from mpiddp.wording import count_noun

TUNING = "tuning.json"
"""The tuning table that a run's last attempt had, if it had one."""


@dataclass(frozen=True)
class SharedRun:
    """One rank's part of a run that has begun."""

    opened: RunDirectory | None
    """On rank 0."""
    state: RunState
    failure_handler: FailureHandler

    def leave(self, end: RunEnd = DONE) -> None:
        """Write the outcome, on rank 0."""
        if self.opened is not None:
            self.failure_handler.finish(end.code, end.reason)
            self.opened.close()

    def abandon(self) -> None:
        """Let this process open the run again after an error.

        Other jobs cannot: the run stays locked while the failure handler writes, until the end.
        """
        if self.opened is not None:
            self.opened.abandon()


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended well."""

    row: Row | None
    """Of its last epoch; None if its loop was left within the first one."""
    reason: str
    """Why it has ended."""
    checkpoint: Path
    """Of its last step; not there if the run makes none."""


def find_finished(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> FinishedRun | None:
    """How an earlier job has finished this run; collective.

    None if none has, if it was this job, and unless ``resume`` is "auto".

    Raises ConfigurationError on all ranks if options that decide the result were others.
    """
    answer: Any = None
    if session.world.rank == 0 and configuration.resume == AUTO:
        path = run_directory.find_path(configuration)
        try:
            if path is not None and path not in failure_handler.entered_runs:
                answer = _read_finished(path, configuration)
        except ConfigurationError as error:
            answer = error
    answer = session.broadcast(answer)
    if isinstance(answer, ConfigurationError):
        raise answer
    found: FinishedRun | None = answer
    return found


def _read_finished(path: Path, configuration: Configuration) -> FinishedRun | None:
    outcome = run_directory.find_success(path)
    if outcome is None:
        return None
    try:
        row = read_last_row(path / METRICS)
        before = name_values(Configuration(**read_toml(path / CONFIGURATION)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"the run {path} has finished, but its files cannot be read: {error}; choose another "
            "name"
        ) from error
    values = name_values(keep_measured(configuration, before))
    changed = list_changed(before, values)
    if values["export"] not in (None, before["export"]):
        changed.append("export")
    if changed:
        listed = describe_changes(changed, before, values)
        raise ConfigurationError(
            f"the run {path} has finished with other options ({listed}), and is not overwritten: "
            "choose another name; with resume=PATH it goes on from a checkpoint of this run"
        )
    folder = find_directory(configuration, path)
    return FinishedRun(
        row, str(outcome.get("reason")), folder / make_name(outcome.get("step") or 0)
    )


def describe_finished(finished: FinishedRun, configuration: Configuration) -> str:
    """The console's line on a run that is not trained again."""
    row, found = finished.row, finished.reason
    if row is not None and row.test_loss is not None:
        tested = describe_test(row.test_loss, row.test_metrics or {})
        found = f"{tested} after {count_noun(row.epoch, 'epoch')}"
    path = run_directory.find_path(configuration)
    return f"Finished before: {found} (run directory {path})"


def enter_run(
    configuration: Configuration,
    session: Session,
    failure_handler: FailureHandler,
    taken: int | None = None,
) -> SharedRun:
    """Open the run on rank 0, and tell all ranks and their failure handlers where it is.

    ``taken``: samples of its first epoch that were trained on before; None if it is new.

    Collective. Raises ConfigurationError on all ranks.
    """

    def pause(seconds: float) -> None:
        session.broadcast(None)
        time.sleep(seconds)

    run: RunDirectory | None = None
    answer: Any = None
    if session.world.rank == 0:
        try:
            if configuration.track is not None:
                check_library(configuration.track)
            export = configuration.export
            if export is not None:
                check_format(export, "export")
                if not export.parent.is_dir():
                    raise ConfigurationError(f"export: {export.parent} is no directory")
                if export.is_dir():
                    raise ConfigurationError(f"export: {export} is a directory")
            run = run_directory.open_run(configuration, pause)
            note = keep_table(run.path)
            if note and taken is not None:
                say(session, note)
            answer = (run.path, run.attempt)
        except ConfigurationError as error:
            answer = error
    answer = session.broadcast(answer)
    while answer is None:  # Rank 0 waits for an earlier attempt's lock; the others for rank 0.
        answer = session.broadcast(answer)
    if isinstance(answer, ConfigurationError):
        raise answer
    directory, attempt = answer
    state = RunState(directory, attempt, failure_handler.note_step)
    failure_handler.enter_run(directory, state)
    return SharedRun(run, state, failure_handler)


def keep_table(folder: Path) -> str:
    """Copy the tuning table, if there is one, into the run's directory.

    Returns what to say if an earlier attempt had another one, or none; else nothing. Raises
    ConfigurationError if the table cannot be used or copied.
    """
    kept, path = folder / TUNING, find_table_path()
    try:
        before = kept.read_bytes() if kept.exists() else b""
    except OSError as error:
        raise ConfigurationError(f"runs_dir: cannot read {kept}: {error.strerror}") from None
    if path is None:
        return f"No tuning table, but an earlier attempt had one: {kept}" if before else ""
    table = read_table(path)
    try:
        write_whole(kept, table.text)
    except OSError as error:
        raise ConfigurationError(f"runs_dir: cannot write {kept}: {error.strerror}") from None
    is_same = table.text.encode() == before
    return "" if is_same else f"Another tuning table than before: {table.title}"


@contextmanager
def after_error(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` after an error in the body."""
    try:
        yield
    except GeneratorExit:
        raise  # The script has left its loop; the run ends when the session does.
    except BaseException:
        act()
        raise
