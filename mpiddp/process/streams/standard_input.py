"""Standard input for rank 0, past the launcher.

Open MPI 5's mpirun passes on the bytes and never the end. MPICH's ends the job if rank 0 reads
slowly, and the other ranks' input has no end. So the launcher gets an empty input, and rank 0 opens
the front's own one by its name in /proc: a file at the place where the front found it, at each
attempt again; of a pipe, what is left in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import IO

READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
"""A named pipe without a writer must not hold up the process that opens it."""


def offer(stack: contextlib.ExitStack, prepare: Callable[[], object]) -> str:
    """What tells rank 0 if this process's standard input is; empty if it is a terminal.

    What cannot be opened a second time, such as the socket that ssh gives, is copied until
    ``stack`` ends by a process that calls ``prepare`` first.
    """
    if sys.stdin is None:  # It was closed; its number may be another file's by now.
        return _describe(os.devnull, os.stat(os.devnull))
    if os.isatty(0):
        return ""
    path, found = f"/proc/{os.getpid()}/fd/0", os.fstat(0)
    if os.path.samestat(found, os.stat(os.devnull)):
        return _describe(os.devnull, found)
    try:
        os.close(os.open(path, READ))
    except OSError:
        copy = copy_input(stack, prepare).fileno()
        return _describe(f"/proc/{os.getpid()}/fd/{copy}", os.fstat(copy))
    is_file = stat.S_ISREG(found.st_mode)
    return _describe(path, found, os.lseek(0, 0, os.SEEK_CUR) if is_file else 0)


def copy_input(stack: contextlib.ExitStack, prepare: Callable[[], object]) -> IO[bytes]:
    """A pipe with a copy of standard input, by a process that ends with ``stack``."""
    copy = subprocess.Popen(["cat"], stdout=subprocess.PIPE, preexec_fn=prepare)
    stack.enter_context(copy)
    stack.callback(copy.kill)
    assert copy.stdout is not None
    return copy.stdout


def take(offered: str, rank: int) -> str | None:
    """Give rank 0 what the front has ``offered``, and the other ranks an empty input.

    Call it before anything has read standard input. If rank 0 cannot open it, as in a container
    with process numbers of its own, its input is empty. Returns what is wrong then.
    """
    if not offered:
        return None
    path, device, inode, position = offered.split()
    problem = None
    try:
        if rank == 0:
            _open(path, (int(device), int(inode)), int(position))
            return None
    except OSError as error:
        problem = f"{path} cannot be opened: {error.strerror}"
    _open(os.devnull)
    return problem


def _open(path: str, identity: tuple[int, int] | None = None, position: int = 0) -> None:
    """Make a file standard input, from ``position`` on.

    ``identity``: its device and inode. Raises OSError if they are others.
    """
    source = os.open(path, READ)
    try:
        found = os.fstat(source)
        if identity is not None and (found.st_dev, found.st_ino) != identity:
            raise OSError(errno.ESTALE, "it belongs to a different process here")
        if position:
            os.lseek(source, position, os.SEEK_SET)
        os.set_blocking(source, True)
        os.dup2(source, 0)
    finally:
        os.close(source)


def _describe(path: str, found: os.stat_result, position: int = 0) -> str:
    return f"{path} {found.st_dev} {found.st_ino} {position}"
