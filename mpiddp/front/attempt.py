"""One start of the ranks: the launcher's process, its messages, and the signals that come to us."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.front.allocation import ANSWER_SECONDS, ask
from mpiddp.front.guard import Guard, Watched
from mpiddp.front.job_end import Exit, FailureReader
from mpiddp.front.launch_plan import LaunchPlan
from mpiddp.front.launcher_messages import copy_messages
from mpiddp.launch.launcher import leftovers
from mpiddp.launch.launcher.hostnames import is_host
from mpiddp.launch.launcher.programs import OPEN_MPI, OPEN_MPI_4, OTHER, SRUN, LauncherKind
from mpiddp.process import job_directory
from mpiddp.process.descendants import has_variable, list_children
from mpiddp.process.publication import ADDRESS_FILE
from mpiddp.process.streams.standard_input import copy_input, offer

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREEMPTING = (signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS, START_SECONDS = 1.0, 300.0
"""From an early signal to the next: a launcher forgets one that comes before its ranks. And for how
long: ranks that have closed their session look as if they had not met."""
PATIENCE_SECONDS = 5.0
"""After Ctrl-C: how long until the user learns that a second one kills what has not ended."""
STILL_RUNNING = b"""\
mpiddp: ranks still run (python -m mpiddp stacks shows where): a second Ctrl-C kills them
"""
SLURM_SECONDS = 10.0
"""How long it may take to answer once a signal ends the job: two questions, and what Slurm ends has
30 by default (KillWait)."""
PASSED_ON = (*ENDING, *PREEMPTING, signal.SIGTSTP, signal.SIGCONT)


@dataclass(frozen=True)
class Files:
    """The files for the standard output and the standard error of all ranks."""

    output: str
    error: str

    def srun_options(self) -> list[str]:
        """srun writes them itself. It appends: a requeued job must keep what it wrote before."""
        output, error = (path.replace("%", "%%") for path in (self.output, self.error))
        return [f"--output={output}", f"--error={error}", "--open-mode=append"]


class Launch:
    """The launcher that the front has started, and how signals reach it.

    There is one Launch in a process. From `listen` on, signals do not end this process. Between two
    attempts there is nothing to pass them on to: ``signal`` and ``preemption`` keep them.
    """

    def __init__(self, kind: LauncherKind, *, starts_ranks: bool, is_local: bool = True) -> None:
        """``starts_ranks``: whether it is a launcher, and not a program that runs by itself.
        ``is_local``: whether all that it starts is on this machine."""
        self.kind = kind
        self.starts_ranks = starts_ranks
        self._is_local = is_local
        self.signal: int | None = None
        """The last one that asked this process to end."""
        self.preemption: int | None = None
        """The last one that preempted the job while no ranks ran: they cannot react to it."""
        self._passed: int | None = None
        """The last one to preempt the job that the ranks have got that run now."""
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = ""
        """The job's, for the attempt that runs."""
        self._began = 0.0
        """When its launcher was started."""
        self._repeats = False
        """Whether the alarm is for a signal that may have been lost."""
        self._guard: Guard | None = None
        self._told: set[int] = set()
        """Signals that the guard knows of."""
        self._told_ranks: set[int] = set()
        """Signals that ranks have got from here, past their launcher."""

    def listen(self) -> None:
        """Take signals from here on."""
        # While it is ignored, as it may be from the start, nobody learns how a child has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in PASSED_ON:
            # A signal that was ignored from the start, as under nohup, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)
        signal.signal(signal.SIGALRM, self._repeat)
        # A program passes blocked signals on to what it starts, and a rank blocks some.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*PASSED_ON, signal.SIGALRM))

    def stop_listening(self) -> None:
        """Ignore signals: none takes the place of the exit code while Python, too, is ending."""
        for number in (*PASSED_ON, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)

    def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        files: Files | None,
        *,
        offers_input: bool = False,
    ) -> Exit:
        """Run a launcher to its end. Raises ConfigurationError if it cannot be run.

        ``offers_input``: whether rank 0 opens standard input itself, if it is no terminal.
        """
        is_filtered = self.starts_ranks and self.kind is not OTHER
        with contextlib.ExitStack() as stack:
            self._guard = guard = stack.enter_context(Guard(self._describe(variables)))
            offered = offer(stack, partial(_prepare_copy, os.getpid())) if offers_input else ""
            output, error = stack.enter_context(self._open_files(files))
            self._directory = variables.get(environment.JOB_DIRECTORY, "")
            self._began, self._passed = time.monotonic(), None
            try:
                process = subprocess.Popen(
                    command,
                    # Not what a front around this one has offered.
                    env={**variables, environment.STANDARD_INPUT: offered},
                    stdin=subprocess.DEVNULL if offered else self._open_input(stack),
                    stdout=output,
                    stderr=subprocess.PIPE if is_filtered else error,
                    process_group=None if self._shares_terminal() else 0,
                    preexec_fn=partial(_end_with, os.getpid()),
                )
            except OSError as problem:
                reason = f"{command[0]} cannot be run: {problem.strerror}"
                raise ConfigurationError(reason) from None
            # Signals are passed on from here on: the guard must know the launcher before.
            guard.watch(process.pid)
            self._process = process
            for number in (self.signal, self.preemption):
                if number is not None:
                    # It came before there was a process to pass it on to.
                    self._pass_on(number)
            # The launcher has its own work to do meanwhile.
            leftovers.remove()
            reader = FailureReader()
            if self._process.stderr is not None:

                def show(text: bytes) -> None:
                    write(sys.stderr if error is None else error, text)
                    reader.add(text)

                with self._process.stderr as messages:
                    copy_messages(messages, self._process, show)
            code = self._process.wait()
            # What comes from here on is for the next attempt.
            self._process = None
            was_killed = guard.finish(code)
        status = code if code >= 0 else 128 - code
        said, passed = reader.find(), self._passed
        return Exit(status, said, self.signal, was_killed=was_killed, preemption=passed)

    @contextlib.contextmanager
    def _open_files(self, files: Files | None) -> Iterator[tuple[IO[bytes] | None, ...]]:
        """Those for standard output and error; None for those that srun opens, or that stay."""
        if files is None or self.kind is SRUN:
            yield None, None
            return
        with open(files.output, "ab") as output, open(files.error, "ab") as error:
            yield output, error

    def _describe(self, variables: Mapping[str, str]) -> Watched:
        is_srun = self.kind is SRUN
        return Watched(
            token="" if is_srun else variables.get(environment.ATTEMPT_TOKEN, ""),
            has_ranks=self.starts_ranks and self._is_local and not is_srun,
            kill_step=lambda srun: is_srun and _signal_step(srun, signal.SIGKILL),
            directory=variables.get(environment.JOB_DIRECTORY, ""),
        )

    def _shares_terminal(self) -> bool:
        """Whether Ctrl-C reaches the launcher from the terminal itself.

        Open MPI's mpirun sends SIGTERM to its ranks when it is interrupted. It gets another process
        group, which a terminal does not interrupt, and each rank gets the SIGINT itself; at
        the second one mpirun does. Other launchers pass on what they get.
        """
        return self.kind is SRUN or not self.starts_ranks

    def _open_input(self, stack: contextlib.ExitStack) -> IO[bytes] | None:
        """A copy of what is typed, for a launcher that may not read the terminal itself.

        A process group in the background would be stopped when it reads; Ctrl-C must not reach it.
        None if standard input is no terminal that this process reads.
        """
        if self._shares_terminal():
            return None
        try:
            if os.tcgetpgrp(0) != os.getpgrp():
                return None
        except OSError:
            return None
        return copy_input(stack, partial(_prepare_copy, os.getpid()))

    def _take(self, number: int, _: object) -> None:
        if number in ENDING:
            self.signal = number
        if self._is_running():
            self._passed = number if number in PREEMPTING else self._passed
            self._pass_on(number)
        elif number in PREEMPTING:
            self.preemption = number
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _is_running(self) -> bool:
        """Whether there is a launcher that has not ended, perhaps without being waited for yet."""
        if self._process is not None and self._process.returncode is None:
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            with contextlib.suppress(ChildProcessError):
                return os.waitid(os.P_PID, self._process.pid, look) is None
        return False

    def _pass_on(self, number: int) -> None:
        assert self._process is not None
        is_told = number == signal.SIGINT and self._shares_terminal() and _is_in_foreground()
        if is_told and not self.starts_ranks:
            return  # A program may go on after Ctrl-C.
        self._tell_guard(number)
        if number in ENDING:
            self._set_alarm()
        if not is_told:
            self._deliver(number)

    def _set_alarm(self) -> None:
        self._repeats = self._is_starting()
        signal.setitimer(signal.ITIMER_REAL, REPEAT_SECONDS if self._repeats else PATIENCE_SECONDS)

    def _repeat(self, *_: object) -> None:
        """Deliver the last ending signal again, until the ranks have met: then for the last time.

        One that has reached a rank meanwhile has ended the job. Ranks that have met may wait inside
        a library, or for a rank that Ctrl-C has not reached: the user is told how to end them.
        """
        if self.signal is None or not self._is_running():
            return
        if self._repeats:
            self._set_alarm()
            self._deliver(self.signal)
        elif self.signal == signal.SIGINT and self.starts_ranks:
            write(sys.stderr, STILL_RUNNING)

    def _is_starting(self) -> bool:
        """Whether a signal may be lost between the launcher and ranks that do not run yet."""
        is_young = time.monotonic() < self._began + START_SECONDS
        return self.starts_ranks and is_young and not self._have_ranks_met()

    def _deliver(self, number: int) -> None:
        assert self._process is not None
        is_early = number == signal.SIGINT and self.starts_ranks and not self._have_ranks_met()
        if is_early:
            number = signal.SIGTERM  # Python may be starting, and would show where it was.
        if self.kind is SRUN and number not in (signal.SIGINT, signal.SIGTSTP, signal.SIGCONT):
            if not _signal_step(self._process.pid, number) and number in ENDING:
                # It has not created its step yet, and ends.
                self._process.send_signal(number)
            return
        if not self.starts_ranks and number == signal.SIGTERM and is_ended_by_slurm(SLURM_SECONDS):
            return  # Slurm has told every process of the job, and must not twice.
        processes = [self._process.pid]
        if not is_early and self._goes_past_launcher(number):
            self._told_ranks.add(number)
            processes = self._list_told(self._process.pid) or processes
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        if number in ENDING:
            self._process.send_signal(signal.SIGCONT)  # It may be stopped.

    def _list_told(self, launcher: int) -> list[int]:
        """The launcher's children; those alone that are ranks if others are its way to hosts."""
        children = list_children(launcher)
        if self._is_local or environment.SLURM_JOB_ID in os.environ:
            return children
        signs = [f"{sign}=".encode() for sign in environment.RANK_VARIABLES["rank"]]
        return [child for child in children if has_variable(child, signs)]

    def _have_ranks_met(self) -> bool:
        """Whether start-up is about to be over; True if that is not known, as in a container."""
        is_known = self._directory and not os.environ.get(environment.WRAP)
        return not is_known or os.path.exists(f"{self._directory}/{ADDRESS_FILE}")

    def _tell_guard(self, number: int) -> None:
        """Have it end what does not end by itself.

        A second SIGTERM is no hurry in a Slurm job, which gets one before its time is over and one
        then. Slurm kills what is left.
        """
        is_new = number == signal.SIGINT or environment.SLURM_JOB_ID not in os.environ
        if self._guard is not None and number in ENDING and (is_new or number not in self._told):
            self._told.add(number)
            self._guard.tell(number)

    def _goes_past_launcher(self, number: int) -> bool:
        """Whether Open MPI's ranks get the signal from here: the first SIGINT, and SIGTERM.

        After SIGTERM mpirun kills them a second later, while a trainer writes its checkpoint. If
        ranks are on other nodes, its children are the programs by which it reaches those nodes.
        """
        if self.kind not in (OPEN_MPI, OPEN_MPI_4) or number in self._told_ranks:
            return False
        return number == signal.SIGINT or (number == signal.SIGTERM and self._is_local)


