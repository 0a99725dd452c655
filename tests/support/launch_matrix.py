"""The table of docs/launching.md: every MPI library, launcher, network and place, each really run.

    python tests/support/launch_matrix.py [WORD …]

prints it; with words, the cells alone whose names hold all of them. In each cell somebody starts
four ranks on two nodes of the virtual cluster. They work, or mpiddp refuses in one message within
REFUSAL_SECONDS; anything else is a fault, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import facts
import launchers
import slurm
import ssh
from copies import write_program
from mpiddp.launch.launcher.programs import find_mpirun

LIBRARIES = {
    "openmpi": "Open MPI 5",
    "openmpi4": "Open MPI 4",
    "mpich": "MPICH",
}
STARTS = ("srun --mpi=pmix", "srun --mpi=pmi2", "srun --mpi=none", "mpirun", "--hosts")
NETWORKS = {"IPv4": "4", "dual": "dual", "IPv6": "6"}
"""How machines are addressed, and the word of jobs/cluster/up for it."""
PLACES = ("bare", "step", "container")
RANKS, NODES = 4, {"node1": 2, "node2": 2}
REFUSAL_SECONDS, LONGEST_SECONDS = 20.0, 75.0
WORKS = "works"
SCRIPT = """
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * 10 ** dist.get_rank()
dist.all_reduce(total)
print(f"cell {dist.get_rank()} {dist.get_world_size()} {int(total)} {socket.gethostname()}\\n", end="")
"""
CONTAINER = """\
# Files, processes, memory and a user of its own; /tmp is shared, since MPI's sockets are there.
root=$(mktemp -d {folder}/root-XXXXXX) && exec unshare --mount --pid --fork --kill-child sh -c '
    root=$0
    mount --rbind / $root && mount --make-rslave $root && mount -t tmpfs none $root/opt &&
    mount -t tmpfs -o mode=1777 none $root/dev/shm && mount -t proc none $root/proc &&
    exec unshare --root=$root --wd="$PWD" --user --map-user=1000 --map-group=1000 "$@"
' "$root" "$@"
"""


@dataclass(frozen=True)
class Cell:
    library: str
    start: str
    network: str
    place: str

    def __str__(self) -> str:
        return f"{LIBRARIES[self.library]}, {self.start}, {self.network}, {self.place}"


def list_cells() -> list[Cell]:
    """All cells; those of one network stand together."""
    parts = itertools.product(NETWORKS, LIBRARIES, STARTS, PLACES)
    return [Cell(library, start, network, place) for network, library, start, place in parts]


@dataclass(frozen=True)
class Outcome:
    word: str
    """WORKS, ``refused``, or what is wrong."""
    said: str = ""
    """mpiddp's message, or all output."""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.word not in (WORKS, "refused")


