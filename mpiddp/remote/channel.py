"""Messages between the calling process and a rank, over a connection that both have checked.

A message is a header in JSON (kind, content, sizes of what follows) behind its length in four
bytes, a pickle, and the buffers of the pickle. Between processes of one machine, large buffers lie
in memory of the kernel (memfd_create(2)), whose descriptor is sent: the receiver maps it privately,
and copies nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import mmap
import os
import re
import select
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.process.memory_limits import find_shortage
from mpiddp.process.sockets.links import encode_token, open_connection
from mpiddp.process.sockets.peer_user import find_user
from mpiddp.wording import describe_size

SHARED_BYTES = 1 << 16
"""If the buffers have more bytes in all, processes of one machine use shared memory for them."""
ALIGNMENT = 64
"""Bytes, of each buffer in shared memory."""
LONGEST_HEADER = 1 << 28
"""Bytes, more than any header has: the other end does not speak this protocol."""
LONGEST_PIECE = 1 << 20
"""Bytes that are sent at a time."""
SILENT_SECONDS = 60.0
"""How long the next bytes of a message may take."""
CONNECT_SECONDS = 5.0
"""How long one address may take to answer."""
SPARE_BYTES = 1 << 30
"""Fewer bytes are sent and received without a check of the free memory."""

MARK = re.compile(rb"\0mpiddp call (\d+)\0")
"""What ends the output of a call, on each of a rank's streams."""


def make_mark(number: int) -> bytes:
    """The mark of one call."""
    return b"\0mpiddp call %d\0" % number


@dataclass(frozen=True)
class Address:
    """Where a process listens, and the secrets that both sides must know."""

    places: tuple[str, ...]
    """Best first: ``@NAME`` of a local socket, ``HOST:PORT``."""
    token: str
    """Sent by the process that connects."""
    proof: str
    """Sent back by the process that listens: a stranger on its port does not know it."""

    def pack(self) -> str:
        return json.dumps([self.places, self.token, self.proof])

    @classmethod
    def unpack(cls, text: str) -> Address:
        places, token, proof = json.loads(text)
        return cls(tuple(places), token, proof)


@dataclass(frozen=True)
class Message:
    """A message that was received."""

    kind: str
    content: Any = None
    """Of JSON's types."""
    body: bytes = b""
    """A pickle."""
    buffers: tuple[memoryview, ...] = field(default=(), repr=False)


class Parcel:
    """A pickle that is sent to several receivers: large buffers are copied once for all of them."""

    def __init__(self, body: bytes = b"", buffers: tuple[memoryview, ...] = ()) -> None:
        """What `pickling.dump` returns. Raises ConfigurationError if there is no memory for it."""
        self.body, self.buffers = body, buffers
        self.sizes = [buffer.nbytes for buffer in buffers]
        check_memory(len(body) + sum(self.sizes))
        self._descriptor: int | None = None

    def share(self) -> int:
        """A descriptor of the memory that holds all buffers. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("mpiddp-call", os.MFD_CLOEXEC)
            for start, buffer in zip(lay_out(self.sizes), self.buffers, strict=False):
                _write_at(self._descriptor, buffer, start)
        return self._descriptor

    def keep(self) -> None:
        """Copy the buffers now: their owner may change them before they are sent."""
        if sum(self.sizes) > SHARED_BYTES:
            self.buffers = _map(self.share(), self.sizes)
        else:
            self.buffers = tuple(memoryview(bytes(buffer)) for buffer in self.buffers)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lay_out(sizes: Sequence[int]) -> list[int]:
    """Where each buffer begins, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return starts


def _write_at(descriptor: int, view: memoryview, start: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, start)
        view, start = view[count:], start + count


def check_memory(size: int) -> None:
    """Raise ConfigurationError if this process cannot get so many bytes of memory."""
    if size >= SPARE_BYTES and (shortage := find_shortage(size)):
        raise ConfigurationError(
            f"{describe_size(size)} to be sent, but on {socket.gethostname()} {shortage}: send a "
            "part, or write a file"
        )


