"""The ports that mpiddp listens on: any that the kernel picks, or those of a range."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mpiddp import environment
from mpiddp.errors import ConfigurationError

AUTO = "auto"
"""MPIDDP_PORT_RANGE if it is set, else any port."""
MOST = 65535
OCCUPIED = (errno.EADDRINUSE, errno.EACCES)
"""Another port may do. The second is said of ports that only root may take."""


@dataclass(frozen=True)
class PortRange:
    """At least two TCP ports, both ends included: the store and a companion have one each."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"

    def order(self) -> Iterator[int]:
        """All ports once, from a random one on, so that two jobs seldom try the same ones."""
        size = self.high - self.low + 1
        first = secrets.randbelow(size)
        return (self.low + (first + each) % size for each in range(size))


def parse_option(text: str, name: str = "port_range") -> PortRange | None:
    """Read ``LOW-HIGH``; None for ``auto``. Raises ConfigurationError, which names ``name``."""
    if text == AUTO:
        return None
    found = re.fullmatch("([0-9]{1,5})-([0-9]{1,5})", text)
    low, high = map(int, found.groups()) if found is not None else (0, 0)
    if not 1 <= low < high <= MOST:
        raise ConfigurationError(
            f"{name}: expected LOW-HIGH, at least two ports of 1 to {MOST}, found {text!r}"
        )
    return PortRange(low, high)


def find_range(option: str, variables: Mapping[str, str] = os.environ) -> PortRange | None:
    """The range in force: the option's, else that of MPIDDP_PORT_RANGE; None for any port."""
    written = variables.get(environment.PORT_RANGE) or AUTO
    return parse_option(option) or parse_option(written, environment.PORT_RANGE)


def listen(address: str, ports: PortRange | None = None) -> socket.socket:
    """A listening socket on an IPv4 address, at a port of ``ports``, or one that the kernel picks.

    A port that is in use is passed over. One that an ended job has left in the state TIME_WAIT is
    not in use. Raises OSError, EADDRINUSE if the range is used up.
    """
    return _open(
        lambda port: socket.create_server((address, port), backlog=socket.SOMAXCONN), ports
    )


def reserve(address: str, ports: PortRange | None = None) -> socket.socket:
    """A socket that holds a port for a server that another process opens there.

    It does not listen. The kernel gives the port to nobody, and to a server that asks for it by
    number and reuses addresses, as all do that Python and torch open. Raises OSError as `listen`.
    """

    def bind(port: int) -> socket.socket:
        holder = socket.socket()
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((address, port))
        except OSError:
            holder.close()
            raise
        return holder

    return _open(bind, ports)


def _open(make: Callable[[int], socket.socket], ports: PortRange | None) -> socket.socket:
    """What ``make`` makes of the first port of ``ports`` that is free, or of 0."""
    if ports is None:
        return make(0)
    for port in ports.order():
        try:
            return make(port)
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
    problem = f"no port of --port-range {ports} is free; give a larger range"
    raise OSError(errno.EADDRINUSE, problem)
