"""The doctor's command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.errors import ConfigurationError
from mpiddp.launch.options import SECONDS, Options
from mpiddp.options.fields import Argument, pick
from mpiddp.options.reader import Reader, name_as_typed

DESCRIPTION = """\
Find what is wrong with a launch before training does. Start it as training would be started:

  srun --mpi=pmix python -m mpiddp.doctor
  mpirun -n 4 python -m mpiddp.doctor --json report.json

Each line is a check: pass, warn, fail, or skip with the reason. The exit code is that of the
first failure in the order 3 (wrong launch), 4 (ranks cannot reach each other), 2 (a directory or
an option), 1 (anything else), and 0 if there are only warnings."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """What is examined."""

    timeout: Annotated[float, SECONDS] = 30.0
    """Time limit of each stage of the examination."""

    json: Annotated[Path | None, Argument("FILE")] = None
    """Write all findings as JSON."""

    runs_dir: Annotated[Path, Argument("DIR")] = Path("runs")
    """Directory to which runs are to be written."""

    data_dir: Annotated[Path | None, Argument("DIR")] = None
    """Directory of the data, to be compared between nodes."""


READER = Reader(
    program="python -m mpiddp.doctor",
    description=DESCRIPTION,
    groups={"options": DoctorOptions},
    without=(
        *("lifeline_timeout", "stall_timeout", "bind", "debug"),
        *("log_dir", "console", "label", "quiet"),
    ),
)


def parse(arguments: Sequence[str], *, show_help: bool = True) -> DoctorOptions:
    """Read the command line.

    Raises ConfigurationError for a mistake in it, SystemExit(0) after ``--help``, which prints
    only if ``show_help``.
    """
    with name_as_typed(arguments):
        return pick(DoctorOptions, READER.read(arguments, show_help=show_help))


def check_json(path: Path) -> None:
    """Raise ConfigurationError if the findings could not be written: before anything is asked."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"--json {path}: cannot be written: expected a file in a directory that exists and is "
            "writable"
        )
