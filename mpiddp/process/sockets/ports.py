"""The ports that mpiddp listens on: any that the kernel picks, or those of a range."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
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
    if ports is None:
        return socket.create_server((address, 0), backlog=socket.SOMAXCONN)
    for port in ports.order():
        try:
            return socket.create_server((address, port), backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
    problem = f"no port of --port-range {ports} is free; give a larger range"
    raise OSError(errno.EADDRINUSE, problem)
