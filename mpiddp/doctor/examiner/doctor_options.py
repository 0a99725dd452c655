"""The doctor's command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.launch.options import SECONDS, Options
from mpiddp.launch.script.command_line import FRONT
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import Kind, Outputs, writes
from mpiddp.options.reader import Reader, name_as_typed

DESCRIPTION = """\
Find what is wrong with a launch before training does. Start it as training would be started:

  srun --mpi=pmix python -m mpiddp.doctor
  mpirun -n 4 python -m mpiddp.doctor --output report.json
  python -m mpiddp doctor --hosts a,b --output report.json

Each line is a check: pass, warn, fail, or skip with the reason. The exit code is that of the
first failure in the order 3 (wrong launch), 4 (ranks cannot reach each other), 2 (a directory or
an option), 1 (anything else), and 0 if there are only warnings."""


FINDINGS = Kind("findings", (".json",))


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """What is examined."""

    timeout: Annotated[float, SECONDS] = 60.0
    """Time limit of each stage of the examination. To read torch from a shared file system for the
    first time can take tens of seconds."""

    output: Annotated[Outputs, writes(FINDINGS)] = ()
    """Write all findings."""

    runs_dir: Annotated[Path, Argument("DIR")] = Path("runs")
    """Directory to which runs are to be written."""

    data_dir: Annotated[Path | None, Argument("DIR")] = None
    """Directory of the data, to be compared between nodes."""


def _explain(option: str) -> str | None:
    if option not in FRONT:
        return None
    return f"type python -m mpiddp doctor {option} …: that starts the ranks, and this is one"


READER = Reader(
    program="python -m mpiddp.doctor",
    description=DESCRIPTION,
    groups={"options": DoctorOptions},
    explain=_explain,
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
