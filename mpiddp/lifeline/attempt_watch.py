"""Notices that the job was restarted without this rank."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from mpiddp import environment
from mpiddp.errors import PeerLostError
from mpiddp.lifeline.membership import Membership
from mpiddp.process import job_directory

CHECK_SECONDS = 3.0


class AttemptWatch:
    """Compares the token of this attempt with that of the newest, on the first rank of each node.

    A thread does it, because a file system may not answer.
    """

    def __init__(self) -> None:
        self.is_superseded = False

    def begin(self, membership: Membership) -> None:
        if membership.local_rank == 0 and environment.ATTEMPT_TOKEN in os.environ:
            threading.Thread(target=self._watch, args=(membership,), daemon=True).start()

    def _watch(self, own: Membership) -> None:
        try:
            while True:
                job_directory.check_attempt()
                time.sleep(CHECK_SECONDS)
        except PeerLostError as error:
            self.is_superseded = True
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"mpiddp: rank {own.rank} of {own.size} on {own.hostname}: {error}\n"
                )
