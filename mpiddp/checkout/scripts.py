"""``python -m mpiddp jobs DIR``: writes the job scripts, for an installation without a checkout."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.options.fields import Argument
from mpiddp.options.reader import read
from mpiddp.wording import print_text

DESCRIPTION = """\
Write the job scripts to DIR: run.sbatch, train.sbatch, sweep.sbatch, benchmark.sbatch, chain.sh,
stage.sh, local.sh, and what they share. The head of each says how it is used.

They run in the active environment if it has mpiddp, torch and mpi4py, else in that of the Python
which wrote them; its path is in DIR/python.txt. If DIR was written by this command, its files are
replaced."""
SCRIPTS = Path(__file__).parent / "jobs"
PYTHON = "python.txt"
"""Holds the path of the Python that has mpiddp; ``environment.sh`` reads it."""


@dataclass(frozen=True, kw_only=True)
class ScriptsOptions:
    """Where the job scripts are written to."""

    directory: Annotated[Path, Argument("DIR", is_positional=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the job scripts."""
    with FailureHandler():
        directory = read(ScriptsOptions, arguments, "python -m mpiddp jobs", DESCRIPTION).directory
        names = write_scripts(directory)
    print_text(f"Written to {directory}: {', '.join(names)}; they use {sys.executable}")


def write_scripts(directory: Path) -> list[str]:
    """Copy the scripts, and return their names.

    Raises ConfigurationError if DIR holds anything else, or cannot be written.
    """
    sources = sorted((*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()) and not (directory / PYTHON).exists():
            raise ConfigurationError(
                f"jobs: {directory} is not empty, and this command did not write what is in it: "
                "name a new directory"
            )
        (directory / PYTHON).write_text(f"{sys.executable}\n")
        for source in sources:
            shutil.copyfile(source, directory / source.name)
    except OSError as error:
        raise ConfigurationError(f"jobs: cannot write {directory}: {error.strerror}") from None
    return [source.name for source in sources]


if __name__ == "__main__":
    main()
