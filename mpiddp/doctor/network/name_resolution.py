"""Whether hosts resolve their own names and each other's addresses, and quickly enough.

torch's store asks for the name of every peer that connects, on its one server thread, and asks in
the form ``::ffff:a.b.c.d``. If no DNS server answers, each costs 5 to 10 s.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from mpiddp.doctor.examiner.findings import Finding, passed, warned
from mpiddp.process.background import BackgroundCall, LateError

HOST_NAME = "host name"
REVERSE_LOOK_UPS = "reverse look-ups"
PATIENCE_SECONDS = 0.5
"""How long a look-up may take."""
SAMPLE = 4
"""How many peers rank 0's node looks up, beside its neighbour."""


@dataclass(frozen=True)
class Resolution:
    """What a host finds for its own name."""

    addresses: tuple[str, ...]
    """IPv4; empty if there is none."""
    problem: str = ""


def resolve(hostname: str) -> Resolution:
    try:
        entries = socket.getaddrinfo(hostname, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        return Resolution((), error.strerror or "not found")
    return Resolution(tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))


def finish_resolution(call: BackgroundCall[Resolution]) -> Resolution:
    try:
        return call.finish(PATIENCE_SECONDS)
    except LateError:
        return Resolution((), f"no answer within {PATIENCE_SECONDS:g} s")


def judge_host_name(resolution: Resolution, node_count: int) -> Finding:
    """Loopback is Debian's 127.0.1.1: right for one host, and a trap for several."""
    if not resolution.addresses:
        return warned(
            HOST_NAME,
            f"does not resolve ({resolution.problem})",
            "Put every node into DNS or /etc/hosts; mpiddp does without, but MPI and scripts that "
            "set MASTER_ADDR=$(hostname) may not",
        )
    loopback = [a for a in resolution.addresses if IPv4Address(a).is_loopback]
    if loopback and node_count > 1:
        return warned(
            HOST_NAME,
            f"resolves to {loopback[0]}, where no other node finds it",
            "Replace that line of /etc/hosts by the node's own address; mpiddp does without, but "
            "Gloo and scripts that set MASTER_ADDR=$(hostname) do not",
        )
    if loopback:
        return passed(HOST_NAME, "resolves to loopback, which is enough for one node")
    return passed(HOST_NAME, "resolves")


def begin_look_ups(addresses: Sequence[str]) -> dict[str, BackgroundCall[None]]:
    """Reverse look-ups of peers' addresses, each in its own thread from now on."""
    return {
        address: BackgroundCall(functools.partial(_look_up, address))
        for address in dict.fromkeys(addresses)
    }


def find_unanswered(look_ups: Mapping[str, BackgroundCall[None]]) -> Iterator[str]:
    """The addresses that are not answered in time."""
    for address, call in look_ups.items():
        try:
            call.finish(PATIENCE_SECONDS)
        except LateError:
            yield address


def _look_up(address: str) -> None:
    """Ask for a name; that there is none is an answer too."""
    # Quickly refused is quick enough: torch then shows the number. torch asks by getnameinfo, of
    # which this is the first half; the whole holds Python's lock in early releases of 3.11.
    with contextlib.suppress(OSError):
        socket.gethostbyaddr(f"::ffff:{address}")


def choose_sample(addresses: Sequence[str]) -> list[str]:
    """A few addresses, spread over all."""
    if len(addresses) <= SAMPLE:
        return list(addresses)
    return [addresses[index * (len(addresses) - 1) // (SAMPLE - 1)] for index in range(SAMPLE)]


def judge_look_ups(unanswered: Sequence[str]) -> Finding:
    if not unanswered:
        return passed(REVERSE_LOOK_UPS, f"answered within {PATIENCE_SECONDS:g} s")
    return warned(
        REVERSE_LOOK_UPS,
        f"no answer within {PATIENCE_SECONDS:g} s for {', '.join(unanswered)}: each rank that "
        "connects to the store may wait 5 to 10 s",
        "Have DNS answer for the nodes' addresses, or put them into /etc/hosts, also in the form "
        "::ffff:a.b.c.d",
    )
