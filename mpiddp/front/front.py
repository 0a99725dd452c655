"""The front: starts ranks with one command, restarts them, and leaves with the job's exit code.

    python -m mpiddp -n 4 train.py --its-own options

It imports the standard library alone, so that it is there at once, and so that any Python can run
it if the ranks' own is in a container.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mpiddp import environment
from mpiddp.errors import (
    FAILURE,
    INTERRUPTED,
    PREEMPTED,
    ConfigurationError,
    LaunchError,
    PeerLostError,
    StoppedError,
)
from mpiddp.files import read_toml
from mpiddp.front import preflight
from mpiddp.front.allocation import ANSWER_SECONDS, ask, find_lost_hosts
from mpiddp.front.attempt import Files, Launch, RankStart, is_ended_by_slurm, write
from mpiddp.front.hosts.reachability import Question
from mpiddp.front.hosts.schedulers import find_requeue_code
from mpiddp.front.job_end import FINAL, MISTAKES, Exit, JobEnd, find_end, repeats
from mpiddp.front.job_layout import JobLayout
from mpiddp.front.launch_plan import find_hosts, is_in_allocation, make_plan
from mpiddp.front.rank_command import make_rank_command
from mpiddp.launch.device.choice import CPU, read_list
from mpiddp.launch.launcher.hostnames import fold_hostnames, is_host
from mpiddp.launch.launcher.programs import SRUN
from mpiddp.launch.packages import NEEDED, NEEDED_TO_TRAIN, check_packages
from mpiddp.launch.script.command_line import COMMANDS, DOCTOR, CommandLine, read_front
from mpiddp.launch.script.front_options import NONE, FrontOptions, split_words
from mpiddp.options.reader import name_as_typed
from mpiddp.process import cpus, job_directory
from mpiddp.wording import count_noun, encode

CONTINUABLE = (FAILURE, PeerLostError.exit_code, PREEMPTED, INTERRUPTED)
"""Codes after which the trainer's run can go on from its last checkpoint."""
TRAINER = COMMANDS["train"]
REPEATED = "the attempt before ended with the same error, and neither came further"
SHOWN_LINES = 20
"""Of the ranks' errors, after a failure."""
SHOWN_BYTES = 1 << 16
"""How much of the end of the file is read for them."""


