"""A rank's process, as others see it: whether it is alive, and its exit status."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct

# PIDFD_GET_INFO of <linux/pidfd.h>, Linux 6.15 and later: it knows the exit code of a process that
# its parent has waited for already.
INFO = struct.Struct("=Q 52x i")
"""struct pidfd_info up to the exit code: the mask, and the exit code."""
GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11
HAS_EXIT_CODE = 1 << 3

POLL_SECONDS = 0.1
"""How often a process is looked for if the kernel does not tell of its end."""


def read_stat(process: int | str) -> list[str]:
    """Of proc(5), from the third field on: the state, the parent, … Raises OSError."""
    # The second one, the program's name in brackets, may hold anything.
    with open(f"/proc/{process}/stat", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()


def find_start(process: int | str) -> int | None:
    """When a process was started, in clock ticks since its machine was; None once it has ended.

    ``process``: its number, or ``self``. None too without /proc.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = read_stat(process)
        return int(fields[19]) if fields[0] not in "ZX" else None
    return None


class PeerProcess:
    """Another process of this machine, by its number."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._start = find_start(process)

    def has_ended(self) -> bool:
        """Whether it has. Its number may be another process's then."""
        return self._start is None or find_start(self._process) != self._start


class RankProcess(PeerProcess):
    """A rank's process, with what ends it and tells how it ended."""

    def __init__(self, process: int, descriptor: int | None) -> None:
        super().__init__(process)
        self.descriptor = descriptor
        """Readable once the process has ended; None before Linux 5.3."""
        self.launcher: int | None = None
        """Readable once the process that started the rank has ended; None if nobody knows."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.launcher = os.pidfd_open(int(read_stat(process)[1]))

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.has_ended():
                os.kill(self._process, signal.SIGKILL)

    def find_status(self) -> int | None:
        """How it ended, as waitpid() tells it; None if that cannot be known any more."""
        # Until its parent has waited for it, and then.
        with contextlib.suppress(OSError):
            fields = read_stat(self._process)
            if fields[0] == "Z":
                return int(fields[49])
        with contextlib.suppress(OSError):
            content = bytearray(INFO.size)
            INFO.pack_into(content, 0, HAS_EXIT_CODE, 0)
            if self.descriptor is not None:
                fcntl.ioctl(self.descriptor, GET_INFO, content)
                mask, code = INFO.unpack(content)
                if mask & HAS_EXIT_CODE:
                    return int(code)
        return None
