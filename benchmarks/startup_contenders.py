"""What ``python -m benchmarks startup`` compares: the command lines, all with like settings."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launchers import ROOT, Mpirun, clean_environment
from benchmarks.processes import STAMP, Program

BASELINES = Path(__file__).parent / "baselines"
SCRIPT = str(BASELINES / "first_all_reduce.py")
OWN_SCRIPT = str(BASELINES / "session_all_reduce.py")
IMPORT = str(BASELINES / "import_torch.py")

MPIDDP = "mpiddp"
MPIDDP_TUNED = "mpiddp, tuned MPI"
SESSION_TUNED = "mpiddp.init(), tuned MPI"
TORCHRUN = "torchrun"
TORCHRUN_STATIC = "torchrun, static"
FLOOR = "import torch"
HELP = "mpiddp.train --help"
PYTHON = "python -c pass"


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    program: Program
    about: str

    def describe(self) -> str:
        """The command line and the variables that set it apart, without this machine's paths."""
        short = {sys.executable: "python", str(ROOT / "benchmarks"): "benchmarks"}
        words = [os.path.relpath(w, ROOT) if w.startswith(str(ROOT)) else w
                 for w in self.program.command]
        words = [short.get(word, word) for word in words]
        if os.path.isabs(words[0]):
            words[0] = os.path.basename(words[0])
        return shlex.join(words)


def list_contenders(ranks: int, mpirun: Mpirun) -> list[Contender]:
    """All contenders for one number of ranks. Without tuned variables, the tuned are left out."""
    plain = clean_environment(mpirun.variables(ranks))
    tuned = {**plain, **mpirun.tuned}
    start = (*mpirun.command(ranks), sys.executable)
    found = [
        Contender(
            MPIDDP,
            Program((*start, "-m", "mpiddp", SCRIPT, STAMP), plain),
            "a script written for torchrun, unchanged; MPI's default settings",
        )
    ]
    if mpirun.tuned:
        found += [
            Contender(
                MPIDDP_TUNED,
                Program((*start, "-m", "mpiddp", SCRIPT, STAMP), tuned),
                "the same script, " + " ".join(f"{k}={v}" for k, v in mpirun.tuned.items()),
            ),
            Contender(
                SESSION_TUNED,
                Program((*start, OWN_SCRIPT, STAMP), tuned),
                "a script that uses mpiddp's session, the same variables",
            ),
        ]
    return [*found, *_list_others(ranks)]


def _list_others(ranks: int) -> list[Contender]:
    plain = clean_environment()
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks)),
    )
    # The default rendezvous waits for a random time of up to 0.3 s. The static one does not,
    # but wants to be told a port: one outside the range that the kernel hands out, and another
    # one for every process that measures.
    port = 20000 + os.getpid() % 10000
    static = ("--master-addr", "127.0.0.1", "--master-port", str(port), "--monitor-interval", "0.01")
    return [
        Contender(
            TORCHRUN, Program((*torchrun, SCRIPT, STAMP), plain), "the same script, its defaults"
        ),
        Contender(
            TORCHRUN_STATIC,
            Program((*torchrun, *static, SCRIPT, STAMP), plain),
            "the same script, its quickest settings: " + shlex.join(static),
        ),
        Contender(
            FLOOR,
            Program((sys.executable, IMPORT), plain, copies=ranks),
            f"the floor: {ranks} processes at once that import torch and leave",
        ),
    ]


def list_helps() -> list[Contender]:
    """How long ``--help`` takes, and what Python alone takes of it."""
    plain = clean_environment()
    return [
        Contender(
            HELP,
            Program((sys.executable, "-m", "mpiddp.train", "--help"), plain),
            "one process",
        ),
        Contender(PYTHON, Program((sys.executable, "-c", "pass"), plain), "Python alone"),
    ]
