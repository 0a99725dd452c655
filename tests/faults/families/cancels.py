"""Jobs that are cancelled at any moment, in every way: what is left on any node afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import psutil

import launchers
import slurm
import ssh
from attempts import Family, Finding
from laboratory import Laboratory
from mpiddp.launch.launcher import leftovers

LIGHT = "import sys, time; sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(600)\n"
WORKERS = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(10_000)

for batch in DataLoader(Endless(), batch_size=4, num_workers=2):
    pass
"""
RANKS, PLACES, NODES = 4, "node1:2,node2:2", ("node1", "node2")
PATIENCE_SECONDS = 60.0
"""For all to be gone; the campaign's limit counts, on a machine that is not busy elsewhere."""
SETTLED_SECONDS = 0.5
REMOVED_LATER = (*leftovers.SEGMENTS, "ompi.", "prte", "pmix-", "hwloc.sm", "UCX")
"""What a killed MPI leaves; the next `python -m mpiddp` removes it (`launcher.leftovers`)."""


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    launcher = parameters["launchers"][number % len(parameters["launchers"])]
    ways = ["INT", "TERM", "HUP", "KILL", "KILL below", *["scancel"] * (launcher == "srun")]
    way = dice.choice(ways)
    return {
        "launcher": launcher,
        # Started by the launcher itself, and not by `python -m mpiddp`.
        "is_bare": launcher != "hosts" and way != "KILL below" and dice.random() < 0.3,
        "has_workers": dice.random() < parameters["with_workers"],
        "way": way,
        "seconds": round(dice.uniform(0, parameters["seconds"]), 3),
    }


def make_command(choice: Mapping[str, Any], folder: Path) -> list[str]:
    """What somebody types on node1."""
    launcher, front = choice["launcher"], [sys.executable, "-m", "mpiddp"]
    program = [*front, str(folder / "script.py")]
    if launcher == "srun":
        job = ["-N", "2", "-n", str(RANKS), *(["--mpi=pmix"] if choice["is_bare"] else [])]
        return ["srun" if choice["is_bare"] else "salloc", *job, *program]
    if choice["is_bare"]:
        row = launchers.find(launcher)
        return row.command(RANKS, program)
    hosts = ["--hosts", PLACES] if launcher == "hosts" else []
    return [*front, "-n", str(RANKS), *hosts, program[-1]]


def make_environment(choice: Mapping[str, Any], hosts: ssh.Hosts, folder: Path) -> dict[str, str]:
    row = launchers.find("mpich" if choice["launcher"] == "mpich" else "openmpi")
    return {
        **hosts.cluster.environment(),
        **row.environment,
        "MPIDDP_CLUSTER_DIR": str(hosts.cluster.directory),
        "MPIDDP_MPIRUN": str(row.mpirun),
        "MPI4PY_LIBMPI": str(row.libmpi),
        "PATH": f"{hosts.folder}/bin:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
    }


def find_front(job: launchers.Job) -> psutil.Process:
    """What was typed: the process on the node, not what has entered it, or the allocation."""
    starters = ("nsenter", "salloc", "sh", "python3", "/usr/bin/env")
    while True:
        job.until(lambda: True, "the command")
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            process = psutil.Process(job.process.pid)
            while (process.cmdline() or ["sh"])[0].startswith(starters):
                process = min(process.children(), key=lambda child: child.pid)
            return process
        time.sleep(0.02)


def cancel(choice: Mapping[str, Any], job: launchers.Job, cluster: slurm.Cluster) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        front, way = find_front(job), choice["way"]
        time.sleep(choice["seconds"])
        if way == "scancel":
            jobs = cluster.ask("squeue", "-h", "-o", "%i").split()
            if jobs:
                cluster.ask("scancel", "--full", *jobs)
        elif way == "KILL below":
            names = ("prterun", "mpiexec", "srun")
            started = [each for each in front.children() if each.name().startswith(names)]
            for each in started or [front]:
                each.kill()
        else:
            front.send_signal(signal.Signals[f"SIG{way}"])
            if way == "INT" and choice["launcher"] == "srun" and choice["is_bare"]:
                time.sleep(0.2)  # At the first one srun says how its tasks are.
                front.send_signal(signal.SIGINT)


def list_files(hosts: ssh.Hosts, folder: Path) -> set[str]:
    """What is in the nodes' memory, in their temporary directories, and in the job's state."""
    found = {str(path) for path in (folder / "state").rglob("*") if not path.is_dir()}
    for name in NODES:
        memory = hosts.cluster.must("exec", name, "ls", "/dev/shm").split()
        files = [path.name for path in hosts.find_tmp(name).iterdir()]
        found |= {f"{name}:{each}" for each in (*memory, *files)}
    return found


def list_processes(hosts: ssh.Hosts) -> set[int]:
    """All processes of the nodes: what SSH and Slurm have started carries no mark of the job's."""
    inits = [hosts.cluster.directory / "machines" / name / "init" for name in NODES]
    nodes = {os.stat(f"/proc/{path.read_text().split()[0]}/ns/pid").st_ino for path in inits}
    found = set()
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(OSError):
            is_there = os.stat(f"/proc/{process.pid}/ns/pid").st_ino in nodes
            # The node's own first process waits by it.
            if is_there and process.info["name"] != "sleep" and launchers.is_alive(process.pid):
                found.add(process.pid)
    return found


@contextlib.contextmanager
def clear(cluster: slurm.Cluster) -> Iterator[None]:
    """End what a failed attempt has left in the queue."""
    try:
        yield
    finally:
        if jobs := cluster.ask("squeue", "-h", "-o", "%i").split():
            cluster.ask("scancel", "--full", *jobs)


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    (folder / "script.py").write_text(WORKERS if choice["has_workers"] else LIGHT)
    with laboratory.hosts() as hosts, clear(hosts.cluster):
        before, daemons = list_files(hosts, folder), list_processes(hosts)
        own = replace(launchers.find("alone"), environment=make_environment(choice, hosts, folder))
        words = ["node1", *make_command(choice, folder)]
        temporary = {"TMPDIR": str(hosts.find_tmp("node1"))}
        python = slurm.COMMANDS / "exec"
        with launchers.start(own, 1, words, python=python, cwd=folder, env=temporary) as job:
            cancel(choice, job, hosts.cluster)
            began, gone = time.monotonic(), 0.0
            while time.monotonic() < began + PATIENCE_SECONDS:
                left_over = list_processes(hosts) - daemons
                if left_over or job.process.poll() is None:
                    gone = time.monotonic() - began
                elif time.monotonic() - began > gone + SETTLED_SECONDS:
                    break
                time.sleep(0.1)
            else:
                names = [psutil.Process(each).cmdline() for each in left_over]
                raise AssertionError(f"{names} are still running; {job.result()}")
            jobs = hosts.cluster.ask("squeue", "-h")
            assert not jobs, jobs
            left = list_files(hosts, folder) - before
            said = job.result()
        ours = {each for each in left if not each.partition(":")[2].startswith(REMOVED_LATER)}
        assert not ours, f"{sorted(ours)} was left; {said}"
        assert "Traceback" not in said.output or choice["way"].startswith("KILL"), said
        return Finding("nothing left" if not left else "MPI's files left", gone=gone)


CANCEL = Family(choose, attempt)
