"""Names of hosts: whether two are one host's, and Slurm's short form of lists, both ways."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from mpiddp.wording import fold_numbers

MOST = 1 << 16
"""Hosts of one short form, as in Slurm. More are a slip, and would fill the memory."""


def is_host(name: str, hostname: str) -> bool:
    """Whether ``name`` is the name of the host that calls itself ``hostname``.

    One may be the other's short form: ``node1`` is ``node1.cluster.local``, which is not
    ``node1.elsewhere``. ``name`` may be a shell pattern, such as ``node*``. Upper and lower case
    are the same.
    """
    name, hostname = name.casefold(), hostname.casefold()
    if fnmatch.fnmatchcase(hostname, name):
        return True
    have_domains = "." in name and "." in hostname
    short_name, short_hostname = name.partition(".")[0], hostname.partition(".")[0]
    return not have_domains and fnmatch.fnmatchcase(short_hostname, short_name)


def fold_hostnames(names: Sequence[str]) -> str:
    """Slurm's short form: ``node001, node002, node003, login`` → ``login,node[001-003]``."""
    found = {name: _cut_at_number(name) for name in names}
    padded = {
        (cut[0], len(cut[1]), cut[2]) for cut in found.values() if cut and re.match("0.", cut[1])
    }
    groups: dict[tuple[str, int, str], list[int]] = {}
    for prefix, digits, suffix in filter(None, found.values()):
        key = (prefix, len(digits), suffix)
        key = key if key in padded else (prefix, 1, suffix)
        groups.setdefault(key, []).append(int(digits))
    folded = [
        f"{prefix}{_bracket(fold_numbers(numbers, width=width))}{suffix}"
        for (prefix, width, suffix), numbers in groups.items()
    ]
    return ",".join(sorted(name for name, cut in found.items() if not cut) + sorted(folded))


def _cut_at_number(name: str) -> tuple[str, str, str] | None:
    """What stands before the last number of an address, or of the name proper, and behind it.

    Those of a domain are all alike.
    """
    match = re.fullmatch(r"((?:\d+\.){3})(\d+)()", name) or re.fullmatch(
        r"([^.]*?)(\d+)([^\d.]*(?:\..*)?)", name
    )
    return (match[1], match[2], match[3]) if match else None


def _bracket(folded: str) -> str:
    return folded if folded.isdigit() else f"[{folded}]"


def expand_hostnames(text: str) -> tuple[str, ...]:
    """The hosts of a short form: ``login,node[001-003]`` → ``login, node001, node002, node003``.

    Raises ValueError if it is none.
    """
    found: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        found.extend(_expand_item(item))
    if not found:
        raise ValueError(f"no host in {text!r}")
    return tuple(found)


def _expand_item(item: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if match is None:
        return [item]
    numbers: list[str] = []
    # A name may hold several brackets, as that of a rack and of a node in it.
    rests = _expand_item(match[3])
    for part in match[2].split(","):
        low, _, high = part.partition("-")
        width, found = len(low), range(int(low), int(high or low) + 1)
        if (len(numbers) + found.stop - found.start) * len(rests) > MOST:
            raise ValueError(f"{item} is more than {MOST} hosts")
        numbers += [f"{number:0{width}d}" for number in found]
    return [f"{match[1]}{number}{rest}" for number in numbers for rest in rests]
