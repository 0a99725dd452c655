"""torch's monitored barrier: one that says which ranks have not come."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

from torch import distributed

from mpiddp.torch_backend.members import Place

PASSED = b"passed"


class MonitoredBarrier:
    """The ranks of a group meet in its store: ranks that have never talked need no connection.

    The messages are those of Gloo, which programs look for.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._numbers = itertools.count()

    def wait(self, limit: timedelta, *, wait_all_ranks: bool) -> None:
        """Return once all ranks have called it. Rank 0 waits for the others in their order.

        Args:
            limit: the time from the call on in which all ranks must come.
            wait_all_ranks: whether rank 0 names all ranks that do not come, not the first one.

        Raises:
            RuntimeError: on rank 0, which ranks did not come; on other ranks, that rank 0 failed.
        """
        place, number = self._place, next(self._numbers)
        deadline = time.monotonic() + limit.total_seconds()
        prefix = f"monitored/{number}"
        if place.rank:
            place.store.set(f"{prefix}/{place.rank}", "")
            if not self._find(f"{prefix}/0", deadline) or place.store.get(f"{prefix}/0") != PASSED:
                raise RuntimeError(
                    f"Rank {place.rank} successfully reached monitoredBarrier, but received errors "
                    "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty "
                    "rank."
                )
        else:
            message = self._describe(prefix, deadline, limit, wait_all_ranks)
            place.store.set(f"{prefix}/0", "failed" if message else PASSED)
            if message:
                raise RuntimeError(message)
        if number:
            # All ranks have come to this one, and read nothing of the one before.
            place.store.delete_key(f"monitored/{number - 1}/{place.rank}")

    def pass_within(self, limit: timedelta) -> None:
        """As ``wait``, for a barrier with a timeout: raises DistNetworkError, as Gloo words it."""
        try:
            self.wait(limit, wait_all_ranks=False)
        except RuntimeError as error:
            milliseconds = limit.total_seconds() * 1000
            raise distributed.DistNetworkError(
                f"mpiddp: Timed out waiting {milliseconds:g}ms for a barrier: {error}"
            ) from error

    def _describe(
        self, prefix: str, deadline: float, limit: timedelta, wait_all_ranks: bool
    ) -> str:
        """What is said of the ranks that do not come; empty if all do."""
        milliseconds = limit.total_seconds() * 1000
        if self._place.size > 1 and milliseconds <= 0:
            return "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms."
        others = range(1, self._place.size)
        late = (rank for rank in others if not self._find(f"{prefix}/{rank}", deadline))
        ranks = list(late) if wait_all_ranks else list(itertools.islice(late, 1))
        if not ranks:
            return ""
        names = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, ranks))
        return f"[Rank 0]: {names} failed to pass monitoredBarrier in {milliseconds:g} ms"

    def _find(self, key: str, deadline: float) -> bool:
        """Whether the key is set before the deadline."""
        try:
            return self._place.wait_for(key, deadline - time.monotonic())
        except RuntimeError:
            return False
