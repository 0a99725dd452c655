"""Jobs on a Slurm cluster: their time is up, others are preferred, nodes are lost or cut off, and
jobs are cancelled at any moment, in every way."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import psutil

import launchers
import slurm
import ssh
from attempts import Finding
from laboratory import Laboratory, check_equal, read_end
from mpiddp.launch.launcher import leftovers

JOBS = launchers.ROOT / "jobs"
RANKS = 2
WAYS = ("chain", "array", "priority", "chain", "time limit")
LONG = ("--samples", "2000", "--evaluate-every", "50", "--save-every", "1000epochs")
SECONDS = 300.0
"""Without a row of any run. How often a time limit interrupts a job depends on the machine."""


@dataclass(frozen=True)
class Job:
    cluster: slurm.Cluster
    folder: Path
    identity: str

    def records(self) -> list[str]:
        return self.cluster.records(self.identity)

    def wait(self) -> None:
        """Wait until all has ended, and well."""
        rows, end = -1, 0.0
        while True:
            if (found := count_rows(self.folder)) > rows:
                rows, end = found, time.monotonic() + SECONDS
            records = self.records()
            if all(map(slurm.FINISHED.search, records)):
                break
            assert time.monotonic() < end, "\n".join(records)
            time.sleep(0.2)
        for record in records:
            assert "JobState=COMPLETED" in record and "ExitCode=0:0" in record, (
                f"{record}\n{self.read_output()[-3000:]}"
            )

    def read_output(self) -> str:
        """What all its ranks have written, and the job scripts."""
        paths = [*self.folder.glob("logs/*"), *self.folder.glob("slurm-*.out")]
        return "\n".join(path.read_text(errors="replace") for path in sorted(paths))

    def await_rows(self, run: str, count: int, attempt: int = 1) -> None:
        """Until the run whose name ends so has as many rows of an attempt, counted from 1."""
        launchers.until(
            lambda: count_rows(self.folder, run, attempt) >= count, f"rows of {self}", SECONDS
        )


def count_rows(folder: Path, run: str = "", attempt: int | None = None) -> int:
    """Of runs whose names end so; of all attempts, or one."""
    texts = [path.read_text() for path in folder.glob(f"runs/*{run}/metrics.jsonl")]
    rows = [
        json.loads(line)
        for text in texts
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return sum(attempt in (None, row["attempt"]) for row in rows)


@contextlib.contextmanager
def submit(cluster: slurm.Cluster, folder: Path, *words: str, **variables: str) -> Iterator[Job]:
    """Submit from the folder; what is left of the job at the end is cancelled."""
    environment = cluster.job_environment(OMP_NUM_THREADS="1", **variables)
    command = ("sbatch", "--parsable", *words)
    done = launchers.execute(*command, cwd=folder, env=environment)
    job = Job(cluster, folder, done.expect(0).stdout.strip())
    try:
        yield job
    finally:
        cluster.ask("scancel", "--full", job.identity)
        launchers.until(lambda: not cluster.ask("squeue", "--noheader"), "the job to be gone")


# Preempted jobs


def choose_requeue(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    way = WAYS[number % len(WAYS)]
    # A real time limit is a minute at least.
    way = "chain" if way == "time limit" and number % 10 != 4 else way
    epochs = parameters["epochs"]
    return {
        "way": way,
        "epochs": epochs,
        # So that it does not fit into a minute.
        "options": parameters["longer_than_a_minute"] if way == "time limit" else [],
        # Of the first run, and of the second.
        "rows": [dice.randint(1, epochs // 3), dice.randint(1, epochs // 3)],
        # TERM would cancel the job.
        "signal": dice.choice(("USR2", "USR1")),
        "task": dice.randrange(3),
    }


def attempt_requeue(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    training = (*LONG, "--epochs", str(choice["epochs"]))
    whole = laboratory.find_whole(RANKS, training)
    with laboratory.cluster() as cluster:
        act = {"chain": run_chain, "time limit": run_chain, "array": run_array}
        output, names, starts = act.get(choice["way"], run_preferred)(
            choice, cluster, folder, [*whole.words, *choice["options"]]
        )
    for name in names:
        (run,) = folder.glob(f"runs/*{name}")
        check_equal(read_end(run), read_end(whole.run))
    # Said by rank 0, and once more where the job's end is told.
    stopped = list(dict.fromkeys(re.findall(r"preempted after step (\d+): ", output)))
    resumed = re.findall(r"Resumed from \S+: step (\d+),", output)
    assert stopped == resumed, f"{stopped} {resumed}\n{output[-3000:]}"
    assert len(stopped) >= starts - 1, f"{len(stopped)} starts\n{output[-3000:]}"
    return Finding("requeued, bitwise equal", lost_steps=0)


Ran = tuple[str, list[str], int]
"""What the ranks wrote, how the names of the runs end, and how often a job was started at least."""


def run_chain(
    choice: Mapping[str, Any], cluster: slurm.Cluster, folder: Path, words: Sequence[str]
) -> Ran:
    limit = ["--time=1", "--signal=USR2@30"] if choice["way"] == "time limit" else []
    flags = ("--nodes=2", "--ntasks=2", *limit)
    with submit(cluster, folder, *flags, f"{JOBS}/train.sbatch", *words) as job:
        for attempt, rows in enumerate([] if limit else choice["rows"], start=1):
            job.await_rows("", rows, attempt)
            # What sbatch --signal has Slurm do, without waiting for minutes.
            cluster.ask("scancel", f"--signal={choice['signal']}", job.identity)
        job.wait()
        return job.read_output(), [""], 2 if limit else 3


def run_array(
    choice: Mapping[str, Any], cluster: slurm.Cluster, folder: Path, words: Sequence[str]
) -> Ran:
    task, rest = choice["task"], [word for word in words if word not in ("--name", "run")]
    flags = ("--array=0-2", "--nodes=1", "--ntasks=2")
    with submit(cluster, folder, *flags, f"{JOBS}/train.sbatch", *rest) as job:
        job.await_rows(f"_{task}", choice["rows"][0])
        cluster.ask("scancel", "--signal=USR2", f"{job.identity}_{task}")
        job.wait()
        return job.read_output(), [f"_{each}" for each in range(3)], 2


def run_preferred(
    choice: Mapping[str, Any], cluster: slurm.Cluster, folder: Path, words: Sequence[str]
) -> Ran:
    flags = ("--nodes=2", "--ntasks=2", "--exclusive")
    with submit(cluster, folder, *flags, f"{JOBS}/train.sbatch", *words) as job:
        job.await_rows("", choice["rows"][0])
        urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 1")
        (folder / "urgent").mkdir()
        with submit(cluster, folder / "urgent", *urgent) as other:
            other.wait()
        job.wait()
        return job.read_output(), [""], 2


# Nodes that are lost


def choose_node(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "way": ("lost", "cut off, and comes back")[number % 2],
        # Slurm runs the job script on the first one, and ends the job with it.
        "node": dice.choice(("node2", "node3")),
        "rows": dice.randint(2, parameters["epochs"] // 2),
        "epochs": parameters["epochs"],
    }


def attempt_node(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = ("--samples", "2000", "--save-every", "2epochs", "--epochs", str(choice["epochs"]))
    whole = laboratory.find_whole(3, options)
    words = [*whole.words, "--lifeline-timeout", "4"]
    flags = ("--nodes=4", "--nodelist=node[1-4]", "--exclusive")
    front = ("--restarts", "2", "--nodes", "3", "--ranks-per-node", "1", "train")
    with (
        laboratory.cluster() as cluster,
        submit(cluster, folder, *flags, f"{JOBS}/run.sbatch", *front, *words) as job,
    ):
        job.await_rows("", choice["rows"])
        break_node(choice, cluster, job)
        job.wait()
        output = job.read_output()
    assert f"restart 1 of 2, without {choice['node']}" in output, output[-3000:]
    check_equal(read_end(folder / "runs" / "run"), read_end(whole.run))
    return Finding("restarted without it, bitwise equal")


def break_node(choice: Mapping[str, Any], cluster: slurm.Cluster, job: Job) -> None:
    """Until the job was restarted, or longer."""
    node = choice["node"]
    way_back = "revive" if choice["way"] == "lost" else "heal"
    processes = find_on_node(node, job) if way_back == "heal" else []
    try:
        # The ranks of a node that is cut off sleep until it is back: then they are those of an
        # attempt that was replaced.
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        cluster.must("kill" if way_back == "revive" else "cut", node)
        launchers.until(lambda: "restart 1 of 2" in job.read_output(), "a restart", SECONDS)
        if way_back == "heal":
            job.await_rows("", 1, attempt=2)
    finally:
        cluster.must(way_back, node)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def find_on_node(node: str, job: Job) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        environment = launchers.environ_of(entry) if entry.isdigit() else {}
        place = (environment.get("SLURMD_NODENAME"), environment.get("SLURM_JOB_ID"))
        if place == (node, job.identity) and "SLURM_PROCID" in environment:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            if b"python" in command:
                found.append(int(entry))
    return found


# Jobs that are cancelled at any moment, in every way: what is left on any node afterwards.

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
PLACES, NODES = "node1:2,node2:2", ("node1", "node2")
PATIENCE_SECONDS = 60.0
"""For all to be gone; the campaign's limit counts, on a machine that is not busy elsewhere."""
SETTLED_SECONDS = 0.5
REMOVED_LATER = (*leftovers.SEGMENTS, "ompi.", "prte", "pmix-", "hwloc.sm", "UCX")
"""What a killed MPI leaves; the next `python -m mpiddp` removes it (`launcher.leftovers`)."""


def choose_cancel(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
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
        job = ["-N", "2", "-n", "4", *(["--mpi=pmix"] if choice["is_bare"] else [])]
        return ["srun" if choice["is_bare"] else "salloc", *job, *program]
    if choice["is_bare"]:
        row = launchers.find(launcher)
        return row.command(4, program)
    hosts = ["--hosts", PLACES] if launcher == "hosts" else []
    return [*front, "-n", "4", *hosts, program[-1]]


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


def attempt_cancel(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
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
