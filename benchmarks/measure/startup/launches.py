"""What ``python -m benchmarks startup`` compares: the command lines, all with like settings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure.launching import launchers
from benchmarks.measure.launching.launchers import BASELINES, Mpirun, choose_port
from benchmarks.measure.launching.processes import STAMP, Program
from benchmarks.measure.launching.srun import Srun
from benchmarks.records.environment import ROOT, clean_environment

SCRIPT = str(BASELINES / "first_all_reduce.py")
OWN_SCRIPT = str(BASELINES / "session_all_reduce.py")
IMPORT = str(BASELINES / "import_torch.py")
PRINT = "-"
"""In place of STAMP: the scripts print what they know, since no file is the same everywhere."""

MPIDDP = "mpiddp"
MPIDDP_TUNED = "mpiddp, tuned MPI"
FRONT = "mpiddp -n"
SESSION = "mpiddp.init()"
SESSION_TUNED = "mpiddp.init(), tuned MPI"
TORCHRUN = "torchrun"
TORCHRUN_STATIC = "torchrun, static"
FLOOR = "import torch"
HELP = "mpiddp.train --help"
PYTHON = "python -c pass"


@dataclass(frozen=True)
class Launch:
    name: str
    kind: str
    """``mpiddp``, ``torchrun``, ``floor`` or ``help``."""
    program: Program
    about: str
    tuned: Mapping[str, str] = field(default_factory=dict)
    """Variables that tune MPI; the others are the same for all."""

    def describe(self) -> str:
        program, *words = self.program.command
        shown = [f"{name}={value}" for name, value in self.tuned.items()]
        names = [Path(program).name, *(word.removeprefix(f"{ROOT}/") for word in words)]
        for word, name in zip(self.program.command, names, strict=True):
            shown.append("python" if word == sys.executable else name)
        return shlex.join(shown)


def list_contenders(ranks: int, mpirun: Mpirun) -> list[Launch]:
    """All contenders for one number of ranks. Without tuned variables, the tuned are left out."""
    plain = clean_environment(mpirun.variables(ranks))
    tuned = {**plain, **mpirun.tuned}
    start = (*mpirun.command(ranks), sys.executable)
    unchanged = (*start, "-m", "mpiddp", SCRIPT, STAMP)
    about = "a script written for torchrun, unchanged"
    found = [Launch(MPIDDP, "mpiddp", Program(unchanged, plain), f"{about}; MPI's defaults")]
    if mpirun.tuned:
        own = Program((*start, OWN_SCRIPT, STAMP), tuned)
        session = "a script that uses mpiddp's session"
        found += [
            Launch(MPIDDP_TUNED, "mpiddp", Program(unchanged, tuned), about, mpirun.tuned),
            Launch(SESSION_TUNED, "mpiddp", own, session, mpirun.tuned),
        ]
    front = (sys.executable, "-m", "mpiddp", "-n", str(ranks), "--launcher", str(mpirun.program))
    return [
        *found,
        Launch(FRONT, "mpiddp", Program((*front, SCRIPT, STAMP), tuned),
                  "the same script and settings; mpiddp starts mpirun", mpirun.tuned),
        *_list_others(ranks),
    ]  # fmt: skip


def _list_others(ranks: int) -> list[Launch]:
    plain = clean_environment()
    torchrun = (*launchers.TORCHRUN, "--nproc-per-node", str(ranks))
    # torchrun's default rendezvous waits for a random time of up to 0.3 s. The static one does
    # not, but needs a port.
    static = ("--master-addr", "127.0.0.1", "--master-port", str(choose_port()))
    fast = (*static, "--monitor-interval", "0.01")
    return [
        Launch(TORCHRUN, "torchrun", Program((*torchrun, SCRIPT, STAMP), plain),
                  "the same script; torchrun's defaults"),
        Launch(TORCHRUN_STATIC, "torchrun", Program((*torchrun, *fast, SCRIPT, STAMP), plain),
                  "the same script; torchrun's fastest settings"),
        Launch(FLOOR, "floor", Program((sys.executable, IMPORT), plain, copies=ranks),
                  "as many processes at once as ranks, which import torch and end"),
    ]  # fmt: skip


def list_on_cluster(ranks: int, srun: Srun) -> list[Launch]:
    environment = srun.environment()
    ours = (*srun.command(ranks), sys.executable)
    alone = (*srun.command_without_mpi(ranks), sys.executable, IMPORT)
    each = ranks // srun.nodes
    per_node = (*srun.command_without_mpi(srun.nodes, cores=each), launchers.TORCHRUN_PER_NODE)
    settings = (sys.executable, str(each), str(choose_port()), SCRIPT, PRINT)

    def make(name: str, kind: str, command: tuple[str, ...], about: str) -> Launch:
        return Launch(name, kind, Program(command, environment, reaches_out=True), about)

    same = "the same script; one torchrun per node"
    return [
        make(MPIDDP, "mpiddp", (*ours, "-m", "mpiddp", SCRIPT, PRINT),
             "a script written for torchrun, unchanged"),
        make(SESSION, "mpiddp", (*ours, OWN_SCRIPT, PRINT), "a script that uses mpiddp's session"),
        make(TORCHRUN, "torchrun", (*per_node, "default", *settings),
             f"{same}, c10d rendezvous at the first node"),
        make(TORCHRUN_STATIC, "torchrun", (*per_node, "static", *settings),
             f"{same}, torchrun's fastest settings"),
        make(FLOOR, "floor", alone, "as many tasks as ranks, which import torch and end"),
    ]  # fmt: skip


def list_helps() -> list[Launch]:
    """How long the trainer's ``--help`` takes, and what Python alone takes of it."""
    plain = clean_environment()
    train = (sys.executable, "-m", "mpiddp.train", "--help")
    alone = (sys.executable, "-c", "pass")
    return [
        Launch(HELP, "help", Program(train, plain), "one process, no launcher"),
        Launch(PYTHON, "floor", Program(alone, plain), "Python alone"),
    ]