@dataclass(frozen=True)
class RankStart:
    """One start of ranks: their launcher, what each runs, and the files of what they print."""

    plan: LaunchPlan
    program: Sequence[str]
    files: Files | None

    def run(self, launch: Launch, directory: Path | None, numbers: Mapping[str, str]) -> Exit:
        """``directory``: the job's. ``numbers``: variables of this attempt.

        Raises ConfigurationError if there is no such launcher, or the directory is full.
        """
        variables = {**self.plan.environment(), **numbers}
        if directory is not None:
            token = os.urandom(16).hex()
            try:
                job_directory.begin_attempt(directory, token)
            except OSError as error:
                raise ConfigurationError(
                    f"cannot write to {directory} ({error.strerror}): make room there, or set "
                    f"{environment.STATE_HOME} to another directory"
                ) from None
            variables[environment.JOB_DIRECTORY] = str(directory)
            variables[environment.ATTEMPT_TOKEN] = token
        command = [*self._command(variables), *self.program]
        found = launch.run(command, variables, self.files, offers_input=self._offers_input())
        if directory is None:
            return found
        return replace(found, outcome=job_directory.read_outcome(directory))

    def _offers_input(self) -> bool:
        """Whether rank 0 opens standard input itself: it is on this host, started by an mpirun."""
        layout = self.plan.layout
        is_here = layout is None or is_host(layout.hosts[0], os.uname().nodename)
        # The user may give it to other ranks: --stdin of Open MPI, -s of MPICH.
        options = [word.lstrip("-") for word in self.plan.words if word.startswith("-")]
        is_asked = any(option.partition("=")[0] in ("stdin", "s") for option in options)
        return is_here and not is_asked and self.plan.kind not in (SRUN, OTHER)

    def _command(self, variables: Mapping[str, str]) -> list[str]:
        """The launcher's words."""
        # Each attempt's own, too.
        words = self.plan.make_words({**variables, environment.STANDARD_INPUT: ""})
        if self.files is not None and words[:1] == ["srun"]:
            words += self.files.srun_options()
        return words


