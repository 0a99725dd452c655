"""Makes the communicator of one process group: its ranks meet in the group's store."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import socket
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.collectives import MPI, TORCH
from mpiddp.collectives.bootstrap import Members, make_communicator
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.transport import Messenger
from mpiddp.collectives.transport.mpi import MpiMessenger
from mpiddp.collectives.transport.torch_messages import TorchMessenger
from mpiddp.collectives.transport.waiting import Waiter
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi.mpi import find_thread_limit
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.session import find_session
from mpiddp.torch_internals import add_prefix, make_gloo

BOOT = Path("/proc/sys/kernel/random/boot_id")
MOST_TAGS = 1 << 15
"""MPI promises tags up to 32767."""
LONGEST_PAUSE = 0.02
"""Seconds between two looks into the store, at most."""


@dataclass(frozen=True)
class Place:
    """One rank of a process group."""

    store: Any
    """For this group alone: its keys have a prefix that no other group has."""
    rank: int
    ranks: tuple[int, ...]
    """The ranks of the group by their numbers in the default group."""
    timeout: timedelta
    name: str

    @property
    def size(self) -> int:
        return len(self.ranks)

    def wait_for(self, key: str, seconds: float) -> bool:
        """Whether the key is set in the store within this time.

        Not store.wait(), in which the store keeps out this process's other threads: two groups that
        two threads use would wait for each other.
        """
        return wait_until(partial(self.store.check, [key]), seconds, LONGEST_PAUSE)


class StoreChannel:
    """What `launch.mpi.control` does over MPI, over a store: ranks exchange values."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._numbers = itertools.count()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank. Collective; all ranks pass values of one type: a number,
        text, bytes, or a tuple or dataclass of these.

        Raises PeerLostError if a rank does not come within the group's timeout.
        """
        place, number = self._place, next(self._numbers)
        seconds = place.timeout.total_seconds()
        place.store.set(f"members/{number}/{place.rank}", json.dumps(_pack(value)))
        found = []
        for rank in range(place.size):
            key = f"members/{number}/{rank}"
            if not place.wait_for(key, seconds):
                raise PeerLostError(
                    f"rank {place.rank} of group {place.name!r} waited for rank {rank} until the "
                    f"timeout of {seconds:g} s: all ranks of the group must make its first "
                    "collective call"
                )
            found.append(_unpack(json.loads(place.store.get(key)), value))
        return found

    def agree(self, value: Any, what: str) -> Any:
        """Return ``value`` if all ranks hold the same one. Collective.

        Raises ConfigurationError on every rank, saying which ranks differ from rank 0.
        """
        text = repr(value)
        rows = self.gather((hashlib.sha256(text.encode()).hexdigest(), text[:120]))
        odd = [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]
        if odd:
            raise ConfigurationError(
                f"{what} must be the same on all ranks of group {self._place.name!r}: rank 0 has "
                f"{rows[0][1]}, rank {odd[0]} has {rows[odd[0]][1]}"
            )
        return value


def _pack(value: Any) -> Any:
    """For JSON: what is read from the store must not be able to run code."""
    if is_dataclass(value):
        return [_pack(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, bytes):
        return value.hex()
    return [_pack(each) for each in value] if isinstance(value, tuple) else value


def _unpack(data: Any, like: Any) -> Any:
    """The value, of the same type as ``like``."""
    if is_dataclass(like) and not isinstance(like, type):
        values = [getattr(like, field.name) for field in fields(like)]
        return type(like)(*(map(_unpack, data, values)))
    if isinstance(like, bytes):
        return bytes.fromhex(data)
    return tuple(data) if isinstance(like, tuple) else data


_backends: weakref.WeakSet[Any] = weakref.WeakSet()


def open_gloo(
    place: Place, purpose: str, note_timeout: Callable[[timedelta], None] | None = None
) -> Any:
    """A backend of Gloo over the ranks of a group; two of them connect when they first talk.

    ``purpose``: its name in the store; calls of different purposes need not have one order.
    ``note_timeout``: is called instead if torch.distributed sets the backend's timeout.
    """
    # Its own connection: while Gloo waits in the store, other threads may not use it.
    store = add_prefix(purpose, place.store.clone())
    backend = make_gloo(store, place.rank, place.size, place.timeout, note_timeout)
    _backends.add(backend)
    return backend


def _keep_backends() -> None:
    """In a forked child: its end would wait for threads of Gloo's, which only the parent has."""
    for backend in list(_backends):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


os.register_at_fork(after_in_child=_keep_backends)


def make_group_communicator(place: Place, find_gloo: Callable[[], Any]) -> Communicator:
    """The communicator of a group. Collective over its ranks.

    Between nodes messages go over MPI if the ranks are mpiddp's, and over Gloo if not.

    Args:
        find_gloo: the group's own backend of Gloo, for messages.

    Raises:
        ConfigurationError: environment variables that make no sense or differ.
        PeerLostError: a rank did not come.
    """
    channel = StoreChannel(place)
    session = find_session()
    world = None if session is None else session.world
    node = f"{BOOT.read_text()} {socket.gethostname()}" if world is None else world.node_rank
    keys = channel.gather(node)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    comm = None if session is None or len(numbers) == 1 else session.comm
    limit = "" if comm is None else find_thread_limit()
    members = Members(
        place.rank,
        tuple(numbers[key] for key in keys),
        socket.gethostname() if world is None else world.hostname,
        place.timeout.total_seconds(),
        channel.gather,
        partial(_list_messengers, place, comm if not limit else None, find_gloo),
        channel.agree,
    )
    return make_communicator(members)


def _list_messengers(
    place: Place, comm: Any, find_gloo: Callable[[], Any], waiter: Waiter, longest: int
) -> Mapping[str, Callable[[], Messenger]]:
    def make_mpi() -> Messenger:
        whole = comm.Get_group()
        group = whole.Incl(place.ranks)
        # Groups that are made at the same time are told apart by the tag.
        tag = zlib.crc32(place.name.encode()) % MOST_TAGS
        try:
            return MpiMessenger(comm.Create_group(group, tag), waiter, longest)
        finally:
            group.Free()
            whole.Free()

    makers: dict[str, Callable[[], Messenger]] = {TORCH: lambda: TorchMessenger(find_gloo())}
    return makers if comm is None else {MPI: make_mpi, **makers}
