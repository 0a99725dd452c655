"""What several commands refuse before anything is measured."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.options import RunOptions
from benchmarks.launching.launchers import Mpirun, find_mpirun
from benchmarks.launching.srun import Launcher, Srun, find_srun, is_srun
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.launcher.launcher import find_launcher

SUFFIXES = (".svg", ".png", ".pdf")


def check_outputs(
    *paths: Path | None, plot: Path | None = None, inputs: Iterable[Path | None] = ()
) -> None:
    """Raise ConfigurationError unless each given file can be written, and ``plot`` be drawn.
    ``inputs`` are read: no output may replace them."""
    given = [path for path in (*paths, plot) if path is not None]
    read = {path.resolve() for path in inputs if path is not None}
    for path in given:
        _check_writable(path)
        if path.resolve() in read:
            raise ConfigurationError(f"{path} is read, and would be overwritten: name another file")
    if len({path.resolve() for path in given}) < len(given):
        raise ConfigurationError(f"{given[-1]} is named for two outputs")
    if plot is not None:
        check_drawable(plot)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory: expected the name of a file")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: there is no directory {path.parent}")
    _check_room(path, path.parent)


def _check_room(path: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def check_folder(path: Path) -> None:
    """Make a directory for pictures. Raises ConfigurationError if it cannot be written into, or
    matplotlib is missing."""
    _check_room(path, path)
    _check_matplotlib()


def check_drawable(path: Path) -> None:
    """Raise ConfigurationError if ``path`` is of no known form, or matplotlib is missing."""
    if path.suffix not in SUFFIXES:
        raise ConfigurationError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    _check_matplotlib()


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "drawing needs matplotlib, which is not installed: pip install 'mpiddp[plot]'"
        )


def check_run(options: RunOptions[Any], ranks: Sequence[int], *, link: bool = False) -> Launcher:
    """Refuse what cannot be written or started; returns the launcher to use.

    ``link``: a link between two nodes is to be timed. Raises LaunchError and ConfigurationError.
    """
    check_outputs(options.json, options.csv, options.nccl_tests, plot=options.plot)
    found = check_start(ranks, options.launcher, options.nodes)
    if link and (not isinstance(found, Srun) or found.nodes < 2):
        raise ConfigurationError("--link needs two nodes of a cluster: --launcher srun --nodes 2")
    return found


def check_local_run(options: RunOptions[Any], *ranks: int) -> Mpirun:
    """As ``check_run``, where all ranks are on this machine."""
    found = check_run(options, ranks)
    if not isinstance(found, Mpirun):
        raise ConfigurationError("--launcher: expected an mpirun, found srun: runs are on one node")
    return found


def check_start(ranks: Sequence[int], wanted: str | None, nodes: int | None) -> Launcher:
    """The launcher to use. Raises LaunchError and ConfigurationError."""
    launcher = find_launcher()
    # A step of one task holds its allocation's cores: a step inside would wait for it.
    fewest = 1 if is_srun(wanted) else 2
    if launcher is not None and (launcher.size or 1) >= fewest:
        count = launcher.size or "several"
        raise LaunchError(
            f"{launcher.name} started {'one process' if count == 1 else f'{count} processes'} of "
            "this benchmark, which starts its ranks itself: run it without a launcher"
        )
    if wanted is not None and is_srun(wanted):
        return find_srun(wanted, nodes, ranks)
    if nodes is not None:
        raise ConfigurationError("--nodes needs a cluster: --launcher srun")
    return find_mpirun(wanted)
