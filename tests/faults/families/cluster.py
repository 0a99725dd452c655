"""Jobs on a Slurm cluster: their time is up, others are preferred, nodes are lost or cut off."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import launchers
import slurm
from attempts import Family, Finding
from laboratory import Laboratory, check_equal, read_end

JOBS = launchers.ROOT / "jobs"
RANKS = 2
WAYS = ("chain", "array", "priority", "chain", "time limit")
LONG = ("--samples", "2000", "--evaluate-every", "50", "--save-every", "1000epochs")
SECONDS = 300.0
"""Without a row of any run. How often a time limit interrupts a job depends on the machine."""


@dataclass(frozen=True)
class Job:
    """A batch job, or the tasks of an array, in a directory."""

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
        end = time.monotonic() + SECONDS
        while count_rows(self.folder, run, attempt) < count:
            assert time.monotonic() < end, "\n".join(self.records())
            time.sleep(0.05)


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
        while cluster.ask("squeue", "--noheader"):
            time.sleep(0.1)


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


REQUEUE = Family(choose_requeue, attempt_requeue)


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
    node, end = choice["node"], time.monotonic() + SECONDS
    way_back = "revive" if choice["way"] == "lost" else "heal"
    processes = find_on_node(node, job) if way_back == "heal" else []
    try:
        # The ranks of a node that is cut off sleep until it is back: then they are those of an
        # attempt that was replaced.
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        cluster.must("kill" if way_back == "revive" else "cut", node)
        while "restart 1 of 2" not in job.read_output():
            assert time.monotonic() < end, job.read_output()[-3000:]
            time.sleep(0.1)
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


NODE = Family(choose_node, attempt_node)
