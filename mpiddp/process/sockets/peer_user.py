"""Whose process is at the other end of a connection on this machine."""

from __future__ import annotations

import socket
import struct

CREDENTIALS = struct.Struct("3i")
"""Process, user and group: struct ucred of unix(7)."""


def find_user(connection: socket.socket) -> int:
    """The number of the user, by the kernel, so that it cannot be forged."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    user: int = CREDENTIALS.unpack(found)[1]
    return user
