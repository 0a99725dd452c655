"""What reaches a host: ssh, or what the user or the scheduler has in its place.

A host must be asked in the way in which mpirun will reach it. Open MPI and MPICH find Grid Engine's
qrsh by themselves (PRRTE, plm_ssh_component.c; Hydra, sge_query_native_int.c; both read in November
2026). OAR wants its oarsh (oar.imag.fr, "Usage of OAR with Open MPI"), LSF has blaunch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mpiddp.front.hosts import schedulers
from mpiddp.launch.launcher.programs import LauncherKind, find_program

SSH = "ssh"


@dataclass(frozen=True)
class Agent:
    """A program that runs a command on a host: its words, then the host, then the command."""

    words: tuple[str, ...] = (SSH,)
    variables: Mapping[str, str] = field(default_factory=dict)
    """By which mpirun is told to use it, if it would not by itself."""

    @property
    def is_ssh(self) -> bool:
        return os.path.basename(self.words[0]) == SSH


USUAL = Agent()


def find_agent(
    kind: LauncherKind, options: Sequence[str], variables: Mapping[str, str] = os.environ
) -> Agent:
    """What ``kind`` is to reach hosts with; ``options``: the user's own for it."""
    for word, value in pairwise(options):
        if word.lstrip("-") in kind.agent_options:
            return _make_agent(value)
    for at, name in enumerate(kind.agents):
        if told := variables.get(name):
            # The later ones are those of its other versions.
            return _make_agent(told, {kind.agents[0]: told} if at else {})
    source = schedulers.find_source(variables)
    program = find_program(source.agent[0]) if source is not None and source.agent else None
    if source is None or program is None:
        return USUAL
    # Open MPI's daemon on another host, which has a different PATH, looks for it, too.
    words = (program, *source.agent[1:])
    names = () if source.is_agent_known else kind.agents[:1]
    return Agent(words, {name: shlex.join(words) for name in names})


def _make_agent(text: str, variables: Mapping[str, str] | None = None) -> Agent:
    """Of ``ssh : rsh`` the first."""
    words = tuple(shlex.split(text.partition(":")[0]))
    return Agent(words or (SSH,), variables or {})
