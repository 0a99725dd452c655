"""Run whole processes against the clock, with a deadline, and leave none behind."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.records.environment import clean_environment
from mpiddp.errors import MpiddpError

STAMP = "STAMP"
"""This word of a command line stands for a file into which the program writes a time."""

WORD = "mpiddp-benchmark: "
"""What a program on other machines prints before its report, JSON on the rest of the line."""

MARK = "MPIDDP_BENCHMARK_RUN"
"""Every process of a run carries it in its environment: launchers detach their children."""

REQUEST_SECONDS = 15.0
"""How long a launcher on other machines may take to end what it started there."""

KILL_SECONDS = 10.0
"""How long a process may take to disappear once it has been killed."""

LOOKS = 3
"""How often no process of a run must be seen in a row before it counts as ended."""

SHOWN_CHARACTERS = 4000
"""How much of a failed run's output is shown."""


@dataclass(frozen=True)
class Program:
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it; nothing is inherited."""
    copies: int = 1
    """Processes of this command line, started at once."""
    reaches_out: bool = False
    """Whether it starts processes on other machines, which know neither this one's directories
    nor its monotonic clock, and which cannot be killed from here."""


def make_program(
    launcher: Mpirun, ranks: int, words: Sequence[str], changes: Mapping[str, str] | None = None
) -> Program:
    """Ranks that are all on this machine, for which MPI is tuned; ``changes`` of variables."""
    variables = {**launcher.variables(ranks), **launcher.tuned, **(changes or {})}
    return Program((*launcher.command(ranks), *words), clean_environment(variables))


@dataclass(frozen=True)
class Run:
    seconds: float
    """From before the first process is started until the last one has ended."""
    cpu_seconds: float | None
    """User and system time of all its processes; None where some are on other machines."""
    others_cpu_seconds: float | None
    """What the rest of the machine took meanwhile: how far the run can be believed. None where
    it cannot be told apart."""
    stamp_seconds: float | None
    """From the same beginning to the time that the program wrote; None if it wrote none."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of mpiddp's start-up, if the program reported them."""


class RunError(MpiddpError):
    """A run failed or passed its deadline; the message ends with its output."""


@dataclass(frozen=True)
class _Ended:
    begin: float
    """On the monotonic clock."""
    began: float
    """The same moment on the clock that all machines are set by."""
    seconds: float
    cpu_seconds: float
    machine_seconds: float
    codes: tuple[int, ...]
    expired: bool


