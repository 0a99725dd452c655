"""Bring MPI up and down: load the library, compare it with the launcher, initialise it.

The library is compared with the launcher *before* MPI_Init, because a wrong pair may abort
inside it, or worse: succeed with every process alone. MPI_Init itself is called through ctypes
on the loaded library. mpi4py would hold the interpreter's lock throughout; ctypes releases it,
so that torch can be imported meanwhile and a deadline can fire.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpiddp.environment as environment
from mpiddp.errors import LaunchError
from mpiddp.launch.launcher import Launcher

if TYPE_CHECKING:
    from mpi4py import MPI

FIRST_PAUSE = 2e-5
LONGEST_PAUSE = 2e-3


def load(launcher: Launcher | None) -> Any:
    """Import ``mpi4py.MPI`` without initialising it and check that it fits the launcher.

    Returns the module. Raises LaunchError when there is no MPI library, or when it cannot work
    with the process manager that this launcher offers.
    """
    check_gpu_support()
    try:
        import mpi4py
    except ImportError:
        raise LaunchError(
            "mpi4py is not installed, so the ranks cannot find each other: "
            "pip install mpi4py (and 'mpiddp[mpi]' where no MPI library is installed)"
        ) from None
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LaunchError(
            f"mpi4py found no MPI library that it can load ({reason}): load the MPI module of "
            "this cluster, or pip install 'mpiddp[mpi]', or set MPI4PY_LIBMPI to the library"
        ) from None
    if launcher is not None and not MPI.Is_initialized():
        check_library(MPI.Get_library_version(), launcher)
    return MPI


def initialize(MPI: Any) -> bool:
    """Call MPI_Init_thread(MPI_THREAD_MULTIPLE) without holding the interpreter's lock.

    Returns whether this call initialised MPI; False if it was up already. Errors of MPI calls
    become exceptions. Processes started from here on do not initialise MPI on import.
    """
    if MPI.Is_finalized():
        raise LaunchError(
            "MPI was shut down earlier in this process and cannot start again: "
            "use one mpiddp.init() for the whole program"
        )
    initialized_here = not MPI.Is_initialized()
    if initialized_here:
        library = ctypes.CDLL(MPI.__file__)
        provided = ctypes.c_int()
        code = library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
        if code != MPI.SUCCESS:
            raise LaunchError(f"MPI_Init failed with MPI's error code {code}")
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    # Spawned DataLoader workers inherit the launcher's variables; one that ran MPI_Init would
    # die or join a job that does not expect it.
    os.environ[environment.MPI4PY_INITIALIZE] = "0"
    return initialized_here


def wait(request: MPI.Request) -> None:
    """Wait for an MPI request while sleeping in between, so that waiting costs no core.

    MPI's own waits spin. During start-up the cores are needed for importing torch, and with
    more ranks than cores a spinning rank keeps the one that it waits for from running.
    """
    pause = FIRST_PAUSE
    while not request.Test():
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def library_name(version: str) -> str:
    """First line of MPI_Get_library_version, without the build details."""
    first = version.strip("\0 \n").splitlines()[0]
    match = re.match(r"(Open MPI) v([\w.]+)", first) or re.match(r"(MPICH) Version:\s*(\S+)", first)
    return f"{match[1]} {match[2]}" if match else first.strip()


def check_library(version: str, launcher: Launcher) -> None:
    """Raise LaunchError if this library cannot join a job of this launcher.

    Only what is certain is refused here: a library that is neither plain MPICH nor Open MPI, or
    that was built for this process manager, passes, and the size is compared after MPI_Init.
    """
    wanted = _wanted_managers(version)
    if wanted is None or (launcher.size or 0) < 2 or launcher.key in ("torchrun", "jsm"):
        return
    if not wanted & launcher.process_managers:
        raise LaunchError(alone_message(version, launcher))


def alone_message(version: str, launcher: Launcher) -> str:
    """Why every process would be rank 0 of 1, and the command that works instead."""
    offers = " and ".join(sorted(launcher.process_managers)) or "no process manager"
    if launcher.key == "torchrun":
        return (
            f"torchrun started {launcher.size} processes, which MPI ({library_name(version)}) "
            "does not know of: every process would be rank 0 of 1. mpiddp takes torchrun's "
            f"place; {_suggest(version, launcher)}"
        )
    return (
        f"{launcher.name} started {launcher.size} processes, but {library_name(version)} cannot "
        f"join them (expected {_expectation(version)}, found {offers}): every process would be "
        f"rank 0 of 1. {_suggest(version, launcher)}"
    )


def check_gpu_support() -> None:
    """Catch a Cray MPICH that would abort MPI_Init because its GPU library is not linked.

    With MPICH_GPU_SUPPORT_ENABLED=1, Cray MPICH wants ``libmpi_gtl_cuda`` (or ``_hsa``) in the
    process: linked to mpi4py, preloaded, or loaded by something imported earlier. The names of
    linked libraries stand in the string table of mpi4py's extension module.
    """
    if os.environ.get(environment.CRAY_GPU_SUPPORT, "0") in ("", "0"):
        return
    if not environment.is_set(environment.CRAY_SIGNS):
        return
    if "libmpi_gtl_" in os.environ.get(environment.LD_PRELOAD, ""):
        return
    if any("libmpi_gtl_" in path for path in _mapped_libraries()):
        return
    if any(b"libmpi_gtl_" in path.read_bytes() for path in _extension_modules()):
        return
    raise LaunchError(
        "MPICH_GPU_SUPPORT_ENABLED=1 asks Cray MPICH for its GPU transport layer, but mpi4py is "
        "not linked with libmpi_gtl_cuda (or libmpi_gtl_hsa), and MPI_Init would abort. mpiddp "
        "needs no GPU-aware MPI: export MPICH_GPU_SUPPORT_ENABLED=0; or preload the library: "
        "export LD_PRELOAD=$CRAY_MPICH_ROOTDIR/gtl/lib/libmpi_gtl_cuda.so"
    )


def _wanted_managers(version: str) -> frozenset[str] | None:
    """Process managers that the library understands; None where that is not certain."""
    text = version.strip()
    if text.startswith("Open MPI v"):
        major = int(re.match(r"Open MPI v(\d+)", text)[1])  # type: ignore[index]
        # Open MPI 4 speaks PMI-1 and PMI-2 where it was built with these components.
        if major < 5 and _open_mpi_has_pmi():
            return frozenset({"pmix", "pmi"})
        return frozenset({"pmix"})
    if text.startswith("MPICH Version"):
        return frozenset({"pmix", "pmi"} if "--with-pmix" in text else {"pmi"})
    return None


def _expectation(version: str) -> str:
    wanted = _wanted_managers(version)
    return " or ".join(sorted(wanted)) if wanted else "one process manager for all ranks"


def _open_mpi_has_pmi() -> bool:
    library = library_path()
    if library is None:
        return True
    folders = (library.parent / "openmpi", library.parent / "openmpi" / "lib" / "openmpi")
    return any(
        (folder / f"mca_pmix_{component}.so").exists()
        for folder in folders
        for component in ("s1", "s2", "cray")
    )


def library_path() -> Path | None:
    """The file of the MPI library that this process has loaded."""
    for path in _mapped_libraries():
        if re.match(r"libmpi(ch)?[._].*so|libmpi\.so", Path(path).name):
            return Path(path)
    return None


def _mapped_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if ".so" in line})


def _extension_modules() -> list[Path]:
    specification = importlib.util.find_spec("mpi4py")
    if specification is None or specification.origin is None:
        return []
    return sorted(Path(specification.origin).parent.glob("MPI*.so"))


def _suggest(version: str, launcher: Launcher) -> str:
    program = _program()
    if launcher.key == "slurm":
        offered = _offered_by_srun()
        for plugin in _fitting_plugins(version):
            if plugin in offered:
                return f"Start it with: srun --mpi={plugin} {program}"
        listed = ", ".join(offered) or "nothing"
        return (
            f"This cluster's srun offers {listed}, and none fits: inside the allocation, start "
            f"it with: {_own_launcher(version)} -n {launcher.size} {program}"
        )
    return f"Start it with: {_own_launcher(version)} -n {launcher.size} {program}"


def _fitting_plugins(version: str) -> tuple[str, ...]:
    """Slurm's MPI plugins that this library can use, the best first."""
    wanted = _wanted_managers(version)
    if wanted is None:
        cray = ("cray_shasta",) if "CRAY" in version.upper() else ()
        return (*cray, "pmix", "pmi2")
    by_manager = {"pmix": ("pmix", "pmix_v5", "pmix_v4", "pmix_v3"), "pmi": ("pmi2",)}
    return tuple(
        plugin for manager in sorted(wanted, reverse=True) for plugin in by_manager[manager]
    )


