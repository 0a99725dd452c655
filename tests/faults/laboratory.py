"""Small trainings that something happens to, and what becomes of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launchers
import slurm
import ssh
from mpiddp.checkpoints.storage.manifest import list_checkpoints
from mpiddp.checkpoints.storage.shards import read_shards
from mpiddp.process.outcome import read_outcome

SABOTEUR = Path(__file__).with_name("saboteur.py")
NAME = "run"
INTERVAL = 20
"""Steps between two checkpoints."""
# 640 training samples: 40 steps of 2 ranks in an epoch, 160 in all; 27 and 108 of 3 ranks.
TRAINING = (
    "--data", "toy", "--samples", "800", "--batch-size", "8", "--epochs", "4", "--name", NAME,
    "--evaluate-every", "2",
)  # fmt: skip
PARTIAL = r"/step-\d+\.[\w-]+\.partial"
"""In the path of whatever belongs to a save; other files have names that begin with a point."""
SAVING = ("--save-every", f"{INTERVAL}steps")
PAUSE = 0.004
"""Seconds after each step: so small a training would be over before anything could happen to it."""
SECONDS = 400.0
"""For a job, however busy the machine is."""
COMPARED = (
    "epoch", "step", "loss", "accuracy", "learning_rate", "test_loss", "test_accuracy",
    "parameters",
)  # fmt: skip
LOST = re.compile(
    r"mpiddp: .*(was lost|left early|: failed|has stalled|been in one collective|no rank)"
)


@dataclass(frozen=True)
class End:
    rows: dict[int, dict[str, Any]]
    """Of ``metrics.jsonl``, by epoch, without the times."""
    tensors: dict[str, str]
    """Digests of the last checkpoint's tensors, random states among them, by name."""


def read_end(run: Path) -> End:
    rows: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = {name: json.loads(line).get(name) for name in COMPARED}
        # An epoch that had to be trained again has a row of each attempt.
        assert rows.setdefault(row["epoch"], row) == row, f"{row} differs from {rows}"
    tensors = read_shards(list_checkpoints(run / "checkpoints")[0], "")
    return End(
        rows,
        {
            # A structure is JSON, which has the times in it.
            name: hashlib.sha256(each.numpy().tobytes()).hexdigest()
            for name, each in tensors.items()
            if not name.endswith(":structure")
        },
    )


def check_equal(found: End, expected: End) -> None:
    assert found.rows == expected.rows, f"rows differ: {found.rows} {expected.rows}"
    differing = [
        name
        for name in expected.tensors.keys() | found.tensors.keys()
        if expected.tensors.get(name) != found.tensors.get(name)
    ]
    assert differing == [], f"tensors differ from the uninterrupted run's: {sorted(differing)[:5]}"


@dataclass(frozen=True)
class Training:
    folder: Path
    ranks: int
    options: tuple[str, ...] = SAVING
    launcher: launchers.Launcher | None = None
    """None for Open MPI's on this machine."""

    @property
    def run(self) -> Path:
        return self.folder / "runs" / NAME

    @property
    def words(self) -> list[str]:
        """Of the trainer's command line; what is named twice is as it is named last."""
        return [*TRAINING, *self.options]

    @contextlib.contextmanager
    def start(
        self,
        rules: Sequence[Mapping[str, Any]] | None = (),
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> Iterator[launchers.Job]:
        """Start it, with what a saboteur does; None for the trainer alone.

        ``prefix``: words before Python. ``settings``: more of the saboteur's plan.
        """
        program = ["-m", "mpiddp.train", *self.words]
        if rules is not None:
            plan = self.folder / "plan.json"
            content = {"folder": str(self.folder), "pause": PAUSE, "rules": list(rules), **settings}
            plan.write_text(json.dumps(content))
            program = [str(SABOTEUR), str(plan), *self.words]
        first, *rest = [*prefix, sys.executable, *program]
        with launchers.start(
            self.launcher or launchers.table()["openmpi"],
            self.ranks,
            rest,
            timeout=SECONDS,
            cwd=self.folder,
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(launchers.ROOT)},
            python=first,
        ) as job:
            yield job

    def finish(self) -> str:
        """Start it without a saboteur, to its end; what it prints."""
        with self.start(None) as job:
            return job.wait().expect(0).output

    def break_off(self, rule: Mapping[str, Any], **settings: Any) -> tuple[Times, launchers.Result]:
        """Start it with a rule that is its end; how long that took, and what is left."""
        with self.start([rule], **settings) as job:
            return watch_end(job, self.await_fired(job)["time"]), job.wait()

    def read_fired(self) -> dict[str, Any] | None:
        path = self.folder / "fired.json"
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        return None

    def await_fired(self, job: launchers.Job) -> dict[str, Any]:
        """As ``read_fired``, once it has. JobError where the job ends before."""
        end = time.monotonic() + SECONDS
        while (found := self.read_fired()) is None:
            # It may have ended the job.
            has_ended = job.process.poll() is not None and self.read_fired() is None
            if has_ended or time.monotonic() > end:
                raise launchers.JobError(f"nothing has happened to the job: {job.result()}")
            time.sleep(0.005)
        return found

    def read_outcome(self) -> dict[str, Any]:
        return read_outcome(self.run) or {}