def run(program: Program, deadline: float) -> Run:
    """Run ``program`` to its end; what is left of it after ``deadline`` seconds is killed.

    It runs in a new, empty directory, which is also for temporary files, unless it reaches
    out to machines that lack it. Raises RunError if it cannot be started, ends with another exit
    code than 0, or passes the deadline.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        stamp = scratch / "stamp"
        command = tuple(str(stamp) if word == STAMP else word for word in program.command)
        started = mark_program(replace(program, command=command), scratch, mark)
        try:
            ended = _time(started, scratch, mark, deadline)
        finally:
            if program.reaches_out:
                request_end(mark)
            kill_marked(mark)
        if ended.expired:
            raise RunError(describe_failure(program, f"ran past {deadline:g} s", scratch))
        if any(ended.codes):
            code = next(filter(None, ended.codes))
            raise RunError(describe_failure(program, f"ended with exit code {code}", scratch))
        if program.reaches_out:
            return _read_report(ended, scratch)
        stamped = float(stamp.read_text()) - ended.begin if stamp.exists() else None
        others = max(0.0, ended.machine_seconds - ended.cpu_seconds)
        return Run(ended.seconds, ended.cpu_seconds, others, stamped)


def run_worker(program: Program, request: Any, deadline: float) -> Any:
    """What a job reports whose command line ends with the request and a file, both added here.

    Its rank 0 writes the report, as JSON. Raises RunError as `run` does.
    """
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as name:
        target = Path(name) / "found.json"
        words = (json.dumps(request), str(target))
        run(replace(program, command=(*program.command, *words)), deadline)
        return json.loads(target.read_text())


def _read_report(ended: _Ended, scratch: Path) -> Run:
    output = (scratch / "output").read_text(errors="replace")
    _, found, rest = output.partition(WORD)
    if not found:
        return Run(ended.seconds, None, None, None)
    report, _ = json.JSONDecoder().raw_decode(rest)
    stamped = report["finished"] - ended.began
    return Run(ended.seconds, None, None, stamped, report.get("seconds", {}))


def _time(program: Program, scratch: Path, mark: str, deadline: float) -> _Ended:
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        if program.reaches_out:
            request_end(mark)
        # What cannot be killed is reported by ``run``, which tries it again.
        with contextlib.suppress(RunError):
            kill_marked(mark)

    timer = threading.Timer(deadline, expire)
    timer.start()
    try:
        machine_before = count_machine_seconds()
        began, begin = time.time(), time.monotonic()
        children = start(program, scratch)
        cpu_seconds = sum(map(_reap, children))
        seconds = time.monotonic() - begin
        machine_seconds = count_machine_seconds() - machine_before
    finally:
        timer.cancel()
        timer.join()
    codes = tuple(child.returncode for child in children)
    return _Ended(begin, began, seconds, cpu_seconds, machine_seconds, codes, expired.is_set())


def count_machine_seconds() -> float:
    """CPU seconds that all programs took since the machine was started."""
    times = psutil.cpu_times()
    # The time of guests is part of the user time; a thief is busy on our cores, too.
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times, name, 0.0) for name in names)


def start(program: Program, scratch: Path, *words: str) -> list[subprocess.Popen[bytes]]:
    """Start its processes, with more words on the command line; their output goes to ``scratch``.

    Raises RunError if it cannot be started.
    """
    with (scratch / "output").open("wb") as output:
        try:
            return [
                subprocess.Popen(
                    (*program.command, *words),
                    env=program.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/" if program.reaches_out else scratch,
                    start_new_session=True,
                )
                for _ in range(program.copies)
            ]
        except OSError as error:
            raise RunError(f"{program.command[0]} cannot be started: {error.strerror}") from None


def mark_program(program: Program, scratch: Path, mark: str) -> Program:
    """The program whose processes carry ``mark``, and whose temporary files are in ``scratch``."""
    # Machines that the program reaches out to lack this one's directories.
    own = {} if program.reaches_out else {"TMPDIR": str(scratch)}
    return replace(program, environment={**program.environment, **own, MARK: mark})


def _reap(child: subprocess.Popen[bytes]) -> float:
    """Wait for the end of ``child``; returns its CPU time and its descendants', in seconds.

    Not Popen.wait: with a time limit it sleeps up to 50 ms between two looks.
    """
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def request_end(mark: str) -> None:
    """Ask the launchers that carry ``mark``, and are this process's children, to end their jobs.

    Returns when they have gone, or after REQUEST_SECONDS. A launcher that is killed instead
    leaves its job on the other machines.
    """
    end = time.monotonic() + REQUEST_SECONDS
    asked: set[int] = set()
    while time.monotonic() < end:
        with contextlib.suppress(psutil.Error):
            mine = {each.pid for each in psutil.Process().children()}
            left = [each for each in find_marked(mark) if each.pid in mine]
            if not left:
                return
            for launcher in left:
                if launcher.pid not in asked:
                    launcher.terminate()
                    asked.add(launcher.pid)
        time.sleep(0.05)


def kill_marked(mark: str) -> None:
    """Kill every process that carries ``mark``; returns when none is left.

    Raises RunError if one is still there after KILL_SECONDS, as in an uninterruptible wait.
    """
    end, looks = time.monotonic() + KILL_SECONDS, LOOKS
    while looks:
        left = find_marked(mark)
        # While a process is replaced by another program, its environment cannot be read.
        looks = LOOKS if left else looks - 1
        if left and time.monotonic() > end:
            pids = ", ".join(str(process.pid) for process in left)
            raise RunError(f"killed {KILL_SECONDS:g} s ago and still there: process {pids}")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def find_marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def describe_failure(program: Program, what: str, scratch: Path) -> str:
    output = (scratch / "output").read_text(errors="replace").strip() or "(no output)"
    return f"{shlex.join(program.command)} {what}:\n{output[-SHOWN_CHARACTERS:]}"