def _own_launcher(version: str) -> str:
    """The mpirun that belongs to the loaded library."""
    name = "mpirun" if "Open MPI" in version else "mpiexec"
    library = library_path()
    candidate = library.parent.parent / "bin" / name if library is not None else None
    if candidate is not None and candidate.exists():
        name = str(candidate)
    else:
        name = f"{name} (of {library_name(version)})"
    as_root = "Open MPI" in version and os.geteuid() == 0
    return f"{name} --allow-run-as-root" if as_root else name


def _offered_by_srun() -> list[str]:
    """What ``srun --mpi=list`` offers here; empty without srun."""
    try:
        answer = subprocess.run(
            ["srun", "--mpi=list"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = re.findall(r"[\w]+", answer.stdout + answer.stderr)
    known = [word for word in words if re.fullmatch(r"pmix(_v\d+)?|pmi2|cray_shasta", word)]
    return sorted(set(known))


def _program() -> str:
    """How this program was started, shortened: its options follow as an ellipsis."""
    words = sys.orig_argv[1:]
    start = next((i for i, word in enumerate(words) if word == "-m" or word[:1] != "-"), 0)
    length = start + (2 if words[start : start + 1] == ["-m"] else 1)
    shown = ["python", *words[start:length]]
    return " ".join(map(shlex.quote, shown)) + (" …" if len(words) > length else "")
