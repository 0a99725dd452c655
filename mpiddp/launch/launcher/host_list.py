"""Lists of hosts, and how many ranks each takes, as launchers and schedulers write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpiddp.launch.launcher.hostnames import expand_hostnames

HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A name or an IPv4 address; never one that ssh would read as an option."""
IPV6 = re.compile(r"\[?(?:[0-9A-Fa-f]*:){2}[0-9A-Fa-f:.]*")
COUNTS = re.compile(r"(?:slots|cpu|ppn)=(\d+)")
"""Open MPI's, old LAM's and PBS's words for the number of ranks."""
PASSED_OVER = re.compile(r"(?:max[_-]?slots|maxprocs|sockets?|cores|binding|if|user)=\S+")


@dataclass(frozen=True)
class Host:
    """One machine of a list."""

    name: str
    slots: int | None = None
    """Ranks that it takes; None if the list does not say."""


@dataclass(frozen=True)
class HostList:
    """Hosts, each once."""

    hosts: tuple[Host, ...]
    name: str
    """The option, scheduler or setting that they come from, for messages."""
    is_firm: bool = True
    """Whether no host takes more ranks than the list says, even if more are asked for."""
    note: str = ""
    """What is worth telling of it."""


def read_hosts(text: str) -> HostList:
    """``a:4,b:4``, ``a,b`` or ``node[1-3]:2``. Raises ValueError for anything else."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not items or ",".join(items) != text:
        raise ValueError(f"expected hosts as in a:4,b:4 or node[1-3]:2, found {text!r}")
    return HostList(join(host for item in items for host in _read_item(item)), "--hosts")


def _read_item(item: str) -> Iterator[Host]:
    name, colon, count = item.strip().partition(":")
    try:
        names = expand_hostnames(name)
    except ValueError:
        names = ()
    if IPV6.match(item.strip()):
        raise ValueError(
            f"expected a name or an IPv4 address, found {item.strip()!r}: launchers take what "
            "follows a colon for a number of ranks; give the host a name in /etc/hosts"
        )
    if "@" in name:
        user, _, host = name.partition("@")
        raise ValueError(
            f"expected a host, found {name!r}: write {host}'s user, {user}, into ~/.ssh/config"
        )
    is_count = re.fullmatch(r"[1-9][0-9]{0,6}", count) if colon else True
    if not is_count or not names or not all(map(HOST.fullmatch, names)):
        raise ValueError(
            f"expected a host, or HOST:N with N ranks from 1 on, with commas between hosts, found "
            f"{item.strip()!r}"
        )
    yield from (Host(each, int(count) if count else None) for each in names)


def read_lines(text: str) -> tuple[Host, ...]:
    """A host a line: ``a``, ``a:4``, ``a slots=4``, ``node[1-3]``, Grid Engine's ``a 4 all.q``.

    Raises ValueError that names the line.
    """
    found: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            found += _read_line(words) if words else ()
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not found:
        raise ValueError("it names no host")
    return tuple(found)


def _read_line(words: list[str]) -> Iterator[Host]:
    name, *rest = words
    slots = None
    if rest and rest[0].isdigit():
        # Grid Engine's: what follows are a queue and processors.
        slots, rest = int(rest[0]), []
    for word in rest:
        if match := COUNTS.fullmatch(word):
            slots = int(match[1])
        elif not PASSED_OVER.fullmatch(word):
            raise ValueError(f"expected a host, HOST:N or HOST slots=N, found {' '.join(words)!r}")
    for host in _read_item(name):
        if slots != 0:
            yield Host(host.name, host.slots if slots is None else slots)


def read_pairs(text: str) -> tuple[Host, ...]:
    """LSF's ``a 4 b 2``. Raises ValueError."""
    words = text.split()
    if not words or len(words) % 2 or not all(map(str.isdigit, words[1::2])):
        raise ValueError(f"expected a host and a number, by turns, found {text!r}")
    pairs = zip(words[::2], words[1::2], strict=True)
    return tuple(host for name, count in pairs for host in _read_item(f"{name}:{count}"))


def join(hosts: Iterable[Host], *, each: int | None = None) -> tuple[Host, ...]:
    """Each host once, with the ranks of all its places in the list.

    A place without a number is for one rank if the host has several, and else for ``each``; None
    leaves that open.
    """
    places: dict[str, list[int | None]] = {}
    for host in hosts:
        places.setdefault(host.name, []).append(host.slots)
    return tuple(
        Host(name, each if found == [None] else sum(count or 1 for count in found))
        for name, found in places.items()
    )
