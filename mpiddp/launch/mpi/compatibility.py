"""Whether the MPI library can join what the launcher started, and what to type if it cannot.

A wrong pair may abort inside MPI_Init, or worse: succeed with every process alone. So the two
are compared before it, by the library's version and by the variables that the launcher left.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import AloneError, LaunchError
from mpiddp.launch.launcher import programs
from mpiddp.launch.launcher.containers import USER, find_outer_user, find_own_namespaces
from mpiddp.launch.launcher.hostnames import is_host
from mpiddp.launch.launcher.launcher import Launcher, hosts_of_step
from mpiddp.process import cpus


def is_intel(version: str) -> bool:
    """Whether this is Intel MPI, by MPI_Get_library_version."""
    return bool(re.match(programs.INTEL_VERSION, version))


def library_name(version: str) -> str:
    """First line of MPI_Get_library_version, without the build details."""
    first = version.strip("\0 \n").splitlines()[0]
    if match := re.match(programs.INTEL_VERSION, first):
        return f"{programs.INTEL_MPI.name} {match[1]}"
    match = re.match(r"(Open MPI) v([\w.]+)", first) or re.match(r"(MPICH) Version:\s*(\S+)", first)
    return f"{match[1]} {match[2]}" if match else first.strip()


def check_library(version: str, launcher: Launcher) -> None:
    """Raise LaunchError if this library cannot join a job of this launcher.

    Only what is certain is refused here: a library that is neither plain MPICH nor Open MPI, or
    that was built for this process manager, passes, and the size is compared after MPI_Init.
    """
    wanted = _wanted_managers(version)
    if wanted is None or (launcher.size or 0) < 2 or launcher.key == "jsm":
        return
    if not wanted & launcher.process_managers:
        raise AloneError(alone_message(version, launcher))


def alone_message(version: str, launcher: Launcher) -> str:
    """Why every process would be rank 0 of 1, and the command that works instead."""
    offers = " and ".join(sorted(launcher.process_managers)) or "no process manager"
    if launcher.key == "torchrun":
        return (
            f"torchrun started {launcher.size} processes, which MPI ({library_name(version)}) "
            "does not know of: every process would be rank 0 of 1. mpiddp takes torchrun's "
            f"place. {_suggest(version, launcher)}"
        )
    managers = _wanted_managers(version)
    wanted = " or ".join(sorted(managers)) if managers else "one process manager for all ranks"
    return (
        f"{launcher.name} started {launcher.size} processes, but {library_name(version)} cannot "
        f"join them (expected {wanted}, found {offers}): every process would be "
        f"rank 0 of 1. {_suggest(version, launcher)}"
    )


def check_user(version: str, launcher: Launcher) -> None:
    """Raise AloneError if a container shows its user under another number than PMIx expects.

    MPI_Init would wait for ever, without a word, or abort: the daemon hears the number from the
    rank itself (open-mpi/ompi#12146, apptainer#769; read in November 2026). Munge finds it out.
    """
    is_by_number = os.environ.get(environment.PMIX_SECURITY_MODE) == "native"
    offered = launcher.process_managers
    uses_pmix = offered & (_wanted_managers(version) or offered) == {"pmix"}
    inside = os.geteuid()
    outside = find_outer_user(inside)
    if is_by_number and uses_pmix and outside != inside and USER in find_own_namespaces(launcher):
        raise AloneError(
            f"this container shows user {outside} as user {inside}, and the PMIx of "
            f"{launcher.name} refuses other numbers: MPI_Init would wait for ever. Start the "
            "container with your own number (podman --userns=keep-id, apptainer without "
            "--fakeroot, srun --no-container-remap-root), or take an MPICH and srun --mpi=pmi2"
        )


def check_memory(version: str, launcher: Launcher) -> None:
    """Raise AloneError if ranks of a host cannot share memory, and Intel MPI would abort.

    It does so in any namespace of a rank's own, whatever its settings (2021.19).
    """
    if is_intel(version) and _has_neighbours(launcher) and find_own_namespaces(launcher):
        raise AloneError(
            "ranks of one host have a container each, and Intel MPI needs memory and processes "
            "that they share: start one rank on a host, or all ranks of a host in one container; "
            "or take an MPICH, whose ABI is the same"
        )


def check_host(version: str, launcher: Launcher) -> None:
    """Raise LaunchError if Open MPI 4's daemon takes this host for another one: MPI would crash.

    The PMIx of an enclosing step names its host in a variable, which mpirun hands on to its daemons
    on other hosts; they believe it (Debian's 4.1.4 with PMIx 4.2.2).
    """
    named = os.environ.get(environment.PMIX_HOST)
    node, own = os.environ.get(environment.SLURM_NODE_NAME), socket.gethostname()
    is_old = launcher.key == "openmpi" and version.startswith("Open MPI v4.")
    # A container may have a name of its own, and Slurm may call the host by a different one.
    if is_old and named and node and not (is_host(named, own) or is_host(named, node)):
        raise LaunchError(
            f"{environment.PMIX_HOST}={named} comes from the step of Slurm's in which mpirun was "
            f"started, and Open MPI 4 takes {own} for {named}: MPI would crash. Type env -u "
            f"{environment.PMIX_HOST} mpirun …; or get the shell with srun --mpi=none --pty bash"
        )


def _has_neighbours(launcher: Launcher) -> bool:
    """Whether the launcher says that some host has several ranks."""
    names = [row.local_size for row in environment.LAUNCHERS if row.key == launcher.key]
    found = {os.environ.get(name or "", "1") for name in names}
    hosts = hosts_of_step() if launcher.key == "slurm" else ()
    return found != {"1"} or (bool(hosts) and (launcher.size or 1) > len(hosts))


def check_gpu_support() -> None:
    """Catch a Cray MPICH that would abort MPI_Init because its GPU library is not linked.

    With MPICH_GPU_SUPPORT_ENABLED=1, Cray MPICH wants ``libmpi_gtl_cuda`` (or ``_hsa``, ``_ze``) in
    the process: linked to mpi4py, preloaded, or loaded by something imported earlier. The names of
    linked libraries stand in the string table of mpi4py's extension module.
    """
    if os.environ.get(environment.CRAY_GPU_SUPPORT, "0") in ("", "0"):
        return
    if not environment.is_set(environment.CRAY_SIGNS):
        return
    if any("libmpi_gtl_" in path for path in mapped_files()):
        return
    if any(b"libmpi_gtl_" in path.read_bytes() for path in _extension_modules()):
        return
    raise LaunchError(
        "MPICH_GPU_SUPPORT_ENABLED=1 asks Cray MPICH for its GPU transport layer, but mpi4py is "
        "not linked with libmpi_gtl_cuda (AMD: libmpi_gtl_hsa, Intel: libmpi_gtl_ze), and MPI_Init "
        "would abort. mpiddp needs no GPU-aware MPI: export MPICH_GPU_SUPPORT_ENABLED=0; or "
        "preload that library: export LD_PRELOAD=$CRAY_MPICH_ROOTDIR/gtl/lib/libmpi_gtl_cuda.so"
    )


def _wanted_managers(version: str) -> frozenset[str] | None:
    """Process managers that the library understands; None if that is not certain."""
    text = version.strip()
    open_mpi = re.match(r"Open MPI v(\d+)", text)
    if open_mpi is not None:
        # Open MPI 4 speaks PMI-1 and PMI-2 if it was built with these components.
        if int(open_mpi[1]) < 5 and _open_mpi_has_pmi():
            return frozenset({"pmix", "pmi"})
        return frozenset({"pmix"})
    if text.startswith("MPICH Version"):
        return frozenset({"pmix", "pmi"} if "--with-pmix" in text else {"pmi"})
    if is_intel(text):
        return frozenset({"pmix", "pmi"})
    return None


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
    for path in mapped_files():
        if re.match(r"libmpi(ch)?[._].*so|libmpi\.so", Path(path).name):
            return Path(path)
    return None


def mapped_files() -> list[str]:
    """The files that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line})