class Job:
    """All attempts of one job."""

    def __init__(self, line: CommandLine, options: FrontOptions) -> None:
        """Raises ConfigurationError if there is nothing to run, or no way to start it."""
        _check_directory()
        self.line = line
        self.options = options
        self.program = make_rank_command(line, options)
        self._question = _make_question(line, options)
        self.plan = make_plan(_settle_ranks(line, options), question=self._question)
        self.files: Files | None = None
        self._error_start = 0
        """How many bytes an earlier start has left in the file of errors."""
        self._lost: tuple[str, ...] = ()

    def run(self) -> tuple[JobEnd, Exit]:
        """Run attempts until one ends well, or no other one is due. Returns how the last ended."""
        options = self.options
        if options.job_log is not None:
            self.files = _name_logs(options.job_log)
            self._error_start = os.path.getsize(self.files.error)
        launch = Launch(
            self.plan.kind, starts_ranks=options.launcher != NONE, is_local=self.plan.layout is None
        )
        launch.listen()
        self._announce()
        directory = job_directory.make_or_none()
        count, used = 0, 0
        before: Exit | None = None
        try:
            while True:
                began = time.monotonic()
                try:
                    ended = self._examine_nodes(launch, directory)
                    found = ended or self._attempt(launch, directory, count)
                    found = replace(found, seconds=time.monotonic() - began)
                except (ConfigurationError, LaunchError) as error:
                    if not count:
                        raise
                    say(f"no restart: {error}")
                    break
                end = find_end(found, None if options.launcher == NONE else self.plan.kind.program)
                if options.restart_window and found.seconds > options.restart_window:
                    used = 0
                count, used = count + 1, used + 1
                is_last = used > options.restarts or launch.signal is not None
                if not is_last and before is not None and repeats(found, before):
                    say(f"attempt ended with {end}; no restart: {REPEATED}")
                    break
                if is_last or not self._prepare_restart(end, found, used):
                    break
                before = found
        finally:
            if directory is not None:
                job_directory.remove(directory)
        is_requeued = end.code == PREEMPTED and options.requeue and _requeue()
        self._report(end, found)
        if end.code in CONTINUABLE and not is_requeued:
            self._say_how_to_continue(found)
        if end.code == PREEMPTED and options.requeue:
            end = _translate(end)
        launch.stop_listening()
        return end, found

    def _attempt(self, launch: Launch, directory: Any, count: int) -> Exit:
        if launch.signal is not None:
            return Exit(128 + launch.signal, "", launch.signal)
        if launch.preemption is not None:
            return Exit(PREEMPTED, "", launch.preemption)
        numbers = {
            environment.TORCHELASTIC_RESTART_COUNT: str(count),
            environment.TORCHELASTIC_MAX_RESTARTS: str(self.options.restarts),
        }
        return RankStart(self.plan, self.program, self.files).run(launch, directory, numbers)

    def _examine_nodes(self, launch: Launch, directory: Path | None) -> Exit | None:
        """With --preflight: have the doctor look at all nodes, and plan without those that fail.

        Returns the attempt's end if the job was preempted meanwhile. Raises LaunchError if too few
        are left.
        """
        is_asked = launch.signal is not None or launch.preemption is not None
        if not self.options.preflight or is_asked:
            return None
        began, plan, layout = time.monotonic(), self.plan, self.plan.layout
        if layout is not None:
            request = preflight.widen(self.options, layout.ranks_of)
            # Hosts that do not answer have been left out, and told, by the first plan.
            without = self._lost or (() if plan.is_over_ssh else None)
            plan = make_plan(request, without, self._question)
        hosts = preflight.list_hosts(layout)
        faults = preflight.find_faults(plan, self.line, hosts, launch, directory)
        if isinstance(faults, Exit):
            # Such a signal ends the doctor, and says nothing of a node.
            number = launch.preemption or faults.preemption
            if faults.signal is not None or number is None:
                return None
            say("preempted during the preflight: no rank was started")
            return Exit(PREEMPTED, "", number)
        for fault in faults:
            say(fault.describe())
        bad, passed = preflight.find_bad_hosts(faults, hosts, layout, self.options)
        if bad:
            self._lost += bad
            self.plan = make_plan(self.options, self._lost, self._question)
        say(f"{passed} passed the preflight in {time.monotonic() - began:.1f} s")
        return None

    def _prepare_restart(self, end: JobEnd, found: Exit, used: int) -> bool:
        """Plan the next attempt without the nodes that were lost; False if there is none."""
        if end.code in MISTAKES:
            say(f"attempt ended with {end}; there is no restart after this code")
        if end.code in FINAL:
            return False
        without = ""
        if self.plan.layout is not None:
            self._lost = _choose_lost(self.plan.layout, self._lost, found, self.options)
            hosts = len(self.plan.layout.hosts)
            try:
                self.plan = make_plan(self.options, self._lost, self._question)
            except StoppedError:
                return True  # The next attempt starts nothing, and has the signal's exit code.
            except ConfigurationError as error:
                say(f"no restart: {error}")
                return False
            left = self.plan.layout
            if left is None or len(left.hosts) < self.options.fewest_nodes:
                say(
                    f"no restart: {len(left.hosts) if left else 0} of {count_noun(hosts, 'node')} "
                    f"left, and --min-nodes is {self.options.fewest_nodes}"
                )
                return False
            without = f", without {fold_hostnames(self._lost)}" if self._lost else ""
        say(f"attempt ended with {end}; restart {used} of {self.options.restarts}{without}")
        return True

    def _say_how_to_continue(self, found: Exit) -> None:
        """Name the trainer's run: a default name differs the next time.

        Without a checkpoint nothing is promised.
        """
        path = (found.outcome or {}).get("path")
        if not path or TRAINER not in (self.line.own_program, self.line.module):
            return
        is_named = any(word.partition("=")[0] == "--name" for word in self.line.rest)
        run = Path(path).parent
        name = "" if is_named else f" with --name {shlex.quote(run.name)}"
        if reason := _explain_new_start(run):
            say(f"{reason}: the same command{name} begins this run anew")
        else:
            say(f"to continue this run, type the same command{name}")

    def _announce(self) -> None:
        """Say what is about to be started."""
        if self.plan.note:
            say(self.plan.note)
        layout = self.plan.layout
        spares = layout.describe_spares() if layout is not None and self.options.restarts else ""
        if self.options.job_log is None or self.files is None:
            if spares:
                say(f"{spares} to spare for a restart")
            return
        rows: list[tuple[str, str]] = [("spares", spares)] if spares else []
        if layout is not None:
            rows += [
                ("ranks", layout.describe_ranks()),
                ("per rank", layout.describe_cores()),
                ("GPUs", layout.describe_gpus()),
            ]
        rows.append(("environment", os.environ.get(environment.ENVIRONMENT) or sys.prefix))
        if os.environ.get(environment.WRAP):
            rows.append(("prefix", os.environ[environment.WRAP]))
        error = os.path.basename(self.files.error)
        rows.append(("logs", f"{os.getcwd()}/{self.files.output}, {error}"))
        more = self.files.srun_options() if self.plan.kind is SRUN else []
        rows.append(("command", self.plan.describe([*more, *self.program])))
        name = os.environ.get(environment.SLURM_JOB_NAME, "")
        nodes = os.environ.get(environment.SLURM_JOB_NODES, os.uname().nodename)
        lines = [f"mpiddp: job {job_directory.choose_name()} ({name}) on {nodes}"]
        lines += [f"  {title:<12} {text}" for title, text in rows]
        _write(sys.stdout, "\n".join(lines) + "\n")

    def _report(self, job_end: JobEnd, found: Exit) -> None:
        if self.files is None:
            number = found.signal
            said = (found.outcome or {}).get("code")
            if number is not None and job_end.code == 128 + number != said:
                # No rank has said why. Launchers only name a rank that has ended, or nothing.
                killed = f" ({self.plan.kind.name} did not end, and was killed)"
                why = killed if found.was_killed else ""
                say(f"stopped by {signal.Signals(number).name}: exit code {job_end.code}{why}")
            return
        say(f"job {job_directory.choose_name()} ended with {job_end}")
        if job_end.code == 0:
            return
        try:
            with open(self.files.error, "rb") as stream:
                end = stream.seek(0, os.SEEK_END)
                stream.seek(max(self._error_start, end - SHOWN_BYTES))
                last = stream.read().splitlines()[-SHOWN_LINES:]
        except OSError:
            return
        if last:
            shown = b"\n".join(last).decode(errors="surrogateescape")
            _write(sys.stderr, f"The last lines of {self.files.error}:\n{shown}\n")


