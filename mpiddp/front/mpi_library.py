"""Which MPI library mpi4py would load, found without loading it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.programs import INTEL_MPI, MPICH, OPEN_MPI, LauncherKind, find_mpirun

NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
"""In the order in which mpi4py's wheel tries them."""


def choose_pmi(variables: Mapping[str, str]) -> str:
    """What srun's ``--mpi=`` must say: what MPIDDP_PMI does, else what the library speaks.

    In a container, and if no library is found, it is ``pmix``.
    """
    named = variables.get(environment.PMI)
    if named or variables.get(environment.WRAP):
        return named or "pmix"
    kind, library = find_library(variables)
    if kind is INTEL_MPI:
        return "pmi2"
    if kind is not MPICH:
        return "pmix"
    if (
        library is not None
        and "libmpi_" in library.name
        and environment.is_set(environment.CRAY_SIGNS, variables)
    ):
        return "cray_shasta"
    # Its configuration is a text in it.
    is_built_so = library is not None and _holds(library, b"--with-pmix")
    return "pmix" if is_built_so else "pmi2"


def find_library(variables: Mapping[str, str]) -> tuple[LauncherKind | None, Path | None]:
    """The kind of the MPI that mpi4py would load, and its file if that is known."""
    linked = _find_linked()
    if linked is not None:
        return linked, None
    explicit = variables.get(environment.MPI4PY_LIBRARY)
    folders = [Path(sys.exec_prefix, "lib"), Path(sys.base_exec_prefix, "lib")]
    named = variables.get(environment.LIBRARY_PATH, "").split(":")
    folders += [Path(text) for text in named if text]
    candidates = [Path(explicit)] if explicit else (at / name for at in folders for name in NAMES)
    library = next((path for path in candidates if path.exists()), None)
    if library is None and explicit is None:
        try:
            mpirun = find_mpirun(None, variables)
        except ConfigurationError:
            return None, None
        return mpirun.kind, mpirun.library
    return _recognise(library), library


def _recognise(library: Path | None) -> LauncherKind | None:
    if library is None:
        return None
    # The file itself, behind libmpi.so.
    name = os.path.basename(os.path.realpath(library))
    if "libmpi.so.40" in name:
        return OPEN_MPI
    if _holds(library, b"Intel(R) MPI Library"):
        return INTEL_MPI
    if "libmpi.so.12" in name or "libmpich" in name or "libmpi_" in name:
        return MPICH
    return None


def _find_linked() -> LauncherKind | None:
    """The kind that mpi4py was built with; its wheels are built with none."""
    package = PathFinder.find_spec("mpi4py")
    if package is None or package.origin is None:
        return None
    for module in Path(package.origin).parent.glob("MPI.cpython-*.so"):
        text = module.read_bytes()
        if b"libmpi.so.40" in text:
            return OPEN_MPI
        if b"libmpi.so.12" in text or b"libmpich.so" in text:
            return MPICH
    return None


def _holds(library: Path, text: bytes) -> bool:
    try:
        return text in library.read_bytes()
    except OSError:
        return False