def _extension_modules() -> list[Path]:
    specification = importlib.util.find_spec("mpi4py")
    if specification is None or specification.origin is None:
        return []
    return sorted(Path(specification.origin).parent.glob("MPI*.so"))


def _suggest(version: str, launcher: Launcher) -> str:
    program = _program()
    own = _own_command(version, launcher, program)
    if launcher.key == "slurm":
        offered = _offered_by_srun()
        for plugin in _fitting_plugins(version):
            if plugin in offered:
                return f"Start it with: srun --mpi={plugin} {program}"
        listed = ", ".join(offered) or "nothing"
        return (
            f"This cluster's srun offers {listed}, and none fits: inside the allocation, start "
            f"it {own}"
        )
    return f"Start it {own}"


def _fitting_plugins(version: str) -> tuple[str, ...]:
    """Slurm's MPI plugins that this library can use, the best first."""
    wanted = _wanted_managers(version)
    if wanted is None:
        cray = ("cray_shasta",) if "CRAY" in version.upper() else ()
        return (*cray, "pmix", "pmi2")
    by_manager = {"pmix": ("pmix", "pmix_v5", "pmix_v4", "pmix_v3"), "pmi": ("pmi2",)}
    # Intel MPI speaks PMI by itself, and PMIx by a library that it must find.
    managers = sorted(wanted, reverse=not is_intel(version))
    return tuple(plugin for manager in managers for plugin in by_manager[manager])


def _own_command(version: str, launcher: Launcher, program: str) -> str:
    """``with: …``, a command line for the launcher that belongs to the loaded library."""
    kind, _ = programs.find_kind(version)
    library = library_path()
    candidate = library.parent.parent / "bin" / kind.program if library is not None else None
    is_there = candidate is not None and candidate.exists()
    # Slurm's allocation has as many slots as its tasks, on however many nodes.
    is_crowded = launcher.key != "slurm" and (launcher.size or 1) > cpus.count_cores()
    start = shlex.quote(str(candidate)) if is_there else kind.program
    which = "" if is_there else f" the {kind.program} of {library_name(version)}"
    flags = kind.flags(is_crowded=is_crowded)
    return f"with{which}: " + " ".join([start, *flags, f"-n {launcher.size} {program}"])


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
    start = 0
    while words[start : start + 1] and words[start][0] == "-" and words[start] not in ("-m", "-c"):
        # Python's own options with a value of their own.
        start += 2 if words[start] in ("-W", "-X") else 1
    if words[start : start + 1] == ["-c"]:
        return "python -c …"
    length = start + (2 if words[start : start + 1] == ["-m"] else 1)
    shown = ["python", *words[start:length]]
    return " ".join(map(shlex.quote, shown)) + (" …" if len(words) > length else "")
