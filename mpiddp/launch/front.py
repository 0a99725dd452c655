"""The front: starts ranks with one command, restarts them, and leaves with the job's exit code.

    python -m mpiddp -n 4 train.py --its-own options

It imports the standard library alone, so that it is there at once, and so that any Python can run
it where the ranks' own is in a container.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from mpiddp import environment
from mpiddp.errors import PREEMPTED, ConfigurationError
from mpiddp.launch import job_directory
from mpiddp.launch.command_line import RANKS, CommandLine
from mpiddp.launch.launcher.allocation import Layout, Request, ask, find_lost_hosts
from mpiddp.launch.launcher.attempt import Files, Launch, is_ended_by_slurm, write
from mpiddp.launch.launcher.hostnames import count_noun, fold_hostnames, is_host
from mpiddp.launch.launcher.job_end import FINAL, Exit, JobEnd, find_end
from mpiddp.launch.launcher.plan import NONE, Plan, is_in_allocation, make_plan

SHOWN_LINES = 20
"""Of the ranks' errors, after a failure."""
SHOWN_BYTES = 1 << 16
"""At most, of the end of the file."""


@dataclass(frozen=True)
class FrontOptions:
    """What the front was told."""

    request: Request = field(default_factory=Request)
    launcher: str = "auto"
    launcher_options: tuple[str, ...] = ()
    dry_run: bool = False
    restarts: int = 0
    restart_window: float = 0.0
    """Seconds; 0 for never."""
    min_nodes: int = 1
    requeue: bool = False
    job_log: str | None = None
    """Directory for the output of all ranks."""
    python: str | None = None
    """What runs each rank; None for this Python."""


def read_options(line: CommandLine) -> FrontOptions:
    """Raises ConfigurationError for a value that is out of range or given twice."""
    given: dict[str, str] = {}
    for name, value in line.front:
        if name in given and name != "--launcher-options":
            raise ConfigurationError(f"{name} is given twice")
        given[name] = f"{given[name]} {value}" if name in given else value
    ranks = given.get("-n", "auto")
    return FrontOptions(
        request=Request(
            ranks=None if ranks == "auto" else _read_count("-n", ranks, "a whole number or auto"),
            nodes=_read_optional(given, "--nodes"),
            ranks_per_node=_read_optional(given, "--ranks-per-node"),
        ),
        launcher=given.get("--launcher", "auto"),
        launcher_options=_split_words("--launcher-options", given.get("--launcher-options", "")),
        dry_run="--dry-run" in given,
        restarts=_read_count("--restarts", given.get("--restarts", "0"), least=0),
        restart_window=_read_seconds("--restart-window", given.get("--restart-window", "0")),
        min_nodes=_read_optional(given, "--min-nodes") or 1,
        requeue="--requeue" in given,
        job_log=given.get("--job-log"),
        python=given.get("--python"),
    )


def _read_optional(given: Mapping[str, str], name: str) -> int | None:
    return _read_count(name, given[name]) if name in given else None


def _read_count(name: str, text: str, what: str = "a whole number", *, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigurationError(f"{name} expects {what}, at least {least}, found {text!r}")
    return int(text)


def _read_seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ConfigurationError(f"{name} expects seconds, at least 0, found {text!r}")
    return seconds


def _split_words(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"{name} cannot be split into words ({error}): {text}") from None


# What each rank runs


def find_program(line: CommandLine, options: FrontOptions) -> list[str]:
    """The command line of one rank. Raises ConfigurationError where there is nothing to run."""
    wrap = _split_words(environment.WRAP, os.environ.get(environment.WRAP, ""))
    if wrap and options.launcher == NONE:
        raise ConfigurationError(
            f"{environment.WRAP} is for scripts whose ranks are started here; this program starts "
            "its own, without it"
        )
    _check_places(line)
    if not wrap:
        _check_program(line)
    start = [
        *_block_signals(options),
        *wrap,
        options.python or sys.executable,
        *_interpreter_options(),
    ]
    if options.launcher == NONE:
        return [*start, *_list_program(line)]
    if line.own_program is not None:
        return [*start, "-m", line.own_program, *line.rest[1:]]
    return [*start, "-m", "mpiddp", *line.ranks, *_list_program(line)]


def _block_signals(options: FrontOptions) -> Sequence[str]:
    """What starts a rank that a signal of preemption cannot kill before it has a handler."""
    if not options.requeue:
        return ()
    command = ("env", "--block-signal=USR1,USR2")
    try:
        # GNU's env has it since 2019.
        found = subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ()
    return command if found.returncode == 0 else ()


def _list_program(line: CommandLine) -> list[str]:
    if line.module is not None:
        return ["-m", line.module, *line.rest]
    is_like_an_option = line.rest[0].startswith("-") or line.is_marked
    return [*(["--"] if is_like_an_option else []), *line.rest]


def _interpreter_options() -> list[str]:
    """Python's own options, such as -u or -X: the ranks get them too."""
    words = iter(sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])])
    found: list[str] = []
    for word in words:
        if not word.startswith("-"):
            break  # The installed command.
        # Letters can stand together (-Bu); a value follows -m, -W and -X (-Xdev or -X dev).
        last = re.match("-[^-cmWX]*([cmWX]?)", word)
        if last is not None and last[1] in ("c", "m"):
            found += [last[0][:-1]] if len(last[0]) > 2 else []
            break
        found.append(word)
        if word == "--check-hash-based-pycs" or (last is not None and last[1] and last[0] == word):
            found.append(next(words))
    return found