def _make_question(line: CommandLine, options: FrontOptions) -> Question:
    """What hosts are asked that are reached over SSH: the same Python, and the same script."""
    wrap = split_words(environment.WRAP, os.environ.get(environment.WRAP, ""))
    script = line.rest[0] if line.rest and line.command is None and line.module is None else ""
    files = (os.path.abspath(script),) if os.path.isfile(script) else ()
    is_examination = line.command == DOCTOR
    starter = (*wrap, options.python or sys.executable)
    return Question(starter, files, is_examination=is_examination)


def _check_directory() -> None:
    """Raise ConfigurationError if ranks could not be started where this process is."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError(
            "the current directory has been deleted: change to another one, in which the ranks are "
            "to run"
        ) from None


def _explain_new_start(run: Path) -> str:
    """Why the trainer's run begins anew if it is started again; empty if it goes on."""
    try:
        options = read_toml(run / "config.toml")
    except (OSError, ValueError):
        options = {}
    if options.get("resume") == "never":
        return "--resume never"
    elsewhere = options.get("checkpoint_dir")
    folder = Path(elsewhere) if isinstance(elsewhere, str) else run / "checkpoints"
    return "" if any(folder.glob("step-*[0-9]")) else f"there is no checkpoint in {folder}"


def _choose_lost(
    layout: JobLayout, before: Sequence[str], found: Exit, options: FrontOptions
) -> tuple[str, ...]:
    """Hosts to be left out: those that Slurm has lost, and one that is faulty or lost a rank.

    The latter stays if too few would be left, because perhaps only the rank was at fault. One that
    lost a rank also stays if this process runs on it: ranks that are cut off from it name it.
    """
    hosts = (*layout.hosts, *layout.spares, *before)
    job = os.environ.get(environment.SLURM_JOB_ID)
    lost = {*before, *(find_lost_hosts(hosts, job) if job else ())}
    outcome = found.outcome or {}
    named = str(outcome.get("lost_host") or "")
    if is_host(named, os.uname().nodename):
        named = ""
    if outcome.get("node_fault"):
        named = str(outcome.get("host") or "")
    suspect = {host for host in hosts if named and is_host(host, named)}
    if len(set(hosts) - lost - suspect) >= options.fewest_nodes:
        lost |= suspect
    return tuple(host for host in hosts if host in lost)


def _name_logs(folder: Path) -> Files:
    """Name the files of all ranks' output, and make them.

    Raises ConfigurationError if they cannot be written. A job's name may hold anything, and be
    long; in srun's --output, % and \\ mean something, too.
    """
    from mpiddp.process.streams.output import open_log  # Most jobs have no logs.

    name = os.environ.get(environment.SLURM_JOB_NAME) or "job"
    name = "".join("-" if c.isspace() or not c.isprintable() or c in "/%\\" else c for c in name)
    path = os.path.join(folder, f"{name[:50]}-{job_directory.choose_name()}")
    hint = "--chdir=DIRECTORY" if is_in_allocation(os.environ) else "--job-log"
    files = Files(f"{path}.out", f"{path}.err")
    for each in (files.output, files.error):
        os.close(open_log(Path(each), hint))
    return files


