"""Reads what the ranks print, and writes it to the calling process's standard streams."""

from __future__ import annotations

import codecs
import contextlib
import socket
import sys
import time
from collections.abc import Callable

from mpiddp.process.streams.output_writer import Lines
from mpiddp.remote.channel import MARK
from mpiddp.wording import fit

CLOSE_SECONDS = 5.0
"""How long `OutputReader.close` goes on printing what has arrived."""

BLOCK = 1 << 16
MOST_MARK_BYTES = 40
"""More than a mark has: a zero byte with fewer bytes after it may be the beginning of one."""

Sink = Callable[[int, str, str], object]
"""Called with a rank, ``out`` or ``err``, and a text that the rank has printed there."""


def write(role: str, text: str) -> None:
    """Write to the present ``sys.stdout`` or ``sys.stderr``; errors of the stream are ignored."""
    stream = sys.stdout if role == "out" else sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.write(fit(text, stream))
        stream.flush()


class OutputReader:
    """Reads one stream of one rank, and prints it line by line."""

    def __init__(
        self, connection: socket.socket, label: bytes | None, take: Callable[[str], object]
    ) -> None:
        """``label``: printed before each line; None to print texts as they arrive.

        ``take``: called with each text.
        """
        connection.setblocking(False)
        self.connection = connection
        self.call = 0
        """The last call whose output is complete."""
        self.is_ended = False
        self._take_text = take
        self._lines = Lines(label) if label is not None else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        """Bytes that may be the beginning of a mark, until more arrive."""

    def fileno(self) -> int:
        return self.connection.fileno()

    def read(self) -> None:
        """Print what has arrived."""
        try:
            data = self.connection.recv(BLOCK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_ended = True
            self._take(self._held)
            self.flush()
            return
        data = self._held + data
        begin = 0
        for mark in MARK.finditer(data):
            self._take(data[begin : mark.start()])
            self.flush()
            self.call, begin = int(mark[1]), mark.end()
        data = data[begin:]
        at = data.rfind(b"\0")
        is_held = at >= 0 and len(data) - at < MOST_MARK_BYTES
        self._held = data[at:] if is_held else b""
        self._take(data[:at] if is_held else data)

    def flush_late(self) -> None:
        """Print the beginning of a line whose end has not arrived for long."""
        if self._lines is not None and self._lines.is_late(time.monotonic()):
            self._print(self._lines.flush())

    def flush(self) -> None:
        """Print all that has arrived, lines without an end too."""
        self._print(self._lines.flush() if self._lines is not None else b"", is_final=True)

    def close(self) -> None:
        """Print what has arrived, and close the connection."""
        with self.connection:
            with contextlib.suppress(OSError):
                # Processes that a rank left behind may print on; TCP still delivers that.
                self.connection.shutdown(socket.SHUT_RD)
                end = time.monotonic() + CLOSE_SECONDS
                while not self.is_ended and self.connection.recv(1, socket.MSG_PEEK):
                    self.read()
                    if time.monotonic() > end:
                        break
            self.flush()

    def _take(self, data: bytes) -> None:
        if data:
            self._print(data if self._lines is None else self._lines.add(data, time.monotonic()))

    def _print(self, data: bytes, *, is_final: bool = False) -> None:
        """``is_final``: no bytes that come later belong to the last character."""
        if text := self._decoder.decode(data, is_final):
            self._take_text(text)