def is_ended_by_slurm(seconds: float) -> bool:
    """Whether Slurm ends this batch job: it was cancelled, preempted, or is out of time.

    False if Slurm does not answer in time.
    """
    job = os.environ.get(environment.SLURM_JOB_ID)
    if not job:
        return False
    with contextlib.suppress(ConfigurationError):
        said = ask("scontrol", "--oneliner", "show", "job", job, seconds=seconds)
        lines = [line for line in said.splitlines() if line.startswith(f"JobId={job} ")]
        return any(" JobState=RUNNING " not in line for line in lines)
    return False


def _is_in_foreground() -> bool:
    """Whether this process's group is the terminal's, which then has told all of it."""
    with contextlib.suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _prepare_copy(parent: int) -> None:
    """In a child, before its program runs: ignore Ctrl-C, and end when ``parent`` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(parent)


def _end_with(parent: int) -> None:
    """In a child, before its program runs: let it have SIGTERM when ``parent`` ends.

    The kernel sends it, also if the guard has been killed.
    """
    import ctypes  # In the child alone.

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)  # It has gone already.


def write(stream: Any, text: bytes) -> None:
    """Write to a standard stream, if it is there and somebody reads it.

    Past its buffer: what cannot be written would be tried again, and fail, when Python ends.
    """
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.flush()
            buffer = getattr(stream, "buffer", stream)
            raw = getattr(buffer, "raw", buffer)
            while text:
                text = text[raw.write(text) or len(text) :]


def _signal_step(srun: int, number: int) -> bool:
    """Send a signal to all ranks, past srun, which would kill them; False if it has no step.

    scancel and the time limit send TERM to this process, to srun and to the ranks, and KILL after
    Slurm's KillWait; Slurm refuses this one then. TERM for the batch script alone (scancel --batch,
    sbatch --signal=B:TERM@60) comes to this process only.
    """
    with contextlib.suppress(ConfigurationError):
        # There is more time to make way than to end.
        seconds = ANSWER_SECONDS if number in PREEMPTING else SLURM_SECONDS
        job, host = os.environ[environment.SLURM_JOB_ID], os.uname().nodename.partition(".")[0]
        said = ask("scontrol", "--oneliner", "show", "step", job, seconds=seconds)
        step = find_step(said, host, srun)
        if step is None:
            return False
        name = signal.Signals(number).name.removeprefix("SIG")
        ask("scancel", "--quiet", f"--signal={name}", step, seconds=seconds)
    return True


def find_step(text: str, host: str, srun: int) -> str | None:
    """The step that an srun on ``host`` has started: in salloc's shell there may be others."""
    for line in text.splitlines():
        match = re.match(rf"StepId=(\S+) .*\bSrunHost:Pid={re.escape(host)}:{srun}\b", line)
        if match is not None:
            return match[1]
    return None