@dataclass(frozen=True)
class Laboratory:
    """A cluster of one network, with SSH."""

    hosts: ssh.Hosts
    folder: Path

    def run(self, cell: Cell) -> Outcome:
        """Start the ranks of a cell, and see what comes of it."""
        launcher = replace(launchers.find("alone"), environment=self._make_environment(cell))
        first, *rest = self._make_command(cell)
        with launchers.start(
            launcher, 1, rest, python=first, cwd=self.folder, env={"TMPDIR": self._find_tmp()}
        ) as job:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(LONGEST_SECONDS)
            if job.process.poll() is None:
                return Outcome("hangs", job.result().output, LONGEST_SECONDS)
            try:
                return judge(job.wait())
            except launchers.JobError as error:
                return Outcome("leaves processes behind", str(error))

    def _find_tmp(self) -> str:
        return str(self.hosts.find_tmp("node1"))

    def _make_environment(self, cell: Cell) -> Mapping[str, str]:
        row, cluster = launchers.find(cell.library), self.hosts.cluster
        found = {**cluster.environment(), **row.environment}
        found.pop("HYDRA_IFACE", None)  # Of ranks on one host.
        found["MPIDDP_CLUSTER_DIR"] = str(cluster.directory)
        found["MPIDDP_MPIRUN"] = str(row.mpirun)
        found["MPI4PY_LIBMPI"] = str(row.libmpi)
        found["PATH"] = f"{self.hosts.folder}/bin:{os.environ['PATH']}"
        if cell.place == "container":
            found["MPIDDP_WRAP"] = str(self.folder / "container")
        return found

    def _make_command(self, cell: Cell) -> list[str]:
        python = [sys.executable, "-m", "mpiddp"]
        ranks = [*python, "script.py"]
        if cell.place == "container":
            ranks = [str(self.folder / "container"), *ranks]
        places = ",".join(f"{name}:{ranks}" for name, ranks in NODES.items())
        if cell.start.startswith("srun"):
            own = ["--overlap", "-N", "2", "-n", "4", "--ntasks-per-node", "2", "-w", ",".join(NODES)]
            words = [*cell.start.split(), *own, *ranks]
        elif cell.start == "mpirun":
            mpirun = find_mpirun(str(launchers.find(cell.library).mpirun))
            line, flag = mpirun.command_on(NODES), mpirun.kind.passes_on
            names = ["PATH", "PYTHONPATH", "MPI4PY_LIBMPI"] if flag else []
            words = [*line, *(word for name in names for word in (flag, name)), *ranks]
        else:
            words = [*python, "-n", str(RANKS), "--hosts", places, "script.py"]
        if cell.place == "step":
            job = ["salloc", "--quiet", "-N", "2", "--ntasks-per-node", "2", "-w", ",".join(NODES)]
            words = [*job, "srun", "--overlap", "-N", "1", "-n", "1", "-w", "node1", *words]
        return [str(slurm.COMMANDS / "exec"), "node1", *words]


def judge(result: launchers.Result) -> Outcome:
    """What a user would say of it."""
    rows = sorted(line.split()[1:] for line in result.stdout.splitlines() if "cell " in line)
    messages = facts.messages(result)
    if result.returncode == 0:
        right = [[str(rank), str(RANKS), "1" * RANKS] for rank in range(RANKS)]
        is_right = [row[:3] for row in rows] == right and {row[3] for row in rows} == {*NODES}
        return Outcome(WORKS if is_right else "is wrong", repr(result), result.seconds)
    failures = [line for line in messages if "hint:" not in line and "note:" not in line]
    if "Traceback" in result.output:
        word = "gives a traceback"
    elif len(failures) != 1:
        word = f"says {len(failures)} things"
    elif result.seconds > REFUSAL_SECONDS:
        word = f"refuses after {result.seconds:.0f} s"
    else:
        return Outcome("refused", failures[0], result.seconds)
    return Outcome(word, repr(result), result.seconds)


@contextlib.contextmanager
def open_laboratory(network: str) -> Iterator[Laboratory]:
    """A cluster of two nodes whose machines have these addresses."""
    options = [f"--nodes={slurm.NODES}", f"--cpus={slurm.CPUS}", f"--ip={NETWORKS[network]}"]
    with slurm.bring_up(*options) as cluster:
        folder = cluster.directory.parent / "matrix"
        (folder / "ssh").mkdir(parents=True)
        folder.joinpath("script.py").write_text(SCRIPT)
        write_program(folder / "container", CONTAINER.format(folder=folder))
        with ssh.open_hosts(cluster, folder / "ssh") as hosts:
            yield Laboratory(hosts, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", metavar="WORD", nargs="*")
    words = parser.parse_args().words
    cells = [cell for cell in list_cells() if all(word in str(cell) for word in words)]
    has_faults = False
    for network, group in itertools.groupby(cells, lambda cell: cell.network):
        with open_laboratory(network) as laboratory:
            for cell in group:
                outcome = laboratory.run(cell)
                print(f"{cell}: {outcome.word} ({outcome.seconds:.0f} s)", flush=True)
                if outcome.word != WORKS:
                    print(outcome.said, flush=True)
                has_faults |= outcome.is_fault
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main())
