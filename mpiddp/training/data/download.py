"""``--download``: data sets are fetched once for each file system."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from pathlib import Path

from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.process.background import BackgroundCall
from mpiddp.training.data.image_data import KINDS
from mpiddp.training.data.vision import import_torchvision

PAUSE = 0.2
"""Seconds between two agreements on whether all have finished."""


def fetch_on_all(name: str, directory: Path, session: Session) -> str:
    """Have a rank of each node fetch the data set, and wait for all, however long that takes.

    Returns what went wrong on this rank; empty if nothing did. Collective.
    """
    fetches = session.world.local_rank == 0
    call = BackgroundCall(lambda: fetch(name, directory)) if fetches else None
    while session.any(call is not None and not call.is_done):
        time.sleep(PAUSE)
    try:
        if call is not None:
            call.finish()
    except ConfigurationError as error:
        return str(error)
    return ""


def fetch(name: str, directory: Path) -> None:
    """Fetch a data set into ``directory``, unless it is there. Raises ConfigurationError.

    It gets its name once it is whole. Others wait meanwhile, on other nodes too if the file
    system has locks; a lock dies with its holder.
    """
    import_torchvision()
    from torchvision import datasets

    kind = KINDS[name]
    target = directory / kind.folder.parts[0]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                return
            for rest in directory.glob(f".{name}-*"):
                # Of a holder that has died.
                shutil.rmtree(rest, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
            try:
                getattr(datasets, kind.loader)(partial, download=True)
                (partial / target.name).rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except Exception as error:  # A connection that breaks and an archive that is cut differ.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(
            f"download: cannot fetch {name} into {directory}: {reason}"
        ) from error
