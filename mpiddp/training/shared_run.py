"""A run that all ranks take part in: rank 0 has its directory, and the others know where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.training import run_directory
from mpiddp.training.config import Configuration
from mpiddp.training.run_directory import RunDirectory
from mpiddp.training.trackers import check_library


def enter_run(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> tuple[RunDirectory | None, Path]:
    """Open the run on rank 0, and tell all ranks and their failure handlers where it is.

    Returns the opened directory on rank 0, None elsewhere, and its path; collective. Raises
    ConfigurationError on all ranks.
    """
    run: RunDirectory | None = None
    answer: Any = None
    if session.world.rank == 0:
        try:
            if configuration.track is not None:
                check_library(configuration.track)
            export = configuration.export
            if export is not None and not export.parent.is_dir():
                raise ConfigurationError(f"export: {export.parent} is no directory")
            run = run_directory.open_run(configuration)
            answer = (run.path, run.attempt)
        except ConfigurationError as error:
            answer = error
    answer = session.broadcast(answer)
    if isinstance(answer, ConfigurationError):
        raise answer
    failure_handler.enter_run(*answer)
    return run, answer[0]


def leave_run(
    run: RunDirectory | None, failure_handler: FailureHandler, code: int, reason: str
) -> None:
    """Write the outcome, on rank 0."""
    if run is not None:
        failure_handler.finish(code, reason)
        # After a failure the run stays locked while the failure handler writes, until the end.
        run.close()
