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


class PeerProcess:
    """Another process of this machine, by its number."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._start = self._find_start()

    def has_ended(self) -> bool:
        """Whether it has. Its number may be another process's then."""
        return self._start is None or self._find_start() != self._start

    def _find_start(self) -> str | None:
        """When it was started, in ticks; None once it has ended."""
        with contextlib.suppress(OSError):
            fields = self._read_stat()
            return fields[19] if fields[0] not in "ZX" else None
        return None

    def _read_stat(self) -> list[str]:
        """Of proc(5), from the third field on: the state, the parent, …"""
        with open(f"/proc/{self._process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()


class RankProcess(PeerProcess):
    """A rank's process, with what ends it and tells how it ended."""

    def __init__(self, process: int, descriptor: int | None) -> None:
        super().__init__(process)
        self.descriptor = descriptor
        """Readable once the process has ended; None before Linux 5.3."""
        self.launcher: int | None = None
        """Readable once the process that started the rank has ended; None if nobody knows."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.launcher = os.pidfd_open(int(self._read_stat()[1]))

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
            fields = self._read_stat()
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
