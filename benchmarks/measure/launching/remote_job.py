"""A job whose ranks carry out commands, and which leaves no process behind."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure.launching import processes
from benchmarks.measure.launching.json_lines import JsonLine, accept, get_port, listen
from benchmarks.measure.launching.processes import (
    Program,
    RunError,
    count_machine_seconds,
    describe_failure,
    find_marked,
    kill_marked,
    mark_program,
    request_end,
)

END_SECONDS = 60.0
"""How long a job may take to end after the command to end."""


@dataclass
class Job:
    """A running job; `start` makes one."""

    program: Program
    scratch: Path
    process: subprocess.Popen[bytes]
    mark: str
    """What all its processes carry in their environment."""
    deadline: float
    """Seconds for each answer."""
    line: JsonLine | None = None
    greeting: Any = None
    """The first report of its rank 0."""

    def ask(self, command: Mapping[str, Any], what: str) -> list[Any]:
        """Send a command to all ranks; returns their answers, in order of ranks.

        ``what`` names it in an error.

        Raises RunError, with the job's output, if it dies or does not answer in time.
        """
        assert self.line is not None
        try:
            self.line.send(command)
            answers = self.line.receive(self.deadline)
        except TimeoutError:
            raise self._fail(f"gave no answer for {self.deadline:g} s ({what})") from None
        except OSError:
            answers = None
        if answers is None:
            raise self._fail(f"{self._describe_end()} ({what})")
        return list(answers)

    def end(self) -> None:
        """Let the job end by itself. Raises RunError if it does not, or ends in an error."""
        assert self.line is not None
        with contextlib.suppress(OSError):
            self.line.send({"do": "end"})
        self._await_end()
        if self.process.poll() is None:
            raise self._fail(f"has not ended {END_SECONDS:g} s after the command to end")
        if self.process.returncode:
            raise self._fail(f"ended with exit code {self.process.returncode}")

    def check(self) -> None:
        if self.process.poll() is not None:
            raise self._fail(self._describe_end())

    def _describe_end(self) -> str:
        self._await_end()
        code = self.process.poll()
        return "lost its rank 0" if code is None else f"ended with exit code {code}"

    def _await_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)

    def _fail(self, what: str) -> RunError:
        return RunError(describe_failure(self.program, what, self.scratch))


@contextlib.contextmanager
def start(program: Program, deadline: float) -> Iterator[Job]:
    """Start a job and wait until its rank 0 has connected; what is left at the end is killed.

    The last word of its command line will be the addresses at which this process listens.
    """
    mark = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory(prefix="mpiddp-bench-", ignore_cleanup_errors=True) as name,
        contextlib.closing(listen("" if program.reaches_out else "127.0.0.1")) as server,
    ):
        scratch = Path(name)
        addresses = list_addresses(server, program.reaches_out)
        [process] = processes.start(mark_program(program, scratch, mark), scratch, addresses)
        job = Job(program, scratch, process, mark, deadline)
        try:
            try:
                [(job.line, job.greeting)] = accept(server, mark, 1, deadline, job.check)
            except TimeoutError:
                raise job._fail(f"was not ready within {deadline:g} s") from None
            server.close()
            yield job
        finally:
            if job.line is not None:
                job.line.close()
            # A launcher that is asked takes its ranks, and what they hold, along.
            request_end(mark)
            kill_marked(mark)
            process.wait()


def count_others_seconds(jobs: Iterable[Job]) -> float:
    """CPU seconds that all programs of this machine took so far, but for the jobs and this one."""
    own = [psutil.Process(), *(each for job in jobs for each in find_marked(job.mark))]
    seconds = 0.0
    for process in own:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system
    return count_machine_seconds() - seconds


def list_addresses(server: socket.socket, reaches_out: bool) -> str:
    """Where ranks may find the server: on this machine, or at any of its addresses."""
    hosts = ["127.0.0.1"]
    if reaches_out:
        found = [each for row in psutil.net_if_addrs().values() for each in row]
        hosts = [each.address for each in found if each.family == socket.AF_INET]
        hosts.sort(key=lambda host: host.startswith("127."))
    return ",".join(f"{host}:{get_port(server)}" for host in hosts)