def _requeue() -> bool:
    """Have Slurm start this batch job again; the ranks have ended. Returns whether it will.

    A job that Slurm ends is left to it: it has been cancelled, or is requeued by Slurm itself.
    """
    job = environment.job_identity()
    if job is None or is_ended_by_slurm(ANSWER_SECONDS):
        return False
    try:
        ask("scontrol", "requeue", job)
    except ConfigurationError as error:
        # A requeue ends what runs in the job, perhaps scontrol before it has heard the answer.
        if not is_ended_by_slurm(ANSWER_SECONDS):
            say(f"the job was not requeued: {error}")
            return False
    return True


def _translate(end: JobEnd) -> JobEnd:
    """With the exit code by which another scheduler than Slurm is told to start the job again."""
    found = None if is_in_allocation(os.environ) else find_requeue_code()
    if found is None:
        return end
    scheduler, code = found
    say(f"exit code {code} in place of {end.code}: {scheduler} starts the job again")
    return JobEnd(code, f"the ranks' code was {end.code}")


def say(text: str) -> None:
    """Write one line to standard error."""
    _write(sys.stderr, f"mpiddp: {text}\n")


def _write(stream: Any, text: str) -> None:
    # Names of jobs and files may hold bytes that are no text.
    write(stream, encode(text, stream))


def _settle_ranks(line: CommandLine, options: FrontOptions) -> FrontOptions:
    """Choose as many ranks as --devices has GPUs, or cores for them, if the front chooses at all.

    Raises ConfigurationError for a mistake in it.
    """
    devices = line.find_rank_option("--devices")
    with name_as_typed(["--devices"]):
        numbers = None if devices is None else read_list(devices)
    is_open = options.ranks is None and options.launcher != NONE
    is_here = not is_in_allocation(os.environ) and find_hosts(options) is None
    if not is_open or not is_here or (numbers is None and devices != CPU):
        return options
    return replace(options, ranks=len(numbers) if numbers else cpus.count_cores())


def _check_output(line: CommandLine, ranks: int | None) -> None:
    """Raise ConfigurationError if the ranks would refuse --console or --log-dir."""
    console, folder = line.find_rank_option("--console"), line.find_rank_option("--log-dir")
    if console is None and folder is None:
        return
    from mpiddp.process.streams.output import STREAMS, RankOutput, name_log, open_log

    if console is not None:
        RankOutput(console=console).check_world(ranks or sys.maxsize)
    if folder is not None:
        os.close(open_log(name_log(Path(folder), 0, STREAMS[2])))


def _check_tuning(line: CommandLine) -> None:
    """Raise ConfigurationError if the file of --tuning cannot be read.

    Unless ranks have another prefix: a container may have files that are not here.
    """
    path = line.find_rank_option("--tuning")
    if not path or os.environ.get(environment.WRAP):
        return
    try:
        open(path, "rb").close()
    except OSError as error:
        raise ConfigurationError(f"--tuning: {path} cannot be read: {error.strerror}") from None


def _check_ranks(
    line: CommandLine, options: FrontOptions, check: Callable[[Sequence[str]], object] | None
) -> None:
    """Raise ConfigurationError if the ranks lack a package, or would refuse their words.

    They may have another Python, with other files.
    """
    if options.python or os.environ.get(environment.WRAP) or options.launcher == NONE:
        return
    check_packages(NEEDED_TO_TRAIN if line.own_program == TRAINER else NEEDED)
    # Ranks elsewhere may have files that are not here.
    is_here = not (options.launcher_options or is_in_allocation(os.environ))
    if check is not None and is_here:
        check(line.rest[1:])


def run(line: CommandLine, check: Callable[[Sequence[str]], object] | None = None) -> NoReturn:
    """Start the ranks that the command line asks for; ends this process with the exit code.

    ``check`` raises ConfigurationError for what the ranks of one of mpiddp's own programs would
    refuse of the words after its name.
    """
    try:
        options = read_front(line)
        job = Job(line, options)
        if options.dry_run:
            _write(sys.stdout, f"{job.plan.describe(job.program)}\n")
            raise SystemExit(0)
        _check_ranks(line, options, check)
        _check_output(line, job.plan.ranks)
        _check_tuning(line)
        end, _ = job.run()
    except (ConfigurationError, LaunchError) as error:
        say(str(error))
        raise SystemExit(error.exit_code) from None
    raise SystemExit(end.code)
