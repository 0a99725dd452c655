"""What happens to a training on this machine: ranks are killed, stopped, told to end, or hang; its
disk is full."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import launchers
import slurm
from attempts import Finding
from laboratory import (
    INTERVAL,
    PARTIAL,
    SAVING,
    Laboratory,
    Times,
    Training,
    find_resumed,
    make_signal,
    watch_end,
)
from mpiddp.checkpoints.storage.manifest import find_problems, list_checkpoints, read_manifest

RANKS = 2

# kill -9 of one rank, at any moment, or in the middle of a save.

EARLY_ENDS = {
    4: "ended by --timeout", 14: "ended by MPI", 128 + signal.SIGTERM: "ended by srun",
    128 + signal.SIGKILL: "ended by srun, or by --timeout",
}  # fmt: skip
"""By exit code, how a job under srun ends whose ranks do not know each other yet: they did not find
each other in time; Open MPI gave up in MPI_Init (MPI_ERR_UNKNOWN); srun's signal ended the others;
or the victim's own, the highest. Nothing of mpiddp can tell the others: its limits are for later.
"""
KNOWN = re.compile(r"mpiddp: started|was lost|left early|Exited with exit code 6")
"""What a job says whose ranks have found each other."""
START_SECONDS = 30
"""The start-up's --timeout under srun, which tells nobody of a rank that has gone."""
EARLY_SECONDS = {"srun": START_SECONDS + 30, "srun-kill": 5}
"""In which such a job has ended: each rank counts from where it begins to wait; and with
--kill-on-bad-exit=1 srun sends SIGTERM, and then SIGKILL."""
CODES = (6, 128 + signal.SIGKILL, signal.SIGKILL)
"""The survivors', or the victim's as a launcher reports it; Hydra gives the signal alone."""


