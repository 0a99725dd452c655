"""One start of ranks: the launcher's words and variables, and the outcome that a rank leaves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.front.attempt import Files, Launch
from mpiddp.front.job_end import Exit
from mpiddp.front.launch_plan import LaunchPlan
from mpiddp.launch.launcher.hostnames import is_host
from mpiddp.launch.launcher.programs import OTHER, SRUN
from mpiddp.process import job_directory


@dataclass(frozen=True)
class RankStart:
    """One start of ranks: their launcher, what each runs, and the files of what they print."""

    plan: LaunchPlan
    program: Sequence[str]
    files: Files | None

    def run(self, launch: Launch, directory: Path | None, numbers: Mapping[str, str]) -> Exit:
        """``directory``: the job's. ``numbers``: variables of this attempt.

        Raises ConfigurationError if there is no such launcher, or the directory is full.
        """
        variables = {**self.plan.environment(), **numbers}
        if directory is not None:
            token = os.urandom(16).hex()
            try:
                job_directory.begin_attempt(directory, token)
            except OSError as error:
                raise ConfigurationError(
                    f"cannot write to {directory} ({error.strerror}): make room there, or set "
                    f"{environment.STATE_HOME} to another directory"
                ) from None
            variables[environment.JOB_DIRECTORY] = str(directory)
            variables[environment.ATTEMPT_TOKEN] = token
        command = [*self._command(variables), *self.program]
        found = launch.run(command, variables, self.files, offers_input=self._offers_input())
        if directory is None:
            return found
        return replace(found, outcome=job_directory.read_outcome(directory))

    def _offers_input(self) -> bool:
        """Whether rank 0 opens standard input itself: it is on this host, started by an mpirun."""
        layout = self.plan.layout
        is_here = layout is None or is_host(layout.hosts[0], os.uname().nodename)
        # The user may give it to other ranks: --stdin of Open MPI, -s of MPICH.
        options = [word.lstrip("-") for word in self.plan.words if word.startswith("-")]
        is_asked = any(option.partition("=")[0] in ("stdin", "s") for option in options)
        return is_here and not is_asked and self.plan.kind not in (SRUN, OTHER)

    def _command(self, variables: Mapping[str, str]) -> list[str]:
        """The launcher's words."""
        # Each attempt's own, too.
        words = self.plan.make_words({**variables, environment.STANDARD_INPUT: ""})
        if self.files is not None and words[:1] == ["srun"]:
            words += self.files.srun_options()
        return words