def _check_places(line: CommandLine) -> None:
    """Raise ConfigurationError where options stand on the wrong side of the script."""
    misplaced = line.find_misplaced()
    if misplaced is not None:
        raise ConfigurationError(
            f"{misplaced} stands after {line.rest[0]}, so it would go to the script: put it before "
            f"the script, or -- before {line.rest[0]} if it is the script's own"
        )
    for word in line.ranks:
        name = word.partition("=")[0]
        if word.startswith("-") and name not in RANKS:
            raise ConfigurationError(
                f"{word} is no option of mpiddp, and stands before the script: the script's own "
                "come after it; python -m mpiddp --help shows mpiddp's"
            )
    if line.module is None and not line.rest:
        raise ConfigurationError("no SCRIPT given; python -m mpiddp --help")
    if line.own_program is not None and line.ranks:
        raise ConfigurationError(
            f"{line.ranks[0]} belongs after {line.rest[0]}, whose option it is"
        )
    if line.module is None and line.rest[0] == "stacks":
        raise ConfigurationError("stacks asks a job that runs; it takes none of these options")


def _check_program(line: CommandLine) -> None:
    """Raise ConfigurationError where a rank would not find the script or module."""
    if line.own_program is not None:
        return
    here = os.getcwd()
    if line.module is not None:
        package = line.module.partition(".")[0]
        # The installed command, unlike python -m, does not look in this directory.
        path = sys.path[:]
        sys.path[:0] = [] if sys.flags.safe_path else [here]
        try:
            is_there = bool(package) and importlib.util.find_spec(package) is not None
        finally:
            sys.path[:] = path
        if not is_there:
            raise ConfigurationError(
                f"no module named {package!r} (looked in {here} and {sys.prefix})"
            )
        return
    script = line.rest[0]
    if os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise ConfigurationError(f"{script!r} is a directory without a __main__.py")
    elif not os.path.exists(script):
        raise ConfigurationError(f"there is no script {script!r} in {here}")
    elif not os.access(script, os.R_OK):
        raise ConfigurationError(f"the script {script!r} cannot be read")


# The job


class Job:
    """All attempts of one job."""

    def __init__(self, options: FrontOptions, program: Sequence[str]) -> None:
        self.options = options
        self.program = program
        self.plan = self._make_plan(None)
        self.files: Files | None = None
        self._error_start = 0
        """How many bytes an earlier start has left in the file of errors."""
        self._lost: tuple[str, ...] = ()

    def _make_plan(self, without: Sequence[str] | None) -> Plan:
        options = self.options
        return make_plan(options.request, options.launcher, options.launcher_options, without)

    def run(self) -> int:
        """Run attempts until one ends well, or no other one is due. Returns the exit code."""
        options = self.options
        if options.job_log is not None:
            self.files = _name_logs(options.job_log)
            self._error_start = os.path.getsize(self.files.error)
        launch = Launch(self.plan.kind, starts_ranks=options.launcher != NONE)
        launch.listen()
        self._announce()
        directory = job_directory.make_or_none()
        count, used = 0, 0
        try:
            while True:
                began = time.monotonic()
                try:
                    found = self._attempt(launch, directory, count)
                except ConfigurationError as error:
                    if not count:
                        raise
                    say(f"no restart: {error}")
                    break
                end = find_end(found, None if options.launcher == NONE else self.plan.kind.program)
                if options.restart_window and time.monotonic() - began > options.restart_window:
                    used = 0
                count, used = count + 1, used + 1
                is_last = used > options.restarts or end.code in FINAL or launch.signal is not None
                if is_last or not self._prepare_restart(end, found, used):
                    break
        finally:
            if directory is not None:
                job_directory.remove(directory)
        if end.code == PREEMPTED and options.requeue:
            _requeue()
        self._report(end)
        return end.code

    def _attempt(self, launch: Launch, directory: Any, count: int) -> Exit:
        if launch.signal is not None:
            return Exit(128 + launch.signal, "", launch.signal)
        variables = {
            **self.plan.environment(),
            environment.TORCHELASTIC_RESTART_COUNT: str(count),
            environment.TORCHELASTIC_MAX_RESTARTS: str(self.options.restarts),
        }
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
        found = launch.run(self._command(), variables, self.files)
        if directory is None:
            return found
        return replace(found, outcome=job_directory.read_outcome(directory))

    def _command(self) -> list[str]:
        words = list(self.plan.words)
        if self.files is not None and words[:1] == ["srun"]:
            words += self.files.srun_options()
        return [*words, *self.program]

    def _prepare_restart(self, end: JobEnd, found: Exit, used: int) -> bool:
        """Plan the next attempt without the nodes that were lost; False if too few are left."""
        without = ""
        if self.plan.layout is not None:
            self._lost = _choose_lost(self.plan.layout, self._lost, found, self.options)
            hosts = len(self.plan.layout.hosts)
            try:
                self.plan = self._make_plan(self._lost)
            except ConfigurationError as error:
                say(f"no restart: {error}")
                return False
            left = self.plan.layout
            if left is None or len(left.hosts) < self.options.min_nodes:
                say(
                    f"no restart: {len(left.hosts) if left else 0} of {count_noun(hosts, 'node')} "
                    f"left, and --min-nodes is {self.options.min_nodes}"
                )
                return False
            without = f", without {fold_hostnames(self._lost)}" if self._lost else ""
        say(f"attempt ended with {end}; restart {used} of {self.options.restarts}{without}")
        return True

    def _announce(self) -> None:
        """Say what is about to be started."""
        if self.plan.note:
            say(self.plan.note)
        if self.options.job_log is None or self.files is None:
            return
        rows: list[tuple[str, str]] = []
        layout = self.plan.layout
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
        command = self._command()[len(self.plan.words) :]
        rows.append(("command", self.plan.describe(command)))
        name = os.environ.get(environment.SLURM_JOB_NAME, "")
        nodes = os.environ.get(environment.SLURM_JOB_NODES, os.uname().nodename)
        lines = [f"mpiddp: job {job_directory.choose_name()} ({name}) on {nodes}"]
        lines += [f"  {title:<12} {text}" for title, text in rows]
        _write(sys.stdout, "\n".join(lines) + "\n")

    def _report(self, job_end: JobEnd) -> None:
        if self.files is None:
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