def choose_kill(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    launcher = parameters["launchers"][number % len(parameters["launchers"])]
    ranks = dice.choice(parameters["ranks"])
    moment = dice.choice(("start", "step", "save", "evaluation", "last step"))
    return {
        "launcher": launcher,
        "ranks": ranks,
        "victim": dice.randrange(ranks),
        "moment": moment,
        # The seconds count from when the rank is there, the share is of the steps.
        "seconds": round(dice.uniform(0, 1.5), 3),
        "share": round(dice.random(), 3),
        "count": dice.randint(1, 6),
    }


@contextlib.contextmanager
def find_launcher(name: str, laboratory: Laboratory) -> Iterator[launchers.Launcher]:
    """A row of the table, or ``srun`` or ``srun-kill`` on the cluster."""
    if not name.startswith("srun"):
        yield launchers.table()[name]
        return
    with laboratory.cluster() as cluster:
        ends_all = int(name == "srun-kill")
        yield cluster.srun("--nodes=2", f"--kill-on-bad-exit={ends_all}")


def make_rule(choice: Mapping[str, Any], steps: int) -> dict[str, Any]:
    count = choice["count"]
    event = {
        "step": {"event": "step", "count": 1 + int(choice["share"] * (steps - 1))},
        "last step": {"event": "step", "count": steps},
        "save": {"event": "open", "path": PARTIAL, "count": min(count, 4)},
        "evaluation": {"event": "evaluation", "count": count},
    }[choice["moment"]]
    return make_signal(choice["victim"], signal.SIGKILL, **event)


def kill(
    training: Training, choice: Mapping[str, Any], steps: int
) -> tuple[Times, launchers.Result]:
    """Start it, and kill a rank; what remains, and how long that took."""
    is_start = choice["moment"] == "start"
    rules = None if is_start else [make_rule(choice, steps)]
    with training.start(rules) as job:
        if is_start:
            victim = job.rank(choice["victim"])
            time.sleep(choice["seconds"])
            os.kill(victim, signal.SIGKILL)
            since = time.time()
        else:
            since = training.await_fired(job)["time"]
        survivors = [process for rank, process in job.ranks().items() if rank != choice["victim"]]
        return watch_end(job, since, survivors), job.wait()


def is_early(choice: Mapping[str, Any], result: launchers.Result) -> bool:
    """Whether a job under srun has ended before its ranks knew each other."""
    is_start = choice["moment"] == "start" and choice["launcher"] in EARLY_SECONDS
    return is_start and result.returncode in EARLY_ENDS and not KNOWN.search(result.stderr)


def attempt_kill(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    # Ranks that have not found each other yet have no lifeline.
    waits = choice["launcher"] == "srun" and choice["moment"] == "start"
    options = (*SAVING, *(["--timeout", str(START_SECONDS)] if waits else []))
    steps = laboratory.find_whole(choice["ranks"], options).read_outcome()["step"]
    with find_launcher(choice["launcher"], laboratory) as launcher:
        training = Training(folder, choice["ranks"], options, launcher)
        times, result = kill(training, choice, steps)
        if is_early(choice, result):
            assert times.gone <= EARLY_SECONDS[choice["launcher"]], f"{times.gone:.1f} s: {result}"
            training.finish()
            laboratory.check_end(training)
            return Finding(f"{EARLY_ENDS[result.returncode]} in the start-up, bitwise equal")
        assert result.returncode in CODES, result
        assert training.read_outcome().get("code", 6) == 6, result
        _, lost = laboratory.go_on(training)
    return Finding("resumed, bitwise equal", times.detected, times.gone, lost)


POINTS = {
    "begun": ("os.mkdir", r"\.partial$"), "shards": ("open", r"\.partial/__\d_\d\.distcp"),
    "list of tensors": ("open", r"\.partial/\.metadata"),
    "manifest": ("open", r"\.partial/manifest\.json"),
    "written, not renamed": ("os.rename", r"\.partial$"),
    "older ones are removed": ("os.rename", "$"),
}  # fmt: skip
"""The event of each point of a save, before which the kill comes."""


def choose_save(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    point = list(POINTS)[number % len(POINTS)]
    return {
        "point": point,
        "victim": dice.randrange(RANKS),
        # Older ones are removed from the third save on.
        "save": dice.randint(3 if point == "older ones are removed" else 1, 7),
    }


def make_save_rule(choice: Mapping[str, Any]) -> dict[str, Any]:
    event, path = POINTS[choice["point"]]
    save, victim = choice["save"], choice["victim"]
    # The third save removes the first one's.
    removed = 2 * (choice["point"] == "older ones are removed")
    folder = rf"/step-{(save - removed) * INTERVAL}"
    # Each rank writes its shard; the rest is rank 0's work.
    rank = victim if choice["point"] == "shards" else 0
    path = folder + (path if removed else rf"\.[\w-]+{path}")
    return make_signal(rank, signal.SIGKILL, [victim], event=event, path=path)


def attempt_save(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    training = Training(folder, RANKS)
    times, result = training.break_off(make_save_rule(choice))
    assert result.returncode in CODES, result
    resumed, lost = laboratory.go_on(training)
    # Training went on while it was written.
    begun = choice["save"] * INTERVAL
    assert begun - resumed <= INTERVAL, f"step {resumed} is left of a save of step {begun}"
    return Finding("resumed, bitwise equal", times.detected, times.gone, lost)


# Signals that preempt a job: all ranks stop after one step, and no step is lost.

WAYS = ("one rank", "all ranks", "spread", "twice", "save", "evaluation", "start-up")
PREEMPTED = 75
AT_THE_END = ("--save-every", "1000epochs")
"""So that there is no other checkpoint than the one that is asked for."""
PAUSE = 0.01
MODULES = 5
"""Of the model, each of which an evaluation calls. In the last evaluation a signal is too late."""


def choose_signal(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    way, ranks = WAYS[number % len(WAYS)], dice.choice(parameters["ranks"])
    # A training that TERM reaches before it has begun ends at once.
    names = parameters["signals"][: 2 if way == "start-up" else 3]
    order = dice.sample(range(ranks), ranks)
    return {
        "way": way, "ranks": ranks, "signal": dice.choice(names), "order": order,
        "step": dice.randint(1, 60), "count": dice.randint(1, 6),
        "seconds": round(dice.uniform(0, 3), 3),
    }  # fmt: skip


def make_rules(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    first = choice["order"][0]
    number = int(signal.Signals[f"SIG{choice['signal']}"])
    rule = make_signal(first, number)
    step = {"event": "step", "count": choice["step"]}
    return {
        "one rank": [rule | step],
        "all ranks": [rule | step | {"targets": choice["order"]}],
        "spread": [rule | step],
        "twice": [rule | step],
        "save": [rule | {"event": "open", "path": PARTIAL, "count": choice["count"]}],
        "evaluation": [rule | {"event": "evaluation", "count": min(choice["count"], MODULES)}],
        "start-up": [],
    }[choice["way"]]


def send_rest(choice: Mapping[str, Any], job: launchers.Job) -> None:
    """The signals that come later, to whatever is still there."""
    processes, number = job.ranks(), signal.Signals[f"SIG{choice['signal']}"]
    order, seconds = choice["order"], choice["seconds"]
    rest = {"spread": order[1:], "twice": order[:1]}.get(choice["way"], [])
    for rank in rest:
        time.sleep(seconds / len(rest))
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(processes[rank], number)


def stop(training: Training, choice: Mapping[str, Any]) -> launchers.Result:
    """Start it, and send the signals; what the job has left."""
    # As the front starts ranks of a job that can be requeued.
    prefix = ["env", "--block-signal=USR1,USR2"] if choice["way"] == "start-up" else []
    with training.start(make_rules(choice), prefix, pause=PAUSE) as job:
        if choice["way"] == "start-up":
            process = job.rank(choice["order"][0])
            time.sleep(choice["seconds"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.Signals[f"SIG{choice['signal']}"])
        else:
            training.await_fired(job)
            send_rest(choice, job)
        return job.wait()


def attempt_signal(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = SAVING if choice["way"] == "save" else AT_THE_END
    training = Training(folder, choice["ranks"], options)
    result = stop(training, choice)
    outcome = training.read_outcome()
    if choice["way"] == "start-up" and result.returncode == 0:
        laboratory.check_end(training)
        return Finding("was over before the signal")
    assert (result.returncode, outcome.get("code")) == (PREEMPTED, PREEMPTED), result
    (line,) = re.findall(r"preempted after step (\d+): SIG(\w+) reached rank \d", result.output)
    assert line == (str(outcome["step"]), choice["signal"]), result
    names = [path.name for path in (training.run / "checkpoints").glob("step-*")]
    assert f"step-{outcome['step']}" in names, names
    written = result.output.count("Checkpoint written")
    assert (written == len(names) == 1) or choice["way"] == "save", result
    resumed = find_resumed(training.finish())
    assert resumed == outcome["step"]
    laboratory.check_end(training)
    return Finding("stopped after one step, resumed, bitwise equal", lost_steps=0)


# Ranks that do not go on: stopped, cut off, in a step that has no end.


def choose_still(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    way = ("stopped", "link cut")[number % 5 in (1, 3)]
    ranks = 4 if way == "link cut" else dice.choice(parameters["ranks"])
    return {
        "way": way,
        "ranks": ranks,
        # Rank 0 in each other attempt; node1 has ranks 0 and 1.
        "victim": 0 if number % 2 else dice.randrange(ranks),
        "step": dice.randint(1, 60),
        "seconds": parameters["seconds"],
    }


def attempt_still(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = (*SAVING, "--lifeline-timeout", str(choice["seconds"]))
    if choice["way"] == "stopped":
        training = Training(folder, choice["ranks"], options)
        rule = make_signal(choice["victim"], signal.SIGSTOP, event="step", count=choice["step"])
        times, result = training.break_off(rule)
        assert result.returncode in CODES, result
        output = result.output
        _, lost = laboratory.go_on(training)
    else:
        with laboratory.cluster() as cluster:
            flags = ("--nodelist=node[1-2]", "--nodes=2", "--ntasks-per-node=2")
            launcher = cluster.srun(*flags, "--kill-on-bad-exit=0")
            training = Training(folder, choice["ranks"], options, launcher)
            times, output = cut_link(training, choice, cluster)
            _, lost = laboratory.go_on(training)
    named = [choice["victim"]] if choice["way"] == "stopped" else [0, 2]
    for rank in named:
        assert re.search(rf"mpiddp: rank {rank} of \d on \S+ was lost", output), output
    return Finding("named, resumed, bitwise equal", times.detected, times.gone, lost)


def cut_link(
    training: Training, choice: Mapping[str, Any], cluster: slurm.Cluster
) -> tuple[Times, str]:
    """srun itself waits for a node that it cannot reach; the ranks on both sides must end."""
    node = f"node{1 + choice['victim'] // 2}"
    rule = {"rank": 0, "event": "step", "count": choice["step"], "action": "note_only"}
    with training.start([rule], pause=0.02) as job:
        training.await_fired(job)
        try:
            cluster.must("cut", node)
            since = time.time()
            job.until(lambda: not cluster.list_on_node(job), "the ranks to end")
            gone = time.time() - since
        finally:
            cluster.must("heal", node)
        return Times(gone, gone), job.wait().output


def choose_endless(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    ranks = dice.choice(parameters["ranks"])
    return {
        "action": ("spin", "hold_lock")[number % 2], "ranks": ranks,
        "victim": 0 if number // 2 % 2 else dice.randrange(ranks), "step": dice.randint(1, 60),
        "seconds": parameters["seconds"],
    }  # fmt: skip


def attempt_endless(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = (*SAVING, "--stall-timeout", str(choice["seconds"]))
    training = Training(folder, choice["ranks"], options)
    rule = {
        "rank": choice["victim"], "event": "step", "count": choice["step"],
        "action": choice["action"],
    }  # fmt: skip
    times, result = training.break_off(rule)
    assert result.returncode in CODES, result
    assert training.read_outcome()["code"] == 6
    # The table of positions names the rank that the others wait for.
    named = rf"rank {choice['victim']} on \S+ +{choice['action']}, saboteur\.py"
    assert re.search(named, result.output), result
    _, lost = laboratory.go_on(training)
    return Finding("named, resumed, bitwise equal", times.detected, times.gone, lost)


# Disks that are full when a checkpoint is written.

KINDS = ("full", "quota")
POLICIES = ("stop", "continue")
FAILED = re.compile(r"No space left on device|Disk quota exceeded")
REPORT = re.compile(r"a checkpoint in \S+ could not be written: .*the older ones are as they were")


def choose_disk(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": KINDS[number % 2], "policy": POLICIES[number // 2 % 2], "save": dice.randint(2, 4),
        "rank": dice.randrange(RANKS),
    }  # fmt: skip


@contextlib.contextmanager
def mount(folder: Path) -> Iterator[None]:
    """A disk of one mebibyte in ``folder``, made by root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_disk_rule(choice: Mapping[str, Any], disk: Path) -> dict[str, Any]:
    step = f"/step-{choice['save'] * INTERVAL}"
    if choice["kind"] == "full":
        return {
            "rank": 0, "event": "os.mkdir", "path": rf"{step}\.[\w-]+\.partial$",
            "action": "fill_disk", "target": str(disk),
        }  # fmt: skip
    return {
        "rank": choice["rank"], "event": "open", "path": rf"{step}\.[\w-]+\.partial/__\d_\d",
        "action": "fail_for_quota",
    }  # fmt: skip


def fill(
    training: Training, choice: Mapping[str, Any], ballast: Path
) -> tuple[launchers.Result, float]:
    """What the job has left, and the seconds until it said that the save had failed."""
    # There is room again before the last checkpoint.
    hold = (str(ballast), 7 * INTERVAL + 1)
    with training.start([make_disk_rule(choice, ballast)], hold=hold) as job:
        fired = training.await_fired(job)
        job.until(lambda: FAILED.search(job.stdout() + job.stderr()), "the report of the failure")
        seconds = time.time() - fired["time"]
        if choice["policy"] == "continue":
            ballast.unlink(missing_ok=True)
        return job.wait(), seconds


def attempt_disk(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    with mount(folder / "runs"):
        options = ("--save-every", f"{INTERVAL}steps", "--on-save-error", choice["policy"])
        training, ballast = Training(folder, RANKS, options), folder / "runs" / "ballast"
        result, seconds = fill(training, choice, ballast)
        lost = None
        if choice["policy"] == "stop":
            assert result.returncode == 1, result
            assert len(REPORT.findall(result.output)) == 1, result
            check_older(training, (choice["save"] - 1) * INTERVAL)
            ballast.unlink(missing_ok=True)
            resumed, lost = laboratory.go_on(training)
            assert resumed == (choice["save"] - 1) * INTERVAL
        else:
            assert result.returncode == 0, result
            assert "training goes on" in result.output, result
            laboratory.check_end(training)
    ends = {"stop": "stopped, resumed, bitwise equal", "continue": "went on, bitwise equal"}
    return Finding(ends[choice["policy"]], detected=seconds, lost_steps=lost)


def check_older(training: Training, step: int) -> None:
    """The checkpoint before is whole, and nothing is left of the one that failed."""
    folder = training.run / "checkpoints"
    assert all(re.fullmatch(r"step-\d+|lock|owner.json", path.name) for path in folder.iterdir())
    newest = list_checkpoints(folder)[0]
    assert newest.name == f"step-{step}"
    assert find_problems(newest, read_manifest(newest)) == []
