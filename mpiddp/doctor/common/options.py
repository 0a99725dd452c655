"""The doctor's command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import ConfigurationError
from mpiddp.launch.script.arguments import make_parser, read_options
from mpiddp.launch.session import Options

DESCRIPTION = """\
Find what is wrong with a launch before training does. Start it as training would be started:

  srun --mpi=pmix python -m mpiddp.doctor
  mpirun -n 4 python -m mpiddp.doctor --json report.json

Each line is a check: pass, warn, fail, or skip with the reason. The exit code is that of the
first failure in the order 3 (wrong launch), 4 (ranks cannot reach each other), 2 (a directory or
an option), 1 (anything else), and 0 if there are only warnings."""

DEFAULT_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    launch: Options
    json: Path | None = None
    """Where rank 0 writes the findings."""
    runs_dir: Path = Path("runs")
    data_dir: Path | None = None


def parse(arguments: Sequence[str], *, show_help: bool = True) -> Settings:
    """Read the command line.

    Raises ConfigurationError for a mistake in it, SystemExit(0) after ``--help``, which prints
    only if ``show_help``.
    """
    parser = make_parser("python -m mpiddp.doctor", DESCRIPTION)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all findings there, for machines")
    add(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where runs are to be written (default: %(default)s)",
    )
    add("--data-dir", type=Path, metavar="DIR", help="where the data is, to be compared")
    add("--backend", default="auto", metavar="NAME", help="auto, nccl or gloo (default: auto)")
    parser.add_launch_options(DEFAULT_SECONDS, "stage of the examination")
    values = parser.read(arguments, show_help=show_help)
    return Settings(read_options(values), values.json, values.runs_dir, values.data_dir)


def check_json(path: Path) -> None:
    """Raise ConfigurationError if the findings could not be written: before anything is asked."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"--json {path}: cannot be written: expected a file in a directory that exists and is "
            "writable"
        )
