"""Whose process is at the other end of a connection on this machine."""

from __future__ import annotations

import socket
import struct

CREDENTIALS = struct.Struct("3i")
"""Process, user and group: struct ucred of unix(7)."""


def find_peer(connection: socket.socket) -> tuple[int, int]:
    """The numbers of process and user, by the kernel, so that they cannot be forged.

    The process's is 0 if it is in a namespace that this one does not see.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(found)
    return process, user


def find_user(connection: socket.socket) -> int:
    """The number of the user."""
    return find_peer(connection)[1]
