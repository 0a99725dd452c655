"""One voice per node for processes that cannot ask each other anything.

Processes of one launch on one node have the same parent, the launcher's daemon. The first of
them to bind a socket of that name, in Linux's abstract namespace, holds the claim until it ends;
nothing is left behind.
"""

from __future__ import annotations

import errno
import os
import socket


def claim_node() -> socket.socket | None:
    """The claim, to be kept as long as it shall hold; None if another process has it.

    Where the system has no abstract sockets everyone gets one.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0mpiddp-{os.getuid()}-{os.getppid()}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return None
    return claim