def _choose_lost(
    layout: Layout, before: Sequence[str], found: Exit, options: FrontOptions
) -> tuple[str, ...]:
    """Hosts to be left out: those that Slurm has lost, and the one that a rank was lost on.

    The second is kept where too few would be left: perhaps only the rank was at fault. So is the
    one on which this process lives: ranks that are cut off name it.
    """
    hosts = (*layout.hosts, *before)
    lost = {*before, *find_lost_hosts(hosts, os.environ[environment.SLURM_JOB_ID])}
    named = str((found.outcome or {}).get("lost_host") or "")
    is_alive = is_host(named, os.uname().nodename) if named else True
    suspect = set() if is_alive else {host for host in hosts if is_host(host, named)}
    if len(set(hosts) - lost - suspect) >= options.min_nodes:
        lost |= suspect
    return tuple(host for host in hosts if host in lost)


def _name_logs(folder: str) -> Files:
    """Name the files of the ranks' output. Raises ConfigurationError where they cannot be made.

    A job's name may hold anything, and be long; in srun's --output, % and \\ mean something, too.
    """
    name = os.environ.get(environment.SLURM_JOB_NAME) or "job"
    name = "".join("-" if c.isspace() or not c.isprintable() or c in "/%\\" else c for c in name)
    path = os.path.join(folder, f"{name[:50]}-{job_directory.choose_name()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(f"{path}.err", "ab"):
            pass
    except OSError as error:
        hint = "--chdir=DIRECTORY" if is_in_allocation(os.environ) else "--job-log"
        raise ConfigurationError(
            f"cannot write to {os.path.abspath(folder)} on {os.uname().nodename} "
            f"({error.strerror}); {hint} names another place"
        ) from None
    return Files(f"{path}.out", f"{path}.err")


def _requeue() -> None:
    """Have Slurm start this batch job again; the ranks have ended.

    A job that Slurm ends is left to it: it has been cancelled, or is requeued by Slurm itself.
    """
    job = environment.job_identity()
    if job is None or is_ended_by_slurm():
        return
    try:
        ask("scontrol", "requeue", job)
    except ConfigurationError as error:
        say(f"the job was not requeued: {error}")


def say(text: str) -> None:
    """Write one line to standard error."""
    _write(sys.stderr, f"mpiddp: {text}\n")


def _write(stream: Any, text: str) -> None:
    # Names of jobs and files may hold bytes that are no text.
    write(stream, text.encode(errors="surrogateescape"))


def _check_log_dir(words: Sequence[str]) -> None:
    """Raises ConfigurationError where ranks could not write their logs."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--log-dir":
            # Imported when it is needed: most jobs have no logs.
            from mpiddp.launch.output import check_log_dir

            check_log_dir(Path(value or following))


def run(line: CommandLine) -> NoReturn:
    """Start the ranks that the command line asks for; ends this process with the exit code."""
    try:
        options = read_options(line)
        _check_log_dir(line.ranks)
        program = find_program(line, options)
        job = Job(options, program)
        if options.dry_run:
            _write(sys.stdout, f"{job.plan.describe(program)}\n")
            raise SystemExit(0)
        code = job.run()
    except ConfigurationError as error:
        say(str(error))
        raise SystemExit(error.exit_code) from None
    raise SystemExit(code)