def make_signal(
    rank: int, number: int, targets: Sequence[int] = (), **event: Any
) -> dict[str, Any]:
    """A rule by which a rank sends a signal at an event: to itself, if there are no targets."""
    others = {"targets": list(targets) or [rank], "signal": int(number)}
    return {"rank": rank, "action": "send_signals", **others, **event}


def find_resumed(output: str) -> int:
    """The step that a run went on from; 0 where it started over."""
    found = re.findall(r"Resumed from \S+: step (\d+),", output)
    assert len(found) <= 1, output
    return int(found[0]) if found else 0


@dataclass(frozen=True)
class Times:
    """Seconds from a fault until the job said so, or a rank left, and until all had gone."""

    detected: float
    gone: float


def watch_end(job: launchers.Job, since: float, survivors: Sequence[int] = ()) -> Times:
    """Wait until nothing of the job is left.

    ``since``: when the fault happened, by time.time(). ``survivors``: processes of ranks.
    """
    detected = None
    while True:
        has_ended = job.process.poll() is not None
        if detected is None and (
            has_ended or LOST.search(job.stderr()) or not all(map(launchers.is_alive, survivors))
        ):
            detected = time.time() - since
        if has_ended and not job.processes():
            gone = time.time() - since
            assert detected is not None
            return Times(detected, gone)
        if time.monotonic() > job.deadline:
            job.wait()  # Says what is still running.
        time.sleep(0.01)


class Laboratory:
    """What all attempts share: uninterrupted runs, and a cluster, made when first asked for."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = Path(
            self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="mpiddp-faults-", dir="/tmp")
            )
        )
        self._ends: dict[tuple[Any, ...], Training] = {}
        self._end_lock = threading.Lock()
        self._cluster: slurm.Cluster | None = None
        self._hosts: ssh.Hosts | None = None
        self._cluster_lock = threading.Lock()

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        # A second signal must not break this off: the cluster would stay.
        before = [signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)]
        try:
            self._stack.close()
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)

    def find_whole(self, ranks: int, options: Sequence[str] = SAVING) -> Training:
        """A finished training that nothing happened to. Do not change its files."""
        key = (ranks, *options)
        with self._end_lock:
            if key not in self._ends:
                training_folder = Path(tempfile.mkdtemp(dir=self._folder))
                training = Training(training_folder, ranks, tuple(options))
                training.finish()
                self._ends[key] = training
            return self._ends[key]

    def check_end(self, training: Training) -> None:
        whole = self.find_whole(training.ranks, training.options)
        check_equal(read_end(training.run), read_end(whole.run))
        names = {path.name for path in (training.run / "checkpoints").iterdir()}
        assert all(re.fullmatch(r"step-\d+|owner\.json|lock", name) for name in names), names

    def go_on(self, training: Training) -> tuple[int, int]:
        """Start it again, to the end that it must have.

        Returns the step that it went on from, and how many steps were made again.
        """
        resumed = find_resumed(training.finish())
        self.check_end(training)
        fired = training.read_fired()
        # A step may come after the last one that a rank has noted.
        return resumed, 0 if fired is None else max(0, fired["step"] - resumed)

    @contextlib.contextmanager
    def cluster(self) -> Iterator[slurm.Cluster]:
        """The cluster of four nodes; one attempt at a time has it, and mends what it breaks."""
        with self._cluster_lock:
            if self._cluster is None:
                obstacle = slurm.find_obstacle()
                assert obstacle is None, obstacle
                options = [f"--nodes={slurm.NODES}", f"--cpus={slurm.CPUS}"]
                self._cluster = self._stack.enter_context(slurm.bring_up(*options))
            yield self._cluster

    @contextlib.contextmanager
    def hosts(self) -> Iterator[ssh.Hosts]:
        with self.cluster() as cluster:
            if self._hosts is None:
                folder = cluster.directory.parent / "ssh"
                folder.mkdir()
                self._hosts = self._stack.enter_context(ssh.open_hosts(cluster, folder))
            yield self._hosts
