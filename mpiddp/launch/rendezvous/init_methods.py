"""What ``init_process_group()`` finds in a rank, wherever the script lets its ranks meet.

A script may name the place itself: MASTER_ADDR and MASTER_PORT, ``tcp://…``, ``file://…``. torch
would open no server there, since TORCHELASTIC_USE_AGENT_STORE says that one is open already, and
all ranks would wait for it. So a group of all ranks meets in the job's store, whatever it names.
One of another size meets where it says, as without a launcher, and within ``--timeout``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from mpiddp import environment
from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.launcher.exported_variables import set_meanwhile
from mpiddp.process.streams.console import write_console
from mpiddp.torch_internals import add_prefix
from mpiddp.wording import read_message

if TYPE_CHECKING:
    from mpiddp.launch.mpi.world import World
    from mpiddp.launch.rendezvous.store import Meeting

Handler = Callable[..., Iterator[tuple[Any, int, int]]]
"""Of torch: from a URL to a store, a rank and a number of ranks."""


@dataclass(frozen=True)
class _Request:
    """What a call asks for."""

    place: str
    rank: int
    size: int


class ScriptGroups:
    """Answers the calls of this process. ``wrap`` is for torch's handlers of URLs."""

    def __init__(
        self, world: World, meeting: Meeting, connect: Callable[[], Any], timeout: float
    ) -> None:
        """``connect`` opens a connection to the job's store. ``timeout``: seconds for a group that
        meets elsewhere."""
        self._world = world
        self._meeting = meeting
        self._connect = connect
        self._timeout = timeout
        self._process = os.getpid()
        self._count = 0
        """Of groups that have met; the same on all ranks, and the beginning of their keys."""
        self._is_noted = False
        """Whether rank 0 has said that a place is not used."""

    def wrap(self, handler: Handler) -> Handler:
        """What answers instead of ``handler``."""

        @wraps(handler)
        def answer(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
            if os.environ.get(environment.TORCHELASTIC_USE_AGENT_STORE) != str(True):
                # The script says that a rank of its group opens the server.
                yield from handler(url, **options)
                return
            request = self._read(url)
            if request.size == self._world.size and os.getpid() == self._process:
                yield self._meet(request), request.rank, request.size
            else:
                yield self._meet_elsewhere(request, handler, url, options)

        return answer

    def _read(self, url: str) -> _Request:
        """What stands in the URL, else in the environment; what is in neither is the rank's own."""
        world, parts = self._world, urlsplit(url)
        own = {environment.RANK: str(world.rank), environment.WORLD_SIZE: str(world.size)}
        variables = own | dict(os.environ)
        numbers = dict(parse_qsl(parts.query))
        rank = numbers.get("rank", variables[environment.RANK])
        size = numbers.get("world_size", variables[environment.WORLD_SIZE])
        place = parts.netloc or f"{parts.scheme}://{parts.path}"
        if parts.scheme == "env":
            address = variables.get(environment.MASTER_ADDR, self._meeting.address)
            place = f"{address}:{variables.get(environment.MASTER_PORT, self._meeting.port)}"
        return _Request(place, int(rank), int(size))

    def _meet(self, request: _Request) -> Any:
        """The job's store, for the next group of all ranks."""
        self._count += 1
        store = add_prefix(f"script/{self._count}", self._connect())
        world, rank = self._world, request.rank
        own = f"rank {world.rank} on {world.hostname}"
        holder = store.compare_set(f"holder/{rank}", "", own).decode()
        if holder != own:
            raise ConfigurationError(
                f"init_process_group() gets rank {rank} here and on {holder}: expected another "
                f"number on each rank; RANK has it, {world.rank} here"
            )
        if world.rank == 0 and request.place != self._place and not self._is_noted:
            self._is_noted = True
            write_console(
                f"mpiddp: init_process_group() names {request.place}; the ranks meet at "
                f"{self._place} instead, in mpiddp's store\n"
            )
        if rank != world.rank and store.add("differing", 1) == 1:
            write_console(
                f"mpiddp: the script's ranks have other numbers than MPI's: {own} is rank {rank} "
                "in init_process_group()\n"
            )
        return store

    def _meet_elsewhere(
        self, request: _Request, handler: Handler, url: str, options: dict[str, Any]
    ) -> tuple[Any, int, int]:
        """A group of other processes than the ranks, or of a part of them, where it says.

        At the job's own address a server is open.
        """
        size, place, begin = request.size, request.place, time.monotonic()
        if os.getpid() == self._process and self._connect().add(f"script/size/{size}", 1) == 1:
            write_console(
                f"mpiddp: init_process_group() is for {size} ranks in rank {self._world.rank}, and "
                f"MPI has started {self._world.size}: they meet at {place}, within "
                f"{self._timeout:g} s (--timeout)\n"
            )
        limit = timedelta(seconds=self._timeout)
        options["timeout"] = min(options.get("timeout", limit), limit)
        is_open = str(place == self._place)
        try:
            with set_meanwhile({environment.TORCHELASTIC_USE_AGENT_STORE: is_open}):
                return next(handler(url, **options))
        except RuntimeError as error:
            if time.monotonic() - begin < options["timeout"].total_seconds():
                raise
            raise UnreachableError(
                f"init_process_group() with rank {request.rank} of {size} did not meet the others "
                f"at {place}: {read_message(error).rstrip('.')} (MPI has started "
                f"{self._world.size} ranks)"
            ) from None

    @property
    def _place(self) -> str:
        return f"{self._meeting.address}:{self._meeting.port}"
