"""The Slurm cluster that tests run on: brought up once, by ``jobs/cluster/up``.

    launcher = cluster.srun("--nodes=4", "--ntasks-per-node=2")
    launchers.run(launcher, 8, ["-m", "mpiddp.train"]).expect(0)

``launchers.run`` and ``launchers.start`` give the job its deadline and look for what it left.
"""

import contextlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import launchers

COMMANDS = launchers.ROOT / "jobs" / "cluster"
NODES, CPUS, GPUS = 4, 4, 2
COMMAND_SECONDS = 150
FINISHED = re.compile(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)")
"""In the record of a job that has ended."""


@dataclass(frozen=True)
class Cluster:
    """A cluster in a state directory of its own, so that a user's one is left alone."""

    directory: Path

    def control(self, name: str, *arguments: str) -> launchers.Result:
        """Run ``jobs/cluster/NAME``; its exit code is the caller's to look at."""
        where = {"MPIDDP_CLUSTER_DIR": str(self.directory)}
        return launchers.execute(COMMANDS / name, *arguments, env=where, timeout=COMMAND_SECONDS)

    def must(self, name: str, *arguments: str) -> str:
        """Run ``jobs/cluster/NAME``, which must succeed; returns what it prints."""
        return self.control(name, *arguments).expect(0).stdout

    def environment(self) -> dict[str, str]:
        """What ``jobs/cluster/env`` exports."""
        lines = self.must("env").splitlines()
        words = [shlex.split(line.removeprefix("export "))[0] for line in lines]
        return dict(word.split("=", 1) for word in words)

    def srun(self, *flags: str, mpi: str | None = "pmix", library: str = "openmpi"):
        """A launcher that starts ranks with srun and a row's MPI library.

        ``mpi=None`` leaves ``--mpi`` to the cluster's default.
        """
        row = launchers.find(library)
        chosen = (f"--mpi={mpi}",) if mpi is not None else ()
        return replace(
            row, name=f"srun-{library}", mpirun=find_program("srun"), flags=(*chosen, *flags),
            environment={**row.environment, **self.environment()},
        )  # fmt: skip

    def job_environment(self, **variables: str) -> dict[str, str]:
        """What a batch job is submitted with that uses Open MPI, and this Python."""
        row = launchers.find("openmpi")
        own = {"MPIDDP_PYTHON": sys.executable, "MPI4PY_LIBMPI": str(row.libmpi)}
        return {**row.environment, **self.environment(), **own, **variables}

    def records(self, identity: str) -> list[str]:
        return self.ask("scontrol", "show", "job", identity).strip().split("\n\n")

    def list_on_node(self, job: launchers.Job, name: str | None = None) -> list[int]:
        """A job's processes that a node's slurmd has started; by default that of any node."""
        places = {pid: launchers.environ_of(pid).get("SLURMD_NODENAME") for pid in job.processes()}
        return [pid for pid, place in places.items() if place and name in (None, place)]

    def ask(self, *command: str) -> str:
        done = launchers.execute(*command, env=self.environment(), timeout=COMMAND_SECONDS)
        return done.expect(0).stdout


def find_program(name: str) -> Path:
    return Path(shutil.which(name) or f"/usr/bin/{name}")


def find_obstacle() -> str | None:
    """Why there can be no cluster here; None where there can."""
    return None if os.geteuid() == 0 else "the cluster is made by root"


@contextlib.contextmanager
def make_room() -> Iterator[Cluster]:
    """A cluster that is not up, and whose directory goes at the end."""
    # Its path is short, since sockets are made in it; jobs of other users look into it.
    with tempfile.TemporaryDirectory(
        prefix="mpiddp-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)
        yield Cluster(Path(folder) / "cluster")


@contextlib.contextmanager
def bring_up(*options: str) -> Iterator[Cluster]:
    """A new cluster, taken down at the end. AssertionError if it does not come up."""
    with make_room() as cluster:
        try:
            cluster.must("up", *options)
            yield cluster
        finally:
            cluster.must("down")
