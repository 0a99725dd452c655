"""``python -m mpiddp stacks``: where each rank of a running job is, and whom the others wait for.

Equal positions are shown once, with the ranks that are there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.lifeline.requests import gather_stacks
from mpiddp.lifeline.stacks.verdict import describe
from mpiddp.options.fields import Argument
from mpiddp.options.reader import read
from mpiddp.process import job_directory
from mpiddp.process.publication import ADDRESS_FILE
from mpiddp.wording import count_noun, print_text

DESCRIPTION = """\
Show where each rank of a running job is: the innermost line of the script, and the function that it
has called. It works while ranks are inside C libraries.

JOB is the id of a Slurm job, or a name that this command has listed; DIR is what --log-dir named.
Without either it is the only job that runs."""


def find_directory(name: str | None) -> Path:
    """Where a job has published its address. Raises ConfigurationError if there is none."""
    if name is not None and (Path(name) / ADDRESS_FILE).exists():
        return Path(name)
    found = job_directory.list_running()
    running = {path.name: path for path in found if (path / ADDRESS_FILE).exists()}
    listed = f"running here: {', '.join(sorted(running)) or 'none'}"
    if name is not None:
        if name not in running and Path(name).is_dir():
            raise ConfigurationError(f"no job that runs writes its logs to {name!r}; {listed}")
        if name not in running:
            raise ConfigurationError(f"no job {name!r}, and no directory of its logs; {listed}")
        return running[name]
    if found and not running:
        raise ConfigurationError(
            f"{count_noun(len(found), 'job')} of yours on this machine, but none whose ranks have "
            "found each other: until then there are no stacks"
        )
    if not running:
        raise ConfigurationError(
            "no job of yours runs on this machine: type the command on a node of the job, or give "
            "it the directory that --log-dir named"
        )
    if len(running) > 1:
        lines = ", or ".join(f"mpiddp stacks {shlex.quote(name)}" for name in sorted(running))
        raise ConfigurationError(f"{count_noun(len(running), 'job')} run here: type {lines}")
    return next(iter(running.values()))


@dataclass(frozen=True, kw_only=True)
class StacksOptions:
    """What is shown."""

    job: Annotated[str | None, Argument("JOB|DIR", is_positional=True)] = None

    full: bool = False
    """Show whole stacks, innermost first."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of one job."""
    with FailureHandler():
        options = read(StacksOptions, arguments, "python -m mpiddp stacks", DESCRIPTION)
        directory = find_directory(options.job)
        positions = gather_stacks(directory)
    hosts = count_noun(len({position.hostname for position in positions}), "host")
    print_text(f"{directory.name}: {count_noun(len(positions), 'rank')} on {hosts}")
    print_text(describe(positions, is_full=options.full).removesuffix("\n"))


if __name__ == "__main__":
    main()