class Channel:
    """One end of a connection. Sending and receiving may be done by two threads."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(SILENT_SECONDS)
        self._is_local = connection.family == socket.AF_UNIX
        if not self._is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, kind: str, content: Any = None, parcel: Parcel | None = None) -> None:
        """Send a message. Raises OSError if the other end has gone, or takes nothing for long."""
        parcel = parcel or Parcel()
        is_shared = self._is_local and sum(parcel.sizes) > SHARED_BYTES
        text = json.dumps([kind, content, len(parcel.body), parcel.sizes, is_shared]).encode()
        header = len(text).to_bytes(4, "little") + text
        if is_shared:
            header = header[socket.send_fds(self.connection, [header], [parcel.share()]) :]
        pieces: list[bytes | memoryview] = [header, parcel.body]
        for piece in pieces if is_shared else [*pieces, *parcel.buffers]:
            self._send_all(piece)

    def _send_all(self, piece: bytes | memoryview) -> None:
        """Not sendall(), whose limit is one for the whole: what is large may take longer."""
        with memoryview(piece).cast("B") as view:
            start = 0
            while start < view.nbytes:
                start += self.connection.send(view[start : start + LONGEST_PIECE])

    def wait(self) -> None:
        """Return when a message comes, or the other end has gone."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        poller.poll()

    def receive(self) -> Message:
        """The next message.

        Raises EOFError if the other end has gone, OSError, and ConfigurationError if there is no
        memory for what came: the message is read to its end then.
        """
        length, descriptors = self._begin()
        if length > LONGEST_HEADER:
            raise OSError(f"expected a header of at most {LONGEST_HEADER} bytes, found {length}")
        kind, content, body_size, sizes, is_shared = json.loads(_read(self.connection, length))
        left = body_size + (0 if is_shared else sum(sizes))
        try:
            check_memory(left)
        except ConfigurationError:
            while left:
                left -= len(_read(self.connection, min(left, SHARED_BYTES)))
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        body = bytes(_read(self.connection, body_size))
        if is_shared:
            try:
                buffers = _map(descriptors[0], sizes)
            finally:
                os.close(descriptors[0])
        else:
            buffers = tuple(memoryview(_read(self.connection, size)) for size in sizes)
        return Message(kind, content, body, buffers)

    def _begin(self) -> tuple[int, list[int]]:
        """The length of the header, and the descriptors that came with it."""
        if self._is_local:
            data, descriptors, _, _ = socket.recv_fds(self.connection, 4, 1)
        else:
            data, descriptors = self.connection.recv(4), []
        if not data:
            raise EOFError("the other end has gone")
        data += _read(self.connection, 4 - len(data))
        return int.from_bytes(data, "little"), descriptors

    def close(self) -> None:
        self.connection.close()


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the other end has gone")
        view = view[got:]
    return data


def _map(descriptor: int, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """Private memory with the buffers' contents: what is written there nobody else sees.

    Python's mmap would keep a descriptor open for as long as the memory is used.
    """
    *starts, end = lay_out(sizes)
    library = ctypes.CDLL(None, use_errno=True)
    map_memory, unmap = library.mmap, library.munmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = map_memory(None, end, access, mmap.MAP_PRIVATE, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{end} bytes cannot be mapped")
    memory = (ctypes.c_char * end).from_address(address)
    # At the end of the interpreter others may still use it.
    weakref.finalize(memory, unmap, address, end).atexit = False
    view = memoryview(memory).cast("B")
    return tuple(view[start : start + size] for start, size in zip(starts, sizes, strict=True))


def connect(address: Address) -> socket.socket:
    """Connect to the process that listens at ``address``. Raises UnreachableError.

    Nothing but the token is sent, and nothing read, before that process has proved that it is the
    one that made the token.
    """
    problems, is_last = [], False
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        for place in address.places:
            try:
                return _connect(place, address)
            except (OSError, EOFError) as error:
                problems.append(f"{place}: {error}")
        if is_last:
            raise UnreachableError(
                f"{socket.gethostname()} does not reach the process that started these ranks "
                f"({'; '.join(problems[-len(address.places) :])})"
            )
        # Once more after that: a process that was stopped has missed the answers.
        is_last = time.monotonic() > end
        time.sleep(0.1)


def _connect(place: str, address: Address) -> socket.socket:
    with contextlib.ExitStack() as unused:
        connection = unused.enter_context(open_connection(place, CONNECT_SECONDS))
        if connection.family == socket.AF_UNIX:
            if find_user(connection) != os.geteuid():
                raise PermissionError("the socket is another user's")
            # The kernel tells of that process's end; it may be stopped (Ctrl-Z).
            connection.settimeout(None)
        connection.sendall(encode_token(address.token))
        proof = _read(connection, len(address.proof))
        if not hmac.compare_digest(proof, address.proof.encode()):
            raise PermissionError("a stranger listens there")
        unused.pop_all()
    return connection
